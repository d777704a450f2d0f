"""Commits: whole or not at all, wherever they stop; and removals that nobody sees half done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from steadyrun.checkpoint import commit as commits
from steadyrun.checkpoint.commit import (
    CommitError,
    abandon,
    begin,
    commit,
    is_complete,
    mark_verified,
    read_manifest,
    remove,
    sweep_trash,
)
from steadyrun.checkpoint.manifest import FileRecord, Manifest, ManifestError, Verified

METADATA = b"the metadata"


def manifest(step: int, attempt: int = 0, size_bytes: int = 5) -> Manifest:
    return Manifest(step, attempt, "run", 1, 1.5, "2.13", "0.1", (FileRecord("__0_0.distcp", size_bytes),))


def save(root: Path, step: int, attempt: int = 0, data: bytes = b"bytes") -> Path:
    partial = begin(root, step, attempt)
    (partial / "__0_0.distcp").write_bytes(data)
    return commit(root, partial, manifest(step, attempt, len(data)), METADATA)


def test_a_committed_folder_is_complete_and_the_hint_names_it(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    folder = save(root, 3)
    assert folder == root / "step-000000003"
    assert is_complete(folder)
    assert sorted(p.name for p in folder.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json"]
    assert sorted(p.name for p in root.iterdir()) == ["latest.json", "step-000000003"]
    assert json.loads((root / "latest.json").read_text()) == {"step": 3, "folder": "step-000000003"}
    assert (folder / ".metadata").read_bytes() == METADATA


def test_a_step_that_is_there_already_is_never_replaced_by_another_attempt(tmp_path: Path) -> None:
    first = save(tmp_path, 3, 0, b"first")
    second = save(tmp_path, 3, 1, b"second!")
    third = save(tmp_path, 3, 1, b"third, in the same attempt")
    assert [first.name, second.name, third.name] == ["step-000000003", "step-000000003.a1", "step-000000003.a1"]
    assert (first / "__0_0.distcp").read_bytes() == b"first"
    assert (third / "__0_0.distcp").read_bytes() == b"third, in the same attempt"
    assert is_complete(first)
    assert is_complete(third)


def test_a_folder_that_somebody_else_made_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "step-000000003"
    foreign.mkdir()
    (foreign / "theirs").write_text("x")
    assert save(tmp_path, 3).name == "step-000000003.a0"
    assert (foreign / "theirs").read_text() == "x"


def test_begin_clears_what_an_earlier_try_left(tmp_path: Path) -> None:
    stale = begin(tmp_path, 3, 2)
    (stale / "old").write_text("x")
    again = begin(tmp_path, 3, 2)
    assert again == stale
    assert list(again.iterdir()) == []
    other = begin(tmp_path, 3, 3)
    assert other != again
    assert not is_complete(other)
    abandon(again)
    abandon(again)  # nothing there: nothing to do
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000003.a3.partial"]


@pytest.mark.parametrize(("size_bytes", "words"), [(4, "has 5 bytes; 4 were committed"), (None, "is missing")])
def test_files_that_are_not_as_the_manifest_says_are_not_committed(
    tmp_path: Path, size_bytes: int | None, words: str
) -> None:
    save(tmp_path, 1)
    partial = begin(tmp_path, 2, 0)
    if size_bytes is not None:
        (partial / "__0_0.distcp").write_bytes(b"bytes")
    with pytest.raises(CommitError, match="cannot commit the checkpoint of step 2") as caught:
        commit(tmp_path, partial, manifest(2, 0, size_bytes or 5), METADATA)
    assert words in str(caught.value)
    assert partial.exists()
    assert not is_complete(partial)
    assert is_complete(tmp_path / "step-000000001")


def test_a_disk_that_refuses_the_manifest_leaves_no_checkpoint(tmp_path: Path) -> None:
    """With a real limit, in a process of its own: the manifest does not fit."""
    save(tmp_path, 1)
    partial = begin(tmp_path, 2, 0)
    (partial / "__0_0.distcp").write_bytes(b"bytes")
    code = f"""
