"""Replay: against the live engine, against brute force, and against a plain reading of the rules."""

from __future__ import annotations

import itertools
from functools import cache as remember
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hotmoe
from hotmoe.cli.demo import shipped_model
from hotmoe.errors import ArgumentError, PolicyError
from hotmoe.policies import EvictionPolicy
from hotmoe.policies.registry import ADMISSIONS, POLICIES
from hotmoe.replay import BOUNDS, ReplayResult, replay, sweep
from hotmoe.traces import DECODE, PREFILL, Events, Trace, TraceBank
from hotmoe.traces.record import record
from tests.models import cached_model

SHARED = sorted((Path(__file__).parent / "traces").glob("*.csv"))


def _usable(kind: Any) -> list[str]:
    """Return the native names that need no options."""
    names = []
    for name in kind.native():
        try:
            kind.check(name)
            names.append(name)
        except PolicyError:
            pass
    return names


NATIVE, NATIVE_ADMISSIONS = _usable(POLICIES), _usable(ADMISSIONS)

Row = tuple[int, int, int, list[int]]


def make(rows: list[Row], n_expert: int = 8, n_layer: int = 0, **columns: Any) -> Trace:
    """Return a trace of (phase, token, layer, experts) rows."""
    k = max(len(experts) for *_, experts in rows)
    layers = range(n_layer) if n_layer else sorted({row[2] for row in rows})
    return Trace(
        phase=np.array([row[0] for row in rows]),
        token=np.array([row[1] for row in rows]),
        layer=np.array([row[2] for row in rows]),
        experts=np.array([row[3] + [-1] * (k - len(row[3])) for row in rows]),
        banks=tuple(TraceBank(layer, 0, n_expert, 1000 * (layer + 1)) for layer in layers),
        **columns,
    )


@st.composite
def conversations(draw: st.DrawFn, *, n_expert: int = 6, n_layer: int = 2, most_turns: int = 4, used: int = 2) -> Trace:
    """Traces of several prompts, each with some tokens and some generated ones."""
    experts = st.lists(st.integers(0, n_expert - 1), min_size=used, max_size=used, unique=True)
    rows: list[Row] = []
    prompts: list[int] = []
    for prompt in range(draw(st.integers(1, most_turns))):
        n_prompt, n_generated = draw(st.integers(0, 4)), draw(st.integers(1, 6))
        for token, layer in itertools.product(range(n_prompt + n_generated), range(n_layer)):
            rows.append((PREFILL if token < n_prompt else DECODE, token, layer, draw(experts)))
            prompts.append(prompt)
    return make(rows, n_expert, n_layer, prompt=np.array(prompts))


# ---- bounds ----


@given(trace=conversations(), slots=st.integers(2, 6), scope=st.sampled_from(["layer", "global"]))
@settings(deadline=None, max_examples=60)
@pytest.mark.filterwarnings("ignore:.*slots for all layers")
def test_nothing_beats_belady(trace: Trace, slots: int, scope: str) -> None:
    most = {bound: replay(trace, bound, slots=slots, scope=scope).decode.hits for bound in BOUNDS}
    assert most["belady"] <= most["belady-bypass"] <= most["unlimited"]
    for policy, admission in itertools.product(NATIVE, NATIVE_ADMISSIONS):
        assert replay(trace, policy, admission, slots=slots, scope=scope).decode.hits <= most["belady"]
        assert replay(trace, policy, admission, slots=slots, scope=scope, miss="cpu").decode.hits <= most["belady-bypass"]


def optimum(trace: Trace, n_slots: int, *, bypass: bool) -> int:
    """Return the most hits in generated tokens that any sequence of decisions gives, by trying all; one layer."""
    events = Events.of(trace)
    lists = [list(dict.fromkeys(e.tolist())) for e in np.split(events.experts, events.offsets[1:-1])]

    def outcomes(resident: frozenset[int], needed: list[int]) -> set[frozenset[int]]:
        if bypass:
            pool = resident | set(needed)
            return {frozenset(c) for n in range(min(n_slots, len(pool)) + 1) for c in itertools.combinations(sorted(pool), n)}
        states = {resident}
        for at in range(0, len(needed), n_slots):  # in waves
            wave = set(needed[at : at + n_slots])
            states = {
                frozenset(wave | set(kept))
                for state in states
                for n in range(n_slots - len(wave) + 1)
                for kept in itertools.combinations(sorted(state - wave), n)
            }
        return states

    @remember
    def best(i: int, resident: frozenset[int]) -> int:
        if i == len(lists):
            return 0
        hits = len(resident & set(lists[i])) if events.phase[i] == DECODE else 0
        return hits + max(best(i + 1, state) for state in outcomes(resident, lists[i]))

    return best(0, frozenset())


