"""Fetch llama.cpp and llama-cpp-python's Python layer, and apply our patches.

Both come from one sdist, pinned in ``lock.json`` by version and SHA-256. The
sdist is got by package name through pip, so that a mirror or an offline wheel
house set up for pip serves it too. What the build needs is unpacked into
``vendor/upstream`` (ignored by git), then ``patches/*.patch`` are applied in
the order of their numbers.

A second run finds the stamp it wrote and does nothing. When a patch changes,
only the files whose content differs are written again, so an incremental build
stays incremental.

Our own sdist carries ``vendor/upstream`` with its stamp: there, too, nothing is
fetched, and neither pip nor the network is needed.

Usage: python vendor/fetch.py [--sdist FILE] [--force]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
UPSTREAM = HERE / "upstream"
STAMP = UPSTREAM / ".stamp"

# What is taken out of the sdist, relative to its top folder.
WANTED = (
    "LICENSE.md",
    "llama_cpp/",
    "vendor/llama.cpp/LICENSE",
    "vendor/llama.cpp/CMakeLists.txt",
    "vendor/llama.cpp/app/",
    "vendor/llama.cpp/cmake/",
    "vendor/llama.cpp/common/",
    "vendor/llama.cpp/ggml/",
    "vendor/llama.cpp/include/",
    "vendor/llama.cpp/licenses/",
    "vendor/llama.cpp/src/",
    "vendor/llama.cpp/tests/",
    "vendor/llama.cpp/tools/",
    "vendor/llama.cpp/vendor/",
)


class FetchError(Exception):
    """A step failed; the message says what to do about it."""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as lower-case hex."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def patches() -> list[Path]:
    """Return our patches in the order in which they are applied."""
    return sorted((HERE / "patches").glob("[0-9]*.patch"))


def wanted_stamp() -> str:
    """Return a digest of everything that decides the content of ``upstream``.

    Where the files lie, their modes and times and their line ends (git may change those)
    do not count: the stamp that goes into our sdist is right wherever it is unpacked.
    """
    digest = hashlib.sha256()
    for path in (HERE / "lock.json", HERE / "fetch.py", *patches()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def cache_dir() -> Path:
    """Return the user's cache folder for sdists that passed the hash check."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hotmoe"


def check_hash(path: Path, lock: dict[str, str]) -> None:
    """Raise unless ``path`` is the pinned sdist."""
    found = sha256_of(path)
    if found != lock["sdist_sha256"]:
        msg = (
            f"{path}: SHA-256 is {found}, but vendor/lock.json pins "
            f"{lock['sdist_sha256']} for {lock['package']} {lock['version']}. "
            "Delete the file and fetch again; if it differs again, the index serves "
            "another file than the one this release was made with: do not build it."
        )
        raise FetchError(msg)


def download(lock: dict[str, str]) -> Path:
    """Get the sdist by name through pip and return its path in the cache."""
    name = f"{lock['package'].replace('-', '_')}-{lock['version']}.tar.gz"
    cached = cache_dir() / name
    if cached.exists() and sha256_of(cached) == lock["sdist_sha256"]:
        return cached
    with tempfile.TemporaryDirectory() as folder:
        requirement = f"{lock['package']}=={lock['version']}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        result = subprocess.run(
            [*command, "--dest", folder, requirement],
            capture_output=True,
            text=True,
            check=False,
        )
        found = list(Path(folder).glob("*.tar.gz"))
        if result.returncode != 0 or len(found) != 1:
            tail = "\n".join((result.stdout + result.stderr).strip().splitlines()[-8:])
            msg = (
                f"pip could not download the sdist of {requirement}:\n{tail}\n"
                "Check the network and pip's index settings, or fetch the sdist elsewhere and "
                f"run: python vendor/fetch.py --sdist {name}"
            )
            raise FetchError(msg)
        check_hash(found[0], lock)
        cached.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(found[0], cached)
    return cached


def unpack(sdist: Path, target: Path) -> None:
    """Unpack the wanted members of the sdist: ``llama.cpp``, ``llama_cpp``, licences."""
    with tarfile.open(sdist) as tar:
        for member in tar:
            inner = member.name.partition("/")[2]
            if not member.isfile() or not inner.startswith(WANTED):
                continue
            if ".." in Path(inner).parts:
                msg = f"{sdist}: unsafe member name {member.name!r}; do not use this file."
                raise FetchError(msg)
            source = tar.extractfile(member)
            if source is None:
                continue
            path = target / inner.removeprefix("vendor/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.read())
            path.chmod(0o755 if member.mode & 0o100 else 0o644)


def apply_patches(target: Path) -> None:
    """Apply our patches to the unpacked source; every hunk must fit."""
    try:
        import patch_ng
    except ImportError as error:
        msg = "the module patch_ng is missing. Install it: python -m pip install patch-ng"
        raise FetchError(msg) from error
    # The library reports a hunk that does not fit through its logger only.
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for path in patches():
        patch_set = patch_ng.fromfile(str(path))
        if not patch_set or not patch_set.apply(root=str(target / "llama.cpp")):
            msg = (
                f"{path.name} no longer fits the pinned source (see the hunks named above). "
                "Restore vendor/lock.json and vendor/patches to the same commit, or, when you "
                "move to a newer llama.cpp, make the patch again."
            )
            raise FetchError(msg)


def sync(fresh: Path, target: Path) -> None:
    """Make ``target`` equal to ``fresh``, leaving equal files untouched."""
    names = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    if target.exists():
        for path in target.rglob("*"):
            if path.is_file() and path.relative_to(target) not in names:
                path.unlink()
    for name in names:
        old, new = target / name, fresh / name
        if not old.exists() or old.read_bytes() != new.read_bytes():
            old.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(new, old)


def fetch(sdist: Path | None, *, force: bool) -> None:
    """Bring ``vendor/upstream`` to the state that lock file and patches ask for."""
    lock = json.loads((HERE / "lock.json").read_text())
    stamp = wanted_stamp()
    complete = all((UPSTREAM / name.removeprefix("vendor/")).exists() for name in WANTED)
    if not force and complete and STAMP.exists() and STAMP.read_text().strip() == stamp:
        return
    if sdist is not None:
        if not sdist.exists():
            msg = f"--sdist {sdist}: no such file."
            raise FetchError(msg)
        check_hash(sdist, lock)
    else:
        print(f"fetching the sdist of {lock['package']} {lock['version']} through pip")
        sdist = download(lock)
    with tempfile.TemporaryDirectory(dir=HERE, prefix=".unpack-") as folder:
        fresh = Path(folder)
        unpack(sdist, fresh)
        apply_patches(fresh)
        STAMP.unlink(missing_ok=True)
        sync(fresh, UPSTREAM)
    STAMP.write_text(stamp)
    print(f"unpacked into {UPSTREAM} and patched ({len(patches())} patches)")


def main() -> int:
    """Run from the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Fetch and patch the pinned llama.cpp.")
    parser.add_argument("--sdist", type=Path, help="use this file instead of downloading")
    parser.add_argument("--force", action="store_true", help="unpack again even if up to date")
    args = parser.parse_args()
    try:
        fetch(args.sdist, force=args.force)
    except FetchError as error:
        print(f"vendor/fetch.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
