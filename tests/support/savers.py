"""A saver process with everything around it that a job would have: a pretended agent, pretended ranks, real memory."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from steadyrun.checkpoint.arena import Arena, SlotBusyError, choose_slot
from steadyrun.checkpoint.layout import Entry, Layout, ObjectEntry, place, rank_key
from steadyrun.checkpoint.manifest import Fragment, tensors_name
from steadyrun.checkpoint.saves import CheckpointOptions
from steadyrun.checkpoint.wire import Wire, WireClosedError

T = TypeVar("T")
LIMIT_S = 60.0


def make_layout(
    rank: int,
    world_size: int,
    own: Mapping[str, int],
    shared: Mapping[str, int] | None = None,
    details: Mapping[str, Any] | None = None,
) -> Layout:
    """float32 vectors: *own* are cut over the ranks (elements per rank), *shared* are on all of them."""
    shared = shared or {}
    sizes = [n * 4 for n in own.values()] + [n * 4 for n in shared.values()]
    at = place(sizes)
    entries = [
        Entry(f"model.{k}", ("model", k), "float32", (n * world_size,), (rank * n,), (n,), a, n * 4)
        for (k, n), a in zip(own.items(), at, strict=False)
    ]
    entries += [
        Entry(f"model.{k}", ("model", k), "float32", (n,), (0,), (n,), a, n * 4)
        for (k, n), a in zip(shared.items(), at[len(own) :], strict=True)
    ]
    objects = (
        ObjectEntry("step", ("step",)),
        ObjectEntry(rank_key(rank, "rng"), (rank_key(rank, "rng"),)),
    )
    return Layout(rank, world_size, tuple(entries), objects, details or {"covered": ["model"], "torch": "2.13.0"})


def problems(folder: Path) -> list[str]:
    """What steadyctl's verification finds wrong with a checkpoint."""
    from steadyrun.checkpoint.kinds import find_checkpoints, read_contents
    from steadyrun.checkpoint.verify import verify

    (found,) = find_checkpoints(folder).checkpoints
    return [str(p) for p in verify(read_contents(found)).problems]


def values(folder: Path) -> dict[tuple[str, int], set[float]]:
    """By key and first offset: the numbers in that shard."""
    out: dict[tuple[str, int], set[float]] = {}
    for path in folder.glob("__*.shards.json"):
        fragment = Fragment.from_json(path.read_bytes())
        data = (folder / tensors_name(fragment.rank)).read_bytes()
        for shard in fragment.shards:
            raw = data[shard.payload_at_bytes : shard.payload_at_bytes + shard.payload_bytes]
            out[shard.key, shard.offsets[0]] = set(struct.unpack(f"<{len(raw) // 4}f", raw))
    return out


