"""Synthetic mixture-of-experts models of a real shape, whose routing is prescribed.

Random weights route at random, so a model made of them says nothing about a cache. Here every token of the vocabulary has its
experts prescribed in each layer, by a recorded trace or by a stated skew (`bench._routing`), and evaluating the tokens
0, 1, 2, ... replays that routing, in decode and in prefill. Greedy generation does so by itself: the most likely token after t
is t + 1. So does text: "0 1 2 3" is the tokens 0, 1, 2, 3.

How: the embeddings of the tokens are orthogonal vectors of length sqrt(n_embd). Attention and experts have random weights, which
are computed in full, but what they add to the residual stream is small, 0.1 in all where the embedding is 1: a token's input to
every router is its embedding and a little noise. The router's row for an expert is the sum of the embeddings of the tokens
that use it, so each router value is 1 to 2, by rank, for a prescribed expert and 0 for any other one. There is room for n_embd
tokens, not more; longer runs begin again with token 0. A wrong expert changes the logits by far more than rounding.

All models have the qwen3moe graph. Weights are random bits in valid blocks (`bench._blocks`), written as a stream: no time is
spent on quantising, and no two experts are equal. The same options give the same bytes.

    python -m bench.synthetic --list
    python -m bench.synthetic --shape qwen3-30b-a3b --quant Q4_K --zipf 1 --locality 0.3 -o big.gguf --verify 64
    python -m bench.synthetic --shape olmoe-1b-7b/2 --trace olmoe.csv -o small.gguf --shards 3

    >>> model = cached_synthetic(shape="tiny", zipf=0.8)
    >>> model.path, model.routing.experts[0, 3]  # token 0, layer 3
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, Keys, TokenType

from . import _blocks, _routing, _shapes
from ._blocks import Weights, block_of
from ._routing import Routing
from ._shapes import SHAPES, SyntheticSpec, resolve

ARCH = "qwen3moe"
N_SPECIAL = 3 + 256
"""Tokens after those with prescribed experts: unknown, begin, end, bytes."""

_BRANCHES = 0.1  # what all attention and expert outputs together add to a residual stream of 1
_SWIGLU = 0.6  # root mean square of silu(a) b for normal a and b
_LOGIT = 20.0


@dataclasses.dataclass(frozen=True, eq=False)
class Synthetic:
    """A model that was written.

    Attributes:
        path: The file to load; of a split model, its first shard.
        files: All its files.
        spec: What it is.
        routing: What its tokens use.
    """

    path: Path
    files: tuple[Path, ...]
    spec: SyntheticSpec
    routing: Routing

    @property
    def n_bytes(self) -> int:
        """Size of all files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all that is no expert."""
        return self.n_bytes - self.spec.n_layer * self.spec.n_expert * self.spec.expert_bytes

    def touched_bytes(self, n_prompt: int, n_ubatch: int) -> int:
        """Return the bytes of experts that a prompt of the first n_prompt tokens reads if no ubatch keeps any."""
        experts = self.routing.experts
        count = 0
        for start in range(0, n_prompt, n_ubatch):
            rows = experts[self.tokens(min(n_ubatch, n_prompt - start), start)]
            count += sum(len(np.unique(rows[:, layer])) for layer in range(self.spec.n_layer))
        return count * self.spec.expert_bytes

    def tokens(self, n: int, start: int = 0) -> list[int]:
        """Return n tokens of the replay, which begins again after the last one."""
        return [(start + i) % self.routing.n_tokens for i in range(n)]


def make_synthetic(path: str | os.PathLike[str], **options: Any) -> Synthetic:
    """Write a model.

    Args:
        path: File to write, ending in ``.gguf``. With shards, ``-00001-of-0000N`` goes before the ending.
        **options: Fields of `SyntheticSpec`.

    Raises:
        ValueError: If a value cannot be, or the disk has no room.
    """
    spec, routing = resolve(**options)
    return _write(Path(path), spec, routing)


def cached_synthetic(**options: Any) -> Synthetic:
    """Return a model, written at the first call and kept in a folder.

    The folder is HOTMOE_TEST_CACHE, else the one in the temporary folder that tests use. A change of the code that writes models,
    or of the trace, makes new ones. Treat the files as read-only.

    Args:
        **options: Fields of `SyntheticSpec`.
    """
    spec, routing = resolve(**options)
    root = Path(os.environ.get("HOTMOE_TEST_CACHE") or Path(tempfile.gettempdir()) / f"hotmoe-test-models-{os.getuid()}")
    about = dataclasses.asdict(spec) | {"trace": hashlib.sha256(routing.experts.tobytes()).hexdigest()}
    key = hashlib.sha256(f"{_version()} {json.dumps(about, sort_keys=True)}".encode()).hexdigest()[:16]
    name = f"synthetic-{spec.shape.replace('/', '-')}-{spec.quant}"
    folder = root / f"{name}-{key}"
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=root, prefix="draft-"))
        try:
            _write(draft / f"{name}.gguf", spec, routing)
            draft.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster: its folder holds the same bytes
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    files = _files(folder / f"{name}.gguf", spec.shards)
    return Synthetic(files[0], files, spec, routing)


@cache
def _version() -> str:
    files = [Path(module) for module in (__file__, _blocks.__file__, _routing.__file__, _shapes.__file__) if module]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _files(path: Path, n: int) -> tuple[Path, ...]:
    return (path,) if n == 1 else tuple(path.with_name(f"{path.stem}-{i + 1:05d}-of-{n:05d}.gguf") for i in range(n))


# ---- tensors ----


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One to write: either an array, or a stretch of random blocks of a given shape and standard deviation."""

    name: str
    array: npt.NDArray[Any] | None = None
    shape: tuple[int, ...] = ()
    std: float = 0.0