@given(trace=conversations(n_expert=5, n_layer=1, most_turns=2), slots=st.integers(2, 4))
@settings(deadline=None, max_examples=150)
def test_belady_equals_brute_force(trace: Trace, slots: int) -> None:
    for bypass in (False, True):
        result = replay(trace, "belady-bypass" if bypass else "belady", slots=slots)
        assert result.decode.hits == optimum(trace, slots, bypass=bypass)
        assert result.decode.loads <= result.decode.misses


def test_belady_loads_what_it_has_hits_from() -> None:
    trace = make([(DECODE, t, 0, [expert]) for t, expert in enumerate([1, 2, 1, 3, 1, 4])])
    forced, bypass = replay(trace, "belady", slots=1).decode, replay(trace, "belady-bypass", slots=1).decode
    assert (forced.hits, forced.loads) == (0, 6)
    assert (bypass.hits, bypass.misses, bypass.loads) == (2, 4, 1), "2, 3 and 4 stay where they are"


@given(trace=conversations())
@settings(deadline=None)
def test_the_unlimited_cache_misses_first_uses_only(trace: Trace) -> None:
    result = replay(trace, "unlimited", slots=2)
    first_uses = {(int(layer), int(e)) for layer, ids in zip(trace.layer, trace.experts, strict=True) for e in ids}
    assert result.decode.misses + result.prefill.misses == len(first_uses)
    assert result.decode.evictions == 0


def test_belady_on_the_published_traces() -> None:
    """Figures of an independent replay in plain Python."""
    for path, share, expected in ((SHARED[2], "25%", 91.0), (SHARED[1], "50%", 89.9), (SHARED[0], "10%", 72.5)):
        trace = Trace.load(path)
        bound = replay(trace, "belady", slots=share).hit_rate
        assert bound is not None and round(100 * bound, 1) == expected == round(100 * _slow_belady(trace, share), 1)


def _slow_belady(trace: Trace, share: str) -> float:
    """Return Belady's hit rate, event by event, looking through the future each time."""
    hits = accesses = 0
    events = Events.of(trace)
    lists = np.split(events.experts, events.offsets[1:-1])
    for bank, used in enumerate(trace.n_used_of_banks()):
        mine = [
            (set(lists[i].tolist()), list(dict.fromkeys(lists[i].tolist())), events.phase[i])
            for i in np.flatnonzero(events.bank == bank)
        ]
        n_slots = max(used, int(trace.banks[bank].n_expert * float(share[:-1]) / 100))
        resident: set[int] = set()
        for now, (needed, listed, phase) in enumerate(mine):
            if phase == DECODE:
                hits += len(needed & resident)
                accesses += len(needed)

            for at in range(0, len(listed), n_slots):
                wave = set(listed[at : at + n_slots])
                others = sorted(resident - wave, key=lambda e: (_next_use(mine, now, e), e))
                resident = wave | set(others[: n_slots - len(wave)])
    return hits / accesses


def _next_use(events: list[Any], now: int, expert: int) -> float:
    """Return which event uses an expert next; never, if that is a prompt, which brings it anyway."""
    i = next((i for i in range(now + 1, len(events)) if expert in events[i][0]), None)
    return float("inf") if i is None or events[i][2] != DECODE else i


# ---- the rules ----


def by_hand(trace: Trace, n_slots: int) -> list[list[tuple[int, int, int]]]:
    """Return (hits, misses, evictions) of each event of each layer, for LRU, from the rules."""
    events = Events.of(trace)
    lists = np.split(events.experts, events.offsets[1:-1])
    out = []
    for bank in range(len(trace.banks)):
        order: list[int] = []  # resident, least recent first
        rows = []
        for i in np.flatnonzero(events.bank == bank):
            listed = list(dict.fromkeys(lists[i].tolist()))
            hits, evictions = len(set(listed) & set(order)), 0
            for at in range(0, len(listed), n_slots):
                wave = listed[at : at + n_slots]
                kept = [e for e in order if e not in wave]
                n_evicted = max(0, len(kept) + len(wave) - n_slots)
                evictions += n_evicted
                order = kept[n_evicted:] + wave
            rows.append((hits, len(listed) - hits, evictions))
        out.append(rows)
    return out


