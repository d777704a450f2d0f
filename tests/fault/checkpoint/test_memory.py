"""Snapshots in memory that are damaged: found before they are used, named, and something older is used instead."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jobs import Job, JobStarter, state_of

from steadyrun.checkpoint.arena import Arena, SlotState

EVERY = 10
OPTIONS = ["--standalone", "--nproc-per-node=2", "--max-restarts=5", "--ft-standby=off"]


def arenas(saver: int) -> list[Arena]:
    """The snapshot memory of all ranks, through the saver's descriptors; by rank."""
    found: dict[int, Arena] = {}
    for name in os.listdir(f"/proc/{saver}/fd"):
        path = f"/proc/{saver}/fd/{name}"
        if "steadyrun-snapshot" in os.readlink(path):
            arena = Arena.attach(os.open(path, os.O_RDWR))
            if arena.layout.rank in found:
                arena.close()
            else:
                found[arena.layout.rank] = arena
    return [found[rank] for rank in sorted(found)]


def flip(arena: Arena, key: str, slots: str) -> list[int]:
    """Flip one bit of *key* in the newest sealed slot, or in all of them; their steps."""
    sealed = [s for s in arena.slots if s.view().state is SlotState.SEALED]
    sealed.sort(key=lambda s: s.view().generation, reverse=True)
    entry = next(e for e in arena.layout.entries if e.key == key)
    chosen = sealed[:1] if slots == "newest" else sealed
    for slot in chosen:
        view = slot.payload(entry)
        view[len(view) // 2] ^= 0x04
        view.release()
    return [s.view().step for s in chosen]


def damage_and_restart(start: JobStarter, tmp_path: Path, slots: str) -> tuple[Job, list[int]]:
    job = start("checkpointed.py", OPTIONS, [tmp_path / "checkpoints", 1_000_000, 0.05, EVERY])

    def durable() -> bool:
        return len([e for e in job.events("settled", rank=0) if e["state"] == "durable"]) >= 2

    job.wait_for(durable, 90, "two durable saves")
    pids = job.pids(0)
    for pid in pids.values():  # no further save comes between
        os.kill(pid, signal.SIGSTOP)
    job.wait_for(lambda: all(state_of(p) == "T" for p in pids.values()), 20, "the ranks stand still")
    found = arenas(int(job.journal("saver_started")[-1]["pid"]))
    assert len(found) == 2
    steps = flip(found[1], "model.large1", slots)
    for arena in found:
        arena.close()
    assert steps
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    job.wait_for(lambda: len(job.events("resumed", attempt=1)) == 2, 90, "both ranks resume")
    return job, steps


@pytest.mark.parametrize("slots", ["newest", "all"])
def test_a_flipped_bit_in_memory_is_found_and_something_older_is_used(
    start: JobStarter, tmp_path: Path, slots: str
) -> None:
    job, steps = damage_and_restart(start, tmp_path, slots)
    resumed = job.events("resumed", attempt=1)
    assert all(e["wrong"] == 0 for e in resumed), job.story()
    assert len({e["first"] for e in resumed}) == 1, job.story()
    last = max(int(e["step"]) for e in job.events("saved", attempt=0))
    assert resumed[0]["first"] - 1 >= last - EVERY, "what was durable is not lost"
    if slots == "all":
        assert all("from memory" not in e["place"] for e in resumed), job.story()
    restored = job.journal("checkpoint_restored")[-1]
    told = f"{restored['refused']} {job.output}"
    assert "model.large1" in told, told
    assert f"step {max(steps)}" in told or f"'step': {max(steps)}" in told, told
    job.wait_for_step(int(resumed[0]["first"]) + 2 * EVERY, attempt=1)
    job.send(signal.SIGTERM)
    job.wait(60)
