"""``steadyctl calibrate-timeouts``: what it prints and writes, and that the launcher takes it."""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import RecordedRun

from steadyrun.core.options import command_line_source, resolve
from steadyrun.ctl.calibration.replay import limit_s
from steadyrun.launcher.limits import limits_of

SVG = "{http://www.w3.org/2000/svg}"
Call = Callable[..., Any]


@pytest.fixture
def calibrate(ctl: Call) -> Call:
    return lambda *argv, width=100: ctl("calibrate-timeouts", *argv, width=width)


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    """200 steps of 1 s with a pause of 3 s, 20 saves and evaluations, a restart, and a hang under a limit of 4 s."""
    run = RecordedRun(tmp_path / "runs")
    return fill(run)


def fill(run: RecordedRun, steps: int = 120, saves: int = 21) -> RecordedRun:
    run.live_limits(step_s=4.0, setup_s=600.0, sections={"checkpointing": 120.0, "audit": 30.0})
    run.begin(0)
    marked = {"setup": [2.0], "checkpointing": [0.4] * saves, "validate": [0.6] * 21}
    run.steps(2.5, 0, {}, dict.fromkeys(range(run.ranks), marked))
    at_s = run.many_steps(2.5, [1.0] * (steps - 1) + [3.0])
    run.hang(at_s + 4, rank=1)
    run.begin(at_s + 5, attempt=1, first_step=steps - 3, first_after_s=20.0)
    run.many_steps(at_s + 25, [1.0, 1.2] * 40)
    return run.close()


def section(result: Any, name: str) -> dict[str, Any]:
    return next(s for s in result.json["sections"] if s["section"] == name)


def rules(result: Any, name: str) -> dict[str, dict[str, Any]]:
    return {r["rule"]: r for r in section(result, name)["rules"]}


# -- what is told ------------------------------------------------------------------------------------------------------
def test_the_table_has_every_section_and_the_dry_run_writes_nothing(run: RecordedRun, calibrate: Call) -> None:
    before = sorted(run.root.rglob("*"))
    result = calibrate(run.root, "--dry-run")
    assert result.code == 0, result.err
    assert sorted(run.root.rglob("*")) == before
    text = " ".join(result.out.split())
    assert "A restart costs 25s (measured once), 1 hang a day is expected; these runs had 1." in text
    assert "step 200 1 1.0s 1.2s 3.0s rank 0, step 120" in text
    assert "100.0% of the time between steps was outside of all sections" in text
    assert "evaluation was never seen" not in text  # it is called validate
    assert "audit was never seen" in text
    assert "setup comes once a start, 1 so far: the launcher's own limit of 30m00s stays" in text
    assert "nothing was written (--dry-run)" in text
    assert all(len(line) <= 100 for line in result.lines if not line.startswith("limits from"))


def test_what_rules_would_have_done_and_cost(run: RecordedRun, calibrate: Call) -> None:
    result = calibrate(run.root, "--dry-run", "--json", "--restart-cost", 600)
    step = rules(result, "step")
    assert list(step) == ["calibrated", "current", "5 x longest", "NCCL default", "gloo default"]
    assert [r["hard_s"] for r in list(step.values())[1:]] == [4.0, 15.0, 600.0, 1800.0]
    assert {name: r["fired"] for name, r in step.items()} == dict.fromkeys(step, 0)
    assert step["NCCL default"]["cost_s"] == 600.0  # the one hang, waited for
    assert step["calibrated"]["cost_s"] < 60.0
    assert step["5 x longest"]["fired_live"] == 0
    assert step["calibrated"]["lost_s_per_day"] < min(
        r["lost_s_per_day"] for name, r in step.items() if name != "calibrated"
    )


def test_a_current_limit_that_is_too_short_is_shown_to_fire(run: RecordedRun, calibrate: Call) -> None:
    run.live_limits(step_s=2.5)
    current = rules(calibrate(run.root, "--dry-run", "--json", "--restart-cost", 100), "step")["current"]
    assert (current["fired"], current["cost_s"]) == (1, 100.0 + 2.5)


