"""What all tests share. Nothing here skips: without the simulated accelerator the tests fail, they do not fall back."""

from __future__ import annotations

import signal
from pathlib import Path
from types import ModuleType

import pytest

import hotmoe
from tests.models import cached_model

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
