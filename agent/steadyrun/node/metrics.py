"""One node's metrics: what its agent knows, in the form of the table, for whoever scrapes it.

The loop hands over what it has anyhow: the journal's records, views of the board, limits. Whatever costs anything
(process trees, GPUs) is read by the thread of the scrape, when there is one. Nothing is collected in the ranks.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from steadyrun.collectors.metrics.spec import Source
from steadyrun.collectors.metrics.values import Values
from steadyrun.collectors.process import ProcessReader
from steadyrun.core.board import SlotView
from steadyrun.core.sections import CHECKPOINTING, EVALUATION, STEP
from steadyrun.core.timing import StepTiming
from steadyrun.core.versions import installed_version
from steadyrun.node.goodput import StepSpan
from steadyrun.node.sampling import RingsRead
from steadyrun.node.tally import Tally

if TYPE_CHECKING:
    from steadyrun.collectors.metrics.exposition import Series

__all__ = ["NodeFacts", "NodeMetrics", "RankLook"]

KEPT_STEPS: Final = 32  # of a rank, for its medians
MOST_SECTIONS: Final = 12  # names that have a histogram of their own; each costs a dozen series
OTHER_SECTION: Final = "(other)"
USAGE_S: Final = 5.0  # process trees are not read more often
LAG_WINDOW_S: Final = 60.0
_LEADER_ONLY: Final = frozenset({Source.LEADER})
_RANK_GAUGES: Final = (
    "rank_info", "rank_alive", "rank_progress_timestamp_seconds", "rank_step", "rank_section_opened_timestamp_seconds",
    "rank_step_time_seconds", "rank_own_work_seconds", "rank_hung", "rank_resident_memory_bytes",
    "rank_uninterruptible_seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What does not change while an agent lives, or only with the membership."""

    run_id: str
    node: str
    version: str
    local_world_size: int
    group_rank: int | None = None
    nodes: int = 0
    world_size: int = 0

    @property
    def is_leader(self) -> bool:
        return self.group_rank == 0


@dataclass(frozen=True, slots=True)
class RankLook:
    """One rank of this node now. ``state``: the letter of /proc, empty where the process is gone."""

    rank: int
    local_rank: int
    pid: int
    state: str
    view: SlotView | None


@dataclass(slots=True)
class _RankRows:
    """A rank's newest steps, and what is to be charged to the next ones."""

    pid: int
    has_timings: bool = False
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    own_work_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    in_kernel_since_s: float | None = None
    marks_steps: bool = False  # the script has a section of its own around each step
    evaluation_s: float = 0.0  # passes of these sections that no step has been charged with yet
    saving_s: float = 0.0


