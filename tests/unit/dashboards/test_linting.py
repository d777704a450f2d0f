"""Mistakes that are put into a good dashboard are found, each with its panel."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadyrun.ctl.monitoring.linting import lint, panels_of

RUN = '{job=~"$job",run_id=~"$run_id"}'
ASK = "steadyrun_rank_step"


@pytest.fixture
def good(checkout: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((checkout / "dashboards/grafana/job.json").read_text())
    return loaded


def _first(dashboard: dict[str, Any]) -> dict[str, Any]:
    panel: dict[str, Any] = next(iter(panels_of(dashboard)))  # type: ignore[assignment]
    return panel


def _asking(expr: str) -> Callable[[dict[str, Any]], None]:
    def change(dashboard: dict[str, Any]) -> None:
        _first(dashboard)["targets"][0]["expr"] = expr

    return change


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    def change(dashboard: dict[str, Any]) -> None:
        _first(dashboard)[key] = []

    return change


def _overlap(dashboard: dict[str, Any]) -> None:
    _first(dashboard)["gridPos"]["w"] += 1


def _fixed_source(dashboard: dict[str, Any]) -> None:
    _first(dashboard)["datasource"]["uid"] = "my-prometheus"


def _no_variable(dashboard: dict[str, Any]) -> None:
    dashboard["templating"]["list"] = [v for v in dashboard["templating"]["list"] if v["name"] != "run_id"]


def _bad_annotation(dashboard: dict[str, Any]) -> None:
    dashboard["annotations"]["list"][0]["expr"] = f"steadyrun_nothing{RUN}"


def _no_unit(dashboard: dict[str, Any]) -> None:
    del _first(dashboard)["fieldConfig"]["defaults"]["unit"]


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (_asking(f"steadyrun_rank_stepp{RUN}"), "there is no metric steadyrun_rank_stepp"),
        (_asking(f"rate({ASK}{RUN}[$__rate_interval])"), "is no counter"),
        (_asking(f"sum(steadyrun_restarts_total{RUN})"), "without rate or increase"),
        (_asking(f"histogram_quantile(0.9, steadyrun_checkpoint_stall_seconds_bucket{RUN})"), "without rate"),
        (_asking(ASK + RUN.replace("}", ',rnk="1"}')), "has no label rnk"),
        (_asking("steadyrun_job_state" + RUN.replace("}", ',state="runing"}')), "never has state='runing'"),
        (_asking(f'{ASK}{{job=~"$job"}}'), "not narrowed by run_id"),
        (_asking(f"sum(increase(steadyrun_restarts_total{RUN}[5m]))"), "fixed window"),
        (_asking(f"sum by (ranc) ({ASK}{RUN})"), "no series has the label ranc"),
        (_asking(f"sum({ASK}{RUN}"), "not closed"),
        (_without("targets"), "asks for nothing"),
        (_without("title"), "no title"),
        (_without("description"), "no description"),
        (_no_unit, "no unit"),
        (_fixed_source, "data source"),
        (_overlap, "lies over"),
        (_no_variable, "no variable run_id"),
        (_bad_annotation, "there is no metric steadyrun_nothing"),
    ],
)
def test_a_mistake_is_found(good: dict[str, Any], mistake: Callable[[dict[str, Any]], None], text: str) -> None:
    bad = copy.deepcopy(good)
    mistake(bad)
    found = [f.text for f in lint(bad)]
    assert any(text in f for f in found), found
