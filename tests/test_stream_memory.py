"""Memory of streaming: limits are respected, and what was taken goes back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import run_script

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")  # version 1


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory cgroup without a limit, for one process to enter."""
    if not (MEMORY_GROUPS / "memory.limit_in_bytes").exists():
        pytest.skip("there is no memory controller of version 1; tests/native/test_host_memory.cpp has version 2")
    group = MEMORY_GROUPS / f"hotmoe-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    group.rmdir()


AUTO_IN_A_GROUP = """
    import os
    from pathlib import Path
    group, device = Path({group!r}), {device!r}
    (group / "cgroup.procs").write_text(str(os.getpid()))
    number = lambda name: int((group / name).read_text())
    from hotmoe.errors import PlanError
    from tests.models import cached_model
    from tests.stream_faults import expected, load, logits_of, PROMPT
    from tests.harness import equal_bits

    MIB = 1 << 20
    path = cached_model(arch="olmoe", quant="F16", n_layer=4, n_expert=64)
    right = expected(path, device)
    with load(path, device, host_slots=4) as llm:  # libraries and the like are there
        logits_of(llm, PROMPT)
        experts = sum(bank.n_expert * bank.expert_bytes for bank in llm.expert_cache.plan.banks)
    import ctypes
    ctypes.CDLL(None).malloc_trim(0)
    assert experts > 90 * MIB, experts

    rss = int((Path("/proc/self/statm").read_text().split()[1])) * 4096
    (group / "memory.limit_in_bytes").write_text(str(rss + 60 * MIB))  # room for some of the experts
    try:
        load(path, device, host_slots="4G").close()
        raise AssertionError("more than there is room for was granted")
    except PlanError as error:
        assert "memory cgroup" in str(error) and "4G" in str(error), error
    limit = rss + 64 * MIB + 60 * MIB  # a headroom that is told, some room for the context, and not all experts
    (group / "memory.limit_in_bytes").write_text(str(limit))
    limit = number("memory.limit_in_bytes")
    (group / "memory.max_usage_in_bytes").write_text("0")
    with load(path, device, host_slots="auto") as llm:
        plan = llm.expert_cache.plan
        row = next(row for row in plan.devices if row.device == "host slots")
        slots = {{bank.host_slots or bank.n_slots for bank in plan.banks}}
        print(device, slots, row, limit, rss)
        assert row.requested == "auto"
        assert row.headroom_bytes >= 64 * MIB
        assert row.free_bytes <= limit
        assert row.pool_bytes <= row.free_bytes - row.headroom_bytes
        assert 4 <= min(slots) <= max(slots) < 64, slots
        assert equal_bits(logits_of(llm, PROMPT), right)
        assert number("memory.max_usage_in_bytes") <= limit
        held = int((group / "memory.stat").read_text().split("\\nrss ")[1].split()[0])  # page cache apart
        print("held", held // MIB, "of", limit // MIB)
        assert held < limit - 32 * MIB, (held, limit)
"""


@pytest.mark.parametrize("device", ["", "SIM0"], ids=["CPU", "SIM"])
def test_auto_in_a_memory_group(device: str, memory_group: Path) -> None:
    """CASE 29: what is free is what the group leaves."""
    print(run_script(AUTO_IN_A_GROUP.format(group=str(memory_group), device=device)))


AUTO_LEAVES_ROOM = """
    import os
    from pathlib import Path
    group, device, options = Path({group!r}), {device!r}, {options!r}
    (group / "cgroup.procs").write_text(str(os.getpid()))
    import hotmoe
    from hotmoe import ExpertCache, Llama
    from tests.models import cached_model

    MIB = 1 << 20
    path = cached_model(arch="olmoe", quant="F16", n_layer=4, n_expert=64, n_expert_used=8)
    options |= dict(n_ctx=2048, n_batch=2048, n_ubatch=2048, n_threads=1, n_threads_batch=1, flash_attn=True)

    def load(host_slots):
        cache = ExpertCache(store="stream", host_slots=host_slots, slots=12 if device else "auto")
        return Llama(path, expert_cache=cache, devices=device, verbose=False, **options)

    def used():  # page cache apart
        return int((group / "memory.stat").read_text().split("\\nrss ")[1].split()[0])

    def on_device():
        return hotmoe.sim.counters().allocated_bytes if device else 0

    if device:
        hotmoe.sim.load(1, mib=512)
    with load(8) as llm:  # what it takes without slots
        host = llm.expert_cache.plan.host
        few, of_device = host.total_bytes - host.slot_bytes, on_device()
    limit = used() + few + of_device + 64 * MIB + 40 * MIB  # the headroom, and room for some of the experts
    (group / "memory.limit_in_bytes").write_text(str(limit))
    with load("auto") as llm:
        plan = llm.expert_cache.plan
        host, row = plan.host, next(row for row in plan.devices if row.device == "host slots")
        assert host.headroom_bytes == row.headroom_bytes == 64 * MIB
        assert 8 < max(bank.host_slots or bank.n_slots for bank in plan.banks) < 64
        llm.eval(list(range(300, 500)) * 10)
        left = limit - used() + sum(row.pool_bytes for row in plan.devices if row.device == "SIM0")  # which came later
        print(host, "left:", left / MIB)
        assert left > host.headroom_bytes - 8 * MIB, (left, host)  # the libraries take something, too
"""


