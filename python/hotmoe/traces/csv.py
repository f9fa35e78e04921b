"""Traces as CSV; the format is described in the package."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import TraceError
from .trace import PHASES, Trace, TraceBank

_REQUIRED = ("phase", "token", "layer", "experts")
_NUMBERS = ("prompt", "turn", "token", "layer", "bank", "step")
_KNOWN = ("phase", *_NUMBERS, "experts", "weights")


def read(path: Path) -> Trace:
    """Read a file, see `Trace.load`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no text file: {error}") from error

    n_head = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), None)
    if n_head is None:
        raise TraceError(
            f"{path} has no rows: after the lines with # comes one with the names of the columns, {','.join(_REQUIRED)}"
        )
    about: dict[str, str] = {}
    for line in lines[:n_head]:
        key, separator, value = line.lstrip("#").strip().partition("=")
        if separator:
            about[key.strip()] = value.strip()

    names = [name.strip() for name in lines[n_head].split(",")]
    head = f"{path}, line {n_head + 1}"
    for name in _REQUIRED:
        if name not in names:
            raise TraceError(f"{head}: there is no column {name!r}; the columns must be named, such as {','.join(_REQUIRED)}")
    for name in names:
        if name not in _KNOWN or names.count(name) > 1:
            raise TraceError(f"{head}: column {name!r} is unknown, or there twice; columns are {', '.join(_KNOWN)}")

    numbers, rows = [], []  # of lines, from 1; their fields
    for number, line in enumerate(itertools.islice(lines, n_head + 1, None), start=n_head + 2):
        if not line or line.startswith("#"):
            continue
        fields = line.split(",")
        if len(fields) != len(names):
            raise TraceError(
                f"{path}, line {number}: {len(fields)} fields, but there are {len(names)} columns ({','.join(names)})"
            )
        numbers.append(number)
        rows.append(fields)

    def where(row: int) -> str:
        return f"{path}, line {numbers[row]}"

    columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(names, ())
    experts = [text.split() for text in columns["experts"]]
    arrays: dict[str, Any] = {
        name: _numbers(columns[name], np.int64 if name == "step" else np.int32, name, where)
        for name in _NUMBERS
        if name in columns
    }
    arrays["phase"] = _phases(columns["phase"], where)
    arrays["experts"] = ids = _lists(experts, -1, np.int32, "experts", where)
    if "weights" in columns:
        weights = [text.split() for text in columns["weights"]]
        for row, (some, others) in enumerate(zip(weights, experts, strict=True)):
            if some and len(some) != len(others):
                raise TraceError(f"{where(row)}: {len(some)} weights for {len(others)} experts: give one for each, or none")
        values = _lists(weights, np.nan, np.float32, "weights", where)
        arrays["weights"] = np.pad(values, ((0, 0), (0, ids.shape[1] - values.shape[1])), constant_values=np.nan)
    return Trace(
        **arrays,
        banks=_banks(path, about, arrays),
        model=about.pop("model", "") or _meta(about).get("model", ""),
        about={key: value for key, value in about.items() if key not in ("n_expert_per_layer", "expert_bytes_per_layer")},
        name=str(path),
        where=where,
    )


def _phases(words: Any, where: Callable[[int], str]) -> npt.NDArray[np.uint8]:
    try:
        return np.array([PHASES.index(word) for word in words], dtype=np.uint8)
    except ValueError:
        row = next(i for i, word in enumerate(words) if word not in PHASES)
        raise TraceError(f"{where(row)}: phase is {words[row]!r}: it must be prefill or decode") from None


def _numbers(texts: Any, dtype: Any, name: str, where: Callable[[int], str]) -> npt.NDArray[Any]:
    """Convert a column, or name the first text that is no number."""
    kind: Any = float if np.issubdtype(dtype, np.floating) else int
    try:
        return np.array([kind(text) for text in texts], dtype=dtype)
    except (ValueError, OverflowError):
        for row, text in enumerate(texts):
            try:
                np.array([kind(text)], dtype=dtype)
            except (ValueError, OverflowError):
                what = "a number" if kind is float else f"an integer of {np.dtype(dtype).itemsize * 8} bits"
                raise TraceError(f"{where(row)}: {name} has {text!r}, which is not {what}") from None
        raise


