"""What can be wrong, what can be done about it, and how the launcher's exit code says so."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Final

__all__ = ["EXIT_OF_CLASS", "PLANNED", "Action", "ExitClass", "FaultClass", "Mode"]

# Triggers of a stop that is no fault: nothing to gather, nobody to blame.
PLANNED: Final = frozenset({"membership", "node_check", "rollback", "straggler"})


class FaultClass(str, Enum):
    """The fault classes of a verdict; the values are the fixed names in verdict.json."""

    PROGRAM_ERROR = "program_error"
    OUT_OF_MEMORY = "out_of_memory"
    HOST_STALL = "host_stall"
    DEVICE_STALL = "device_stall"
    STOPPED_PROCESS = "stopped_process"
    DEAD_PROCESS = "dead_process"
    DEAD_NODE = "dead_node"
    OP_MISMATCH = "op_mismatch"
    SIZE_MISMATCH = "size_mismatch"
    DTYPE_MISMATCH = "dtype_mismatch"
    SKIPPED_COLLECTIVE = "skipped_collective"
    EXTRA_COLLECTIVE = "extra_collective"
    DEADLOCK_CYCLE = "deadlock_cycle"
    P2P_UNMATCHED = "p2p_unmatched"
    INPUT_PIPELINE = "input_pipeline"
    STORAGE_STALL = "storage_stall"
    IN_FLIGHT_NETWORK = "in_flight_network"
    TEARDOWN_HANG = "teardown_hang"
    START_UP = "start_up"
    PREEMPTED = "preempted"
    SILENT_CORRUPTION = "silent_corruption"
    STRAGGLER = "straggler"
    INSUFFICIENT_DATA = "insufficient_data"
    HEALTHY = "healthy"


class Action(str, Enum):
    """What the policy makes of a verdict."""

    RESTART = "restart"
    RESTART_WITHOUT_NODE = "restart_without_node"
    ROLL_BACK = "roll_back"
    STOP = "stop"
    REPORT = "report"


class Mode(str, Enum):
    """``observe`` reports what ``act`` would have done to a hung rank and touches nothing."""

    OBSERVE = "observe"
    ACT = "act"


class ExitClass(IntEnum):
    """Exit codes of ``steadyrun``; the README's table and Slurm or podFailurePolicy rules rely on them."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    PROGRAM_ERROR = 80
    OUT_OF_MEMORY = 81
    HANG = 82
    NODE_FAULT = 83
    DEAD_PROCESS = 84
    START_UP = 85
    PREEMPTED = 86
    CORRUPTION = 87


EXIT_OF_CLASS: Final[Mapping[FaultClass, ExitClass]] = {
    FaultClass.PROGRAM_ERROR: ExitClass.PROGRAM_ERROR,
    FaultClass.OUT_OF_MEMORY: ExitClass.OUT_OF_MEMORY,
    FaultClass.HOST_STALL: ExitClass.HANG,
    FaultClass.DEVICE_STALL: ExitClass.NODE_FAULT,
    FaultClass.STOPPED_PROCESS: ExitClass.HANG,
    FaultClass.DEAD_PROCESS: ExitClass.DEAD_PROCESS,
    FaultClass.DEAD_NODE: ExitClass.NODE_FAULT,
    FaultClass.OP_MISMATCH: ExitClass.PROGRAM_ERROR,
    FaultClass.SIZE_MISMATCH: ExitClass.PROGRAM_ERROR,
    FaultClass.DTYPE_MISMATCH: ExitClass.PROGRAM_ERROR,
    FaultClass.SKIPPED_COLLECTIVE: ExitClass.HANG,
    FaultClass.EXTRA_COLLECTIVE: ExitClass.HANG,
    FaultClass.DEADLOCK_CYCLE: ExitClass.HANG,
    FaultClass.P2P_UNMATCHED: ExitClass.HANG,
    FaultClass.INPUT_PIPELINE: ExitClass.HANG,
    FaultClass.STORAGE_STALL: ExitClass.HANG,
    FaultClass.IN_FLIGHT_NETWORK: ExitClass.HANG,
    FaultClass.TEARDOWN_HANG: ExitClass.HANG,
    FaultClass.START_UP: ExitClass.START_UP,
    FaultClass.PREEMPTED: ExitClass.PREEMPTED,
    FaultClass.SILENT_CORRUPTION: ExitClass.CORRUPTION,
    FaultClass.STRAGGLER: ExitClass.HANG,
    FaultClass.INSUFFICIENT_DATA: ExitClass.INTERNAL,
    FaultClass.HEALTHY: ExitClass.OK,
}
