"""What devices, kernels and collectors say about findings: whose GPU failed shortly before, and what else was amiss.

Stacks and flight records tell who is waited for; a GPU that fell off its bus tells why, and sometimes who, when all
ranks wait in the same operation. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from steadyrun.core.classes import FaultClass
from steadyrun.core.records import DeviceEvent, Evidence, Finding
from steadyrun.detect.grouping import name_ranks

__all__ = ["causal", "device_words", "with_devices"]

CAUSAL_S: Final = 120.0  # an event this long before the last progress may have caused what followed
TOLD_S: Final = 600.0
MOST_TOLD: Final = 2
ACCUSED: Final = 0.85
SURE: Final = 0.7
_GRAVE: Final = ("hardware", "reboot", "reset", "fabric", "unknown")  # classes of Xids, worst first
_OF_PROGRAMS: Final = frozenset({"app", "software"})
_NOT_WELL: Final = frozenset({"unhealthy", "degraded"})
# A hang in which a device is a better explanation than a rank's place.
_STALLS: Final = frozenset({FaultClass.HOST_STALL, FaultClass.DEVICE_STALL})
# What is said when nobody in particular can be named.
_VAGUE: Final = frozenset({FaultClass.IN_FLIGHT_NETWORK, FaultClass.INSUFFICIENT_DATA, FaultClass.START_UP})
_DEATHS: Final = frozenset({FaultClass.DEAD_PROCESS, FaultClass.PROGRAM_ERROR, FaultClass.OUT_OF_MEMORY})
_UNTOUCHED: Final = frozenset({FaultClass.PREEMPTED, FaultClass.HEALTHY, FaultClass.STRAGGLER})


def with_devices(findings: Sequence[Finding], evidence: Evidence, now_unix_s: float) -> list[Finding]:
    """The findings, with what devices told of their ranks and nodes; and ranks that only their devices accuse.

    Args:
        now_unix_s: when the evidence was judged; stands in where a finding has no time of its own.
    """
    if not evidence.devices or any(f.cls in _UNTOUCHED for f in findings):
        return list(findings)
    out = [_explained(f, evidence, now_unix_s) for f in findings]
    known = {r for f in out if f.confidence >= SURE and f.cls not in _VAGUE for r in f.ranks}
    since_s = min((f.since_unix_s for f in out if f.since_unix_s is not None), default=now_unix_s)
    accused: dict[int, DeviceEvent] = {}
    for event in causal(evidence.devices, since_s):
        if _is_grave(event) and event.rank is not None and event.rank not in known:
            before = accused.get(event.rank)
            if before is None or _gravity(event) < _gravity(before):
                accused[event.rank] = event
    if not accused:
        return out
    own = [_accusation(rank, event, evidence, since_s) for rank, event in sorted(accused.items())]
    weaker = [
        replace(f, confidence=round(f.confidence * 0.5, 2)) if f.cls in _VAGUE or set(f.ranks) <= set(accused) else f
        for f in out
    ]
    return [*own, *weaker]


def causal(events: Iterable[DeviceEvent], since_unix_s: float) -> list[DeviceEvent]:
    """Those that may have caused what is seen since then: shortly before or after, or standing now."""
    return [e for e in events if e.event == "state" or e.at_unix_s >= since_unix_s - CAUSAL_S]


def device_words(event: DeviceEvent, since_unix_s: float, is_death: bool = False) -> str:
    """``rank 5, GPU 5 0000:cb:00: Xid 79 (the GPU does not answer any more), 3 s before the hang``."""
    where = f"rank {event.rank}" if event.rank is not None else event.node
    if event.gpu is not None:
        where += f", GPU {event.gpu}" + (f" {event.pci}" if event.pci else "")
    elif event.pci:
        where += f", GPU {event.pci}"
    if event.event == "state":
        return f"{where}: {event.meaning}"
    what = f"Xid {event.xid}" if event.xid is not None else event.title
    before_s = since_unix_s - event.at_unix_s
    end = "its end" if is_death else "the hang"
    if before_s >= 0:
        when = f"{_span(before_s)} before {end}"
    else:
        when = f"{_span(-before_s)} after {'that' if is_death else 'the last progress'}"
    return f"{where}: {what} ({event.meaning}), {when}"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _explained(finding: Finding, evidence: Evidence, now_unix_s: float) -> Finding:
    since_s = finding.since_unix_s if finding.since_unix_s is not None else now_unix_s
    is_death = finding.cls in _DEATHS
    related = [e for e in evidence.devices if _concerns(e, finding, since_s)]
    if not related:
        return finding
    related.sort(key=lambda e: (_gravity(e), abs(e.at_unix_s - since_s)))
    told = list(dict.fromkeys(device_words(e, since_s, is_death) for e in related))[:MOST_TOLD]
    finding = replace(finding, summary="; ".join([finding.summary, *told]))
    own = [e for e in causal(related, since_s) if e.rank in finding.ranks and _is_grave(e)]
    if own and finding.cls in _STALLS:
        gpus = finding.gpus or tuple(g for g in (_gpu_words(own[0]),) if g)
        return replace(finding, cls=FaultClass.DEVICE_STALL, confidence=max(finding.confidence, 0.9), gpus=gpus)
    if own and is_death:
        return replace(finding, confidence=max(finding.confidence, 0.9))
    return finding


def _concerns(event: DeviceEvent, finding: Finding, since_unix_s: float) -> bool:
    if event.event != "state" and event.at_unix_s < since_unix_s - TOLD_S:
        return False
    if event.rank is not None:
        return event.rank in finding.ranks and (event.health in _NOT_WELL or event.cls in _OF_PROGRAMS)
    # of the whole node: only what was amiss at that time, or stands now and is bad
    if event.node not in finding.nodes:
        return False
    if event.event == "state":
        return event.health == "unhealthy"
    return event.health in _NOT_WELL and event.at_unix_s >= since_unix_s - CAUSAL_S


def _accusation(rank: int, event: DeviceEvent, evidence: Evidence, since_unix_s: float) -> Finding:
    own = next((r for r in evidence.ranks if r.rank == rank), None)
    gpus = tuple(g for g in ((own.gpu if own is not None else None) or _gpu_words(event),) if g)
    return Finding(
        FaultClass.DEVICE_STALL,
        (rank,),
        f"{device_words(event, since_unix_s)}; {name_ranks([rank])} has lost its device",
        ACCUSED,
        nodes=(event.node,),
        gpus=gpus,
        since_unix_s=since_unix_s,
        evidence=own.files if own is not None else (),
    )


def _is_grave(event: DeviceEvent) -> bool:
    """It ends what runs on the GPU, whatever the program does."""
    if event.event in ("xid", "sxid"):
        return event.cls in _GRAVE
    return event.source == "nvml" and event.event == "state" and event.health == "unhealthy"


def _gravity(event: DeviceEvent) -> int:
    """Smaller is worse."""
    if event.cls in _GRAVE:
        return _GRAVE.index(event.cls)
    return len(_GRAVE) + ("unhealthy", "degraded").index(event.health) if event.health in _NOT_WELL else 100


def _gpu_words(event: DeviceEvent) -> str:
    if event.gpu is None:
        return ""
    return f"GPU {event.gpu}" + (f" ({event.pci})" if event.pci else "")
