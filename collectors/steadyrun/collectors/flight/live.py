"""What a rank tells of its own recorders while it lives: ``flight.json`` in its folder, the same over its socket."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadyrun.collectors.flight.sidecar import LiveGroup

__all__ = ["LIVE_SCHEMA", "LiveRecorders", "live_from_json", "read_live"]

LIVE_SCHEMA: Final = "steadyrun.flight-live/1"
_MAX_BYTES: Final = 32 << 20  # thousands of ranks in dozens of groups


@dataclass(frozen=True, slots=True)
class LiveRecorders:
    """One rank's recorders as they are now, after whatever a framework has changed.

    Attributes:
        recorders: names of those that exist; ``gloo`` is torch's default one.
        buffer_size: entries the recorder keeps, 0 when it is off; None when unknown.
        dump_prefix: torch's watchdog writes to this and the rank; empty when unknown.
        pipe: of the legacy NCCL heartbeat thread; the file, or a prefix of ``<rank>.pipe``; empty when there is none.
        has_server: torch's own server listens on ``flight.sock``; else *server_missing* says why not.
        stacks_ready: what a dump with stacks imports is imported.
    """

    rank: int
    pid: int | None = None
    host: str = ""
    boot_id: str = ""
    torch: str = ""
    world_size: int | None = None
    groups: tuple[LiveGroup, ...] = ()
    recorders: tuple[str, ...] = ()
    buffer_size: int | None = None
    dump_prefix: str = ""
    pipe: str = ""
    has_server: bool = False
    server_missing: str = ""
    stacks_ready: bool = False

    def dump_path(self) -> Path | None:
        """Where torch's watchdog leaves its dump."""
        return Path(f"{self.dump_prefix}{self.rank}") if self.dump_prefix else None

    def pipe_path(self) -> Path | None:
        """The pipe that asks NCCL for a dump."""
        if not self.pipe:
            return None
        return Path(self.pipe if self.pipe.endswith(".pipe") else f"{self.pipe}{self.rank}.pipe")


def live_from_json(data: Mapping[str, Any]) -> LiveRecorders:
    """The object that the rank writes.

    Raises:
        ValueError: it is none, or a field has a wrong type.
    """
    if data.get("schema") != LIVE_SCHEMA:
        raise ValueError(f"schema {data.get('schema')!r} is not {LIVE_SCHEMA!r}")

    def number(name: str) -> int | None:
        return None if data.get(name) is None else int(data[name])

    try:
        groups = tuple(
            LiveGroup(str(g["name"]), str(g.get("desc") or ""), tuple(sorted(map(int, g["ranks"]))), str(g["backend"]))
            for g in data.get("groups") or ()
        )
        return LiveRecorders(
            rank=int(data["rank"]),
            pid=number("pid"),
            host=str(data.get("host") or ""),
            boot_id=str(data.get("boot_id") or ""),
            torch=str(data.get("torch") or ""),
            world_size=number("world_size") or max((len(g.ranks) for g in groups), default=None),
            groups=groups,
            recorders=tuple(map(str, data.get("recorders") or ())),
            buffer_size=number("buffer_size"),
            dump_prefix=str(data.get("dump_prefix") or ""),
            pipe=str(data.get("pipe") or ""),
            has_server=bool(data.get("server")),
            server_missing=str(data.get("server_missing") or ""),
            stacks_ready=bool(data.get("stacks_ready")),
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        raise ValueError(f"a field cannot be used: {e!r}") from e


def read_live(path: Path) -> tuple[LiveRecorders | None, str]:
    """(the state, why it cannot be read; empty where there is no file)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as f:
            text = f.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None, ""
    except OSError as e:
        return None, f"cannot read {path.name}: {e.strerror}"
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("it is no object")
        return live_from_json(data), ""
    except (ValueError, RecursionError) as e:
        return None, f"cannot read {path.name}: {e}"
