"""The chain of waits and the lanes over time, as SVG inside the page; colours come from the page's style sheet."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from steadyrun.core.records import RankEvidence
from steadyrun.detect.waits.records import WaitReason
from steadyrun.postmortem.case import Report
from steadyrun.postmortem.chain import Chain
from steadyrun.postmortem.lanes import Axis, Bar, Lane, LaneChart
from steadyrun.postmortem.words import (
    REASON_WORDS,
    age_words,
    clock_words,
    end_of,
    home_words,
    listed_ranks,
    op_words,
    rank_words,
    short_ranks,
)

__all__ = ["draw_axis", "draw_chain", "draw_lane", "escape"]


_UNSHOWN: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escape(text: object) -> str:
    """*text* for HTML, attributes too; what no browser shows and UTF-8 cannot hold becomes U+FFFD."""
    return html.escape(_UNSHOWN.sub("\ufffd", str(text)))


# -- the chain of waits ------------------------------------------------------------------------------------------------
_WIDE: Final = 1080.0
_NARROW: Final = 348.0
_COLUMNS: Final = 4
_LAYERS: Final = 12
_BOXES: Final = 60
_LINE: Final = 18.0
_PAD: Final = 11.0
_CHAR: Final = 6.7  # of the page's fonts at 13 px, measured wide rather than narrow


@dataclass(frozen=True, slots=True)
class _Line:
    style: str
    text: str


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    w: float
    h: float
    place: int | None  # None: stands for places that were left out
    lines: tuple[_Line, ...]
    style: str
    title: str = ""

    @property
    def middle(self) -> float:
        return self.x + self.w / 2


def draw_chain(report: Report, chain: Chain, number: int | None, is_wide: bool) -> str:
    """One SVG: the root cause *number* (None: waits that lead to no root cause) and everybody who waits for it.

    Wide: layers from the root cause at the top down. Narrow (348 units): an indented list with rails.
    """
    indices = chain.of_finding(number)
    if not indices:
        return ""
    ring = next((order for n, order in chain.rings if n == number), ())
    painter = _Painter(report, chain, indices, ring)
    fits = all(len(layer) <= 1 for layer in painter.layers) and not ring
    boxes, arrows, width = (
        painter.layers_down(fits) if is_wide and len(ring) <= _COLUMNS else painter.list_down(is_wide)
    )
    height = max(b.y + b.h for b in boxes) + 4
    label = escape(_chain_label(report, chain, number))
    body = "".join(arrows) + "".join(map(_box_svg, boxes))
    return (
        f'<svg class="chain" viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img" '
        f'aria-label="{label}">{body}</svg>'
    )


def _chain_label(report: Report, chain: Chain, number: int | None) -> str:
    waiting = sum(len(chain.places[i].ranks) for i in chain.of_finding(number) if chain.places[i].depth)
    cause = report.findings[number].summary if number is not None else "no root cause"
    return f"{cause}; {waiting} ranks wait behind"


class _Painter:
    def __init__(self, report: Report, chain: Chain, indices: Sequence[int], ring: Sequence[int]) -> None:
        self._report, self._chain, self._ring = report, chain, tuple(ring)
        self._by_rank: Mapping[int, RankEvidence] = {r.rank: r for r in report.case.evidence.ranks}
        self._end = end_of(report)
        self._indices = tuple(indices)
        self.layers: list[list[int]] = []
        for i in indices:
            depth = chain.places[i].depth
            while len(self.layers) <= depth:
                self.layers.append([])
            self.layers[depth].append(i)

    # -- wide
    def layers_down(self, is_single_file: bool) -> tuple[list[_Box], list[str], float]:
        """Layer by layer, at most four boxes in each; the rest of a layer in one box."""
        width = 460.0 if is_single_file else _WIDE
        boxes: list[_Box] = []
        arrows: list[str] = []
        at: dict[int, _Box] = {}
        y = 34.0 if self._ring else 2.0
        for depth, layer in enumerate(self.layers):
            if depth >= _LAYERS:
                rest = [i for later in self.layers[depth:] for i in later]
                boxes.append(self._rest_box((width - 300) / 2, y - 20, 300, rest, "further behind"))
                break
            shown, rest = self._cut(layer, depth, at)
            count = len(shown) + bool(rest)
            gap = 120.0 if self._ring and depth == 0 else 24.0
            w = min((width - gap * (count - 1)) / count, 400.0 if count == 1 else 300.0)
            x = (width - (w * count + gap * (count - 1))) / 2
            lines = {i: self._lines(i) for i in shown}
            h = 2 * _PAD + _LINE * max(map(len, lines.values()), default=1) - 4
            for i in shown:
                box = _Box(x, y, w, h, i, lines[i], self._style(i), self._title(i))
                boxes.append(box)
                at[i] = box
                place = self._chain.places[i]
                above = {at[p].x: at[p] for p in (place.parent, *place.also) if depth and p is not None and p in at}
                arrows += [_arrow_up(box, parent) for parent in above.values()]
                x += w + gap
            if rest:
                box = self._rest_box(x, y, w, rest, "more")
                boxes.append(box)
                at |= dict.fromkeys(rest, box)
                x += w + gap
            if self._ring and depth == 0:
                arrows += _ring_across([at[i] for i in shown if i in at])
            y += h + 46
        return boxes, arrows, width

    def _cut(self, layer: Sequence[int], depth: int, at: Mapping[int, _Box]) -> tuple[list[int], list[int]]:
        places = self._chain.places
        order = list(self._ring) if depth == 0 and self._ring else list(layer)
        shown, rest = (order, []) if len(order) <= _COLUMNS else (order[: _COLUMNS - 1], order[_COLUMNS - 1 :])
        if depth:
            shown.sort(key=lambda i: (at[p].x if (p := places[i].parent) is not None and p in at else 0.0, i))
        return shown, rest

    # -- narrow
    def list_down(self, is_wide: bool) -> tuple[list[_Box], list[str], float]:
        """One box under the other, who waits indented below whom; a ring's arrow goes back along the right side."""
        width = 560.0 if is_wide else _NARROW
        children: dict[int | None, list[int]] = {}
        for i in self._indices:
            children.setdefault(self._chain.places[i].parent, []).append(i)
        boxes: list[_Box] = []
        arrows: list[str] = []
        at: dict[int, _Box] = {}
        y = 2.0
        left = 10.0 + 7 * len(self._ring) if self._ring else 2.0
        right = 26.0 if len(self._ring) > 1 else 2.0
        roots = list(self._ring) or self.layers[0]
        todo = [(i, 0) for i in reversed(roots)]
        waiting: list[tuple[int, int]] = []
        while (todo or waiting) and len(boxes) < _BOXES:
            if not todo:
                todo, waiting = waiting, []
            i, level = todo.pop()
            x = left + min(level, 6) * 16
            lines = self._lines(i)
            box = _Box(
                x, y, width - x - right, 2 * _PAD + _LINE * len(lines) - 4, i, lines, self._style(i), self._title(i)
            )
            y += box.h + (34 if i in self._ring and i != self._ring[-1] else 14)
            boxes.append(box)
            at[i] = box
            parent = self._chain.places[i].parent
            if level and parent is not None and parent in at:
                rail = 6.0 + 7 * self._ring.index(parent) if parent in self._ring else at[parent].x + 8
                arrows.append(_rail_up(box, at[parent], rail, parent in self._ring))
            below = [(c, level + 1) for c in reversed(children.get(i, []))]
            if self._ring and level == 0:
                waiting = below + waiting
            else:
                todo += below
        left_out = [i for i in self._indices if i not in at]
        if left_out:
            boxes.append(self._rest_box(left, y, width - left - right, left_out, "more"))
        if len(self._ring) > 1:
            arrows += _ring_down([at[i] for i in self._ring if i in at], width - 8)
        return boxes, arrows, width

    # -- words
    def _lines(self, index: int) -> tuple[_Line, ...]:
        place = self._chain.places[index]
        lines = []
        if place.depth == 0 and place.finding is not None:
            lines.append(_Line("cls", self._report.findings[place.finding].cls.value.replace("_", " ")))
        head = short_ranks(place.ranks) if len(place.ranks) < 3 else f"{len(place.ranks)} ranks wait"
        if len(place.ranks) >= 3 and place.depth == 0:
            head = short_ranks(place.ranks)
        lines.append(_Line("who", head))
        home = home_words(place.ranks, self._by_rank)
        under = [listed_ranks(place.ranks)] if head.endswith(" wait") else []
        if home:
            under.append(home)
        if under:
            lines.append(_Line("dim", " · ".join(under)))
        if place.op:
            lines.append(_Line("op", f"in {op_words(place.op, place.seqs)}" if place.seqs else f"in {place.op}"))
            if place.desc:
                more = f", {place.groups} groups" if place.groups > 1 else ""
                lines.append(_Line("dim", f"of {place.desc}{more}"))
        elif place.doing:
            lines.append(_Line("op", place.doing))
        if place.site:
            lines.append(_Line("code", place.site))
        since = clock_words(place.since_unix_s)
        if since:
            age = self._end.age_words(place.since_unix_s) if self._end is not None else ""
            if place.op:
                lines.append(_Line("dim", f"since {since}" + (f", for {age}" if age else "")))
            else:
                lines.append(_Line("dim", f"last call {since}" + (f", {age} ago" if age else "")))
        if reason := self._reason(index):
            lines.append(_Line("why", f"↑ {reason}"))
        return tuple(lines)

    def _reason(self, index: int) -> str:
        place = self._chain.places[index]
        if place.reason is None:
            return ""
        words = REASON_WORDS[place.reason]
        above = self._chain.places[place.parent] if place.parent is not None else None
        is_one = above is not None and len(above.ranks) == 1 and place.reason is not WaitReason.IN_FLIGHT
        is_one = is_one and not place.also
        return f"rank {above.ranks[0]} {words}" if above is not None and is_one else words

    def _title(self, index: int) -> str:
        place = self._chain.places[index]
        return "\n".join([rank_words(place.ranks), *(line.text for line in self._lines(index)[1:])])

    def _style(self, index: int) -> str:
        place = self._chain.places[index]
        return "bad" if place.depth == 0 and place.finding is not None else "wait"

    def _rest_box(self, x: float, y: float, w: float, rest: Sequence[int], word: str) -> _Box:
        ranks = sum(len(self._chain.places[i].ranks) for i in rest)
        text = f"{ranks} ranks at {len(rest)} places {word}" if len(rest) > 1 else f"{ranks} ranks {word}"
        return _Box(x, y, w, 2 * _PAD + _LINE - 4, None, (_Line("dim", text),), "rest")


