"""Single entries of the dumps in an incident's folder, for the judgement of a live incident."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from steadyrun.collectors.flight.folder import DumpFolder
from steadyrun.collectors.flight.sidecar import DumpFile, Sidecar, sidecar_from_json
from steadyrun.core.flight import FlightOp

__all__ = ["IncidentDetails", "used_dumps"]

# Of one recorder's dumps the first of these is what the summary was made of; see source.py.
_ORDER: Final = ("exception", "full", "active", "watchdog")
_MAX_BYTES: Final = 32 << 20


class IncidentDetails:
    """``FlightDetails`` of the ranks whose dumps are in *folder*: those of this node, and of all nodes that share it.

    Reads a file only when it is asked for: 10 ms per 1,000 entries. Not for several threads.

    Args:
        limit_s: for all reading together: ranks wait while their incident is judged, and a shared folder has thousands.
    """

    def __init__(self, folder: Path, limit_s: float = 1.0) -> None:
        self._folder = folder
        self._left_s = limit_s
        self._of_rank: dict[int, DumpFolder | None] = {}

    def ops(self, rank: int, group: str, first_seq: int, last_seq: int) -> Sequence[FlightOp]:
        """See ``FlightDetails``; empty for ranks whose dumps are elsewhere, and once the time for it is over."""
        return self._within_limit(rank, lambda dumps: dumps.ops(rank, group, first_seq, last_seq))

    def course(self, rank: int, last: int) -> Sequence[FlightOp]:
        """See ``FlightDetails``; empty for ranks whose dumps are elsewhere, and once the time for it is over."""
        return self._within_limit(rank, lambda dumps: dumps.course(rank, last))

    def _within_limit(self, rank: int, read: Callable[[DumpFolder], Sequence[FlightOp]]) -> Sequence[FlightOp]:
        if self._left_s <= 0:
            return ()
        began_s = time.monotonic()
        if rank not in self._of_rank:
            self._of_rank[rank] = self._open(rank)
        dumps = self._of_rank[rank]
        ops = read(dumps) if dumps is not None else ()
        self._left_s -= time.monotonic() - began_s
        return ops

    def _open(self, rank: int) -> DumpFolder | None:
        try:
            with (self._folder / f"rank_{rank}.flight.json").open("rb") as f:
                data = json.loads(f.read(_MAX_BYTES))
            sidecar = sidecar_from_json(data)
        except (OSError, ValueError, AttributeError, RecursionError):
            return None
        files = tuple((self._folder / Path(d.file).name, d) for d in used_dumps(sidecar))
        return DumpFolder({rank: files}, {rank: sidecar}, {}) if files else None


def used_dumps(sidecar: Sidecar) -> list[DumpFile]:
    """One dump per recorder: the one that says most."""
    known = [d for d in sidecar.dumps if d.kind in _ORDER]
    best: dict[str, DumpFile] = {}
    for dump in sorted(known, key=lambda d: _ORDER.index(d.kind)):
        best.setdefault(dump.recorder, dump)
    return list(best.values())
