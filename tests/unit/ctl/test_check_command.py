"""``steadyctl check``: this machine now, and what a node's agent last told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from steadyrun.collectors.protocol import CheckResult, Health, Trouble
from steadyrun.core.records import to_json
from steadyrun.ctl import check
from steadyrun.node.devicetest import DeviceSpeed, DeviceTestError
from steadyrun.node.gatejudge import NodeReport


class Part:
    """A collector that says what it is told."""

    every_s = limit_s = 10.0

    def __init__(self, name: str, *troubles: Trouble) -> None:
        self.name = name
        self._result = CheckResult(
            name,
            max((t.health for t in troubles), key=lambda h: h.weight, default=Health.HEALTHY),
            troubles[0].reason if troubles else "all is well",
            tuple(a for t in troubles for a in t.actions),
            troubles,
            {"ports": 2},
        )

    def check(self) -> CheckResult:
        return self._result

    def close(self) -> None:
        pass


DOWN = Trouble(Health.UNHEALTHY, "mlx5_1 port 1 (ib1) is DOWN", ("look at its cable",), "port mlx5_1/1")
FULL = Trouble(Health.DEGRADED, "/data (checkpoints): 4.0 GiB left", ("remove old checkpoints",))
BLIND = Trouble(Health.UNKNOWN, "cannot read /dev/kmsg", ("grant CAP_SYSLOG",))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``machine(Part(...), ...)``: what this machine's collectors say."""

    def make(*parts: Part) -> None:
        monkeypatch.setattr(check, "_collectors", lambda root: list(parts))

    return make


@pytest.mark.parametrize(
    ("parts", "code", "word"),
    [
        ((Part("nic"), Part("space")), 0, "healthy"),
        ((Part("nic"), Part("space", FULL)), 10, "degraded"),
        ((Part("nic", DOWN), Part("space", FULL)), 11, "unhealthy"),
        ((Part("nic"), Part("kernel_log", BLIND)), 0, "healthy"),
        ((Part("kernel_log", BLIND),), 12, "unknown"),
    ],
)
def test_the_exit_code_is_the_worst_of_what_is_known(
    ctl: Callable[..., Any], machine: Callable[..., None], parts: tuple[Part, ...], code: int, word: str
) -> None:
    machine(*parts)
    result = ctl("check")
    assert (result.code, result.lines[0].rpartition(": ")[2]) == (code, word)
    assert all(len(line) <= 80 for line in result.lines)


def test_the_worst_comes_first_with_its_reasons_and_advice(ctl: Callable[..., Any], machine: Any) -> None:
    machine(Part("memory"), Part("space", FULL), Part("nic", DOWN, DOWN))
    result = ctl("check")
    rows = [
        line.split()[0] for line in result.lines if line.split()[:1] and line.split()[0] in ("nic", "space", "memory")
    ]
    assert rows == ["nic", "space", "memory"]
    assert result.out.count("mlx5_1 port 1 (ib1) is DOWN") == 2
    assert result.out.index("- look at its cable") < result.out.index("- remove old checkpoints")


def test_json_has_every_result(ctl: Callable[..., Any], machine: Any) -> None:
    machine(Part("memory"), Part("nic", DOWN))
    told = ctl("check", "--json").json
    assert (told["schema"], told["health"], told["at_unix_s"]) == ("steadyrun.check/1", "unhealthy", None)
    nic = told["results"][1]
    assert (nic["collector"], nic["health"], nic["facts"]) == ("nic", "unhealthy", {"ports": 2})
    assert nic["troubles"][0]["subject"] == "port mlx5_1/1"


