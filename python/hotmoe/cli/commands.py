"""The commands and their options; each command's work is in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path

import click

from .. import __version__
from .options import (
    LoadOptions,
    json_option,
    load_options,
    policy_option,
    seed_option,
    sim_option,
    temperature_option,
)
from .trace_commands import replay, trace


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}, no_args_is_help=False)
@click.version_option(__version__, message="hotmoe %(version)s")
def hotmoe() -> None:
    """Run mixture-of-experts models with their hot experts in fast memory."""


@hotmoe.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@sim_option
@json_option
def info(model: Path | None, sim: tuple[int, int] | None, as_json: bool) -> None:
    """Show versions, devices, policies, and what MODEL says about itself."""
    from .info import show_info

    show_info(model, sim, as_json=as_json)


@hotmoe.command()
@click.option("-p", "--prompt", required=True, help="Text to go on from.")
@click.option("-n", "--n-predict", type=click.IntRange(1), default=128, show_default=True, help="Most tokens to generate.")
@temperature_option
@seed_option
@json_option
@load_options()
def run(load: LoadOptions, prompt: str, n_predict: int, temp: float, seed: int | None, as_json: bool) -> None:
    """Generate text with MODEL: the text goes to stdout, a line about the cache to stderr."""
    from .run import run_model

    run_model(load, prompt, n_predict, temp=temp, seed=seed, as_json=as_json)


@hotmoe.command()
@click.option("-s", "--system", help="Instructions that stand before the conversation.")
@click.option("-n", "--n-predict", type=click.IntRange(1), help="Most tokens of one answer; as many as fit if not given.")
@click.option(
    "--chat-format", metavar="NAME", help="A chat format of llama-cpp-python, such as chatml, instead of the model's template."
)
@temperature_option
@seed_option
@load_options()
def chat(
    load: LoadOptions, system: str | None, n_predict: int | None, chat_format: str | None, temp: float, seed: int | None
) -> None:
    """Talk with MODEL, in the format of its own chat template.

    Ctrl-C stops an answer, a second one leaves. /exit leaves, /stats shows what the cache did, /clear forgets the
    conversation. If stdin is no terminal, each of its lines is a message, and stdout has the answers alone.
    """
    from .chat import chat_with_model

    chat_with_model(load, system=system, n_predict=n_predict, chat_format=chat_format, temp=temp, seed=seed)


@hotmoe.command()
@json_option
@load_options(default_slots="auto")
def plan(load: LoadOptions, as_json: bool) -> None:
    """Show what an expert cache for MODEL would be: slots per layer and device, bytes, and what is left out and why.

    The model is loaded as by the other commands, with -mec auto if no size is given, but nothing is generated.
    """
    from .plan import show_plan

    show_plan(load, as_json=as_json)


@hotmoe.command()
@click.option(
    "-n", "--n-predict", type=click.IntRange(8, 400), default=96, show_default=True, help="Tokens per row of the table."
)
@policy_option
@json_option
def demo(n_predict: int, policy: str | None, as_json: bool) -> None:
    """Generate text with the small model that comes with the package, with the pool off and on."""
    from .demo import show_demo

    show_demo(n_predict, policy, as_json=as_json)


hotmoe.add_command(trace)
hotmoe.add_command(replay)
