"""A node with wrong bytes is left out where a spare waits, and training goes on elsewhere from what was right."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from jobs import Job, JobStarter, free_port, open_ports

from steadyrun.ctl.main import main as steadyctl

STEPS, SAVE_EVERY, CHECK_EVERY = 400, 10, 5
PACE_S = "0.15"

pytestmark = [pytest.mark.slow, pytest.mark.deadline(600)]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_node_is_left_out_and_the_spare_goes_on_from_a_verified_checkpoint(
    start: JobStarter, tmp_path: Path
) -> None:
    port = free_port()
    options = ["--nnodes=2:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=sdc"]
    options += ["--nproc-per-node=1", f"--ft-sdc={CHECK_EVERY}"]
    args = ["ddp", STEPS, SAVE_EVERY, tmp_path / "checkpoints"]
    env = {"OMP_NUM_THREADS": "1", "PACE_S": PACE_S}
    jobs: list[Job] = []
    for name in ("agent0", "agent1", "agent2"):
        jobs.append(start("replicas.py", options, args, env=env, name=name, shared=jobs[0] if jobs else None))
    first = jobs[0]
    first.wait_for_step(21, ranks=(0, 1), attempt=0, deadline_s=240)
    agents = {parent_of(pid): rank for rank, pid in first.pids(0).items()}
    guest = next(j for j in jobs if j.process.pid in agents and port not in open_ports([j.process.pid]))
    rank = agents[guest.process.pid]
    step = (first.newest_step(rank) // CHECK_EVERY + 6) * CHECK_EVERY - 1
    fault = f"flip step={step} target=param tensor=first.weight element=3 bit=7"
    assert guest.folder is not None
    err = io.StringIO()
    code = steadyctl(["inject", fault, "--rank", str(rank), "--run", str(guest.folder)], io.StringIO(), err, {})
    assert code == 0, err.getvalue()

    other = next(j for j in jobs if j is not guest)  # the guest may be the first one, which ends
    other.wait_for_step(step + 1, ranks=(0, 1), attempt=1, deadline_s=240)
    assert guest.wait(60) == 83, guest.story()
    found = [i for j in jobs for i in j.incidents()]
    (incident,) = found
    told = incident.verdict["details"]["sdc"]
    assert (told["ranks"], told["cause"], told["first_bad_step"]) == ([rank], "device", step + 1), told
    assert incident.verdict["action"] == "restart_without_node"
    assert incident.verdict["findings"][0]["nodes"] == told["nodes"]
    starts = {e["start"] for e in first.events("resumed") if e["attempt"] == 1}
    assert starts == {told["back_to"] + 1}
    assert told["back_to_is_verified"]
    assert told["back_to"] < step
    for job in jobs:
        job.end()
