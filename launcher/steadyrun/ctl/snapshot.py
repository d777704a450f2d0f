"""One look at a run: what agents wrote last, what the board says now, what /proc says of the processes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from steadyrun.core import layout
from steadyrun.core.board import Board, SlotView
from steadyrun.core.errors import BoardError
from steadyrun.core.records import to_json
from steadyrun.core.runfolder import RunFolder
from steadyrun.ctl.runs import LiveNode, RunLog, incidents_of, is_agent_alive, live_nodes, process_state
from steadyrun.detect.nodescore import Machine, NodeScore, NodeScores, read_marks
from steadyrun.node.scorekeeper import read_scores

__all__ = ["NodeLook", "OpenLook", "RankLook", "RunLook", "Standby", "look_at"]

RATE_STEPS = 16  # step times that make the rate
LEAST_SCORE = 0.05  # of a node that is shown


@dataclass(frozen=True, slots=True)
class OpenLook:
    """A section a rank is in, and for how long."""

    name: str
    age_s: float
    lane: int
    first: bool


@dataclass(frozen=True, slots=True)
class RankLook:
    """One rank now; None where nothing is known.

    Attributes:
        phase: what the agent says of it.
        process: state letter of /proc, or None when the process is gone.
        sections: outermost first, main thread first.
        note: what a person should know; empty when all is usual.
    """

    rank: int
    local_rank: int
    node: str
    pid: int
    phase: str
    process: str | None
    attached: bool = False
    finished: bool = False
    step: int | None = None
    step_age_s: float | None = None
    step_time_s: float | None = None
    steps_done: int = 0
    beat_age_s: float | None = None
    progress_age_s: float | None = None
    sections: tuple[OpenLook, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Standby:
    """A warm interpreter that waits for its orders."""

    local_rank: int
    pid: int
    ready: bool
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class NodeLook:
    """One node's agent and its ranks.

    Attributes:
        agent: ``alive``, ``stopped``, ``silent`` (alive, but its loop has not passed lately) or ``gone``.
        agent_beat_age_s: since its loop last passed.
        problem: why the board could not be read; empty otherwise.
    """

    node: str
    agent: str
    agent_pid: int
    agent_beat_age_s: float | None
    attempt: int
    phase: str
    written_at_unix_s: float | None
    ranks: tuple[RankLook, ...]
    standbys: tuple[Standby, ...] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    metrics: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RunLook:
    """A whole run. ``state`` is ``live``, ``ended`` or ``lost`` (no agent here, and none wrote that the run ended)."""

    run: Path
    run_id: str
    state: str
    command: str
    world_size: int
    restarts: int
    started_at_unix_s: float | None
    ended_at_unix_s: float | None
    nodes: tuple[NodeLook, ...]
    incidents: tuple[Mapping[str, Any], ...]
    ending: Mapping[str, Any] | None
    attempts: int
    last_steps: Mapping[int, int]
    scores: tuple[NodeScore, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What ``steadyctl status --json`` prints."""
        fields = {name: to_json(getattr(self, name)) for name in self.__dataclass_fields__}
        return {"schema": "steadyrun.status/1", **fields}


SILENT_S = 5.0  # an agent's loop passes at least every two seconds


def look_at(
    run: RunFolder, now_s: float | None = None, now_unix_s: float | None = None, log: RunLog | None = None
) -> RunLook:
    """The run as it is now; reads only. *log*: its journals, where the caller has them."""
    now_s = time.monotonic() if now_s is None else now_s
    log = RunLog.read(run) if log is None else log
    lives = live_nodes(run)
    nodes = tuple(_look_at_node(live, now_s) for live in lives)
    ended = log.ended_at_unix_s
    state = "ended" if ended is not None else "live" if any(n.agent != "gone" for n in nodes) else "lost"
    first: Mapping[str, Any] = lives[0].data if lives else {}
    return RunLook(
        run=run.root,
        run_id=str(first.get("run_id", run.root.name.partition("-")[2])),
        state=state,
        command=str(first.get("command", "")),
        world_size=max([int(live.data.get("world_size") or 0) for live in lives], default=0),
        restarts=max([int(live.data.get("restarts") or 0) for live in lives] + log.attempts()[-1:], default=0),
        started_at_unix_s=first.get("started_at_unix_s", log.started_at_unix_s),
        ended_at_unix_s=ended,
        nodes=nodes,
        incidents=tuple(
            {
                "incident": i.number,
                "class": i.cls,
                "ranks": i.ranks,
                "action": i.verdict.get("action"),
                "detected_at_unix_s": i.verdict.get("detected_at_unix_s"),
                "summary": i.summary,
            }
            for i in incidents_of(run)
        ),
        ending=log.ending if ended is not None else None,
        attempts=len(log.attempts()),
        last_steps=log.last_steps(),
        scores=_scores_of(run, time.time() if now_unix_s is None else now_unix_s),
    )


def _scores_of(run: RunFolder, now_unix_s: float) -> tuple[NodeScore, ...]:
    """The nodes that anything was blamed on lately, highest score first, as of now."""
    told = read_scores(run.node_scores)
    nodes = told.get("nodes")
    pairs = [(n.get("node"), n.get("host")) for n in nodes if isinstance(n, dict)] if isinstance(nodes, list) else []
    scores = NodeScores(str(told.get("run")), tuple(read_marks(told.get("marks"))))
    looks = scores.look([Machine(str(node), str(host)) for node, host in pairs], now_unix_s)
    return tuple(look for look in looks if look.score >= LEAST_SCORE)


