"""Everything that can be learned about a node's ranks in the moment of an incident, before anything is killed.

One thread per rank, so that one that answers nothing takes no time from the others; each source has its own limit and
the whole a deadline. What was taken until then counts, what could not be had is said with what would enable it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from steadyrun.collectors.logs import tail_of_files
from steadyrun.collectors.oom import OomWatch
from steadyrun.collectors.process import ProcessReader
from steadyrun.collectors.stacks import StackDump, StackRequest, find_py_spy, last_dump, py_spy_stacks
from steadyrun.core.board import SlotView
from steadyrun.core.flight import RankFlight
from steadyrun.core.frames import main_stack, same_place
from steadyrun.core.records import (
    ExceptionRecord,
    ExitRecord,
    RankEvidence,
    Suspicion,
    ThreadStack,
    exception_from_json,
    to_json,
)
from steadyrun.core.sockets import reachable

__all__ = ["Contribution", "EvidenceCollector", "EvidenceSource", "Target", "ask", "connect_unix", "render_stacks"]


@dataclass(frozen=True, slots=True)
class _Pace:
    """Limits per source, and how long a late rank is looked at for signs of movement, seconds.

    ``source_s`` is for each of the further sources, whatever limit they have themselves.
    """

    socket_s: float
    source_s: float
    stacks_s: float
    py_spy_s: float
    watch_s: float


# Where a rank has died the others' stacks are of less use, and they are on their way out: do not hold up the restart.
AFTER_A_DEATH: Final = _Pace(socket_s=0.0, source_s=0.35, stacks_s=0.5, py_spy_s=2.0, watch_s=0.0)
IN_A_HANG: Final = _Pace(socket_s=0.3, source_s=5.0, stacks_s=2.0, py_spy_s=5.0, watch_s=0.2)
BLOCKED_STACKS_LIMIT_S: Final = 0.3  # state D: the handler runs when the system call returns, most likely not now
EXIT_TOLD_LIMIT_S: Final = 1.0  # for all ranks that ended meanwhile
LOG_LINES: Final = 50
_ANSWER_BYTES: Final = 1 << 20
_EXCEPTION_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """One rank to ask.

    Attributes:
        rank_dir: its folder of this attempt (stacks.txt, evidence.sock, exception.json).
        view: its slot of the board, of this incarnation; None when it never attached.
        exit: how it ended, None while it lives.
        log_files: of its standard output and error, in any order.
        stack_unchanged, cpu_share: from a probe that came before.
    """

    rank: int
    local_rank: int
    pid: int
    attempt: int
    view: SlotView | None
    exit: ExitRecord | None
    rank_dir: Path
    log_files: tuple[Path, ...] = ()
    suspicion: Suspicion | None = None
    stack_unchanged: bool | None = None
    cpu_share: float | None = None
    gpu: str | None = None


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a further source adds: files it wrote (names in the incident's folder) and what it could not get."""

    flight: RankFlight | None = None
    files: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class EvidenceSource(Protocol):
    """A further source, asked once per rank after the socket and before the stacks; the flight recorder is one."""

    @property
    def limit_s(self) -> float:
        """Longest time for one rank."""
        ...

    def collect(self, target: Target, folder: Path, deadline_s: float) -> Contribution:
        """Write what there is into *folder*; return by *deadline_s* (CLOCK_MONOTONIC). Called from several threads."""
        ...


