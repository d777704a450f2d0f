"""When to save: at which steps, to which tiers, and for ``every="auto"`` at which intervals, with the reason in words.

Pure: events come in with their time, orders go out. One ``Schedule`` per job, kept over all attempts by the saver that
coordinates (by rank 0 where there is none). Saves that follow from the step number alone need no order: every rank sees
them by ``tiers_at``. For the others the coordinator names a step so far ahead that all ranks hear of it in time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from steadyrun.checkpoint.interval import (
    Costs,
    Formula,
    estimated_mtbf_s,
    interval_words,
    mtbf_words,
    overhead_at,
    prior_mtbf_s,
    recommend,
    young_interval_s,
)
from steadyrun.checkpoint.saves import CheckpointOptions, Every, SaveState, TierName

__all__ = ["Experience", "Figures", "Order", "Schedule", "snapshot_intervals_s", "tiers_at"]

_PERSIST_MARGIN: Final = 1.1  # an interval is at least this times the persist time
_CHANGE_RATIO: Final = 1.2  # an interval in use stays until the optimum is further away; within it costs under 2 %
_SAVES_KEPT: Final = 8  # the medians are over so many saves
_STEPS_KEPT: Final = 64

# Until saves were measured: the first ones come early, so that the figures come early.
_FIRST_MEMORY_S: Final = 10.0
_FIRST_DURABLE_S: Final = 60.0
_COPY_BYTES_PER_S: Final = 3e9
_WRITE_BYTES_PER_S: Final = 2e8
_LEAST_STALL_S: Final = 1e-3

# A job that hardly ever fails has an optimum of hours. Save more often than that as long as it costs next to nothing.
_LONGEST_MEMORY_S: Final = 300.0
_LONGEST_DURABLE_S: Final = 1800.0
_CHEAP_RATIO: Final = 1e-3

# DLRover restarts 75 % of faults from memory; believed as much as four failures of our own.
_PRIOR_SURVIVED: Final = 3.0
_PRIOR_FAILURES: Final = 4.0
_SHARE_LIMITS: Final = (0.05, 0.95)

_HEAR_S: Final = 0.2  # from an order until the last rank sees it
_LONGEST_HEAR_S: Final = 60.0
_IN_TIME_TO_NARROW: Final = 50  # orders in time before less margin is tried again
_RETRY_FAILED_S: Final = 30.0  # doubled with every further failure, up to the interval
_RETRY_SKIPPED_S: Final = 1.0
_MORE_STEPS: Final = 4  # than ranks need to hear of a save, before one that was demanded is given up
_DEMAND_S: Final = 2.0  # and so much for what is told between nodes


@dataclass(frozen=True, slots=True)
class Order:
    """All ranks shall save once *step* is done."""

    step: int
    tiers: frozenset[TierName]


@dataclass(frozen=True, slots=True)
class Experience:
    """What a job learned about failures; kept beside its checkpoints, so that the next run begins with it.

    Attributes:
        gpu_s: seconds of training times GPUs.
        failures: of the whole job.
        survived: those of them after which the snapshots in memory were still there.
    """

    gpu_s: float = 0.0
    failures: int = 0
    survived: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.gpu_s) and self.gpu_s >= 0 and 0 <= self.survived <= self.failures):
            raise ValueError(
                f"experience of {self.gpu_s:g} GPU-seconds, {self.failures} failures, {self.survived} survived: times "
                "and counts must be 0 or above, and no more can be survived than there were failures"
            )

    def to_json(self) -> dict[str, Any]:
        return {"gpu_s": self.gpu_s, "failures": self.failures, "survived": self.survived}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Experience:
        """Raises ValueError when *data* is no experience."""
        try:
            return cls(float(data["gpu_s"]), int(data["failures"]), int(data["survived"]))
        except (KeyError, TypeError) as e:
            raise ValueError(f"cannot read what earlier runs learned about failures: {type(e).__name__}: {e}") from e


@dataclass(frozen=True, slots=True)
class Figures:
    """What the intervals in use are made of; every field is a metric.

    Attributes:
        memory_interval_s, durable_interval_s: in use; None where steps decide.
        memory_optimum_s, durable_optimum_s: what the formulas give now, before bounds and without regard to 20 %.
        overhead_ratio: first-order share of the time that saves and redone work cost, at the intervals in use.
        memory_share: failures that memory survives.
        margin_steps: how many steps ahead a save is ordered.
        stall_saves, persist_saves: how many saves the medians are over; 0: an estimate from the size.
    """

    memory_interval_s: float | None
    durable_interval_s: float | None
    memory_optimum_s: float
    durable_optimum_s: float
    overhead_ratio: float
    stall_s: float
    stall_saves: int
    persist_s: float
    persist_saves: int
    slowdown_ratio: float
    mtbf_s: float
    memory_share: float
    step_s: float | None
    margin_steps: int


def tiers_at(options: CheckpointOptions, step: int) -> frozenset[TierName]:
    """The tiers that are due after *step* by its number alone; the same on every rank, without a word between them.

    A period of N means after every N steps: after steps N - 1, 2 N - 1, and so on, since the first step is 0. A remote
    tier is filled from the shared folder, so the folder is due with it.
    """
    every = options.every.steps
    main = _hits(every, step) or _hits(options.keep_every, step)
    tiers: set[TierName] = set()
    if main or _hits(options.every_remote, step):
        tiers.add(TierName.SHARED)
    if options.remote and (_hits(options.every_remote, step) or (main and options.every_remote is None)):
        tiers.add(TierName.REMOTE)
    if options.local and (_hits(options.every_local, step) or (main and options.every_local is None)):
        tiers.add(TierName.LOCAL)
    if tiers or _hits(options.every_memory, step):
        tiers |= _memory_tiers(options)
    return frozenset(tiers)


def snapshot_intervals_s(costs: Costs, memory_share: float, least_durable_s: float) -> tuple[float, float]:
    """Training time between two snapshots in memory, and between two of them that are also written.

    Each snapshot costs the stall; writing one costs nothing more than what steps lose meanwhile, so that the two tiers
    share their stalls (``two_tiers`` is for a durable save with a stall of its own). The overhead is ``d/m + s L/w +
    p m/2M + (1 - p) w/2M`` for m between snapshots and w >= m between written ones; where the optimum has w < m, every
    snapshot is written: ``m = w = sqrt(2 (d + s L) M)``.

    Args:
        memory_share: p, failures that the snapshots survive; above 0 and below 1.
        least_durable_s: bound of w; snapshots may then be the more frequent ones after all.
    """
    memory_s = young_interval_s(costs.stall_s, costs.mtbf_s / memory_share)
    writing_s = costs.whole_stall_s - costs.stall_s
    durable_s = young_interval_s(writing_s, costs.mtbf_s / (1.0 - memory_share)) if writing_s > 0 else 0.0
    both_s = young_interval_s(costs.whole_stall_s, costs.mtbf_s)
    if durable_s <= memory_s:
        if both_s >= least_durable_s:
            return both_s, both_s
        durable_s = least_durable_s
    durable_s = max(durable_s, least_durable_s)
    return min(memory_s, durable_s), durable_s


def _hits(period: int | None, step: int) -> bool:
    return period is not None and (step + 1) % period == 0


def _memory_tiers(options: CheckpointOptions) -> set[TierName]:
    if not options.slots:
        return set()
    return {TierName.MEMORY, TierName.PEER} if options.peer else {TierName.MEMORY}


class Schedule:
    """Decides when the ranks save. For one thread; every method may be called at any time, times never run backwards.

    Args:
        every: of the shared folder; "auto" uses Young/Daly.
        options: the other periods, and whether there is snapshot memory (*slots*).
        now_s: monotonic; training is taken to begin now.
        gpus: ranks of the job; failures are believed to come in proportion.
        state_bytes: of the largest rank's state; stall and persist time are guessed from it until they were measured.
        experience: of earlier runs.
    """

    def __init__(
        self,
        every: Every,
        options: CheckpointOptions,
        now_s: float,
        *,
        gpus: int = 1,
        state_bytes: int = 0,
        experience: Experience | None = None,
    ) -> None:
        self._every, self._options = every, options
        self._gpus, self._state_bytes = max(gpus, 1), state_bytes
        self._experience = experience or Experience()
        self._stalls_s: deque[float] = deque(maxlen=_SAVES_KEPT)
        self._persists_s: deque[float] = deque(maxlen=_SAVES_KEPT)
        self._quiet_steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._busy_steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._newest: int | None = None
        self._stepped_at_s = now_s
        self._memory_at_s = self._durable_at_s = now_s
        self._retry_at_s: float | None = None
        self._retry_s = _RETRY_FAILED_S
        self._skipped_until_s = now_s
        self._writing: set[int] = set()
        self._snapshots_while_writing = 0
        self._ordered: Order | None = None
        self._is_demanded = False
        self._hear_s, self._in_time = _HEAR_S, 0
        self._memory_s = self._durable_s = math.nan
        self._adapt()

    # -- what happens ------------------------------------------------------------------------------------------------
    def sized(self, state_bytes: int, gpus: int) -> None:
        """The layouts of an attempt are known."""
        self._state_bytes, self._gpus = state_bytes, max(gpus, 1)
        self._adapt()

    def attempt_started(self, now_s: float) -> None:
        """Ranks are new: no step is known, no order holds, and the time without training does not count."""
        pause_s = max(now_s - self._stepped_at_s, 0.0)
        self._durable_at_s += pause_s
        self._memory_at_s = self._stepped_at_s = now_s  # it begins from a checkpoint: nothing is lost yet
        self._newest, self._ordered, self._is_demanded = None, None, False

    def demand(self) -> None:
        """A restart is planned: order a save as soon as ranks can hear of it, whatever was saved last."""
        self._is_demanded = True

    def stepped(self, step: int, now_s: float) -> None:
        """The rank that is furthest has done *step*. Repeating the same step is fine."""
        if self._newest is not None and step > self._newest:
            passed_s = now_s - self._stepped_at_s
            steps = self._busy_steps_s if self._writing else self._quiet_steps_s
            steps.append(passed_s / (step - self._newest))
            self._learn(passed_s)
        if self._newest is None or step != self._newest:
            self._newest, self._stepped_at_s = step, now_s
        if self._ordered is not None and step > self._ordered.step + self.margin_steps:
            self.late(self._ordered.step)  # nobody told that it was taken

    def late(self, step: int) -> None:
        """A rank had passed *step* before it heard that it should save there: leave more time from now on."""
        if self._ordered is not None and self._ordered.step == step:
            self._ordered = None
        self._hear_s, self._in_time = min(self._hear_s * 2.0, _LONGEST_HEAR_S), 0

    def began(self, step: int, tiers: Collection[TierName], now_s: float) -> None:
        """All ranks have taken part in the save of *step* (ordered or not): it is whole in memory, or being written."""
        if self._ordered is not None and self._ordered.step == step:
            self._ordered = None
            self._in_time += 1
            if self._in_time >= _IN_TIME_TO_NARROW:
                self._hear_s, self._in_time = max(self._hear_s / 2.0, _HEAR_S), 0
        self._memory_at_s, self._is_demanded = now_s, False
        if TierName.SHARED in tiers:
            self._durable_at_s, self._retry_at_s = now_s, None
            self._writing.add(step)
            self._snapshots_while_writing = 0
        elif self._writing:
            self._snapshots_while_writing += 1

    def stalled(self, stall_s: float) -> None:
        """A save has held up training for so long, on the slowest rank."""
        self._stalls_s.append(max(stall_s, _LEAST_STALL_S))
        self._adapt()

    def ended(self, step: int, state: SaveState, now_s: float, persist_s: float | None = None) -> None:
        """A save is durable, has failed or was skipped.

        Args:
            persist_s: for a durable one, from the end of the stall.
        """
        was_ordered = self._ordered is not None and self._ordered.step == step
        if was_ordered:
            self._ordered = None
        was_writing = step in self._writing
        self._writing.discard(step)
        if state is SaveState.DURABLE:
            self._retry_s = _RETRY_FAILED_S
            if persist_s is not None:
                self._persists_s.append(max(persist_s, 0.0))
                self._adapt()
        elif state is SaveState.FAILED and (was_writing or was_ordered):
            self._retry_at_s = now_s + min(self._retry_s, self._durable_s)
            self._retry_s = min(self._retry_s * 2.0, max(self._durable_s, _RETRY_FAILED_S))
        elif state is SaveState.SKIPPED:
            self._skipped_until_s = now_s + _RETRY_SKIPPED_S
            if was_writing:
                self._retry_at_s = now_s + _RETRY_SKIPPED_S

    def failed(self, memory_survived: bool) -> None:
        """A fault ended the attempt; *memory_survived*: the snapshots of all ranks were still there."""
        e = self._experience
        self._experience = Experience(e.gpu_s, e.failures + 1, e.survived + memory_survived)
        self._adapt()

    @property
    def durable_interval_s(self) -> float | None:
        """Time between two durable saves that is aimed at; None where none is."""
        return self._durable_s if math.isfinite(self._durable_s) else None

    # -- decisions ---------------------------------------------------------------------------------------------------
    def due(self, step: int, now_s: float) -> frozenset[TierName]:
        """The tiers due after *step*, for somebody who need not ask anybody: by its number, or by the clock."""
        return tiers_at(self._options, step) | self._due_by_time(now_s)

    def order(self, now_s: float) -> Order | None:
        """A save that all ranks have to be told of now; then None until it began, ended or came late.

        The step is as many steps ahead as the ranks need to hear of it, and the order is given that much before the
        save is due.
        """
        step_s = self.step_s
        if self._ordered is not None or self._newest is None or step_s is None:
            return None
        margin = self.margin_steps
        tiers = self._demanded_tiers() if self._is_demanded else self._due_by_time(now_s + margin * step_s)
        if not tiers:
            return None
        step = self._newest + margin
        self._ordered = Order(step, tiers | tiers_at(self._options, step))
        return self._ordered

    def next_step(self, step: int) -> int:
        """The step after *step* at which a save is due, for ranks that can agree on it only while they save.

        By time: as many steps further as take one durable interval; 16 until a step was timed.
        """
        periods = [p for p in (self._every.steps, self._options.keep_every) if p is not None]
        ahead = [step + p - (step + 1) % p for p in periods]
        if self._every.steps is None:
            step_s = self.step_s
            ahead.append(step + (16 if step_s is None else max(1, round(self._durable_s / max(step_s, 1e-6)))))
        return min(ahead)

    def _due_by_time(self, at_s: float) -> frozenset[TierName]:
        if self._every.steps is not None or at_s < self._skipped_until_s:
            return frozenset()
        durable_s = self._durable_s
        memory_s = self._memory_s
        if self._every.is_auto:
            if not self._persists_s:
                durable_s = max(min(durable_s, _FIRST_DURABLE_S), _PERSIST_MARGIN * self.persist_s)
            if not self._stalls_s:
                memory_s = min(memory_s, _FIRST_MEMORY_S)
        durable_at_s = self._durable_at_s + durable_s if self._retry_at_s is None else self._retry_at_s
        options = self._options
        if at_s >= durable_at_s and not self._writing:
            return self._durable_tiers()
        has_memory_tier = self._every.is_auto and options.slots > 0 and options.every_memory is None
        if has_memory_tier and self._has_room and at_s >= self._memory_at_s + memory_s:
            return frozenset(_memory_tiers(options))
        return frozenset()

    def _demanded_tiers(self) -> frozenset[TierName]:
        if not self._writing:
            return self._durable_tiers()
        return frozenset(_memory_tiers(self._options) if self._has_room else ())

    def _durable_tiers(self) -> frozenset[TierName]:
        options = self._options
        tiers = {TierName.SHARED} | _memory_tiers(options)
        if options.local and options.every_local is None:
            tiers.add(TierName.LOCAL)
        if options.remote and options.every_remote is None:
            tiers.add(TierName.REMOTE)
        return frozenset(tiers)

    @property
    def _has_room(self) -> bool:
        """While a snapshot is written, it keeps its slot, and the newest one keeps the other."""
        return not self._writing or self._snapshots_while_writing < self._options.slots - 1

    # -- figures -----------------------------------------------------------------------------------------------------
    @property
    def step_s(self) -> float | None:
        """Seconds per step; None until one was timed."""
        steps = [*self._quiet_steps_s, *self._busy_steps_s]
        return statistics.median(steps) if steps else None

    @property
    def demand_limit_s(self) -> float:
        """How long a save that was demanded may be waited for: the steps until it, a few more, and its stall."""
        return (self.margin_steps + _MORE_STEPS) * (self.step_s or 0.0) + 2 * self.stall_s + _DEMAND_S

    @property
    def margin_steps(self) -> int:
        """How many steps ahead of the fastest rank a save is ordered."""
        step_s = self.step_s
        return 2 if step_s is None else max(2, math.ceil(self._hear_s / max(step_s, 1e-6)) + 1)

    @property
    def stall_s(self) -> float:
        if self._stalls_s:
            return statistics.median(self._stalls_s)
        rate = _COPY_BYTES_PER_S if self._options.slots else _WRITE_BYTES_PER_S
        return max(self._state_bytes / rate, _LEAST_STALL_S)

    @property
    def persist_s(self) -> float:
        if self._persists_s:
            return statistics.median(self._persists_s)
        return self._state_bytes / _WRITE_BYTES_PER_S if self._options.slots else 0.0

    @property
    def slowdown_ratio(self) -> float:
        """How much longer steps take while a save is written; 0 until enough of both kinds were timed."""
        if min(len(self._busy_steps_s), len(self._quiet_steps_s)) < _SAVES_KEPT:
            return 0.0
        ratio = statistics.median(self._busy_steps_s) / max(statistics.median(self._quiet_steps_s), 1e-9) - 1.0
        return min(max(ratio, 0.0), 1.0)

    @property
    def mtbf_s(self) -> float:
        """Of the whole job: what was seen, and the prior, which weighs as much as one failure."""
        e = self._experience
        return estimated_mtbf_s(e.gpu_s / self._gpus, e.failures, prior_mtbf_s(self._gpus))

    @property
    def memory_share(self) -> float:
        e = self._experience
        share = (_PRIOR_SURVIVED + e.survived) / (_PRIOR_FAILURES + e.failures)
        return min(max(share, _SHARE_LIMITS[0]), _SHARE_LIMITS[1])

    def experience(self) -> Experience:
        return self._experience

    def figures(self) -> Figures:
        memory_optimum_s, durable_optimum_s = self._optima_s()
        by_steps = self._every.steps is not None
        has_memory_tier = not by_steps and bool(self._options.slots) and self._options.every_memory is None
        return Figures(
            memory_interval_s=self._memory_s if has_memory_tier else None,
            durable_interval_s=None if by_steps else self._durable_s,
            memory_optimum_s=memory_optimum_s,
            durable_optimum_s=durable_optimum_s,
            overhead_ratio=self._overhead_ratio(),
            stall_s=self.stall_s,
            stall_saves=len(self._stalls_s),
            persist_s=self.persist_s,
            persist_saves=len(self._persists_s),
            slowdown_ratio=self.slowdown_ratio,
            mtbf_s=self.mtbf_s,
            memory_share=self.memory_share,
            step_s=self.step_s,
            margin_steps=self.margin_steps,
        )

    def reasoning(self) -> str:
        """One sentence: how often, and from which figures that follows."""
        f = self.figures()
        if self._every.steps is not None:
            told = f"saving every {self._every.steps:,} steps, as the script asks"
            return f"{told}; {self._optimum_words(f)}"
        if self._every.seconds is not None:
            told = f"saving every {interval_words(self._every.seconds)}, as the script asks"
            if self._durable_s > self._every.seconds:
                told = f"saving every {interval_words(self._durable_s)}, since a save takes {f.persist_s:.3g} s to be"
                told += f" durable and {interval_words(self._every.seconds)} was asked for"
            return f"{told}; {self._optimum_words(f)}"
        told = f"saving durably every {interval_words(self._durable_s)}"
        if f.memory_interval_s is not None and f.memory_interval_s < self._durable_s:
            told += f" and to memory every {interval_words(f.memory_interval_s)}"
        if self._durable_s <= _PERSIST_MARGIN * f.persist_s * 1.000001:
            told += ", which is the time a save takes to be durable, with a margin"
        elif self._durable_s < f.durable_optimum_s / _CHANGE_RATIO:
            told += f" (the optimum is {interval_words(f.durable_optimum_s)}; more often costs next to nothing)"
        return f"{told}: {self._basis_words(f)}"

    # -- intervals ---------------------------------------------------------------------------------------------------
    def _learn(self, passed_s: float) -> None:
        e = self._experience
        self._experience = Experience(e.gpu_s + passed_s * self._gpus, e.failures, e.survived)

    def _costs(self) -> Costs:
        return Costs(
            stall_s=self.stall_s,
            mtbf_s=self.mtbf_s,
            persist_s=self.persist_s,
            slowdown_ratio=self.slowdown_ratio,
        )

    def _optima_s(self, least_durable_s: float = 0.0) -> tuple[float, float]:
        """Of snapshots in memory and of durable saves; equal where there are no snapshots apart."""
        costs = self._costs()
        if self._options.slots:
            return snapshot_intervals_s(costs, self.memory_share, least_durable_s)
        best = recommend(costs)
        optimum_s = best.young_s if best.formula is Formula.YOUNG else best.daly_s
        return optimum_s, max(optimum_s, least_durable_s)

    def _adapt(self) -> None:
        """New figures: move the intervals if they are far enough from the optimum, and always out of the bound."""
        least_s = _PERSIST_MARGIN * self.persist_s
        if self._every.steps is not None:
            self._memory_s = self._durable_s = math.inf
            return
        if self._every.seconds is not None:
            self._memory_s = self._durable_s = max(self._every.seconds, least_s)
            return
        memory_s, durable_s = self._optima_s(least_s)
        costs = self._costs()
        durable_s = max(min(durable_s, max(_LONGEST_DURABLE_S, costs.whole_stall_s / _CHEAP_RATIO)), least_s)
        memory_s = min(memory_s, max(_LONGEST_MEMORY_S, costs.stall_s / _CHEAP_RATIO), durable_s)
        self._durable_s = max(_moved(self._durable_s, durable_s), least_s)
        self._memory_s = min(_moved(self._memory_s, memory_s), self._durable_s)

    def _overhead_ratio(self) -> float:
        """At the intervals in use; by steps, at what the steps take."""
        costs, durable_s = self._costs(), self._durable_s
        if self._every.steps is not None:
            step_s = self.step_s
            if step_s is None:
                return 0.0
            durable_s = self._every.steps * step_s
        durable_s = max(durable_s, costs.persist_s, _LEAST_STALL_S)
        if not self._options.slots or not self._every.is_auto or self._memory_s >= durable_s:
            return min(overhead_at(costs, durable_s).total_ratio, 1.0)
        p, memory_s = self.memory_share, self._memory_s
        redone_s = p * memory_s / 2.0 + (1.0 - p) * (durable_s / 2.0 + costs.persist_s)
        saving = costs.stall_s * (1.0 / memory_s - 1.0 / durable_s) + costs.whole_stall_s / durable_s
        return min(saving + redone_s / costs.mtbf_s, 1.0)

    def _basis_words(self, f: Figures) -> str:
        seen = self._experience
        stall = f"{f.stall_s:.3g} s of stall"
        stall += f" (median of {f.stall_saves} saves)" if f.stall_saves else " (guessed from the size)"
        persist = f"{f.persist_s:.3g} s until durable" + ("" if f.persist_saves or not f.persist_s else " (guessed)")
        slower = f", steps {100 * f.slowdown_ratio:.0f} % slower meanwhile" if f.slowdown_ratio >= 0.005 else ""
        failures = f"{seen.failures} failure{'s' * (seen.failures != 1)} in {seen.gpu_s / 3600:,.0f} GPU-hours"
        return (
            f"{stall}, {persist}{slower}, MTBF {mtbf_words(f.mtbf_s)} for {self._gpus:,} GPUs ({failures}, and a prior "
            f"of 50,000 GPU-hours), {100 * f.memory_share:.0f} % of failures leave memory whole; "
            f"overhead {100 * f.overhead_ratio:.2f} %"
        )

    def _optimum_words(self, f: Figures) -> str:
        return f"the optimum is {interval_words(f.durable_optimum_s)} for {self._basis_words(f)}"


def _moved(in_use_s: float, optimum_s: float) -> float:
    """The interval to use next: as before while the optimum is near."""
    near = math.isfinite(in_use_s) and optimum_s / _CHANGE_RATIO <= in_use_s <= optimum_s * _CHANGE_RATIO
    return in_use_s if near else optimum_s
