"""The paces of a run for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from steadyrun.ctl.console import Column, Console, clock_time, plain
from steadyrun.ctl.paces.folding import LEVELS, Picture, level, picture
from steadyrun.ctl.paces.reading import AttemptPaces, RunPaces, Told
from steadyrun.detect.straggler import RankPace

__all__ = ["PHASE_COLUMNS", "headline", "milliseconds", "rows_shown", "share", "tell"]

INKS: Final = ".:-+*#"  # one more than LEVELS
MOST_ROWS: Final = 32  # of ranks in the picture
MOST_TABLE: Final = 40  # ranks in the table; beyond, those that stand out
STANDING_OUT: Final = 8
MOST_FINDINGS: Final = 20
PHASE_COLUMNS: Final = (
    ("forward_s", "forward"),
    ("backward_s", "backward"),
    ("optimizer_s", "optimizer"),
    ("data_s", "data"),
)
SHORT: Final = {"forward_s": "fwd", "backward_s": "bwd", "optimizer_s": "opt", "data_s": "data"}


def tell(paces: RunPaces, shown: AttemptPaces | None, console: Console) -> Iterator[str]:
    """Lines: findings first, then the table and the picture of the attempt *shown*."""
    yield from console.wrapped(headline(paces), 0, None, "bold")
    yield from console.wrapped(str(paces.run.root), 0, None, "dim")
    slow = paces.slow
    for told in slow[:MOST_FINDINGS]:
        yield from _finding(told, console)
    if len(slow) > MOST_FINDINGS:
        yield f"  and {len(slow) - MOST_FINDINGS} more: --json and --html have them all"
    if paces.others:
        yield ""
        yield "Nobody's fault:"
        for told in paces.others[:MOST_FINDINGS]:
            yield from console.wrapped(f"{plain(told.words)}{_attempt(told)}", 4, "  - ")
        if len(paces.others) > MOST_FINDINGS:
            yield f"  and {len(paces.others) - MOST_FINDINGS} more"
    if shown is not None:
        yield ""
        yield from _table(paces, shown, console)
        yield ""
        yield from _heat(shown, console)
    others = [str(a.attempt) for a in paces.attempts if a is not shown]
    if others:
        yield from console.wrapped(f"other attempts with timings: {', '.join(others)} (--attempt N)", 0, None, "dim")
    for note in paces.notes:
        yield from console.wrapped(plain(note), 6, "note: ", "dim")


def headline(paces: RunPaces) -> str:
    """The answer in one line."""
    slow = paces.slow
    now = sum(t.state == "now" for t in slow)
    if now:
        return f"{now} slow now" + (f", {len(slow) - now} before" if len(slow) > now else "")
    if slow:
        return "1 was slow" if len(slow) == 1 else f"{len(slow)} times somebody was slow"
    if not paces.knows_work:
        return "not known: no rank told its own work, and wall times alone are equal on all ranks"
    steps = sum(a.report.steps for a in paces.attempts)
    return f"nobody was slow, in {steps:,} steps of which the journals keep timings"


def _attempt(told: Told) -> str:
    return f" (attempt {told.attempt})" if told.attempt else ""


def _finding(told: Told, console: Console) -> Iterator[str]:
    yield ""
    colour = "red" if told.state == "now" else "yellow"
    first, *more = console.wrapped(plain(told.words), 2, "* ")
    yield console.styled(first, colour)
    yield from (console.styled(line, colour) for line in more)
    parts = [told.end_words]
    if told.since_unix_s is not None:
        parts.append(f"since {clock_time(told.since_unix_s)}")
    if told.attempt:
        parts.append(f"attempt {told.attempt}")
    if told.incident is not None:
        parts.append(f"incident {told.incident}")
    if told.act:
        parts.append(f"acted on: {plain(told.act)}")
    yield from console.wrapped("; ".join(parts), 2, None, "dim")


# -- table -------------------------------------------------------------------------------------------------------------
def rows_shown(ranks: Sequence[RankPace], blamed: set[int], most: int) -> list[RankPace]:
    """All, or those that are blamed or stand out; in order of their numbers."""
    if len(ranks) <= most:
        return list(ranks)
    slowest = sorted(ranks, key=lambda r: -r.against_peers if not math.isnan(r.against_peers) else math.inf)
    kept = {r.rank for r in slowest[:STANDING_OUT]} | {r.rank for r in slowest if r.rank in blamed}
    return [r for r in ranks if r.rank in set(sorted(kept)[:most])]


def _table(paces: RunPaces, shown: AttemptPaces, console: Console) -> Iterator[str]:
    ranks = shown.report.ranks
    blame = {r: t for t in reversed(paces.slow) if t.attempt == shown.attempt for r in t.alarm.ranks}
    kept = rows_shown(ranks, set(blame), MOST_TABLE)
    has_role, has_node = any(r.role for r in ranks), len({r.node for r in ranks}) > 1
    has_starved = any(r.means.get("starved_s", 0.0) > 5e-5 for r in ranks)
    phases = PHASE_COLUMNS if any(r.means["forward_s"] > 0 for r in ranks) else ()
    columns = [Column("rank", right=True)]
    columns += [Column("node")] * has_node + [Column("role")] * has_role
    columns += [Column(t, right=True) for t in ("peers", "busy ms", "wait")]
    columns += [Column("starved", right=True)] * has_starved + [Column(SHORT[name], right=True) for name, _ in phases]
    columns.append(Column("slow", grows=True))
    rows = []
    for r in kept:
        told = blame.get(r.rank)
        row = [str(r.rank)] + [plain(r.node or "-")] * has_node + [plain(r.role)] * has_role
        row += [share(r.against_peers), milliseconds(r.means["busy_s"]), milliseconds(r.means["wait_s"])]
        row += [milliseconds(r.means["starved_s"])] * has_starved
        row += [milliseconds(r.means[name]) for name, _ in phases]
        row.append(console.styled(verdict(told), "red" if told.state == "now" else "yellow") if told else "")
        rows.append(row)
    title = f"Attempt {shown.attempt}: means over {shown.report.steps:,} steps, ms"
    yield from console.wrapped(title, 0, None, "bold")
    yield from (console.cut(line) for line in console.table(columns, rows))
    if len(kept) < len(ranks):
        rest = [r.against_peers for r in ranks if r not in kept and not math.isnan(r.against_peers)]
        span = f": {share(min(rest))} to {share(max(rest))} against peers" if rest else ""
        yield from console.wrapped(f"{len(ranks) - len(kept):,} other ranks{span}", 2)


def verdict(told: Told) -> str:
    """``+30% backward`` and when it ended."""
    text = f"+{100 * told.alarm.slowdown:.0f}%" + (f" {told.alarm.phase}" if told.alarm.phase else "")
    return text + {"now": ", now", "over": ", over"}.get(told.state, "")


def share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:+.1f}%"


def milliseconds(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{1000 * seconds:.1f}" if seconds < 1 else f"{1000 * seconds:,.0f}"


# -- picture -----------------------------------------------------------------------------------------------------------
def _heat(shown: AttemptPaces, console: Console) -> Iterator[str]:
    ranks = shown.report.heat.busy.shape[1]
    label = len(str(ranks)) * 2 + 1 if ranks > MOST_ROWS else len(str(ranks))
    label = max(label, len("rank"))
    drawn = picture(shown.report.heat, MOST_ROWS, max(console.width - label - 2, 8))
    yield console.styled("Own work above that of peers", "bold")
    yield from console.wrapped(legend(), 0, None, "dim")
    for index in range(len(drawn.rows)):
        cells = "".join(_ink(v) for v in drawn.busy[index])
        yield f"{drawn.row_name(index):>{label}}  {cells}".rstrip()
    yield _axis(drawn, label)
    if len(drawn.rows) < ranks:
        yield from console.wrapped("each row shows its slowest rank", 0, None, "dim")


def _ink(value: float) -> str:
    reached = level(value)
    return " " if reached is None else INKS[reached]


def legend() -> str:
    """``. below 2.5 %  : 2.5 %  ...``."""
    parts = [f"{INKS[0]} below {100 * LEVELS[0]:g} %"]
    parts += [f"{ink} {100 * least:g} %" for ink, least in zip(INKS[1:], LEVELS, strict=True)]
    return "  ".join(parts) + " and more"


def _axis(drawn: Picture, label: int) -> str:
    first, last = str(drawn.first_steps[0] if drawn.first_steps else 0), str(drawn.last_step)
    room = max(len(drawn.first_steps) - len(first) - len(last), 1)
    return f"{'step':>{label}}  {first}{' ' * room}{last}"
