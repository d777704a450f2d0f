"""The rank's side of torch's flight recorders: a way to them from outside, what is live, and dumps by the rank itself.

Three things, from the first process group on and never before:

- ``flight.sock``: torch's own ``_WorkerServer``. Its threads are C++ and need no interpreter lock, so it answers while
  the main thread waits in a collective or holds that lock.
- ``flight.json``: what a dump does not tell (which groups there are, of whom, and what torch was told by variables).
  Looked at by the evidence thread once a second; nothing of torch is patched for it.
- dumps of every recorder with call sites, by the evidence thread when asked, and at an uncaught exception.

To learn whether generated code has call sites of its own, torch's dump with call sites asks ``hasattr(torch,
"_inductor")``, which imports 822 modules (2.13: 4.5 s on a quiet machine, 13 s on a busy one, 90 MB). While
torch._inductor is not imported there is no generated code: a stand-in says so for the length of the dump, and nothing
has to be imported beforehand (2,000 entries: 0.04 to 0.2 s). Of this only torch's own watchdog does not profit.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock, get_ident
from time import monotonic, time

from steadyrun.core.boot import boot_id
from steadyrun.core.sockets import reachable
from steadyrun.watch.files import write_whole
from steadyrun.watch.jsontext import render

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from steadyrun.watch.setup import RankSetup

__all__ = ["GROUPS_MODULE", "FlightWatch"]

SCHEMA = "steadyrun.flight-live/1"
GROUPS_MODULE = "torch.distributed.distributed_c10d"
_BINDINGS = "torch._C._distributed_c10d"
_FILE_TYPE, _IS_SOCKET = 0o170000, 0o140000  # stat's S_IFMT and S_IFSOCK
_ENTRIES_AT_DEATH = 10_000  # 0.05 ms each with call sites: from here on a dying rank would be held up for 0.5 s

# The names from 2.8 on, and what each was called before. Torch takes the first that is set.
_BUFFER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMP_PREFIX = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DUMP_ON_TIMEOUT = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_PIPE_PREFIX = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_PAIRS = (_BUFFER_SIZE, _DUMP_PREFIX, _DUMP_ON_TIMEOUT)
_OF_INTEREST = ("TORCH_FR_", "TORCH_NCCL_", "TORCH_INCLUDE_", "TORCH_DIST_USE_NCCL2")


class FlightWatch:
    """The flight recorders of this rank. Nothing here raises into the script.

    Args:
        setup: ``setup.flight`` None: the rank is left as it is, and only what is asked for is answered.
    """

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._has_groups = False
        self._beginning = allocate_lock()  # taken once, never given back: two threads may see the first group
        self._server = "no process group yet"  # the socket's name, or why there is none
        self._listener = (-1, -1)  # descriptor and inode of the server's socket
        self._buffer_size: int | None = None  # as it was when the first group was made: torch reads it once
        self._written: object = None

    @property
    def is_on(self) -> bool:
        """Whether there is anything to look at once a second."""
        return self._setup.flight is not None

    # -- from the script's thread --------------------------------------------------------------------------------------
    def before_group(self) -> None:
        """A group is about to be made. A framework may have set a variable by its old name: then ours gives way."""
        ours = self._setup.flight or {}
        for name, old in _PAIRS:
            if old not in ours and old in os.environ and name in ours and os.environ.get(name) == ours[name]:
                del os.environ[name]

    def after_group(self) -> None:
        """The first group exists: open the socket. Takes 0.3 ms."""
        if self.is_on:
            self._begin()

    def dump_at_exception(self) -> None:
        """What the recorders hold when an uncaught exception ends the rank."""
        if not self.is_on or not self._has_groups:
            return
        if (self._buffer_size or 0) <= _ENTRIES_AT_DEATH:
            self.dump(stacks=True, kind="exception")

    def forked(self) -> None:
        """In a forked child: the parent answers, so the child gives up its copy of the socket."""
        (fd, inode), self._listener = self._listener, (-1, -1)
        try:
            if fd >= 0 and os.fstat(fd).st_ino == inode:
                os.close(fd)
        except OSError:
            return

    # -- from the evidence thread --------------------------------------------------------------------------------------
    def look(self) -> None:
        """Write flight.json when groups or variables are others than at the last look."""
        if not self.is_on:
            return
        world = _world()
        names = getattr(world, "pg_names", None)
        if not names:
            return
        self._begin()
        variables = tuple(os.environ.get(name) for pair in _PAIRS for name in pair)
        seen = (list(names.values()), len(world.pg_group_ranks), variables, _pipe(self._setup.rank), self._server)
        if seen == self._written:
            return
        try:
            self._write("flight.json", render(self.live()).encode())
        except OSError:
            return  # the next look tries again
        self._written = seen

    def live(self) -> dict[str, Any]:
        """What flight.json says, as it is now."""
        setup, torch = self._setup, sys.modules.get("torch")
        recorders = _recorders()
        return {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "rank": setup.rank,
            "local_rank": setup.slot,
            "attempt": setup.attempt,
            "world_size": _number(os.environ.get("WORLD_SIZE")),
            "host": os.uname().nodename,
            "boot_id": boot_id(),
            "torch": str(getattr(torch, "__version__", "")),
            "groups": list(_groups()),
            "recorders": [name for name, _ in recorders],
            "buffer_size": self._buffer_size if self._has_groups else _buffer_size(torch),
            "dump_prefix": _first_set(_DUMP_PREFIX),
            "pipe": _pipe(setup.rank),
            "server": "flight.sock" if self._server == "flight.sock" else None,
            "server_missing": "" if self._server == "flight.sock" else self._server,
            "environ": {k: v for k, v in sorted(dict(os.environ).items()) if k.startswith(_OF_INTEREST)},
            "stacks_ready": bool(recorders),
            "written_at_unix_s": time(),
        }

    def dump(self, stacks: bool, kind: str = "") -> dict[str, Any]:
        """Write every recorder to ``flight.<recorder>[.<kind>].pickle`` in the rank's folder.

        Torch holds the interpreter's lock meanwhile: 0.1 s for 2,000 entries.

        Returns:
            ``files``: names in that folder; ``took_s``; ``taken_at_unix_s``; ``missing``: what could not be had.
        """
        self.look()
        began_s, taken_at_unix_s = monotonic(), time()
        files: list[str] = []
        missing: list[str] = []
        recorders = _recorders()
        if not recorders:
            missing.append(f"flight recorder: {_why_no_recorder()}")
        elif self._buffer_size == 0:
            missing.append("flight recorder: it is off (set TORCH_FR_BUFFER_SIZE=2000)")
        for name, take in recorders:
            file = f"flight.{name}.{kind}.pickle" if kind else f"flight.{name}.pickle"
            try:
                self._write(file, _take(take, stacks))
            except Exception as e:  # torch raises RuntimeError, and what a broken device makes of it
                missing.append(f"flight recorder {name}: {type(e).__name__}: {str(e)[:300]}")
            else:
                files.append(file)
        return {
            "files": files,
            "took_s": round(monotonic() - began_s, 4),
            "taken_at_unix_s": taken_at_unix_s,
            "missing": missing,
        }

    # -- inside --------------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        if not self._beginning.acquire(False):
            return
        self._has_groups = True
        self._buffer_size = _buffer_size(sys.modules.get("torch"))
        try:
            self._start_server()
            self._server = "flight.sock"
        except Exception as e:  # the evidence thread and torch's own dumps are left
            self._server = f"{type(e).__name__}: {e}"[:300] if not isinstance(e, _NoServerError) else str(e)

    def _start_server(self) -> None:
        make = getattr(sys.modules.get(_BINDINGS), "_WorkerServer", None)
        ctypes: Any = sys.modules.get("ctypes")  # torch imports it
        if make is None or ctypes is None:
            raise _NoServerError("this torch has no _WorkerServer; only the rank's own thread answers")
        path, folder = reachable(self._setup.rank_dir, "flight.sock")
        try:
            if os.path.lexists(path):
                os.unlink(path)
            with _Unheard(ctypes):
                server = make(path, -1)
            # Never destroyed: that is logged in three lines at every end, and joins threads that a forked child lacks.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
            os.chmod(path, 0o600)  # until here the folder's 0700 has kept others out
            self._listener = _bound_to(path)
        finally:
            if folder >= 0:
                os.close(folder)

    def _write(self, name: str, content: bytes) -> None:
        write_whole(os.path.join(self._setup.rank_dir, name), content)


class _NoServerError(Exception):
    """There can be no server; the text says why."""


class _Unheard:
    """While entered, C++ code of torch logs errors only: a server's start is logged as a warning in every rank.

    The level is a plain int in libc10; with glog, or where it is not found, the line is printed.
    """

    def __init__(self, ctypes: Any) -> None:
        self._level: Any = None
        try:
            library = os.path.join(os.path.dirname(str(sys.modules["torch"].__file__)), "lib", "libc10.so")
            loaded = ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            self._level = ctypes.c_int.in_dll(loaded, "FLAGS_caffe2_log_level")
        except (OSError, ValueError, KeyError):
            return

    def __enter__(self) -> None:
        if self._level is not None:
            self._was = self._level.value
            if 0 <= self._was < 2:  # information 0, warning 1, error 2
                self._level.value = 2

    def __exit__(self, *_: object) -> None:
        if self._level is not None:
            self._level.value = self._was


def _bound_to(path: str) -> tuple[int, int]:
    """Descriptor and inode of this process's socket bound to *path*; (-1, -1) when it is not found."""
    from _socket import socket

    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            status = os.fstat(fd)
            if status.st_mode & _FILE_TYPE != _IS_SOCKET:
                continue
            copy = socket(fileno=os.dup(fd))
        except OSError:
            continue
        try:
            if copy.getsockname() == path:
                return fd, status.st_ino
        except OSError:
            continue
        finally:
            copy.close()
    return -1, -1


