"""Observe mode: the same verdicts, and nobody is touched."""

from __future__ import annotations

import os
import signal

import pytest
from jobs import Job, JobStarter, state_of

OPTIONS = ["--standalone", "--nproc-per-node=2", "--ft-mode=observe", "--ft-step-timeout=2", "--ft-standby=off"]

# Faults that pass by themselves: reported once each, and training goes on in the same processes.
PASSING = {
    "hang rank=0 seconds=6": (0, {"host_stall"}),
    "busy rank=1 seconds=6": (1, {"host_stall"}),
    "busy_c rank=0 seconds=6": (0, {"host_stall"}),
    "stop rank=1 seconds=6": (1, {"stopped_process"}),
    "dataloader rank=0 seconds=6": (0, {"input_pipeline"}),
}
APART = 30


@pytest.fixture(scope="module")
def tour(start_for_module: JobStarter) -> Job:
    """A job in which each of PASSING strikes once."""
    faults = "; ".join(f"{fault} step={APART * (n + 1)}" for n, fault in enumerate(PASSING))
    env = {"LOADER_WORKERS": "1"}
    job = start_for_module("train.py", OPTIONS, [APART * (len(PASSING) + 1), 0.05], faults=faults, env=env)
    job.wait(200)
    return job


@pytest.mark.deadline(300)
@pytest.mark.parametrize("fault", PASSING, ids=lambda f: f.replace(" ", "_"))
def test_hang_is_reported_with_its_culprit(tour: Job, fault: str) -> None:
    struck = next(r for r in tour.struck() if r["text"].startswith(fault))
    begin, end = float(struck["at_unix_s"]), float(struck["at_unix_s"]) + 6.0
    reports = [i for i in tour.incidents() if begin <= float(i.verdict["detected_at_unix_s"]) <= end]
    assert len(reports) == 1, tour.story()
    rank, classes = PASSING[fault]
    assert reports[0].cls in classes, reports[0].line()
    assert reports[0].ranks == [rank], reports[0].line()
    assert reports[0].verdict["mode"] == "observe"
    assert reports[0].verdict["action"] == "report"


@pytest.mark.deadline(300)
def test_nobody_is_signalled_and_training_goes_on_in_the_same_processes(tour: Job) -> None:
    assert tour.process.returncode == 0, tour.story()
    assert {e["attempt"] for e in tour.events("start")} == {0}
    assert len(tour.events("start")) == 2
    assert tour.journal("rank_exited", by_us=True) == []
    assert [r["code"] for r in tour.journal("rank_exited")] == [0, 0]


def test_a_rank_that_stays_stopped_is_reported_and_left_alone(start: JobStarter) -> None:
    job = start("steps.py", OPTIONS, [200, 0.05], faults="stop rank=1 step=20")
    incident = job.wait_for_incident(1, 60)
    pid = job.pids()[1]
    assert incident.ranks == [1], incident.line()
    assert incident.cls == "stopped_process"
    job.wait_for_step(job.newest_step(0) + 40, ranks=(0,))  # long after the limit
    assert state_of(pid) == "T"
    os.kill(pid, signal.SIGCONT)
    assert job.wait(60) == 0, job.story()
    assert job.pids()[1] == pid


def test_a_death_is_still_answered_in_observe_mode(start: JobStarter) -> None:
    """Observe mode is about hung ranks; a dead one leaves nothing to observe, so the job restarts as torchrun would."""
    job = start("steps.py", OPTIONS, [60, 0.02], faults="kill rank=1 step=10")
    assert job.wait(60) == 0, job.story()
    (incident,) = job.incidents()
    assert (incident.cls, incident.ranks) == ("dead_process", [1]), incident.line()
    assert job.newest_step(1) == 59
