"""The ways to one rank's dumps, from the surest to the one that needs most of the rank."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steadyrun.collectors.evidence import Target, ask
from steadyrun.collectors.flight.handlers import (
    DEFAULT_RECORDER,
    LEGACY_NCCL,
    HandlerError,
    WorkerServer,
    dump_requests,
    file_requests,
)
from steadyrun.collectors.flight.live import LiveRecorders, live_from_json
from steadyrun.collectors.flight.watchdog_files import (
    DumpFileError,
    file_state,
    poke_pipe,
    read_dump,
    wait_until_quiet,
)

__all__ = ["FlightLimits", "RankAsker", "RawDump"]

_DUMPED: Final = re.compile(r"flight\.([A-Za-z0-9_-]{1,40})\.pickle")
_AT_EXCEPTION: Final = re.compile(r"flight\.([A-Za-z0-9_-]{1,40})\.exception\.pickle")
_SHORT_S: Final = 0.25  # a dump with stacks takes 0.1 to 0.4 s; after a death nobody waits for what may not come
_GROUPS_BYTES: Final = 32 << 20
_CLOCK_SLACK_S: Final = 2.0  # that file servers' time stamps may differ
_TICK_NS: Final = 10_000_000  # the kernel stamps files with the time of its last tick


@dataclass(frozen=True, slots=True)
class FlightLimits:
    """Seconds that each way may take, within the limit for the rank.

    Attributes:
        server_s: torch's server; it answers in milliseconds, with 2,000 entries in 0.15 s.
        groups_s: the rank's evidence thread; where C code holds the interpreter's lock it does not answer at all.
        dump_s: a dump with stacks by that thread.
        file_s: until a file of the watchdog is quiet.
        pipe_s: NCCL looks into its pipe once a second.
    """

    server_s: float = 2.0
    groups_s: float = 0.5
    dump_s: float = 2.5
    file_s: float = 1.2
    pipe_s: float = 2.5


@dataclass(frozen=True, slots=True)
class RawDump:
    """A dump as it came.

    Attributes:
        recorder: empty where only the content can tell.
        kind: as ``DumpFile.kind`` has it.
        suffix: ``pickle`` or ``json``.
    """

    recorder: str
    kind: str
    suffix: str
    taken_at_unix_s: float
    content: bytes


class RankAsker:
    """Asks one rank and gathers what comes.

    Attributes:
        live: what the rank tells of its recorders, as fresh as could be had.
        found: dumps of now per recorder, the fullest first.
        left: dumps from before: torch's watchdog's, and those of an exception.
        missing: what could not be had, and why.
    """

    def __init__(
        self,
        target: Target,
        live: LiveRecorders | None,
        limits: FlightLimits,
        deadline_s: float,
        state_of: Callable[[int], str | None],
    ) -> None:
        self.live = live
        self.found: dict[str, list[RawDump]] = {}
        self.left: list[RawDump] = []
        self.missing: list[str] = []
        self.state = (state_of(target.pid) or "") if target.exit is None else ""
        self._target, self._limits, self._deadline_s, self._state_of = target, limits, deadline_s, state_of
        self._dir = target.rank_dir
        self._server = WorkerServer(target.rank_dir / "flight.sock")

    def ask(self) -> None:
        """Take every way that is open; by the deadline, and without raising."""
        if self._target.exit is None and self.state in ("T", "t"):
            self.missing.append(f"the process is stopped (state {self.state}) and answers nothing; it was left so")
        is_running = self._target.exit is None and self.state not in ("", "T", "t", "Z", "X")
        at_exception = self._dumps_in_rank_dir(_AT_EXCEPTION)
        if is_running:
            self._ask_running(is_ending=bool(at_exception))
        self._take_watchdogs()  # before torch is made to write to the same file
        if is_running and not at_exception:
            self._make_nccl_write()
            self._make_server_write()
        for recorder, path, _ in at_exception or self._dumps_in_rank_dir(_AT_EXCEPTION):
            self._take(self.left, recorder, "exception", path)

    def has_traces(self) -> bool:
        """The rank has ever used torch.distributed under us; otherwise there is nothing to ask for."""
        if self.live is not None or (self._dir / "flight.sock").exists():
            return True
        return bool(self._dumps_in_rank_dir(_AT_EXCEPTION))

    def _ask_running(self, is_ending: bool) -> None:
        server_said = self._ask_server()
        if is_ending:  # its own dump is there, call sites and all; what it holds now is what teardown made of it
            return
        rank_said = self._ask_rank()
        if self.live is None or not self.live.groups:
            return  # no process group yet: nothing is lacking
        if self.found:
            if rank_said:
                self.missing.append(f"no call sites: {rank_said}")
        elif self._state_of(self._target.pid) in (None, "Z", "X"):
            self.missing.append("the process ended while it was asked")
        else:
            self.missing.append("; ".join(filter(None, (server_said, rank_said))) or "nothing answered")

    # -- torch's server ----------------------------------------------------------------------------------------------
    def _ask_server(self) -> str:
        """Fetch what it has without stacks; the text says what did not come."""
        if self.live is not None and not self.live.has_server:
            return f"torch's server: {self.live.server_missing or 'it does not run in the rank'}"
        until_s = self._until_s(self._limits.server_s)
        try:
            names = self._server.handlers(until_s)
            for request in dump_requests(names, self.live.recorders if self.live is not None else ()):
                body = self._server.fetch(request, until_s)
                raw = RawDump(request.recorder, request.kind, request.suffix, time.time(), body)
                self.found.setdefault(request.recorder, []).append(raw)
        except HandlerError as e:
            return f"torch's server: {e}"
        return ""

    def _make_server_write(self) -> None:
        """Full dumps of per-backend recorders, of which the server itself tells only what is active (torch 2.15)."""
        live, path = self.live, self.live.dump_path() if self.live is not None else None
        if live is None or path is None or not live.has_server:
            return
        lacking = set(live.recorders) - self._full() - {LEGACY_NCCL}
        if not lacking:
            return
        try:
            names = self._server.handlers(self._until_s(self._limits.groups_s))
            for request in file_requests(names, lacking):
                began_ns = time.time_ns()
                self._server.fetch(request, self._until_s(self._limits.groups_s))
                self._take_torchs_file(request.recorder, path, began_ns, self._limits.file_s, request.handler)
        except HandlerError as e:
            self.missing.append(f"torch's server: {e}")

    # -- the rank's own thread ---------------------------------------------------------------------------------------
    def _ask_rank(self) -> str:
        """Dumps with call sites, and the groups of now; the text says why there are no call sites."""
        sock = self._dir / "evidence.sock"
        answer, why = ask(sock, {"cmd": "groups"}, self._left_s(self._limits.groups_s), _GROUPS_BYTES)
        if answer is None:
            return f"evidence socket: {why}"
        try:
            self.live = live = live_from_json(answer)
        except ValueError as e:
            return f"evidence socket: {answer.get('error') or e}"
        if not live.stacks_ready and set(live.recorders) <= self._full():
            return "what torch needs to tell them is not imported yet"  # a dump would bring nothing new
        left_s = self._left_s(self._limits.dump_s)
        if self.found and left_s < _SHORT_S:
            return f"only {left_s:g} s were left"
        began_s = time.time()
        answer, why = ask(sock, {"cmd": "flight", "stacks": live.stacks_ready}, left_s)
        is_new = False
        for recorder, path, at_unix_s in self._dumps_in_rank_dir(_DUMPED):  # also where the answer came too late
            if at_unix_s >= began_s - _CLOCK_SLACK_S:
                is_new = self._take(self.found.setdefault(recorder, []), recorder, "full", path) or is_new
        if is_new:
            return "" if live.stacks_ready else "what torch needs to tell them is not imported yet"
        lacks = [str(text).removeprefix("flight recorder: ") for text in (answer or {}).get("missing") or ()]
        told = "; ".join(lacks) or str((answer or {}).get("error") or "")
        return f"the rank wrote no dump: {why or told or 'it did not say why'}"

    def _dumps_in_rank_dir(self, pattern: re.Pattern[str]) -> list[tuple[str, Path, float]]:
        """(recorder, path, time of it) of the dumps that the rank itself has written."""
        try:
            names = sorted(os.listdir(self._dir))
        except OSError:
            return []
        found = []
        for name in names:
            match = pattern.fullmatch(name)
            state = file_state(self._dir / name) if match is not None else None
            if match is not None and state is not None:
                found.append((match.group(1), self._dir / name, state.changed_unix_s))
        return found

    # -- torch's own files -------------------------------------------------------------------------------------------
    def _take_watchdogs(self) -> None:
        path = self.live.dump_path() if self.live is not None else None
        if path is None or not self._is_of_this_attempt(path):
            return
        if wait_until_quiet(path, self._until_s(self._limits.file_s)) is not None:
            self._take(self.left, "", "watchdog", path)

    def _is_of_this_attempt(self, path: Path) -> bool:
        """The user may have given a place of his own, where every attempt writes to the same file."""
        state, view = file_state(path), self._target.view
        if state is None or self._dir.parent in path.parents:
            return state is not None
        if view is None or view.attached_s is None:
            return False
        attached_unix_s = time.time() - (time.monotonic() - view.attached_s)
        return state.changed_unix_s >= attached_unix_s - _CLOCK_SLACK_S

    def _make_nccl_write(self) -> None:
        """Through its pipe, where neither the server nor the rank's thread has given the legacy recorder."""
        live, path = self.live, self.live.dump_path() if self.live is not None else None
        pipe = live.pipe_path() if live is not None else None
        if live is None or path is None or pipe is None:
            return
        if LEGACY_NCCL not in live.recorders or LEGACY_NCCL in self.found:
            return
        began_ns = time.time_ns()
        try:
            poke_pipe(pipe)
        except DumpFileError as e:
            self.missing.append(str(e))
            return
        self._take_torchs_file(LEGACY_NCCL, path, began_ns, self._limits.pipe_s, str(pipe))

    def _take_torchs_file(self, recorder: str, path: Path, began_ns: int, limit_s: float, asked: str) -> None:
        if wait_until_quiet(path, self._until_s(limit_s), began_ns - _TICK_NS) is None:
            self.missing.append(f"asked through {asked}, torch wrote nothing to {path} in time")
            return
        self._take(self.found.setdefault(recorder, []), recorder, "full", path)

    # -- small things ------------------------------------------------------------------------------------------------
    def _take(self, into: list[RawDump], recorder: str, kind: str, path: Path) -> bool:
        """Read a file as the first of *into*."""
        state = file_state(path)
        try:
            content, is_steady = read_dump(path)
        except DumpFileError as e:
            self.missing.append(str(e))
            return False
        if not is_steady:
            self.missing.append(f"{path} was still being written: its copy may be cut")
        at_unix_s = state.changed_unix_s if state is not None else time.time()
        into.insert(0, RawDump(recorder, kind, "pickle", at_unix_s, content))
        return True

    def _full(self) -> set[str]:
        """Recorders of which every entry is here. The default one marks none as done, so that none was left out."""
        return {
            name
            for name, raws in self.found.items()
            if raws and (name == DEFAULT_RECORDER or any(raw.kind == "full" for raw in raws))
        }

    def _until_s(self, limit_s: float) -> float:
        return min(time.monotonic() + limit_s, self._deadline_s)

    def _left_s(self, limit_s: float) -> float:
        return max(round(self._until_s(limit_s) - time.monotonic(), 2), 0.01)
