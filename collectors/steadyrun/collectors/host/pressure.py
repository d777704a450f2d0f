"""Pressure stall information of the kernel: how long processes waited for what they lacked. A hint, not a fault."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steadyrun.collectors.protocol import CheckResult, Fact, combine

__all__ = ["Pressure", "PressureCollector", "read_pressure"]

RESOURCES: Final = ("cpu", "io", "memory")
_LINE = re.compile(r"(some|full) avg10=([\d.]+) avg60=([\d.]+) avg300=[\d.]+ total=(\d+)")


@dataclass(frozen=True, slots=True)
class Pressure:
    """Shares of time, 0 to 1, in which some or all runnable processes waited; seconds of it since the start."""

    some_10s: float
    full_10s: float
    some_60s: float
    full_60s: float
    some_total_s: float
    full_total_s: float

    def facts(self, resource: str) -> dict[str, Fact]:
        """By stable names."""
        return {
            f"pressure_{resource}_some_10s_ratio": self.some_10s,
            f"pressure_{resource}_full_10s_ratio": self.full_10s,
            f"pressure_{resource}_full_60s_ratio": self.full_60s,
            f"pressure_{resource}_full_seconds_total": self.full_total_s,
        }


def read_pressure(proc: Path, resource: str) -> Pressure | None:
    """Of ``cpu``, ``io`` or ``memory``; None where the kernel does not count it (psi=0, or older than 4.20)."""
    try:
        text = (proc / "pressure" / resource).read_text()
    except OSError:
        return None
    found = {m[1]: (float(m[2]) / 100, float(m[3]) / 100, int(m[4]) / 1e6) for m in _LINE.finditer(text)}
    if "some" not in found:
        return None
    some, full = found["some"], found.get("full", (0.0, 0.0, 0.0))  # no "full" for the CPU before 5.13
    return Pressure(some[0], full[0], some[1], full[1], some[2], full[2])


class PressureCollector:
    """The numbers for an incident and its page; never unhealthy by itself."""

    name = "pressure"
    every_s = 10.0
    limit_s = 10.0

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"

    def check(self) -> CheckResult:
        """Look now."""
        facts: dict[str, Fact] = {}
        words = []
        for resource in RESOURCES:
            pressure = read_pressure(self._proc, resource)
            if pressure is not None:
                facts |= pressure.facts(resource)
                words.append(f"{resource} {pressure.some_10s:.0%}")
        text = f"time that something waited in the last ten seconds: {', '.join(words)}"
        return combine(self.name, (), text if words else "this kernel does not count it (boot with psi=1)", facts)

    def close(self) -> None:
        """Nothing is held."""
