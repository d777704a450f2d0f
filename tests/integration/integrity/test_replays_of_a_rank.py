"""Replays inside of real training under DDP: what they find, when they are off, and that they change nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).with_name("replay_job.py")
KINDS = (
    "plain",
    "accumulate",
    "autocast",
    "generator",
    "auto",
    "flip",
    "random",
    "hook",
    "decay",
    "twice",
    "collective",
)
OFF = {
    "random": "not deterministic",
    "hook": "hooks change gradients",
    "decay": "parameters are used outside of the model",
    "twice": "several times before its backward",
    "collective": "has collectives",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    store = tmp_path_factory.mktemp("store") / "store"
    argv = [sys.executable, "-W", "ignore", str(JOB), ",".join(KINDS), str(store)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("flip", "random")])
def test_training_is_bitwise_what_it_is_without_replays(told: dict[str, dict[str, Any]], kind: str) -> None:
    assert told[kind]["same_losses"]
    assert told[kind]["same_after"], "parameters, buffers, gradients, random numbers, hooks, watched modules"


@pytest.mark.parametrize("kind", ["plain", "accumulate", "autocast"])
def test_healthy_microbatches_agree(told: dict[str, dict[str, Any]], kind: str) -> None:
    # After the test at step 1: one at once at step 2, then at 4, 9, ... 49.
    assert (told[kind]["state"], told[kind]["clean"], told[kind]["clean_step"]) == ("on", 11, 49), told[kind]
    assert told[kind]["reports"] == []
    assert told[kind]["cost_s"] > 0


@pytest.mark.parametrize("kind", list(OFF))
def test_where_it_cannot_be_done_it_is_off_and_says_why(told: dict[str, dict[str, Any]], kind: str) -> None:
    assert (told[kind]["state"], told[kind]["clean"], told[kind]["reports"]) == ("off", 0, []), told[kind]
    assert OFF[kind] in told[kind]["why"]


def test_automatic_intervals_are_200_steps_or_more(told: dict[str, dict[str, Any]]) -> None:
    assert (told["auto"]["state"], told["auto"]["clean"]) == ("on", 1)
    assert told["auto"]["interval"] in {200 << n for n in range(20)}, "how many depends on the machine"


def test_a_wrong_gradient_is_found_with_its_place(told: dict[str, dict[str, Any]]) -> None:
    (report,) = told["flip"]["reports"]
    assert (report["step"], report["kind"], report["last_clean"], report["differing"]) == (14, "own", 9, 1)
    assert report["told"] != report["found"] == report["repeated"]
    assert report["places"] == [["second.weight", "float32", 4, 3072, 1, [[5, [9]]], True]]
    assert (told["flip"]["state"], told["flip"]["clean_step"]) == ("on", 19), "it goes on"
