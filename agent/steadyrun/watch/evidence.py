"""Answers to the agent and to ``steadyctl`` over a unix socket: one line of JSON in, one out, per connection.

- ``{"cmd": "sections"}``: ``{"sections": [{"lane", "name", "age_s"}], "step"}``, outermost first;
- ``{"cmd": "stacks"}``: ``{"stacks": [{"thread", "is_main", "frames": [{"file", "line", "function"}]}]}``, newest call
  first;
- ``{"cmd": "groups"}``: what ``flight.json`` says, fresh;
- ``{"cmd": "flight", "stacks": bool}``: ``{"files", "took_s", "taken_at_unix_s", "missing"}``, see ``FlightWatch``;
- ``{"cmd": "inject", "fault": text}``: ``{"answers": [text]}``;
- ``leaves``, ``capture`` and ``captured``: see ``core.integrity``.

Anything wrong is answered with ``{"error": text}``. The thread is started by ``_thread`` and is none of the script's:
``threading`` does not know it, no signal is delivered to it, and it only runs when asked and for a look at the process
groups once a second. It needs the interpreter's lock; a rank that holds it does not answer, and faulthandler's signal
and ``flight.sock`` are the ways then.
"""

from __future__ import annotations

import _socket
import os
import sys

# The C module: ``signal`` wraps each number in an enum, and importing enum takes longer than all of this.
from _signal import SIG_BLOCK, SIG_SETMASK, pthread_sigmask, valid_signals  # type: ignore[import-not-found]
from _thread import get_ident, start_new_thread

from steadyrun.core.sockets import reachable
from steadyrun.watch.jsontext import parse, render

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from steadyrun.watch.flight import FlightWatch
    from steadyrun.watch.marks import Marks

__all__ = ["EvidenceServer", "thread_stacks"]

_REQUEST_BYTES = 1 << 16
_CLIENT_S = 2.0
_LOOK_S = 1.0
_FRAMES = 200


class EvidenceServer:
    """The socket ``evidence.sock`` in the rank's folder and the thread behind it.

    Args:
        inject: takes the text of a fault, returns what to answer; called in the server's thread.
        answered: called after an answer to ``inject`` was sent: only now may the fault strike.
        others: answers commands that are not known here; None to those that it does not know either.
    """

    def __init__(
        self,
        rank_dir: str,
        marks: Marks,
        inject: Callable[[str], tuple[str, ...]],
        answered: Callable[[], None],
        flight: FlightWatch,
        others: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda request: None,
    ) -> None:
        self._rank_dir = rank_dir
        self._marks = marks
        self._inject = inject
        self._answered = answered
        self._flight = flight
        self._others = others
        self._main = get_ident()
        self._listening: Any = None
        self._is_started = False

    def start(self) -> None:
        """Start the thread, once; call it in the main thread. Never raises; without thread or socket nobody answers."""
        if self._is_started:
            return
        self._is_started = True
        try:
            # Here, and not in the thread: a fork of the main thread then always finds it, to give it up in the child.
            self._listening = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            with_signals_blocked(lambda: start_new_thread(self._serve, (self._listening,)))
        except (OSError, RuntimeError):
            self.forked()

    def forked(self) -> None:
        """Give up the socket; in a forked child that is a copy, and the parent goes on answering."""
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.close()

    def _serve(self, listening: Any) -> None:
        try:
            self._listen(listening)
            while self._listening is not None:
                self._flight.look()
                try:
                    fd, _ = listening._accept()
                except TimeoutError:
                    continue
                client = _socket.socket(fileno=fd)
                try:
                    self._answer(client)
                finally:
                    client.close()
        except Exception:  # the script must not see an error of ours; the agent has other ways
            self.forked()

    def _listen(self, listening: Any) -> None:
        path, folder = reachable(self._rank_dir, "evidence.sock")
        try:
            if os.path.lexists(path):
                os.unlink(path)
            listening.bind(path)
            os.chmod(path, 0o600)  # not by umask, which the whole process shares; the folder is 0700
        finally:
            if folder >= 0:
                os.close(folder)
        listening.listen(4)
        listening.settimeout(_LOOK_S if self._flight.is_on else None)

    def _answer(self, client: Any) -> None:
        try:
            client.settimeout(_CLIENT_S)
            peer_uid = int.from_bytes(
                client.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)[4:8], sys.byteorder
            )
            if peer_uid not in (0, os.geteuid()):
                return
            try:
                reply = self._reply(parse(_read_line(client)))
            except Exception as e:
                reply = {"error": f"{type(e).__name__}: {e}" if not str(e).startswith("cannot") else str(e)}
            client.sendall(render(reply).encode() + b"\n")
        except OSError:
            return
        finally:
            self._answered()

    def _reply(self, request: Any) -> dict[str, Any]:
        command = request.get("cmd") if isinstance(request, dict) else None
        if command == "sections":
            found = [{"lane": lane, "name": name, "age_s": age_s} for lane, name, age_s in self._marks.open_sections()]
            return {"sections": found, "step": self._marks.last_step()}
        if command == "stacks":
            return {"stacks": thread_stacks(self._main, get_ident())}
        if command == "groups":
            return self._flight.live()
        if command == "flight":
            return self._flight.dump(stacks=bool(request.get("stacks")))
        if command == "inject":
            return {"answers": self._inject(str(request.get("fault", "")))}
        answer = self._others(request) if isinstance(request, dict) else None
        if answer is not None:
            return answer
        return {"error": f"cannot answer {command!r}: the commands are sections, stacks, groups, flight and inject"}


def with_signals_blocked(start: Callable[[], object]) -> None:
    """Call what starts threads; a signal that the kernel gave to one would not interrupt the main thread's call."""
    mask = pthread_sigmask(SIG_BLOCK, valid_signals())
    try:
        start()
    finally:
        pthread_sigmask(SIG_SETMASK, mask)


def _read_line(client: Any) -> str:
    received = b""
    while b"\n" not in received and len(received) < _REQUEST_BYTES:
        chunk = client.recv(4096)
        if not chunk:
            break
        received += chunk
    return received.decode("utf-8", "replace")


def thread_stacks(main: int, without: int) -> list[dict[str, Any]]:
    """All threads' stacks as ``ThreadStack`` has them, the main thread first, the thread *without* left out."""
    threading = sys.modules.get("threading")
    names = {i: t.name for i, t in dict(getattr(threading, "_active", {})).items()}
    stacks = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident == without:
            continue
        frames: list[dict[str, Any]] = []
        at: Any = frame
        while at is not None and len(frames) < _FRAMES:
            frames.append({"file": at.f_code.co_filename, "line": at.f_lineno or 0, "function": at.f_code.co_name})
            at = at.f_back
        name = names.get(ident, "MainThread" if ident == main else f"thread {ident:#x}")
        stacks.append({"thread": name, "is_main": ident == main, "frames": frames})
    return stacks
