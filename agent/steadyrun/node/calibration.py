"""Limits that set themselves while a run goes on: statistics of its sections, kept over attempts and runs.

What is counted are the records of this node's journal, as they are written, so that a calibration of the finished run
counts the same. A node sees its own ranks; as ranks wait for each other, that is nearly what the job sees.

Kept are statistics, not limits: those of the run in its folder while it goes on, and those of all runs with the same
command line beside it, written when a run ends. A run whose agent was killed is counted by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from pathlib import Path
from typing import Any, Final

from steadyrun.core.files import write_atomically
from steadyrun.core.runfolder import RunFolder, list_runs
from steadyrun.core.sections import SETUP, STEP
from steadyrun.detect.calibrate import Costs, History, SectionKey, SectionStatistics
from steadyrun.detect.calibrate.following import Followed, Follower
from steadyrun.detect.calibrate.passes import Pass, PassReader
from steadyrun.node.machine.events import Limits

__all__ = ["Calibration", "Timeouts", "configuration_of"]

RESTARTS: Final = "_restarts"
LEAST_RESTART_S: Final = 10.0  # a few fast restarts do not show what a bad one costs
WRITE_EVERY_S: Final = 15.0
ORPHANS: Final = 20  # newest run folders that are looked into for statistics nobody has counted
_UNMARKED: Final = "the script does not mark its evaluations, so that time alone does not act"


class Timeouts(str, Enum):
    """Where the watchdog's limits come from."""

    AUTO = "auto"  # they follow what is seen
    FILE = "file"
    OFF = "off"


def configuration_of(words: Sequence[str], local_world_size: int) -> str:
    """What runs must share for their durations to be comparable, as 16 hexadecimal digits.

    The script with its arguments and the ranks of a node. The world size stands in the statistics themselves.
    """
    text = json.dumps([*words, local_world_size])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Calibration:
    """What one agent has seen of the sections, and the limits that follow from it. For the loop's thread.

    Args:
        base: the limits that the user gave or left alone. What was given stays as it is.
        timeouts: only with AUTO do limits follow; statistics are kept in any case.
    """

    def __init__(self, folder: RunFolder, configuration: str, base: Limits, timeouts: Timeouts) -> None:
        self._folder, self._configuration = folder, configuration
        self._base, self._timeouts = base, timeouts
        self._path = folder.calibration(configuration)
        self._kept = _read(self._path) or _Kept()
        self._orphans = _orphans(folder, configuration, self._kept)
        self._earlier = self._kept.with_runs(self._orphans)
        self._own = _Kept()
        self._reader = PassReader()
        self._had_own_step = False
        self._worlds: dict[int, int] = {}  # attempt -> ranks
        self._world_size = 0
        self._is_leader = False
        self._seen_until_s: dict[SectionKey, float] = {}
        self._since_s = inf
        self._follower = Follower(self._costs())
        self._followed: Mapping[str, Followed] = {}
        self._next_write_s = 0.0
        self._is_dirty = self._has_news = False
        self._is_over = False

    # -- what the loop tells -----------------------------------------------------------------------------------------
    def begin_attempt(self, attempt: int, world_size: int, is_leader: bool) -> None:
        """Before its ranks are started."""
        self._worlds[attempt] = self._world_size = world_size
        self._has_news = True
        self._is_leader = is_leader

    def read(self, record: Mapping[str, Any]) -> None:
        """A record of the journal, as it is written."""
        if record["type"] == "alarm" and record["stage"] != "spared":
            return  # nobody asks this reader for those
        self._reader.read(record)
        if record["type"] == "steps":
            self._count(self._reader.take())
            self._count_time(float(record["at_s"]))

    def limits(self) -> Limits | None:
        """The limits to go by, where they are others than when this was asked last."""
        if self._timeouts is not Timeouts.AUTO or not self._has_news:
            return None
        self._has_news = False
        self._follower.costs = self._costs()
        followed = self._follower.limits(self._statistics(), self._reader.has_own_step)
        followed = {name: f for name, f in followed.items() if name not in self._base.accepted}
        if followed == self._followed:
            return None
        self._followed = followed
        hard = {name: f.limit.hard_s for name, f in followed.items() if f.acts_on_time}
        soft = {name: f.limit.soft_s for name, f in followed.items() if f.limit.soft_s < f.limit.hard_s}
        # A first pass is what the run has not seen: its limit may only grow.
        first = {
            name: f.limit.first_s
            for name, f in followed.items()
            if f.acts_on_time and f.limit.first_s > max(self._base.first_step_s, self._base.evaluation_s)
        }
        return replace(
            self._base,
            sections={**self._base.sections, **hard},
            first={**first, **self._base.first},
            accepted=self._base.accepted | hard.keys(),
            calibrated=self._base.calibrated | hard.keys(),
            soft={**self._base.soft, **soft},
        )

    def told(self) -> dict[str, Any]:
        """For the live state: of each calibrated section both limits, what they rest on, and why."""
        return {
            name: {
                "soft_s": f.limit.soft_s,
                "hard_s": f.limit.hard_s if f.acts_on_time else None,
                "n": round(f.limit.n, 1),
                "why": f.limit.why if f.acts_on_time else f"{_UNMARKED}; soft: {f.limit.why}",
            }
            for name, f in sorted(self._followed.items())
        }

    def write(self, now_s: float) -> None:
        """Keep what was seen, now and then; a disk that takes nothing costs only that."""
        if self._is_dirty and self._is_leader and now_s >= self._next_write_s:
            self._next_write_s, self._is_dirty = now_s + WRITE_EVERY_S, False
            with contextlib.suppress(OSError):
                _write(self._folder.section_statistics, self._own)

    def close(self) -> None:
        """The run is over: count what is left, and hand all on to the next one."""
        if self._is_over:
            return
        self._is_over = True
        self._count(self._reader.take(is_over=True))
        if not self._is_leader or not len(self._own.history):
            return
        self._own.history.note_run(self._folder.root.name)
        with contextlib.suppress(OSError):
            _write(self._folder.section_statistics, self._own)
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            with _alone(self._path):
                kept = _read(self._path) or _Kept()
                _write(self._path, kept.with_runs(self._orphans).with_runs([self._own]))

    # -- counting ----------------------------------------------------------------------------------------------------
    def _count(self, passes: Sequence[Pass]) -> None:
        own = self._own.history
        if self._reader.has_own_step and not self._had_own_step:
            self._had_own_step = True
            own.forget(STEP)  # times between steps, from before the first section of that name was known
        for name in self._reader.loops:
            own.forget(name)
        run = self._folder.root.name
        counted: dict[tuple[int, str], SectionStatistics] = {}
        for p in passes:
            of_section = counted.get((p.attempt, p.section))
            if of_section is None:
                world_size = self._worlds.get(p.attempt, self._world_size)
                of_section = own.of(SectionKey(p.section, world_size, self._configuration))
                counted[p.attempt, p.section] = of_section
            of_section.observe(p.seconds, p.rank, p.step, run, p.is_first, p.was_spared)
        for seconds in self._reader.take_restart_s():
            self._own.restarts, self._own.restarts_s = self._own.restarts + 1, self._own.restarts_s + seconds
        self._is_dirty = self._is_dirty or bool(passes)
        self._has_news = self._has_news or bool(passes)

    def _count_time(self, at_s: float) -> None:
        """The job went on until now, and could have passed each section that it knows."""
        self._since_s = min(self._since_s, at_s)
        for s in self._own.history:
            if s.key.world_size == self._world_size:
                s.observe_wall(at_s - self._seen_until_s.get(s.key, self._since_s))
                self._seen_until_s[s.key] = at_s

    def _statistics(self) -> list[SectionStatistics]:
        both: dict[SectionKey, SectionStatistics] = {}
        for history in (self._earlier.history, self._own.history):
            for s in history.of_world(self._world_size, self._configuration):
                if s.key.section != SETUP:  # once a start
                    both[s.key] = both[s.key].merged(s) if s.key in both else s
        return list(both.values())

    def _costs(self) -> Costs:
        restarts = self._earlier.restarts + self._own.restarts
        if not restarts:
            return Costs()
        return Costs(restart_s=max(LEAST_RESTART_S, (self._earlier.restarts_s + self._own.restarts_s) / restarts))


