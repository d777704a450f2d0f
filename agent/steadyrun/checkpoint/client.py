"""A rank's connection to its node's saver; outlives a saver that dies and is started again.

For the thread that trains. Nothing here waits but what says so: a save costs one ``sendall`` of a short line.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from steadyrun.checkpoint.layout import Layout
from steadyrun.checkpoint.saves import SaveState
from steadyrun.checkpoint.wire import Wire, WireClosedError
from steadyrun.core.errors import SteadyrunError

__all__ = ["Granted", "SaveRecord", "SaverGoneError", "SaverLink"]

CONNECT_LIMIT_S: Final = 20.0
_SEND_LIMIT_S: Final = 5.0
_AGAIN_S: Final = 0.5
_GIVE_UP_S: Final = 30.0
_KEPT_RECORDS: Final = 256
_HIGH_FD: Final = 200


class SaverGoneError(SteadyrunError):
    """There is no saver to talk to: the rank must write by itself."""


@dataclass(slots=True)
class SaveRecord:
    """How one save is doing, as far as this rank has heard."""

    step: int
    generation: int
    state: SaveState = SaveState.ACCEPTED
    why: str = ""
    was_in_memory: bool = False
    seconds: float | None = None

    @property
    def is_final(self) -> bool:
        return self.state in (SaveState.DURABLE, SaveState.SKIPPED, SaveState.FAILED)

    def move(self, state: SaveState, why: str = "", seconds: float | None = None) -> None:
        """A late word never takes back a final one."""
        if self.is_final:
            return
        self.state, self.why, self.seconds = state, why, seconds
        self.was_in_memory = self.was_in_memory or state in (SaveState.IN_MEMORY, SaveState.DURABLE)


@dataclass(frozen=True, slots=True)
class Granted:
    """Snapshot memory (a descriptor that is the caller's now), or why there is none.

    *direct*: all ranks of the job are refused, so that they can write by themselves, which they do together.
    """

    fd: int = -1
    slots: int = 0
    note: str = ""
    direct: bool = False


@dataclass(slots=True)
class _Sent:
    """What a saver that starts again must be told again."""

    layout: Layout | None = None
    blob_bytes: int = 0
    staged: dict[int, dict[str, Any]] = field(default_factory=dict)  # by slot


class SaverLink:
    """One rank's end.

    Attributes:
        records: saves of this rank by generation, the last few hundred.
    """

    def __init__(self, path: str, hello: Mapping[str, Any]) -> None:
        self._path = path
        self._hello = dict(hello)
        self._wire: Wire | None = None
        self._sent = _Sent()
        self._granted: list[Granted] = []
        self._answers: dict[str, list[dict[str, Any]]] = {}
        self._lost_s: float | None = None
        self._tried_s = -1e9
        self.records: dict[int, SaveRecord] = {}

    # -- connecting ----------------------------------------------------------------------------------------------------
    def connect(self, limit_s: float = CONNECT_LIMIT_S) -> Mapping[str, Any]:
        """Say hello and wait for the saver's welcome: 0.2 s where it has to be started first.

        Raises:
            SaverGoneError: nobody listens, or nobody answers within *limit_s*.
        """
        self._dial()
        return self.ask("welcome", limit_s)

    def _dial(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_SEND_LIMIT_S)
            connection.connect(self._path)
        except OSError as e:
            connection.close()
            raise SaverGoneError(f"cannot reach the saver at {self._path}: {e.strerror or e}") from e
        with contextlib.suppress(OSError):  # the script finds the descriptors that it would have without us
            high = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
            connection.close()
            connection = socket.socket(fileno=high)
            connection.settimeout(_SEND_LIMIT_S)
        self._wire = Wire(connection)
        try:
            self._wire.send("hello", **self._hello)
        except (WireClosedError, TimeoutError) as e:
            self._lose()
            raise SaverGoneError(f"cannot talk to the saver: {e}") from e

    def _lose(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        if self._lost_s is None:
            self._lost_s = time.monotonic()

    def _reconnect(self) -> bool:
        """Try to reach a saver that was started again, and tell it what the last one knew. Waits for nothing."""
        now_s = time.monotonic()
        if now_s - self._tried_s < _AGAIN_S:
            return False
        self._tried_s = now_s
        try:
            self._dial()
        except SaverGoneError:
            return False
        self._lost_s = None
        sent = self._sent
        if sent.layout is not None:
            self._send("layout", layout=sent.layout.to_json(), blob_bytes=sent.blob_bytes, again=True)
        for fields in sent.staged.values():
            self._send("staged", **fields)
        return self._wire is not None

    @property
    def is_given_up(self) -> bool:
        """The saver has been away for so long that it will not come back."""
        return self._lost_s is not None and time.monotonic() - self._lost_s > _GIVE_UP_S

    def _send(self, op: str, **fields: Any) -> bool:
        if self._wire is None and not self._reconnect():
            return False
        assert self._wire is not None
        try:
            self._wire.send(op, **fields)
        except (WireClosedError, TimeoutError):
            self._lose()
            return False
        return True

    # -- messages ------------------------------------------------------------------------------------------------------
    def poll(self) -> None:
        """Hear what the saver has said, without waiting."""
        if self._wire is None and not self._reconnect():
            return
        assert self._wire is not None
        try:
            for message in self._wire.poll():
                self._take(message)
        except WireClosedError:
            self._lose()

    def _take(self, message: dict[str, Any]) -> None:
        fds = message.get("fds") or []
        match message.get("op"):
            case "arena" if fds:
                self._granted.append(Granted(fds.pop(0), int(message.get("slots", 0)), str(message.get("note", ""))))
            case "refused":
                self._granted.append(Granted(note=str(message.get("why", "")), direct=bool(message.get("direct"))))
            case "save":
                self._on_save(message)
            case str(op):
                self._answers.setdefault(op, []).append(message)
        for fd in fds:
            os.close(fd)

    def _on_save(self, message: Mapping[str, Any]) -> None:
        record = self.records.get(int(message.get("generation", -1)))
        try:
            state = SaveState(message.get("state"))
        except ValueError:
            return
        if record is None:
            return
        seconds = message.get("seconds")
        record.move(state, str(message.get("why") or ""), None if seconds is None else float(seconds))
        if record.is_final:
            for slot, fields in list(self._sent.staged.items()):
                if fields["generation"] == record.generation:
                    del self._sent.staged[slot]

    def _listen(self, limit_s: float) -> None:
        """Take the next message, or wait for a saver that is away; *limit_s* and half a second at most."""
        limit_s = min(max(limit_s, 0.001), 0.5)
        if self._wire is None:
            time.sleep(min(limit_s, 0.05))
            return
        try:
            self._wire.settimeout(limit_s)
            self._take(self._wire.receive())
        except TimeoutError:
            return
        except WireClosedError:
            self._lose()
        finally:
            if self._wire is not None:
                self._wire.settimeout(_SEND_LIMIT_S)

    def ask(self, answer: str, limit_s: float, op: str | None = None, **fields: Any) -> dict[str, Any]:
        """Send *op*, if given, and wait for *answer*; a saver that is started again meanwhile is asked again.

        Raises:
            SaverGoneError: no answer within *limit_s*.
        """
        deadline_s = time.monotonic() + limit_s
        is_sent = op is None
        while True:
            if op is not None and (self._wire is None or not is_sent):
                is_sent = self._send(op, **fields)
            found = self._answers.get(answer)
            if found:
                return found.pop(0)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise SaverGoneError(f"the saver did not answer {op or answer!r} within {limit_s:.0f} s")
            self._listen(left_s)

    # -- memory --------------------------------------------------------------------------------------------------------
    def send_layout(self, layout: Layout, blob_bytes: int) -> None:
        """Ask for memory; ``granted`` gives the answer."""
        self._sent = _Sent(layout, blob_bytes)
        self._send("layout", layout=layout.to_json(), blob_bytes=blob_bytes)

    def granted(self, wait_s: float = 0.0) -> Granted | None:
        """The answer to the newest ``send_layout``, once. None: not there yet."""
        deadline_s = time.monotonic() + wait_s
        self.poll()
        while not self._granted and time.monotonic() < deadline_s:
            self._listen(deadline_s - time.monotonic())
            self.poll()
        if not self._granted:
            return None
        newest = self._granted.pop()
        for old in self._granted:  # of a layout that has changed since, or of a saver that was started again
            if old.fd >= 0:
                os.close(old.fd)
        self._granted.clear()
        return newest

    # -- saves ---------------------------------------------------------------------------------------------------------
    def new_record(self, step: int, generation: int) -> SaveRecord:
        record = self.records[generation] = SaveRecord(step, generation)
        if len(self.records) > _KEPT_RECORDS:
            for old in list(self.records)[: len(self.records) - _KEPT_RECORDS]:
                del self.records[old]
        return record

    def send_staged(self, record: SaveRecord, slot: int, tiers: Sequence[str], stall_s: float) -> None:
        """The slot is sealed; where the saver is away at the moment, it is told once it is back."""
        fields = {
            "slot": slot,
            "generation": record.generation,
            "step": record.step,
            "tiers": list(tiers),
            "stall_s": round(stall_s, 6),
        }
        # The link that is made anew repeats what is noted here, so it must not be noted before it is sent.
        self._send("staged", **fields)
        self._sent.staged[slot] = fields

    def send_skipped(self, record: SaveRecord) -> None:
        self._send("skipped", step=record.step, generation=record.generation, why=record.why)

    def tell(self, op: str, **fields: Any) -> None:
        """One of the messages that nobody answers."""
        self._send(op, **fields)

    def wait_for(self, record: SaveRecord, limit_s: float, until_in_memory: bool = False) -> bool:
        """Wait until the save is final (or in memory); False when *limit_s* passes first."""
        deadline_s = time.monotonic() + limit_s
        while True:
            self.poll()
            if record.is_final or (until_in_memory and record.was_in_memory):
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self.is_given_up:
                return False
            self._listen(left_s)

    def close(self) -> None:
        if self._wire is not None:
            with contextlib.suppress(WireClosedError, TimeoutError):
                self._wire.send("bye")
        for granted in self._granted:
            if granted.fd >= 0:
                os.close(granted.fd)
        self._granted.clear()
        if self._wire is not None:
            self._wire.close()
            self._wire = None