class _Draft:
    """What is known of one rank so far. Fields are replaced, never changed, so that another thread may take a copy."""

    def __init__(self, target: Target, node: str, folder: Path, pace: _Pace) -> None:
        view = target.view
        self.pace = pace
        self._folder = folder
        self.target = target
        self.evidence = RankEvidence(
            rank=target.rank,
            local_rank=target.local_rank,
            node=node,
            pid=target.pid,
            attempt=target.attempt,
            step=view.step if view is not None else None,
            step_at_s=view.step_at_s if view is not None else None,
            attached=view is not None and view.attached_s is not None,
            finished=view is not None and view.finished_s is not None,
            sections=view.sections if view is not None else (),
            exit=target.exit,
            suspicion=target.suspicion,
            stack_unchanged=target.stack_unchanged,
            cpu_share=target.cpu_share,
            gpu=target.gpu,
        )

    def put(self, **fields: Any) -> None:
        self.evidence = replace(self.evidence, **fields)

    def lacks(self, text: str) -> None:
        if text not in self.evidence.missing:
            self.put(missing=(*self.evidence.missing, text))

    def write(self, kind: str, text: str) -> None:
        """``rank_R.<kind>`` in the incident's folder, readable by the owner only."""
        name = f"rank_{self.target.rank}.{kind}"
        try:
            fd = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8", errors="replace") as f:
                f.write(text)
        except OSError as e:
            self.lacks(f"{kind}: cannot write into the incident's folder: {e.strerror}")
            return
        self.add_file(name)

    def add_file(self, name: str) -> None:
        path = f"incidents/{self._folder.name}/{name}"
        if path not in self.evidence.files:
            self.put(files=(*self.evidence.files, path))


