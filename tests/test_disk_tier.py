"""The bench of the disk tier: what it measures with, and that it says what it could not measure."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench._disk import PAGE, advise_mappings, cached_share, drop_from_cache, measure_disk
from bench._memory_group import GroupError, MemoryGroup
from bench.disk_tier import compare, default_host_slots, limit_bytes, summary
from bench.synthetic import cached_synthetic

ROOT = Path(__file__).parent.parent
MIB = 1 << 20


def _can_limit() -> str:
    try:
        MemoryGroup(f"hotmoe-test-{os.getpid()}-try", 64 * MIB).close()
    except GroupError as error:
        return str(error)
    return ""


needs_groups = pytest.mark.skipif(bool(_can_limit()), reason=f"memory cgroups: {_can_limit()}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(8 * MIB))
    return path


def _in_group(group: MemoryGroup, code: str) -> subprocess.CompletedProcess[str]:
    enter = f"import os; open({str(group.procs)!r}, 'w').write(str(os.getpid()))\n"
    return subprocess.run([sys.executable, "-c", enter + code], capture_output=True, text=True, check=False, timeout=60)


@needs_groups
def test_a_group_limits_memory_and_is_gone_afterwards() -> None:
    with MemoryGroup(f"hotmoe-test-{os.getpid()}", 64 * MIB) as group:
        fits = _in_group(group, f"b = bytearray({32 * MIB}); print(len(b))")
        assert fits.stdout.strip() == str(32 * MIB)
        assert 32 * MIB < (group.peak_bytes or 0) <= 64 * MIB
        assert _in_group(group, f"b = bytearray({128 * MIB}); print(len(b))").returncode == -signal.SIGKILL
        path = group.path
    assert not path.exists()


@needs_groups
def test_the_page_cache_counts(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(96 * MIB))
    drop_from_cache([path])
    with MemoryGroup(f"hotmoe-test-{os.getpid()}", 48 * MIB) as group:
        assert (
            _in_group(group, f"print(len(open({str(path)!r}, 'rb').read({MIB})))\nos.system('cat {path} > /dev/null')").returncode
            == 0
        )
        assert (group.peak_bytes or 0) > 40 * MIB
        assert cached_share([path]) < 0.55


def test_dropped_pages_are_gone(file: Path) -> None:
    file.read_bytes()
    if cached_share([file]) == 0:
        pytest.skip(f"{file} lies on a file system without a page cache")
    assert cached_share([file]) == 1
    drop_from_cache([file])
    assert cached_share([file]) == 0
    with file.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)
        assert mapped[5 * PAGE] >= 0
    assert 0 < cached_share([file]) < 0.1


def test_advice_reaches_the_mappings_of_the_file_only(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(MIB))

    def flags(path: Path) -> list[str]:
        text, at = Path("/proc/self/smaps").read_text(), str(path)
        return next(line for line in text[text.index(at) :].splitlines() if line.startswith("VmFlags")).split()

    def mapped(path: Path) -> mmap.mmap:
        with path.open("rb") as f:
            return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)

    with mapped(file), mapped(other):
        assert "rr" not in flags(file)
        assert advise_mappings([file]) == 8 * MIB
        assert "rr" in flags(file)
        assert "rr" not in flags(other)


@pytest.mark.parametrize("fio", [True, False])
def test_the_disk_has_a_speed(file: Path, fio: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    if fio and not shutil.which("fio"):
        pytest.skip("fio is not installed")
    if not fio:
        monkeypatch.setattr(shutil, "which", lambda _: None)
    got = measure_disk(file, 100_000, readers=(1, 2), seconds=1 if fio else 0.2)
    assert got["block_bytes"] == 102_400  # rounded up
    assert 1e6 < got["bytes_per_second"] < 1e12
    assert set(got["by_readers"]) == {"1", "2"}
    assert got["tool"].startswith("fio") is fio


def _row(arm: str, speed: float, **more: Any) -> dict[str, Any]:
    decode = {"tokens_per_second": speed, "hit_rate": 0.5, "bytes_read_per_token": 100.0, "seconds": 1.0, "tokens": speed}
    return {"arm": arm, "decode": decode, "prefill": {"tokens_per_second": 7.0, "read_bytes": 9}, "load_s": 1.0} | more


def test_summary_takes_medians_and_keeps_errors() -> None:
    arm = summary([_row("a", 1.0), _row("a", 5.0), _row("a", 2.0)], disk=1000.0)
    assert (arm["tokens_per_second"], arm["repetitions"], arm["share_of_disk"]) == (2.0, 3, 0.2)
    assert arm["tokens_per_second_all"] == [1.0, 5.0, 2.0]
    assert "error" not in arm
    part = summary([_row("a", 1.0), {"arm": "a", "error": "killed"}], disk=1.0)
    assert (part["tokens_per_second"], part["repetitions"], part["error"]) == (1.0, 1, "killed")
    none = summary([{"arm": "a", "error": "killed"}], disk=1.0)
    assert none["tokens_per_second"] is none["hit_rate"] is none["bytes_read_per_token"] is None


def test_the_plan_is_shown_beside_what_was_taken() -> None:
    taken = [{"plan_host_bytes": 50 * MIB, "plan_mapped_bytes": 0, "peak_rss_over_plan": ratio} for ratio in (1.0, 1.5, 1.1)]
    arm = summary([_row("a", 1.0, peak_rss_bytes=9, **row) for row in taken], disk=1.0)
    assert (arm["plan_host_bytes"], arm["plan_mapped_bytes"], arm["peak_rss_over_plan"]) == (50 * MIB, 0, 1.1)
    stock = summary([_row("b", 1.0)], disk=1.0)
    assert stock["plan_host_bytes"] is stock["peak_rss_over_plan"] is None


def test_the_ratio_is_that_of_the_best_tier_that_ran() -> None:
    arms = [
        summary([row], 1.0)
        for row in (_row("stock mmap", 2.0), {"arm": "stream direct", "error": "x"}, _row("stream buffered", 30.0))
    ]
    assert compare(arms) == {"product": "stream buffered", "ratio_to_stock_mmap": 15.0}
    assert [arm.get("ratio_to_stock_mmap") for arm in arms] == [1.0, None, 15.0]
    assert compare(arms[1:2]) == {"product": None, "ratio_to_stock_mmap": None}


def test_limits_are_shares_or_sizes() -> None:
    assert [limit_bytes(text, 1000) for text in ("45", "12.5", "4GiB", " 0.5MiB")] == [450, 125, 4 << 30, 1 << 19]
    with pytest.raises(ValueError, match="4X"):
        limit_bytes("4X", 1000)


def test_host_slots_leave_room() -> None:
    model = cached_synthetic()

    def slots(limit: int) -> int:
        return int(default_host_slots(model, limit, n_ctx=64, n_ubatch=8).removesuffix("s"))

    assert slots(0) == model.spec.n_expert_used
    assert slots(1 << 40) == model.spec.n_expert
    some = slots(40 * MIB)
    assert model.spec.n_expert_used < some < model.spec.n_expert
    assert some * model.spec.n_layer * model.spec.expert_bytes + model.dense_bytes < 40 * MIB


@needs_groups
def test_one_object_with_all_arms(tmp_path: Path) -> None:
    arms = "stock mmap;stock mmap + MADV_RANDOM;stock --load-mode none;mapped + readahead;stream direct;resident, no limit"
    command = [
        sys.executable,
        "-m",
        "bench.disk_tier",
        "--quick",
        "--json",
        "--shape",
        "tiny",
        "--n-layer",
        "4",
        "--n-expert",
        "128",
    ]
    command += [
        "--limits",
        "60",
        "--seconds",
        "0.3",
        "--warm-seconds",
        "0.1",
        "--disk-seconds",
        "1",
        "--threads",
        "1",
        "--arms",
        arms,
    ]
    start = time.monotonic()
    done = subprocess.run([*command, "-o", str(tmp_path / "out.json")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 60
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "out.json").read_text())
    assert report["limit_fraction"] == 0.6
    by_name = {arm["name"]: arm for arm in report["arms"]}
    assert list(by_name) == arms.split(";")
    for arm in by_name.values():
        assert {"name", "tokens_per_second", "hit_rate", "bytes_read_per_token"} <= set(arm)
        assert arm["tokens_per_second"] or arm["error"]
    stock = by_name["stock mmap"]
    assert stock["bytes_read_per_token"] > 0
    assert stock["group_peak_bytes"] <= report["limit_bytes"]
    assert by_name["stock mmap + MADV_RANDOM"]["bytes_read_per_token"] < stock["bytes_read_per_token"]
    assert "does not fit" in by_name["stock --load-mode none"]["error"]
    assert by_name["resident, no limit"]["bytes_read_per_token"] == 0
    assert by_name["mapped + readahead"]["hit_rate_of"].startswith("experts")
    streamed, mapped = by_name["stream direct"], by_name["mapped + readahead"]
    if streamed["tokens_per_second"]:  # some file systems have no direct reads
        assert MIB < streamed["plan_host_bytes"] < report["limit_bytes"]
        # libraries and metadata are some MiB, which this small model does not hide
        assert 0.6 < streamed["peak_rss_over_plan"] < 1.1 + 8 * MIB / streamed["plan_host_bytes"]
        assert streamed["plan_mapped_bytes"] == 0
    assert mapped["plan_mapped_bytes"] > mapped["plan_host_bytes"] > 0
    assert 0 < mapped["peak_rss_over_plan"] < 1.1
    assert stock["plan_host_bytes"] is stock["peak_rss_over_plan"] is None
    product = next(name for name in ("stream direct", "mapped + readahead") if by_name[name]["tokens_per_second"])
    assert report["product"] == product
    assert report["ratio_to_stock_mmap"] == pytest.approx(by_name[product]["tokens_per_second"] / stock["tokens_per_second"])


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(GroupError, match="takes root"):
        MemoryGroup("hotmoe-test-none", MIB)
