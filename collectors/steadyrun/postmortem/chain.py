"""The chain of waits as few places: who stands where, and for whom they wait, down to the root causes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from steadyrun.core.classes import FaultClass
from steadyrun.core.flight import FlightOp
from steadyrun.detect.grouping import group_ranks, place_of
from steadyrun.detect.waits.records import FlightJudgement, Wait, WaitReason
from steadyrun.postmortem.case import Report
from steadyrun.postmortem.words import NO_FAULT, blamed_ranks, state_words, wall_s

__all__ = ["Chain", "Place", "chain_of_waits"]

_MANY: Final = 4  # places in a layer, before those that differ only in whom they wait for are put together


@dataclass(frozen=True, slots=True)
class Place:
    """Ranks that stand at one place and wait for the same others.

    Attributes:
        depth: 0 for a root cause, 1 for who waits for it directly.
        finding: number of the root cause in the report; None where the waits lead to none.
        parent: index of the place that most of them wait for; None for a root. *also*: those that the rest wait for.
        reason: why they wait for *parent*.
        op, desc, seqs: the operation they stand in; no op where they stand in none.
        groups: how many groups were folded into this place.
        site: ``train.py:88 in step``, the call, or where the main thread is.
        doing: what they do outside collectives. ``since_unix_s`` is then the last call before it.
    """

    ranks: tuple[int, ...]
    depth: int
    finding: int | None
    parent: int | None = None
    also: tuple[int, ...] = ()
    reason: WaitReason | None = None
    op: str = ""
    desc: str = ""
    seqs: tuple[int, ...] = ()
    groups: int = 1
    site: str | None = None
    since_unix_s: float | None = None
    doing: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    """Places of all root causes, those of a lower depth first.

    Attributes:
        rings: per finding that is a cycle, its places in the order of the waits (each waits for the next).
    """

    places: tuple[Place, ...] = ()
    rings: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def of_finding(self, number: int | None) -> tuple[int, ...]:
        """Indices of the places that lead to this root cause."""
        return tuple(i for i, p in enumerate(self.places) if p.finding == number)


def chain_of_waits(report: Report) -> Chain:
    """Every rank that waits or is blamed, at one place; linear in the sizes of the waits."""
    blamed = blamed_ranks(report)
    if report.flight is None or not report.flight.waits:
        return _chain_of_stacks(report, blamed)
    return _Folding(report, report.flight, blamed).chain()


class _Folding:
    def __init__(self, report: Report, flight: FlightJudgement, blamed: dict[int, int]) -> None:
        self._report, self._flight, self._blamed = report, flight, blamed
        self._waits = flight.waits
        self._by_rank = {r.rank: r for r in report.case.evidence.ranks}
        self._waits_of: dict[int, list[int]] = {}  # rank: waits it stands in
        self._waits_on: dict[int, list[int]] = {}  # rank: waits for it
        for i, wait in enumerate(self._waits):
            for rank in wait.waiters:
                self._waits_of.setdefault(rank, []).append(i)
            for rank in wait.on:
                self._waits_on.setdefault(rank, []).append(i)
        self._depth: dict[int, int] = {}
        self._via: dict[int, int] = {}
        self._cause: dict[int, int | None] = {}
        self._places: list[Place] = []
        self._place_of: dict[int, int] = {}

    def chain(self) -> Chain:
        self._spread(self._roots())
        # What is left leads to nobody who is blamed: from its ends, then from anywhere in the rings without an end.
        left = [r for r in self._waits_of if r not in self._depth]
        ends = {q for r in left for i in self._waits_of[r] for q in self._waits[i].on if q not in self._waits_of}
        self._spread(dict.fromkeys(sorted(ends)))
        for rank in left:
            if rank not in self._depth:
                self._spread({rank: None})
        self._fold()
        return Chain(tuple(self._places), tuple(self._rings()))

    def _roots(self) -> dict[int, int | None]:
        roots: dict[int, int | None] = dict(self._blamed)
        for number, finding in enumerate(self._report.findings):
            if finding.cls in NO_FAULT or finding.ranks:
                continue
            for wait in self._waits:  # nobody is blamed: the operation itself does not end
                if wait.reason is WaitReason.IN_FLIGHT and wait.seq == finding.seq and wait.op == finding.op:
                    for rank in wait.waiters:
                        roots.setdefault(rank, number)
        return roots

    def _spread(self, roots: dict[int, int | None]) -> None:
        todo: deque[int] = deque()
        for rank, cause in roots.items():
            if rank not in self._depth:
                self._depth[rank], self._cause[rank] = 0, cause
                todo.append(rank)
        seen: set[int] = set()
        while todo:
            rank = todo.popleft()
            for i in self._waits_on.get(rank, ()):
                if i in seen:
                    continue
                seen.add(i)
                for waiter in self._waits[i].waiters:
                    if waiter not in self._depth:
                        self._depth[waiter] = self._depth[rank] + 1
                        self._cause[waiter], self._via[waiter] = self._cause[rank], i
                        todo.append(waiter)

    def _fold(self) -> None:
        by_layer: dict[tuple[int, int | None], list[int]] = {}
        for rank, depth in self._depth.items():
            by_layer.setdefault((depth, self._cause[rank]), []).append(rank)
        for depth, cause in sorted(by_layer, key=lambda layer: (layer[0], self._cause_order(layer[1]))):
            ranks = sorted(by_layer[depth, cause])
            members = self._split(ranks, depth, self._key)
            if depth and len(members) > _MANY:
                members = self._split(ranks, depth, self._loose_key)
            for same in sorted(members, key=self._order):
                index = len(self._places)
                self._places.append(self._place(tuple(same), depth))
                for rank in same:
                    self._place_of[rank] = index

    def _split(self, ranks: Sequence[int], depth: int, key: Callable[[int, int], object]) -> list[list[int]]:
        members: dict[object, list[int]] = {}
        for rank in ranks:
            members.setdefault(key(rank, depth), []).append(rank)
        return list(members.values())

    def _cause_order(self, cause: int | None) -> int:
        return len(self._report.findings) if cause is None else cause

    def _order(self, ranks: Sequence[int]) -> tuple[float, int, int]:
        """Who began to wait first."""
        wait = self._wait(ranks[0])
        since = wait.since_unix_s if wait is not None and wait.since_unix_s is not None else inf
        return since, -len(ranks), ranks[0]

    def _key(self, rank: int, depth: int) -> object:
        wait = self._wait(rank)
        if depth == 0:
            return (wait.group, wait.seq) if wait is not None else None
        return self._parent(rank), *self._loose_key(rank, depth)

    def _loose_key(self, rank: int, depth: int) -> tuple[object, ...]:
        """For layers with many places: whoever stands at one call, whomever of the layer above it waits for."""
        wait = self._waits[self._via[rank]]
        return wait.reason, wait.desc, wait.op, wait.site

    def _wait(self, rank: int) -> Wait | None:
        """The wait that leads on from *rank*: towards the root; for a root the one it stands in."""
        if rank in self._via:
            return self._waits[self._via[rank]]
        head = self._flight.heads.get(rank)
        if head is not None and 0 <= head < len(self._waits):
            return self._waits[head]
        own = self._waits_of.get(rank)
        return self._waits[own[0]] if own else None

    def _parent(self, rank: int) -> int | None:
        wait = self._waits[self._via[rank]]
        above = self._depth[rank] - 1
        found = Counter(self._place_of[q] for q in wait.on if self._depth.get(q) == above and q in self._place_of)
        return found.most_common(1)[0][0] if found else None

    def _place(self, ranks: tuple[int, ...], depth: int) -> Place:
        first = ranks[0]
        waits = list(dict.fromkeys(w for w in map(self._wait, ranks) if w is not None))
        base = Place(ranks, depth, self._cause[first])
        if depth:
            above = Counter(p for p in map(self._parent, ranks) if p is not None).most_common()
            parents = tuple(index for index, _ in above)
            base = replace(base, parent=parents[0] if parents else None, also=parents[1:], reason=waits[0].reason)
        own = self._own_call(first, waits) if depth == 0 else None
        if waits:
            since = [w.since_unix_s for w in waits if w.since_unix_s is not None]
            return replace(
                base,
                op=own.name if own is not None else waits[0].op,
                desc=waits[0].desc,
                seqs=tuple(sorted({w.seq for w in waits})),
                groups=len({w.group for w in waits}),
                site=own.site if own is not None else next((w.site for w in waits if w.site), None),
                since_unix_s=min(since, default=None),
            )
        return _idle_place(base, self._report)

    def _own_call(self, rank: int, waits: Sequence[Wait]) -> FlightOp | None:
        """What *rank* itself called in the place of the wait's operation, which may differ."""
        record = self._by_rank.get(rank)
        flight = record.flight if record is not None else None
        if flight is None or not waits:
            return None
        for op in flight.ops:
            name = flight.groups[op.group].name if 0 <= op.group < len(flight.groups) else None
            if (name, op.seq) == (waits[0].group, waits[0].seq):
                return op
        return None

    def _rings(self) -> Iterable[tuple[int, tuple[int, ...]]]:
        for number, finding in enumerate(self._report.findings):
            if finding.cls is not FaultClass.DEADLOCK_CYCLE:
                continue
            places = [i for i, p in enumerate(self._places) if p.finding == number and p.depth == 0]
            if len(places) > 1:
                yield number, self._walk(places)

    def _walk(self, places: Sequence[int]) -> tuple[int, ...]:
        order = [min(places, key=lambda i: self._places[i].ranks[0])]
        left = set(places) - set(order)
        while left:
            here = self._wait(self._places[order[-1]].ranks[0])
            ahead = Counter(self._place_of[q] for q in (here.on if here else ()) if self._place_of.get(q) in left)
            step = ahead.most_common(1)[0][0] if ahead else min(left)
            order.append(step)
            left.discard(step)
        return tuple(order)