@dataclass(slots=True)
class EvidenceCollector:
    """Collects for one node.

    Attributes:
        oom: out-of-memory counters, taken anew by ``begin_attempt``.
        py_spy: the program, or None where it is not installed.
        sources: further sources, in this order.
    """

    node: str
    oom: OomWatch = field(default_factory=OomWatch)
    py_spy: str | None = field(default_factory=find_py_spy)
    process: ProcessReader = field(default_factory=ProcessReader)
    sources: tuple[EvidenceSource, ...] = ()

    def begin_attempt(self) -> None:
        """What the counters say now is not this attempt's."""
        self.oom.rebase()

    def observe(self, pids: Sequence[int]) -> None:
        """Remember what is gone with a process: its memory group. Cheap; once after the start."""
        self.oom.observe(pids)

    def close(self) -> None:
        self.oom.close()

    def start(
        self,
        targets: Sequence[Target],
        folder: Path,
        stack_signal: int,
        limit_s: float,
        done: Callable[[tuple[RankEvidence, ...]], None],
        exit_of: Callable[[int], ExitRecord | None] | None = None,
    ) -> None:
        """Collect in a thread and call *done* from it, after about *limit_s* at the latest and in any case."""
        threading.Thread(
            target=lambda: done(self.collect(tuple(targets), folder, stack_signal, limit_s, exit_of)),
            name="steadyrun-evidence",
            daemon=True,
        ).start()

    def collect(
        self,
        targets: Sequence[Target],
        folder: Path,
        stack_signal: int,
        limit_s: float,
        exit_of: Callable[[int], ExitRecord | None] | None = None,
    ) -> tuple[RankEvidence, ...]:
        """The evidence of all *targets*, in their order; waits at most about *limit_s*, raises nothing.

        Args:
            stack_signal: makes a rank's faulthandler write its stacks.
            exit_of: asked at the end for ranks that lived at the start: one that died of the incident itself has left
                its exception and last words by then.
        """
        deadline_s = time.monotonic() + limit_s
        pace = AFTER_A_DEATH if any(t.exit is not None for t in targets) else IN_A_HANG
        drafts = [_Draft(t, self.node, folder, pace) for t in targets]
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as e:
            for draft in drafts:
                draft.lacks(f"evidence files: cannot create {folder}: {e.strerror}")
        threads = [
            threading.Thread(
                target=self._collect_rank,
                args=(d, stack_signal, deadline_s),
                name="steadyrun-evidence-rank",
                daemon=True,
            )
            for d in drafts
        ]
        for thread in threads:
            thread.start()
        for thread, draft in zip(threads, drafts, strict=True):
            thread.join(max(deadline_s - time.monotonic(), 0.0))
            if thread.is_alive():
                draft.lacks(f"collection was not finished in {limit_s:g} s")
        until_s = time.monotonic() + EXIT_TOLD_LIMIT_S
        for draft in drafts:
            if exit_of is not None and draft.target.exit is None:
                self._ended_meanwhile(draft, self._exit_of(draft, exit_of, until_s))
        return tuple(d.evidence for d in drafts)

    def _exit_of(self, draft: _Draft, told: Callable[[int], ExitRecord | None], until_s: float) -> ExitRecord | None:
        """What is *told* of its end; waited for where the process is gone, as whoever reaps it may not have run yet."""
        facts = draft.evidence.process
        while (exit_ := told(draft.target.rank)) is None and time.monotonic() < until_s:
            if (facts is not None and facts.dead_main) or self.process.state(draft.target.pid) not in (None, "Z", "X"):
                break
            time.sleep(0.01)
        return exit_

    def _collect_rank(self, draft: _Draft, stack_signal: int, deadline_s: float) -> None:
        steps: list[tuple[str, Callable[[_Draft, float], None]]] = [
            ("exception", self._exception),
            ("sections", self._sections),
            *((type(s).__name__, self._from(s)) for s in self.sources),
            ("stacks", lambda d, until_s: self._stacks(d, stack_signal, until_s)),
            ("process", self._process_facts),
            ("movement", lambda d, until_s: self._movement(d, stack_signal, until_s)),
            ("stacks", self._py_spy),
            ("log", self._log_tail),
            ("out of memory", self._oom),
        ]
        for name, step in steps:
            _attempt(name, step, draft, deadline_s)

    def _ended_meanwhile(self, draft: _Draft, exit_: ExitRecord | None) -> None:
        if exit_ is None:
            return
        draft.put(exit=exit_)
        draft.target = replace(draft.target, exit=exit_)
        steps: list[tuple[str, Callable[[_Draft, float], None]]] = [("exception", self._exception)]
        if draft.evidence.flight is None:  # it may have left dumps, too
            steps += ((type(s).__name__, self._from(s)) for s in self.sources)
        steps += (("log", self._log_tail), ("out of memory", self._oom))
        for name, step in steps:
            _attempt(name, step, draft, time.monotonic() + 1.0)

    # -- sources -----------------------------------------------------------------------------------------------------
    def _exception(self, draft: _Draft, deadline_s: float) -> None:
        record, text = read_exception(draft.target.rank_dir / "exception.json")
        if record is not None:
            draft.put(exception=record)
            draft.write("exception.json", text)
        elif text:
            draft.lacks(f"exception: {text}")

    def _sections(self, draft: _Draft, deadline_s: float) -> None:
        target = draft.target
        answer: Mapping[str, Any] | None = None
        limit_s = min(draft.pace.socket_s, deadline_s - time.monotonic())
        if target.exit is None and limit_s > 0:
            answer, why = ask(target.rank_dir / "evidence.sock", {"cmd": "sections"}, limit_s)
            if why and target.view is not None and target.view.steps_done > 0:
                draft.lacks(f"evidence socket: {why}")
        if target.view is not None or answer is not None:
            draft.write("sections.json", json.dumps({"board": to_json(target.view), "rank": answer}, indent=1))

    def _from(self, source: EvidenceSource) -> Callable[[_Draft, float], None]:
        def collect(draft: _Draft, deadline_s: float) -> None:
            own_s = min(time.monotonic() + min(source.limit_s, draft.pace.source_s), deadline_s)
            added = source.collect(draft.target, draft._folder, own_s)
            if added.flight is not None:
                draft.put(flight=added.flight)
            for name in added.files:
                draft.add_file(name)
            for text in added.missing:
                draft.lacks(text)

        return collect

    def _stacks(self, draft: _Draft, stack_signal: int, deadline_s: float) -> None:
        target = draft.target
        path = target.rank_dir / "stacks.txt"
        if target.exit is not None:
            dump = last_dump(path)
            if dump is not None and dump.fatal:
                self._keep_stacks(draft, dump.stacks, dump)
            return
        state = self.process.state(target.pid)
        if state is None or state in "ZX":
            draft.lacks("stacks: the process has ended")
            return
        if state in "Tt":
            draft.lacks(f"stacks: the process is stopped (state {state}) and can run nothing; it was left so")
            return
        if not self.process.catches(target.pid, stack_signal):
            return  # py-spy's turn, which says what is missing if it cannot
        limit_s = BLOCKED_STACKS_LIMIT_S if state == "D" else draft.pace.stacks_s
        request = StackRequest(target.pid, stack_signal, path)
        if request.send():
            until_s = min(time.monotonic() + limit_s, deadline_s)
            dump = request.wait(until_s, is_gone=lambda: self.process.state(target.pid) in (None, "Z", "X"))
            if dump is not None and dump.stacks:
                self._keep_stacks(draft, dump.stacks, dump)
        if request.error:
            draft.lacks(f"stacks by faulthandler: {request.error}")

    def _py_spy(self, draft: _Draft, deadline_s: float) -> None:
        target = draft.target
        if target.exit is not None or draft.evidence.stacks:
            return
        state = self.process.state(target.pid)
        if state is None or state in "TtDZX":
            if state == "D":
                draft.lacks("stacks: the process is in an uninterruptible system call (state D)")
            return
        if self.py_spy is None:
            draft.lacks(
                "stacks: no handler in the process and py-spy is not installed (pip install 'steadyrun[stacks]')"
            )
            return
        limit_s = min(draft.pace.py_spy_s, deadline_s - time.monotonic())
        if limit_s <= 0:
            draft.lacks("stacks: no time was left for py-spy")
            return
        stacks, why = py_spy_stacks(self.py_spy, target.pid, limit_s)
        if stacks:
            self._keep_stacks(draft, stacks, None)
        else:
            draft.lacks(f"stacks: {why}")

    @staticmethod
    def _keep_stacks(draft: _Draft, stacks: tuple[ThreadStack, ...], dump: StackDump | None) -> None:
        draft.put(stacks=stacks)
        head = f"Fatal Python error: {dump.fatal}\n\n" if dump is not None and dump.fatal else ""
        native = "\nC stack\n" + "".join(f"  {n}\n" for n in dump.native) if dump is not None and dump.native else ""
        draft.write("stacks.txt", head + render_stacks(stacks) + native)

    def _process_facts(self, draft: _Draft, deadline_s: float) -> None:
        if draft.target.exit is not None:
            return
        facts = self.process.facts(draft.target.pid)
        if facts is None:
            draft.lacks("process: it has ended")
            return
        draft.put(process=facts)
        draft.write("proc.json", json.dumps(to_json(facts), indent=1))

    def _movement(self, draft: _Draft, stack_signal: int, deadline_s: float) -> None:
        """CPU share and a second look at the main stack, where no probe came before (a given limit acts alone).

        So short a look proves movement, never the lack of it: an unchanged stack stays unknown.
        """
        target, main = draft.target, main_stack(draft.evidence.stacks)
        watch_s = min(draft.pace.watch_s, deadline_s - time.monotonic())
        if watch_s <= 0 or target.exit is not None or target.cpu_share is not None:
            return
        before, before_s = self.process.sample(target.pid), time.monotonic()
        time.sleep(watch_s)
        after, after_s = self.process.sample(target.pid), time.monotonic()
        if before is None or after is None or before.state in "TtZX":
            return
        draft.put(cpu_share=round(max(after.cpu_s - before.cpu_s, 0.0) / (after_s - before_s), 3))
        if main is None or not self.process.catches(target.pid, stack_signal):
            return
        request = StackRequest(target.pid, stack_signal, target.rank_dir / "stacks.txt")
        dump = request.wait(min(time.monotonic() + watch_s, deadline_s)) if request.send() else None
        again = main_stack(dump.stacks) if dump is not None and dump.whole else None
        if again is not None and same_place((main.frames, again.frames)) is False:
            draft.put(stack_unchanged=False)

    def _log_tail(self, draft: _Draft, deadline_s: float) -> None:
        # Errors last: the end of the list is what people see.
        files = sorted(draft.target.log_files, key=lambda path: "stderr" in path.name)
        if not files:
            draft.lacks("log: standard output and error go nowhere that can be read")
            return
        lines, errors = tail_of_files(files, LOG_LINES)
        for error in errors:
            draft.lacks(f"log: {error}")
        if lines:
            draft.put(log_tail=tuple(lines))
            draft.write("log_tail.txt", "\n".join(lines) + "\n")

    def _oom(self, draft: _Draft, deadline_s: float) -> None:
        exit_ = draft.evidence.exit
        if exit_ is None or exit_.by_us or not (exit_.signal == signal.SIGKILL or exit_.code == 128 + signal.SIGKILL):
            return
        record = self.oom.check(draft.target.pid)
        draft.put(oom=record)
        if record.killed is None:
            draft.lacks(f"out of memory: {record.detail}")


