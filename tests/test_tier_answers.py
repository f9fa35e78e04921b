"""Tier managers from outside: wrong answers, exceptions, arguments, names, life and death."""

from __future__ import annotations

import gc
import shutil
import subprocess
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import hotmoe
from hotmoe._native import ffi, lib
from hotmoe.tiers import register_tier_manager
from tests.harness import ALL, Logits, Runner, equal_bits, tokens_for
from tests.models import cached_model
from tests.tiers import N_EXPERT, N_LAYER, SPEC, TOP_K, Engine, Recorder, everything

# ---- answers that cannot be ----


@pytest.mark.parametrize(
    "expert",
    [(N_LAYER, 0), (-1, 0), (0, N_EXPERT), (0, -1), (0, 1, 0), (0, -1, 0), (2**31 - 1, 0), (0, 2**31 - 1), (-(2**31), -(2**31))],
)
@pytest.mark.parametrize("advice", ["willneed", "dontneed"])
def test_experts_that_there_are_not(
    sim: ModuleType, paged_model: Path, paged_logits: dict[int, Logits], expert: Any, advice: str
) -> None:
    with Engine(paged_model, tier_manager=Recorder(lambda used, dropped: {advice: [expert]})) as engine:
        assert equal_bits(engine.run(), paged_logits[1])
        tier = engine.tier
        assert tier.refused_requests == tier.steps == 12
        assert tier.failed_steps == tier.willneed.calls == tier.dontneed.calls == 0


@pytest.mark.parametrize(
    "answer",
    [
        7,
        "willneed",
        [("willneed", 0, 1)],
        {"keep": [(0, 1)]},
        {"willneed": 5},
        {"willneed": [1, 2]},
        {"willneed": [(0, 1), (0, 0, 1)]},
        {"willneed": [(0, 1, 2, 3)]},
        {"willneed": [(0.0, 1.0)]},
        {"willneed": [("0", "1")]},
        {"dontneed": [(0, 2**31)]},
        {"dontneed": [(0, 2**70)]},
        {"dontneed": [(0, None)]},
        {"willneed": np.zeros(3, [("layer", "i4")])},
        {"willneed": [(0, 1)] * (2 * N_LAYER * N_EXPERT + 1)},
    ],
    ids=str,
)
def test_answers_that_cannot_be_understood(
    sim: ModuleType, paged_model: Path, paged_logits: dict[int, Logits], answer: Any
) -> None:
    with Engine(paged_model, tier_manager=Recorder(lambda used, dropped: answer)) as engine:
        assert equal_bits(engine.run(), paged_logits[1])
        with pytest.raises(hotmoe.PolicyError, match=r"Recorder\.on_step"):
            engine.cache.stats()
        tier = engine.tier
        assert tier.failed_steps == tier.steps == 12
        assert tier.refused_requests == tier.willneed.calls == tier.dontneed.calls == 0


def test_as_many_requests_as_there_is_room_for(sim: ModuleType, paged_model: Path) -> None:
    n = 2 * N_LAYER * N_EXPERT
    with Engine(paged_model, tier_manager=Recorder(lambda used, dropped: {"willneed": [(0, 1)] * n, "dontneed": []})) as engine:
        engine.run(n=1)
        assert engine.tier.willneed.calls == 3 * n


