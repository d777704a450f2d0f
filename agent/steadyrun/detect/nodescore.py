"""Which nodes fail again and again: marks that faults leave on nodes, and scores that fade. Pure; time is passed in.

A mark is one fault blamed on a node, with a weight that the fault's row in the table gives it. A node's score is the
sum of its marks' weights, halved every ``HALF_LIFE_S`` and gone after ``HORIZON_S``. It is over the threshold only
where it also stands out: a program that fails everywhere leaves marks on every node, a bad machine on one. The only
node of a job cannot be compared, so there only what is certainly the machine's counts.

Marks say which incident of which run left them. So bringing two records together is a union, in any order and however
often, and a run begins with what earlier runs of the same machines have left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from statistics import median
from typing import Any, Final

from steadyrun.core.records import Finding, to_json
from steadyrun.detect.faulttable import ROWS, FaultKind

__all__ = [
    "HALF_LIFE_S",
    "HORIZON_S",
    "SCHEMA",
    "THRESHOLD",
    "Machine",
    "Mark",
    "NodeScore",
    "NodeScores",
    "Why",
    "mark_of_exclusion",
    "marks_of",
    "read_marks",
]

SCHEMA: Final = "steadyrun.node-scores/1"
HALF_LIFE_S: Final = 7 * 86400.0
HORIZON_S: Final = 28 * 86400.0
THRESHOLD: Final = 1.5  # two restarts within a week that were surely the node's: 1 + 1/2 at least
STANDS_OUT: Final = 3.0  # times the median of the job's other nodes
LEAST_CONFIDENCE: Final = 0.5  # of a finding that leaves a mark
EARLY_SHARE: Final = 0.5  # of the weight, before the attempt's first step: there most faults are a configuration's
MOST_MARKS: Final = 1000
_EXCLUDED: Final = 1.0


class Why(str, Enum):
    """What a mark is for."""

    BLAMED = "blamed"  # a restart was blamed on the node, or it was reported as slow
    DEVICE = "device"  # an event of the driver or of NVML
    EXCLUDED = "excluded"
    ALONE = "alone"  # a job of this node only failed


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of a job and the host it is on; the host outlives the job."""

    node: str
    host: str


@dataclass(frozen=True, slots=True)
class Mark:
    """One fault blamed on a node.

    Attributes:
        run: id of the run and, with *incident*, *node*, *why* and *device*, what makes the mark one of its own.
        kind: row of the fault table.
        device: of the node, where one is known.
        weight: when it was made; the score is what is left of it.
        is_hardware: as in the row.
    """

    run: str
    incident: int
    node: str
    host: str
    why: Why
    kind: FaultKind
    at_unix_s: float
    weight: float
    device: str | None = None
    is_hardware: bool = False

    @property
    def key(self) -> tuple[str, int, str, str, str]:
        return (self.run, self.incident, self.node, self.why.value, self.device or "")

    def left(self, now_unix_s: float) -> float:
        """What is left of the weight; all of it for a mark of the future (clocks differ)."""
        age_s = max(now_unix_s - self.at_unix_s, 0.0)
        return 0.0 if age_s >= HORIZON_S else self.weight * 0.5 ** (age_s / HALF_LIFE_S)


@dataclass(frozen=True, slots=True)
class NodeScore:
    """A node now.

    Attributes:
        is_over: above the threshold, and standing out among the job's nodes.
        why: for a person: what the score is made of, most of it first.
    """

    machine: Machine
    score: float
    is_over: bool
    why: str

    def sentence(self) -> str:
        """One line for a person; names what to do about it."""
        head = f"node {self.machine.node} ({self.why}) has score {self.score:.1f}"
        if not self.is_over:
            return f"{head} of {THRESHOLD:g}"
        return f"{head}, above {THRESHOLD:g}: a repeat offender, test it before it is used again"


