"""The straggler detector: a step's times of all ranks in, alarms out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steadyrun.core.timing import TAG_CHECKPOINT, TAG_COMPILE, TAG_DEVICE, TAG_EVALUATION, TAG_FIRST, Role
from steadyrun.detect.straggler.chart import WORTH, Chart
from steadyrun.detect.straggler.config import StragglerConfig
from steadyrun.detect.straggler.phases import Explanation, History, explain, onset
from steadyrun.detect.straggler.records import Alarm, AlarmKind, Cause, Floats, StepDetails, StepFrame

__all__ = ["Detector"]

UNUSUAL: Final = TAG_FIRST | TAG_COMPILE | TAG_CHECKPOINT | TAG_EVALUATION  # such steps are compared with nothing
HOLD_STEPS: Final = 5  # an alarm waits this long for its node's other ranks, when half of them are about to follow
ABOUT_TO: Final = 0.5  # of the threshold
LEAST_TO_END: Final = 24  # residuals that show that an alarm is over: as many as it took, within these
MOST_TO_END: Final = 96
SPIKE_SCALES: Final = 3.0
BURST: Final = math.log(1.1)  # and four scales: a step that counts as a burst
BURST_SCALES: Final = 4.0
LONGER: Final = 4  # times as many steps as for data must stages have been out of balance
PROBES_KEPT: Final = 16
PROBES_WARM, PROBES_LEARN, PROBES_LEAST = 1, 6, 4
RANKS_ASKED: Final = 256  # for how long a step was; more would say the same
PEERS_EXPLAINED: Final = 64  # peers that phases are compared with; more say nothing more
PROBE_ROLE: Final = "probe"


@dataclass(slots=True)
class _Open:
    """An alarm that lasts; *chart*, *row* and *column* say where its evidence is.

    Attributes:
        effect: residual that it was raised for.
        newest: its newest residuals, as many as it took to be sure that it is slow.
        fed: steps of the chart when the newest of them came.
    """

    alarm: Alarm
    chart: Chart
    row: int
    column: int
    effect: float
    newest: deque[float]
    fed: int

    @classmethod
    def of(cls, alarm: Alarm, chart: Chart, row: int, column: int) -> _Open:
        steps = alarm.step - alarm.first_step + 1
        kept = deque[float](maxlen=min(max(steps, LEAST_TO_END), MOST_TO_END))
        return cls(alarm, chart, row, column, math.log1p(alarm.slowdown), kept, chart.fed)

    def is_over(self) -> bool:
        """Its newest residuals are what nobody would be accused of; one more step has come."""
        chart, row = self.chart, self.row
        if chart.fed > self.fed:
            self.fed = chart.fed
            residual = float(chart.residual[row, self.column])
            if residual == residual:
                limit = max(2 * self.effect, SPIKE_SCALES * float(chart.scale[row, 0]))  # one long step is one step
                self.newest.append(min(max(residual, -limit), limit))
        if chart.evidence[row, self.column] < chart.height[row, 0] / 2:
            return True
        if len(self.newest) < (self.newest.maxlen or 1):
            return False
        slight = max(WORTH * chart.config.effect, float(chart.reference[row, 0] * chart.scale[row, 0]))
        return math.fsum(self.newest) / len(self.newest) < min(self.effect / 2, slight)


class Detector:
    """Compares ranks of equal role step by step. One attempt of a job; pure, not thread-safe.

    Attributes:
        elapsed_s: time of the steps seen so far.
    """

    def __init__(
        self,
        config: StragglerConfig,
        roles: Mapping[int, Role] | None,
        world_size: int,
        *,
        nodes: Mapping[int, str] | None = None,
        groups: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """
        Args:
            roles: of each rank; without roles all ranks are comparable.
            nodes: name of each rank's node; without it no node is ever named.
            groups: named parallel groups whose members work on one replica, e.g. all stages of data-parallel index 2,
                for ``details.group_wait_s``: the group whose members wait least for the others is the slow one.
        """
        if world_size < 1:
            raise ValueError(f"world_size must be 1 or more, got {world_size}")
        self.config = config
        self.world_size = world_size
        self._names: dict[int, str] = {}
        self._charts = [
            Chart(config, members, is_alone=is_alone) for is_alone, members in self._arranged(roles, world_size)
        ]
        self._place = {
            int(rank): (chart, row, column)
            for chart in self._charts
            for row, members in enumerate(chart.members)
            for column, rank in enumerate(members)
            if rank >= 0
        }
        self._probe_chart = Chart(
            config,
            [range(world_size)],
            is_alone=world_size == 1,
            warm_steps=PROBES_WARM,
            learn_steps=PROBES_LEARN,
            least_steps=PROBES_LEAST,
        )
        self._probes: deque[tuple[int, Floats]] = deque(maxlen=PROBES_KEPT)
        self._node_of = dict(nodes or {})
        self._ranks_of: dict[str, list[int]] = {}
        for rank, node in sorted(self._node_of.items()):
            self._ranks_of.setdefault(node, []).append(rank)
        self._groups = {name: np.array(ranks, dtype=np.intp) for name, ranks in (groups or {}).items()}
        self._group_names = list(self._groups)
        for_groups = replace(config, least_slowdown=config.least_group_slowdown)
        self._group_chart = Chart(for_groups, [range(len(self._groups))]) if len(self._groups) > 1 else None
        self._history = History(world_size)
        self._open: dict[tuple[Any, ...], _Open] = {}
        self._closed: list[Alarm] = []
        self._due: dict[int, int] = {}  # rank -> step at which its alarm was due
        self._imbalances: dict[tuple[AlarmKind, str], tuple[int, int]] = {}  # steps it has been there, and its first
        self._role_level: Floats | None = None
        self._bursts = np.zeros(world_size, np.int64)
        self._burst_lost_s = np.zeros(world_size)
        self._was_burst = np.zeros(world_size, np.bool_)
        self._bursting: dict[int, NDArray[np.intp] | None] = {}  # by chart, whose step was one just now
        self._is_device = False
        self._has_work = False  # times are then not comparable as they are
        self.elapsed_s = 0.0
        self.steps = 0
        self.last_step = -1

    def _arranged(self, roles: Mapping[int, Role] | None, world_size: int) -> list[tuple[bool, list[list[int]]]]:
        """Groups of comparable ranks, sorted into charts of about one width."""
        by_key: dict[tuple[Any, ...], list[int]] = {}
        for rank in range(world_size):
            role = roles.get(rank) if roles else None
            by_key.setdefault(() if role is None else ("role", *role.key), []).append(rank)
            self._names[rank] = "" if role is None else role.name
        alone = [members[0] for members in by_key.values() if len(members) == 1]
        charts: dict[tuple[bool, int], list[list[int]]] = {}
        few = self.config.few_peers
        for members in by_key.values():
            size = len(members)
            if size > 1:
                width = 2 if size == 2 else max(3, 1 << (size - 1).bit_length())
                charts.setdefault((size >= few, width), []).append(members)
        out: list[tuple[bool, list[list[int]]]] = [(False, found) for found in charts.values()]
        if alone:
            out.append((True, [alone]))
        return out

    # -- a step --------------------------------------------------------------------------------------------------------
    def take(self, frame: StepFrame) -> list[Alarm]:
        """``feed`` for a frame."""
        return self.feed(frame.step, frame.busy_s, frame.work, frame.probe_s, frame.flags, frame.details)

    def feed(
        self,
        step: int,
        busy: Floats,
        work: Floats | None = None,
        probe: Floats | None = None,
        tags: NDArray[np.integer[Any]] | int = 0,
        details: StepDetails | None = None,
    ) -> list[Alarm]:
        """Alarms that this step completes.

        Args:
            step: above the last one fed; gaps are fine. After a roll-back in the same attempt numbers may go down.
            busy: own work of each rank, seconds; NaN or 0 where it is not known.
            work: tokens, or another measure that own work grows with; it is compared per unit of it.
            probe: times of the fixed probe in this step, NaN where a rank made none.
            tags: TAG_* of each rank or of all; ranks in an unusual step are compared with nothing.
        """
        details = details or StepDetails()
        busy = np.asarray(busy, dtype=np.float64)
        if busy.shape != (self.world_size,):
            raise ValueError(f"busy must hold {self.world_size} times, one per rank, got {busy.shape}")
        self.steps += 1
        self.last_step = step
        usable = busy > 0
        if not isinstance(tags, int) or tags:
            flags = np.asarray(tags)
            usable = usable & ((flags & UNUSUAL) == 0)
            self._is_device = self._is_device or bool((flags & TAG_DEVICE).any())
        if usable.all():
            logs = np.log(busy)
        else:
            logs = np.full(self.world_size, np.nan)
            np.log(busy, out=logs, where=usable)
        step_s = self._step_s(busy, usable, details)
        self.elapsed_s += step_s
        self._history.push(step, busy, details)
        values = np.concatenate([logs, [np.nan]])
        amount = None
        if work is not None:
            self._has_work = True
            amount = np.full(self.world_size + 1, np.nan)
            work = np.asarray(work, dtype=np.float64)
            np.log(work, out=amount[:-1], where=work > 0)
        for chart in self._charts:
            chart.feed(values, step, self.elapsed_s, amount)
        if probe is not None:
            self._feed_probe(step, np.asarray(probe, dtype=np.float64))
        if details.group_wait_s is not None and details.wall_s is not None:
            self._feed_groups(step, details.wall_s, details.group_wait_s)
        self._count_bursts(step_s)
        alarms = self._new_alarms(step)
        alarms += self._imbalance_alarms(step)
        self._follow(step, step_s)
        return alarms

    def _step_s(self, busy: Floats, usable: NDArray[np.bool_], details: StepDetails) -> float:
        """How long the step was: the wall time that most ranks saw, else the longest own work."""
        if details.wall_s is not None:
            some = details.wall_s[:: max(1, len(details.wall_s) // RANKS_ASKED)]
            known = some[some > 0]
            if len(known):
                return float(np.partition(known, len(known) // 2)[len(known) // 2])
        return float(busy.max(initial=0.0, where=usable))

    def _feed_probe(self, step: int, probe: Floats) -> None:
        known = probe > 0
        if not known.any():
            return
        logs = np.full(self.world_size + 1, np.nan)
        np.log(probe, out=logs[:-1], where=known)
        chart = self._probe_chart
        chart.feed(logs, step, self.elapsed_s)
        if chart.is_ready:
            self._probes.append((step, chart.residual[0].copy()))

    def _feed_groups(self, step: int, wall_s: Floats, waits_s: Floats) -> None:
        if self._group_chart is None:
            return
        own = np.where(waits_s >= 0, wall_s - waits_s, np.nan)
        values = np.full(len(self._groups) + 1, np.nan)
        for index, members in enumerate(self._groups.values()):
            found = own[members]
            found = found[found > 0]
            if len(found):
                values[index] = math.log(float(np.median(found)))
        self._group_chart.feed(values, step, self.elapsed_s)

    def _count_bursts(self, step_s: float) -> None:
        for chart in self._charts:
            if not chart.is_ready:
                continue
            high = chart.residual > np.maximum(BURST, BURST_SCALES * chart.scale)  # False for NaN, and where nobody is
            at = np.flatnonzero(high)
            before = self._bursting.get(id(chart))
            if not len(at) and before is None:
                continue
            ranks = chart.members.ravel()[at]
            lasting = self._was_burst[ranks]
            self._bursts[ranks[~lasting]] += 1
            self._burst_lost_s[ranks] += step_s * -np.expm1(-chart.residual.ravel()[at])
            if before is not None:
                self._was_burst[before] = False
            self._was_burst[ranks] = True
            self._bursting[id(chart)] = ranks if len(ranks) else None

    # -- alarms --------------------------------------------------------------------------------------------------------
    def _new_alarms(self, step: int) -> list[Alarm]:
        due = self._newly_due(step)
        out: list[Alarm] = []
        if due:
            out += self._node_alarms(step, due)
            for rank in due:
                if (AlarmKind.RANK, rank) in self._open or self._joins_node(rank, step):
                    continue
                if not self._waits_for_node(rank, step):
                    out.append(self._raise_rank(rank, step))
        out += self._probe_alarms(step)
        out += self._group_alarms(step)
        return out

    def _newly_due(self, step: int) -> list[int]:
        due: list[int] = []
        for chart in self._charts:
            over = chart.over(self.elapsed_s)
            if over.any():
                due += [int(r) for r in chart.members[over] if (AlarmKind.RANK, int(r)) not in self._open]
        self._due = {rank: self._due.get(rank, step) for rank in due}
        return sorted(due)

    def _waits_for_node(self, rank: int, step: int) -> bool:
        """Half of its node is about to follow: a few steps more tell whether it is the node."""
        ranks = self._rivals_on_node(rank)
        if len(ranks) < 2 or step - self._due[rank] >= HOLD_STEPS:
            return False
        following = sum(1 for r in ranks if self._share_of_evidence(r) > ABOUT_TO)
        return following >= max(2, self.config.node_share * len(ranks))

    def _joins_node(self, rank: int, step: int) -> bool:
        """Its node is under alarm: it becomes one more of that alarm's ranks, and no alarm of its own is given out."""
        found = self._open.get((AlarmKind.NODE, self._node_of.get(rank)))
        if found is None:
            return False
        self._raise_rank(rank, step)
        found.alarm = replace(found.alarm, ranks=tuple(sorted({*found.alarm.ranks, rank})))
        return True

    def _rivals_on_node(self, rank: int) -> list[int]:
        """Ranks of its node, where there is more than one node to compare."""
        node = self._node_of.get(rank)
        return self._ranks_of[node] if node is not None and len(self._ranks_of) > 1 else []

    def _share_of_evidence(self, rank: int) -> float:
        chart, row, column = self._place[rank]
        return float(chart.evidence[row, column] / chart.height[row, 0]) if chart.is_ready else 0.0

    def _node_alarms(self, step: int, due: Sequence[int]) -> list[Alarm]:
        out = []
        slow = {*due, *(r for kind, r in self._rank_keys())}
        for node in sorted({self._node_of[r] for r in due if r in self._node_of}):
            ranks = self._ranks_of[node]
            key = (AlarmKind.NODE, node)
            found = [r for r in ranks if r in slow]
            if len(self._ranks_of) < 2 or key in self._open or len(found) < max(2, self.config.node_share * len(ranks)):
                continue
            parts = [self._raise_rank(r, step) for r in found]
            worst = max(parts, key=lambda a: a.slowdown)
            alarm = replace(
                worst,
                kind=AlarmKind.NODE,
                ranks=tuple(found),
                first_step=min(a.first_step for a in parts),
                slowdown=float(np.median([a.slowdown for a in parts])),
                node=node,
                is_actionable=any(a.is_actionable for a in parts),
            )
            self._open[key] = _Open.of(alarm, *self._place[worst.ranks[0]])
            out.append(alarm)
        return out

    def _rank_keys(self) -> list[tuple[AlarmKind, int]]:
        return [(key[0], key[1]) for key in self._open if key[0] is AlarmKind.RANK]

    def _raise_rank(self, rank: int, step: int) -> Alarm:
        """The alarm of *rank* as of now, kept as open."""
        key = (AlarmKind.RANK, rank)
        if key in self._open:
            return self._open[key].alarm
        chart, row, column = self._place[rank]
        residual = float(chart.mean_excess[row, column])
        first, steps = int(chart.first_step[row, column]), float(chart.steps[row, column])
        peers = [int(r) for r in chart.members[row] if r >= 0 and int(r) != rank]
        calm = [r for r in peers if self._share_of_evidence(r) < ABOUT_TO]
        if not chart.is_alone and not self._has_work:
            bias, scale = float(chart.bias[row, column]), float(chart.scale[row, 0])
            found_onset = onset(self._history, rank, (calm or peers)[:PEERS_EXPLAINED], first, bias, scale)
            if found_onset is not None:
                first, steps, residual = found_onset
        chart.level[row, column] = residual + (0.0 if chart.is_alone else chart.bias[row, column])
        found = self._explain(rank, [] if chart.is_alone else calm or peers, first)
        alarm = Alarm(
            kind=AlarmKind.RANK,
            ranks=(rank,),
            step=step,
            first_step=first,
            slowdown=math.expm1(residual),
            z=residual / float(chart.scale[row, 0]) * math.sqrt(steps),
            role=self._names[rank],
            node=self._node_of.get(rank),
            peers=0 if chart.is_alone else len(peers),
            phase=found.phase,
            phases=found.shares,
            cause=found.cause,
            probe=self._probe_slowdown(rank, first),
            is_actionable=not chart.is_alone,
        )
        self._open[key] = _Open.of(alarm, chart, row, column)
        return alarm

    def _explain(self, rank: int, peers: Sequence[int], first_step: int) -> Explanation:
        return explain(self._history, rank, peers[:PEERS_EXPLAINED], first_step, self._is_device)

    def _probe_slowdown(self, rank: int, first_step: int) -> float | None:
        found = [float(row[rank]) for step, row in self._probes if step >= first_step and not math.isnan(row[rank])]
        return math.expm1(float(np.median(found))) if found else None

    def _probe_alarms(self, step: int) -> list[Alarm]:
        chart = self._probe_chart
        if not self._probes or self._probes[-1][0] != step:
            return []
        over = chart.over(self.elapsed_s)
        out = []
        for rank in np.nonzero(over[0])[0].tolist():
            key = (AlarmKind.RANK, rank)
            if key in self._open:
                continue
            residual = float(chart.mean_excess[0, rank])
            first = int(chart.first_step[0, rank])
            alarm = Alarm(
                kind=AlarmKind.RANK,
                ranks=(rank,),
                step=step,
                first_step=first,
                slowdown=math.expm1(residual),
                z=residual / float(chart.scale[0, 0]) * math.sqrt(float(chart.steps[0, rank])),
                role=PROBE_ROLE,
                node=self._node_of.get(rank),
                peers=self.world_size - 1,
                cause=Cause.WHOLE,
                probe=self._probe_slowdown(rank, first),
                is_actionable=self.world_size > 1,
            )
            self._open[key] = _Open.of(alarm, chart, 0, rank)
            out.append(alarm)
        return out

    def _group_alarms(self, step: int) -> list[Alarm]:
        chart = self._group_chart
        if chart is None or not chart.is_ready:
            return []
        out = []
        slow = {r for _, r in self._rank_keys()}
        for index in np.nonzero(chart.over(self.elapsed_s)[0])[0].tolist():
            name = self._group_names[index]
            members = self._groups[name].tolist()
            key = (AlarmKind.GROUP, name)
            if key in self._open or slow.intersection(members):
                continue  # a rank of it is known to be slow: that is why the others wait
            residual = float(chart.mean_excess[0, index])
            alarm = Alarm(
                kind=AlarmKind.GROUP,
                ranks=tuple(members),
                step=step,
                first_step=int(chart.first_step[0, index]),
                slowdown=math.expm1(residual),
                z=residual / float(chart.scale[0, 0]) * math.sqrt(float(chart.steps[0, index])),
                group=name,
                peers=len(self._groups) - 1,
                is_actionable=False,  # which of its ranks or links, nobody knows
            )
            self._open[key] = _Open.of(alarm, chart, 0, index)
            out.append(alarm)
        return out

    # -- imbalances ----------------------------------------------------------------------------------------------------
    def _imbalance_alarms(self, step: int) -> list[Alarm]:
        out = []
        for chart in self._charts:
            if not chart.is_ready or chart.is_alone:
                continue
            for row in np.nonzero(chart.scale[:, 0] > self.config.noisy_scale)[0].tolist():
                members = [int(r) for r in chart.members[row] if r >= 0]
                name = self._names[members[0]]
                first = self._has_lasted(AlarmKind.DATA_IMBALANCE, name, step, self.config.imbalance_steps)
                if first is not None:
                    out.append(self._data_alarm(step, first, chart, row, members))
        out += self._stage_alarms(step)
        return out

    def _has_lasted(self, kind: AlarmKind, role: str, step: int, steps: int) -> int | None:
        """Counts one more step; the first of them once, when there have been *steps*."""
        count, first = self._imbalances.get((kind, role), (0, step))
        self._imbalances[kind, role] = (count + 1, first)
        return first if count + 1 == steps else None

    def _data_alarm(self, step: int, first_step: int, chart: Chart, row: int, members: Sequence[int]) -> Alarm:
        busy, cpu = self._history.scatters(members)
        starved = not self._is_device and cpu < busy / 2  # False for NaN
        return Alarm(
            kind=AlarmKind.DATA_IMBALANCE,
            ranks=tuple(members),
            step=step,
            first_step=first_step,
            slowdown=math.expm1(float(chart.scale[row, 0])),
            role=self._names[members[0]],
            peers=len(members) - 1,
            cause=Cause.CPU_STARVED if starved else Cause.UNKNOWN,
            is_actionable=False,
        )

    def _stage_alarms(self, step: int) -> list[Alarm]:
        """Roles whose typical own work differs: the job's layout, not hardware."""
        rows = [(chart, row) for chart in self._charts for row in range(len(chart.members)) if not chart.is_alone]
        if len(rows) < 2 or not all(chart.is_ready for chart, _ in rows):
            return []
        centers = np.concatenate([chart.center for chart in self._charts if not chart.is_alone])
        if self._role_level is None:
            self._role_level = centers.copy()
        self._role_level = np.where(np.isnan(centers), self._role_level, 0.95 * self._role_level + 0.05 * centers)
        out = []
        times = np.exp(self._role_level)
        mean, most = float(times.mean()), float(times.max())
        for index in np.nonzero(times > (1 + self.config.stage_imbalance) * mean)[0].tolist():
            chart, row = rows[index]
            members = [int(r) for r in chart.members[row] if r >= 0]
            name = self._names[members[0]]
            first = self._has_lasted(AlarmKind.STAGE_IMBALANCE, name, step, LONGER * self.config.imbalance_steps)
            if first is None:
                continue
            alarm = Alarm(
                kind=AlarmKind.STAGE_IMBALANCE,
                ranks=tuple(members),
                step=step,
                first_step=first,
                slowdown=float(times[index]) / mean - 1,
                impact=(float(times[index]) - mean) / most,
                role=name,
                peers=self.world_size - len(members),
                is_actionable=False,
            )
            out.append(alarm)
        return out

    # -- alarms that last ----------------------------------------------------------------------------------------------
    def _follow(self, step: int, step_s: float) -> None:
        """New figures for open alarms; those that are over are closed."""
        if not self._open:
            return
        slow = {r for _, r in self._rank_keys()}
        for key, found in list(self._open.items()):
            if key[0] is AlarmKind.NODE:
                continue
            chart, row, column = found.chart, found.row, found.column
            if found.is_over():
                chart.forget(row, column)
                self._close(key, step)
                continue
            impact = self._impact(found, slow, step_s)
            slowdown = found.alarm.slowdown
            if chart is not self._probe_chart:
                level = chart.level[row, column] - (0.0 if chart.is_alone else chart.bias[row, column])
                slowdown = math.expm1(max(0.0, float(level)))
            lost_s = found.alarm.lost_s + impact * step_s
            found.alarm = replace(found.alarm, slowdown=slowdown, impact=impact, lost_s=lost_s)
        self._follow_nodes(step, step_s)

    def _follow_nodes(self, step: int, step_s: float) -> None:
        for key, found in list(self._open.items()):
            if key[0] is not AlarmKind.NODE:
                continue
            parts = [o.alarm for r in found.alarm.ranks if (o := self._open.get((AlarmKind.RANK, r))) is not None]
            if not parts:
                self._close(key, step)
                continue
            impact = max(p.impact for p in parts)
            slowdown = float(np.median([p.slowdown for p in parts]))
            found.alarm = replace(
                found.alarm, impact=impact, slowdown=slowdown, lost_s=found.alarm.lost_s + impact * step_s
            )

    def _impact(self, found: _Open, slow: set[int], step_s: float) -> float:
        """Share of the step that the job would win if this rank were like the slowest that is not under alarm."""
        chart, row, column = found.chart, found.row, found.column
        if chart is self._probe_chart or step_s <= 0 or chart.is_alone:
            return 0.0
        levels = chart.level[row]
        if chart is self._group_chart:
            others = [i for i in range(len(levels)) if i != column]
        else:
            others = [i for i, r in enumerate(chart.members[row]) if r >= 0 and int(r) not in slow]
        if not others:
            return 0.0
        center = float(np.exp(chart.center[row]))
        slowest = float(np.exp(levels[others].max()))
        won_s = center * (float(np.exp(levels[column])) - slowest)
        return min(1.0, max(0.0, won_s / max(step_s, center)))

    def _close(self, key: tuple[Any, ...], step: int) -> None:
        found = self._open.pop(key)
        self._closed.append(replace(found.alarm, over_step=step))

    def dismiss(self, rank: int) -> None:
        """The alarm of *rank* is not wanted: it was never there, and evidence counts from nothing again."""
        found = self._open.pop((AlarmKind.RANK, rank), None)
        if found is not None:
            found.chart.forget(found.row, found.column)

    # -- for readers ---------------------------------------------------------------------------------------------------
    def open_alarms(self) -> list[Alarm]:
        """What is slow now, with present figures; a node's alarm stands for those of its ranks."""
        alarms = [found.alarm for found in self._open.values()]
        covered = {r for a in alarms if a.kind is AlarmKind.NODE for r in a.ranks}
        return [a for a in alarms if a.kind is not AlarmKind.RANK or a.ranks[0] not in covered]

    def take_closed(self) -> list[Alarm]:
        """Alarms that were found to be over since the last call, with ``over_step`` and their last figures."""
        out, self._closed = self._closed, []
        return out

    def transients(self, least: int = 3) -> list[Alarm]:
        """Ranks with bursts of single slow steps, far more than is usual here: reported, never acted on."""
        if self.elapsed_s <= 0:
            return []
        usual = float(np.median(self._bursts))
        found = np.nonzero(self._bursts >= max(least, 4 * usual + least))[0]
        return [
            Alarm(
                kind=AlarmKind.TRANSIENT,
                ranks=(int(rank),),
                step=self.last_step,
                first_step=0,
                slowdown=0.0,
                impact=float(self._burst_lost_s[rank]) / self.elapsed_s,
                lost_s=float(self._burst_lost_s[rank]),
                z=float(self._bursts[rank]) * 3600 / self.elapsed_s,
                role=self._names[int(rank)],
                node=self._node_of.get(int(rank)),
                peers=self.world_size - 1,
                is_actionable=False,
            )
            for rank in found
        ]

    def snapshot(self) -> dict[str, Any]:
        """The state of the charts as plain lists and numbers; open alarms and histories are not in it."""
        return {
            "schema": "steadyrun.straggler-state/1",
            "world_size": self.world_size,
            "elapsed_s": self.elapsed_s,
            "steps": self.steps,
            "charts": [chart.state() for chart in self._charts],
            "probe": self._probe_chart.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """What ``snapshot`` gave, of a job of the same size and roles; evidence goes on where it was.

        Raises:
            ValueError: it is of another job.
        """
        if state.get("world_size") != self.world_size or len(state["charts"]) != len(self._charts):
            raise ValueError(
                f"the state is of {state.get('world_size')} ranks in {len(state['charts'])} charts, "
                f"this job has {self.world_size} in {len(self._charts)}"
            )
        for chart, kept in zip(self._charts, state["charts"], strict=True):
            chart.restore(kept)
        self._probe_chart.restore(state["probe"])
        self.elapsed_s = float(state["elapsed_s"])
        self.steps = int(state["steps"])
