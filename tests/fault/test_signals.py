"""Signals to the launcher: save and leave, pre-emption warnings, nohup."""

from __future__ import annotations

import signal

import pytest
from jobs import JobStarter, is_alive

OPTIONS = ["--standalone", "--nproc-per-node=2", "--ft-standby=off"]


@pytest.mark.parametrize(("codes", "expected"), [("class", 86), ("torchrun", 1)])
def test_sigterm_lets_ranks_save_and_tells_preemption(start: JobStarter, codes: str, expected: int) -> None:
    env = {"CATCH": "SIGTERM", "LEAVE_ON_TERM": "1"}
    job = start("steps.py", [*OPTIONS, f"--ft-exit-codes={codes}"], [100_000, 0.02], env=env)
    job.wait_for_step(5, ranks=(0, 1))
    job.send(signal.SIGTERM)
    assert job.wait(60) == expected, job.story()
    assert sorted(e["rank"] for e in job.events("saved")) == [0, 1], job.story()
    assert [len(job.events("signal", rank=r)) for r in (0, 1)] == [1, 1], "one SIGTERM each"
    assert "Traceback" not in job.output


def test_repeated_sigterm_changes_nothing(start: JobStarter) -> None:
    env = {"CATCH": "SIGTERM", "LEAVE_ON_TERM": "1"}
    job = start("steps.py", OPTIONS, [100_000, 0.02], env=env)
    job.wait_for_step(5, ranks=(0, 1))
    for _ in range(5):
        job.send(signal.SIGTERM)
    assert job.wait(60) == 86, job.story()
    assert sorted(e["rank"] for e in job.events("saved")) == [0, 1]


def test_should_stop_is_true_at_the_same_call_on_all_ranks(start: JobStarter) -> None:
    job = start("steps.py", OPTIONS, [100_000, 0.02], env={"ASK_TO_STOP": "1", "CATCH": "SIGTERM"})
    job.wait_for_step(20, ranks=(0, 1))
    job.send(signal.SIGTERM)
    code = job.wait(60)
    asked = {e["rank"]: e["step"] for e in job.events("asked_to_stop")}
    assert set(asked) == {0, 1}, job.story()
    assert asked[0] == asked[1]
    assert code == 86, job.story()


def test_a_rank_that_ignores_sigterm_is_ended_after_the_final_grace(start: JobStarter) -> None:
    job = start("steps.py", [*OPTIONS, "--ft-final-grace=1"], [100_000, 0.02], env={"CATCH": "SIGTERM"})
    job.wait_for_step(5, ranks=(0, 1))
    job.send(signal.SIGTERM)
    assert job.wait(30) == 86, job.story()
    assert {r["code"] for r in job.journal("rank_exited")} == {-signal.SIGKILL}


def test_usr1_reaches_ranks_that_catch_it_and_training_goes_on(start: JobStarter) -> None:
    job = start("steps.py", OPTIONS, [200, 0.02], env={"CATCH": "SIGUSR1"})
    job.wait_for_step(5, ranks=(0, 1))
    job.send(signal.SIGUSR1)
    job.wait_for(lambda: len(job.events("signal", signal="SIGUSR1")) == 2, 20, "both ranks hear SIGUSR1")
    assert job.wait(60) == 0, job.story()
    assert [job.newest_step(r) for r in (0, 1)] == [199, 199]


def test_usr1_is_kept_from_ranks_that_would_die_of_it(start: JobStarter) -> None:
    job = start("steps.py", OPTIONS, [200, 0.02])
    job.wait_for_step(5, ranks=(0, 1))
    job.send(signal.SIGUSR1)
    assert job.wait(60) == 0, job.story()
    assert "SIGUSR1" in job.output, "it is said that it was not forwarded"


def test_sighup_stays_ignored_under_nohup(start: JobStarter) -> None:
    job = start("steps.py", OPTIONS, [150, 0.02], ignore=[signal.SIGHUP])
    job.wait_for_step(5, ranks=(0, 1))
    job.send(signal.SIGHUP)
    assert job.wait(60) == 0, job.story()
    assert [job.newest_step(r) for r in (0, 1)] == [149, 149]


def test_sighup_ends_a_job_that_was_started_without_nohup(start: JobStarter) -> None:
    job = start("steps.py", OPTIONS, [100_000, 0.02])
    job.wait_for_step(5, ranks=(0, 1))
    pids = job.pids()
    job.send(signal.SIGHUP)
    assert job.wait(60) == 1, job.story()  # an interrupt by a person; 86 is for SIGTERM, the schedulers' word
    assert not any(is_alive(p) for p in pids.values())
