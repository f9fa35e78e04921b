"""Policies and admissions by name, and from whatever users give to what the C side takes."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import itertools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from .._binding import check, ffi, lib, text
from ..errors import ArgumentError, PolicyError
from ..model_file import MAX_EXPERTS
from .base import AdmissionPolicy, EvictionPolicy

if TYPE_CHECKING:
    from ..tiers import TierManager

__all__ = ["AdmissionSpec", "PolicySpec", "Resolved", "register_admission", "register_policy", "resolve"]

T = TypeVar("T", bound="EvictionPolicy | AdmissionPolicy | TierManager")
C = TypeVar("C", bound=type)

PolicySpec: TypeAlias = "str | type[EvictionPolicy] | EvictionPolicy | None"
AdmissionSpec: TypeAlias = "str | type[AdmissionPolicy] | AdmissionPolicy | None"

_numbers = itertools.count(1)


class Kind(Generic[T]):
    """Policies, admissions, or tier managers: where names come from and which C functions know them."""

    def __init__(self, what: str, base: type[T], group: str, prefix: str = "") -> None:
        """Describe a kind; its C functions are named hotmoe_<prefix>_..., the prefix is `what` if there is none."""
        self.what = what
        self.prefix = prefix or what
        self.base = base
        self.group = group  # of entry points
        self.registered: dict[str, type[T]] = {}

    def native(self) -> dict[str, str]:
        """Return the names that the C side knows by itself: name -> one line of description."""
        name, description = getattr(lib, f"hotmoe_{self.prefix}_name"), getattr(lib, f"hotmoe_{self.prefix}_description")
        names = (i for i in range(getattr(lib, f"hotmoe_{self.prefix}_count")()) if "#" not in text(name(i)))
        return {text(name(i)): text(description(i)) for i in names}

    def entry_points(self) -> dict[str, Any]:
        """Return what installed packages offer: name -> importlib.metadata.EntryPoint."""
        from importlib.metadata import entry_points

        return {point.name: point for point in entry_points(group=self.group)}

    def known(self) -> dict[str, str]:
        """Return all names: name -> one line of description."""
        python = {name: _first_line(cls) for name, cls in self.registered.items()}
        packages = {name: f"from {point.value}" for name, point in self.entry_points().items()}
        return packages | python | self.native()

    def register(self, name: str) -> Callable[[C], C]:
        """Return a class decorator that gives a class a name."""
        if not name or set(name) & set("(),:#"):
            raise ArgumentError(f"{self.what} name {name!r}: it must not be empty or contain any of (),:#")
        if name in self.native():
            raise ArgumentError(f"{self.what} name {name!r} is that of a built-in one: choose another")

        def decorate(cls: C) -> C:
            given: Any = cls  # whatever it is
            if not (isinstance(given, type) and issubclass(given, self.base)):
                raise TypeError(f"{cls!r} must be a subclass of {self.base.__name__}")
            self.registered[name] = given
            return cls

        return decorate

    def is_native(self, spec: str) -> bool:
        """Return whether the C side takes a spec as it is."""
        return spec.startswith("lib:") or spec.partition("(")[0] in self.native()

    def check(self, spec: object) -> None:
        """Verify that a spec means something, without making an object of Python code.

        Raises:
            PolicyError: If there is no such name, its options are wrong, or the class cannot be imported.
            TypeError: If it is neither a name, nor a class or an object derived from the base class.
        """
        if isinstance(spec, str) and self.is_native(spec.strip()):
            self.try_native(_expanded(spec.strip(), self.what))
        elif spec is not None and not isinstance(spec, self.base):
            cls, arguments, _ = self._named(spec)
            try:
                inspect.signature(cls).bind(**arguments)
            except TypeError as error:
                raise PolicyError(f"{self.what} {spec}: {error}") from error

    def try_native(self, spec: str) -> None:
        """Make an object of the C side, and free it."""
        config = ffi.new("struct hotmoe_policy_config *", {"n_expert": MAX_EXPERTS, "n_slots": MAX_EXPERTS // 2})
        out = ffi.new(f"struct hotmoe_{self.what} *")
        check(getattr(lib, f"hotmoe_{self.prefix}_create")(spec.encode(), config, out))
        if out.free:
            out.free(out.context)

    def wrap(self, made: Any, label: str, another: Callable[[], Any]) -> Any:
        """Return what the C side's calls to a Python object go through: a Source."""
        from .._bridge import Source  # not before somebody has a policy in Python

        return Source(made, label, another)

    def make(self, spec: object) -> tuple[T, str, Callable[[], T]]:
        """Return the Python object that a spec means, what to call it in messages, and what makes another one.

        Raises:
            PolicyError: If there is no such name, or the class cannot be imported or called.
            TypeError: If it is neither a name, nor a class or an object derived from the base class.
        """
        if isinstance(spec, self.base):
            return spec, type(spec).__name__, lambda: copy.deepcopy(spec)
        cls, arguments, label = self._named(spec)
        try:
            return cls(**arguments), label, lambda: cls(**arguments)
        except TypeError as error:
            raise PolicyError(f"{self.what} {label}: cannot make a {cls.__name__}: {error}") from error

    def _named(self, spec: object) -> tuple[type[T], dict[str, Any], str]:
        """Return the class that a spec means, the arguments to make an object, and what to call it."""
        if isinstance(spec, str):
            return self._class_of(spec.strip()), _arguments(spec.strip(), self.what), spec.strip()
        if isinstance(spec, type) and issubclass(spec, self.base):
            return spec, {}, spec.__name__
        got = spec.__name__ if isinstance(spec, type) else type(spec).__name__
        raise TypeError(f"{self.what} must be a name, or a {self.base.__name__} (class or object), not {got}")

    def _class_of(self, spec: str) -> type[T]:
        name = spec.partition("(")[0].strip()
        if name in self.registered:
            return self.registered[name]
        points = {} if ":" in name else self.entry_points()
        if ":" not in name and name not in points:
            known = {"policy": "policies"}.get(self.what, f"{self.what}s")
            raise PolicyError(
                f"unknown {self.what} {name!r}; known {known}: {', '.join(self.known())}; a class of your own goes by "
                f'"package.module:Class", a shared library by "lib:PATH"'
            )
        try:
            if name in points:
                cls = points[name].load()
            else:
                module, _, attribute = name.partition(":")
                cls = importlib.import_module(module)
                for part in attribute.split("."):
                    cls = getattr(cls, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise PolicyError(f'{self.what} "{name}" cannot be imported: {error}') from error
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            raise PolicyError(f'{self.what} "{name}" is {cls!r}, not a subclass of {self.base.__name__}')
        return cls


POLICIES: Kind[EvictionPolicy] = Kind("policy", EvictionPolicy, "hotmoe.policies")
ADMISSIONS: Kind[AdmissionPolicy] = Kind("admission", AdmissionPolicy, "hotmoe.admission")


def register_policy(name: str) -> Callable[[C], C]:
    """Give an `EvictionPolicy` class a name, under which `ExpertCache(policy=)` and `hotmoe replay` find it.

    Args:
        name: Any, but that of a built-in policy. A later class of the same name takes the earlier one's place.

    Examples:
        >>> @register_policy("mine")
        ... class Mine(EvictionPolicy):
        ...     def select_evict(self, layer, n, candidates, **kw):
        ...         return candidates[:n]

    Raises:
        ArgumentError: If the name is that of a built-in policy, or has a character that has a meaning.
        TypeError: If it is not a subclass of `EvictionPolicy`.
    """
    return POLICIES.register(name)


def register_admission(name: str) -> Callable[[C], C]:
    """Give an `AdmissionPolicy` class a name; as `register_policy`."""
    return ADMISSIONS.register(name)


class Resolved(AbstractContextManager["Resolved"]):
    """A policy and an admission under names that the C side takes, as long as the object is not closed.

    C objects that were made meanwhile live on. After each call of C that can lead to Python code, call `raise_pending()`.

    Attributes:
        policy: For `hotmoe_policy_create`; None: the default.
        admission: For `hotmoe_admission_create`; None: the default.
        policy_label: What to show to people; None: the default.
        admission_label: The same.
        policy_object: The Python object, None if the policy is native.
        admission_object: The same.
    """

    def __init__(self, policy: PolicySpec = None, admission: AdmissionSpec = None) -> None:
        """See `resolve`."""
        self._sources: list[Any] = []
        self._names: list[tuple[str, str]] = []  # (prefix, name) of the C registry
        try:
            self.policy, self.policy_label, self.policy_object = self.add(POLICIES, policy)
            self.admission, self.admission_label, self.admission_object = self.add(ADMISSIONS, admission)
        except BaseException:
            self.close()
            raise

    def add(self, kind: Kind[T], spec: Any) -> tuple[str | None, str | None, T | None]:
        """Resolve one more spec: return the name for the C side, what to show to people, and the Python object, if it is one."""
        if spec is None:
            return None, None, None
        if isinstance(spec, str):
            spec = spec.strip()
            if kind.is_native(spec):
                return _expanded(spec, kind.what), spec, None
        made, label, another = kind.make(spec)
        return self._serve(kind, made, label, another), label, made

    def _serve(self, kind: Kind[T], made: T, label: str, another: Callable[[], T]) -> str:
        source = kind.wrap(made, label, another)
        self._sources.append(source)
        name = f"{label.partition('(')[0].strip()}#{next(_numbers)}"
        create = ffi.addressof(lib, f"hotmoe_py_{kind.prefix}_create")
        check(getattr(lib, f"hotmoe_{kind.prefix}_register")(name.encode(), b"", create, source.handle))
        self._names.append((kind.prefix, name))
        return name

    @property
    def inside(self) -> bool:
        """Whether a method of one of the objects runs at this moment."""
        return any(source.inside for source in self._sources)

    def raise_pending(self) -> None:
        """Raise what an object raised since the last time, if anything."""
        if self._sources:
            from .._bridge import raise_stray

            raise_stray()
            for source in self._sources:
                source.raise_pending()

    def close(self) -> None:
        """Take the names back, from the C side's registry and from the objects that bear them. More than once is fine."""
        names, self._names = self._names, []
        for prefix, name in names:
            getattr(lib, f"hotmoe_{prefix}_unregister")(name.encode())
        for source in self._sources:
            source.release()

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()


def resolve(policy: PolicySpec = None, admission: AdmissionSpec = None) -> Resolved:
    """Return names that the C side takes for what a user gave.

    Args:
        policy: None (the default), the name of a built-in or registered policy or of an entry point of the group
            `hotmoe.policies`, "package.module:Class", "lib:PATH"; each may have options, "name(key=value, ...)". Or an
            `EvictionPolicy`, class or object.
        admission: The same for admissions; the group is `hotmoe.admission`.

    Raises:
        PolicyError: If there is no such name, or the class cannot be imported or called.
        StateError: If an object serves something else already.
        TypeError: If it is something else.
    """
    return Resolved(policy, admission)


def _expanded(spec: str, what: str) -> str:
    """Return "static(profile=FILE)" with the lists that the file gives, as the native policy takes them; else the spec itself."""
    if not re.match(r"static\s*\(\s*profile\s*=", spec):
        return spec
    arguments = _arguments(spec, what)
    from .profile import profile_as_pins

    if set(arguments) != {"profile"}:
        raise PolicyError(f"{what} {spec!r}: a profile takes the place of all other options")
    return f"static(pins={profile_as_pins(str(arguments['profile']))})"


def split_specs(specs: str) -> list[str]:
    """Split a comma-separated list of names; commas inside parentheses belong to options."""
    parts, depth = [""], 0
    for character in specs:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _arguments(spec: str, what: str) -> dict[str, Any]:
    """Return the options of "name(key=value, ...)": numbers, True, False, None and quoted text; all else is text."""
    _, parenthesis, rest = spec.partition("(")
    if parenthesis and not rest.endswith(")"):
        raise PolicyError(f"{what} {spec!r}: the parenthesis is not closed")
    arguments: dict[str, Any] = {}
    for item in split_specs(rest[:-1]) if rest[:-1].strip() else []:
        key, equal, value = (part.strip() for part in item.partition("="))
        if not equal or not key.isidentifier():
            raise PolicyError(f"{what} {spec!r}: {item!r} is not of the form key=value")
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[key] = value
    return arguments


def _first_line(cls: type) -> str:
    return next(iter((cls.__doc__ or "").strip().splitlines()), "")
