"""When a job restarts, how often, and when it gives up."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from jobs import Job, JobStarter, free_port

OPTIONS = ["--standalone", "--nproc-per-node=2"]
ALONE = ["--standalone", "--nproc-per-node=1"]  # ranks of steps.py do not wait for each other: one could get ahead


def test_the_same_exception_at_the_same_step_twice_ends_the_job(start: JobStarter) -> None:
    job = start("steps.py", OPTIONS, [60, 0.01], env={"RAISE_AT": "1:22"})
    assert job.wait(90) == 80, job.story()
    assert max(e["attempt"] for e in job.events("start")) == 1, "one restart, then it is known to be the program"
    first, second = job.incidents()
    assert [first.cls, second.cls] == ["program_error"] * 2
    assert [first.ranks, second.ranks] == [[1], [1]]
    assert [first.verdict["action"], second.verdict["action"]] == ["restart", "stop"]
    assert "bad batch at step 22" in job.output


def test_restarts_without_progress_are_limited_by_the_budget(start: JobStarter) -> None:
    faults = "kill rank=0 step=start attempt=any"
    job = start("steps.py", [*ALONE, "--ft-restart-budget=2"], [60, 0.01], faults=faults)
    assert job.wait(90) == 84, job.story()
    assert len(job.incidents()) == 3
    assert job.incidents()[-1].verdict["action"] == "stop"


def test_progress_refills_the_budget(start: JobStarter) -> None:
    faults = "; ".join(f"kill step={10 * (n + 1)} attempt={n}" for n in range(4))
    job = start("steps.py", [*ALONE, "--ft-restart-budget=1"], [60, 0.01], faults=faults)
    assert job.wait(120) == 0, job.story()
    assert len(job.incidents()) == 4


@pytest.mark.parametrize("allowed", [0, 1])
def test_max_restarts_given_is_obeyed_exactly(start: JobStarter, allowed: int) -> None:
    faults = "; ".join(f"kill rank=1 step={10 * (n + 1)} attempt={n}" for n in range(3))
    job = start("steps.py", [*OPTIONS, f"--max-restarts={allowed}"], [60, 0.01], faults=faults)
    assert job.wait(90) == 84, job.story()
    assert max(e["attempt"] for e in job.events("start")) == allowed
    assert [i.verdict["action"] for i in job.incidents()] == ["restart"] * allowed + ["stop"]


def test_exit_codes_of_torchrun_on_request(start: JobStarter) -> None:
    options = [*OPTIONS, "--max-restarts=0", "--ft-exit-codes=torchrun"]
    job = start("steps.py", options, [60, 0.01], faults="exit rank=1 step=5 code=7")
    assert job.wait(60) == 1, job.story()


def test_a_run_folder_that_cannot_be_written_does_not_stop_the_job(start: JobStarter, tmp_path: Path) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("not a folder")
    job = start("steps.py", OPTIONS, [20, 0.01], run_dir=blocked / "runs", env={"TMPDIR": str(tmp_path)})
    assert job.wait(60) == 0, job.story()
    assert str(blocked) in job.output
    assert "--ft-run-dir" in job.output
    assert list(tmp_path.glob("steadyrun-*/*/journal/*.jsonl")), "the journal is in a temporary folder"


def test_a_run_folder_that_is_lost_while_the_job_runs_costs_the_records_only(start: JobStarter, tmp_path: Path) -> None:
    job = start("steps.py", OPTIONS, [200, 0.02], env={"TMPDIR": str(tmp_path)})
    job.wait_for_step(5, ranks=(0, 1))
    folder = job.folder
    assert folder is not None
    aside = folder.with_name("aside")
    folder.rename(aside)  # at once: the agent writes into it meanwhile
    folder.write_text("no folder any more")
    shutil.rmtree(aside, ignore_errors=True)
    os.kill(job.pids()[1], signal.SIGKILL)
    assert job.wait(60) == 0, job.output
    assert "dead_process: rank 1 was killed by SIGKILL" in job.output
    assert "cannot be looked up later" in job.output
    assert list(tmp_path.glob("steadyrun-*/attempts/1/rank_1/stderr.log")), "logs go to a temporary folder"


def kill_at_random(job: Job, ranks: int, times: int, seed: int) -> None:
    """SIGKILL a random rank *times* times, some steps after each start; every restart must come back.

    At least ten steps, so that a checkpoint is written and the restarts count as progress; sometimes the standbys are
    ready by then, sometimes not.
    """
    draw = random.Random(seed)
    for attempt in range(times):
        job.wait_for_step(-1, ranks=range(ranks), attempt=attempt, deadline_s=60)
        first = min(e["step"] for e in job.steps(attempt=attempt))
        job.wait_for_step(first + draw.randint(10, 120), ranks=range(ranks), attempt=attempt, deadline_s=60)
        victim = draw.randrange(ranks)
        os.kill(job.pids(attempt)[victim], signal.SIGKILL)
        job.wait_for(lambda n=attempt: job.incidents()[n:], 30, f"incident {attempt + 1} (seed {seed})")
    job.wait_for_step(-1, ranks=range(ranks), attempt=times, deadline_s=60)
    assert [i.cls for i in job.incidents()] == ["dead_process"] * times, job.story()


@pytest.mark.parametrize(
    "times", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.deadline(600)])], ids=lambda n: f"{n}-times"
)
@pytest.mark.parametrize("rendezvous", [pytest.param("standalone", marks=pytest.mark.slow), "static"])
def test_every_restart_after_sigkill_of_a_rank_comes_back(start: JobStarter, rendezvous: str, times: int) -> None:
    if rendezvous == "standalone":
        options = ["--standalone"]
    else:
        options = ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    job = start("train.py", [*options, "--nproc-per-node=2"], [100_000, 0.05])
    kill_at_random(job, 2, times, seed=random.SystemRandom().randrange(10_000))
    job.send(signal.SIGTERM)
    assert job.wait(60) == 86, job.story()
    assert job.left_behind() == []
