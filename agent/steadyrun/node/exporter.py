"""Serves a node's metrics: over HTTP, to Prometheus' discovery, and as a file for node_exporter.

prometheus_client is imported in the exporter's own thread, while ranks come up: the start of a job does not wait.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from steadyrun.core.files import write_atomically

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from steadyrun.collectors.metrics.exposition import Series

__all__ = ["Exporter", "ExporterPlan", "SdTarget", "split_address"]

log = structlog.get_logger()

TEXTFILE_S: Final = 15.0
CLIENT_LIMIT_S: Final = 10.0  # a client that neither asks nor reads is dropped
CLOSE_LIMIT_S: Final = 2.0
_INDEX: Final = b"<html><body><a href=/metrics>/metrics</a> <a href=/sd>/sd</a></body></html>\n"


@dataclass(frozen=True, slots=True)
class ExporterPlan:
    """What was asked for.

    Attributes:
        address: ``HOST:PORT`` or ``HOST:FIRST-LAST``; port 0 is any free one; empty for none.
        sd_dir: where the file for file_sd goes, or None.
        textfile: where the values go every 15 seconds: a ``.prom`` file, or a folder; None for nowhere.
    """

    address: str = ""
    sd_dir: Path | None = None
    textfile: Path | None = None

    @property
    def is_idle(self) -> bool:
        return not self.address and self.textfile is None


@dataclass(frozen=True, slots=True)
class SdTarget:
    """An entry for Prometheus' discovery: ``run_id`` and ``node_rank`` become labels of the target."""

    address: str
    run_id: str
    node_rank: int | None

    def to_json(self) -> dict[str, Any]:
        labels = {"run_id": self.run_id}
        if self.node_rank is not None:
            labels["node_rank"] = str(self.node_rank)
        return {"targets": [self.address], "labels": labels}


