"""The node's loop: makes events of exits, signals, timers, board and store, and carries out the machine's commands.

One thread waits in one selector. What may block (rendezvous, evidence, probes) runs in short-lived worker threads that
hand their result over through a queue and a wake-up descriptor. Judgement is elsewhere: the machine says when to act,
the incident desk what the evidence means, the policy what follows.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import selectors
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from steadyrun.collectors.gpumap import RankProcess
from steadyrun.collectors.host.space import Folder
from steadyrun.collectors.probe import ProbeRunner
from steadyrun.collectors.process import ProcessReader, ProcessSample
from steadyrun.core import layout
from steadyrun.core.board import Board, SlotView
from steadyrun.core.classes import Action, ExitClass, Mode
from steadyrun.core.clock import Clock
from steadyrun.core.errors import SteadyrunError
from steadyrun.core.files import write_atomically
from steadyrun.core.journal import Journal
from steadyrun.core.records import ExitRecord
from steadyrun.core.runfolder import RunFolder
from steadyrun.core.versions import installed_version
from steadyrun.detect.policy import History, PolicyLimits
from steadyrun.node import control
from steadyrun.node.calibration import Calibration, Timeouts
from steadyrun.node.control import ControlChannel
from steadyrun.node.devices import Devices, DevicesPlan
from steadyrun.node.driver import DriverReader
from steadyrun.node.exporter import Exporter, ExporterPlan, SdTarget
from steadyrun.node.gate import NodeGate
from steadyrun.node.gatejudge import NodeReport
from steadyrun.node.gatekeeper import TRIGGER as NODE_CHECK
from steadyrun.node.gatekeeper import Gatekeeper
from steadyrun.node.guardian import Guardian
from steadyrun.node.incident import Incident, IncidentDesk, Judged, target_of
from steadyrun.node.integrity import CORRUPTION, Case, Integrity
from steadyrun.node.machine import events as ev
from steadyrun.node.machine.node import NodeMachine
from steadyrun.node.metrics import NodeFacts, NodeMetrics, RankLook
from steadyrun.node.ports import (
    Membership,
    ProcessTable,
    Rendezvous,
    RendezvousFailedError,
    RendezvousOverError,
    SpawnSpec,
)
from steadyrun.node.sampling import RingsRead, Sampler
from steadyrun.node.saver import SaverKeeper
from steadyrun.node.standby import StandbyPool
from steadyrun.node.straggling import Replacement, Straggling
from steadyrun.node.sweep import run_marker
from steadyrun.node.tailer import LogTailer

__all__ = ["NodeAgent", "NodeSpec", "Outcome", "RankFailure", "RankLauncher", "SignalSource"]

log = structlog.get_logger()

POLL_S: Final = 0.5  # how often the board is read while nothing is due
STEADY_POLL_S: Final = 2.0  # the same, at most, once nothing but steps has gone on for STEADY_AFTER_S
STEADY_AFTER_S: Final = 3.0
LIVE_S: Final = 5.0  # how often the status file is refreshed without a change
LOADED_LIMIT_S: Final = 20.0  # standbys wait this long for the ranks' lists of modules
DESCENDANTS_S: Final = 5.0  # how often it is noted who descends from the ranks, for the sweep
STEADY_DESCENDANTS_S: Final = 60.0
WAITING_S: Final = 1.0  # how often the rendezvous is asked for newcomers
IDLE_S: Final = 1.0  # after SIGTERM: without CPU and data for this long a rank counts as blocked
IDLE_POLL_S: Final = 0.2
IDLE_CPU_S: Final = 0.01
SAVE_FIRST_S: Final = 30.0  # a planned restart waits for a save at most so long; the saver, for a few steps
SAVE_ANSWER_S: Final = 3.0
STOP_CALL_MARGIN_S: Final = 0.5  # should_stop() takes effect this many seconds' worth of calls ahead


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What the launcher decided about this node's part of the job.

    Attributes:
        run_id: the rendezvous id.
        node: this node's name in records, unique in the job (host name, made unique by the launcher).
        local_world_size: ranks on this node.
        script: the entry point as the user gave it; frames below its folder count as the user's.
        max_restarts: obeyed exactly; None: by progress, ``restart_budget`` without a newly reached step.
        observed: ranks run our in-rank side (False for --no-python and callables).
        standby: keep warm interpreters.
        preload: modules that standbys import besides what the first incarnation reported.
        elastic: the membership may grow.
        timeouts: whether ``limits`` are only what the watchdog begins with.
        configuration: what runs must share for their durations to be comparable.
        rollback: what --ft-rollback asks for: ``to``, ``skip_batches``, ``id``; None: nothing.
        timing: ranks tell how long each step's own work took.
        straggler_action: what follows from a slow rank, one of ``straggling.ACTIONS``.
        metrics: where this node's metrics are served.
        devices: what is watched below the ranks; None for nothing.
        sdc_replay: steps between replays of microbatches, as ``sdc``.
        node_check: how the node is checked before an attempt, one of ``gate.LEVELS``.
        sdc: steps between checks of the ranks' bytes; 0: none; None: what their cost allows.
        loss_spike: ``rollback`` or ``off``.
    """

    run_id: str
    node: str
    local_world_size: int
    mode: Mode
    limits: ev.Limits
    run_folder: RunFolder
    script: str = ""
    max_restarts: int | None = None
    restart_budget: int = 3
    observed: bool = True
    standby: bool = True
    preload: tuple[str, ...] = ()
    faults: str = ""
    deadman_s: float = 300.0
    stack_signal: int = field(default_factory=lambda: signal.SIGRTMAX - 3)
    elastic: bool = False
    timeouts: Timeouts = Timeouts.AUTO
    configuration: str = ""
    rollback: Mapping[str, Any] | None = None
    timing: bool = True
    straggler_action: str = "report"
    metrics: ExporterPlan = field(default_factory=ExporterPlan)
    devices: DevicesPlan | None = None
    sdc_replay: int | None = 0
    node_check: str = "off"
    sdc: int | None = None
    loss_spike: str = "off"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """One failed rank, as ChildFailedError wants it; *exitcode* is minus the signal's number for a signal.

    *by_us*: it was ended by this agent, so the signal says nothing about the fault.
    """

    rank: int
    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    at_unix_s: float
    by_us: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How this node's part ended. ``failures`` is empty on success and for a spare that was never needed."""

    exit_class: ExitClass
    reason: str
    failures: Mapping[int, RankFailure] = field(default_factory=dict)
    root_cause: int | None = None
    ranks: tuple[int, ...] = ()
    restarts: int = 0


