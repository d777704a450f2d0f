"""What is asked of a rank's recorders, and what its own word of them is taken for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from steadyrun.collectors.flight.handlers import DumpRequest, HandlerError, _parse_head, dump_requests, file_requests
from steadyrun.collectors.flight.live import LiveRecorders, live_from_json, read_live
from steadyrun.collectors.flight.watchdog_files import (
    DumpFileError,
    FileState,
    file_state,
    is_quiet,
    poke_pipe,
    read_dump,
)

CPU = {"ping", "fr_trace_json", "dump_traceback", "pyspy_dump"}
CUDA = CPU | {"dump_nccl_trace_pickle", "dump_nccl_trace_json"}
V2_15 = CUDA | {"fr_dump_file"}

LIVE: dict[str, Any] = {
    "schema": "steadyrun.flight-live/1",
    "pid": 77,
    "rank": 3,
    "host": "a",
    "boot_id": "b",
    "torch": "2.13.0",
    "world_size": 4,
    "groups": [{"name": "0", "desc": "default_pg", "ranks": [3, 1, 0, 2], "backend": "gloo"}],
    "recorders": ["gloo"],
    "buffer_size": 2000,
    "dump_prefix": "/run/fr_",
    "pipe": "/run/pipe_3.pipe",
    "server": "flight.sock",
    "stacks_ready": True,
}


def paths(requests: list[DumpRequest]) -> list[tuple[str, str, str, str]]:
    return [(r.recorder, r.handler, r.query, f"{r.kind}.{r.suffix}") for r in requests]


def test_each_recorder_is_fetched_once_and_without_stacks() -> None:
    gloo = ("gloo", "fr_trace_json", "", "active.json")
    nccl = ("nccl", "dump_nccl_trace_pickle", "includestacktraces=false", "full.pickle")
    assert paths(dump_requests(CPU, ["gloo"])) == [gloo]
    assert paths(dump_requests(CUDA, ["nccl", "gloo"])) == [nccl, gloo]
    assert paths(dump_requests(CUDA - {"dump_nccl_trace_pickle"}, [])) == [
        ("nccl", "dump_nccl_trace_json", "", "full.json"),
        gloo,
    ]
    assert paths(dump_requests({"ping"}, ["gloo"])) == []


def test_backends_are_told_apart_only_by_a_torch_that_can() -> None:
    assert paths(dump_requests(CUDA, ["gloo", "nccl2"]))[2:] == []
    asked = paths(dump_requests(V2_15, ["nccl2", "gloo", "mine"]))
    assert asked[2:] == [
        ("mine", "fr_trace_json", "backend=mine", "active.json"),
        ("nccl2", "fr_trace_json", "backend=nccl2", "active.json"),
    ]
    assert file_requests(CUDA, ["nccl2"]) == []
    assert paths(file_requests(V2_15, ["nccl2", "nccl"])) == [("nccl2", "fr_dump_file", "backend=nccl2", "full.pickle")]


def test_a_strange_backend_name_does_not_get_into_the_request() -> None:
    assert len(dump_requests(V2_15, ["x HTTP/1.1\r\nEvil: 1", "a&b"])) == 2


def test_head_of_an_answer() -> None:
    assert _parse_head(b"HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 12", "/x") == (200, 12)
    assert _parse_head(b"HTTP/1.1 404 Not Found", "/x") == (404, None)
    with pytest.raises(HandlerError, match="no HTTP"):
        _parse_head(b"220 ready", "/x")
    with pytest.raises(HandlerError, match="not read"):
        _parse_head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", "/x")


def test_live_state_of_a_rank() -> None:
    live = live_from_json(LIVE)
    assert live.groups[0].ranks == (0, 1, 2, 3)
    assert live.has_server
    assert live.stacks_ready
    assert live.dump_path() == Path("/run/fr_3")
    assert live.pipe_path() == Path("/run/pipe_3.pipe")
    assert live_from_json({**LIVE, "pipe": "/run/p_"}).pipe_path() == Path("/run/p_3.pipe")


def test_live_state_of_a_rank_without_anything() -> None:
    live = live_from_json({"schema": "steadyrun.flight-live/1", "rank": 0, "server": None, "server_missing": "too old"})
    assert live == LiveRecorders(rank=0, server_missing="too old")
    assert live.dump_path() is None
    assert live.pipe_path() is None


@pytest.mark.parametrize(
    "change",
    [{"schema": "x"}, {"rank": None}, {"groups": [{"name": "0"}]}, {"groups": [3]}, {"groups": 3}, {"pid": "x"}],
)
def test_a_wrong_live_state_is_refused_with_words(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "flight.json"
    path.write_text(json.dumps({**LIVE, **change}))
    live, why = read_live(path)
    assert live is None
    assert why.startswith("cannot read flight.json: ")


def test_no_live_state_is_no_problem(tmp_path: Path) -> None:
    assert read_live(tmp_path / "flight.json") == (None, "")
    (tmp_path / "cut").write_text('{"schema"')
    assert "cannot read cut" in read_live(tmp_path / "cut")[1]


def test_a_file_is_quiet_after_a_second_or_sooner_when_it_looks_whole() -> None:
    at_s = 1_000_000.0
    whole, cut = FileState(10, int(at_s * 1e9), True), FileState(10, int(at_s * 1e9), False)
    assert not is_quiet(cut, at_s + 0.9)
    assert is_quiet(cut, at_s + 1.1)
    assert not is_quiet(whole, at_s + 0.05)
    assert is_quiet(whole, at_s + 0.15)
    assert not is_quiet(whole, at_s - 100)


def test_only_regular_files_of_ours_are_taken(tmp_path: Path) -> None:
    real, link, pipe, empty = (tmp_path / n for n in ("real", "link", "pipe", "empty"))
    real.write_bytes(b"\x80\x02}.")
    link.symlink_to(real)
    os.mkfifo(pipe)
    empty.touch()
    state = file_state(real)
    assert state is not None
    assert state.is_whole
    assert read_dump(real) == (b"\x80\x02}.", True)
    for path in (link, pipe, empty, tmp_path, tmp_path / "absent"):
        assert file_state(path) is None
        with pytest.raises(DumpFileError, match=r"cannot (read|take)"):
            read_dump(path)


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as f:
        f.truncate((64 << 20) + 1)
    with pytest.raises(DumpFileError, match="bytes; 67108864 are allowed"):
        read_dump(path)


def test_a_pipe_without_reader_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "0.pipe"
    os.mkfifo(pipe)
    with pytest.raises(DumpFileError, match="cannot ask through"):
        poke_pipe(pipe)
    file = tmp_path / "1.pipe"
    file.write_text("")
    with pytest.raises(DumpFileError, match="no pipe of this user"):
        poke_pipe(file)
    assert file.read_text() == ""
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        poke_pipe(pipe)
        assert os.read(reader, 10) == b"1"
    finally:
        os.close(reader)
