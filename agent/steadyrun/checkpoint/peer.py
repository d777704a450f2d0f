"""Copies of snapshots in the memory of another node, over TCP between the savers of two nodes.

The saver of each node runs a ``PeerServer`` over a ``ForeignStore``, and sends each snapshot of its ranks to its
``partner`` with ``push``. A node that has replaced another one gets the snapshots of its ranks back with ``fetch``.
No rank takes part.

Every part (the objects, then entry after entry) is compared on arrival with the digest that its *sender's* saver took
when the snapshot was sealed, so that a copy is never worse than its original; a damaged part is named. A transfer that
breaks goes on with the part that was under way. A snapshot counts as held only when all of it is there: until then the
one before it stays.

Both sides prove by HMAC that they know the run's token before anything else is read, and every message carries an HMAC.
Tensor bytes are compared with xxh3 only and are not encrypted: the network between the nodes is taken to be the job's.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from steadyrun.checkpoint.arena import (
    Arena,
    ArenaError,
    BlobsTooLargeError,
    Slot,
    SlotBusyError,
    SlotState,
    SlotView,
    choose_slot,
    memory_needed_bytes,
)
from steadyrun.checkpoint.checksums import Xxh3
from steadyrun.checkpoint.choose import Snapshot
from steadyrun.checkpoint.layout import Layout, LayoutError
from steadyrun.checkpoint.saves import TierName
from steadyrun.checkpoint.shardfile import RateLimit
from steadyrun.checkpoint.transfer import NotAgainError, TransferError, Tries, retried
from steadyrun.core.errors import SteadyrunError

__all__ = ["ForeignStore", "Header", "PeerError", "PeerServer", "Pushed", "fetch", "partner", "push"]

_MAGIC: Final = b"strdyPR1"
_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_LENGTH: Final = struct.Struct("!I")
_MOST_MESSAGE_BYTES: Final = 256 << 20  # a layout of a million entries
_PIECE_BYTES: Final = 4 << 20
_IDLE_S: Final = 30.0  # longest time without progress
_GREETING_S: Final = 5.0  # for who has not proved anything yet


class PeerError(SteadyrunError):
    """A snapshot could not be sent or fetched; nothing that was held before is lost."""


# -- who sends to whom -------------------------------------------------------------------------------------------------
def partner(group_rank: int, group_world_size: int, jump: int = 1, domains: Sequence[str] | None = None) -> int | None:
    """The node that keeps the copies of node *group_rank*; each node keeps those of exactly one other.

    Args:
        jump: how many nodes further, where that leads to another failure domain for every node.
        domains: what each node fails together with (rack, switch, power), by group rank.

    Returns:
        None when there is only one node. In another domain whenever no domain has more than half of the nodes.
    """
    if not 0 <= group_rank < group_world_size:
        raise ValueError(f"group_rank={group_rank} is not between 0 and {group_world_size - 1}")
    if domains is not None and len(domains) != group_world_size:
        raise ValueError(f"{len(domains)} domains for {group_world_size} nodes")
    if group_world_size == 1:
        return None
    step = jump % group_world_size or 1
    if domains is None or _leads_elsewhere(domains, step):
        return (group_rank + step) % group_world_size
    # Sorted by domain and moved on by the size of the largest: that leaves every domain, unless one is too large.
    order = sorted(range(group_world_size), key=lambda node: (domains[node], node))
    largest = max(domains.count(d) for d in set(domains))
    step = largest % group_world_size or step
    return order[(order.index(group_rank) + step) % group_world_size]


def _leads_elsewhere(domains: Sequence[str], step: int) -> bool:
    return all(d != domains[(i + step) % len(domains)] for i, d in enumerate(domains))


# -- what is sent ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Header:
    """A snapshot that is sent.

    Attributes:
        layout: its digest.
        blob_bytes: room for objects in the slots of its arena.
        blob_lengths: of the objects, in the layout's order.
        digests: of every entry and, last, of the objects, as ``Slot.digests`` has them.
    """

    rank: int
    step: int
    attempt: int
    generation: int
    created_unix_s: float
    layout: str
    blob_bytes: int
    blob_lengths: tuple[int, ...]
    digests: tuple[str, ...]

    @property
    def order(self) -> tuple[int, int]:
        return (self.attempt, self.generation)

    @classmethod
    def of(cls, arena: Arena, slot: Slot) -> Header:
        """Of a sealed slot that is held. Raises ArenaError when its digests are missing or damaged."""
        view = slot.view()
        digests = slot.digests()
        if any(d is None for d in digests):
            slot.compute_digests()
            digests = slot.digests()
        return cls(
            arena.layout.rank,
            view.step,
            view.attempt,
            view.generation,
            view.created_unix_s,
            arena.layout.digest(),
            arena.blob_bytes,
            tuple(len(b) for b in slot.blobs()),
            tuple(str(d) for d in digests),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Header:
        """Raises ValueError."""
        try:
            out = cls(
                int(data["rank"]),
                int(data["step"]),
                int(data["attempt"]),
                int(data["generation"]),
                float(data["created_unix_s"]),
                str(data["layout"]),
                int(data["blob_bytes"]),
                tuple(int(n) for n in data["blob_lengths"]),
                tuple(str(d) for d in data["digests"]),
            )
        except (TypeError, KeyError, ValueError) as e:
            raise ValueError(f"what came is no header of a snapshot: {type(e).__name__}: {e}") from e
        if min(out.rank, out.step, out.attempt, out.generation, out.blob_bytes, *out.blob_lengths) < 0:
            raise ValueError("what came is no header of a snapshot: a number is negative")
        if any(len(d) != 2 * 16 or not set(d) <= set("0123456789abcdef") for d in out.digests):
            raise ValueError("what came is no header of a snapshot: a digest is none")
        return out


@dataclass(frozen=True, slots=True)
class Pushed:
    """*was_there*: the partner had it already. *tries*: connections that it took."""

    size_bytes: int
    elapsed_s: float
    tries: int = 1
    was_there: bool = False


# -- connections -------------------------------------------------------------------------------------------------------
class _ClosedError(OSError):
    """The other side has gone."""


class _RefusedError(NotAgainError):
    """The other side does not want to, and will not later."""


class _Channel:
    """A connection whose two ends know the token. Messages are counted and carry an HMAC; raw bytes go between them."""

    def __init__(self, sock: socket.socket, key: bytes, is_server: bool) -> None:
        self._sock = sock
        self._key = key
        self._names = (b"server", b"client") if is_server else (b"client", b"server")
        self._sent = self._received = 0

    def send(self, **fields: Any) -> None:
        body = json.dumps(fields, separators=(",", ":")).encode()
        if len(body) > _MOST_MESSAGE_BYTES:
            raise _RefusedError(f"a message of {len(body):,} bytes is too large")
        mac = self._mac(self._names[0], self._sent, body)
        self._sent += 1
        self._sock.sendall(_LENGTH.pack(len(body)) + mac)
        self.send_bytes(memoryview(body))

    def receive(self) -> dict[str, Any]:
        """Raises OSError when the other side is gone or silent, or sends what is not from it."""
        head = bytearray(_LENGTH.size + _MAC_BYTES)
        self.receive_into(memoryview(head))
        (length,) = _LENGTH.unpack_from(head)
        if length > _MOST_MESSAGE_BYTES:
            raise _ClosedError(f"a message of {length:,} bytes is too large")
        body = bytearray(length)
        self.receive_into(memoryview(body))
        if not hmac.compare_digest(self._mac(self._names[1], self._received, bytes(body)), head[_LENGTH.size :]):
            raise _ClosedError("a message was changed on its way")
        self._received += 1
        try:
            message = json.loads(body)
        except ValueError as e:
            raise _ClosedError(f"what came is no message: {e}") from e
        if not isinstance(message, dict):
            raise _ClosedError("what came is no message")
        return message

    def send_bytes(self, data: memoryview) -> None:
        for at in range(0, len(data), _PIECE_BYTES):  # the time limit is for each
            self._sock.sendall(data[at : at + _PIECE_BYTES])

    def receive_into(self, data: memoryview) -> None:
        _receive_into(self._sock, data)

    def _mac(self, name: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, name + number.to_bytes(8, "big") + body, "sha256")


def _receive_into(sock: socket.socket, data: memoryview) -> None:
    while data:
        count = sock.recv_into(data)
        if count == 0:
            raise _ClosedError("the other side has closed the connection")
        data = data[count:]


def _receive(sock: socket.socket, size_bytes: int) -> bytes:
    out = bytearray(size_bytes)
    _receive_into(sock, memoryview(out))
    return bytes(out)


def _greet(sock: socket.socket, token: bytes) -> _Channel:
    """As the server. Raises OSError, also for one that does not know the token."""
    ours = os.urandom(_NONCE_BYTES)
    sock.sendall(_MAGIC + ours)
    theirs = _receive(sock, _NONCE_BYTES)
    proof = _receive(sock, _MAC_BYTES)
    if not hmac.compare_digest(proof, hmac.digest(token, b"client" + ours + theirs, "sha256")):
        sock.sendall(b"\0")
        raise _ClosedError("the other side does not know the token")
    sock.sendall(b"\1" + hmac.digest(token, b"server" + theirs + ours, "sha256"))
    return _Channel(sock, hmac.digest(token, b"session" + ours + theirs, "sha256"), is_server=True)


def _introduce(sock: socket.socket, token: bytes) -> _Channel:
    """As the client."""
    if _receive(sock, len(_MAGIC)) != _MAGIC:
        raise _RefusedError("what answers there is no saver of this version")
    theirs = _receive(sock, _NONCE_BYTES)
    ours = os.urandom(_NONCE_BYTES)
    sock.sendall(ours + hmac.digest(token, b"client" + theirs + ours, "sha256"))
    if _receive(sock, 1) != b"\1":
        raise _RefusedError("it has another token: it belongs to another run")
    if not hmac.compare_digest(_receive(sock, _MAC_BYTES), hmac.digest(token, b"server" + ours + theirs, "sha256")):
        raise _RefusedError("it does not know the token: it belongs to another run")
    return _Channel(sock, hmac.digest(token, b"session" + theirs + ours, "sha256"), is_server=False)


@contextmanager
def _connected(host: str, port: int, token: bytes, idle_s: float) -> Iterator[_Channel]:
    with socket.create_connection((host, port), timeout=min(idle_s, 10.0)) as sock:
        sock.settimeout(idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield _introduce(sock, token)


# -- the stream of a snapshot ------------------------------------------------------------------------------------------
def _send_parts(
    channel: _Channel,
    arena: Arena,
    slot: Slot,
    parts: Sequence[int] | None,
    rate: RateLimit | None,
    should_stop: Callable[[], bool],
) -> int:
    """Part 0 is the objects, part i + 1 entry i; None: all. Returns the bytes sent."""
    entries = arena.layout.entries
    sent_bytes = 0
    for part in range(len(entries) + 1) if parts is None else parts:
        if not 0 <= part <= len(entries):
            raise _RefusedError(f"there is no part {part}")
        for view in slot.blobs() if part == 0 else [slot.payload(entries[part - 1])]:
            for at in range(0, len(view), _PIECE_BYTES):
                if should_stop():
                    raise _RefusedError("it was stopped")
                piece = view[at : at + _PIECE_BYTES]
                if rate is not None:
                    rate.wait_for(len(piece))
                channel.send_bytes(piece)
                sent_bytes += len(piece)
    return sent_bytes


class _Arrival:
    """A snapshot on its way into a slot, over as many connections as it takes."""

    def __init__(self, header: Header, layout: Layout, slot: Slot) -> None:
        """Begins in the slot. Raises SlotBusyError."""
        self.header = header
        self.slot = slot
        self._layout = layout
        self._right: set[int] = set()  # parts that are there and as they were
        slot.begin(header.step, header.attempt, header.generation, header.created_unix_s)

    def missing(self) -> list[int] | None:
        """Parts that have to be sent; None: all."""
        if not self._right:
            return None
        return [part for part in range(len(self._layout.entries) + 1) if part not in self._right]

    def receive(self, channel: _Channel) -> None:
        """Take the missing parts.

        Raises:
            OSError: the connection broke; the parts that are complete stay.
            _DamagedPartError: all came, and one or more are not what its sender's saver saw.
            ArenaError: the objects do not fit.
        """
        damaged: list[str] = []
        missing = self.missing()
        for part in range(len(self._layout.entries) + 1) if missing is None else missing:
            name = self._receive_objects(channel) if part == 0 else self._receive_entry(channel, part - 1)
            if name:
                damaged.append(name)
            else:
                self._right.add(part)
        if damaged:
            more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            raise _DamagedPartError(f"{damaged[0]}{more}")

    def _receive_objects(self, channel: _Channel) -> str:
        blobs: list[bytes | memoryview] = []
        for length in self.header.blob_lengths:
            blob = memoryview(bytearray(length))
            channel.receive_into(blob)
            blobs.append(blob)
        self.slot.write_blobs(blobs)
        number = len(self._layout.entries)
        self.slot.compute_digests([number])
        return "" if self.slot.digest(number) == self.header.digests[number] else "the block of objects"

    def _receive_entry(self, channel: _Channel, index: int) -> str:
        entry = self._layout.entries[index]
        view, state = self.slot.payload(entry), Xxh3()
        for at in range(0, len(view), _PIECE_BYTES):
            piece = view[at : at + _PIECE_BYTES]
            channel.receive_into(piece)
            state.update(piece)
        return "" if state.digest() == self.header.digests[index] else f"{entry.key} at {list(entry.offsets)}"

    def seal(self) -> None:
        self.slot.record_digests(dict(enumerate(self.header.digests)))
        self.slot.seal()


class _DamagedPartError(SteadyrunError):
    """Names the part."""


def _check(header: Header, layout: Layout, room_bytes: int) -> str:
    """Why they do not belong together; empty when they do."""
    if (header.layout, header.rank) != (layout.digest(), layout.rank):
        return "the layout is another one"
    if len(header.digests) != len(layout.entries) + 1 or len(header.blob_lengths) not in (0, len(layout.objects)):
        return "the header does not fit the layout"
    if layout.objects and not header.blob_lengths:
        return "its objects are missing"
    if sum(header.blob_lengths) + 8 * len(header.blob_lengths) > room_bytes:
        return f"its objects need {sum(header.blob_lengths):,} bytes and there is room for {room_bytes:,}"
    return ""


# -- what is held for others -------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Foreign:
    """Memory for one rank.

    Attributes:
        arrival: what is on its way into it, also while the connection is broken.
        users: threads that read or write in it; it is closed once it is given up and nobody does.
        before: of the same rank with another layout; given up once a snapshot is complete in this one.
    """

    name: str
    arena: Arena
    digest: str
    arrival: _Arrival | None = None
    is_arriving: bool = False
    users: int = 0
    is_dropped: bool = False
    before: _Foreign | None = None

    @property
    def sealed(self) -> list[SlotView]:
        return [v for v in (slot.view() for slot in self.arena.slots) if v.state is SlotState.SEALED]


class ForeignStore:
    """Snapshots of ranks of another node, in memory files like those of our own ranks. For any threads.

    Args:
        most_bytes: for all of them together.
        slots: 2: the older snapshot stays until the newer one is complete; 1 where the memory does not suffice for 2.
        kept: told the name and descriptor of new memory, so that the agent may hold a copy for the next saver.
        dropped: told the name when the memory is given up.
        arrived: told of each snapshot that is complete.
    """

    def __init__(
        self,
        most_bytes: int,
        slots: int = 2,
        kept: Callable[[str, int], None] | None = None,
        dropped: Callable[[str], None] | None = None,
        arrived: Callable[[int, Snapshot], None] | None = None,
    ) -> None:
        self._most_bytes = most_bytes
        self._slots = slots
        self._kept = kept
        self._dropped = dropped
        self._arrived = arrived
        self._by_rank: dict[int, _Foreign] = {}
        self._lock = threading.Lock()
        self._numbers = 0

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return sum(f.arena.size_bytes for _, f in self._all())

    def _all(self) -> list[tuple[int, _Foreign]]:
        out = []
        for rank, foreign in sorted(self._by_rank.items()):
            out.append((rank, foreign))
            if foreign.before is not None:
                out.append((rank, foreign.before))
        return out

    def adopt(self, name: str, fd: int) -> None:
        """Memory that the agent has kept; the descriptor becomes the store's.

        Raises:
            ArenaError: it is no snapshot memory; the descriptor is closed.
        """
        try:
            arena = Arena.attach(fd)
        except ArenaError:
            os.close(fd)
            raise
        arena.control.clear_busy()
        with self._lock:
            before = self._by_rank.pop(arena.layout.rank, None)
            self._by_rank[arena.layout.rank] = _Foreign(name, arena, arena.layout.digest())
        if before is not None:
            self._give_up(before)

    def snapshots(self) -> tuple[tuple[int, Snapshot], ...]:
        """Rank and snapshot of all that is complete, for ``choose``."""
        with self._lock:
            return tuple((rank, _as_snapshot(view, f.digest)) for rank, f in self._all() for view in f.sealed)

    def memory_of(self, rank: int, digest: str) -> tuple[Layout, int] | None:
        """Layout and room for objects of what is held of *rank*: memory of that kind is needed to get it back."""
        with self._lock:
            held = (f.arena for of, f in self._all() if of == rank and f.digest == digest)
            arena = next(held, None)
            return None if arena is None else (arena.layout, arena.blob_bytes)

    def forget(self, rank: int, newer_than_step: int | None = None) -> None:
        """Give up what is held of *rank*: all of it, or the snapshots that a rollback goes back behind."""
        with self._lock:
            if newer_than_step is None:
                foreign = self._by_rank.pop(rank, None)
            else:
                foreign = None
                for of, held in self._all():
                    if of == rank:
                        _release_newer(held.arena, newer_than_step)
        if foreign is not None:
            self._give_up(foreign)

    def close(self) -> None:
        """Closes what is held here; the agent's copies stay. After the server's ``close``."""
        with self._lock:
            everything = list(self._by_rank.values())
            self._by_rank.clear()
        for foreign in everything:
            self._give_up(foreign, for_ever=False)

    def _give_up(self, foreign: _Foreign, for_ever: bool = True) -> None:
        with self._lock:
            foreign.is_dropped = True
            before, foreign.before = foreign.before, None
            if foreign.users == 0:
                foreign.arena.close()
        if for_ever and self._dropped is not None:
            self._dropped(foreign.name)
        if before is not None:
            self._give_up(before, for_ever)

    def _leave(self, foreign: _Foreign) -> None:
        """With the lock held."""
        foreign.users -= 1
        if foreign.is_dropped and foreign.users == 0:
            foreign.arena.close()

    # -- for the server ------------------------------------------------------------------------------------------------
    def answer(self, header: Header) -> str:
        """``"layout"``: it has to be sent as well; ``"done"``: it is here; ``"ready"``: it can come.

        Raises NotAgainError when it cannot.
        """
        with self._lock:
            foreign = self._by_rank.get(header.rank)
            if foreign is None or foreign.digest != header.layout or foreign.arena.blob_bytes < header.blob_bytes:
                return "layout"
            newest = max(((v.attempt, v.generation) for v in foreign.sealed), default=(-1, -1))
        if newest == header.order:
            return "done"
        if newest > header.order:
            raise _RefusedError("a newer snapshot of that rank is held already")
        return "ready"

    @contextmanager
    def arrival(self, header: Header, layout: Layout | None) -> Iterator[_Arrival]:
        """Where it goes, begun or where an earlier connection ended. Raises NotAgainError, OSError."""
        foreign, given_up = self._place_for(header, layout)
        try:
            if given_up is not None:
                self._give_up(given_up)
            if layout is not None and self._kept is not None:
                self._kept(foreign.name, foreign.arena.fd)
            if foreign.arrival is None or foreign.arrival.header != header:
                foreign.arrival = self._begin(foreign, header)
            yield foreign.arrival
        finally:
            with self._lock:
                foreign.is_arriving = False
                self._leave(foreign)

    def finish(self, header: Header, arrival: _Arrival) -> None:
        """Within ``arrival``: all of it is there, and it counts from now on."""
        with self._lock:
            foreign = self._by_rank.get(header.rank)
            if foreign is None or foreign.arrival is not arrival:
                raise _RefusedError("the memory was given up meanwhile")
            arrival.seal()
            foreign.arrival = None
            before, foreign.before = foreign.before, None
            snapshot = _as_snapshot(arrival.slot.view(), foreign.digest)
        if before is not None:
            self._give_up(before)
        if self._arrived is not None:
            self._arrived(header.rank, snapshot)

    def _place_for(self, header: Header, layout: Layout | None) -> tuple[_Foreign, _Foreign | None]:
        """The memory, in use from now on, and memory to be given up for it."""
        with self._lock:
            foreign = self._by_rank.get(header.rank)
            if foreign is not None and foreign.is_arriving:
                raise _ClosedError("another transfer of that rank is under way")
            given_up = None
            if layout is not None:
                foreign, given_up = self._new(header, layout, foreign)
            if foreign is None:
                raise _ClosedError("the memory was given up meanwhile")
            problem = _check(header, foreign.arena.layout, foreign.arena.blob_bytes)
            if problem:
                raise _RefusedError(problem)
            foreign.is_arriving = True
            foreign.users += 1
            self._by_rank[header.rank] = foreign
        return foreign, given_up

    def _new(self, header: Header, layout: Layout, before: _Foreign | None) -> tuple[_Foreign, _Foreign | None]:
        """With the lock held. What was there stays until the new one is complete, if there is memory for both."""
        problem = _check(header, layout, header.blob_bytes)
        if problem:
            raise _RefusedError(problem)
        of_before = 0 if before is None else sum(f.arena.size_bytes for r, f in self._all() if r == header.rank)
        others = sum(f.arena.size_bytes for _, f in self._all()) - of_before
        needed = [memory_needed_bytes(layout, header.blob_bytes, n) for n in range(self._slots, 0, -1)]
        # Rather one slot and the old one than two slots.
        fits = [(n, True) for n in needed if others + of_before + n <= self._most_bytes]
        fits += [(n, False) for n in needed if others + n <= self._most_bytes]
        if not fits:
            raise _RefusedError(
                f"it needs {needed[-1]:,} bytes; of {self._most_bytes:,} for other nodes' snapshots {others:,} are used"
            )
        size_bytes, does_stay = fits[0]
        try:
            arena = Arena.create(layout, header.blob_bytes, self._slots - needed.index(size_bytes))
        except (ArenaError, ValueError) as e:
            raise _RefusedError(str(e)) from e
        self._numbers += 1
        name = f"peer-{header.rank}-{self._numbers}-{os.getpid()}"
        if before is None or not does_stay:
            return _Foreign(name, arena, header.layout), before
        # Two layouts back: nobody will ask for it.
        oldest, before.before = before.before, None
        return _Foreign(name, arena, header.layout, before=before), oldest

    def _begin(self, foreign: _Foreign, header: Header) -> _Arrival:
        arena = foreign.arena
        number = choose_slot([s.view() for s in arena.slots], arena.control.busy())
        if number is None:
            raise _ClosedError("what is held of that rank is being read")
        try:
            return _Arrival(header, arena.layout, arena.slots[number])
        except SlotBusyError as e:
            raise _ClosedError("what is held of that rank is being read") from e

    @contextmanager
    def lent(self, rank: int, attempt: int, generation: int) -> Iterator[tuple[Arena, Slot]]:
        """A snapshot to be read. Raises NotAgainError when it is not here."""
        foreign: _Foreign | None = None
        with self._lock:
            for of, candidate in self._all():
                if of == rank and any((v.attempt, v.generation) == (attempt, generation) for v in candidate.sealed):
                    foreign = candidate
                    foreign.users += 1
                    break
        if foreign is None:
            raise _RefusedError(f"that snapshot of rank {rank} is not held there")
        held: Slot | None = None
        try:
            held = next(
                (s for s in foreign.arena.slots if s.view().attempt == attempt and s.hold(generation)),
                None,
            )
            if held is None:
                raise _RefusedError(f"that snapshot of rank {rank} is not held there any more")
            yield foreign.arena, held
        finally:
            if held is not None:
                held.let_go()
            with self._lock:
                self._leave(foreign)


def _release_newer(arena: Arena, step: int) -> None:
    for slot, busy in zip(arena.slots, arena.control.busy(), strict=True):
        view = slot.view()
        if view.state is SlotState.SEALED and view.step > step and not busy:
            slot.release()


def _as_snapshot(view: SlotView, digest: str) -> Snapshot:
    return Snapshot(view.step, view.attempt, view.generation, digest, TierName.PEER, view.created_unix_s)


# -- the server --------------------------------------------------------------------------------------------------------
class PeerServer:
    """Takes and gives back snapshots for other nodes, in threads of its own.

    Args:
        host: the address to listen on; the loopback unless told otherwise.
        port: 0: any; see ``port``.
        connections: at a time; more are turned away and try again.
        say: told, for the log, what went wrong with a connection.

    Raises:
        PeerError: it cannot listen there.
    """

    def __init__(
        self,
        store: ForeignStore,
        token: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        connections: int = 4,
        idle_s: float = _IDLE_S,
        rate: RateLimit | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if len(token) < 16:
            raise ValueError("the token must have 16 bytes at least")
        self._store = store
        self._token = token
        self._idle_s = idle_s
        self._rate = rate
        self._say = say
        self._most = connections
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._is_closing = False
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=16)
        except OSError as e:
            raise PeerError(f"cannot listen on {host}:{port} for other nodes' snapshots: {e.strerror or e}") from e
        self._thread = threading.Thread(target=self._accept, name="peer-server", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Ends all transfers, and waits for its threads."""
        with self._lock:
            self._is_closing = True
            running = dict(self._open)
        for sock in (self._listener, *running):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes accept and recv; close alone does not
        self._thread.join()
        self._listener.close()
        for thread in running.values():
            thread.join()

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as e:
                if self._is_closing:
                    return
                self._note(f"cannot accept a connection: {e.strerror or e}")
                time.sleep(0.1)  # out of descriptors, most likely
                continue
            with self._lock:
                if self._is_closing or len(self._open) >= self._most:
                    sock.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(sock,), name="peer-connection", daemon=True)
                self._open[sock] = thread
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(min(_GREETING_S, self._idle_s))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = _greet(sock, self._token)
            sock.settimeout(self._idle_s)
            self._answer(channel, channel.receive())
        except OSError as e:
            if not self._is_closing:
                self._note(f"a transfer from or to another node ended: {e.strerror or e}")
        except Exception as e:  # one connection must not end the server
            self._note(f"a transfer from or to another node failed: {type(e).__name__}: {e}")
        finally:
            with self._lock:
                self._open.pop(sock, None)
            sock.close()

    def _note(self, text: str) -> None:
        if self._say is not None:
            self._say(text)

    def _answer(self, channel: _Channel, message: Mapping[str, Any]) -> None:
        try:
            match message.get("op"):
                case "push":
                    self._take(channel, Header.from_json(message))
                case "fetch":
                    self._give(channel, message)
                case other:
                    raise _RefusedError(f"it does not know {other!r}")
        except (_RefusedError, ValueError, LayoutError, BlobsTooLargeError) as e:
            channel.send(no=str(e), again=False)
        except (_ClosedError, _DamagedPartError, ArenaError) as e:
            channel.send(no=str(e), again=True)

    def _take(self, channel: _Channel, header: Header) -> None:
        what = self._store.answer(header)
        layout = None
        if what == "done":
            channel.send(ok=True, done=True)
            return
        if what == "layout":
            channel.send(ok=True, need="layout")
            layout = Layout.from_json(channel.receive()["layout"])
        with self._store.arrival(header, layout) as arrival:
            channel.send(ok=True, parts=arrival.missing())
            try:
                arrival.receive(channel)
            except _DamagedPartError as e:
                raise _DamagedPartError(f"{e} is not what was sent") from e
            self._store.finish(header, arrival)
        channel.send(ok=True, done=True)

    def _give(self, channel: _Channel, message: Mapping[str, Any]) -> None:
        rank, attempt, generation = (int(message[k]) for k in ("rank", "attempt", "generation"))
        with self._store.lent(rank, attempt, generation) as (arena, slot):
            channel.send(ok=True, **Header.of(arena, slot).to_json())
            parts = channel.receive()["parts"]
            _send_parts(channel, arena, slot, parts, self._rate, lambda: self._is_closing)
            channel.receive()  # that it has arrived: until then the slot stays as it is


