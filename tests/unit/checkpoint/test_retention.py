"""Which checkpoints go, and that removing them can be stopped anywhere."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint.catalog import Listed, hold, look, set_aside
from steadyrun.checkpoint.commit import seal_manifest
from steadyrun.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, FileRecord, FolderName, Manifest, Verified
from steadyrun.checkpoint.retention import LEAST_KEPT, Keep, Pruned, apply, prune, to_remove

ROOT = Path("/root")


def listed(
    step: int,
    *,
    attempt: int = 0,
    verified: bool = False,
    problem: str | None = None,
    partial: bool = False,
    unsure: bool = False,
    superseded: bool = False,
) -> Listed:
    name = FolderName(step, attempt if partial or attempt else None, partial)
    check = Verified(1.0, "save") if verified else None
    manifest = None if partial or unsure else Manifest(step, attempt, "run", 1, 1.0, "2.13", "0.1", (), verified=check)
    if partial or unsure:
        problem = problem or "not committed"
    return Listed(ROOT / str(name), name, manifest, problem, unsure, superseded)


def steps(found: tuple[Listed, ...]) -> list[int]:
    return [c.step for c in found]


def test_the_newest_stay_and_the_oldest_goes_first() -> None:
    assert steps(to_remove([listed(s) for s in (3, 1, 5, 2, 4)], keep=3)) == [1, 2]


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_two_complete_ones_stay_whatever_was_asked_for(keep: int) -> None:
    assert steps(to_remove([listed(s) for s in (1, 2, 3)], keep)) == [1]


def test_milestones_stay() -> None:
    assert steps(to_remove([listed(s) for s in range(1, 13)], keep=2, keep_every=5)) == [1, 2, 3, 6, 7, 8]


def test_the_newest_verified_one_stays_and_older_verified_ones_go() -> None:
    found = [listed(1, verified=True), listed(2, verified=True), listed(3), listed(4), listed(5)]
    assert steps(to_remove(found, keep=2)) == [1, 3]


def test_the_newest_verified_one_stays_also_when_it_was_set_aside() -> None:
    found = [listed(1, verified=True), listed(2, verified=True, superseded=True), *(listed(s) for s in (3, 4, 5))]
    assert steps(to_remove(found, keep=2)) == [3]


def test_what_is_in_use_or_pinned_stays() -> None:
    found = [listed(s) for s in range(1, 6)]
    assert steps(to_remove(found, 2, in_use=[found[0].path], pinned=[found[1].path])) == [3]


def test_unfinished_ones_go_only_once_a_newer_one_is_complete() -> None:
    found = [listed(4, partial=True), listed(6, partial=True), listed(5), listed(3, problem="cut")]
    assert steps(to_remove(found, keep=3)) == [3, 4]
    assert steps(to_remove(found, keep=3, in_use=[found[0].path])) == [3]
    assert to_remove(found[:2], keep=3) == ()


def test_damaged_newer_ones_do_not_push_out_complete_older_ones() -> None:
    found = [listed(1), listed(2), *(listed(s, problem="cut") for s in (3, 4, 5, 6))]
    assert to_remove(found, keep=2) == ()


def test_what_could_not_be_looked_at_or_is_another_programs_is_never_removed() -> None:
    assert steps(to_remove([listed(1, unsure=True), listed(2), listed(3), listed(4)], keep=2)) == [2]


def test_checkpoints_set_aside_do_not_push_out_those_of_the_new_line() -> None:
    found = [listed(1), listed(2), *(listed(s, superseded=True) for s in (3, 4, 5))]
    assert to_remove(found, keep=2) == ()
    # The new line has passed them: steps 6 and 7 are enough.
    assert steps(to_remove([*found, listed(6), listed(7)], keep=2)) == [1, 2, 3, 4, 5]


def test_quarantined_checkpoints_do_not_push_out_good_ones() -> None:
    found = [listed(1), listed(2), listed(3), listed(4)]
    assert to_remove(found, 2, quarantined=[c.path for c in found[2:]]) == ()
    assert steps(to_remove(found, 2, quarantined=[found[3].path])) == [1]


def test_milestones_every_zero_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="every_steps=0: must be at least 1"):
        Keep(3, 0)


# -- whatever is listed ------------------------------------------------------------------------------------------------
entries = st.builds(
    listed,
    st.integers(0, 12),
    attempt=st.integers(0, 3),
    verified=st.booleans(),
    problem=st.sampled_from([None, None, None, "cut"]),
    partial=st.sampled_from([False, False, True]),
    unsure=st.sampled_from([False, False, False, True]),
    superseded=st.sampled_from([False, False, True]),
)
listings = st.lists(entries, max_size=12, unique_by=lambda c: c.path)


@settings(max_examples=150, deadline=None)
@given(listings, st.integers(0, 5), st.none() | st.integers(1, 5), st.data())
def test_no_listing_makes_it_remove_too_much(
    found: list[Listed], keep: int, keep_every: int | None, data: st.DataObject
) -> None:
    paths = [c.path for c in found]
    in_use = data.draw(st.lists(st.sampled_from(paths), max_size=2)) if paths else []
    quarantined = data.draw(st.lists(st.sampled_from(paths), max_size=4)) if paths else []
    gone = to_remove(found, keep, keep_every, in_use, (), quarantined)
    left = [c for c in found if c not in gone]

    complete = sorted((c for c in found if c.is_complete), key=lambda c: c.order)
    good = [c for c in complete if not c.is_superseded and c.path not in quarantined]
    assert sum(c.is_complete for c in left) >= min(LEAST_KEPT, len(complete))
    assert good[-max(keep, LEAST_KEPT) :] == [c for c in good if c in left][-max(keep, LEAST_KEPT) :]
    for of in (complete, good):
        verified = [c for c in of if c.is_verified]
        assert not verified or verified[-1] in left
    assert not any(c.is_unsure or c.path in in_use for c in gone)
    for c in gone:
        if not c.is_complete:
            assert complete
            assert c.order < complete[-1].order
        if keep_every is not None and not c.name.is_partial:
            assert c.step % keep_every
    # Deciding again with what is left finds nothing more to do.
    assert to_remove(left, keep, keep_every, in_use, (), quarantined) == ()


# -- removing ----------------------------------------------------------------------------------------------------------
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def call(step: int, **more: object) -> Path:
        folder = tmp_path / str(FolderName(step))
        folder.mkdir()
        (folder / METADATA_NAME).write_bytes(b"m")
        (folder / "__0_0.distcp").write_bytes(b"data")
        files = (FileRecord(METADATA_NAME, 1), FileRecord("__0_0.distcp", 4))
        manifest = Manifest(step, 0, "run", 1, 1.0, "2.13", "0.1", files)
        (folder / MANIFEST_NAME).write_bytes(seal_manifest(dataclasses.replace(manifest, **more)))  # type: ignore[arg-type]
        return folder

    return call


class Killed(BaseException):
    """What the process does not survive."""


class Operations:
    """Counts what changes folders, as ``commit.remove`` calls it, and lets the process die before one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kill_at: int) -> None:
        self.left = kill_at
        for name in ("rename", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: object, **named: object) -> None:
            self.left -= 1
            if self.left < 0:
                raise Killed
            call(*args, **named)

        return counted


