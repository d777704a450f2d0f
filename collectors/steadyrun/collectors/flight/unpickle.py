"""Loading a flight-recorder dump as untrusted data: a pickle or JSON, told apart by content.

Pickles run code when loaded carelessly, and can hang or fill a machine even where no global is resolved: a memo index
of two thousand million, tuples nested in tuples whose hash doubles with each level, numbers chosen to collide. So the
bytes are looked through first. What looks exactly as torch writes goes through the C unpickler, with no global allowed;
whatever else does not is replayed by ``salvage``, which is slower and bounded.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any, Final, NoReturn

from steadyrun.collectors.flight.salvage import (
    MAX_CONTAINERS,
    MAX_ENTRIES,
    ForbiddenPickleError,
    Replay,
    TooMuchError,
    replay_json,
    replay_pickle,
)
from steadyrun.collectors.flight.shape import is_plain_dump
from steadyrun.core.errors import SteadyrunError

__all__ = ["MAX_DUMP_BYTES", "Dump", "DumpError", "load_dump"]

MAX_DUMP_BYTES: Final = 64 * 1024 * 1024
_KNOWN_KEYS: Final = frozenset({"entries", "pg_config", "pg_status", "comm_lib_version", "nccl_version"})


class DumpError(SteadyrunError):
    """A file that gives nothing.

    Attributes:
        status: ``empty``, ``refused`` (it would run code, or is too large), ``unreadable``, or ``ignored`` (something
            else than a dump).
    """

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


class Dump(dict[str, Any]):
    """A dump as torch wrote it; nothing in it has been checked but its outermost type.

    Attributes:
        is_cut: it ends early: what came last is missing.
        stop: where and why; empty when whole.
        is_json: in JSON, a list of entries that is empty is left out.
    """

    __slots__ = ("is_cut", "is_json", "stop")

    def __init__(self, value: dict[str, Any], *, stop: str = "", is_json: bool = False) -> None:
        super().__init__(value)
        self.is_cut = bool(stop)
        self.stop = stop
        self.is_json = is_json


def load_dump(source: Path | bytes, max_bytes: int = MAX_DUMP_BYTES) -> Dump:
    """The dump in a file, or in memory, from any source: nothing in it is run, imported or opened.

    Raises:
        DumpError: it holds nothing that can be used; ``status`` and the text say why.
    """
    data = source if isinstance(source, bytes) else _read(source, max_bytes)
    name = "these bytes" if isinstance(source, bytes) else str(source)
    if len(data) > max_bytes:
        raise DumpError("refused", f"{name}: more than {max_bytes} bytes; raise the limit if it is a real dump")
    if not data:
        raise DumpError("empty", f"{name}: empty; the rank was stopped before it wrote, or the disk was full")
    try:
        if data[0] == 0x80:
            return _checked(_load_pickle(data), name, is_json=False)
        if data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
            return _checked(_load_json(data), name, is_json=True)
    except ForbiddenPickleError as e:
        raise DumpError("refused", f"{name}: not a dump: its pickle would run code ({e}); do not load it") from e
    except TooMuchError as e:
        raise DumpError("refused", f"{name}: unfolds into {e}, which no dump holds") from e
    raise DumpError("ignored", f"{name}: neither a pickle nor JSON (begins with {data[:8]!r})")


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        # O_NONBLOCK: a FIFO under a dump's name must not hold us
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        raise DumpError("unreadable", f"cannot read {path}: {e.strerror or e}") from e
    with open(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise DumpError("ignored", f"{path}: not a regular file")
        if status.st_size > max_bytes:
            raise DumpError("refused", f"{path}: {status.st_size} bytes, more than the {max_bytes} allowed")
        try:
            return file.read(max_bytes + 1) or b""
        except OSError as e:
            raise DumpError("unreadable", f"cannot read {path}: {e.strerror or e}") from e


def _checked(replay: Replay, name: str, *, is_json: bool) -> Dump:
    value = replay.value
    if isinstance(value, list) and value and isinstance(value[0], dict):  # before 2.0: the entries alone
        value = {"entries": value}
    if not isinstance(value, dict) or _KNOWN_KEYS.isdisjoint(value):
        if replay.stop:
            raise DumpError("unreadable", f"{name}: {replay.stop}, before anything of use")
        raise DumpError("ignored", f"{name}: not a flight recorder's dump (no entries, no groups)")
    entries = value.get("entries")
    if isinstance(entries, list) and len(entries) > MAX_ENTRIES:
        del entries[:-MAX_ENTRIES]  # as a smaller ring would have dropped them
    return Dump(value, stop=replay.stop, is_json=is_json)


# -- pickles -----------------------------------------------------------------------------------------------------------
class _PlainUnpickler(pickle.Unpickler):
    """No global, no persistent object; the opcodes for both have been looked for already."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise ForbiddenPickleError(f"{module}.{name}")

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise ForbiddenPickleError("a persistent object")


def _load_pickle(data: bytes) -> Replay:
    if not is_plain_dump(data):
        return replay_pickle(data)
    try:
        # BufferedReader over the bytes: without peek() the C unpickler reads a few bytes at a time, three times slower.
        file = io.BufferedReader(io.BytesIO(data), 1 << 17)
        return Replay(_PlainUnpickler(file).load())
    except (ForbiddenPickleError, TooMuchError):
        raise
    except Exception:  # whatever it is: the other reader says what can be had
        return replay_pickle(data)


# -- JSON --------------------------------------------------------------------------------------------------------------
def _load_json(data: bytes) -> Replay:
    if data.count(b"{") + data.count(b"[") > MAX_CONTAINERS:
        raise TooMuchError(f"more than {MAX_CONTAINERS} lists and mappings")
    text = data.decode("utf-8-sig", "replace")
    try:
        return Replay(json.loads(text))
    except (ValueError, RecursionError):
        return replay_json(text)
