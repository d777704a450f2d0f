"""Who is slow: this node's part in finding out, and for the leading node all that follows from it.

Every node hands the step timings of its ranks to the leader through the control store, out of the way of training: no
collective, no rank waits for it, and a rank or node that says nothing is a gap in the comparison and nothing more. The
leader compares, and tells: a line, a record in the journal, an incident with its report. Where it was asked to, it also
says when a restart without the slow node pays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final

import structlog

from steadyrun.core.clock import Clock
from steadyrun.core.records import RankEvidence, Verdict
from steadyrun.core.timing import Role, StepTiming
from steadyrun.detect.straggler import ActAdvice, Alarm, AlarmKind, findings, sentence
from steadyrun.node.control import ControlChannel, PaceTold
from steadyrun.node.pacejudge import PaceEvent, PaceJudge, PaceNews
from steadyrun.node.reporting import Desk, RankPlace
from steadyrun.node.slowaction import CostMeter, SlowAction
from steadyrun.node.timingwire import MOST_NAME, NodeFacts, PacesTold, RankFacts, TimingInbox, TimingOutbox, role_of

__all__ = ["ACTIONS", "Replacement", "Straggling", "read_place", "read_role"]

log = structlog.get_logger()

ACTIONS: Final = ("report", "checkpoint-restart-exclude")
SEND_S: Final = 1.0  # a node tells its timings this often, and the leader looks as often
FACTS_S: Final = 2.0  # how often it is looked whether a rank has said what its role is
ADVICE_S: Final = 5.0
FIGURES_S: Final = 60.0  # a record of what is slow now, for those who look at a running job
INCIDENT_AGAIN_S: Final = 600.0  # who comes and goes has one incident in so long
MOST_INCIDENTS: Final = 50  # of a run; beyond, lines and records go on
MOST_ROLE_BYTES: Final = 1 << 16
FAULTS: Final = (AlarmKind.RANK, AlarmKind.NODE, AlarmKind.GROUP)


@dataclass(frozen=True, slots=True)
class Replacement:
    """A restart that pays: why, and the slow node's group rank and name where it can be told."""

    attempt: int
    reason: str
    group_rank: int | None
    node: str
    hosts_store: bool


@dataclass(slots=True)
class _Turn:
    """One attempt."""

    attempt: int
    world_size: int
    channel: ControlChannel | None
    judge: PaceJudge | None  # the leader's


