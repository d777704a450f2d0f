"""What a rank tells of the bytes it holds, and how its agent reads that without the rank's help.

**The thin path.** At a check the rank hashes each tensor that it watches (``integrity.fingerprint``) and puts the roots
into a ring in shared memory. Its agent reads the ring whenever it likes; the rank waits for nobody, and no collective
is added. Who is compared with whom is in a file beside it, the *plan*, written before the first roots of its kind.

**Steps.** ``step`` is the number that the board shows for the step (``SlotView.step``: 0 is the first in the life of a
model, where numbers are global). Moments, by their place in ``MOMENTS`` (the values of ``detect.sdc.Moment``):

- ``loaded``: before the first update of this attempt, with the number of the step before it (-1 in a fresh model);
- ``before_step``: just before the update of *step*, taken only if there was a check after *step* - 1: it must find
  on this rank what ``loaded`` or ``after_step`` of *step* - 1 has left, for all tensors whose plan says ``at_rest``.
  Several optimizers: it comes before the first of them. A script may change tensors between updates on purpose
  (clamping, an average): then all ranks that hold them show it, a flipped bit is on one;
- ``after_step``: after the update of *step*: replicas are compared;
- ``checkpoint``: a save began after *step* and there was no check after it yet: as ``after_step``.

**When.** After load, after the first step, at saves, and after each step whose number + 1 is a multiple of the
interval. Of automatic intervals each rank has its own, by its own cost, but all are ``BASE_INTERVAL`` times a power of
two: the checks of the coarsest are made by all. So of a step compare those ranks that have told; wait for nobody.

**Comparing.** A group is a set of ranks with equal bytes (DDP: all; HSDP: those of the same shard). A rank may be in
several. Its tensors lie side by side in plan and ring, so that ``RankPlan.digest(group, roots)``, 8 bytes, stands for
all of them: names, sizes and roots. Equal digests under one ``GroupPlan.key`` at the same (step, moment) mean equal
bytes; different ones say nothing more than: send the roots by name (``RankPlan.by_name``) and let ``detect.sdc`` vote,
tensor by tensor (a tensor is compared only among ranks that tell a root for it). Groups with one rank are never
compared, only at rest. ``owner``, not None, is the rank that computes the tensor and sends it to the others (ZeRO-1).

**Locating.** The rank keeps the leaves (sums of 256 KiB each) of its newest ``KEPT_CHECKS`` checks. Commands of
``evidence.sock``, which the training thread has nothing to do with:

- ``{"cmd": "leaves", "tensor": NAME, "step": N, "moment": TEXT}`` -> ``{"leaves": [hex, ...], "size_bytes",
  "element_bytes", "dtype"}`` or ``{"error": ...}`` when no longer kept;
- ``integrity.location.differing_leaves(own, other)`` and ``integrity.location.locate_word(own_leaf, other_leaf)`` then
  give element and bits from the sums alone wherever one 4-byte word of the leaf differs, as after a flipped bit: no
  bytes need to travel. Replicas get the same gradients, so one wrong element stays one until it is looked for;
- for more than that, bytes at one and the same future step of suspect and witness: ``{"cmd": "capture", "tensor": NAME,
  "leaves": [0, 3], "step": N}`` -> ``{"newest_step": M}`` (an order for a step that has passed is an error; choose N a
  few steps ahead of the newest of all ranks), later ``{"cmd": "captured"}`` -> ``{"captures": [{"tensor", "step",
  "leaf", "bytes": base64}]}``. For ``integrity.location.compare_leaf``.

**Loads and restarts.** A ring belongs to one incarnation (pid and attempt of the slot); ``Board.integrity(slot)`` tells
where it is and whether there is anything new. A new plan (optimizer state is
there after the first step only) has the next generation; entries say theirs.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Final

from steadyrun.core.errors import SteadyrunError
from steadyrun.core.guards import Signal

if TYPE_CHECKING:
    from steadyrun.core.replay import ReplayWords

__all__ = [
    "BASE_INTERVAL",
    "KEPT_CHECKS",
    "MOMENTS",
    "STATES",
    "GroupPlan",
    "IntegrityError",
    "IntegrityWords",
    "RankPlan",
    "RingReader",
    "RingWriter",
    "Roots",
    "TensorPlan",
    "plan_path",
]

MOMENTS: Final = ("loaded", "before_step", "after_step", "checkpoint")
LOADED, BEFORE_STEP, AFTER_STEP, CHECKPOINT = range(4)
STATES: Final = ("not begun", "on", "off", "failed")  # failed: the rank's stderr says why
NOT_BEGUN, ON, OFF, FAILED = range(4)
BASE_INTERVAL: Final = 50
KEPT_CHECKS: Final = 6  # three checks after a step with those before the next

MAGIC: Final = 0x726F6F7473303031  # "roots001"
_HEADER_WORDS: Final = 8
_R_MAGIC, _R_ENTRIES, _R_CAPACITY, _R_COUNT, _R_PID = range(5)
_ENTRY_WORDS: Final = 8  # before the roots: sequence, generation, step, moment, tensors, cost, time, unused
_ENTRY: Final = Struct("=QQqQQQQQ")
_MOST_ENTRIES: Final = 128
_FEWEST_ENTRIES: Final = 8
_RING_BYTES: Final = 32 << 20
_MOST_TENSORS: Final = 1 << 20


class IntegrityError(SteadyrunError):
    """What a rank tells of its bytes cannot be read: the text says why."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Ranks that hold the same bytes.

    Attributes:
        ranks: global, ascending, the telling one among them.
        first, count: where its tensors lie in plan and ring.
    """

    ranks: tuple[int, ...]
    first: int
    count: int

    @property
    def key(self) -> int:
        """64 bits, equal on all its ranks."""
        return int.from_bytes(blake2b(",".join(map(str, self.ranks)).encode(), digest_size=8).digest(), "little")

    @property
    def has_replicas(self) -> bool:
        return len(self.ranks) > 1


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor that a rank hashes; of a sharded one its own shard.

    Attributes:
        name: equal on all ranks that hold a replica: ``layer.weight``, ``optimizer.layer.weight.exp_avg``.
        kind: parameter, optimizer, master or buffer.
        dtype: as ``float32``.
        device: as ``cuda:0``.
        owner: the rank that computes it and sends it to the others; None where each computes it.
        at_rest: nothing but an update may change it.
    """

    name: str
    kind: str
    dtype: str
    elements: int
    element_bytes: int
    device: str = "cpu"
    owner: int | None = None
    at_rest: bool = True

    @property
    def size_bytes(self) -> int:
        return self.elements * self.element_bytes


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank hashes, in the order of the ring: by group, then by name.

    Attributes:
        generation: from 1 on.
        device_uuid: of the GPU that holds the tensors, or None.
        notes: what is left out, and why; for people.
    """

    generation: int
    rank: int
    attempt: int
    groups: tuple[GroupPlan, ...]
    tensors: tuple[TensorPlan, ...]
    device_uuid: str | None = None
    notes: tuple[str, ...] = ()

    def digest(self, group: GroupPlan, roots: Sequence[int]) -> int:
        """64 bits that stand for the names, sizes and roots of a group's tensors."""
        end = group.first + group.count
        told = blake2b(digest_size=8)
        for tensor in self.tensors[group.first : end]:
            told.update(f"{tensor.name}\0{tensor.size_bytes}\0".encode())
        told.update(Struct(f"<{group.count}Q").pack(*roots[group.first : end]))
        return int.from_bytes(told.digest(), "little")

    def by_name(self, roots: Sequence[int], group: GroupPlan | None = None) -> dict[str, int]:
        """Roots by tensor: of *group*, or of all."""
        first, end = (0, len(self.tensors)) if group is None else (group.first, group.first + group.count)
        return {t.name: r for t, r in zip(self.tensors[first:end], roots[first:end], strict=True)}

    def tensor(self, name: str) -> TensorPlan | None:
        return next((t for t in self.tensors if t.name == name), None)

    def to_json(self) -> str:
        return json.dumps(
            {
                "schema": "steadyrun.integrity/1",
                "generation": self.generation,
                "rank": self.rank,
                "attempt": self.attempt,
                "device_uuid": self.device_uuid,
                "notes": self.notes,
                "groups": [[g.ranks, g.first, g.count] for g in self.groups],
                "tensors": [
                    [t.name, t.kind, t.dtype, t.elements, t.element_bytes, t.device, t.owner, t.at_rest]
                    for t in self.tensors
                ],
            }
        )

    @classmethod
    def parse(cls, text: str) -> RankPlan:
        """Raises IntegrityError when *text* is no plan."""
        try:
            data = json.loads(text)
            plan = cls(
                int(data["generation"]),
                int(data["rank"]),
                int(data["attempt"]),
                tuple(
                    GroupPlan(tuple(map(int, ranks)), int(first), int(count)) for ranks, first, count in data["groups"]
                ),
                tuple(
                    TensorPlan(
                        str(name),
                        str(kind),
                        str(dtype),
                        int(elements),
                        int(element_bytes),
                        str(device),
                        None if owner is None else int(owner),
                        bool(at_rest),
                    )
                    for name, kind, dtype, elements, element_bytes, device, owner, at_rest in data["tensors"]
                ),
                None if data.get("device_uuid") is None else str(data["device_uuid"]),
                tuple(map(str, data.get("notes", ()))),
            )
        except (KeyError, TypeError, ValueError) as e:
            raise IntegrityError(f"cannot read a rank's integrity plan: {type(e).__name__}: {e}") from e
        at = 0
        for group in plan.groups:
            if group.first != at or group.count < 1:
                raise IntegrityError(f"cannot read a rank's integrity plan: group at {group.first}, should be at {at}")
            at += group.count
        if at != len(plan.tensors):
            raise IntegrityError(f"cannot read a rank's integrity plan: groups of {at} of {len(plan.tensors)} tensors")
        return plan

    @classmethod
    def load(cls, rank_dir: Path, generation: int) -> RankPlan:
        """The plan that entries of *generation* belong to. Raises IntegrityError."""
        path = plan_path(rank_dir, generation)
        try:
            return cls.parse(path.read_text("utf-8"))
        except OSError as e:
            raise IntegrityError(f"cannot read {path}: {e.strerror}") from e


