"""What the journals of a run say of its sections: every pass of the job, its hangs, and what restarts took.

A *pass* is one pass of a section by the job: the longest of the ranks' durations, joined by their order in an attempt.
The section ``step`` is the script's own where it opens one; else it is the time between two steps outside of sections,
which is what the watchdog limits then. ``out_of_section`` is that time for scripts that open sections of their own.

The journal says neither which step a section was in, nor in which thread. So a pass that comes now and then (a save, an
evaluation) is sought in the step that fits it best; of what comes with each step only ``step`` itself is taken off, as
the rest may be another thread's. Sections may be nested, so only the longest in a step counts. Where this is wrong, the
time outside, and with it the limit, is rather too long.

Of very many passes a record lists the newest, of the others the longest with their places, and the sum of the rest. The
rest is not counted: what is expected of long passes follows from these and from the time they came in.

Left out is the last pass of each section in an attempt that was stopped, as the stop may have cut or a hang drawn it.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from steadyrun.core.classes import PLANNED
from steadyrun.core.sections import CHECKPOINTING, EVALUATION, OUT_OF_SECTION, SETUP, STEP, TEARDOWN, WARM_UP_STEPS
from steadyrun.detect.calibrate.statistics import History, SectionKey

__all__ = ["Alarms", "Attempt", "Hang", "Pass", "PassReader", "RunPasses", "add_to", "read_passes"]

_OPEN_BY_THEMSELVES: Final = frozenset({SETUP, TEARDOWN, CHECKPOINTING})
_KNOWN: Final = frozenset({SETUP, STEP, CHECKPOINTING}) | EVALUATION
_ENDLESS: Final = float("inf")
_PENDING: Final = 256  # places of a section that wait for a rank which may never come there
_REMEMBERED: Final = 64
_LOOKS: Final = 64  # at ranks that were left alone, which are remembered
_CLOCK_S: Final = 1.0  # by which what two threads wrote at the same time may be apart
_LOOP_SHARE: Final = 0.5  # passes per step from which on a section counts as part of each step


@dataclass(frozen=True, slots=True)
class InForce:
    """Calibrated limits that an agent went by, s, by section."""

    soft: Mapping[str, float]
    hard: Mapping[str, float]
    first: Mapping[str, float]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> InForce:
        """From a ``limits`` record."""
        return cls(*(_limits(record.get(part)) for part in ("soft", "hard", "first")))

    def stage(self, p: Pass) -> str:
        """``hard`` or ``soft``, whichever limit the pass was beyond at last; else empty.

        A pass in which limits became longer was beyond the soft one all the same when a look has spared it.
        """
        if p.is_warm_up:
            return ""
        if p.seconds >= (self.first if p.is_first else self.hard).get(p.section, _ENDLESS):
            return "hard"
        soft_s = 0.0 if p.was_spared else self.soft.get(p.section, _ENDLESS)
        return "soft" if not p.is_first and p.section in self.soft and p.seconds >= soft_s else ""


@dataclass(slots=True)
class Alarms:
    """How often calibrated limits passed, as the agent told at the time, by section; once per pass.

    Attributes:
        soft: the ranks were looked at.
        hard: time alone acted.
        in_hangs: of both, those that a stop for a hang followed.
    """

    soft: Counter[str] = field(default_factory=Counter)
    hard: Counter[str] = field(default_factory=Counter)
    in_hangs: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a section by the job.

    Attributes:
        rank, step: of the slowest.
        is_first: after a start.
        is_gap: the time between two steps, outside of sections.
        in_force: the limits that the agent went by then, or None where it had calibrated none.
        was_spared: the ranks were looked at because of its soft limit, and nothing showed a hang.
    """

    attempt: int
    section: str
    index: int
    seconds: float
    rank: int
    step: int | None = None
    is_first: bool = False
    is_gap: bool = False
    in_force: InForce | None = None
    was_spared: bool = False

    @property
    def is_warm_up(self) -> bool:
        """So soon after a start that calibrated limits are not applied to it."""
        return self.is_gap and self.index < WARM_UP_STEPS


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
        unread: durations the journal does not have, as more were made than it takes; summed: that it has as a sum only.
        alarms: that the agents told of while it ran.
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
    summed: int = 0
    alarms: Alarms = field(default_factory=Alarms)

    @property
    def passes(self) -> Iterator[Pass]:
        return (p for attempt in self.attempts for p in attempt.passes)


