"""The paces of a run, out of the journals of its nodes: what was told while it ran, and the timings that were kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

import numpy as np

from steadyrun.core.records import Finding
from steadyrun.core.runfolder import RunFolder
from steadyrun.ctl.runs import NotFoundError, RunLog
from steadyrun.detect.straggler import (
    Alarm,
    AlarmKind,
    PaceReport,
    StepAlignment,
    StepFrame,
    TimingBlock,
    analyse,
    findings,
    sentence,
)
from steadyrun.detect.straggler.align import FIELDS, RECORD, Records
from steadyrun.node.pacejudge import replicas_of
from steadyrun.node.straggling import read_place

__all__ = ["AttemptPaces", "RunPaces", "Told", "read_paces"]

FAULTS: Final = (AlarmKind.RANK, AlarmKind.NODE, AlarmKind.GROUP)
MOST_RANKS: Final = 1 << 17
MOST_STEP: Final = 1 << 62
PATIENCE_S: Final = 15.0  # nodes write every 5 s, each at its own time
OPEN_STEPS: Final = 4096  # steps that may wait for the records of other nodes
UNKNOWN: Final = (
    "probe_s",
    "work",
    "group_wait_s",
)  # what a column that is missing means: not known, where others mean 0
BEGUN, OVER, LASTED = "began", "ended", "lasts"


@dataclass(frozen=True, slots=True)
class Told:
    """One alarm with its newest figures.

    Attributes:
        state: ``now``: it was slow when last heard of, and the run goes on; ``over``; ``lasted`` until its attempt
            ended; ``unknown``: the agent died before it said.
        act: why it was acted on, empty where it was not.
    """

    attempt: int
    alarm: Alarm
    state: str
    since_unix_s: float | None = None
    incident: int | None = None
    act: str = ""

    @property
    def is_fault(self) -> bool:
        return self.alarm.kind in FAULTS

    @property
    def words(self) -> str:
        return sentence(self.alarm)

    @property
    def end_words(self) -> str:
        """How it ended, and what it cost."""
        match self.state:
            case "now":
                text = "still slow"
            case "over":
                text = f"over at step {self.alarm.over_step}" if self.alarm.over_step is not None else "over"
            case "lasted":
                text = "until its attempt ended"
            case _:
                text = "how it ended is not known"
        return text + (f"; {self.alarm.lost_s:.1f} s lost" if self.alarm.lost_s >= 0.05 else "")


@dataclass(frozen=True, slots=True)
class AttemptPaces:
    """Timings of one attempt; the journal keeps every *every*-th step at least."""

    attempt: int
    report: PaceReport
    every: int


@dataclass(frozen=True, slots=True)
class RunPaces:
    """All that is shown.

    Attributes:
        is_live: *told* is what the agents told; else it was found just now in the timings.
        attempts: those with timings, oldest first.
    """

    run: RunFolder
    is_live: bool
    told: Sequence[Told]
    attempts: Sequence[AttemptPaces]
    nodes: Mapping[tuple[int, int], str]
    notes: Sequence[str]
    has_ended: bool

    @property
    def slow(self) -> list[Told]:
        """Those that accuse somebody: slow now first, then those that cost most."""
        found = [t for t in self.told if t.is_fault]
        return sorted(found, key=lambda t: (t.state != "now", -t.alarm.lost_s, -t.alarm.slowdown, t.attempt))

    @property
    def others(self) -> list[Told]:
        return [t for t in self.told if not t.is_fault]

    @property
    def knows_work(self) -> bool:
        return any(r.steps for a in self.attempts for r in a.report.ranks)

    def findings(self) -> list[Finding]:
        """One for each of ``slow``, in its order."""
        out = []
        for told in self.slow:
            nodes = {r: n for r in told.alarm.ranks if (n := self.nodes.get((told.attempt, r)))}
            since = told.since_unix_s
            found = findings([told.alarm], nodes=nodes, at_unix_s=lambda _, since=since: since)[0]  # type: ignore[misc]
            evidence = (f"incidents/{told.incident:04d}",) if told.incident is not None else ()
            out.append(replace(found, summary=f"{found.summary}; {told.end_words}", evidence=evidence))
        return out


def read_paces(run: RunFolder) -> RunPaces:
    """Every attempt of *run*.

    Raises:
        NotFoundError: its journals hold neither timings nor alarms; the text says why that may be.
    """
    log = RunLog.read(run)
    nodes = _nodes(log)
    unreadable: Counter[str] = Counter()
    told = _told(log, unreadable)
    attempts = _attempts(run, log, nodes, unreadable)
    if not told and not attempts:
        raise NotFoundError(_why_nothing(run, log))
    is_live = bool(told)
    if not is_live:
        told = [
            Told(a.attempt, alarm, "over" if alarm.over_step is not None else "lasted")
            for a in attempts
            for alarm in a.report.alarms
        ]
    notes = [f"{n} {what} could not be read" for what, n in sorted(unreadable.items())]
    notes += [note for a in attempts for note in a.report.notes]
    if not attempts:
        notes.append("the journals hold no timings: the job ended before the first were written (every 5 s)")
    if not is_live and any(t.is_fault for t in told):
        notes.append("found afterwards, in the timings that the journals keep: the agents told of nobody")
    return RunPaces(run, is_live, told, attempts, nodes, list(dict.fromkeys(notes)), log.ended_at_unix_s is not None)


def _why_nothing(run: RunFolder, log: RunLog) -> str:
    where = f"no step timings in {run.root}"
    if not log.records:
        return f"{where}: it has no journal; give a run folder of steadyrun"
    if log.ended_at_unix_s is None:
        return f"{where} yet: they are written every 5 s once ranks take steps; look again later (steadyctl status)"
    if any(True for _ in log.of_type("rank_first_step")):
        return f"{where}, though its ranks took steps: it ran with --ft-timing off, or for less than 5 s"
    return f"{where}: its ranks took no step that could be seen; watch.step() tells of steps without a torch optimizer"


# -- what the agents told ----------------------------------------------------------------------------------------------
def _told(log: RunLog, unreadable: Counter[str]) -> list[Told]:
    has_ended = log.ended_at_unix_s is not None
    newest_attempt = max((int(r.get("attempt", 0)) for r in log.records), default=0)
    out: dict[tuple[Any, ...], Told] = {}
    for record in log.of_type("straggler"):
        try:
            attempt, event = int(record["attempt"]), str(record["event"])
            alarm = Alarm.from_json(record["alarm"])
            key = (attempt, *alarm.key)
            before = out.get(key)
        except (KeyError, TypeError, ValueError, AttributeError):
            unreadable["alarms"] += 1
            continue
        state = {OVER: "over", LASTED: "lasted", "bursts": "lasted"}.get(event, before.state if before else "now")
        out[key] = Told(
            attempt,
            alarm,
            state,
            _number(record.get("since_unix_s")) or (before.since_unix_s if before else None),
            int(n) if (n := _number(record.get("incident"))) else (before.incident if before else None),
            str(record.get("summary", "")) if event == "act" else (before.act if before else ""),
        )
    return [
        replace(t, state="unknown") if t.state == "now" and (has_ended or t.attempt < newest_attempt) else t
        for t in out.values()
    ]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _nodes(log: RunLog) -> dict[tuple[int, int], str]:
    """Where each rank of each attempt ran."""
    found = {}
    for r in log.of_type("rank_started"):
        if isinstance(r.get("rank"), int) and isinstance(r.get("attempt"), int) and 0 <= r["rank"] < MOST_RANKS:
            found[r["attempt"], r["rank"]] = str(r.get("node", ""))
    return found


# -- timings -----------------------------------------------------------------------------------------------------------
def _attempts(
    run: RunFolder, log: RunLog, nodes: Mapping[tuple[int, int], str], unreadable: Counter[str]
) -> list[AttemptPaces]:
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for record in log.of_type("timings"):
        if isinstance(record.get("attempt"), int):
            by_attempt.setdefault(record["attempt"], []).append(record)
    out = []
    for attempt, records in sorted(by_attempt.items()):
        blocks = [(float(r.get("at_unix_s", 0.0)), b) for r in records if len((b := _block(r, unreadable)).records)]
        if not blocks:
            continue
        here = {rank: node for (a, rank), node in nodes.items() if a == attempt}
        world_size = 1 + max([*here, *(int(b.ranks.max()) for _, b in blocks)])
        places = {r: read_place(run.rank_dir(attempt, r) / "role.json") for r in range(world_size)}
        roles = {r: role for r, (role, _) in places.items() if role is not None}
        replicas = replicas_of({r: replica for r, (_, replica) in places.items()})
        report = analyse(_frames(blocks, world_size), roles or None, world_size, nodes=here, groups=replicas)
        every = max((r["every"] for r in records if isinstance(r.get("every"), int)), default=1)
        out.append(AttemptPaces(attempt, report, every))
    return out


def _frames(blocks: Sequence[tuple[float, TimingBlock]], world_size: int) -> Iterator[StepFrame]:
    alignment = StepAlignment(world_size, PATIENCE_S, OPEN_STEPS)
    for at_unix_s, block in blocks:
        alignment.add(block, at_unix_s)
        yield from alignment.ready(at_unix_s)
    yield from alignment.ready(inf)


def _block(record: Mapping[str, Any], unreadable: Counter[str]) -> TimingBlock:
    """The rows of one record; those of a rank that cannot be used are left out and counted."""
    ranks = record.get("ranks")
    found = [_rows_or_none(name, columns) for name, columns in (ranks.items() if isinstance(ranks, Mapping) else ())]
    parts = [rows for rows in found if rows is not None]
    if len(parts) < len(found):
        unreadable["timings of a rank"] += len(found) - len(parts)
    return TimingBlock(np.concatenate(parts) if parts else np.zeros(0, RECORD))


def _rows_or_none(name: str, columns: Any) -> Records | None:
    try:
        return _rows(int(name), columns)
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError):
        return None


def _rows(rank: int, columns: Mapping[str, Any]) -> Records:
    if not 0 <= rank < MOST_RANKS:
        raise ValueError(f"rank {rank} is not one of 0 to {MOST_RANKS - 1}")
    steps = columns["step"]
    rows = np.zeros(len(steps), RECORD)
    rows["step"], rows["rank"] = np.array(steps, np.int64), rank
    for index, name in enumerate(FIELDS):
        if name in columns:
            rows["values"][:, index] = np.array(columns[name], np.float64)  # None becomes NaN
        elif name in UNKNOWN:
            rows["values"][:, index] = np.nan
    is_usable = (rows["step"] >= 0) & (rows["step"] < MOST_STEP) & ~np.isinf(rows["values"]).any(axis=1)
    usable: Records = rows[is_usable]
    return usable
