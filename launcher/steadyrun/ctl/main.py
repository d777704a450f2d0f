"""Entry point of ``steadyctl``: parses the command line and turns errors into exit codes.

Exit codes: 0 done and well; 1 nothing found, or something is unhealthy; 2 the command line cannot be used.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

from steadyrun.core.errors import ConfigError, SteadyrunError, nearest_name
from steadyrun.core.versions import installed_version
from steadyrun.ctl import (
    calibrate,
    check,
    dashboards,
    doctor,
    incidents,
    inject,
    kernellog,
    postmortem,
    sdc,
    status,
    stragglers,
    top,
    verifyreplicas,
)
from steadyrun.ctl.ckpt import commands as ckpt
from steadyrun.ctl.console import Console

__all__ = ["build_parser", "console_main", "main"]

GROUPS: Final = (
    incidents,
    postmortem,
    status,
    top,
    stragglers,
    sdc,
    verifyreplicas,
    calibrate,
    inject,
    ckpt,
    kernellog,
    check,
    dashboards,
    doctor,
)

DESCRIPTION: Final = """\
Looks at training runs started with steadyrun, live or finished.

RUN is a run folder, or a folder of them (then its latest run is meant); the
default is ./steadyrun, where runs go unless --ft-run-dir says otherwise.
"""

EPILOG: Final = """\
exit codes:
  0  done, and all is well
  1  nothing found, or something is unhealthy
  2  the command line cannot be used
"""


class _Parser(argparse.ArgumentParser):
    """Names the nearest command for a mistyped one."""

    def error(self, message: str) -> Any:
        words = message.split("'")
        if "invalid choice" in message and len(words) > 2:
            known = [w for w in words[3::2] if w != words[1]]
            message = f"there is no command {words[1]!r}{nearest_name(words[1], known)} (known: {', '.join(known)})"
        self.exit(2, f"{self.prog}: {message}\ntry: {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command; the chosen one's function is in ``run``."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="steadyctl", description=DESCRIPTION, epilog=EPILOG, formatter_class=formatter)
    parser.add_argument(
        "--version", action="version", version=f"steadyctl {installed_version('steadyrun') or '(not installed)'}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for group in GROUPS:
        group.register(commands)
    return parser


def main(
    argv: Sequence[str],
    out: TextIO | None = None,
    err: TextIO | None = None,
    env: Mapping[str, str] | None = None,
    width: int | None = None,
) -> int:
    """Run one command; returns the exit code."""
    out, err = out or sys.stdout, err or sys.stderr
    try:
        args = build_parser().parse_args(list(argv))
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 2
    console = Console(out, env, width)
    try:
        code: int = args.run(args, console)
        out.flush()
        return code
    except ConfigError as e:
        err.write(f"steadyctl: {e}\n")
        return 2
    except SteadyrunError as e:
        if getattr(args, "json", False):
            console.json({"schema": "steadyrun.error/1", "error": str(e)})
        err.write(f"steadyctl: {e}\n")
        return 1


def console_main() -> None:
    """What the ``steadyctl`` script calls."""
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        # the reader (head, less) has left; keep Python from complaining at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)


if __name__ == "__main__":
    console_main()