def _lists(lists: list[list[str]], fill: float, dtype: Any, name: str, where: Callable[[int], str]) -> npt.NDArray[Any]:
    """Convert lists of texts to rows, filled up at the end."""
    from .files import padded

    row_of = np.repeat(np.arange(len(lists)), [len(x) for x in lists])
    values = _numbers(list(itertools.chain.from_iterable(lists)), dtype, name, lambda i: where(int(row_of[i])))
    return padded(values, np.array([len(x) for x in lists], dtype=np.int64), fill, dtype)


def _meta(about: dict[str, str]) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in about.get("meta", "").split() if "=" in pair)


def _banks(path: Path, about: dict[str, str], arrays: dict[str, Any]) -> tuple[TraceBank, ...]:
    """Return the banks that have rows, or that the file names."""
    layers, banks = arrays["layer"], arrays.get("bank", np.zeros_like(arrays["layer"]))
    if "layers" in about:
        keys = [tuple(map(int, (*text.split("."), "0")[:2])) for text in about.pop("layers").split()]
    else:
        keys = sorted({(int(layer), int(bank)) for layer, bank in zip(layers, banks, strict=True)})

    def per_layer(key: str) -> list[int] | None:
        if key not in about:
            return None
        values = [int(text) for text in about[key].split()]
        if len(values) == 1:
            return values * len(keys)
        if len(values) != len(keys):
            raise TraceError(
                f"{path}: {key} has {len(values)} numbers, but {len(keys)} layers have rows: give one for each, or one"
            )
        return values

    try:
        n_expert, sizes = per_layer("n_expert_per_layer"), per_layer("expert_bytes_per_layer")
        if n_expert is None and "n_expert" in (meta := _meta(about)):
            n_expert = [int(meta["n_expert"])] * len(keys)
    except TraceError:
        raise
    except ValueError as error:
        raise TraceError(f"{path}: a line with # has something that is no number where one belongs: {error}") from error
    if n_expert is None:
        n_expert = [int(arrays["experts"].max(initial=0)) + 1] * len(keys)
        if keys:
            warnings.warn(
                f"{path} does not tell how many experts a layer has, so {n_expert[0]} is taken, one more than the largest id: "
                f"add a line `# meta=n_expert=N`",
                stacklevel=4,
            )
    sizes_or_none: list[Any] = [None] * len(keys) if sizes is None else [size if size >= 0 else None for size in sizes]
    return tuple(TraceBank(key[0], key[1], n, size) for key, n, size in zip(keys, n_expert, sizes_or_none, strict=True))


def write(trace: Trace, path: Path) -> None:
    """Write a file, see `Trace.save`."""
    about = {"model": trace.model} if trace.model else {}
    about |= {key: " ".join(value.split()) for key, value in trace.about.items()}
    about["layers"] = " ".join(f"{bank.layer}.{bank.bank}" if bank.bank else str(bank.layer) for bank in trace.banks)
    about["n_expert_per_layer"] = " ".join(str(bank.n_expert) for bank in trace.banks)
    if any(bank.expert_bytes is not None for bank in trace.banks):
        about["expert_bytes_per_layer"] = " ".join(str(-1 if b.expert_bytes is None else b.expert_bytes) for b in trace.banks)

    columns: dict[str, list[Any]] = {"phase": [PHASES[phase] for phase in trace.phase]}
    for name in _NUMBERS:
        column = getattr(trace, name)
        if column is not None and (name in _REQUIRED or name == "step" or column.any()):
            columns[name] = column.tolist()
    used = trace.n_used.tolist()
    columns["experts"] = [" ".join(map(str, row[:n])) for row, n in zip(trace.experts.tolist(), used, strict=True)]
    if trace.weights is not None:
        columns["weights"] = [
            "" if np.isnan(row[:n]).all() else " ".join(f"{weight:.9g}" for weight in row[:n])
            for row, n in zip(trace.weights, used, strict=True)
        ]
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"# {key}={value}\n" for key, value in about.items())
        file.write(",".join(columns) + "\n")
        file.writelines(",".join(map(str, row)) + "\n" for row in zip(*columns.values(), strict=True))
