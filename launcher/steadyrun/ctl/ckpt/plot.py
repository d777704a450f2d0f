"""The picture of ``steadyctl ckpt interval``: overhead over the interval, as a self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from steadyrun.checkpoint.interval import Overhead, Recommendation, interval_words, mtbf_words, overhead_at

__all__ = ["interval_svg"]

WIDTH: Final = 760
HEIGHT: Final = 440
LEFT, RIGHT, TOP, BOTTOM = 64, 130, 64, 56
SPAN: Final = 6.0  # the picture reaches from a sixth of the interval to six times it
POINTS: Final = 96
# Okabe and Ito's palette: distinct also with the common kinds of colour blindness.
TOTAL, SAVING, REDONE, RESTART, INK, GRID = "#000000", "#0072b2", "#d55e00", "#009e73", "#333333", "#dddddd"
TICKS_S: Final[Sequence[float]] = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
    *(h * 3600.0 for h in (1, 2, 5, 10)),
    *(d * 86400.0 for d in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)),
)


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where a value lies in the picture: the interval logarithmic, the overhead from 0 to ``top_ratio``."""

    low_s: float
    high_s: float
    top_ratio: float

    def x(self, interval_s: float) -> float:
        share = math.log(interval_s / self.low_s) / math.log(self.high_s / self.low_s)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, ratio: float) -> float:
        return HEIGHT - BOTTOM - ratio / self.top_ratio * (HEIGHT - TOP - BOTTOM)


def interval_svg(best: Recommendation) -> str:
    """A whole SVG document: no script, no font, no link."""
    costs = best.costs
    low_s = max(best.interval_s / SPAN, costs.persist_s)
    high_s = best.interval_s * SPAN
    values = [low_s * (high_s / low_s) ** (i / (POINTS - 1)) for i in range(POINTS)]
    overheads = [overhead_at(costs, max(value, low_s)) for value in values]
    axes = _Axes(low_s, high_s, max(o.total_ratio for o in overheads) * 1.05)
    title = f"Save every {interval_words(best.interval_s)}: overhead {100 * best.overhead.total_ratio:.1f} %"
    about = f"stall {costs.stall_s:g} s, MTBF {mtbf_words(costs.mtbf_s)}"
    about += "".join(
        f", {name} {value:g} s"
        for name, value in (("persist", costs.persist_s), ("restart", costs.restart_s), ("detection", costs.detect_s))
        if value
    )
    parts: list[tuple[str, str, float, Callable[[Overhead], float]]] = [
        ("total", TOTAL, 2.5, lambda o: o.total_ratio),
        ("saving", SAVING, 1.5, lambda o: o.saving_ratio),
        ("work done again", REDONE, 1.5, lambda o: o.redone_ratio),
    ]
    if best.overhead.restart_ratio:
        parts.append(("restarts", RESTART, 1.5, lambda o: o.restart_ratio))
    ends = [axes.y(share(overheads[-1])) for _, _, _, share in parts]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 26, title, size=16),
        _text(LEFT, 44, about),
        *_grid(axes),
    ]
    for (name, colour, width, share), label_y in zip(parts, _apart(ends), strict=True):
        points = " ".join(f"{axes.x(v):.1f},{axes.y(share(o)):.1f}" for v, o in zip(values, overheads, strict=True))
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{points}"/>')
        lines.append(_text(WIDTH - RIGHT + 8, label_y + 4, name, colour))
    lines += _marks(best, axes)
    return "\n".join([*lines, "</svg>", ""])


def _grid(axes: _Axes) -> list[str]:
    """Axes with their ticks and names."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    lines = []
    step = next(s for s in _steps() if axes.top_ratio / s <= 8)
    for i in range(math.floor(axes.top_ratio / step) + 1):
        y = axes.y(i * step)
        lines.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{GRID}"/>')
        lines.append(_text(LEFT - 8, y + 4, f"{100 * i * step:g} %", anchor="end"))
    for tick in (t for t in TICKS_S if axes.low_s <= t <= axes.high_s):
        x = axes.x(tick)
        lines.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="{GRID}"/>')
        lines.append(_text(x, bottom + 18, _tick_words(tick), anchor="middle"))
    lines.append(_text((LEFT + right) / 2, bottom + 40, "interval between saves", anchor="middle"))
    lines.append(
        f'<text x="16" y="{(TOP + bottom) / 2}" fill="{INK}" text-anchor="middle" '
        f'transform="rotate(-90 16 {(TOP + bottom) / 2})">share of the time</text>'
    )
    return lines


def _marks(best: Recommendation, axes: _Axes) -> list[str]:
    """The recommended interval, dots at both optima, and their names where the curve leaves room: up in its hollow."""
    x, bottom = axes.x(best.interval_s), HEIGHT - BOTTOM
    lines = [f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="{INK}" stroke-dasharray="4 3"/>']
    label_y = TOP + 16
    for name, at_s in (("Young", best.young_s), ("Daly", best.daly_s)):
        if at_s < axes.low_s:
            continue
        fill = TOTAL if at_s == best.interval_s else "#ffffff"
        y = axes.y(overhead_at(best.costs, at_s).total_ratio)
        for cx, cy in ((axes.x(at_s), y), (x + 14, label_y - 4)):
            lines.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{fill}" stroke="{TOTAL}"/>')
        lines.append(_text(x + 24, label_y, f"{name} {interval_words(at_s)}"))
        label_y += 18
    if best.is_bound:
        lines.append(_text(x + 10, label_y, "lower bound: durable no sooner"))
    return lines


def _apart(ends: Sequence[float], gap: float = 15.0) -> list[float]:
    """The heights of labels, moved up until none covers another."""
    placed: list[tuple[float, int]] = []
    for y, index in sorted(((y, i) for i, y in enumerate(ends)), reverse=True):
        placed.append((min(y, placed[-1][0] - gap) if placed else y, index))
    return [y for y, _ in sorted(placed, key=lambda p: p[1])]


def _steps() -> list[float]:
    return [m * 10.0**e for e in range(-6, 9) for m in (1, 2, 5)]


def _tick_words(seconds: float) -> str:
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:g} {unit}"
    return f"{seconds:g} s"


def _text(x: float, y: float, text: str, colour: str = INK, size: int = 12, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
    )
