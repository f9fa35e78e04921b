"""Generate text token by token, and time it."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator

from .._vendor.llama_cpp import llama_cpp
from ..errors import ArgumentError
from ..llama import Llama


class Generation:
    """One continuation of a prompt; iterate over it for pieces of text.

    Attributes:
        n_prompt: Tokens of the prompt.
        n_tokens: Tokens generated so far.
        text: The text so far.
        prefill_s: Seconds from the start to the first token.
        decode_s: Seconds from the first token to the last so far.
    """

    def __init__(self, llm: Llama, prompt: str, n_predict: int, *, temp: float, seed: int | None) -> None:
        """Prepare; nothing is evaluated yet.

        Args:
            llm: The model; its state is reset.
            prompt: Text to go on from.
            n_predict: Most tokens to generate; fewer if the model ends the text or the context is full.
            temp: Temperature; 0 = most likely token.
            seed: Seed of the sampler; None = random.

        Raises:
            ArgumentError: If the prompt is empty, or leaves no room in the context.
        """
        self._llm = llm
        self._prompt = llm.tokenize(prompt.encode(), add_bos=True, special=True)
        if not self._prompt:
            raise ArgumentError("the prompt is empty, and this model starts no text by itself: give one of a token at least")
        n_ctx = llm.n_ctx()  # what was asked for, rounded up by llama.cpp
        if len(self._prompt) >= n_ctx:
            raise ArgumentError(
                f"the prompt has {len(self._prompt)} tokens, the context has room for {n_ctx}: shorten it or raise -c"
            )
        self._n_predict = min(n_predict, n_ctx - len(self._prompt))
        self._temp = temp
        if seed is not None:
            llm.set_seed(seed)
        self.n_prompt = len(self._prompt)
        self.n_tokens = 0
        self.text = ""
        self.prefill_s = self.decode_s = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of decoding; None before the second token."""
        return (self.n_tokens - 1) / self.decode_s if self.decode_s > 0 else None

    def __iter__(self) -> Iterator[str]:
        """Generate; yields text that ends between two characters, never inside one."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        start = first = time.perf_counter()
        previous = self._prompt[-1:]
        for token in self._llm.generate(self._prompt, temp=self._temp):
            now = time.perf_counter()
            if self.n_tokens == 0:
                first, self.prefill_s = now, now - start
            self.decode_s = now - first
            if self._is_end(token):
                break
            self.n_tokens += 1
            piece = decoder.decode(self._llm.detokenize([token], prev_tokens=previous))
            previous = [token]
            if piece:
                self.text += piece
                yield piece
            if self.n_tokens == self._n_predict:  # asking for one more would evaluate it
                break
        if rest := decoder.decode(b"", final=True):
            self.text += rest
            yield rest

    def _is_end(self, token: int) -> bool:
        """Whether a token ends the text; there can be several such tokens."""
        return bool(llama_cpp.llama_vocab_is_eog(self._llm._model.vocab, token))
