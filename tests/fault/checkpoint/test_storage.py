"""Storage that is full, read-only, gone, forbidden or slow while a job trains.

Training goes on, the reason is said once, the failures are counted, earlier checkpoints stay as they are, and once the
storage is well again a later save is durable and right. Mounts need root; where they are not allowed, a test says so.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from exact_state import wrong_elements
from jobs import Job, JobStarter

from steadyrun.checkpoint.catalog import list_checkpoints

ROWS, EVERY, PACE_S = 64, 5, 0.05
LONGEST_STEP_S = 4.0  # on a loaded machine; a rank that waits for storage stands still for longer
OPTIONS = ["--standalone", "--nproc-per-node=2", "--ft-standby=off"]


# -- storage ---------------------------------------------------------------------------------------------------------
@dataclass
class Mounts:
    """Mounts of one test; the folder that checkpoints go to is below ``place``."""

    base: Path
    undo: list[list[str]] = field(default_factory=list)

    @property
    def place(self) -> Path:
        return self.base / "mounted"

    def run(self, *argv: str | Path, undo: list[str] | None = None) -> None:
        """Skips the test where this is not allowed."""
        try:
            done = subprocess.run([*map(str, argv)], capture_output=True, text=True, timeout=30, check=False)
        except FileNotFoundError:
            pytest.skip(f"{argv[0]} is not installed")
        if done.returncode:
            pytest.skip(f"cannot {' '.join(map(str, argv))} here: {done.stderr.strip()}")
        if undo is not None:
            self.undo.append(undo)

    def mount(self, *options: str | Path) -> Path:
        self.place.mkdir(exist_ok=True)
        self.run("mount", *options, self.place, undo=["umount", "-l", str(self.place)])
        return self.place

    def close(self) -> None:
        for argv in reversed(self.undo):
            subprocess.run(argv, capture_output=True, timeout=60, check=False)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    found = Mounts(tmp_path)
    try:
        yield found
    finally:
        found.close()


# -- what is asked of each -------------------------------------------------------------------------------------------
def train(start: JobStarter, root: Path) -> Job:
    """A job that has saved twice."""
    job = start("checkpointed.py", OPTIONS, [root, 1_000_000, PACE_S, EVERY], env={"ROWS": str(ROWS)})
    job.wait_for(lambda: len(settled(job, "durable")) >= 2, 90, "two durable saves")
    return job


def settled(job: Job, state: str, after_s: float = 0.0) -> list[dict[str, object]]:
    return [e for e in job.events("settled", rank=0, state=state) if float(e["at_s"]) > after_s]


def longest_step_s(job: Job, after_s: float) -> float:
    at_s = [after_s, *(float(e["at_s"]) for e in job.steps(rank=0) if float(e["at_s"]) > after_s)]
    return max(b - a for a, b in itertools.pairwise(at_s))


def failures(job: Job) -> dict[str, int]:
    """By reason, as the saver's metrics tell."""
    assert job.folder is not None
    for file in (job.folder / "live").glob("*.saver.json"):
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(file.read_text())["failures"])
    return {}


def check_complete(root: Path, least: int) -> None:
    """The newest complete checkpoint is of step *least* or newer, and every one of them is right."""
    complete = [c for c in list_checkpoints(root) if c.problem is None]
    assert complete
    assert complete[0].name.step >= least
    for checkpoint in complete:
        assert wrong_elements(checkpoint.path, checkpoint.name.step, ROWS, 2) == {}


def check_outage(
    job: Job, root: Path, hurt: Callable[[], None], heal: Callable[[], None], reason: str, words: str
) -> None:
    """Saves fail for *reason* between *hurt* and *heal*, and nothing else happens.

    Args:
        reason: in the saver's metrics.
        words: in the line that the user sees.
    """
    hurt_s = time.monotonic()
    durable = max(int(str(e["step"])) for e in settled(job, "durable"))
    hurt()
    job.wait_for(lambda: len(settled(job, "failed", hurt_s)) >= 2, 90, f"two saves fail: {reason}")
    job.wait_for_step(job.newest_step() + 20)
    job.wait_for(lambda: failures(job).get(reason, 0) >= 2, 30, f"the metrics count failures: {reason}")
    heal()
    healed_s = time.monotonic()
    job.wait_for(lambda: settled(job, "durable", healed_s), 90, "a save succeeds again")
    assert {e["attempt"] for e in job.events("start")} == {0}, job.story()
    assert longest_step_s(job, hurt_s) < LONGEST_STEP_S
    assert all(words in str(e["why"]) for e in settled(job, "failed", hurt_s)), settled(job, "failed", hurt_s)
    told = [line for line in job.output.splitlines() if words in line]
    assert len(told) == 1, told
    newest = max(int(str(e["step"])) for e in settled(job, "durable", healed_s))
    assert newest > durable
    job.send(15)
    job.wait(60)
    check_complete(root, newest)


