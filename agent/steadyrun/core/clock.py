"""Monotonic time as a thing that can be passed in."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Where a loop takes its time from; pure code gets ``now_s`` instead."""

    def now_s(self) -> float:
        """Seconds of CLOCK_MONOTONIC: the same on all processes of a node, unrelated to wall time."""
        ...

    def unix_s(self) -> float:
        """Wall time for records; never used for a deadline."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()
