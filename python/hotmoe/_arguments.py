"""The arguments of `ExpertCache`: what is legal, and how the C side takes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ._binding import lib
from .errors import ArgumentError
from .policies.registry import ADMISSIONS, POLICIES, Kind
from .tiers import TIERS

# one value of a size: a number of slots, or bytes, or "auto"; the C side decides about the rest
_SIZE = re.compile(r"auto|\d+|\d+(\.\d+)?\s*[KMGT](i?B)?", re.IGNORECASE)

_HOST_SLOTS = re.compile(r"auto|\d+\s*s?|\d+(\.\d+)?\s*[KMGT](i?B)?", re.IGNORECASE)

STORES = {"mapped": lib.HOTMOE_STORE_MAPPED, "resident": lib.HOTMOE_STORE_RESIDENT, "stream": lib.HOTMOE_STORE_STREAM}
DIRECT = {"auto": lib.HOTMOE_DIRECT_AUTO, "on": lib.HOTMOE_DIRECT_ON, "off": lib.HOTMOE_DIRECT_OFF}
MAX_IO_THREADS = 256

# the arguments that name code, and what they may name
KINDS: dict[str, Kind[Any]] = {
    "policy": POLICIES,
    "admission": ADMISSIONS,
    "host_policy": POLICIES,
    "host_admission": ADMISSIONS,
    "tier_manager": TIERS,
}


def name_of(spec: Any) -> str:
    """Return what to call the value of such an argument."""
    return spec if isinstance(spec, str) else "" if spec is None else getattr(spec, "__name__", type(spec).__name__)


def choice(name: str, value: object, known: Mapping[str, int]) -> str:
    """Return a value that has to be one of some names; ArgumentError otherwise."""
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(f"{name}={value!r} is not one of {', '.join(map(repr, known))}")
    return value


def check_combination(wish: Mapping[str, Any], store: str, host_slots: str) -> None:
    """Refuse arguments of `ExpertCache` that are about something that was not asked for.

    Args:
        wish: All of them.
        store: Of these, what experts are stored in, and
        host_slots: a size, as they are understood.

    Raises:
        ArgumentError: If there are some; it says what to do.
    """
    if wish["require_pinned"] and store != "resident":
        raise ArgumentError("require_pinned is about experts in pinned memory: give store='resident', too")
    if store == "stream":
        if wish["tier_manager"] not in (None, "none"):
            raise ArgumentError("a tier manager is about mapped experts: with store='stream' leave tier_manager out")
        return
    for name in ("host_policy", "host_admission"):
        if wish[name] is not None:
            raise ArgumentError(
                f"{name}={wish[name]!r} is about streamed experts behind a device's slots: give store='stream', too, "
                f"or leave it out"
            )
    if host_slots.lower() == "auto":
        raise ArgumentError("host_slots='auto' is for streamed experts: give store='stream', or a number of slots or bytes")
    if host_slots and store != "resident" and wish["tier_manager"] is None:
        raise ArgumentError(
            f"host_slots={wish['host_slots']!r} needs something that keeps to it: store='stream', or a tier manager of mapped "
            f"experts (tier_manager='readahead')"
        )
    if wish["io_threads"] is not None or wish["direct"] != "auto":
        raise ArgumentError("io_threads and direct are about streamed experts: give store='stream', too")


def parse_host_slots(size: int | str | None) -> str:
    """Return the size as the C side takes it; "" for no limit."""
    if size is None or (size == 0 and not isinstance(size, bool)):
        return ""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"host_slots must be a number or text such as '24G', not {type(size).__name__}")
    wanted = str(size).strip()
    if wanted and not _HOST_SLOTS.fullmatch(wanted):
        raise ArgumentError(
            f"host_slots={size!r}: expected a number of experts per layer (32, '32s'), or bytes of all layers ('24G')"
        )
    return "" if wanted == "0" else wanted


def parse_io_threads(io_threads: int | None) -> int:
    """Return the number of threads as the C side takes it; 0 for the default."""
    n = io_threads or 0
    if isinstance(io_threads, bool) or not isinstance(n, int) or not 0 <= n <= MAX_IO_THREADS:
        raise ArgumentError(f"io_threads={io_threads!r} is not a number of threads from 1 to {MAX_IO_THREADS}")
    return n


def parse_bytes(size: str) -> int:
    """Return the bytes of a size such as "24G".

    Raises:
        ArgumentError: If it is a number of slots, or "auto".
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", size, re.IGNORECASE)
    if not match:
        raise ArgumentError(f"host_slots={size!r}: with store='resident' it is a limit on pinned memory in bytes, such as '24G'")
    return int(float(match[1]) * 1024 ** ("KMGT".index(match[2].upper()) + 1))


def parse_slots(slots: int | str) -> str:
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
