"""`hotmoe plan`."""

from __future__ import annotations

import json

from rich.console import Console

from ..plan import format_bytes
from .options import LoadOptions
from .tables import bank_table, device_table, host_table


def show_plan(load: LoadOptions, *, as_json: bool) -> None:
    """Load a model with an expert cache, and print what the sizing decided.

    Args:
        load: The model and how to load it, with a cache.
        as_json: Print one JSON object instead of tables.

    Raises:
        HotmoeError: If the model does not load, or the cache cannot be had.
    """
    with load.load() as llm:
        cache = llm.expert_cache
        assert cache is not None, "the command has a default size"
        plan, n_ctx, strict = cache.plan, llm.n_ctx(), cache.strict
        requested = cache.slots
    if as_json:
        out = {
            "model": load.model.name,
            "requested": requested,
            "strict": strict,
            "n_ctx": n_ctx,
            "simulated": load.sim is not None,
            **plan.as_dict(),
        }
        print(json.dumps(out, indent=2))
        return
    console = Console(highlight=False)
    if not plan.banks:
        console.print("expert cache: off")
        return
    pooled = sum(bank.pooled for bank in plan.banks)
    console.print(
        f"{pooled} of {len(plan.banks)} expert banks pooled, {format_bytes(plan.pool_bytes)} in all, context of {n_ctx} tokens"
    )
    console.print(device_table(plan))
    console.print(host_table(plan))
    console.print(bank_table(plan))
