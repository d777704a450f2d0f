"""Own work and lost cores apart: what a rank does more, and what its host withholds from it.

On hosts with fewer cores than busy threads a rank's own work takes as long as the kernel lets it: that differs far more
between ranks than their work does. So own work is told without the time for which a core was waited for, and compared
alone. What was withheld comes on top of it in a second comparison, with its own idea of what is normal: who is slow
only there starves.

Slight differences of own work are dismissed, and looked for anew. On shared cores those are some percent that come and
go also between healthy ranks, as who shares cores shares their caches, too; and anywhere what is next to nothing in a
step that goes by with waiting, as who waited for long finds its caches cold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from steadyrun.core.timing import Role
from steadyrun.detect.straggler.config import StragglerConfig
from steadyrun.detect.straggler.detector import Detector
from steadyrun.detect.straggler.records import Alarm, AlarmKind, Cause, Floats, StepFrame

__all__ = ["PaceWatch"]

KEPT: Final = 128  # steps
LEAST: Final = 0.5  # of a slow rank's extra time was withheld: it starves
FEWEST: Final = 5
SHARED: Final = 0.05  # of all ranks' time withheld: their caches are shared with whoever had the core
SLIGHT: Final = 0.06  # own work longer by less is told only where ranks have their cores for themselves
SLIGHT_ALIKE: Final = 0.15  # the same where no phase stands out: that is what a neighbour's caches do
SLIGHT_IN_STEP: Final = 0.005  # of the step: what own work takes longer is told if it is more


@dataclass(frozen=True, slots=True)
class _Row:
    """A step: times in seconds, [ranks].

    Attributes:
        own_s: own work, NaN or 0 where it is not known.
        wall_s: of the whole step, or None.
        lost_s: what was withheld; 0 where nothing is known of it.
    """

    step: int
    own_s: Floats
    wall_s: Floats | None
    lost_s: Floats

    @property
    def in_all_s(self) -> Floats:
        return np.where(self.own_s > 0, self.own_s + self.lost_s, self.own_s)


class PaceWatch:
    """A ``Detector``, and beside it a second one once ranks lose their cores to others. Used as one."""

    def __init__(
        self,
        config: StragglerConfig,
        roles: Mapping[int, Role] | None,
        world_size: int,
        *,
        nodes: Mapping[int, str] | None = None,
        groups: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """As of ``Detector``."""
        self._detector = Detector(config, roles, world_size, nodes=nodes, groups=groups)
        self._with_waits: Detector | None = None
        self._start = (config, roles, world_size, nodes)
        keys = [roles[r].key if roles and r in roles else () for r in range(world_size)]
        self._peers = {key: [r for r in range(world_size) if keys[r] == key] for key in set(keys)}
        self._keys = keys
        self._rows: deque[_Row] = deque(maxlen=KEPT)
        self._starving: dict[tuple[Any, ...], Alarm] = {}
        self._explained: set[tuple[Any, ...]] = set()  # alarms of own work that starvation explains
        self._shared = 0.0  # share of all ranks' time that was withheld lately

    @property
    def steps(self) -> int:
        return self._detector.steps

    @property
    def elapsed_s(self) -> float:
        """Time of the steps seen so far."""
        return self._detector.elapsed_s

    @property
    def last_step(self) -> int:
        return self._detector.last_step

    def take(self, frame: StepFrame) -> list[Alarm]:
        """Alarms that this step completes."""
        withheld = frame.details.starved_s
        lost = np.zeros(len(frame.busy_s)) if withheld is None else np.maximum(np.nan_to_num(withheld), 0.0)
        row = _Row(frame.step, frame.busy_s, frame.details.wall_s, lost)
        self._rows.append(row)
        alarms = self._detector.take(frame)
        on_top = self._take_with_waits(frame, row)
        self._explained.update(a.key for a in alarms if self._comes_of_starving(a))
        alarms = [a for a in alarms if a.key not in self._explained]
        alarms = [a for a in alarms if not self._is_dismissed(a)]
        return alarms + [found for a in on_top if (found := self._starves(a)) is not None]

    def _take_with_waits(self, frame: StepFrame, row: _Row) -> list[Alarm]:
        """Of the second detector, which begins with the first step in which anything was withheld."""
        config, roles, world_size, nodes = self._start
        if self._with_waits is None:
            if not row.lost_s.any():
                return []
            self._with_waits = Detector(config, roles, world_size, nodes=nodes)
        in_all = row.in_all_s
        total_s = float(np.nansum(in_all))
        if total_s > 0:
            self._shared += config.forgetting * (float(row.lost_s.sum()) / total_s - self._shared)
        return self._with_waits.take(replace(frame, busy_s=in_all, probe_s=None))

    def _starves(self, alarm: Alarm) -> Alarm | None:
        """*alarm* of the second detector as one of starvation; None where that is not what it is."""
        if alarm.kind is AlarmKind.DATA_IMBALANCE:
            return alarm if alarm.cause is Cause.CPU_STARVED else None
        if alarm.kind not in (AlarmKind.RANK, AlarmKind.NODE):
            return None
        known = {r for a in self._detector.open_alarms() for r in a.ranks if a.kind in (AlarmKind.RANK, AlarmKind.NODE)}
        if known.intersection(alarm.ranks) or self._withheld_share(alarm) < LEAST:
            return None
        found = replace(alarm, cause=Cause.CPU_STARVED, phase=None)
        self._starving[alarm.key] = found
        return found

    def _comes_of_starving(self, alarm: Alarm) -> bool:
        """Who is kept from a core finds the caches cold again and again: so its own work takes longer, too.

        Should it stay so, the rank goes on to take longer in all, and its alarm stays open.
        """
        starving = {r for a in self._starving.values() for r in a.ranks}
        is_told = alarm.kind is AlarmKind.RANK and starving.issuperset(alarm.ranks)
        return is_told and self._withheld_share(alarm) >= LEAST

    def _is_dismissed(self, alarm: Alarm) -> bool:
        """Whether *alarm*, a new one, was too slight to be told: should there be more to it, it comes again."""
        is_slight = self._is_slight(alarm)
        if is_slight:
            self._detector.dismiss(alarm.ranks[0])
        return is_slight

    def _is_slight(self, alarm: Alarm) -> bool:
        """The alarms of nodes and groups rest on many ranks, those without peers on a habit."""
        if alarm.kind is not AlarmKind.RANK or not alarm.peers:
            return False
        slight = SLIGHT if alarm.phase else SLIGHT_ALIKE
        on_shared_cores = alarm.slowdown < slight and self._shared >= SHARED
        return on_shared_cores or self._share_of_step(alarm) < SLIGHT_IN_STEP

    def _share_of_step(self, alarm: Alarm) -> float:
        """What the rank's own work takes longer, as a share of its steps; 1 where those are not known."""
        rank = alarm.ranks[0]
        rows = [
            (row.own_s[rank], row.wall_s[rank])
            for row in self._since(alarm)
            if row.wall_s is not None and row.own_s[rank] > 0 and row.wall_s[rank] > 0
        ]
        if not rows:
            return 1.0
        own_s, wall_s = np.median(np.array(rows), axis=0)
        return float(min(1.0, own_s / wall_s) * alarm.slowdown / (1 + alarm.slowdown))

    def _since(self, alarm: Alarm) -> list[_Row]:
        return [row for row in self._rows if row.step >= alarm.first_step]

    def _withheld_share(self, alarm: Alarm) -> float:
        """Of the time that the alarm's ranks take longer than their peers, how much was withheld from them."""
        rows = self._since(alarm)
        if len(rows) < FEWEST:
            return 0.0
        ranks = list(alarm.ranks)
        peers = [r for r in self._peers[self._keys[ranks[0]]] if r not in alarm.ranks]
        if not peers:
            return 0.0
        extra_s = _over(np.stack([row.in_all_s for row in rows]), ranks, peers)
        return _over(np.stack([row.lost_s for row in rows]), ranks, peers) / extra_s if extra_s > 0 else 0.0

    def open_alarms(self) -> list[Alarm]:
        """What is slow now, with present figures."""
        own = [a for a in self._detector.open_alarms() if a.key not in self._explained]
        return [*own, *self._of_starvation(self._second(Detector.open_alarms))]

    def take_closed(self) -> list[Alarm]:
        """Alarms that were found to be over since the last call."""
        over = list(self._of_starvation(self._second(Detector.take_closed)))
        for alarm in over:
            del self._starving[alarm.key]
        closed = self._detector.take_closed()
        own = [a for a in closed if a.key not in self._explained]
        self._explained.difference_update([a.key for a in closed])
        return [*own, *over]

    def _second(self, ask: Any) -> list[Alarm]:
        return [] if self._with_waits is None else ask(self._with_waits)

    def _of_starvation(self, alarms: Iterable[Alarm]) -> Iterable[Alarm]:
        return (replace(a, cause=Cause.CPU_STARVED, phase=None) for a in alarms if a.key in self._starving)

    def transients(self) -> list[Alarm]:
        """As of ``Detector``; bursts in which a rank did not get its core are none of its own."""
        return self._detector.transients()


def _over(rows: Floats, ranks: Sequence[int], peers: Sequence[int]) -> float:
    """What *ranks* have more than *peers* in the mean of the steps, each side by its median rank."""
    known = np.where(np.isnan(rows), 0.0, rows).sum(axis=0) / np.maximum((~np.isnan(rows)).sum(axis=0), 1)
    return float(np.median(known[list(ranks)]) - np.median(known[list(peers)]))
