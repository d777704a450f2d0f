"""What devices told, in findings: who is explained, who is accused, and what is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steadyrun.core.classes import FaultClass
from steadyrun.core.records import DeviceEvent, Evidence, Finding, RankEvidence, device_event_from_json, to_json
from steadyrun.detect.devices import device_words, with_devices
from steadyrun.detect.faulttable import FaultKind, kind_of, signs_of

HANG_S = 1000.0  # wall time of the last progress

XID_79 = DeviceEvent(
    "n1", "kernel_log", "xid", "Xid 79 0000:cb:00", "the GPU does not answer any more", "unhealthy", 97.0, HANG_S - 3.0,
    cls="reboot", xid=79, pci="0000:cb:00", gpu=5, rank=5, text="NVRM: Xid (PCI:0000:cb:00): 79, fallen off the bus",
)  # fmt: skip
LOST = DeviceEvent(
    "n1", "nvml", "state", "gpu 0000:cb:00", "GPU 5 (0000:cb:00) is lost: it does not answer on its bus", "unhealthy",
    100.0, HANG_S + 8.0, pci="0000:cb:00", gpu=5, rank=5,
)  # fmt: skip


def evidence(*devices: DeviceEvent) -> Evidence:
    ranks = tuple(RankEvidence(r, r % 4, "n0" if r < 4 else "n1", 100 + r, 0) for r in range(8))
    return Evidence("run", 0, 8, "hang", 100.0, ranks, devices=devices)


def finding(cls: FaultClass, *ranks: int, confidence: float = 0.4) -> Finding:
    nodes = tuple(dict.fromkeys("n0" if r < 4 else "n1" for r in ranks))
    return Finding(cls, ranks, "it hangs", confidence, nodes=nodes, since_unix_s=HANG_S)


def test_a_lost_gpu_accuses_its_rank_when_all_wait() -> None:
    everybody = finding(FaultClass.IN_FLIGHT_NETWORK, *range(8))
    found = with_devices([everybody], evidence(XID_79), HANG_S + 10)
    assert (found[0].cls, found[0].ranks, found[0].nodes) == (FaultClass.DEVICE_STALL, (5,), ("n1",))
    assert found[0].summary.startswith(
        "rank 5, GPU 5 0000:cb:00: Xid 79 (the GPU does not answer any more), 3 s before the hang"
    )
    assert found[0].confidence > 0.7 > found[1].confidence


def test_a_stuck_rank_becomes_a_device_stall_that_asks_for_another_node() -> None:
    e = evidence(XID_79)
    (found,) = with_devices([finding(FaultClass.HOST_STALL, 5, confidence=0.8)], e, HANG_S + 10)
    assert (found.cls, found.confidence, found.gpus) == (FaultClass.DEVICE_STALL, 0.9, ("GPU 5 (0000:cb:00)",))
    assert kind_of(found.cls, signs_of(e, found)) is FaultKind.DEVICE_LOST


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("is lost: it does not answer on its bus", FaultKind.DEVICE_LOST),
        ("needs a reset, says its driver", FaultKind.DEVICE_RESET),
    ],
)
def test_what_nvml_says_decides_as_an_xid_does(words: str, kind: FaultKind) -> None:
    e = evidence(replace(LOST, meaning=f"GPU 5 (0000:cb:00) {words}"))
    (found,) = with_devices([finding(FaultClass.HOST_STALL, 5)], e, HANG_S + 10)
    assert kind_of(found.cls, signs_of(e, found)) is kind


def test_an_xid_of_long_ago_accuses_nobody() -> None:
    before = [finding(FaultClass.IN_FLIGHT_NETWORK, *range(8))]
    old = replace(XID_79, at_unix_s=HANG_S - 400.0)
    assert [f.cls for f in with_devices(before, evidence(old), HANG_S)] == [FaultClass.IN_FLIGHT_NETWORK]


def test_an_error_of_the_program_is_told_and_accuses_nobody() -> None:
    app = replace(XID_79, xid=31, cls="app", health="healthy", meaning="a program touched memory that is not its own")
    died = finding(FaultClass.PROGRAM_ERROR, 5, confidence=0.8)
    (found,) = with_devices([died], evidence(app), HANG_S)
    assert found.cls is FaultClass.PROGRAM_ERROR
    assert "Xid 31" in found.summary
    assert "before its end" in found.summary
    assert [f.cls for f in with_devices([finding(FaultClass.HOST_STALL, 2)], evidence(app), HANG_S)] == [
        FaultClass.HOST_STALL
    ]


def test_a_certain_culprit_stays_one_beside_the_device() -> None:
    stuck = finding(FaultClass.HOST_STALL, 2, confidence=0.95)
    found = with_devices([stuck], evidence(XID_79), HANG_S)
    assert {f.ranks: f.confidence for f in found} == {(2,): 0.95, (5,): 0.85}


def test_what_concerns_the_node_is_told_of_its_ranks_only() -> None:
    server = DeviceEvent(
        "n1",
        "kernel_log",
        "nfs_timeout",
        "nfs_timeout 10.0.0.1",
        "an NFS server does not answer",
        "degraded",
        90.0,
        HANG_S - 10.0,
    )
    (here,) = with_devices([finding(FaultClass.STORAGE_STALL, 6)], evidence(server), HANG_S)
    (there,) = with_devices([finding(FaultClass.STORAGE_STALL, 1)], evidence(server), HANG_S)
    assert "n1: nfs_timeout 10.0.0.1 (an NFS server does not answer), 10 s before the hang" in here.summary
    assert there.summary == "it hangs"


@pytest.mark.parametrize("cls", [FaultClass.PREEMPTED, FaultClass.HEALTHY, FaultClass.STRAGGLER])
def test_no_device_explains_what_is_no_fault(cls: FaultClass) -> None:
    before = [finding(cls, 5)]
    assert with_devices(before, evidence(XID_79), HANG_S) == before


def test_events_survive_the_way_to_another_node() -> None:
    assert device_event_from_json(to_json(XID_79)) == XID_79
    with pytest.raises(ValueError, match="device event"):
        device_event_from_json({"node": "n"})


def test_times_read_as_a_person_would_say_them() -> None:
    assert device_words(replace(XID_79, at_unix_s=HANG_S - 300.0), HANG_S).endswith("5 min before the hang")
    assert device_words(replace(XID_79, at_unix_s=HANG_S + 4.0), HANG_S).endswith("4 s after the last progress")
