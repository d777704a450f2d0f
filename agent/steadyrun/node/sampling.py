"""Turns what ranks report on the board into journal records: steps, section durations, first steps, step timings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from steadyrun.core.board import Board, SlotView
from steadyrun.core.clock import Clock
from steadyrun.core.journal import Journal
from steadyrun.core.timing import StepTiming

__all__ = ["Sampler", "timing_columns"]

EVERY_S: Final = 5.0  # one record of steps and sections per node and this long
KEEP: Final = 200  # durations per section and record; beyond, n and max still count
KEEP_TIMINGS: Final = 10  # of a rank in a record: 100 MB a day for 8 ranks, whatever a step takes
MOST_TIMINGS: Final = 4096  # of a rank, that wait to be taken
COLUMNS: Final = (
    "wall_s", "busy_s", "forward_s", "backward_s", "optimizer_s", "data_s", "checkpoint_s", "wait_s", "cpu_s",
    "starved_s", "probe_s", "work", "flags",
)  # fmt: skip


@dataclass(slots=True)
class _RankSample:
    durations_seen: int = 0
    steps_seen: int = 0
    had_first_step: bool = False
    step_times_s: list[float] = field(default_factory=list)
    sections: dict[str, list[float]] = field(default_factory=dict)
    lost: int = 0
    timings_seen: int = 0
    timings: list[StepTiming] = field(default_factory=list)  # since the last record
    untaken: list[StepTiming] = field(default_factory=list)
    timings_lost: int = 0


class Sampler:
    """Drains the rings of all slots often enough and writes one compact record per node every few seconds."""

    def __init__(self, board: Board, journal: Journal, clock: Clock, node: str) -> None:
        self._board, self._journal, self._clock, self._node = board, journal, clock, node
        self._ranks: dict[int, _RankSample] = {}
        self._attempt = 0
        self._next_s = 0.0
        self._steps: dict[int, int] = {}

    def begin_attempt(self, attempt: int) -> None:
        """What was gathered belongs to the old attempt: write it, then start afresh."""
        self.flush()
        self._ranks.clear()
        self._steps.clear()
        self._attempt = attempt

    def sample(self, now_s: float, views: Mapping[int, tuple[int, SlotView | None]]) -> None:
        """*views*: slot -> (rank, view)."""
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
            times_s, mine.steps_seen, _ = self._board.step_times_s(slot, mine.steps_seen)
            mine.step_times_s.extend(round(t, 5) for t in times_s)
            done, mine.durations_seen, lost = self._board.durations(slot, mine.durations_seen)
            mine.lost += lost
            for d in done:
                mine.sections.setdefault(d.name, []).append(round(d.duration_s, 6))
            timings, mine.timings_seen, lost = self._board.timings(slot, mine.timings_seen)
            mine.timings_lost += lost
            mine.timings.extend(timings)
            mine.untaken.extend(timings)
            if view.step is not None:
                self._steps[rank] = view.step
        if now_s >= self._next_s:
            self._next_s = now_s + EVERY_S
            self.flush()

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
            if not (s.step_times_s or s.sections):
                continue
            ranks[str(rank)] = {
                "step": self._steps.get(rank),
                "step_times_s": s.step_times_s[-KEEP:],
                "steps": len(s.step_times_s),
                "sections": {
                    n: {"n": len(d), "max_s": max(d), "durations_s": d[-KEEP:]} for n, d in s.sections.items()
                },
                "lost": s.lost,
            }
            s.step_times_s, s.sections, s.lost = [], {}, 0
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


def timing_columns(timings: Sequence[StepTiming]) -> dict[str, list[Any]]:
    """One list per column, to 10 us; a column that says nothing (all 0, or all unknown) is left out."""
    out: dict[str, list[Any]] = {"step": [t.step for t in timings]}
    for name in COLUMNS:
        values = [getattr(t, name) for t in timings]
        if any(values):
            out[name] = [v if v is None or isinstance(v, int) else round(v, 5) for v in values]
    return out
