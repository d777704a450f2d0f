"""One look at a live run with all that a person watches: ranks, their GPUs, nodes, alarms. Reads only."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from steadyrun.core.board import Board
from steadyrun.core.errors import BoardError
from steadyrun.core.records import to_json
from steadyrun.core.runfolder import RunFolder
from steadyrun.ctl.runs import LiveNode, live_nodes
from steadyrun.ctl.snapshot import NodeLook, RankLook, RunLook, is_overdue, look_at
from steadyrun.ctl.watching.follow import PACE_STEPS, JournalFollower

__all__ = ["GpuLine", "NodeLine", "RankLine", "RunWatcher", "TopLook"]

SCHEMA: Final = "steadyrun.top/1"
FRESH_S: Final = 20.0  # a node elsewhere writes every 5 s, through a shared file system
FEWEST_PEERS: Final = 2
MOST_ROLE_BYTES: Final = 1 << 16
LATE_RATIO: Final = 5.0  # of a usual step: longer without progress than that is worth a look
LATE_LEAST_S: Final = 2.0
ROLES_S: Final = 10.0  # how often it is looked for roles that are not told yet


@dataclass(frozen=True, slots=True)
class GpuLine:
    """One GPU as its node's agent last told; None where it does not say."""

    index: int
    temperature_c: float | None = None
    clock_mhz: float | None = None
    power_w: float | None = None
    utilization: float | None = None
    throttled_by: tuple[str, ...] = ()
    is_lost: bool = False
    xids: int = 0


@dataclass(frozen=True, slots=True)
class RankLine:
    """One rank.

    Attributes:
        work_s: median own work of its newest steps, without waiting for others.
        score: that, in units of its peers' median: 1.0 is as usual, 1.25 takes a quarter longer.
        slowdown: what a standing straggler alarm says of it, else None.
        gpu_index: which GPU it uses; ``gpu`` what is known of that.
        concern: why it is worth a look, empty when all is usual; ``weight`` how much (0 for nothing).
    """

    look: RankLook
    work_s: float | None = None
    score: float | None = None
    slowdown: float | None = None
    gpu_index: int | None = None
    gpu: GpuLine | None = None
    concern: str = ""
    weight: int = 0

    @property
    def rank(self) -> int:
        return self.look.rank


@dataclass(frozen=True, slots=True)
class NodeLine:
    """One node.

    Attributes:
        where: ``here``, ``elsewhere`` (it writes, but its processes are not of this machine) or ``gone``.
        troubles: of its agent and its collectors, worst first, each with whether it is bad.
    """

    look: NodeLook
    where: str
    ranks: tuple[RankLine, ...]
    troubles: tuple[tuple[str, bool], ...] = ()

    @property
    def node(self) -> str:
        return self.look.node


@dataclass(frozen=True, slots=True)
class TopLook:
    """The whole picture. ``saved``: step and age of the newest complete checkpoint."""

    run: RunLook
    state: str
    nodes: tuple[NodeLine, ...]
    saved: tuple[int, float] | None = None
    restarted_ago_s: float | None = None
    metrics: tuple[str, ...] = ()
    has_gpus: bool = field(default=False)

    @property
    def ranks(self) -> list[RankLine]:
        return sorted((r for n in self.nodes for r in n.ranks), key=lambda r: r.rank)

    def to_json(self) -> dict[str, Any]:
        """What ``steadyctl top --json`` prints."""
        return {
            "schema": SCHEMA,
            "run": str(self.run.run),
            "run_id": self.run.run_id,
            "state": self.state,
            "world_size": self.run.world_size,
            "restarts": self.run.restarts,
            "restarted_ago_s": self.restarted_ago_s,
            "checkpoint": None if self.saved is None else {"step": self.saved[0], "age_s": self.saved[1]},
            "metrics": list(self.metrics),
            "nodes": [
                {
                    "node": n.node,
                    "where": n.where,
                    "agent": n.look.agent,
                    "attempt": n.look.attempt,
                    "phase": n.look.phase,
                    "troubles": [{"text": text, "is_bad": bad} for text, bad in n.troubles],
                    "ranks": [_rank_json(r) for r in n.ranks],
                }
                for n in self.nodes
            ],
            "incidents": to_json(self.run.incidents),
        }


def _rank_json(line: RankLine) -> dict[str, Any]:
    return {
        **to_json(line.look),
        "own_work_s": line.work_s,
        "score": line.score,
        "slowdown": line.slowdown,
        "gpu_index": line.gpu_index,
        "gpu": to_json(line.gpu) if line.gpu is not None else None,
        "concern": line.concern,
    }


