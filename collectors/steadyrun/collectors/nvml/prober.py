"""The parent's end of the process that talks to NVML: questions with a deadline, and a new process after a hang."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from steadyrun.collectors.nvml.child import NAME_BYTES
from steadyrun.collectors.nvml.starting import StartingThread

__all__ = ["NvmlProber", "ProbeError"]

START_LIMIT_S: Final = 30.0  # nvmlInit serialises over all processes of a machine; 200 at once took 12 s
BACK_OFF_S: Final = (5.0, 15.0, 60.0, 300.0)
MAX_ABANDONED: Final = 3  # processes that hang in the driver and cannot be killed
_REAP_S: Final = 1.0
_MAX_ANSWER_BYTES: Final = 8 << 20

# nvmlReturn_t of nvmlInit, and what it means.
DRIVER_NOT_LOADED: Final = 9
LIBRARY_NOT_FOUND: Final = 12
VERSION_MISMATCH: Final = 18


class ProbeError(Exception):
    """No answer.

    Attributes:
        hung: the driver did not answer in time.
        code: NVML's, when it could not be initialised.
        call: what was being asked when it hung.
    """

    def __init__(self, text: str, hung: bool = False, code: int | None = None, call: str = "") -> None:
        super().__init__(text)
        self.hung = hung
        self.code = code
        self.call = call


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    board: mmap.mmap
    pending: bytes = b""

    def call(self) -> str:
        """What it is calling now."""
        return self.board[:].rstrip(b"\0").decode(errors="replace")


class NvmlProber:
    """One thread at a time, never the agent's loop: ``ask`` waits up to its limit.

    Args:
        command: the child's program; tests give another.
        env: its environment; None for this process's.
    """

    def __init__(
        self,
        command: Sequence[str] = (sys.executable, "-m", "steadyrun.collectors.nvml.child"),
        env: Mapping[str, str] | None = None,
        with_events: bool = True,
        start_limit_s: float = START_LIMIT_S,
        back_off_s: Sequence[float] = BACK_OFF_S,
    ) -> None:
        self._command = tuple(command)
        self._env = dict(env) if env is not None else None
        self._with_events = with_events
        self._start_limit_s = start_limit_s
        self._back_off_s = tuple(back_off_s)
        self._child: _Child | None = None
        self._abandoned: list[subprocess.Popen[bytes]] = []
        self._failures = 0
        self._not_before_s = 0.0
        self._last: ProbeError | None = None
        self._next_id = 0
        self._is_closed = False
        self._starter = StartingThread()  # whoever asks first may be a thread that soon ends
        self.begun: Mapping[str, Any] = {}
        self.events: deque[Mapping[str, int]] = deque(maxlen=256)

    @property
    def abandoned(self) -> int:
        """Processes that hang in the driver although they were killed."""
        self._abandoned = [p for p in self._abandoned if p.poll() is None]
        return len(self._abandoned)

    def pid(self) -> int | None:
        """The child's; any thread."""
        child = self._child
        return child.process.pid if child is not None else None

    def call(self) -> str:
        """What the child is calling now, empty where that is not known; any thread."""
        child = self._child
        with contextlib.suppress(ValueError):  # it has just been ended
            return child.call() if child is not None else ""
        return ""

    def ask(self, groups: frozenset[str], limit_s: float, start_limit_s: float | None = None) -> list[dict[str, Any]]:
        """An object per GPU. Raises ProbeError; until the back-off has passed it raises the last one again.

        Args:
            start_limit_s: for the start of a child, where another limit than the usual one is wanted.
        """
        if self._child is None:
            self._start(self._start_limit_s if start_limit_s is None else start_limit_s)
        assert self._child is not None
        self._next_id += 1
        request = json.dumps({"id": self._next_id, "groups": sorted(groups)}).encode() + b"\n"
        pipe = self._child.process.stdin
        assert pipe is not None
        try:
            pipe.write(request)
            pipe.flush()
        except OSError:
            self._fail(ProbeError(f"the process that asks NVML has died{self._how()}"))
        deadline_s = time.monotonic() + limit_s
        while True:
            answer = self._line(deadline_s)
            if answer.get("id") == self._next_id:
                self._failures, self._last = 0, None
                devices = answer.get("devices")
                return [d for d in devices if isinstance(d, dict)] if isinstance(devices, list) else []

    def poll_events(self) -> list[Mapping[str, int]]:
        """NVML's events since the last call; never blocks."""
        if self._child is not None:
            with contextlib.suppress(ProbeError):
                while self._has_output(0.0):
                    self._line(time.monotonic() + 1.0, only_ready=True)
        events = list(self.events)
        self.events.clear()
        return events

    def _start(self, limit_s: float) -> None:
        now_s = time.monotonic()
        if self._is_closed:
            raise ProbeError("the driver is not asked any more")
        if self._last is not None and now_s < self._not_before_s:
            raise self._last
        if self.abandoned >= MAX_ABANDONED:
            raise ProbeError(f"{self.abandoned} processes hang in the driver and cannot be ended", hung=True)
        fd = os.memfd_create("steadyrun-nvml", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, NAME_BYTES)
            board = mmap.mmap(fd, NAME_BYTES)
            process = self._starter.run(lambda: self._spawn(fd))
        except OSError as e:
            self._fail(ProbeError(f"cannot start the process that asks NVML: {(e.strerror or str(e)).lower()}"))
        finally:
            os.close(fd)
        self._child = _Child(process, board)
        answer = self._line(now_s + limit_s)
        if "begun" in answer:
            self.begun = answer["begun"]
            return
        code = answer.get("code")
        text = str(answer.get("text", "it did not say why"))
        self._fail(ProbeError(f"NVML cannot be used: {text}", code=code if isinstance(code, int) else None))

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._command, str(os.getpid()), str(fd), "events" if self._with_events else "none"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(fd,),
            env=self._env,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C at the terminal is for the agent
        )

    def _line(self, deadline_s: float, only_ready: bool = False) -> dict[str, Any]:
        """The next line that is no event; with *only_ready* an empty one as soon as events were read."""
        child = self._child
        assert child is not None
        assert child.process.stdout is not None
        fd = child.process.stdout.fileno()
        while True:
            head, newline, rest = child.pending.partition(b"\n")
            if newline:
                child.pending = rest
                answer = _parse(head)
                if "event" not in answer:
                    return answer
                if isinstance(answer["event"], dict):
                    self.events.append(answer["event"])
                continue
            if only_ready and not self._has_output(0.0):
                return {}
            if not self._has_output(max(deadline_s - time.monotonic(), 0.0)):
                self._hang()
            chunk = os.read(fd, 65536)
            if not chunk:
                self._fail(ProbeError(f"the process that asks NVML has died{self._how()}"))
            child.pending += chunk
            if len(child.pending) > _MAX_ANSWER_BYTES:
                self._fail(ProbeError("the process that asks NVML answers nonsense"))

    def _has_output(self, wait_s: float) -> bool:
        assert self._child is not None
        assert self._child.process.stdout is not None
        return bool(select.select([self._child.process.stdout], [], [], wait_s)[0])

    def _hang(self) -> NoReturn:
        assert self._child is not None
        call = self._child.call()
        what = f" ({call})" if call else ""
        self._fail(ProbeError(f"the driver does not answer{what}", hung=True, call=call))

    def _how(self) -> str:
        """How the child ended, and in what."""
        child = self._child
        if child is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.process.wait(_REAP_S)
            how = f"signal {-code}" if code < 0 else f"exit status {code}"
            return f" ({how}{', in ' + child.call() if child.call() else ''})"
        return ""

    def _fail(self, error: ProbeError) -> NoReturn:
        """End this child, keep away for a while, and raise."""
        self._end_child()
        self._not_before_s = time.monotonic() + self._back_off_s[min(self._failures, len(self._back_off_s) - 1)]
        self._failures += 1
        self._last = error
        raise error

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        process = child.process
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        child.board.close()
        try:
            process.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # in state D: SIGKILL waits for the driver
            self._abandoned.append(process)

    def close(self) -> None:
        """End the child for good; one that hangs in the driver ends with its call."""
        self._is_closed = True
        self._end_child()
        self._starter.close()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
