"""Snapshot memory: what a rank copies its state into, and what the node's saver writes checkpoints from.

One sealed anonymous file per rank, made by the saver, mapped by both, and kept open by the agent as well: it outlives
whoever dies. No lock, no system call, nothing to clean up after a kill. It consists of whole pages::

    control   geometry and a few words by which saver and rank tell each other things
    layout    the JSON of the ``Layout``
    per slot: header   one line of words: state, step, attempt, generation, ... and their checksum
              digests  the xxh3-128 of every entry and of the objects, put there by the saver
              blobs    lengths, then the bytes of the objects
              payload  the tensors, at the places that the layout says

Every step is right whenever the writer is killed: a slot is WRITING from before its first changed byte until after its
last, the state is one aligned 64-bit store, and slots share no page. A reader in another process is told of a sealed
slot by a message, so the system calls order what it sees; only ``begin`` against ``hold`` needs more (see ``_fence``).
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash
from typing_extensions import Self

from steadyrun.checkpoint.budget import affordable_slots, available_bytes
from steadyrun.checkpoint.layout import ALIGN_BYTES, Entry, Layout, LayoutError
from steadyrun.checkpoint.libc import libc_function
from steadyrun.checkpoint.saves import TierName
from steadyrun.core.errors import SteadyrunError

__all__ = [
    "MOST_SLOTS",
    "Arena",
    "ArenaError",
    "BlobsTooLargeError",
    "Control",
    "Damaged",
    "Slot",
    "SlotBusyError",
    "SlotState",
    "SlotView",
    "Wanted",
    "affordable_slots",
    "available_bytes",
    "choose_slot",
    "memory_needed_bytes",
]

MOST_SLOTS: Final = 16
_PAGE: Final = ALIGN_BYTES
_WORD: Final = 8
_DIGEST: Final = 16  # bytes of an xxh3-128

# Words of the control page. The first nine never change.
_C_MAGIC, _C_VERSION, _C_SLOTS, _C_BLOB_BYTES, _C_LAYOUT_BYTES, _C_SIZE_BYTES = range(6)
_C_LAYOUT_SUM: Final = 6  # two words
_C_SUM: Final = 8  # xxh3-64 of the words before it
_C_WANTED, _C_RANK_STEP, _C_SAVER_BEAT = 16, 24, 32  # each in a cache line of its own
_C_BUSY: Final = 40  # one word per slot
_MAGIC: Final = int.from_bytes(b"strdyMEM", "little")
_VERSION: Final = 1

# The wanted save is one word, so that it can be told in one store: serial (16 bits), tiers (8), step + 1 (40).
_TIERS: Final = tuple(TierName)
_STEP_BITS, _TIER_BITS, _SERIAL_BITS = 40, 8, 16

# Words of a slot's header.
_S_STATE: Final = 0
_S_STEP, _S_ATTEMPT, _S_GENERATION, _S_CREATED, _S_BLOBS_BYTES, _S_NUMBER, _S_SUM = range(8, 15)
_RECORD: Final = struct.Struct("=QQQdQQQ")  # these seven
_LOOKS: Final = 3

# States differ in about half of their bits: no flipped bit turns one into another.
_EMPTY: Final = 0
_WRITING: Final = 0x5772_6974_696E_6721
_SEALED: Final = 0xA1B5_3EC9_9D62_C2D7

# The digest table: checksum of the rest (zeros: there are no digests), generation, a spare word, a row per entry, a row
# for the objects. A row of zeros is a digest not taken yet.
_T_SUM: Final = slice(0, _DIGEST)
_T_GENERATION: Final = slice(_DIGEST, _DIGEST + _WORD)
_T_ROWS: Final = 2 * _DIGEST
_NO_DIGEST: Final = bytes(_DIGEST)

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not in Python's mmap module
_MFD_NOEXEC_SEAL: Final = 0x8  # Linux 6.3; with vm.memfd_noexec=2 no other file is given
_POPULATE_BYTES: Final = 8 << 20  # about 8 ms at first, 3 ms later: as long may malloc in another thread wait
_TOUCH_BYTES: Final = 1 << 20
_ORDER: Final = sys.byteorder


class ArenaError(SteadyrunError):
    """Snapshot memory that cannot be had, is damaged, or is none; the text says what and why."""


class BlobsTooLargeError(ArenaError):
    """The objects need more room than the slots have: *needed_bytes*; a new arena has to be asked for."""

    def __init__(self, needed_bytes: int, blob_bytes: int) -> None:
        super().__init__(
            f"cannot put {needed_bytes:,} bytes of objects into a snapshot that has room for {blob_bytes:,}; "
            f"snapshot memory with more room has to be made"
        )
        self.needed_bytes = needed_bytes


class SlotBusyError(ArenaError):
    """The saver is reading this slot; nothing was changed in it."""


class SlotState(enum.Enum):
    """What is in a slot. DAMAGED: its header says what no writer wrote; nothing in it can be used."""

    EMPTY = "empty"
    WRITING = "writing"
    SEALED = "sealed"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot's header. Only of a SEALED slot does it describe what is in it.

    Attributes:
        step: the last step done, as given to ``save``.
        attempt, generation: ``(attempt, generation)`` grows with every save of this rank.
        blobs_bytes: used for objects, their lengths included.
    """

    state: SlotState
    step: int = 0
    attempt: int = 0
    generation: int = 0
    created_unix_s: float = 0.0
    blobs_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Damaged:
    """A part of a slot that is not what its checksum says.

    Attributes:
        part: the entry's key, or "header", "digests", "objects".
        offsets: of the entry.
        why: for a person; begins with what is damaged.
        index: of the entry in the layout; None for the other parts.
    """

    part: str
    offsets: tuple[int, ...]
    why: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """The save that the saver has ordered. *serial* changes with every order."""

    step: int
    tiers: frozenset[TierName]
    serial: int


