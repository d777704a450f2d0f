"""Data-parallel replicas: who belongs to them, and that one is named when the others wait for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from steadyrun.core.timing import Role, StepTiming
from steadyrun.detect.straggler import Alarm, AlarmKind, TimingBlock
from steadyrun.node.pacejudge import PaceJudge, PaceNews, replicas_of
from steadyrun.node.straggling import read_place
from steadyrun.node.timingwire import NodeFacts, RankFacts

STAGES, REPLICAS = 2, 4
RANKS = STAGES * REPLICAS
FIRST = 120
FACTS = NodeFacts(
    "a",
    tuple(
        RankFacts(r, r, 1, Role(f"part={r // REPLICAS}", (r // REPLICAS,)), f"dp={r % REPLICAS}") for r in range(RANKS)
    ),
)


def named(slow_link: int | None, told: bool = True, slow_rank: int | None = None) -> list[Alarm]:
    """Faults found in 220 steps of a job of two stages, in which activations travel slowly in one replica."""
    judge, rng = PaceJudge(RANKS), np.random.default_rng(1)
    judge.introduce(FACTS)
    out: list[Alarm] = []
    for step in range(220):
        own = 0.5 * np.exp(rng.normal(0.0, 0.005, RANKS))
        travel = np.full(REPLICAS, 0.1)
        if step >= FIRST:
            if slow_link is not None:
                travel[slow_link] += 0.5
            if slow_rank is not None:
                own[slow_rank] *= 2
        needed = own.reshape(STAGES, REPLICAS).sum(axis=0) + travel  # one stage after the other
        wall = needed.max() + 0.05
        rows = {}
        for rank in range(RANKS):
            waited = float(wall - needed[rank % REPLICAS])
            s = float(own[rank])
            row = StepTiming(step, 0.0, float(wall), s, 0.3 * s, 0.6 * s, 0.1 * s, 0.0, 0.0, float(wall) - s, s)
            rows[rank] = [replace(row, group_wait_s=waited) if told else row]
        judge.add(TimingBlock.of_rows(rows).to_bytes(), float(step))
        out += [e.alarm for e in judge.judge(float(step), float(step)) if e.news is PaceNews.BEGAN]
    return [a for a in out if a.kind in (AlarmKind.RANK, AlarmKind.NODE, AlarmKind.GROUP)]


def test_the_replica_that_the_others_wait_for_is_named_with_its_ranks() -> None:
    [alarm] = named(slow_link=2)
    assert alarm.kind is AlarmKind.GROUP
    assert (alarm.group, alarm.ranks) == ("dp=2", (2, 6))
    assert alarm.first_step == pytest.approx(FIRST, abs=2)
    assert alarm.step <= FIRST + 25
    assert not alarm.is_actionable


def test_a_slow_rank_is_named_alone_and_not_its_replica() -> None:
    assert [(a.kind, a.ranks) for a in named(slow_link=None, slow_rank=5)] == [(AlarmKind.RANK, (5,))]


def test_without_fault_or_without_known_waits_no_replica_is_named() -> None:
    assert named(slow_link=None) == []
    assert named(slow_link=2, told=False) == []


def test_replicas_are_those_of_several_ranks() -> None:
    assert replicas_of({0: "dp=0", 1: "dp=1", 2: "dp=0", 3: "dp=1"}) == {"dp=0": [0, 2], "dp=1": [1, 3]}
    assert replicas_of({0: "dp=0", 1: "dp=1", 2: "", 3: ""}) == {}
    assert replicas_of({0: "dp=0", 1: "dp=0"}) == {}


def test_facts_keep_the_replica_on_their_way() -> None:
    assert NodeFacts.from_bytes(FACTS.to_bytes()) == FACTS


def test_a_replica_is_what_a_rank_does_not_share_with_its_peers(tmp_path: Path) -> None:
    path = tmp_path / "role.json"
    path.write_text(json.dumps({"mesh": {"dp": 3, "pp": 1, "shard": 2}, "key": [["pp", 1]]}))
    role, replica = read_place(path)
    assert role is not None
    assert (role.name, replica) == ("pp=1 shard=2", "dp=3 shard=2")
    path.write_text(json.dumps({"mesh": {"dp": 3, "pp": 1}, "key": [1]}))
    assert read_place(path)[1] == ""
    path.write_text(json.dumps({"mesh": 7, "key": []}))
    assert read_place(path) == (None, "")
