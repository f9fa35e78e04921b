"""Eviction and admission policies: what one written in Python derives from, and readable twins of the built-in ones."""

from __future__ import annotations

from .base import AdmissionPolicy, EvictionPolicy, ScorePolicy

__all__ = ["AdmissionPolicy", "EvictionPolicy", "ScorePolicy"]
