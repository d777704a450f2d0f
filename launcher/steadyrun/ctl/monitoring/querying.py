"""Executes the queries of a dashboard on a live Prometheus."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from steadyrun.core.errors import SteadyrunError
from steadyrun.ctl.monitoring.linting import panels_of, queries_of

__all__ = ["Answer", "Prometheus", "PrometheusError", "answers", "with_values"]

LIMIT_S: Final = 30.0
_VARIABLE: Final = re.compile(r"\$\{?(\w+)\}?")


class PrometheusError(SteadyrunError):
    """The server does not answer, or refuses a query."""


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A server's HTTP API.

    Args:
        url: where its pages are, e.g. ``http://127.0.0.1:9090``.
    """

    url: str

    def ask(self, path: str, **parameters: object) -> Any:
        """The ``data`` of its answer.

        Raises:
            PrometheusError: no answer, or an error; the text is the server's.
        """
        wanted = urllib.parse.urlencode({k: str(v) for k, v in parameters.items()})
        address = f"{self.url.rstrip('/')}/api/v1/{path}?{wanted}"
        if not address.startswith(("http://", "https://")):
            raise PrometheusError(f"{self.url} is no address of a Prometheus; give one like http://127.0.0.1:9090")
        try:
            with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
                body = answer.read()
        except urllib.error.HTTPError as e:
            body = e.read()
        except OSError as e:
            why = getattr(e, "reason", e)
            raise PrometheusError(f"cannot ask Prometheus at {self.url}: {why}; is it running there?") from None
        try:
            told = json.loads(body)
        except ValueError:
            raise PrometheusError(f"{self.url} does not answer like Prometheus; is the address right?") from None
        if told.get("status") != "success":
            raise PrometheusError(str(told.get("error", "no reason given")))
        return told["data"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one query; ``series`` -1 with an ``error``. ``points``: of the query over time."""

    panel: str
    expr: str
    series: int
    points: int = 0
    error: str = ""

    @property
    def is_empty(self) -> bool:
        return not self.error and self.series == 0 and self.points == 0


def with_values(expr: str, values: Mapping[str, str]) -> str:
    """*expr* with its variables replaced; those without a value match everything."""
    return _VARIABLE.sub(lambda m: values.get(m[1], ".*"), expr)


def answers(
    dashboard: Mapping[str, Any], server: Prometheus, values: Mapping[str, str], span_s: float = 900.0
) -> Iterator[Answer]:
    """Every query asked twice: for now, and over the last *span_s* seconds."""
    step_s = max(span_s / 60, 1.0)
    values = {"__rate_interval": f"{max(step_s * 4, 60):.0f}s", "__range": f"{span_s:.0f}s", **values}
    for panel in panels_of(dashboard):
        for raw in queries_of(panel):
            yield _answer(server, str(panel.get("title", "")), with_values(raw, values), span_s, step_s)


def _answer(server: Prometheus, title: str, expr: str, span_s: float, step_s: float) -> Answer:
    try:
        now = server.ask("query", query=expr)
        at_s = time.time()
        told = server.ask("query_range", query=expr, start=at_s - span_s, end=at_s, step=step_s)
    except PrometheusError as e:
        return Answer(title, expr, -1, error=str(e))
    series = len(now["result"]) if now["resultType"] in ("vector", "matrix") else 1
    return Answer(title, expr, series, sum(len(s["values"]) for s in told["result"]))