def test_full_measures_the_devices(ctl: Callable[..., Any], machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(Part("memory"))
    speeds = [DeviceSpeed(f"cuda:{i}", "", 700.0, 3000.0, True) for i in range(3)]
    monkeypatch.setattr(check, "measure_devices", lambda limit_s: speeds)
    result = ctl("check", "--full")
    assert result.code == 0
    assert "cuda:2 700 TFLOP/s 3000 GB/s" in " ".join(result.out.split())
    speeds[1] = DeviceSpeed("cuda:1", "", 400.0, 3000.0, False)
    told = ctl("check", "--full", "--json")
    assert told.code == 11
    assert [t["reason"] for t in told.json["results"][1]["troubles"]] == [
        "cuda:1 gave two different results for the same product",
        "cuda:1 multiplies at 400 TFLOP/s, the others at 700",
    ]
    assert told.json["speeds"][1] == {"device": "cuda:1", "tflops": 400.0, "copy_gbps": 3000.0}


@pytest.mark.parametrize(("hung", "code"), [(True, 11), (False, 0)])
def test_a_device_test_that_fails_is_told(
    ctl: Callable[..., Any], machine: Any, monkeypatch: pytest.MonkeyPatch, hung: bool, code: int
) -> None:
    def fail(limit_s: float) -> list[DeviceSpeed]:
        raise DeviceTestError("it gave nothing", hung)

    machine(Part("memory"))
    monkeypatch.setattr(check, "measure_devices", fail)
    result = ctl("check", "--full")
    assert (result.code, "it gave nothing" in result.out) == (code, True)


# -- a node of a run ---------------------------------------------------------------------------------------------------
@pytest.fixture
def told(fake_run: Any) -> Any:
    """A run whose agent has told of a port that is down, and of an attempt it was fit for."""
    results: Mapping[str, Any] = {
        p.name: {**to_json(p.check()), "age_s": 3.0} for p in (Part("memory"), Part("nic", DOWN))
    }
    gate = NodeReport("n0", Health.HEALTHY, (), {"fabric_ports_up": 2}, (), 0.25).to_wire()
    fake_run.go_live([1], devices={"collectors": results, "gpus": [], "ranks": {}}, node_check=gate)
    return fake_run


def test_a_node_is_shown_as_its_agent_found_it(ctl: Callable[..., Any], told: Any) -> None:
    result = ctl("check", "n0", "--run", told.root)
    assert result.code == 11
    assert "n0: unhealthy, as its agent found it" in result.lines[0]
    assert "mlx5_1 port 1 (ib1) is DOWN" in result.out
    assert "fit when checked before an attempt, in 0.2 s" in " ".join(result.out.split())
    assert "- look at its cable" in result.out


def test_json_of_a_node_is_of_the_same_schema(ctl: Callable[..., Any], told: Any) -> None:
    found = ctl("check", "n0", "--run", told.root, "--json").json
    assert (found["schema"], found["node"], found["health"]) == ("steadyrun.check/1", "n0", "unhealthy")
    assert [r["collector"] for r in found["results"]] == ["memory", "nic", "before_attempt"]
    assert found["results"][1]["troubles"][0]["actions"] == ["look at its cable"]


def test_an_agent_that_is_gone_is_told(ctl: Callable[..., Any], told: Any) -> None:
    told.live["agent_pid"] = 1 << 30
    told.write_live()
    assert "this is what it found last" in " ".join(ctl("check", "n0", "--run", told.root).out.split())


def test_an_unknown_node_names_those_there_are(ctl: Callable[..., Any], told: Any) -> None:
    result = ctl("check", "n7", "--run", told.root)
    assert (result.code, "no node called n7" in result.err, "there are: n0" in result.err) == (1, True, True)


def test_nonsense_in_the_state_file_is_survived(ctl: Callable[..., Any], fake_run: Any) -> None:
    fake_run.go_live([1], devices={"collectors": {"nic": 3, "space": {"health": "?", "troubles": [1]}}}, node_check={})
    result = ctl("check", "n0", "--run", fake_run.root)
    assert result.code == 12
    assert "cannot be read" in result.out


def test_full_of_another_node_is_refused(ctl: Callable[..., Any], told: Any) -> None:
    result = ctl("check", "n0", "--full", "--run", told.root)
    assert (result.code, "leave out NODE" in result.err) == (2, True)


def test_this_machine_can_be_looked_at(ctl: Callable[..., Any], tmp_path: Path) -> None:
    """The real collectors on an empty root: nothing is there, nothing fails."""
    result = ctl("check", "--root", tmp_path, "--json")
    names = [r["collector"] for r in result.json["results"]]
    assert names == ["kernel_log", "nvml", "nic", "memory", "pressure", "space", "processes"]
