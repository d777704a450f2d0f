"""What the pure machines hear and what they ask for. Nothing here does anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from steadyrun.core.board import SlotView
from steadyrun.core.classes import PLANNED, Action, ExitClass
from steadyrun.core.records import Suspicion
from steadyrun.core.sections import WARM_UP_STEPS

__all__ = ["PLANNED", "Command", "Decision", "Event", "NodePhase", "ProbeResult", "RankPhase", "RankSlot"]


class RankPhase(Enum):
    """A rank process as the node sees it. Each phase has one deadline or none."""

    STANDBY = "standby"  # no process of this attempt yet
    STARTING = "starting"  # spawned, the in-rank side has not reported
    RUNNING = "running"
    DUMPING = "dumping"  # evidence is being taken; nothing may be killed
    TERMINATING = "terminating"  # SIGTERM sent (or stop asked for), in its grace
    KILLING = "killing"  # SIGCONT + SIGKILL sent
    STUCK = "stuck"  # survived SIGKILL (state D): only a reboot helps
    EXITED = "exited"


class NodePhase(Enum):
    JOINING = "joining"  # in rendezvous
    STARTING = "starting"  # ranks spawned, not all have reported
    RUNNING = "running"
    GATHERING = "gathering"  # evidence
    STOPPING = "stopping"  # ranks are being stopped, for a restart or for the end
    COOLING = "cooling"  # all ranks gone; waits for the decision, the other nodes, the back-off and the new store
    DRAINING = "draining"  # pre-empted or told to leave: ranks save and leave, in the long grace
    LEFT = "left"
    EXCLUDED = "excluded"  # left because this node is to blame


@dataclass(frozen=True, slots=True)
class RankSlot:
    """Which rank runs in which local place: slot equals local rank."""

    rank: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The second, independent signal about one rank, taken over a confirm window of about ``window_s`` seconds.

    Attributes:
        state: /proc state letter at the end (T stopped, D uninterruptible, Z zombie, R, S).
        cpu_share: CPU seconds per second over the window.
        stack_unchanged: the main thread's stack was the same in every sample but for the innermost line; None unknown.
        in_collective: the innermost frames wait for other ranks.
        compiling: a frame of torch._dynamo, torch._inductor or triton is on the main stack.
        io_moved: bytes read or written by the process moved.
        children_cpu_share: CPU seconds per second of its descendants: a pool that works for a main thread that waits.
        doing: what the main thread does, a value of ``core.frames.Doing``; empty where no stack could be had.
        place: of a rank that waits in a collective, the operation and the user's line that called it.
    """

    rank: int
    window_s: float
    state: str
    cpu_share: float
    stack_unchanged: bool | None
    in_collective: bool = False
    compiling: bool = False
    io_moved: bool = False
    children_cpu_share: float = 0.0
    doing: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What all nodes do with an attempt, published by the node of group rank 0; the same everywhere.

    Attributes:
        action: RESTART, RESTART_WITHOUT_NODE, STOP or REPORT (go on).
        next_attempt: number of the next attempt when restarting.
        rejoin: membership changed: go through the rendezvous again.
        delay_s: back-off before the next start.
        excluded_nodes: group ranks that must leave.
        exit_class: for STOP.
        reason: one line for a person.
    """

    attempt: int
    action: Action
    next_attempt: int
    reason: str
    rejoin: bool = False
    delay_s: float = 0.0
    excluded_nodes: tuple[int, ...] = ()
    exit_class: ExitClass = ExitClass.INTERNAL
    root_cause: int | None = None  # the rank to show first


# -- events ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Joined:
    """Rendezvous done and the attempt's worker store is known."""

    attempt: int
    group_rank: int
    group_world_size: int
    world_size: int
    slots: tuple[RankSlot, ...]


@dataclass(frozen=True, slots=True)
class JoinFailed:
    reason: str
    exit_class: ExitClass


@dataclass(frozen=True, slots=True)
class RankSpawned:
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """No process could be made: wrong path, no memory, too many processes."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class BoardRead:
    """Fresh views of all local ranks' slots; None where no incarnation of this attempt has attached."""

    views: Mapping[int, SlotView | None]


