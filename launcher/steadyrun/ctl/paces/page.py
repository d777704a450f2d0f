"""The paces of a run as one page that loads nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from steadyrun.ctl.console import clock_time
from steadyrun.ctl.paces.folding import LEVELS, Picture, level, picture
from steadyrun.ctl.paces.reading import AttemptPaces, RunPaces, Told
from steadyrun.ctl.paces.text import PHASE_COLUMNS, headline, milliseconds, rows_shown, share, verdict
from steadyrun.detect.straggler import RankPace
from steadyrun.detect.straggler.records import Floats
from steadyrun.postmortem.assets import SCRIPT, STYLE
from steadyrun.postmortem.drawing import escape

__all__ = ["render_paces"]

MOST_ROWS: Final = 64
MOST_COLUMNS: Final = 120
MOST_TABLE: Final = 128
MOST_FINDINGS: Final = 100
WAIT_LEVELS: Final = 5

OWN_STYLE: Final = """
.heat{display:grid;grid-template-columns:auto minmax(0,1fr);gap:0 .6rem;margin:.5rem 0 .2rem}
.heat .names{display:flex;flex-direction:column;font:11px/1 var(--mono);color:var(--dim);text-align:right}
.heat .names span{display:flex;align-items:center;justify-content:flex-end}
.heat .names .bad{color:var(--bad);font-weight:700}
.heat svg{width:100%;border:1px solid var(--line);border-radius:4px;background:var(--card);shape-rendering:crispEdges}
.steps{grid-column:2;display:flex;justify-content:space-between;font-size:.8rem;color:var(--dim)}
.c0{fill:var(--mark)}.c1{fill:#fbd9a0}.c2{fill:#f6b25a}.c3{fill:#ea7a32}.c4{fill:#cf3d22}.c5{fill:#8f1414}
.w0{fill:#0d3b78}.w1{fill:#2f66ad}.w2{fill:#6c9ad2}.w3{fill:#b0cbea}.w4{fill:var(--mark)}
.swatch{display:inline-block;width:1.5em;height:.8em;border-radius:3px;margin-right:.4em;vertical-align:-.05em}
.key svg.swatch{display:inline-block}
td.num+td:not(.num){padding-left:.6rem}
@media (max-width:740px){td{grid-template-columns:7.5em minmax(0,1fr)}td.num{text-align:left}
td.num+td:not(.num){padding-left:0}}
"""


def render_paces(paces: RunPaces) -> str:
    """The page: findings, then table and pictures of each attempt, the newest first."""
    title = f"Slow ranks: {headline(paces)}"
    body = "".join(_parts(paces))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{OWN_STYLE}</style></head><body><main>{body}</main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _parts(paces: RunPaces) -> Iterator[str]:
    state = "finished" if paces.has_ended else "running, or its agent died"
    yield f'<div class="top"><span>run <b>{escape(paces.run.root.name)}</b></span><span>{state}</span></div>'
    yield f"<h1>{escape(_capital(headline(paces)))}</h1>"
    slow = paces.slow
    for told in slow[:MOST_FINDINGS]:
        yield _finding(told)
    if len(slow) > MOST_FINDINGS:
        yield f'<p class="dim">and {len(slow) - MOST_FINDINGS} more, in --json</p>'
    if paces.others:
        items = "".join(f"<li>{escape(_capital(t.words))}{_attempt(t)}</li>" for t in paces.others[:MOST_FINDINGS])
        yield f'<h3>Nobody\'s fault</h3><ul class="notes">{items}</ul>'
    for index, attempt in enumerate(reversed(paces.attempts)):
        inner = "".join(_attempt_parts(paces, attempt))
        name = f"Attempt {attempt.attempt}"
        if index == 0:
            yield f"<h2>{name}</h2>{inner}"
        else:
            yield f'<details class="group"><summary>{name}</summary>{inner}</details>'
    if paces.notes:
        yield "<h2>Notes</h2>" + '<ul class="notes">' + "".join(f"<li>{escape(n)}</li>" for n in paces.notes) + "</ul>"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _attempt(told: Told) -> str:
    return f" (attempt {told.attempt})" if told.attempt else ""


def _finding(told: Told) -> str:
    chip = {"now": ("bad", "slow now"), "over": ("wait", "over"), "lasted": ("wait", "to the end")}
    style, word = chip.get(told.state, ("", "end unknown"))
    more = [told.end_words]
    if told.since_unix_s is not None:
        more.append(f"since {clock_time(told.since_unix_s, with_date=True)}")
    if told.attempt:
        more.append(f"attempt {told.attempt}")
    if told.incident is not None:
        more.append(f"incident {told.incident}")
    if told.act:
        more.append(f"acted on: {told.act}")
    return (
        f'<div class="finding"><p><span class="chip {style}">{word}</span> <b>{escape(_capital(told.words))}</b></p>'
        f'<p class="dim">{escape("; ".join(more))}</p></div>'
    )


def _attempt_parts(paces: RunPaces, attempt: AttemptPaces) -> Iterator[str]:
    report = attempt.report
    blame = {r: t for t in reversed(paces.slow) if t.attempt == attempt.attempt for r in t.alarm.ranks}
    kept = f"every {attempt.every}th at least" if attempt.every > 1 else "every one"
    yield f'<p class="lead">{len(report.ranks):,} ranks; {report.steps:,} steps in the journals, which keep {kept}.</p>'
    drawn = picture(report.heat, MOST_ROWS, MOST_COLUMNS)
    folded = (
        " Each row shows the rank of its range that stands out most." if len(drawn.rows) < len(report.ranks) else ""
    )
    yield f'<h3>Own work above that of peers</h3>{_busy(drawn, set(blame))}{_busy_key()}<p class="dim">{folded}</p>'
    if not all(math.isnan(v) for v in drawn.wait_s.flat):
        yield (
            f"<h3>Time waited for others</h3>{_wait(drawn, set(blame))}{_wait_key()}"
            '<p class="dim">Whoever is waited for waits least: a dark row is slow, or does not take part. '
            "Against the rank that waits longest in the same steps.</p>"
        )
    yield f"<h3>Means per rank</h3>{_table(report.ranks, blame)}"


# -- pictures ----------------------------------------------------------------------------------------------------------
def _busy(drawn: Picture, blamed: set[int]) -> str:
    def style(value: float) -> str:
        reached = level(value)
        return "" if reached is None else f"c{reached}"

    return _heat(drawn, drawn.busy, style, share, "own work above that of peers", blamed)


def _wait(drawn: Picture, blamed: set[int]) -> str:
    longest = [max((v for v in column if not math.isnan(v)), default=0.0) for column in drawn.wait_s.T]
    shares = drawn.wait_s.copy()
    for index, most in enumerate(longest):
        shares[:, index] = shares[:, index] / most if most > 0 else math.nan

    def style(value: float) -> str:
        return "" if math.isnan(value) else f"w{min(max(int(value * WAIT_LEVELS), 0), WAIT_LEVELS - 1)}"

    return _heat(drawn, shares, style, lambda v: f"{100 * v:.0f} % of the longest", "time waited", blamed)


def _heat(
    drawn: Picture,
    values: Floats,
    style: Callable[[float], str],
    words: Callable[[float], str],
    label: str,
    blamed: set[int],
) -> str:
    rows = len(drawn.rows)
    height = 22 if rows <= 8 else 14 if rows <= 32 else 11
    cells = []
    for y in range(rows):
        x = 0
        for name, run in groupby(values[y].tolist(), key=style):
            same = list(run)
            if name:
                last = x + len(same) - 1
                end = drawn.first_steps[last + 1] - 1 if last + 1 < len(drawn.first_steps) else drawn.last_step
                middle = sum(same) / len(same)
                title = f"rank {drawn.row_name(y)}, steps {drawn.first_steps[x]} to {end}: {words(middle)}"
                place = f'x="{x}" y="{y}" width="{len(same)}" height="1"'
                cells.append(f'<rect class="{name}" {place}><title>{escape(title)}</title></rect>')
            x += len(same)
    names = "".join(
        f'<span{_bad(first, last, blamed)} style="height:{height}px">{drawn.row_name(i)}</span>'
        for i, (first, last) in enumerate(drawn.rows)
    )
    first_step = drawn.first_steps[0] if drawn.first_steps else 0
    return (
        f'<div class="heat"><div class="names">{names}</div>'
        f'<svg style="height:{height * rows}px" viewBox="0 0 {max(len(drawn.first_steps), 1)} {rows}" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(label)}, ranks by steps">{"".join(cells)}</svg>'
        f'<div class="steps"><span>step {first_step}</span><span>{drawn.last_step}</span></div></div>'
    )


def _bad(first: int, last: int, blamed: set[int]) -> str:
    return ' class="bad"' if any(first <= r <= last for r in blamed) else ""


def _busy_key() -> str:
    words = [f"below {100 * LEVELS[0]:g} %", *(f"from {100 * v:g} %" for v in LEVELS)]
    return _key("c", words)


def _wait_key() -> str:
    step = 100 // WAIT_LEVELS
    return _key("w", [f"{step * i} to {step * (i + 1)} %" for i in range(WAIT_LEVELS)])


def _key(prefix: str, words: Iterable[str]) -> str:
    parts = [
        f'<span><svg class="swatch" viewBox="0 0 1 1" preserveAspectRatio="none"><rect class="{prefix}{i}" width="1" '
        f'height="1"/></svg>{escape(w)}</span>'
        for i, w in enumerate(words)
    ]
    return f'<div class="key">{"".join(parts)}</div>'


# -- table -------------------------------------------------------------------------------------------------------------
def _table(ranks: Sequence[RankPace], blame: dict[int, Told]) -> str:
    kept = rows_shown(ranks, set(blame), MOST_TABLE)
    known = (("busy_s", "busy"), ("wait_s", "wait"), ("starved_s", "starved"), *PHASE_COLUMNS)
    times = [(name, word) for name, word in known if any(r.means[name] > 0 for r in ranks)]
    has_role, has_node = any(r.role for r in ranks), any(r.node for r in ranks)
    heads = ["rank"] + ["node"] * has_node + ["role"] * has_role + ["peers", *(f"{w} ms" for _, w in times), "slow"]
    out = []
    for r in kept:
        told = blame.get(r.rank)
        cells = [("rank", str(r.rank))] + [("node", r.node or "-")] * has_node + [("role", r.role)] * has_role
        cells.append(("peers", share(r.against_peers)))
        cells += [(f"{word} ms", milliseconds(r.means[name])) for name, word in times]
        cells.append(("slow", verdict(told) if told else ""))
        tds = "".join(f'<td data-k="{k}"{_number(k)}>{escape(v)}</td>' for k, v in cells)
        out.append(f'<tr class="bad">{tds}</tr>' if told else f"<tr>{tds}</tr>")
    head = "".join(f"<th{_number(k)}>{k}</th>" for k in heads)
    rest = (
        f'<p class="dim">{len(ranks) - len(kept):,} other ranks are not listed.</p>' if len(kept) < len(ranks) else ""
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(out)}</tbody></table></div>{rest}'


def _number(key: str) -> str:
    return "" if key in ("rank", "node", "role", "slow") else ' class="num"'
