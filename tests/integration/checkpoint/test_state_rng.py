"""Random numbers go on where they were, and nobody else's are drawn."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from steadyrun.checkpoint.rng import capture_rng, derived_seed, preserved_rng, reseed, restore_rng


def draw() -> list[float]:
    """Some of every generator; a Gaussian leaves a second number behind in Python's and NumPy's."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(()).item(),
    ]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def test_every_generator_goes_on_where_it_was() -> None:
    draw()
    state = capture_rng()
    expected = [draw() for _ in range(3)]
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    assert restore_rng(state) == []
    assert [draw() for _ in range(3)] == expected


def test_capturing_draws_no_number() -> None:
    state = capture_rng()
    expected = draw()
    restore_rng(state)
    for _ in range(3):
        capture_rng()
    assert draw() == expected


def test_the_state_is_loaded_without_running_code(tmp_path: pytest.TempPathFactory) -> None:
    path = f"{tmp_path}/rng.pt"
    draw()
    torch.save(capture_rng(), path)
    expected = draw()
    assert restore_rng(torch.load(path, weights_only=True)) == []
    assert draw() == expected


def test_numpy_is_not_loaded_for_a_script_that_does_not_use_it() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from steadyrun.checkpoint.rng import capture_rng, restore_rng, reseed\n"
        "import torch\n"
        "state = capture_rng(); assert 'numpy' not in state, state.keys()\n"
        "a = torch.rand(3); restore_rng(state); assert torch.equal(a, torch.rand(3)); reseed(1, 2, 3)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_device_that_is_gone_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    state = {**capture_rng(), "cuda": [torch.zeros(16, dtype=torch.uint8)]}
    assert restore_rng(state) == ["random numbers of cuda cannot be continued: there is no such device in this process"]


def test_seeds_of_ranks_and_steps_differ_and_repeat() -> None:
    seeds = {derived_seed(7, step, rank) for step in range(20) for rank in range(20)}
    assert len(seeds) == 400
    assert all(0 <= s < 2**63 for s in seeds)
    reseed(7, 3, 1)
    first = draw()
    reseed(7, 3, 2)
    assert draw() != first
    reseed(7, 3, 1)
    assert draw() == first


def test_numbers_drawn_inside_are_not_missed_outside() -> None:
    state = capture_rng()
    expected = draw()
    restore_rng(state)
    with preserved_rng():
        draw()
    assert draw() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_numbers_of_a_device_go_on() -> None:
    torch.rand(3, device="cuda")
    state = capture_rng()
    expected = torch.rand(5, device="cuda")
    torch.cuda.manual_seed_all(1)
    assert restore_rng(state) == []
    assert torch.equal(torch.rand(5, device="cuda"), expected)
