"""Stands in for scipy, of which the suite imports one function."""
