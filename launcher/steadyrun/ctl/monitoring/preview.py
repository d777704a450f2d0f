"""Serves the preview page, the dashboards it draws, and Prometheus's API behind them, on the loopback interface."""

from __future__ import annotations

import http.server
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

__all__ = ["PreviewServer"]

LIMIT_S: Final = 30.0
_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json"}
# The page needs nothing from elsewhere; so a label value that got through as markup could fetch nothing either.
_POLICY: Final = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"


class PreviewServer(http.server.ThreadingHTTPServer):
    """Listens at once; ``serve_forever`` answers.

    Args:
        folder: of the dashboards; only files in its ``preview`` and ``grafana`` are given out.
        prometheus: address of the server that ``/api/v1`` is handed on to.
        address: host and port; port 0 takes a free one, which ``server_port`` then tells.
    """

    daemon_threads = True

    def __init__(self, folder: Path, prometheus: str, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.files = {f"/{p.name}": p for p in (folder / "preview").iterdir()}
        self.files |= {f"/grafana/{p.name}": p for p in (folder / "grafana").glob("*.json")}
        self.files["/"] = folder / "preview/index.html"
        self.prometheus = prometheus.rstrip("/")
        super().__init__(address, _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PreviewServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/v1/"):
            self._hand_on()
        elif (file := self.server.files.get(path)) is not None and file.is_file():
            self._give(200, file.read_bytes(), _TYPES.get(file.suffix, "text/plain"))
        else:
            self._give(404, b"there is no such file here\n", "text/plain")

    def _hand_on(self) -> None:
        try:
            with urllib.request.urlopen(self.server.prometheus + self.path, timeout=LIMIT_S) as answer:
                code, body = answer.status, answer.read()
        except urllib.error.HTTPError as e:
            code, body = e.code, e.read()
        except OSError as e:
            why = str(getattr(e, "reason", e)).replace('"', "'").replace("\\", "/")
            text = f'{{"status":"error","error":"cannot ask Prometheus at {self.server.prometheus}: {why}"}}'
            code, body = 502, text.encode()
        self._give(code, body, "application/json")

    def _give(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads these."""
