"""The control store without waiting, over any torch store, and the worker store of an attempt.

torch's store calls block, and a TCPStore client serves one call at a time. So there is one thread with a connection of
its own for everything short, and one thread and connection per key that is being watched: ``TCPStore.wait`` wakes its
caller 0.3 ms after the key was set (measured, torch 2.13), where polling at that rate would drown the server.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import stat
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Any, Final, Protocol

from steadyrun.node.ports import StoreEvent

__all__ = ["MAX_VALUE_BYTES", "StoreClient", "TorchAsyncStore", "WorkerStore", "open_worker_store"]

MAX_VALUE_BYTES: Final = 1 << 20
# A wait that runs into its limit makes torch print warnings, so there is none: a wait ends by its key, or because its
# socket was shut down.
_FOREVER: Final = timedelta(days=10)
_POLL_S: Final = 0.05
_ALIVE_CHECK_S: Final = 5.0
_STALL_LIMIT_S: Final = 30.0
_CLOSE_LIMIT_S: Final = 1.0
_MAX_WATCHERS: Final = 48
_NAMESPACE_KEY: Final = "steadyrun/namespace"
_NEW_KEYS_AT_ONCE: Final = 64  # of those followed that had no value yet, asked for one by one in each look


class StoreClient(Protocol):
    """What is used of ``torch.distributed.Store``; keys and values may be ``str`` or ``bytes``."""

    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: bytes, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


@dataclass(slots=True)
class _Connection:
    """A client and, if it is known, the socket below it, which is how a blocked call is ended."""

    client: StoreClient
    socket_fd: int | None

    def cut(self) -> None:
        """End the call that blocks in the client, if there is one; the client is of no use afterwards."""
        if self.socket_fd is None:
            return
        try:
            copy = os.dup(self.socket_fd)
        except OSError:
            return
        with socket.socket(fileno=copy) as connection, contextlib.suppress(OSError):  # the other side may be faster
            connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class _Set:
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class _SetFirst:
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class _Add:
    key: str
    amount: int
    notify_at: int
    notify_key: str


@dataclass(frozen=True, slots=True)
class _Watch:
    key: str


@dataclass(frozen=True, slots=True)
class _Follow:
    keys: tuple[str, ...]
    every_s: float


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Order = _Set | _SetFirst | _Add | _Watch | _Follow | _Close


class _Watcher:
    """A thread that blocks in ``wait`` for one key after the other."""

    def __init__(self, connection: _Connection, deliver: Callable[[str, bytes], None], lost: Callable[[str], None]):
        self._connection = connection
        self._deliver = deliver
        self._lost = lost
        self._keys: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.is_idle = True
        self._thread = threading.Thread(target=self._run, name="steadyrun-store-watch", daemon=True)
        self._thread.start()

    def take(self, key: str) -> None:
        self.is_idle = False
        self._keys.put(key)

    def stop(self) -> None:
        self._keys.put(None)
        self._connection.cut()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    def _run(self) -> None:
        client = self._connection.client
        while (key := self._keys.get()) is not None:
            try:
                client.wait([key], _FOREVER)
                value = client.get(key)
            except Exception as e:  # torch has its own hierarchy, and RuntimeError before 2.6
                self._lost(_first_line(e))
                return
            self.is_idle = True
            self._deliver(key, value)


class _Followed:
    """Keys that are looked at again and again, and the values that were seen last."""

    def __init__(self) -> None:
        self._absent: deque[str] = deque()
        self._values: dict[str, bytes] = {}
        self._every_s = 1.0
        self.due_s = inf

    def begin(self, keys: Sequence[str], every_s: float) -> None:
        self._values = {key: value for key, value in self._values.items() if key in keys}
        self._absent = deque(key for key in keys if key not in self._values)
        self._every_s = every_s
        self.due_s = time.monotonic() if keys else inf

    def look(self, client: StoreClient) -> list[tuple[str, bytes]]:
        """Values that have changed. One question for all keys that have been set before."""
        self.due_s = time.monotonic() + self._every_s
        present = list(self._values)
        for _ in range(min(len(self._absent), _NEW_KEYS_AT_ONCE)):
            key = self._absent.popleft()
            (present if client.check([key]) else self._absent).append(key)
        if not present:
            return []
        multi_get = getattr(client, "multi_get", None)
        values = multi_get(present) if multi_get is not None else [client.get(key) for key in present]
        out = []
        for key, value in zip(present, map(bytes, values), strict=True):
            if self._values.get(key) != value:
                self._values[key] = value
                out.append((key, value))
        return out


class TorchAsyncStore:
    """``AsyncStore`` over a torch store that all nodes of the job share.

    A TCPStore (also below PrefixStores) gets connections of its own: *store* itself is used before the first call
    returns only where torch has no ``Store.clone`` (before 2.8), to agree on a key prefix. Any other kind of store is
    used directly, from one thread, and watched by polling (50 ms).

    After the connection was lost one event with ``error`` is delivered and every later call does nothing.
    Calls may come from any thread; ``drain`` from one.

    The launcher should run with ``TORCH_CPP_LOG_LEVEL=ERROR`` (set before torch is imported): torch prints a C++ trace
    for each connection that ends while somebody waits on it, which here is the normal end.
    """

    def __init__(self, store: Any, stall_limit_s: float = _STALL_LIMIT_S) -> None:
        self._store = store
        self._stall_limit_s = stall_limit_s
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._events: deque[StoreEvent] = deque()
        self._is_lost = False
        self._is_closing = False
        self._busy_since_s: float | None = None
        self._watchers: list[_Watcher] = []
        self._polled: list[str] = []
        self._followed = _Followed()
        self._worker_connection: _Connection | None = None
        self._worker = threading.Thread(target=self._work, name="steadyrun-store", daemon=True)
        self._worker.start()

    # -- AsyncStore ----------------------------------------------------------------------------------------------------
    def fileno(self) -> int:
        return self._wake_fd

    def set(self, key: str, value: bytes) -> None:
        _check_size(key, value)
        self._orders.put(_Set(key, value))

    def set_first(self, key: str, value: bytes) -> None:
        _check_size(key, value)
        if not value:
            # compare_set takes an empty value for "not set"
            raise ValueError(f"set_first({key!r}) needs a value that is not empty")
        self._orders.put(_SetFirst(key, value))

    def add(self, key: str, amount: int, notify_at: int, notify_key: str) -> None:
        self._orders.put(_Add(key, amount, notify_at, notify_key))

    def watch(self, key: str) -> None:
        self._orders.put(_Watch(key))

    def follow(self, keys: Sequence[str], every_s: float) -> None:
        self._orders.put(_Follow(tuple(keys), every_s))

    def drain(self) -> Sequence[StoreEvent]:
        """Events since the last call; never blocks. Call it at least every few seconds: it also notices a server that
        accepts and never answers (after *stall_limit_s*)."""
        since_s = self._busy_since_s
        if since_s is not None and time.monotonic() - since_s > self._stall_limit_s:
            self._lose(f"the store has not answered for {self._stall_limit_s:.0f} s")
        with self._lock:
            if not self._is_closing:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            events = tuple(self._events)
            self._events.clear()
        return events

    def close(self) -> None:
        """Write what is queued, end all threads and connections; takes at most about a second."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        deadline_s = time.monotonic() + _CLOSE_LIMIT_S
        self._orders.put(_Close())
        self._worker.join(_CLOSE_LIMIT_S / 2)
        if self._worker.is_alive() and self._worker_connection is not None:
            self._worker_connection.cut()
        for watcher in self._watchers:
            watcher.stop()
        for watcher in self._watchers:
            watcher.join(deadline_s - time.monotonic())
        self._worker.join(max(deadline_s - time.monotonic(), 0.0))
        self._watchers.clear()
        self._worker_connection = None
        self._store = None
        os.close(self._wake_fd)

    # -- worker thread -------------------------------------------------------------------------------------------------
    def _work(self) -> None:
        try:
            self._busy_since_s = time.monotonic()
            connect = _connector(self._store)
            self._worker_connection = connect() if connect else _Connection(self._store, None)
            while self._work_once(connect, self._worker_connection.client):
                pass
        except Exception as e:
            self._lose(_first_line(e))
        finally:
            self._busy_since_s = None

    def _work_once(self, connect: Callable[[], _Connection] | None, client: StoreClient) -> bool:
        self._busy_since_s = None
        until_look_s = max(self._followed.due_s - time.monotonic(), 0.0)
        try:
            order = self._orders.get(timeout=min(_POLL_S if self._polled else _ALIVE_CHECK_S, until_look_s))
        except queue.Empty:
            self._busy_since_s = time.monotonic()
            if self._polled:
                self._poll(client)
            elif until_look_s > _ALIVE_CHECK_S:
                client.check([_NAMESPACE_KEY])  # is the server still there?
            self._look(client)
            return True
        self._busy_since_s = time.monotonic()
        self._look(client)
        match order:
            case _Set(key, value):
                client.set(key, value)
                # set is not answered: without a question after it, a write into a dead connection would go unnoticed
                client.check([key])
            case _SetFirst(key, value):
                client.compare_set(key, "", value)
            case _Add(key, amount, notify_at, notify_key):
                reached = client.add(key, amount)
                if reached - amount < notify_at <= reached:
                    client.set(notify_key, b"1")
                    client.check([notify_key])
            case _Watch(key):
                self._start_watch(key, connect, client)
            case _Follow(keys, every_s):
                self._followed.begin(keys, every_s)
            case _Close():
                return False
        return True

    def _start_watch(self, key: str, connect: Callable[[], _Connection] | None, client: StoreClient) -> None:
        idle = next((w for w in self._watchers if w.is_idle), None)
        if idle is not None:
            idle.take(key)
        elif connect is not None and len(self._watchers) < _MAX_WATCHERS:
            watcher = _Watcher(connect(), self._deliver, self._lose)
            self._watchers.append(watcher)
            watcher.take(key)
        else:
            self._polled.append(key)
            self._poll(client)

    def _poll(self, client: StoreClient) -> None:
        for key in list(self._polled):
            if client.check([key]):
                self._polled.remove(key)
                self._deliver(key, client.get(key))

    def _look(self, client: StoreClient) -> None:
        if time.monotonic() >= self._followed.due_s:
            for key, value in self._followed.look(client):
                self._deliver(key, value)

    # -- any thread ----------------------------------------------------------------------------------------------------
    def _deliver(self, key: str, value: bytes) -> None:
        self._push(StoreEvent(key, bytes(value)))

    def _lose(self, error: str) -> None:
        with self._lock:
            if self._is_lost:
                return
            self._is_lost = True
        self._push(StoreEvent("", b"", error=error or "connection lost"))

    def _push(self, event: StoreEvent) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._events.append(event)
            os.eventfd_write(self._wake_fd, 1)


