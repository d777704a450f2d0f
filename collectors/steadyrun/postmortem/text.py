"""A report for the terminal, one screen; and as JSON for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from steadyrun.core.classes import FaultClass
from steadyrun.core.records import Finding, to_json
from steadyrun.detect.waits.records import WaitReason
from steadyrun.postmortem.case import Input, InputStatus, Report
from steadyrun.postmortem.chain import Chain, Place, chain_of_waits
from steadyrun.postmortem.words import (
    clock_words,
    end_of,
    flight_finding,
    home_words,
    op_words,
    rank_words,
    verdict_sentence,
)

__all__ = ["SCHEMA", "render_text", "report_to_json"]

SCHEMA: Final = "steadyrun.postmortem/1"

_WHY: Final[Mapping[WaitReason, str]] = {
    WaitReason.NOT_ISSUED: "not called",
    WaitReason.QUEUED_BEHIND: "is elsewhere",
    WaitReason.NO_DUMP: "no dump",
    WaitReason.IN_FLIGHT: "does not end",
    WaitReason.DIFFERS: "called otherwise",
}
_OTHERS: Final = 3
_CHAIN_LINES: Final = 10
_SIDES: Final = 5
_MISSING: Final = 4
_INPUTS: Final = 4


@dataclass(frozen=True, slots=True)
class _Ink:
    """Colours of a terminal, or none."""

    is_on: bool

    def paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.is_on and text else text

    def bold(self, text: str) -> str:
        return self.paint("1", text)

    def dim(self, text: str) -> str:
        return self.paint("2", text)

    def verdict(self, cls: FaultClass | None, text: str) -> str:
        if cls is None or cls is FaultClass.INSUFFICIENT_DATA:
            return self.paint("1;33", text)
        return self.paint("1;32" if cls is FaultClass.HEALTHY else "1;31", text)


def render_text(report: Report, width: int = 100, color: bool = False) -> str:
    """The verdict with who, where and since when, the chain of waits, who is not to blame, and how good the data are.

    At most about 40 lines of *width* characters; control characters from ranks and files are left out.
    """
    ink = _Ink(color)
    width = max(width, 40)
    main = report.findings[0] if report.findings else None
    name = main.cls.value if main is not None else "nothing known"
    confidence = f"confidence {main.confidence:.0%}" if main is not None else ""
    top = f"{ink.verdict(main.cls if main else None, name)}{'  ' + ink.dim(confidence) if confidence else ''}"
    lines = [top, *(ink.bold(line) for line in _wrapped(verdict_sentence(report), width))]
    if main is not None:
        lines += ["", *_facts(report, main, width, ink)]
        lines += _sides(report, main, width, ink)
    lines += _chain(report, width, ink)
    lines += _others(report, width, ink)
    if report.decision:
        lines += ["", *_wrapped(report.decision, width)]
    lines += ["", *_quality(report, width, ink)]
    return "\n".join(lines).rstrip("\n")


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _wrapped(text: str, width: int, indent: str = "", lines: int = 4) -> list[str]:
    return textwrap.wrap(
        _plain(text), width, initial_indent=indent, subsequent_indent=indent, max_lines=lines, placeholder=" …"
    )


def _cut(text: str, width: int) -> str:
    plain = _plain(text)
    return plain if len(plain) <= width else plain[: max(width - 1, 1)] + "…"


def _facts(report: Report, finding: Finding, width: int, ink: _Ink) -> Iterable[str]:
    by_rank = {r.rank: r for r in report.case.evidence.ranks}
    of_flight = flight_finding(report, finding)
    rows: list[tuple[str, str]] = []
    if finding.ranks:
        home = home_words(finding.ranks, by_rank) or ", ".join(finding.nodes[:4])
        rows.append(("who", rank_words(finding.ranks) + (f" on {home}" if home else "")))
    elif finding.nodes:
        rows.append(("where", ", ".join(finding.nodes[:6])))
    if finding.op:
        number = f" #{finding.seq}" if finding.seq is not None else ""
        rows.append(("operation", f"{finding.op}{number}" + (f" of {finding.group}" if finding.group else "")))
    elif finding.group:
        rows.append(("group", finding.group))
    if finding.callsite:
        rows.append(("call site", finding.callsite))
    if finding.section:
        rows.append(("section", finding.section))
    since = clock_words(finding.since_unix_s)
    if since:
        end = end_of(report)
        age = end.age_words(finding.since_unix_s) if end is not None else ""
        rows.append(("since", f"{since} UTC" + (f", {age} before the evidence was taken" if age else "")))
    if of_flight is not None and of_flight.waiters:
        rows.append(("waiting", f"{of_flight.waiters} rank{'s' * (of_flight.waiters != 1)}"))
    if report.victims:
        rows.append(("not to blame", rank_words(report.victims, report.case.evidence.world_size)))
    for name, value in rows:
        yield f"  {ink.dim(f'{name:<13}')} {_cut(value, width - 16)}"


def _sides(report: Report, finding: Finding, width: int, ink: _Ink) -> Iterable[str]:
    of_flight = flight_finding(report, finding)
    if of_flight is None or not of_flight.differences:
        return
    yield ""
    yield ink.dim("who called what")
    for ranks, text in of_flight.differences[:_SIDES]:
        line = _cut(f"  {rank_words(ranks)}: {text}", width)
        yield ink.verdict(finding.cls, line) if set(ranks) <= set(finding.ranks) else line
    if len(of_flight.differences) > _SIDES:
        yield f"  and {len(of_flight.differences) - _SIDES} more"


# -- the chain of waits ------------------------------------------------------------------------------------------------
def _chain(report: Report, width: int, ink: _Ink) -> Iterable[str]:
    chain = chain_of_waits(report)
    if all(p.depth == 0 for p in chain.places) and not chain.rings:
        return
    lines: list[str] = []
    for number in [*range(len(report.findings)), None]:
        lines += _tree(report, chain, number, width, ink)
    yield ""
    yield ink.dim("who waits for whom")
    yield from lines[:_CHAIN_LINES]
    if len(lines) > _CHAIN_LINES:
        yield ink.dim(f"  and {len(lines) - _CHAIN_LINES} more places")


def _tree(report: Report, chain: Chain, number: int | None, width: int, ink: _Ink) -> list[str]:
    indices = chain.of_finding(number)
    children: dict[int | None, list[int]] = {}
    for i in indices:
        children.setdefault(chain.places[i].parent, []).append(i)
    ring = next((order for n, order in chain.rings if n == number), ())
    lines: list[str] = []

    def add(index: int, trunk: str, branch: str) -> None:
        place = chain.places[index]
        text = _cut(f"  {trunk}{branch}{_place_words(place)}", width)
        lines.append(
            ink.verdict(report.findings[number].cls, text) if place.depth == 0 and number is not None else text
        )
        below = children.get(index, [])
        deeper = trunk + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        for i, child in enumerate(below):
            if len(lines) > 4 * _CHAIN_LINES:
                return
            add(child, deeper, "└─ " if i == len(below) - 1 else "├─ ")

    roots = list(ring) or [i for i in indices if chain.places[i].depth == 0]
    for position, index in enumerate(roots):
        add(index, "", "")
        if ring:
            ahead = chain.places[ring[(position + 1) % len(ring)]]
            lines[-1] = _cut(f"{lines[-1]}, waits for {rank_words(ahead.ranks)}", width + 16 * ink.is_on)
    return lines


def _place_words(place: Place) -> str:
    who = rank_words(place.ranks)
    if not place.op:
        return f"{who}: {place.doing}{_at(place)}" if place.doing else f"{who}{_at(place)}"
    is_one = len(place.ranks) == 1
    verb = ("waits" if is_one else "wait") if place.depth else ("stands" if is_one else "stand")
    of = f" of {place.desc}" if place.desc else ""
    groups = f" ({place.groups} groups)" if place.groups > 1 else ""
    op = op_words(place.op, place.seqs) if place.seqs else place.op
    why = f" [{_WHY[place.reason]}]" if place.reason is not None else ""
    return f"{who} {verb} in {op}{of}{groups}{why}{_at(place)}"


def _at(place: Place) -> str:
    return f" at {place.site.partition(' in ')[0]}" if place.site else ""


# -- the rest ----------------------------------------------------------------------------------------------------------
def _others(report: Report, width: int, ink: _Ink) -> Iterable[str]:
    others = report.findings[1:]
    if not others:
        return
    yield ""
    yield ink.dim("also")
    for finding in others[:_OTHERS]:
        head = f"{finding.cls.value} ({finding.confidence:.0%}): {finding.summary}"
        yield from _wrapped(head, width, "  ", 2)
    if len(others) > _OTHERS:
        yield f"  and {len(others) - _OTHERS} more"


def _quality(report: Report, width: int, ink: _Ink) -> Iterable[str]:
    evidence = report.case.evidence
    words = [f"{evidence.world_size} ranks"]
    if report.flight is not None:
        words.append(f"flight records of {report.flight.coverage:.0%}")
    if report.case.inputs:
        words.append(f"{len(report.case.inputs)} files: {_input_counts(report.case.inputs)}")
    yield from _wrapped("data: " + ", ".join(words), width, lines=2)
    odd = [i for i in report.case.inputs if i.status not in (InputStatus.USED, InputStatus.IGNORED)]
    for one in odd[:_INPUTS]:
        detail = f": {one.detail}" if one.detail else ""
        yield ink.dim(_cut(f"  {one.path.name} {one.status.value.replace('_', ' ')}{detail}", width))
    if len(odd) > _INPUTS:
        yield ink.dim(f"  and {len(odd) - _INPUTS} more files")
    if report.missing:
        yield "not known:"
        for text in report.missing[:_MISSING]:
            yield from _wrapped(text, width, "  ", 2)
        if len(report.missing) > _MISSING:
            yield f"  and {len(report.missing) - _MISSING} more"


def _input_counts(inputs: Sequence[Input]) -> str:
    counts: dict[InputStatus, int] = {}
    for one in inputs:
        counts[one.status] = counts.get(one.status, 0) + 1
    return ", ".join(f"{n} {status.value.replace('_', ' ')}" for status, n in counts.items())


# -- JSON --------------------------------------------------------------------------------------------------------------
def report_to_json(report: Report) -> dict[str, Any]:
    """What ``steadyctl postmortem --json`` prints; findings, victims and missing as in verdict.json."""
    flight, end = report.flight, end_of(report)
    return {
        "schema": SCHEMA,
        "title": report.case.title,
        "sentence": verdict_sentence(report),
        "world_size": report.case.evidence.world_size,
        "taken_at_unix_s": end.at_unix_s if end is not None and end.is_taken else None,
        "findings": [_finding_to_json(report, f) for f in report.findings],
        "victims": list(report.victims),
        "missing": list(report.missing),
        "decision": report.decision,
        "coverage": None if flight is None else flight.coverage,
        "unknown": [] if flight is None else list(flight.unknown),
        "waits": [] if flight is None else [to_json(w) for w in flight.waits],
        "inputs": [
            {"path": str(i.path), "rank": i.rank, "status": i.status.value, "detail": i.detail}
            for i in report.case.inputs
        ],
    }


def _finding_to_json(report: Report, finding: Finding) -> dict[str, Any]:
    out = finding.to_json()
    of_flight = flight_finding(report, finding)
    if of_flight is not None:
        out["waiters"] = of_flight.waiters
        out["is_hard"] = of_flight.is_hard
        out["differences"] = [{"ranks": list(ranks), "called": text} for ranks, text in of_flight.differences]
    return out
