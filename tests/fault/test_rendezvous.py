"""Several agents on one machine: static and c10d rendezvous restart together, surplus agents wait as spares."""

from __future__ import annotations

import os
import signal
import uuid

from jobs import Job, JobStarter, free_port

STEPS = 400


def check_both_restarted(jobs: list[Job], ranks: int) -> None:
    """All ranks of all agents went into attempt 1, with the same number and on one fresh store."""
    first = jobs[0]
    first.wait_for_step(-1, ranks=range(ranks), attempt=1, deadline_s=90)
    starts = first.events("start", attempt=1)
    assert sorted(e["rank"] for e in starts) == list(range(ranks)), first.story()
    for job in jobs:
        assert job.wait(90) == 0, job.story()
    assert {e["attempt"] for e in first.events("start")} == {0, 1}
    assert [first.newest_step(r) for r in range(ranks)] == [STEPS - 1] * ranks


def start_two(start: JobStarter, options: list[list[str]], script: str = "steps.py") -> list[Job]:
    first = start(script, options[0], [STEPS, 0.02], name="agent0")
    return [first, start(script, options[1], [STEPS, 0.02], shared=first, name="agent1")]


def test_static_rendezvous_restarts_both_nodes_when_one_loses_a_rank(start: JobStarter) -> None:
    port = free_port()
    options = [
        ["--nnodes=2", f"--node-rank={n}", "--master-addr=127.0.0.1", f"--master-port={port}", "--nproc-per-node=1"]
        for n in range(2)
    ]
    jobs = start_two(start, options)
    jobs[0].wait_for_step(30, ranks=(0, 1))
    os.kill(jobs[0].pids(0)[1], signal.SIGKILL)
    check_both_restarted(jobs, 2)
    leaders = [i for i in jobs[0].incidents() if i.ranks == [1]]
    assert leaders, jobs[0].story()
    assert leaders[0].cls == "dead_process"


def test_c10d_rendezvous_restarts_both_nodes_when_one_loses_a_rank(start: JobStarter) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = [
        ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={uuid.uuid4().hex[:8]}"]
    ] * 2
    jobs = start_two(start, [[*o, "--nproc-per-node=1"] for o in options])
    jobs[0].wait_for_step(30, ranks=(0, 1))
    os.kill(jobs[0].pids(0)[0], signal.SIGKILL)
    check_both_restarted(jobs, 2)


def test_a_surplus_agent_waits_as_a_spare_and_ends_with_the_job(start: JobStarter) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["--nnodes=1:1", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=spare"]
    options += ["--nproc-per-node=1"]
    first = start("steps.py", options, [STEPS, 0.02], name="agent0")
    first.wait_for_step(5)
    spare = start("steps.py", options, [STEPS, 0.02], shared=first, name="spare")
    assert first.wait(90) == 0, first.story()
    assert spare.wait(60) == 0, spare.story()
    assert len(first.events("start")) == 1, "the spare has started no rank"
    assert first.newest_step() == STEPS - 1


def test_a_restart_goes_on_while_a_spare_waits(start: JobStarter) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["--nnodes=1:1", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=spare"]
    options += ["--nproc-per-node=1"]
    first = start("steps.py", options, [STEPS, 0.02], name="agent0")
    first.wait_for_step(5)
    spare = start("steps.py", options, [STEPS, 0.02], shared=first, name="spare")
    os.kill(first.pids()[0], signal.SIGKILL)
    assert first.wait(90) == 0, first.story()
    assert spare.wait(60) == 0, spare.story()
    assert first.newest_step() == STEPS - 1
