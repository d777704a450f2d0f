"""Every kind of damage to a checkpoint on disk: never loaded silently, named, and the next older one is used instead.

Two ranks save steps 9, 14 and 19; the newest folder of a copy is damaged; one process resumes from the copy, which
reads the shards of both ranks. ``steadyctl ckpt verify`` must find the same damage.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from exact_state import wrong_elements
from jobs import SCRIPTS, JobStarter, command

from steadyrun.checkpoint.manifest import Fragment, fragment_name

NEWEST, OLDER, OLDEST = "step-000000019", "step-000000014", "step-000000009"
ROWS = 64
PAGE = 4096


# -- damage ------------------------------------------------------------------------------------------------------------
def change(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        f.write(data)


def flip(file: Path, at: int) -> None:
    change(file, at, bytes([file.read_bytes()[at] ^ 0x10]))


def payload_at(folder: Path, rank: int, key: str) -> int:
    fragment = Fragment.from_json((folder / fragment_name(rank)).read_bytes())
    return next(s.payload_at_bytes for s in fragment.shards if s.key == key)


def flip_in_tensor(root: Path) -> None:
    flip(root / NEWEST / "__1_0.distcp", payload_at(root / NEWEST, 1, "model.large2") + 12_345)


def zero_a_page(root: Path) -> None:
    change(root / NEWEST / "__0_0.distcp", payload_at(root / NEWEST, 0, "model.large1") + PAGE, bytes(PAGE))


def flip_before_the_payload(root: Path) -> None:
    flip(root / NEWEST / "__1_0.distcp", payload_at(root / NEWEST, 1, "model.large0") - 40)


def flip_in_object(root: Path) -> None:
    fragment = Fragment.from_json((root / NEWEST / fragment_name(0)).read_bytes())
    found = next(o for o in fragment.objects if o.key == "counter.note")
    flip(root / NEWEST / "__0_1.distcp", found.at_bytes + found.length_bytes // 2)


def file_of_another_step(root: Path) -> None:
    shutil.copyfile(root / OLDER / "__0_0.distcp", root / NEWEST / "__0_0.distcp")


def half_overwritten(root: Path) -> None:
    for name in ("__1_0.distcp", "__1_1.distcp", fragment_name(1)):
        shutil.copyfile(root / OLDER / name, root / NEWEST / name)


def other_metadata(root: Path) -> None:
    shutil.copyfile(root / OLDER / "manifest.json", root / NEWEST / "manifest.json")


def cut(name: str, by: int) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        file = root / NEWEST / name
        size = file.stat().st_size
        os.truncate(file, size - by if by else size // 2)

    return damage


def without(name: str) -> Callable[[Path], None]:
    return lambda root: (root / NEWEST / name).unlink()


def flipped(name: str) -> Callable[[Path], None]:
    return lambda root: flip(root / NEWEST / name, (root / NEWEST / name).stat().st_size // 2)


@dataclass(frozen=True)
class Row:
    """A line of the fault table.

    Attributes:
        names: what must be named when it is not used.
        verify: what ``steadyctl ckpt verify`` of that folder ends with; None: it may find nothing, since what is left
            is a good folder of plain DCP.
    """

    damage: Callable[[Path], None]
    names: tuple[str, ...]
    verify_names: tuple[str, ...] | None = None

    @property
    def verified(self) -> tuple[str, ...]:
        return self.names if self.verify_names is None else self.verify_names


ROWS_OF_TABLE = {
    "flipped byte in a tensor": Row(flip_in_tensor, ("large2", "__1_0.distcp")),
    "zeroed page in a tensor": Row(zero_a_page, ("large1", "__0_0.distcp")),
    "flipped byte before a tensor": Row(flip_before_the_payload, ("__1_0.distcp",)),
    "a rank's file of another step": Row(file_of_another_step, ("__0_0.distcp",)),
    "half overwritten with another step": Row(half_overwritten, ("__1",)),
    "manifest of another step": Row(other_metadata, ("manifest.json",)),
    "file cut by one byte": Row(cut("__1_0.distcp", 1), ("__1_0.distcp",)),
    "file cut by a page": Row(cut("__0_0.distcp", PAGE), ("__0_0.distcp",)),
    "file cut in half": Row(cut("__1_0.distcp", 0), ("__1_0.distcp",)),
    "file missing": Row(without("__0_0.distcp"), ("__0_0.distcp",)),
    "flipped byte in an object": Row(flip_in_object, ("counter.note", "__0_1.distcp")),
    "objects missing": Row(without("__1_1.distcp"), ("__1_1.distcp",)),
    "flipped byte in .metadata": Row(flipped(".metadata"), (".metadata",)),
    ".metadata cut": Row(cut(".metadata", 0), (".metadata",)),
    "flipped byte in the checksums": Row(flipped(fragment_name(0)), (fragment_name(0),)),
    "flipped byte in the manifest": Row(flipped("manifest.json"), ("manifest.json",)),
    "manifest cut": Row(cut("manifest.json", 0), ("manifest.json",)),
    "manifest missing": Row(without("manifest.json"), ("manifest.json",)),
}


# -- one job, many copies ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def saved(start_for_module: JobStarter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 9, 14 and 19 of two ranks, each exactly right."""
    root = tmp_path_factory.mktemp("saved") / "checkpoints"
    job = start_for_module(
        "checkpointed.py",
        ["--standalone", "--nproc-per-node=2", "--ft-standby=off"],
        [root, 22, 0.01, 5],
        env={"ROWS": str(ROWS), "ONE_AT_A_TIME": "1"},
    )
    assert job.wait(120) == 0, job.story()
    assert sorted(p.name for p in root.glob("step-*")) == [OLDEST, OLDER, NEWEST]
    for name in (OLDEST, OLDER, NEWEST):
        assert wrong_elements(root / name, int(name[5:]), ROWS, 2) == {}
    return root


