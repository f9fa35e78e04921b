"""Lets the C side call policies and admissions that are written in Python.

How a call travels: the slot map of a bank calls a function pointer of `struct hotmoe_policy`; that is one of the functions below
(`extern "Python"` in native/cffi/callbacks.cdef); its context is a handle of a `Bound`, which knows the Python object and the
layer; the Python object's method runs. There is one `Bound` for each bank, and one `Source` for all banks that an object serves.

Nothing that Python code does may leave through C: every exception, KeyboardInterrupt included, is caught here and kept by the
`Source`; the C side is told that the policy failed, and serves that event by LRU. Whoever made the C call that led here asks
`Source.raise_pending()` afterwards.

Handles must live as long as C may use them: `_alive` holds them from creation until the C side calls `free`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ._binding import ffi, lib
from .errors import PolicyError, StateError
from .policies.base import AdmissionPolicy, EvictionPolicy

__all__ = ["Source", "raise_stray"]

_PHASES = {lib.HOTMOE_PHASE_DECODE: "decode", lib.HOTMOE_PHASE_PREFILL: "prefill"}

_from_handle = ffi.from_handle

_alive: dict[int, Any] = {}  # address of a handle -> the handle, while the C side may use it
_serving: dict[int, Source] = {}  # id of a Python object -> what wraps it, while it serves
_lock = threading.Lock()
_stray: list[BaseException] = []  # raised where no Source is known: between C and the first line of a function below


class Source:
    """A Python object that serves as policy or admission of one cache or replay.

    Attributes:
        inside: Whether a method of the object runs at this moment.
        step: Of the present event, as are
        phase: and
        n_tokens: what methods are told besides.
    """

    def __init__(self, policy: Any, label: str, another: Callable[[], Any]) -> None:
        """Wrap an object.

        Args:
            policy: The object.
            label: What messages call it.
            another: Makes one more, for the second banks of layers that have two.

        Raises:
            StateError: If the object serves another cache.
        """
        with _lock:
            if id(policy) in _serving:
                raise StateError(
                    f"this {label} object serves another cache already, or another tier of this one: give each an object of "
                    f"its own, or the class"
                )
            _serving[id(policy)] = self
        self.policy = policy
        self.label = label
        self.handle = ffi.new_handle(self)
        self.inside = False
        self.step = -1
        self.phase = ""
        self.n_tokens = 0
        self._another = another
        self._of_bank = {0: policy}
        self._n_bound = 0  # objects of the C side
        self._in_use = True  # there may come more of them
        self._pending: BaseException | None = None

    def of_bank(self, bank: int) -> Any:
        """Return the object that serves a layer's bank of that number."""
        if bank not in self._of_bank:
            self._of_bank[bank] = self._another()
        return self._of_bank[bank]

    def bind(self, config: Any) -> Any:
        """Return the handle of a new Bound, which lives until `unbind`."""
        handle = ffi.new_handle(self.bound(config))
        _alive[int(ffi.cast("uintptr_t", handle))] = handle
        self._n_bound += 1
        return handle

    def bound(self, config: Any) -> Any:
        """Return the object at work for what config describes."""
        return Bound(self, config)

    def unbind(self, handle: Any) -> None:
        """Let go of a Bound."""
        self._n_bound -= 1
        self._let_go()
        _alive.pop(int(ffi.cast("uintptr_t", handle)), None)

    def release(self) -> None:
        """Say that nothing more will be bound."""
        self._in_use = False
        self._let_go()

    def _let_go(self) -> None:
        if not self._in_use and self._n_bound == 0:
            with _lock:
                _serving.pop(id(self.policy), None)

    def keep(self, error: BaseException) -> None:
        """Keep an exception for `raise_pending`; of several the first, but KeyboardInterrupt and the like before others."""
        if self._pending is None or (isinstance(self._pending, Exception) and not isinstance(error, Exception)):
            self._pending = error

    def raise_pending(self) -> None:
        """Raise what the object raised since the last time, if anything."""
        error, self._pending = self._pending, None
        if error is not None:
            raise error

    def begin_step(self, step: int, event: Any) -> None:
        """Tell the objects of a new ubatch, before its first event."""
        self.step, self.phase, self.n_tokens = step, _PHASES[event.phase], event.n_tokens
        for policy in self._of_bank.values():
            policy.on_step(step, phase=self.phase, n_tokens=self.n_tokens)