class Straggling:
    """For the loop's thread; nothing here blocks. The leader is group rank 0.

    Args:
        record: writes a journal record: type, then fields.
        replace: called with what should be done when acting pays; never called where *action* is ``report``.
    """

    def __init__(
        self,
        node: str,
        clock: Clock,
        desk: Desk,
        record: Callable[..., None],
        say: Callable[[str], None],
        action: str = ACTIONS[0],
        replace: Callable[[Replacement], None] | None = None,
    ) -> None:
        if action not in ACTIONS:
            raise ValueError(f"action must be one of {', '.join(ACTIONS)}, got {action!r}")
        self._node, self._clock, self._desk = node, clock, desk
        self._record, self._say, self._replace = record, say, replace
        self._acts = action == ACTIONS[1]
        self._turn: _Turn | None = None
        self._outbox = TimingOutbox()
        self._inbox = TimingInbox(1)
        self._heard: dict[int, bytes] = {}  # by group rank, a message that was not read yet
        self._rows: dict[int, list[StepTiming]] = {}
        self._facts = NodeFacts(node)
        self._roles: dict[int, tuple[int, Role | None, str]] = {}  # by rank: of which file (mtime), and what it says
        self._groups: dict[int, NodeFacts] = {}  # by group rank
        self._hosts_store = False
        self._costs = CostMeter()
        self._choice = SlowAction()
        self._incidents: dict[tuple[Any, ...], tuple[int, float]] = {}  # who -> number, when
        self._number_of: dict[tuple[Any, ...], int] = {}  # alarm -> incident
        self._filed = 0
        self._next_send_s = self._next_facts_s = self._next_advice_s = self._next_figures_s = -inf
        self._is_asked = False

    # -- attempts ------------------------------------------------------------------------------------------------------
    def begin_attempt(
        self, attempt: int, world_size: int, channel: ControlChannel | None, hosts_store: bool = False
    ) -> None:
        """Ranks of an attempt are being started; what is known of an earlier one counts no more.

        Args:
            channel: None: this node is alone.
            hosts_store: the control store goes with this agent.
        """
        self.end_attempt()
        is_leader = channel is None or channel.is_leader
        self._turn = _Turn(attempt, world_size, channel, PaceJudge(world_size) if is_leader else None)
        self._outbox, self._inbox = TimingOutbox(), TimingInbox(1 if channel is None else channel.group_world_size)
        self._heard, self._rows = {}, {}
        self._facts, self._hosts_store = NodeFacts(self._node), hosts_store
        self._roles.clear()
        self._groups.clear()
        self._is_asked = False
        now_s = self._clock.now_s()
        self._costs.begin_attempt(now_s)
        self._choice.begin_attempt()
        self._next_send_s = self._next_facts_s = -inf
        self._next_advice_s, self._next_figures_s = now_s + ADVICE_S, now_s + FIGURES_S
        if is_leader and channel is not None and channel.group_world_size > 1:
            channel.expect_pace(attempt, SEND_S)

    def end_attempt(self) -> None:
        """Its ranks are gone, or about to: say what is left to say."""
        turn, self._turn = self._turn, None
        if turn is None or turn.judge is None:
            return
        self._read_heard(turn.judge)
        for event in turn.judge.finish(self._clock.now_s(), self._clock.unix_s()):
            self._tell(turn, event)

    def close(self) -> None:
        self.end_attempt()

    # -- rows ----------------------------------------------------------------------------------------------------------
    def sample(
        self,
        now_s: float,
        rows: Mapping[int, Sequence[StepTiming]],
        places: Iterable[RankPlace],
        checkpoints_done: int = 0,
    ) -> None:
        """Some more steps of this node's ranks; called with the board, every half second.

        Args:
            checkpoints_done: of the attempt, as this node's ranks tell.
        """
        turn = self._turn
        if turn is None:
            return
        self._costs.see(bool(rows), checkpoints_done, now_s)
        for rank, timings in rows.items():
            self._rows.setdefault(rank, []).extend(timings)
        if now_s >= self._next_facts_s:
            self._next_facts_s = now_s + FACTS_S
            self._look_at_roles(turn, places)
        if turn.judge is not None:
            self._judge(turn, turn.judge, now_s)
        elif now_s >= self._next_send_s and self._rows and turn.channel is not None:
            self._next_send_s = now_s + SEND_S
            self._outbox.put(self._rows)
            self._rows = {}
            turn.channel.tell_pace(turn.attempt, self._outbox.message(self._facts.to_bytes()))

    def hear(self, message: PaceTold) -> None:
        """By the leader: what another node told."""
        turn = self._turn
        if turn is None or turn.judge is None or message.attempt != turn.attempt or not message.payload:
            return
        if message.group_rank in self._heard:  # the loop was busy for so long; the newer one may not hold all blocks
            self._read_heard(turn.judge)
        self._heard[message.group_rank] = message.payload

    def _read_heard(self, judge: PaceJudge) -> None:
        """What this node's ranks told and what was heard of the other nodes, all at once."""
        own, self._rows = self._outbox.put(self._rows) if self._rows else b"", {}
        told = self._inbox.take(self._heard) if self._heard else PacesTold(b"")
        self._heard = {}
        for group_rank, why in told.refused.items():
            log.warning("timings_unreadable", group_rank=group_rank, error=why)
        if told.facts:
            self._groups.update(told.facts)
            judge.introduce(*told.facts.values())
        if own or told.rows:
            judge.add(own + told.rows, self._clock.now_s())

    def _look_at_roles(self, turn: _Turn, places: Iterable[RankPlace]) -> None:
        ranks = tuple(
            RankFacts(p.rank, p.local_rank, p.pid, *self._place_of(p.rank, p.folder))
            for p in sorted(places, key=lambda p: p.rank)
        )
        facts = NodeFacts(self._node, ranks, self._hosts_store)
        if facts != self._facts:
            self._facts = facts
            if turn.judge is not None:
                self._groups[0] = facts
                turn.judge.introduce(facts)

    def _place_of(self, rank: int, folder: Path) -> tuple[Role | None, str]:
        path = folder / "role.json"
        try:
            changed_ns = path.stat().st_mtime_ns
        except OSError:
            return None, ""
        known = self._roles.get(rank)
        if known is None or known[0] != changed_ns:
            known = self._roles[rank] = (changed_ns, *read_place(path))
        return known[1:]

    # -- judging (leader) ----------------------------------------------------------------------------------------------
    def _judge(self, turn: _Turn, judge: PaceJudge, now_s: float) -> None:
        self._read_heard(judge)
        for event in judge.judge(now_s, self._clock.unix_s()):
            self._tell(turn, event)
        if now_s >= self._next_figures_s:
            self._next_figures_s = now_s + FIGURES_S
            for alarm in judge.open_alarms():
                self._write("now", alarm)
        if self._acts and now_s >= self._next_advice_s:
            self._next_advice_s = now_s + ADVICE_S
            self._advise(turn, judge, now_s)

    # -- telling (leader) ----------------------------------------------------------------------------------------------
    def _tell(self, turn: _Turn, event: PaceEvent) -> None:
        alarm = event.alarm
        match event.news:
            case PaceNews.BEGAN:
                self._tell_beginning(turn, event)
            case PaceNews.ENDED:
                self._say(f"steadyrun: no longer slow: {who_was(alarm)}")
                self._write("ended", alarm)
            case PaceNews.LASTS:
                self._write("lasts", alarm)
            case PaceNews.BURSTS:
                self._write("bursts", alarm)

    def _tell_beginning(self, turn: _Turn, event: PaceEvent) -> None:
        alarm = event.alarm
        if alarm.kind not in FAULTS:
            self._say(f"steadyrun: {sentence(alarm)}")
            self._write("began", alarm)
            return
        number, verdict = self._incident_of(turn, event)
        self._say(f"steadyrun: slow: {sentence(alarm)}" + (f" (incident {number})" if number else ""))
        self._write("began", alarm, event.since_unix_s)
        if verdict is not None:
            self._record("incident", number=number, verdict=verdict)
            for note in verdict.details["notes"]:
                self._say(f"steadyrun: {note}")

    def _incident_of(self, turn: _Turn, event: PaceEvent) -> tuple[int | None, Verdict | None]:
        """Number of the alarm's incident, and the verdict where it is a new one; None where there is none."""
        alarm, now_s = event.alarm, self._clock.now_s()
        who = alarm.key[:2]
        number, filed_s = self._incidents.get(who, (None, -inf))
        if now_s - filed_s < INCIDENT_AGAIN_S and number is not None:
            self._number_of[alarm.key] = number
            return number, None
        if self._filed >= MOST_INCIDENTS:
            return None, None
        self._filed += 1
        number = self._desk.next_number()
        at_unix_s = self._clock.unix_s()
        payload = {
            "reason": sentence(alarm),
            "trigger": "straggler",
            "detected_at_unix_s": at_unix_s,
            "delay_s": at_unix_s - event.since_unix_s if event.since_unix_s is not None else 0.0,
        }
        incident = self._desk.open(number, turn.attempt, payload)
        assert turn.judge is not None
        found = findings(
            [alarm], nodes=turn.judge.nodes, at_unix_s=lambda step: event.since_unix_s if step >= 0 else None
        )
        verdict, problem = self._desk.report(
            incident,
            found,
            _evidence(alarm, turn, turn.judge),
            turn.world_size,
            {"straggler": alarm.to_json()},
        )
        if problem:
            self._say(f"steadyrun: incident {number} cannot be looked up later: {incident.folder}: {problem}")
        self._incidents[who] = (number, now_s)
        self._number_of[alarm.key] = number
        return number, verdict

    def _write(self, event: str, alarm: Alarm, since_unix_s: float | None = None) -> None:
        self._record(
            "straggler",
            event=event,
            alarm=alarm,
            summary=sentence(alarm),
            since_unix_s=since_unix_s,
            incident=self._number_of.get(alarm.key),
        )

    # -- acting (leader) -----------------------------------------------------------------------------------------------
    def _advise(self, turn: _Turn, judge: PaceJudge, now_s: float) -> None:
        if self._is_asked or self._replace is None:
            return
        costs = self._costs.costs(now_s)
        advice = self._choice.choose(judge.open_alarms(), costs, self._costs.checkpoints_done)
        if advice is None:
            return
        self._is_asked = True
        self._choice.acted(advice.alarm)
        self._record(
            "straggler",
            event="act",
            alarm=advice.alarm,
            summary=advice.reason,
            incident=self._number_of.get(advice.alarm.key),
        )
        self._replace(self._replacement(turn, judge, advice))

    def _replacement(self, turn: _Turn, judge: PaceJudge, advice: ActAdvice) -> Replacement:
        nodes = {judge.nodes.get(rank, "") for rank in advice.alarm.ranks}
        node = nodes.pop() if len(nodes) == 1 else ""
        group_rank = next((g for g, facts in self._groups.items() if facts.node == node), None)
        hosts = group_rank is not None and self._groups[group_rank].hosts_store
        return Replacement(turn.attempt, f"{sentence(advice.alarm)}: {advice.reason}", group_rank, node, hosts)


