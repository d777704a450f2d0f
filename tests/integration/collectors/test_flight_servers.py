"""Ranks that answer in part, slowly, wrongly or not at all: all ways end by the deadline and say what is lacking.

The peers here are small stand-ins for torch's server, for the rank's evidence thread, and for NCCL's heartbeat thread.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steadyrun.collectors.evidence import Contribution, EvidenceCollector, Target
from steadyrun.collectors.flight.asking import FlightLimits, RankAsker
from steadyrun.collectors.flight.handlers import DumpRequest, HandlerError, WorkerServer
from steadyrun.collectors.flight.live import live_from_json
from steadyrun.collectors.flight.watchdog_files import wait_until_quiet
from steadyrun.core.flight import RankFlight
from steadyrun.core.records import ExitRecord

LIVE: dict[str, Any] = {
    "schema": "steadyrun.flight-live/1",
    "rank": 0,
    "groups": [{"name": "0", "desc": "default_pg", "ranks": [0, 1], "backend": "gloo"}],
    "recorders": ["gloo"],
    "server": "flight.sock",
    "stacks_ready": True,
}
PICKLE = b"\x80\x02}."
ASK = DumpRequest("gloo", "fr_trace_json", "active", "json")
Answer = Callable[[socket.socket, bytes], None]


class Listener:
    """Accepts on a unix socket in a thread and lets *answer* speak to each client that has sent a request."""

    def __init__(self, path: Path, end_of_request: bytes, answer: Answer) -> None:
        self.requests: list[bytes] = []
        self._answer, self._end = answer, end_of_request
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(8)
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            readable, _, _ = select.select([self._socket, self._stop_read], [], [])
            if self._stop_read in readable:
                return
            client, _ = self._socket.accept()
            with client:
                client.settimeout(10)
                request = b""
                while self._end not in request:
                    part = client.recv(4096)
                    if not part:
                        break
                    request += part
                self.requests.append(request)
                try:
                    self._answer(client, request)
                except OSError:
                    continue  # the client has given up

    def wait_for_stop(self) -> None:
        """Say nothing until the test is over."""
        select.select([self._stop_read], [], [], 20)

    def close(self) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join(30)
        self._socket.close()
        os.close(self._stop_read)
        os.close(self._stop_write)


@pytest.fixture
def listen() -> Iterator[Callable[..., Listener]]:
    listeners: list[Listener] = []

    def start(path: Path, answer: Answer, end: bytes = b"\r\n\r\n") -> Listener:
        listeners.append(Listener(path, end, answer))
        return listeners[-1]

    yield start
    for listener in listeners:
        listener.close()


def reply(body: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    told = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {told}\r\nConnection: close\r\n\r\n".encode() + body


def torch_server(names: list[str], bodies: dict[str, bytes]) -> Answer:
    def answer(client: socket.socket, request: bytes) -> None:
        path = request.split(b" ", 2)[1].decode()
        if path == "/handler/":
            client.sendall(reply(json.dumps(names).encode()))
        else:
            body = bodies.get(path)
            client.sendall(reply(body) if body is not None else reply(b"no such", "404 Not Found"))

    return answer


def rank_thread(live: dict[str, Any] | None, folder: Path, dumps: dict[str, bytes]) -> Answer:
    def answer(client: socket.socket, request: bytes) -> None:
        command = json.loads(request)["cmd"]
        if command == "groups":
            client.sendall(json.dumps(live if live is not None else {"error": "cannot answer"}).encode() + b"\n")
            return
        for name, content in dumps.items():
            (folder / f".{name}").write_bytes(content)
            (folder / f".{name}").replace(folder / name)
        client.sendall(json.dumps({"files": list(dumps), "missing": []}).encode() + b"\n")

    return answer


def asker(
    folder: Path, live: dict[str, Any] | None, limit_s: float = 10.0, state: str = "S", exit_: ExitRecord | None = None
) -> RankAsker:
    target = Target(0, 0, 1, 0, None, exit_, folder)
    told = live_from_json(live) if live is not None else None
    return RankAsker(target, told, FlightLimits(), time.monotonic() + limit_s, lambda pid: state)


# -- the server --------------------------------------------------------------------------------------------------------
def drips(client: socket.socket, request: bytes) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        client.sendall(b"x")
        select.select([], [], [], 0.02)


WRONG: dict[str, tuple[Answer, str]] = {
    "refuses": (lambda c, r: c.sendall(reply(b"Handler x failed", "500 Oh")), "refused with 500: Handler x failed"),
    "is no HTTP": (lambda c, r: c.sendall(b"hello\r\n\r\n"), "no HTTP"),
    "closes": (lambda c, r: None, "no HTTP"),
    "is cut": (lambda c, r: c.sendall(reply(b"abc", length=10)), "ends after 3 of 10 bytes"),
    "is too large": (lambda c, r: c.sendall(reply(b"", length=1 << 40)), "67108864 are allowed"),
    "has an endless head": (lambda c, r: c.sendall(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000), "no HTTP"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_answer_is_said(what: str, listen, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    answer, words = WRONG[what]
    listen(tmp_path / "s", answer)
    with pytest.raises(HandlerError, match=words):
        WorkerServer(tmp_path / "s").fetch(ASK, time.monotonic() + 10)


def test_the_deadline_holds_for_the_whole_answer(listen, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    listen(tmp_path / "s", drips)
    began_s = time.monotonic()
    with pytest.raises(HandlerError, match="no answer in"):
        WorkerServer(tmp_path / "s").fetch(ASK, began_s + 0.3)
    assert time.monotonic() - began_s < 2.0


def test_no_server_is_said(tmp_path: Path) -> None:
    with pytest.raises(HandlerError, match="No such file"):
        WorkerServer(tmp_path / "s").handlers(time.monotonic() + 1)


def test_a_path_longer_than_an_address_is_reached(listen, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.chdir(deep)
    listen(Path("s"), torch_server(["fr_trace_json"], {}))
    assert WorkerServer(deep / "s").handlers(time.monotonic() + 10) == {"fr_trace_json"}


# -- the ways together -------------------------------------------------------------------------------------------------
def test_dumps_with_call_sites_come_before_those_without(listen, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    listen(tmp_path / "flight.sock", torch_server(["fr_trace_json"], {"/handler/fr_trace_json": b"{}"}))
    thread = listen(tmp_path / "evidence.sock", rank_thread(LIVE, tmp_path, {"flight.gloo.pickle": PICKLE}), end=b"\n")
    rank = asker(tmp_path, LIVE)
    rank.ask()
    assert [(r.kind, r.suffix, r.content) for r in rank.found["gloo"]] == [
        ("full", "pickle", PICKLE),
        ("active", "json", b"{}"),
    ]
    assert rank.missing == []
    assert json.loads(thread.requests[1]) == {"cmd": "flight", "stacks": True}


def test_a_held_interpreter_lock_leaves_what_the_server_has(listen, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    listen(tmp_path / "flight.sock", torch_server(["fr_trace_json"], {"/handler/fr_trace_json": b"{}"}))
    silent = listen(tmp_path / "evidence.sock", lambda c, r: silent.wait_for_stop(), end=b"\n")
    began_s = time.monotonic()
    rank = asker(tmp_path, LIVE)
    rank.ask()
    assert time.monotonic() - began_s < 2.0
    assert [r.content for r in rank.found["gloo"]] == [b"{}"]
    (text,) = rank.missing
    assert text.startswith("no call sites: evidence socket: no answer")


def test_a_silent_rank_costs_no_more_than_the_deadline(listen, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for name, end in (("flight.sock", b"\r\n\r\n"), ("evidence.sock", b"\n")):
        box: list[Listener] = []
        box.append(listen(tmp_path / name, lambda c, r, box=box: box[0].wait_for_stop(), end=end))
    began_s = time.monotonic()
    rank = asker(tmp_path, LIVE, limit_s=0.35)
    rank.ask()
    assert time.monotonic() - began_s < 1.0
    assert rank.found == {}
    (text,) = rank.missing
    assert "torch's server: /handler/: no answer" in text
    assert "evidence socket" in text


def test_a_stopped_rank_is_not_asked(listen, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    server = listen(tmp_path / "flight.sock", torch_server([], {}))
    rank = asker(tmp_path, LIVE, state="T")
    rank.ask()
    assert rank.missing == ["the process is stopped (state T) and answers nothing; it was left so"]
    assert server.requests == []


def test_a_dead_rank_gives_what_it_left(tmp_path: Path) -> None:
    (tmp_path / "flight.gloo.exception.pickle").write_bytes(PICKLE)
    (tmp_path / "flight.gloo.pickle").write_bytes(b"of an earlier incident")
    rank = asker(tmp_path, None, exit_=ExitRecord(1, None, 1.0))
    assert rank.has_traces()
    rank.ask()
    assert [(r.recorder, r.kind, r.content) for r in rank.left] == [("gloo", "exception", PICKLE)]
    assert rank.found == {}
    assert rank.missing == []


def test_a_rank_without_torch_leaves_no_word(tmp_path: Path) -> None:
    assert not asker(tmp_path, None).has_traces()


def test_a_rank_of_an_older_steadyrun_is_said(listen, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    listen(tmp_path / "evidence.sock", rank_thread(None, tmp_path, {}), end=b"\n")
    rank = asker(tmp_path, {**LIVE, "server": None, "server_missing": "this torch has no _WorkerServer"})
    rank.ask()
    assert rank.missing == ["torch's server: this torch has no _WorkerServer; evidence socket: cannot answer"]


# -- torch's own files -------------------------------------------------------------------------------------------------
class Writer:
    """Writes a file in parts as torch does: straight onto its final name, with a pause between."""

    def __init__(self, path: Path, parts: list[bytes], pause_s: float) -> None:
        self._thread = threading.Thread(target=self._write, args=(path, parts, pause_s))
        self._thread.start()

    @staticmethod
    def _write(path: Path, parts: list[bytes], pause_s: float) -> None:
        with path.open("wb", buffering=0) as f:
            for part in parts:
                f.write(part)
                select.select([], [], [], pause_s)

    def join(self) -> None:
        self._thread.join()


def test_a_file_is_taken_when_it_is_quiet(tmp_path: Path) -> None:
    path = tmp_path / "trace_0"
    writer = Writer(path, [b"\x80\x02", b"}", b"."], 0.2)
    try:
        state = wait_until_quiet(path, time.monotonic() + 20)
    finally:
        writer.join()
    assert state is not None
    assert (state.size_bytes, state.is_whole) == (4, True)


def test_a_file_that_never_ends_is_taken_at_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "trace_0"
    writer = Writer(path, [b"x"] * 40, 0.03)
    try:
        began_s = time.monotonic()
        state = wait_until_quiet(path, began_s + 0.4)
        took_s = time.monotonic() - began_s
    finally:
        writer.join()
    assert state is not None
    assert took_s < 1.0


def test_watchdog_files_are_of_this_attempt(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    rank_dir = tmp_path / "attempts/0/rank_0"
    rank_dir.mkdir(parents=True)
    for folder, found in ((rank_dir, True), (elsewhere, False)):  # of its age nothing is known there
        (folder / "fr_0").write_bytes(PICKLE)
        old_s = time.time() - 3600
        os.utime(folder / "fr_0", (old_s, old_s))
        rank = asker(rank_dir, {**LIVE, "dump_prefix": f"{folder}/fr_"}, exit_=ExitRecord(None, 6, 1.0))
        rank.ask()
        assert [r.kind for r in rank.left] == (["watchdog"] if found else [])


class Heartbeat:
    """NCCL's thread: a byte in the pipe, and after a while there is a dump."""

    def __init__(self, pipe: Path, dump: Path, answers: bool = True) -> None:
        os.mkfifo(pipe)
        self._fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, args=(dump, answers))
        self._thread.start()

    def _serve(self, dump: Path, answers: bool) -> None:
        while self._stop_read not in (readable := select.select([self._fd, self._stop_read], [], [])[0]):
            if readable and os.read(self._fd, 100) and answers:
                Writer(dump, [PICKLE[:2], PICKLE[2:]], 0.1).join()

    def close(self) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join(30)
        for fd in (self._fd, self._stop_read, self._stop_write):
            os.close(fd)


