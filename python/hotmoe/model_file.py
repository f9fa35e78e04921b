"""What a GGUF file says about a model, read without loading its weights."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _libs
from .errors import ModelLoadError

# the expert tensors, as llama.cpp's own --cpu-moe finds them
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(up|down|gate|gate_up)_(ch)?exps\.weight")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")

_STRING = 8  # enum gguf_type
_NUMBERS: dict[int, tuple[str, Any]] = {
    0: ("u8", ctypes.c_uint8),
    1: ("i8", ctypes.c_int8),
    2: ("u16", ctypes.c_uint16),
    3: ("i16", ctypes.c_int16),
    4: ("u32", ctypes.c_uint32),
    5: ("i32", ctypes.c_int32),
    10: ("u64", ctypes.c_uint64),
    11: ("i64", ctypes.c_int64),
}


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """What a model file says about itself.

    Attributes:
        path: The file, of a split model its first shard.
        files: All shards, in order.
        architecture: llama.cpp's name of it, for example "qwen3moe".
        name: The model's own name, "" if the file gives none.
        n_layers: Number of layers.
        n_ctx_train: Context length in tokens that the model was trained for.
        n_expert: Experts per layer, 0 for a model without experts.
        n_expert_used: Experts that a token uses per layer.
        n_expert_layers: Layers that have experts.
        tensor_bytes: Bytes of all weights.
        expert_bytes: Bytes of the expert weights.
        expert_types: Quantisation of the expert weights -> number of tensors.
    """

    path: str
    files: tuple[str, ...]
    architecture: str
    name: str
    n_layers: int
    n_ctx_train: int
    n_expert: int
    n_expert_used: int
    n_expert_layers: int
    tensor_bytes: int
    expert_bytes: int
    expert_types: dict[str, int]

    @property
    def slot_bytes(self) -> int:
        """Bytes that one more slot in every layer costs, 0 for a model without experts."""
        return self.expert_bytes // self.n_expert if self.n_expert else 0


def read_model_file(path: str | os.PathLike[str]) -> ModelFile:
    """Read what a GGUF file says about its model.

    Args:
        path: The file, of a split model its first shard.

    Raises:
        ModelLoadError: If a file is missing, is not GGUF, or is broken.
    """
    path = Path(path)
    with _Gguf(path) as first:
        arch = first.text("general.architecture")
        n_files = first.number("split.count") or 1
        info: dict[str, Any] = {
            "architecture": arch,
            "name": first.text("general.name"),
            "n_layers": first.number(f"{arch}.block_count"),
            "n_ctx_train": first.number(f"{arch}.context_length"),
            "n_expert": first.number(f"{arch}.expert_count"),
            "n_expert_used": first.number(f"{arch}.expert_used_count"),
        }
    files = _shards(path, n_files)
    tensor_bytes = expert_bytes = 0
    types: Counter[str] = Counter()
    layers = set()
    for file in files:
        with _Gguf(file) as gguf:
            for name, n_bytes, type_name in gguf.tensors():
                tensor_bytes += n_bytes
                if match := _EXPERTS.fullmatch(name):
                    expert_bytes += n_bytes
                    types[type_name] += 1
                    layers.add(match[1])
    return ModelFile(
        path=str(path),
        files=tuple(map(str, files)),
        n_expert_layers=len(layers),
        tensor_bytes=tensor_bytes,
        expert_bytes=expert_bytes,
        expert_types=dict(types),
        **info,
    )


def _shards(path: Path, n_files: int) -> list[Path]:
    """Return the shards of a model that consists of n files."""
    if n_files == 1:
        return [path]
    match = _SHARD.fullmatch(path.name)
    if not match or int(match[3]) != n_files:
        raise ModelLoadError(
            f"{path} is a shard of {n_files}, but is not named like one: expected ...-00001-of-{n_files:05}.gguf"
        )
    if int(match[2]) != 1:
        raise ModelLoadError(
            f"{path} is shard {int(match[2])} of {n_files}: give the first, {match[1]}-00001-of-{n_files:05}.gguf"
        )
    return [path.with_name(f"{match[1]}-{i:05}-of-{n_files:05}.gguf") for i in range(1, n_files + 1)]


class _GgufInitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


class _Gguf:
    """One open GGUF file; ggml's own reader does the work."""

    def __init__(self, path: Path) -> None:
        from ._log import capture_log

        if not path.exists():
            raise ModelLoadError(f"model file does not exist: {path}")
        with capture_log(forward=False) as log:
            init = _libs.function("ggml-base", "gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _GgufInitParams)
            self._context = init(os.fsencode(path), _GgufInitParams(no_alloc=True, ctx=None))
        if not self._context:
            raise ModelLoadError(f"cannot read {path} as GGUF", log.lines)

    def __enter__(self) -> _Gguf:
        return self

    def __exit__(self, *exception: object) -> None:
        self._function("gguf_free", None)()

    def _function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = _libs.function("ggml-base", name, result, ctypes.c_void_p, *arguments)
        return lambda *values: function(self._context, *values)

    def _find(self, key: str) -> tuple[int, int]:
        """Return (index, type) of a key, type -1 if there is none."""
        i: int = self._function("gguf_find_key", ctypes.c_int64, ctypes.c_char_p)(key.encode())
        return (i, self._function("gguf_get_kv_type", ctypes.c_int, ctypes.c_int64)(i)) if i >= 0 else (-1, -1)

    def number(self, key: str) -> int:
        """Return an integer, 0 if the key is missing or of another type."""
        i, kind = self._find(key)
        if kind not in _NUMBERS:
            return 0
        suffix, c_type = _NUMBERS[kind]
        return int(self._function(f"gguf_get_val_{suffix}", c_type, ctypes.c_int64)(i))

    def text(self, key: str) -> str:
        """Return a string, "" if the key is missing or of another type."""
        i, kind = self._find(key)
        if kind != _STRING:
            return ""
        value: bytes = self._function("gguf_get_val_str", ctypes.c_char_p, ctypes.c_int64)(i)
        return value.decode("utf-8", errors="replace")

    def tensors(self) -> list[tuple[str, int, str]]:
        """Return (name, bytes, type) of all tensors."""
        name = self._function("gguf_get_tensor_name", ctypes.c_char_p, ctypes.c_int64)
        size = self._function("gguf_get_tensor_size", ctypes.c_size_t, ctypes.c_int64)
        kind = self._function("gguf_get_tensor_type", ctypes.c_int, ctypes.c_int64)
        type_name = _libs.function("ggml-base", "ggml_type_name", ctypes.c_char_p, ctypes.c_int)
        n = self._function("gguf_get_n_tensors", ctypes.c_int64)()
        return [(name(i).decode(errors="replace"), size(i), type_name(kind(i)).decode().upper()) for i in range(n)]
