"""Collectors beside a small loop of their own, and a stand-in for the driver's library."""

from __future__ import annotations

import contextlib
import queue
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from nvml_library import compile_library

from steadyrun.collectors.metrics.values import Values
from steadyrun.core.clock import SystemClock
from steadyrun.node.devices import Devices, DevicesPlan
from steadyrun.node.driver import DriverReader


@pytest.fixture(scope="session")
def nvml_library(shared_cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a libnvidia-ml.so.1 that answers from a file."""
    return compile_library(shared_cases, tmp_path_factory.mktemp("nvml"))


class Loop:
    """What of the agent's loop concerns devices. ``longest_s``: the longest that any call of theirs took."""

    def __init__(self, plan: DevicesPlan, driver: DriverReader) -> None:
        self.values = Values()
        self.records: list[tuple[str, Mapping[str, Any]]] = []
        self.said: list[str] = []
        self.longest_s = 0.0
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self.devices = Devices(
            plan,
            "n0",
            SystemClock(),
            self,
            self.post,
            self._record,
            self.said.append,
            lambda f: f(self.values),
            driver.get,
        )
        self.devices.start()

    def post(self, then: Callable[[], None]) -> None:
        self._posted.put(then)

    def watch(self, fd: int, then: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, then)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def _record(self, type_: str, **fields: Any) -> None:
        self.records.append((type_, fields))

    def timed(self, call: Callable[[], Any]) -> Any:
        begun_s = time.monotonic()
        out = call()
        self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
        return out

    def turn(self) -> None:
        for key, _ in self._selector.select(0.02):
            self.timed(key.data)
        with contextlib.suppress(queue.Empty):
            while True:
                self.timed(self._posted.get_nowait())
        self.timed(lambda: self.devices.poll(time.monotonic()))
        self.timed(lambda: self.devices.fill(self.values))

    def until(self, seen: Callable[[], Any], what: str, limit_s: float = 40.0) -> None:
        deadline_s = time.monotonic() + limit_s
        while not seen():
            self.turn()
            story = "\n".join(map(str, [*self.records[-20:], *self.said[-10:]]))
            assert time.monotonic() < deadline_s, f"{what} has not come; {story}"

    def told(self, type_: str) -> list[Mapping[str, Any]]:
        return [fields for kind, fields in self.records if kind == type_]

    def close(self) -> None:
        self.devices.close()
        self._selector.close()


@pytest.fixture
def start_loop() -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def start(plan: DevicesPlan, driver: DriverReader | None = None) -> Loop:
        made.append(Loop(plan, driver if driver is not None else DriverReader(plan.root)))
        return made[-1]

    yield start
    for loop in made:
        loop.close()
