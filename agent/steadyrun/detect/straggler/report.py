"""The paces of a whole run: what was found, a row per rank, and a picture's worth of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from steadyrun.core.timing import Role
from steadyrun.detect.straggler.config import StragglerConfig
from steadyrun.detect.straggler.findings import sentence
from steadyrun.detect.straggler.paces import PaceWatch
from steadyrun.detect.straggler.records import Alarm, AlarmKind, Floats, StepFrame

__all__ = ["HeatMap", "PaceReport", "RankPace", "analyse"]

SCHEMA: Final = "steadyrun.stragglers/1"
MOST_COLUMNS: Final = 240
_MEASURES: Final = ("busy_s", "wait_s", "forward_s", "backward_s", "optimizer_s", "data_s", "cpu_s", "starved_s")


@dataclass(frozen=True, slots=True)
class RankPace:
    """Means of one rank over the run, seconds, NaN where unknown; ``against_peers`` as a share of its role's median."""

    rank: int
    role: str
    node: str | None
    steps: int
    against_peers: float
    means: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class HeatMap:
    """Columns of steps by ranks: own work against the role's median (0.1 is 10 % more), and time waited.

    Attributes:
        first_steps: first step of each column.
        busy, wait_s: [columns, ranks], NaN where unknown.
    """

    first_steps: tuple[int, ...]
    busy: Floats
    wait_s: Floats


@dataclass(frozen=True, slots=True)
class PaceReport:
    """What ``steadyctl stragglers`` shows."""

    alarms: tuple[Alarm, ...]
    ranks: tuple[RankPace, ...]
    heat: HeatMap
    steps: int
    elapsed_s: float
    notes: tuple[str, ...] = field(default=())

    @property
    def slow(self) -> tuple[Alarm, ...]:
        """Those that accuse somebody."""
        return tuple(a for a in self.alarms if a.kind in (AlarmKind.RANK, AlarmKind.NODE, AlarmKind.GROUP))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "steps": self.steps,
            "elapsed_s": round(self.elapsed_s, 3),
            "alarms": [a.to_json() | {"summary": sentence(a)} for a in self.alarms],
            "ranks": [
                {
                    "rank": r.rank,
                    "role": r.role,
                    "node": r.node,
                    "steps": r.steps,
                    "against_peers": _plain(r.against_peers),
                    **{name: _plain(value) for name, value in r.means.items()},
                }
                for r in self.ranks
            ],
            "heat": {
                "first_steps": list(self.heat.first_steps),
                "busy": [[_plain(v, 4) for v in row] for row in self.heat.busy],
                "wait_s": [[_plain(v) for v in row] for row in self.heat.wait_s],
            },
            "notes": list(self.notes),
        }


def _plain(value: float, digits: int = 6) -> float | None:
    return None if np.isnan(value) else round(float(value), digits)


def analyse(
    frames: Iterable[StepFrame],
    roles: Mapping[int, Role] | None,
    world_size: int,
    *,
    config: StragglerConfig | None = None,
    nodes: Mapping[int, str] | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> PaceReport:
    """The detector over a recorded run (one attempt), and its figures. Streams: memory does not grow with the run."""
    detector = PaceWatch(config or StragglerConfig(), roles, world_size, nodes=nodes, groups=groups)
    table = _Table(roles, world_size)
    alarms: dict[tuple[Any, ...], Alarm] = {}
    for frame in frames:
        for alarm in detector.take(frame):
            alarms[alarm.key] = alarm
        for alarm in detector.take_closed():
            alarms[alarm.key] = alarm
        table.add(frame)
    covered: set[int] = set()
    for alarm in detector.open_alarms():
        alarms[alarm.key] = alarm
    for alarm in alarms.values():
        if alarm.kind is AlarmKind.NODE:
            covered.update(alarm.ranks)
    kept = [a for a in alarms.values() if a.kind is not AlarmKind.RANK or a.ranks[0] not in covered]
    kept += detector.transients()
    notes = []
    if detector.steps and not table.has_busy:
        notes.append("no rank told its own work: wall times alone are equal on all ranks and name nobody")
    return PaceReport(
        alarms=tuple(sorted(kept, key=lambda a: (a.step, a.kind.value, a.ranks))),
        ranks=tuple(table.ranks(nodes or {})),
        heat=table.heat(),
        steps=detector.steps,
        elapsed_s=detector.elapsed_s,
        notes=tuple(notes),
    )


class _Table:
    """Running sums per rank, and columns of the heat map that are merged two by two when there are too many."""

    def __init__(self, roles: Mapping[int, Role] | None, world_size: int) -> None:
        self._names = [roles[r].name if roles and r in roles else "" for r in range(world_size)]
        keys = [roles[r].key if roles and r in roles else () for r in range(world_size)]
        found = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        self._roles = [np.array([r for r in range(world_size) if found[keys[r]] == i]) for i in range(len(found))]
        self._sums = np.zeros((len(_MEASURES), world_size))
        self._counts = np.zeros((len(_MEASURES), world_size))
        self._over = np.zeros(world_size)
        self._columns: list[tuple[int, Floats, Floats]] = []  # first step, sums and counts of (over, wait)
        self._per_column = 1
        self._in_last = 0
        self._world = world_size

    @property
    def has_busy(self) -> bool:
        return bool((self._counts[0] > 0).any())

    def add(self, frame: StepFrame) -> None:
        busy = np.where(frame.busy_s > 0, frame.busy_s, np.nan)
        over = np.full(self._world, np.nan)
        for members in self._roles:
            mine = busy[members]
            known = mine[~np.isnan(mine)]
            if len(known) > 1:
                over[members] = mine / np.median(known) - 1
        details = frame.details
        values = [busy, *(getattr(details, name) for name in _MEASURES[1:])]
        for index, column in enumerate(values):
            if column is not None:
                known = ~np.isnan(column)
                self._sums[index, known] += column[known]
                self._counts[index, known] += 1
        self._over += np.nan_to_num(over)
        self._add_column(frame.step, over, details.wait_s)

    def _add_column(self, step: int, over: Floats, wait_s: Floats | None) -> None:
        both = np.stack([over, np.full(self._world, np.nan) if wait_s is None else wait_s])
        known = (~np.isnan(both)).astype(np.float64)
        if self._columns and self._in_last < self._per_column:
            self._columns[-1][1][:] += np.nan_to_num(both)
            self._columns[-1][2][:] += known
            self._in_last += 1
            return
        if len(self._columns) >= MOST_COLUMNS:
            pairs = zip(self._columns[::2], self._columns[1::2], strict=True)
            self._columns = [(a[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs]
            self._per_column *= 2
        self._columns.append((step, np.nan_to_num(both), known))
        self._in_last = 1

    def ranks(self, nodes: Mapping[int, str]) -> list[RankPace]:
        with np.errstate(invalid="ignore", divide="ignore"):
            means = self._sums / self._counts
            over = self._over / self._counts[0]
        return [
            RankPace(
                rank=rank,
                role=self._names[rank],
                node=nodes.get(rank),
                steps=int(self._counts[0, rank]),
                against_peers=float(over[rank]),
                means={name: float(means[index, rank]) for index, name in enumerate(_MEASURES)},
            )
            for rank in range(self._world)
        ]

    def heat(self) -> HeatMap:
        with np.errstate(invalid="ignore", divide="ignore"):
            cells = [sums / counts for _, sums, counts in self._columns]
        stacked = np.stack(cells) if cells else np.zeros((0, 2, self._world))
        return HeatMap(tuple(first for first, _, _ in self._columns), stacked[:, 0], stacked[:, 1])
