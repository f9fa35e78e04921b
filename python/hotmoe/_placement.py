"""Where weights go when a model is loaded: experts, tensor overrides, devices, and the progress of the load.

llama-cpp-python's `Llama` has no arguments for these; llama.cpp reads them from `llama_model_params`.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import _libs
from ._binding import check, ffi, lib
from ._vendor.llama_cpp import llama_cpp
from .devices import list_devices
from .errors import ArgumentError
from .model_file import EXPERT_TENSOR

TensorOverrides = str | Mapping[str, str] | Iterable[tuple[str, str]]

_thread = threading.local()

# the same tensors as EXPERT_TENSOR, in a pattern that both std::regex and Python read
_ALL_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch)?exps\.weight$"


@contextlib.contextmanager
def expert_placement(*, cpu_moe: bool | None = None, n_cpu_moe: int | None = None) -> Iterator[None]:
    """Place the experts of the models that this thread loads in the block, whoever loads them.

    For an installed llama-cpp-python that runs on our libraries (`hotmoe.lib_path()`); `hotmoe.Llama` has arguments of the
    same names. Experts that end in host memory keep the file's own layout, so that `hotmoe.attach` can pool them.

    Args:
        cpu_moe: Keep the experts of all layers in host memory. None: True, unless `n_cpu_moe` is given.
        n_cpu_moe: Keep the experts of the first n layers in host memory.

    Raises:
        ArgumentError: If the two contradict each other, or the number is negative.

    Examples:
        >>> with hotmoe.expert_placement():  # doctest: +SKIP
        ...     llm = llama_cpp.Llama("model.gguf", n_gpu_layers=-1)
    """
    n = n_host_layers((cpu_moe is None and n_cpu_moe is None) or bool(cpu_moe), n_cpu_moe or 0)
    with placed(n):
        yield


def n_host_layers(cpu_moe: bool, n_cpu_moe: int) -> int:
    """Return how many layers keep their experts in host memory, HOTMOE_ALL_LAYERS for all.

    Raises:
        ArgumentError: If the two contradict each other, or the number is not legal.
    """
    if isinstance(n_cpu_moe, bool) or not isinstance(n_cpu_moe, int) or n_cpu_moe < 0:
        raise ArgumentError(f"n_cpu_moe={n_cpu_moe!r} must be a number of layers, 0 or more; for all layers use cpu_moe=True")
    if cpu_moe and n_cpu_moe:
        raise ArgumentError(f"cpu_moe=True already covers n_cpu_moe={n_cpu_moe}: give one of them")
    return int(lib.HOTMOE_ALL_LAYERS) if cpu_moe else n_cpu_moe


@contextlib.contextmanager
def placed(n_layers: int, store: int = lib.HOTMOE_STORE_MAPPED, pinned_bytes: int = 0) -> Iterator[None]:
    """Place the experts of the models that this thread loads in the block.

    Args:
        n_layers: As for `n_host_layers`.
        store: enum hotmoe_store.
        pinned_bytes: The most to pin with HOTMOE_STORE_RESIDENT, 0 for no limit.
    """
    outer: list[dict[str, int]] = _thread.__dict__.setdefault("placements", [])
    options = {"n_cpu_moe": n_layers, "store": store, "pinned_bytes": pinned_bytes}
    check(lib.hotmoe_load_begin(ffi.new("struct hotmoe_load_options *", options)))
    outer.append(options)
    try:
        yield
    finally:
        outer.pop()
        lib.hotmoe_load_end()
        if outer:  # the C side knows one placement per thread
            check(lib.hotmoe_load_begin(ffi.new("struct hotmoe_load_options *", outer[-1])))


class _BufferTypeOverride(ctypes.Structure):
    """One entry of `llama_model_params.tensor_buft_overrides`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class LoadOptions:
    """What goes into `llama_model_params` beyond llama-cpp-python's arguments.

    llama.cpp keeps the pointers that it is given for as long as the model lives, so this object owns all that they point
    to, and the object that owns the model has to own this one.
    """

    def __init__(
        self,
        *,
        devices: str | Sequence[str] | None,
        override_tensors: TensorOverrides | None,
        progress: Callable[[float], Any] | None,
        n_host_layers: int,
        store: int = lib.HOTMOE_STORE_MAPPED,
        pinned_bytes: int = 0,
    ) -> None:
        """Resolve names.

        Raises:
            ArgumentError: If there is no such device or buffer, or a pattern is not a regular expression.
        """
        self.n_host_layers = n_host_layers
        self.store = store
        self.pinned_bytes = pinned_bytes
        self.cancelled = False  # by the callback
        self.error: BaseException | None = None  # that the callback raised
        self.interrupted = False  # by Ctrl-C
        self.overrides = _parse_overrides(override_tensors)
        self._devices = _device_array(devices)
        self._overrides = self._override_array()
        self._progress = progress
        self._on_progress = llama_cpp.llama_progress_callback(self._report)

    def apply(self, params: Any) -> None:
        """Write into a `llama_model_params`."""
        if self._devices is not None:
            params.devices = ctypes.addressof(self._devices)
        if self._overrides is not None:
            params.tensor_buft_overrides = ctypes.addressof(self._overrides)
        params.progress_callback = self._on_progress

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Place experts and watch for Ctrl-C while a model loads in the block."""
        with contextlib.ExitStack() as stack:
            if self.n_host_layers != 0 or self.overrides or self.store != lib.HOTMOE_STORE_MAPPED:
                # with overrides, the placement of experts is the last of them, so that those of the user come first
                stack.enter_context(placed(0 if self.overrides else self.n_host_layers, self.store, self.pinned_bytes))
            # a KeyboardInterrupt inside the progress callback would be lost: ctypes prints it and goes on
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and (before := signal.getsignal(signal.SIGINT)) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._interrupt)
                stack.callback(signal.signal, signal.SIGINT, before)
            yield

    def _interrupt(self, signum: int, frame: Any) -> None:
        self.interrupted = True

    def _report(self, fraction: float, user_data: Any) -> bool:
        """llama.cpp's progress callback: False stops the load."""
        if self.interrupted:
            return False
        if self._progress is None or self.cancelled or self.error is not None:
            return not self.cancelled and self.error is None
        try:
            self.cancelled = self._progress(min(1.0, max(0.0, fraction))) is False
        except BaseException as error:  # raised where the load was called
            self.error = error
            return False
        return not self.cancelled

    def _override_array(self) -> Any:
        if not self.overrides:
            return None
        buffers = _buffer_types()
        rows = []
        for pattern, name in self.overrides:
            if name not in buffers:
                raise ArgumentError(f"override_tensors: there is no buffer or device {name!r}; known: {', '.join(buffers)}")
            rows.append((pattern.encode(), buffers[name]))
        if self.n_host_layers:
            layers = r"\d+" if self.n_host_layers < 0 else f"({'|'.join(map(str, range(self.n_host_layers)))})"
            rows.append((rf"^blk\.{layers}{_ALL_EXPERTS}".encode(), buffers["CPU"]))
        self._patterns = [ctypes.create_string_buffer(pattern) for pattern, _ in rows]
        array = (_BufferTypeOverride * (len(rows) + 1))()  # the last one stays zero: llama.cpp reads up to it
        for entry, text, (_, buffer) in zip(array, self._patterns, rows, strict=False):
            entry.pattern = ctypes.cast(text, ctypes.c_char_p)
            entry.buft = buffer
        return array