@pytest.mark.parametrize(
    ("device", "options"), [("", {}), ("SIM0", {}), ("SIM0", {"n_gpu_layers": 2})], ids=["CPU", "SIM", "both"]
)
def test_auto_leaves_room_for_all_else(device: str, options: dict[str, int], memory_group: Path) -> None:
    print(run_script(AUTO_LEAVES_ROOM.format(group=str(memory_group), device=device, options=options)))


TWENTY_LOADS = """
    import ctypes, gc, os
    from pathlib import Path
    from tests.models import cached_model
    from tests.stream_faults import load, logits_of, PROMPT

    path = cached_model(arch="olmoe", quant="F16", n_layer=4, n_expert=64)

    def state():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free, but kept for the next allocation, is no leak
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        n_maps = len(Path("/proc/self/maps").read_text().splitlines())
        return rss, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), n_maps

    def once(device, **options):
        with load(path, device, host_slots=40, **options) as llm:
            logits_of(llm, PROMPT)
            assert llm.expert_cache.stats().store.bytes > 0
            assert len(os.listdir("/proc/self/task")) > 8

    for device, options in (("", {}), ("SIM0", {"slots": 20})):
        for _ in range(4):
            once(device, **options)
        before = state()
        for _ in range(20):
            once(device, **options)
        after = state()
        print(before, after)
        assert after[0] - before[0] < 8 << 20, (before, after)
        assert after[1:3] == before[1:3], (before, after)
        if not device:  # a simulated device keeps its addresses to itself
            assert after[3] <= before[3] + 4, (before, after)
"""


def test_20_loads_and_closes() -> None:
    """CASE 32: memory, descriptors, threads and address ranges go back."""
    run_script(TWENTY_LOADS)


LONG_RUN = """
    import os, random
    from pathlib import Path
    import numpy as np
    import hotmoe
    from tests.harness import equal_bits

    path = Path(hotmoe.__file__).parent / "model" / "pydoc-moe-8x32.gguf"
    options = dict(n_ctx=512, n_ubatch=128, n_threads=1, n_threads_batch=1, verbose=False)
    options |= dict(use_mmap=False, devices="", cpu_moe=True)
    text = Path(random.__file__).read_bytes() + Path(os.__file__).read_bytes()
    rss = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    state = lambda: (rss(), len(os.listdir("/proc/self/fd")))
    cache = hotmoe.ExpertCache(store="stream", host_slots=10)
    with hotmoe.Llama(path, **options) as resident, hotmoe.Llama(path, expert_cache=cache, **options) as llm:
        tokens = llm.tokenize(text, add_bos=False)
        n_prompt, n_decoded, n_done, states = 100, 150, 0, []
        rounds = range(40)
        for k in rounds:
            part = tokens[k * 250 : (k + 1) * 250]
            assert len(part) == n_prompt + n_decoded
            for one in (resident, llm):
                one.reset()
                one.eval(part[:n_prompt])
                for token in part[n_prompt:]:
                    one.eval([token])
            n_done += len(part)
            logits = [np.ctypeslib.as_array(one._ctx.get_logits(), (one.n_vocab(),)).copy() for one in (resident, llm)]
            assert equal_bits(*logits), f"after {n_done} tokens"
            states.append(state())
        assert n_done == 10000
        stats = cache.stats()
        assert stats.prefill.waves > 40 and stats.decode.evictions > 1000
        print(states[4], states[-1], stats.decode.hit_rate)
        assert states[-1][0] - states[4][0] < 4 << 20, states
        assert states[-1][1] == states[4][1]
"""


def test_10000_tokens_with_changing_prompts() -> None:
    run_script(LONG_RUN)
