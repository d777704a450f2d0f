"""Entry points: ``console_main`` behind the command, ``main`` and ``run`` for programs that start jobs from Python."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from steadyrun.core.classes import ExitClass
from steadyrun.core.errors import ConfigError, SteadyrunError
from steadyrun.core.options import Resolved
from steadyrun.launcher.cli import format_config, get_args_parser, resolve_args
from steadyrun.launcher.signals import FORWARDED

if TYPE_CHECKING:
    from steadyrun.launcher.elastic import RanksFailedError

__all__ = ["console_main", "main", "parse_args", "run"]

TRACEBACK_LINES: Final = 12
TORCHRUN_FAILED: Final = 1


# -- for programs ----------------------------------------------------------------------------------------------------
def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as ``run`` takes it. Exits with 2 and a line on stderr when it cannot be used."""
    return get_args_parser().parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """What ``torch.distributed.run.main`` does.

    Args:
        args: the command line without the program's name; None: that of this process.

    Raises:
        ChildFailedError: a rank failed; the first error file was copied to TORCHELASTIC_ERROR_FILE.
        ConfigError: an option has a value that cannot be used.
        SignalException: a signal to this process ended the run.
        RunEndedError: the run failed and no rank of this node is to blame.
    """
    from steadyrun.launcher.elastic import record

    def recorded() -> None:
        run(parse_args(args))

    record(recorded)()


def run(args: argparse.Namespace) -> None:
    """What ``torch.distributed.run.run`` does, for a namespace of our parser or of torch's. Raises as ``main``."""
    _require_linux()
    resolved = resolve_args(args, os.environ)
    if resolved.settings.print_config != "off":
        print(format_config(resolved))
        return
    _start(args, resolved)


def _start(args: argparse.Namespace, resolved: Resolved, launched: threading.Event | None = None) -> None:
    """*launched* is set when torch has accepted the arguments."""
    from torch.distributed.run import run as torch_run

    from steadyrun.launcher.elastic import launched_by_us

    _refuse_shadowing(args.training_script, bool(getattr(args, "module", False)))
    _configure_logging(resolved.settings.log_level, resolved.settings.quiet)
    if not resolved.settings.quiet:
        for note in resolved.notes:
            _say(f"steadyrun: {note}")
    with launched_by_us(resolved, launched):
        torch_run(args)  # type: ignore[no-untyped-call]


# -- for the shell ---------------------------------------------------------------------------------------------------
def console_main() -> int:
    """Run the command line of this process.

    Returns:
        The exit code: 0, 2 for a command line that cannot be used, else the class of the failure (``ExitClass``), or
        1 under ``--ft-exit-codes=torchrun``.
    """
    # A scheduler's warning during the import must not end the process; SignalInbox takes over before the first rank.
    early = [s for s in FORWARDED if signal.getsignal(s) is signal.SIG_DFL]
    for signum in early:
        signal.signal(signum, signal.SIG_IGN)
    with _quiet_cpp_log():
        import torch.distributed.run  # noqa: F401  # the slow import, and the one that reads the variable

    try:
        _require_linux()
        args = parse_args()
        resolved = resolve_args(args, os.environ)
        if resolved.settings.print_config != "off":
            print(format_config(resolved))
            return ExitClass.OK
        return _run_job(args, resolved, early)
    except ConfigError as e:
        _say(f"steadyrun: error: {e}")
        return ExitClass.USAGE


def _run_job(args: argparse.Namespace, resolved: Resolved, early: Sequence[signal.Signals]) -> int:
    from steadyrun.launcher.elastic import RanksFailedError, RunEndedError, SignalException, record

    launched = threading.Event()
    if getattr(args, "run_path", False):
        for signum in early:  # ranks of torch's own loop would inherit that they are ignored
            signal.signal(signum, signal.SIG_DFL)

    def recorded() -> None:
        try:
            _start(args, resolved, launched)
        except (ValueError, AssertionError, RuntimeError) as e:
            if launched.is_set():
                raise
            raise ConfigError(f"torch cannot use the arguments: {type(e).__name__}: {e}") from e

    try:
        record(recorded)()
    except RanksFailedError as e:
        _say("\n".join(failure_lines(e)))
        exit_class = _class_of(e)
    except RunEndedError as e:
        _say(f"steadyrun: the run ended: {e}")
        exit_class = e.outcome.exit_class
    except SignalException as e:
        _say(f"steadyrun: ended by {e.sigval.name}")
        exit_class = ExitClass.PREEMPTED if e.sigval is signal.SIGTERM else ExitClass.INTERNAL
    except ConfigError:
        raise
    except SteadyrunError as e:
        _say(f"steadyrun: {e}")
        exit_class = ExitClass.INTERNAL
    else:
        return ExitClass.OK
    return exit_class if resolved.settings.exit_codes == "class" else TORCHRUN_FAILED


