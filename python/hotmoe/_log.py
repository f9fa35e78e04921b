"""Listen to llama.cpp's log: it reports the reasons of its errors nowhere else.

llama.cpp has one log callback. Ours is put in front of the one that is there, passes everything on, and stays: to install
and remove it around every evaluation would cost more than the rest of the Python code.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from ._vendor.llama_cpp import _logger, llama_cpp

_WARN, _ERROR, _CONT = 3, 4, 5  # enum ggml_log_level (the list in the vendored _logger.py is an older one)
_MAX_LINES = 8

_lock = threading.Lock()
_captures: dict[int, CapturedLog] = {}  # thread -> what it captures
_previous: tuple[Any, Any] | None = None  # callback and its argument that were there before ours
_previous_is_printer = False


class CapturedLog:
    """The last warnings and errors that one thread logged."""

    __slots__ = ("_errors", "_level", "_lines", "forward", "quiet")

    def __init__(self, *, forward: bool, quiet: bool) -> None:
        self.forward = forward
        self.quiet = quiet
        self._lines: list[str] = []
        self._level = 0  # of the line that a continuation belongs to
        self._errors = 0

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines, oldest first."""
        return tuple(line for line in (line.strip() for line in self._lines) if line)

    @property
    def has_error(self) -> bool:
        """Whether an error was among the lines."""
        return self._errors > 0

    def add(self, level: int, text: str) -> None:
        """Take one message as llama.cpp's callback gets it."""
        continued = level == _CONT
        if not continued:
            self._level = level
        if self._level not in (_WARN, _ERROR):
            return
        self._errors += self._level == _ERROR
        if continued and self._lines:
            self._lines[-1] += text
        else:
            self._lines.append(text)
            del self._lines[:-_MAX_LINES]


class capture_log:  # noqa: N801 - used like contextlib's functions
    """Collect what llama.cpp logs on this thread, in a with block. Nested blocks of one thread share what is collected.

    Args:
        forward: Whether messages of this thread still go where they went before.
        quiet: Whether they go there only if that is a callback of the user's own, not the one that prints to stderr.
    """

    __slots__ = ("_log", "_outer", "_outer_quiet", "_thread")

    def __init__(self, *, forward: bool = True, quiet: bool = False) -> None:
        """Begin with `with`."""
        self._log = CapturedLog(forward=forward, quiet=quiet)
        self._thread = 0
        self._outer: CapturedLog | None = None
        self._outer_quiet = False

    def __enter__(self) -> CapturedLog:
        """Return what is being collected."""
        thread = threading.get_ident()
        if (outer := _captures.get(thread)) is not None:
            self._outer, self._outer_quiet = outer, outer.quiet
            outer.quiet |= self._log.quiet
            return outer
        _install()
        _captures[thread] = self._log
        self._thread = thread
        return self._log

    def __exit__(self, *exception: object) -> None:
        """Stop collecting."""
        if self._outer is not None:
            self._outer.quiet = self._outer_quiet
        else:
            del _captures[self._thread]


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]  # the vendored layer is not typed strictly
def _listen(level: int, text: bytes, user_data: Any) -> None:
    capture = _captures.get(threading.get_ident())
    if capture is not None:
        capture.add(level, text.decode("utf-8", errors="replace"))
        if not capture.forward or (capture.quiet and _previous_is_printer):
            return
    previous = _previous
    if previous is not None and previous[0]:
        previous[0](level, text, previous[1])


_OWN = ctypes.cast(_listen, ctypes.c_void_p).value
_PRINTER = ctypes.cast(_logger.llama_log_callback, ctypes.c_void_p).value


def _install() -> None:
    """Put our callback in front, unless it is there already."""
    global _previous, _previous_is_printer
    with _lock:
        callback, argument = llama_cpp.llama_log_callback(), ctypes.c_void_p()
        llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(argument))
        address = ctypes.cast(callback, ctypes.c_void_p).value
        if address != _OWN:
            _previous, _previous_is_printer = (callback, argument), address == _PRINTER
            llama_cpp.llama_log_set(_listen, ctypes.c_void_p())
