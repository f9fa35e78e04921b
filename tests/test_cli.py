"""The command line, run as users run it: in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hotmoe.cli.demo import SIM_NOTE, shipped_model
from hotmoe.cli.generate import Generation
from hotmoe.model_file import read_model_file
from tests.models import cached_model, model_files

COMMAND = [sys.executable, "-m", "hotmoe"]


def hotmoe(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line; the result has returncode, stdout and stderr."""
    return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, cwd=cwd, check=False, timeout=240)


def succeed(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command that has to work."""
    result = hotmoe(*args)
    assert result.returncode == 0, result.stderr
    return result


def test_the_console_script() -> None:
    script = shutil.which("hotmoe", path=str(Path(sys.executable).parent))
    assert script, "the package installs a command"
    assert subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout.startswith("hotmoe ")


def test_help_names_every_option() -> None:
    text = succeed("run", "--help").stdout
    for option in (
        "-p", "-n", "--temp", "--seed", "-mec", "--moe-expert-cache", "--moe-expert-cache-size", "--moe-expert-cache-policy",
        "--moe-tier-manager", "--moe-host-slots", "--moe-host-policy", "--moe-host-admission", "--moe-strict",
        "-cmoe", "-ncmoe", "-ngl", "-dev", "-ot", "-c", "--sim",
        "--verbose",
    ):  # fmt: skip
        assert re.search(rf"(^|[\s,/]){re.escape(option)}\b", text, re.MULTILINE), option


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "Missing command"),
        (["nothing"], "nothing"),
        (["run"], "MODEL"),
        (["run", "MODEL"], "--prompt"),
        (["run", "/nonexistent.gguf", "-p", "x"], "/nonexistent.gguf"),
        (["run", "MODEL", "-p", "x", "--bad"], "--bad"),
        (["run", "MODEL", "-p", "x", "-n", "0"], "-n"),
        (["run", "MODEL", "-p", "x", "--temp", "-1"], "--temp"),
        (["run", "MODEL", "-p", "x", "--sim", "two"], "--sim"),
        (["run", "MODEL", "-p", "x", "--sim", "17"], "--sim"),
        (["run", "MODEL", "-p", "x", "-mec", "8x"], "8x"),
        (["run", "MODEL", "-p", "x", "-mec", "8", "--moe-expert-cache-policy", "mru"], "slru"),
        (["run", "MODEL", "-p", "x", "--moe-expert-cache-policy", "lru"], "-mec"),
        (["run", "MODEL", "-p", "x", "--moe-tier-manager", "readahead"], "-mec"),
        (["run", "MODEL", "-p", "x", "-mec", "8", "--moe-tier-manager", "read-ahead"], "known tier managers: none, readahead"),
        (["run", "MODEL", "-p", "x", "-mec", "8", "--moe-tier-manager", "readahead", "--moe-host-slots", "3"], "minimum is 4"),
        (["run", "MODEL", "-p", "x", "-cmoe", "-ncmoe", "1"], "-ncmoe"),
        (["run", "MODEL", "-p", "x", "-mec", "3", "--sim", "1"], "minimum is 4 slots"),
        (["run", "MODEL", "-p", "LONG", "-c", "8"], "room for 256"),
        (["run", "SHIPPED", "-p", ""], "empty"),
        (["run", "MODEL", "-p", "x", "--sim", "1", "-dev", "SIM9"], "SIM0"),
        (["run", "MODEL", "-p", "x", "-ot", "exps"], "exps"),
        (["run", "MODEL", "-p", "x", "-ot", "exps=NOTHING"], "NOTHING"),
        (["chat"], "MODEL"),
        (["chat", "MODEL", "-n", "0"], "-n"),
        (["chat", "MODEL", "--chat-format", "nothing"], "chatml"),
        (["chat", "SHIPPED"], "no chat template"),
        (["plan"], "MODEL"),
        (["plan", "MODEL", "-mec", "3", "--sim", "1"], "minimum is 4 slots"),
        (["plan", "MODEL", "-mec", "8/9/10", "--sim", "2"], "8/9/10"),
        (["plan", "MODEL", "-p", "x"], "-p"),
        (["demo", "-n", "1"], "-n"),
    ],
)
def test_bad_options_exit_2_with_one_line(tiny_model: Path, args: list[str], words: str) -> None:
    files = {"MODEL": str(tiny_model), "SHIPPED": str(shipped_model()), "LONG": "hello " * 300}
    result = hotmoe(*(files.get(arg, arg) for arg in args))
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert words in result.stderr


def test_a_broken_model_exits_1_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"this is no model")
    for command in (["run", str(path), "-p", "x"], ["info", str(path)]):
        result = hotmoe(*command)
        assert result.returncode == 1
        assert "invalid magic" in result.stderr and str(path) in result.stderr
        assert "Traceback" not in result.stderr


def test_info() -> None:
    text = succeed("info", "--sim", "2:64").stdout
    for word in ("hotmoe", "llama.cpp", "CPU", "SIM0", "SIM1", "simulated", "64.0 MiB", "lru"):
        assert word in text


def test_info_json(tiny_model: Path) -> None:
    out = json.loads(succeed("info", tiny_model, "--json").stdout)
    assert re.fullmatch(r"[0-9a-f]{40}", out["versions"]["llama.cpp"])
    assert [device["name"] for device in out["devices"]] == ["CPU"], "no simulated device unless asked for"
    assert "slru" in out["policies"]
    model = out["model"]
    assert model["architecture"] == "olmoe"
    assert (model["n_layers"], model["n_expert_layers"], model["n_expert"], model["n_expert_used"]) == (2, 2, 40, 4)
    assert model["slot_bytes"] * 40 == model["expert_bytes"] < model["tensor_bytes"] < tiny_model.stat().st_size


def test_info_of_shards() -> None:
    whole, split = cached_model(arch="olmoe", quant="Q8_0"), cached_model(arch="olmoe", quant="Q8_0", shards=3)
    one, three = read_model_file(whole), read_model_file(split)
    assert len(three.files) == 3
    assert (one.tensor_bytes, one.expert_bytes, one.expert_types) == (three.tensor_bytes, three.expert_bytes, three.expert_types)
    result = hotmoe("info", model_files(split)[1])
    assert result.returncode == 1
    assert "shard 2 of 3" in result.stderr and "-00001-of-00003.gguf" in result.stderr


def test_info_of_fused_experts() -> None:
    model = read_model_file(cached_model(arch="gemma4"))
    assert model.n_expert > 0 and model.n_expert_layers > 0
    assert sum(model.expert_types.values()) == 2 * model.n_expert_layers, "gate_up and down"


def test_run(tiny_model: Path) -> None:
    args = ["run", str(tiny_model), "-p", "hello", "-n", "24", "--temp", "0", "-c", "256", "--sim", "1"]
    off = succeed(*args, "-mec", "0")
    assert len(off.stdout.strip()) > 0
    assert "expert cache off" in off.stderr
    on = succeed(*args, "-mec", "8", "--moe-expert-cache-policy", "fifo", "--moe-strict")
    assert on.stdout == off.stdout
    line = on.stderr.strip().splitlines()[-1]
    for words in ("24 tokens", "8 slots per layer", "fifo", "% hits in decode", "uploaded per token", "says nothing about a GPU"):
        assert words in line
    assert "expert cache" not in succeed(*args).stderr
    for slots in ("8", "0"):
        tier = succeed(*args, "-mec", slots, "--moe-tier-manager", "readahead", "--moe-host-slots", "16s")
        assert tier.stdout == off.stdout


def test_run_is_reproducible(tiny_model: Path) -> None:
    args = ["run", str(tiny_model), "-p", "hello", "-n", "16", "-c", "256"]
    first, second, third = (succeed(*args, "--seed", seed).stdout for seed in ("7", "7", "8"))
    assert first == second != third


def test_run_verbose_shows_the_plan(tiny_model: Path) -> None:
    result = succeed("run", tiny_model, "-p", "hello", "-n", "2", "-c", "256", "--sim", "1", "-mec", "8", "--verbose")
    assert "llama_model_loader" in result.stderr
    assert "hotmoe" in result.stderr


def test_plan(tiny_model: Path) -> None:
    text = succeed("plan", tiny_model, "-mec", "8", "--sim", "1", "--moe-expert-cache-policy", "fifo", "-c", "256").stdout
    for words in ("2 of 2 expert banks pooled", "context of 256 tokens", "fifo", "SIM0", "0-1"):
        assert words in text
    model = cached_model(arch="olmoe", quant="Q4_K", n_layer=4, n_expert=40, n_expert_used=4)
    out = json.loads(succeed("plan", model, "-mec", "8/10", "--sim", "2", "-c", "256", "--json").stdout)
    assert (out["model"], out["requested"], out["n_ctx"], out["simulated"]) == (model.name, "8/10", 256, True)
    found = [(bank["device"], bank["n_slots"]) for bank in out["banks"]]
    assert len(found) == 4 and set(found) == {("SIM0", 8), ("SIM1", 10)}
    assert out["pool_bytes"] == sum(device["pool_bytes"] for device in out["devices"])
    assert out["host"]["mapped_bytes"] > 0 == out["host"]["slot_bytes"]


def test_plan_says_what_host_memory_is_for(tiny_model: Path) -> None:
    args = ["plan", str(tiny_model), "--moe-stream-cache", "auto", "-c", "256"]
    out = json.loads(succeed(*args, "--json").stdout)
    host = out["host"]
    parts = ("slot", "weight", "context", "compute", "wave", "reader")
    assert out["host_bytes"] == sum(host[f"{part}_bytes"] for part in parts)
    assert host["slot_bytes"] == out["pool_bytes"] > 0 < host["weight_bytes"]
    assert host["headroom_bytes"] == out["devices"][0]["headroom_bytes"] >= 64 << 20
    table = succeed(*args).stdout
    for words in ("Host memory", "slots", "weights", "context", "compute buffers", "readers", "total", "kept free"):
        assert words in table
    ran = json.loads(
        succeed("run", tiny_model, "-p", "hello", "-n", "2", "-c", "256", "--moe-stream-cache", "8s", "--json").stdout
    )
    assert ran["plan"]["host_bytes"] > ran["plan"]["pool_bytes"]
    said = succeed("run", tiny_model, "-p", "hello", "-n", "2", "-c", "256", "--moe-stream-cache", "8s").stderr
    assert "of host memory planned" in said


def test_plan_auto_and_off(tiny_model: Path) -> None:
    out = json.loads(succeed("plan", tiny_model, "--sim", "1", "--json").stdout)
    assert out["requested"] == "auto"
    assert all(bank["n_slots"] == bank["n_expert"] for bank in out["banks"]), "all fit"
    assert succeed("plan", tiny_model, "--sim", "1", "-mec", "0").stdout.strip() == "expert cache: off"
    assert json.loads(succeed("plan", tiny_model, "--sim", "1", "-mec", "0", "--json").stdout)["banks"] == []


def test_devices_and_overrides(tiny_model: Path) -> None:
    args = ["plan", str(tiny_model), "-mec", "8", "--sim", "2", "-c", "256", "--json"]
    out = json.loads(succeed(*args, "-dev", "SIM1").stdout)
    assert {bank["device"] for bank in out["banks"]} == {"SIM1"}
    result = succeed(*args, "-ot", r"blk\.0\.ffn_(up|gate|down)_exps=CPU", "-ot", "nothing=CPU")
    assert [bank["pooled"] for bank in json.loads(result.stdout)["banks"]] == [True, True]
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("hotmoe: warning:") and "'nothing'" in lines[0]


def test_run_json(tiny_model: Path) -> None:
    args = ["run", str(tiny_model), "-p", "hello", "-n", "24", "--temp", "0", "-c", "256", "--sim", "1"]
    out = json.loads(succeed(*args, "-mec", "8", "--json").stdout)
    assert out["text"] == succeed(*args, "-mec", "8").stdout.removesuffix("\n")
    assert out["tokens"] == 24 and out["prompt_tokens"] > 0 and out["simulated"] is True
    assert {bank["n_slots"] for bank in out["plan"]["banks"]} == {8}
    assert 0 < out["stats"]["decode"]["hit_rate"] < 1
    off = json.loads(succeed(*args, "--json").stdout)
    assert off["plan"] is off["stats"] is None


def test_chat_reads_lines(tiny_model: Path) -> None:
    command = [
        *COMMAND,
        "chat",
        str(tiny_model),
        "-n",
        "8",
        "-c",
        "512",
        "--sim",
        "1",
        "-mec",
        "8",
        "--temp",
        "0",
        "-s",
        "Be brief",
    ]

    def chat(text: str) -> tuple[list[str], str]:
        result = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", check=False, timeout=120)
        assert result.returncode == 0, result.stderr
        return result.stdout.split("\n"), result.stderr

    answers, errors = chat("hello\n\n/stats\n/what\nwho are you\n/exit\nnever\n")
    assert len([answer for answer in answers if answer]) == 2
    for words in ("16 tokens", "8 slots per layer", "says nothing about a GPU", "uploaded per token", "unknown command /what"):
        assert words in errors
    assert "> " not in errors, "no prompt where nobody types"
    again, _ = chat("hello\n/clear\nhello")
    assert again[0] == again[1] == answers[0], "the conversation was forgotten, and the last line needs no end"


def test_chat_forgets_what_does_not_fit(tiny_model: Path) -> None:
    line = "hello " * 12
    command = [*COMMAND, "chat", str(tiny_model), "-n", "4", "-c", "256"]
    result = subprocess.run(
        command, input=f"{line}\n" * 6, capture_output=True, text=True, errors="replace", check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.strip("\n").split("\n")) >= 6, "an answer to each; one may have line breaks in it"
    result = subprocess.run(command, input=line * 8, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 2
    assert "does not fit" in result.stderr and "256" in result.stderr and "Traceback" not in result.stderr


def test_chat_needs_a_template() -> None:
    model = shipped_model()
    assert "no chat template" in hotmoe("chat", model).stderr
    assert "chatml" in hotmoe("chat", model, "--chat-format", "nothing").stderr
    result = subprocess.run(
        [*COMMAND, "chat", str(model), "--chat-format", "chatml", "-n", "4"],
        input="hello",
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


class Terminal:
    """A command that runs in a terminal of its own."""

    def __init__(self, *args: str | Path) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, args)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, words: str, timeout_s: float = 60) -> None:
        """Read until the words come; what came before them is forgotten."""
        assert self._comes(words, timeout_s), f"{words!r} did not come, but {self.text!r}"

    def interrupt(self, words: str) -> None:
        """Send SIGINT until the words come: readline overlooks one between printing its prompt and reading."""
        for _ in range(6):
            self.process.send_signal(signal.SIGINT)
            if self._comes(words, timeout_s=10):
                return
        pytest.fail(f"{words!r} did not come after SIGINT, but {self.text!r}")

    def _comes(self, words: str, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while words not in self.text:
            ready, _, _ = select.select([self._master], [], [], max(end - time.monotonic(), 0))
            if not ready:
                return False
            try:
                self.text += os.read(self._master, 4096).decode(errors="replace")
            except OSError:  # the other side is closed
                pytest.fail(f"{words!r} did not come before the end: {self.text!r}")
        self.text = self.text.partition(words)[2]
        return True

    def wait(self) -> int:
        status = self.process.wait(timeout=60)
        os.close(self._master)
        return status


@pytest.fixture(scope="session")
def talkative_model() -> Path:
    """With so many tokens the one that ends an answer is drawn rarely; and a token takes long enough to interrupt."""
    return cached_model(arch="olmoe", quant="Q4_K", n_vocab=32768)


def test_chat_in_a_terminal(talkative_model: Path) -> None:
    options = ("-c", "4096", "--sim", "1", "-mec", "8", "--temp", "1.5", "--seed", "2")
    terminal = Terminal("chat", talkative_model, *options)
    terminal.expect("/exit leaves")
    terminal.expect("> ")
    terminal.type("hello\n")
    terminal.expect("hello\r\n")
    time.sleep(0.5)
    terminal.interrupt("stopped; Ctrl-C again leaves")
    terminal.expect("> ")
    terminal.type("/stats\n")
    terminal.expect("hit rate")
    terminal.expect("> ")
    terminal.interrupt("8 slots per layer")
    terminal.expect("interrupted")
    assert terminal.wait() == 130
    assert "Traceback" not in terminal.text


def test_chat_ends_with_the_input(tiny_model: Path) -> None:
    for last_words in ("/exit\n", "\x04"):
        terminal = Terminal("chat", tiny_model, "-c", "256")
        terminal.expect("> ")
        terminal.type(last_words)
        terminal.expect("0 tokens")
        assert terminal.wait() == 0


def test_ctrl_c_leaves_cleanly(talkative_model: Path) -> None:
    command = [*COMMAND, "run", str(talkative_model), "-p", "hello", "-n", "3000", "--sim", "1", "-mec", "8", "-c", "4096"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)  # it is generating
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    text = errors.decode()
    assert "interrupted" in text and "Traceback" not in text
    assert "expert cache: 8 slots per layer" in text, "what was measured is shown"


def test_a_closed_pipe_ends_quietly(tiny_model: Path) -> None:
    command = [*COMMAND, "run", str(tiny_model), "-p", "hello", "-n", "2000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(timeout=60) == 1
    assert "Traceback" not in errors and "Exception ignored" not in errors


def test_text_never_breaks_inside_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Grüße, 世界 🌍"
    tokens = text.encode()  # one token for every byte

    class Model:
        """Generates the tokens above, in place of a real model."""

        def n_ctx(self) -> int:
            return 100

        def tokenize(self, text: bytes, **options: Any) -> list[int]:
            return [0]

        def generate(self, prompt: list[int], **options: Any) -> Any:
            return iter(tokens)

        def detokenize(self, tokens: list[int], **options: Any) -> bytes:
            return bytes(tokens)

    model: Any = Model()
    monkeypatch.setattr(Generation, "_is_end", lambda self, token: False)
    generation = Generation(model, "x", len(tokens), temp=0, seed=None)
    assert list(generation) == list(text)
    assert generation.text == text


def test_demo_json() -> None:
    result = succeed("demo", "--json", "-n", "32")
    out = json.loads(result.stdout)
    assert isinstance(out["device"], str) and isinstance(out["simulated"], bool)
    assert out["simulated"] == out["device"].startswith("SIM")
    assert (out["note"] == SIM_NOTE) == out["simulated"]
    assert out["model"] == shipped_model().name
    off, *pools = out["arms"]
    assert off["slots"] == 0
    assert off["policy"] is off["hit_rate"] is off["uploaded_bytes_per_token"] is off["same_text_as_off"] is None
    assert 2 <= len(pools) <= 3
    assert [arm["slots"] for arm in pools] == sorted({arm["slots"] for arm in pools})
    for arm in out["arms"]:
        assert isinstance(arm["name"], str) and arm["name"]
        assert 0 < arm["tokens"] <= 32
        assert arm["tokens_per_second"] > 0
        assert arm["text"]
    for arm in pools:
        assert isinstance(arm["policy"], str)
        assert 0 <= arm["hit_rate"] <= 1
        assert arm["uploaded_bytes_per_token"] >= 0
        assert arm["pool_bytes"] > 0
        if out["simulated"]:  # the simulation's kernels are the CPU's
            assert arm["text"] == off["text"] and arm["same_text_as_off"] is True
    rates = [arm["hit_rate"] for arm in pools]
    assert rates == sorted(rates), "a larger pool hits more often"


def test_demo() -> None:
    result = succeed("demo", "-n", "16", "--moe-expert-cache-policy", "slru")
    for words in ("slru", "hit rate", "tokens/s", "off", "slots"):
        assert words in result.stdout
    if "SIM0" in result.stdout:
        assert SIM_NOTE in " ".join(result.stdout.split())


def test_run_streams_and_says_what_it_read() -> None:
    result = succeed("run", shipped_model(), "-p", "The list method", "-n", "8", "--temp", "0", "--moe-stream-cache", "8s")
    assert "8 slots per layer" in result.stderr
    assert "KiB read per token" in result.stderr and "uploaded" not in result.stderr
    plain = succeed("run", shipped_model(), "-p", "The list method", "-n", "8", "--temp", "0")
    assert result.stdout == plain.stdout


def test_run_gives_host_memory_a_policy() -> None:
    options = ["-mec", "8", "--moe-stream-cache", "12s", "--moe-host-policy", "slru", "--moe-host-admission", "second-miss"]
    result = succeed("run", shipped_model(), "-p", "The list method", "-n", "8", "--sim", "1", *options, "--json")
    out = json.loads(result.stdout)
    assert (out["plan"]["policy"], out["plan"]["host_policy"], out["plan"]["host_admission"]) == ("lfru", "slru", "second-miss")
    assert out["stats"]["store"]["host_not_admitted"] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--moe-stream", "--moe-store", "mapped"], "contradicts"),
        (["--moe-stream", "--moe-tier-manager", "readahead"], "mapped experts"),
        (["--moe-stream-cache", "2s"], "the minimum is 4 slots"),
        (["--moe-stream-cache", "lots"], "host_slots"),
        (["--moe-stream-io-threads", "0"], "io-threads"),
        (["--moe-host-policy", "lru"], "give --moe-stream"),
        (["-mec", "8", "--moe-host-admission", "ghost"], "give --moe-stream"),
        (["--moe-stream", "--moe-host-policy", "mru"], "known policies: "),
        (["--moe-stream-cache", "8s", "--moe-host-policy", "lru"], "give it as policy"),
    ],
)
def test_bad_streaming_options(options: list[str], says: str) -> None:
    result = hotmoe("run", shipped_model(), "-p", "x", *options)
    assert result.returncode == 2
    assert says in result.stderr and len(result.stderr.strip().splitlines()) == 1
