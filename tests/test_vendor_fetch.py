"""vendor/fetch.py on a tiny sdist of the same layout: what it unpacks, and what each failure says."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    "LICENSE.md": "licence of the Python layer\n",
    "README.md": "not wanted\n",
    "llama_cpp/llama.py": "x = 1\n",
    "vendor/llama.cpp/LICENSE": "licence\n",
    "vendor/llama.cpp/CMakeLists.txt": "project(x)\n",
    "vendor/llama.cpp/src/a.cpp": "int a = 1;\nint b = 2;\nint c = 3;\n",
    "vendor/llama.cpp/models/big.gguf": "not wanted\n",
} | {
    f"vendor/llama.cpp/{name}/x": "x\n"
    for name in ("app", "cmake", "common", "ggml", "include", "licenses", "tests", "tools", "vendor")
}
PATCH = """why

diff --git a/src/a.cpp b/src/a.cpp
--- a/src/a.cpp
+++ b/src/a.cpp
@@ -1,3 +1,3 @@
 int a = 1;
-int b = 2;
+int b = 20;
 int c = 3;
"""


class Vendor:
    """A vendor folder of its own, with a sdist beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "vendor"
        (self.folder / "patches").mkdir(parents=True)
        shutil.copy(ROOT / "vendor" / "fetch.py", self.folder)
        (self.folder / "patches" / "0001-b.patch").write_text(PATCH)
        self.sdist = folder / "llama_cpp_python-0.0.1.tar.gz"
        with tarfile.open(self.sdist, "w:gz") as tar:
            for name, text in FILES.items():
                info = tarfile.TarInfo(f"llama_cpp_python-0.0.1/{name}")
                info.size, info.mode = len(text), 0o644
                tar.addfile(info, io.BytesIO(text.encode()))
        lock = {
            "package": "llama-cpp-python",
            "version": "0.0.1",
            "sdist_sha256": hashlib.sha256(self.sdist.read_bytes()).hexdigest(),
            "llama_cpp_commit": "0" * 40,
        }
        (self.folder / "lock.json").write_text(json.dumps(lock))

    def fetch(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.folder / "fetch.py"), *args]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | env)

    def source(self) -> Path:
        return self.folder / "upstream" / "llama.cpp" / "src" / "a.cpp"


@pytest.fixture
def vendor(tmp_path: Path) -> Vendor:
    return Vendor(tmp_path)


def test_unpacks_what_is_wanted_and_patches_it(vendor: Vendor) -> None:
    result = vendor.fetch("--sdist", str(vendor.sdist))
    assert result.returncode == 0, result.stderr
    assert "int b = 20;" in vendor.source().read_text()
    upstream = vendor.folder / "upstream"
    assert (upstream / "llama_cpp" / "llama.py").exists()
    assert (upstream / "LICENSE.md").exists()
    assert not list(upstream.rglob("big.gguf"))
    assert not (upstream / "README.md").exists()


def test_second_run_does_nothing(vendor: Vendor) -> None:
    vendor.fetch("--sdist", str(vendor.sdist))
    before = vendor.source().stat().st_mtime_ns
    result = vendor.fetch(PIP_NO_INDEX="1")  # could not fetch if it tried
    assert (result.returncode, result.stdout) == (0, "")
    assert vendor.source().stat().st_mtime_ns == before


def test_changed_patch_touches_only_its_file(vendor: Vendor) -> None:
    vendor.fetch("--sdist", str(vendor.sdist))
    other = vendor.folder / "upstream" / "llama.cpp" / "CMakeLists.txt"
    before = other.stat().st_mtime_ns
    (vendor.folder / "patches" / "0001-b.patch").write_text(PATCH.replace("20", "21"))
    assert vendor.fetch("--sdist", str(vendor.sdist)).returncode == 0
    assert "int b = 21;" in vendor.source().read_text()
    assert other.stat().st_mtime_ns == before


def test_missing_part_is_unpacked_again(vendor: Vendor) -> None:
    vendor.fetch("--sdist", str(vendor.sdist))
    shutil.rmtree(vendor.source().parent)
    assert vendor.fetch("--sdist", str(vendor.sdist)).returncode == 0
    assert vendor.source().exists()


def test_wrong_hash(vendor: Vendor) -> None:
    vendor.sdist.write_bytes(vendor.sdist.read_bytes() + b"x")
    result = vendor.fetch("--sdist", str(vendor.sdist))
    assert result.returncode == 1
    assert "SHA-256" in result.stderr
    assert "do not build it" in result.stderr
    assert not vendor.source().exists()


def test_hunk_that_does_not_fit(vendor: Vendor) -> None:
    (vendor.folder / "patches" / "0002-c.patch").write_text(PATCH.replace("int c = 3", "int c = 4"))
    result = vendor.fetch("--sdist", str(vendor.sdist))
    assert result.returncode == 1
    assert "0002-c.patch no longer fits" in result.stderr
    assert not vendor.source().exists()


def test_no_network(vendor: Vendor, tmp_path: Path) -> None:
    result = vendor.fetch(PIP_NO_INDEX="1", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert result.returncode == 1
    assert "Check the network" in result.stderr
    assert "--sdist" in result.stderr
