"""When a rank became slow is told from its times, not from when noise last left its evidence at zero."""

from __future__ import annotations

import numpy as np
import pytest

from steadyrun.detect.straggler.phases import History, onset
from steadyrun.detect.straggler.records import StepDetails

RANKS, SLOW, STEPS = 4, 3, 110
PEERS = [0, 1, 2]


def history(shares: np.ndarray, noise: float = 0.02, seed: int = 0) -> History:
    """One rank takes longer by *shares*, step by step."""
    draw = np.random.default_rng(seed)
    kept = History(RANKS)
    for step, share in enumerate(shares.tolist()):
        busy = 0.02 * np.exp(noise * draw.standard_normal(RANKS))
        busy[SLOW] *= 1 + share
        kept.push(step, busy, StepDetails())
    return kept


def from_step(begin: int, share: float, before: float = 0.0) -> np.ndarray:
    return np.where(np.arange(STEPS) >= begin, share, before)


@pytest.mark.parametrize("seed", range(20))
def test_the_beginning_is_found_though_evidence_began_long_before(seed: int) -> None:
    found = onset(history(from_step(70, 0.1, before=0.01), seed=seed), SLOW, PEERS, 20, 0.0, 0.025)
    assert found is not None
    step, count, mean = found
    assert abs(step - 70) <= 4
    assert count == STEPS - step
    assert mean == pytest.approx(np.log(1.1), abs=0.02)


def test_a_single_long_step_is_no_beginning() -> None:
    shares = from_step(70, 0.1)
    shares[40] = 30.0
    found = onset(history(shares), SLOW, PEERS, 20, 0.0, 0.025)
    assert found is not None
    assert abs(found[0] - 70) <= 4


def test_what_a_rank_has_by_nature_is_left_out() -> None:
    found = onset(history(from_step(70, 0.13, before=0.03)), SLOW, PEERS, 20, np.log(1.03), 0.025)
    assert found is not None
    assert abs(found[0] - 70) <= 4
    assert found[2] == pytest.approx(np.log(1.13 / 1.03), abs=0.02)


def test_it_is_never_before_the_evidence_began() -> None:
    found = onset(history(from_step(30, 0.2)), SLOW, PEERS, 50, 0.0, 0.025)
    assert found is not None
    assert found[0] >= 50


def test_where_the_first_steps_are_no_longer_kept_nothing_is_told() -> None:
    shares = np.full(300, 0.1)
    assert onset(history(shares), SLOW, PEERS, 100, 0.0, 0.025) is None
    assert onset(history(shares), SLOW, PEERS, 200, 0.0, 0.025) is not None
    assert onset(history(shares), SLOW, [], 200, 0.0, 0.025) is None
