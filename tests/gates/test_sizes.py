"""Sizes: slots, bytes and auto; the plan says what they became, and what is too small is an error that says the minimum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hotmoe._native import ffi, lib
from tests.harness import ALL, Pool, Runner, run_script
from tests.models import cached_model

MIB = 1 << 20


@pytest.fixture(scope="module")
def runner(sim: Any) -> Iterator[Runner]:
    with Runner(cached_model(arch="olmoe", quant="Q4_K"), cpu_moe=ALL) as found:
        yield found


def n_slots(pool: Pool) -> set[int]:
    return {pool.bank(i).n_slots for i in range(pool.n_banks)}


def device_row(pool: Pool, i: int = 0) -> Any:
    row = ffi.new("struct hotmoe_plan_device *")
    assert lib.hotmoe_plan_get_device(pool.cache, i, row) == 0
    return row


@pytest.mark.parametrize(("size", "slots"), [("4", 4), ("39", 39), ("40", 40), ("999", 40)])
def test_slots(runner: Runner, size: str, slots: int) -> None:
    with Pool(runner, size) as pool:
        assert n_slots(pool) == {slots}


@pytest.mark.parametrize("unit", ["{}MiB", "{}M", "{} mb", "{}m"])
def test_bytes(runner: Runner, unit: str) -> None:
    with Pool(runner, unit.format(4)) as pool:
        banks = [pool.bank(i) for i in range(pool.n_banks)]
        used = sum(b.pool_bytes for b in banks)
        assert used <= 4 * MIB < used + 1.1 * sum(b.expert_bytes for b in banks)
        assert device_row(pool).pool_bytes == used


def test_auto_takes_what_is_free_less_headroom(runner: Runner) -> None:
    with Pool(runner, "auto") as pool:
        row = device_row(pool)
        assert row.headroom_bytes > 0
        assert n_slots(pool) == {40}
        assert row.pool_bytes <= row.free_bytes - row.headroom_bytes


@pytest.mark.parametrize("size", ["3", "300KiB", "1B"])
def test_below_the_minimum(runner: Runner, size: str) -> None:
    """CASE 9: checked before anything is allocated, with the minimum in the message."""
    pool = Pool(runner, size)
    assert pool.status == lib.HOTMOE_ERR_PLAN
    assert f'"{size}"' in pool.error
    assert "the minimum is 4 slots" in pool.error


@pytest.mark.parametrize("size", ["", "x", "-1", "1.5", "12QiB", "6GiBs", "auto/", "1e99", "nan", "0"])
def test_malformed(runner: Runner, size: str) -> None:
    pool = Pool(runner, size)
    assert pool.status == lib.HOTMOE_ERR_ARGUMENT
    assert 'size "' in pool.error


def test_auto_on_the_cpu_is_off_with_a_message(sim: Any) -> None:
    """CASES 15 and 26: a pool in the memory that holds the experts is made only if it is asked for by size."""
    with Runner(cached_model(arch="olmoe", quant="Q4_K"), devices=(), cpu_moe=ALL) as runner:
        pool = Pool(runner, "auto")
        assert pool.status == lib.HOTMOE_ERR_PLAN
        assert "same memory" in pool.error
        with Pool(runner, 8) as forced:
            assert device_row(forced).host_memory


SMALL_DEVICE = """
    import hotmoe
    hotmoe.sim.load(1, mib=48)
    from hotmoe._native import lib
    from tests.harness import ALL, Pool, Runner
    from tests.models import cached_model

    with Runner(cached_model(arch="olmoe", quant="F16", n_layer=4, n_expert=64), cpu_moe=ALL) as runner:
        before = hotmoe.sim.counters(0).allocated_bytes
        pool = Pool(runner, 64)
        assert pool.status == lib.HOTMOE_ERR_MEMORY, pool.status
        assert "64 slots" in pool.error, pool.error
        assert hotmoe.sim.counters(0).allocated_bytes == before
        with Pool(runner, "auto") as pool:
            assert 4 <= pool.bank(0).n_slots < 64
            runner.decode([300])
"""


def test_more_than_the_device_has() -> None:
    """A pool that does not fit is an error; nothing stays allocated, and a smaller one fits."""
    run_script(SMALL_DEVICE)