@dataclass(frozen=True, slots=True)
class StatesRead:
    """/proc state letters of local ranks, read with the board (a rank that is left out is unknown)."""

    states: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class RankIdle:
    """A rank that got SIGTERM has since used no CPU and moved no data for a second: it does nothing about it."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankExited:
    """code: exit status; or negative signal number, as subprocess has it."""

    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class ProbesDone:
    """Answers of a Probe command for this node's ranks."""

    results: tuple[ProbeResult, ...]


@dataclass(frozen=True, slots=True)
class EvidenceDone:
    """The local evidence is on disk and published."""

    attempt: int


@dataclass(frozen=True, slots=True)
class PeerStop:
    """Somebody (this node included) asked for the end of the attempt; the first reason wins.

    ``trigger`` as in Evidence, or one of ``PLANNED``: then there is nothing to gather.
    """

    attempt: int
    reason: str
    origin: int  # group rank
    trigger: str = "exit"


@dataclass(frozen=True, slots=True)
class Decided:
    decision: Decision


@dataclass(frozen=True, slots=True)
class AllArrived:
    """Every node of the group has no process of the attempt left."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AllFinished:
    """Every node of the group has seen its ranks end with 0: the job is done."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StoreReady:
    """The next attempt's worker store is up."""

    attempt: int


@dataclass(frozen=True, slots=True)
class ChannelLost:
    """The control store does not answer any more (its host is gone)."""

    reason: str


@dataclass(frozen=True, slots=True)
class NodesWaiting:
    """Rendezvous has new nodes that want in (elastic growth)."""

    count: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """SIGTERM, SIGINT, SIGHUP or SIGQUIT came to the launcher."""

    signal: int


@dataclass(frozen=True, slots=True)
class SweepDone:
    """Leftovers of the attempt were looked for; ``stuck`` are pids that survive SIGKILL."""

    attempt: int
    stuck: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LimitsMade:
    """Limits follow what has been seen; they hold once nobody is late by the new ones who is not by the old."""

    limits: Limits


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline is due, or a poll interval passed."""


Event = (
    Joined
    | JoinFailed
    | RankSpawned
    | SpawnFailed
    | BoardRead
    | StatesRead
    | RankIdle
    | RankExited
    | ProbesDone
    | EvidenceDone
    | PeerStop
    | Decided
    | AllArrived
    | AllFinished
    | StoreReady
    | ChannelLost
    | NodesWaiting
    | StopAsked
    | SweepDone
    | LimitsMade
    | Tick
)


# -- commands --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Join:
    """Enter the rendezvous; answered by Joined or JoinFailed."""


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start one rank (from a standby where there is one); answered by RankSpawned."""

    rank: int
    local_rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Take the second signal of these local ranks over *window_s*; answered by ProbesDone."""

    ranks: tuple[int, ...]
    window_s: float


@dataclass(frozen=True, slots=True)
class Suspect:
    """Write a suspicion into the journal and to the user; *acts*: the rank is taken for hung."""

    suspicion: Suspicion
    note: str
    acts: bool = False


@dataclass(frozen=True, slots=True)
class Alarm:
    """Write into the journal that a calibrated limit has passed, once per pass of the job's, or what followed.

    Attributes:
        stage: ``soft``: the ranks are looked at; ``hard``: time alone acts; ``spared``: nothing shows a hang, *note*
            says why.
        key: what the limit is for: a section, ``step`` or ``out_of_section``.
    """

    stage: str
    key: str
    suspicion: Suspicion
    note: str = ""


@dataclass(frozen=True, slots=True)
class PublishStop:
    """Ask all nodes to end the attempt; every node (this one too) hears PeerStop with the first reason.

    ``since_s``: when the fault happened (exit seen, last sign of progress); ``due_s``: the limit that passed; both on
    CLOCK_MONOTONIC, for the detection delay.
    """

    attempt: int
    reason: str
    trigger: str = "exit"
    since_s: float | None = None
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class Gather:
    """Collect evidence of all local ranks, within *limit_s*; answered by EvidenceDone.

    ``trigger`` as in Evidence; ``suspicions`` of local ranks. ``only_report``: observe mode or an unconfirmed case; the
    verdict is written and nobody is stopped (answered by EvidenceDone too).
    """

    attempt: int
    trigger: str
    reason: str
    suspicions: tuple[Suspicion, ...] = ()
    limit_s: float = 15.0
    only_report: bool = False


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM to the rank's leader only (its data loaders must live through an emergency save)."""

    rank: int


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGCONT + SIGKILL to the rank's process group, its leader dead or not."""

    rank: int


