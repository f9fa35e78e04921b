"""Put a streamed completion together so that its pieces, joined, are the text that the same call would return at once.

llama-cpp-python decodes what is left at the end of a stream token by token and drops what is no character by itself; a
character whose bytes come as several tokens is lost there.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Chunk = dict[str, Any]


class StreamedText:
    """The text of one completion, growing token by token."""

    def __init__(
        self, stops: Sequence[bytes], detokenize: Callable[[list[int], list[int]], bytes], lead: Sequence[int] = ()
    ) -> None:
        """Begin.

        Args:
            stops: Sequences that end the text, UTF-8.
            detokenize: Function of (tokens, tokens before them) that returns the bytes of the former.
            lead: Tokens that begin the completion without being generated.
        """
        self._stops = stops
        self._detokenize = detokenize
        self._tokens: list[int] = []  # prompt and completion
        self._lead = list(lead)
        self._ends: list[int] = []  # end of each completion token in the data
        self._data = b""
        self._taken = 0  # bytes that the decoder has got
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def begin(self, tokens: Sequence[int]) -> None:
        """Set the prompt."""
        self._tokens = list(tokens)

    def add(self, token: int) -> None:
        """Append one token of the completion."""
        self._data += self._detokenize([*self._lead, token], self._tokens)
        self._lead = []
        self._tokens.append(token)
        self._ends.append(len(self._data))

    def take_token(self, i: int) -> str:
        """Return what token i of the completion adds to what was returned before."""
        return self._take(self._ends[min(i, len(self._ends) - 1)] if self._ends else 0)

    def take(self) -> str:
        """Return all that is certain and was not returned before: nothing that may turn out to be part of a stop sequence."""
        held = max(
            (n for stop in self._stops for n in range(1, len(stop)) if self._data.endswith(stop[:n])),
            default=0,
        )
        return self._take(len(self._data) - held)

    def finish(self) -> str:
        """Return the rest."""
        return self._take(len(self._data), final=True)

    def _take(self, end: int, *, final: bool = False) -> str:
        # the first in the list, not in the text: llama-cpp-python cuts there
        cut = next((self._data.index(stop) for stop in self._stops if stop in self._data), len(self._data))
        end = max(self._taken, min(end, cut))
        data, self._taken = self._data[self._taken : end], end
        return self._decoder.decode(data, final)


def rejoin(chunks: Iterator[Chunk], text: StreamedText) -> Iterator[Chunk]:
    """Replace the text of the chunks of a stream; the token of a chunk was given to `text` before the chunk comes."""
    for n, chunk in enumerate(chunks):
        choice = chunk["choices"][0]
        if choice["finish_reason"] is not None:
            if rest := text.finish():
                yield _copy(chunk, rest)
            yield _copy(chunk, "", finish_reason=choice["finish_reason"])
        elif choice["logprobs"] is not None:  # one token each
            yield _copy(chunk, text.take_token(n), logprobs=choice["logprobs"])
        elif piece := text.take():
            yield _copy(chunk, piece)


def _copy(chunk: Chunk, text: str, *, logprobs: Any = None, finish_reason: str | None = None) -> Chunk:
    choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
    return {**chunk, "choices": [choice]}
