"""Turns what ranks report on the board into journal records: steps, section durations, first steps, step timings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from steadyrun.core.board import Board, OpenSection, SectionDuration, SlotView
from steadyrun.core.clock import Clock
from steadyrun.core.journal import Journal
from steadyrun.core.layout import RING, STEP_RING, TIMING_RING
from steadyrun.core.timing import StepTiming
from steadyrun.node.gathered import Gathered

__all__ = ["RingsRead", "Sampler", "look_period_s", "timing_columns"]

EVERY_S: Final = 5.0  # one record of steps and sections per node and this long
KEEP_TIMINGS: Final = 10  # of a rank in a record: 100 MB a day for 8 ranks, whatever a step takes
MOST_TIMINGS: Final = 4096  # of a rank, that wait to be taken
RING_SHARE: Final = 0.5  # of the ring that fills fastest may be new at a look
LOOK_STEPS: Final = 16  # of the quickest rank may be new at a look: who is slow is to be named within 60 steps
SEEN_OPEN_S: Final = 0.25  # a section that was seen open for so long is not missed
COLUMNS: Final = (
    "wall_s", "busy_s", "forward_s", "backward_s", "optimizer_s", "data_s", "checkpoint_s", "wait_s", "cpu_s",
    "starved_s", "probe_s", "work", "flags", "group_wait_s",
)  # fmt: skip


def look_period_s(rings_per_s: float, steps_per_s: float) -> float:
    """How long the board may be left alone where so many rings are filled and so many steps are done in a second."""
    return min(RING_SHARE / max(rings_per_s, 1e-3), LOOK_STEPS / max(steps_per_s, 1e-3))


@dataclass(frozen=True, slots=True)
class RingsRead:
    """What one look has read anew from a rank's rings, in order."""

    step_times_s: Sequence[float] = ()
    sections: Sequence[SectionDuration] = ()
    timings: Sequence[StepTiming] = ()


@dataclass(slots=True)
class _RankSample:
    durations_seen: int = 0
    steps_seen: int = 0
    had_first_step: bool = False
    newest_at_s: float | None = None  # when the newest of those steps was done
    steps: Gathered = field(default_factory=lambda: Gathered(5))
    sections: dict[str, Gathered] = field(default_factory=dict)
    were_open: dict[OpenSection, float] = field(default_factory=dict)  # for how long, at the last look
    lost: int = 0
    timings_seen: int = 0
    timings: list[StepTiming] = field(default_factory=list)  # since the last record
    untaken: list[StepTiming] = field(default_factory=list)
    timings_lost: int = 0


