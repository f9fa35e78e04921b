"""How a cache would do on recorded routing: the engine's own slot maps and policies, without a model.

    >>> from hotmoe.replay import replay
    >>> from hotmoe.traces import Trace
    >>> result = replay(Trace.load("routing.npz"), "slru", slots="25%")  # doctest: +SKIP
    >>> result.hit_rate, result.bytes_per_token, result.worst_layer  # doctest: +SKIP

Events are atomic: hits are judged against what is resident when an event begins, and an event's own experts are never evicted.
Replaying the experts one by one instead would turn hits into misses.

Two names stand for bounds that no policy can pass. `belady` knows the future, and has the most hits in generated tokens that any
policy can have that gives a slot to every miss. `belady-bypass` may also leave a miss out, as an admission does where misses are
computed elsewhere (`miss="cpu"`). `unlimited` has a slot for every expert: only the first use misses.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ._arguments import name_of
from ._binding import check, ffi, lib, text
from ._replay_result import Counts, LayerResult, Outcome, ReplayResult, make_result
from .errors import ArgumentError
from .policies.registry import AdmissionSpec, PolicySpec, Resolved, resolve
from .traces.events import Events

if TYPE_CHECKING:
    from .traces import Trace

__all__ = ["BOUNDS", "Counts", "LayerResult", "ReplayResult", "replay", "sweep"]

BOUNDS = {
    "belady": "the most hits with all of the future known, if every miss takes a slot",
    "belady-bypass": "the same, if a miss may be left out",
    "unlimited": "a slot for every expert",
}

SCOPES = ("layer", "global")
MISSES = {"copy": 0, "cpu": 1}  # enum hotmoe_miss
LARGE = ("waves", "bypass")

_CHUNK = 512  # events per call of C: how long a policy that fails, or Ctrl-C, goes unnoticed


def replay(
    trace: Trace,
    policy: PolicySpec = None,
    admission: AdmissionSpec = None,
    *,
    slots: int | str,
    scope: str = "layer",
    miss: str = "copy",
    prompts: str = "turn",
    large: str = "waves",
    events: Events | None = None,
    progress: Callable[[int], Any] | None = None,
) -> ReplayResult:
    """Run a trace through a cache.

    Args:
        trace: The trace.
        policy: As for `ExpertCache`, or one of `BOUNDS`, which take no admission.
        admission: As for `ExpertCache`.
        slots: Slots of each layer, or, if all layers share a pool, of the pool: a number, or a share of the experts ("25%", and
            in each layer as many at least as a token uses).
        scope: "layer": each layer has a pool, as in the engine. "global": all share one.
        miss: "copy": every miss is copied to a slot; one that is not admitted gets one on loan. "cpu": a miss that is not
            admitted gets no slot.
        prompts: "turn": the prompt of a turn is one event per layer. "ubatch": one for each ubatch that the engine made of it,
            which the trace must tell.
        large: What becomes of an event that may need more experts than there are slots. "waves": as many at a time as there
            are slots. "bypass": the cache does not see it, it runs from host memory.
        events: `Events.of(trace, prompts)`, if the caller has them already.
        progress: Called with the number of events run since the last call.

    Returns:
        What came of it.

    Raises:
        ArgumentError: If a value is not legal, for example fewer slots than a token uses experts.
        PolicyError: If there is no such policy or admission.
        HotmoeError: Or any other exception that a policy in Python raised.
    """
    for name, value, legal in (("scope", scope, SCOPES), ("miss", miss, tuple(MISSES)), ("large", large, LARGE)):
        if value not in legal:
            raise ArgumentError(f"{name}={value!r}: it must be one of {', '.join(legal)}")
    bound = policy if isinstance(policy, str) and policy in BOUNDS else ""
    if bound and admission is not None:
        raise ArgumentError(f"policy {bound} is a bound, which takes no admission ({admission!r})")
    if not len(trace):
        raise ArgumentError(f"{trace.name} has no rows, so there is nothing to replay")
    pools, notes = _pools(trace, slots, scope, unlimited=bound == "unlimited")
    for note in notes:
        warnings.warn(note, stacklevel=2)
    if events is None:
        events = Events.of(trace, prompts)
    if large == "bypass":
        events = _that_fit(trace, events, pools)
    feed = _Feed(events, pools)

    start = time.perf_counter()
    if bound.startswith("belady"):
        outcome = _belady(feed, pools, bypass=bound == "belady-bypass", any_phase=events.n_decode_tokens == 0)
        labels = (bound, "optimal" if bound == "belady-bypass" else "always")
        if progress:
            progress(len(events))
    elif bound:
        outcome, _ = _run(feed, pools, None, None, "copy", progress)
        labels = (bound, "always")
    else:
        outcome, labels = _run(feed, pools, policy, admission, miss, progress)
    seconds = time.perf_counter() - start

    return make_result(
        trace,
        events,
        outcome,
        n_slots=pools.n_slots if scope == "layer" else None,
        policy=labels[0],
        admission=labels[1],
        scope=scope,
        miss={"belady": "copy", "belady-bypass": "cpu"}.get(bound, miss),
        prompts=prompts,
        slots=max(pools.n_slots),
        requested=str(slots),
        seconds=seconds,
        warnings=tuple(notes),
    )


def sweep(
    traces: Sequence[Trace],
    policies: Sequence[PolicySpec],
    admissions: Sequence[AdmissionSpec] = (None,),
    *,
    slots: Sequence[int | str],
    on_start: Callable[[str], Any] | None = None,
    **options: Any,
) -> Iterator[ReplayResult]:
    """Replay all combinations; bounds, which take no admission, once for each trace and size.

    Args:
        traces: Traces.
        policies: As in `replay`; classes rather than objects, since an object keeps its state from one run to the next.
        admissions: The same.
        slots: Sizes.
        on_start: Called before each run with a few words about it.
        **options: Further arguments of `replay`.

    Yields:
        A result for each, in the order trace, policy, admission, slots.
    """
    for trace in traces:
        events = Events.of(trace, options.get("prompts", "turn"))
        for policy in policies:
            for admission in admissions if policy not in BOUNDS else (None,):
                for size in slots:
                    if on_start:
                        on_start(f"{trace.name}: {_label(policy)}, {size} slots")
                    yield replay(trace, policy, admission, slots=size, events=events, **options)


def n_runs(traces: int, policies: Sequence[PolicySpec], admissions: int, slots: int) -> int:
    """Return how many results `sweep` gives."""
    return traces * slots * sum(1 if policy in BOUNDS else admissions for policy in policies)


def _label(spec: object) -> str:
    return name_of(spec) or "default"


# ---- sizes ----


class _Pools(NamedTuple):
    """What `hotmoe_replay_create` wants to know, and where a bank's experts lie in its pool."""

    layer: list[int]
    bank: list[int]
    n_expert: list[int]
    n_slots: list[int]
    pool_of_bank: npt.NDArray[np.int32]
    first_expert: npt.NDArray[np.int32]


