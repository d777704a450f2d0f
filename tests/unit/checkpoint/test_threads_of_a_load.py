"""How many processors a rank takes to load from memory."""

from __future__ import annotations

import os

import pytest

from steadyrun.checkpoint.checkpointer import threads_of_a_load


@pytest.mark.parametrize(
    ("processors", "ranks", "threads"), [(2, "1", 2), (2, "2", 1), (2, "8", 1), (96, "8", 8), (32, "8", 4), (4, "?", 4)]
)
def test_the_ranks_of_a_node_share_its_processors(
    monkeypatch: pytest.MonkeyPatch, processors: int, ranks: str, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert threads_of_a_load() == threads
