"""Stacks and log lines of an incident, for a person: ranks at one place together, library frames left out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from steadyrun.core.frames import activity_of, is_user_frame, main_stack
from steadyrun.core.records import Frame, RankEvidence, rank_evidence_from_json
from steadyrun.core.runfolder import RunFolder
from steadyrun.ctl.runs import IncidentFile
from steadyrun.detect.grouping import group_ranks, places_sentence

__all__ = ["StackGroup", "evidence_of", "grouped_stacks", "log_tails"]

TAIL_LINES: Final = 8
_TAIL_BYTES: Final = 8192


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks whose main threads are at one place.

    Attributes:
        title: ``wait in all_reduce called at train.py:88 (section step)``.
        frames: main thread of the first of them, most recent call first.
        important: the user's own frames and the one that says what is waited for.
    """

    ranks: tuple[int, ...]
    title: str
    frames: tuple[Frame, ...]
    important: tuple[Frame, ...]


def evidence_of(incident: IncidentFile) -> tuple[list[RankEvidence], str]:
    """What the incident's folder holds about each rank (the first record of a rank counts), and the user's script."""
    ranks: dict[int, RankEvidence] = {}
    script = ""
    for path in sorted(incident.folder.rglob("*.json")):
        if path.name == "verdict.json":
            continue
        try:
            data = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError):
            continue
        if isinstance(data, Mapping):
            script = script or str(data.get("script", ""))
        for record in _rank_records(data):
            try:
                evidence = rank_evidence_from_json(record)
            except ValueError:
                continue
            ranks.setdefault(evidence.rank, evidence)
    return [ranks[r] for r in sorted(ranks)], script


def _rank_records(data: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(data, Mapping):
        return
    if "rank" in data and "pid" in data:
        yield data
    members = data.get("ranks")
    if isinstance(members, Mapping):
        members = list(members.values())
    if isinstance(members, list):
        yield from (m for m in members if isinstance(m, Mapping) and "rank" in m and "pid" in m)


def grouped_stacks(incident: IncidentFile) -> list[StackGroup]:
    """Groups of ranks, the largest first; ranks without a stack are not in any."""
    ranks, script = evidence_of(incident)
    with_stack = {r.rank: r for r in ranks if main_stack(r.stacks) is not None}
    out: list[StackGroup] = []
    for group in group_ranks(with_stack.values(), script):
        stack = main_stack(with_stack[group.ranks[0]].stacks)
        frames = stack.frames if stack is not None else ()
        sentence = places_sentence([group], world_size=10**9)
        title = sentence.partition(" ")[2].lstrip("0123456789-, and")
        out.append(StackGroup(group.ranks, title, frames, _important(frames, script)))
    return out


def _important(frames: Sequence[Frame], script: str) -> tuple[Frame, ...]:
    activity = activity_of(frames, script)
    chosen = [f for f in frames if is_user_frame(f, script) or f == activity.frame]
    return tuple(chosen or frames[:3])


def log_tails(incident: IncidentFile, run: RunFolder) -> dict[int, Sequence[str]]:
    """Last lines of the accused ranks: as kept with the evidence, else from their log files."""
    accused = [r for f in incident.findings for r in f.get("ranks", ()) if isinstance(r, int)]
    kept = {r.rank: r.log_tail for r in evidence_of(incident)[0]}
    out: dict[int, Sequence[str]] = {}
    for rank in sorted(set(accused))[:4]:
        lines = list(kept.get(rank, ())) or _tail(run, int(incident.verdict.get("attempt", 0)), rank)
        if lines:
            out[rank] = lines[-TAIL_LINES:]
    return out


def _tail(run: RunFolder, attempt: int, rank: int) -> list[str]:
    for name in ("stderr.log", "stdout.log"):
        try:
            with (run.rank_dir(attempt, rank) / name).open("rb") as f:
                f.seek(0, 2)
                f.seek(max(f.tell() - _TAIL_BYTES, 0))
                lines = f.read().decode("utf-8", errors="replace").splitlines()
        except OSError:
            continue
        if lines:
            return lines
    return []
