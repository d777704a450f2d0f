"""What the order of calls proves: ranks that call two operations the other way round, hosts that stopped calling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from steadyrun.core.classes import FaultClass
from steadyrun.detect.waits.graph import Graph, Stop
from steadyrun.detect.waits.root import Root
from steadyrun.detect.waits.world import MAIN, Call, Group, Standing, ends_of

__all__ = ["disordered", "hosts_behind"]

MIN_AHEAD: Final = 2  # calls that all others have made ahead and one has not


_Key = tuple[object, ...]


def disordered(graph: Graph) -> list[Root]:
    """Ranks that called *later* without *earlier*, although others in the same groups called *earlier* first.

    The fewer are odd; where both are as many, groups of the same kind decide, and if they do not, nothing is said here.
    """
    like = _Like(graph)
    standing: dict[int, list[Call]] = {}
    found: dict[tuple[Stop, _Key], list[int]] = {}
    for earlier in graph.stops:
        if earlier.is_p2p or earlier.first.stream != MAIN:
            continue
        for rank in earlier.lacks:
            if rank not in standing:
                standing[rank] = _stands_in(graph, rank)
            for call in standing[rank]:
                if call.group is not earlier.group and not _is_before(graph, rank, earlier, call):
                    found.setdefault((earlier, like.key(call)), []).append(rank)
    proofs: dict[tuple[int, ...], list[_Proof]] = {}
    for (earlier, key), without in found.items():
        at = like.calls(key)
        first = [r for r, c in earlier.calls.items() if r in at and c.place < at[r].place]
        odd = _odd(graph, like, earlier, key, first, without) if first else None
        if odd is not None:
            proof = _Proof(earlier, key, tuple(first), tuple(without))
            proofs.setdefault(tuple(odd), []).append(proof)
    return [_root(graph, like, odd, same) for odd, same in proofs.items()]


@dataclass(frozen=True, slots=True)
class _Proof:
    """*first* called *earlier* before *later*; *without* called *later* and not *earlier*."""

    earlier: Stop
    later: _Key
    first: tuple[int, ...]
    without: tuple[int, ...]


class _Like:
    """Open calls that are the same to the order: one collective, or the next send or receive between the same places of
    groups of one kind."""

    def __init__(self, graph: Graph) -> None:
        self._world = graph.world
        self._pairs: dict[_Key, dict[int, Call]] = {}
        for calls in graph.world.open.values():
            for call in calls:
                if call.op.is_p2p:
                    self._pairs.setdefault(self.key(call), {}).setdefault(call.rank, call)

    def key(self, call: Call) -> _Key:
        if not call.op.is_p2p:
            return (call.group.index, call.op.seq)
        src, dst = ends_of(call)
        places = call.group.place_of(src), call.group.place_of(dst)
        if None in places:
            return ("alone", call.rank, call.place)
        return (call.group.kind, *places, src == call.rank)

    def calls(self, key: _Key) -> Mapping[int, Call]:
        if isinstance(key[0], int) and isinstance(key[1], int):
            return self._world.at.get((key[0], key[1]), {})
        return self._pairs.get(key, {})

    def calls_in_all(self, key: _Key) -> Iterable[Call]:
        """Also of groups of the same kind."""
        if not isinstance(key[0], int) or not isinstance(key[1], int):
            yield from self.calls(key).values()
            return
        kind = self._world.groups[key[0]].kind
        for group in self._world.groups:
            if group.kind == kind:
                yield from self._world.at.get((group.index, key[1]), {}).values()


def _stands_in(graph: Graph, rank: int) -> list[Call]:
    """What holds the rank up, and what its host called last."""
    calls = [c for c in graph.world.open.get(rank, ()) if c.stream == MAIN]
    last = next((c for c in reversed(calls) if not c.op.is_p2p), None)
    return list(dict.fromkeys(c for c in (*calls[:1], last) if c is not None))


def _is_before(graph: Graph, rank: int, earlier: Stop, call: Call) -> bool:
    own = earlier.calls.get(rank)
    if own is not None:
        return own.place < call.place
    return graph.world.standing(rank, earlier.group, earlier.seq) is not Standing.ABSENT


def _odd(graph: Graph, like: _Like, earlier: Stop, key: _Key, first: list[int], without: list[int]) -> list[int] | None:
    if len(first) != len(without):
        return sorted(first if len(first) < len(without) else without)
    votes = Counter(_votes(graph, like, earlier, key, {*first, *without}))
    if votes[True] == votes[False]:
        return None
    return sorted(without if votes[True] > votes[False] else first)


def _votes(graph: Graph, like: _Like, earlier: Stop, key: _Key, besides: set[int]) -> Iterable[bool]:
    """Of ranks in groups of the same kinds, whether they called the earlier one first."""
    world = graph.world
    for call in like.calls_in_all(key):
        rank = call.rank
        mine = _of_kind(world.groups_of.get(rank, ()), earlier.group)
        if rank in besides or mine is None:
            continue
        own = world.at.get((mine.index, earlier.seq), {}).get(rank)
        yield own.place < call.place if own is not None else world.standing(rank, mine, earlier.seq) is Standing.DONE


def _of_kind(groups: Iterable[Group], group: Group) -> Group | None:
    return next((g for g in groups if g.kind == group.kind), None)


def _root(graph: Graph, like: _Like, odd: tuple[int, ...], proofs: list[_Proof]) -> Root:
    """Who lacks one call has skipped it; who lacks several, or makes it later, calls in another order."""
    world = graph.world
    proof = min(proofs, key=lambda p: (p.earlier.since_ns or 0, p.earlier.node))
    earlier, at = proof.earlier, like.calls(proof.later)
    is_without = odd == tuple(sorted(proof.without))
    others = proof.first if is_without else proof.without
    later = at[proof.without[0]]
    stands = graph.heads.get((later.rank, MAIN))
    called_both = all(r in earlier.calls for r in proof.without)
    lacks_several = len({p.earlier.group.index for p in proofs}) > 1 and is_without
    is_one = (
        any(at[r].place + 1 < len(world.open[r]) for r in proof.without)  # they went on calling, and not this
        or (earlier.first.op.thread != later.op.thread and bool(earlier.first.op.thread))
        or (later.is_host and not later.op.is_p2p and all(r in at for r in earlier.calls))
    )  # where all have come to the later one, another order would not hold anybody up
    cls = FaultClass.DEADLOCK_CYCLE
    if not called_both and not lacks_several and is_one:
        cls = FaultClass.SKIPPED_COLLECTIVE if is_without else FaultClass.EXTRA_COLLECTIVE
    head = graph.heads.get((odd[0], MAIN), earlier)
    stop = head if cls is FaultClass.DEADLOCK_CYCLE else earlier
    nodes = (earlier.node, *(n for r in odd for n in graph.rank_nodes(r)))
    ring = tuple(dict.fromkeys((earlier, head if is_without or stands is None else stands)))
    return Root(
        cls,
        odd,
        0.75 if len(others) >= 2 * len(odd) else 0.65,
        stop,
        nodes,
        ring=ring,
        note="it calls them in another order than the others" if cls is FaultClass.DEADLOCK_CYCLE else "",
        members=tuple(sorted({*proof.first, *proof.without})),
    )


def hosts_behind(graph: Graph, blamed: set[int]) -> list[Root]:
    """Ranks that stand in a device operation with others, whose hosts went on calling while theirs did not.

    Hosts run ahead of their devices until they have to wait for them, all equally far. What else holds the devices up
    hides that one of the hosts stands, too.
    """
    world = graph.world
    host_stops = {(s.group.index, s.seq): s for s in graph.stops if s.group.is_host and s.first.stream == MAIN}
    roots: dict[int, Root] = {}
    for stop in graph.stops:
        together = [r for r in stop.waiters if not world.flights[r].is_cut]
        if len(together) < 2 or stop.group.is_host or stop.is_p2p:
            continue
        rank = _behind_in_group(stop, together)
        at = stop
        if rank is None:
            calls = (c for r in together[:3] for c in world.open[r] if c.is_host)
            for call in calls:
                later = host_stops.get((call.group.index, call.op.seq))
                without = [r for r in together if later is not None and r in later.lacks and r not in later.calls]
                if later is not None and len(without) == 1:
                    rank, at = without[0], later
                    break
        if rank is None or rank in blamed or rank in roots:
            continue
        if any(c.is_host and c.stream == MAIN for c in world.open[rank]):
            continue
        roots[rank] = Root(FaultClass.HOST_STALL, (rank,), 0.55 if len(together) > 2 else 0.45, at,
                           (graph.node_of[(rank, MAIN)],), False,
                           note=f"its device stands in {stop.first.op.name} number {stop.seq}, and the hosts of the "
                           "others in it have gone on")  # fmt: skip
    return list(roots.values())


def _behind_in_group(stop: Stop, together: list[int]) -> int | None:
    """The only one that has called fewer collectives of this group, while all others have called equally many."""
    if len(together) < 3:
        return None
    issued = {r: stop.group.issued.get(r, -1) for r in together}
    most = max(issued.values())
    behind = [r for r, n in issued.items() if n < most]
    return behind[0] if len(behind) == 1 and issued[behind[0]] <= most - MIN_AHEAD else None
