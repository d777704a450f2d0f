"""Every option of steadyrun, declared once: flag, environment name, TOML key and the table in the docs come from here.

A field ``run_dir`` of ``Settings`` is ``--ft-run-dir`` (or ``--ft-run_dir``) on the command line, ``PET_FT_RUN_DIR`` in
the environment and ``run-dir`` in the file that ``--ft-config`` names. The command line wins over the environment, the
environment over the file, the file over the default. The spellings of the NVIDIA resiliency extension are in
``ALIASES`` (they act) and ``REPLACED`` (they are accepted, and one line says what replaces them).

Nothing here reads a file or the environment; sources are passed in.
"""

from __future__ import annotations

import dataclasses
import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

from steadyrun.core.classes import Mode
from steadyrun.core.errors import ConfigError, nearest_name

__all__ = [
    "ALIASES",
    "OFF_WORDS",
    "OPTIONS",
    "REPLACED",
    "Option",
    "Replaced",
    "Resolved",
    "Settings",
    "Source",
    "command_line_source",
    "environment_source",
    "flag_of",
    "markdown_table",
    "nvrx_source",
    "resolve",
    "toml_source",
]

OFF_WORDS: Final = frozenset({"", "none", "null", "off", "inf", "never"})
UNITS_S: Final[Mapping[str, float]] = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


# -- kinds of values -------------------------------------------------------------------------------------------------
class Kind(Protocol):
    """What an option may be. ``parse`` takes text, or what TOML or YAML made of it; it raises ValueError."""

    @property
    def allowed(self) -> str:
        """For messages and the docs: which values there are."""
        ...

    @property
    def metavar(self) -> str: ...
    def parse(self, raw: object) -> object: ...
    def show(self, value: Any) -> str:
        """The value as a user would write it."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words; True and False mean on and off where these are among them."""

    choices: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return ", ".join(self.choices)

    @property
    def metavar(self) -> str:
        return "|".join(self.choices)

    def parse(self, raw: object) -> str:
        word = _switch_word(raw).strip().lower()
        if word not in self.choices:
            raise ValueError(nearest_name(word, self.choices))
        return word

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """A ``Mode``."""

    @property
    def allowed(self) -> str:
        return ", ".join(m.value for m in Mode)

    @property
    def metavar(self) -> str:
        return "|".join(m.value for m in Mode)

    def parse(self, raw: object) -> Mode:
        if isinstance(raw, Mode):
            return raw
        word = str(raw).strip().lower()
        if word not in {m.value for m in Mode}:
            raise ValueError(nearest_name(word, [m.value for m in Mode]))
        return Mode(word)

    def show(self, value: Any) -> str:
        return str(value.value)


