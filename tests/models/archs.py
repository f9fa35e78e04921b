"""The architectures, one row each.

To add one, read ``src/models/<arch>.cpp`` in llama.cpp and write its blocks and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from . import blocks as b
from .quantize import block_size, layer_quants
from .spec import ModelSpec, Tensor
from .vocab import MIN_VOCAB

Value = int | float | bool | list[bool] | list[int]
Key = Value | Callable[[ModelSpec], Value]
"""Value of a hyperparameter, or how to get it from the spec."""


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One architecture.

    Attributes:
        name: As in ``general.architecture``.
        about: What it is here for.
        blocks: Blocks of a layer with experts.
        dense: Blocks of the leading layers without.
        n_dense: How many of those.
        n_layer: Layers by default.
        quant: Type of the experts by default.
        layouts: Layouts it can have; the first is the default.
        scales: Whether its graph reads per-expert scales.
        keys: Hyperparameters besides `COMMON_KEYS`, or in their place.
        experts_divide_by: What the number of experts must be a multiple of.
        embd_gain: Size of the token embeddings in the file.
    """

    name: str
    about: str
    blocks: tuple[b.Block, ...]
    dense: tuple[b.Block, ...] = ()
    n_dense: int = 0
    n_layer: int = 2
    quant: str = "Q4_K"
    layouts: tuple[str, ...] = ("separate",)
    scales: bool = False
    keys: Mapping[str, Key] = field(default_factory=dict)
    experts_divide_by: int = 1
    embd_gain: float = 1.0


COMMON_KEYS: dict[str, Key] = {
    "vocab_size": lambda s: s.n_vocab,
    "context_length": lambda s: s.n_ctx,
    "embedding_length": lambda s: s.n_embd,
    "block_count": lambda s: s.n_layer,
    "feed_forward_length": lambda s: s.n_ff_exp,
    "expert_feed_forward_length": lambda s: s.n_ff_exp,
    "expert_count": lambda s: s.n_expert,
    "expert_used_count": lambda s: s.n_expert_used,
    "attention.head_count": b.N_HEAD,
    "attention.head_count_kv": b.N_HEAD_KV,
    "attention.key_length": b.HEAD_DIM,
    "attention.value_length": b.HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": b.HEAD_DIM,
    "rope.freq_base": 10000.0,
}

