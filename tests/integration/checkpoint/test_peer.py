"""Snapshots that are kept in the memory of another node, and come back from there."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint.arena import Arena, SlotState, memory_needed_bytes
from steadyrun.checkpoint.choose import Snapshot
from steadyrun.checkpoint.layout import Entry, Layout, ObjectEntry, place
from steadyrun.checkpoint.peer import ForeignStore, Header, PeerError, PeerServer, fetch, partner, push
from steadyrun.checkpoint.saves import TierName
from steadyrun.checkpoint.shardfile import RateLimit
from steadyrun.checkpoint.transfer import Tries

TOKEN = b"t" * 32
SIZES = (1_500_000, 40, 0, 9_000_000)  # bytes of the entries
ROOM = 4096
AT_ONCE = Tries(most=1)
PATIENT = Tries(most=6, pause=lambda seconds: None)


def layout_of(rank: int = 0, sizes: tuple[int, ...] = SIZES, objects: int = 2) -> Layout:
    at = place(sizes)
    entries = tuple(
        Entry(f"model.t{i}", ("model", f"t{i}"), "uint8", (n,), (0,), (n,), at[i], n) for i, n in enumerate(sizes)
    )
    return Layout(rank, 4, entries, tuple(ObjectEntry(f"o{i}", (f"o{i}",)) for i in range(objects)))


def fill(arena: Arena, number: int, step: int, attempt: int = 0, generation: int | None = None) -> int:
    """Save something that depends on all of it; returns the generation."""
    slot = arena.slots[number]
    generation = step if generation is None else generation
    slot.begin(step, attempt, generation, 1000.0 + step)
    for i, entry in enumerate(arena.layout.entries):
        seed = bytes((step * 7 + i * 13 + attempt + k) % 251 for k in range(997))
        slot.payload(entry)[:] = (seed * (entry.size_bytes // 997 + 1))[: entry.size_bytes]
    slot.write_blobs([bytes([step, i]) * (10 + i) for i in range(len(arena.layout.objects))])
    slot.seal()
    slot.compute_digests()
    return generation


def content(arena: Arena, number: int) -> tuple[bytes, list[bytes]]:
    slot = arena.slots[number]
    return bytes(slot.payload_view), [bytes(b) for b in slot.blobs()]


@pytest.fixture
def ours() -> Iterator[Arena]:
    with Arena.create(layout_of(), ROOM, 2) as arena:
        yield arena


@pytest.fixture
def store() -> Iterator[ForeignStore]:
    held = ForeignStore(1 << 30)
    yield held
    held.close()


@pytest.fixture
def server(store: ForeignStore) -> Iterator[PeerServer]:
    with PeerServer(store, TOKEN, idle_s=20.0) as running:
        yield running


def steps(store: ForeignStore) -> list[tuple[int, int]]:
    return [(rank, s.step) for rank, s in store.snapshots()]


class Wire:
    """A connection through which a test sees and changes every byte; ``change`` gets those to the server."""

    def __init__(self, port: int, change: Callable[[int, bytes], bytes | None], *, of_server: bool = False) -> None:
        self._port = port
        self._change = change
        self._of_server = of_server
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [client, server]
                self.connections += 1
                first = threading.Semaphore(1)
                self._start(self._carry, client, server, not self._of_server, self.connections, first)
                self._start(self._carry, server, client, self._of_server, self.connections, first)

    def _carry(
        self, source: socket.socket, target: socket.socket, is_seen: bool, number: int, first: threading.Semaphore
    ) -> None:
        try:
            while data := source.recv(1 << 16):
                out = self._change(number, data) if is_seen else data
                if out is None:
                    break
                target.sendall(out)
        except OSError:
            pass
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if not first.acquire(blocking=False):  # the other direction has ended: nobody uses them any more
            source.close()
            target.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()


# -- there and back ----------------------------------------------------------------------------------------------------
def test_a_snapshot_goes_to_the_partner_and_comes_back_the_same(
    ours: Arena, store: ForeignStore, server: PeerServer
) -> None:
    generation = fill(ours, 0, 7)
    pushed = push("127.0.0.1", server.port, TOKEN, ours, ours.slots[0], generation)
    assert (pushed.tries, pushed.was_there) == (1, False)
    assert pushed.size_bytes == sum(SIZES) + 10 * 2 + 11 * 2
    assert store.snapshots() == ((0, Snapshot(7, 0, 7, ours.layout.digest(), TierName.PEER, 1007.0)),)
    assert ours.control.busy() == (0, 0)

    with Arena.create(layout_of(), ROOM, 2) as new_node:
        header = fetch("127.0.0.1", server.port, TOKEN, 0, generation, new_node, new_node.slots[1])
        assert (header.step, header.attempt, header.created_unix_s) == (7, 0, 1007.0)
        assert content(new_node, 1) == content(ours, 0)
        assert new_node.slots[1].view().state is SlotState.SEALED
        assert new_node.slots[1].verify() == []


def test_the_layout_is_sent_once_and_a_snapshot_that_is_there_is_not_sent_again(
    ours: Arena, store: ForeignStore, server: PeerServer
) -> None:
    for number, step in ((0, 1), (1, 2), (0, 3)):
        push("127.0.0.1", server.port, TOKEN, ours, ours.slots[number], fill(ours, number, step))
    assert steps(store) == [(0, 3), (0, 2)]
    used_bytes = store.size_bytes
    again = push("127.0.0.1", server.port, TOKEN, ours, ours.slots[0], 3)
    assert (again.was_there, again.size_bytes) == (True, 0)
    assert store.size_bytes == used_bytes
    with pytest.raises(PeerError, match="a newer snapshot of that rank is held already"):
        push("127.0.0.1", server.port, TOKEN, ours, ours.slots[1], 2)


def test_ranks_are_kept_apart(store: ForeignStore, server: PeerServer) -> None:
    with Arena.create(layout_of(0), ROOM, 1) as zero, Arena.create(layout_of(1, (100,), 0), ROOM, 1) as one:
        for arena, step in ((zero, 4), (one, 5)):
            push("127.0.0.1", server.port, TOKEN, arena, arena.slots[0], fill(arena, 0, step))
        assert steps(store) == [(0, 4), (1, 5)]
        store.forget(0)
        assert steps(store) == [(1, 5)]
        with pytest.raises(PeerError, match="that snapshot of rank 0 is not held there"):
            fetch("127.0.0.1", server.port, TOKEN, 0, 4, zero, zero.slots[0], tries=AT_ONCE)


def test_a_rollback_releases_what_is_newer(ours: Arena, store: ForeignStore, server: PeerServer) -> None:
    for number, step in ((0, 1), (1, 2)):
        push("127.0.0.1", server.port, TOKEN, ours, ours.slots[number], fill(ours, number, step))
    store.forget(0, newer_than_step=1)
    assert steps(store) == [(0, 1)]
    push("127.0.0.1", server.port, TOKEN, ours, ours.slots[1], fill(ours, 1, 2, attempt=1, generation=1))
    assert steps(store) == [(0, 1), (0, 2)] or steps(store) == [(0, 2), (0, 1)]


def test_the_agent_is_given_the_memory_and_a_new_saver_takes_it_over(ours: Arena) -> None:
    kept: dict[str, int] = {}
    arrived: list[tuple[int, int]] = []
    store = ForeignStore(
        1 << 30,
        kept=lambda name, fd: kept.__setitem__(name, os.dup(fd)),
        dropped=lambda name: os.close(kept.pop(name)),
        arrived=lambda rank, snapshot: arrived.append((rank, snapshot.step)),
    )
    with PeerServer(store, TOKEN) as server:
        push("127.0.0.1", server.port, TOKEN, ours, ours.slots[0], fill(ours, 0, 7))
    store.close()
    assert arrived == [(0, 7)]
    ((name, fd),) = kept.items()

    after = ForeignStore(1 << 30, dropped=lambda name: kept.pop(name))
    after.adopt(name, fd)
    assert steps(after) == [(0, 7)]
    with PeerServer(after, TOKEN) as server, Arena.create(layout_of(), ROOM, 1) as back:
        fetch("127.0.0.1", server.port, TOKEN, 0, 7, back, back.slots[0])
        assert content(back, 0) == content(ours, 0)
    after.forget(0)
    assert kept == {}
    after.close()


def test_a_new_layout_replaces_the_old_one_only_when_it_is_complete(
    ours: Arena, store: ForeignStore, server: PeerServer
) -> None:
    push("127.0.0.1", server.port, TOKEN, ours, ours.slots[0], fill(ours, 0, 7))
    with Arena.create(layout_of(0, (3_000_000, 10)), ROOM, 1) as other:
        generation = fill(other, 0, 9)
        with Wire(server.port, cut_after(2_000_000)) as wire, pytest.raises(PeerError):
            push("127.0.0.1", wire.port, TOKEN, other, other.slots[0], generation, tries=AT_ONCE)
        assert steps(store) == [(0, 7)]
        push("127.0.0.1", server.port, TOKEN, other, other.slots[0], generation, tries=PATIENT)
        assert steps(store) == [(0, 9)]


# -- memory ------------------------------------------------------------------------------------------------------------
def test_no_more_memory_is_taken_than_allowed(ours: Arena) -> None:
    one, two = (memory_needed_bytes(ours.layout, ROOM, n) for n in (1, 2))
    for most_bytes, expected in ((two, [(0, 8), (0, 7)]), (two - 1, [(0, 8)]), (one - 1, None)):
        store = ForeignStore(most_bytes)
        with PeerServer(store, TOKEN) as server:
            for number, step in ((0, 7), (1, 8)):
                generation = fill(ours, number, step)
                if expected is None:
                    with pytest.raises(PeerError, match=rf"it needs {one:,} bytes; of {one - 1:,} .* are used"):
                        push("127.0.0.1", server.port, TOKEN, ours, ours.slots[number], generation)
                else:
                    push("127.0.0.1", server.port, TOKEN, ours, ours.slots[number], generation)
        assert sorted(steps(store)) == sorted(expected or [])
        assert store.size_bytes <= most_bytes
        store.close()


# -- connections that break --------------------------------------------------------------------------------------------
def cut_after(size_bytes: int, times: int = 1 << 30) -> Callable[[int, bytes], bytes | None]:
    """The first *times* connections end after so many bytes."""
    seen: dict[int, int] = {}

    def change(number: int, data: bytes) -> bytes | None:
        seen[number] = seen.get(number, 0) + len(data)
        return None if number <= times and seen[number] > size_bytes else data

    return change


@pytest.mark.parametrize("size_bytes", [0, 40, 200, 4_000, 1_600_000, 9_000_000])
def test_a_transfer_that_breaks_goes_on_where_it_was(
    ours: Arena, store: ForeignStore, server: PeerServer, size_bytes: int
) -> None:
    generation = fill(ours, 0, 7)
    with Wire(server.port, cut_after(size_bytes, times=2)) as wire:
        pushed = push("127.0.0.1", wire.port, TOKEN, ours, ours.slots[0], generation, tries=PATIENT)
        assert pushed.tries == wire.connections >= 3
    assert steps(store) == [(0, 7)]
    whole = sum(SIZES) + 42
    if size_bytes == 1_600_000:  # the first entry had arrived: it is not sent again
        assert pushed.size_bytes < 3 * whole - 2 * SIZES[0]
    with Arena.create(layout_of(), ROOM, 1) as back:
        with Wire(server.port, cut_after(size_bytes, times=2), of_server=True) as wire:
            fetch("127.0.0.1", wire.port, TOKEN, 0, generation, back, back.slots[0], tries=PATIENT)
        assert content(back, 0) == content(ours, 0)
        assert back.slots[0].verify() == []


def test_while_a_newer_one_arrives_the_older_one_stays(ours: Arena, store: ForeignStore, server: PeerServer) -> None:
    push("127.0.0.1", server.port, TOKEN, ours, ours.slots[0], fill(ours, 0, 7))
    generation = fill(ours, 1, 8)
    with Wire(server.port, cut_after(5_000_000)) as wire, pytest.raises(PeerError, match="the one before, if any"):
        push("127.0.0.1", wire.port, TOKEN, ours, ours.slots[1], generation, tries=AT_ONCE)
    assert steps(store) == [(0, 7)]
    with Arena.create(layout_of(), ROOM, 1) as back:
        fetch("127.0.0.1", server.port, TOKEN, 0, 7, back, back.slots[0])
        assert content(back, 0) == content(ours, 0)


def test_a_newer_snapshot_takes_the_place_of_one_that_broke_off(
    ours: Arena, store: ForeignStore, server: PeerServer
) -> None:
    generation = fill(ours, 0, 7)
    with Wire(server.port, cut_after(5_000_000)) as wire, pytest.raises(PeerError):
        push("127.0.0.1", wire.port, TOKEN, ours, ours.slots[0], generation, tries=AT_ONCE)
    push("127.0.0.1", server.port, TOKEN, ours, ours.slots[1], fill(ours, 1, 8), tries=PATIENT)
    assert steps(store) == [(0, 8)]
    with Arena.create(layout_of(), ROOM, 1) as back:
        fetch("127.0.0.1", server.port, TOKEN, 0, 8, back, back.slots[0])
        assert content(back, 0) == content(ours, 1)


def flip(at: int, times: int = 1 << 30) -> Callable[[int, bytes], bytes | None]:
    """One bit of byte *at* of the first *times* connections."""
    seen: dict[int, int] = {}

    def change(number: int, data: bytes) -> bytes:
        begin = seen.get(number, 0)
        seen[number] = begin + len(data)
        if number <= times and begin <= at < begin + len(data):
            data = data[: at - begin] + bytes([data[at - begin] ^ 16]) + data[at - begin + 1 :]
        return data

    return change


def test_a_bit_that_flips_on_the_way_is_found_and_the_part_is_sent_again(
    ours: Arena, store: ForeignStore, server: PeerServer
) -> None:
    generation = fill(ours, 0, 7)
    with Wire(server.port, flip(5_000_000, times=1)) as wire:
        pushed = push("127.0.0.1", wire.port, TOKEN, ours, ours.slots[0], generation, tries=PATIENT)
    assert pushed.size_bytes == sum(SIZES) + 42 + SIZES[3]
    with Arena.create(layout_of(), ROOM, 1) as back:
        fetch("127.0.0.1", server.port, TOKEN, 0, 7, back, back.slots[0])
        assert content(back, 0) == content(ours, 0)


@pytest.mark.parametrize("at", [3, 70, 110, 500, 9000])
def test_a_bit_that_flips_in_a_message_is_never_believed(
    ours: Arena, store: ForeignStore, server: PeerServer, at: int
) -> None:
    generation = fill(ours, 0, 7)
    with Wire(server.port, flip(at)) as wire, pytest.raises(PeerError, match="cannot copy the snapshot of rank 0"):
        push("127.0.0.1", wire.port, TOKEN, ours, ours.slots[0], generation, tries=AT_ONCE, idle_s=3.0)
    assert steps(store) == []


def test_damage_in_our_own_memory_is_not_passed_on(ours: Arena, store: ForeignStore, server: PeerServer) -> None:
    generation = fill(ours, 0, 7)
    ours.slots[0].payload(ours.layout.entries[3])[1_234_567] ^= 1
    with pytest.raises(PeerError, match=r"model\.t3 at \[0\] is not what was sent, tried 6 times"):
        push("127.0.0.1", server.port, TOKEN, ours, ours.slots[0], generation, tries=PATIENT)
    assert steps(store) == []


def test_damage_in_our_objects_is_not_passed_on(ours: Arena, store: ForeignStore, server: PeerServer) -> None:
    generation = fill(ours, 0, 7)
    ours.slots[0].blobs()[1][3] ^= 1
    with pytest.raises(PeerError, match=r"the block of objects is not what was sent"):
        push("127.0.0.1", server.port, TOKEN, ours, ours.slots[0], generation, tries=PATIENT)
    assert steps(store) == []


def test_damage_in_the_partners_memory_is_named_and_not_loaded(
    ours: Arena, server: PeerServer, store: ForeignStore
) -> None:
    generation = fill(ours, 0, 7)
    push("127.0.0.1", server.port, TOKEN, ours, ours.slots[0], generation)
    with store.lent(0, 0, generation) as (theirs, slot):
        slot.payload(theirs.layout.entries[0])[5] ^= 1
    with Arena.create(layout_of(), ROOM, 1) as back:
        with pytest.raises(PeerError, match=r"model\.t0 at \[0\] is not what was saved"):
            fetch("127.0.0.1", server.port, TOKEN, 0, generation, back, back.slots[0], tries=PATIENT)
        assert back.slots[0].view().state is SlotState.EMPTY


# -- who may -----------------------------------------------------------------------------------------------------------
def test_another_runs_token_is_refused_on_both_sides(ours: Arena, store: ForeignStore, server: PeerServer) -> None:
    generation = fill(ours, 0, 7)
    with pytest.raises(PeerError, match="it has another token: it belongs to another run"):
        push("127.0.0.1", server.port, b"x" * 32, ours, ours.slots[0], generation, tries=PATIENT)
    assert steps(store) == []
    with Wire(server.port, flip(60), of_server=True) as wire, pytest.raises(PeerError, match="does not know the token"):
        push("127.0.0.1", wire.port, TOKEN, ours, ours.slots[0], generation, tries=PATIENT)
    with pytest.raises(ValueError, match="16 bytes"):
        PeerServer(store, b"short")


def test_a_stranger_gets_nothing_and_does_not_disturb(ours: Arena, store: ForeignStore, server: PeerServer) -> None:
    with contextlib.ExitStack() as stack:
        for data in (b"", b"GET / HTTP/1.0\r\n\r\n" + bytes(200), os.urandom(64)):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            sock.sendall(data)
        push("127.0.0.1", server.port, TOKEN, ours, ours.slots[0], fill(ours, 0, 7), tries=PATIENT)
    assert steps(store) == [(0, 7)]


def test_more_connections_than_allowed_are_turned_away_and_served_later(ours: Arena, store: ForeignStore) -> None:
    freed = threading.Event()

    def pause(seconds: float) -> None:
        idle.close()
        freed.set()

    with PeerServer(store, TOKEN, connections=1, idle_s=20.0) as server:
        idle = socket.create_connection(("127.0.0.1", server.port))
        idle.settimeout(20.0)
        idle.recv(8)  # it is being served
        pushed = push(
            "127.0.0.1",
            server.port,
            TOKEN,
            ours,
            ours.slots[0],
            fill(ours, 0, 7),
            tries=Tries(most=200, pause=pause),
        )
    assert freed.is_set()
    assert pushed.tries > 1
    assert steps(store) == [(0, 7)]


def test_what_answers_there_may_be_something_else(ours: Arena) -> None:
    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"SSH-2.0-OpenSSH_9.6 and more of it, so that there is enough to read\r\n")
            with contextlib.suppress(ConnectionResetError):
                sock.recv(1)

    generation = fill(ours, 0, 7)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PeerError, match="no saver of this version"):
            push("127.0.0.1", listener.getsockname()[1], TOKEN, ours, ours.slots[0], generation, tries=PATIENT)
        thread.join()


# -- limits ------------------------------------------------------------------------------------------------------------
def test_nobody_there_is_told_after_the_tries(ours: Arena) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        PeerError, match=rf"cannot copy the snapshot of rank 0 to 127.0.0.1:{port}: Connection refused, tried 6"
    ):
        push("127.0.0.1", port, TOKEN, ours, ours.slots[0], fill(ours, 0, 7), tries=PATIENT)
    assert ours.control.busy() == (0, 0)


def test_a_partner_that_falls_silent_is_given_up(ours: Arena) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PeerError, match=r"timed out"):
        push(
            "127.0.0.1",
            silent.getsockname()[1],
            TOKEN,
            ours,
            ours.slots[0],
            fill(ours, 0, 7),
            tries=AT_ONCE,
            idle_s=0.2,
        )


def test_a_snapshot_that_is_gone_cannot_be_sent(ours: Arena, server: PeerServer) -> None:
    generation = fill(ours, 0, 7)
    fill(ours, 0, 8)
    with pytest.raises(PeerError, match="it is not in memory any more"):
        push("127.0.0.1", server.port, TOKEN, ours, ours.slots[0], generation)


def test_it_can_be_stopped_when_the_rank_needs_the_slot(ours: Arena, store: ForeignStore, server: PeerServer) -> None:
    asked = itertools.count()
    with pytest.raises(PeerError, match="it was stopped"):
        push(
            "127.0.0.1",
            server.port,
            TOKEN,
            ours,
            ours.slots[0],
            fill(ours, 0, 7),
            tries=PATIENT,
            should_stop=lambda: next(asked) > 3,
        )
    assert ours.control.busy() == (0, 0)
    assert steps(store) == []


def test_no_faster_than_allowed(ours: Arena, store: ForeignStore, server: PeerServer) -> None:
    now_s = 0.0

    def pause(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    rate = RateLimit(1_000_000.0, lambda: now_s, pause)
    push("127.0.0.1", server.port, TOKEN, ours, ours.slots[0], fill(ours, 0, 7), rate=rate)
    assert now_s >= (sum(SIZES) - (4 << 20)) / 1_000_000.0


def test_the_server_ends_in_the_middle_of_a_transfer(ours: Arena, store: ForeignStore) -> None:
    generation = fill(ours, 0, 7)
    server = PeerServer(store, TOKEN, idle_s=20.0)
    closer = threading.Thread(target=server.close)
    asked = itertools.count()

    def close_in_the_middle() -> bool:
        if next(asked) == 2:
            closer.start()
            closer.join()
        return False

    with pytest.raises(PeerError):
        push(
            "127.0.0.1",
            server.port,
            TOKEN,
            ours,
            ours.slots[0],
            generation,
            tries=AT_ONCE,
            should_stop=close_in_the_middle,
        )
    assert steps(store) == []


def test_a_port_in_use_is_told(store: ForeignStore, server: PeerServer) -> None:
    with pytest.raises(PeerError, match=rf"cannot listen on 127.0.0.1:{server.port} .*in use"):
        PeerServer(store, TOKEN, port=server.port)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": -1},
        {"digests": ("zz" * 16,)},
        {"blob_lengths": ("x",)},
        {"layout": None, "digests": None},
    ],
)
def test_a_header_that_cannot_be_is_refused(ours: Arena, change: dict[str, object]) -> None:
    fill(ours, 0, 7)
    header = Header.of(ours, ours.slots[0])
    assert Header.from_json(header.to_json()) == header
    with pytest.raises(ValueError, match="no header of a snapshot"):
        Header.from_json({**header.to_json(), **change})


def test_a_header_that_does_not_fit_its_layout_takes_no_memory(ours: Arena, store: ForeignStore) -> None:
    fill(ours, 0, 7)
    header = Header.of(ours, ours.slots[0])
    for wrong in (
        replace(header, digests=header.digests[:-1]),
        replace(header, blob_lengths=(1, 2, 3)),
        replace(header, blob_lengths=(ROOM, ROOM)),
        replace(header, layout="0" * 32),
    ):
        with (
            pytest.raises(Exception, match=r"does not fit|need .* bytes|another one"),
            store.arrival(wrong, ours.layout),
        ):
            pass
    assert store.size_bytes == 0


# -- who sends to whom -------------------------------------------------------------------------------------------------
def test_the_ring() -> None:
    assert [partner(i, 4) for i in range(4)] == [1, 2, 3, 0]
    assert [partner(i, 4, jump=2) for i in range(4)] == [2, 3, 0, 1]
    assert [partner(i, 2, jump=2) for i in range(2)] == [1, 0]
    assert partner(0, 1) is None
    assert [partner(i, 4, domains="aabb") for i in range(4)] == [2, 3, 0, 1]
    assert [partner(i, 4, jump=2, domains="aabb") for i in range(4)] == [2, 3, 0, 1]
    with pytest.raises(ValueError, match="group_rank=4"):
        partner(4, 4)
    with pytest.raises(ValueError, match="3 domains for 4 nodes"):
        partner(0, 4, domains="abc")


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 40), st.integers(1, 50), st.data())
def test_each_node_keeps_the_copies_of_exactly_one_other_in_another_domain_where_possible(
    nodes: int, jump: int, data: st.DataObject
) -> None:
    domains = data.draw(st.none() | st.lists(st.sampled_from("abcd"), min_size=nodes, max_size=nodes))
    chosen = [partner(i, nodes, jump, domains) for i in range(nodes)]
    assert sorted(c for c in chosen if c is not None) == list(range(nodes))
    assert all(c != i for i, c in enumerate(chosen))
    if domains is not None and 2 * max(domains.count(d) for d in domains) <= nodes:
        assert all(domains[i] != domains[c] for i, c in enumerate(chosen) if c is not None)
