"""What one rank puts out for others of its node to compute again: memory without a name, found through the board."""

from __future__ import annotations

import os
from struct import Struct, error
from time import monotonic, sleep

from steadyrun.core.layout import H_SLOTS, HEADER_WORDS, S_ATTEMPT, S_OWNER_PID, S_RANK, S_REPLAY_BOX, SLOT_WORDS
from steadyrun.watch.slot import move_high

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AGREES", "DIFFERS", "NOTHING", "Box", "Peer", "Wait", "peers_of"]

NOTHING, AGREES, DIFFERS = range(3)  # what a rank has found in the microbatch of the next one
_MAGIC = 0x7265706C61793031  # "replay01"
_HEAD = Struct("=8Q")  # magic, armed, posted, bytes of the fingerprints, bytes of the microbatch, found, what, unused
_ARMED, _POSTED, _SIZE, _MICROBATCH, _FOUND, _WHAT = range(1, 7)
_WORD = Struct("=Q")
_DATA = 4096
_LOOK_S = 0.0002
_LOOK_LATER_S = 0.002


class Box:
    """The rank's own. Steps are stored plus one: 0 is none."""

    def __init__(self) -> None:
        """Raises OSError without memory."""
        self.fd = move_high(os.memfd_create("steadyrun-replay", os.MFD_CLOEXEC))
        os.ftruncate(self.fd, _DATA)
        os.pwrite(self.fd, _HEAD.pack(_MAGIC, 0, 0, 0, 0, 0, 0, 0), 0)

    def arm(self, step: int | None) -> None:
        """A microbatch of *step* will be put out; None: of none."""
        self._put(_ARMED, 0 if step is None else step + 1)

    def post(self, step: int, gradients: bytes, microbatch: bytes) -> None:
        """Raises OSError without memory; then nothing is put out."""
        self._put(_POSTED, 0)
        _write(self.fd, gradients, _DATA)
        _write(self.fd, microbatch, _DATA + len(gradients))
        self._put(_SIZE, len(gradients))
        self._put(_MICROBATCH, len(microbatch))
        self._put(_POSTED, step + 1)  # last: now whole

    def tell(self, step: int, what: int) -> None:
        """What this rank has found in the next one's."""
        self._put(_WHAT, what)
        self._put(_FOUND, step + 1)

    def clear(self) -> None:
        """Give the memory of the microbatch back."""
        self._put(_POSTED, 0)
        os.ftruncate(self.fd, _DATA)

    def close(self) -> None:
        os.close(self.fd)

    def _put(self, word: int, value: int) -> None:
        os.pwrite(self.fd, _WORD.pack(value), 8 * word)


class Wait:
    """How long a rank may wait for others, all in all; it adds up what was waited."""

    def __init__(self, limit_s: float) -> None:
        self._left_s = limit_s
        self.waited_s = 0.0

    def until(self, is_there: Callable[[], bool]) -> bool:
        """Whether it is there in time."""
        began_s = monotonic()
        try:
            while not is_there():
                took_s = monotonic() - began_s
                if took_s >= self._left_s:
                    return False
                sleep(_LOOK_S if took_s < 0.05 else _LOOK_LATER_S)
            return True
        finally:
            took_s = monotonic() - began_s
            self._left_s -= took_s
            self.waited_s += took_s


class Peer:
    """Another rank of this node, and its box; opened when it is first needed."""

    def __init__(self, rank: int, pid: int, fd: int, base: int = 0) -> None:
        """*base*: where its slot begins."""
        self.rank, self.pid, self.base = rank, pid, base
        self._path = f"/proc/{pid}/fd/{fd}"
        self._fd = -1

    def posted(self, step: int, wait: Wait) -> tuple[bytes, bytes] | None:
        """Fingerprints and microbatch of *step*; None: it puts none out, or is not there in time."""
        if not self._is_there(step, _POSTED, wait):
            return None
        head = self._head()
        gradients = os.pread(self._fd, head[_SIZE], _DATA)
        microbatch = _read(self._fd, head[_MICROBATCH], _DATA + head[_SIZE])
        is_whole = (
            self._head()[_POSTED] == step + 1 and len(gradients) == head[_SIZE] and len(microbatch) == head[_MICROBATCH]
        )
        return (gradients, microbatch) if is_whole else None

    def found(self, step: int, wait: Wait) -> int:
        """What it has found in the microbatch of its next rank at *step*."""
        if not self._is_there(step, _FOUND, wait):
            return NOTHING
        return self._head()[_WHAT]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _is_there(self, step: int, word: int, wait: Wait) -> bool:
        """Not waited for where it takes no part in *step*, or no more."""

        def is_over() -> bool:
            head = self._head()
            return head[_ARMED] != step + 1 or head[word] == step + 1

        return wait.until(is_over) and self._head()[word] == step + 1

    def _head(self) -> tuple[int, ...]:
        """All zeros when there is nothing to be read any more."""
        try:
            if self._fd < 0:
                self._fd = move_high(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC))
            head = _HEAD.unpack(os.pread(self._fd, _HEAD.size, 0))
        except (OSError, error):
            return (0,) * 8
        return head if head[0] == _MAGIC else (0,) * 8


def peers_of(words: memoryview, ranks: tuple[int, ...], attempt: int) -> list[Peer]:
    """Those of *ranks* that are on this node, in order; *words*: the board."""
    found = []
    for slot in range(words[H_SLOTS]):
        base = HEADER_WORDS + slot * SLOT_WORDS
        pid, rank, box = words[base + S_OWNER_PID], words[base + S_RANK], words[base + S_REPLAY_BOX]
        if pid and box and words[base + S_ATTEMPT] == attempt and rank in ranks:
            found.append(Peer(rank, pid, box - 1, base))
    return sorted(found, key=lambda p: p.rank)


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view[: 1 << 30], at)
        view, at = view[done:], at + done


def _read(fd: int, size: int, at: int) -> bytes:
    parts = []
    while size > 0:
        part = os.pread(fd, min(size, 1 << 30), at)
        if not part:
            break
        parts.append(part)
        size, at = size - len(part), at + len(part)
    return b"".join(parts)
