"""Policies that are shared libraries, written in C, and the headers that they are compiled with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import hotmoe
from hotmoe.errors import PolicyError

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
EXAMPLE = Path(hotmoe.__file__).parent / "guide" / "lru.c"
HEADERS = sorted(Path(hotmoe.include_path(), "hotmoe").glob("*.h"))


def compile_c(source: Path, library: Path, *flags: str) -> Path:
    assert COMPILER, "a C compiler is missing"
    strict = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2", "-shared", "-fPIC"]
    command = [COMPILER, *strict, "-I", hotmoe.include_path(), str(source), "-o", str(library), *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return library


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_each_header_compiles_as_c99_on_its_own(header: Path, tmp_path: Path) -> None:
    source = tmp_path / "only.c"
    source.write_text(f"#include <hotmoe/{header.name}>\nint only(void);\nint only(void) {{ return 0; }}\n")
    compile_c(source, tmp_path / "only.so")


def test_there_are_headers() -> None:
    assert {"base.h", "policy.h"} <= {path.name for path in HEADERS}


def test_the_example_decides_as_the_built_in_lru(sim: ModuleType, tiny_model: Path, tmp_path: Path) -> None:
    library = compile_c(EXAMPLE, tmp_path / "lru.so")
    seen = []
    for policy in ("lru", f"lib:{library}", "fifo"):
        cache = hotmoe.ExpertCache(slots=10, policy=policy)
        with hotmoe.Llama(tiny_model, expert_cache=cache, n_ctx=128, n_threads=1, n_threads_batch=1, verbose=False) as llm:
            text = llm("hello", max_tokens=24, temperature=0)["choices"][0]["text"]
            total = cache.stats().total
            maps = [cache.slot_map(bank) for bank in range(len(cache.plan.banks))]
            seen.append((text, total.hits, total.misses, total.evictions, maps))
            assert total.policy_fallbacks == 0
            assert total.evictions > 20
            assert cache.policy == policy
    assert seen[0] == seen[1]
    assert seen[0][1:] != seen[2][1:], "another policy decides otherwise"


@pytest.mark.parametrize(
    ("flags", "body", "says"),
    [
        ("", "return -3;", "returned -3"),
        ("", "out->struct_size = sizeof(*out); out->abi_version = 1; return 0;", "ABI version 1"),
        ("", "out->struct_size = 8; out->abi_version = HOTMOE_POLICY_ABI_VERSION; return 0;", "8 bytes"),
        ("", "out->struct_size = sizeof(*out); out->abi_version = HOTMOE_POLICY_ABI_VERSION; return 0;", "no select_evict"),
        ("-Dhotmoe_policy_entry=other", "return 0;", "does not export hotmoe_policy_entry"),
    ],
)
def test_libraries_that_do_not_fit(tmp_path: Path, flags: str, body: str, says: str) -> None:
    source = tmp_path / "bad.c"
    signature = "HOTMOE_API int32_t hotmoe_policy_entry(const struct hotmoe_policy_config * config, struct hotmoe_policy * out)"
    source.write_text(f"#include <hotmoe/policy.h>\n{signature};\n{signature} {{ (void) config; (void) out; {body} }}\n")
    library = compile_c(source, tmp_path / "bad.so", *flags.split())
    with pytest.raises(PolicyError, match=says) as caught:
        hotmoe.ExpertCache(policy=f"lib:{library}")
    assert "bad.so" in str(caught.value)


def test_options_reach_the_library(tmp_path: Path) -> None:
    source = tmp_path / "options.c"
    signature = "HOTMOE_API int32_t hotmoe_policy_entry(const struct hotmoe_policy_config * config, struct hotmoe_policy * out)"
    source.write_text(
        f"#include <hotmoe/policy.h>\n#include <string.h>\n{signature};\n"
        f'{signature} {{ (void) out; return strcmp(config->options, "depth=3, x=y") == 0 ? -77 : -1; }}\n'
    )
    library = compile_c(source, tmp_path / "options.so")
    with pytest.raises(PolicyError, match="-77"):
        hotmoe.ExpertCache(policy=f"lib:{library}(depth=3, x=y)")
