"""Timings of many ranks, as they come in from the nodes, put together step by step."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from steadyrun.core.timing import StepTiming
from steadyrun.detect.straggler.records import Floats, StepDetails, StepFrame

__all__ = ["FIELDS", "StepAlignment", "TimingBlock"]

FIELDS: Final = (
    "wall_s", "busy_s", "forward_s", "backward_s", "optimizer_s", "data_s", "checkpoint_s", "wait_s", "cpu_s",
    "probe_s", "work", "flags",
)  # fmt: skip
AT: Final = {name: index for index, name in enumerate(FIELDS)}
HEAD: Final = struct.Struct("<4sHH")
MAGIC: Final = b"SRT1"


@dataclass(frozen=True, slots=True, eq=False)
class TimingBlock:
    """Some steps of some ranks: ``values`` is [steps, fields, ranks], NaN where a rank has no such step."""

    ranks: NDArray[np.int32]
    steps: NDArray[np.int64]
    values: NDArray[np.float32]

    @classmethod
    def of_rows(cls, rows: Mapping[int, Sequence[StepTiming]]) -> TimingBlock:
        """From what a node's ranks told; the last one counts where a rank told a step twice."""
        ranks = np.array(sorted(rows), dtype=np.int32)
        steps = np.array(sorted({t.step for timings in rows.values() for t in timings}), dtype=np.int64)
        place = {int(step): index for index, step in enumerate(steps)}
        values = np.full((len(steps), len(FIELDS), len(ranks)), np.nan, np.float32)
        for column, rank in enumerate(ranks.tolist()):
            for timing in rows[rank]:
                row = [getattr(timing, name) for name in FIELDS]
                values[place[timing.step], :, column] = [np.nan if v is None else v for v in row]
        return cls(ranks, steps, values)

    def pack(self) -> bytes:
        """For the way to the leading agent: 48 bytes per rank and step."""
        head = HEAD.pack(MAGIC, len(self.ranks), len(self.steps))
        parts = (self.ranks.astype("<i4"), self.steps.astype("<i8"), self.values.astype("<f4"))
        return head + b"".join(part.tobytes() for part in parts)

    @classmethod
    def unpack(cls, data: bytes) -> TimingBlock:
        """The reverse of ``pack``.

        Raises:
            ValueError: *data* is not what it gives.
        """
        if len(data) < HEAD.size:
            raise ValueError(f"cannot read timings: {len(data)} bytes are too few")
        magic, ranks, steps = HEAD.unpack_from(data)
        size = HEAD.size + 4 * ranks + 8 * steps + 4 * ranks * steps * len(FIELDS)
        if magic != MAGIC or len(data) != size:
            raise ValueError(f"cannot read timings: {len(data)} bytes that begin with {magic!r}, expected {size}")
        at = HEAD.size
        who = np.frombuffer(data, "<i4", ranks, at)
        when = np.frombuffer(data, "<i8", steps, at + 4 * ranks)
        values = np.frombuffer(data, "<f4", -1, at + 4 * ranks + 8 * steps)
        return cls(
            who.astype(np.int32), when.astype(np.int64), values.reshape(steps, len(FIELDS), ranks).astype(np.float32)
        )


class StepAlignment:
    """Collects blocks; gives a step out when all ranks have told it, or when it has waited long enough for the rest.

    A rank that does not tell (its node is cut off, it hangs) is missing in the frame, and delays others by at most
    *patience_s*. Steps come out in order; what comes later than its step is dropped and counted in ``late``.
    """

    def __init__(self, world_size: int, patience_s: float = 5.0, most_steps: int = 256) -> None:
        self.world_size = world_size
        self.patience_s = patience_s
        self.most_steps = most_steps
        self.late = 0
        self._values: dict[int, NDArray[np.float32]] = {}
        self._told: dict[int, int] = {}
        self._since_s: dict[int, float] = {}
        self._given = -1

    def add(self, block: TimingBlock, now_s: float) -> None:
        """*block* came at *now_s* (monotonic)."""
        inside = (block.ranks >= 0) & (block.ranks < self.world_size)
        ranks = block.ranks[inside]
        values = block.values if inside.all() else block.values[:, :, inside]
        for row, step in enumerate(block.steps.tolist()):
            told = int((~np.isnan(values[row, AT["wall_s"]])).sum())
            if step <= self._given:
                self.late += told
                continue
            kept = self._values.get(step)
            if kept is None:
                kept = np.full((len(FIELDS), self.world_size), np.nan, np.float32)
                self._values[step] = kept
                self._since_s[step] = now_s
                self._told[step] = 0
            kept[:, ranks] = np.where(np.isnan(values[row]), kept[:, ranks], values[row])
            self._told[step] += told

    def ready(self, now_s: float) -> list[StepFrame]:
        """Steps that are complete, or have waited enough, in order; a later complete step does not overtake."""
        out: list[StepFrame] = []
        for step in sorted(self._values):
            waited = now_s - self._since_s[step] >= self.patience_s
            if self._told[step] < self.world_size and not waited and len(self._values) <= self.most_steps:
                break
            out.append(_frame(step, self._values.pop(step)))
            del self._told[step], self._since_s[step]
            self._given = step
        return out

    def restart(self) -> None:
        """Forget everything: another attempt counts its steps from somewhere else."""
        self._values.clear()
        self._told.clear()
        self._since_s.clear()
        self._given = -1


def _frame(step: int, values: NDArray[np.float32]) -> StepFrame:
    def column(name: str) -> Floats | None:
        found = values[AT[name]]
        return None if np.isnan(found).all() else found.astype(np.float64)

    flags = np.nan_to_num(values[AT["flags"]]).astype(np.int64)
    has_flags = bool(flags.any())
    return StepFrame(
        step=step,
        busy_s=values[AT["busy_s"]].astype(np.float64),
        work=column("work"),
        probe_s=column("probe_s"),
        flags=flags if has_flags else 0,
        details=StepDetails(
            wall_s=column("wall_s"),
            forward_s=column("forward_s"),
            backward_s=column("backward_s"),
            optimizer_s=column("optimizer_s"),
            data_s=column("data_s"),
            cpu_s=column("cpu_s"),
            wait_s=column("wait_s"),
        ),
    )
