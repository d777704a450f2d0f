"""``steadyctl doctor``: is this machine ready? Each line says what is so, and what to do where it is not."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from steadyrun.ctl.checks import leftovers, machine, network, software
from steadyrun.ctl.checks.check import Check, Host, Level
from steadyrun.ctl.console import Console, duration, plain

__all__ = ["register"]

SCHEMA: Final = "steadyrun.doctor/1"
GROUPS: Final[Sequence[tuple[str, Callable[[Host], list[Check]]]]] = (
    ("software", software.checks),
    ("machine", machine.checks),
    ("network", network.checks),
    ("leftovers", leftovers.checks),
)


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine",
        description=(
            "Checks this machine: Python, torch and its seams, rights, shared memory,\n"
            "cgroups, ports and names, NVML, limits, leftovers. Each line that is not\n"
            "ok says what to do. Takes some seconds, most of them to import torch."
        ),
        epilog="examples:\n  steadyctl doctor\n  steadyctl doctor --json | jq '.checks[] | select(.level != \"ok\")'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fix", action="store_true", help="remove what dead runs left in /dev/shm and cgroups")
    parser.add_argument("--json", action="store_true", help=f"print {SCHEMA}")
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace, console: Console) -> int:
    """0 where nothing fails (warnings included); 1 otherwise."""
    host = Host(env=dict(os.environ))
    begun_s = time.monotonic()
    if args.fix:
        for text in leftovers.fix(host):
            if not args.json:
                console.print(f"removed {text}")
    found: list[tuple[str, Check]] = []
    for group, checks in GROUPS:
        if not args.json:
            console.print(console.styled(group, "bold"))
        for check in checks(host):
            found.append((group, check))
            if not args.json:
                for line in render(check, console):
                    console.print(line)
                console.out.flush()  # one by one: some take seconds
    count = {level: sum(c.level is level for _, c in found) for level in Level}
    if args.json:
        rows = [{"group": g, **_json(c)} for g, c in found]
        console.json({"schema": SCHEMA, "ok": not count[Level.FAIL], "checks": rows})
    else:
        text = f"{count[Level.OK]} ok, {count[Level.WARN]} warnings, {count[Level.FAIL]} to repair"
        console.print(f"\n{text} ({duration(time.monotonic() - begun_s)})")
    return 1 if count[Level.FAIL] else 0


def _json(check: Check) -> dict[str, Any]:
    return {"name": check.name, "level": check.level.value, "text": check.text, "advice": check.advice or None}


def render(check: Check, console: Console) -> list[str]:
    """The line of one check, and its advice below it."""
    style = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}[check.level]
    label = f"  {check.level.value:<6}{check.name:<15}"
    first, *more = console.wrapped(plain(check.text), len(label), label)
    mark = f"  {check.level.value:<6}"
    lines = [
        "  "
        + console.styled(check.level.value, style)
        + " " * (len(mark) - 2 - len(check.level.value))
        + first[len(mark) :]
    ]
    lines += more
    if check.advice:
        pad = " " * len(label)
        lines += console.wrapped(plain(check.advice), len(label) + 3, f"{pad}-> ")
    return lines
