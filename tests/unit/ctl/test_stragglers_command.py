"""``steadyctl stragglers`` on run folders with journals made here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core.journal import Journal
from steadyrun.core.runfolder import RunFolder
from steadyrun.core.timing import StepTiming
from steadyrun.detect.straggler import Alarm, AlarmKind, Cause
from steadyrun.node.sampling import timing_columns

T0 = 1_700_000_000.0
STEPS, BATCH = 240, 10
Ctl = Callable[..., Any]


def timing(step: int, busy_s: float, wait_s: float = 0.01) -> StepTiming:
    """Half of the work is the forward pass; what is above 0.1 s is in the backward pass."""
    return StepTiming(step, step * 0.11, busy_s + wait_s, busy_s, 0.05, busy_s - 0.06, 0.01, 0.0, 0.0, wait_s, busy_s)


class RunMaker:
    """A run folder that tests fill as the agents do."""

    def __init__(self, root: Path) -> None:
        self.run = RunFolder(root)
        self.run.journal_dir.mkdir(parents=True)
        self._journals: dict[str, Journal] = {}

    def write(self, type_: str, at_s: float = 0.0, node: str = "n0", attempt: int = 0, **fields: Any) -> None:
        if node not in self._journals:
            self._journals[node] = Journal(self.run.journal(node), node)
        self._journals[node].write(type_, T0 + at_s, at_s, attempt, **fields)

    def start(self, ranks: Mapping[int, str], attempt: int = 0, at_s: float = 0.0) -> None:
        for node in dict.fromkeys(ranks.values()):
            self.write("run_started", at_s, node, attempt)
        for rank, node in ranks.items():
            self.write("rank_started", at_s, node, attempt, rank=rank)

    def pace(
        self, ranks: Mapping[int, str], busy_s: Callable[[int, int], float], steps: Iterable[int], attempt: int = 0
    ) -> None:
        """``timings`` as the sampler writes them, one record a node and ten steps."""
        known = list(steps)
        for at in range(0, len(known), BATCH):
            for node in dict.fromkeys(ranks.values()):
                mine = {
                    str(r): timing_columns([timing(s, busy_s(r, s)) for s in known[at : at + BATCH]])
                    for r, n in ranks.items()
                    if n == node
                }
                self.write("timings", 1.0 + at, node, attempt, every=1, lost=0, ranks=mine)

    def tell(self, event: str, alarm: Alarm, at_s: float, attempt: int = 0, **fields: Any) -> None:
        told = {"summary": "as told", "since_unix_s": None, "incident": None} | fields
        self.write("straggler", at_s, "n0", attempt, event=event, alarm=alarm, **told)

    def end(self, nodes: Sequence[str] = ("n0",), at_s: float = 500.0) -> None:
        for node in nodes:
            self.write("run_ended", at_s, node)

    def close(self) -> None:
        for journal in self._journals.values():
            journal.close()


@pytest.fixture
def maker(tmp_path: Path) -> Any:
    made = RunMaker(tmp_path / "20260101T000000Z-a")
    yield made
    made.close()


FOUR = dict.fromkeys(range(4), "n0")


def noisy(rank: int, step: int) -> float:
    """A tenth of a second, within half a percent."""
    return 0.1 + 0.0005 * ((rank * 7919 + step * 104729) % 101 / 50 - 1)


def slow_rank_2(rank: int, step: int) -> float:
    return noisy(rank, step) + (0.03 if rank == 2 and step >= 120 else 0.0)


def alarm(**fields: Any) -> Alarm:
    known = {
        "kind": AlarmKind.RANK, "ranks": (2,), "step": 130, "first_step": 120, "slowdown": 0.3, "impact": 0.2,
        "lost_s": 1.5, "node": "n0", "peers": 3, "phase": "backward", "phases": {"backward": 1.0},
        "cause": Cause.WORKING,
    }  # fmt: skip
    return Alarm(**(known | fields))


# -- what the agents told ----------------------------------------------------------------------------------------------
def test_an_alarm_that_is_open_is_slow_now(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    maker.pace(FOUR, slow_rank_2, range(STEPS))
    maker.tell("began", alarm(), 140, since_unix_s=T0 + 120, incident=1)
    maker.tell("now", alarm(slowdown=0.25, lost_s=4.0), 200, incident=1)
    result = ctl("stragglers", maker.run.root)
    assert result.code == 10, result.err
    assert result.lines[0] == "1 slow now"
    text = " ".join(result.out.split())
    assert "rank 2 on n0 takes 25 % longer for its own work since step 120, in backward" in text
    assert "still slow; 4.0 s lost" in text
    assert "incident 1" in text


def test_an_alarm_that_ended_is_over_and_keeps_when_it_began(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    maker.pace(FOUR, slow_rank_2, range(STEPS))
    maker.tell("began", alarm(), 140, since_unix_s=T0 + 120, incident=3)
    maker.tell("ended", alarm(over_step=200), 210, incident=3)
    maker.end()
    result = ctl("stragglers", maker.run.root, "--json")
    assert result.code == 10
    told = result.json["alarms"][0]
    assert (told["state"], told["over_step"], told["since_unix_s"]) == ("over", 200, T0 + 120)
    finding = result.json["findings"][0]
    assert (finding["class"], finding["ranks"], finding["nodes"]) == ("straggler", [2], ["n0"])
    assert (finding["section"], finding["since_unix_s"]) == ("backward", T0 + 120)
    assert finding["evidence"] == ["incidents/0003"]


@pytest.mark.parametrize("event", ["began", "now"])
def test_an_agent_that_died_leaves_the_end_open(maker: RunMaker, ctl: Ctl, event: str) -> None:
    maker.start(FOUR)
    maker.tell(event, alarm(), 140)
    maker.start(FOUR, attempt=1, at_s=300)
    assert ctl("stragglers", maker.run.root, "--json").json["alarms"][0]["state"] == "unknown"


def test_why_it_was_acted_on_is_told(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    maker.tell("began", alarm(), 140)
    maker.tell("act", alarm(), 150, summary="it has cost as much as a restart")
    maker.tell("lasts", alarm(), 151)
    result = ctl("stragglers", maker.run.root)
    assert "acted on: it has cost as much as a restart" in " ".join(result.out.split())
    assert ctl("stragglers", maker.run.root, "--json").json["alarms"][0]["state"] == "lasted"


def test_slow_now_comes_first_then_what_cost_most(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    for rank, lost_s in ((0, 9.0), (1, 20.0)):
        maker.tell("began", alarm(ranks=(rank,), lost_s=lost_s), 10)
        maker.tell("ended", alarm(ranks=(rank,), lost_s=lost_s, over_step=150), 20)
    maker.tell("began", alarm(ranks=(3,), lost_s=0.1), 30)
    assert [f["ranks"] for f in ctl("stragglers", maker.run.root, "--json").json["findings"]] == [[3], [1], [0]]


def test_imbalances_and_bursts_accuse_nobody(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    maker.pace(FOUR, noisy, range(40))
    maker.tell("began", alarm(kind=AlarmKind.DATA_IMBALANCE, ranks=(0, 1, 2, 3), phase=None), 30)
    result = ctl("stragglers", maker.run.root)
    assert result.code == 0
    assert "nobody was slow" in result.lines[0]
    assert "differ from step to step" in result.out
    assert ctl("stragglers", maker.run.root, "--json").json["findings"] == []


def test_alarms_of_several_attempts_stay_apart(maker: RunMaker, ctl: Ctl) -> None:
    for attempt in (0, 1):
        maker.start(FOUR, attempt, at_s=1000.0 * attempt)
        maker.tell("began", alarm(), 1000.0 * attempt + 140, attempt)
        maker.tell("lasts", alarm(), 1000.0 * attempt + 200, attempt)
    assert [a["attempt"] for a in ctl("stragglers", maker.run.root, "--json").json["alarms"]] == [0, 1]


# -- what the timings show ---------------------------------------------------------------------------------------------
def test_timings_are_judged_where_no_agent_told_anything(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    maker.pace(FOUR, slow_rank_2, range(STEPS))
    maker.end()
    result = ctl("stragglers", maker.run.root, "--json")
    assert result.code == 10, result.out
    assert result.json["source"] == "timings"
    assert [f["ranks"] for f in result.json["findings"]] == [[2]]
    assert result.json["findings"][0]["section"] == "backward"
    assert any("afterwards" in note for note in result.json["notes"])


def test_a_healthy_run_accuses_nobody(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    maker.pace(FOUR, noisy, range(STEPS))
    result = ctl("stragglers", maker.run.root)
    assert result.code == 0
    assert result.lines[0] == "nobody was slow, in 240 steps of which the journals keep timings"


def test_the_table_has_the_means_that_were_written(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    maker.pace(FOUR, lambda rank, step: 0.2 if rank == 1 else 0.1, range(40))
    ranks = ctl("stragglers", maker.run.root, "--json").json["attempts"][0]["ranks"]
    assert [r["busy_s"] for r in ranks] == pytest.approx([0.1, 0.2, 0.1, 0.1])
    assert [r["against_peers"] for r in ranks] == pytest.approx([0.0, 1.0, 0.0, 0.0])
    assert [r["steps"] for r in ranks] == [40] * 4


def test_journals_of_all_nodes_are_one_run(maker: RunMaker, ctl: Ctl) -> None:
    ranks = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
    maker.start(ranks)
    maker.pace(ranks, slow_rank_2, range(STEPS))
    found = ctl("stragglers", maker.run.root, "--json").json
    assert [r["node"] for r in found["attempts"][0]["ranks"]] == ["n0", "n0", "n1", "n1"]
    assert found["attempts"][0]["steps"] == STEPS
    assert found["findings"][0]["nodes"] == ["n1"]


def test_ranks_are_compared_within_their_role(maker: RunMaker, ctl: Ctl) -> None:
    for rank in FOUR:
        folder = maker.run.rank_dir(0, rank)
        folder.mkdir(parents=True)
        told = {"schema": "steadyrun.role/1", "mesh": {"pp": rank % 2}, "key": [rank % 2]}
        (folder / "role.json").write_text(json.dumps(told))
    maker.start(FOUR)
    maker.pace(FOUR, lambda rank, step: 0.1 * (1 + rank % 2), range(40))
    ranks = ctl("stragglers", maker.run.root, "--json").json["attempts"][0]["ranks"]
    assert [r["role"] for r in ranks] == ["pp=0", "pp=1", "pp=0", "pp=1"]
    assert [r["against_peers"] for r in ranks] == pytest.approx([0.0] * 4)


def test_wall_times_alone_decide_nothing(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    columns = {"step": list(range(20)), "wall_s": [0.1] * 20}
    maker.write("timings", 5, every=1, lost=0, ranks={str(r): columns for r in FOUR})
    result = ctl("stragglers", maker.run.root)
    assert result.code == 11
    assert result.lines[0].startswith("not known")


def test_what_cannot_be_read_is_counted_and_the_rest_used(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    maker.pace(FOUR, noisy, range(40))
    bad = {
        "x": {"step": [1]},
        "9999999": {"step": [1]},
        "1": {"step": ["a"]},
        "2": [],
        "3": {"step": [1], "wall_s": []},
    }
    maker.write("timings", 60, every=1, lost=0, ranks=bad)
    maker.write("timings", 61, every=1, lost=0, ranks="none")
    maker.write("straggler", 62, event="began", alarm={"kind": "rank"})
    maker.write("straggler", 63)
    result = ctl("stragglers", maker.run.root, "--json")
    assert result.code == 0, result.err
    assert len(result.json["attempts"][0]["ranks"]) == 4
    assert {"2 alarms could not be read", "5 timings of a rank could not be read"} <= set(result.json["notes"])


# -- attempts ----------------------------------------------------------------------------------------------------------
def test_the_newest_attempt_is_shown_and_others_by_number(maker: RunMaker, ctl: Ctl) -> None:
    for attempt in (0, 1):
        maker.start(FOUR, attempt)
        maker.pace(FOUR, noisy, range(20 * (attempt + 1)), attempt)
    assert "Attempt 1: means over 40 steps" in ctl("stragglers", maker.run.root).out
    assert "Attempt 0: means over 20 steps" in ctl("stragglers", maker.run.root, "--attempt", 0).out
    result = ctl("stragglers", maker.run.root, "--attempt", 7)
    assert result.code == 1
    assert "attempts that have some: 0, 1" in result.err


# -- nothing to show ---------------------------------------------------------------------------------------------------
def test_a_run_without_timing_says_so(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    maker.write("rank_first_step", 10, rank=0, step=0)
    maker.end()
    result = ctl("stragglers", maker.run.root, "--json")
    assert result.code == 1
    assert "--ft-timing off" in result.err
    assert result.json["schema"] == "steadyrun.error/1"


def test_a_run_that_just_began_says_to_wait(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    result = ctl("stragglers", maker.run.root)
    assert (result.code, "look again later" in result.err) == (1, True)


def test_no_run_is_no_traceback(tmp_path: Path, ctl: Ctl) -> None:
    result = ctl("stragglers", tmp_path / "nowhere")
    assert result.code == 1
    assert "nowhere" in result.err


def test_a_page_that_cannot_be_written_names_the_option(maker: RunMaker, ctl: Ctl, tmp_path: Path) -> None:
    maker.start(FOUR)
    maker.pace(FOUR, noisy, range(20))
    result = ctl("stragglers", maker.run.root, "--html", tmp_path / "missing" / "x.html")
    assert result.code == 2
    assert "--html" in result.err


# -- picture and page --------------------------------------------------------------------------------------------------
def test_the_picture_is_dark_where_a_rank_is_slow(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    maker.pace(FOUR, slow_rank_2, range(STEPS))
    lines = ctl("stragglers", maker.run.root).lines
    at = next(i for i, line in enumerate(lines) if line.startswith("Own work above"))
    cells = {int(m[1]): m[2] for line in lines[at:] if (m := re.fullmatch(r" +(\d)  ([.:+*#-]+)", line))}
    assert set(cells) == {0, 1, 2, 3}
    half = len(cells[2]) // 2
    assert set(cells[2][:half]) == {"."}
    assert set(cells[2][half + 1 :]) == {"*"}
    assert all(set(cells[r]) == {"."} for r in (0, 1, 3))


@pytest.mark.parametrize("width", [60, 80, 140])
def test_lines_fit_and_many_ranks_fold(maker: RunMaker, ctl: Ctl, width: int) -> None:
    ranks = dict.fromkeys(range(1024), "n0")
    maker.start(ranks)
    columns = timing_columns([timing(s, 0.1) for s in range(10)])
    slow = timing_columns([timing(s, 0.15) for s in range(10)])
    maker.write("timings", 5, every=1, lost=0, ranks={str(r): slow if r == 700 else columns for r in ranks})
    lines = ctl("stragglers", maker.run.root, width=width).lines
    assert max(map(len, lines)) <= width
    assert len(lines) < 80
    assert any(re.fullmatch(r" +672-703  #+", line) for line in lines), "the slowest of a row is shown"
    assert any(re.match(r" +700 +\+50\.0%", line) for line in lines)
    assert any("other ranks" in line for line in lines)


def test_the_page_loads_nothing_and_escapes_names(maker: RunMaker, ctl: Ctl, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    ranks = dict.fromkeys(range(4), "n0")
    maker.start(ranks)
    maker.pace(ranks, slow_rank_2, range(STEPS))
    maker.tell("began", alarm(node=evil), 140)
    page = tmp_path / "paces.html"
    assert ctl("stragglers", maker.run.root, "--html", page).code == 10
    text = page.read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert not re.search(r'(src|href)="(?!#)', text)
    assert "url(" not in text
    assert "Own work above that of peers" in text
    assert "Time waited for others" in text
    assert text.count('<tr class="bad">') == 1


def test_a_terminal_is_not_obeyed(maker: RunMaker, ctl: Ctl) -> None:
    maker.start(FOUR)
    maker.tell("began", alarm(node="\x1b[2Jn0"), 140)
    assert "\x1b" not in ctl("stragglers", maker.run.root).out