import resource, sys
from pathlib import Path
from steadyrun.checkpoint.commit import CommitError, commit
from steadyrun.checkpoint.manifest import FileRecord, Manifest
files = (FileRecord("__0_0.distcp", 5),)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    commit(Path({str(tmp_path)!r}), Path({str(partial)!r}), Manifest(2, 0, "r", 1, 1.0, "", "", files), b"m")
except CommitError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "cannot commit the checkpoint of step 2" in done.stdout, done.stderr
    assert "File too large" in done.stdout
    assert sorted(p.name for p in partial.iterdir()) == [".metadata", "__0_0.distcp"]
    assert json.loads((tmp_path / "latest.json").read_text())["step"] == 1
    assert commit(tmp_path, partial, manifest(2), METADATA).name == "step-000000002"


def test_a_hint_that_cannot_be_written_does_not_undo_the_commit(tmp_path: Path) -> None:
    (tmp_path / "latest.json").mkdir()
    (tmp_path / "latest.json" / "x").touch()
    assert is_complete(save(tmp_path, 5))


# -- what is complete --------------------------------------------------------------------------------------------------
def test_every_damage_that_a_look_can_see_is_named(tmp_path: Path) -> None:
    def refused(step: int, damage: str) -> str:
        folder = save(tmp_path, step)
        match damage:
            case "cut":
                os.truncate(folder / "__0_0.distcp", 3)
            case "lost":
                (folder / "__0_0.distcp").unlink()
            case "metadata":
                (folder / ".metadata").write_bytes(METADATA[:-1] + b"!")
            case "manifest":
                data = bytearray((folder / "manifest.json").read_bytes())
                data[40] ^= 1
                (folder / "manifest.json").write_bytes(data)
            case "no manifest":
                (folder / "manifest.json").unlink()
            case "moved":
                folder = folder.rename(tmp_path / f"step-{step + 1000:09d}")
        assert not is_complete(folder)
        with pytest.raises(ManifestError) as caught:
            read_manifest(folder)
        return str(caught.value)

    assert "__0_0.distcp has 3 bytes; 5 were committed" in refused(1, "cut")
    assert "__0_0.distcp is missing" in refused(2, "lost")
    assert ".metadata is damaged" in refused(3, "metadata")
    assert "manifest.json is damaged" in refused(4, "manifest")
    assert "it has no manifest.json" in refused(5, "no manifest")
    assert "is that of step 6, in the folder of step 1006" in refused(6, "moved")


def test_a_manifest_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"12345")
    partial = begin(tmp_path, 1, 0)
    for name in ("../secret", str(tmp_path / "secret"), "", ".."):
        bad = Manifest(1, 0, "run", 1, 1.5, "", "", (FileRecord(name, 5),))
        with pytest.raises(CommitError, match="names a file outside of its folder"):
            commit(tmp_path, partial, bad, METADATA)


def test_a_folder_that_is_not_there_is_not_complete(tmp_path: Path) -> None:
    assert not is_complete(tmp_path / "step-000000001")
    with pytest.raises(ManifestError, match="not a complete checkpoint of ours"):
        read_manifest(tmp_path / "step-000000001")