def who_was(alarm: Alarm) -> str:
    """One line for an alarm that is over."""
    who = {
        AlarmKind.NODE: f"node {alarm.node}",
        AlarmKind.GROUP: f"parallel group {alarm.group}",
    }.get(alarm.kind, f"rank {alarm.ranks[0]}" + (f" on {alarm.node}" if alarm.node else ""))
    lost = f"; the job has lost {alarm.lost_s:.1f} s by it" if alarm.lost_s >= 0.05 else ""
    return f"{who}, from step {alarm.first_step} to step {alarm.over_step}{lost}"


def _evidence(alarm: Alarm, turn: _Turn, judge: PaceJudge) -> list[RankEvidence]:
    """What is known of the slow ranks without asking them anything."""
    out = []
    for rank in alarm.ranks:
        facts = judge.facts_of(rank)
        node = judge.nodes.get(rank, "")
        if facts is not None:
            out.append(
                RankEvidence(rank, facts.local_rank, node, facts.pid, turn.attempt, step=alarm.step, attached=True)
            )
    return out


def read_role(path: Path) -> Role | None:
    """What a rank wrote of its role, or None where that cannot be used."""
    return read_place(path)[0]


def read_place(path: Path) -> tuple[Role | None, str]:
    """A rank's role and data-parallel replica as it wrote them; None and nothing where that cannot be used.

    The rank's own code may write anything.
    """
    try:
        with path.open("rb") as f:
            told = json.loads(f.read(MOST_ROLE_BYTES))
        mesh = told.get("mesh") or {}
        key = told["key"]
        name = told.get("name") or " ".join(f"{k}={v}" for k, v in mesh.items() if k != "dp")
        is_by_name = all(isinstance(part, list) for part in key)  # else nobody knows which coordinates it has
        replica = " ".join(f"{k}={v}" for k, v in mesh.items() if [k, v] not in key) if is_by_name else ""
        return role_of(name or "all", key), replica[:MOST_NAME]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None, ""
