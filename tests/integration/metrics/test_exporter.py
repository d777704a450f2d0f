"""Real sockets and files: what is served, where, and what is left at the end."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from steadyrun.node.exporter import Exporter, ExporterPlan, SdTarget, split_address
from steadyrun.node.metrics import NodeFacts, NodeMetrics

LATE_S = 20.0


class Served:
    """An exporter that has started, or has said why not."""

    def __init__(self, plan: ExporterPlan) -> None:
        now_s = time.monotonic()
        self.metrics = NodeMetrics(NodeFacts("run/1", "n0", "1.0", 1, 0, 1, 1), now_s, time.time())
        self._told = threading.Event()
        self.address: str | None = None
        self.why = ""
        self.exporter = Exporter(plan, self.metrics.series, "run/1", "run/1-n0", self._started)
        self.exporter.start()
        if plan.address:
            assert self._told.wait(LATE_S)

    def _started(self, address: str | None, why: str) -> None:
        self.address, self.why = address, why
        self._told.set()

    def get(self, path: str, accept: str = "") -> tuple[str, bytes]:
        request = urllib.request.Request(f"http://{self.address}{path}", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=LATE_S) as answer:
            return answer.headers["Content-Type"], answer.read()


@pytest.fixture
def serve() -> Iterator[Callable[[ExporterPlan], Served]]:
    made: list[Served] = []

    def start(plan: ExporterPlan) -> Served:
        made.append(Served(plan))
        return made[-1]

    yield start
    for each in made:
        each.exporter.close()


def test_text_and_openmetrics_are_negotiated(serve: Callable[[ExporterPlan], Served]) -> None:
    served = serve(ExporterPlan("127.0.0.1:0"))
    kind, body = served.get("/metrics")
    assert kind.startswith("text/plain; version=0.0.4")
    names = {f.name for f in text_string_to_metric_families(body.decode())}
    assert {"steadyrun_restarts", "steadyrun_job_info", "steadyrun_time_seconds"} <= names
    kind, body = served.get("/metrics", "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert {"steadyrun_restarts", "steadyrun_job"} <= {f.name for f in openmetrics_families(body.decode())}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        served.get("/nothing")


def test_discovery_lists_all_nodes_this_one_first(serve: Callable[[ExporterPlan], Served]) -> None:
    served = serve(ExporterPlan("127.0.0.1:0"))
    served.exporter.take_membership(0)
    served.exporter.add_target(SdTarget("n2:9400", "run/1", 2))
    served.exporter.add_target(SdTarget("n1:9400", "run/1", 1))
    served.exporter.add_target(SdTarget("n1:9401", "run/1", 1))  # its agent was started again
    found = json.loads(served.get("/sd")[1])
    assert [t["targets"] for t in found] == [[served.address], ["n1:9401"], ["n2:9400"]]
    assert found[1]["labels"] == {"run_id": "run/1", "node_rank": "1"}


def test_a_taken_port_is_said_and_a_range_takes_the_next(serve: Callable[[ExporterPlan], Served]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = serve(ExporterPlan(f"127.0.0.1:{port}"))
        assert refused.address is None
        assert "cannot listen on" in refused.why
        assert "port 0" in refused.why
        last = min(port + 20, 65535)
        if last > port:
            ranged = serve(ExporterPlan(f"127.0.0.1:{port}-{last}"))
            assert ranged.address is not None
            assert port < int(ranged.address.rpartition(":")[2]) <= last


def test_files_are_there_while_the_job_is(
    tmp_path: Path, serve: Callable[[ExporterPlan], Served], wait_until: Callable[..., object]
) -> None:
    sd, text = tmp_path / "sd", tmp_path / "text"
    served = serve(ExporterPlan("127.0.0.1:0", sd, text))
    served.exporter.take_membership(3)
    wait_until((sd / "run_1-n0.json").exists, LATE_S)
    wait_until((text / "run_1-n0.prom").exists, LATE_S)
    (target,) = json.loads((sd / "run_1-n0.json").read_text())
    assert target == {"targets": [served.address], "labels": {"run_id": "run/1", "node_rank": "3"}}
    content = (text / "run_1-n0.prom").read_text()
    assert all(
        len(line.split()) == 2
        for line in content.splitlines()
        if not line.startswith("#") and " " in line and '"' not in line
    )
    served.exporter.close()
    assert list(sd.iterdir()) == []
    assert list(text.iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_only_that(
    tmp_path: Path, serve: Callable[[ExporterPlan], Served]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    served = serve(ExporterPlan("127.0.0.1:0", blocked / "sd"))
    assert served.get("/metrics")[1]


def test_a_client_that_says_nothing_holds_nobody_up(serve: Callable[[ExporterPlan], Served]) -> None:
    served = serve(ExporterPlan("127.0.0.1:0"))
    assert served.address is not None
    host, _, port = served.address.rpartition(":")
    with socket.create_connection((host, int(port))):
        assert served.get("/metrics")[1]


def test_scrapes_and_news_at_the_same_time_never_fail(serve: Callable[[ExporterPlan], Served]) -> None:
    served = serve(ExporterPlan("127.0.0.1:0"))
    stop = threading.Event()

    def news() -> None:
        attempt = 0
        while not stop.is_set():
            attempt += 1
            base = {"at_s": time.monotonic(), "at_unix_s": time.time(), "attempt": attempt}
            served.metrics.read({**base, "type": "rank_started", "rank": 0})
            served.metrics.read({**base, "type": "alarm", "stage": "soft", "key": f"s{attempt % 50}"})

    thread = threading.Thread(target=news)
    thread.start()
    try:
        for _ in range(20):
            body = served.get("/metrics")[1].decode()
            assert list(text_string_to_metric_families(body))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    ("text", "host", "ports"),
    [
        ("127.0.0.1:0", "127.0.0.1", [0]),
        ("[::1]:9400-9402", "::1", [9400, 9401, 9402]),
        ("node:9400", "node", [9400]),
    ],
)
def test_addresses(text: str, host: str, ports: list[int]) -> None:
    found, tried = split_address(text)
    assert (found, list(tried)) == (host, ports)
