"""Real jobs for tests: start the installed ``steadyrun``, read what its ranks and run folder say, look for leftovers.

A script in a job tells what it does by appending JSON lines to ``$EVENTS/rank_R.jsonl``; see tests/fault/scripts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from steadyrun.testing.faults import clean_up

T = TypeVar("T")

POLL_S = 0.05
SCRIPTS = Path(__file__).resolve().parent.parent / "fault" / "scripts"


def command(name: str) -> str:
    """Path of an installed console script, of the environment that runs the tests."""
    path = Path(sys.executable).with_name(name)
    found = str(path) if path.exists() else shutil.which(name)
    assert found, f"{name} is not installed beside {sys.executable}"
    return found


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listened on a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a file that may still be growing, or not be there yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def is_alive(pid: int) -> bool:
    """The process exists and has not ended (a zombie has)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def state_of(pid: int) -> str:
    """The state letter of /proc, or an empty text for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def processes_with(variable: str) -> dict[int, str]:
    """Live processes that have ``NAME=value`` in their environment: pid -> command line."""
    found: dict[int, str] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                base = Path(entry.path)
                if variable.encode() in (base / "environ").read_bytes().split(b"\0") and is_alive(int(entry.name)):
                    line = (base / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    found[int(entry.name)] = line
    return found


def listening() -> dict[str, int]:
    """All sockets that listen for TCP on this machine: inode -> port."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == "0A":
                    found[parts[9]] = int(parts[1].rpartition(":")[2], 16)
    return found


def listeners(pids: Sequence[int]) -> dict[str, int]:
    """Sockets on which these processes listen for TCP: inode -> port."""
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(fd.path)
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    return {inode: port for inode, port in listening().items() if inode in inodes}


def open_ports(pids: Sequence[int]) -> frozenset[int]:
    """TCP ports that these processes listen on."""
    return frozenset(listeners(pids).values())


@dataclass(frozen=True)
class Incident:
    """One incident of a finished or running job."""

    folder: Path
    verdict: Mapping[str, Any]

    @property
    def cls(self) -> str:
        """Class of the most important finding, or an empty text."""
        return str(self.verdict["findings"][0]["class"]) if self.verdict["findings"] else ""

    @property
    def ranks(self) -> list[int]:
        return list(self.verdict["findings"][0]["ranks"]) if self.verdict["findings"] else []

    def line(self) -> str:
        """One line for a person."""
        v = self.verdict
        findings = "; ".join(f"{f['class']} {f['ranks']} {f['summary']}" for f in v["findings"])
        return f"attempt {v['attempt']} {v['action']}: {findings} | victims {v['victims']} | {v.get('reason')}"


