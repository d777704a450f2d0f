"""Wrong bits that come with a load, come again and again, or lie in what one rank alone holds: one live job each."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Job, JobStarter

SAVE_EVERY, CHECK_EVERY = 10, 5

pytestmark = [pytest.mark.slow, pytest.mark.deadline(400)]


def run(start: JobStarter, folder: Path, form: str, ranks: int, steps: int, faults: str, name: str) -> Job:
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--ft-sdc={CHECK_EVERY}"]
    args = [form, steps, SAVE_EVERY, folder / name]
    env = {"OMP_NUM_THREADS": "1", "PACE_S": "0.1"}
    job = start("replicas.py", options, args, faults=faults, env=env, name=name)
    job.wait(340)
    return job


def losses(job: Job) -> dict[tuple[int, int], float]:
    return {(e["rank"], e["step"]): e["own"] for e in job.events("step")}


def test_a_bit_that_flips_at_a_load_is_found_before_anything_was_learned_from_it(
    start: JobStarter, tmp_path: Path
) -> None:
    fault = "flip rank=1 step=load target=param tensor=head.weight element=3 bit=20"
    job = run(start, tmp_path, "ddp", 3, 22, fault, "load")
    calm = run(start, tmp_path, "ddp", 3, 22, "", "calm")
    assert job.process.returncode == 0, job.story()
    (incident,) = job.incidents()
    told = incident.verdict["details"]["sdc"]
    assert (incident.cls, incident.ranks, told["cause"]) == ("silent_corruption", [1], "device"), job.story()
    assert "head.weight" in told["tensors"]
    assert losses(job) == losses(calm)


def test_a_bit_that_flips_again_in_each_attempt_ends_the_job_with_its_rank_named(
    start: JobStarter, tmp_path: Path
) -> None:
    fault = "flip rank=2 step=24 every=1 attempt=any target=param tensor=first.weight element=9 bit=11"
    job = run(start, tmp_path, "ddp", 3, 60, fault, "again")
    assert job.process.returncode not in (0, None), job.story()
    found = job.incidents()
    assert len(found) >= 3, job.story()
    assert {i.cls for i in found} == {"silent_corruption"}
    assert {tuple(i.ranks) for i in found} == {(2,)}
    assert {i.verdict["details"]["sdc"]["back_to"] for i in found} == {19}


@pytest.mark.parametrize(
    "fault",
    [
        "flip rank=1 step=14 target=param tensor=first.weight element=70 bit=12 at=rest",
        "flip rank=0 step=14 target=optim at=rest",
    ],
    ids=["param", "moment"],
)
def test_zero_shards_are_checked_at_rest(start: JobStarter, tmp_path: Path, fault: str) -> None:
    job = run(start, tmp_path, "zero", 2, 22, fault, "zero")
    assert job.process.returncode == 0, job.story()
    incident = job.incidents()[0]
    told = incident.verdict["details"]["sdc"]
    assert (incident.cls, incident.ranks, told["cause"]) == (
        "silent_corruption",
        [int(fault[len("flip rank=")])],
        "device",
    ), job.story()
