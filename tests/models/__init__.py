"""Tiny random mixture-of-experts models in GGUF files, for tests that compare two ways to run one model.

The weights are random but behave like weights: logits are finite, every expert is reached by varied tokens, and an
expert taken for another one changes the logits. Biases and scales are far from zero, so indexing them by slot shows.

Examples:
    >>> path = make_model("tiny.gguf", arch="olmoe", quant="Q4_K", n_expert_used=4)
    >>> path = cached_model(arch="gemma4", layout="fused", quant="Q6_K", shards=3)
    >>> path = break_model(cached_model(), "expert-used-0", into=tmp_path)

The same spec gives the same bytes. Random numbers belong to (seed, tensor name), so the fused and the separate layout,
any sharding and any quantisation of one seed start from the same weights.
"""

from .archs import ARCHS, Arch, moe_layers, resolve
from .broken import BREAKS, break_model, link_model
from .generate import cached_model, make_model, model_files
from .quantize import MIXES, QUANTS, find_library
from .spec import ModelSpec, Tensor

__all__ = [
    "ARCHS",
    "BREAKS",
    "MIXES",
    "QUANTS",
    "Arch",
    "ModelSpec",
    "Tensor",
    "break_model",
    "cached_model",
    "find_library",
    "link_model",
    "make_model",
    "model_files",
    "moe_layers",
    "resolve",
]
