"""Short words for times, ranks and classes, the same in the terminal and on the page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from steadyrun.core.classes import FaultClass
from steadyrun.core.flight import RankFlight
from steadyrun.core.records import Evidence, Finding, RankEvidence
from steadyrun.detect.exits import describe_exit
from steadyrun.detect.grouping import name_ranks
from steadyrun.detect.waits.records import FlightFinding, WaitReason
from steadyrun.postmortem.case import Report

__all__ = [
    "NO_FAULT",
    "REASON_WORDS",
    "End",
    "age_words",
    "blamed_ranks",
    "clock_words",
    "end_of",
    "flight_finding",
    "home_words",
    "listed_ranks",
    "op_words",
    "plausible_unix_s",
    "rank_words",
    "short_ranks",
    "size_words",
    "state_words",
    "verdict_sentence",
    "wall_s",
]

NO_FAULT: Final = frozenset({FaultClass.HEALTHY, FaultClass.INSUFFICIENT_DATA})

REASON_WORDS: Final[Mapping[WaitReason, str]] = {
    WaitReason.NOT_ISSUED: "has not called it",
    WaitReason.QUEUED_BEHIND: "stands in another operation",
    WaitReason.NO_DUMP: "left no dump",
    WaitReason.IN_FLIGHT: "all have called it; it does not end",
    WaitReason.DIFFERS: "called something else",
}

_EARLIEST_S: Final = 1e9  # 2001: clocks of records older than this are broken
_LONGEST_WAIT_S: Final = 12 * 3600.0  # a dump made later than this after its newest record was only copied then
_LATEST_S: Final = 4.1e9  # 2099


def plausible_unix_s(unix_s: float | None) -> float | None:
    """*unix_s* if it can be a wall time of a training run, else None: records come from anywhere."""
    return unix_s if unix_s is not None and _EARLIEST_S < unix_s < _LATEST_S else None


def clock_words(unix_s: float | None, digits: int = 0) -> str:
    """``12:03:11`` UTC, with *digits* of the second's fraction; empty when it is no wall time."""
    known = plausible_unix_s(unix_s)
    if known is None:
        return ""
    scaled = int(known * 10**digits)
    whole, part = divmod(scaled, 10**digits)
    return time.strftime("%H:%M:%S", time.gmtime(whole)) + (f".{part:0{digits}d}" if digits else "")


def age_words(seconds: float) -> str:
    """``0.4 s``, ``41 s``, ``12 min``, ``3.2 h``."""
    if seconds < 0.0005:
        return "0 s"
    if seconds < 0.1:
        return f"{seconds * 1e3:.1f} ms".replace(".0 ms", " ms")
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    if seconds < 7170:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


def size_words(size_bytes: int) -> str:
    """``812 B``, ``4.1 KB``, ``2.0 MB``."""
    value = float(max(size_bytes, 0))
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def rank_words(ranks: Sequence[int], world_size: int = 0) -> str:
    """``rank 3``, ``ranks 0-5 and 7``, ``all 1024 ranks``, ``128 ranks: 0, 8, 16 … 1016, every 8th``."""
    count = len(set(ranks))
    if world_size and count == world_size and count > 2:
        return f"all {world_size} ranks"
    words = name_ranks(ranks)
    if " more ranges" not in words:
        return words
    return f"{count} ranks: {listed_ranks(ranks)}"


def listed_ranks(ranks: Sequence[int]) -> str:
    """``3``, ``0-5 and 7``, ``5, 13, 21 … 1021, every 8th``: the numbers alone, at most about 40 characters."""
    words = name_ranks(ranks).partition(" ")[2]
    if " more ranges" not in words:
        return words
    ordered = sorted(set(ranks))
    step = ordered[1] - ordered[0]
    is_even = all(b - a == step for a, b in pairwise(ordered))
    return f"{', '.join(map(str, ordered[:3]))} … {ordered[-1]}" + (f", every {_ordinal(step)}" if is_even else "")


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def short_ranks(ranks: Sequence[int]) -> str:
    """``rank_words`` for a narrow place: at most about 24 characters."""
    words = rank_words(ranks)
    return words if len(words) <= 26 else f"{len(set(ranks))} ranks, {min(ranks)} to {max(ranks)}"


def op_words(op: str, seqs: Sequence[int]) -> str:
    """``all_reduce #88``; ``#86 to #88`` where they differ."""
    low, high = min(seqs), max(seqs)
    return f"{op} #{low}" if low == high else f"{op} #{low} to #{high}"


