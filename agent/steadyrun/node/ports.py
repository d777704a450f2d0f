"""What the node's loop needs from outside, as protocols: the loop and its tests know only these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["AsyncStore", "ExitSeen", "ProcessTable", "Rendezvous", "SpawnSpec", "StoreEvent", "SweepReport"]


@dataclass(frozen=True, slots=True)
class SpawnSpec:
    """How to start one rank.

    Attributes:
        argv: command line, argv[0] is the program.
        env: the whole environment.
        attempt: -1 for a standby, which belongs to none yet and which no sweep touches.
        stdout, stderr: files to append to, or None to inherit.
        preexec_nice: added niceness (standbys).
        pass_fds: inherited file descriptors.
        cwd: None for the agent's own.
    """

    rank: int
    local_rank: int
    attempt: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdout: Path | None = None
    stderr: Path | None = None
    nice: int = 0
    pass_fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ExitSeen:
    """A child ended. code: exit status, or minus the signal's number. at_s: CLOCK_MONOTONIC when it was reaped."""

    pid: int
    code: int
    at_s: float


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What the sweep found and did: ended (pid, command), removed /dev/shm files, pids that survive SIGKILL."""

    ended: tuple[tuple[int, str], ...] = ()
    removed: tuple[str, ...] = ()
    stuck: tuple[int, ...] = ()


class ProcessTable(Protocol):
    """Child processes of the agent. Used from the loop's thread only (PDEATHSIG follows the thread that forked)."""

    def spawn(self, spec: SpawnSpec) -> int:
        """Start it in a session of its own; returns the pid. Raises OSError."""
        ...

    def adopt(
        self, pid: int, rank: int, local_rank: int, attempt: int, exit_code: Callable[[], int | None] | None = None
    ) -> None:
        """Watch a child that somebody else started and will reap: *exit_code* gives its code once it is known."""
        ...

    def assign(self, pid: int, rank: int, attempt: int) -> None:
        """From now on *pid*, a standby so far (attempt -1), is this rank of this attempt."""
        ...

    def fileno_of(self, pid: int) -> int:
        """A descriptor (pidfd) that becomes readable when *pid* ends, for the selector."""
        ...

    def poll_exits(self) -> Sequence[ExitSeen]:
        """Children that ended since the last call; never blocks."""
        ...

    def signal(self, pid: int, signum: int) -> bool:
        """Send to the leader only; False when it is gone."""
        ...

    def signal_group(self, pid: int, signum: int) -> bool:
        """Send to the process group that *pid* led, its leader dead or not; False when the group is empty."""
        ...

    def record_descendants(self) -> None:
        """Remember who descends from the children now, so that a later sweep finds those that left the group."""
        ...

    def sweep(self, attempt: int) -> SweepReport:
        """End what finished attempts up to *attempt* left behind; bounded to about a second."""
        ...

    def close(self) -> None:
        """Let go of descriptors; children are not touched."""
        ...


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """A watched key has a value, or (``error`` set) the store is lost."""

    key: str
    value: bytes
    error: str = ""


class AsyncStore(Protocol):
    """The control store without waiting: every call returns at once, answers come through ``drain``.

    One connection in a worker thread for writes, and watchers that block in ``wait``; ``fileno`` wakes the selector.
    """

    def fileno(self) -> int: ...
    def set(self, key: str, value: bytes) -> None: ...
    def set_first(self, key: str, value: bytes) -> None:
        """Set unless it is set already: the first of all nodes wins; watch the key to learn the winner."""
        ...

    def add(self, key: str, amount: int, notify_at: int, notify_key: str) -> None:
        """Add to a counter; whoever brings it to *notify_at* sets *notify_key* to ``1``."""
        ...

    def watch(self, key: str) -> None:
        """Deliver one StoreEvent once the key has a value (at once if it has one already)."""
        ...

    def follow(self, keys: Sequence[str], every_s: float) -> None:
        """Look at *keys* every *every_s* and deliver a StoreEvent for each value that is another than before.

        For keys that are set again and again; what comes between two looks is missed. Replaces the keys of an earlier
        call; without keys nothing is followed any more.
        """
        ...

    def drain(self) -> Sequence[StoreEvent]:
        """Events since the last call; never blocks."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Membership:
    """The result of a rendezvous on this node.

    Attributes:
        ranks: global ranks of this node's processes, by local rank.
        epoch: differs between rendezvous rounds; control keys are prefixed with it.
        attempt_floor: the first attempt number this node would start with (0 for a new job).
        open_worker_store: by group rank 0 only: brings up the attempt's fresh store, returns (host, port) for MASTER_*.
        hosts_store: this process serves the rendezvous and the control store; without it the job falls apart.
    """

    epoch: str
    group_rank: int
    group_world_size: int
    world_size: int
    ranks: tuple[int, ...]
    attempt_floor: int
    store: AsyncStore
    open_worker_store: Callable[[int], tuple[str, int]]
    hosts_store: bool = False


class Rendezvous(Protocol):
    """torch's rendezvous behind our thread: ``join`` blocks and is called from a worker thread."""

    def join(self) -> Membership:
        """Raises RendezvousOverError when the job ended without this node, RendezvousFailedError otherwise."""
        ...

    def nodes_waiting(self) -> int: ...
    def spares(self) -> int:
        """How many nodes could leave now without leaving the job too small, as far as is known; never blocks."""
        ...

    def step_out(self) -> None:
        """Give up this node's place at once: who only vanishes is missed by its heartbeat alone. May take seconds."""
        ...

    def leave(self, job_done: bool) -> None: ...


class RendezvousOverError(Exception):
    """The rendezvous was closed: the job is over and this node was a spare."""


class RendezvousFailedError(Exception):
    """No membership: time-out or unreachable store; the text says which host and port."""
