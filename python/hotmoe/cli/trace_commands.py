"""The commands about routing: `hotmoe trace` and `hotmoe replay`."""

from __future__ import annotations

from pathlib import Path

import click

from .options import LoadOptions, json_option, load_options

_TRACE_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(no_args_is_help=False)
def trace() -> None:
    """Record and convert traces of routing: which experts each token used in each layer."""


@trace.command()
@click.option(
    "--prompts",
    "prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="A text with prompts, or a .jsonl file: each line a string (a prompt) or a list of strings (what the user says in "
    "each turn; the model's own answers lie in between).",
)
@click.option(
    "--split",
    type=click.Choice(["line", "blank", "none"]),
    default="line",
    show_default=True,
    help="How a text is cut into prompts: one per line, at blank lines, or not at all.",
)
@click.option("--multi-turn", is_flag=True, help="The prompts of a text are the turns of one conversation.")
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Put what the user says into the model's chat template, or not.  [default: conversations, if there is a template]",
)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="A .npz, .csv or .parquet file."
)
@click.option(
    "-n", "--n-predict", type=click.IntRange(1), default=128, show_default=True, help="Most tokens to generate in each turn."
)
@click.option("--temp", type=click.FloatRange(0), default=0.0, show_default=True, help="Temperature; 0 = most likely token.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of the sampler; random if not given.")
@load_options()
def record(
    load: LoadOptions,
    prompts: Path,
    split: str,
    multi_turn: bool,
    chat: bool | None,
    output: Path,
    n_predict: int,
    temp: float,
    seed: int | None,
) -> None:
    """Let MODEL answer prompts, and write down the routing of every token and layer.

    Any model with experts, wherever they lie; the options that decide that are those of `hotmoe run`. What was prompt is marked
    as prefill, what the model generated as decode.
    """
    from .trace import record_trace

    record_trace(load, prompts, output, split=split, multi_turn=multi_turn, chat=chat, n_predict=n_predict, temp=temp, seed=seed)


@trace.command()
@click.argument("source", type=_TRACE_FILE)
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
def convert(source: Path, target: Path) -> None:
    """Write the trace SOURCE as TARGET; the endings of the names say how: .npz, .csv, .parquet."""
    from .trace import convert_trace

    convert_trace(source, target)


@trace.command()
@click.argument("file", type=_TRACE_FILE)
@json_option
def info(file: Path, as_json: bool) -> None:
    """Show what is in the trace FILE."""
    from .trace import show_trace

    show_trace(file, as_json=as_json)


@click.command()
@click.argument("traces", metavar="TRACE...", type=_TRACE_FILE, nargs=-1, required=True)
@click.option(
    "--slots",
    default="10%,25%,50%",
    show_default=True,
    metavar="LIST",
    help="Sizes, by commas: slots of each layer (of all with --scope global), or a share of the experts.",
)
@click.option(
    "--policy",
    "policies",
    metavar="LIST",
    help="Policies, by commas: names, with options in parentheses (lrfu(half_life=32)), package.module:Class, lib:PATH; and the "
    "bounds belady, belady-bypass, unlimited.  [default: lru, the engine's default, belady]",
)
@click.option("--admission", "admissions", metavar="LIST", help="Admissions, by commas.  [default: the engine's default]")
@click.option(
    "--scope",
    type=click.Choice(["layer", "global"]),
    default="layer",
    show_default=True,
    help="A pool for each layer, or one for all.",
)
@click.option(
    "--miss",
    type=click.Choice(["copy", "cpu"]),
    default="copy",
    show_default=True,
    help="A miss that is not admitted gets a slot on loan, or none.",
)
@click.option(
    "--prompt-events",
    "prompts",
    type=click.Choice(["turn", "ubatch"]),
    default="turn",
    show_default=True,
    help="A prompt is one event per layer, or one for each ubatch that the engine made of it.",
)
@click.option(
    "--large",
    type=click.Choice(["waves", "bypass"]),
    default="waves",
    show_default=True,
    help="An event that may need more experts than there are slots: as many at a time as there are, or past the cache.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list on stdout, and nothing else there.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw miss-ratio curves: a .png, .svg or .pdf file (needs hotmoe[plot]).",
)
def replay(
    traces: tuple[Path, ...],
    slots: str,
    policies: str | None,
    admissions: str | None,
    scope: str,
    miss: str,
    prompts: str,
    large: str,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Show how caches of some sizes and policies would do on recorded routing.

    The policies are those that the engine runs. Hit rates are those of generated tokens; prompts warm the cache.
    """
    from .replay import show_replay

    show_replay(
        traces,
        slots=slots,
        policies=policies,
        admissions=admissions,
        options={"scope": scope, "miss": miss, "prompts": prompts, "large": large},
        as_json=as_json,
        plot=plot,
    )
