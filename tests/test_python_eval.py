"""Evaluation: limits of the context, interruption, perplexity, and what is left after `close()`."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import hotmoe
from hotmoe._vendor.llama_cpp import llama_cpp
from hotmoe.errors import ArgumentError, DecodeError, StateError
from tests.harness import run_script

TEXT = "The quick brown fox jumps over the lazy dog and runs away from all the other animals of the wood. "


def load(path: Path, **options: Any) -> hotmoe.Llama:
    return hotmoe.Llama(path, **{"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **options})


def prompt(llm: hotmoe.Llama, n: int) -> list[int]:
    tokens = llm.tokenize((TEXT * 20).encode())
    assert len(tokens) >= n
    return tokens[:n]


# ---- the size of the context ----


@pytest.mark.parametrize("n_prompt", [256, 257, 300])
def test_a_prompt_as_long_as_the_context(tiny_model: Path, n_prompt: int) -> None:
    with load(tiny_model) as llm:
        with pytest.raises(ValueError, match=rf"\b{n_prompt}\b.*\b256\b"):
            llm.create_completion(prompt(llm, n_prompt), max_tokens=4)
        assert llm.create_completion(prompt(llm, 255), max_tokens=4)["usage"]["completion_tokens"] == 1
        if n_prompt > 256:
            llm.reset()
            with pytest.raises(ArgumentError, match=rf"{n_prompt} tokens after 0 .* n_ctx=256 tokens"):
                next(llm.generate(prompt(llm, n_prompt)))


def test_tokens_that_do_not_fit_behind_others(tiny_model: Path) -> None:
    with load(tiny_model) as llm:
        llm.eval(prompt(llm, 200))
        with pytest.raises(ArgumentError, match="100 tokens after 200"):
            llm.eval([5] * 100)
        assert llm.n_tokens == 200, "nothing has changed"
        llm.eval([5] * 56)
        with pytest.raises(ValueError, match="1 tokens after 256"):
            llm.eval([5])


@pytest.mark.parametrize("logits_all", [False, True])
def test_a_context_that_llama_cpp_rounds_up(tiny_model: Path, logits_all: bool) -> None:
    """n_ctx=100 becomes 256, and llama-cpp-python's arrays stay at 100."""
    with load(tiny_model, n_ctx=100, logits_all=logits_all) as llm, load(tiny_model, n_ctx=256, n_batch=100) as full:
        assert llm.n_ctx() == 256
        tokens = prompt(llm, 150)
        texts = [model.create_completion(tokens, max_tokens=20, temperature=0)["choices"][0]["text"] for model in (llm, full)]
        assert texts[0] == texts[1]
        with pytest.raises(ValueError, match=r"\b256\b.*\b256\b"):
            llm.create_completion(prompt(llm, 256))


# ---- ubatches ----


def test_same_logits_as_in_one_call(sim: ModuleType, tiny_model: Path) -> None:
    """A batch in ubatches of our own equals llama.cpp's own division of it."""
    cache = hotmoe.ExpertCache(slots=32)
    with load(tiny_model, expert_cache=cache, n_batch=64, n_ubatch=8, logits_all=True) as llm:
        tokens = prompt(llm, 150)
        llm.eval(tokens)
        ours = llm.scores[:150].copy()
        assert cache.stats().total.steps.steps == 3 + 16, "of 8 tokens and no less, except at the end of a batch of 64"
        hotmoe.llama._BaseLlama.reset(llm)
        llm._ctx.kv_cache_clear()
        hotmoe.llama._BaseLlama.eval(llm, tokens)
        assert cache.stats().total.steps.steps == 2 * (3 + 16)
        assert ours.tobytes() == llm.scores[:150].tobytes()