class WorkerStore:
    """The store through which the ranks of one attempt find each other; it lives in the agent, so it outlives them."""

    def __init__(self, server: Any, host: str) -> None:
        self._server = server
        self.host = host
        self.port = int(server.port)

    def close(self) -> None:
        """Stop the server and free its port; ranks still connected see their connection end."""
        self._server = None  # the server thread is joined in the destructor: 1 to 8 ms (measured, torch 2.13)


def open_worker_store(host: str, port: int = 0, timeout_s: float = 300.0) -> WorkerStore:
    """A fresh, empty store that listens on *port* (0: any free one) of all interfaces.

    Not ``multi_tenant``: with it torch would hand out the server of an earlier attempt that still has the port, with
    that attempt's keys, which is the defect that makes torchrun's restarts fail.

    Args:
        host: the name under which ranks reach this node.

    Raises:
        OSError: the port is taken or *host* cannot be reached from here; the text names both.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it without saying so

    try:
        server = TCPStore(
            host, port, is_master=True, wait_for_workers=False, multi_tenant=False, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as e:
        raise OSError(f"cannot open the worker store on {host}:{port}: {_first_line(e)}") from e
    return WorkerStore(server, host)


def _connector(store: Any) -> Callable[[], _Connection] | None:
    """How to make further connections to *store*'s server; None when it has none (FileStore, HashStore)."""
    bottom = store
    while hasattr(bottom, "underlying_store"):
        bottom = bottom.underlying_store
    if not (hasattr(bottom, "port") and hasattr(bottom, "host")):
        return None
    port = int(bottom.port)
    if hasattr(store, "clone"):
        return lambda: _connect(store.clone, port)

    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # as above

    # Without clone the prefix of a PrefixStore cannot be read, so that all nodes agree on one of ours through it.
    namespace = store.compare_set(_NAMESPACE_KEY, "", uuid.uuid4().hex).decode()
    host, timeout = str(bottom.host), bottom.timeout

    def dial() -> Any:
        client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        return PrefixStore(f"steadyrun-{namespace}", client)

    return lambda: _connect(dial, port)


def _connect(dial: Callable[[], StoreClient], port: int) -> _Connection:
    """Dial, and find the socket that came with it: the new one whose other end is *port*.

    Two connections to one server made at the same time by two threads cannot be told apart; then the client is used
    without knowing its socket, and a thread that waits on it ends with its key or with the process.
    """
    before = _sockets_to(port)
    client = dial()
    new = _sockets_to(port) - before
    return _Connection(client, new.pop() if len(new) == 1 else None)


def _sockets_to(port: int) -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            copy = os.dup(fd)
        except OSError:
            continue  # closed meanwhile, as listdir's own is
        with socket.socket(fileno=copy) as connection:
            try:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                    found.add(fd)
            except OSError:
                pass  # listening, or not connected
    return found


def _check_size(key: str, value: bytes) -> None:
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"the value of {key!r} has {len(value)} bytes; at most {MAX_VALUE_BYTES} are allowed")


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
