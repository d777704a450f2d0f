"""The incident desk: gathers this node's evidence, brings in that of others, judges, decides and writes it down."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from steadyrun.collectors.evidence import EvidenceCollector, Target
from steadyrun.collectors.flight.details import IncidentDetails
from steadyrun.collectors.flight.source import FlightSource
from steadyrun.core.board import SlotView
from steadyrun.core.classes import Action, FaultClass, Mode
from steadyrun.core.clock import Clock
from steadyrun.core.files import write_atomically
from steadyrun.core.flight import FlightDetails, RankFlight
from steadyrun.core.records import (
    DeviceEvent,
    Evidence,
    ExitRecord,
    Finding,
    RankEvidence,
    Suspicion,
    Verdict,
    device_event_from_json,
    rank_evidence_from_json,
    to_json,
)
from steadyrun.core.runfolder import RunFolder
from steadyrun.detect.faulttable import FaultKind, kind_of, signs_of
from steadyrun.detect.nodescore import Machine
from steadyrun.detect.policy import AttemptOutcome, History, Policy, PolicyLimits, Situation, outcome_of
from steadyrun.detect.report import render_incident
from steadyrun.detect.verdict import Judgement, judge
from steadyrun.node.machine.events import Decision, ProbeResult
from steadyrun.node.scorekeeper import ScoreKeeper
from steadyrun.postmortem.judging import report_of_incident
from steadyrun.postmortem.page import render_page

__all__ = ["Incident", "IncidentDesk", "Judged", "KnownCause"]

MAX_STACK_FRAMES: Final = 60  # per thread, in what is sent to other nodes
MAX_THREADS: Final = 8
MAX_FLIGHT_BYTES: Final = 16 << 10  # of a rank's summary, which has 2 to 8 KB
FEWEST_OPS: Final = 8
MAX_DEVICE_EVENTS: Final = 64  # of a node, in what is sent to others
DEVICES_BEFORE_S: Final = 600.0  # events of devices this long before the last progress are evidence
MAX_WAY_S: Final = 2.0  # of evidence through the control store; it takes milliseconds
INF: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Incident:
    """One fault being looked into.

    Attributes:
        delay_s: last sign of life (or exit) to detection.
        past_limit_s: of it, what was beyond the limit; None where no limit was involved.
        only_report: nobody is stopped for it.
    """

    number: int
    attempt: int
    folder: Path
    trigger: str
    reason: str
    detected_at_unix_s: float
    delay_s: float = 0.0
    past_limit_s: float | None = None
    only_report: bool = False


class KnownCause(Protocol):
    """A cause that was found while everything ran; a stop with its *trigger* has no other."""

    @property
    def trigger(self) -> str: ...
    @property
    def findings(self) -> Sequence[Finding]: ...
    @property
    def details(self) -> Mapping[str, Any]: ...
    @property
    def to(self) -> int:
        """The step to go back to: what was saved later does not count."""
        ...


@dataclass(frozen=True, slots=True)
class Judged:
    """The result: what to write, what to do, what to tell; *falls_back* as in ``Ruling``."""

    verdict: Verdict
    decision: Decision
    history: History
    text: str
    falls_back: bool = False


@dataclass(frozen=True, slots=True)
class _Jury:
    """What deciding over all nodes needs: who is who, and whether anybody can be left out (as in ``Situation``)."""

    group_ranks: Mapping[str, int]
    spares: int
    needed: frozenset[str]
    absent: tuple[str, ...]


@dataclass(slots=True)
class _Reports:
    """Evidence of all nodes for one attempt, as it comes in."""

    incident: Incident
    expected: int
    due_s: float
    payloads: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    heard_at_unix_s: dict[int, float] = field(default_factory=dict)


class IncidentDesk:
    """Used from the loop's thread; collection runs in worker threads and reports through *post*."""

    def __init__(
        self,
        folder: RunFolder,
        run_id: str,
        node: str,
        mode: Mode,
        script: str,
        clock: Clock,
        post: Callable[[Callable[[], None]], None],
        limits: PolicyLimits,
    ) -> None:
        self._folder, self._run_id, self._node, self._mode = folder, run_id, node, mode
        self._script, self._clock, self._post = script, clock, post
        self._policy = Policy(limits)
        self._collector = EvidenceCollector(node, sources=(FlightSource(run_id),))
        self.scores = ScoreKeeper(folder, run_id, clock)
        self.hosts_store = False  # the job's rendezvous lives in this node's launcher
        self._reports: _Reports | None = None
        self._own: dict[int, tuple[RankEvidence, ...]] = {}
        self.devices: Callable[[float], Sequence[DeviceEvent]] = lambda since_s: ()  # events since then, of this node
        self._progress: dict[str, Any] = {}
        self._highest = 0
        self._begun_s = clock.now_s()
        self._checkpoint_step: int | None = None
        self._checkpoints_seen: dict[int, int] = {}

    # -- numbering ---------------------------------------------------------------------------------------------------
    def next_number(self) -> int:
        """The first number above every incident known here."""
        numbers = [int(p.name) for p in self._folder.incidents_dir.glob("[0-9]*") if p.name.isdigit()]
        return max([self._highest, *numbers], default=0) + 1

    def open(self, number: int, attempt: int, payload: Mapping[str, Any]) -> Incident:
        """An incident with the number that its finder gave it."""
        self._highest = max(self._highest, number)
        folder = self._folder.incident(number)
        with contextlib.suppress(OSError):  # a full disk: the collector then reports what it could not write
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        past = payload.get("past_limit_s")
        return Incident(
            number=number,
            attempt=attempt,
            folder=folder,
            trigger=str(payload.get("trigger", "exit")),
            reason=str(payload.get("reason", "")),
            detected_at_unix_s=float(payload.get("detected_at_unix_s", self._clock.unix_s())),
            delay_s=float(payload.get("delay_s", 0.0)),
            past_limit_s=None if past is None else float(past),
        )

    def observe(self, pids: Sequence[int]) -> None:
        """Remember what can be known of ranks only while they live (their memory group)."""
        self._collector.observe(pids)

    def begin_attempt(self, attempt: int) -> None:
        """Forget what belongs to earlier attempts."""
        self._collector.begin_attempt()
        self._begun_s = self._clock.now_s()
        self._checkpoint_step = None
        self._checkpoints_seen.clear()
        if self._reports is not None and self._reports.incident.attempt < attempt:
            self._reports = None

    # -- progress ----------------------------------------------------------------------------------------------------
    def saved(self, step: int) -> None:
        """A checkpoint of this step is one that the next attempt can start from."""
        self._checkpoint_step = step if self._checkpoint_step is None else max(self._checkpoint_step, step)

    def watch_checkpoints(self, views: Mapping[int, SlotView | None]) -> None:
        """Where nobody says which step was saved: that at which a rank left its section for checkpoints."""
        for rank, view in views.items():
            if view is None or view.checkpoints_done <= self._checkpoints_seen.get(rank, 0):
                continue
            self._checkpoints_seen[rank] = view.checkpoints_done
            if view.step_is_global and view.step is not None:
                self.saved(view.step)

    # -- collecting --------------------------------------------------------------------------------------------------
    def collect(
        self,
        incident: Incident,
        targets: Sequence[Target],
        views: Sequence[SlotView | None],
        stack_signal: int,
        limit_s: float,
        done: Callable[[], None],
        exit_of: Callable[[int], ExitRecord | None],
    ) -> None:
        """Start the collection; *done* runs in the loop once it is on disk, after *limit_s* at the latest."""
        steps = [v.step for v in views if v is not None and v.step is not None]
        self._progress = {
            "highest_step": max(steps, default=None),
            "step_is_global": any(v.step_is_global for v in views if v is not None),
            "checkpoints_done": max((v.checkpoints_done for v in views if v is not None), default=0),
            "checkpoint_step": self._checkpoint_step,
        }

        def finished(evidence: tuple[RankEvidence, ...]) -> None:
            def take() -> None:
                self._own[incident.number] = evidence
                done()

            self._post(take)

        self._collector.start(targets, incident.folder, stack_signal, limit_s, finished, exit_of)

    def own_evidence(self, incident: Incident) -> tuple[RankEvidence, ...]:
        """What was collected of this node's ranks."""
        return self._own.get(incident.number, ())

    def packed_evidence(self, incident: Incident) -> dict[str, Any]:
        """This node's evidence for the leader; long stacks are cut, the files keep everything."""
        ranks = [to_json(_shortened(r)) for r in self._own.get(incident.number, ())]
        now_unix_s = self._clock.unix_s()
        return {
            "node": self._node,
            "host": socket.gethostname(),
            "hosts_store": self.hosts_store,
            "unix_minus_mono_s": now_unix_s - self._clock.now_s(),
            "sent_at_unix_s": now_unix_s,
            "ranks": ranks,
            "progress": self._progress,
            "devices": [to_json(e) for e in self._device_events(incident)],
        }

    def _device_events(self, incident: Incident) -> list[DeviceEvent]:
        """The newest and, before others, those that say that something is not well."""
        since_s = self._clock.now_s() - incident.delay_s - DEVICES_BEFORE_S
        events = sorted(self.devices(since_s), key=lambda e: (e.health != "unhealthy", e.event != "state", -e.at_s))
        return sorted(events[:MAX_DEVICE_EVENTS], key=lambda e: e.at_s)

    # -- bringing together (leader) ----------------------------------------------------------------------------------
    def expect(self, incident: Incident, nodes: int, due_s: float) -> None:
        self._reports = _Reports(incident, nodes, due_s)

    def add_evidence(self, attempt: int, group_rank: int, payload: Mapping[str, Any]) -> None:
        if self._reports is not None and self._reports.incident.attempt == attempt:
            self._reports.payloads[group_rank] = payload
            self._reports.heard_at_unix_s[group_rank] = self._clock.unix_s()

    def next_deadline_s(self) -> float:
        return self._reports.due_s if self._reports is not None else INF

    def ready_to_judge(self, now_s: float) -> bool:
        """Every node has reported, or the time for it is over."""
        r = self._reports
        return r is not None and (len(r.payloads) >= r.expected or now_s >= r.due_s)

    # -- judging -----------------------------------------------------------------------------------------------------
    def judge_all(
        self,
        world_size: int,
        history: History,
        has_older: bool = False,
        spares: int = 0,
        known: KnownCause | None = None,
    ) -> tuple[Incident, Judged]:
        """Judge and decide over the evidence of all nodes, write the incident; by the leader, once.

        Args:
            spares: how many nodes could be left out without leaving the job too small.
            known: what was found before anybody was asked, and comes first.
        """
        reports = self._reports
        assert reports is not None
        self._reports = None
        missing = [f"node {g} sent no evidence" for g in range(reports.expected) if g not in reports.payloads]
        ranks: list[RankEvidence] = []
        offsets: dict[str, float] = {}
        progress: list[Mapping[str, Any]] = []
        group_ranks: dict[str, int] = {}
        machines: list[Machine] = []
        needed: set[str] = set()
        devices: list[DeviceEvent] = []
        for group_rank, payload in sorted(reports.payloads.items()):
            told = _unpack_evidence(payload)
            if isinstance(told, str):
                missing.append(f"evidence of node {group_rank} cannot be read: {told}")
                continue
            late_s = reports.heard_at_unix_s.get(group_rank, told.sent_at_unix_s) - told.sent_at_unix_s
            ranks += [_with_clock(r, -late_s) for r in told.ranks]
            devices += told.devices
            offsets[told.node] = told.unix_minus_mono_s
            progress.append(told.progress)
            group_ranks[told.node] = group_rank
            machines.append(Machine(told.node, told.host))
            if told.hosts_store:
                needed.add(told.node)
        trigger = reports.incident.trigger
        if trigger == "exit" and any(r not in reports.payloads for r in range(reports.expected)) and not _deaths(ranks):
            trigger = "node_lost"
        incident = replace(reports.incident, trigger=trigger)
        if any(m.node not in self.scores.nodes for m in machines):
            self.scores.meet(machines)
        absent = tuple(n for n in self.scores.nodes if n not in group_ranks)
        jury = _Jury(group_ranks, spares, frozenset(needed), absent)
        judged = self._judge(
            incident, ranks, offsets, progress, missing, world_size, history, jury, has_older, devices, known
        )
        return incident, judged

    def judge_own(self, incident: Incident, world_size: int, history: History) -> Judged:
        """Judge this node's evidence alone, for a report; nothing follows from it."""
        ranks = self._own.get(incident.number, ())
        devices = self._device_events(incident)
        return self._judge(incident, ranks, {}, [self._progress], [], world_size, history, None, devices=devices)

    def report(
        self,
        incident: Incident,
        findings: Sequence[Finding],
        ranks: Sequence[RankEvidence],
        world_size: int,
        details: Mapping[str, Any],
        missing: Sequence[str] = (),
    ) -> tuple[Verdict, str]:
        """Write an incident whose findings were made elsewhere and for which nobody is stopped.

        Returns:
            The verdict, and why it could not be written (an empty text: it was).
        """
        evidence = Evidence(
            run_id=self._run_id,
            attempt=incident.attempt,
            world_size=world_size,
            trigger=incident.trigger,
            now_s=self._clock.now_s(),
            ranks=tuple(sorted(ranks, key=lambda r: r.rank)),
            script=self._script,
            missing=tuple(missing),
        )
        notes = self.scores.blame([(f, kind_of(f.cls)) for f in findings], incident.number, False)
        judgement = Judgement(tuple(findings), missing=tuple(missing), sentence=incident.reason)
        verdict = judgement.verdict(
            evidence,
            incident=incident.number,
            mode=self._mode,
            action=Action.REPORT,
            reason="training goes on",
            detected_at_unix_s=incident.detected_at_unix_s,
            detection_delay_s=round(incident.delay_s, 4),
            details={"trigger": incident.trigger, "found_by": incident.reason, "notes": notes, **details},
        )
        offset_s = self._clock.unix_s() - self._clock.now_s()
        return verdict, self._write(incident, verdict, evidence, judgement, {self._node: offset_s})

    def leaves_out_slow(self, node: str) -> None:
        """The job goes on without a node that is too slow."""
        self.scores.exclude([node], FaultKind.SLOW, self._highest)

    def leaves_out_unfit(self, group_ranks: Sequence[int]) -> None:
        """The job goes on without nodes that did not pass their check."""
        nodes = self.scores.nodes
        names = [nodes[g] for g in group_ranks if g < len(nodes)]
        self.scores.exclude(names, FaultKind.UNKNOWN, self._highest)

    def _judge(
        self,
        incident: Incident,
        ranks: Sequence[RankEvidence],
        offsets: Mapping[str, float],
        progress: Sequence[Mapping[str, Any]],
        missing: Sequence[str],
        world_size: int,
        history: History,
        jury: _Jury | None,
        has_older: bool = False,
        devices: Sequence[DeviceEvent] = (),
        known: KnownCause | None = None,
    ) -> Judged:
        """*jury* is None for a report."""
        evidence = Evidence(
            run_id=self._run_id,
            attempt=incident.attempt,
            world_size=world_size,
            trigger=incident.trigger,
            now_s=self._clock.now_s(),
            ranks=tuple(sorted(ranks, key=lambda r: r.rank)),
            script=self._script,
            missing=tuple(missing),
            devices=tuple(devices),
        )
        offset_s = self._clock.unix_s() - self._clock.now_s()
        if known is not None and incident.trigger == known.trigger:  # nobody died or hangs: there is no more to find
            judgement = Judgement(tuple(known.findings), missing=tuple(missing), sentence=incident.reason)
        else:
            judgement = _judgement(evidence, offset_s, offsets, IncidentDetails(incident.folder))
            if known is not None:
                judgement = replace(judgement, findings=(*known.findings, *judgement.findings))
        if jury is not None:
            judgement = replace(judgement, findings=tuple(_on_nodes(f, jury.absent) for f in judgement.findings))
        findings = judgement.findings
        kinds = [kind_of(f.cls, signs_of(evidence, f)) for f in findings]
        outcome = self._outcome(evidence, findings, kinds, progress)
        if known is not None and outcome.checkpoint_step is not None:
            outcome = replace(outcome, checkpoint_step=min(outcome.checkpoint_step, known.to))
        after = history.with_outcome(outcome)
        notes: list[str] = []
        situation = Situation()
        if jury is not None:
            is_early = outcome.highest_step is None
            notes = self.scores.blame(list(zip(findings, kinds, strict=True)), incident.number, is_early)
            situation = self._situation(findings, jury)
        ruling = self._policy.decide(
            findings,
            after,
            self._mode,
            incident.trigger,
            _scripts_ended(ranks, world_size),
            has_older and known is None,  # which checkpoint comes next is known then
            kinds[0] if kinds else None,
            situation,
        )
        notes += [f"to do: {text}" for text in ruling.advice]
        if jury is None:
            after = history
            ruling = replace(ruling, action=Action.REPORT, without=())
        elif ruling.action is Action.REPORT and incident.trigger == "exit":
            # a rank has ended, so that "only report" cannot mean to go on
            ruling = replace(ruling, action=Action.STOP)
        excluded: tuple[int, ...] = ()
        if jury is not None and ruling.without:
            after = after.leaving_out(ruling.without)
            self.scores.exclude(ruling.without, kinds[0], incident.number)
            excluded = tuple(jury.group_ranks[n] for n in ruling.without if n in jury.group_ranks)
        chosen = ruling.action
        details: dict[str, Any] = {"trigger": incident.trigger, "found_by": incident.reason}
        if incident.past_limit_s is not None:
            details["past_limit_s"] = round(incident.past_limit_s, 4)
        if kinds:
            details["kind"] = kinds[0].value
        if notes:
            details["notes"] = notes
        if known is not None:
            details.update(known.details)
        if ruling.without:
            details["without"] = list(ruling.without)
        verdict = judgement.verdict(
            evidence,
            incident=incident.number,
            mode=self._mode,
            action=chosen,
            reason=ruling.reason,
            detected_at_unix_s=incident.detected_at_unix_s,
            detection_delay_s=round(incident.delay_s, 4),
            details=details,
        )
        decision = Decision(
            attempt=incident.attempt,
            action=chosen,
            next_attempt=incident.attempt + 1,
            reason=ruling.reason,
            delay_s=ruling.delay_s,
            excluded_nodes=excluded,
            exit_class=ruling.exit_class,
            root_cause=next((r for f in judgement.findings for r in f.ranks), None),
        )
        text = "\n".join([render_incident(verdict, evidence), *(f"steadyrun:   {note}" for note in notes)])
        problem = self._write(incident, verdict, evidence, judgement, dict(offsets) or {self._node: offset_s})
        if problem:
            text += f"\nsteadyrun:   this incident cannot be looked up later: {incident.folder}: {problem}"
        return Judged(verdict, decision, after, text, ruling.falls_back and chosen is Action.RESTART)

    def _outcome(
        self,
        evidence: Evidence,
        findings: Sequence[Finding],
        kinds: Sequence[FaultKind],
        progress: Sequence[Mapping[str, Any]],
    ) -> AttemptOutcome:
        def newest(key: str) -> int | None:
            return max((p[key] for p in progress if p.get(key) is not None), default=None)

        return outcome_of(
            evidence,
            findings,
            highest_step=newest("highest_step"),
            step_is_global=any(p.get("step_is_global") for p in progress),
            checkpoints_done=newest("checkpoints_done") or 0,
            checkpoint_step=newest("checkpoint_step"),
            kind=kinds[0] if kinds else None,
            lived_s=self._clock.now_s() - self._begun_s,
        )

    def _situation(self, findings: Sequence[Finding], jury: _Jury) -> Situation:
        return Situation(
            now_unix_s=self._clock.unix_s(),
            marks=self.scores.marks_by_node({n for f in findings for n in f.nodes}),
            offenders=self.scores.offenders,
            spares=min(jury.spares, max(len(jury.group_ranks) - 1, 0)),
            needed=jury.needed,
        )

    @staticmethod
    def _write(
        incident: Incident, verdict: Verdict, evidence: Evidence, judgement: Judgement, offsets: dict[str, float]
    ) -> str:
        """verdict.json last: who finds it finds a complete incident. A full disk must not end the job.

        Returns:
            What went wrong, or an empty text.
        """
        problem = ""
        try:
            _replace(incident.folder / "evidence.json", json.dumps(to_json(evidence), indent=1))
            try:
                report = report_of_incident(verdict, evidence, judgement, unix_minus_mono_s=offsets)
                _replace(incident.folder / "report.html", render_page(report))
            except OSError:
                raise
            except Exception as e:  # what ranks sent is drawn; the verdict must be written whatever it is
                problem = f"the page could not be drawn: {type(e).__name__}: {e}"
            _replace(incident.folder / "verdict.json", json.dumps(verdict.to_json(), indent=1))
        except OSError as e:
            return e.strerror or str(e)
        return problem

    # -- history -----------------------------------------------------------------------------------------------------
    @staticmethod
    def pack_history(history: History) -> list[Any]:
        """As JSON, for the next leader."""
        return [to_json(a) for a in history.attempts]

    @staticmethod
    def unpack_history(data: Any, default: History) -> History:
        """The inverse; *default* where *data* is none."""
        try:
            attempts = tuple(
                AttemptOutcome(
                    attempt=int(a["attempt"]),
                    highest_step=a["highest_step"],
                    step_is_global=bool(a["step_is_global"]),
                    checkpoints_done=int(a["checkpoints_done"]),
                    tracebacks=tuple((str(h), s) for h, s in a["tracebacks"]),
                    cls=FaultClass(a["cls"]) if a["cls"] is not None else None,
                    kind=FaultKind(a["kind"]) if a["kind"] is not None else None,
                    checkpoint_step=a["checkpoint_step"],
                    ranks=tuple(int(r) for r in a["ranks"]),
                    nodes=tuple(str(n) for n in a["nodes"]),
                    lived_s=a["lived_s"],
                    without=tuple(str(n) for n in a["without"]),
                )
                for a in data
            )
        except (KeyError, TypeError, ValueError):
            return default
        return History(attempts)

    def close(self) -> None:
        self._collector.close()


