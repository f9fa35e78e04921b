"""Traces: columns, files, events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotmoe.errors import ArgumentError, HotmoeError, TraceError
from hotmoe.traces import DECODE, PREFILL, Events, Trace, TraceBank

ENDINGS = [".csv", ".npz", ".parquet"]
COLUMNS = ("phase", "prompt", "turn", "token", "layer", "bank", "experts")


def same(one: Trace, two: Trace) -> bool:
    """Whether two traces are equal but for their names."""
    for name in (*COLUMNS, "step", "weights"):
        a, b = getattr(one, name), getattr(two, name)
        if (a is None) != (b is None):
            return False
        if a is not None and (a.dtype != b.dtype or not np.array_equal(a, b, equal_nan=a.dtype.kind == "f")):
            return False
    return (one.banks, one.model, one.about) == (two.banks, two.model, two.about)


def simple(rows: list[tuple[int, int, int, list[int]]], n_expert: int = 8, **more: Any) -> Trace:
    """Return a trace of (phase, token, layer, experts) rows."""
    k = max(len(experts) for *_, experts in rows)
    return Trace(
        phase=np.array([row[0] for row in rows]),
        token=np.array([row[1] for row in rows]),
        layer=np.array([row[2] for row in rows]),
        experts=np.array([row[3] + [-1] * (k - len(row[3])) for row in rows]),
        banks=tuple(TraceBank(layer, 0, n_expert) for layer in sorted({row[2] for row in rows})),
        **more,
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Traces with everything that a trace can have."""
    keys = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=1, max_size=4, unique=True))
    known = draw(st.booleans())
    banks = [
        TraceBank(layer, bank, draw(st.integers(3, 9)), draw(st.integers(1, 10**10)) if known else None) for layer, bank in keys
    ]
    positions = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 1), st.integers(0, 9), st.sampled_from(banks))
    rows = draw(st.lists(positions, max_size=12, unique=True))
    ids = [draw(st.lists(st.integers(0, bank.n_expert - 1), min_size=1, max_size=3)) for *_, bank in rows]
    k = max(map(len, ids), default=0)
    experts = np.array([row + [-1] * (k - len(row)) for row in ids], dtype=np.int32).reshape(len(rows), k)
    weights = None
    if rows and draw(st.booleans()):
        weights = np.where(experts >= 0, draw(st.floats(0, 1, width=32)) * (1 + experts), np.nan).astype(np.float32)
        if draw(st.booleans()):
            weights[0] = np.nan
    return Trace(
        prompt=np.array([row[0] for row in rows]),
        turn=np.array([row[1] for row in rows]),
        phase=np.array([row[2] for row in rows]),
        token=np.array([row[3] for row in rows]),
        layer=np.array([row[4].layer for row in rows]),
        bank=np.array([row[4].bank for row in rows]),
        step=np.arange(len(rows)) + 2**40 if draw(st.booleans()) else None,
        experts=experts,
        weights=weights,
        banks=tuple(banks),
        model=draw(st.sampled_from(["", "a model"])),
        about=draw(st.dictionaries(st.sampled_from(["source", "licence"]), st.sampled_from(["here, there = 3", "MIT"]))),
    )


# ---- files ----


