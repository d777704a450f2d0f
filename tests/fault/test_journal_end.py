"""The journal holds all of a run, also what happened since its last record of steps."""

from __future__ import annotations

from jobs import JobStarter

STEPS = 12


def test_the_last_steps_of_a_short_job_are_in_its_journal(start: JobStarter) -> None:
    job = start("steps.py", ["--standalone", "--nproc-per-node=2"], [STEPS, 0.02])
    assert job.wait(60) == 0, job.story()
    newest = {rank: told["step"] for record in job.journal("steps") for rank, told in record["ranks"].items()}
    assert newest == {"0": STEPS - 1, "1": STEPS - 1}
    assert job.journal()[-1]["type"] == "run_ended"