def plan_path(rank_dir: Path, generation: int) -> Path:
    return rank_dir / f"integrity.{generation}.json"


@dataclass(frozen=True, slots=True)
class Roots:
    """The roots of one check.

    Attributes:
        moment: one of ``MOMENTS``.
        at_ns: CLOCK_MONOTONIC when they were asked for.
        cost_ns: what this check took of the training thread (on a device: of its stream).
        roots: unsigned, in the plan's order.
    """

    generation: int
    step: int
    moment: str
    at_ns: int
    cost_ns: int
    roots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IntegrityWords:
    """What a slot of the board says about checks (``Board.integrity``): cheap enough to look at in each pass.

    Attributes:
        state: one of ``STATES``.
        ring_fd: the ring is ``/proc/<pid of the slot>/fd/<ring_fd>``; None: there is none yet.
        ring: number of the ring; another number means another ring to open.
        checks: made so far; as ``RingReader.count`` as long as *ring* is 1.
        interval: steps between checks at present.
        cost_s: of training time, all checks together.
        step_s: an average step.
        signals: the newest losses and norms of gradients that were out of line.
        replay: what it says of microbatches that the rank computes again.
    """

    state: str
    ring_fd: int | None
    ring: int
    generation: int
    checks: int
    interval: int
    cost_s: float
    step_s: float
    signals: tuple[Signal, ...] = ()
    replay: ReplayWords | None = None