C_MANAGER = """
#include <hotmoe/tier.h>
#include <string.h>

struct state { const char * mode; };
static struct state one;

static int32_t on_step(void * context, const struct hotmoe_tier_step * step, struct hotmoe_tier_request * requests,
                       int32_t max_requests) {
    const struct state * s = context;
    int32_t i;
    if (strcmp(s->mode, "mode=negative") == 0) {
        return -7;
    }
    if (strcmp(s->mode, "mode=huge") == 0) {
        return max_requests + 1;
    }
    if (strcmp(s->mode, "mode=most") == 0) {
        return INT32_MAX;
    }
    for (i = 0; i < step->n_used; i++) {
        requests[i].layer  = step->used[i].layer;
        requests[i].bank   = step->used[i].bank;
        requests[i].expert = step->used[i].expert;
        requests[i].advice = strcmp(s->mode, "mode=advice") == 0 ? HOTMOE_TIER_ADVICE_COUNT - 3 * (i % 2) : HOTMOE_TIER_WILLNEED;
    }
    return step->n_used;
}

int32_t hotmoe_tier_entry(const struct hotmoe_tier_config * config, struct hotmoe_tier_manager * out) {
    static char options[64];
    if (config->struct_size != sizeof(*config) || config->n_banks < 1 || strlen(config->options) >= sizeof(options)) {
        return HOTMOE_ERR_ARGUMENT;
    }
    one.mode         = strcpy(options, config->options);
    out->struct_size = sizeof(*out);
    out->abi_version = HOTMOE_TIER_ABI_VERSION;
    out->context     = &one;
    out->on_step     = on_step;
    return HOTMOE_OK;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tier manager in C99."""
    folder = tmp_path_factory.mktemp("c")
    (folder / "manager.c").write_text(C_MANAGER)
    include = Path(__file__).parent.parent / "native" / "include"
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed to build the package, too"
    flags = ["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-shared", "-fPIC", "-I", str(include)]
    subprocess.run([compiler, *flags, "-o", folder / "manager.so", folder / "manager.c"], check=True)
    return folder / "manager.so"


@pytest.mark.parametrize("mode", ["", "negative", "huge", "most", "advice"])
def test_a_manager_in_c(sim: ModuleType, paged_model: Path, paged_logits: dict[int, Logits], library: Path, mode: str) -> None:
    name = f"lib:{library}(mode={mode})" if mode else f"lib:{library}"
    with Engine(paged_model, tier_manager=name) as engine:
        assert engine.cache.tier_manager == name
        assert equal_bits(engine.run(), paged_logits[1])
        tier = engine.tier
        assert tier.steps == 12
        assert tier.failed_steps == (12 if mode in ("negative", "huge", "most") else 0)
        assert tier.refused_requests == (tier.used if mode == "advice" else 0)
        assert tier.willneed.calls == (0 if mode else 3 * tier.used)
        assert tier.dontneed.calls == 0


# ---- exceptions ----


@pytest.mark.parametrize("error", [ValueError("on purpose"), KeyboardInterrupt(), SystemExit(3)])
def test_exceptions_are_raised_after_the_call(
    sim: ModuleType, paged_model: Path, paged_logits: dict[int, Logits], error: BaseException
) -> None:
    def fail(used: Any, dropped: Any) -> Any:
        if len(manager.steps) in (2, 5, 12):
            raise error
        return {"willneed": used}

    manager = Recorder(fail)
    llm = hotmoe.Llama(
        paged_model,
        expert_cache=hotmoe.ExpertCache(slots=4, tier_manager=manager),
        n_ctx=64,
        n_threads=1,
        n_ubatch=1,
        logits_all=True,
        devices="SIM0",
        verbose=False,
    )
    tokens = tokens_for(12, llm.n_vocab())
    raised = 0
    while llm.n_tokens < 12:
        try:
            llm.eval(tokens[llm.n_tokens : llm.n_tokens + 1])
        except type(error) as caught:
            assert caught is error
            raised += 1
    assert raised >= 2
    assert llm.expert_cache is not None
    n = len(manager.steps)
    assert llm.expert_cache.attached
    if n == 11:  # the last step is not told yet
        with pytest.raises(type(error)):
            llm.expert_cache.stats()
    tier = llm.expert_cache.stats().tier
    assert tier is not None
    assert tier.failed_steps == 3
    assert tier.willneed.calls > 0
    llm.close()


def test_an_exception_about_the_last_step_is_raised_by_close(sim: ModuleType, paged_model: Path) -> None:
    def fail(used: Any, dropped: Any) -> Any:
        raise ValueError("on purpose")

    engine = Engine(paged_model, tier_manager=Recorder(fail))
    engine.run(n=1)
    with pytest.raises(ValueError, match="on purpose"):
        engine.cache.close()
    assert not engine.cache.attached
    engine.cache.close()
    engine.runner.close()