@dataclass(frozen=True, slots=True)
class AskToStop:
    """Make should_stop() agree on a call and return True there (board and peers)."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Find and end what the attempt left: recorded descendants, marked processes, /dev/shm; answered by SweepDone."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Arrive:
    """Tell all nodes that this one has no process of the attempt left; AllArrived follows when all have."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Tell all nodes that this node's ranks ended with 0; AllFinished follows when all have."""

    attempt: int


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Bring up (group rank 0) or look up (others) the worker store of an attempt; answered by StoreReady."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StartStandbys:
    """Steps are stable: prepare interpreters for the next attempt, at low priority."""


@dataclass(frozen=True, slots=True)
class DropStandbys:
    pass


@dataclass(frozen=True, slots=True)
class Leave:
    """The end of this agent's part."""

    exit_class: ExitClass
    reason: str


Command = (
    Join
    | Spawn
    | Probe
    | Suspect
    | Alarm
    | PublishStop
    | Gather
    | Terminate
    | Kill
    | AskToStop
    | Sweep
    | Arrive
    | Finish
    | OpenStore
    | StartStandbys
    | DropStandbys
    | Leave
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Every limit of the watchdog, in seconds; ``inf`` switches one off.

    ``sections`` overrides ``default_section_s`` by name and ``first`` by "first occurrence"; those that the user gave
    or that were calibrated are named in ``accepted`` (``"step"``, ``"setup"``, ``"out_of_section"`` and so on): they
    alone allow to act, the others need a second signal. Keys besides section names: ``start``, ``setup``, ``step``
    (also the time between two steps of a script without sections), ``out_of_section``, ``teardown``.

    ``soft``: by the same keys, when to look at the ranks; only evidence of a hang allows to act then. Never applied to
    a first pass. ``calibrated``: those of ``accepted`` that durations chose; they do not hold for the times between the
    first ``warm_up_steps`` steps after a start, nor for a rank that compiles.
    """

    start_s: float = 300.0  # spawn until the in-rank side reports
    setup_s: float = 1800.0  # until the first step
    step_s: float = 300.0  # between two steps, where no section says more
    first_step_s: float = 1800.0  # the first pass of any section: compilation, NCCL set-up, first batch
    checkpointing_s: float = 1800.0
    evaluation_s: float = 3600.0  # sections named evaluation, eval, evaluate, validation, validate, test
    default_section_s: float = 1800.0
    out_of_section_s: float = 1800.0  # once the script uses sections of its own: between them
    teardown_s: float = 180.0  # interpreter's end, or other ranks have ended
    raised_s: float = 10.0  # a rank that ended by an exception, until its process has ended
    stopped_s: float = 10.0  # in state T or D this long: a suspicion is written
    sections: Mapping[str, float | None] = field(default_factory=dict)  # None as inf
    first: Mapping[str, float | None] = field(default_factory=dict)
    accepted: frozenset[str] = frozenset()
    soft: Mapping[str, float] = field(default_factory=dict)
    calibrated: frozenset[str] = frozenset()
    warm_up_steps: int = WARM_UP_STEPS
    confirm_s: float = 6.0  # window of the second signal
    soft_window_s: float = 2.0  # the same for a soft limit; most of it before the limit
    soft_rest_s: float = 0.4  # that part of it which lies after the limit
    recheck_s: float = 60.0  # next look at a rank that is late and shown to move
    gather_s: float = 15.0
    restart_grace_s: float = 5.0
    final_grace_s: float = 30.0
    checkpoint_grace_s: float = 600.0  # the graces, while a rank is in section checkpointing
    kill_s: float = 15.0  # SIGKILL until a process counts as stuck
    arrive_s: float = 120.0  # for the other nodes
    decide_s: float = 60.0
    standby_after_steps: int = 3
    standby_after_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("start_s", "setup_s", "step_s", "teardown_s", "confirm_s", "gather_s", "kill_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 seconds, got {getattr(self, name)}")
