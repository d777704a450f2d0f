"""Calibration of a job that really ran: its journal, read here in another way, tells the same."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core.board import OpenSection, SlotView
from steadyrun.core.journal import read_journal
from steadyrun.core.options import command_line_source, resolve
from steadyrun.ctl.calibration.replay import fired
from steadyrun.ctl.main import main
from steadyrun.detect.calibrate.passes import read_passes
from steadyrun.launcher.limits import limits_of
from steadyrun.node.machine.events import Limits
from steadyrun.node.machine.watchdog import Incarnation, overdue

STEPS, SLOW_STEP, SAVE_EVERY = 60, 41, 3
# At its end it waits until the journal, written every few seconds, has told of its last step.
SCRIPT = f"""
import json, os, pathlib, time
from steadyrun import watch

rank = int(os.environ["RANK"])
for step in range({STEPS}):
    with watch.section("load"):
        time.sleep(0.3 if step == 0 else 0.004)
    with watch.section("step"):
        time.sleep(0.5 if (step, rank) == ({SLOW_STEP}, 1) else 0.02)
    if step % {SAVE_EVERY} == 2:
        with watch.section("checkpointing"):
            time.sleep(0.03 * (1 + rank))
    watch.step(step)

def is_told():
    for path in pathlib.Path(os.environ["RUNS"]).glob("*/journal/*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            record = json.loads(line) if line.endswith("\\n") else {{}}
            if record.get("ranks", {{}}).get(str(rank), {{}}).get("step") == {STEPS - 1}:
                return True
    return False

deadline = time.monotonic() + 60
while not is_told() and time.monotonic() < deadline:
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of two ranks, which takes a few seconds."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "script.py").write_text(SCRIPT)
    argv = ["--standalone", "--nproc-per-node", "2", "--ft-run-dir", str(folder / "runs"), "--ft-standby", "off"]
    done = subprocess.run(
        [sys.executable, "-m", "steadyrun.launcher", *argv, str(folder / "script.py")],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RUNS": str(folder / "runs")},
        text=True,
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return (folder / "runs" / "latest").resolve()


def calibrate(*argv: object) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    code = main(["calibrate-timeouts", "--json", *map(str, argv)], out, err, {}, 80)
    assert code == 0, err.getvalue()
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def durations_of(root: Path) -> dict[tuple[str, int], dict[int, float]]:
    """(Section, how manieth) -> rank -> seconds, read plainly."""
    out: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    counts: dict[tuple[int, str], int] = defaultdict(int)
    for path in (root / "journal").glob("*.jsonl"):
        for record in read_journal(path):
            for rank, told in record.get("ranks", {}).items() if record["type"] == "steps" else ():
                for name, section in told["sections"].items():
                    for seconds in section["durations_s"] if name != "teardown" else ():
                        out[(name, counts[(int(rank), name)])][int(rank)] = seconds
                        counts[(int(rank), name)] += 1
    return out


def fires(root: Path, limits: Limits) -> dict[str, int]:
    """Passes in which the watchdog, asked in the last instant of each rank's section, would have found one late."""
    out: dict[str, int] = defaultdict(int)
    for (name, index), ranks in durations_of(root).items():
        out[name] += any(is_late(name, index, seconds, limits) for seconds in ranks.values())
    return {name: n for name, n in out.items() if n}


def is_late(name: str, index: int, seconds: float, limits: Limits) -> bool:
    before_s = None if name == "setup" else 99.0
    view = SlotView(
        pid=1,
        attempt=0,
        rank=0,
        attached_s=50.0,
        finished_s=None,
        step=None if before_s is None else 1,
        step_at_s=before_s,
        steps_done=0 if before_s is None else 1,
        step_is_global=False,
        first_step_s=before_s,
        beats=0,
        beat_at_s=None,
        last_change_s=None,
        stop_calls=0,
        uses_should_stop=False,
        checkpoints_done=0,
        has_exception=False,
        dropped=0,
        sections=(OpenSection(name, 100.0, first=index == 0),),
    )
    who = Incarnation(0, 0, 1, 0.0, own_step=True, own_sections=True)
    return bool(overdue(who, view, limits, 100.0 + seconds))


def test_the_table_holds_what_the_script_did(run_root: Path) -> None:
    found = calibrate(run_root, "--dry-run")
    sections = {s["section"]: s for s in found["sections"]}
    assert {n: s["n"] + s["first_n"] for n, s in sections.items() if n != "out_of_section"} == {
        "setup": 1,
        "load": STEPS,
        "step": STEPS,
        "checkpointing": STEPS // SAVE_EVERY,
    }
    assert sections["step"]["max_rank"] == 1
    assert 0.5 <= sections["step"]["max_s"] < 3.0
    assert sections["load"]["first_max_s"] >= 0.3
    assert sections["checkpointing"]["max_rank"] in (0, 1)
    assert sections["checkpointing"]["median_s"] >= 0.055  # the slower rank's
    assert sections["out_of_section"]["n"] == STEPS - 1
    assert 0.0 < found["outside_sections_share"] < 0.7
    assert found["never_seen"] == ["evaluation"]


@pytest.mark.parametrize(
    "limits",
    [
        Limits(step_s=0.4, setup_s=0.01),
        Limits(sections={"load": 0.006, "checkpointing": 0.06}, accepted=frozenset({"load"})),
        Limits(sections={"load": 0.006}, first={"load": 0.1}, accepted=frozenset({"load"})),
        Limits(checkpointing_s=0.031, default_section_s=0.005, first_step_s=0.005),
        Limits(step_s=0.02, sections={"checkpointing": None}),
    ],
    ids=["step and set-up", "accepted", "first", "defaults", "every step, no save"],
)
def test_the_replay_fires_as_the_watchdog_would(run_root: Path, limits: Limits) -> None:
    run = read_passes("r", [read_journal(p) for p in (run_root / "journal").glob("*.jsonl")])
    expected = fires(run_root, limits)
    assert expected
    assert {n: c for n, c in fired([run], limits).items() if n != "out_of_section"} == expected


def test_the_dry_runs_counts_are_those_of_the_watchdog(run_root: Path, tmp_path: Path) -> None:
    file = tmp_path / "timeouts.json"
    found = calibrate(run_root, "-o", file)
    ours = limits_of(resolve([command_line_source({"timeouts": ("--ft-timeouts", str(file))})]), 30.0)
    told = {s["section"]: {r["rule"]: r for r in s["rules"]} for s in found["sections"]}
    for rule, limits in (("calibrated", ours), ("current", Limits())):
        counts = {name: rules[rule]["fired"] for name, rules in told.items()}
        assert {name: n for name, n in counts.items() if n} == fires(run_root, limits)
    assert "step" in ours.accepted
    assert "setup" not in ours.accepted
    assert max(s for (name, _), ranks in durations_of(run_root).items() if name == "step" for s in ranks.values()) < (
        ours.step_s
    )
