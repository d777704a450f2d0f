"""The agent's side of the saver: starts it when a rank first asks for it, holds its memory, starts it again.

The agent owns the listening socket and a copy of every descriptor of snapshot memory, so that neither a rank's death
nor the saver's costs a snapshot. It looks into none of them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from steadyrun.checkpoint.wire import Wire, WireClosedError
from steadyrun.node.sweep import MARKER_NAME

__all__ = ["LEAVE_LIMIT_S", "SaverKeeper", "Watcher"]

LEAVE_LIMIT_S: Final = 120.0
_MOST_CRASHES: Final = 3
_CRASHES_WITHIN_S: Final = 60.0
_SEND_LIMIT_S: Final = 1.0
_SUN_PATH: Final = 100


class Watcher(Protocol):
    """The loop's selector."""

    def watch(self, fd: int, then: Callable[[], None]) -> None: ...
    def unwatch(self, fd: int) -> None: ...


class SaverKeeper:
    """One node's saver, if there is one. For the loop's thread; nothing here blocks for more than a second."""

    def __init__(
        self,
        run_folder: Path,
        node: str,
        watcher: Watcher,
        say: Callable[[str], None],
        record: Callable[..., None],
        restart: Callable[[str], None],
        saved: Callable[[int | None, str], None] = lambda step, why: None,
    ) -> None:
        """Open the socket on which ranks ask for the saver; ``socket_path`` is None where that is not possible.

        Args:
            record: writes a journal record: type, then fields.
            restart: asks for a restart of the ranks for the reason given (a rollback was requested).
            saved: the answer to ``ask_save``: the step, or None and why there is none.
        """
        self._run_folder = run_folder
        self._node = node
        self._watcher = watcher
        self._say = say
        self._record = record
        self._restart = restart
        self._saved = saved
        self._listening: socket.socket | None = None
        self._folder: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._wire: Wire | None = None
        self._kept: dict[str, int] = {}
        self._attempt: dict[str, Any] | None = None
        self._crashes: list[float] = []
        self._is_leaving = False
        self._restored: tuple[int, int] | None = None  # attempt, number of older checkpoints
        self.flushed: dict[str, Any] | None = None
        self.socket_path: str | None = None
        self._open()

    # -- the listening socket ------------------------------------------------------------------------------------------
    def _open(self) -> None:
        name = f"saver-{self._node}.sock"
        folder = self._run_folder
        if len(os.fsencode(folder / name)) > _SUN_PATH:
            folder = Path(tempfile.mkdtemp(prefix="steadyrun-"))
            self._folder = str(folder)
            name = "saver.sock"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path = str(folder / name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listening.bind(path)
            os.chmod(path, 0o600)
            listening.listen(1024)
            listening.setblocking(False)
        except OSError as e:
            listening.close()
            self._say(f"steadyrun: cannot open the saver's socket: {e}; the ranks themselves write checkpoints")
            return
        self._listening = listening
        self.socket_path = path
        self._watcher.watch(listening.fileno(), self._start)

    def _start(self) -> None:
        """A rank has connected, or the saver must be started again: it will accept the connections itself."""
        assert self._listening is not None
        self._watcher.unwatch(self._listening.fileno())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        env = {k: v for k, v in os.environ.items() if k != MARKER_NAME}
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-E", "-s", "-m", "steadyrun.checkpoint.saver"),
                    *("--socket-fd", str(self._listening.fileno()), "--agent-fd", str(theirs.fileno())),
                    *("--run-folder", str(self._run_folder), "--node", self._node),
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(self._listening.fileno(), theirs.fileno()),
                start_new_session=True,  # signals to the ranks' or the agent's group do not reach it
            )
        except OSError as e:
            ours.close()
            self._say(f"steadyrun: cannot start the saver: {e}; checkpoints are written by the ranks themselves")
            self._give_up()
            return
        finally:
            theirs.close()
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        ours.settimeout(_SEND_LIMIT_S)
        self._wire = Wire(ours)
        self._watcher.watch(self._pidfd, self._on_exit)
        self._watcher.watch(ours.fileno(), self._on_message)
        self._record("saver_started", pid=process.pid, kept=len(self._kept))
        for name, fd in self._kept.items():
            self._send("kept", (fd,), name=name)
        if self._attempt is not None:
            self._send("attempt", **self._attempt)
        self._send("ready")

    def _give_up(self) -> None:
        """No more savers in this run: close the socket, so that ranks see it and write directly."""
        if self._listening is None:
            return
        self._listening.close()
        self._listening = None
        if self.socket_path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.socket_path)

    # -- what the loop tells -------------------------------------------------------------------------------------------
    def begin_attempt(self, fields: Mapping[str, Any]) -> None:
        """Ranks of an attempt are being started; *fields* as in ``AGENT_OPS["attempt"]``."""
        self._attempt = dict(fields)
        self._send("attempt", **self._attempt)

    def tell_failed(self, attempt: int, step: int | None, signature: str, falls_back: bool = False) -> None:
        """An attempt failed; *signature* is empty where the state cannot be to blame (a killed process, a hang).

        Args:
            falls_back: what the attempt had loaded is not to be loaded again.
        """
        self._send("failed", attempt=attempt, step=step, signature=signature, falls_back=falls_back)

    def has_older(self, attempt: int) -> bool:
        """*attempt* had loaded a checkpoint, and there is an older one."""
        return self._restored is not None and self._restored[0] == attempt and self._restored[1] > 0

    def flush(self, limit_s: float) -> None:
        """Make the newest complete snapshot durable, without the ranks; the answer comes into ``flushed``."""
        self.flushed = None
        self._send("flush", limit_s=limit_s)

    def ask_save(self, limit_s: float) -> bool:
        """Have all ranks save now, as a restart is planned; the answer comes to ``saved`` within *limit_s* and little.

        Returns:
            False: there is no saver, and no answer will come.
        """
        self._send("save", limit_s=limit_s)
        return self._wire is not None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def close(self, limit_s: float = LEAVE_LIMIT_S) -> None:
        """End the saver once what it is writing is durable, after *limit_s* in any case."""
        self._is_leaving = True
        process, told = self._process, False
        if process is not None:
            self._send("leave", limit_s=limit_s)
            deadline_s = time.monotonic() + limit_s + 2.0
            soon_s = time.monotonic() + 2.0
            while process.poll() is None and time.monotonic() < deadline_s:
                if not told and time.monotonic() > soon_s:
                    told = True
                    self._say("steadyrun: a checkpoint is still being written; waiting for it")
                if self._wire is not None:
                    self._on_message(wait_s=0.05)
                else:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.05)
            if process.poll() is None:
                self._say(f"steadyrun: the saver did not finish within {limit_s:.0f} s and is ended")
                process.kill()
            process.wait()
            self._forget()
        if self._listening is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._watcher.unwatch(self._listening.fileno())
        self._give_up()
        for fd in self._kept.values():
            os.close(fd)
        self._kept.clear()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._folder)

    # -- messages and exits --------------------------------------------------------------------------------------------
    def _send(self, op: str, fds: Sequence[int] = (), **fields: Any) -> None:
        if self._wire is None:
            return
        try:
            self._wire.send(op, fds, **fields)
        except (WireClosedError, TimeoutError):
            # A saver that reads nothing for a second is stuck or dead: its exit, or its restart, will be seen.
            if self._process is not None and self._process.poll() is None:
                self._process.kill()

    def _on_message(self, wait_s: float = 0.0) -> None:
        wire = self._wire
        if wire is None:
            return
        try:
            if wait_s:
                wire.settimeout(wait_s)
                try:
                    messages = [wire.receive()]
                finally:
                    wire.settimeout(_SEND_LIMIT_S)
            else:
                messages = wire.poll()
        except TimeoutError:
            return
        except WireClosedError:
            self._unwatch_wire()
            return
        for message in messages:
            self._handle(message)

    def _handle(self, message: Mapping[str, Any]) -> None:
        fds = list(message.get("fds", ()))
        match message.get("op"):
            case "keep" if fds:
                name = str(message.get("name", ""))
                old = self._kept.pop(name, None)
                if old is not None:
                    os.close(old)
                self._kept[name] = fds.pop(0)
            case "drop":
                old = self._kept.pop(str(message.get("name", "")), None)
                if old is not None:
                    os.close(old)
            case "note":
                self._say(f"steadyrun: {message.get('text', '')}")
            case "journal":
                fields = message.get("fields")
                if isinstance(fields, Mapping):
                    self._record(str(message.get("type", "saver")), **_journal_fields(fields))
            case "restored":
                self._restored = (int(message.get("attempt", -1)), int(message.get("older", 0)))
                self._record("checkpoint_loaded", step=message.get("step"))
            case "flushed":
                self.flushed = {"step": message.get("step"), "why": message.get("why", "")}
            case "saved":
                step = message.get("step")
                self._saved(step if isinstance(step, int) else None, str(message.get("why", "")))
            case "restart":
                self._restart(str(message.get("why", "a rollback was requested")))
            case _:
                pass  # of a newer saver
        for fd in fds:
            os.close(fd)

    def _on_exit(self) -> None:
        process = self._process
        if process is None or process.poll() is None:
            return
        self._on_message()  # its last words
        code = process.returncode
        self._forget()
        if self._is_leaving:
            return
        now_s = time.monotonic()
        self._crashes = [s for s in self._crashes if now_s - s < _CRASHES_WITHIN_S] + [now_s]
        self._record("saver_exited", code=code, kept=len(self._kept))
        if len(self._crashes) > _MOST_CRASHES:
            self._say(
                f"steadyrun: the saver ended {len(self._crashes)} times within a minute (code {code}); "
                "it is not started again, checkpoints are written by the ranks themselves"
            )
            self._give_up()
            return
        self._say(f"steadyrun: the saver has ended (code {code}); starting it again, the snapshots in memory are kept")
        if self._listening is not None:
            self._watcher.watch(self._listening.fileno(), self._start)
            self._start()

    def _forget(self) -> None:
        self._unwatch_wire()
        if self._pidfd >= 0:
            with contextlib.suppress(KeyError, ValueError):
                self._watcher.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._process = None

    def _unwatch_wire(self) -> None:
        if self._wire is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._watcher.unwatch(self._wire.fileno())
            self._wire.close()
            self._wire = None


def _journal_fields(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """A saver's fields beside those that every record has; its attempt is the save's, which may be an older one."""
    renamed = {"attempt": "save_attempt"}
    named = {renamed.get(str(k), str(k)): v for k, v in fields.items()}
    return {k: v for k, v in named.items() if k not in ("v", "type", "type_", "at_unix_s", "at_s", "node")}