def raise_stray() -> None:
    """Raise what was raised between C and Python, where a signal can strike, if anything."""
    if _stray:
        error = _stray[0]
        _stray.clear()
        raise error


class Bound:
    """A Python object at work for one bank.

    Its methods run for every layer of every token. The arrays of the C side have fixed addresses (policy.h says so): each is
    made a view of once, and once for each length that occurs. Keywords are written out where every event passes, since handing
    on a dict takes longer than the rest of the call.
    """

    def __init__(self, source: Source, config: Any) -> None:
        """Make the object's state for a bank.

        Args:
            source: The object.
            config: const struct hotmoe_policy_config *.
        """
        self.source = source
        self.layer = config.layer
        self.bank = config.bank
        self.n_expert = config.n_expert
        self.policy = source.of_bank(self.bank)
        self.wants_weights = False  # set from outside
        self.weights: npt.NDArray[np.float32] | None = None  # of the present event
        self.failed = False  # in the present event: what comes after is up to LRU
        self.answer: Any = None  # of select_evict, for messages; and what it chose from
        self.among: Any = None
        self._views: dict[str, npt.NDArray[Any]] = {}
        self._accessed: dict[int, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}  # number of experts -> experts, hit
        self._weights: dict[int, npt.NDArray[Any]] = {}  # number of experts -> weights
        self._candidates: dict[int, npt.NDArray[Any]] = {}  # number of candidates -> candidates
        self.policy.setup(self.layer, self.n_expert, config.n_slots, bank=self.bank)

    def view(self, name: str, pointer: Any, dtype: type) -> npt.NDArray[Any]:
        """Return an array of the C side, [n_expert], as a read-only view that is kept under a name."""
        array: npt.NDArray[Any] = np.frombuffer(ffi.buffer(pointer, self.n_expert * np.dtype(dtype).itemsize), dtype)
        array.flags.writeable = False
        self._views[name] = array
        return array

    def on_access(self, event: Any) -> None:
        """Hand on the experts that are about to be used."""
        self.failed = False
        source, n, step = self.source, event.n_experts, event.step
        if step != source.step:
            source.begin_step(step, event)
        if self.wants_weights:
            self.weights = self.weights_at(event.weights, n)
        try:
            experts, hit = self._accessed[n]
        except KeyError:
            experts, hit = self.view("experts", event.experts, np.int32)[:n], self.view("hit", event.hit, np.uint8)[:n]
            self._accessed[n] = experts, hit
        self.policy.on_access(
            self.layer,
            experts,
            hit,
            phase=source.phase,
            step=step,
            n_tokens=source.n_tokens,
            weights=self.weights,
            bank=self.bank,
        )

    def told(self) -> dict[str, Any]:
        """Return what methods are told besides, in the present event."""
        source = self.source
        return {
            "phase": source.phase,
            "step": source.step,
            "n_tokens": source.n_tokens,
            "weights": self.weights,
            "bank": self.bank,
        }

    def weights_at(self, pointer: Any, n: int) -> npt.NDArray[np.float32] | None:
        """Return the router weights of an event, [n], if there are any."""
        if not pointer:
            return None
        if n not in self._weights:
            self._weights[n] = self.view("weights", pointer, np.float32)[:n]
        return self._weights[n]

    def select_evict(self, n: int, candidates: Any, n_candidates: int, victims: Any) -> None:
        """Ask for victims.

        Raises:
            PolicyError: If the answer is not a sequence of n ids, or the object failed in this event already.
        """
        if self.failed:
            self.refuse("select_evict", None, "not asked, since the object failed in this event")
        try:
            among = self._candidates[n_candidates]
        except KeyError:
            among = self._candidates[n_candidates] = self.view("candidates", candidates, np.int32)[:n_candidates]
        self.among = among
        source = self.source
        self.answer = answer = self.policy.select_evict(
            self.layer,
            n,
            among,
            phase=source.phase,
            step=source.step,
            n_tokens=source.n_tokens,
            weights=self.weights,
            bank=self.bank,
        )
        try:
            victims[0:n] = answer.tolist() if isinstance(answer, np.ndarray) else answer
        except (TypeError, ValueError, OverflowError):
            self.refuse("select_evict", answer, f"a sequence of {n} expert ids was asked for")

    def on_refused(self, n: int) -> None:
        """See that the C side did not take the answer.

        Raises:
            PolicyError: Always.
        """
        self.refuse("select_evict", self.answer, f"{n} distinct ids out of {self.among.tolist()} were asked for")

    def admit(self, n: int, experts: Any, admitted: Any) -> None:
        """Ask which experts may keep their slots.

        Raises:
            PolicyError: If the answer is not n truth values.
        """
        try:
            judged = self._views["judged"]
        except KeyError:
            judged = self.view("judged", experts, np.int32)
        answer = self.policy.admit_many(self.layer, judged[:n], **self.told())
        verdicts = answer.tolist() if isinstance(answer, np.ndarray) else answer
        if not isinstance(verdicts, (list, tuple)) or len(verdicts) != n or not all(v in (False, True) for v in verdicts):
            self.refuse("admit", answer, f"{n} truth values were asked for")
        admitted[0:n] = [bool(verdict) for verdict in verdicts]

    def refuse(self, method: str, answer: object, wanted: str) -> None:
        """Raise a PolicyError about an answer."""
        raise PolicyError(f"{self.source.label}.{method} for layer {self.layer} answered {answer!r}: {wanted}")

    def on_evict(self, event: Any, n: int, experts: Any) -> None:
        """Hand on the experts that lost their slots."""
        try:
            evicted = self._views["evicted"]
        except KeyError:
            evicted = self.view("evicted", experts, np.int32)
        self.policy.on_evict_many(self.layer, evicted[:n], **(self.told() if event else {"bank": self.bank}))

    def on_load(self, n: int, experts: Any, slots: Any) -> None:
        """Hand on the experts that got slots."""
        try:
            loaded, into = self._views["loaded"], self._views["slots"]
        except KeyError:
            loaded, into = self.view("loaded", experts, np.int32), self.view("slots", slots, np.int32)
        self.policy.on_load_many(self.layer, loaded[:n], into[:n], **self.told())

    def reset(self) -> None:
        """Make the object forget."""
        self.policy.reset()


