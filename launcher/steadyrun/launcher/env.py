"""What a rank is started with: its command line, its environment and where its output goes, as torchrun has them.

The in-rank side gets in through PYTHONPATH: a folder that holds only our ``sitecustomize.py`` is put in front, Python
imports it before the script, and it takes itself out again. So the command line, ``sys.argv`` and ``__main__`` are what
they are under torchrun.
"""

from __future__ import annotations

import json
import os
import re
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from steadyrun.node.ports import Membership, SpawnSpec
from steadyrun.node.sweep import MARKER_NAME, run_marker

__all__ = [
    "Destination",
    "JobFacts",
    "LogRules",
    "LogsDest",
    "LogsSpecs",
    "RankCommand",
    "RecorderRules",
    "RoleRank",
    "TorchRankLauncher",
    "interpreter_flags",
    "recorder_variables",
    "without_in_rank_side",
]

SETUP: Final = "STEADYRUN_SETUP"
STANDBY: Final = "STEADYRUN_STANDBY"
ORIGINAL_PYTHONPATH: Final = "STEADYRUN_PYTHONPATH"
OWN_NAMES: Final = (SETUP, STANDBY, ORIGINAL_PYTHONPATH)

# Interpreter options that say how code runs. -E, -I, -P, -s and -S say where code is found: torchrun never hands them
# on, a script beside the launcher would not be found any more, and the in-rank side needs PYTHONPATH.
_FLAGS_KEPT: Final = frozenset("bBdOqRv")
_FLAGS_WITH_VALUE: Final = frozenset("WX")
_FLAGS_KNOWN: Final = frozenset("bBdEhiIOPqRsStuvVx?")


# -- torch's log options, as far as they are used here ---------------------------------------------------------------
class LogsDest(Protocol):
    """``torch.distributed.elastic.multiprocessing.LogsDest``: paths by local rank; an empty path is the console."""

    stdouts: dict[int, str]
    stderrs: dict[int, str]
    tee_stdouts: dict[int, str]
    tee_stderrs: dict[int, str]
    error_files: dict[int, str]
    filtered_stdout: str
    filtered_stderr: str


class LogsSpecs(Protocol):
    """``torch.distributed.elastic.multiprocessing.LogsSpecs``."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders of the attempt that *envs* names, and set TORCHELASTIC_ERROR_FILE in them."""
        ...


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one stream of one rank goes.

    Attributes:
        path: the file, or None for the launcher's own stream.
        follow: copy the file to the launcher's own stream.
        prefix: in front of each line that is copied.
    """

    path: Path | None
    follow: bool = False
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class LogRules:
    """What the log options ask for, beside torch's LogsSpecs.

    Attributes:
        capture_stdout, capture_stderr: streams that torch would leave on the console go to a file of the run folder
            and are copied from there.
        prefix_template: of lines that ``--tee`` copies; None: ``[role + local rank]:``.
    """

    capture_stdout: bool
    capture_stderr: bool
    prefix_template: str | None = None


# -- command line ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RankCommand:
    """How a rank is started, without what differs between ranks.

    Attributes:
        program: ``sys.executable``, the value of PYTHON_EXEC, or the user's own program.
        flags: options of the interpreter, handed on from the launcher's own.
        arguments: everything after them; ``${local_rank}`` stands for the local rank.
        is_python: the program is a Python interpreter, so that the in-rank side can get in.
        can_stand_by: a warm interpreter can take the place of a new one.
    """

    program: str
    flags: tuple[str, ...]
    arguments: tuple[str, ...]
    is_python: bool
    can_stand_by: bool

    @classmethod
    def of(
        cls, entrypoint: str, args: Sequence[object], orig_argv: Sequence[str], environ: Mapping[str, str]
    ) -> RankCommand:
        """From what torch's ``run`` made of the command line."""
        own = entrypoint == sys.executable
        named = entrypoint == environ.get("PYTHON_EXEC") or _is_python_name(entrypoint)
        arguments = tuple(str(a) for a in args)
        return cls(
            program=entrypoint,
            flags=interpreter_flags(orig_argv) if own else (),
            arguments=arguments,
            is_python=own or named,
            can_stand_by=own and bool(_script_in(arguments)),
        )

    @property
    def script(self) -> str:
        """The user's script, module or program."""
        return (_script_in(self.arguments) or self.program) if self.is_python else self.program

    def argv(self, local_rank: int) -> tuple[str, ...]:
        filled = (string.Template(a).safe_substitute(local_rank=local_rank) for a in self.arguments)
        return (self.program, *self.flags, *filled)


