"""Going back to an older checkpoint, and leaving batches out."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint.catalog import look
from steadyrun.checkpoint.commit import seal_manifest
from steadyrun.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, FileRecord, FolderName, Manifest
from steadyrun.checkpoint.rollback import (
    REQUEST_NAME,
    Request,
    RollbackError,
    cancel,
    carried_out,
    carry_out,
    data_step,
    is_superseded,
    merged,
    parse_range,
    pending,
    request,
    skipped,
    step_of_batch,
    take,
)

Make = Callable[[int], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def call(step: int) -> Path:
        folder = tmp_path / str(FolderName(step))
        folder.mkdir()
        (folder / METADATA_NAME).write_bytes(b"m")
        manifest = Manifest(step, 0, "run", 1, 1.0 * step, "2.13", "0.1", (FileRecord(METADATA_NAME, 1),))
        (folder / MANIFEST_NAME).write_bytes(seal_manifest(manifest))
        return folder

    return call


@pytest.fixture
def root(make: Make, tmp_path: Path) -> Path:
    """With checkpoints of steps 10, 20, 30 and 40, saved at as many seconds."""
    for step in (10, 20, 30, 40):
        make(step)
    return tmp_path


def usable(root: Path) -> list[int]:
    return [c.step for c in look(root).complete if not c.is_superseded]


# -- numbers -----------------------------------------------------------------------------------------------------------
def test_steps_use_the_batches_that_are_left() -> None:
    ranges = [(3, 5), (8, 9)]
    assert [data_step(step, ranges) for step in range(8)] == [0, 1, 2, 5, 6, 7, 9, 10]
    assert [step_of_batch(batch, ranges) for batch in range(11)] == [0, 1, 2, None, None, 3, 4, 5, None, 6, 7]
    assert data_step(7, ()) == 7


def test_ranges_that_overlap_or_touch_are_one() -> None:
    assert merged([(5, 8), (1, 2), (2, 3), (6, 7), (9, 9)]) == [(1, 3), (5, 8)]


ranges_of = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6)


@settings(max_examples=100, deadline=None)
@given(ranges_of, st.integers(0, 80))
def test_each_step_has_one_batch_of_its_own_and_no_batch_is_lost(ranges: list[tuple[int, int]], step: int) -> None:
    left = [b for b in range(500) if not any(first <= b < end for first, end in ranges)]
    assert data_step(step, ranges) == left[step]
    assert step_of_batch(left[step], ranges) == step
    for batch in range(100):
        assert step_of_batch(batch, ranges) == (left.index(batch) if batch in left else None)


@pytest.mark.parametrize("text", ["", "5", "5:", ":5", "5:5", "7:5", "a:b", "-1:5", "1:2:3"])
def test_what_is_no_range_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="give FIRST:END with FIRST < END"):
        parse_range(text)
    assert parse_range("5:7") == (5, 7)


# -- asking ------------------------------------------------------------------------------------------------------------
def test_a_request_waits_until_it_is_taken_once(root: Path) -> None:
    asked = request(root, 20, [(22, 25), (24, 26)], 100.0)
    assert asked.skip_batches == ((22, 26),)
    assert pending(root) == asked
    taken = take(root, 200.0)
    assert taken is not None
    assert (taken.id, taken.to, taken.applied_at_unix_s) == (asked.id, 20, 200.0)
    assert usable(root) == [20, 10]
    assert [c.step for c in look(root).complete] == [40, 30, 20, 10]  # set aside, not deleted
    assert take(root, 300.0) is None
    assert pending(root) is None
    assert carried_out(root) == (taken,)


def test_the_clock_is_read_when_no_time_is_given(root: Path) -> None:
    request(root, 20, [], 100.0)
    taken = take(root)
    assert taken is not None
    assert taken.applied_at_unix_s is not None
    assert taken.applied_at_unix_s > 1e9


def test_a_later_save_of_the_same_steps_is_used(root: Path, make: Make) -> None:
    request(root, 20, [], 100.0)
    take(root, 200.0)
    make(25)
    make(41)
    assert usable(root) == [41, 25, 20, 10]
    assert take(root, 300.0) is None
    assert usable(root) == [41, 25, 20, 10]


def test_a_request_can_be_replaced_and_withdrawn(root: Path) -> None:
    request(root, 20, [], 100.0)
    second = request(root, 30, [], 101.0)
    assert pending(root) == second
    assert cancel(root) == second
    assert cancel(root) is None
    assert take(root, 200.0) is None
    assert usable(root) == [40, 30, 20, 10]


def test_a_step_older_than_all_checkpoints_is_refused(root: Path) -> None:
    with pytest.raises(RollbackError, match=r"cannot go back to step 9: .* no complete checkpoint .* ckpt ls"):
        request(root, 9, [], 100.0)
    assert pending(root) is None


def test_batches_that_are_part_of_the_checkpoint_cannot_be_left_out(root: Path) -> None:
    with pytest.raises(RollbackError, match=r"batch 20 and those before .* begin at 21"):
        request(root, 25, [(20, 30)], 100.0)
    with pytest.raises(RollbackError, match="must be FIRST:END"):
        request(root, 25, [(30, 30)], 100.0)
    assert request(root, 25, [(21, 30)], 100.0).to == 25


def test_what_was_left_out_is_known_before_and_after_the_next_save(root: Path) -> None:
    request(root, 20, [(22, 25)], 100.0)
    take(root, 200.0)
    assert skipped(root, ()) == ((22, 25),)  # of a checkpoint from before the rollback
    assert skipped(root, ((22, 25),)) == ((22, 25),)  # of one saved since


def test_a_second_rollback_counts_with_the_batches_that_the_first_left_out(root: Path, make: Make) -> None:
    request(root, 20, [(22, 25)], 100.0)
    take(root, 200.0)
    make(31)  # has used batch 34
    with pytest.raises(RollbackError, match=r"batch 34 and those before .* begin at 35"):
        request(root, 31, [(33, 36)], 300.0)
    request(root, 31, [(35, 36)], 300.0)
    take(root, 400.0)
    assert skipped(root, ()) == ((22, 25), (35, 36))


def test_a_request_of_an_option_is_carried_out_once_over_all_restarts(root: Path, make: Make) -> None:
    fields = {"to": 20, "skip_batches": [[22, 25]], "id": "run 7-20-22:25"}
    asked = Request.from_fields(fields, 100.0)
    taken = carry_out(root, asked, 200.0)
    assert taken is not None
    assert usable(root) == [20, 10]
    make(50)
    assert carry_out(root, Request.from_fields(fields, 300.0), 300.0) is None
    assert usable(root) == [50, 20, 10]
    assert [r.id for r in carried_out(root)] == ["run 7-20-22:25"]
    other = Request.from_fields({**fields, "id": "run 7-20-22_25"}, 400.0)
    assert carry_out(root, other, 400.0) is not None


@pytest.mark.parametrize(
    "fields", [{}, {"to": "x", "skip_batches": [], "id": "1"}, {"to": 1, "skip_batches": 3, "id": 1}]
)
def test_a_malformed_request_of_an_option_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(RollbackError, match="malformed"):
        Request.from_fields(fields, 1.0)


# -- when things go wrong ----------------------------------------------------------------------------------------------
class Killed(BaseException):
    """What the process does not survive."""


def test_killed_at_any_write_the_next_attempt_carries_it_out(
    root: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    request(root, 20, [(22, 25)], 100.0)
    true_fsync, kills = os.fsync, 0
    for kill_at in range(1, 20):
        count = 0

        def fsync(fd: int, kill_at: int = kill_at) -> None:
            nonlocal count
            count += 1
            if count == kill_at:
                raise Killed
            true_fsync(fd)

        monkeypatch.setattr(os, "fsync", fsync)
        try:
            taken = take(root, 200.0)
        except Killed:
            kills += 1
            continue
        break
    assert kills > 0
    assert taken is not None
    assert taken.to == 20
    assert usable(root) == [20, 10]
    assert skipped(root, ()) == ((22, 25),)
    assert take(root, 300.0) is None


def test_nothing_newer_is_loaded_when_checkpoints_cannot_be_set_aside(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(root, 20, [], 100.0)
    true_open = os.open

    def open_(path: str | Path, flags: int, *more: int, **named: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return true_open(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", open_)
    with pytest.raises(RollbackError, match=r"cannot set .* aside: Read-only file system; make .* writable"):
        take(root, 200.0)
    monkeypatch.undo()
    assert pending(root) == asked


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": "other/1"}', '{"schema": "steadyrun.rollback/1", "to": 1}']
)
def test_a_damaged_request_is_named(root: Path, text: str) -> None:
    (root / REQUEST_NAME).write_text(text)
    with pytest.raises(RollbackError, match=REQUEST_NAME):
        take(root, 1.0)


def test_a_root_without_anything_has_nothing_to_carry_out(tmp_path: Path) -> None:
    assert take(tmp_path / "none", 1.0) is None
    assert carried_out(tmp_path / "none") == ()
    assert skipped(tmp_path / "none", ((1, 2),)) == ((1, 2),)


def test_what_was_saved_elsewhere_before_a_rollback_is_superseded(root: Path) -> None:
    request(root, 20, [], 100.0)
    take(root, 200.0)
    rollbacks = carried_out(root)
    assert is_superseded(rollbacks, 30, 150.0)
    assert not is_superseded(rollbacks, 20, 150.0)
    assert not is_superseded(rollbacks, 30, 250.0)
    assert not is_superseded([request(root, 10, [], 300.0)], 30, 150.0)  # one that still waits
