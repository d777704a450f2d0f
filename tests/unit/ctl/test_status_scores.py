"""``steadyctl status`` names the nodes that faults were blamed on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from steadyrun.detect.faulttable import FaultKind
from steadyrun.detect.nodescore import Machine, Mark, NodeScores, Why

A, B, C = Machine("alpha", "h1"), Machine("beta", "h2"), Machine("gamma", "h3")


def write(run: Any, *marks: tuple[Machine, float]) -> None:
    """Marks of this age on these nodes."""
    now_unix_s = time.time()
    made = [
        Mark("demo", i, m.node, m.host, Why.BLAMED, FaultKind.CRASH, now_unix_s - age_s, 1.0)
        for i, (m, age_s) in enumerate(marks)
    ]
    path = run.folder.node_scores
    path.parent.mkdir(exist_ok=True)
    told = NodeScores("demo").with_marks(made, now_unix_s - 30 * 86400.0).to_json((A, B, C), now_unix_s)
    path.write_text(json.dumps(told))


def test_nodes_are_named_with_their_scores_as_of_now(ctl: Callable[..., Any], ended_run: Any) -> None:
    week_s = 7 * 86400.0
    write(ended_run, (A, 1.0), (A, 2.0), (B, week_s), (C, 5 * week_s))
    shown = " ".join(ctl("status", str(ended_run.folder.root), "--once").out.split())
    assert "nodes that failed before" in shown
    assert "node alpha (2 times crash) has score 2.0, above 1.5: a repeat offender" in shown
    assert "node beta (crash) has score 0.5 of 1.5" in shown
    assert "gamma" not in shown, "its mark has faded"


def test_json_has_the_scores(ctl: Callable[..., Any], ended_run: Any) -> None:
    write(ended_run, (A, 1.0))
    (told,) = json.loads(ctl("status", str(ended_run.folder.root), "--json").out)["scores"]
    assert (told["machine"]["node"], told["is_over"], told["why"]) == ("alpha", False, "crash")


def test_nothing_is_shown_where_nothing_is_known(ctl: Callable[..., Any], ended_run: Any) -> None:
    before = ctl("status", str(ended_run.folder.root), "--once").out
    assert "failed before" not in before
    for text in ("{", "[]", '{"nodes": 3, "marks": {}}', '{"nodes": [null], "marks": [null]}'):
        ended_run.folder.node_scores.parent.mkdir(exist_ok=True)
        ended_run.folder.node_scores.write_text(text)
        assert "failed before" not in ctl("status", str(ended_run.folder.root), "--once").out
