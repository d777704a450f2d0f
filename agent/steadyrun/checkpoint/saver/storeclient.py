"""A client of torch's TCPStore without torch, so that the saver starts in a tenth of a second and stays small.

Only what the savers' exchange needs. Integers are in the machine's own byte order, strings and values begin with their
length in 8 bytes; a connection begins with a magic number and a ping. The numbers of the queries are those of torch 2.6
to 2.14 and are compared with a real TCPStore in the tests.
"""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import struct
import time
from datetime import timedelta
from typing import Any, Final, Protocol

from steadyrun.core.errors import SteadyrunError

__all__ = ["MOST_VALUE_BYTES", "PlainStore", "Store", "StoreError", "TorchStore", "open_store"]

MOST_VALUE_BYTES: Final = 4 << 20  # the server of torch refuses above 8 MiB
_MAGIC: Final = 0x3C85F7CE
_KEY_PREFIX: Final = "/"  # what torch's own client puts before a user's keys
_CALL_LIMIT_S: Final = 30.0
_POLL_S: Final = 0.05


class StoreError(SteadyrunError):
    """The store cannot be reached, has gone, or speaks otherwise; this client is of no further use."""


class Store(Protocol):
    """What the exchange needs. For one thread, apart from ``cut``."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, key: str) -> bool: ...
    def wait(self, key: str, timeout_s: float) -> bool: ...
    def delete(self, key: str) -> None: ...
    def cut(self) -> None: ...
    def close(self) -> None: ...


class _Query(enum.IntEnum):
    VALIDATE = 0
    SET = 1
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    DELETE_KEY = 8
    CANCEL_WAIT = 12
    PING = 13


class PlainStore:
    """A connection of its own to a TCPStore. Every call raises StoreError when the server does not answer in time."""

    def __init__(self, host: str, port: int, timeout_s: float = _CALL_LIMIT_S) -> None:
        """Raises StoreError."""
        self._where = f"{host}:{port}"
        self._timeout_s = timeout_s
        try:
            self._sock = socket.create_connection((host, port), timeout_s)
        except OSError as e:
            raise StoreError(f"cannot reach the store at {self._where}: {e.strerror or e}") from e
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = os.getpid() & 0xFFFFFFFF
            self._send(struct.pack("=BIBI", _Query.VALIDATE, _MAGIC, _Query.PING, nonce))
            (answer,) = struct.unpack("=I", self._receive(4))
            if answer != nonce:
                raise StoreError(f"what listens at {self._where} is no TCPStore that this version knows")
        except BaseException:
            self._sock.close()
            raise

    def set(self, key: str, value: bytes) -> None:
        if len(value) > MOST_VALUE_BYTES:
            raise ValueError(f"the value of {key!r} has {len(value):,} bytes; at most {MOST_VALUE_BYTES:,} are allowed")
        self._send(struct.pack("=B", _Query.SET) + _text(key) + struct.pack("=Q", len(value)) + value)

    def get(self, key: str) -> bytes:
        """The value of a key that exists; the server gives an empty one or ends the connection for another."""
        self._send(struct.pack("=B", _Query.GET) + _text(key))
        (length,) = struct.unpack("=Q", self._receive(8))
        if length > 2 * MOST_VALUE_BYTES:
            raise StoreError(f"the store at {self._where} answers with a value of {length:,} bytes")
        return self._receive(length)

    def add(self, key: str, amount: int) -> int:
        """The sum after the addition."""
        self._send(struct.pack("=B", _Query.ADD) + _text(key) + struct.pack("=q", amount))
        (total,) = struct.unpack("=q", self._receive(8))
        return int(total)

    def check(self, key: str) -> bool:
        self._send(struct.pack("=BQ", _Query.CHECK, 1) + _text(key))
        return self._receive(1) == b"\0"

    def wait(self, key: str, timeout_s: float) -> bool:
        """Whether *key* exists by then; woken by the server."""
        self._send(struct.pack("=BQ", _Query.WAIT, 1) + _text(key))
        self._sock.settimeout(max(timeout_s, 0.001))
        try:
            first = self._sock.recv(1)
        except TimeoutError:
            first = None
        except OSError as e:
            raise StoreError(f"lost the store at {self._where}: {e.strerror or e}") from e
        finally:
            with contextlib.suppress(OSError):  # it may have been cut meanwhile
                self._sock.settimeout(self._timeout_s)
        if first is None:
            # The key may be set at this very moment: then both answers come, in this order.
            self._send(struct.pack("=B", _Query.CANCEL_WAIT))
            is_there = False
            while self._receive(1) == b"\0":
                is_there = True
            return is_there
        if not first:
            raise StoreError(f"lost the store at {self._where}: it has closed the connection")
        return first == b"\0"

    def delete(self, key: str) -> None:
        self._send(struct.pack("=B", _Query.DELETE_KEY) + _text(key))
        self._receive(8)

    def cut(self) -> None:
        """End the call that another thread is in; the client is of no use afterwards."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _send(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError as e:
            raise StoreError(f"lost the store at {self._where}: {e.strerror or e}") from e

    def _receive(self, count: int) -> bytes:
        out = bytearray()
        while len(out) < count:
            try:
                data = self._sock.recv(min(count - len(out), 1 << 20))
            except TimeoutError as e:
                raise StoreError(f"the store at {self._where} has not answered for {self._timeout_s:g} s") from e
            except OSError as e:
                raise StoreError(f"lost the store at {self._where}: {e.strerror or e}") from e
            if not data:
                raise StoreError(f"lost the store at {self._where}: it has closed the connection")
            out += data
        return bytes(out)


def _text(key: str) -> bytes:
    data = (_KEY_PREFIX + key).encode()
    return struct.pack("=Q", len(data)) + data


class TorchStore:
    """The same through torch, for a TCPStore that speaks otherwise; costs the import of torch."""

    def __init__(self, host: str, port: int, timeout_s: float = _CALL_LIMIT_S) -> None:
        """Raises StoreError."""
        self._where = f"{host}:{port}"
        self._is_cut = False
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not say that it is there

            self._client: Any = TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        except (ImportError, RuntimeError) as e:
            raise StoreError(f"cannot reach the store at {self._where}: {_first_line(e)}") from e

    def set(self, key: str, value: bytes) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._call("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def check(self, key: str) -> bool:
        return bool(self._call("check", [key]))

    def wait(self, key: str, timeout_s: float) -> bool:
        """By asking again and again: torch prints a trace for every wait that runs into its limit."""
        deadline_s = time.monotonic() + timeout_s
        while not self.check(key):
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def delete(self, key: str) -> None:
        self._call("delete_key", key)

    def cut(self) -> None:
        self._is_cut = True

    def close(self) -> None:
        self._client = None

    def _call(self, name: str, *arguments: object) -> Any:
        if self._is_cut:
            raise StoreError(f"the connection to the store at {self._where} was given up")
        try:
            return getattr(self._client, name)(*arguments)
        except RuntimeError as e:  # torch's DistStoreError is one
            raise StoreError(f"lost the store at {self._where}: {_first_line(e)}") from e


def open_store(host: str, port: int, timeout_s: float = _CALL_LIMIT_S) -> Store:
    """A connection to the TCPStore there, without torch where that is possible. Raises StoreError."""
    try:
        return PlainStore(host, port, timeout_s)
    except StoreError as e:
        if isinstance(e.__cause__, OSError) and not isinstance(e.__cause__, TimeoutError):
            raise  # nobody there, which torch would not change
        return TorchStore(host, port, timeout_s)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
