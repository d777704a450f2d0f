"""The picture of ``steadyctl top``: a head, what is wrong, and ranks, of which those that are alike are folded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from statistics import median
from typing import Final

from steadyrun.ctl.console import Column, Console, ago, duration, plain
from steadyrun.ctl.snapshot import is_overdue
from steadyrun.ctl.watching.look import NodeLine, RankLine, TopLook

__all__ = ["SORTS", "View", "render", "select"]

MOST_TROUBLES: Final = 6
FOLDED_ABOVE: Final = 64  # rows, where the output has no height
HOT_C: Final = 85.0
SLOW_SCORE: Final = 1.05
BAD_WEIGHT: Final = 2  # of a concern that is worth a row of its own


_OVER: Final[Mapping[str, str]] = {
    "ended": "The run has ended; steadyctl status shows how, and steadyctl stragglers who was slow.",
    "lost": "No agent of this run lives here, and none wrote that the run ended; steadyctl status shows what is known.",
}


def _age(line: RankLine) -> float:
    return line.look.progress_age_s if line.look.progress_age_s is not None else math.inf


_LOW_FIRST: Final = frozenset({"rank", "step", "clock"})
_KEYS: Final[Mapping[str, Callable[[RankLine], float]]] = {
    "rank": lambda r: r.rank,
    "late": _age,
    "step": lambda r: r.look.step if r.look.step is not None else -1,
    "work": lambda r: r.work_s or 0.0,
    "score": lambda r: r.score or 0.0,
    "temp": lambda r: (r.gpu.temperature_c or 0.0) if r.gpu is not None else 0.0,
    "clock": lambda r: (r.gpu.clock_mhz or math.inf) if r.gpu is not None else math.inf,
    "power": lambda r: (r.gpu.power_w or 0.0) if r.gpu is not None else 0.0,
}
SORTS: Final = tuple(_KEYS)


@dataclass(frozen=True, slots=True)
class View:
    """What a person wants to see.

    Attributes:
        sort: one of ``SORTS``; the worst come first, ranks and steps the lowest.
        nodes: patterns of node names; empty for all.
        ranks: empty for all.
        only_bad: leave out what is as usual.
        fold: False: a row for every rank.
        skip: so many rows are scrolled away.
    """

    sort: str = "rank"
    nodes: tuple[str, ...] = ()
    ranks: frozenset[int] = frozenset()
    only_bad: bool = False
    fold: bool = True
    skip: int = 0


def select(look: TopLook, view: View) -> list[tuple[NodeLine, RankLine]]:
    """The ranks that *view* asks for, in its order, each with its node."""
    found = [
        (node, rank)
        for node in look.nodes
        if not view.nodes or any(fnmatch(node.node, pattern) for pattern in view.nodes)
        for rank in node.ranks
        if (not view.ranks or rank.rank in view.ranks) and (not view.only_bad or rank.weight >= BAD_WEIGHT)
    ]
    key = _KEYS[view.sort]
    sign = 1 if view.sort in _LOW_FIRST else -1
    return sorted(found, key=lambda pair: (sign * key(pair[1]), pair[1].rank))


def render(look: TopLook, view: View, console: Console, now_unix_s: float, height: int | None = None) -> list[str]:
    """Lines that fit the console's width; *height*: so many of them at most, None for any number."""
    lines = _head(look, console, now_unix_s, may_wrap=height is None)
    if look.state != "live":
        return [*lines, "", *console.wrapped(_OVER[look.state])]
    lines += _troubles(look, console)
    lines.append("")
    chosen = select(look, view)
    room = FOLDED_ABOVE if height is None else max(height - len(lines) - 2, 4)
    rows = _rows(chosen, view, room)
    shown = rows[view.skip :]
    more = 0
    if height is not None and len(shown) > room:
        shown, more = shown[:room], len(shown) - room
    if not chosen:
        lines.append(console.styled(_nothing(look, view), "dim"))
        return lines
    lines += _table(shown, look, console, may_wrap=height is None)
    if more:
        lines.append(console.styled(f"{more} more rows", "dim"))
    return lines


def _nothing(look: TopLook, view: View) -> str:
    if not look.ranks:
        return "no rank has been started yet"
    return "every rank is as usual" if view.only_bad else "no rank is like that"


# -- the head ----------------------------------------------------------------------------------------------------------
def _head(look: TopLook, console: Console, now_unix_s: float, may_wrap: bool) -> list[str]:
    run = look.run
    colour = {"live": "green", "ended": "bold"}.get(look.state, "red")
    name = plain(run.run_id)
    parts = [console.styled(look.state, colour)]
    if run.started_at_unix_s is not None and look.state != "lost":
        until = run.ended_at_unix_s if run.ended_at_unix_s is not None else now_unix_s
        parts[0] += f" for {duration(until - run.started_at_unix_s)}"
    parts.append(f"{_many(run.world_size, 'rank')} on {_many(len(look.nodes), 'node')}")
    restarts = _many(run.restarts, "restart")
    if run.restarts and look.restarted_ago_s is not None:
        restarts += f" (last {duration(look.restarted_ago_s)} ago)"
    parts.append(restarts)
    first = console.styled(name if len(name) <= 24 else f"{name[:8]}…", "bold") + "  " + ", ".join(parts)
    incident = _last_incident(look, now_unix_s)
    told = console.wrapped(incident, 2, "") if may_wrap else [console.cut(incident)]
    lines = [console.cut(first), console.cut(_pace(look, console.width))]
    return [*lines, *(console.styled(line, "yellow") for line in told if line)]


