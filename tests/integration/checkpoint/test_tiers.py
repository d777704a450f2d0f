"""Checkpoints that are copied to other places and back."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from steadyrun.checkpoint import commit
from steadyrun.checkpoint.catalog import hold, list_checkpoints
from steadyrun.checkpoint.dcpfile import metadata_bytes
from steadyrun.checkpoint.layout import Entry, Layout, ObjectEntry, place
from steadyrun.checkpoint.manifest import MANIFEST_NAME, Fragment, Manifest, fragment_name, tensors_name
from steadyrun.checkpoint.planning import plan
from steadyrun.checkpoint.retention import to_remove
from steadyrun.checkpoint.shardfile import RateLimit, write_rank_files
from steadyrun.checkpoint.tiers import UNFINISHED_NAME, FolderTier, StoreTier, Tier, TierError, open_tier
from steadyrun.checkpoint.transfer import DamagedSourceError, StreamCheck, TransferOptions, Tries

SIZES = (70_000, 4096, 12)  # elements of the tensors of one rank
Save = Callable[..., Path]
READY = TransferOptions(Tries(most=3, pause=lambda seconds: None))


def write_checkpoint(root: Path, step: int, attempt: int = 0, world_size: int = 2) -> Path:
    """A real one of two ranks, each with half of every tensor and an object of its own."""
    layouts, written = [], []
    partial = commit.begin(root, step, attempt)
    for rank in range(world_size):
        at = place([4 * n for n in SIZES])
        entries = tuple(
            Entry(f"model.t{i}", ("model", f"t{i}"), "float32", (n * world_size,), (n * rank,), (n,), at[i], 4 * n)
            for i, n in enumerate(SIZES)
        )
        layouts.append(Layout(rank, world_size, entries, (ObjectEntry(f"rank.{rank}.rng", (f"rank.{rank}.rng",)),)))
    planned = plan(layouts)
    for rank, layout in enumerate(layouts):
        content = {
            e.key: bytes([step % 251, rank, i, attempt]) * (e.size_bytes // 4) for i, e in enumerate(layout.entries)
        }
        written.append(
            write_rank_files(
                partial, layout, planned.parts[rank], lambda e, c=content: memoryview(c[e.key]), [b"rng" * (rank + 1)]
            )
        )
    files = tuple(record for w in written for record in w.files)
    manifest = Manifest(step, attempt, "run", world_size, 1000.0 + step, "2.13.0", "0.1.0", files)
    return commit.commit(root, partial, manifest, metadata_bytes(planned, layouts, written))


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def call(step: int, attempt: int = 0, root: str = "source") -> Path:
        return write_checkpoint(tmp_path / root, step, attempt)

    return call


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """A store that fails, tears and changes bytes as a test says.

    Attributes:
        fail: called with the operation and path; what it raises is what the store does.
        after_write: called with the path once an object is whole.
    """

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fail: ClassVar[Callable[[str, str], None]] = staticmethod(lambda operation, path: None)

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        type(self).fail("write" if "w" in mode else "read", path)
        return super()._open(path, mode, **more)

    def pipe_file(self, path: str, value: bytes, **more: Any) -> Any:
        type(self).fail("pipe", path)
        return super().pipe_file(path, value, **more)

    def cat_file(self, path: str, *more: Any, **named: Any) -> Any:
        type(self).fail("cat", path)
        return super().cat_file(path, *more, **named)

    def ls(self, path: str, *more: Any, **named: Any) -> Any:
        type(self).fail("list", path)
        return super().ls(path, *more, **named)

    def rm_file(self, path: str) -> None:
        type(self).fail("remove", path)
        super().rm_file(path)


@pytest.fixture
def flaky() -> Iterator[type[Flaky]]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    yield Flaky
    Flaky.fail = staticmethod(lambda operation, path: None)
    Flaky.store.clear()
    Flaky.pseudo_dirs[:] = [""]


@pytest.fixture(params=["folder", "file", "memory", "local store"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    """The same tests for each kind of place."""
    kind = request.param
    if kind == "folder":
        yield open_tier(str(tmp_path / "tier"), READY)
    elif kind == "file":
        yield open_tier((tmp_path / "tier").as_uri(), READY)
    elif kind == "memory":
        yield open_tier("memory://bucket/run", READY)
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
    else:
        yield StoreTier("store:///tier", LocalFileSystem(auto_mkdir=True), str(tmp_path / "tier"), READY)


# -- every place -------------------------------------------------------------------------------------------------------
def test_a_checkpoint_arrives_whole_and_comes_back_the_same(tier: Tier, save: Save, tmp_path: Path) -> None:
    folder = save(7)
    moved = tier.put(folder)
    assert (moved.name, moved.was_there, moved.tries) == ("step-000000007", False, 1)
    assert moved.size_bytes == sum(len(data) for name, data in content(folder).items() if name != MANIFEST_NAME)
    assert tier.is_complete(moved.name)
    back = tier.get(moved.name, tmp_path / "back")
    assert content(back) == content(folder)
    assert commit.is_complete(back)


def test_the_list_is_newest_first_and_what_retention_wants(tier: Tier, save: Save) -> None:
    assert tier.list() == ()
    for step in (3, 12, 7):
        tier.put(save(step))
    listed = tier.list()
    assert [c.step for c in listed] == [12, 7, 3]
    assert all(c.is_complete for c in listed)
    (gone,) = to_remove(listed, keep=2)
    tier.remove(gone.path.name)
    assert [c.step for c in tier.list()] == [12, 7]
    assert not tier.is_complete("step-000000003")
    tier.remove("step-000000003")  # once more is nothing


def test_what_is_there_already_is_not_sent_again(tier: Tier, save: Save) -> None:
    folder = save(7)
    tier.put(folder)
    commit.mark_verified(folder, commit.Verified(5.0, "verify"))
    assert tier.put(folder).was_there
    assert len(tier.list()) == 1


def test_the_same_step_of_another_attempt_gets_a_name_of_its_own(tier: Tier, save: Save) -> None:
    tier.put(save(7))
    assert tier.put(save(7, 2, "other")).name == "step-000000007.a2"
    assert [(c.step, c.attempt) for c in tier.list()] == [(7, 2), (7, 0)]
    again = save(7, 2, "third")
    data = again / tensors_name(0)
    assert data.exists()
    assert tier.put(again).was_there


@pytest.mark.parametrize("where", [5000, 150_000, -1])
def test_a_damaged_checkpoint_is_not_carried_on_and_is_named(tier: Tier, save: Save, where: int) -> None:
    data = save(7) / tensors_name(1)
    bytes_ = bytearray(data.read_bytes())
    bytes_[where] ^= 4
    data.write_bytes(bytes_)
    with pytest.raises(
        TierError, match=r"__1_0\.distcp is damaged: .*tensor 'model\.t\d'.* is not what was saved"
    ) as e:
        tier.put(data.parent)
    assert (e.value.is_damage, e.value.file) == (True, "__1_0.distcp")
    assert not any(c.is_complete for c in tier.list())


def test_progress_goes_up_to_the_end_and_can_stop_it(tier: Tier, save: Save) -> None:
    folder = save(7)
    seen: list[tuple[int, int]] = []
    tier.put(folder, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]

    class StoppedError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        tier.put(save(8), stop)
    assert [c.step for c in tier.list() if c.is_complete] == [7]


def test_one_that_is_not_there_cannot_be_fetched(tier: Tier, tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"cannot copy .*step-000000099"):
        tier.get("step-000000099", tmp_path / "back")
    assert list_checkpoints(tmp_path / "back") == ()


def test_a_full_disk_where_it_arrives_leaves_nothing_behind(
    tier: Tier, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(save(7))

    def full(fd: int, at: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierError, match=r"No space left on device; .*has space"):
        tier.get("step-000000007", tmp_path / "back")
    assert os.listdir(tmp_path / "back") == []


def test_no_faster_than_allowed(tier: Tier, save: Save, tmp_path: Path) -> None:
    folder, now_s = save(7), 0.0

    def pause(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    rate = RateLimit(100_000.0, lambda: now_s, pause)
    options = dataclasses.replace(READY, rate=rate, threads=1)
    moved = FolderTier(tmp_path / "slow", options).put(folder)
    assert now_s >= 0.9 * (moved.size_bytes - (8 << 20)) / 100_000.0
    assert now_s > 3.0


# -- folders -----------------------------------------------------------------------------------------------------------
def test_a_checkpoint_that_is_read_is_not_removed(save: Save, tmp_path: Path) -> None:
    folder = save(7)
    tier = FolderTier(folder.parent, READY)
    with hold(folder), pytest.raises(TierError, match="somebody reads it"):
        tier.remove(folder.name)
    tier.remove(folder.name)
    assert os.listdir(folder.parent) == [commit.LATEST_NAME]


# -- stores that fail --------------------------------------------------------------------------------------------------
def names_in(store: type[Flaky]) -> set[str]:
    return {path.rsplit("/", 1)[1] for path in store.store}


def test_a_store_that_fails_now_and_then_is_tried_again(flaky: type[Flaky], save: Save, tmp_path: Path) -> None:
    waited: list[float] = []
    options = TransferOptions(Tries(most=4, first_s=1.0, factor=4.0, longest_s=10.0, pause=waited.append), threads=1)
    failures = {"write": 3, "list": 2, "pipe": 1, "cat": 2}

    def fail(operation: str, path: str) -> None:
        if failures.get(operation, 0) > 0 and (operation != "write" or path.endswith("distcp")):
            failures[operation] -= 1
            raise ConnectionError("reset by peer")

    flaky.fail = staticmethod(fail)
    tier = open_tier("flaky://bucket/run", options)
    folder = save(7)
    moved = tier.put(folder)
    assert moved.tries == 4
    assert waited[:2] == [1.0, 4.0]
    assert max(waited) == 10.0
    assert UNFINISHED_NAME not in names_in(flaky)
    assert content(tier.get(moved.name, tmp_path / "back")) == content(folder)


def test_a_store_that_stays_away_is_given_up_with_the_reason(flaky: type[Flaky], save: Save) -> None:
    def fail(operation: str, path: str) -> None:
        if operation == "write" and path.endswith("__0_0.distcp"):
            raise ConnectionError("reset by peer")

    flaky.fail = staticmethod(fail)
    tier = open_tier("flaky://bucket/run", READY)
    with pytest.raises(
        TierError, match=r"cannot copy .* to flaky://bucket/run: __0_0.distcp: .*reset by peer, tried 3"
    ):
        tier.put(save(7))
    (left,) = tier.list()
    assert (left.is_complete, left.name.is_partial, left.is_unsure) == (False, True, False)
    flaky.fail = staticmethod(lambda operation, path: None)
    assert tier.put(save(7, root="again")).name == "step-000000007"  # the next try begins anew
    assert [c.is_complete for c in tier.list()] == [True]


def test_a_refusal_is_not_tried_again(flaky: type[Flaky], save: Save) -> None:
    calls: list[str] = []

    def fail(operation: str, path: str) -> None:
        if operation == "pipe":
            calls.append(path)
            raise PermissionError("Forbidden")

    flaky.fail = staticmethod(fail)
    with pytest.raises(TierError, match="Forbidden; look whether"):
        open_tier("flaky://bucket/run", READY).put(save(7))
    assert len(calls) == 1


class Killed(BaseException):
    """What the process does not survive."""


def killing(after: int) -> Callable[[str, str], None]:
    left = after

    def fail(operation: str, path: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    return fail


def test_killed_at_any_call_while_sending_there_is_no_half_checkpoint(
    flaky: type[Flaky], save: Save, tmp_path: Path
) -> None:
    old, new = save(7), save(8)
    tier = open_tier("flaky://bucket/run", dataclasses.replace(READY, threads=1))
    tier.put(old)
    was_killed = True
    kill_at = 0
    while was_killed:
        flaky.fail = staticmethod(killing(kill_at))
        was_killed = False
        try:
            tier.put(new)
        except Killed:
            was_killed = True
        flaky.fail = staticmethod(lambda operation, path: None)
        complete = [c for c in tier.list() if c.is_complete]
        assert [c.step for c in complete] in ([7], [8, 7])
        for c in complete[:-1]:
            got = tier.get(c.path.name, tmp_path / f"back{kill_at}")
            assert content(got) == content(new)
        assert not any(c.is_unsure for c in tier.list())
        kill_at += 1
    assert kill_at > 20
    assert tier.put(new).was_there


def test_killed_at_any_call_while_removing_it_is_whole_or_no_checkpoint(flaky: type[Flaky], save: Save) -> None:
    tier = open_tier("flaky://bucket/run", READY)
    folder = save(7)
    kill_at, was_killed = 0, True
    while was_killed:
        tier.put(folder)
        flaky.fail = staticmethod(killing(kill_at))
        was_killed = False
        try:
            tier.remove("step-000000007")
        except Killed:
            was_killed = True
        flaky.fail = staticmethod(lambda operation, path: None)
        for left in tier.list():
            assert left.is_complete or left.name.is_partial
            assert not left.is_unsure
            if left.is_complete:
                assert {p.name for p in folder.iterdir()} <= names_in(flaky)
        tier.remove("step-000000007")
        assert tier.list() == ()
        kill_at += 1
    assert kill_at > 5


def change(store: type[Flaky], name: str, at: int = -1) -> None:
    (path,) = [p for p in store.store if p.endswith(f"/{name}")]
    data = bytearray(store.store[path].getvalue())
    data[at] ^= 1
    store.store[path].seek(0)
    store.store[path].write(data)


def test_a_store_that_returns_other_bytes_than_were_sent_is_not_trusted(flaky: type[Flaky], save: Save) -> None:
    def fail(operation: str, path: str) -> None:
        if operation == "read":
            change(flaky, path.rsplit("/", 1)[1], 100)

    flaky.fail = staticmethod(fail)
    tier = open_tier("flaky://bucket/run", dataclasses.replace(READY, threads=1))
    # An even number of reads would undo the change.
    with pytest.raises(TierError, match="read back, is not what was sent"):
        tier.put(save(7))


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("__1_0.distcp", "tensor 'model"),
        ("__1_1.distcp", "object 'rank.1.rng'"),
        ("__0.shards.json", "__0.shards.json is damaged"),
        (".metadata", r"\.metadata is damaged"),
        ("manifest.json", "manifest.json is damaged"),
    ],
)
def test_damage_in_the_store_is_found_named_and_not_fetched(
    flaky: type[Flaky], save: Save, tmp_path: Path, name: str, where: str
) -> None:
    tier = open_tier("flaky://bucket/run", READY)
    tier.put(save(7))
    change(flaky, name, -1 if name.endswith(("1.distcp", "json")) else 90)
    with pytest.raises(TierError, match=where) as e:
        tier.get("step-000000007", tmp_path / "back")
    assert e.value.is_damage
    back = tmp_path / "back"
    assert not back.exists() or os.listdir(back) == []


def test_a_manifest_that_arrives_damaged_is_sent_again(flaky: type[Flaky], save: Save) -> None:
    damages = 1

    def fail(operation: str, path: str) -> None:
        nonlocal damages
        if operation == "cat" and path.endswith(MANIFEST_NAME) and damages:
            damages -= 1
            change(flaky, MANIFEST_NAME, 40)

    flaky.fail = staticmethod(fail)
    tier = open_tier("flaky://bucket/run", READY)
    tier.put(save(7))
    assert damages == 0
    assert tier.is_complete("step-000000007")


def test_half_an_object_is_not_left_in_the_store(flaky: type[Flaky], save: Save) -> None:
    class StoppedError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        open_tier("flaky://bucket/run", dataclasses.replace(READY, threads=1)).put(save(7), stop)
    assert names_in(flaky) == {UNFINISHED_NAME}


def test_a_byte_that_was_damaged_on_the_way_is_asked_for_again(flaky: type[Flaky], save: Save, tmp_path: Path) -> None:
    tier = open_tier("flaky://bucket/run", dataclasses.replace(READY, threads=1))
    folder = save(7)
    tier.put(folder)
    reads = 0

    def fail(operation: str, path: str) -> None:
        nonlocal reads
        if operation == "read" and path.endswith("/__1_0.distcp") and reads < 2:
            reads += 1
            change(flaky, "__1_0.distcp", 5000)  # the second time it is as it was

    flaky.fail = staticmethod(fail)
    assert content(tier.get("step-000000007", tmp_path / "back")) == content(folder)
    assert reads == 2


def test_a_cut_or_missing_object_is_listed_with_its_name(flaky: type[Flaky], save: Save) -> None:
    tier = open_tier("flaky://bucket/run", READY)
    tier.put(save(7))
    (path,) = [p for p in flaky.store if p.endswith("/__1_0.distcp")]
    flaky.store[path].truncate(10)
    (listed,) = tier.list()
    assert not listed.is_complete
    assert listed.problem is not None
    assert listed.problem.startswith("__1_0.distcp has 10 bytes; ")
    del flaky.store[path]
    assert [c.problem for c in tier.list()] == ["__1_0.distcp is missing"]


def test_what_others_keep_under_such_a_name_is_left_alone(flaky: type[Flaky], save: Save) -> None:
    system, base = fsspec.core.url_to_fs("flaky://bucket/run")
    for name in ("step-000000007", "step-000000007.a0"):
        system.pipe_file(f"{base}/{name}/.metadata", b"of another program")
    tier = open_tier("flaky://bucket/run", READY)
    assert [c.is_unsure for c in tier.list()] == [True, True]
    assert to_remove(tier.list(), keep=2) == ()
    with pytest.raises(TierError, match="another program's; move it away"):
        tier.put(save(7))
    assert tier.put(save(7, 1, "other")).name == "step-000000007.a1"


# -- opening -----------------------------------------------------------------------------------------------------------
def test_without_fsspec_a_url_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(
        TierError,
        match=r"cannot use s3://bucket/run: the package fsspec is not installed; pip install "
        r"'steadyrun\[remote\]'",
    ):
        open_tier("s3://bucket/run")
    assert open_tier(str(tmp_path)).list() == ()  # a folder needs none


def test_a_kind_of_storage_without_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(TierError, match="cannot use s3://bucket/run: Install s3fs"):
        open_tier("s3://bucket/run")


def test_an_unknown_kind_of_storage_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TierError, match=r"cannot use nope://x: Protocol not known: nope; known are .*memory"):
        open_tier("nope://x")


# -- bytes on their way ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("piece_bytes", [1 << 23, 4096, 1000])
def test_the_check_sees_every_flipped_byte_however_the_file_is_cut(save: Save, piece_bytes: int) -> None:
    folder = save(7)
    manifest = commit.read_manifest(folder)
    fragment = Fragment.from_json((folder / fragment_name(0)).read_bytes())
    record = next(r for r in manifest.files if r.name == tensors_name(0))
    data = bytearray((folder / record.name).read_bytes())

    def check() -> None:
        checked = StreamCheck(record, fragment)
        for at in range(0, len(data), piece_bytes):
            checked.update(memoryview(data)[at : at + piece_bytes])
        checked.finish()

    check()
    ends = {s.payload_at_bytes + s.payload_bytes for s in fragment.shards}
    places = {
        0,
        len(data) - 1,
        *(s.at_bytes for s in fragment.shards),
        *(s.payload_at_bytes for s in fragment.shards),
        *(e - 1 for e in ends),
        *(e for e in ends if e < len(data)),
    }
    for at in places:
        data[at] ^= 128
        with pytest.raises(DamagedSourceError, match="is not what was saved"):
            check()
        data[at] ^= 128
    data.append(0)
    with pytest.raises(DamagedSourceError, match="bytes instead of"):
        check()
    del data[-2:]
    with pytest.raises(DamagedSourceError, match="bytes instead of"):
        check()


def test_a_manifest_that_names_files_elsewhere_is_refused(flaky: type[Flaky], save: Save, tmp_path: Path) -> None:
    tier = open_tier("flaky://bucket/run", READY)
    folder = save(7)
    tier.put(folder)
    manifest = commit.read_manifest(folder)
    (path,) = [p for p in flaky.store if p.endswith(f"/{MANIFEST_NAME}")]
    evil = dataclasses.replace(manifest, files=(dataclasses.replace(manifest.files[0], name="../../out"),))
    flaky().pipe_file(path, commit.seal_manifest(evil))
    with pytest.raises(TierError, match=r"outside of the folder: '\.\./\.\./out'"):
        tier.get("step-000000007", tmp_path / "back")


def test_neither_torch_nor_what_urls_need_is_imported_beforehand() -> None:
    import subprocess

    modules = "catalog choose peer quarantine retention rollback tiers transfer"
    code = (
        f"import sys, json; [__import__('steadyrun.checkpoint.' + m) for m in '{modules}'.split()]; "
        "print(json.dumps([m for m in ('fsspec', 'torch', 'numpy') if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    assert json.loads(out) == []


def test_the_source_stays_as_it_is(save: Save, tmp_path: Path) -> None:
    folder = save(7)
    shutil.copytree(folder, tmp_path / "before")
    FolderTier(tmp_path / "tier", READY).put(folder)
    assert content(folder) == content(tmp_path / "before")
