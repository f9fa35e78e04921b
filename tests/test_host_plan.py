"""What a plan says of host memory: that it is what the process takes, that nothing counts twice, and what "auto" leaves."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gguf import GGUFReader

import hotmoe
from hotmoe._native import ffi, lib
from hotmoe.plan import Plan, PlanBank, PlanDevice, PlanHost
from tests.harness import run_script
from tests.models import cached_model

MIB = 1 << 20
N_LAYER = 2  # of the tiny model

# ---- the process ----

PEAK = """
    import ctypes, random
    from pathlib import Path
    import hotmoe
    from hotmoe import ExpertCache, Llama  # all is imported before anything is measured
    from tests.models import cached_model

    device, options = {device!r}, {options!r}
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages would round up what was touched
    path = cached_model(arch="olmoe", quant="F16", n_layer=4, n_expert=64, n_vocab=16384)
    if device:
        hotmoe.sim.load(1, mib=256)

    def status(name):
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024

    before = status("VmRSS")
    cache = ExpertCache(store="stream", host_slots=48, slots=16 if device else "auto")
    options |= dict(n_ctx=4096, n_batch=256, n_ubatch=256, n_threads=2, n_threads_batch=2, verbose=False, devices=device)
    with Llama(path, expert_cache=cache, **options) as llm:
        tokens = random.Random(0).choices(range(300, llm.n_vocab()), k=llm.n_ctx())
        llm.eval(tokens[:-32])
        for token in tokens[-32:]:
            llm.eval([token])
        host = cache.plan.host
        grown = status("VmHWM") - before
        if device:  # its memory is the process's
            grown -= hotmoe.sim.counters().peak_bytes
        print(f"{{grown / 2**20:.1f}} MiB, {{grown / host.total_bytes:.3f}} of", host)
        assert cache.stats().store.bytes > host.slot_bytes  # every slot was filled
        for part in (host.slot_bytes, host.weight_bytes, host.context_bytes, host.compute_bytes):
            assert part > 0.05 * host.total_bytes, host  # one that is forgotten shows
        assert 0.6 * host.total_bytes < grown < 1.1 * host.total_bytes, (grown, host)
"""


@pytest.mark.parametrize(
    ("device", "options"), [("", {}), ("SIM0", {"offload_kqv": False})], ids=["CPU", "SIM, KV cache in host memory"]
)
def test_the_process_takes_what_was_planned(device: str, options: dict[str, Any]) -> None:
    print(run_script(PEAK.format(device=device, options=options)))


# ---- the classes ----


def load(model: Path, *, n_ctx: int = 512, device: str = "", **options: Any) -> hotmoe.Llama:
    cache = hotmoe.ExpertCache(**{"store": "stream", "host_slots": 8, "slots": 8 if device else "auto", **options})
    use_mmap = cache.store == "mapped"
    return hotmoe.Llama(
        model, expert_cache=cache, devices=device, n_ctx=n_ctx, n_ubatch=64, n_batch=64, use_mmap=use_mmap, verbose=False
    )


def plan_of(model: Path, **options: Any) -> Plan:
    with load(model, **options) as llm:
        assert llm.expert_cache is not None
        return llm.expert_cache.plan


def sizes(model: Path) -> tuple[int, int]:
    """Return the bytes of a model's experts and of its other tensors."""
    tensors = GGUFReader(model).tensors
    experts = sum(int(t.n_bytes) for t in tensors if "_exps." in t.name)
    return experts, sum(int(t.n_bytes) for t in tensors) - experts


def test_a_streamed_model_on_the_cpu(tiny_model: Path) -> None:
    plan = plan_of(tiny_model)
    host = plan.host
    _, dense = sizes(tiny_model)
    assert host.slot_bytes == plan.pool_bytes == sum(bank.pool_bytes for bank in plan.banks), "once, not as slots and as pool"
    assert dense <= host.weight_bytes < dense + 64 * 1024, "experts are not in memory"
    assert host.compute_bytes > 0
    assert host.mapped_bytes == host.wave_bytes == host.headroom_bytes == 0
    assert plan.host_bytes == host.total_bytes == sum(host.parts.values())
    assert sum(host.parts.values()) == sum(
        getattr(host, f"{name}_bytes") for name in ("slot", "weight", "context", "compute", "wave", "reader")
    )
    row = json.loads(plan.to_json())
    assert row["host_bytes"] == plan.host_bytes
    assert row["host"]["slot_bytes"] == host.slot_bytes


def test_a_streamed_model_on_a_device(sim: ModuleType, tiny_model: Path) -> None:
    plan = plan_of(tiny_model, device="SIM0")
    host = plan.host
    _, dense = sizes(tiny_model)
    assert host.slot_bytes == sum(bank.host_bytes for bank in plan.banks) > 0
    assert 0 < host.weight_bytes < dense / 2, "what embeds tokens; the rest is on the device"
    on_cpu = plan_of(tiny_model).host
    assert host.context_bytes < on_cpu.context_bytes / 10
    assert host.compute_bytes < on_cpu.compute_bytes


