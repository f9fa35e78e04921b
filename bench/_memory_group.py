"""A memory cgroup for one run: what a process in it touches first, page cache included, counts against a limit.

Both versions of the interface are known. Pages belong to the group that faults them in, whoever uses them later: files that are
to count must be out of the page cache before (`bench._disk.drop_from_cache`).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


class GroupError(RuntimeError):
    """There is no way to limit memory here; the message says why."""


class MemoryGroup:
    """A group that exists for the duration of a block.

    Attributes:
        path: Its folder.
        version: Of the interface, 1 or 2.
        limit_bytes: Of all its processes together, page cache included, swap excluded (there is none for them).
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        """Make the group.

        Args:
            name: Of a folder that does not exist.
            limit_bytes: The limit; the system rounds it to pages.

        Raises:
            GroupError: If that is impossible.
        """
        if os.geteuid() != 0:
            raise GroupError("a memory limit takes a cgroup, and that takes root: run it with sudo, or in a container as root")
        self.limit_bytes = limit_bytes
        try:
            if (V1 / "memory.limit_in_bytes").exists():
                self.version, self.path = 1, V1 / name
                self.path.mkdir()
                self._set("memory.limit_in_bytes", limit_bytes)
                with contextlib.suppress(OSError):  # swap accounting can be off
                    self._set("memory.memsw.limit_in_bytes", limit_bytes)
            elif "memory" in _words(V2 / "cgroup.controllers"):
                self.version, self.path = 2, V2 / name
                if "memory" not in _words(V2 / "cgroup.subtree_control"):
                    (V2 / "cgroup.subtree_control").write_text("+memory")
                self.path.mkdir()
                self._set("memory.max", limit_bytes)
                with contextlib.suppress(OSError):
                    self._set("memory.swap.max", 0)
            else:
                raise GroupError(
                    f"there is no memory controller in {V1} (cgroup v1) or {V2} (v2): mount one, or use another host"
                )
        except OSError as error:
            raise GroupError(f"cannot make a memory cgroup: {error}. Containers need a writable /sys/fs/cgroup") from error

    def _set(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    @property
    def procs(self) -> Path:
        """The file to which a process writes its id to enter."""
        return self.path / "cgroup.procs"

    @property
    def peak_bytes(self) -> int | None:
        """The most that was charged at any time; None if this kernel does not say."""
        try:
            return int((self.path / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")).read_text())
        except OSError:
            return None

    def close(self) -> None:
        """Remove the group, whose processes must have ended."""
        if self.version == 1:
            with contextlib.suppress(OSError):
                (self.path / "memory.force_empty").write_text("0")
        for _ in range(50):
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # a process that was killed is not gone at once
                time.sleep(0.1)
            else:
                return

    def __enter__(self) -> MemoryGroup:
        """Return the object itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the group."""
        self.close()


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
