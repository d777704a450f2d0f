"""What is read of journals: passes joined over ranks and nodes, steps without sections, what a stop may have cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import RecordedRun

from steadyrun.core.journal import read_journal
from steadyrun.detect.calibrate import OUT_OF_SECTION, History, SectionKey
from steadyrun.detect.calibrate.passes import Pass, RunPasses, add_to, read_passes


def passes_of(run: RecordedRun) -> RunPasses:
    run.close()
    return read_passes(run.root.name, [read_journal(p) for p in sorted(run.folder.journal_dir.glob("*.jsonl"))])


def of(found: RunPasses, section: str) -> list[Pass]:
    return [p for p in found.passes if p.section == section]


def both(value: Any) -> dict[int, Any]:
    """Of either rank."""
    return {0: value, 1: value}


def seconds(found: RunPasses, section: str) -> list[float]:
    return [p.seconds for p in of(found, section)]


@pytest.fixture(params=[1, 2], ids=["one node", "two nodes"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path, ranks=2, nodes=request.param)


def test_a_pass_is_the_slowest_ranks(run: RecordedRun) -> None:
    run.begin(0)
    run.steps(5, 2, {0: [1.0, 1.5], 1: [1.2, 1.1]})
    run.steps(10, 3, {0: [1.0], 1: [4.0]})
    found = passes_of(run)
    assert [(p.seconds, p.rank, p.step) for p in of(found, "step")] == [(1.2, 1, 1), (1.5, 0, 2), (4.0, 1, 3)]
    (attempt,) = found.attempts
    assert attempt.world_size == 2
    assert attempt.observed_s == pytest.approx(8.0)  # from the first step, 2 s in, to the last record
    assert attempt.whole_s == pytest.approx(10.0)


def test_ranks_are_joined_by_order_though_records_divide_them_differently(run: RecordedRun) -> None:
    run.begin(0)
    run.steps(5, 3, {0: [1.0, 2.0], 1: [1.0]})
    run.steps(10, 4, {0: [3.0], 1: [1.0, 9.0]})
    assert seconds(passes_of(run), "step") == [1.0, 2.0, 9.0]


def test_first_passes_of_each_attempt_are_told_apart_and_the_set_up_is_not_one(run: RecordedRun) -> None:
    for attempt in (0, 1):
        run.begin(100 * attempt, attempt)
        sections = {r: {"setup": [30.0], "load": [7.0, 1.0], "checkpointing": [2.0, 0.5]} for r in (0, 1)}
        run.steps(100 * attempt + 50, 2, {0: [1.0], 1: [1.0]}, sections)
    found = passes_of(run)
    assert [p.is_first for p in of(found, "load")] == [True, False] * 2
    assert [p.is_first for p in of(found, "setup")] == [False, False]
    history = History()
    add_to(history, found)
    load = history.get(SectionKey("load", 2))
    assert load is not None
    assert (load.first.max_s, load.durations.max_s, load.durations.events) == (7.0, 1.0, 2)


def test_the_scripts_own_steps_win_over_the_time_between_steps(run: RecordedRun) -> None:
    run.begin(0)
    own = {r: {"step": [5.0, 1.0, 1.0, 1.0]} for r in (0, 1)}
    run.steps(10, 4, {0: [1.3, 1.3, 1.3], 1: [1.3, 1.3, 1.3]}, own)
    found = passes_of(run)
    assert seconds(found, "step") == [5.0, 1.0, 1.0, 1.0]
    assert seconds(found, OUT_OF_SECTION) == pytest.approx([0.3] * 3)
    assert found.has_own_step


@pytest.mark.parametrize("name", ["checkpointing", "evaluation", "audit"])
def test_a_save_is_taken_off_the_step_it_was_in(run: RecordedRun, name: str) -> None:
    run.begin(0)
    run.steps(5, 5, both([0.5] * 5))
    run.steps(10, 10, both([0.5, 0.5, 20.5, 0.9, 0.5]), both({name: [20.0]}))
    assert seconds(passes_of(run), "step") == pytest.approx([0.5] * 5 + [0.5, 0.5, 0.5, 0.9, 0.5])


def test_a_save_at_the_end_of_one_record_is_taken_off_the_step_in_the_next(run: RecordedRun) -> None:
    run.begin(0)
    run.steps(5, 5, both([0.5] * 5), both({"checkpointing": [20.0]}))
    run.steps(10, 7, both([20.5, 0.5]))
    assert seconds(passes_of(run), "step") == pytest.approx([0.5] * 7)


def test_a_load_in_the_set_up_excuses_no_slow_step_later(run: RecordedRun) -> None:
    run.begin(0)
    sections = both({"checkpointing": [20.0], "setup": [40.0]})
    run.steps(5, 2, both([0.5]), sections)
    run.steps(30, 4, both([20.5, 0.5]))
    assert seconds(passes_of(run), "step") == [0.5, 20.5, 0.5]


def test_another_rank_that_waits_for_the_save_is_late_all_the_same(run: RecordedRun) -> None:
    """Only rank 0 is in a section; rank 1 waits in the next step, and its limit is that of the step."""
    run.begin(0)
    run.steps(30, 3, {0: [0.5, 20.5, 0.5], 1: [0.5, 20.5, 0.5]}, {0: {"evaluation": [20.0]}})
    assert of(passes_of(run), "step")[1].seconds == 20.5
    assert of(passes_of(run), "step")[1].rank == 1


def test_what_comes_with_each_step_may_be_another_threads_and_is_not_taken_off(run: RecordedRun) -> None:
    run.begin(0)
    sections = both({"prefetch": [0.9] * 6})
    run.steps(6, 6, both([1.0] * 6), sections)
    found = passes_of(run)
    assert seconds(found, "step") == [1.0] * 6
    assert seconds(found, OUT_OF_SECTION) == [1.0] * 6
    (attempt,) = found.attempts
    assert attempt.outside_s / attempt.steps_s == pytest.approx(0.1)  # as it seems, for people


@pytest.mark.parametrize(("stopped", "expected"), [(True, [1.0]), (False, [1.0, 600.0])])
def test_the_last_pass_of_a_stopped_attempt_does_not_count(
    run: RecordedRun, stopped: bool, expected: Sequence[float]
) -> None:
    run.begin(0)
    run.steps(5, 3, {0: [1.0], 1: [1.0]}, both({"load": [3.0, 1.0], "setup": [2.0]}))
    run.steps(600, 3, {}, {1: {"load": [600.0]}})
    if stopped:
        run.hang(601)
    found = passes_of(run)
    assert [p.seconds for p in of(found, "load") if not p.is_first] == expected
    assert seconds(found, "setup") == [2.0]  # a step came after it, so it was whole


def test_hangs_and_what_restarts_took(run: RecordedRun) -> None:
    run.begin(0)
    run.many_steps(2.0, [1.0] * 20)
    run.hang(30, rank=1)
    run.begin(31, attempt=1, first_step=16, first_after_s=4.0)
    run.many_steps(35.0, [1.0] * 5)
    found = passes_of(run)
    assert [(h.attempt, h.section, h.rank) for h in found.hangs] == [(0, "step", 1)]
    assert found.restarts_s == [pytest.approx(5.0 + 5.0)]  # 5 s until the first step, and steps 16 to 20 again


def test_a_planned_stop_is_no_hang_and_no_restart(run: RecordedRun) -> None:
    run.begin(0)
    run.many_steps(2.0, [1.0] * 3)
    run.stop(10, "membership")
    run.begin(11, attempt=1)
    run.many_steps(13.0, [1.0] * 3)
    found = passes_of(run)
    assert (found.hangs, found.restarts_s) == ([], [])


def test_a_section_around_many_steps_gets_no_limit(run: RecordedRun) -> None:
    run.begin(0)
    run.many_steps(2.0, [1.0] * 30, {"epoch": [30.0], "load": [0.2]})
    found = passes_of(run)
    assert found.loops == {"epoch"}
    assert not of(found, "epoch")
    assert seconds(found, "load") == [0.2]


def test_durations_that_the_journal_leaves_out_are_counted_and_the_longest_is_kept(run: RecordedRun) -> None:
    run.begin(0)
    durations_s = [0.01, 0.5, *[0.02] * 8]
    run.steps(5, 11, {}, both({"forward": durations_s}), lost=1, left_out=5)
    found = passes_of(run)
    assert seconds(found, "forward") == [0.5, *[0.02] * 5]
    assert found.unread == 2 * (4 + 1)


def test_broken_records_are_passed_over(run: RecordedRun) -> None:
    run.begin(0)
    run.write("steps", 3, ranks={"0": {"step_times_s": "much", "sections": {"load": 3}}, "x": {}, "1": None})
    run.write("steps", 4, ranks={"0": {"step": None, "step_times_s": [float("1e999"), -1, True, 2.0]}})
    run.write("suspicion", 4, suspicion="none")
    run.steps(5, 2, {0: [1.0], 1: [1.0]})
    assert max(seconds(passes_of(run), "step")) == 2.0


def test_a_run_without_a_step_has_no_passes(run: RecordedRun) -> None:
    assert list(passes_of(run).passes) == []
