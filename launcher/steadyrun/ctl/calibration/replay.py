"""What limits would have done on passes that are known: the watchdog's arithmetic, pass by pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from steadyrun.core.sections import CHECKPOINTING, EVALUATION, SETUP, STEP
from steadyrun.detect.calibrate import OUT_OF_SECTION, SectionKey, SectionStatistics
from steadyrun.detect.calibrate.following import has_grown
from steadyrun.detect.calibrate.passes import RunPasses
from steadyrun.node.machine.events import Limits

__all__ = ["Rule", "fired", "fired_as_it_grew", "fired_in_force", "limit_s"]

Rule = Callable[[SectionStatistics], tuple[float, float]]  # (limit, limit of first passes)


def limit_s(limits: Limits, section: str, is_first: bool = False, is_warm_up: bool = False) -> float:
    """How long a pass may take before it counts as late, as ``node.machine.watchdog`` has it; ``inf``: for ever."""
    given = limits.sections
    if is_warm_up and section in limits.calibrated:
        return limits.step_s if section == STEP else limits.out_of_section_s
    if section == OUT_OF_SECTION:
        return _seconds(given.get(section, limits.out_of_section_s))
    known_s = _seconds(given[section]) if section in given else _known_s(limits, section)
    known_s = limits.default_section_s if known_s is None else known_s
    is_given = section in limits.first
    if (section == SETUP and not is_given) or (not is_first and section != SETUP):
        return known_s
    if is_given or section not in limits.accepted:
        return max(known_s, _seconds(limits.first.get(section, limits.first_step_s)))
    return known_s


def _known_s(limits: Limits, section: str) -> float | None:
    if section.lower() in EVALUATION:
        return limits.evaluation_s
    return {SETUP: limits.setup_s, STEP: limits.step_s, CHECKPOINTING: limits.checkpointing_s}.get(section)


def _seconds(value: float | None) -> float:
    return math.inf if value is None else value


def fired(runs: Iterable[RunPasses], limits: Limits) -> Counter[str]:
    """How many passes of each section would have been late: once per pass, however many ranks were in it."""
    out: Counter[str] = Counter()
    known: dict[tuple[str, bool, bool], float] = {}
    for run in runs:
        # Without a limit that was given, the time outside of sections is judged as part of the step.
        has_outside = run.has_own_step or OUT_OF_SECTION in limits.accepted
        for p in run.passes:
            kind = p.section, p.is_first, p.is_warm_up
            at_s = known.get(kind)
            if at_s is None:
                at_s = known[kind] = limit_s(limits, *kind)
            if p.seconds >= at_s and (has_outside or p.section != OUT_OF_SECTION):
                out[p.section] += 1
    return out


def fired_in_force(runs: Iterable[RunPasses]) -> tuple[Counter[str], Counter[str]]:
    """How many passes were beyond the soft, and the hard limits that the agent had calibrated by then.

    The alarms that it told of at the time (``RunPasses.alarms``) are these, and those of hangs.
    """
    soft: Counter[str] = Counter()
    hard: Counter[str] = Counter()
    for run in runs:
        for p in run.passes:
            match p.in_force.stage(p) if p.in_force is not None else "":
                case "hard":
                    soft[p.section] += p.section in (p.in_force.soft if p.in_force is not None else ())
                    hard[p.section] += 1
                case "soft":
                    soft[p.section] += 1
    return +soft, +hard


def fired_as_it_grew(runs: Iterable[RunPasses], rule: Rule) -> Counter[str]:
    """The same, had *rule* made the limits anew all along out of what had been seen before each pass."""
    out: Counter[str] = Counter()
    statistics: dict[str, SectionStatistics] = {}
    current: dict[str, tuple[float, float, tuple[float, float]]] = {}  # n and longest of when, and the limits
    for run in runs:
        rate = _seconds_per_pass(run)
        for p in run.passes:
            seen = statistics.get(p.section)
            if seen is None:
                seen = statistics[p.section] = SectionStatistics.empty(SectionKey(p.section, 0))
            n, longest_s = seen.n + seen.first.n, seen.durations.max_s
            known = current.get(p.section)
            if known is None or has_grown(n, longest_s, known[0], known[1]):
                known = current[p.section] = (n, longest_s if longest_s == longest_s else 0.0, rule(seen))
            if p.seconds >= known[2][1 if p.is_first else 0] and not p.is_warm_up:
                out[p.section] += 1
            seen.observe(p.seconds, p.rank, p.step, run.name, p.is_first, p.was_spared)
            seen.observe_wall(rate[p.section])
    return out


def _seconds_per_pass(run: RunPasses) -> Mapping[str, float]:
    """How much of the run one pass of each section stands for."""
    counts = Counter(p.section for p in run.passes)
    observed_s, whole_s = sum(a.observed_s for a in run.attempts), sum(a.whole_s for a in run.attempts)
    return {name: (whole_s if name == SETUP else observed_s) / count for name, count in counts.items()}
