"""A dump's fields as they should be, whatever version, recorder or tool wrote them.

Formats 2.0 to 2.10, pickles and JSON: numbers come as text, times as 0, None or not at all, tuples as lists, a group's
ranks as a list or its text, and a hostile file may hold anything. Nothing here raises for what a dump contains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "ConfiguredGroup",
    "OpName",
    "configured_groups",
    "dtypes_of",
    "integer",
    "normal_entry",
    "parse_op_name",
    "ranks_in_order",
    "sizes_of",
    "status_of",
    "text",
]

MAX_TENSORS: Final = 64
MAX_DIMENSIONS: Final = 16
MAX_TEXT: Final = 512
MAX_GROUPS: Final = 8192
MAX_RANKS: Final = 1 << 20  # of all groups of a dump together
_INT_LIMIT: Final = 1 << 63
_SEQ_LIMIT: Final = 1 << 53

_NUMBER: Final = re.compile(r"\s*[+-]?\d{1,19}\s*")
_P2P: Final = re.compile(r"(\d+|\?)\s*(->|<-)\s*(\d+|\?)")


def integer(value: Any) -> int | None:
    """A number of at most 63 bits, also from text or a whole float; None for anything else."""
    if value.__class__ is int:
        number: int = value
    elif isinstance(value, str):
        if not _NUMBER.fullmatch(value):
            return None
        number = int(value)
    elif isinstance(value, float) and math.isfinite(value) and value.is_integer():
        number = int(value)
    else:
        return None
    return number if -_INT_LIMIT <= number < _INT_LIMIT else None


def text(value: Any, limit: int = MAX_TEXT) -> str:
    """Text of bounded length; of anything but text and numbers nothing."""
    if isinstance(value, str):
        return value if len(value) <= limit else value[:limit]
    return str(value) if isinstance(value, int | float) and integer(value) is not None else ""


# -- operations --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class OpName:
    """``nccl:recv 1<-0`` taken apart.

    Attributes:
        backend: ``nccl``, ``gloo``, ``nccl2``; empty when the name has none.
        name: ``recv``.
        src, dst: ranks *within the group*; None for collectives and where torch wrote ``?``.
    """

    backend: str
    name: str
    src: int | None = None
    dst: int | None = None
    is_p2p: bool = False


def parse_op_name(profiling_name: str) -> OpName:
    """See ``OpName``."""
    backend, colon, rest = text(profiling_name).partition(":")
    if not colon:
        backend, rest = "", backend
    name, _, direction = rest.strip().partition(" ")
    is_p2p = name in ("send", "recv", "isend", "irecv")
    match = _P2P.match(direction.strip()) if is_p2p else None
    if match is None:
        return OpName(backend.strip(), name or "unknown", is_p2p=is_p2p)
    left, right = (None if n == "?" or len(n) > 9 else int(n) for n in (match[1], match[3]))
    src, dst = (left, right) if match[2] == "->" else (right, left)
    return OpName(backend.strip(), name, src, dst, is_p2p)


def normal_entry(entry: Any, index: int) -> dict[str, Any] | None:
    """The entry with the types and names of format 2.10; None when it cannot be told what operation it is.

    Args:
        entry: of any version.
        index: its place in the dump, for where no ``record_id`` is.
    """
    if not isinstance(entry, Mapping):
        return None
    name = text(entry.get("profiling_name"))
    if not name:
        return None
    pg_id = integer(entry.get("pg_id"))
    group = entry.get("process_group")
    if isinstance(group, list | tuple) and group:
        key = (text(group[0]), text(group[1]) if len(group) > 1 else "")
    elif isinstance(group, str | int) and not isinstance(group, bool):
        key = (text(group), "")
    elif pg_id is not None:
        key = (str(pg_id), "")
    else:
        return None
    is_p2p = entry.get("is_p2p")
    if not isinstance(is_p2p, bool):
        is_p2p = parse_op_name(name).is_p2p
    old_seq = entry.get("seq_id")  # formats before 2.3 count everything in one number
    seq = integer(entry.get("collective_seq_id", old_seq))
    p2p_seq = integer(entry.get("p2p_seq_id", old_seq if is_p2p else 0))
    if (p2p_seq if is_p2p else seq) is None:
        return None
    number = seq if seq is not None and 0 <= seq < _SEQ_LIMIT else None
    if number is None and not is_p2p:
        return None
    record_id = integer(entry.get("record_id", entry.get("id")))
    created = integer(entry.get("time_created_ns"))
    return {
        "record_id": index if record_id is None else record_id,
        "pg_id": -1 if pg_id is None else pg_id,
        "process_group": key,
        "collective_seq_id": number or 0,
        "p2p_seq_id": p2p_seq or 0,
        "profiling_name": name,
        "input_sizes": entry.get("input_sizes"),
        "output_sizes": entry.get("output_sizes"),
        "input_dtypes": entry.get("input_dtypes"),
        "output_dtypes": entry.get("output_dtypes"),
        "state": text(entry.get("state")).lower() or "scheduled",
        "time_created_ns": created if created is not None and created > 0 else 0,
        "time_discovered_started_ns": _time(entry.get("time_discovered_started_ns")),
        "time_discovered_completed_ns": _time(entry.get("time_discovered_completed_ns")),
        "retired": entry.get("retired") is True or str(entry.get("retired")).lower() in ("true", "1"),
        "timeout_ms": integer(entry.get("timeout_ms")),
        "is_p2p": is_p2p,
        "frames": entry.get("frames"),
        "thread_id": text(entry.get("thread_id")),
        "thread_name": text(entry.get("thread_name")),
    }


def _time(value: Any) -> int | None:
    number = integer(value)
    return number if number is not None and number > 0 else None


def sizes_of(value: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of tensors, at most MAX_TENSORS of them."""
    if not isinstance(value, list | tuple):
        return ()
    if value and not isinstance(value[0], list | tuple):
        value = [value]  # one shape instead of a list of them
    return tuple(
        tuple(n for n in map(integer, shape[:MAX_DIMENSIONS]) if n is not None)
        for shape in value[:MAX_TENSORS]
        if isinstance(shape, list | tuple)
    )