# -- geometry ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Geometry:
    """Where everything is, bytes from the beginning of the file; slot places from the beginning of the slot."""

    layout_bytes: int
    digests_at: int
    digests_bytes: int
    blobs_at: int
    payload_at: int
    slot_bytes: int
    slots_at: int
    size_bytes: int

    @classmethod
    def of(cls, layout: Layout, layout_bytes: int, blob_bytes: int, slots: int) -> _Geometry:
        digests_bytes = _T_ROWS + (len(layout.entries) + 1) * _DIGEST
        blobs_at = _PAGE + _pages(digests_bytes)
        payload_at = blobs_at + _pages(blob_bytes)
        slot_bytes = payload_at + layout.payload_bytes
        slots_at = _PAGE + _pages(layout_bytes)
        return cls(
            layout_bytes,
            _PAGE,
            digests_bytes,
            blobs_at,
            payload_at,
            slot_bytes,
            slots_at,
            slots_at + slots * slot_bytes,
        )


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


def memory_needed_bytes(layout: Layout, blob_bytes: int, slots: int) -> int:
    """How large the snapshot memory of a rank with this layout is."""
    return _Geometry.of(layout, len(layout.to_json().encode()), blob_bytes, slots).size_bytes


def choose_slot(views: Sequence[SlotView], busy: Sequence[int]) -> int | None:
    """Which slot the next snapshot goes to; None when it has to be left out.

    Never one that the saver reads, and never the newest sealed one unless it is the only slot there is. Of the others
    one without a snapshot, else the oldest.

    Args:
        busy: how often the saver holds each slot.
    """
    sealed = [i for i, v in enumerate(views) if v.state is SlotState.SEALED]
    newest = max(sealed, key=lambda i: (views[i].attempt, views[i].generation), default=None)
    if len(views) == 1:
        newest = None
    free = [i for i in range(len(views)) if not busy[i] and i != newest]

    def worth(i: int) -> tuple[bool, int, int]:
        return views[i].state is SlotState.SEALED, views[i].attempt, views[i].generation

    return min(free, key=worth, default=None)