# -- what torch says ---------------------------------------------------------------------------------------------------
def _world() -> Any:
    return getattr(sys.modules.get(GROUPS_MODULE), "_world", None)


def _groups() -> Iterator[dict[str, Any]]:
    world = _world()
    if world is None:
        return
    for group, name in list(world.pg_names.items()):
        ranks = world.pg_group_ranks.get(group)
        if isinstance(group, int) or not ranks:  # a number stands for groups that this rank is no member of
            continue
        yield {
            "name": str(name),
            "desc": str(getattr(group, "group_desc", "") or ""),
            "ranks": sorted(r for r in list(ranks) if isinstance(r, int)),
            "backend": _backend(world, group),
        }


def _backend(world: Any, group: Any) -> str:
    """``gloo``, ``nccl``; ``cpu:gloo,cuda:nccl`` for a group with one backend per device."""
    text = str(getattr(world, "pg_backend_config", {}).get(group) or "")
    by_device = {part.rpartition(":")[2] for part in text.split(",") if part}
    if len(by_device) == 1:
        return by_device.pop()
    kept = world.pg_map.get(group)
    return text or (str(kept[0]) if kept else "")


def _recorders() -> list[tuple[str, Callable[..., bytes]]]:
    """Every recorder by name, and what dumps it when called with ``includeStackTraces``."""
    bindings = sys.modules.get(_BINDINGS)
    out: list[tuple[str, Callable[..., bytes]]] = []
    legacy = getattr(bindings, "_dump_nccl_trace", None)
    if legacy is not None:
        out.append(("nccl", lambda stacks: legacy(includeStackTraces=stacks)))
    common = getattr(bindings, "_dump_fr_trace", None)
    if common is None:
        return out
    out.append(("gloo", lambda stacks: common(includeStackTraces=stacks)))
    if "backend" in (common.__doc__ or "").partition("\n")[0]:  # from 2.15 on: a recorder for each backend's hook
        names = {b.rpartition(":")[2] for g in _groups() for b in g["backend"].split(",")}
        if "nccl" in names:
            names.add("nccl2")  # what "nccl" is there, and the name it records by
        out.extend(
            (name, lambda stacks, name=name: common(includeStackTraces=stacks, backend=name))
            for name in sorted(names - {"", "gloo", "nccl", "nccl-legacy"})
        )
    return out