class NodeMetrics:
    """Methods other than ``series`` are for the loop's thread; ``series`` for any.

    Args:
        unix_minus_mono_s: wall time minus CLOCK_MONOTONIC, asked when needed: the wall clock may be set.
        own_pids: of helpers of the agent whose CPU time counts as the agent's.
    """

    def __init__(
        self,
        facts: NodeFacts,
        begun_s: float,
        begun_unix_s: float,
        unix_minus_mono_s: Callable[[], float] = lambda: time.time() - time.monotonic(),
        clock: Callable[[], float] = time.monotonic,
        own_pids: Callable[[], Sequence[int]] = lambda: (),
        process: ProcessReader | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._scraping = threading.Lock()  # one at a time: two would read everything twice
        self.values = Values()
        self._tally = Tally(self.values, begun_s, begun_unix_s)
        self._facts = facts
        self._unix_minus_mono_s, self._clock = unix_minus_mono_s, clock
        self._own_pids = own_pids
        self._process = process or ProcessReader()
        self._looks: tuple[RankLook, ...] = ()
        self._rows: dict[int, _RankRows] = {}
        self._sections: set[str] = set()
        self._cpu_before_s: dict[int, float] = {}  # of ended incarnations, by rank
        self._cpu_seen: dict[int, tuple[int, float]] = {}  # pid, CPU time when it was last looked at
        self._usage_at_s = float("-inf")
        self._lags: deque[tuple[float, float]] = deque()
        self._gpus: Mapping[int, str] = {}
        self._more: list[Callable[[Values], None]] = []
        self._tell_versions()
        self._tell_facts()

    def also(self, fill: Callable[[Values], None]) -> None:
        """Ask *fill* at each scrape, too; it must be quick and must not raise."""
        self._more.append(fill)

    # -- from the loop -------------------------------------------------------------------------------------------------
    def read(self, record: Mapping[str, Any]) -> None:
        """A journal record, as it is written."""
        with self._lock:
            self._tally.read(record)

    def begin_attempt(self, facts: NodeFacts) -> None:
        """Ranks of an attempt are being started, with this membership."""
        with self._lock:
            self._facts = facts
            self._looks = ()
            self._tell_facts()

    def take_ranks(self, now_s: float, looks: Iterable[RankLook], read: Mapping[int, RingsRead]) -> None:
        """Fresh views of all ranks of this node, and what was read from their rings, by rank."""
        with self._lock:
            self._looks = tuple(looks)
            reference = min((k.rank for k in self._looks), default=None)
            for look in self._looks:
                rows = self._rows.get(look.rank)
                if rows is None or rows.pid != look.pid:
                    rows = self._rows[look.rank] = _RankRows(look.pid)
                if look.state != "D":
                    rows.in_kernel_since_s = None
                elif rows.in_kernel_since_s is None:
                    rows.in_kernel_since_s = now_s
                if look.view is not None:
                    self._count(look.view, rows, read.get(look.rank, RingsRead()), look.rank == reference)
                    hung_s = self._tally.hung.get(look.rank)
                    if hung_s is not None and (look.view.progress_s or 0.0) > hung_s:
                        del self._tally.hung[look.rank]
            self._tally.goodput.tick(now_s)

    def take_limits(self, told: Mapping[str, Any]) -> None:
        """Limits as the live state tells them."""
        hard = {**told["sections"]}
        for name, key in (("step", "step_s"), ("setup", "setup_s"), (CHECKPOINTING, "checkpointing_s")):
            hard.setdefault(name, told[key])
        hard.setdefault("out_of_section", told["out_of_section_s"])
        limits: dict[tuple[str, ...], float] = {(name, "hard"): float(s) for name, s in hard.items() if s is not None}
        limits |= {(name, "soft"): float(s) for name, s in told["soft"].items() if s is not None}
        proposed: dict[tuple[str, ...], float] = {
            (n,): float(c["hard_s"]) for n, c in told["calibrated"].items() if c["hard_s"] is not None
        }
        with self._lock:
            self.values.replace("section_limit_seconds", limits)
            self.values.replace("section_limit_proposed_seconds", proposed)
            for name, _ in limits:
                self.values.prepare("section_limits_passed_total", section=name)

    def take_budget(self, restarts_remaining: int) -> None:
        with self._lock:
            self.values.set("restarts_remaining", float(max(restarts_remaining, 0)))

    def take_dumps(self, stacks: Sequence[bool], flights: Sequence[bool]) -> None:
        """For each rank that was asked in an incident, whether it came."""
        with self._lock:
            for kind, came in (("stacks", stacks), ("flight", flights)):
                for ok in came:
                    self.values.add("dumps_total", 1, kind, "ok" if ok else "missing")

    def take_torch(self, name: str, value: float) -> None:
        """What torch's elastic package put under a name; any thread."""
        with self._lock:
            self.values.set("torchelastic_metric", value, name)

    def take_gpus(self, gpus: Mapping[int, str]) -> None:
        """Which GPU each rank uses, by rank."""
        with self._lock:
            self._gpus = dict(gpus)

    def take_lost_records(self, lost: int) -> None:
        with self._lock:
            self.values.raise_to("journal_records_lost_total", lost)

    def lagged(self, now_s: float, late_s: float) -> None:
        """The loop was so late in one pass. Cheap: called in each."""
        lags = self._lags
        with self._lock:
            while lags and (now_s - lags[0][0] > LAG_WINDOW_S):
                lags.popleft()
            while lags and lags[-1][1] <= late_s:
                lags.pop()  # what is older and smaller is never the largest again
            lags.append((now_s, late_s))

    def with_values(self, change: Callable[[Values], None]) -> None:
        """Run *change* under the lock."""
        with self._lock:
            change(self.values)

    # -- for a scrape --------------------------------------------------------------------------------------------------
    def series(self) -> list[Series]:
        """Everything as it is now, of this node; what only a leader exports is left out elsewhere."""
        with self._scraping:
            self._read_usage()
            now_s, unix_less_mono_s = self._clock(), self._unix_minus_mono_s()
            with self._lock:
                self._fill_ranks(now_s, unix_less_mono_s)
                self._fill_time(now_s)
                self.values.set("agent_loop_lag_seconds", max((late_s for _, late_s in self._lags), default=0.0))
                for fill in self._more:
                    fill(self.values)
                return list(self.values.copy(frozenset() if self._facts.is_leader else _LEADER_ONLY))

    def _read_usage(self) -> None:
        """Outside of the lock: it reads a hundred small files."""
        now_s = self._clock()
        if now_s - self._usage_at_s < USAGE_S:
            return
        self._usage_at_s = now_s
        looks = self._looks
        found = self._process.usage([k.pid for k in looks if k.state not in ("", "Z", "X")])
        own = self._process.usage(self._own_pids())
        times = os.times()
        with self._lock:
            self.values.raise_to(
                "agent_cpu_seconds_total", times.user + times.system + sum(u.cpu_s for u in own.values())
            )
            for look in looks:
                usage = found.get(look.pid)
                if usage is None:
                    continue
                pid, cpu_s = self._cpu_seen.get(look.rank, (look.pid, 0.0))
                if pid != look.pid:
                    self._cpu_before_s[look.rank] = self._cpu_before_s.get(look.rank, 0.0) + cpu_s
                self._cpu_seen[look.rank] = (look.pid, usage.cpu_s)
                rank = str(look.rank)
                self.values.raise_to(
                    "rank_cpu_seconds_total", self._cpu_before_s.get(look.rank, 0.0) + usage.cpu_s, rank
                )
                self.values.set("rank_resident_memory_bytes", usage.rss_bytes, rank)

    def _fill_ranks(self, now_s: float, unix_less_mono_s: float) -> None:
        values, memory = self.values, self.values.numbers["rank_resident_memory_bytes"]
        alive_memory = {(str(k.rank),): memory[str(k.rank),] for k in self._looks if (str(k.rank),) in memory}
        for name in _RANK_GAUGES:
            values.numbers[name].clear()
        for look in self._looks:
            rank, rows = str(look.rank), self._rows.get(look.rank)
            is_alive = look.state not in ("", "Z", "X")
            values.set("rank_info", 1, rank, str(look.local_rank), self._gpus.get(look.rank, ""))
            values.set("rank_alive", float(is_alive), rank)
            values.set("rank_hung", float(look.rank in self._tally.hung), rank)
            if is_alive and (rank,) in alive_memory:
                values.set("rank_resident_memory_bytes", alive_memory[rank,], rank)
            since_s = rows.in_kernel_since_s if rows is not None else None
            values.set("rank_uninterruptible_seconds", now_s - since_s if since_s is not None else 0.0, rank)
            if rows is not None and rows.step_times_s:
                values.set("rank_step_time_seconds", median(rows.step_times_s), rank)
            if rows is not None and rows.own_work_s:
                values.set("rank_own_work_seconds", median(rows.own_work_s), rank)
            view = look.view
            if view is None:
                continue
            if view.progress_s is not None:
                values.set("rank_progress_timestamp_seconds", view.progress_s + unix_less_mono_s, rank)
            if view.step is not None:
                values.set("rank_step", float(view.step), rank)
            main = [s for s in view.sections if s.lane == 0]
            if main and is_alive:
                at_s = main[-1].since_s + unix_less_mono_s
                values.set("rank_section_opened_timestamp_seconds", at_s, rank, self._section(main[-1].name))

    def _fill_time(self, now_s: float) -> None:
        goodput = self._tally.goodput
        goodput.tick(now_s)
        for phase, seconds in goodput.seconds.items():
            self.values.raise_to("time_seconds_total", seconds, phase)
        self.values.set("time_open_seconds", goodput.open_s(now_s))
        self.values.raise_to("job_wall_seconds_total", goodput.wall_s(now_s))
        self.values.set("goodput_ratio", goodput.ratio(now_s))
        self.values.raise_to("steps_lost_total", goodput.steps_lost)

    # -- the board -----------------------------------------------------------------------------------------------------
    def _count(self, view: SlotView, rows: _RankRows, read: RingsRead, is_reference: bool) -> None:
        for duration in read.sections:
            self.values.observe("section_duration_seconds", duration.duration_s, self._section(duration.name))
            rows.marks_steps |= duration.name == STEP
            if duration.name in EVALUATION:
                rows.evaluation_s += duration.duration_s
            elif duration.name == CHECKPOINTING:
                rows.saving_s += duration.duration_s
        rows.step_times_s.extend(read.step_times_s)
        if not rows.marks_steps:  # then times between steps stand for the section of that name, as for limits
            for time_s in read.step_times_s:
                self.values.observe("section_duration_seconds", time_s, self._section(STEP))
        rows.has_timings |= bool(read.timings)
        rows.own_work_s.extend(t.busy_s for t in read.timings if t.busy_s > 0)
        if is_reference:
            for span in _spans(read.timings, read.step_times_s, view, rows):
                self._tally.goodput.step(span)

    def _section(self, name: str) -> str:
        if name not in self._sections:
            if len(self._sections) >= MOST_SECTIONS:
                return OTHER_SECTION
            self._sections.add(name)
        return name

    # -- facts ---------------------------------------------------------------------------------------------------------
    def _tell_versions(self) -> None:
        versions = (self._facts.version, installed_version("torch"), platform.python_version())
        self.values.replace("build_info", {versions: 1.0})

    def _tell_facts(self) -> None:
        facts = self._facts
        group_rank = "" if facts.group_rank is None else str(facts.group_rank)
        self.values.replace("node_info", {(facts.node, group_rank): 1.0})
        self.values.replace("job_info", {(facts.run_id, str(facts.nodes), str(facts.local_world_size)): 1.0})
        self.values.set("job_world_size", float(facts.world_size))


def _spans(timings: Sequence[StepTiming], times_s: Sequence[float], view: SlotView, rows: _RankRows) -> list[StepSpan]:
    """Steps that have ended since the last look, from timings where the rank has them, else from their number."""
    evaluation_s, saving_s = rows.evaluation_s, rows.saving_s
    if timings:
        rows.evaluation_s = rows.saving_s = 0.0
        last = len(timings) - 1
        return [
            StepSpan(t.step, t.at_s, t.data_s, t.checkpoint_s, evaluation_s if i == last else 0.0, t.flags)
            for i, t in enumerate(timings)
        ]
    if rows.has_timings or not times_s or view.step is None or view.step_at_s is None:
        return []
    rows.evaluation_s = rows.saving_s = 0.0
    spans = []
    at_s = view.step_at_s
    for back, seconds in enumerate(reversed(times_s)):
        is_last = back == 0
        spans.append(
            StepSpan(view.step - back, at_s, 0.0, saving_s if is_last else 0.0, evaluation_s if is_last else 0.0)
        )
        at_s -= seconds
    return spans[::-1]