def _judgement(
    evidence: Evidence, offset_s: float, offsets: Mapping[str, float], flight_details: FlightDetails
) -> Judgement:
    """Judge; without the flight records where these cannot be judged: they come from ranks and other nodes."""
    try:
        return judge(evidence, wall_minus_mono_s=offset_s, offsets=offsets, details=flight_details)
    except Exception as e:
        if all(r.flight is None for r in evidence.ranks):
            raise
        missing = (*evidence.missing, f"flight records: cannot be judged: {type(e).__name__}: {e}")
        bare = tuple(replace(r, flight=None) for r in evidence.ranks)
        return judge(replace(evidence, ranks=bare, missing=missing), wall_minus_mono_s=offset_s, offsets=offsets)


def _on_nodes(finding: Finding, absent: Sequence[str]) -> Finding:
    """A lost node sends no evidence that names it; it is known by its absence."""
    if finding.cls is not FaultClass.DEAD_NODE or finding.nodes:
        return finding
    return replace(finding, nodes=tuple(absent))


def target_of(
    rank: int,
    local_rank: int,
    pid: int,
    attempt: int,
    view: SlotView | None,
    exit_record: ExitRecord | None,
    rank_dir: Path,
    logs: Sequence[Path],
    suspicion: Suspicion | None,
    probe: ProbeResult | None,
    gpu: str | None = None,
) -> Target:
    """What the collector needs to know about one rank."""
    return Target(
        rank,
        local_rank,
        pid,
        attempt,
        view,
        exit_record,
        rank_dir,
        tuple(logs),
        suspicion,
        stack_unchanged=probe.stack_unchanged if probe is not None else None,
        cpu_share=probe.cpu_share if probe is not None else None,
        gpu=gpu,
    )