def home_words(ranks: Sequence[int], by_rank: Mapping[int, RankEvidence]) -> str:
    """``node07, GPU 3``; several nodes by name up to three, else counted; empty when nothing is known."""
    records = [by_rank[r] for r in ranks if r in by_rank]
    nodes = list(dict.fromkeys(r.node for r in records if r.node))
    if not nodes:
        return ""
    if len(nodes) > 3:
        return f"{len(nodes)} nodes"
    where = ", ".join(nodes)
    if len(records) == 1 and records[0].gpu:
        where += f", GPU {records[0].gpu}" if records[0].gpu.isdigit() else f", {records[0].gpu}"
    return where


def state_words(r: RankEvidence) -> str:
    """How the process is, or how it ended."""
    if r.exception is not None:
        return f"{r.exception.type}: {r.exception.message[:120]}"
    if r.exit is not None:
        return describe_exit(r.exit, r.oom)
    if r.process is None:
        return ""
    cpu = f", {r.cpu_share:.0%} CPU" if r.cpu_share is not None else ""
    wait = f" in {r.process.wchan}" if r.process.wchan else ""
    return f"state {r.process.state}{wait}{cpu}"


def blamed_ranks(report: Report) -> dict[int, int]:
    """Rank to the number of the first finding that blames it."""
    blamed: dict[int, int] = {}
    for number, finding in enumerate(report.findings):
        if finding.cls in NO_FAULT:
            continue
        for rank in finding.ranks:
            blamed.setdefault(rank, number)
    return blamed


def flight_finding(report: Report, finding: Finding) -> FlightFinding | None:
    """What the collectives add to *finding*: the same record, else the same class and ranks."""
    if report.flight is None:
        return None
    of_flight = report.flight.findings
    for match in of_flight:
        if match.finding is finding or match.finding == finding:
            return match
    return next((f for f in of_flight if (f.finding.cls, f.finding.ranks) == (finding.cls, finding.ranks)), None)


def verdict_sentence(report: Report) -> str:
    """The first finding's, else what is known of where the ranks are."""
    return (report.findings[0].summary if report.findings else "") or report.sentence or "Nothing is known."


def wall_s(ns: int | None, flight: RankFlight) -> float | None:
    """A time in a flight record on the clock of whoever collected; None where it is missing or no wall time."""
    return plausible_unix_s(None if ns is None else ns / 1e9 - flight.node_minus_here_s)


@dataclass(frozen=True, slots=True)
class End:
    """Up to when the evidence reaches. *is_taken*: when it was collected; else only its newest record is known."""

    at_unix_s: float
    is_taken: bool

    def age_words(self, since_unix_s: float | None) -> str:
        """``41 s before the evidence was taken``; empty where that is not known."""
        since = plausible_unix_s(since_unix_s)
        if since is None or not self.is_taken or since >= self.at_unix_s:
            return ""
        return age_words(self.at_unix_s - since)


def end_of(report: Report) -> End | None:
    """Newest dump, else the agent's clock; the newest record where neither is known. None without any time."""
    evidence = report.case.evidence
    flights = [r.flight for r in evidence.ranks if r.flight is not None]
    newest = max(_record_times(report, flights), default=None)
    taken = [plausible_unix_s((f.taken_at_unix_s or 0.0) - f.node_minus_here_s) for f in flights]
    taken_s = max((t for t in taken if t is not None), default=_agent_now_s(report.case.unix_minus_mono_s, evidence))
    # Loose files: the file's own time is that of the last copy.
    if taken_s is not None and (newest is None or taken_s - newest < _LONGEST_WAIT_S):
        return End(max(taken_s, newest or 0.0), True)
    return None if newest is None else End(newest, False)


def _record_times(report: Report, flights: Sequence[RankFlight]) -> Iterator[float]:
    for flight in flights:
        times = [op.created_ns for op in flight.ops]
        for group in flight.groups:
            times += (group.last_issued_ns, group.last_done_ns)
        for ns in times:
            if (at_s := wall_s(ns, flight)) is not None:
                yield at_s
    for moment in report.case.moments:
        if (at_s := plausible_unix_s(moment.until_unix_s or moment.at_unix_s)) is not None:
            yield at_s


def _agent_now_s(unix_minus_mono_s: Mapping[str, float], evidence: Evidence) -> float | None:
    return plausible_unix_s(evidence.now_s + max(unix_minus_mono_s.values(), default=0.0))
