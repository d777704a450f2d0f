"""What each rule for a section's limit loses a day, on simulated durations whose truth is known.

A limit T loses ``hangs_per_day * T`` by waiting for hangs and ``passes_per_day * P(longer than T) * restart_s`` by
restarting healthy jobs. *oracle* is the fixed limit that loses least, found with the true distribution; *oracle with
evidence* the best pair of a soft and a hard limit. Every rule sees the same n durations of a job and sets its limit.

steadyrun is what ``steadyrun.detect.calibrate`` ships, fed pass by pass. Its soft limit only looks: the evidence shows
nine of ten real hangs, takes one of fifty healthy passes for one, and costs half a second of training each time (ten
times what steadyrun reckons with); the hard limit acts on the rest. *steadyrun, without evidence* has a hard limit
alone, set for that; *knows of no sections* keeps the cap of 1800 s for the first 1,000 passes, which suits the steps of
a job that marks none.

Sections: steps with 3 % noise, 1 % of them 30 % longer, one in 500 with a stall (Pareto, 2.5), one in 5,000 four to ten
times as long (recompilation). *heavy storage* adds stalls of infinite variance in one of 300. *heartbeat only* is a job
that marks no sections, so that checkpoints (every 200 steps) and evaluations (every 1,000) are inside its steps.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import add_common_arguments, effort_of, finish, print_table

from steadyrun.detect.calibrate import Costs, SectionKey, SectionStatistics, limits_of
from steadyrun.detect.calibrate.rule import MIN_UNMARKED_EVENTS

DAY_S = 86400.0
Durations = NDArray[np.float64]


# -- jobs --------------------------------------------------------------------------------------------------------------
NOISE, PAUSE, PAUSE_ONE_OF = 0.03, 1.3, 100
STALL, STALL_SHAPE, STALL_ONE_OF = 0.3, 2.5, 500  # in steps
RECOMPILED, RECOMPILED_ONE_OF = (4.0, 10.0), 5000
STORAGE, STORAGE_SHAPE, STORAGE_ONE_OF = 1.0, 1.5, 300
CHECKPOINT, CHECKPOINT_EVERY = (math.log(5.0), 0.3), 200
EVALUATION, EVALUATION_EVERY = (math.log(30.0), 0.2), 1000


@dataclass(frozen=True, slots=True)
class Job:
    """Where durations come from. ``is_sectioned``: the promises hold for those."""

    name: str
    step_s: float
    has_heavy_storage: bool = False
    is_sectioned: bool = True

    def durations(self, random: np.random.Generator, n: int) -> Durations:
        """*n* passes one after the other."""

        def in_one_of(passes: int) -> NDArray[np.bool_]:
            return random.random(n) < 1 / passes

        out = np.exp(random.normal(0.0, NOISE, n))
        out = np.where(in_one_of(PAUSE_ONE_OF), PAUSE * out, out)
        out = np.where(in_one_of(STALL_ONE_OF), out + STALL * random.pareto(STALL_SHAPE, n), out)
        out = np.where(in_one_of(RECOMPILED_ONE_OF), out * random.uniform(*RECOMPILED, n), out)
        if self.has_heavy_storage:
            out = np.where(in_one_of(STORAGE_ONE_OF), out + STORAGE * random.pareto(STORAGE_SHAPE, n), out)
        if not self.is_sectioned:
            number = np.arange(n) + random.integers(0, EVALUATION_EVERY)
            out = np.where((number + 1) % CHECKPOINT_EVERY == 0, out + random.lognormal(*CHECKPOINT, n), out)
            out = np.where((number + 1) % EVALUATION_EVERY == 0, out + random.lognormal(*EVALUATION, n), out)
        return self.step_s * out

    def tail(self) -> Tail:
        """The share of passes that are longer, by the formula of what ``durations`` draws."""
        at = np.geomspace(0.8, 1e6, 3000)
        plain = normal_quantiles(300)
        base = np.concatenate([np.exp(NOISE * plain), PAUSE * np.exp(NOISE * plain)])
        weights = np.concatenate([np.full(300, 1 - 1 / PAUSE_ONE_OF), np.full(300, 1 / PAUSE_ONE_OF)]) / 300
        low, high = RECOMPILED
        factors = np.concatenate([[1.0], low + (high - low) * (np.arange(60) + 0.5) / 60])
        shares = np.concatenate([[1 - 1 / RECOMPILED_ONE_OF], np.full(60, 1 / RECOMPILED_ONE_OF / 60)])
        above = np.zeros_like(at)
        for factor, share in zip(factors, shares, strict=True):
            beyond = at[:, None] / factor - base
            stalled = 1 / STALL_ONE_OF * lomax(np.maximum(beyond, 0.0), STALL_SHAPE, STALL)
            above += share * (np.where(beyond < 0, 1.0, stalled) @ weights)
        steps = Tail(at, above)
        if self.has_heavy_storage:
            middle, probability = np.sqrt(at[1:] * at[:-1]), above[:-1] - above[1:]
            beyond = at[:, None] - middle
            slow = np.where(beyond < 0, 1.0, lomax(np.maximum(beyond, 0.0), STORAGE_SHAPE, STORAGE)) @ probability
            slow += 1.0 - probability.sum()
            above = (1 - 1 / STORAGE_ONE_OF) * above + slow / STORAGE_ONE_OF
        if not self.is_sectioned:
            saves = np.exp(CHECKPOINT[0] + CHECKPOINT[1] * normal_quantiles(60))
            evaluations = np.exp(EVALUATION[0] + EVALUATION[1] * normal_quantiles(60))
            both = (saves[:, None] + evaluations).ravel()
            with_save = sum(steps.above(at - added) for added in saves) / saves.size
            with_both = sum(steps.above(at - added) for added in both) / both.size
            one, two = 1 / CHECKPOINT_EVERY, 1 / EVALUATION_EVERY
            above = (1 - one) * above + (one - two) * with_save + two * with_both
        return Tail(at * self.step_s, above)


class Tail:
    """P(longer than t), between points by powers of t."""

    def __init__(self, at_s: Durations, above: Durations) -> None:
        self._at, self._above = np.log(at_s), np.log(above)
        self._start_s = float(at_s[0])
        self.mean_s = self._start_s + float(np.sum(np.diff(at_s) * (above[1:] + above[:-1]) / 2))

    def above(self, limit_s: Any) -> Any:
        """Share of passes longer than *limit_s*; 1 before the first point."""
        log = np.log(np.maximum(limit_s, self._start_s))
        return np.where(limit_s < self._start_s, 1.0, np.exp(np.interp(log, self._at, self._above)))


def normal_quantiles(count: int) -> Durations:
    """*count* values that stand for a normal distribution, each with the same probability."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])


