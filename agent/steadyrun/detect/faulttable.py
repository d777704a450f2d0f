"""Which kind of fault asks for which measures, as data: a row for each kind, its measures in the order of trying.

A finding's class says how a job failed, which is not always enough to know what to do: an Xid 94 asks for a restart, an
Xid 79 for another machine. What tells such kinds apart are signs in the evidence; ``KIND_OF_SIGN`` and
``KIND_OF_CLASS`` say which sign, else which class, makes which kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from math import inf
from typing import Final

from steadyrun.core.causes import decode_causes
from steadyrun.core.classes import Action, FaultClass
from steadyrun.core.records import DeviceEvent, Evidence, Finding, RankEvidence
from steadyrun.detect.devices import causal

__all__ = [
    "ADVICE",
    "ESCALATION",
    "KIND_OF_CLASS",
    "KIND_OF_RECOVERY",
    "KIND_OF_XID",
    "ROWS",
    "TABLE",
    "CountedBy",
    "FaultKind",
    "Measure",
    "Recovery",
    "Row",
    "Rung",
    "Signs",
    "kind_of",
    "signs_of",
]


class FaultKind(str, Enum):
    """A row of the table. The values are what verdict.json and the nodes' scores call it."""

    PROGRAM_ERROR = "program_error"
    CRASH = "crash"  # ended by a signal or exit code, and nothing says why
    OUT_OF_MEMORY = "out_of_memory"
    DEVICE_ERROR = "device_error"  # a failed kernel, or an Xid that the program may have caused
    MEMORY_ERROR_CONTAINED = "memory_error_contained"
    DEVICE_RESET = "device_reset"  # an uncorrectable memory error or another Xid that only a reset ends
    ROW_REMAP_FAILED = "row_remap_failed"
    DEVICE_LOST = "device_lost"
    DEVICE_LINK = "device_link"  # NVLink, NVSwitch
    LINK_FLAP = "link_flap"  # of a network card; ranks still advance
    NETWORK = "network"
    HANG = "hang"
    INPUT_PIPELINE = "input_pipeline"
    TEARDOWN = "teardown"
    MISMATCH = "mismatch"
    SLOW = "slow"
    NOT_FINITE = "not_finite"
    CORRUPTION = "corruption"
    STORAGE = "storage"
    ASYNC_SAVE_STALL = "async_save_stall"  # only a save in the background waits
    AGENT_LOST = "agent_lost"  # launcher, agent or store
    REPEAT_OFFENDER = "repeat_offender"  # a node, by its score
    START_UP = "start_up"
    PREEMPTED = "preempted"
    DONE = "done"
    UNKNOWN = "unknown"


class Measure(str, Enum):
    """What can be done. Those in ``ADVICE`` are left to people."""

    REPORT = "report"
    WAIT = "wait"  # it may heal by itself
    WEIGH = "weigh"  # act once the loss has reached the cost of acting: detect.straggler.act
    DUMP = "dump"  # flight recorders and stacks of all ranks; always done before a hung rank is ended
    FAIL_SAFE = "fail_safe"  # ranks end themselves when their agent's lease is over
    SKIP_SAVE = "skip_save"
    RESTART = "restart"
    REPLAY_STEP = "replay_step"  # a restart does the failed step again, from the same checkpoint
    ROLL_BACK = "roll_back"
    EXCLUDE_NODE = "exclude_node"
    PREFLIGHT = "preflight"
    RESET_DEVICE = "reset_device"
    REBOOT_NODE = "reboot_node"
    REPLACE_DEVICE = "replace_device"
    STOP = "stop"


ADVICE: Final[Mapping[Measure, str]] = {
    Measure.PREFLIGHT: "test the nodes in pairs before they are used again (steadyctl doctor on each)",
    Measure.RESET_DEVICE: "reset the GPU once nothing runs on it (nvidia-smi --gpu-reset)",
    Measure.REBOOT_NODE: "reboot the node",
    Measure.REPLACE_DEVICE: "have the GPU replaced: it has no spare memory rows left",
}

ACTION_OF_MEASURE: Final[Mapping[Measure, Action]] = {
    Measure.REPORT: Action.REPORT,
    Measure.WAIT: Action.REPORT,
    Measure.WEIGH: Action.REPORT,
    Measure.SKIP_SAVE: Action.REPORT,
    Measure.RESTART: Action.RESTART,
    Measure.REPLAY_STEP: Action.RESTART,
    Measure.ROLL_BACK: Action.RESTART,
    Measure.EXCLUDE_NODE: Action.RESTART,  # of the job; the node is left out where that leaves enough
    Measure.STOP: Action.STOP,
}


