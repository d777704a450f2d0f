"""An incident for people at the terminal: a short block. The page is the post mortem's."""

from __future__ import annotations

from typing import Final

from steadyrun.core.causes import decode_causes
from steadyrun.core.classes import Action
from steadyrun.core.records import Evidence, RankEvidence, Verdict
from steadyrun.detect.grouping import name_ranks

__all__ = ["decision_words", "render_incident"]

BLOCK_LINES: Final = 20
_LOG_LINES: Final = 8
_LINE_CHARS: Final = 240


def render_incident(verdict: Verdict, evidence: Evidence, folder: str = "") -> str:
    """At most 20 lines for standard error: what happened, the last words of the first culprit, what is done now.

    Args:
        folder: where the evidence is, named in the last line.
    """
    lines = [f"incident {verdict.incident}, attempt {verdict.attempt}: {_headline(verdict)}"]
    lines += [f"  {f.cls.value}: {f.summary}" for f in verdict.findings[:3]]
    if len(verdict.findings) > 3:
        lines.append(f"  and {len(verdict.findings) - 3} more findings")
    if verdict.victims:
        lines.append(f"  not to blame: {name_ranks(verdict.victims)}")
    if verdict.findings and verdict.findings[0].confidence < 0.5:
        why = f" ({verdict.missing[0]})" if verdict.missing else ""
        lines.append(f"  confidence {verdict.findings[0].confidence:.0%}{why}")
    lines += _last_words(verdict, evidence)
    lines.append(f"  {decision_words(verdict)}" + (f"; details: {folder}" if folder else ""))
    return "\n".join(f"steadyrun: {line[:_LINE_CHARS]}" for line in lines[:BLOCK_LINES])


def _headline(verdict: Verdict) -> str:
    if not verdict.findings:
        return "nothing is known"
    main = verdict.findings[0]
    who = name_ranks(main.ranks) if main.ranks else "no rank named"
    nodes = f" on {', '.join(main.nodes[:4])}" if main.nodes else ""
    return f"{who}{nodes}, noticed after {verdict.detection_delay_s:.1f} s"


def _last_words(verdict: Verdict, evidence: Evidence) -> list[str]:
    culprit = _first_culprit(verdict, evidence)
    if culprit is None or not culprit.log_tail or (culprit.exit is None and culprit.exception is None):
        return []
    lines = [f"  last lines of rank {culprit.rank}:"]
    lines += [f"    | {line}" for line in culprit.log_tail[-_LOG_LINES:]]
    causes = decode_causes(culprit.log_tail)
    if causes and not causes[0][0].collateral:
        cause = causes[0][0]
        lines.append(f"  that means: {cause.words}" + (f"; try: {cause.hint}" if cause.hint else ""))
    return lines


def _first_culprit(verdict: Verdict, evidence: Evidence) -> RankEvidence | None:
    blamed = [r for f in verdict.findings for r in f.ranks]
    return next((e for rank in blamed for e in evidence.ranks if e.rank == rank), None)


def decision_words(verdict: Verdict) -> str:
    """What is done about it, with the reason where it says more."""
    reason = f" ({verdict.reason})" if verdict.reason not in ("", verdict.action.value) else ""
    match verdict.action:
        case Action.RESTART | Action.ROLL_BACK:
            return f"restarting as attempt {verdict.attempt + 1}{reason}"
        case Action.RESTART_WITHOUT_NODE:
            nodes = ", ".join(verdict.details.get("without") or [n for f in verdict.findings for n in f.nodes])
            return f"restarting as attempt {verdict.attempt + 1} without {nodes}{reason}"
        case Action.STOP:
            return f"the job stops{reason}"
        case Action.REPORT:
            return f"nothing is done{reason}"