def warn_about_overrides(overrides: Sequence[tuple[str, str]], tensors: Sequence[str]) -> None:
    """Warn about patterns that match nothing, and about layers of which they match only some of the expert tensors.

    The usual cause is a pattern for separate gate and up tensors, `ffn_(up|gate|down)_exps`, and a model in which they are
    fused, `ffn_gate_up_exps`.
    """
    compiled = [(re.compile(pattern), pattern) for pattern, _ in overrides]
    for regex, pattern in compiled:
        if not any(map(regex.search, tensors)):
            warnings.warn(f"override_tensors: {pattern!r} matches no tensor of the model", stacklevel=4)
    banks: dict[tuple[str, bool], list[str]] = {}
    for name in tensors:
        if match := EXPERT_TENSOR.fullmatch(name):
            banks.setdefault((match[1], bool(match[3])), []).append(name)
    for (layer, _), names in banks.items():
        matched = [name for name in names if any(regex.search(name) for regex, _ in compiled)]
        if 0 < len(matched) < len(names):
            missed = ", ".join(name for name in names if name not in matched)
            warnings.warn(
                f"override_tensors: in layer {layer} and maybe others, only {', '.join(matched)} of the expert tensors match, "
                f"not {missed}: experts in two places cannot be pooled. To place whole experts, use cpu_moe or n_cpu_moe, or the "
                f"pattern '_exps'",
                stacklevel=4,
            )
            return


def _parse_overrides(overrides: TensorOverrides | None) -> list[tuple[str, str]]:
    """Return (pattern, name) pairs in the order in which llama.cpp tries them."""
    if overrides is None:
        return []
    if isinstance(overrides, str):  # as after -ot
        parts = [part.rpartition("=") for part in overrides.split(",") if part]
        pairs = [(pattern, name) for pattern, _, name in parts]
        if not all(pattern and name for pattern, name in pairs):
            raise ArgumentError(f"override_tensors={overrides!r}: expected 'pattern=buffer', several separated by commas")
    else:
        pairs = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ArgumentError(f"override_tensors: expected a pattern and the name of a device or buffer, not {pair!r}")
        try:
            re.compile(pair[0])
        except re.error as error:
            raise ArgumentError(f"override_tensors: {pair[0]!r} is not a regular expression: {error}") from error
    return pairs


def _device_array(names: str | Sequence[str] | None) -> Any:
    """Return a NULL-terminated array of ggml devices, None for llama.cpp's own choice."""
    if names is None:
        return None
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    known = [device.name for device in list_devices() if device.offloads or device.type == "accel"]
    for name in names:
        if name not in known:
            raise ArgumentError(
                f"devices: there is no device {name!r} that layers can be offloaded to; known: {', '.join(known) or 'none'}. "
                f"For the CPU alone, give an empty list"
            )
    by_name = _libs.function("ggml", "ggml_backend_dev_by_name", ctypes.c_void_p, ctypes.c_char_p)
    return (ctypes.c_void_p * (len(names) + 1))(*[by_name(name.encode()) for name in names], None)


def _buffer_types() -> dict[str, int]:
    """Return the address of every buffer type that a tensor can be put into, by its name and by its device's name."""
    pointer = ctypes.c_void_p
    by_name = _libs.function("ggml", "ggml_backend_dev_by_name", pointer, ctypes.c_char_p)
    own = _libs.function("ggml", "ggml_backend_dev_buffer_type", pointer, pointer)
    pinned = _libs.function("ggml", "ggml_backend_dev_host_buffer_type", pointer, pointer)
    name_of = _libs.function("ggml", "ggml_backend_buft_name", ctypes.c_char_p, pointer)
    found: dict[str, int] = {}
    for device in list_devices():
        handle = by_name(device.name.encode())
        for buffer in filter(None, (own(handle), pinned(handle))):
            found.setdefault(name_of(buffer).decode(), buffer)
        found.setdefault(device.name, own(handle))
    return found
