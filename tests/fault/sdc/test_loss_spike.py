"""A loss that spikes: bytes are checked, and on request training goes back and leaves the bad batches out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, JobStarter

from steadyrun.ctl.main import main as steadyctl

FIRST, END = 140, 150  # batches whose targets are far off
SAVE_EVERY, CHECK_EVERY = 20, 10
STEPS = 190

pytestmark = pytest.mark.deadline(240.0)


def run(start: JobStarter, tmp_path: Path, action: str, poison: str, steps: int = STEPS) -> Job:
    options = ["--standalone", "--nproc-per-node=2", f"--ft-sdc={CHECK_EVERY}", f"--ft-loss-spike={action}"]
    args = [steps, SAVE_EVERY, tmp_path / "checkpoints", FIRST, END, poison]
    job = start("spiking.py", options, args, env={"OMP_NUM_THREADS": "1", "PACE_S": "0.05"})
    assert job.wait(200) == 0, job.story()
    return job


def records(job: Job, event: str) -> list[dict[str, Any]]:
    assert job.folder is not None
    lines = [line for f in (job.folder / "journal").glob("*.jsonl") for line in f.read_text().splitlines()]
    return [r for r in map(json.loads, lines) if r.get("type") == "integrity" and r.get("event") == event]


@pytest.mark.parametrize("poison", ["30", pytest.param("nan", marks=pytest.mark.slow)])
def test_training_goes_back_about_100_steps_and_leaves_the_batches_out(
    start: JobStarter, tmp_path: Path, poison: str
) -> None:
    job = run(start, tmp_path, "rollback", poison)
    (cured,) = records(job, "cured")
    assert (cured["to"], cured["first_batch"]) == (39, 40), job.story()
    assert cured["end_batch"] >= END, cured
    starts = {(e["attempt"], e["start"]) for e in job.events("resumed")}
    assert starts == {(0, 0), (1, 40)}, job.story()
    again = [e for e in job.events("step") if e["attempt"] == 1]
    assert min(e["batch"] for e in again) == cured["end_batch"]
    assert max(e["step"] for e in again) == STEPS - 1
    assert not job.incidents(), "a spike is no fault of a rank"
    out = io.StringIO()
    steadyctl(["sdc", str(job.folder)], out, io.StringIO(), {})
    assert "back to step 39" in out.getvalue()


@pytest.mark.slow
def test_by_default_it_is_told_and_bytes_are_checked_out_of_turn(start: JobStarter, tmp_path: Path) -> None:
    job = run(start, tmp_path, "off", "30", steps=160)
    assert {e["attempt"] for e in job.events("step")} == {0}
    assert {r["rank"] for r in records(job, "out_of_line")} == {0, 1}
    (spike,) = records(job, "spike")
    assert FIRST - 1 <= spike["first"] < END, spike
    assert "the ranks' bytes are checked" in job.output
    in_turn = 2 + 160 // CHECK_EVERY  # after load, after the first step, and each interval; saves are among these
    assert sum(r["checks"] for r in records(job, "compared")) > in_turn, job.story()
    assert not job.incidents()
