"""`hotmoe run`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from ..cache import ExpertCache
from ..plan import format_bytes
from .options import LoadOptions

if TYPE_CHECKING:
    from .generate import Generation


def run_model(load: LoadOptions, prompt: str, n_predict: int, *, temp: float, seed: int | None, as_json: bool) -> None:
    """Stream a model's continuation of a prompt to stdout, and report about the cache on stderr.

    Args:
        load: The model and how to load it.
        prompt: Text to go on from.
        n_predict: Most tokens to generate.
        temp: Temperature; 0 = most likely token.
        seed: Seed of the sampler; None = random.
        as_json: Print one JSON object instead of the text, when all is generated.

    Raises:
        HotmoeError: If the model does not load, the cache cannot be had, or the prompt does not fit.
    """
    with load.load() as llm:
        from .generate import Generation

        cache = llm.expert_cache
        generation = Generation(llm, prompt, n_predict, temp=temp, seed=seed)
        if as_json:
            for _ in generation:
                pass
            print(json.dumps(_as_dict(load, prompt, generation, cache), indent=2))
            return
        try:
            for piece in generation:
                sys.stdout.write(piece)
                sys.stdout.flush()
        finally:  # also after Ctrl-C: the text ends its line, and what was measured is shown
            sys.stdout.write("\n")
            sys.stdout.flush()
            simulated = load.sim is not None
            print(report(generation.n_tokens, generation.tokens_per_second, cache, simulated=simulated), file=sys.stderr)


def _as_dict(load: LoadOptions, prompt: str, generation: Generation, cache: ExpertCache | None) -> dict[str, object]:
    live = cache is not None and cache.enabled
    return {
        "model": load.model.name,
        "simulated": load.sim is not None,
        "prompt": prompt,
        "text": generation.text,
        "prompt_tokens": generation.n_prompt,
        "tokens": generation.n_tokens,
        "prefill_seconds": generation.prefill_s,
        "tokens_per_second": generation.tokens_per_second,
        "plan": cache.plan.as_dict() if cache is not None and live else None,
        "stats": cache.stats().as_dict() if cache is not None and live else None,
    }


def report(n_tokens: int, tokens_per_second: float | None, cache: ExpertCache | None, *, simulated: bool) -> str:
    """Return one line about a generation and its cache.

    Args:
        n_tokens: Tokens generated.
        tokens_per_second: Of decoding; None if unknown.
        cache: The live cache, or None.
        simulated: Whether it ran on the simulated accelerator.
    """
    parts = [f"{n_tokens} tokens"]
    if tokens_per_second is not None:
        parts.append(
            f"{tokens_per_second:.1f} tokens/s" + (" on a simulated device, which says nothing about a GPU" if simulated else "")
        )
    if cache is None:
        return ", ".join(parts)
    if not cache.enabled:
        return ", ".join([*parts, "expert cache off"])
    plan, stats = cache.plan, cache.stats()
    decode = stats.decode
    slots = "-".join(map(str, plan.slots[:: max(len(plan.slots) - 1, 1)]))
    parts.append(f"expert cache: {slots} slots per layer ({format_bytes(plan.pool_bytes)}), {plan.policy}")
    parts.append(f"{format_bytes(plan.host_bytes)} of host memory planned")
    if decode.hit_rate is not None and decode.uploaded_bytes_per_token is not None:
        parts.append(f"{decode.hit_rate:.1%} hits in decode")
        if decode.uploaded_bytes_per_token or not stats.store:
            parts.append(f"{format_bytes(decode.uploaded_bytes_per_token)} uploaded per token")
    if stats.store and stats.total.steps.tokens:
        read = stats.store.disk_bytes / stats.total.steps.tokens
        parts.append(
            f"{format_bytes(read)} read per token, prompt included" + (f" ({stats.store.warning})" if stats.store.warning else "")
        )
    if bypassed := {reason: n for reason, n in stats.total.steps.bypassed.items() if n}:
        parts.append(
            "steps on the stock path: " + ", ".join(f"{n} ({reason.replace('_', ' ')})" for reason, n in bypassed.items())
        )
    if any(device.host_memory for device in plan.devices) and not stats.store:
        parts.append("the device computes from host memory, so the cache saves no transfer")
    if left_out := [bank for bank in plan.banks if not bank.pooled]:
        parts.append(f"{len(left_out)} of {len(plan.banks)} layers left out ({left_out[0].reason})")
    return ", ".join(parts)
