"""What the terminal and programs are told of a report."""

from __future__ import annotations

import json
import re

import postmortem_reports as reports
import pytest

from steadyrun.postmortem.case import Report
from steadyrun.postmortem.text import render_text, report_to_json

ALL = [reports.ring_of_three, reports.stall_of, reports.mismatch, reports.program_error, reports.healthy]


def test_verdict_says_who_where_and_since_when() -> None:
    text = render_text(reports.stall_of())
    assert text.splitlines()[0] == "host_stall  confidence 93%"
    facts = {line[2:15].strip(): line[16:] for line in text.splitlines() if line.startswith("  ")}
    assert facts["who"] == "rank 2 on node000, GPU 2"
    assert facts["operation"] == "all_reduce #88 of mesh_tp (tp0)"
    assert facts["call site"] == "data.py:31 in next_batch"
    assert facts["section"] == "data"
    assert facts["since"] == "16:00:00 UTC, 10 min before the evidence was taken"
    assert facts["waiting"] == "7 ranks"
    assert facts["not to blame"] == "ranks 0, 1 and 3-7"


def test_chain_of_waits_leads_from_the_culprit_to_those_behind() -> None:
    lines = render_text(reports.stall_of(), 120).splitlines()
    tree = lines[lines.index("who waits for whom") + 1 :][:4]
    assert tree == [
        "  rank 2: section data at data.py:31",
        "  ├─ ranks 0, 1 and 3 wait in all_reduce #88 of mesh_tp [not called] at model/layers.py:212",
        "  │  └─ ranks 4, 5 and 7 wait in reduce_scatter_tensor #12 of mesh_dp (3 groups) [is elsewhere]"
        " at train.py:131",
        "  └─ rank 6 waits in reduce_scatter_tensor #12 of mesh_dp [not called] at train.py:131",
    ]


def test_ring_is_told_in_the_order_of_its_waits() -> None:
    text = render_text(reports.ring_of_three(), 120)
    order = re.findall(r"rank (\d) stands in all_reduce #13 of (\w+).*waits for rank (\d)", text)
    assert order == [("0", "pair_01", "1"), ("1", "pair_12", "2"), ("2", "pair_20", "0")]


def test_mismatch_shows_both_sides_and_the_second_root_cause() -> None:
    text = render_text(reports.mismatch())
    assert "  ranks 0, 2 and 3: all_reduce [1024] Float\n  rank 1: broadcast [1024] Float" in text
    assert "dead_process (80%): rank 5 died: SIGKILL" in text
    assert "not known:\n  no dump of rank 5\n  nothing of rank 4" in text
    assert "flight records of 67%" in text


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("width", [60, 100])
def test_fits_a_screen(make: object, width: int) -> None:
    assert callable(make)
    lines = render_text(make(), width).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width


def test_many_ranks_fit_a_screen_too() -> None:
    lines = render_text(reports.stall_of(8, 32, 37)).splitlines()
    assert len(lines) <= 40
    assert any("255 ranks" in line for line in lines)


def test_colours_only_when_asked() -> None:
    report = reports.mismatch()
    assert "\x1b[" not in render_text(report)
    coloured = render_text(report, color=True)
    assert "\x1b[1;31m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render_text(report)


def test_control_characters_of_a_rank_do_not_reach_the_terminal() -> None:
    text = render_text(reports.hostile("\x1b]0;owned\x07\r\x9b31mred"))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)


@pytest.mark.parametrize("make", ALL)
def test_json_holds_the_fixed_names(make: object) -> None:
    assert callable(make)
    report: Report = make()
    data = json.loads(json.dumps(report_to_json(report)))
    assert data["schema"] == "steadyrun.postmortem/1"
    names = "class ranks nodes gpus section group seq op callsite since_unix_s confidence summary evidence"
    assert set(names.split()) <= set(data["findings"][0])
    assert data["victims"] == list(report.victims)
    assert data["missing"] == list(report.missing)
    assert [i["rank"] for i in data["inputs"]] == [i.rank for i in report.case.inputs]


def test_json_tells_differences_waits_and_inputs() -> None:
    data = report_to_json(reports.mismatch())
    assert data["findings"][0]["differences"][1] == {"ranks": [1], "called": "broadcast [1024] Float"}
    assert data["waits"][0]["reason"] == "differs"
    assert data["coverage"] == pytest.approx(4 / 6)
    one = report_to_json(reports.ring_of_three())["inputs"][0]
    assert one == {"path": "rank_0.flight.gloo.pickle", "rank": 0, "status": "used", "detail": ""}
