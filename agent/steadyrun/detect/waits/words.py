"""The judgement in sentences."""

from __future__ import annotations

import time

from steadyrun.core.classes import FaultClass
from steadyrun.core.flight import WINDOW, ranks_to_text
from steadyrun.detect.grouping import name_ranks
from steadyrun.detect.waits.graph import Graph, Stop
from steadyrun.detect.waits.records import WaitReason
from steadyrun.detect.waits.root import Root
from steadyrun.detect.waits.signature import describe_op

__all__ = ["describe_root", "describe_stop", "group_text"]

MAX_RANKS_SHOWN = 60  # characters of a group's ranks
MAX_RING_SHOWN = 6


def describe_root(graph: Graph, root: Root, waiters: int) -> str:
    """One sentence that names who, what, where and since when."""
    who = name_ranks(root.ranks) if root.ranks else "nobody"
    has = "has" if len(root.ranks) == 1 else "have"
    if root.shift is not None or root.window is not None:
        return _shifted(graph, root, who, has)
    if root.difference is not None:
        return _differing(graph, root, who)
    if root.ring:
        return _ring(graph, root, who, has)
    match root.cls:
        case FaultClass.DEADLOCK_CYCLE | FaultClass.P2P_UNMATCHED:
            return _ring(graph, root, who, has)
        case FaultClass.DEVICE_STALL:
            return _device(graph, root, who, has)
        case FaultClass.IN_FLIGHT_NETWORK | FaultClass.START_UP | FaultClass.SIZE_MISMATCH:
            return _in_flight(graph, root, waiters)
        case _:
            return _absent(graph, root, who, has, waiters)


def describe_stop(graph: Graph, stop: Stop) -> str:
    """``all_reduce number 88 of mesh_tp (ranks 0-7)``."""
    name = stop.first.op.name
    if stop.src is not None and stop.dst is not None:
        return f"{name} from rank {stop.src} to rank {stop.dst} in {group_text(graph, stop)}"
    return f"{name} number {stop.seq} of {group_text(graph, stop)}"


def group_text(graph: Graph, stop: Stop) -> str:
    """The group with its ranks where they fit into a line."""
    label = graph.world.label(stop.group)
    ranks = ranks_to_text(stop.group.members)
    if stop.group.is_inferred or len(ranks) > MAX_RANKS_SHOWN:
        count = len(stop.group.members)
        return label if stop.group.is_inferred else f"{label} ({count} ranks)"
    return f"{label} (ranks {ranks.replace(',', ', ')})"


def _wait_text(graph: Graph, stop: Stop) -> str:
    """``in which 7 ranks wait since 12:03:11, called at train.py:88 in step``."""
    count = len(stop.waiters) or len(stop.calls)
    who = name_ranks(stop.waiters or list(stop.calls)) if count == 1 else f"{count} ranks"
    since = _clock(stop.since_ns)
    site = f", called at {stop.first.op.site}" if stop.first.op.site else ""
    return f"in which {who} {'waits' if count == 1 else 'wait'}{since}{site}"


def _clock(at_ns: int | None) -> str:
    return f" since {time.strftime('%H:%M:%S', time.gmtime(at_ns / 1e9))} UTC" if at_ns else ""


def _behind(stop: Stop, waiters: int) -> str:
    more = waiters - len(stop.waiters)
    return f"; {more} more {'waits' if more == 1 else 'wait'} behind" if more > 0 else ""


def _absent(graph: Graph, root: Root, who: str, has: str, waiters: int) -> str:
    stop = root.stop
    if stop is None:
        gone = "stopped" if root.cls is FaultClass.STOPPED_PROCESS else "dead"
        said = f"{'is' if len(root.ranks) == 1 else 'are'} {gone}" if root.is_hard else "left no dump"
        return f"{who} {said} ({root.note})"
    what = f"{describe_stop(graph, stop)}, {_wait_text(graph, stop)}{_behind(stop, waiters)}"
    note = f" ({root.note})" if root.note else ""
    is_ = "is" if len(root.ranks) == 1 else "are"
    match root.cls:
        case FaultClass.DEAD_PROCESS if root.is_hard:
            return f"{who} {is_} dead and missing in {what}{note}"
        case FaultClass.STOPPED_PROCESS:
            return f"{who} {is_} stopped and missing in {what}{note}"
        case FaultClass.DEAD_PROCESS:
            return f"{who} left no dump and {is_} missing in {what}{note}"
        case FaultClass.EXTRA_COLLECTIVE:
            lacking = name_ranks(sorted(stop.lacks))
            return f"{who} {has} called {describe_stop(graph, stop)}, which {lacking} never called{note}"
        case _:
            return f"{who} {has} not called {what}{note}"


def _device(graph: Graph, root: Root, who: str, has: str) -> str:
    stop = root.stop
    assert stop is not None
    site = f", called at {stop.first.op.site}" if stop.first.op.site else ""
    if root.note == "started":
        others = sorted(r for r, c in stop.calls.items() if r not in root.ranks and c.op.state.value == "started")
        return (
            f"{who} {has} called {describe_stop(graph, stop)} and the device has not started it, while it runs on "
            f"{name_ranks(others)}{site}: the device stands in what comes before"
        )
    return (
        f"{describe_stop(graph, stop)} is done on {name_ranks(stop.done_on)} and not on {who}{site}: "
        f"the device or its queue stands there"
    )