@given(trace=conversations(), slots=st.integers(2, 6))
@settings(deadline=None)
def test_lru_by_hand(trace: Trace, slots: int) -> None:
    result = replay(trace, "lru", slots=slots)
    events = Events.of(trace)
    for bank, rows in enumerate(by_hand(trace, slots)):
        phases = events.phase[events.bank == bank]
        for phase, counts in ((DECODE, result.layers[bank].decode), (PREFILL, result.layers[bank].prefill)):
            mine = [row for row, p in zip(rows, phases, strict=True) if p == phase]
            assert (counts.hits, counts.misses, counts.evictions) == tuple(sum(column) for column in zip(*mine, strict=True)) or (
                not mine and counts.events == 0
            )
    for name in ("events", "accesses", "hits", "misses", "evictions", "loads"):
        assert getattr(result.decode, name) == sum(getattr(layer.decode, name) for layer in result.layers)
        assert getattr(result.decode, name) == getattr(result.first_half, name) + getattr(result.second_half, name)


def test_hits_are_judged_when_the_event_begins() -> None:
    """Expert 2 is used by the second event and evicted for it by nobody; one by one it would be."""
    trace = make([(DECODE, 0, 0, [1, 2]), (DECODE, 1, 0, [3, 1]), (DECODE, 2, 0, [4, 3])])
    result = replay(trace, "lru", slots=2)
    assert (result.decode.hits, result.decode.misses, result.decode.evictions) == (2, 4, 2)
    assert result.bytes_per_token == 4 * 1000 / 3
    assert result.hit_rate == 2 / 6
    assert (result.first_half.accesses, result.second_half.accesses) == (4, 2)
    assert result.worst_layer is not None and result.worst_layer.layer == 0


def test_a_prompt_larger_than_the_pool_runs_in_waves() -> None:
    rows: list[Row] = [(PREFILL, t, 0, [2 * t, 2 * t + 1]) for t in range(4)]
    trace = make([*rows, (DECODE, 4, 0, [6, 7]), (DECODE, 5, 0, [0, 7])])
    result = replay(trace, "lru", slots=3)
    assert (result.prefill.accesses, result.prefill.misses, result.prefill.loads, result.prefill.evictions) == (8, 8, 8, 5)
    assert (result.decode.hits, result.decode.misses) == (3, 1)
    left_out = replay(trace, "lru", slots=3, large="bypass")
    assert left_out.prefill.events == 0 and left_out.decode.hits == 1
    assert replay(trace, "lru", slots=8, large="bypass").prefill.events == 1


def test_sizes() -> None:
    trace = make([(DECODE, 0, 0, [1, 2, 3]), (DECODE, 0, 1, [1, 2, 3])], n_expert=8)
    assert replay(trace, slots="50%").slots == 4
    assert replay(trace, slots="10%").slots == 3, "as many at least as a token uses"
    assert replay(trace, slots="100 %").slots == 8 == replay(trace, slots=99).slots
    with pytest.raises(ArgumentError, match="slots=2: a token uses 3 experts of layer 0, so the minimum is 3 slots per layer"):
        replay(trace, slots=2)
    for bad in ("0", 0, "0%", "101%", "-3", "many", "6GiB", ""):
        with pytest.raises(ArgumentError, match="expected a number of slots"):
            replay(trace, slots=bad)
    for wrong in (3.0, None, True):
        with pytest.raises(TypeError, match="slots"):
            replay(trace, slots=wrong)  # type: ignore[arg-type]


def test_layers_of_different_sizes() -> None:
    trace = make([(DECODE, 0, 0, [1, 2]), (DECODE, 0, 1, [1])])
    trace.banks = (TraceBank(0, 0, 8, None), TraceBank(1, 0, 16, 5))
    result = replay(trace, slots="50%")
    assert [layer.n_slots for layer in result.layers] == [4, 8] and result.slots == 8
    assert result.bytes_per_token is None, "the bytes of one layer are unknown"


def test_a_global_pool_smaller_than_a_token_says_so_and_has_no_hits() -> None:
    """CASE 17."""
    rows: list[Row] = [(DECODE, t, layer, [0, 1]) for t in range(5) for layer in range(4)]
    trace = make(rows)
    with pytest.warns(UserWarning, match="6 slots for all layers are fewer than the 8 experts that one token uses"):
        small = replay(trace, "lru", slots=6, scope="global")
    assert small.hit_rate == 0.0 and small.warnings
    enough = replay(trace, "lru", slots=8, scope="global")
    assert enough.decode.misses == 8 and not enough.warnings
    assert enough.layers[0].n_slots is None and enough.slots == 8
    assert replay(trace, "lru", slots="25%", scope="global").slots == 8
    with pytest.raises(ArgumentError, match="minimum is 2 slots"):
        replay(trace, slots=1, scope="global")


