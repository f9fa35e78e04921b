"""Writes models, and keeps those that were written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter, Keys

from .archs import hyperparameters, resolve, tensors
from .quantize import find_library, ggml_type, layer_quants, quantize
from .vocab import add_vocab

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .spec import ModelSpec, Tensor

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def make_model(path: str | os.PathLike[str], *, lib_dir: str | os.PathLike[str] | None = None, **options: Any) -> Path:
    """Write a model.

    Args:
        path: File to write, ending in ``.gguf``. With shards, ``-00001-of-0000N`` goes before the ending.
        lib_dir: Folder of our ggml-base library; see `find_library`.
        **options: Fields of `ModelSpec`.

    Returns:
        The file to load: `path`, or the first shard.

    Raises:
        ValueError: A spec that cannot be; see `resolve`.
        FileNotFoundError: No ggml-base library.
    """
    return _write(Path(path), resolve(**options), lib_dir)


def cached_model(**options: Any) -> Path:
    """Return a model of this spec, written at the first call and kept in a folder.

    The folder is HOTMOE_TEST_CACHE, else one in the temporary folder. A change of this package's source makes new
    models. Treat the files as read-only: other tests use them.

    Args:
        **options: Fields of `ModelSpec`.
    """
    spec = resolve(**options)
    default = Path(tempfile.gettempdir()) / f"hotmoe-test-models-{os.getuid()}"
    root = Path(os.environ.get("HOTMOE_TEST_CACHE") or default)
    text = json.dumps(asdict(spec), sort_keys=True, default=dict)
    key = hashlib.sha256(f"{_version()} {text}".encode()).hexdigest()[:16]
    name = f"{spec.arch}-{'mixed' if spec.per_layer_quant else spec.quant}"
    folder = root / f"{name}-{key}"
    path = folder / f"{name}.gguf"
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=root, prefix="draft-"))
        try:
            _write(draft / path.name, spec, None)
            draft.rename(folder)
        except OSError:
            # another process was faster: its folder holds the same bytes
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return _shard(path, 0, spec.shards)


def model_files(path: Path) -> list[Path]:
    """Return all files of the model whose first (or only) file is `path`."""
    match = _SHARD.search(path.name)
    if match is None:
        return [path]
    stem = path.with_name(path.name[: match.start()] + ".gguf")
    return [_shard(stem, i, int(match[2])) for i in range(int(match[2]))]


def _shard(path: Path, i: int, n: int) -> Path:
    return path if n == 1 else path.with_name(f"{path.stem}-{i + 1:05d}-of-{n:05d}.gguf")


@cache
def _version() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()


def _write(path: Path, spec: ModelSpec, lib_dir: str | os.PathLike[str] | None) -> Path:
    library = find_library(lib_dir)
    todo = tensors(spec)
    if spec.shards > len(todo):
        raise ValueError(f"shards {spec.shards} must not exceed the {len(todo)} tensors")
    bounds = [len(todo) * i // spec.shards for i in range(spec.shards + 1)]
    for i in range(spec.shards):
        writer = GGUFWriter(_shard(path, i, spec.shards), spec.arch)
        if i == 0:
            _add_keys(writer, spec)
        if spec.shards > 1:
            writer.add_uint16(Keys.Split.LLM_KV_SPLIT_NO, i)
            writer.add_uint16(Keys.Split.LLM_KV_SPLIT_COUNT, spec.shards)
            writer.add_int32(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, len(todo))
        for tensor, il in todo[bounds[i] : bounds[i + 1]]:
            kind = _type_name(tensor, spec, il)
            writer.add_tensor(tensor.name, quantize(_values(tensor, spec.seed), kind, library), raw_dtype=ggml_type(kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return _shard(path, 0, spec.shards)


def _type_name(tensor: Tensor, spec: ModelSpec, il: int) -> str:
    if tensor.role == "f32":
        return "F32"
    if tensor.role == "dense":
        return spec.dense_quant
    return layer_quants(spec, il)[tensor.role]


def _values(tensor: Tensor, seed: int) -> npt.NDArray[np.float32]:
    if tensor.parts:
        return np.concatenate([_values(part, seed) for part in tensor.parts], axis=1)
    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    if tensor.distribution == "log-uniform":
        spread = rng.uniform(-1.0, 1.0, tensor.shape)
        return (tensor.mean * tensor.std**spread).astype(np.float32)
    values = rng.standard_normal(tensor.shape, dtype=np.float32)
    values *= np.float32(tensor.std)
    values += np.float32(tensor.mean)
    return values


def _add_keys(writer: GGUFWriter, spec: ModelSpec) -> None:
    writer.add_name(f"tiny random {spec.arch}")
    for name, value in hyperparameters(spec).items():
        key = f"{writer.arch}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
    add_vocab(writer, spec.n_vocab)


def describe(files: Iterable[Path]) -> str:
    """Return a line that says how large the files are together."""
    sizes = [f.stat().st_size for f in files]
    return f"{len(sizes)} file{'s' * (len(sizes) > 1)}, {sum(sizes) / 2**20:.1f} MiB"
