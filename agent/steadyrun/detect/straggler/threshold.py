"""How high a CUSUM must climb so that noise alone seldom gets there."""

from __future__ import annotations

import functools
import math
from typing import Final

import numpy as np

from steadyrun.detect.straggler.records import Floats

__all__ = ["ThresholdTable", "run_length", "threshold"]

OVERSHOOT: Final = 1.166  # Siegmund's correction for the step over the boundary
POINTS: Final = 240
LOWEST, HIGHEST = 0.05, 10.0


def run_length(reference: float, height: float) -> float:
    """Mean number of steps until a one-sided CUSUM of standard normal noise exceeds *height* (Siegmund, 1985)."""
    a = 2 * reference * (height + OVERSHOOT)
    return math.inf if a > 700 else (math.expm1(a) - a) / (2 * reference * reference)


def threshold(reference: float, steps: float) -> float:
    """The height whose mean run length is *steps*."""
    low, high = 0.0, 1.0
    while run_length(reference, high) < steps:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if run_length(reference, middle) < steps:
            low = middle
        else:
            high = middle
    return high


class ThresholdTable:
    """``threshold`` for whole arrays of references, interpolated; within 0.01 of it."""

    def __init__(self, steps: float) -> None:
        self._logs, self._heights = _points(steps)

    def __call__(self, references: Floats) -> Floats:
        """Heights of *references*; outside 0.05 to 10 that of the nearest end."""
        out: Floats = np.interp(np.log(references), self._logs, self._heights)
        return out


@functools.lru_cache(maxsize=8)
def _points(steps: float) -> tuple[Floats, Floats]:
    """Logarithms of references and their heights; 20 ms to compute, and the same for each chart of a job."""
    logs = np.linspace(math.log(LOWEST), math.log(HIGHEST), POINTS)
    return logs, np.array([threshold(math.exp(v), steps) for v in logs])
