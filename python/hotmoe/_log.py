"""Listen to llama.cpp's log while a model loads: it reports errors nowhere else."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

from ._vendor.llama_cpp import llama_cpp

_WARN, _ERROR, _CONT = 3, 4, 5  # enum ggml_log_level (the list in the vendored _logger.py is an older one)
_MAX_LINES = 8

_lock = threading.Lock()
_captures: dict[int, CapturedLog] = {}  # thread -> what it captures
_previous: tuple[Any, Any] | None = None  # callback and its argument that were there before ours


class CapturedLog:
    """The last warnings and errors that one thread logged."""

    def __init__(self, *, forward: bool) -> None:
        self.forward = forward
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


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]  # the vendored layer is not typed strictly
def _listen(level: int, text: bytes, user_data: Any) -> None:
    capture = _captures.get(threading.get_ident())
    if capture is not None:
        capture.add(level, text.decode("utf-8", errors="replace"))
        if not capture.forward:
            return
    previous = _previous
    if previous is not None and previous[0]:
        previous[0](level, text, previous[1])


@contextlib.contextmanager
def capture_log(*, forward: bool = True) -> Iterator[CapturedLog]:
    """Collect what llama.cpp logs on this thread. Nested calls on one thread share the outer capture.

    Args:
        forward: Whether messages of this thread still go where they went before.
    """
    global _previous
    thread = threading.get_ident()
    if (outer := _captures.get(thread)) is not None:
        yield outer
        return
    with _lock:
        if not _captures:
            callback, argument = llama_cpp.llama_log_callback(), ctypes.c_void_p()
            llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(argument))
            _previous = callback, argument
            llama_cpp.llama_log_set(_listen, ctypes.c_void_p())
        capture = _captures[thread] = CapturedLog(forward=forward)
    try:
        yield capture
    finally:
        with _lock:
            del _captures[thread]
            if not _captures and _previous is not None:
                llama_cpp.llama_log_set(*_previous)
