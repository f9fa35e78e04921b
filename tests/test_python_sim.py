"""`hotmoe.sim` and the list of devices."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import hotmoe
from hotmoe.devices import list_devices
from hotmoe.errors import ArgumentError, StateError
from tests.harness import run_script


def test_devices(sim: ModuleType) -> None:
    devices = {device.name: device for device in list_devices()}
    assert {"CPU", "SIM0", "SIM1"} <= devices.keys()
    assert not devices["CPU"].simulated and not devices["CPU"].offloads
    for name in ("SIM0", "SIM1"):
        device = devices[name]
        assert device.simulated and device.offloads
        assert "simulated" in device.description
        assert device.memory_total == 512 << 20
        assert 0 < device.memory_free <= device.memory_total


def test_loading_again(sim: ModuleType) -> None:
    assert [device.name for device in sim.load(2, mib=512)] == ["SIM0", "SIM1"]
    with pytest.raises(StateError, match="once per process"):
        sim.load(1, mib=512)
    with pytest.raises(StateError, match="once per process"):
        sim.load(2, mib=256)


def test_bad_values(sim: ModuleType) -> None:
    with pytest.raises(ArgumentError):
        sim.set_strict(3)
    with pytest.raises(ArgumentError):
        sim.counters(2)
    with pytest.raises(ArgumentError, match="mib=0"):
        sim.load(1, mib=0)


def test_counters_count(sim: ModuleType, tiny_model: Path) -> None:
    for i in range(2):
        sim.reset_counters(i)
    with hotmoe.Llama(tiny_model, expert_cache=hotmoe.ExpertCache(slots=8), n_ctx=64, verbose=False) as llm:
        llm.eval([1, 2, 3])
        counters = [sim.counters(i) for i in range(2)]
        assert all(c.n_kernels > 0 and c.h2d_bytes > 0 and c.allocated_bytes > 0 for c in counters)
    assert [sim.counters(i).allocated_bytes for i in range(2)] == [0, 0]


def test_it_is_not_there_unless_asked_for() -> None:
    printed = run_script("""
        import hotmoe
        from hotmoe.devices import list_devices

        assert not hotmoe.sim.loaded()
        assert not any(device.simulated for device in list_devices())
        for use in (hotmoe.sim.counters, hotmoe.sim.reset_counters, lambda: hotmoe.sim.set_strict(1)):
            try:
                use()
            except hotmoe.HotmoeError as error:
                assert "hotmoe.sim.load()" in str(error), error
            else:
                raise AssertionError("expected an error")
        for n in (0, 17):
            try:
                hotmoe.sim.load(n)
            except ValueError as error:
                print(error)
        assert not hotmoe.sim.loaded(), "a refused configuration registers nothing"
        assert [device.name for device in hotmoe.sim.load(3, mib=16)] == ["SIM0", "SIM1", "SIM2"]
        assert hotmoe.sim.loaded()
    """)
    assert "17" in printed
