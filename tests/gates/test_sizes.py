"""Sizes: slots, bytes and auto; the plan says what they became, and what is too small is an error that says the minimum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hotmoe._native import ffi, lib
from tests.harness import ALL, Pool, Runner, run_script, tokens_for
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


@pytest.mark.parametrize(
    "size", ["", "x", "-1", "1.5", "12QiB", "6GiBs", "auto/", "1e99", "1e5", "0x10", "1.0", "nan", "8//9", "0", "0/0"]
)
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


def test_minimum_of_layers_that_use_different_numbers(sim: Any) -> None:
    """The number of experts per token can differ by layer; each bank of the plan has its own."""
    with Runner(cached_model(arch="nemotron_h_moe"), cpu_moe=ALL) as runner:
        pool = Pool(runner, 3)
        assert pool.status == lib.HOTMOE_ERR_PLAN
        assert "the minimum is 4 slots" in pool.error
        with Pool(runner, 4) as pool:
            assert [pool.bank(i).n_expert_used for i in range(pool.n_banks)] == [4, 3]


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
            from tests.gates.test_sizes import MIB, device_row
            row = device_row(pool)
            assert row.headroom_bytes == 16 * MIB, row.headroom_bytes
            room = row.free_bytes - row.headroom_bytes
            assert room - 4 * pool.bank(0).expert_bytes < row.pool_bytes <= room
            assert 4 <= pool.bank(0).n_slots < 64
            runner.decode([300])
"""


def test_more_than_the_device_has() -> None:
    """A pool that does not fit is an error; nothing stays allocated, and a smaller one fits."""
    run_script(SMALL_DEVICE)


NO_ROOM_FOR_GRAPHS = """
    import hotmoe
    hotmoe.sim.load(1, mib=72)
    from hotmoe._native import lib
    from tests.gates.test_sizes import MIB
    from tests.harness import ALL, Pool, Runner, tokens_for
    from tests.models import cached_model

    path = cached_model(arch="olmoe", quant="Q4_K", n_layer=2, n_ff_exp=1024)
    with Runner(path, cpu_moe=ALL, n_ctx=1024, n_ubatch=1024, op_offload=False) as runner:
        before = hotmoe.sim.counters(0).allocated_bytes
        pool = Pool(runner, 40)
        assert pool.status == lib.HOTMOE_ERR_MEMORY, (pool.status, pool.error)
        assert "compute buffers" in pool.error, pool.error
        runner.decode(tokens_for(40, runner.n_vocab))
        assert hotmoe.sim.counters(0).allocated_bytes <= before
        with Pool(runner, 8) as small:
            runner.decode([300])
            assert small.stats().events == small.n_banks
"""


def test_room_for_the_graphs_is_tried_at_attach() -> None:
    """The compute buffers grow with the pool. If they do not fit, attach fails and all is as before; no decode aborts."""
    run_script(NO_ROOM_FOR_GRAPHS)


AUTO_GIVES_WAY = """
    import hotmoe
    hotmoe.sim.load(1, mib=80)
    from tests.gates.test_sizes import MIB, device_row
    from tests.harness import ALL, Pool, Runner, tokens_for
    from tests.models import cached_model

    path = cached_model(arch="olmoe", quant="Q4_K", n_layer=2, n_ff_exp=1024)
    with Runner(path, cpu_moe=ALL, n_ctx=1024, n_ubatch=1024, op_offload=False) as runner, Pool(runner, "auto") as pool:
        assert device_row(pool).headroom_bytes > 16 * MIB
        runner.decode([300])
        runner.decode(tokens_for(900, runner.n_vocab))
        assert pool.stats().events > 0
"""


def test_auto_leaves_room_for_the_graphs() -> None:
    run_script(AUTO_GIVES_WAY)


@pytest.mark.parametrize(
    ("size", "pooled"),
    [("auto", {"SIM0"}), ("8", {"SIM0"}), ("8MiB", {"SIM0"}), ("8/8", {"CPU", "SIM0"}), ("0/8", {"SIM0"}), ("8/0", {"CPU"})],
)
def test_layers_on_the_cpu(size: str, pooled: set[str], sim: Any) -> None:
    """One size is for the devices with memory of their own; the CPU's layers get a pool only by a value of their own."""
    model = cached_model(arch="olmoe", quant="Q4_K", n_layer=4)
    with Runner(model, cpu_moe=ALL, gpu_layers=3) as runner, Pool(runner, size, strict=False) as pool:
        rows = [pool.bank(i) for i in range(pool.n_banks)]
        assert {ffi.string(row.device).decode() for row in rows if row.n_slots} == pooled
        assert all(ffi.string(row.reason) for row in rows if not row.n_slots)
        runner.decode([300])
        assert pool.stats().events == sum(row.n_slots > 0 for row in rows)


def test_named_minimum_suffices(runner: Runner) -> None:
    message = Pool(runner, "300KiB").error
    minimum = message.rpartition("or ")[2].replace(" ", "")
    with Pool(runner, minimum) as pool:
        assert n_slots(pool) == {4}


def test_no_batch_needs_more_memory_than_was_reserved(runner: Runner, sim: Any) -> None:
    """Graphs of every size that the pool serves are reserved at attach, not only the largest and the smallest."""
    with Pool(runner, 36):
        before = sim.counters(0).allocated_bytes
        for n in (1, 2, 5, 9, 8, 3, 64, 9, 1):
            runner.reset()
            runner.decode(tokens_for(n, runner.n_vocab))
            assert sim.counters(0).allocated_bytes == before, f"{n} tokens"
