"""Quantisation with ggml itself: the gguf package can read K-quants but not make them.

The library is our own build's ``ggml-base``. It is opened by absolute path and privately; still, a process that also
loads hotmoe should find the same file here, or two libraries of one SONAME meet.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

if TYPE_CHECKING:
    from collections.abc import Callable

    from .spec import LayerQuant, ModelSpec

QUANTS = ("F16", "Q4_0", "Q8_0", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Types that the tests use. Others that need no importance matrix work too."""

EXPERT_ROLES = ("gate", "up", "down", "gate_up")


def _more_bits(il: int, n_layer: int) -> bool:
    """Return whether llama.cpp's ``*_K_M`` mixes give a layer's down matrix more bits (``use_more_bits``)."""
    return il < n_layer // 8 or il >= 7 * n_layer // 8 or (il - n_layer // 8) % 3 == 2


def _k_m(base: str, more: str) -> Callable[[int, int], LayerQuant]:
    return lambda il, n_layer: {"gate": base, "up": base, "down": more if _more_bits(il, n_layer) else base}


MIXES: dict[str, Callable[[int, int], LayerQuant]] = {
    "Q4_K_M": _k_m("Q4_K", "Q6_K"),
    "Q3_K_M": _k_m("Q3_K", "Q5_K"),
}
"""Mixed quantisation as real files have it: (layer, layers) -> types of the layer's expert tensors."""


def layer_quants(spec: ModelSpec, il: int) -> dict[str, str]:
    """Return the type name for each expert role of a layer. A fused tensor takes the gate's unless it is named."""
    if spec.per_layer_quant:
        entry = spec.per_layer_quant[il]
    elif spec.quant in MIXES:
        entry = MIXES[spec.quant](il, spec.n_layer)
    else:
        entry = spec.quant
    if isinstance(entry, str):
        return dict.fromkeys(EXPERT_ROLES, entry)
    unknown = set(entry) - set(EXPERT_ROLES)
    if unknown:
        raise ValueError(f"per_layer_quant[{il}] names {', '.join(sorted(unknown))}, not {', '.join(EXPERT_ROLES)}")
    missing = {"gate", "up", "down"} - set(entry)
    if missing:
        raise ValueError(f"per_layer_quant[{il}] lacks {', '.join(sorted(missing))}")
    return {"gate_up": entry["gate"], **entry}


def ggml_type(name: str) -> GGMLQuantizationType:
    """Return the type of that name.

    Raises:
        ValueError: No such type.
    """
    try:
        return GGMLQuantizationType[name]
    except KeyError:
        raise ValueError(f"quant {name!r} is not one of {', '.join((*QUANTS, *MIXES))} or another ggml type") from None


def block_size(name: str) -> int:
    """Return the number of values in one block of a type; rows are multiples of it."""
    return GGML_QUANT_SIZES[ggml_type(name)][0]


def find_library(lib_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the path of our ggml-base library.

    Args:
        lib_dir: Where to look first; then the environment variable HOTMOE_TEST_LIB_DIR, the installed package, the
            build folder.

    Raises:
        FileNotFoundError: None found; the message lists the folders.
    """
    folders = [Path(d) for d in (lib_dir, os.environ.get("HOTMOE_TEST_LIB_DIR")) if d]
    package = importlib.util.find_spec("hotmoe")
    if package is not None:
        folders += [Path(d) / "lib" for d in package.submodule_search_locations or ()]
    folders.append(Path(__file__).parents[2] / "build" / "bin")
    for folder in folders:
        for stem in ("libhotmoe-ggml-base", "libggml-base"):
            for suffix in (".so", ".dylib"):
                path = folder / f"{stem}{suffix}"
                if path.exists():
                    return path.resolve()
    raise FileNotFoundError(f"no libhotmoe-ggml-base in {', '.join(map(str, folders))}: build it or set HOTMOE_TEST_LIB_DIR")


@cache
def _load(path: Path) -> Any:
    lib = ctypes.CDLL(str(path))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return lib


def quantize(values: npt.NDArray[np.float32], name: str, library: Path) -> npt.NDArray[Any]:
    """Convert values to a ggml type.

    Args:
        values: Shape (..., row).
        name: Type, for example ``Q4_K``.
        library: From `find_library`.

    Returns:
        F32 and F16: an array of that type and shape. Others: bytes of shape (..., bytes per row).
    """
    if name == "F32":
        return values
    if name == "F16":
        return values.astype(np.float16)
    kind = ggml_type(name)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row = values.shape[-1]
    if row % block:
        raise ValueError(f"rows of {row} values do not divide into {name} blocks of {block}")
    source = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, row)
    out = np.empty((*values.shape[:-1], row // block * block_bytes), dtype=np.uint8)
    convert = _load(library).ggml_quantize_chunk

    def part(rows: tuple[int, int]) -> int:
        first, end = rows
        return int(convert(int(kind), source.ctypes.data, out.ctypes.data, first * row, end - first, row, None))

    # ctypes releases the GIL; rows are independent, so the bytes do not depend on the number of threads
    n = os.cpu_count() or 1
    bounds = [len(source) * i // n for i in range(n + 1)]
    with ThreadPoolExecutor(n) as pool:
        written = sum(pool.map(part, pairwise(bounds)))
    if written != out.nbytes:
        raise RuntimeError(f"{library.name} wrote {written} bytes of {name}, expected {out.nbytes}")
    return out
