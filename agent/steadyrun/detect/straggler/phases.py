"""Which part of a slow rank's step grew, and whether it worked or stood still in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from steadyrun.detect.straggler.records import PHASES, Cause, Floats, StepDetails

__all__ = ["Explanation", "History", "explain", "onset"]

COLUMNS: Final = ("busy", "cpu", *PHASES)
KEPT: Final = 128  # steps of the ring
NEWEST: Final = 64  # of these at most count on each side of the beginning
ENOUGH_BEFORE: Final = 5
ENOUGH_AT_END: Final = 15
BEYOND: Final = 3.0  # scales, or typical sizes
MATTERS: Final = 0.05  # share of a step from which a phase must have grown for everything to have grown
IN_PROPORTION: Final = 0.4  # of the whole slowdown
MOST: Final = 0.5  # of the extra time in one phase makes it that phase's
SPREAD_OUT: Final = 0.8  # below this in one phase, time without running is starvation, not a wait in that phase
RAN: Final = 0.5  # of the extra time was CPU time: it worked
TRIMMED: Final = 0.1  # of the steps at either end
USES_CPU: Final = 0.5  # of peers' own work is CPU time: below, CPU times say nothing


@dataclass(frozen=True, slots=True)
class Explanation:
    """The phase, the share of the extra time in each, and why; ``phase`` is None when all grew, or none is known."""

    phase: str | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    cause: Cause = Cause.UNKNOWN


class History:
    """The newest steps of all ranks: own work, CPU time and phases. A ring of fixed size."""

    def __init__(self, ranks: int) -> None:
        self._rows: NDArray[np.float32] = np.full((KEPT, len(COLUMNS), ranks), np.nan, np.float32)
        self._steps = np.full(KEPT, -1, np.int64)
        self._next = 0

    def push(self, step: int, busy_s: Floats, details: StepDetails) -> None:
        row = self._rows[self._next]
        row[0] = busy_s
        for index, values in enumerate(
            (details.cpu_s, details.forward_s, details.backward_s, details.optimizer_s, details.data_s), start=1
        ):
            row[index] = np.nan if values is None else values
        self._steps[self._next] = step
        self._next = (self._next + 1) % KEPT

    def split(self, first_step: int, ranks: Sequence[int]) -> tuple[Floats, Floats]:
        """Steps before *first_step* and from it on, the newest 64 of each, [steps, columns, ranks]."""
        order = np.roll(np.arange(KEPT), -self._next)
        steps = self._steps[order]
        before = order[(steps >= 0) & (steps < first_step)][-NEWEST:]
        since = order[steps >= first_step][-NEWEST:]
        at = np.asarray(ranks, dtype=np.intp)
        return self._rows[before][:, :, at], self._rows[since][:, :, at]

    @property
    def oldest_step(self) -> int:
        """The first step that is still kept; -1 with none."""
        kept = self._steps[self._steps >= 0]
        return int(kept.min()) if len(kept) else -1

    def busy_since(self, first_step: int, ranks: Sequence[int]) -> tuple[NDArray[np.int64], Floats]:
        """Steps from *first_step* on, in order, and own work in them, [steps, ranks]."""
        order = np.roll(np.arange(KEPT), -self._next)
        order = order[self._steps[order] >= max(first_step, 0)]
        return self._steps[order], self._rows[order, 0][:, np.asarray(ranks, dtype=np.intp)]

    def scatters(self, ranks: Sequence[int]) -> tuple[float, float]:
        """Typical deviation from peers of own work and of CPU time, as shares; NaN where unknown."""
        _, rows = self.split(0, ranks)
        if not len(rows):
            return np.nan, np.nan
        return _scatter(rows[:, 0]), _scatter(rows[:, 1])


def _scatter(rows: Floats) -> float:
    """Median relative deviation from the step's median, of [steps, ranks]."""
    rows = rows[~np.isnan(rows).any(axis=1)]
    if not len(rows):
        return np.nan
    middle = np.median(rows, axis=1, keepdims=True)
    return float(np.median(np.abs(rows - middle) / np.maximum(middle, 1e-9)))


