"""All collectors of a node: each polled in a thread of its own, so that one that hangs delays nobody.

A hung driver call or a dead file server blocks the thread that asked, for good. The agent's loop only ever reads
:meth:`Registry.results`, which takes a lock for a moment and says *unknown* of a collector that has not come back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from steadyrun.collectors.protocol import CheckResult, Collector, Health, unknown

__all__ = ["CollectorState", "Registry", "guarded_check"]

CLOSE_LIMIT_S: Final = 2.0


def guarded_check(collector: Collector) -> CheckResult:
    """A check that always ends in a result: a collector that fails is *unknown*, never healthy."""
    try:
        return collector.check()
    except Exception as e:  # whatever a strange machine makes it raise, the others go on
        text = f"could not be checked: {type(e).__name__}: {e}"
        return unknown(collector.name, text, "look at that error first; please report it if it is not the machine's")


@dataclass(frozen=True, slots=True)
class CollectorState:
    """What is known of one collector now; times are CLOCK_MONOTONIC seconds.

    ``result`` is the newest, or *unknown* while there is none or the present check is late. ``succeeded_at_s``: when a
    check last came back with anything but *unknown*. ``changed``: the health differs from the check before.
    """

    result: CheckResult
    checked_at_s: float | None = None
    succeeded_at_s: float | None = None
    duration_s: float | None = None
    is_stuck: bool = False
    changed: bool = False


@dataclass(slots=True)
class _Runner:
    """One collector and its thread. Fields below the lock are written by the thread and read by anybody."""

    collector: Collector
    clock: Callable[[], float]
    stop: threading.Event = field(default_factory=threading.Event)
    wake: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    begun_at_s: float | None = None
    state: CollectorState | None = None

    def run(self) -> None:
        while not self.stop.is_set():
            self.check_once()
            self.wake.wait(self.collector.every_s)
            self.wake.clear()

    def check_once(self) -> CheckResult:
        with self.lock:
            self.begun_at_s = begun_s = self.clock()
        result = guarded_check(self.collector)
        now_s = self.clock()
        with self.lock:
            before, self.begun_at_s = self.state, None
            succeeded_s = before.succeeded_at_s if before is not None else None
            self.state = CollectorState(
                result,
                now_s,
                succeeded_s if result.health is Health.UNKNOWN else now_s,
                now_s - begun_s,
                changed=before is not None and before.result.health is not result.health,
            )
        return result

    def look(self, now_s: float) -> CollectorState:
        with self.lock:
            state, begun_s = self.state, self.begun_at_s
        name = self.collector.name
        if begun_s is not None and now_s - begun_s > self.collector.limit_s:
            text = f"has not answered for {now_s - begun_s:.0f} s"
            result = unknown(name, text, "look at the kernel log and at processes in state D; what it asks is stuck")
            if state is None:
                return CollectorState(result, is_stuck=True)
            return CollectorState(result, state.checked_at_s, state.succeeded_at_s, state.duration_s, is_stuck=True)
        return state if state is not None else CollectorState(unknown(name, "has not been checked yet"))


class Registry:
    """The collectors of one node.

    Args:
        collectors: with different names.
        clock: CLOCK_MONOTONIC seconds.
    """

    def __init__(self, collectors: Iterable[Collector], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._runners: dict[str, _Runner] = {}
        for collector in collectors:
            if collector.name in self._runners:
                raise ValueError(f"two collectors are called {collector.name!r}; names must differ")
            self._runners[collector.name] = _Runner(collector, clock)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._runners)

    def start(self) -> None:
        """Poll from now on, one thread per collector (daemons: one stuck in the kernel must not hold the exit)."""
        for name, runner in self._runners.items():
            if runner.thread is None:
                runner.thread = threading.Thread(target=runner.run, name=f"collector-{name}", daemon=True)
                runner.thread.start()

    def check_soon(self, name: str) -> None:
        """Do not wait for the next turn of that collector; for a hang, where fresh facts are worth more."""
        self._runners[name].wake.set()

    def results(self, now_s: float | None = None) -> Mapping[str, CollectorState]:
        """The newest state of each; never blocks."""
        at_s = self._clock() if now_s is None else now_s
        return {name: runner.look(at_s) for name, runner in self._runners.items()}

    def check_all(self, limit_s: float) -> Mapping[str, CheckResult]:
        """Check each once, all at the same time, for a command or the start gate; blocks for *limit_s* at most."""
        threads = {
            name: threading.Thread(target=runner.check_once, name=f"check-{name}", daemon=True)
            for name, runner in self._runners.items()
            if runner.thread is None
        }
        for thread in threads.values():
            thread.start()
        deadline_s = time.monotonic() + limit_s
        for thread in threads.values():
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        out = {}
        for name, runner in self._runners.items():
            late = name in threads and threads[name].is_alive()
            text = f"no answer within {limit_s:g} s"
            out[name] = unknown(name, text, "what it asks is stuck") if late else runner.look(self._clock()).result
        return out

    def close(self) -> None:
        """End the threads and close the collectors; one that hangs is left behind."""
        for runner in self._runners.values():
            runner.stop.set()
            runner.wake.set()
        deadline_s = time.monotonic() + CLOSE_LIMIT_S
        for runner in self._runners.values():
            if runner.thread is not None:
                runner.thread.join(max(deadline_s - time.monotonic(), 0.0))
            runner.collector.close()