def _box_svg(box: _Box) -> str:
    room = int((box.w - 2 * _PAD) / _CHAR)
    parts = [f'<g class="box {box.style}">']
    if box.title:
        parts.append(f"<title>{escape(box.title)}</title>")
    parts.append(f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.w:.1f}" height="{box.h:.1f}" rx="7"/>')
    y = box.y + _PAD + 11
    for line in box.lines:
        fit = int(room * 0.9) if line.style == "code" else room
        parts.append(
            f'<text class="{line.style}" x="{box.x + _PAD:.1f}" y="{y:.1f}">{escape(_shorten(line, fit))}</text>'
        )
        y += _LINE
    return "".join(parts) + "</g>"


def _shorten(line: _Line, room: int) -> str:
    if len(line.text) <= room:
        return line.text
    if line.style == "code":  # the end of a path tells more than its beginning
        place = line.text.partition(" in ")[0]
        if len(place) <= room:
            return place
        return "…" + line.text[-(room - 1) :]
    return line.text[: room - 1] + "…"


def _arrow_up(box: _Box, parent: _Box) -> str:
    top, bottom = box.y, parent.y + parent.h + 1
    # Several arrows on one parent end side by side, in the order of where they come from.
    lean = max(-0.38, min(0.38, (box.middle - parent.middle) / (parent.w * 2.4)))
    end = parent.middle + parent.w * lean
    half = (top - bottom) * 0.55
    path = (
        f"M{box.middle:.1f} {top:.1f}"
        f"C{box.middle:.1f} {top - half:.1f} {end:.1f} {bottom + half:.1f} {end:.1f} {bottom + 7:.1f}"
    )
    return f'<path class="edge" d="{path}"/>{_head(end, bottom, "up")}'