# -- the arena ---------------------------------------------------------------------------------------------------------
class Arena:
    """The mapped snapshot memory of one rank. Made by the saver with ``create``, opened elsewhere with ``attach``.

    Attributes:
        fd: ours to close; hand out copies.
        blob_bytes: room for objects in each slot.
    """

    def __init__(self, fd: int, mapping: mmap.mmap, layout: Layout, geometry: _Geometry, blob_bytes: int) -> None:
        self.fd = fd
        self.layout = layout
        self.blob_bytes = blob_bytes
        self.size_bytes = geometry.size_bytes
        self._lock = threading.Lock()
        self._mapping: mmap.mmap | None = mapping
        self._view = memoryview(mapping)
        slots = (geometry.size_bytes - geometry.slots_at) // geometry.slot_bytes
        self.control = Control(self._view[:_PAGE].cast("Q"), slots)
        self.slots = tuple(
            Slot(i, self._view[at : at + geometry.slot_bytes], layout, geometry, self.control)
            for i in range(slots)
            for at in (geometry.slots_at + i * geometry.slot_bytes,)
        )

    @classmethod
    def create(cls, layout: Layout, blob_bytes: int, slots: int) -> Self:
        """New memory with empty slots. It takes no memory before it is touched: see ``prefault``.

        Raises:
            ArenaError: the system does not give it.
            ValueError: *slots* is not 1 to ``MOST_SLOTS``.
        """
        if not 1 <= slots <= MOST_SLOTS:
            raise ValueError(f"slots={slots} is not between 1 and {MOST_SLOTS}")
        text = layout.to_json().encode()
        geometry = _Geometry.of(layout, len(text), blob_bytes, slots)
        problem = _layout_problem(layout)
        if problem:
            raise ArenaError(f"cannot make snapshot memory for rank {layout.rank}: {problem}")
        fd = -1
        try:
            fd = _memory_file(f"steadyrun-snapshot-{layout.rank}")
            os.ftruncate(fd, geometry.size_bytes)
            # Nobody may cut the file: the next access of the saver would be a SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapping = mmap.mmap(fd, geometry.size_bytes)
        except (OSError, ValueError, OverflowError) as e:
            if fd >= 0:
                os.close(fd)
            raise ArenaError(
                f"cannot get {geometry.size_bytes:,} bytes of snapshot memory for rank {layout.rank}: {_reason(e)}; "
                f"look at ulimit -v and -f, and at the memory limit of the job"
            ) from e
        mapping[_PAGE : _PAGE + len(text)] = text
        words = memoryview(mapping)[:_PAGE].cast("Q")
        words[_C_MAGIC] = _MAGIC
        words[_C_VERSION] = _VERSION
        words[_C_SLOTS] = slots
        words[_C_BLOB_BYTES] = blob_bytes
        words[_C_LAYOUT_BYTES] = len(text)
        words[_C_SIZE_BYTES] = geometry.size_bytes
        words[_C_LAYOUT_SUM : _C_LAYOUT_SUM + 2] = memoryview(xxhash.xxh3_128_digest(text)).cast("Q")
        words[_C_SUM] = xxhash.xxh3_64_intdigest(words[:_C_SUM])
        words.release()
        return cls(fd, mapping, layout, geometry, blob_bytes)

    @classmethod
    def attach(cls, fd: int) -> Self:
        """The memory behind a descriptor that came from elsewhere; nothing in it is trusted unseen.

        The descriptor becomes the arena's. After an error it is still the caller's.

        Raises:
            ArenaError: it is no snapshot memory of this version, or it is cut or damaged.
        """
        layout, geometry, blob_bytes = _inspect(fd)
        try:
            mapping = mmap.mmap(fd, geometry.size_bytes)
        except (OSError, ValueError) as e:
            raise ArenaError(f"cannot map {geometry.size_bytes:,} bytes of snapshot memory: {_reason(e)}") from e
        return cls(fd, mapping, layout, geometry, blob_bytes)

    def prefault(self, should_stop: Callable[[], bool] | None = None) -> bool:
        """Take all of the memory now, and map it, so that no later copy waits for a page; call it in a thread.

        Costs 0.6 to 2 CPU seconds per GB the first time, 0.2 to 0.4 in every further process. Other threads run
        meanwhile, and snapshots may be written and read. Not before a restore: that reads each page once, and the
        kernel maps what is there by the way for 0.06 CPU seconds per GB.

        Args:
            should_stop: asked before every few megabytes.

        Returns:
            False when it was stopped, also by ``close``.

        Raises:
            ArenaError: there is not enough memory.
        """
        with self._lock:
            mapping = self._mapping
            if mapping is None:
                return False
            # While these live the mapping stays where it is, whoever closes the arena.
            view = memoryview(mapping)
            pin = ctypes.c_char.from_buffer(mapping)
            fd = os.dup(self.fd)
        try:
            populate = _Populate(ctypes.addressof(pin), fd, view)
            for at in range(0, self.size_bytes, _POPULATE_BYTES):
                if self._mapping is None or (should_stop is not None and should_stop()):
                    return False
                populate(at, min(_POPULATE_BYTES, self.size_bytes - at))
            return True
        finally:
            os.close(fd)
            view.release()

    def close(self) -> None:
        """Give back what is ours. The mapping itself goes with the last view into it that others still have."""
        with self._lock:
            mapping, self._mapping = self._mapping, None
            if mapping is None:
                return
            for slot in self.slots:
                slot.close()
            self.control.close()
            self._view.release()
            with contextlib.suppress(BufferError):
                mapping.close()
            os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Control:
    """The words by which saver and rank tell each other things without a message."""

    def __init__(self, words: memoryview, slots: int) -> None:
        self._words = words
        self._slots = slots
        self._lock = threading.Lock()

    # saver -> rank
    def want(self, step: int | None, tiers: Iterable[TierName] = ()) -> None:
        """Order the rank to save once *step* is done; None: no save is wanted."""
        serial = ((self._words[_C_WANTED] >> (_STEP_BITS + _TIER_BITS)) + 1) % (1 << _SERIAL_BITS)
        bits = sum(1 << _TIERS.index(t) for t in set(tiers))
        planned = 0 if step is None else step + 1
        if not 0 <= planned < 1 << _STEP_BITS:
            raise ValueError(f"step {step} is not between 0 and 2^{_STEP_BITS} - 2")
        self._words[_C_WANTED] = (serial << _TIER_BITS | bits) << _STEP_BITS | planned

    def wanted(self) -> Wanted | None:
        """The newest order; None when there is none. Cheap enough for every step."""
        word = self._words[_C_WANTED]
        planned = word & (1 << _STEP_BITS) - 1
        if not planned:
            return None
        bits = word >> _STEP_BITS & (1 << _TIER_BITS) - 1
        tiers = frozenset(t for i, t in enumerate(_TIERS) if bits >> i & 1)
        return Wanted(planned - 1, tiers, word >> (_STEP_BITS + _TIER_BITS))

    @property
    def saver_beat(self) -> int:
        """Set by the saver to another value as long as it works."""
        return self._words[_C_SAVER_BEAT]

    @saver_beat.setter
    def saver_beat(self, value: int) -> None:
        self._words[_C_SAVER_BEAT] = value

    # rank -> saver
    @property
    def rank_step(self) -> int | None:
        """The last step that the rank has done; None before the first."""
        value = self._words[_C_RANK_STEP]
        return value - 1 if value else None

    @rank_step.setter
    def rank_step(self, step: int | None) -> None:
        self._words[_C_RANK_STEP] = 0 if step is None else step + 1

    def busy(self) -> tuple[int, ...]:
        """How often the saver holds each slot."""
        return tuple(self._words[_C_BUSY : _C_BUSY + self._slots])

    def clear_busy(self) -> None:
        """Forget the holds of a saver that died; by the next one, before it holds anything."""
        for slot in range(self._slots):
            self._words[_C_BUSY + slot] = 0

    def add_busy(self, slot: int, by: int) -> None:
        """For ``Slot``: safe between threads of the saver, the only one to call it."""
        with self._lock:
            self._words[_C_BUSY + slot] = max(self._words[_C_BUSY + slot] + by, 0)

    def is_busy(self, slot: int) -> bool:
        return self._words[_C_BUSY + slot] > 0

    def close(self) -> None:
        self._words.release()


