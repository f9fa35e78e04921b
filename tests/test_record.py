"""Recording: what was routed, by whom it is confirmed, and that it changes nothing."""

from __future__ import annotations

import copy
import ctypes
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import hotmoe
from hotmoe._vendor.llama_cpp import llama_cpp as ll
from hotmoe._vendor.llama_cpp._ggml import libggml
from hotmoe.cli.demo import shipped_model
from hotmoe.errors import ArgumentError, StateError
from hotmoe.plan import PlanBank
from hotmoe.traces import DECODE, PREFILL, Trace
from hotmoe.traces.record import read_prompts, record
from hotmoe.traces.take import take_trace
from tests.harness import ALL, Pool, Runner
from tests.models import cached_model


def load(model: Path, cache: hotmoe.ExpertCache | None, **options: Any) -> hotmoe.Llama:
    """Load quietly, with a small context, one thread."""
    defaults = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    return hotmoe.Llama(model, expert_cache=cache, **(defaults | options))


def recorder(**options: Any) -> hotmoe.ExpertCache:
    return hotmoe.ExpertCache(**({"slots": 0, "record": True} | options))


def taken_from(pool: Pool) -> Trace:
    """Return what a pool of the harness recorded."""
    names = ("layer", "bank", "n_expert", "n_expert_used", "n_slots", "n_tensors", "expert_bytes", "pool_bytes")
    rows = [{name: getattr(pool.bank(i), name) for name in names} for i in range(pool.n_banks)]
    return take_trace(pool.cache, [PlanBank(**row, pooled=False, device="", reason="") for row in rows])


# ---- what was routed ----


class _Tensor(ctypes.Structure):  # the beginning of struct ggml_tensor
    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4))


