"""The leading agent's judgement of paces: rows of all nodes in; who is slow, and who no longer is, out. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from typing import Any, Final

import numpy as np

from steadyrun.core.timing import Role
from steadyrun.detect.straggler import (
    Alarm,
    AlarmKind,
    PaceWatch,
    StepAlignment,
    StepFrame,
    StragglerConfig,
    TimingBlock,
)
from steadyrun.node.timingwire import NodeFacts, RankFacts

__all__ = ["PaceEvent", "PaceJudge", "PaceNews", "replicas_of"]

HELD_FRAMES: Final = 8  # before the first is judged: they tell how long a step is
BUDGET_S: Final = 0.02  # of CPU time in one call, so that the loop comes back to what is urgent
MOST_WAITING: Final = 64  # frames that may wait for a later call; beyond, every second one is left out
STEPS_TIMED: Final = 4096  # newest steps of which it is known when they were


class PaceNews(str, Enum):
    BEGAN = "began"
    ENDED = "ended"
    LASTS = "lasts"  # it was there when the attempt, or what it was compared with, ended
    BURSTS = "bursts"  # at the end: single slow steps now and then


@dataclass(frozen=True, slots=True)
class PaceEvent:
    """One thing to tell; *since_unix_s* is when the alarm's first step was, None where that is not known."""

    news: PaceNews
    alarm: Alarm
    since_unix_s: float | None = None


