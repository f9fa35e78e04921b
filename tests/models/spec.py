"""What a tiny model is made of: the specification that callers write, and the tensors it turns into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LayerQuant = str | Mapping[str, str]
"""One type name for all expert tensors of a layer, or a type per role (``gate``, ``up``, ``down``, ``gate_up``)."""

Role = Literal["dense", "f32", "gate", "up", "down", "gate_up"]
"""Decides a tensor's type: the dense type, F32, or the quantisation of the layer's experts."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A tiny model. Empty and zero values mean the usual one of the architecture; `resolve` fills them in.

    Attributes:
        arch: Name of a row of `ARCHS`.
        quant: Type of the expert tensors (``Q4_K``) or a mix over layers (``Q4_K_M``).
        layout: ``separate`` gate and up tensors, or one ``fused`` tensor that holds both.
        scales: Write per-expert scales (F32, 0.5 to 2) where the architecture's graph reads them.
        n_layer: Layers, leading dense ones included.
        n_embd: Width of the model; also the row length of gate and up, so a multiple of 256 for K-quants.
        n_ff_exp: Width of one expert; the row length of down.
        n_expert: Experts per layer; 0 means 8 top-k + 8, so that a ubatch of 8 tokens cannot touch them all.
        n_expert_used: Top-k.
        n_vocab: Tokens, at least 288 (3 special, 256 bytes, the letters).
        n_ctx: Context length in the metadata, in tokens.
        seed: Of the weights.
        shards: Files to spread the tensors over.
        dense_quant: Type of every matrix outside the experts, the router excepted (F32).
        per_layer_quant: One entry per layer instead of `quant`; entries of dense layers are ignored.
    """

    arch: str = "qwen3moe"
    quant: str = ""
    layout: str = ""
    scales: bool = False
    n_layer: int = 0
    n_embd: int = 256
    n_ff_exp: int = 256
    n_expert: int = 0
    n_expert_used: int = 4
    n_vocab: int = 512
    n_ctx: int = 4096
    seed: int = 0
    shards: int = 1
    dense_quant: str = "F16"
    per_layer_quant: tuple[LayerQuant, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: its name, shape and the distribution of its values.

    Attributes:
        name: As in the GGUF file.
        shape: In numpy order, rows last: ``(n_expert, n_ff, n_embd)`` for a gate.
        role: Which setting decides its type.
        mean: Mean of the values.
        std: Standard deviation of the values.
        distribution: ``normal``, or ``log-uniform`` between ``mean / std`` and ``mean * std``.
        parts: Instead of values of its own, these tensors side by side along axis 1.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    mean: float = 0.0
    std: float = 1.0
    distribution: Literal["normal", "log-uniform"] = "normal"
    parts: tuple[Tensor, ...] = ()
