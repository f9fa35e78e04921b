"""Miss-ratio curves as a picture."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._replay_result import ReplayResult
from .errors import ArgumentError, LibraryError

_BOUNDS = ("belady", "belady-bypass", "unlimited")
_ENDINGS = (".png", ".svg", ".pdf")
# told apart with every kind of colour blindness: M. Okabe and K. Ito, "Color Universal Design", 2008
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#000000")
_MARKERS = "osD^vPX*"


def check_can_plot(path: Path) -> None:
    """Raise what `save_plot` would raise, before a long replay.

    Raises:
        ArgumentError: If the name ends in something that is no picture, or the folder does not exist.
        LibraryError: If matplotlib is missing.
    """
    if path.suffix.lower() not in _ENDINGS:
        raise ArgumentError(f"cannot draw {path}: the name must end in {', '.join(_ENDINGS)}")
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"cannot write {path}: there is no folder {path.absolute().parent}")
    _matplotlib()


def _matplotlib() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise LibraryError("plots need matplotlib: pip install 'hotmoe[plot]'") from error


def save_plot(results: Sequence[ReplayResult], path: Path) -> None:
    """Draw the share of misses against the number of slots: one panel per trace, one line per policy.

    What lies below Belady's optimum, where no policy can come, is shaded; so is, darker, what an unlimited cache would miss.

    Args:
        results: From `hotmoe.replay.sweep`, with `belady` and `unlimited` among the policies or not.
        path: A .png, .svg or .pdf file.

    Raises:
        ArgumentError: If there is nothing to draw, or the file cannot be written.
        LibraryError: If matplotlib is missing.
    """
    matplotlib = _matplotlib()
    results = [result for result in results if result.hit_rate is not None]
    traces = list(dict.fromkeys(result.trace for result in results))
    if not traces:
        raise ArgumentError("there is nothing to draw: no trace has generated tokens")
    n_columns = min(len(traces), 3)
    n_rows = -(-len(traces) // n_columns)
    figure = matplotlib.Figure(figsize=(1.2 + 4.6 * n_columns, 1.2 + 3.5 * n_rows), layout="constrained", dpi=150)
    axes = figure.subplots(n_rows, n_columns, squeeze=False).flat
    admissions = {result.admission for result in results if result.policy not in _BOUNDS}
    for axis, trace in zip(axes, traces, strict=False):
        _panel(axis, [result for result in results if result.trace == trace], with_admission=len(admissions) > 1)
    for axis in list(axes)[len(traces) :]:
        axis.set_visible(False)
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(len(handles), 2 * n_columns),
        frameon=False,
        fontsize=9,
    )
    try:
        figure.savefig(path)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error}") from error


def _panel(axis: Any, results: Sequence[ReplayResult], *, with_admission: bool) -> None:
    first = results[0]
    curves: dict[str, list[tuple[float, float]]] = {}
    sizes: dict[str, int] = {}  # "unlimited" has a slot for every expert, and stands at every size
    for result in results:
        if result.policy != "unlimited":
            sizes[result.requested] = result.slots
    for result in results:
        name = result.policy
        if with_admission and name not in _BOUNDS:
            name += f" + {result.admission}"
        curves.setdefault(name, []).append((sizes.get(result.requested, result.slots), 100 * (1 - (result.hit_rate or 0))))
    for points in curves.values():
        points.sort()

    optimum, cold = curves.pop("belady", []), curves.pop("unlimited", [])
    bypass = curves.pop("belady-bypass", [])
    if optimum:
        axis.fill_between(*_columns(optimum), color="#dddddd", linewidth=0, label="below Belady's optimum")
        axis.plot(*_columns(optimum), color="#777777", linewidth=1.2)
    if bypass:
        axis.plot(*_columns(bypass), color="#777777", linewidth=1.2, linestyle=":", label="... if misses may be left out")
    if cold:
        axis.fill_between(*_columns(cold), color="#b8b8b8", linewidth=0, label="first uses: an unlimited cache")
    for i, (name, points) in enumerate(curves.items()):
        colour, marker = _COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]
        axis.plot(
            *_columns(points), color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=name, clip_on=False, zorder=3
        )

    axis.set_title(f"{first.model.removesuffix('.gguf') or Path(first.trace).stem}\n", fontsize=11, loc="left", fontweight="bold")
    sizes_text = f"{len(first.layers)} x {first.n_expert} experts, {first.n_expert_used} per token"
    about = f"{sizes_text}; {first.n_decode_tokens} tokens generated"
    axis.text(0, 1.02, about, transform=axis.transAxes, fontsize=8.5, color="#555555")
    axis.set_xlabel("slots per layer" if first.scope == "layer" else "slots, all layers")
    axis.set_ylabel("misses, % of experts used")
    ticks = sorted(set(sizes.values())) or [first.slots]
    if len(ticks) <= 10:
        axis.set_xticks(ticks)
    margin = 0.03 * (ticks[-1] - ticks[0]) or 1
    axis.set_xlim(ticks[0] - margin, ticks[-1] + margin)
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", color="#e8e8e8", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
