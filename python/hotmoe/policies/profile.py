"""Which experts of each layer are used most, from a recorded trace or from an imatrix file: what the policy `static` keeps.

>>> ExpertCache(slots=16, policy="static(profile=routing.npz)")  # doctest: +SKIP
>>> Static(read_profile("imatrix.gguf"))  # doctest: +SKIP
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from ..errors import PolicyError

__all__ = ["profile_as_pins", "read_profile"]

# llama-imatrix counts, for each expert of each of a layer's expert tensors, the rows that it multiplied
_COUNTS = re.compile(r"blk\.(\d+)\.ffn_(?:down|up|gate|gate_up)_exps\.weight\.counts")


def read_profile(path: str | os.PathLike[str]) -> dict[int, list[int]]:
    """Return, by layer, the experts that were used, the most used first.

    Args:
        path: A trace (`hotmoe trace record`: .npz, .csv, .parquet), or an imatrix in GGUF (`llama-imatrix`). In a trace both
            prompts and generated tokens count; in a layer with two banks, those of the first.

    Raises:
        PolicyError: If it cannot be read, or tells nothing of experts.
    """
    file = Path(path)
    if not file.is_file():
        raise PolicyError(f"profile {file} does not exist")
    counts = _from_imatrix(file) if file.suffix == ".gguf" else _from_trace(file)
    profile = {layer: [int(e) for e in np.argsort(-uses, kind="stable") if uses[e] > 0] for layer, uses in counts.items()}
    if not any(profile.values()):
        raise PolicyError(
            f"profile {file} tells nothing of the use of experts: give a trace, or the imatrix of a model with experts"
        )
    return profile


def profile_as_pins(path: str | os.PathLike[str]) -> str:
    """Return a profile as the native policy `static` takes it: "0:3 5 7;1:2 4".

    Raises:
        PolicyError: As `read_profile`.
    """
    profile = read_profile(path)
    return ";".join(f"{layer}:{' '.join(map(str, experts))}" for layer, experts in sorted(profile.items()) if experts)


def _from_trace(path: Path) -> dict[int, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    from ..errors import HotmoeError
    from ..traces import Trace

    try:
        trace = Trace.load(path)
    except HotmoeError as error:
        raise PolicyError(f"profile {path}: {error}") from error
    counts = {}
    for bank in trace.banks:
        if bank.bank == 0:
            experts = trace.experts[(trace.layer == bank.layer) & (trace.bank == 0)]
            counts[bank.layer] = np.bincount(experts[experts >= 0], minlength=bank.n_expert).astype(np.float64)
    return counts


def _from_imatrix(path: Path) -> dict[int, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    from ..errors import ModelLoadError
    from ..model_file import read_tensors

    try:
        found = read_tensors(path, lambda name: _COUNTS.fullmatch(name) is not None)
    except ModelLoadError as error:
        raise PolicyError(f"profile {path}: {error}") from error
    counts: dict[int, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    for name, values in found.items():
        match = _COUNTS.fullmatch(name)
        assert match
        counts.setdefault(int(match[1]), values.astype(np.float64))
    return counts
