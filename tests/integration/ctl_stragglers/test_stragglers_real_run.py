"""A job that really ran, four ranks on two busy cores, rank 2 slower in backward by 30 % from step 90 to step 170."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from steadyrun.ctl.main import main

JOURNAL = Path(__file__).parent / "data" / "slow_backward.jsonl"
RANKS = 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    journals = tmp_path / "20261130T061704Z-recorded" / "journal"
    journals.mkdir(parents=True)
    shutil.copy(JOURNAL, journals / "vm.jsonl")
    return journals.parent


def records(kind: str) -> list[dict[str, Any]]:
    return [r for line in JOURNAL.read_text().splitlines() if (r := json.loads(line))["type"] == kind]


def stragglers(*argv: object) -> tuple[int, str]:
    out = io.StringIO()
    code = main(["stragglers", *map(str, argv)], out, io.StringIO(), {}, 80)
    return code, out.getvalue()


def test_findings_are_what_the_journal_told(run: Path) -> None:
    code, out = stragglers(run, "--json")
    told = {(tuple(r["alarm"]["ranks"]), r["alarm"]["step"]) for r in records("straggler")}
    accused = {(tuple(a["ranks"]), a["step"]) for a in json.loads(out)["alarms"]}
    assert code == 10
    assert accused == told
    slow = json.loads(out)["findings"][0]
    assert (slow["class"], slow["ranks"], slow["section"]) == ("straggler", [2], "backward")


def test_means_are_those_of_the_journal(run: Path) -> None:
    busy: dict[int, list[float]] = {r: [] for r in range(RANKS)}
    for record in records("timings"):
        for rank, columns in record["ranks"].items():
            busy[int(rank)] += [b for b in columns["busy_s"] if b > 0]
    (attempt,) = json.loads(stragglers(run, "--json")[1])["attempts"]
    for rank in attempt["ranks"]:
        mine = busy[rank["rank"]]
        assert rank["steps"] == len(mine)
        assert rank["busy_s"] == pytest.approx(sum(mine) / len(mine), rel=1e-4)


def test_the_picture_shows_when_it_was_slow(run: Path) -> None:
    heat = json.loads(stragglers(run, "--json")[1])["attempts"][0]["heat"]
    rows = zip(heat["first_steps"], heat["busy"], strict=True)
    slow = [cells for step, cells in rows if 95 <= step <= 165]
    assert len(slow) >= 5
    assert all(cells[2] == max(v for v in cells if v is not None) for cells in slow), slow


def test_the_page_is_written(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out = stragglers(run, "--html", page)
    assert code == 10
    assert f"page: {page}" in out
    assert page.read_text().startswith("<!doctype html>")
