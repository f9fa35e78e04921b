"""Eviction and admission policies: what one written in Python derives from, how it gets a name, and the built-in ones in Python.

The built-in policies that go by a name ("lru", ...) are native. The classes here are their twins: they decide the same and are
meant to be read, and to be copied by whoever writes a policy.
"""

from __future__ import annotations

from .base import AdmissionPolicy, EvictionPolicy, ScorePolicy
from .fifo import Fifo
from .ghost import Ghost
from .least_stale import LeastStale
from .lfru import Lfru
from .lfu import Lfu
from .lrfu import Lrfu
from .lru import Lru
from .random import Random
from .registry import register_admission, register_policy
from .s3fifo import S3Fifo
from .second_miss import SecondMiss
from .slru import Slru
from .static import Static

__all__ = [
    "AdmissionPolicy",
    "EvictionPolicy",
    "Fifo",
    "Ghost",
    "LeastStale",
    "Lfru",
    "Lfu",
    "Lrfu",
    "Lru",
    "Random",
    "S3Fifo",
    "ScorePolicy",
    "SecondMiss",
    "Slru",
    "Static",
    "register_admission",
    "register_policy",
]