class Slot:
    """Room for one snapshot. One writer at a time: the rank (or the saver, for what comes from another node).

    The writer calls ``begin``, fills ``payload`` and ``write_blobs``, then ``seal``. The saver calls ``hold``, reads,
    and calls ``let_go``; digests are its business.
    """

    def __init__(self, number: int, view: memoryview, layout: Layout, geometry: _Geometry, control: Control) -> None:
        self.number = number
        self._layout = layout
        self._control = control
        self._words = view[:_PAGE].cast("Q")
        self._doubles = view[:_PAGE].cast("d")
        self._digests = view[geometry.digests_at : geometry.digests_at + geometry.digests_bytes]
        self._blobs = view[geometry.blobs_at : geometry.payload_at]
        self._payload = view[geometry.payload_at :]
        self._begun: int | None = None  # generation; between begin and seal
        self._lock = threading.Lock()

    # -- header ---------------------------------------------------------------------------------------------------
    def view(self) -> SlotView:
        """What the header says now. Never blocks."""
        for _ in range(_LOOKS):
            state = self._words[_S_STATE]
            record = bytes(self._words[_S_STEP : _S_SUM + 1])
            *fields, total = _RECORD.unpack(record)
            is_right = total == _record_sum(record) and fields[-1] == self.number
            if is_right or state != _SEALED:
                break  # else a writer may be going from one snapshot to the next just now
        if state == _EMPTY:
            return SlotView(SlotState.EMPTY)
        if state == _SEALED and is_right:
            kind = SlotState.SEALED
        else:
            kind = SlotState.WRITING if state == _WRITING else SlotState.DAMAGED
        step, attempt, generation, created_unix_s, blobs_bytes, _ = fields
        return SlotView(kind, step, attempt, generation, created_unix_s, blobs_bytes)

    def begin(self, step: int, attempt: int, generation: int, created_unix_s: float | None = None) -> None:
        """Give up what is in the slot and start to write.

        Raises:
            SlotBusyError: the saver reads it; it stays as it is.
        """
        w = self._words
        before = w[_S_STATE]
        if not self._control.is_busy(self.number):
            w[_S_STATE] = _WRITING
            _fence(self._lock)
        if self._control.is_busy(self.number):
            w[_S_STATE] = before
            raise SlotBusyError(f"cannot write to slot {self.number}: it is being written to storage")
        self._digests[_T_SUM] = _NO_DIGEST
        w[_S_STEP] = step
        w[_S_ATTEMPT] = attempt
        w[_S_GENERATION] = generation
        self._doubles[_S_CREATED] = time.time() if created_unix_s is None else created_unix_s
        w[_S_BLOBS_BYTES] = 0
        w[_S_NUMBER] = self.number
        self._begun = generation

    def seal(self) -> None:
        """Say that all is written. After it the slot is valid, whatever becomes of the writer.

        Raises:
            ArenaError: it was not begun, or its objects have not been written.
        """
        if self._begun is None:
            raise ArenaError(f"cannot seal slot {self.number}: nothing was begun in it")
        if self._layout.objects and not self._words[_S_BLOBS_BYTES]:
            raise ArenaError(f"cannot seal slot {self.number}: its {len(self._layout.objects)} objects are not written")
        self._begun = None
        self._words[_S_SUM] = _record_sum(bytes(self._words[_S_STEP : _S_SUM + 1]))
        self._words[_S_STATE] = _SEALED

    def release(self) -> None:
        """Empty the slot. Not while a rank may be writing in it."""
        self._begun = None
        self._words[_S_STATE] = _EMPTY

    # -- holding --------------------------------------------------------------------------------------------------
    def hold(self, generation: int | None = None) -> bool:
        """Keep the rank from writing here, until ``let_go``; holds add up.

        Returns:
            False, and nothing is held, when the slot is not SEALED (any more), or not with *generation*.
        """
        self._control.add_busy(self.number, 1)
        _fence(self._lock)
        seen = self.view()
        if seen.state is SlotState.SEALED and generation in (None, seen.generation):
            return True
        self.let_go()
        return False

    def let_go(self) -> None:
        self._control.add_busy(self.number, -1)

    # -- content --------------------------------------------------------------------------------------------------
    def payload(self, entry: Entry) -> memoryview:
        """The bytes of one entry of the arena's layout, writable."""
        return self._payload[entry.at_bytes : entry.at_bytes + entry.size_bytes]

    @property
    def payload_view(self) -> memoryview:
        """The whole payload: entry after entry, page-aligned."""
        return self._payload

    def write_blobs(self, blobs: Sequence[bytes | memoryview]) -> None:
        """Put the objects' bytes into the slot, one for each object of the layout, in its order.

        Raises:
            BlobsTooLargeError: they do not fit.
            ValueError: not as many as the layout has objects.
        """
        count = len(self._layout.objects)
        if len(blobs) != count:
            raise ValueError(f"{len(blobs)} blobs for the {count} objects of the layout")
        lengths = [memoryview(b).nbytes for b in blobs]
        at = count * _WORD
        needed_bytes = at + sum(lengths)
        if needed_bytes > len(self._blobs):
            raise BlobsTooLargeError(needed_bytes, len(self._blobs))
        self._blobs[:at] = b"".join(n.to_bytes(_WORD, _ORDER) for n in lengths)
        for blob, length in zip(blobs, lengths, strict=True):
            self._blobs[at : at + length] = memoryview(blob).cast("B")
            at += length
        self._words[_S_BLOBS_BYTES] = needed_bytes

    def blobs(self) -> list[memoryview]:
        """The objects' bytes, in the layout's order, without a copy.

        Raises:
            ArenaError: their lengths cannot be right.
        """
        used = self._words[_S_BLOBS_BYTES]
        if not used:
            return []
        at = len(self._layout.objects) * _WORD
        lengths = self._blobs[:at].cast("Q").tolist() if at <= used <= len(self._blobs) else []
        if at + sum(lengths) != used:
            raise ArenaError(f"the objects in slot {self.number} are damaged: their lengths do not make {used:,} bytes")
        out = []
        for length in lengths:
            out.append(self._blobs[at : at + length])
            at += length
        return out

    # -- digests --------------------------------------------------------------------------------------------------
    def digests(self) -> list[str | None]:
        """The xxh3-128 of every entry, 32 hexadecimal digits, and last of the objects; None where none was taken.

        Raises:
            ArenaError: the table is damaged.
        """
        rows = len(self._layout.entries) + 1
        table = self._digests.tobytes()
        if table[_T_SUM] == _NO_DIGEST:
            return [None] * rows
        if xxhash.xxh3_128_digest(table[_DIGEST:]) != table[_T_SUM]:
            raise ArenaError(f"the checksums in slot {self.number} are damaged")
        if int.from_bytes(table[_T_GENERATION], _ORDER) != self._words[_S_GENERATION]:
            raise ArenaError(f"the checksums in slot {self.number} are those of another snapshot")
        cut = [table[_T_ROWS + i * _DIGEST : _T_ROWS + (i + 1) * _DIGEST] for i in range(rows)]
        return [None if row == _NO_DIGEST else row.hex() for row in cut]

    def digest(self, index: int) -> str | None:
        """One of ``digests``, which is the way to get many of them."""
        return self.digests()[index]

    def record_digests(self, known: Mapping[int, str]) -> None:
        """Note digests that were computed on the way, by number of the entry; as ``compute_digests`` otherwise."""
        with self._lock:
            try:
                rows = self.digests()
            except ArenaError:
                rows = [None] * (len(self._layout.entries) + 1)
            for index, digest in known.items():
                rows[index] = digest
            body = b"".join(_NO_DIGEST if r is None else bytes.fromhex(r) for r in rows)
            body = self._words[_S_GENERATION].to_bytes(_WORD, _ORDER) + bytes(_WORD) + body
            self._digests[_T_SUM] = _NO_DIGEST  # killed from here to the last store: there are no digests
            self._digests[_DIGEST:] = body
            self._digests[_T_SUM] = xxhash.xxh3_128_digest(body)

    def compute_digests(self, indices: Collection[int] | None = None) -> None:
        """Take the digests of what is in memory now: of these entries, or of all that have none yet.

        By the saver, once a slot is sealed. A damaged table is made anew: ask ``digests`` or ``verify`` before that
        where it matters. Costs 0.1 CPU seconds per GB; other threads run meanwhile.
        """
        if indices is None:
            try:
                indices = [i for i, digest in enumerate(self.digests()) if digest is None]
            except ArenaError:
                indices = range(len(self._layout.entries) + 1)
        self.record_digests({i: self._hash(i) for i in indices})

    def _hash(self, index: int) -> str:
        if index == len(self._layout.entries):
            return xxhash.xxh3_128_hexdigest(self._blobs[: self._words[_S_BLOBS_BYTES]])
        return xxhash.xxh3_128_hexdigest(self.payload(self._layout.entries[index]))

    def verify(self) -> list[Damaged]:
        """What is not as it was when its digest was taken. Empty: every byte is right.

        A part without a digest counts as damaged: call ``compute_digests`` first where that is not meant.
        """
        seen = self.view()
        if seen.state is not SlotState.SEALED:
            is_damaged = seen.state is SlotState.DAMAGED
            why = "is damaged" if is_damaged else f"says {seen.state.value}: there is no snapshot in it"
            return [Damaged("header", (), f"the header of slot {self.number} {why}")]
        try:
            digests = self.digests()
        except ArenaError as e:
            return [Damaged("digests", (), str(e))]
        out: list[Damaged] = []
        for i, digest in enumerate(digests):
            if digest is not None and digest == self._hash(i):
                continue
            why = "is without a checksum" if digest is None else "is not what its checksum says"
            if i == len(self._layout.entries):
                out.append(Damaged("objects", (), f"the objects in slot {self.number}: what is in memory {why}"))
                continue
            entry = self._layout.entries[i]
            text = f"{entry.key} at {list(entry.offsets)} in slot {self.number}: what is in memory {why}"
            out.append(Damaged(entry.key, entry.offsets, text, i))
        return out

    def close(self) -> None:
        for view in (self._words, self._doubles, self._digests, self._blobs, self._payload):
            with contextlib.suppress(BufferError):
                view.release()


