"""Three tiers: device slots, host slots, file. Exact on a simulated device in every strict mode, and the counters add up.

Device memory is poisoned, and modes 1 and 2 run queued work as late, or in as random an order, as the API allows: a host slot
that is filled anew before its upload has left, or a slot that is overwritten while a wave computes, shows as wrong logits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hotmoe
from hotmoe._native import ffi, lib
from hotmoe._vendor.llama_cpp import llama_cpp as ll
from tests.gates.test_exactness import LAYOUTS
from tests.gates.test_lora import use_adapter, write_adapter
from tests.gates.test_runs import CASES
from tests.harness import ALL, Pool, Runner, equal_bits, tokens_for
from tests.models import cached_model
from tests.streams import Streamed, pieces, routed, run_pieces, touched

PATH = {"arch": "olmoe", "quant": "Q4_K"}
SIM = ("SIM0",)


@contextmanager
def strict(mode: int, seed: int = 5) -> Iterator[None]:
    hotmoe.sim.set_strict(mode, seed)
    try:
        yield
    finally:
        hotmoe.sim.set_strict(0)


def check_in_all_modes(model: Streamed, cells: list[tuple[int, int, list[int]]], sim: Any, cell_count: list[int]) -> None:
    """Check cells of (slots, host slots, ubatches) in the three modes."""
    sim.reset_counters(0)
    for _, _, sizes in cells:
        model.expect(sizes)
    model_repeats_ids = sim.counters(0).n_dup_ids > 0  # a group of experts, for two of a token's experts
    for mode in (0, 1, 2):
        with strict(mode):
            sim.reset_counters(0)
            for slots, host_slots, sizes in cells:
                with model.pool(slots, host_slots) as pool:
                    wrong = model.check(pool, sizes)
                    assert not wrong, f"mode {mode}, {slots} slots, {host_slots} host slots, {sizes}: {wrong}"
                    for bank in map(pool.bank, range(pool.n_banks)):
                        assert (bank.n_slots, bank.host_slots) == (min(slots, bank.n_expert), min(host_slots, bank.n_expert))
                cell_count[0] += 1
            counters = sim.counters(0)
            assert counters.n_kernels > 0, "nothing ran on the simulated device"
            assert (counters.n_deferred > 0) == (mode > 0), "the strict mode had no effect"
            assert counters.n_failed == 0
            assert counters.n_dup_ids == 0 or model_repeats_ids


@pytest.fixture(scope="module")
def olmoe(sim: Any) -> Iterator[Streamed]:
    with Streamed.load(cached_model(**PATH), SIM) as found:
        yield found


def test_sizes_of_both_tiers(olmoe: Streamed, sim: Any, cell_count: list[int]) -> None:
    """Few slots over many host slots, the other way round, and all of both; with waves and without."""
    cells = [
        (slots, host, pieces(40, ubatch, 4))
        for slots, host in ((4, 4), (4, 5), (5, 4), (4, 39), (13, 4), (13, 7), (13, 30), (39, 4), (40, 40))
        for ubatch in (1, 3, 40)
    ]
    check_in_all_modes(olmoe, cells, sim, cell_count)


@pytest.mark.parametrize("slots", [4, 7, 20])
def test_large_ubatches(slots: int, olmoe: Streamed, sim: Any, cell_count: list[int]) -> None:
    """Of 512 tokens, and of more than 32, at which ops on host weights move to a device by themselves."""
    cells = [(slots, host, pieces(n, 512, 2)) for host in (4, 16) for n in (slots // 4, 3 * slots, 33, 512)]
    check_in_all_modes(olmoe, cells, sim, cell_count)


@pytest.mark.parametrize("case", CASES)
def test_architectures(case: str, sim: Any, cell_count: list[int]) -> None:
    with Streamed.load(cached_model(**CASES[case]), SIM, n_ctx=256, n_ubatch=64) as model:
        cells = [(5, 4, pieces(24, 8, 2)), (9, 13, pieces(24, 24, 2)), (39, 39, pieces(6, 1, 0))]
        check_in_all_modes(model, cells, sim, cell_count)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quant", ["Q2_K", "Q6_K", "Q8_0", "F16"])
def test_quantisations(layout: str, quant: str, sim: Any, cell_count: list[int]) -> None:
    with Streamed.load(cached_model(quant=quant, **LAYOUTS[layout]), SIM, n_ctx=256, n_ubatch=64) as model:
        check_in_all_modes(model, [(7, 6, pieces(60, 60, 2))], sim, cell_count)


def test_layers_on_two_devices_and_on_the_cpu(sim: Any, cell_count: list[int]) -> None:
    """Each with its own pools and its own waves (CASE 14); the CPU's layers compute from their host slots."""
    path = cached_model(**PATH, n_layer=6)
    tokens = tokens_for(46, 512)

    def run(runner: Runner) -> Any:
        return runner.run(tokens[:40], 40).tobytes() + b"".join(runner.decode([t]).tobytes() for t in tokens[40:])

    options: dict[str, Any] = {"devices": ("SIM0", "SIM1"), "gpu_layers": 5, "extra_bufts": False}
    with Runner(path, mmap=False, **options) as resident, Runner(path, stream=True, **options) as streamed:
        expected = run(resident)
        for mode in (0, 1, 2):
            with strict(mode), Pool(streamed, "5/9", host_slots="6s") as pool:
                rows = [pool.bank(i) for i in range(pool.n_banks)]
                assert {ffi.string(row.device).decode(): row.n_slots for row in rows} == {"CPU": 6, "SIM0": 5, "SIM1": 9}
                assert [row.host_slots for row in rows] == [0 if ffi.string(row.device) == b"CPU" else 6 for row in rows]
                assert run(streamed) == expected
                assert all(pool.stats(i).waves > 0 for i in range(pool.n_banks))
            cell_count[0] += 1


