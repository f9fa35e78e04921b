"""`hotmoe trace`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..plan import format_bytes
from ..traces import DECODE, PREFILL, Trace
from ..traces.files import check_can_write
from ..traces.record import read_prompts
from ..traces.record import record as record_routing
from .options import LoadOptions, progress_bar


def record_trace(
    load: LoadOptions,
    prompts: Path,
    output: Path,
    *,
    split: str,
    multi_turn: bool,
    chat: bool | None,
    n_predict: int,
    temp: float,
    seed: int | None,
) -> None:
    """Record the routing of a model that answers prompts, and write it to a file.

    Args:
        load: The model and how to load it.
        prompts: A file with prompts, see `read_prompts`.
        output: The file to write.
        split: How a text is cut into prompts.
        multi_turn: The prompts of a text are one conversation.
        chat: Whether to use the model's chat template; None = for conversations.
        n_predict: Most tokens to generate in each turn.
        temp: Temperature; 0 = most likely token.
        seed: Seed of the sampler; None = random.

    Raises:
        HotmoeError: If the prompts cannot be read, the model does not load, or the file cannot be written.
    """
    check_can_write(output)
    conversations = read_prompts(prompts, split, multi_turn=multi_turn)
    with load.load(record=True) as llm, progress_bar("recording") as bar:
        trace = record_routing(
            llm,
            conversations,
            n_tokens=n_predict,
            chat=chat,
            temp=temp,
            seed=seed,
            progress=(lambda done, of: bar(done / of, f"recording, turn {done} of {of}")) if bar else None,
        )
    trace.save(output)
    print(
        f"{output}: {trace.n_tokens(PREFILL)} tokens of prompts and {trace.n_tokens(DECODE)} generated, {len(trace)} rows, "
        f"{format_bytes(output.stat().st_size)}",
        file=sys.stderr,
    )


def convert_trace(source: Path, target: Path) -> None:
    """Write a trace in another format.

    Raises:
        HotmoeError: If it cannot be read or written.
    """
    check_can_write(target)
    Trace.load(source).save(target)


def show_trace(file: Path, *, as_json: bool) -> None:
    """Print what is in a trace.

    Args:
        file: The trace.
        as_json: Print one JSON object instead of a table.

    Raises:
        TraceError: If it cannot be read.
    """
    trace = Trace.load(file)
    used = trace.n_used_of_banks()
    sizes = [bank.expert_bytes for bank in trace.banks]
    out = {
        "trace": str(file),
        "model": trace.model,
        "rows": len(trace),
        "layers": [bank.layer for bank in trace.banks],
        "n_expert": [bank.n_expert for bank in trace.banks],
        "n_expert_used": used,
        "expert_bytes": sizes,
        "prompts": len(set(trace.prompt.tolist())),
        "turns": len(set(zip(trace.prompt.tolist(), trace.turn.tolist(), strict=True))),
        "prompt_tokens": trace.n_tokens(PREFILL),
        "decode_tokens": trace.n_tokens(DECODE),
        "has_weights": trace.weights is not None,
        "has_ubatches": trace.step is not None,
        "about": trace.about,
    }
    if as_json:
        print(json.dumps(out, indent=2))
        return
    table = Table(show_header=False, title=escape(str(file)), title_justify="left")
    per_token = sum(n * size for n, size in zip(used, sizes, strict=True) if size is not None)
    rows = {
        "model": trace.model or "-",
        "layers with experts": str(len(trace.banks)),
        "experts per layer": f"{_span([bank.n_expert for bank in trace.banks])}, {_span(used)} used per token",
        "prompts, turns": f"{out['prompts']}, {out['turns']}",
        "tokens": f"{out['prompt_tokens']} of prompts, {out['decode_tokens']} generated",
        "rows": str(len(trace)),
        "experts of one token": format_bytes(per_token) if per_token else "-",
        "router weights": "yes" if out["has_weights"] else "no",
        **trace.about,
    }
    for name, value in rows.items():
        table.add_row(escape(name), escape(value))
    Console(highlight=False).print(table)


def _span(numbers: list[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return str(low) if low == high else f"{low} to {high}"