def _rows(tensor: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Return the values of a tensor in host memory, strides followed, as [rows, k]; the k are the experts of a token."""
    t = _Tensor.from_address(tensor)
    libggml.ggml_get_data.restype, libggml.ggml_get_data.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    data = libggml.ggml_get_data(tensor)
    size = sum((n - 1) * b for n, b in zip(t.ne, t.nb, strict=True)) + 4
    memory = np.frombuffer((ctypes.c_char * size).from_address(data), dtype=np.uint8)
    strided = np.lib.stride_tricks.as_strided(memory[:4].view(dtype), tuple(t.ne)[::-1], tuple(t.nb)[::-1])
    k = next((n for n in t.ne if n > 1), 1)
    return np.array(strided).reshape(-1, k)


class Eavesdropper:
    """An eval callback that keeps the last router ids and weights of each layer, by their names in the graph."""

    def __init__(self) -> None:
        self.ids: dict[int, Any] = {}
        self.weights: dict[int, Any] = {}
        libggml.ggml_get_name.restype, libggml.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]

        @ll.ggml_backend_sched_eval_callback
        def callback(tensor: int, ask: bool, user_data: int) -> bool:
            name, _, layer = libggml.ggml_get_name(tensor).decode().rpartition("-")
            topk = name == "ffn_moe_topk"
            wanted = topk or (name.startswith("ffn_moe_weights") and "_sum" not in name and layer.isdigit())
            if wanted and not ask:
                (self.ids if topk else self.weights)[int(layer)] = _rows(tensor, np.int32 if topk else np.float32)
            return wanted if ask else True

        self.callback = callback


@pytest.mark.parametrize("arch", ["olmoe", "qwen3moe", "deepseek2", "nemotron_h_moe", "gpt-oss"])
def test_the_graphs_own_ids_and_weights(arch: str) -> None:
    """An eval callback, under which nothing is recorded, sees the same."""
    path = cached_model(arch=arch)
    heard, expected = Eavesdropper(), []
    with Runner(path, cpu_moe=ALL, devices=(), cb_eval=heard.callback) as runner:
        batches = [[5, 6, 7, 300, 8], [9], [400]]
        for tokens in batches:
            runner.decode(tokens)
            expected.append((dict(heard.ids), dict(heard.weights)))
    with Runner(path, cpu_moe=ALL, devices=()) as runner, Pool(runner, 0, strict=False, record=True) as pool:
        for tokens, (ids, weights) in zip(batches, expected, strict=True):
            runner.decode(tokens)
            trace = taken_from(pool)
            assert set(trace.layer.tolist()) == set(ids) and len(ids) > 0
            for layer, theirs in ids.items():
                mine = trace.rows(trace.layer == layer)
                k = mine.n_used[0]
                assert mine.token.tolist() == list(range(len(tokens)))
                assert np.array_equal(mine.experts[:, :k], theirs.reshape(len(tokens), k))
                assert mine.weights is not None
                assert np.array_equal(mine.weights[:, :k], weights[layer].reshape(len(tokens), k)), "bit for bit"
                assert (mine.weights[:, :k] > 0).all()


def test_normalised_weights_sum_up_to_one() -> None:
    with load(cached_model(arch="qwen3moe"), recorder()) as llm:
        trace = record(llm, ["hello"], n_tokens=4)
    assert trace.weights is not None
    assert np.allclose(np.nansum(trace.weights, axis=1), 1, atol=1e-5)


def test_two_banks_and_layers_that_differ() -> None:
    with load(cached_model(arch="grovemoe"), recorder()) as llm:
        trace = record(llm, ["hello"], n_tokens=4)
    assert {(bank.layer, bank.bank) for bank in trace.banks} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert set(trace.bank.tolist()) == {0, 1}
    with load(cached_model(arch="nemotron_h_moe"), recorder()) as llm:
        trace = record(llm, [["hello", "again"]], n_tokens=4)  # a recurrent model
    assert len(set(trace.n_used_of_banks())) > 1 and (trace.experts == -1).any()
    assert trace.turn.max() == 1


# ---- what was prompt and what was generated ----


def test_phases_tokens_and_layers() -> None:
    with load(shipped_model(), recorder(), n_ubatch=4, n_batch=16) as llm:
        text = llm.detokenize(llm.tokenize(b"def main(argv): return json.loads(argv[1], object_hook=None)")[:21]).decode()
        n_prompt = len(llm.tokenize(text.encode()))
        trace = record(llm, [text, "import"], n_tokens=6)
        n_second = len(llm.tokenize(b"import"))
    assert n_prompt % 4 == 1, "the prompt's last ubatch has one token, like a generated one"
    first = trace.rows(trace.prompt == 0)
    for layer in range(8):
        mine = first.rows(first.layer == layer)
        # in the last layer, only tokens whose output is wanted are computed: the last ones of each batch of 16
        expected = [15, n_prompt - 1] if layer == 7 else list(range(n_prompt))
        assert mine.token[mine.phase == PREFILL].tolist() == sorted(set(expected) & set(range(n_prompt)))
        assert mine.token[mine.phase == DECODE].tolist() == list(range(n_prompt, n_prompt + 6))
    second = trace.rows(trace.prompt == 1)
    assert second.token.min() == 0 and second.n_tokens(PREFILL) == n_second
    assert trace.turn.max() == 0
    assert (np.diff(trace.step) >= 0).all()  # type: ignore[arg-type]
    assert {(bank.n_expert, bank.expert_bytes is not None) for bank in trace.banks} == {(32, True)}
    assert trace.model == shipped_model().stem


def test_turns_evaluate_what_is_new() -> None:
    with load(shipped_model(), recorder()) as llm:
        trace = record(llm, [["def main():", "    import"], "x = 1"], n_tokens=5)
        n_first, n_second = len(llm.tokenize(b"def main():")), len(llm.tokenize(b"    import", add_bos=False))
    mine = trace.rows((trace.prompt == 0) & (trace.layer == 0))
    assert mine.token.tolist() == list(range(n_first + 5 + n_second + 5)), "each token once"
    assert mine.turn.tolist() == [0] * (n_first + 5) + [1] * (n_second + 5)
    assert mine.phase.tolist() == [PREFILL] * n_first + [DECODE] * 5 + [PREFILL] * n_second + [DECODE] * 5


def test_the_chat_template() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    with load(shipped_model(), recorder()) as llm:
        with pytest.raises(ArgumentError, match="no chat template"):
            record(llm, ["hello"], chat=True)
        llm.metadata["tokenizer.chat_template"] = template
        raw = record(llm, ["hello"], n_tokens=3)
        chat = record(llm, ["hello"], n_tokens=3, chat=True)
        talk = record(llm, [["hello"]], n_tokens=3)
        n_chat = len(llm.tokenize(b"user: hello\nassistant:", special=True))
    assert raw.n_tokens(PREFILL) < chat.n_tokens(PREFILL) == n_chat
    assert np.array_equal(chat.experts, talk.experts), "conversations go through the template by themselves"


def test_greedy_is_reproducible_and_a_seed_is() -> None:
    with load(shipped_model(), recorder()) as llm:
        runs = [
            record(llm, ["def main"], n_tokens=12, **o).experts
            for o in ({}, {}, {"temp": 1.5, "seed": 1}, {"temp": 1.5, "seed": 1})
        ]
    assert np.array_equal(runs[0], runs[1]) and np.array_equal(runs[2], runs[3])
    assert not np.array_equal(runs[0], runs[2])


def test_a_full_context_ends_an_answer() -> None:
    with load(shipped_model(), recorder()) as llm:
        text = "import json\n" * 100
        prompt = llm.detokenize(llm.tokenize(text.encode())[:250]).decode()
        trace = record(llm, [prompt], n_tokens=100)
        assert trace.token.max() == 255
        with pytest.raises(ArgumentError, match=r"prompt 1 has \d+ tokens.*room for 256"):
            record(llm, [text])


def test_progress() -> None:
    calls: list[tuple[int, int]] = []
    with load(shipped_model(), recorder()) as llm:
        record(llm, ["a", ["b", "c"]], n_tokens=2, progress=lambda *done: calls.append(done))
    assert calls == [(1, 3), (2, 3), (3, 3)]


# ---- the cache that records ----


def test_take_trace_takes(tiny_model: Path) -> None:
    with load(tiny_model, recorder()) as llm:
        llm.eval([5, 6, 7])
        llm.eval([8])
        trace = llm.expert_cache.take_trace()  # type: ignore[union-attr]
        assert (trace.n_tokens(PREFILL), trace.n_tokens(DECODE)) == (3, 1)
        assert len(llm.expert_cache.take_trace()) == 0  # type: ignore[union-attr]
        assert not any(bank.pooled for bank in llm.expert_cache.plan.banks)  # type: ignore[union-attr]


def test_who_does_not_record(tiny_model: Path) -> None:
    with load(tiny_model, hotmoe.ExpertCache(slots=0)) as llm:
        with pytest.raises(StateError, match="record=True"):
            llm.expert_cache.take_trace()  # type: ignore[union-attr]
        with pytest.raises(ArgumentError, match="record=True"):
            record(llm, ["hello"])
    with pytest.raises(StateError, match="no model"):
        recorder().take_trace()


def test_the_wish_survives_copying() -> None:
    assert "record=True" in repr(copy.deepcopy(recorder(slots=8)))
    assert copy.copy(recorder()).records and not hotmoe.ExpertCache().records


@pytest.mark.parametrize("place", ["host", "device", "pool"])
def test_recording_does_not_change_logits(sim: ModuleType, place: str) -> None:
    options: dict[str, Any] = {
        "host": {"cpu_moe": True, "n_gpu_layers": -1},
        "device": {"cpu_moe": False, "n_gpu_layers": -1},
        "pool": {},
    }[place]
    for arch in ("olmoe", "gpt-oss", "gemma4"):
        path = cached_model(arch=arch)
        logits = []
        for record_it in (False, True):
            cache = hotmoe.ExpertCache(slots=16 if place == "pool" else 0, record=record_it)
            with load(path, cache, logits_all=True, n_ubatch=4, **options) as llm:
                llm.eval([5, 6, 7, 8, 300, 9])
                for token in (10, 400, 11):
                    llm.eval([token])
                logits.append(llm.scores[:9].tobytes())
                if record_it:
                    trace = cache.take_trace()
                    assert len(trace) == 9 * len(trace.banks)
                    assert (cache.stats().total.events > 0) == (place == "pool")
        assert logits[0] == logits[1]


# ---- prompts ----


def test_files_of_prompts(tmp_path: Path) -> None:
    text = tmp_path / "p.txt"
    text.write_text("one\ntwo\n\n  \nthree\nfour\n")
    assert read_prompts(text) == ["one", "two", "three", "four"]
    assert read_prompts(text, "blank") == ["one\ntwo", "three\nfour"]
    assert read_prompts(text, "none") == ["one\ntwo\n\n  \nthree\nfour"]
    assert read_prompts(text, "blank", multi_turn=True) == [["one\ntwo", "three\nfour"]]
    lines = tmp_path / "p.jsonl"
    lines.write_text(json.dumps("one") + "\n\n" + json.dumps(["two", "three"]) + "\n")
    assert read_prompts(lines) == ["one", ["two", "three"]]
    for bad, words in (
        ('"one"\n{', "line 2"),
        ('{"a": 1}', "expected a string"),
        ("[]", "list of strings"),
        ("[1]", "list"),
        ("", "no prompts"),
    ):
        lines.write_text(bad)
        with pytest.raises(ArgumentError, match=words):
            read_prompts(lines)
    with pytest.raises(ArgumentError, match="cannot read"):
        read_prompts(tmp_path / "none.txt")


def test_nothing_to_record() -> None:
    with load(shipped_model(), recorder()) as llm:
        with pytest.raises(ArgumentError, match="no prompt"):
            record(llm, [])
        with pytest.raises(ArgumentError, match="prompt 2 is empty"):
            record(llm, ["a", " "], n_tokens=1)
        with pytest.raises(ArgumentError, match="turn 2 of conversation 1 is empty"):
            record(llm, [["a", ""]], n_tokens=1)


def test_many_sequences_at_once(tiny_model: Path) -> None:
    """Not what `record` does, but what the cache keeps all the same."""
    with Runner(tiny_model, cpu_moe=ALL, n_seq_max=2, devices=()) as runner, Pool(runner, 0, strict=False, record=True) as pool:
        runner.fill([(5, 0, 0), (6, 0, 1)])
        assert ll.llama_decode(runner.ctx, runner.batch) == 0
        trace = taken_from(pool)
    assert trace.phase.tolist() == [DECODE] * 4 and trace.token.tolist() == [0, 0, 1, 1]
