"""Brings together what stacks and process states say about a hang with what the collectives say.

The collectives know who waits for whom, in which operation and since when; stacks know what a rank does instead. Where
both name the same rank, the kind of stall is the stacks' and the operation the collectives'.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from steadyrun.core.classes import FaultClass
from steadyrun.core.flight import FlightGroup, FlightOp, OpState, RankFlight
from steadyrun.core.records import Finding
from steadyrun.detect.grouping import name_ranks
from steadyrun.detect.waits.records import FlightFinding, FlightJudgement
from steadyrun.detect.waits.signature import Signature, class_of, describe_op, signature

__all__ = ["DeadByLargerMessage", "joined", "mismatch_of_death", "with_operation", "without_doubt"]

# What the collectives prove by themselves: what was called differs, or the calls lie across each other.
CALLS_DIFFER: Final = frozenset(
    {
        FaultClass.OP_MISMATCH,
        FaultClass.SIZE_MISMATCH,
        FaultClass.DTYPE_MISMATCH,
        FaultClass.SKIPPED_COLLECTIVE,
        FaultClass.EXTRA_COLLECTIVE,
        FaultClass.DEADLOCK_CYCLE,
        FaultClass.P2P_UNMATCHED,
    }
)
NOTHING_SAID: Final = frozenset({FaultClass.HEALTHY, FaultClass.INSUFFICIENT_DATA})
# What stacks guess from where ranks wait; worth nothing against what was recorded.
GUESSED_FROM_PLACES: Final = frozenset(
    {FaultClass.SKIPPED_COLLECTIVE, FaultClass.EXTRA_COLLECTIVE, FaultClass.IN_FLIGHT_NETWORK}
)
SURE: Final = 0.97
_DOUBT: Final = re.compile(r" \(gloo does not record [^)]*\)")


def joined(
    stacks: Sequence[Finding],
    flight: FlightJudgement | None,
    in_collectives: Mapping[int, str] | None = None,
    living: Collection[int] = (),
) -> list[Finding]:
    """The findings of both, each root cause once.

    Args:
        stacks: from stacks, states and suspicions.
        flight: from flight records; None where there are none.
        in_collectives: ranks whose stacks stand in a collective, and in which.
        living: ranks of which the agent knows that they did not die; that they left no dump proves nothing then.
    """
    accused = {rank for s in stacks for rank in s.ranks}
    told = [
        f
        for f in (flight.findings if flight is not None else ())
        if f.finding.cls not in NOTHING_SAID
        if f.finding.cls is not FaultClass.DEAD_PROCESS or not set(f.finding.ranks) <= set(living) - accused
    ]
    if flight is None or not told:
        return list(stacks)
    told, excused = _few_against_many(told, stacks)
    used: set[int] = set()
    out: list[Finding] = []
    for found in told:
        same = [i for i, s in enumerate(stacks) if set(s.ranks) & set(found.finding.ranks)]
        used.update(same)
        merged = _one(found, [stacks[i] for i in same])
        if all(stacks[i].cls in GUESSED_FROM_PLACES for i in same):
            merged = _unrecorded(found, merged, in_collectives or {})
        out.append(merged)
    explained = set(flight.victims) | set(flight.blocked) | excused
    for i, finding in enumerate(stacks):
        if i in used or finding.cls in GUESSED_FROM_PLACES or finding.cls in NOTHING_SAID:
            continue
        if finding.ranks and set(finding.ranks) <= explained and not _is_hard(finding):
            continue
        weight = 1.0 if _is_hard(finding) else 0.6
        out.append(replace(finding, confidence=round(finding.confidence * weight, 2)))
    return out


def _few_against_many(told: Sequence[FlightFinding], stacks: Sequence[Finding]) -> tuple[list[FlightFinding], set[int]]:
    """Few wait in a call that many do not make: the few have made one too many, and the many are excused.

    Unless a stack shows that one of the many is held up by something of its own (data, storage).
    """
    extra = next((f for f in told if f.finding.cls is FaultClass.EXTRA_COLLECTIVE), None)
    stall = next((f for f in told if f.finding.cls is FaultClass.HOST_STALL), None)
    if extra is None or stall is None or len(stall.finding.ranks) <= len(extra.finding.ranks):
        return list(told), set()
    many = set(stall.finding.ranks)
    if many & set(extra.finding.ranks) or any(
        s.cls is not FaultClass.HOST_STALL for s in stacks if many & set(s.ranks)
    ):
        return list(told), set()
    sure = replace(extra, finding=replace(extra.finding, confidence=max(extra.finding.confidence, 0.7)))
    return [sure, *(f for f in told if f is not extra and f is not stall)], many


def _unrecorded(found: FlightFinding, finding: Finding, in_collectives: Mapping[int, str]) -> Finding:
    """A rank that has called nothing by the recorders, while its stack stands in a collective, waits as the others do.

    Its group's backend records nothing. Who waits for it waits in a ring then.
    """
    if finding.cls is not FaultClass.HOST_STALL or not finding.ranks or not set(finding.ranks) <= set(in_collectives):
        return finding
    where = ", ".join(dict.fromkeys(in_collectives[r] for r in finding.ranks))
    ring = tuple(sorted({*finding.ranks, *(r for r in in_collectives if r not in finding.ranks)}))
    return replace(
        finding,
        cls=FaultClass.DEADLOCK_CYCLE,
        ranks=ring,
        confidence=min(finding.confidence, 0.6),
        summary=f"{finding.summary}; {name_ranks(finding.ranks)} stands in {where}, which no recorder sees",
    )


def _one(found: FlightFinding, same: Sequence[Finding]) -> Finding:
    finding = found.finding
    if not same:
        return finding
    hard = next((s for s in same if _is_hard(s)), None)
    guess = same[0]
    if hard is None and _is_tie(found) and set(guess.ranks) < set(finding.ranks):
        odd = f"; by where it stands {name_ranks(guess.ranks)} is the odd one"
        summary = finding.summary.partition("; which of them")[0] + odd
        return _placed(replace(finding, ranks=guess.ranks, callsite=guess.callsite, summary=summary), same)
    if hard is None and (finding.cls in CALLS_DIFFER or all(s.cls in GUESSED_FROM_PLACES for s in same)):
        return _placed(finding, same)
    stall = hard or max(same, key=lambda s: s.confidence)
    if finding.cls is FaultClass.DEVICE_STALL and found.is_hard and hard is None:
        return _placed(finding, same)
    if finding.cls is FaultClass.IN_FLIGHT_NETWORK and hard is None:
        # all have called it: what a rank does meanwhile is not the cause, unless it is plainly elsewhere
        return _placed(finding, same)
    # Both speak of this stall; ranks that only the stacks name stand in an operation themselves.
    ranks = tuple(sorted(set(stall.ranks) & set(finding.ranks))) or stall.ranks
    summary = stall.summary if hard is not None else _told_together(stall, finding)
    sure = min(max(stall.confidence, finding.confidence) + 0.1, SURE) if found.is_hard else stall.confidence
    return replace(
        stall,
        ranks=ranks,
        summary=summary,
        confidence=round(max(stall.confidence, sure), 2),
        group=finding.group,
        seq=finding.seq,
        op=finding.op or stall.op,
        callsite=stall.callsite or finding.callsite,
        since_unix_s=finding.since_unix_s if finding.since_unix_s is not None else stall.since_unix_s,
    )


def _is_tie(found: FlightFinding) -> bool:
    """Two sides of equal size called different things: the records do not tell whose fault that is."""
    sides = sorted((len(ranks) for ranks, _ in found.differences), reverse=True)
    return len(sides) > 1 and sides[0] == sides[1]


def _told_together(stall: Finding, finding: Finding) -> str:
    """The stall's own words, and the operation's; a doubt that the stack has settled is left out."""
    own = stall.summary.rpartition("; ")[2] if "; " in stall.summary else stall.summary
    return f"{own}; {without_doubt(finding.summary)}"


def without_doubt(summary: str) -> str:
    """Without what only holds as long as no stack shows where the rank is."""
    return _DOUBT.sub("", summary)


def _placed(finding: Finding, same: Sequence[Finding]) -> Finding:
    """With the section and the files that the other side knows."""
    return replace(
        finding,
        section=finding.section or next((s.section for s in same if s.section), None),
        callsite=finding.callsite or next((s.callsite for s in same if s.callsite), None),
        evidence=tuple(dict.fromkeys((*finding.evidence, *(e for s in same for e in s.evidence)))),
    )


def _is_hard(finding: Finding) -> bool:
    """A fact about the process: stopped, half dead, in a system call that does not return."""
    return finding.cls in (FaultClass.STOPPED_PROCESS, FaultClass.DEAD_PROCESS) or "state D" in finding.summary


def with_operation(deaths: Sequence[Finding], flight: FlightJudgement | None) -> list[Finding]:
    """Deaths, with the operation in which the others wait for the dead where that is known."""
    if flight is None:
        return list(deaths)
    out = []
    for death in deaths:
        match = next((f.finding for f in flight.findings if set(f.finding.ranks) & set(death.ranks)), None)
        if match is not None and death.op is None and match.seq is not None:
            death = replace(death, group=match.group, seq=match.seq, op=match.op)
        out.append(death)
    return out


# -- gloo's way of telling a mismatch ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class DeadByLargerMessage:
    """A rank that gloo aborted because a peer sent more than it expected: its own buffer was the smaller one.

    ``is_told``: its last words say so; otherwise only survivors that differ from each other do.
    """

    rank: int
    is_told: bool = True


@dataclass(frozen=True, slots=True)
class _Broken:
    """The operation in which a survivor lost its connection."""

    rank: int
    group: FlightGroup
    op: FlightOp


def mismatch_of_death(dead: DeadByLargerMessage, flights: Mapping[int, RankFlight]) -> Finding | None:
    """Who called what differs, from what the survivors were in when their connection broke.

    The dead rank left no record, but it had the smaller buffer. Where the survivors agree with each other, it is the
    odd one; where they differ, it belongs to the smallest side, and the smaller camp is to blame.

    Returns:
        The finding, or None where the records do not tell.
    """
    broken = [b for rank, flight in sorted(flights.items()) if rank != dead.rank and (b := _broken(rank, flight))]
    if not broken:
        return None
    newest = max(b.op.seq for b in broken)
    broken = [b for b in broken if b.op.seq == newest]
    sides: dict[Signature, list[_Broken]] = {}
    for b in broken:
        sides.setdefault(signature(b.op), []).append(b)
    if len(sides) == 1 and not dead.is_told:
        return None
    by_bytes = [[b.rank for b in side] for side in sorted(sides.values(), key=lambda side: _bytes_of(side[0].op))]
    kinds = {class_of(one, other) for one, other in itertools.combinations(sides, 2)}
    cls = next((c for c in _KIND_OF if c in kinds), FaultClass.SIZE_MISMATCH)
    if len(sides) == 1:
        odd, others, sure = [dead.rank], by_bytes[0], 0.85 if len(broken) > 1 else 0.6
    else:
        camps = sorted([[*by_bytes[0], dead.rank], *by_bytes[1:]], key=len)
        odd, others = camps[0], [r for camp in camps[1:] for r in camp]
        sure = 0.85 if len(camps[0]) < len(camps[1]) else 0.5
    first = next((b for b in broken if b.rank in odd), broken[0])
    label = first.group.desc or first.group.name
    called = {b.rank: b.op for b in broken}
    calls = "; ".join(f"{name_ranks(ranks)}: {describe_op(called[ranks[0]])}" for ranks in by_bytes)
    kind = _KIND_OF[cls]
    return Finding(
        cls=cls,
        ranks=tuple(sorted(odd)),
        summary=(
            f"{name_ranks(odd)} called {first.op.name} number {newest} of {label} with another {kind} than "
            f"{name_ranks(others)} ({calls}); gloo aborted rank {dead.rank}, which got more than it expected"
        ),
        confidence=sure,
        group=label,
        seq=newest,
        op=first.op.name,
        callsite=first.op.site,
        since_unix_s=first.op.created_ns / 1e9 if first.op.created_ns is not None else None,
    )


def _broken(rank: int, flight: RankFlight) -> _Broken | None:
    """The last operation that ended with an error, or is still open."""
    open_ = [op for op in flight.ops if not op.is_p2p]
    failed = [op for op in open_ if op.state is OpState.FAILED]
    op = max(failed or open_, key=lambda o: (o.created_ns or 0, o.seq), default=None)
    return _Broken(rank, flight.groups[op.group], op) if op is not None else None


_KIND_OF: Final = {
    FaultClass.OP_MISMATCH: "operation",
    FaultClass.DTYPE_MISMATCH: "type",
    FaultClass.SIZE_MISMATCH: "size",
}
_ITEM_BYTES: Final = {
    "Double": 8, "Long": 8, "ComplexFloat": 8, "ComplexDouble": 16, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2,
    "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip


def _bytes_of(op: FlightOp) -> int:
    sizes, dtypes = op.in_sizes or op.out_sizes, op.in_dtypes or op.out_dtypes
    return sum(prod(size) * _ITEM_BYTES.get(dtypes[i] if i < len(dtypes) else "", 4) for i, size in enumerate(sizes))
