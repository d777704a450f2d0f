"""Ports and their counters, on a made tree of /sys: against how they began, and against each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steadyrun.collectors.nic.collector import NicCollector
from steadyrun.collectors.nic.ports import COUNTERS, PortReader, PortsUnreadableError
from steadyrun.collectors.protocol import Health


class Machine:
    """A /sys with RDMA devices and network interfaces; ``set`` changes one file of one port."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 1000.0
        self.collector = NicCollector(root, clock=lambda: self.now_s)

    def rdma(self, *numbers: int, link: str = "InfiniBand", rate: str = "400 Gb/sec (4X NDR)") -> None:
        for n in numbers:
            folder = self.port(n)
            for name in ("counters", "hw_counters"):
                (folder / name).mkdir(parents=True)
            (folder.parents[1] / "board_id").write_text("MT_0000000838\n")
            (folder.parents[1] / "device/net" / f"ib{n}").mkdir(parents=True)
            (self.root / "sys/class/net" / f"ib{n}/device").mkdir(parents=True)
            self.set(n, "state", "4: ACTIVE")
            self.set(n, "phys_state", "5: LinkUp")
            self.set(n, "rate", rate)
            self.set(n, "link_layer", link)
            for counter in COUNTERS:
                if counter.folder != "statistics":
                    self.set(n, f"{counter.folder}/{counter.name}", "7")
            self.set(n, "counters/link_downed", "3")
            self.set(n, "counters/port_xmit_wait", "123456789")

    def interface(self, name: str, carrier: str = "1", hardware: bool = True) -> Path:
        folder = self.root / "sys/class/net" / name
        (folder / "statistics").mkdir(parents=True)
        if hardware:
            (folder / "device").mkdir()
        for file, text in {"carrier": carrier, "operstate": "up", "speed": "100000", "carrier_down_count": "2"}.items():
            (folder / file).write_text(f"{text}\n")
        (folder / "statistics/rx_errors").write_text("5\n")
        return folder

    def port(self, n: int) -> Path:
        return self.root / f"sys/class/infiniband/mlx5_{n}/ports/1"

    def set(self, n: int, file: str, text: str) -> None:
        (self.port(n) / file).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "sys/class/net").mkdir(parents=True)
    return Machine(tmp_path)


def test_ports_are_read_with_their_interfaces(machine: Machine) -> None:
    machine.rdma(0, 2, 10)
    machine.interface("eth0")
    machine.interface("veth7", hardware=False)
    ports = PortReader(machine.root / "sys").read()
    assert [p.label for p in ports] == ["mlx5_0 port 1 (ib0)", "mlx5_2 port 1 (ib2)", "mlx5_10 port 1 (ib10)", "eth0"]
    first, ethernet = ports[0], ports[-1]
    assert (first.link, first.state, first.physical, first.rate_gbps) == ("InfiniBand", "ACTIVE", "LinkUp", 400.0)
    assert (first.link_downed, first.errors) == (3, 7 * 10)  # what waits is congested, not faulty
    assert (ethernet.is_up, ethernet.rate_gbps, ethernet.link_downed, ethernet.errors) == (True, 100.0, 2, 5)


def test_all_well_says_what_there_is(machine: Machine) -> None:
    machine.rdma(0, 1)
    machine.interface("eth0")
    result = machine.collector.check()
    assert (result.health, result.reason) == (
        Health.HEALTHY,
        "2 of 2 RDMA ports up (InfiniBand), 1 of 1 network interfaces up",
    )
    assert (result.facts["fabric_ports_up"], result.facts["fabric_rate_gbps"]) == (2, 400.0)
    assert len(machine.collector.readings()) == 3


def test_a_machine_without_ports_is_well(tmp_path: Path) -> None:
    result = NicCollector(tmp_path).check()
    assert (result.health, result.reason) == (Health.HEALTHY, "no InfiniBand or RoCE port")


def test_a_port_that_went_down_is_told_until_it_is_back(machine: Machine) -> None:
    machine.rdma(0, 1)
    machine.collector.check()
    machine.set(1, "state", "1: DOWN")
    machine.set(1, "phys_state", "2: Polling")
    result = machine.collector.check()
    assert result.health is Health.UNHEALTHY
    assert result.reason == "mlx5_1 port 1 (ib1) is DOWN (Polling); it was up when the job began"
    assert result.troubles[0].subject == "port mlx5_1/1"
    machine.set(1, "state", "4: ACTIVE")
    assert machine.collector.check().health is Health.HEALTHY


def test_a_port_that_was_never_up_is_no_trouble(machine: Machine) -> None:
    machine.rdma(0, 1)
    machine.set(1, "state", "1: DOWN")
    machine.set(1, "phys_state", "3: Disabled")
    machine.interface("eth1", carrier="0")
    for _ in range(2):
        assert machine.collector.check().health is Health.HEALTHY


def test_a_vanished_device_is_told(machine: Machine) -> None:
    machine.rdma(0, 1)
    machine.collector.check()
    (machine.root / "sys/class/infiniband/mlx5_1").rename(machine.root / "away")
    result = machine.collector.check()
    assert result.health is Health.UNHEALTHY
    assert result.reason.startswith("mlx5_1 port 1 (ib1) is not there any more")


