"""Single pieces of a tensor out of a checkpoint of ours, without reading all of it; and how checks call its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from steadyrun.checkpoint.commit import read_manifest
from steadyrun.checkpoint.manifest import Fragment, ShardRecord

__all__ = ["keys_of", "names_of", "saved_pieces"]

_FRAGMENT: Final = re.compile(r"__\d+\.shards\.json")


def names_of(key: str) -> Iterator[str]:
    """How the checks of ranks' bytes may call what a checkpoint calls *key*; the likeliest last."""
    yield key
    head, _, rest = key.partition(".")
    if head == "model" and rest:
        yield rest
    if rest.startswith("state."):
        yield f"{head}.{rest.removeprefix('state.')}"


def keys_of(name: str) -> Iterator[str]:
    """The reverse."""
    yield name
    yield f"model.{name}"
    head, _, rest = name.partition(".")
    if rest:
        yield f"{head}.state.{rest}"


def saved_pieces(folder: Path, name: str, size_bytes: int, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
    """Ranges (begin, length) of a tensor that the checkpoint holds in one shard of *size_bytes*; empty: it does not.

    Raises:
        SteadyrunError, OSError: the checkpoint cannot be read.
    """
    found = _shard(folder, frozenset(keys_of(name)), size_bytes)
    if found is None:
        return []
    file, shard = found
    out = []
    with (folder / file).open("rb") as f:
        for begin, length in pieces:
            f.seek(shard.payload_at_bytes + begin)
            out.append(f.read(max(min(length, shard.payload_bytes - begin), 0)))
    return out


def _shard(folder: Path, keys: frozenset[str], size_bytes: int) -> tuple[str, ShardRecord] | None:
    for record in read_manifest(folder).files:
        if _FRAGMENT.fullmatch(record.name) is None:
            continue
        fragment = Fragment.from_json((folder / record.name).read_bytes(), record.name)
        for shard in fragment.shards:
            if shard.key in keys and shard.payload_bytes == size_bytes and not any(shard.offsets):
                return record.name.replace(".shards.json", "_0.distcp"), shard
    return None
