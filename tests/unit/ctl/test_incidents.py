"""``steadyctl incidents`` and ``show`` over run folders that the product's own records were written to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadyrun.ctl.incidents import _ranks


def test_incidents_lists_each_with_class_rank_action_delay_and_summary(ctl: Callable[..., Any], ended_run: Any) -> None:
    result = ctl("incidents", ended_run.root)
    assert result.code == 0
    first = next(line for line in result.lines if line.lstrip().startswith("1 "))
    for word in ("host_stall", "restart", "4.2s"):
        assert word in first
    assert "3 of 4 ranks wait in all_reduce called at train.py:88" in result.lines[result.lines.index(first) + 1]
    assert "stop (observed)" in result.out
    assert all(len(line) <= 80 for line in result.lines if str(ended_run.root) not in line), result.out


def test_incidents_takes_the_folder_of_runs_and_follows_latest(ctl: Callable[..., Any], ended_run: Any) -> None:
    assert ctl("incidents", ended_run.root.parent).out.count("host_stall") == 2


def test_without_an_argument_the_runs_beside_the_user_are_meant(
    ctl: Callable[..., Any], ended_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = ended_run.root.parent.parent
    ended_run.root.parent.rename(home / "steadyrun")
    monkeypatch.chdir(home)
    assert ctl("incidents").out.count("host_stall") == 2


def test_incidents_json_has_a_schema(ctl: Callable[..., Any], ended_run: Any) -> None:
    told = ctl("incidents", ended_run.root, "--json").json
    assert told["schema"] == "steadyrun.incidents/1"
    first = told["incidents"][0]
    assert (first["incident"], first["class"], first["ranks"], first["victims"]) == (1, "host_stall", [1], [0, 2, 3])
    assert Path(first["path"]) == ended_run.folder.incident(1)


def test_a_run_without_incidents_is_a_good_one(ctl: Callable[..., Any], fake_run: Any) -> None:
    result = ctl("incidents", fake_run.root)
    assert (result.code, result.out) == (0, f"no incidents in {fake_run.root}\n")
    assert ctl("incidents", fake_run.root, "--json").json["incidents"] == []


def test_no_run_is_exit_1_and_says_where_it_looked(ctl: Callable[..., Any], tmp_path: Path) -> None:
    result = ctl("incidents", tmp_path)
    assert result.code == 1
    assert str(tmp_path) in result.err
    assert "--ft-run-dir" in result.err
    assert ctl("incidents", tmp_path, "--json").json["schema"] == "steadyrun.error/1"


def test_an_incident_without_verdict_is_listed_as_such(ctl: Callable[..., Any], fake_run: Any) -> None:
    fake_run.folder.incident(3).mkdir(parents=True)
    fake_run.add_incident(4)
    (fake_run.folder.incident(4) / "verdict.json").write_text('{"schema": "other/7"}')
    result = ctl("incidents", fake_run.root)
    assert result.out.count("unreadable") == 2
    assert "no verdict yet" in result.out
    assert ctl("show", "4", "--run", fake_run.root).code == 1


def test_show_tells_the_whole_story(ctl: Callable[..., Any], ended_run: Any) -> None:
    result = ctl("show", "1", "--run", ended_run.root)
    assert result.code == 0
    text = " ".join(result.out.split())
    for words in (
        "incident 1",
        "attempt 0",
        "4.2s after the last sign of progress",
        "restart: restart 1 of 3 without progress",
        "host_stall, rank 1 (confidence 90%)",
        "rank 1 is stuck at train.py:31",
        "victims ranks 0,2,3",
        "missing py-spy is not installed",
        "all 4 ranks had done a step again 1.3s after detection (attempt 1, step 16, 3 of 4 from warm standbys)",
        "ranks 0,2,3 wait in all_reduce called at train.py:88",
        "rank 1 is at train.py:31",
        "read_batch /job/train.py:31",
        "step 20",
        "rank_1.stacks.txt",
        "verdict.json",
    ):
        assert words in text, (words, result.out)
    assert all(len(line) <= 80 for line in result.lines if str(ended_run.root) not in line), result.out


def test_show_obeys_no_escape_sequence_of_a_rank(ctl: Callable[..., Any], ended_run: Any) -> None:
    assert "\x1b" not in ctl("show", "1", "--run", ended_run.root).out


def test_show_hides_library_frames_unless_asked(ctl: Callable[..., Any], ended_run: Any) -> None:
    (evidence := ended_run.folder.incident(1) / "evidence.json").write_text(
        evidence.read_text().replace('"/job/train.py", "line": 120', '"/usr/lib/python3.11/runpy.py", "line": 120')
    )
    short = ctl("show", "1", "--run", ended_run.root).out
    long = ctl("show", "1", "--run", ended_run.root, "--stacks").out
    assert "runpy.py" not in short
    assert "more frames: --stacks" in short
    assert "runpy.py" in long


def test_show_last_is_the_newest(ctl: Callable[..., Any], ended_run: Any) -> None:
    result = ctl("show", "last", "--run", ended_run.root)
    assert result.out.startswith("incident 2")
    assert "mode observe: nobody was touched" in " ".join(result.out.split())
    assert "recovered" not in result.out


def test_show_json_holds_verdict_stacks_logs_and_files(ctl: Callable[..., Any], ended_run: Any) -> None:
    told = ctl("show", "1", "--run", ended_run.root, "--json").json
    assert told["schema"] == "steadyrun.incident/1"
    assert told["verdict"] == json.loads((ended_run.folder.incident(1) / "verdict.json").read_text())
    assert [g["ranks"] for g in told["stacks"]] == [[0, 2, 3], [1]]
    assert told["recovery"]["seconds"] == pytest.approx(1.3)
    assert told["log_tails"]["1"][0] == "step 20"
    assert sorted(told["files"]) == ["evidence.json", "rank_1.stacks.txt", "verdict.json"]


@pytest.mark.parametrize(("which", "says"), [("7", "there are 1, 2"), ("first", "there are 1, 2")])
def test_an_unknown_incident_names_those_there_are(
    ctl: Callable[..., Any], ended_run: Any, which: str, says: str
) -> None:
    result = ctl("show", which, "--run", ended_run.root)
    assert result.code == 1
    assert says in result.err


def test_log_lines_come_from_the_rank_when_the_evidence_has_none(ctl: Callable[..., Any], ended_run: Any) -> None:
    evidence = ended_run.folder.incident(1) / "evidence.json"
    data = json.loads(evidence.read_text())
    for rank in data["ranks"]:
        rank["log_tail"] = []
    evidence.write_text(json.dumps(data))
    rank_dir = ended_run.folder.rank_dir(0, 1)
    rank_dir.mkdir(parents=True)
    (rank_dir / "stderr.log").write_text("a\n" * 100_000 + "the last words\n")
    assert ctl("show", "1", "--run", ended_run.root, "--json").json["log_tails"]["1"][-1] == "the last words"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], "-"), ([3], "3"), ([0, 1], "0,1"), ([2, 1, 0], "0-2"), ([0, 1, 2, 5, 7, 8], "0-2,5,7,8"), ([4, 4], "4")],
)
def test_ranks_are_written_as_ranges(ranks: list[int], text: str) -> None:
    assert _ranks(ranks) == text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "COMMAND"),
        (("incident",), "did you mean incidents?"),
        (("incidents", "--jsn"), "--jsn"),
        (("show",), "INCIDENT"),
        (("inject", "kill"), "--rank"),
    ],
)
def test_a_wrong_command_line_is_exit_2(
    ctl: Callable[..., Any], capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str
) -> None:
    assert ctl(*argv).code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["incidents", "show", "status", "inject", "doctor"])
def test_every_command_has_help_with_examples(
    ctl: Callable[..., Any], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert ctl(command, "--help").code == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert "--json" in out
