"""``steadyctl postmortem``: whose fault it was, from dumps, logs or run folders, whoever wrote them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from steadyrun.core.errors import ConfigError
from steadyrun.core.files import write_atomically
from steadyrun.ctl.console import Console
from steadyrun.postmortem.case import Report
from steadyrun.postmortem.judging import Outcome, judge_case, outcome_of_report
from steadyrun.postmortem.opening import UnusableError, open_case
from steadyrun.postmortem.page import render_page
from steadyrun.postmortem.text import render_text, report_to_json

__all__ = ["register"]

ERROR_SCHEMA: Final = "steadyrun.error/1"
LOOK_S: Final = 1.0  # between two looks of --watch; a folder counts as complete when two looks agree
REDRAW_S: Final = 0.2

Progress = Callable[[int, int], None]  # files read, files in all

EPILOG: Final = """\
PATH is a folder of flight-recorder dumps (pickle or JSON, of any torch from
2.4 on, with or without steadyrun), a dump, NCCL watchdog or torchrun logs, an
incident or a whole run folder; several are taken together. Nothing in them is
executed, and no path that stands in them is opened.

exit codes:
   0  healthy: nothing was in flight
  10  a verdict
  11  undecided: read what is missing
   2  nothing at the paths can be used

examples:
  steadyctl postmortem /tmp/nccl_trace_rank_*
  steadyctl postmortem dumps/ logs/ --html report.html
  steadyctl postmortem steadyrun/latest/incidents/0003 --json
  steadyctl postmortem --watch steadyrun/latest
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "postmortem",
        help="say whose fault a hang or death was, from dumps and logs",
        description="Names the root cause of a hang or death from what was left behind.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="dumps, logs, incident or run folders")
    parser.add_argument("--json", action="store_true", help="print steadyrun.postmortem/1")
    parser.add_argument("--html", metavar="FILE", help="also write one self-contained page")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks of the job, where the dumps do not tell")
    parser.add_argument("--watch", metavar="DIR", help="look at a folder until Ctrl-C; report whenever it has changed")
    parser.set_defaults(run=run_postmortem)


def run_postmortem(args: argparse.Namespace, console: Console) -> int:
    """The exit code says what came out."""
    if args.world_size is not None and args.world_size < 1:
        raise ConfigError(f"--world-size: {args.world_size} is not a number of ranks; give 1 or more")
    if args.watch:
        if args.paths:
            raise ConfigError("--watch looks at its own folder; leave out the other paths, or leave out --watch")
        return _watch(Path(args.watch), args, console)
    if not args.paths:
        raise ConfigError("give the dumps, logs or the run folder to look at (try: steadyctl postmortem --help)")
    try:
        report = _read([Path(p) for p in args.paths], args, console)
    except UnusableError as e:
        if args.json:
            console.json({"schema": ERROR_SCHEMA, "error": str(e)})
        sys.stderr.write(f"steadyctl: {e}\n")
        return int(Outcome.UNUSABLE)
    _tell(report, args, console)
    return int(outcome_of_report(report))


def _read(paths: Sequence[Path], args: argparse.Namespace, console: Console) -> Report:
    with _progress(console, args.json) as progress:
        return judge_case(open_case(paths, args.world_size, progress))


def _tell(report: Report, args: argparse.Namespace, console: Console) -> None:
    if args.html:
        _write_page(Path(args.html), render_page(report))
    if args.json:
        console.json(report_to_json(report))
        return
    console.print(render_text(report, console.width, console.has_colour))
    if args.html:
        console.print(console.styled(f"page: {args.html}", "dim"))


def _write_page(path: Path, page: str) -> None:
    """Atomically, so that a browser never shows half of it. Raises ConfigError."""
    try:
        write_atomically(path, page)
    except OSError as e:
        raise ConfigError(f"--html: cannot write {path}: {e.strerror}; name a file in a folder that exists") from e


# -- watching ----------------------------------------------------------------------------------------------------------
def _watch(folder: Path, args: argparse.Namespace, console: Console) -> int:
    """Report each time the folder has changed and come to rest; 130 by Ctrl-C is the normal end."""
    if not folder.is_dir():
        raise ConfigError(f"--watch: {folder} is no folder; give a run folder, or the folder where dumps will appear")
    told: object = None
    before: object = None
    while True:
        now = signature(folder)
        if now == before and now != told:
            told = now
            try:
                _tell(_read([folder], args, console), args, console)
            except UnusableError as e:
                if not args.json:
                    console.print(console.styled(f"{time.strftime('%H:%M:%S')} nothing to judge yet: {e}", "dim"))
            console.out.flush()
        before = now
        time.sleep(LOOK_S)


def signature(folder: Path) -> frozenset[tuple[str, int, int]]:
    """What is there, so that two looks can be compared.

    Of a run folder only complete incidents count (their verdict is written last): its journal changes all the time.
    """
    incidents = folder / "incidents"
    if incidents.is_dir():
        return frozenset(_stamp(p) for p in incidents.glob("*/verdict.json"))
    files = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return frozenset(_stamp(p) for p in files)


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        status = path.stat()
    except OSError:
        return str(path), -1, -1
    return str(path), status.st_size, status.st_mtime_ns


# -- progress ----------------------------------------------------------------------------------------------------------
@contextmanager
def _progress(console: Console, is_quiet: bool) -> Iterator[Progress | None]:
    """What to call with the files read and in all; None, and no line, where nobody looks at a terminal."""
    if is_quiet or not console.is_terminal:
        yield None
        return
    next_s = time.monotonic() + REDRAW_S  # a few files are read before anybody could read a line about it

    def update(done: int, total: int) -> None:
        nonlocal next_s
        now_s = time.monotonic()
        if now_s >= next_s:
            next_s = now_s + REDRAW_S
            console.out.write(f"\r\x1b[K{console.cut(f'reading {done} of {total} files')}")
            console.out.flush()

    try:
        yield update
    finally:
        console.out.write("\r\x1b[K")
        console.out.flush()
