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
        free_bytes: Free bytes before the pools were allocated; of host memory, without what the context has yet to touch.
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
class PlanHost:
    """What the model, its context and the cache take of host memory, in bytes, when the context is full.

    All but `mapped_bytes` is memory of the process, as its resident set has it. Contexts over one model share the weights.
    Not in it: the interpreter, libraries, vocabulary and metadata (some MiB, tens with 150,000 tokens), memory that the
    allocator keeps of buffers that grew (tens of MiB at most), and logits of more than one token per sequence (with
    `logits_all=True` llama-cpp-python keeps those of all `n_ctx` tokens).

    Attributes:
        slot_bytes: Slots of experts: pools of devices that compute from host memory, and host slots behind those of others.
        weight_bytes: Weights that were read into host memory: all but streamed and mapped ones. Pinned ones included.
        context_bytes: KV cache or recurrent state, and the logits of one token per sequence.
        compute_bytes: Buffers of the graphs, for the largest ubatch, and what the CPU's kernels work in.
        wave_bytes: What collects results in waves, where a device that computes from host memory runs waves.
        reader_bytes: Buffers of the threads that read streamed experts, at most.
        mapped_bytes: Besides, weights that are mapped from the file: page cache, which the system takes back when it needs to.
        headroom_bytes: Besides, what `host_slots="auto"` kept free, else 0: a twentieth of the memory of the machine, or of
            its cgroup, 64 MiB at least.
    """

    slot_bytes: int = 0
    weight_bytes: int = 0
    context_bytes: int = 0
    compute_bytes: int = 0
    wave_bytes: int = 0
    reader_bytes: int = 0
    mapped_bytes: int = 0
    headroom_bytes: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The classes that make up the total, in bytes, by names for people."""
        return {
            "slots": self.slot_bytes,
            "weights": self.weight_bytes,
            "context": self.context_bytes,
            "compute buffers": self.compute_bytes,
            "waves": self.wave_bytes,
            "readers": self.reader_bytes,
        }

    @property
    def total_bytes(self) -> int:
        """Bytes of host memory that the process needs for the model, besides what is mapped."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        """Return a line: the total, then what is in it."""
        parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in self.parts.items() if n)
        notes = f"; {format_bytes(self.mapped_bytes)} of weights mapped besides" if self.mapped_bytes else ""
        notes += f"; {format_bytes(self.headroom_bytes)} kept free" if self.headroom_bytes else ""
        return format_bytes(self.total_bytes) + (f" ({parts})" if parts else "") + notes


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
        host: What host memory is needed for.
    """

    policy: str
    admission: str
    banks: tuple[PlanBank, ...]
    devices: tuple[PlanDevice, ...]
    host_policy: str = ""
    host_admission: str = ""
    host: PlanHost = dataclasses.field(default_factory=PlanHost)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools on all devices."""
        return sum(device.pool_bytes for device in self.devices)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the process needs for the model, its context and the cache; see `PlanHost`."""
        return self.host.total_bytes

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
        return {**dataclasses.asdict(self), "pool_bytes": self.pool_bytes, "host_bytes": self.host_bytes}

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
        lines.append(f"  host memory: {self.host}")
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
