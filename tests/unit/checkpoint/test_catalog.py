"""What lies in a folder of checkpoints."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

from steadyrun.checkpoint import catalog
from steadyrun.checkpoint.catalog import BusyError, CatalogError, hold, list_checkpoints, look, set_aside
from steadyrun.checkpoint.commit import seal_manifest
from steadyrun.checkpoint.durable import write_whole
from steadyrun.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, FileRecord, Manifest, Verified

BODY = b"x" * 100
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """``make("step-000000003", attempt=2)``: a checkpoint with one data file, whole unless changed afterwards."""

    def call(name: str, **more: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / METADATA_NAME).write_bytes(b"m" * 10)
        (folder / "__0_0.distcp").write_bytes(BODY)
        files = (FileRecord(METADATA_NAME, 10, xxh3_128_hexdigest(b"m" * 10)), FileRecord("__0_0.distcp", len(BODY)))
        step = int(name[5:14])
        manifest = Manifest(step, 0, "run", 1, 1.0 * step, "2.13.0", "0.1.0", files)
        if not name.endswith(".partial"):
            (folder / MANIFEST_NAME).write_bytes(seal_manifest(dataclasses.replace(manifest, **more)))
        return folder

    return call


def names(listed: tuple[catalog.Listed, ...]) -> list[str]:
    return [c.path.name for c in listed]


def test_a_root_that_does_not_exist_holds_nothing(tmp_path: Path) -> None:
    assert look(tmp_path / "none").checkpoints == ()


def test_newest_first_by_step_then_by_attempt(make: Make, tmp_path: Path) -> None:
    make("step-000000010")
    make("step-000000009", attempt=1)
    make("step-000000009.a3", attempt=3)
    make("step-000000100", verified=Verified(1.0, "save"))
    listed = list_checkpoints(tmp_path)
    assert names(listed) == ["step-000000100", "step-000000010", "step-000000009.a3", "step-000000009"]
    assert [c.is_complete for c in listed] == [True] * 4
    assert [c.is_verified for c in listed] == [True, False, False, False]
    assert [c.attempt for c in listed] == [0, 0, 3, 1]


def test_partials_trash_and_strangers_are_kept_apart(make: Make, tmp_path: Path) -> None:
    make("step-000000002")
    make("step-000000003.a0.partial")
    (tmp_path / ".trash-step-000000001").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-000000008").write_text("a file, no folder")
    found = look(tmp_path)
    assert names(found.checkpoints) == ["step-000000002"]
    assert names(found.partials) == ["step-000000003.a0.partial"]
    assert not found.partials[0].is_complete
    assert [p.name for p in found.trash] == [".trash-step-000000001"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda f: (f / "__0_0.distcp").write_bytes(BODY[:-1]), "__0_0.distcp has 99 bytes; 100 were committed"),
        (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda f: (f / METADATA_NAME).write_bytes(b"M" * 10), ".metadata is damaged"),
        (lambda f: (f / MANIFEST_NAME).write_text("{"), "manifest.json is damaged"),
        (lambda f: os.truncate(f / MANIFEST_NAME, 40), "manifest.json is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_listed_with_its_problem(
    make: Make, tmp_path: Path, damage: Callable[[Path], object], problem: str
) -> None:
    damage(make("step-000000004"))
    (listed,) = list_checkpoints(tmp_path)
    assert not listed.is_complete
    assert not listed.is_unsure
    assert listed.problem is not None
    assert problem in listed.problem


def test_a_manifest_of_another_step_or_of_an_incomplete_one_is_a_problem(make: Make, tmp_path: Path) -> None:
    make("step-000000004", step=5)
    make("step-000000003", complete=False)
    assert [c.problem for c in list_checkpoints(tmp_path)] == [
        f"{tmp_path}/step-000000004/manifest.json is that of step 5, in the folder of step 4",
        "its manifest says that it is not complete",
    ]


def test_another_programs_folder_of_our_name_is_not_taken_for_a_broken_one_of_ours(make: Make, tmp_path: Path) -> None:
    (make("step-000000004") / MANIFEST_NAME).unlink()
    (listed,) = list_checkpoints(tmp_path)
    assert (listed.problem, listed.is_unsure, listed.is_complete) == ("manifest.json is missing", True, False)


def test_a_folder_that_vanishes_while_it_is_looked_at_is_left_out(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("step-000000002")
    gone = make("step-000000001")
    true_listdir = os.listdir

    def listdir(path: Path) -> list[str]:
        out = true_listdir(path)
        if Path(path) == gone:
            shutil.rmtree(gone)
        return out

    monkeypatch.setattr(os, "listdir", listdir)
    assert names(list_checkpoints(tmp_path)) == ["step-000000002"]
    assert not gone.exists()


def test_a_stale_handle_is_looked_up_again(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("step-000000002")
    true_listdir, failures = os.listdir, [1]

    def listdir(path: Path) -> list[str]:
        if failures:
            failures.pop()
            raise OSError(errno.ESTALE, "Stale file handle")
        return true_listdir(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert names(list_checkpoints(tmp_path)) == ["step-000000002"]


def test_what_cannot_be_read_is_unsure_not_damaged(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("step-000000002")
    true_read = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == MANIFEST_NAME:
            raise OSError(errno.EIO, "Input/output error")
        return true_read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    (listed,) = list_checkpoints(tmp_path)
    assert listed.is_unsure
    assert listed.problem == f"cannot read {tmp_path}/step-000000002/manifest.json: Input/output error"


def test_a_root_that_cannot_be_listed_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")
    with pytest.raises(CatalogError, match=r"cannot list .*root: Not a directory; check"):
        look(tmp_path / "root")


def test_the_pointer_finds_a_folder_that_a_cached_listing_lacks(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("step-000000002")
    make("step-000000003")
    (tmp_path / catalog.LATEST_NAME).write_text(json.dumps({"step": 3, "folder": "step-000000003"}))
    true_listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda p: [n for n in true_listdir(p) if n != "step-000000003"])
    assert names(list_checkpoints(tmp_path)) == ["step-000000003", "step-000000002"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"folder": "../elsewhere"}', '{"folder": 3}', '{"folder": "step-000000077"}']
)
def test_a_pointer_that_leads_nowhere_is_ignored(make: Make, tmp_path: Path, text: str) -> None:
    make("step-000000002")
    (tmp_path / catalog.LATEST_NAME).write_text(text)
    assert names(list_checkpoints(tmp_path)) == ["step-000000002"]


def test_a_file_that_an_old_cache_does_not_show_is_asked_for_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make("step-000000002") / "__0_0.distcp"
    true_stat, true_open = Path.stat, os.open
    opened = set()

    def stat(path: Path, **more: Any) -> os.stat_result:
        if path == data and path not in opened:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return true_stat(path, **more)

    def open_(path: Path, flags: int, *more: Any, **named: Any) -> int:
        opened.add(path)
        return true_open(path, flags, *more, **named)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(os, "open", open_)
    assert list_checkpoints(tmp_path)[0].is_complete


def test_a_checkpoint_that_was_set_aside_says_so_and_stays_complete(make: Make, tmp_path: Path) -> None:
    set_aside(make("step-000000004"), "rollback to step 2")
    (listed,) = list_checkpoints(tmp_path)
    assert listed.is_superseded
    assert listed.is_complete


def test_a_reader_keeps_the_remover_away_and_readers_do_not_disturb_each_other(make: Make) -> None:
    folder = make("step-000000004")
    somebody_reads = pytest.raises(BusyError, match="somebody reads it; try again later")
    with hold(folder), hold(folder), somebody_reads, hold(folder, to_remove=True):
        pass
    with hold(folder, to_remove=True), pytest.raises(BusyError, match="it is being removed; use another"), hold(folder):
        pass


def test_a_reader_that_comes_while_the_folder_goes_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("step-000000004")
    true_lock = catalog._lock

    def lock(fd: int, path: Path, to_remove: bool) -> None:
        path.rename(path.with_name(".trash-4"))
        true_lock(fd, path, to_remove)

    monkeypatch.setattr(catalog, "_lock", lock)
    with pytest.raises(BusyError, match="removed meanwhile"), hold(folder):
        pass
    with pytest.raises(BusyError, match="may have been removed"), hold(folder):
        pass


def test_without_locks_in_the_file_system_reading_goes_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with hold(make("step-000000004")):
        pass


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small.json"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"

    def fsync(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"newer")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["small.json"]
