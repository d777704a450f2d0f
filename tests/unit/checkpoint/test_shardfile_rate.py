"""The limit on bytes per second that the writers of a node share."""

from __future__ import annotations

import pytest

from steadyrun.checkpoint.shardfile import RateLimit, WriteOptions


class Time:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.waits_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        self.now_s += seconds


def test_the_first_piece_goes_at_once_and_each_further_one_when_the_last_is_paid_for() -> None:
    time = Time()
    rate = RateLimit(10.0, time.clock, time.pause)
    for _ in range(3):
        rate.wait_for(20)
    assert time.waits_s == [2.0, 2.0]


def test_time_without_writing_is_not_saved_up() -> None:
    time = Time()
    rate = RateLimit(10.0, time.clock, time.pause)
    rate.wait_for(10)
    time.now_s += 1000
    rate.wait_for(10)
    rate.wait_for(10)
    assert time.waits_s == [1.0]


def test_writers_share_the_limit() -> None:
    time = Time()
    waits: list[float] = []
    rate = RateLimit(10.0, time.clock, waits.append)  # threads that wait at the same time: nobody moves the clock
    for _ in range(4):
        rate.wait_for(10)
    assert waits == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("most", [0.0, -1.0, float("nan")])
def test_a_limit_must_let_something_through(most: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        RateLimit(most)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        WriteOptions(piece_bytes=5000)
    with pytest.raises(ValueError, match="at least 1"):
        WriteOptions(in_flight=0)
