"""Verdicts over simulated jobs: the culprit is named, and nobody else with confidence."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steadyrun.collectors.flight.folder import load_folder
from steadyrun.core.flight import FlightGroup, FlightOp, RankFlight, flight_from_json
from steadyrun.detect.waits import judge_flights
from steadyrun.detect.waits.records import RankState
from steadyrun.testing.flightsim import FaultKind, FlightSet, Layout, Named, Scenario, Score, drawn_set, score, simulate

NOTHING = (FaultKind.NONE, FaultKind.RUNNING)
SINGLE = tuple(k for k in FaultKind if k not in NOTHING)
PAIRED = tuple(k for k in SINGLE if k not in (FaultKind.GLOO_STALL, FaultKind.DEVICE_STALL))


def judged(found: FlightSet, folder: Path) -> tuple[Score, str]:
    """Through real files, as a post mortem goes; and a story for when it is wrong."""
    found.write(folder)
    loaded = load_folder([folder], workers=1)
    states = {rank: RankState(state) for rank, state in found.truth.states.items()}
    judgement = judge_flights(loaded.flights, found.truth.world, states, loaded.details)
    findings: list[Named] = [(f.finding.cls.value, f.finding.ranks, f.finding.confidence) for f in judgement.findings]
    faults = ", ".join(f"{f.kind.value} of rank {f.rank} at {f.desc} #{f.seq}" for f in found.truth.faults) or "none"
    return score(found.truth, findings), f"{faults}; said {findings}; {found.scenario}"


def check(
    world: int,
    kinds: Sequence[FaultKind],
    faults: int,
    seeds: range,
    folder: Path,
    **options: Any,
) -> tuple[int, int, list[str]]:
    """Sets with the exact culprits, with the right class too, and stories of the rest."""
    exact, right, stories = 0, 0, []
    for seed in seeds:
        found = drawn_set(world, kinds, faults, f"replay {[k.value for k in kinds]} {world} {seed}", **options)
        result, story = judged(found, folder / str(seed))
        assert not result.blames_innocent, story
        exact += result.is_exact
        right += result.is_class_right
        if not (result.is_exact and result.is_class_right):
            stories.append(story)
    return exact, right, stories


def timing_for(kind: FaultKind) -> dict[str, Any]:
    """A device that stalls ahead of a collective leaves no trace without device times."""
    return {"with_timing": True} if kind is FaultKind.DEVICE_STALL else {}


@pytest.mark.parametrize("kind", SINGLE, ids=lambda k: str(k.value))
def test_a_single_fault_is_named_exactly(kind: FaultKind, tmp_path: Path) -> None:
    exact, right, stories = check(16, (kind,), 1, range(3), tmp_path, **timing_for(kind))
    assert exact == 3, "\n".join(stories)
    # One call too many at the end of a step looks like calls in another order.
    assert right >= (2 if kind is FaultKind.EXTRA else 3), "\n".join(stories)


@pytest.mark.parametrize("kind", NOTHING, ids=lambda k: str(k.value))
def test_nobody_is_blamed_without_a_fault(kind: FaultKind, tmp_path: Path) -> None:
    check(16, (kind,), 0, range(4), tmp_path)


def test_two_faults_are_both_named(tmp_path: Path) -> None:
    exact, _, stories = check(16, PAIRED, 2, range(10), tmp_path)
    assert exact >= 9, "\n".join(stories)


def test_a_skip_is_found_where_another_fault_hides_its_ring(tmp_path: Path) -> None:
    # Rank 2 has skipped a call, seven ranks wait for it, and it waits for ranks that a stalled host holds up.
    kinds = (FaultKind.HOST_STALL, FaultKind.SKIP)
    layout = Layout(tp=8, dp=2)
    found = simulate(Scenario(layout, kinds, seed=1, entries=150, window=4, backend="gloo", victims=(12, 2)))
    result, story = judged(found, tmp_path)
    assert result.is_exact, story
    assert result.is_class_right, story


def test_missing_and_cut_dumps_make_nobody_guilty(tmp_path: Path) -> None:
    exact, _, stories = check(16, PAIRED, 1, range(8), tmp_path, dropped=0.07, truncated=0.07)
    assert exact >= 6, "\n".join(stories)


def test_dumps_of_active_entries_alone_are_enough(tmp_path: Path) -> None:
    kinds = tuple(k for k in PAIRED if k not in (FaultKind.SKIP, FaultKind.EXTRA))
    exact, _, stories = check(16, kinds, 1, range(8), tmp_path, active_only=True)
    assert exact >= 7, "\n".join(stories)


def test_ranks_of_one_group_hold_its_members_once() -> None:
    # Each of 4,096 ranks names all others in three groups: apart they would take 0.6 GB.
    text = '{"rank": %d, "groups": [{"name": "0", "desc": "default_pg", "ranks": "0-4095"}]}'
    flights = [flight_from_json(json.loads(text % rank)) for rank in range(2)]
    assert flights[0].groups[0].ranks is flights[1].groups[0].ranks
    assert len(flights[0].groups[0].ranks) == 4096


def test_the_judgement_stays_linear_in_the_ranks() -> None:
    def judge_s(world: int) -> float:
        members = tuple(range(world))
        group = FlightGroup("0", "default_pg", members, "nccl", first_seq=1, issued_seq=7, done_seq=6)
        op = FlightOp(0, 7, "all_reduce", created_ns=1_000, site="train.py:88 in step")
        idle = RankFlight(0, (replace(group, issued_seq=6),), recorders=("nccl",), entries=6)
        flights = {r: replace(idle, rank=r, groups=(group,), ops=(op,)) if r else idle for r in members}
        began_s = time.process_time()
        judgement = judge_flights(flights, world)
        took_s = time.process_time() - began_s
        assert [(f.finding.cls.value, f.finding.ranks) for f in judgement.findings] == [("host_stall", (0,))]
        return took_s

    small_s = min(judge_s(1024) for _ in range(3))
    large_s = min(judge_s(8192) for _ in range(3))
    assert large_s < 30 * max(small_s, 0.005)  # eight times as many; with their square it would be 64 times


@pytest.mark.slow
@pytest.mark.deadline(1800)
@pytest.mark.parametrize("world", [16, 64])
def test_at_least_98_of_100_single_and_90_of_100_double_faults_are_named_exactly(world: int, tmp_path: Path) -> None:
    count = 20 if world == 16 else 6
    exact = total = 0
    stories: list[str] = []
    for kind in SINGLE:
        found, _, wrong = check(world, (kind,), 1, range(100, 100 + count), tmp_path / kind.value, **timing_for(kind))
        exact, total, stories = exact + found, total + count, stories + wrong
    assert exact >= 0.98 * total, "\n".join(stories)
    doubles, _, wrong = check(world, PAIRED, 2, range(100, 100 + 3 * count), tmp_path / "two")
    assert doubles >= 0.9 * 3 * count, "\n".join(wrong)
