"""A picture of how long sections took, with the limits: one panel per section, durations on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from steadyrun.ctl.calibration.weighing import Section, Weight
from steadyrun.ctl.console import duration
from steadyrun.detect.calibrate.histogram import BUCKETS_PER_OCTAVE

__all__ = ["limits_svg"]

WIDTH: Final = 960
LEFT, RIGHT = 56.0, 24.0
TOP: Final = 88.0
BARS: Final = 120.0
PANEL: Final = 218.0
MERGED: Final = 2  # of the statistics' buckets to one bar
LABEL_PX: Final = 6.6  # of a letter
ROWS: Final = 4  # of labels
TICKS_S: Final = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36000.0, 864000.0)

STYLE: Final = """\
svg{--paper:#fff;--ink:#1f2328;--soft:#59636e;--rule:#d1d9e0;--bar:#7aa7d9;--first:#9a6700;--look:#1a7f37;--act:#0a3069;
--other:#8250df;background:var(--paper);font:12px system-ui,sans-serif}
@media(prefers-color-scheme:dark){svg{--paper:#0d1117;--ink:#e6edf3;--soft:#9198a1;--rule:#3d444d;--bar:#388bfd;
--first:#d29922;--look:#3fb950;--act:#a5d6ff;--other:#bc8cff}}
text{fill:var(--ink)}.t{font-size:18px;font-weight:600}.h{font-size:14px;font-weight:600}.n{fill:var(--soft)}
.bar{fill:var(--bar)}.axis{stroke:var(--rule)}.grid{stroke:var(--rule);stroke-dasharray:2 4}
.first{stroke:var(--first)}.look{stroke:var(--look)}.act{stroke:var(--act)}.other{stroke:var(--other)}
line.look,line.act{stroke-width:2}line.other{stroke-dasharray:5 4}
text.on{stroke:var(--paper);stroke-width:4;paint-order:stroke}
text.first{fill:var(--first)}text.look{fill:var(--look)}text.act{fill:var(--act)}text.other{fill:var(--other)}
"""


def limits_svg(title: str, sections: Sequence[Section], weights: Mapping[str, Sequence[Weight]]) -> str:
    """One SVG that needs nothing else; light and dark."""
    low_s, high_s = _range(sections, weights)
    axis = _Axis(low_s, high_s)
    height = TOP + PANEL * len(sections) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<text class="t" x="{LEFT}" y="34">How long sections took, and their limits</text>',
        f'<text class="n" x="{LEFT}" y="54">{escape(title)}</text>',
        f'<text class="n" x="{LEFT}" y="71">bars: passes of the job, logarithmic; ticks below: first passes after a '
        "start; soft limit: look for evidence; hard limit: act</text>",
    ]
    for i, section in enumerate(sections):
        parts += _panel(section, weights.get(section.name, ()), axis, TOP + PANEL * i)
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axis:
    """Seconds to pixels."""

    def __init__(self, low_s: float, high_s: float) -> None:
        self._low, self._high = math.log10(low_s), math.log10(high_s)

    def x(self, seconds: float) -> float:
        at = (math.log10(max(seconds, 1e-9)) - self._low) / (self._high - self._low)
        return LEFT + min(max(at, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> list[float]:
        return [t for t in TICKS_S if 10**self._low <= t <= 10**self._high]


def _range(sections: Sequence[Section], weights: Mapping[str, Sequence[Weight]]) -> tuple[float, float]:
    shown = [s.limit.hard_s for s in sections] + [s.limit.soft_s for s in sections]
    for section in sections:
        for durations in (section.statistics.durations, section.statistics.first):
            shown += [edge for low, high, _ in durations.histogram.buckets() for edge in (low, high)]
        shown += [w.candidate.hard_s for w in weights.get(section.name, ()) if math.isfinite(w.candidate.hard_s)]
    above = [s for s in shown if s > 0] or [1.0]
    return min(above) / 1.3, max(above) * 1.6


def _panel(section: Section, weights: Sequence[Weight], axis: _Axis, top: float) -> list[str]:
    base = top + 60 + BARS
    s = section.statistics
    told = f"{s.durations.events:,} passes" if s.n else "no pass but first ones"
    if s.n:
        told += f", median {duration(s.durations.median_s)}, longest {duration(s.durations.max_s)}"
    if section.has_too_few:
        told += f"; too few: {section.costs.min_events:,} are needed, so the cap is the limit"
    parts = [
        f'<g><text class="h" x="{LEFT}" y="{top + 16:.1f}">{escape(section.name)}</text>',
        f'<text class="n" x="{LEFT + 9 * len(section.name) + 14:.1f}" y="{top + 16:.1f}">{escape(told)}</text>',
    ]
    for at_s in axis.ticks():
        x = axis.x(at_s)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{top + 60:.1f}" x2="{x:.1f}" y2="{base:.1f}"/>')
        parts.append(f'<text class="n" x="{x:.1f}" y="{base + 24:.1f}" text-anchor="middle">{_tick(at_s)}</text>')
    parts += _bars(section, axis, base)
    for low_s, high_s, _ in s.first.histogram.buckets():
        x = axis.x(math.sqrt(low_s * high_s))
        parts.append(f'<line class="first" x1="{x:.1f}" y1="{base:.1f}" x2="{x:.1f}" y2="{base + 9:.1f}"/>')
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{base:.1f}" x2="{WIDTH - RIGHT}" y2="{base:.1f}"/>')
    return [*parts, *_lines(section, weights, axis, top + 28, base), "</g>"]


def _bars(section: Section, axis: _Axis, base: float) -> list[str]:
    """Heights by the logarithm of the count, so that one slow pass among a million is seen."""
    bars: dict[int, float] = {}
    for low_s, high_s, weight in section.statistics.durations.histogram.buckets():
        place = math.floor(math.log2(math.sqrt(low_s * high_s)) * BUCKETS_PER_OCTAVE / MERGED)
        bars[place] = bars.get(place, 0.0) + weight
    most = max(bars.values(), default=1.0)
    full = math.log1p(max(most, 9.0))
    parts = []
    for place, count in bars.items():
        start_s = 2 ** (place * MERGED / BUCKETS_PER_OCTAVE)
        x, end = axis.x(start_s), axis.x(start_s * 2 ** (MERGED / BUCKETS_PER_OCTAVE))
        high = max(3.0, BARS * 0.86 * math.log1p(count) / full)
        tip = f"from {duration(start_s)}: {count:.0f}"
        parts.append(
            f'<rect class="bar" x="{x:.1f}" y="{base - high:.1f}" width="{max(end - x - 0.6, 1.2):.1f}" '
            f'height="{high:.1f}"><title>{escape(tip)}</title></rect>'
        )
    if bars:
        x = LEFT - 8
        parts.append(f'<text class="n" x="{x}" y="{base - BARS * 0.86 + 4:.1f}" text-anchor="end">{most:,.0f}</text>')
    return parts


def _lines(section: Section, weights: Sequence[Weight], axis: _Axis, top: float, base: float) -> list[str]:
    """Every limit as a line with its name above; names that would overlap are put into another row."""
    marks = [("act", section.limit.hard_s, "hard" if section.limit.soft_s < section.limit.hard_s else "limit")]
    if section.limit.soft_s < section.limit.hard_s:
        marks.append(("look", section.limit.soft_s, "soft"))
    for weight in weights[1:]:
        candidate = weight.candidate
        if math.isfinite(candidate.hard_s):
            marks.append(("other", candidate.hard_s, candidate.name))
    same: dict[tuple[str, float], list[str]] = {}
    for kind, seconds, name in marks:
        same.setdefault((kind, round(seconds, 3)), []).append(name)
    rows = [-math.inf] * ROWS  # where each ends
    lines, labels = [], []
    for (kind, seconds), names in sorted(same.items(), key=lambda item: item[0][1]):
        x = axis.x(seconds)
        label = f"{' = '.join(names)} {duration(seconds)}"
        half = LABEL_PX * len(label) / 2
        middle = min(max(x, LEFT + half), WIDTH - RIGHT - half)
        row = next((i for i, end in enumerate(rows) if middle - half > end + 4), ROWS - 1)
        rows[row] = middle + half
        y = top + 12 * row
        lines.append(f'<line class="{kind}" x1="{x:.1f}" y1="{y + 4:.1f}" x2="{x:.1f}" y2="{base:.1f}"/>')
        labels.append(
            f'<text class="{kind} on" x="{middle:.1f}" y="{y:.1f}" text-anchor="middle">{escape(label)}</text>'
        )
    return [*lines, *labels]


def _tick(seconds: float) -> str:
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"), (1e-3, "ms")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:g}{unit}"
    return f"{seconds * 1e6:g}µs"
