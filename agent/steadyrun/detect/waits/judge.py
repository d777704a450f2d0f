"""The judgement over flight records."""

from __future__ import annotations

from collections.abc import Mapping

from steadyrun.core.flight import FlightDetails, RankFlight
from steadyrun.detect.waits.records import FlightJudgement, RankState

__all__ = ["judge_flights"]


def judge_flights(
    flights: Mapping[int, RankFlight],
    world_size: int,
    states: Mapping[int, RankState] | None = None,
    details: FlightDetails | None = None,
) -> FlightJudgement:
    """Who waits for whom."""
    return FlightJudgement(unknown=tuple(r for r in range(world_size) if r not in flights))
