"""On Vulkan the pool equals the fully offloaded run bit for bit: a second implementation of buffers, queues and kernels.

As in tests/gates/test_exactness.py a cell runs the same tokens twice on the device, in the same ubatches: once with all
weights there, once with the experts in host memory and a pool. Every cell asserts that its state really came about.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hotmoe
from hotmoe._vendor.llama_cpp import llama_cpp as ll
from tests import harness
from tests.harness import ALL, Logits, Pool, Runner, equal_bits, tokens_for
from tests.models import cached_model

DEVICE = "Vulkan0"
MODELS: dict[str, dict[str, Any]] = {
    "olmoe-Q4_K": {"arch": "olmoe", "quant": "Q4_K"},
    "gpt-oss-MXFP4": {"arch": "gpt-oss", "quant": "MXFP4"},  # biases per expert
}
# Mesa 22.3's shader compiler crashes on batches of olmoe, with all weights on the device and no pool: its gates are decode.
UBATCHES = {"olmoe-Q4_K": (1,), "gpt-oss-MXFP4": (1, 3, 8)}
STATES = ("cold", "evictions", "all hits")
N_TOKENS = 24


@dataclass
class Pair:
    """One model, loaded with all weights on the device and again with its experts in host memory."""

    name: str
    path: Path
    tokens: list[int]
    expected: dict[int, Logits]  # by ubatch
    hosted: Runner
    n_expert: int
    n_used: int


@pytest.fixture(scope="module")
def vulkan() -> str:
    """The device is there, it is the software one, and the libraries are those of the Vulkan build."""
    assert Path(hotmoe.__file__).parent == Path(os.environ["HOTMOE_TEST_PACKAGE"])
    get = harness.libggml.ggml_backend_dev_description
    get.restype, get.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    ll.llama_backend_init()
    description = get(harness.device(DEVICE)).decode()
    assert "llvmpipe" in description
    return description


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, vulkan: str) -> Iterator[Pair]:
    path = cached_model(**MODELS[request.param])
    with (
        Runner(path, devices=(DEVICE,)) as offloaded,
        Runner(path, devices=(DEVICE,), cpu_moe=ALL) as hosted,
    ):
        with Pool(hosted, 40) as pool:
            n_expert, n_used = pool.bank(0).n_expert, pool.bank(0).n_expert_used
        tokens = tokens_for(N_TOKENS, hosted.n_vocab)
        expected = {ubatch: offloaded.run(tokens, ubatch) for ubatch in UBATCHES[request.param]}
        yield Pair(request.param, path, tokens, expected, hosted, n_expert, n_used)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("ubatch", sorted({ubatch for sizes in UBATCHES.values() for ubatch in sizes}))
def test_equals_the_offloaded_run(pair: Pair, ubatch: int, state: str, facts: list[str]) -> None:
    if ubatch not in pair.expected:
        pytest.skip(f"the driver crashes on {pair.name} in ubatches of {ubatch}, with no pool as well")
    slots = min(pair.n_expert, pair.n_used * ubatch) if state == "evictions" else pair.n_expert
    with Pool(pair.hosted, slots) as pool:
        row = pool.bank(0)
        assert bytes(b"".join(row.device)).partition(b"\0")[0] == DEVICE.encode()
        if state == "all hits":
            pair.hosted.run(pair.tokens, ubatch)
            pool.reset_stats()
        logits = pair.hosted.run(pair.tokens, ubatch)
        got = pool.stats()
        facts.append(
            f"{pair.name}, ubatch {ubatch}, {state}: {slots} slots, {got.events} events, {got.hits} hits, {got.misses} misses, "
            f"{got.evictions} evictions, equal: {equal_bits(logits, pair.expected[ubatch])}"
        )
        assert equal_bits(logits, pair.expected[ubatch])
        assert not pool.wrong_slots()
        assert got.events == pool.n_banks * -(-len(pair.tokens) // ubatch)
        assert not any(got.bypassed)
        assert (got.misses > 0) == (state != "all hits")
        assert (got.evictions > 0) == (state == "evictions")


def splits_of(run: Callable[[], object]) -> int:
    """Return the number of splits in a graph of one token, as llama.cpp logs it when it reserves graphs in ``run``.

    The line has one number, or "prompt / token" if they differ.
    """
    lines = []

    @ll.llama_log_callback
    def collect(level: int, text: bytes, user_data: int) -> None:
        lines.append(text.decode(errors="replace"))

    ll.llama_log_set(collect, None)
    try:
        run()
    finally:
        ll.llama_log_set(harness._log_warnings, None)
    found = re.findall(r"splits = (?:\d+ / )?(\d+)", "".join(lines))
    assert found, "llama.cpp did not say how many splits there are"
    return int(found[-1])


def test_splits_per_token(pair: Pair, facts: list[str]) -> None:
    """The pool cuts a graph once per layer; without it the CPU computes the experts, and every layer is cut twice."""
    offloaded = splits_of(lambda: Runner(pair.path, devices=(DEVICE,)).close())
    stock = splits_of(lambda: Runner(pair.path, devices=(DEVICE,), cpu_moe=ALL).close())

    def attach_and_decode() -> None:
        pair.hosted.reset()
        with Pool(pair.hosted, pair.n_expert):
            pair.hosted.decode(pair.tokens[:1])

    pooled = splits_of(attach_and_decode)
    facts.append(f"{pair.name}, splits per token: {offloaded} fully offloaded, {pooled} with the pool, {stock} with --cpu-moe")
    assert offloaded < pooled < stock
