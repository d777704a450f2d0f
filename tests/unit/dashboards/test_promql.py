"""What expressions ask for is found also in nested and joined ones."""

from __future__ import annotations

import pytest

from steadyrun.collectors.metrics.promql import Selector, grouping_labels, selectors


def test_functions_windows_and_matchers_are_found() -> None:
    expr = 'sum by (a) (rate(x_total{b="c",d=~"e|f"}[5m])) / ignoring (a) group_left (g) topk by (c) (3, y) > 2'
    assert selectors(expr) == [
        Selector("x_total", (("b", "=", "c"), ("d", "=~", "e|f")), ("rate",), "5m"),
        Selector("y", (), ()),
    ]
    assert list(grouping_labels(expr)) == ["a", "a", "g", "c"]


def test_aggregations_with_the_labels_behind_and_dashboard_variables() -> None:
    expr = 'histogram_quantile(0.95, sum(rate(z_bucket{job=~"$job"}[$__rate_interval])) by (le)) and on () vector(1)'
    assert selectors(expr) == [
        Selector("z_bucket", (("job", "=~", "$job"),), ("histogram_quantile", "rate"), "$__rate_interval")
    ]


def test_words_of_the_language_are_no_metrics() -> None:
    assert [s.name for s in selectors("a and b or c unless d == bool 1 offset 5m")] == ["a", "b", "c", "d"]
    assert selectors("time() > Inf") == []


@pytest.mark.parametrize("expr", ["sum(x", "x)", "x ; y"])
def test_what_cannot_be_read_is_refused(expr: str) -> None:
    with pytest.raises(ValueError, match=r"PromQL|parenthesis"):
        selectors(expr)