@dataclass(frozen=True, slots=True)
class Switch:
    """On or off."""

    @property
    def allowed(self) -> str:
        return "on, off"

    @property
    def metavar(self) -> str:
        return "on|off"

    def parse(self, raw: object) -> bool:
        if isinstance(raw, bool):
            return raw
        word = str(raw).strip().lower()
        if word in ("on", "true", "yes", "1"):
            return True
        if word in ("off", "false", "no", "0"):
            return False
        raise ValueError

    def show(self, value: Any) -> str:
        return "on" if value else "off"


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration: a number of seconds, or with a unit (``500ms``, ``30s``, ``5m``, ``2h``).

    Attributes:
        minimum_s: the smallest value allowed.
        can_be_off: ``off``, ``none``, ``null``, ``inf`` and an empty text mean no limit, which is ``inf``.
        falls_back: what a default of None stands for.
    """

    minimum_s: float = 0.001
    maximum_s: float = 30 * 86400.0
    can_be_off: bool = True
    falls_back: str = ""

    @property
    def allowed(self) -> str:
        off = ", or off" if self.can_be_off else ""
        return f"seconds from {_number(self.minimum_s)} to {_number(self.maximum_s)} (30, 500ms, 5m, 2h){off}"

    @property
    def metavar(self) -> str:
        return "SECONDS"

    def parse(self, raw: object) -> float:
        if raw is None or raw is False or (isinstance(raw, str) and raw.strip().lower() in OFF_WORDS):
            if self.can_be_off:
                return math.inf
            raise ValueError
        value_s = _seconds(raw)
        if value_s == math.inf and self.can_be_off:
            return value_s
        if not self.minimum_s <= value_s <= self.maximum_s:
            raise ValueError
        return value_s

    def show(self, value: Any) -> str:
        if value is None:
            return self.falls_back
        return "off" if value == math.inf else _number(value)


@dataclass(frozen=True, slots=True)
class SectionSeconds:
    """Durations by section name: ``name:seconds,...`` or a TOML table."""

    @property
    def allowed(self) -> str:
        return "name:seconds pairs such as setup:600,step:180 (seconds above 0, or off)"

    @property
    def metavar(self) -> str:
        return "NAME:SECONDS,..."

    def parse(self, raw: object) -> Mapping[str, float]:
        if raw is None or (isinstance(raw, str) and raw.strip().lower() in OFF_WORDS):
            return MappingProxyType({})
        pairs: list[tuple[str, object]]
        if isinstance(raw, Mapping):
            pairs = [(str(k), v) for k, v in raw.items()]
        else:
            pairs = []
            for item in str(raw).split(","):
                name, separator, value = item.strip().rpartition(":")
                if not separator:
                    raise ValueError
                pairs.append((name, value))
        one = Seconds()
        out: dict[str, float] = {}
        for written, seconds in pairs:
            name = written.strip()
            if not name or name in out:
                raise ValueError
            out[name] = one.parse(seconds)
        return MappingProxyType(out)

    def show(self, value: Any) -> str:
        return ",".join(f"{name}:{Seconds().show(s)}" for name, s in value.items())


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number from *minimum* to *maximum*."""

    minimum: int = 0
    maximum: int = 1_000_000

    @property
    def allowed(self) -> str:
        return f"whole numbers from {self.minimum} to {self.maximum}"

    @property
    def metavar(self) -> str:
        return "N"

    def parse(self, raw: object) -> int:
        if isinstance(raw, bool) or not isinstance(raw, (int, str)):
            raise ValueError
        value = int(raw)
        if not self.minimum <= value <= self.maximum:
            raise ValueError
        return value

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class CheckSteps:
    """How often something is checked: ``auto`` (None), ``off`` (0), or each so many steps."""

    maximum: int = 1_000_000

    @property
    def allowed(self) -> str:
        return f"auto, off, or whole numbers of steps from 1 to {self.maximum}"

    @property
    def metavar(self) -> str:
        return "auto|off|N"

    def parse(self, raw: object) -> int | None:
        word = _switch_word(raw).strip().lower()
        if word in ("auto", "on"):
            return None
        value = 0 if word in OFF_WORDS else int(word)
        if not 0 <= value <= self.maximum or (value == 0 and word not in OFF_WORDS):
            raise ValueError
        return value

    def show(self, value: Any) -> str:
        return "auto" if value is None else "off" if value == 0 else str(value)


@dataclass(frozen=True, slots=True)
class Text:
    """Any text; ``required`` forbids an empty one."""

    metavar: str = "TEXT"
    required: bool = False

    @property
    def allowed(self) -> str:
        return "a text that is not empty" if self.required else "any text"

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str) or (self.required and not raw.strip()):
            raise ValueError
        return raw

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Modules:
    """Names of Python modules, separated by commas, or a TOML list."""

    @property
    def allowed(self) -> str:
        return "names of Python modules, separated by commas"

    @property
    def metavar(self) -> str:
        return "MODULE,..."

    def parse(self, raw: object) -> tuple[str, ...]:
        items = [str(i) for i in raw] if isinstance(raw, Sequence) and not isinstance(raw, str) else str(raw).split(",")
        names = tuple(i.strip() for i in items if i.strip())
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"; {name!r} is not a module's name")
        return names

    def show(self, value: Any) -> str:
        return ",".join(value)


@dataclass(frozen=True, slots=True)
class Address:
    """HOST:PORT or HOST:FIRST-LAST, or empty for none."""

    @property
    def allowed(self) -> str:
        return "HOST:PORT with a port from 0 to 65535, or HOST:FIRST-LAST ([::1]:9400 for IPv6), or off"

    @property
    def metavar(self) -> str:
        return "HOST:PORT"

    def parse(self, raw: object) -> str:
        text = str(raw).strip()
        if text.lower() in OFF_WORDS:
            return ""
        match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})(?:-(\d{1,5}))?", text)
        if match is None or not int(match[2]) <= int(match[3] or match[2]) <= 65535:
            raise ValueError
        return text

    def show(self, value: Any) -> str:
        return value or "off"


