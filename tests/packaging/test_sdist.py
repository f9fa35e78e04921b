"""What the sdist holds."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from .conftest import ROOT, offline, run


def test_contents(sdist: Path) -> None:
    with tarfile.open(sdist) as tar:
        members = tar.getmembers()
    top = sdist.name.removesuffix(".tar.gz")
    names = {member.name.removeprefix(f"{top}/") for member in members}
    assert all(member.name.startswith(f"{top}/") and (member.isfile() or member.isdir()) for member in members)
    for name in (
        "PKG-INFO", "LICENSE", "README.md", "CMakeLists.txt", "pyproject.toml", "native/CMakeLists.txt", "native/compat/empty.c",
        "vendor/fetch.py", "vendor/lock.json", "vendor/upstream/.stamp", "vendor/upstream/LICENSE.md",
        "vendor/upstream/llama.cpp/LICENSE", "vendor/upstream/llama.cpp/CMakeLists.txt", "vendor/upstream/llama_cpp/llama.py",
        "python/hotmoe/__init__.py", "tests/native/test_sim.cpp",
    ):  # fmt: skip
        assert name in names, name
    assert any(name.startswith("python/hotmoe/model/") and name.endswith(".gguf") for name in names)
    for name in names:
        parts = Path(name).parts
        assert not {"__pycache__", ".git", ".venv", "dist", ".ruff_cache", ".mypy_cache", ".pytest_cache"} & set(parts), name
        assert parts[0] != "build" and not name.endswith((".pyc", ".o", ".so", ".whl", ".tar.gz")), name
    upstream = ROOT / "vendor" / "upstream"
    left_out = [
        path.relative_to(ROOT).as_posix()
        for path in upstream.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.relative_to(ROOT).as_posix() not in names
    ]
    assert left_out == [], "the stamp stands for the whole folder"


def test_its_source_is_up_to_date(unpacked_sdist: Path, builder: Path, workspace: Path) -> None:
    before, env = offline(workspace, workspace)
    out = run(*before, builder, unpacked_sdist / "vendor" / "fetch.py", cwd=workspace, env=env)
    assert out == "", "nothing was fetched"


def test_line_ends_do_not_matter(unpacked_sdist: Path, builder: Path, workspace: Path) -> None:
    """Git may have changed those of our own files."""
    changed = [unpacked_sdist / "vendor" / "lock.json", *(unpacked_sdist / "vendor" / "patches").glob("*.patch")]
    original = {path: path.read_bytes() for path in changed}
    before, env = offline(workspace, workspace)
    try:
        for path, data in original.items():
            path.write_bytes(data.replace(b"\n", b"\r\n"))
            path.chmod(0o755)
        assert run(*before, builder, unpacked_sdist / "vendor" / "fetch.py", cwd=workspace, env=env) == ""
    finally:
        for path, data in original.items():
            path.write_bytes(data)


def test_it_is_the_release_of_the_lock_file(unpacked_sdist: Path) -> None:
    lock = json.loads((unpacked_sdist / "vendor" / "lock.json").read_text())
    assert f'__version__ = "{lock["version"]}"' in (unpacked_sdist / "vendor/upstream/llama_cpp/__init__.py").read_text()
