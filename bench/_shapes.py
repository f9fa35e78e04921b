"""What a synthetic model is: real shapes, the specification that callers write, and the routing that belongs to it."""

from __future__ import annotations

import dataclasses
from typing import Any

from hotmoe.traces import Trace

from ._blocks import block_of
from ._routing import Routing, recorded, skewed

SHAPES: dict[str, dict[str, int]] = {
    # as in the models of these names; "/2" and so on: matrices with sides of that part, all layers and experts
    "qwen3-30b-a3b": {
        "n_layer": 48,
        "n_embd": 2048,
        "n_ff_exp": 768,
        "n_expert": 128,
        "n_expert_used": 8,
        "n_head": 32,
        "n_head_kv": 4,
        "head_dim": 128,
    },
    "olmoe-1b-7b": {
        "n_layer": 16,
        "n_embd": 2048,
        "n_ff_exp": 1024,
        "n_expert": 64,
        "n_expert_used": 8,
        "n_head": 16,
        "n_head_kv": 16,
        "head_dim": 128,
    },
    "qwen3-30b-a3b/4": {
        "n_layer": 48,
        "n_embd": 512,
        "n_ff_exp": 256,  # K-quants do not go below
        "n_expert": 128,
        "n_expert_used": 8,
        "n_head": 8,
        "n_head_kv": 1,
        "head_dim": 128,
    },
    "olmoe-1b-7b/2": {
        "n_layer": 16,
        "n_embd": 1024,
        "n_ff_exp": 512,
        "n_expert": 64,
        "n_expert_used": 8,
        "n_head": 8,
        "n_head_kv": 8,
        "head_dim": 128,
    },
    "tiny": {
        "n_layer": 4,
        "n_embd": 256,
        "n_ff_exp": 256,
        "n_expert": 32,
        "n_expert_used": 4,
        "n_head": 4,
        "n_head_kv": 2,
        "head_dim": 64,
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticSpec:
    """A synthetic model. Zeros mean the shape's, or the trace's.

    Attributes:
        shape: A row of `SHAPES`; the fields up to `head_dim` replace its values.
        n_layer: Layers; with a trace, so many of its layers, evenly spaced.
        n_embd: Width, a multiple of the block of the quantisation.
        n_ff_exp: Width of an expert, likewise.
        n_expert: Experts per layer. A trace decides; another number is an error.
        n_expert_used: Experts per token. With a trace, the first so many of each row.
        n_head: Attention heads.
        n_head_kv: Of keys and values.
        head_dim: Width of a head.
        quant: Type of experts and attention matrices: a row of `bench._blocks.BLOCKS`.
        tokens: Tokens with prescribed experts, at most n_embd; 0: as many as there can be.
        trace: Trace file that prescribes the routing; "" for a skew.
        zipf: Skew, see `bench._routing`.
        locality: Skew, see `bench._routing`.
        seed: Of weights and skew.
        shards: Files to spread the tensors over.
        n_ctx: Context length in the metadata, in tokens.
    """

    shape: str = "tiny"
    n_layer: int = 0
    n_embd: int = 0
    n_ff_exp: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    n_head: int = 0
    n_head_kv: int = 0
    head_dim: int = 0
    quant: str = "Q4_K"
    tokens: int = 0
    trace: str = ""
    zipf: float = 1.0
    locality: float = 0.3
    seed: int = 0
    shards: int = 1
    n_ctx: int = 32768

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of one layer, all its matrices."""
        values, size = block_of(self.quant)
        return 3 * self.n_embd * self.n_ff_exp // values * size

    @property
    def used_bytes_per_token(self) -> int:
        """Bytes of all experts that one token uses."""
        return self.n_layer * self.n_expert_used * self.expert_bytes


def resolve(**options: Any) -> tuple[SyntheticSpec, Routing]:
    """Return a complete and checked spec with its routing.

    Args:
        **options: Fields of `SyntheticSpec`.

    Raises:
        ValueError: If a value cannot be; the message names what can.
    """
    spec = SyntheticSpec(**options)
    if spec.shape not in SHAPES:
        raise ValueError(f"shape {spec.shape!r} is not one of {', '.join(SHAPES)}")
    given = dataclasses.asdict(spec)
    sizes = {name: given[name] or value for name, value in SHAPES[spec.shape].items()}
    n_tokens = spec.tokens or sizes["n_embd"]
    if n_tokens > sizes["n_embd"]:
        raise ValueError(f"tokens {n_tokens} must be at most n_embd {sizes['n_embd']}: more embeddings are not orthogonal")
    if spec.trace:
        trace = Trace.load(spec.trace)
        of_trace = len({bank.layer for bank in trace.banks}), int(trace.n_used.min())
        routing = recorded(
            trace,
            n_tokens=spec.tokens,
            n_layer=spec.n_layer or min(sizes["n_layer"], of_trace[0]),
            top_k=spec.n_expert_used or min(sizes["n_expert_used"], of_trace[1]),
        )
        if spec.n_expert not in (0, routing.n_expert):
            raise ValueError(f"n_expert {spec.n_expert}: {spec.trace} has {routing.n_expert} experts in a layer")
        if routing.n_tokens > sizes["n_embd"]:
            raise ValueError(
                f"{spec.trace} has {routing.n_tokens} tokens, n_embd {sizes['n_embd']} has room for as many: give tokens="
            )
    else:
        routing = skewed(
            n_tokens=n_tokens,
            n_layer=sizes["n_layer"],
            n_expert=sizes["n_expert"],
            top_k=sizes["n_expert_used"],
            zipf=spec.zipf,
            locality=spec.locality,
            seed=spec.seed,
        )
    sizes |= {"n_layer": routing.n_layer, "n_expert": routing.n_expert, "n_expert_used": routing.top_k}
    spec = dataclasses.replace(spec, **sizes, tokens=routing.n_tokens)
    values, _ = block_of(spec.quant)
    for name in ("n_embd", "n_ff_exp"):
        if getattr(spec, name) % values:
            raise ValueError(f"{name} {getattr(spec, name)} must be a multiple of {values} for {spec.quant}")
    if spec.n_head * spec.head_dim % values:
        raise ValueError(f"n_head x head_dim = {spec.n_head * spec.head_dim} must be a multiple of {values} for {spec.quant}")
    if spec.n_head % spec.n_head_kv:
        raise ValueError(f"n_head {spec.n_head} must be a multiple of n_head_kv {spec.n_head_kv}")
    return spec, routing
