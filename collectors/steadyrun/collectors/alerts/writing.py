"""Writes the table of alerts as Prometheus rule files, runbooks and an overview; and the table of metrics as a page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Final

from steadyrun.collectors.alerts.records import Alert, Recording
from steadyrun.collectors.metrics.spec import SPEC, Family, MetricType

__all__ = ["alerts_yaml", "duration", "families_in", "metrics_page", "overview", "recordings_yaml", "runbook"]

_MADE: Final = "# Made from the table in steadyrun.collectors.alerts; change it there.\n"
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./ -]*[A-Za-z0-9_]|[A-Za-z]")
_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null"})  # that YAML reads as something else


def duration(seconds: int) -> str:
    """As Prometheus writes it: ``5m``, ``90s``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _scalar(text: str) -> str:
    """As one YAML scalar: plain where that is safe, else in double quotes, whose escapes are those of JSON."""
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def recordings_yaml(recordings: Iterable[Recording]) -> str:
    """A rule file with the recording rules."""
    lines = [_MADE + "groups:", "  - name: steadyrun-recording", "    rules:"]
    for rule in recordings:
        lines += [
            f"      # {rule.help}.",
            f"      - record: {rule.record}",
            *_expression(rule.expr),
        ]
    return "\n".join(lines) + "\n"


def _expression(expr: str) -> Iterator[str]:
    yield "        expr: >-"
    yield f"          {expr}"


def alerts_yaml(alerts: Iterable[Alert], runbooks: str = "runbooks/", job: str = "steadyrun") -> str:
    """A rule file with the alerts.

    Args:
        runbooks: what comes before the runbook's name in each alert's ``runbook_url``.
        job: the name of the job in Prometheus's scrape configuration.
    """
    groups: dict[str, list[Alert]] = {}
    for alert in alerts:
        groups.setdefault(alert.group, []).append(alert)
    lines = [_MADE + "groups:"]
    for group, members in groups.items():
        lines += [f"  - name: steadyrun-{group}", "    rules:"]
        for alert in members:
            lines += _alert(alert, runbooks, job)
    return "\n".join(lines) + "\n"


def _alert(alert: Alert, runbooks: str, job: str) -> Iterator[str]:
    yield f"      - alert: {alert.full_name}"
    yield from _expression(alert.expr.replace('job="steadyrun"', f"job={json.dumps(job)}"))
    if alert.hold_s:
        yield f"        for: {duration(alert.hold_s)}"
    if alert.keep_s:
        yield f"        keep_firing_for: {duration(alert.keep_s)}"
    yield "        labels:"
    yield f"          severity: {alert.severity.value}"
    yield "        annotations:"
    yield f"          summary: {_scalar(alert.summary)}"
    yield f"          description: {_scalar(alert.description)}"
    yield f"          runbook_url: {_scalar(f'{runbooks}{alert.full_name}.md')}"


def runbook(alert: Alert) -> str:
    """One alert's page."""
    when = f"for {duration(alert.hold_s)}" if alert.hold_s else "at once"
    kept = f", and for {duration(alert.keep_s)} after it has ended" if alert.keep_s else ""
    lines = [f"# {alert.full_name}", "", alert.summary, ""]
    lines += [f"Severity **{alert.severity.value}**; fires {when}{kept} when", "", "```promql", alert.expr, "```", ""]
    lines += ["## What it means", "", alert.meaning, "", "## How to confirm it", ""]
    lines += [f"- {step}" for step in alert.confirm]
    lines += ["", "## What to do", ""]
    lines += [f"- {step}" for step in alert.act]
    asked = families_in(alert.expr)
    if asked:
        lines += ["", "## Metrics", ""]
        lines += [f"- `{f.name}`: {f.help}." for f in asked]
    return "\n".join(lines) + "\n"


def families_in(expr: str) -> list[Family]:
    """The families that an expression asks for, also through recorded series, in the order of the table."""
    words = set(re.findall(r"[A-Za-z_:][A-Za-z0-9_:]*", expr))
    return [f for f in SPEC.values() if words & set(f.samples)]


def overview(alerts: Iterable[Alert], recordings: Iterable[Recording]) -> str:
    """All alerts on one page, with links to their runbooks."""
    lines = ["# Alerts", "", "| alert | severity | for | what | when |", "|---|---|---|---|---|"]
    for a in alerts:
        hold = duration(a.hold_s) if a.hold_s else ""
        link = f"[{a.full_name}]({a.full_name}.md)"
        lines.append(f"| {link} | {a.severity.value} | {hold} | {a.summary} | {_cell(a.expr)} |")
    lines += ["", "## Recorded series", "", "| series | what | how |", "|---|---|---|"]
    lines += [f"| `{r.record}` | {r.help}. | {_cell(r.expr)} |" for r in recordings]
    return "\n".join(lines) + "\n"


def _cell(expr: str) -> str:
    return "`" + expr.replace("|", "\\|") + "`"


def metrics_page(families: Iterable[Family]) -> str:
    """All metrics on one page."""
    who = {"node": "every node", "leader": "group rank 0", "rank": "the rank's node", "gpu": "the GPU's node"}
    lines = [
        "# Metrics",
        "",
        "Labels `job`, `instance`, `run_id` and `node_rank` belong to the scrape target and are not listed.",
        "",
        "| metric | type | labels | unit | exported by | what |",
        "|---|---|---|---|---|---|",
    ]
    for f in families:
        labels = ", ".join(_label(f, i) for i in range(len(f.labels)))
        kind = f.type.value if f.type is not MetricType.INFO else "gauge (info)"
        lines.append(f"| `{f.name}` | {kind} | {labels} | {f.unit.value} | {who[f.source.value]} | {f.help}. |")
    return "\n".join(lines) + "\n"


def _label(family: Family, index: int) -> str:
    label = family.labels[index]
    if not label.values or len(label.values) > 12:
        return f"`{label.name}`"
    return f"`{label.name}` ({', '.join(label.values)})"