def add_to(history: History, run: RunPasses) -> None:
    """Count the run's passes, under the world size of each attempt."""
    for attempt in run.attempts:
        seen = set()
        for p in attempt.passes:
            statistics_of = history.of(SectionKey(p.section, attempt.world_size, run.configuration))
            statistics_of.observe(p.seconds, p.rank, p.step, run.name, p.is_first, p.was_spared)
            seen.add(p.section)
        for section in seen:
            wall_s = attempt.whole_s if section == SETUP else attempt.observed_s
            history.of(SectionKey(section, attempt.world_size, run.configuration)).observe_wall(wall_s)
    history.note_run(run.name)


# -- reading -----------------------------------------------------------------------------------------------------------
def read_passes(name: str, journals: Iterable[Iterable[Mapping[str, Any]]]) -> RunPasses:
    """*journals*: the records of each node's journal, in the order they were written."""
    reader = PassReader()
    for records in journals:
        for record in records:
            reader.read(record)
    return reader.result(name)


@dataclass(slots=True)
class _Told:
    """Durations of one kind in a record. A place is the number of those in the record that came before.

    Attributes:
        n: how many there were.
        front: the longest of those that are not listed: (place, seconds).
        listed_s: the newest, in order.
        unread, summed: how many are neither, of which the record has nothing or the sum.
    """

    n: int
    front: list[tuple[int, float]]
    listed_s: list[float]
    unread: int
    summed: int

    @classmethod
    def of(cls, told: Mapping[str, Any], count: str, listed: str) -> _Told:
        listed_s = _durations(told.get(listed))
        n = max(int(_number(told.get(count))), len(listed_s))
        front: list[tuple[int, float]] = []
        first = n - len(listed_s)
        if "longest" in told:
            front = _places(told["longest"], first)
        elif first and (longest_s := _number(told.get("max_s"))) > max(listed_s, default=0.0):
            front = [(first - 1, longest_s)]  # written before there were places: of the others the longest is known
        left = first - len(front)
        return cls(n, front, listed_s, *((0, left) if "left_out_s" in told else (left, 0)))

    @property
    def places(self) -> list[int]:
        """Of ``durations_s``."""
        return [place for place, _ in self.front] + list(range(self.n - len(self.listed_s), self.n))

    @property
    def durations_s(self) -> list[float]:
        """All that are known, in order."""
        return [s for _, s in self.front] + self.listed_s


@dataclass(slots=True)
class _Steps:
    """One ``steps`` record of one rank."""

    times: _Told
    newest: int | None
    sections: dict[str, _Told]


_Longest = tuple[float, int, int | None, InForce | None, bool]  # seconds, rank, step, ..., was spared


@dataclass(frozen=True, slots=True)
class _Look:
    """Ranks were looked at in a pass, and left alone. ``section``: ``out_of_section`` between steps."""

    section: str
    since_s: float
    after_s: float

    @classmethod
    def of(cls, record: Mapping[str, Any], at_s: float) -> _Look | None:
        """From an ``alarm`` record; *at_s* is its time on the wall clock."""
        suspicion = record.get("suspicion")
        if record.get("stage") != "spared" or not isinstance(suspicion, Mapping):
            return None
        after_s = max(0.0, _number(record.get("at_s")) - _number(suspicion.get("since_s")))
        return cls(str(suspicion.get("section") or OUT_OF_SECTION), at_s - after_s, after_s)

    def was_in(self, section: str, seconds: float, ended_after_s: float) -> bool:
        """Whether that was a pass of *section* which took *seconds* and ended after *ended_after_s*, or one like it."""
        is_recent = self.since_s >= ended_after_s - seconds - _CLOCK_S
        return section == self.section and seconds >= self.after_s and is_recent


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
    stalled_s: float = _ENDLESS  # when the rank that was stopped for had last shown progress
    trigger: str = ""
    suspicion: Mapping[str, Any] | None = None
    state: dict[int, _Rank] = field(default_factory=dict)
    joined: dict[str, dict[int, _Longest]] = field(default_factory=dict)  # section -> place -> of the slowest rank
    taken: dict[str, int] = field(default_factory=dict)  # section -> the first place that has not been taken
    usual_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # taken times between steps
    is_closed: bool = False

    def newest(self, name: str) -> int:
        """The last place of a section that every rank which passes it has reached, where it may still be the last."""
        if name == OUT_OF_SECTION:
            return min((s.steps_seen for s in self.state.values() if s.steps_seen), default=0)
        return min((s.held[name][0] for s in self.state.values() if name in s.held), default=0)

    def close(self) -> None:
        """No further record comes: the newest passes are whole, unless the attempt was stopped in them."""
        if self.is_closed:
            return
        self.is_closed = True
        for rank, state in self.state.items():
            for name, held in state.held.items():
                was_whole = name == SETUP and rank in self.first_steps  # the first step ends it
                if self.stopped_s is None or was_whole:
                    _join(self.joined[name], *held)


