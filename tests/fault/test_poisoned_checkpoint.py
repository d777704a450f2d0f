"""A checkpoint after whose load the same fault comes back is left alone, and an older one is tried once."""

from __future__ import annotations

from pathlib import Path

from jobs import Job, JobStarter

from steadyrun.checkpoint import quarantine

OPTIONS = ["--standalone", "--nproc-per-node=1"]


def starts(job: Job) -> list[int]:
    """The first step of each attempt."""
    return [int(e["start"]) for e in job.events("resumed")]


def test_a_spoilt_state_is_left_behind_by_going_back_one_checkpoint(start: JobStarter, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    job = start("poisoned.py", OPTIONS, [folder, 16, 22])
    assert job.wait(150) == 0, job.story()
    assert starts(job) == [0, 20, 15], job.story()
    assert [i.verdict["action"] for i in job.incidents()] == ["restart", "restart"]
    assert "older checkpoint" in job.incidents()[1].verdict["reason"]
    assert [q.step for q in quarantine.read(folder).quarantined()] == [19]
    assert job.journal("checkpoint_quarantined")


def test_a_fault_of_the_program_still_ends_the_job(start: JobStarter, tmp_path: Path) -> None:
    job = start("poisoned.py", OPTIONS, [tmp_path / "checkpoints", -1, 22])
    assert job.wait(150) == 80, job.story()
    assert starts(job) == [0, 20, 15], job.story()
    assert [i.verdict["action"] for i in job.incidents()] == ["restart", "restart", "stop"]
