"""Pickles are read as data: what is not built as torch builds dumps never reaches the C unpickler."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from flight_dumps import dump, entry, pending, torch_pickle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steadyrun.collectors.flight import salvage, unpickle
from steadyrun.collectors.flight.salvage import replay_pickle
from steadyrun.collectors.flight.shape import is_plain_dump
from steadyrun.collectors.flight.unpickle import DumpError, load_dump

HEAD = b"\x80\x02}("


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def entries_of(count: int) -> list[dict[str, Any]]:
    return [entry(seq) for seq in range(1, count)] + [pending(count)]


@pytest.mark.parametrize("write", [torch_pickle, lambda value: pickle.dumps(value, protocol=2)])
@pytest.mark.parametrize("count", [1, 2, 40, 1500])
def test_dumps_as_torch_and_python_write_them_take_the_fast_way(write: Any, count: int) -> None:
    value = dump(entries_of(count))
    data = write(value)
    assert is_plain_dump(data)
    assert load_dump(data) == value
    assert replay_pickle(data).value == value


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=12)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=6), inner, max_size=4),
        st.tuples(st.text(max_size=4), st.text(max_size=4)),
    ),
    max_leaves=12,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=6), values, max_size=5), st.sampled_from([2, 4]))
def test_any_plain_value_is_read_as_pickle_reads_it(value: dict[str, Any], protocol: int) -> None:
    value["entries"] = []
    for data in (pickle.dumps(value, protocol=protocol), torch_pickle(value)):
        assert load_dump(data) == pickle.loads(data)
        replay = replay_pickle(data)
        assert replay.stop == ""
        assert replay.value == value


TOKENS = (
    b"h\x00", b"h\x01", b"q\x00", b"q\x01", b"j\x00\x01\x00\x00", b"r\x00\x01\x00\x00", b"K\x05", b"N", b"\x88",
    b"](", b"]", b"e", b"a", b"}(", b"}", b"u", b"s", b"\x86", text("a"), text("b"), b"M\x01\x02", b"(",
    text("k") + b"h\x00", text("k") + b"](K\x01e", text("k") + b"h\x00h\x01\x86",
)  # fmt: skip


def depth_of(value: Any, level: int = 0) -> int:
    """How deep tuples are in tuples."""
    return max((depth_of(item, level + 1) for item in value), default=level) if isinstance(value, tuple) else level


class PlainKeys(pickle.Unpickler):
    """Fails on any global."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise AssertionError(f"resolves {module}.{name}")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(TOKENS), max_size=9))
def test_what_the_scanner_accepts_has_plain_keys_and_no_nested_tuples(tokens: list[bytes]) -> None:
    data = HEAD + text("x") + b"q\x00" + text("y") + b"q\x01" + b"".join(tokens) + b"u."
    if not is_plain_dump(data):
        return
    try:
        value = PlainKeys(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, TypeError, AttributeError):
        return
    for key in value:
        assert isinstance(key, str | tuple)
        assert depth_of(key) <= 2


class Calls:
    """A pickle of this calls the function when loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_calls_is_refused_and_calls_nothing(protocol: int, tmp_path: Path) -> None:
    made = tmp_path / "made"
    data = pickle.dumps({"entries": [Calls(os.mkdir, str(made))], "pg_config": {}}, protocol=protocol)
    with pytest.raises(DumpError, match="would run code") as caught:
        load_dump(data)
    assert caught.value.status == "refused"
    assert not made.exists()
    pickle.loads(data)
    assert made.exists()  # so the test could have failed


def test_no_global_is_resolved_even_if_the_scanner_let_one_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    monkeypatch.setattr(unpickle, "is_plain_dump", lambda data: True)
    with pytest.raises(DumpError) as caught:
        load_dump(pickle.dumps({"entries": [Calls(os.mkdir, str(made))]}, protocol=2))
    assert caught.value.status == "refused"
    assert not made.exists()


def test_tuples_of_tuples_are_found_wherever_they_are_stored() -> None:
    low = text("a") + b"q\x00h\x00\x86q\x01"
    one = text("entries") + b"q\x05](eq\x06"
    for nested in (
        text("k") + b"h\x01h\x01\x86",  # both halves
        text("k") + b"h\x00h\x01\x86r\x00\x01\x00\x00" + text("l") + b"j\x00\x01\x00\x00h\x00\x86",
        text("k") + text("b") + b"h\x01\x86q\x07" + text("l") + b"h\x07h\x07\x86",
        text("k") + b"h\x01q\x09" + text("l") + b"h\x09h\x09\x86",  # under another index
    ):
        data = HEAD + one + text("g") + low + nested + b"u."
        assert not is_plain_dump(data), nested


def test_a_large_file_is_refused_before_it_is_read() -> None:
    with pytest.raises(DumpError, match="more than 100") as caught:
        load_dump(b"\x80\x02" + b"N" * 200, max_bytes=100)
    assert caught.value.status == "refused"


def test_json_is_read_by_content_and_bounded() -> None:
    value = dump(entries_of(3))
    assert load_dump(b"\xef\xbb\xbf " + json.dumps(value).encode())["entries"][2]["state"] == "scheduled"
    assert load_dump(json.dumps({"version": "2.10", "pg_config": {}}).encode()).is_json
    deep = b'{"entries": ' + b"[" * 200_000
    assert load_dump(deep).is_cut
    with pytest.raises(DumpError) as caught:
        load_dump(b'{"a": ' + b"[" * (salvage.MAX_CONTAINERS + 1))
    assert caught.value.status == "refused"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", "empty"),
        (b"hello\n", "ignored"),
        (b"\x80\x02]q\x00.", "ignored"),
        (b'{"event": "step"}', "ignored"),
        (b"\x80\x02}(X\x07\x00\x00", "unreadable"),
        (b'{"ver', "unreadable"),
        (b"{", "unreadable"),
    ],
)
def test_what_is_no_dump_says_what_it_is(data: bytes, status: str) -> None:
    with pytest.raises(DumpError) as caught:
        load_dump(data)
    assert caught.value.status == status
