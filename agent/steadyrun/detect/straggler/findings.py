"""Alarms in words, and as findings of a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from steadyrun.core.classes import FaultClass
from steadyrun.core.records import Finding
from steadyrun.detect.straggler.records import Alarm, AlarmKind, Cause

__all__ = ["findings", "sentence"]

FAULTS: Final = (AlarmKind.RANK, AlarmKind.NODE, AlarmKind.GROUP)
SURE: Final = 0.9
WITH_PROBE: Final = 0.97  # the fixed probe is slower as well: the device or its host
GROUP_ONLY: Final = 0.7  # which of the group, or whether its links, is not known
ALONE: Final = 0.5  # slower than it was; nobody to compare with
FEW_PEERS, OF_FEW = 3, 0.8
PROBE_AGREES: Final = 0.5  # of the slowdown

_WHY: Final[Mapping[Cause, str]] = {
    Cause.WHOLE: "in all phases alike (device or host)",
    Cause.CPU_STARVED: "in all phases alike, without running: it does not get its cores",
    Cause.WORKING: "by more work",
    Cause.WAITING: "by standing still (storage, lock, source of data)",
    Cause.UNKNOWN: "",
}


def confidence(alarm: Alarm) -> float:
    """How sure it is that those it names are slow, from 0 to 1."""
    if alarm.kind is AlarmKind.GROUP:
        return GROUP_ONLY
    if alarm.peers == 0:
        return ALONE
    if alarm.probe is not None and alarm.probe >= PROBE_AGREES * alarm.slowdown:
        return WITH_PROBE
    return OF_FEW if alarm.peers < FEW_PEERS else SURE


def sentence(alarm: Alarm) -> str:
    """One line for a person."""
    who = _who(alarm)
    percent = f"{100 * alarm.slowdown:.0f} %"
    if alarm.kind is AlarmKind.DATA_IMBALANCE:
        why = (
            "they do not always get their cores (a shared machine)"
            if alarm.cause is Cause.CPU_STARVED
            else "unequal batches, or a shared machine; give the work of each step (watch.work) to compare per unit"
        )
        return f"{who} differ from step to step by {percent}: {why}"
    if alarm.kind is AlarmKind.STAGE_IMBALANCE:
        return f"{who} have {percent} more work than the roles' mean: a matter of layout, not a fault"
    if alarm.kind is AlarmKind.TRANSIENT:
        return f"{who} had bursts of slow steps, {alarm.z:.1f} per hour, {alarm.lost_s:.1f} s in all"
    if alarm.kind is AlarmKind.GROUP:
        text = f"{who} is waited for by the others: {percent} longer since step {alarm.first_step}"
        return f"{text}; none of its ranks does more work, so a link or a collective within it"
    parts = [f"{who} takes {percent} longer for its own work since step {alarm.first_step}"]
    if alarm.phase is not None:
        parts.append(f"in {alarm.phase} ({100 * alarm.phases.get(alarm.phase, 0.0):.0f} % of it)")
    if _WHY[alarm.cause]:
        parts.append(_WHY[alarm.cause])
    text = ", ".join(parts)
    if alarm.probe is not None:
        text += f"; the fixed probe {100 * alarm.probe:+.0f} %"
    if alarm.impact > 0:
        text += f"; the job would win {100 * alarm.impact:.1f} % of its step time"
    if alarm.peers == 0:
        text += "; compared with its own past only"
    return text


def _who(alarm: Alarm) -> str:
    if alarm.kind is AlarmKind.GROUP:
        return f"parallel group {alarm.group} (ranks {_ranks(alarm.ranks)})"
    if alarm.kind is AlarmKind.NODE:
        return f"node {alarm.node} (ranks {_ranks(alarm.ranks)})"
    where = f" on {alarm.node}" if alarm.node else ""
    if len(alarm.ranks) == 1:
        return f"rank {alarm.ranks[0]}{where}"
    role = f" of {alarm.role}" if alarm.role else ""
    return f"ranks {_ranks(alarm.ranks)}{role}"


def _ranks(ranks: Sequence[int]) -> str:
    """``0-3,7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def findings(
    alarms: Iterable[Alarm],
    *,
    nodes: Mapping[int, str] | None = None,
    gpus: Mapping[int, str] | None = None,
    causes: Mapping[int, Sequence[str]] | None = None,
    at_unix_s: Callable[[int], float | None] | None = None,
) -> list[Finding]:
    """Who is slow, most costly first; imbalances and transients accuse nobody and are not among them.

    Args:
        gpus: name or UUID of each rank's device.
        causes: what collectors know of each rank's device: throttling, a narrow link, errors.
        at_unix_s: wall time of a step.
    """
    nodes, gpus, causes = nodes or {}, gpus or {}, causes or {}
    out = []
    for alarm in sorted((a for a in alarms if a.kind in FAULTS), key=lambda a: (-a.impact, -a.slowdown, a.ranks)):
        known = [text for r in alarm.ranks for text in causes.get(r, ())]
        text = sentence(alarm)
        if known:
            text += f"; device: {', '.join(dict.fromkeys(known))}"
        out.append(
            Finding(
                cls=FaultClass.STRAGGLER,
                ranks=alarm.ranks,
                summary=text,
                confidence=confidence(alarm),
                nodes=tuple(dict.fromkeys(nodes[r] for r in alarm.ranks if r in nodes)),
                gpus=tuple(dict.fromkeys(gpus[r] for r in alarm.ranks if r in gpus)),
                section=alarm.phase,
                group=alarm.group,
                since_unix_s=at_unix_s(alarm.first_step) if at_unix_s is not None else None,
            )
        )
    return out
