"""Tests that others wrote, and the comparison with llama.cpp as others published it. Run: make test-upstream."""
