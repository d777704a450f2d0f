"""A root cause before it is put into words."""

from __future__ import annotations

from dataclasses import dataclass

from steadyrun.core.classes import FaultClass
from steadyrun.detect.waits.divergence import Shift
from steadyrun.detect.waits.graph import Stop
from steadyrun.detect.waits.signature import Difference
from steadyrun.detect.waits.world import Group

__all__ = ["Root"]


@dataclass(slots=True, eq=False)
class Root:
    """One cause.

    Attributes:
        stop: the operation that tells most about it; None without any.
        nodes: of the graph, for who waits behind it.
        ring: operations that wait for each other.
        window: group and window of calls in which the ranks left the others' course.
        note: what it rests on, or what else it may be.
        members: all ranks that take part in it, guilty or not.
    """

    cls: FaultClass
    ranks: tuple[int, ...]
    confidence: float
    stop: Stop | None
    nodes: tuple[int, ...]
    is_hard: bool = True
    difference: Difference | None = None
    shift: Shift | None = None
    ring: tuple[Stop, ...] = ()
    window: tuple[Group, int] | None = None
    note: str = ""
    members: tuple[int, ...] = ()