@pytest.mark.parametrize("where", ["setup", "make"])
def test_a_manager_that_cannot_be_made(sim: ModuleType, paged_model: Path, where: str) -> None:
    class Broken(Recorder):
        def setup(self, banks: Any, **kw: Any) -> None:
            if where == "setup":
                raise KeyError("on purpose")

        def __init__(self) -> None:
            if where == "make":
                raise KeyError("on purpose")
            super().__init__()

    with pytest.raises(KeyError, match="on purpose"):
        Engine(paged_model, tier_manager=Broken)
    with Runner(paged_model, cpu_moe=ALL) as runner:  # nothing is left behind
        cache = hotmoe.ExpertCache(slots=4, tier_manager="readahead")
        cache._attach(runner.address())
        cache.close()


def test_a_manager_must_not_use_its_cache(sim: ModuleType, paged_model: Path) -> None:
    cache = hotmoe.ExpertCache(slots=4, tier_manager=Recorder(lambda used, dropped: cache.stats()))
    with Runner(paged_model, cpu_moe=ALL) as runner:
        cache._attach(runner.address())
        runner.decode([300])
        with pytest.raises(hotmoe.errors.StateError, match="must not use"):
            cache.stats()
        runner.decode([301])
        with pytest.raises(hotmoe.errors.StateError, match="must not use"):
            cache.close()


# ---- arguments, names and life ----


@pytest.mark.parametrize(
    ("host_slots", "expected"),
    [(None, 16), (0, 16), ("0", 16), (3, 3), ("5", 5), ("7s", 7), (99, 16), ("24G", 16), ("6 MiB", 7), (f"{2 * 2 * 417792}", 16)],
)
def test_host_slots(sim: ModuleType, paged_model: Path, host_slots: Any, expected: int) -> None:
    with Engine(paged_model, tier_manager=Recorder, host_slots=host_slots) as engine:
        manager = engine.cache.tier_manager_object
        assert isinstance(manager, Recorder)
        assert [bank.host_slots for bank in manager.banks] == [expected] * N_LAYER
        assert manager.banks[0].expert_bytes == 417792


@pytest.mark.parametrize("host_slots", [1, "1s", "1M"])
def test_too_few_host_slots_name_the_minimum(sim: ModuleType, paged_model: Path, host_slots: Any) -> None:
    with pytest.raises(hotmoe.PlanError, match=r"host_slots.*the minimum is 2 slots, or 1632 KiB"):
        Engine(paged_model, tier_manager="readahead", host_slots=host_slots)


@pytest.mark.parametrize("host_slots", ["auto", "many", "3/4", -1, "-2", "1.5", "1.5s", ""])
def test_host_slots_that_mean_nothing(host_slots: Any) -> None:
    if host_slots == "":
        assert hotmoe.ExpertCache(host_slots="").tier_manager == ""
        return
    with pytest.raises(hotmoe.errors.ArgumentError, match="host_slots"):
        hotmoe.ExpertCache(tier_manager="readahead", host_slots=host_slots)


def test_host_slots_need_a_manager() -> None:
    with pytest.raises(hotmoe.errors.ArgumentError, match="tier_manager"):
        hotmoe.ExpertCache(host_slots=3)
    with pytest.raises(TypeError, match="host_slots"):
        hotmoe.ExpertCache(tier_manager="readahead", host_slots=True)


def test_the_c_side_checks_host_slots(sim: ModuleType, paged_model: Path) -> None:
    with Runner(paged_model, cpu_moe=ALL) as runner:
        for size, status in (
            (b"auto", lib.HOTMOE_ERR_ARGUMENT),
            (b"3/4", lib.HOTMOE_ERR_ARGUMENT),
            (b"s", lib.HOTMOE_ERR_ARGUMENT),
            (b"1", lib.HOTMOE_ERR_PLAN),
        ):
            texts = [ffi.new("char[]", t) for t in (b"4", b"readahead", size)]
            params = ffi.new("struct hotmoe_cache_params *")
            params.slots, params.tier_manager, params.host_slots = texts
            out = ffi.new("struct hotmoe_cache **")
            assert lib.hotmoe_cache_attach(ffi.cast("struct llama_context *", runner.address()), params, out) == status
            assert size.decode() in ffi.string(lib.hotmoe_last_error()).decode()


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"none", "readahead"} <= set(hotmoe.cache.tier_managers())
    for spec in ("readahead", "tests.tiers:Recorder", Recorder, Recorder(), None, "none"):
        hotmoe.ExpertCache(tier_manager=spec)
    for spec in ("read-ahead", "tests.tiers:Nothing", "tests.tiers:libc", "lib:/nothing.so", "readahead(depth=3)"):
        with pytest.raises(hotmoe.PolicyError, match="tier manager"):
            hotmoe.ExpertCache(tier_manager=spec)
    with pytest.raises(hotmoe.PolicyError, match="known tier managers: none, readahead"):
        hotmoe.ExpertCache(tier_manager="read-ahead")
    with pytest.raises(TypeError, match="TierManager"):
        hotmoe.ExpertCache(tier_manager=dict)  # type: ignore[arg-type]
    with pytest.raises(hotmoe.errors.ArgumentError, match="built-in"):
        register_tier_manager("readahead")

    @register_tier_manager("test-registered")
    class Mine(Recorder):
        """Mine."""

    assert hotmoe.cache.tier_managers()["test-registered"] == "Mine."
    hotmoe.ExpertCache(tier_manager="test-registered")

    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hotmoe.tiers]\ninstalled = tests.tiers:Recorder\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "installed" in hotmoe.cache.tier_managers()
    hotmoe.ExpertCache(tier_manager="installed")


