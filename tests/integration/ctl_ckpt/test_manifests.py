"""``steadyctl ckpt ls``, ``show`` and ``verify`` on steadyrun's own checkpoints: complete, damaged, partial."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadyrun.checkpoint import commit
from steadyrun.checkpoint.catalog import set_aside
from steadyrun.checkpoint.commit import read_manifest
from steadyrun.checkpoint.manifest import Fragment


@pytest.fixture
def root(own_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """Steps 10, 20 and 30, complete."""
    for step in (10, 20, 30):
        own_folder(tmp_path / "root", step)
    return tmp_path / "root"


def overwrite(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        f.write(data)


def flip(file: Path, at: int) -> None:
    overwrite(file, at, bytes([file.read_bytes()[at] ^ 0x20]))


def fragment_of(folder: Path, rank: int) -> Fragment:
    return Fragment.from_json((folder / f"__{rank}.shards.json").read_bytes())


# -- ls and show -----------------------------------------------------------------------------------------------------
def test_ls_says_what_manifests_say(ckpt: Callable[..., Any], root: Path) -> None:
    commit.begin(root, 40, 2)
    set_aside(root / "step-000000020", "rollback to step 10")
    told = ckpt("ls", root, "--json")
    assert told.code == 0  # a save that goes on is no fault
    listed = {Path(c["path"]).name: c for c in told.json["checkpoints"]}
    assert [name for name, c in listed.items() if c["is_latest"]] == ["step-000000030"]
    ten = listed["step-000000010"]
    assert (ten["step"], ten["is_complete"], ten["manifest"]["world_size"]) == (10, True, 2)
    assert (ten["manifest"]["run_id"], ten["manifest"]["verified_by"]) == ("demo", None)
    assert listed["step-000000020"]["is_set_aside"]
    text = ckpt("ls", root).text
    assert "set aside by a rollback" in text
    assert "latest, complete" in text


def test_a_partial_folder_is_listed_with_its_step_and_is_no_fault(
    ckpt: Callable[..., Any], root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "step-000000030", root / "step-000000040.a3.partial")
    os.unlink(root / "step-000000040.a3.partial" / "manifest.json")
    told = ckpt("ls", root, "--json")
    assert told.code == 0
    (partial,) = [c for c in told.json["checkpoints"] if c["is_partial"]]
    assert (partial["step"], partial["is_complete"], partial["is_latest"]) == (40, False, False)
    assert "being written, or cut off" in ckpt("ls", root).text
    # nor do show and verify take it for the newest
    assert Path(ckpt("show", root, "--json").json["path"]).name == "step-000000030"
    assert [Path(c["path"]).name for c in ckpt("verify", root, "--json").json["checkpoints"]] == [
        "step-000000010",
        "step-000000020",
        "step-000000030",
    ]


def test_show_says_what_is_covered_and_what_not(ckpt: Callable[..., Any], root: Path) -> None:
    text = ckpt("show", root / "step-000000020").text
    for words in (
        "kind steadyrun",
        "step 20",
        "run demo, attempt 0, 2 ranks, torch 2.13.0",
        "covered model, rng",
        "not covered no loader was given",
        'mesh {"dp": 2}',
        "samples 640",
        "replicas 1 compared before the commit",
        "verified not yet",
        "tensors 2 in 3 shards",
        "objects 3 that are no tensors",
    ):
        assert words in text
    told = ckpt("show", root / "step-000000020", "--json")
    assert (told.json["step"], told.json["manifest"]["samples"]) == (20, 640)


# -- verify ----------------------------------------------------------------------------------------------------------
def test_a_whole_one_is_marked_as_verified_once_all_of_it_was_read(ckpt: Callable[..., Any], root: Path) -> None:
    folder = root / "step-000000020"
    assert ckpt("verify", folder, "--no-mark").code == 0
    assert read_manifest(folder).verified is None
    told = ckpt("verify", folder, "--json")
    assert told.code == 0
    (report,) = told.json["checkpoints"]
    assert (report["is_fully_verified"], report["step"], report["unverified"]) == (True, 20, [])
    verified = read_manifest(folder).verified
    assert verified is not None
    assert verified.by == "verify"
    assert "verified" in ckpt("ls", folder).text
    assert ckpt("verify", folder).code == 0  # the new manifest is as good as the old one


def test_every_byte_of_every_file_is_covered(ckpt: Callable[..., Any], root: Path) -> None:
    """One bit after the other, in a stride through all files; each is found, in its file, and nothing is marked."""
    folder = root / "step-000000010"
    for file in sorted(folder.iterdir()):
        size = file.stat().st_size
        for at in sorted({0, 1, size // 3, size // 2, size - 1, *range(97, size, max(size // 7, 1))}):
            flip(file, at)
            told = ckpt("verify", folder, "--json")
            assert told.code == 1, f"{file.name} byte {at}"
            assert file.name in {p["file"] for p in told.json["checkpoints"][0]["problems"]}, f"{file.name} byte {at}"
            flip(file, at)
    assert read_manifest(folder).verified is None


def test_a_flipped_bit_is_named_with_its_tensor_and_shard(ckpt: Callable[..., Any], root: Path) -> None:
    folder = root / "step-000000010"
    shard = next(s for s in fragment_of(folder, 1).shards if s.key == "model.weight")
    flip(folder / "__1_0.distcp", shard.payload_at_bytes + 4321)
    told = ckpt("verify", folder, "--json")
    (problem,) = told.json["checkpoints"][0]["problems"]
    assert (problem["file"], problem["keys"], problem["shard_offsets"]) == ("__1_0.distcp", ["model.weight"], [512, 0])
    text = ckpt("verify", folder).text
    assert "model.weight, shard at [512, 0], __1_0.distcp" in text


def test_a_shard_of_another_step_is_found(ckpt: Callable[..., Any], root: Path) -> None:
    """The row of the fault table that no checksum inside the files can find."""
    shutil.copy(root / "step-000000020" / "__1_0.distcp", root / "step-000000010" / "__1_0.distcp")
    told = ckpt("verify", root / "step-000000010", "--json")
    assert told.code == 1
    keys = {key for p in told.json["checkpoints"][0]["problems"] for key in p["keys"]}
    assert "model.weight" in keys


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_1.distcp", "__0.shards.json", ".metadata"])
def test_a_file_that_is_gone_or_cut_is_named(ckpt: Callable[..., Any], root: Path, name: str) -> None:
    folder = root / "step-000000010"
    content = (folder / name).read_bytes()
    os.truncate(folder / name, len(content) - 1)
    told = ckpt("verify", folder, "--json")
    assert told.code == 1
    assert name in {p["file"] for p in told.json["checkpoints"][0]["problems"]}
    (folder / name).unlink()
    told = ckpt("verify", folder, "--json")
    assert told.code == 1
    assert name in {p["file"] for p in told.json["checkpoints"][0]["problems"]}


def test_a_damaged_manifest_is_a_damaged_checkpoint(ckpt: Callable[..., Any], root: Path) -> None:
    folder = root / "step-000000030"
    file = folder / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"world_size": 2', b'"world_size": 3'))
    told = ckpt("ls", root, "--json")
    assert told.code == 1
    listed = {Path(c["path"]).name: c for c in told.json["checkpoints"]}
    assert "manifest.json is damaged" in listed["step-000000030"]["manifest_problem"]
    assert [name for name, c in listed.items() if c["is_latest"]] == ["step-000000020"]
    assert ckpt("verify", folder).code == 1


def test_a_file_that_was_added_is_said(ckpt: Callable[..., Any], root: Path) -> None:
    (root / "step-000000010" / "__7_0.distcp").write_bytes(b"x" * 100)
    text = ckpt("verify", root / "step-000000010").text
    assert "added after the commit: __7_0.distcp" in text


def test_a_folder_that_cannot_be_written_is_verified_but_not_marked(
    ckpt: Callable[..., Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("steadyrun.ctl.ckpt.looking.mark_verified", refuse)
    told = ckpt("verify", root / "step-000000010")
    assert told.code == 0
    assert "cannot be marked as verified: Read-only file system" in told.text
