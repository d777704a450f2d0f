"""What stands after events, what ends it, what repeats add up to; and the folding of repeats."""

from __future__ import annotations

import pytest

from steadyrun.collectors.kernel.events import Folding, KernelEvent, read_text
from steadyrun.collectors.kernel.ledger import Ledger
from steadyrun.collectors.protocol import Health

DAY_S = 86400.0


def event_of(line: str, at_s: float | None = None) -> KernelEvent:
    (event,) = read_text([line])
    return event if at_s is None else event.timed(at_s, 1.7e9 + at_s)


def xid(code: int, at_s: float = 0.0, pci: str = "cb", rest: str = "x") -> KernelEvent:
    return event_of(f"NVRM: Xid (PCI:0000:{pci}:00): {code}, {rest}", at_s)


def ledger_of(*events: KernelEvent) -> Ledger:
    ledger = Ledger()
    for event in events:
        ledger.add(event, event.at_s or 0.0)
    return ledger


def worst(ledger: Ledger, now_s: float) -> Health:
    return max((t.health for t in ledger.troubles(now_s)), key=lambda h: h.weight, default=Health.HEALTHY)


def test_a_lost_gpu_stands_until_the_machine_starts_anew() -> None:
    ledger = ledger_of(xid(79))
    (trouble,) = ledger.troubles(30 * DAY_S)
    assert trouble.health is Health.UNHEALTHY
    assert trouble.subject == "gpu 0000:cb:00"
    assert "Xid 79 0000:cb:00" in trouble.reason
    assert trouble.actions == ("leave out the node and reboot it",)


def test_a_gpu_that_needs_a_reset_is_well_when_the_driver_says_so() -> None:
    ledger = ledger_of(xid(119), xid(119, pci="18"))
    assert len(ledger.troubles(1.0)) == 2
    ledger.add(xid(154, 2.0, rest="GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"), 2.0)
    (left,) = ledger.troubles(3.0)
    assert left.subject == "gpu 0000:18:00"


def test_what_only_a_reboot_heals_outlives_the_drivers_all_clear() -> None:
    ledger = ledger_of(xid(79))
    ledger.add(xid(154, 2.0, rest="GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"), 2.0)
    assert worst(ledger, 3.0) is Health.UNHEALTHY


def test_the_programs_own_errors_leave_the_gpu_healthy_until_they_repeat() -> None:
    ledger = ledger_of(xid(13, 0.0), xid(31, 100.0), xid(13, 0.0, pci="18"))
    assert ledger.troubles(200.0) == []
    ledger.add(xid(13, 300.0), 300.0)
    (trouble,) = ledger.troubles(400.0)
    assert trouble.health is Health.DEGRADED
    assert trouble.subject == "gpu 0000:cb:00"
    assert ledger.troubles(300.0 + 2 * DAY_S) == []


def test_an_unknown_code_asks_for_a_reset_once_and_for_an_inspection_on_its_repeat() -> None:
    ledger = ledger_of(xid(999, 0.0))
    (trouble,) = ledger.troubles(1.0)
    assert "reset the GPU" in trouble.actions[0]
    ledger.add(xid(999, 100.0), 100.0)
    assert any("inspected" in a for t in ledger.troubles(101.0) for a in t.actions)


@pytest.mark.parametrize(
    ("begun", "ended"),
    [
        ("nfs: server 10.0.0.1 not responding, still trying", "nfs: server 10.0.0.1 OK"),
        (
            "Lustre: a: Connection to s-OST0003 (at 10.0.0.1@o2ib) was lost; in progress",
            "Lustre: a: Connection restored to s-OST0003 (at 10.0.0.1@o2ib)",
        ),
        ("mlx5_core 0000:53:00.0 mlx5_3: Port: 1 Link DOWN", "mlx5_core 0000:53:00.0 mlx5_3: Port: 1 Link ACTIVE"),
        ("igc 0000:05:00.0 eth5: NIC Link is Down", "igc 0000:05:00.0 eth5: NIC Link is Up 100 Mbps Full Duplex"),
        ("libceph: osd12 down", "libceph: osd12 up"),
    ],
)
def test_what_is_back_does_not_stand_any_more(begun: str, ended: str) -> None:
    ledger = ledger_of(event_of(begun, 1.0))
    assert worst(ledger, 2.0) is Health.DEGRADED
    ledger.add(event_of(ended, 3.0), 3.0)
    assert ledger.troubles(4.0) == []


