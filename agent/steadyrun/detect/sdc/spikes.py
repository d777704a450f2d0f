"""Whether losses that are out of line stay so, and from where training then goes on. Pure.

The recipe for a loss spike: go back about 100 steps and leave out the batches from there to 20 behind the spike. It is
taken only where the spike is no single value, and where the bytes were compared since, so that it is no rank with wrong
bytes. A norm of gradients counts only where it is not finite: one that is large for some steps need not harm anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from steadyrun.core.guards import NORM, Signal

__all__ = ["AHEAD_STEPS", "BACK_STEPS", "Spike", "SpikeWatch"]

BACK_STEPS: Final = 100
AHEAD_STEPS: Final = 20  # bad batches seldom end with the newest one; after a NaN no loss tells where they end
LASTING: Final = 3  # different steps with values far above what is usual make a spike
LASTING_NOT_FINITE: Final = 2
WITHIN_STEPS: Final = 20
MOST: Final = 3  # of a run: another cause than data is likelier then


@dataclass(frozen=True, slots=True)
class Spike:
    """Values that stay out of line.

    Attributes:
        first, last: steps of the first and the newest one.
        text: what was seen, for people.
    """

    first: int
    last: int
    text: str


@dataclass(slots=True)
class SpikeWatch:
    """Over all attempts of a run, on the leading node."""

    _steps: dict[int, bool] = field(default_factory=dict)  # with signals: whether one was not finite
    _text: str = ""
    cured: int = 0

    def begin_attempt(self) -> None:
        self._steps.clear()

    def heard(self, rank: int, signal: Signal) -> None:
        if signal.what == NORM and signal.value is not None:
            return
        if not self._steps:
            self._text = f"{signal.words()} on rank {rank} after step {signal.step}"
        self._steps[signal.step] = self._steps.get(signal.step, False) or signal.value is None

    def spike(self) -> Spike | None:
        """What stays out of line; None: nothing, or it has gone."""
        if not self._steps or self.cured >= MOST:
            return None
        last = max(self._steps)
        near = sorted(s for s in self._steps if s > last - WITHIN_STEPS)
        for old in [s for s in self._steps if s not in near]:
            del self._steps[old]
        if len(near) >= LASTING or sum(self._steps.values()) >= LASTING_NOT_FINITE:
            return Spike(near[0], last, self._text)
        return None

    def target(self, spike: Spike, verified: Iterable[int]) -> int | None:
        """Of the steps of *verified* checkpoints that which is nearest to 100 steps before the spike; None without."""
        before = [s for s in verified if s < spike.first]
        wanted = spike.first - BACK_STEPS
        return min(before, key=lambda s: (abs(s - wanted), s), default=None)

    def went_back(self) -> None:
        self.cured += 1
        self._steps.clear()
