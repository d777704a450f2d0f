"""Slow ranks of jobs of several nodes: agents that tell each other, one that is stopped, restarts, and a spare.

The ranks are without torch and tell paces on order (scripts/told_paces.py); agents, store and rendezvous are real.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, JobStarter, free_port, open_ports, state_of

ENDLESS = 100_000
PACE_S = 0.01
PER_NODE = 3
SAVED_EVERY = 20
LEARNED = 150  # steps that are enough to know what is normal, and for an agent to have told of some
ACT = "--ft-straggler-action=checkpoint-restart-exclude"
HALF = 0.9  # more in forward: nearly half of a rank's own work


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def order(job: Job, **slow: dict[int, float]) -> None:
    """From now on *rank* or *agent* (by pid) is slower by a share; nobody else."""
    new = job.events_dir / "slow.new"
    new.write_text(json.dumps(slow))
    new.replace(job.events_dir / "slow.json")


def static_nodes(start: JobStarter, nodes: int = 2) -> list[Job]:
    """Node 0 leads; ranks are numbered in the order of the nodes."""
    port = free_port()
    jobs: list[Job] = []
    for n in range(nodes):
        options = [f"--nnodes={nodes}", f"--node-rank={n}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        options.append(f"--nproc-per-node={PER_NODE}")
        shared = jobs[0] if jobs else None
        jobs.append(start("told_paces.py", options, [ENDLESS, PACE_S], name=f"node{n}", shared=shared))
    return jobs


def elastic_nodes(start: JobStarter, port: int, names: Sequence[str], shared: Job | None = None) -> list[Job]:
    """Two nodes are wanted; who comes later is a spare."""
    options = ["--nnodes=2:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=paces"]
    options += [f"--nproc-per-node={PER_NODE}", ACT]
    jobs: list[Job] = []
    for name in names:
        first = jobs[0] if jobs else shared
        jobs.append(start("told_paces.py", options, [ENDLESS, PACE_S], name=name, shared=first))
    return jobs


def ranks_of(job: Job, attempt: int = 0) -> list[int]:
    """Ranks that this agent has started."""
    return sorted(r for r, pid in job.pids(attempt).items() if parent_of(pid) == job.process.pid)


def node_of(job: Job) -> str:
    assert job.folder is not None
    return next(p.stem for p in job.folder.glob(f"journal/*-{job.process.pid}.jsonl"))


def told(jobs: Sequence[Job], event: str | None = None, **of_alarm: Any) -> list[dict[str, Any]]:
    """What the journals of all nodes say of slow ranks, in order of time."""
    records = [r for job in jobs for r in job.journal("straggler") if event in (None, r["event"])]
    records = [r for r in records if all(r["alarm"][k] == v for k, v in of_alarm.items())]
    return sorted(records, key=lambda r: float(r["at_s"]))


def wait_for(jobs: Sequence[Job], what: Callable[[], Any], text: str, deadline_s: float = 60) -> Any:
    def all_said() -> str:
        return "\n".join(f"--- {j.output_path.parent.name}\n{j.output}" for j in jobs[1:])

    try:
        return jobs[0].wait_for(what, deadline_s, text)
    except AssertionError as e:
        raise AssertionError(f"{e}\n{told(jobs)}\n{all_said()}") from None


def learn(jobs: Sequence[Job], ranks: int, attempt: int = 0, after: int = 0) -> None:
    jobs[0].wait_for_step(after + LEARNED, range(ranks), attempt)


def end(jobs: Sequence[Job]) -> None:
    """By a signal to the first: the nodes leave together."""
    jobs[0].send(signal.SIGTERM)
    for job in jobs:
        assert job.wait(60) != 0, job.story()


# -- one job of two nodes ----------------------------------------------------------------------------------------------
@pytest.mark.deadline(240)
def test_nodes_agree_on_who_is_slow_whatever_happens_to_an_agent(start: JobStarter) -> None:
    """One course: a slow rank of the other node, an agent that is stopped, and a restart while a rank is slow."""
    jobs = static_nodes(start)
    leader, other = jobs
    learn(jobs, 2 * PER_NODE)

    # A rank of the other node is named, with its node.
    order(leader, rank={4: HALF})
    (began,) = wait_for(jobs, lambda: told(jobs, "began"), "rank 4 is named")
    alarm = began["alarm"]
    assert (alarm["kind"], alarm["ranks"], alarm["node"]) == ("rank", [4], node_of(other))
    assert (alarm["phase"], began["node"]) == ("forward", node_of(leader))
    (pace,) = leader.events("pace", rank=4)
    assert abs(alarm["first_step"] - pace["step"]) <= 10
    assert f"slow: rank 4 on {node_of(other)} takes" in leader.output
    assert "slow:" not in other.output
    (incident,) = leader.incidents()
    assert (incident.cls, incident.ranks, incident.verdict["action"]) == ("straggler", [4], "report")
    assert incident.verdict["findings"][0]["nodes"] == [node_of(other)]
    order(leader)
    wait_for(jobs, lambda: told(jobs, "ended", ranks=[4]), "it is over")

    # Its agent is stopped: the leader's ranks are still compared, and all ranks go on.
    other.send(signal.SIGSTOP)
    wait_for(jobs, lambda: state_of(other.process.pid) == "T", "the agent is stopped")
    stopped_at = leader.newest_step(rank=4)
    order(leader, rank={1: HALF})
    wait_for(jobs, lambda: told(jobs, "began", ranks=[1]), "rank 1 is named without the other node")
    leader.wait_for_step(stopped_at + 100, range(2 * PER_NODE))
    other.send(signal.SIGCONT)
    order(leader)
    wait_for(jobs, lambda: told(jobs, "ended", ranks=[1]), "it is over")
    again = leader.newest_step()
    leader.wait_for_step(again + LEARNED, range(2 * PER_NODE))
    assert [r["alarm"]["ranks"] for r in told(jobs, "began")] == [[4], [1]], "who was silent is not slow"
    assert len(leader.events("start")) == 2 * PER_NODE, leader.story()

    # A rank dies while another is slow: that alarm is closed with its attempt, and found again in the next.
    order(leader, rank={5: HALF})
    wait_for(jobs, lambda: told(jobs, "began", ranks=[5]), "rank 5 is named")
    os.kill(leader.pids(0)[2], signal.SIGKILL)
    (lasts,) = wait_for(jobs, lambda: told(jobs, "lasts"), "the attempt ends with its alarm")
    assert (lasts["alarm"]["ranks"], lasts["attempt"]) == ([5], 0)
    assert lasts["alarm"]["lost_s"] > 0
    second = wait_for(jobs, lambda: told(jobs, "began", ranks=[5])[1:], "rank 5 is named again")[0]
    assert second["attempt"] == 1
    assert second["incident"] == lasts["incident"], "who comes again soon has its incident already"
    assert second["alarm"]["first_step"] > min(e["first"] for e in leader.events("start", attempt=1)) + 20
    end(jobs)


def check_resumed(job: Job) -> int:
    """Attempt 1 has begun where each rank had saved; the first step of all."""
    saved = {e["rank"]: e["step"] for e in job.events("step", attempt=0)}
    firsts = {e["rank"]: e["first"] for e in job.events("start", attempt=1)}
    assert firsts.keys() == saved.keys()
    assert all(firsts[r] - s - 1 in (0, SAVED_EVERY) for r, s in saved.items()), "a rank may be ended before it tells"
    return min(firsts.values())


# -- acting ------------------------------------------------------------------------------------------------------------
def job_with_a_spare(start: JobStarter) -> tuple[Job, Job, Job]:
    """Two agents and one that waits: the one that serves the rendezvous, its guest, the spare."""
    port = free_port()
    jobs = elastic_nodes(start, port, ["agent0", "agent1"])
    jobs[0].wait_for_step(0, range(2 * PER_NODE), 0)
    (spare,) = elastic_nodes(start, port, ["spare"], jobs[0])
    spare.wait_for(lambda: "waits as a spare" in spare.output, 60, "the third agent is a spare")
    guest = next(j for j in jobs if port not in open_ports([j.process.pid]))
    (host,) = (j for j in jobs if j is not guest)
    learn(jobs, 2 * PER_NODE, after=host.newest_step())
    return host, guest, spare


@pytest.mark.deadline(240)
def test_a_slow_node_is_left_out_and_a_spare_goes_on_from_the_checkpoint(start: JobStarter) -> None:
    host, bad, spare = jobs = job_with_a_spare(start)
    name = node_of(bad)
    order(host, agent={bad.process.pid: HALF})
    (act,) = wait_for(jobs, lambda: told(jobs, "act"), "acting pays")
    wait_for(jobs, lambda: host.events("step", attempt=1), "the spare has taken the place")
    assert (act["alarm"]["kind"], act["alarm"]["node"]) == ("node", name)
    assert act["alarm"]["lost_s"] > 0
    assert " lost, " in act["summary"]
    said = f"restarting without node {name}, as others can take its place"
    assert sum(said in j.output for j in jobs) == 1

    assert bad.wait(30) == 83, bad.story()
    assert "this node is excluded" in bad.output
    host.wait_for_step(0, range(2 * PER_NODE), 1)
    assert [len(ranks_of(j, 1)) for j in (host, spare)] == [PER_NODE, PER_NODE]
    first = check_resumed(host)
    assert first > LEARNED
    marks = {(m["node"], m["kind"], m["why"]) for m in scores_of(host)["marks"]}
    assert (name, "slow", "excluded") in marks
    learn([host], 2 * PER_NODE, 1, first)
    assert told(jobs, "began")[-1]["attempt"] == 0, "nobody is slow any more"
    end([host, spare])


def scores_of(job: Job) -> dict[str, Any]:
    assert job.folder is not None
    return dict(json.loads((job.folder / "state" / "node_scores.json").read_text()))


@pytest.mark.slow
@pytest.mark.deadline(240)
def test_the_rendezvous_host_is_restarted_in_place_though_there_is_a_spare(start: JobStarter) -> None:
    host, guest, spare = jobs = job_with_a_spare(start)
    order(host, agent={host.process.pid: HALF})
    wait_for(jobs, lambda: told(jobs, "act"), "acting pays")
    host.wait_for_step(0, range(2 * PER_NODE), 1)
    said = f"{node_of(host)} hosts the rendezvous: restarting in place, once"
    assert sum(said in j.output for j in jobs) == 1
    assert [len(ranks_of(j, 1)) for j in jobs] == [PER_NODE, PER_NODE, 0]
    end([host, guest])
    spare.wait(60)


@pytest.mark.slow
@pytest.mark.deadline(240)
def test_without_a_spare_it_is_restarted_in_place_once(start: JobStarter) -> None:
    options = ["--standalone", f"--nproc-per-node={PER_NODE + 1}", ACT]
    job = start("told_paces.py", options, [ENDLESS, PACE_S])
    learn([job], PER_NODE + 1)
    order(job, rank={2: HALF})
    (act,) = wait_for([job], lambda: told([job], "act"), "acting pays")
    assert act["alarm"]["ranks"] == [2]
    job.wait_for_step(0, range(PER_NODE + 1), 1)
    assert "; no spare is there: restarting in place, once" in job.output
    check_resumed(job)
    assert [i.verdict["action"] for i in job.incidents()] == ["report"], "a restart that was planned is no fault"

    # It stays slow, and another one is: nothing more is done, and that is said.
    order(job, rank={2: HALF, 1: HALF})
    wait_for([job], lambda: "a restart in place has been tried" in job.output, "it is said that it was tried")
    assert [r["alarm"]["ranks"] for r in told([job], "act")] == [[2], [1]]
    at = job.newest_step()
    job.wait_for_step(at + LEARNED, range(PER_NODE + 1), 1)
    end([job])


@pytest.mark.slow
@pytest.mark.deadline(240)
def test_ranks_save_before_they_are_restarted_without_a_fault(start: JobStarter, tmp_path: Path) -> None:
    """What they have trained since the last checkpoint is not lost, however long its period is."""
    # Paces are those that the script tells: the checkpointer brings torch, and with it measured ones.
    options = ["--standalone", f"--nproc-per-node={PER_NODE}", ACT, "--ft-timing=off"]
    env = {"CHECKPOINTS": str(tmp_path / "checkpoints")}
    job = start("told_paces.py", options, [ENDLESS, PACE_S], env=env)
    learn([job], PER_NODE)
    order(job, rank={2: HALF})
    job.wait_for(lambda: len(job.events("start", attempt=1)) == PER_NODE, 120, "the restart")
    (saved,) = {e["step"] for e in job.events("saved", attempt=0)}
    assert f"steadyrun: step {saved} is saved for the restart" in job.output
    assert {e["first"] for e in job.events("start", attempt=1)} == {saved + 1}
    assert saved > LEARNED
    end([job])


@pytest.mark.slow
@pytest.mark.deadline(240)
def test_who_only_observes_says_what_would_pay(start: JobStarter) -> None:
    options = ["--standalone", f"--nproc-per-node={PER_NODE}", ACT, "--ft-mode=observe"]
    job = start("told_paces.py", options, [ENDLESS, PACE_S])
    learn([job], PER_NODE)
    order(job, rank={2: HALF})
    wait_for([job], lambda: "a restart would pay (mode observe: nothing is done)" in job.output, "it is said")
    at = job.newest_step()
    job.wait_for_step(at + LEARNED, range(PER_NODE), 0)
    assert len(job.events("start")) == PER_NODE
    end([job])