@pytest.mark.parametrize("option", [{"scope": "pool"}, {"miss": "auto"}, {"large": "x"}, {"prompts": "token"}])
def test_options(option: dict[str, str]) -> None:
    with pytest.raises(ArgumentError, match="must be one of"):
        replay(make([(DECODE, 0, 0, [1])]), slots=4, **option)  # type: ignore[arg-type]


def test_what_cannot_be_replayed() -> None:
    trace = make([(DECODE, 0, 0, [1])])
    with pytest.raises(PolicyError, match="mru"):
        replay(trace, "mru", slots=4)
    with pytest.raises(ArgumentError, match="takes no admission"):
        replay(trace, "belady", "always", slots=4)
    with pytest.raises(ArgumentError, match="no rows"):
        replay(trace.rows(np.array([], dtype=int)), slots=4)
    only_prompt = replay(make([(PREFILL, 0, 0, [1])]), slots=4)
    assert only_prompt.hit_rate is only_prompt.bytes_per_token is only_prompt.worst_layer is None
    assert replay(make([(PREFILL, 0, 0, [1])]), "belady", slots=4).prefill.accesses == 1


def test_sweep_and_what_goes_into_json() -> None:
    trace = make([(DECODE, t, 0, [t % 5, 5]) for t in range(20)], name="mine")
    starts: list[str] = []
    events: list[int] = []
    results = list(
        sweep([trace], ["lru", "belady"], ["always", None], slots=[2, "50%"], on_start=starts.append, progress=events.append)
    )
    assert [(r.policy, r.requested) for r in results] == [
        ("lru", "2"),
        ("lru", "50%"),
        ("lru", "2"),
        ("lru", "50%"),
        ("belady", "2"),
        ("belady", "50%"),
    ]
    assert len(starts) == 6 and sum(events) == 6 * 20
    row = results[0].as_dict()
    assert row["trace"] == "mine" and row["slots"] == 2 and row["admission"] == "always"
    assert row["accesses"] == row["hits"] + row["misses"] == 40
    assert row["hit_rate"] == row["hits"] / 40
    assert row["bytes_per_token"] == row["misses"] * 1000 / 20
    assert row["worst_layer"] == {"layer": 0, "bank": 0, "hit_rate": row["hit_rate"]}
    assert results[-1].as_dict()["evictions"] is None


# ---- policies in Python ----


class PythonLru(EvictionPolicy):
    """Least recently used."""

    def __init__(self) -> None:
        self.clock = 0
        self.used: dict[tuple[int, int], int] = {}
        self.told: list[Any] = []

    def on_access(self, layer: int, experts: Any, hit: Any, **kw: Any) -> None:
        self.told.append(
            (
                layer,
                experts.tolist(),
                hit.tolist(),
                kw["phase"],
                kw["step"],
                kw["n_tokens"],
                kw["bank"],
                kw["weights"] is not None,
            )
        )
        for expert in experts.tolist():
            self.clock += 1
            self.used[layer, expert] = self.clock

    def select_evict(self, layer: int, n: int, candidates: Any, **kw: Any) -> list[int]:
        return sorted(candidates.tolist(), key=lambda e: self.used[layer, e])[:n]


class Failing(PythonLru):
    def select_evict(self, layer: int, n: int, candidates: Any, **kw: Any) -> list[int]:
        raise RuntimeError("I cannot decide")


@given(trace=conversations(), slots=st.integers(2, 6))
@settings(deadline=None, max_examples=30)
def test_a_policy_in_python(trace: Trace, slots: int) -> None:
    mine, native = replay(trace, PythonLru, slots=slots), replay(trace, "lru", slots=slots)
    assert mine.policy == "PythonLru"
    assert (mine.decode, mine.prefill, mine.layers) == (native.decode, native.prefill, native.layers)


