"""On Vulkan the pool equals the fully offloaded run bit for bit: a second implementation of buffers, queues and kernels.

As in tests/gates/test_exactness.py a cell runs the same tokens twice on the device, in the same ubatches: once with all
weights there, once with the experts in host memory and a pool. Every cell asserts that its state really came about.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models import cached_model

from .cell import DEVICE

ROOT = Path(__file__).parents[2]
MODELS: dict[str, dict[str, Any]] = {
    "olmoe-Q4_K": {"arch": "olmoe", "quant": "Q4_K"},
    "qwen3moe-Q8_0": {"arch": "qwen3moe", "quant": "Q8_0"},
    "gpt-oss-MXFP4": {"arch": "gpt-oss", "quant": "MXFP4"},  # biases per expert
    "gemma4-Q4_K": {"arch": "gemma4", "quant": "Q4_K", "scales": True},  # fused gate and up, scales per expert
}
UBATCHES = (1, 3, 8)
STATES = ("cold", "all hits", "evictions")
MIN_MODELS = 2  # to be compared at each size


def run_cell(model: str, ubatch: int, *options: str) -> tuple[str, dict[str, Any]]:
    """Return the signal that ended the process, or "" and what it printed."""
    path = cached_model(**MODELS[model])
    command = [sys.executable, "-m", "tests.vulkan.cell", path, str(ubatch), *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode < 0:
        return signal.Signals(-result.returncode).name, {}
    assert result.returncode == 0, result.stderr[-3000:]
    return "", json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def cells() -> dict[tuple[str, int], dict[str, Any]]:
    """What came out, by model and ubatch."""
    return {}


@pytest.mark.parametrize("ubatch", UBATCHES)
@pytest.mark.parametrize("model", MODELS)
def test_equals_the_offloaded_run(
    model: str, ubatch: int, cells: dict[tuple[str, int], dict[str, Any]], facts: list[str]
) -> None:
    died, cell = run_cell(model, ubatch)
    if died:
        stock_died, _ = run_cell(model, ubatch, "--no-pool")
        assert stock_died, f"the driver ends in {died} with a pool, and works without"
        facts.append(f"{model}, ubatch {ubatch}: not compared, the driver ends in {stock_died} without a pool, too")
        pytest.skip(facts[-1])

    assert cell["package"] == os.environ["HOTMOE_TEST_PACKAGE"], "the libraries of the Vulkan build"
    assert "llvmpipe" in cell["device"], "the software device"
    for state in STATES:
        got = cell["states"][state]
        facts.append(
            f"{model}, ubatch {ubatch}, {state}: {got['slots']} slots, {got['events']} events, {got['hits']} hits, "
            f"{got['misses']} misses, {got['evictions']} evictions, {'equal' if got['equal'] else 'DIFFERS'}"
        )
    for state in STATES:
        got = cell["states"][state]
        assert got["equal"], state
        assert got["device"] == DEVICE
        assert got["wrong_slots"] == 0
        assert got["events"] == got["expected_events"]
        assert got["bypassed"] == 0
        assert (got["misses"] > 0) == (state != "all hits")
        assert (got["hits"] > 0) or state == "cold"
        assert (got["evictions"] > 0) == (state == "evictions")
    assert not cell["states"]["broken"]["equal"], "without uploads the logits must differ, or the comparison is blind"
    cells[model, ubatch] = cell


@pytest.mark.parametrize("model", MODELS)
def test_splits_per_token(model: str, cells: dict[tuple[str, int], dict[str, Any]], facts: list[str]) -> None:
    """The pool cuts a graph once per layer; without it the CPU computes the experts, and every layer is cut at least twice."""
    if (model, 1) not in cells:
        pytest.skip("there is no run at ubatch 1")
    offloaded, pooled, stock = (cells[model, 1][f"splits_{kind}"] for kind in ("offloaded", "pooled", "cpu_moe"))
    facts.append(f"{model}, splits per token: {offloaded} fully offloaded, {pooled} with the pool, {stock} with --cpu-moe")
    assert offloaded < pooled < stock


def test_enough_was_compared(cells: dict[tuple[str, int], dict[str, Any]]) -> None:
    """A driver that crashes on everything passes no gate."""
    assert all(sum((model, ubatch) in cells for model in MODELS) >= MIN_MODELS for ubatch in UBATCHES), list(cells)