def _embeddings(spec: SyntheticSpec) -> npt.NDArray[np.float32]:
    """Return [tokens + N_SPECIAL, n_embd] rows of length sqrt(n_embd), the first `tokens` of them orthogonal."""
    rng = np.random.default_rng([spec.seed, 2])
    basis, _ = np.linalg.qr(rng.standard_normal((spec.n_embd, spec.tokens)))
    others = rng.standard_normal((N_SPECIAL, spec.n_embd))
    others /= np.linalg.norm(others, axis=1, keepdims=True)
    return (np.concatenate([basis.T, others]) * spec.n_embd**0.5).astype(np.float32)


def _router(routing: Routing, layer: int, embeddings: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return [n_expert, n_embd]: times a token's embedding, 2 for its first expert, down to above 1 for its last, else 0."""
    n, k = routing.n_tokens, routing.top_k
    wanted = np.zeros((n, routing.n_expert), np.float32)
    np.put_along_axis(wanted, routing.experts[:, layer].astype(np.int64), (2 - np.arange(k, dtype=np.float32) / k)[None], axis=1)
    return np.ascontiguousarray(wanted.T @ embeddings[:n] / np.float32(embeddings.shape[1]))


def _tensors(spec: SyntheticSpec, routing: Routing) -> Iterator[_Tensor]:
    s, q, kv = spec, spec.n_head * spec.head_dim, spec.n_head_kv * spec.head_dim
    embeddings = _embeddings(s)
    ones, branch = np.ones(s.n_embd, np.float32), _BRANCHES / (2 * s.n_layer) ** 0.5
    yield _Tensor("token_embd.weight", embeddings.astype(np.float16))
    for il in range(s.n_layer):
        b, unit = f"blk.{il}", s.n_embd**-0.5
        yield _Tensor(f"{b}.attn_norm.weight", ones)
        yield _Tensor(f"{b}.attn_q.weight", None, (q, s.n_embd), unit)
        yield _Tensor(f"{b}.attn_k.weight", None, (kv, s.n_embd), unit)
        yield _Tensor(f"{b}.attn_v.weight", None, (kv, s.n_embd), unit)
        yield _Tensor(f"{b}.attn_output.weight", None, (s.n_embd, q), branch * q**-0.5)
        yield _Tensor(f"{b}.attn_q_norm.weight", np.ones(s.head_dim, np.float32))
        yield _Tensor(f"{b}.attn_k_norm.weight", np.ones(s.head_dim, np.float32))
        yield _Tensor(f"{b}.ffn_norm.weight", ones)
        yield _Tensor(f"{b}.ffn_gate_inp.weight", _router(routing, il, embeddings))
        yield _Tensor(f"{b}.ffn_gate_exps.weight", None, (s.n_expert, s.n_ff_exp, s.n_embd), unit)
        yield _Tensor(f"{b}.ffn_up_exps.weight", None, (s.n_expert, s.n_ff_exp, s.n_embd), unit)
        yield _Tensor(f"{b}.ffn_down_exps.weight", None, (s.n_expert, s.n_embd, s.n_ff_exp), branch / _SWIGLU * s.n_ff_exp**-0.5)
    yield _Tensor("output_norm.weight", ones)
    following = embeddings.copy()  # the row of token t + 1 is the embedding of t
    following[: s.tokens] = np.roll(embeddings[: s.tokens], 1, axis=0)
    yield _Tensor("output.weight", (following * np.float32(_LOGIT / s.n_embd)).astype(np.float16))


def _write(path: Path, spec: SyntheticSpec, routing: Routing) -> Synthetic:
    files = _files(path, spec.shards)
    todo = list(_tensors(spec, routing))
    if spec.shards > len(todo):
        raise ValueError(f"shards {spec.shards} must not exceed the {len(todo)} tensors")
    values, size = block_of(spec.quant)
    weights = {std: Weights(spec.quant, std, spec.seed) for std in {t.std for t in todo if t.array is None}}
    # every tensor begins elsewhere among the blocks: no expert equals the one of the same number in another layer
    starts = np.random.default_rng([spec.seed, 3]).permutation(_blocks.N_BLOCKS)
    lengths = [t.array.nbytes if t.array is not None else int(np.prod(t.shape)) // values * size for t in todo]
    free = shutil.disk_usage(path.parent).free
    if sum(lengths) > free - 2**30:
        raise ValueError(
            f"{path.parent} has {free / 2**30:.1f} GiB free, the model takes {sum(lengths) / 2**30:.1f} and 1 is to stay free"
        )
    bounds = [len(todo) * i // spec.shards for i in range(spec.shards + 1)]
    for i, file in enumerate(files):
        writer = GGUFWriter(file, ARCH)
        if i == 0:
            _add_keys(writer, spec)
        if spec.shards > 1:
            writer.add_uint16(Keys.Split.LLM_KV_SPLIT_NO, i)
            writer.add_uint16(Keys.Split.LLM_KV_SPLIT_COUNT, spec.shards)
            writer.add_int32(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, len(todo))
        part = range(bounds[i], bounds[i + 1])
        for j in part:
            tensor = todo[j]
            if tensor.array is not None:
                writer.add_tensor_info(tensor.name, tensor.array.shape, tensor.array.dtype, lengths[j])
            else:
                row = (*tensor.shape[:-1], tensor.shape[-1] // values * size)
                kind = GGMLQuantizationType[spec.quant]
                writer.add_tensor_info(tensor.name, row, np.dtype(np.uint8), lengths[j], raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        out = writer.fout[0]
        for j in part:
            tensor = todo[j]
            writer.write_padding(out, out.tell())
            if tensor.array is not None:
                out.write(tensor.array.tobytes())
            else:
                for piece in weights[tensor.std].stretch(int(starts[j % len(starts)]), lengths[j]):
                    out.write(piece)
            writer.write_padding(out, lengths[j])
        writer.close()
    return Synthetic(files[0], files, spec, routing)


def _add_keys(writer: GGUFWriter, spec: SyntheticSpec) -> None:
    writer.add_name(f"synthetic {spec.shape}")
    numbers = {
        "vocab_size": spec.tokens + N_SPECIAL,
        "context_length": spec.n_ctx,
        "embedding_length": spec.n_embd,
        "block_count": spec.n_layer,
        "feed_forward_length": spec.n_ff_exp,
        "expert_feed_forward_length": spec.n_ff_exp,
        "expert_count": spec.n_expert,
        "expert_used_count": spec.n_expert_used,
        "attention.head_count": spec.n_head,
        "attention.head_count_kv": spec.n_head_kv,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "rope.dimension_count": spec.head_dim,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"{ARCH}.{name}", number)
    writer.add_float32(f"{ARCH}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{ARCH}.rope.freq_base", 10000.0)
    # a number merges from its left end, digit after digit, and in no other way
    texts = [f"\u2581{i}" for i in range(spec.tokens)]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*texts, "<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))])
    writer.add_token_scores([float(len(text)) for text in texts] + [0.0] * N_SPECIAL)
    kinds = [TokenType.NORMAL] * spec.tokens + [TokenType.UNKNOWN] + [TokenType.CONTROL] * 2 + [TokenType.BYTE] * 256
    writer.add_token_types(kinds)
    writer.add_unk_token_id(spec.tokens)
    writer.add_bos_token_id(spec.tokens + 1)
    writer.add_eos_token_id(spec.tokens + 2)
    writer.add_add_bos_token(value=False)


# ---- checks ----


def verify(model: Synthetic, n_tokens: int = 0, n_ubatch: int = 32) -> dict[str, float]:
    """Run a model and compare its routing with the prescribed one.

    Args:
        model: The model.
        n_tokens: Tokens to run in each phase; 0 for all.
        n_ubatch: Tokens in a ubatch of the prefill.

    Returns:
        Shares of (token, layer) pairs, 0 to 1: `decode` and `prefill` with the prescribed set of experts, `decode_order` and
        `prefill_order` with the same order of weights, too.
    """
    from hotmoe import ExpertCache, Llama

    tokens = model.tokens(min(n_tokens or model.routing.n_tokens, model.routing.n_tokens))
    out = {}
    recorder = ExpertCache(slots=0, record=True)
    sizes = {"n_ctx": len(tokens) + 32, "n_batch": n_ubatch, "n_ubatch": n_ubatch}
    with Llama(model.path, expert_cache=recorder, n_gpu_layers=0, verbose=False, **sizes) as llm:
        for phase in ("decode", "prefill"):
            llm.reset()
            recorder.take_trace()
            if phase == "decode":
                for token in tokens:
                    llm.eval([token])
            else:
                llm.eval(tokens)
            got = recorder.take_trace()
            wanted = model.routing.experts[got.token, got.layer]
            count = model.routing.prescribed[got.token, got.layer]
            same = (np.sort(got.experts, axis=1) == np.sort(wanted, axis=1)).all(axis=1)
            out[phase] = float(same[count].mean())
            out[f"{phase}_order"] = float((got.experts == wanted).all(axis=1)[count].mean())
    return out


def hit_rates(routing: Routing, shares: tuple[int, ...] = (10, 25, 45, 65)) -> dict[str, float]:
    """Return what LRU would hit with slots for so many percent of the experts."""
    from hotmoe.replay import replay

    trace = routing.trace()
    return {f"{share}%": float(replay(trace, "lru", slots=f"{share}%").hit_rate or 0.0) for share in shares}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.synthetic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", help="file to write")
    parser.add_argument("--list", action="store_true", help="list the shapes")
    parser.add_argument("--verify", type=int, nargs="?", const=0, metavar="N", help="run N tokens (all) and compare the routing")
    for field in dataclasses.fields(SyntheticSpec):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    options = vars(parser.parse_args())
    output, show, check = options.pop("output"), options.pop("list"), options.pop("verify")
    if show:
        for name, sizes in SHAPES.items():
            print(f"{name:16} " + ", ".join(f"{key} {value}" for key, value in sizes.items()))
        return
    if output is None:
        parser.error("-o is required")
    try:
        model = make_synthetic(output, **options)
    except ValueError as error:
        parser.error(str(error))
    mib = [n / 2**20 for n in (model.n_bytes, model.dense_bytes, model.spec.used_bytes_per_token)]
    print(
        f"{model.path}: {mib[0]:.1f} MiB in {len(model.files)} files, {mib[1]:.1f} MiB of it no experts, {mib[2]:.2f} MiB of "
        f"experts per token, {model.routing.n_tokens} tokens"
    )
    rates = ", ".join(f"{share} of the experts {rate:.3f}" for share, rate in hit_rates(model.routing).items())
    print(f"routing: {model.routing.name}; LRU would hit, with slots for {rates}")
    if check is not None:
        shares = verify(model, check)
        print("as prescribed: " + ", ".join(f"{name} {share:.5f}" for name, share in shares.items()))


if __name__ == "__main__":
    main()