def _overrides(policy: object, base: type, *names: str) -> bool:
    """Return whether an object's class has a method of its own under one of these names."""
    return any(getattr(type(policy), name) is not getattr(base, name) for name in names)


def _wants_weights(policy: EvictionPolicy | AdmissionPolicy, *methods: str) -> bool:
    if policy.wants_weights is not None:
        return policy.wants_weights
    for name in methods:
        for parameter in inspect.signature(getattr(policy, name)).parameters.values():
            if parameter.name == "weights" or parameter.kind is inspect.Parameter.VAR_KEYWORD:
                return True
    return False


# ---- what C calls ----


def _on_stray(kind: Any, error: BaseException, traceback: Any) -> Literal[None]:
    _stray.append(error)


def _bind(user_data: Any, config: Any, out: Any, base: type, *methods: str) -> Any:
    """Fill in what policies and admissions have in common; return the Python object, or None if it cannot be set up.

    Args:
        user_data: Handle of the Source.
        config: const struct hotmoe_policy_config *.
        out: struct hotmoe_policy * or struct hotmoe_admission *.
        base: EvictionPolicy or AdmissionPolicy.
        *methods: Where weights could be asked for.
    """
    source: Source = ffi.from_handle(user_data)
    source.inside = True
    try:
        handle = source.bind(config)
    except BaseException as error:
        source.keep(error)
        return None
    finally:
        source.inside = False
    bound: Bound = ffi.from_handle(handle)
    out.context = handle
    out.struct_size = ffi.sizeof(out[0])
    out.abi_version = lib.HOTMOE_POLICY_ABI_VERSION
    out.wants_weights = bound.wants_weights = _wants_weights(bound.policy, *methods)
    out.on_access = lib.hotmoe_py_on_access  # also sets up what the others are told
    if _overrides(bound.policy, base, "on_evict", "on_evict_many"):
        out.on_evict = lib.hotmoe_py_on_evict
    out.reset = lib.hotmoe_py_reset
    out.free = lib.hotmoe_py_free
    return bound.policy