def lomax(beyond: Durations, shape: float, scale: float) -> Durations:
    """P(numpy's pareto(shape) * scale > beyond)."""
    return np.asarray((1.0 + beyond / scale) ** -shape)


JOBS = (
    Job("10 s steps", 10.0),
    Job("10 s steps, heavy storage", 10.0, has_heavy_storage=True),
    Job("0.5 s steps", 0.5),
    Job("60 s steps", 60.0),
    Job("10 s steps, heartbeat only", 10.0, is_sectioned=False),
)


# -- what limits lose --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class World:
    """The truth that a limit meets.

    ``sensitivity``: share of real hangs that evidence shows; ``error``: of healthy passes that it takes for one.
    """

    restart_s: float = 600.0
    hangs_per_day: float = 1.0
    sensitivity: float = 0.9
    error: float = 0.02
    evidence_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Chosen:
    """A rule's limits; one with no evidence has no soft one."""

    hard_s: float
    soft_s: float | None = None


class Truth:
    """A job's distribution, known exactly: a sample of millions would not hold what happens once a week."""

    def __init__(self, job: Job, world: World) -> None:
        self.world = world
        self._tail = job.tail()
        self.passes_per_day = DAY_S / self._tail.mean_s
        self._candidates = np.geomspace(1.2 * job.step_s, 3000 * max(job.step_s, 1.0), 600)

    def share_above(self, limit_s: Any) -> Any:
        return self._tail.above(limit_s)

    def needless(self, chosen: Chosen) -> float:
        """Healthy passes in 100,000 that end in a restart."""
        hard = float(self.share_above(chosen.hard_s))
        if chosen.soft_s is None:
            return 1e5 * hard
        soft = float(self.share_above(chosen.soft_s))
        return 1e5 * (self.world.error * soft + (1.0 - self.world.error) * hard)

    def lost_s(self, chosen: Chosen) -> float:
        """Seconds a day."""
        w = self.world
        restarts = self.passes_per_day * self.needless(chosen) / 1e5 * w.restart_s
        if chosen.soft_s is None:
            return w.hangs_per_day * chosen.hard_s + restarts
        waiting = w.hangs_per_day * (w.sensitivity * chosen.soft_s + (1.0 - w.sensitivity) * chosen.hard_s)
        looks = self.passes_per_day * float(self.share_above(chosen.soft_s)) * w.evidence_s
        return waiting + restarts + looks

    def oracle(self) -> Chosen:
        """The fixed limit that loses least."""
        at = self._candidates
        lost = self.world.hangs_per_day * at + self.passes_per_day * self.share_above(at) * self.world.restart_s
        return Chosen(float(at[int(lost.argmin())]))

    def oracle_with_evidence(self) -> Chosen:
        """The pair that loses least; its two parts do not depend on each other."""
        w, at = self.world, self._candidates
        above = self.passes_per_day * self.share_above(at)
        hard = (1.0 - w.sensitivity) * w.hangs_per_day * at + above * (1.0 - w.error) * w.restart_s
        soft = w.sensitivity * w.hangs_per_day * at + above * (w.error * w.restart_s + w.evidence_s)
        return Chosen(float(at[int(hard.argmin())]), float(at[min(int(soft.argmin()), int(hard.argmin()))]))