def test_the_context(tiny_model: Path) -> None:
    with load(tiny_model) as llm:
        assert llm.expert_cache is not None
        fields = GGUFReader(tiny_model).fields
        n_embd = fields["olmoe.embedding_length"].contents()
        kv = N_LAYER * n_embd * 2 * 2  # keys and values of a token, F16; as many heads as those of queries
        outputs = 4 * llm.n_vocab()
        assert llm.expert_cache.plan.host.context_bytes == llm.n_ctx() * kv + outputs
    assert plan_of(tiny_model, n_ctx=1024).host.context_bytes == 1024 * kv + outputs


def test_readers(tiny_model: Path) -> None:
    two, eight = (plan_of(tiny_model, io_threads=n).host.reader_bytes for n in (2, 8))
    bank = plan_of(tiny_model).banks[0]
    assert 4 * two == eight >= 8 * bank.expert_bytes // bank.n_tensors, "each may hold a matrix of an expert"
    assert eight < 8 * (bank.expert_bytes + 2 * 4096)


def test_mapped_weights_are_told_apart(sim: ModuleType, tiny_model: Path) -> None:
    experts, _ = sizes(tiny_model)
    mapped = plan_of(tiny_model, device="SIM0", store="mapped", host_slots=None).host
    assert mapped.mapped_bytes >= experts
    assert mapped.weight_bytes == mapped.slot_bytes == mapped.reader_bytes == 0
    assert "mapped" in str(mapped) and mapped.total_bytes < experts


def test_pinned_weights_count(sim: ModuleType, tiny_model: Path) -> None:
    experts, _ = sizes(tiny_model)
    plan = plan_of(tiny_model, device="SIM0", store="resident", host_slots=None)
    assert plan.host.weight_bytes >= plan.pinned_bytes == experts
    assert plan.host.mapped_bytes == 0


def test_repacked_weights_count() -> None:
    """They lie in a buffer that is no host buffer."""
    model = cached_model(arch="olmoe", quant="Q4_K", n_expert=40, dense_quant="Q4_0")
    _, dense = sizes(model)
    assert plan_of(model).host.weight_bytes >= dense


def test_a_forced_pool_on_the_cpu_counts(tiny_model: Path) -> None:
    plan = plan_of(tiny_model, store="mapped", host_slots=None, slots=8)
    assert plan.host.slot_bytes == plan.pool_bytes > 0


@pytest.mark.parametrize("device", ["", "SIM0"], ids=["CPU", "SIM"])
def test_host_slots_keep_to_their_bytes(device: str, sim: ModuleType, tiny_model: Path) -> None:
    """What is allocated besides the experts counts, also where it decides about the last slot."""
    one = sum(bank.expert_bytes for bank in plan_of(tiny_model, device=device).banks)
    for extra in range(0, N_LAYER * 48 * 1024, N_LAYER * 2048):
        row = plan_of(tiny_model, device=device, host_slots=f"{(9 * one + extra) // 1024}KiB").devices[-1]
        assert row.device == "host slots"
        assert 8 * one < row.pool_bytes <= 9 * one + extra


def test_headroom_is_shown(tiny_model: Path) -> None:
    plan = plan_of(tiny_model, host_slots="auto")
    assert plan.host.headroom_bytes == plan.devices[-1].headroom_bytes >= 64 * MIB
    assert "kept free" in str(plan.host)


def test_text() -> None:
    host = PlanHost(slot_bytes=40 * MIB, weight_bytes=2 * MIB, mapped_bytes=3 * MIB, headroom_bytes=64 * MIB)
    text = "42.0 MiB (slots 40.0 MiB, weights 2.0 MiB); 3.0 MiB of weights mapped besides; 64.0 MiB kept free"
    assert str(host) == text
    bank = PlanBank(0, 0, True, 64, 8, 16, 3, 1 << 20, 16 << 20, "SIM0", "")
    plan = Plan("lru", "always", (bank,), (PlanDevice("SIM0", "16", 1, False, 16 << 20, 1 << 30, 0),), host=host)
    assert f"  host memory: {text}" in str(plan).splitlines()
    assert str(PlanHost()) == "0 B"


def test_the_c_api_says_the_same(tiny_model: Path) -> None:
    out = ffi.new("struct hotmoe_plan_host *")
    with load(tiny_model, host_slots="auto") as llm:
        assert llm.expert_cache is not None
        assert lib.hotmoe_plan_get_host(llm.expert_cache._native, out) == 0
        assert out.total_bytes == llm.expert_cache.plan.host_bytes
    assert lib.hotmoe_plan_get_host(ffi.NULL, out) == lib.HOTMOE_ERR_ARGUMENT