def test_a_device_hit_needs_no_host_copy(olmoe: Streamed) -> None:
    """Tier 2 is asked for device misses only, and an event's misses may be more than it holds."""
    with olmoe.pool(40, 4, record=True) as pool:
        run_pieces(olmoe.streamed, [100])
        n = sum(len(experts) for _, experts in touched(pool))
        first = pool.store()
        assert n > 2 * 30
        assert (first.host_hits, first.host_misses) == (0, n)
        assert first.host_evictions == n - 4 * pool.n_banks
        assert first.bytes == n * pool.bank(0).expert_bytes
        missed = pool.stats().misses
        run_pieces(olmoe.streamed, [100])
        assert pool.stats().misses == missed
        again = pool.store()
        assert again.bytes == first.bytes
        assert again.host_misses == n


def test_host_slots_save_reads(olmoe: Streamed) -> None:
    """What the device has no slot for is uploaded from host memory, and read once."""
    with olmoe.pool(4, 40) as pool:
        for _ in range(3):
            run_pieces(olmoe.streamed, [1] * 60)
        got, store = pool.stats(), pool.store()
        resident = sum(e >= 0 for i in range(pool.n_banks) for e in pool.slot_map(i))
        assert store.host_misses <= 40 * pool.n_banks
        assert store.bytes == store.host_misses * pool.bank(0).expert_bytes
        assert store.host_hits == got.misses - store.host_misses > store.host_misses
        assert store.host_evictions == 0
        assert got.evictions == got.misses - resident


def test_plan_shows_all_tiers(olmoe: Streamed) -> None:
    with olmoe.pool(6, 11) as pool:
        for i in range(pool.n_banks):
            row = pool.bank(i)
            assert row.streamed
            assert (row.n_slots, row.host_slots) == (6, 11)
            assert row.host_bytes >= 11 * row.expert_bytes
            assert row.pool_bytes >= (6 + 1) * row.expert_bytes  # and a slot for what is left over of a wave's room


def test_warmup_reads_nothing(olmoe: Streamed) -> None:
    """CASE 30. What warm-up computes is of no use; it touches neither the file nor the counters."""
    sizes = [1, 20, 1]
    for slots in (4, 40):
        with olmoe.pool(slots, 4) as pool:
            for n in (1, 100):
                olmoe.streamed.reset()
                ll.llama_set_warmup(olmoe.streamed.ctx, True)
                olmoe.streamed.decode(tokens_for(n, olmoe.streamed.n_vocab))
                ll.llama_set_warmup(olmoe.streamed.ctx, False)
            got, store = pool.stats(), pool.store()
            assert (got.events, got.misses, got.waves, store.bytes, pool.steps().steps) == (0, 0, 0, 0, 0)
            assert set(pool.slot_map(0)) == {-1}
            assert not olmoe.check(pool, sizes)


@pytest.mark.parametrize("devices", [(), SIM], ids=["CPU", "SIM"])
def test_lora(devices: tuple[str, ...], tmp_path: Path, sim: Any) -> None:
    """Adapters on expert tensors are indexed by the expert, also for pairs of another wave (CASE 5)."""
    write_adapter(tmp_path / "adapter.gguf", "olmoe", 2)
    sizes = pieces(60, 20, 4)
    with Streamed.load(cached_model(arch="olmoe", quant="Q8_0"), devices, n_ctx=256, n_ubatch=64) as model:
        plain = model.expect(sizes)
        model.expected.clear()
        for runner in (model.resident, model.streamed):
            use_adapter(runner, tmp_path / "adapter.gguf")
        assert not equal_bits(model.expect(sizes), plain), "the adapter has no effect"
        for mode in (0, 1, 2):
            with strict(mode):
                for slots in (4, 9, 39):
                    with model.pool(slots, 5 if devices else None) as pool:
                        assert not model.check(pool, sizes), f"{slots} slots, mode {mode}"


