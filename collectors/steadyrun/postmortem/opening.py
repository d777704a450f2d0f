"""Paths in, a case out: dumps, sidecars, logs, incidents and run folders, in any mix, whoever wrote them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from steadyrun.collectors.flight.folder import LoadedFlights, load_folder
from steadyrun.collectors.flight.sidecar import Sidecar
from steadyrun.core.board import OpenSection
from steadyrun.core.errors import SteadyrunError
from steadyrun.core.flight import FlightDetails, RankFlight
from steadyrun.core.records import Evidence, ExceptionRecord, ExitRecord, ProcessFacts, RankEvidence, Suspicion
from steadyrun.postmortem.case import Case, Input, InputStatus, Moment
from steadyrun.postmortem.loglines import (
    LauncherExit,
    LogClock,
    LogException,
    LogReading,
    NoteKind,
    RankLog,
    merged,
    read_log,
)
from steadyrun.postmortem.material import Found, LogFile, find_material
from steadyrun.postmortem.notes import Notes, read_notes
from steadyrun.postmortem.runfolder import Incident, moments_of_ranks, read_timeline
from steadyrun.postmortem.watchlog import flights_from_log
from steadyrun.watch.uncaught import traceback_hash

__all__ = ["UnusableError", "open_case"]

Progress = Callable[[int, int], None]

LOG_BYTES: Final = 32 << 20  # of one log, from its end: the watchdog speaks last
ALL_LOGS_BYTES: Final = 1 << 28  # 7 us a line: 20 s at the most
LEAST_LOG_BYTES: Final = 1 << 18
TAIL_BYTES: Final = 1 << 16
UNKNOWN_LOCAL_RANK: Final = -1

_SPEAKER: Final = re.compile(rb"\[rank(\d{1,7})\]:")
_TELLING: Final = re.compile(
    rb"atchdog|\[PG |Traceback \(most|FingerPrint|first observed failure|Failures:|monitoredBarrier|launched up to"
    rb"|lective #"
)


class UnusableError(SteadyrunError):
    """Nothing at the paths can be used; the text says what was found and what to give instead."""


def open_case(paths: Sequence[Path], world_size: int | None = None, progress: Progress | None = None) -> Case:
    """Everything that can be learned from what lies at *paths*.

    Args:
        paths: files and folders; of a run folder its newest incident is taken.
        world_size: ranks of the job; else what groups, sidecars and evidence tell.
        progress: called with (files read, files in all).

    Raises:
        UnusableError: nothing at all can be used.
    """
    found = find_material(paths)
    material = _read(found, progress)
    case = _case(found, material, world_size, paths)
    if not case.evidence.ranks:
        raise UnusableError(_why_unusable(paths, case.inputs))
    return case


def _why_unusable(paths: Sequence[Path], inputs: Sequence[Input]) -> str:
    where = ", ".join(map(str, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    hint = "give flight-recorder dumps, the ranks' logs, or an incident or run folder of steadyrun"
    if not inputs:
        return f"cannot find anything in {where}: no files; {hint}"
    counts: dict[str, int] = {}
    for i in inputs:
        counts[i.status.value] = counts.get(i.status.value, 0) + 1
    told = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in counts.items())
    first = next((f"; {i.path.name}: {i.detail}" for i in inputs if i.detail), "")
    return f"cannot use anything in {where}: {len(inputs)} file(s), {told}{first}; {hint}"


# -- reading it --------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Material:
    """What was read, per rank."""

    flights: dict[int, RankFlight] = field(default_factory=dict)
    sidecars: Mapping[int, Sidecar] = field(default_factory=dict)
    details: FlightDetails | None = None
    log: LogReading = field(default_factory=LogReading)
    log_flights: dict[int, RankFlight] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    newest_log_s: float | None = None
    notes: list[Notes] = field(default_factory=list)
    own_logs: set[int] = field(default_factory=set)


def _read(found: Found, progress: Progress | None) -> _Material:
    material = _Material()
    total = len(found.dumps) + len(found.logs)

    def loaded_so_far(done: int, _: int) -> None:
        if progress is not None:
            progress(done, total)

    for path in found.notes:
        notes = read_notes(path)
        material.notes.append(notes)
        status = InputStatus.USED if notes else InputStatus.IGNORED
        material.inputs.append(Input(path, None, status, "", _size_of(path)))
    if found.dumps:
        exceptions = {rank: text for notes in material.notes for rank, text in notes.exceptions.items()}
        loaded = load_folder(found.dumps, progress=loaded_so_far, exceptions=exceptions)
        material.flights, material.sidecars = dict(loaded.flights), loaded.sidecars
        material.details = loaded.details
        material.inputs += _inputs_of(loaded)
    readings = []
    limit = max(min(LOG_BYTES, ALL_LOGS_BYTES // max(len(found.logs), 1)), LEAST_LOG_BYTES)
    for i, log in enumerate(found.logs):
        reading, entry = _read_log(log, limit, material)
        readings.append(reading)
        material.inputs.append(entry)
        if progress is not None:
            progress(len(found.dumps) + i + 1, total)
    material.log = merged(readings)
    return material


def _inputs_of(loaded: LoadedFlights) -> Iterator[Input]:
    for path, rank, status, detail in loaded.inputs:
        try:
            known = InputStatus(status)
        except ValueError:
            known = InputStatus.UNREADABLE
            detail = detail or str(status)
        yield Input(Path(path), rank, known, detail, _size_of(Path(path)))


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_log(log: LogFile, limit_bytes: int, material: _Material) -> tuple[LogReading, Input]:
    try:
        status = log.path.stat()
        with log.path.open("rb") as f:
            if status.st_size > limit_bytes:
                f.seek(status.st_size - limit_bytes)
                f.readline(1 << 20)
            data = f.read(limit_bytes)
    except OSError as e:
        return LogReading(), Input(log.path, log.rank, InputStatus.UNREADABLE, e.strerror or str(e))
    material.newest_log_s = max(material.newest_log_s or 0.0, status.st_mtime)
    if _TELLING.search(data) is None:
        data = data[-TAIL_BYTES:]  # nothing is told in it: the last lines are enough
    speakers = {int(m) for m in _SPEAKER.findall(data)}
    rank = log.rank
    if len(speakers) == 1 and (rank is None or log.is_local_rank):
        rank = speakers.pop()  # one rank's own log; what its folder says is the local rank
    elif len(speakers) > 1:
        rank = None
    if rank is not None:
        material.own_logs.add(rank)
    clock = LogClock(status.st_mtime, time.localtime(status.st_mtime).tm_gmtoff)
    reading = read_log(data.decode("utf-8", "replace").splitlines(), rank, clock)
    cut = f"the last {limit_bytes / (1 << 20):.3g} MiB of it" if status.st_size > limit_bytes else ""
    if reading.says_something or rank is not None:
        return reading, Input(log.path, rank, InputStatus.CUT if cut else InputStatus.USED, cut, status.st_size)
    text = "no line of torch's watchdog, of a traceback or of torchrun in it"
    return LogReading(), Input(log.path, rank, InputStatus.IGNORED, text, status.st_size)


# -- putting it together -----------------------------------------------------------------------------------------------
def _case(found: Found, material: _Material, world_size: int | None, paths: Sequence[Path]) -> Case:
    base = _base(found)
    ranks = {r.rank: r for r in base.ranks} if base is not None else {}
    incident = _main_incident(found)
    offset = incident.unix_minus_mono_s if incident is not None else 0.0
    timeline = None
    run = incident.run if incident is not None else next(iter(found.runs), None)
    if run is not None:
        timeline = read_timeline(run, incident.detected_at_unix_s if incident is not None else None)
    offsets = dict(timeline.unix_minus_mono_s) if timeline is not None else {}
    if base is not None and base.now_s > 0:
        for r in base.ranks:
            offsets.setdefault(r.node, offset)
    else:
        offsets = {}  # times are wall times already
    log = _with_tails(material.log, ranks.values(), incident)
    size = world_size or _world_size(base, material, log)
    material.log_flights = flights_from_log(log, size)
    for rank, sidecar in material.sidecars.items():
        own = ranks.get(rank)
        ranks[rank] = _of_sidecar(sidecar) if own is None else _completed(own, _of_sidecar(sidecar))
    for notes in material.notes:
        for rank in {*notes.states, *notes.exceptions}:
            ranks[rank] = _of_notes(ranks.get(rank) or _blank(rank), notes)
    for rank, told in log.ranks.items():
        if rank in ranks or not told.is_silent or rank in material.own_logs:
            ranks[rank] = _of_log(ranks.get(rank) or _blank(rank), told, material.newest_log_s)
    for exit_ in log.exits:
        ranks[exit_.rank] = _of_launcher(ranks.get(exit_.rank) or _blank(exit_.rank), exit_, material.newest_log_s)
    for rank in {*material.flights, *material.log_flights}:
        flight = _flight(ranks.get(rank), material.flights.get(rank), material.log_flights.get(rank))
        ranks[rank] = replace(ranks.get(rank) or _blank(rank), flight=flight)
    size = max([size, *(r + 1 for r in ranks)]) if world_size is None else world_size
    evidence = Evidence(
        run_id=base.run_id if base is not None else _run_id(material),
        attempt=base.attempt if base is not None else max((r.attempt for r in ranks.values()), default=0),
        world_size=size,
        trigger=base.trigger if base is not None else "hang",
        now_s=base.now_s if base is not None else _taken_s(ranks.values(), material),
        ranks=tuple(r for _, r in sorted(ranks.items()) if r.rank < size or world_size is None),
        script=base.script if base is not None else "",
        missing=base.missing if base is not None else (),
    )
    inputs = [*found.inputs, *material.inputs, *(timeline.inputs if timeline is not None else ())]
    moments = list(timeline.moments) if timeline is not None else []
    moments += moments_of_ranks(evidence.ranks, offsets, offset)
    moments += _log_moments(log)
    return Case(
        evidence=evidence,
        inputs=tuple(inputs),
        details=material.details,
        moments=tuple(sorted(moments, key=lambda m: m.at_unix_s)),
        unix_minus_mono_s=offsets,
        title=_title(incident, paths),
    )


def _main_incident(found: Found) -> Incident | None:
    """Of several folders, the one with the most ranks: agents of other nodes keep only their own."""
    return max(
        found.incidents,
        key=lambda i: (len(i.evidence.ranks) if i.evidence is not None else -1, i.detected_at_unix_s or 0.0),
        default=None,
    )


def _base(found: Found) -> Evidence | None:
    incident = _main_incident(found)
    if incident is not None and incident.evidence is not None:
        return incident.evidence
    return max(found.attempts, key=lambda e: len(e.ranks), default=None)


def _with_tails(log: LogReading, ranks: Iterable[RankEvidence], incident: Incident | None) -> LogReading:
    """The log lines that an agent kept are read like a log."""
    detected = incident.detected_at_unix_s if incident is not None else None
    clock = LogClock(detected + 600, time.localtime(detected).tm_gmtoff) if detected is not None else None
    tails = [read_log(r.log_tail, r.rank, clock) for r in ranks if r.log_tail and r.rank not in log.ranks]
    # What such a tail says beyond the watchdog's words is in the evidence already.
    watchdog = [replace(t, ranks={k: replace(v, exceptions=(), tail=()) for k, v in t.ranks.items()}) for t in tails]
    return merged([log, *watchdog]) if watchdog else log


def _world_size(base: Evidence | None, material: _Material, log: LogReading) -> int:
    sizes = [base.world_size] if base is not None else []
    sizes += [n.world_size for n in material.notes if n.world_size is not None]
    sizes += [s.world_size for s in material.sidecars.values() if s.world_size is not None]
    sizes += [g.ranks[-1] + 1 for s in material.sidecars.values() for g in s.groups if g.ranks]
    sizes += [g.ranks[-1] + 1 for f in material.flights.values() for g in f.groups if g.ranks]
    sizes += [rank + 1 for rank in (*material.flights, *material.sidecars)]
    return max([*sizes, log.highest_rank() + 1], default=0)


def _run_id(material: _Material) -> str:
    return next((s.run_id for s in material.sidecars.values() if s.run_id), "")


def _taken_s(ranks: Iterable[RankEvidence], material: _Material) -> float:
    """When the material was gathered, wall time: loose material has no other clock."""
    times = [r.flight.taken_at_unix_s for r in ranks if r.flight is not None and r.flight.taken_at_unix_s is not None]
    times += [d.taken_at_unix_s for s in material.sidecars.values() for d in s.dumps]
    if material.newest_log_s is not None and not times:
        times.append(material.newest_log_s)
    return max(times, default=0.0)


def _title(incident: Incident | None, paths: Sequence[Path]) -> str:
    if incident is not None:
        run = incident.run
        return f"incident {incident.folder.name}" + (f" of {run.name}" if run is not None else "")
    names = ", ".join(p.name or str(p) for p in paths[:3])
    return names + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _blank(rank: int) -> RankEvidence:
    return RankEvidence(rank, UNKNOWN_LOCAL_RANK, "", 0, 0)


def _completed(own: RankEvidence, other: RankEvidence) -> RankEvidence:
    """The agent's evidence, with what only the sidecar has."""
    return replace(
        own,
        gpu=own.gpu or other.gpu,
        process=own.process or other.process,
        exit=own.exit or other.exit,
        exception=own.exception or other.exception,
        step=own.step if own.step is not None else other.step,
        sections=own.sections or other.sections,
    )