def _pace(look: TopLook, width: int) -> str:
    """With the address of the metrics where there is room for it."""
    ranks = look.ranks
    steps = [r.look.step for r in ranks if r.look.step is not None]
    times = [r.look.step_time_s for r in ranks if r.look.step_time_s]
    parts = []
    if steps:
        low, high = min(steps), max(steps)
        parts.append(f"step {low}" if low == high else f"steps {low} to {high}")
    if times:
        parts.append(f"{_short(median(times))} a step")
    parts.append(
        f"checkpoint of step {look.saved[0]}, {duration(look.saved[1])} ago" if look.saved else "no checkpoint yet"
    )
    text = ", ".join(parts)
    metrics = f", metrics {plain(look.metrics[0])}" + (" …" if len(look.metrics) > 1 else "") if look.metrics else ""
    return text + metrics if len(text) + len(metrics) <= width else text


def _last_incident(look: TopLook, now_unix_s: float) -> str:
    if not look.run.incidents:
        return ""
    last = look.run.incidents[-1]
    at = last.get("detected_at_unix_s")
    when = f", {ago(at, now_unix_s)}" if isinstance(at, (int, float)) else ""
    return f"incident {last.get('incident')}{when}: {plain(last.get('class', '?'))}: {plain(last.get('summary', ''))}"


def _troubles(look: TopLook, console: Console) -> list[str]:
    """What is wrong with nodes; equal troubles of several nodes are one line."""
    found: dict[tuple[str, bool], list[str]] = {}
    for node in look.nodes:
        for text, is_bad in node.troubles:
            found.setdefault((text, is_bad), []).append(node.node)
    ordered = sorted(found.items(), key=lambda item: (not item[0][1], -len(item[1])))
    lines = []
    for (text, is_bad), nodes in ordered[:MOST_TROUBLES]:
        who = plain(nodes[0]) if len(nodes) == 1 else f"{len(nodes)} nodes ({plain(nodes[0])} …)"
        lines.append(console.cut(console.styled(f"{who}: {plain(text)}", "red" if is_bad else "yellow")))
    if len(ordered) > MOST_TROUBLES:
        lines.append(console.styled(f"{len(ordered) - MOST_TROUBLES} more (steadyctl check NODE)", "dim"))
    return lines


def _many(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number or 'no'} {noun}s"


# -- folding -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Row:
    """One rank, or several that are alike; ``nodes``: whose they are."""

    ranks: tuple[RankLine, ...]
    nodes: tuple[NodeLine, ...]


