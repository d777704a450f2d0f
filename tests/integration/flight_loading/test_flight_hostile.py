"""Pickles made to hang, to fill the machine or to overflow the stack end soon, with a statement about the file."""

from __future__ import annotations

import struct
import time

import pytest

from steadyrun.collectors.flight.salvage import MAX_ENTRIES
from steadyrun.collectors.flight.shape import is_plain_dump
from steadyrun.collectors.flight.unpickle import DumpError, load_dump

HEAD = b"\x80\x02}("
BOUND_S = 20.0  # far more than any of these takes on a busy machine; without the checks they would not end at all
COLLIDING = [i << 42 for i in range(50_000)]


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def nested_tuples(depth: int) -> bytes:
    """A key whose hash takes 2 ** depth steps."""
    out = text("a") + b"q\x00h\x00\x86q\x01"
    for level in range(1, depth):
        index = struct.pack("<I", level + 1)
        get = b"j" + struct.pack("<I", level)
        out += get + b"\x86r" + index
    return HEAD + out + b"Nu."


def deep_tuple_key(depth: int) -> bytes:
    return HEAD + b")" + b"\x85" * depth + b"Nu."


HOSTILE = {
    "a memo index that would take 32 GB": HEAD + text("entries") + b"r\xff\xff\xff\x7f" + b"](eu.",
    "a memo index that would take 1 GB": HEAD + text("entries") + b"r\x00\x00\x00\x04" + b"](eu.",
    "a memo index as text": HEAD + text("entries") + b"p2147483647\n" + b"](eu.",
    "a key whose hash doubles with each level": nested_tuples(60),
    "a key as deep as the stack": deep_tuple_key(400_000),
    "a frozen set of itself many times": b"\x80\x04}(" + b"(\x91\x94" + b"h\x00h\x00\x86\x94" * 40 + b"Nu.",
    "a text longer than memory": HEAD + b"\x8d" + struct.pack("<Q", 1 << 62) + b"u.",
    "a number longer than memory": HEAD + text("entries") + b"\x8b" + struct.pack("<i", 0x7FFFFFFF) + b"u.",
    "a frame longer than memory": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"}(" + text("entries") + b"](eu.",
    "bytes longer than memory": HEAD + b"\x8e" + struct.pack("<Q", 1 << 60) + b"u.",
    "lists in lists, a million deep": HEAD + text("entries") + b"](" * 1_000_000,
    "marks without end": HEAD + b"(" * 3_000_000,
    "three million empty lists": HEAD + text("entries") + b"](" + b"]" * 3_000_000 + b"eu.",
    "keys that collide": HEAD + b"".join(b"\x8a\x08" + struct.pack("<q", key) + b"N" for key in COLLIDING) + b"u.",
    "a mapping in itself": HEAD + text("entries") + b"](}q\x01(" + text("frames") + b"h\x01ueu.",
    "an extension code": HEAD + text("entries") + b"\x82\x01u.",
    "a persistent object": HEAD + text("entries") + b"P1\nu.",
    "STOP at once": b"\x80\x02.",
    "nothing but a protocol": b"\x80\x02",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_end_soon_and_small(name: str) -> None:
    data = HOSTILE[name]
    began_s = time.process_time()
    status, found = "used", {}
    try:
        found = load_dump(data)
    except DumpError as e:
        status = e.status
    assert status in ("used", "refused", "unreadable", "ignored")
    assert set(found) <= {"entries", *map(str, COLLIDING)}
    assert time.process_time() - began_s < BOUND_S


def test_the_scanner_refuses_what_would_hurt_the_unpickler() -> None:
    harmless = {"a mapping in itself"}
    assert [name for name, data in HOSTILE.items() if is_plain_dump(data) and name not in harmless] == []


def test_of_millions_of_entries_the_newest_are_kept() -> None:
    loaded = load_dump(b'{"entries": [' + b"1," * 3_000_000 + b'{"record_id": 7}]}')
    assert len(loaded["entries"]) == MAX_ENTRIES
    assert loaded["entries"][-1] == {"record_id": 7}