def _is_python_name(program: str) -> bool:
    return re.fullmatch(r"python(\d+(\.\d+)?)?", os.path.basename(program)) is not None


def _script_in(arguments: Sequence[str]) -> str:
    """The script or module among an interpreter's arguments; empty for ``-c`` and for none."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "-m":
            return next(rest, "")
        if argument == "-c" or argument == "-":
            return ""
        if not argument.startswith("-"):
            return argument
        if argument in ("-X", "-W"):
            next(rest, None)
    return ""


def interpreter_flags(orig_argv: Sequence[str]) -> tuple[str, ...]:
    """Options the running interpreter was given that ranks should have too (-O, -X, -W and the like).

    Args:
        orig_argv: ``sys.orig_argv``. What PYTHON* variables say is inherited by itself and not repeated.
    """
    out: list[str] = []
    rest = iter(orig_argv[1:])
    for argument in rest:
        if not argument.startswith("-") or argument in ("-", "--"):
            break
        if argument.startswith("--"):
            if argument == "--check-hash-based-pycs":
                out += [argument, next(rest, "default")]
            continue
        for place, letter in enumerate(argument[1:], start=1):
            if letter in _FLAGS_WITH_VALUE:
                out.append(f"-{letter}{argument[place + 1 :] or next(rest, '')}")
                break
            if letter in "cm":
                return tuple(out)
            if letter in _FLAGS_KEPT:
                out.append(f"-{letter}")
            elif letter not in _FLAGS_KNOWN:
                return tuple(out)
    return tuple(out)


# -- environment -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RoleRank:
    """A rank's place among the ranks of its role."""

    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class RecorderRules:
    """How torch's flight recorders are to run.

    Attributes:
        entries: of each recorder's ring.
        has_timing: NCCL's also notes when the device starts an operation. Not by default: two more CUDA events and
            queries for each operation, and only a device that stalls behind others is told better by it.
        torch_version: what the ranks run, as far as the launcher knows: (2, 13).
    """

    entries: int = 2000
    has_timing: bool = False
    torch_version: tuple[int, int] = (2, 8)


def recorder_variables(
    rules: RecorderRules, environ: Mapping[str, str], rank_dir: Path, can_have_pipe: bool
) -> dict[str, str]:
    """The variables that make the recorders run and write to the rank's folder; nothing that *environ* has set.

    Torch renamed some in 2.8 and others in 2.15, takes the new name first, and warns of the old one. One set by either
    name is the user's.
    """
    is_renamed, is_on_timeout_renamed = rules.torch_version >= (2, 8), rules.torch_version >= (2, 15)
    wanted = [
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), is_renamed, str(rules.entries)),
        (
            ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
            is_renamed,
            str(rank_dir / "watchdog_trace_rank_"),
        ),
        (("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"), is_on_timeout_renamed, "1"),
    ]
    if can_have_pipe:
        pipe = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
        wanted.append(((pipe, pipe), True, str(rank_dir / "flight.request_")))
    if rules.has_timing:
        timing = "TORCH_NCCL_ENABLE_TIMING"
        wanted.append(((timing, timing), True, "1"))
    return {
        (new if is_new else old): value
        for (new, old), is_new, value in wanted
        if new not in environ and old not in environ
    }


