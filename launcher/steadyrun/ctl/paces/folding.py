"""Many ranks and steps in few cells."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from steadyrun.detect.straggler import HeatMap
from steadyrun.detect.straggler.records import Floats

__all__ = ["LEVELS", "Picture", "level", "picture"]

LEVELS: Final = (0.025, 0.05, 0.1, 0.2, 0.4)  # shares of more work than peers at which a cell looks different


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Cells [rows, columns]; a row is a range of ranks, and shows the rank that stands out most in each column.

    Attributes:
        busy: own work above that of peers, as a share; wait_s: the shortest time waited in the row, as who is waited
            for waits least. NaN where unknown.
    """

    rows: tuple[tuple[int, int], ...]
    first_steps: tuple[int, ...]
    last_step: int
    busy: Floats
    wait_s: Floats

    def row_name(self, index: int) -> str:
        first, last = self.rows[index]
        return str(first) if first == last else f"{first}-{last}"


def picture(heat: HeatMap, most_rows: int, most_columns: int) -> Picture:
    """*heat* folded: neighbouring columns are averaged, neighbouring ranks joined."""
    columns, ranks = heat.busy.shape
    per_column = max(1, math.ceil(columns / most_columns))
    per_row = max(1, math.ceil(ranks / most_rows))
    at_columns = range(0, columns, per_column)
    at_rows = range(0, ranks, per_row)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # cells of which nothing is known stay NaN
        busy = _averaged(heat.busy, at_columns, per_column)
        wait = _averaged(heat.wait_s, at_columns, per_column)
        rows = [slice(r, r + per_row) for r in at_rows]
        folded_busy = np.array([np.nanmax(busy[:, r], axis=1) for r in rows])
        folded_wait = np.array([np.nanmin(wait[:, r], axis=1) for r in rows])
    steps = heat.first_steps
    width = steps[-1] - steps[-2] if len(steps) > 1 else 1
    return Picture(
        rows=tuple((r, min(r + per_row, ranks) - 1) for r in at_rows),
        first_steps=tuple(steps[c] for c in at_columns),
        last_step=steps[-1] + max(width, 1) - 1 if steps else 0,
        busy=folded_busy.reshape(len(rows), len(at_columns)),
        wait_s=folded_wait.reshape(len(rows), len(at_columns)),
    )


def _averaged(values: Floats, starts: Sequence[int], count: int) -> Floats:
    parts = [np.nanmean(values[c : c + count], axis=0) for c in starts]
    return np.array(parts) if parts else values


def level(share: float) -> int | None:
    """Which of the ``LEVELS`` are reached; None where nothing is known."""
    return None if math.isnan(share) else sum(share >= least for least in LEVELS)