def _rows(chosen: Sequence[tuple[NodeLine, RankLine]], view: View, room: int) -> list[_Row]:
    """A row each where they fit or are wanted; else who is worth a look first, and the others by nodes."""
    single = [_Row((rank,), (node,)) for node, rank in chosen]
    if not view.fold or len(single) <= room:
        return single
    if view.sort != "rank":
        rest = _fold(chosen[room // 2 :], room - room // 2)
        return [*single[: room // 2], *rest]
    notable = sorted((r for r in single if r.ranks[0].weight >= BAD_WEIGHT), key=lambda r: -r.ranks[0].weight)
    notable = notable[: room // 2]
    apart = {row.ranks[0].rank for row in notable}
    others = [(node, rank) for node, rank in chosen if rank.rank not in apart]
    return [*sorted(notable, key=lambda r: r.ranks[0].rank), *_fold(others, room - len(notable))]


def _fold(chosen: Sequence[tuple[NodeLine, RankLine]], room: int) -> list[_Row]:
    """At most *room* rows: one per node, or per so many nodes in a row as are needed."""
    by_node: dict[str, tuple[NodeLine, list[RankLine]]] = {}
    for node, rank in chosen:
        by_node.setdefault(node.node, (node, []))[1].append(rank)
    nodes = sorted(by_node.values(), key=lambda pair: min(r.rank for r in pair[1]))
    each = max(math.ceil(len(nodes) / max(room, 1)), 1)
    out = []
    for i in range(0, len(nodes), each):
        some = nodes[i : i + each]
        ranks = sorted((r for _, found in some for r in found), key=lambda r: r.rank)
        out.append(_Row(tuple(ranks), tuple(n for n, _ in some)))
    return out


# -- rows --------------------------------------------------------------------------------------------------------------
def _table(rows: Sequence[_Row], look: TopLook, console: Console, may_wrap: bool) -> list[str]:
    columns = [Column("rank", right=True), Column("step", right=True), Column("ago", right=True)]
    columns += [Column("work", right=True), Column("score", right=True)]
    if look.has_gpus:
        columns += [Column(t, right=True) for t in ("gpu", "°C", "MHz", "W", "xid")]
    columns.append(Column("in", grows=may_wrap))
    cells = [_cells(row, look, console) for row in rows]
    several = len(look.nodes) > 1
    if several:
        columns.insert(1, Column("node"))
        cells = [[c[0], _node_name(row), *c[1:]] for c, row in zip(cells, rows, strict=True)]
    return [console.cut(line) for line in console.table(tuple(columns), cells, 1)]


def _node_name(row: _Row) -> str:
    names = [plain(n.node) for n in row.nodes]
    name = names[0] if len(names[0]) <= 12 else f"{names[0][:5]}…{names[0][-6:]}"
    return name if len(names) == 1 else f"{name} +{len(names) - 1}"


def _cells(row: _Row, look: TopLook, console: Console) -> list[str]:
    ranks = row.ranks
    steps = [r.look.step for r in ranks if r.look.step is not None]
    ages = [r.look.step_age_s for r in ranks if r.look.step_age_s is not None]
    works = [r.work_s for r in ranks if r.work_s is not None]
    scores = [r.score for r in ranks if r.score is not None]
    slow = max((r.slowdown for r in ranks if r.slowdown is not None), default=None)
    cells = [
        _span(r.rank for r in ranks),
        "-" if not steps else _span(steps) if len(ranks) > 1 else str(steps[0]),
        _coloured(duration(max(ages, default=None)), ranks[0].weight if len(ranks) == 1 else 0, console),
        "-" if not works else _short(median(works)),
        _score(max(scores, default=None), slow, console),
    ]
    if look.has_gpus:
        cells += _gpu_cells(ranks, console)
    cells.append(_where(row, console))
    return cells


def _gpu_cells(ranks: Sequence[RankLine], console: Console) -> list[str]:
    gpus = [r.gpu for r in ranks if r.gpu is not None]
    heat = max((g.temperature_c for g in gpus if g.temperature_c is not None), default=None)
    clock = min((g.clock_mhz for g in gpus if g.clock_mhz is not None), default=None)
    powers = [g.power_w for g in gpus if g.power_w is not None]
    xids = sum(g.xids for g in gpus)
    held = any(g.throttled_by for g in gpus)
    return [
        _span(r.gpu_index for r in ranks if r.gpu_index is not None) or "-",
        "-" if heat is None else console.styled(f"{heat:.0f}", "red") if heat >= HOT_C else f"{heat:.0f}",
        "-" if clock is None else console.styled(f"{clock:.0f}", "yellow") if held else f"{clock:.0f}",
        "-" if not powers else f"{median(powers):.0f}",
        console.styled(str(xids), "red") if xids else "-",
    ]


def _coloured(text: str, weight: int, console: Console) -> str:
    return console.styled(text, "red" if weight >= 3 else "yellow") if weight in (1, 3) else text


def _score(score: float | None, slowdown: float | None, console: Console) -> str:
    """The peers' pace is 1; a standing alarm is marked."""
    if score is None:
        return "-" if slowdown is None else console.styled(f"+{slowdown:.0%}!", "red")
    text = f"{score:.2f}"
    if slowdown is not None:
        return console.styled(f"{text}!", "red")
    return console.styled(text, "yellow") if score >= SLOW_SCORE else text


def _where(row: _Row, console: Console) -> str:
    """Sections and what is to be said of one rank; of several the sections that most are in."""
    if len(row.ranks) == 1:
        rank, (node,) = row.ranks[0], row.nodes
        parts = []
        for section in rank.look.sections:
            text = f"{plain(section.name)} {duration(section.age_s)}"
            late = is_overdue(rank.look, section, node.look.limits)
            parts.append(console.styled(text, "red") if late else text)
        text = " > ".join(parts)
        if rank.concern:  # first, as a narrow terminal cuts the end
            text = f"{plain(rank.concern)}; {text}" if text else plain(rank.concern)
        return text or ("elsewhere" if node.where == "elsewhere" else rank.look.phase)
    names = Counter(r.look.sections[-1].name if r.look.sections else r.look.phase for r in row.ranks)
    text = ", ".join(f"{plain(name)} {n}" if len(names) > 1 else plain(name) for name, n in names.most_common(3))
    concerned = sum(r.weight >= BAD_WEIGHT for r in row.ranks)
    return text + (console.styled(f"; {concerned} to look at", "yellow") if concerned else "")


def _span(numbers: Iterable[int]) -> str:
    """``0-7``, the lowest and the highest; empty for none."""
    found = sorted(set(numbers))
    return "" if not found else str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _short(seconds: float) -> str:
    """``1.2ms``, ``48ms``, ``2.5s``."""
    if seconds >= 0.995:
        return duration(seconds)
    return f"{seconds * 1e3:.0f}ms" if seconds >= 0.00995 else f"{seconds * 1e3:.1f}ms"