def _of_sidecar(sidecar: Sidecar) -> RankEvidence:
    """Times are wall times: the dump's, and ages relative to it."""
    taken = max((d.taken_at_unix_s for d in sidecar.dumps), default=0.0)
    sections: tuple[OpenSection, ...] = ()
    if sidecar.section:
        sections = (OpenSection(sidecar.section, taken - (sidecar.section_age_s or 0.0)),)
    has_ended = sidecar.exit_code is not None or sidecar.exit_signal is not None
    exception = _exception_of_text(sidecar.exception, sidecar.step, taken)
    return RankEvidence(
        rank=sidecar.rank,
        local_rank=sidecar.local_rank if sidecar.local_rank is not None else UNKNOWN_LOCAL_RANK,
        node=sidecar.host,
        pid=sidecar.pid or 0,
        attempt=sidecar.attempt or 0,
        step=sidecar.step,
        attached=True,
        sections=sections,
        exit=ExitRecord(sidecar.exit_code, sidecar.exit_signal, taken) if has_ended else None,
        exception=exception,
        process=_process(sidecar.process_state),
        gpu=sidecar.gpu,
        files=tuple(d.file for d in sidecar.dumps),
        missing=sidecar.missing,
    )


def _exception_of_text(text: str, step: int | None, at_unix_s: float) -> ExceptionRecord | None:
    """From ``Type: message``."""
    if not text:
        return None
    type_, _, message = text.partition(": ")
    return ExceptionRecord(type_, message, traceback_hash(type_, []), (), step, at_unix_s)


