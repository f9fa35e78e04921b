"""`hotmoe trace` and `hotmoe replay`, run as users run them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hotmoe.cli.demo import shipped_model
from hotmoe.traces import DECODE, PREFILL, Trace
from tests.models import cached_model
from tests.test_cli import hotmoe, succeed

SHARED = Path(__file__).parent / "traces"
OLMOE, QWEN = SHARED / "olmoe-1b-7b-0125_top8.csv", SHARED / "qwen3-30b-a3b_top6.csv"

KEYS = {
    "trace", "policy", "admission", "slots", "accesses", "hits", "misses", "hit_rate", "hit_rate_second_half", "bytes_per_token",
    "scope", "evictions", "worst_layer", "fallbacks", "n_expert",
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("def main(argv):\nThe :mod:`json` module\n")
    return path


def test_record(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    result = succeed("trace", "record", shipped_model(), "--prompts", prompts, "-o", out, "-n", "7", "-c", "256")
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1 and "14 generated" in result.stderr
    trace = Trace.load(out)
    assert trace.n_tokens(DECODE) == 14 and set(trace.prompt.tolist()) == {0, 1}
    assert trace.weights is not None and trace.step is not None
    assert len(trace.banks) == 8 and trace.model == shipped_model().stem

    # with a pool, on a device: the same routing
    other = tmp_path / "pool.npz"
    args = ["-n", "7", "-c", "256", "--sim", "1", "-mec", "8", "--moe-expert-cache-policy", "slru"]
    succeed("trace", "record", shipped_model(), "--prompts", prompts, "-o", other, *args)
    assert (Trace.load(other).experts == trace.experts).all()


def test_record_conversations(tmp_path: Path) -> None:
    lines = tmp_path / "p.jsonl"
    lines.write_text('["def main(argv):", "    return"]\n"import"\n')
    out = tmp_path / "t.csv"
    succeed(
        "trace", "record", shipped_model(), "--prompts", lines, "-o", out, "-n", "5", "-c", "256", "--temp", "1", "--seed", "3"
    )
    trace = Trace.load(out)
    assert sorted(set(zip(trace.prompt.tolist(), trace.turn.tolist(), strict=True))) == [(0, 0), (0, 1), (1, 0)]
    text = tmp_path / "p.txt"
    text.write_text("def main(argv):\n\n    return\n")
    succeed(
        "trace",
        "record",
        shipped_model(),
        "--prompts",
        text,
        "--multi-turn",
        "--split",
        "blank",
        "-o",
        out,
        "-n",
        "5",
        "-c",
        "256",
    )
    assert set(Trace.load(out).turn.tolist()) == {0, 1}


def test_record_any_model(prompts: Path, tmp_path: Path) -> None:
    for arch in ("gpt-oss", "grovemoe"):
        out = tmp_path / f"{arch}.parquet"
        succeed("trace", "record", cached_model(arch=arch), "--prompts", prompts, "-o", out, "-n", "3", "-c", "256", "-cmoe")
        assert Trace.load(out).n_tokens(PREFILL) > 0


def test_info_and_convert(tmp_path: Path) -> None:
    text = succeed("trace", "info", QWEN).stdout
    for words in ("Qwen3-30B-A3B", "48", "128, 6 used per token", "28 of prompts, 128 generated", "Apache-2.0"):
        assert words in text
    out = json.loads(succeed("trace", "info", OLMOE, "--json").stdout)
    assert (out["rows"], out["decode_tokens"], out["has_weights"]) == (4784, 299, False)
    for ending in ("npz", "parquet", "csv"):
        copy = tmp_path / f"copy.{ending}"
        succeed("trace", "convert", OLMOE, copy)
        again = json.loads(succeed("trace", "info", copy, "--json").stdout)
        assert again["rows"] == out["rows"] and again["n_expert"] == out["n_expert"] and again["about"]["licence"] == "Apache-2.0"


def test_replay_json() -> None:
    args = ["--slots", "8,25%", "--policy", "lru,belady,unlimited", "--admission", "always", "--json"]
    result = succeed("replay", OLMOE, QWEN, *args)
    rows = json.loads(result.stdout)
    assert result.stderr == ""
    assert isinstance(rows, list) and len(rows) == 2 * 3 * 2
    for row in rows:
        assert row.keys() >= KEYS
        assert row["hits"] + row["misses"] == row["accesses"] > 0
        assert row["hit_rate"] == row["hits"] / row["accesses"]
        assert (row["bytes_per_token"] is None) == ("olmoe" in row["trace"]), "it does not tell the bytes of an expert"
    found = {(Path(row["trace"]).name, row["policy"], row["requested"]): row for row in rows}
    lru, best = found[QWEN.name, "lru", "25%"], found[QWEN.name, "belady", "25%"]
    assert lru["slots"] == 32 and lru["n_expert"] == 128
    assert lru["hit_rate"] < best["hit_rate"] < found[QWEN.name, "unlimited", "25%"]["hit_rate"]
    assert best["bytes_per_token"] < lru["bytes_per_token"]


def test_replay_shows_a_table() -> None:
    text = succeed("replay", QWEN, "--slots", "16,25%", "--policy", "lru,lru,slru,belady").stdout
    text = " ".join(text.split())  # a terminal's lines end anywhere
    assert "48 layers of 128 experts, 6 per token" in text
    for words in ("32 (25%)", "slru", "belady", "2nd half", "MiB"):
        assert words in text
    assert text.count("lru ") == 4, "a name given twice is one"
    default = succeed("replay", OLMOE).stdout
    assert all(words in default for words in ("10%", "25%", "50%", "lru", "belady"))


def test_replay_with_options_and_admissions() -> None:
    """Commas inside parentheses belong to the options."""
    args = ["replay", OLMOE, "--slots", "16", "--json", "--policy"]
    rows = json.loads(succeed(*args, "lrfu(half_life=4),lrfu(half_life=400)", "--admission", "always,second-miss").stdout)
    assert [(row["policy"], row["admission"]) for row in rows] == [
        ("lrfu(half_life=4)", "always"), ("lrfu(half_life=4)", "second-miss"),
        ("lrfu(half_life=400)", "always"), ("lrfu(half_life=400)", "second-miss"),
    ]  # fmt: skip
    assert len({row["hits"] for row in rows}) == 4


def test_replay_with_a_policy_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mypolicies.py").write_text(
        "from hotmoe.policies import EvictionPolicy\n"
        "class First(EvictionPolicy):\n"
        "    def select_evict(self, layer, n, candidates, **kw):\n"
        "        return candidates[:n]\n"
        "class Broken(EvictionPolicy):\n"
        "    def select_evict(self, layer, n, candidates, **kw):\n"
        "        raise RuntimeError('I cannot decide')\n"
    )
    result = hotmoe("replay", OLMOE, "--slots", "16", "--json", "--policy", "mypolicies:First,lru", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    mine, lru = json.loads(result.stdout)
    assert mine["policy"] == "mypolicies:First" and 0 < mine["hit_rate"] < lru["hit_rate"]
    broken = hotmoe("replay", OLMOE, "--slots", "16", "--policy", "mypolicies:Broken", cwd=tmp_path)
    assert broken.returncode == 1 and "I cannot decide" in broken.stderr


def test_a_global_pool_that_is_too_small_is_said() -> None:
    result = succeed("replay", OLMOE, "--scope", "global", "--slots", "64", "--policy", "lru,fifo", "--json")
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and "64 slots for all layers are fewer than the 128 experts" in lines[0], "once"
    assert all(row["hits"] == 0 and row["scope"] == "global" for row in json.loads(result.stdout))


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot(tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"curves.{ending}"
    args = ["--slots", "8,16,32", "--policy", "lru,slru", "--admission", "always,second-miss", "--plot", out, "--json"]
    rows = json.loads(succeed("replay", OLMOE, QWEN, *args).stdout)
    assert {row["policy"] for row in rows} == {"lru", "slru"}, "the bounds are drawn, but were not asked for"
    if ending == "png":
        assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 20_000
    else:
        text = out.read_text()
        names = ("lru + always", "slru + second-miss", "below Belady's optimum", "an unlimited cache", "slots per layer", "olmoe")
        for name in names:
            assert f"<!-- {name}" in text or re.search(rf"<!-- [^>]*{re.escape(name)}", text), name


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["replay"], "TRACE"),
        (["replay", "OLMOE", "--slots", "7"], "the minimum is 8 slots"),
        (["replay", "OLMOE", "--slots", "8,,9"], "nothing between two commas"),
        (["replay", "OLMOE", "--slots", "lots"], "expected a number of slots"),
        (["replay", "OLMOE", "--policy", "lru,mru"], "'mru'"),
        (["replay", "OLMOE", "--admission", "never"], "'never'"),
        (["replay", "OLMOE", "--policy", "lru(x=1)"], "lru"),
        (["replay", "OLMOE", "--scope", "pool"], "--scope"),
        (["replay", "OLMOE", "--prompt-events", "ubatch"], "no column `step`"),
        (["replay", "OLMOE", "--plot", "out.txt"], ".png, .svg, .pdf"),
        (["replay", "OLMOE", "--plot", "/nonexistent/out.png"], "there is no folder /nonexistent"),
        (["replay", "/nonexistent.csv"], "/nonexistent.csv"),
        (["trace", "record", "SHIPPED"], "--prompts"),
        (["trace", "record", "SHIPPED", "--prompts", "PROMPTS", "-o", "t.txt"], ".csv, .npz, .parquet"),
        (["trace", "record", "SHIPPED", "--prompts", "PROMPTS", "-o", "/nonexistent/t.npz"], "there is no folder"),
        (["trace", "record", "SHIPPED", "--prompts", "PROMPTS", "-o", "t.npz", "--chat"], "no chat template"),
        (["trace", "record", "SHIPPED", "--prompts", "PROMPTS", "-o", "t.npz", "--split", "word"], "--split"),
        (["trace", "convert", "OLMOE", "t.txt"], ".csv, .npz, .parquet"),
        (["trace"], "Missing command"),
    ],
)
def test_bad_options_exit_2_with_one_line(prompts: Path, args: list[str], words: str) -> None:
    files = {"OLMOE": str(OLMOE), "SHIPPED": str(shipped_model()), "PROMPTS": str(prompts)}
    result = hotmoe(*(files.get(arg, arg) for arg in args))
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert words in result.stderr


def test_a_bad_trace_exits_1_and_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("# meta=n_expert=8\nphase,token,layer,experts\ndecode,0,0,1 9\n")
    for command in (["replay", str(path)], ["trace", "info", str(path)]):
        result = hotmoe(*command)
        assert result.returncode == 1 and result.stdout == ""
        assert f"{path}, line 3: expert 9" in result.stderr and "Traceback" not in result.stderr