def _rail_up(box: _Box, parent: _Box, rail: float, into_side: bool) -> str:
    middle = box.y + box.h / 2
    if into_side:
        end = parent.y + parent.h / 2
        path = f"M{box.x:.1f} {middle:.1f}H{rail:.1f}V{end:.1f}H{parent.x - 7:.1f}"
        return f'<path class="edge" d="{path}"/>{_head(parent.x, end, "right")}'
    bottom = parent.y + parent.h + 1
    return f'<path class="edge" d="M{box.x:.1f} {middle:.1f}H{rail:.1f}V{bottom + 6:.1f}"/>{_head(rail, bottom, "up")}'


def _ring_across(boxes: Sequence[_Box]) -> list[str]:
    parts = []
    for one, two in pairwise(boxes):
        y = one.y + one.h / 2
        start, end = one.x + one.w, two.x
        parts.append(
            f'<path class="edge ring" d="M{start:.1f} {y:.1f}H{end - 7:.1f}"/>{_head(end, y, "right", "ring")}'
        )
        parts.append(f'<text class="why mid" x="{(start + end) / 2:.1f}" y="{y - 8:.1f}">waits for</text>')
    if len(boxes) > 1:
        first, last = boxes[0], boxes[-1]
        y = first.y - 26
        path = (
            f"M{last.middle:.1f} {last.y:.1f}V{y + 8:.1f}q0 -8 -8 -8H{first.middle + 8:.1f}q-8 0 -8 8V{first.y - 8:.1f}"
        )
        parts.append(f'<path class="edge ring" d="{path}"/>{_head(first.middle, first.y - 1, "down", "ring")}')
        middle = (first.middle + last.middle) / 2
        parts.append(f'<text class="why mid" x="{middle:.1f}" y="{y - 6 + 20:.1f}">waits for</text>')
    return parts