class PassReader:
    """Follows the records of a run's journals, those of a node in the order in which they were written.

    Either everything is asked for at the end, with ``result``; or, while the run goes on, what has become certain
    since the last time, with ``take``, which keeps next to nothing.
    """

    def __init__(self) -> None:
        self._attempts: dict[int, _AttemptNotes] = {}
        self._loops: set[str] = set()
        self._own_step = False
        self._own_sections = False
        self._unread = self._summed = 0
        self._configuration = ""
        self._started_s: float | None = None
        self._alarms: list[tuple[str, int, str, str, float]] = []  # node, attempt, stage, key, when
        self._in_force: dict[str, InForce] = {}  # by node
        self._looks: dict[str, deque[_Look]] = {}  # by node
        self._restarts_told: set[int] = set()

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
                        self._read_steps(notes, int(rank), told, at_s, str(record.get("node")))
            case "limits":
                self._in_force[str(record.get("node"))] = InForce.of(record)
            case "alarm":
                node, stage, key = (str(record.get(name)) for name in ("node", "stage", "key"))
                look = _Look.of(record, at_s)
                if look is None:
                    self._alarms.append((node, attempt, stage, key, at_s))
                else:
                    self._looks.setdefault(node, deque(maxlen=_LOOKS)).append(look)
            case "suspicion" if isinstance(record.get("suspicion"), Mapping):
                notes.suspicion = record["suspicion"]
            case "stop" if notes.stopped_s is None or at_s < notes.stopped_s:
                notes.stopped_s, notes.trigger = at_s, str(record.get("trigger", ""))
                notes.stalled_s = at_s - _number(record.get("delay_s"))

    def _read_steps(self, notes: _AttemptNotes, rank: int, told: Mapping[str, Any], at_s: float, node: str) -> None:
        notes.ranks.add(rank)
        mine = notes.state.setdefault(rank, _Rank())
        in_force = self._in_force.get(node)
        looks = self._looks.get(node, ()) if in_force is not None else ()
        since_s = mine.record_at_s or 0.0

        def seen(name: str, seconds: float, step: int | None) -> _Longest:
            was_looked_at = bool(looks) and any(k.was_in(name, seconds, since_s) for k in looks)
            return seconds, rank, step, in_force, was_looked_at

        steps = _steps_of(told)
        kinds = [steps.times, *steps.sections.values()]
        self._unread += int(_number(told.get("lost"))) + sum(t.unread for t in kinds)
        self._summed += sum(t.summed for t in kinds)
        self._own_step = self._own_step or STEP in steps.sections
        self._own_sections = self._own_sections or bool(set(steps.sections) - _OPEN_BY_THEMSELVES)
        if steps.newest is not None:
            notes.newest_step = max(notes.newest_step or 0, steps.newest)
        for name, section in steps.sections.items():
            durations_s = section.durations_s
            if name == TEARDOWN or not durations_s:
                continue
            if name not in _KNOWN and mine.is_loop(max(durations_s), at_s):
                self._loops.add(name)
            before = mine.counts.get(name, 0)
            mine.counts[name] = before + section.n
            joined = notes.joined.setdefault(name, {})
            if name in mine.held:
                _join(joined, *mine.held[name])
            for place, seconds in zip(section.places[:-1], durations_s, strict=False):
                other = joined.get(before + place)
                if other is None or seconds > other[0]:
                    joined[before + place] = seen(name, seconds, steps.newest)
            mine.held[name] = before + section.places[-1], seen(name, durations_s[-1], steps.newest)
        before = mine.steps_seen
        mine.steps_seen = before + steps.times.n
        taken_off_s, inside_s = _inside_s(mine, steps)
        joined = notes.joined.setdefault(OUT_OF_SECTION, {})
        times_s = steps.times.durations_s
        first = None if steps.newest is None else steps.newest - steps.times.n + 1
        for place, whole_s, off_s in zip(steps.times.places, times_s, taken_off_s, strict=True):
            seconds = whole_s - off_s if whole_s > off_s else 0.0
            other = joined.get(before + place)
            if other is None or seconds > other[0]:
                step = None if first is None else first + place
                joined[before + place] = seen(OUT_OF_SECTION, seconds, step)
        mine.steps_s += sum(times_s)
        mine.inside_s += sum(inside_s)
        mine.note_record(at_s, len(times_s))

    @property
    def has_own_step(self) -> bool:
        """The script opens sections named ``step``."""
        return self._own_step

    @property
    def has_own_sections(self) -> bool:
        return self._own_sections

    @property
    def loops(self) -> frozenset[str]:
        """Sections that contain steps."""
        return frozenset(self._loops)

    def take(self, is_over: bool = False) -> list[Pass]:
        """The passes that no rank can make longer any more, each once. *is_over*: all, as no record follows.

        A rank that passes a section no more does not hold it up for ever.
        """
        out: list[Pass] = []
        reached = [n for n, notes in self._attempts.items() if notes.state]
        for number, notes in sorted(self._attempts.items()):
            if is_over or (reached and number < max(reached)):
                notes.close()
            for name in sorted(notes.joined.keys() - self._loops):
                joined = notes.joined[name]
                until = notes.newest(name)
                due = [p for p in joined if notes.is_closed or p < until]
                due += sorted(joined.keys() - set(due))[: max(0, len(joined) - len(due) - _PENDING)]
                for place in sorted(due):
                    told = joined.pop(place)
                    if place >= notes.taken.get(name, 0):
                        notes.taken[name] = place + 1
                        out += self._passes(number, name, place, told)
                        if name == OUT_OF_SECTION:
                            notes.usual_s.append(told[0])
        return out

    def take_restart_s(self) -> list[float]:
        """What each restart cost whose ranks have taken a step since the last call."""
        out = []
        for number in sorted(self._attempts):
            if number not in self._restarts_told and (seconds := self._restart_s(number)) is not None:
                self._restarts_told.add(number)
                out.append(seconds)
        return out

    def _passes(self, number: int, name: str, place: int, told: _Longest) -> list[Pass]:
        seconds, rank, step, in_force, was_spared = told
        if name != OUT_OF_SECTION:
            is_first = place == 0 and name != SETUP
            return [Pass(number, name, place, seconds, rank, step, is_first, False, in_force, was_spared)]
        names = [] if self._own_step else [STEP]
        names += [OUT_OF_SECTION] if self._own_sections else []
        return [Pass(number, n, place, seconds, rank, step, False, True, in_force, was_spared) for n in names]

    def result(self, name: str) -> RunPasses:
        out = RunPasses(name, self._configuration, self._started_s or 0.0, unread=self._unread, summed=self._summed)
        out.loops, out.has_own_step = frozenset(self._loops), self._own_step
        for number, notes in sorted(self._attempts.items()):
            if notes.ranks:
                out.attempts.append(self._attempt(number, notes))
            if notes.trigger == "hang":
                out.hangs.append(self._hang(number, notes))
        out.alarms = self._alarms_told()
        out.restarts_s = [s for number in sorted(self._attempts) if (s := self._restart_s(number)) is not None]
        return out

    def _alarms_told(self) -> Alarms:
        """Each node tells of a pass for itself: the one that told most counts."""
        by_node: dict[str, Alarms] = {}
        for node, attempt, stage, key, at_s in self._alarms:
            if stage not in ("soft", "hard"):
                continue
            mine = by_node.setdefault(node, Alarms())
            (mine.soft if stage == "soft" else mine.hard)[key] += 1
            notes = self._attempts[attempt]
            if notes.stopped_s is not None and notes.stalled_s <= at_s and notes.trigger not in PLANNED:
                mine.in_hangs[key] += 1
        out = Alarms()
        for mine in by_node.values():
            out.soft, out.hard, out.in_hangs = out.soft | mine.soft, out.hard | mine.hard, out.in_hangs | mine.in_hangs
        return out

    def _attempt(self, number: int, notes: _AttemptNotes) -> Attempt:
        notes.close()
        passes = []
        for name in sorted(notes.joined.keys() - self._loops):
            for place, told in sorted(notes.joined[name].items()):
                passes += self._passes(number, name, place, told)
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
        times_s = [*notes.usual_s, *(told[0] for told in notes.joined.get(OUT_OF_SECTION, {}).values())]
        if notes.newest_step is not None and times_s:
            first = min(step for _, step in back.first_steps.values())
            seconds += max(0, notes.newest_step - first + 1) * statistics.median(times_s)
        return max(0.0, seconds)


