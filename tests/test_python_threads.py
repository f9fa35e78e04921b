"""Several threads on one object, and several objects in one process (CASES 7 and 34)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hotmoe
from hotmoe._turns import Turns
from hotmoe._vendor.llama_cpp import llama_cpp
from hotmoe.errors import BusyError, StateError
from tests.harness import ALL, Pool, Runner, equal_bits, tokens_for

PROMPTS = ["hello", "good day", "one two three", "a b c d e f", "the fox", "lazy dogs", "x", "what is it"]


def load(path: Path, **options: Any) -> hotmoe.Llama:
    return hotmoe.Llama(path, **{"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **options})


def in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """Run functions at the same time; return their results."""
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        start.wait()
        return function()

    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(run, f) for f in functions]]


def streamed(llm: hotmoe.Llama, prompt: str) -> str:
    return "".join(c["choices"][0]["text"] for c in llm(prompt, max_tokens=12, temperature=0, stream=True))


# ---- one object ----


@pytest.fixture
def llm(sim: ModuleType, tiny_model: Path) -> Iterator[hotmoe.Llama]:
    with load(tiny_model, expert_cache=hotmoe.ExpertCache(slots=8)) as model:
        yield model


def test_eight_threads_take_turns(llm: hotmoe.Llama) -> None:
    expected = []
    for prompt in PROMPTS:
        llm.reset()
        expected.append(llm(prompt, max_tokens=12, temperature=0)["choices"][0]["text"])
    assert len(set(expected)) == 8

    def work(prompt: str) -> list[str]:
        whole = [llm(prompt, max_tokens=12, temperature=0)["choices"][0]["text"] for _ in range(2)]
        return [*whole, streamed(llm, prompt)]

    results = in_threads([lambda prompt=prompt: work(prompt) for prompt in PROMPTS])  # type: ignore[misc]
    assert results == [[text] * 3 for text in expected]


def test_other_calls_wait_too(llm: hotmoe.Llama) -> None:
    expected = streamed(llm, "hello")
    perplexity = llm.perplexity("one two three four")
    calls: list[Callable[[], Any]] = [
        lambda: streamed(llm, "hello"),
        lambda: llm.perplexity("one two three four"),
        lambda: llm.load_state(llm.save_state()),
        lambda: llm.eval(llm.tokenize(b"xy")) if llm.n_tokens < 100 else None,
        lambda: llm.reset(),
    ]
    for _ in range(3):
        results = in_threads(calls)
        assert results[:2] == [expected, perplexity]


def test_a_stream_is_one_turn(llm: hotmoe.Llama) -> None:
    expected = streamed(llm, "hello")
    stream = llm("hello", max_tokens=12, temperature=0, stream=True)
    text = next(stream)["choices"][0]["text"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(streamed, llm, "good day")
        with pytest.raises(concurrent.futures.TimeoutError):
            other.result(timeout=0.3)
        text += "".join(chunk["choices"][0]["text"] for chunk in stream)
        assert text == expected
        assert other.result(timeout=60)


def test_items_of_a_stream_may_go_to_several_threads(llm: hotmoe.Llama) -> None:
    """As web frameworks do, which also begin other requests in the same threads."""
    expected = streamed(llm, "hello")
    stream = llm("hello", max_tokens=12, temperature=0, stream=True)
    with concurrent.futures.ThreadPoolExecutor(1) as first, concurrent.futures.ThreadPoolExecutor(1) as second:
        text = ""
        for i in range(2):
            text += (first, second)[i].submit(lambda: next(stream)["choices"][0]["text"]).result(timeout=60)
        other = first.submit(streamed, llm, "good day")
        for chunk in iter(lambda: second.submit(next, stream, None).result(timeout=60), None):
            text += chunk["choices"][0]["text"]
        assert text == expected and other.result(timeout=60)


def test_a_stream_that_is_dropped_or_closed_is_over(llm: hotmoe.Llama) -> None:
    for drop in (lambda stream: stream.close(), lambda stream: None):
        stream = llm("hello", max_tokens=12, stream=True)
        next(stream)
        drop(stream)
        del stream
        gc.collect()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(streamed, llm, "good day").result(timeout=60)


def test_a_new_generation_ends_the_streams_of_its_thread(llm: hotmoe.Llama) -> None:
    expected = streamed(llm, "good day")
    stream = llm("hello", max_tokens=12, stream=True)
    next(stream)
    assert llm.save_state().n_tokens == llm.n_tokens > 0, "other calls of the thread go through"
    assert streamed(llm, "good day") == expected
    with pytest.raises(BusyError, match="ended by a later generation"):
        next(stream)
    assert streamed(llm, "good day") == expected


def test_calls_from_inside_a_call(llm: hotmoe.Llama) -> None:
    import hotmoe.llama_cpp as api

    seen = []

    def look(input_ids: Any, scores: Any) -> Any:
        seen.append(llm.save_state().n_tokens)
        return scores

    def shut(input_ids: Any, scores: Any) -> Any:
        with pytest.raises(BusyError, match="inside a call"):
            llm.close()
        seen.append(-1)
        return scores

    llm("hello", max_tokens=2, logits_processor=api.LogitsProcessorList([look, shut]))
    assert len(seen) == 4 and seen[1] == -1


def test_close_waits_for_the_call_at_work(sim: ModuleType, tiny_model: Path) -> None:
    llm = load(tiny_model, expert_cache=hotmoe.ExpertCache(slots=8), n_ctx=1024)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(llm, "hello", max_tokens=100, temperature=0)
        while not llm.n_tokens:
            time.sleep(0.001)
        llm.close()
        assert future.result(timeout=60)["usage"]["completion_tokens"] >= 100
    assert sim.counters(0).allocated_bytes == 0


@pytest.mark.parametrize("locked", [True, False])
def test_never_two_threads_in_llama_cpp(tiny_model: Path, locked: bool) -> None:
    """And without the lock this test would see them."""
    with load(tiny_model) as llm:
        inside, most = 0, 0

        def decode() -> None:  # in place of llama.cpp, which might crash
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.002)
            inside -= 1

        llm._decode = decode  # type: ignore[method-assign]
        if not locked:
            llm._turns.call = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        in_threads([lambda: [llm.eval([5]) for _ in range(5)]] * 4)
        assert most == 1 if locked else most > 1


def test_turns_without_a_model() -> None:
    turns = Turns()
    order = []

    def numbers() -> Iterator[int]:
        received = yield 1
        order.append(received)
        yield 2

    stream = turns.stream(numbers)  # type: ignore[arg-type]
    assert next(stream) == 1 and stream.send("sent") == 2 and order == ["sent"]
    with turns.call(), turns.call():
        pass
    with pytest.raises(ZeroDivisionError), turns.call():
        _ = 1 / 0
    assert list(stream) == []
    with pytest.raises(ZeroDivisionError):
        list(turns.stream(lambda: (1 / 0 for _ in range(1))))  # type: ignore[arg-type, return-value]
    assert turns.close() and not turns.close()
    with pytest.raises(StateError, match="closed"), turns.call():
        pass


# ---- several objects ----


def test_two_models_in_two_threads(sim: ModuleType, tiny_model: Path) -> None:
    def run(slots: int, prompt: str) -> list[str]:
        with load(tiny_model, expert_cache=hotmoe.ExpertCache(slots=slots)) as model:
            texts = [model(prompt, max_tokens=24, temperature=0)["choices"][0]["text"] for _ in range(3)]
            assert model.expert_cache is not None and model.expert_cache.stats().total.evictions > 0
            return texts

    jobs = [(8, "hello"), (12, "good day")]
    expected = [run(*job) for job in jobs]
    for _ in range(2):
        assert in_threads([lambda job=job: run(*job) for job in jobs]) == expected  # type: ignore[misc]
    assert sim.counters(0).allocated_bytes == 0


@pytest.mark.parametrize("strict", [0, 2])
def test_two_contexts_of_one_model(sim: ModuleType, tiny_model: Path, strict: int) -> None:
    """Interleaved and from two threads, each with its own pool: each equals its solo run, bit for bit."""
    sim.set_strict(strict, seed=3)
    try:
        with Runner(tiny_model, cpu_moe=ALL) as a, Runner.sharing(a) as b:
            tokens = [tokens_for(60, a.n_vocab, seed) for seed in (1, 2)]
            with Pool(a, 8) as pool:
                first = a.run(tokens[0], 1)
                assert pool.stats().evictions > 0
            second = b.run(tokens[1], 1)  # no pool at all
            with Pool(a, 8) as pool_a, Pool(b, 6, "fifo") as pool_b:
                a.reset()
                b.reset()
                for i in range(60):
                    assert equal_bits(a.decode(tokens[0][i : i + 1]), first[i : i + 1]), i
                    assert equal_bits(b.decode(tokens[1][i : i + 1]), second[i : i + 1]), i
                for _ in range(3):
                    results = in_threads([lambda: a.run(tokens[0], 1), lambda: b.run(tokens[1], 1)])
                    assert equal_bits(results[0], first) and equal_bits(results[1], second)
                assert pool_a.wrong_slots() == [] and pool_b.wrong_slots() == []
                assert min(pool_a.stats().evictions, pool_b.stats().evictions) > 0
    finally:
        sim.set_strict(0)


def test_counters_are_read_between_ubatches(sim: ModuleType, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that watches need not wait for the end of a generation, but for llama.cpp."""
    cache = hotmoe.ExpertCache(slots=8)
    with load(tiny_model, expert_cache=cache, n_ctx=1024) as llm:
        inside = threading.Event()
        decode, seen, during = llama_cpp.llama_decode, [], []

        def watched(context: Any, batch: Any) -> int:
            inside.set()
            status = int(decode(context, batch))
            time.sleep(0.001)
            inside.clear()
            return status

        monkeypatch.setattr(llama_cpp, "llama_decode", watched)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(llm, "hello", max_tokens=200, temperature=0)
            while not future.done():
                with cache._evaluating:  # as stats() does
                    during.append(inside.is_set())
                seen.append(cache.stats().total.steps.steps)
                cache.slot_map(0)
        assert len(set(seen)) > 5, "it progressed meanwhile"
        assert not any(during)
        assert seen == sorted(seen)
