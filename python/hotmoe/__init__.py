"""Keep the hot experts of a mixture-of-experts model in fast memory between forward passes.

`Llama` is llama-cpp-python's class of the same name with one more argument:

    >>> from hotmoe import ExpertCache, Llama
    >>> llm = Llama("model.gguf", expert_cache=ExpertCache(slots="6GiB"))  # doctest: +SKIP
    >>> llm("Once upon a time", max_tokens=64)  # doctest: +SKIP
    >>> print(llm.expert_cache.plan, llm.expert_cache.stats().decode.hit_rate)  # doctest: +SKIP

Importing the package loads nothing heavy: numpy, llama.cpp and our own libraries come with the first use of a name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import sim
    from ._attach import attach, lib_path
    from ._libs import include_path
    from ._placement import expert_placement
    from .cache import ExpertCache
    from .errors import BusyError, HotmoeError, ModelLoadError, PlanError, PolicyError, StoreError
    from .llama import Llama
    from .policies import AdmissionPolicy, EvictionPolicy, ScorePolicy, register_admission, register_policy
    from .tiers import TierManager, register_tier_manager

__version__ = "0.1.0"

__all__ = [
    "AdmissionPolicy",
    "BusyError",
    "EvictionPolicy",
    "ExpertCache",
    "HotmoeError",
    "Llama",
    "ModelLoadError",
    "PlanError",
    "PolicyError",
    "ScorePolicy",
    "StoreError",
    "TierManager",
    "__version__",
    "attach",
    "expert_placement",
    "include_path",
    "lib_path",
    "register_admission",
    "register_policy",
    "register_tier_manager",
    "sim",
]

_HOMES = {  # name -> module that defines it; "" for a module of the package itself
    "AdmissionPolicy": "policies",
    "BusyError": "errors",
    "EvictionPolicy": "policies",
    "ExpertCache": "cache",
    "HotmoeError": "errors",
    "Llama": "llama",
    "ModelLoadError": "errors",
    "PlanError": "errors",
    "PolicyError": "errors",
    "ScorePolicy": "policies",
    "StoreError": "errors",
    "TierManager": "tiers",
    "attach": "_attach",
    "expert_placement": "_placement",
    "include_path": "_libs",
    "lib_path": "_attach",
    "register_admission": "policies",
    "register_policy": "policies",
    "register_tier_manager": "tiers",
    "sim": "",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{home or name}", __name__)
    value = getattr(module, name) if home else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
