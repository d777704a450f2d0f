"""What the nodes' own checks say together, before an attempt: who differs from the others, who is left out. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high
from typing import Any, Final

from steadyrun.collectors.protocol import Health, Trouble

__all__ = ["GateVerdict", "NodeReport", "judge_nodes", "note_of", "slower_devices", "with_clock"]

CLOCK_S: Final = 2.0  # beyond it times of different nodes cannot be told together; telling takes milliseconds
GPU_RATIO: Final = 0.85  # devices of a model differ by a few percent
CPU_RATIO: Final = 0.5  # others may share the machine
FEW_SHARE: Final = 0.25  # who differs is an exception, not another kind of node
MOST_TROUBLES: Final = 4  # of a node that are told to the others
MOST_TEXT: Final = 240

# Facts of which more is better, and how too few of it are told.
_COMPARED: Final[Mapping[str, str]] = {
    "gpus": "has {own:g} GPUs, the others have {usual:g}",
    "nvlinks": "has a GPU with {own:g} NVLinks up, on the others it is {usual:g}",
    "pcie_width": "has a GPU on {own:g} PCIe lanes, on the others it is {usual:g}",
    "fabric_ports_up": "has {own:g} RDMA ports up, the others have {usual:g}",
    "fabric_rate_gbps": "has an RDMA port at {own:g} Gb/s, on the others it is {usual:g}",
}


@dataclass(frozen=True, slots=True)
class NodeReport:
    """How a node found itself.

    Attributes:
        troubles: worst first.
        facts: numbers that are compared with other nodes'; ``model`` is the GPUs'.
        speeds: of each device that was tested: name, TFLOP/s, GB/s.
        hosts_store: the job cannot go on without it.
    """

    node: str
    health: Health
    troubles: tuple[Trouble, ...] = ()
    facts: Mapping[str, float | str] = field(default_factory=dict)
    speeds: tuple[tuple[str, float, float], ...] = ()
    took_s: float = 0.0
    hosts_store: bool = False

    @property
    def is_unfit(self) -> bool:
        """It should not be part of an attempt."""
        return self.health is Health.UNHEALTHY

    def to_wire(self) -> dict[str, Any]:
        """A few hundred bytes for the other nodes."""
        return {
            "node": self.node,
            "health": self.health.value,
            "troubles": [[t.health.value, t.reason[:MOST_TEXT]] for t in self.troubles[:MOST_TROUBLES]],
            "facts": dict(self.facts),
            "speeds": [list(s) for s in self.speeds],
            "took_s": round(self.took_s, 3),
            "hosts_store": self.hosts_store,
        }

    @classmethod
    def from_wire(cls, data: Any) -> NodeReport | None:
        """None for what is no report: it comes from another node, perhaps of another version."""
        try:
            return cls(
                str(data["node"]),
                Health(data["health"]),
                tuple(Trouble(Health(h), str(r)[:MOST_TEXT]) for h, r in data["troubles"][:MOST_TROUBLES]),
                {str(k): v if isinstance(v, str) else float(v) for k, v in dict(data["facts"]).items()},
                tuple((str(n), float(t), float(g)) for n, t, g in data["speeds"][:64]),
                float(data["took_s"]),
                bool(data["hosts_store"]),
            )
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """What is to be done.

    Attributes:
        bad: for each node with something to tell, its place in the order given and the reasons, worst first.
        excluded: places of those that are left out.
        reason: why, in one sentence; empty when nobody is.
        notes: lines for a person.
    """

    bad: Mapping[int, tuple[Trouble, ...]] = field(default_factory=dict)
    excluded: tuple[int, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()


def judge_nodes(reports: Sequence[NodeReport | None], spares: int) -> GateVerdict:
    """*reports* by group rank, None where a node told nothing; *spares*: how many nodes the job can do without.

    A node is left out for what makes it unfit by itself or against the others, as long as there are spares for it and
    most nodes are well: what all share (a full file server) is no node's fault.
    """
    troubles: dict[int, list[Trouble]] = {i: list(r.troubles) for i, r in enumerate(reports) if r is not None}
    for place, found in _differences(reports):
        troubles[place].append(found)
    bad = {
        place: tuple(sorted(found, key=lambda t: -t.health.weight))
        for place, found in troubles.items()
        if any(t.health in (Health.DEGRADED, Health.UNHEALTHY) for t in found)
    }
    unfit = [place for place, found in bad.items() if found[0].health is Health.UNHEALTHY]
    excluded, why_not = _choose(unfit, reports, spares)
    notes = [note_of(reports[place], found, place in excluded, why_not.get(place)) for place, found in bad.items()]
    reason = ""
    if excluded:
        first = excluded[0]
        more = f" (and {len(excluded) - 1} more nodes)" if len(excluded) > 1 else ""
        reason = f"node check: {_name(reports[first])}: {bad[first][0].reason}{more}"
    return GateVerdict(bad, excluded, reason, tuple(notes))


def _choose(
    unfit: Sequence[int], reports: Sequence[NodeReport | None], spares: int
) -> tuple[tuple[int, ...], Mapping[int, str]]:
    """Who is left out, and why the other unfit ones are not."""
    if 2 * len(unfit) > len(reports) or len(unfit) == len(reports):
        return (), dict.fromkeys(unfit, "as most nodes are like that" if len(reports) > 1 else "there is no other node")
    excluded: list[int] = []
    why_not: dict[int, str] = {}
    for place in unfit:
        report = reports[place]
        if report is not None and report.hosts_store:
            why_not[place] = "it hosts the rendezvous"
        elif len(excluded) >= spares:
            why_not[place] = "no spare node is there" if spares == 0 else "too few spare nodes are there"
        else:
            excluded.append(place)
    return tuple(excluded), why_not


def note_of(report: NodeReport | None, found: Sequence[Trouble], is_out: bool, why_not: str | None) -> str:
    """A line for a person: a node's troubles, whether it is left out, and why not."""
    told = "; ".join(t.reason for t in found[:MOST_TROUBLES])
    ends = ": the node is left out" if is_out else f" (it stays: {why_not})" if why_not else ""
    return f"node check: {_name(report)}: {told}{ends}"


