"""Carries the savers' messages between nodes, through the store of the attempt. One node needs none of this.

Two boxes: all nodes put into ``one``, which the coordinator reads, and the coordinator puts into ``all``, which the
others read. A message has a number, taken by ADD, and is a key of its own; the reader blocks in WAIT for the next
number and is woken within a millisecond. Who dies between ADD and SET leaves a hole, which is stepped over.

Threads of its own do all of it: the store may be slow, or gone with its agent. After every connection, the first one
and each one after a loss, both sides say again what is not resolved, so that nothing here has to be reliable.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from steadyrun.checkpoint.saver import messages as m
from steadyrun.checkpoint.saver.messages import MessageError, decode, encode
from steadyrun.checkpoint.saver.storeclient import MOST_VALUE_BYTES, Store, StoreError, open_store

__all__ = ["PREFIX", "Connected", "Exchange", "Heard", "Lost", "Place"]

PREFIX: Final = "steadyrun/saver/"
_TO_ONE: Final = PREFIX + "one/"
_TO_ALL: Final = PREFIX + "all/"
_LAST: Final = "last"  # in each box: the newest number
_KEPT: Final = 256  # messages that stay in ``all`` for readers that are behind
_WAIT_S: Final = 5.0
_AGAIN_S: Final = 0.5
_WHOLE, _PARTS = b"W", b"P"
_PART_BYTES: Final = MOST_VALUE_BYTES - 64


class Place(NamedTuple):
    """Where an attempt's savers meet, and what this one is there."""

    attempt: int
    host: str
    port: int
    is_coordinator: bool


class Connected(NamedTuple):
    """Messages come and go from now on; what was said before may be lost."""

    attempt: int


class Lost(NamedTuple):
    attempt: int
    why: str


class Heard(NamedTuple):
    message: m.FromNode | m.ToAll


class Opener(Protocol):
    def __call__(self, host: str, port: int) -> Store: ...


class Exchange:
    """Sends and receives for one saver. Calls may come from any thread; *deliver* is called from ours.

    Args:
        deliver: gets Connected, Lost and Heard; must not block.
    """

    def __init__(self, deliver: Callable[[Connected | Lost | Heard], None], opener: Opener = open_store) -> None:
        self._deliver = deliver
        self._opener = opener
        self._link: _Link | None = None

    def bind(self, place: Place | None) -> None:
        """Leave the store of before, and meet at *place* (None: nowhere)."""
        if self._link is not None:
            self._link.stop()
        self._link = _Link(place, self._deliver, self._opener) if place is not None else None

    def post(self, message: m.FromNode | m.ToAll) -> None:
        """Dropped while there is no connection."""
        if self._link is not None:
            self._link.post(message)

    def finish(self, limit_s: float) -> None:
        """Wait until what was posted is with the store, at most so long; then end."""
        if self._link is not None:
            self._link.finish(limit_s)
            self._link.stop()
            self._link = None