def _attempt(name: str, step: Callable[[_Draft, float], None], draft: _Draft, deadline_s: float) -> None:
    try:
        step(draft, deadline_s)
    except Exception as e:  # one source must not cost the others
        draft.lacks(f"{name}: {type(e).__name__}: {e}")


def ask(
    path: Path, request: Mapping[str, Any], limit_s: float, max_bytes: int = _ANSWER_BYTES
) -> tuple[Mapping[str, Any] | None, str]:
    """(a rank's answer on its evidence socket, why there is none); one JSON line each way."""
    deadline_s = time.monotonic() + limit_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as s:
            s.settimeout(limit_s)
            connect_unix(s, path)
            s.sendall(json.dumps(request).encode() + b"\n")
            answer = b""
            while b"\n" not in answer and len(answer) < max_bytes:
                s.settimeout(max(deadline_s - time.monotonic(), 0.001))
                part = s.recv(65536)
                if not part:
                    break
                answer += part
    except FileNotFoundError:
        return None, "not there (it opens at the first step)"
    except TimeoutError:
        return None, f"no answer in {limit_s:g} s; C code holds the interpreter lock, or the process does not run"
    except OSError as e:
        return None, e.strerror or str(e)
    try:
        decoded = json.loads(answer.partition(b"\n")[0])
    except ValueError:
        return None, "the answer is not JSON"
    return (decoded, "") if isinstance(decoded, dict) else (None, "the answer is not an object")


def connect_unix(s: socket.socket, path: Path) -> None:
    """Connect also where the path is longer than an address may be."""
    address, folder = reachable(str(path.parent), path.name)
    try:
        s.connect(address)
    finally:
        if folder >= 0:
            os.close(folder)


def read_exception(path: Path) -> tuple[ExceptionRecord | None, str]:
    """(the record, its text), or (None, what is wrong with the file; empty when there is none)."""
    try:
        with path.open("rb") as f:
            text = f.read(_EXCEPTION_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None, ""
    except OSError as e:
        return None, f"cannot read {path.name}: {e.strerror}"
    try:
        return exception_from_json(json.loads(text)), text
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        return None, f"{path.name} is cut or foreign: {e!r}"


def render_stacks(stacks: Sequence[ThreadStack]) -> str:
    """Stacks as text, the main thread first."""
    parts = []
    for stack in sorted(stacks, key=lambda s: not s.is_main):
        title = f"main thread {stack.thread}" if stack.is_main else f"thread {stack.thread}"
        parts.append(title + "\n" + "".join(f"  {frame}\n" for frame in stack.frames))
    return "\n".join(parts)