@ffi.def_extern(error=-1, onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_policy_create(user_data: Any, config: Any, out: Any) -> int:
    """Make a `struct hotmoe_policy` for a bank. Functions that the class leaves as they are stay NULL: no call, no cost."""
    policy = _bind(user_data, config, out, EvictionPolicy, "on_access", "select_evict")
    if policy is None:
        return -1
    out.select_evict = lib.hotmoe_py_select_evict
    out.on_refused = lib.hotmoe_py_on_refused
    if _overrides(policy, EvictionPolicy, "on_load", "on_load_many"):
        out.on_load = lib.hotmoe_py_on_load
    return 0


@ffi.def_extern(error=-1, onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_admission_create(user_data: Any, config: Any, out: Any) -> int:
    """Make a `struct hotmoe_admission` for a bank."""
    if _bind(user_data, config, out, AdmissionPolicy, "on_access", "admit_many", "admit") is None:
        return -1
    out.admit = lib.hotmoe_py_admit
    return 0


def _call(context: Any, method: Callable[..., None], *args: Any) -> bool:
    """Call a method of a Bound; return whether all went well."""
    bound: Bound = ffi.from_handle(context)
    source = bound.source
    source.inside = True
    try:
        method(bound, *args)
    except BaseException as error:
        bound.failed = True
        source.keep(error)
        return False
    finally:
        source.inside = False
    return True


# The two that every event, or every one with a miss, passes do themselves what _call does.


@ffi.def_extern(onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_on_access(context: Any, event: Any) -> None:
    """See hotmoe_policy.on_access."""
    bound: Bound = _from_handle(context)
    source = bound.source
    source.inside = True
    try:
        bound.on_access(event)
    except BaseException as error:
        bound.failed = True
        source.keep(error)
    finally:
        source.inside = False


@ffi.def_extern(error=-1, onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_select_evict(context: Any, event: Any, n: int, candidates: Any, n_candidates: int, victims: Any) -> int:
    """See hotmoe_policy.select_evict."""
    bound: Bound = _from_handle(context)
    source = bound.source
    source.inside = True
    try:
        bound.select_evict(n, candidates, n_candidates, victims)
    except BaseException as error:
        bound.failed = True
        source.keep(error)
        return -1
    finally:
        source.inside = False
    return n


@ffi.def_extern(onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_on_refused(context: Any, event: Any, n: int, victims: Any) -> None:
    """See hotmoe_policy.on_refused."""
    _call(context, Bound.on_refused, n)


@ffi.def_extern(error=-1, onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_admit(context: Any, event: Any, n: int, experts: Any, admitted: Any) -> int:
    """See hotmoe_admission.admit."""
    return n if _call(context, Bound.admit, n, experts, admitted) else -1


@ffi.def_extern(onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_on_evict(context: Any, event: Any, n: int, experts: Any) -> None:
    """See hotmoe_policy.on_evict."""
    _call(context, Bound.on_evict, event, n, experts)


@ffi.def_extern(onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_on_load(context: Any, event: Any, n: int, experts: Any, slots: Any) -> None:
    """See hotmoe_policy.on_load."""
    _call(context, Bound.on_load, n, experts, slots)


@ffi.def_extern(onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_reset(context: Any) -> None:
    """See hotmoe_policy.reset."""
    _call(context, Bound.reset)


@ffi.def_extern(onerror=_on_stray)  # type: ignore[untyped-decorator]
def hotmoe_py_free(context: Any) -> None:
    """See hotmoe_policy.free: the last call for this handle."""
    bound: Bound = ffi.from_handle(context)
    bound.source.unbind(context)
