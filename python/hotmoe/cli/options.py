"""The options that several commands share, under one set of names, and the model that they load."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..llama import Llama

DEFAULT_CTX = 4096  # tokens, if the model was trained for as many


class SimSize(click.ParamType):  # type: ignore[type-arg]  # generic only in click >= 8.2, and only for type checkers
    """`N` or `N:MiB`: a number of simulated devices and the memory of each."""

    name = "N[:MiB]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return (number of devices, MiB of each)."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d+)(?::(\d+))?", value)
        if not match or not 1 <= int(match[1]) <= 16 or (match[2] and int(match[2]) < 1):
            self.fail(f"{value!r} is not N[:MiB], such as 1 or 2:512 (at most 16 devices)", param, ctx)
        return int(match[1]), int(match[2] or 1024)


model_argument = click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
sim_option = click.option(
    "--sim", type=SimSize(), help="Simulated devices: number, and MiB of each (1024). Their speed says nothing about a GPU."
)
policy_option = click.option(
    "--moe-expert-cache-policy",
    "policy",
    metavar="NAME",
    help="Which expert loses its slot: lru, slru, ..., package.module:Class, lib:PATH.",
)
admission_option = click.option(
    "--moe-expert-cache-admission",
    "admission",
    metavar="NAME",
    help="Whether an expert that missed keeps its slot: always, ..., package.module:Class, lib:PATH.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and nothing else there.")
temperature_option = click.option(
    "--temp", type=click.FloatRange(0), default=0.8, show_default=True, help="Temperature; 0 = most likely token."
)
seed_option = click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of the sampler; random if not given.")

_LOAD_OPTIONS = [
    click.option(
        "-mec",
        "--moe-expert-cache",
        "--moe-expert-cache-size",
        "slots",
        metavar="SIZE",
        help="Expert cache: slots per layer (32), bytes (6GiB), auto, several devices 48/64; 0 = off, with the same placement "
        "of weights.",
    ),
    policy_option,
    admission_option,
    click.option(
        "--moe-tier-manager",
        "tier_manager",
        metavar="NAME",
        help="What host memory keeps of experts mapped from the file: readahead, none, package.module:Class, lib:PATH.",
    ),
    click.option(
        "--moe-host-slots",
        "host_slots",
        metavar="SIZE",
        help="For the tier manager: experts of each layer that host memory is to hold (32), or bytes of all layers (24G).",
    ),
    click.option(
        "--moe-store",
        "store",
        type=click.Choice(["mapped", "resident", "stream"]),
        help="Where experts come from that have no slot: the mapped file, pinned memory, or the file, read when needed.",
    ),
    click.option("--moe-stream", "stream", is_flag=True, help="The same as --moe-store stream."),
    click.option(
        "--moe-stream-cache",
        "stream_cache",
        metavar="SIZE",
        help="Experts of each layer that host memory holds (32s), or bytes of all layers (24G), or auto; implies --moe-stream.",
    ),
    click.option(
        "--moe-host-policy",
        "host_policy",
        metavar="NAME",
        help="Of streamed experts behind a device's slots, which loses its place in host memory: as --moe-expert-cache-policy.",
    ),
    click.option(
        "--moe-host-admission",
        "host_admission",
        metavar="NAME",
        help="Of these, which keeps its place in host memory: as --moe-expert-cache-admission.",
    ),
    click.option(
        "--moe-stream-io-threads", "io_threads", type=click.IntRange(1, 256), help="Threads that read; implies --moe-stream."
    ),
    click.option(
        "--moe-stream-direct",
        "direct",
        type=click.Choice(["auto", "on", "off"]),
        help="Read past the page cache; auto = where that works; implies --moe-stream.",
    ),
    click.option("--moe-strict", "strict", is_flag=True, help="Fail if a layer's experts cannot be pooled."),
    click.option("-cmoe", "--cpu-moe", is_flag=True, default=None, help="All experts in host memory (default with -mec)."),
    click.option(
        "-ncmoe", "--n-cpu-moe", type=click.IntRange(0), default=0, help="Experts of the first N layers in host memory."
    ),
    click.option("-ngl", "--n-gpu-layers", type=int, help="Layers on the device; -1 = all (default with -mec), else 0."),
    click.option(
        "-dev", "--device", "devices", metavar="NAMES", help="Devices to offload to: CUDA0,CUDA1; none; all if not given."
    ),
    click.option(
        "-ot",
        "--override-tensor",
        "override_tensors",
        metavar="PATTERN=NAME",
        multiple=True,
        help="Where tensors go whose name matches, before anything else decides: 'exps=CPU'. Several: by commas, or again.",
    ),
    sim_option,
    click.option(
        "-c",
        "--ctx-size",
        type=click.IntRange(0),
        help="Context in tokens; 0 = the model's.  [default: the model's, at most 4096]",
    ),
    click.option("-t", "--threads", type=click.IntRange(1), help="CPU threads; half of the logical CPUs if not given."),
    click.option("--verbose", is_flag=True, help="Show llama.cpp's log and the plan."),
]


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How to load a model, as the command line says.

    Attributes:
        model: A GGUF file.
        slots: Size of the expert cache; None = no cache.
        policy: Eviction policy; None = the default.
        admission: Admission policy; None = the default.
        tier_manager: Tier manager; None = the system decides alone.
        host_slots: Size of host memory for the tier manager; None = no limit.
        store: Where experts come from that have no slot; None = the default.
        stream: Short for store "stream".
        stream_cache: Size of host memory for streamed experts; None = what is left.
        host_policy: Eviction policy of host memory for streamed experts; None = the default.
        host_admission: Admission policy of the same; None = the default.
        io_threads: Threads that read streamed experts; None = the default.
        direct: Whether they read past the page cache; None = the default.
        strict: Fail if a layer's experts cannot be pooled.
        cpu_moe: All experts in host memory; None = the default.
        n_cpu_moe: Experts of the first n layers in host memory.
        n_gpu_layers: Layers on the device; None = the default.
        devices: Names of devices, separated by commas; "none" = no device; None = all.
        override_tensors: Texts like "pattern=name,pattern=name".
        sim: Simulated devices to load first: (number, MiB of each).
        ctx_size: Context in tokens; 0 = the model's; None = the model's, at most 4096.
        threads: CPU threads; None = half of the logical CPUs.
        verbose: Show llama.cpp's log and the plan.
    """

    model: Path
    slots: str | None
    policy: str | None
    admission: str | None
    tier_manager: str | None
    host_slots: str | None
    store: str | None
    stream: bool
    stream_cache: str | None
    host_policy: str | None
    host_admission: str | None
    io_threads: int | None
    direct: str | None
    strict: bool
    cpu_moe: bool | None
    n_cpu_moe: int
    n_gpu_layers: int | None
    devices: str | None
    override_tensors: tuple[str, ...]
    sim: tuple[int, int] | None
    ctx_size: int | None
    threads: int | None
    verbose: bool

    def __post_init__(self) -> None:
        """Refuse combinations that contradict each other.

        Raises:
            click.UsageError: If there is one.
        """
        if self.store in ("mapped", "resident") and self.streams:
            raise click.UsageError(f"--moe-store {self.store} contradicts --moe-stream and the options that imply it")
        if self.streams and (self.tier_manager or self.host_slots):
            raise click.UsageError("--moe-tier-manager and --moe-host-slots are about mapped experts: leave out --moe-stream")
        if not self.streams and (self.host_policy or self.host_admission):
            raise click.UsageError("--moe-host-policy and --moe-host-admission are about streamed experts: give --moe-stream")
        if self.slots is None and not self.streams and (self.policy or self.admission or self.strict):
            raise click.UsageError(
                "--moe-expert-cache-policy, --moe-expert-cache-admission and --moe-strict need a cache: give -mec or --moe-stream"
            )
        if self.slots is None and (self.tier_manager or self.host_slots):
            raise click.UsageError("--moe-tier-manager and --moe-host-slots need a cache: give -mec too; -mec 0 will do")
        if self.cpu_moe and self.n_cpu_moe:
            raise click.UsageError("-cmoe covers all layers: give -cmoe or -ncmoe, not both")

    @property
    def streams(self) -> bool:
        """Whether experts are read from the file when they are needed."""
        implied = self.stream_cache is not None or self.io_threads is not None or self.direct is not None
        return self.stream or self.store == "stream" or implied

    @contextlib.contextmanager
    def load(self, *, record: bool = False) -> Iterator[Llama]:
        """Load the model, and free it when the block ends.

        Args:
            record: With a cache that records the routing. It changes nothing else: without -mec, weights go where they
                would go without a cache.

        Raises:
            HotmoeError: If the model does not load, or the cache cannot be had.
        """
        from ..cache import ExpertCache
        from ..model_file import read_model_file

        n_ctx = self.ctx_size
        if n_ctx is None:
            n_ctx = min(read_model_file(self.model).n_ctx_train or DEFAULT_CTX, DEFAULT_CTX)
        more: dict[str, Any] = {} if self.n_gpu_layers is None else {"n_gpu_layers": self.n_gpu_layers}
        cache = None
        cpu_moe = self.cpu_moe
        if self.slots is not None or self.streams:
            cache = ExpertCache(
                slots=self.slots or "auto",
                policy=self.policy,
                admission=self.admission,
                tier_manager=self.tier_manager,
                host_slots=self.stream_cache if self.streams else self.host_slots,
                host_policy=self.host_policy,
                host_admission=self.host_admission,
                store="stream" if self.streams else self.store,
                io_threads=self.io_threads,
                direct=self.direct or "auto",
                strict=self.strict,
                record=record,
            )
        elif record:
            cache = ExpertCache(slots=0, record=True)
            cpu_moe = bool(self.cpu_moe)
            more.setdefault("n_gpu_layers", 0)
        if self.sim:
            from .. import sim as simulator

            simulator.load(*self.sim)
        from ..llama import Llama

        with progress_bar(f"loading {self.model.name}") as progress:
            llm = Llama(
                self.model,
                expert_cache=cache,
                cpu_moe=cpu_moe,
                n_cpu_moe=self.n_cpu_moe,
                override_tensors=",".join(self.override_tensors) or None,
                devices="" if self.devices == "none" else self.devices,
                progress_callback=progress,
                n_ctx=n_ctx,
                n_threads=self.threads,
                verbose=self.verbose,
                **more,
            )
        with llm:
            yield llm


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[..., None] | None]:
    """Show a bar on stderr, if that is a terminal.

    Yields:
        What to call with what is done, 0 to 1, and, if it changed, the title; None without a terminal.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(escape(title), total=1.0)

        def update(done: float, title: str | None = None) -> None:
            bar.update(task, completed=done, description=None if title is None else escape(title))

        yield update


def load_options(*, default_slots: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the argument MODEL and the options that decide how it is loaded.

    They reach the command as one argument `load`, a `LoadOptions`.

    Args:
        default_slots: Size of the expert cache if -mec is not given; None = no cache.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_load_options(**given: Any) -> Any:
            values = {field.name: given.pop(field.name) for field in dataclasses.fields(LoadOptions)}
            if values["slots"] is None:
                values["slots"] = default_slots
            return command(load=LoadOptions(**values), **given)

        decorated: Callable[..., Any] = with_load_options
        for option in reversed([model_argument, *_LOAD_OPTIONS]):
            decorated = option(decorated)
        return decorated

    return decorate
