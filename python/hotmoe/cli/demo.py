"""`hotmoe demo`: the shipped model with its experts in host memory, the pool off and on at several sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .. import sim
from ..cache import ExpertCache
from ..devices import Device, list_devices
from ..errors import HotmoeError, StateError
from ..llama import Llama
from ..model_file import ModelFile, read_model_file
from ..plan import format_bytes
from .generate import Generation

MODEL_DIR = Path(__file__).parent.parent / "model"

PROMPT = "The :mod:`json` module"
N_CTX = 512  # what the model was trained for
TEMPERATURE = 0.6
SEED = 1  # the same in every arm: equal logits give equal text

SIM_NOTE = (
    "SIM is a simulation: it computes with this machine's CPU, in memory that it treats as a device's. Hit rates and bytes "
    "are real, its tokens/s says nothing about a GPU."
)


@dataclasses.dataclass(frozen=True)
class Arm:
    """One run of the demo.

    Attributes:
        name: What it is, for people.
        slots: Slots per layer, 0 with the pool off.
        policy: Eviction policy, None with the pool off.
        hit_rate: Of decoding, cold start included, 0 to 1; None with the pool off.
        uploaded_bytes_per_token: Of decoding, cold start included, bytes; None with the pool off.
        pool_bytes: Device memory that the slots take, bytes.
        tokens: Tokens generated.
        tokens_per_second: Of decoding.
        text: What was generated.
        same_text_as_off: Whether the text is that of the arm with the pool off; None for that arm itself.
    """

    name: str
    slots: int
    policy: str | None
    hit_rate: float | None
    uploaded_bytes_per_token: float | None
    pool_bytes: int
    tokens: int
    tokens_per_second: float | None
    text: str
    same_text_as_off: bool | None = None


def show_demo(n_predict: int, policy: str | None, *, as_json: bool) -> None:
    """Run the demo and print its results.

    Args:
        n_predict: Tokens to generate in each arm.
        policy: Eviction policy; None = the default.
        as_json: Print one JSON object and nothing else on stdout.

    Raises:
        HotmoeError: If the model is missing, or a pool is not the one that was asked for.
    """
    console = Console(highlight=False, stderr=as_json)
    device = _device()
    model = read_model_file(shipped_model())
    console.print(
        f"[bold]{model.name or Path(model.path).stem}[/]: {model.n_layers} layers of {model.n_expert} experts, "
        f"{model.n_expert_used} per token; {format_bytes(model.expert_bytes)} of {format_bytes(model.tensor_bytes)} are experts, "
        f"kept in host memory.\n[bold]{device.name}[/]: {device.description}."
    )

    sizes = sorted({max(model.n_expert // 4, model.n_expert_used), model.n_expert // 2, model.n_expert})
    live = sizes[len(sizes) // 2]  # the one that is watched
    console.rule(f"live, with {live} of {model.n_expert} experts per layer in slots")
    console.out(PROMPT, end="")
    arms = {live: run_arm(model, device, live, policy, n_predict, lambda piece: console.out(piece, end=""))}
    console.out("")
    console.rule()
    for slots in [0, *sizes]:
        if slots not in arms:
            with _status(console, f"again with {slots} slots per layer" if slots else "again with the pool off"):
                arms[slots] = run_arm(model, device, slots, policy, n_predict)
    off = arms.pop(0)
    rows = [off, *(dataclasses.replace(arms[slots], same_text_as_off=arms[slots].text == off.text) for slots in sizes)]

    if as_json:
        out = {
            "device": device.name,
            "device_description": device.description,
            "simulated": device.simulated,
            "note": SIM_NOTE if device.simulated else "",
            "model": Path(model.path).name,
            "prompt": PROMPT,
            "temperature": TEMPERATURE,
            "seed": SEED,
            "arms": [dataclasses.asdict(arm) for arm in rows],
        }
        print(json.dumps(out, indent=2))
        return
    console.print(_table(rows, device))
    different = [arm.name for arm in rows if arm.same_text_as_off is False]
    if different:
        console.print(
            f"The text differs from the one with the pool off in: {', '.join(different)} (kernels may round differently)."
        )
    else:
        console.print("The text is the same in every row.")
    if device.simulated:
        console.print(f"[yellow]{SIM_NOTE}[/]")


def shipped_model() -> Path:
    """Return the path of the model that comes with the package.

    Raises:
        HotmoeError: If there is none.
    """
    models = sorted(MODEL_DIR.glob("*.gguf"))
    if len(models) != 1:
        raise HotmoeError(f"expected one *.gguf in {MODEL_DIR}, found {len(models)}: reinstall the package")
    return models[0]


def run_arm(
    model: ModelFile,
    device: Device,
    slots: int,
    policy: str | None,
    n_predict: int,
    on_text: Callable[[str], None] = lambda piece: None,
) -> Arm:
    """Load the model with a pool of one size, generate, and measure.

    Args:
        model: The model.
        device: The device that runs it.
        slots: Slots per layer; 0 = pool off.
        policy: Eviction policy; None = the default.
        n_predict: Tokens to generate.
        on_text: Called with every piece of text as it comes.

    Raises:
        HotmoeError: If the pool is not the one that was asked for: such an arm would be a wrong row, so it is none.
    """
    cache = ExpertCache(slots=slots, policy=policy, strict=True)
    if device.simulated:
        sim.reset_counters()
    with Llama(model.path, expert_cache=cache, n_ctx=N_CTX, verbose=False) as llm:
        generation = Generation(llm, PROMPT, n_predict, temp=TEMPERATURE, seed=SEED)
        for piece in generation:
            on_text(piece)
        if device.simulated and sim.counters().n_kernels == 0:
            raise StateError(f"{device.name} computed nothing: the model did not run on it")
        if cache.enabled:
            _verify(cache, device, slots)
        stats = cache.stats().decode
        return Arm(
            name=f"{slots} slots" if slots else "off",
            slots=slots,
            policy=cache.policy if slots else None,
            hit_rate=stats.hit_rate if slots else None,
            uploaded_bytes_per_token=stats.uploaded_bytes_per_token if slots else None,
            pool_bytes=cache.plan.pool_bytes,
            tokens=generation.n_tokens,
            tokens_per_second=generation.tokens_per_second,
            text=generation.text,
        )


def _verify(cache: ExpertCache, device: Device, slots: int) -> None:
    """Refuse a pool that is not the one that was asked for, or that did not serve decoding."""
    wrong = [bank for bank in cache.plan.banks if not bank.pooled or bank.n_slots != slots or bank.device != device.name]
    if wrong or not cache.plan.banks:
        raise StateError(f"asked for {slots} slots per layer on {device.name}, but the plan is:\n{cache.plan}")
    decode = cache.stats().decode
    bypassed = sum(decode.bypassed.values())
    if decode.events == 0 or bypassed:
        raise StateError(f"the pool of {slots} slots served {decode.events} events of decoding and missed {bypassed}")


def _device() -> Device:
    """Return the device that llama.cpp offloads to: a real one if there is any, else a simulated one."""
    offloading = [device for device in list_devices() if device.offloads]
    return (offloading or sim.load())[0]


def _table(rows: list[Arm], device: Device) -> Table:
    title = f"{device.name}{' (simulated)' if device.simulated else ''}, decoding"
    table = Table("pool", "size", "policy", "hit rate", "upload/token", "tokens/s", "text", title=title, title_justify="left")
    for arm in rows:
        table.add_row(
            arm.name,
            format_bytes(arm.pool_bytes) if arm.slots else "-",
            arm.policy or "-",
            "-" if arm.hit_rate is None else f"{arm.hit_rate:.1%}",
            "-" if arm.uploaded_bytes_per_token is None else format_bytes(arm.uploaded_bytes_per_token),
            "-" if arm.tokens_per_second is None else f"{arm.tokens_per_second:.1f}",
            {None: "-", True: "same", False: "differs"}[arm.same_text_as_off],
        )
    return table


@contextlib.contextmanager
def _status(console: Console, message: str) -> Iterator[None]:
    """Show what is going on, where anybody can see it change."""
    if console.is_terminal:
        with console.status(message):
            yield
    else:
        yield
