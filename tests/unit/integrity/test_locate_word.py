"""From the sums of two copies of a leaf to the word in which they differ."""

from __future__ import annotations

import random

import pytest

from steadyrun.integrity.coefficients import MASK, weights
from steadyrun.integrity.location import WordDifference, locate_word

WEIGHTS = weights()


def moved(other: int, word: int, delta: int) -> int:
    return (other + WEIGHTS[word] * delta) & MASK


@pytest.fixture(scope="module", autouse=True)
def _inverses() -> None:
    locate_word(1, 0)  # the weights' inverses are worked out once


def test_a_flipped_bit_is_found_with_its_place() -> None:
    draw = random.Random(5)
    for _ in range(3):
        word, bit, sign = draw.randrange(1 << 16), draw.randrange(32), draw.choice((1, -1))
        other = draw.getrandbits(64)
        found = locate_word(moved(other, word, sign << bit), other)
        assert found is not None
        assert (found.word, found.bit, found.delta) == (word, bit, sign << bit)


def test_any_change_of_one_word_is_found() -> None:
    found = locate_word(moved(9, 4711, -123_456_789), 9)
    assert found == WordDifference(4711, -123_456_789)
    assert found.bit is None


def test_equal_sums_and_changes_of_many_words_have_no_place() -> None:
    assert locate_word(77, 77) is None
    many = moved(moved(moved(1, 3, 1 << 20), 500, -(3 << 7)), 60_000, 12_345)
    assert locate_word(many, 1) is None


def test_words_beyond_the_end_of_a_short_leaf_are_no_candidates() -> None:
    assert locate_word(moved(0, 200, 2), 0, words=100) is None


@pytest.mark.parametrize(
    ("delta", "element_bytes", "elements", "bit"),
    [
        (1 << 31, 4, (10,), 31),
        (1 << 3, 8, (5,), 3),
        (1 << 3, 2, (20,), 3),
        (1 << 17, 2, (21,), 1),
        (-(1 << 25), 1, (43,), 1),
        (3 << 16, 2, (21,), None),
        (5, 2, (20, 21), None),
    ],
)
def test_words_become_elements(delta: int, element_bytes: int, elements: tuple[int, ...], bit: int | None) -> None:
    found = WordDifference(10, delta)
    assert found.elements(0, element_bytes) == elements
    assert found.element_bit(element_bytes) == bit


def test_the_upper_word_of_a_double_has_the_upper_bits() -> None:
    assert WordDifference(11, 1 << 30).element_bit(8) == 62
    assert WordDifference(11, 1 << 30).elements(2, 8) == (2 * 32768 + 5,)