class RankLauncher(Protocol):
    """Builds command line, environment and log destinations of ranks; knows torchrun's conventions."""

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
        """One rank. *setup* is what the in-rank side is told (STEADYRUN_SETUP); ignored for unobserved ranks."""
        ...

    def standby_spec(self, local_rank: int, standby: Mapping[str, Any]) -> SpawnSpec:
        """The interpreter of a warm standby; *standby* is STEADYRUN_STANDBY without its descriptors."""
        ...

    def orders_for(self, spec: SpawnSpec, setup: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a standby is told to become *spec*."""
        ...

    def error_file(self, attempt: int, local_rank: int) -> str: ...


class SignalSource(Protocol):
    """Signals that came to the launcher, in order."""

    def fileno(self) -> int: ...
    def drain(self) -> Sequence[int]: ...


@dataclass(slots=True)
class _RankProcess:
    rank: int
    local_rank: int
    attempt: int
    pid: int
    spawned_s: float
    warm: bool
    spec: SpawnSpec
    folder: Path
    exit: ExitRecord | None = None
    signalled: bool = False
    attached: bool = False


class _Mailbox:
    """Results of worker threads, with a descriptor that wakes the selector."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def post(self, then: Callable[[], None]) -> None:
        """From any thread: run *then* in the loop."""
        self._queue.put(then)
        os.eventfd_write(self._fd, 1)

    def drain(self) -> list[Callable[[], None]]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        out: list[Callable[[], None]] = []
        while not self._queue.empty():
            out.append(self._queue.get_nowait())  # only this thread takes, so it cannot be empty meanwhile
        return out

    def close(self) -> None:
        os.close(self._fd)


class _Watcher:
    """The loop's selector, as the saver's keeper sees it."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector

    def watch(self, fd: int, then: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, then)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)


class NodeAgent:
    """One node's agent; ``run`` does everything and returns how it ended."""

    def __init__(
        self,
        spec: NodeSpec,
        rendezvous: Rendezvous,
        processes: ProcessTable,
        launcher: RankLauncher,
        clock: Clock,
        signals: SignalSource | None = None,
        tailer: LogTailer | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._spec = spec
        self._rendezvous = rendezvous
        self._processes = processes
        self._launcher = launcher
        self._clock = clock
        self._signals = signals
        self._say = say
        self._machine = NodeMachine(spec.local_world_size, spec.limits, spec.mode, observed=spec.observed)
        self._board = Board.create_anonymous(spec.local_world_size)
        self._calibration = Calibration(spec.run_folder, spec.configuration, spec.limits, spec.timeouts)
        version = installed_version("steadyrun") or "unknown"  # run from a source tree
        self._own_facts = NodeFacts(spec.run_id, spec.node, version, spec.local_world_size)
        self._metrics = NodeMetrics(
            self._own_facts,
            clock.now_s(),
            clock.unix_s(),
            lambda: clock.unix_s() - clock.now_s(),
            clock.now_s,
            self._helper_pids,
        )
        self._exporter = Exporter(
            spec.metrics, self._metrics.series, spec.run_id, f"{spec.run_id}-{spec.node}", self._on_exporter
        )
        self._metrics_address: str | None = None
        self._journal = Journal(spec.run_folder.journal(spec.node), spec.node, self._on_record)
        self._mailbox = _Mailbox()
        self._proc = ProcessReader()
        self._selector = selectors.DefaultSelector()
        self._tailer = tailer
        self._sampler = Sampler(self._board, self._journal, clock, spec.node)
        self._standbys = StandbyPool(processes) if spec.standby else None
        self._desk = IncidentDesk(
            spec.run_folder,
            spec.run_id,
            spec.node,
            spec.mode,
            os.path.abspath(spec.script) if os.path.isfile(spec.script) else spec.script,
            clock,
            self._mailbox.post,
            PolicyLimits(max_restarts=spec.max_restarts, without_progress=spec.restart_budget),
        )
        self._pace = Straggling(
            spec.node, clock, self._desk, self._record, say, spec.straggler_action, self._replace_slow
        )
        self._has_replaced_slow = False
        self._planned: tuple[Replacement, tuple[int, ...], float] | None = None  # who is left out, until when it waits
        self._driver = DriverReader()
        gate = _gate_of(spec, self._driver)
        self._gate = Gatekeeper(spec.node, gate, clock, self._record, say, self._mailbox.post)
        self._early_decision: tuple[int, Mapping[str, Any]] | None = None  # of an attempt that has not begun here
        self._integrity = Integrity(
            spec.node,
            clock,
            self._desk,
            self._record,
            say,
            self._in_thread,
            self._mailbox.post,
            spec.mode,
            self._stop_corrupted,
            self._order_check,
            self._replan if spec.loss_spike == "rollback" else None,
        )
        self._guardian: Guardian | None = None
        self._devices: Devices | None = None
        self._saver: SaverKeeper | None = None
        self._channel: ControlChannel | None = None
        self._membership: Membership | None = None
        self._master: tuple[str, int] = ("", 0)
        self._attempt = 0
        self._floor = 0  # the first attempt number this node has not seen used
        self._begun: int | None = None  # the attempt whose first rank was spawned last
        self._history = History()
        self._incident: Incident | None = None
        self._ranks: dict[int, _RankProcess] = {}
        self._views: dict[int, SlotView | None] = {}
        self._probed: dict[int, ev.ProbeResult] = {}
        self._pidfds: dict[int, int] = {}
        self._calls: dict[int, int] = {}
        self._call_rate_hz = 0.0
        self._last_calls: tuple[float, int] = (0.0, 0)
        self._drained = False
        self._standbys_ready = 0
        self._standbys_due_s = math.inf  # until then standbys wait for what the ranks say they have loaded
        self._loaded: dict[int, Mapping[str, Any]] = {}
        self._told_memory = False
        self._spare_folder: RunFolder | None = None
        self._stores: dict[int, tuple[str, int]] = {}
        self._told_failures: dict[int, RankFailure] = {}
        self._root_cause: int | None = None
        self._outcome: Outcome | None = None
        self._next_poll_s = 0.0
        self._steady_from_s = math.inf
        self._next_live_s = 0.0
        self._next_waiting_s = 0.0
        self._next_descendants_s = 0.0
        self._next_idle_s = math.inf
        self._awake_since_s = clock.now_s()
        self._idle_since: dict[int, tuple[ProcessSample, float]] = {}
        self._started_unix_s = clock.unix_s()
        self._live_path = spec.run_folder.state / f"{spec.node}.json"

    @property
    def metrics(self) -> NodeMetrics:
        """What this node exports."""
        return self._metrics

    # -- the loop ----------------------------------------------------------------------------------------------------
    def run(self) -> Outcome:
        """Join, run, restart and end. Raises only for faults of our own; ranks are then ended first."""
        spec = self._spec
        self._record(
            "run_started",
            script=spec.script,
            local_world_size=spec.local_world_size,
            mode=spec.mode,
            configuration=spec.configuration,
        )
        try:
            self._guardian = Guardian(run_marker(spec.run_id, spec.node), spec.run_folder.root, spec.node)
        except OSError as e:
            self._say(f"steadyrun: cannot start the guardian: {e}; a killed agent may leave processes behind")
        try:
            self._selector.register(self._mailbox.fileno(), selectors.EVENT_READ, self._on_mail)
            if spec.observed:
                root = spec.run_folder.root
                self._saver = SaverKeeper(
                    root,
                    spec.node,
                    _Watcher(self._selector),
                    self._say,
                    self._on_saver_record,
                    self._replan,
                    self._on_saved,
                )
            if self._signals is not None:
                self._selector.register(self._signals.fileno(), selectors.EVENT_READ, self._on_signals)
            if self._tailer is not None and (growth := self._tailer.fileno()) is not None:
                self._selector.register(growth, selectors.EVENT_READ, self._tailer.wake)
            self._exporter.start()
            if spec.devices is not None:
                self._watch_devices(spec.devices)
            self._do(self._machine.start(self._clock.now_s()))
            while self._outcome is None:
                self._one_pass()
            return self._outcome
        finally:
            self._close()

    def _one_pass(self) -> None:
        now_s = self._clock.now_s()
        self._take_early_decision()
        wake_s = min(
            self._machine.next_deadline_s(), self._next_poll_s, self._desk.next_deadline_s(), self._next_idle_s
        )
        if self._tailer is not None:
            wake_s = min(wake_s, self._tailer.due_s)
        timeout_s = min(max(wake_s - now_s, 0.0), STEADY_POLL_S)
        busy_s = now_s - self._awake_since_s  # nobody was listened to for so long
        ready = self._selector.select(timeout_s)
        self._awake_since_s = self._clock.now_s()
        self._metrics.lagged(now_s, max(busy_s, self._awake_since_s - now_s - timeout_s, 0.0))
        for key, _ in ready:
            key.data()
        now_s = self._clock.now_s()
        self._board.words[layout.H_AGENT_BEAT] = layout.now_word(self._board.base_ns)
        due = now_s >= self._machine.next_deadline_s()
        if due or now_s >= self._next_poll_s:
            if not self._read_board(now_s):
                self._feed(ev.Tick())
            self._look_after_standbys()
            self._next_poll_s = now_s + self._poll_s(now_s)
        if now_s >= self._next_idle_s:
            self._look_for_idle(now_s)
        if now_s >= self._next_descendants_s:
            self._next_descendants_s = now_s + (STEADY_DESCENDANTS_S if self._is_steady(now_s) else DESCENDANTS_S)
            self._processes.record_descendants()
        if now_s >= self._desk.next_deadline_s():
            self._judge_when_complete(now_s)
        if self._tailer is not None and now_s >= self._tailer.due_s:
            self._tailer.pump(now_s)
        self._follow_calibration(now_s)
        self._gate.tick()
        if now_s >= self._next_live_s:
            self._write_live(now_s)
        if self._spec.elastic and now_s >= self._next_waiting_s and self._machine.phase is ev.NodePhase.RUNNING:
            self._next_waiting_s = now_s + WAITING_S
            self._in_thread("waiting", self._ask_waiting)

    def _follow_calibration(self, now_s: float) -> None:
        limits = self._calibration.limits()
        if limits is not None:
            names = limits.calibrated | limits.soft.keys()
            first = {name: s for name, s in limits.first.items() if name in names}
            hard = {name: s for name, s in limits.sections.items() if name in limits.calibrated}
            self._record("limits", soft=dict(limits.soft), hard=hard, first=first)
            self._feed(ev.LimitsMade(limits))
            self._next_live_s = now_s
        self._calibration.write(now_s)

    def _feed(self, event: ev.Event) -> None:
        if self._outcome is None:
            before = self._machine.phase
            commands = self._machine.handle(event, self._clock.now_s())
            if self._machine.phase is not before:
                self._next_live_s = 0.0
                now_s, is_running = self._clock.now_s(), self._machine.phase is ev.NodePhase.RUNNING
                self._steady_from_s = now_s + STEADY_AFTER_S if is_running else math.inf
                self._next_poll_s = min(self._next_poll_s, now_s + POLL_S)
                self._record("phase", phase=self._machine.phase)
            self._do(commands)

    def _is_steady(self, now_s: float) -> bool:
        """Nothing but steps goes on; deadlines are met at their own times, whatever is looked at between them."""
        standbys = self._standbys
        return now_s >= self._steady_from_s and (
            standbys is None or (standbys.is_settled and self._standbys_due_s == math.inf)
        )

    def _poll_s(self, now_s: float) -> float:
        """Until the next look at the board; in the steady state as often as steps, checks and rings need it."""
        if not self._is_steady(now_s):
            return POLL_S
        wanted_s = min(self._sampler.period_s, self._integrity.period_s)
        return min(max(wanted_s, POLL_S), STEADY_POLL_S)

    def _in_thread(self, name: str, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=f"steadyrun-{name}", daemon=True).start()

    def _on_mail(self) -> None:
        for then in self._mailbox.drain():
            then()

    def _on_record(self, record: Mapping[str, Any]) -> None:
        self._calibration.read(record)
        self._metrics.read(record)

    def _record(self, type_: str, **fields: Any) -> None:
        self._journal.write(type_, self._clock.unix_s(), self._clock.now_s(), self._attempt, **fields)

    def _on_saver_record(self, type_: str, **fields: Any) -> None:
        self._record(type_, **fields)
        if type_ == "checkpoint_started" and self._devices is not None and isinstance(fields.get("path"), str):
            self._devices.watch_folder("checkpoints", Path(fields["path"]).parent)
        if type_ in ("checkpoint_in_memory", "checkpoint_committed") and isinstance(fields.get("step"), int):
            self._desk.saved(fields["step"])
            self._integrity.on_checkpoint(type_, fields["step"], str(fields.get("path") or ""))
        elif type_ in ("checkpoint_loaded", "checkpoint_removed"):
            self._integrity.on_checkpoint(type_, fields.get("step"), str(fields.get("path") or ""))

    # -- commands ----------------------------------------------------------------------------------------------------
    def _do(self, commands: Sequence[ev.Command]) -> None:
        for command in commands:
            match command:
                case ev.Join():
                    self._close_channel()
                    self._gate.begin(self._helpers_on_gpus())
                    self._in_thread("join", self._join)
                case ev.OpenStore(attempt=attempt):
                    self._open_store(attempt)
                case ev.Spawn():
                    self._spawn(command)
                case ev.Probe():
                    self._probe(command)
                case ev.Suspect(suspicion=suspicion, note=note):
                    self._record("suspicion", suspicion=suspicion, note=note, acts=command.acts)
                    self._say(f"steadyrun: {note}")
                case ev.Alarm(stage=stage, key=key, suspicion=suspicion, note=note):
                    self._record("alarm", stage=stage, key=key, suspicion=suspicion, note=note)
                case ev.PublishStop():
                    self._publish_stop(command)
                case ev.Gather():
                    self._gather(command)
                case ev.Terminate(rank=rank):
                    self._signal_rank(rank, signal.SIGTERM)
                    self._watch_idleness(rank)
                    self._signal_rank(rank, signal.SIGCONT)  # to a stopped one SIGTERM would wait for SIGKILL
                case ev.Kill(rank=rank):
                    self._kill_rank(rank)
                case ev.AskToStop():
                    if self._channel is not None:
                        self._channel.tell_drain({"origin": self._channel.group_rank, "node": self._spec.node})
                case ev.Sweep(attempt=attempt):
                    self._gate.begin(self._helpers_on_gpus(), afresh=True)  # beside the sweep
                    self._sweep(attempt)
                case ev.Arrive(attempt=attempt):
                    self._arrive(attempt)
                case ev.Finish(attempt=attempt):
                    if self._channel is not None:
                        self._channel.tell_finished(attempt)
                case ev.StartStandbys():
                    self._standbys_due_s = self._clock.now_s() + LOADED_LIMIT_S
                    self._start_standbys()
                case ev.DropStandbys():
                    self._standbys_due_s = math.inf
                    if self._standbys is not None:
                        self._standbys.drop()
                case ev.Leave(exit_class=exit_class, reason=reason):
                    self._gate.hurry()
                    self._leave(exit_class, reason)

    # -- joining -----------------------------------------------------------------------------------------------------
    def _join(self) -> None:
        """In a worker thread."""
        try:
            membership = self._rendezvous.join()
        except RendezvousOverError as e:
            reason, exit_class = str(e) or "the job ended without needing this node", ExitClass.OK
        except RendezvousFailedError as e:
            reason, exit_class = str(e), ExitClass.START_UP
        except Exception as e:  # torch's rendezvous raises what its backends raise
            reason, exit_class = f"cannot join the rendezvous: {type(e).__name__}: {e}", ExitClass.START_UP
        else:
            self._gate.wait()
            self._mailbox.post(lambda: self._on_membership(membership))
            return
        self._mailbox.post(lambda: self._feed(ev.JoinFailed(reason, exit_class)))

    def _on_membership(self, membership: Membership) -> None:
        self._membership = membership
        self._channel = ControlChannel(
            membership.store, membership.group_rank, membership.group_world_size, self._clock.unix_s
        )
        self._selector.register(self._channel.fileno(), selectors.EVENT_READ, self._on_channel)
        self._calls.clear()
        self._stores.clear()
        self._drained = False
        self._desk.hosts_store = membership.hosts_store
        scores = self._desk.scores
        state = {
            "history": self._desk.pack_history(self._history),
            "scores": scores.pack(),
            "machine": scores.machine(self._spec.node),
            "gate": self._gate.told(membership.hosts_store),
            "integrity": self._integrity.pack(),
        }
        self._channel.tell_floor(max(self._floor, membership.attempt_floor), state)
        self._exporter.take_membership(membership.group_rank)
        self._tell_metrics()
        if self._channel.is_leader:
            self._channel.expect_metrics()

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._selector.unregister(self._channel.fileno())
            self._channel.close()
            self._channel = None

    def _ask_waiting(self) -> None:
        """In a worker thread."""
        try:
            count = self._rendezvous.nodes_waiting()
        except Exception:  # an unreachable store shows elsewhere
            return
        if count > 0:
            self._mailbox.post(lambda: self._feed(ev.NodesWaiting(count)))

    def _open_store(self, attempt: int) -> None:
        assert self._channel is not None
        assert self._membership is not None
        self._channel.start_attempt(attempt)
        if self._channel.is_leader and attempt not in self._stores:
            try:
                host, port = self._membership.open_worker_store(attempt)
            except Exception as e:  # the store's own errors differ between backends
                self._feed(ev.ChannelLost(f"cannot open the worker store of attempt {attempt}: {e}"))
                return
            self._channel.tell_store(attempt, host, port)

    # -- messages of the channel -------------------------------------------------------------------------------------
    def _on_channel(self) -> None:
        channel = self._channel
        if channel is None:
            return
        for message in channel.drain():
            if self._channel is not channel:
                return
            self._on_message(channel, message)

    def _on_message(self, channel: ControlChannel, message: control.Message) -> None:
        now_s = self._clock.now_s()
        match message:
            case control.Agreed(attempt=attempt, state=state):
                self._history = self._desk.unpack_history(state.get("history"), self._history)
                self._integrity.adopt(state.get("integrity"))
                for note in self._desk.scores.begin(state.get("scores"), state.get("machines")):
                    self._record("node_score", note=note)
                    if channel.is_leader:
                        self._say(f"steadyrun: {note}")
                self._attempt = attempt
                self._open_store(attempt)
                self._pass_gate(channel, attempt, state)
            case control.StoreTold(attempt=attempt, host=host, port=port):
                self._stores[attempt] = (host, port)
                self._master = (host, port)
                if self._machine.phase is ev.NodePhase.JOINING:
                    self._feed(self._joined(attempt))
                else:
                    self._feed(ev.StoreReady(attempt))
            case control.StopTold(attempt=attempt, payload=payload):
                self._on_stop(channel, attempt, payload)
            case control.EvidenceTold(attempt=attempt, group_rank=group_rank, payload=payload):
                self._desk.add_evidence(attempt, group_rank, payload)
                self._judge_when_complete(now_s)
            case control.DecisionTold(attempt=attempt, payload=payload):
                self._on_decision(attempt, payload)
            case control.Arrived(attempt=attempt):
                self._feed(ev.AllArrived(attempt))
            case control.Finished(attempt=attempt):
                self._feed(ev.AllFinished(attempt))
            case control.DrainTold():
                self._on_drain(channel)
            case control.CallsTold(group_rank=group_rank, calls=calls):
                self._calls[group_rank] = calls
                if len(self._calls) == channel.group_world_size:
                    ahead = 2 + math.ceil(self._call_rate_hz * STOP_CALL_MARGIN_S)
                    channel.tell_stop_at(max(self._calls.values()) + ahead)
            case control.PaceTold():
                self._pace.hear(message)
            case control.MetricsTold(group_rank=group_rank, address=address):
                self._exporter.add_target(SdTarget(address, self._spec.run_id, group_rank))
            case control.RootsTold() | control.AskTold() | control.AnswerTold():
                self._integrity.hear(message)
            case control.StopAtTold(call=call):
                self._board.words[layout.H_STOP_AT_CALL] = call
                self._record("stop_agreed", call=call)
            case control.Lost(reason=reason):
                self._feed(ev.ChannelLost(reason))

    def _joined(self, attempt: int) -> ev.Joined:
        m = self._membership
        assert m is not None
        slots = tuple(ev.RankSlot(rank, local_rank) for local_rank, rank in enumerate(m.ranks))
        return ev.Joined(attempt, m.group_rank, m.group_world_size, m.world_size, slots)

    def _on_drain(self, channel: ControlChannel) -> None:
        if self._drained:
            return
        self._drained = True
        self._board.words[layout.H_STOP_REQUESTED] = 1
        views = [v for v in self._fresh_views().values() if v is not None]
        channel.tell_calls(max((v.stop_calls for v in views), default=0))

    # -- incidents ---------------------------------------------------------------------------------------------------
    def _publish_stop(self, command: ev.PublishStop, excluded: Sequence[int] = ()) -> None:
        if self._channel is None:
            return
        payload = {
            "reason": command.reason,
            "trigger": command.trigger,
            "origin": self._channel.group_rank,
            "node": self._spec.node,
            "incident": self._desk.next_number(),
            "detected_at_unix_s": self._clock.unix_s(),
            "delay_s": self._clock.now_s() - command.since_s if command.since_s is not None else 0.0,
            "past_limit_s": self._clock.now_s() - command.due_s if command.due_s is not None else None,
            "excluded": list(excluded),
        }
        self._channel.tell_stop(command.attempt, payload)

    def _order_check(self, step: int) -> None:
        """This node's ranks are to check their bytes after *step*."""
        self._board.words[layout.H_CHECK_AT] = step + 1

    def _replan(self, why: str) -> None:
        """The saver has found a request to go back to an older checkpoint."""
        if self._channel is not None and self._machine.phase is ev.NodePhase.RUNNING:
            self._say(f"steadyrun: {why}: ranks are restarted")
            self._publish_stop(ev.PublishStop(self._attempt, why, "rollback", None, None))

    def _replace_slow(self, wanted: Replacement) -> None:
        """A restart pays: without the slow node where the job can do without it, else in place, once."""
        if wanted.attempt != self._attempt or self._machine.phase is not ev.NodePhase.RUNNING:
            return
        if self._spec.mode is Mode.OBSERVE:
            self._say(f"steadyrun: {wanted.reason}; a restart would pay (mode observe: nothing is done)")
            return
        excluded: tuple[int, ...] = ()
        spares = self._rendezvous.spares()
        if wanted.group_rank is not None and spares > 0 and not wanted.hosts_store:
            excluded, how = (wanted.group_rank,), f"restarting without node {wanted.node}, as others can take its place"
        elif self._has_replaced_slow:
            self._say(f"steadyrun: {wanted.reason}; there is no spare node, and a restart in place has been tried")
            return
        else:
            self._has_replaced_slow = True
            why = f"{wanted.node} hosts the rendezvous" if wanted.hosts_store and spares > 0 else "no spare is there"
            how = f"{why}: restarting in place, once"
        self._say(f"steadyrun: {wanted.reason}; {how}")
        planned = (wanted, excluded, self._clock.now_s() + SAVE_FIRST_S + SAVE_ANSWER_S)
        if self._saver is not None and self._saver.ask_save(SAVE_FIRST_S):
            self._planned = planned  # what is trained until the stop is saved first
        else:
            self._restart_without_slow(planned)

    def _on_saved(self, step: int | None, why: str) -> None:
        """The saver's answer, or that there is none, before a planned restart."""
        planned, self._planned = self._planned, None
        if planned is None:
            return
        saved = f"step {step} is saved for the restart" if step is not None else f"no save before the restart: {why}"
        self._say(f"steadyrun: {saved}")
        self._restart_without_slow(planned)

    def _restart_without_slow(self, planned: tuple[Replacement, tuple[int, ...], float]) -> None:
        wanted, excluded, _ = planned
        if wanted.attempt != self._attempt or self._machine.phase is not ev.NodePhase.RUNNING:
            return
        if excluded:
            self._desk.leaves_out_slow(wanted.node)
        self._publish_stop(ev.PublishStop(wanted.attempt, wanted.reason, "straggler", None, None), excluded)

    def _stop_corrupted(self, case: Case) -> bool:
        """Ranks train on wrong bytes: all of them go back. False where nobody can be stopped now."""
        if case.attempt != self._attempt or self._machine.phase is not ev.NodePhase.RUNNING:
            return False
        self._say(f"steadyrun: wrong bytes: {case.reason}; going back to step {case.to}")
        self._publish_stop(ev.PublishStop(case.attempt, case.reason, CORRUPTION, case.found_at_s, None))
        return True

    def _on_stop(self, channel: ControlChannel, attempt: int, payload: Mapping[str, Any]) -> None:
        if attempt < self._attempt:
            return
        trigger = str(payload.get("trigger", "exit"))
        self._record("stop", **{k: payload.get(k) for k in ("reason", "trigger", "origin", "incident", "delay_s")})
        if self._saver is not None:
            self._saver.flush(self._spec.limits.gather_s)  # it has what it needs: the ranks may be dead or hang
        if trigger not in ev.PLANNED:
            self._incident = self._desk.open(int(payload.get("incident", 0)), attempt, payload)
            if channel.is_leader:
                channel.expect_evidence(attempt)
                self._desk.expect(
                    self._incident, channel.group_world_size, self._clock.now_s() + self._spec.limits.gather_s + 5.0
                )
        elif channel.is_leader:
            excluded = tuple(int(g) for g in payload.get("excluded") or ())
            if trigger == NODE_CHECK:
                self._desk.leaves_out_unfit(excluded)
            decision = ev.Decision(
                attempt,
                Action.RESTART_WITHOUT_NODE if excluded else Action.RESTART,
                attempt + 1,
                str(payload.get("reason", "")),
                rejoin=trigger == "membership" or bool(excluded),
                excluded_nodes=excluded,
            )
            channel.tell_decision(attempt, self._pack_decision(decision))
        self._feed(ev.PeerStop(attempt, str(payload.get("reason", "")), int(payload.get("origin", 0)), trigger))

    def _gather(self, command: ev.Gather) -> None:
        incident = self._incident
        if command.only_report or incident is None or incident.attempt != command.attempt:
            now_s = self._clock.now_s()
            oldest = min(command.suspicions, key=lambda s: s.since_s + s.limit_s, default=None)
            payload = {
                "reason": command.reason,
                "trigger": command.trigger,
                "detected_at_unix_s": self._clock.unix_s(),
                "delay_s": now_s - oldest.since_s if oldest else 0.0,
                "past_limit_s": now_s - oldest.since_s - oldest.limit_s if oldest else None,
            }
            incident = self._desk.open(self._desk.next_number(), command.attempt, payload)
            incident = replace(incident, only_report=command.only_report)
        suspicions = {s.rank: s for s in command.suspicions}
        if self._devices is not None:
            self._devices.look_again()
        views = self._fresh_views()
        targets = [
            target_of(
                p.rank,
                p.local_rank,
                p.pid,
                p.attempt,
                views.get(p.rank),
                p.exit,
                p.folder,
                [path for path in (p.spec.stderr, p.spec.stdout) if path is not None],
                suspicions.get(p.rank),
                self._probed.get(p.rank),
                self._devices.gpu_of(p.rank) if self._devices is not None else None,
            )
            for p in self._ranks.values()
        ]
        attempt, opened = command.attempt, incident
        self._desk.collect(
            opened,
            targets,
            list(views.values()),
            self._spec.stack_signal,
            command.limit_s,
            lambda: self._on_collected(attempt, opened),
            self._exit_of,
        )

    def _has_recorder(self, rank: int) -> bool:
        """The rank has process groups, and so a flight recorder that can be asked."""
        process = self._ranks.get(rank)
        return process is not None and (process.folder / "flight.json").exists()

    def _exit_of(self, rank: int) -> ExitRecord | None:
        """From the collector's thread."""
        process = self._ranks.get(rank)
        return process.exit if process is not None else None

    def _on_collected(self, attempt: int, incident: Incident) -> None:
        found = self._desk.own_evidence(incident)
        living = [r for r in found if r.exit is None and r.attached]
        recording = [r for r in living if r.flight is not None or self._has_recorder(r.rank)]
        self._metrics.take_dumps([bool(r.stacks) for r in living], [r.flight is not None for r in recording])
        if incident.only_report:
            world_size = self._membership.world_size if self._membership is not None else 0
            self._tell_verdict(incident, self._desk.judge_own(incident, world_size, self._history))
        elif self._channel is not None:
            self._channel.tell_evidence(attempt, self._desk.packed_evidence(incident))
        self._feed(ev.EvidenceDone(attempt))

    def _judge_when_complete(self, now_s: float) -> None:
        if not self._desk.ready_to_judge(now_s) or self._channel is None or not self._channel.is_leader:
            return
        world_size = self._membership.world_size if self._membership is not None else 0
        has_older = self._saver is not None and self._saver.has_older(self._attempt)
        spares = self._rendezvous.spares()
        case = self._integrity.case_of(self._attempt)
        incident, judged = self._desk.judge_all(world_size, self._history, has_older, spares, case)
        self._history = judged.history
        self._count_budget()
        if case is not None and judged.decision.action is not Action.STOP:
            self._integrity.go_back(case, incident.number, self._spec.run_id)
        self._tell_verdict(incident, judged)
        if self._saver is not None and self._history.attempts:
            ended = self._history.attempts[-1]
            signature = ended.tracebacks[0][0] if ended.tracebacks else ""
            self._saver.tell_failed(incident.attempt, ended.highest_step, signature, judged.falls_back)
        self._channel.tell_decision(incident.attempt, self._pack_decision(judged.decision))

    def _tell_verdict(self, incident: Incident, judged: Judged) -> None:
        self._record("incident", number=incident.number, verdict=judged.verdict)
        self._say(judged.text)

    def _pack_decision(self, d: ev.Decision) -> dict[str, Any]:
        return {
            "action": d.action.value,
            "next_attempt": d.next_attempt,
            "reason": d.reason,
            "rejoin": d.rejoin,
            "delay_s": d.delay_s,
            "excluded_nodes": list(d.excluded_nodes),
            "exit_class": int(d.exit_class),
            "root_cause": d.root_cause,
            "history": self._desk.pack_history(self._history),
            "scores": self._desk.scores.pack(),
            "integrity": self._integrity.pack(),
        }

    # -- node check --------------------------------------------------------------------------------------------------
    def _helpers_on_gpus(self) -> list[int]:
        standbys = self._standbys.status() if self._standbys is not None else []
        return [*self._helper_pids(), *(int(s["pid"]) for s in standbys)]

    def _pass_gate(self, channel: ControlChannel, attempt: int, state: Mapping[str, Any]) -> None:
        """The nodes are in, none of their ranks has been started: who is unfit is named, and left out with spares."""
        if not channel.is_leader:
            nodes = self._desk.scores.nodes
            self._gate.hear_leader(nodes[0] if nodes else "the leader", state.get("told_at_unix_s"))
            return
        if self._spec.node_check == "off":
            return
        spares = self._rendezvous.spares() if self._spec.mode is Mode.ACT else 0
        verdict = self._gate.judge(channel.told_of("gate"), spares)
        if verdict.excluded:
            stop = ev.PublishStop(attempt, verdict.reason, NODE_CHECK, None, None)
            self._publish_stop(stop, verdict.excluded)

    def _arrive(self, attempt: int) -> None:
        """This node is free of the attempt; whether it is fit for another one is said first."""

        def arrive(report: NodeReport | None) -> None:
            if self._channel is not None:
                if report is not None and report.is_unfit:
                    self._step_back(self._channel, attempt + 1, report)
                self._channel.tell_arrived(attempt)

        self._gate.before_arrival(arrive)

    def _step_back(self, channel: ControlChannel, following: int, report: NodeReport) -> None:
        """This node is unfit for the attempt that follows. After a rendezvous nobody hears it: all look again then."""
        hosts_store = self._membership is not None and self._membership.hosts_store
        spares = self._rendezvous.spares() if self._spec.mode is Mode.ACT and not hosts_store else 0
        is_out = channel.group_world_size > 1 and spares > 0
        self._gate.say_unfit(report, is_out, "it hosts the rendezvous" if hosts_store else "no spare node is there")
        if is_out:
            reason = f"node check: {self._spec.node}: {report.troubles[0].reason}"
            self._publish_stop(ev.PublishStop(following, reason, NODE_CHECK, None, None), (channel.group_rank,))

    def _take_early_decision(self) -> None:
        early, machine = self._early_decision, self._machine
        if early is not None and machine.phase is not ev.NodePhase.JOINING and machine.attempt >= early[0]:
            self._early_decision = None
            self._on_decision(*early)

    def _on_decision(self, attempt: int, data: Mapping[str, Any]) -> None:
        if self._machine.phase is ev.NodePhase.JOINING or attempt > self._machine.attempt:
            self._early_decision = (attempt, data)  # another node was faster
            return
        decision = ev.Decision(
            attempt=attempt,
            action=Action(data["action"]),
            next_attempt=int(data["next_attempt"]),
            reason=str(data["reason"]),
            rejoin=bool(data["rejoin"]),
            delay_s=float(data["delay_s"]),
            excluded_nodes=tuple(int(n) for n in data["excluded_nodes"]),
            exit_class=ExitClass(int(data["exit_class"])),
            root_cause=data.get("root_cause"),
        )
        self._history = self._desk.unpack_history(data.get("history"), self._history)
        self._desk.scores.adopt(data.get("scores"))
        self._integrity.adopt(data.get("integrity"))
        self._floor = max(self._floor, decision.next_attempt)
        if decision.action is not Action.REPORT:
            self._pace.end_attempt()
            self._integrity.end_attempt()
        self._root_cause = decision.root_cause
        self._record(
            "decision",
            action=decision.action,
            next_attempt=decision.next_attempt,
            reason=decision.reason,
            excluded=list(decision.excluded_nodes),
        )
        self._feed(ev.Decided(decision))

    def _probe(self, command: ev.Probe) -> None:
        alive = {r: self._ranks[r].pid for r in command.ranks if r in self._ranks and self._ranks[r].exit is None}
        paths = {r: self._spec.run_folder.stacks(self._attempt, r) for r in alive}
        runner = ProbeRunner(alive, paths, self._spec.stack_signal, command.window_s)

        def work() -> None:
            samples = runner.run()
            results = tuple(
                ev.ProbeResult(
                    rank=s.rank,
                    window_s=s.window_s,
                    state=s.state,
                    cpu_share=s.cpu_share,
                    stack_unchanged=s.stack_unchanged,
                    in_collective=s.in_collective,
                    compiling=s.compiling,
                    io_moved=s.io_moved,
                    children_cpu_share=s.children_cpu_share,
                    doing=s.doing,
                    place=s.place,
                )
                for s in samples
            )
            self._mailbox.post(lambda: self._on_probed(results))

        self._in_thread("probe", work)

    def _on_probed(self, results: tuple[ev.ProbeResult, ...]) -> None:
        self._record("probe", results=results)
        self._probed.update({r.rank: r for r in results})
        self._read_board(self._clock.now_s())  # progress during the window counts first
        self._feed(ev.ProbesDone(results))

    # -- ranks -------------------------------------------------------------------------------------------------------
    def _setup_for(self, rank: int, local_rank: int, attempt: int) -> dict[str, Any]:
        spec = self._spec
        rank_dir = self._make_rank_dir(attempt, rank)
        return {
            "board": str(self._board.path),
            "slot": local_rank,
            "rank": rank,
            "attempt": attempt,
            "rank_dir": str(rank_dir),
            "deadman_s": spec.deadman_s,
            "faults": spec.faults,
            "run_id": spec.run_id,
            "loaded_report": str(rank_dir / "loaded.json"),
            "stack_signal": spec.stack_signal,
            "timing": spec.timing,
            "sdc": spec.sdc,
            "sdc_replay": spec.sdc_replay,
            "saver": self._saver.socket_path if self._saver is not None else None,
        }

    def _make_rank_dir(self, attempt: int, rank: int) -> Path:
        """In the run folder, or in a temporary one once that cannot be written any more: a restart needs none of it."""
        if self._spare_folder is None:
            rank_dir = self._spec.run_folder.rank_dir(attempt, rank)
            try:
                rank_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as e:
                self._spare_folder = RunFolder(Path(tempfile.mkdtemp(prefix="steadyrun-")))
                self._say(
                    f"steadyrun: cannot write the run folder any more: {rank_dir}: {e.strerror or e}; "
                    f"logs of the ranks go to {self._spare_folder.root}"
                )
            else:
                return rank_dir
        rank_dir = self._spare_folder.rank_dir(attempt, rank)
        rank_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        return rank_dir

    def _spawn(self, command: ev.Spawn) -> None:
        assert self._membership is not None
        rank, local_rank, attempt = command.rank, command.local_rank, command.attempt
        if attempt != self._begun:
            self._begin_attempt(attempt)
        setup = self._setup_for(rank, local_rank, attempt)
        host, port = self._master
        spec = self._launcher.spec_for(rank, local_rank, attempt, self._membership, host, port, setup)
        self._board.clear_slot(local_rank)
        now_s = self._clock.now_s()
        pid: int | None = None
        if self._standbys is not None:
            pid = self._standbys.activate(local_rank, self._launcher.orders_for(spec, setup))
        warm = pid is not None
        if pid is None:
            try:
                pid = self._processes.spawn(spec)
            except OSError as e:
                self._say(f"steadyrun: cannot start rank {rank}: {e}; looked for {spec.argv[0]}")
                self._feed(ev.SpawnFailed(rank, str(e)))
                return
            self._watch_pid(pid)
        self._ranks[rank] = _RankProcess(rank, local_rank, attempt, pid, now_s, warm, spec, Path(setup["rank_dir"]))
        self._record("rank_started", rank=rank, local_rank=local_rank, pid=pid, warm=warm)
        if self._devices is not None:
            ranks = {p.rank: RankProcess(p.pid, p.local_rank, p.spec.env) for p in self._ranks.values()}
            self._devices.take_ranks(ranks)
        self._feed(ev.RankSpawned(rank, pid))

    def _begin_attempt(self, attempt: int) -> None:
        assert self._membership is not None
        self._calibration.begin_attempt(attempt, self._membership.world_size, self._membership.group_rank == 0)
        self._attempt = self._begun = attempt
        self._floor = max(self._floor, attempt + 1)
        self._ranks.clear()
        self._idle_since.clear()
        self._standbys_due_s = math.inf
        self._views.clear()
        self._probed.clear()
        if self._incident is not None and self._incident.attempt != attempt:
            self._incident = None  # a peer may have ended this attempt before it began here
        self._calls.clear()
        self._sampler.begin_attempt(attempt)
        membership = self._membership
        assert membership is not None
        self._pace.begin_attempt(attempt, membership.world_size, self._channel, membership.hosts_store)
        self._metrics.begin_attempt(self._facts(membership))
        self._count_budget()
        self._integrity.begin_attempt(attempt, membership.world_size, self._channel)
        self._desk.begin_attempt(attempt)
        self._tell_saver(attempt)

    def _tell_saver(self, attempt: int) -> None:
        m = self._membership
        if self._saver is None or m is None:
            return
        host, port = self._master
        self._saver.begin_attempt(
            {
                "attempt": attempt,
                "world_size": m.world_size,
                "group_rank": m.group_rank,
                "group_world_size": m.group_world_size,
                "ranks": list(m.ranks),
                "host": host,
                "port": port,
                "node": self._spec.node,
                "rollback": self._rollback_wanted(),
            }
        )

    def _rollback_wanted(self) -> dict[str, Any] | None:
        """Away from wrong bytes, or else what --ft-rollback asks for: each is carried out once."""
        wanted = self._integrity.rollback or self._spec.rollback
        return None if wanted is None else dict(wanted)

    def _watch_pid(self, pid: int) -> None:
        fd = self._processes.fileno_of(pid)
        self._pidfds[pid] = fd
        self._selector.register(fd, selectors.EVENT_READ, self._on_exits)

    def _unwatch_pid(self, pid: int) -> None:
        fd = self._pidfds.pop(pid, None)
        if fd is not None:
            self._selector.unregister(fd)

    def _on_exits(self) -> None:
        for seen in self._processes.poll_exits():
            self._unwatch_pid(seen.pid)
            owner = next((p for p in self._ranks.values() if p.pid == seen.pid and p.exit is None), None)
            if owner is None:
                if self._standbys is not None:
                    self._standbys.on_exit(seen.pid, seen.code)
                continue
            code, signum = (seen.code, None) if seen.code >= 0 else (None, -seen.code)
            owner.exit = ExitRecord(code, signum, seen.at_s, by_us=owner.signalled)
            self._read_board(self._clock.now_s())  # the last words of the rank count
            self._record("rank_exited", rank=owner.rank, pid=seen.pid, code=seen.code, by_us=owner.signalled)
            if seen.code != 0:
                self._told_failures[owner.rank] = RankFailure(
                    owner.rank,
                    owner.local_rank,
                    seen.pid,
                    seen.code,
                    self._launcher.error_file(owner.attempt, owner.local_rank),
                    self._clock.unix_s(),
                    by_us=owner.signalled,
                )
            self._feed(ev.RankExited(owner.rank, seen.code))

    def _signal_rank(self, rank: int, signum: int) -> None:
        process = self._ranks.get(rank)
        if process is not None and process.exit is None:
            process.signalled = True
            self._processes.signal(process.pid, signum)

    def _watch_idleness(self, rank: int) -> None:
        """From SIGTERM on: does the rank do anything about it?"""
        process = self._ranks.get(rank)
        sample = self._proc.sample(process.pid) if process is not None and process.exit is None else None
        if sample is not None:
            now_s = self._clock.now_s()
            self._idle_since[rank] = (sample, now_s)
            self._next_idle_s = min(self._next_idle_s, now_s + IDLE_POLL_S)

    def _look_for_idle(self, now_s: float) -> None:
        for rank, (before, since_s) in list(self._idle_since.items()):
            process = self._ranks.get(rank)
            now = self._proc.sample(process.pid) if process is not None and process.exit is None else None
            if now is None:
                del self._idle_since[rank]
            elif now.state == "D" or now.io_bytes != before.io_bytes or now.cpu_s - before.cpu_s > IDLE_CPU_S:
                self._idle_since[rank] = (now, now_s)
            elif now_s - since_s >= IDLE_S:
                del self._idle_since[rank]
                self._feed(ev.RankIdle(rank))
        self._next_idle_s = now_s + IDLE_POLL_S if self._idle_since else math.inf

    def _kill_rank(self, rank: int) -> None:
        process = self._ranks.get(rank)
        if process is not None:
            process.signalled = process.signalled or process.exit is None
            self._processes.signal_group(process.pid, signal.SIGCONT)
            self._processes.signal_group(process.pid, signal.SIGKILL)

    def _sweep(self, attempt: int) -> None:
        report = self._processes.sweep(attempt)
        if report.ended or report.removed or report.stuck:
            self._record("sweep", report=report)
            if report.ended or report.removed:
                self._say(
                    f"steadyrun: cleaned up after attempt {attempt}: ended {len(report.ended)} left-over process(es), "
                    f"removed {len(report.removed)} shared-memory file(s)"
                )
        self._feed(ev.SweepDone(attempt, report.stuck))

    # -- standbys ----------------------------------------------------------------------------------------------------
    def _start_standbys(self) -> None:
        """Once every rank has told what it loaded: it writes that from a thread, some time after its third step."""
        if self._standbys is None:
            return
        told = {p.local_rank: _read_loaded(p.folder / "loaded.json") for p in self._ranks.values()}
        now_s = self._clock.now_s()
        if None in told.values() and now_s < self._standbys_due_s:
            return
        self._standbys_due_s = math.inf
        modules: list[str] = []
        preset: dict[int, dict[str, str | None]] = {}
        for local_rank, loaded in told.items():
            if loaded is None:
                loaded = self._loaded.get(local_rank)  # an earlier attempt's: the same script
            if loaded is None:
                continue
            self._loaded[local_rank] = loaded
            modules.extend(m for m in loaded["modules"] if m not in modules)
            preset[local_rank] = dict(loaded["env_before_torch"])
        modules.extend(m for m in self._spec.preload if m not in modules)
        pids = self._standbys.prepare(range(self._spec.local_world_size), modules, preset, self._launcher.standby_spec)
        for pid in pids:
            self._watch_pid(pid)
        self._record("standby", event="started", pids=list(pids), preload=modules)

    def _look_after_standbys(self) -> None:
        if self._standbys is None:
            return
        if self._standbys_due_s < math.inf:
            self._start_standbys()
        for pid in self._standbys.poll():
            self._watch_pid(pid)
        for note in self._standbys.take_notes():
            self._say(f"steadyrun: {note}")
        ready = len(self._standbys.ready())
        if ready != self._standbys_ready:
            self._standbys_ready = ready
            memory_bytes = self._standbys.memory_bytes()
            self._record("standby", event="ready", ready=ready, memory_bytes=memory_bytes)
            if ready == self._spec.local_world_size and not self._told_memory:
                self._told_memory = True
                self._say(
                    f"steadyrun: {ready} warm standby(s) ready, {memory_bytes / 2**20:.0f} MiB "
                    "(--ft-standby off saves that)"
                )

    # -- board -------------------------------------------------------------------------------------------------------
    def _fresh_views(self) -> dict[int, SlotView | None]:
        out: dict[int, SlotView | None] = {}
        for process in self._ranks.values():
            view = self._board.view(process.local_rank)
            mine = view is not None and view.pid == process.pid and view.attempt == process.attempt
            out[process.rank] = view if mine else None
        return out

    def _sample(self, now_s: float, views: Mapping[int, SlotView | None]) -> Mapping[int, RingsRead]:
        read = self._sampler.sample(now_s, {p.local_rank: (p.rank, views[p.rank]) for p in self._ranks.values()})
        saved = max((v.checkpoints_done for v in views.values() if v is not None), default=0)
        self._pace.sample(now_s, self._sampler.take_timings(), self._ranks.values(), saved)
        if self._planned is not None and now_s >= self._planned[2]:
            self._on_saved(None, "the saver has not answered")
        words = {p.rank: self._board.integrity(p.local_rank) for p in self._ranks.values() if views[p.rank] is not None}
        self._integrity.sample(now_s, self._ranks.values(), words, views)
        return read

    def _read_board(self, now_s: float) -> bool:
        """Look at all ranks; False where the machine has heard of no look."""
        if not self._ranks:
            return False
        self._views = self._fresh_views()
        calls = max((v.stop_calls for v in self._views.values() if v is not None), default=0)
        then_s, before = self._last_calls
        if now_s - then_s >= 0.4:
            self._call_rate_hz = max(calls - before, 0) / (now_s - then_s)
            self._last_calls = (now_s, calls)
        for process in self._ranks.values():
            view = self._views[process.rank]
            if view is not None and not process.attached:
                process.attached = True
                self._desk.observe([process.pid])
                self._record("rank_attached", rank=process.rank, after_s=now_s - process.spawned_s)
        if self._saver is None or not self._saver.is_running:
            self._desk.watch_checkpoints(self._views)
        states = {p.rank: state for p in self._ranks.values() if p.exit is None and (state := self._proc.state(p.pid))}
        views, attempt = self._views, self._attempt
        read = self._sample(now_s, views)
        looks = [
            RankLook(p.rank, p.local_rank, p.pid, states.get(p.rank, ""), views[p.rank]) for p in self._ranks.values()
        ]
        self._metrics.take_ranks(now_s, looks, read)
        self._follow_devices(now_s)
        self._feed(ev.StatesRead(states))
        if self._attempt != attempt:
            return False  # the first event has begun the next attempt, whose ranks have no view yet
        self._feed(ev.BoardRead(views))
        return True

    # -- metrics -----------------------------------------------------------------------------------------------------
    def _facts(self, m: Membership) -> NodeFacts:
        return replace(self._own_facts, group_rank=m.group_rank, nodes=m.group_world_size, world_size=m.world_size)

    def _watch_devices(self, plan: DevicesPlan) -> None:
        self._devices = devices = Devices(
            plan,
            self._spec.node,
            self._clock,
            _Watcher(self._selector),
            self._mailbox.post,
            self._record,
            self._say,
            self._metrics.with_values,
            self._driver.get,
        )
        self._metrics.also(devices.fill)
        self._desk.devices = devices.evidence
        devices.start()

    def _follow_devices(self, now_s: float) -> None:
        if self._devices is not None:
            self._devices.poll(now_s)
            self._metrics.take_gpus(self._devices.gpu_indices())

    def _helper_pids(self) -> list[int]:
        """Processes that belong to the agent; from any thread."""
        saver = self._saver.pid() if self._saver is not None else None
        return [pid for pid in (saver, self._driver.pid()) if pid is not None]

    def _on_exporter(self, address: str | None, why: str) -> None:
        """From the exporter's thread."""

        def tell() -> None:
            self._metrics_address, self._next_live_s = address, 0.0
            self._record("metrics", address=address, why=why)
            if why:
                self._say(f"steadyrun: {why}")
            self._tell_metrics()

        with contextlib.suppress(OSError):  # the loop may be over
            self._mailbox.post(tell)

    def _tell_metrics(self) -> None:
        if self._channel is not None and self._metrics_address is not None:
            self._channel.tell_metrics(self._metrics_address)

    def _count_budget(self) -> None:
        history = self._history
        if self._spec.max_restarts is not None:
            used = sum(1 for a in history.attempts if a.row is None or a.row.counts)
            self._metrics.take_budget(self._spec.max_restarts - used)
        else:
            used = history.restarts_since_progress + 1 if history.attempts else 0
            self._metrics.take_budget(self._spec.restart_budget - used)

    def _write_live(self, now_s: float) -> None:
        self._next_live_s = now_s + LIVE_S
        spec = self._spec
        limits = self._limits_told()
        self._metrics.take_limits(limits)
        self._metrics.take_lost_records(self._journal.lost)
        data = {
            "schema": "steadyrun.live/1",
            "run_id": spec.run_id,
            "node": spec.node,
            "agent_pid": os.getpid(),
            "agent_start_ticks": self._proc.start_ticks(os.getpid()),
            "board": str(self._board.path),
            "attempt": self._attempt,
            "phase": self._machine.phase.value,
            "world_size": self._membership.world_size if self._membership else 0,
            "ranks": [
                {"rank": p.rank, "local_rank": p.local_rank, "pid": p.pid, "phase": self._phase_of(p.rank)}
                for p in self._ranks.values()
            ],
            "restarts": self._attempt,
            "command": spec.script,
            "started_at_unix_s": self._started_unix_s,
            "updated_at_unix_s": self._clock.unix_s(),
            "saver_pid": self._saver.pid() if self._saver is not None else None,
            "standbys": self._standbys.status() if self._standbys is not None else [],
            "limits": limits,
            "metrics": self._metrics_address,
            "node_check": self._gate.status(),
            "devices": self._devices.told() if self._devices is not None else None,
        }
        with contextlib.suppress(OSError):  # a full or vanished disk: the status is stale, the job goes on
            write_atomically(self._live_path, json.dumps(data, default=str))

    def _limits_told(self) -> dict[str, Any]:
        """Those in force; calibrated ones are among ``sections``."""
        limits = self._machine.limits
        names = ("step_s", "setup_s", "checkpointing_s", "evaluation_s", "default_section_s", "out_of_section_s")
        return {
            **{name: _endless_as_none(getattr(limits, name)) for name in names},
            "sections": {name: _endless_as_none(s) for name, s in limits.sections.items()},
            "first": {name: _endless_as_none(s) for name, s in limits.first.items()},
            "soft": dict(limits.soft),
            "timeouts": self._spec.timeouts.value,
            "calibrated": self._calibration.told(),
        }

    def _phase_of(self, rank: int) -> str:
        return self._machine.rank_phase(rank).value

    # -- signals -----------------------------------------------------------------------------------------------------
    def _on_signals(self) -> None:
        assert self._signals is not None
        for signum in self._signals.drain():
            name = signal.Signals(signum).name
            self._record("signal", signal=name)
            if signum in (signal.SIGUSR1, signal.SIGUSR2):
                self._forward(signum, name)
            else:
                self._say(f"steadyrun: got {name}: ranks are asked to save and leave")
                self._feed(ev.StopAsked(signum))

    def _forward(self, signum: int, name: str) -> None:
        """A pre-emption warning: pass it on where it is expected, and let should_stop() agree; training goes on."""
        told: list[int] = []
        for process in self._ranks.values():
            if process.exit is None and self._proc.catches(process.pid, signum):
                self._processes.signal(process.pid, signum)
                told.append(process.rank)
        skipped = [p.rank for p in self._ranks.values() if p.exit is None and p.rank not in told]
        if skipped:
            self._say(f"steadyrun: {name} is not forwarded to ranks {skipped}: they do not handle it and would die")
        if self._channel is not None:
            self._channel.tell_drain({"origin": self._channel.group_rank, "node": self._spec.node, "signal": name})

    # -- the end -----------------------------------------------------------------------------------------------------
    def _leave(self, exit_class: ExitClass, reason: str) -> None:
        failures = dict(self._told_failures) if exit_class is not ExitClass.OK else {}
        ranks = tuple(sorted(self._ranks))
        self._sample(self._clock.now_s(), self._fresh_views())
        self._sampler.flush()
        self._pace.close()
        self._integrity.close()
        self._calibration.close()
        self._record("run_ended", exit_class=int(exit_class), reason=reason)
        self._outcome = Outcome(exit_class, reason, failures, self._root_cause, ranks, self._attempt)

    def _close(self) -> None:
        """Whatever happened, no rank, standby, thread or descriptor of ours stays."""
        for process in self._ranks.values():
            if process.exit is None:
                self._kill_rank(process.rank)
        if self._standbys is not None:
            self._standbys.drop()
        deadline_s = time.monotonic() + 5.0
        while self._pidfds and time.monotonic() < deadline_s:
            for key, _ in self._selector.select(0.05):
                if key.fd in self._pidfds.values():
                    for seen in self._processes.poll_exits():
                        self._unwatch_pid(seen.pid)
        for pid in list(self._pidfds):
            self._unwatch_pid(pid)
        self._processes.sweep(self._attempt)
        self._processes.close()
        if self._saver is not None:
            self._saver.close()
        if self._tailer is not None:
            growth = self._tailer.fileno()
            if growth is not None and growth in self._selector.get_map():
                self._selector.unregister(growth)
            self._tailer.close()
        done = self._outcome is not None and self._outcome.exit_class is ExitClass.OK
        self._close_channel()
        if self._machine.phase is ev.NodePhase.EXCLUDED:
            self._rendezvous.step_out()
        try:
            self._rendezvous.leave(job_done=done)
        except SteadyrunError as e:
            log.warning("rendezvous_left_badly", error=str(e))
        self._desk.close()
        self._metrics_address = None
        self._exporter.close()
        if self._devices is not None:
            self._devices.close()
        self._driver.close()
        self._write_live(self._clock.now_s())
        self._selector.close()
        self._mailbox.close()
        self._board.close()
        self._journal.close()
        if self._guardian is not None:
            self._guardian.dismiss()


def _gate_of(spec: NodeSpec, driver: DriverReader) -> NodeGate | None:
    if spec.node_check == "off":
        return None
    folders = [Folder("run", spec.run_folder.root)]
    return NodeGate(spec.node, spec.node_check, spec.local_world_size, folders, nvml=driver.get)


def _endless_as_none(seconds: float | None) -> float | None:
    """JSON has no infinity."""
    return None if seconds is None or math.isinf(seconds) else seconds


def _read_loaded(path: Path) -> Mapping[str, Any] | None:
    """What a rank said it has loaded, or None: not written yet, or not readable."""
    try:
        told = json.loads(path.read_text())
        return {"modules": list(told["modules"]), "env_before_torch": dict(told["env_before_torch"])}
    except (OSError, ValueError, TypeError, KeyError):
        return None