def test_limits_that_follow_wait_for_sixteen_passes(tmp_path: Path, calibrate: Call) -> None:
    """Steps become 10 times as long after the fifth, which no rule that waits takes for hangs; later one takes 20 s."""
    run = RecordedRun(tmp_path / "runs")
    run.begin(0)
    own = [5.0, *[0.1] * 5, *[1.0] * 200, 20.0, *[1.0] * 20]
    run.steps(400, 200, {}, {r: {"step": own} for r in (0, 1)})
    run.close()
    step = rules(calibrate(run.root, "--dry-run", "--json"), "step")
    assert {name: step[name]["fired_live"] for name in ("calibrated", "5 x longest")} == {
        "calibrated": 0,
        "5 x longest": 1,
    }
    assert {name: step[name]["fired"] for name in ("calibrated", "5 x longest")} == {"calibrated": 0, "5 x longest": 0}


def test_a_section_passed_too_rarely_gets_the_cap_and_exit_code_3(tmp_path: Path, calibrate: Call) -> None:
    run = fill(RecordedRun(tmp_path / "runs"), saves=5)
    result = calibrate(run.root, "--dry-run", "--cap", 700)
    assert result.code == 3
    assert "too few passes of checkpointing: fewer than 16, so the cap is the limit (exit code 3)" in result.out
    found = calibrate(run.root, "--dry-run", "--json", "--cap", 700)
    assert found.code == 3
    assert found.json["too_few"] == ["checkpointing"]
    assert section(found, "checkpointing")["hard_s"] == 700.0
    assert section(found, "checkpointing")["if_doubled"]["hard_s"] == 700.0  # 4 after the first pass, 8 then
    assert section(found, "step")["hard_s"] < 100


@pytest.mark.parametrize(("steps", "code"), [(15, 3), (16, 0)])
def test_sixteen_passes_are_enough(tmp_path: Path, calibrate: Call, steps: int, code: int) -> None:
    run = RecordedRun(tmp_path / "runs")
    run.begin(0)
    own = {r: {"step": [5.0] + [1.0] * steps} for r in (0, 1)}  # the first pass is apart
    run.steps(40, steps, {}, own)
    run.close()
    assert calibrate(run.root, "--dry-run").code == code


def test_a_script_that_marks_nothing_needs_a_thousand_steps(tmp_path: Path, calibrate: Call) -> None:
    run = RecordedRun(tmp_path / "runs")
    run.begin(0)
    run.many_steps(2.0, [1.0] * 100)
    run.close()
    result = calibrate(run.root, "--dry-run", "--json")
    assert (section(result, "step")["basis"], section(result, "step")["hard_s"]) == ("too_few", 1800.0)
    assert any("does not mark its evaluations" in note for note in result.json["notes"])


# -- what is written ---------------------------------------------------------------------------------------------------
def test_the_launcher_takes_the_file_and_the_flags(run: RecordedRun, calibrate: Call, tmp_path: Path) -> None:
    file = tmp_path / "timeouts.json"
    result = calibrate(run.root, "--json", "-o", file)
    assert result.json["written"] == str(file)
    flags = [word for flag in result.json["flags"] for word in shlex.split(flag)]
    for argv in (["--ft-timeouts", str(file)], flags):
        values = {argv[i]: argv[i + 1] for i in range(0, len(argv), 2)}
        source = command_line_source({f[len("--ft-") :].replace("-", "_"): (f, v) for f, v in values.items()})
        limits = limits_of(resolve([source]), 30.0)
        for name in ("step", "checkpointing"):
            assert limit_s(limits, name) == pytest.approx(section(result, name)["hard_s"], rel=0.01)
            assert limit_s(limits, name) >= section(result, name)["hard_s"]
            assert name in limits.accepted
        assert limits.setup_s == 1800.0
        assert "setup" not in limits.accepted


def test_without_o_the_file_goes_into_the_run(run: RecordedRun, calibrate: Call) -> None:
    assert calibrate(run.root).code == 0
    assert json.loads(run.folder.timeouts.read_text())["schema"] == "steadyrun.timeouts/1"


