"""``steadyctl calibrate-timeouts``: limits for the watchdog, from how long things took."""

from __future__ import annotations

import argparse
import glob
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from steadyrun.core.errors import ConfigError
from steadyrun.core.journal import read_journal
from steadyrun.core.runfolder import RunFolder
from steadyrun.core.sections import CHECKPOINTING, EVALUATION, STEP
from steadyrun.ctl.calibration.drawing import limits_svg
from steadyrun.ctl.calibration.history import Earlier, earlier_in, flags_of, is_written, timeouts_json, write_timeouts
from steadyrun.ctl.calibration.patternlogs import LogReading, read_logs, with_checked_groups
from steadyrun.ctl.calibration.replay import fired_in_force, limit_s
from steadyrun.ctl.calibration.weighing import Section, Weight, sections_of, weigh
from steadyrun.ctl.console import Column, Console, duration, plain
from steadyrun.ctl.runs import NotFoundError, live_nodes, open_run
from steadyrun.detect.calibrate import OUT_OF_SECTION, Costs, History, SectionStatistics
from steadyrun.detect.calibrate.following import ONCE_A_START
from steadyrun.detect.calibrate.passes import RunPasses, add_to, read_passes
from steadyrun.node.machine.events import Limits

__all__ = ["register"]

CALIBRATION_SCHEMA: Final = "steadyrun.calibration/1"
TOO_FEW: Final = 3  # exit code
DEFAULT_HANGS_PER_DAY: Final = 1.0
LEAST_RESTART_S: Final = 10.0  # a few fast restarts do not show what a bad one costs
LOGS: Final = "logs:"  # begins the name of what stands for a run then