class Agent:
    """The agent's part: starts the saver, keeps its descriptors, hears what it says."""

    def __init__(self, folder: Path, node: str = "n0") -> None:
        self.node = node
        self.run_folder = folder
        (folder / "live").mkdir(parents=True, exist_ok=True)
        self.path = str(folder / f"saver-{node}.sock")
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.bind(self.path)
        self.listening.listen(64)
        self.kept: dict[str, int] = {}
        self.notes: list[str] = []
        self.journal: list[tuple[str, dict[str, Any]]] = []
        self.heard: list[dict[str, Any]] = []
        self.attempt: dict[str, Any] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.wire: Wire | None = None
        self.errors = folder / f"{node}.stderr"
        self.limits: dict[str, dict[str, float]] = {}

    def start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-E", "-s", "-m", "steadyrun.checkpoint.saver"),
                    *("--socket-fd", str(self.listening.fileno()), "--agent-fd", str(theirs.fileno())),
                    *("--run-folder", str(self.run_folder), "--node", self.node),
                    *("--limits", json.dumps(self.limits)),
                ],
                pass_fds=(self.listening.fileno(), theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        theirs.close()
        self.wire = Wire(ours)
        for name, fd in self.kept.items():
            self.wire.send("kept", (fd,), name=name)
        if self.attempt is not None:
            self.wire.send("attempt", **self.attempt)
        self.wire.send("ready")

    def begin(
        self,
        attempt: int,
        world_size: int,
        ranks: Sequence[int] | None = None,
        group_rank: int = 0,
        group_world_size: int = 1,
        host: str = "",
        port: int = 0,
    ) -> None:
        self.attempt = {
            "attempt": attempt,
            "world_size": world_size,
            "group_rank": group_rank,
            "group_world_size": group_world_size,
            "ranks": list(range(world_size) if ranks is None else ranks),
            "host": host,
            "port": port,
            "node": self.node,
        }
        if self.wire is not None:
            self.wire.send("attempt", **self.attempt)

    def send(self, op: str, **fields: Any) -> None:
        assert self.wire is not None
        self.wire.send(op, **fields)

    def hear(self) -> None:
        if self.wire is None:
            return
        try:
            messages = self.wire.poll()
        except WireClosedError:
            self.wire.close()
            self.wire = None
            return
        for message in messages:
            match message["op"]:
                case "keep":
                    self.kept[message["name"]] = message["fds"].pop()
                case "drop":
                    os.close(self.kept.pop(message["name"]))
                case "note":
                    self.notes.append(message["text"])
                case "journal":
                    self.journal.append((message["type"], message["fields"]))
                case _:
                    self.heard.append(message)

    def records(self, type_: str) -> list[dict[str, Any]]:
        return [fields for t, fields in self.journal if t == type_]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the saver as nobody should; its memory stays with us."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait()
        self.hear()
        if self.wire is not None:
            self.wire.close()
            self.wire = None
        self.process = None

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self.wire is not None:
            self.wire.close()
            self.wire = None
        for fd in self.kept.values():
            os.close(fd)
        self.kept.clear()
        self.listening.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)


@dataclass
class Save:
    step: int
    generation: int
    states: list[str] = field(default_factory=list)
    why: str = ""


