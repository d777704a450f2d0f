"""``meta.json`` beside dumps: what whoever gathered them by hand noted of the processes, which no dump tells."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ["Notes", "read_notes"]

MAX_BYTES: Final = 1 << 22
MAX_RANKS: Final = 1 << 17
STATES: Final = frozenset("RSDTtZXIKWP")


@dataclass(frozen=True, slots=True)
class Notes:
    """Per rank its process state as /proc has it (``S``, ``T``, ``Z``) and its exception (``Type: message``)."""

    world_size: int | None = None
    states: Mapping[int, str] = field(default_factory=dict)
    exceptions: Mapping[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.world_size is not None or bool(self.states or self.exceptions)


def read_notes(path: Path) -> Notes:
    """The notes; empty where the file holds none of what is understood: ``world_size``, ``proc_state`` (a list, or an
    object by rank), ``exceptions`` (the same)."""
    try:
        with path.open("rb") as f:
            data = json.loads(f.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return Notes()
    if not isinstance(data, dict):
        return Notes()
    size = data.get("world_size")
    is_size = isinstance(size, int) and not isinstance(size, bool) and 0 < size <= MAX_RANKS
    states = {r: s for r, s in _by_rank(data.get("proc_state")).items() if s in STATES}
    exceptions = {r: e[:4000] for r, e in _by_rank(data.get("exceptions")).items() if e}
    return Notes(size if is_size else None, states, exceptions)


def _by_rank(value: Any) -> dict[int, str]:
    if isinstance(value, list):
        return {i: v for i, v in enumerate(value[:MAX_RANKS]) if isinstance(v, str)}
    if not isinstance(value, dict):
        return {}
    return {int(k): v for k, v in value.items() if k.isdigit() and len(k) < 7 and isinstance(v, str)}