def _class_of(error: RanksFailedError) -> ExitClass:
    if error.outcome is not None:
        return error.outcome.exit_class
    _, failure = error.get_first_failure()
    return ExitClass.DEAD_PROCESS if failure.exitcode < 0 else ExitClass.PROGRAM_ERROR


# -- what a person is told -------------------------------------------------------------------------------------------
def failure_lines(error: RanksFailedError) -> list[str]:
    """A short block: which rank failed first and how, where its error file is, and where to read on."""
    rank, first = error.get_first_failure()
    reason = error.outcome.reason if error.outcome is not None else ""
    ours = {r for r, f in error.outcome.failures.items() if f.by_us} if error.outcome is not None else set()
    lines = [f"steadyrun: {error.name} failed" + (f": {reason}" if reason else "")]
    ending = _ending(first.exitcode, rank in ours)
    lines.append(f"  first: rank {rank} (local rank {first.local_rank}, pid {first.pid}) {ending}")
    lines.append(f"  time: {datetime.fromtimestamp(first.timestamp).isoformat(sep=' ')}")
    if os.path.isfile(first.error_file):
        lines.append(f"  error file: {first.error_file}")
    if error.run_folder is None:  # nobody has told the cause yet
        said = _recorded_traceback(first.message)
        lines.extend(["  traceback of the rank:", *(f"    {line}" for line in said)] if said else [])
    others = [f"rank {r} {_ending(f.exitcode, r in ours)}" for r, f in sorted(error.failures.items()) if r != rank]
    if others:
        lines.append(
            f"  after it: {'; '.join(others[:8])}" + (f"; and {len(others) - 8} more" if len(others) > 8 else "")
        )
    if error.run_folder is not None:
        lines.append(f"  more: steadyctl incidents {error.run_folder}")
    return lines


def _ending(exitcode: int, by_us: bool) -> str:
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"was ended by steadyrun with {name}" if by_us else f"was ended by {name}"


def _recorded_traceback(message: object) -> list[str]:
    """What ``@record`` wrote in the rank."""
    if not isinstance(message, Mapping):
        return []
    extra = message.get("extraInfo")
    text = (extra.get("py_callstack") if isinstance(extra, Mapping) else None) or message.get("message", "")
    return str(text).rstrip().splitlines()[-TRACEBACK_LINES:]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- the process -----------------------------------------------------------------------------------------------------
def _require_linux() -> None:
    if sys.platform != "linux":
        raise ConfigError(f"steadyrun runs on Linux only, this is {sys.platform}; use torchrun here")


def _refuse_shadowing(script: str, is_module: bool) -> None:
    """A regular package of our name on the path hides us from the ranks: Python takes it before a namespace."""
    folder = Path.cwd() if is_module else Path(script).resolve().parent
    for entry in (str(folder), *sys.path):
        for candidate in (Path(entry, "steadyrun", "__init__.py"), Path(entry, "steadyrun.py")):
            if candidate.is_file():
                raise ConfigError(
                    f"{candidate} hides the installed steadyrun from the ranks: Python takes it for the package of "
                    f"that name; rename it"
                )


@contextmanager
def _quiet_cpp_log() -> Iterator[None]:
    """torch prints a C++ trace for each store connection that ends while somebody waits on it, which here is how a wait
    ends. The variable is read once, at the import; ranks must not inherit it."""
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "ERROR"
    try:
        yield
    finally:
        del os.environ[name]


def _configure_logging(level: str, quiet: bool) -> None:
    """Log events as lines on stderr; left alone where the embedding program has set structlog up."""
    import structlog

    if structlog.is_configured():
        return
    numbers = {"debug": 10, "info": 20, "warning": 30, "error": 40}
    structlog.configure(
        processors=[structlog.processors.add_log_level, _as_line],
        wrapper_class=structlog.make_filtering_bound_logger(max(numbers[level], 30 if quiet else 0)),
        logger_factory=structlog.PrintLoggerFactory(_stderr()),
        cache_logger_on_first_use=False,
    )


def _stderr() -> TextIO:
    return sys.stderr


def _as_line(_logger: Any, _method: str, event: Any) -> str:
    """``steadyrun: warning: rank_overdue rank=3 late_s=41.2``."""
    fields = dict(event)
    level, name = fields.pop("level", "info"), fields.pop("event", "")
    shown = "" if level == "info" else f"{level}: "
    return " ".join((f"steadyrun: {shown}{name}", *(f"{k}={v}" for k, v in fields.items())))


class _CallableModule(types.ModuleType):
    """``steadyrun.launcher.main(args)``: importing a submodule binds its name in the package, over the function's."""

    def __call__(self, args: Sequence[str] | None = None) -> None:
        main(args)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)  # as the target of a multiprocessing.Process


sys.modules[__name__].__class__ = _CallableModule
