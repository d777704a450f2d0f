"""What a rank tells of the pace of its steps, and which ranks can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "TAG_CHECKPOINT",
    "TAG_COMPILE",
    "TAG_DEVICE",
    "TAG_EVALUATION",
    "TAG_FIRST",
    "TAG_FORWARD_SEEN",
    "Role",
    "StepTiming",
]

TAG_FIRST: Final = 1  # one of the first steps after a start
TAG_CHECKPOINT: Final = 2
TAG_EVALUATION: Final = 4
TAG_COMPILE: Final = 8
TAG_FORWARD_SEEN: Final = 16  # phases are known
TAG_DEVICE: Final = 32  # times are the device's


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One step of one rank; durations in seconds.

    Attributes:
        at_s: CLOCK_MONOTONIC at the step's end, of the rank's node.
        busy_s: own work: forward, backward up to the last accumulated gradient, optimizer and data, without waiting for
            others nor for a core, without checkpoint and evaluation; 0 where it is not known. The phases likewise.
        wait_s: exposed waiting for other ranks.
        cpu_s: CPU time of the rank's thread in the step.
        probe_s: time of the fixed probe, or None without one in this step.
        work: tokens, or another measure of the step's work that the user gave.
        flags: TAG_*.
        starved_s: time in these phases, on top of ``busy_s``, in which the thread could have run and did not: others
            had the core, or a quota was used up (/proc/thread-self/schedstat, second number). On hosts with fewer cores
            than busy threads it is most of what differs between ranks: with 4 ranks on 2 loaded cores own work differed
            by 13 % with it and by 3 % without. 0 where times are the device's or the kernel does not tell.
        group_wait_s: the part of ``wait_s`` in which it waited for other data-parallel replicas, or None where that
            cannot be told apart: DDP's waits, for buffers before the forward and for the reduction at the end.
    """

    step: int
    at_s: float
    wall_s: float
    busy_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    data_s: float
    checkpoint_s: float
    wait_s: float
    cpu_s: float
    probe_s: float | None = None
    work: float | None = None
    flags: int = 0
    starved_s: float = 0.0
    group_wait_s: float | None = None


@dataclass(frozen=True, slots=True)
class Role:
    """Ranks with equal *key* do the same work and can be compared; *name* is for people."""

    name: str
    key: tuple[Any, ...]
