"""Files that fail while experts are read from them; what happens is in tests/stream_faults.py."""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tests.stream_faults as faults

DEVICES = pytest.mark.parametrize("device", ["", "SIM0"], ids=["CPU", "SIM"])

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads are broken by a preloaded library, as Linux has them")


@DEVICES
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_failing_reads(device: str, direct: str, tmp_path: Path) -> None:
    assert faults.in_process(faults.failing_reads, tmp_path, device, direct).split()[0] == "15"


def test_failing_reads_of_several_threads(tmp_path: Path) -> None:
    """All threads that compute an expert hear that it does not come."""
    assert faults.in_process(faults.failing_reads, tmp_path, "", "auto", 3).split()[0] == "15"


@DEVICES
def test_told_once(device: str, tmp_path: Path) -> None:
    faults.in_process(faults.told_once, tmp_path, device)


@DEVICES
def test_failing_embeddings(device: str, tmp_path: Path) -> None:
    faults.in_process(faults.failing_embeddings, tmp_path, device)


@DEVICES
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_odd_reads(device: str, direct: str, tmp_path: Path) -> None:
    faults.in_process(faults.odd_reads, tmp_path, device, direct)


def test_stuck_reader(tmp_path: Path) -> None:
    """Both at once, since the time limit is half a minute."""
    folders = {device: tmp_path / (device or "CPU") for device in ("", "SIM0")}
    with ThreadPoolExecutor() as pool:
        for folder in folders.values():
            folder.mkdir()
        runs = [pool.submit(faults.in_process, faults.stuck_reader, folder, device) for device, folder in folders.items()]
        assert all("usable" in run.result() for run in runs)


@DEVICES
@pytest.mark.parametrize("how", ["truncated", "written to", "replaced", "unlinked"])
def test_changed_file(device: str, how: str, tmp_path: Path) -> None:
    """CASE 24, while it runs."""
    faults.in_process(faults.changed_file, tmp_path, device, how, preload=False)


@DEVICES
def test_file_system_without_direct_reads(device: str) -> None:
    """CASE 28."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("there is no /dev/shm, whose file system refuses direct reads")
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        faults.in_process(faults.file_system_without_direct_reads, Path(folder), device, preload=False)
