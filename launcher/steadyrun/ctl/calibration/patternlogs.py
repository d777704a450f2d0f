"""Durations out of the logs of a job that did not run under steadyrun, by a pattern of the user's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from steadyrun.core.errors import ConfigError
from steadyrun.core.sections import STEP
from steadyrun.detect.calibrate.passes import Attempt, Pass, RunPasses

__all__ = ["LogReading", "read_logs", "with_checked_groups"]

_DURATIONS: Final = {"seconds": 1.0, "ms": 1e-3, "minutes": 60.0}
GROUPS: Final = frozenset({*_DURATIONS, "time", "step", "rank", "section"})
_DAY_S: Final = 86400.0
_INTEGER: Final = re.compile(r"\d+")


@dataclass(slots=True)
class LogReading:
    """What the pattern found.

    Attributes:
        run: as if it had been a run of ours.
        files: read; empty: names of those in which nothing matched.
        steps_apart: steps from one line to the next, the usual number; lines that tell of several average over them.
    """

    run: RunPasses
    files: int = 0
    empty: list[str] = field(default_factory=list)
    steps_apart: int = 1


def with_checked_groups(text: str) -> re.Pattern[str]:
    """The pattern.

    Raises:
        ConfigError: it is none, or names no group that tells how long something took.
    """
    try:
        pattern = re.compile(text)
    except re.error as e:
        raise ConfigError(f"--pattern: {text!r} is no regular expression: {e}") from None
    names = set(pattern.groupindex)
    if not names & {*_DURATIONS, "time"}:
        raise ConfigError(
            f"--pattern: {text!r} does not say how long anything took; give it a group (?P<seconds>...), (?P<ms>...), "
            "or (?P<time>...) for times of day, whose differences count; (?P<step>...), (?P<rank>...) and "
            "(?P<section>...) are used as well"
        )
    if names - GROUPS:
        raise ConfigError(f"--pattern: unknown group {min(names - GROUPS)!r}; known: {', '.join(sorted(GROUPS))}")
    return pattern


def read_logs(paths: Sequence[Path], pattern: re.Pattern[str], name: str) -> LogReading:
    """Each file is a rank's log, unless its lines name the rank; a step number that falls back begins a new attempt.

    Raises:
        ConfigError: a file cannot be read.
    """
    reading = LogReading(RunPasses(name))
    joined: dict[tuple[int, str, int], Pass] = {}
    apart: list[int] = []
    ranks: set[int] = set()
    for place, path in enumerate(paths):
        reading.files += 1
        try:
            with path.open(encoding="utf-8", errors="replace") as f:
                found = _read_one(f, pattern, _rank_of(path, place, len(paths)), apart)
        except OSError as e:
            raise ConfigError(f"--logs: cannot read {path}: {e.strerror}") from e
        if not found:
            reading.empty.append(str(path))
        for p in found:
            ranks.add(p.rank)
            other = joined.get((p.attempt, p.section, p.index))
            if other is None or p.seconds > other.seconds:
                joined[(p.attempt, p.section, p.index)] = p
    if apart:
        reading.steps_apart = max(1, sorted(apart)[len(apart) // 2])
    for number in sorted({p.attempt for p in joined.values()}):
        passes = sorted((p for p in joined.values() if p.attempt == number), key=lambda p: (p.section, p.index))
        by_section: dict[str, float] = {}
        for p in passes:
            by_section[p.section] = by_section.get(p.section, 0.0) + p.seconds
        observed_s = max(by_section.values()) * (reading.steps_apart if "time" not in pattern.groupindex else 1)
        reading.run.attempts.append(Attempt(number, max(1, len(ranks)), passes, observed_s, observed_s))
    return reading


def _read_one(lines: Iterable[str], pattern: re.Pattern[str], file_rank: int, apart: list[int]) -> list[Pass]:
    out: list[Pass] = []
    followed: dict[tuple[int, str], _Followed] = {}
    for line in lines:
        match = pattern.search(line)
        if match is None:
            continue
        groups = {k: v for k, v in match.groupdict().items() if v is not None}
        step = int(groups["step"]) if groups.get("step", "").isdecimal() else None
        rank = int(groups["rank"]) if groups.get("rank", "").isdecimal() else file_rank
        section = groups.get("section") or STEP
        own = followed.setdefault((rank, section), _Followed())
        gap = own.note(step)
        if gap:
            apart.append(gap)
        seconds = own.seconds(groups)
        if seconds is not None:
            # Of a log it is not known when the first line came: its pass may hold the start.
            out.append(Pass(own.attempt, section, own.index, seconds, rank, step, is_first=own.index == 0))
            own.index += 1
    return out


class _Followed:
    """The lines of one rank about one section."""

    def __init__(self) -> None:
        self.attempt = 0
        self.index = 0
        self._step: int | None = None
        self._at_s: float | None = None

    def note(self, step: int | None) -> int | None:
        """Steps since the line before, or None where that cannot be said."""
        if step is None:
            return None
        before, self._step = self._step, step
        if before is None or step > before:
            return None if before is None else step - before
        self.attempt += 1
        self.index, self._at_s = 0, None
        return None

    def seconds(self, groups: dict[str, str]) -> float | None:
        for name, factor in _DURATIONS.items():
            if name in groups:
                value = _float(groups[name])
                return None if value is None else value * factor
        at_s = _moment_s(groups.get("time", ""))
        before, self._at_s = self._at_s, at_s
        if at_s is None or before is None:
            return None
        passed_s = at_s - before
        return passed_s + _DAY_S if -_DAY_S < passed_s < 0 else passed_s if passed_s >= 0 else None


def _rank_of(path: Path, place: int, count: int) -> int:
    """The last number in the file's name, else in its folders' names (``0/3/stderr.log``), else its place."""
    if count == 1:
        return 0
    for part in (path.stem, *reversed(path.parent.parts)):
        numbers = _INTEGER.findall(part)
        if numbers:
            return int(numbers[-1])
    return place


def _float(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


def _moment_s(text: str) -> float | None:
    """Seconds of a time stamp: Unix, ISO 8601 (comma or point), or a time of day alone."""
    plain = text.strip().replace(",", ".")
    number = _float(plain)
    if number is not None:
        return number
    try:
        return datetime.fromisoformat(plain.replace("/", "-").replace("Z", "+00:00")).timestamp()
    except ValueError:
        pass
    match = re.fullmatch(r"(\d{1,2}):(\d{2}):(\d{2}(?:\.\d+)?)", plain)
    return int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3]) if match else None
