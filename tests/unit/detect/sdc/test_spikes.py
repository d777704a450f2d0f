"""When values that are out of line make a spike, and from where training then goes on."""

from __future__ import annotations

from steadyrun.core.guards import LOSS, NORM, Signal
from steadyrun.detect.sdc.spikes import MOST, Spike, SpikeWatch


def heard(watch: SpikeWatch, *steps: int, value: float | None = 9.0, rank: int = 0) -> None:
    for step in steps:
        watch.heard(rank, Signal(0, step, LOSS, value, 1.0, 20.0))


def test_a_single_value_is_no_spike_even_if_all_ranks_tell_it() -> None:
    watch = SpikeWatch()
    for rank in range(8):
        heard(watch, 100, rank=rank)
    assert watch.spike() is None


def test_three_steps_make_a_spike_and_its_first_step_is_known() -> None:
    watch = SpikeWatch()
    heard(watch, 100, 101, 103)
    spike = watch.spike()
    assert spike is not None
    assert (spike.first, spike.last) == (100, 103)
    assert "loss 9 (usually 1) on rank 0 after step 100" in spike.text


def test_two_that_are_not_finite_do() -> None:
    watch = SpikeWatch()
    heard(watch, 100, value=None)
    assert watch.spike() is None
    heard(watch, 101, value=None)
    assert watch.spike() is not None


def test_large_norms_are_no_spike_but_gradients_that_are_not_finite_are() -> None:
    watch = SpikeWatch()
    for step in range(100, 110):
        watch.heard(0, Signal(0, step, NORM, 9.0, 1.0, 20.0))
    assert watch.spike() is None
    for step in (110, 111):
        watch.heard(0, Signal(0, step, NORM, None, 1.0, None))
    assert watch.spike() is not None


def test_steps_far_apart_are_no_spike() -> None:
    watch = SpikeWatch()
    for step in (100, 150, 200, 250):
        heard(watch, step)
        assert watch.spike() is None


def test_the_checkpoint_nearest_to_100_steps_before_is_taken() -> None:
    watch, spike = SpikeWatch(), Spike(500, 503, "")
    assert watch.target(spike, [99, 299, 390, 420, 499, 510]) == 390
    assert watch.target(spike, [480, 490]) == 480, "there is none so old"
    assert watch.target(spike, [500, 510]) is None
    assert watch.target(spike, []) is None


def test_a_run_goes_back_so_often_and_no_more() -> None:
    watch = SpikeWatch()
    for _ in range(MOST):
        heard(watch, 100, 101, 102)
        assert watch.spike() is not None
        watch.went_back()
        assert watch.spike() is None
    heard(watch, 100, 101, 102)
    assert watch.spike() is None


def test_another_attempt_begins_anew() -> None:
    watch = SpikeWatch()
    heard(watch, 100, 101)
    watch.begin_attempt()
    heard(watch, 102)
    assert watch.spike() is None
