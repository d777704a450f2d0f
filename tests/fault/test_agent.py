"""The agent itself stopped, slow or gone: training must not suffer, and nothing may stay."""

from __future__ import annotations

import os
import select
import signal
import statistics
import time

import pytest
from jobs import Job, JobStarter, is_alive, processes_with

OPTIONS = ["--standalone", "--nproc-per-node=2", "--ft-step-timeout=2"]


def rate_hz(job: Job, from_s: float, to_s: float) -> float:
    """Steps per second of rank 0 in a stretch of CLOCK_MONOTONIC."""
    inside = [e for e in job.steps(rank=0) if from_s <= e["at_s"] <= to_s]
    return len(inside) / (to_s - from_s)


def stop_agent(start: JobStarter, pause_s: float) -> None:
    job = start("steps.py", OPTIONS, [1_000_000, 0.02], env={"LEAVE_ON_TERM": "1", "CATCH": "SIGTERM"})
    job.wait_for_step(100, ranks=(0, 1))
    before_s = time.monotonic()
    before_hz = rate_hz(job, before_s - 1.5, before_s)
    job.send(signal.SIGSTOP)
    select.select([], [], [], pause_s)
    after_s = time.monotonic()
    stopped_hz = rate_hz(job, before_s, after_s)
    job.send(signal.SIGCONT)
    assert stopped_hz > 0.8 * before_hz, f"{before_hz:.1f} steps/s before, {stopped_hz:.1f} while the agent stood still"
    gaps = [b["at_s"] - a["at_s"] for a, b in zip(job.steps(rank=0), job.steps(rank=0)[1:], strict=False)]
    assert max(gaps) < 1.0, f"a step took {max(gaps):.2f} s; median {statistics.median(gaps):.3f} s"
    job.wait_for_step(job.newest_step() + 150)  # three seconds, longer than the limit of 2 s
    assert job.incidents() == [], job.story()
    assert job.journal("suspicion") == [], job.story()
    assert {e["attempt"] for e in job.events("start")} == {0}
    job.send(signal.SIGTERM)
    assert job.wait(60) == 86, job.story()


def test_training_steps_on_while_the_agent_is_stopped_and_nobody_is_accused(start: JobStarter) -> None:
    stop_agent(start, 5.0)


@pytest.mark.slow
def test_training_steps_on_while_the_agent_is_stopped_for_a_minute(start: JobStarter) -> None:
    stop_agent(start, 60.0)


def test_sigkill_of_the_agent_takes_ranks_standbys_and_their_children_with_it(start: JobStarter) -> None:
    job = start("steps.py", OPTIONS, [1_000_000, 0.02], faults="grandchildren rank=0 step=5; shm rank=1 step=5")
    job.wait_for_step(150, ranks=(0, 1))
    job.wait_for(lambda: job.journal("standby", event="ready"), 30, "standbys are ready")
    pids = [*job.pids().values(), *job.journal("standby", event="started")[-1]["pids"]]
    assert len(pids) == 4, job.journal("standby")
    assert all(is_alive(p) for p in pids)
    job.send(signal.SIGKILL)
    job.process.wait()
    gone_s = time.monotonic() + 2.0
    while any(is_alive(p) for p in pids) and time.monotonic() < gone_s:
        select.select([], [], [], 0.02)
    assert [p for p in pids if is_alive(p)] == [], "ranks and standbys must go with the agent, within 2 s"
    assert job.left_behind() == []


def test_sigkill_of_the_agent_with_a_stopped_rank_leaves_nothing(start: JobStarter) -> None:
    job = start("steps.py", [*OPTIONS, "--ft-mode=observe"], [1_000_000, 0.02], faults="stop rank=1 step=20")
    job.wait_for_incident(1)
    job.send(signal.SIGKILL)
    job.process.wait()
    assert job.left_behind() == []


def test_ranks_stop_with_an_agent_that_is_killed_while_it_is_stopped(start: JobStarter) -> None:
    job = start("steps.py", [*OPTIONS, "--ft-standby=off"], [1_000_000, 0.02])
    job.wait_for_step(10, ranks=(0, 1))
    job.send(signal.SIGSTOP)
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    assert job.left_behind() == []
    assert processes_with(job.tag) == {}
