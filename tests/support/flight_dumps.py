"""Dumps for tests: entries as torch records them, and torch's own way of pickling them."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

EPOCH_NS = 1_795_000_000_000_000_000

TORCH = "/opt/env/lib/python3.11/site-packages/torch/distributed"


def frames(*places: tuple[str, int, str]) -> list[dict[str, Any]]:
    """A stack as recorded: c10d and its logger, then the given (file, line, function)."""
    return [
        {"name": "all_reduce", "filename": f"{TORCH}/distributed_c10d.py", "line": 3245},
        {"name": "wrapper", "filename": f"{TORCH}/c10d_logger.py", "line": 83},
        *({"name": name, "filename": file, "line": line} for file, line, name in places),
    ]


def entry(seq: int, record_id: int | None = None, name: str = "nccl:all_reduce", **changes: Any) -> dict[str, Any]:
    """A completed all_reduce of the default group, with fields replaced."""
    number = seq - 1 if record_id is None else record_id
    created = EPOCH_NS + number * 1_000_000
    out: dict[str, Any] = {
        "frames": frames(("/home/user/train.py", 88, "step"), ("/home/user/train.py", 120, "<module>")),
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": name,
        "time_created_ns": created,
        "input_sizes": [[8, 4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[8, 4]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": created + 500_000,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
        "thread_id": "140432478735232",
        "thread_name": "python",
    }
    out.update(changes)
    return out


def pending(seq: int, record_id: int | None = None, name: str = "nccl:all_reduce", **changes: Any) -> dict[str, Any]:
    """An entry that has only been issued."""
    still = {"state": "scheduled", "time_discovered_completed_ns": None, "retired": False}
    return entry(seq, record_id, name, **{**still, **changes})


def dump(entries: Sequence[dict[str, Any]], ranks: Sequence[int] = (0, 1), **changes: Any) -> dict[str, Any]:
    """A dump of format 2.10 with one group."""
    newest = max((e["collective_seq_id"] for e in entries), default=0)
    out: dict[str, Any] = {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(ranks))}},
        "comm_lib_version": "2.27.3",
        "pg_status": {
            "0": {
                "last_enqueued_collective": newest,
                "last_started_collective": -1,
                "last_completed_collective": newest,
            }
        },
        "entries": list(entries),
    }
    out.update(changes)
    return out


class TorchPickler:
    """Writes as c10's pickler does: protocol 2, texts in the memo, one MARK for each container, frames put once."""

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x02")
        self._memo: dict[Any, int] = {}

    def dumps(self, value: Any) -> bytes:
        self._value(value)
        self._put(object())
        return bytes(self._out) + b"."

    def _put(self, key: Any) -> None:
        index = self._memo[key] = len(self._memo)
        self._out += b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)

    def _get(self, key: Any) -> bool:
        index = self._memo.get(key)
        if index is None:
            return False
        self._out += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)
        return True

    def _value(self, value: Any) -> None:
        out = self._out
        if isinstance(value, str):
            if not self._get(value):
                data = value.encode()
                out += b"X" + struct.pack("<I", len(data)) + data
                self._put(value)
        elif value is None or isinstance(value, bool):
            out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif isinstance(value, int):
            if 0 <= value < 256:
                out += b"K" + bytes([value])
            elif 0 <= value < 65536:
                out += b"M" + struct.pack("<H", value)
            elif -(1 << 31) <= value < 1 << 31:
                out += b"J" + struct.pack("<i", value)
            else:
                out += b"\x8a\x08" + struct.pack("<q", value)
        elif isinstance(value, float):
            out += b"G" + struct.pack(">d", value)
        elif isinstance(value, tuple):
            for item in value:
                self._value(item)
            out += {1: b"\x85", 2: b"\x86", 3: b"\x87"}[len(value)]
        elif isinstance(value, list):
            out += b"]("
            for item in value:
                self._value(item)
            out += b"e"
        elif "filename" in value:
            key = (value["filename"], value["line"], value["name"])
            if not self._get(key):
                self._mapping(value)
                self._put(key)
        else:
            self._mapping(value)

    def _mapping(self, value: dict[str, Any]) -> None:
        self._out += b"}("
        for key, item in value.items():
            self._value(key)
            self._value(item)
        self._out += b"u"


def torch_pickle(value: dict[str, Any]) -> bytes:
    """The bytes that torch would have written."""
    return TorchPickler().dumps(value)


OPCODES = b"(}]use.XKMJNqrhj\x80\x86\x88\x89\x8a\x85\x87tcRbi\x81\x93PQ\x95\x94\x8c\x8d)G0124"


def mutated(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Some bytes flipped, replaced, inserted, removed, repeated, cut, or the end of another file put on."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        size = len(out)
        if size < 4:
            break
        at = rng.randrange(size)
        match rng.randrange(8):
            case 0:
                out[at] = rng.randrange(256)
            case 1:
                out[at] = rng.choice(OPCODES)
            case 2:
                del out[at : at + rng.randrange(1, 16)]
            case 3:
                out[at:at] = rng.randbytes(rng.randrange(1, 8))
            case 4:
                del out[at:]
            case 5:
                source = rng.randrange(size)
                out[at:at] = out[source : source + rng.randrange(1, 200)]
            case 6:
                out[at:at] = bytes([rng.choice(OPCODES)])
            case _:
                other = rng.choice(others)
                out[at:] = other[rng.randrange(len(other)) :]
    return bytes(out)
