"""`ExpertCache(store="stream")` through `hotmoe.Llama`: what it accepts and says, what it reads, and long runs."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import hotmoe
from hotmoe.errors import ArgumentError, DecodeError, PlanError, StateError, StoreError
from tests.harness import equal_bits, run_script
from tests.models import break_model, cached_model, link_model
from tests.stream_faults import PROMPT, load, logits_of

DEVICES = pytest.mark.parametrize("device", ["", "SIM0"], ids=["CPU", "SIM"])
N_LAYER, N_EXPERT = 2, 40


def streaming(**options: Any) -> hotmoe.ExpertCache:
    return hotmoe.ExpertCache(**{"store": "stream", "host_slots": 6, **options})


@pytest.fixture(scope="module", params=["", "SIM0"], ids=["CPU", "SIM"])
def live(request: pytest.FixtureRequest, sim: ModuleType, tiny_model: Path) -> Iterator[hotmoe.Llama]:
    with load(tiny_model, request.param, host_slots="6s", slots=9 if request.param else "auto") as llm:
        logits_of(llm, PROMPT)
        yield llm


# ---- what it says ----


def test_plan_shows_the_tiers(live: hotmoe.Llama) -> None:
    assert live.expert_cache is not None
    plan = live.expert_cache.plan
    on_device = plan.banks[0].device == "SIM0"
    assert len(plan.banks) == N_LAYER
    for bank in plan.banks:
        assert bank.streamed and bank.pooled
        assert bank.n_slots == (9 if on_device else 6)
        assert bank.host_slots == (6 if on_device else 0)
        assert bank.host_bytes >= bank.host_slots * bank.expert_bytes
    rows = {row.device: row for row in plan.devices}
    assert set(rows) == ({"SIM0", "host slots"} if on_device else {"host slots"})
    assert rows["host slots"].requested == "6s"
    assert rows["host slots"].pool_bytes >= 6 * N_LAYER * plan.banks[0].expert_bytes
    assert "host slots" in str(plan)


def test_counters(live: hotmoe.Llama) -> None:
    assert live.expert_cache is not None
    stats = live.expert_cache.stats()
    store, total, expert_bytes = stats.store, stats.total, live.expert_cache.plan.banks[0].expert_bytes
    assert store is not None
    assert not any(total.bypassed.values())
    assert stats.prefill.waves > 0 == stats.decode.waves
    assert total.evictions > 0
    if live.expert_cache.plan.banks[0].host_slots:
        assert store.host_hits + store.host_misses == total.misses
        assert store.bytes == store.host_misses * expert_bytes
        assert total.uploaded_bytes == total.misses * expert_bytes
    else:
        assert (store.host_hits, store.host_misses, total.uploads) == (0, 0, 0)
        assert store.bytes == total.misses * expert_bytes
    assert store.disk_bytes == store.direct_bytes + store.buffered_bytes >= store.bytes
    assert stats.as_dict()["store"]["bytes"] == store.bytes


def test_clear(live: hotmoe.Llama) -> None:
    """What was resident is read again, and nothing else changes."""
    assert live.expert_cache is not None
    before = logits_of(live, PROMPT)
    for _ in range(2):
        live.expert_cache.clear()
        assert set(live.expert_cache.slot_map(0)) == {-1}
        assert equal_bits(logits_of(live, PROMPT), before)


@DEVICES
@pytest.mark.parametrize("size", [3, "3s", "100KiB"])
def test_too_few_host_slots(size: int | str, device: str, sim: ModuleType, tiny_model: Path) -> None:
    """CASE 9."""
    with pytest.raises(PlanError, match="the minimum is 4 slots") as caught:
        load(tiny_model, device, host_slots=size, slots=8)
    assert str(size) in str(caught.value)


def test_host_slots_in_bytes_are_of_all_layers(tiny_model: Path) -> None:
    with load(tiny_model, host_slots="2MiB") as llm:
        assert llm.expert_cache is not None
        banks = llm.expert_cache.plan.banks
        used = sum(bank.pool_bytes for bank in banks)
        assert used <= 2 << 20 < used + 1.1 * sum(bank.expert_bytes for bank in banks)


@pytest.mark.parametrize(
    "options", [{"direct": "maybe"}, {"io_threads": 0.5}, {"io_threads": 257}, {"io_threads": -1}, {"host_slots": "x"}]
)
def test_bad_options(options: dict[str, Any]) -> None:
    (name, value) = next(iter(options.items()))
    with pytest.raises(ArgumentError) as caught:
        streaming(**options)
    assert f"{name}={value!r}" in str(caught.value)


@pytest.mark.parametrize("options", [{"direct": "off"}, {"io_threads": 2}])
def test_options_of_streaming_alone(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="store='stream'"):
        hotmoe.ExpertCache(slots=8, **options)


def test_mlock_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ArgumentError, match="use_mlock"):
        hotmoe.Llama(tiny_model, expert_cache=streaming(), use_mlock=True, verbose=False)


def test_copies_wish_the_same() -> None:
    cache = streaming(host_slots="7s", io_threads=3, direct="off", slots=9)
    for twin in (copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        assert repr(twin) == repr(cache)
        assert twin.__reduce__()[0].keywords == cache.__reduce__()[0].keywords
        assert "'7s'" in repr(twin)


# ---- what it reads, and does not ----


def test_loading_reads_no_expert(tmp_path: Path) -> None:
    """CASES 27 and 30: neither loading nor a context touches experts, and their file is not mapped."""
    path = cached_model(arch="olmoe", quant="F16", n_layer=4, n_expert=64)
    script = f"""
        import os
        from pathlib import Path
        from tests.stream_faults import load, logits_of, PROMPT

        path = Path({str(path)!r})
        rchar = lambda: int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])
        begin = rchar()
        with load(path, host_slots=8) as llm:
            cache = llm.expert_cache
            experts = sum(bank.n_expert * bank.expert_bytes for bank in cache.plan.banks)
            assert experts > 0.9 * path.stat().st_size, experts
            read = rchar() - begin
            assert read < path.stat().st_size - 0.9 * experts + (8 << 20), (read, path.stat().st_size, experts)
            assert cache.stats().store.bytes == 0
            assert str(path) not in Path("/proc/self/maps").read_text()
            logits_of(llm, PROMPT)
            assert cache.stats().store.bytes > 0
            assert str(path) not in Path("/proc/self/maps").read_text()
    """
    run_script(script)


@DEVICES
@pytest.mark.parametrize("direct", ["auto", "on", "off"])
def test_ways_to_read(device: str, direct: str, sim: ModuleType, tiny_model: Path) -> None:
    with load(tiny_model, device) as resident:
        right = logits_of(resident, PROMPT)
    for io_threads in (1, 3, 16):
        with load(tiny_model, device, direct=direct, io_threads=io_threads) as llm:
            assert llm.expert_cache is not None
            assert equal_bits(logits_of(llm, PROMPT), right)
            store = llm.expert_cache.stats().store
            assert store is not None
            assert (store.buffered_bytes == store.disk_bytes) == (direct == "off")
            assert (store.direct_bytes == store.disk_bytes) == (direct != "off")
            assert store.warning == ""


@DEVICES
def test_shards_behind_symlinks(device: str, sim: ModuleType, tmp_path: Path) -> None:
    """CASE 24: as download caches lay models out; every shard is read."""
    path = link_model(cached_model(arch="olmoe", quant="Q8_0", shards=3), tmp_path)
    with load(path, device) as resident:
        right = logits_of(resident, PROMPT)
    with load(path, device, host_slots=6) as llm:
        assert equal_bits(logits_of(llm, PROMPT), right)


@pytest.mark.parametrize("kind", ["truncated", "missing-shard", "renamed-shard", "second-shard"])
def test_broken_files(kind: str, tmp_path: Path) -> None:
    """CASE 24: said before anything is read."""
    path = break_model(cached_model(arch="olmoe", quant="Q8_0", shards=3), kind, tmp_path)
    with pytest.raises(hotmoe.ModelLoadError) as caught:
        load(path, host_slots=6)
    assert str(tmp_path) in str(caught.value)


def test_pipes_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/stdin")):
        failed: list[BaseException] = []

        def attempt(path: Path = path, failed: list[BaseException] = failed) -> None:
            try:
                load(path, host_slots=6)
            except (hotmoe.ModelLoadError, StoreError) as error:
                failed.append(error)

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), "it waits for somebody to write"
        assert len(failed) == 1
        assert str(path) in str(failed[0])
        assert "regular file" in str(failed[0])


# ---- its life ----


@DEVICES
def test_without_its_cache_a_model_computes_nothing(device: str, sim: ModuleType, tiny_model: Path) -> None:
    with load(tiny_model, device, host_slots=6) as llm:
        right = logits_of(llm, PROMPT)
        assert llm.expert_cache is not None
        llm.expert_cache.close()
        for _ in range(2):
            with pytest.raises(DecodeError, match="without its experts"):
                llm.eval(PROMPT)
            with pytest.raises(DecodeError):
                llm("hello", max_tokens=2)
        again = hotmoe.attach(llm, streaming(host_slots=9, slots=11))
        assert equal_bits(logits_of(llm, PROMPT), right)
        stats = again.stats()
        assert stats.store is not None
        assert stats.store.bytes > 0
    with pytest.raises(StateError):
        again.stats()


def test_text(sim: ModuleType, tiny_model: Path) -> None:
    """The high-level call: the same text, with a prompt that is longer than there are slots for."""
    for device in ("", "SIM0"):  # each by itself: a CPU with AMX computes the dense weights otherwise
        texts = set()
        for options in ({}, {"host_slots": 4}, {"host_slots": 13}):
            with load(tiny_model, device, **options) as llm:
                texts.add(llm("the quick brown fox jumps over the lazy dog", max_tokens=24, temperature=0)["choices"][0]["text"])
        assert len(texts) == 1
        assert len(texts.pop()) > 8


def test_lora(sim: ModuleType, tmp_path: Path) -> None:
    from tests.gates.test_lora import write_adapter

    path = cached_model(arch="olmoe", quant="Q8_0")
    write_adapter(tmp_path / "adapter.gguf", "olmoe", 2)
    options: dict[str, Any] = {
        "n_ctx": 128,
        "n_ubatch": 64,
        "n_threads": 1,
        "n_threads_batch": 1,
        "logits_all": True,
        "verbose": False,
        "devices": "",
    }
    logits = []
    for cache in (None, streaming()):
        with hotmoe.Llama(
            path, lora_path=str(tmp_path / "adapter.gguf"), cpu_moe=True, use_mmap=False, expert_cache=cache, **options
        ) as llm:
            llm.eval(PROMPT)
            logits.append(np.array(llm.scores[: len(PROMPT)]))
    assert equal_bits(*logits)
    with load(path, host_slots=6) as llm:
        assert not equal_bits(logits_of(llm, PROMPT)[: len(PROMPT)], logits[0]), "the adapter has no effect"


def test_two_models_in_two_threads(sim: ModuleType, tiny_model: Path) -> None:
    """Each with its own readers, on the CPU and on a device, at the same time."""
    with load(tiny_model, host_slots=5) as first, load(tiny_model, "SIM0", host_slots=5, slots=6) as second:
        models = (first, second)
        right = [logits_of(llm, PROMPT) for llm in models]
        got: list[list[Any]] = [[], []]

        def work(k: int) -> None:
            got[k] += [logits_of(models[k], PROMPT) for _ in range(5)]

        threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for k in (0, 1):
            assert len(got[k]) == 5
            assert all(equal_bits(logits, right[k]) for logits in got[k])
