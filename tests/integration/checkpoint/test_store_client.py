"""The TCPStore client without torch against the real TCPStore, and the savers' exchange over it."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import TCPStore

from steadyrun.checkpoint.saver import messages as m
from steadyrun.checkpoint.saver.exchange import PREFIX, Connected, Exchange, Heard, Lost, Place
from steadyrun.checkpoint.saver.storeclient import (
    MOST_VALUE_BYTES,
    PlainStore,
    Store,
    StoreError,
    TorchStore,
    open_store,
)

HOST = "127.0.0.1"


@pytest.fixture(scope="module", autouse=True)
def _pipes_of_libuv() -> None:
    """The first TCPStore of a process makes a pipe that stays."""
    TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


class Server:
    """A TCPStore that can be given up, which ends its threads and connections."""

    def __init__(self, use_libuv: bool = True) -> None:
        self.store: Any = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
        self.port = self.store.port

    def set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)
        self.store.check([key])  # SET is not answered: another connection may be faster

    def get(self, key: str) -> bytes:
        return bytes(self.store.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self.store.add(key, amount))

    def check(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def close(self) -> None:
        self.store = None


@pytest.fixture(params=[True, False], ids=["libuv", "threads"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(request.param)
    yield made
    made.close()


@pytest.fixture(params=[PlainStore, TorchStore])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Store]:
    made = request.param(HOST, server.port)
    yield made
    made.close()


def test_values_go_both_ways(client: Store, server: Server) -> None:
    client.set("from us", b"\0\xff" * 1000)
    assert server.get("from us") == b"\0\xff" * 1000
    server.set("from torch", b"value")
    assert client.get("from torch") == b"value"
    client.set("empty", b"")
    assert client.get("empty") == b""


def test_the_largest_value_is_taken_and_a_larger_one_refused_here(client: Store, server: Server) -> None:
    data = os.urandom(1 << 20) * (MOST_VALUE_BYTES >> 20)
    client.set("large", data)
    assert client.get("large") == data
    if isinstance(client, PlainStore):
        with pytest.raises(ValueError, match="at most"):
            client.set("larger", data + b"x")


def test_sums_are_shared(client: Store, server: Server) -> None:
    assert client.add("n", 3) == 3
    assert server.add("n", -5) == -2
    assert client.add("n", 0) == -2


def test_keys_can_be_asked_for_and_deleted(client: Store, server: Server) -> None:
    assert not client.check("k")
    server.set("k", b"1")
    assert client.check("k")
    client.delete("k")
    assert not server.check("k")


def test_a_wait_ends_with_its_key_or_its_limit_and_the_client_goes_on(client: Store, server: Server) -> None:
    started_s = time.monotonic()
    assert not client.wait("k", 0.2)
    assert time.monotonic() - started_s >= 0.2
    timer = threading.Timer(0.1, lambda: server.set("k", b"1"))
    timer.start()
    assert client.wait("k", 30.0)
    timer.join()
    assert client.get("k") == b"1"


def test_a_wait_that_ends_at_the_moment_of_its_key_confuses_nothing(server: Server) -> None:
    client = PlainStore(HOST, server.port)
    for i in range(50):
        timer = threading.Timer(0.002, lambda i=i: server.set(f"k{i}", b"1"))  # type: ignore[misc]
        timer.start()
        client.wait(f"k{i}", 0.002)
        timer.join()
        assert client.add("n", 1) == i + 1
    client.close()


def test_a_call_in_another_thread_is_ended_by_a_cut(server: Server) -> None:
    client = PlainStore(HOST, server.port)
    timer = threading.Timer(0.1, client.cut)
    timer.start()
    with pytest.raises(StoreError, match="lost the store"):
        client.wait("never", 60.0)
    timer.join()
    client.close()


def test_a_server_that_ends_is_noticed(server: Server) -> None:
    with subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "from torch.distributed import TCPStore\n"
            f"s = TCPStore({HOST!r}, 0, is_master=True, wait_for_workers=False)\n"
            "print(s.port, flush=True)\ninput()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        client = PlainStore(HOST, int(process.stdout.readline()))
        process.kill()
        with pytest.raises(StoreError, match="lost the store"):
            client.wait("never", 60.0)
        client.close()


def test_what_is_no_store_is_refused_and_nobody_there_is_said_at_once() -> None:
    with socket.create_server((HOST, 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StoreError, match="no TCPStore"):
            PlainStore(HOST, listening.getsockname()[1], 5.0)
        thread.join()
        port = listening.getsockname()[1]
    with pytest.raises(StoreError, match="cannot reach the store"):
        open_store(HOST, port, 5.0)


# -- the exchange ------------------------------------------------------------------------------------------------------
class Side:
    """One saver's end of the exchange."""

    def __init__(self, is_coordinator: bool) -> None:
        self.is_coordinator = is_coordinator
        self.heard: queue.SimpleQueue[Connected | Lost | Heard] = queue.SimpleQueue()
        self.exchange = Exchange(self.heard.put)

    def bind(self, server: Server, attempt: int = 0) -> None:
        self.exchange.bind(Place(attempt, HOST, server.port, self.is_coordinator))
        assert self.next() == Connected(attempt)

    def next(self) -> Connected | Lost | Heard:
        return self.heard.get(timeout=30.0)

    def message(self) -> Any:
        event = self.next()
        assert isinstance(event, Heard)
        return event.message


