"""A machine that shows nothing: no root, no kernel log, no GPU, no InfiniBand, /sys read-only. The job runs."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import JobStarter

MISSING = ("kernel log: cannot read /dev/kmsg: permission denied", "GPUs: no NVIDIA driver", "RDMA ports: none")
ENABLED_BY = ("CAP_SYSLOG", "load it", "load the card's driver")
SEEN_AT = Path("/media/work")  # where bare.sh puts the job's folder


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("steps.py", (30, 0.05)), pytest.param("train.py", (30, 0.05), marks=pytest.mark.slow)],
)
def test_a_job_runs_and_says_once_what_is_not_watched(
    start: JobStarter, checkout: Path, tmp_path: Path, script: str, arguments: tuple[object, ...]
) -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv") or not can_mount():
        pytest.skip("only root can take rights away and mount; needs unshare and setpriv")
    if has_gpus_or_fabric():
        pytest.skip("this machine has GPUs or InfiniBand")
    closed = {p: folder for p in (sys.base_prefix, sys.prefix, str(checkout)) if (folder := closed_above(Path(p)))}
    env = {
        "CLOSED": "\n".join(sorted(set(closed.values()))),
        "PATHS": "\n".join(sorted(closed)),
        "EVENTS": str(SEEN_AT / "events"),
        "HOME": "/nonexistent",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    base = start.base / "bare"
    program = ["unshare", "-m", "sh", str(checkout / "tests/support/bare.sh"), str(base)]
    program += [sys.executable, "-m", "steadyrun.launcher", f"--ft-run-dir={SEEN_AT}/runs"]
    job = start(script, ["--standalone", "--nproc-per-node=2"], arguments, env=env, program=program, name="bare")
    assert job.wait(120) == 0, job.story()
    assert job.newest_step() == 29
    assert {r["rank"] for r in job.events("start")} == {0, 1}
    assert os.stat(job.folder or base).st_uid == 65534
    lines = [line for line in job.output.splitlines() if "not watched on" in line]
    assert len(lines) == 1, job.output
    assert all(words in lines[0] for words in (*MISSING, *ENABLED_BY)), lines[0]
    assert lines[0].count("; ") >= len(MISSING) - 1
    assert "Traceback" not in job.output
    (told,) = job.journal("device_sources")
    assert told["kernel_log"] == "none"
    assert len(told["missing"]) == len(MISSING)


def closed_above(path: Path) -> str:
    """The outermost folder above *path* that others than its owner may not enter; empty where there is none."""
    parents = reversed(path.resolve().parents)
    return next((str(p) for p in parents if not p.stat().st_mode & stat.S_IXOTH), "")


def can_mount() -> bool:
    """A container's root often cannot."""
    try:
        tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tried", "/media"], capture_output=True)
    except OSError:
        return False
    return tried.returncode == 0


def has_gpus_or_fabric() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/sys/class/infiniband").exists()
