"""A job of light ranks that only mark steps, and that is told when to end; for what the agent costs and how it does."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from job import HERE, STEADYRUN, Job

# Ours, without standbys: they come and go, and would be measured, too.
AGENT = (*STEADYRUN, "--ft-run-dir={run_dir}", "--ft-standby=off")


@contextlib.contextmanager
def paced_job(
    program: Sequence[str],
    ranks: int,
    name: str,
    keep: Path | None,
    rate: float = 20.0,
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[Job, subprocess.Popen[bytes]]]:
    """The job and its launcher *program*, once all *ranks* have started; *rate* is their steps a second.

    Raises:
        SystemExit: the job, told to end after the block, did not end well or has left something.
    """
    with Job({"BENCH_STEPS_PER_S": f"{rate:g}", **(env or {})}, keep, name.replace(" ", "_")) as job:
        control = job.folder / "control"
        control.mkdir()
        argv = [*program, "--standalone", f"--nproc-per-node={ranks}", str(HERE / "pace_rank.py")]
        launcher = job.start(argv, {"BENCH_CONTROL": str(control)})
        job.wait_for(lambda: len(job.events("start")) == ranks, 60, "all ranks")
        yield job, launcher
        (control / "finish").touch()
        codes = job.wait(90)
        if any(codes) or job.leftovers():
            raise SystemExit(f"{name} ended with {codes}, left {job.leftovers()}\n{job.output_tail()}")


def metrics_address(job: Job) -> str:
    """HOST:PORT of its first agent's metrics."""
    told = job.wait_for(lambda: [n for n in job.live() if n.get("metrics")], 60, "the address of the metrics")
    return str(told[0]["metrics"])