def _in_flight(graph: Graph, root: Root, waiters: int) -> str:
    stop = root.stop
    assert stop is not None
    since = _clock(stop.since_ns)
    site = f", called at {stop.first.op.site}" if stop.first.op.site else ""
    count = len(stop.calls)
    came = f"all {count} members" if not stop.lacks else f"{count} members"
    head = f"{came} have called {describe_stop(graph, stop)}{since}{site}, and it does not end"
    if stop.lacks:
        head += f"; nothing is known of {name_ranks(sorted(stop.lacks))}"
    if root.cls is FaultClass.START_UP:
        return f"{head}; it is the group's first: the connection between its ranks was never made"
    if root.cls is FaultClass.SIZE_MISMATCH:
        return f"{head}: {root.note}"
    return f"{head}: the network between them, or a device that does not show it{_behind(stop, waiters)}"


def _differing(graph: Graph, root: Root, who: str) -> str:
    assert root.difference is not None
    assert root.stop is not None
    sides = [f"{name_ranks(ranks)} called {text}" for ranks, text in root.difference.sides[:4]]
    site = next((c.op.site for r, c in root.stop.calls.items() if r in root.ranks and c.op.site), None)
    where = f", {name_ranks(root.ranks[:1])} at {site}" if site else ""
    tie = "; which of them is wrong cannot be told" if root.difference.is_tie and not root.note else ""
    note = f"; {who} is the odd one: {root.note}" if root.difference.is_tie and root.note else ""
    number = f"number {root.stop.seq} of {group_text(graph, root.stop)}"
    return f"in {number} {' and '.join(sides)}{where}{tie}{note}"


def _shifted(graph: Graph, root: Root, who: str, has: str) -> str:
    did = "skipped a collective" if root.cls is FaultClass.SKIPPED_COLLECTIVE else "called one collective too many"
    if root.window is not None:
        group, window = root.window
        first, last = window * WINDOW, window * WINDOW + WINDOW - 1
        return (
            f"{who} left the others' course in {graph.world.label(group)} between number {first} and {last}: "
            f"it probably {did}"
        )
    shift = root.shift
    assert shift is not None
    own = f" {who} called {_op_at(shift.own)}" if shift.own is not None else ""
    theirs = f" where the others called {_op_at(shift.theirs)}" if shift.theirs is not None and own else ""
    one_of = "one of " if shift.is_tie else ""
    detail = f":{own}{theirs}" if own and not shift.is_tie else ""
    return f"{one_of}{who} {'has' if shift.is_tie else has} {did} at number {shift.seq} of " + (
        f"{graph.world.label(shift.group)}{detail}; all calls after it are shifted by one"
    )


def _op_at(op: object) -> str:
    from steadyrun.core.flight import FlightOp

    assert isinstance(op, FlightOp)
    return describe_op(op) + (f" at {op.site}" if op.site else "")


def _at(stop: Stop) -> str:
    return f", at {stop.first.op.site}" if stop.first.op.site else ""


def _ring(graph: Graph, root: Root, who: str, has: str) -> str:
    if root.cls in (FaultClass.SKIPPED_COLLECTIVE, FaultClass.EXTRA_COLLECTIVE) and root.stop is not None:
        what = describe_stop(graph, root.stop)
        later = next(
            (c for r in root.ranks for c in graph.world.open.get(r, ()) if c.group is not root.stop.group), None
        )
        site = f", called by the others at {root.stop.first.op.site}" if root.stop.first.op.site else ""
        if root.cls is FaultClass.EXTRA_COLLECTIVE:
            return f"{who} {has} called {what}, which the others in the same place have not{_at(root.stop)}"
        stands = f" and stands in {later.op.name} at {later.op.site}" if later is not None and later.op.site else ""
        return f"{who} {has} gone past {what}{site} without calling it{stands}"
    parts = []
    for stop in root.ring[:MAX_RING_SHOWN]:
        inside = [r for r in stop.waiters if r in root.members] or list(stop.waiters)
        on = sorted(r for r, k in stop.lacks.items() if k.reason is not WaitReason.NO_DUMP and r in root.members)
        site = f" at {stop.first.op.site}" if stop.first.op.site else ""
        waits = "waits" if len(inside) == 1 else "wait"
        parts.append(f"{name_ranks(inside)} {waits} in {describe_stop(graph, stop)}{site} for {name_ranks(on)}")
    more = f"; {len(root.ring) - MAX_RING_SHOWN} more" if len(root.ring) > MAX_RING_SHOWN else ""
    text = "; ".join(parts) + more
    if root.cls is FaultClass.P2P_UNMATCHED:
        return f"a send or receive between {who} has no counterpart: {text}"
    if root.note:
        return f"{who} waits out of order, {root.note}: {text}"
    return f"ranks wait for each other in a ring: {text}"
