"""What the journals of a run say of its sections: every pass of the job, its hangs, and what restarts took.

A *pass* is one pass of a section by the job: the longest of the ranks' durations, joined by their order in an attempt.
The section ``step`` is the script's own where it opens one; else it is the time between two steps outside of sections,
which is what the watchdog limits then. ``out_of_section`` is that time for scripts that open sections of their own.

The journal says neither which step a section was in, nor in which thread. So a pass that comes now and then (a save, an
evaluation) is sought in the step that fits it best; of what comes with each step only ``step`` itself is taken off, as
the rest may be another thread's. Sections may be nested, so only the longest in a step counts. Where this is wrong, the
time outside, and with it the limit, is rather too long.

Left out is the last pass of each section in an attempt that was stopped, as the stop may have cut or a hang drawn it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from steadyrun.core.classes import PLANNED
from steadyrun.core.sections import CHECKPOINTING, EVALUATION, OUT_OF_SECTION, SETUP, STEP, TEARDOWN
from steadyrun.detect.calibrate.statistics import History, SectionKey

__all__ = ["Attempt", "Hang", "Pass", "RunPasses", "add_to", "read_passes"]

_OPEN_BY_THEMSELVES: Final = frozenset({SETUP, TEARDOWN, CHECKPOINTING})
_KNOWN: Final = frozenset({SETUP, STEP, CHECKPOINTING}) | EVALUATION
_ENDLESS: Final = float("inf")
_LOOP_SHARE: Final = 0.5  # passes per step from which on a section counts as part of each step


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a section by the job. ``rank`` and ``step``: of the slowest; ``is_first``: after a start."""

    attempt: int
    section: str
    index: int
    seconds: float
    rank: int
    step: int | None = None
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Hang:
    """A stop because of a limit that passed. ``section``: the one that hung, as far as known."""

    attempt: int
    section: str
    rank: int | None


@dataclass(slots=True)
class Attempt:
    """One attempt.

    Attributes:
        passes: by section and order.
        observed_s: from the first step to the last record.
        whole_s: from the start of the ranks on.
        steps_s: time between steps, of the rank with most; outside_s: of it outside of all sections.
    """

    number: int
    world_size: int = 0
    passes: list[Pass] = field(default_factory=list)
    observed_s: float = 0.0
    whole_s: float = 0.0
    steps_s: float = 0.0
    outside_s: float = 0.0


@dataclass(slots=True)
class RunPasses:
    """One run.

    Attributes:
        restarts_s: of each restart that worked: until every rank had done a step, and the steps that were repeated.
        has_own_step: the script opens sections named ``step``.
        loops: sections that contain steps: those are what is judged.
        unread: durations the journal does not have, as more were made than it takes.
    """

    name: str
    configuration: str = ""
    started_at_unix_s: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    hangs: list[Hang] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    has_own_step: bool = False
    loops: frozenset[str] = frozenset()
    unread: int = 0

    @property
    def passes(self) -> Iterator[Pass]:
        return (p for attempt in self.attempts for p in attempt.passes)


def add_to(history: History, run: RunPasses) -> None:
    """Count the run's passes, under the world size of each attempt."""
    for attempt in run.attempts:
        seen = set()
        for p in attempt.passes:
            statistics_of = history.of(SectionKey(p.section, attempt.world_size, run.configuration))
            statistics_of.observe(p.seconds, p.rank, p.step, run.name, p.is_first)
            seen.add(p.section)
        for section in seen:
            wall_s = attempt.whole_s if section == SETUP else attempt.observed_s
            history.of(SectionKey(section, attempt.world_size, run.configuration)).observe_wall(wall_s)
    history.note_run(run.name)


# -- reading -----------------------------------------------------------------------------------------------------------
def read_passes(name: str, journals: Iterable[Iterable[Mapping[str, Any]]]) -> RunPasses:
    """*journals*: the records of each node's journal, in the order they were written."""
    reader = _Reader()
    for records in journals:
        for record in records:
            reader.read(record)
    return reader.result(name)


@dataclass(slots=True)
class _Steps:
    """One ``steps`` record of one rank."""

    times_s: list[float]
    unread_steps: int
    newest: int | None
    sections: dict[str, list[float]]
    counts: dict[str, int]  # passes per section, those that are left out of the lists included


