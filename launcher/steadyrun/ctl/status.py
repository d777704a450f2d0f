"""``steadyctl status``: the ranks of a live run as they are now, or how a finished run ended."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from typing import Any, Final

from steadyrun.core.classes import ExitClass
from steadyrun.core.runfolder import RunFolder
from steadyrun.ctl.console import Column, Console, ago, clock_time, duration, plain, size
from steadyrun.ctl.runs import open_run
from steadyrun.ctl.snapshot import NodeLook, RankLook, RunLook, is_overdue, look_at, running_ranks

__all__ = ["register", "render", "screen"]

SCHEMA: Final = "steadyrun.status/1"
REFRESH_S: Final = 1.0
MOST_SCORES: Final = 6

_ENTER: Final = "\x1b[?1049h\x1b[?25l"  # alternate screen, cursor hidden
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_CLEAR_LINE: Final = "\x1b[K"
_CLEAR_BELOW: Final = "\x1b[J"


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "status",
        help="show what the ranks of a run are doing",
        description=(
            "Shows each rank's step, its age and rate, and the sections it is in, with\n"
            "their ages. In a terminal it refreshes every second; q leaves."
        ),
        epilog="examples:\n  steadyctl status\n  steadyctl status /data/runs --once\n  steadyctl status --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "where", nargs="?", metavar="RUN", help="run folder, or a folder of runs (default: ./steadyrun)"
    )
    parser.add_argument("--once", action="store_true", help="print once and leave")
    parser.add_argument("--json", action="store_true", help=f"print {SCHEMA} once and leave")
    parser.set_defaults(run=run_status)


def run_status(args: argparse.Namespace, console: Console) -> int:
    """0: live and well, or ended with 0; 1 otherwise."""
    run = open_run(args.where)
    look = look_at(run)
    if args.json:
        console.json(look.to_json())
    elif args.once or not console.is_terminal or look.state != "live" or not sys.stdin.isatty():
        for line in render(look, console, time.time()):
            console.print(line)
    else:
        look = _refresh(run, look, console)
    return 0 if _is_well(look) else 1


def _is_well(look: RunLook) -> bool:
    if look.state == "ended":
        return look.ending is not None and not look.ending.get("exit_class")
    return look.state == "live" and all(n.agent == "alive" for n in look.nodes)


# -- in a terminal ------------------------------------------------------------------------------------
def _refresh(run: RunFolder, look: RunLook, console: Console) -> RunLook:
    """Redraw every second until q, Ctrl-C or the end of the run; the last picture stays on the screen."""
    with screen(console), contextlib.suppress(KeyboardInterrupt):
        while look.state == "live":
            lines = [console.cut(t) for t in render(look, console, time.time())[: console.height - 2]]
            lines.append(console.styled("q leaves", "dim"))
            console.out.write(_HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW)
            console.out.flush()
            if _key_within(REFRESH_S) in ("q", "Q", "\x03", "\x1b"):
                break
            look = look_at(run)
    for line in render(look, console, time.time()):
        console.print(line)
    return look


@contextlib.contextmanager
def screen(console: Console) -> Iterator[None]:
    """The terminal's other screen, keys come one by one; all is as before at the end."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        console.out.write(_ENTER)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        console.out.write(_LEAVE)
        console.out.flush()


def _key_within(limit_s: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], limit_s)
    return os.read(sys.stdin.fileno(), 16).decode(errors="replace")[:1] or "q" if ready else ""


# -- the picture ------------------------------------------------------------------------------------
def render(look: RunLook, console: Console, now_unix_s: float) -> list[str]:
    """Lines that fit the console's width."""
    lines = _head(look, console, now_unix_s)
    if look.state == "live":
        for node in look.nodes:
            lines += ["", *_node(node, console, now_unix_s)]
        lines += ["", *_ranks(look, console)]
    else:
        lines += _ending(look, console)
    if look.incidents:
        lines += ["", *_incidents(look, console, now_unix_s)]
    if look.scores:
        lines += ["", *_scores(look, console)]
    return lines


