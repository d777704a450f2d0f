"""The network ports of this node as a collector."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from steadyrun.collectors.nic.judging import PortHistory, port_troubles, totals
from steadyrun.collectors.nic.ports import PortReader, PortReading, PortsUnreadableError
from steadyrun.collectors.protocol import CheckResult, Fact, combine, unknown

__all__ = ["NicCollector"]

EVERY_S: Final = 30.0  # each counter of a port is a command to its firmware


class NicCollector:
    """A port that lost its link shows in training as a hang or a slow collective of everybody.

    ``check`` may block where the firmware does; ``readings`` is for any thread.

    Args:
        root: of the machine's files; ``<root>/sys/class/{infiniband,net}`` are read.
        excluded: names or patterns of devices that are left alone.
        clock: CLOCK_MONOTONIC seconds.
    """

    name = "nic"
    every_s = EVERY_S
    limit_s = 20.0

    def __init__(
        self,
        root: Path = Path("/"),
        excluded: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = PortReader(root / "sys", excluded)
        self._clock = clock
        self._history = PortHistory()
        self._lock = threading.Lock()
        self._readings: tuple[PortReading, ...] = ()

    def readings(self) -> tuple[PortReading, ...]:
        """Every port as it was read last; empty before the first check."""
        with self._lock:
            return self._readings

    def check(self) -> CheckResult:
        """Look now. What the first look saw is what later ones are compared with."""
        try:
            found = self._reader.read()
        except PortsUnreadableError as e:
            return unknown(self.name, str(e), "mount /sys into the container, readable for this user")
        now_s = self._clock()
        self._history.see(found, now_s)
        with self._lock:
            self._readings = found
        troubles = self._history.troubles(now_s)
        known = {t.subject for t in troubles}
        troubles += [t for t in port_troubles(found) if t.subject not in known]
        facts: dict[str, Fact] = dict(totals(found))
        fabric = [p for p in found if p.port > 0]
        facts["fabric_ports"] = len(fabric)
        facts["fabric_ports_up"] = sum(p.is_up for p in fabric)
        facts["fabric_rate_gbps"] = min((p.rate_gbps for p in fabric if p.is_up and p.rate_gbps), default=None)
        return combine(self.name, troubles, _well(found, fabric), facts)

    def close(self) -> None:
        """Nothing is held."""


def _well(found: tuple[PortReading, ...], fabric: list[PortReading]) -> str:
    plain = [p for p in found if p.port == 0]
    words = []
    if fabric:
        links = " and ".join(sorted({p.link for p in fabric}))
        words.append(f"{sum(p.is_up for p in fabric)} of {len(fabric)} RDMA ports up ({links})")
    else:
        words.append("no InfiniBand or RoCE port")
    if plain:
        words.append(f"{sum(p.is_up for p in plain)} of {len(plain)} network interfaces up")
    return ", ".join(words)