class Rank:
    """A training process as the saver sees it."""

    def __init__(self, agent: Agent, rank: int, world_size: int, attempt: int, options: CheckpointOptions) -> None:
        self.agent, self.rank, self.world_size, self.attempt, self.options = agent, rank, world_size, attempt, options
        self.arena: Arena | None = None
        self.layout: Layout | None = None
        self.heard: list[dict[str, Any]] = []
        self.saves: dict[int, Save] = {}
        self.generation = 0
        self.wire: Wire | None = None
        self.connect()

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(self.agent.path)
        self.wire = Wire(sock)
        self.send(
            "hello",
            rank=self.rank,
            local_rank=self.rank,
            world_size=self.world_size,
            attempt=self.attempt,
            run_id="run",
            pid=os.getpid(),
            options=self.options.to_json(),
        )

    def send(self, op: str, **fields: Any) -> None:
        assert self.wire is not None
        self.wire.send(op, **fields)

    def send_layout(self, layout: Layout, blob_bytes: int = 1 << 16) -> None:
        self.layout = layout
        self.send("layout", layout=layout.to_json(), blob_bytes=blob_bytes)

    def hear(self) -> None:
        if self.wire is None:
            return
        try:
            messages = self.wire.poll()
        except WireClosedError:
            self.wire.close()
            self.wire = None
            return
        for message in messages:
            match message["op"]:
                case "arena":
                    self._map(message["fds"].pop())
                    self.heard.append(message)
                case "save":
                    save = self.saves.get(message["generation"])
                    if save is not None and message["state"] not in save.states:
                        save.states.append(message["state"])
                        save.why = message["why"]
                case _:
                    self.heard.append(message)

    def _map(self, fd: int) -> None:
        if self.arena is not None:
            if os.fstat(fd).st_ino == os.fstat(self.arena.fd).st_ino:
                os.close(fd)
                return
            self.arena.close()
        self.arena = Arena.attach(fd)

    def last(self, op: str) -> dict[str, Any] | None:
        return next((m for m in reversed(self.heard) if m["op"] == op), None)

    def take(self, op: str) -> dict[str, Any] | None:
        found = self.last(op)
        if found is not None:
            self.heard.remove(found)
        return found

    def fill(self, slot_number: int, step: int, value: Callable[[Entry], float] | None = None) -> None:
        """Put a snapshot of *step* into the slot: every element of it is the step, plus 1000 times the rank for what is
        cut over the ranks."""
        assert self.arena is not None
        assert self.layout is not None
        slot = self.arena.slots[slot_number]
        slot.begin(step, self.attempt, self.generation)
        for entry in self.arena.layout.entries:
            number = value(entry) if value is not None else step + 1000.0 * (entry.shape != entry.sizes) * self.rank
            slot.payload(entry)[:] = struct.pack("<f", number) * (entry.size_bytes // 4)
        slot.write_blobs([f"step {step}".encode(), f"rng {self.rank} {step}".encode()])
        slot.seal()

    def save(
        self,
        step: int,
        tiers: Sequence[str] = ("memory", "shared"),
        value: Callable[[Entry], float] | None = None,
        tell: bool = True,
    ) -> Save:
        """As ``Checkpointer.save``: into a free slot, or skipped."""
        assert self.arena is not None
        self.generation += 1
        save = self.saves[self.generation] = Save(step, self.generation)
        number = choose_slot([s.view() for s in self.arena.slots], self.arena.control.busy())
        if number is None:
            self.send("skipped", step=step, generation=self.generation, why="no slot is free")
            return save
        try:
            self.fill(number, step, value)
        except SlotBusyError:
            self.send("skipped", step=step, generation=self.generation, why="no slot is free")
            return save
        if tell:
            self.tell_staged(number, save, tiers)
        return save

    def tell_staged(self, slot: int, save: Save, tiers: Sequence[str] = ("memory", "shared")) -> None:
        self.send("staged", slot=slot, generation=save.generation, step=save.step, tiers=list(tiers), stall_s=0.01)

    def leave(self) -> None:
        """As a process that was killed."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None
        if self.arena is not None:
            self.arena.close()
            self.arena = None


class Job:
    """Agents and ranks of a test, and how to wait for them."""

    def __init__(self, folder: Path, root: Path | None = None, **options: Any) -> None:
        self.folder = folder
        self.root = root or folder / "checkpoints"
        self.options = CheckpointOptions(root=str(self.root), **options)
        self.limits: dict[str, dict[str, float]] = {}
        self.agents: list[Agent] = []
        self.ranks: list[Rank] = []

    def agent(self, node: str = "n0", start: bool = True) -> Agent:
        agent = Agent(self.folder, node)
        agent.limits = self.limits
        self.agents.append(agent)
        if start:
            agent.start()
        return agent

    def rank(self, agent: Agent, rank: int, world_size: int, attempt: int = 0) -> Rank:
        made = Rank(agent, rank, world_size, attempt, self.options)
        self.ranks.append(made)
        return made

    def hear(self, wait_s: float = 0.02) -> None:
        wires = [x.wire for x in (*self.agents, *self.ranks) if x.wire is not None]
        select.select([w.fileno() for w in wires], [], [], wait_s)
        for x in (*self.agents, *self.ranks):
            x.hear()

    def until(self, predicate: Callable[[], T], what: str = "", limit_s: float = LIMIT_S) -> T:
        """The first true value of *predicate*."""
        deadline_s = time.monotonic() + limit_s
        while not (value := predicate()):
            assert time.monotonic() < deadline_s, f"waited {limit_s:g} s in vain for {what}: {self.story()}"
            self.hear()
        return value

    def story(self) -> str:
        lines = [f"{a.node}: notes {a.notes}, journal {a.journal}, {a.errors.read_text()}" for a in self.agents]
        lines += [f"rank {r.rank}/{r.attempt}: {list(r.saves.values())}, heard {r.heard}" for r in self.ranks]
        return "\n".join(lines)

    def start_ranks(self, agent: Agent, layouts: Sequence[Layout], attempt: int = 0) -> list[Rank]:
        """Ranks with memory, ready to save."""
        ranks = [self.rank(agent, layout.rank, layout.world_size, attempt) for layout in layouts]
        for rank, layout in zip(ranks, layouts, strict=True):
            rank.send_layout(layout)
        self.until(lambda: all(r.arena is not None for r in ranks), "snapshot memory")
        return ranks

    def is_durable(self, ranks: Sequence[Rank], step: int) -> bool:
        return all(any(s.step == step and "durable" in s.states for s in r.saves.values()) for r in ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.leave()
        for agent in self.agents:
            agent.close()
