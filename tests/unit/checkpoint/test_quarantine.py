"""Checkpoints after whose load the same fault comes back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint.catalog import Listed
from steadyrun.checkpoint.choose import FolderOffer, choose
from steadyrun.checkpoint.manifest import FolderName, Manifest
from steadyrun.checkpoint.quarantine import (
    MOST_IN_A_ROW,
    QUARANTINE_NAME,
    WITHIN_STEPS,
    Judged,
    Ledger,
    Loaded,
    QuarantineError,
    after_failure,
    after_load,
    lift,
    read,
    update,
)
from steadyrun.checkpoint.saves import TierName

NAN = "FloatingPointError: loss is NaN at train.py:31"


def fail(ledger: Ledger, attempt: int, loaded_step: int, survived: int | None, signature: str = NAN) -> Judged:
    """Attempt *attempt* loads a state that attempt 0 saved, and fails."""
    ledger = after_load(ledger, Loaded(loaded_step, 0, TierName.MEMORY, attempt, 10.0 * attempt))
    step = None if survived is None else loaded_step + survived
    return after_failure(ledger, attempt, step, signature, 10.0 * attempt + 5)


def test_the_second_time_the_same_fault_comes_soon_after_the_same_load_it_is_quarantined() -> None:
    first = fail(Ledger(), 1, 100, 3)
    assert (first.entry, first.note) == (None, "")
    second = fail(first.ledger, 2, 100, 4)
    assert second.entry is not None
    assert (second.entry.step, second.entry.attempt, second.entry.failures) == (100, 0, 2)
    assert second.note == (
        "checkpoint of step 100 is quarantined, an older one is used: "
        f"the same fault came 2 times within 10 steps after it was loaded: {NAN}"
    )
    folders = [FolderOffer(TierName.SHARED, s, 0, f"/r/{s}", 1) for s in (90, 100)]
    assert choose({}, folders, quarantined=second.ledger.quarantined()).step == 90


@pytest.mark.parametrize(
    ("step", "survived", "signature"),
    [
        (100, WITHIN_STEPS + 1, NAN),  # long after the load
        (100, 3, "RuntimeError: another fault"),
        (100, 3, ""),  # nobody knows what happened
        (90, 3, NAN),  # another state
    ],
)
def test_a_failure_that_says_nothing_about_the_state_does_not_count(step: int, survived: int, signature: str) -> None:
    assert fail(fail(Ledger(), 1, 100, 3).ledger, 2, step, survived, signature).entry is None


def test_the_last_step_that_counts_is_the_tenth() -> None:
    assert fail(fail(Ledger(), 1, 100, WITHIN_STEPS).ledger, 2, 100, WITHIN_STEPS).entry is not None


@pytest.mark.parametrize("signature", [NAN, ""])
def test_what_is_decided_already_is_quarantined_at_once(signature: str) -> None:
    ledger = after_load(Ledger(), Loaded(100, 0, TierName.SHARED, 1, 10.0))
    judged = after_failure(ledger, 1, 150, signature, 20.0, falls_back=True)
    assert [(e.step, e.failures) for e in judged.ledger.entries] == [(100, 1)]
    assert "training failed after it was loaded: " + (signature or "not told which") in judged.note
    assert after_failure(judged.ledger, 1, 150, signature, 21.0, falls_back=True).entry is None


def test_a_failure_before_the_first_step_after_the_load_counts() -> None:
    assert fail(fail(Ledger(), 1, 100, None).ledger, 2, 100, None).entry is not None


def test_an_attempt_that_loaded_nothing_blames_no_checkpoint() -> None:
    ledger = fail(Ledger(), 1, 100, 3).ledger
    assert after_failure(ledger, 2, None, NAN, 30.0) == Judged(ledger)  # it failed while importing
    assert after_failure(Ledger(), 0, 5, NAN, 30.0) == Judged(Ledger())


def test_a_fault_that_follows_through_several_checkpoints_gives_up_no_more_of_them() -> None:
    ledger, attempt, notes = Ledger(), 0, []
    for step in (100, 90, 80, 70, 60):
        for _ in range(2):
            attempt += 1
            judged = fail(ledger, attempt, step, 1)
            ledger = judged.ledger
            notes.append(judged.note)
    assert [e.step for e in ledger.entries] == [100, 90, 80]
    assert len(ledger.entries) == MOST_IN_A_ROW
    assert "follows through 3 checkpoints and is probably not theirs" in notes[7]
    # Once training has come further, or with another fault, the row begins anew.
    for _ in range(2):
        attempt += 1
        ledger = fail(ledger, attempt, 200, 1).ledger
    assert [e.step for e in ledger.entries] == [100, 90, 80, 200]
    for _ in range(2):
        attempt += 1
        ledger = fail(ledger, attempt, 70, 1, "another").ledger
    assert [e.step for e in ledger.entries] == [100, 90, 80, 200, 70]


def test_a_lifted_state_is_tried_again_and_needs_two_new_failures() -> None:
    ledger = fail(fail(Ledger(), 1, 100, 3).ledger, 2, 100, 3).ledger
    assert lift(ledger, 99) == ledger
    assert lift(ledger, 100, attempt=7) == ledger
    lifted = lift(ledger, 100)
    assert (lifted.entries, lifted.failures) == ((), ())
    assert fail(lifted, 3, 100, 3).entry is None


def test_folders_that_hold_a_quarantined_state_are_found() -> None:
    ledger = fail(fail(Ledger(), 1, 100, 3).ledger, 2, 100, 3).ledger  # found at 25 s

    def folder(step: int, attempt: int, at_unix_s: float) -> Listed:
        manifest = Manifest(step, attempt, "run", 1, at_unix_s, "2.13", "0.1", ())
        return Listed(Path(f"/r/{step}.{attempt}.{at_unix_s:g}"), FolderName(step), manifest)

    listed = [folder(100, 0, 5.0), folder(100, 0, 26.0), folder(100, 1, 5.0), folder(90, 0, 4.0)]
    assert ledger.among([*listed, Listed(Path("/r/x"), FolderName(100), None, "cut")]) == (Path("/r/100.0.5"),)


def test_the_ledger_outlives_the_process(tmp_path: Path) -> None:
    assert read(tmp_path) == Ledger()
    update(tmp_path, lambda before: fail(before, 1, 100, 3).ledger)
    written = update(tmp_path, lambda before: fail(before, 2, 100, 3).ledger)
    assert read(tmp_path) == written
    assert [e.step for e in written.entries] == [100]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "steadyrun.quarantine/1"}', '{"schema": "other/9"}'])
def test_a_damaged_ledger_is_named_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / QUARANTINE_NAME
    path.write_text(text)
    with pytest.raises(QuarantineError, match=QUARANTINE_NAME):
        update(tmp_path, lambda before: before)
    assert path.read_text() == text


def test_a_ledger_that_cannot_be_written_says_so_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = update(tmp_path, lambda ledger: fail(ledger, 1, 100, 3).ledger)

    def fsync(fd: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(QuarantineError, match=r"cannot write .*quarantine.json: Disk quota exceeded"):
        update(tmp_path, lambda ledger: fail(ledger, 2, 100, 3).ledger)
    assert read(tmp_path) == before


def test_a_root_that_has_vanished_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(QuarantineError, match="cannot write"):
        update(tmp_path / "gone", lambda before: before)


events = st.lists(
    st.tuples(st.integers(0, 40), st.none() | st.integers(0, 14), st.sampled_from(["", "a", "b", "c"])), max_size=60
)


@settings(max_examples=60, deadline=None)
@given(events)
def test_however_it_fails_the_ledger_stays_bounded_and_reads_back(failures: list[tuple[int, int | None, str]]) -> None:
    ledger = Ledger()
    for attempt, (step, survived, signature) in enumerate(failures):
        judged = fail(ledger, attempt, step, survived, signature)
        if judged.entry is not None:
            seen = [f for f in failures[: attempt + 1] if f[0] == step and f[2] == signature]
            assert len([f for f in seen if (f[1] or 0) <= WITHIN_STEPS]) >= 2
            newer = [e for e in ledger.entries if e.signature == signature and e.step >= step]
            assert len(newer) < MOST_IN_A_ROW
        ledger = judged.ledger
    assert not any(e.signature == "" for e in ledger.entries)
    assert len(ledger.failures) <= 64
    assert Ledger.from_json(ledger.to_json()) == ledger
