"""Host memory behind a device's slots has a policy, an admission and counters of its own; the output is exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from bench._two_tiers import KINDS, run
from hotmoe._native import ffi, lib
from hotmoe.policies.registry import ADMISSIONS, POLICIES
from hotmoe.traces import DECODE, Trace
from hotmoe.traces.events import Events
from hotmoe.traces.trace import TraceBank
from tests.gates.test_stream import SIM, strict
from tests.harness import Pool, Runner
from tests.models import cached_model
from tests.streams import Streamed, pieces, routed, run_pieces

N_EXPERT = 40

NATIVE = [name if name != "static" else "static(pins=3 5 7 11)" for name in POLICIES.native()]


@pytest.fixture(scope="module")
def olmoe(sim: Any) -> Iterator[Streamed]:
    with Streamed.load(cached_model(arch="olmoe", quant="Q4_K"), SIM, n_ctx=512, n_ubatch=128) as found:
        yield found


@pytest.mark.parametrize(
    ("policy", "admission"),
    [
        *((policy, "always") for policy in NATIVE),
        *(("lru", name) for name in ADMISSIONS.native() if name != "always"),
        ("slru(protected=0.3)", "ghost(size=2)"),
    ],
)
@pytest.mark.parametrize("mode", [1, 2])
def test_exact(policy: str, admission: str, mode: int, olmoe: Streamed, cell_count: list[int]) -> None:
    with strict(mode):
        for slots, host_slots, sizes in ((5, 9, pieces(60, 20, 12)), (9, 5, pieces(40, 128, 12)), (7, 16, [1] * 40)):
            with olmoe.pool(slots, host_slots, host_policy=policy, host_admission=admission) as pool:
                wrong = olmoe.check(pool, sizes)
                assert not wrong, f"{slots} slots, {host_slots} host slots, {sizes}: {wrong}"
                store = pool.store()
                assert store.host_evictions > 0
                assert (store.host_not_admitted > 0) == (admission != "always")
                assert store.host_policy_fallbacks == 0
                assert names(pool) == (policy, admission)
            cell_count[0] += 1


def names(pool: Pool) -> tuple[str, str]:
    """Return what C says that the policy and the admission of host memory are."""
    return tuple(ffi.string(get(pool.cache)).decode() for get in (lib.hotmoe_cache_host_policy, lib.hotmoe_cache_host_admission))  # type: ignore[return-value]


def trace_of(events: Sequence[tuple[int, list[int]]], n_layer: int) -> Trace:
    """Return generated tokens, whose events were recorded layer after layer, as a trace."""
    return Trace(
        experts=np.array([ids for _, ids in events], np.int32),
        layer=np.array([layer for layer, _ in events], np.int32),
        token=np.arange(len(events), dtype=np.int32) // n_layer,
        phase=np.full(len(events), DECODE, np.uint8),
        banks=tuple(TraceBank(layer, 0, N_EXPERT, None) for layer in range(n_layer)),
    )


@pytest.mark.parametrize(("slots", "host_slots"), [(6, 13), (10, 8)])
def test_decides_as_a_replay_of_the_same_routing(slots: int, host_slots: int, olmoe: Streamed) -> None:
    """Which experts are read is what the slot maps of two tiers say: of these policies, and told what they ought to be told."""
    n_tokens = 150
    reads = {}
    for device, policy, admission in [
        *(("lru", policy, "always") for policy in NATIVE),
        *(("lru", "lfru", admission) for admission in ADMISSIONS.native() if admission != "always"),
        ("lfru", "lru", "always"),
        ("fifo", "lfru", "always"),
    ]:
        with olmoe.pool(slots, host_slots, policy=device, host_policy=policy, host_admission=admission, record=True) as pool:
            run_pieces(olmoe.streamed, [1] * n_tokens)
            trace = trace_of(routed(pool), pool.n_banks)
            store, got = pool.store(), pool.stats()
            sizes = [slots] * pool.n_banks, [host_slots] * pool.n_banks
        expected = run(trace, Events.of(trace), *sizes, "released", policy, admission=admission, device_policy=device)
        key = device, policy, admission
        assert (store.host_misses, got.misses) == (round(expected.reads * n_tokens), round(expected.uploads * n_tokens)), key
        reads[key] = store.host_misses
    assert len(set(reads.values())) > len(reads) // 2, f"the policies make no difference: {reads}"


@pytest.mark.parametrize("kind", ["apart", "inclusive", "demoted", "exclusive"])
def test_other_ways_would_be_told_apart(kind: str, olmoe: Streamed) -> None:
    """The test above is about something: what host memory keeps depends on what it is told of the device."""
    n_tokens = 150
    with olmoe.pool(10, 13, policy="lru", host_policy="lru", record=True) as pool:
        run_pieces(olmoe.streamed, [1] * n_tokens)
        trace = trace_of(routed(pool), pool.n_banks)
        misses = pool.store().host_misses
        sizes = [10] * pool.n_banks, [13] * pool.n_banks
    reads = {k: run(trace, Events.of(trace), *sizes, k, "lru", device_policy="lru").reads * n_tokens for k in (kind, "released")}
    assert kind in KINDS
    assert round(reads["released"]) == misses != round(reads[kind])


def test_defaults(olmoe: Streamed) -> None:
    with olmoe.pool(6, 11) as pool:
        assert names(pool) == ("lfru", "always")
    with Runner(cached_model(arch="olmoe", quant="Q4_K"), cpu_moe=-1) as mapped, Pool(mapped, 6) as pool:
        assert names(pool) == ("", "")


def test_counters_are_reset(olmoe: Streamed) -> None:
    with olmoe.pool(6, 7, host_admission="second-miss") as pool:
        run_pieces(olmoe.streamed, [20, 1, 1])
        fields = ("host_hits", "host_misses", "host_evictions", "host_not_admitted")
        assert all(getattr(pool.store(), name) > 0 for name in fields)
        pool.reset_stats()
        assert not any(getattr(pool.store(), name) for name in fields)


@pytest.mark.parametrize(
    ("what", "name", "says"),
    [
        ("host_policy", "mru", 'unknown policy "mru"; known policies: lru, slru'),
        ("host_policy", "lfru(half_life=0)", "half_life"),
        ("host_policy", "lib:/nonexistent.so", "/nonexistent.so"),
        ("host_admission", "never", 'unknown admission "never"; known admissions: always'),
    ],
)
def test_bad_names(what: str, name: str, says: str, olmoe: Streamed) -> None:
    pool = olmoe.pool(6, 7, **{what: name})
    assert pool.status == lib.HOTMOE_ERR_POLICY
    assert says in pool.error
    with olmoe.pool(6, 7) as pool:  # nothing is left of it
        assert not olmoe.check(pool, [8, 1])


@pytest.mark.parametrize(("what", "name"), [("host_policy", "lru"), ("host_admission", "ghost")])
def test_refused_without_a_tier(what: str, name: str, sim: Any) -> None:
    """Where the CPU computes from the host slots, and where nothing is streamed."""
    path = cached_model(arch="olmoe", quant="Q4_K")
    argument = what.removeprefix("host_")
    for options, says in (
        ({"devices": (), "stream": True}, f"the host slots are the pool, and there is no tier behind it: give it as {argument}"),
        ({"devices": SIM, "cpu_moe": -1}, "none are streamed"),
    ):
        with Runner(path, **options) as runner:  # type: ignore[arg-type]
            pool = Pool(runner, 6, host_slots="6s" if "stream" in options else "", **{what: name})  # type: ignore[arg-type]
            assert pool.status == lib.HOTMOE_ERR_ARGUMENT
            assert f'{what} "{name}"' in pool.error
            assert says in pool.error


def test_layers_on_the_cpu_have_no_second_tier(sim: Any) -> None:
    """With some layers there and some on a device, host memory's policy is that of the device's layers."""
    path = cached_model(arch="olmoe", quant="Q4_K", n_layer=6)
    options: dict[str, Any] = {"devices": SIM, "gpu_layers": 5, "extra_bufts": False}
    sizes = [30, *[1] * 20]
    with Runner(path, mmap=False, **options) as resident, Runner(path, stream=True, **options) as streamed:
        expected = run_pieces(resident, sizes)
        reads = []
        for host_policy in ("lru", "fifo"):
            with Pool(streamed, 5, policy="lru", host_slots="8s", host_policy=host_policy) as pool:
                assert {pool.bank(i).host_slots for i in range(pool.n_banks)} == {0, 8}
                assert run_pieces(streamed, sizes).tobytes() == expected.tobytes()
                on_cpu = [pool.stats(i).misses for i in range(pool.n_banks) if pool.bank(i).host_slots == 0]
                reads.append((sum(on_cpu), pool.store().host_misses))
    assert reads[0][0] == reads[1][0] > 0
    assert reads[0][1] != reads[1][1]