def _name(report: NodeReport | None) -> str:
    return report.node if report is not None else "?"


def _differences(reports: Sequence[NodeReport | None]) -> Iterable[tuple[int, Trouble]]:
    """Places and how they differ from the nodes with GPUs of their model."""
    models: dict[str, list[tuple[int, NodeReport]]] = {}
    for place, report in enumerate(reports):
        if report is not None:
            models.setdefault(str(report.facts.get("model", "")), []).append((place, report))
    for same in models.values():
        for fact, words in _COMPARED.items():
            values = {p: v for p, r in same if isinstance(v := r.facts.get(fact), (int, float))}
            yield from _fewer(values, words)
        yield from _slower(same)


def _fewer(values: Mapping[int, float], words: str) -> Iterable[tuple[int, Trouble]]:
    if len(values) < 2:
        return
    counts = Counter(values.values())
    usual = max(counts, key=lambda v: (counts[v], v))
    low = [place for place, value in values.items() if value < usual]
    if len(low) <= max(FEW_SHARE * len(values), 1):
        for place in low:
            yield place, Trouble(Health.UNHEALTHY, words.format(own=values[place], usual=usual))


def _slower(same: Sequence[tuple[int, NodeReport]]) -> Iterable[tuple[int, Trouble]]:
    speeds = [(place, speed) for place, report in same for speed in report.speeds]
    found = _compared([speed for _, speed in speeds])
    return [(speeds[i][0], trouble) for i, trouble in found]


def slower_devices(speeds: Sequence[tuple[str, float, float]]) -> list[Trouble]:
    """Devices, measured as name, TFLOP/s and GB/s, that are slower than the others."""
    return [trouble for _, trouble in _compared(speeds)]


def _compared(speeds: Sequence[tuple[str, float, float]]) -> Iterable[tuple[int, Trouble]]:
    if len(speeds) < 2:
        return
    for column, unit, what in ((1, "TFLOP/s", "multiplies at"), (2, "GB/s", "copies at")):
        usual = median_high([float(s[column]) for s in speeds])
        for i, speed in enumerate(speeds):
            own, is_cpu = float(speed[column]), speed[0] == "cpu"
            if own < (CPU_RATIO if is_cpu else GPU_RATIO) * usual:
                health = Health.DEGRADED if is_cpu else Health.UNHEALTHY
                yield i, Trouble(health, f"{speed[0]} {what} {own:.3g} {unit}, the others at {usual:.3g}")


def with_clock(report: NodeReport, ahead_s: float, other: str) -> NodeReport:
    """*report* with how far its clock is off, where that is too far."""
    if abs(ahead_s) <= CLOCK_S:
        return report
    way = "ahead of" if ahead_s > 0 else "behind"
    trouble = Trouble(
        Health.DEGRADED,
        f"its clock is {abs(ahead_s):.1f} s {way} that of {other}",
        ("let chrony or ntpd set the clock: times in records cannot be compared",),
        "clock",
    )
    health = max(report.health, Health.DEGRADED, key=lambda h: h.weight)
    return replace(report, health=health, troubles=(*report.troubles, trouble))