class _Link:
    """One attempt's connection: a thread that writes, and one that reads."""

    def __init__(self, place: Place, deliver: Callable[[Connected | Lost | Heard], None], opener: Opener) -> None:
        self._place = place
        self._deliver = deliver
        self._opener = opener
        self._out_box, self._in_box = (_TO_ALL, _TO_ONE) if place.is_coordinator else (_TO_ONE, _TO_ALL)
        self._posts: queue.SimpleQueue[m.FromNode | m.ToAll | threading.Event | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._is_connected = False
        self._stores: list[Store] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="steadyrun-exchange-read", daemon=True).start()
        threading.Thread(target=self._write, name="steadyrun-exchange-write", daemon=True).start()

    def post(self, message: m.FromNode | m.ToAll) -> None:
        if self._is_connected:
            self._posts.put(message)

    def finish(self, limit_s: float) -> None:
        if self._is_connected:
            done = threading.Event()
            self._posts.put(done)
            done.wait(limit_s)

    def stop(self) -> None:
        """Threads end soon; nothing is delivered any more."""
        self._stopped.set()
        self._posts.put(None)
        with self._lock:
            for store in self._stores:
                store.cut()

    # -- connecting ----------------------------------------------------------------------------------------------------
    def _open(self) -> Store | None:
        """A connection, as soon as there is one; None once stopped."""
        while not self._stopped.is_set():
            try:
                store = self._opener(self._place.host, self._place.port)
            except StoreError:
                self._stopped.wait(_AGAIN_S)
                continue
            with self._lock:
                self._stores.append(store)
            return store
        return None

    def _drop(self, store: Store) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._stores.remove(store)
        store.close()

    def _tell(self, event: Connected | Lost | Heard) -> None:
        if not self._stopped.is_set():
            self._deliver(event)

    # -- reading -------------------------------------------------------------------------------------------------------
    def _read(self) -> None:
        while (store := self._open()) is not None:
            self._read_from(store)

    def _read_from(self, store: Store) -> None:
        """Until the connection ends."""
        try:
            number = store.add(self._in_box + _LAST, 0)  # what is older was said before we listened
            self._is_connected = True
            self._tell(Connected(self._place.attempt))
            while not self._stopped.is_set():
                number = self._read_next(store, number + 1)
        except StoreError as e:
            if self._is_connected:
                self._is_connected = False
                self._tell(Lost(self._place.attempt, str(e)))
            self._stopped.wait(_AGAIN_S)
        finally:
            self._drop(store)

    def _read_next(self, store: Store, number: int) -> int:
        """Wait for message *number* for a while; gives the number of the last one that is done with."""
        key = f"{self._in_box}{number}"
        if not store.wait(key, _WAIT_S):
            newest = store.add(self._in_box + _LAST, 0)
            if newest < number:
                return number - 1
            if store.check(key):
                return number - 1
            # A writer died between taking the number and writing, or we are so far behind that it is gone.
            self._tell(Connected(self._place.attempt))
            return newest if newest - number > _KEPT // 2 else number
        with contextlib.suppress(MessageError):  # of another version
            self._tell(Heard(_get(store, key, delete=self._place.is_coordinator)))
        return number

    # -- writing -------------------------------------------------------------------------------------------------------
    def _write(self) -> None:
        store: Store | None = None
        while not self._stopped.is_set():
            item = self._posts.get()
            if item is None:
                break
            if isinstance(item, threading.Event):
                item.set()
                continue
            if store is None:
                store = self._open()
                if store is None:
                    break
            try:
                number = store.add(self._out_box + _LAST, 1)
                _put(store, f"{self._out_box}{number}", encode(item))
                if self._place.is_coordinator and number > _KEPT:
                    store.delete(f"{self._out_box}{number - _KEPT}")
            except StoreError:
                # The reader notices as well, and everything is said again on the next connection.
                self._drop(store)
                store = None
        if store is not None:
            self._drop(store)


def _put(store: Store, key: str, data: bytes) -> None:
    """In pieces where the server would not take it whole; the key itself comes last."""
    if len(data) < MOST_VALUE_BYTES:
        store.set(key, _WHOLE + data)
    else:
        parts = [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]
        for i, part in enumerate(parts):
            store.set(f"{key}/{i}", part)
        store.set(key, _PARTS + str(len(parts)).encode())
    store.check(key)  # SET is not answered: without a question, a dead connection would go unnoticed


def _get(store: Store, key: str, delete: bool) -> m.FromNode | m.ToAll:
    """Raises MessageError."""
    value = store.get(key)
    keys = [key]
    if value[:1] == _PARTS and value[1:].isdigit():
        keys += [f"{key}/{i}" for i in range(int(value[1:]))]
        data = b"".join(store.get(k) if store.check(k) else b"" for k in keys[1:])
    else:
        data = value[1:]
    if delete:
        for k in keys:
            store.delete(k)
    message = decode(data)
    if isinstance(message, m.Remembered):
        raise MessageError("what a saver remembers is no message")
    return message
