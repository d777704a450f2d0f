"""One set of expectations for every AsyncStore: the fake that simulations use, and torch's stores behind ours."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from steadyrun.node.ports import AsyncStore, StoreEvent
from steadyrun.testing.store import ManualClock, StoreNetwork

DEADLINE_S = 20.0


@dataclass
class World:
    """Stores of several nodes on one server; ``connect`` gives a further one."""

    kind: str
    connect: Callable[[str], AsyncStore]


def _fake(_: Path) -> Iterator[World]:
    network = StoreNetwork(ManualClock())
    yield World("fake", network.connect)


def _tcp(_: Path) -> Iterator[World]:
    dist = pytest.importorskip("torch.distributed")
    from steadyrun.node.store import TorchAsyncStore

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield World("tcp", lambda node: TorchAsyncStore(dist.PrefixStore("job/round_0", server)))


def _tcp_without_clone(_: Path) -> Iterator[World]:
    dist = pytest.importorskip("torch.distributed")
    from steadyrun.node.store import TorchAsyncStore

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield World("tcp, torch < 2.8", lambda node: TorchAsyncStore(_Old(dist.PrefixStore("job/round_0", server))))


def _file(folder: Path) -> Iterator[World]:
    dist = pytest.importorskip("torch.distributed")
    from steadyrun.node.store import TorchAsyncStore

    path = str(folder / "store")
    yield World("file", lambda node: TorchAsyncStore(dist.PrefixStore("job", dist.FileStore(path, -1))))


class _Old:
    """A PrefixStore as torch 2.6 and 2.7 have it: without ``clone``."""

    def __init__(self, store: Any) -> None:
        self.underlying_store = store.underlying_store
        self.compare_set = store.compare_set


@pytest.fixture(params=[_fake, _tcp, _tcp_without_clone, _file], ids=lambda f: f.__name__.strip("_"))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    opened: list[AsyncStore] = []
    for world in request.param(tmp_path):
        inner = world.connect

        def connect(node: str, inner: Callable[[str], AsyncStore] = inner) -> AsyncStore:
            opened.append(inner(node))
            return opened[-1]

        world.connect = connect
        yield world
        for store in opened:
            store.close()
        del world.connect, inner, connect  # the server below goes with the last reference; pytest keeps the World


@pytest.fixture(scope="session", autouse=True)
def _torch_has_its_own_descriptors() -> None:
    """What torch opens once per process must not count as a leak of the first test that uses a store."""
    dist = pytest.importorskip("torch.distributed")
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def events(store: AsyncStore, count: int) -> list[StoreEvent]:
    """The next *count* events, each announced by the descriptor."""
    got: list[StoreEvent] = []
    limit_s = time.monotonic() + DEADLINE_S
    while len(got) < count:
        left_s = limit_s - time.monotonic()
        assert left_s > 0, f"only {got} of {count} events"
        select.select([store], [], [], left_s)
        got.extend(store.drain())
    assert len(got) == count, got
    return got


def test_watched_key_is_delivered_once_when_it_is_set(world: World) -> None:
    a, b = world.connect("a"), world.connect("b")
    a.watch("stop/0")
    b.set("stop/0", b"reason")
    assert events(a, 1) == [StoreEvent("stop/0", b"reason")]
    b.set("stop/0", b"again")
    b.set("other", b"1")
    a.watch("other")
    assert events(a, 1) == [StoreEvent("other", b"1")]


def test_key_that_has_a_value_is_delivered_at_once(world: World) -> None:
    a, b = world.connect("a"), world.connect("b")
    a.set("k", b"v")
    a.watch("k")
    assert events(a, 1)[0].value == b"v"
    b.watch("k")
    assert events(b, 1)[0].value == b"v"


def test_value_may_hold_any_bytes(world: World) -> None:
    a = world.connect("a")
    value = bytes(range(256)) * 64
    a.set("k", value)
    a.watch("k")
    assert events(a, 1)[0].value == value


def test_first_set_wins(world: World) -> None:
    a, b = world.connect("a"), world.connect("b")
    a.set_first("stop/3", b"from a")
    a.watch("stop/3")
    assert events(a, 1)[0].value == b"from a"
    b.set_first("stop/3", b"from b")
    b.watch("stop/3")
    assert events(b, 1)[0].value == b"from a"


def test_first_set_refuses_an_empty_value(world: World) -> None:
    with pytest.raises(ValueError, match="not empty"):
        world.connect("a").set_first("k", b"")


def test_whoever_completes_the_count_notifies_all(world: World) -> None:
    nodes = [world.connect(name) for name in "abc"]
    for node in nodes:
        node.watch("arrived/1")
    for node in nodes[:2]:
        node.add("arrive/1", 1, 3, "arrived/1")
    # nothing may come before the third; an order in the same queue shows that the first two were carried out
    nodes[0].set("probe", b"1")
    nodes[0].watch("probe")
    assert events(nodes[0], 1)[0].key == "probe"
    nodes[2].add("arrive/1", 1, 3, "arrived/1")
    for node in nodes:
        assert events(node, 1) == [StoreEvent("arrived/1", b"1")]


def test_many_keys_can_be_watched_at_once(world: World) -> None:
    a, b = world.connect("a"), world.connect("b")
    keys = {f"evidence/0/{n}" for n in range(60)}
    for key in sorted(keys):
        a.watch(key)
    for key in sorted(keys):
        b.set(key, key.encode())
    got = events(a, len(keys))
    assert {e.key for e in got} == keys
    assert all(e.value == e.key.encode() for e in got)


def test_followed_keys_are_delivered_whenever_they_change(world: World) -> None:
    a, b = world.connect("a"), world.connect("b")
    b.set("pace/1", b"1")
    a.follow(["pace/1", "pace/2"], 0.05)
    assert events(a, 1) == [StoreEvent("pace/1", b"1")]
    b.set("pace/2", b"")
    assert events(a, 1) == [StoreEvent("pace/2", b"")]
    b.set("pace/2", b"second")
    assert events(a, 1) == [StoreEvent("pace/2", b"second")]
    b.set("pace/2", b"second")  # the same again is no news
    b.set("pace/1", b"2")
    assert events(a, 1) == [StoreEvent("pace/1", b"2")]
    a.follow(["pace/3"], 0.05)
    a.set("pace/2", b"third")
    a.set("pace/3", b"3")
    assert events(a, 1) == [StoreEvent("pace/3", b"3")]
    a.follow([], 0.05)
    a.set("pace/3", b"4")
    a.set("mine", b"1")
    a.watch("mine")
    assert events(a, 1) == [StoreEvent("mine", b"1")]


def test_nothing_is_readable_without_an_event(world: World) -> None:
    a = world.connect("a")
    a.watch("never")
    a.set("mine", b"1")
    a.watch("mine")
    events(a, 1)
    assert a.drain() == ()
    assert select.select([a], [], [], 0)[0] == []


def test_close_is_quick_with_watches_open_and_can_be_repeated(world: World) -> None:
    a = world.connect("a")
    for n in range(5):
        a.watch(f"never/{n}")
    a.set("mine", b"1")
    a.watch("mine")
    events(a, 1)
    begun_s = time.monotonic()
    a.close()
    a.close()
    assert time.monotonic() - begun_s < 2.0
    a.set("late", b"1")
    a.watch("late")
    assert a.drain() == ()


# -- the real one only -------------------------------------------------------------------------------------------------
def test_wake_up_does_not_wait_for_a_poll() -> None:
    dist = pytest.importorskip("torch.distributed")
    from steadyrun.node.store import TorchAsyncStore

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    a, b = TorchAsyncStore(server), TorchAsyncStore(server)
    try:
        took_s = []
        for n in range(30):
            a.watch(f"k{n}")
            a.set(f"ready{n}", b"1")
            b.watch(f"ready{n}")  # then a has taken the watch out of its queue
            events(b, 1)
            begun_s = time.monotonic()
            b.set(f"k{n}", b"v")
            events(a, 1)
            took_s.append(time.monotonic() - begun_s)
        assert sorted(took_s)[len(took_s) // 2] < 0.005, took_s
    finally:
        a.close()
        b.close()


def test_lost_server_gives_one_error_and_then_silence() -> None:
    dist = pytest.importorskip("torch.distributed")
    from steadyrun.node.store import TorchAsyncStore

    # the server in a process of its own, so that it can die as a node does
    ready_read, ready_write = os.pipe()
    code = (
        "import os, sys, torch.distributed as d\n"
        "s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "os.write(int(sys.argv[1]), b'%d\\n' % s.port); sys.stdin.read()"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code, str(ready_write)], pass_fds=[ready_write], stdin=subprocess.PIPE
    )
    os.close(ready_write)
    try:
        with os.fdopen(ready_read) as told:
            port = int(told.readline())
        client = dist.TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        a = TorchAsyncStore(client)
        a.set("k", b"1")
        a.watch("k")
        events(a, 1)
        for n in range(3):
            a.watch(f"never/{n}")
        a.set("k2", b"1")
        a.watch("k2")
        events(a, 1)
    finally:
        server.kill()
        server.communicate()
    (event,) = events(a, 1)
    assert event.error
    a.set("k", b"2")
    a.watch("k")
    begun_s = time.monotonic()
    a.close()
    assert time.monotonic() - begun_s < 2.0
    assert a.drain() == ()


def test_value_above_a_mebibyte_is_refused() -> None:
    pytest.importorskip("torch.distributed")
    from steadyrun.node.store import MAX_VALUE_BYTES, TorchAsyncStore

    store = TorchAsyncStore(_NoStore())
    try:
        with pytest.raises(ValueError, match="1048577 bytes; at most 1048576"):
            store.set("k", b"x" * (MAX_VALUE_BYTES + 1))
    finally:
        store.close()


class _NoStore:
    """Has no server; nothing is asked of it."""

    def check(self, keys: list[str]) -> bool:
        return False


class _Silent(_NoStore):
    """A server that accepts and never answers, until the test is over."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()

    def set(self, key: str, value: bytes) -> None:
        select.select([self.read_fd], [], [], DEADLINE_S)


