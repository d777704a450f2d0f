"""Pickles written by hand: read by pickle itself and by our own reader."""

from __future__ import annotations

import collections
import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint.opcodes import PickleWriter
from steadyrun.checkpoint.pickles import Call, Global, read_pickle


@settings(max_examples=200, deadline=None)
@given(st.integers(-(1 << 70), 1 << 70))
def test_numbers_of_every_length(value: int) -> None:
    out = PickleWriter()
    out.number(value)
    data = out.finish()
    assert pickle.loads(data) == value
    assert read_pickle(data) == value


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1 << 40), max_size=6), st.lists(st.text(max_size=8), max_size=8))
def test_values_in_containers(numbers: list[int], texts: list[str]) -> None:
    out = PickleWriter()
    out.empty_dict()
    out.mark()
    out.text("numbers")
    out.numbers(numbers)
    out.text("rest")
    out.empty_list()
    out.mark()
    for text in [*texts, *texts]:
        out.text(text)
    out.none()
    out.boolean(True)
    out.boolean(False)
    out.append_to_mark()
    out.set_items_to_mark()
    data = out.finish()
    expected = {"numbers": tuple(numbers), "rest": [*texts, *texts, None, True, False]}
    assert pickle.loads(data) == expected
    assert read_pickle(data) == expected


def test_more_values_than_a_byte_counts_are_referred_to() -> None:
    texts = [f"text {i}" for i in range(600)]
    out = PickleWriter()
    out.empty_list()
    out.mark()
    for text in texts * 2:
        out.text(text)
    out.append_to_mark()
    data = out.finish()
    assert pickle.loads(data) == texts * 2
    assert len(data) < 600 * 22
    assert read_pickle(data) == texts * 2


def test_names_calls_and_state() -> None:
    out = PickleWriter()
    out.mark()
    out.name("collections", "OrderedDict")
    out.empty_tuple()
    out.call()
    out.remember("one")
    assert out.is_known("one")
    assert not out.is_known("another")
    out.new("argparse", "Namespace")
    out.empty_dict()
    out.mark()
    out.text("a")
    out.number(1)
    out.set_items_to_mark()
    out.build()
    out.tuple_to_mark()
    data = out.finish()
    first, same, space = pickle.loads(data)
    assert first is same
    assert first == collections.OrderedDict()
    assert vars(space) == {"a": 1}
    read = read_pickle(data)
    assert isinstance(read[2], Call)
    assert (read[2].name, read[2].state) == ("argparse.Namespace", {"a": 1})


def test_a_name_is_written_once() -> None:
    out = PickleWriter()
    out.mark()
    out.name("torch", "float32")  # not looked up: torch need not be there
    out.name("torch", "float32")
    out.tuple_to_mark()
    data = out.finish()
    assert data.count(b"float32") == 1
    assert read_pickle(data) == (Global("torch.float32"), Global("torch.float32"))
