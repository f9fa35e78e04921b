"""Building blocks of a layer. Each function returns a block: (spec, layer) -> the tensors it adds to that layer.

Matrices have a standard deviation of gain / sqrt(fan-in): a unit input gives an output of about `gain`. Gains above 1
on the experts' down matrices make the experts, rather than the residual stream, decide the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from .spec import ModelSpec, Role, Tensor

Block = Callable[[ModelSpec, int], list[Tensor]]

N_HEAD = 4
N_HEAD_KV = 2
HEAD_DIM = 64
KV_LORA = 64
Q_LORA = 64
ROPE_DIM = 32
NOPE_DIM = 32
N_EXPERT_SHARED = 1
EXPERTS_PER_GROUP = 2
SSM_CONV = 4
SSM_INNER = 256
SSM_STATE = 16
SSM_HEADS = 4
SSM_GROUPS = 1

ROUTER_GAIN = 1.5
DOWN_GAIN = 3.0


def matrix(name: str, *shape: int, gain: float = 1.0, role: Role = "dense") -> Tensor:
    """Return a weight matrix of shape (..., n_out, n_in)."""
    return Tensor(f"{name}.weight", shape, role, std=gain / math.sqrt(shape[-1]))


def norm(name: str, n: int, gain: float = 1.0) -> Tensor:
    """Return the weight of an RMS norm over `n` values."""
    return Tensor(f"{name}.weight", (n,), "f32", mean=gain, std=0.1 * gain)


def bias(name: str, *shape: int, std: float = 0.5) -> Tensor:
    """Return a bias that is far from zero."""
    return Tensor(f"{name}.bias", shape, "f32", std=std)


def scale(name: str, n: int) -> Tensor:
    """Return one factor per expert, 0.5 to 2."""
    return Tensor(f"{name}.scale", (n,), "f32", mean=1.0, std=2.0, distribution="log-uniform")


def ff_chunk(s: ModelSpec) -> int:
    """Return the width of a chunk expert: not the width of an expert, so that the two banks of a layer differ."""
    return s.n_ff_exp + 256


def attention(
    *, qk_norm: Literal["", "head", "all"] = "", n_head_kv: int = N_HEAD_KV, biases: bool = False, sinks: bool = False
) -> Block:
    """Return grouped-query attention, with `qk_norm` per head or over all heads."""

    def block(s: ModelSpec, il: int) -> list[Tensor]:
        b, q, kv = f"blk.{il}", N_HEAD * HEAD_DIM, n_head_kv * HEAD_DIM
        out = [
            norm(f"{b}.attn_norm", s.n_embd),
            matrix(f"{b}.attn_q", q, s.n_embd),
            matrix(f"{b}.attn_k", kv, s.n_embd),
            matrix(f"{b}.attn_v", kv, s.n_embd),
            matrix(f"{b}.attn_output", s.n_embd, q),
        ]
        if qk_norm:
            out += [
                norm(f"{b}.attn_q_norm", q if qk_norm == "all" else HEAD_DIM),
                norm(f"{b}.attn_k_norm", kv if qk_norm == "all" else HEAD_DIM),
            ]
        if biases:
            widths = {"attn_q": q, "attn_k": kv, "attn_v": kv, "attn_output": s.n_embd}
            out += [bias(f"{b}.{name}", n, std=0.1) for name, n in widths.items()]
        if sinks:
            out += [Tensor(f"{b}.attn_sinks.weight", (N_HEAD,), "f32")]
        return out

    return block


def attention_swa() -> Block:
    """Return Gemma 4's attention: sliding-window layers, the even ones, have heads of half the size."""

    def block(s: ModelSpec, il: int) -> list[Tensor]:
        b, dim = f"blk.{il}", HEAD_DIM // 2 if is_swa(il) else HEAD_DIM
        return [
            norm(f"{b}.attn_norm", s.n_embd),
            matrix(f"{b}.attn_q", N_HEAD * dim, s.n_embd),
            matrix(f"{b}.attn_k", N_HEAD_KV * dim, s.n_embd),
            matrix(f"{b}.attn_v", N_HEAD_KV * dim, s.n_embd),
            matrix(f"{b}.attn_output", s.n_embd, N_HEAD * dim),
            # no scaling by 1/sqrt(head size) in this architecture: small norms keep the softmax soft
            norm(f"{b}.attn_q_norm", dim, gain=0.4),
            norm(f"{b}.attn_k_norm", dim, gain=0.4),
            # attention averages over tokens: too much of it, and all tokens choose the same experts
            norm(f"{b}.post_attention_norm", s.n_embd, gain=0.5),
        ]

    return block


def is_swa(il: int) -> bool:
    """Return whether a layer of the Gemma 4 row attends to a window only."""
    return il % 2 == 0


def attention_mla() -> Block:
    """Return multi-head latent attention as DeepSeek V3 has it, with the absorbed matrices."""

    def block(s: ModelSpec, il: int) -> list[Tensor]:
        b, q_dim = f"blk.{il}", NOPE_DIM + ROPE_DIM
        return [
            norm(f"{b}.attn_norm", s.n_embd),
            norm(f"{b}.attn_q_a_norm", Q_LORA),
            norm(f"{b}.attn_kv_a_norm", KV_LORA),
            matrix(f"{b}.attn_q_a", Q_LORA, s.n_embd),
            matrix(f"{b}.attn_q_b", N_HEAD * q_dim, Q_LORA),
            matrix(f"{b}.attn_kv_a_mqa", KV_LORA + ROPE_DIM, s.n_embd),
            matrix(f"{b}.attn_k_b", N_HEAD, KV_LORA, NOPE_DIM),
            matrix(f"{b}.attn_v_b", N_HEAD, HEAD_DIM, KV_LORA),
            matrix(f"{b}.attn_output", s.n_embd, N_HEAD * HEAD_DIM),
        ]

    return block


