"""`hotmoe run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ..cache import ExpertCache
from ..model_file import read_model_file
from ..plan import format_bytes

DEFAULT_CTX = 4096  # tokens, if the model was trained for as many


def run_model(
    model: Path,
    prompt: str,
    n_predict: int,
    temp: float,
    seed: int | None,
    ctx_size: int | None,
    threads: int | None,
    slots: str | None,
    policy: str | None,
    strict: bool,
    cpu_moe: bool | None,
    n_cpu_moe: int,
    n_gpu_layers: int | None,
    sim: tuple[int, int] | None,
    verbose: bool,
) -> None:
    """Load a model, stream its continuation of a prompt to stdout, and report about the cache on stderr.

    Args:
        model: A GGUF file.
        prompt: Text to go on from.
        n_predict: Most tokens to generate.
        temp: Temperature; 0 = most likely token.
        seed: Seed of the sampler; None = random.
        ctx_size: Context in tokens; 0 = the model's; None = the model's, at most 4096.
        threads: CPU threads; None = half of the logical CPUs.
        slots: Size of the expert cache; None = no cache.
        policy: Eviction policy; None = the default.
        strict: Fail if a layer's experts cannot be pooled.
        cpu_moe: All experts in host memory; None = the default.
        n_cpu_moe: Experts of the first n layers in host memory.
        n_gpu_layers: Layers on the device; None = the default.
        sim: Simulated devices to load first: (number, MiB of each).
        verbose: Show llama.cpp's log and the plan.
    """
    if ctx_size is None:
        ctx_size = min(read_model_file(model).n_ctx_train or DEFAULT_CTX, DEFAULT_CTX)
    cache = None if slots is None else ExpertCache(slots=slots, policy=policy, strict=strict)
    if sim:
        from .. import sim as simulator

        simulator.load(*sim)
    from ..llama import Llama
    from .generate import Generation

    options: dict[str, Any] = {} if n_gpu_layers is None else {"n_gpu_layers": n_gpu_layers}
    with Llama(
        model,
        expert_cache=cache,
        cpu_moe=cpu_moe,
        n_cpu_moe=n_cpu_moe,
        n_ctx=ctx_size,
        n_threads=threads,
        verbose=verbose,
        **options,
    ) as llm:
        generation = Generation(llm, prompt, n_predict, temp=temp, seed=seed)
        try:
            for piece in generation:
                sys.stdout.write(piece)
                sys.stdout.flush()
        finally:  # also after Ctrl-C: the text ends its line, and what was measured is shown
            sys.stdout.write("\n")
            sys.stdout.flush()
            print(report(generation.n_tokens, generation.tokens_per_second, cache, simulated=sim is not None), file=sys.stderr)


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
    plan, decode = cache.plan, cache.stats().decode
    slots = "-".join(map(str, plan.slots[:: max(len(plan.slots) - 1, 1)]))
    parts.append(f"expert cache: {slots} slots per layer ({format_bytes(plan.pool_bytes)}), {plan.policy}")
    if decode.hit_rate is not None and decode.uploaded_bytes_per_token is not None:
        parts.append(f"{decode.hit_rate:.1%} hits in decode, {format_bytes(decode.uploaded_bytes_per_token)} uploaded per token")
    if bypassed := {reason: n for reason, n in cache.stats().total.steps.bypassed.items() if n}:
        parts.append(
            "steps on the stock path: " + ", ".join(f"{n} ({reason.replace('_', ' ')})" for reason, n in bypassed.items())
        )
    if any(device.host_memory for device in plan.devices):
        parts.append("the device computes from host memory, so the cache saves no transfer")
    if left_out := [bank for bank in plan.banks if not bank.pooled]:
        parts.append(f"{len(left_out)} of {len(plan.banks)} layers left out ({left_out[0].reason})")
    return ", ".join(parts)
