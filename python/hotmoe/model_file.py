"""What a GGUF file says about a model, read without loading its weights."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import _libs
from .errors import ModelLoadError

# the expert tensors, as llama.cpp's own --cpu-moe finds them
EXPERT_TENSOR = re.compile(r"blk\.(\d+)\.ffn_(up|down|gate|gate_up)_(ch)?exps\.weight")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")

MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS

_STRING, _ARRAY = 8, 9  # enum gguf_type
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
        n_expert_used: Experts that a token uses per layer; if layers differ, the largest number.
        n_expert_groups: Groups that the experts of a layer are divided into, 0 for none.
        n_expert_groups_used: Groups that a token's experts are taken from.
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
    n_expert_groups: int
    n_expert_groups_used: int
    n_expert_layers: int
    tensor_bytes: int
    expert_bytes: int
    expert_types: dict[str, int]

    @property
    def slot_bytes(self) -> int:
        """Bytes that one more slot in every layer costs, 0 for a model without experts."""
        return self.expert_bytes // self.n_expert if self.n_expert else 0


def read_model_file(path: str | os.PathLike[str]) -> ModelFile:
    """Read what a GGUF file says about its model, and check that its files are whole.

    Args:
        path: The file, of a split model its first shard.

    Raises:
        ModelLoadError: If a file is missing, is not GGUF, or is cut off.
    """
    return inspect_model(path)[0]


def inspect_model(path: str | os.PathLike[str]) -> tuple[ModelFile, list[str]]:
    """Return the same as `read_model_file`, and the names of all tensors.

    Raises:
        ModelLoadError: As there.
    """
    path = Path(path)
    tensor_bytes = expert_bytes = 0
    types: Counter[str] = Counter()
    layers = set()
    names = []
    with _Gguf(path) as first:
        arch = first.text("general.architecture")
        info: dict[str, Any] = {
            "architecture": arch,
            "name": first.text("general.name"),
            "n_layers": first.number(f"{arch}.block_count"),
            "n_ctx_train": first.number(f"{arch}.context_length"),
            "n_expert": first.number(f"{arch}.expert_count"),
            "n_expert_used": first.number(f"{arch}.expert_used_count"),
            "n_expert_groups": first.number(f"{arch}.expert_group_count"),
            "n_expert_groups_used": first.number(f"{arch}.expert_group_used_count"),
        }
        files = _shards(path, first.number("split.count") or 1)
        for i, file in enumerate(files):
            with contextlib.nullcontext(first) if i == 0 else _Gguf(file) as gguf:
                gguf.require_whole()
                for name, n_bytes, type_name in gguf.tensors():
                    names.append(name)
                    tensor_bytes += n_bytes
                    if match := EXPERT_TENSOR.fullmatch(name):
                        expert_bytes += n_bytes
                        types[type_name] += 1
                        layers.add(match[1])
    model = ModelFile(
        path=str(files[0]),
        files=tuple(map(str, files)),
        n_expert_layers=len(layers),
        tensor_bytes=tensor_bytes,
        expert_bytes=expert_bytes,
        expert_types=dict(types),
        **info,
    )
    return model, names


def read_tensors(path: str | os.PathLike[str], wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Return the 32-bit floats of some tensors of a GGUF file, by name, as numpy arrays of one dimension.

    Args:
        path: Any GGUF file.
        wanted: Says of a name whether the tensor is.

    Raises:
        ModelLoadError: If the file cannot be read.
    """
    with _Gguf(Path(path)) as file:
        file.require_whole()
        return file.floats(wanted)


def check_expert_counts(model: ModelFile, kv_overrides: Mapping[str, Any] | None = None) -> None:
    """Refuse numbers of experts on which llama.cpp would abort the process.

    Args:
        model: The file's content.
        kv_overrides: Values that replace the file's at load, by key.

    Raises:
        ModelLoadError: If a number cannot be; the message names the file, the value and the fix.
    """
    overrides = kv_overrides or {}
    file = {
        "expert_count": model.n_expert,
        "expert_used_count": model.n_expert_used,
        "expert_group_count": model.n_expert_groups,
        "expert_group_used_count": model.n_expert_groups_used,
    }
    keys = [f"{model.architecture}.{name}" for name in file]
    count, used, groups, groups_used = (overrides.get(key, value) for key, value in zip(keys, file.values(), strict=True))
    if not 0 <= count <= MAX_EXPERTS:
        wrong, legal = 0, f"llama.cpp takes at most {MAX_EXPERTS} experts per layer"
    elif not min(count, 1) <= used <= count:
        wrong, legal = 1, f"with {count} experts per layer it must be {min(count, 1)} to {count}"
    elif groups > 0 and (groups >= count or (groups > 1 and count % groups)):
        wrong, legal = 2, f"{count} experts cannot be divided into that many groups"
    elif groups > 1 and not 0 < groups_used < groups:
        wrong, legal = 3, f"of {groups} groups, 1 to {groups - 1} can be used"
    else:
        return
    value, key = (count, used, groups, groups_used)[wrong], keys[wrong]
    if overrides.keys() & keys:
        fix = "correct kv_overrides"
    else:
        fix = f"the file is damaged or badly converted: get it anew, or give the right value in kv_overrides={{{key!r}: ...}}"
    raise ModelLoadError(f"cannot load {model.path}: {key} is {value}, but {legal}; {fix}")


