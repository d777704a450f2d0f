"""``steadyctl status``: a live run from its board, a stopped or dead agent, a finished run from its journals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core import layout


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that play ranks."""
    code = "import sys; sys.stdin.read()"
    processes = [
        subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def live(fake_run: Any, ranks: list[subprocess.Popen[bytes]]) -> Any:
    fake_run.write_journal(ended=False)
    fake_run.go_live([p.pid for p in ranks])
    fake_run.attach(0, ranks[0].pid, 142, 0.0, {"step": 0.0})
    fake_run.attach(1, ranks[1].pid, 141, 0.0, {"step": 0.0, "data": 0.0})
    return fake_run


def test_live_ranks_with_step_rate_and_sections(ctl: Callable[..., Any], live: Any) -> None:
    result = ctl("status", live.root)
    assert result.code == 0
    assert result.lines[0].startswith("demo  live for 3m12s, 2 ranks, attempt 1, 1 restart")
    row = next(line for line in result.lines if line.lstrip().startswith("1 "))
    assert " running " in row
    assert " 141 " in row
    assert " 20.0 " in row  # steps of 50 ms
    assert "step 0." in row
    assert " > data 0." in row
    assert "1 of 1 standbys ready, 300 MiB each" in result.out
    assert "beat" not in result.out  # nobody calls it
    assert all(len(line) <= 80 for line in result.lines if str(live.root) not in line), result.out


def test_beats_are_shown_where_a_script_makes_them(ctl: Callable[..., Any], live: Any, ranks: Any) -> None:
    live.attach(0, ranks[0].pid, 142, 0.0, {}, beats=3)
    assert "beat" in ctl("status", live.root).out


def test_json_has_everything_that_is_shown(ctl: Callable[..., Any], live: Any) -> None:
    told = ctl("status", live.root, "--json").json
    assert told["schema"] == "steadyrun.status/1"
    assert (told["state"], told["world_size"], told["restarts"]) == ("live", 2, 1)
    (node,) = told["nodes"]
    assert (node["agent"], node["attempt"], node["phase"]) == ("alive", 1, "running")
    rank = node["ranks"][1]
    assert (rank["step"], rank["step_time_s"], rank["attached"]) == (141, 0.05, True)
    assert rank["process"] in ("R", "S", "D")
    assert [s["name"] for s in rank["sections"]] == ["step", "data"]


def test_a_slot_of_another_incarnation_is_not_believed(ctl: Callable[..., Any], live: Any) -> None:
    assert live.board is not None
    live.board.words[live.board.slot_base(0) + layout.S_OWNER_PID] = 1
    rank = ctl("status", live.root, "--json").json["nodes"][0]["ranks"][0]
    assert (rank["attached"], rank["step"], rank["note"]) == (False, None, "does not report")
    live.board.words[live.board.slot_base(1) + layout.S_ATTEMPT] = 0
    assert ctl("status", live.root, "--json").json["nodes"][0]["ranks"][1]["attached"] is False


def test_a_stopped_rank_is_named(
    ctl: Callable[..., Any], live: Any, ranks: Any, wait_until: Callable[..., object]
) -> None:
    ranks[1].send_signal(signal.SIGSTOP)
    wait_until(lambda: "stopped (SIGSTOP" in ctl("status", live.root).out, 10)
    ranks[1].send_signal(signal.SIGCONT)


def test_an_overdue_step_and_section_are_marked_in_json_by_their_ages(ctl: Callable[..., Any], live: Any) -> None:
    from steadyrun.ctl.snapshot import OpenLook, RankLook, is_overdue

    look = RankLook(0, 0, "n0", 1, "running", "S")
    limits = {"setup_s": 600.0, "sections": {"checkpointing": 120.0}}
    assert is_overdue(look, OpenLook("checkpointing", 121.0, 0, False), limits)
    assert not is_overdue(look, OpenLook("checkpointing", 119.0, 0, False), limits)
    assert is_overdue(look, OpenLook("setup", 601.0, 0, True), limits)
    assert not is_overdue(look, OpenLook("unnamed", 9999.0, 0, False), limits)


def test_an_agent_whose_loop_does_not_pass_is_silent(ctl: Callable[..., Any], live: Any) -> None:
    assert live.board is not None
    live.board.words[layout.H_AGENT_BEAT] = live.word(12.0)
    result = ctl("status", live.root)
    assert result.code == 1
    assert "agent has not looked for 12s" in result.out


def test_an_agent_that_is_stopped_is_told_with_the_remedy(
    ctl: Callable[..., Any], live: Any, ranks: Any, wait_until: Callable[..., object]
) -> None:
    assert live.board is not None
    live.live["agent_pid"] = live.board.words[layout.H_AGENT_PID] = ranks[1].pid
    live.write_live()
    ranks[1].send_signal(signal.SIGSTOP)
    wait_until(lambda: "agent is stopped" in ctl("status", live.root).out, 10)
    result = ctl("status", live.root)
    assert result.code == 1
    assert f"(pid {ranks[1].pid}); kill -CONT wakes it" in result.out
    assert " 142 " in result.out  # its ranks go on, and can be seen
    ranks[1].send_signal(signal.SIGCONT)


@pytest.mark.parametrize("change", [{"agent_pid": 2**22 + 1}, {"agent_start_ticks": 1}])
def test_an_agent_that_is_gone_is_said_to_be(ctl: Callable[..., Any], live: Any, change: dict[str, int]) -> None:
    live.live |= change
    live.write_live()
    result = ctl("status", live.root)
    assert result.code == 1
    assert "lost" in result.lines[0]
    assert "was killed" in result.out


def test_a_pid_taken_over_by_a_younger_process_is_not_the_agent(ctl: Callable[..., Any], live: Any) -> None:
    live.live["updated_at_unix_s"] = 1_000_000_000.0  # written long before this process began
    live.write_live()
    assert ctl("status", live.root, "--json").json["state"] == "lost"


def test_a_board_that_is_not_ours_is_a_problem_not_a_crash(ctl: Callable[..., Any], live: Any, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(os.urandom(8192))
    live.live["board"] = str(foreign)
    live.write_live()
    result = ctl("status", live.root)
    assert "is not a board of this version" in " ".join(result.out.split())
    assert "does not report" in result.out


def test_a_run_being_started_has_no_ranks_yet(ctl: Callable[..., Any], fake_run: Any) -> None:
    fake_run.go_live([])
    assert "no rank has been started yet" in ctl("status", fake_run.root).out


def test_a_finished_run_is_summed_up_from_its_journal(ctl: Callable[..., Any], ended_run: Any) -> None:
    result = ctl("status", ended_run.root)
    assert result.code == 0
    text = " ".join(result.out.split())
    for words in ("ended after 5m00s", "ended well", "exit code 0", "2 attempts, 2 incidents", "last step seen: 40"):
        assert words in text, (words, result.out)


def test_a_failed_run_is_exit_1_and_names_the_class(ctl: Callable[..., Any], fake_run: Any) -> None:
    fake_run.write_journal(ended=True, exit_class=82)
    result = ctl("status", fake_run.root)
    assert result.code == 1
    assert "failed: hang" in result.out
    assert "exit code 82" in result.out


def test_only_the_latest_ranks_that_are_late_are_drawn_where_room_is_short() -> None:
    from steadyrun.ctl.snapshot import RankLook
    from steadyrun.ctl.status import _worth_showing

    looks = [RankLook(r, r, "n0", r, "running", "S", progress_age_s=float(r % 7)) for r in range(64)]
    looks[5] = RankLook(5, 5, "n0", 5, "running", "T", progress_age_s=0.0, note="stopped")
    shown, hidden = _worth_showing(looks, 10)
    assert len(shown) == 10
    assert hidden == 54
    assert 5 in [r.rank for r in shown]
    assert all(r.progress_age_s == 6.0 for r in shown if r.rank != 5)
    assert [r.rank for r in shown] == sorted(r.rank for r in shown)
