"""What a run folder says: live state, journals, incidents; live and finished runs alike, read only."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadyrun.core.classes import FaultClass
from steadyrun.core.errors import SteadyrunError
from steadyrun.core.journal import read_journal
from steadyrun.core.records import VERDICT_SCHEMA
from steadyrun.core.runfolder import RunFolder, find_run

__all__ = [
    "IncidentFile",
    "LiveNode",
    "NoRunError",
    "NotFoundError",
    "RunLog",
    "find_incident",
    "incidents_of",
    "open_run",
]

DEFAULT_RUN_DIR: Final = Path("steadyrun")
_LIVE_SCHEMA: Final = "steadyrun.live/"


class NotFoundError(SteadyrunError):
    """What was asked for is not there; exit code 1."""


class NoRunError(NotFoundError):
    """There is no run folder in the given place."""


def open_run(where: str | None) -> RunFolder:
    """The run folder of the argument RUN: a run folder, a folder of them (its latest), or None for ``./steadyrun``.

    Raises:
        NoRunError: there is none.
    """
    try:
        return find_run(Path(where) if where is not None else DEFAULT_RUN_DIR)
    except FileNotFoundError as e:
        raise NoRunError(str(e)) from None


# -- incidents -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class IncidentFile:
    """One folder below ``incidents``; ``verdict`` is empty and ``problem`` says why where it cannot be read."""

    number: int
    folder: Path
    verdict: Mapping[str, Any]
    problem: str = ""

    @property
    def findings(self) -> Sequence[Mapping[str, Any]]:
        found = self.verdict.get("findings", ())
        return [f for f in found if isinstance(f, Mapping)] if isinstance(found, Sequence) else []

    @property
    def cls(self) -> str:
        """Class of the first finding."""
        if self.problem:
            return "unreadable"
        return str(self.findings[0].get("class", "?")) if self.findings else FaultClass.INSUFFICIENT_DATA.value

    @property
    def ranks(self) -> list[int]:
        return [int(r) for r in self.findings[0].get("ranks", ())] if self.findings else []

    @property
    def summary(self) -> str:
        if self.problem:
            return self.problem
        if self.findings:
            return str(self.findings[0].get("summary", ""))
        return str(self.verdict.get("reason", ""))


def incidents_of(run: RunFolder) -> list[IncidentFile]:
    """All incidents of a run, in order of their numbers."""
    if not run.incidents_dir.is_dir():
        return []
    numbered = sorted((int(p.name), p) for p in run.incidents_dir.iterdir() if p.name.isdecimal() and p.is_dir())
    return [_read_incident(number, folder) for number, folder in numbered]


def _read_incident(number: int, folder: Path) -> IncidentFile:
    try:
        verdict = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return IncidentFile(
            number, folder, {}, "no verdict yet: evidence is being collected, or the agent died over it"
        )
    except (OSError, ValueError) as e:
        return IncidentFile(number, folder, {}, f"cannot read verdict.json: {e}")
    schema = verdict.get("schema") if isinstance(verdict, dict) else None
    if schema != VERDICT_SCHEMA:
        return IncidentFile(
            number, folder, {}, f"verdict.json has schema {schema!r}, this version reads {VERDICT_SCHEMA}"
        )
    return IncidentFile(number, folder, verdict)


def find_incident(run: RunFolder, which: str) -> IncidentFile:
    """The incident *which* means: a number, or ``last``.

    Raises:
        NotFoundError: there is no such incident; the text lists those there are.
    """
    known = incidents_of(run)
    if which == "last" and known:
        return known[-1]
    if which.isdecimal():
        for incident in known:
            if incident.number == int(which):
                return incident
    numbers = ", ".join(str(i.number) for i in known)
    hint = f"there are {numbers}" if known else "the run has had none"
    raise NotFoundError(f"no incident {which} in {run.root}: {hint}")


# -- live state --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LiveNode:
    """``live/<node>.json``: what a node's agent last said of itself; every field may be missing in a foreign file."""

    data: Mapping[str, Any]
    path: Path

    @property
    def node(self) -> str:
        return str(self.data.get("node", self.path.stem))

    @property
    def agent_pid(self) -> int:
        return _integer(self.data.get("agent_pid"))

    @property
    def attempt(self) -> int:
        return _integer(self.data.get("attempt"))

    @property
    def board(self) -> Path | None:
        return Path(str(self.data["board"])) if self.data.get("board") else None

    @property
    def ranks(self) -> list[Mapping[str, Any]]:
        found = self.data.get("ranks", ())
        return sorted((r for r in found if isinstance(r, Mapping)), key=lambda r: _integer(r.get("rank")))

    @property
    def standbys(self) -> list[Mapping[str, Any]]:
        found = self.data.get("standbys") or ()
        return [s for s in found if isinstance(s, Mapping)]


def _integer(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) else 0


