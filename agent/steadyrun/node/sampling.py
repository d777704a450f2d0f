"""Turns what ranks report on the board into journal records: steps, section durations, first steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from steadyrun.core.board import Board, SlotView
from steadyrun.core.clock import Clock
from steadyrun.core.journal import Journal

__all__ = ["Sampler"]

EVERY_S: Final = 5.0  # one record of steps and sections per node and this long
KEEP: Final = 200  # durations per section and record; beyond, n and max still count


@dataclass(slots=True)
class _RankSample:
    durations_seen: int = 0
    steps_seen: int = 0
    had_first_step: bool = False
    step_times_s: list[float] = field(default_factory=list)
    sections: dict[str, list[float]] = field(default_factory=dict)
    lost: int = 0


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
                )
            times_s, mine.steps_seen, _ = self._board.step_times_s(slot, mine.steps_seen)
            mine.step_times_s.extend(round(t, 5) for t in times_s)
            done, mine.durations_seen, lost = self._board.durations(slot, mine.durations_seen)
            mine.lost += lost
            for d in done:
                mine.sections.setdefault(d.name, []).append(round(d.duration_s, 6))
            if view.step is not None:
                self._steps[rank] = view.step
        if now_s >= self._next_s:
            self._next_s = now_s + EVERY_S
            self.flush()

    def flush(self) -> None:
        """Write what was gathered since the last record."""
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
