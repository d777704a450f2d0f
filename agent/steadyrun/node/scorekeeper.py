"""Keeps the nodes' scores of a run: begins with what earlier runs beside it have left, and writes its own for the next.

The leader adds marks; every node writes them into its run folder, so that a later run that sees any of them knows.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from steadyrun.core.clock import Clock
from steadyrun.core.files import write_atomically
from steadyrun.core.records import Finding
from steadyrun.core.runfolder import RunFolder, list_runs
from steadyrun.detect.faulttable import FaultKind
from steadyrun.detect.nodescore import (
    Machine,
    Mark,
    NodeScores,
    mark_of_exclusion,
    marks_of,
    read_marks,
)

__all__ = ["ScoreKeeper", "read_scores"]

EARLIER_RUNS: Final = 32  # newest first; each holds what those before it knew
MOST_BYTES: Final = 4 << 20


def read_scores(path: Path) -> Mapping[str, Any]:
    """What a run has written of its nodes' scores; empty where there is nothing, or nothing that can be read."""
    try:
        with path.open("rb") as f:
            data = json.loads(f.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


class ScoreKeeper:
    """For the loop's thread.

    Args:
        run: id of the run. The job's nodes agree on one name, so that a requeued run with the same id is another.
    """

    def __init__(self, folder: RunFolder, run: str, clock: Clock) -> None:
        self._path = folder.node_scores
        self._clock = clock
        self._machines: dict[str, Machine] = {}
        now_unix_s = clock.unix_s()
        self.scores = NodeScores(f"{run}@{now_unix_s:.0f}").with_marks(_marks_beside(folder), now_unix_s)

    # -- with the other nodes ----------------------------------------------------------------------------------------
    def machine(self, node: str) -> list[str]:
        """This node as the others get to know it."""
        return [node, socket.gethostname()]

    def pack(self) -> dict[str, Any]:
        """For the next leader, and for the files of all nodes."""
        return {"run": self.scores.run, "marks": self.scores.pack()}

    def adopt(self, data: Any) -> None:
        """What the job knows so far, from another node; nonsense changes nothing."""
        if not isinstance(data, Mapping) or not isinstance(data.get("run"), str):
            return
        before = self.scores
        now_unix_s = self._clock.unix_s()
        self.scores = NodeScores(data["run"], before.marks).with_marks(read_marks(data.get("marks")), now_unix_s)
        if self.scores.marks != before.marks:
            self._write()

    def begin(self, data: Any, machines: Any) -> list[str]:
        """An epoch begins, with what the job knows and its *machines* (pairs of node and host, from every node).

        Returns:
            A sentence for each node that is over the threshold already and was not known to be.
        """
        known = self.offenders
        pairs = machines if isinstance(machines, list) else []
        self.meet(Machine(str(p[0]), str(p[1])) for p in pairs if isinstance(p, list) and len(p) == 2)
        self.adopt(data)
        looks = self.scores.look(tuple(self._machines.values()), self._clock.unix_s())
        return [look.sentence() for look in looks if look.is_over and look.machine.node not in known]

    # -- by the leader -----------------------------------------------------------------------------------------------
    def meet(self, machines: Iterable[Machine]) -> None:
        """The nodes of the present attempt."""
        self._machines = {m.node: m for m in machines}

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, in the order of their group ranks where all are known."""
        return tuple(self._machines)

    @property
    def offenders(self) -> frozenset[str]:
        return self.scores.offenders(tuple(self._machines.values()), self._clock.unix_s())

    def marks_by_node(self, nodes: Iterable[str]) -> dict[str, Sequence[Mark]]:
        """Each of these nodes' marks of the last weeks."""
        return {n: self.scores.of(self._machines[n]) for n in nodes if n in self._machines}

    def blame(self, findings: Sequence[tuple[Finding, FaultKind]], incident: int, is_early: bool) -> list[str]:
        """Mark the nodes that the findings name.

        Returns:
            A sentence for each node that is over the threshold now and was not before.
        """
        machines = tuple(self._machines.values())
        now_unix_s = self._clock.unix_s()
        before = self.offenders
        marks = marks_of(
            findings, machines, run=self.scores.run, incident=incident, now_unix_s=now_unix_s, is_early=is_early
        )
        if not marks:
            return []
        self.scores = self.scores.with_marks(marks, now_unix_s)
        self._write()
        looks = self.scores.look(machines, now_unix_s)
        return [look.sentence() for look in looks if look.is_over and look.machine.node not in before]

    def exclude(self, nodes: Iterable[str], kind: FaultKind, incident: int) -> None:
        """They are left out of the job."""
        run, now_unix_s = self.scores.run, self._clock.unix_s()
        marks = [
            mark_of_exclusion(self._machines[n], kind, run=run, incident=incident, now_unix_s=now_unix_s)
            for n in nodes
            if n in self._machines
        ]
        self.scores = self.scores.with_marks(marks, now_unix_s)
        self._write()

    def _write(self) -> None:
        """Atomically. A full disk must not end the job: what is known stays in memory."""
        data = self.scores.to_json(tuple(self._machines.values()), self._clock.unix_s())
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(self._path, json.dumps(data))


def _marks_beside(folder: RunFolder) -> list[Mark]:
    """Marks that the newest runs in the same folder of runs have left."""
    try:
        runs = list_runs(folder.root.parent)
    except OSError:
        return []
    found: list[Mark] = []
    for root in [r for r in reversed(runs) if r != folder.root][:EARLIER_RUNS]:
        found += read_marks(read_scores(RunFolder(root).node_scores).get("marks"))
    return found
