"""A control store in memory that several simulated nodes share, with slow and cut links, on a clock the test moves."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
from collections.abc import Callable, Sequence

from steadyrun.core.clock import Clock
from steadyrun.node.ports import StoreEvent

__all__ = ["FakeAsyncStore", "ManualClock", "StoreNetwork"]


class ManualClock:
    """A clock that stands still until the test moves it."""

    def __init__(self, now_s: float = 1000.0, unix_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._unix_offset_s = unix_s - now_s

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s + self._unix_offset_s

    def advance(self, by_s: float) -> None:
        """Let time pass; never backwards."""
        if by_s < 0:
            raise ValueError(f"time cannot go back by {-by_s} s")
        self._now_s += by_s


class StoreNetwork:
    """The server and the links of all nodes. With no latency an operation has its effect before the call returns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._watches: dict[str, list[FakeAsyncStore]] = {}
        self._followers: list[FakeAsyncStore] = []
        self._latency_s: dict[str, float] = {}
        self._stores: dict[str, list[FakeAsyncStore]] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def connect(self, node: str) -> FakeAsyncStore:
        """A store as *node* sees it; a node may have several."""
        store = FakeAsyncStore(self, node)
        self._stores.setdefault(node, []).append(store)
        return store

    def slow(self, node: str, latency_s: float) -> None:
        """From now on everything from and to *node* takes this long, each way."""
        self._latency_s[node] = latency_s

    def cut(self, node: str, noticed_after_s: float = 0.0) -> None:
        """The node's connection is gone for good: nothing passes any more, and it hears so after *noticed_after_s*."""
        for store in self._stores.get(node, ()):
            store.is_cut = True
            self._later(noticed_after_s, store.lose)

    def deliver(self) -> None:
        """Let everything happen that is due at the clock's time."""
        while self._due and self._due[0][0] <= self._clock.now_s():
            heapq.heappop(self._due)[2]()

    # -- for FakeAsyncStore --------------------------------------------------------------------------------------------
    def send(self, store: FakeAsyncStore, effect: Callable[[], None]) -> None:
        """Carry an operation to the server."""
        if not store.is_cut:
            self._later(self._latency_s.get(store.node, 0.0), lambda: None if store.is_cut else effect())

    def put(self, key: str, value: bytes) -> None:
        has_changed = self.values.get(key) != value
        self.values[key] = value
        for store in self._watches.pop(key, ()):
            self._tell(store, key)
        for store in self._followers if has_changed else ():
            if key in store.followed:
                self._tell(store, key)

    def add(self, key: str, amount: int, notify_at: int, notify_key: str) -> None:
        before = self._counters.get(key, 0)
        self._counters[key] = before + amount
        if before < notify_at <= before + amount:
            self.put(notify_key, b"1")

    def watch(self, store: FakeAsyncStore, key: str) -> None:
        if key in self.values:
            self._tell(store, key)
        else:
            self._watches.setdefault(key, []).append(store)

    def follow(self, store: FakeAsyncStore) -> None:
        if store not in self._followers:
            self._followers.append(store)
        for key in store.followed:
            if key in self.values:
                self._tell(store, key)

    def _tell(self, store: FakeAsyncStore, key: str) -> None:
        value = self.values[key]
        latency_s = self._latency_s.get(store.node, 0.0)
        self._later(latency_s, lambda: None if store.is_cut else store.hear(StoreEvent(key, value)))

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self._clock.now_s() + delay_s, next(self._order), action))
        self.deliver()


class FakeAsyncStore:
    """``AsyncStore`` of one node in a StoreNetwork. Used from one thread."""

    def __init__(self, network: StoreNetwork, node: str) -> None:
        self.node = node
        self.is_cut = False
        self.followed: frozenset[str] = frozenset()
        self._network = network
        self._is_lost = False
        self._is_closed = False
        self._events: list[StoreEvent] = []
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._wake_fd

    def set(self, key: str, value: bytes) -> None:
        self._send(lambda: self._network.put(key, value))

    def set_first(self, key: str, value: bytes) -> None:
        if not value:
            raise ValueError(f"set_first({key!r}) needs a value that is not empty")
        self._send(lambda: None if key in self._network.values else self._network.put(key, value))

    def add(self, key: str, amount: int, notify_at: int, notify_key: str) -> None:
        self._send(lambda: self._network.add(key, amount, notify_at, notify_key))

    def watch(self, key: str) -> None:
        self._send(lambda: self._network.watch(self, key))

    def follow(self, keys: Sequence[str], every_s: float) -> None:
        """As the real one, but at once: no look is waited for."""

        def begin() -> None:
            self.followed = frozenset(keys)
            self._network.follow(self)

        self._send(begin)

    def drain(self) -> Sequence[StoreEvent]:
        self._network.deliver()
        if not self._is_closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        events, self._events = tuple(self._events), []
        return events

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.is_cut = True
            os.close(self._wake_fd)

    # -- for the network -----------------------------------------------------------------------------------------------
    def hear(self, event: StoreEvent) -> None:
        if not self._is_closed:
            self._events.append(event)
            os.eventfd_write(self._wake_fd, 1)

    def lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.hear(StoreEvent("", b"", error="connection lost"))

    def _send(self, effect: Callable[[], None]) -> None:
        if not self._is_closed:
            self._network.send(self, effect)
