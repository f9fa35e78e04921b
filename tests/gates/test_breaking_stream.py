"""Tests of the tests of streaming: break what feeds the CPU, waves and tiers on purpose; the gates must notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import hotmoe
from hotmoe._native import lib
from tests.models import cached_model
from tests.streams import Streamed, pieces

SIZES = [*pieces(60, 20, 4), 1, 1, 1, 2, 1]
SIM = ("SIM0",)


@pytest.fixture(scope="module", params=[(), SIM], ids=["CPU", "SIM"])
def model(request: pytest.FixtureRequest, sim: Any) -> Iterator[Streamed]:
    hotmoe.sim.set_strict(0)
    with Streamed.load(cached_model(arch="qwen3moe", quant="Q4_K", scales=True), request.param, n_ctx=512, n_ubatch=128) as found:
        found.expect(SIZES)
        yield found


def notice(
    model: Streamed, fault: str, slots: int, host_slots: int, mode: int = 0, sizes: list[int] = SIZES, policy: str = "lru"
) -> str:
    """Return what a cell says under a fault, "" if it goes unnoticed."""
    hotmoe.sim.set_strict(mode, 3)
    try:
        with model.pool(slots, host_slots, policy=policy) as pool:
            pool.set_fault(getattr(lib, f"HOTMOE_FAULT_{fault}"))
            try:
                return model.check(pool, sizes)
            except RuntimeError as error:
                return str(error)
    finally:
        hotmoe.sim.set_strict(0)


def test_intact(model: Streamed) -> None:
    for mode in (0, 1, 2):
        assert not notice(model, "NONE", 9, 5, mode)


@pytest.mark.parametrize("fault", ["WAVE_ROWS", "WAVE_SLOTS", "WAVE_TABLE", "SLOT_MAP", "STALE_TABLE", "NO_UPLOAD", "STATUS"])
def test_broken(model: Streamed, fault: str) -> None:
    if model.on_cpu and fault in ("WAVE_ROWS", "WAVE_TABLE", "SLOT_MAP", "STALE_TABLE"):
        pytest.skip("the CPU takes an expert from where it is: no waves, and no table to go wrong")
    found = notice(model, fault, 9, 9 if model.on_cpu else 5)
    assert "logits differ" in found or "llama_decode returned" in found, f"{fault} went unnoticed: {found}"


def test_read_that_is_not_waited_for(model: Streamed) -> None:
    """The pool's own reads; host slots are filled before anything is queued from them."""
    found = notice(model, "READ_LOST", 9, 9)
    assert ("logits differ" in found) == model.on_cpu


def test_slot_of_an_expert_that_computes(model: Streamed) -> None:
    """What computes may not be overwritten; on a device nothing is read ahead."""
    found = notice(model, "REUSE_EARLY", 9, 9)
    assert ("logits differ" in found) == model.on_cpu, found


@pytest.mark.parametrize("mode", [1, 2])
def test_host_slots_that_are_filled_too_early(model: Streamed, mode: int) -> None:
    if not model.on_cpu:  # it has no tier 2
        assert "logits differ" in notice(model, "TIER2_REUSE", 9, 4, mode)


def test_residents_last(model: Streamed) -> None:
    """Exact all the same, but experts are read again in one ubatch: that is for test_waves.py to notice."""
    from tests.gates import test_waves

    assert "logits" not in notice(model, "WAVE_ORDER", 9, 9)
    if model.on_cpu:
        with pytest.raises(AssertionError):
            test_waves.test_resident_experts_are_used_before_they_must_go(_Faulty(model, "WAVE_ORDER"))


class _Faulty:
    """Stands for a model, with a fault in every pool."""

    def __init__(self, model: Streamed, fault: str) -> None:
        self.streamed, self._model, self._fault = model.streamed, model, getattr(lib, f"HOTMOE_FAULT_{fault}")

    def pool(self, *args: Any, **options: Any) -> Any:
        pool = self._model.pool(*args, **options)
        pool.set_fault(self._fault)
        return pool