_ROWS = (
    Arch(
        name="olmoe",
        about="plain experts, weights not normalised",
        blocks=(b.attention(qk_norm="all", n_head_kv=b.N_HEAD), b.norms("ffn_norm"), b.router(), b.experts()),
        keys={"attention.head_count_kv": b.N_HEAD},
    ),
    Arch(
        name="qwen3moe",
        about="normalised weights; can have per-expert scales",
        blocks=(b.attention(qk_norm="head"), b.norms("ffn_norm"), b.router(), b.experts()),
        scales=True,
    ),
    Arch(
        name="llama",
        about="Mixtral; can have per-expert scales",
        blocks=(b.attention(), b.norms("ffn_norm"), b.router(), b.experts()),
        scales=True,
    ),
    Arch(
        name="gpt-oss",
        about="biases per expert, router bias, attention sinks, sliding window",
        blocks=(
            b.attention(biases=True, sinks=True),
            b.norms("post_attention_norm"),
            b.router(biases=True),
            b.experts(biases=True),
        ),
        quant="MXFP4",
        keys={"attention.sliding_window": 64},
    ),
    Arch(
        name="deepseek2",
        about="MLA, leading dense layer, shared expert, sigmoid gate with selection bias",
        blocks=(
            b.attention_mla(),
            b.norms("ffn_norm"),
            b.router(probs_bias=True),
            b.experts(),
            b.ffn("_shexp"),
        ),
        dense=(b.attention_mla(), b.norms("ffn_norm"), b.ffn()),
        n_dense=1,
        n_layer=3,
        layouts=("separate", "fused"),
        keys={
            "leading_dense_block_count": 1,
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": b.Q_LORA,
            "attention.kv_lora_rank": b.KV_LORA,
            "attention.key_length": b.KV_LORA + b.ROPE_DIM,
            "attention.value_length": b.KV_LORA,
            "attention.key_length_mla": b.NOPE_DIM + b.ROPE_DIM,
            "attention.value_length_mla": b.HEAD_DIM,
            "rope.dimension_count": b.ROPE_DIM,
            "expert_shared_count": b.N_EXPERT_SHARED,
            "expert_gating_func": 2,  # sigmoid
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
    ),
    Arch(
        name="gemma4",
        about="fused gate_up, scale per expert on down only when fused, dense FFN beside the experts",
        blocks=(
            b.rope_freqs(),
            b.attention_swa(),
            b.norms("ffn_norm", "post_ffw_norm", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"),
            b.ffn(),
            b.router(in_scale=True),
            b.experts(),
        ),
        layouts=("fused", "separate"),
        scales=True,
        embd_gain=1 / 16,  # its graph multiplies them by sqrt(n_embd)
        keys={
            "embedding_length_per_layer_input": 0,
            "attention.sliding_window": 64,
            "attention.sliding_window_pattern": lambda s: [b.is_swa(il) for il in range(s.n_layer)],
            "attention.shared_kv_layers": 0,
            "attention.key_length_swa": b.HEAD_DIM // 2,
            "attention.value_length_swa": b.HEAD_DIM // 2,
            "rope.dimension_count_swa": b.HEAD_DIM // 2,
            "rope.freq_base_swa": 10000.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    Arch(
        name="grovemoe",
        about="two banks in a layer; the second can be asked for the same expert twice for one token",
        blocks=(
            b.attention(qk_norm="head"),
            b.norms("ffn_norm"),
            b.router(),
            b.experts(),
            b.chunk_experts(),
        ),
        experts_divide_by=b.EXPERTS_PER_GROUP,
        keys={
            "expert_chunk_feed_forward_length": b.ff_chunk,
            "expert_group_scale": 0.5,
            "experts_per_group": b.EXPERTS_PER_GROUP,
        },
    ),
    Arch(
        name="nemotron_h_moe",
        about="experts without gate in every other layer, top-k that differs by layer, recurrent first layer",
        blocks=(
            b.only(lambda il: il == 0, b.mamba2()),
            b.only(lambda il: il > 0 and il % 2 == 0, b.attention()),
            b.only(
                lambda il: il % 2 == 1,
                b.norms("attn_norm"),
                b.router(probs_bias=True),
                b.experts(gated=False),
                b.ffn("_shexp", gated=False),
            ),
        ),
        n_layer=4,
        scales=True,
        keys={
            # neither heads nor width: recurrent
            "attention.head_count_kv": lambda s: [0 if il == 0 or il % 2 else b.N_HEAD_KV for il in range(s.n_layer)],
            "feed_forward_length": lambda s: [s.n_ff_exp if il % 2 else 0 for il in range(s.n_layer)],
            "expert_used_count": lambda s: [max(1, s.n_expert_used - il // 2) for il in range(s.n_layer)],
            "expert_shared_feed_forward_length": lambda s: s.n_ff_exp,
            "expert_shared_count": b.N_EXPERT_SHARED,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "attention.layer_norm_epsilon": 1e-6,
            "ssm.conv_kernel": b.SSM_CONV,
            "ssm.inner_size": b.SSM_INNER,
            "ssm.state_size": b.SSM_STATE,
            "ssm.time_step_rank": b.SSM_HEADS,
            "ssm.group_count": b.SSM_GROUPS,
        },
    ),
)

ARCHS: dict[str, Arch] = {row.name: row for row in _ROWS}


def resolve(**options: Any) -> ModelSpec:
    """Return a complete and checked spec.

    Args:
        **options: Fields of `ModelSpec`.

    Raises:
        ValueError: A value that the architecture or the quantisation cannot have; the message names what it can.
    """
    spec = ModelSpec(**options)
    if spec.arch not in ARCHS:
        raise ValueError(f"arch {spec.arch!r} is not one of {', '.join(ARCHS)}")
    row = ARCHS[spec.arch]
    spec = replace(
        spec,
        quant=spec.quant or row.quant,
        layout=spec.layout or row.layouts[0],
        n_layer=spec.n_layer or row.n_layer,
        n_expert=spec.n_expert or 8 * spec.n_expert_used + 8,
        per_layer_quant=tuple(spec.per_layer_quant),
    )
    _check_shape(spec, row)
    _check_quants(spec)
    return spec


def _check_shape(spec: ModelSpec, row: Arch) -> None:
    if spec.layout not in row.layouts:
        raise ValueError(f"layout {spec.layout!r}: {row.name} can have {', '.join(row.layouts)}")
    if spec.scales and not row.scales:
        raise ValueError(f"scales=True: {row.name} ignores per-expert scales; {', '.join(_with_scales())} read them")
    if not moe_layers(spec):
        raise ValueError(f"n_layer {spec.n_layer} gives {row.name} no layer with experts")
    limits = {
        "n_expert_used": (spec.n_expert_used, 1, spec.n_expert),
        "n_vocab": (spec.n_vocab, MIN_VOCAB, None),
        "shards": (spec.shards, 1, None),
    }
    for name, (value, low, high) in limits.items():
        if value < low or (high is not None and value > high):
            raise ValueError(f"{name} {value} must be at least {low}" + f" and at most {high}" * (high is not None))
    if spec.n_expert % row.experts_divide_by:
        raise ValueError(f"n_expert {spec.n_expert} must be a multiple of {row.experts_divide_by} in {row.name}")


def _check_quants(spec: ModelSpec) -> None:
    if spec.per_layer_quant and len(spec.per_layer_quant) != spec.n_layer:
        raise ValueError(f"per_layer_quant has {len(spec.per_layer_quant)} entries for n_layer {spec.n_layer}")
    for quant in {spec.dense_quant, *(q for il in range(spec.n_layer) for q in layer_quants(spec, il).values())}:
        for name, n in (("n_embd", spec.n_embd), ("n_ff_exp", spec.n_ff_exp)):
            if n % block_size(quant):
                raise ValueError(f"{name} {n} must be a multiple of {block_size(quant)} for {quant}")


def _with_scales() -> list[str]:
    return [row.name for row in _ROWS if row.scales]


def tensors(spec: ModelSpec) -> list[tuple[Tensor, int]]:
    """Return the model's tensors in file order, each with its layer (-1 for none)."""
    row = ARCHS[spec.arch]
    out = [(b.matrix("token_embd", spec.n_vocab, spec.n_embd, gain=row.embd_gain * spec.n_embd**0.5), -1)]
    for il in range(spec.n_layer):
        for block in row.dense if il < row.n_dense else row.blocks:
            out += [(t, il) for t in block(spec, il)]
    out += [(b.norm("output_norm", spec.n_embd), -1), (b.matrix("output", spec.n_vocab, spec.n_embd, gain=3.0), -1)]
    return out


def hyperparameters(spec: ModelSpec) -> dict[str, Value]:
    """Return the keys below ``<arch>.`` with their values."""
    keys = {**COMMON_KEYS, **ARCHS[spec.arch].keys}
    return {name: key(spec) if callable(key) else key for name, key in keys.items()}


def moe_layers(spec: ModelSpec) -> list[int]:
    """Return the layers that have experts."""
    return sorted({il for tensor, il in tensors(spec) if tensor.role == "down"})
