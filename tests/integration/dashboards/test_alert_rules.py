"""Prometheus's own tools judge the rule files: every rule is valid, each alert fires when it should and not before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from alert_cases import CASES, Case
from prometheus_tools import check, tool

from steadyrun.collectors.alerts import ALERTS, RECORDINGS, Alert
from steadyrun.collectors.alerts.writing import alerts_yaml, recordings_yaml

BY_NAME = {a.name: a for a in ALERTS}


@pytest.fixture
def rules(tmp_path: Path) -> tuple[Path, Path]:
    """Fresh from the tables."""
    alerts, recordings = tmp_path / "alerts.yaml", tmp_path / "rules.yaml"
    alerts.write_text(alerts_yaml(ALERTS))
    recordings.write_text(recordings_yaml(RECORDINGS))
    return alerts, recordings


def _series(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"series": series, "values": text} for series, text in values.items()]


def _firing(alert: Alert, case: Case) -> dict[str, object]:
    return {
        "exp_labels": {"severity": alert.severity.value, **case.labels},
        "exp_annotations": {
            "summary": alert.summary,
            "description": case.says,
            "runbook_url": f"runbooks/{alert.full_name}.md",
        },
    }


def _expect(alert: Alert, minute: int, *firing: dict[str, object]) -> dict[str, object]:
    return {"eval_time": f"{minute}m", "alertname": alert.full_name, "exp_alerts": list(firing)}


def _promtool_tests(case: Case) -> list[dict[str, object]]:
    alert = BY_NAME[case.alert]
    assert alert.hold_s % 60 == 0
    fires_at = case.true_at + alert.hold_s // 60
    moments = [_expect(alert, fires_at, _firing(alert, case))]
    if fires_at:
        moments.insert(0, _expect(alert, fires_at - 1))
    if case.ended_at is not None:
        moments += [_expect(alert, case.ended_at - 1, _firing(alert, case)), _expect(alert, case.ended_at)]
    just_below = [_expect(alert, m) for m in (fires_at, fires_at + 5)]
    return [
        {"name": f"{case.alert} fires", "interval": "1m", "input_series": _series(case.fires),
         "alert_rule_test": moments},
        {"name": f"{case.alert} just below", "interval": "1m", "input_series": _series(case.silent),
         "alert_rule_test": just_below},
    ]  # fmt: skip


def test_every_alert_has_a_case() -> None:
    assert {c.alert for c in CASES} == set(BY_NAME)


def test_promtool_finds_the_rules_valid(rules: tuple[Path, Path]) -> None:
    text = check(tool("promtool"), "check", "rules", *rules)
    assert f"{len(ALERTS)} rules found" in text
    assert f"{len(RECORDINGS)} rules found" in text


def test_every_alert_fires_and_stays_silent_just_below(rules: tuple[Path, Path], tmp_path: Path) -> None:
    # One alert a file: promtool evaluates all rules of a file at every minute of every test.
    promtool = tool("promtool")
    files = []
    for case in CASES:
        rule, file = tmp_path / f"{case.alert}.yaml", tmp_path / f"{case.alert}.test.yaml"
        rule.write_text(alerts_yaml([BY_NAME[case.alert]]))
        wanted = {
            "rule_files": [str(rule), str(rules[1])],
            "evaluation_interval": "1m",
            "group_eval_order": ["steadyrun-recording", f"steadyrun-{BY_NAME[case.alert].group}"],
            "tests": _promtool_tests(case),
        }
        file.write_text(yaml.safe_dump(wanted, sort_keys=False))
        files.append(file)
    assert len(files) == len(ALERTS)
    check(promtool, "test", "rules", *files, limit_s=120.0)


def test_an_xid_of_a_gpu_that_nobody_knew_fires_for_as_long_as_any_other(tmp_path: Path) -> None:
    promtool = tool("promtool")
    known = next(c for c in CASES if c.alert == "GpuXidHardware")
    (series,) = known.fires
    born = replace(known, fires={series: "_x6 1x60"})
    rule, file = tmp_path / "alerts.yaml", tmp_path / "tests.yaml"
    rule.write_text(alerts_yaml([BY_NAME[known.alert]]))
    wanted = {"rule_files": [str(rule)], "evaluation_interval": "1m", "tests": _promtool_tests(born)[:1]}
    file.write_text(yaml.safe_dump(wanted, sort_keys=False))
    check(promtool, "test", "rules", file)


def test_a_counter_that_is_born_at_one_is_not_seen(rules: tuple[Path, Path], tmp_path: Path) -> None:
    # Why exporters send every label set from the start.
    promtool = tool("promtool")
    labels = 'run_id="r",instance="n0",class="reboot"'
    test = {
        "interval": "1m",
        "input_series": _series({
            f'steadyrun_gpu_xid_errors_total{{{labels},gpu="5"}}': "0x5 1x20",
            f'steadyrun_gpu_xid_errors_total{{{labels},gpu="6"}}': "_x5 1x20",
        }),
        "promql_expr_test": [{
            "expr": "sum by (gpu) (increase(steadyrun_gpu_xid_errors_total[5m])) > 0",
            "eval_time": "8m",
            "exp_samples": [{"labels": '{gpu="5"}', "value": 1}],
        }],
    }  # fmt: skip
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules[0])], "evaluation_interval": "1m", "tests": [test]}))
    check(promtool, "test", "rules", file)