@dataclass(frozen=True, slots=True)
class _Told:
    """One node's evidence as the leader reads it."""

    node: str
    unix_minus_mono_s: float
    sent_at_unix_s: float
    ranks: tuple[RankEvidence, ...]
    progress: Mapping[str, Any]
    host: str
    hosts_store: bool
    devices: tuple[DeviceEvent, ...] = ()


def _unpack_evidence(payload: Mapping[str, Any]) -> _Told | str:
    """The evidence, or why it cannot be read: it comes from another node."""
    try:
        ranks = tuple(rank_evidence_from_json(r) for r in payload["ranks"])
        return _Told(
            str(payload["node"]),
            float(payload["unix_minus_mono_s"]),
            float(payload["sent_at_unix_s"]),
            ranks,
            dict(payload["progress"]),
            str(payload.get("host") or payload["node"]),
            bool(payload.get("hosts_store")),
            tuple(device_event_from_json(e) for e in payload.get("devices") or ()),
        )
    except (KeyError, TypeError, ValueError) as e:
        return repr(e)


def _with_clock(r: RankEvidence, node_minus_here_s: float) -> RankEvidence:
    """The rank's flight with how far its node's clock is off, where that is more than the way here can take."""
    if r.flight is None or abs(node_minus_here_s) <= MAX_WAY_S:
        return r
    return replace(r, flight=replace(r.flight, node_minus_here_s=round(node_minus_here_s, 1)))