def _limits(value: Any) -> dict[str, float]:
    items = value.items() if isinstance(value, Mapping) else ()
    return {str(k): float(v) for k, v in items if isinstance(v, int | float) and not isinstance(v, bool)}


def _join(joined: dict[int, _Longest], place: int, told: _Longest) -> None:
    other = joined.get(place)
    if other is None or told[0] > other[0]:
        joined[place] = told


def _steps_of(told: Mapping[str, Any]) -> _Steps:
    found = told.get("sections")
    sections = {
        str(name): _Told.of(section, "n", "durations_s")
        for name, section in (found.items() if isinstance(found, Mapping) else ())
        if isinstance(section, Mapping)
    }
    step = told.get("step")
    return _Steps(_Told.of(told, "steps", "step_times_s"), step if isinstance(step, int) else None, sections)


def _places(values: Any, below: int) -> list[tuple[int, float]]:
    """In order, each place once; what is none is passed over."""
    out: dict[int, float] = {}
    for pair in values if isinstance(values, Sequence) and not isinstance(values, str) else ():
        if isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[0], int) and 0 <= pair[0] < below:
            out[pair[0]] = _number(pair[1])
    return sorted(out.items())


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
    times_s = steps.times.durations_s
    front, listed_s = len(steps.times.front), steps.times.listed_s
    usual_s = statistics.median(listed_s or times_s or [0.0])
    safe_s = [0.0] * len(times_s)
    all_s = [0.0] * len(times_s)
    left: dict[str, list[float]] = {}
    for name in {*steps.sections, *rank.unmatched} - {SETUP, TEARDOWN}:
        section = steps.sections.get(name)
        durations_s = [] if section is None else section.durations_s
        comes_with_steps = section is not None and section.n >= _LOOP_SHARE * steps.times.n > 0 and section.n > 1
        if section is not None and comes_with_steps:
            found, _ = _matched_by_fit(times_s[:front], [s for _, s in section.front], usual_s)
            found += _matched_in_order(listed_s, section.listed_s)
        else:
            found, rest = _matched_by_fit(times_s, [*rank.unmatched.get(name, ()), *durations_s], usual_s)
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
    padded_s = [0.0] * max(0, 1 - shift) + [*durations_s[max(0, shift - 1) :], 0.0, 0.0]
    for time_s, before_s, own_s, after_s in zip(times_s, padded_s, padded_s[1:], padded_s[2:], strict=False):
        best_s = own_s if own_s <= time_s else 0.0
        if best_s < before_s <= time_s:
            best_s = before_s
        if best_s < after_s <= time_s:
            best_s = after_s
        out.append(best_s)
    return out + [0.0] * (len(times_s) - len(out))


def _matched_by_fit(
    times_s: Sequence[float], durations_s: Sequence[float], usual_s: float
) -> tuple[list[float], list[float]]:
    """A section that is passed now and then: each pass is in the step that is as much longer than the others.

    Returns:
        The section's time in each step, and the passes that no step can hold.
    """
    out = [0.0] * len(times_s)
    left = []
    order = sorted(range(len(times_s)), key=times_s.__getitem__)
    free_s = [times_s[i] for i in order]  # of the steps that hold no pass yet, like order
    for seconds in sorted(durations_s, reverse=True):
        above = bisect_left(free_s, seconds + usual_s)
        near = [above] if above < len(free_s) else []
        if above > 0 and free_s[above - 1] >= seconds:
            near.append(bisect_left(free_s, free_s[above - 1]))
        if near:
            best = min(near, key=lambda k: (abs(free_s[k] - seconds - usual_s), order[k]))
            out[order.pop(best)] = seconds
            del free_s[best]
        else:
            left.append(seconds)
    return out, left