class RunWatcher:
    """Looks at one run again and again; what does not change is read once."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._journals = JournalFollower(run)
        self._roles: dict[tuple[int, int], str] = {}  # by attempt and rank; who has the same can be compared
        self._next_roles_s = -math.inf
        self._host = socket.gethostname()

    def look(self, now_s: float | None = None, now_unix_s: float | None = None) -> TopLook:
        """The run as it is now."""
        now_s = time.monotonic() if now_s is None else now_s
        now_unix_s = time.time() if now_unix_s is None else now_unix_s
        self._journals.poll()
        run = look_at(self._run, now_s, now_unix_s, self._journals.log())
        lives = live_nodes(self._run)
        told = {live.node: live.data for live in lives}
        works = self._works(run.nodes, lives)
        if now_s >= self._next_roles_s:
            self._next_roles_s = now_s + ROLES_S
            self._read_roles(run.nodes)
        scores = self._scores(run.nodes, works)
        slow = self._journals.slow
        nodes = []
        for node in run.nodes:
            data = told.get(node.node, {})
            where = self._where(node, now_unix_s)
            devices = _mapping(data.get("devices"))
            gpus = self._gpus(node.node, devices)
            ranks = []
            for rank in node.ranks:
                seen = rank if where != "elsewhere" else self._from_afar(rank, data, node, now_unix_s)
                index = _gpu_of(devices, rank.rank)
                line = RankLine(
                    seen,
                    works.get(rank.rank),
                    scores.get(rank.rank),
                    slow.get(rank.rank),
                    index,
                    gpus.get(index) if index is not None else None,
                )
                ranks.append(_with_concern(line, node.limits, where))
            nodes.append(NodeLine(node, where, tuple(ranks), _troubles(node, where, devices)))
        saved, restarted = self._journals.saved, self._journals.restarted_at_unix_s
        is_live = run.ended_at_unix_s is None and any(n.where != "gone" for n in nodes)
        return TopLook(
            run=run,
            state="live" if is_live else run.state,
            nodes=tuple(nodes),
            saved=None if saved is None else (saved[0], max(now_unix_s - saved[1], 0.0)),
            restarted_ago_s=None if restarted is None else max(now_unix_s - restarted, 0.0),
            metrics=tuple(str(d["metrics"]) for d in told.values() if d.get("metrics")),
            has_gpus=any(r.gpu is not None for n in nodes for r in n.ranks),
        )

    # -- nodes ---------------------------------------------------------------------------------------------------------
    def _where(self, node: NodeLook, now_unix_s: float) -> str:
        if node.agent != "gone":
            return "here"
        is_ours = node.node == self._host or node.node.startswith(f"{self._host}-")
        written = node.written_at_unix_s
        if (
            not is_ours
            and written is not None
            and now_unix_s - written < FRESH_S
            and node.phase not in ("left", "excluded")
        ):
            return "elsewhere"
        return "gone"

    def _from_afar(self, rank: RankLook, data: Mapping[str, Any], node: NodeLook, now_unix_s: float) -> RankLook:
        """What the journals say of a rank whose board cannot be seen from here."""
        pace = self._journals.paces.get(rank.rank)
        if pace is None or pace.attempt != node.attempt or pace.step < 0:
            return replace(rank, note="")
        times = list(pace.step_times_s)
        return replace(
            rank,
            step=pace.step,
            step_age_s=max(now_unix_s - pace.at_unix_s, 0.0),
            step_time_s=median(times) if times else None,
            progress_age_s=max(now_unix_s - pace.at_unix_s, 0.0),
            note="",
        )

    def _gpus(self, node: str, devices: Mapping[str, Any]) -> dict[int, GpuLine]:
        out = {}
        for told in devices.get("gpus") or ():
            if not isinstance(told, Mapping) or not isinstance(told.get("index"), int):
                continue
            index = told["index"]
            throttled = told.get("throttled_by")
            out[index] = GpuLine(
                index,
                _number(told.get("temperature_c")),
                _number(told.get("sm_clock_mhz")),
                _scaled(told.get("power_mw"), 1e-3),
                _scaled(told.get("utilization_percent"), 1e-2),
                tuple(str(t) for t in throttled) if isinstance(throttled, list) else (),
                told.get("error") is not None,
                self._journals.xids.get((node, index), 0),
            )
        return out

    # -- pace ----------------------------------------------------------------------------------------------------------
    def _works(self, nodes: Sequence[NodeLook], lives: Sequence[LiveNode]) -> dict[int, float]:
        """Own work per step of each rank: from its board where that is here, else from the journals."""
        out: dict[int, float] = {}
        for node in nodes:
            for rank in node.ranks:
                pace = self._journals.paces.get(rank.rank)
                if pace is not None and pace.attempt == node.attempt and pace.work_s:
                    out[rank.rank] = median(pace.work_s)
        for live in lives:
            if live.board is None or not live.board.exists():
                continue
            try:
                board = Board.open(live.board, writable=False)
            except BoardError:
                continue
            try:
                for told in live.ranks:
                    slot, rank_number = told.get("local_rank"), told.get("rank")
                    if not isinstance(slot, int) or not isinstance(rank_number, int) or not 0 <= slot < board.slots:
                        continue
                    timings, _, _ = board.timings(slot, 0)
                    busy = [t.busy_s for t in timings[-PACE_STEPS:] if t.busy_s > 0]
                    if busy:
                        out[rank_number] = median(busy)
            finally:
                board.close()
        return out

    def _scores(self, nodes: Sequence[NodeLook], works: Mapping[int, float]) -> dict[int, float]:
        groups: dict[str | None, list[int]] = {}
        for node in nodes:
            for rank in node.ranks:
                if rank.rank in works:
                    groups.setdefault(self._roles.get((node.attempt, rank.rank)), []).append(rank.rank)
        out: dict[int, float] = {}
        for ranks in groups.values():
            if len(ranks) > FEWEST_PEERS:
                usual = median(works[r] for r in ranks)
                out |= {r: works[r] / usual for r in ranks if usual > 0}
        return out

    def _read_roles(self, nodes: Sequence[NodeLook]) -> None:
        for node in nodes:
            for rank in node.ranks:
                key = (node.attempt, rank.rank)
                if key not in self._roles:
                    role = _read_role(self._run.rank_dir(*key) / "role.json")
                    if role is not None:
                        self._roles[key] = role


def _read_role(path: Path) -> str | None:
    try:
        with path.open("rb") as f:
            return json.dumps(json.loads(f.read(MOST_ROLE_BYTES))["key"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _scaled(value: Any, factor: float) -> float | None:
    number = _number(value)
    return None if number is None else number * factor


def _gpu_of(devices: Mapping[str, Any], rank: int) -> int | None:
    index = _mapping(_mapping(devices.get("ranks")).get(str(rank))).get("index")
    return index if isinstance(index, int) else None


def _troubles(node: NodeLook, where: str, devices: Mapping[str, Any]) -> tuple[tuple[str, bool], ...]:
    out: list[tuple[str, bool]] = []
    match (node.agent, where):
        case ("gone", "gone"):
            out.append(("its agent is gone", True))
        case ("stopped", _):
            out.append((f"its agent is stopped (kill -CONT {node.agent_pid})", True))
        case ("silent", _):
            out.append(("its agent has not looked for some time", True))
        case _:
            pass
    for name, told in _mapping(devices.get("collectors")).items():
        result = _mapping(told)
        health = result.get("health")
        if health in ("unhealthy", "degraded"):
            out.append((f"{name}: {result.get('reason', '?')}", health == "unhealthy"))
    return tuple(sorted(out, key=lambda t: not t[1]))


def _with_concern(line: RankLine, limits: Mapping[str, Any], where: str) -> RankLine:
    look = line.look
    overdue = next((s for s in look.sections if is_overdue(look, s, limits)), None)
    late_s = max(LATE_RATIO * (look.step_time_s or 0.0), LATE_LEAST_S)
    if look.note:
        text, weight = look.note, 1 if look.note.startswith(("ended", "script is done", "has not reported")) else 4
    elif line.gpu is not None and line.gpu.is_lost:
        text, weight = f"GPU {line.gpu.index} is lost", 4
    elif overdue is not None:
        text, weight = "", 3
    elif line.gpu is not None and line.gpu.xids:
        text, weight = f"{line.gpu.xids} Xid of GPU {line.gpu.index}", 3
    elif line.slowdown is not None:
        text, weight = f"slow by {line.slowdown:.0%}", 2
    elif line.gpu is not None and line.gpu.throttled_by:
        text, weight = f"GPU held back: {', '.join(line.gpu.throttled_by)}", 2
    elif where == "here" and look.step_time_s and (look.progress_age_s or 0.0) > late_s:
        text, weight = "", 1
    else:
        return line
    return replace(line, concern=text, weight=weight)
