"""What a run of steadyrun left behind: an incident's evidence, and from the journals what happened around it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from steadyrun.collectors.evidence import read_exception
from steadyrun.core.records import (
    DeviceEvent,
    Evidence,
    ExitRecord,
    RankEvidence,
    device_event_from_json,
    rank_evidence_from_json,
)
from steadyrun.detect.grouping import name_ranks
from steadyrun.postmortem.case import Input, InputStatus, Moment

__all__ = [
    "Incident",
    "Timeline",
    "is_incident_folder",
    "is_run_folder",
    "newest_incident",
    "read_incident",
    "read_last_attempt",
    "read_timeline",
]

BEFORE_S: Final = 120.0
AFTER_S: Final = 30.0
MAX_MOMENTS: Final = 3000
EVIDENCE_BYTES: Final = 1 << 29
JOURNAL_BYTES: Final = 1 << 26  # looked at per journal, around the incident
LOOK_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Incident:
    """One incident's folder, read.

    Attributes:
        evidence: None where evidence.json is missing or no use.
        detected_at_unix_s, delay_s: from verdict.json; None without one.
        unix_minus_mono_s: wall time minus CLOCK_MONOTONIC on the node that judged, as far as it can be told.
        run: the run folder it lies in; None when it was copied out of one.
    """

    folder: Path
    evidence: Evidence | None
    inputs: tuple[Input, ...]
    detected_at_unix_s: float | None = None
    unix_minus_mono_s: float = 0.0
    run: Path | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the journals say of a stretch of time; offsets per node."""

    moments: tuple[Moment, ...]
    unix_minus_mono_s: dict[str, float]
    inputs: tuple[Input, ...]


def is_run_folder(folder: Path) -> bool:
    """It has journals or incidents."""
    return (folder / "journal").is_dir() or (folder / "incidents").is_dir()


def is_incident_folder(folder: Path) -> bool:
    return (folder / "evidence.json").is_file() or (folder / "verdict.json").is_file()


def newest_incident(run: Path) -> Path | None:
    """The folder of the run's newest complete incident, or None."""
    try:
        folders = [p for p in (run / "incidents").iterdir() if p.name.isdigit() and is_incident_folder(p)]
    except OSError:
        return None
    return max(folders, key=lambda p: int(p.name), default=None)


# -- incidents ---------------------------------------------------------------------------------------------------------
def read_incident(folder: Path) -> Incident:
    """Its evidence and when it was found; what cannot be read is said in ``inputs``."""
    inputs: list[Input] = []
    verdict = _object(folder / "verdict.json", inputs)
    data = _object(folder / "evidence.json", inputs)
    detected = _number(verdict.get("detected_at_unix_s"))
    evidence: Evidence | None = None
    if data:
        evidence, problem = _evidence(data)
        if problem:
            inputs[-1] = replace(
                inputs[-1],
                status=InputStatus.UNREADABLE if evidence is None else InputStatus.CUT,
                detail=problem,
            )
    offset = 0.0
    if evidence is not None and detected is not None:
        # Evidence is stamped when it is judged, some tenths of a second to a few seconds after the detection.
        offset = detected - evidence.now_s
    parents = folder.absolute().parents
    run = parents[1] if len(parents) > 1 and parents[0].name == "incidents" and is_run_folder(parents[1]) else None
    return Incident(folder, evidence, tuple(inputs), detected, offset, run)


def _object(path: Path, inputs: list[Input]) -> Mapping[str, Any]:
    """A JSON object from a file; empty where there is none. Adds what became of the file to *inputs*."""
    try:
        size = path.stat().st_size
        if size > EVIDENCE_BYTES:
            text = f"{size >> 20} MiB, more than {EVIDENCE_BYTES >> 20}"
            inputs.append(Input(path, None, InputStatus.REFUSED, text, size))
            return {}
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as e:
        inputs.append(Input(path, None, InputStatus.UNREADABLE, e.strerror or str(e)))
        return {}
    except (ValueError, RecursionError):
        status = InputStatus.EMPTY if size == 0 else InputStatus.UNREADABLE
        inputs.append(Input(path, None, status, "" if size == 0 else "not JSON, or cut", size))
        return {}
    if not isinstance(data, dict):
        inputs.append(Input(path, None, InputStatus.UNREADABLE, "not an object", size))
        return {}
    inputs.append(Input(path, None, InputStatus.USED, "", size))
    return data


