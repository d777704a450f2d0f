"""A node whose ranks die again and again: it is told apart from the others, and left out once a spare is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, JobStarter, command, free_port, open_ports

STEPS = 1000
WHILE_A_SPARE_COMES = 3000  # a job of 20 s could be over before a busy machine has started a third agent
UNTIL_IT_IS_KNOWN = 400  # steps, 8 s: the agents hear of a spare with torch's next heartbeat, which is one each 5 s


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def start_nodes(
    start: JobStarter, port: int, names: list[str], shared: Job | None = None, steps: int = STEPS
) -> list[Job]:
    options = ["--nnodes=2:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=score"]
    options += ["--nproc-per-node=1"]
    jobs: list[Job] = []
    for name in names:
        first = jobs[0] if jobs else shared
        jobs.append(start("steps.py", options, [steps, 0.02], name=name, shared=first))
    return jobs


def guest_of(jobs: list[Job], port: int) -> Job:
    """An agent that takes part and does not serve the rendezvous: that one can be left out."""
    jobs[0].wait_for_step(0, ranks=(0, 1), attempt=0)
    agents = {parent_of(pid) for pid in jobs[0].pids(0).values()}
    return next(j for j in jobs if j.process.pid in agents and port not in open_ports([j.process.pid]))


def kill_rank_of(job: Job, attempt: int) -> None:
    """This agent's only rank, once both ranks have done a step."""
    job.wait_for_step(0, ranks=(0, 1), attempt=attempt)
    (mine,) = [pid for pid in job.pids(attempt).values() if parent_of(pid) == job.process.pid]
    os.kill(mine, signal.SIGKILL)


def node_of(job: Job) -> str:
    assert job.folder is not None
    return next(p.stem for p in job.folder.glob(f"journal/*-{job.process.pid}.jsonl"))


def scores_of(job: Job) -> dict[str, Any]:
    assert job.folder is not None
    return dict(json.loads((job.folder / "state" / "node_scores.json").read_text()))


def test_a_node_that_fails_twice_is_told_as_a_repeat_offender(start: JobStarter) -> None:
    port = free_port()
    jobs = start_nodes(start, port, ["agent0", "agent1"])
    bad = guest_of(jobs, port)
    for attempt in (0, 1):
        kill_rank_of(bad, attempt)
    jobs[0].wait_for_step(0, ranks=(0, 1), attempt=2)
    name = node_of(bad)
    told = [line for job in jobs for line in job.output.splitlines() if "a repeat offender, test it" in line]
    assert len(told) == 1, jobs[0].story()
    assert f"node {name} (2 times crash) has score" in told[0]
    for job in jobs:  # every node writes down what all know
        first, second = scores_of(job)["nodes"]
        assert (first["node"], first["is_over"]) == (name, True)
        assert (second["score"], second["is_over"]) == (0, False)
    verdict = max((i.verdict for job in jobs for i in job.incidents()), key=lambda v: int(v["attempt"]))
    assert verdict["action"] == "restart"
    assert verdict["details"]["kind"] == "crash"
    assert told[0].endswith(verdict["details"]["notes"][0])
    assert "should be left out (a repeat offender), but no spare is there" in verdict["reason"]
    assert bad.folder is not None
    done = subprocess.run([command("steadyctl"), "status", str(bad.folder), "--once"], capture_output=True, text=True)
    assert f"node {name} (2 times crash) has score" in " ".join(done.stdout.split()), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.deadline(300)
def test_a_repeat_offender_is_left_out_and_a_spare_takes_its_place(start: JobStarter) -> None:
    port = free_port()
    jobs = start_nodes(start, port, ["agent0", "agent1"], steps=WHILE_A_SPARE_COMES)
    bad = guest_of(jobs, port)
    spare = start_nodes(start, port, ["spare"], jobs[0], WHILE_A_SPARE_COMES)[0]
    spare.wait_for(lambda: "waits as a spare" in spare.output, 60, "the third agent is a spare")
    good = next(j for j in jobs if j is not bad)
    good.wait_for_step(good.newest_step() + UNTIL_IT_IS_KNOWN, ranks=(0, 1), attempt=0)
    kill_rank_of(bad, 0)
    kill_rank_of(bad, 1)
    killed_s = time.monotonic()
    good.wait_for_step(0, ranks=(0, 1), attempt=2)
    assert time.monotonic() - killed_s < 15, good.story()  # without stepping out the others would miss it for 15 s
    assert {parent_of(pid) for pid in good.pids(2).values()} == {good.process.pid, spare.process.pid}
    assert bad.wait(30) == 83, bad.story()
    assert "this node is excluded" in bad.output
    assert [job.wait(150) for job in (good, spare)] == [0, 0], good.story()
    for job in (good, spare):
        why = {(m["node"], m["why"]) for m in scores_of(job)["marks"]}
        assert why == {(node_of(bad), "blamed"), (node_of(bad), "excluded")}
