"""Ranks over time, identical ones in one lane: what was open, since when, and what came before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from steadyrun.core.flight import FlightGroup, FlightOp, OpState, RankFlight
from steadyrun.core.records import RankEvidence
from steadyrun.postmortem.case import Report
from steadyrun.postmortem.chain import Chain
from steadyrun.postmortem.words import (
    age_words,
    blamed_ranks,
    clock_words,
    end_of,
    op_words,
    plausible_unix_s,
    state_words,
    wall_s,
)

__all__ = ["Axis", "Bar", "Lane", "LaneChart", "Tick", "chart_lanes"]

_OPEN_SHOWN: Final = 3
_BEFORE: Final = 14  # operations before the head whose calls are shown, per group
_LANES_WITH_HISTORY: Final = 8  # each asks for single calls, which means reading a dump again
_LONGEST_S: Final = 12 * 3600.0  # what began earlier is drawn from the left edge on


@dataclass(frozen=True, slots=True)
class Bar:
    """*kind*: ``head`` (the operation it stands in), ``open`` (called after it), ``failed``, ``section``, ``silence``
    (no call), ``nothing`` (no record)."""

    start_s: float
    kind: str
    label: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """*kind*: ``issued``, ``done``, ``step``, ``fault``."""

    at_s: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    """Ranks that did the same.

    Attributes:
        role: ``culprit``, ``victim``, ``fine`` or ``unknown``.
        note: what the bars cannot show.
        starts_s: per rank when it called its head operation, in rank order; empty where not all are known.
    """

    ranks: tuple[int, ...]
    role: str
    note: str = ""
    bars: tuple[Bar, ...] = ()
    ticks: tuple[Tick, ...] = ()
    starts_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """Wall time to 0..100: straight, or with a *knee* after which what follows the last calls has its own scale."""

    left_s: float
    right_s: float
    knee_s: float | None = None
    knee_at: float = 42.0

    def at(self, unix_s: float) -> float:
        """Percent of the width, cut at both ends."""
        if self.knee_s is None:
            return _share(unix_s, self.left_s, self.right_s) * 100.0
        if unix_s <= self.knee_s:
            return _share(unix_s, self.left_s, self.knee_s) * self.knee_at
        return self.knee_at + _share(unix_s, self.knee_s, self.right_s) * (100.0 - self.knee_at)


def _share(value: float, low: float, high: float) -> float:
    return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0


@dataclass(frozen=True, slots=True)
class LaneChart:
    """All lanes, the blamed first; nothing to draw without *axis*. *is_taken*: when the evidence was taken is known."""

    lanes: tuple[Lane, ...] = ()
    axis: Axis | None = None
    is_taken: bool = True


@dataclass(frozen=True, slots=True)
class _Member:
    rank: int
    evidence: RankEvidence | None
    flight: RankFlight | None


def chart_lanes(report: Report, chain: Chain) -> LaneChart:
    """One lane per kind of rank; empty where no record holds a time."""
    end = end_of(report)
    if end is None:
        return LaneChart()
    end_s = end.at_unix_s
    folded = _fold(report, chain)
    lanes = [_lane(report, role, members, end_s, i < _LANES_WITH_HISTORY) for i, (role, members) in enumerate(folded)]
    if not any(lane.bars or lane.ticks for lane in lanes):
        return LaneChart()
    return LaneChart(tuple(lanes), _axis(lanes, end_s, end.is_taken), end.is_taken)


def _fold(report: Report, chain: Chain) -> list[tuple[str, list[_Member]]]:
    by_rank = {r.rank: r for r in report.case.evidence.ranks}
    blamed = blamed_ranks(report)
    victims = set(report.victims)
    place_of = {rank: i for i, place in enumerate(chain.places) for rank in place.ranks}
    unknown = set(report.flight.unknown) if report.flight is not None else set()
    known = sorted(set(by_rank) | set(blamed) | set(place_of) | unknown)
    lanes: dict[tuple[object, ...], list[_Member]] = {}
    roles: dict[tuple[object, ...], str] = {}
    nearest: dict[tuple[object, ...], int] = {}  # to the root cause, of its places
    for rank in known:
        evidence = by_rank.get(rank)
        member = _Member(rank, evidence, evidence.flight if evidence is not None else None)
        place = place_of.get(rank)
        is_waiting = place is not None and chain.places[place].depth > 0
        role = "culprit" if rank in blamed else "victim" if rank in victims or is_waiting else _quiet_role(member)
        key = (role, blamed.get(rank), _behaviour(member))
        nearest[key] = min(nearest.get(key, len(chain.places)), len(chain.places) if place is None else place)
        lanes.setdefault(key, []).append(member)
        roles[key] = role
    order = {"culprit": 0, "victim": 1, "unknown": 2, "fine": 3}

    def sort_key(key: tuple[object, ...]) -> tuple[int, int, int, int]:
        return order[roles[key]], nearest[key], -len(lanes[key]), lanes[key][0].rank

    return [(roles[key], lanes[key]) for key in sorted(lanes, key=sort_key)]


def _quiet_role(member: _Member) -> str:
    return "unknown" if member.evidence is None else "fine"


def _behaviour(member: _Member) -> tuple[object, ...]:
    """What makes two ranks differ to an eye: head operation and call, section, how it ended."""
    flight, evidence = member.flight, member.evidence
    head: tuple[object, ...] = ()
    if flight is not None and flight.ops:
        op = flight.ops[0]
        head = (op.name, op.site, op.state, _desc(flight, op), len(flight.ops) > 1)
    section = max(evidence.sections, key=lambda s: s.since_s).name if evidence and evidence.sections else ""
    ended = state_words(evidence) if evidence and (evidence.exit or evidence.exception) else ""
    quality = (flight.is_off, flight.is_cut) if flight is not None else ()
    return head, section, ended, quality


def _group(flight: RankFlight, op: FlightOp) -> FlightGroup | None:
    return flight.groups[op.group] if 0 <= op.group < len(flight.groups) else None


def _desc(flight: RankFlight, op: FlightOp) -> str:
    group = _group(flight, op)
    return (group.desc or group.name) if group is not None else ""


# -- one lane ----------------------------------------------------------------------------------------------------------
def _lane(report: Report, role: str, members: Sequence[_Member], end_s: float, with_history: bool) -> Lane:
    first = members[0]
    flight = first.flight
    bars: list[Bar] = []
    ticks: list[Tick] = []
    notes: list[str] = []
    starts: tuple[float, ...] = ()
    if flight is not None and not flight.is_off:
        bars += _open_bars(flight, members, end_s)
        starts = _head_starts(members)
        ticks += _progress_ticks(flight)
        if with_history:
            ticks += _history_ticks(report, flight)
        if not flight.ops:
            bars += _silence(flight, role, end_s)
        extra = len(flight.ops) + flight.more_ops - _OPEN_SHOWN
        if extra > 0:
            notes.append(f"{extra} more calls queued behind")
        if flight.is_cut:
            notes.append("dump cut: its newest calls are missing")
    elif report.flight is not None:
        bars.append(Bar(end_s - _LONGEST_S, "nothing", "recorder was off" if flight is not None else "no dump"))
    if first.evidence is not None:
        bars += _section_bars(report, members, end_s)
        ticks += _fault_ticks(report, first.evidence)
    ticks += _moment_ticks(report, {m.rank for m in members[:1]})
    ranks = tuple(m.rank for m in members)
    return Lane(ranks, role, "; ".join(notes), tuple(bars), tuple(ticks), starts if len(ranks) > 1 else ())


def _open_bars(flight: RankFlight, members: Sequence[_Member], end_s: float) -> Iterable[Bar]:
    for row, op in enumerate(flight.ops[:_OPEN_SHOWN]):
        starts = [t for m in members if (t := _start_of(m.flight, row)) is not None]
        start = median(starts) if starts else wall_s(op.created_ns, flight)
        if start is None:
            continue
        seqs = [m.flight.ops[row].seq for m in members if m.flight is not None and row < len(m.flight.ops)]
        name = op_words(op.name, seqs)
        desc = _desc(flight, op)
        label = name + (f" · {desc}" if desc else "")
        at = f", called at {op.site}" if op.site else ""
        state = " (started on the device)" if op.state is OpState.STARTED else ""
        title = f"{name} of {desc or 'unknown group'}{at}, open since {clock_words(start, 3)}{state}"
        kind = "failed" if op.state is OpState.FAILED else "head" if row == 0 else "open"
        yield Bar(max(start, end_s - _LONGEST_S), kind, label + (" (failed)" if kind == "failed" else ""), title)


def _start_of(flight: RankFlight | None, row: int) -> float | None:
    return wall_s(flight.ops[row].created_ns, flight) if flight is not None and row < len(flight.ops) else None


def _head_starts(members: Sequence[_Member]) -> tuple[float, ...]:
    starts = [_start_of(m.flight, 0) for m in members]
    return tuple(s for s in starts if s is not None) if all(s is not None for s in starts) else ()


def _progress_ticks(flight: RankFlight) -> Iterable[Tick]:
    for group in flight.groups:
        desc = group.desc or group.name
        issued = wall_s(group.last_issued_ns, flight)
        if issued is not None and group.issued_seq is not None:
            yield Tick(issued, "issued", f"called #{group.issued_seq} of {desc}, its newest, {clock_words(issued, 3)}")
        done = wall_s(group.last_done_ns, flight)
        if done is not None and group.done_seq is not None:
            yield Tick(done, "done", f"#{group.done_seq} of {desc} done, {clock_words(done, 3)}")


def _history_ticks(report: Report, flight: RankFlight) -> Iterable[Tick]:
    details = report.case.details
    if details is None:
        return
    heads = list(dict.fromkeys(op.group for op in flight.ops if not op.is_p2p))
    busiest = sorted(range(len(flight.groups)), key=lambda g: -(flight.groups[g].issued_seq or 0))
    for index in list(dict.fromkeys([*heads, *busiest]))[:2]:
        if not 0 <= index < len(flight.groups) or flight.groups[index].issued_seq is None:
            continue
        group = flight.groups[index]
        last = group.issued_seq or 0
        for op in details.ops(flight.rank, group.name, max(last - _BEFORE, 0), last):
            at = wall_s(op.created_ns, flight)
            if at is not None:
                site = f" at {op.site}" if op.site else ""
                what = f"{op.name} #{op.seq} of {group.desc or group.name} called{site}"
                yield Tick(at, "issued", f"{what}, {clock_words(at, 3)}")


def _silence(flight: RankFlight, role: str, end_s: float) -> Iterable[Bar]:
    calls = [wall_s(g.last_issued_ns, flight) for g in flight.groups]
    last = max((c for c in calls if c is not None), default=None)
    if last is not None and role == "culprit":
        yield Bar(last, "silence", f"no call since {clock_words(last)}", f"no call for {age_words(end_s - last)}")


def _section_bars(report: Report, members: Sequence[_Member], end_s: float) -> Iterable[Bar]:
    first = members[0].evidence
    assert first is not None
    now_s = report.case.evidence.now_s
    for section in sorted((s for s in first.sections if s.lane == 0), key=lambda s: s.since_s)[-2:]:
        age = now_s - section.since_s
        if 0 <= age < 1e8:
            again = " (first time)" if section.first else ""
            yield Bar(
                max(end_s - age, end_s - _LONGEST_S), "section", f"section {section.name}, {age_words(age)}{again}"
            )


def _fault_ticks(report: Report, evidence: RankEvidence) -> Iterable[Tick]:
    offset = report.case.unix_minus_mono_s.get(evidence.node, 0.0)
    if evidence.exception is not None and plausible_unix_s(evidence.exception.at_unix_s):
        yield Tick(
            evidence.exception.at_unix_s, "fault", f"{evidence.exception.type}: {evidence.exception.message[:160]}"
        )
    if evidence.exit is not None and (at := plausible_unix_s(evidence.exit.at_s + offset)):
        yield Tick(at, "fault", state_words(evidence))


def _moment_ticks(report: Report, ranks: set[int]) -> Iterable[Tick]:
    for moment in report.case.moments:
        if moment.rank in ranks and plausible_unix_s(moment.at_unix_s) and moment.kind in ("step", "section"):
            yield Tick(moment.at_unix_s, "step", f"{moment.text}, {clock_words(moment.at_unix_s, 3)}")


# -- the axis ----------------------------------------------------------------------------------------------------------
def _axis(lanes: Sequence[Lane], end_s: float, is_taken: bool) -> Axis:
    """From shortly before the last calls. What follows them gets its own scale, unless one fits both."""
    heads = [b.start_s for lane in lanes for b in lane.bars if b.kind in ("head", "open", "failed", "silence")]
    sections = [b.start_s for lane in lanes for b in lane.bars if b.kind == "section"]
    ticks = [t.at_s for lane in lanes for t in lane.ticks]
    end_s = max([end_s, *heads, *(t for t in ticks if t < end_s + 3600)])
    if not heads:
        left = min([*sections, *(t for t in ticks if t > end_s - _LONGEST_S)], default=end_s - 1.0)
        left = min(left, end_s - 0.001)
        margin = (end_s - left) * 0.06
        return Axis(left, end_s) if is_taken else Axis(left, end_s + 1.0, end_s + margin)
    first, last = min(heads), max(heads)
    left = _recent(first, last, [*ticks, *sections], max(0.02, (last - first) * 0.15))
    margin = (last - left) * 0.06
    if not is_taken:
        return Axis(left - margin, end_s + margin + 1.0, end_s + margin)
    quiet = (end_s - last) / (end_s - left)
    return Axis(left - margin, end_s) if 0.5 <= quiet <= 0.7 else Axis(left - margin, end_s, last + margin)


def _recent(first_s: float, last_s: float, times: Sequence[float], shortest_s: float) -> float:
    """How far to go back: through what came before, up to a gap that is far longer than all after it."""
    left = first_s - shortest_s
    for at_s in sorted((t for t in times if t <= last_s), reverse=True):
        if left - at_s > max(5 * (last_s - left), 0.5):
            break
        left = min(left, at_s)
    return left