# -- rules -------------------------------------------------------------------------------------------------------------
Rule = Callable[[Durations], Chosen]


def fixed(limit_s: float) -> Rule:
    return lambda _: Chosen(limit_s)


def times_longest(factor: float) -> Rule:
    """NVIDIA resiliency extension: safety factor times the longest seen."""
    return lambda d: Chosen(factor * float(d.max()))


def times_quantile(share: float, factor: float) -> Rule:
    return lambda d: Chosen(factor * float(np.quantile(d, share)))


def smoothed(d: Durations) -> Chosen:
    """TCP's retransmission timer (Jacobson): smoothed mean and four smoothed deviations."""
    mean, deviation = float(d[0]), float(d[0]) / 2
    for value in d[1:]:
        deviation += (abs(mean - float(value)) - deviation) / 4
        mean += (float(value) - mean) / 8
    return Chosen(mean + 4 * deviation)


def accrual(phi: float) -> Rule:
    """Akka's failure detector: a normal distribution of the last 1,000, its deviation at least a tenth of the mean."""
    z = NormalDist().inv_cdf(1.0 - 10.0**-phi)

    def rule(d: Durations) -> Chosen:
        mean = float(d[-1000:].mean())
        return Chosen(mean + z * max(float(d[-1000:].std()), 0.1 * mean))

    return rule


def exponential_accrual(phi: float) -> Rule:
    """Cassandra's: an exponential distribution."""
    return lambda d: Chosen(float(d[-1000:].mean()) * phi * math.log(10))


def expected_arrival(margins: float) -> Rule:
    """Chen, Toueg and Aguilera: the expected arrival and a margin, here in means."""
    return lambda d: Chosen((1.0 + margins) * float(d[-1000:].mean()))