def test_eval_callback_is_refused(sim: Any) -> None:
    """There is no other path for streamed experts, and a callback would see slot ids."""

    @ll.ggml_backend_sched_eval_callback
    def callback(tensor: int, ask: bool, user_data: int) -> bool:
        return not ask

    for devices in ((), SIM):
        with (
            Runner(cached_model(**PATH), devices=devices, stream=True, cb_eval=callback) as runner,
            Pool(runner, 8, host_slots="8s") as pool,
        ):
            for n in (1, 40):
                with pytest.raises(RuntimeError, match="llama_decode returned"):
                    runner.decode(tokens_for(n, runner.n_vocab))
            assert pool.stats().events == 0
            assert pool.store().bytes == 0


@pytest.mark.parametrize("devices", [(), SIM], ids=["CPU", "SIM"])
def test_contexts_over_one_model(devices: tuple[str, ...], sim: Any) -> None:
    """Interleaved, each with pools of its own, over the same readers: each equals its solo run (CASE 7)."""
    prompt, n = 30, 12
    with Streamed.load(cached_model(**PATH), devices, n_ctx=256, n_ubatch=64) as model:
        expected = [model.expect(pieces(prompt, prompt, n), seed).tobytes() for seed in (1, 2)]
        for mode in (0, 1, 2):
            with strict(mode), Runner.sharing(model.streamed) as other:
                runners = (model.streamed, other)
                with Pool(runners[0], 5, host_slots="6s") as first, Pool(runners[1], 9, host_slots="13s") as second:
                    got = [b"", b""]
                    tokens = [tokens_for(prompt + n, other.n_vocab, seed) for seed in (1, 2)]
                    for runner in runners:
                        runner.reset()
                    for begin, end in ((0, prompt), *((i, i + 1) for i in range(prompt, prompt + n))):
                        for k in (0, 1):
                            got[k] += runners[k].decode(tokens[k][begin:end]).tobytes()
                    assert got == expected
                    stores = [pool.store() for pool in (first, second)]
                    assert stores[0].bytes == stores[1].bytes > 0, "the readers are not shared"
                    assert all(pool.stats().waves > 0 and pool.stats().evictions > 0 for pool in (first, second))


@pytest.mark.parametrize("devices", [(), ("SIM0", "SIM1")], ids=["CPU", "SIM"])
def test_contexts_in_two_threads(devices: tuple[str, ...], sim: Any) -> None:
    sizes = pieces(30, 30, 60)
    with (
        Streamed.load(cached_model(**PATH), devices[:1], n_ctx=256, n_ubatch=64) as model,
        Runner.sharing(model.streamed) as other,
    ):
        expected = [model.expect(sizes, seed) for seed in (1, 2)]
        runners = (model.streamed, other)
        with Pool(runners[0], 5, host_slots="6s") as first, Pool(runners[1], 4, host_slots="4s") as second:
            got: list[Any] = [[], []]

            def work(k: int) -> None:
                got[k].extend(run_pieces(runners[k], sizes, k + 1) for _ in range(3))

            threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for k in (0, 1):
                assert len(got[k]) == 3
                assert all(equal_bits(run, expected[k]) for run in got[k])
            assert all(pool.stats().evictions > 0 for pool in (first, second))