@dataclass(frozen=True, slots=True)
class Rollback:
    """A step to go back to, and ranges of batches to leave out from there on: ``1200`` or ``1200,1250:1300``.

    The value is ``(step, ((first, end), ...))``, or None.
    """

    @property
    def allowed(self) -> str:
        return "a step, and after commas ranges of batches FIRST:END to leave out (1200,1250:1300)"

    @property
    def metavar(self) -> str:
        return "STEP[,A:B...]"

    def parse(self, raw: object) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        text = str(raw).strip()
        if raw is None or text.lower() in OFF_WORDS:
            return None
        if re.fullmatch(r"\d{1,15}(,\d{1,15}:\d{1,15})*", text) is None:
            raise ValueError
        step, *ranges = text.split(",")
        skipped = tuple((int(first), int(end)) for first, end in (r.split(":") for r in ranges))
        if any(first >= end for first, end in skipped):
            raise ValueError
        return int(step), skipped

    def show(self, value: Any) -> str:
        if value is None:
            return "off"
        step, skipped = value
        return ",".join([str(step), *(f"{first}:{end}" for first, end in skipped)])


@dataclass(frozen=True, slots=True)
class SignalNumber:
    """A signal by name (``SIGUSR1``, ``SIGRTMAX-3``) or number."""

    @property
    def allowed(self) -> str:
        return (
            f"a signal's name (SIGUSR2, SIGRTMAX-3) or number from 1 to {int(signal.SIGRTMAX)}, not SIGKILL or SIGSTOP"
        )

    @property
    def metavar(self) -> str:
        return "SIGNAL"

    def parse(self, raw: object) -> int:
        text = str(raw).strip().upper()
        number = int(text) if text.isdigit() else _signal_number(text if text.startswith("SIG") else f"SIG{text}")
        if not 1 <= number <= signal.SIGRTMAX or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError
        return number

    def show(self, value: Any) -> str:
        below = int(signal.SIGRTMAX) - value
        if 0 <= below <= 14:
            return f"SIGRTMAX-{below}" if below else "SIGRTMAX"
        try:
            return signal.Signals(value).name
        except ValueError:
            return str(value)


def _switch_word(raw: object) -> str:
    if isinstance(raw, bool):
        return "on" if raw else "off"
    return str(raw)