def generalized_pareto(probability: float) -> Rule:
    """Peaks over the 95 % quantile, fitted by probability-weighted moments, read at *probability*."""

    def rule(d: Durations) -> Chosen:
        ordered = np.sort(d)
        if ordered.size < 30:
            return Chosen(5 * float(ordered[-1]))
        count = max(10, round(0.05 * ordered.size))
        threshold = float(ordered[-count - 1])
        excess = ordered[-count:] - threshold
        mean = float(excess.mean())
        weighted = float((excess * (1.0 - np.arange(count) / (count - 1))).mean())
        spread = mean - 2 * weighted
        shape = min(max(2.0 - mean / spread, -0.2), 0.9) if abs(spread) > 1e-12 else 0.0
        scale = 2 * mean * weighted / spread if abs(spread) > 1e-12 else mean
        rare = probability * ordered.size / count
        step = (rare**-shape - 1.0) / shape if abs(shape) > 1e-3 else -math.log(rare)
        return Chosen(threshold + scale * step)

    return rule


def shipped(costs: Costs, has_evidence: bool = True) -> Rule:
    """What an agent of steadyrun does with the same durations."""

    def rule(d: Durations) -> Chosen:
        statistics = SectionStatistics.empty(SectionKey("step", 8))
        for seconds in d.tolist():
            statistics.observe(seconds)
        limit = limits_of(statistics, costs)
        return Chosen(limit.hard_s, limit.soft_s if has_evidence else None)

    return rule


OURS = "steadyrun"
OURS_HARD = "steadyrun, without evidence"
OURS_UNMARKED = "steadyrun, knows of no sections"
PEERS: dict[str, Rule] = {
    "600 s (NCCL's default)": fixed(600.0),
    "1800 s (gloo's default)": fixed(1800.0),
    "300 s (DLRover)": fixed(300.0),
    "5 x longest (NVRx)": times_longest(5.0),
    "2 x longest": times_longest(2.0),
    "mean + 4 deviations (Jacobson)": smoothed,
    "phi accrual 8 (Akka)": accrual(8.0),
    "phi accrual 12": accrual(12.0),
    "phi accrual 8, exponential": exponential_accrual(8.0),
    "3 x mean (Chen)": expected_arrival(2.0),
    "3 x 99 % quantile": times_quantile(0.99, 3.0),
    "5 x 99.9 % quantile": times_quantile(0.999, 5.0),
    "generalized Pareto, 1e-6": generalized_pareto(1e-6),
    "20 x median": lambda d: Chosen(20.0 * float(np.median(d))),
}


# -- tables ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Cell:
    """A rule on one job after n passes: medians of its limits, means of what they cost, over all repetitions."""

    soft_s: float | None
    hard_s: float
    needless: float
    lost_s: float
    lost_s_90: float

    def text(self) -> str:
        limit = f"{self.hard_s:.3g}" if self.soft_s is None else f"{self.soft_s:.3g}/{self.hard_s:.3g}"
        return f"{limit} -> {self.lost_s:,.0f}"


def cell_of(truth: Truth, chosen: Sequence[Chosen]) -> Cell:
    lost = [truth.lost_s(c) for c in chosen]
    soft = [c.soft_s for c in chosen if c.soft_s is not None]
    return Cell(
        float(np.median(soft)) if soft else None,
        float(np.median([c.hard_s for c in chosen])),
        float(np.mean([truth.needless(c) for c in chosen])),
        float(np.mean(lost)),
        float(np.quantile(lost, 0.9)),
    )


def samples(job: Job, n: int, repetitions: int, seed: int) -> list[Durations]:
    return [job.durations(np.random.default_rng([seed, r]), n) for r in range(repetitions)]