def split_address(text: str) -> tuple[str, range]:
    """Host without brackets, and the ports to try in order."""
    host, _, ports = text.rpartition(":")
    first, _, last = ports.partition("-")
    return host.strip("[]"), range(int(first), int(last or first) + 1)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], family: int) -> None:
        self.address_family = family
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without the reverse look-up of the host's name, which may take seconds."""
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is none of our errors."""
        log.debug("metrics_client_failed", exc_info=True)


class Exporter:
    """One node's exporter. ``start`` returns at once; ``close`` removes what was written.

    Args:
        read: all series, in any thread.
        name: of the files, ``<run id>-<node>``; other characters than letters, digits and ``-_.`` become ``_``.
        started: called in the exporter's thread with the address for people and discovery, or None and why there is
            none.
    """

    def __init__(
        self,
        plan: ExporterPlan,
        read: Callable[[], Sequence[Series]],
        run_id: str,
        name: str,
        started: Callable[[str | None, str], None],
    ) -> None:
        self._plan, self._read, self._run_id = plan, read, run_id
        self._name = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:150] or "steadyrun"
        self._started = started
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._server: _Server | None = None
        self._registry: CollectorRegistry | None = None
        self._targets: tuple[SdTarget, ...] = ()
        self._node_rank: int | None = None
        self._written: list[Path] = []
        self._is_leader = False
        self.address: str | None = None

    def start(self) -> None:
        """Bind, and serve from threads."""
        if self._thread is None and not self._plan.is_idle:
            self._thread = threading.Thread(target=self._run, name="steadyrun-metrics", daemon=True)
            self._thread.start()

    def take_membership(self, node_rank: int | None) -> None:
        """The node's place in the job; targets of the others are forgotten."""
        with self._lock:
            self._node_rank, self._targets = node_rank, ()
        self._write_sd()

    def add_target(self, target: SdTarget) -> None:
        """By the leader: where another node of the job serves its metrics."""
        with self._lock:
            others = tuple(t for t in self._targets if t.node_rank != target.node_rank)
            self._targets = (*others, target)

    def targets(self) -> list[dict[str, Any]]:
        """All nodes that are known here, this one first."""
        with self._lock:
            own = () if self.address is None else (SdTarget(self.address, self._run_id, self._node_rank),)
            others = tuple(t for t in self._targets if t.node_rank != self._node_rank)
        return [t.to_json() for t in (*own, *sorted(others, key=lambda t: t.node_rank or 0))]

    def close(self) -> None:
        """No port, thread or file of ours stays."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        with self._lock:
            for path in self._written:
                with contextlib.suppress(OSError):
                    path.unlink()
            self._written.clear()

    # -- the thread ----------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            from steadyrun.collectors.metrics.exposition import registry_of

            self._registry = registry_of(self._read)
        except ImportError as e:
            self._started(None, f"metrics are not served: {e}; install prometheus-client")
            return
        if self._plan.address:
            self._serve()
        while self._plan.textfile is not None and not self._stop.is_set():
            self._write_textfile(self._plan.textfile)
            self._stop.wait(TEXTFILE_S)

    def _serve(self) -> None:
        try:
            server = self._bind()
        except OSError as e:
            why = (e.strerror or str(e)).lower()
            hint = "give port 0 for any free port, or a range such as 127.0.0.1:9400-9415"
            self._started(None, f"metrics are not served: cannot listen on {self._plan.address}: {why}; {hint}")
            return
        if self._stop.is_set():
            server.server_close()
            return
        self._server = server
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.5}, name="steadyrun-metrics-http", daemon=True
        ).start()
        self.address = _advertised(str(server.server_address[0]), int(server.server_address[1]))
        self._write_sd()
        self._started(self.address, "")

    def _bind(self) -> _Server:
        """On the first free of the ports; raises the last one's OSError."""
        host, ports = split_address(self._plan.address)
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        exporter = self

        class Handler(_Handler):
            owner = exporter

        error: OSError = OSError("there is no port to try")
        for port in ports:
            try:
                return _Server((host, port), Handler, family)
            except OSError as e:  # noqa: PERF203
                error = e
        raise error

    # -- files ---------------------------------------------------------------------------------------------------------
    def _write_sd(self) -> None:
        folder = self._plan.sd_dir
        if folder is None or self.address is None or self._stop.is_set():
            return
        with self._lock:
            own = SdTarget(self.address, self._run_id, self._node_rank).to_json()
            self._replace(folder / f"{self._name}.json", json.dumps([own]).encode())

    def _write_textfile(self, place: Path) -> None:
        path = place if place.suffix == ".prom" else place / f"{self._name}.prom"
        from prometheus_client import generate_latest

        assert self._registry is not None
        data = generate_latest(self._registry)
        with self._lock:
            if not self._stop.is_set():
                self._replace(path, data)

    def _replace(self, path: Path, data: bytes) -> None:
        """Whole at every moment; a full disk or a missing folder is said once per file."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data, 0o644)  # Prometheus and node_exporter run as other users
        except OSError as e:
            log.warning("metrics_file_not_written", path=str(path), error=e.strerror or str(e))
            return
        if path not in self._written:
            self._written.append(path)

    # -- answers -------------------------------------------------------------------------------------------------------
    def answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """Status, content type and body for a request."""
        where = path.partition("?")[0]
        if where == "/metrics":
            from prometheus_client.exposition import choose_encoder

            assert self._registry is not None
            encode, content_type = choose_encoder(accept)
            return 200, content_type, encode(self._registry)
        if where == "/sd":
            return 200, "application/json", json.dumps(self.targets()).encode()
        if where == "/":
            return 200, "text/html", _INDEX
        return 404, "text/plain", b"there are /metrics and /sd\n"


class _Handler(BaseHTTPRequestHandler):
    owner: Exporter
    timeout = CLIENT_LIMIT_S
    server_version = "steadyrun"
    sys_version = ""

    def do_GET(self) -> None:
        self._send(with_body=True)

    def do_HEAD(self) -> None:
        self._send(with_body=False)

    def _send(self, with_body: bool) -> None:
        try:
            status, content_type, body = self.owner.answer(self.path, self.headers.get("Accept", ""))
        except Exception as e:  # one bad scrape is no reason for the next
            log.warning("scrape_failed", error=repr(e))
            status, content_type, body = 500, "text/plain", f"{type(e).__name__}: {e}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no events."""


def _advertised(host: str, port: int) -> str:
    """Where others find it: the host's name where it listens on every address."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
