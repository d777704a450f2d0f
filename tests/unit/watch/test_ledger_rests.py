"""Whether a thread rested decides what its time beside the CPU was: its own doing, or that of others on the host."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from steadyrun.watch.ledger import DATA, FORWARD, Ledger


@dataclass
class Clocks:
    now_s: float = 100.0
    cpu_s: float = 5.0
    delay_s: float = 1.0
    rests: int = 7

    def ledger(self, *, tells_rests: bool = True) -> Ledger:
        rests = (lambda: self.rests) if tells_rests else None
        return Ledger(lambda: self.now_s, lambda: self.cpu_s, lambda: self.delay_s, rests)

    def go(self, wall_s: float, cpu_s: float, delay_s: float = 0.0, rests: int = 0) -> None:
        self.now_s += wall_s
        self.cpu_s += cpu_s
        self.delay_s += delay_s
        self.rests += rests


def in_forward(clocks: Clocks, ledger: Ledger, *times: float, rests: int = 0) -> tuple[float, float, float, float]:
    ledger.turn_to(FORWARD)
    clocks.go(*times, rests=rests)
    ledger.turn_to(DATA)
    return ledger.split(FORWARD)


def test_who_never_rested_worked_for_the_cpu_time_and_starved_for_the_rest() -> None:
    """A quota, or another virtual machine, takes time that run delay does not count."""
    clocks = Clocks()
    assert in_forward(clocks, clocks.ledger(), 0.30, 0.10, 0.05) == pytest.approx((0.10, 0.0, 0.20, 0.10))


def test_who_rested_may_have_waited_for_a_disk_which_is_its_own_time() -> None:
    clocks = Clocks()
    assert in_forward(clocks, clocks.ledger(), 0.30, 0.10, 0.05, rests=1) == pytest.approx((0.25, 0.0, 0.05, 0.10))


def test_where_rests_are_not_told_all_time_but_run_delay_is_its_own() -> None:
    clocks = Clocks()
    ledger = clocks.ledger(tells_rests=False)
    assert in_forward(clocks, ledger, 0.30, 0.10, 0.05) == pytest.approx((0.25, 0.0, 0.05, 0.10))


def test_rests_of_one_account_say_nothing_of_another() -> None:
    clocks = Clocks()
    ledger = clocks.ledger()
    clocks.go(0.5, 0.1, 0.0, rests=3)
    in_forward(clocks, ledger, 0.30, 0.10, 0.05)
    assert ledger.split(FORWARD)[0] == pytest.approx(0.10)
    assert ledger.split(DATA)[0] == pytest.approx(0.5)


def test_accounts_begin_anew() -> None:
    clocks = Clocks()
    ledger = clocks.ledger()
    in_forward(clocks, ledger, 0.30, 0.10, rests=1)
    ledger.clear()
    assert in_forward(clocks, ledger, 0.30, 0.10) == pytest.approx((0.10, 0.0, 0.20, 0.10))
