"""From leaves to elements and bits."""

from __future__ import annotations

import pytest

from steadyrun.integrity.coefficients import LEAF_BYTES
from steadyrun.integrity.location import LeafRange, compare_leaf, differing_leaves, leaf_range, locate


def test_leaves_that_differ_are_named() -> None:
    assert differing_leaves((1, 2, 3), (1, 5, 4)) == (1, 2)
    with pytest.raises(ValueError, match="no replicas"):
        differing_leaves((1, 2), (1, 2, 3))


def test_a_leaf_names_its_elements() -> None:
    assert leaf_range(1, LEAF_BYTES + 6, 2) == LeafRange(1, LEAF_BYTES // 2, LEAF_BYTES // 2 + 2)
    with pytest.raises(ValueError, match="no leaf 2"):
        leaf_range(2, LEAF_BYTES + 6, 2)


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8, 16])
def test_a_flipped_bit_is_found_in_its_element(element_bytes: int) -> None:
    own = bytearray(range(256)) * 16
    other = bytes(own)
    element = 100
    own[element * element_bytes] ^= 1 << 6
    (found,), count = compare_leaf(bytes(own), other, 3, element_bytes)
    assert count == 1
    assert found.element == 3 * (LEAF_BYTES // element_bytes) + element
    assert found.bits == (6,)
    assert found.own ^ found.other == 1 << 6


def test_many_differences_are_counted_and_few_told() -> None:
    found, count = compare_leaf(bytes(4096), b"\x01" * 4096, 0, 4, most=5)
    assert len(found) == 5
    assert count == 1024


def test_only_wanted_leaves_are_read() -> None:
    read: list[int] = []

    def reader(byte: bytes, leaf: int) -> bytes:
        read.append(leaf)
        return byte * LEAF_BYTES

    located = locate(
        (1, 1, 1), (2, 1, 2), 3 * LEAF_BYTES, 4, lambda i: reader(b"a", i), lambda i: reader(b"b", i), most_leaves=1
    )
    assert read == [0, 0]
    assert [r.leaf for r in located.leaves] == [0, 2]
    assert located.unread == (2,)
    assert located.elements == LEAF_BYTES // 4
