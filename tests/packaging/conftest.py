"""Builds and installations, each made once."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# below the source, in the tree as in the unpacked sdist: ccache then sees the same relative paths in both builds
BUILD_DIR = "build/packaging"

# cmake and ninja are what scikit-build-core would ask for where they are missing
BUILD_REQUIREMENTS = [*PROJECT["build-system"]["requires"], "build", "cmake>=3.21,<4.2", "ninja"]

_figures: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print sizes and times."""
    for line in _figures:
        terminalreporter.write_line(line)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    _figures.append(f"{what}: {time.monotonic() - start:.1f} s")


def note_figure(line: str) -> None:
    _figures.append(line)


def note_size(path: Path) -> None:
    _figures.append(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command that has to work; return its stdout."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SKBUILD", "CMAKE"))}
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment | (env or {}), capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\n{result.stdout[-8000:]}\n{result.stderr[-8000:]}", pytrace=False)
    return result.stdout


def offline(workspace: Path, source: Path) -> tuple[list[str], dict[str, str]]:
    """Return what goes before a command, and its environment, so that it cannot download.

    pip has no index, no wheel house and no cache, and neither has vendor/fetch.py; where the system lets us, there is no
    network at all.

    Args:
        workspace: Folder for temporary files.
        source: Folder that holds the source that is built; for ccache.
    """
    empty = workspace / "empty"
    temporary = workspace / "tmp"
    for folder in (empty, temporary):
        folder.mkdir(exist_ok=True)
    ccache = os.environ.get("CCACHE_DIR")
    if not ccache and shutil.which("ccache"):
        ccache = subprocess.check_output(["ccache", "--get-config", "cache_dir"], text=True).strip()
    env = {
        "PIP_NO_INDEX": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "XDG_CACHE_HOME": str(empty),
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "TMPDIR": str(temporary),
        "CCACHE_BASEDIR": str(source),
    } | ({"CCACHE_DIR": ccache} if ccache else {})
    unshare = ["unshare", "--net", "--map-root-user"]
    possible = shutil.which("unshare") and subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode == 0
    return unshare if possible else [], env


def make_environment(folder: Path, *packages: str) -> Path:
    """Make a virtual environment with packages; return its Python."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip", cwd=folder.parent)
    if packages:
        run(python, "-m", "pip", "install", "--quiet", *packages, cwd=folder.parent)
    return python


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="session")
def builder(workspace: Path) -> Path:
    """Python of an environment with all that a build and the package need, but not the package."""
    with timed("environment with build requirements"):
        return make_environment(workspace / "builder", *BUILD_REQUIREMENTS, *PROJECT["project"]["dependencies"])


@pytest.fixture(scope="session")
def sdist(workspace: Path, builder: Path) -> Path:
    with timed("sdist"):
        run(builder, "-m", "build", "--sdist", "--no-isolation", "--outdir", workspace / "dist", ROOT, cwd=workspace)
    [path] = (workspace / "dist").glob("*.tar.gz")
    note_size(path)
    return path


@pytest.fixture(scope="session")
def unpacked_sdist(workspace: Path, sdist: Path) -> Path:
    with tarfile.open(sdist) as tar:
        tar.extractall(workspace / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    [folder] = (workspace / "unpacked").iterdir()
    return folder


@pytest.fixture(scope="session")
def wheel(workspace: Path, builder: Path) -> Path:
    """The wheel, built from the tree."""
    before, env = offline(workspace, ROOT)
    with timed("wheel from the tree"):
        run(
            *before, builder, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-C", f"build-dir={BUILD_DIR}",
            "--wheel-dir", workspace / "dist", ROOT, cwd=workspace, env=env,
        )  # fmt: skip
    [path] = (workspace / "dist").glob("*.whl")
    note_size(path)
    return path


@pytest.fixture(scope="session")
def unpacked_wheel(workspace: Path, wheel: Path) -> Path:
    folder = workspace / "unpacked-wheel"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def from_wheel(workspace: Path, wheel: Path) -> Path:
    """Python of a fresh environment that the wheel was installed into."""
    with timed("installation of the wheel and what it needs"):
        return make_environment(workspace / "from-wheel", str(wheel))


@pytest.fixture(scope="session")
def from_sdist(workspace: Path, sdist: Path, builder: Path, wheel: Path) -> Path:
    """Python of an environment that the sdist was installed into, without network. After the wheel, for ccache's sake."""
    before, env = offline(workspace, workspace / "tmp")
    with timed(f"installation of the sdist {'without any network' if before else 'without index'}"):
        run(
            *before, builder, "-m", "pip", "install", "--no-build-isolation", "-C", f"build-dir={BUILD_DIR}", sdist,
            cwd=workspace, env=env,
        )  # fmt: skip
    return builder