def _process(state: str) -> ProcessFacts | None:
    return ProcessFacts(state, "", 0, 0.0, 0) if state else None


def _of_notes(own: RankEvidence, notes: Notes) -> RankEvidence:
    return replace(
        own,
        process=own.process or _process(notes.states.get(own.rank, "")),
        exception=own.exception or _exception_of_text(notes.exceptions.get(own.rank, ""), own.step, 0.0),
    )


def _of_log(own: RankEvidence, log: RankLog, written_s: float | None) -> RankEvidence:
    last = next((e for e in reversed(log.exceptions) if e.is_last_words), None)
    exception = own.exception
    if exception is None and last is not None:
        exception = _exception(last, own.step, written_s)
    suspicion = own.suspicion or _stuck(log, written_s)
    return replace(
        own,
        node=own.node or log.host,
        attached=own.attached or suspicion is not None,  # its watchdog runs since the first group was made
        exception=exception,
        suspicion=suspicion,
        log_tail=own.log_tail or log.tail,
    )


def _stuck(log: RankLog, written_s: float | None) -> Suspicion | None:
    """A watchdog that is stuck suspects its own process: the call into the driver that does not return is there.

    Where operations timed out as well, they tell more, and the watchdog is stuck because of them.
    """
    note = next((n for n in log.notes if n.kind is NoteKind.WATCHDOG_STUCK), None)
    if note is None or log.timeouts or log.counters:
        return None
    limit = float(note.number or 480)  # torch's default
    at = note.at_unix_s if note.at_unix_s is not None else written_s or 0.0
    return Suspicion(log.rank, "no_progress", None, at - limit, limit)


