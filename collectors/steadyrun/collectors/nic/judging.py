"""What the ports say: each against how it was when the job began, and against those of its model. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from steadyrun.collectors.nic.ports import COUNTERS, LINK_DOWNED, PortReading
from steadyrun.collectors.protocol import Health, Trouble

__all__ = ["PortHistory", "port_troubles", "totals"]

WINDOW_S: Final = 3600.0
FLAPS_A_DAY: Final = 5  # public health checks of large clusters take a port out at five in a day
DAY_S: Final = 86400.0
FEWEST_ALIKE: Final = 3  # so many ports of a model that are up, before one that is not counts

_CABLE: Final = ("look at its cable, its transceiver and the switch's port",)
_OUT: Final = (
    "leave out the node until the port is back",
    *_CABLE,
)


@dataclass(slots=True)
class _Growth:
    """How much a counter has grown, with its last changes; one that became smaller was reset and counts from 0."""

    last: int
    changes: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=4096))

    def see(self, value: int, now_s: float) -> None:
        grown = value - self.last if value >= self.last else value
        self.last = value
        if grown > 0:
            self.changes.append((now_s, grown))

    def within(self, window_s: float, now_s: float) -> int:
        return sum(n for at_s, n in self.changes if at_s > now_s - window_s)


@dataclass(slots=True)
class _Port:
    best: PortReading  # with the best state and rate that it had
    now: PortReading | None
    grown: dict[str, _Growth] = field(default_factory=dict)


class PortHistory:
    """Every port since the job began."""

    def __init__(self) -> None:
        self._ports: dict[tuple[str, int], _Port] = {}
        self._begun_s: float | None = None

    def see(self, readings: Iterable[PortReading], now_s: float) -> None:
        """Another look; a port that is not in it any more has vanished."""
        if self._begun_s is None:
            self._begun_s = now_s
        found = {r.key: r for r in readings}
        for key, reading in found.items():
            port = self._ports.setdefault(key, _Port(reading, reading))
            port.now = reading
            if (reading.is_up, reading.rate_gbps or 0.0) > (port.best.is_up, port.best.rate_gbps or 0.0):
                port.best = reading
            for name, value in reading.counters.items():
                port.grown.setdefault(name, _Growth(value)).see(value, now_s)
        for key in self._ports.keys() - found.keys():
            self._ports[key].now = None

    def flaps(self, key: tuple[str, int], now_s: float, window_s: float = DAY_S) -> int:
        """How often the port's link went down in the last *window_s*."""
        grown = self._ports[key].grown.get(LINK_DOWNED) if key in self._ports else None
        return grown.within(window_s, now_s) if grown is not None else 0

    def troubles(self, now_s: float) -> list[Trouble]:
        """What is worse than it was."""
        out: list[Trouble] = []
        for key, port in sorted(self._ports.items()):
            out += self._changes(port)
            if port.now is not None:
                out += self._flapping(key, port.now, now_s)
                out += self._errors(port, port.now, now_s)
        return out

    def _changes(self, port: _Port) -> list[Trouble]:
        now, best = port.now, port.best
        if not best.is_up:
            return []
        if now is None:
            return [_trouble(best, Health.UNHEALTHY, "is not there any more; it was up when the job began", _OUT)]
        if not now.is_up:
            how = f" ({now.physical})" if now.physical else ""
            text = f"is {now.state or 'without a state'}{how}; it was up when the job began"
            return [_trouble(now, Health.UNHEALTHY, text, _OUT)]
        if now.rate_gbps is not None and best.rate_gbps is not None and now.rate_gbps < best.rate_gbps:
            text = f"runs at {now.rate_gbps:g} Gb/s; it ran at {best.rate_gbps:g} when the job began"
            return [_trouble(now, Health.DEGRADED, text, _CABLE)]
        return []

    def _flapping(self, key: tuple[str, int], now: PortReading, now_s: float) -> list[Trouble]:
        today, lately = self.flaps(key, now_s), self.flaps(key, now_s, WINDOW_S)
        if today >= FLAPS_A_DAY:
            text = f"has lost its link {today} times in {_span(min(now_s - (self._begun_s or now_s), DAY_S))}"
            return [_trouble(now, Health.UNHEALTHY, text, _OUT)]
        if lately:
            times = "once" if lately == 1 else f"{lately} times"
            return [_trouble(now, Health.DEGRADED, f"has lost its link {times} in the last hour", _CABLE)]
        return []

    def _errors(self, port: _Port, now: PortReading, now_s: float) -> list[Trouble]:
        out = []
        for counter in COUNTERS:
            grown = port.grown.get(counter.name)
            if grown is None or counter.most_per_hour is None:
                continue
            lately = grown.within(WINDOW_S, now_s)
            if lately > counter.most_per_hour:
                out.append(_trouble(now, Health.DEGRADED, f"had {lately} {counter.words} in the last hour", _CABLE))
        return out


def port_troubles(readings: Sequence[PortReading]) -> list[Trouble]:
    """What one look shows without knowing how it was: ports that differ from others of their model."""
    out: list[Trouble] = []
    alike: dict[tuple[str, str], list[PortReading]] = {}
    for reading in readings:
        if reading.model:
            alike.setdefault((reading.model, reading.link), []).append(reading)
        if reading.link == "InfiniBand" and reading.physical == "LinkUp" and reading.state in ("INIT", "ARMED"):
            text = f"has a link, but its state is {reading.state}: no subnet manager has activated it"
            out.append(_trouble(reading, Health.UNHEALTHY, text, ("look at the subnet manager of its fabric",)))
    for ports in alike.values():
        out += _against(ports)
    return out


def _against(ports: Sequence[PortReading]) -> list[Trouble]:
    """Ports of one model: one that is down where most are up, and one that is slower than most."""
    up = [p for p in ports if p.is_up]
    if len(up) < FEWEST_ALIKE or 2 * len(up) <= len(ports):
        return []
    out = []
    for port in ports:
        if not port.is_up and port.state not in ("INIT", "ARMED"):
            how = f" ({port.physical})" if port.physical else ""
            text = f"is {port.state or 'without a state'}{how}; {len(up)} others like it are up"
            out.append(_trouble(port, Health.DEGRADED, text, _CABLE))
    usual = _most_frequent(p.rate_gbps for p in up)
    if usual is not None:
        out += [
            _trouble(p, Health.DEGRADED, f"runs at {p.rate_gbps:g} Gb/s; others like it at {usual:g}", _CABLE)
            for p in up
            if p.rate_gbps is not None and p.rate_gbps < usual
        ]
    return out


def _most_frequent(values: Iterable[float | None]) -> float | None:
    counts: dict[float, int] = {}
    for value in values:
        if value is not None:
            counts[value] = counts.get(value, 0) + 1
    return max(counts, key=lambda v: (counts[v], v), default=None)


def _trouble(port: PortReading, health: Health, text: str, actions: tuple[str, ...]) -> Trouble:
    return Trouble(health, f"{port.label} {text}", actions, f"port {port.device}/{port.port}")


def _span(seconds: float) -> str:
    if seconds < 2 * 3600:
        return f"{max(seconds / 60, 1):.0f} minutes"
    return f"{seconds / 3600:.0f} hours"


def totals(readings: Sequence[PortReading]) -> Mapping[str, int]:
    """Of all ports together, for records."""
    return {
        "ports": len(readings),
        "ports_up": sum(r.is_up for r in readings),
        "errors": sum(r.errors for r in readings),
        "link_downed": sum(r.link_downed or 0 for r in readings),
    }