def test_verified_is_noted_and_nothing_else_changes(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    before = read_manifest(folder)
    mark_verified(folder, Verified(99.5, "verify"))
    after = read_manifest(folder)
    assert after.verified == Verified(99.5, "verify")
    assert (after.step, after.files) == (before.step, before.files)
    assert is_complete(folder)
    assert not list(folder.glob("*.tmp")) + list(folder.glob(".*.tmp"))


def test_a_damaged_manifest_is_not_marked_verified(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    os.truncate(folder / "manifest.json", 100)
    with pytest.raises(ManifestError):
        mark_verified(folder, Verified(1.0, "verify"))
    assert (folder / "manifest.json").stat().st_size == 100


# -- removal -----------------------------------------------------------------------------------------------------------
def test_a_reader_keeps_what_it_has_open(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    with open(folder / "__0_0.distcp", "rb") as file:
        remove(folder)
        assert not folder.exists()
        assert file.read() == b"bytes"
    assert [p.name for p in tmp_path.iterdir()] == ["latest.json"]
    remove(folder)  # gone already: nothing to do


def test_a_removal_that_is_interrupted_leaves_no_folder_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(commits.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            remove(folder)
    (trash,) = (p for p in tmp_path.iterdir() if p.name.startswith(".trash-"))
    assert (trash / "manifest.json").exists()
    assert not folder.exists()
    save(tmp_path, 2)
    sweep_trash(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.json", "step-000000002"]
    sweep_trash(tmp_path / "not there")


# -- stopped at every point --------------------------------------------------------------------------------------------
STOPPED = """
# Does one commit (or removal) again and again, each in a child of its own and below a root of its own; the n-th of the
# child's calls to the kernel that change something is its last. Prints how each child ended.
import json, os, shutil, sys
from pathlib import Path
from steadyrun.checkpoint.commit import begin, commit, remove
from steadyrun.checkpoint.manifest import FileRecord, Manifest

base, when = Path(sys.argv[1]), sys.argv[2]
CHANGING = ("rename", "replace", "write", "fsync", "mkdir", "unlink", "rmdir", "open")
calls = 0

def save(root, step):
    partial = begin(root, step, 0)
    fd = os.open(partial / "__0_0.distcp", os.O_WRONLY | os.O_CREAT, 0o666)
    os.write(fd, b"bytes")
    os.close(fd)
    manifest = Manifest(step, 0, "run", 1, 1.5, "", "", (FileRecord("__0_0.distcp", 5),))
    commit(root, partial, manifest, b"the metadata")

def stopping(real, at, before):
    def call(*args, **kwargs):
        global calls
        calls += 1
        is_last = calls == at
        if before and is_last:
            os._exit(9)
        try:
            return real(*args, **kwargs)
        finally:
            if is_last:
                os._exit(9)
    return call

template = base / "template"
for step in (0, 1, 2) if when == "again" else (0, 1):
    save(template, step)
codes = []
while not codes or codes[-1] == 9:
    at, before = len(codes) // 2 + 1, len(codes) % 2 == 0
    root = base / f"root{len(codes)}"
    shutil.copytree(template, root)
    pid = os.fork()
    if pid == 0:
        try:
            for name in CHANGING:
                setattr(os, name, stopping(getattr(os, name), at, before))
            remove(root / "step-000000001") if when == "remove" else save(root, 2)
            os._exit(0)
        finally:
            os._exit(70)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""


@pytest.mark.parametrize("when", ["commit", "again", "remove"])
def test_whoever_dies_at_any_call_leaves_a_complete_checkpoint_and_no_half_one(tmp_path: Path, when: str) -> None:
    argv = [sys.executable, "-c", STOPPED, str(tmp_path), when]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    codes = json.loads(done.stdout)
    assert codes[-1] == 0, done.stderr
    assert set(codes[:-1]) == {9}
    assert len(codes) > 8
    for number in range(len(codes)):
        root = tmp_path / f"root{number}"
        complete = {p.name for p in root.iterdir() if p.name.startswith("step-") and is_complete(p)}
        whole = {p.name for p in root.iterdir() if p.name.startswith("step-") and not p.name.endswith(".partial")}
        assert complete == whole, f"{whole - complete} looks like a checkpoint and is none, in {root}"
        assert "step-000000000" in complete, root
        if when != "remove":
            assert "step-000000001" in complete, root
        assert is_complete(save(root, 3, 1)), f"nothing can be saved in {root}"
        sweep_trash(root)
        assert not [p for p in root.iterdir() if p.name.startswith(".trash")], root