# -- sending and fetching ----------------------------------------------------------------------------------------------
def _checked(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    if "no" in reply:
        why = f"it says: {reply['no']}"
        raise _ClosedError(why) if reply.get("again") else _RefusedError(why)
    return reply


def push(
    host: str,
    port: int,
    token: bytes,
    arena: Arena,
    slot: Slot,
    generation: int,
    *,
    rate: RateLimit | None = None,
    tries: Tries | None = None,
    idle_s: float = _IDLE_S,
    should_stop: Callable[[], bool] | None = None,
) -> Pushed:
    """Send a sealed snapshot to the partner node. The slot is held meanwhile.

    Args:
        should_stop: asked before every few megabytes; for when the rank needs the slot.

    Raises:
        PeerError: it is not there, or not all of it as it is here.
    """
    started_s = time.monotonic()
    what = f"cannot copy the snapshot of rank {arena.layout.rank} to {host}:{port}"
    if not slot.hold(generation):
        raise PeerError(f"{what}: it is not in memory any more")
    sent_bytes, was_there = 0, False
    stops = should_stop or (lambda: False)

    def once() -> None:
        nonlocal sent_bytes, was_there
        with _connected(host, port, token, idle_s) as channel:
            channel.send(op="push", **header.to_json())
            reply = _checked(channel.receive())
            if reply.get("done"):
                was_there = sent_bytes == 0
                return
            if reply.get("need") == "layout":
                channel.send(layout=arena.layout.to_json())
                reply = _checked(channel.receive())
            sent_bytes += _send_parts(channel, arena, slot, reply["parts"], rate, stops)
            _checked(channel.receive())

    try:
        header = Header.of(arena, slot)
        count = retried(what, once, tries or Tries())
    except ArenaError as e:
        raise PeerError(f"{what}: {e}") from e
    except TransferError as e:
        raise PeerError(f"{e}; its copy there is the one before, if any") from e
    finally:
        slot.let_go()
    return Pushed(sent_bytes, time.monotonic() - started_s, count, was_there)


def fetch(
    host: str,
    port: int,
    token: bytes,
    attempt: int,
    generation: int,
    arena: Arena,
    slot: Slot,
    *,
    tries: Tries | None = None,
    idle_s: float = _IDLE_S,
) -> Header:
    """Get a snapshot of the arena's rank back from the node that keeps it, into *slot*, and seal it.

    Raises:
        PeerError: it did not arrive whole and unchanged; the slot then holds nothing.
    """
    layout = arena.layout
    what = f"cannot get the snapshot of rank {layout.rank} from {host}:{port}"
    arrivals: list[_Arrival] = []

    def once() -> None:
        with _connected(host, port, token, idle_s) as channel:
            channel.send(op="fetch", rank=layout.rank, attempt=attempt, generation=generation)
            header = Header.from_json(_checked(channel.receive()))
            problem = _check(header, layout, arena.blob_bytes)
            if problem:
                raise _RefusedError(problem)
            if not arrivals or arrivals[0].header != header:
                arrivals[:] = [_Arrival(header, layout, slot)]
            channel.send(parts=arrivals[0].missing())
            try:
                arrivals[0].receive(channel)
            except _DamagedPartError as e:
                # The sender's memory, as likely as the way; the part is asked for again.
                raise _ClosedError(f"{e} is not what was saved") from e
            arrivals[0].seal()
            with contextlib.suppress(OSError):
                channel.send(ok=True)

    try:
        retried(what, once, tries or Tries())
    except (TransferError, SlotBusyError, BlobsTooLargeError) as e:
        if arrivals:
            slot.release()
        raise PeerError(f"{e}; an older snapshot or a checkpoint is needed") from e
    return arrivals[0].header