def can_make_pipes(folder: Path) -> bool:
    """Whether the folder's file system has FIFOs: torch ends a rank whose FIFO it cannot make."""
    probe = folder / f".pipe.{os.getpid()}"
    try:
        os.mkfifo(probe, 0o600)
        probe.unlink()
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What all ranks of this node share.

    Attributes:
        environ: the launcher's own environment, which ranks inherit.
        site_dir: the folder with our sitecustomize.
        recorder: None: the flight recorders are left as torch and the script have them.
    """

    run_id: str
    node: str
    role: str
    local_world_size: int
    max_restarts: int
    use_agent_store: bool
    virtual_local_rank: bool
    environ: Mapping[str, str]
    site_dir: Path
    recorder: RecorderRules | None = None


class TorchRankLauncher:
    """Builds SpawnSpecs with torchrun's conventions; see ``RankLauncher`` in steadyrun.node.loop.

    Used from the loop's thread; ``set_roles`` before the first ``spec_for`` of a membership.

    Args:
        wrap: prefixes a command line for a local rank (``--numa-binding``).
        on_destinations: told where the streams of a new attempt go, before its first rank starts.
        logs: torch's LogsSpecs. Its ``reify`` is called once per attempt, because the shipped one empties the attempt's
            folder each time; attempts are numbered through the job, so no folder is ever used twice.
    """

    def __init__(
        self,
        facts: JobFacts,
        command: RankCommand,
        logs: LogsSpecs,
        rules: LogRules,
        wrap: Callable[[tuple[str, ...], int], tuple[str, ...]],
        on_destinations: Callable[[Mapping[int, tuple[Destination, Destination]], LogsDest], None],
    ) -> None:
        self._facts = facts
        self._command = command
        self._logs = logs
        self._rules = rules
        self._wrap = wrap
        self._on_destinations = on_destinations
        self._roles: Mapping[int, RoleRank] = {}
        self._planned: int | None = None
        self._envs: dict[int, dict[str, str]] = {}
        self._recorders: dict[int, dict[str, str]] = {}
        self._destinations: dict[int, tuple[Destination, Destination]] = {}
        self._error_files: dict[tuple[int, int], str] = {}

    def set_roles(self, roles: Mapping[int, RoleRank]) -> None:
        """By local rank, after each rendezvous."""
        self._roles = dict(roles)

    # -- RankLauncher ------------------------------------------------------------------------------------------------
    def spec_for(
        self,
        rank: int,
        local_rank: int,
        attempt: int,
        membership: Membership,
        master_addr: str,
        master_port: int,
        setup: Mapping[str, Any],
    ) -> SpawnSpec:
        if self._planned != attempt:
            self._plan(attempt, membership, master_addr, master_port, Path(setup["rank_dir"]).parent)
        env = {**self._inherited(), **self._envs[local_rank]}
        if self._command.is_python:
            env = self._with_in_rank_side(env)
            env[SETUP] = json.dumps(self._with_recorder(setup))
        stdout, stderr = self._destinations[local_rank]
        return SpawnSpec(
            rank=rank,
            local_rank=local_rank,
            attempt=attempt,
            argv=self._wrap(self._command.argv(local_rank), local_rank),
            env=env,
            stdout=stdout.path,
            stderr=stderr.path,
        )

    def standby_spec(self, local_rank: int, standby: Mapping[str, Any]) -> SpawnSpec:
        env = self._with_in_rank_side({**self._inherited(), **self._local_rank_env(local_rank)})
        env[STANDBY] = json.dumps(standby)
        return SpawnSpec(
            rank=-1,
            local_rank=local_rank,
            attempt=-1,
            argv=self._wrap(self._command.argv(local_rank), local_rank),
            env=env,
        )

    def orders_for(self, spec: SpawnSpec, setup: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "env": without_in_rank_side(spec.env),
            "setup": self._with_recorder(setup),
            "stdout": None if spec.stdout is None else str(spec.stdout),
            "stderr": None if spec.stderr is None else str(spec.stderr),
            "cwd": os.getcwd(),
        }

    def error_file(self, attempt: int, local_rank: int) -> str:
        """Where the rank's ``@record`` writes; empty where logs are switched off."""
        return self._error_files.get((attempt, local_rank), "")

    # -- one attempt -------------------------------------------------------------------------------------------------
    def _plan(
        self, attempt: int, membership: Membership, master_addr: str, master_port: int, attempt_dir: Path
    ) -> None:
        """Environments and log files of all local ranks of the attempt: torch's LogsSpecs wants them together."""
        envs = {
            local_rank: self._rank_env(rank, local_rank, attempt, membership, master_addr, master_port)
            for local_rank, rank in enumerate(membership.ranks)
        }
        dest = self._logs.reify(envs)
        self._recorders = {}
        if self._facts.recorder is not None:
            pipes = can_make_pipes(attempt_dir)
            for local_rank, rank in enumerate(membership.ranks):
                self._recorders[rank] = recorder_variables(
                    self._facts.recorder, self._facts.environ, attempt_dir / f"rank_{rank}", pipes
                )
                envs[local_rank].update(self._recorders[rank])
        self._envs = envs
        self._destinations = {}
        for local_rank, rank in enumerate(membership.ranks):
            rank_dir = attempt_dir / f"rank_{rank}"
            prefix = self._prefix(rank, local_rank)
            own_out = rank_dir / "stdout.log" if self._rules.capture_stdout else None
            own_err = rank_dir / "stderr.log" if self._rules.capture_stderr else None
            self._destinations[local_rank] = (
                _destination(dest.stdouts[local_rank], local_rank in dest.tee_stdouts, prefix, own_out),
                _destination(dest.stderrs[local_rank], local_rank in dest.tee_stderrs, prefix, own_err),
            )
            self._error_files[attempt, local_rank] = dest.error_files.get(local_rank, "")
        self._planned = attempt
        self._on_destinations(self._destinations, dest)

    def _with_recorder(self, setup: Mapping[str, Any]) -> dict[str, Any]:
        """What the launcher has set itself, so that the rank can tell it from what a framework sets."""
        own = self._recorders.get(setup.get("rank", -1))
        return dict(setup) if own is None else {**setup, "flight": own}

    def _prefix(self, rank: int, local_rank: int) -> str:
        role = self._facts.role
        if self._rules.prefix_template is None:
            return f"[{role}{local_rank}]:"
        return string.Template(self._rules.prefix_template).safe_substitute(
            role_name=role, rank=rank, local_rank=local_rank
        )

    def _rank_env(
        self, rank: int, local_rank: int, attempt: int, membership: Membership, master_addr: str, master_port: int
    ) -> dict[str, str]:
        facts = self._facts
        role = self._roles[local_rank]
        env = {
            "RANK": str(rank),
            "GROUP_RANK": str(membership.group_rank),
            "ROLE_RANK": str(role.rank),
            "ROLE_NAME": facts.role,
            "LOCAL_WORLD_SIZE": str(facts.local_world_size),
            "WORLD_SIZE": str(membership.world_size),
            "GROUP_WORLD_SIZE": str(membership.group_world_size),
            "ROLE_WORLD_SIZE": str(role.world_size),
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(facts.max_restarts),
            "TORCHELASTIC_RUN_ID": facts.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(facts.use_agent_store),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": facts.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        env.update(self._local_rank_env(local_rank))
        return env

    def _local_rank_env(self, local_rank: int) -> dict[str, str]:
        if not self._facts.virtual_local_rank:
            return {"LOCAL_RANK": str(local_rank)}
        devices = self._facts.environ.get("CUDA_VISIBLE_DEVICES")
        if devices is None:
            return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(local_rank)}
        visible = devices.split(",")
        if local_rank >= len(visible):
            raise ValueError(
                f"--virtual-local-rank: local rank {local_rank} has no device in CUDA_VISIBLE_DEVICES={devices}; "
                f"lower --nproc-per-node or make more devices visible"
            )
        return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": visible[local_rank].strip()}

    # -- the way in ----------------------------------------------------------------------------------------------------
    def _inherited(self) -> dict[str, str]:
        env = {k: v for k, v in self._facts.environ.items() if k not in OWN_NAMES}
        env[MARKER_NAME] = run_marker(self._facts.run_id, self._facts.node)
        return env

    def _with_in_rank_side(self, env: Mapping[str, str]) -> dict[str, str]:
        out = dict(env)
        original = out.get("PYTHONPATH")
        if original is not None:
            out[ORIGINAL_PYTHONPATH] = original
        site = str(self._facts.site_dir)
        out["PYTHONPATH"] = f"{site}{os.pathsep}{original}" if original else site
        return out


def without_in_rank_side(env: Mapping[str, str]) -> dict[str, str]:
    """The environment as the script is to see it."""
    out = {k: v for k, v in env.items() if k not in OWN_NAMES}
    if SETUP not in env and STANDBY not in env:
        return out
    if ORIGINAL_PYTHONPATH in env:
        out["PYTHONPATH"] = env[ORIGINAL_PYTHONPATH]
    else:
        out.pop("PYTHONPATH", None)
    return out


def _destination(asked: str, tee: bool, prefix: str, own: Path | None) -> Destination:
    """One stream: *asked* is torch's path, empty for the console, /dev/null for a console that is to stay silent."""
    if asked == os.devnull:
        return Destination(own or Path(os.devnull))
    if asked:
        return Destination(Path(asked), follow=tee, prefix=prefix if tee else "")
    return Destination(own, follow=own is not None)