class CountedBy(Enum):
    """Whose faults of one kind count together."""

    JOB = "job"
    NODE = "node"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Rung:
    """One measure, from its *nth* fault of the kind within *within_s* on; the last fault is one of them.

    Attributes:
        only_unnamed: not where a rank was named more than once: then its node is what to look at.
    """

    measure: Measure
    nth: int = 1
    within_s: float = inf
    of: CountedBy = CountedBy.JOB
    only_unnamed: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """The rule for one kind of fault.

    Attributes:
        signal: the first thing that tells of it reliably, and how soon.
        rungs: measures in order; those that are due are done, and the first of them with an action is the action.
        is_hang: the ranks still run, so that observe mode can leave them alone.
        same_fault_stops: the same traceback at the same step twice ends the job (budget by progress only).
        without_progress: at most this many restarts in a row without progress; None: the general budget.
        counts: it is charged to an explicit ``--max-restarts`` (a change of membership is not).
        blames_node: weight of one such fault in the score of its node, 0 where it says nothing about machines.
        is_hardware: it is the machine's even where no other node can be compared.
    """

    signal: str
    rungs: tuple[Rung, ...]
    is_hang: bool = False
    same_fault_stops: bool = False
    without_progress: int | None = None
    counts: bool = True
    blames_node: float = 0.0
    is_hardware: bool = False

    @property
    def action(self) -> Action:
        """What happens the first time, while the budget lasts."""
        firsts = (ACTION_OF_MEASURE.get(r.measure) for r in self.rungs if r.nth == 1)
        return next(a for a in firsts if a is not None)


DAY_S: Final = 86400.0
_M, _NODE, _DEVICE = Measure, CountedBy.NODE, CountedBy.DEVICE
_RESTART: Final = Rung(_M.RESTART)
_EXCLUDE: Final = Rung(_M.EXCLUDE_NODE)