def _evidence(data: Mapping[str, Any]) -> tuple[Evidence | None, str]:
    """(the evidence, what is wrong with it): ranks that cannot be read are left out."""
    ranks: list[RankEvidence] = []
    problem = ""
    rows = data.get("ranks")
    for row in rows if isinstance(rows, list) else ():
        rank = _rank_evidence(row)
        if isinstance(rank, str):
            problem = problem or rank
        else:
            ranks.append(rank)
    try:
        evidence = Evidence(
            run_id=str(data.get("run_id", "")),
            attempt=int(data.get("attempt", 0)),
            world_size=int(data["world_size"]),
            trigger=str(data.get("trigger", "hang")),
            now_s=float(data["now_s"]),
            ranks=tuple(sorted(ranks, key=lambda r: r.rank)),
            script=str(data.get("script", "")),
            missing=tuple(map(str, data.get("missing", ()))),
            devices=tuple(_device_events(data.get("devices"))),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        return None, f"not evidence of an incident: {e!r}"
    return evidence, problem


def _device_events(rows: Any) -> Iterator[DeviceEvent]:
    """Those that can be read."""
    for row in rows if isinstance(rows, list) else ():
        with contextlib.suppress(ValueError, AttributeError):
            yield device_event_from_json(row)


def _rank_evidence(row: Any) -> RankEvidence | str:
    """One rank's, or why it cannot be read."""
    try:
        return rank_evidence_from_json(row)
    except (ValueError, TypeError) as e:
        return str(e)[:200]


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e15 else None


# -- a run without an incident -----------------------------------------------------------------------------------------
def read_last_attempt(run: Path) -> tuple[Evidence | None, tuple[Path, ...], tuple[Input, ...]]:
    """(evidence, folders of its ranks, inputs) of the newest attempt, for a run that wrote no incident.

    The agent may have died with the job, or the run goes on; exits come from the journals, exceptions from the ranks'
    own folders.
    """
    try:
        attempts = [p for p in (run / "attempts").iterdir() if p.name.isdigit()]
        newest = max(attempts, key=lambda p: int(p.name), default=None)
        folders = sorted(newest.glob("rank_*"), key=_rank_of) if newest is not None else []
    except OSError:
        return None, (), ()
    if newest is None:
        return None, (), ()
    attempt = int(newest.name)
    exits, started, world_size = _lives(run, attempt)
    inputs: list[Input] = []
    ranks = []
    for folder in folders:
        rank = _rank_of(folder)
        if rank < 0:
            continue
        node, local_rank, pid = started.get(rank, ("", -1, 0))
        exception, text = read_exception(folder / "exception.json")
        if exception is not None:
            inputs.append(Input(folder / "exception.json", rank, InputStatus.USED, "", len(text)))
        elif text:
            inputs.append(Input(folder / "exception.json", rank, InputStatus.UNREADABLE, text))
        ranks.append(RankEvidence(rank, local_rank, node, pid, attempt, exit=exits.get(rank), exception=exception))
    if not ranks:
        return None, (), tuple(inputs)
    evidence = Evidence(
        run_id=run.name,
        attempt=attempt,
        world_size=max(world_size, ranks[-1].rank + 1),
        trigger="hang",
        now_s=0.0,
        ranks=tuple(ranks),
        missing=("the run has no incident: its agents saw none, or ended before they could write one",),
    )
    return evidence, tuple(folders), tuple(inputs)


def _rank_of(folder: Path) -> int:
    text = folder.name.partition("_")[2]
    return int(text) if text.isdigit() and len(text) < 8 else -1


def _lives(run: Path, attempt: int) -> tuple[dict[int, ExitRecord], dict[int, tuple[str, int, int]], int]:
    """(exits, (node, local rank, pid) per rank, world size) of an attempt, from the journals; times are wall times."""
    exits: dict[int, ExitRecord] = {}
    started: dict[int, tuple[str, int, int]] = {}
    world_size = 0
    for path in _journals(run):
        for record in _records(path, 0.0, float("inf")):
            try:
                if record["type"] == "run_started":
                    world_size += int(record["local_world_size"])
                elif record["attempt"] != attempt:
                    continue
                elif record["type"] == "rank_started":
                    place = (str(record["node"]), int(record["local_rank"]), int(record["pid"]))
                    started[int(record["rank"])] = place
                elif record["type"] == "rank_exited":
                    code = int(record["code"])
                    exits[int(record["rank"])] = ExitRecord(
                        code if code >= 0 else None,
                        -code if code < 0 else None,
                        float(record["at_unix_s"]),
                        bool(record["by_us"]),
                    )
            except (KeyError, TypeError, ValueError):
                continue
    return exits, started, world_size


# -- journals ----------------------------------------------------------------------------------------------------------
def read_timeline(run: Path, at_unix_s: float | None) -> Timeline:
    """What the journals say from two minutes before to half a minute after *at_unix_s* (None: of the end)."""
    moments: list[Moment] = []
    offsets: dict[str, float] = {}
    inputs: list[Input] = []
    for path in _journals(run):
        until_s = at_unix_s + AFTER_S if at_unix_s is not None else float("inf")
        since_s = at_unix_s - BEFORE_S if at_unix_s is not None else _newest_s(path) - BEFORE_S
        found = 0
        for record in _records(path, since_s, until_s):
            found += 1
            node = str(record.get("node", ""))
            at, mono = _number(record.get("at_unix_s")), _number(record.get("at_s"))
            if at is None:
                continue
            if mono is not None:
                offsets[node] = at - mono
            moments += _moments(record, at, node)
        detail = "" if found else "nothing in it around the incident"
        inputs.append(Input(path, None, InputStatus.USED if found else InputStatus.IGNORED, detail, _size(path)))
    moments.sort(key=lambda m: m.at_unix_s)
    return Timeline(tuple(moments[-MAX_MOMENTS:]), offsets, tuple(inputs))


def _journals(run: Path) -> list[Path]:
    return sorted((run / "journal").glob("*.jsonl"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _records(path: Path, since_s: float, until_s: float) -> Iterator[Mapping[str, Any]]:
    """Records of a journal within a stretch of time. It is in order, so its start is found by halving."""
    try:
        with path.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            low, high = 0, size
            while high - low > LOOK_BYTES:
                middle = (low + high) // 2
                f.seek(middle)
                f.readline(LOOK_BYTES)
                at = _stamp(f.readline(LOOK_BYTES))
                if at is not None and at < since_s:
                    low = middle
                else:
                    high = middle
            f.seek(low)
            if low > 0:
                f.readline(LOOK_BYTES)
            left = JOURNAL_BYTES
            while left > 0 and (line := f.readline(JOURNAL_BYTES)):
                left -= len(line)
                record = _record(line)
                if record is None:
                    continue
                at = _number(record.get("at_unix_s"))
                if at is None or at < since_s:
                    continue
                if at > until_s:
                    return
                yield record
    except OSError:
        return


def _record(line: bytes) -> Mapping[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("type"), str) else None


def _stamp(line: bytes) -> float | None:
    record = _record(line)
    return _number(record.get("at_unix_s")) if record is not None else None


def _newest_s(path: Path) -> float:
    try:
        with path.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(size - LOOK_BYTES, 0))
            stamps = [at for line in f.read(LOOK_BYTES).splitlines() if (at := _stamp(line)) is not None]
    except OSError:
        return 0.0
    return max(stamps, default=0.0)


# -- moments -----------------------------------------------------------------------------------------------------------
def _moments(record: Mapping[str, Any], at: float, node: str) -> Iterable[Moment]:
    """What a record means for the timeline; records of other versions may lack anything."""
    make = _MOMENTS.get(record["type"])
    if make is None:
        return ()
    try:
        return tuple(make(record, at, node))
    except (KeyError, TypeError, ValueError, AttributeError):
        return ()


def _steps(record: Mapping[str, Any], at: float, node: str) -> Iterator[Moment]:
    """Ranks that made the same steps are told of together; long sections apart."""
    together: dict[tuple[int, int], list[int]] = {}
    took: dict[tuple[int, int], float] = {}
    sections: dict[str, tuple[list[int], float]] = {}
    for text, row in record["ranks"].items():
        rank = int(text)
        if row.get("step") is not None and row.get("steps"):
            key = (int(row["step"]), int(row["steps"]))
            together.setdefault(key, []).append(rank)
            others_s = sum(s for _, s in row.get("longest", ())) + float(row.get("left_out_s", 0.0))
            took[key] = max(took.get(key, 0.0), float(sum(row["step_times_s"])) + others_s)
        for name, told in row.get("sections", {}).items():
            ranks, longest = sections.get(name, ([], 0.0))
            ranks.append(rank)
            sections[name] = (ranks, max(longest, float(told["max_s"])))
    for (step, steps), ranks in sorted(together.items()):
        seconds = took[(step, steps)]
        span = f"steps {step - steps + 1} to {step}" if steps > 1 else f"step {step}"
        text = f"{span} on {name_ranks(ranks)}, {seconds / steps:.3g} s each"
        yield Moment(at - seconds, "step", text, ranks[0] if len(ranks) == 1 else None, node, at)
    for name, (ranks, longest) in sections.items():
        text = f"section {name} on {name_ranks(ranks)}, up to {longest:.3g} s"
        yield Moment(at, "section", text, ranks[0] if len(ranks) == 1 else None, node)


def _exited(record: Mapping[str, Any], at: float, node: str) -> Iterator[Moment]:
    code = int(record["code"])
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    by = " (from the agent)" if record.get("by_us") else ""
    yield Moment(at, "exit", f"rank {int(record['rank'])} {how}{by}", int(record["rank"]), node)


def _suspicion(record: Mapping[str, Any], at: float, node: str) -> Iterator[Moment]:
    yield Moment(at, "agent", str(record["note"]), int(record["suspicion"]["rank"]), node)


def _started(record: Mapping[str, Any], at: float, node: str) -> Iterator[Moment]:
    text = f"rank {int(record['rank'])} started in attempt {record['attempt']}"
    yield Moment(at, "agent", text + (" (standby)" if record.get("warm") else ""), int(record["rank"]), node)


def _first_step(record: Mapping[str, Any], at: float, node: str) -> Iterator[Moment]:
    yield Moment(at, "step", f"first step of rank {int(record['rank'])}", int(record["rank"]), node)


def _incident(record: Mapping[str, Any], at: float, node: str) -> Iterator[Moment]:
    findings = record["verdict"].get("findings") or [{}]
    yield Moment(at, "agent", f"incident {record['number']}: {findings[0].get('summary', '')}", None, node)


def _device(record: Mapping[str, Any], at: float, node: str) -> Iterator[Moment]:
    rank = record.get("rank")
    text = str(record.get("text") or record.get("event") or record["type"])
    yield Moment(at, "device", text, int(rank) if rank is not None else None, node)


def _plain(words: str, *names: str) -> Callable[[Mapping[str, Any], float, str], Iterator[Moment]]:
    def make(record: Mapping[str, Any], at: float, node: str) -> Iterator[Moment]:
        yield Moment(at, "agent", words.format(*(record[n] for n in names)), None, node)

    return make


_MOMENTS: Final[Mapping[str, Callable[[Mapping[str, Any], float, str], Iterable[Moment]]]] = {
    "steps": _steps,
    "rank_first_step": _first_step,
    "rank_started": _started,
    "rank_exited": _exited,
    "suspicion": _suspicion,
    "incident": _incident,
    "device": _device,
    "device_event": _device,
    "xid": _device,
    "stop": _plain("stop: {}", "reason"),
    "decision": _plain("decided: {}", "action"),
    "signal": _plain("the agent got {}", "signal"),
    "checkpoint_started": _plain("checkpoint of step {} begun", "step"),
    "checkpoint_committed": _plain("checkpoint of step {} complete", "step"),
    "checkpoint_restored": _plain("checkpoint of step {} loaded", "step"),
    "run_ended": _plain("the run ended: {}", "reason"),
}


def moments_of_ranks(ranks: Sequence[RankEvidence], offsets: Mapping[str, float], default_s: float) -> list[Moment]:
    """Exceptions, exits and open sections of the evidence itself, for an incident without journals."""
    out = []
    for r in ranks:
        offset = offsets.get(r.node, default_s)
        if r.exception is not None and r.exception.at_unix_s > 0:
            text = f"{r.exception.type}: {r.exception.message[:200]}"
            out.append(Moment(r.exception.at_unix_s, "exception", text, r.rank, r.node))
        if r.suspicion is not None:
            text = f"no sign of progress since ({r.suspicion.kind})"
            out.append(Moment(r.suspicion.since_s + offset, "agent", text, r.rank, r.node))
    return out