def test_silent_server_counts_as_lost(wait_until: Callable[..., object]) -> None:
    from steadyrun.node.store import TorchAsyncStore

    silent = _Silent()
    store = TorchAsyncStore(silent, stall_limit_s=0.05)
    try:
        store.set("k", b"v")
        (event,) = wait_until(store.drain, 5.0, "the stalled store was not noticed")  # type: ignore[misc]
        assert "has not answered" in event.error
    finally:
        os.write(silent.write_fd, b"x")
        store.close()
        os.close(silent.read_fd)
        os.close(silent.write_fd)


def test_worker_store_is_empty_and_its_port_is_free_after_close() -> None:
    dist = pytest.importorskip("torch.distributed")
    from steadyrun.node.store import open_worker_store

    first = open_worker_store("127.0.0.1")
    client = dist.TCPStore("127.0.0.1", first.port, is_master=False, wait_for_workers=False)
    client.set("stale", b"1")
    with pytest.raises(OSError, match=f"127.0.0.1:{first.port}"):
        open_worker_store("127.0.0.1", first.port)
    first.close()
    second = open_worker_store("127.0.0.1", first.port)
    try:
        fresh = dist.TCPStore("127.0.0.1", second.port, is_master=False, wait_for_workers=False)
        assert second.port == first.port
        assert not fresh.check(["stale"])
    finally:
        del client
        second.close()
