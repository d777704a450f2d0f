"""``steadyctl ckpt prune``, ``rollback`` and ``quarantine`` on real folders."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadyrun.checkpoint import commit, quarantine, rollback
from steadyrun.checkpoint.catalog import hold, look
from steadyrun.checkpoint.manifest import Verified
from steadyrun.checkpoint.saves import TierName
from steadyrun.core.journal import Journal
from steadyrun.core.runfolder import RunFolder

STEPS = (10, 20, 30, 40, 50)


@pytest.fixture
def root(own_folder: Callable[..., Path], tmp_path: Path) -> Path:
    for step in STEPS:
        own_folder(tmp_path / "root", step)
    return tmp_path / "root"


def steps_in(root: Path) -> list[int]:
    return sorted(c.step for c in look(root).complete)


def names(records: list[dict[str, Any]]) -> list[int]:
    return sorted(r["step"] for r in records)


# -- prune -----------------------------------------------------------------------------------------------------------
def test_dry_run_says_what_goes_and_removes_nothing(ckpt: Callable[..., Any], root: Path) -> None:
    told = ckpt("prune", root, "--keep", 2, "--dry-run", "--json")
    assert told.code == 0
    assert told.json["schema"] == "steadyrun.ckpt_prune/1"
    assert (names(told.json["removed"]), names(told.json["kept"])) == ([10, 20, 30], [40, 50])
    assert told.json["freed_bytes"] > 3 * 256 * 1024
    assert steps_in(root) == list(STEPS)
    text = ckpt("prune", root, "--keep", 2, "--dry-run").text
    assert "3 of 5 would go, would free" in text


def test_what_dry_run_says_is_what_goes(ckpt: Callable[..., Any], root: Path) -> None:
    commit.mark_verified(root / "step-000000010", Verified(1.0, "verify"))
    argv = ("prune", root, "--keep", 2, "--keep-every", 30, "--json")
    said = ckpt(*argv, "--dry-run").json
    told = ckpt(*argv).json
    assert names(said["removed"]) == names(told["removed"]) == [20]
    assert steps_in(root) == [10, 30, 40, 50]  # the newest verified one, a milestone, the two newest
    assert not [p for p in root.iterdir() if p.name.startswith(".trash")]


def test_what_is_being_read_stays_and_is_said(ckpt: Callable[..., Any], root: Path) -> None:
    with hold(root / "step-000000010"):
        told = ckpt("prune", root, "--keep", 4, "--json")
        assert told.code == 1
        assert "somebody reads it" in told.json["failed"][0]["why"]
    assert steps_in(root) == list(STEPS)
    assert ckpt("prune", root, "--keep", 4).code == 0
    assert steps_in(root) == [20, 30, 40, 50]


def test_a_save_that_goes_on_stays_and_one_that_was_cut_off_goes(ckpt: Callable[..., Any], root: Path) -> None:
    fresh, stale = commit.begin(root, 15, 0), commit.begin(root, 16, 0)
    old_s = time.time() - 7200
    os.utime(stale, (old_s, old_s))
    told = ckpt("prune", root, "--keep", 5, "--json")
    assert told.code == 0
    assert [Path(r["path"]) for r in told.json["removed"]] == [stale]
    assert fresh.is_dir()
    assert not stale.exists()


@pytest.mark.parametrize("argv", [("--keep", 1), ("--keep", 2, "--keep-every", 0)])
def test_rules_that_would_keep_too_little_are_refused(
    ckpt: Callable[..., Any], root: Path, argv: tuple[object, ...]
) -> None:
    assert ckpt("prune", root, *argv).code == 2
    assert steps_in(root) == list(STEPS)


# -- rollback --------------------------------------------------------------------------------------------------------
def test_a_request_is_left_for_the_next_attempt(ckpt: Callable[..., Any], root: Path) -> None:
    told = ckpt("rollback", root, "--to", 35, "--skip-batches", "40:50", "--skip-batches", "31:35", "--json")
    assert told.code == 0, told.err
    assert (told.json["checkpoint"]["step"], told.json["set_aside_count"], told.json["is_live"]) == (30, 2, False)
    waiting = rollback.pending(root)
    assert waiting is not None
    assert (waiting.to, waiting.skip_batches) == (35, ((31, 35), (40, 50)))
    assert waiting.id == told.json["request"]["id"]
    taken = rollback.take(root)
    assert taken is not None
    assert taken.id == waiting.id
    assert [c.step for c in look(root).complete if not c.is_superseded] == [30, 20, 10]
    assert "set aside by a rollback" in ckpt("ls", root).text


def test_a_request_can_be_withdrawn(ckpt: Callable[..., Any], root: Path) -> None:
    text = ckpt("rollback", root, "--to", 20, "--skip-batches", "21:30").text
    assert "asked for: back to step 20, without batches 21 to 29" in text
    assert "goes on after step 20" in text
    assert "3 newer checkpoints will be set aside" in text
    assert "withdrawn: back to step 20" in ckpt("rollback", root, "--cancel").text
    assert rollback.pending(root) is None
    assert ckpt("rollback", root, "--cancel").code == 1


def test_the_root_of_a_run_is_found_through_its_journal(ckpt: Callable[..., Any], root: Path, tmp_path: Path) -> None:
    run, _ = RunFolder.create(tmp_path / "runs", "demo", 1_700_000_000.0)
    assert ckpt("rollback", run.root, "--to", 20).code == 2  # it has saved nothing yet
    journal = Journal(run.journal("n0"), "n0")
    path = str(root / "step-000000050")
    journal.write("checkpoint_committed", 1_700_000_100.0, 100.0, 0, step=50, path=path, seconds=1.0, bytes=1)
    journal.close()
    for where in (run.root, tmp_path / "runs"):
        told = ckpt("rollback", where, "--to", 20, "--json")
        assert told.code == 0, told.err
        assert Path(told.json["root"]) == root
        assert Path(told.json["run"]) == run.root
    assert rollback.pending(root) is not None


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("--to", 5), 1, "holds no complete checkpoint of that step or an earlier one"),
        (("--to", 20, "--skip-batches", "20:30"), 1, "begin at 21"),
        (("--to", 20, "--skip-batches", "30"), 2, "give FIRST:END"),
        ((), 2, "either --to STEP or --cancel"),
        (("--to", 20, "--cancel"), 2, "either --to STEP or --cancel"),
    ],
)
def test_a_rollback_that_cannot_be_is_refused_at_once(
    ckpt: Callable[..., Any], root: Path, argv: tuple[object, ...], code: int, words: str
) -> None:
    told = ckpt("rollback", root, *argv)
    assert told.code == code
    assert words in told.error
    assert rollback.pending(root) is None


def test_a_folder_of_anything_else_is_no_root(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    told = ckpt("rollback", tmp_path, "--to", 5)
    assert told.code == 2
    assert "neither a folder of steadyrun's checkpoints nor a run folder" in told.error


# -- quarantine ------------------------------------------------------------------------------------------------------
def quarantined(root: Path, *steps: int) -> None:
    entries = tuple(
        quarantine.Entry(step, 0, TierName.SHARED, "ValueError at train.py:31", 2, time.time()) for step in steps
    )
    quarantine.update(root, lambda ledger: dataclasses.replace(ledger, entries=entries))


def test_quarantines_are_shown_with_their_reason_and_lifted(ckpt: Callable[..., Any], root: Path) -> None:
    assert "no checkpoint is in quarantine" in ckpt("quarantine", root).text
    quarantined(root, 40, 50)
    told = ckpt("quarantine", root, "--json")
    assert told.code == 0
    assert told.json["schema"] == "steadyrun.ckpt_quarantine/1"
    assert [e["step"] for e in told.json["entries"]] == [40, 50]
    assert "ValueError at train.py:31" in ckpt("quarantine", root).text
    assert "quarantined" in ckpt("ls", root).text
    lifted = ckpt("quarantine", root, "--lift", 40, "--json")
    assert lifted.code == 0
    assert ([e["step"] for e in lifted.json["lifted"]], [e["step"] for e in lifted.json["entries"]]) == ([40], [50])
    assert [e.step for e in quarantine.read(root).entries] == [50]
    assert ckpt("quarantine", root, "--lift", 40).code == 1


def test_prune_does_not_count_on_quarantined_ones(ckpt: Callable[..., Any], root: Path) -> None:
    quarantined(root, 50)
    told = ckpt("prune", root, "--keep", 2, "--json")
    assert told.code == 0
    assert names(told.json["removed"]) == [10, 20]
    assert steps_in(root) == [30, 40, 50]


def test_a_damaged_ledger_is_said(ckpt: Callable[..., Any], root: Path) -> None:
    (root / "quarantine.json").write_text(json.dumps({"schema": "steadyrun.quarantine/1"}))
    told = ckpt("quarantine", root, "--json")
    assert told.code == 1
    assert "quarantine.json is damaged" in told.json["error"]
    # it costs the list of checkpoints nothing but that word
    assert ckpt("ls", root).code == 0
