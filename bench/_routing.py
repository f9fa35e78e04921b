"""Routing to build into a synthetic model: a table of experts per token and layer, from a recorded trace or from a skew.

The skew has two parameters. In each layer the experts are ranked in an order of its own, and expert number r of it is drawn
with a weight of (r + 1) ** -zipf; 0 is uniform. Besides, each expert of the token before is used again with a probability of
`locality`. What LRU hits tells how that compares with recorded traces, with slots for a share of the experts:

    share of the experts              10 %   25 %   45 %   65 %
    OLMoE-1B-7B, 16 x 64, top 8      0.434  0.597  0.746  0.885
    Qwen3-30B-A3B, 48 x 128, top 6   0.513  0.780  0.897  0.915
    zipf 1.0, locality 0.3           0.476  0.626  0.766  0.869    of 64, top 8, 300 tokens, as all that follow
    zipf 1.3, locality 0.5           0.650  0.777  0.871  0.927
    zipf 1.0, locality 0.9           0.904  0.935  0.957  0.970
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from hotmoe.traces import DECODE, Trace
from hotmoe.traces.trace import TraceBank


@dataclasses.dataclass(frozen=True, eq=False)
class Routing:
    """Which experts each token uses.

    Attributes:
        experts: int32 [n_tokens, n_layer, top_k], the one with the largest weight first.
        prescribed: bool [n_tokens, n_layer], False where the trace has no row and a neighbour's experts stand in.
        n_expert: Experts per layer.
        name: Where it comes from.
    """

    experts: npt.NDArray[np.int32]
    prescribed: npt.NDArray[np.bool_]
    n_expert: int
    name: str

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return self.experts.shape[0]

    @property
    def n_layer(self) -> int:
        """Number of layers."""
        return self.experts.shape[1]

    @property
    def top_k(self) -> int:
        """Experts per token and layer."""
        return self.experts.shape[2]

    def trace(self, expert_bytes: int | None = None) -> Trace:
        """Return it as a trace of generated tokens, for replays."""
        n, layers = self.n_tokens, self.n_layer
        return Trace(
            experts=self.experts.reshape(n * layers, self.top_k),
            layer=np.tile(np.arange(layers, dtype=np.int32), n),
            token=np.repeat(np.arange(n, dtype=np.int32), layers),
            phase=np.full(n * layers, DECODE, np.uint8),
            banks=tuple(TraceBank(layer, 0, self.n_expert, expert_bytes) for layer in range(layers)),
            name=self.name,
        )


def skewed(
    *, n_tokens: int, n_layer: int, n_expert: int, top_k: int, zipf: float = 1.0, locality: float = 0.3, seed: int = 0
) -> Routing:
    """Draw routing with a skew.

    Args:
        n_tokens: Tokens.
        n_layer: Layers.
        n_expert: Experts per layer.
        top_k: Experts per token.
        zipf: Exponent of the skew, 0 for none.
        locality: Probability that an expert of the token before is used again, 0 to below 1.
        seed: Of the random numbers.

    Raises:
        ValueError: If a number is out of range.
    """
    if not 1 <= top_k <= n_expert:
        raise ValueError(f"top_k {top_k} must be at least 1 and at most n_expert {n_expert}")
    if zipf < 0 or not 0 <= locality < 1:
        raise ValueError(f"zipf {zipf} must not be negative, and locality {locality} must be in [0, 1)")
    rng = np.random.default_rng([seed, 1])
    rank = np.argsort(rng.random((n_layer, n_expert)), axis=1)
    log_share = -zipf * np.log1p(rank)
    experts = np.empty((n_tokens, n_layer, top_k), np.int32)
    for t in range(n_tokens):
        # the k largest of log-weights plus Gumbel noise are k draws without replacement
        score = log_share + rng.gumbel(size=(n_layer, n_expert))
        kept = np.zeros_like(score)
        if t:
            again = np.where(rng.random((n_layer, top_k)) < locality, 1e6, 0.0)
            np.put_along_axis(kept, experts[t - 1].astype(np.int64), again, axis=1)
        used = np.argsort(-(score + kept), axis=1)[:, :top_k]
        weight = np.take_along_axis(score, used, axis=1)  # reused experts are not the heaviest ones because of that
        experts[t] = np.take_along_axis(used, np.argsort(-weight, axis=1), axis=1)
    return Routing(experts, np.ones((n_tokens, n_layer), bool), n_expert, f"zipf={zipf:g} locality={locality:g} seed={seed}")


def recorded(trace: Trace, *, n_tokens: int = 0, n_layer: int = 0, top_k: int = 0) -> Routing:
    """Take routing from a trace: its tokens in their order, prompts included; of two banks in a layer the first.

    Args:
        trace: The trace.
        n_tokens: Use the first n tokens; 0 for all.
        n_layer: Use as many layers, evenly spaced over those of the trace; 0 for all.
        top_k: Use the first k experts of each row; 0 for as many as all rows have.

    Raises:
        ValueError: If the trace has fewer tokens, layers or experts per row, or layers of different sizes.
    """
    trace = trace.rows(trace.bank == 0)
    banks = [bank for bank in trace.banks if bank.bank == 0 and (trace.layer == bank.layer).any()]
    sizes = {bank.n_expert for bank in banks}
    if len(sizes) != 1:
        raise ValueError(f"{trace.name}: layers must have one number of experts, not {sorted(sizes)}")
    keys = np.stack([trace.prompt, trace.turn, trace.phase == DECODE, trace.token], axis=1)
    _, token = np.unique(keys, axis=0, return_inverse=True)
    token = token.reshape(-1)

    def limited(what: str, wanted: int, there: int) -> int:
        if wanted > there:
            raise ValueError(f"{trace.name}: {wanted} {what} are asked for, it has {there}")
        return wanted or there

    n_tokens = limited("tokens", n_tokens, int(token.max()) + 1)
    n_layer = limited("layers", n_layer, len(banks))
    top_k = limited("experts per token", top_k, int(trace.n_used.min()))

    layers = [banks[i].layer for i in np.linspace(0, len(banks) - 1, n_layer).round().astype(int)]
    experts = np.full((n_tokens, n_layer, top_k), -1, np.int32)
    for column, layer in enumerate(layers):
        mine: Any = (trace.layer == layer) & (token < n_tokens)
        experts[token[mine], column] = trace.experts[mine, :top_k]
        have = np.flatnonzero(experts[:, column, 0] >= 0)
        if not len(have):
            raise ValueError(f"{trace.name}: layer {layer} has no row within the first {n_tokens} tokens")
    prescribed = experts[:, :, 0] >= 0
    for column in range(n_layer):  # llama.cpp computes only the last token of a prompt in the last layer
        have = np.flatnonzero(prescribed[:, column])
        stand_in = have[np.minimum(np.searchsorted(have, np.arange(n_tokens)), len(have) - 1)]
        experts[:, column] = experts[stand_in, column]
    return Routing(experts, prescribed, sizes.pop(), trace.name)
