"""Policies and admissions written in Python, in the engine: what they are told, what they may do, and what they may not."""

from __future__ import annotations

import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import hotmoe
from hotmoe import AdmissionPolicy, EvictionPolicy, ExpertCache, ScorePolicy
from hotmoe._attach import attach
from hotmoe._vendor.llama_cpp import Llama as VendoredLlama
from hotmoe.errors import ArgumentError, PolicyError, StateError
from tests.models import cached_model

N_SLOTS = 10
PROMPT = [301, 302, 303, 304]


class Lru(EvictionPolicy):
    """Least recently used, and a record of what it was told."""

    def __init__(self, twist: Callable[[str, int], None] = lambda method, call: None) -> None:
        self.clock = 0
        self.used: dict[tuple[int, int], int] = {}
        self.slots: dict[int, dict[int, int]] = {}
        self.seen: list[tuple[Any, ...]] = []
        self.calls: dict[str, int] = {}
        self.twist = twist
        self.steps: list[tuple[int, str, int]] = []
        self.kw: dict[str, Any] = {}
        self.reset_calls = 0

    def _called(self, method: str) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        self.twist(method, self.calls[method])

    def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
        self.slots[layer] = {}

    def on_step(self, step: int, *, phase: str, n_tokens: int, **kw: Any) -> None:
        self.steps.append((step, phase, n_tokens))

    def on_access(self, layer: int, experts: Any, hit: Any, **kw: Any) -> None:
        self._called("on_access")
        self.kw = kw
        assert experts.dtype == np.int32
        assert not experts.flags.writeable
        assert [e in self.slots[layer] for e in experts.tolist()] == [bool(h) for h in hit]
        weights = kw["weights"]
        self.seen.append((layer, experts.tolist(), None if weights is None else weights.tolist(), kw["phase"], kw["step"]))
        for expert in experts.tolist():
            self.clock += 1
            self.used[layer, expert] = self.clock

    def select_evict(self, layer: int, n: int, candidates: Any, **kw: Any) -> Any:
        self._called("select_evict")
        assert set(candidates.tolist()) == set(self.slots[layer]) - set(self.seen[-1][1])
        return sorted(candidates.tolist(), key=lambda e: self.used[layer, e])[:n]

    def on_evict(self, layer: int, expert: int, **kw: Any) -> None:
        self._called("on_evict")
        del self.slots[layer][expert]

    def on_load(self, layer: int, expert: int, slot: int, **kw: Any) -> None:
        self._called("on_load")
        assert slot not in self.slots[layer].values()
        self.slots[layer][expert] = slot

    def reset(self) -> None:
        self.reset_calls += 1
        for slots in self.slots.values():
            slots.clear()


def load(model: Path, policy: Any = None, admission: Any = None, slots: int = N_SLOTS, **options: Any) -> hotmoe.Llama:
    cache = ExpertCache(slots=slots, policy=policy, admission=admission, strict=True)
    return hotmoe.Llama(model, expert_cache=cache, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False, **options)


def greedy(llm: hotmoe.Llama, n: int = 24) -> list[int]:
    """Generate n tokens from a fresh start."""
    llm.reset()
    llm._ctx.kv_cache_clear()
    tokens = []
    for token in llm.generate(PROMPT, temp=0):
        tokens.append(token)
        if len(tokens) == n:
            return tokens
    raise AssertionError("the model ended its answer")


def counts(llm: hotmoe.Llama) -> tuple[int, int, int]:
    assert llm.expert_cache is not None
    total = llm.expert_cache.stats().total
    return total.hits, total.misses, total.evictions


@pytest.fixture(scope="module")
def reference(sim: ModuleType, tiny_model: Path) -> tuple[list[int], tuple[int, int, int]]:
    """Tokens and counters under the native LRU."""
    with load(tiny_model, "lru") as llm:
        return greedy(llm), counts(llm)


# ---- what it is told ----


