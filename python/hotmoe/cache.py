"""The expert cache: asked for as an argument of `Llama`, live once the model is loaded."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from ._arguments import (
    DIRECT,
    KINDS,
    STORES,
    check_combination,
    choice,
    name_of,
    parse_bytes,
    parse_host_slots,
    parse_io_threads,
    parse_slots,
)
from ._binding import check, ffi, lib, text
from ._reading import BOTH_PHASES, read_phase, read_plan, read_store, read_tier
from .errors import ArgumentError, StateError, StoreError
from .plan import Plan, format_bytes
from .policies.base import AdmissionPolicy, EvictionPolicy
from .policies.registry import ADMISSIONS, POLICIES, AdmissionSpec, PolicySpec, Resolved
from .stats import CacheStats
from .tiers import TIERS, TierManager, TierSpec

if TYPE_CHECKING:
    from .traces import Trace

__all__ = ["ExpertCache"]


class ExpertCache:
    """Slots for hot experts on the devices that run a model's layers.

    An object of this class is a wish first: give it to one `Llama`, which makes it live. Then it has a plan and counters.
    With an expert cache, all layers go to the device and all experts to host memory, unless the arguments of `Llama` say
    otherwise.

    It is a context manager: leaving the block closes it. Its methods may be called while another thread evaluates with
    `hotmoe.Llama`; of a model that an installed llama-cpp-python evaluates, only between evaluations.

    Examples:
        >>> cache = ExpertCache(slots="6GiB", policy="slru")
        >>> llm = Llama("model.gguf", expert_cache=cache)  # doctest: +SKIP
        >>> print(cache.plan)  # doctest: +SKIP
        >>> cache.stats().decode.hit_rate  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        slots: int | str = "auto",
        policy: PolicySpec = None,
        admission: AdmissionSpec = None,
        tier_manager: TierSpec = None,
        store: str | None = None,
        host_slots: int | str | None = None,
        host_policy: PolicySpec = None,
        host_admission: AdmissionSpec = None,
        io_threads: int | None = None,
        direct: str = "auto",
        overlap: bool = True,
        require_pinned: bool = False,
        strict: bool = False,
        record: bool = False,
    ) -> None:
        """Describe a cache.

        Args:
            slots: How many experts of each layer have a slot: a number (32), bytes for all layers of a device ("6GiB",
                "512MiB"; powers of 1024), or "auto" for the free device memory less some headroom. Several devices are
                separated by slashes ("48/64"), one value serves all. 0 switches the cache off and leaves the placement
                of the weights as it would be with one.
            policy: Which expert loses its slot: a name (`hotmoe.cache.policies()` lists them), "package.module:Class",
                "lib:PATH" of a shared library, or an `EvictionPolicy`, class or object. A name may have options in
                parentheses: "lrfu(half_life=32)". None for the default.
            admission: Which expert that missed may keep its slot: the same for admissions (`hotmoe.cache.admissions()`).
            tier_manager: What host memory keeps of experts that are mapped from the file: a name ("readahead",
                `hotmoe.cache.tier_managers()` lists them), "package.module:Class", "lib:PATH", or a `hotmoe.TierManager`, class
                or object. None or "none": the system decides alone. With `slots=0` it works without slots on a device.
            store: Where a miss gets its bytes. "mapped" (None is the same): from host memory, where the file is mapped, or
                was read to. "resident": from host memory that the device has pinned, where it can: uploads do not block then.
                "stream": from the file itself, for models that are larger than the RAM. Experts are not loaded
                then; `host_slots` of each layer are kept in host memory.
            host_slots: How many experts of each layer host memory is to hold: a number (32, "32s"), or bytes of all layers
                together ("24G"; powers of 1024), at least as many as a token uses. When streaming, they are the pool that the
                CPU computes from, or what backs the device's slots; None and "auto" take what the machine and its memory
                cgroups leave. For a tier manager of mapped experts, None or 0 are no limit.
            host_policy: Of streamed experts behind a device's slots: which expert loses its place in host memory; the same values
                as for `policy`. It is asked about experts that the device missed, and told of those that lose their slot there.
            host_admission: Of these, which may keep its place in host memory; the same values as for `admission`.
            io_threads: How many threads read streamed experts; None for the default. The first cache over a model decides.
            direct: How streamed experts are read: "on": past the page cache (O_DIRECT); "off": through it; "auto": past it where
                that works.
            overlap: Of streamed experts that the CPU computes: whether a layer's hits compute while its misses are read.
            require_pinned: With store="resident", fail instead of warn if experts could not be pinned.
            strict: Fail instead of warn if a layer's experts cannot be pooled.
            record: Keep the routing of every token and layer in memory, 8 bytes per expert used, until `take_trace()`. It
                needs no slots: with `slots=0` experts may lie anywhere.

        Raises:
            ArgumentError: If an argument cannot be understood, or is about something that was not asked for.
            PolicyError: If there is no such policy, admission or tier manager, or its class cannot be made.
            TypeError: If an argument has the wrong type.
        """
        self._native: Any = None  # struct hotmoe_cache *, while attached
        self._free: Any = None  # kept here, since nothing can be imported any more when the interpreter ends
        self._plan: Plan | None = None
        self._state = "new"  # -> "attached" -> "closed"
        # held while llama.cpp evaluates, since the counters and pools of the C side must not be looked at meanwhile
        self._evaluating = threading.RLock()
        self._wish: dict[str, Any] = {
            "slots": slots,
            "policy": policy,
            "admission": admission,
            "tier_manager": tier_manager,
            "store": store,
            "host_slots": host_slots,
            "host_policy": host_policy,
            "host_admission": host_admission,
            "io_threads": io_threads,
            "direct": direct,
            "overlap": overlap,
            "require_pinned": require_pinned,
            "strict": strict,
            "record": record,
        }
        self._requested = parse_slots(slots)
        for name, kind in KINDS.items():
            kind.check(self._wish[name])  # what is wrong is better said now than when a model is loaded
        self._host_slots = parse_host_slots(host_slots)
        self._store = choice("store", store or "mapped", STORES)
        self._direct = choice("direct", direct, DIRECT)
        self._io_threads = parse_io_threads(io_threads)
        check_combination(self._wish, self._store, self._host_slots)
        if self.streams and self._requested == "0":
            self._requested = "auto"
        self._pinned_limit = 0  # bytes; 0: none
        if self._store == "resident" and self._host_slots:
            self._pinned_limit = parse_bytes(self._host_slots)
            self._host_slots = ""
        self._require_pinned, self._overlap = bool(require_pinned), bool(overlap)
        self._strict, self._record = bool(strict), bool(record)
        self._resolved: Resolved | None = None
        self._labels: dict[str, str | None] = {}  # of the arguments in KINDS, once resolved; None: the default
        self._objects: dict[str, Any] = {}  # the same, in Python; None: native

    def __repr__(self) -> str:
        """Return the call that would make an equal object, and its state."""
        given = {name: self._wish[name] for name in KINDS} | {
            "store": self._store if self.streams else None,
            "host_slots": self._host_slots or None,
            "record": self._record or None,
        }
        specs = "".join(f", {key}={value!r}" for key, value in given.items() if value is not None)
        return f"<ExpertCache(slots={self._requested!r}{specs}, strict={self._strict}) {self._state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the wish: the result is a fresh cache."""
        return functools.partial(ExpertCache, **self._wish), ()

    @property
    def slots(self) -> str:
        """The size as it was asked for; what it came to is in `plan`."""
        return self._requested

    @property
    def enabled(self) -> bool:
        """False for `slots=0`: the cache is switched off."""
        return self._requested != "0"

    @property
    def attached(self) -> bool:
        """Whether it serves a model now."""
        return self._state == "attached"

    @property
    def strict(self) -> bool:
        """Whether a layer that cannot be pooled is an error."""
        return self._strict

    @property
    def records(self) -> bool:
        """Whether it keeps the routing for `take_trace()`."""
        return self._record

    @property
    def policy(self) -> str:
        """Name of the eviction policy; "" if it is the default and the cache is not attached yet, or switched off."""
        return self._label("policy")

    @property
    def admission(self) -> str:
        """Name of the admission policy; "" if it is the default and the cache is not attached yet, or switched off."""
        return self._label("admission")

    @property
    def policy_object(self) -> EvictionPolicy | None:
        """The Python object that decides, from attachment on; None for a built-in policy. Look at it between evaluations."""
        return cast("EvictionPolicy | None", self._objects.get("policy"))

    @property
    def admission_object(self) -> AdmissionPolicy | None:
        """The Python object that admits, as `policy_object`."""
        return cast("AdmissionPolicy | None", self._objects.get("admission"))

    @property
    def host_policy(self) -> str:
        """Name of the eviction policy of host memory behind a device's slots; "" as `policy`, and where there is none."""
        return self._label("host_policy")

    @property
    def host_admission(self) -> str:
        """Name of the admission policy of host memory, as `host_policy`."""
        return self._label("host_admission")

    @property
    def host_policy_object(self) -> EvictionPolicy | None:
        """The Python object that decides about host memory, as `policy_object`."""
        return cast("EvictionPolicy | None", self._objects.get("host_policy"))

    @property
    def host_admission_object(self) -> AdmissionPolicy | None:
        """The Python object that admits to host memory, as `policy_object`."""
        return cast("AdmissionPolicy | None", self._objects.get("host_admission"))

    @property
    def tier_manager(self) -> str:
        """Name of the tier manager; "" if there is none."""
        return (self._labels.get("tier_manager") or name_of(self._wish["tier_manager"])) if self._has_tier else ""

    @property
    def tier_manager_object(self) -> TierManager | None:
        """The Python object that manages host memory, as `policy_object`."""
        return cast("TierManager | None", self._objects.get("tier_manager"))

    @property
    def _has_tier(self) -> bool:
        return self._wish["tier_manager"] not in (None, "none")

    @property
    def plan(self) -> Plan:
        """What the sizing decided; `print(cache.plan)` shows a table. It stays readable after the model is closed.

        Raises:
            StateError: If no model was loaded with this cache yet.
        """
        if self._plan is None:
            self._require_attached()
        assert self._plan is not None
        return self._plan

    def stats(self) -> CacheStats:
        """Return the counters since the model was loaded, or since `reset_stats()`.

        All are zero if the cache is switched off (`slots=0`). While another thread evaluates with `hotmoe.Llama`, this waits
        for the ubatch at work. A tier manager is told of the last step first.

        Raises:
            StateError: If the cache is not attached to a model (any more).
            BaseException: What a tier manager in Python raised.
        """
        with self._exclusive():
            self._require_attached()
            stats = CacheStats(
                total=read_phase(self._native, self.plan, BOTH_PHASES),
                prefill=read_phase(self._native, self.plan, lib.HOTMOE_PHASE_PREFILL),
                decode=read_phase(self._native, self.plan, lib.HOTMOE_PHASE_DECODE),
                tier=read_tier(self._native) if self._native is not None and self._has_tier else None,
                store=read_store(self._native) if self._native is not None and self.streams else None,
            )
            self._raise_pending()
            return stats

    def reset_stats(self) -> None:
        """Zero all counters; what is resident stays.

        Raises:
            StateError: If the cache is not attached to a model.
        """
        with self._exclusive():
            self._require_attached()
            if self._native is not None:
                lib.hotmoe_cache_reset_stats(self._native)
                self._raise_pending()

    def clear(self) -> None:
        """Forget what is resident; the pools stay.

        Raises:
            StateError: If the cache is not attached to a model.
        """
        with self._exclusive():
            self._require_attached()
            if self._native is not None:
                check(lib.hotmoe_cache_clear(self._native))
                self._raise_pending()

    def slot_map(self, bank: int) -> list[int]:
        """Return which expert lies in which slot of a bank, -1 for a free slot.

        Args:
            bank: Index into `plan.banks`.

        Raises:
            ArgumentError: If there is no such bank.
            StateError: If the cache is not attached to a model.
        """
        self._require_attached()
        banks = self.plan.banks
        if not 0 <= bank < len(banks):
            raise ArgumentError(f"bank {bank} is not in [0, {len(banks)})")
        n = banks[bank].n_slots
        if n == 0:
            return []
        experts = ffi.new("int32_t[]", n)
        with self._exclusive():
            self._require_attached()
            check(lib.hotmoe_cache_slot_map(self._native, bank, experts, n))
        return list(experts)

    @property
    def store(self) -> str:
        """Where misses get their bytes: "mapped" or "stream"."""
        return self._store

    @property
    def streams(self) -> bool:
        """Whether experts are read from the file when they are needed."""
        return self._store == "stream"

    def take_trace(self) -> Trace:
        """Return the routing that was recorded since the last call, and forget it.

        Phases are told apart by the size of the ubatch, tokens are counted from 0 in the order in which they were evaluated;
        `hotmoe.traces.record` knows what was prompt and what was generated.

        Raises:
            StateError: If the cache is not attached to a model, or was not made with `record=True`.
        """
        from .traces.take import take_trace

        with self._exclusive():
            self._require_attached()
            if not self._record:
                raise StateError("this ExpertCache records nothing: make it with record=True")
            return take_trace(self._native, self.plan.banks)

    def close(self) -> None:
        """Detach from the model and free the pools; the model goes on without. More than once is fine.

        Closing the model does this, too.

        Raises:
            BaseException: What a tier manager in Python raised about the last step; all is closed then.
        """
        with self._exclusive():
            native, self._native = self._native, None
            if self._state == "attached":
                self._state = "closed"
            if native is not None:
                self._free(native)
            if self._resolved is not None:
                self._resolved.close()
            if native is not None:
                self._raise_pending()

    def __enter__(self) -> ExpertCache:
        """Return the object itself; leaving the block closes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    # ---- used by Llama ----

    def _attach(self, context: int) -> None:
        """Make the cache live on a llama_context, given by its address.

        Raises:
            HotmoeError: PlanError, PolicyError, ...; nothing has changed then.
        """
        self._require_new()
        if not self.enabled and not self._has_tier and not self._record:
            self._plan = Plan(policy="", admission="", banks=(), devices=())
            self._state = "attached"
            return
        resolved, labels, objects = Resolved(), {}, {}
        out = ffi.new("struct hotmoe_cache **")
        try:
            given: dict[str, str | None] = {"slots": self._requested, "host_slots": self._host_slots}
            for name, kind in KINDS.items():
                given[name], labels[name], objects[name] = resolved.add(kind, self._wish[name])
            texts = {name: ffi.new("char[]", value.encode()) for name, value in given.items() if value}
            params = ffi.new("struct hotmoe_cache_params *", texts)
            params.strict = self._strict and self.enabled  # no slots were asked for, so none are missing
            params.record = self._record
            params.io_threads, params.direct = self._io_threads, DIRECT[self._direct]
            params.no_overlap = not self._overlap
            status = lib.hotmoe_cache_attach(ffi.cast("struct llama_context *", context), params, out)
            if status != 0:
                resolved.raise_pending()  # a policy in Python that failed says more than the C side can
            check(status)
        except BaseException:
            resolved.close()
            raise
        self._resolved, self._labels, self._objects = resolved, labels, objects
        self._native, self._free = out[0], lib.hotmoe_cache_free
        self._state = "attached"
        self._plan = read_plan(self._native, self._labels)
        if self._store == "resident":
            self._check_pinned()

    def _check_pinned(self) -> None:
        """Say what could not be pinned.

        Raises:
            StoreError: If it had to be.
        """
        banks = [bank for bank in self.plan.banks if bank.pooled and bank.pinned_bytes < bank.expert_bytes * bank.n_expert]
        if not banks:
            return
        missing = sum(bank.expert_bytes * bank.n_expert - bank.pinned_bytes for bank in banks)
        message = (
            f"{format_bytes(missing)} of experts in {len(banks)} layers could not be pinned (limit: "
            f"{format_bytes(self._pinned_limit) if self._pinned_limit else 'none'}): their uploads block"
        )
        if self._require_pinned:
            self.close()
            raise StoreError(f"{message}. Raise host_slots or the limit on locked memory, or leave out require_pinned")
        warnings.warn(message, stacklevel=4)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep evaluations of other threads away for a block, which must not run inside one.

        Raises:
            StateError: If this is called from inside a policy.
        """
        with self._evaluating:
            self._require_outside()
            yield

    def _require_outside(self) -> None:
        """Refuse what a policy must not call: it would change under the C code that waits for the policy's answer.

        Raises:
            StateError: If a policy in Python is being asked at this moment.
        """
        if self._resolved is not None and self._resolved.inside:
            raise StateError(
                "a policy must not use the model or the cache that it serves; its methods are told all that it may know"
            )

    def _raise_pending(self) -> None:
        """Raise what a policy in Python raised since the last time."""
        if self._resolved is not None:
            self._resolved.raise_pending()

    def _take_store_error(self) -> str:
        """Return why the last evaluation failed, if it could not read experts; "" otherwise. Told once."""
        return text(lib.hotmoe_cache_take_store_error(self._native)) if self._native is not None and self.streams else ""

    def _label(self, what: str) -> str:
        return str(getattr(self._plan, what)) if self._plan else name_of(self._wish[what])

    def _require_new(self) -> None:
        if self._state == "closed":
            raise StateError("this ExpertCache is closed; make a new one")
        if self._state != "new":
            raise StateError("this ExpertCache belongs to another Llama already; make one for each")

    def _require_attached(self) -> None:
        if self._state == "new":
            raise StateError("no model has this ExpertCache yet; give it to Llama(..., expert_cache=) or to hotmoe.attach()")
        if self._state == "closed":
            raise StateError("this ExpertCache, or its model, is closed; read its counters before close()")


def policies() -> dict[str, str]:
    """Return the eviction policies that go by a name, built in, registered or installed: name -> one line of description."""
    return POLICIES.known()


def admissions() -> dict[str, str]:
    """Return the admission policies that go by a name: name -> one line of description."""
    return ADMISSIONS.known()


def tier_managers() -> dict[str, str]:
    """Return the tier managers that go by a name: name -> one line of description."""
    return TIERS.known()
