"""The devices that llama.cpp sees in this process."""

from __future__ import annotations

import ctypes
import dataclasses

from . import _libs

SIM_BACKEND = "SIM"  # name of the simulated accelerator's ggml backend

_TYPES = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel", 4: "meta"}  # enum ggml_backend_dev_type


@dataclasses.dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: What llama.cpp calls it, for example "CUDA0", "CPU", "SIM0".
        description: The maker's name for it.
        backend: Name of the ggml backend that drives it.
        type: "cpu", "gpu", "igpu" (computes from host memory), "accel" (helps the CPU) or "meta".
        memory_total: Bytes.
        memory_free: Bytes, at the time of the call.
        simulated: Whether it is the simulated accelerator, whose speed says nothing about any real one.
    """

    name: str
    description: str
    backend: str
    type: str
    memory_total: int
    memory_free: int
    simulated: bool

    @property
    def offloads(self) -> bool:
        """Whether layers can be offloaded to it (`n_gpu_layers`)."""
        return self.type in ("gpu", "igpu")


def list_devices() -> list[Device]:
    """Return all devices that are known now, in llama.cpp's order.

    A simulated device is among them only after `hotmoe.sim.load()`.
    """
    pointer, string, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    count = _libs.function("ggml", "ggml_backend_dev_count", size)
    get = _libs.function("ggml", "ggml_backend_dev_get", pointer, size)
    name = _libs.function("ggml", "ggml_backend_dev_name", string, pointer)
    description = _libs.function("ggml", "ggml_backend_dev_description", string, pointer)
    type_of = _libs.function("ggml", "ggml_backend_dev_type", ctypes.c_int, pointer)
    memory = _libs.function("ggml", "ggml_backend_dev_memory", None, pointer, ctypes.POINTER(size), ctypes.POINTER(size))
    registry = _libs.function("ggml", "ggml_backend_dev_backend_reg", pointer, pointer)
    registry_name = _libs.function("ggml", "ggml_backend_reg_name", string, pointer)

    devices = []
    for i in range(count()):
        device = get(i)
        free, total = size(), size()
        memory(device, ctypes.byref(free), ctypes.byref(total))
        backend = registry_name(registry(device)).decode()
        devices.append(
            Device(
                name=name(device).decode(),
                description=description(device).decode(errors="replace"),
                backend=backend,
                type=_TYPES.get(type_of(device), "unknown"),
                memory_total=total.value,
                memory_free=free.value,
                simulated=backend == SIM_BACKEND,
            )
        )
    return devices
