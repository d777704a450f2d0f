"""What the kernel's events say about the machine now: which of them still stand, and what repeats add up to. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from steadyrun.collectors.kernel.events import KernelEvent
from steadyrun.collectors.kernel.kinds import DAY_S, FOREVER_S, KINDS, kind_of
from steadyrun.collectors.kernel.xids import CLASS_ADVICE, XIDS, XidClass
from steadyrun.collectors.protocol import Health, Trouble

__all__ = ["Ledger"]

# Repeats of the job's own errors on one GPU within a day that make the GPU suspect.
APP_REPEATS: Final = 3
UNKNOWN_REPEATS: Final = 2
FLAPS_A_DAY: Final = 5  # the threshold of Azure's node health checks for "lost carrier" in 24 hours
_MAX_STANDING: Final = 1024
_MAX_RECENT: Final = 512
_MAX_TIMES: Final = 32

_HOLDS_S: Final[Mapping[XidClass, float]] = {
    XidClass.SOFTWARE: DAY_S,
    XidClass.RESET: DAY_S,
    XidClass.FABRIC: DAY_S,
    XidClass.UNKNOWN: DAY_S,
    XidClass.REBOOT: FOREVER_S,
    XidClass.HARDWARE: FOREVER_S,
}
_ENDS: Final[Mapping[str, str]] = {kind.ended_by: kind.name for kind in KINDS.values() if kind.ended_by}


@dataclass(frozen=True, slots=True)
class _Standing:
    event: KernelEvent
    at_s: float
    until_s: float


@dataclass(slots=True)
class Ledger:
    """Fed with events as they come (repeats folded), asked at any time. Times are CLOCK_MONOTONIC seconds.

    Attributes:
        totals: events by kind.
        xid_totals: Xids by GPU (PCI address) and effective class.
        xid_last_s: when a code was last seen on a GPU.
        recent: the newest events, oldest first.
    """

    totals: Counter[str] = field(default_factory=Counter)
    xid_totals: Counter[tuple[str, str]] = field(default_factory=Counter)
    xid_last_s: dict[tuple[str, int], float] = field(default_factory=dict)
    recent: deque[KernelEvent] = field(default_factory=lambda: deque(maxlen=_MAX_RECENT))
    _standing: dict[tuple[str, ...], _Standing] = field(default_factory=dict)
    _times: dict[tuple[str, ...], deque[float]] = field(default_factory=dict)

    def add(self, event: KernelEvent, now_s: float) -> None:
        """One event; *now_s* stands in for a time of its own."""
        at_s = event.at_s if event.at_s is not None else now_s
        self.totals[event.event] += 1
        self.recent.append(event)
        cls = event.effective_class
        if event.event == "xid" and cls is not None:
            pci, code = event.word("pci"), event.number("xid") or 0
            self.xid_totals[pci, cls.value] += 1
            self.xid_last_s[pci, code] = at_s
            if cls is XidClass.INFO and event.number("action") == 0:
                self.clear_gpu(pci)
                return
        self._end(event)
        if (repeat := _repeat_key(event, cls)) is not None:
            times = self._times.setdefault(repeat, deque(maxlen=_MAX_TIMES))
            times.append(at_s)
            if len(self._times) > _MAX_STANDING:
                self._times.pop(next(iter(self._times)))
        if event.health in (Health.DEGRADED, Health.UNHEALTHY):
            holds_s = _HOLDS_S.get(cls, DAY_S) if cls is not None else kind_of(event.event).holds_s
            self._standing.pop(event.key, None)
            self._standing[event.key] = _Standing(event, at_s, at_s + holds_s)
            if len(self._standing) > _MAX_STANDING:
                self._standing.pop(next(iter(self._standing)))

    def clear_gpu(self, pci: str) -> None:
        """The GPU was reset, or the driver says that it needs nothing any more; what only a reboot heals stays."""
        keep = (XidClass.REBOOT, XidClass.HARDWARE)
        self._standing = {
            k: s
            for k, s in self._standing.items()
            if s.event.event != "xid" or s.event.word("pci") != pci or s.event.effective_class in keep
        }

    def _end(self, event: KernelEvent) -> None:
        """What *event* says is over: an NFS server that is back, a port that is active again."""
        if event.health is not Health.HEALTHY:
            return
        self._standing.pop(event.key, None)
        if (begun := _ENDS.get(event.event)) is not None:
            self._standing.pop((begun, *event.key[1:]), None)

    def troubles(self, now_s: float) -> list[Trouble]:
        """What stands at *now_s*."""
        self._standing = {k: s for k, s in self._standing.items() if s.until_s > now_s}
        out = [_trouble(s.event, now_s - s.at_s) for s in self._standing.values()]
        for key, times in self._times.items():
            count = sum(now_s - t < DAY_S for t in times)
            if (trouble := _repeated(key, count)) is not None:
                out.append(trouble)
        return out

    def events_since(self, since_s: float) -> tuple[KernelEvent, ...]:
        """The newest events that are not older; for an incident's evidence."""
        return tuple(e for e in self.recent if e.at_s is None or e.at_s >= since_s)


def _repeat_key(event: KernelEvent, cls: XidClass | None) -> tuple[str, ...] | None:
    if event.event == "xid" and cls in (XidClass.APP, XidClass.UNKNOWN):
        return (cls.value, event.word("pci"), event.word("xid") if cls is XidClass.UNKNOWN else "")
    return ("flap", event.word("ifname")) if event.event == "nic_link_down" else None


def _repeated(key: tuple[str, ...], count: int) -> Trouble | None:
    kind, where, *more = key
    if kind == XidClass.APP.value and count >= APP_REPEATS:
        text = f"GPU {where}: errors of programs {count} times within a day; it may be the GPU"
        return Trouble(Health.DEGRADED, text, ("run a diagnosis of this GPU (dcgmi diag -r 3)",), f"gpu {where}")
    if kind == XidClass.UNKNOWN.value and count >= UNKNOWN_REPEATS:
        text = f"GPU {where}: Xid {more[0]}, which is not in the catalogue, {count} times within a day"
        return Trouble(Health.UNHEALTHY, text, CLASS_ADVICE[XidClass.HARDWARE], f"gpu {where}")
    if kind == "flap" and count >= FLAPS_A_DAY:
        text = f"{where}: its link went down {count} times within a day"
        return Trouble(Health.DEGRADED, text, ("look at the cable, the port and the switch",), where)
    return None


def _trouble(event: KernelEvent, age_s: float) -> Trouble:
    where = next((event.word(n) for n in ("pci", "ifname", "dev", "server", "target", "fs") if event.word(n)), "")
    pci = event.word("pci")
    subject = f"gpu {pci}" if event.event == "xid" else where
    code = event.number("xid")
    name = f" ({XIDS[code].name})" if code is not None and code in XIDS else ""
    return Trouble(event.health, f"{event.title}{name}, {_age(age_s)} ago: {event.meaning}", event.actions, subject)


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{max(seconds, 0.0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
