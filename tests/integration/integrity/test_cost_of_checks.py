"""What checks add to training, by counts and peaks: no collective, and no copy of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).with_name("cost_job.py")
WORLD = 2
LIMIT_S = 200.0
MIB = 1 << 20

pytestmark = pytest.mark.deadline(LIMIT_S + 20)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("cost")
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(JOB), str(folder / "store"), str(rank), str(WORLD), str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    limit_s = time.monotonic() + LIMIT_S
    try:
        said = [p.communicate(timeout=max(limit_s - time.monotonic(), 0.1)) for p in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [p.returncode for p in started] == [0] * WORLD, "\n".join(e[-2000:] for _, e in said)
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def test_checks_add_no_collective(told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert rank["checks"] >= 20, "one after load, and for each step but the first one before it and one after it"
        assert rank["without"] >= 10, "each step reduces its gradients"
        assert rank["with"] == rank["without"]


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_a_check_makes_no_copy_of_the_model(told: list[dict[str, Any]], dtype: str) -> None:
    grown, size = told[0]["memory"][dtype]
    assert size >= 27 * MIB
    assert grown <= 9 * MIB, "the hasher's scratch of at most 7 MiB is all that is needed, whatever the model's size"
