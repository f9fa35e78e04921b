"""`hotmoe replay`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import ArgumentError
from ..plan import format_bytes
from ..policies.registry import ADMISSIONS, POLICIES, split_specs
from ..replay import BOUNDS, ReplayResult, n_runs, sweep
from ..traces import Events, Trace
from .options import progress_bar

CAPTION = (
    "hits: of generated tokens; 2nd half: of the second half of them; per token: bytes copied to slots for a generated token; "
    "worst: the layer with the fewest hits"
)


def show_replay(
    files: Sequence[Path],
    *,
    slots: str,
    policies: str | None,
    admissions: str | None,
    options: dict[str, str],
    as_json: bool,
    plot: Path | None,
) -> None:
    """Replay traces and print what came of it.

    Args:
        files: The traces.
        slots: Sizes, by commas.
        policies: Policies, by commas; None = lru, the engine's default, and Belady's optimum.
        admissions: Admissions, by commas; None = the engine's default.
        options: Further arguments of `hotmoe.replay.replay`.
        as_json: Print a JSON list instead of tables.
        plot: A picture to draw, or None.

    Raises:
        HotmoeError: If a trace cannot be read, a size or name is wrong, or the picture cannot be drawn.
    """
    if plot:
        from .._replay_plot import check_can_plot

        check_can_plot(plot)
    sizes = _list(slots, "--slots")
    specs = _list(policies, "--policy") if policies is not None else _default_policies()
    for spec in specs:
        if spec not in BOUNDS:
            POLICIES.check(spec)
    judges: list[str | None] = [*_list(admissions, "--admission")] if admissions is not None else [None]
    for judge in judges:
        ADMISSIONS.check(judge)
    traces = [Trace.load(file) for file in files]
    with_bounds = [*specs, *(bound for bound in ("belady", "unlimited") if plot and bound not in specs)]

    with progress_bar("replaying") as bar:
        progress = _Progress(bar, traces, n_runs(1, with_bounds, len(judges), len(sizes)), options["prompts"])
        results = list(
            sweep(
                traces,
                with_bounds,
                judges,
                slots=sizes,
                on_start=progress.start if bar else None,
                progress=progress.advance if bar else None,
                **options,
            )
        )
    shown = [result for result in results if result.policy not in BOUNDS or result.policy in specs]
    if plot:
        from .._replay_plot import save_plot

        save_plot(results, plot)
    if as_json:
        print(json.dumps([result.as_dict() for result in shown], indent=2))
        return
    console = Console(highlight=False)
    for trace in traces:
        console.print(_table([result for result in shown if result.trace == trace.name]))


def _list(texts: str, option: str) -> list[str]:
    """Split a list of an option.

    Raises:
        ArgumentError: If it has an empty item.
    """
    items = split_specs(texts)
    if not all(items):
        raise ArgumentError(f"{option} {texts!r}: there is nothing between two commas, or nothing at all")
    return list(dict.fromkeys(items))


def _default_policies() -> list[str]:
    from .._binding import lib, text

    return list(dict.fromkeys(["lru", text(lib.hotmoe_policy_default()), "belady"]))


class _Progress:
    """How far a sweep is, in events."""

    def __init__(self, bar: Any, traces: Sequence[Trace], runs_per_trace: int, prompts: str) -> None:
        self._bar = bar
        self._title = ""
        self._done = 0
        self._all = runs_per_trace * sum(len(Events.of(trace, prompts)) for trace in traces) if bar else 0

    def start(self, title: str) -> None:
        """See that a run begins."""
        self._title = title

    def advance(self, n: int) -> None:
        """See that events were run."""
        self._done += n
        self._bar(self._done / max(self._all, 1), self._title)


def _table(results: Sequence[ReplayResult]) -> Table:
    """Return a table of one trace's results, the sizes one after another."""
    first = results[0]
    title = (
        f"{first.trace}: {len(first.layers)} layers of {first.n_expert} experts, {first.n_expert_used} per token; "
        f"{first.n_prompt_tokens} tokens of prompts, {first.n_decode_tokens} generated"
    )
    table = Table(title=escape(title), title_justify="left", caption=CAPTION, caption_justify="left")
    table.add_column("slots", justify="right", no_wrap=True)
    table.add_column("policy")
    if with_admission := len({result.admission for result in results if result.policy not in BOUNDS}) > 1:
        table.add_column("admission")
    for name in ("hits", "2nd half", "evicted", "per token", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    for requested in dict.fromkeys(result.requested for result in results):
        for result in (r for r in results if r.requested == requested):
            worst = result.worst_layer
            table.add_row(
                _slots(result),
                escape(result.policy),
                *([escape(result.admission)] if with_admission else []),
                _percent(result.hit_rate),
                _percent(result.second_half.hit_rate),
                "-" if result.decode.evictions is None else str(result.decode.evictions),
                "-" if result.bytes_per_token is None else format_bytes(result.bytes_per_token),
                "-" if worst is None else f"{worst.layer} ({_percent(worst.decode.hit_rate)})",
            )
        table.add_section()
    return table


def _slots(result: ReplayResult) -> str:
    if result.policy == "unlimited":
        return "all"
    return f"{result.slots} ({result.requested})" if "%" in result.requested else str(result.slots)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
