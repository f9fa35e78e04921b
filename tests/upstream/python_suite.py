"""llama-cpp-python's own tests, as they are in the sdist, on `hotmoe.Llama` and through `hotmoe.attach`.

What needs a download is skipped, unless a generated model can stand in: tests that compare a model with itself do not care
which one it is. The simulated device carries the pool, so every run says how many events it served.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tarfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import hotmoe
from tests.models import cached_model

from .build import BuildError, run
from .section import Section, call

HERE = Path(__file__).resolve().parent
SHIM = HERE / "shim"

# file that a test asks the hub for -> the model that stands in for it
STAND_INS = {
    "tinyllamas/stories15M-q4_0.gguf": {"arch": "olmoe", "quant": "Q4_K"},
    "Falcon-H1-Tiny-90M-Instruct-Q2_K.gguf": {"arch": "nemotron_h_moe", "quant": "Q4_K"},
}
VOCABULARY = "vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf"

MODES = {
    "class": "hotmoe.Llama, no cache",
    "pool": "hotmoe.Llama, expert cache on SIM0",
    "attach": "installed llama_cpp.Llama, hotmoe.attach on SIM0",
}


def unpack(sdist: Path, folder: Path) -> None:
    """Unpack the tests and the vocabulary that they use."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as tar:
        for member in tar:
            inner = member.name.partition("/")[2]
            if not member.isfile() or not (re.fullmatch(r"tests/\w+\.py", inner) or inner == VOCABULARY):
                continue
            source = tar.extractfile(member)
            assert source
            path = folder / inner
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.read())
    shutil.copyfile(SHIM / "conftest.py", folder / "tests" / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\n")  # this folder is the root, whatever lies above it


def install_layer(sdist: Path, folder: Path) -> Path:
    """Install llama-cpp-python without libraries into a folder, as a user would who brings his own."""
    if not (folder / "llama_cpp").is_dir():
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", folder, "-C", "cmake.define.LLAMA_BUILD=OFF"]
        environment = os.environ.get("PATH", "")
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment}"
        try:
            run([sys.executable, "-m", "pip", "install", *options, sdist], "installing llama-cpp-python's Python layer")
        finally:
            os.environ["PATH"] = environment
    return folder


def outcomes(report: Path) -> tuple[Counter[str], list[tuple[str, str, str]]]:
    """Read a JUnit report; return counts by verdict and (test, verdict, reason) of each."""
    rows = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        verdict, reason = "passed", ""
        for child in case:
            if child.tag in {"skipped", "failure", "error"}:
                verdict = {"skipped": "skipped"}.get(child.tag, "failed")
                reason = (child.get("message") or "").splitlines()[0] if child.get("message") else ""
        rows.append((f"{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}", verdict, reason))
    return Counter(verdict for _, verdict, _ in rows), rows


def run_mode(mode: str, tests: Path, layer: Path | None, models: dict[str, str], section: Section) -> str:
    """Run the suite in one mode; return its part of the summary."""
    report = tests / f"report-{mode}.xml"
    report.unlink(missing_ok=True)
    search = [str(SHIM / "common"), str(layer or SHIM / "layer"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--rootdir", tests]
    result = call(
        [*command, tests / "tests"],
        cwd=tests,
        PYTHONPATH=os.pathsep.join(search),
        HOTMOE_SUITE_MODE=mode,
        HOTMOE_SUITE_MODELS=json.dumps(models),
    )
    if not report.exists():
        tail = "\n".join((result.stdout + result.stderr).splitlines()[-8:])
        section.failures.append(f"{mode}: pytest wrote no report: {tail}")
        return f"{mode}: no report"
    counts, rows = outcomes(report)
    pool = re.search(r"pool: (\d+) models, (\d+) events, (\d+) evictions", result.stdout)
    served = pool and [int(n) for n in pool.groups()]
    section.lines.append(
        f"  {MODES[mode]}: {counts['passed']} passed, {counts['skipped']} skipped, {counts['failed']} failed"
        + (f"; pool: {served[0]} models, {served[1]} events, {served[2]} evictions" if served and mode != "class" else "")
    )
    for name, verdict, reason in rows:
        if verdict == "failed":
            section.failures.append(f"{mode}: {name}: {reason}")
    if mode == "class":  # the same tests in every mode
        section.lines += [f"    {verdict:7s} {name}{'  (' + reason + ')' if reason else ''}" for name, verdict, reason in rows]
    if not counts["passed"]:
        section.failures.append(f"{mode}: nothing passed: " + "\n".join(result.stdout.splitlines()[-8:]))
    if mode != "class" and not (served and served[1] > 0 and served[2] > 0):
        section.failures.append(f"{mode}: the cache served no event, or evicted nothing")
    return f"{mode} {counts['passed']} passed, {counts['skipped']} skipped, {counts['failed']} failed"


def check_python_suite(sdist: Path, folder: Path) -> Section:
    """Run the suite in every mode that this version of hotmoe has."""
    section = Section("llama-cpp-python's own tests")
    tests = folder / "suite"
    unpack(sdist, tests)
    if not (tests / VOCABULARY).exists():
        raise BuildError(f"{sdist} holds no {VOCABULARY}")
    models = {name: str(cached_model(**options)) for name, options in STAND_INS.items()}
    parts = [run_mode(mode, tests, None, models, section) for mode in ("class", "pool")]
    if hasattr(hotmoe, "attach"):
        layer = install_layer(sdist, folder / "installed")
        parts.append(run_mode("attach", tests, layer, models, section))
    else:
        section.lines.append("  attach: skipped, this version of hotmoe has no attach()")
    section.summary = "; ".join(parts)
    return section
