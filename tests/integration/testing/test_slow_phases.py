"""A phase that is made slower on order takes longer by what was ordered, the others do not, and it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from steadyrun.testing.slowness import CannotSlowError, Pace, SlowPhase

torch = pytest.importorskip("torch")

WIDTH, BATCH = 256, 64
PHASES = ("data", "forward", "backward", "optimizer")
SHARE = 0.5


class Loop:
    """A training loop that times itself by its CPU time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.loader = torch.utils.data.DataLoader(torch.randn(BATCH * 400, WIDTH), batch_size=BATCH)
        self.source: Iterator[Any] = iter(self.loader)
        self.pace = Pace()

    def step(self) -> dict[str, float]:
        at = [time.thread_time()]
        batch = next(self.source)
        at.append(time.thread_time())
        loss = self.model(batch).square().mean()
        at.append(time.thread_time())
        loss.backward()
        at.append(time.thread_time())
        self.optimizer.step()
        at.append(time.thread_time())
        self.optimizer.zero_grad()
        self.pace.on_step()
        return {name: b - a for name, a, b in zip(PHASES, at, at[1:], strict=False)}

    def steps(self, number: int) -> dict[str, float]:
        """Median times of the phases."""
        rows = [self.step() for _ in range(number)]
        return {name: sorted(row[name] for row in rows)[number // 2] for name in PHASES}


@pytest.fixture
def loop() -> Loop:
    loop = Loop()
    loop.steps(10)
    return loop


@pytest.mark.parametrize("phase", PHASES)
def test_one_phase_takes_longer_until_it_stops(loop: Loop, phase: str) -> None:
    before = loop.steps(30)
    slow = SlowPhase(loop.pace, phase, SHARE)
    while_slow = loop.steps(30)
    slow.stop()
    after = loop.steps(30)
    extra_s = SHARE * sum(before.values())
    for name in PHASES:
        wanted_s = extra_s if name == phase else 0.0
        assert while_slow[name] - before[name] == pytest.approx(wanted_s, abs=0.4 * extra_s), (name, before, while_slow)
        assert after[name] - before[name] == pytest.approx(0.0, abs=0.4 * extra_s), (name, before, after)


def test_a_source_of_data_that_sleeps_uses_no_cpu(loop: Loop) -> None:
    before = loop.steps(20)
    slow = SlowPhase(loop.pace, "data", 2.0, asleep=True)
    began_s = time.monotonic()
    while_slow = loop.steps(20)
    slow.stop()
    assert time.monotonic() - began_s > 20 * 2.0 * sum(before.values())
    assert while_slow["data"] < before["data"] + sum(before.values())


def test_evaluation_is_not_slowed(loop: Loop) -> None:
    slow = SlowPhase(loop.pace, "forward", 50.0)
    loop.model.eval()
    began_s = time.thread_time()
    with torch.no_grad():
        loop.model(torch.randn(BATCH, WIDTH))
    assert time.thread_time() - began_s < 10 * (loop.pace.step_s or 0.0)
    slow.stop()


def test_without_a_loader_there_is_no_data_to_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    from steadyrun.testing import slowness

    pace = Pace()
    monkeypatch.setattr(slowness.gc, "get_objects", list)
    with pytest.raises(CannotSlowError, match="no DataLoader is in use"):
        SlowPhase(pace, "data", SHARE)
    with pytest.raises(CannotSlowError, match="no model"):
        SlowPhase(pace, "forward", SHARE)