def _head(look: RunLook, console: Console, now_unix_s: float) -> list[str]:
    colour = {"live": "green", "ended": "bold", "lost": "red"}[look.state]
    until = look.ended_at_unix_s if look.ended_at_unix_s is not None else now_unix_s
    parts = [console.styled(look.state, colour)]
    if look.started_at_unix_s is not None and look.state != "lost":
        word = "for" if look.state == "live" else "after"
        parts[0] += f" {word} {duration(until - look.started_at_unix_s)}"
    if look.world_size:
        parts.append(_count(look.world_size, "rank"))
    if look.state == "live" and look.nodes:
        parts.append(f"attempt {max(n.attempt for n in look.nodes)}")
    parts.append(_count(look.restarts, "restart"))
    name = plain(look.run_id)
    name = name if len(name) <= 24 else f"{name[:8]}…"  # a generated one; the folder's name has it in full
    lines = [console.styled(name, "bold") + "  " + ", ".join(parts)]
    lines.append(console.styled(f"{look.run}"[: console.width], "dim"))
    if look.command:
        lines.append(console.styled(plain(look.command)[: console.width], "dim"))
    return lines


def _count(number: int, noun: str) -> str:
    return f"no {noun}" if not number else f"1 {noun}" if number == 1 else f"{number} {noun}s"


def _node(node: NodeLook, console: Console, now_unix_s: float) -> list[str]:
    match node.agent:
        case "gone":
            agent = console.styled("agent is gone", "red") + f" (was pid {node.agent_pid}), or not on this machine"
        case "stopped":
            agent = console.styled("agent is stopped", "red") + f" (pid {node.agent_pid}); kill -CONT wakes it"
        case "silent":
            age = duration(node.agent_beat_age_s)
            agent = console.styled(f"agent has not looked for {age}", "red") + f" (pid {node.agent_pid})"
        case _:
            agent = f"agent {node.agent_pid}, {plain(node.phase)}"
    ready = [s for s in node.standbys if s.ready]
    warm = ""
    if node.standbys:
        memory = max((s.memory_bytes for s in node.standbys), default=0)
        each = f", {size(memory)} each" if memory else ""
        warm = f"; {len(ready)} of {len(node.standbys)} standbys ready{each}"
    lines = [f"node {plain(node.node)}: {agent}{warm}"]
    if node.metrics:
        lines.append(console.styled(f"  metrics: http://{plain(node.metrics)}/metrics", "dim"))
    if node.problem:
        lines += console.wrapped(f"  {plain(node.problem)}", 2)
    if node.agent == "gone" and node.written_at_unix_s:
        lines.append(f"  last heard of {ago(node.written_at_unix_s, now_unix_s)}; what follows is from then")
    return lines


def _ranks(look: RunLook, console: Console) -> list[str]:
    columns: tuple[Column, ...] = (
        Column("rank", right=True),
        Column("pid", right=True),
        Column("phase"),
        Column("step", right=True),
        Column("ago", right=True),
        Column("step/s", right=True),
        Column("beat", right=True),
        Column("in", grows=True),
    )
    limits = {n.node: n.limits for n in look.nodes}
    ranks = running_ranks(look.nodes)
    shown, hidden = _worth_showing(ranks, max(console.height - 14, 8))
    rows = [
        [
            str(r.rank),
            str(r.pid),
            _phase(r, console),
            "-" if r.step is None else str(r.step),
            _step_age(r, limits.get(r.node) or {}, console),
            "-" if not r.step_time_s else _rate(1.0 / r.step_time_s),
            duration(r.beat_age_s),
            _where(r, limits.get(r.node) or {}, console),
        ]
        for r in shown
    ]
    if all(r.beat_age_s is None for r in ranks):  # most scripts never call beat()
        columns = columns[:6] + columns[7:]
        rows = [row[:6] + row[7:] for row in rows]
    lines = console.table(columns, rows)
    if hidden:
        lines.append(
            console.styled(f"{hidden} more ranks, less late than these (steadyctl status --once shows all)", "dim")
        )
    if not ranks:
        lines = [console.styled("no rank has been started yet", "dim")]
    return lines


