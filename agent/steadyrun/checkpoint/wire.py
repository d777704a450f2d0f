"""The messages between ranks, the node's saver and its agent: one JSON object per line, descriptors beside it.

A rank talks to the saver over a unix stream socket, the agent over a socketpair that the saver inherits. Whoever reads
ignores fields that it does not know.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from steadyrun.core.errors import SteadyrunError

__all__ = ["AGENT_OPS", "RANK_OPS", "SAVER_OPS", "Wire", "WireClosedError"]

# rank -> saver. Fields in brackets.
RANK_OPS: Final[Mapping[str, str]] = {
    "hello": "the first message [rank, local_rank, world_size, attempt, run_id, pid, options]; answered with 'welcome'",
    "layout": "a new structure of the state [layout: JSON text, blob_bytes]; answered with 'arena' or 'refused'",
    "staged": "a slot is sealed [slot, generation: grows with every save of the attempt, equal on all ranks for the "
    "same save, step, tiers: list of names, stall_s]; no answer, 'save' events follow",
    "skipped": "this rank did not take part in a save that was due [step, generation, why]",
    "restore": "where to resume from [digest: of the layout or null where that is not known yet, rejected: list of "
    "[source, step, why], local: whether memory may be used, round: 0 for the first question of this process, 1 for "
    "the next; the same when it is only repeated]; 'choice' once all ranks of the attempt have asked",
    "agree": "gather a JSON value over all ranks [key: used once in an attempt, value]; answered with 'agreed' [key, "
    "values: list by rank]",
    "started": "training goes on at [step]; clears what was kept for the restore",
    "stepped": "at the end of training or on close [step]",
    "flush": "make the newest complete snapshot durable [timeout_s]; answered with 'flushed' [step or null, why]",
    "bye": "this rank needs nothing any more",
}
# saver -> rank
SAVER_OPS: Final[Mapping[str, str]] = {
    "welcome": "[version, root]",
    "arena": "the rank's snapshot memory [slots, note], with one descriptor",
    "refused": "no snapshot memory [why, direct: true: all ranks of the job are told so, and write directly; false: "
    "only this rank, which says 'skipped' with that reason until its layout changes]",
    "save": "how a save is doing [step, generation, state: SaveState value, why, seconds]",
    "choice": "[source: memory|peer|folder|none, step, attempt, slot, layout: JSON text of what is in it, path, "
    "skip_batches, rejected: list of [source, step, why], step -1 where nothing could be looked at, why]; source peer: "
    "the saver has put it into the slot already",
    "agreed": "[key, values]",
    "flushed": "[step, why]",
}
# agent -> saver, and the saver's own messages to the agent
AGENT_OPS: Final[Mapping[str, str]] = {
    "attempt": "ranks of an attempt are being started [attempt, world_size, group_rank, group_world_size, "
    "ranks: global ranks by local rank, host, port: the attempt's worker store, node, rollback: {to, skip_batches, id} "
    "from --ft-rollback or null: as a request of rollback.py, once per id]",
    "failed": "the attempt failed [attempt, step: newest or null, signature: equal for the same fault, empty where the "
    "state cannot be to blame, falls_back: quarantine what the attempt had loaded]",
    "restored": "saver -> agent: all ranks of an attempt have loaded [attempt, step, older: how many older complete "
    "checkpoints there are]",
    "flush": "make the newest complete snapshot durable now [limit_s]; answered with 'flushed'",
    "save": "have all ranks save as soon as they can hear of it, at most [limit_s]; answered with 'saved' once that is "
    "in memory on all of them",
    "leave": "finish what is being written and end [limit_s]",
    "keep": "saver -> agent: hold this descriptor for the next saver [name], with one descriptor",
    "drop": "saver -> agent: let go of it [name]",
    "kept": "agent -> saver, at its start: [name], with one descriptor, for each one held; then 'ready'",
    "ready": "agent -> saver: all kept descriptors have been sent",
    "restart": "saver -> agent: restart the ranks [why], for a rollback request found in the root",
    "note": "saver -> agent: say this to the user [text]",
    "journal": "saver -> agent: write this record [type, fields]",
    "flushed": "saver -> agent: [step or null, why]",
    "saved": "saver -> agent: [step or null, why]",
}

_MOST_BYTES: Final = 256 << 20
_MOST_FDS: Final = 8
_MOST_WAITING_BYTES: Final = 64 << 20


class WireClosedError(SteadyrunError):
    """The other side is gone."""


class Wire:
    """One end of a connection. For one thread at a time; ``send`` blocks while the other side does not read."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self._fds: deque[int] = deque()
        self._waiting: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._waiting_bytes = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        self._sock.settimeout(timeout_s)

    def send(self, op: str, fds: Sequence[int] = (), **fields: Any) -> None:
        """Raises WireClosedError when nobody is there, TimeoutError when the other side does not read."""
        if fds:
            fields["fds"] = len(fds)
        data = memoryview(json.dumps({"op": op, **fields}, separators=(",", ":"), default=str).encode() + b"\n")
        try:
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
                data = data[self._sock.sendmsg([data], rights) :]
            self._sock.sendall(data)
        except TimeoutError:
            raise
        except OSError as e:
            raise WireClosedError(f"cannot send {op!r}: {e.strerror or e}") from e

    def receive(self) -> dict[str, Any]:
        """The next message, waiting as long as ``settimeout`` allows; its descriptors are in ``message["fds"]``.

        Raises:
            WireClosedError: the other side has closed, or sends what is no message.
            TimeoutError: nothing came in time; what has come of a message is kept.
        """
        while True:
            message = self._next()
            if message is not None:
                return message
            self._read(0)

    def poll(self) -> list[dict[str, Any]]:
        """The messages that are there, without waiting. Raises WireClosedError once all of them were handed out."""
        timeout_s = self._sock.gettimeout()
        # With a timeout set, Python waits for the socket by itself before it calls recvmsg, whatever the flags say.
        self._sock.settimeout(0.0)
        try:
            return self._poll()
        finally:
            self._sock.settimeout(timeout_s)

    def _poll(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        while True:
            message = self._next()
            if message is not None:
                out.append(message)
                continue
            try:
                self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return out
            except WireClosedError:
                if out:
                    return out
                raise

    def post(self, op: str, fds: Sequence[int] = (), **fields: Any) -> bool:
        """Like ``send``, but never waits: what the socket does not take is kept, in order, for ``flush``.

        Descriptors are copied, so that the caller may close its own at once.

        Returns:
            Whether everything is out.

        Raises:
            WireClosedError: nobody is there, or more than ``_MOST_WAITING_BYTES`` wait to be read.
        """
        if fds:
            fields["fds"] = len(fds)
        data = json.dumps({"op": op, **fields}, separators=(",", ":"), default=str).encode() + b"\n"
        self._waiting_bytes += len(data)
        if self._waiting_bytes > _MOST_WAITING_BYTES:
            raise WireClosedError(f"the other side does not read: {self._waiting_bytes:,} bytes wait for it")
        self._waiting.append((memoryview(data), tuple(os.dup(fd) for fd in fds)))
        return self.flush()

    def flush(self) -> bool:
        """Hand over what ``post`` has kept, without waiting; whether everything is out. Raises WireClosedError."""
        while self._waiting:
            data, fds = self._waiting[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
            try:
                sent = self._sock.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as e:
                raise WireClosedError(f"cannot send: {e.strerror or e}") from e
            for fd in fds:  # they went with the first byte
                os.close(fd)
            self._waiting_bytes -= sent
            if sent == len(data):
                self._waiting.popleft()
            else:
                self._waiting[0] = (data[sent:], ())
        return True

    def _read(self, flags: int) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(
                1 << 20, socket.CMSG_SPACE(_MOST_FDS * 4), flags | socket.MSG_CMSG_CLOEXEC
            )
        except (TimeoutError, BlockingIOError):
            raise
        except OSError as e:
            raise WireClosedError(f"cannot receive: {e.strerror or e}") from e
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._fds.extend(numbers)
        if not data:
            raise WireClosedError("the other side has closed the connection")
        self._received += data
        if len(self._received) > _MOST_BYTES:
            raise WireClosedError(f"a message of more than {_MOST_BYTES:,} bytes")

    def _next(self) -> dict[str, Any] | None:
        end = self._received.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            message = json.loads(line)
        except ValueError as e:
            raise WireClosedError(f"what came is no message: {e}") from e
        if not isinstance(message, dict):
            raise WireClosedError("what came is no message")
        count = int(message.get("fds", 0))
        message["fds"] = [self._fds.popleft() for _ in range(min(count, len(self._fds)))]
        return message

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        for _, fds in self._waiting:
            for fd in fds:
                os.close(fd)
        self._waiting.clear()
        self._sock.close()
