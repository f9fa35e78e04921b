"""Reading and writing traces; the formats are described in the package."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, LibraryError, TraceError
from . import csv
from .trace import PHASES, Trace, TraceBank

_COLUMNS = ("phase", "prompt", "turn", "token", "layer", "bank", "experts")
_OPTIONAL = ("step", "weights")


def read(path: Path) -> Trace:
    """Read a file, see `Trace.load`."""
    readers = {".csv": csv.read, ".npz": _read_npz, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise TraceError(f"{path} is no trace: its name must end in {', '.join(readers)}")
    if not path.is_file():
        raise TraceError(f"{path} does not exist, or is no file")
    try:
        return reader(path)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error}") from error


def write(trace: Trace, path: Path) -> None:
    """Write a file, see `Trace.save`."""
    writers = {".csv": csv.write, ".npz": _write_npz, ".parquet": _write_parquet}
    writer = writers.get(path.suffix.lower())
    if writer is None:
        raise ArgumentError(f"cannot write a trace as {path}: the name must end in {', '.join(writers)}")
    try:
        writer(trace, path)
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error}") from error


def check_can_write(path: Path) -> None:
    """Raise what `write` would raise, before hours of recording.

    Raises:
        ArgumentError: If the name ends in something else, or the folder does not exist.
        LibraryError: If pyarrow is missing for a .parquet file.
    """
    if path.suffix.lower() not in (".csv", ".npz", ".parquet"):
        raise ArgumentError(f"cannot write a trace as {path}: the name must end in .csv, .npz, .parquet")
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"cannot write {path}: there is no folder {path.absolute().parent}")
    if path.suffix.lower() == ".parquet":
        _pyarrow()


def _about(trace: Trace) -> str:
    return json.dumps({"model": trace.model, "about": trace.about})


def _table_of_banks(trace: Trace) -> npt.NDArray[np.int64]:
    rows = [(b.layer, b.bank, b.n_expert, -1 if b.expert_bytes is None else b.expert_bytes) for b in trace.banks]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def _banks(table: Any) -> tuple[TraceBank, ...]:
    rows = np.asarray(table).reshape(-1, 4).tolist()
    return tuple(TraceBank(layer, bank, n, None if size < 0 else size) for layer, bank, n, size in rows)


def _read_npz(path: Path) -> Trace:
    try:
        with np.load(path, allow_pickle=False) as file:
            if missing := [name for name in (*_COLUMNS, "banks", "about") if name not in file]:
                raise TraceError(f"{path} lacks the array {missing[0]!r}: it is no trace, or was cut by other software")
            columns = {name: file[name] for name in (*_COLUMNS, *_OPTIONAL) if name in file}
            banks, about = file["banks"], json.loads(str(file["about"]))
        return Trace(
            **columns, banks=_banks(banks), model=about["model"], about=about["about"], name=str(path), where=_rows(path)
        )
    except TraceError:
        raise
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise TraceError(f"cannot read {path} as a trace: {error}; it is damaged, or another kind of file") from error


def _write_npz(trace: Trace, path: Path) -> None:
    columns = {name: getattr(trace, name) for name in (*_COLUMNS, *_OPTIONAL) if getattr(trace, name) is not None}
    with path.open("wb") as file:
        np.savez_compressed(file, **columns, banks=_table_of_banks(trace), about=np.array(_about(trace)))


def _rows(path: Path) -> Any:
    return lambda row: f"{path}, row {row}"


def _pyarrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise LibraryError("Parquet files need pyarrow: pip install 'hotmoe[parquet]', or use .npz or .csv") from error


def _write_parquet(trace: Trace, path: Path) -> None:
    pa = _pyarrow()
    used = trace.experts >= 0
    offsets = np.concatenate([[0], np.cumsum(np.count_nonzero(used, axis=1))]).astype(np.int32)
    columns: dict[str, Any] = {name: getattr(trace, name) for name in _COLUMNS[1:-1]}
    columns = {"phase": pa.array(np.array(PHASES)[trace.phase]).dictionary_encode(), **columns}
    if trace.step is not None:
        columns["step"] = trace.step
    columns["experts"] = pa.ListArray.from_arrays(offsets, trace.experts[used])
    if trace.weights is not None:
        columns["weights"] = pa.ListArray.from_arrays(offsets, trace.weights[used])
    about = {**json.loads(_about(trace)), "banks": [dataclasses.astuple(bank) for bank in trace.banks]}
    table = pa.table(columns).replace_schema_metadata({"hotmoe": json.dumps(about)})
    pa.parquet.write_table(table, path, compression="zstd")


def _read_parquet(path: Path) -> Trace:
    pa = _pyarrow()
    try:
        table = pa.parquet.read_table(path)
        about = json.loads((table.schema.metadata or {})[b"hotmoe"])
        columns: dict[str, Any] = {
            name: table[name].to_numpy() for name in (*_COLUMNS[1:-1], "step") if name in table.column_names
        }
        words = table["phase"].to_pylist()
        lists = table["experts"].combine_chunks()
        weights = table["weights"].combine_chunks() if "weights" in table.column_names else None
        lengths = pa.compute.list_value_length(lists).to_numpy(zero_copy_only=False)
        ids = lists.flatten().to_numpy()
        values = None if weights is None else weights.flatten().to_numpy()
        banks = tuple(TraceBank(*bank) for bank in about["banks"])
    except (KeyError, ValueError, TypeError, pa.ArrowException) as error:
        reason = re.sub(r"\s+", " ", str(error))
        raise TraceError(f"cannot read {path} as a trace: {reason}; it is damaged, or another kind of file") from error
    where = _rows(path)
    for row, word in enumerate(words):
        if word not in PHASES:
            raise TraceError(f"{where(row)}: phase is {word!r}: it must be prefill or decode")
    return Trace(
        **columns,
        phase=np.array([PHASES.index(word) for word in words], dtype=np.uint8),
        experts=padded(ids, lengths, -1, np.int32),
        weights=None if values is None else padded(values, lengths, np.nan, np.float32),
        banks=banks,
        model=about["model"],
        about=about["about"],
        name=str(path),
        where=where,
    )


def padded(values: npt.NDArray[Any], lengths: npt.NDArray[Any], fill: float, dtype: Any) -> npt.NDArray[Any]:
    """Return lists that lie one behind another as rows of an array, [n, longest], filled up at the end."""
    out = np.full((len(lengths), int(lengths.max(initial=0))), fill, dtype=dtype)
    out[np.arange(out.shape[1]) < np.asarray(lengths)[:, None]] = values
    return out
