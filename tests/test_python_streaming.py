"""A stream, joined, is the text that the same call returns at once (CASE 35)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hotmoe
from hotmoe._streaming import StreamedText, rejoin


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[hotmoe.Llama]:
    with hotmoe.Llama(tiny_model, n_ctx=512, n_threads=1, logits_all=True, verbose=False) as model:
        yield model


def forced(llm: hotmoe.Llama, tokens: list[int], **options: Any) -> tuple[str, str, list[dict[str, Any]]]:
    """Make the model generate given tokens; return (text at once, joined stream, chunks)."""

    def follow(input_ids: Any, scores: Any) -> Any:
        scores[:] = -1e9
        scores[tokens[min(len(input_ids) - n_prompt, len(tokens) - 1)]] = 0.0
        return scores

    import hotmoe.llama_cpp as api

    options = {"logits_processor": api.LogitsProcessorList([follow]), "temperature": 0, "max_tokens": len(tokens), **options}
    n_prompt = len(llm.tokenize(b"hello")) if options.pop("prompt", "hello") else 1
    prompt = "hello" if n_prompt > 1 else ""
    whole = llm.create_completion(prompt, **options)["choices"][0]["text"]
    chunks = list(llm.create_completion(prompt, **options, stream=True))
    return whole, "".join(chunk["choices"][0]["text"] for chunk in chunks), chunks


def in_bytes(text: str | bytes) -> list[int]:
    """Return byte tokens, as vocabularies write characters they have no token for."""
    return [3 + byte for byte in (text.encode() if isinstance(text, str) else text)]


TEXTS: dict[str, str | bytes] = {
    "plain": "abc def",
    "euro": "5 € or 7 €",
    "smile": "a😀b😀",
    "mixed": "Grüße, 世界, 😀",
    "invalid": b"ab\xff\xfecd\x80e",
    "cut short": "ab€".encode()[:-1],
    "invalid, then a character": b"\xffx" + "€uro😀".encode(),
    "end": b"\xf0\x9f",
}


COMPLETED = ("cut short", "end")  # llama-cpp-python generates beyond max_tokens rather than stop inside a character


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("stop", [[], ["zz", "y€"], "€ o"])
def test_joined_stream(llm: hotmoe.Llama, name: str, logprobs: int | None, stop: Any) -> None:
    text = TEXTS[name]
    whole, joined, chunks = forced(llm, in_bytes(text), logprobs=logprobs, stop=stop)
    assert joined == whole
    if not stop and name not in COMPLETED:
        data = text.encode() if isinstance(text, str) else text
        assert whole == data.decode(errors="ignore")
    assert [chunk["choices"][0]["finish_reason"] is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_an_end_token_and_an_empty_prompt(llm: hotmoe.Llama) -> None:
    tokens = [*in_bytes("€ and 😀"), llm.token_eos()]
    whole, joined, chunks = forced(llm, tokens, max_tokens=30)
    assert whole == joined == "€ and 😀"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    whole, joined, _ = forced(llm, in_bytes(" € x"), prompt="", max_tokens=7)  # with the begin token
    assert whole == joined == "€ x", "llama-cpp-python takes the first space away"


def test_it_does_stream(llm: hotmoe.Llama) -> None:
    _, _, chunks = forced(llm, in_bytes("a€bcd"), stop=["xy"])
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts == ["a", "€", "b", "c", "d", ""]


def test_logprobs_keep_their_tokens(llm: hotmoe.Llama) -> None:
    _, _, chunks = forced(llm, in_bytes("abc"), logprobs=1)
    rows = [(c["choices"][0]["text"], c["choices"][0]["logprobs"]["tokens"]) for c in chunks[:-1]]
    assert rows == [("a", ["a"]), ("b", ["b"]), ("c", ["c"])]


def test_random_text(llm: hotmoe.Llama) -> None:
    """Random weights write much that is no UTF-8."""
    seen = set()
    for seed in range(6):
        options = {"max_tokens": 40, "temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed}
        whole = llm("hello", **options)["choices"][0]["text"]
        assert whole == "".join(chunk["choices"][0]["text"] for chunk in llm("hello", **options, stream=True))
        seen.add(whole)
    assert len(seen) == 6


def test_chat(llm: hotmoe.Llama) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    options = {"max_tokens": 24, "temperature": 1.2, "seed": 5}
    whole = llm.create_chat_completion(messages, **options)["choices"][0]["message"]["content"]
    chunks = llm.create_chat_completion(messages, **options, stream=True)
    assert whole == "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_what_may_be_a_stop_sequence_is_held_back() -> None:
    text = StreamedText([b"END"], lambda tokens, before: bytes(tokens))
    text.begin([1])
    taken = []
    for byte in b"an E, an EN, an END":
        text.add(byte)
        taken.append(text.take())
    assert "".join(taken) == "an E, an EN, an "
    assert taken[3] == "" and taken[4] == "E,", "held back until it is certain"
    assert text.finish() == ""


def test_the_rest_comes_before_the_last_chunk() -> None:
    text = StreamedText([], lambda tokens, before: bytes(tokens))
    text.begin([])

    def chunks() -> Iterator[dict[str, Any]]:
        text.add(0xC3)
        yield {"choices": [{"text": "?", "finish_reason": None, "logprobs": None}], "id": "x"}
        text.add(0xA4)
        yield {"choices": [{"text": "?", "finish_reason": "length", "logprobs": None}], "id": "x"}

    out = [(c["choices"][0]["text"], c["choices"][0]["finish_reason"], c["id"]) for c in rejoin(chunks(), text)]
    assert out == [("ä", None, "x"), ("", "length", "x")]
