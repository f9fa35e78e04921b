"""The simulated accelerator: devices SIM0, SIM1, ... for machines without a GPU.

A simulated device has memory of its own, asynchronous copies and events, but computes with ggml's CPU kernels: its
results are real, its speed says nothing about a GPU. It is never there unless `load()` was called, which has to happen
before a model is loaded.

    >>> import hotmoe
    >>> hotmoe.sim.load(mib=512)  # doctest: +SKIP
    [Device(name='SIM0', description='simulated accelerator, computes on the CPU', ...)]
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

from . import _libs
from .devices import Device, list_devices
from .errors import ArgumentError, HotmoeError, StateError

STRICT_OFF = 0  # asynchronous work runs at once, in call order
STRICT_LATE = 1  # ... as late as the API allows
STRICT_RANDOM = 2  # ... at random legal moments, reproducible by the seed

_MIB = 1 << 20

_lib: Any = None  # libhotmoe-sim, once it is asked for
_ffi: Any = None
_config: tuple[int, int, bool] | None = None  # (n, mib, poison) as registered


@dataclasses.dataclass(frozen=True)
class SimCounters:
    """What one simulated device did since the last reset; see hotmoe/sim.h.

    Attributes:
        h2d_bytes: Copied from the host to this device, bytes.
        d2h_bytes: Copied from this device to the host, bytes.
        d2d_bytes: Copied from any simulated device to this one, bytes.
        n_h2d: Copies to the device.
        n_d2h: Copies to the host.
        n_d2d: Copies between devices.
        n_sync: Calls that synchronised a backend of this device, or an event of it.
        n_graphs: Graphs accepted.
        n_kernels: Nodes in them that compute.
        n_deferred: Operations that a strict mode queued instead of running them at once.
        n_failed: Graphs or copies refused or failed.
        n_dup_ids: (token, expert) pairs that a MUL_MAT_ID was given twice.
        n_late_frees: Buffers freed while queued work still used them.
        n_faults: Times that the planted fault struck.
        allocated_bytes: Device memory in use now, bytes.
        peak_bytes: Most of it since the last reset, bytes.
        host_pinned_bytes: Pinned host memory in use now, bytes; one number for all devices.
    """

    h2d_bytes: int
    d2h_bytes: int
    d2d_bytes: int
    n_h2d: int
    n_d2h: int
    n_d2d: int
    n_sync: int
    n_graphs: int
    n_kernels: int
    n_deferred: int
    n_failed: int
    n_dup_ids: int
    n_late_frees: int
    n_faults: int
    allocated_bytes: int
    peak_bytes: int
    host_pinned_bytes: int


def load(n: int = 1, mib: int = 1024, *, strict: int = STRICT_OFF, seed: int = 0, poison: bool = True) -> list[Device]:
    """Make simulated devices known to llama.cpp, before a model is loaded.

    A second call with the same number and size of devices only sets `strict` and `seed`.

    Args:
        n: Number of devices.
        mib: Memory of each, MiB.
        strict: When asynchronous work runs: STRICT_OFF, STRICT_LATE or STRICT_RANDOM.
        seed: Of STRICT_RANDOM.
        poison: Fill new memory with bytes that are NaN as floats and -1 as integers. Poisoned memory is committed memory:
            switch it off for devices larger than this machine's RAM.

    Returns:
        The simulated devices.

    Raises:
        ArgumentError: If a value is out of range.
        StateError: If the devices exist already with another number, size or poisoning.
        LibraryError: If this build has no simulated accelerator.
    """
    global _config
    if mib < 1:  # the C side counts in bytes
        raise ArgumentError(f"mib={mib}: a simulated device needs 1 MiB of memory at least")
    wanted = (n, mib, poison)
    if loaded():
        if _config != wanted:
            raise StateError(
                f"the simulated devices exist already, with (n, mib, poison) = {_config or 'another configuration'}, and cannot "
                f"become {wanted}: load them once per process"
            )
        set_strict(strict, seed)
        return _devices()

    lib = _open()
    config = _ffi.new("struct hotmoe_sim_config *")
    lib.hotmoe_sim_default_config(config)
    config.n_devices = n
    config.bytes_per_device = mib * _MIB
    config.strict_mode = strict
    config.seed = seed
    config.poison = poison
    _check(lib.hotmoe_sim_configure(config))
    register = _libs.function("ggml", "ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)
    from ._log import capture_log

    with capture_log(forward=False) as log:
        registered = register(str(_libs.path("sim")).encode())
    if not registered:
        raise HotmoeError("\n  ".join([f"llama.cpp refused {_libs.path('sim')} as a backend", *log.lines]))
    _config = wanted
    devices = _devices()
    if len(devices) != n:  # never fall back to the CPU silently
        raise HotmoeError(f"asked for {n} simulated devices, llama.cpp knows {len(devices)}")
    return devices


def loaded() -> bool:
    """Whether simulated devices exist in this process."""
    return _lib is not None and _lib.hotmoe_sim_device_count() > 0


def set_strict(strict: int, seed: int = 0) -> None:
    """Change when asynchronous work runs, after running all that is queued.

    Args:
        strict: STRICT_OFF, STRICT_LATE or STRICT_RANDOM.
        seed: Of STRICT_RANDOM.

    Raises:
        ArgumentError: If there is no such mode.
        StateError: If no simulated device exists.
    """
    _check(_loaded_lib().hotmoe_sim_set_strict(strict, seed))


def set_fault(fault: int) -> None:
    """Plant a defect in the simulator (enum hotmoe_sim_fault), to prove that a test would notice it; 0 removes it."""
    _check(_loaded_lib().hotmoe_sim_set_fault(fault))


def counters(device: int = 0) -> SimCounters:
    """Return what a device did since the last reset.

    Args:
        device: Index of the simulated device: 0 for SIM0.

    Raises:
        ArgumentError: If there is no such device.
        StateError: If no simulated device exists.
    """
    lib = _loaded_lib()
    out = _ffi.new("struct hotmoe_sim_counters *")
    out.struct_size = _ffi.sizeof("struct hotmoe_sim_counters")
    _check(lib.hotmoe_sim_get_counters(device, out))
    return SimCounters(**{field.name: int(getattr(out, field.name)) for field in dataclasses.fields(SimCounters)})


def reset_counters(device: int = 0) -> None:
    """Zero the counters of a device; what is in use now stays.

    Args:
        device: Index of the simulated device: 0 for SIM0.
    """
    _check(_loaded_lib().hotmoe_sim_reset_counters(device))


def _devices() -> list[Device]:
    return [device for device in list_devices() if device.simulated]


def _open() -> Any:
    """Open libhotmoe-sim without registering anything."""
    global _lib, _ffi
    if _lib is None:
        from ._sim_ffi import ffi

        _libs.load("sim")  # with all it depends on; names the file if it is missing
        _ffi, _lib = ffi, ffi.dlopen(str(_libs.path("sim")))
    return _lib


def _loaded_lib() -> Any:
    if not loaded():
        raise StateError("there is no simulated device: call hotmoe.sim.load() before a model is loaded")
    return _lib


def _check(status: int) -> None:
    if status < 0:
        message = bytes(_ffi.string(_lib.hotmoe_sim_last_error())).decode(errors="replace")
        raise {-1: ArgumentError, -2: StateError}.get(status, HotmoeError)(
            message or f"libhotmoe-sim failed with status {status}"
        )
