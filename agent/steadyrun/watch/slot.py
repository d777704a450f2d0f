"""The rank's mapping of the board, and whether the slot may be claimed."""

from __future__ import annotations

import fcntl
import os
from mmap import mmap

from steadyrun.core.layout import (
    H_BASE_NS,
    H_SLOTS,
    HEADER_WORDS,
    S_OWNER_PID,
    S_TIMING,
    S_TIMING_COUNT,
    SLOT_WORDS,
    TIMING_FIELDS,
    TIMING_RING,
    TIMING_WORDS,
    fits,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Slot", "SlotError", "move_high", "timing_writer"]

HIGH_FD = 200  # a script's own files get the numbers they would have without us


class SlotError(Exception):
    """There is no slot for this process: the text says why."""


class Slot:
    """One rank's part of the mapped board.

    The mapping outlives the file: an agent that is gone, or has removed it, is not noticed here.

    Attributes:
        words: the whole board as writable unsigned 64-bit words.
        base: index of the slot's first word.
        base_ns: the board's time base.
    """

    __slots__ = ("base", "base_ns", "words")

    def __init__(self, path: str, number: int) -> None:
        """Raises OSError when there is no such file, SlotError when it holds no such slot."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size_bytes = os.fstat(fd).st_size
            words = memoryview(_map(fd, size_bytes)).cast("Q")
        finally:
            os.close(fd)
        if not fits(words, size_bytes):
            raise SlotError(f"{path} is not a board of this version of steadyrun")
        if not 0 <= number < words[H_SLOTS]:
            raise SlotError(f"the board has {words[H_SLOTS]} slots, no slot {number}")
        self.words = words
        self.base = HEADER_WORDS + number * SLOT_WORDS
        self.base_ns = words[H_BASE_NS]

    def check_free(self) -> None:
        """Raises SlotError when another live process has claimed the slot.

        That happens where a rank's program starts several interpreters (a shell script, say) and the in-rank side has
        got into more than one: the first has the slot.
        """
        owner = self.words[self.base + S_OWNER_PID]
        if owner in (0, os.getpid()):
            return
        try:
            os.kill(owner, 0)
        except ProcessLookupError:
            return
        except OSError:
            pass
        raise SlotError(f"process {owner} has this rank's slot")


def timing_writer(words: memoryview, base: int) -> Callable[..., None]:
    """What writes a step timing to the slot at *base*: a function of the values of ``TIMING_FIELDS``, in that order.

    Under a microsecond, no system call. One thread at a time may call it.
    """
    from struct import Struct  # here: torch has it by the time that there are steps

    pack_into = Struct(f"={len(TIMING_FIELDS)}d").pack_into
    raw = words.cast("B")
    first = (base + S_TIMING) * 8
    count_at = base + S_TIMING_COUNT
    mask, size_bytes = TIMING_RING - 1, TIMING_WORDS * 8
    count = 0

    def put_timing(*values: float) -> None:
        nonlocal count
        pack_into(raw, first + (count & mask) * size_bytes, *values)
        count += 1
        words[count_at] = count  # last: a reader takes no entry that is not whole

    return put_timing


def _map(fd: int, size_bytes: int) -> mmap:
    """Map the file. Until Python 3.13 a mapping keeps a duplicate of the descriptor: give it a high number."""
    fillers: list[int] = []
    try:
        try:
            while not fillers or fillers[-1] < HIGH_FD:
                fillers.append(os.dup(fd))
        except OSError:  # a low limit on open files: then the number is low
            for filler in fillers[-4:]:
                os.close(filler)
            del fillers[-4:]
        return mmap(fd, size_bytes)
    finally:
        for filler in fillers:
            os.close(filler)


def move_high(fd: int) -> int:
    """The same file under a high number, close-on-exec; *fd* is closed."""
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
    except OSError:
        os.set_inheritable(fd, False)
        return fd
    os.close(fd)
    return int(high)
