"""What the nodes of a job tell each other, over the control store: one key per fact, and who may set it.

All keys live under the rendezvous epoch's prefix, so a new membership starts clean. ``A`` is an attempt, ``G`` a group
rank; *leader* is group rank 0.

=====================  ==========  ==========================================================================
key                    set by      value
=====================  ==========  ==========================================================================
floor/G                each node   JSON: the newest attempt and history it knows
agreed                 leader      JSON: the first attempt of this epoch, the history to go on with, the nodes' hosts
store/A                leader      host:port of the attempt's worker store
stop/A                 first wins  JSON: why the attempt must end, who says so, the incident's number
evidence/A/G           each node   JSON: what it collected about its ranks
decision/A             leader      JSON: the decision, the verdict's summary, the history
arrived/A              last one    every node is free of the attempt's processes (counter arrive/A)
finished/A             last one    every node's ranks ended with 0 (counter finish/A)
drain                  first wins  JSON: somebody was asked to stop; ranks should leave at a common call
calls/G                each node   how often its ranks have called should_stop()
stop_at                leader      the call from which should_stop() is true
pace/A/G               each node   its ranks' newest step timings, packed; set anew every second
metrics/G              each node   host:port where it serves its metrics
roots/A/G              each node   digests of its ranks' bytes at the newest checks, packed; set anew for more
ask/A                  leader      JSON: a question about some ranks' bytes; the newest one counts
answer/A/G             each node   JSON: its ranks' answers to the newest question
=====================  ==========  ==========================================================================
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from steadyrun.node.ports import AsyncStore

__all__ = [
    "Agreed",
    "AnswerTold",
    "Arrived",
    "AskTold",
    "CallsTold",
    "ControlChannel",
    "DecisionTold",
    "DrainTold",
    "EvidenceTold",
    "Finished",
    "Lost",
    "Message",
    "MetricsTold",
    "PaceTold",
    "RootsTold",
    "StopAtTold",
    "StopTold",
    "StoreTold",
]


@dataclass(frozen=True, slots=True)
class Agreed:
    """All nodes are in: the first attempt of this epoch and the state to go on with."""

    attempt: int
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoreTold:
    attempt: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class StopTold:
    attempt: int
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EvidenceTold:
    attempt: int
    group_rank: int
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DecisionTold:
    attempt: int
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Arrived:
    attempt: int


@dataclass(frozen=True, slots=True)
class Finished:
    attempt: int


@dataclass(frozen=True, slots=True)
class DrainTold:
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallsTold:
    group_rank: int
    calls: int


@dataclass(frozen=True, slots=True)
class StopAtTold:
    call: int


@dataclass(frozen=True, slots=True)
class PaceTold:
    attempt: int
    group_rank: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class MetricsTold:
    group_rank: int
    address: str


@dataclass(frozen=True, slots=True)
class RootsTold:
    attempt: int
    group_rank: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class AskTold:
    attempt: int
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerTold:
    attempt: int
    group_rank: int
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Lost:
    reason: str


Message = (
    Agreed
    | StoreTold
    | StopTold
    | EvidenceTold
    | DecisionTold
    | Arrived
    | Finished
    | DrainTold
    | CallsTold
    | StopAtTold
    | PaceTold
    | MetricsTold
    | RootsTold
    | AskTold
    | AnswerTold
    | Lost
)


class ControlChannel:
    """One epoch's conversation. Never blocks; answers come from ``drain``. Used from the loop's thread."""

    def __init__(
        self,
        store: AsyncStore,
        group_rank: int,
        group_world_size: int,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._unix_s = unix_s
        self.group_rank = group_rank
        self.group_world_size = group_world_size
        self._floors: dict[int, Mapping[str, Any]] = {}
        self._watched: set[str] = set()
        self._followed: dict[str, list[str]] = {}  # what for -> keys
        self._lost = False

    @property
    def is_leader(self) -> bool:
        return self.group_rank == 0

    def fileno(self) -> int:
        """For the selector."""
        return self._store.fileno()

    def close(self) -> None:
        self._store.close()

    # -- telling -----------------------------------------------------------------------------------------------------
    def tell_floor(self, attempt: int, state: Mapping[str, Any]) -> None:
        """Announce the attempt this node would start with; Agreed follows when every node has."""
        self._store.set(f"floor/{self.group_rank}", _pack({"attempt": attempt, "state": state}))
        self._watch(["agreed", "drain", "stop_at"])
        if self.is_leader:
            self._watch(f"floor/{g}" for g in range(self.group_world_size))

    def told_of(self, key: str) -> list[Any]:
        """By the leader: what each node's state had under *key* when it announced itself, by group rank."""
        return [floor["state"].get(key) for _, floor in sorted(self._floors.items())]

    def start_attempt(self, attempt: int) -> None:
        """Listen to everything that concerns the attempt."""
        self._watch(f"{key}/{attempt}" for key in ("store", "stop", "decision", "arrived", "finished"))

    def tell_store(self, attempt: int, host: str, port: int) -> None:
        self._store.set(f"store/{attempt}", f"{host}|{port}".encode())

    def tell_stop(self, attempt: int, payload: Mapping[str, Any]) -> None:
        """The first of all nodes wins; every node hears the winner's payload."""
        self._store.set_first(f"stop/{attempt}", _pack(payload))

    def tell_evidence(self, attempt: int, payload: Mapping[str, Any]) -> None:
        self._store.set(f"evidence/{attempt}/{self.group_rank}", _pack(payload))

    def expect_evidence(self, attempt: int) -> None:
        """By the leader: hear every node's evidence as it comes."""
        self._watch(f"evidence/{attempt}/{g}" for g in range(self.group_world_size))

    def tell_decision(self, attempt: int, payload: Mapping[str, Any]) -> None:
        self._store.set(f"decision/{attempt}", _pack(payload))

    def tell_arrived(self, attempt: int) -> None:
        self._store.add(f"arrive/{attempt}", 1, self.group_world_size, f"arrived/{attempt}")

    def tell_finished(self, attempt: int) -> None:
        self._store.add(f"finish/{attempt}", 1, self.group_world_size, f"finished/{attempt}")

    def tell_drain(self, payload: Mapping[str, Any]) -> None:
        self._store.set_first("drain", _pack(payload))

    def tell_calls(self, calls: int) -> None:
        self._store.set(f"calls/{self.group_rank}", str(calls).encode())
        if self.is_leader:
            self._watch(f"calls/{g}" for g in range(self.group_world_size))

    def tell_stop_at(self, call: int) -> None:
        self._store.set("stop_at", str(call).encode())

    def tell_pace(self, attempt: int, payload: bytes) -> None:
        """In place of what this node told before."""
        self._store.set(f"pace/{attempt}/{self.group_rank}", payload)

    def expect_pace(self, attempt: int, every_s: float) -> None:
        """By the leader: hear what all other nodes tell of an attempt's pace, and of no other attempt's."""
        self._follow("pace", [f"pace/{attempt}/{g}" for g in range(1, self.group_world_size)], every_s)

    def tell_roots(self, attempt: int, payload: bytes) -> None:
        """In place of what this node told before."""
        self._store.set(f"roots/{attempt}/{self.group_rank}", payload)

    def tell_ask(self, attempt: int, payload: Mapping[str, Any]) -> None:
        """By the leader, in place of the question before."""
        self._store.set(f"ask/{attempt}", _pack(payload))

    def tell_answer(self, attempt: int, payload: Mapping[str, Any], most_bytes: int) -> None:
        """In place of the answer before; one that is too long is left out."""
        packed = _pack(payload)
        if len(packed) <= most_bytes:
            self._store.set(f"answer/{attempt}/{self.group_rank}", packed)

    def expect_roots(self, attempt: int, every_s: float) -> None:
        """By the leader: hear the roots and answers of all other nodes; by these: hear its questions."""
        keys = [f"ask/{attempt}"]
        if self.is_leader:
            keys = [f"{kind}/{attempt}/{g}" for kind in ("roots", "answer") for g in range(1, self.group_world_size)]
        self._follow("roots", keys, every_s)

    def _follow(self, what: str, keys: list[str], every_s: float) -> None:
        self._followed[what] = keys
        self._store.follow([key for some in self._followed.values() for key in some], every_s)

    def tell_metrics(self, address: str) -> None:
        """Where this node serves its metrics."""
        self._store.set(f"metrics/{self.group_rank}", address.encode())

    def expect_metrics(self) -> None:
        """By the leader: hear where the others do."""
        self._watch(f"metrics/{g}" for g in range(1, self.group_world_size))

    # -- hearing -----------------------------------------------------------------------------------------------------
    def drain(self) -> list[Message]:
        """Messages since the last call, in order of arrival; a malformed one is dropped (it came from a peer)."""
        out: list[Message] = []
        for event in self._store.drain():
            if event.error:
                if not self._lost:
                    self._lost = True
                    out.append(Lost(event.error))
                continue
            message = self._read(event.key, event.value)
            if message is not None:
                out.append(message)
        return out

    def _read(self, key: str, value: bytes) -> Message | None:
        kind, _, rest = key.partition("/")
        try:
            match kind:
                case "floor":
                    self._hear_floor(int(rest), _unpack(value))
                    return None
                case "agreed":
                    data = _unpack(value)
                    return Agreed(int(data["attempt"]), data["state"])
                case "store":
                    host, _, port = value.decode().rpartition("|")
                    return StoreTold(int(rest), host, int(port))
                case "stop":
                    return StopTold(int(rest), _unpack(value))
                case "evidence":
                    attempt, _, group_rank = rest.partition("/")
                    return EvidenceTold(int(attempt), int(group_rank), _unpack(value))
                case "decision":
                    return DecisionTold(int(rest), _unpack(value))
                case "arrived":
                    return Arrived(int(rest))
                case "finished":
                    return Finished(int(rest))
                case "drain":
                    return DrainTold(_unpack(value))
                case "calls":
                    return CallsTold(int(rest), int(value))
                case "stop_at":
                    return StopAtTold(int(value))
                case "pace":
                    attempt, _, group_rank = rest.partition("/")
                    return PaceTold(int(attempt), int(group_rank), value)
                case "metrics":
                    return MetricsTold(int(rest), value.decode()[:300])
                case "roots":
                    attempt, _, group_rank = rest.partition("/")
                    return RootsTold(int(attempt), int(group_rank), value)
                case "ask":
                    return AskTold(int(rest), _unpack(value))
                case "answer":
                    attempt, _, group_rank = rest.partition("/")
                    return AnswerTold(int(attempt), int(group_rank), _unpack(value))
                case _:
                    return None
        except (ValueError, KeyError, TypeError):
            return None

    def _hear_floor(self, group_rank: int, data: Mapping[str, Any]) -> None:
        self._floors[group_rank] = data
        if len(self._floors) == self.group_world_size:
            newest = max(self._floors.values(), key=lambda d: int(d["attempt"]))
            machines = [floor["state"].get("machine") for _, floor in sorted(self._floors.items())]
            state = {**newest["state"], "machines": machines, "told_at_unix_s": self._unix_s()}
            self._store.set("agreed", _pack({"attempt": newest["attempt"], "state": state}))

    def _watch(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key not in self._watched:
                self._watched.add(key)
                self._store.watch(key)


def _pack(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _unpack(value: bytes) -> Mapping[str, Any]:
    data = json.loads(value)
    if not isinstance(data, dict):
        raise ValueError("not an object")
    return data