def test_a_slower_link_is_told(machine: Machine) -> None:
    machine.rdma(0)
    machine.collector.check()
    machine.set(0, "rate", "200 Gb/sec (2X NDR)")
    result = machine.collector.check()
    assert (result.health, result.reason) == (
        Health.DEGRADED,
        "mlx5_0 port 1 (ib0) runs at 200 Gb/s; it ran at 400 when the job began",
    )


def test_one_flap_counts_for_an_hour_and_five_for_a_day(machine: Machine) -> None:
    machine.rdma(0)
    machine.collector.check()
    machine.set(0, "counters/link_downed", "4")
    assert machine.collector.check().reason == "mlx5_0 port 1 (ib0) has lost its link once in the last hour"
    machine.now_s += 3601
    assert machine.collector.check().health is Health.HEALTHY
    machine.set(0, "counters/link_downed", "8")
    result = machine.collector.check()
    assert (result.health, result.reason) == (
        Health.UNHEALTHY,
        "mlx5_0 port 1 (ib0) has lost its link 5 times in 60 minutes",
    )
    machine.now_s += 86401
    assert machine.collector.check().health is Health.HEALTHY


@pytest.mark.parametrize("counter", [c for c in COUNTERS if c.most_per_hour is not None and c.folder != "statistics"])
def test_errors_are_told_beyond_what_is_usual(machine: Machine, counter: object) -> None:
    assert hasattr(counter, "name")
    machine.rdma(0)
    machine.collector.check()
    file = f"{counter.folder}/{counter.name}"  # type: ignore[attr-defined]
    most = int(counter.most_per_hour)  # type: ignore[attr-defined]
    machine.set(0, file, str(7 + most))
    assert machine.collector.check().health is Health.HEALTHY
    machine.set(0, file, str(8 + most))
    result = machine.collector.check()
    assert result.health is Health.DEGRADED
    assert f"had {most + 1} " in result.reason


def test_a_counter_that_was_reset_counts_from_zero(machine: Machine) -> None:
    machine.rdma(0)
    machine.set(0, "counters/symbol_error", "65535")
    machine.collector.check()
    machine.set(0, "counters/symbol_error", "3")
    assert machine.collector.check().health is Health.HEALTHY


def test_what_there_was_before_the_job_is_no_trouble(machine: Machine) -> None:
    machine.rdma(0)
    machine.set(0, "counters/symbol_error", "65535")
    machine.set(0, "counters/link_downed", "255")
    assert machine.collector.check().health is Health.HEALTHY


def test_one_look_finds_the_port_that_differs_from_others_like_it(machine: Machine) -> None:
    machine.rdma(0, 1, 2, 3, 4)
    machine.set(2, "state", "1: DOWN")
    machine.set(2, "phys_state", "2: Polling")
    machine.set(4, "rate", "100 Gb/sec (4X EDR)")
    result = machine.collector.check()
    assert result.health is Health.DEGRADED
    assert {t.reason for t in result.troubles} == {
        "mlx5_2 port 1 (ib2) is DOWN (Polling); 4 others like it are up",
        "mlx5_4 port 1 (ib4) runs at 100 Gb/s; others like it at 400",
    }


def test_a_fabric_without_a_subnet_manager_is_told(machine: Machine) -> None:
    machine.rdma(0)
    machine.set(0, "state", "2: INIT")
    result = machine.collector.check()
    assert result.health is Health.UNHEALTHY
    assert "no subnet manager" in result.reason


def test_excluded_devices_are_left_alone(machine: Machine) -> None:
    machine.rdma(0, 1)
    machine.interface("eth0")
    ports = PortReader(machine.root / "sys", ("mlx5_1", "eth*")).read()
    assert [p.device for p in ports] == ["mlx5_0", "ib1"]


def test_a_counter_that_gives_an_error_is_read_once(machine: Machine) -> None:
    machine.rdma(0)
    reader = PortReader(machine.root / "sys")
    path = machine.port(0) / "counters/symbol_error"
    path.unlink()
    path.mkdir()  # reading it is an error of its own, as of firmware that refuses
    assert "symbol_error" not in reader.read()[0].counters
    path.rmdir()
    path.write_text("9\n")
    assert "symbol_error" not in reader.read()[0].counters
    assert PortReader(machine.root / "sys").read()[0].counters["symbol_error"] == 9


def test_nonsense_in_files_is_left_out(machine: Machine) -> None:
    machine.rdma(0)
    for file in ("state", "phys_state", "rate", "counters/symbol_error", "counters/link_downed"):
        (machine.port(0) / file).write_bytes(b"\xff\x00" * 40)
    (port,) = PortReader(machine.root / "sys").read()
    assert (port.is_up, port.rate_gbps, port.link_downed) == (False, None, None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_sys_is_unknown(machine: Machine) -> None:
    folder = machine.root / "sys/class/infiniband"
    folder.mkdir(mode=0o000)
    try:
        assert machine.collector.check().health is Health.UNKNOWN
    finally:
        folder.chmod(0o700)


def test_a_file_in_place_of_a_folder_is_unknown(machine: Machine) -> None:
    (machine.root / "sys/class/infiniband").write_text("")
    with pytest.raises(PortsUnreadableError):
        PortReader(machine.root / "sys").read()
    result = machine.collector.check()
    assert (result.health, "cannot list" in result.reason) == (Health.UNKNOWN, True)
