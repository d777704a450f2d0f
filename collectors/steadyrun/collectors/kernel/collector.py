"""The kernel log as a collector: what of its events still stands, and the events themselves for whoever keeps them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from steadyrun.collectors.kernel.events import KernelEvent
from steadyrun.collectors.kernel.ledger import Ledger
from steadyrun.collectors.kernel.live import KernelWatch, Position, write_position
from steadyrun.collectors.protocol import CheckResult, Fact, combine, unknown

__all__ = ["KernelCollector"]

EVERY_S: Final = 1.0
LIMIT_S: Final = 10.0
_ROUNDS: Final = 40  # of 500 messages in one check


class KernelCollector:
    """Reads a watch and remembers what stands. Any thread may call any method.

    ``check`` drains the log by itself. An agent that has the descriptor in its selector also calls ``pump`` whenever it
    is readable, and has the events at once. Either way each event is given out once, by ``take_events``.

    Args:
        watch: opened; closed with the collector.
        keep_at: where the position is written, so that the next agent goes on there; None to keep none.

    Attributes:
        is_pumped: somebody calls ``pump`` as messages come; then ``check`` reads nothing, and holds nobody up.
    """

    name = "kernel_log"
    every_s = EVERY_S
    limit_s = LIMIT_S

    def __init__(
        self, watch: KernelWatch, keep_at: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.watch = watch
        self.ledger = Ledger()
        self._keep_at = keep_at
        self._kept = watch.position()
        self._clock = clock
        self._lock = threading.Lock()
        self._fresh: list[KernelEvent] = []
        self.is_pumped = False

    def fileno(self) -> int | None:
        """For a selector; None where there is nothing to wait for (then ``check`` alone reads)."""
        return self.watch.fileno()

    def pump(self, limit: int = 500) -> int:
        """Read what has come, *limit* messages at most; returns how many events were in it. Never blocks."""
        with self._lock:
            return self._pump(limit)

    def _pump(self, limit: int) -> int:
        events = self.watch.drain(limit)
        now_s = self._clock()
        for event in events:
            self.ledger.add(event, now_s)
        self._fresh.extend(events)
        return len(events)

    def take_events(self) -> list[KernelEvent]:
        """Events since the last call."""
        with self._lock:
            events, self._fresh = self._fresh, []
            return events

    def give_back(self, events: Iterable[KernelEvent]) -> None:
        """For the next ``take_events``, before all others."""
        with self._lock:
            self._fresh = [*events, *self._fresh]

    def drain_all(self) -> None:
        """Read all that is there, a few ten thousand messages at most."""
        with self._lock:
            self._drain_all()

    def _drain_all(self) -> None:
        for _ in range(_ROUNDS):
            before = self.watch.position()
            self._pump(500)
            if self.watch.position() == before:
                break

    def events_since(self, since_s: float) -> tuple[KernelEvent, ...]:
        """The newest events from *since_s* on (CLOCK_MONOTONIC seconds); for an incident."""
        with self._lock:
            self._pump(500)
            return self.ledger.events_since(since_s)

    def check(self) -> CheckResult:
        """What stands now; *unknown* where the log cannot be read."""
        with self._lock:
            result, position = self._check(), self.watch.position()
        self._keep(position)
        return result

    def _check(self) -> CheckResult:
        if not self.is_pumped or self.watch.fileno() is None:
            self._drain_all()
        troubles = self.ledger.troubles(self._clock())
        facts: dict[str, Fact] = {f"events_total.{k}": n for k, n in sorted(self.ledger.totals.items())}
        facts |= {"source": self.watch.source, "lost_total": self.watch.lost, "foreign_total": self.watch.foreign}
        if self.watch.source == "none" and not troubles:
            return unknown(self.name, self.watch.problem)
        lost = f", {self.watch.lost} messages were overwritten unread" if self.watch.lost else ""
        return combine(self.name, troubles, f"no trouble in the {self.watch.source}{lost}", facts)

    def _keep(self, position: Position | None) -> None:
        """Without the lock: the disk may be slow, and whoever pumps must not wait for it."""
        if self._keep_at is None or position is None or position == self._kept:
            return
        try:
            self._keep_at.parent.mkdir(mode=0o700, exist_ok=True)
            write_position(self._keep_at, position)
        except OSError:
            self._keep_at = None  # the folder is gone or full: others say so
        self._kept = position

    def close(self) -> None:
        with self._lock:
            position = self.watch.position()
            self.watch.close()
        self._keep(position)