def test_pruning_removes_what_can_go(make: Make, tmp_path: Path) -> None:
    made = [make(s) for s in (1, 2, 3, 4)]
    assert prune(tmp_path, Keep(2)) == Pruned((made[0], made[1]))
    assert [c.step for c in look(tmp_path).complete] == [4, 3]


@pytest.mark.parametrize("kill_at", range(12))
def test_killed_at_any_operation_it_leaves_whole_checkpoints_only_and_the_next_run_finishes(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int
) -> None:
    for step in (1, 2, 3, 4):
        make(step)
    was_killed = False
    with monkeypatch.context() as patch:
        Operations(patch, kill_at)
        try:
            prune(tmp_path, Keep(2))
        except Killed:
            was_killed = True
    assert was_killed == (kill_at < 10)  # two folders of three files: rename, three unlinks, rmdir each
    found = look(tmp_path)
    assert all(c.is_complete for c in found.checkpoints)
    assert [c.step for c in found.complete][:2] == [4, 3]
    prune(tmp_path, Keep(2))
    assert sorted(os.listdir(tmp_path)) == ["step-000000003", "step-000000004"]


def test_one_that_is_being_read_stays_until_the_reader_is_done(make: Make, tmp_path: Path) -> None:
    made = [make(s) for s in (1, 2, 3, 4)]
    with hold(made[0]):
        pruned = prune(tmp_path, Keep(2))
        assert pruned.removed == (made[1],)
        assert [path for path, _ in pruned.failed] == [made[0]]
        assert "somebody reads it" in pruned.failed[0][1]
    assert prune(tmp_path, Keep(2)) == Pruned((made[0],))


def test_what_cannot_be_removed_is_told_and_the_rest_goes_on(make: Make, tmp_path: Path) -> None:
    made = [make(s) for s in (1, 2, 3, 4)]

    def remove(folder: Path) -> None:
        if folder == made[0]:
            raise PermissionError(errno.EACCES, "Permission denied")
        shutil.rmtree(folder)

    pruned = prune(tmp_path, Keep(2), remove=remove, sweep_trash=shutil.rmtree)
    assert pruned.removed == (made[1],)
    assert pruned.failed == (
        (made[0], f"cannot remove {made[0]}: Permission denied; remove it by hand to free the space"),
    )


def test_one_that_somebody_else_removed_first_is_nothing_to_speak_of(make: Make, tmp_path: Path) -> None:
    make(1)
    removals = look(tmp_path).checkpoints
    shutil.rmtree(removals[0].path)
    assert apply(removals, os.rmdir) == Pruned()


def test_a_new_line_after_a_rollback_is_not_pushed_out_by_the_old_one(make: Make, tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        folder = make(step)
        if step > 4:
            set_aside(folder, "rollback to step 4")
    assert prune(tmp_path, Keep(2)) == Pruned()
    make(5)
    assert [p.name for p in prune(tmp_path, Keep(2)).removed] == ["step-000000002"]


def test_what_an_earlier_removal_left_is_swept(make: Make, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(step)
    left = tmp_path / ".trash-step-000000000-01234567"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"data")
    assert [p.name for p in prune(tmp_path, Keep(2)).removed] == ["step-000000001"]
    assert sorted(os.listdir(tmp_path)) == ["step-000000002", "step-000000003"]