# -- the system --------------------------------------------------------------------------------------------------------
def _fence(lock: threading.Lock) -> None:
    """What was stored before is seen by others before anything is loaded after.

    ``begin`` stores the state and then looks at the holds, ``hold`` the other way round: without a fence both could see
    the other's old value. Taking and freeing a lock is an atomic exchange on x86; on ARM what follows the second
    acquire comes after what precedes the first release.
    """
    with lock:
        pass
    with lock:
        pass


def _record_sum(record: bytes) -> int:
    return xxhash.xxh3_64_intdigest(record[:-_WORD])


def _memory_file(name: str) -> int:
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    except OSError as e:
        if e.errno != errno.EINVAL:  # the answer of a kernel that does not know the flag
            raise
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _inspect(fd: int) -> tuple[Layout, _Geometry, int]:
    """The layout, geometry and room for objects of the arena behind *fd*, by reads: a cut file cannot hurt them."""
    refused = "cannot use this descriptor as snapshot memory: "
    try:
        size_bytes = os.fstat(fd).st_size
        page = os.pread(fd, _PAGE, 0)
    except OSError as e:
        raise ArenaError(f"{refused}{_reason(e)}") from e
    if len(page) < _PAGE:
        raise ArenaError(f"{refused}it has {size_bytes:,} bytes")
    words = memoryview(page).cast("Q").tolist()
    if words[_C_MAGIC] != _MAGIC:
        raise ArenaError(f"{refused}it is something else")
    if words[_C_VERSION] != _VERSION:
        raise ArenaError(f"{refused}it is of version {words[_C_VERSION]}, this is {_VERSION}")
    if words[_C_SUM] != xxhash.xxh3_64_intdigest(page[: _C_SUM * _WORD]):
        raise ArenaError(f"{refused}its control page is damaged")
    if words[_C_SIZE_BYTES] != size_bytes:
        raise ArenaError(f"{refused}it has {size_bytes:,} bytes and should have {words[_C_SIZE_BYTES]:,}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        text = os.pread(fd, words[_C_LAYOUT_BYTES], _PAGE)
    except OSError as e:
        raise ArenaError(f"{refused}{_reason(e)}") from e
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ArenaError(f"{refused}it is not sealed, others could cut it off")
    sum_at = _C_LAYOUT_SUM * _WORD
    if xxhash.xxh3_128_digest(text) != page[sum_at : sum_at + _DIGEST]:
        raise ArenaError(f"{refused}the layout in it is damaged")
    try:
        layout = Layout.from_json(text)
    except LayoutError as e:
        raise ArenaError(f"{refused}{e}") from e
    geometry = _Geometry.of(layout, len(text), words[_C_BLOB_BYTES], words[_C_SLOTS])
    problem = _layout_problem(layout)
    if not problem and geometry.size_bytes != size_bytes:
        problem = f"its layout needs {geometry.size_bytes:,} bytes and it has {size_bytes:,}"
    if problem:
        raise ArenaError(f"{refused}{problem}")
    return layout, geometry, words[_C_BLOB_BYTES]


def _layout_problem(layout: Layout) -> str | None:
    end = 0
    for e in layout.entries:
        if e.at_bytes % ALIGN_BYTES or e.at_bytes < end or e.size_bytes < 0:
            return f"{e.key} lies at {e.at_bytes:,} with {e.size_bytes:,} bytes, behind {end:,}: not in order on pages"
        end = e.at_bytes + e.size_bytes
    return None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class _Populate:
    """Takes memory for pieces of a mapping, without changing what is in it."""

    def __init__(self, address: int, fd: int, view: memoryview) -> None:
        self._address = address
        self._fd = fd
        self._view = view
        # mmap.madvise would hold the interpreter's lock for as long as the kernel clears pages.
        self._madvise = libc_function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._is_known = True

    def __call__(self, at: int, size_bytes: int) -> None:
        if self._is_known:
            if self._madvise(self._address + at, size_bytes, _MADV_POPULATE_WRITE) == 0:
                return
            code = ctypes.get_errno()
            if code != errno.EINVAL:  # an older kernel
                raise ArenaError(
                    f"cannot take memory for a snapshot: {os.strerror(code)}; ask for fewer snapshots in memory"
                )
            self._is_known = False
        try:
            os.posix_fallocate(self._fd, at, size_bytes)
        except OSError as e:
            raise ArenaError(
                f"cannot take memory for a snapshot: {_reason(e)}; ask for fewer snapshots in memory"
            ) from e
        # One read of a page maps it, writable, and cannot disturb who writes there.
        for piece in range(at, at + size_bytes, _TOUCH_BYTES):
            self._view[piece : min(piece + _TOUCH_BYTES, at + size_bytes) : _PAGE].tobytes()
