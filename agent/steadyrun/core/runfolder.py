"""Where a run keeps what. Every path of the run folder is made here, and nowhere else."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RunFolder", "find_run", "list_runs"]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside ``<run-dir>/<UTC time>-<run id>/``; see design section 13."""

    root: Path

    @property
    def journal_dir(self) -> Path:
        return self.root / "journal"

    def journal(self, node: str) -> Path:
        return self.journal_dir / f"{node}.jsonl"

    def rank_dir(self, attempt: int, rank: int) -> Path:
        return self.root / "attempts" / str(attempt) / f"rank_{rank}"

    def stacks(self, attempt: int, rank: int) -> Path:
        """Where the rank's faulthandler writes; appended to by each dump."""
        return self.rank_dir(attempt, rank) / "stacks.txt"

    def exception(self, attempt: int, rank: int) -> Path:
        return self.rank_dir(attempt, rank) / "exception.json"

    def socket(self, attempt: int, rank: int) -> Path:
        """The rank's evidence socket; may be too long for AF_UNIX, then the rank says so and goes without."""
        return self.rank_dir(attempt, rank) / "evidence.sock"

    @property
    def incidents_dir(self) -> Path:
        return self.root / "incidents"

    def incident(self, number: int) -> Path:
        return self.incidents_dir / f"{number:04d}"

    @property
    def timeouts(self) -> Path:
        return self.root / "timeouts.json"

    @property
    def section_statistics(self) -> Path:
        """What the run has seen of its sections so far; by the agent of group rank 0."""
        return self.state / "section_statistics.json"

    def calibration(self, configuration: str) -> Path:
        """What all runs beside this one with the same command line have seen."""
        return self.root.parent / "calibration" / f"{configuration}.json"

    def kernel_position(self, host: str) -> Path:
        """How far the kernel log of a machine was read, by this run and those beside it."""
        return self.root.parent / "kernel_log" / f"{host}.json"

    @property
    def state(self) -> Path:
        """``live.json``: what steadyctl needs to look at a live run (board paths, pids), one entry per node."""
        return self.root / "live"

    @property
    def node_scores(self) -> Path:
        """Which nodes faults were blamed on, in this run and in those before it."""
        return self.root / "state" / "node_scores.json"

    @classmethod
    def create(cls, run_dir: Path, run_id: str, now_unix_s: float | None = None) -> tuple[RunFolder, str]:
        """A new run folder and the ``latest`` link beside it.

        Agents of one run on one machine share the folder when they are given the same ``--ft-run-dir`` and start in the
        same second; otherwise each has its own.

        Returns:
            The folder, and a message for the user: empty, or why a temporary folder was taken instead.
        """
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_unix_s if now_unix_s is not None else time.time()))
        safe_id = "".join(c if c.isalnum() or c in "-_." else "_" for c in run_id)[:64] or "run"
        message = ""
        try:
            root = run_dir / f"{stamp}-{safe_id}"
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(root, os.W_OK | os.X_OK):
                raise PermissionError(13, "not writable")
        except OSError as e:
            base = Path(tempfile.mkdtemp(prefix="steadyrun-"))
            message = (
                f"cannot write the run folder in {run_dir}: {e.strerror or e}; "
                f"journal and incidents go to {base} (choose a place with --ft-run-dir)"
            )
            run_dir = base
            root = base / f"{stamp}-{safe_id}"
            root.mkdir(mode=0o700)
        folder = cls(root)
        folder.journal_dir.mkdir(exist_ok=True, mode=0o700)
        folder.incidents_dir.mkdir(exist_ok=True, mode=0o700)
        folder.state.mkdir(exist_ok=True, mode=0o700)
        link = run_dir / "latest"
        temporary = run_dir / f".latest-{os.getpid()}"
        try:
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(root.name)
            temporary.replace(link)  # atomic: a reader never finds the link missing
        except OSError:
            temporary.unlink(missing_ok=True)
        return folder, message


def list_runs(run_dir: Path) -> list[Path]:
    """Run folders in *run_dir*, oldest first (names start with the UTC time)."""
    if not run_dir.is_dir():
        return []
    return sorted(p for p in run_dir.iterdir() if p.is_dir() and not p.is_symlink() and (p / "journal").is_dir())


def find_run(where: Path) -> RunFolder:
    """The run folder *where* means: itself, its ``latest``, or the newest in it.

    Raises:
        FileNotFoundError: there is none; the text says what was looked at.
    """
    if (where / "journal").is_dir():
        return RunFolder(where.resolve())
    latest = where / "latest"
    if (latest / "journal").is_dir():
        return RunFolder(latest.resolve())
    runs = list_runs(where)
    if runs:
        return RunFolder(runs[-1])
    raise FileNotFoundError(
        f"no run in {where}: neither a run folder nor a folder of them; give the folder that --ft-run-dir named"
    )
