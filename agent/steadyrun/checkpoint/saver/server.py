"""The saver's process: one thread that waits for ranks, agent, timers and finished work, and lets the machines decide.

That thread never touches storage or the store, and never waits for a reader: jobs run in worker threads, messages that
a socket does not take are kept. Every decision is the machines'; here are only their effects.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from typing_extensions import assert_never

from steadyrun.checkpoint.arena import ArenaError
from steadyrun.checkpoint.durable import write_whole
from steadyrun.checkpoint.saver import coordinator as c
from steadyrun.checkpoint.saver import events as e
from steadyrun.checkpoint.saver import messages as m
from steadyrun.checkpoint.saver import orders as o
from steadyrun.checkpoint.saver import writer
from steadyrun.checkpoint.saver.exchange import Connected, Exchange, Heard, Lost, Place
from steadyrun.checkpoint.saver.machine import NodeLimits, SaverMachine, rejections
from steadyrun.checkpoint.saver.memory import PEER_PREFIX, STATE_NAME, Box, Memory, Notebook
from steadyrun.checkpoint.saver.messages import SaveKey
from steadyrun.checkpoint.saves import CheckpointOptions, SaveState, TierName
from steadyrun.checkpoint.wire import Wire, WireClosedError
from steadyrun.core.errors import SteadyrunError
from steadyrun.core.runfolder import RunFolder

if TYPE_CHECKING:  # not needed by most jobs, and 10 ms of every start
    from steadyrun.checkpoint.saver.peers import Peers

__all__ = ["Server"]

_POLL_S: Final = 0.25  # ranks' steps, orders to save
_METRICS_S: Final = 1.0
_READY_LIMIT_S: Final = 10.0
_LAST_WORDS_S: Final = 2.0


@dataclass(slots=True)
class _Connection:
    """A rank's. *stash*: what came while its memory was being opened."""

    number: int
    wire: Wire
    rank: int = -1
    attempt: int = -1
    is_opening: bool = False
    stash: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        return self.rank >= 0


class _Crashed(NamedTuple):
    error: Exception


class _Keep(NamedTuple):
    """For the agent, from another thread: *fd* is a copy, closed once it is passed on; -1: let go of it."""

    name: str
    fd: int = -1


class _Fetched(NamedTuple):
    """A rank's snapshot is back from another node, or not."""

    event: e.PeerFetched
    box: Box | None


class _Opened(NamedTuple):
    """A rank's memory, as the worker has made it."""

    result: e.ArenaOpened | e.ArenaRefused
    box: Box | None


_Done = (
    e.NodeEvent
    | o.CoordinatorEvent
    | _Opened
    | _Crashed
    | _Fetched
    | _Keep
    | e.Report
    | writer.Told
    | Connected
    | Lost
    | Heard
    | None
)