def test_a_file_is_carried_on_and_no_run_is_counted_twice(run: RecordedRun, calibrate: Call, tmp_path: Path) -> None:
    file = tmp_path / "timeouts.json"
    calibrate(run.root, "-o", file)
    again = calibrate(run.root, "-o", file, "--json")
    assert section(again, "step")["n"] == 200
    assert any("had been counted before" in note for note in again.json["notes"])
    second = fill(RecordedRun(tmp_path / "runs", number=1))
    result = calibrate(second.root, "-o", file, "--json")
    assert (section(result, "step")["n"], section(result, "step")["runs"]) == (400, 2)
    assert result.json["runs_counted"] == [run.root.name, second.root.name]
    together = calibrate(run.root, second.root, "--dry-run", "--json")
    assert section(together, "step")["n"] == 400
    from_file = calibrate(file, "--dry-run", "--json")
    assert section(from_file, "step")["hard_s"] == pytest.approx(section(result, "step")["hard_s"], rel=1e-4)


def test_world_sizes_are_kept_apart(run: RecordedRun, calibrate: Call, tmp_path: Path) -> None:
    wide = fill(RecordedRun(tmp_path / "runs", ranks=4, number=1), steps=50)
    result = calibrate(run.root, wide.root, "--dry-run", "--json")
    assert (result.json["world_size"], section(result, "step")["n"]) == (4, 130)
    narrow = calibrate(run.root, wide.root, "--dry-run", "--json", "--world-size", 2)
    assert section(narrow, "step")["n"] == 200
    assert "seen with 3 ranks; seen with: 2, 4" in calibrate(run.root, wide.root, "--world-size", 3).err


def test_the_picture_shows_each_section_and_its_limits(run: RecordedRun, calibrate: Call, tmp_path: Path) -> None:
    result = calibrate(run.root, "--dry-run", "--json", "--plot", tmp_path / "a.svg")
    root = ET.fromstring((tmp_path / "a.svg").read_text())
    texts = ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]
    assert [t for t in texts if t in ("step", "checkpointing", "setup")] == ["step", "checkpointing", "setup"]
    assert "current 4.0s" in texts
    soft, hard = (root.find(f".//{SVG}line[@class='{kind}']") for kind in ("look", "act"))
    bars = [float(r.get("x", "0")) + float(r.get("width", "0")) for r in root.iter(f"{SVG}rect")]
    assert soft is not None
    assert hard is not None
    assert section(result, "step")["soft_s"] < section(result, "step")["hard_s"]
    assert float(soft.get("x1", "0")) < float(hard.get("x1", "0"))
    assert max(bars) < float(hard.get("x1", "0"))
    assert "http" not in (tmp_path / "a.svg").read_text().replace("http://www.w3.org/2000/svg", "")


# -- what cannot be done -----------------------------------------------------------------------------------------------
def test_refusals_say_what_to_do(run: RecordedRun, calibrate: Call, tmp_path: Path, ended_run: Any) -> None:
    foreign = tmp_path / "package.json"
    foreign.write_text('{"schema": "other/1"}')
    for argv, code, words in (
        ((run.root, "--plot", "a.png"), 2, "ends with .svg"),
        ((run.root, "--plot", tmp_path / "none" / "a.svg"), 2, "in a folder that exists"),
        ((run.root, "-o", tmp_path / "none" / "t.json"), 2, "in a folder that exists"),
        ((run.root, "-o", foreign), 2, "neither steadyrun.timeouts/1"),
        ((run.root, "--cap", 0), 2, "cap_s must be above 0"),
        ((run.root, "--logs", "x"), 2, "go together"),
        ((tmp_path / "none",), 1, "none"),
        ((ended_run.root,), 1, "let a job do some steps"),  # its journal tells of steps and of no durations
    ):
        result = calibrate(*argv)
        assert (result.code, words in result.err) == (code, True), (argv, result.err)
    assert foreign.read_text() == '{"schema": "other/1"}'


# -- logs --------------------------------------------------------------------------------------------------------------
def write_logs(folder: Path, times_ms: dict[int, list[int]], every: int = 1) -> str:
    folder.mkdir()
    for rank, own in times_ms.items():
        lines = ["loading", *(f"step {i * every:5d}   loss 2.5   {t:,} ms/step" for i, t in enumerate(own))]
        (folder / f"rank_{rank}.log").write_text("\n".join(lines) + "\n")
    return str(folder / "*.log")