def _deaths(ranks: Sequence[RankEvidence]) -> bool:
    return any(r.exit is not None and not r.exit.by_us and (r.exit.code != 0) for r in ranks)


def _scripts_ended(ranks: Sequence[RankEvidence], world_size: int) -> bool:
    def ended(r: RankEvidence) -> bool:
        return r.exception is None and (r.finished or (r.exit is not None and r.exit.code == 0))

    return len(ranks) == world_size and all(ended(r) for r in ranks)


def _shortened(r: RankEvidence) -> RankEvidence:
    stacks = tuple(
        replace(s, frames=s.frames[:MAX_STACK_FRAMES])
        for s in sorted(r.stacks, key=lambda s: not s.is_main)[:MAX_THREADS]
    )
    return replace(r, stacks=stacks, flight=_light(r.flight) if r.flight is not None else None)


def _light(flight: RankFlight) -> RankFlight:
    """Usually as it is. Else without the stacks of all but each group's oldest operation, and with fewer operations.

    The files keep everything, and the place of each operation's call stays in any case.
    """
    if _size_bytes(flight) <= MAX_FLIGHT_BYTES:
        return flight
    oldest = {op.group: i for i, op in reversed(list(enumerate(flight.ops)))}
    ops = tuple(op if oldest[op.group] == i else replace(op, frames=()) for i, op in enumerate(flight.ops))
    flight = replace(flight, ops=ops)
    while _size_bytes(flight) > MAX_FLIGHT_BYTES and len(flight.ops) > FEWEST_OPS:
        kept = flight.ops[: max(len(flight.ops) // 2, FEWEST_OPS)]
        flight = replace(flight, ops=kept, more_ops=flight.more_ops + len(flight.ops) - len(kept))
    return flight


def _size_bytes(flight: RankFlight) -> int:
    return len(json.dumps(flight.to_json(), separators=(",", ":")))


def _replace(path: Path, text: str) -> None:
    """Write it whole, for its owner only: stacks and logs may tell secrets."""
    write_atomically(path, text, 0o600)
