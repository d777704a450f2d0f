"""What the judgement over flight records says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from steadyrun.core.records import Finding

__all__ = ["FlightFinding", "FlightJudgement", "RankState", "Wait", "WaitReason"]


class RankState(str, Enum):
    """What the agent knows of a process, apart from its collectives."""

    ALIVE = "alive"
    STOPPED = "stopped"  # SIGSTOP, a debugger
    DEAD = "dead"
    FINISHED = "finished"  # ended with 0
    UNKNOWN = "unknown"


class WaitReason(str, Enum):
    """Why somebody waits for somebody."""

    NOT_ISSUED = "not_issued"  # has not called the operation, and is in none
    QUEUED_BEHIND = "queued_behind"  # is in another operation
    NO_DUMP = "no_dump"  # nothing is known of it
    IN_FLIGHT = "in_flight"  # all have called it
    DIFFERS = "differs"  # called something else in its place


@dataclass(frozen=True, slots=True)
class Wait:
    """One edge of the waits-for graph, folded: *waiters* stand in one operation and wait for *on*, for one reason.

    Attributes:
        site: where the waiters called it (of the lowest rank).
        since_unix_s: when the first of them called it.
    """

    waiters: tuple[int, ...]
    on: tuple[int, ...]
    reason: WaitReason
    group: str
    desc: str
    seq: int
    op: str
    site: str | None = None
    since_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class FlightFinding:
    """A root cause with what only the collectives know.

    Attributes:
        finding: as in verdict.json; ``group`` is ``desc`` with the name where that tells more: ``mesh_tp (7)``.
        waiters: ranks that wait for it, directly or not.
        differences: for mismatches, who called what: ((ranks, "all_reduce [1024] Float"), ...), the largest side first.
        is_hard: follows from what was recorded; False when it rests on something that is missing.
    """

    finding: Finding
    waiters: int = 0
    differences: tuple[tuple[tuple[int, ...], str], ...] = ()
    is_hard: bool = True


@dataclass(frozen=True, slots=True)
class FlightJudgement:
    """Findings in order of importance.

    Attributes:
        waits: the edges, those next to a root cause first.
        blocked: ranks that stand in an operation; ``idle``: ranks in none; ``unknown``: ranks without a usable dump.
        victims: ranks that wait and are not to blame.
        coverage: share of the expected ranks whose dump could be used, 0..1.
        heads: per rank the index of the wait it stands in.
        missing: what would make the judgement surer.
        is_healthy: every rank's dump is there and nothing is in flight anywhere.
    """

    findings: tuple[FlightFinding, ...] = ()
    waits: tuple[Wait, ...] = ()
    blocked: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    coverage: float = 0.0
    missing: tuple[str, ...] = ()
    is_healthy: bool = False
    heads: Mapping[int, int] = field(default_factory=dict)