class Sampler:
    """Drains the rings of all slots often enough and writes one compact record per node every few seconds.

    Attributes:
        period_s: until the next look, at the pace between the last two.
    """

    def __init__(self, board: Board, journal: Journal, clock: Clock, node: str) -> None:
        self._board, self._journal, self._clock, self._node = board, journal, clock, node
        self._ranks: dict[int, _RankSample] = {}
        self._attempt = 0
        self._next_s = 0.0
        self._sampled_s = 0.0
        self._steps: dict[int, int] = {}
        self.period_s = look_period_s(0.0, 0.0)

    def begin_attempt(self, attempt: int) -> None:
        """What was gathered belongs to the old attempt: write it, then start afresh."""
        self.flush()
        self._ranks.clear()
        self._steps.clear()
        self._attempt = attempt

    def sample(self, now_s: float, views: Mapping[int, tuple[int, SlotView | None]]) -> dict[int, RingsRead]:
        """*views*: slot -> (rank, view). Returns what was read, by rank: rings are read once, for whoever needs it."""
        read = {}
        filled, steps = 0.0, 0
        for slot, (rank, view) in views.items():
            if view is None:
                continue
            mine = self._ranks.setdefault(rank, _RankSample())
            if not mine.had_first_step and view.first_step_s is not None:
                mine.had_first_step = True
                self._journal.write(
                    "rank_first_step",
                    self._clock.unix_s() - (now_s - view.first_step_s),
                    view.first_step_s,
                    self._attempt,
                    rank=rank,
                    step=(view.step or 0) - max(view.steps_done - 1, 0),
                    is_global=view.step_is_global,
                )
            times_s = self._sample_steps(slot, mine, view)
            sections = self._sample_sections(slot, mine, view, now_s)
            timings, mine.timings_seen, lost = self._board.timings(slot, mine.timings_seen)
            mine.timings_lost += lost
            mine.timings.extend(timings)
            mine.untaken.extend(timings)
            read[rank] = RingsRead(times_s, sections, timings)
            steps = max(steps, len(times_s))
            filled = max(filled, len(times_s) / STEP_RING, len(sections) / RING, len(timings) / TIMING_RING)
            if view.step is not None:
                self._steps[rank] = view.step
        between_s = max(now_s - self._sampled_s, 1e-3)
        self.period_s = look_period_s(filled / between_s, steps / between_s)
        self._sampled_s = now_s
        if now_s >= self._next_s:
            self._next_s = now_s + EVERY_S
            self.flush()
        return read

    def _sample_steps(self, slot: int, mine: _RankSample, view: SlotView) -> list[float]:
        times_s, count, lost = self._board.step_times_s(slot, mine.steps_seen)
        newer = count - max(view.steps_done - 1, 0)  # steps that were done since the view was taken
        newest_at_s = None
        if view.step_at_s is not None and 0 <= newer <= len(times_s):
            newest_at_s = view.step_at_s + sum(times_s[len(times_s) - newer :])
        if lost and times_s:
            # They were overwritten unread, yet lie between two steps whose times are known.
            usual_s = statistics.median(times_s)
            total_s = lost * usual_s
            since_s = mine.newest_at_s if mine.steps_seen else view.first_step_s
            if newest_at_s is not None and since_s is not None:
                total_s = max(0.0, newest_at_s - since_s - sum(times_s))
            mine.steps.add_unread(lost, total_s, usual_s)
            mine.lost += lost
        for seconds in times_s:
            mine.steps.add(seconds)
        mine.steps_seen, mine.newest_at_s = count, newest_at_s
        return times_s

    def _sample_sections(self, slot: int, mine: _RankSample, view: SlotView, now_s: float) -> list[SectionDuration]:
        done, mine.durations_seen, lost = self._board.durations(slot, mine.durations_seen)
        mine.lost += lost
        if lost:
            # Long ones were seen open: of such a section nothing shorter than that may be all that is known.
            for section, for_s in mine.were_open.items():
                is_told = any(d.name == section.name and d.duration_s >= for_s for d in done)
                if for_s >= SEEN_OPEN_S and section not in view.sections and not is_told:
                    mine.sections.setdefault(section.name, Gathered(6)).add(for_s)
        for d in done:
            mine.sections.setdefault(d.name, Gathered(6)).add(d.duration_s)
        mine.were_open = {section: now_s - section.since_s for section in view.sections}
        return done

    def take_timings(self) -> dict[int, list[StepTiming]]:
        """Step timings of this attempt's ranks since the last call."""
        out = {rank: s.untaken for rank, s in self._ranks.items() if s.untaken}
        for rank in out:
            self._ranks[rank].untaken = []
        return out

    def flush(self) -> None:
        """Write what was gathered since the last record."""
        self._flush_steps()
        self._flush_timings()

    def _flush_steps(self) -> None:
        ranks = {}
        for rank, s in self._ranks.items():
            if not (s.steps.n or s.sections):
                continue
            told = s.steps.told()
            ranks[str(rank)] = {
                "step": self._steps.get(rank),
                "step_times_s": told.pop("listed_s"),
                "steps": s.steps.n,
                **told,
                "sections": {n: _section_told(d) for n, d in s.sections.items()},
                "lost": s.lost,
            }
            s.steps, s.sections, s.lost = Gathered(5), {}, 0
        if ranks:
            self._journal.write("steps", self._clock.unix_s(), self._clock.now_s(), self._attempt, ranks=ranks)

    def _flush_timings(self) -> None:
        stride = 1
        while any(len(s.timings) > KEEP_TIMINGS * stride for s in self._ranks.values()):
            stride *= 2  # steps that every node keeps, whatever its own stride
        ranks = {}
        for rank, s in self._ranks.items():
            kept = [t for t in s.timings if t.step % stride == 0 or t.probe_s is not None]
            if kept:
                ranks[str(rank)] = timing_columns(kept)
            s.timings = []
            del s.untaken[:-MOST_TIMINGS]
        lost = sum(s.timings_lost for s in self._ranks.values())
        for s in self._ranks.values():
            s.timings_lost = 0
        if ranks:
            self._journal.write(
                "timings",
                self._clock.unix_s(),
                self._clock.now_s(),
                self._attempt,
                every=stride,
                lost=lost,
                ranks=ranks,
            )


def _section_told(durations: Gathered) -> dict[str, Any]:
    told = durations.told()
    return {"n": durations.n, "max_s": round(durations.max_s, 6), "durations_s": told.pop("listed_s"), **told}


def timing_columns(timings: Sequence[StepTiming]) -> dict[str, list[Any]]:
    """One list per column, to 10 us; a column that says nothing (all 0, or all unknown) is left out."""
    out: dict[str, list[Any]] = {"step": [t.step for t in timings]}
    for name in COLUMNS:
        values = [getattr(t, name) for t in timings]
        if any(values):
            out[name] = [v if v is None or isinstance(v, int) else round(v, 5) for v in values]
    return out
