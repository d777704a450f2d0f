"""A job that is killed and resumed from its captured state goes on bit by bit, for every kind of parallelism.

Four ranks run all kinds one after the other (state_job.py): undisturbed, then with captures until they kill themselves;
new processes resume. The same states are then loaded by two ranks, and what these store by three.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchdata")

JOB = Path(__file__).with_name("state_job.py")
RANKS = 4
LIMIT_S = 400.0
SAVED_AFTER, KILLED_AFTER = 4, 6
RESUMED = (
    "ddp.sgd.drop",
    "fsdp1.adamw.drop",
    "fsdp1flat.sgd.drop",
    "fsdp1hybrid.adamw.drop",
    "fsdp2.adamw.drop",
    "hsdp.adamw.drop",
    "tp.adamw.drop",
    "fsdp2.counting.drop",
)
MOVED = ("ddp.adamw.plain", "fsdp1.adamw.plain", "fsdp2.adamw.plain", "tp.sgd.plain", "fsdp2.counting.plain")

# Ten kinds of parallelism on four ranks take minutes; tests/fault/test_exact_resume.py has the main ones in every run.
pytestmark = [pytest.mark.slow, pytest.mark.deadline(1000)]

Results = list[Mapping[str, Any]]


def run(mode: str, folder: Path, kinds: tuple[str, ...], ranks: int, code: int = 0) -> Results:
    """What the ranks report; each must end with *code* in time."""
    started = []
    logs = [folder / f"log.{mode}.{ranks}.{rank}" for rank in range(ranks)]
    for rank, log in enumerate(logs):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", str(JOB), mode, str(folder), ",".join(kinds)]
        with log.open("wb") as out:
            started.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    limit_s = time.monotonic() + LIMIT_S
    try:
        codes = [p.wait(max(limit_s - time.monotonic(), 0.1)) for p in started]
    except subprocess.TimeoutExpired:
        pytest.fail(f"{mode} on {ranks} ranks took more than {LIMIT_S:g} s\n{tails(logs)}")
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [code] * ranks, tails(logs)
    return [json.loads((folder / f"{mode}.{ranks}.{rank}.json").read_text()) for rank in range(ranks)]


def tails(logs: list[Path]) -> str:
    return "\n".join(f"-- {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in logs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Results:
    """The undisturbed runs, and those that were killed after they had stored their state."""
    return run("train", folder, RESUMED + MOVED, RANKS, -9)


@pytest.fixture(scope="module")
def resumed(folder: Path, trained: Results) -> Results:
    return run("resume", folder, RESUMED, RANKS)


@pytest.fixture(scope="module")
def on_two(folder: Path, trained: Results) -> Results:
    return run("reshape", folder, MOVED, 2)


@pytest.fixture(scope="module")
def on_three(folder: Path, on_two: Results) -> Results:
    return run("reshape", folder, MOVED, 3)


@pytest.mark.parametrize("kind", RESUMED)
def test_resumed_run_equals_the_undisturbed_one_bit_by_bit(trained: Results, resumed: Results, kind: str) -> None:
    for rank in range(RANKS):
        whole, rest = trained[rank][kind], resumed[rank][kind]
        assert rest["notes"] == []
        assert rest["samples"] == whole["samples"][SAVED_AFTER + 1 :]
        assert rest["losses"] == whole["losses"][SAVED_AFTER + 1 :]
        assert rest["digest"] == whole["digest"], "parameters or optimizer state differ at the end"


@pytest.mark.parametrize("kind", RESUMED + MOVED)
def test_captures_leave_no_trace_in_the_run(trained: Results, kind: str) -> None:
    for rank in range(RANKS):
        result = trained[rank][kind]
        assert result["captured_losses"] == result["losses"][: KILLED_AFTER + 1]
        for moment in ("first", "steady"):
            assert result[moment]["same"], f"{moment}: a parameter, the optimizer or a random number changed"
            assert result[moment]["steps"] == 0


@pytest.mark.parametrize("kind", RESUMED + MOVED)
def test_captures_make_no_collective(trained: Results, kind: str) -> None:
    for rank in range(RANKS):
        result = trained[rank][kind]
        for moment in ("first", "steady"):
            assert set(result[moment]["collectives"]) == {0}, moment
            assert not [o for o in result[moment]["operators"] if "c10d" in o], moment
        # Not even a view is made anew once the structure is known; a scaler's numbers are read.
        assert set(result["steady"]["operators"]) <= {"aten.detach.default", "aten._local_scalar_dense.default"}


@pytest.mark.parametrize("kind", RESUMED)
def test_getting_ready_to_load_takes_no_step(resumed: Results, kind: str) -> None:
    assert [resumed[rank][kind]["steps"] for rank in range(RANKS)] == [0] * RANKS


@pytest.mark.parametrize("kind", MOVED)
def test_four_two_and_three_ranks_make_one_run(trained: Results, on_two: Results, on_three: Results, kind: str) -> None:
    whole = trained[0][kind]["means"]
    assert on_two[0][kind]["means"] == pytest.approx(whole[5:8], rel=2e-6)
    assert on_three[0][kind]["means"] == pytest.approx(whole[8:], rel=2e-6)


@pytest.mark.parametrize("kind", MOVED)
def test_no_sample_is_lost_or_seen_twice_with_other_ranks(
    trained: Results, on_two: Results, on_three: Results, kind: str
) -> None:
    def steps(results: Results) -> list[list[int]]:
        distinct = {tuple(map(tuple, r[kind]["samples"])) for r in results}  # ranks of one TP group read the same
        return [sorted(i for part in step for i in part) for step in zip(*distinct, strict=True)]

    assert steps(trained)[5:8] == steps(on_two)
    assert steps(trained)[8:] == steps(on_three)


@pytest.mark.parametrize("kind", MOVED)
def test_what_other_ranks_cannot_continue_is_said(on_two: Results, kind: str) -> None:
    notes = on_two[0][kind]["notes"]
    assert notes == [
        "'average' is another thing on each of 4 ranks: here it begins anew",
        "data position: 60 samples of the epoch seen; the global batch stays 12 samples",
        "random numbers are of 4 ranks: seeded anew from seed 100, step 4 and the rank",
    ]
