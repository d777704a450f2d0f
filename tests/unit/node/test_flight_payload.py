"""Flight records on their way to the leader: small enough, and with the clocks of their nodes told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core.classes import Mode
from steadyrun.core.flight import FlightGroup, FlightOp, RankFlight
from steadyrun.core.records import RankEvidence, rank_evidence_from_json, to_json
from steadyrun.core.runfolder import RunFolder
from steadyrun.detect.policy import History, PolicyLimits
from steadyrun.node.incident import FEWEST_OPS, MAX_FLIGHT_BYTES, IncidentDesk, _light, _size_bytes


class Clock:
    def __init__(self) -> None:
        self.mono_s = 1000.0
        self.wall_s = 1_800_000_000.0

    def now_s(self) -> float:
        return self.mono_s

    def unix_s(self) -> float:
        return self.wall_s


def flight(rank: int, ops: int = 1, frames: int = 3) -> RankFlight:
    sites = tuple(f"/home/user/a/rather/long/path/to/model_{i}.py:{i} in forward" for i in range(frames))
    return RankFlight(
        rank,
        groups=(FlightGroup("0", "default_pg", tuple(range(8)), "nccl"), FlightGroup("1", "tp", (0, 1), "nccl")),
        ops=tuple(FlightOp(i % 2, i, "all_reduce", site=sites[0], frames=sites) for i in range(ops)),
    )


def evidence(rank: int, node: str) -> RankEvidence:
    return RankEvidence(rank=rank, local_rank=0, node=node, pid=10 + rank, attempt=0, flight=flight(rank))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def desk(tmp_path: Path, clock: Clock) -> Iterator[IncidentDesk]:
    desk = IncidentDesk(
        RunFolder(tmp_path), "r", "a", Mode.ACT, "train.py", clock, lambda call: call(), PolicyLimits(None)
    )
    yield desk
    desk.close()


def payload(node: str, rank: int, sent_at_unix_s: float) -> dict[str, Any]:
    return {
        "node": node,
        "unix_minus_mono_s": sent_at_unix_s - 1000.0,
        "sent_at_unix_s": sent_at_unix_s,
        "ranks": [to_json(evidence(rank, node))],
        "progress": {},
    }


def test_a_clock_that_is_off_is_told_with_the_flight(desk: IncidentDesk, clock: Clock, tmp_path: Path) -> None:
    incident = desk.open(1, 0, {"trigger": "hang"})
    desk.expect(incident, 3, 2000.0)
    for group_rank, off_s in enumerate((0.0, 40.0, -0.5)):
        desk.add_evidence(0, group_rank, payload(f"node{group_rank}", group_rank, clock.wall_s + off_s))
    desk.judge_all(3, History())
    kept = json.loads((tmp_path / "incidents/0001/evidence.json").read_text())
    ranks = [rank_evidence_from_json(r) for r in kept["ranks"]]
    assert [r.flight.node_minus_here_s for r in ranks if r.flight is not None] == [0.0, 40.0, 0.0]


def test_a_flight_of_the_usual_size_is_sent_whole() -> None:
    usual = flight(0, ops=4)
    assert _light(usual) is usual


def test_a_large_flight_loses_stacks_before_operations() -> None:
    many = flight(0, ops=30, frames=12)
    assert _size_bytes(many) > MAX_FLIGHT_BYTES
    light = _light(many)
    assert _size_bytes(light) <= MAX_FLIGHT_BYTES
    assert [bool(op.frames) for op in light.ops] == [True, True] + [False] * 28
    assert all(op.site for op in light.ops)
    assert light.more_ops == 0


def test_the_oldest_operations_stay() -> None:
    huge = flight(0, ops=400, frames=12)
    light = _light(huge)
    assert len(light.ops) >= FEWEST_OPS
    assert [op.seq for op in light.ops] == list(range(len(light.ops)))
    assert light.more_ops == 400 - len(light.ops)
    assert _size_bytes(light) <= MAX_FLIGHT_BYTES