@pytest.mark.parametrize("devices", [(), SIM], ids=["CPU", "SIM"])
def test_without_a_cache_nothing_is_computed(devices: tuple[str, ...], sim: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A status and a message; and the next cache finds all as before."""
    with Streamed.load(cached_model(**PATH), devices, n_ctx=256, n_ubatch=64) as model:
        sizes = [8, 40, 1]
        for _ in range(2):
            for n in (1, 8, 64):
                with pytest.raises(RuntimeError, match="llama_decode returned"):
                    model.streamed.decode(tokens_for(n, model.streamed.n_vocab))
            assert "without its experts" in capfd.readouterr().err
            with model.pool(6, 5) as pool:
                assert not model.check(pool, sizes)


@pytest.mark.parametrize("devices", [(), SIM], ids=["CPU", "SIM"])
def test_parallel_sequences(devices: tuple[str, ...], sim: Any) -> None:
    """One token of each of 16 sequences: a decode step that needs waves (CASE 12)."""
    n_seq, n_steps, logits = 16, 6, []
    options: dict[str, Any] = {"devices": devices, "n_seq_max": n_seq, "n_ctx": 512, "extra_bufts": False}
    with (
        Runner(cached_model(**PATH), mmap=False, **options) as resident,
        Runner(cached_model(**PATH), stream=True, **options) as st,
        Pool(st, 5, host_slots="9s") as pool,
    ):
        tokens = tokens_for(n_seq * n_steps, st.n_vocab)
        for runner in (resident, st):
            out = []
            for step in range(n_steps):
                runner.fill([(tokens[step * n_seq + s], step, s) for s in range(n_seq)])
                assert ll.llama_decode(runner.ctx, runner.batch) == 0
                out += [ffi.buffer(ffi.cast("char *", _row(runner, i)), 4 * runner.n_vocab)[:] for i in range(n_seq)]
            logits.append(out)
        assert logits[0] == logits[1]
        decode = pool.stats(phase=lib.HOTMOE_PHASE_DECODE)
        assert decode.events == n_steps * pool.n_banks
        assert decode.waves > decode.events


def _row(runner: Runner, i: int) -> int:
    import ctypes

    return ctypes.cast(ll.llama_get_logits_ith(runner.ctx, i), ctypes.c_void_p).value or 0


@pytest.mark.parametrize("devices", [(), SIM], ids=["CPU", "SIM"])
def test_step_without_outputs(devices: tuple[str, ...], sim: Any) -> None:
    """A ubatch of which nothing is asked leaves the last layer without a token (CASE 3); the layers before it run in waves."""
    with Streamed.load(cached_model(**PATH), devices, n_ctx=256, n_ubatch=64) as model:
        tokens = tokens_for(90, model.streamed.n_vocab)
        expected = model.expect([40, 40, 1, 9])[80:]
        for mode in (0, 1, 2):
            with strict(mode), model.pool(5, 7 if devices else None) as pool:
                model.streamed.reset()
                for start in (0, 40):
                    model.streamed.decode(tokens[start : start + 40], outputs=False)
                last = pool.stats(pool.n_banks - 1)
                assert (last.events, last.waves, last.misses) == (0, 0, 0)
                assert pool.stats(0).waves > 2
                got = model.streamed.decode(tokens[80:81]).tobytes() + model.streamed.decode(tokens[81:]).tobytes()
                assert got == expected.tobytes()


@pytest.mark.parametrize(("devices", "threads"), [((), 1), ((), 2), (SIM, 1)], ids=["CPU", "CPU-2", "SIM"])
def test_aborted_in_the_middle_of_an_event(devices: tuple[str, ...], threads: int, sim: Any) -> None:
    """Wherever a ubatch is given up (as by Ctrl-C): no slot stays taken, and what follows is exact (CASE 37)."""
    calls = [0, 0]  # so far, and when to stop

    @ll.ggml_abort_callback
    def stop(data: int) -> bool:
        calls[0] += 1
        return calls[0] == calls[1]

    sizes = [40, 1, 1]
    with Streamed.load(cached_model(**PATH), devices, n_ctx=256, n_ubatch=64) as model, model.pool(4, 4) as pool:
        for runner in (model.resident, model.streamed):
            ll.llama_set_n_threads(runner.ctx, threads, threads)
        model.expect(sizes)
        ll.llama_set_abort_callback(model.streamed.ctx, stop, None)
        n_aborted = 0
        for calls[1] in range(2, 400, 13):
            calls[0] = 0
            try:
                run_pieces(model.streamed, [40])
            except RuntimeError:
                n_aborted += 1
            calls[1] = 0
            assert equal_bits(run_pieces(model.streamed, sizes), model.expect(sizes)), f"aborted at {calls[0]}"
        ll.llama_set_abort_callback(model.streamed.ctx, ll.ggml_abort_callback(), None)
        assert n_aborted > 3 or devices, "nothing was aborted"
        pool.clear()
        assert equal_bits(run_pieces(model.streamed, sizes), model.expect(sizes))


def test_trace_is_that_of_a_resident_run(sim: Any) -> None:
    """Waves are no events of their own: the routing is recorded once, in the order of the tokens."""
    sizes = pieces(40, 40, 3)
    with (
        Runner(cached_model(**PATH), devices=(), extra_bufts=False, cpu_moe=ALL) as mapped,
        Pool(mapped, 0, record=True, strict=False) as pool,
    ):
        run_pieces(mapped, sizes)
        expected = routed(pool)
    with Streamed.load(cached_model(**PATH), n_ctx=256, n_ubatch=64) as model:
        for slots in (4, 13, 40):
            with model.pool(slots, record=True) as pool:
                run_pieces(model.streamed, sizes)
                assert routed(pool) == expected