def _pools(trace: Trace, slots: int | str, scope: str, *, unlimited: bool) -> tuple[_Pools, list[str]]:
    """Return the pools, and what is to be said about their sizes.

    Raises:
        ArgumentError: If the size is no size, or too small.
    """
    number, share = _size(slots)
    banks, used = trace.banks, trace.n_used_of_banks()
    n_expert = [bank.n_expert for bank in banks]
    if scope == "layer":
        n_slots = []
        for bank, n_used in zip(banks, used, strict=True):
            n = number if share is None else max(n_used, math.floor(share * bank.n_expert + 1e-9))
            if n < n_used:
                raise ArgumentError(
                    f"slots={slots}: a token uses {n_used} experts of layer {bank.layer}, so the minimum is {n_used} slots per "
                    f"layer"
                )
            n_slots.append(bank.n_expert if unlimited else min(max(n, 1), bank.n_expert))
        n_pools = len(banks)
        return (
            _Pools(
                [bank.layer for bank in banks],
                [bank.bank for bank in banks],
                n_expert,
                n_slots,
                np.arange(n_pools, dtype=np.int32),
                np.zeros(n_pools, dtype=np.int32),
            ),
            [],
        )

    total, demand = sum(n_expert), sum(used)
    n = number if share is None else max(max(used), math.floor(share * total + 1e-9))
    if n < max(used):
        raise ArgumentError(f"slots={slots}: a token uses {max(used)} experts of a layer, so the minimum is {max(used)} slots")
    notes = []
    if n < demand and not unlimited:
        notes.append(
            f"{n} slots for all layers are fewer than the {demand} experts that one token uses in all of them: with most "
            f"policies an expert is gone before its layer comes round again. Take {demand} slots or more, or a pool per layer"
        )
    first = np.concatenate([[0], np.cumsum(n_expert)[:-1]]).astype(np.int32)
    n = total if unlimited else min(n, total)
    return _Pools([lib.HOTMOE_SHARED_LAYER], [0], [total], [n], np.zeros(len(banks), dtype=np.int32), first), notes


def _size(slots: int | str) -> tuple[int, float | None]:
    """Return (number, None), or (0, share of the experts)."""
    if isinstance(slots, bool) or not isinstance(slots, (int, str)):
        raise TypeError(f"slots must be a number, or text such as '25%', not {type(slots).__name__}")
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)\s*%", str(slots).strip())
    if match and match[1] and int(match[1]) > 0:
        return int(match[1]), None
    if match and match[2] and 0 < float(match[2]) <= 100:
        return 0, float(match[2]) / 100
    raise ArgumentError(f"slots={slots!r}: expected a number of slots (32), or a share of the experts up to 100% ('25%')")


def _that_fit(trace: Trace, events: Events, pools: _Pools) -> Events:
    """Leave out the events that the engine would not give to a pool, since they may need more experts than it has slots."""
    used = np.array(trace.n_used_of_banks(), dtype=np.int64)[events.bank]
    n_expert = np.array([bank.n_expert for bank in trace.banks])[events.bank]
    n_slots = np.array(pools.n_slots)[pools.pool_of_bank[events.bank]]
    return events.where(np.minimum(used * events.n_rows, n_expert) <= n_slots)


