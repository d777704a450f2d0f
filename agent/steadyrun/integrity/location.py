"""Where two copies of a tensor differ: from fingerprints to leaves, from a leaf's bytes to elements and bits.

Only the differing leaves' bytes have to travel, 256 KiB each. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from steadyrun.integrity.coefficients import LEAF_BYTES, LEAF_WORDS, MASK, large_factors, small_factors

__all__ = [
    "Difference",
    "LeafRange",
    "Located",
    "WordDifference",
    "compare_leaf",
    "differing_leaves",
    "leaf_range",
    "locate",
    "locate_word",
]

_MOST_ELEMENTS: Final = 64


@dataclass(frozen=True, slots=True)
class LeafRange:
    """Elements ``first`` to ``last``, both included, of the flattened tensor."""

    leaf: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Difference:
    """One element that differs.

    Attributes:
        element: its index in the flattened tensor (of this rank's shard).
        bits: the differing ones, 0 is the lowest.
        own, other: the element's bytes as a number.
    """

    element: int
    bits: tuple[int, ...]
    own: int
    other: int

    def text(self, element_bytes: int) -> str:
        width = 2 * element_bytes
        bits = ", ".join(map(str, self.bits[:8])) + (", ..." if len(self.bits) > 8 else "")
        return f"element {self.element}: 0x{self.own:0{width}x}, should be 0x{self.other:0{width}x} (bits {bits})"


@dataclass(frozen=True, slots=True)
class WordDifference:
    """One word of a leaf that differs, known from sums.

    Attributes:
        word: its index in the leaf.
        delta: own minus other, both as little-endian int32.
    """

    word: int
    delta: int

    @property
    def bit(self) -> int | None:
        """The bit that is flipped if only one is, 0 is the lowest; None where it must be another kind of change.

        A value that is one step of its last place off moves the word by 1, too, and may differ in several bits.
        """
        size = abs(self.delta)
        return size.bit_length() - 1 if size & (size - 1) == 0 else None

    def elements(self, leaf: int, element_bytes: int) -> tuple[int, ...]:
        """Indices in the flattened tensor of those elements that can be the wrong one: with a flipped bit just one."""
        at = leaf * LEAF_BYTES + 4 * self.word
        if element_bytes >= 4:
            return (at // element_bytes,)
        bit = self.bit
        if bit is not None:
            return ((at + bit // 8) // element_bytes,)
        lowest = (self.delta & -self.delta).bit_length() - 1
        return tuple(range((at + lowest // 8) // element_bytes, (at + 4) // element_bytes))

    def element_bit(self, element_bytes: int) -> int | None:
        """The flipped bit counted within its element."""
        bit = self.bit
        if bit is None:
            return None
        return (4 * self.word % element_bytes) * 8 + bit if element_bytes >= 4 else bit % (8 * element_bytes)


@dataclass(frozen=True, slots=True)
class Located:
    """What was found.

    Attributes:
        leaves: all that differ.
        differences: of the leaves that were looked into, by element; cut at the wanted number.
        elements: how many differ in those leaves.
        unread: leaves that were not looked into.
    """

    leaves: tuple[LeafRange, ...]
    differences: tuple[Difference, ...]
    elements: int
    unread: tuple[int, ...] = ()


def differing_leaves(own: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the leaves that differ.

    Raises:
        ValueError: the tensors are not of the same size.
    """
    if len(own) != len(other):
        raise ValueError(f"cannot compare tensors of {len(own)} and of {len(other)} leaves: they are no replicas")
    return tuple(i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b)


def leaf_range(leaf: int, size_bytes: int, element_bytes: int) -> LeafRange:
    """The elements of a leaf; *element_bytes* is 1, 2, 4, 8 or 16, so that none lies in two leaves."""
    begin = leaf * LEAF_BYTES
    end = min(begin + LEAF_BYTES, size_bytes)
    if LEAF_BYTES % element_bytes or not 0 <= begin < end:
        raise ValueError(f"no leaf {leaf} in {size_bytes} bytes of elements of {element_bytes} bytes")
    return LeafRange(leaf, begin // element_bytes, end // element_bytes - 1)


def compare_leaf(
    own: bytes, other: bytes, leaf: int, element_bytes: int, most: int = _MOST_ELEMENTS
) -> tuple[tuple[Difference, ...], int]:
    """The first *most* elements that differ between two copies of a leaf, and how many do.

    Raises:
        ValueError: the copies are not equally long, or no whole number of elements.
    """
    if len(own) != len(other) or len(own) % element_bytes or LEAF_BYTES % element_bytes:
        raise ValueError(f"cannot compare {len(own)} and {len(other)} bytes as elements of {element_bytes}")
    found: list[Difference] = []
    count = 0
    first = leaf * (LEAF_BYTES // element_bytes)
    for at in _unequal_elements(own, other, element_bytes):
        count += 1
        if len(found) < most:
            a = int.from_bytes(own[at : at + element_bytes], "little")
            b = int.from_bytes(other[at : at + element_bytes], "little")
            bits = tuple(i for i in range(8 * element_bytes) if (a ^ b) >> i & 1)
            found.append(Difference(first + at // element_bytes, bits, a, b))
    return tuple(found), count


def _unequal_elements(own: bytes, other: bytes, element_bytes: int) -> list[int]:
    """Where elements begin that differ: whole lines are compared first, as most are equal."""
    line = 256
    places: list[int] = []
    for begin in range(0, len(own), line):
        if own[begin : begin + line] != other[begin : begin + line]:
            end = min(begin + line, len(own))
            places += [
                at
                for at in range(begin, end, element_bytes)
                if own[at : at + element_bytes] != other[at : at + element_bytes]
            ]
    return places


def locate(
    own: Sequence[int],
    other: Sequence[int],
    size_bytes: int,
    element_bytes: int,
    read_own: Callable[[int], bytes],
    read_other: Callable[[int], bytes],
    most_leaves: int = 4,
    most_elements: int = _MOST_ELEMENTS,
) -> Located:
    """From two lists of leaves to the elements that differ.

    Args:
        own, other: leaves of the suspect's and of a trusted copy.
        read_own, read_other: the bytes of a leaf (``Hasher.leaf_bytes``, or asked of another rank).
        most_leaves: how many leaves to read: a whole tensor that differs need not travel.
    """
    leaves = differing_leaves(own, other)
    ranges = tuple(leaf_range(leaf, size_bytes, element_bytes) for leaf in leaves)
    found: list[Difference] = []
    count = 0
    for leaf in leaves[:most_leaves]:
        some, number = compare_leaf(
            read_own(leaf), read_other(leaf), leaf, element_bytes, max(0, most_elements - len(found))
        )
        found += some
        count += number
    return Located(ranges, tuple(found), count, leaves[most_leaves:])


def locate_word(own: int, other: int, words: int = LEAF_WORDS) -> WordDifference | None:
    """The one word in which two copies of a leaf differ, from their sums alone; None if more than one must differ.

    A changed word ``j`` moves the sum by ``C[j] * d`` with ``|d| < 2^32``. All weights have inverses, so each place
    gives one ``d``; a wrong place gives a small one with a chance of 2^-31, all of them together of 1 in 32,000. A
    flipped bit is found for sure: ``d`` is a power of two, and no two places fit then (property 2 of the weights).
    Several changed words look like one with that same chance: compare the bytes where it matters.

    Args:
        words: of the leaf; fewer in the last one of a tensor.
    """
    moved = (own - other) & MASK
    if not moved:
        return None
    lowest = (moved & -moved).bit_length() - 1
    if lowest > 31:
        return None
    found = [WordDifference(word, delta) for word, delta in _fitting(moved, words)]
    flips = [f for f in found if f.bit is not None]
    candidates = flips or found
    return candidates[0] if len(candidates) == 1 else None


def _fitting(moved: int, words: int) -> Iterator[tuple[int, int]]:
    for word, inverse in enumerate(_inverses()[:words]):
        delta = moved * inverse & MASK
        if delta < 1 << 32:
            yield word, delta
        elif delta > MASK - (1 << 32) + 1:
            yield word, delta - MASK - 1


@cache
def _inverses() -> tuple[int, ...]:
    """Of all weights: 50 ms, once."""
    small = [pow(s, -1, MASK + 1) for s in small_factors()]
    large = [pow(b, -1, MASK + 1) for b in large_factors()]
    return tuple(s * b & MASK for s in small for b in large)
