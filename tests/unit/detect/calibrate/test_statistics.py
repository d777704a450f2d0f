"""What is kept of a section: fading, merging over runs, first passes, the file."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from steadyrun.detect.calibrate import History, SectionKey, SectionStatistics
from steadyrun.detect.calibrate.statistics import STATISTICS_SCHEMA

KEY = SectionKey("step", 8, "c0ffee")


def steps(durations: list[float], run: str = "r1", half_life: float = 10_000.0) -> SectionStatistics:
    s = SectionStatistics.empty(KEY, half_life)
    for i, d in enumerate(durations):
        s.observe(d, rank=i % 8, step=i, run=run)
    return s


def test_the_longest_is_known_with_its_rank_and_step() -> None:
    s = steps([1.0, 1.1, 7.5, 1.0])
    top = s.durations.largest[0]
    assert (top.seconds, top.rank, top.step, top.run) == (7.5, 2, 2, "r1")


def test_first_passes_are_kept_apart() -> None:
    s = steps([1.0] * 20)
    s.observe(95.0, rank=3, step=0, is_first=True)
    assert s.durations.max_s == 1.0
    assert s.n == pytest.approx(20)
    assert (s.first.max_s, s.first.n) == (95.0, 1)


def test_a_duration_weighs_half_after_a_half_life() -> None:
    s = steps([1.0] * 100 + [4.0] * 6400, half_life=6400.0)
    weight_of_old = s.n - s.durations.weight_above(2.0)
    assert weight_of_old == pytest.approx(50.0, rel=0.03)


def test_a_longest_duration_is_forgotten_after_four_half_lives() -> None:
    s = steps([600.0] + [1.0] * 1000, half_life=256.0)
    assert s.durations.max_s == 600.0
    for _ in range(100):
        s.observe(1.0)
    assert s.durations.max_s == pytest.approx(1.0, rel=0.05)


def test_what_was_nearly_the_longest_is_not_forgotten_with_it() -> None:
    # Eight long ones fill the list; those of 90 s go on, and are in the histogram alone.
    s = steps([100.0] * 8 + ([90.0] + [1.0] * 9) * 190, half_life=256.0)
    assert s.durations.max_s == pytest.approx(90.0, rel=0.05)


def test_memory_does_not_grow_with_events() -> None:
    draw = random.Random(2)
    s = steps([draw.lognormvariate(0, 1) for _ in range(2500)])
    assert len(s.durations.histogram.buckets()) < 250
    assert len(s.durations.largest) == 8


def test_merged_runs_count_together_and_the_older_fades() -> None:
    old, new = steps([2.0] * 5000, "r1", 5000.0), steps([1.0] * 5000, "r2", 5000.0)
    both = old.merged(new)
    above = both.durations.weight_above(1.5)
    assert above == pytest.approx(old.n / 2)
    assert both.n == pytest.approx(old.n / 2 + new.n)
    assert both.durations.events == 10_000


def test_merging_leaves_both_as_they_were() -> None:
    old, new = steps([2.0] * 100), steps([1.0] * 100)
    before = old.to_json(), new.to_json()
    old.merged(new).observe(9.0)
    assert (old.to_json(), new.to_json()) == before


def test_merging_in_parts_is_like_watching_all_the_time() -> None:
    draw = random.Random(3)
    all_of_it = [draw.lognormvariate(0, 0.2) for _ in range(640)]
    parts = [steps(all_of_it[i : i + 128], half_life=1000.0) for i in range(0, 640, 128)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merged(part)
    whole = steps(all_of_it, half_life=1000.0)
    assert merged.n == pytest.approx(whole.n, rel=0.01)
    assert merged.durations.total_s == pytest.approx(whole.durations.total_s, rel=0.01)
    assert merged.durations.quantile_s(0.9) == pytest.approx(whole.durations.quantile_s(0.9), rel=0.01)


def test_other_worlds_are_not_merged() -> None:
    with pytest.raises(ValueError, match="cannot merge"):
        steps([1.0]).merged(SectionStatistics.empty(SectionKey("step", 16, "c0ffee")))


def test_passes_per_day_follow_the_time_watched() -> None:
    s = steps([10.0] * 60)
    assert s.events_per_day == pytest.approx(8640)  # nothing else known: one after the other
    s.observe_wall(6000.0)
    assert s.events_per_day == pytest.approx(864)


def test_passes_per_day_do_not_change_with_fading() -> None:
    s = SectionStatistics.empty(KEY, 500.0)
    for _ in range(3000):
        s.observe(1.0)
        s.observe_wall(10.0)
    assert s.events_per_day == pytest.approx(8640, rel=0.1)
    assert s.aged(1000, 500.0).events_per_day == pytest.approx(s.events_per_day)


def test_ageing_to_nothing_leaves_nothing() -> None:
    s = steps([1.0] * 50).aged(1e6)
    assert s.n == 0
    assert math.isnan(s.durations.max_s)
    assert math.isnan(s.events_per_day)


def test_file_gives_the_same_back() -> None:
    history = History(runs=["a"])
    s = history.of(KEY)
    for i in range(100):
        s.observe(1.0 + i / 50, rank=1, step=i, run="a")
    s.observe(60.0, is_first=True)
    s.observe_wall(400.0)
    text = json.dumps(history.to_json())
    again = History.from_json(json.loads(text))
    assert json.dumps(again.to_json()) == text
    assert json.loads(text)["schema"] == STATISTICS_SCHEMA
    read = again.get(KEY)
    assert read is not None
    assert read.durations.largest[0].step == 99


def test_histories_merge_by_section_and_know_their_runs() -> None:
    one, two = History(), History()
    for history, name, run in ((one, "step", "r1"), (two, "step", "r2"), (two, "evaluation", "r2")):
        history.of(SectionKey(name, 8)).observe(1.0)
        history.note_run(run)
    both = one.merged(two)
    assert [s.key.section for s in both] == ["evaluation", "step"]
    assert [round(s.n) for s in both] == [1, 2]
    assert both.runs == ("r1", "r2")
    assert [s.key.section for s in both.of_world(8)] == ["evaluation", "step"]
    assert both.of_world(4) == []


def changed(path: tuple[Any, ...], value: Any) -> Any:
    history = History()
    history.of(KEY).observe(1.0)
    data = json.loads(json.dumps(history.to_json()))
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), "steadyrun.timeouts/1", "schema"),
        (("sections",), {}, "must be lists"),
        (("sections", 0), 7, "must be an object"),
        (("sections", 0, "world_size"), -1, "world_size"),
        (("sections", 0, "observed_s"), math.nan, "observed_s"),
        (("sections", 0, "durations"), [], "must be an object"),
        (("sections", 0, "durations", "buckets"), [], "neither"),
        (("sections", 0, "durations", "buckets"), [[0, -4]], "weight"),
        (("sections", 0, "durations", "largest"), [{"rank": 1}], "'largest'"),
        (("sections", 0, "durations", "largest"), [{"s": -1}], "'largest'"),
        (("sections", 0, "durations", "half_life_events"), 0, "half_life"),
    ],
)
def test_a_damaged_file_is_refused_by_name(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        History.from_json(changed(path, value))