# ---- runs ----


class _Feed:
    """Events as the C side takes them."""

    def __init__(self, events: Events, pools: _Pools) -> None:
        self.n = len(events)
        self._events = events
        self._arrays: dict[str, npt.NDArray[Any]] = {
            "pool": pools.pool_of_bank[events.bank],
            "n_tokens": events.n_tokens,
            "step": events.step,
            "offsets": events.offsets,
        }
        first = np.repeat(pools.first_expert[events.bank], np.diff(events.offsets))
        self._experts = np.ascontiguousarray(events.experts + first, dtype=np.int32)

    def part(self, begin: int, end: int, *, counted: bool = False) -> tuple[Any, list[Any]]:
        """Return a `struct hotmoe_replay_events` of some events, and what must live as long.

        Args:
            begin: The first event.
            end: The one after the last.
            counted: With the phases that the result counts by, rather than those that policies are told.
        """
        struct = ffi.new("struct hotmoe_replay_events *", {"n": end - begin})
        keep = [ffi.from_buffer("int32_t[]", self._experts)]
        struct.experts = keep[0]
        phase = self._events.phase if counted else self._events.engine_phase
        arrays: dict[str, npt.NDArray[Any]] = {"phase": phase, **self._arrays}
        for name, array in arrays.items():
            item = {"step": "uint64_t[]", "offsets": "int64_t[]"}.get(name, "int32_t[]")
            keep.append(ffi.from_buffer(item, array[begin : end + (name == "offsets")]))
            setattr(struct, name, keep[-1])
        if self._events.weights is not None:
            keep.append(ffi.from_buffer("float[]", self._events.weights))
            struct.weights = keep[-1]
        return struct, keep


def create_slot_maps(
    names: Resolved, layer: Sequence[int], bank: Sequence[int], n_expert: Sequence[int], n_slots: Sequence[int], miss: int = 0
) -> Any:
    """Return a `struct hotmoe_replay *`, to be freed: a slot map for each pool, under the policy and the admission of `names`."""
    params = ffi.new("struct hotmoe_replay_params *", {"n_pools": len(layer), "miss": miss})
    arrays = [ffi.new("int32_t[]", values) for values in (layer, bank, n_expert, n_slots)]
    params.layer, params.bank, params.n_expert, params.n_slots = arrays
    texts = [ffi.new("char[]", name.encode()) if name else ffi.NULL for name in (names.policy, names.admission)]
    params.policy, params.admission = texts
    out = ffi.new("struct hotmoe_replay **")
    status = lib.hotmoe_replay_create(params, out)
    try:
        names.raise_pending()
        check(status)
    except BaseException:
        lib.hotmoe_replay_free(out[0])
        raise
    return out[0]


def _run(
    feed: _Feed, pools: _Pools, policy: PolicySpec, admission: AdmissionSpec, miss: str, progress: Callable[[int], Any] | None
) -> tuple[Outcome, tuple[str, str]]:
    """Run events through slot maps; return what came of them, and the names of policy and admission."""
    outcome = Outcome.zeros(feed.n)
    with resolve(policy, admission) as names:
        maps = create_slot_maps(names, pools.layer, pools.bank, pools.n_expert, pools.n_slots, MISSES[miss])
        try:
            for begin in range(0, feed.n, _CHUNK):
                end = min(begin + _CHUNK, feed.n)
                part, keep = feed.part(begin, end)
                results = _results(outcome, begin, end, keep)
                status = lib.hotmoe_replay_feed(maps, part, results)
                names.raise_pending()
                check(status)
                if progress:
                    progress(end - begin)
        finally:
            lib.hotmoe_replay_free(maps)
        return outcome, (
            names.policy_label or text(lib.hotmoe_policy_default()),
            names.admission_label or text(lib.hotmoe_admission_default()),
        )


def _belady(feed: _Feed, pools: _Pools, *, bypass: bool, any_phase: bool) -> Outcome:
    """Return what comes of events if the future is known."""
    outcome = Outcome.zeros(feed.n)._replace(evictions=None)
    part, keep = feed.part(0, feed.n, counted=True)
    results = _results(outcome, 0, feed.n, keep)
    phase = -1 if any_phase else lib.HOTMOE_PHASE_DECODE
    check(lib.hotmoe_replay_belady(part, len(pools.n_slots), pools.n_slots, MISSES["cpu" if bypass else "copy"], phase, results))
    return outcome


def _results(outcome: Outcome, begin: int, end: int, keep: list[Any]) -> Any:
    """Return a `struct hotmoe_replay_results` for some events; what must live as long is added to `keep`."""
    results = ffi.new("struct hotmoe_replay_results *")
    for name, array in outcome._asdict().items():
        if array is not None:
            keep.append(ffi.from_buffer("int32_t[]", array[begin:end], require_writable=True))
            setattr(results, name, keep[-1])
    return results