_Longest = tuple[float, int, int | None]  # seconds, rank, step


class _Rank:
    """Follows one rank through the records of one attempt."""

    def __init__(self) -> None:
        self.steps_seen = 0
        self.counts: dict[str, int] = {}
        # The newest pass of each section, by its place: the attempt may prove to have been stopped in it.
        self.held: dict[str, tuple[int, _Longest]] = {}
        self.unmatched: dict[str, list[float]] = {}
        self.record_at_s: float | None = None
        self.steps_from_s: float | None = None  # start of the newest span in which a step was done
        self.steps_s = 0.0
        self.inside_s = 0.0

    def is_loop(self, seconds: float, at_s: float) -> bool:
        """A pass that ended in the record of *at_s* began before a whole span with steps, and so contains some."""
        return self.steps_from_s is not None and at_s - seconds <= self.steps_from_s

    def note_record(self, at_s: float, steps: int) -> None:
        if steps and self.record_at_s is not None:
            self.steps_from_s = self.record_at_s
        self.record_at_s = at_s


@dataclass(slots=True)
class _AttemptNotes:
    started_s: float | None = None
    last_s: float = 0.0
    ranks: set[int] = field(default_factory=set)
    first_steps: dict[int, tuple[float, int]] = field(default_factory=dict)  # rank -> when, which
    newest_step: int | None = None
    stopped_s: float | None = None
    trigger: str = ""
    suspicion: Mapping[str, Any] | None = None
    state: dict[int, _Rank] = field(default_factory=dict)
    joined: dict[str, dict[int, _Longest]] = field(default_factory=dict)  # section -> place -> of the slowest rank