EPILOG: Final = """\
RUN is a run folder (or a folder of them: its latest), or a file of limits or
statistics that an earlier call wrote. Several are taken together, oldest first;
older passes count less. An existing file named with -o is carried on: its
statistics are kept, and no run is counted twice.

Hard limit: time alone acts. Soft limit: the ranks are examined, and only
evidence of a hang acts. Both are where waiting for hangs and restarting in vain
cost least together. Below 16 passes the limit is a cap.

Without a run of steadyrun, durations come from the logs of the ranks:
--logs GLOB and --pattern REGEX with a group (?P<seconds>...), (?P<ms>...), or
(?P<time>...) for times of day, and, where lines have them, (?P<step>...),
(?P<rank>...), (?P<section>...).

exit codes:
  0  done
  1  no durations were found
  2  the command line cannot be used
  3  done, but a section was passed fewer than 16 times (set-up, once a start,
     does not count): run longer, and calibrate again

examples:
  steadyctl calibrate-timeouts --dry-run
  steadyctl calibrate-timeouts steadyrun/2026* -o timeouts.json
  steadyctl calibrate-timeouts --logs 'logs/rank_*.log' --dry-run \\
      --pattern 'step +(?P<step>\\d+).* (?P<ms>[0-9.]+) ms'
  steadyrun --ft-timeouts timeouts.json train.py
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "calibrate-timeouts",
        help="make the watchdog's limits from how long things took",
        description="Makes limits for the watchdog from how long sections took in finished or live runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders (default: the latest in ./steadyrun)")
    parser.add_argument("--dry-run", action="store_true", help="write no limits, only show them")
    parser.add_argument("--json", action="store_true", help=f"print {CALIBRATION_SCHEMA}")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the distributions with their limits")
    parser.add_argument("-o", "--output", metavar="FILE", help="the limits (default: timeouts.json in the newest run)")
    parser.add_argument("--logs", metavar="GLOB", help="logs of the ranks of a job without steadyrun")
    parser.add_argument("--pattern", metavar="REGEX", help="what to look for in their lines")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks (default: as in the newest run)")
    parser.add_argument(
        "--restart-cost", type=float, metavar="SECONDS", help="of a restart and the work it repeats (default: measured)"
    )
    parser.add_argument(
        "--hangs-per-day", type=float, default=DEFAULT_HANGS_PER_DAY, metavar="N", help="to be expected (default: 1)"
    )
    parser.add_argument("--cap", type=float, metavar="SECONDS", help="longest that cost may choose (default: 1800)")
    parser.set_defaults(run=run_calibrate)


@dataclass(frozen=True, slots=True)
class Live:
    """What the limits that the runs had set themselves did to one section.

    Attributes:
        soft_replayed, hard_replayed: passes in the journals that were beyond the limits of their time.
        soft_alarms, hard_alarms: told of at the time; in_hangs: those of them that a stop for a hang followed, whose
            passes never ended and so are none of those replayed.
    """

    soft_replayed: int
    hard_replayed: int
    soft_alarms: int
    hard_alarms: int
    in_hangs: int


def _live(runs: Sequence[RunPasses]) -> dict[str, Live]:
    soft, hard = fired_in_force(runs)
    told = [run.alarms for run in runs]
    names = {*soft, *hard, *(n for a in told for n in (*a.soft, *a.hard))}
    in_force = {n for run in runs for p in run.passes if p.in_force is not None for n in (*p.in_force.soft,)}
    return {
        name: Live(
            soft[name],
            hard[name],
            sum(a.soft[name] for a in told),
            sum(a.hard[name] for a in told),
            sum(a.in_hangs[name] for a in told),
        )
        for name in sorted(names | in_force)
    }


@dataclass(frozen=True, slots=True)
class Calibration:
    """All that is told of it."""

    runs: Sequence[RunPasses]
    earlier: Earlier
    world_size: int
    configuration: str
    costs: Costs
    sections: Sequence[Section]
    weights: Mapping[str, Sequence[Weight]]
    current: Limits
    never_seen: Sequence[str]
    notes: Sequence[str]
    observed_s: float
    outside_share: float | None
    folder: RunFolder | None
    live: Mapping[str, Live]

    @property
    def too_few(self) -> list[str]:
        """Sections that decide on exit code 3."""
        return [
            s.name
            for s in self.sections
            if s.name not in ONCE_A_START and s.statistics.durations.events < Costs().min_events
        ]


def run_calibrate(args: argparse.Namespace, console: Console) -> int:
    if args.plot and Path(args.plot).suffix.lower() != ".svg":
        raise ConfigError(f"--plot: {args.plot} is not the name of an SVG; give one that ends with .svg")
    found = _calibrate(args)
    if args.plot:
        _write_plot(Path(args.plot), limits_svg(_title(found), found.sections, found.weights))
    written = None
    if not args.dry_run:
        written = _target(args, found.folder)
        write_timeouts(written, timeouts_json(found.sections, found.earlier, found.costs, time.time()))
    if args.json:
        console.json(_to_json(found, written))
    else:
        for line in _story(found, written, args, console):
            console.print(line)
    return TOO_FEW if found.too_few else 0


# -- reading -----------------------------------------------------------------------------------------------------------
def _calibrate(args: argparse.Namespace) -> Calibration:
    earlier, runs, folder, notes = _read(args)
    history = earlier.history
    world_size, configuration = _which(history, runs, args.world_size)
    chosen = sorted(history.of_world(world_size, configuration), key=_place)
    mine = [_only(run, world_size) for run in runs if run.configuration == configuration]
    others = sorted({s.key.world_size for s in history} - {world_size})
    if others:
        sizes = ", ".join(map(str, others))
        notes.append(f"also seen with {sizes} ranks, which is kept apart; --world-size N shows it")
    costs = _costs(args, earlier)
    sections = sections_of(chosen, mine, costs, any(run.name.startswith(LOGS) for run in mine))
    current = _current_limits(folder)
    loops = sorted({name for run in mine for name in run.loops})
    if loops:
        notes.append(f"{', '.join(map(plain, loops))}: contains steps, which are judged instead; it gets no limit")
    unread = sum(run.unread for run in mine)
    if unread:
        notes.append(f"{unread:,} durations are not in the journals: passes so short come faster than they are written")
    summed = sum(run.summed for run in mine)
    if summed:
        notes.append(f"{summed:,} short durations are in the journals as sums; medians and counts are of the others")
    for s in sections:
        if s.is_unmarked:
            notes.append(
                f"{plain(s.name)}: the script does not mark its evaluations, so steps may hold them unseen; "
                f"{s.costs.min_events:,} passes are needed (mark them: with watch.section('evaluation'))"
            )
    steps_s = sum(a.steps_s for run in mine for a in run.attempts)
    outside_s = sum(a.outside_s for run in mine for a in run.attempts)
    return Calibration(
        runs=mine,
        earlier=earlier,
        world_size=world_size,
        configuration=configuration,
        costs=costs,
        sections=sections,
        weights=weigh(sections, mine, current),
        current=current,
        never_seen=_never_seen(sections, current),
        notes=notes,
        observed_s=sum(a.observed_s for run in mine for a in run.attempts),
        outside_share=outside_s / steps_s if steps_s else None,
        folder=folder,
        live=_live(mine),
    )


def _read(args: argparse.Namespace) -> tuple[Earlier, list[RunPasses], RunFolder | None, list[str]]:
    """(All that was ever counted, the runs whose passes are known, the newest run's folder, notes)."""
    if bool(args.logs) != bool(args.pattern):
        raise ConfigError("--logs and --pattern go together: which files, and what to look for in their lines")
    history = History()
    restarts, restarts_s = 0, 0.0
    notes: list[str] = []
    given = args.runs or ([None] if not args.logs else [])
    files = [Path(r) for r in given if r is not None and Path(r).is_file()]
    folders = {f.root: f for f in (open_run(r) for r in given if r is None or not Path(r).is_file())}
    if args.output is not None and Path(args.output) not in files:
        files.insert(0, Path(args.output))
    for file in files:
        earlier = earlier_in(file, is_strict=args.output is None or file != Path(args.output))
        if earlier is not None:
            history = history.merged(earlier.history)
            restarts, restarts_s = restarts + earlier.restarts, restarts_s + earlier.restarts * earlier.restart_s
    runs = [_read_run(f) for f in folders.values()]
    runs.sort(key=lambda run: (run.started_at_unix_s, run.name))
    kept = _kept_beside(runs, folders.values(), history, notes)
    if kept is not None:
        history = history.merged(kept.history)
        restarts, restarts_s = restarts + kept.restarts, restarts_s + kept.restarts * kept.restart_s
    again = [run.name for run in runs if run.name in history.runs]
    if again:
        notes.append(f"{len(again)} of the runs had been counted before, and were not again")
    unknown = [name for name in history.runs if name not in {run.name for run in runs}]
    if unknown and kept is not None:
        notes.append(f"{len(unknown)} earlier runs of the same command line count too, by what they have left behind")
    elif unknown:
        notes.append(
            f"of {len(unknown)} earlier runs only statistics are known: what fired, and its cost, leaves them out"
        )
    if args.logs:
        runs.append(_read_logs(args, notes))
    for run in runs:
        if run.name not in history.runs:
            add_to(history, run)
            restarts, restarts_s = restarts + len(run.restarts_s), restarts_s + sum(run.restarts_s)
    if not len(history):
        where = ", ".join(str(f) for f in folders) or args.logs or "the files"
        raise NotFoundError(
            f"no durations in {where}: nothing was passed; let a job do some steps under steadyrun first"
        )
    newest = max(folders.values(), key=lambda f: f.root.name, default=None)
    return Earlier(history, restarts, restarts_s / restarts if restarts else 0.0), runs, newest, notes


def _kept_beside(
    runs: Sequence[RunPasses], folders: Iterable[RunFolder], history: History, notes: list[str]
) -> Earlier | None:
    """What earlier runs of the newest one's command line have seen: its limits began with that."""
    newest = {f.root.name: f for f in folders}.get(runs[-1].name) if runs and runs[-1].configuration else None
    if newest is None:
        return None
    path = newest.calibration(runs[-1].configuration)
    kept = earlier_in(path, is_strict=False)
    if kept is None or set(kept.history.runs) <= {*history.runs, *(run.name for run in runs)}:
        return None
    if set(kept.history.runs) & set(history.runs):
        notes.append(f"{path} is left out: some of its runs have been counted")
        return None
    return kept


def _read_run(folder: RunFolder) -> RunPasses:
    """Every node's journal, one record at a time: a journal of weeks does not fit into memory."""
    paths = sorted(folder.journal_dir.glob("*.jsonl"))
    try:
        return read_passes(folder.root.name, (read_journal(path) for path in paths))
    except OSError as e:
        raise ConfigError(f"cannot read {e.filename}: {e.strerror}") from e


def _read_logs(args: argparse.Namespace, notes: list[str]) -> RunPasses:
    pattern = with_checked_groups(args.pattern)
    paths = sorted(p for p in map(Path, glob.glob(args.logs, recursive=True)) if p.is_file())
    if not paths:
        raise NotFoundError(
            f"--logs: no file matches {args.logs}; quote the pattern, so that the shell leaves it alone"
        )
    reading: LogReading = read_logs(paths, pattern, LOGS + args.logs)
    if len(reading.empty) == reading.files:
        raise NotFoundError(f"--pattern: {args.pattern!r} matches no line of {reading.files} files, {paths[0]} first")
    if reading.empty:
        notes.append(f"nothing matched in {len(reading.empty)} of {reading.files} logs, {reading.empty[0]} first")
    if reading.steps_apart > 1:
        notes.append(
            f"the logs tell of every {reading.steps_apart} steps at once: the longest single step is not known, and "
            "limits may be too short; log every step, or calibrate again after the first run under steadyrun"
        )
    return reading.run


def _which(history: History, runs: Sequence[RunPasses], asked: int | None) -> tuple[int, str]:
    """World size and configuration that the limits are for: the newest run's."""
    keys = [(s.key.world_size, s.key.configuration) for s in history]
    if asked is not None:
        for key in keys:
            if key[0] == asked:
                return key
        known = ", ".join(str(size) for size in sorted({k[0] for k in keys}))
        raise NotFoundError(f"nothing was seen with {asked} ranks; seen with: {known}")
    for run in reversed(runs):
        for attempt in reversed(run.attempts):
            if (attempt.world_size, run.configuration) in keys:
                return attempt.world_size, run.configuration
    return keys[-1]


def _place(s: SectionStatistics) -> tuple[int, str]:
    """The step first, the set-up last."""
    name = s.key.section
    return (0 if name == STEP else 1 if name == OUT_OF_SECTION else 3 if name in ONCE_A_START else 2), name


def _only(run: RunPasses, world_size: int) -> RunPasses:
    attempts = [a for a in run.attempts if a.world_size == world_size]
    numbers = {a.number for a in attempts}
    return replace(run, attempts=attempts, hangs=[h for h in run.hangs if h.attempt in numbers])


def _costs(args: argparse.Namespace, earlier: Earlier) -> Costs:
    values: dict[str, float] = {"hangs_per_day": args.hangs_per_day}
    if args.restart_cost is not None:
        values["restart_s"] = args.restart_cost
    elif earlier.restarts:
        values["restart_s"] = max(LEAST_RESTART_S, earlier.restart_s)
    if args.cap is not None:
        values["cap_s"] = args.cap
        values["first_cap_s"] = min(args.cap, Costs().first_cap_s)
    try:
        return Costs(**values)  # type: ignore[arg-type]  # min_events, the only integer, is not among them
    except ValueError as e:
        raise ConfigError(f"--restart-cost, --hangs-per-day, --cap: {e}") from None


def _current_limits(folder: RunFolder | None) -> Limits:
    """What the newest run was started with, as far as its live state tells; else the defaults."""
    told: Mapping[str, Any] = {}
    for node in live_nodes(folder) if folder is not None else ():
        limits = node.data.get("limits")
        told = limits if isinstance(limits, Mapping) else told
    values: dict[str, Any] = {}
    names = ("step_s", "setup_s", "out_of_section_s", "checkpointing_s", "evaluation_s", "default_section_s")
    for name in names:
        if name in told:
            values[name] = _seconds(told[name])
    for name in ("sections", "first"):
        if isinstance(told.get(name), Mapping):
            values[name] = {str(k): _seconds(v) for k, v in told[name].items()}
    try:
        return Limits(**values)
    except (TypeError, ValueError):
        return Limits()


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.inf


def _never_seen(sections: Sequence[Section], current: Limits) -> list[str]:
    seen = {s.name for s in sections}
    out = [] if seen & EVALUATION else ["evaluation"]
    out += [CHECKPOINTING] if CHECKPOINTING not in seen else []
    return out + sorted(set(current.sections) - seen - set(out))


def _target(args: argparse.Namespace, folder: RunFolder | None) -> Path:
    if args.output is not None:
        return Path(args.output)
    return folder.timeouts if folder is not None else Path("timeouts.json")


def _write_plot(file: Path, svg: str) -> None:
    try:
        file.write_text(svg, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--plot: cannot write {file}: {e.strerror}; name a file in a folder that exists") from e


# -- telling -----------------------------------------------------------------------------------------------------------
def _title(c: Calibration) -> str:
    names = f"run {c.runs[-1].name}" if len(c.runs) == 1 else f"{len(c.earlier.history.runs)} runs"
    return f"{names}, {c.world_size} rank{'s' * (c.world_size != 1)}, {duration(c.observed_s)} of training"


def _story(c: Calibration, written: Path | None, args: argparse.Namespace, console: Console) -> list[str]:
    lines = [console.styled("limits from observed times", "bold") + f"  {plain(_title(c))}"]
    lines += console.wrapped(_costs_text(c, args))
    lines += _heading("seen", console)
    lines += _seen(c, console)
    lines += _heading("limits", console)
    lines += _limits(c, console)
    lines += _heading("what each rule does with these runs, and on a day", console)
    lines += _compared(c, console)
    lines += _notes(c, console)
    lines += _heading("as options", console)
    lines += [f"  {flag}" for flag in flags_of(c.sections)]
    if written is not None:
        lines += ["", f"written: {written}", f"use it:  steadyrun --ft-timeouts {written} ..."]
    else:
        lines += ["", console.styled("nothing was written (--dry-run)", "dim")]
    if args.plot:
        lines.append(f"picture: {args.plot}")
    if c.too_few:
        names = ", ".join(map(plain, c.too_few))
        text = f"too few passes of {names}: fewer than 16, so the cap is the limit (exit code {TOO_FEW})"
        lines += console.wrapped(text, 0, None, "yellow")
    return lines


def _costs_text(c: Calibration, args: argparse.Namespace) -> str:
    n = c.earlier.restarts
    source = "given" if args.restart_cost is not None else "assumed" if not n else f"measured {_times(n)}"
    per_day = c.costs.hangs_per_day
    expected = "1 hang a day is expected" if per_day == 1 else f"{per_day:g} hangs a day are expected"
    hangs = sum(len(run.hangs) for run in c.runs)
    had = f"; these runs had {hangs}" if hangs else ""
    return (
        f"A restart costs {duration(c.costs.restart_s)} ({source}), {expected}{had}. A pass is one of the job: the "
        "slowest rank's."
    )


def _times(n: int) -> str:
    return "once" if n == 1 else "twice" if n == 2 else f"{n} times"


def _seen(c: Calibration, console: Console) -> list[str]:
    columns = (
        Column("section"),
        Column("n", right=True),
        Column("runs", right=True),
        Column("median", right=True),
        Column("p99", right=True),
        Column("max", right=True),
        Column("where", grows=True),
        Column("first max", right=True),
        Column("alpha", right=True),
    )
    rows = []
    for s in c.sections:
        d, first = s.statistics.durations, s.statistics.first
        n = f"{d.events:,}"
        rows.append(
            [
                plain(s.name),
                console.styled(n, "yellow") if s.has_too_few else n,
                str(s.runs),
                _time(d.median_s),
                _time(d.quantile_s(0.99) if d.n else math.nan),
                _time(d.max_s),
                _where(s),
                _time(first.max_s),
                "-" if math.isnan(s.limit.alpha) else f"{s.limit.alpha:.1f}",
            ]
        )
    return console.table(columns, rows)


def _where(s: Section) -> str:
    largest = s.statistics.durations.largest
    if not largest:
        return "-"
    worst = largest[0]
    step = "" if worst.step is None else f", step {worst.step}"
    return "-" if worst.rank is None else f"rank {worst.rank}{step}"


def _limits(c: Calibration, console: Console) -> list[str]:
    columns = (
        Column("section"),
        Column("soft", right=True),
        Column("hard", right=True),
        Column("first", right=True),
        Column("hard if 2n", right=True),
        Column("why", grows=True),
    )
    rows = [
        [
            plain(s.name),
            _time(s.limit.soft_s) if s.limit.soft_s < s.limit.hard_s else "-",
            console.styled(_time(s.limit.hard_s), "bold"),
            _time(s.limit.first_s) if s.statistics.first.n else "-",
            _time(s.doubled.hard_s),
            s.limit.why,
        ]
        for s in c.sections
    ]
    return console.table(columns, rows)


def _compared(c: Calibration, console: Console) -> list[str]:
    columns = (
        Column("section"),
        Column("rule", grows=True),
        Column("limit", right=True),
        Column("fired", right=True),
        Column("live", right=True),
        Column("cost", right=True),
        Column("false/30d", right=True),
        Column("lost/day", right=True),
    )
    rows = []
    for s in c.sections:
        for i, w in enumerate(c.weights[s.name]):
            fired = str(w.fired) + (f"+{w.looked} looks" if w.looked else "")
            rows.append(
                [
                    plain(s.name) if i == 0 else "",
                    w.candidate.name,
                    _time(w.candidate.hard_s),
                    console.styled(fired, "red") if w.fired else fired,
                    "-" if w.fired_live is None else str(w.fired_live),
                    _time(w.cost_s),
                    "-" if w.needless_per_30_days is None else _count(w.needless_per_30_days),
                    "-" if w.lost_s_per_day is None else f"{w.lost_s_per_day / 60:.1f}m",
                ]
            )
    legend = (
        "fired: passes of these runs that would have been stopped in vain; live: the same, had the limit been made "
        "anew all along; cost: of these, and of waiting for the hangs there were; false, lost: expected restarts in "
        "vain and minutes lost, if all hangs were in this section."
    )
    return [*console.table(columns, rows), *console.wrapped(legend, 0, None, "dim")]


def _notes(c: Calibration, console: Console) -> list[str]:
    texts = list(c.notes)
    if c.outside_share is not None:
        share = f"{c.outside_share:.1%} of the time between steps was outside of all sections"
        is_covered = all(s.name != OUT_OF_SECTION for s in c.sections)
        texts.insert(0, share + ("; the limit of step covers it" if is_covered else ""))
    for name, n in c.live.items():
        if n.soft_alarms or n.hard_alarms or n.soft_replayed or n.hard_replayed:
            texts.append(
                f"{plain(name)}: while the runs went on, their own limits asked for {n.soft_alarms} looks and acted "
                f"{n.hard_alarms} times ({n.in_hangs} of these in hangs); by the journals {n.soft_replayed} and "
                f"{n.hard_replayed} passes that ended were beyond them"
            )
    stays = "stays, and acts only together with evidence"
    for name in c.never_seen:
        kept = _time(limit_s(Limits(), name))
        texts.append(f"{plain(name)} was never seen: the launcher's own limit of {kept} {stays}")
    for s in (s for s in c.sections if not is_written(s)):
        kept, times = _time(limit_s(Limits(), s.name)), s.statistics.durations.events
        texts.append(f"{plain(s.name)} comes once a start, {times} so far: the launcher's own limit of {kept} {stays}")
    if not texts:
        return []
    lines = _heading("notes", console)
    for text in texts:
        lines += console.wrapped(text, 2, "- ")
    return lines


def _heading(text: str, console: Console) -> list[str]:
    return ["", console.styled(text, "bold")]


def _time(seconds: float | None) -> str:
    if seconds is None or math.isnan(seconds):
        return "-"
    if math.isinf(seconds):
        return "never"
    return f"{seconds * 1e3:.0f}ms" if 0 < seconds < 0.0995 else duration(seconds)


def _count(value: float) -> str:
    return "0" if value < 0.005 else f"{value:.2f}" if value < 9.95 else f"{value:,.0f}"


def _to_json(c: Calibration, written: Path | None) -> dict[str, Any]:
    return {
        "schema": CALIBRATION_SCHEMA,
        "runs": [run.name for run in c.runs],
        "runs_counted": list(c.earlier.history.runs),
        "world_size": c.world_size,
        "configuration": c.configuration,
        "observed_s": round(c.observed_s, 3),
        "restart_s": c.costs.restart_s,
        "restarts_measured": c.earlier.restarts,
        "hangs_per_day": c.costs.hangs_per_day,
        "hangs_seen": [h for run in c.runs for h in run.hangs],
        "outside_sections_share": c.outside_share,
        "sections": [_section_json(s, c.weights[s.name], c.live.get(s.name)) for s in c.sections],
        "never_seen": list(c.never_seen),
        "too_few": c.too_few,
        "notes": list(c.notes),
        "flags": flags_of(c.sections),
        "written": None if written is None else str(written),
    }


def _section_json(s: Section, weights: Sequence[Weight], live: Live | None) -> dict[str, Any]:
    d, first = s.statistics.durations, s.statistics.first
    largest = d.largest[0] if d.largest else None
    return {
        "section": s.name,
        "n": d.events,
        "n_weighted": _number(s.statistics.n),
        "runs": s.runs,
        "median_s": _number(d.median_s),
        "p99_s": _number(d.quantile_s(0.99)) if d.n else None,
        "max_s": _number(d.max_s),
        "max_rank": None if largest is None else largest.rank,
        "max_step": None if largest is None else largest.step,
        "max_run": None if largest is None else largest.run,
        "first_n": first.events,
        "first_max_s": _number(first.max_s),
        "alpha": _number(s.limit.alpha),
        "soft_s": s.limit.soft_s,
        "hard_s": s.limit.hard_s,
        "first_s": s.limit.first_s,
        "basis": s.limit.basis,
        "why": s.limit.why,
        "too_few": s.has_too_few,
        "needed": s.costs.min_events,
        "if_doubled": {"soft_s": s.doubled.soft_s, "hard_s": s.doubled.hard_s},
        "live": live,
        "rules": [
            {
                "rule": w.candidate.name,
                "hard_s": _number(w.candidate.hard_s),
                "soft_s": w.candidate.soft_s,
                "first_s": _number(w.first_s),
                "fired": w.fired,
                "looked": w.looked,
                "fired_live": w.fired_live,
                "cost_s": w.cost_s,
                "needless_per_30_days": w.needless_per_30_days,
                "lost_s_per_day": w.lost_s_per_day,
            }
            for w in weights
        ],
    }


def _number(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None