ROWS: Final[Mapping[FaultKind, Row]] = {
    FaultKind.PROGRAM_ERROR: Row(
        "the rank's exception file, at its exit (ms)",
        (_RESTART,),
        same_fault_stops=True,
    ),
    FaultKind.CRASH: Row(
        "pidfd and waitpid (ms)",
        (_RESTART,),
        blames_node=1.0,
    ),
    FaultKind.OUT_OF_MEMORY: Row(
        "exit by SIGKILL and memory.events of the cgroup (ms), or the exception",
        (_RESTART,),
        same_fault_stops=True,
        without_progress=1,
    ),
    FaultKind.DEVICE_ERROR: Row(
        "Xid event and exit of the rank (s)",
        (_RESTART, Rung(_M.EXCLUDE_NODE, 2, DAY_S, _DEVICE)),
        same_fault_stops=True,
        blames_node=0.5,
    ),
    FaultKind.MEMORY_ERROR_CONTAINED: Row(
        "Xid 94 (s)",
        (_RESTART, Rung(_M.RESET_DEVICE)),
        blames_node=1.0,
        is_hardware=True,
    ),
    FaultKind.DEVICE_RESET: Row(
        "Xid 48, 95 or another that asks for a reset (s)",
        (_EXCLUDE, Rung(_M.RESET_DEVICE)),
        blames_node=1.0,
        is_hardware=True,
    ),
    FaultKind.ROW_REMAP_FAILED: Row(
        "Xid 64, or a failed row remapping in NVML (s)",
        (_EXCLUDE, Rung(_M.REPLACE_DEVICE)),
        blames_node=2.0,
        is_hardware=True,
    ),
    FaultKind.DEVICE_LOST: Row(
        "Xid 79, or NVML says that the GPU is lost (s)",
        (_EXCLUDE, Rung(_M.REBOOT_NODE)),
        blames_node=2.0,
        is_hardware=True,
    ),
    FaultKind.DEVICE_LINK: Row(
        "Xid 74 or 144 to 150, or an SXid (s)",
        (_RESTART, Rung(_M.RESET_DEVICE), Rung(_M.EXCLUDE_NODE, 2, of=_NODE)),
        blames_node=1.0,
        is_hardware=True,
    ),
    FaultKind.LINK_FLAP: Row(
        "state of the port, retransmissions (s)",
        (Rung(_M.WAIT), Rung(_M.EXCLUDE_NODE, 2, 300.0, _NODE)),
        is_hang=True,
        blames_node=0.5,
        is_hardware=True,
    ),
    FaultKind.NETWORK: Row(
        "flight recorders: an operation is in flight on all its ranks (the section's limit)",
        (Rung(_M.DUMP), _RESTART, Rung(_M.EXCLUDE_NODE, 2, 300.0, _NODE)),
        is_hang=True,
        blames_node=0.5,
    ),
    FaultKind.HANG: Row(
        "the section's soft limit and evidence; flight recorders disagree (the section's limit)",
        (Rung(_M.DUMP), _RESTART, Rung(_M.PREFLIGHT, 2, only_unnamed=True)),
        is_hang=True,
        blames_node=0.5,
    ),
    FaultKind.INPUT_PIPELINE: Row(
        "stack in the data loader (the section's limit)",
        (Rung(_M.DUMP), _RESTART),
        is_hang=True,
    ),
    FaultKind.TEARDOWN: Row(
        "the script has ended and its process has not (the limit of the teardown)",
        (Rung(_M.DUMP), _RESTART),
        is_hang=True,
    ),
    FaultKind.MISMATCH: Row(
        "flight recorders: different operations, sizes or types at one number (the section's limit)",
        (Rung(_M.DUMP), _RESTART),
        is_hang=True,
        same_fault_stops=True,
        without_progress=1,
    ),
    FaultKind.SLOW: Row(
        "busy time against comparable ranks (15 steps)",
        (Rung(_M.REPORT), Rung(_M.WEIGH)),
        is_hang=True,
        blames_node=0.5,
    ),
    FaultKind.NOT_FINITE: Row(
        "a guard on values (the step)",
        # The same value again is the data's or the model's; another one is a machine that computes wrongly.
        (Rung(_M.REPLAY_STEP),),
        same_fault_stops=True,
        blames_node=0.25,
    ),
    FaultKind.CORRUPTION: Row(
        "fingerprints of replicas differ (the next comparison)",
        (Rung(_M.ROLL_BACK), _EXCLUDE, Rung(_M.REPLACE_DEVICE, 2, of=_DEVICE)),
        is_hang=True,
        blames_node=2.0,
        is_hardware=True,
    ),
    FaultKind.STORAGE: Row(
        "hard limit of the section checkpointing; state D, no byte written",
        (Rung(_M.DUMP), _RESTART),
        is_hang=True,
    ),
    FaultKind.ASYNC_SAVE_STALL: Row(
        "a section checkpointing beside the main thread passes its limit; state D, no byte written",
        (Rung(_M.SKIP_SAVE), Rung(_M.REPORT)),
        is_hang=True,
    ),
    FaultKind.AGENT_LOST: Row(
        "a lease on both sides: the store's connection, and the ranks' own watch on their agent (s to minutes)",
        (Rung(_M.FAIL_SAFE), _RESTART),
        counts=False,
        blames_node=1.0,
    ),
    FaultKind.REPEAT_OFFENDER: Row(
        "the node's score over 28 days",
        (_EXCLUDE, Rung(_M.PREFLIGHT)),
    ),
    FaultKind.START_UP: Row(
        "ranks do not meet, or fail before their first step (the limit of the start)",
        (Rung(_M.DUMP), _RESTART),
        is_hang=True,
    ),
    FaultKind.PREEMPTED: Row("a signal to the launcher (ms)", (Rung(_M.STOP),)),
    FaultKind.DONE: Row("all ranks have ended well meanwhile: the job is done", (Rung(_M.STOP),)),
    FaultKind.UNKNOWN: Row("a limit has passed and nobody could be asked", (Rung(_M.DUMP), _RESTART), is_hang=True),
}

