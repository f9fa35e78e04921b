"""Files as users really have them: cut off, incomplete, renamed, behind symlinks, or with metadata that cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from gguf import GGUFReader

from .generate import model_files

if TYPE_CHECKING:
    from collections.abc import Callable


def _copy(model: Path, into: Path) -> list[Path]:
    into.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(f, into / f.name)) for f in model_files(model)]


def _set(name: str, value: Callable[[int], int]) -> Callable[[list[Path]], Path]:
    """Return a breaker that overwrites ``<arch>.<name>`` with a function of ``<arch>.expert_count``."""

    def breaker(files: list[Path]) -> Path:
        reader = GGUFReader(files[0], "r+")
        arch = reader.fields["general.architecture"].contents()
        n_expert = int(reader.fields[f"{arch}.expert_count"].contents())
        field = reader.fields[f"{arch}.{name}"]
        for i in field.data:
            field.parts[i][0] = value(n_expert)
        reader.data.flush()
        return files[0]

    return breaker


def _truncated(files: list[Path]) -> Path:
    with files[-1].open("r+b") as f:
        f.truncate(files[-1].stat().st_size * 2 // 3)
    return files[0]


def _headless(files: list[Path]) -> Path:
    with files[0].open("r+b") as f:
        f.truncate(40)
    return files[0]


def _bad_magic(files: list[Path]) -> Path:
    with files[0].open("r+b") as f:
        f.write(b"PK\x03\x04")
    return files[0]


def _missing_shard(files: list[Path]) -> Path:
    _need_shards(files)
    files[1].unlink()
    return files[0]


def _renamed_shard(files: list[Path]) -> Path:
    _need_shards(files)
    return files[0].rename(files[0].with_name("model.gguf"))


def _second_shard(files: list[Path]) -> Path:
    _need_shards(files)
    return files[1]


def _need_shards(files: list[Path]) -> None:
    if len(files) < 2:
        raise ValueError("this kind of fault needs a model with shards=2 or more")


BREAKS: dict[str, Callable[[list[Path]], Path]] = {
    "truncated": _truncated,
    "headless": _headless,
    "bad-magic": _bad_magic,
    "missing-shard": _missing_shard,
    "renamed-shard": _renamed_shard,
    "second-shard": _second_shard,
    "expert-used-0": _set("expert_used_count", lambda _: 0),
    "expert-used-above": _set("expert_used_count", lambda n: n + 1),
    "expert-count-1025": _set("expert_count", lambda _: 1025),
}
"""Kinds of fault; each changes a copy's files and returns the path that a user would load."""


def break_model(model: Path, kind: str, into: Path) -> Path:
    """Copy a model into a folder, break the copy, and return the path to load.

    llama.cpp answers some of these by aborting the process: load them in a child, or check first.

    Args:
        model: A good model; its first file if it has shards.
        kind: A key of `BREAKS`.
        into: Folder for the copy.

    Raises:
        ValueError: Unknown kind, or one that needs shards.
    """
    if kind not in BREAKS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(BREAKS)}")
    return BREAKS[kind](_copy(model, into))


def link_model(model: Path, into: Path) -> Path:
    """Lay a model out as download caches do: numbered files in ``blobs``, symlinks with the real names in ``snapshot``.

    Returns:
        The symlink to load. This layout is good, not broken.
    """
    blobs, snapshot = into / "blobs", into / "snapshot"
    blobs.mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True, exist_ok=True)
    files = model_files(model)
    for i, file in enumerate(files):
        shutil.copyfile(file, blobs / f"{i:08x}")
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / f"{i:08x}")
    return snapshot / files[0].name
