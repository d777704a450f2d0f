"""``steadyctl stragglers``: who is or was slow in a run, since when, in which phase, and what it costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steadyrun.core.errors import ConfigError
from steadyrun.core.files import write_atomically
from steadyrun.core.records import to_json
from steadyrun.ctl.console import Console
from steadyrun.ctl.runs import NotFoundError, open_run

if TYPE_CHECKING:  # NumPy takes a fifth of a second to import, which other commands need not wait for
    from steadyrun.ctl.paces.reading import AttemptPaces, RunPaces, Told

__all__ = ["register"]

STRAGGLERS_SCHEMA: Final = "steadyrun.stragglers/1"
SLOW: Final = 10  # exit codes, as those of postmortem
UNDECIDED: Final = 11

EPILOG: Final = """\
RUN is a run folder (or a folder of them: its latest); the journals of all nodes
that are in it are read, live or finished. What the agents told while the job ran
counts; where they told nothing, the timings in the journals are judged now.

Own work is forward, backward, optimizer and data, without waiting for other
ranks. A rank is compared with those that have its role.

exit codes:
   0  nobody is or was slow
  10  somebody is or was
  11  undecided: no rank told its own work
   1  no timings, or no run
   2  the command line cannot be used

examples:
  steadyctl stragglers
  steadyctl stragglers steadyrun/latest --html paces.html
  steadyctl stragglers --json | jq '.findings[].summary'
  steadyctl stragglers --attempt 0
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "stragglers",
        help="say which ranks are or were slow, and show the paces of all",
        description="Names slow ranks, nodes and parallel groups of a run, and shows the paces of all ranks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("where", nargs="?", metavar="RUN", help="run folder (default: the latest in ./steadyrun)")
    parser.add_argument("--attempt", type=int, metavar="N", help="table and picture of it (default: the newest)")
    parser.add_argument("--json", action="store_true", help=f"print {STRAGGLERS_SCHEMA}")
    parser.add_argument("--html", metavar="FILE", help="also write one self-contained page")
    parser.set_defaults(run=run_stragglers)


def run_stragglers(args: argparse.Namespace, console: Console) -> int:
    """The exit code says whether somebody was slow."""
    from steadyrun.ctl.paces.page import render_paces
    from steadyrun.ctl.paces.reading import read_paces
    from steadyrun.ctl.paces.text import tell

    paces = read_paces(open_run(args.where))
    shown = _shown(paces, args.attempt)
    if args.html:
        _write_page(Path(args.html), render_paces(paces))
    if args.json:
        console.json(paces_to_json(paces))
    else:
        for line in tell(paces, shown, console):
            console.print(line)
        if args.html:
            console.print(console.styled(f"page: {args.html}", "dim"))
    if paces.slow:
        return SLOW
    return 0 if paces.knows_work else UNDECIDED


def _shown(paces: RunPaces, wanted: int | None) -> AttemptPaces | None:
    if wanted is None:
        return paces.attempts[-1] if paces.attempts else None
    for attempt in paces.attempts:
        if attempt.attempt == wanted:
            return attempt
    known = ", ".join(str(a.attempt) for a in paces.attempts) or "none"
    raise NotFoundError(f"no timings of attempt {wanted} in {paces.run.root}; attempts that have some: {known}")


def _write_page(path: Path, page: str) -> None:
    """Atomically. Raises ConfigError."""
    try:
        write_atomically(path, page)
    except OSError as e:
        raise ConfigError(f"--html: cannot write {path}: {e.strerror}; name a file in a folder that exists") from e


def paces_to_json(paces: RunPaces) -> dict[str, Any]:
    """``findings`` as in a verdict; ``alarms`` with all their figures, imbalances and bursts among them."""
    return {
        "schema": STRAGGLERS_SCHEMA,
        "run": str(paces.run.root),
        "is_finished": paces.has_ended,
        "source": "live" if paces.is_live else "timings",
        "findings": [f.to_json() for f in paces.findings()],
        "alarms": [_alarm_to_json(t) for t in [*paces.slow, *paces.others]],
        "attempts": [_attempt_to_json(a) for a in paces.attempts],
        "notes": list(paces.notes),
    }


def _alarm_to_json(told: Told) -> dict[str, Any]:
    return {
        "attempt": told.attempt,
        "state": told.state,
        "since_unix_s": told.since_unix_s,
        "incident": told.incident,
        "acted_on": told.act or None,
        "summary": told.words,
        **to_json(told.alarm),
    }


def _attempt_to_json(attempt: AttemptPaces) -> dict[str, Any]:
    report = attempt.report.to_json()
    return {
        "attempt": attempt.attempt,
        "every": attempt.every,
        **{key: report[key] for key in ("steps", "elapsed_s", "ranks", "heat")},
    }