def _shards(path: Path, n_files: int) -> list[Path]:
    """Return the shards of a model that consists of n files.

    llama.cpp looks for them beside the path that it is given. Where that is a symlink, it may be the target's folder that
    has them.

    Raises:
        ModelLoadError: If the path is not the first shard, or another one is missing.
    """
    if n_files == 1:
        return [path]
    tried = [path, path.resolve()] if path.is_symlink() else [path]
    match = None
    missing: list[Path] = []
    for candidate in tried:
        match = _SHARD.fullmatch(candidate.name)
        if not match or int(match[3]) != n_files:
            continue
        if int(match[2]) != 1:
            first = candidate.with_name(f"{match[1]}-00001-of-{n_files:05}.gguf")
            raise ModelLoadError(f"{candidate} is shard {int(match[2])} of {n_files}: give the first, {first}")
        shards = [candidate.with_name(f"{match[1]}-{i:05}-of-{n_files:05}.gguf") for i in range(1, n_files + 1)]
        absent = [shard for shard in shards if not shard.exists()]
        if not absent:
            return shards
        missing = missing or absent
    if missing:
        raise ModelLoadError(
            f"{path} is the first of {n_files} shards, but {', '.join(map(str, missing))} does not exist: put all shards into "
            f"one folder, under the names they were published with"
        )
    raise ModelLoadError(
        f"{path} is a shard of {n_files}, but is not named like one, so the others cannot be found: rename it to "
        f"...-00001-of-{n_files:05}.gguf, as the others are named"
    )


class _GgufInitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


class _Gguf:
    """One open GGUF file; ggml's own reader does the work."""

    def __init__(self, path: Path) -> None:
        from ._log import capture_log

        if not path.exists():
            raise ModelLoadError(f"model file does not exist: {path}")
        if path.is_dir():
            raise ModelLoadError(f"{path} is a folder: give the GGUF file in it, of a split model the first shard")
        if not path.is_file():  # opening a pipe would wait for somebody to write to it
            raise ModelLoadError(
                f"{path} is not a regular file, and a model can be loaded only from one: save it to a disk first"
            )
        self._path = path
        with capture_log(forward=False) as log:
            init = _libs.function("ggml-base", "gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _GgufInitParams)
            self._context = init(os.fsencode(path), _GgufInitParams(no_alloc=True, ctx=None))
        if not self._context:
            raise ModelLoadError(
                f"cannot read {path} ({path.stat().st_size} bytes) as GGUF: it is another kind of file, or cut off, or damaged; "
                f"get it anew",
                log.lines,
            )

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
        """Return an integer, of an array of them the largest; 0 if the key is missing or of another type."""
        i, kind = self._find(key)
        if kind == _ARRAY:
            kind = self._function("gguf_get_arr_type", ctypes.c_int, ctypes.c_int64)(i)
            n = self._function("gguf_get_arr_n", ctypes.c_size_t, ctypes.c_int64)(i)
            if kind not in _NUMBERS or n == 0:
                return 0
            data = self._function("gguf_get_arr_data", ctypes.c_void_p, ctypes.c_int64)(i)
            return int(max((_NUMBERS[kind][1] * n).from_address(data)))
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

    def require_whole(self) -> None:
        """Raise ModelLoadError if the file ends before its last tensor."""
        offset = self._function("gguf_get_tensor_offset", ctypes.c_size_t, ctypes.c_int64)
        size = self._function("gguf_get_tensor_size", ctypes.c_size_t, ctypes.c_int64)
        n = self._function("gguf_get_n_tensors", ctypes.c_int64)()
        need = self._function("gguf_get_data_offset", ctypes.c_size_t)() + max((offset(i) + size(i) for i in range(n)), default=0)
        have = self._path.stat().st_size
        if n and have < need:
            raise ModelLoadError(f"{self._path} is cut off: it has {have} bytes of {need}; copy or download it again")

    def floats(self, wanted: Callable[[str], bool]) -> dict[str, Any]:
        """Return the 32-bit floats of tensors, by name, as numpy arrays of one dimension; tensors of other types are left out."""
        import numpy as np

        name = self._function("gguf_get_tensor_name", ctypes.c_char_p, ctypes.c_int64)
        offset = self._function("gguf_get_tensor_offset", ctypes.c_size_t, ctypes.c_int64)
        size = self._function("gguf_get_tensor_size", ctypes.c_size_t, ctypes.c_int64)
        kind = self._function("gguf_get_tensor_type", ctypes.c_int, ctypes.c_int64)
        begin = self._function("gguf_get_data_offset", ctypes.c_size_t)()
        f32 = 0  # GGML_TYPE_F32
        return {
            name(i).decode(): np.fromfile(self._path, np.float32, size(i) // 4, offset=begin + offset(i))
            for i in range(self._function("gguf_get_n_tensors", ctypes.c_int64)())
            if kind(i) == f32 and wanted(name(i).decode())
        }

    def tensors(self) -> list[tuple[str, int, str]]:
        """Return (name, bytes, type) of all tensors."""
        name = self._function("gguf_get_tensor_name", ctypes.c_char_p, ctypes.c_int64)
        size = self._function("gguf_get_tensor_size", ctypes.c_size_t, ctypes.c_int64)
        kind = self._function("gguf_get_tensor_type", ctypes.c_int, ctypes.c_int64)
        type_name = _libs.function("ggml-base", "ggml_type_name", ctypes.c_char_p, ctypes.c_int)
        n = self._function("gguf_get_n_tensors", ctypes.c_int64)()
        return [(name(i).decode(errors="replace"), size(i), type_name(kind(i)).decode().upper()) for i in range(n)]
