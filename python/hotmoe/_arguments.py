"""The arguments of `ExpertCache`: what is legal, and how the C side takes it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ._binding import lib
from .errors import ArgumentError

# one value of a size: a number of slots, or bytes, or "auto"; the C side decides about the rest
_SIZE = re.compile(r"auto|\d+|\d+(\.\d+)?\s*[KMGT](i?B)?", re.IGNORECASE)

_HOST_SLOTS = re.compile(r"auto|\d+\s*s?|\d+(\.\d+)?\s*[KMGT](i?B)?", re.IGNORECASE)

STORES = {"mapped": lib.HOTMOE_STORE_MAPPED, "resident": lib.HOTMOE_STORE_RESIDENT, "stream": lib.HOTMOE_STORE_STREAM}
DIRECT = {"auto": lib.HOTMOE_DIRECT_AUTO, "on": lib.HOTMOE_DIRECT_ON, "off": lib.HOTMOE_DIRECT_OFF}
MAX_IO_THREADS = 256


def choice(name: str, value: object, known: Mapping[str, int]) -> str:
    """Return a value that has to be one of some names; ArgumentError otherwise."""
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(f"{name}={value!r} is not one of {', '.join(map(repr, known))}")
    return value


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