class _Reader:
    def __init__(self) -> None:
        self._attempts: dict[int, _AttemptNotes] = {}
        self._loops: set[str] = set()
        self._own_step = False
        self._own_sections = False
        self._unread = 0
        self._configuration = ""
        self._started_s: float | None = None

    def read(self, record: Mapping[str, Any]) -> None:
        try:
            attempt, at_s = int(record.get("attempt", 0)), float(record["at_unix_s"])
        except (KeyError, TypeError, ValueError):
            return
        notes = self._attempts.setdefault(attempt, _AttemptNotes())
        match record["type"]:
            case "run_started":
                self._started_s = min(self._started_s or at_s, at_s)
                self._configuration = str(record.get("configuration") or "")
            case "rank_started" if isinstance(record.get("rank"), int):
                notes.ranks.add(record["rank"])
                notes.started_s = min(notes.started_s or at_s, at_s)
            case "rank_first_step" if isinstance(record.get("rank"), int):
                step = record.get("step")
                notes.first_steps[record["rank"]] = (at_s, step if isinstance(step, int) else 0)
            case "steps" if isinstance(record.get("ranks"), Mapping):
                notes.last_s = max(notes.last_s, at_s)
                for rank, told in record["ranks"].items():
                    if str(rank).isdecimal() and isinstance(told, Mapping):
                        self._read_steps(attempt, notes, int(rank), told, at_s)
            case "suspicion" if isinstance(record.get("suspicion"), Mapping):
                notes.suspicion = record["suspicion"]
            case "stop" if notes.stopped_s is None or at_s < notes.stopped_s:
                notes.stopped_s, notes.trigger = at_s, str(record.get("trigger", ""))

    def _read_steps(self, attempt: int, notes: _AttemptNotes, rank: int, told: Mapping[str, Any], at_s: float) -> None:
        notes.ranks.add(rank)
        mine = notes.state.setdefault(rank, _Rank())
        steps = _steps_of(told)
        self._unread += int(_number(told.get("lost"))) + steps.unread_steps
        self._unread += sum(steps.counts[n] - len(d) for n, d in steps.sections.items())
        self._own_step = self._own_step or STEP in steps.sections
        self._own_sections = self._own_sections or bool(set(steps.sections) - _OPEN_BY_THEMSELVES)
        if steps.newest is not None:
            notes.newest_step = max(notes.newest_step or 0, steps.newest)
        for name, durations_s in steps.sections.items():
            if name == TEARDOWN or not durations_s:
                continue
            if name not in _KNOWN and mine.is_loop(max(durations_s), at_s):
                self._loops.add(name)
            at = mine.counts.get(name, 0) + steps.counts[name] - len(durations_s)
            mine.counts[name] = at + len(durations_s)
            joined = notes.joined.setdefault(name, {})
            if name in mine.held:
                _join(joined, *mine.held[name])
            for place, seconds in enumerate(durations_s[:-1], start=at):
                _join(joined, place, (seconds, rank, steps.newest))
            mine.held[name] = (at + len(durations_s) - 1, (durations_s[-1], rank, steps.newest))
        place = mine.steps_seen + steps.unread_steps
        mine.steps_seen = place + len(steps.times_s)
        taken_off_s, inside_s = _inside_s(mine, steps)
        joined = notes.joined.setdefault(OUT_OF_SECTION, {})
        first = None if steps.newest is None else steps.newest - len(steps.times_s) + 1
        for i, (whole_s, off_s) in enumerate(zip(steps.times_s, taken_off_s, strict=True)):
            step = None if first is None else first + i
            _join(joined, place + i, (max(0.0, whole_s - off_s), rank, step))
        mine.steps_s += sum(steps.times_s)
        mine.inside_s += sum(inside_s)
        mine.note_record(at_s, len(steps.times_s))

    def result(self, name: str) -> RunPasses:
        out = RunPasses(name, self._configuration, self._started_s or 0.0, unread=self._unread)
        out.loops, out.has_own_step = frozenset(self._loops), self._own_step
        for number, notes in sorted(self._attempts.items()):
            if notes.ranks:
                out.attempts.append(self._attempt(number, notes))
            if notes.trigger == "hang":
                out.hangs.append(self._hang(number, notes))
        out.restarts_s = [s for number in sorted(self._attempts) if (s := self._restart_s(number)) is not None]
        return out

    def _attempt(self, number: int, notes: _AttemptNotes) -> Attempt:
        for rank, state in notes.state.items():
            for name, held in state.held.items():
                was_whole = name == SETUP and rank in notes.first_steps  # the first step ends it
                if notes.stopped_s is None or was_whole:
                    _join(notes.joined[name], *held)
        passes = []
        for name in sorted(notes.joined.keys() - self._loops):
            for place, (seconds, rank, step) in sorted(notes.joined[name].items()):
                if name != OUT_OF_SECTION:
                    is_first = place == 0 and name != SETUP
                    passes.append(Pass(number, name, place, seconds, rank, step, is_first))
                    continue
                if not self._own_step:
                    passes.append(Pass(number, STEP, place, seconds, rank, step))
                if self._own_sections:
                    passes.append(Pass(number, name, place, seconds, rank, step))
        out = Attempt(number, len(notes.ranks), passes)
        first_s = min((at_s for at_s, _ in notes.first_steps.values()), default=notes.started_s or notes.last_s)
        out.observed_s = max(0.0, notes.last_s - first_s)
        out.whole_s = max(0.0, notes.last_s - (notes.started_s or first_s))
        longest = max(notes.state.values(), key=lambda r: r.steps_s, default=None)
        if longest is not None:
            out.steps_s, out.outside_s = longest.steps_s, longest.steps_s - longest.inside_s
        return out

    def _hang(self, number: int, notes: _AttemptNotes) -> Hang:
        suspicion = notes.suspicion or {}
        section = suspicion.get("section") or (OUT_OF_SECTION if self._own_step else STEP)
        rank = suspicion.get("rank")
        return Hang(number, str(section), rank if isinstance(rank, int) else None)

    def _restart_s(self, number: int) -> float | None:
        """What the fault of this attempt cost, or None: no fault ended it, or no later attempt took a step."""
        notes = self._attempts[number]
        later = [n for n in sorted(self._attempts) if n > number and self._attempts[n].first_steps]
        if notes.stopped_s is None or notes.trigger in PLANNED or notes.trigger == "signal" or not later:
            return None
        back = self._attempts[later[0]]
        seconds = max(at_s for at_s, _ in back.first_steps.values()) - notes.stopped_s
        times_s = [seconds for seconds, _, _ in notes.joined.get(OUT_OF_SECTION, {}).values()]
        if notes.newest_step is not None and times_s:
            first = min(step for _, step in back.first_steps.values())
            seconds += max(0, notes.newest_step - first + 1) * statistics.median(times_s)
        return max(0.0, seconds)


