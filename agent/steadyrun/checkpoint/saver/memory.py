"""The snapshot memory that this saver has: opened, kept, looked through. Called from the loop and from its workers."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from steadyrun.checkpoint.arena import (
    Arena,
    ArenaError,
    Slot,
    SlotState,
    SlotView,
    affordable_slots,
    available_bytes,
    choose_slot,
    memory_needed_bytes,
)
from steadyrun.checkpoint.layout import Layout, LayoutError
from steadyrun.checkpoint.saver.events import (
    ArenaInfo,
    ArenaOpened,
    ArenaRefused,
    ArenaRestored,
    FetchPeer,
    Found,
    Inspected,
    OpenArena,
    PeerFetched,
)
from steadyrun.checkpoint.saver.messages import MessageError, Remembered, SaveKey, decode, encode

__all__ = ["PEER_PREFIX", "STATE_NAME", "Box", "Memory", "Notebook"]

STATE_NAME: Final = "saver-state"
PEER_PREFIX: Final = "peer-"  # of the names under which the agent keeps what ``peer`` holds
_SAME_BUDGET_S: Final = 60.0


@dataclass(slots=True)
class Box:
    """An arena, and who in this process uses it: it is closed once nobody does.

    Attributes:
        name: under which the agent keeps its descriptor.
    """

    arena: Arena
    info: ArenaInfo
    name: str
    users: int = 0
    is_dropped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self) -> bool:
        """Use it until ``leave``; False when it is being given up."""
        with self.lock:
            if self.is_dropped:
                return False
            self.users += 1
            return True

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            is_last = self.is_dropped and self.users == 0
        if is_last:
            self.arena.close()

    def drop(self) -> None:
        with self.lock:
            self.is_dropped = True
            is_last = self.users == 0
        if is_last:
            self.arena.close()


class Memory:
    """All arenas of this node, by number. The table is for the loop's thread; ``open`` runs in one worker."""

    def __init__(self, available: Callable[[], tuple[int, str]] = available_bytes) -> None:
        self._available = available
        self._numbers = itertools.count(1)
        self._budget: tuple[int, float, int, str] = (-1, 0.0, 0, "")  # attempt, when, bytes, what limits
        self.boxes: dict[int, Box] = {}

    @property
    def size_bytes(self) -> int:
        return sum(b.arena.size_bytes for b in self.boxes.values())

    # -- the loop's thread ---------------------------------------------------------------------------------------------
    def adopt(self, fd: int, name: str) -> ArenaRestored:
        """Memory that the agent has kept; its sealed slots are held from now on.

        Raises:
            ArenaError: it is no snapshot memory; *fd* is closed.
        """
        try:
            arena = Arena.attach(fd)
        except ArenaError:
            os.close(fd)
            raise
        box = self._add(arena, name)
        arena.control.clear_busy()
        found = [f for slot in arena.slots if (f := _found(slot)) is not None and slot.hold(f.key.generation)]
        return ArenaRestored(box.info, tuple(found))

    def _add(self, arena: Arena, name: str) -> Box:
        number = next(self._numbers)
        layout = arena.layout
        info = ArenaInfo(
            number, layout.rank, layout.world_size, layout.digest(), len(arena.slots), arena.size_bytes, layout
        )
        box = self.boxes[number] = Box(arena, info, name)
        return box

    def add(self, box: Box) -> None:
        self.boxes[box.info.id] = box

    def drop(self, number: int) -> str | None:
        """Give it up; gives the name under which the agent keeps it."""
        box = self.boxes.pop(number, None)
        if box is None:
            return None
        box.drop()
        return box.name

    # -- workers -------------------------------------------------------------------------------------------------------
    def open(self, order: OpenArena, known: Sequence[Box]) -> tuple[ArenaOpened | ArenaRefused, Box | None]:
        """Memory for a rank: what it had before, or new; the box when it is new, to be added by the loop."""
        try:
            layout = Layout.from_json(order.text)
        except LayoutError as e:
            return ArenaRefused(order.attempt, order.rank, None, str(e)), None
        if layout.rank != order.rank:
            why = f"the layout is that of rank {layout.rank}, and rank {order.rank} has sent it"
            return ArenaRefused(order.attempt, order.rank, None, why), None
        digest = layout.digest()
        for box in known:
            if box.info.digest == digest and box.arena.blob_bytes >= order.blob_bytes:
                return ArenaOpened(order.attempt, box.info, ""), None
        needed = memory_needed_bytes(layout, order.blob_bytes, 2) - memory_needed_bytes(layout, order.blob_bytes, 1)
        free_bytes, limited_by = self._free(order.attempt)
        slots, why = affordable_slots(needed * order.local_ranks, free_bytes, order.slots, limited_by)
        if slots < 1:
            return ArenaRefused(order.attempt, order.rank, layout, why), None
        try:
            arena = Arena.create(layout, order.blob_bytes, slots)
        except (ArenaError, ValueError) as e:
            return ArenaRefused(order.attempt, order.rank, layout, str(e)), None
        number = next(self._numbers)
        info = ArenaInfo(number, layout.rank, layout.world_size, digest, slots, arena.size_bytes, layout)
        box = Box(arena, info, f"arena-{layout.rank}-{number}-{os.getpid()}")
        # Every rank would say the same: the first one of the node says it, and whoever got less.
        return ArenaOpened(order.attempt, info, why if slots < order.slots or order.rank == 0 else ""), box

    def fetch(self, order: FetchPeer, known: Sequence[Box]) -> tuple[PeerFetched, Box | None]:
        """Get a rank's snapshot back from another node, into its memory here; the box when it is new."""

        from steadyrun.checkpoint.peer import PeerError, fetch  # not needed by most jobs, and 10 ms of every start

        def failed(why: str) -> PeerFetched:
            return PeerFetched(order.attempt, order.rank, None, None, why)

        digest = order.layout.digest()
        box = next((b for b in known if b.info.digest == digest and b.arena.blob_bytes >= order.blob_bytes), None)
        is_new = box is None
        if box is None:
            # Its rank asks for memory of this layout next, and gets this.
            text = order.layout.to_json()
            opened, box = self.open(OpenArena(order.attempt, order.rank, text, order.blob_bytes, 2, 1, ()), ())
            if box is None:
                return failed(opened.why if isinstance(opened, ArenaRefused) else "it has memory already"), None
        if not box.enter():
            return failed("its memory was given up"), None
        try:
            slots = box.arena.slots
            number = choose_slot([s.view() for s in slots], box.arena.control.busy())
            if number is None:
                return failed("no slot is free for it"), None
            address = order.address
            header = fetch(
                address.host,
                address.port,
                bytes.fromhex(address.token),
                order.key.attempt,
                order.key.generation,
                box.arena,
                slots[number],
            )
        except (PeerError, ArenaError, OSError) as e:
            if is_new:
                box.drop()
            return failed(str(e)), None
        finally:
            box.leave()
        found = Found(number, order.key, header.created_unix_s)
        return PeerFetched(order.attempt, order.rank, box.info, found), box if is_new else None

    def _free(self, attempt: int) -> tuple[int, str]:
        """What is free for all ranks of this node together; asked once for those that ask at the same time, since what
        the first ones got is already being taken."""
        now_s = time.monotonic()
        of_attempt, at_s, free_bytes, limited_by = self._budget
        if of_attempt != attempt or now_s > at_s + _SAME_BUDGET_S:
            free_bytes, limited_by = self._available()
            self._budget = (attempt, now_s, free_bytes, limited_by)
        return free_bytes, limited_by

    @staticmethod
    def inspect(box: Box, number: int | None = None) -> Inspected:
        """Compare a slot (None: the newest that is sealed and right) with its checksums; without any yet, take them."""
        good: list[Found] = []
        damaged: list[tuple[SaveKey, str]] = []
        unchecked: list[Found] = []
        if box.enter():
            try:
                slots = box.arena.slots if number is None else (box.arena.slots[number],)
                sealed = {s.number: s.view() for s in slots}
                for slot in sorted(slots, key=lambda s: _order(sealed[s.number]), reverse=True):
                    found = _found(slot)
                    if good and found is not None:
                        unchecked.append(found)
                    else:
                        _inspect_slot(slot, good, damaged)
            finally:
                box.leave()
        return Inspected(box.info.id, tuple(good), tuple(damaged), tuple(unchecked), number)

    @staticmethod
    def take_digests(box: Box, number: int, generation: int) -> None:
        """Of a slot that still holds that save, where they are missing."""
        if not box.enter():
            return
        try:
            slot = box.arena.slots[number]
            if slot.hold(generation):
                try:
                    slot.compute_digests()
                finally:
                    slot.let_go()
        finally:
            box.leave()