def test_a_full_disk_costs_the_saves_that_do_not_fit(start: JobStarter, mounts: Mounts) -> None:
    root = mounts.mount("-t", "tmpfs", "-o", "size=16m", "tmpfs") / "checkpoints"
    filler = mounts.place / "filler"

    def fill() -> None:
        with filler.open("wb") as f, contextlib.suppress(OSError):
            while True:
                f.write(bytes(1 << 14))
                f.flush()

    check_outage(train(start, root), root, fill, filler.unlink, "full", "No space left on device")


def test_read_only_storage_costs_the_saves_meanwhile(
    start: JobStarter, mounts: Mounts, wait_until: Callable[..., object]
) -> None:
    root = mounts.mount("-t", "tmpfs", "-o", "size=64m", "tmpfs") / "checkpoints"

    def remount(mode: str) -> None:
        argv = ["mount", "-o", f"remount,{mode}", str(mounts.place)]  # busy while a file is being written
        wait_until(lambda: subprocess.run(argv, capture_output=True, check=False).returncode == 0, 30, str(argv))

    job = train(start, root)
    check_outage(job, root, lambda: remount("ro"), lambda: remount("rw"), "read_only", "Read-only file system")


def test_lost_permission_costs_the_saves_meanwhile(start: JobStarter, mounts: Mounts) -> None:
    root = mounts.base / "checkpoints"
    job = train(start, root)
    if os.geteuid() == 0:  # whom modes do not stop
        give = ["chattr", "-i", str(root)]
        check_outage(
            job,
            root,
            lambda: mounts.run("chattr", "+i", root, undo=give),
            lambda: mounts.run(*give),
            "permission",
            "Operation not permitted",
        )
    else:
        check_outage(job, root, lambda: root.chmod(0o555), lambda: root.chmod(0o755), "permission", "Permission denied")


def test_a_mount_that_vanishes_is_noticed_and_nothing_is_written_below_it(start: JobStarter, mounts: Mounts) -> None:
    real = mounts.base / "real"
    real.mkdir()
    root = mounts.mount("--bind", real) / "checkpoints"
    job = train(start, root)

    def again() -> None:
        assert list(mounts.place.iterdir()) == [], "checkpoints on the disk under the mount point"
        mounts.mount("--bind", real)

    check_outage(
        job, root, lambda: mounts.run("umount", "-l", mounts.place), again, "gone", "No such file or directory"
    )


@pytest.mark.deadline(400)
def test_storage_that_stands_still_for_10_s_does_not_stop_training(start: JobStarter, mounts: Mounts) -> None:
    image = mounts.base / "image"
    with image.open("wb") as f:
        f.truncate(64 << 20)
    mounts.run("mkfs.ext4", "-q", image)
    root = mounts.mount("-o", "loop", image) / "checkpoints"
    job = train(start, root)
    frozen_s = time.monotonic()
    mounts.run("fsfreeze", "-f", mounts.place, undo=["fsfreeze", "-u", str(mounts.place)])
    job.wait_for(lambda: time.monotonic() - frozen_s >= 10.0, 20, "ten seconds pass")
    assert settled(job, "durable", frozen_s + 2.0) == [], "it stands still"
    steps = [e for e in job.steps(rank=0) if float(e["at_s"]) > frozen_s]
    assert len(steps) > 20, job.story()
    assert longest_step_s(job, frozen_s) < LONGEST_STEP_S
    mounts.run("fsfreeze", "-u", mounts.place)
    thawed_s = time.monotonic()
    saved = job.wait_for(lambda: settled(job, "durable", thawed_s), 90, "a save succeeds again")
    assert {e["attempt"] for e in job.events("start")} == {0}, job.story()
    job.send(15)
    job.wait(60)
    check_complete(root, int(str(saved[0]["step"])))
