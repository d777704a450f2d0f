"""Checkpoints beside the shared folder, on the node's own disk and in a remote store, through the real saver."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from savers import Agent, Job, Rank, make_layout, problems

from steadyrun.checkpoint.catalog import list_checkpoints

ALL = ["memory", "shared", "local", "remote"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, local=str(tmp_path / "local"), remote=f"file://{tmp_path}/remote", keep=2)
    yield made
    made.close()


def start(job: Job, attempt: int = 0, agent: Agent | None = None) -> tuple[Agent, list[Rank]]:
    agent = agent or (job.agents[0] if job.agents else job.agent())
    for rank in job.ranks:
        rank.leave()
    agent.begin(attempt, 2)
    return agent, job.start_ranks(agent, [make_layout(r, 2, {"w": 1_000}) for r in range(2)], attempt)


def complete(root: Path) -> list[int]:
    return [c.step for c in list_checkpoints(root) if c.is_complete]


def choose(job: Job, ranks: list[Rank], memory: bool = True) -> dict[str, object]:
    for rank in ranks:
        rank.send("restore", digest=None, rejected=[], local=memory, round=0)
    job.until(lambda: all(r.last("choice") for r in ranks), "a choice")
    return ranks[0].last("choice") or {}


def save(job: Job, ranks: list[Rank], step: int, tiers: list[str]) -> None:
    for rank in ranks:
        rank.save(step, tiers)
    job.until(lambda: job.is_durable(ranks, step), f"step {step}")


def test_each_tier_gets_what_it_is_due_and_keeps_to_the_retention(job: Job) -> None:
    agent, ranks = start(job)
    save(job, ranks, 1, ALL)
    save(job, ranks, 2, ["memory", "shared"])
    for step in (3, 4):
        save(job, ranks, step, ALL)
        job.until(lambda s=step: complete(job.folder / "remote")[:1] == [s], "the remote tier")  # type: ignore[misc]
        job.until(lambda s=step: complete(job.folder / "local")[:1] == [s], "the local tier")  # type: ignore[misc]
    for place in ("local", "remote"):
        job.until(lambda p=place: complete(job.folder / p) == [4, 3], f"retention in {place}")  # type: ignore[misc]
        assert problems(job.folder / place / "step-000000004") == []
    job.until(lambda: len([r for r in agent.records("checkpoint_copied") if r["bytes"] > 0]) == 6, "the records")


def test_the_nearest_tier_is_chosen_when_memory_is_gone(job: Job) -> None:
    _, ranks = start(job)
    save(job, ranks, 1, ALL)
    job.until(lambda: complete(job.folder / "local") == [1], "the local tier")
    _, again = start(job, 1, job.agent("n1"))
    choice = choose(job, again)
    assert (choice["source"], choice["path"]) == ("folder", str(job.folder / "local" / "step-000000001"))


def test_a_lost_folder_is_fetched_back_from_the_remote_tier(job: Job) -> None:
    _, ranks = start(job)
    save(job, ranks, 1, ALL)
    job.until(lambda: complete(job.folder / "remote") == [1], "the remote tier")
    job.until(lambda: complete(job.folder / "local") == [1], "the local tier")
    shutil.rmtree(job.root)
    shutil.rmtree(job.folder / "local")
    _, again = start(job, 1, job.agent("n1"))
    choice = choose(job, again)
    assert (choice["source"], choice["path"]) == ("folder", str(job.root / "step-000000001"))
    assert problems(job.root / "step-000000001") == []


def test_a_tier_that_cannot_be_written_is_said_once_and_costs_no_save(job: Job) -> None:
    agent, ranks = start(job)
    (job.folder / "remote").write_text("not a folder")
    for step in (1, 2):
        save(job, ranks, step, ["memory", "shared", "remote"])
    job.until(lambda: len(agent.records("checkpoint_not_copied")) == 2, "the failures")
    assert len([n for n in agent.notes if "remote" in n]) == 1
    (job.folder / "remote").unlink()
    save(job, ranks, 3, ["memory", "shared", "remote"])
    job.until(lambda: [n for n in agent.notes if "remote tier again" in n], "the good news")
    assert complete(job.folder / "remote") == [3]
