"""Alerts ask for what is exported, and say what they are about."""

from __future__ import annotations

import re

import pytest

from steadyrun.collectors.alerts import ALERTS, RECORDINGS, Alert, Severity
from steadyrun.collectors.alerts.writing import alerts_yaml, duration, overview, runbook
from steadyrun.collectors.metrics.promql import COUNTER_FUNCTIONS, grouping_labels, selectors
from steadyrun.collectors.metrics.spec import SAMPLES, TARGET_LABELS, MetricType

RECORDED = {r.record for r in RECORDINGS}
READ_AS_THEY_ARE = {"steadyrun_restarts_total", "steadyrun_gpu_xid_errors_total"}  # compared with 0, and with before
NAMED = re.compile(r"\$labels\.(\w+)")


def test_expressions_ask_only_for_what_is_exported() -> None:
    for rule in (*ALERTS, *RECORDINGS):
        _check_expression(rule.expr)


def _check_expression(expr: str) -> None:
    for selector in selectors(expr):
        if selector.name in RECORDED:
            continue
        if selector.name == "up":
            assert selector.labels == {"job"}
            continue
        family = SAMPLES[selector.name]
        assert selector.labels <= {*family.label_names, *TARGET_LABELS}, selector
        for label in family.labels:
            for name, operator, value in selector.matchers:
                if name == label.name and label.values:
                    for wanted in value.split("|") if operator == "=~" else [re.escape(value)]:
                        hits = [v for v in label.values if re.fullmatch(wanted, v)]
                        assert hits, f"{selector.name} never has {name}={wanted}"
        if family.type is MetricType.COUNTER and selector.name not in READ_AS_THEY_ARE:
            assert set(selector.functions) & COUNTER_FUNCTIONS, f"{selector.name} is a counter"
        if family.type is MetricType.GAUGE:
            assert not set(selector.functions) & COUNTER_FUNCTIONS, f"{selector.name} is a gauge"
    known = {label for f in SAMPLES.values() for label in f.label_names} | set(TARGET_LABELS)
    assert set(grouping_labels(expr)) <= known


def test_alerts_say_what_they_are_about() -> None:
    for alert in ALERTS:
        _check_words(alert)


def _check_words(alert: Alert) -> None:
    assert re.fullmatch(r"[A-Z][A-Za-z]+", alert.name)
    assert alert.name != "Watchdog"  # the ever-firing alert of kube-prometheus
    assert alert.summary.endswith(".")
    assert "{{" not in alert.summary
    assert alert.description.endswith(".")
    grouped = re.match(r"^\(?(?:time\(\) - )?(?:max|min|sum) by \(([^)]*)\)", alert.expr)
    if grouped:
        assert set(NAMED.findall(alert.description)) <= {w.strip() for w in grouped[1].split(",")}
    assert alert.meaning.endswith((".", "?"))
    assert alert.confirm
    assert alert.act


def test_names_are_unique_and_every_severity_is_used() -> None:
    assert len({a.name for a in ALERTS}) == len(ALERTS)
    assert {a.severity for a in ALERTS} == set(Severity)


def test_a_runbook_has_the_rule_and_the_steps() -> None:
    alert = next(a for a in ALERTS if a.name == "SdcSuspect")
    text = runbook(alert)
    assert "fires at once, and for 1h after it has ended" in text
    assert alert.expr in text
    assert all(step in text for step in (*alert.confirm, *alert.act))
    assert "`steadyrun_sdc_suspect`" in text


def test_the_overview_keeps_bars_of_expressions_inside_its_cells() -> None:
    rows = [line for line in overview(ALERTS, RECORDINGS).splitlines() if line.startswith("| [")]
    assert len(rows) == len(ALERTS)
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)


def test_scrape_job_and_place_of_runbooks_can_be_chosen() -> None:
    text = alerts_yaml([a for a in ALERTS if a.name == "AgentDown"], "https://wiki.example/", 'my"job')
    assert 'up{job="my\\"job"} == 0' in text
    assert 'runbook_url: "https://wiki.example/SteadyrunAgentDown.md"' in text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (90, "90s"), (120, "2m"), (3600, "1h"), (86400, "1d")])
def test_durations_are_written_as_prometheus_does(seconds: int, text: str) -> None:
    assert duration(seconds) == text