def compare(job: Job, truth: Truth, counts: Sequence[int], repetitions: int, seed: int) -> dict[str, list[Cell]]:
    """Every rule's row on one job."""
    rules = {**PEERS, OURS_HARD: shipped(Costs(evidence_sensitivity=0.0), has_evidence=False), OURS: shipped(Costs())}
    if not job.is_sectioned:
        rules[OURS_UNMARKED] = shipped(Costs(min_events=MIN_UNMARKED_EVENTS))
    out: dict[str, list[Cell]] = {name: [] for name in rules}
    for n in counts:
        drawn = samples(job, n, repetitions, seed)
        for name, rule in rules.items():
            out[name].append(cell_of(truth, [rule(d) for d in drawn]))
    return out


def print_job(job: Job, truth: Truth, counts: Sequence[int], rows: dict[str, list[Cell]]) -> None:
    best, pair = truth.oracle(), truth.oracle_with_evidence()
    print(
        f"\n{job.name}: {truth.passes_per_day:,.0f} passes a day; oracle {best.hard_s:.3g} s -> "
        f"{truth.lost_s(best):.0f}, "
        f"with evidence {pair.soft_s:.3g}/{pair.hard_s:.3g} s -> {truth.lost_s(pair):.0f} lost s/day"
    )
    print_table(
        ["limit s -> lost s/day, after n passes", *(f"n = {n}" for n in counts)],
        [[name, *(c.text() for c in cells)] for name, cells in rows.items()],
    )


@dataclass(frozen=True, slots=True)
class Promise:
    """Ours at n = 100 on a job with sections."""

    job: str
    lost_s: float
    oracle_s: float
    best_peer: str
    best_peer_s: float

    @property
    def holds(self) -> bool:
        return self.lost_s <= 2.0 * self.oracle_s and self.lost_s < self.best_peer_s


def promise_of(job: Job, truth: Truth, rows: dict[str, list[Cell]], index: int) -> Promise:
    best = min(PEERS, key=lambda name: rows[name][index].lost_s)
    return Promise(job.name, rows[OURS][index].lost_s, truth.lost_s(truth.oracle()), best, rows[best][index].lost_s)


def print_promises(promises: Sequence[Promise]) -> None:
    print("\nn = 100, sections marked: at most twice the oracle's loss, and less than every other rule's")
    print_table(
        ["", "lost s/day", "oracle", "ratio", "best other rule", "its loss", ""],
        [
            [
                p.job,
                f"{p.lost_s:.1f}",
                f"{p.oracle_s:.1f}",
                f"{p.lost_s / p.oracle_s:.2f}",
                p.best_peer,
                f"{p.best_peer_s:.1f}",
                "holds" if p.holds else "MISSED",
            ]
            for p in promises
        ],
    )


# -- wrong assumptions -------------------------------------------------------------------------------------------------
WORLDS: dict[str, World] = {
    "as assumed": World(),
    "a restart costs 30 s, not 600": World(restart_s=30.0),
    "a restart costs 2,400 s": World(restart_s=2400.0),
    "a hang in ten days": World(hangs_per_day=0.1),
    "ten hangs a day": World(hangs_per_day=10.0),
    "evidence shows half of the hangs": World(sensitivity=0.5),
    "evidence shows none": World(sensitivity=0.0),
    "evidence errs in a tenth": World(error=0.1),
}


def mistaken(job: Job, truth: Truth, drawn: Sequence[Durations]) -> dict[str, tuple[float, float]]:
    """By what is not as assumed: (ours with the defaults, ours told the truth) by the oracle of that world."""
    assumed = [shipped(Costs())(d) for d in drawn]
    out: dict[str, tuple[float, float]] = {}
    for name, world in WORLDS.items():
        truth.world = world
        told = Costs(
            restart_s=world.restart_s,
            hangs_per_day=world.hangs_per_day,
            evidence_error=world.error,
            evidence_sensitivity=min(world.sensitivity, Costs().evidence_sensitivity),
            evidence_s=world.evidence_s,
        )
        oracle_s = truth.lost_s(truth.oracle())
        informed = [shipped(told)(d) for d in drawn]
        out[name] = (cell_of(truth, assumed).lost_s / oracle_s, cell_of(truth, informed).lost_s / oracle_s)
    truth.world = World()
    return out