@dataclass(frozen=True, slots=True)
class NodeScores:
    """All marks known to a run; a value, changed by making a new one."""

    run: str
    marks: tuple[Mark, ...] = ()

    def with_marks(self, marks: Iterable[Mark], now_unix_s: float) -> NodeScores:
        """The union, without what has faded; the newest where there are very many."""
        known = {m.key: m for m in (*self.marks, *marks) if m.left(now_unix_s) > 0}
        kept = sorted(known.values(), key=lambda m: (m.at_unix_s, m.key))[-MOST_MARKS:]
        return NodeScores(self.run, tuple(kept))

    def of(self, machine: Machine) -> tuple[Mark, ...]:
        """Marks of this node in this run, and of its host in others; oldest first."""
        return tuple(m for m in self.marks if (m.node == machine.node if m.run == self.run else m.host == machine.host))

    def look(self, machines: Sequence[Machine], now_unix_s: float) -> tuple[NodeScore, ...]:
        """The scores of the job's nodes, highest first."""
        is_alone = len(machines) <= 1
        score = {m: self._score(m, now_unix_s) for m in machines}
        found: list[NodeScore] = []
        for machine in machines:
            others = [s for m, s in score.items() if m != machine]
            counted = self._score(machine, now_unix_s, only_hardware=is_alone)
            stands_out = is_alone or score[machine] >= STANDS_OUT * median(others)
            is_over = counted >= THRESHOLD and stands_out
            found.append(NodeScore(machine, score[machine], is_over, self._why(machine, now_unix_s)))
        return tuple(sorted(found, key=lambda s: -s.score))

    def offenders(self, machines: Sequence[Machine], now_unix_s: float) -> frozenset[str]:
        """Names of the nodes that are over the threshold."""
        return frozenset(s.machine.node for s in self.look(machines, now_unix_s) if s.is_over)

    def _score(self, machine: Machine, now_unix_s: float, only_hardware: bool = False) -> float:
        return sum(m.left(now_unix_s) for m in self.of(machine) if m.is_hardware or not only_hardware)

    def _why(self, machine: Machine, now_unix_s: float) -> str:
        left: dict[str, float] = {}
        count: dict[str, int] = {}
        for m in self.of(machine):
            word = "excluded" if m.why is Why.EXCLUDED else m.kind.value.replace("_", " ")
            left[word] = left.get(word, 0.0) + m.left(now_unix_s)
            count[word] = count.get(word, 0) + 1
        ordered = sorted((w for w in left if left[w] > 0), key=lambda w: -left[w])
        return ", ".join(w if count[w] == 1 else f"{count[w]} times {w}" for w in ordered) or "nothing"

    # -- as JSON -----------------------------------------------------------------------------------------------------
    def to_json(self, machines: Sequence[Machine], now_unix_s: float) -> dict[str, Any]:
        """The file's content: scores for people, marks for the next reader."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "at_unix_s": now_unix_s,
            "threshold": THRESHOLD,
            "half_life_s": HALF_LIFE_S,
            "horizon_s": HORIZON_S,
            "nodes": [
                {
                    "node": s.machine.node,
                    "host": s.machine.host,
                    "score": round(s.score, 3),
                    "is_over": s.is_over,
                    "why": s.why,
                }
                for s in self.look(machines, now_unix_s)
            ],
            "marks": self.pack(),
        }

    def pack(self) -> list[Any]:
        """The marks, for other nodes."""
        return [to_json(m) for m in self.marks]


def read_marks(data: Any) -> list[Mark]:
    """The inverse of ``NodeScores.pack``; what cannot be read is left out: it comes from files and other nodes."""
    read = (_read_mark(one) for one in (data if isinstance(data, list) else []))
    return [mark for mark in read if mark is not None]


def _read_mark(data: Any) -> Mark | None:
    if not isinstance(data, Mapping):
        return None
    try:
        at_unix_s, weight = float(data["at_unix_s"]), float(data["weight"])
        if not (isfinite(at_unix_s) and 0 < weight <= 10):
            return None
        device = data.get("device")
        return Mark(
            run=str(data["run"]),
            incident=int(data["incident"]),
            node=str(data["node"]),
            host=str(data["host"]),
            why=Why(data["why"]),
            kind=FaultKind(data["kind"]),
            at_unix_s=at_unix_s,
            weight=weight,
            device=None if device is None else str(device),
            is_hardware=bool(data.get("is_hardware")),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def marks_of(
    findings: Sequence[tuple[Finding, FaultKind]],
    machines: Sequence[Machine],
    *,
    run: str,
    incident: int,
    now_unix_s: float,
    is_early: bool = False,
) -> list[Mark]:
    """What an incident leaves on the nodes that its findings name.

    A finding that names several nodes is the less sure to be any one's: its weight is shared out.

    Args:
        machines: of the whole job.
        is_early: the attempt had not made a step.
    """
    hosts = {m.node: m.host for m in machines}
    found: list[Mark] = []
    for finding, kind in findings:
        row = ROWS[kind]
        nodes = [n for n in finding.nodes if n in hosts]
        weight = row.blames_node * finding.confidence / max(len(finding.nodes), 1)
        if is_early and not row.is_hardware:
            weight *= EARLY_SHARE
        if finding.confidence < LEAST_CONFIDENCE or weight <= 0:
            continue
        why = Why.DEVICE if row.is_hardware else Why.ALONE if len(machines) <= 1 else Why.BLAMED
        device = finding.gpus[0] if len(finding.gpus) == 1 and len(nodes) == 1 else None
        found += [
            Mark(run, incident, n, hosts[n], why, kind, now_unix_s, weight, device, row.is_hardware) for n in nodes
        ]
    return found


def mark_of_exclusion(machine: Machine, kind: FaultKind, *, run: str, incident: int, now_unix_s: float) -> Mark:
    """What being left out leaves: a node that was excluded starts its next job under suspicion."""
    return Mark(run, incident, machine.node, machine.host, Why.EXCLUDED, kind, now_unix_s, _EXCLUDED)
