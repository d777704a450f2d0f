"""``steadyctl incidents`` and ``steadyctl show``: what went wrong in a run, whose fault it was, what was done."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from steadyrun.core.runfolder import RunFolder
from steadyrun.ctl.console import Column, Console, ago, clock_time, duration, plain, size
from steadyrun.ctl.runs import IncidentFile, Recovery, RunLog, find_incident, incidents_of, open_run
from steadyrun.ctl.stacks import StackGroup, grouped_stacks, log_tails

__all__ = ["register"]

INCIDENTS_SCHEMA: Final = "steadyrun.incidents/1"
INCIDENT_SCHEMA: Final = "steadyrun.incident/1"

_ACTIONS: Final[Mapping[str, str]] = {
    "restart": "restart",
    "restart_without_node": "restart without the node",
    "roll_back": "roll back",
    "stop": "stop",
    "report": "report only",
}


def register(commands: Any) -> None:
    """Add both commands to the parser."""
    formatter = argparse.RawDescriptionHelpFormatter
    listing = commands.add_parser(
        "incidents",
        help="list the incidents of a run",
        description="Lists the incidents of a run: when, which class, which ranks, what was done.",
        epilog="examples:\n  steadyctl incidents\n  steadyctl incidents /data/runs --json",
        formatter_class=formatter,
    )
    listing.add_argument(
        "where", nargs="?", metavar="RUN", help="run folder, or a folder of runs (default: ./steadyrun)"
    )
    listing.add_argument("--json", action="store_true", help=f"print {INCIDENTS_SCHEMA}")
    listing.set_defaults(run=run_incidents)

    show = commands.add_parser(
        "show",
        help="show one incident in full",
        description=(
            "Shows one incident: the findings, the ranks that only suffered, what is\n"
            "missing, where each rank was, its last log lines, and the evidence files."
        ),
        epilog="examples:\n  steadyctl show last\n  steadyctl show 2 --run /data/runs\n  steadyctl show 2 --stacks",
        formatter_class=formatter,
    )
    show.add_argument("incident", metavar="INCIDENT", help="its number, or 'last'")
    show.add_argument(
        "--run", dest="where", metavar="RUN", help="run folder, or a folder of runs (default: ./steadyrun)"
    )
    show.add_argument("--stacks", action="store_true", help="whole stacks, not only the lines that matter")
    show.add_argument("--json", action="store_true", help=f"print {INCIDENT_SCHEMA}")
    show.set_defaults(run=run_show)


# -- incidents -------------------------------------------------------------------------------------------------------
def run_incidents(args: argparse.Namespace, console: Console) -> int:
    """0 also where there are none: a run without incidents is a good one."""
    run = open_run(args.where)
    found = incidents_of(run)
    if args.json:
        console.json({"schema": INCIDENTS_SCHEMA, "run": str(run.root), "incidents": [_row_json(i) for i in found]})
        return 0
    if not found:
        console.print(f"no incidents in {run.root}")
        return 0
    columns = (
        Column("no", right=True),
        Column("time"),
        Column("att", right=True),
        Column("class"),
        Column("ranks"),
        Column("action"),
        Column("delay", right=True),
    )
    now_unix_s = time.time()
    heads, *rows = console.table(columns, [_row(i, console, now_unix_s) for i in found])
    console.print(heads)
    for incident, row in zip(found, rows, strict=True):
        console.print(row)
        for line in console.wrapped(plain(incident.summary), 4):
            console.print(line)
    console.print(console.styled(f"\n{run.root}\nmore: steadyctl show NO{_run_option(args.where)}", "dim"))
    return 0


def _run_option(where: str | None) -> str:
    return f" --run {where}" if where is not None else ""


def _row(incident: IncidentFile, console: Console, now_unix_s: float) -> list[str]:
    verdict = incident.verdict
    at = verdict.get("detected_at_unix_s")
    is_old = at is not None and now_unix_s - at > 20 * 3600
    when = "-" if at is None else time.strftime("%m-%d %H:%M" if is_old else "%H:%M:%S", time.localtime(at))
    action = str(verdict.get("action", "-"))
    colour = "red" if action == "stop" or incident.problem else "yellow"
    more = len(incident.findings) - 1
    return [
        str(incident.number),
        when,
        str(verdict.get("attempt", "-")),
        console.styled(plain(incident.cls), colour),
        _ranks(incident.ranks) + (f" +{more}" if more > 0 else ""),
        plain(action) + (" (observed)" if verdict.get("mode") == "observe" else ""),
        duration(verdict.get("detection_delay_s")),
    ]


def _row_json(incident: IncidentFile) -> dict[str, Any]:
    verdict = incident.verdict
    return {
        "incident": incident.number,
        "path": str(incident.folder),
        "detected_at_unix_s": verdict.get("detected_at_unix_s"),
        "detection_delay_s": verdict.get("detection_delay_s"),
        "attempt": verdict.get("attempt"),
        "class": incident.cls,
        "ranks": incident.ranks,
        "victims": list(verdict.get("victims", ())),
        "mode": verdict.get("mode"),
        "action": verdict.get("action"),
        "summary": incident.summary,
        "problem": incident.problem or None,
    }


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks as a person writes them: ``0-3,7``."""
    parts: list[str] = []
    ordered = sorted(set(ranks))
    start = 0
    for i in range(1, len(ordered) + 1):
        if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
            first, last = ordered[start], ordered[i - 1]
            parts.append(str(first) if first == last else f"{first}-{last}" if last > first + 1 else f"{first},{last}")
            start = i
    return ",".join(parts) or "-"


