"""How findings become one result."""

from __future__ import annotations

import json

from steadyrun.collectors.protocol import Health, Trouble, combine, unknown
from steadyrun.core.records import to_json


def test_the_worst_is_told_first_and_advice_once() -> None:
    troubles = [
        Trouble(Health.DEGRADED, "a is slow", ("look", "wait")),
        Trouble(Health.UNHEALTHY, "b is dead", ("replace b", "look")),
        Trouble(Health.UNKNOWN, "c does not say"),
    ]
    result = combine("x", troubles, "all well", {"n": 3})
    assert result.health is Health.UNHEALTHY
    assert result.reason == "b is dead (and 2 more)"
    assert result.actions == ("replace b", "look", "wait")
    assert [t.health.value for t in result.troubles] == ["unhealthy", "degraded", "unknown"]


def test_nothing_wrong_is_healthy_with_a_reason() -> None:
    result = combine("x", [], "all well", {"n": 3})
    assert (result.health, result.reason, result.actions) == (Health.HEALTHY, "all well", ())


def test_not_knowing_is_worse_than_healthy_and_better_than_bad() -> None:
    order = sorted(Health, key=lambda h: h.weight)
    assert order == [Health.HEALTHY, Health.UNKNOWN, Health.DEGRADED, Health.UNHEALTHY]


def test_a_result_is_plain_data() -> None:
    value = json.loads(json.dumps(to_json(unknown("x", "cannot look", "do this"))))
    assert value["health"] == "unknown"
    assert value["troubles"][0] == {"health": "unknown", "reason": "cannot look", "actions": ["do this"], "subject": ""}