def dtypes_of(value: Any) -> tuple[str, ...]:
    """Names of types, at most MAX_TENSORS of them."""
    if isinstance(value, str):
        return (text(value, 64),)
    if not isinstance(value, list | tuple):
        return ()
    return tuple(text(name, 64) for name in value[:MAX_TENSORS])


# -- groups ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ConfiguredGroup:
    """A group as ``pg_config`` has it; *ranks* in the order of their ranks within the group."""

    name: str
    desc: str
    ranks: tuple[int, ...]


def ranks_in_order(value: Any) -> tuple[int, ...]:
    """``"[0, 1]"``, ``[0, 1]`` or ``["0", "1"]``; empty when any of it is no rank."""
    if isinstance(value, str):
        inner = value.strip().strip("[]()")
        value = inner.split(",") if inner.strip() else []
    if not isinstance(value, list | tuple) or len(value) > MAX_RANKS:
        return ()
    ranks = [integer(item) for item in value]
    good = tuple(rank for rank in ranks if rank is not None and 0 <= rank < MAX_RANKS)
    return good if len(good) == len(ranks) and len(set(good)) == len(good) else ()


def configured_groups(dump: Mapping[str, Any], cache: dict[str, tuple[int, ...]]) -> Iterator[ConfiguredGroup]:
    """The groups of ``pg_config``; *cache* keeps ranks by their text, which thousands of ranks share.

    gloo's recorder registers every group under an empty name, with no ranks: left out.
    """
    config = dump.get("pg_config")
    if not isinstance(config, Mapping):
        return
    room = MAX_RANKS
    for count, (key, value) in enumerate(config.items()):
        if count >= MAX_GROUPS:
            return
        if not isinstance(value, Mapping):
            continue
        name = text(value.get("name")) or text(key)
        if not name:
            continue
        raw = value.get("ranks")
        ranks = cache.get(raw) if isinstance(raw, str) else None
        if ranks is None:
            ranks = ranks_in_order(raw)
            if isinstance(raw, str) and len(cache) < MAX_GROUPS:
                cache[raw] = ranks
        room -= len(ranks)
        yield ConfiguredGroup(name, text(value.get("desc")), ranks if room >= 0 else ())


def ranks_of_only_group(dump: Mapping[str, Any]) -> tuple[int, ...]:
    """All ranks of the job, from a dump of gloo's recorder where there is no group but the default one; else empty.

    gloo registers its groups under one empty name. Those made later come without ranks, and the last one stays.
    """
    config = dump.get("pg_config")
    value = config.get("") if isinstance(config, Mapping) and len(config) == 1 else None
    ranks = ranks_in_order(value.get("ranks")) if isinstance(value, Mapping) else ()
    return ranks if ranks == tuple(range(len(ranks))) else ()


def status_of(dump: Mapping[str, Any]) -> Iterator[tuple[int, int, int, int]]:
    """(pg_id, enqueued, started, completed) of ``pg_status``; -1 where a number is missing."""
    status = dump.get("pg_status")
    if not isinstance(status, Mapping):
        return
    for count, (key, value) in enumerate(status.items()):
        pg_id = integer(key)
        if count >= MAX_GROUPS:
            return
        if pg_id is None or not isinstance(value, Mapping):
            continue
        numbers = (integer(value.get(f"last_{what}_collective")) for what in ("enqueued", "started", "completed"))
        enqueued, started, completed = (-1 if n is None else n for n in numbers)
        yield pg_id, enqueued, started, completed
