"""The C API as Python sees it: `ffi`, `lib`, and the way from a status code to an exception.

Importing this module loads our libraries and verifies that they belong to this version of the Python code.
"""

from __future__ import annotations

from typing import Any

from . import _libs
from .errors import ArgumentError, DeviceMemoryError, HotmoeError, LibraryError, PlanError, PolicyError, StateError, StoreError

API_VERSION = 2  # of native/include/hotmoe/*.h, as this code was written for

_libs.load()  # by absolute path, before the extension asks the loader for it by name

try:
    from ._native import ffi, lib
except ImportError as error:
    raise LibraryError(f"cannot load the extension module of hotmoe: {error}. Reinstall the package") from error

if lib.hotmoe_api_version() != API_VERSION:
    raise LibraryError(
        f"{_libs.path()} has version {lib.hotmoe_api_version()} of the C API, this Python code needs {API_VERSION}. Files of "
        f"two installations are mixed: uninstall hotmoe, remove {_libs.LIB_DIR} if it is still there, and install it again"
    )

__all__ = ["API_VERSION", "check", "ffi", "lib", "text"]

_EXCEPTIONS: dict[int, type[HotmoeError]] = {
    lib.HOTMOE_ERR_ARGUMENT: ArgumentError,
    lib.HOTMOE_ERR_PLAN: PlanError,
    lib.HOTMOE_ERR_MEMORY: DeviceMemoryError,
    lib.HOTMOE_ERR_POLICY: PolicyError,
    lib.HOTMOE_ERR_STORE: StoreError,
    lib.HOTMOE_ERR_STATE: StateError,
}


def text(c_string: Any) -> str:
    """Return a C string (`char *` or `char[n]`) as text, "" for NULL."""
    if c_string == ffi.NULL:
        return ""
    return bytes(ffi.string(c_string)).decode("utf-8", errors="replace")


def check(status: int) -> int:
    """Return a status that is not an error, and raise for one that is.

    Args:
        status: What a function of the C API returned; negative means failure.

    Raises:
        HotmoeError: Of the class that belongs to the code, with the message of `hotmoe_last_error()`.
    """
    if status >= 0:
        return status
    message = text(lib.hotmoe_last_error()) or f"the C API failed with status {status} and left no message"
    raise _EXCEPTIONS.get(status, HotmoeError)(message)
