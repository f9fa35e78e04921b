"""One model in ubatches of one size on Vulkan, in a process of its own; prints one JSON object.

Usage: python -m tests.vulkan.cell MODEL UBATCH [--no-pool]

Of its own, since Mesa's lavapipe (22.3.6 at least) dies when a larger ubatch follows a smaller one in a process, with or without
a pool: its queue drops a reference to a resource that is no more, after ggml's Vulkan backend replaced a scratch buffer by a
larger one. So each process has one size, and keeps what it has allocated until all is computed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hotmoe
from hotmoe._native import lib
from hotmoe._vendor.llama_cpp import llama_cpp as ll
from tests import harness
from tests.harness import ALL, Logits, Pool, Runner, equal_bits, tokens_for

DEVICE = "Vulkan0"
N_TOKENS = 24


def description() -> str:
    """Return what the driver calls the device."""
    get = harness.libggml.ggml_backend_dev_description
    get.restype, get.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    ll.llama_backend_init()
    text: bytes = get(harness.device(DEVICE))
    return text.decode()


def splits_of(run: Callable[[], object]) -> int:
    """Return the number of splits in a graph of one token, as llama.cpp logs it when it reserves graphs in ``run``.

    The line has one number, or "prompt / token" if they differ.
    """
    lines = []

    @ll.llama_log_callback
    def collect(level: int, text: bytes, user_data: int) -> None:
        lines.append(text.decode(errors="replace"))

    ll.llama_log_set(collect, None)
    try:
        run()
    finally:
        ll.llama_log_set(harness._log_warnings, None)
    found = re.findall(r"splits = (?:\d+ / )?(\d+)", "".join(lines))
    assert found, "llama.cpp did not say how many splits there are"
    return int(found[-1])


def measure(runner: Runner, pool: Pool, tokens: list[int], ubatch: int, expected: Logits) -> dict[str, Any]:
    """Run the tokens and return what the pool did, and whether the logits are the expected ones."""
    pool.reset_stats()
    logits = runner.run(tokens, ubatch)
    got = pool.stats()
    return {
        "equal": equal_bits(logits, expected),
        "wrong_slots": len(pool.wrong_slots()),
        "device": bytes(b"".join(pool.bank(0).device)).partition(b"\0")[0].decode(),
        "slots": pool.bank(0).n_slots,
        "expected_events": pool.n_banks * -(-len(tokens) // ubatch),
        "events": got.events,
        "hits": got.hits,
        "misses": got.misses,
        "evictions": got.evictions,
        "bypassed": sum(got.bypassed),
    }


def with_pool(path: Path, ubatch: int, tokens: list[int], expected: Logits) -> dict[str, Any]:
    """Run every state, each pool in a context of its own."""
    states: dict[str, Any] = {}
    with (
        Runner(path, devices=(DEVICE,), cpu_moe=ALL) as hosted,
        Runner.sharing(hosted) as second,
        ExitStack() as pools,
    ):
        attached: list[Pool] = []

        def attach_and_decode() -> None:
            attached.append(pools.enter_context(Pool(hosted, 1 << 16)))
            hosted.decode(tokens[:ubatch])

        splits = splits_of(attach_and_decode)
        [roomy] = attached
        roomy.clear()
        states["cold"] = measure(hosted, roomy, tokens, ubatch, expected)
        states["all hits"] = measure(hosted, roomy, tokens, ubatch, expected)

        n_expert, n_used = roomy.bank(0).n_expert, roomy.bank(0).n_expert_used
        tight = pools.enter_context(Pool(second, min(n_expert, n_used * ubatch)))
        states["evictions"] = measure(second, tight, tokens, ubatch, expected)
        tight.set_fault(lib.HOTMOE_FAULT_NO_UPLOAD)
        states["broken"] = measure(second, tight, tokens, ubatch, expected)
    return {"states": states, "splits_pooled": splits}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("ubatch", type=int)
    parser.add_argument("--no-pool", action="store_true", help="only run with all weights on the device")
    args = parser.parse_args()
    out: dict[str, Any] = {"package": str(Path(hotmoe.__file__).parent), "device": description()}
    with Runner(args.model, devices=(DEVICE,)) as offloaded:
        tokens = tokens_for(N_TOKENS, offloaded.n_vocab)
        expected = offloaded.run(tokens, args.ubatch)
        if not args.no_pool:
            out |= with_pool(args.model, args.ubatch, tokens, expected)
    out["splits_offloaded"] = splits_of(lambda: Runner(args.model, devices=(DEVICE,)).close())
    out["splits_cpu_moe"] = splits_of(lambda: Runner(args.model, devices=(DEVICE,), cpu_moe=ALL).close())
    print(json.dumps(out))


if __name__ == "__main__":
    main()
