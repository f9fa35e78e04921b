"""Files that cannot be loaded are refused before llama.cpp sees them, with the reason (CASES 24 and 25)."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import hotmoe
from hotmoe.model_file import check_expert_counts, read_model_file
from tests.models import break_model, cached_model, link_model, model_files


def load(path: Path, **options: Any) -> hotmoe.Llama:
    return hotmoe.Llama(path, **{"n_ctx": 64, "n_threads": 1, "verbose": False, **options})


@pytest.fixture(scope="module")
def sharded() -> Path:
    return cached_model(arch="olmoe", quant="Q8_0", shards=3)


# kind -> (words of the message, name of the file in it)
FILES = {
    "truncated": (r"is cut off: it has \d+ bytes of \d+", "00003-of-00003"),
    "headless": (r"\(40 bytes\) as GGUF", "00001-of-00003"),
    "bad-magic": ("another kind of file", "00001-of-00003"),
    "missing-shard": ("does not exist: put all shards into one folder", "00002-of-00003"),
    "renamed-shard": ("shard of 3, but is not named like one", "model.gguf"),
    "second-shard": ("is shard 2 of 3: give the first", "00001-of-00003"),
}
EXPERTS = {
    "expert-used-0": "expert_used_count is 0, but with 40 experts per layer it must be 1 to 40",
    "expert-used-above": "expert_used_count is 41, but",
    "expert-count-1025": "expert_count is 1025, but llama.cpp takes at most 1024",
}


@pytest.mark.parametrize("kind", FILES)
def test_broken_files(sharded: Path, tmp_path: Path, kind: str) -> None:
    path = break_model(sharded, kind, tmp_path)
    words, file = FILES[kind]
    with pytest.raises(hotmoe.ModelLoadError, match=words) as caught:
        load(path)
    assert file in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("kind", ["truncated", "headless", "bad-magic"])
def test_broken_single_files(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    path = break_model(tiny_model, kind, tmp_path)
    with pytest.raises(hotmoe.ModelLoadError, match=FILES[kind][0]) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", EXPERTS)
def test_impossible_expert_counts(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    path = break_model(tiny_model, kind, tmp_path)  # llama.cpp would abort the process on it
    with pytest.raises(hotmoe.ModelLoadError, match=re.escape(EXPERTS[kind])) as caught:
        load(path)
    assert str(path) in str(caught.value) and "kv_overrides=" in str(caught.value), "file and fix"


def test_counts_that_kv_overrides_change(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(hotmoe.ModelLoadError, match=r"expert_used_count is 99.*correct kv_overrides"):
        load(tiny_model, kv_overrides={"olmoe.expert_used_count": 99})
    path = break_model(tiny_model, "expert-used-0", tmp_path)
    with load(path, kv_overrides={"olmoe.expert_used_count": 4}) as mended, load(tiny_model) as good:
        assert mended("hello", max_tokens=4, temperature=0)["choices"] == good("hello", max_tokens=4, temperature=0)["choices"]


def test_expert_groups(tiny_model: Path) -> None:
    model = read_model_file(tiny_model)
    check_expert_counts(model, {"olmoe.expert_group_count": 8, "olmoe.expert_group_used_count": 2})
    for groups, used in ((40, 1), (7, 1), (8, 0), (8, 8)):
        with pytest.raises(hotmoe.ModelLoadError, match="group"):
            check_expert_counts(model, {"olmoe.expert_group_count": groups, "olmoe.expert_group_used_count": used})


def test_layout_of_a_download_cache(sharded: Path, tmp_path: Path) -> None:
    link = link_model(sharded, tmp_path)
    with load(link) as llm, load(sharded) as original:
        assert llm("hello", max_tokens=4)["choices"] and llm.model_path == str(link)
        assert llm.metadata == original.metadata


def test_a_link_to_the_first_shard_alone(sharded: Path, tmp_path: Path) -> None:
    link = tmp_path / sharded.name
    link.symlink_to(sharded)
    with load(link) as llm:
        assert llm.model_path == str(sharded), "the folder that has the other shards"
    files = [Path(shutil.copyfile(file, tmp_path / f"copy-{file.name}")) for file in model_files(sharded)]
    files[2].unlink()
    link = tmp_path / "link" / files[0].name
    link.parent.mkdir()
    link.symlink_to(files[0])
    with pytest.raises(hotmoe.ModelLoadError, match="does not exist: put all shards"):
        load(link)


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(hotmoe.ModelLoadError, match="is a folder: give the GGUF file"):
        load(tmp_path)


def test_number_of_experts_per_layer_as_an_array(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "layers.gguf"
    writer = gguf.GGUFWriter(path, "olmoe")
    writer.add_uint32("olmoe.expert_count", 8)
    writer.add_array("olmoe.expert_used_count", [0, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    model = read_model_file(path)
    assert model.n_expert_used == 3
    check_expert_counts(model)
