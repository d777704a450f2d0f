"""The one module that touches torch.distributed.elastic: torch's rendezvous and agent classes, adapted to our loop.

torch's own ``run`` parses nothing of ours and is not copied: while it runs, its ``elastic_launch`` is ``SteadyLaunch``.
That call site is the same text from torch 2.6 to 2.14; tests/contract/test_torch_seams.py watches it and every other
name used here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

import torch.distributed.run
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch exports it without saying so
from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricData, MetricHandler, MetricsConfig, configure
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import registry as rdzv_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

import steadyrun.watch
from steadyrun.collectors.host.space import Folder
from steadyrun.core.classes import ExitClass
from steadyrun.core.clock import SystemClock
from steadyrun.core.errors import ConfigError, SteadyrunError
from steadyrun.core.options import OFF_WORDS, Resolved, Settings, environment_source, resolve
from steadyrun.core.runfolder import RunFolder
from steadyrun.launcher.cli import NotGiven
from steadyrun.launcher.env import (
    Destination,
    JobFacts,
    LogRules,
    LogsDest,
    RankCommand,
    RecorderRules,
    RoleRank,
    TorchRankLauncher,
)
from steadyrun.launcher.limits import limits_of, timeouts_of
from steadyrun.launcher.seams import SEAMS, problems_of
from steadyrun.launcher.signals import SignalInbox, parse_signals
from steadyrun.node.calibration import configuration_of
from steadyrun.node.devices import DevicesPlan
from steadyrun.node.exporter import ExporterPlan
from steadyrun.node.loop import NodeAgent, NodeSpec, Outcome, RankFailure
from steadyrun.node.ports import Membership, RendezvousFailedError, RendezvousOverError
from steadyrun.node.processes import LinuxProcessTable
from steadyrun.node.store import TorchAsyncStore, WorkerStore, open_worker_store
from steadyrun.node.sweep import run_marker
from steadyrun.node.tailer import LogTailer

__all__ = [
    "ElasticRendezvous",
    "RanksFailedError",
    "RunEndedError",
    "SignalException",
    "SteadyAgent",
    "SteadyLaunch",
    "check_seams",
    "launched_by_us",
    "record",
]

DEFAULT_SIGNALS: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
FAULTS_NAME: Final = "STEADYRUN_FAULTS"
SPARE_NOTICE_S: Final = 3.0
STEP_OUT_S: Final = 5.0
EXIT_OP: Final = "_RendezvousExitOp"
BOOTSTRAP: Final = "_bootstrap_store_info"  # of torch's handler: where the ranks' store is, once it is known
DEFAULT_PORT: Final = 29400  # of torch's c10d rendezvous
# A verdict ends the job for all nodes alike; of these classes none is only this node's end.
ENDS_THE_JOB: Final = frozenset(
    {
        ExitClass.OK,
        ExitClass.PROGRAM_ERROR,
        ExitClass.OUT_OF_MEMORY,
        ExitClass.HANG,
        ExitClass.DEAD_PROCESS,
        ExitClass.CORRUPTION,
    }
)


class RunEndedError(SteadyrunError):
    """The run ended without success and without a failed rank on this node."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


class RanksFailedError(ChildFailedError):
    """torch's ChildFailedError, with our own judgement of which rank was first, and why the run ended."""

    def __init__(
        self,
        name: str,
        failures: dict[int, ProcessFailure],
        outcome: Outcome | None,
        run_folder: Path | None,
    ) -> None:
        self.outcome = outcome
        self.failures = failures
        self.run_folder = run_folder
        super().__init__(name, failures)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        root = self.outcome.root_cause if self.outcome is not None else None
        if root is not None and root in self.failures:
            return root, self.failures[root]
        return super().get_first_failure()


# -- in place of torch's launch --------------------------------------------------------------------------------------
_launch_lock: Final = threading.Lock()


