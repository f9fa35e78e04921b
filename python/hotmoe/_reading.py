"""Reading what the C side says of a live cache: its plan and its counters, as the dataclasses of `plan` and `stats`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ._binding import check, ffi, lib, text
from .plan import Plan, PlanBank, PlanDevice, PlanHost
from .stats import AdviceCounters, LayerCounters, PhaseStats, StepCounters, StoreStats, TierStats

BOTH_PHASES = -1
_ALL_BANKS = -1

_COUNTER_NAMES = [
    field.name
    for field in dataclasses.fields(PhaseStats)
    if field.name not in ("bypassed", "steps", "layers")  # the ones that are not plain numbers
]

_TIER_COUNTER_NAMES = [field.name for field in dataclasses.fields(TierStats) if field.name not in ("willneed", "dontneed")]


def read_plan(native: Any, labels: Mapping[str, str | None]) -> Plan:
    """Return the plan of a `struct hotmoe_cache *`; `labels`: what to call policies and admissions, None: as the C side does."""
    bank = ffi.new("struct hotmoe_plan_bank *")
    banks = []
    for i in range(lib.hotmoe_plan_n_banks(native)):
        check(lib.hotmoe_plan_get_bank(native, i, bank))
        banks.append(
            PlanBank(
                layer=bank.layer,
                bank=bank.bank,
                pooled=bank.state == lib.HOTMOE_BANK_POOLED,
                n_expert=bank.n_expert,
                n_expert_used=bank.n_expert_used,
                n_slots=bank.n_slots,
                n_tensors=bank.n_tensors,
                expert_bytes=bank.expert_bytes,
                pool_bytes=bank.pool_bytes,
                pinned_bytes=bank.pinned_bytes,
                streamed=bool(bank.streamed),
                host_slots=bank.host_slots,
                host_bytes=bank.host_bytes,
                device=text(bank.device),
                reason=text(bank.reason),
            )
        )
    device = ffi.new("struct hotmoe_plan_device *")
    devices = []
    for i in range(lib.hotmoe_plan_n_devices(native)):
        check(lib.hotmoe_plan_get_device(native, i, device))
        devices.append(
            PlanDevice(
                device=text(device.device),
                requested=text(device.requested),
                n_banks=device.n_banks,
                host_memory=bool(device.host_memory),
                pool_bytes=device.pool_bytes,
                free_bytes=device.free_bytes,
                headroom_bytes=device.headroom_bytes,
            )
        )
    host = ffi.new("struct hotmoe_plan_host *")
    check(lib.hotmoe_plan_get_host(native, host))
    return Plan(
        policy=labels["policy"] or text(lib.hotmoe_cache_policy(native)),
        admission=labels["admission"] or text(lib.hotmoe_cache_admission(native)),
        host_policy=labels["host_policy"] or text(lib.hotmoe_cache_host_policy(native)),
        host_admission=labels["host_admission"] or text(lib.hotmoe_cache_host_admission(native)),
        banks=tuple(banks),
        devices=tuple(devices),
        host=PlanHost(**{field.name: getattr(host, field.name) for field in dataclasses.fields(PlanHost)}),
    )


def read_phase(native: Any, plan: Plan, phase: int) -> PhaseStats:
    """Return the counters of a phase, or of `BOTH_PHASES`; all zero if native is None."""
    steps = ffi.new("struct hotmoe_step_counters *")
    if native is not None:
        check(lib.hotmoe_cache_step_stats(native, phase, steps))
    return PhaseStats(
        **_counters(native, _ALL_BANKS, phase),
        steps=StepCounters(
            steps=steps.steps, tokens=steps.tokens, graphs_built=steps.graphs_built, bypassed=_bypassed(steps.bypassed)
        ),
        layers=tuple(
            LayerCounters(**_counters(native, i, phase), layer=bank.layer, bank=bank.bank) for i, bank in enumerate(plan.banks)
        ),
    )


def read_store(native: Any) -> StoreStats:
    """Return the counters of streamed experts."""
    c = ffi.new("struct hotmoe_store_counters *")
    check(lib.hotmoe_cache_store_stats(native, c))
    counts = {field.name: getattr(c, field.name) for field in dataclasses.fields(StoreStats) if field.name != "warning"}
    return StoreStats(**counts, warning=text(lib.hotmoe_cache_store_warning(native)))


def read_tier(native: Any) -> TierStats:
    """Return the counters of a tier manager."""
    c = ffi.new("struct hotmoe_tier_counters *")
    check(lib.hotmoe_tier_stats(native, c))
    advice: dict[str, Any] = {
        name: AdviceCounters(calls=c.calls[i], bytes=c.bytes[i], errors=c.errors[i])
        for name, i in (("willneed", lib.HOTMOE_TIER_WILLNEED), ("dontneed", lib.HOTMOE_TIER_DONTNEED))
    }
    return TierStats(**{name: getattr(c, name) for name in _TIER_COUNTER_NAMES}, **advice)


def _counters(native: Any, bank: int, phase: int) -> dict[str, Any]:
    counters = ffi.new("struct hotmoe_counters *")
    if native is not None:
        check(lib.hotmoe_cache_stats(native, bank, phase, counters))
    return {name: getattr(counters, name) for name in _COUNTER_NAMES} | {"bypassed": _bypassed(counters.bypassed)}


def _bypassed(counts: Any) -> dict[str, int]:
    return {text(lib.hotmoe_bypass_name(reason)): int(counts[reason]) for reason in range(lib.HOTMOE_BYPASS_COUNT)}