def explain(history: History, rank: int, peers: Sequence[int], first_step: int, is_device: bool = False) -> Explanation:
    """What the extra time of *rank* since *first_step* is.

    Args:
        peers: comparable ranks, without those under suspicion; empty: the rank's own past alone.
        is_device: times are the device's; CPU times say nothing of them.
    """
    before, since = history.split(first_step, [rank, *peers])
    if not len(since) or (len(before) < ENOUGH_BEFORE and not peers):
        return Explanation()
    grown = _mean(_over_peers(since))
    if len(before) >= ENOUGH_BEFORE:
        grown = grown - np.nan_to_num(_mean(_over_peers(before)))
    reference = since[:, :, 1:] if peers else before
    typical = _mean(reference.transpose(0, 2, 1).reshape(-1, len(COLUMNS)))
    extra, usual = grown[2:], typical[2:]
    positive = np.nan_to_num(np.maximum(extra, 0.0))
    total = float(positive.sum())
    if total <= 0 or not np.isfinite(usual[:2]).all():
        return Explanation()
    shares = {name: float(v) / total for name, v in zip(PHASES, positive, strict=True) if v > 0}
    top = max(shares, key=lambda name: shares[name])
    ran = _ran(grown, typical) if not is_device else None
    if _is_whole(extra, usual):
        return Explanation(None, shares, Cause.CPU_STARVED if ran is not None and ran < RAN else Cause.WHOLE)
    if ran is not None and ran < RAN and shares[top] < SPREAD_OUT:
        return Explanation(None, shares, Cause.CPU_STARVED)
    if shares[top] < MOST:
        return Explanation(None, shares, Cause.UNKNOWN)
    if ran is None:
        return Explanation(top, shares, Cause.UNKNOWN)
    return Explanation(top, shares, Cause.WORKING if ran >= RAN else Cause.WAITING)


def onset(
    history: History, rank: int, peers: Sequence[int], first_step: int, bias: float, scale: float
) -> tuple[int, float, float] | None:
    """When *rank* became slow, not before *first_step*: (step, how many since, mean of its logarithm over its peers').

    A cumulative sum says when it was last zero, which noise may have moved it away from long before the fault. Of all
    steps since, the likeliest is the one from which the sum of what it takes longer is largest for its length.

    Returns:
        None where too few of these steps are kept, or not all.
    """
    steps, busy = history.busy_since(first_step, [rank, *peers])
    known = (busy > 0).all(axis=1)
    steps, busy = steps[known], busy[known]
    if len(steps) < ENOUGH_BEFORE or not peers or history.oldest_step > first_step:
        return None
    logs = np.log(busy.astype(np.float64))
    over = logs[:, 0] - np.median(logs[:, 1:], axis=1) - bias
    # Single steps that are longer by much more say nothing of when it began.
    limit = BEYOND * max(scale, float(np.median(over[-ENOUGH_AT_END:])))
    over = np.clip(over, -limit, limit)
    counts = np.arange(len(over), 0, -1)
    sums = np.cumsum(over[::-1])[::-1]
    likely = np.where(counts >= ENOUGH_BEFORE, np.maximum(sums, 0.0) ** 2 / counts, -1.0)
    at = int(np.argmax(likely))
    return int(steps[at]), float(counts[at]), float(sums[at] / counts[at])


def _over_peers(rows: Floats) -> Floats:
    """What the first rank takes more than the median of the others, [steps, columns]; alone, what it takes."""
    if rows.shape[2] == 1:
        return rows[:, :, 0]
    others = rows[:, :, 1:]
    if np.isnan(others).any():
        known = ~np.isnan(others)
        filled = np.where(known.any(axis=2, keepdims=True), others, 0.0)
        middle: Floats = np.nanmedian(filled, axis=2)
    else:
        middle = np.median(others, axis=2)
    out: Floats = rows[:, :, 0] - middle
    return out


def _mean(rows: Floats) -> Floats:
    """Column means without NaN, and without the smallest and largest tenth; NaN where a column has nothing else.

    On a machine that others use, single steps are longer by many times what a slow rank has more in each.
    """
    ordered = np.sort(rows, axis=0)  # NaN last
    counts = (~np.isnan(rows)).sum(axis=0)
    cut = (TRIMMED * counts).astype(np.intp)
    at = np.arange(len(rows))[:, None]
    kept = (at >= cut) & (at < counts - cut)
    sums = np.where(kept, ordered, 0.0).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(kept.sum(axis=0), 1), np.nan)


def _is_whole(extra: Floats, usual: Floats) -> bool:
    """All of forward, backward and optimizer that matter have grown in proportion, and make up most of the extra."""
    if np.nansum(extra[:3]) < MOST * np.nansum(np.maximum(extra, 0.0)):
        return False
    extra, usual = extra[:3], usual[:3]
    matters = np.isfinite(usual) & np.isfinite(extra) & (usual >= MATTERS * np.nansum(usual))
    if matters.sum() < 2:
        return False
    growth = extra[matters] / usual[matters]
    overall = extra[matters].sum() / usual[matters].sum()
    return bool((growth >= IN_PROPORTION * overall).all() and overall > 0)


def _ran(grown: Floats, typical: Floats) -> float | None:
    """Share of the extra time in which it ran; None where CPU times say nothing."""
    if not np.isfinite(grown[:2]).all() or not np.isfinite(typical[:2]).all():
        return None
    if typical[1] < USES_CPU * typical[0] or grown[0] <= 0:
        return None
    return float(grown[1] / grown[0])
