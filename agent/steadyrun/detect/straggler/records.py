"""What goes into the straggler detector and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["PHASES", "Alarm", "AlarmKind", "Cause", "Floats", "StepDetails", "StepFrame"]

Floats: TypeAlias = NDArray[np.floating[Any]]

PHASES: Final = ("forward", "backward", "optimizer", "data")


class AlarmKind(str, Enum):
    """What is slow. Only the first three are faults that somebody could act on."""

    RANK = "rank"
    NODE = "node"
    GROUP = "parallel_group"
    STAGE_IMBALANCE = "stage_imbalance"
    DATA_IMBALANCE = "data_imbalance"
    TRANSIENT = "transient"


class Cause(str, Enum):
    """Why a rank's own work takes longer, as far as its times tell.

    ``WHOLE`` is everything in proportion: device or host. ``CPU_STARVED`` the same, and the extra time is none in which
    it ran: others use its cores, or a quota. ``WORKING`` is extra work in one phase, ``WAITING`` extra time in one
    phase in which it did nothing: a file system, a lock, a slow source of data.
    """

    WHOLE = "whole"
    CPU_STARVED = "cpu_starved"
    WORKING = "working"
    WAITING = "waiting"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StepDetails:
    """Further times of one step, each [ranks] in seconds or None; NaN where a rank did not say.

    ``starved_s`` comes on top of own work: a rank could have run and did not, as others had its cores.
    ``group_wait_s`` is the time waited in collectives between parallel groups (the reduction of gradients between
    pipeline replicas, say) rather than within them.
    """

    wall_s: Floats | None = None
    forward_s: Floats | None = None
    backward_s: Floats | None = None
    optimizer_s: Floats | None = None
    data_s: Floats | None = None
    cpu_s: Floats | None = None
    wait_s: Floats | None = None
    group_wait_s: Floats | None = None
    starved_s: Floats | None = None


@dataclass(frozen=True, slots=True)
class StepFrame:
    """One step of all ranks, as ``Detector.take`` reads it.

    Attributes:
        busy_s: own work, [ranks], seconds; NaN where a rank did not report, 0 where its own work is not known.
        work: tokens or another measure of the work, [ranks], or None.
        probe_s: time of the fixed probe, [ranks], or None when this step had none.
        flags: TAG_* of core.timing, [ranks] of integers, or one number for all.
    """

    step: int
    busy_s: Floats
    work: Floats | None = None
    probe_s: Floats | None = None
    flags: NDArray[np.integer[Any]] | int = 0
    details: StepDetails = field(default_factory=StepDetails)


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing that is slow.

    Attributes:
        ranks: who; one for RANK, those of a node, of a parallel group, or of a role.
        step: at which the evidence was complete.
        first_step: at which it began.
        slowdown: share by which own work takes longer than that of peers, against its own habit (0.1 is 10 %); for an
            imbalance the share by which the role differs, or the scale of the differences.
        z: the mean residual in standard deviations of that mean.
        impact: share of the step time that the job would win without the slow.
        lost_s: time the job has lost by it so far.
        role: name of the role in which it was compared; ``group`` the parallel group that waits least.
        peers: how many ranks it was compared with; 0 where only with itself.
        phase: the phase that explains most of it, or None; ``phases`` their shares of the extra time.
        probe: slowdown of the fixed probe, or None without one: the same work on every rank.
        is_actionable: a fault of hardware or host that goes with the rank; an imbalance is none, and what was only
            compared with itself is not sure enough.
        over_step: step at which it was found to be over, or None.
    """

    kind: AlarmKind
    ranks: tuple[int, ...]
    step: int
    first_step: int
    slowdown: float
    z: float = 0.0
    impact: float = 0.0
    lost_s: float = 0.0
    role: str = ""
    group: str | None = None
    node: str | None = None
    peers: int = 0
    phase: str | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    cause: Cause = Cause.UNKNOWN
    probe: float | None = None
    is_actionable: bool = True
    over_step: int | None = None

    @property
    def key(self) -> tuple[AlarmKind, str, int]:
        """The same for one alarm while it lasts, whatever its figures become."""
        who = {AlarmKind.NODE: self.node, AlarmKind.GROUP: self.group}.get(self.kind)
        return (self.kind, who or ",".join(map(str, self.ranks)), self.step)

    def to_json(self) -> dict[str, Any]:
        """As the journal and reports hold it."""
        return {
            "kind": self.kind.value,
            "ranks": list(self.ranks),
            "step": self.step,
            "first_step": self.first_step,
            "slowdown": round(self.slowdown, 5),
            "z": round(self.z, 2),
            "impact": round(self.impact, 5),
            "lost_s": round(self.lost_s, 3),
            "role": self.role,
            "group": self.group,
            "node": self.node,
            "peers": self.peers,
            "phase": self.phase,
            "phases": {name: round(share, 3) for name, share in self.phases.items()},
            "cause": self.cause.value,
            "probe": None if self.probe is None else round(self.probe, 5),
            "is_actionable": self.is_actionable,
            "over_step": self.over_step,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Alarm:
        """The reverse; unknown keys are left out."""
        return cls(
            kind=AlarmKind(data["kind"]),
            ranks=tuple(int(r) for r in data["ranks"]),
            step=int(data["step"]),
            first_step=int(data["first_step"]),
            slowdown=float(data["slowdown"]),
            z=float(data.get("z", 0.0)),
            impact=float(data.get("impact", 0.0)),
            lost_s=float(data.get("lost_s", 0.0)),
            role=str(data.get("role", "")),
            group=data.get("group"),
            node=data.get("node"),
            peers=int(data.get("peers", 0)),
            phase=data.get("phase"),
            phases=dict(data.get("phases", {})),
            cause=Cause(data.get("cause", "unknown")),
            probe=data.get("probe"),
            is_actionable=bool(data.get("is_actionable", True)),
            over_step=data.get("over_step"),
        )
