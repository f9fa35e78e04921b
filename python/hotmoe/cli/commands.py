"""The commands and their options; each command's work is in a module of its own, imported when it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .. import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}, no_args_is_help=False)
@click.version_option(__version__, message="hotmoe %(version)s")
def hotmoe() -> None:
    """Run mixture-of-experts models with their hot experts in fast memory."""


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


sim_option = click.option(
    "--sim", type=SimSize(), help="Simulated devices: number, and MiB of each (1024). Their speed says nothing about a GPU."
)
model_argument = click.Path(exists=True, dir_okay=False, path_type=Path)


def pool_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that decide where experts are."""
    for option in reversed(
        [
            click.option(
                "-mec",
                "--moe-expert-cache",
                "--moe-expert-cache-size",
                "slots",
                metavar="SIZE",
                help="Expert cache: slots per layer (32), bytes (6GiB), auto; 0 = off, with the same placement of weights.",
            ),
            click.option(
                "--moe-expert-cache-policy", "policy", metavar="NAME", help="Which expert loses its slot: lru, slru, ..."
            ),
            click.option("--moe-strict", "strict", is_flag=True, help="Fail if a layer's experts cannot be pooled."),
            click.option(
                "-cmoe", "--cpu-moe", is_flag=True, default=None, help="All experts in host memory (default with -mec)."
            ),
            click.option(
                "-ncmoe", "--n-cpu-moe", type=click.IntRange(0), default=0, help="Experts of the first N layers in host memory."
            ),
            click.option("-ngl", "--n-gpu-layers", type=int, help="Layers on the device; -1 = all (default with -mec), else 0."),
            sim_option,
        ]
    ):
        command = option(command)
    return command


@hotmoe.command()
@click.argument("model", type=model_argument, required=False)
@sim_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(model: Path | None, sim: tuple[int, int] | None, as_json: bool) -> None:
    """Show versions, devices, policies, and what MODEL says about itself."""
    from .info import show_info

    show_info(model, sim, as_json=as_json)


@hotmoe.command()
@click.argument("model", type=model_argument)
@click.option("-p", "--prompt", required=True, help="Text to go on from.")
@click.option("-n", "--n-predict", type=click.IntRange(1), default=128, show_default=True, help="Most tokens to generate.")
@click.option("--temp", type=click.FloatRange(0), default=0.8, show_default=True, help="Temperature; 0 = most likely token.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of the sampler; random if not given.")
@click.option(
    "-c", "--ctx-size", type=click.IntRange(0), help="Context in tokens; 0 = the model's.  [default: the model's, at most 4096]"
)
@click.option("-t", "--threads", type=click.IntRange(1), help="CPU threads; half of the logical CPUs if not given.")
@pool_options
@click.option("--verbose", is_flag=True, help="Show llama.cpp's log and the plan.")
def run(**options: Any) -> None:
    """Generate text with MODEL: the text goes to stdout, a line about the cache to stderr."""
    if options["slots"] is None and (options["policy"] or options["strict"]):
        raise click.UsageError("--moe-expert-cache-policy and --moe-strict need a cache: give -mec too")
    if options["cpu_moe"] and options["n_cpu_moe"]:
        raise click.UsageError("-cmoe covers all layers: give -cmoe or -ncmoe, not both")
    from .run import run_model

    run_model(**options)


@hotmoe.command()
@click.option(
    "-n", "--n-predict", type=click.IntRange(8, 400), default=96, show_default=True, help="Tokens per row of the table."
)
@click.option("--moe-expert-cache-policy", "policy", metavar="NAME", help="Which expert loses its slot: lru, slru, ...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def demo(n_predict: int, policy: str | None, as_json: bool) -> None:
    """Generate text with the small model that comes with the package, with the pool off and on."""
    from .demo import show_demo

    show_demo(n_predict, policy, as_json=as_json)
