"""The exceptions of this package.

All derive from `HotmoeError`. Where llama-cpp-python or Python itself has a customary type for the same fault (a file
that does not load is a `ValueError` there), the exception is that type too, so existing handlers keep working.
"""

from __future__ import annotations


class HotmoeError(Exception):
    """Base of all errors that this package raises on purpose. The message names the value, the limit and the fix."""


class ModelLoadError(HotmoeError, ValueError):
    """A model or its context could not be loaded.

    Attributes:
        log: The last warnings and errors that llama.cpp logged while loading, oldest first.
    """

    def __init__(self, message: str, log: tuple[str, ...] = ()) -> None:
        """Make the error; `log` lines are appended to the message."""
        super().__init__("\n  ".join([message, *log]))
        self.log = log


class LoadCancelledError(ModelLoadError):
    """The progress callback of a load asked to stop."""


class PlanError(HotmoeError):
    """The sizes asked for cannot be met, or there is nothing to pool."""


class PolicyError(HotmoeError):
    """An unknown policy, or one that failed."""


class StoreError(HotmoeError):
    """A store could not deliver the bytes of an expert."""


class ArgumentError(HotmoeError, ValueError):
    """A value that the caller gave is not legal."""


class TraceError(HotmoeError, ValueError):
    """Recorded routing that cannot be read, or has a value in it that cannot be."""


class StateError(HotmoeError, RuntimeError):
    """Not possible in the present state: already attached, closed, too late to configure."""


class BusyError(StateError):
    """Another call on the same object is in the way, and waiting for it would not help."""


class DecodeError(HotmoeError, RuntimeError):
    """llama.cpp could not evaluate a batch.

    Attributes:
        status: What llama_decode returned: 1 no room in the KV cache, 2 aborted, negative an error.
        log: The last warnings and errors that llama.cpp logged meanwhile, oldest first.
    """

    def __init__(self, status: int, log: tuple[str, ...] = ()) -> None:
        """Make the error; `log` lines are appended to the message."""
        super().__init__("\n  ".join([f"llama_decode returned {status}", *log]))
        self.status = status
        self.log = log


class DeviceMemoryError(HotmoeError, MemoryError):
    """A device or the host refused an allocation."""


class LibraryError(HotmoeError, ImportError):
    """A native library of this package is missing, does not load, or does not belong to this version."""