# -- show --------------------------------------------------------------------------------------------------------------
def run_show(args: argparse.Namespace, console: Console) -> int:
    run = open_run(args.where)
    incident = find_incident(run, args.incident)
    log = RunLog.read(run)
    recovery = log.recovery(int(incident.verdict.get("attempt", 0))) if incident.verdict else None
    groups = grouped_stacks(incident)
    tails = log_tails(incident, run)
    if args.json:
        console.json(
            {
                "schema": INCIDENT_SCHEMA,
                "run": str(run.root),
                "path": str(incident.folder),
                "problem": incident.problem or None,
                "verdict": incident.verdict or None,
                "recovery": recovery,
                "stacks": groups,
                "log_tails": {str(rank): lines for rank, lines in tails.items()},
                "files": [str(p.relative_to(incident.folder)) for p in _files(incident.folder)],
            }
        )
        return 0 if incident.verdict else 1
    for line in _story(incident, run, recovery, groups, tails, args.stacks, console):
        console.print(line)
    return 0 if incident.verdict else 1


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _story(
    incident: IncidentFile,
    run: RunFolder,
    recovery: Recovery | None,
    groups: Sequence[StackGroup],
    tails: Mapping[int, Sequence[str]],
    whole_stacks: bool,
    console: Console,
) -> list[str]:
    verdict = incident.verdict
    lines = [console.styled(f"incident {incident.number}", "bold") + console.styled(f"  {run.root}", "dim"), ""]
    if incident.problem:
        lines += console.wrapped(incident.problem)
    else:
        lines += _facts(verdict, recovery, console)
        lines += _findings(incident.findings, console)
        victims = [int(r) for r in verdict.get("victims", ())]
        if victims:
            lines += _field("victims", f"rank{'s' * (len(victims) > 1)} {_ranks(victims)}: suffered from it", console)
        for text in verdict.get("missing", ()):
            lines += _field("missing", plain(text), console)
    if groups:
        lines += _heading("where the ranks were", console)
        for group in groups:
            lines += _group(group, whole_stacks, console)
    if tails:
        lines += _heading("last log lines", console)
        for rank, tail in tails.items():
            lines.append(console.styled(f"  rank {rank}", "bold"))
            for text in tail:
                lines += console.wrapped(plain(text), 6, "    ")
    files = _files(incident.folder)
    if files:
        lines += _heading("files", console)
        lines.append(console.styled(f"  {incident.folder}", "dim"))
        shown = files if len(files) <= 24 else files[:20]
        names = [(str(p.relative_to(incident.folder)), size(p.stat().st_size)) for p in shown]
        width = max(len(n) for n, _ in names)
        lines += [f"    {name:<{width}}  {text:>9}" for name, text in names]
        if len(files) > len(shown):
            lines.append(f"    and {len(files) - len(shown)} more")
    return lines


