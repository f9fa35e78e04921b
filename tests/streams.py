"""What the tests of streamed experts share: a run of prompt and decode, and the check of one cell.

A cell runs the same tokens with the same ubatches twice, with all experts resident and with experts that are read from the
file, and compares all logits bit for bit. It also looks whether what it is about did happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hotmoe._native import ffi, lib
from tests.harness import Logits, Pool, Runner, equal_bits, tokens_for

BIG = 512  # tokens: the largest ubatch of most contexts here
N_DECODED = 6


def pieces(n_prompt: int, ubatch: int, n_decoded: int = N_DECODED) -> list[int]:
    """Return how many tokens each ubatch of a prompt and of the decode steps after it has."""
    sizes = [min(ubatch, n_prompt - start) for start in range(0, n_prompt, ubatch)]
    return sizes + [1] * n_decoded


def run_pieces(runner: Runner, sizes: Sequence[int], seed: int = 0) -> Logits:
    """Run a fresh sequence in ubatches of these sizes; return all logits, [n_tokens, n_vocab]."""
    tokens = tokens_for(sum(sizes), runner.n_vocab, seed)
    runner.reset()
    rows = []
    for n in sizes:
        rows.append(runner.decode(tokens[:n]))
        tokens = tokens[n:]
    return np.concatenate(rows)


@dataclass
class Streamed:
    """A model twice: resident, as stock llama.cpp has it, and streamed, on the same device.

    Attributes:
        resident: All weights on the device; on the CPU in plain memory, not repacked.
        streamed: Experts in the file only.
        devices: Names, () for the CPU.
        expected: Logits of the resident run, by its ubatches and seed.
    """

    resident: Runner
    streamed: Runner
    devices: tuple[str, ...] = ()
    expected: dict[tuple[tuple[int, ...], int], Logits] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, devices: Sequence[str] = (), n_ctx: int = 2 * BIG, n_ubatch: int = BIG) -> Streamed:
        options: dict[str, Any] = {"devices": devices, "n_ctx": n_ctx, "n_ubatch": n_ubatch, "extra_bufts": False}
        return cls(Runner(path, mmap=False, **options), Runner(path, stream=True, **options), tuple(devices))

    @property
    def on_cpu(self) -> bool:
        return not self.devices

    def close(self) -> None:
        self.resident.close()
        self.streamed.close()

    def __enter__(self) -> Streamed:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def expect(self, sizes: Sequence[int], seed: int = 0) -> Logits:
        key = tuple(sizes), seed
        if key not in self.expected:
            self.expected[key] = run_pieces(self.resident, sizes, seed)
        return self.expected[key]

    def pool(self, slots: int, host_slots: int | None = None, **options: Any) -> Pool:
        """Attach a cache; without a device, `slots` are the host slots. None: as many host slots as there are slots."""
        return Pool(self.streamed, slots, host_slots=f"{host_slots or slots}s", **options)

    def check(self, pool: Pool, sizes: Sequence[int], *, seed: int = 0, run: Callable[..., Logits] = run_pieces) -> str:
        """Run one cell on a fresh pool; return what is wrong, or ""."""
        expected = self.expect(sizes, seed)
        before = pool.store()
        wrong = [] if equal_bits(run(self.streamed, sizes, seed), expected) else ["logits differ"]
        wrong += counters_add_up(pool, before)
        for i in range(pool.n_banks):
            bank, got = pool.bank(i), pool.stats(i)
            fits = [min(bank.n_expert, bank.n_expert_used * n) <= bank.n_slots for n in sizes]
            if any(got.bypassed):
                wrong.append(f"bank {i}: bypassed {got.bypassed}")
            if got.events != len(sizes) or got.misses == 0:
                wrong.append(f"bank {i}: {got.events} events of {len(sizes)} ubatches, {got.misses} misses")
            if (got.waves > 0) == all(fits):
                wrong.append(f"bank {i}: {got.waves} waves, {fits.count(False)} of {len(fits)} ubatches do not fit")
            # a ubatch that does not fit for sure can still touch few experts: what must be evicted is what was loaded
            if got.evictions != got.misses - sum(e >= 0 for e in pool.slot_map(i)):
                wrong.append(f"bank {i}: {got.evictions} evictions, {got.misses} misses")
        return "; ".join(wrong)


def counters_add_up(pool: Pool, before: Any = None) -> list[str]:
    """Return what does not add up in the counters of the tiers, since the pool was made and `before` was taken."""
    store, banks = pool.store(), [(pool.bank(i), pool.stats(i)) for i in range(pool.n_banks)]
    past = {name: getattr(before, name) if before else 0 for name in ("bytes", "host_hits", "host_misses")}
    read, host_hits, host_misses = (getattr(store, name) - past[name] for name in past)
    wrong = []
    if store.disk_bytes != store.direct_bytes + store.buffered_bytes or store.disk_bytes < store.bytes:
        wrong.append(f"of {store.bytes} bytes, the disk gave {store.disk_bytes}: {store.direct_bytes} and {store.buffered_bytes}")
    misses = sum(c.misses for _, c in banks)
    missed_bytes = sum(c.misses * b.expert_bytes for b, c in banks)
    uploaded = sum(c.uploaded_bytes for _, c in banks)
    if any(b.host_slots for b, _ in banks):
        if misses != host_hits + host_misses:
            wrong.append(f"{misses} misses of the device, {host_hits} hits and {host_misses} misses of host memory")
        room = sum(b.host_slots for b, _ in banks)
        if not 0 <= store.host_misses - store.host_evictions <= room:
            wrong.append(f"{store.host_misses} experts were put into {room} host slots, {store.host_evictions} left them")
        if store.host_not_admitted > store.host_hits + store.host_misses:
            wrong.append(f"{store.host_not_admitted} not admitted, {store.host_hits} hits and {store.host_misses} misses")
        if uploaded != missed_bytes:
            wrong.append(f"{uploaded} bytes uploaded for {missed_bytes} that were missed")
        if len({b.expert_bytes for b, _ in banks}) == 1 and read != host_misses * banks[0][0].expert_bytes:
            wrong.append(f"{read} bytes read for {host_misses} misses of {banks[0][0].expert_bytes} bytes")
    elif read != missed_bytes or uploaded or host_hits or host_misses:
        wrong.append(
            f"{read} bytes read for {missed_bytes} that were missed, {uploaded} uploaded, tier 2: {host_hits}, {host_misses}"
        )
    return wrong


def touched(pool: Pool) -> list[tuple[int, set[int]]]:
    """Take the trace of a pool that records: layer and distinct experts of every event. One bank per layer."""
    return [(layer, set(ids)) for layer, ids in routed(pool)]


def routed(pool: Pool) -> list[tuple[int, list[int]]]:
    """Take the trace of a pool that records: layer and experts of every event, token after token. One bank per layer."""
    n_events, n_ids = ffi.new("int64_t *"), ffi.new("int64_t *")
    assert lib.hotmoe_trace_size(pool.cache, n_events, n_ids) == 0
    events = ffi.new("struct hotmoe_trace_event[]", n_events[0])
    ids, weights = ffi.new("int32_t[]", n_ids[0]), ffi.new("float[]", n_ids[0])
    assert lib.hotmoe_trace_take(pool.cache, events, n_events[0], ids, weights, n_ids[0]) == 0
    out, at = [], 0
    for event in events:
        n = event.n_tokens * event.n_used
        out.append((int(event.layer), list(ids[at : at + n])))
        at += n
    return out