def live_nodes(run: RunFolder) -> list[LiveNode]:
    """One entry per node that keeps its state in this folder; others' files there (savers have some) are left out."""
    out: list[LiveNode] = []
    for path in sorted(run.state.glob("*.json")) if run.state.is_dir() else ():
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(data, dict) and str(data.get("schema", "")).startswith(_LIVE_SCHEMA):
            out.append(LiveNode(data, path))
    return out


# -- journals ----------------------------------------------------------------------------------------------------------
class RunLog:
    """The journals of all nodes, in order of time."""

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.records = records

    @classmethod
    def read(cls, run: RunFolder) -> RunLog:
        records: list[Mapping[str, Any]] = []
        for path in sorted(run.journal_dir.glob("*.jsonl")):
            with contextlib.suppress(OSError):
                records.extend(read_journal(path))
        records.sort(key=lambda r: float(r.get("at_unix_s", 0.0)))
        return cls(records)

    def of_type(self, *types: str) -> Iterator[Mapping[str, Any]]:
        return (r for r in self.records if r["type"] in types)

    @property
    def nodes(self) -> list[str]:
        return sorted({str(r.get("node")) for r in self.records})

    @property
    def started_at_unix_s(self) -> float | None:
        return next((float(r["at_unix_s"]) for r in self.records if "at_unix_s" in r), None)

    @property
    def ended_at_unix_s(self) -> float | None:
        """When the last node ended its part; None while one still runs (or was killed)."""
        ended = {str(r.get("node")): float(r["at_unix_s"]) for r in self.of_type("run_ended")}
        started = {str(r.get("node")) for r in self.of_type("run_started")}
        return max(ended.values()) if ended and started <= set(ended) else None

    @property
    def ending(self) -> Mapping[str, Any] | None:
        """The run_ended record that says most: the first with an exit class other than 0, else the last."""
        ended = list(self.of_type("run_ended"))
        return next((r for r in ended if r.get("exit_class")), ended[-1] if ended else None)

    def attempts(self) -> list[int]:
        return sorted({int(r.get("attempt", 0)) for r in self.of_type("rank_started")})

    def last_steps(self) -> dict[int, int]:
        """Newest step of each rank that the journals know."""
        out: dict[int, int] = {}
        for record in self.of_type("steps"):
            for rank, told in record.get("ranks", {}).items():
                if isinstance(told, Mapping) and isinstance(told.get("step"), int):
                    out[int(rank)] = told["step"]
        for record in self.of_type("rank_first_step"):
            rank, step = record.get("rank"), record.get("step")
            if isinstance(rank, int) and isinstance(step, int):
                out.setdefault(rank, step)
        return out

    def recovery(self, attempt: int) -> Recovery | None:
        """How the attempt after *attempt* came back: None when it never took a step on every rank it started."""
        stop = next((r for r in self.of_type("stop") if r.get("attempt") == attempt), None)
        later = [r for r in self.of_type("rank_first_step") if int(r.get("attempt", 0)) > attempt]
        if stop is None or not later:
            return None
        back = min(int(r["attempt"]) for r in later)
        first_steps = [r for r in later if r["attempt"] == back]
        started = {r.get("rank") for r in self.of_type("rank_started") if r.get("attempt") == back}
        if {r.get("rank") for r in first_steps} < started:
            return None
        warm = sum(bool(r.get("warm")) for r in self.of_type("rank_started") if r.get("attempt") == back)
        return Recovery(
            attempt=back,
            seconds=max(float(r["at_unix_s"]) for r in first_steps) - float(stop["at_unix_s"]),
            first_step=min(int(r.get("step", 0)) for r in first_steps),
            warm_ranks=warm,
            ranks=len(started),
        )


@dataclass(frozen=True, slots=True)
class Recovery:
    """A restart that worked: *seconds* from the decision to stop until every rank had done a step again."""

    attempt: int
    seconds: float
    first_step: int
    warm_ranks: int
    ranks: int


# -- processes ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ProcessState:
    """State letter and start time of a live process of this machine."""

    state: str
    start_ticks: int


def process_state(pid: int, proc: Path = Path("/proc")) -> ProcessState | None:
    """None when there is no such process here."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces and parentheses
    return ProcessState(fields[0], int(fields[19]))


def is_agent_alive(live: LiveNode, proc: Path = Path("/proc")) -> bool:
    """The agent that wrote this is a process of this machine, and not another one that got its number later."""
    state = process_state(live.agent_pid, proc)
    if state is None or state.state in "ZX":
        return False
    ticks = live.data.get("agent_start_ticks")
    if isinstance(ticks, int):
        return ticks == state.start_ticks
    written = live.data.get("updated_at_unix_s")
    return not isinstance(written, (int, float)) or _started_at_unix_s(state, proc) <= written + 1.0


def _started_at_unix_s(state: ProcessState, proc: Path) -> float:
    boot = next(int(line.split()[1]) for line in (proc / "stat").read_text().splitlines() if line.startswith("btime"))
    return boot + state.start_ticks / os.sysconf("SC_CLK_TCK")
