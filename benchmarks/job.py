"""One job of a benchmark: launcher processes, what their ranks tell, and that nothing of it stays.

Ranks append JSON lines to the file that ``BENCH_EVENTS`` names. Their times are CLOCK_MONOTONIC, which is one clock for
all processes of a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

HERE = Path(__file__).resolve().parent
STEADYRUN = (sys.executable, "-m", "steadyrun.launcher")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
NVRX = (sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher")


class DeadlineError(Exception):
    """What was waited for did not come in time, or the job ended before."""


class Job:
    """Launchers started for one measurement; a context manager that ends and removes everything of theirs."""

    def __init__(self, env: Mapping[str, str] | None = None, keep: Path | None = None, name: str = "job") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="steadyrun-bench-"))
        self.events_file = self.folder / "events.jsonl"
        self.run_dirs: list[Path] = []
        self.launchers: list[subprocess.Popen[bytes]] = []
        self._keep, self._name = keep, name
        self.mark = f"STEADYRUN_BENCH_JOB={uuid.uuid4().hex}"  # in the environment of all its processes
        variable, _, value = self.mark.partition("=")
        own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "BENCH_EVENTS": str(self.events_file), variable: value}
        self._env = {**os.environ, **own, **(env or {})}

    def start(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """One launcher. ``{run_dir}`` in *argv* becomes a folder of its own."""
        run_dir = self.folder / f"runs{len(self.launchers)}"
        self.run_dirs.append(run_dir)
        with (self.folder / f"output{len(self.launchers)}.txt").open("wb") as output:
            process = subprocess.Popen(
                [a.replace("{run_dir}", str(run_dir)) for a in argv],
                env={**self._env, **(env or {})},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.launchers.append(process)
        return process

    # -- what it tells -----------------------------------------------------------------------------------------------
    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """In order of time; complete lines only."""
        found = [e for e in json_lines(self.events_file) if kind in (None, e["kind"])]
        return sorted(found, key=lambda e: float(e["at_s"]))

    def journal(self, *types: str) -> list[dict[str, Any]]:
        """Records of all agents of a steadyrun job, in order of time."""
        files = [f for d in self.run_dirs for f in d.glob("latest/journal/*.jsonl")]
        return sorted((r for f in files for r in json_lines(f) if r["type"] in types), key=lambda r: float(r["at_s"]))

    def live(self) -> list[dict[str, Any]]:
        """What each steadyrun agent last said of itself."""
        found = []
        for file in (f for d in self.run_dirs for f in d.glob("latest/live/*.json")):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(file.read_text()))
        return found

    def output_tail(self, lines: int = 15) -> str:
        texts = [f.read_text(errors="replace") for f in sorted(self.folder.glob("output*.txt"))]
        return "\n".join("\n".join(t.splitlines()[-lines:]) for t in texts)

    def wait_for(self, predicate: Callable[[], T], deadline_s: float, what: str, poll_s: float = 0.02) -> T:
        """The first true value of *predicate*.

        Raises:
            DeadlineError: after *deadline_s* seconds, or when a launcher has ended.
        """
        limit_s = time.monotonic() + deadline_s
        while not (value := predicate()):
            if any(p.poll() is not None for p in self.launchers) and not (value := predicate()):
                raise DeadlineError(f"a launcher ended before: {what}")
            if time.monotonic() > limit_s:
                raise DeadlineError(f"not within {deadline_s:g} s: {what}")
            time.sleep(poll_s)
        return value

    def wait(self, deadline_s: float) -> list[int]:
        """Exit codes of all launchers.

        Raises:
            DeadlineError: one has not ended.
        """
        limit_s = time.monotonic() + deadline_s
        try:
            return [p.wait(max(limit_s - time.monotonic(), 0.01)) for p in self.launchers]
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"the job had not ended after {deadline_s:g} s") from None

    # -- the end -----------------------------------------------------------------------------------------------------
    def processes(self) -> list[int]:
        """Live processes of this job, found by a mark in their environment, whoever their parent is."""
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if (
                        self.mark.encode() in Path(entry.path, "environ").read_bytes()
                        and state_of(int(entry.name)) not in "ZX"
                    ):
                        found.append(int(entry.name))
        return found

    def leftovers(self, patience_s: float = 5.0) -> list[str]:
        """Processes that an ended job has left, after *patience_s* for them to go."""
        limit_s = time.monotonic() + patience_s
        while (left := self.processes()) and time.monotonic() < limit_s:
            time.sleep(0.05)
        return [f"process {p}" for p in left]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGCONT)
                launcher.terminate()
        limit_s = time.monotonic() + 5.0
        while any(p.poll() is None for p in self.launchers) and time.monotonic() < limit_s:
            time.sleep(0.05)
        limit_s = time.monotonic() + 10.0
        while (left := self.processes()) and time.monotonic() < limit_s:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for launcher in self.launchers:
            launcher.wait()
        if self._keep is not None:
            shutil.copytree(
                self.folder, self._keep / f"{self._name}-{self.folder.name[-8:]}", symlinks=True, ignore=_ignore_special
            )
        shutil.rmtree(self.folder, ignore_errors=True)


def _ignore_special(folder: str, names: list[str]) -> list[str]:
    """Sockets and FIFOs cannot be copied."""
    return [n for n in names if not (Path(folder, n).is_file() or Path(folder, n).is_dir())]


def json_lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def state_of(pid: int) -> str:
    """The state letter of /proc; ``X`` for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
