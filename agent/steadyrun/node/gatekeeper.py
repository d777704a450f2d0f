"""Runs the check of this node beside what the loop waits for anyway, and says what came of it.

The check begins with the rendezvous, and again when the ranks of an attempt have ended. Its result goes to the leader,
which compares the nodes; a node that finds itself unfit between two attempts of one membership says so to all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from steadyrun.core.clock import Clock
from steadyrun.node.gate import NodeGate
from steadyrun.node.gatejudge import GateVerdict, NodeReport, judge_nodes, note_of, with_clock

__all__ = ["ARRIVAL_LIMIT_S", "TRIGGER", "Gatekeeper"]

TRIGGER: Final = "node_check"
JOIN_LIMIT_S: Final = 150.0  # the longest that a check at level full may take, and a little
ARRIVAL_LIMIT_S: Final = 3.0  # a restart waits no longer
FRESH_S: Final = 2.0  # a rendezvous right after the end of an attempt does not look again


class Gatekeeper:
    """For the loop's thread, but for ``wait``, which blocks and is for a worker thread.

    Args:
        gate: None: nothing is checked.
        record: writes a journal record: type, then fields.
        post: runs something in the loop's thread.
    """

    def __init__(
        self,
        node: str,
        gate: NodeGate | None,
        clock: Clock,
        record: Callable[..., None],
        say: Callable[[str], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._node, self._gate, self._clock = node, gate, clock
        self._record, self._say, self._post = record, say, post
        self._done = threading.Event()
        self._is_running = False
        self._report: NodeReport | None = None  # written by the worker before _done is set
        self._checked_at_s = float("-inf")
        self._arriving: tuple[float, Callable[[NodeReport | None], None]] | None = None
        self._has_tested = False
        self._told: tuple[str, ...] = ()

    # -- looking -------------------------------------------------------------------------------------------------------
    def begin(self, own: Collection[int] = (), afresh: bool = False) -> None:
        """Look now, in a thread; nothing happens while a look is under way or is fresh.

        Args:
            own: processes of this agent that may be on GPUs.
            afresh: ranks have run since the last look, however short ago it was.
        """
        gate = self._gate
        is_fresh = not afresh and self._clock.now_s() - self._checked_at_s < FRESH_S
        if gate is None or self._is_running or is_fresh:
            return
        self._is_running = True
        self._done.clear()
        with_speeds, self._has_tested = not self._has_tested, True

        def work() -> None:
            try:
                self._report = gate.check(own, with_speeds)
            except Exception as e:  # a strange machine must not keep the job from starting
                self._report = None
                text = f"the node check failed: {type(e).__name__}: {e}"
                self._post(lambda: self._say(f"steadyrun: {text}"))
            self._done.set()
            self._post(self._on_done)

        threading.Thread(target=work, name="steadyrun-gate", daemon=True).start()

    def wait(self) -> None:
        """Until the look that was begun is done, within a limit; from a worker thread."""
        if self._gate is not None:
            self._done.wait(JOIN_LIMIT_S)

    def _on_done(self) -> None:
        self._is_running = False
        self._checked_at_s = self._clock.now_s()
        report = self._report
        if report is not None:
            self._record(
                TRIGGER,
                health=report.health,
                troubles=report.troubles,
                facts=dict(report.facts),
                speeds=[list(s) for s in report.speeds],
                took_s=round(report.took_s, 3),
            )
        self._arrive(report)

    # -- with the other nodes ------------------------------------------------------------------------------------------
    def told(self, hosts_store: bool) -> dict[str, Any] | None:
        """This node's report for the leader."""
        report = self._report if self._done.is_set() else None
        return replace(report, hosts_store=hosts_store).to_wire() if report is not None else None

    def hear_leader(self, leader: str, told_at_unix_s: Any) -> None:
        """By a node that does not lead: how its clock differs from the leader's, and what it found of itself."""
        report = self._report
        if self._gate is None or report is None:
            return
        if isinstance(told_at_unix_s, (int, float)):
            report = with_clock(report, self._clock.unix_s() - told_at_unix_s, leader)
            if report is not self._report:
                self._record("clock_skew", ahead_s=round(self._clock.unix_s() - told_at_unix_s, 3), of=leader)
        if report.troubles:
            self._say_once((note_of(report, report.troubles, False, None),))

    def judge(self, reports: Sequence[Any], spares: int) -> GateVerdict:
        """By the leader: what all nodes together say; each thing is said once.

        Args:
            reports: as the nodes told them, by group rank.
            spares: how many nodes the job can do without.
        """
        verdict = judge_nodes([NodeReport.from_wire(r) if r is not None else None for r in reports], spares)
        self._say_once(verdict.notes)
        return verdict

    def _say_once(self, notes: tuple[str, ...]) -> None:
        for note in notes:
            if note not in self._told:
                self._say(f"steadyrun: {note}")
        self._told = notes

    # -- between attempts ----------------------------------------------------------------------------------------------
    def before_arrival(self, then: Callable[[NodeReport | None], None]) -> None:
        """Call *then* with this node's report once the look that is under way is done, soon in any case."""
        if not self._is_running:
            then(self._report)
        else:
            self._arriving = (self._clock.now_s() + ARRIVAL_LIMIT_S, then)

    def say_unfit(self, report: NodeReport, is_out: bool, why_not: str) -> None:
        """This node's troubles, and what follows."""
        self._say_once((note_of(report, report.troubles, is_out, why_not),))

    def hurry(self) -> None:
        """Let a node that leaves the job arrive now: the others wait for its word, and its health is of no matter."""
        self._arrive(None)

    def tick(self) -> None:
        """Let a restart go on that has waited long enough."""
        if self._arriving is not None and self._clock.now_s() >= self._arriving[0]:
            self._say("steadyrun: the node check takes long; the restart does not wait for it")
            self._arrive(None)

    def _arrive(self, report: NodeReport | None) -> None:
        if self._arriving is not None:
            (_, then), self._arriving = self._arriving, None
            then(report)

    def status(self) -> Mapping[str, Any] | None:
        """For the node's state file."""
        report = self._report if self._done.is_set() else None
        return report.to_wire() if report is not None else None
