"""Pickles read as data: plain values as they are, everything else as a record, whatever the bytes."""

from __future__ import annotations

import collections
import contextlib
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.checkpoint.pickles import Call, Global, PickleError, RefusedPickleError, check_lengths, read_pickle

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda below: (
        st.lists(below, max_size=4)
        | st.tuples(below, below)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), below, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES, st.sampled_from([4, 5]))
def test_plain_values_are_themselves(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol)) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(PickleError):
        read_pickle(b"\x80\x04" + data)


@given(VALUES, st.integers(0, 10_000), st.integers(1, 255))
def test_damaged_pickles_are_read_or_refused(value: Any, at: int, mask: int) -> None:
    data = bytearray(pickle.dumps(value, 4))
    data[at % len(data)] ^= mask
    with contextlib.suppress(PickleError):
        read_pickle(bytes(data))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_calls_stay_records(protocol: int) -> None:
    value = read_pickle(pickle.dumps(collections.OrderedDict(a=print), protocol))
    assert isinstance(value, Call)
    builtins = "__builtin__" if protocol == 2 else "builtins"
    assert (value.name, value.items) == ("collections.OrderedDict", [("a", Global(f"{builtins}.print"))])


def test_a_name_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(RefusedPickleError, match=r"builtins\.print"):
        read_pickle(pickle.dumps(print, 4), lambda name: name == "builtins.len")


def test_huge_memo_index_and_length_cost_nothing() -> None:
    assert read_pickle(b"\x80\x02Nr\xff\xff\xff\xff.") is None
    with pytest.raises(PickleError, match="cut off"):
        read_pickle(b"\x80\x04\x8e" + b"\xff" * 7 + b"\x00.")


def test_lengths_are_checked_before_pickle_believes_them() -> None:
    huge_index, huge_length = b"\x80\x04Nr\xff\xff\xff\xff.", b"\x80\x04\x96" + b"\xff" * 7 + b"\x00."
    for damaged in (huge_index, huge_length, b"\x80\x04N", b"\x80\x04\xff."):
        with pytest.raises(PickleError):
            check_lengths(damaged)
    check_lengths(b"\x80\x02Nr\x00\x00\x00\x00.")


@given(VALUES, st.sampled_from([2, 3, 4, 5]))
def test_lengths_of_every_pickle_are_fine(value: Any, protocol: int) -> None:
    check_lengths(pickle.dumps((value, collections.OrderedDict(a=value), print), protocol))