def test_what_a_policy_is_told() -> None:
    rows: list[Row] = [(PREFILL, 0, 3, [1, 2]), (PREFILL, 1, 3, [2, 5]), (DECODE, 2, 3, [1, 7])]
    weights = np.array([[0.5, 0.25], [0.5, 0.25], [0.5, np.nan]], dtype=np.float32)
    weights[2] = np.nan
    policy = PythonLru()
    replay(make(rows, weights=weights, bank=np.zeros(3)), policy, slots=4)
    assert policy.told == [
        (3, [1, 2, 5], [0, 0, 0], "prefill", 1, 2, 0, True),
        (3, [1, 7], [1, 0], "decode", 2, 1, 0, False),
    ]
    trace = make(rows)
    trace.bank[:] = 1
    trace.banks = (TraceBank(3, 1, 8),)
    banks: list[int] = []

    class Bank(PythonLru):
        def on_access(self, layer: int, experts: Any, hit: Any, **kw: Any) -> None:
            banks.append(kw["bank"])

    replay(trace, Bank, slots=4)
    assert banks == [1, 1]
    policy = PythonLru()
    replay(make(rows), policy, slots=4, scope="global")
    assert {told[0] for told in policy.told} == {-1}, "a pool of all layers"


def test_a_policy_that_fails() -> None:
    trace = make([(DECODE, t, 0, [t % 5, 5]) for t in range(20)])
    with pytest.raises(RuntimeError, match="I cannot decide"):
        replay(trace, Failing, slots=2)


# ---- the engine ----


def rows_of(layers: Any) -> list[tuple[int, int, int, int, int]]:
    return [(layer.layer, layer.bank, layer.hits, layer.misses, layer.evictions) for layer in layers]


def replayed(result: ReplayResult) -> list[tuple[int, int, int, int, int]]:
    return [
        (
            r.layer,
            r.bank,
            r.decode.hits + r.prefill.hits,
            r.decode.misses + r.prefill.misses,
            (r.decode.evictions or 0) + (r.prefill.evictions or 0),
        )
        for r in result.layers
    ]


def live(
    model: Path, slots: int, policy: Any, admission: Any, n_ubatch: int
) -> tuple[Trace, list[tuple[int, int, int, int, int]], int]:
    """Run a model with a pool; return what was recorded, what the engine counted, and how many steps it left out."""
    cache = hotmoe.ExpertCache(slots=slots, policy=policy, admission=admission, record=True, strict=True)
    with hotmoe.Llama(
        model, expert_cache=cache, n_ctx=256, n_ubatch=n_ubatch, n_batch=32, n_threads=1, n_threads_batch=1, verbose=False
    ) as llm:
        trace = record(llm, ["def main(): import", ["class A(object):", "return x"]], n_tokens=24)
        stats = cache.stats().total
        assert stats.policy_fallbacks == 0
        return trace, rows_of(stats.layers), sum(stats.steps.bypassed.values())


@pytest.mark.parametrize("admission", NATIVE_ADMISSIONS)
@pytest.mark.parametrize("policy", [*NATIVE, PythonLru])
def test_replay_agrees_with_the_engine(sim: ModuleType, policy: Any, admission: str) -> None:
    trace, counted, left_out = live(shipped_model(), 9, policy, admission, n_ubatch=2)
    assert left_out == 0
    assert all(min(hits, misses, evictions) > 0 for *_, hits, misses, evictions in counted), "not vacuous"
    assert replayed(replay(trace, policy, admission, slots=9, prompts="ubatch")) == counted
    other = "lru" if policy == "fifo" else "fifo"
    assert replayed(replay(trace, other, admission, slots=9, prompts="ubatch")) != counted, "the policy matters"


def test_replay_agrees_on_steps_that_do_not_fit(sim: ModuleType) -> None:
    trace, counted, left_out = live(shipped_model(), 9, "lru", "always", n_ubatch=32)
    assert left_out > 0
    assert replayed(replay(trace, "lru", "always", slots=9, prompts="ubatch", large="bypass")) == counted
    assert replayed(replay(trace, "lru", "always", slots=9, prompts="ubatch")) != counted


def test_replay_agrees_on_two_banks(sim: ModuleType) -> None:
    trace, counted, left_out = live(cached_model(arch="grovemoe"), 10, "slru", "always", n_ubatch=1)
    assert left_out == 0 and any(bank for _, bank, *_ in counted)
    assert replayed(replay(trace, "slru", "always", slots=10, prompts="ubatch")) == counted


def test_a_recorded_trace_replays_the_same_from_a_file(sim: ModuleType, tmp_path: Path) -> None:
    trace, counted, _ = live(shipped_model(), 9, "lfu", "always", n_ubatch=2)
    for ending in (".csv", ".npz", ".parquet"):
        trace.save(tmp_path / f"t{ending}")
        assert replayed(replay(Trace.load(tmp_path / f"t{ending}"), "lfu", "always", slots=9, prompts="ubatch")) == counted
