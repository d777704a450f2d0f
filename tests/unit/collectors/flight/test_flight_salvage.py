"""Cut dumps give every entry before the cut, and say that they are cut."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from flight_dumps import dump, entry, pending, torch_pickle

from steadyrun.collectors.flight.salvage import replay_json, replay_pickle
from steadyrun.collectors.flight.unpickle import Dump, DumpError, load_dump

VALUE = dump([entry(seq) for seq in range(1, 12)] + [pending(12)])


def torch_json(value: dict[str, Any]) -> bytes:
    """Keys in order of the alphabet, as torch's JSON writer has them: entries come before the groups."""
    return json.dumps(value, sort_keys=True).encode()


def loaded_or_status(data: bytes) -> Dump | str:
    try:
        return load_dump(data)
    except DumpError as e:
        return e.status


@pytest.mark.parametrize("write", [torch_pickle, lambda v: pickle.dumps(v, protocol=2), torch_json])
def test_a_dump_cut_anywhere_gives_the_entries_before_the_cut(write: Any) -> None:
    data = write(VALUE)
    whole = load_dump(data)
    assert not whole.is_cut
    most = 0
    for size in (*range(1, len(data) - 1, 7), len(data) - 1):
        found = loaded_or_status(data[:size])
        if isinstance(found, str):
            assert found in ("unreadable", "ignored")  # before the first thing of use
            assert most == 0
            continue
        assert found.is_cut
        entries = found.get("entries", [])
        whole_entries = [e for e in entries if len(e) == len(whole["entries"][0])]
        assert whole_entries == whole["entries"][: len(whole_entries)]
        assert len(entries) - len(whole_entries) <= 0, "half an entry is none"
        assert len(entries) >= most
        most = len(entries)
    assert most == len(VALUE["entries"])


def test_the_cut_is_named() -> None:
    data = torch_pickle(VALUE)
    assert load_dump(data[:-40]).stop == f"cut at byte {len(data) - 40}"


def test_damage_in_the_middle_keeps_what_came_before() -> None:
    data = bytearray(torch_pickle(VALUE))
    at = data.rindex(b"\x8a\x08")
    data[at] = 0xFF
    found = load_dump(bytes(data))
    assert found.is_cut
    assert "damaged at byte" in found.stop
    assert len(found["entries"]) == 11
    assert found["pg_config"] == VALUE["pg_config"]


def test_protocol_4_as_other_tools_write_it_is_cut_and_read_too() -> None:
    data = pickle.dumps(VALUE, protocol=4)
    assert load_dump(data) == VALUE
    found = replay_pickle(data[: len(data) // 2])
    assert found.stop
    assert 0 < len(found.value["entries"]) < 12


def test_json_that_is_damaged_keeps_the_pairs_before() -> None:
    text = torch_json(VALUE).decode()
    at = text.index('"pg_status"')
    found = replay_json(text[:at] + "#" + text[at:])
    assert found.stop
    assert found.value["entries"] == json.loads(text)["entries"]
    assert "pg_status" not in found.value


def test_a_list_of_entries_alone_is_a_dump_of_the_first_format() -> None:
    old = [{"pg_id": 0, "seq_id": 1, "profiling_name": "nccl:all_reduce", "state": "completed"}]
    assert load_dump(pickle.dumps(old, protocol=2))["entries"] == old
