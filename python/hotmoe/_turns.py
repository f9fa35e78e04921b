"""Let several threads use one object of llama-cpp-python, which has one context and one timeline of tokens.

Calls take turns. A call that finds another thread at work waits for it, as people expect who call one `Llama` from a
thread pool. A stream is one turn from its first item to its last, since what it has put into the context is its own;
between two items it is *suspended*, and which thread asks for the next one does not matter.

A thread cannot wait for itself. What it calls from inside a call of its own (a logits processor, a stopping criterion)
goes through. While a stream that it alone drives is suspended, its other calls go through too, and a new generation ends
that stream, as in llama-cpp-python, where the old one would go on with the new one's tokens: here it raises `BusyError`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from .errors import BusyError, StateError

T = TypeVar("T")

_ENDED = "this stream was ended by a later generation of the same thread, or by close(): finish or close a stream first"


class _Turn:
    """One call, or one stream."""

    def __init__(self) -> None:
        self.running: int | None = threading.get_ident()  # the thread that is at work; None: suspended
        self.home: int | None = self.running  # the only thread that ever drove it; None: there were several


class _Call:
    """A turn for a with block; a class, since it is there once per token."""

    __slots__ = ("_release", "_turn", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        self._turn, self._release = self._turns._begin(takes_over=False)

    def __exit__(self, *exception: object) -> None:
        if self._release is not None:
            self._release(self._turn)


class Turns:
    """Whose turn it is to use an object."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        """Begin with nobody's turn; `check` is called when one begins, and may raise."""
        self._check = check
        self._changed = threading.Condition()
        self._owner: _Turn | None = None
        self._closed = False

    def call(self) -> _Call:
        """Return a context manager that takes a turn for its block; entering it raises StateError if the object is closed."""
        return _Call(self)

    def stream(self, make: Callable[[], Generator[T, Any, None]]) -> Generator[T, Any, None]:
        """Run a generator in one turn, which begins with the first item.

        Raises:
            BusyError: On the next item, if the stream was ended meanwhile.
            StateError: If the object is closed.
        """
        turn, release = self._begin(takes_over=True)
        if release is None:  # inside another turn of this thread
            yield from make()
            return
        try:
            generator = make()
            sent = None
            while True:
                try:
                    item = generator.send(sent)
                except StopIteration:
                    return
                self._suspend(turn)
                try:
                    sent = yield item
                except GeneratorExit:
                    generator.close()
                    raise
                self._resume(turn)
        finally:
            release(turn)

    def close(self) -> bool:
        """Wait for the call at work, end a suspended stream, and refuse everything from now on.

        Returns:
            Whether this was the first time.

        Raises:
            BusyError: If this very thread is inside a call.
        """
        me = threading.get_ident()
        with self._changed:
            if self._owner is not None and self._owner.running == me:
                raise BusyError("close() from inside a call of the same object")
            while self._owner is not None and self._owner.running is not None:
                self._changed.wait()
            first, self._closed, self._owner = not self._closed, True, None
            self._changed.notify_all()
        return first

    def _begin(self, *, takes_over: bool) -> tuple[_Turn, Callable[[_Turn], None] | None]:
        """Wait for a turn; return it with the function that ends it, None if it is part of another."""
        me = threading.get_ident()
        self._check()
        with self._changed:
            while True:
                if self._closed:
                    raise StateError("this Llama is closed")
                owner = self._owner
                if owner is not None and owner.running == me:
                    return owner, None
                if owner is not None and owner.running is None and owner.home == me and not takes_over:
                    owner.running = me
                    return owner, self._suspend
                if owner is None or (owner.running is None and owner.home == me):
                    self._owner = turn = _Turn()
                    self._changed.notify_all()
                    return turn, self._end
                self._changed.wait()

    def _suspend(self, turn: _Turn) -> None:
        with self._changed:
            turn.running = None
            self._changed.notify_all()

    def _resume(self, turn: _Turn) -> None:
        me = threading.get_ident()
        with self._changed:
            while self._owner is turn and turn.running is not None:  # a call in between
                self._changed.wait()
            if self._owner is not turn:
                raise BusyError(_ENDED)
            turn.running = me
            if turn.home != me:
                turn.home = None

    def _end(self, turn: _Turn) -> None:
        me = threading.get_ident()
        with self._changed:
            while self._owner is turn and turn.running not in (None, me):
                self._changed.wait()
            if self._owner is turn:
                self._owner = None
                self._changed.notify_all()
