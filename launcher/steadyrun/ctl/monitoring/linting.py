"""Faults of a Grafana dashboard that can be seen without a server: in its panels, and in what its queries ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from steadyrun.collectors.metrics.promql import COUNTER_FUNCTIONS, Selector, grouping_labels, selectors
from steadyrun.collectors.metrics.spec import SAMPLES, TARGET_LABELS, Family, MetricType

__all__ = ["Fault", "lint", "panels_of", "queries_of"]

SOURCE: Final = "${datasource}"
VARIABLES: Final = ("datasource", "job", "run_id")
MATCHED: Final = frozenset({"job", "run_id"})  # each selection must be narrowed to one run
WINDOWS: Final = frozenset({"$__rate_interval", "$__range"})
_PROMETHEUS_OWN: Final = frozenset({"up"})


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, and in which panel; empty for the dashboard itself."""

    panel: str
    text: str


def panels_of(dashboard: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Its panels without the rows that head them."""
    for panel in dashboard.get("panels", ()):
        if panel.get("type") == "row":
            yield from panel.get("panels", ())
        else:
            yield panel


def queries_of(panel: Mapping[str, Any]) -> list[str]:
    return [str(target.get("expr", "")) for target in panel.get("targets", ())]


def lint(dashboard: Mapping[str, Any]) -> list[Fault]:
    """All faults, in the order of the panels."""
    out = []
    known = {v.get("name") for v in dashboard.get("templating", {}).get("list", ())}
    out += [Fault("", f"there is no variable {name}") for name in VARIABLES if name not in known]
    out += list(_overlaps(dashboard))
    for panel in panels_of(dashboard):
        title = str(panel.get("title", ""))
        out += [Fault(title, text) for text in (*_form(panel), *_queries(panel))]
    for mark in dashboard.get("annotations", {}).get("list", ()):
        name = f"annotation {mark.get('name', '')}"
        out += [Fault(name, text) for text in expression_faults(str(mark.get("expr", "")))]
    return out


def _overlaps(dashboard: Mapping[str, Any]) -> Iterator[Fault]:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard.get("panels", ()):
        place, title = panel.get("gridPos", {}), str(panel.get("title", ""))
        cells = [
            (x, y)
            for x in range(place.get("x", 0), place.get("x", 0) + place.get("w", 0))
            for y in range(place.get("y", 0), place.get("y", 0) + place.get("h", 0))
        ]
        under = {taken[c] for c in cells if c in taken}
        for other in sorted(under):
            yield Fault(title, f"lies over {other!r}")
        taken.update(dict.fromkeys(cells, title))


def _form(panel: Mapping[str, Any]) -> Iterator[str]:
    if not panel.get("title"):
        yield "has no title"
    if not panel.get("description"):
        yield "has no description"
    if not panel.get("fieldConfig", {}).get("defaults", {}).get("unit"):
        yield "has no unit"
    for source in (panel.get("datasource"), *(t.get("datasource") for t in panel.get("targets", ()))):
        if (source or {}).get("uid") != SOURCE:
            yield f"does not take its data source from the variable: {source}"
            break
    if not panel.get("targets"):
        yield "asks for nothing"


def _queries(panel: Mapping[str, Any]) -> Iterator[str]:
    for expr in queries_of(panel):
        yield from expression_faults(expr)


def expression_faults(expr: str) -> Iterator[str]:
    """What is wrong with one expression."""
    try:
        asked = selectors(expr)
    except ValueError as e:
        yield str(e)
        return
    for selector in asked:
        yield from _selector_faults(selector)
    every = {label for family in SAMPLES.values() for label in family.label_names} | {*TARGET_LABELS, "le"}
    for label in sorted(set(grouping_labels(expr)) - every):
        yield f"no series has the label {label}, in {expr}"


def _selector_faults(selector: Selector) -> Iterator[str]:
    family = SAMPLES.get(selector.name)
    if family is None and selector.name not in _PROMETHEUS_OWN:
        yield f"there is no metric {selector.name}"
        return
    if missing := sorted(MATCHED - selector.labels):
        yield f"{selector.name} is not narrowed by {' and '.join(missing)}"
    if selector.window and selector.window not in WINDOWS:
        yield f"{selector.name}[{selector.window}] has a fixed window; use $__rate_interval or $__range"
    if family is not None:
        yield from _by_family(selector, family)


def _by_family(selector: Selector, family: Family) -> Iterator[str]:
    for label in sorted(selector.labels - {*family.label_names, *TARGET_LABELS, "le"}):
        yield f"{selector.name} has no label {label}"
    for label_of in family.labels:
        for name, operator, value in selector.matchers:
            if name == label_of.name and label_of.values and not _can_match(operator, value, label_of.values):
                yield f"{selector.name} never has {name}{operator}{value!r}"
    counts = family.type in (MetricType.COUNTER, MetricType.HISTOGRAM)
    is_rated = bool(COUNTER_FUNCTIONS & set(selector.functions))
    if counts and not is_rated:
        yield f"{selector.name} is a counter and is shown without rate or increase"
    if not counts and is_rated:
        yield f"{selector.name} is no counter: rate and increase of it say nothing"


def _can_match(operator: str, value: str, values: tuple[str, ...]) -> bool:
    if "$" in value or operator in ("!=", "!~"):
        return True
    if operator == "=":
        return value in values
    return any(re.fullmatch(value, v) for v in values)