def _join(joined: dict[int, _Longest], place: int, told: _Longest) -> None:
    other = joined.get(place)
    if other is None or told[0] > other[0]:
        joined[place] = told


def _steps_of(told: Mapping[str, Any]) -> _Steps:
    times_s = _durations(told.get("step_times_s"))
    sections: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    found = told.get("sections")
    for name, section in found.items() if isinstance(found, Mapping) else ():
        if not isinstance(section, Mapping):
            continue
        durations_s = _durations(section.get("durations_s"))
        count, longest_s = int(_number(section.get("n"))), _number(section.get("max_s"))
        if count > len(durations_s) and longest_s > max(durations_s, default=0.0):
            durations_s.insert(0, longest_s)  # of those left out the longest is known
        sections[str(name)], counts[str(name)] = durations_s, max(count, len(durations_s))
    step = told.get("step")
    unread = max(0, int(_number(told.get("steps"))) - len(times_s))
    return _Steps(times_s, unread, step if isinstance(step, int) else None, sections, counts)


def _durations(values: Any) -> list[float]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        return []
    return [v if type(v) is float and 0.0 <= v < _ENDLESS else _number(v) for v in values]


def _number(value: Any) -> float:
    """At least 0; 0 for whatever is no finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < _ENDLESS else 0.0


# -- steps outside of sections -----------------------------------------------------------------------------------------
def _inside_s(rank: _Rank, steps: _Steps) -> tuple[list[float], list[float]]:
    """Of each step of the record the time in sections: what is safe to take off, and what it seems to be."""
    times_s = steps.times_s
    safe_s = [0.0] * len(times_s)
    all_s = [0.0] * len(times_s)
    left: dict[str, list[float]] = {}
    for name in {*steps.sections, *rank.unmatched} - {SETUP, TEARDOWN}:
        durations_s = steps.sections.get(name, [])
        comes_with_steps = len(durations_s) >= _LOOP_SHARE * len(times_s) > 0 and len(durations_s) > 1
        if comes_with_steps:
            found = _matched_in_order(times_s, durations_s)
        else:
            found, rest = _matched_by_fit(times_s, [*rank.unmatched.get(name, ()), *durations_s])
            # What ended in this record may belong to a step that ends in the next one, but not in one after that; what
            # ended together with the set-up was probably in it.
            left[name] = [s for s in rest if s in durations_s and SETUP not in steps.sections]
        if not comes_with_steps or name == STEP:
            safe_s = [max(pair) for pair in zip(safe_s, found, strict=True)]
        all_s = [max(pair) for pair in zip(all_s, found, strict=True)]
    rank.unmatched = left
    return safe_s, all_s


def _matched_in_order(times_s: Sequence[float], durations_s: Sequence[float]) -> list[float]:
    """A section that is passed in each step: of a step's own pass and its neighbours the longest that fits."""
    out = []
    shift = len(durations_s) - len(times_s)  # both end at the record's end, give or take one
    for i, time_s in enumerate(times_s):
        near = durations_s[max(0, i + shift - 1) : max(0, i + shift + 2)]
        out.append(max((d for d in near if d <= time_s), default=0.0))
    return out


def _matched_by_fit(times_s: Sequence[float], durations_s: Sequence[float]) -> tuple[list[float], list[float]]:
    """A section that is passed now and then: each pass is in the step that is as much longer than the others.

    Returns:
        The section's time in each step, and the passes that no step can hold.
    """
    out = [0.0] * len(times_s)
    left = []
    usual_s = statistics.median(times_s) if times_s else 0.0
    for seconds in sorted(durations_s, reverse=True):
        places = [i for i, t in enumerate(times_s) if t >= seconds and not out[i]]
        if places:
            out[min(places, key=lambda i: abs(times_s[i] - seconds - usual_s))] = seconds
        else:
            left.append(seconds)
    return out, left
