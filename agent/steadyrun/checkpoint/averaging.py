"""Averages several checkpoints into one: a folder that any DCP tool reads, with our manifest.

Tensors are streamed: one of each checkpoint is in memory at a time. Sums are wider than what is added up: float32 for
formats of 8 and 16 bits, float64 for others. What cannot be averaged comes from the newest checkpoint: integers,
objects, and an optimizer's count of its steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from steadyrun.checkpoint import commit
from steadyrun.checkpoint.contents import DTYPE_BITS, Tensor
from steadyrun.checkpoint.dcpfile import metadata_bytes
from steadyrun.checkpoint.durable import sync_folder
from steadyrun.checkpoint.layout import Entry, Layout, ObjectEntry, place
from steadyrun.checkpoint.manifest import FolderName, Manifest
from steadyrun.checkpoint.planning import plan
from steadyrun.checkpoint.shardfile import write_rank_files
from steadyrun.checkpoint.sources import DcpSource, Source, name_below
from steadyrun.core.errors import ConfigError, SteadyrunError, nearest_name
from steadyrun.core.versions import installed_version

__all__ = ["AverageError", "Averaged", "Progress", "average"]

Progress = Callable[[int, int], None]
_NAMED: Final = 4  # names in a note before it counts the rest


class AverageError(SteadyrunError):
    """Nothing was written; the text says why and what to try."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """What was written.

    Attributes:
        newest: the checkpoint that everything else than the averages comes from.
        averaged: tensors that are averages; *taken* are from the newest.
        notes: what was taken from where, and values that are not finite.
    """

    path: Path
    step: int
    newest: Path
    averaged: int
    taken: tuple[str, ...]
    size_bytes: int
    notes: tuple[str, ...]


def average(
    out: Path,
    sources: Sequence[Source],
    key: str | None = None,
    step: int | None = None,
    progress: Progress | None = None,
) -> Averaged:
    """Write the average of *sources* to the new folder *out*; whole or not at all.

    Args:
        key: average only what is below this name (``model``); the rest comes from the newest. None: everything.
        step: of the result; default: the newest's.

    Raises:
        ConfigError: fewer than two checkpoints, tensors that do not match, or *out* exists.
        AverageError: it cannot be written.
        SteadyrunError: a tensor is damaged.
    """
    out = Path(os.path.abspath(out))
    _check(out, sources, key)
    newest = max(reversed(sources), key=lambda s: -1 if s.step is None else s.step)
    step = step if step is not None else newest.step or 0
    named = FolderName.parse(out.name)
    if named is not None and (named.step != step or named.is_partial):
        raise ConfigError(f"cannot average into {out}: its name says step {named.step}, the average is of step {step}")
    stream = _Stream(sources, newest, key, progress)
    layout = Layout(0, 1, tuple(_entries(newest)), tuple(ObjectEntry(k, newest.path_of(k)) for k in newest.objects))
    manifest = _manifest(newest, sources, step, key)
    _write(out, layout, manifest, stream, [newest.object_bytes(k) for k in newest.objects])
    notes = (*stream.notes(), *(f"{s.path}: {note}" for s in sources for note in s.notes))
    return Averaged(out, step, newest.path, stream.averaged, tuple(stream.taken), layout.state_bytes, notes)


# -- what is averaged with what --------------------------------------------------------------------------------------
def _check(out: Path, sources: Sequence[Source], key: str | None) -> None:
    if os.path.lexists(out):
        raise ConfigError(f"cannot average into {out}: it exists; give a new name")
    if len(sources) < 2:
        raise ConfigError("cannot average fewer than two checkpoints; give two or more")
    first = sources[0]
    for source in sources[1:]:
        _check_match(first, source, key)
    if key and not any(name_below(first, k, key) for k in first.tensors):
        tops = dict.fromkeys(str(first.path_of(k)[0]) for k in first.tensors)
        raise ConfigError(
            f"cannot average {key!r}: {first.path} has no tensor there{nearest_name(key, tops)} "
            f"(it has {', '.join(tops)})"
        )


def _check_match(first: Source, other: Source, key: str | None) -> None:
    def wanted(source: Source) -> dict[str, Tensor]:
        return {k: t for k, t in source.tensors.items() if name_below(source, k, key or "") is not None}

    mine, theirs = wanted(first), wanted(other)
    lost = [k for k in (*mine, *theirs) if k not in mine or k not in theirs]
    if lost:
        raise ConfigError(f"cannot average {first.path} and {other.path}: only one of them has {_some(lost)}")
    for name, tensor in mine.items():
        if tensor.shape != theirs[name].shape:
            raise ConfigError(
                f"cannot average {first.path} and {other.path}: {name} has shape {list(tensor.shape)} in the first "
                f"and {list(theirs[name].shape)} in the second"
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _entries(newest: Source) -> Iterator[Entry]:
    sizes = []
    for tensor in newest.tensors.values():
        if tensor.dtype not in DTYPE_BITS:
            raise ConfigError(
                f"cannot average {newest.path}: {tensor.key} has dtype {tensor.dtype}, which is not known"
            )
        sizes.append(math.prod(tensor.shape) * DTYPE_BITS[tensor.dtype] // 8)
    for tensor, at_bytes, size_bytes in zip(newest.tensors.values(), place(sizes), sizes, strict=True):
        zeros = (0,) * len(tensor.shape)
        path = newest.path_of(tensor.key)
        yield Entry(tensor.key, path, tensor.dtype, tensor.shape, zeros, tensor.shape, at_bytes, size_bytes)


class _Stream:
    """Makes the tensors of the result, one after the other, in the newest checkpoint's order."""

    def __init__(self, sources: Sequence[Source], newest: Source, key: str | None, progress: Progress | None) -> None:
        self.newest = newest
        self.averaged = 0
        self.taken: list[str] = []
        self._sources = sources
        self._progress = progress
        self._is_averaged = {k: self._can(t, key) for k, t in newest.tensors.items()}
        self._differing: list[str] = []
        self._nonfinite: list[str] = []
        self._mixed: list[str] = []

    def _can(self, tensor: Tensor, key: str | None) -> bool:
        path = self.newest.path_of(tensor.key)
        is_counter = path[-1] == "step" and math.prod(tensor.shape) == 1
        is_float = any(part in tensor.dtype for part in ("float", "complex"))
        return is_float and not is_counter and name_below(self.newest, tensor.key, key or "") is not None

    def payloads(self) -> Callable[[Entry], memoryview]:
        """What gives the bytes of the entries; to be asked for them in their order, once each."""
        made = self._made()

        def payload(entry: Entry) -> memoryview:
            key, view = next(made)
            assert key == entry.key
            return view

        return payload

    def _made(self) -> Iterator[tuple[str, memoryview]]:
        others = [s for s in self._sources if s is not self.newest]
        common = [{k: None for k in self.newest.tensors if k in s.tensors} for s in others]
        readers = [s.read(list(keys)) for s, keys in zip(others, common, strict=True)]
        total_bytes = sum(t.size_bytes or 0 for t in self.newest.tensors.values())
        done_bytes = 0
        for key, tensor in zip(self.newest.tensors, self.newest.read(list(self.newest.tensors)), strict=True):
            rest = (next(r) for r, keys in zip(readers, common, strict=True) if key in keys)
            if self._is_averaged[key]:
                result = self._average(key, tensor, rest)
                self.averaged += 1
            else:
                result = tensor
                self.taken.append(key)
                # all of them are read also where one has shown a difference: the readers have to stay in step
                equal = [_is_equal(tensor, other) for other in rest]
                if not all(equal):
                    self._differing.append(key)
            yield key, _pages_of(result)
            done_bytes += result.nbytes
            if self._progress is not None:
                self._progress(done_bytes, total_bytes)

    def _average(self, key: str, newest: torch.Tensor, rest: Iterator[torch.Tensor]) -> torch.Tensor:
        total = newest.to(_wide(newest.dtype))
        if total is newest:
            total = newest.clone()
        count = 1
        for other in rest:
            if other.dtype != newest.dtype and key not in self._mixed:
                self._mixed.append(key)
            total += other.to(total.dtype)
            count += 1
        total /= count
        if not total.isfinite().all():
            self._nonfinite.append(key)
        return total.to(newest.dtype)

    def notes(self) -> Iterator[str]:
        if self.taken:
            differ = f", where they differ: {_some(self._differing)}" if self._differing else " (the same in all)"
            yield f"{len(self.taken)} tensors are no averages but those of {self.newest.path.name}{differ}"
        if self.newest.objects:
            yield f"{len(self.newest.objects)} objects are those of {self.newest.path.name}"
        if self._mixed:
            yield f"dtypes are not the same in all checkpoints, that of the newest is kept: {_some(self._mixed)}"
        if self._nonfinite:
            yield f"NaN or infinite values are in the average of {_some(self._nonfinite)}"


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What to add up in."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.itemsize >= 4 else torch.float32


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _pages_of(tensor: torch.Tensor) -> memoryview:
    """The bytes in pages of their own: they live as long as somebody writes them, and direct I/O can take them."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    pages = mmap.mmap(-1, tensor.nbytes)
    torch.frombuffer(pages, dtype=torch.uint8).copy_(tensor.reshape(-1).view(torch.uint8))
    return memoryview(pages)


# -- writing ---------------------------------------------------------------------------------------------------------
def _manifest(newest: Source, sources: Sequence[Source], step: int, key: str | None) -> Manifest:
    own = newest.manifest if isinstance(newest, DcpSource) else None
    details: dict[str, Any] = dict(own.details) if own is not None else {}
    details["averaged"] = {
        "of": [{"path": str(s.path), "step": s.step} for s in sources],
        "key": key or "",
        "newest": str(newest.path),
    }
    return Manifest(
        step=step,
        attempt=0 if own is None else own.attempt,
        run_id="" if own is None else own.run_id,
        world_size=1 if own is None else own.world_size,
        created_unix_s=time.time(),
        torch=torch.__version__,
        steadyrun=installed_version("steadyrun"),
        files=(),
        covered=() if own is None else own.covered,
        not_covered=() if own is None else own.not_covered,
        mesh=None if own is None else own.mesh,
        samples=None if own is None else own.samples,
        skipped=() if own is None else own.skipped,
        details=details,
    )


def _write(out: Path, layout: Layout, manifest: Manifest, stream: _Stream, blobs: Sequence[bytes]) -> None:
    # A commit gives folders names of its own: made in a root of its own beside *out*, then renamed to it.
    root = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        planned = plan([layout])
        partial = commit.begin(root, manifest.step, manifest.attempt)
        written = write_rank_files(partial, layout, planned.parts[0], stream.payloads(), blobs)
        metadata = metadata_bytes(planned, [layout], [written])
        folder = commit.commit(root, partial, dataclasses.replace(manifest, files=written.files), metadata)
        os.rename(folder, out)
        sync_folder(out.parent)
    except OSError as e:
        raise AverageError(f"cannot write the average to {out}: {e.strerror or e}; nothing was left there") from e
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(root)
