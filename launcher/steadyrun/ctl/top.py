"""``steadyctl top``: ranks of a live run by node, their pace and GPUs, and what is wrong, renewed each second."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import sys
import time
from dataclasses import replace
from typing import Any, Final

from steadyrun.core.errors import ConfigError
from steadyrun.ctl.console import Console
from steadyrun.ctl.runs import open_run
from steadyrun.ctl.status import screen
from steadyrun.ctl.watching.look import SCHEMA, RunWatcher, TopLook
from steadyrun.ctl.watching.table import SORTS, View, render

__all__ = ["register"]

REFRESH_S: Final = 1.0
MOST_RANKS: Final = 1 << 17

_HOME: Final = "\x1b[H"
_CLEAR_LINE: Final = "\x1b[K"
_CLEAR_BELOW: Final = "\x1b[J"

EPILOG: Final = """\
Columns: step and how long ago it began; work: a step's own work, without waiting
for other ranks; score: that against ranks of the same role (1.00 is as usual, 1.25
takes a quarter longer, ! marks a standing straggler alarm); gpu and what its node's
agent last said of it; in: open sections, and what is worth a look.

Ranks that are as usual are folded by node where there is no room for all.

keys: q leaves, s sorts by the next column, b shows bad ranks only, f folds or
unfolds, space and - page forth and back.

examples:
  steadyctl top
  steadyctl top /data/runs --sort late
  steadyctl top --node 'gpu-1*' --ranks 0-63
  steadyctl top --once --bad
  steadyctl top --json | jq '.nodes[].ranks[] | select(.concern != "")'
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "top",
        help="watch ranks, their pace and their GPUs",
        description="Shows ranks by node with step, pace, sections and GPU, renewed every second.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("where", nargs="?", metavar="RUN", help="run folder, or a folder of runs")
    parser.add_argument("--once", action="store_true", help="print once and leave")
    parser.add_argument("--json", action="store_true", help=f"print {SCHEMA} once and leave")
    parser.add_argument("--sort", choices=SORTS, default="rank", help="by what (default: rank)")
    parser.add_argument("--node", action="append", default=[], metavar="PATTERN", help="only nodes like that")
    parser.add_argument("--ranks", metavar="N,A-B", help="only these")
    parser.add_argument("--bad", action="store_true", help="only ranks that are worth a look")
    parser.add_argument("--all", action="store_true", help="fold nothing")
    parser.set_defaults(run=run_top)


def run_top(args: argparse.Namespace, console: Console) -> int:
    """0: live and nothing is wrong, or ended; 1 otherwise."""
    view = View(args.sort, tuple(args.node), _ranks(args.ranks), args.bad, not args.all)
    watcher = RunWatcher(open_run(args.where))
    look = watcher.look()
    if args.json:
        console.json(look.to_json())
    elif args.once or not console.is_terminal or not sys.stdin.isatty():
        _print(look, view, console)
    else:
        look = _watch(watcher, look, view, console)
    return 0 if _is_well(look) else 1


def _ranks(text: str | None) -> frozenset[int]:
    """Raises ConfigError."""
    if text is None:
        return frozenset()
    if re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text) is None:
        raise ConfigError(f"--ranks: {text!r} is no list of ranks; give numbers and ranges like 0-7,12")
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), min(int(last or first), MOST_RANKS) + 1))
    return frozenset(found)


def _is_well(look: TopLook) -> bool:
    if look.state == "ended":
        return look.run.ending is not None and not look.run.ending.get("exit_class")
    return look.state == "live" and not any(bad for n in look.nodes for _, bad in n.troubles)


def _print(look: TopLook, view: View, console: Console) -> None:
    for line in render(look, view, console, time.time()):
        console.print(line)


def _watch(watcher: RunWatcher, look: TopLook, view: View, console: Console) -> TopLook:
    """Redraw until q, Ctrl-C or the end of the run; the last picture stays on the screen."""
    with screen(console), contextlib.suppress(KeyboardInterrupt):
        while look.state == "live":
            _draw(look, view, console)
            key = _key_within(REFRESH_S)
            if key in ("q", "Q", "\x03"):
                break
            changed = _with_key(view, key, console)
            if changed == view:
                look = watcher.look()
            view = changed
    _print(look, replace(view, skip=0), console)
    return look


def _draw(look: TopLook, view: View, console: Console) -> None:
    lines = [console.cut(t) for t in render(look, view, console, time.time(), console.height - 2)]
    chosen = ["sorted by " + view.sort] + (["bad only"] if view.only_bad else []) + ([] if view.fold else ["unfolded"])
    keys = f"q leaves, s sort, b bad only, f fold, space page   ({', '.join(chosen)})"
    lines.append(console.styled(console.cut(keys), "dim"))
    console.out.write(_HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW)
    console.out.flush()


def _with_key(view: View, key: str, console: Console) -> View:
    page = max(console.height - 10, 4)
    match key:
        case "s":
            return replace(view, sort=SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)], skip=0)
        case "b":
            return replace(view, only_bad=not view.only_bad, skip=0)
        case "f":
            return replace(view, fold=not view.fold, skip=0)
        case " ":
            return replace(view, skip=view.skip + page)
        case "-":
            return replace(view, skip=max(view.skip - page, 0))
        case _:
            return view


def _key_within(limit_s: float) -> str:
    """A key, ``q`` when the terminal is gone, empty when none came in time."""
    ready, _, _ = select.select([sys.stdin], [], [], limit_s)
    return (os.read(sys.stdin.fileno(), 16).decode(errors="replace")[:1] or "q") if ready else ""
