"""Losses and norms of gradients as weak signs of wrong numbers: what is out of line, and how a rank tells it.

A value that is not finite, or far above the newest ones, is a signal. Most hardware errors barely move either, and most
spikes come from data: so a signal accuses nobody. It makes ranks check their bytes after the next step.

Pure, and imported by ranks: next to nothing is imported here.
"""

from __future__ import annotations

from math import isfinite

from steadyrun.core.layout import S_GUARD_COUNT, S_GUARD_RING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

__all__ = ["LOSS", "NORM", "RING", "WHAT", "Outlier", "Signal", "Window", "read_signals", "write_signal"]

LOSS, NORM = range(2)
WHAT = ("loss", "norm of gradients")

RING = 16  # signals that a slot of the board keeps
_WORDS = 5  # number + 1; step + 1 and what; as doubles: value, usual, z
LEAST = 30  # values before any is judged
_KEPT = 128
_RENEWED = 8  # values after which the limit is made anew
_Z = 10.0
_SIGMA = 1.4826  # of a normal distribution in median absolute deviations
_FLOORS = (0.02, 0.2)  # least sigma by kind, in medians: a spike is at least 20 % above for losses, 3 times for norms
_TINY = 1e-30


class Outlier:
    """Why a value is one.

    Attributes:
        usual: the median of the newest values; NaN where there are too few.
        z: how many robust standard deviations above; infinite where the value is not finite.
    """

    __slots__ = ("usual", "z")

    def __init__(self, usual: float, z: float) -> None:
        self.usual = usual
        self.z = z


class Window:
    """The newest values of one kind, and whether another one is out of line: some microseconds each.

    The limit is ten robust standard deviations above the median of the newest 128 values. Median and deviation do not
    move until half of these are of a new level: then that is usual.
    """

    __slots__ = ("_floor", "_limit", "_next", "_sigma", "_usual", "_values")

    def __init__(self, what: int) -> None:
        self._floor = _FLOORS[what]
        self._values: list[float] = []
        self._next = 0
        self._usual = float("nan")
        self._sigma = 0.0
        self._limit = float("inf")

    @property
    def usual(self) -> float:
        """The median; NaN where there are too few."""
        return self._usual

    def add(self, value: float) -> Outlier | None:
        """Take *value*; None where nothing is wrong with it."""
        if not isfinite(value):
            return Outlier(self._usual, float("inf"))
        found = Outlier(self._usual, (value - self._usual) / self._sigma) if value > self._limit else None
        values = self._values
        if len(values) < _KEPT:
            values.append(value)
        else:
            values[self._next % _KEPT] = value
        self._next += 1
        if self._next >= LEAST and (self._next - LEAST) % _RENEWED == 0:
            self._renew()
        return found

    def _renew(self) -> None:
        ordered = sorted(self._values)
        middle = len(ordered) // 2
        usual = self._usual = ordered[middle]
        deviation = sorted([abs(v - usual) for v in ordered])[middle]
        self._sigma = max(_SIGMA * deviation, self._floor * abs(usual), _TINY)
        self._limit = usual + _Z * self._sigma


class Signal:
    """One value that is out of line.

    Attributes:
        number: 0, 1, ... in the life of the rank.
        step: the newest one when it was seen; -1 before the first.
        what: LOSS or NORM.
        value: None where it is not finite.
        usual, z: as of an ``Outlier``; None where there is none.
    """

    __slots__ = ("number", "step", "usual", "value", "what", "z")

    def __init__(
        self, number: int, step: int, what: int, value: float | None, usual: float | None, z: float | None
    ) -> None:
        self.number = number
        self.step = step
        self.what = what
        self.value = value
        self.usual = usual
        self.z = z

    def as_list(self) -> list[Any]:
        return [self.number, self.step, self.what, self.value, self.usual, self.z]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signal) and self.as_list() == other.as_list()

    def __hash__(self) -> int:
        return hash(tuple(self.as_list()))

    def __repr__(self) -> str:
        return f"Signal({self.words()} at step {self.step})"

    @classmethod
    def from_list(cls, told: Sequence[Any]) -> Signal:
        """Raises ValueError or TypeError."""
        number, step, what, *values = told
        value, usual, z = (None if v is None else float(v) for v in values)
        if what not in (LOSS, NORM):
            raise ValueError(f"a signal of kind {what!r}")
        return cls(int(number), int(step), int(what), value, usual, z)

    def words(self) -> str:
        """``loss 7.1 (usually 2.3)``."""
        value = "not finite" if self.value is None else f"{self.value:.4g}"
        return f"{WHAT[self.what]} {value}" + ("" if self.usual is None else f" (usually {self.usual:.4g})")


def write_signal(words: Any, base: int, step: int, what: int, value: float, found: Outlier) -> None:
    """Into the slot at *base*; *words* are the board's, unsigned and of 64 bits."""
    from struct import pack, unpack

    count = int(words[base + S_GUARD_COUNT])
    at = base + S_GUARD_RING + count % RING * _WORDS
    words[at] = 0
    words[at + 1] = (step + 1) << 8 | what
    words[at + 2], words[at + 3], words[at + 4] = unpack("=3Q", pack("=3d", value, found.usual, found.z))
    words[at] = count + 1  # now whole
    words[base + S_GUARD_COUNT] = count + 1


def read_signals(words: Any, base: int) -> tuple[Signal, ...]:
    """The newest of a slot, in order; those being overwritten are left out."""
    from struct import pack, unpack

    count = int(words[base + S_GUARD_COUNT])
    out = []
    for number in range(max(count - RING, 0), count):
        at = base + S_GUARD_RING + number % RING * _WORDS
        sequence, kind, *rest = (int(words[at + i]) for i in range(_WORDS))
        if sequence != number + 1 or kind & 0xFF > NORM:
            continue
        value, usual, z = (v if isfinite(v) else None for v in unpack("=3d", pack("=3Q", *rest)))
        out.append(Signal(number, (kind >> 8) - 1, kind & 0xFF, value, usual, z))
    return tuple(out)