def _why_no_recorder() -> str:
    if _BINDINGS not in sys.modules:
        return "torch.distributed is not imported in this rank"
    return "this torch has none for its backends (gloo's came with 2.8)"


def _take(dump: Callable[..., bytes], stacks: bool) -> bytes:
    torch = sys.modules.get("torch")
    if not stacks or torch is None or "_inductor" in vars(torch):
        return dump(stacks)
    stand_in = _NothingGenerated(get_ident())
    vars(torch)["_inductor"] = stand_in
    try:
        return dump(stacks)
    finally:
        if vars(torch).get("_inductor") is stand_in:  # else the real one was imported meanwhile
            del vars(torch)["_inductor"]


class _NothingGenerated:
    """Stands for torch._inductor during a dump: to the dumping thread it has no code cache, to others it is itself."""

    def __init__(self, dumping: int) -> None:
        self._dumping = dumping

    def __getattr__(self, name: str) -> Any:
        if get_ident() == self._dumping:
            raise AttributeError(name)
        from importlib import import_module

        return getattr(import_module("torch._inductor"), name)


# -- what torch was told -----------------------------------------------------------------------------------------------
def _first_set(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _buffer_size(torch: Any) -> int | None:
    """Entries of each recorder's ring as torch reads it; None where torch's default is not known."""
    told = _first_set(_BUFFER_SIZE)
    if told is not None:
        return _number(told)
    parts = str(getattr(torch, "__version__", "")).split(".")
    try:
        return 2000 if (int(parts[0]), int(parts[1])) >= (2, 11) else 0
    except (IndexError, ValueError):
        return None


def _pipe(rank: int) -> str | None:
    """The FIFO of the NCCL recorder, once torch has made it."""
    prefix = os.environ.get(_PIPE_PREFIX)
    path = f"{prefix}{rank}.pipe" if prefix else ""
    return path if path and os.path.exists(path) else None