# -- files -------------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Kept:
    """What a file of statistics holds. ``restarts_s``: the sum of what ``restarts`` that were measured took."""

    history: History = field(default_factory=History)
    restarts: int = 0
    restarts_s: float = 0.0

    def with_runs(self, others: Iterable[_Kept]) -> _Kept:
        """With those of other runs, unless these have been counted."""
        out = replace(self)
        for other in others:
            if not set(other.history.runs).issubset(out.history.runs):
                out = _Kept(
                    out.history.merged(other.history),
                    out.restarts + other.restarts,
                    out.restarts_s + other.restarts_s,
                )
        return out


def _orphans(folder: RunFolder, configuration: str, kept: _Kept) -> list[_Kept]:
    """Of earlier runs that could not hand on what they saw."""
    out = []
    for root in list_runs(folder.root.parent)[-ORPHANS:]:
        if root == folder.root or root.name in kept.history.runs:
            continue
        found = _read(RunFolder(root).section_statistics)
        if found is not None and any(s.key.configuration == configuration for s in found.history):
            found.history.note_run(root.name)
            out.append(found)
    return out


def _read(path: Path) -> _Kept | None:
    """None where there is no such file, or one that cannot be used: it is made anew then."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        restarts = data.get(RESTARTS) or {}
        n = int(restarts.get("n", 0))
        return _Kept(History.from_json(data), n, n * float(restarts.get("mean_s", 0.0)))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _write(path: Path, kept: _Kept) -> None:
    mean_s = kept.restarts_s / kept.restarts if kept.restarts else 0.0
    data = {**kept.history.to_json(), RESTARTS: {"n": kept.restarts, "mean_s": round(mean_s, 3)}}
    write_atomically(path, json.dumps(data))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While runs that end at the same time wait for each other."""
    fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
