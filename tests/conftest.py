"""What all tests share. Nothing here skips: without the simulated accelerator the tests fail, they do not fall back."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

import hotmoe
from tests.models import cached_model

if TYPE_CHECKING:
    from tests.harness import Logits

# A shell lets what it starts in the background ignore SIGINT, and children inherit that: the tests of Ctrl-C need it back.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def sim() -> ModuleType:
    """Two simulated devices of 512 MiB in this process; the value is `hotmoe.sim`."""
    devices = hotmoe.sim.load(2, mib=512)
    assert [device.name for device in devices] == ["SIM0", "SIM1"]
    assert all(device.simulated for device in devices)
    return hotmoe.sim


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A model of 2 layers, 40 experts each, 4 per token."""
    return cached_model(arch="olmoe", quant="Q4_K", n_expert=40, n_expert_used=4)


@pytest.fixture(scope="session")
def paged_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts have 34 pages in each of three tensors; a copy of our own, all of it on the disk."""
    from tests.tiers import SPEC  # not for all tests: tests.harness takes over llama.cpp's log

    path = tmp_path_factory.mktemp("tiers") / "model.gguf"
    shutil.copy(cached_model(**SPEC), path)
    with path.open("rb+") as file:
        os.fsync(file)
    return path


@pytest.fixture(scope="session")
def paged_logits(sim: ModuleType, paged_model: Path) -> dict[int, Logits]:
    """Its logits without a cache, by tokens per ubatch."""
    from tests.harness import ALL, Runner, tokens_for

    with Runner(paged_model, cpu_moe=ALL, op_offload=False) as runner:
        return {n: runner.run(tokens_for(12, runner.n_vocab), n) for n in (1, 4)}
