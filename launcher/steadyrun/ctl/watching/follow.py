"""The journals of a run as they grow: each poll reads only what is new, and keeps only what a live view needs."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from steadyrun.core.runfolder import RunFolder
from steadyrun.ctl.runs import RunLog

__all__ = ["JournalFollower", "Pace"]

FIRST_BYTES: Final = 16 << 20  # of the end of each journal: the last hours of a long run
MOST_RECORDS: Final = 20_000
PACE_STEPS: Final = 20
SLOW_KINDS: Final = ("rank", "node", "parallel_group")
_OPEN: Final = ("began", "now", "act")


@dataclass(slots=True)
class Pace:
    """One rank's newest timings in an attempt."""

    attempt: int
    step: int = -1
    at_unix_s: float = 0.0
    work_s: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))


class JournalFollower:
    """All journals of one run. ``poll`` before looking at the fields.

    Attributes:
        paces: by rank, of the newest attempt that told any.
        slow: how much slower each rank is that an open alarm names (0.25: a quarter more time).
        xids: by node and GPU, how many the kernel told of.
        saved: step and time of the newest complete checkpoint.
        restarted_at_unix_s: when the newest attempt was decided on.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._offsets: dict[Path, int] = {}
        self._records: deque[Mapping[str, Any]] = deque(maxlen=MOST_RECORDS)
        self._alarms: dict[tuple[Any, ...], tuple[tuple[int, ...], float]] = {}
        self._attempt = 0
        self.paces: dict[int, Pace] = {}
        self.xids: dict[tuple[str, int], int] = {}
        self.saved: tuple[int, float] | None = None
        self.restarted_at_unix_s: float | None = None

    @property
    def slow(self) -> dict[int, float]:
        out: dict[int, float] = {}
        for ranks, slowdown in self._alarms.values():
            for rank in ranks:
                out[rank] = max(out.get(rank, 0.0), slowdown)
        return out

    def log(self) -> RunLog:
        """What was read so far, without the records of every step."""
        return RunLog(sorted(self._records, key=_at))

    def poll(self) -> None:
        """Read what was written since the last time."""
        fresh: list[Mapping[str, Any]] = []
        for path in sorted(self._run.journal_dir.glob("*.jsonl")):
            fresh += self._read(path)
        for record in sorted(fresh, key=_at):
            self._take(record)

    def _read(self, path: Path) -> list[Mapping[str, Any]]:
        try:
            with path.open("rb") as f:
                size = f.seek(0, 2)
                offset = self._offsets.get(path)
                if offset is None or offset > size:
                    offset = max(size - FIRST_BYTES, 0)
                    f.seek(offset)
                    if offset:
                        offset += len(f.readline())  # the rest of a line
                f.seek(offset)
                data = f.read()
        except OSError:
            return []
        complete = data.rfind(b"\n") + 1
        self._offsets[path] = offset + complete
        out: list[Mapping[str, Any]] = []
        for line in data[:complete].splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("type"), str):
                out.append(record)
        return out

    # -- records -------------------------------------------------------------------------------------------------------
    def _take(self, record: Mapping[str, Any]) -> None:
        attempt = record.get("attempt")
        if isinstance(attempt, int) and attempt > self._attempt:
            self._attempt = attempt
            self._alarms.clear()
        match record["type"]:
            case "steps":
                self._take_steps(record)
                return
            case "timings":
                self._take_timings(record)
                return
            case "straggler":
                self._take_alarm(record)
            case "device_event":
                self._take_device_event(record)
            case "checkpoint_committed":
                if isinstance(record.get("step"), int):
                    self.saved = (record["step"], _at(record))
            case "decision":
                if str(record.get("action", "")).startswith(("restart", "roll")):
                    self.restarted_at_unix_s = _at(record)
        self._records.append(record)

    def _pace(self, rank: str, record: Mapping[str, Any]) -> Pace | None:
        if not rank.isdecimal() or len(rank) > 7:
            return None
        attempt = record.get("attempt")
        number = attempt if isinstance(attempt, int) else 0
        pace = self.paces.get(int(rank))
        if pace is None or pace.attempt < number:
            pace = self.paces[int(rank)] = Pace(number)
        return pace if pace.attempt == number else None

    def _take_steps(self, record: Mapping[str, Any]) -> None:
        for rank, told in _items(record.get("ranks")):
            pace = self._pace(rank, record)
            if pace is None or not isinstance(told, Mapping):
                continue
            if isinstance(told.get("step"), int):
                pace.step, pace.at_unix_s = told["step"], _at(record)
            pace.step_times_s.extend(_numbers(told.get("step_times_s")))

    def _take_timings(self, record: Mapping[str, Any]) -> None:
        for rank, columns in _items(record.get("ranks")):
            pace = self._pace(rank, record)
            if pace is not None and isinstance(columns, Mapping):
                pace.work_s.extend(s for s in _numbers(columns.get("busy_s")) if s > 0)

    def _take_alarm(self, record: Mapping[str, Any]) -> None:
        alarm = record.get("alarm")
        if not isinstance(alarm, Mapping):
            return
        ranks = alarm.get("ranks")
        who = tuple(r for r in ranks if isinstance(r, int)) if isinstance(ranks, list) else ()
        key = (alarm.get("kind"), who, alarm.get("step"))
        slowdown = alarm.get("slowdown")
        if record.get("event") in _OPEN and alarm.get("kind") in SLOW_KINDS:
            self._alarms[key] = (who, float(slowdown) if isinstance(slowdown, (int, float)) else 0.0)
        elif record.get("event") in ("ended", "lasts", "bursts"):
            self._alarms.pop(key, None)

    def _take_device_event(self, record: Mapping[str, Any]) -> None:
        gpu = record.get("gpu")
        if record.get("event") == "xid" and isinstance(gpu, int):
            key = (str(record.get("node", "")), gpu)
            self.xids[key] = self.xids.get(key, 0) + 1


def _at(record: Mapping[str, Any]) -> float:
    value = record.get("at_unix_s")
    return float(value) if isinstance(value, (int, float)) else 0.0


def _items(value: Any) -> list[tuple[str, Any]]:
    return [(str(k), v) for k, v in value.items()] if isinstance(value, Mapping) else []


def _numbers(value: Any) -> list[float]:
    if not isinstance(value, list):
        return []
    return [float(v) for v in value if isinstance(v, (int, float)) and not isinstance(v, bool)]
