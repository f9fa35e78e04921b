"""An unmodified llama-cpp-python of the pinned release, without libraries of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import hotmoe

REPO = Path(__file__).parent.parent.parent


def install() -> Path:
    """Return a folder with the Python layer of llama-cpp-python, installed there at the first call and kept.

    It is no dependency of ours, so the test that needs it is skipped where it cannot be had.
    """
    version = json.loads((REPO / "vendor" / "lock.json").read_text(encoding="utf-8"))["version"]
    root = Path(tempfile.gettempdir()) / f"hotmoe-test-stock-{os.getuid()}"
    folder = root / f"llama-cpp-python-{version}-py{sys.version_info.major}{sys.version_info.minor}"
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=root, prefix="draft-"))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        source = ["--no-binary", "llama-cpp-python", f"llama-cpp-python=={version}", "-C", "cmake.define.LLAMA_BUILD=OFF"]
        result = subprocess.run([*command, "--target", draft, *source], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            shutil.rmtree(draft, ignore_errors=True)
            pytest.skip(f"llama-cpp-python {version} cannot be installed here: {result.stderr.strip()[-300:]}")
        try:
            draft.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def environment(stock: Path) -> dict[str, str]:
    """Return the variables with which a process finds llama-cpp-python and runs it on hotmoe's libraries."""
    paths = [str(stock), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "LLAMA_CPP_LIB_PATH": hotmoe.lib_path()}