def test_same_logits_without_logits_all(tiny_model: Path) -> None:
    cache = hotmoe.ExpertCache(slots=40)
    with load(tiny_model, n_batch=64, n_ubatch=8, expert_cache=cache) as llm:
        tokens, rows, looked_up = prompt(llm, 150), [], []
        for evaluate in (hotmoe.Llama.eval, hotmoe.llama._BaseLlama.eval):
            llm.reset()
            llm._ctx.kv_cache_clear()
            cache.reset_stats()
            evaluate(llm, tokens)
            looked_up.append([layer.hits + layer.misses for layer in cache.stats().total.layers])
            rows.append(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),)).copy())
        assert looked_up[0] == looked_up[1], "the last layer computes the tokens that have logits, and no more"
        assert rows[0].tobytes() == rows[1].tobytes() and np.isfinite(rows[0]).all()


def test_ctrl_c_in_prefill(tiny_model: Path) -> None:
    printed = run_script(f"""
        import os, signal, threading, time
        import hotmoe

        hotmoe.sim.load(mib=256)

        def load():
            cache = hotmoe.ExpertCache(slots=32)
            options = dict(n_ctx=2048, n_batch=1024, n_ubatch=8, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)
            return hotmoe.Llama({str(tiny_model)!r}, expert_cache=cache, **options)

        def shoot():
            while llm.n_tokens < 64:
                time.sleep(0.0002)
            at.append(llm.n_tokens)
            os.kill(os.getpid(), signal.SIGINT)

        tokens = [int(x) for x in ({TEXT!r} * 40).encode()][:2000]
        tokens = [3 + t for t in tokens]
        at = []
        with load() as llm:
            threading.Thread(target=shoot).start()
            try:
                llm.create_completion(tokens, max_tokens=4, temperature=0)
                print("not interrupted")
            except KeyboardInterrupt:
                pass
            n = llm.n_tokens
            assert n % 8 == 0 and 64 <= n < 1000, n
            print(n - at[0])
            # what is left is consistent: the KV cache holds n tokens, and the rest of the prompt can follow
            from hotmoe._vendor.llama_cpp import llama_cpp
            assert llama_cpp.llama_memory_seq_pos_max(llm._ctx.memory, 0) == n - 1
            again = llm.create_completion(tokens[:1000], max_tokens=8, temperature=0)["choices"]
            scores = llm.scores[:1000].copy()
            exact = llm.create_completion(tokens[:n], max_tokens=2, temperature=0)["choices"]
            assert llm.expert_cache.stats().total.events > 0
        with load() as fresh:
            assert again == fresh.create_completion(tokens[:1000], max_tokens=8, temperature=0)["choices"]
            assert scores.tobytes() == fresh.scores[:1000].tobytes()
        with load() as fresh:
            assert exact == fresh.create_completion(tokens[:n], max_tokens=2, temperature=0)["choices"]
    """)
    # between the signal and the end of the ubatch at work, the shooting thread may have been slow to look
    assert 0 <= int(printed) <= 16, f"{printed} tokens after the signal"


