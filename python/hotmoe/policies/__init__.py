"""Eviction and admission policies: what one written in Python derives from, and how it gets a name."""

from __future__ import annotations

from .base import AdmissionPolicy, EvictionPolicy, ScorePolicy
from .registry import register_admission, register_policy

__all__ = ["AdmissionPolicy", "EvictionPolicy", "ScorePolicy", "register_admission", "register_policy"]