PATTERN = r"step +(?P<step>\d+).* (?P<ms>[\d.,]+) ms"


def test_logs_of_ranks_by_a_pattern(calibrate: Call, tmp_path: Path) -> None:
    logs = write_logs(tmp_path / "logs", {0: [9000] + [500] * 60, 3: [800] + [500] * 59 + [1750]})
    result = calibrate("--logs", logs, "--pattern", PATTERN, "--dry-run", "--json")
    assert result.code == 0, result.err
    step = section(result, "step")
    assert (step["n"], step["max_s"], step["max_rank"], step["max_step"]) == (60, 1.75, 3, 60)
    assert step["first_max_s"] == 9.0
    assert result.json["world_size"] == 2
    assert 1.75 < step["hard_s"] < 200
    assert calibrate("--logs", logs, "--pattern", PATTERN, "-o", tmp_path / "t.json").code == 0
    assert json.loads((tmp_path / "t.json").read_text())["step"] >= step["hard_s"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2024-05-01 23:59:59,500", "2024-05-02 00:00:02,000"),
        ("2024-05-01T23:59:59.5Z", "2024-05-02T00:00:02Z"),
        ("23:59:59.5", "00:00:02"),
        ("1700000000.0", "1700000002.5"),
    ],
)
def test_times_of_lines(calibrate: Call, tmp_path: Path, first: str, second: str) -> None:
    (tmp_path / "a.log").write_text(f"[{first}] step 1\n[{second}] step 2\n[{first}] step 1\n[{second}] step 2\n")
    result = calibrate(
        "--logs", tmp_path / "a.log", "--pattern", r"\[(?P<time>.*)\] step (?P<step>\d+)", "--json", "--dry-run"
    )
    step = section(result, "step")
    assert (step["first_n"], step["first_max_s"]) == (2, pytest.approx(2.5))  # the step falls back: a second attempt


def test_sections_and_ranks_from_lines(calibrate: Call, tmp_path: Path) -> None:
    lines = [f"[rank{r}] {s} took {t} s" for s, t in (("save", 3.0), ("eval", 9.0)) for _ in range(20) for r in (0, 1)]
    (tmp_path / "all.log").write_text("\n".join(lines))
    pattern = r"\[rank(?P<rank>\d+)\] (?P<section>\w+) took (?P<seconds>[\d.]+)"
    result = calibrate("--logs", tmp_path / "all.log", "--pattern", pattern, "--dry-run", "--json")
    assert result.code == 0, result.err
    assert {s["section"]: (s["n"], s["max_s"]) for s in result.json["sections"]} == {
        "eval": (19, 9.0),
        "save": (19, 3.0),
    }
    assert "checkpointing" in result.json["never_seen"]
    assert "evaluation" not in result.json["never_seen"]


def test_lines_that_average_over_steps_are_warned_of(calibrate: Call, tmp_path: Path) -> None:
    logs = write_logs(tmp_path / "logs", {0: [500] * 40}, every=20)
    result = calibrate("--logs", logs, "--pattern", PATTERN, "--dry-run")
    assert "the logs tell of every 20 steps at once" in " ".join(result.out.split())


def test_patterns_and_logs_that_cannot_be_used(calibrate: Call, tmp_path: Path) -> None:
    logs = write_logs(tmp_path / "logs", {0: [500]})
    for glob, pattern, code, words in (
        (logs, "(", 2, "no regular expression"),
        (logs, r"step (\d+)", 2, "give it a group (?P<seconds>...)"),
        (logs, r"(?P<ms>\d+) (?P<loss>\d+)", 2, "unknown group 'loss'"),
        (str(tmp_path / "*.txt"), PATTERN, 1, "no file matches"),
        (logs, r"nothing (?P<ms>\d+)", 1, "matches no line of 1 files"),
    ):
        result = calibrate("--logs", glob, "--pattern", pattern, "--dry-run")
        assert (result.code, words in result.err) == (code, True), (pattern, result.err)