def test_the_recovery_of_another_server_ends_nothing() -> None:
    ledger = ledger_of(event_of("nfs: server a not responding, still trying", 1.0), event_of("nfs: server b OK", 2.0))
    assert worst(ledger, 3.0) is Health.DEGRADED


def test_a_link_that_flaps_is_told_though_it_is_up() -> None:
    ledger = Ledger()
    for i in range(5):
        ledger.add(event_of("igc 0000:05:00.0 eth5: NIC Link is Down", i * 60.0), 0.0)
        ledger.add(event_of("igc 0000:05:00.0 eth5: NIC Link is Up 100 Mbps Full Duplex", i * 60.0 + 5), 0.0)
    (trouble,) = ledger.troubles(400.0)
    assert "5 times" in trouble.reason


def test_totals_count_by_kind_and_by_gpu_and_class() -> None:
    ledger = ledger_of(xid(13), xid(79), xid(79, pci="18"), event_of("nfs: server a OK", 1.0))
    assert ledger.totals == {"xid": 3, "nfs_ok": 1}
    assert ledger.xid_totals == {("0000:cb:00", "app"): 1, ("0000:cb:00", "reboot"): 1, ("0000:18:00", "reboot"): 1}
    assert ledger.xid_last_s["0000:cb:00", 79] == 0.0
    assert [e.event for e in ledger.events_since(0.5)] == ["nfs_ok"]


def test_a_flood_of_different_things_stays_bounded() -> None:
    ledger = Ledger()
    for i in range(5000):
        ledger.add(xid(999, float(i), rest="x", pci=f"{i % 256:02x}").timed(float(i), 0.0), 0.0)
        ledger.add(event_of(f"nfs: server s{i} not responding, still trying", float(i)), 0.0)
    assert len(ledger.troubles(5000.0)) <= 2048 + 1024
    assert len(ledger.recent) == 512


def test_a_burst_is_one_event_and_counted() -> None:
    folding = Folding()
    burst = [xid(13, i * 0.01, rest=f"(GPC 0, TPC {i}, SM 0)") for i in range(40)]
    assert [e.at_s for e in burst if folding.take(e, 0.0)] == [0.0]
    assert folding.repeats == {burst[0].key: 39}
    assert folding.take(xid(13, 5.0), 0.0) is not None


def test_repeats_fold_as_long_as_each_follows_within_the_second() -> None:
    folding = Folding()
    kept = [at for at in (0.0, 0.9, 1.8, 2.7, 4.0) if folding.take(xid(13, at), 0.0)]
    assert kept == [0.0, 4.0]


def test_both_lines_of_an_oom_kill_are_one() -> None:
    folding = Folding()
    first = event_of("oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/a,task=x,pid=5,uid=0", 1.0)
    second = event_of("Memory cgroup out of memory: Killed process 5 (x) total-vm:1kB, anon-rss:2kB", 1.0)
    other = event_of("Memory cgroup out of memory: Killed process 6 (x) total-vm:1kB, anon-rss:2kB", 1.0)
    assert [bool(folding.take(e, 0.0)) for e in (first, second, other)] == [True, False, True]


def test_different_gpus_codes_and_instances_do_not_fold() -> None:
    folding = Folding()
    mig = event_of("NVRM: Xid (PCI:0000:cb:00 GPU-I:03): 13, x", 0.0)
    assert all(folding.take(e, 0.0) for e in (xid(13), xid(31), xid(13, pci="18"), mig))


def test_folding_remembers_a_bounded_number_of_things() -> None:
    folding = Folding()
    for i in range(20_000):
        folding.take(event_of(f"nfs: server s{i} OK", 1.0), 0.0)
    assert len(folding._last_s) <= 4097
