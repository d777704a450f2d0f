"""Which phase is slow must not depend on one step in which the machine did something else."""

from __future__ import annotations

import numpy as np

from steadyrun.detect.straggler.phases import History, explain
from steadyrun.detect.straggler.records import Cause, StepDetails

RANKS, SLOW, BEGIN, STEPS = 4, 2, 40, 75


def history(outliers: dict[int, float]) -> History:
    """Backward of one rank takes 4 ms more from ``BEGIN`` on; *outliers* are further seconds in its data, by step."""
    kept = History(RANKS)
    for step in range(STEPS):
        phases = {"forward": 0.003, "backward": 0.005, "optimizer": 0.003, "data": 0.002}
        times = {name: np.full(RANKS, s) for name, s in phases.items()}
        if step >= BEGIN:
            times["backward"][SLOW] += 0.004
        times["data"][SLOW] += outliers.get(step, 0.0)
        busy = sum(times.values(), np.zeros(RANKS))
        details = StepDetails(cpu_s=busy, **{f"{name}_s": values for name, values in times.items()})
        kept.push(step, busy, details)
    return kept


def test_one_long_step_hides_no_phase() -> None:
    found = explain(history({BEGIN + 1: 0.2}), SLOW, [0, 1, 3], BEGIN)
    assert (found.phase, found.cause) == ("backward", Cause.WORKING)
    assert found.shares["backward"] > 0.95


def test_long_steps_before_it_began_hide_none_either() -> None:
    found = explain(history({5: 0.2, 20: 0.1}), SLOW, [0, 1, 3], BEGIN)
    assert (found.phase, found.cause) == ("backward", Cause.WORKING)


def test_a_third_of_the_steps_is_no_outlier() -> None:
    """A source of data that is slow now and then, as intermittent faults are."""
    slow = {step: 0.03 for step in range(BEGIN, STEPS) if step % 3 == 0}
    found = explain(history(slow), SLOW, [0, 1, 3], BEGIN)
    assert found.phase == "data"