def test_off(sim: ModuleType, paged_model: Path) -> None:
    for manager in (None, "none"):
        with Engine(paged_model, tier_manager=manager) as engine:
            engine.run(n=2)
            assert engine.cache.stats().tier is None
            assert engine.cache.tier_manager == ""
            assert lib.hotmoe_tier_n_banks(engine.native) == 0
    assert hotmoe.ExpertCache(slots=0, tier_manager="none").enabled is False


def test_reset_and_clear(sim: ModuleType, paged_model: Path) -> None:
    with Engine(paged_model, tier_manager=Recorder(lambda used, dropped: {"willneed": used}), host_slots=3) as engine:
        manager = engine.cache.tier_manager_object
        assert isinstance(manager, Recorder)
        engine.run()
        engine.cache.reset_stats()
        assert len(manager.steps) == 12
        assert engine.tier.steps == engine.tier.willneed.calls == 0
        as_json = engine.cache.stats().as_dict()
        assert as_json["tier"]["willneed"] == {"calls": 0, "bytes": 0, "errors": 0}
        engine.cache.clear()
        assert manager.resets == 1
        manager.steps.clear()
        engine.run(n=1)
        assert engine.tier.entered == engine.tier.used == 2 * TOP_K
        assert engine.tier.dropped == 0


def test_an_object_serves_one_cache_and_is_let_go_of(sim: ModuleType, paged_model: Path) -> None:
    manager = Recorder()
    alive = weakref.ref(manager)
    with Engine(paged_model, tier_manager=manager) as engine:
        with pytest.raises(hotmoe.errors.StateError, match="serves another cache"):
            Engine(paged_model, tier_manager=manager)
        engine.run(n=1)
    with Engine(paged_model, tier_manager=manager) as engine:
        engine.run(n=1)
    assert len(manager.steps) == 2
    del manager, engine
    gc.collect()
    assert alive() is None


def test_the_last_step_is_told_when_the_model_goes_first(sim: ModuleType, paged_model: Path) -> None:
    manager = Recorder(lambda used, dropped: {"dontneed": used})
    engine = Engine(paged_model, tier_manager=manager)
    engine.run(n=2)
    assert len(manager.steps) == 1
    engine.runner.close()
    assert len(manager.steps) == 2
    tier = engine.tier
    assert tier.dontneed.calls == 3 * tier.used
    engine.cache.close()
    assert len(manager.steps) == 2


def test_shards_and_models_that_are_not_mapped(sim: ModuleType) -> None:
    shards = cached_model(**SPEC, shards=3)
    for mmaps in (True, False):
        with Engine(shards, {"mmap": mmaps}, tier_manager=Recorder(everything("dontneed"))) as engine:
            logits = engine.run(n=4)
            tier = engine.tier
            n = 4 * 3 * N_LAYER * N_EXPERT
            assert (tier.dontneed.calls, tier.refused_ranges) == ((n, 0) if mmaps else (0, n))
            with Runner(shards, cpu_moe=ALL) as runner:
                assert equal_bits(logits, runner.run(tokens_for(4, runner.n_vocab), 1))
