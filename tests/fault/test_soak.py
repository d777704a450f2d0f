"""Random faults, one after the other, on the demonstration: the losses are those of a run that nothing disturbed.

``benchmarks/soak.py`` draws, runs and judges. The run itself takes minutes and is of the full set; that the judgement
sees what is wrong is shown here on made-up records.
"""

from __future__ import annotations

import importlib
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from steadyrun.testing.faults import parse_faults


@pytest.fixture
def soak(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """benchmarks/soak.py and the modules beside it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(checkout / "benchmarks")
    yield importlib.import_module("soak")
    for name in set(sys.modules) - before:
        if name in ("soak", "job", "report"):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.deadline(1900)
def test_thirty_random_faults_end_with_the_undisturbed_losses(checkout: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1_000_000)
    report = tmp_path / "soak.json"
    program = [sys.executable, str(checkout / "benchmarks" / "soak.py"), f"--seed={seed}", f"--json={report}"]
    options = ["--faults=30", "--patience=900", "--verbose"]
    done = subprocess.run([*program, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    results = json.loads(report.read_text())["results"]
    assert results["problems"] == []
    assert results["exit_codes"] == [0, 0]
    assert results["equal_steps"] == results["steps"]
    assert results["done_again"] > 0, "no step was done twice, so nothing was restored"
    assert [o["attempt"] for o in results["outcomes"]] == list(range(30))
    assert all(o["incidents"] == 1 and o["back_s"] is not None for o in results["outcomes"])


# -- what is drawn -----------------------------------------------------------------------------------------------------
def test_same_seed_draws_the_same_faults(soak: ModuleType) -> None:
    assert soak.draw(30, 5, (20, 100), 2) == soak.draw(30, 5, (20, 100), 2)
    assert soak.draw(30, 5, (20, 100), 2) != soak.draw(30, 6, (20, 100), 2)


@pytest.mark.parametrize("seed", range(20))
def test_every_attempt_gets_further_and_suffers_one_fault(soak: ModuleType, seed: int) -> None:
    planned = soak.draw(30, seed, (20, 100), 2)
    steps = [0, *(p.step for p in planned)]
    assert all(20 <= after - before <= 100 for before, after in itertools.pairwise(steps))
    assert {p.texts for p in planned} == {*soak.CRASHES, *soak.HANGS}, "each kind is there"
    for attempt, p in enumerate(planned):
        faults = parse_faults(p.plan)
        assert {f.attempt for f in faults} == {attempt}
        assert [f.step for f in faults if f.text not in p.harmless] == [p.step] * len(p.texts)
        if p.harmless:
            assert faults[0].step is not None
            assert steps[attempt] < faults[0].step < p.step


# -- what is judged ----------------------------------------------------------------------------------------------------
def outcome(soak: ModuleType, **changes: Any) -> Any:
    right = {"found": "dead_process", "ranks": (1,), "noticed_s": 0.1, "back_s": 1.0, "incidents": 1, "confidence": 0.9}
    return soak.Outcome(0, "kill", 1, 30, False, "dead_process", **(right | changes))


def test_nothing_is_wrong_with_a_right_verdict_and_a_restart(soak: ModuleType, tmp_path: Path) -> None:
    assert list(soak.complaints([outcome(soak)], tmp_path)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"found": "host_stall"}, "expected dead_process"),
        ({"ranks": (0,)}, "expected dead_process"),
        ({"ranks": (0,), "confidence": 0.4}, "expected dead_process"),  # a guess is excused in one class only
        ({"incidents": 2}, "2 incident(s)"),
        ({"incidents": 0, "found": "", "ranks": ()}, "nothing found"),
        ({"noticed_s": None}, "did not strike"),
        ({"back_s": None}, "did not come back"),
    ],
)
def test_what_is_wrong_with_a_fault_is_told(
    soak: ModuleType, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    assert any(words in line for line in soak.complaints([outcome(soak, **changes)], tmp_path))


def test_incident_that_no_fault_explains_is_told(soak: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "incidents" / "0001"
    folder.mkdir(parents=True)
    (folder / "verdict.json").write_text(json.dumps({"attempt": 7, "findings": []}))
    assert [line for line in soak.complaints([outcome(soak)], tmp_path) if "attempt 7" in line]


@pytest.mark.parametrize(
    ("expected", "seen"),
    [
        ({0: [1.0], 1: [0.5]}, {0: [1.0], 1: [0.5, 0.5000000000000001]}),  # done again, and the last bit differs
        ({0: [1.0], 1: [0.5]}, {0: [1.0]}),
        ({0: [1.0]}, {0: [1.0]}),
        ({0: [1.0], 1: [0.5]}, {0: [1.0], 1: [0.5], 2: [0.4]}),
        ({0: [1.0], 1: [0.5, 0.5]}, {0: [1.0], 1: [0.5]}),
    ],
)
def test_losses_that_differ_in_any_bit_or_step_are_told(
    soak: ModuleType, expected: dict[int, list[float]], seen: dict[int, list[float]]
) -> None:
    assert list(soak.differences(2, expected, seen))


def test_equal_losses_are_equal_however_often_a_step_was_done(soak: ModuleType) -> None:
    assert list(soak.differences(2, {0: [1.0], 1: [0.5]}, {0: [1.0], 1: [0.5, 0.5, 0.5]})) == []
