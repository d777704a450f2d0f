"""A real Prometheus and Alertmanager on loopback, and a receiver that remembers what it was told."""

from __future__ import annotations

import http.server
import json
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest
import yaml
from jobs import free_port
from prometheus_tools import tool

from steadyrun.collectors.alerts import ALERTS, RECORDINGS
from steadyrun.collectors.alerts.writing import alerts_yaml, recordings_yaml
from steadyrun.ctl.monitoring.querying import Prometheus, PrometheusError

T = TypeVar("T")
SCRAPE_S = 2
READY_S = 60.0
TEMPLATES = Path("/usr/share/prometheus/alertmanager/default.tmpl")
POLL_S = 0.1


def wait_for(predicate: Callable[[], T], deadline_s: float, what: str, story: Callable[[], str] = str) -> T:
    """The first true value; an answer that Prometheus refuses counts as none."""
    limit_s = time.monotonic() + deadline_s
    while True:
        try:
            if value := predicate():
                return value
        except (OSError, PrometheusError):
            pass
        assert time.monotonic() < limit_s, f"not within {deadline_s:g} s: {what}\n{story()}"
        select.select([], [], [], POLL_S)


@dataclass(frozen=True)
class Notice:
    """One alert in one call of a webhook."""

    at_unix_s: float
    receiver: str
    status: str
    labels: dict[str, str]
    annotations: dict[str, str]

    @property
    def alert(self) -> str:
        return self.labels["alertname"].removeprefix("Steadyrun")


class Receiver:
    """Listens for Alertmanager; the last part of the path is the receiver's name."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = self.path.rpartition("/")[2]
                now = time.time()
                outer.notices += [Notice(now, name, a["status"], a["labels"], a["annotations"]) for a in told["alerts"]]
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def firing(self, alert: str, since_unix_s: float = 0.0) -> list[Notice]:
        told = [n for n in self.notices if n.alert == alert and n.status == "firing"]
        return [n for n in told if n.at_unix_s >= since_unix_s]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@dataclass
class Servers:
    """Both servers in one folder; ``targets`` is where file_sd files are looked for.

    Args:
        holds_s: alerts whose ``for`` is another one here, as tests do not wait for minutes.
    """

    folder: Path
    example: Path
    holds_s: dict[str, int] = field(default_factory=dict)
    with_alerts: bool = True

    def __post_init__(self) -> None:
        self.targets = self.folder / "targets"
        self.targets.mkdir(parents=True)
        self.receiver = Receiver()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._url = f"http://127.0.0.1:{free_port()}"
        self.prometheus = Prometheus(self._url)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        manager = free_port()
        alerts = [replace(a, hold_s=self.holds_s.get(a.name, a.hold_s)) for a in ALERTS]
        (self.folder / "alerts.yaml").write_text(alerts_yaml(alerts))
        (self.folder / "rules.yaml").write_text(recordings_yaml(RECORDINGS))
        config = {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
            "rule_files": ["rules.yaml", "alerts.yaml"],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{manager}"]}]}]},
            "scrape_configs": [
                {
                    "job_name": "steadyrun",
                    "file_sd_configs": [{"files": [f"{self.targets}/*.json"], "refresh_interval": "1s"}],
                }
            ],
        }
        (self.folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        if self.with_alerts:
            example = yaml.safe_load(self.example.read_text())
            example["route"] |= {"group_wait": "1s", "group_interval": "2s"}
            for receiver in example["receivers"]:
                (hook,) = receiver["webhook_configs"]
                hook["url"] = f"http://127.0.0.1:{self.receiver.port}/{receiver['name']}"
            (self.folder / "alertmanager.yaml").write_text(yaml.safe_dump(example))
            self._run(
                *_with_templates(tool("alertmanager", "prometheus-alertmanager")),
                f"--config.file={self.folder}/alertmanager.yaml",
                f"--storage.path={self.folder}/manager",
                f"--web.listen-address=127.0.0.1:{manager}",
                "--cluster.listen-address=",
            )
        self._run(
            tool("prometheus"),
            f"--config.file={self.folder}/prometheus.yaml",
            f"--storage.tsdb.path={self.folder}/data",
            f"--web.listen-address={self._url.removeprefix('http://')}",
            "--log.level=warn",
        )
        wait_for(lambda: self.prometheus.ask("query", query="vector(1)"), READY_S, "Prometheus is ready", self.logs)

    def _run(self, *command: str) -> None:
        log = self.folder / f"{len(self._processes)}.log"
        with log.open("wb") as out:
            self._processes.append(subprocess.Popen(command, stdout=out, stderr=out, cwd=self.folder, env=_clean_env()))

    def values(self, expr: str) -> list[float]:
        """The values of an expression now."""
        return [float(r["value"][1]) for r in self.prometheus.ask("query", query=expr)["result"]]

    def wait_for_notice(self, alert: str, deadline_s: float, since_unix_s: float = 0.0, **labels: str) -> Notice:
        """The first that fires of that name with these labels, since then."""

        def found() -> list[Notice]:
            return [n for n in self.receiver.firing(alert, since_unix_s) if labels.items() <= n.labels.items()]

        return wait_for(found, deadline_s, f"{alert} {labels} at a receiver", self.logs)[0]

    def logs(self) -> str:
        told = [f"{n.alert} {n.status} at {n.receiver}: {n.annotations['description']}" for n in self.receiver.notices]
        for log in self.folder.glob("*.log"):
            told += [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-10:]]
        return "\n".join(told)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(20)
        self.receiver.close()


def _with_templates(program: str) -> list[str]:
    """A command with Debian's Alertmanager: it reads its templates from a fixed path, where they are not when the
    package is only unpacked; a mount of its own puts them there, for this process alone."""
    unpacked = Path(program).resolve().parents[1] / "share"
    if TEMPLATES.is_file() or not (unpacked / TEMPLATES.relative_to("/usr/share")).is_file():
        return [program]
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip(f"Alertmanager's templates are not in {TEMPLATES.parent}, and only root can have them seem so")
    mount = 'mount -t overlay overlay -o "lowerdir=$0:/usr/share" /usr/share && exec "$@"'
    return ["unshare", "-m", "sh", "-c", mount, str(unpacked), program]


def _clean_env() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
