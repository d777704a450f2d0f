"""Limits that a run has set itself: what is slow for good reasons is left alone, a hang is acted on at the soft limit.

A job does steps until its limits are calibrated, then suffers trial after trial in which something legitimate takes
longer than its soft limit, and hangs at last: what it has survived must not make it wait for that.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from typing import Any

import pytest
from jobs import Job, JobStarter

from steadyrun.ctl.main import main

BEFORE = 96  # steps at least; a few seconds, in which limits come down to some seconds
# Each is ten times as long as a step; with ``+`` longer than the soft limit, with ``-`` nearly as long.
SLOW_SECTIONS = "checkpoint+,evaluation+,loader-"
SLOW_LOADER = "loader+,checkpoint+,evaluation+,recompilation"
SLOW_COMPILER = "recompilation+,evaluation+,checkpoint+,loader"
ALL_SLOW = "evaluation+,loader+,recompilation+,checkpoint+"
USEFUL_S = 40.0  # a limit that is still worth having
WITHIN_S = 1.0  # after the soft limit


class Tried:
    """A finished job."""

    def __init__(self, start: JobStarter, trials: str) -> None:
        self.trials = list(filter(None, trials.split(",")))
        runs = start.base / f"runs{len(start.jobs)}"
        options = ["--standalone", "--nproc-per-node=2", "--max-restarts=0", "--ft-standby=off"]
        self.job: Job = start(
            "legit_slowness.py", options, [BEFORE, trials, "hang"], run_dir=runs, env={"RUNS": str(runs)}
        )
        self.exit_code = self.job.wait(200)

    def calibrated(self) -> dict[str, Any]:
        out, err = io.StringIO(), io.StringIO()
        assert self.job.folder is not None
        argv = ["calibrate-timeouts", "--dry-run", "--json", str(self.job.folder)]
        assert main(argv, out, err, {}, 100) in (0, 3), err.getvalue()
        found: dict[str, Any] = json.loads(out.getvalue())
        return found


def check_trials(tried: Tried) -> None:
    """All took place, were looked at where they took longer than the soft limit, and had no consequence."""
    job = tried.job
    told = job.events("trial", culprit=True)
    assert [t["what"] + t["suffix"] for t in told] == tried.trials, job.story()
    alarms = job.journal("alarm", stage="soft")
    for trial in told:
        assert trial["soft_s"] > 0, f"no soft limit in trial {trial}\n{job.story()}"
        during = [a for a in alarms if trial["at_s"] < a["at_s"] < trial["at_s"] + trial["seconds"] + 0.5]
        assert bool(during) or trial["suffix"] != "+", f"nobody was looked at in trial {trial}\n{job.story()}"
    stopped = job.journal("stop")
    assert told
    assert all(s["at_s"] > told[-1]["at_s"] + told[-1]["seconds"] for s in stopped), job.story()


def check_unmet(tried: Tried) -> None:
    """What nobody looked at leaves the limits useful: before, one such stall made them ten times as long."""
    job = tried.job
    stalls = [t for t in job.events("trial", culprit=True) if t["suffix"] == "-"]
    assert stalls
    (hung,) = job.events("hangs")
    for trial in stalls:
        assert hung["soft_s"] <= 4 * max(trial["soft_s"], trial["seconds"]), f"{trial}, {hung}\n{job.story()}"


def check_hang(tried: Tried) -> None:
    """Acted on by evidence, within a second of the soft limit that was in force."""
    job = tried.job
    (hung,) = job.events("hangs")
    (stop,) = job.journal("stop")
    guilty = [r for r in job.journal("suspicion") if r["suspicion"]["is_soft"]]
    assert guilty, job.story()
    suspicion = guilty[0]["suspicion"]
    assert suspicion["rank"] == 1
    assert suspicion["limit_s"] <= min(hung["soft_s"] * 2, USEFUL_S), job.story()  # it may have had news since then
    late_s = stop["at_s"] - suspicion["since_s"] - suspicion["limit_s"]
    assert 0 <= late_s <= WITHIN_S, f"{late_s:.2f} s\n{job.story()}"
    assert job.incidents()[0].cls == "host_stall", job.story()
    assert job.incidents()[0].ranks == [1]
    assert tried.exit_code != 0


@pytest.fixture(scope="module")
def tried(start_for_module: JobStarter) -> Tried:
    return Tried(start_for_module, SLOW_SECTIONS)


def test_legitimate_slowness_beyond_the_soft_limit_is_left_alone(tried: Tried) -> None:
    check_trials(tried)
    assert len(tried.job.incidents()) == 1  # the hang


def test_a_hang_is_acted_on_within_a_second_of_the_soft_limit(tried: Tried) -> None:
    check_hang(tried)


def test_a_stall_that_nobody_looked_at_does_not_make_the_hang_wait(tried: Tried) -> None:
    check_unmet(tried)


def test_a_dry_run_counts_the_alarms_that_were_told(tried: Tried) -> None:
    """What was looked at live is what the journal's passes say against the limits that were in force."""
    live = {s["section"]: s["live"] for s in tried.calibrated()["sections"] if s["live"] is not None}
    told = Counter(a["key"] for a in tried.job.journal("alarm", stage="soft"))
    assert {name: n["soft_alarms"] for name, n in live.items() if n["soft_alarms"]} == dict(told)
    for name, n in live.items():
        assert n["soft_replayed"] == n["soft_alarms"] - n["in_hangs"], (name, n, tried.job.story())
        assert n["hard_replayed"] == n["hard_alarms"] == 0
    assert live["step"]["in_hangs"] == 1
    assert {"checkpointing", "evaluation"} <= told.keys()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(13))
def test_fifty_trials_kill_nothing(start: JobStarter, number: int) -> None:
    """52, in 13 jobs; each ends in a hang that is found all the same."""
    tried = Tried(start, (SLOW_LOADER, SLOW_COMPILER, ALL_SLOW)[number % 3])
    check_trials(tried)
    check_hang(tried)
    assert len(tried.job.incidents()) == 1