KIND_OF_CLASS: Final[Mapping[FaultClass, FaultKind]] = {
    FaultClass.PROGRAM_ERROR: FaultKind.PROGRAM_ERROR,
    FaultClass.OUT_OF_MEMORY: FaultKind.OUT_OF_MEMORY,
    FaultClass.HOST_STALL: FaultKind.HANG,
    FaultClass.DEVICE_STALL: FaultKind.HANG,
    FaultClass.STOPPED_PROCESS: FaultKind.HANG,
    FaultClass.DEAD_PROCESS: FaultKind.CRASH,
    FaultClass.DEAD_NODE: FaultKind.AGENT_LOST,
    FaultClass.OP_MISMATCH: FaultKind.MISMATCH,
    FaultClass.SIZE_MISMATCH: FaultKind.MISMATCH,
    FaultClass.DTYPE_MISMATCH: FaultKind.MISMATCH,
    FaultClass.SKIPPED_COLLECTIVE: FaultKind.HANG,
    FaultClass.EXTRA_COLLECTIVE: FaultKind.HANG,
    FaultClass.DEADLOCK_CYCLE: FaultKind.HANG,
    FaultClass.P2P_UNMATCHED: FaultKind.HANG,
    FaultClass.INPUT_PIPELINE: FaultKind.INPUT_PIPELINE,
    FaultClass.STORAGE_STALL: FaultKind.STORAGE,
    FaultClass.IN_FLIGHT_NETWORK: FaultKind.NETWORK,
    FaultClass.TEARDOWN_HANG: FaultKind.TEARDOWN,
    FaultClass.START_UP: FaultKind.START_UP,
    FaultClass.PREEMPTED: FaultKind.PREEMPTED,
    FaultClass.SILENT_CORRUPTION: FaultKind.CORRUPTION,
    FaultClass.STRAGGLER: FaultKind.SLOW,
    FaultClass.INSUFFICIENT_DATA: FaultKind.UNKNOWN,
    FaultClass.HEALTHY: FaultKind.DONE,
}

TABLE: Final[Mapping[FaultClass, Row]] = {cls: ROWS[kind] for cls, kind in KIND_OF_CLASS.items()}

# When the budget of a job is used up: what is tried before it is given up, where one node is blamed throughout.
ESCALATION: Final[tuple[Measure, ...]] = (Measure.RESTART, Measure.EXCLUDE_NODE, Measure.PREFLIGHT, Measure.STOP)


# -- signs -----------------------------------------------------------------------------------------------------------
class Recovery(IntEnum):
    """What the driver itself asks for: ``NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`` and the text of Xid 154."""

    NONE = 0
    RESET = 1
    REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    IMEX = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7


KIND_OF_RECOVERY: Final[Mapping[Recovery, FaultKind]] = {
    Recovery.RESET: FaultKind.DEVICE_RESET,
    Recovery.REBOOT: FaultKind.DEVICE_LOST,
    Recovery.DRAIN_P2P: FaultKind.DEVICE_LINK,
    Recovery.DRAIN_AND_RESET: FaultKind.DEVICE_RESET,
    Recovery.IMEX: FaultKind.DEVICE_LINK,
    Recovery.BUS_RESET: FaultKind.DEVICE_RESET,
    Recovery.SYSTEM_REBOOT: FaultKind.DEVICE_LOST,
}


def _xids(text: str) -> Iterable[int]:
    """Numbers and inclusive ranges."""
    for part in text.split():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


# NVIDIA's catalogue, column "immediate action". Left out are those that ask for nothing (43 is a program's fault, 45 a
# consequence of another, 63 a remapping that succeeded) and those for maintenance (54, 78). Worst first.
_XIDS: Final[tuple[tuple[FaultKind, str], ...]] = (
    (FaultKind.DEVICE_LOST, "79"),
    (FaultKind.ROW_REMAP_FAILED, "64"),
    (FaultKind.DEVICE_RESET, "46 48 62 95 109 110 119 120 136 140 143 155 156 158"),
    (FaultKind.DEVICE_LINK, "74 144-150"),
    (FaultKind.MEMORY_ERROR_CONTAINED, "94"),
    (
        FaultKind.DEVICE_ERROR,
        "8 25 31 32 39-41 60 68-72 75-77 80 82-86 88 89 96-105 126-135 139",
    ),
)
KIND_OF_XID: Final[Mapping[int, FaultKind]] = {xid: kind for kind, text in _XIDS for xid in _xids(text)}
_GRAVITY: Final = tuple(kind for kind, _ in _XIDS)

_DEVICE_CLASSES: Final = frozenset(
    {FaultClass.PROGRAM_ERROR, FaultClass.DEVICE_STALL, FaultClass.DEAD_PROCESS, FaultClass.HOST_STALL}
)
# Known texts (core.causes) and the classes that they refine.
_KIND_OF_CAUSE: Final[tuple[tuple[str, frozenset[FaultClass], FaultKind], ...]] = (
    ("device_ecc", _DEVICE_CLASSES, FaultKind.DEVICE_RESET),
    ("device_error", _DEVICE_CLASSES, FaultKind.DEVICE_ERROR),
    ("not_finite", frozenset({FaultClass.PROGRAM_ERROR}), FaultKind.NOT_FINITE),
)
_XID: Final = re.compile(r"\bXid\b\s*(?:\(PCI:[^)]*\))?\s*:?\s*(\d{1,3})\b", re.IGNORECASE)
_RECOVERY: Final = re.compile(r"recovery action changed from [^\n]*? to 0x([0-9a-f]{1,2})\b", re.IGNORECASE)
_LOST: Final = re.compile(
    r"fallen off the bus|GPU is lost|is lost: it does not answer|NVML_ERROR_GPU_IS_LOST", re.IGNORECASE
)
_RECOVERIES: Final = frozenset(Recovery)
_MAIN_LANE: Final = 0