def test_decides_as_its_native_twin_and_is_told_the_truth(tiny_model: Path, reference: Any) -> None:
    policy = Lru()
    with load(tiny_model, policy) as llm:
        assert (greedy(llm), counts(llm)) == reference
        assert llm.expert_cache is not None
        assert llm.expert_cache.policy_object is policy
        assert llm.expert_cache.policy == "Lru"
        assert counts(llm)[2] > 20
        for bank, row in enumerate(llm.expert_cache.plan.banks):
            slot_map = llm.expert_cache.slot_map(bank)
            assert policy.slots[row.layer] == {e: slot for slot, e in enumerate(slot_map) if e >= 0}
        assert llm.expert_cache.stats().total.policy_fallbacks == 0

        assert {layer for layer, *_ in policy.seen} == {0, 1}
        decode = [weights for _, _, weights, phase, _ in policy.seen if phase == "decode"]
        assert all(min(w) > 0 and sum(w) <= 1.001 and w == sorted(w, reverse=True) for w in decode), "a token's softmax"
        steps = [step for step, _, _ in policy.steps]
        assert steps == list(range(1, len(steps) + 1)), "on_step once per ubatch"
        assert [n for _, phase, n in policy.steps if phase == "decode"] == [1] * 23

        llm.expert_cache.clear()
        assert policy.reset_calls == 2, "once per bank"


def test_sees_the_experts_of_a_prompt_that_fits(tiny_model: Path) -> None:
    policy = Lru()
    with load(tiny_model, policy, slots=40) as llm:
        greedy(llm, 2)
    _, experts, weights, phase, step = policy.seen[0]
    assert (phase, step) == ("prefill", 1)
    assert len(experts) > 4
    assert len(weights) == len(experts) == len(set(experts))
    assert policy.steps[0] == (1, "prefill", len(PROMPT))


def test_weights_only_where_somebody_wants_them(tiny_model: Path) -> None:
    class Indifferent(Lru):
        wants_weights = False

    class Named(Lru):
        def on_access(
            self, layer: int, experts: Any, hit: Any, weights: Any = None, phase: Any = None, step: Any = None, **kw: Any
        ) -> None:
            super().on_access(layer, experts, hit, weights=weights, phase=phase, step=step)

    for policy, wanted in ((Indifferent(), False), (Named(), True)):
        with load(tiny_model, policy) as llm:
            greedy(llm, 3)
        assert [weights is not None for _, _, weights, _, _ in policy.seen] == [wanted] * len(policy.seen)


def test_second_banks_have_objects_of_their_own(sim: ModuleType) -> None:
    banks: dict[int, set[int]] = {}

    class Banks(Lru):
        def on_access(self, layer: int, experts: Any, hit: Any, **kw: Any) -> None:
            banks.setdefault(id(self), set()).add(kw["bank"])
            super().on_access(layer, experts, hit, **kw)

    policy = Banks()
    model = cached_model(arch="grovemoe", quant="Q8_0", n_expert=40, n_expert_used=4)
    with load(model, policy, slots=20) as llm:
        greedy(llm, 8)
    assert banks.pop(id(policy)) == {0}
    assert list(banks.values()) == [{1}]


# ---- how it is named ----


