"""Ranges of flattened tensors as boxes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.checkpoint.boxes import Box, boxes_of_range

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def numbers(shape: tuple[int, ...], box: Box) -> list[int]:
    """The flattened numbers of a box's elements, in C order."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    ranges = [range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*ranges)]


@given(SHAPES, st.data())
def test_boxes_have_exactly_the_elements_of_the_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    end = data.draw(st.integers(start, total))
    boxes = boxes_of_range(shape, start, end)
    assert [n for box in boxes for n in numbers(shape, box)] == list(range(start, end))
    sizes = [math.prod(box.sizes) for box in boxes]
    assert [box.at for box in boxes] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_rest_of_a_row_whole_rows_and_beginning_of_a_row() -> None:
    assert boxes_of_range((4, 10), 7, 33) == [
        Box((0, 7), (1, 3), 0),
        Box((1, 0), (2, 10), 3),
        Box((3, 0), (1, 3), 23),
    ]


def test_a_range_inside_one_row_is_one_box() -> None:
    assert boxes_of_range((4, 10), 12, 15) == [Box((1, 2), (1, 3), 0)]


def test_a_whole_tensor_is_one_box() -> None:
    assert boxes_of_range((2, 3, 4), 0, 24) == [Box((0, 0, 0), (2, 3, 4), 0)]
    assert boxes_of_range((), 0, 1) == [Box((), (), 0)]


def test_a_range_beyond_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"range 3 to 7 is not in a tensor of shape \(2, 3\)"):
        boxes_of_range((2, 3), 3, 7)
