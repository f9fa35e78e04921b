"""Copied beside llama-cpp-python's tests: gives every model that they load an expert cache, if the mode says so.

Modes (HOTMOE_SUITE_MODE): ``class``: hotmoe.Llama as it is; ``pool``: hotmoe.Llama with a cache on the simulated device;
``attach``: the installed llama_cpp.Llama, to which a cache is attached.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

import hotmoe

MODE = os.environ["HOTMOE_SUITE_MODE"]
SLOTS = 4  # of 40 experts, 4 per token: decode evicts, prompts take the stock path

if MODE == "attach":
    os.environ["LLAMA_CPP_LIB_PATH"] = hotmoe.lib_path()

import llama_cpp  # noqa: E402 - the variable must be set before

caches: list[Any] = []
seen = {"events": 0, "evictions": 0, "models": 0}


def count(cache: Any) -> None:
    """Add up a cache's counters while it lives."""
    total = cache.stats().total
    seen["events"] += total.events
    seen["evictions"] += total.evictions


class Pooled(llama_cpp.Llama):
    """The class under test, with a cache unless only the vocabulary is loaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("vocab_only"):
            super().__init__(*args, **kwargs)
            return
        cache = hotmoe.ExpertCache(slots=SLOTS)
        if MODE == "pool":
            super().__init__(*args, expert_cache=cache, **kwargs)
        else:
            with hotmoe.expert_placement():
                super().__init__(*args, n_gpu_layers=-1, **kwargs)
            hotmoe.attach(self, cache)
        self._stack.callback(count, cache)  # before the cache goes
        caches.append(self)
        seen["models"] += 1


if MODE in {"pool", "attach"}:
    hotmoe.sim.load(1, mib=512)
    llama_cpp.Llama = Pooled


@pytest.fixture(autouse=True)
def close_models() -> Any:
    """Close what a test has loaded, as leaving its scope would, and count."""
    yield
    while caches:
        caches.pop().close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"pool: {seen['models']} models, {seen['events']} events, {seen['evictions']} evictions")
