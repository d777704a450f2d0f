"""The agent's child processes: they cannot outlive it, are watched by pidfd, and end with all that they started."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from steadyrun.node.ports import ExitSeen, SpawnSpec, SweepReport
from steadyrun.node.sweep import (
    RLIMIT_LOCKS,
    ProcessEntry,
    ShmSnapshot,
    Tag,
    descendants_of,
    has_marker,
    inherit,
    list_shm,
    read_process,
    remove_shared_memory,
    scan_processes,
)

__all__ = ["STANDBY_ATTEMPT", "LinuxProcessTable"]

STANDBY_ATTEMPT: Final = -1
SWEEP_LIMIT_S: Final = 1.0  # for processes in state D
SLOW_END_LIMIT_S: Final = 5.0  # for others: freeing much memory takes its time after SIGKILL
_SCAN_AGAIN_S: Final = 0.05
_SCAN_PAUSE: Final = 250.0  # times what the scan took
_ORPHAN_AGE_S: Final = 10.0
_UNKNOWN_EXIT: Final = 255
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_CHILD_SUBREAPER: Final = 37


@dataclass(slots=True)
class _Child:
    """A leader: a rank, or a standby that will become one."""

    pid: int
    start_ticks: int
    rank: int
    attempt: int
    fd: int
    leads_group: bool
    popen: subprocess.Popen[bytes] | None
    exit_code: Callable[[], int | None] | None = None
    ended: bool = False


@dataclass(slots=True)
class _Known:
    """What was seen below a leader, by incarnation, with the leader's pid."""

    leader_of: dict[tuple[int, int], int] = field(default_factory=dict)

    def note(self, entry: ProcessEntry, leader: int) -> None:
        self.leader_of.setdefault(entry.incarnation, leader)

    def forget_gone(self, processes: Mapping[int, ProcessEntry]) -> None:
        alive = {p.incarnation for p in processes.values()}
        self.leader_of = {k: v for k, v in self.leader_of.items() if k in alive}


