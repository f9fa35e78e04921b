"""Tables about an expert cache, for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

from rich.markup import escape
from rich.table import Table

from ..plan import Plan, PlanBank, format_bytes
from ..stats import CacheStats


def device_table(plan: Plan) -> Table:
    """Return a table with a row for each device that runs layers with experts."""
    table = Table("device", "asked for", "banks", "pools", "free before", "kept free", title="Devices", title_justify="left")
    for device in plan.devices:
        table.add_row(
            escape(device.device) + (" (host memory)" if device.host_memory else ""),
            device.requested,
            str(device.n_banks),
            format_bytes(device.pool_bytes),
            format_bytes(device.free_bytes),
            format_bytes(device.headroom_bytes) if device.headroom_bytes else "-",
        )
    return table


def host_table(plan: Plan) -> Table:
    """Return a table of what the model, its context and the cache take of host memory."""
    host = plan.host
    table = Table("of", "size", title="Host memory", title_justify="left")
    for name, n in host.parts.items():
        if n:
            table.add_row(name, format_bytes(n))
    table.add_row("total", format_bytes(host.total_bytes), style="bold")
    if host.mapped_bytes:
        table.add_row("mapped from the file, besides", format_bytes(host.mapped_bytes))
    if host.headroom_bytes:
        table.add_row("kept free, besides", format_bytes(host.headroom_bytes))
    return table


def bank_table(plan: Plan) -> Table:
    """Return a table of the banks; layers that are alike share a row."""
    columns = ("layers", "device", "slots", "experts", "per token", "one expert", "pool")
    table = Table(
        *columns, title=f"Expert banks, policy {escape(plan.policy)}, admission {escape(plan.admission)}", title_justify="left"
    )
    for alike in _alike(plan.banks):
        first, last = alike[0], alike[-1]
        layers = str(first.layer) if first is last else f"{first.layer}-{last.layer}"
        table.add_row(
            layers + (f" (bank {first.bank})" if first.bank else ""),
            escape(first.device) or "-",
            str(first.n_slots) if first.pooled else "-",
            str(first.n_expert),
            str(first.n_expert_used),
            format_bytes(first.expert_bytes),
            format_bytes(sum(bank.pool_bytes for bank in alike)) if first.pooled else f"left out: {escape(first.reason)}",
        )
    return table


def stats_table(stats: CacheStats) -> Table:
    """Return a table of counters, prefill and decode side by side."""
    phases = (stats.prefill, stats.decode, stats.total)
    table = Table("expert cache", "prefill", "decode", "total", title_justify="left")
    rows = {
        "tokens": [str(phase.steps.tokens) for phase in phases],
        "steps": [str(phase.steps.steps) for phase in phases],
        "steps on the stock path": [str(sum(phase.steps.bypassed.values())) for phase in phases],
        "hit rate": ["-" if phase.hit_rate is None else f"{phase.hit_rate:.1%}" for phase in phases],
        "misses": [str(phase.misses) for phase in phases],
        "evictions": [str(phase.evictions) for phase in phases],
        "uploaded": [format_bytes(phase.uploaded_bytes) for phase in phases],
        "uploaded per token": [
            "-" if phase.uploaded_bytes_per_token is None else format_bytes(phase.uploaded_bytes_per_token) for phase in phases
        ],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _alike(banks: tuple[PlanBank, ...]) -> Iterator[list[PlanBank]]:
    """Yield neighbours that differ in their layer only."""
    group = list(banks[:1])
    for previous, bank in pairwise(banks):
        if bank.layer != previous.layer + 1 or dataclasses.replace(bank, layer=previous.layer) != previous:
            yield group
            group = []
        group.append(bank)
    if group:
        yield group