def _ring_down(boxes: Sequence[_Box], rail: float) -> list[str]:
    parts = []
    for one, two in pairwise(boxes):
        x = one.middle
        path = f"M{x:.1f} {one.y + one.h:.1f}V{two.y - 8:.1f}"
        parts.append(f'<path class="edge ring" d="{path}"/>{_head(x, two.y - 1, "down", "ring")}')
        parts.append(f'<text class="why" x="{x + 10:.1f}" y="{one.y + one.h + 21:.1f}">waits for</text>')
    first, last = boxes[0], boxes[-1]
    low, high = last.y + last.h / 2, first.y + first.h / 2
    end = first.x + first.w + 1
    path = f"M{last.x + last.w:.1f} {low:.1f}H{rail - 6:.1f}q6 0 6 -6V{high + 6:.1f}q0 -6 -6 -6H{end + 6:.1f}"
    parts.append(f'<path class="edge ring" d="{path}"/>{_head(end, high, "left", "ring")}')
    return parts


def _head(x: float, y: float, way: str, style: str = "") -> str:
    points = {
        "up": f"{x:.1f},{y:.1f} {x - 5:.1f},{y + 9:.1f} {x + 5:.1f},{y + 9:.1f}",
        "down": f"{x:.1f},{y:.1f} {x - 5:.1f},{y - 9:.1f} {x + 5:.1f},{y - 9:.1f}",
        "right": f"{x:.1f},{y:.1f} {x - 9:.1f},{y - 5:.1f} {x - 9:.1f},{y + 5:.1f}",
        "left": f"{x:.1f},{y:.1f} {x + 9:.1f},{y - 5:.1f} {x + 9:.1f},{y + 5:.1f}",
    }[way]
    return f'<polygon class="tip {style}" points="{points}"/>'


# -- lanes -------------------------------------------------------------------------------------------------------------
_ROW: Final = 20.0
_STRIP: Final = 15.0  # height of a section's bar
_TICKS: Final = 10.0
_CHAR_OF_BAR: Final = 6.2