@pytest.fixture
def sides(wait_until: Callable[..., object]) -> Iterator[tuple[Side, Side, Side]]:
    before = threading.active_count()
    made = (Side(True), Side(False), Side(False))
    yield made
    for side in made:
        side.exchange.bind(None)
    wait_until(lambda: threading.active_count() <= before, 30.0, "the threads of the exchange end")


def agree(value: Any, rank: int = 0) -> m.AgreeTold:
    return m.AgreeTold(0, rank, "k", value)


def test_nodes_reach_the_coordinator_and_it_reaches_all(server: Server, sides: tuple[Side, Side, Side]) -> None:
    one, *others = sides
    for side in sides:
        side.bind(server)
    for i in range(20):
        for rank, other in enumerate(others):
            other.exchange.post(agree(i, rank))
    told = [one.message() for _ in range(40)]
    for rank in range(2):
        assert [t.value for t in told if t.rank == rank] == list(range(20)), "in the order of each"
    one.exchange.post(m.Agreed(0, "k", (1, 2)))
    assert [o.message() for o in others] == [m.Agreed(0, "k", (1, 2))] * 2


def test_what_was_said_before_somebody_came_is_not_heard(server: Server, sides: tuple[Side, Side, Side]) -> None:
    one, other, late = sides
    one.bind(server)
    other.bind(server)
    one.exchange.post(m.Agreed(0, "old", ()))
    assert other.message().key == "old"
    late.bind(server)
    one.exchange.post(m.Agreed(0, "new", ()))
    assert late.message().key == "new"


def test_a_message_larger_than_the_store_takes_arrives_whole(server: Server, sides: tuple[Side, Side, Side]) -> None:
    one, other, _ = sides
    one.bind(server)
    other.bind(server)
    text = os.urandom(7 << 20).hex()
    other.exchange.post(agree(text))
    assert one.message().value == text
    assert not server.check(f"{PREFIX}one/1"), "what was read is removed"


def test_a_hole_of_a_writer_that_died_is_stepped_over(server: Server, sides: tuple[Side, Side, Side]) -> None:
    one, other, _ = sides
    one.bind(server)
    other.bind(server)
    server.add(f"{PREFIX}one/last", 1)  # and never the message
    other.exchange.post(agree("after"))
    assert one.next() == Connected(0), "so that everything is said again"
    assert one.message().value == "after"


def test_nonsense_in_the_store_is_passed_by(server: Server, sides: tuple[Side, Side, Side]) -> None:
    one, other, _ = sides
    one.bind(server)
    other.bind(server)
    number = server.add(f"{PREFIX}one/last", 1)
    server.set(f"{PREFIX}one/{number}", b"Wnonsense")
    other.exchange.post(agree("after"))
    assert one.message().value == "after"


def test_the_next_attempt_has_a_store_of_its_own(server: Server, sides: tuple[Side, Side, Side]) -> None:
    one, other, _ = sides
    one.bind(server)
    other.bind(server)
    following = Server()
    one.bind(following, 1)
    other.bind(following, 1)
    other.exchange.post(agree("in the next"))
    assert one.message().value == "in the next"
    following.close()


def test_a_lost_store_is_told_and_the_last_words_are_waited_for(sides: tuple[Side, Side, Side]) -> None:
    one, other, _ = sides
    server = Server()
    one.bind(server)
    other.bind(server)
    other.exchange.post(agree("last words"))
    other.exchange.finish(10.0)
    assert one.message().value == "last words"
    server.close()
    assert isinstance(one.next(), Lost)
