"""Perplexity of a text, computed the way llama.cpp's llama-perplexity does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .errors import ArgumentError


def perplexity(llm: Any, text: str, n_window: int | None) -> float:
    """Do the work of `Llama.perplexity`; see there."""
    n_window = llm.n_ctx() if n_window is None else n_window
    if not 2 <= n_window <= llm.n_ctx():
        raise ArgumentError(f"n_window={n_window} is not in [2, {llm.n_ctx()}], the context's size in tokens")
    tokens = llm.tokenize(text.encode("utf-8"), add_bos=True)
    if len(tokens) < 2:
        raise ArgumentError(f"a text of {len(tokens)} token(s) has no perplexity: give two tokens at least")

    if len(tokens) <= n_window:
        windows, first = [tokens], 1
    else:  # whole windows only; the first half of each is context
        windows = [tokens[i : i + n_window] for i in range(0, len(tokens) - n_window + 1, n_window)]
        first = n_window // 2
    total = count = 0.0
    for window in windows:
        if llm._model.add_bos_token():
            window = [llm.token_bos(), *window[1:]]
        total += _negative_log_likelihood(llm, window, first)
        count += len(window) - first
    return math.exp(total / count)


def _negative_log_likelihood(llm: Any, tokens: list[int], first: int) -> float:
    """Return the sum of -ln p of tokens[first:], each given all before it."""
    llm.reset()
    llm._ctx.kv_cache_clear()
    total = 0.0
    step = min(llm.n_batch, llm.context_params.n_ubatch)
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        llm._batch.set_batch(batch=part, n_past=start, logits_all=True)
        # position i predicts token i + 1
        scored = [i for i in range(len(part)) if first <= start + i + 1 < len(tokens)]
        for i in range(len(part)):
            llm._batch.batch.logits[i] = i in scored
        llm._decode()
        if not scored:
            continue
        logits = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(len(scored), llm._n_vocab)).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        wanted = logits[np.arange(len(scored)), [tokens[start + i + 1] for i in scored]]
        total += float((np.log(np.exp(logits).sum(axis=1)) - wanted).sum())
    return total
