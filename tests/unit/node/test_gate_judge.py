"""What the nodes' checks say together: who is named, who is left out, who differs from the others."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from steadyrun.collectors.protocol import Health, Trouble
from steadyrun.node.gatejudge import NodeReport, judge_nodes, slower_devices, with_clock

LOST = Trouble(Health.UNHEALTHY, "GPU 3 is lost", ("reboot it",))
HOT = Trouble(Health.DEGRADED, "GPU 1 is at 91 °C")
FACTS: dict[str, float | str] = {
    "model": "H100",
    "gpus": 8,
    "nvlinks": 18,
    "pcie_width": 16,
    "fabric_ports_up": 8,
    "fabric_rate_gbps": 400,
}


def node(name: str, *troubles: Trouble, hosts_store: bool = False, **changes: Any) -> NodeReport:
    health = max((t.health for t in troubles), key=lambda h: h.weight, default=Health.HEALTHY)
    return NodeReport(name, health, troubles, {**FACTS, **changes}, hosts_store=hosts_store)


def nodes(count: int) -> list[NodeReport | None]:
    return [node(f"n{i}", hosts_store=i == 0) for i in range(count)]


def test_well_nodes_say_nothing() -> None:
    verdict = judge_nodes(nodes(4), 2)
    assert (verdict.bad, verdict.excluded, verdict.reason, verdict.notes) == ({}, (), "", ())


def test_an_unfit_node_is_left_out_where_a_spare_is() -> None:
    reports = nodes(4)
    reports[2] = node("n2", LOST)
    verdict = judge_nodes(reports, 1)
    assert verdict.excluded == (2,)
    assert verdict.reason == "node check: n2: GPU 3 is lost"
    assert verdict.notes == ("node check: n2: GPU 3 is lost: the node is left out",)


@pytest.mark.parametrize(
    ("place", "spares", "why"),
    [(2, 0, "no spare node is there"), (0, 3, "it hosts the rendezvous")],
)
def test_an_unfit_node_that_cannot_be_spared_is_named(place: int, spares: int, why: str) -> None:
    reports = nodes(4)
    reports[place] = node(f"n{place}", LOST, hosts_store=place == 0)
    verdict = judge_nodes(reports, spares)
    assert verdict.excluded == ()
    assert verdict.notes == (f"node check: n{place}: GPU 3 is lost (it stays: {why})",)


def test_of_two_unfit_nodes_one_spare_replaces_one() -> None:
    reports = nodes(5)
    reports[1], reports[3] = node("n1", LOST), node("n3", HOT, LOST)
    verdict = judge_nodes(reports, 1)
    assert verdict.excluded == (1,)
    assert "too few spare nodes" in verdict.notes[1]
    both = judge_nodes(reports, 2)
    assert both.excluded == (1, 3)
    assert both.reason.endswith("(and 1 more nodes)")


def test_what_most_nodes_have_is_no_nodes_fault() -> None:
    full = Trouble(Health.UNHEALTHY, "/data: 0.1 GiB left")
    verdict = judge_nodes([node(f"n{i}", full) for i in range(4)], 4)
    assert verdict.excluded == ()
    assert "most nodes are like that" in verdict.notes[0]


def test_a_node_alone_is_named() -> None:
    verdict = judge_nodes([node("n0", LOST)], 0)
    assert verdict.excluded == ()
    assert verdict.notes == ("node check: n0: GPU 3 is lost (it stays: there is no other node)",)


def test_what_only_degrades_leaves_nobody_out() -> None:
    reports = nodes(3)
    reports[1] = node("n1", HOT)
    verdict = judge_nodes(reports, 1)
    assert (verdict.excluded, verdict.notes) == ((), ("node check: n1: GPU 1 is at 91 °C",))


def test_a_collector_that_could_not_look_is_not_told_of() -> None:
    reports = nodes(3)
    reports[1] = node("n1", Trouble(Health.UNKNOWN, "nic: cannot list /sys"))
    assert judge_nodes(reports, 1).notes == ()


@pytest.mark.parametrize(
    ("fact", "value", "words"),
    [
        ("gpus", 7, "has 7 GPUs, the others have 8"),
        ("nvlinks", 17, "has a GPU with 17 NVLinks up, on the others it is 18"),
        ("pcie_width", 8, "has a GPU on 8 PCIe lanes, on the others it is 16"),
        ("fabric_ports_up", 7, "has 7 RDMA ports up, the others have 8"),
        ("fabric_rate_gbps", 200, "has an RDMA port at 200 Gb/s, on the others it is 400"),
    ],
)
@pytest.mark.parametrize("count", [2, 3, 64])
def test_a_node_with_less_than_the_others_is_unfit(fact: str, value: float, words: str, count: int) -> None:
    reports = nodes(count)
    reports[1] = node("n1", **{fact: value})
    verdict = judge_nodes(reports, 1)
    assert [t.reason for t in verdict.bad[1]] == [words]
    assert verdict.excluded == (1,)


def test_nodes_of_two_kinds_accuse_each_other_of_nothing() -> None:
    reports = [node(f"a{i}") for i in range(4)] + [node(f"b{i}", gpus=4, nvlinks=12) for i in range(3)]
    assert judge_nodes(reports, 4).bad == {}
    other = [*nodes(3), node("v100", model="V100", gpus=4, nvlinks=6, pcie_width=8)]
    assert judge_nodes(other, 1).bad == {}


def test_more_than_usual_is_no_trouble() -> None:
    reports = nodes(3)
    reports[2] = node("n2", fabric_ports_up=9)
    assert judge_nodes(reports, 1).bad == {}


def test_a_slow_device_is_named_by_what_it_did() -> None:
    reports = [
        NodeReport(f"n{i}", Health.HEALTHY, (), {"model": "H100"}, tuple((f"GPU {g}", 700.0, 3000.0) for g in range(8)))
        for i in range(3)
    ]
    slow = ("GPU 5", 500.0, 3000.0)
    reports[1] = NodeReport("n1", Health.HEALTHY, (), {"model": "H100"}, (*reports[1].speeds[:7], slow))
    verdict = judge_nodes(list(reports), 1)
    assert verdict.notes == (
        "node check: n1: GPU 5 multiplies at 500 TFLOP/s, the others at 700: the node is left out",
    )


def test_a_cpu_that_others_use_too_is_told_only_when_very_slow() -> None:
    assert slower_devices([("cpu", 0.1, 10.0), ("cpu", 0.06, 10.0)]) == []
    (found,) = slower_devices([("cpu", 0.1, 10.0), ("cpu", 0.1, 4.0)])
    assert (found.health, found.reason) == (Health.DEGRADED, "cpu copies at 4 GB/s, the others at 10")
    assert slower_devices([("cuda:0", 1.0, 1.0)]) == []


def test_a_report_survives_its_way_to_the_leader() -> None:
    report = NodeReport(
        "n1", Health.UNHEALTHY, (LOST, HOT), dict(FACTS), (("GPU 0", 700.0, 3000.0),), 0.25, hosts_store=True
    )
    told = NodeReport.from_wire(json.loads(json.dumps(report.to_wire())))
    assert told is not None
    assert (told.node, told.health, told.facts, told.speeds) == (report.node, report.health, FACTS, report.speeds)
    assert [t.reason for t in told.troubles] == [LOST.reason, HOT.reason]
    assert (told.took_s, told.hosts_store) == (0.25, True)


@pytest.mark.parametrize(
    "nonsense",
    [None, 3, [], {}, {"node": "n"}, {**NodeReport("n", Health.HEALTHY).to_wire(), "troubles": [["bad"]]}],
)
def test_nonsense_from_another_node_is_no_report(nonsense: Any) -> None:
    assert NodeReport.from_wire(nonsense) is None
    assert judge_nodes([node("n0"), NodeReport.from_wire(nonsense)], 1).bad == {}


@pytest.mark.parametrize(("ahead_s", "words"), [(3.25, "3.2 s ahead of that of n0"), (-5.0, "5.0 s behind that of n0")])
def test_a_clock_that_is_off_is_told(ahead_s: float, words: str) -> None:
    found = with_clock(node("n1"), ahead_s, "n0")
    assert (found.health, found.troubles[-1].reason) == (Health.DEGRADED, f"its clock is {words}")
    assert with_clock(found, 0.3, "n0") is found


def test_many_nodes_are_judged_in_a_moment() -> None:
    reports: list[NodeReport | None] = [
        NodeReport(f"n{i}", Health.HEALTHY, (), FACTS, tuple((f"GPU {g}", 700.0, 3e3) for g in range(8)))
        for i in range(256)
    ]
    reports[7] = node("n7", gpus=7)
    begun_s = time.thread_time()
    assert judge_nodes(reports, 9).excluded == (7,)
    assert time.thread_time() - begun_s < 0.1
