"""An incident for people: a short block for the terminal and one page for the browser."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from typing import Final

from steadyrun.core.causes import decode_causes
from steadyrun.core.classes import Action
from steadyrun.core.records import Evidence, Finding, RankEvidence, Verdict
from steadyrun.detect.exits import describe_exit
from steadyrun.detect.grouping import group_ranks, name_ranks, place_of, places_sentence

__all__ = ["render_html", "render_incident"]

BLOCK_LINES: Final = 20
_LOG_LINES: Final = 8
_LINE_CHARS: Final = 240
_PAGE_LOG_LINES: Final = 30
_PAGE_RANKS: Final = 64


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
    lines.append(f"  {_what_now(verdict)}" + (f"; details: {folder}" if folder else ""))
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


def _what_now(verdict: Verdict) -> str:
    reason = f" ({verdict.reason})" if verdict.reason not in ("", verdict.action.value) else ""
    match verdict.action:
        case Action.RESTART | Action.ROLL_BACK:
            return f"restarting as attempt {verdict.attempt + 1}{reason}"
        case Action.RESTART_WITHOUT_NODE:
            nodes = ", ".join(n for f in verdict.findings for n in f.nodes)
            return f"restarting as attempt {verdict.attempt + 1} without {nodes}{reason}"
        case Action.STOP:
            return f"the job stops{reason}"
        case Action.REPORT:
            return f"nothing is done{reason}"


# -- the page ----------------------------------------------------------------------------------------------------------
_STYLE: Final = """
:root{--ink:#1c2430;--dim:#667085;--line:#d8dee8;--bad:#b42318;--wait:#b54708;--ok:#067647;--paper:#fff;--soft:#f5f7fa}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaf0;--dim:#98a2b3;--line:#344054;--bad:#f97066;--wait:#fdb022;
--ok:#47cd89;--paper:#11161d;--soft:#1a212b}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:72rem;margin:2rem auto;
padding:0 1rem}h1{font-size:1.35rem;margin:0 0 .3rem}h2{font-size:1.05rem;margin:2rem 0 .5rem}p{margin:.3rem 0}
.dim{color:var(--dim)}.culprit{color:var(--bad);font-weight:600}.victim{color:var(--wait)}.fine{color:var(--ok)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .6rem;
border-bottom:1px solid var(--line);vertical-align:top}th{color:var(--dim);font-weight:500}
pre{background:var(--soft);padding:.7rem;overflow-x:auto;font:12.5px/1.45 ui-monospace,monospace;margin:.4rem 0}
details{margin:.4rem 0}summary{cursor:pointer}li{margin:.3rem 0}
"""


def render_html(verdict: Verdict, evidence: Evidence) -> str:
    """report.html: self-contained, no script; every text from a rank is escaped."""
    main = verdict.findings[0] if verdict.findings else None
    title = f"Incident {verdict.incident}: {main.cls.value if main else 'unknown'}"
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(verdict.detected_at_unix_s))
    body = [
        f"<h1>{_e(main.summary if main else 'Nothing is known')}</h1>",
        f"<p class=dim>incident {verdict.incident} of run {_e(verdict.run_id)}, attempt {verdict.attempt}, {at}, "
        f"noticed after {verdict.detection_delay_s:.1f} s, mode {verdict.mode.value}</p>",
        f"<p><b>{_e(_what_now(verdict))}</b></p>",
        _findings_list(verdict.findings),
        _ranks_table(verdict, evidence),
        _places(evidence),
        _logs(verdict, evidence),
        _missing_list(verdict.missing),
    ]
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{_e(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _e(text: object) -> str:
    return html.escape(str(text))


def _findings_list(findings: Sequence[Finding]) -> str:
    rows = "".join(
        f"<li><b>{f.cls.value}</b>, confidence {f.confidence:.0%}: {_e(f.summary)}"
        + (f" <span class=dim>({_e(', '.join(f.nodes))})</span>" if f.nodes else "")
        + "</li>"
        for f in findings
    )
    return f"<h2>Findings</h2><ol>{rows}</ol>" if rows else ""


def _ranks_table(verdict: Verdict, evidence: Evidence) -> str:
    blamed = {r for f in verdict.findings for r in f.ranks}
    order = sorted(evidence.ranks, key=lambda r: (r.rank not in blamed, r.rank not in verdict.victims, r.rank))
    head = "".join(f"<th>{c}</th>" for c in ("rank", "node", "role", "step", "sections", "state", "where"))
    rows = "".join(_rank_row(r, blamed, verdict, evidence) for r in order[:_PAGE_RANKS])
    more = f"<p class=dim>and {len(order) - _PAGE_RANKS} more</p>" if len(order) > _PAGE_RANKS else ""
    return f"<h2>Ranks</h2><div class=scroll><table><tr>{head}</tr>{rows}</table></div>{more}"


def _rank_row(r: RankEvidence, blamed: set[int], verdict: Verdict, evidence: Evidence) -> str:
    role = "culprit" if r.rank in blamed else "victim" if r.rank in verdict.victims else "fine"
    sections = ", ".join(
        f"{s.name} for {max(evidence.now_s - s.since_s, 0.0):.1f} s" + (" (first)" if s.first else "")
        for s in r.sections
    )
    cells = (
        str(r.rank),
        r.node,
        f"<span class={role}>{role}</span>",
        "" if r.step is None else str(r.step),
        sections,
        _state_words(r),
        place_of(r, evidence.script).site or "",
    )
    return "<tr>" + "".join(f"<td>{c if i == 2 else _e(c)}</td>" for i, c in enumerate(cells)) + "</tr>"


def _state_words(r: RankEvidence) -> str:
    if r.exception is not None:
        return f"{r.exception.type}: {r.exception.message[:120]}"
    if r.exit is not None:
        return describe_exit(r.exit, r.oom)
    if r.process is None:
        return "unknown"
    cpu = f", {r.cpu_share:.0%} CPU" if r.cpu_share is not None else ""
    wait = f" in {r.process.wchan}" if r.process.wchan else ""
    return f"state {r.process.state}{wait}{cpu}"


def _places(evidence: Evidence) -> str:
    with_stacks = [r for r in evidence.ranks if r.stacks]
    if not with_stacks:
        return ""
    groups = group_ranks(with_stacks, evidence.script)
    by_rank = {r.rank: r for r in with_stacks}
    parts = [f"<h2>Stacks</h2><p>{_e(places_sentence(groups, evidence.world_size))}</p>"]
    for group in groups[:8]:
        sample = by_rank[group.ranks[0]]
        text = "\n\n".join(
            ("main thread" if s.is_main else f"thread {s.thread}") + "\n" + "\n".join(f"  {f}" for f in s.frames)
            for s in sorted(sample.stacks, key=lambda s: not s.is_main)
        )
        shown = f"{name_ranks(group.ranks)}" + (f" (shown: rank {sample.rank})" if len(group.ranks) > 1 else "")
        parts.append(f"<details open><summary>{_e(shown)}</summary><pre>{_e(text)}</pre></details>")
    return "".join(parts)


def _logs(verdict: Verdict, evidence: Evidence) -> str:
    blamed = {r for f in verdict.findings for r in f.ranks}
    order = sorted((r for r in evidence.ranks if r.log_tail), key=lambda r: (r.rank not in blamed, r.rank))
    parts = []
    for r in order[:16]:
        is_open = " open" if r.rank in blamed else ""
        text = "\n".join(r.log_tail[-_PAGE_LOG_LINES:])
        parts.append(f"<details{is_open}><summary>rank {r.rank}</summary><pre>{_e(text)}</pre></details>")
    return "<h2>Last lines</h2>" + "".join(parts) if parts else ""


def _missing_list(missing: Sequence[str]) -> str:
    rows = "".join(f"<li>{_e(text)}</li>" for text in missing)
    return f"<h2>Not known</h2><ul>{rows}</ul>" if rows else ""