def _exception(told: LogException, step: int | None, written_s: float | None) -> ExceptionRecord:
    frames = [(f.file, f.line, f.function) for f in told.frames]
    at = told.at_unix_s if told.at_unix_s is not None else written_s or 0.0
    return ExceptionRecord(told.type, told.message, traceback_hash(told.type, frames), told.frames, step, at)


def _of_launcher(own: RankEvidence, exit_: LauncherExit, written_s: float | None) -> RankEvidence:
    """torchrun ends the others with SIGTERM and lists them as failures too. Whom it calls the root cause is the first
    whose exit it saw, often a victim; an abort without a word is most often the watchdog's."""
    if own.exit is not None:
        return own
    at = exit_.at_unix_s if exit_.at_unix_s is not None else written_s or 0.0
    known = replace(
        own,
        node=own.node or exit_.host,
        local_rank=exit_.local_rank if own.local_rank == UNKNOWN_LOCAL_RANK else own.local_rank,
    )
    if exit_.signal == 6 and not own.log_tail and own.exception is None:
        text = "how it ended: torchrun tells of an abort (SIGABRT) but its own log is not here"
        return replace(known, missing=(*own.missing, text))
    ended = ExitRecord(exit_.code, exit_.signal, at, by_us=exit_.signal == 15)
    return replace(known, pid=own.pid or exit_.pid or 0, exit=ended)


