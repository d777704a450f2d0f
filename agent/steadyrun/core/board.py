"""Layout of the board, and how to read it: the shared-memory page through which ranks report to their node's agent.

One anonymous shared file per node and run, made by the agent. A header page, then one slot per local rank. Everything
is a 64-bit word in native order (unsigned, or a double), so that a store is one aligned machine write; a rank needs no
lock and no system call. A slot belongs to one incarnation (owner pid and attempt): whoever reads compares both with
the process it asks about, and what a dead incarnation left is ignored and wiped before the next one starts.

Consistency: each word is right by itself, and that is all a reader may rely on. A copy taken while the rank goes from
one section to the next can show both as open, or neither, for that instant.

Time words are nanoseconds of CLOCK_MONOTONIC minus the board's ``base_ns`` (so that 56 bits are enough); 0 means never.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from steadyrun.core.errors import BoardError
from steadyrun.core.guards import read_signals
from steadyrun.core.integrity import STATES, IntegrityWords
from steadyrun.core.layout import (
    F_EXCEPTION,
    F_STEP_IS_GLOBAL,
    F_USES_SHOULD_STOP,
    H_AGENT_PID,
    H_BASE_NS,
    H_MAGIC,
    H_SLOT_WORDS,
    H_SLOTS,
    H_VERSION,
    HEADER_WORDS,
    LANE_DEPTH,
    LANE_WORDS,
    LANES,
    MAGIC,
    NAME_BYTES,
    NAMES,
    OTHER,
    RING,
    RING_SHIFT,
    S_ATTACHED,
    S_ATTEMPT,
    S_BEAT_AT,
    S_BEATS,
    S_CKPT_DONE,
    S_DROPPED,
    S_FINISHED,
    S_FIRST_STEP_AT,
    S_FLAGS,
    S_HASHES,
    S_LANES,
    S_NAME_COUNTS,
    S_NAME_TABLE,
    S_NAMES,
    S_OWNER_PID,
    S_RANK,
    S_REPLAY,
    S_RING,
    S_RING_COUNT,
    S_STEP,
    S_STEP_AT,
    S_STEP_RING,
    S_STEP_RING_COUNT,
    S_STEPS_DONE,
    S_STOP_CALLS,
    S_TIMING,
    S_TIMING_COUNT,
    SLOT_WORDS,
    STEP_RING,
    TAG_S,
    TIMING_FIELDS,
    TIMING_RING,
    TIMING_WORDS,
    VERSION,
    fits,
    now_word,
)
from steadyrun.core.replay import ReplayWords
from steadyrun.core.timing import StepTiming

__all__ = [
    "Board",
    "OpenSection",
    "SectionDuration",
    "SlotView",
    "now_word",
]


@dataclass(frozen=True, slots=True)
class OpenSection:
    """A section a rank is in now.

    Attributes:
        name: as given by the script, at most 48 bytes of UTF-8.
        since_s: CLOCK_MONOTONIC seconds at entry.
        first: it has not been completed before in this attempt.
        lane: 0 for the main thread.
    """

    name: str
    since_s: float
    first: bool = False
    lane: int = 0


class SectionDuration(NamedTuple):
    """One completed section: its name, how long it took in seconds, and its place in the count (0 is the first)."""

    name: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class SlotView:
    """What one incarnation has reported; times are CLOCK_MONOTONIC seconds, None where nothing was reported."""

    pid: int
    attempt: int
    rank: int
    attached_s: float | None
    finished_s: float | None
    step: int | None
    step_at_s: float | None
    steps_done: int
    step_is_global: bool
    first_step_s: float | None
    beats: int
    beat_at_s: float | None
    last_change_s: float | None
    stop_calls: int
    uses_should_stop: bool
    checkpoints_done: int
    has_exception: bool
    dropped: int
    sections: tuple[OpenSection, ...] = ()

    @property
    def progress_s(self) -> float | None:
        """Time of the newest sign of progress of any kind."""
        signs = [t for t in (self.attached_s, self.step_at_s, self.beat_at_s, self.last_change_s) if t is not None]
        signs += [s.since_s for s in self.sections]
        return max(signs, default=None)


class Board:
    """The mapped page. The agent creates it; ranks and ``steadyctl`` open it.

    Words are reached through ``words``, a memoryview of unsigned 64-bit items over the whole file.
    """

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self._fd: int | None = None
        self.words = memoryview(mapping).cast("Q")
        self._doubles = memoryview(mapping).cast("d")
        self.base_ns = int(self.words[H_BASE_NS])
        self.slots = int(self.words[H_SLOTS])
        self._names: dict[int, tuple[int, list[str]]] = {}  # by slot: its owner, and names as read

    @classmethod
    def create(cls, path: Path, slots: int) -> Board:
        """A new board in a file that must not exist, readable by its owner only.

        Raises:
            BoardError: no space or no permission in the folder (usually /dev/shm).
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise BoardError(f"cannot create the board {path}: {e.strerror}; choose another folder") from e
        try:
            return cls(path, cls._initialise(fd, slots))
        finally:
            os.close(fd)

    @classmethod
    def create_anonymous(cls, slots: int) -> Board:
        """A new board without a name: nothing is left in /dev/shm however the agent dies.

        Other processes of the same user open it through ``path``, which is ``/proc/<agent>/fd/<n>``: valid as long as
        the agent lives, and a mapping made before stays valid after its death.
        """
        fd = os.memfd_create("steadyrun-board", os.MFD_CLOEXEC)
        try:
            mapping = cls._initialise(fd, slots)
        except BoardError:
            os.close(fd)
            raise
        board = cls(Path(f"/proc/{os.getpid()}/fd/{fd}"), mapping)
        board._fd = fd
        return board

    @staticmethod
    def _initialise(fd: int, slots: int) -> mmap.mmap:
        size = (HEADER_WORDS + slots * SLOT_WORDS) * 8
        try:
            os.posix_fallocate(fd, 0, size)  # a full tmpfs must fail here, not as SIGBUS in a rank
            mapping = mmap.mmap(fd, size)
        except OSError as e:
            raise BoardError(f"cannot get {size} bytes of shared memory for the board: {e.strerror}") from e
        words = memoryview(mapping).cast("Q")
        words[H_VERSION] = VERSION
        words[H_SLOTS] = slots
        words[H_SLOT_WORDS] = SLOT_WORDS
        words[H_BASE_NS] = time.monotonic_ns() - 1_000_000
        words[H_AGENT_PID] = os.getpid()
        words[H_MAGIC] = MAGIC
        words.release()
        return mapping

    @classmethod
    def open(cls, path: Path, writable: bool = True) -> Board:
        """An existing board.

        Raises:
            BoardError: it is not there, not ours, or of another version.
        """
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
            try:
                size = os.fstat(fd).st_size
                access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
                mapping = mmap.mmap(fd, size, access=access)
            finally:
                os.close(fd)
        except (OSError, ValueError) as e:
            raise BoardError(f"cannot open the board {path}: {e}; is the run still alive?") from e
        words = memoryview(mapping).cast("Q")
        ok = fits(words, size)
        words.release()
        if not ok:
            mapping.close()
            raise BoardError(f"{path} is not a board of this version of steadyrun; is another version running the job?")
        return cls(path, mapping)

    def slot_base(self, slot: int) -> int:
        """Index of the slot's first word in ``words``."""
        if not 0 <= slot < self.slots:
            raise BoardError(f"slot {slot} does not exist: the board has {self.slots} slots")
        return HEADER_WORDS + slot * SLOT_WORDS

    def clear_slot(self, slot: int) -> None:
        """Forget everything an earlier incarnation left; by the agent, before a spawn."""
        base = self.slot_base(slot)
        self._names.pop(base, None)
        self.words[base : base + SLOT_WORDS] = memoryview(bytes(SLOT_WORDS * 8)).cast("Q")

    def close(self, unlink: bool = False) -> None:
        """Unmap; whoever made a named board also removes the file."""
        self.words.release()
        self._doubles.release()
        self._mapping.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            return
        if unlink:
            self.path.unlink(missing_ok=True)

    # -- reading -----------------------------------------------------------------------------------------------------
    def view(self, slot: int) -> SlotView | None:
        """What the slot says now, or None when nobody owns it. Never blocks."""
        base = self.slot_base(slot)
        copy = self.words[base : base + S_RING].tolist()
        return self._decode(base, copy) if copy[S_OWNER_PID] else None

    def _decode(self, base: int, c: list[int]) -> SlotView:
        def at(word: int) -> float | None:
            return (word + self.base_ns) / 1e9 if word else None

        sections: list[OpenSection] = []
        base_s = self.base_ns / 1e9
        last_change_s: float | None = None  # when a section was closed last
        lanes = cast(list[float], self._doubles[base + S_LANES : base + S_RING].tolist())
        for lane in range(LANES):
            start = lane * LANE_WORDS + 1
            is_open = True
            for entry in lanes[start : start + LANE_DEPTH]:
                if entry == 0.0:
                    break  # nothing was ever as deep
                tag, at_s = divmod(entry, TAG_S)
                is_open = is_open and tag > 0
                if is_open:
                    name_id = int(tag) - 1
                    first = name_id < NAMES and int(self.words[base + S_NAME_COUNTS + name_id]) == 0
                    sections.append(OpenSection(self._name(base, name_id), at_s + base_s, first, lane))
                elif tag == 0:
                    last_change_s = max(last_change_s or 0.0, at_s + base_s)
        flags = c[S_FLAGS]
        return SlotView(
            pid=c[S_OWNER_PID],
            attempt=c[S_ATTEMPT],
            rank=c[S_RANK],
            attached_s=at(c[S_ATTACHED]),
            finished_s=at(c[S_FINISHED]),
            step=c[S_STEP] - 1 if c[S_STEP] else None,
            step_at_s=at(c[S_STEP_AT]),
            steps_done=c[S_STEPS_DONE],
            step_is_global=bool(flags & F_STEP_IS_GLOBAL),
            first_step_s=at(c[S_FIRST_STEP_AT]),
            beats=c[S_BEATS],
            beat_at_s=at(c[S_BEAT_AT]),
            last_change_s=last_change_s,
            stop_calls=c[S_STOP_CALLS],
            uses_should_stop=bool(flags & F_USES_SHOULD_STOP),
            checkpoints_done=c[S_CKPT_DONE],
            has_exception=bool(flags & F_EXCEPTION),
            dropped=c[S_DROPPED],
            sections=tuple(sections),
        )

    def _name(self, base: int, name_id: int) -> str:
        """Names are only ever added by one owner, so that each is decoded once."""
        used = min(int(self.words[base + S_NAMES]), NAMES)
        if name_id == 0 or name_id >= used:
            return OTHER
        owner = int(self.words[base + S_OWNER_PID])
        known_of, names = self._names.get(base, (0, []))
        if known_of != owner or len(names) > used:
            names = []
            self._names[base] = (owner, names)
        for i in range(len(names), name_id + 1):
            start = base + S_NAME_TABLE + i * NAME_BYTES // 8
            raw = self.words[start : start + NAME_BYTES // 8].tobytes()
            names.append(raw.rstrip(b"\0").decode("utf-8", errors="replace") or OTHER)
        return names[name_id]

    def durations(self, slot: int, seen: int) -> tuple[list[SectionDuration], int, int]:
        """Sections completed since count *seen*: (durations in order, new count, how many were overwritten unread)."""
        base = self.slot_base(slot)
        entries, count, lost = self._unread(base + S_RING, RING, int(self.words[base + S_RING_COUNT]), seen)
        mask = (1 << RING_SHIFT) - 1
        return [SectionDuration(self._name(base, e >> RING_SHIFT), (e & mask) / 1e9) for e in entries], count, lost

    def step_times_s(self, slot: int, seen: int) -> tuple[list[float], int, int]:
        """Step times since count *seen*: (seconds in order, new count, how many were overwritten unread)."""
        base = self.slot_base(slot)
        count = int(self.words[base + S_STEP_RING_COUNT])
        entries, count, lost = self._unread(base + S_STEP_RING, STEP_RING, count, seen)
        return [ns / 1e9 for ns in entries], count, lost

    def _unread(self, start: int, size: int, count: int, seen: int) -> tuple[list[int], int, int]:
        """Entries of a ring since count *seen*, *count* itself, and how many were overwritten unread."""
        lost = max(count - seen - size, 0)
        first, last = (seen + lost) & (size - 1), count & (size - 1)
        if count <= seen:
            return [], count, 0
        if first < last:
            return self.words[start + first : start + last].tolist(), count, lost
        whole = self.words[start : start + size].tolist()
        return whole[first:] + whole[:last], count, lost

    def integrity(self, slot: int) -> IntegrityWords:
        """What the slot says of checks of the rank's bytes."""
        begin = self.slot_base(slot)
        base = begin + S_HASHES
        fd, generation, checks, interval, cost_ns, step_ns, ring, state, signals = self.words[base : base + 9].tolist()
        return IntegrityWords(
            state=STATES[state] if state < len(STATES) else STATES[0],
            ring_fd=fd - 1 if 0 < fd < 1 << 31 else None,
            ring=ring,
            replay=self._replay(slot),
            generation=generation,
            checks=checks,
            interval=interval,
            cost_s=cost_ns / 1e9,
            step_s=step_ns / 1e9,
            signals=read_signals(self.words, begin) if signals else (),
        )

    def _replay(self, slot: int) -> ReplayWords:
        base = self.slot_base(slot) + S_REPLAY
        return ReplayWords.read(self.words[base : base + 8].tolist())

    def timings(self, slot: int, seen: int) -> tuple[list[StepTiming], int, int]:
        """Step timings since count *seen*: (records in order, new count, how many were overwritten unread).

        Read more often than every ``TIMING_RING - 1`` steps: the oldest entry of a full ring may be about to be
        overwritten and counts as lost.
        """
        base = self.slot_base(slot)
        count = int(self.words[base + S_TIMING_COUNT])
        if count <= seen:
            return [], count, 0
        begin = max(seen, count - TIMING_RING + 1)
        words = self._timing_words(base + S_TIMING, begin, count)
        oldest = int(self.words[base + S_TIMING_COUNT]) - TIMING_RING + 1  # those before may have changed as we read
        first = max(begin, oldest)
        out: list[StepTiming] = []
        for at in range((first - begin) * TIMING_WORDS, len(words), TIMING_WORDS):
            timing = _timing(words[at : at + len(TIMING_FIELDS)])
            if timing is not None:
                out.append(timing)
        return out, count, min(first, count) - seen

    def _timing_words(self, start: int, begin: int, count: int) -> list[float]:
        """Of the entries from *begin* to before *count*, in order."""
        first, last = (i & (TIMING_RING - 1) for i in (begin, count))
        to_end = start + (TIMING_RING if first >= last else last) * TIMING_WORDS
        words = cast(list[float], self._doubles[start + first * TIMING_WORDS : to_end].tolist())
        if first >= last:
            words += cast(list[float], self._doubles[start : start + last * TIMING_WORDS].tolist())
        return words


def _timing(words: list[float]) -> StepTiming | None:
    """None where the words cannot be a timing: the rank's own code may write anywhere in its memory."""
    step, at_s, wall_s, busy_s, forward_s, backward_s, optimizer_s, data_s, checkpoint_s, wait_s, cpu_s = words[:11]
    probe_s, work, flags, starved_s, group_wait_s = (v if math.isfinite(v) else None for v in words[11:])
    if flags is None or not all(map(math.isfinite, words[:11])):
        return None
    return StepTiming(
        step=int(step),
        at_s=at_s,
        wall_s=wall_s,
        busy_s=busy_s,
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        data_s=data_s,
        checkpoint_s=checkpoint_s,
        wait_s=wait_s,
        cpu_s=cpu_s,
        probe_s=probe_s,
        work=work,
        flags=int(flags),
        starved_s=starved_s or 0.0,
        group_wait_s=group_wait_s,
    )
