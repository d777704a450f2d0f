"""What members of a group must agree on in one collective, and who does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from steadyrun.core.classes import FaultClass
from steadyrun.core.flight import FlightOp

__all__ = ["ROOTED", "Difference", "Signature", "class_of", "describe_op", "differences", "op_family", "signature"]

ROOTED: Final = frozenset({"broadcast", "broadcastoop", "reduce", "reduceoop", "gather", "scatter"})
Signature = tuple[str, int | None, str]  # operation, number of elements, type; None and empty where nothing is said

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


def signature(op: FlightOp) -> Signature:
    """What has to be equal on all members, and nothing else."""
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


def differences(ops: Mapping[int, FlightOp]) -> list[Difference]:
    """How the members' calls of one collective differ: one per way of differing from what most called, else nothing.

    What a record does not say (no sizes in a log line) differs from nothing.
    """
    if len(ops) < 2:
        return []
    found = {rank: signature(op) for rank, op in ops.items()}
    if len(set(found.values())) == 1:
        return []
    sides: dict[Signature, list[int]] = {}
    for rank, value in found.items():
        side = next((known for known in sides if class_of(known, value) is None), value)
        sides.setdefault(side, []).append(rank)
    ordered = sorted(sides.items(), key=lambda s: (-len(s[1]), s[1]))
    if len(ordered) < 2:
        return []
    (usual, most), (second, few) = ordered[:2]
    if len(most) == len(few):
        tied = [(value, ranks) for value, ranks in ordered if len(ranks) == len(most)]
        odd = tuple(sorted(r for _, ranks in tied for r in ranks))
        told = tuple(_side(ranks, ops) for _, ranks in ordered)
        return [Difference(class_of(usual, second) or FaultClass.OP_MISMATCH, told, odd, True)]
    by_class: dict[FaultClass, list[list[int]]] = {}
    for value, ranks in ordered[1:]:
        cls = class_of(usual, value)
        assert cls is not None
        by_class.setdefault(cls, []).append(ranks)
    return [
        Difference(
            cls,
            (_side(most, ops), *(_side(ranks, ops) for ranks in others)),
            tuple(sorted(r for ranks in others for r in ranks)),
            False,
        )
        for cls, others in by_class.items()
    ]


def _side(ranks: Sequence[int], ops: Mapping[int, FlightOp]) -> tuple[tuple[int, ...], str]:
    return tuple(sorted(ranks)), describe_op(ops[min(ranks)])


def class_of(one: Signature, other: Signature) -> FaultClass | None:
    """What differs first; None: nothing does, as far as both say."""
    if one[0] != other[0]:
        return FaultClass.OP_MISMATCH
    if one[1] is not None and other[1] is not None and one[1] != other[1]:
        return FaultClass.SIZE_MISMATCH
    if one[2] and other[2] and one[2] != other[2]:
        return FaultClass.DTYPE_MISMATCH
    return None


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
