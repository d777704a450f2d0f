"""The real saver process with pretended ranks on one node: saves, deaths, restarts, choices."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from savers import Agent, Job, Rank, make_layout, problems, values

from steadyrun.checkpoint import commit
from steadyrun.checkpoint.arena import SlotState
from steadyrun.checkpoint.catalog import list_checkpoints
from steadyrun.checkpoint.saves import Every


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def set_options(job: Job, **options: object) -> None:
    job.options = type(job.options)(root=str(job.root), **options)  # type: ignore[arg-type]


def ranks_of(job: Job, world_size: int = 2, attempt: int = 0, elements: int = 70_000) -> tuple[Agent, list[Rank]]:
    agent = job.agents[0] if job.agents else job.agent()
    agent.begin(attempt, world_size)
    layouts = [make_layout(r, world_size, {"w": elements}, {"b": 1_000}) for r in range(world_size)]
    return agent, job.start_ranks(agent, layouts, attempt)


def complete(job: Job) -> list[Path]:
    return [c.path for c in list_checkpoints(job.root) if c.is_complete]


def ask(job: Job, ranks: list[Rank], rejected: list[object] | None = None, number: int = 0) -> list[dict[str, object]]:
    for rank in ranks:
        rank.send("restore", digest=None, rejected=rejected or [], local=True, round=number)
    job.until(lambda: all(r.last("choice") for r in ranks), "a choice")
    return [r.take("choice") or {} for r in ranks]


# -- saves -------------------------------------------------------------------------------------------------------------
def test_a_save_is_in_memory_then_durable_and_right(job: Job) -> None:
    agent, ranks = ranks_of(job)
    for rank in ranks:
        rank.save(7)
    job.until(lambda: job.is_durable(ranks, 7), "step 7")
    assert ranks[0].saves[1].states == ["in_memory", "durable"]
    (found,) = complete(job)
    assert found.name == "step-000000007"
    manifest = commit.read_manifest(found)
    assert (manifest.step, manifest.attempt, manifest.world_size, manifest.run_id) == (7, 0, 2, "run")
    assert manifest.replicas_compared == 1
    assert manifest.covered == ("model",)
    assert problems(found) == []
    assert values(found) == {("model.w", 0): {7.0}, ("model.w", 70_000): {1007.0}, ("model.b", 0): {7.0}}
    committed = agent.records("checkpoint_committed")
    assert [(r["step"], r["path"], r["stall_s"]) for r in committed] == [(7, str(found), 0.01)]


def test_the_saver_starts_quickly_and_without_torch(job: Job) -> None:
    agent = job.agent(start=False)
    agent.begin(0, 1)
    started_s = time.monotonic()
    agent.start()
    rank = job.rank(agent, 0, 1)
    job.until(lambda: rank.last("welcome"), "the welcome")
    assert time.monotonic() - started_s < 5.0  # 0.2 s on a quiet machine
    assert agent.process is not None
    assert "libtorch" not in Path(f"/proc/{agent.process.pid}/maps").read_text()


def test_saves_go_on_one_after_the_other(job: Job) -> None:
    _, ranks = ranks_of(job)
    for step in range(1, 7):
        for rank in ranks:
            rank.save(step)
        job.until(lambda s=step: job.is_durable(ranks, s), f"step {step}")  # type: ignore[misc]
    kept = complete(job)
    job.until(lambda: len(complete(job)) == 3, "retention")
    assert [p.name[-1] for p in complete(job)] == ["6", "5", "4"], kept


def test_snapshots_in_memory_are_written_only_when_asked_for(job: Job) -> None:
    _, ranks = ranks_of(job)
    for rank in ranks:
        rank.save(3, tiers=["memory"])
    job.until(lambda: all("in_memory" in r.saves[1].states for r in ranks), "memory")
    assert complete(job) == []
    for rank in ranks:
        rank.send("flush", timeout_s=30.0)
    job.until(lambda: all(r.last("flushed") for r in ranks), "the flush")
    assert [(r.last("flushed") or {})["step"] for r in ranks] == [3, 3]
    assert job.is_durable(ranks, 3)
    assert problems(complete(job)[0]) == []


def test_without_a_free_slot_a_save_is_skipped_everywhere_and_says_why(job: Job) -> None:
    set_options(job, most_bytes_per_s=400_000.0)
    _, ranks = ranks_of(job)
    for step in (1, 2, 3):
        for rank in ranks:
            rank.save(step)
        job.until(lambda s=step: all(r.saves[s].states for r in ranks), f"step {step}")  # type: ignore[misc]
    assert ranks[0].saves[3].states == ["skipped"]
    assert "no slot is free" in ranks[1].saves[3].why
    job.until(lambda: job.is_durable(ranks, 2), "both of the others")


def test_replicas_that_differ_are_not_committed_and_the_odd_one_is_named(job: Job) -> None:
    agent, ranks = ranks_of(job, world_size=3)
    for rank in ranks:
        rank.save(1, value=lambda e, r=rank.rank: 1.0 if e.shape != e.sizes else float(r == 1))  # type: ignore[misc]
    job.until(lambda: all("failed" in r.saves[1].states for r in ranks), "the refusal")
    assert "rank 1 differs from the others" in ranks[0].saves[1].why
    assert complete(job) == []
    assert agent.records("replicas_differ")[0]["step"] == 1
    for rank in ranks:
        rank.save(2)
    job.until(lambda: job.is_durable(ranks, 2), "a later save")


def test_a_changed_structure_gets_other_memory_and_another_plan(job: Job) -> None:
    agent, ranks = ranks_of(job)
    for rank in ranks:
        rank.save(1)
    job.until(lambda: job.is_durable(ranks, 1), "step 1")
    for rank in ranks:
        rank.heard.clear()
        rank.send("started", step=0)
        rank.send_layout(make_layout(rank.rank, 2, {"w": 70_000, "lora": 500}, {"b": 1_000}))
    job.until(lambda: all(r.last("arena") for r in ranks), "other memory")
    for rank in ranks:
        rank.save(2)
    job.until(lambda: job.is_durable(ranks, 2), "step 2")
    assert ("model.lora", 500) in values(complete(job)[0])
    job.until(lambda: len(agent.kept) == 3, "the old memory to be dropped")  # two ranks and the notebook


def test_layouts_that_make_no_checkpoint_are_refused_with_the_reason(job: Job) -> None:
    agent = job.agent()
    agent.begin(0, 2)
    ranks = [job.rank(agent, r, 2) for r in range(2)]
    for rank, elements in zip(ranks, (100, 200), strict=True):
        rank.send_layout(make_layout(rank.rank, 2, {}, {"b": elements}))
    job.until(lambda: all(r.last("refused") for r in ranks), "the refusal")
    refused = ranks[0].last("refused") or {}
    assert refused["direct"] is True
    assert "model.b" in refused["why"]


def test_without_snapshots_in_memory_all_ranks_are_told_to_write_directly(job: Job) -> None:
    set_options(job, slots=0)
    agent = job.agent()
    agent.begin(0, 2)
    ranks = [job.rank(agent, r, 2) for r in range(2)]
    for rank in ranks:
        rank.send_layout(make_layout(rank.rank, 2, {"w": 10}))
    job.until(lambda: all(r.last("refused") for r in ranks), "the refusal")
    assert all((r.last("refused") or {})["direct"] for r in ranks)


def test_values_are_agreed_by_rank(job: Job) -> None:
    _, ranks = ranks_of(job)
    for rank in reversed(ranks):
        rank.send("agree", key="0.loaded", value={"rank": rank.rank, "why": None})
    job.until(lambda: all(r.last("agreed") for r in ranks), "an agreement")
    agreed = ranks[1].take("agreed") or {}
    assert agreed["values"] == [{"rank": 0, "why": None}, {"rank": 1, "why": None}]
    ranks[1].send("agree", key="0.loaded", value=None)  # asked again by a rank that has reconnected
    job.until(lambda: ranks[1].last("agreed"), "the same answer")
    assert (ranks[1].last("agreed") or {})["values"] == agreed["values"]


# -- deaths ------------------------------------------------------------------------------------------------------------
def test_ranks_that_die_after_the_save_lose_nothing(job: Job) -> None:
    set_options(job, most_bytes_per_s=2_000_000.0)
    agent, ranks = ranks_of(job)
    for rank in ranks:
        rank.save(4)
    for rank in ranks:
        rank.leave()
    job.until(lambda: agent.records("checkpoint_committed"), "step 4")
    assert problems(complete(job)[0]) == []


def test_a_rank_that_dies_before_its_part_is_in_memory_skips_the_save(job: Job) -> None:
    agent, ranks = ranks_of(job)
    for rank in ranks:
        rank.save(1)
    job.until(lambda: job.is_durable(ranks, 1), "step 1")
    ranks[0].save(2)
    arena = ranks[1].arena
    assert arena is not None
    arena.slots[1].begin(2, 0, 2)  # in the middle of its copy
    ranks[1].leave()
    job.until(lambda: ranks[0].saves[2].states == ["skipped"], "the skip")
    assert "rank 1 ended" in ranks[0].saves[2].why
    ranks[0].leave()
    agent.send("failed", attempt=0, step=2, signature="x")
    _, again = ranks_of(job, attempt=1)
    choices = ask(job, again)
    assert [(c["source"], c["step"]) for c in choices] == [("memory", 1)] * 2
    views = [again[1].arena.slots[int(str(c["slot"]))].view() for c in choices if again[1].arena is not None]
    assert {(v.state, v.step) for v in views} == {(SlotState.SEALED, 1)}


def test_a_killed_saver_leaves_the_snapshot_to_the_next_one(job: Job) -> None:
    agent, ranks = ranks_of(job)
    for rank in ranks:
        rank.save(5, tiers=["memory"])
    job.until(lambda: all("in_memory" in r.saves[1].states for r in ranks), "memory")
    agent.kill()
    assert complete(job) == []
    agent.start()
    for rank in ranks:
        rank.connect()
        assert rank.layout is not None
        rank.send_layout(rank.layout)
    job.until(lambda: job.is_durable(ranks, 5), "the snapshot to be durable")
    assert values(complete(job)[0])["model.w", 70_000] == {1005.0}
    for rank in ranks:
        rank.save(6)
    job.until(lambda: job.is_durable(ranks, 6), "the next save")


@pytest.mark.parametrize("are_ranks_alive", [True, False])
def test_a_saver_killed_while_it_writes_is_continued_by_the_next_one(job: Job, are_ranks_alive: bool) -> None:
    set_options(job, most_bytes_per_s=300_000.0)
    agent, ranks = ranks_of(job)
    for rank in ranks:
        rank.save(1)
    job.until(lambda: agent.records("checkpoint_started"), "the writing")
    agent.kill()
    set_options(job)
    if not are_ranks_alive:
        for rank in ranks:
            rank.leave()
    agent.start()
    if are_ranks_alive:
        for rank in ranks:
            rank.options = job.options
            rank.connect()
            assert rank.layout is not None
            rank.send_layout(rank.layout)
        job.until(lambda: job.is_durable(ranks, 1), "the save")
    job.until(lambda: agent.records("checkpoint_committed"), "the save")
    assert [p.name for p in complete(job)] == ["step-000000001"]
    assert problems(complete(job)[0]) == []


def test_a_saver_killed_after_the_commit_does_not_write_it_again(job: Job) -> None:
    agent, ranks = ranks_of(job)
    for rank in ranks:
        rank.save(1)
    job.until(lambda: job.is_durable(ranks, 1), "step 1")
    os.close(agent.kept.pop("saver-state"))  # as if it had been killed before it noted the commit
    agent.kill()
    agent.start()
    for rank in ranks:
        rank.connect()
        assert rank.layout is not None
        rank.send_layout(rank.layout)
    job.until(lambda: len(agent.records("checkpoint_committed")) == 2, "the same commit to be found")
    assert [p.name for p in complete(job)] == ["step-000000001"]


def test_a_job_whose_agent_is_gone_is_brought_to_disk(job: Job) -> None:
    agent, ranks = ranks_of(job)
    for rank in ranks:
        rank.save(9, tiers=["memory"])
    job.until(lambda: all("in_memory" in r.saves[1].states for r in ranks), "memory")
    process = agent.process
    assert process is not None
    assert agent.wire is not None
    agent.wire.close()
    agent.wire = None
    for rank in ranks:
        rank.leave()
    assert process.wait(30) == 0
    assert values(complete(job)[0])["model.b", 0] == {9.0}


def test_the_saver_finishes_what_it_writes_before_it_leaves(job: Job) -> None:
    set_options(job, most_bytes_per_s=1_000_000.0)
    agent, ranks = ranks_of(job)
    for rank in ranks:
        rank.save(2)
    job.until(lambda: agent.records("checkpoint_started"), "the writing")
    assert agent.process is not None
    agent.process.send_signal(signal.SIGTERM)  # a stop of the job is not the saver's
    agent.send("leave", limit_s=30.0)
    process = agent.process
    job.until(lambda: process.poll() is not None, "the end")
    assert process.returncode == 0
    assert problems(complete(job)[0]) == []


def test_an_agent_that_flushes_gets_the_newest_snapshot_onto_disk(job: Job) -> None:
    agent, ranks = ranks_of(job)
    for rank in ranks:
        rank.save(8, tiers=["memory"])
    job.until(lambda: all("in_memory" in r.saves[1].states for r in ranks), "memory")
    for rank in ranks:
        rank.leave()
    agent.send("flush", limit_s=20.0)
    job.until(lambda: agent.heard, "the answer")
    assert agent.heard[0] == {"op": "flushed", "step": 8, "why": "", "fds": []}
    assert len(complete(job)) == 1


# -- resuming ----------------------------------------------------------------------------------------------------------
def test_a_flipped_bit_in_memory_is_found_and_the_checkpoint_on_disk_is_used(job: Job) -> None:
    agent, ranks = ranks_of(job)
    for step in (1, 2):
        for rank in ranks:
            rank.save(step)
        job.until(lambda s=step: job.is_durable(ranks, s), f"step {step}")  # type: ignore[misc]
    arena = ranks[1].arena
    assert arena is not None
    (newest,) = [s for s in arena.slots if s.view().step == 2]
    newest.payload(arena.layout.entries[0])[1234] ^= 4
    for rank in ranks:
        rank.leave()
    _, again = ranks_of(job, attempt=1)
    choice = ask(job, again)[0]
    assert (choice["source"], choice["step"]) == ("folder", 2)
    assert str(choice["path"]).endswith("step-000000002")
    (damaged,) = agent.records("snapshot_damaged")
    assert (damaged["rank"], damaged["step"]) == (1, 2)
    assert "model.w" in str(damaged["why"])


def test_what_a_rank_rejects_is_not_chosen_again(job: Job) -> None:
    _, ranks = ranks_of(job)
    for step in (1, 2):
        for rank in ranks:
            rank.save(step)
        job.until(lambda s=step: job.is_durable(ranks, s), f"step {step}")  # type: ignore[misc]
    for rank in ranks:
        rank.leave()
    _, again = ranks_of(job, attempt=1)
    first = ask(job, again)[0]
    assert (first["source"], first["step"]) == ("memory", 2)
    second = ask(job, again, [["memory", 2, "rank 0: no"]], 1)[0]
    assert (second["source"], second["step"]) == ("folder", 2)
    third = ask(job, again, [["memory", 2, "rank 0: no"], [second["path"], 2, "rank 1: neither"]], 2)[0]
    assert (third["source"], third["step"]) == ("memory", 1)
    assert len(third["rejected"]) == 2  # type: ignore[arg-type]


def test_a_flipped_bit_in_the_older_snapshot_is_found_when_that_is_chosen(job: Job) -> None:
    agent, ranks = ranks_of(job)
    for step in (1, 2):
        for rank in ranks:
            rank.save(step)
        job.until(lambda s=step: job.is_durable(ranks, s), f"step {step}")  # type: ignore[misc]
    arena = ranks[0].arena
    assert arena is not None
    (older,) = [s for s in arena.slots if s.view().step == 1]
    older.blobs()[1][0] ^= 1
    for rank in ranks:
        rank.leave()
    _, again = ranks_of(job, attempt=1)
    newest: list[object] = [["memory", 2, "no"], [str(job.root / "step-000000002"), 2, "no"]]
    choices = ask(job, again, newest)
    assert [(c["source"], c["step"]) for c in choices] == [("memory", 1)] * 2
    assert choices[0]["slot"] == -1, "the rank then rejects it"
    (damaged,) = agent.records("snapshot_damaged")
    assert "the objects" in str(damaged["why"])
    choice = ask(job, again, [*newest, ["memory", 1, "rank 0: the snapshot is not in memory any more"]], 1)[0]
    assert (choice["source"], choice["step"]) == ("folder", 1)


def test_another_number_of_ranks_waits_for_the_newest_snapshot_to_be_durable(job: Job) -> None:
    _, ranks = ranks_of(job)
    for rank in ranks:
        rank.save(6, tiers=["memory"])
    job.until(lambda: all("in_memory" in r.saves[1].states for r in ranks), "memory")
    for rank in ranks:
        rank.leave()
    _, (alone,) = ranks_of(job, world_size=1, attempt=1)
    (choice,) = ask(job, [alone])
    assert (choice["source"], choice["step"]) == ("folder", 6)
    alone.send("started", step=7)
    job.until(lambda: len(job.agents[0].kept) == 2, "the memory of the old ranks to be dropped")


def test_without_any_checkpoint_the_choice_is_none(job: Job) -> None:
    _, ranks = ranks_of(job)
    assert [(c["source"], c["rejected"]) for c in ask(job, ranks)] == [("none", [])] * 2


# -- storage -----------------------------------------------------------------------------------------------------------
def test_a_full_disk_is_said_once_and_the_next_save_succeeds(job: Job) -> None:
    agent, ranks = ranks_of(job)
    assert agent.process is not None
    pid = agent.process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    for step in (1, 2):
        for rank in ranks:
            rank.save(step)
        job.until(lambda s=step: all("failed" in r.saves[s].states for r in ranks), f"step {step}")  # type: ignore[misc]
    assert "limit" in ranks[0].saves[1].why
    said = [n for n in agent.notes if "could not be saved" in n]
    assert len(said) == 1
    assert [r["reason"] for r in agent.records("checkpoint_failed")] == ["quota", "quota"]
    job.until(lambda: not list(job.root.glob("*.partial")), "the remains to be removed")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for rank in ranks:
        rank.save(3)
    job.until(lambda: job.is_durable(ranks, 3), "step 3")
    job.until(lambda: any("durable again" in n for n in agent.notes), "the good news")
    path = agent.run_folder / "live" / "n0.saver.json"
    job.until(lambda: path.exists() and json.loads(path.read_text())["last_durable_step"] == 3, "the figures")
    figures = json.loads(path.read_text())
    assert figures["saves"] == {"in_memory": 0, "durable": 1, "skipped": 0, "failed": 2}
    assert figures["failures"] == {"quota": 2}


def test_a_root_that_is_gone_fails_the_save_and_training_goes_on(job: Job) -> None:
    agent, ranks = ranks_of(job)
    job.root.write_text("not a folder")
    for rank in ranks:
        rank.save(1)
    job.until(lambda: all("failed" in r.saves[1].states for r in ranks), "step 1")
    job.root.unlink()
    for rank in ranks:
        rank.save(2)
    job.until(lambda: job.is_durable(ranks, 2), "step 2")
    assert len(agent.records("checkpoint_failed")) == 1


# -- orders ------------------------------------------------------------------------------------------------------------
def test_by_time_all_ranks_are_told_to_save_at_the_same_step(job: Job) -> None:
    set_options(job, every=Every(seconds=0.5))
    _, ranks = ranks_of(job)
    step = 0

    def train() -> bool:
        nonlocal step
        step += 1
        for rank in ranks:
            assert rank.arena is not None
            rank.arena.control.rank_step = step
            wanted = rank.arena.control.wanted()
            if wanted is not None and wanted.step == step:
                rank.save(step, sorted(t.value for t in wanted.tiers))
        job.hear(0.05)
        return len(complete(job)) >= 2

    job.until(train, "two saves")
    steps = [[s.step for s in r.saves.values()] for r in ranks]
    assert steps[0] == steps[1]


def test_before_a_planned_restart_all_ranks_are_told_to_save_whatever_the_period(job: Job) -> None:
    set_options(job, every=Every(steps=1_000_000))
    agent, ranks = ranks_of(job)
    step, asked_at = 0, 0

    def train() -> bool:
        nonlocal step, asked_at
        step += 1
        if step == 20:
            asked_at = step
            agent.send("save", limit_s=30.0)
        for rank in ranks:
            assert rank.arena is not None
            rank.arena.control.rank_step = step
            wanted = rank.arena.control.wanted()
            if wanted is not None and wanted.step == step:
                rank.save(step, sorted(t.value for t in wanted.tiers))
        job.hear(0.05)
        return bool(agent.heard)

    job.until(train, "the answer")
    steps = [[s.step for s in r.saves.values()] for r in ranks]
    assert steps[0] == steps[1]
    (saved,) = steps[0]
    assert saved > asked_at
    assert agent.heard == [{"op": "saved", "step": saved, "why": "", "fds": []}]
    job.until(lambda: job.is_durable(ranks, saved), "it on disk")


def test_ranks_that_do_not_save_before_a_planned_restart_are_not_waited_for_long(job: Job) -> None:
    agent, ranks = ranks_of(job)
    for rank in ranks:
        assert rank.arena is not None
        rank.arena.control.rank_step = 3
    agent.send("save", limit_s=0.2)
    job.until(lambda: agent.heard, "the answer")
    assert agent.heard == [{"op": "saved", "step": None, "why": "the ranks did not save in time", "fds": []}]