class LinuxProcessTable:
    """``ProcessTable`` with real processes. All calls come from one thread, which must live as long as the agent.

    The agent becomes a subreaper, so that whatever a rank started stays a descendant of the agent, however it forks,
    and ranks get a Tag, by which their descendants are known whatever they do.

    Args:
        marker: value of STEADYRUN_RUN in the environment of this node's ranks.
        proc, shm: roots of /proc and /dev/shm.
    """

    def __init__(self, marker: str, proc: Path = Path("/proc"), shm: Path = Path("/dev/shm")) -> None:
        self._marker = marker
        self._proc = proc
        self._shm = shm
        self._tag = Tag.of_agent(os.getpid(), proc)
        self._children: dict[int, _Child] = {}
        self._known = _Known()
        self._own_pids: set[int] = set()  # all that ever belonged to a rank; names in /dev/shm hold them
        self._shm_before: dict[int, ShmSnapshot] = {}
        self._closable: list[int] = []
        self._orphans: dict[tuple[int, int], float] = {}
        self._scanned_s = float("-inf")
        self._scan_took_s = 0.0
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._prctl.argtypes = [ctypes.c_int, *([ctypes.c_ulong] * 4)]
        self._prctl.restype = ctypes.c_int
        self._was_subreaper = self._is_subreaper()
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    # -- starting ------------------------------------------------------------------------------------------------------
    def spawn(self, spec: SpawnSpec) -> int:
        """Start it in a session of its own; returns the pid.

        The child gets SIGKILL when the calling thread ends, SIGTERM and the like at their defaults unless the agent
        ignores them, and no blocked signal. Standard input is the agent's.

        Raises:
            OSError: no such program, no permission, no file for its output, or no process left.
        """
        if spec.attempt not in self._shm_before:
            self._shm_before[spec.attempt] = frozenset((f.name, f.inode) for f in list_shm(self._shm))
        with contextlib.ExitStack() as files:
            popen = self._fork(spec, _log_file(files, spec.stdout), _log_file(files, spec.stderr))
        entry = read_process(popen.pid, self._proc)
        self._children[popen.pid] = _Child(
            pid=popen.pid,
            start_ticks=entry.start_ticks if entry else 0,
            rank=spec.rank,
            attempt=spec.attempt,
            fd=_open_pidfd(popen.pid),
            leads_group=True,
            popen=popen,
        )
        self._own_pids.add(popen.pid)
        return popen.pid

    def _fork(self, spec: SpawnSpec, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> subprocess.Popen[bytes]:
        parent, prctl, nice, no_signals = os.getpid(), self._prctl, spec.nice, frozenset[int]()
        limits = (self._tag.value(spec.attempt), resource.getrlimit(RLIMIT_LOCKS)[1])
        set_limit = resource.setrlimit

        def in_child() -> None:
            # Between fork and exec, in a copy of a process with threads: no import, no lock, no logging.
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)  # the agent died before the line above took effect
            signal.pthread_sigmask(signal.SIG_SETMASK, no_signals)
            with contextlib.suppress(OSError, ValueError):  # a lowered hard limit: parentage and marker must do
                set_limit(RLIMIT_LOCKS, limits)
            if nice:
                os.nice(nice)

        # A garbage collection in the child could run destructors of torch objects whose threads it does not have.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return subprocess.Popen(
                spec.argv,
                env=dict(spec.env),
                stdout=stdout,
                stderr=stderr,
                pass_fds=spec.pass_fds,
                start_new_session=True,
                preexec_fn=in_child,
            )
        except subprocess.SubprocessError as e:
            raise OSError(f"cannot prepare the process: {e}") from e
        finally:
            if was_enabled:
                gc.enable()

    def adopt(
        self, pid: int, rank: int, local_rank: int, attempt: int, exit_code: Callable[[], int | None] | None = None
    ) -> None:
        """Watch a child that somebody else started and will reap.

        Args:
            exit_code: asked by ``poll_exits`` once the process has ended; minus the signal's number for a signal. Where
                it gives None or is missing, the code is read without reaping, or is 255 if the owner was faster.

        Raises:
            ProcessLookupError: there is no such process.
        """
        entry = read_process(pid, self._proc)
        if entry is None:
            raise ProcessLookupError(f"cannot watch process {pid}: it does not exist")
        if attempt not in self._shm_before:
            self._shm_before[attempt] = frozenset((f.name, f.inode) for f in list_shm(self._shm))
        self._children[pid] = _Child(
            pid, entry.start_ticks, rank, attempt, _open_pidfd(pid), entry.pgrp == pid, None, exit_code
        )
        self._own_pids.add(pid)
        self._set_tag(pid, attempt)

    def assign(self, pid: int, rank: int, attempt: int) -> None:
        """From now on *pid*, a standby so far, is this rank of this attempt. Raises KeyError for a foreign pid."""
        child = self._children[pid]
        child.rank, child.attempt = rank, attempt
        self._set_tag(pid, attempt)
        if attempt not in self._shm_before:
            self._shm_before[attempt] = frozenset((f.name, f.inode) for f in list_shm(self._shm))

    def _set_tag(self, pid: int, attempt: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, RLIMIT_LOCKS, (self._tag.value(attempt), resource.getrlimit(RLIMIT_LOCKS)[1]))

    # -- watching ------------------------------------------------------------------------------------------------------
    def fileno_of(self, pid: int) -> int:
        """A descriptor that becomes readable when *pid* ends; it stays open until the call after the one of
        ``poll_exits`` that reported the end. Raises KeyError for a foreign pid."""
        return self._children[pid].fd

    def poll_exits(self) -> Sequence[ExitSeen]:
        """Children that ended since the last call, in no particular order; never blocks."""
        self._close_descriptors()
        ended = [c for c in self._children.values() if not c.ended and _is_readable(c.fd)]
        if not ended:
            return ()
        # While a leader is a zombie its number cannot be given away, so that whoever is in its group now is ours.
        self._remember()
        seen: list[ExitSeen] = []
        for child in ended:
            code = self._reap(child)
            if code is None:
                continue
            seen.append(ExitSeen(child.pid, code, time.monotonic()))
            child.ended = True
            self._closable.append(child.fd)
        return tuple(seen)

    def _reap(self, child: _Child) -> int | None:
        if child.popen is not None:
            return child.popen.poll()
        code = child.exit_code() if child.exit_code is not None else None
        return code if code is not None else _peek_exit(child.pid)

    def _close_descriptors(self) -> None:
        # Not at once: the selector must be able to forget a descriptor before its number is used again.
        for fd in self._closable:
            os.close(fd)
        self._closable.clear()

    def record_descendants(self) -> None:
        """Remember who descends from the children now, so that a sweep knows whose they were when they have left both
        group and session. One pass over /proc: about 20 us for each process of the machine, and not done more often
        than costs 0.4 % of a core."""
        if time.monotonic() - self._scanned_s >= _SCAN_PAUSE * self._scan_took_s:
            self._remember()

    def _remember_soon(self) -> None:
        """Before signals that may end a parent; several in a row share one scan."""
        if time.monotonic() - self._scanned_s >= _SCAN_AGAIN_S:
            self._remember()

    def _remember(self) -> dict[int, ProcessEntry]:
        now_s = time.monotonic()
        processes = scan_processes(self._proc)
        self._scanned_s = time.monotonic()
        self._scan_took_s = self._scanned_s - now_s
        self._known.forget_gone(processes)
        self._reap_orphans(processes, now_s)
        for pid, leader in self._leaders_of(processes).items():
            self._known.note(processes[pid], leader)
            self._own_pids.add(pid)
        return processes

    def _leaders_of(self, processes: Mapping[int, ProcessEntry]) -> dict[int, int]:
        """For each process that a rank or standby started, directly or not, the leader's pid. A descendant of somebody
        known belongs to the same leader, be the leader dead; a live leader's session and group are its own."""
        leaders = {c.pid: c for c in self._children.values() if not c.ended}
        owner: dict[int, int] = {}
        for entry in processes.values():
            leader = leaders.get(entry.session) or leaders.get(entry.pgrp)
            known = self._known.leader_of.get(entry.incarnation)
            if known is not None:
                owner[entry.pid] = known
            elif leader is not None and leader.leads_group:
                owner[entry.pid] = leader.pid
        owner.update((pid, pid) for pid in leaders)
        return {pid: leader for pid, leader in inherit(owner, processes).items() if pid not in leaders}

    # -- signals -------------------------------------------------------------------------------------------------------
    def signal(self, pid: int, signum: int) -> bool:
        """Send to the leader only; False when it is gone."""
        child = self._children.get(pid)
        if child is None or child.ended:
            return False
        if signum in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGQUIT):
            self._remember_soon()
        try:
            if child.popen is not None:
                os.kill(pid, signum)  # not reaped yet, so the number is still its own
            else:
                _send(child.fd, pid, signum)
        except ProcessLookupError:
            return False
        return True

    def signal_group(self, pid: int, signum: int) -> bool:
        """Send to the process group that *pid* led, its leader dead or not; False when the group is empty.

        With the leader reaped the number may belong to somebody else by now: then only members that were seen below the
        leader, or that carry the marker, get it, each by its pidfd.
        """
        child = self._children.get(pid)
        if child is None:
            return False
        if not child.ended and child.leads_group:
            self._remember_soon()
            try:
                os.killpg(pid, signum)
            except ProcessLookupError:
                return False
            return True
        processes = scan_processes(self._proc)
        members = [p for p in processes.values() if self._is_member(p, child) and not p.is_dead]
        if not child.ended:  # adopted, in a group that is not its own
            members += [p for p in processes.values() if p.pid == pid and not p.is_dead]
        sent = [self._send_to(entry, signum) for entry in members]
        return any(sent)

    def _is_member(self, entry: ProcessEntry, child: _Child) -> bool:
        if self._known.leader_of.get(entry.incarnation) == child.pid:
            return True
        in_group = child.leads_group and child.pid in (entry.pgrp, entry.session)
        return in_group and entry.incarnation != (child.pid, child.start_ticks) and self._is_marked(entry)

    def _is_marked(self, entry: ProcessEntry) -> bool:
        return self._tag.attempt_of(entry.pid) is not None or has_marker(entry, self._marker, self._proc)

    def _send_to(self, entry: ProcessEntry, signum: int) -> bool:
        """By pidfd, and only if the number still means the same process."""
        try:
            fd = os.pidfd_open(entry.pid)
        except ProcessLookupError:
            return False
        except OSError:  # ENOSYS before Linux 5.3
            return self._send_by_number(entry, signum)
        try:
            now = read_process(entry.pid, self._proc)
            if now is None or now.incarnation != entry.incarnation or now.is_dead:
                return False
            signal.pidfd_send_signal(fd, signum)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(fd)
        return True

    def _send_by_number(self, entry: ProcessEntry, signum: int) -> bool:
        now = read_process(entry.pid, self._proc)
        if now is None or now.incarnation != entry.incarnation or now.is_dead:
            return False
        try:
            os.kill(entry.pid, signum)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    # -- sweeping ------------------------------------------------------------------------------------------------------
    def sweep(self, attempt: int) -> SweepReport:
        """End what attempts up to *attempt* left behind, and remove their files in /dev/shm.

        Standbys and ranks of later attempts, with their descendants, are left alone. SIGKILL ends stopped processes
        too, so that nothing else is sent. Returns once all are gone; with those in state D after one second, with any
        after five, as ``stuck``.
        """
        started_s = time.monotonic()
        ended: dict[tuple[int, int], tuple[int, str]] = {}
        while True:
            processes = self._remember()
            left = [p for p in self._survivors(attempt, processes) if not p.is_dead]
            limit_s = SWEEP_LIMIT_S if all(p.state == "D" for p in left) else SLOW_END_LIMIT_S
            left_s = started_s + limit_s - time.monotonic()
            if not left or left_s <= 0:
                break
            for entry in left:
                if entry.incarnation not in ended:
                    ended[entry.incarnation] = (entry.pid, _command_line(entry, self._proc))
                self._send_to(entry, signal.SIGKILL)
            _wait_until_gone([e.pid for e in left], min(left_s, 0.2))
        stuck = tuple(sorted(p.pid for p in left))
        self._reap_orphans(scan_processes(self._proc), time.monotonic())
        removed = remove_shared_memory(
            before=self._shm_before.get(attempt, frozenset()),
            own_pids=self._own_pids,
            shm=self._shm,
            proc=self._proc,
        )
        self._forget(attempt)
        return SweepReport(tuple(v for v in ended.values() if v[0] not in stuck), removed, stuck)

    def _survivors(self, attempt: int, processes: Mapping[int, ProcessEntry]) -> list[ProcessEntry]:
        spared = {
            c.pid
            for c in self._children.values()
            if not c.ended and (c.attempt > attempt or c.attempt == STANDBY_ATTEMPT)
        }
        finished = {(c.pid, c.start_ticks) for c in self._children.values() if c.pid not in spared}
        ours = descendants_of([os.getpid()], processes)
        found: list[ProcessEntry] = []
        for entry in processes.values():
            leader = self._known.leader_of.get(entry.incarnation)
            if entry.pid in spared or leader in spared:
                continue
            if leader is not None or entry.incarnation in finished:
                found.append(entry)
                continue
            tagged = self._tag.attempt_of(entry.pid)
            if tagged is not None:
                if STANDBY_ATTEMPT < tagged <= attempt or not spared:
                    found.append(entry)
            # Where there is no tag: a subreaper keeps all descendants, and the marker counts among them only, because
            # another job may have the same run id.
            elif entry.pid in ours and (_is_stray(entry) or has_marker(entry, self._marker, self._proc)):
                found.append(entry)
        return found

    def _reap_orphans(self, processes: Mapping[int, ProcessEntry], now_s: float) -> None:
        """Collect dead descendants that the kernel gave to us, one by one: waiting for any child would take the exit
        codes of children that other parts of the agent started and will ask for."""
        waiting: dict[tuple[int, int], float] = {}
        for entry in processes.values():
            if entry.state != "Z" or entry.ppid != os.getpid() or entry.pid in self._children:
                continue
            is_known = (
                entry.incarnation in self._known.leader_of
                or self._tag.attempt_of(entry.pid) is not None
                or entry.session in self._children
                or _is_stray(entry)
            )
            since_s = self._orphans.get(entry.incarnation, now_s)
            # A stranger in a session of its own: nobody asked for its exit code in 10 s, so nobody will.
            if is_known or (entry.session != os.getsid(0) and now_s - since_s > _ORPHAN_AGE_S):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(entry.pid, os.WNOHANG)
            else:
                waiting[entry.incarnation] = since_s
        self._orphans = waiting

    def _forget(self, attempt: int) -> None:
        """Drop the records of attempts up to *attempt*."""
        for child in [c for c in self._children.values() if c.ended]:
            if child.attempt <= attempt and child.fd not in self._closable:
                del self._children[child.pid]
        for old in [a for a in self._shm_before if STANDBY_ATTEMPT < a < attempt]:
            del self._shm_before[old]

    def _is_subreaper(self) -> bool:
        answer = ctypes.c_int(0)
        self._prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(answer), 0, 0, 0)
        return bool(answer.value)

    def close(self) -> None:
        """Close all descriptors and adopt no more orphans; processes are left as they are."""
        self._prctl(_PR_SET_CHILD_SUBREAPER, int(self._was_subreaper), 0, 0, 0)
        self._close_descriptors()
        for child in self._children.values():
            if not child.ended:
                os.close(child.fd)
        self._children.clear()


