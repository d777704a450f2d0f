"""Every query of the dashboards is executed on a real Prometheus that scrapes every family of the table."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_servers import Servers, wait_for
from prometheus_tools import check, tool

from steadyrun.collectors.metrics.exposition import Series, registry_of
from steadyrun.collectors.metrics.spec import SPEC, MetricType, Unit
from steadyrun.collectors.metrics.values import Values
from steadyrun.ctl.main import main
from steadyrun.ctl.monitoring.preview import PreviewServer

prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
OPEN = {
    "rank": ("0", "1"),
    "section": ("step", "checkpointing"),
    "collector": ("nvml", "space"),
    "gpu": ("0", "1"),
    "sensor": ("gpu", "memory"),
}


class Everything:
    """All families with a value that moves at each scrape."""

    def __init__(self) -> None:
        self.values = Values()
        self.scrapes = 0

    def read(self) -> list[Series]:
        self.scrapes += 1
        for name, family in SPEC.items():
            for labels in self._labels(name):
                if family.type is MetricType.HISTOGRAM:
                    self.values.observe(name, family.buckets[self.scrapes % 3], *labels)
                elif family.type is MetricType.COUNTER:
                    self.values.add(name, 1.0, *labels)
                else:
                    at = time.time() - 5 if family.unit is Unit.TIMESTAMP else 1.0
                    self.values.set(name, at, *labels)
        whole: list[Series] = [(SPEC[n], s) for n, s in self.values.numbers.items()]
        return whole + [(SPEC[n], s) for n, s in self.values.histograms.items()]

    def _labels(self, name: str) -> list[tuple[str, ...]]:
        family = SPEC[name]
        out: list[tuple[str, ...]] = []
        for i in range(2):
            known = {b.name: OPEN.get(b.name, ("x", "x"))[i] for b in family.labels if not b.values}
            out += list(family.label_sets(**known))
        return list(dict.fromkeys(out))


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Everything, str]]:
    everything = Everything()
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry_of(everything.read))
    yield everything, f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def servers(
    served: tuple[Everything, str], tmp_path_factory: pytest.TempPathFactory, checkout: Path
) -> Iterator[Servers]:
    tool("prometheus")
    example = checkout / "dashboards/prometheus/alertmanager.yaml"
    running = Servers(tmp_path_factory.mktemp("prometheus") / "servers", example, with_alerts=False)
    everything, address = served
    target = [{"targets": [address], "labels": {"run_id": "r-1", "node_rank": "0"}}]
    (running.targets / "r-1.json").write_text(json.dumps(target))
    try:
        wait_for(lambda: everything.scrapes >= 5 and running.values("sum(up)") == [1.0], 60, "5 scrapes", running.logs)
        yield running
    finally:
        running.close()


def _check(servers: Servers, *arguments: str) -> tuple[int, Any]:
    out = io.StringIO()
    code = main(["dashboards", "check", "--prometheus", servers.prometheus.url, "--json", *arguments], out)
    return code, json.loads(out.getvalue())


def test_every_query_returns_data(servers: Servers) -> None:
    code, told = _check(servers, "--run-id", "r-1")
    empty = [
        (q["panel"], q["expr"], q["error"])
        for d in told["dashboards"]
        for q in d["queries"]
        if not q["series"] or not q["points"]
    ]
    assert not empty
    assert code == 0
    assert sum(len(d["queries"]) for d in told["dashboards"]) > 60


def test_seeded_mistakes_are_caught(servers: Servers, checkout: Path, tmp_path: Path) -> None:
    mistakes = {
        "unknown metric": 'steadyrun_rank_stop{job=~"$job",run_id=~"$run_id"}',
        "rate of a gauge": 'rate(steadyrun_rank_step{job=~"$job",run_id=~"$run_id"}[$__rate_interval])',
        "empty panel": 'steadyrun_rank_step{job=~"$job",run_id=~"$run_id",rank="4711"}',
        "syntax": 'sum by (rank) (steadyrun_rank_step{job=~"$job",run_id=~"$run_id"}) +',
    }
    dashboard = json.loads((checkout / "dashboards/grafana/job.json").read_text())
    panels = [p for p in dashboard["panels"] if p["type"] == "stat"]
    for panel, (name, expr) in zip(panels, mistakes.items(), strict=False):
        panel["title"], panel["targets"][0]["expr"] = name, expr
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(dashboard))
    code, told = _check(servers, str(file))
    assert code == 1
    (found,) = told["dashboards"]
    assert {f["panel"] for f in found["faults"]} == {"unknown metric", "rate of a gauge"}
    assert {q["panel"] for q in found["queries"] if q["error"]} == {"syntax"}
    empty = {q["panel"] for q in found["queries"] if not q["error"] and not q["series"] and not q["points"]}
    assert empty == {"unknown metric", "empty panel"}


def test_alert_rules_evaluate_without_error(servers: Servers) -> None:
    def states() -> set[str]:
        groups = servers.prometheus.ask("rules")["groups"]
        rules = [r for g in groups for r in g["rules"]]
        told = {r["health"] for r in rules}
        assert "err" not in told, [r["lastError"] for r in rules if r["health"] == "err"]
        return told if told == {"ok"} else set()

    assert wait_for(states, 30, "every rule was evaluated", servers.logs) == {"ok"}


def test_exposition_passes_promtools_lint(served: tuple[Everything, str], tmp_path: Path) -> None:
    promtool = tool("promtool")
    with urllib.request.urlopen(f"http://{served[1]}/metrics", timeout=20) as answer:
        (tmp_path / "metrics").write_bytes(answer.read())
    check("bash", "-c", f"'{promtool}' check metrics < '{tmp_path}/metrics'")


@pytest.fixture
def preview(servers: Servers, checkout: Path) -> Iterator[str]:
    with PreviewServer(checkout / "dashboards", servers.prometheus.url) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_preview_gives_out_its_files_and_hands_queries_on(preview: str) -> None:
    def get(path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(preview + path, timeout=20) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as e:
            return e.code, e.read()

    assert b"preview.js" in get("/")[1]
    assert json.loads(get("/grafana/node.json")[1])["uid"] == "steadyrun-node"
    assert json.loads(get("/api/v1/query?query=1%2B1")[1])["data"]["result"][1] == "2"
    code, body = get("/api/v1/query?query=1%2B")
    assert (code, json.loads(body)["status"]) == (400, "error")
    for hidden in (
        "/README.md",
        "/grafana/../README.md",
        "/%2e%2e/README.md",
        "/tools/build.py",
        "/preview/index.html",
    ):
        assert get(hidden)[0] == 404


@pytest.mark.deadline(180)
@pytest.mark.parametrize("name", ["job", "node"])
def test_a_browser_draws_every_panel(name: str, preview: str, checkout: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
        "--virtual-time-budget=20000", "--dump-dom", f"{preview}/?dashboard={name}&span=300&step=2&still",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    page = done.stdout
    assert 'data-drawn="1"' in page, page[-2000:] + done.stderr[-1000:]
    assert 'class="error"' not in page
    assert "no data" not in page
    panels = json.loads((checkout / f"dashboards/grafana/{name}.json").read_text())["panels"]
    drawn = sum(p["type"] != "row" for p in panels)
    assert page.count('<section class="panel') == drawn
    assert page.count('<div class="u-wrap"') == sum(p["type"] == "timeseries" for p in panels)