# -- the ring ----------------------------------------------------------------------------------------------------------
def _fitting_entries(capacity: int) -> int:
    return max(_FEWEST_ENTRIES, min(_MOST_ENTRIES, _RING_BYTES // ((_ENTRY_WORDS + capacity) * 8)))


class RingWriter:
    """The rank's side: memory without a name, which the agent opens as ``/proc/<pid>/fd/<fd>``.

    Attributes:
        capacity: tensors per entry.
    """

    def __init__(self, pid: int, capacity: int) -> None:
        """Raises OSError without memory. Pages that are not written to take none."""
        self.capacity = capacity
        self._entries = _fitting_entries(capacity)
        self._stride = _ENTRY_WORDS + capacity
        size = (_HEADER_WORDS + self._entries * self._stride) * 8
        self.fd = os.memfd_create("steadyrun-roots", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self._mapping = mmap.mmap(self.fd, size)
        self._words = memoryview(self._mapping).cast("Q")
        self._count = 0
        for at, word in ((_R_ENTRIES, self._entries), (_R_CAPACITY, capacity), (_R_PID, pid), (_R_MAGIC, MAGIC)):
            self._words[at] = word

    @property
    def count(self) -> int:
        return self._count

    def put(self, generation: int, step: int, moment: int, at_ns: int, cost_ns: int, roots: Sequence[int]) -> None:
        """One check; *roots* may be signed. Raises ValueError when they are more than fit."""
        if len(roots) > self.capacity:
            raise ValueError(f"{len(roots)} roots do not fit into a ring for {self.capacity}")
        at = (_HEADER_WORDS + self._count % self._entries * self._stride) * 8
        self._words[at // 8] = 0
        _ENTRY.pack_into(self._mapping, at, 0, generation, step, moment, len(roots), cost_ns, at_ns, 0)
        Struct(f"={len(roots)}Q").pack_into(
            self._mapping, at + _ENTRY_WORDS * 8, *(r & 0xFFFFFFFFFFFFFFFF for r in roots)
        )
        self._count += 1
        self._words[at // 8] = self._count  # now whole
        self._words[_R_COUNT] = self._count

    def close(self) -> None:
        self._words.release()
        self._mapping.close()
        os.close(self.fd)


class RingReader:
    """The agent's side. Opened while the rank lives, readable afterwards, too: what a dead rank has left stays.

    Never blocks; an entry that is being overwritten counts as lost.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        """Raises IntegrityError when it is no ring; then *mapping* is closed."""
        self._mapping = mapping
        self._words = memoryview(mapping).cast("Q")
        self._entries, self._capacity = int(self._words[_R_ENTRIES]), int(self._words[_R_CAPACITY])
        self._stride = _ENTRY_WORDS + self._capacity
        size = (_HEADER_WORDS + self._entries * self._stride) * 8
        is_sane = 0 < self._entries <= _MOST_ENTRIES and self._capacity <= _MOST_TENSORS
        if self._words[_R_MAGIC] != MAGIC or not is_sane or size != len(mapping):
            self.close()
            raise IntegrityError("cannot read a rank's roots: not a ring of this version of steadyrun")

    @classmethod
    def open(cls, pid: int, fd: int) -> RingReader:
        """The ring of process *pid*, by ``IntegrityWords.ring_fd`` of its slot. Raises IntegrityError."""
        path = f"/proc/{pid}/fd/{fd}"
        try:
            own = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                mapping = mmap.mmap(own, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(own)
        except (OSError, ValueError) as e:
            raise IntegrityError(f"cannot read the roots of process {pid}: {e}") from e
        if len(mapping) < _HEADER_WORDS * 8:
            mapping.close()
            raise IntegrityError("cannot read a rank's roots: not a ring of this version of steadyrun")
        return cls(mapping)

    @property
    def count(self) -> int:
        """Checks written so far."""
        return int(self._words[_R_COUNT])

    def read(self, seen: int) -> tuple[list[Roots], int, int]:
        """Checks since count *seen*: (in order, new count, how many were overwritten unread)."""
        count = self.count
        first = max(seen, count - self._entries)
        found = [r for r in self._read(first, count) if r is not None]
        return found, count, count - seen - len(found)

    def _read(self, first: int, count: int) -> Iterator[Roots | None]:
        for number in range(first, count):
            at = _HEADER_WORDS + number % self._entries * self._stride
            sequence, generation, step, moment, tensors, cost_ns, at_ns, _ = _ENTRY.unpack_from(self._mapping, at * 8)
            if sequence != number + 1 or tensors > self._capacity or moment >= len(MOMENTS):
                yield None
                continue
            begin = at + _ENTRY_WORDS
            roots = tuple(self._words[begin : begin + tensors].tolist())
            is_whole = self._words[at] == sequence
            yield Roots(generation, step, MOMENTS[moment], at_ns, cost_ns, roots) if is_whole else None

    def close(self) -> None:
        self._words.release()
        self._mapping.close()