@pytest.mark.parametrize("ending", ENDINGS)
@given(trace=traces())
@settings(deadline=None, max_examples=60)
def test_what_is_written_can_be_read(tmp_path_factory: pytest.TempPathFactory, ending: str, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("trace") / f"t{ending}"
    trace.save(path)
    read = Trace.load(path)
    assert same(read, trace)
    assert read.name == str(path)


def test_numpy_reads_npz_in_one_call(tmp_path: Path) -> None:
    trace = simple([(PREFILL, 0, 0, [3, 1]), (DECODE, 1, 0, [2])])
    trace.save(tmp_path / "t.npz")
    file = np.load(tmp_path / "t.npz")  # no pickle
    assert file["experts"].tolist() == [[3, 1], [2, -1]]
    assert file["phase"].tolist() == [1, 0]
    assert file["banks"].tolist() == [[0, 0, 8, -1]]


def test_pandas_like_readers_see_plain_columns_in_parquet(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    simple([(PREFILL, 0, 0, [3, 1]), (DECODE, 1, 0, [2])]).save(tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    assert table["phase"].to_pylist() == ["prefill", "decode"]
    assert table["experts"].to_pylist() == [[3, 1], [2]]


SHARED = Path(__file__).parent / "traces"


@pytest.mark.parametrize(
    ("name", "n_layers", "n_expert", "n_used", "generated", "sized"),
    [
        ("qwen3-30b-a3b_top6", 48, 128, 6, 128, True),
        ("gpt-oss-120b_top2", 36, 128, 2, 64, True),
        ("olmoe-1b-7b-0125_top8", 16, 64, 8, 299, False),
    ],
)
def test_published_traces(name: str, n_layers: int, n_expert: int, n_used: int, generated: int, sized: bool) -> None:
    trace = Trace.load(SHARED / f"{name}.csv")
    assert [bank.layer for bank in trace.banks] == list(range(n_layers))
    assert {bank.n_expert for bank in trace.banks} == {n_expert}
    assert set(trace.n_used_of_banks()) == {n_used} == set(trace.n_used.tolist())
    assert trace.n_tokens(DECODE) == generated
    assert all((bank.expert_bytes is not None) == sized for bank in trace.banks)
    assert trace.about["licence"] == "Apache-2.0"
    assert trace.weights is trace.step is None


HEAD = "# meta=n_expert=8 n_expert_used=2\nphase,token,layer,experts\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rows"),
        ("# meta=n_expert=8\n", "phase,token,layer,experts"),
        ("token,layer,experts\n0,0,1\n", "line 1: there is no column 'phase'"),
        ("phase,token,layer,experts,colour\n", "column 'colour' is unknown"),
        (HEAD + "decode,0,0\n", "line 3: 3 fields, but there are 4 columns"),
        (HEAD + "decode,0,0,1 2\nwarmup,1,0,1 2\n", "line 4: phase is 'warmup': it must be prefill or decode"),
        (HEAD + "decode,0,0,1 2\ndecode,x,0,1 2\n", "line 4: token has 'x', which is not an integer"),
        (HEAD + "decode,99999999999,0,1 2\n", "token has '99999999999', which is not an integer of 32 bits"),
        (HEAD + "decode,0,0,1 2\ndecode,1,0,1 b\n", "line 4: experts has 'b'"),
        (HEAD + "decode,0,0,1 2\n\ndecode,1,0,1 8\n", "line 5: expert 8: layer 0 has 8 experts, 0 to 7"),
        (HEAD + "decode,0,0,1 -2\n", "line 3: experts are [1, -2]"),
        (HEAD + "decode,0,0,1 2\ndecode,1,0,\n", "line 4: there are no experts"),
        (HEAD + "decode,-1,0,1 2\n", "line 3: token is -1: it must not be negative"),
        (HEAD + "decode,0,0,1 2\ndecode,0,0,3 4\n", "line 4: token 0 of layer 0 is there a second time"),
        ("# n_expert_per_layer=8 9\nphase,token,layer,experts\ndecode,0,0,1\n", "n_expert_per_layer has 2 numbers, but 1 layers"),
        ("# meta=n_expert=many\nphase,token,layer,experts\ndecode,0,0,1\n", "many"),
        ("# meta=n_expert=8\nphase,token,layer,experts,weights\ndecode,0,0,1 2,0.5\n", "line 3: 1 weights for 2 experts"),
        ("# meta=n_expert=8\nphase,token,layer,experts,bank\ndecode,0,0,1 2,2\n", "line 3: bank is 2: it must be 0 or 1"),
        ("# meta=n_expert=8\n# layers=1\nphase,token,layer,experts\ndecode,0,0,1\n", "line 4: layer 0, bank 0 is not one"),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        Trace.load(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_other_bad_files(tmp_path: Path) -> None:
    for name in ("no.csv", "no.npz", "no.parquet"):
        with pytest.raises(TraceError, match="does not exist"):
            Trace.load(tmp_path / name)
    for name in ("junk.csv", "junk.npz", "junk.parquet"):
        (tmp_path / name).write_bytes(b"\x93\xff\x00 junk" * 9)
        with pytest.raises(TraceError, match="junk"):
            Trace.load(tmp_path / name)
    np.savez(tmp_path / "other.npz", phase=np.zeros(3))
    with pytest.raises(TraceError, match="lacks the array 'prompt'"):
        Trace.load(tmp_path / "other.npz")
    trace = simple([(DECODE, 0, 0, [1])])
    for path in (tmp_path / "t.txt", tmp_path / "t"):
        with pytest.raises(HotmoeError, match=r"\.csv, \.npz, \.parquet"):
            trace.save(path)
        with pytest.raises(TraceError, match=r"\.csv, \.npz, \.parquet"):
            Trace.load(path)
    with pytest.raises(TraceError, match="cannot write"):
        trace.save(tmp_path / "nowhere" / "t.npz")


def test_unknown_number_of_experts_is_said(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("phase,token,layer,experts\ndecode,0,0,1 5\n")
    with pytest.warns(UserWarning, match="so 6 is taken.*n_expert=N"):
        assert Trace.load(path).banks == (TraceBank(0, 0, 6),)


def test_columns_that_do_not_fit_each_other() -> None:
    with pytest.raises(TraceError, match="length"):
        Trace(phase=[0], token=[0, 1], layer=[0], experts=[[1]], banks=(TraceBank(0, 0, 4),))  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="shape"):
        simple([(DECODE, 0, 0, [1, 2])], weights=np.ones((1, 3)))


def test_parts() -> None:
    trace = simple([(PREFILL, 0, 0, [3, 1]), (PREFILL, 1, 0, [2, 5]), (DECODE, 2, 0, [2, 3])], step=np.array([1, 1, 2]))
    assert (trace.n_tokens(PREFILL), trace.n_tokens(DECODE)) == (2, 1)
    prompt = trace.rows(trace.phase == PREFILL)
    assert prompt.experts.tolist() == [[3, 1], [2, 5]]
    assert same(Trace.concat([prompt, trace.rows(np.array([2]))]), trace)
    one = trace.rows(np.array([2]))
    one.experts = one.experts[:, :1]
    assert Trace.concat([prompt, one]).experts.tolist() == [[3, 1], [2, 5], [2, -1]]
    with pytest.raises(ArgumentError, match="different models"):
        Trace.concat([trace, simple([(DECODE, 0, 1, [1])])])


# ---- events ----


def as_lists(events: Events) -> list[tuple[int, int, list[int]]]:
    """Return (phase, bank, experts) of each event."""
    lists = np.split(events.experts, events.offsets[1:-1])
    return [(p, b, e.tolist()) for p, b, e in zip(events.phase.tolist(), events.bank.tolist(), lists, strict=True)]


def test_a_prompt_is_one_event_per_layer_and_a_token_is_one_per_layer() -> None:
    rows = [
        (PREFILL, 0, 0, [3, 1]), (PREFILL, 0, 2, [0, 7]),
        (PREFILL, 1, 0, [1, 2]), (PREFILL, 1, 2, [7, 4]),
        (PREFILL, 2, 0, [3, 6]),
        (DECODE, 3, 0, [5, 1]), (DECODE, 3, 2, [2, 3]),
        (DECODE, 4, 0, [5, 2]), (DECODE, 4, 2, [2, 4]),
    ]  # fmt: skip
    trace = simple(rows, step=np.array([1, 1, 1, 1, 2, 3, 3, 4, 4]))
    events = Events.of(trace)
    assert as_lists(events) == [
        (PREFILL, 0, [3, 1, 1, 2, 3, 6]), (PREFILL, 1, [0, 7, 7, 4]),
        (DECODE, 0, [5, 1]), (DECODE, 1, [2, 3]), (DECODE, 0, [5, 2]), (DECODE, 1, [2, 4]),
    ]  # fmt: skip
    assert events.n_tokens.tolist() == [3, 3, 1, 1, 1, 1]
    assert events.n_rows.tolist() == [3, 2, 1, 1, 1, 1]
    assert events.step.tolist() == [1, 1, 2, 2, 3, 3]
    assert events.generated.tolist() == [0, 0, 0, 0, 1, 1]
    assert (events.n_prefill_tokens, events.n_decode_tokens) == (3, 2)

    events = Events.of(trace, "ubatch")
    assert as_lists(events)[:3] == [(PREFILL, 0, [3, 1, 1, 2]), (PREFILL, 1, [0, 7, 7, 4]), (PREFILL, 0, [3, 6])]
    assert events.engine_phase.tolist() == [PREFILL, PREFILL, DECODE, DECODE, DECODE, DECODE, DECODE], "as the engine sees it"
    assert events.step.tolist() == [1, 1, 2, 3, 3, 4, 4]
    assert (events.n_prefill_tokens, events.n_decode_tokens) == (3, 2)

    some = events.where(events.bank == 1)
    assert as_lists(some) == [(PREFILL, 1, [0, 7, 7, 4]), (DECODE, 1, [2, 3]), (DECODE, 1, [2, 4])]


def test_prompts_and_turns_are_events_of_their_own() -> None:
    rows = [(PREFILL, 0, 0, [1]), (PREFILL, 0, 0, [2]), (DECODE, 1, 0, [3]), (PREFILL, 2, 0, [4]), (DECODE, 3, 0, [5])]
    trace = simple(rows, prompt=np.array([0, 1, 1, 1, 1]), turn=np.array([0, 0, 0, 1, 1]))
    assert [e for *_, e in as_lists(Events.of(trace))] == [[1], [2], [3], [4], [5]]
    with pytest.raises(ArgumentError, match="no column `step`"):
        Events.of(trace, "ubatch")
    with pytest.raises(ArgumentError, match="turn, ubatch"):
        Events.of(trace, "token")


@given(trace=traces())
@settings(deadline=None)
def test_events_have_every_expert_once(trace: Trace) -> None:
    for group in ("turn", "ubatch")[: 1 + (trace.step is not None)]:
        events = Events.of(trace, group)
        assert sorted(events.experts.tolist()) == sorted(trace.experts[trace.experts >= 0].tolist())
        assert events.offsets[0] == 0 and events.offsets[-1] == len(events.experts)
        assert (np.diff(events.offsets) > 0).all()