class _Pool:
    """Worker threads, started when there is something to do."""

    def __init__(self, name: str, threads: int, done: Callable[[_Done], None], is_low: bool = False) -> None:
        self._name, self._threads, self._done, self._is_low = name, threads, done, is_low
        self._jobs: SimpleQueue[Callable[[], _Done]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._started = 0
        self.pending = 0

    def submit(self, job: Callable[[], _Done]) -> None:
        """*job* gives the event that tells of it, and handles its own errors."""
        with self._lock:
            self.pending += 1
            self._jobs.put(job)
            if self._idle == 0 and self._started < self._threads:
                self._started += 1
                name = f"steadyrun-{self._name}-{self._started}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
            else:
                self._idle = max(self._idle - 1, 0)

    def _run(self) -> None:
        if self._is_low:
            writer.lower_priority()
        while True:
            try:
                event = self._jobs.get()()
            except Exception as error:  # a defect: the next saver goes on from the memory that the agent keeps
                self._done(_Crashed(error))
                return
            if event is not None:
                self._done(event)
            with self._lock:
                self.pending -= 1
                self._idle = min(self._idle + 1, self._started)


class Server:
    """One saver.

    Args:
        listening: where ranks connect; the agent's, only used here.
        agent: this end of the agent's socketpair.
        limits: of the machines, for tests.
    """

    def __init__(
        self,
        listening: socket.socket,
        agent: socket.socket,
        run_folder: Path,
        node: str,
        limits: tuple[NodeLimits, c.Limits] | None = None,
    ) -> None:
        self._listening = listening
        self._agent: Wire | None = Wire(agent)
        self._node = node
        self._metrics_path = RunFolder(run_folder).state / f"{node}.saver.json"
        self._limits = limits or (NodeLimits(), c.Limits())
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._finished: deque[_Done] = deque()
        self._todo: deque[tuple[bool, Any]] = deque()  # (for the coordinator, event)
        self._connections: dict[int, _Connection] = {}
        self._number = 0
        self._memory = Memory()
        self._notebook: Notebook | None = None
        self._noted = m.Remembered()
        self._kept: list[tuple[str, int]] = []
        self._is_ready = False
        self._machine: SaverMachine | None = None
        self._early: deque[e.NodeEvent] = deque()
        self._coordinator: c.Coordinator | None = None
        self._exchange = Exchange(self._finish)
        self._pieces = writer.PieceWriter()
        self._writers = _Pool("write", 2, self._finish, is_low=True)
        self._folders = _Pool("folder", 1, self._finish)
        self._listers = _Pool("list", 1, self._finish)
        self._scribes = _Pool("figures", 1, self._finish, is_low=True)
        self._chores = _Pool("chore", 1, self._finish, is_low=True)
        self._copiers = _Pool("copy", 2, self._finish, is_low=True)
        self._pushers = _Pool("push", 2, self._finish, is_low=True)
        self._peers: Peers | None = None
        self._remotes = _Pool("remote", 1, self._finish)
        self._hashers = _Pool("hash", 2, self._finish, is_low=True)
        # Ranks wait for these, and hashing scales: a node may have hundreds of gigabytes of snapshots.
        self._inspectors = _Pool("inspect", max(2, min(16, (os.cpu_count() or 2) // 2)), self._finish)
        self._openers = _Pool("open", 1, self._finish)
        self._faulters = _Pool("fault", 2, self._finish, is_low=True)
        self._planners = _Pool("plan", 1, self._finish)
        self._complaints: dict[str, str] = {}
        self._removed = 0
        self._damaged = 0
        self._metrics = ""
        self._metrics_s = -inf
        self._is_ended = False

    @property
    def story(self) -> str:
        """The last events, for whoever reads of a crash."""
        return "" if self._machine is None else self._machine.story

    # -- the loop ------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Until the machine says that it is over."""
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._on_finished)
        if self._agent is not None:
            self._selector.register(self._agent, selectors.EVENT_READ, self._on_agent)
        started_s = time.monotonic()
        while not self._is_ended:
            now_s = time.monotonic()
            if not self._is_ready and now_s > started_s + _READY_LIMIT_S:
                self._get_ready()
            for key, mask in self._selector.select(self._timeout_s(now_s)):
                key.data(mask)
            self._tick()
            self._work()
            self._note()
            self._write_metrics()
        self._say_goodbye()

    def _timeout_s(self, now_s: float) -> float:
        due_s = self._machine.next_deadline_s() if self._machine is not None else inf
        if self._coordinator is not None:
            due_s = min(due_s, self._coordinator.next_deadline_s())
        return min(max(due_s - now_s, 0.0), _POLL_S)

    def _finish(self, event: _Done) -> None:
        """From any thread: an event for the loop."""
        self._finished.append(event)
        with contextlib.suppress(OSError):  # the loop has ended
            os.eventfd_write(self._wake_fd, 1)

    def _on_finished(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while self._finished:
            self._on_done(self._finished.popleft())

    def _on_done(self, event: _Done) -> None:
        match event:
            case None:
                pass
            case _Crashed():
                raise event.error
            case _Opened():
                self._on_opened(event)
            case _Fetched():
                if event.box is not None:
                    self._take_in(event.box)
                self._node_event(event.event)
            case _Keep():
                if event.fd < 0:
                    self._tell_agent("drop", name=event.name)
                else:
                    self._tell_agent("keep", (event.fd,), name=event.name)
                    os.close(event.fd)
            case e.Report():
                self._perform(event)
            case writer.Told():
                for type_, fields in event.records:
                    self._removed += type_ == "checkpoint_removed"
                    self._record(type_, fields)
                for text in event.notes:
                    self._tell_agent("note", text=text)
                if event.restored is not None:
                    self._tell_agent("restored", **event.restored)
                self._complain(event)
            case Connected():
                self._on_connected(event)
            case Lost():
                if self._coordinator is None:
                    self._node_event(e.ExchangeLost(event.why))
            case Heard():
                self._on_heard(event.message)
            case o.PlanMade() | o.FolderOpened() | o.FolderRefused() | o.FolderCommitted() | o.CommitRefused():
                self._coordinator_event(event)
            case o.FoldersListed() | o.RollbackLooked() | o.RemoteFetched():
                self._coordinator_event(event)
            case _:
                self._node_event(event)

    def _complain(self, told: writer.Told) -> None:
        """Once, until it is right again."""
        if told.complaint is None:
            return
        about, why = told.complaint
        if why and about not in self._complaints:
            self._tell_agent("note", text=why)
        elif not why and about in self._complaints:
            self._tell_agent("note", text=f"checkpoints reach the {about} tier again")
        if why:
            self._complaints[about] = why
        else:
            self._complaints.pop(about, None)

    def _node_event(self, event: Any) -> None:
        self._todo.append((False, event))

    def _coordinator_event(self, event: Any) -> None:
        self._todo.append((True, event))

    def _work(self) -> None:
        """Let the machines decide until nothing is left to decide."""
        while self._todo:
            is_coordinators, event = self._todo.popleft()
            now_s = time.monotonic()
            if is_coordinators:
                if self._coordinator is not None:
                    for order in self._coordinator.handle(event, now_s):
                        self._coordinate(order)
            elif self._machine is not None:
                for command in self._machine.handle(event, now_s):
                    self._perform(command)

    def _tick(self) -> None:
        if self._machine is None:
            return
        now_s = time.monotonic()
        coordinator = self._coordinator
        if coordinator is not None:
            self._coordinator_event(o.Tick())
            for order in coordinator.order_save(now_s):
                self._coordinate(order)
        self._work()
        is_busy = (coordinator is not None and coordinator.is_busy) or self._copiers.pending > 0
        self._node_event(e.Tick(is_coordinator_busy=is_busy))
        binding = self._machine.binding
        if binding is not None:
            steps = self._steps(binding.attempt, binding.ranks)
            if steps:
                self._node_event(e.StepsRead(steps))

    def _steps(self, attempt: int, ranks: Sequence[int]) -> dict[int, int]:
        assert self._machine is not None
        out: dict[int, int] = {}
        for rank in ranks:
            number = self._machine.arena_of(attempt, rank)
            box = self._memory.boxes.get(number) if number is not None else None
            if box is None:
                continue
            box.arena.control.saver_beat = int(time.monotonic() * 1000)
            step = box.arena.control.rank_step
            if step is not None:
                out[rank] = step
        return out

    # -- the agent -----------------------------------------------------------------------------------------------------
    def _on_agent(self, mask: int) -> None:
        if self._agent is None:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush_agent()
            messages = self._agent.poll() if mask & selectors.EVENT_READ else []
        except WireClosedError:
            self._lose_agent()
            return
        for message in messages:
            self._take_from_agent(message)

    def _take_from_agent(self, message: Mapping[str, Any]) -> None:
        try:
            self._hear_agent(message)
        except (KeyError, TypeError, ValueError) as error:
            self._tell_agent("note", text=f"the saver does not understand its agent: {error!r} in {message}")

    def _lose_agent(self) -> None:
        if self._agent is None:
            return
        self._selector.unregister(self._agent)
        self._agent.close()
        self._agent = None
        if self._machine is None:
            self._is_ended = True  # it was gone before anything began
        self._node_event(e.AgentLost())

    def _hear_agent(self, message: Mapping[str, Any]) -> None:
        fds: list[int] = message["fds"]
        match message["op"]:
            case "kept" if fds:
                self._kept.append((str(message["name"]), fds.pop(0)))
            case "ready":
                self._get_ready()
            case "attempt":
                self._on_attempt(message)
            case "failed":
                step = message.get("step")
                signature = str(message.get("signature") or "")
                falls_back = bool(message.get("falls_back"))
                attempt = int(message["attempt"])
                self._agent_event(e.AttemptFailed(attempt, None if step is None else int(step), signature, falls_back))
            case "flush":
                self._agent_event(e.FlushAsked(float(message["limit_s"])))
            case "save":
                self._agent_event(e.SaveAsked(float(message["limit_s"])))
            case "leave":
                self._agent_event(e.LeaveAsked(float(message["limit_s"])))
            case _:
                pass  # of a newer agent
        for fd in fds:
            os.close(fd)

    def _agent_event(self, event: e.NodeEvent) -> None:
        if self._machine is None:
            self._early.append(event)
        else:
            self._node_event(event)

    def _on_attempt(self, message: Mapping[str, Any]) -> None:
        rollback = message.get("rollback")
        self._agent_event(
            e.AttemptBegan(
                e.Binding(
                    attempt=int(message["attempt"]),
                    world_size=int(message["world_size"]),
                    group_rank=int(message["group_rank"]),
                    group_world_size=int(message["group_world_size"]),
                    ranks=tuple(int(r) for r in message["ranks"]),
                    host=str(message.get("host") or ""),
                    port=int(message.get("port") or 0),
                    rollback=rollback if isinstance(rollback, Mapping) else None,
                )
            )
        )

    def _get_ready(self) -> None:
        """All that an earlier saver has left is here: take it over, then let ranks in."""
        if self._is_ready:
            return
        self._is_ready = True
        arenas: list[e.ArenaRestored] = []
        for name, fd in self._kept:
            if name == STATE_NAME:
                self._open_notebook(fd)
                continue
            try:
                if name.startswith(PEER_PREFIX):
                    self._get_peers().adopt(name, fd)
                else:
                    arenas.append(self._memory.adopt(fd, name))
            except ArenaError as error:
                self._tell_agent("drop", name=name)
                self._tell_agent("note", text=f"snapshot memory that was kept cannot be used: {error}")
        self._kept.clear()
        self._machine = SaverMachine(self._node, self._limits[0], self._noted)
        if self._notebook is None:
            self._make_notebook()
        for restored in arenas:
            self._node_event(restored)
        self._todo.extend((False, event) for event in self._early)
        self._early.clear()
        self._listening.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ, self._on_connect)

    def _open_notebook(self, fd: int) -> None:
        try:
            self._notebook = Notebook(fd)
            self._noted = self._notebook.read()
        except (OSError, ValueError) as error:
            os.close(fd)
            self._tell_agent("note", text=f"what the last saver has noted cannot be read: {error}")

    def _make_notebook(self) -> None:
        try:
            self._notebook = Notebook.create()
        except OSError as error:
            text = f"the next saver will not know what this one knew: no memory file can be made: {error}"
            self._tell_agent("note", text=text)
        else:
            self._tell_agent("keep", (self._notebook.fd,), name=STATE_NAME)

    def _tell_agent(self, op: str, fds: Sequence[int] = (), **fields: Any) -> None:
        if self._agent is None:
            return
        try:
            self._agent.post(op, fds, **fields)
            self._flush_agent()
        except WireClosedError:
            pass  # its end is read as well

    def _flush_agent(self) -> None:
        if self._agent is not None:
            is_out = self._agent.flush()
            events = selectors.EVENT_READ if is_out else selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(self._agent, events, self._on_agent)

    # -- ranks ---------------------------------------------------------------------------------------------------------
    def _on_connect(self, mask: int) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                with contextlib.suppress(KeyError, ValueError):  # the agent has closed it
                    self._selector.unregister(self._listening)
                return
            self._number += 1
            connection = self._connections[self._number] = _Connection(self._number, Wire(sock))
            self._watch(connection, is_new=True)

    def _watch(self, connection: _Connection, *, is_new: bool = False, is_writing: bool = False) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_writing else 0)

        def ready(mask: int) -> None:
            self._on_rank(connection, mask)

        if is_new:
            self._selector.register(connection.wire, events, ready)
        else:
            self._selector.modify(connection.wire, events, ready)

    def _on_rank(self, connection: _Connection, mask: int) -> None:
        if connection.number not in self._connections:
            return
        try:
            if mask & selectors.EVENT_WRITE and connection.wire.flush():
                self._watch(connection)
            messages = connection.wire.poll() if mask & selectors.EVENT_READ else []
        except WireClosedError:
            self._lose_rank(connection)
            return
        for message in messages:
            self._take(connection, message)

    def _take(self, connection: _Connection, message: dict[str, Any]) -> None:
        for fd in message["fds"]:  # ranks have none to give
            os.close(fd)
        message["fds"] = []
        try:
            self._hear_rank(connection, message)
        except (KeyError, TypeError, ValueError, SteadyrunError) as error:
            who = f"rank {connection.rank}" if connection.is_known else "a rank"
            shown = {k: v for k, v in message.items() if k != "layout"}
            self._tell_agent("note", text=f"the saver does not understand {who}: {error!r} in {shown}")
            self._lose_rank(connection)

    def _lose_rank(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._selector.unregister(connection.wire)
        connection.wire.close()
        if connection.is_known:
            self._node_event(e.RankLost(connection.attempt, connection.rank, connection.number))

    def _hear_rank(self, connection: _Connection, message: dict[str, Any]) -> None:
        op = str(message.get("op"))
        if op == "hello":
            self._on_hello(connection, message)
            return
        if not connection.is_known:
            raise ValueError("hello has to come first")
        if connection.is_opening and op != "layout":
            connection.stash.append(message)
            return
        attempt, rank = connection.attempt, connection.rank
        match op:
            case "layout":
                connection.is_opening = True
                self._node_event(e.RankLayout(attempt, rank, str(message["layout"]), int(message["blob_bytes"])))
            case "staged":
                self._on_staged(connection, message)
            case "skipped":
                key = SaveKey(attempt, int(message.get("generation", -1)), int(message["step"]))
                self._node_event(e.RankSkipped(key, rank, str(message.get("why") or "no reason given")))
            case "restore":
                digest, number = message.get("digest"), message.get("round")
                self._node_event(
                    e.RankRestore(
                        attempt,
                        rank,
                        None if digest is None else str(digest),
                        bool(message.get("local", True)),
                        rejections(message.get("rejected") or ()),
                        None if number is None else int(number),
                    )
                )
            case "agree":
                self._node_event(e.RankAgree(attempt, rank, str(message["key"]), message.get("value")))
            case "started":
                self._node_event(e.RankStarted(attempt, rank, int(message["step"])))
            case "flush":
                self._node_event(e.RankFlush(attempt, rank, float(message["timeout_s"])))
            case "bye":
                self._node_event(e.RankBye(attempt, rank))
                connection.rank = -1
            case _:
                pass  # "stepped" is in the control page; others are of a newer version

    def _on_hello(self, connection: _Connection, message: Mapping[str, Any]) -> None:
        connection.rank, connection.attempt = int(message["rank"]), int(message["attempt"])
        for other in [k for k in self._connections.values() if k.number != connection.number]:
            if (other.rank, other.attempt) == (connection.rank, connection.attempt):
                self._lose_rank(other)
        options = CheckpointOptions.from_json(message["options"])
        self._node_event(
            e.RankHello(
                connection.number,
                connection.rank,
                connection.attempt,
                str(message.get("run_id") or ""),
                options,
            )
        )

    def _on_staged(self, connection: _Connection, message: Mapping[str, Any]) -> None:
        """The slot is held first, and then looked at: the rank cannot overwrite it any more."""
        self._work()  # what came before it may say which memory is meant
        assert self._machine is not None
        number, slot_number = self._machine.arena_of(connection.attempt, connection.rank), int(message["slot"])
        key = SaveKey(connection.attempt, int(message["generation"]), int(message["step"]))
        box = self._memory.boxes.get(number) if number is not None else None
        is_held, created_unix_s = False, time.time()
        if box is not None and 0 <= slot_number < len(box.arena.slots):
            slot = box.arena.slots[slot_number]
            if slot.hold(key.generation):
                view = slot.view()
                is_held = (view.attempt, view.step) == (key.attempt, key.step)
                created_unix_s = view.created_unix_s
                if not is_held:
                    slot.let_go()
        known = {t.value: t for t in TierName}
        tiers = frozenset(known[t] for t in message.get("tiers") or () if t in known)
        self._node_event(
            e.RankStaged(
                key,
                connection.rank,
                number or -1,
                slot_number,
                tiers,
                float(message.get("stall_s") or 0.0),
                is_held,
                created_unix_s,
            )
        )

    def _send_rank(self, command: e.SendRank) -> None:
        connection = self._connections.get(command.connection)
        if connection is None:
            return
        fds: tuple[int, ...] = ()
        if command.arena is not None:
            box = self._memory.boxes.get(command.arena)
            if box is None:
                return
            fds = (box.arena.fd,)
        try:
            if not connection.wire.post(command.op, fds, **command.fields):
                self._watch(connection, is_writing=True)
        except WireClosedError:
            self._lose_rank(connection)

    # -- effects of the node's machine ---------------------------------------------------------------------------------
    def _perform(self, command: e.NodeCommand) -> None:  # one case a command
        match command:
            case e.SendRank():
                self._send_rank(command)
            case e.AnswerAgent():
                self._tell_agent(command.op, **command.fields)
            case e.Post():
                if self._coordinator is not None:
                    self._coordinator_event(command.message)
                else:
                    self._exchange.post(command.message)
            case e.Bind():
                self._bind(command.binding)
            case e.OpenArena():
                boxes = [self._memory.boxes[n] for n in command.known if n in self._memory.boxes]

                def open_arena(order: e.OpenArena = command) -> _Done:
                    return _Opened(*self._memory.open(order, boxes))

                self._openers.submit(open_arena)
            case e.DropArena():
                name = self._memory.drop(command.arena)
                if name is not None:
                    self._tell_agent("drop", name=name)
            case e.Inspect():
                box = self._memory.boxes.get(command.arena)
                if box is not None:
                    self._inspectors.submit(functools.partial(self._memory.inspect, box, command.slot))
            case e.DigestSlot():
                self._digest(command)
            case e.WritePiece():
                self._write(command)
            case e.CancelWrites():
                self._pieces.cancel(command.ticket)
            case e.LetGo():
                box = self._memory.boxes.get(command.arena)
                if box is not None:
                    box.arena.slots[command.slot].let_go()
            case e.ReleaseSlot():
                self._release(command)
            case e.ServePeers():
                self._openers.submit(functools.partial(self._get_peers().serve, command.binding))  # names are looked up
            case e.ForgetPeers():
                self._get_peers().forget(command.ranks)
            case e.PushPiece():
                box = self._memory.boxes.get(command.arena)
                if box is not None:
                    self._push(command, box)
            case e.FetchPeer():
                boxes = [self._memory.boxes[n] for n in command.known if n in self._memory.boxes]

                def fetch(order: e.FetchPeer = command) -> _Done:
                    return _Fetched(*self._memory.fetch(order, boxes))

                self._openers.submit(fetch)
            case e.ListLocal():
                self._listers.submit(functools.partial(writer.list_local, command))
            case e.CopyLocal():
                self._copiers.submit(functools.partial(writer.copy_local, command))
            case e.SetWanted():
                self._order(command)
            case e.Report():
                self._damaged += command.type == "snapshot_damaged"
                self._record(command.type, command.fields)
                if command.text:
                    self._tell_agent("note", text=command.text)
            case e.End():
                self._is_ended = True
            case _:
                assert_never(command)

    def _push(self, command: e.PushPiece, box: Box) -> None:
        from steadyrun.checkpoint.saver.peers import push_piece

        rate = self._pieces.rate(command.options.most_bytes_per_s)
        self._pushers.submit(lambda: push_piece(command, box, rate))

    def _get_peers(self) -> Peers:
        if self._peers is None:
            from steadyrun.checkpoint.saver.peers import Peers

            def keep(name: str, fd: int) -> None:
                self._finish(_Keep(name, os.dup(fd)))

            self._peers = Peers(keep, lambda name: self._finish(_Keep(name)), self._finish)
        return self._peers

    def _on_opened(self, opened: _Opened) -> None:
        result, box = opened.result, opened.box
        rank = result.info.rank if isinstance(result, e.ArenaOpened) else result.rank
        if box is not None:
            self._take_in(box)
        self._node_event(result)
        for connection in list(self._connections.values()):
            if (connection.rank, connection.attempt) == (rank, result.attempt):
                connection.is_opening = False
                stash, connection.stash = connection.stash, []
                self._work()
                for message in stash:
                    self._take(connection, message)

    def _take_in(self, box: Box) -> None:
        self._memory.add(box)
        self._tell_agent("keep", (box.arena.fd,), name=box.name)
        self._prefault(box)

    def _prefault(self, box: Box) -> None:
        """Take the memory now, so that the first save is as fast as any."""

        def fault() -> _Done:
            if not box.enter():
                return None
            try:
                box.arena.prefault(lambda: box.is_dropped)
            except ArenaError as error:
                return e.MemoryShort(box.info.rank, str(error))
            finally:
                box.leave()
            return None

        self._faulters.submit(fault)

    def _digest(self, command: e.DigestSlot) -> None:
        box = self._memory.boxes.get(command.arena)
        if box is None:
            return

        def digest() -> _Done:
            # A damaged table is made anew; a slot that was overwritten meanwhile is left alone.
            with contextlib.suppress(ArenaError):
                self._memory.take_digests(box, command.slot, command.generation)
            return None

        self._hashers.submit(digest)

    def _write(self, command: e.WritePiece) -> None:
        box = self._memory.boxes.get(command.arena)
        if box is None:
            why = "its snapshot memory was given up"
            self._node_event(e.PieceFailed(command.key, command.rank, command.ticket, "lost", why))
            return
        self._writers.submit(lambda: self._pieces.write(command, box))

    def _release(self, command: e.ReleaseSlot) -> None:
        box = self._memory.boxes.get(command.arena)
        if box is None:
            return
        slot = box.arena.slots[command.slot]
        if slot.hold(command.key.generation):  # the rank cannot begin to write while it is held
            try:
                if slot.view().attempt == command.key.attempt:
                    slot.release()
            finally:
                slot.let_go()

    def _order(self, command: e.SetWanted) -> None:
        steps: dict[int, int] = {}
        for number in command.arenas:
            box = self._memory.boxes.get(number)
            if box is None:
                continue
            box.arena.control.want(command.step, command.tiers)
            step = box.arena.control.rank_step
            if step is not None:
                steps[box.info.rank] = step
        if command.step is not None:
            self._node_event(e.OrderPlaced(command.attempt, command.step, steps))

    def _record(self, type_: str, fields: Mapping[str, Any]) -> None:
        self._tell_agent("journal", type=type_, fields=dict(fields))

    # -- effects of the coordinator ------------------------------------------------------------------------------------
    def _bind(self, binding: e.Binding) -> None:
        is_coordinator, is_alone = binding.group_rank == 0, binding.group_world_size == 1
        if is_coordinator:
            if self._coordinator is None:
                self._coordinator = c.Coordinator(self._limits[1], name=uuid.uuid4().hex[:8])
            self._coordinator_event(
                o.Began(binding.attempt, binding.world_size, binding.group_world_size, binding.rollback)
            )
            self._work_coordinator_first()
            self._node_event(e.ExchangeBound(binding.attempt))
        else:
            self._coordinator = None
        place = None if is_alone else Place(binding.attempt, binding.host, binding.port, is_coordinator)
        self._exchange.bind(place)

    def _work_coordinator_first(self) -> None:
        """It has to know of the attempt before this node tells it anything."""
        assert self._coordinator is not None
        is_coordinators, event = self._todo.pop()
        assert is_coordinators
        for order in self._coordinator.handle(event, time.monotonic()):
            self._coordinate(order)

    def _on_connected(self, event: Connected) -> None:
        if self._coordinator is None:
            self._node_event(e.ExchangeBound(event.attempt))
        else:
            self._coordinator_event(o.ExchangeBack())

    def _on_heard(self, message: m.FromNode | m.ToAll) -> None:
        """From another node; what is for the other side of a conversation that has changed sides is dropped."""
        if isinstance(message, m.ToAll):
            if self._coordinator is None:
                self._node_event(message)
        elif self._coordinator is not None:
            self._coordinator_event(message)

    def _coordinate(self, order: o.CoordinatorCommand) -> None:  # one case a command
        match order:
            case o.Tell():
                self._node_event(order.message)
                self._exchange.post(order.message)
            case o.MakePlan():
                self._planners.submit(lambda: writer.make_plan(order))
            case o.OpenFolder():
                self._folders.submit(lambda: writer.open_folder(order))
            case o.CommitFolder():
                self._folders.submit(lambda: writer.commit_folder(order))
            case o.AbandonFolder():
                self._chores.submit(lambda: writer.abandon_folder(order))
            case o.ListFolders():
                self._listers.submit(lambda: writer.list_folders(order))
            case o.ListRemote():
                self._remotes.submit(lambda: writer.list_remote(order))
            case o.FetchRemote():
                self._remotes.submit(lambda: writer.fetch_remote(order))
            case o.CopyRemote():
                self._copiers.submit(lambda: writer.copy_remote(order))
            case o.LookForRollback():
                self._listers.submit(lambda: writer.look_for_rollback(order))
            case o.NoteLoaded():
                self._listers.submit(lambda: writer.note_loaded(order))
            case o.NoteFailure():
                self._listers.submit(lambda: writer.note_failure(order))
            case o.AskRestart():
                self._tell_agent("restart", why=order.why)
            case o.Prune():
                self._chores.submit(lambda: writer.prune_folder(order))
            case o.Record():
                self._record(order.type, order.fields)
            case o.Say():
                self._tell_agent("note", text=order.text)
            case _:
                assert_never(order)

    # -- what outlives this process ------------------------------------------------------------------------------------
    def _note(self) -> None:
        if self._machine is None or self._notebook is None:
            return
        remembered = self._machine.remember()
        if remembered != self._noted:
            self._noted = remembered
            self._notebook.write(remembered)

    def _write_metrics(self) -> None:
        now_s = time.monotonic()
        if self._machine is None or now_s < self._metrics_s + _METRICS_S:
            return
        self._metrics_s = now_s
        text = json.dumps(self._figures(), separators=(",", ":"))
        if text != self._metrics and not self._scribes.pending:
            self._metrics = text
            body = json.dumps({**json.loads(text), "at_unix_s": round(time.time(), 3)})

            def write() -> _Done:
                with contextlib.suppress(OSError):  # the run folder may be full; the next change tries again
                    write_whole(self._metrics_path, body.encode())
                return None

            self._scribes.submit(write)

    def _figures(self) -> dict[str, Any]:
        assert self._machine is not None
        last = self._machine.last_durable
        out: dict[str, Any] = {
            "schema": "steadyrun.saver/1",
            "node": self._node,
            "pid": os.getpid(),
            "saves": {s.value: n for s, n in self._machine.counts.items() if s is not SaveState.ACCEPTED},
            "last_durable_step": None if last is None else last.key.step,
            "last_durable_attempt": None if last is None else last.key.attempt,
            "last_durable_unix_s": None if last is None or not last.at_unix_s else round(last.at_unix_s, 3),
            "last_durable_bytes": None if last is None else last.size_bytes,
            "persist_s": None if last is None else round(last.seconds, 3),
            "memory_bytes": self._memory.size_bytes,
            "snapshots_damaged": self._damaged,
            "removed": self._removed,
            "peer_memory_bytes": 0 if self._peers is None else self._peers.size_bytes,
            "copying": self._copiers.pending,
            "complaints": self._complaints,
        }
        coordinator = self._coordinator
        if coordinator is not None:
            out["failures"] = dict(coordinator.failures)
            out["writing"] = coordinator.is_busy
            schedule = coordinator.schedule
            if schedule is not None:
                figures = schedule.figures()
                out["stall_s"] = round(figures.stall_s, 6)
                out["interval_s"] = figures.durable_interval_s
                out["memory_interval_s"] = figures.memory_interval_s
                out["overhead_ratio"] = round(figures.overhead_ratio, 6)
                out["mtbf_s"] = round(figures.mtbf_s, 1)
                out["interval_reasoning"] = schedule.reasoning()
        return out

    def _say_goodbye(self) -> None:
        """The last words of a process that ends: what others wait for."""
        self._note()
        self._exchange.finish(_LAST_WORDS_S)
        deadline_s = time.monotonic() + _LAST_WORDS_S
        wires = [conn.wire for conn in self._connections.values()]
        if self._agent is not None:
            wires.append(self._agent)
        for wire in wires:
            with contextlib.suppress(WireClosedError):
                while not wire.flush() and time.monotonic() < deadline_s:
                    time.sleep(0.01)
