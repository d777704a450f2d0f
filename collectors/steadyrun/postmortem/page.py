"""One self-contained page of a report: readable alone, on a phone too, on paper, and by whoever is on call.

It loads nothing, and nothing in it depends on the script. Every text from a rank or a file is escaped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final, TypeVar

from steadyrun.core.causes import decode_causes
from steadyrun.core.classes import FaultClass
from steadyrun.core.flight import RankFlight
from steadyrun.core.frames import is_user_frame
from steadyrun.core.records import Evidence, Finding, Frame, RankEvidence, ThreadStack
from steadyrun.detect.grouping import group_ranks, place_of, places_sentence
from steadyrun.postmortem.assets import SCRIPT, STYLE
from steadyrun.postmortem.case import Input, InputStatus, Moment, Report
from steadyrun.postmortem.chain import Chain, Place, chain_of_waits
from steadyrun.postmortem.drawing import draw_arrivals, draw_axis, draw_chain, draw_lane, escape
from steadyrun.postmortem.lanes import LaneChart, chart_lanes
from steadyrun.postmortem.words import (
    REASON_WORDS,
    age_words,
    blamed_ranks,
    clock_words,
    end_of,
    flight_finding,
    home_words,
    op_words,
    plausible_unix_s,
    rank_words,
    size_words,
    state_words,
    verdict_sentence,
)

__all__ = ["render_page"]

T = TypeVar("T")

_DRAWINGS: Final = 6
_LANES_OPEN: Final = 24
_LANES: Final = 160
_STACKS_OPEN: Final = 3
_STACKS: Final = 24
_FRAMES: Final = 60
_ROWS: Final = 120
_MOMENTS_OPEN: Final = 60
_MOMENTS: Final = 1500
_LOGS: Final = 16
_LOG_LINES: Final = 30
_LOG_CHARS: Final = 600
_INPUTS: Final = 100
_WAITS: Final = 150


def render_page(report: Report) -> str:
    """The report as one HTML file of at most some hundred kilobytes, for any number of ranks."""
    chain = chain_of_waits(report)
    chart = chart_lanes(report, chain)
    sections = [
        ("waits", "Chain of waits", _waits(report, chain)),
        ("differences", "Who called what", _differences(report)),
        ("lanes", "Ranks over time", _lanes(report, chart)),
        ("stacks", "Stacks", _stacks(report)),
        ("logs", "Last log lines", _logs(report)),
        ("timeline", "Timeline", _timeline(report, chain)),
        ("groups", "How far each group came", _groups(report)),
        ("ranks", "Ranks", _ranks(report)),
        ("data", "Data quality", _data(report)),
    ]
    shown = [(name, title, body) for name, title, body in sections if body]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in shown)
    body = "".join(f'<section id="{name}"><h2>{title}</h2>{text}</section>' for name, title, text in shown)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';style-src 'unsafe-inline';"
        "script-src 'unsafe-inline'\">"
        f"<title>{escape(_title(report))}</title><style>{STYLE}</style></head>\n<body><main>{_head(report)}"
        f'<nav aria-label="Sections">{links}</nav>{body}</main><script>{SCRIPT}</script></body></html>\n'
    )


def _title(report: Report) -> str:
    what = report.findings[0].cls.value.replace("_", " ") if report.findings else "nothing known"
    return f"{what}: {report.case.title}" if report.case.title else what


# -- the verdict -------------------------------------------------------------------------------------------------------
def _head(report: Report) -> str:
    evidence = report.case.evidence
    main = report.findings[0] if report.findings else None
    told = ("run", "incident") if report.case.title.startswith("incident ") else ()  # the title says both
    top = [f"<span>{escape(k)} <b>{escape(v)}</b></span>" for k, v in report.head if k not in told]
    if not any(k in ("ranks", "world size") for k, _ in report.head):
        top.append(f"<span>ranks <b>{evidence.world_size}</b></span>")
    end = end_of(report)
    if end is not None:
        word = "evidence taken" if end.is_taken else "newest record"
        top.append(f"<span>{word} <b>{_date(end.at_unix_s)}</b></span>")
    title = f"<span><b>{escape(report.case.title)}</b></span>" if report.case.title else ""
    parts = [f'<header><div class="top">{title}{"".join(top)}</div>']
    sentence = verdict_sentence(report)
    style = ' class="long"' if len(sentence) > 150 else ""
    parts.append(f"<h1{style}>{_chip_of(main)} {escape(sentence)}</h1>")
    if report.decision:
        parts.append(f'<p class="decision">{escape(report.decision)}</p>')
    if main is not None:
        parts.append(_facts(report, main))
        parts.append(_not_sure(report, main))
    others = report.findings[1:]
    if others:
        word = "Another root cause" if len(others) == 1 else f"{len(others)} more root causes"
        parts.append(f"<h3>{word}</h3>" + "".join(_other(report, f) for f in others[:12]))
        if len(others) > 12:
            parts.append(f'<p class="dim">and {len(others) - 12} more</p>')
    return "".join(parts) + "</header>"


def _chip_of(finding: Finding | None) -> str:
    if finding is None:
        return '<span class="chip">unknown</span>'
    kind = {FaultClass.HEALTHY: "ok", FaultClass.INSUFFICIENT_DATA: "wait"}.get(finding.cls, "bad")
    return f'<span class="chip {kind}">{finding.cls.value.replace("_", " ")}</span>'


def _facts(report: Report, finding: Finding) -> str:
    of_flight = flight_finding(report, finding)
    by_rank = {r.rank: r for r in report.case.evidence.ranks}
    facts: list[tuple[str, str, str]] = []
    if finding.ranks:
        home = home_words(finding.ranks, by_rank) or ", ".join(finding.nodes[:4])
        who = rank_words(finding.ranks, report.case.evidence.world_size)
        facts.append(("who", who, home))
    elif finding.nodes:
        facts.append(("where", ", ".join(finding.nodes[:6]), ""))
    if finding.op:
        number = f" #{finding.seq}" if finding.seq is not None else ""
        facts.append(("operation", finding.op + number, f"of {finding.group}" if finding.group else ""))
    elif finding.group:
        facts.append(("group", finding.group, ""))
    if finding.callsite:
        facts.append(("call site", finding.callsite, ""))
    if finding.section:
        facts.append(("section", finding.section, ""))
    since, end = clock_words(finding.since_unix_s), end_of(report)
    if since:
        age = end.age_words(finding.since_unix_s) if end is not None else ""
        facts.append(("since", f"{since} UTC", f"{age} before the evidence was taken" if age else ""))
    if of_flight is not None and of_flight.waiters:
        facts.append(("waiting for it", f"{of_flight.waiters} rank{'s' * (of_flight.waiters != 1)}", ""))
    elif report.victims:
        facts.append(("not to blame", f"{len(report.victims)} rank{'s' * (len(report.victims) != 1)}", ""))
    cells = "".join(_fact(name, value, more) for name, value, more in facts)
    share = min(max(finding.confidence, 0.0), 1.0)
    meter = f'<span class="meter"><i style="width:{share:.0%}"></i></span>{share:.0%}'
    basis = ""
    if of_flight is not None:
        basis = (
            "<small>follows from what was recorded</small>"
            if of_flight.is_hard
            else "<small>rests on something missing</small>"
        )
    return f'<dl class="facts">{cells}<div><dt>confidence</dt><dd>{meter}{basis}</dd></div></dl>'


def _fact(name: str, value: str, more: str) -> str:
    shown = f'<span class="code">{escape(value)}</span>' if name == "call site" else escape(value)
    small = f"<small>{escape(more)}</small>" if more else ""
    big = ' class="big"' if name in ("operation", "call site") else ""
    return f"<div{big}><dt>{escape(name)}</dt><dd>{shown}{small}</dd></div>"


def _not_sure(report: Report, main: Finding) -> str:
    if main.confidence >= 0.9 or not report.missing:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in report.missing[:3])
    more = f'<li><a href="#data">{len(report.missing) - 3} more</a></li>' if len(report.missing) > 3 else ""
    return f'<p class="dim">What would make it surer:</p><ul class="notes dim">{items}{more}</ul>'


def _other(report: Report, finding: Finding) -> str:
    by_rank = {r.rank: r for r in report.case.evidence.ranks}
    small = [home_words(finding.ranks, by_rank) or ", ".join(finding.nodes[:4])]
    if finding.callsite:
        small.append(finding.callsite)
    if since := clock_words(finding.since_unix_s):
        small.append(f"since {since}")
    small.append(f"confidence {finding.confidence:.0%}")
    return (
        f'<div class="finding"><p>{_chip_of(finding)} <b>{escape(finding.summary)}</b></p>'
        f'<p class="dim">{escape(" · ".join(s for s in small if s))}</p></div>'
    )


# -- waits -------------------------------------------------------------------------------------------------------------
def _waits(report: Report, chain: Chain) -> str:
    if not chain.places:
        return ""
    numbers: list[int | None] = [n for n in range(len(report.findings)) if chain.of_finding(n)]
    if chain.of_finding(None):
        numbers.append(None)
    parts = [
        '<p class="lead">Arrows lead from who waits to whom they wait for. '
        "Ranks that stand at the same place are drawn as one.</p>"
    ]
    for number in numbers[:_DRAWINGS]:
        if number is None:
            parts.append("<h3>Waits that lead to no root cause</h3>")
        elif len(numbers) > 1:
            parts.append(f"<h3>{_chip_of(report.findings[number])} {escape(report.findings[number].summary)}</h3>")
        parts.append(f'<div class="wide-only">{draw_chain(report, chain, number, True)}</div>')
        parts.append(f'<div class="narrow">{draw_chain(report, chain, number, False)}</div>')
    if len(numbers) > _DRAWINGS:
        parts.append(f'<p class="dim">{len(numbers) - _DRAWINGS} more are in the table.</p>')
    parts.append(_waits_table(report))
    return "".join(parts)


def _waits_table(report: Report) -> str:
    waits = report.flight.waits if report.flight is not None else ()
    if not waits:
        return ""
    rows = [
        (
            escape(rank_words(w.waiters)),
            escape(op_words(w.op, [w.seq])),
            escape(w.desc or w.group),
            _code(w.site or ""),
            clock_words(w.since_unix_s),
            escape(rank_words(w.on)) if w.on else "",
            REASON_WORDS[w.reason],
        )
        for w in waits[:_WAITS]
    ]
    head = ("who waits", "in", "group", "called at", "since", "for", "which")
    more = f'<p class="dim">and {len(waits) - _WAITS} more</p>' if len(waits) > _WAITS else ""
    return f"<details><summary>Every wait as a table ({len(waits)})</summary>{_table(head, rows)}{more}</details>"


def _differences(report: Report) -> str:
    parts = []
    for finding in report.findings:
        of_flight = flight_finding(report, finding)
        if of_flight is None or not of_flight.differences:
            continue
        blamed = set(finding.ranks)
        where = f"{finding.op or 'operation'} #{finding.seq}" if finding.seq is not None else finding.op or ""
        group = f" of {finding.group}" if finding.group else ""
        rows, marks = [], []
        for ranks, text in of_flight.differences[:40]:
            rows.append((escape(rank_words(ranks)), f'<span class="code">{escape(text)}</span>'))
            marks.append("bad" if blamed.issuperset(ranks) else "")
        place = escape(where + group)
        parts.append(f'<p class="lead">In the place of {place}. Whoever is to blame is marked.</p>')
        parts.append(_table(("ranks", "called"), rows, marks))
    return "".join(parts)


def _code(text: str) -> str:
    return f'<span class="code">{escape(text)}</span>' if text else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], marks: Sequence[str] = ()) -> str:
    """Cells are HTML already."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = []
    for i, row in enumerate(rows):
        mark = f' class="{marks[i]}"' if i < len(marks) and marks[i] else ""
        cells = "".join(f'<td data-k="{escape(k)}">{c}</td>' for k, c in zip(head, row, strict=True))
        body.append(f"<tr{mark}>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


# -- lanes -------------------------------------------------------------------------------------------------------------
def _lanes(report: Report, chart: LaneChart) -> str:
    if chart.axis is None:
        return ""
    by_rank = {r.rank: r for r in report.case.evidence.ranks}
    kinds = {b.kind for lane in chart.lanes for b in lane.bars} | {t.kind for lane in chart.lanes for t in lane.ticks}
    lanes = []
    for lane in chart.lanes[:_LANES]:
        home = home_words(lane.ranks, by_rank)
        name = rank_words(lane.ranks)
        count = f"{len(lane.ranks)} ranks" if len(lane.ranks) > 2 else ""
        if ": " in name:
            name, count = name.split(": ", 1)
        under = "".join(
            f"<span>{escape(t)}</span>" for t in (" · ".join(s for s in (count, home) if s), lane.note) if t
        )
        arrivals = draw_arrivals(lane, chart.axis)
        if arrivals:
            spread = age_words(max(lane.starts_s) - min(lane.starts_s))
            arrivals = f"<details><summary>each rank, {spread} from first to last</summary>{arrivals}</details>"
        lanes.append(
            f'<div class="lane {lane.role}"><div class="who"><b>{escape(name)}</b>{under}</div>'
            f"{draw_lane(lane, chart.axis)}{arrivals}</div>"
        )
    axis = f'<div class="lane axis-row"><div class="who"></div>{draw_axis(chart)}</div>'
    first = "".join(lanes[:_LANES_OPEN])
    more = ""
    if len(lanes) > _LANES_OPEN:
        hidden = sum(len(lane.ranks) for lane in chart.lanes[_LANES_OPEN:_LANES])
        rest = "".join(lanes[_LANES_OPEN:])
        more = f"<details><summary>{len(lanes) - _LANES_OPEN} more lanes, {hidden} ranks</summary>{rest}</details>"
    if len(chart.lanes) > _LANES:
        left_out = sum(len(lane.ranks) for lane in chart.lanes[_LANES:])
        more += f'<p class="dim">{len(chart.lanes) - _LANES} lanes of {left_out} ranks are left out</p>'
    quiet = " After the last calls time has another scale (shaded)." if chart.axis.knee_s is not None else ""
    lead = (
        '<p class="lead">Ranks that did the same share a lane. A bar begins where the operation was called and lasts '
        f"to the end, since it was still open.{quiet}</p>"
    )
    return f'{lead}{_key(kinds, chart)}<div class="lanes">{axis}{first}{more}</div>'


def _key(kinds: set[str], chart: LaneChart) -> str:
    words = (
        ("head", "operation it stands in"),
        ("open", "called after that"),
        ("silence", "no call"),
        ("section", "open section"),
        ("issued", "call"),
        ("done", "newest one done"),
        ("step", "step"),
        ("fault", "exit or exception"),
    )
    items = [f'<span><i class="k-{kind}"></i>{text}</span>' for kind, text in words if kind in kinds]
    if chart.axis is not None and chart.axis.knee_s is not None:
        items.append('<span><i class="k-quiet"></i>another scale</span>')
    return f'<div class="key">{"".join(items)}</div>'


# -- groups ------------------------------------------------------------------------------------------------------------
def _groups(report: Report) -> str:
    progress = _progress(report.case.evidence)
    if not progress:
        return ""
    apart = [p for p in progress if p.is_apart]
    level = [p for p in progress if not p.is_apart]
    parts = []
    if apart:
        blamed = blamed_ranks(report)
        folded = _fold_rows(apart, lambda p: (p.desc, p.backend, p.top, _span(p.done.values()), len(p.ranks)))
        folded.sort(key=lambda same: (not any(r in blamed for p in same for r in p.behind), -len(same)))
        parts.append('<p class="lead">Groups in which not every member has called the same number of collectives.</p>')
        head = ("group", "members", "backend", "called", "done", "behind")
        parts.append(_table(head, [_group_row(same, report.case.evidence.world_size) for same in folded[:_ROWS]]))
        if len(folded) > _ROWS:
            parts.append(f'<p class="dim">and {len(folded) - _ROWS} more rows</p>')
    if level:
        stuck = sum(p.is_open for p in level)
        what = "1 group" if len(level) == 1 else f"{len(level)} groups"
        text = f"In {what} every member has called the same number of collectives"
        text += f"; in {stuck} of them the newest is not done" if stuck else ", and all are done"
        parts.append(f'<p class="dim">{text}.</p>')
    return "".join(parts)


class _Progress:
    """One group over its members."""

    def __init__(self, desc: str, name: str, ranks: tuple[int, ...], backend: str) -> None:
        self.desc, self.name, self.ranks, self.backend = desc, name, ranks, backend
        self.issued: dict[int, int] = {}
        self.done: dict[int, int] = {}

    @property
    def top(self) -> int:
        return max(self.issued.values())

    @property
    def is_apart(self) -> bool:
        return len(set(self.issued.values())) > 1

    @property
    def is_open(self) -> bool:
        return any(self.done.get(r, -1) < n for r, n in self.issued.items())

    @property
    def behind(self) -> dict[int, int]:
        """Who has not called the newest, and what it called last."""
        return {r: n for r, n in self.issued.items() if n < self.top}


def _group_row(same: Sequence[_Progress], world_size: int) -> tuple[str, ...]:
    """Groups of one kind that came equally far, with their stragglers together."""
    one = same[0]
    name = one.desc or one.name
    if len(same) > 1:
        name += f", {len(same)} groups"
    elif one.name and one.name != name:
        name += f" ({one.name})"
    members = rank_words(one.ranks, world_size) if one.ranks else f"{len(one.issued)} seen"
    if len(same) > 1:
        members = f"{len(one.ranks or one.issued)} ranks each"
    behind = {r: n for p in same for r, n in p.behind.items()}
    words = ", ".join(f"{rank_words(ranks)} at #{n}" for n, ranks in _by_value(behind)[:3])
    silent = {r for p in same for r in p.ranks if r not in p.issued}
    if silent:
        words += f"; nothing known of {rank_words(sorted(silent))}"
    done = _span(n for p in same for n in p.done.values())
    return tuple(escape(c) for c in (name, members, one.backend, f"#{one.top}", done, words))


def _span(values: Iterable[int]) -> str:
    known = sorted(values)
    if not known:
        return ""
    return f"#{known[0]}" if known[0] == known[-1] else f"#{known[0]} to #{known[-1]}"


def _by_value(numbers: Mapping[int, int]) -> list[tuple[int, list[int]]]:
    order = sorted(numbers, key=lambda r: (numbers[r], r))
    return [(n, list(ranks)) for n, ranks in groupby(order, key=lambda r: numbers[r])]


def _fold_rows(rows: Sequence[T], key: Callable[[T], object]) -> list[list[T]]:
    folded: dict[object, list[T]] = {}
    for row in rows:
        folded.setdefault(key(row), []).append(row)
    return list(folded.values())


def _progress(evidence: Evidence) -> list[_Progress]:
    groups: dict[tuple[str, tuple[int, ...]], _Progress] = {}
    for r in evidence.ranks:
        if r.flight is None:
            continue
        for g in r.flight.groups:
            if g.issued_seq is None:
                continue
            one = groups.setdefault((g.name, g.ranks), _Progress(g.desc, g.name, g.ranks, g.backend))
            one.issued[r.rank] = g.issued_seq
            if g.done_seq is not None:
                one.done[r.rank] = g.done_seq
    return list(groups.values())


# -- stacks ------------------------------------------------------------------------------------------------------------
def _stacks(report: Report) -> str:
    evidence = report.case.evidence
    blamed = blamed_ranks(report)
    with_stacks = [r for r in evidence.ranks if r.stacks]
    parts = []
    if with_stacks:
        groups = group_ranks(with_stacks, evidence.script)
        parts.append(f'<p class="lead">{escape(places_sentence(groups, evidence.world_size))}.</p>')
        by_rank = {r.rank: r for r in with_stacks}
        groups.sort(key=lambda g: not any(r in blamed for r in g.ranks))
        for i, group in enumerate(groups[:_STACKS]):
            sample = next((r for r in group.ranks if r in blamed), group.ranks[0])
            shown = f", shown is rank {sample}" if len(group.ranks) > 1 else ""
            text = _stack_text(by_rank[sample].stacks, evidence.script)
            parts.append(_stack(rank_words(group.ranks) + shown, text, i < _STACKS_OPEN))
        if len(groups) > _STACKS:
            parts.append(f'<p class="dim">and {len(groups) - _STACKS} more places</p>')
    for r in evidence.ranks:
        if r.exception is not None and r.exception.frames and (r.rank in blamed or len(parts) < _STACKS):
            text = f"{r.exception.type}: {r.exception.message[:2000]}"
            frames = "\n".join(_frame(f, evidence.script) for f in r.exception.frames[:_FRAMES])
            parts.append(_stack(f"rank {r.rank}, uncaught exception", f"{escape(text)}\n{frames}", r.rank in blamed))
    parts += _recorded_calls(report, {r.rank for r in with_stacks})
    return "".join(parts)


def _stack(title: str, text: str, is_open: bool) -> str:
    return f'<details class="group"{" open" * is_open}><summary>{escape(title)}</summary><pre>{text}</pre></details>'


def _stack_text(stacks: Sequence[ThreadStack], script: str) -> str:
    parts = []
    for stack in sorted(stacks, key=lambda s: not s.is_main)[:12]:
        name = "main thread" if stack.is_main else f"thread {stack.thread}"
        frames = [f"  {_frame(f, script)}" for f in stack.frames[:_FRAMES]]
        if len(stack.frames) > _FRAMES:
            frames.append(f"  and {len(stack.frames) - _FRAMES} more")
        parts.append(f'<span class="th">{escape(name)}</span>\n' + "\n".join(frames))
    return "\n\n".join(parts)


def _frame(frame: Frame, script: str) -> str:
    style = "own" if is_user_frame(frame, script) else "lib"
    return f'<span class="{style}">{escape(frame)}</span>'


def _recorded_calls(report: Report, with_stacks: set[int]) -> list[str]:
    """Where no stack was taken: the call of the operation a rank stands in, as its recorder kept it."""
    calls: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for r in report.case.evidence.ranks:
        if r.rank in with_stacks or r.flight is None or not r.flight.ops or not r.flight.ops[0].frames:
            continue
        op = r.flight.ops[0]
        calls.setdefault((op.name, op.frames), []).append(r.rank)
    if not calls:
        return []
    parts = ['<p class="lead">As recorded when the operation was called:</p>']
    blamed = blamed_ranks(report)
    order = sorted(calls.items(), key=lambda c: (not any(r in blamed for r in c[1]), -len(c[1]), c[1][0]))
    for i, ((name, frames), ranks) in enumerate(order[:_STACKS]):
        text = "\n".join(escape(f) for f in frames)
        parts.append(_stack(f"{rank_words(ranks)} called {name}", text, i < _STACKS_OPEN))
    return parts


# -- the timeline ------------------------------------------------------------------------------------------------------
_KIND_CHIPS: Final[Mapping[str, str]] = {
    "exception": "bad", "exit": "bad", "device": "bad", "issued": "wait", "step": "info", "section": "info",
}  # fmt: skip


def _timeline(report: Report, chain: Chain) -> str:
    moments = [
        m for m in (*report.case.moments, *_own_moments(report, chain)) if plausible_unix_s(m.at_unix_s) is not None
    ]
    if not moments:
        return ""
    rows = _fold_moments(sorted(moments, key=lambda m: m.at_unix_s))
    is_important = [m.kind in ("exception", "exit", "device", "agent") for m, _ in rows]
    near = set(range(max(len(rows) - _MOMENTS_OPEN, 0), len(rows)))
    near |= {i for i, yes in enumerate(is_important) if yes}
    shown = [_moment_row(m, ranks) for i, (m, ranks) in enumerate(rows) if i in near][-2 * _MOMENTS_OPEN :]
    parts = [f'<ol class="times">{"".join(shown)}</ol>']
    hidden = [_moment_row(m, ranks) for i, (m, ranks) in enumerate(rows) if i not in near][-_MOMENTS:]
    if hidden:
        parts.insert(
            0, f'<details><summary>{len(hidden)} earlier</summary><ol class="times">{"".join(hidden)}</ol></details>'
        )
    return "".join(parts)


def _own_moments(report: Report, chain: Chain) -> Iterable[Moment]:
    """Exits, exceptions and the beginning of waits, where the material did not hold them as moments."""
    evidence = report.case.evidence
    have = {(m.kind, m.rank) for m in report.case.moments}
    for r in evidence.ranks:
        if r.exception is not None and ("exception", r.rank) not in have:
            text = f"{r.exception.type}: {r.exception.message[:300]}"
            yield Moment(r.exception.at_unix_s, "exception", text, r.rank, r.node)
        if r.exit is not None and ("exit", r.rank) not in have:
            at = r.exit.at_s + report.case.unix_minus_mono_s.get(r.node, 0.0)
            yield Moment(at, "exit", state_words(r), r.rank, r.node)
    if any(kind == "issued" for kind, _ in have):
        return
    calls: dict[tuple[str, str], list[Place]] = {}
    for place in chain.places:
        if place.op and place.since_unix_s is not None:
            calls.setdefault((place.op, place.desc), []).append(place)
    for (op, desc), places in calls.items():
        ranks = [r for p in places for r in p.ranks]
        seqs = [n for p in places for n in p.seqs]
        since = min(p.since_unix_s for p in places if p.since_unix_s is not None)
        what = op_words(op, seqs) if seqs else op
        yield Moment(since, "call", f"{rank_words(ranks)} in {what}{f' of {desc}' if desc else ''}, open from here on")


def _fold_moments(moments: Sequence[Moment]) -> list[tuple[Moment, tuple[int, ...]]]:
    """The same thing on several ranks within two seconds becomes one row."""
    rows: list[tuple[Moment, list[int]]] = []
    newest: dict[tuple[str, str], int] = {}
    for moment in moments:
        key = (moment.kind, moment.text)
        index = newest.get(key)
        if index is not None and moment.rank is not None and moment.at_unix_s - rows[index][0].at_unix_s < 2.0:
            rows[index][1].append(moment.rank)
            continue
        newest[key] = len(rows)
        rows.append((moment, [] if moment.rank is None else [moment.rank]))
    return [(m, tuple(r)) for m, r in rows]


def _moment_row(moment: Moment, ranks: tuple[int, ...]) -> str:
    who = rank_words(ranks) if ranks else moment.node
    lasted = ""
    if moment.until_unix_s is not None and moment.until_unix_s > moment.at_unix_s:
        lasted = f' <span class="dim">for {age_words(moment.until_unix_s - moment.at_unix_s)}</span>'
    chip = f'<span class="chip {_KIND_CHIPS.get(moment.kind, "")}">{escape(moment.kind)}</span>'
    whose = f"<span>{escape(who)}</span>" if who else ""
    style = ' class="log"' if moment.kind == "log" else ' class="all"' if not who else ""
    return (
        f"<li><time>{clock_words(moment.at_unix_s, 2)}</time><span>{chip}</span>{whose}"
        f"<div{style}>{escape(moment.text[:_LOG_CHARS])}{lasted}</div></li>"
    )


# -- ranks, logs, data -------------------------------------------------------------------------------------------------
def _ranks(report: Report) -> str:
    evidence = report.case.evidence
    if not evidence.ranks:
        return ""
    blamed, victims = blamed_ranks(report), set(report.victims)
    folded: dict[tuple[str, ...], list[RankEvidence]] = {}
    for r in sorted(evidence.ranks, key=lambda r: (r.rank not in blamed, r.rank not in victims, r.rank)):
        role = "culprit" if r.rank in blamed else "victim" if r.rank in victims else "fine"
        head = r.flight.ops[0] if r.flight is not None and r.flight.ops else None
        where = place_of(r, evidence.script).site or (head.site if head is not None else "") or ""
        key = (
            role,
            "" if r.step is None else str(r.step),
            ", ".join(s.name + (" (first)" if s.first else "") for s in r.sections),
            _collective_words(r.flight),
            state_words(r),
            where,
        )
        folded.setdefault(key, []).append(r)
    rows, marks = [], []
    for (role, step, _, collective, state, where), members in list(folded.items())[:_ROWS]:
        chip = {"culprit": "bad", "victim": "wait"}.get(role, "ok")
        ranks = [m.rank for m in members]
        home = home_words(ranks, {m.rank: m for m in members})
        rows.append(
            (
                escape(rank_words(ranks, evidence.world_size)),
                escape(home),
                f'<span class="chip {chip}">{role}</span>',
                escape(step),
                escape(_section_words(members, evidence.now_s)),
                escape(collective),
                escape(state),
                _code(where),
            )
        )
        marks.append("bad" if role == "culprit" else "")
    head_row = ("ranks", "node", "role", "step", "section", "collective", "state", "where")
    keep = [i for i in range(len(head_row)) if i in (0, 2) or any(row[i] for row in rows)]
    table = _table([head_row[i] for i in keep], [[row[i] for i in keep] for row in rows], marks)
    more = f'<p class="dim">and {len(folded) - _ROWS} more rows</p>' if len(folded) > _ROWS else ""
    absent = evidence.world_size - len(evidence.ranks)
    silent = f'<p class="dim">Nothing is known of {absent} more rank{"s" * (absent != 1)}.</p>' if absent > 0 else ""
    return f'<p class="lead">Ranks with equal rows are shown together.</p>{table}{more}{silent}'


def _collective_words(flight: RankFlight | None) -> str:
    if flight is None:
        return ""
    if flight.is_off:
        return "recorder off"
    if not flight.ops:
        return "in none"
    op = flight.ops[0]
    group = flight.groups[op.group] if 0 <= op.group < len(flight.groups) else None
    of_group = f" of {group.desc or group.name}" if group is not None else ""
    return f"{op.name} #{op.seq}{of_group}" + (f" ({op.state.value})" if op.state.value != "issued" else "")


def _section_words(members: Sequence[RankEvidence], now_s: float) -> str:
    parts = []
    for i, section in enumerate(members[0].sections):
        ages = [now_s - m.sections[i].since_s for m in members if i < len(m.sections)]
        low, high = max(min(ages), 0.0), max(max(ages), 0.0)
        age = age_words(high) if age_words(low) == age_words(high) else f"{age_words(low)} to {age_words(high)}"
        parts.append(f"{section.name} for {age}" + (" (first)" if section.first else ""))
    return ", ".join(parts)


def _logs(report: Report) -> str:
    blamed = blamed_ranks(report)
    order = sorted((r for r in report.case.evidence.ranks if r.log_tail), key=lambda r: (r.rank not in blamed, r.rank))
    parts: list[str] = []
    others: list[str] = []
    for r in order[:_LOGS]:
        text = "\n".join(line[:_LOG_CHARS] for line in r.log_tail[-_LOG_LINES:])
        title = f"rank {r.rank}" + (f" on {r.node}" if r.node else "")
        (parts if r.rank in blamed else others).append(_stack(title, escape(text), r.rank in blamed))
        causes = decode_causes(r.log_tail) if r.rank in blamed else []
        if causes and not causes[0][0].collateral:
            cause = causes[0][0]
            hint = f" Try: {cause.hint}" if cause.hint else ""
            parts.append(f'<p class="decision">That means: {escape(cause.words)}.{escape(hint)}</p>')
    if len(order) > _LOGS:
        others.append(f'<p class="dim">and {len(order) - _LOGS} more ranks</p>')
    if not parts or len(others) < 4:
        return "".join(parts + others)
    return "".join(parts) + f"<details><summary>other ranks</summary>{''.join(others)}</details>"


def _data(report: Report) -> str:
    parts = []
    if report.flight is not None:
        share = min(max(report.flight.coverage, 0.0), 1.0)
        text = f"Flight records of {share:.0%} of the ranks could be used."
        if report.flight.unknown:
            text += f" None from {rank_words(report.flight.unknown)}."
        parts.append(f'<p><span class="meter"><i style="width:{share:.0%}"></i></span>{escape(text)}</p>')
        parts += _recorder_notes(report.case.evidence)
    if report.missing:
        items = "".join(f"<li>{escape(text)}</li>" for text in report.missing[:60])
        more = f"<li>and {len(report.missing) - 60} more</li>" if len(report.missing) > 60 else ""
        parts.append(f'<h3>Not known</h3><ul class="notes">{items}{more}</ul>')
    by_rank = [f"rank {r.rank}: {text}" for r in report.case.evidence.ranks for text in r.missing]
    if by_rank:
        items = "".join(f"<li>{escape(text)}</li>" for text in by_rank[:60])
        parts.append(
            f'<details><summary>{len(by_rank)} sources gave nothing</summary><ul class="notes">{items}</ul></details>'
        )
    return "".join(parts) + _inputs(report.case.inputs)


def _recorder_notes(evidence: Evidence) -> Iterable[str]:
    flights = [r.flight for r in evidence.ranks if r.flight is not None]
    if not flights:
        return
    entries = sum(f.entries for f in flights)
    versions = sorted({f.version for f in flights if f.version})
    recorders = sorted({name for f in flights for name in f.recorders})
    text = f"{entries:,} entries from {len(flights)} ranks".replace(",", "\u2009")
    if recorders:
        text += f", recorders {', '.join(recorders[:6])}"
    if versions:
        text += f", formats {', '.join(versions[:6])}"
    yield f'<p class="dim">{escape(text)}.</p>'
    for word, ranks in (
        ("the recorder was off", [f.rank for f in flights if f.is_off]),
        ("the dump is cut", [f.rank for f in flights if f.is_cut]),
        ("only what was open is in the dump", [f.rank for f in flights if f.is_active_only]),
        ("no call sites", [f.rank for f in flights if not f.has_frames and f.entries]),
    ):
        if ranks:
            yield f'<p class="dim">{escape(word)}: {escape(rank_words(ranks, evidence.world_size))}</p>'


def _inputs(inputs: Sequence[Input]) -> str:
    if not inputs:
        return ""
    counts = _fold_rows(inputs, lambda i: i.status)
    words = ", ".join(f"{len(same)} {same[0].status.value.replace('_', ' ')}" for same in counts)
    odd = [i for i in inputs if i.status is not InputStatus.USED]
    used = [i for i in inputs if i.status is InputStatus.USED]
    parts = [f"<h3>Inputs</h3><p>{len(inputs)} files: {escape(words)}.</p>"]
    head = ("file", "rank", "status", "size", "what")
    if odd:
        parts.append(_table(head, [_input_row(i) for i in odd[:_INPUTS]]))
        if len(odd) > _INPUTS:
            parts.append(f'<p class="dim">and {len(odd) - _INPUTS} more</p>')
    if used:
        more = f'<p class="dim">and {len(used) - _INPUTS} more</p>' if len(used) > _INPUTS else ""
        table = _table(head, [_input_row(i) for i in used[:_INPUTS]])
        parts.append(f"<details><summary>{len(used)} used</summary>{table}{more}</details>")
    return "".join(parts)


def _input_row(one: Input) -> tuple[str, ...]:
    chip = {"used": "ok", "refused": "bad", "unreadable": "bad", "ignored": ""}.get(one.status.value, "wait")
    return (
        f'<span class="code">{escape(one.path)}</span>',
        "" if one.rank is None else str(one.rank),
        f'<span class="chip {chip}">{one.status.value.replace("_", " ")}</span>',
        size_words(one.size_bytes) if one.size_bytes else "",
        escape(one.detail),
    )


def _date(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d ", time.gmtime(unix_s)) + clock_words(unix_s) + " UTC"