def test_a_failed_decode_says_why(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(tiny_model) as llm:
        with pytest.raises(DecodeError, match="llama_decode returned -1") as caught:
            llm.eval([5, 6, 10**6])
        assert isinstance(caught.value, RuntimeError) and caught.value.status == -1
        assert any("invalid token" in line for line in caught.value.log), caught.value.log
        assert llm.n_tokens == 0
        assert llm("hello", max_tokens=4, temperature=0) is not None


@pytest.mark.parametrize("can_forget_a_part", [True, False])
def test_what_is_left_after_a_failure(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, can_forget_a_part: bool) -> None:
    with load(tiny_model, n_ubatch=8) as llm:
        expected = []
        for n in (16, 40):
            llm.reset()
            expected.append(llm.create_completion(prompt(llm, n), max_tokens=8, temperature=0)["choices"])
        llm.reset()
        decode, calls = llm._decode, []

        def fail_after_the_third() -> None:
            decode()
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(llm, "_decode", fail_after_the_third)
        monkeypatch.setattr(llm, "_is_recurrent", not can_forget_a_part)
        with pytest.raises(KeyboardInterrupt):
            llm.eval(prompt(llm, 40))
        left = 16 if can_forget_a_part else 0
        assert llm.n_tokens == left
        assert llama_cpp.llama_memory_seq_pos_max(llm._ctx.memory, 0) == left - 1
        for n, choices in zip((16, 40), expected, strict=True):
            assert llm.create_completion(prompt(llm, n), max_tokens=8, temperature=0)["choices"] == choices


# ---- perplexity ----


def reference(llm: hotmoe.Llama, tokens: list[int], first: int) -> list[float]:
    """Return -ln p of tokens[first:]."""
    llm.reset()
    llm.eval(tokens)
    logits = llm.scores[: len(tokens)].astype(np.float64)
    log_p = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(1, keepdims=True)
    return [-float(log_p[i - 1, tokens[i]]) for i in range(first, len(tokens))]


def test_perplexity(sim: ModuleType, tiny_model: Path) -> None:
    text = TEXT * 2
    with load(tiny_model, logits_all=True, n_ubatch=32) as llm:
        tokens = llm.tokenize(text.encode())
        assert 130 < len(tokens) < 256
        whole = math.exp(np.mean(reference(llm, tokens, 1)))
        assert llm.perplexity(text) == pytest.approx(whole, rel=1e-5)
        losses = []
        for i in range(0, len(tokens) - 31, 32):
            losses += reference(llm, [llm.token_bos(), *tokens[i + 1 : i + 32]], 16)
        assert llm.perplexity(text, n_window=32) == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
        assert whole > 50, "random weights"
        assert llm.n_tokens == 0
    for options in ({"logits_all": False}, {"expert_cache": hotmoe.ExpertCache(slots=40)}):
        with load(tiny_model, n_ubatch=32, **options) as llm:
            before = llm("hello", max_tokens=8, temperature=0)["choices"]
            assert llm.perplexity(text) == pytest.approx(whole, rel=1e-4)
            assert llm("hello", max_tokens=8, temperature=0)["choices"] == before
        with load(tiny_model, n_ubatch=32, **{k: v for k, v in options.items() if k == "logits_all"}) as llm:
            assert llm.perplexity(text) == pytest.approx(whole, rel=1e-4)


def test_perplexity_of_too_little(tiny_model: Path) -> None:
    with load(tiny_model) as llm:
        with pytest.raises(ArgumentError, match=r"1 token\(s\)"):
            llm.perplexity("")
        for n_window in (1, 257):
            with pytest.raises(ArgumentError, match=rf"n_window={n_window} is not in \[2, 256\]"):
                llm.perplexity(TEXT, n_window=n_window)


# ---- the end ----


def test_nothing_works_after_close(tiny_model: Path) -> None:
    llm = load(tiny_model)
    stream = llm("hello", max_tokens=8, stream=True)
    next(stream)
    llm.close()
    calls = [
        lambda: llm("hello"),
        lambda: llm.eval([5]),
        lambda: llm.tokenize(b"x"),
        lambda: llm.detokenize([5]),
        lambda: llm.n_vocab(),
        lambda: llm.ctx,
        lambda: llm.save_state(),
        lambda: llm.perplexity("x y"),
        lambda: llm.reset(),
    ]
    for call in calls:
        with pytest.raises(StateError, match="closed"):
            call()
    with pytest.raises(StateError, match="ended by"):
        next(stream)


def test_close_frees_the_arrays(tiny_model: Path) -> None:
    llm = load(tiny_model, logits_all=True)
    scores = weakref.ref(llm.scores)
    llm.close()
    gc.collect()
    assert scores() is None and llm.n_tokens == 0


def test_fifty_loads(tiny_model: Path) -> None:
    printed = run_script(f"""
        import gc, os, hotmoe
        import numpy as np

        def rss():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

        hotmoe.sim.load(mib=256)
        sizes = []
        for i in range(50):
            options = dict(n_ctx=64, n_threads=1, logits_all=True, verbose=False)
            llm = hotmoe.Llama({str(tiny_model)!r}, expert_cache=hotmoe.ExpertCache(slots=8), **options)
            assert hotmoe.sim.counters().allocated_bytes > 0
            llm("hello", max_tokens=2)
            llm.close()
            assert hotmoe.sim.counters().allocated_bytes == 0
            sizes.append(rss())
        print(np.polyfit(range(40), sizes[10:], 1)[0])
    """)
    slope = float(printed)
    assert abs(slope) < 0.1, f"{slope} MiB per load"