@contextmanager
def launched_by_us(resolved: Resolved, launched: threading.Event | None = None) -> Iterator[None]:
    """While inside, the next call of ``torch.distributed.run.run`` starts our agent instead of torch's.

    Args:
        launched: set when torch has accepted the arguments and hands over; other threads may launch from then on.
    """
    torch_run: Any = torch.distributed.run
    is_replaced = True

    def put_back() -> None:
        nonlocal is_replaced
        if is_replaced:
            is_replaced = False
            torch_run.elastic_launch = original
            _launch_lock.release()

    def launch(*args: Any, **kwargs: Any) -> SteadyLaunch:
        put_back()
        if launched is not None:
            launched.set()
        return SteadyLaunch(*args, **kwargs, resolved=resolved)

    _launch_lock.acquire()
    original = torch_run.elastic_launch
    torch_run.elastic_launch = launch
    try:
        yield
    finally:
        put_back()


class SteadyLaunch:
    """``torch.distributed.launcher.api.elastic_launch`` with our agent: same constructor, same call, same result."""

    def __init__(
        self,
        config: Any,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: Any = None,
        *,
        resolved: Resolved | None = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server
        self._resolved = resolved

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run to the end.

        Returns:
            Return values of this node's ranks by global rank (None each for a program).

        Raises:
            RanksFailedError: as torch's ChildFailedError.
            SignalException: a signal ended the run.
            RunEndedError: the run failed and no rank of this node is to blame.
        """
        config = self._config
        if not config.run_id:
            config.run_id = str(uuid.uuid4().int)
        parameters = RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
        master_addr, master_port = _static_address(parameters)
        signals = getattr(config, "signals_to_handle", DEFAULT_SIGNALS)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals
        shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(WorkerSpec) if hasattr(config, f.name)}
        try:
            handler = rdzv_registry.get_rendezvous_handler(parameters)
        except RendezvousConnectionError as e:
            raise RunEndedError(_cannot_join(config.rdzv_endpoint, e)) from e
        spec = WorkerSpec(
            **{
                **shared,
                "local_world_size": config.nproc_per_node,
                "entrypoint": self._entrypoint,
                "args": args,
                "rdzv_handler": handler,
                "master_addr": master_addr,
                "master_port": master_port,
            }
        )
        agent = SteadyAgent(
            spec,
            config.logs_specs,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=getattr(config, "shutdown_timeout", None) or 0,
            health_check_server=self._health_check_server,
            resolved=self._resolved,
            endpoint=config.rdzv_endpoint,
            elastic=config.min_nodes != config.max_nodes,
            max_nodes=config.max_nodes,
        )
        return self._run(agent, spec)

    def _run(self, agent: SteadyAgent, spec: WorkerSpec) -> dict[int, Any]:
        config = self._config
        close = True
        try:
            initialize_metrics(MetricsConfig(config.metrics_cfg))
            result = agent.run()
            _record_event(agent.get_event_succeeded(), spec)
            if result is None:  # torch's own loop, left by a spare that was never needed
                return {}
            if result.is_failed():
                if not result.failures:
                    assert agent.outcome is not None
                    raise RunEndedError(agent.outcome)
                name = _name_of(self._entrypoint, spec.args)
                raise RanksFailedError(name, result.failures, agent.outcome, agent.run_folder)
            return dict(result.return_values)
        except (SignalException, RunEndedError):
            _record_event(agent.get_event_failed(), spec)
            close = agent.job_is_over
            raise
        except ChildFailedError:
            raise
        except Exception:
            _record_event(agent.get_event_failed(), spec)
            raise
        finally:
            # A closed rendezvous admits nobody any more, so only the end of the whole job closes it.
            if close and agent.job_is_over:
                _close_rendezvous(spec.rdzv_handler)


def _close_rendezvous(handler: RendezvousHandler) -> None:
    """Every node does it, and the first to leave may have hosted the store: torch's warning about that says nothing."""
    torchs = logging.getLogger("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    before = torchs.level
    torchs.setLevel(logging.ERROR)
    try:
        handler.shutdown()
    finally:
        torchs.setLevel(before)


def _record_event(event: Any, spec: WorkerSpec) -> None:
    events.record(event, getattr(spec, "event_log_handler", "null"))


def _static_address(parameters: RendezvousParameters) -> tuple[str | None, int | None]:
    """MASTER_* as the user fixed them; only static rendezvous has them."""
    if parameters.backend != "static":
        return None, None
    endpoint = parameters.endpoint.strip()
    if not endpoint:
        raise ValueError("static rendezvous needs an address: give --master-addr and --master-port")
    host, port = parse_rendezvous_endpoint(endpoint, default_port=-1)
    if port == -1:
        raise ValueError(f"endpoint {endpoint} has no port: give --master-port")
    return host, port


def _cannot_join(endpoint: str, error: Exception) -> Outcome:
    cause = error.__cause__ or error
    detail = str(cause).strip().splitlines()
    return Outcome(
        ExitClass.START_UP,
        f"cannot reach the rendezvous at {endpoint}: {detail[0] if detail else type(cause).__name__}; "
        f"is the node that hosts it up, and its port open?",
    )


def _name_of(entrypoint: Callable[..., Any] | str | None, args: tuple[Any, ...]) -> str:
    if callable(entrypoint):
        return str(getattr(entrypoint, "__name__", entrypoint))
    if entrypoint == sys.executable:
        return next((str(a) for a in args if not str(a).startswith("-")), "")
    return entrypoint or ""


# -- rendezvous ------------------------------------------------------------------------------------------------------
class ElasticRendezvous:
    """``Rendezvous`` over torch's handler and torch's assignment of ranks.

    ``join`` may be called from any thread, one call at a time; it keeps waiting while this node is a spare.
    """

    def __init__(
        self,
        agent: SteadyAgent,
        endpoint: str,
        on_roles: Callable[[Mapping[int, RoleRank]], None],
        say: Callable[[str], None],
    ) -> None:
        self._agent = agent
        self._handler: RendezvousHandler = agent.get_worker_group().spec.rdzv_handler
        self._endpoint = endpoint
        self._on_roles = on_roles
        self._say = say
        self._rounds = 0
        self._store_of_attempt: WorkerStore | None = None

    # -- Rendezvous --------------------------------------------------------------------------------------------------
    def join(self) -> Membership:
        joined = threading.Event()
        threading.Thread(target=self._tell_spare, args=(joined,), name="steadyrun-spare", daemon=True).start()
        try:
            self._wait_for_membership()
        finally:
            joined.set()
        return self._membership()

    def nodes_waiting(self) -> int:
        return int(self._handler.num_nodes_waiting())

    def spares(self) -> int:
        """From torch's own copy of the state, which it renews with each heartbeat; 0 for handlers that have none."""
        state = getattr(getattr(self._handler, "_state_holder", None), "state", None)
        least = getattr(getattr(self._handler, "_settings", None), "min_nodes", None)
        if state is None or least is None:
            return 0
        waiting = len(getattr(state, "wait_list", ())) + len(getattr(state, "redundancy_list", ()))
        return max(len(state.participants) + waiting - int(least), 0)

    def step_out(self) -> None:
        """What a node does at the beginning of a new round; where torch has it no more, the others wait for 15 s."""
        executor, exit_op = getattr(self._handler, "_op_executor", None), _exit_op()
        if executor is None or exit_op is None:
            return
        try:
            self._handler._stop_heartbeats()  # type: ignore[attr-defined]  # they would write the old state back
            executor.run(exit_op, time.monotonic() + STEP_OUT_S)
        except Exception as e:  # torch's store errors differ between backends
            self._say(f"steadyrun: could not leave the rendezvous, the others will notice within seconds: {e}")

    def leave(self, job_done: bool) -> None:
        """The rendezvous is closed by ``SteadyLaunch`` (as torch's launch does), and only when the job is over."""
        self._agent.job_is_over = job_done and self._rounds > 0  # a spare has nothing to close
        if self._store_of_attempt is not None:
            self._store_of_attempt.close()
            self._store_of_attempt = None

    # -- joining -----------------------------------------------------------------------------------------------------
    def _wait_for_membership(self) -> None:
        while True:
            try:
                self._agent._rendezvous(self._agent.get_worker_group())
                return
            except (RendezvousGracefulExitError, RendezvousClosedError) as e:  # noqa: PERF203  # each round waits minutes
                raise RendezvousOverError("the job has ended; this node was not needed") from e
            except RendezvousTimeoutError as e:
                if self._is_spare():
                    continue  # torch gives a node that waits for the next round as long as one that waits for nodes
                raise RendezvousFailedError(
                    f"the rendezvous at {self._endpoint} did not complete in time: fewer nodes came than --nnodes asks "
                    f"for; look for agents that did not start, or raise join_timeout in --rdzv-conf"
                ) from e
            except RendezvousConnectionError as e:
                if self._rounds == 0 and self._is_spare():
                    raise RendezvousOverError(
                        f"the rendezvous at {self._endpoint} is gone, so the job has ended"
                    ) from e
                raise RendezvousFailedError(_cannot_join(self._endpoint, e).reason) from e
            except (RuntimeError, OSError) as e:  # torch's store errors derive from RuntimeError
                raise RendezvousFailedError(_cannot_join(self._endpoint, e).reason) from e

    def _is_spare(self) -> bool:
        """The job runs without this node. Handlers other than torch's dynamic one do not say."""
        state = getattr(getattr(self._handler, "_state_holder", None), "state", None)
        node = getattr(self._handler, "_this_node", None)
        return bool(state is not None and state.complete and node not in state.participants)

    def _tell_spare(self, joined: threading.Event) -> None:
        while not joined.wait(SPARE_NOTICE_S):
            if self._is_spare():
                self._say("steadyrun: the job is running without this node, which waits as a spare")
                return

    def _membership(self) -> Membership:
        group: Any = self._agent.get_worker_group()  # torch declares what the rendezvous fills in as None
        store: Any = self._agent._store
        self._on_roles({w.local_rank: RoleRank(w.role_rank, w.role_world_size) for w in group.workers})
        epoch = self._agree_on_epoch(store, group.group_rank)
        first = self._rounds == 0
        self._rounds += 1
        return Membership(
            epoch=epoch,
            group_rank=group.group_rank,
            group_world_size=group.group_world_size,
            world_size=group.workers[0].world_size,
            ranks=tuple(w.global_rank for w in group.workers),
            attempt_floor=0,
            store=TorchAsyncStore(PrefixStore(f"steadyrun/{epoch}", store)),
            open_worker_store=partial(self._open_worker_store, group, first),
            hosts_store=_listens_on(self._endpoint),
        )

    def _agree_on_epoch(self, store: Any, group_rank: int) -> str:
        """One name for this membership on all its nodes. A round of torch has keys of its own, if not static."""
        key = f"steadyrun/epoch/{self._rounds}" if self._handler.get_backend() == "static" else "steadyrun/epoch"
        if group_rank == 0:
            store.set(key, uuid.uuid4().hex[:12])
        return bytes(store.get(key)).decode()

    # -- the ranks' own store ----------------------------------------------------------------------------------------
    def _open_worker_store(self, group: Any, first_round: bool, attempt: int) -> tuple[str, int]:
        """By group rank 0. torch's own store serves the first attempt (its port may be the one the user opened); every
        later one gets an empty store: stale keys of dead ranks are why torchrun's restarts fail."""
        if self._store_of_attempt is None and first_round and attempt == 0:
            return str(group.master_addr), int(group.master_port)
        if not self._handler.use_agent_store:
            return str(group.master_addr), _free_port()  # rank 0 brings up the store itself
        if self._store_of_attempt is not None:
            self._store_of_attempt.close()
        self._store_of_attempt = open_worker_store(str(group.master_addr))
        return self._store_of_attempt.host, self._store_of_attempt.port


def _exit_op() -> Any:
    made = getattr(importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous"), EXIT_OP, None)
    return made() if made is not None else None


def _listens_on(endpoint: str) -> bool:
    """This process serves the port of *endpoint*; torch does not say which of the nodes does."""
    try:
        _, port = parse_rendezvous_endpoint(endpoint, default_port=DEFAULT_PORT)
    except ValueError:
        return False  # a file, or a backend of somebody else's
    own: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(table).read_text().splitlines()[1:]:
                columns = line.split()
                is_listening = columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port
                if is_listening and f"socket:[{columns[9]}]" in own:
                    return True
    return False


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


# -- the agent -------------------------------------------------------------------------------------------------------
class SteadyAgent(LocalElasticAgent):
    """torch's agent with our loop. Functions as entry points run under torch's own loop, each attempt on a fresh store.

    For programs, only the rendezvous, the assignment of ranks, the worker group and the events of the base class serve.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = 30,
        health_check_server: Any = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        resolved: Resolved | None = None,
        endpoint: str = "",
        elastic: bool = False,
        max_nodes: int = 1,
    ) -> None:
        newer = {
            "shutdown_timeout": shutdown_timeout,
            "health_check_server": health_check_server,
            "uninterruptible_state_timeout": uninterruptible_state_timeout,
        }
        known = inspect.signature(LocalElasticAgent.__init__).parameters
        super().__init__(
            spec,
            logs_specs,
            start_method,
            exit_barrier_timeout,
            log_line_prefix_template,
            **{k: v for k, v in newer.items() if k in known},
        )
        self._resolved = resolved if resolved is not None else resolve([environment_source(os.environ)])
        self._endpoint = endpoint
        self._elastic = elastic
        self._max_nodes = max_nodes
        self._final_grace_s = float(shutdown_timeout)
        self._rounds = 0
        self._fresh_store: WorkerStore | None = None
        self.job_is_over = True
        self.outcome: Outcome | None = None
        self.run_folder: Path | None = None

    def run(self, role: str = "default") -> Any:
        """Join, run, restart and end; see ``ElasticAgent.run``.

        Returns:
            torch's RunResult; None from torch's own loop for a spare that was never needed.

        Raises:
            SignalException: a signal to this process ended the run.
            RunEndedError: the run ended and this node has no failed rank.
        """
        spec = self._worker_group.spec
        if callable(spec.entrypoint):
            try:
                return super().run(role)
            except SignalException:
                self.job_is_over = False
                raise
            finally:
                if self._fresh_store is not None:
                    self._fresh_store.close()
                    self._fresh_store = None
        return self._run_program()

    # -- functions: torch's loop -------------------------------------------------------------------------------------
    def _rendezvous(self, worker_group: Any) -> None:
        # torch 2.13: who stays rank 0 does not tell its address in a new round, and a spare waits 60 s for it in vain.
        if getattr(worker_group.spec.rdzv_handler, BOOTSTRAP, None) is not None:
            setattr(worker_group.spec.rdzv_handler, BOOTSTRAP, None)
        super()._rendezvous(worker_group)
        store: Any = self._store
        handler = worker_group.spec.rdzv_handler
        first = self._rounds == 0
        self._rounds += 1
        alone = worker_group.group_world_size == 1
        # Nodes of a static rendezvous restart one by one: there is no point at which they could agree on a new store.
        if first or not callable(worker_group.spec.entrypoint) or not handler.use_agent_store:
            return
        if not alone and handler.get_backend() == "static":
            return
        if worker_group.group_rank == 0:
            if self._fresh_store is not None:
                self._fresh_store.close()
            self._fresh_store = open_worker_store(str(worker_group.master_addr))
            store.set("steadyrun/worker_store", f"{self._fresh_store.host}|{self._fresh_store.port}")
        host, _, port = bytes(store.get("steadyrun/worker_store")).decode().rpartition("|")
        worker_group.master_addr, worker_group.master_port = host, int(port)

    # -- programs: our loop ------------------------------------------------------------------------------------------
    def _run_program(self) -> RunResult:
        started_s = time.monotonic()
        spec = self._worker_group.spec
        settings = self._resolved.settings
        node = socket.gethostname() if self._max_nodes == 1 else f"{socket.gethostname()}-{os.getpid()}"
        run_id = spec.rdzv_handler.get_run_id()
        command = RankCommand.of(str(spec.entrypoint), spec.args, sys.orig_argv, os.environ)
        folder, message = RunFolder.create(Path(settings.run_dir), run_id)
        if message:
            _say(f"steadyrun: {message}")
        tailer = LogTailer()
        console = _Console(tailer, spec)
        launcher = TorchRankLauncher(
            self._facts(run_id, node),
            command,
            self._logs_specs or DefaultLogsSpecs(),
            _log_rules(settings.capture, self._log_line_prefix_template),
            partial(_wrap_for_numa, getattr(spec, "numa_options", None)),
            console.begin_attempt,
        )
        rendezvous = ElasticRendezvous(
            self, self._endpoint or spec.rdzv_handler.get_backend(), launcher.set_roles, _say
        )
        given = spec.max_restarts
        node_spec = NodeSpec(
            run_id=run_id,
            node=node,
            local_world_size=spec.local_world_size,
            mode=settings.mode,
            limits=limits_of(self._resolved, self._final_grace_s),
            run_folder=folder,
            script=command.script,
            max_restarts=None if isinstance(given, NotGiven) else given,
            restart_budget=settings.restart_budget,
            observed=command.is_python,
            standby=settings.standby and command.can_stand_by,
            preload=settings.preload,
            faults=_faults(settings.faults, os.environ),
            deadman_s=settings.deadman if math.isfinite(settings.deadman) else 0.0,
            stack_signal=settings.stack_signal,
            timing=settings.timing,
            elastic=self._elastic,
            timeouts=timeouts_of(self._resolved),
            configuration=configuration_of(
                [os.path.abspath(command.script), *command.arguments], spec.local_world_size
            ),
            rollback=_rollback(settings, run_id),
            straggler_action=settings.straggler_action,
            metrics=_exporter_plan(settings),
            devices=_devices_plan(settings, folder, os.environ),
            sdc_replay=settings.sdc_replay,
            node_check=settings.node_check,
            sdc=settings.sdc,
            loss_spike=settings.loss_spike,
        )
        listed = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", DEFAULT_SIGNALS)
        with SignalInbox(parse_signals(listed)) as signals:
            agent = NodeAgent(
                node_spec,
                rendezvous,
                LinuxProcessTable(run_marker(run_id, node)),
                launcher,
                SystemClock(),
                signals if signals.is_installed else None,
                tailer,
                _say,
            )
            configure(_TorchMetrics(agent.metrics.take_torch), "torchelastic")
            try:
                outcome = agent.run()
            finally:
                console.close()
            stopped_by = signals.last_stop
        self.outcome = outcome
        self.run_folder = folder.root
        self._total_execution_time = int(time.monotonic() - started_s)
        self._remaining_restarts = max(given - outcome.restarts, 0)
        return self._result(outcome, stopped_by)

    def _facts(self, run_id: str, node: str) -> JobFacts:
        spec = self._worker_group.spec
        return JobFacts(
            run_id=run_id,
            node=node,
            role=spec.role,
            local_world_size=spec.local_world_size,
            max_restarts=spec.max_restarts,
            use_agent_store=spec.rdzv_handler.use_agent_store,
            virtual_local_rank=getattr(spec, "virtual_local_rank", False),
            environ=dict(os.environ),
            site_dir=Path(next(iter(steadyrun.watch.__path__))) / "site",
            recorder=_recorder(self._resolved.settings),
        )

    def _result(self, outcome: Outcome, stopped_by: signal.Signals | None) -> RunResult:
        if outcome.ranks and outcome.exit_class in ENDS_THE_JOB:
            self.job_is_over = True
        if outcome.exit_class is ExitClass.OK:
            if not outcome.ranks:
                _say(f"steadyrun: {outcome.reason}")
            result = RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(outcome.ranks))
        elif outcome.exit_class in (ExitClass.PREEMPTED, ExitClass.INTERNAL) and stopped_by is not None:
            raise SignalException(f"Process {os.getpid()} got signal: {stopped_by}", sigval=stopped_by)
        else:
            result = RunResult(
                WorkerState.FAILED, failures={r: _process_failure(f) for r, f in outcome.failures.items()}
            )
        self._worker_group.state = result.state
        if outcome.ranks:
            self._record_metrics(result)
            self._record_worker_events(result)
        return result


def _recorder(settings: Settings) -> RecorderRules | None:
    if settings.flight_recorder == "off":
        return None
    major, minor = torch.__version__.split(".")[:2]
    return RecorderRules(
        settings.flight_recorder_entries, settings.flight_recorder == "timing", (int(major), int(minor))
    )


def _rollback(settings: Settings, run_id: str) -> Mapping[str, Any] | None:
    """What --ft-rollback asks of the saver. A run that is requeued with the same id and options does it once."""
    if settings.rollback is None:
        return None
    to, skipped = settings.rollback
    text = ",".join([run_id, str(to), *(f"{first}:{end}" for first, end in skipped)])
    known = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return {"to": to, "skip_batches": [list(r) for r in skipped], "id": known}


class _TorchMetrics(MetricHandler):
    """Hands on what torch's own package measures: durations of its rendezvous, mostly."""

    def __init__(self, take: Callable[[str, float], None]) -> None:
        self._take = take

    def emit(self, metric_data: MetricData) -> None:
        self._take(str(metric_data.name), float(metric_data.value))


def _exporter_plan(settings: Settings) -> ExporterPlan:
    return ExporterPlan(settings.metrics_addr, _path(settings.metrics_sd_dir), _path(settings.metrics_textfile))


def _devices_plan(settings: Settings, folder: RunFolder, environ: Mapping[str, str]) -> DevicesPlan:
    return DevicesPlan(
        kernel_log=_path(settings.kernel_log),
        any_writer=environ.get("STEADYRUN_KERNEL_LOG_ANY_WRITER") == "1",
        position=folder.kernel_position(socket.gethostname()),
        folders=(Folder("run", folder.root),),
    )


def _path(text: str) -> Path | None:
    return None if text.strip().lower() in OFF_WORDS else Path(os.path.abspath(text))


def _faults(option: str, environ: Mapping[str, str]) -> str:
    """The plan of faults to inject.

    Raises:
        ConfigError: it cannot be used.
    """
    plan = option or environ.get(FAULTS_NAME, "")
    if plan:
        from steadyrun.testing.faults import parse_faults

        parse_faults(plan)
    return plan


def _process_failure(failure: RankFailure) -> ProcessFailure:
    def build(error_file: str) -> ProcessFailure:
        return ProcessFailure(failure.local_rank, failure.pid, failure.exitcode, error_file)

    try:
        built = build(failure.error_file)
    except Exception:  # a rank that died while writing leaves half a file, and torch raises whatever that gives
        built = build("")
    if built.error_file != failure.error_file:
        built.timestamp = int(failure.at_unix_s)
    return built


def _log_rules(capture: str, prefix_template: str | None) -> LogRules:
    def wanted(fd: int) -> bool:
        if capture != "auto":
            return capture == "on"
        try:
            return not os.isatty(fd)  # on a terminal the script is to see one, as under torchrun
        except OSError:
            return True

    return LogRules(wanted(1), wanted(2), prefix_template)


def _wrap_for_numa(options: Any, argv: tuple[str, ...], local_rank: int) -> tuple[str, ...]:
    """``--numa-binding``: torch puts numactl in front. Its function is private and changed a name in 2.14."""
    if options is None:
        return argv
    from torch.numa import binding

    wrap = getattr(binding, "_maybe_wrap_command_args_with_numa_binding", None) or getattr(
        binding, "maybe_wrap_command_args_with_numa_binding", None
    )
    if wrap is None:
        raise ConfigError("--numa-binding: this version of torch has no function for it that steadyrun knows")
    index = "device_index" if "device_index" in inspect.signature(wrap).parameters else "gpu_index"
    return tuple(wrap(argv, **{index: local_rank, "numa_options": options}))


class _Console:
    """Which files are copied to the launcher's own console, and, by torch, into those of ``--duplicate-*-filters``."""

    def __init__(self, tailer: LogTailer, spec: WorkerSpec) -> None:
        self._tailer = tailer
        self._role = spec.role
        self._filters: tuple[list[str], list[str]] = (
            list(getattr(spec, "duplicate_stdout_filters", None) or ()),
            list(getattr(spec, "duplicate_stderr_filters", None) or ()),
        )
        self._followed: list[Path] = []
        self._tails: list[TailLog] = []
        self._files: list[TextIO] = []

    def begin_attempt(self, destinations: Mapping[int, tuple[Destination, Destination]], dest: LogsDest) -> None:
        self._retire()
        for sink in (1, 2):
            streams = {local_rank: pair[sink - 1] for local_rank, pair in destinations.items()}
            self._copy(sink, streams)
            teed = {lr: str(s.path) for lr, s in streams.items() if s.follow and s.prefix}
            needles = self._filters[sink - 1]
            if needles:
                name = dest.filtered_stdout if sink == 1 else dest.filtered_stderr
                file = open(name, "w", errors="replace", buffering=1)  # noqa: SIM115  # closed in _retire
                self._files.append(file)
                self._tail(teed, file, streams, log_line_filter=partial(_has_any, needles))

    def _copy(self, sink: int, streams: Mapping[int, Destination]) -> None:
        shown = {lr: stream for lr, stream in streams.items() if stream.follow and stream.path is not None}
        console: Any = (sys.stdout, sys.stderr)[sink - 1]
        if not _is_descriptor(console, sink):  # a notebook's, or a test's, which only Python code can write to
            self._tail({lr: str(stream.path) for lr, stream in shown.items()}, console, shown)
            return
        for stream in shown.values():
            assert stream.path is not None
            self._tailer.follow(stream.path, sink, stream.prefix)
            self._followed.append(stream.path)

    def _tail(self, files: dict[int, str], to: TextIO, streams: Mapping[int, Destination], **newer: Any) -> None:
        prefixes = {lr: streams[lr].prefix for lr in files}
        self._tails.append(TailLog(self._role, files, to, prefixes, **newer).start())

    def close(self) -> None:
        self._retire()

    def _retire(self) -> None:
        for path in self._followed:
            self._tailer.retire(path)
        self._followed.clear()
        for tail in self._tails:
            tail.stop()
        self._tails.clear()
        for file in self._files:
            file.close()
        self._files.clear()


def _is_descriptor(stream: Any, fd: int) -> bool:
    try:
        return bool(stream.fileno() == fd)
    except (AttributeError, OSError, ValueError):  # io.UnsupportedOperation is both of the latter
        return False


def _has_any(needles: Sequence[str], line: str) -> bool:
    return any(needle in line for needle in needles)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def check_seams() -> list[str]:
    """What has moved in the installed torch, one line each; see ``steadyrun.launcher.seams``."""
    return problems_of({name: _imported(name) for name in {seam.module for seam in SEAMS}})


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
