"""A rank's link to its saver, with a saver that the test plays."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steadyrun.checkpoint.client import SaverGoneError, SaverLink
from steadyrun.checkpoint.layout import Entry, Layout
from steadyrun.checkpoint.saves import SaveState
from steadyrun.checkpoint.wire import Wire

LAYOUT = Layout(0, 1, (Entry("model.w", ("model", "w"), "float32", (4,), (0,), (4,), 0, 16),), ())
LIMIT_S = 20.0


class Saver:
    """Listens where the link connects; the test accepts, reads and answers."""

    def __init__(self, path: Path) -> None:
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.bind(str(path))
        self.listening.listen(4)
        self.listening.settimeout(LIMIT_S)
        self.wires: list[Wire] = []

    def accept(self) -> Wire:
        connection, _ = self.listening.accept()
        connection.settimeout(LIMIT_S)
        wire = Wire(connection)
        self.wires.append(wire)
        return wire

    def close(self) -> None:
        for wire in self.wires:
            wire.close()
        self.listening.close()


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    played = Saver(tmp_path / "saver.sock")
    yield played
    played.close()


@pytest.fixture
def link(tmp_path: Path) -> Iterator[SaverLink]:
    made = SaverLink(str(tmp_path / "saver.sock"), {"rank": 0, "attempt": 2})
    yield made
    made.close()


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start *work*; the returned function waits for its result, or raises what it raised."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "the other side did not end"
        if errors:
            raise errors[0]
        return results[0]

    return result


def connected(saver: Saver, link: SaverLink) -> Wire:
    def serve() -> Wire:
        wire = saver.accept()
        assert wire.receive()["op"] == "hello"
        wire.send("welcome", version=1, root="/x")
        return wire

    served = in_thread(serve)
    assert link.connect(LIMIT_S)["root"] == "/x"
    return served()  # type: ignore[no-any-return]


def test_nobody_who_listens_is_said_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(SaverGoneError, match=r"nowhere\.sock"):
        SaverLink(str(tmp_path / "nowhere.sock"), {}).connect(1.0)


def test_a_saver_that_never_answers_is_given_up_after_the_limit(saver: Saver, link: SaverLink) -> None:
    with pytest.raises(SaverGoneError, match="did not answer"):
        link.connect(0.2)


def test_the_hello_says_who_the_rank_is(saver: Saver, link: SaverLink) -> None:
    def serve() -> dict[str, Any]:
        wire = saver.accept()
        hello = wire.receive()
        wire.send("welcome")
        return hello

    served = in_thread(serve)
    link.connect(LIMIT_S)
    assert (served()["rank"], served()["attempt"]) == (0, 2)


def test_memory_comes_as_a_descriptor(saver: Saver, link: SaverLink) -> None:
    wire = connected(saver, link)
    link.send_layout(LAYOUT, 100)
    asked = wire.receive()
    assert (asked["op"], Layout.from_json(asked["layout"]), asked["blob_bytes"]) == ("layout", LAYOUT, 100)
    memory = os.memfd_create("memory")
    try:
        wire.send("arena", (memory,), slots=2, note="enough")
        granted = link.granted(LIMIT_S)
        assert granted is not None
        assert (granted.slots, granted.note) == (2, "enough")
        assert os.fstat(granted.fd).st_ino == os.fstat(memory).st_ino
        os.close(granted.fd)
    finally:
        os.close(memory)
    assert link.granted() is None, "handed out once"


@pytest.mark.parametrize("direct", [True, False])
def test_a_refusal_says_why_and_whether_all_ranks_are_refused(saver: Saver, link: SaverLink, direct: bool) -> None:
    wire = connected(saver, link)
    link.send_layout(LAYOUT, 100)
    wire.send("refused", why="too little", direct=direct)
    granted = link.granted(LIMIT_S)
    assert granted is not None
    assert (granted.fd, granted.note, granted.direct) == (-1, "too little", direct)


def test_a_save_is_followed_to_its_end_and_no_further(saver: Saver, link: SaverLink) -> None:
    wire = connected(saver, link)
    record = link.new_record(7, 1)
    link.send_staged(record, 0, ["memory", "shared"], 0.25)
    told = wire.receive()
    assert {k: told[k] for k in ("op", "step", "generation", "slot", "stall_s")} == {
        "op": "staged",
        "step": 7,
        "generation": 1,
        "slot": 0,
        "stall_s": 0.25,
    }
    wire.send("save", step=7, generation=1, state="in_memory")
    assert link.wait_for(record, LIMIT_S, until_in_memory=True)
    assert (record.state, record.was_in_memory, record.is_final) == (SaveState.IN_MEMORY, True, False)
    wire.send("save", step=7, generation=1, state="durable", seconds=1.5)
    assert link.wait_for(record, LIMIT_S)
    wire.send("save", step=7, generation=1, state="failed", why="late nonsense")
    wire.send("save", step=8, generation=99, state="durable")
    wire.send("flushed", step=7)
    assert link.ask("flushed", LIMIT_S)["step"] == 7
    assert (record.state, record.why, record.seconds) == (SaveState.DURABLE, "", 1.5)


def test_waiting_ends_at_the_limit(saver: Saver, link: SaverLink) -> None:
    connected(saver, link)
    assert not link.wait_for(link.new_record(1, 1), 0.1)


def test_a_saver_that_was_started_again_is_told_everything_again(saver: Saver, link: SaverLink) -> None:
    wire = connected(saver, link)
    link.send_layout(LAYOUT, 100)
    lost, done = link.new_record(7, 1), link.new_record(8, 2)
    link.send_staged(done, 1, ["memory"], 0.0)
    wire.send("save", step=8, generation=2, state="durable")
    assert link.wait_for(done, LIMIT_S)
    link.send_staged(lost, 0, ["memory"], 0.0)
    wire.close()

    def serve() -> list[str]:
        again = saver.accept()
        heard = [again.receive() for _ in range(3)]
        assert heard[1]["again"] is True
        assert heard[2]["generation"] == 1, "what is durable is not told again"
        again.send("save", step=7, generation=1, state="durable")
        return [str(m["op"]) for m in heard]

    served = in_thread(serve)
    assert link.wait_for(lost, LIMIT_S)
    assert served() == ["hello", "layout", "staged"]
    assert lost.state is SaveState.DURABLE


def test_a_question_is_asked_again_of_the_next_saver(saver: Saver, link: SaverLink) -> None:
    wire = connected(saver, link)

    def serve() -> None:
        assert wire.receive()["op"] == "restore"
        wire.close()
        again = saver.accept()
        assert again.receive()["op"] == "hello"
        assert again.receive()["op"] == "restore"
        again.send("choice", source="none")

    served = in_thread(serve)
    assert link.ask("choice", LIMIT_S, "restore", round=0)["source"] == "none"
    served()


def test_the_descriptor_is_out_of_the_scripts_way(saver: Saver, link: SaverLink) -> None:
    connected(saver, link)
    assert link._wire is not None
    assert link._wire.fileno() >= 200