def test_by_class_object_and_import_path(tiny_model: Path, reference: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "my_policies.py").write_text(
        "from hotmoe import EvictionPolicy\n"
        "class Last(EvictionPolicy):\n"
        "    def __init__(self, k=0):\n"
        "        self.k = k\n"
        "    def select_evict(self, layer, n, candidates, **kw):\n"
        "        return candidates[-n:]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for spec, label in ((Lru, "Lru"), (Lru(), "Lru"), ("my_policies:Last", None), ("my_policies:Last(k=3)", None)):
        with load(tiny_model, spec) as llm:
            assert greedy(llm) == reference[0]
            assert llm.expert_cache is not None
            assert llm.expert_cache.policy == (label or spec)
            if label is None:
                assert llm.expert_cache.policy_object.k == (3 if "3" in str(spec) else 0)  # type: ignore[union-attr]
    sys.modules.pop("my_policies")


def test_by_a_registered_name_and_by_an_entry_point(tiny_model: Path, reference: Any, tmp_path: Path, monkeypatch: Any) -> None:
    hotmoe.register_policy("tests-lru")(Lru)
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hotmoe.policies]\nplugged = {__name__}:Lru\n")
    monkeypatch.syspath_prepend(tmp_path)
    from hotmoe.cache import policies

    assert {"tests-lru", "plugged"} <= policies().keys()
    for name in ("tests-lru", "plugged"):
        with load(tiny_model, name) as llm:
            assert (greedy(llm), counts(llm)) == reference


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ("no_such_module:X", PolicyError, "no_such_module"),
        ("os:nothing", PolicyError, "nothing"),
        ("os:path", PolicyError, "EvictionPolicy"),
        (f"{__name__}:Lru(depth=3)", PolicyError, "depth"),
        (f"{__name__}:Lru(3)", PolicyError, "key=value"),
        (f"{__name__}:Lru(twist=3", PolicyError, "parenthesis"),
        ("lru(x=1)", PolicyError, "x"),
        ("lru(", PolicyError, "parenthesis"),
        ("lib:/no/such/library.so", PolicyError, "library.so"),
        (int, TypeError, "EvictionPolicy"),
        (3, TypeError, "EvictionPolicy"),
    ],
)
def test_bad_specs_are_refused_at_once(spec: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ExpertCache(policy=spec)
    if not isinstance(spec, str):
        with pytest.raises(error, match="AdmissionPolicy"):
            ExpertCache(admission=spec)


def test_names_that_cannot_be_given() -> None:
    for name in ("lru", "", "a(b", "a:b"):
        with pytest.raises(ArgumentError):
            hotmoe.register_policy(name)
    with pytest.raises(TypeError, match="EvictionPolicy"):
        hotmoe.register_policy("fine")(int)


def test_an_object_serves_one_cache_at_a_time(tiny_model: Path) -> None:
    policy = Lru()
    with load(tiny_model, policy), pytest.raises(StateError, match="another cache"):
        load(tiny_model, policy)
    with load(tiny_model, policy) as llm:
        greedy(llm, 4)


# ---- when it fails (CASES 36 and 37) ----


class BrokenError(Exception):
    pass


class Careless(Lru):
    """One that keeps no mirror of the slots, which a call that failed would leave wrong."""

    def on_access(self, layer: int, experts: Any, hit: Any, **kw: Any) -> None:
        self._called("on_access")
        for expert in experts.tolist():
            self.clock += 1
            self.used[layer, expert] = self.clock

    def select_evict(self, layer: int, n: int, candidates: Any, **kw: Any) -> Any:
        self._called("select_evict")
        return sorted(candidates.tolist(), key=lambda e: self.used.get((layer, e), 0))[:n]

    def on_evict(self, layer: int, expert: int, **kw: Any) -> None:
        self._called("on_evict")

    def on_load(self, layer: int, expert: int, slot: int, **kw: Any) -> None:
        self._called("on_load")


@pytest.mark.parametrize("method", ["on_access", "select_evict", "on_evict", "on_load"])
def test_an_exception_is_raised_after_the_call_and_the_run_goes_on(tiny_model: Path, reference: Any, method: str) -> None:
    """CASE 36."""

    def fail_once(called: str, call: int) -> None:
        if called == method and call == 25:
            raise BrokenError(f"{method} broke")

    with load(tiny_model, Careless(fail_once)) as llm:
        with pytest.raises(BrokenError, match="broke"):
            greedy(llm)
        assert llm.expert_cache is not None
        assert llm.expert_cache.stats().total.policy_fallbacks == (method in ("on_access", "select_evict"))
        assert greedy(llm) == reference[0], "the next run is as good as any"


ANSWERS: dict[str, Callable[[Any, int], Any]] = {
    "none": lambda candidates, n: None,
    "a number": lambda candidates, n: 3,
    "too few": lambda candidates, n: candidates[: n - 1],
    "too many": lambda candidates, n: candidates[: n + 1],
    "huge": lambda candidates, n: [2**40] * n,
    "out of range": lambda candidates, n: [1000 + i for i in range(n)],
    "negative": lambda candidates, n: [-1 - i for i in range(n)],
    "duplicates": lambda candidates, n: [candidates[0]] * (n + (n == 1)),
    "floats": lambda candidates, n: [float(c) for c in candidates[:n]],
    "float array": lambda candidates, n: candidates[:n].astype(np.float32),
    "text": lambda candidates, n: "x" * n,
    "not a candidate": lambda candidates, n: [e for e in range(40) if e not in candidates.tolist()][:n],
    "two dimensions": lambda candidates, n: candidates[:n].reshape(-1, 1),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_wrong_answer_is_refused(tiny_model: Path, reference: Any, kind: str) -> None:
    """CASE 36: None, numbers and the like are never taken for slots or experts."""

    class Liar(Lru):
        def select_evict(self, layer: int, n: int, candidates: Any, **kw: Any) -> Any:
            right = super().select_evict(layer, n, candidates, **kw)
            return right if self.calls["select_evict"] != 7 else ANSWERS[kind](candidates, n)

    with load(tiny_model, Liar) as llm:
        with pytest.raises(PolicyError, match=r"select_evict for layer \d answered"):
            greedy(llm)
        assert llm.expert_cache is not None
        assert llm.expert_cache.stats().total.policy_fallbacks == 1
        llm.expert_cache.clear()
        llm.expert_cache.reset_stats()
        assert (greedy(llm), counts(llm)) == reference, "LRU chose in that event, and all was well again"


def test_ctrl_c_inside_a_policy(tiny_model: Path, reference: Any) -> None:
    """CASE 37."""

    def press(method: str, call: int) -> None:
        if method == "select_evict" and call == 5:
            os.kill(os.getpid(), signal.SIGINT)
            while True:  # until Python looks
                pass

    with load(tiny_model, Lru(press)) as llm:
        with pytest.raises(KeyboardInterrupt):
            greedy(llm)
        assert greedy(llm) == reference[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.eval([5]),
        lambda llm: llm("hello", max_tokens=1),
        lambda llm: llm.reset(),
        lambda llm: llm.save_state(),
        lambda llm: llm.close(),
        lambda llm: llm.expert_cache.stats(),
        lambda llm: llm.expert_cache.clear(),
        lambda llm: llm.expert_cache.close(),
        lambda llm: llm.expert_cache.slot_map(0),
    ],
    ids=["eval", "call", "reset", "save_state", "close", "stats", "clear", "cache.close", "slot_map"],
)
def test_a_policy_must_not_use_the_model(tiny_model: Path, reference: Any, use: Callable[[Any], Any]) -> None:
    def meddle(method: str, call: int) -> None:
        if method == "select_evict" and call == 5:
            use(llm)

    with load(tiny_model, Lru(meddle)) as llm:
        with pytest.raises(StateError):
            greedy(llm)
        assert greedy(llm) == reference[0]


def test_a_policy_that_cannot_be_set_up_fails_the_load(tiny_model: Path) -> None:
    class Never(Lru):
        def setup(self, layer: int, n_expert: int, n_slots: int, **kw: Any) -> None:
            raise BrokenError("no")

    with pytest.raises(BrokenError):
        load(tiny_model, Never)


# ---- life (CASE 38) ----


def test_lives_as_long_as_the_cache_and_no_longer(tiny_model: Path, reference: Any) -> None:
    """CASE 38."""
    policy = Lru()
    gone = weakref.ref(policy)
    llm = load(tiny_model, policy)
    del policy
    gc.collect()
    assert greedy(llm) == reference[0]
    assert gone() is not None
    llm.close()
    del llm
    gc.collect()
    assert gone() is None


def test_state_can_be_saved_and_restored(tiny_model: Path) -> None:
    class Counts(ScorePolicy):
        def __init__(self) -> None:
            self.count: dict[tuple[int, int], int] = {}

        def on_access(self, layer: int, experts: Any, hit: Any, **kw: Any) -> None:
            for expert in experts.tolist():
                self.count[layer, expert] = self.count.get((layer, expert), 0) + 1

        def score(self, layer: int, expert: int, **kw: Any) -> float:
            return self.count[layer, expert]

    first = Counts()
    with load(tiny_model, first) as llm:
        greedy(llm)
    state = first.state_dict()
    again = Counts()
    again.load_state_dict(state)
    assert again.count == first.count
    with load(tiny_model, again) as llm:
        greedy(llm, 4)
    assert sum(again.count.values()) > sum(first.count.values()) == sum(state["count"].values()), "copies, not views"


def test_works_on_an_attached_llama_of_llama_cpp_python(sim: ModuleType, tiny_model: Path, reference: Any) -> None:
    def fail_once(method: str, call: int) -> None:
        if method == "select_evict" and call == 9:
            raise BrokenError("broke")

    with hotmoe.expert_placement():
        llm = VendoredLlama(str(tiny_model), n_gpu_layers=-1, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    try:
        attach(llm, ExpertCache(slots=N_SLOTS, policy=Lru(fail_once)))
        with pytest.raises(BrokenError):
            greedy(llm)
        assert greedy(llm) == reference[0]
    finally:
        llm.close()


# ---- the shapes besides ----


def test_score_policy_takes_the_lowest_and_breaks_ties_by_id() -> None:
    class Score(ScorePolicy):
        def score(self, layer: int, expert: int, **kw: Any) -> float:
            return expert % 3

    candidates = np.array([9, 4, 2, 7, 3, 6], dtype=np.int32)
    assert Score().select_evict(0, 4, candidates).tolist() == [3, 6, 9, 4]

    class Many(ScorePolicy):
        def score_many(self, layer: int, experts: Any, **kw: Any) -> Any:
            return [float("nan")] * len(experts)

    with pytest.raises(ValueError, match="NaN"):
        Many().select_evict(0, 1, candidates)
    with pytest.raises(NotImplementedError, match="score"):
        ScorePolicy().select_evict(0, 1, candidates)


def test_on_hit_is_called_for_hits(tiny_model: Path) -> None:
    class Hits(EvictionPolicy):
        def __init__(self) -> None:
            self.hits = 0

        def on_hit(self, layer: int, expert: int, **kw: Any) -> None:
            self.hits += 1

        def select_evict(self, layer: int, n: int, candidates: Any, **kw: Any) -> Any:
            return candidates[:n]

    policy = Hits()
    with load(tiny_model, policy) as llm:
        greedy(llm)
        assert policy.hits == counts(llm)[0] > 0


class Never(AdmissionPolicy):
    def __init__(self) -> None:
        self.lost = 0

    def admit(self, layer: int, expert: int, **kw: Any) -> bool:
        return False

    def on_evict(self, layer: int, expert: int, **kw: Any) -> None:
        self.lost += 1


def test_what_is_not_admitted_has_its_slot_on_loan(tiny_model: Path, reference: Any) -> None:
    asked: list[int] = []

    class Asked(Lru):
        def select_evict(self, layer: int, n: int, candidates: Any, **kw: Any) -> Any:
            asked.append(layer)
            return super().select_evict(layer, n, candidates, **kw)

        def on_access(self, layer: int, experts: Any, hit: Any, **kw: Any) -> None: ...

    never = Never()
    with load(tiny_model, Asked, never) as llm:
        assert greedy(llm) == reference[0], "the tokens are those of any policy"
        assert llm.expert_cache is not None
        assert llm.expert_cache.admission == "Never"
        total = llm.expert_cache.stats().total
        assert not asked, "slots on loan are taken without asking"
        assert total.not_admitted == total.hits + total.misses, "nobody ever is"
        assert never.lost == total.evictions > 0


@pytest.mark.parametrize("answer", [None, 1, [True], [2] * 4, "yes!", np.full(4, 0.5)])
def test_a_wrong_verdict_admits_all(tiny_model: Path, reference: Any, answer: Any) -> None:
    class Liar(AdmissionPolicy):
        def __init__(self) -> None:
            self.n = 0

        def admit_many(self, layer: int, experts: Any, **kw: Any) -> Any:
            self.n += 1
            return [True] * len(experts) if self.n != 3 else answer

    with load(tiny_model, "lru", Liar) as llm:
        with pytest.raises(PolicyError, match="admit for layer"):
            greedy(llm)
        assert llm.expert_cache is not None
        assert llm.expert_cache.stats().total.policy_fallbacks == 1
        llm.expert_cache.clear()
        llm.expert_cache.reset_stats()
        assert (greedy(llm), counts(llm)) == reference