def _facts(verdict: Mapping[str, Any], recovery: Recovery | None, console: Console) -> list[str]:
    at = verdict.get("detected_at_unix_s")
    mode = "" if verdict.get("mode") != "observe" else " (mode observe: nobody was touched)"
    detected = f"{clock_time(at, with_date=True)} ({ago(at, time.time())}), attempt {verdict.get('attempt')}"
    lines = _field("detected", detected, console)
    lines += _field("delay", _delay(verdict), console)
    action = _ACTIONS.get(str(verdict.get("action")), plain(verdict.get("action")))
    reason = plain(verdict.get("reason") or "")
    lines += _field("action", f"{action}{mode}" + (f": {reason}" if reason not in ("", action) else ""), console)
    if recovery is not None:
        warm = f"{recovery.warm_ranks} of {recovery.ranks} from warm standbys"
        text = (
            f"all {recovery.ranks} ranks had done a step again {duration(recovery.seconds)} after detection "
            f"(attempt {recovery.attempt}, step {recovery.first_step}, {warm})"
        )
        lines += _field("recovered", text, console, "green")
    return lines


def _delay(verdict: Mapping[str, Any]) -> str:
    """How long it took to notice, and counted from what."""
    details = verdict.get("details") or {}
    text = duration(verdict.get("detection_delay_s"))
    if details.get("trigger") == "exit":
        return f"{text} after the process had ended"
    past_limit_s = details.get("past_limit_s")
    past = f", {past_limit_s:.2f} s past its limit" if isinstance(past_limit_s, (int, float)) else ""
    return f"{text} after the last sign of progress{past}"


def _findings(findings: Sequence[Mapping[str, Any]], console: Console) -> list[str]:
    lines: list[str] = []
    for i, finding in enumerate(findings):
        who = f"rank{'s' * (len(finding.get('ranks', ())) != 1)} {_ranks([int(r) for r in finding.get('ranks', ())])}"
        title = f"{plain(finding.get('class'))}, {who}"
        confidence = finding.get("confidence")
        sure = f"  (confidence {confidence:.0%})" if isinstance(confidence, (int, float)) else ""
        label = "finding" if len(findings) == 1 else f"finding {i + 1}"
        lines += ["", f"{label:<11}" + console.styled(title, "bold", "red") + console.styled(sure, "dim")]
        lines += console.wrapped(plain(finding.get("summary", "")), 11)
        for key, label in (
            ("nodes", "nodes"),
            ("gpus", "GPUs"),
            ("section", "section"),
            ("callsite", "at"),
            ("op", "op"),
        ):
            value = finding.get(key)
            if value:
                text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
                lines += console.wrapped(plain(text), 20, f"           {label:<9}")
        if finding.get("since_unix_s"):
            lines.append(f"           {'since':<9}{clock_time(finding['since_unix_s'])}")
        for path in finding.get("evidence", ()):
            lines.append(console.styled(f"           {'evidence':<9}{plain(path)}", "dim"))
    return [*lines, ""]


def _group(group: StackGroup, whole: bool, console: Console) -> list[str]:
    title = f"  rank{'s' * (len(group.ranks) > 1)} {_ranks(group.ranks)}"
    where = group.title
    lines = [console.styled(title, "bold") + (f"  {plain(where)}" if where else "")]
    frames = group.frames if whole else group.important
    marks = {str(f) for f in group.important}
    for frame in frames:
        file = _short(plain(frame.file), console.width - 12 - len(frame.function))
        text = f"    {plain(frame.function)}  {file}:{frame.line}"
        lines.append(console.styled(text, "cyan") if whole and str(frame) in marks else text)
    hidden = len(group.frames) - len(frames)
    if hidden > 0:
        lines.append(console.styled(f"    ({hidden} more frames: --stacks)", "dim"))
    return lines


def _short(path: str, width: int) -> str:
    """The end of a path, which tells more than its beginning."""
    width = max(width, 20)
    return path if len(path) <= width else "…" + path[-(width - 1) :]


def _heading(text: str, console: Console) -> list[str]:
    return ["", console.styled(text, "bold")]


def _field(label: str, text: str, console: Console, *styles: str) -> list[str]:
    return console.wrapped(text, 11, f"{label:<11}", *styles)