def print_mistaken(jobs: Sequence[Job], found: Sequence[dict[str, tuple[float, float]]]) -> None:
    print("\nloss by the oracle's at n = 100 where the defaults are wrong -> where the truth is told")
    rows = [[name, *(f"{f[name][0]:.2f} -> {f[name][1]:.2f}" for f in found)] for name in WORLDS]
    print_table(["", *(j.name for j in jobs)], rows)


# -- a stall that was left alone --------------------------------------------------------------------------------------
STALLED_STEPS = 20.0


def after_a_stall(job: Job, truth: Truth, drawn: Sequence[Durations]) -> dict[str, Cell]:
    """Ours before a stall out of the blue, after it, and after one in which a look at the ranks has spared them."""

    def limits(passes: Durations, stalls: int, was_spared: bool) -> Chosen:
        statistics = SectionStatistics.empty(SectionKey("step", 8))
        for seconds in passes.tolist():
            statistics.observe(seconds)
        for _ in range(stalls):
            statistics.observe(STALLED_STEPS * job.step_s, was_spared=was_spared)
        limit = limits_of(statistics, Costs())
        return Chosen(limit.hard_s, limit.soft_s)

    cases = {
        "before": (0, False),
        "one": (1, False),
        "four": (4, False),
        "one, spared": (1, True),
        "four, spared": (4, True),
    }
    return {name: cell_of(truth, [limits(d, *case) for d in drawn]) for name, case in cases.items()}


def print_after_a_stall(jobs: Sequence[Job], found: Sequence[dict[str, Cell]]) -> None:
    print(f"\nlimits s -> lost s/day at n = 100 and stalls of {STALLED_STEPS:.0f} steps that never come again")
    print_table(["stalls", *(j.name for j in jobs)], [[name, *(f[name].text() for f in found)] for name in found[0]])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--seed", type=int, default=1, help="of the jobs' durations (default: 1)")
    parser.add_argument("--passes", type=int, nargs="+", default=[16, 100, 1000], metavar="N", help="seen by a rule")
    arguments = parser.parse_args()
    repetitions = effort_of(arguments, 30, 100, 400)
    counts = sorted({*arguments.passes, 100})
    results: list[dict[str, Any]] = []
    promises: list[Promise] = []
    wrong: list[dict[str, tuple[float, float]]] = []
    stalled: list[dict[str, Cell]] = []
    sectioned = [j for j in JOBS if j.is_sectioned]
    for job in JOBS:
        truth = Truth(job, World())
        rows = compare(job, truth, counts, repetitions, arguments.seed)
        print_job(job, truth, counts, rows)
        values = {name: [asdict(c) for c in cells] for name, cells in rows.items()}
        results.append({"job": job.name, "n": counts, "oracle_s": truth.lost_s(truth.oracle()), "rules": values})
        if job.is_sectioned:
            promises.append(promise_of(job, truth, rows, counts.index(100)))
            drawn = samples(job, 100, repetitions, arguments.seed)
            wrong.append(mistaken(job, truth, drawn))
            stalled.append(after_a_stall(job, truth, drawn))
    print_mistaken(sectioned, wrong)
    print_after_a_stall(sectioned, stalled)
    print_promises(promises)
    after = {j.name: {n: asdict(c) for n, c in f.items()} for j, f in zip(sectioned, stalled, strict=True)}
    finish(
        arguments,
        "timeouts",
        {"jobs": results, "after_a_stall": after, "repetitions": repetitions, "seed": arguments.seed},
    )
    return 0 if all(p.holds for p in promises) else 1


if __name__ == "__main__":
    sys.exit(main())
