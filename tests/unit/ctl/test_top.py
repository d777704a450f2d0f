"""``steadyctl top``: a live run as it is told, folding of many ranks, sorting and filters, 80 columns."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core.journal import Journal
from steadyrun.ctl.console import Console
from steadyrun.ctl.snapshot import NodeLook, OpenLook, RankLook, RunLook
from steadyrun.ctl.watching.follow import JournalFollower
from steadyrun.ctl.watching.look import GpuLine, NodeLine, RankLine, RunWatcher, TopLook
from steadyrun.ctl.watching.table import SORTS, View, render, select

NOW = 1_700_000_500.0
DEVICES = {
    "collectors": {
        "nic": {"collector": "nic", "health": "unhealthy", "reason": "mlx5_1 port 1 (ib1) is DOWN", "actions": []},
        "memory": {"collector": "memory", "health": "healthy", "reason": "900 GiB available"},
    },
    "gpus": [
        {"index": 0, "temperature_c": 61, "sm_clock_mhz": 1980, "power_mw": 512_300, "throttled_by": [], "error": None},
        {"index": 1, "temperature_c": 88, "sm_clock_mhz": 1200, "power_mw": 300_000, "throttled_by": ["hw_thermal"]},
    ],
    "ranks": {"0": {"index": 0}, "1": {"index": 1}},
}


# -- one look at a run folder ------------------------------------------------------------------------------------------
@pytest.fixture
def live(fake_run: Any) -> Any:
    """Two ranks; this process plays them and the agent."""
    fake_run.go_live([os.getpid(), os.getpid()], devices=DEVICES, metrics="127.0.0.1:9400")
    fake_run.attach(0, os.getpid(), 142, 0.0, {"step": 0.0})
    fake_run.attach(1, os.getpid(), 141, 0.0, {"step": 0.0, "data": 0.0})
    return fake_run


@pytest.fixture
def journal(live: Any) -> Iterator[Callable[..., None]]:
    """Writes a record of attempt 1, some seconds ago."""
    writer = Journal(live.folder.journal("n0"), "n0")

    def write(type_: str, ago_s: float = 10.0, attempt: int = 1, **fields: Any) -> None:
        writer.write(type_, time.time() - ago_s, 1.0, attempt, **fields)

    yield write
    writer.close()


def timings(*busy_s: float) -> dict[str, Any]:
    return {str(rank): {"step": [1, 2], "busy_s": [s, s]} for rank, s in enumerate(busy_s)}


def alarm(rank: int, slowdown: float, **changes: Any) -> dict[str, Any]:
    return {"kind": "rank", "ranks": [rank], "step": 50, "slowdown": slowdown, **changes}


def test_ranks_are_shown_with_their_gpus(ctl: Callable[..., Any], live: Any) -> None:
    result = ctl("top", live.root, "--once")
    assert re.match(r"demo  live for 3m1\ds, 2 ranks on 1 node, 1 restart", result.lines[0])
    assert result.lines[1] == "steps 141 to 142, 50ms a step, no checkpoint yet, metrics 127.0.0.1:9400"
    assert result.lines[2] == "n0: nic: mlx5_1 port 1 (ib1) is DOWN"
    titles = next(line for line in result.lines if line.lstrip().startswith("rank"))
    assert titles.split() == ["rank", "step", "ago", "work", "score", "gpu", "°C", "MHz", "W", "xid", "in"]
    rows = [line.split() for line in result.lines if re.match(r" +\d ", line)]
    assert [r[0] for r in rows] == ["0", "1"]
    assert rows[0][5:10] == ["0", "61", "1980", "512", "-"]
    assert rows[1][5:10] == ["1", "88", "1200", "300", "-"]
    assert "GPU held back: hw_thermal" in " ".join(result.out.split())
    assert all(len(line) <= 80 for line in result.lines), result.out
    assert result.code == 1, "a collector of the node is unhealthy"


def test_json_has_what_is_shown(ctl: Callable[..., Any], live: Any, journal: Callable[..., None]) -> None:
    journal("checkpoint_committed", 30.0, step=120)
    journal("decision", 60.0, 0, action="restart", next_attempt=1)
    journal("timings", ranks=timings(0.04, 0.05))
    journal("straggler", event="began", alarm=alarm(1, 0.25))
    journal("device_event", event="xid", xid=79, gpu=1)
    told = ctl("top", live.root, "--json").json
    assert (told["schema"], told["state"], told["restarts"]) == ("steadyrun.top/1", "live", 1)
    assert told["checkpoint"]["step"] == 120
    assert 29 < told["checkpoint"]["age_s"] < 60
    assert 59 < told["restarted_ago_s"] < 90
    zero, one = told["nodes"][0]["ranks"]
    assert (zero["own_work_s"], one["own_work_s"], one["slowdown"], one["score"]) == (0.04, 0.05, 0.25, None)
    assert (zero["concern"], one["gpu"]["xids"]) == ("", 1)
    assert one["concern"] == "1 Xid of GPU 1"
    assert [s["name"] for s in one["sections"]] == ["step", "data"]


def test_an_alarm_that_ended_or_of_an_earlier_attempt_marks_nobody(live: Any, journal: Callable[..., None]) -> None:
    journal("straggler", attempt=0, event="began", alarm=alarm(0, 0.5))
    journal("straggler", event="began", alarm=alarm(1, 0.25))
    follower = JournalFollower(live.folder)
    follower.poll()
    assert follower.slow == {1: 0.25}
    journal("straggler", event="now", alarm=alarm(1, 0.3))
    follower.poll()
    assert follower.slow == {1: 0.3}
    journal("straggler", event="ended", alarm=alarm(1, 0.3, over_step=90))
    journal("straggler", event="began", alarm=alarm(0, 0.5, kind="stage_imbalance"))
    follower.poll()
    assert follower.slow == {}


def test_journals_are_read_from_where_they_were_left(live: Any) -> None:
    path = live.folder.journal("n0")
    path.parent.mkdir(exist_ok=True)
    record = {"v": 1, "type": "checkpoint_committed", "at_unix_s": NOW, "step": 5, "attempt": 1}
    path.write_text(json.dumps(record) + "\n" + json.dumps({**record, "step": 6})[:20])
    follower = JournalFollower(live.folder)
    follower.poll()
    assert follower.saved == (5, NOW)
    path.write_text(json.dumps(record) + "\n" + json.dumps({**record, "step": 6}) + "\nnonsense\n[1]\n")
    follower.poll()
    follower.poll()
    assert follower.saved == (6, NOW)
    assert len(follower.log().records) == 2
    path.write_text("")
    follower.poll()
    assert len(follower.log().records) == 2


def test_scores_compare_ranks_of_one_role(fake_run: Any) -> None:
    fake_run.go_live([os.getpid()] * 6)
    for rank in range(6):
        fake_run.attach(rank, os.getpid(), 10, 0.0, {"step": 0.0})
        folder = fake_run.folder.rank_dir(1, rank)
        folder.mkdir(parents=True)
        (folder / "role.json").write_text(json.dumps({"key": ["pp", rank % 2]}))
    writer = Journal(fake_run.folder.journal("n0"), "n0")
    # the odd ranks are a stage that works twice as much; rank 4 is slow among the even ones
    writer.write("timings", time.time(), 1.0, 1, ranks=timings(0.1, 0.2, 0.1, 0.2, 0.15, 0.2))
    writer.close()
    look = RunWatcher(fake_run.folder).look()
    assert [round(r.score or 0, 2) for r in look.ranks] == [1.0, 1.0, 1.0, 1.0, 1.5, 1.0]


def test_a_node_of_another_machine_is_shown_from_its_files(live: Any) -> None:
    told = {**live.live, "node": "far", "agent_pid": 1 << 30, "board": "/proc/1/fd/999", "devices": None}
    told["ranks"] = [{"rank": 2, "local_rank": 0, "pid": 9, "phase": "running"}]
    (live.folder.state / "far.json").write_text(json.dumps(told))
    writer = Journal(live.folder.journal("far"), "far")
    writer.write("steps", time.time() - 3, 1.0, 1, ranks={"2": {"step": 99, "step_times_s": [0.2, 0.2]}})
    writer.close()
    look = RunWatcher(live.folder).look()
    (far,) = [n for n in look.nodes if n.node == "far"]
    assert (far.where, far.troubles) == ("elsewhere", ())
    assert (far.ranks[0].look.step, far.ranks[0].look.step_time_s, far.ranks[0].concern) == (99, 0.2, "")
    (live.folder.state / "far.json").write_text(json.dumps({**told, "updated_at_unix_s": time.time() - 60}))
    (far,) = [n for n in RunWatcher(live.folder).look().nodes if n.node == "far"]
    assert (far.where, far.troubles) == ("gone", (("its agent is gone", True),))


def test_a_run_that_ended_says_so(ctl: Callable[..., Any], ended_run: Any) -> None:
    result = ctl("top", ended_run.root)
    assert result.code == 0
    assert "ended" in result.lines[0]
    assert "steadyctl status" in result.out


@pytest.mark.parametrize("ranks", ["", "x", "1-", "1,,2", "-3"])
def test_a_list_of_ranks_that_is_none_is_refused(ctl: Callable[..., Any], live: Any, ranks: str) -> None:
    result = ctl("top", live.root, f"--ranks={ranks}")
    assert result.code == 2
    assert "give numbers and ranges like 0-7,12" in result.err


# -- folding, sorting, filters -----------------------------------------------------------------------------------------
def rank_line(rank: int, node: str, **changes: Any) -> RankLine:
    look = RankLook(
        rank,
        rank % 8,
        node,
        1000 + rank,
        "running",
        "S",
        attached=True,
        step=500,
        step_age_s=0.1,
        step_time_s=0.2,
        progress_age_s=0.1,
        sections=(OpenLook("step", 0.1, 0, False),),
    )
    gpu = GpuLine(rank % 8, 60.0 + rank % 8, 1980.0, 600.0, 0.98)
    return replace(RankLine(look, 0.18, 1.0, None, rank % 8, gpu), **changes)


def big(nodes: int, **special: dict[str, Any]) -> TopLook:
    """*special* by ``r<rank>``: changes of single ranks."""
    made = []
    for n in range(nodes):
        name = f"gpu-{n:03d}"
        ranks = tuple(rank_line(r, name, **special.get(f"r{r}", {})) for r in range(8 * n, 8 * n + 8))
        node = NodeLook(name, "alive", 1, 0.1, 0, "running", NOW, tuple(r.look for r in ranks), (), {"step_s": 60.0})
        made.append(NodeLine(node, "here", ranks))
    run = RunLook(
        Path("/runs/x"), "big", "live", "train.py", 8 * nodes, 0, NOW - 100, None,
        tuple(n.look for n in made), (), None, 1, {},
    )  # fmt: skip
    return TopLook(run, "live", tuple(made), (480, 42.0), None, (), has_gpus=True)


def lines(look: TopLook, view: View | None = None, height: int | None = 24) -> list[str]:
    return render(look, view or View(), Console(io.StringIO(), {}, 80), NOW, height)


SLOW = {"slowdown": 0.3, "score": 1.3, "concern": "slow by 30%", "weight": 2}
LOST = {"concern": "GPU 3 is lost", "weight": 4}


def test_a_thousand_ranks_fit_a_small_terminal() -> None:
    shown = lines(big(128, r517=SLOW, r900=LOST))
    assert len(shown) <= 24
    assert all(len(line) <= 80 for line in shown), "\n".join(shown)
    text = "\n".join(shown)
    assert "slow by 30%" in text
    assert "GPU 3 is lost" in text
    folded = [line.split() for line in shown if re.match(r" *\d+-\d+ ", line)]
    first, last = folded[0][0].split("-")[0], folded[-1][0].split("-")[1]
    assert (first, last) == ("0", "1023")


def test_what_is_folded_is_counted_once() -> None:
    look = big(16, r5=LOST)
    rows = [line.split() for line in lines(look) if re.match(r" *\d+(-\d+)? ", line)]
    spans = [[int(n) for n in row[0].split("-")] for row in rows]
    assert [5] in spans
    others = sorted(s for s in spans if len(s) == 2)
    assert others[0][0] == 0
    assert all(a[1] < b[0] for a, b in itertools.pairwise(others))
    assert others[-1][1] == 127


def test_ranks_that_fit_are_not_folded() -> None:
    shown = lines(big(1))
    assert sum(bool(re.match(r" *\d+ ", line)) for line in shown) == 8


def test_all_unfolds_and_pages() -> None:
    look = big(16)
    shown = lines(look, View(fold=False), None)
    assert sum(bool(re.match(r" *\d+ ", line)) for line in shown) == 128
    paged = lines(look, View(fold=False, skip=100), 24)
    first = next(line for line in paged if re.match(r" *\d+ ", line))
    assert first.split()[0] == "100"
    assert "more rows" in paged[-1]


@pytest.mark.parametrize(
    ("sort", "change"),
    [
        ("late", {"look": replace(rank_line(77, "gpu-009").look, progress_age_s=9.0)}),
        ("step", {"look": replace(rank_line(77, "gpu-009").look, step=499)}),
        ("work", {"work_s": 0.3}),
        ("score", {"score": 1.4}),
        ("temp", {"gpu": GpuLine(5, 93.0, 1980.0, 600.0)}),
        ("clock", {"gpu": GpuLine(5, 60.0, 900.0, 600.0)}),
        ("power", {"gpu": GpuLine(5, 60.0, 1980.0, 720.0)}),
    ],
)
def test_sorting_puts_the_worst_first(sort: str, change: dict[str, Any]) -> None:
    assert sort in SORTS
    look = big(16, r77=change)
    assert select(look, View(sort=sort))[0][1].rank == 77
    rows = [line for line in lines(look, View(sort=sort)) if re.match(r" *\d+(-\d+)? ", line)]
    assert rows[0].split()[0] == "77"


def test_filters_leave_what_is_asked_for() -> None:
    look = big(16, r77=LOST, r3=SLOW)
    assert [r.rank for _, r in select(look, View(only_bad=True))] == [3, 77]
    assert {n.node for n, _ in select(look, View(nodes=("gpu-00[12]",)))} == {"gpu-001", "gpu-002"}
    assert [r.rank for _, r in select(look, View(ranks=frozenset({1, 9})))] == [1, 9]
    assert lines(big(2), View(only_bad=True))[-1] == "every rank is as usual"
    assert lines(big(2), View(nodes=("x",)))[-1] == "no rank is like that"


def test_equal_troubles_of_many_nodes_are_one_line() -> None:
    look = big(16)
    full = replace(look, nodes=tuple(replace(n, troubles=(("space: /data: 1.0 GiB left", True),)) for n in look.nodes))
    shown = [line for line in lines(full) if "/data" in line]
    assert shown == ["16 nodes (gpu-000 …): space: /data: 1.0 GiB left"]


def test_text_from_ranks_cannot_control_the_terminal() -> None:
    section = (OpenLook("\x1b[2Jdata", 1.0, 0, False),)
    look = big(1, r0={"look": replace(rank_line(0, "gpu-000").look, sections=section), "concern": "\x1b]0;x\x07"})
    assert "\x1b" not in "".join(lines(look))
