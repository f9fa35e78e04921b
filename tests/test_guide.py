"""The guide to policies: everything on its page runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import hotmoe
from hotmoe.traces import Trace

PACKAGE = Path(hotmoe.__file__).parent
GUIDE = PACKAGE / "guide" / "write-a-policy.md"


def test_every_block_runs(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 6
    first = blocks[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 20, "what the title promises"

    (tmp_path / "model.gguf").symlink_to(PACKAGE / "model" / "pydoc-moe-8x32.gguf")
    monkeypatch.chdir(tmp_path)
    cache = hotmoe.ExpertCache(slots=0, record=True)
    with hotmoe.Llama("model.gguf", expert_cache=cache, n_ctx=256, n_threads=1, verbose=False) as llm:
        llm("The list method append", max_tokens=48, temperature=0)
        cache.take_trace().save("routing.npz")
    assert len(Trace.load("routing.npz")) > 300

    namespace = {"PolicyError": hotmoe.PolicyError}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), namespace)
    printed = capsys.readouterr().out
    rates = dict(re.findall(r"(\S+) +(\d+\.\d)% of the experts", printed))
    assert {"lru", "lrfu", "Fading", "Often", "belady"} <= rates.keys()
    assert float(rates["belady"]) > max(float(rate) for name, rate in rates.items() if name != "belady")
    assert "0 answers refused" in printed
    assert "Broken.select_evict for layer" in printed
