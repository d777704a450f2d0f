"""What those that look at running ranks need of the loop, as protocols: where ranks are, and the desk that reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from steadyrun.core.records import Finding, RankEvidence, Verdict
from steadyrun.node.incident import Incident

__all__ = ["Desk", "RankPlace"]


class RankPlace(Protocol):
    """A rank of this node, as the loop knows it."""

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def folder(self) -> Path: ...


class Desk(Protocol):
    """What is used of the incident desk."""

    def next_number(self) -> int: ...
    def open(self, number: int, attempt: int, payload: Mapping[str, Any]) -> Incident: ...
    def report(
        self,
        incident: Incident,
        findings: Sequence[Finding],
        ranks: Sequence[RankEvidence],
        world_size: int,
        details: Mapping[str, Any],
        missing: Sequence[str] = (),
    ) -> tuple[Verdict, str]: ...
