"""Own work and lost cores apart: what a rank does more, and what its host withholds from it.

On hosts with fewer cores than busy threads a rank's own work takes as long as the kernel lets it: that differs far more
between ranks than their work does. So own work is told without the time for which a core was waited for, and compared
alone. What was withheld comes on top of it in a second comparison, with its own idea of what is normal: who is slow
only there starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from steadyrun.core.timing import Role
from steadyrun.detect.straggler.config import StragglerConfig
from steadyrun.detect.straggler.detector import Detector
from steadyrun.detect.straggler.records import Alarm, AlarmKind, Cause, Floats, StepFrame

__all__ = ["PaceWatch"]

KEPT: Final = 128  # steps of which it is known what was withheld
LEAST: Final = 0.5  # of a slow rank's extra time was withheld: it starves
FEWEST: Final = 5


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
        self._withheld: deque[tuple[int, Floats, Floats]] = deque(
            maxlen=KEPT
        )  # step, own work and what was withheld, that alone
        self._starving: dict[tuple[Any, ...], Alarm] = {}
        self._explained: set[tuple[Any, ...]] = set()  # alarms of own work that starvation explains

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
        alarms = self._detector.take(frame)
        if self._with_waits is None:
            if withheld is None or not (withheld > 0).any():
                return alarms
            config, roles, world_size, nodes = self._start
            self._with_waits = Detector(config, roles, world_size, nodes=nodes)
        lost = np.zeros(len(frame.busy_s)) if withheld is None else np.maximum(np.nan_to_num(withheld), 0.0)
        in_all = np.where(frame.busy_s > 0, frame.busy_s + lost, frame.busy_s)
        self._withheld.append((frame.step, in_all, lost))
        on_top = self._with_waits.take(replace(frame, busy_s=in_all, probe_s=None))
        self._explained.update(a.key for a in alarms if self._comes_of_starving(a))
        alarms = [a for a in alarms if a.key not in self._explained]
        return alarms + [found for a in on_top if (found := self._starves(a)) is not None]

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

    def _withheld_share(self, alarm: Alarm) -> float:
        """Of the time that the alarm's ranks take longer than their peers, how much was withheld from them."""
        rows = [(busy, withheld) for step, busy, withheld in self._withheld if step >= alarm.first_step]
        if len(rows) < FEWEST:
            return 0.0
        ranks = list(alarm.ranks)
        peers = [r for r in self._peers[self._keys[ranks[0]]] if r not in alarm.ranks]
        if not peers:
            return 0.0
        extra = [_over(np.stack([row[which] for row in rows]), ranks, peers) for which in (0, 1)]
        return extra[1] / extra[0] if extra[0] > 0 else 0.0

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
