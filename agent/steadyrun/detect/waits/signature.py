"""What members of a group must agree on in one collective, and who does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from steadyrun.core.classes import FaultClass
from steadyrun.core.flight import FlightOp

__all__ = ["ROOTED", "Difference", "describe_op", "differences", "op_family", "signature"]

ROOTED: Final = frozenset({"broadcast", "broadcastoop", "reduce", "reduceoop", "gather", "scatter"})
_UNEVEN_BOTH: Final = ("alltoall",)
_EQUAL_INPUTS: Final = frozenset(
    {"allreduce", "allreducesparse", "broadcast", "broadcastoop", "reduce", "reduceoop", "gather", "allgatherbase",
     "allgatherintotensor", "reducescatterbase", "reducescattertensor"}
)  # fmt: skip
_EQUAL_OUTPUTS: Final = frozenset({"scatter", "allgather"})
_NO_TENSOR: Final = frozenset({"barrier", "coalesced", "monitoredbarrier"})


@dataclass(frozen=True, slots=True)
class Difference:
    """Members of one operation that called different things.

    Attributes:
        sides: (ranks, "all_reduce [1024] Float"), the largest first.
        odd: ranks outside the largest side; all of them when the two largest are even.
    """

    cls: FaultClass
    sides: tuple[tuple[tuple[int, ...], str], ...]
    odd: tuple[int, ...]
    is_tie: bool


def op_family(name: str) -> str:
    """``_ALLGATHER_BASE`` and ``_all_gather_base`` are one."""
    return name.lower().replace("_", "")


def signature(op: FlightOp) -> tuple[str, int | None, str]:
    """(operation, number of elements that all must have or None, type); only what has to be equal."""
    family = op_family(op.name)
    if family in _NO_TENSOR:
        return family, None, ""
    size: int | None = None
    if family in _EQUAL_INPUTS and op.in_sizes:
        size = _elements(op.in_sizes)
    elif family in _EQUAL_OUTPUTS and op.out_sizes:
        size = _elements(op.out_sizes)
    dtypes = op.in_dtypes or op.out_dtypes
    return family, size, dtypes[0] if dtypes else ""


def describe_op(op: FlightOp) -> str:
    """``all_reduce [2048, 4096] Float``."""
    sizes = op.in_sizes or op.out_sizes
    shown = " ".join(str(list(s)) for s in sizes[:2]) + (f" and {len(sizes) - 2} more" if len(sizes) > 2 else "")
    dtypes = op.in_dtypes or op.out_dtypes
    return " ".join(p for p in (op.name, shown, dtypes[0] if dtypes else "") if p)


def differences(ops: Mapping[int, FlightOp]) -> Difference | None:
    """How the members' calls of one collective differ; None when they agree as far as they have to."""
    if len(ops) < 2:
        return None
    found = {rank: signature(op) for rank, op in ops.items()}
    values = set(found.values())
    if len(values) == 1:
        return None
    cls, part = _class_of(values)
    if part is None:
        return None
    sides: dict[object, list[int]] = {}
    unsaid: list[int] = []
    for rank, value in found.items():
        (unsaid if value[part] in (None, "") else sides.setdefault(value[part], [])).append(rank)
    ordered = sorted((sorted(ranks) for ranks in sides.values()), key=lambda r: (-len(r), r))
    is_tie = len(ordered[0]) == len(ordered[1])
    odd = sorted(r for ranks in (ordered if is_tie else ordered[1:]) for r in ranks)
    told = tuple((tuple(ranks), describe_op(ops[ranks[0]])) for ranks in ordered)
    return Difference(cls, told, tuple(odd), is_tie)


def _class_of(values: set[tuple[str, int | None, str]]) -> tuple[FaultClass, int | None]:
    if len({v[0] for v in values}) > 1:
        return FaultClass.OP_MISMATCH, 0
    if len({v[1] for v in values} - {None}) > 1:
        return FaultClass.SIZE_MISMATCH, 1
    if len({v[2] for v in values} - {""}) > 1:
        return FaultClass.DTYPE_MISMATCH, 2
    return FaultClass.HEALTHY, None


def uneven_sums(ops: Mapping[int, FlightOp], members: Sequence[int]) -> tuple[int, int] | None:
    """(sent, received) of an all-to-all of which every member's call is known, where they differ; else None."""
    if set(ops) != set(members) or not all(op_family(op.name).startswith(_UNEVEN_BOTH) for op in ops.values()):
        return None
    if not all(op.in_sizes and op.out_sizes for op in ops.values()):
        return None
    sent = sum(_elements(op.in_sizes) for op in ops.values())
    received = sum(_elements(op.out_sizes) for op in ops.values())
    return (sent, received) if sent != received else None


def _elements(sizes: Sequence[Sequence[int]]) -> int:
    return sum(prod(s) for s in sizes)
