"""Timings of many ranks, as they come in from the nodes, put together step by step."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from steadyrun.core.timing import StepTiming
from steadyrun.detect.straggler.records import Floats, StepDetails, StepFrame

__all__ = ["FIELDS", "RECORD_BYTES", "StepAlignment", "TimingBlock"]

FIELDS: Final = (
    "wall_s", "busy_s", "forward_s", "backward_s", "optimizer_s", "data_s", "group_wait_s", "wait_s", "cpu_s",
    "probe_s", "work", "flags", "starved_s",
)  # fmt: skip
AT: Final = {name: index for index, name in enumerate(FIELDS)}
HEAD: Final = struct.Struct("<4sI")
MAGIC: Final = b"SRT3"
# One rank's step. Rows of one size can be joined as bytes: a leader with hundreds of nodes reads them all at once.
ROW: Final = struct.Struct(f"<qi{len(FIELDS)}f")
RECORD: Final = np.dtype([("step", "<i8"), ("rank", "<i4"), ("values", "<f4", (len(FIELDS),))])
RECORD_BYTES: Final = RECORD.itemsize
MOST_STEP: Final = 1 << 62
MOST_VALUE: Final = 3e38  # of a float of four bytes
MOST_SPAN: Final = 1 << 12  # between steps that come at once; more are no steps of a healthy job
NAN: Final = float("nan")

Records: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class TimingBlock:
    """Some steps of some ranks: ``records`` has a step, a rank and its values of ``FIELDS`` in each row."""

    records: Records

    @classmethod
    def of_rows(cls, rows: Mapping[int, Sequence[StepTiming]]) -> TimingBlock:
        """From what a node's ranks told; the last one counts where a rank told a step twice.

        Values that no step can have (ranks may write anything into their board) are left out with their step.
        """
        return cls.of_bytes(b"".join(_packed(rank, t) for rank, timings in rows.items() for t in timings))

    @classmethod
    def of_bytes(cls, data: bytes) -> TimingBlock:
        """From packed rows without a head, of one block or of several joined.

        Raises:
            ValueError: *data* ends within a row.
        """
        if len(data) % RECORD_BYTES:
            raise ValueError(f"cannot read timings: {len(data)} bytes are no multiple of {RECORD_BYTES}")
        return cls(np.frombuffer(data, RECORD))

    @property
    def ranks(self) -> NDArray[np.int32]:
        found: NDArray[np.int32] = self.records["rank"]
        return found

    @property
    def steps(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.records["step"]
        return found

    def to_bytes(self) -> bytes:
        """The rows alone: 64 bytes per rank and step."""
        return self.records.tobytes()

    def pack(self) -> bytes:
        """With a head that says what it is."""
        return HEAD.pack(MAGIC, len(self.records)) + self.to_bytes()

    @classmethod
    def unpack(cls, data: bytes) -> TimingBlock:
        """The reverse of ``pack``.

        Raises:
            ValueError: *data* is not what it gives.
        """
        if len(data) < HEAD.size:
            raise ValueError(f"cannot read timings: {len(data)} bytes are too few")
        magic, count = HEAD.unpack_from(data)
        size = HEAD.size + RECORD_BYTES * count
        if magic != MAGIC or len(data) != size:
            raise ValueError(f"cannot read timings: {len(data)} bytes that begin with {magic!r}, expected {size}")
        return cls.of_bytes(data[HEAD.size :])


def _packed(rank: int, t: StepTiming) -> bytes:
    probe_s = NAN if t.probe_s is None else t.probe_s
    work = NAN if t.work is None else t.work
    group_wait_s = NAN if t.group_wait_s is None else t.group_wait_s
    values = (
        t.wall_s, t.busy_s, t.forward_s, t.backward_s, t.optimizer_s, t.data_s, group_wait_s, t.wait_s, t.cpu_s,
        probe_s, work, t.flags & 0xFFFF, t.starved_s,
    )  # fmt: skip
    if not 0 <= t.step < MOST_STEP or max(values) > MOST_VALUE or min(values) < -MOST_VALUE:
        return b""
    return ROW.pack(t.step, rank, *values)


@dataclass(slots=True)
class _Step:
    """A step that was not given out yet; ``values`` mean something where ``is_told``."""

    values: NDArray[np.float32]
    is_told: NDArray[np.bool_]
    since_s: float
    is_whole: bool = False


class StepAlignment:
    """Collects blocks; gives a step out when all ranks have told it, or when it has waited long enough for the rest.

    A rank that does not tell (its node is cut off, it hangs) is missing in the frame, and delays others by at most
    *patience_s*. Steps come out in order; what comes later than its step is dropped and counted in ``late``. When most
    ranks count from a lower step again (the script has gone back, or begun another loop), the order begins anew there.
    """

    def __init__(self, world_size: int, patience_s: float = 5.0, most_steps: int = 256) -> None:
        self.world_size = world_size
        self.patience_s = patience_s
        self.most_steps = most_steps
        self.late = 0
        self._steps: dict[int, _Step] = {}
        self._in_order = np.arange(world_size)
        self._newest = np.full(world_size, -1, np.int64)  # step that each rank told last
        self._is_back = np.zeros(world_size, np.bool_)  # has told a lower step than before, and none that counts since
        self._given = -1

    def add(self, block: TimingBlock, now_s: float) -> None:
        """*block* came at *now_s* (monotonic)."""
        records = block.records
        ranks = records["rank"].astype(np.intp)
        if len(ranks) and (int(ranks.min()) < 0 or int(ranks.max()) >= self.world_size):
            records = records[(ranks >= 0) & (ranks < self.world_size)]
            ranks = records["rank"].astype(np.intp)
        if not len(records):
            return
        steps = np.ascontiguousarray(records["step"])
        first = int(steps.min())
        self._note_returns(ranks, steps, first)
        if (steps == first).all():
            self._add_step(first, ranks, records["values"], now_s)
            return
        words = records.view(np.float32).reshape(len(records), -1)  # whole rows are gathered faster than parts of them
        for step, order in _by_step(steps, first):
            self._add_step(step, ranks[order], words.take(order, axis=0)[:, -len(FIELDS) :], now_s)

    def _note_returns(self, ranks: NDArray[np.intp], steps: NDArray[np.int64], first: int) -> None:
        if first > self._given:
            self._is_back[ranks] = False
        else:
            lower = steps < self._newest[ranks]
            self._is_back[ranks] = (steps <= self._given) & (self._is_back[ranks] | lower)
            if int(self._is_back.sum()) * 2 > self.world_size:
                self.restart()
        self._newest[ranks] = steps

    def _add_step(self, step: int, ranks: NDArray[np.intp], values: NDArray[np.float32], now_s: float) -> None:
        if step <= self._given:
            self.late += len(ranks)
            return
        kept = self._steps.get(step)
        if kept is None and len(ranks) == self.world_size and (ranks == self._in_order).all():
            self._steps[step] = _Step(values, self._in_order >= 0, now_s, is_whole=True)  # as a rule: nothing to sort
            return
        if kept is None:
            kept = self._steps[step] = _Step(
                np.empty((self.world_size, len(FIELDS)), np.float32), np.zeros(self.world_size, np.bool_), now_s
            )
        if not kept.values.flags.writeable:
            kept.values = kept.values.copy()
        kept.values[ranks] = values
        kept.is_told[ranks] = True
        kept.is_whole = bool(kept.is_told.all())

    def ready(self, now_s: float) -> list[StepFrame]:
        """Steps that are complete, or have waited enough, in order; a later complete step does not overtake."""
        out: list[StepFrame] = []
        for step in sorted(self._steps):
            kept = self._steps[step]
            waited = now_s - kept.since_s >= self.patience_s
            if not kept.is_whole and not waited and len(self._steps) <= self.most_steps:
                break
            if not kept.is_whole:
                kept.values[~kept.is_told] = np.nan
            out.append(_frame(step, kept.values))
            del self._steps[step]
            self._given = step
        return out

    def restart(self) -> None:
        """Forget everything: another attempt counts its steps from somewhere else."""
        self._steps.clear()
        self._newest.fill(-1)
        self._is_back.fill(False)
        self._given = -1


def _by_step(steps: NDArray[np.int64], first: int) -> list[tuple[int, NDArray[np.intp]]]:
    """Each step of *steps*, from *first* on, and where it is, in the order there."""
    span = int(steps.max()) - first + 1
    if span > MOST_SPAN:
        return [(step, np.flatnonzero(steps == step)) for step in np.unique(steps).tolist()]
    after = (steps - first).astype(np.uint16)
    order = after.argsort(kind="stable")  # numbers of two bytes are not compared but counted: a tenth of the time
    ends = np.bincount(after, minlength=span).cumsum().tolist()
    begins = [0, *ends[:-1]]
    return [
        (first + at, order[begin:end]) for at, (begin, end) in enumerate(zip(begins, ends, strict=True)) if end > begin
    ]


def _frame(step: int, values: NDArray[np.float32]) -> StepFrame:
    columns = np.ascontiguousarray(values.T)

    def column(name: str) -> Floats | None:
        found = columns[AT[name]]
        return None if found[0] != found[0] and np.isnan(found).all() else found  # most often the first rank tells

    told = columns[AT["flags"]]
    has_flag = told > 0
    flags = np.where(has_flag, told, 0.0).astype(np.int64) if has_flag.any() else 0
    return StepFrame(
        step=step,
        busy_s=columns[AT["busy_s"]],
        work=column("work"),
        probe_s=column("probe_s"),
        flags=flags,
        details=StepDetails(
            wall_s=column("wall_s"),
            forward_s=column("forward_s"),
            backward_s=column("backward_s"),
            optimizer_s=column("optimizer_s"),
            data_s=column("data_s"),
            cpu_s=column("cpu_s"),
            wait_s=column("wait_s"),
            group_wait_s=column("group_wait_s"),
            starved_s=column("starved_s"),
        ),
    )