class PaceJudge:
    """One attempt of a job. Not thread-safe.

    Attributes:
        judged: steps that were compared.
        skipped: steps that were left out as they came faster than they can be judged.
    """

    def __init__(self, world_size: int, patience_s: float = 5.0, cpu_s: Callable[[], float] = time.thread_time) -> None:
        """
        Args:
            patience_s: how long a step waits for ranks that have not told it.
            cpu_s: CPU time of this thread.
        """
        self.world_size = world_size
        self.judged = 0
        self.skipped = 0
        self._cpu_s = cpu_s
        self._alignment = StepAlignment(world_size, patience_s)
        self._waiting: deque[StepFrame] = deque()
        self._watch: PaceWatch | None = None
        self._facts: dict[int, RankFacts] = {}
        self._nodes: dict[int, str] = {}
        self._has_begun = False
        self._at_unix_s: dict[int, float] = {}
        self._told: dict[tuple[Any, ...], Alarm] = {}  # as they were when they began
        self._cut_short: list[PaceEvent] = []

    # -- in ------------------------------------------------------------------------------------------------------------
    def introduce(self, *nodes: NodeFacts) -> None:
        """Who the ranks of *nodes* are. Where roles or places change, what was learned so far counts no more."""
        is_new = False
        for node in nodes:
            for facts in node.ranks:
                rank = facts.rank
                if not 0 <= rank < self.world_size:
                    continue
                before = self._facts.get(rank)
                is_new |= self._nodes.get(rank) != node.node or before is None
                is_new |= before is not None and (before.role, before.replica) != (facts.role, facts.replica)
                self._facts[rank], self._nodes[rank] = facts, node.node
        if is_new and self._watch is not None:
            self._cut_short += [self._event(PaceNews.LASTS, a) for a in self.open_alarms()]
            self._watch = None

    def add(self, rows: bytes, now_s: float) -> None:
        """Rows as ``TimingBlock.of_bytes`` reads them.

        Raises:
            ValueError: *rows* ends within a row.
        """
        self._alignment.add(TimingBlock.of_bytes(rows), now_s)

    # -- what is known -------------------------------------------------------------------------------------------------
    @property
    def roles(self) -> Mapping[int, Role] | None:
        """None where no rank has said what it is: then all are comparable."""
        found = {r: f.role for r, f in self._facts.items() if f.role is not None}
        return found or None

    @property
    def nodes(self) -> Mapping[int, str]:
        return self._nodes

    def facts_of(self, rank: int) -> RankFacts | None:
        return self._facts.get(rank)

    def open_alarms(self) -> list[Alarm]:
        """What is slow now, with present figures."""
        return [a for a in self._watch.open_alarms() if a.key in self._told] if self._watch is not None else []

    # -- judging -------------------------------------------------------------------------------------------------------
    def judge(self, now_s: float, unix_s: float) -> list[PaceEvent]:
        """What the steps that are complete by now have shown."""
        self._take_ready(now_s, unix_s)
        if not self._has_begun and len(self._waiting) < HELD_FRAMES:
            return []
        self._has_begun = True
        until_s = self._cpu_s() + BUDGET_S
        out, self._cut_short = self._cut_short, []
        while self._waiting:
            out += self._judge_one(self._waiting.popleft())
            if self._cpu_s() >= until_s:
                break
        if len(self._waiting) > MOST_WAITING:
            kept = list(self._waiting)[::2]
            self.skipped += len(self._waiting) - len(kept)
            self._waiting = deque(kept)
        return out

    def finish(self, now_s: float, unix_s: float) -> list[PaceEvent]:
        """The same for all that has come, complete or not; and what lasts. The attempt is over."""
        self._take_ready(inf, unix_s)
        out, self._cut_short = self._cut_short, []
        out += [event for frame in self._waiting for event in self._judge_one(frame)]
        self._waiting.clear()
        out += [self._event(PaceNews.LASTS, a) for a in self.open_alarms()]
        if self._watch is not None:
            out += [self._event(PaceNews.BURSTS, a) for a in self._watch.transients()]
        return out

    def _take_ready(self, now_s: float, unix_s: float) -> None:
        for frame in self._alignment.ready(now_s):
            self._waiting.append(frame)
            self._at_unix_s[frame.step] = unix_s
        while len(self._at_unix_s) > STEPS_TIMED:
            del self._at_unix_s[next(iter(self._at_unix_s))]

    def _judge_one(self, frame: StepFrame) -> list[PaceEvent]:
        if self._watch is None:
            self._watch = PaceWatch(
                self._config(frame),
                self.roles,
                self.world_size,
                nodes=self._nodes,
                groups=replicas_of({r: f.replica for r, f in self._facts.items()}),
            )
        self.judged += 1
        began = self._watch.take(frame)
        now = {a.key: a for a in self._watch.open_alarms()} if began else {}
        # What the job loses by it is known once it counts as open.
        began = [replace(a, impact=o.impact, lost_s=o.lost_s) if (o := now.get(a.key)) else a for a in began]
        self._told.update((a.key, a) for a in began)
        ended = [
            replace(a, slowdown=was.slowdown, impact=was.impact)  # at its end it is no longer slow
            for a in self._watch.take_closed()
            if (was := self._told.get(a.key)) is not None  # a slow node's ranks have no alarms of their own
        ]
        return [self._event(PaceNews.BEGAN, a) for a in began] + [self._event(PaceNews.ENDED, a) for a in ended]

    def _config(self, frame: StepFrame) -> StragglerConfig:
        """Fewer false alarms per step for a job that does many of them in a week."""
        walls = [f.details.wall_s for f in (frame, *self._waiting) if f.details.wall_s is not None]
        known = np.concatenate(walls) if walls else np.zeros(0)
        known = known[known > 0]
        step_s = float(np.median(known)) if len(known) else 1.0
        return StragglerConfig().for_run(self.world_size, step_s)

    def _event(self, news: PaceNews, alarm: Alarm) -> PaceEvent:
        since = None if alarm.kind is AlarmKind.TRANSIENT else self._at_unix_s.get(alarm.first_step)
        return PaceEvent(news, alarm, since)


def replicas_of(names: Mapping[int, str]) -> Mapping[str, Sequence[int]]:
    """Ranks of each data-parallel replica, by what each says of its own (empty: nothing).

    None where there is but one, or where each is a single rank, which is compared with the others anyway.
    """
    found: dict[str, list[int]] = {}
    for rank, name in sorted(names.items()):
        if name:
            found.setdefault(name, []).append(rank)
    return found if len(found) > 1 and min(map(len, found.values())) > 1 else {}