def _look_at_node(live: LiveNode, now_s: float) -> NodeLook:
    alive = is_agent_alive(live)
    board, problem = (_open_board(live)) if alive else (None, "")
    views: dict[int, SlotView | None] = {}
    step_times: dict[int, float] = {}
    beat_age_s: float | None = None
    if board is not None:
        try:
            beat = int(board.words[layout.H_AGENT_BEAT])
            beat_age_s = now_s - (beat + board.base_ns) / 1e9 if beat else None
            for told in live.ranks:
                slot = int(told.get("local_rank", -1))
                if 0 <= slot < board.slots:
                    views[slot] = board.view(slot)
                    _, count, _ = board.step_times_s(slot, 0)
                    newest, _, _ = board.step_times_s(slot, max(count - RATE_STEPS, 0))
                    if newest:
                        step_times[slot] = median(newest)
        finally:
            board.close()
    ranks = tuple(_look_at_rank(live, told, views, step_times, alive, now_s) for told in live.ranks)
    return NodeLook(
        node=live.node,
        agent=_agent_state(live, alive, beat_age_s),
        agent_pid=live.agent_pid,
        agent_beat_age_s=beat_age_s,
        attempt=live.attempt,
        phase=str(live.data.get("phase", "?")),
        written_at_unix_s=live.data.get("updated_at_unix_s"),
        ranks=ranks,
        standbys=tuple(_standby(s) for s in live.standbys) if alive else (),
        limits=live.data.get("limits") or {},
        metrics=str(live.data.get("metrics") or "") if alive else "",
        problem=problem,
    )


def _open_board(live: LiveNode) -> tuple[Board | None, str]:
    if live.board is None:
        return None, "the agent names no board"
    try:
        board = Board.open(live.board, writable=False)
    except BoardError as e:
        return None, str(e)
    if int(board.words[layout.H_AGENT_PID]) != live.agent_pid:
        board.close()
        return None, f"{live.board} belongs to another agent"
    return board, ""


def _agent_state(live: LiveNode, alive: bool, beat_age_s: float | None) -> str:
    if not alive:
        return "gone"
    process = process_state(live.agent_pid)
    if process is not None and process.state in "Tt":
        return "stopped"
    return "silent" if beat_age_s is not None and beat_age_s > SILENT_S else "alive"


def _look_at_rank(
    live: LiveNode,
    told: Mapping[str, Any],
    views: Mapping[int, SlotView | None],
    step_times: Mapping[int, float],
    agent_alive: bool,
    now_s: float,
) -> RankLook:
    rank, slot, pid = int(told.get("rank", -1)), int(told.get("local_rank", -1)), int(told.get("pid") or 0)
    process = process_state(pid) if agent_alive and pid else None
    phase = str(told.get("phase", "?"))
    letter = process.state if process is not None else None
    view = views.get(slot)
    if view is None or view.pid != pid or view.attempt != live.attempt:
        note = _note(phase, letter, None) if agent_alive else ""
        return RankLook(rank, slot, live.node, pid, phase, letter, note=note)
    if phase in ("standby", "starting"):
        phase = "running"  # the file is some seconds old, the board is not
    sections = tuple(
        OpenLook(s.name, max(now_s - s.since_s, 0.0), s.lane, s.first)
        for s in sorted(view.sections, key=lambda s: (s.lane, s.since_s))
    )

    def age(at_s: float | None) -> float | None:
        return None if at_s is None else max(now_s - at_s, 0.0)

    return RankLook(
        rank=rank,
        local_rank=slot,
        node=live.node,
        pid=pid,
        phase=phase,
        process=letter,
        attached=True,
        finished=view.finished_s is not None,
        step=view.step,
        step_age_s=age(view.step_at_s),
        step_time_s=step_times.get(slot),
        steps_done=view.steps_done,
        beat_age_s=age(view.beat_at_s),
        progress_age_s=age(view.progress_s),
        sections=sections,
        note=_note(phase, letter, view),
    )


def _note(phase: str, letter: str | None, view: SlotView | None) -> str:
    if letter is None:
        return "ended" if phase == "exited" else "process is gone"
    if letter in "Tt":
        return "stopped (SIGSTOP or a debugger)"
    if letter == "D":
        return "in state D (waits for a device or file system)"
    if letter in "ZX":
        return "ended"
    if view is None:
        return "has not reported yet" if phase in ("standby", "starting") else "does not report"
    if view.finished_s is not None:
        return "script is done, the interpreter is ending"
    if view.has_exception:
        return "left an exception"
    return ""


def _standby(told: Mapping[str, Any]) -> Standby:
    return Standby(
        local_rank=int(told.get("local_rank", -1)),
        pid=int(told.get("pid") or 0),
        ready=bool(told.get("ready")),
        memory_bytes=int(told.get("memory_bytes") or 0),
    )


def is_overdue(look: RankLook, section: OpenLook, limits: Mapping[str, Any]) -> bool:
    """The section is open longer than the limit that the agent wrote down for it."""
    named: Mapping[str, Any] = limits.get("sections") or {}
    limit_s = named.get(section.name)
    if limit_s is None and section.name == "setup":
        limit_s = limits.get("setup_s")
    return isinstance(limit_s, (int, float)) and section.age_s > limit_s


def running_ranks(nodes: Sequence[NodeLook]) -> list[RankLook]:
    return sorted((r for n in nodes for r in n.ranks), key=lambda r: r.rank)