def mamba2() -> Block:
    """Return a recurrent layer as Nemotron-H has it; its graph needs one at least."""

    def block(s: ModelSpec, il: int) -> list[Tensor]:
        b, mixed = f"blk.{il}", SSM_INNER + 2 * SSM_GROUPS * SSM_STATE
        return [
            norm(f"{b}.attn_norm", s.n_embd),
            matrix(f"{b}.ssm_in", SSM_INNER + mixed + SSM_HEADS, s.n_embd),
            matrix(f"{b}.ssm_conv1d", mixed, SSM_CONV, role="f32"),
            bias(f"{b}.ssm_conv1d", mixed, std=0.1),
            bias(f"{b}.ssm_dt", SSM_HEADS, std=0.1),
            # the state decays: negative
            Tensor(f"{b}.ssm_a", (SSM_HEADS, 1), "f32", mean=-1.0, std=2.0, distribution="log-uniform"),
            Tensor(f"{b}.ssm_d", (SSM_HEADS, 1), "f32"),
            Tensor(f"{b}.ssm_norm.weight", (SSM_GROUPS, SSM_INNER // SSM_GROUPS), "f32", mean=1.0, std=0.1),
            matrix(f"{b}.ssm_out", s.n_embd, SSM_INNER),
        ]

    return block


def norms(*names: str) -> Block:
    """Return RMS norms over the width of the model."""
    return lambda s, il: [norm(f"blk.{il}.{name}", s.n_embd) for name in names]


def router(*, biases: bool = False, probs_bias: bool = False, in_scale: bool = False) -> Block:
    """Return the router: with a bias, with a bias on the selection only, or with a scaled input (Gemma 4)."""

    def block(s: ModelSpec, il: int) -> list[Tensor]:
        name = f"blk.{il}.ffn_gate_inp"
        out = [matrix(name, s.n_expert, s.n_embd, gain=ROUTER_GAIN, role="f32")]
        if biases:
            out += [bias(name, s.n_expert, std=0.3)]
        if probs_bias:
            out += [bias(f"blk.{il}.exp_probs_b", s.n_expert, std=0.03)]
        if in_scale:
            # this router divides its input by sqrt(n_embd)
            size = math.sqrt(s.n_embd)
            out += [Tensor(f"{name}.scale", (s.n_embd,), "f32", mean=size, std=0.1 * size)]
        return out

    return block


def experts(*, gated: bool = True, biases: bool = False) -> Block:
    """Return the routed experts of a layer: gate and up, separate or fused, or up alone, and down."""

    def block(s: ModelSpec, il: int) -> list[Tensor]:
        b, n, ff, width = f"blk.{il}", s.n_expert, s.n_ff_exp, s.n_embd
        gate = matrix(f"{b}.ffn_gate_exps", n, ff, width, role="gate")
        up = matrix(f"{b}.ffn_up_exps", n, ff, width, role="up")
        down = matrix(f"{b}.ffn_down_exps", n, width, ff, gain=DOWN_GAIN, role="down")
        fused = Tensor(f"{b}.ffn_gate_up_exps.weight", (n, 2 * ff, width), "gate_up", parts=(gate, up))
        out = [fused, down] if s.layout == "fused" else [gate, up, down] if gated else [up, down]
        if biases:
            out += [
                bias(f"{b}.ffn_gate_exps", n, ff),
                bias(f"{b}.ffn_up_exps", n, ff),
                bias(f"{b}.ffn_down_exps", n, width),
            ]
        if s.scales:
            # graphs with a fused tensor read no scale for it
            out += [scale(t.name.removesuffix(".weight"), n) for t in out if t.role in ("gate", "up", "down")]
        return out

    return block


def chunk_experts() -> Block:
    """Return GroveMoE's second bank: one chunk expert for each group of experts."""

    def block(s: ModelSpec, il: int) -> list[Tensor]:
        b, n, ff, width = f"blk.{il}", s.n_expert // EXPERTS_PER_GROUP, ff_chunk(s), s.n_embd
        return [
            matrix(f"{b}.ffn_gate_chexps", n, ff, width, role="gate"),
            matrix(f"{b}.ffn_up_chexps", n, ff, width, role="up"),
            matrix(f"{b}.ffn_down_chexps", n, width, ff, gain=DOWN_GAIN, role="down"),
        ]

    return block


def ffn(suffix: str = "", *, gated: bool = True) -> Block:
    """Return a dense feed-forward network as wide as one expert; the suffix is ``_shexp`` for shared experts."""

    def block(s: ModelSpec, il: int) -> list[Tensor]:
        b, ff = f"blk.{il}", s.n_ff_exp * N_EXPERT_SHARED
        gate = [matrix(f"{b}.ffn_gate{suffix}", ff, s.n_embd)] if gated else []
        return [*gate, matrix(f"{b}.ffn_up{suffix}", ff, s.n_embd), matrix(f"{b}.ffn_down{suffix}", s.n_embd, ff)]

    return block


def only(where: Callable[[int], bool], *parts: Block) -> Block:
    """Return blocks for some layers of a model only."""
    return lambda s, il: [t for part in parts for t in part(s, il)] if where(il) else []


def rope_freqs() -> Block:
    """Return the frequency factors of the full-attention layers, once per model."""
    first = Tensor("rope_freqs.weight", (HEAD_DIM // 2,), "f32", mean=1.5, std=1.4, distribution="log-uniform")
    return lambda _, il: [first] if il == 0 else []
