"""The same script gives the same result on both packages, with a pool and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.gates.test_lora import write_adapter
from tests.models import cached_model
from tests.usage import stock
from tests.usage.scripts import SCRIPTS

# (package, slots) of 40 experts, 4 per token: 16 slots hold every decode step, 32 a batch of 8 tokens, too. A longer prompt
# takes the stock path
ARMS = {"llama_cpp": ("llama_cpp", 0), "attached": ("llama_cpp", 16), "hotmoe": ("hotmoe", 0), "pooled": ("hotmoe", 32)}
NEVER_POOLED = {("attached", "embeddings")}  # has no batch of 4 tokens or less


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scripts returned, by arm."""
    environment = os.environ | stock.environment(stock.install())
    adapter = tmp_path_factory.mktemp("lora") / "adapter.gguf"
    write_adapter(adapter, "olmoe", 2)
    model = cached_model(arch="olmoe", quant="Q8_0", n_expert=40, n_expert_used=4)
    out = {}
    for name, (package, slots) in ARMS.items():
        command = [sys.executable, "-m", "tests.usage.run", package, str(slots), str(model), str(adapter)]
        result = subprocess.run(command, cwd=stock.REPO, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{name}: {result.stderr[-3000:]}"
        out[name] = json.loads(result.stdout)
    return out


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "llama_cpp"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_same_result(outcomes: dict[str, Any], script: str, arm: str) -> None:
    assert outcomes[arm]["results"][script] == outcomes["llama_cpp"]["results"][script]


@pytest.mark.parametrize("arm", ARMS)
def test_pools_served_where_they_should(outcomes: dict[str, Any], arm: str) -> None:
    events = outcomes[arm]["pooled_events"]
    if ARMS[arm][1]:
        assert {name for name, n in events.items() if n == 0} == {name for pooled, name in NEVER_POOLED if pooled == arm}
    else:
        assert not any(events.values())
    assert outcomes[arm]["device_bytes_left"] == 0


def test_the_scripts_do_something(outcomes: dict[str, Any]) -> None:
    results = outcomes["llama_cpp"]["results"]
    greedy, sampled, stopped = results["completion"]
    assert greedy["choices"][0]["finish_reason"] == "length" and greedy["usage"]["completion_tokens"] >= 24
    assert sampled["choices"][0]["text"] != greedy["choices"][0]["text"]
    assert "a" not in stopped["choices"][0]["text"]
    person = json.loads(results["json_schema"]["choices"][0]["message"]["content"])
    assert person["name"] in ("Ada", "Grace") and person["age"] in (36, 45)
    assert results["grammar"]["choices"][0]["text"].startswith(("yes", "no", "maybe"))
    call = results["tools"]["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "get_weather" and json.loads(call["arguments"])["town"] in ("Paris", "Rome")
    assert len(results["logprobs"]["choices"][0]["logprobs"]["tokens"]) > 8
    assert results["chat"][0] == "chat_template.default"
    assert results["chat"][1]["usage"]["prompt_tokens"] > 20
    vectors = [row["embedding"] for row in results["embeddings"][0]["data"]]
    assert len(vectors) == 2 and vectors[0] != vectors[1]
    plain, drafted = results["draft_model"]
    assert plain["choices"][0]["text"] == drafted["choices"][0]["text"]