def _log_file(files: contextlib.ExitStack, path: Path | None) -> IO[bytes] | None:
    if path is None:
        return None
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return files.enter_context(os.fdopen(fd, "wb", buffering=0))


def _open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when *pid*, a child, ends."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return _watch_in_thread(pid)


def _watch_in_thread(pid: int) -> int:
    """As pidfd_open, for kernels before 5.3: a thread waits, without reaping, and closes the other end of a pipe."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(write_fd)

    threading.Thread(target=wait, name=f"steadyrun-wait-{pid}", daemon=True).start()
    return read_fd


def _send(fd: int, pid: int, signum: int) -> None:
    try:
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        raise
    except OSError:
        os.kill(pid, signum)  # the descriptor is a pipe, from _watch_in_thread


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _peek_exit(pid: int) -> int | None:
    try:
        seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return _UNKNOWN_EXIT
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


def _wait_until_gone(pids: Iterable[int], timeout_s: float) -> None:
    """Until all have ended (be it as zombies) or the time is over."""
    deadline_s = time.monotonic() + timeout_s
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        except OSError:  # ENOSYS before Linux 5.3: the caller looks again
            time.sleep(min(0.02, max(timeout_s, 0.0)))
            return
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(max(deadline_s - time.monotonic(), 0.0) * 1000)
        finally:
            os.close(fd)


def _is_stray(entry: ProcessEntry) -> bool:
    """A child that became ours when its parent died: what the agent starts itself is in the agent's session or leads
    one. It finds a daemon that forked twice and dropped its environment before any scan saw its parent."""
    return entry.ppid == os.getpid() and entry.session not in (os.getsid(0), entry.pid)


def _command_line(entry: ProcessEntry, proc: Path) -> str:
    """For the report: the command line, or the kernel's name for the process where it cannot be read."""
    if entry.state != "D":
        with contextlib.suppress(OSError):
            raw: Any = (proc / str(entry.pid) / "cmdline").read_bytes()
            text = raw.replace(b"\0", b" ").decode(errors="replace").strip()
            if text:
                return str(text)[:200]
    return entry.command
