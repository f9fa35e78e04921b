"""Tests of the tests: break the cache on purpose; the exactness gate must notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import hotmoe
from hotmoe._native import lib
from tests.harness import ALL, Logits, Pool, Runner, equal_bits, tokens_for
from tests.models import cached_model

UBATCH = 3
SLOTS = 12


@pytest.fixture(scope="module")
def hosted(sim: Any) -> Iterator[tuple[Runner, list[int], Logits]]:
    path = cached_model(arch="olmoe", quant="Q4_K")
    hotmoe.sim.set_strict(0)
    with Runner(path) as offloaded, Runner(path, cpu_moe=ALL) as runner:
        tokens = tokens_for(24, runner.n_vocab)
        yield runner, tokens, offloaded.run(tokens, UBATCH)


def test_intact(hosted: tuple[Runner, list[int], Logits]) -> None:
    runner, tokens, expected = hosted
    with Pool(runner, SLOTS) as pool:
        assert equal_bits(runner.run(tokens, UBATCH), expected)
        assert pool.stats().evictions > 0


@pytest.mark.parametrize(
    "fault",
    ["HOTMOE_FAULT_STALE_TABLE", "HOTMOE_FAULT_SLOT_MAP", "HOTMOE_FAULT_PROTECTION", "HOTMOE_FAULT_NO_UPLOAD"],
)
def test_broken(hosted: tuple[Runner, list[int], Logits], fault: str) -> None:
    runner, tokens, expected = hosted
    # first in, first out: the oldest expert is often one that the event itself needs
    with Pool(runner, SLOTS, "fifo") as pool:
        pool.set_fault(getattr(lib, fault))
        assert not equal_bits(runner.run(tokens, UBATCH), expected), f"{fault} went unnoticed"


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_missing_wait(hosted: tuple[Runner, list[int], Logits], mode: int) -> None:
    """Only the strict modes can show that the read-back of the ids is waited for."""
    runner, tokens, expected = hosted
    hotmoe.sim.set_strict(mode, 3)
    try:
        with Pool(runner, SLOTS) as pool:
            pool.set_fault(lib.HOTMOE_FAULT_NO_WAIT)
            try:
                noticed = not equal_bits(runner.run(tokens, UBATCH), expected)
            except RuntimeError:  # the ids were no ids
                noticed = True
    finally:
        hotmoe.sim.set_strict(0)
    assert noticed == (mode > 0)


def test_failed_event_is_a_status(hosted: tuple[Runner, list[int], Logits]) -> None:
    """A hook that fails ends llama_decode with a status, aborts nothing, and the next run is exact again."""
    runner, tokens, expected = hosted
    with Pool(runner, SLOTS) as pool:
        runner.run(tokens, UBATCH)
        pool.set_fault(lib.HOTMOE_FAULT_STATUS)
        with pytest.raises(RuntimeError, match="llama_decode returned"):
            runner.decode(tokens[:UBATCH])
        pool.set_fault(lib.HOTMOE_FAULT_NONE)
        assert equal_bits(runner.run(tokens, UBATCH), expected)
        assert not pool.wrong_slots()