def _worth_showing(ranks: Sequence[RankLook], room: int) -> tuple[list[RankLook], int]:
    """All ranks where they fit; else those that have been without progress for longest, in rank order."""
    if len(ranks) <= room:
        return list(ranks), 0
    late = sorted(ranks, key=lambda r: (not r.note, -(r.progress_age_s or 0.0)))[:room]
    return sorted(late, key=lambda r: r.rank), len(ranks) - room


def _phase(rank: RankLook, console: Console) -> str:
    if rank.process in ("T", "t"):
        return console.styled("stopped", "red")
    if rank.process == "D":
        return console.styled("state D", "yellow")
    style = {"running": "green", "exited": "dim", "stuck": "red", "killing": "red", "dumping": "yellow"}
    return console.styled(rank.phase, style[rank.phase]) if rank.phase in style else plain(rank.phase)


def _step_age(rank: RankLook, limits: Any, console: Console) -> str:
    text = duration(rank.step_age_s)
    limit_s = limits.get("step_s")
    if rank.step_age_s is None or not isinstance(limit_s, (int, float)):
        return text
    if rank.step_age_s > limit_s:
        return console.styled(text, "red")
    return console.styled(text, "yellow") if rank.step_age_s > limit_s / 2 else text


def _rate(rate_hz: float) -> str:
    return f"{rate_hz:.2f}" if rate_hz < 10 else f"{rate_hz:.1f}" if rate_hz < 100 else f"{rate_hz:.0f}"


def _where(rank: RankLook, limits: Any, console: Console) -> str:
    parts: list[str] = []
    for section in rank.sections:
        text = f"{plain(section.name)} {duration(section.age_s)}"
        if section.lane:
            text = f"[thread] {text}"
        parts.append(console.styled(text, "red") if is_overdue(rank, section, limits) else text)
    where = " > ".join(parts)
    if rank.note:
        where = f"{where}; {rank.note}" if where else rank.note
    return where or "-"


def _ending(look: RunLook, console: Console) -> list[str]:
    lines: list[str] = [""]
    if look.state == "lost":
        text = (
            "No agent of this run lives on this machine, and none wrote that the run ended: it was killed, the "
            "machine went down, or it runs elsewhere on a shared file system."
        )
        lines += console.wrapped(text, 0, None, "red")
    elif look.ending is not None:
        code = int(look.ending.get("exit_class") or 0)
        name = ExitClass(code).name.lower() if code in ExitClass._value2member_map_ else "?"
        verdict = console.styled("ended well", "green") if code == 0 else console.styled(f"failed: {name}", "red")
        lines.append(f"{verdict} at {clock_time(look.ended_at_unix_s, with_date=True)}, exit code {code}")
        if look.ending.get("reason"):
            lines += console.wrapped(plain(look.ending["reason"]), 2, "  ")
    if look.attempts:
        lines.append(f"{_count(look.attempts, 'attempt')}, {_count(len(look.incidents), 'incident')}")
    if look.last_steps:
        steps = sorted(set(look.last_steps.values()))
        spread = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        lines.append(f"last step seen: {spread}")
    return lines


def _incidents(look: RunLook, console: Console, now_unix_s: float) -> list[str]:
    lines = [console.styled("incidents", "bold")]
    for told in look.incidents[-3:]:
        ranks = ",".join(map(str, told["ranks"])) or "-"
        head = f"{ago(told['detected_at_unix_s'], now_unix_s)}, {told['class']}, rank {ranks}, "
        text = plain(f"{head}{told['action']}: {told['summary']}")
        lines += console.wrapped(text, 6, f"{told['incident']:>4}  ")[:3]
    if len(look.incidents) > 3:
        lines.append(console.styled(f"  and {len(look.incidents) - 3} earlier: steadyctl incidents", "dim"))
    return lines


def _scores(look: RunLook, console: Console) -> list[str]:
    """Nodes that faults were blamed on, in this run and in earlier ones."""
    lines = [console.styled("nodes that failed before", "bold")]
    for told in look.scores[:MOST_SCORES]:
        lines += console.wrapped(plain(told.sentence()), 4, "  ", *(("red",) if told.is_over else ()))
    if len(look.scores) > MOST_SCORES:
        lines.append(console.styled(f"  and {len(look.scores) - MOST_SCORES} more: steadyctl status --json", "dim"))
    return lines