@dataclass(frozen=True, slots=True)
class Signs:
    """What evidence says beyond a finding's class.

    Attributes:
        xids: numbers of the driver's events of the blamed ranks' devices.
        recovery: what the driver asks for, where it says so; it knows better than any table.
        causes: names of the known texts in the blamed ranks' last words (``core.causes``).
        is_lost: a device is not there any more.
        has_link_flap: a network port went down and up again, and ranks advance.
        is_async_save: what is late is a save beside the main thread, and nothing else.
    """

    xids: frozenset[int] = frozenset()
    recovery: Recovery | None = None
    causes: frozenset[str] = frozenset()
    is_lost: bool = False
    has_link_flap: bool = False
    is_async_save: bool = False


def kind_of(cls: FaultClass, signs: Signs | None = None) -> FaultKind:
    """The row for a finding of this class with these signs: the driver's word first, then its events, then texts."""
    signs = signs or Signs()
    if cls in _DEVICE_CLASSES:
        if signs.recovery is not None and signs.recovery in KIND_OF_RECOVERY:
            return KIND_OF_RECOVERY[signs.recovery]
        if signs.is_lost:
            return FaultKind.DEVICE_LOST
        told = {KIND_OF_XID[x] for x in signs.xids if x in KIND_OF_XID}
        for kind in _GRAVITY:
            if kind in told:
                return kind
    for cause, classes, kind in _KIND_OF_CAUSE:
        if cause in signs.causes and cls in classes:
            return kind
    if cls is FaultClass.IN_FLIGHT_NETWORK and signs.has_link_flap:
        return FaultKind.LINK_FLAP
    if cls is FaultClass.STORAGE_STALL and signs.is_async_save:
        return FaultKind.ASYNC_SAVE_STALL
    return KIND_OF_CLASS[cls]


def signs_of(evidence: Evidence, finding: Finding) -> Signs:
    """The signs in what the finding's ranks said last. Logs may hold anything, so only known texts are taken."""
    blamed = [r for r in evidence.ranks if r.rank in finding.ranks]
    text = "\n".join(line for r in blamed for line in _words_of(r))
    told = _told_of_devices(evidence, finding)
    kernel = "\n".join(e.text for e in told if e.event in ("xid", "sxid"))
    asked = [int(number, 16) for number in _RECOVERY.findall(f"{text}\n{kernel}")]
    asked += [value for e in told if (value := _recovery_of(e)) is not None]
    return Signs(
        xids=frozenset({*map(int, _XID.findall(text)), *(e.xid for e in told if e.xid is not None)}),
        recovery=Recovery(asked[-1]) if asked and asked[-1] in _RECOVERIES else None,
        causes=frozenset(cause.name for cause, _ in decode_causes(text.splitlines())),
        is_lost=any(_LOST.search(t) is not None for t in (text, kernel, *(e.meaning for e in told))),
        is_async_save=bool(blamed) and all(_only_a_save_is_late(r) for r in blamed),
    )


def _told_of_devices(evidence: Evidence, finding: Finding) -> list[DeviceEvent]:
    """What may have caused it, of its ranks' GPUs."""
    since_s = finding.since_unix_s if finding.since_unix_s is not None else 0.0
    return [e for e in causal(evidence.devices, since_s) if e.rank is not None and e.rank in finding.ranks]


def _recovery_of(event: DeviceEvent) -> int | None:
    """What NVML says is needed, in the words of its collector."""
    if event.source != "nvml" or event.event != "state":
        return None
    if "needs a reboot" in event.meaning:
        return Recovery.REBOOT
    return Recovery.RESET if "needs a reset" in event.meaning else None


def _words_of(r: RankEvidence) -> Iterable[str]:
    if r.exception is not None:
        yield f"{r.exception.type}: {r.exception.message}"
        return  # what was logged before it has been survived
    yield from r.log_tail


def _only_a_save_is_late(r: RankEvidence) -> bool:
    late = r.suspicion
    if late is None or late.section is None or r.exit is not None:
        return False
    lanes = {s.lane for s in r.sections if s.name == late.section}
    return late.section == "checkpointing" and bool(lanes) and _MAIN_LANE not in lanes
