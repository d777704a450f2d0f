"""The judgement over flight records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from steadyrun.core.classes import FaultClass
from steadyrun.core.flight import FlightDetails, RankFlight
from steadyrun.core.records import Finding
from steadyrun.detect.grouping import name_ranks
from steadyrun.detect.waits.graph import Graph, Stop, build_graph
from steadyrun.detect.waits.records import FlightFinding, FlightJudgement, RankState, Wait, WaitReason
from steadyrun.detect.waits.root import Root
from steadyrun.detect.waits.roots import find_roots
from steadyrun.detect.waits.words import describe_root
from steadyrun.detect.waits.world import World, read_world

__all__ = ["judge_flights"]

IN_MOTION_S: Final = 1.0  # who waits for less may only have come a little earlier
IN_MOTION_CONFIDENCE: Final = 0.45
MAX_COUNTED: Final = 48  # findings of which the waiters behind are counted one by one
MAX_WAITS: Final = 4000


def judge_flights(
    flights: Mapping[int, RankFlight],
    world_size: int,
    states: Mapping[int, RankState] | None = None,
    details: FlightDetails | None = None,
) -> FlightJudgement:
    """Root causes of a hang, from all ranks' flight records alone.

    Args:
        flights: by global rank; ranks may be missing, cut, or have their recorder off.
        states: what the agents know of the processes.
        details: for calls that the summaries do not hold; asked for only where ranks differ.
    """
    world = read_world(flights, world_size, states or {})
    graph = build_graph(world)
    roots = find_roots(graph, details)
    behind = _waiters(graph, roots)
    for root in roots:
        if _is_in_motion(world, root):
            root.confidence = min(root.confidence, IN_MOTION_CONFIDENCE)
    roots.sort(key=lambda r: _order(r, behind[id(r)]))
    findings = tuple(_finding(graph, r, behind[id(r)]) for r in roots)
    blocked = tuple(sorted(r for r in world.flights if r in world.open))
    idle = tuple(r for r in world.flights if r not in world.open)
    coverage = len(world.flights) / world.size if world.size else 0.0
    is_healthy = not blocked and not world.failed and not roots and not world.unknown and bool(world.flights)
    is_healthy = is_healthy and not any(f.is_cut for f in world.flights.values())
    culprits = {r for f in findings for r in f.finding.ranks if f.finding.cls is not FaultClass.IN_FLIGHT_NETWORK}
    waits, heads = _waits(graph, roots)
    return FlightJudgement(
        findings=findings or (_nothing_found(world, is_healthy),),
        waits=waits,
        blocked=blocked,
        idle=idle,
        unknown=tuple(world.unknown),
        victims=tuple(sorted({*blocked, *world.failed} - culprits)),
        coverage=coverage,
        missing=_missing(world, roots),
        is_healthy=is_healthy,
        heads=heads,
    )


def _waiters(graph: Graph, roots: Sequence[Root]) -> dict[int, int]:
    """Per root (by identity) how many ranks wait for it."""
    out: dict[int, int] = {}
    for i, root in enumerate(roots):
        if i >= MAX_COUNTED:
            out[id(root)] = len(root.stop.waiters) if root.stop is not None else 0
            continue
        found = graph.waiting_for(root.nodes)
        if root.stop is not None:
            found.update(root.stop.waiters)
        out[id(root)] = len(found - set(root.ranks))
    return out


def _is_in_motion(world: World, root: Root) -> bool:
    """The dumps were taken right after the operation began."""
    if root.stop is None:
        return False
    waited = []
    for rank, call in root.stop.calls.items():
        flight = world.flights.get(rank)
        if flight is not None and flight.taken_at_unix_s is not None and call.op.created_ns is not None:
            waited.append(flight.taken_at_unix_s - call.op.created_ns / 1e9)
    return bool(waited) and max(waited) < IN_MOTION_S


def _order(root: Root, waiters: int) -> tuple[object, ...]:
    band = 0 if root.confidence >= 0.7 else 1 if root.confidence >= 0.5 else 2
    since = root.stop.since_ns if root.stop is not None else None
    return (band, -waiters if band == 0 else -root.confidence, -waiters, since or 1 << 63, root.ranks)


def _finding(graph: Graph, root: Root, waiters: int) -> FlightFinding:
    stop = root.stop
    group = stop.group if stop is not None else None
    seq = stop.seq if stop is not None else None
    op = stop.first.op.name if stop is not None else None
    site = _site(root, stop)
    if root.shift is not None:
        group, seq = root.shift.group, root.shift.seq
        # of a skipped call the place is where the others made it; of one too many, where it was made
        ahead = root.cls is FaultClass.SKIPPED_COLLECTIVE
        own = (ahead and root.shift.theirs) or root.shift.own or root.shift.theirs
        op, site = (own.name, own.site) if own is not None else (op, site)
    elif root.window is not None:
        group = root.window[0]
    since = stop.since_ns if stop is not None else None
    finding = Finding(
        cls=root.cls,
        ranks=root.ranks,
        summary=describe_root(graph, root, waiters),
        confidence=round(root.confidence, 2),
        group=graph.world.label(group) if group is not None else None,
        seq=seq,
        op=op,
        callsite=site,
        since_unix_s=since / 1e9 if since is not None else None,
    )
    sides = root.difference.sides if root.difference is not None else ()
    return FlightFinding(finding, waiters, sides, root.is_hard)


def _site(root: Root, stop: Stop | None) -> str | None:
    """Where the culprit called it if it did, else where those who wait did."""
    if stop is None:
        return None
    own = next((stop.calls[r].op.site for r in root.ranks if r in stop.calls and stop.calls[r].op.site), None)
    return own or next((c.op.site for _, c in sorted(stop.calls.items()) if c.op.site), None)


def _nothing_found(world: World, is_healthy: bool) -> FlightFinding:
    if is_healthy:
        text = f"no recorded operation is in flight on any of {world.size} ranks"
        return FlightFinding(Finding(FaultClass.HEALTHY, (), text, 0.6))
    text = "the flight records do not tell what the ranks wait for"
    if not world.flights:
        off = [r for r, why in world.unknown.items() if "off" in why]
        text = "no rank left a usable flight record"
        if off:
            text = f"the flight recorder was off on {name_ranks(off)}: set TORCH_FR_BUFFER_SIZE above 0"
    elif not world.open and not world.failed:
        text = f"no recorded operation is in flight, and nothing is known of {name_ranks(list(world.unknown))}"
        if not world.unknown:
            text = "no recorded operation is in flight, but some dumps are cut"
    elif world.failed and not world.open:
        text = (
            f"operations ended with an error on {name_ranks(list(world.failed))}; exit codes must tell who died first"
        )
    return FlightFinding(Finding(FaultClass.INSUFFICIENT_DATA, (), text, 0.5), is_hard=False)


def _waits(graph: Graph, roots: Sequence[Root]) -> tuple[tuple[Wait, ...], dict[int, int]]:
    """The edges next to root causes first, and which of them each rank stands in."""
    near: dict[Stop, int] = {}
    for i, root in enumerate(roots):
        for stop in (*root.ring, *((root.stop,) if root.stop is not None else ())):
            near.setdefault(stop, i)
    stops = sorted(
        (s for s in graph.stops if s.waiters), key=lambda s: (near.get(s, len(roots)), -len(s.waiters), s.node)
    )
    out: list[Wait] = []
    heads: dict[int, int] = {}
    for stop in stops[:MAX_WAITS]:
        differs = {r for root in roots if root.stop is stop and root.difference is not None for r in root.ranks}
        sides: dict[WaitReason, list[int]] = {}
        for rank, lack in sorted(stop.lacks.items()):
            sides.setdefault(WaitReason.DIFFERS if rank in differs else lack.reason, []).append(rank)
        if differs and WaitReason.DIFFERS not in sides:
            sides[WaitReason.DIFFERS] = sorted(differs)
        if not sides:
            sides[WaitReason.IN_FLIGHT] = sorted(stop.members)
        for rank in stop.waiters:
            if graph.head(rank) is stop:
                heads.setdefault(rank, len(out))
        since = stop.since_ns
        for reason, on in sides.items():
            out.append(
                Wait(
                    waiters=tuple(sorted(stop.waiters)),
                    on=tuple(on),
                    reason=reason,
                    group=stop.group.name,
                    desc=stop.group.desc,
                    seq=stop.seq,
                    op=stop.first.op.name,
                    site=stop.first.op.site,
                    since_unix_s=since / 1e9 if since is not None else None,
                )
            )
    return tuple(out), heads


def _missing(world: World, roots: Sequence[Root]) -> tuple[str, ...]:
    out: list[str] = []
    reasons: dict[str, list[int]] = {}
    for rank, why in world.unknown.items():
        reasons.setdefault(why, []).append(rank)
    for why, ranks in reasons.items():
        hint = " (set TORCH_FR_BUFFER_SIZE above 0)" if "off" in why else ""
        out.append(f"{name_ranks(ranks)}: {why.replace('its', 'the') if len(ranks) > 1 else why}{hint}")
    cut = [r for r, f in world.flights.items() if f.is_cut]
    if cut:
        out.append(f"{name_ranks(cut)}: the dump is cut; what was called last is not known")
    if any("gloo" in f.recorders for f in world.flights.values()):
        out.append("gloo does not record send, recv and monitored_barrier: who waits in one looks idle")
    guessed = [world.label(g) for g in world.groups if g.is_inferred]
    if guessed:
        names = ", ".join(dict.fromkeys(guessed[:6]))
        out.append(f"no dump says which ranks are in {names}: a sidecar with the live groups would")
    if any(r.cls is FaultClass.IN_FLIGHT_NETWORK for r in roots) and not any(
        f.has_timing for f in world.flights.values()
    ):
        out.append(
            "device starts are not recorded (TORCH_NCCL_ENABLE_TIMING=1): a device that stands looks like the network"
        )
    if any(r.difference is not None and r.difference.is_tie for r in roots):
        out.append("two sides are even: the call sites and what was called before may tell which is wrong")
    return tuple(out)
