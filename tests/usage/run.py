"""Run all scripts on one package, in a process of its own, and print what they returned as JSON.

Usage: python -m tests.usage.run llama_cpp|hotmoe SLOTS MODEL ADAPTER      SLOTS: 0 for no pool
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import hotmoe
from tests.usage.scripts import SCRIPTS


class Arm:
    """One package, with or without a pool."""

    def __init__(self, package: str, slots: int, model: str, adapter: str) -> None:
        self.package, self.slots, self.model, self.adapter = package, slots, model, adapter
        self.api = importlib.import_module("llama_cpp" if package == "llama_cpp" else "hotmoe.llama_cpp")
        self.pooled_events = 0

    @contextlib.contextmanager
    def load(self, *, adapter: bool = False, **options: Any) -> Iterator[Any]:
        options = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "n_gpu_layers": -1, "verbose": False, **options}
        if adapter:
            options["lora_path"] = self.adapter
        cache = hotmoe.ExpertCache(slots=self.slots)
        if self.package == "llama_cpp":
            with hotmoe.expert_placement():
                llm = self.api.Llama(self.model, **options)
            assert not isinstance(llm, hotmoe.Llama)
            if self.slots:
                hotmoe.attach(llm, cache)
        else:
            llm = self.api.Llama(self.model, **options, **({"expert_cache": cache} if self.slots else {"cpu_moe": True}))
            assert isinstance(llm, hotmoe.Llama)
        with contextlib.closing(llm):
            yield llm
            if self.slots:
                self.pooled_events += cache.stats().total.events


def plain(value: Any) -> Any:
    """Return a value as JSON has it, without what differs from call to call."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items() if k not in ("id", "created", "model")}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value.item() if hasattr(value, "item") else value


def main() -> None:
    package, slots, model, adapter = sys.argv[1:]
    hotmoe.sim.load(1, mib=512)
    arm = Arm(package, int(slots), model, adapter)
    results, events = {}, {}
    for name, script in SCRIPTS.items():
        before = arm.pooled_events
        results[name] = plain(script(arm.api, arm.load))
        events[name] = arm.pooled_events - before
    leftover = hotmoe.sim.counters().allocated_bytes
    print(json.dumps({"results": results, "pooled_events": events, "device_bytes_left": leftover}))


if __name__ == "__main__":
    main()
