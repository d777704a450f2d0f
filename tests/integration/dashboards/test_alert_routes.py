"""The example for Alertmanager: valid by its own tool, each severity reaches its receiver, inhibitions name alerts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from prometheus_tools import check, tool

from steadyrun.collectors.alerts import ALERTS, Severity
from steadyrun.collectors.alerts.records import PREFIX

RECEIVER = {Severity.CRITICAL: "pager", Severity.WARNING: "tickets", Severity.INFO: "log"}


@pytest.fixture
def example(checkout: Path) -> Path:
    return checkout / "dashboards/prometheus/alertmanager.yaml"


def test_amtool_finds_the_example_valid(example: Path) -> None:
    assert "SUCCESS" in check(tool("amtool"), "check-config", example)


@pytest.mark.parametrize("severity", list(Severity))
def test_every_severity_reaches_its_receiver(severity: Severity, example: Path) -> None:
    alert = next(a for a in ALERTS if a.severity is severity)
    check(
        tool("amtool"), "config", "routes", "test", f"--config.file={example}",
        f"--verify.receivers={RECEIVER[severity]}", f"alertname={alert.full_name}", f"severity={severity.value}",
    )  # fmt: skip


def test_inhibitions_name_alerts_that_exist_and_labels_that_they_have(example: Path) -> None:
    names = [a.full_name for a in ALERTS]
    for rule in yaml.safe_load(example.read_text())["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            label, operator, value = re.fullmatch(r'(\w+) (=~|!=|=) "?([^"]+)"?', matcher).groups()  # type: ignore[union-attr]
            assert label == "alertname"
            hits = [n for n in names if re.fullmatch(value, n)]
            assert hits if operator == "=~" else value in names, f"{matcher}: no alert {PREFIX}..."


def test_promtool_finds_the_scrape_example_valid(checkout: Path) -> None:
    assert "SUCCESS" in check(tool("promtool"), "check", "config", checkout / "dashboards/prometheus/prometheus.yaml")


def test_the_pod_monitor_is_yaml_and_asks_for_the_port_by_name(checkout: Path) -> None:
    monitor = yaml.safe_load((checkout / "dashboards/kubernetes/podmonitor.yaml").read_text())
    assert monitor["kind"] == "PodMonitor"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics"
    assert {r["targetLabel"] for r in endpoint["relabelings"]} == {"run_id", "node_rank"}
