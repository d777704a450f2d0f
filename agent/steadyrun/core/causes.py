"""What the last words of a process mean: known texts of exceptions and logs, and what they are evidence of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from steadyrun.core.classes import FaultClass

__all__ = ["CAUSES", "Cause", "decode_cause", "decode_causes", "is_collateral"]


@dataclass(frozen=True, slots=True)
class Cause:
    """A known text.

    Attributes:
        name: stable short name.
        pattern: searched in one line or message.
        words: what it means, for a person.
        hint: what to try; empty where nothing general can be said.
        cls: the fault class it speaks for, or None when it says nothing about the class.
        collateral: it tells of another rank's or node's end; whoever says it is a victim unless nothing else is found.
        weight: of several causes in one text the heaviest is named.
    """

    name: str
    pattern: re.Pattern[str]
    words: str
    hint: str = ""
    cls: FaultClass | None = None
    collateral: bool = False
    weight: int = 50


def _cause(
    name: str,
    pattern: str,
    words: str,
    hint: str = "",
    cls: FaultClass | None = None,
    collateral: bool = False,
    weight: int = 50,
) -> Cause:
    return Cause(name, re.compile(pattern, re.IGNORECASE), words, hint, cls, collateral, weight)


CAUSES: Final[tuple[Cause, ...]] = (
    _cause(
        "device_oom",
        r"CUDA out of memory|HIP out of memory|\bOutOfMemoryError\b|CUBLAS_STATUS_ALLOC_FAILED"
        r"|cuda error: out of memory"
        r"|NVML_ERROR_INSUFFICIENT_MEMORY",
        "the device is out of memory",
        "smaller batch, activation checkpointing; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps fragmentation",
        FaultClass.OUT_OF_MEMORY,
        weight=90,
    ),
    _cause(
        "host_oom",
        r"\bMemoryError\b|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|std::bad_alloc",
        "the host is out of memory",
        "fewer data loader workers, smaller prefetch, or a larger memory limit of the container",
        FaultClass.OUT_OF_MEMORY,
        weight=85,
    ),
    _cause(
        "shm_full",
        r"DataLoader worker .* killed by signal: Bus error|unable to (?:open|write|resize|allocate) .*shared memory"
        r"|insufficient shared memory|No space left on device.*?/dev/shm|/dev/shm.*?No space left on device",
        "shared memory (/dev/shm) is full",
        "a larger /dev/shm (docker --shm-size, an emptyDir with medium Memory), or fewer data loader workers",
        FaultClass.INPUT_PIPELINE,
        weight=95,
    ),
    _cause(
        "loader_worker_died",
        r"DataLoader worker \(pid\S* [\d, ]+\) (?:is killed by signal|exited unexpectedly)",
        "a data loader worker died",
        "its own output above says why; num_workers=0 shows the exception in place",
        FaultClass.INPUT_PIPELINE,
        weight=70,
    ),
    _cause(
        "disk_full",
        r"No space left on device|\bENOSPC\b|Disk quota exceeded|\bEDQUOT\b",
        "no space left on the disk, or the quota is used up",
        "free space where checkpoints and logs go",
        FaultClass.STORAGE_STALL,
        weight=80,
    ),
    _cause(
        "storage_error",
        r"Stale file handle|Errno 5\] Input/output error|Read-only file system|Remote I/O error|"
        r"Transport endpoint is not connected|Transport endpoint shutdown",
        "the file system failed",
        "look at the storage server and at the kernel log of the node",
        FaultClass.STORAGE_STALL,
        weight=75,
    ),
    _cause(
        "device_ecc",
        r"uncorrectable ECC|ECC error|CUDA error: .*hardware|GPU has fallen off the bus|GPU is lost"
        r"|\bXid\b[^\n]*?:? ?(?:48|63|64|74|79|94|95|119|120)\b|Unable to determine the device handle",
        "the device reports a hardware error",
        "look at nvidia-smi -q and the kernel log; reset or replace the device",
        FaultClass.DEVICE_STALL,
        weight=95,
    ),
    _cause(
        "device_error",
        r"CUDA error: (?:unspecified launch failure|misaligned address|an illegal instruction|launch timed out)"
        r"|CUDNN_STATUS_EXECUTION_FAILED|CUBLAS_STATUS_EXECUTION_FAILED",
        "a device kernel failed",
        "CUDA_LAUNCH_BLOCKING=1 names the kernel; the same device twice means the device",
        FaultClass.PROGRAM_ERROR,
        weight=65,
    ),
    _cause(
        "device_assert",
        r"device-side assert triggered|CUDA error: an illegal memory access",
        "a device kernel was given bad data (an index out of range is usual)",
        "CUDA_LAUNCH_BLOCKING=1 names the kernel",
        FaultClass.PROGRAM_ERROR,
        weight=65,
    ),
    _cause(
        "address_in_use",
        r"EADDRINUSE|address already in use",
        "a port is in use by another process",
        "another run on this machine, or a leftover of an earlier one: ss -ltnp shows who holds it",
        FaultClass.START_UP,
        weight=70,
    ),
    _cause(
        "module_missing",
        r"ModuleNotFoundError: No module named '[^']+'|ImportError: cannot import name",
        "a Python module is missing",
        "the environment of the ranks differs from the one the script was written for",
        FaultClass.PROGRAM_ERROR,
        weight=70,
    ),
    _cause(
        "library_missing",
        r"cannot open shared object file|version `[^']+' not found|undefined symbol:",
        "a shared library is missing or of another version",
        "",
        FaultClass.PROGRAM_ERROR,
        weight=65,
    ),
    _cause(
        "script_missing",
        r"can't open file '[^']+': \[Errno 2\]",
        "the script does not exist",
        "check its path and the working directory on every node",
        FaultClass.PROGRAM_ERROR,
        weight=70,
    ),
    _cause(
        "gloo_size_mismatch",
        r"Received data size doesn't match expected size|op\.preamble\.length <= op\.nbytes",
        "ranks called one collective with different sizes",
        "print the tensors' shapes on all ranks before that call",
        FaultClass.SIZE_MISMATCH,
        weight=88,
    ),
    _cause(
        "fingerprint_mismatch",
        r"Detected mismatch between collectives on ranks",
        "ranks called different collectives",
        "the message names the operations and shapes per rank",
        FaultClass.OP_MISMATCH,
        weight=92,
    ),
    _cause(
        "ddp_shape_mismatch",
        r"params\[\d+\] in this process with sizes|inconsistent \d+ params|DDP expects same model across all ranks",
        "the model differs between ranks",
        "",
        FaultClass.PROGRAM_ERROR,
        weight=75,
    ),
    _cause(
        "collective_timeout",
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:send|recv)"
        r"|collective operation timeout|Application timeout caused pair closure"
        r"|monitoredBarrier\b.*?(?:timed out|failed)"
        r"|successfully reached monitoredBarrier|ProcessGroupNCCL's watchdog got stuck"
        r"|wait timeout after \d+ms|Heartbeat monitor timed out",
        "a collective waited in vain for other ranks",
        "",
        collateral=True,
        weight=45,
    ),
    _cause(
        "peer_gone",
        r"connection (?:reset|closed) by (?:remote )?peer|connection was closed by (?:the )?(?:remote|peer)"
        r"|broken pipe|connection refused|socket closed|failed to recv, got 0 bytes|Software caused connection abort"
        r"|pair\.cc[:\d]*\]? .*(?:closed|reset|connect)|Connection timed out|recvValue failed|sendBytes failed"
        r"|The (?:server|client) socket has failed|failed to connect to .*peer|No route to host|DistNetworkError",
        "the connection to another rank broke",
        "",
        collateral=True,
        weight=40,
    ),
    _cause(
        "nccl_remote",
        r"ncclRemoteError|NCCL communicator was aborted|remote process exited or there was a network error"
        r"|Network Error.*NCCL|ncclCommAbort|\bNET/(?:IB|Socket)\b.*(?:error|timeout|failed)",
        "NCCL lost another rank",
        "",
        collateral=True,
        weight=42,
    ),
    _cause(
        "store_gone",
        r"DistStoreError|seconds waiting for clients"
        r"|store.*(?:timed out|timeout|wait timeout)|TCPStore.*(?:failed|closed|timeout)"
        r"|Failed to check the \"should dump\" flag|watchdog thread terminated with exception",
        "the job's store does not answer any more",
        "",
        collateral=True,
        weight=38,
    ),
    _cause(
        "nccl_error",
        r"ncclSystemError|ncclUnhandledCudaError|ncclInternalError|ncclInvalidUsage|ncclInvalidArgument"
        r"|unhandled (?:system|cuda) error.*NCCL|NCCL (?:Error|WARN)",
        "NCCL failed",
        "NCCL_DEBUG=INFO says more",
        weight=35,
    ),
    _cause(
        "not_finite",
        r"(?:loss|grad\w*) (?:is|was|became) (?:nan|inf)|non-?finite (?:loss|grad)|Function '\w+' returned nan values",
        "a value is not finite",
        "TORCH_NCCL_NAN_CHECK=1 names the first rank with one",
        weight=30,
    ),
    _cause(
        "keyboard",
        r"^KeyboardInterrupt\b",
        "interrupted from the keyboard",
        "",
        FaultClass.PREEMPTED,
        collateral=True,
        weight=20,
    ),
)


def decode_cause(text: str) -> Cause | None:
    """The heaviest known cause in *text* (one line or many), or None."""
    found = [c for c in CAUSES if c.pattern.search(text)]
    return max(found, key=lambda c: c.weight, default=None)


def decode_causes(lines: Iterable[str]) -> list[tuple[Cause, str]]:
    """Every known cause in *lines* with the line that says it, heaviest first, each cause once (its first line)."""
    found: dict[str, tuple[Cause, str]] = {}
    for line in lines:
        for cause in CAUSES:
            if cause.name not in found and cause.pattern.search(line):
                found[cause.name] = (cause, line.strip())
    return sorted(found.values(), key=lambda f: -f[0].weight)


def is_collateral(text: str) -> bool:
    """*text* tells of another rank's end and of nothing worse."""
    cause = decode_cause(text)
    return cause is not None and cause.collateral
