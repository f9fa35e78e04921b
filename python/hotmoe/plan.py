"""What the sizing decided: slots per layer and device, bytes, and what was left out and why."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any


def format_bytes(n: float) -> str:
    """Return a number of bytes as people write it: 512 B, 1.5 KiB, 6.0 GiB."""
    if n < 1024:
        return f"{n:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        n /= 1024
        if n < 1024:
            return f"{n:.1f} {unit}"
    return f"{n / 1024:.1f} TiB"


@dataclasses.dataclass(frozen=True)
class PlanBank:
    """One bank: the expert tensors of a layer that share one routing.

    Attributes:
        layer: Index of the layer.
        bank: 0, or 1 for the second bank of a layer that has two.
        pooled: Whether it has a pool; if not, it stays on the stock path.
        n_expert: Experts in the bank.
        n_expert_used: Experts that a token uses, as the model's metadata says.
        n_slots: Slots of its pool, 0 if it has none.
        n_tensors: Expert tensors that share the slot map.
        expert_bytes: Bytes of one expert in all of them.
        pool_bytes: Bytes allocated on the device, tables and padding included.
        device: Name of the device that runs the layer.
        reason: Why it was left out, "" if it was not.
        pinned_bytes: Bytes of its experts that lie in host memory which the device has pinned.
        streamed: Whether its experts are read from the file when they are needed.
        host_slots: Of a streamed bank with its pool on a device, experts that host memory holds besides; else 0.
        host_bytes: Bytes of those.
    """

    layer: int
    bank: int
    pooled: bool
    n_expert: int
    n_expert_used: int
    n_slots: int
    n_tensors: int
    expert_bytes: int
    pool_bytes: int
    device: str
    reason: str
    pinned_bytes: int = 0
    streamed: bool = False
    host_slots: int = 0
    host_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class PlanDevice:
    """One device that runs layers with experts.

    Attributes:
        device: Its name.
        requested: The size as it was given.
        n_banks: Banks that have their pool there.
        host_memory: Whether it computes from host memory, so that a pool there saves no transfer.
        pool_bytes: Bytes of all pools on it.
        free_bytes: Free bytes before the pools were allocated.
        headroom_bytes: Bytes that "auto" kept free, else 0.
    """

    device: str
    requested: str
    n_banks: int
    host_memory: bool
    pool_bytes: int
    free_bytes: int
    headroom_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of one expert cache; `str(plan)` is a table.

    Attributes:
        policy: Name of the eviction policy in use.
        admission: Name of the admission policy in use.
        banks: Every bank of the model, in the order of the layers; indices into it are what `slot_map()` takes.
        devices: Every device that runs layers with experts.
        host_policy: Name of the eviction policy of host memory behind devices' slots, "" if there is none.
        host_admission: Name of the admission policy of host memory, as `host_policy`.
    """

    policy: str
    admission: str
    banks: tuple[PlanBank, ...]
    devices: tuple[PlanDevice, ...]
    host_policy: str = ""
    host_admission: str = ""

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools on all devices."""
        return sum(device.pool_bytes for device in self.devices)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of experts in pinned host memory, from which uploads do not block."""
        return sum(bank.pinned_bytes for bank in self.banks)

    @property
    def slots(self) -> tuple[int, ...]:
        """The different numbers of slots per layer among the pooled banks, ascending; one value if all are alike."""
        return tuple(sorted({bank.n_slots for bank in self.banks if bank.pooled}))

    def as_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists and numbers, for JSON."""
        return {**dataclasses.asdict(self), "pool_bytes": self.pool_bytes}

    def to_json(self, indent: int | None = 2) -> str:
        """Return `as_dict()` as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    def __str__(self) -> str:
        """Return a readable table: the devices, then the banks, equal neighbours in one row."""
        if not self.banks:
            return "expert cache: off"
        pooled = sum(bank.pooled for bank in self.banks)
        total = format_bytes(self.pool_bytes)
        names = f"policy {self.policy}, admission {self.admission}"
        names += f" (host memory: {self.host_policy}, {self.host_admission})" if self.host_policy else ""
        lines = [f"expert cache: {pooled} of {len(self.banks)} expert banks pooled, {names}, {total}"]
        for device in self.devices:
            notes = f", {format_bytes(device.headroom_bytes)} kept free" if device.headroom_bytes else ""
            notes += ", computes from host memory" if device.host_memory else ""
            lines.append(
                f"  {device.device}: {device.n_banks} banks, {format_bytes(device.pool_bytes)} of "
                f"{format_bytes(device.free_bytes)} free, asked for {device.requested}{notes}"
            )
        rows = [("layers", "device", "slots", "experts", "per token", "per expert", "pool")]
        for first, last in _runs(self.banks):
            bank = self.banks[first]
            rows.append(
                (
                    _layers(bank, self.banks[last]),
                    bank.device or "-",
                    str(bank.n_slots) if bank.pooled else "-",
                    str(bank.n_expert),
                    str(bank.n_expert_used),
                    format_bytes(bank.expert_bytes),
                    format_bytes(sum(b.pool_bytes for b in self.banks[first : last + 1]))
                    if bank.pooled
                    else f"left out: {bank.reason}",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        lines += [
            "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
        ]
        return "\n".join(lines)


def _runs(banks: Sequence[PlanBank]) -> list[tuple[int, int]]:
    """Return (first, last) indices of neighbours that differ in their layer only."""
    runs: list[tuple[int, int]] = []
    for i, bank in enumerate(banks):
        previous = banks[i - 1]
        if runs and bank == dataclasses.replace(previous, layer=bank.layer) and bank.layer == previous.layer + 1:
            runs[-1] = (runs[-1][0], i)
        else:
            runs.append((i, i))
    return runs


def _layers(first: PlanBank, last: PlanBank) -> str:
    suffix = f" (bank {first.bank})" if first.bank else ""
    return (str(first.layer) if first is last else f"{first.layer}-{last.layer}") + suffix
