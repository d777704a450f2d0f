"""What a journal record keeps of durations that may be many: the newest one by one, of the others the longest."""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from typing import Any, Final

__all__ = ["KEEP", "LONGEST", "Gathered"]

KEEP: Final = 200  # newest durations of a record, in order
LONGEST: Final = 32  # of those before them, with their place
_UNUSUAL: Final = 1.5  # medians of the newest; what is shorter stands in the sum alone


class Gathered:
    """Durations of one kind since the last record, in little memory however many they are.

    A *place* is the number of durations of the record that came before.

    Attributes:
        n: durations, those included that nobody has read one by one.
        max_s: the longest.
    """

    __slots__ = ("_digits", "_left_s", "_longest", "_newest", "max_s", "n")

    def __init__(self, digits: int) -> None:
        self._digits = digits
        self._newest: deque[float] = deque()
        self._longest: list[tuple[float, int]] = []  # a heap of (seconds, place)
        self._left_s = 0.0
        self.n = 0
        self.max_s = 0.0

    def add(self, seconds: float) -> None:
        self._newest.append(seconds)
        self.n += 1
        self.max_s = max(self.max_s, seconds)
        if len(self._newest) > KEEP:
            self._leave(self._newest.popleft(), self.n - KEEP - 1)

    def add_unread(self, count: int, total_s: float, usual_s: float) -> None:
        """*count* durations whose sum alone is known: all but one of them are taken to be as usual."""
        while self._newest:
            self._leave(self._newest.popleft(), self.n - len(self._newest) - 1)
        one_s = max(0.0, total_s - (count - 1) * usual_s)
        self._leave(one_s, self.n)
        self._left_s += max(0.0, total_s - one_s)
        self.max_s = max(self.max_s, one_s)
        self.n += count

    def told(self) -> dict[str, Any]:
        """For a record: ``listed_s``; where there were more, ``longest`` as [place, seconds] and the others' sum."""
        digits = self._digits
        listed_s = [round(s, digits) for s in self._newest]
        if self.n == len(listed_s):
            return {"listed_s": listed_s}
        least_s = _UNUSUAL * statistics.median(self._newest) if self._newest else 0.0
        most_s = max(self._longest)[0]
        longest = sorted((place, s) for s, place in self._longest if s >= min(least_s, most_s))
        return {
            "listed_s": listed_s,
            "longest": [[place, self._rounded(s)] for place, s in longest],
            "left_out_s": self._rounded(max(0.0, self._left_s - sum(s for _, s in longest))),
        }

    def _leave(self, seconds: float, place: int) -> None:
        self._left_s += seconds
        if len(self._longest) < LONGEST:
            heapq.heappush(self._longest, (seconds, place))
        elif seconds > self._longest[0][0]:
            heapq.heapreplace(self._longest, (seconds, place))

    def _rounded(self, seconds: float) -> float:
        return round(seconds, self._digits)
