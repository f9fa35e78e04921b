"""The installed package, from the wheel and from the sdist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, note_figure, run

SMOKE = Path(__file__).parent / "smoke.py"


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_works(kind: str, request: pytest.FixtureRequest, workspace: Path) -> None:
    python: Path = request.getfixturevalue(f"from_{kind}")
    out: dict[str, Any] = json.loads(run(python, "-I", SMOKE, cwd=workspace))  # -I: neither the current folder nor ours counts
    note_figure(f"import hotmoe, from the {kind}: {out['import_seconds']:.3f} s")
    assert out["import_seconds"] < 0.3
    assert out["heavy_modules"] == [], "the import loads nothing heavy"
    assert Path(out["package"]).is_relative_to(python.parent.parent)

    lock = json.loads((ROOT / "vendor" / "lock.json").read_text())
    versions = out["info"]["versions"]
    assert versions["hotmoe"] == out["metadata_version"] == out["version"]
    assert versions["llama.cpp"] == lock["llama_cpp_commit"]
    assert versions["llama-cpp-python"] == out["vendored_version"] == lock["version"]
    assert "LibraryError" in out["wrong_version"] and "install it again" in out["wrong_version"]

    assert len(out["demo"]["arms"]) >= 3 and all(arm["tokens"] > 0 for arm in out["demo"]["arms"])
    assert out["mtmd_marker"].startswith("<")

    assert out["compat_found"], "ctypes finds functions behind the plain names"
    assert out["compat_same"], "and they are those of our libraries"
    assert len(out["ggml_libraries"]) == len({Path(path).name for path in out["ggml_libraries"]}), "one ggml in the process"
    assert all(Path(path).parent.name == "lib" for path in out["ggml_libraries"])
