"""The expert cache: asked for as an argument of `Llama`, live once the model is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import threading
from collections.abc import Iterator
from typing import Any

from ._binding import check, ffi, lib, text
from .errors import ArgumentError, StateError
from .plan import Plan, PlanBank, PlanDevice
from .policies.base import AdmissionPolicy, EvictionPolicy
from .policies.registry import ADMISSIONS, POLICIES, AdmissionSpec, PolicySpec, Resolved, resolve
from .stats import CacheStats, LayerCounters, PhaseStats, StepCounters

__all__ = ["ExpertCache"]

# one value of a size: a number of slots, or bytes, or "auto"; the C side decides about the rest
_SIZE = re.compile(r"auto|\d+|\d+(\.\d+)?\s*[KMGT](i?B)?", re.IGNORECASE)

_BOTH_PHASES = -1
_ALL_BANKS = -1


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
        strict: bool = False,
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
            strict: Fail instead of warn if a layer's experts cannot be pooled.

        Raises:
            ArgumentError: If `slots` cannot be understood.
            PolicyError: If there is no such policy or admission, or its class cannot be made.
            TypeError: If an argument has the wrong type.
        """
        self._native: Any = None  # struct hotmoe_cache *, while attached
        self._free: Any = None  # kept here, since nothing can be imported any more when the interpreter ends
        self._plan: Plan | None = None
        self._state = "new"  # -> "attached" -> "closed"
        # held while llama.cpp evaluates, since the counters and pools of the C side must not be looked at meanwhile
        self._evaluating = threading.RLock()
        self._requested = _parse_slots(slots)
        self._specs = {"policy": policy, "admission": admission}
        POLICIES.check(policy)  # what is wrong is better said now than when a model is loaded
        ADMISSIONS.check(admission)
        self._strict = bool(strict)
        self._resolved: Resolved | None = None

    def __repr__(self) -> str:
        """Return the call that would make an equal object, and its state."""
        specs = "".join(f", {key}={value!r}" for key, value in self._specs.items() if value is not None)
        return f"<ExpertCache(slots={self._requested!r}{specs}, strict={self._strict}) {self._state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the wish: the result is a fresh cache."""
        return functools.partial(ExpertCache, slots=self._requested, strict=self._strict, **self._specs), ()

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
        return self._resolved.policy_object if self._resolved else None

    @property
    def admission_object(self) -> AdmissionPolicy | None:
        """The Python object that admits, as `policy_object`."""
        return self._resolved.admission_object if self._resolved else None

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
        for the ubatch at work.

        Raises:
            StateError: If the cache is not attached to a model (any more).
        """
        with self._exclusive():
            self._require_attached()
            return CacheStats(
                total=self._phase_stats(_BOTH_PHASES),
                prefill=self._phase_stats(lib.HOTMOE_PHASE_PREFILL),
                decode=self._phase_stats(lib.HOTMOE_PHASE_DECODE),
            )

    def reset_stats(self) -> None:
        """Zero all counters; what is resident stays.

        Raises:
            StateError: If the cache is not attached to a model.
        """
        with self._exclusive():
            self._require_attached()
            if self._native is not None:
                lib.hotmoe_cache_reset_stats(self._native)

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

    def close(self) -> None:
        """Detach from the model and free the pools; the model goes on without. More than once is fine.

        Closing the model does this, too.
        """
        with self._exclusive():
            native, self._native = self._native, None
            if self._state == "attached":
                self._state = "closed"
            if native is not None:
                self._free(native)
            if self._resolved is not None:
                self._resolved.close()

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
        if not self.enabled:
            self._plan = Plan(policy="", admission="", banks=(), devices=())
            self._state = "attached"
            return
        resolved = resolve(self._specs["policy"], self._specs["admission"])
        texts = [ffi.new("char[]", t.encode()) if t else ffi.NULL for t in (self._requested, resolved.policy, resolved.admission)]
        params = ffi.new("struct hotmoe_cache_params *")
        params.slots, params.policy, params.admission = texts
        params.strict = self._strict
        out = ffi.new("struct hotmoe_cache **")
        try:
            status = lib.hotmoe_cache_attach(ffi.cast("struct llama_context *", context), params, out)
            if status != 0:
                resolved.raise_pending()  # a policy in Python that failed says more than the C side can
            check(status)
        except BaseException:
            resolved.close()
            raise
        self._resolved = resolved
        self._native, self._free = out[0], lib.hotmoe_cache_free
        self._state = "attached"
        self._plan = self._read_plan()

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

    def _label(self, what: str) -> str:
        label = getattr(self._resolved, f"{what}_label") if self._resolved else None
        if label or self._plan:
            return str(label or getattr(self._plan, what))
        spec = self._specs[what]
        return spec if isinstance(spec, str) else "" if spec is None else getattr(spec, "__name__", type(spec).__name__)

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

    # ---- reading the C structs ----

    def _read_plan(self) -> Plan:
        bank = ffi.new("struct hotmoe_plan_bank *")
        banks = []
        for i in range(lib.hotmoe_plan_n_banks(self._native)):
            check(lib.hotmoe_plan_get_bank(self._native, i, bank))
            banks.append(
                PlanBank(
                    layer=bank.layer,
                    bank=bank.bank,
                    pooled=bank.state == lib.HOTMOE_BANK_POOLED,
                    n_expert=bank.n_expert,
                    n_expert_used=bank.n_expert_used,
                    n_slots=bank.n_slots,
                    n_tensors=bank.n_tensors,
                    expert_bytes=bank.expert_bytes,
                    pool_bytes=bank.pool_bytes,
                    device=text(bank.device),
                    reason=text(bank.reason),
                )
            )
        device = ffi.new("struct hotmoe_plan_device *")
        devices = []
        for i in range(lib.hotmoe_plan_n_devices(self._native)):
            check(lib.hotmoe_plan_get_device(self._native, i, device))
            devices.append(
                PlanDevice(
                    device=text(device.device),
                    requested=text(device.requested),
                    n_banks=device.n_banks,
                    host_memory=bool(device.host_memory),
                    pool_bytes=device.pool_bytes,
                    free_bytes=device.free_bytes,
                    headroom_bytes=device.headroom_bytes,
                )
            )
        assert self._resolved is not None
        return Plan(
            policy=self._resolved.policy_label or text(lib.hotmoe_cache_policy(self._native)),
            admission=self._resolved.admission_label or text(lib.hotmoe_cache_admission(self._native)),
            banks=tuple(banks),
            devices=tuple(devices),
        )

    def _phase_stats(self, phase: int) -> PhaseStats:
        steps = ffi.new("struct hotmoe_step_counters *")
        if self._native is not None:
            check(lib.hotmoe_cache_step_stats(self._native, phase, steps))
        return PhaseStats(
            **self._counters(_ALL_BANKS, phase),
            steps=StepCounters(
                steps=steps.steps, tokens=steps.tokens, graphs_built=steps.graphs_built, bypassed=_bypassed(steps.bypassed)
            ),
            layers=tuple(
                LayerCounters(**self._counters(i, phase), layer=bank.layer, bank=bank.bank)
                for i, bank in enumerate(self.plan.banks)
            ),
        )

    def _counters(self, bank: int, phase: int) -> dict[str, Any]:
        counters = ffi.new("struct hotmoe_counters *")
        if self._native is not None:
            check(lib.hotmoe_cache_stats(self._native, bank, phase, counters))
        return {name: getattr(counters, name) for name in _COUNTER_NAMES} | {"bypassed": _bypassed(counters.bypassed)}


_COUNTER_NAMES = [
    field.name
    for field in dataclasses.fields(PhaseStats)
    if field.name not in ("bypassed", "steps", "layers")  # the ones that are not plain numbers
]


def policies() -> dict[str, str]:
    """Return the eviction policies that go by a name, built in, registered or installed: name -> one line of description."""
    return POLICIES.known()


def admissions() -> dict[str, str]:
    """Return the admission policies that go by a name: name -> one line of description."""
    return ADMISSIONS.known()


def _parse_slots(slots: int | str) -> str:
    """Return the size as the C side takes it; "0" for a cache that is switched off."""
    if isinstance(slots, bool) or not isinstance(slots, (int, str)):
        raise TypeError(f"slots must be a number or text such as '6GiB', not {type(slots).__name__}")
    parts = [part.strip() for part in str(slots).split("/")]
    if not all(_SIZE.fullmatch(part) for part in parts):
        raise ArgumentError(
            f"slots={slots!r}: expected a number of slots per layer (32), bytes per device ('6GiB'), or 'auto'; "
            f"several devices are separated by '/' ('48/64'), 0 switches the cache off"
        )
    if all(part.isdigit() and int(part) == 0 for part in parts):
        return "0"
    return "/".join(parts)


def _bypassed(counts: Any) -> dict[str, int]:
    return {text(lib.hotmoe_bypass_name(reason)): int(counts[reason]) for reason in range(lib.HOTMOE_BYPASS_COUNT)}
