"""Kernel log and GPUs of real jobs: what they tell gets into metrics, incidents and verdicts; nodes find each other."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, JobStarter, free_port
from prometheus_client.parser import text_string_to_metric_families


def live(job: Job) -> dict[str, Any]:
    """The agent's status file; empty before there is one."""
    if job.folder is None:
        return {}
    for path in job.folder.glob("live/*.json"):
        data: dict[str, Any] = json.loads(path.read_text())
        if data.get("agent_pid") == job.process.pid:
            return data
    return {}


def address_of(job: Job) -> str:
    return job.wait_for(lambda: live(job).get("metrics") or "", 60, "the address of the metrics")


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
        return str(answer.read().decode())


def value(address: str, name: str, **labels: str) -> float | None:
    """Of one series, as it is now."""
    for family in text_string_to_metric_families(get(address, "/metrics")):
        for sample in family.samples:
            if sample.name == f"steadyrun_{name}" and sample.labels == labels:
                return float(sample.value)
    return None


def write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(fd, text.encode() + b"\n")
    os.close(fd)


def test_an_xid_before_a_hang_is_its_cause(start: JobStarter, tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    options = ["--nproc-per-node=2", f"--ft-kernel-log={log}", "--ft-out-of-section-timeout=3", "--ft-step-timeout=3"]
    job = start("steps.py", options, [40, 0.05], faults="hang rank=1 step=20")
    address = address_of(job)
    pid = job.wait_for(lambda: job.pids(0).get(1), 60, "rank 1")
    job.wait_for_step(2, ranks=(1,))
    write(log, f"NVRM: Xid (PCI:0000:cb:00): 79, pid={pid}, name=python, GPU has fallen off the bus.")
    job.wait_for(lambda: value(address, "gpu_xid_errors_total", gpu="0000:cb:00", **{"class": "reboot"}), 20, "the Xid")
    incident = job.wait_for_incident(1)
    assert incident.cls == "device_stall"
    assert incident.ranks == [1]
    summary = incident.verdict["findings"][0]["summary"]
    assert "rank 1, GPU 0000:cb:00: Xid 79 (the GPU does not answer on the PCIe bus any more)" in summary
    assert incident.verdict["details"]["kind"] == "device_lost"
    assert job.folder is not None
    (event,) = json.loads((job.folder / "incidents/0001/evidence.json").read_text())["devices"]
    assert (event["event"], event["xid"], event["rank"]) == ("xid", 79, 1)
    (record,) = job.journal("device_event")
    assert record["pid"] == pid
    job.wait_for(lambda: value(address, "restarts_total", trigger="hang"), 30, "the restart to be counted")
    assert value(address, "hangs_total", kind="no_progress") == 1.0
    assert (value(address, "rank_hung_last_timestamp_seconds", rank="1") or 0) > 0
    assert job.wait(120) == 0


def test_two_nodes_find_each_other_and_clean_up(start: JobStarter, tmp_path: Path) -> None:
    port, sd, text = free_port(), tmp_path / "sd", tmp_path / "text"
    options = ["--nnodes=2:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=seen"]
    options += ["--nproc-per-node=1", f"--ft-metrics-sd-dir={sd}", f"--ft-metrics-textfile={text}"]
    first = start("steps.py", options, [400, 0.05], name="agent0")
    second = start("steps.py", options, [400, 0.05], name="agent1", shared=first)
    addresses = [address_of(first), address_of(second)]

    def listed() -> list[dict[str, Any]]:
        return max((json.loads(get(a, "/sd")) for a in addresses), key=len)

    found = first.wait_for(lambda: len(listed()) == 2 and listed(), 60, "both nodes in discovery")
    assert sorted(t["targets"][0] for t in found) == sorted(addresses)
    assert [t["labels"] for t in found] == [{"run_id": "seen", "node_rank": str(r)} for r in range(2)]

    def files() -> list[dict[str, Any]]:
        return [t for path in sd.glob("*.json") for t in json.loads(path.read_text())]

    first.wait_for(lambda: len(files()) == 2, 30, "both files")
    first.wait_for(lambda: {t["labels"].get("node_rank") for t in files()} == {"0", "1"}, 30, "their ranks")
    leaders = [a for a in addresses if value(a, "job_world_size") is not None]
    assert len(leaders) == 1
    assert {value(a, "rank_alive", rank=r) for a, r in zip(addresses, "01", strict=True)} <= {1.0, None}
    for job in (first, second):
        assert job.wait(120) == 0
    assert list(sd.iterdir()) == []
    assert list(text.iterdir()) == []


def test_a_port_that_is_taken_does_not_keep_a_job_from_running(start: JobStarter) -> None:
    job = start("steps.py", ["--nproc-per-node=1", "--ft-metrics-addr=203.0.113.1:9400"], [3, 0.01])
    assert job.wait(60) == 0
    assert "metrics are not served: cannot listen on 203.0.113.1:9400" in job.output


@pytest.mark.slow
def test_a_driver_that_hangs_leaves_the_agent_alive(start: JobStarter, tmp_path: Path, nvml_library: Path) -> None:
    state, events = tmp_path / "state", tmp_path / "events"
    state.write_text("count = 2\n")
    events.write_text("")
    env = {"LD_LIBRARY_PATH": str(nvml_library), "NVML_STUB_STATE": str(state), "NVML_STUB_EVENTS": str(events)}
    job = start("steps.py", ["--nproc-per-node=2"], [800, 0.05], env=env)
    address = address_of(job)
    job.wait_for(lambda: value(address, "gpu_up", gpu="1"), 60, "the GPUs")
    info = {"rank": "1", "local_rank": "1", "gpu": "1"}
    job.wait_for(lambda: value(address, "rank_info", **info), 30, "the GPU of rank 1")
    with state.open("a") as f:
        f.write("gpu.1.delay_ms.nvmlDeviceGetPowerUsage = 30000\n")
    job.wait_for(lambda: value(address, "collector_healthy", collector="nvml") == 0.0, 30, "the hang to be told")
    assert "the driver does not answer (nvmlDeviceGetPowerUsage of GPU 1)" in job.output
    step = job.newest_step()
    job.wait_for_step(step + 20)
    assert job.wait(120) == 0