def _flight(own: RankEvidence | None, dump: RankFlight | None, log: RankFlight | None) -> RankFlight | None:
    """Dumps go before what the agent had summarised, and that before the log's lines, which fill in NCCL's part."""
    flight = dump if dump is not None and (dump.groups or dump.is_off) else None
    kept = own.flight if own is not None else None
    if flight is None or (flight.is_off and kept is not None):
        flight = kept or dump
    if log is None:
        return flight
    if flight is None or (flight.is_off and log.groups):
        return log
    problems = tuple(dict.fromkeys((*flight.problems, *log.problems)))
    if any(r.startswith("nccl") for r in flight.recorders) or not log.groups:
        return replace(flight, problems=problems, exception=flight.exception or log.exception)
    base = len(flight.groups)
    return replace(
        flight,
        groups=flight.groups + log.groups,
        ops=flight.ops + tuple(replace(op, group=op.group + base) for op in log.ops),
        recorders=(*flight.recorders, "log"),
        problems=problems,
        exception=flight.exception or log.exception,
    )


def _log_moments(log: LogReading) -> list[Moment]:
    out = []
    for rank, told in log.ranks.items():
        for t in told.timeouts:
            if t.at_unix_s is not None:
                text = f"rank {rank}: {t.op} #{t.seq} timed out after {t.ran_for_s:.0f} s"
                out.append(Moment(t.at_unix_s, "log", text, rank))
        out += [
            Moment(n.at_unix_s, "log", f"rank {rank}: {n.kind.value.replace('_', ' ')}", rank)
            for n in told.notes
            if n.at_unix_s is not None
        ]
    for e in log.exits:
        if e.at_unix_s is not None:
            how = f"signal {e.signal}" if e.signal is not None else f"exit code {e.code}"
            out.append(Moment(e.at_unix_s, "exit", f"torchrun saw rank {e.rank} end with {how}", e.rank, e.host))
    return out