@pytest.fixture(scope="module")
def outcomes(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    """What resuming from each damaged copy came to, by row; and the copies' folders under ``root``."""
    base = tmp_path_factory.mktemp("damaged")
    roots: dict[str, Path] = {}
    for number, (name, row) in enumerate(ROWS_OF_TABLE.items()):
        roots[name] = base / str(number)
        shutil.copytree(saved, roots[name])
        row.damage(roots[name])
    for extra, damaged in (("newest two", (NEWEST, OLDER)), ("all", (NEWEST, OLDER, OLDEST)), ("none", ())):
        roots[extra] = base / extra.replace(" ", "-")
        shutil.copytree(saved, roots[extra])
        for step in damaged:
            flip(roots[extra] / step / "__0_0.distcp", payload_at(roots[extra] / step, 0, "model.large0") + 7)
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "resume_each.py"), *map(str, roots.values())],
        env={**os.environ, "EVENTS": str(base), "ROWS": str(ROWS)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    told = {r["folder"]: r for r in map(json.loads, done.stdout.splitlines())}
    assert len(told) == len(roots), done.stderr
    return {name: {**told[str(root)], "root": root} for name, root in roots.items()}


def test_an_undamaged_folder_is_used_and_right(outcomes: Mapping[str, dict[str, Any]]) -> None:
    assert outcomes["none"]["first"] == 20, outcomes["none"]
    assert outcomes["none"]["wrong"] == 0


@pytest.mark.parametrize("name", ROWS_OF_TABLE)
def test_damage_is_named_and_the_next_older_checkpoint_is_used(
    outcomes: Mapping[str, dict[str, Any]], name: str
) -> None:
    outcome, row = outcomes[name], ROWS_OF_TABLE[name]
    assert outcome.get("first") == 15, outcome
    assert outcome["wrong"] == 0
    said = [line for line in outcome["said"] if "19" in line]
    assert said, outcome["said"]
    assert all(any(part in line for line in said) for part in row.names), said


@pytest.mark.parametrize("name", [n for n in ROWS_OF_TABLE if n != "manifest missing"])
def test_verify_finds_the_same_damage(outcomes: Mapping[str, dict[str, Any]], name: str) -> None:
    folder = outcomes[name]["root"] / NEWEST
    done = subprocess.run(
        [command("steadyctl"), "ckpt", "verify", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    text = done.stdout + done.stderr
    assert done.returncode != 0, text
    assert all(part in text for part in ROWS_OF_TABLE[name].verified), text


def test_damage_goes_back_as_far_as_it_must(outcomes: Mapping[str, dict[str, Any]]) -> None:
    outcome = outcomes["newest two"]
    assert outcome["first"] == 10, outcome
    assert outcome["wrong"] == 0


def test_nothing_usable_is_an_error_that_names_each_of_them_and_never_a_fresh_start(
    outcomes: Mapping[str, dict[str, Any]],
) -> None:
    error = outcomes["all"]["error"]
    assert error.startswith("NoUsableCheckpointError"), error
    assert all(f"step {step} " in error for step in (9, 14, 19)), error
    assert "steadyctl ckpt verify" in error