def _idle_place(place: Place, report: Report) -> Place:
    """A root that no wait tells of: by its own flight record, else where its stack or its open section says it is."""
    evidence = report.case.evidence
    rank = next((r for r in evidence.ranks if r.rank == place.ranks[0]), None)
    if rank is None:
        return replace(place, doing="nothing known of it")
    if rank.exit is not None or rank.exception is not None:
        site = report.findings[place.finding].callsite if place.finding is not None else None
        return replace(place, site=site, doing=state_words(rank))
    where = place_of(rank, evidence.script)
    flight = rank.flight
    if flight is not None and flight.ops:
        op = flight.ops[0]
        group = flight.groups[op.group] if 0 <= op.group < len(flight.groups) else None
        desc = (group.desc or group.name) if group is not None else ""
        since = wall_s(op.created_ns, flight)
        return replace(place, op=op.name, desc=desc, seqs=(op.seq,), site=op.site, since_unix_s=since)
    calls = [wall_s(g.last_issued_ns, flight) for g in flight.groups] if flight is not None else []
    last = max((t for t in calls if t is not None), default=None)
    section = f"section {where.section}" if where.section else ""
    doing = section or ("in no collective" if flight is not None else "left no flight record")
    return replace(place, site=where.site, doing=doing, since_unix_s=last)


def _chain_of_stacks(report: Report, blamed: dict[int, int]) -> Chain:
    """Without flight records: the blamed ranks, and below them where the victims stand."""
    if not blamed:
        return Chain()
    places: list[Place] = []
    for number in sorted(set(blamed.values())):
        ranks = tuple(sorted(r for r, n in blamed.items() if n == number))
        places.append(_idle_place(Place(ranks, 0, number), report))
    victims = set(report.victims) - set(blamed)
    evidence = report.case.evidence
    standing = group_ranks((r for r in evidence.ranks if r.rank in victims and r.stacks), evidence.script)
    for group in standing:
        activity = group.place.activity
        places.append(
            Place(
                group.ranks,
                1,
                places[0].finding,
                parent=0,
                op=activity.op,
                site=group.place.site,
                doing=f"section {group.place.section}" if group.place.section else "",
            )
        )
    return Chain(tuple(places))