@pytest.mark.parametrize("answers", [True, False])
def test_nccl_is_asked_through_its_pipe_when_nothing_else_gives_it(answers: bool, tmp_path: Path) -> None:
    (tmp_path / "fr_0").write_bytes(b"of an earlier timeout.")
    pipe = tmp_path / "flight.request_0.pipe"
    heartbeat = Heartbeat(pipe, tmp_path / "fr_0", answers)
    live = {**LIVE, "recorders": ["gloo", "nccl"], "server": None, "dump_prefix": f"{tmp_path}/fr_", "pipe": str(pipe)}
    try:
        rank = asker(tmp_path, live)
        rank.ask()
    finally:
        heartbeat.close()
    assert [(r.kind, r.content) for r in rank.left] == [("watchdog", b"of an earlier timeout.")]
    if answers:
        assert [(r.kind, r.content) for r in rank.found["nccl"]] == [("full", PICKLE)]
    else:
        assert "nccl" not in rank.found
        assert any("torch wrote nothing" in text for text in rank.missing)


def test_a_backend_of_its_own_is_written_by_torch_where_the_rank_cannot(listen, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    dump = tmp_path / "fr_0"
    rest = torch_server(
        ["fr_trace_json", "fr_dump_file"],
        {"/handler/fr_trace_json": b"{}", "/handler/fr_trace_json?backend=nccl2": b'{"entries": []}'},
    )

    def answer(client: socket.socket, request: bytes) -> None:
        if b"/handler/fr_dump_file?backend=nccl2 " in request:
            dump.write_bytes(PICKLE)
            client.sendall(reply(b"Flight Recorder dump initiated for rank 0"))
        else:
            rest(client, request)

    listen(tmp_path / "flight.sock", answer)
    rank = asker(tmp_path, {**LIVE, "recorders": ["gloo", "nccl2"], "dump_prefix": f"{tmp_path}/fr_"})
    rank.ask()
    assert [(r.kind, r.suffix) for r in rank.found["nccl2"]] == [("full", "pickle"), ("active", "json")]
    assert [(r.kind, r.suffix) for r in rank.found["gloo"]] == [("active", "json")]


def test_with_little_time_left_what_the_server_gave_is_enough(listen, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    listen(tmp_path / "flight.sock", torch_server(["fr_trace_json"], {"/handler/fr_trace_json": b"{}"}))
    thread = listen(tmp_path / "evidence.sock", rank_thread(LIVE, tmp_path, {"flight.gloo.pickle": PICKLE}), end=b"\n")
    rank = asker(tmp_path, LIVE, limit_s=0.2)
    rank.ask()
    assert [r.content for r in rank.found["gloo"]] == [b"{}"]
    assert [json.loads(r)["cmd"] for r in thread.requests] == ["groups"]
    assert rank.missing[0].startswith("no call sites: only 0.")


def test_a_rank_that_has_left_its_last_word_is_not_asked_again(listen, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    listen(tmp_path / "flight.sock", torch_server(["fr_trace_json"], {"/handler/fr_trace_json": b"{}"}))
    thread = listen(tmp_path / "evidence.sock", rank_thread(LIVE, tmp_path, {}), end=b"\n")
    (tmp_path / "flight.gloo.exception.pickle").write_bytes(PICKLE)
    rank = asker(tmp_path, LIVE)
    rank.ask()
    assert [r.content for r in rank.found["gloo"]] == [b"{}"]
    assert [r.kind for r in rank.left] == ["exception"]
    assert thread.requests == []
    assert rank.missing == []


# -- within the collection ---------------------------------------------------------------------------------------------
class Noted:
    """A source that notes whom it was asked for and for how long, and finds something only in ranks that have ended."""

    limit_s = 60.0

    def __init__(self) -> None:
        self.asked: list[tuple[bool, float]] = []

    def collect(self, target: Target, folder: Path, deadline_s: float) -> Contribution:
        self.asked.append((target.exit is not None, deadline_s - time.monotonic()))
        return Contribution(RankFlight(target.rank) if target.exit is not None else None)


def test_a_rank_that_ends_meanwhile_is_asked_for_what_it_left(tmp_path: Path) -> None:
    noted = Noted()
    gone = subprocess.Popen(["true"])
    gone.wait(30)
    collector = EvidenceCollector("node", py_spy=None, sources=(noted,))
    target = Target(0, 0, gone.pid, 0, None, None, tmp_path)
    try:
        (found,) = collector.collect([target], tmp_path / "1", 60, 10.0, lambda rank: ExitRecord(1, None, 2.0))
    finally:
        collector.close()
    assert [is_ended for is_ended, _ in noted.asked] == [False, True]
    assert found.flight == RankFlight(0)


def test_after_a_death_a_source_has_a_fraction_of_its_time(tmp_path: Path) -> None:
    noted = Noted()
    gone = subprocess.Popen(["true"])
    gone.wait(30)
    collector = EvidenceCollector("node", py_spy=None, sources=(noted,))
    dead = Target(0, 0, gone.pid, 0, None, ExitRecord(1, None, 2.0), tmp_path)
    try:
        collector.collect([dead], tmp_path / "1", 60, 10.0)
    finally:
        collector.close()
    ((_, left_s),) = noted.asked
    assert left_s < 0.5
