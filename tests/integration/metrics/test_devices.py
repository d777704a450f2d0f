"""Kernel log, GPUs and the rest beside a loop that never waits for them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadyrun.collectors.gpumap import RankProcess
from steadyrun.collectors.host.space import Folder
from steadyrun.node.devices import DevicesPlan

# What a loaded machine may take from a call by giving its cores to others; a call that waited for a device would take
# seconds.
MOST_S = 1.0


class Gpus:
    """The stand-in's state: eight GPUs, whatever the test adds."""

    def __init__(self, folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state, self.events = folder / "state", folder / "events"
        self.state.write_text("count = 8\ngpu.*.util = 98\ngpu.*.clock_events = 0\n")
        self.events.write_text("")
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
        monkeypatch.setenv("NVML_STUB_STATE", str(self.state))
        monkeypatch.setenv("NVML_STUB_EVENTS", str(self.events))

    def set(self, *lines: str) -> None:
        with self.state.open("a") as f:
            f.write("\n".join(lines) + "\n")


@pytest.fixture
def gpus(tmp_path: Path, nvml_library: Path, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(tmp_path, nvml_library, monkeypatch)


@pytest.fixture
def kernel_log(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    return path


def write(path: Path, text: str) -> None:
    """Whoever reads a FIFO holds it open for writing too, so that this never blocks."""
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(fd, text.encode() + b"\n")
    os.close(fd)


def test_an_xid_of_a_ranks_gpu_is_a_record_a_line_and_a_metric(
    start_loop: Callable[[DevicesPlan], Any], gpus: Gpus, kernel_log: Path
) -> None:
    loop = start_loop(DevicesPlan(kernel_log))
    ranks = {8 + i: RankProcess(4000 + i, i, {"LOCAL_RANK": str(i)}) for i in range(8)}
    loop.devices.take_ranks(ranks)
    loop.until(lambda: loop.devices.gpu_of(11) is not None, "the GPU of rank 11")
    assert loop.devices.gpu_of(11) == "GPU 3 (0000:48:00)"
    write(kernel_log, "NVRM: Xid (PCI:0000:48:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    loop.until(lambda: loop.told("device_event"), "the event")
    (event,) = loop.told("device_event")
    assert (event["rank"], event["gpu"], event["xid"], event["cls"]) == (11, 3, 79, "reboot")
    assert loop.values.get("gpu_xid_errors_total", "3", "reboot") == 1.0
    assert loop.values.get("gpu_xid_errors_total", "2", "reboot") == 0.0
    assert loop.values.get("gpu_xid_last_timestamp_seconds", "3", "79") == pytest.approx(time.time(), abs=60)
    assert any(line.startswith("steadyrun: n0: rank 11, GPU 3 Xid 79 0000:48:00") for line in loop.said)
    (found,) = [e for e in loop.devices.evidence(time.monotonic() - 600) if e.event == "xid"]
    assert (found.rank, found.gpu, found.node) == (11, 3, "n0")


def test_a_call_of_the_driver_that_hangs_is_told_and_holds_nobody_up(
    start_loop: Callable[[DevicesPlan], Any], gpus: Gpus, kernel_log: Path
) -> None:
    loop = start_loop(DevicesPlan(kernel_log))
    loop.until(lambda: loop.values.get("gpu_up", "7") == 1.0, "all GPUs")
    gpus.set("gpu.3.delay_ms.nvmlDeviceGetPowerUsage = 30000")
    loop.until(lambda: loop.values.get("collector_healthy", "nvml") == 0.0, "the hang to be noticed")
    loop.until(lambda: any("driver does not answer" in line for line in loop.said), "the line")
    standing = [e for e in loop.devices.evidence(0.0) if e.source == "nvml"]
    assert "nvmlDeviceGetPowerUsage of GPU 3" in standing[0].meaning
    assert loop.longest_s < MOST_S
    write(
        kernel_log, "Out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB"
    )
    loop.until(lambda: loop.told("device_event"), "an event while the driver hangs", limit_s=10.0)


FAULTS: dict[str, tuple[str, tuple[str, ...], float]] = {
    "gpu.3.lost = 1": ("gpu_up", ("3",), 0.0),
    "gpu.3.field.230 = 1": ("gpu_recovery_action", ("3",), 1.0),
    "gpu.3.ecc.vol.unc = 2": ("gpu_ecc_errors_total", ("3", "uncorrected"), 2.0),
    "gpu.3.clock_events = 0x48": ("gpu_clock_event_active", ("3", "hw_thermal"), 1.0),
    "gpu.3.nvlink.9.state = 0": ("gpu_nvlink_active_links", ("3",), 17.0),
    "gpu.3.pcie_width = 8": ("gpu_pcie_link_width", ("3",), 8.0),
}


def test_each_fault_of_a_gpu_has_its_metric(
    start_loop: Callable[[DevicesPlan], Any], gpus: Gpus, kernel_log: Path
) -> None:
    gpus.set(*(line.replace("gpu.3.", f"gpu.{i}.") for i, line in enumerate(FAULTS)))
    loop = start_loop(DevicesPlan(kernel_log))
    for i, (name, labels, value) in enumerate(FAULTS.values()):
        mine = (str(i), *labels[1:])
        loop.until(lambda n=name, m=mine, v=value: loop.values.get(n, *m) == v, f"{name} of GPU {i} to be {value}")
    assert loop.values.get("gpu_up", "7") == 1.0


def test_what_is_missing_is_said_once_and_costs_nothing(
    start_loop: Callable[[DevicesPlan], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # no journalctl
    loop = start_loop(DevicesPlan(tmp_path / "no-kmsg", root=tmp_path))
    loop.until(lambda: loop.said, "what is missing")
    end_s = time.monotonic() + 2.0
    while time.monotonic() < end_s:
        loop.turn()
    (line,) = loop.said
    assert line.startswith("steadyrun: not watched on n0: ")
    for words in ("kernel log: cannot read", "CAP_SYSLOG", "GPUs: no NVIDIA driver is loaded", "RDMA"):
        assert words in line
    assert loop.values.get("collector_up", "kernel_log") == 0.0
    assert loop.devices.evidence(0.0) == ()


def test_the_next_agent_goes_on_where_this_one_stopped(
    start_loop: Callable[[DevicesPlan], Any], tmp_path: Path
) -> None:
    if os.geteuid() != 0 or not os.access("/dev/kmsg", os.R_OK | os.W_OK):
        pytest.skip("writing into the kernel log needs root")
    plan = DevicesPlan(Path("/dev/kmsg"), any_writer=True, position=tmp_path / "position/host.json")
    first = start_loop(plan)
    first.until(lambda: first.told("device_sources"), "the first look")
    assert first.told("device_sources")[0]["kernel_log"] == "kmsg"
    mark = f"steadyrun-{time.time_ns()}"
    Path("/dev/kmsg").write_text(f"<3>NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name={mark}, Ch 1\n")
    first.until(lambda: any(mark in e["text"] for e in first.told("device_event")), "the event")
    first.until(lambda: plan.position is not None and plan.position.exists(), "the position")
    first.devices.close()
    assert json.loads((tmp_path / "position/host.json").read_text())["sequence"] > 0
    Path("/dev/kmsg").write_text(f"<3>NVRM: Xid (PCI:0000:3b:00): 13, pid=78, name={mark}-between, Ch 1\n")
    second = start_loop(plan)
    second.until(lambda: any("between" in e["text"] for e in second.told("device_event")), "what came in between")
    texts = [e["text"] for e in second.told("device_event")]
    assert not any(mark in t and "between" not in t for t in texts)


def test_a_flood_of_the_kernels_does_not_hold_the_loop_up(
    start_loop: Callable[[DevicesPlan], Any], tmp_path: Path
) -> None:
    log = tmp_path / "kmsg"
    log.write_text("")
    loop = start_loop(DevicesPlan(log, folders=(Folder("run", tmp_path),)))
    loop.until(lambda: loop.told("device_sources"), "the first look")
    with log.open("a") as f:
        for i in range(20_000):
            f.write(f"NVRM: Xid (PCI:0000:{i % 200:02x}:00): {13 + i % 7}, pid={i}, name=python, Ch 1\n")
    loop.until(lambda: loop.values.get("gpu_xid_errors_total", "0000:01:00", "app"), "the events")
    end_s = time.monotonic() + 3.0
    while time.monotonic() < end_s:
        loop.turn()
    assert loop.longest_s < MOST_S
    assert len(loop.told("device_event")) <= 200