def _order(view: SlotView) -> tuple[bool, int, int]:
    return view.state is SlotState.SEALED, view.attempt, view.generation


def _found(slot: Slot) -> Found | None:
    view = slot.view()
    if view.state is not SlotState.SEALED:
        return None
    return Found(slot.number, SaveKey(view.attempt, view.generation, view.step), view.created_unix_s)


def _inspect_slot(slot: Slot, good: list[Found], damaged: list[tuple[SaveKey, str]]) -> None:
    view = slot.view()
    key = SaveKey(view.attempt, view.generation, view.step)
    if view.state is SlotState.DAMAGED:
        damaged.append((key, f"the header of slot {slot.number} is damaged"))
        return
    if view.state is not SlotState.SEALED or not slot.hold(view.generation):
        return
    try:
        try:
            if any(d is None for d in slot.digests()):
                slot.compute_digests()
        except ArenaError:
            pass  # a damaged table; verify says so
        found = slot.verify()
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            damaged.append((key, found[0].why + more))
        else:
            good.append(Found(slot.number, key, view.created_unix_s))
    finally:
        slot.let_go()


class Notebook:
    """A small memory file that the agent keeps for the next saver: the newest ``Remembered``, whole or the one before.

    Two halves, written in turn: number, length, checksum, content.
    """

    _HALF_BYTES: Final = 4 << 20
    _HEAD_BYTES: Final = 32

    def __init__(self, fd: int) -> None:
        """Raises OSError or ValueError: it is no notebook."""
        self.fd = fd
        # Through a mapping: a file size limit of the process (ulimit -f) would end a write into a memory file as well.
        self._mapping = mmap.mmap(fd, 2 * self._HALF_BYTES)
        self._number = 0

    @classmethod
    def create(cls) -> Notebook:
        """Raises OSError."""
        fd = os.memfd_create("steadyrun-saver-state", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, 2 * cls._HALF_BYTES)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def write(self, remembered: Remembered) -> None:
        data = encode(remembered)
        if len(data) > self._HALF_BYTES - self._HEAD_BYTES:
            return  # cannot be: a few dozen saves
        self._number += 1
        head = self._number.to_bytes(8, "little") + len(data).to_bytes(8, "little")
        at = self._number % 2 * self._HALF_BYTES
        self._mapping[at : at + self._HEAD_BYTES] = bytes(self._HEAD_BYTES)
        self._mapping[at + self._HEAD_BYTES : at + self._HEAD_BYTES + len(data)] = data
        self._mapping[at : at + self._HEAD_BYTES] = head + xxhash.xxh3_128_digest(head + data)

    def read(self) -> Remembered:
        """The newest that is whole; nothing when there is none."""
        best: Remembered | None = None
        for at in (0, self._HALF_BYTES):
            head = self._mapping[at : at + self._HEAD_BYTES]
            number, length = int.from_bytes(head[:8], "little"), int.from_bytes(head[8:16], "little")
            if number <= self._number or length > self._HALF_BYTES:
                continue
            data = self._mapping[at + self._HEAD_BYTES : at + self._HEAD_BYTES + length]
            if xxhash.xxh3_128_digest(head[:16] + data) != head[16:]:
                continue
            try:
                found = decode(data)
            except MessageError:
                continue
            if isinstance(found, Remembered):
                best, self._number = found, number
        return best or Remembered()