def draw_axis(chart: LaneChart) -> str:
    """The scale above the lanes: times at the left edge, the knee or the middle, and the end."""
    axis = chart.axis
    if axis is None:
        return ""
    span = (axis.knee_s or axis.right_s) - axis.left_s
    digits = 3 if span < 2 else 1 if span < 30 else 0
    middle = axis.knee_s if axis.knee_s is not None else (axis.left_s + axis.right_s) / 2
    texts = []
    for at_s, anchor in ((axis.left_s, "start"), (middle, "middle"), (axis.right_s, "end")):
        words, below = clock_words(at_s, digits), f"{age_words(axis.right_s - at_s)} before"
        if anchor == "end":
            words, below = (words, "evidence taken") if chart.is_taken else ("", "until when is not known")
        elif not chart.is_taken:
            below = "newest record" if anchor == "middle" else f"{age_words(middle - at_s)} before"
        x = axis.at(at_s)
        texts.append(f'<text x="{x:.2f}%" y="12" text-anchor="{anchor}">{words}</text>')
        texts.append(f'<text class="dim" x="{x:.2f}%" y="26" text-anchor="{anchor}">{below}</text>')
    return f'<svg class="axis" width="100%" height="32">{"".join(texts)}</svg>'


def draw_lane(lane: Lane, axis: Axis) -> str:
    """The track of one lane; its width follows the page, its texts keep their size."""
    calls = [b for b in lane.bars if b.kind != "section"]
    sections = [b for b in lane.bars if b.kind == "section"]
    height = _TICKS + _ROW * len(calls) + _STRIP * len(sections) + 4
    parts = []
    if axis.knee_s is not None:
        x = axis.at(axis.knee_s)
        parts.append(f'<rect class="quiet" x="{x:.2f}%" y="0" width="{100 - x:.2f}%" height="{height:.0f}"/>')
    shown = (t for t in lane.ticks if axis.left_s <= t.at_s <= axis.right_s)
    parts += [_tick_svg(t.kind, axis.at(t.at_s), t.title, height) for t in shown]
    y = _TICKS
    for bar in calls:
        parts.append(_bar_svg(bar, axis, y, _ROW - 4))
        y += _ROW
    for bar in sections:
        parts.append(_bar_svg(bar, axis, y, _STRIP - 3))
        y += _STRIP
    return f'<svg class="track" width="100%" height="{height:.0f}">{"".join(parts)}</svg>'


def _tick_svg(kind: str, x: float, title: str, height: float) -> str:
    tall = height if kind == "fault" else _TICKS - 1
    return (
        f'<g class="tick {kind}"><title>{escape(title)}</title>'
        f'<line x1="{x:.2f}%" x2="{x:.2f}%" y1="1" y2="{tall:.0f}"/></g>'
    )


def _bar_svg(bar: Bar, axis: Axis, y: float, height: float) -> str:
    x = axis.at(bar.start_s)
    title = f"<title>{escape(bar.title)}</title>" if bar.title else ""
    rect = f'<rect x="{x:.2f}%" y="{y:.0f}" width="{max(100 - x, 0.3):.2f}%" height="{height:.0f}" rx="3"/>'
    base = y + height / 2 + 4
    if x > 58:  # no room inside: the words stand before the bar
        text = f'<text x="{x:.2f}%" dx="-6" y="{base:.0f}" text-anchor="end" class="out">{escape(bar.label)}</text>'
    else:
        text = f'<text x="{x:.2f}%" dx="6" y="{base:.0f}">{escape(bar.label)}</text>'
    return f'<g class="bar {bar.kind}">{title}{rect}{text}</g>'


def draw_arrivals(lane: Lane, axis: Axis) -> str:
    """When each rank of the lane called its head operation, one line per rank; empty where all did about at once."""
    if not lane.starts_s or len(lane.starts_s) < 3 or max(lane.starts_s) - min(lane.starts_s) < 5e-4:
        return ""
    count = len(lane.starts_s)
    path = "".join(f"M{axis.at(t):.2f} {i + 0.5:g}H100" for i, t in enumerate(_thin(lane.starts_s)))
    rows = min(count, 512)
    height = min(max(rows * 6, 24), 260)
    return (
        f'<svg class="arrivals" width="100%" height="{height}" viewBox="0 0 100 {rows}" preserveAspectRatio="none" '
        f'role="img" aria-label="start of each rank"><path d="{path}"/></svg>'
    )


def _thin(starts: Sequence[float]) -> Iterable[float]:
    if len(starts) <= 512:
        return starts
    return [starts[i * len(starts) // 512] for i in range(512)]
