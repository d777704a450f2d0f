"""Ranges of a flattened tensor as boxes of the tensor itself, which is what a distributed checkpoint can name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Box", "boxes_of_range"]


@dataclass(frozen=True, slots=True)
class Box:
    """A box whose elements follow each other in the flattened tensor.

    Attributes:
        offsets, sizes: of the box in the tensor.
        at: number of its first element, counted from the begin of the range.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int


def boxes_of_range(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """The elements *start* to *end* (exclusive) of the flattened tensor, as few boxes, in that order.

    Sharding by FSDP1 cuts the flattened parameters wherever the rank's share ends. Such a piece of a matrix is the rest
    of a row, some whole rows, and the beginning of a row; every further dimension adds at most two boxes.

    Raises:
        ValueError: the range is not in the tensor.
    """
    if not 0 <= start <= end <= math.prod(shape):
        raise ValueError(f"range {start} to {end} is not in a tensor of shape {tuple(shape)}")
    if start == end:
        return []
    return [Box(offsets, sizes, at - start) for offsets, sizes, at in _cut(tuple(shape), start, end)]


def _cut(shape: tuple[int, ...], start: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Offsets, sizes and number of the first element in the tensor, of each box; *start* is below *end*."""
    if not shape:
        return [((), (), 0)]
    row = math.prod(shape[1:])
    first, into_first = divmod(start, row)
    last, into_last = divmod(end, row)
    out = []

    def part_of_row(index: int, a: int, b: int) -> None:
        for offsets, sizes, at in _cut(shape[1:], a, b):
            out.append(((index, *offsets), (1, *sizes), index * row + at))

    if into_first:
        part_of_row(first, into_first, into_last if first == last else row)
        if first == last:
            return out
        first += 1
    if first < last:
        out.append(((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]), first * row))
    if into_last:
        part_of_row(last, 0, into_last)
    return out