class Job:
    """One launcher process: its output, its run folder and what its ranks tell."""

    def __init__(
        self, process: subprocess.Popen[bytes], output: Path, events_dir: Path, run_dir: Path, tag: str
    ) -> None:
        self.process = process
        self.output_path = output
        self.events_dir = events_dir
        self.run_dir = run_dir
        self.tag = tag
        self.known_listeners: dict[str, int] = {}  # by inode: another job may be given the same port

    # -- what it says ------------------------------------------------------------------------------------------------
    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def events(self, kind: str | None = None, **wanted: Any) -> list[dict[str, Any]]:
        """What the ranks told, in order of time."""
        found = [e for file in self.events_dir.glob("rank_*.jsonl") for e in json_lines(file)]
        found = [e for e in found if kind in (None, e["kind"]) and all(e.get(k) == v for k, v in wanted.items())]
        return sorted(found, key=lambda e: float(e["at_s"]))

    def steps(self, **wanted: Any) -> list[dict[str, Any]]:
        return self.events("step", **wanted)

    def newest_step(self, rank: int = 0) -> int:
        """-1 before the first."""
        return max((int(e["step"]) for e in self.steps(rank=rank)), default=-1)

    @property
    def folder(self) -> Path | None:
        """The run folder, once there is one."""
        latest = self.run_dir / "latest"
        return latest.resolve() if latest.exists() else None

    def journal(self, type_: str | None = None, **wanted: Any) -> list[dict[str, Any]]:
        """Records of all nodes' journals of this job's run folder, in order of time."""
        folder = self.folder
        if folder is None:
            return []
        records = [r for file in (folder / "journal").glob("*.jsonl") for r in json_lines(file)]
        records = [r for r in records if type_ in (None, r["type"]) and all(r.get(k) == v for k, v in wanted.items())]
        return sorted(records, key=lambda r: float(r["at_s"]))

    def incidents(self) -> list[Incident]:
        folder = self.folder
        if folder is None:
            return []
        files = sorted((folder / "incidents").glob("*/verdict.json"))
        return [Incident(f.parent, json.loads(f.read_text())) for f in files]

    def struck(self) -> list[dict[str, Any]]:
        """Faults that struck, as the injector noted them."""
        folder = self.folder
        if folder is None:
            return []
        records = [r for file in folder.glob("attempts/*/rank_*/faults.jsonl") for r in json_lines(file)]
        return sorted(records, key=lambda r: float(r["at_s"]))

    def pids(self, attempt: int | None = None) -> dict[int, int]:
        """Rank -> pid of the newest attempt that told a pid, or of the given one."""
        started = self.events("start")
        if attempt is None and started:
            attempt = max(int(e["attempt"]) for e in started)
        return {int(e["rank"]): int(e["pid"]) for e in started if e["attempt"] == attempt}

    def story(self) -> str:
        """What is known about this job, for the message of a failed test."""
        lines = [f"exit code {self.process.poll()}", "--- output (end)"]
        lines += self.output.splitlines()[-60:]
        lines.append("--- journal (end)")
        skip = ("steps", "sections", "probe")
        lines += [json.dumps(r) for r in self.journal() if r["type"] not in skip][-30:]
        lines.append("--- incidents")
        lines += [i.line() for i in self.incidents()]
        lines.append("--- newest events")
        lines += [json.dumps(e) for e in self.events()[-8:]]
        return "\n".join(lines)

    # -- waiting -----------------------------------------------------------------------------------------------------
    def wait_for(self, predicate: Callable[[], T], deadline_s: float, what: str) -> T:
        """The first true value of *predicate*; fails at the deadline, and at once when the launcher has ended."""
        limit_s = time.monotonic() + deadline_s
        while not (value := predicate()):
            ended = self.process.poll() is not None
            if ended and not (value := predicate()):
                raise AssertionError(f"the job ended before: {what}\n{self.story()}")
            if ended:
                break
            if time.monotonic() > limit_s:
                raise AssertionError(f"not within {deadline_s:g} s: {what}\n{self.story()}")
            select.select([], [], [], POLL_S)
        return value

    def wait_for_step(
        self, step: int, ranks: Sequence[int] = (0,), attempt: int | None = None, deadline_s: float = 90
    ) -> None:
        """All *ranks* have done *step* (in *attempt*)."""
        wanted = {} if attempt is None else {"attempt": attempt}

        def reached() -> bool:
            return all(any(e["step"] >= step for e in self.steps(rank=r, **wanted)) for r in ranks)

        self.wait_for(reached, deadline_s, f"ranks {list(ranks)} do step {step} in attempt {attempt}")

    def wait_for_incident(self, number: int, deadline_s: float = 60) -> Incident:
        """The *number*-th incident's verdict (1 is the first)."""
        found = self.wait_for(lambda: self.incidents()[number - 1 :], deadline_s, f"incident {number}")
        return found[0]

    def wait(self, deadline_s: float) -> int:
        """The exit code; the run's ports are remembered on the way for the check of leftovers."""
        limit_s = time.monotonic() + deadline_s
        while self.process.poll() is None:
            if time.monotonic() > limit_s:
                raise AssertionError(f"the job had not ended after {deadline_s:g} s\n{self.story()}")
            self.known_listeners |= listeners([self.process.pid])
            select.select([], [], [], POLL_S)
        return int(self.process.returncode)

    # -- acting ------------------------------------------------------------------------------------------------------
    def send(self, signum: int) -> None:
        """To the launcher alone."""
        os.kill(self.process.pid, signum)

    def end(self) -> None:
        """Whatever happened: nothing of this job goes on. Not a test of anything."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGCONT)
                os.kill(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in processes_with(self.tag):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.folder is not None:
            clean_up(self.folder)  # the cgroups of injected memory shortages

    def left_behind(self, patience_s: float = 10.0) -> list[str]:
        """Processes, ports and /dev/shm files of this ended job that are still there after *patience_s*."""
        limit_s = time.monotonic() + patience_s
        while (left := self._left()) and time.monotonic() < limit_s:
            select.select([], [], [], POLL_S)
        return left

    def _left(self) -> list[str]:
        left = [f"process {pid}: {line}" for pid, line in processes_with(self.tag).items()]
        told = self.struck()
        left += [f"process {p} of fault {r['name']}" for r in told for p in r.get("pids", ()) if is_alive(int(p))]
        left += [f"file {f}" for r in told for f in r.get("files", ()) if Path(f).exists()]
        owners = {str(p) for e in self.events("start") for p in (e["pid"],)} | {str(self.process.pid)}
        with contextlib.suppress(OSError):
            left += [f"file {f}" for f in os.listdir("/dev/shm") if any(f"_{o}_" in f or f"-{o}-" in f for o in owners)]
        still = listening()
        left += [f"port {port}" for inode, port in self.known_listeners.items() if inode in still]
        return left


@dataclass
class JobStarter:
    """Starts jobs below one folder and remembers them; ``close`` ends what still runs."""

    base: Path
    jobs: list[Job] = field(default_factory=list)

    def __call__(
        self,
        script: str | Path,
        options: Sequence[str] = (),
        script_args: Sequence[object] = (),
        *,
        faults: str = "",
        env: Mapping[str, str] | None = None,
        program: Sequence[str] | None = None,
        run_dir: Path | None = None,
        shared: Job | None = None,
        ignore: Sequence[int] = (),
        name: str = "",
    ) -> Job:
        """Start ``steadyrun <options> script <script_args>``.

        Args:
            script: a name in tests/fault/scripts, or a path.
            program: another launcher than steadyrun.
            shared: a job of the same run (another agent): its events folder is used too.
            ignore: signals that are ignored in the launcher from its start, as nohup does.
        """
        folder = self.base / (name or f"job{len(self.jobs)}")
        folder.mkdir(parents=True)
        events = shared.events_dir if shared else folder / "events"
        events.mkdir(exist_ok=True)
        run_dir = run_dir or folder / "runs"
        path = Path(script) if Path(script).is_absolute() else SCRIPTS / script
        tag = f"STEADYRUN_TEST_JOB={folder}"
        own = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "EVENTS": str(events),
            "STEADYRUN_TEST_JOB": str(folder),
            **({"STEADYRUN_FAULTS": faults} if faults else {}),
            **(env or {}),
        }
        start = list(program) if program else [command("steadyrun"), f"--ft-run-dir={run_dir}"]
        argv = [*start, *options, str(path), *map(str, script_args)]

        def before_exec() -> None:
            for signum in ignore:
                signal.signal(signum, signal.SIG_IGN)

        output = folder / "output.txt"
        with output.open("wb") as f:
            process = subprocess.Popen(
                argv,
                env=own,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=f,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=before_exec if ignore else None,
            )
        job = Job(process, output, events, run_dir, tag)
        self.jobs.append(job)
        return job

    def close(self) -> None:
        for job in self.jobs:
            job.end()
