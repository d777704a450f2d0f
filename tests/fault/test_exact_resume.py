"""A killed run goes on exactly as if nothing had happened: from memory, from disk, and on another number of ranks."""

from __future__ import annotations

import os
import random
import signal
import uuid
from pathlib import Path

import pytest
from jobs import Job, JobStarter, command, free_port

from steadyrun.checkpoint.catalog import look

FORMS = {"ddp": 2, "fsdp2": 2, "hsdp": 4, "tpdp": 4}
STEPS = 40
EVERY = 5


def losses(job: Job) -> dict[tuple[int, int], set[tuple[float, float, int]]]:
    """By rank and step: every loss that was seen there."""
    found: dict[tuple[int, int], set[tuple[float, float, int]]] = {}
    for e in job.events("step"):
        found.setdefault((e["rank"], e["step"]), set()).add((e["loss"], e["own"], e["seen"]))
    return found


def train(start: JobStarter, form: str, ranks: int, folder: Path, **env: str) -> Job:
    options = ["--standalone", f"--nproc-per-node={ranks}"]
    return start("exact.py", options, [form, STEPS, EVERY, folder], env={"OMP_NUM_THREADS": "1", **env})


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Job]:
    """Jobs by parallel form that nothing happened to; filled by those who need one."""
    return {}


def reference(start: JobStarter, done: dict[str, Job], form: str, tmp_path: Path) -> Job:
    if form not in done:
        job = train(start, form, FORMS[form], tmp_path / "undisturbed")
        assert job.wait(240) == 0, job.story()
        done[form] = job
    return done[form]


@pytest.mark.deadline(600)
@pytest.mark.parametrize(
    "form", ["ddp", "fsdp2", *(pytest.param(form, marks=pytest.mark.slow) for form in ("hsdp", "tpdp"))]
)
def test_losses_after_a_kill_are_bitwise_those_of_an_undisturbed_run(
    start: JobStarter, undisturbed: dict[str, Job], form: str, tmp_path: Path
) -> None:
    """First a restart within the job, from memory; then, with memory gone, a second job from the folder."""
    alone = reference(start, undisturbed, form, tmp_path)
    seed = int.from_bytes(os.urandom(4), "little")
    draw = random.Random(seed)
    folder, ranks = tmp_path / "disturbed", FORMS[form]

    job = train(start, form, ranks, folder, EXACT_PACE_S="0.05")
    job.wait_for_step(draw.randint(EVERY + 1, 15), ranks=range(ranks), deadline_s=120)
    os.kill(job.pids()[draw.randrange(ranks)], signal.SIGKILL)
    job.wait_for_step(-1, ranks=range(ranks), attempt=1, deadline_s=120)
    first = [e for e in job.events("resumed") if e["attempt"] == 1]
    assert all("from memory" in e["source"] for e in first), (seed, first)
    assert {e["start"] % EVERY for e in first} == {0}
    assert min(e["start"] for e in first) > 0
    job.wait_for_step(draw.randint(22, 30), ranks=range(ranks), attempt=1, deadline_s=120)
    job.process.send_signal(signal.SIGKILL)  # all of it: what is not on the disk by now is gone
    job.process.wait(30)

    again = train(start, form, ranks, folder)
    assert again.wait(240) == 0, again.story()
    second = again.events("resumed")
    assert all(str(folder) in e["source"] and e["start"] >= 15 for e in second), (seed, second)

    expected, seen = losses(alone), losses(job)
    for key, found in losses(again).items():
        seen.setdefault(key, set()).update(found)
    assert seen == expected, f"seed {seed}"


@pytest.mark.slow
@pytest.mark.deadline(600)
def test_another_number_of_ranks_goes_on_within_float_tolerance(start: JobStarter, tmp_path: Path) -> None:
    """FSDP2 on 4 ranks, then 2, then 3; every rank sees the same batch, so that the losses are comparable."""
    alone = train(start, "fsdp2", 4, tmp_path / "alone", EXACT_WORLD_FREE="1")
    assert alone.wait(240) == 0, alone.story()
    expected = {e["step"]: e["loss"] for e in alone.events("step")}

    folder = tmp_path / "reshaped"
    seen: dict[int, float] = {}
    for ranks, until in ((4, 15), (2, 27), (3, STEPS)):
        job = start(
            "exact.py",
            ["--standalone", f"--nproc-per-node={ranks}"],
            ["fsdp2", until, EVERY, folder],
            env={"OMP_NUM_THREADS": "1", "EXACT_WORLD_FREE": "1", "EXACT_SAVE_LAST": "1", "EXACT_TOTAL": str(STEPS)},
        )
        assert job.wait(240) == 0, job.story()
        assert {e["start"] for e in job.events("resumed")} == {max(seen, default=-1) + 1}
        seen |= {e["step"]: e["loss"] for e in job.events("step")}
    assert sorted(seen) == list(range(STEPS))
    for step, loss in seen.items():
        assert loss == pytest.approx(expected[step], rel=1e-4, abs=1e-5), f"step {step}"


@pytest.mark.deadline(600)
def test_two_nodes_resume_together_from_the_memory_of_both(
    start: JobStarter, undisturbed: dict[str, Job], tmp_path: Path
) -> None:
    """Each agent has its own saver; they agree over the store of the attempt, also on what is committed."""
    alone = reference(start, undisturbed, "ddp", tmp_path)
    folder = tmp_path / "checkpoints"
    options = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--nproc-per-node=1"]
    options.append(f"--rdzv-id={uuid.uuid4().hex[:8]}")
    arguments, env = ["ddp", STEPS, EVERY, folder], {"EXACT_PACE_S": "0.05"}
    first = start("exact.py", options, arguments, env=env, name="agent0")
    second = start("exact.py", options, arguments, env=env, shared=first, name="agent1")
    first.wait_for_step(EVERY + 2, ranks=(0, 1), deadline_s=120)
    os.kill(first.pids()[1], signal.SIGKILL)
    for job in (first, second):
        assert job.wait(180) == 0, job.story()
    again = [e for e in first.events("resumed") if e["attempt"] == 1]
    assert len(again) == 2
    assert all("from memory" in e["source"] and e["start"] >= EVERY for e in again), again
    assert losses(first) == losses(alone)
    complete = look(folder).complete
    assert max(c.step for c in complete) == STEPS - 1
    assert not look(folder).partials


def test_a_run_without_steadyrun_saves_and_resumes_too(start: JobStarter, tmp_path: Path) -> None:
    """Under torchrun the ranks write by themselves; steadyrun then goes on from what they wrote."""
    folder = tmp_path / "checkpoints"
    first = start(
        "exact.py",
        ["--standalone", "--nproc-per-node=2"],
        ["ddp", 20, EVERY, folder],
        env={"OMP_NUM_THREADS": "1", "EXACT_TOTAL": str(STEPS)},
        program=[command("torchrun")],
    )
    assert first.wait(240) == 0, first.output
    assert {e["active"] for e in first.events("resumed")} == {False}
    second = train(start, "ddp", 2, folder)
    assert second.wait(240) == 0, second.story()
    assert {e["start"] for e in second.events("resumed")} == {20}
    alone = train(start, "ddp", 2, tmp_path / "alone")
    assert alone.wait(240) == 0, alone.story()
    seen = losses(first)
    for key, found in losses(second).items():
        seen.setdefault(key, set()).update(found)
    assert seen == losses(alone)
