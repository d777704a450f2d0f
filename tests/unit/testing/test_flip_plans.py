from __future__ import annotations

import sys

import pytest

from steadyrun.core.classes import FaultClass
from steadyrun.core.errors import ConfigError
from steadyrun.testing.faults import FaultPlan, When, expected_class, parse_faults


def test_all_of_a_flip_may_be_drawn() -> None:
    (fault,) = parse_faults("flip rank=2 step=30")
    assert fault.options == {"target": "param", "tensor": "drawn", "element": "drawn", "bit": "drawn", "at": "rest"}
    assert expected_class(fault) is FaultClass.SILENT_CORRUPTION


def test_all_of_a_flip_may_be_given() -> None:
    (fault,) = parse_faults("flip rank=0 step=load target=optim tensor=optimizer.0.weight.exp_avg element=7 bit=31")
    assert fault.when is When.LOAD
    assert fault.options["tensor"] == "optimizer.0.weight.exp_avg"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("flip target=params", "did you mean param"),
        ("flip at=rests", "known: rest, update"),
        ("flip bit=x", "not a whole number"),
        ("flip step=start", "cannot strike before the script"),
        ("kill step=load", "allowed: N, start"),
        ("flip step=load every=5", "every= needs step=N"),
    ],
)
def test_what_cannot_be_flipped_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_faults(text)


def test_a_running_rank_has_loaded_already() -> None:
    with pytest.raises(ConfigError, match="has passed"):
        parse_faults("flip step=load", injected=True)


def test_a_flip_without_torch_says_so_and_harms_nobody(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    plan = FaultPlan.parse("flip rank=0 step=1 tensor=x", rank=0, attempt=0, world_size=1)
    plan.on_step(1)
    assert "NOT injected" in capfd.readouterr().err
