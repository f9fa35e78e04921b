"""The trace itself: columns, what is about the whole, and checks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, TraceError

DECODE, PREFILL = 0, 1  # enum hotmoe_phase
PHASES = ("decode", "prefill")

Ints = npt.NDArray[np.int32]

_ZEROS: Any = None  # a column that is not given

_INT_COLUMNS = ("prompt", "turn", "token", "layer", "bank")


@dataclasses.dataclass(frozen=True, order=True)
class TraceBank:
    """One bank of experts.

    Attributes:
        layer: Number of the layer.
        bank: 0, or 1 for the second bank of a layer that has two.
        n_expert: Experts in it.
        expert_bytes: Bytes of one of them; None if unknown.
    """

    layer: int
    bank: int
    n_expert: int
    expert_bytes: int | None = None


@dataclasses.dataclass(eq=False, kw_only=True)
class Trace:
    """Routing of every token and layer; n rows, at most k experts in each. What the columns mean is said in the package.

    Attributes:
        phase: uint8 [n], DECODE or PREFILL.
        prompt: int32 [n].
        turn: int32 [n].
        token: int32 [n].
        layer: int32 [n].
        bank: int32 [n].
        experts: int32 [n, k]; rows with fewer experts end with -1.
        weights: float32 [n, k], NaN where there is no expert or its weight is unknown; None if no weights are known.
        step: int64 [n], or None.
        banks: All banks of the model that have rows, and maybe more, by layer and bank.
        model: Name of the model, "" if unknown.
        name: What to call the trace, as a rule the file that it came from.
        about: Further text by key: source, licence, and so on.
    """

    phase: npt.NDArray[np.uint8]
    token: Ints
    layer: Ints
    experts: Ints
    banks: tuple[TraceBank, ...]
    prompt: Ints = _ZEROS
    turn: Ints = _ZEROS
    bank: Ints = _ZEROS
    weights: npt.NDArray[np.float32] | None = None
    step: npt.NDArray[np.int64] | None = None
    model: str = ""
    name: str = "trace"
    about: dict[str, str] = dataclasses.field(default_factory=dict)
    where: dataclasses.InitVar[Callable[[int], str] | None] = None

    def __post_init__(self, where: Callable[[int], str] | None) -> None:
        """Convert the columns and check them.

        Args:
            where: Says where a row comes from, for errors.

        Raises:
            TraceError: If a value cannot be.
        """
        self.phase = np.ascontiguousarray(self.phase, dtype=np.uint8)
        self.experts = np.ascontiguousarray(self.experts, dtype=np.int32)
        n = len(self.phase)
        for name in _INT_COLUMNS:
            column = getattr(self, name, None)
            setattr(self, name, np.zeros(n, np.int32) if column is None else np.ascontiguousarray(column, dtype=np.int32))
        if self.weights is not None:
            self.weights = np.ascontiguousarray(self.weights, dtype=np.float32)
        if self.step is not None:
            self.step = np.ascontiguousarray(self.step, dtype=np.int64)
        self.banks = tuple(sorted(self.banks))
        self._check(where or (lambda row: f"row {row}"))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.phase)

    def __repr__(self) -> str:
        """Return the sizes in one line."""
        return (
            f"<Trace {self.name}: {len(self)} rows, {len(self.banks)} banks, {self.n_tokens(PREFILL)} tokens of prompts, "
            f"{self.n_tokens(DECODE)} generated>"
        )

    def n_tokens(self, phase: int) -> int:
        """Return the number of tokens of a phase that have a row."""
        mine = self.phase == phase
        return len(np.unique(np.stack([self.prompt[mine], self.turn[mine], self.token[mine]]), axis=1).T)

    @property
    def bank_index(self) -> Ints:
        """int32 [n]: each row's index in `banks`."""
        keys = np.array([bank.layer * 2 + bank.bank for bank in self.banks], dtype=np.int64)
        index: Ints = np.searchsorted(keys, self.layer.astype(np.int64) * 2 + self.bank).astype(np.int32)
        return index

    @property
    def n_used(self) -> Ints:
        """int32 [n]: number of experts in each row."""
        n: Ints = np.count_nonzero(self.experts >= 0, axis=1).astype(np.int32)
        return n

    def n_used_of_banks(self) -> list[int]:
        """Return, for each bank, the most experts that a token uses there; 0 for a bank without rows."""
        most = np.zeros(len(self.banks), dtype=np.int32)
        np.maximum.at(most, self.bank_index, self.n_used)
        return [int(n) for n in most]

    # ---- files ----

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a file.

        Args:
            path: Its name ends in .csv, .npz or .parquet.

        Raises:
            TraceError: If the file cannot be read, or a value in it cannot be; the message names the line or row, the value
                and the fix.
        """
        from .files import read

        return read(Path(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file; `load` gives an equal trace.

        Args:
            path: Its name ends in .csv, .npz or .parquet.

        Raises:
            ArgumentError: If it ends in something else.
            TraceError: If the file cannot be written.
        """
        from .files import write

        write(self, Path(path))

    # ---- parts ----

    def rows(self, which: npt.NDArray[Any]) -> Trace:
        """Return a trace of some rows, given as indices or a mask."""
        return dataclasses.replace(
            self,
            **{name: getattr(self, name)[which] for name in ("phase", "experts", *_INT_COLUMNS)},
            weights=None if self.weights is None else self.weights[which],
            step=None if self.step is None else self.step[which],
            where=None,
        )

    @classmethod
    def concat(cls, traces: Sequence[Trace]) -> Trace:
        """Join traces of one model, one after another; what is about the whole is the first one's.

        Raises:
            ArgumentError: If there is none, or their banks differ.
        """
        if not traces:
            raise ArgumentError("there is no trace to join")
        first = traces[0]
        for trace in traces:
            if trace.banks != first.banks:
                raise ArgumentError(f"{trace.name} and {first.name} are of different models: their banks of experts differ")
        k = max(trace.experts.shape[1] for trace in traces)

        def wide(array: npt.NDArray[Any], fill: float) -> npt.NDArray[Any]:
            return np.pad(array, ((0, 0), (0, k - array.shape[1])), constant_values=fill)

        weights = None
        if any(trace.weights is not None for trace in traces):
            weights = np.concatenate(
                [np.full((len(t), k), np.nan, np.float32) if t.weights is None else wide(t.weights, np.nan) for t in traces]
            )
        steps = [trace.step for trace in traces if trace.step is not None]
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(trace, name) for trace in traces]) for name in ("phase", *_INT_COLUMNS)
        }
        return dataclasses.replace(
            first,
            **columns,
            experts=np.concatenate([wide(trace.experts, -1) for trace in traces]),
            weights=weights,
            step=np.concatenate(steps) if len(steps) == len(traces) else None,
            where=None,
        )

    # ---- checks ----

    def _check(self, where: Callable[[int], str]) -> None:
        n, k = len(self), self.experts.shape[1] if self.experts.ndim == 2 else -1
        shapes = {name: getattr(self, name).shape for name in ("phase", *_INT_COLUMNS)}
        if self.step is not None:
            shapes["step"] = self.step.shape
        if k < 0 or len(self.experts) != n or any(shape != (n,) for shape in shapes.values()):
            raise TraceError(f"columns differ in length: experts {self.experts.shape}, {shapes}")
        if self.weights is not None and self.weights.shape != self.experts.shape:
            raise TraceError(f"weights {self.weights.shape} and experts {self.experts.shape} differ in shape")
        if len({(bank.layer, bank.bank) for bank in self.banks}) != len(self.banks):
            raise TraceError("a bank is there twice")
        if n == 0:
            return

        def refuse(bad: Any, what: Callable[[int], str]) -> None:
            if bad.any():
                row = int(np.argmax(bad))
                raise TraceError(f"{where(row)}: {what(row)}")

        refuse(self.phase > PREFILL, lambda i: f"phase is {self.phase[i]}: it must be {DECODE} (decode) or {PREFILL} (prefill)")
        for name in ("prompt", "turn", "token", "layer"):
            column = getattr(self, name)
            refuse(column < 0, lambda i, name=name, column=column: f"{name} is {column[i]}: it must not be negative")  # type: ignore[misc]
        refuse((self.bank < 0) | (self.bank > 1), lambda i: f"bank is {self.bank[i]}: it must be 0 or 1")
        refuse(self.n_used == 0, lambda i: "there are no experts: a row needs one at least")

        known = np.zeros((int(self.layer.max()) + 1, 2), dtype=np.int32)  # number of experts
        for bank in self.banks:
            if bank.n_expert < 1:
                raise TraceError(f"layer {bank.layer} has {bank.n_expert} experts: it must have one at least")
            if bank.layer < len(known):
                known[bank.layer, bank.bank] = bank.n_expert
        limit = known[self.layer, self.bank]
        refuse(limit == 0, lambda i: f"layer {self.layer[i]}, bank {self.bank[i]} is not one that the trace says it has")
        refuse(
            (self.experts >= limit[:, None]).any(axis=1),
            lambda i: (
                f"expert {self.experts[i].max()}: layer {self.layer[i]} has {limit[i]} experts, 0 to {limit[i] - 1}; correct "
                f"the number or the id"
            ),
        )
        padding = self.experts < 0
        refuse(
            (self.experts < -1).any(axis=1) | (padding[:, :-1] & ~padding[:, 1:]).any(axis=1),
            lambda i: f"experts are {self.experts[i].tolist()}: ids must not be negative, except that a short row ends with -1",
        )
        # equal positions lie side by side after sorting; the later one of the two is the one to name
        keys = (self.bank, self.layer, self.token, self.phase, self.turn, self.prompt)
        order = np.lexsort(keys)
        same = np.all([key[order][1:] == key[order][:-1] for key in keys], axis=0)
        twice = np.zeros(n, dtype=bool)
        twice[order[1:][same]] = True
        refuse(
            twice,
            lambda i: (
                f"token {self.token[i]} of layer {self.layer[i]} is there a second time: several prompts need the column "
                f"`prompt`, several turns `turn`"
            ),
        )