def _seconds(raw: object) -> float:
    if isinstance(raw, bool):
        raise ValueError
    if isinstance(raw, (int, float)):
        value_s = float(raw)
    else:
        match = re.fullmatch(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*([a-z]*)\s*", str(raw).lower())
        if match is None or (match[2] and match[2] not in UNITS_S):
            raise ValueError
        value_s = float(match[1]) * UNITS_S.get(match[2], 1.0)
    if math.isnan(value_s):
        raise ValueError
    return value_s


def _signal_number(name: str) -> int:
    match = re.fullmatch(r"(SIGRTMAX|SIGRTMIN)([+-]\d+)", name)
    if match is not None:
        return int(signal.Signals[match[1]]) + int(match[2])
    try:
        return int(signal.Signals[name])
    except KeyError:
        raise ValueError from None


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


# -- the declarations ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Option:
    """One option: *name* is the part after ``--ft-``; *field* the attribute of Settings."""

    name: str
    field: str
    kind: Kind
    default: object
    help: str
    group: str

    @property
    def flag(self) -> str:
        return f"--ft-{self.name}"

    @property
    def flags(self) -> tuple[str, ...]:
        """All spellings on the command line."""
        return tuple(dict.fromkeys((self.flag, f"--ft-{self.field}")))

    @property
    def environment(self) -> str:
        return f"PET_FT_{self.field.upper()}"


def _option(kind: Kind, default: Any, help: str, group: str) -> Any:
    metadata = {"kind": kind, "help": help, "group": group, "default": default}
    if isinstance(default, MappingProxyType):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


_GENERAL: Final = "general"
_RESTART: Final = "restart"
_LIMITS: Final = "limits"
_STOPPING: Final = "stopping"
_EVIDENCE: Final = "evidence"
_PACE: Final = "pace"
_METRICS: Final = "metrics"
_INTEGRITY: Final = "integrity"
_NO_TIMES: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of all options. Seconds are floats, ``inf`` means no limit."""

    config: str = _option(Text("FILE"), "", "TOML file with further options.", _GENERAL)
    print_config: str = _option(
        Choice(("off", "text", "json")),
        "off",
        "Print every option with its value and where it came from, then exit (--ft-print-config=json for JSON).",
        _GENERAL,
    )
    mode: Mode = _option(  # noqa: RUF009
        ModeChoice(), Mode.ACT, "observe: report what would be done to a hung rank, and do nothing to it.", _GENERAL
    )
    run_dir: str = _option(
        Text("DIR", required=True),
        "steadyrun",
        "Where the run folder is made (journal, incidents, logs); a temporary folder where it is not writable.",
        _GENERAL,
    )
    log_level: str = _option(
        Choice(("debug", "info", "warning", "error")), "info", "How much steadyrun says on stderr.", _GENERAL
    )
    quiet: bool = _option(Switch(), False, "Say only what went wrong.", _GENERAL)
    capture: str = _option(
        Choice(("auto", "on", "off")),
        "auto",
        "Write the ranks' output to files in the run folder and copy it to the console from there, so that reports can "
        "quote the last lines; auto: where the launcher's own stream is not a terminal. "
        "torchrun's -r, -t and --log-dir go first.",
        _GENERAL,
    )
    metrics_addr: str = _option(
        Address(),
        "127.0.0.1:0",
        "Where each agent serves its metrics for Prometheus: /metrics, and on the leading node /sd with all nodes. "
        "Port 0 takes a free one, which steadyctl status shows; of a range the first free one is taken.",
        _METRICS,
    )
    metrics_sd_dir: str = _option(
        Text("DIR"),
        "",
        "Write a file for Prometheus' file_sd there, with run_id and node_rank as labels of the target; it is removed "
        "at the end.",
        _METRICS,
    )
    metrics_textfile: str = _option(
        Text("FILE|DIR"),
        "",
        "Also write the metrics there every 15 s, for node_exporter's textfile collector: a .prom file, or a folder.",
        _METRICS,
    )
    kernel_log: str = _option(
        Text("FILE"),
        "/dev/kmsg",
        "Kernel log that is watched for Xids, OOM kills and errors of disks and links; off: none.",
        _METRICS,
    )
    node_check: str = _option(
        Choice(("off", "quick", "full")),
        "quick",
        "Check each node before an attempt: GPUs, their memory and links, ports, disks, clock. A node that is unfit is "
        "named, and left out where others can take its place. full: also measure each device, which takes seconds.",
        _GENERAL,
    )
    exit_codes: str = _option(
        Choice(("class", "torchrun")),
        "class",
        "class: the exit code tells the class of the failure (see README); torchrun: 0 or 1.",
        _GENERAL,
    )
    faults: str = _option(
        Text("PLAN"),
        "",
        'Faults to inject, as in STEADYRUN_FAULTS: "kill rank=1 step=20; hang rank=0 step=40".',
        _GENERAL,
    )

    standby: bool = _option(
        Switch(), True, "Keep one started interpreter per rank ready, so that a restart takes about a second.", _RESTART
    )
    preload: tuple[str, ...] = _option(
        Modules(), (), "Modules that a standby imports in advance, beside torch.", _RESTART
    )
    restart_budget: int = _option(
        Count(0, 1000),
        3,
        "Restarts without a newly reached step before the job is given up. Unused when --max-restarts is given, which "
        "is obeyed exactly.",
        _RESTART,
    )

    rollback: tuple[int, tuple[tuple[int, int], ...]] | None = _option(
        Rollback(),
        None,
        "Resume from the newest complete checkpoint that is not newer than STEP, and leave batches A to B-1 out; for "
        "scripts that use watch.checkpointer.",
        _RESTART,
    )

    timeouts: str = _option(
        Text("auto|FILE|off", required=True),
        "auto",
        "auto: the limits below, until enough was seen to calibrate them; FILE: calibrated limits (JSON), as they are; "
        "off: no limit acts or warns.",
        _LIMITS,
    )
    section_timeouts: Mapping[str, float] = _option(
        SectionSeconds(), _NO_TIMES, "Limits of sections by name; they act without a second signal.", _LIMITS
    )
    first_pass_timeouts: Mapping[str, float] = _option(
        SectionSeconds(), _NO_TIMES, "Limits of the first pass of sections: compilation, first batch.", _LIMITS
    )
    out_of_section_timeout: float = _option(
        Seconds(),
        1800.0,
        "Longest time outside every section without a step or a beat, for scripts that use sections of their own.",
        _LIMITS,
    )
    start_timeout: float = _option(Seconds(), 300.0, "From the start of a rank until it reports.", _LIMITS)
    setup_timeout: float = _option(Seconds(), 1800.0, "From then until its first step.", _LIMITS)
    step_timeout: float = _option(Seconds(), 300.0, "Between two steps.", _LIMITS)
    checkpointing_timeout: float = _option(Seconds(), 1800.0, "Section checkpointing.", _LIMITS)
    evaluation_timeout: float = _option(Seconds(), 3600.0, "Sections evaluation, eval, validation, test.", _LIMITS)
    other_section_timeout: float = _option(Seconds(), 1800.0, "Every section without a limit of its own.", _LIMITS)
    teardown_timeout: float = _option(
        Seconds(), 180.0, "From the end of the script, or of the first rank, until the process has ended.", _LIMITS
    )
    confirm_window: float = _option(
        Seconds(0.05, 3600.0, can_be_off=False),
        6.0,
        "How long a late rank is looked at for a second sign that it stands still.",
        _LIMITS,
    )
    deadman: float = _option(
        Seconds(), 300.0, "A rank that makes no progress for this long writes its own stacks.", _LIMITS
    )

    restart_grace: float = _option(
        Seconds(0.0, can_be_off=False), 5.0, "From SIGTERM to SIGKILL when the job restarts.", _STOPPING
    )
    final_grace: float | None = _option(
        Seconds(0.0, can_be_off=False, falls_back="--shutdown-timeout"),
        None,
        "From SIGTERM to SIGKILL when the job ends; default: torchrun's --shutdown-timeout.",
        _STOPPING,
    )
    checkpoint_grace: float = _option(
        Seconds(0.0, can_be_off=False), 600.0, "The same for a rank that is saving (section checkpointing).", _STOPPING
    )

    gather_limit: float = _option(
        Seconds(0.5, 3600.0, can_be_off=False), 15.0, "Longest time for evidence before anything is stopped.", _EVIDENCE
    )
    stack_signal: int = _option(
        SignalNumber(),
        int(signal.SIGRTMAX) - 3,
        "Signal on which a rank writes all its stacks; change it if the script uses the same.",
        _EVIDENCE,
    )
    flight_recorder: str = _option(
        Choice(("on", "timing", "off")),
        "on",
        "on: torch's flight recorders run in every rank and are collected; timing: NCCL's also notes when the device "
        "starts an operation (two more CUDA events for each); off: they are left as torch and the script have them.",
        _EVIDENCE,
    )
    flight_recorder_entries: int = _option(
        Count(1, 1_000_000),
        2000,
        "Operations that each of a rank's flight recorders keeps.",
        _EVIDENCE,
    )
    timing: bool = _option(
        Switch(),
        True,
        "Ranks measure how long each step's own work takes, apart from waiting for others: how slow ranks are found. "
        "Costs less than 0.1 ms per step, and now and then a probe of 5 ms (a thousandth of the time at most).",
        _EVIDENCE,
    )
    straggler_action: str = _option(
        Choice(("report", "checkpoint-restart-exclude")),
        "report",
        "What follows when a rank or node is slow. report: a line, a record and an incident; "
        "checkpoint-restart-exclude: once the time lost has reached the cost of a restart, save and restart without "
        "the slow node where a spare waits, else in place, once.",
        _PACE,
    )
    sdc: int | None = _option(
        CheckSteps(),
        None,
        "Steps between checks of the bytes of parameters and optimizer state: replicas must agree, and nothing may "
        "change between updates. Also after load, after the first step and at saves. auto: 50, or more, so that it "
        "takes less than 0.1 % of the time.",
        _INTEGRITY,
    )
    loss_spike: str = _option(
        Choice(("off", "rollback")),
        "off",
        "What follows when losses told by watch.loss stay far above the usual, or they or gradients stay not "
        "finite. off: they are told, and bytes are checked; rollback: where bytes are right, go back about 100 steps "
        "to a verified checkpoint and leave out the batches from there on; for scripts that use watch.checkpointer.",
        _INTEGRITY,
    )
    sdc_replay: int | None = _option(
        CheckSteps(),
        None,
        "Steps between replays, under DDP, with --ft-sdc: each rank of a node computes one microbatch of another one "
        "again and compares the gradients, which finds the one that computes wrongly. Off by itself where a repetition "
        "does not give the same bits. auto: 200, or more, so that it takes less than 0.1 % of the time.",
        _INTEGRITY,
    )


OPTIONS: Final[tuple[Option, ...]] = tuple(
    Option(
        name=f.name.replace("_", "-"),
        field=f.name,
        kind=f.metadata["kind"],
        default=f.metadata["default"],
        help=f.metadata["help"],
        group=f.metadata["group"],
    )
    for f in dataclasses.fields(Settings)
)
_BY_FIELD: Final[Mapping[str, Option]] = {o.field: o for o in OPTIONS}

# Other spellings that act, as field names: what the NVIDIA resiliency extension calls it -> what we call it.
ALIASES: Final[Mapping[str, str]] = {
    "rank_section_timeouts": "section_timeouts",
    "rank_out_of_section_timeout": "out_of_section_timeout",
    "initial_rank_heartbeat_timeout": "setup_timeout",
    "rank_heartbeat_timeout": "step_timeout",
    "max_no_progress_cycles": "restart_budget",
}


@dataclass(frozen=True, slots=True)
class Replaced:
    """An option of others that is accepted without effect; *instead* ends the line that says so."""

    instead: str
    takes_value: bool = True


_CALIBRATED: Final = "limits come from observed times by `steadyctl calibrate-timeouts`, see --ft-timeouts"
_NODE_CHECKS: Final = "--ft-node-check checks a node before each attempt, its agent all the time, `steadyctl check` now"
_LOGS: Final = "each attempt keeps its own log folder (--log-dir, -r, -t, or the run folder)"
_ATTRIBUTION: Final = "each incident has its verdict.json, see `steadyctl show`"
_MEMORY: Final = "a restart waits until every process of the attempt is gone, and the sweep reports what is left"

REPLACED: Final[Mapping[str, Replaced]] = {
    "safety_factor": Replaced(_CALIBRATED),
    "num_warmup_iters": Replaced("--ft-first-pass-timeouts covers the first pass of a section"),
    "rank_termination_signal": Replaced("ranks get SIGTERM, then SIGKILL after --ft-restart-grace"),
    "workload_check_interval": Replaced("limits are checked when they are due, there is no interval"),
    "restart_check_interval": Replaced("a failure wakes all nodes at once, there is no interval"),
    "skip_section_response": Replaced("sections never wait for an answer"),
    "restart_policy": Replaced("any failure restarts the whole job, within --ft-restart-budget or --max-restarts"),
    "min_progress_iterations": Replaced("one newly reached step is progress, see --ft-restart-budget"),
    "checkpoint_iteration_file": Replaced("progress is read from the steps that the ranks report"),
    "no_restart_exit_code": Replaced("the same error at the same step twice ends the job"),
    "rdzv_impl": Replaced("the rendezvous is torch's own, see --rdzv-backend"),
    "per_cycle_applog_prefix": Replaced(_LOGS),
    "nvrx_logfile": Replaced(_LOGS),
    "enable_log_server": Replaced(_LOGS),
    "log_server_port": Replaced(_LOGS),
    "log_server_log_prefix": Replaced(_LOGS),
    "log_server_graceful_shutdown_timeout": Replaced(_LOGS),
    "log_aggregator_count": Replaced(_LOGS),
    "log_leaf_max_queue_chunks": Replaced(_LOGS),
    "cycle_info_dir": Replaced("the journal in the run folder has every attempt, see `steadyctl status`"),
    "segment": Replaced("nodes are taken in the order of the rendezvous"),
    "numa_bind_strict": Replaced("use torchrun's --numa-binding"),
    "node_health_check_interval": Replaced(_NODE_CHECKS),
    "node_health_check_endpoint": Replaced(_NODE_CHECKS),
    "enable_nic_monitor": Replaced(_NODE_CHECKS),
    "enable_nic_healthcheck": Replaced(_NODE_CHECKS),
    "enable_device_health_check": Replaced(_NODE_CHECKS),
    "pci_topo_file": Replaced(_NODE_CHECKS),
    "link_down_path_template": Replaced(_NODE_CHECKS),
    "link_state_path_template": Replaced(_NODE_CHECKS),
    "enable_dist_storage_healthcheck": Replaced(_NODE_CHECKS),
    "storage_health_check_path": Replaced(_NODE_CHECKS),
    "storage_healthcheck_path": Replaced(_NODE_CHECKS),
    "gpu_memory_reclaim_timeout": Replaced(_MEMORY),
    "gpu_memory_tolerance_mb": Replaced(_MEMORY),
    "gpu_memory_poll_interval": Replaced(_MEMORY),
    "check_remaining_processes": Replaced(_MEMORY),
    "install_exception_hook": Replaced("an uncaught exception is always recorded"),
    "attribution_endpoint": Replaced(_ATTRIBUTION),
    "attribution_startup_timeout": Replaced(_ATTRIBUTION),
    "attribution_llm_api_key_file": Replaced(_ATTRIBUTION),
    "attribution_llm_base_url": Replaced(_ATTRIBUTION),
    "attribution_llm_model": Replaced(_ATTRIBUTION),
    "attribution_analysis_backend": Replaced(_ATTRIBUTION),
    "attribution_stop_action": Replaced(_ATTRIBUTION),
    "attribution_log_level": Replaced(_ATTRIBUTION),
    "attribution_export_url": Replaced(_ATTRIBUTION),
}


def flag_of(field_name: str) -> str:
    """``--ft-run-dir`` of ``run_dir``."""
    return f"--ft-{field_name.replace('_', '-')}"


# -- where values come from ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Source:
    """Raw values of one origin by the field name as written there (aliases included), and how each is called there."""

    values: Mapping[str, object]
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What counts.

    Attributes:
        origins: by field name, ``default`` or what the user wrote: a flag, an environment name, a file and key.
        notes: lines for the user.
    """

    settings: Settings
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def is_given(self, field_name: str) -> bool:
        """The value does not come from the default."""
        return self.origins[field_name] != DEFAULT

    def as_rows(self) -> list[tuple[str, str, str]]:
        """(flag, value, origin) of every option, for a person."""
        return [(o.flag, o.kind.show(getattr(self.settings, o.field)), self.origins[o.field]) for o in OPTIONS]


DEFAULT: Final = "default"


def command_line_source(given: Mapping[str, tuple[str, object]]) -> Source:
    """From what the parser saw: field or alias -> (flag as written, value)."""
    return Source({k: v for k, (_, v) in given.items()}, {k: flag for k, (flag, _) in given.items()})


def environment_source(environ: Mapping[str, str]) -> Source:
    """From ``PET_FT_*``; an empty variable counts as not set (cluster templates leave them behind).

    Raises:
        ConfigError: a name that is no option.
    """
    values: dict[str, object] = {}
    names: dict[str, str] = {}
    for name, value in environ.items():
        if not name.startswith("PET_FT_") or value == "":
            continue
        key = name.removeprefix("PET_FT_").lower()
        if not _is_known(key):
            known = [o.environment for o in OPTIONS] + [f"PET_FT_{a.upper()}" for a in ALIASES]
            raise ConfigError(
                f"environment variable {name}={value!r} is not an option of steadyrun{nearest_name(name, known)} "
                f"(unset it, or see steadyrun --help)"
            )
        values[key] = value
        names[key] = name
    return Source(values, names)


def toml_source(data: Mapping[str, object], file: str) -> Source:
    """From a parsed TOML file: keys are option names, with dashes or underscores, with or without ``ft-`` in front.

    Raises:
        ConfigError: a key that is no option.
    """
    values: dict[str, object] = {}
    names: dict[str, str] = {}
    for written, value in data.items():
        key = written.replace("-", "_").removeprefix("ft_")
        if not _is_known(key) or key in ("config", "print_config"):
            known = [o.name for o in OPTIONS if o.field not in ("config", "print_config")]
            raise ConfigError(
                f"{file}: key {written!r} (value {value!r}) is not an option of steadyrun"
                f"{nearest_name(written.replace('_', '-'), known)}; known keys: {', '.join(known)}"
            )
        values[key] = value
        names[key] = f"{file}: {written}"
    return Source(values, names)


def nvrx_source(data: object, file: str) -> Source:
    """From a parsed YAML file of the NVIDIA resiliency extension: the ``fault_tolerance`` section, wherever it is.

    Keys that are no option of either are reported by a note, not refused: the file belongs to another program.

    Raises:
        ConfigError: there is no such section.
    """
    section = _find_section(data, "fault_tolerance")
    if section is None:
        raise ConfigError(
            f"{file} has no mapping named fault_tolerance; put the options under one, or use --ft-config and TOML"
        )
    values = {str(k).replace("-", "_"): v for k, v in section.items()}
    return Source(values, {k: f"{file}: {k}" for k in values})


def _find_section(data: object, name: str) -> Mapping[str, object] | None:
    if isinstance(data, Mapping):
        found = data.get(name)
        if isinstance(found, Mapping):
            return found
        children: Sequence[object] = list(data.values())
    elif isinstance(data, list):
        children = data
    else:
        return None
    for child in children:
        inner = _find_section(child, name)
        if inner is not None:
            return inner
    return None


def _is_known(key: str) -> bool:
    return key in _BY_FIELD or key in ALIASES or key in REPLACED


def resolve(sources: Sequence[Source]) -> Resolved:
    """The settings, from *sources* in falling precedence.

    Raises:
        ConfigError: a value that is not allowed; the text names the option as written, the value and what is allowed.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {o.field: DEFAULT for o in OPTIONS}
    notes: list[str] = []
    for source in sources:
        # Our own spelling wins over an alias of it in the same source.
        for key in sorted(source.values, key=lambda k: k not in _BY_FIELD):
            written, raw = source.names[key], source.values[key]
            if key in REPLACED:
                notes.append(f"{written} has no effect here: {REPLACED[key].instead}")
                continue
            target = ALIASES.get(key, key)
            option = _BY_FIELD.get(target)
            if option is None:
                notes.append(f"{written} is not known here and has no effect")
                continue
            if target in values:
                continue
            values[target] = _parse(option, _from_nvrx(key, raw, notes, written), written)
            origins[target] = written
    settings = Settings(**values)
    return Resolved(settings, MappingProxyType(origins), tuple(notes))


def _from_nvrx(key: str, raw: object, notes: list[str], written: str) -> object:
    """Values that mean something else there."""
    if key == "max_no_progress_cycles" and str(raw).strip() in ("0", "-1"):
        notes.append(f"{written}={raw} switches the budget off: up to 1000 restarts without progress are tried")
        return 1000
    if key == "max_no_progress_cycles" and str(raw).strip().isdigit():
        return int(str(raw)) - 1  # cycles there include the first start
    return raw


def _parse(option: Option, raw: object, written: str) -> object:
    try:
        return option.kind.parse(raw)
    except ValueError as e:
        hint = str(e) if str(e).startswith(";") else ""
        shown = raw if isinstance(raw, str) else repr(raw)
        same = "" if written.startswith(option.flag) else f" ({option.flag})"
        raise ConfigError(f"{written}{same}: {shown!r} is not allowed; allowed: {option.kind.allowed}{hint}") from None


# -- the docs --------------------------------------------------------------------------------------------------------
def markdown_table() -> str:
    """The table of all options for the docs, one row each."""
    lines = ["| option | environment | TOML key | default | allowed | meaning |", "|---|---|---|---|---|---|"]
    for option in OPTIONS:
        default = option.kind.show(option.default) or "(none)"
        cells = (
            f"`{option.flag}`",
            f"`{option.environment}`",
            f"`{option.name}`" if option.field not in ("config", "print_config") else "",
            default,
            option.kind.allowed,
            option.help,
        )
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines) + "\n"
