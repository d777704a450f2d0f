"""From a case, or from an incident of a live job, to the report that is shown: one judge for both."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final

from steadyrun.core.classes import FaultClass
from steadyrun.core.records import Evidence, Verdict
from steadyrun.detect.report import decision_words
from steadyrun.detect.verdict import Judgement, judge
from steadyrun.postmortem.case import Case, Input, Moment, Report

__all__ = ["Outcome", "judge_case", "outcome_of_report", "report_of_incident"]

DECIDED: Final = 0.5  # below it a finding is a guess that somebody has to look at


class Outcome(IntEnum):
    """Exit codes of ``steadyctl postmortem``."""

    HEALTHY = 0
    UNUSABLE = 2
    VERDICT = 10
    UNDECIDED = 11


def judge_case(case: Case) -> Report:
    """Judge what was found; times in the evidence are taken through ``case.unix_minus_mono_s``."""
    offsets = case.unix_minus_mono_s
    own = next(iter(offsets.values()), 0.0)
    judgement = judge(case.evidence, wall_minus_mono_s=own, offsets=offsets, details=case.details)
    return Report(
        case=case,
        findings=judgement.findings,
        victims=judgement.victims,
        missing=judgement.missing,
        flight=judgement.flight,
        sentence=judgement.sentence,
    )


def outcome_of_report(report: Report) -> Outcome:
    """Whether there is a verdict, and whether one can rely on it."""
    main = report.findings[0] if report.findings else None
    if main is None or main.cls is FaultClass.INSUFFICIENT_DATA:
        return Outcome.UNDECIDED
    if main.cls is FaultClass.HEALTHY:
        return Outcome.HEALTHY
    return Outcome.VERDICT if main.confidence >= DECIDED else Outcome.UNDECIDED


def _device_moments(evidence: Evidence) -> Iterator[Moment]:
    """What devices told, for the page's timeline."""
    for e in evidence.devices:
        text = e.meaning if e.event == "state" else f"{e.title}: {e.meaning}"
        yield Moment(e.at_unix_s, "device", text, e.rank, e.node)


def report_of_incident(
    verdict: Verdict,
    evidence: Evidence,
    judgement: Judgement,
    *,
    unix_minus_mono_s: dict[str, float],
    moments: Sequence[Moment] = (),
    inputs: Sequence[Input] = (),
) -> Report:
    """The report of an incident that the launcher has just judged."""
    case = Case(
        evidence=evidence,
        inputs=tuple(inputs),
        moments=(*moments, *_device_moments(evidence)),
        unix_minus_mono_s=unix_minus_mono_s,
        title=f"incident {verdict.incident} of run {verdict.run_id}",
    )
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(verdict.detected_at_unix_s))
    head = (
        ("run", verdict.run_id),
        ("incident", str(verdict.incident)),
        ("attempt", str(verdict.attempt)),
        ("noticed", f"{at}, {verdict.detection_delay_s:.1f} s after the last sign of life"),
        ("mode", verdict.mode.value),
    )
    return Report(
        case=case,
        findings=verdict.findings,
        victims=verdict.victims,
        missing=verdict.missing,
        flight=judgement.flight,
        sentence=judgement.sentence,
        head=head,
        decision="; ".join([decision_words(verdict), *map(str, verdict.details.get("notes", ()))]),
    )
