"""Rollbacks and quarantines through the real saver process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from savers import Agent, Job, Rank, make_layout

from steadyrun.checkpoint import quarantine, rollback


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def start(job: Job, attempt: int) -> tuple[Agent, list[Rank]]:
    agent = job.agents[0] if job.agents else job.agent()
    for rank in job.ranks:
        rank.leave()
    agent.begin(attempt, 2)
    layouts = [make_layout(r, 2, {"w": 1_000}) for r in range(2)]
    return agent, job.start_ranks(agent, layouts, attempt)


def resume(job: Job, ranks: list[Rank]) -> dict[str, object]:
    for rank in ranks:
        rank.send("restore", digest=None, rejected=[], local=True, round=0)
    job.until(lambda: all(r.last("choice") for r in ranks), "a choice")
    choice = ranks[0].last("choice") or {}
    for rank in ranks:
        rank.send("started", step=int(choice["step"]) + 1)
    return choice


def save(job: Job, ranks: list[Rank], step: int) -> None:
    for rank in ranks:
        rank.save(step)
    job.until(lambda: job.is_durable(ranks, step), f"step {step}")


def test_a_rollback_asks_for_a_restart_and_leaves_newer_states_and_batches_out(job: Job) -> None:
    agent, ranks = start(job, 0)
    resume(job, ranks)
    for step in (10, 20, 30):
        save(job, ranks, step)
    rollback.request(job.root, 15, [(12, 14)], time.time())
    job.until(lambda: [m for m in agent.heard if m["op"] == "restart"], "the restart")
    assert "rollback to step 15" in agent.heard[0]["why"]
    _, again = start(job, 1)
    choice = resume(job, again)
    assert (choice["source"], choice["step"]) == ("folder", 10)
    assert choice["skip_batches"] == [[12, 14]]
    # Neither what is in memory nor what is newer on disk brings it back.
    _, third = start(job, 2)
    choice = resume(job, third)
    assert (choice["step"], choice["skip_batches"]) == (10, [[12, 14]])
    save(job, third, 11)
    _, fourth = start(job, 3)
    assert resume(job, fourth)["step"] == 11


def test_an_option_rolls_back_once(job: Job) -> None:
    agent, ranks = start(job, 0)
    for step in (1, 2):
        save(job, ranks, step)
    asked = {"to": 1, "skip_batches": [], "id": "from-option"}
    for rank in ranks:
        rank.leave()
    agent.send("attempt", **{**(agent.attempt or {}), "attempt": 1, "rollback": asked})
    agent.attempt = {**(agent.attempt or {}), "attempt": 1, "rollback": asked}
    again = job.start_ranks(agent, [make_layout(r, 2, {"w": 1_000}) for r in range(2)], 1)
    assert resume(job, again)["step"] == 1
    save(job, again, 2)
    for rank in again:
        rank.leave()
    agent.attempt = {**agent.attempt, "attempt": 2}
    agent.send("attempt", **agent.attempt)
    third = job.start_ranks(agent, [make_layout(r, 2, {"w": 1_000}) for r in range(2)], 2)
    assert resume(job, third)["step"] == 2


def test_a_state_after_which_the_same_fault_comes_twice_is_quarantined(job: Job) -> None:
    agent, ranks = start(job, 0)
    for step in (1, 2):
        save(job, ranks, step)
    for attempt in (1, 2):
        _, ranks = start(job, attempt)
        assert resume(job, ranks)["step"] == 2
        agent.send("failed", attempt=attempt, step=3, signature="ValueError in f")
        job.until(lambda a=attempt: len(quarantine.read(job.root).failures) == a, "the judgement")  # type: ignore[misc]
    job.until(lambda: agent.records("checkpoint_quarantined"), "the record")
    assert agent.records("checkpoint_quarantined")[0]["step"] == 2
    _, ranks = start(job, 3)
    choice = resume(job, ranks)
    assert (choice["source"], choice["step"]) == ("memory", 1)
    assert any("quarantined" in why for _, _, why in choice["rejected"])  # type: ignore[attr-defined]
    assert any("is quarantined" in n for n in agent.notes)
    experience = json.loads((job.root / "experience.json").read_text())
    assert experience["failures"] == 2
