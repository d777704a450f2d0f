"""Writes the tensors of a checkpoint as safetensors (sharded, with Hugging Face's index) or with torch.save.

safetensors are written tensor by tensor: no more than one tensor and its converted copy are in memory.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from steadyrun.checkpoint.contents import DTYPE_BITS
from steadyrun.checkpoint.durable import sync_folder
from steadyrun.checkpoint.safetensors import Described, Header, make_header
from steadyrun.checkpoint.sources import Source, name_below, torch_dtype
from steadyrun.core.errors import ConfigError, SteadyrunError, nearest_name

__all__ = ["DTYPE_NAMES", "ExportError", "Exported", "Format", "Item", "Progress", "choose", "export", "parse_dtype"]

Progress = Callable[[int, int], None]
DEFAULT_SHARD_BYTES: Final = 5 * 10**9  # what Hugging Face's save_pretrained takes
_WRITE_BYTES: Final = 8 << 20
_KEEP_FREE_RATIO: Final = 1.02
DTYPE_NAMES: Final[Mapping[str, str]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    **{name: name for name in ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")},
}


class Format(enum.Enum):
    """What to write."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"


class ExportError(SteadyrunError):
    """Nothing was exported; the text says why and what to try."""


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to export: *key* in the checkpoint, *name* in the export, and the dtype it has there."""

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        files: with their sizes, as they are named in *path* (or the file itself).
        notes: values that did not survive the conversion, and what was left out.
    """

    path: Path
    files: tuple[tuple[str, int], ...]
    tensors: int
    size_bytes: int
    notes: tuple[str, ...]


def parse_dtype(text: str) -> str:
    """torch's name of a floating dtype: ``bf16``, ``fp32``, ``float8_e4m3fn``.

    Raises:
        ValueError: it is none of them; the text names the nearest.
    """
    name = DTYPE_NAMES.get(text.removeprefix("torch.").lower())
    if name is None:
        known = ", ".join(DTYPE_NAMES)
        raise ValueError(f"{text!r} is no dtype to convert to{nearest_name(text, DTYPE_NAMES)} (known: {known})")
    return name


def choose(source: Source, key: str | None, dtype: str | None) -> tuple[Item, ...]:
    """The tensors to export and their names, in the checkpoint's order.

    Args:
        key: the part of the state dict to export, whose name is left out of the tensors' names; None: ``model`` where
            the checkpoint has that, else everything under its full name; an empty text: everything.
        dtype: torch's name of what floating tensors become; None: as they are. Others are never converted.

    Raises:
        ConfigError: there is nothing at *key*, or two tensors would have the same name.
    """
    tops = {str(source.path_of(k)[0]): None for k in source.tensors}
    if key is None:
        key = "model" if "model" in tops else ""
    items: dict[str, Item] = {}
    for tensor in source.tensors.values():
        name = name_below(source, tensor.key, key)
        if name is None:
            continue
        if name in items:
            raise ConfigError(
                f"cannot export {key or 'everything'} of {source.path}: {items[name].key} and {tensor.key} "
                f"would both be called {name!r}"
            )
        becomes = dtype if dtype is not None and _is_float(tensor.dtype) else tensor.dtype
        if becomes not in DTYPE_BITS:
            raise ConfigError(f"cannot export {tensor.key}: dtype {becomes} is not known here")
        items[name] = Item(tensor.key, name, becomes, tensor.shape)
    if not items:
        known = nearest_name(key, tops) + (f" (it has {', '.join(tops)})" if tops else " (it holds no tensor)")
        raise ConfigError(f"cannot export {key or 'anything'!r} of {source.path}: no tensor is there{known}")
    return tuple(items.values())


def _is_float(dtype: str) -> bool:
    value = getattr(torch, dtype, None)
    return isinstance(value, torch.dtype) and value.is_floating_point


def export(
    source: Source,
    items: Sequence[Item],
    out: Path,
    form: Format,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> Exported:
    """Write *items* to *out*: a new folder for safetensors, a new file for torch.save; whole or not at all.

    Raises:
        ConfigError: *out* exists, or the format cannot hold a dtype.
        ExportError: it cannot be written.
        SteadyrunError: a tensor of the checkpoint is damaged.
    """
    out = Path(os.path.abspath(out))
    if os.path.lexists(out):
        raise ConfigError(f"cannot export to {out}: it exists; give a new name")
    conversion = _Conversion(source, items, progress)
    total_bytes = sum(item.size_bytes for item in items)
    if form is Format.TORCH:
        with _new(out, total_bytes) as temporary:
            state = dict(conversion.read(items))
            with temporary.open("wb") as f:
                torch.save(state, f)
                f.flush()
                os.fsync(f.fileno())
            files = [(out.name, temporary.stat().st_size)]
    else:
        shards = _shards(items, shard_bytes)
        with _new(out, total_bytes) as temporary:
            temporary.mkdir()
            files = _write_shards(temporary, shards, conversion)
    return Exported(out, tuple(files), len(items), total_bytes, tuple(conversion.notes(len(source.objects))))


class _Conversion:
    """Reads tensors, converts them, counts what does not survive it, and reports how far it has come."""

    def __init__(self, source: Source, items: Sequence[Item], progress: Progress | None) -> None:
        self._source = source
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = sum(item.size_bytes for item in items)
        self._overflown: dict[str, int] = {}

    def read(self, items: Sequence[Item]) -> Iterator[tuple[str, torch.Tensor]]:
        for item, tensor in zip(items, self._source.read([item.key for item in items]), strict=True):
            yield item.name, self._converted(item, tensor)

    def _converted(self, item: Item, tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch_dtype(item.dtype, f"{item.key} of {self._source.path}")
        if tensor.dtype != dtype:
            converted = tensor.to(dtype)
            lost = int(_isfinite(tensor).sum()) - int(_isfinite(converted).sum())
            if lost:
                self._overflown[item.name] = lost
            tensor = converted
        self._done_bytes += item.size_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
        return tensor.contiguous()

    def notes(self, objects: int) -> Iterator[str]:
        for name, lost in self._overflown.items():
            yield f"{lost:,} elements of {name} are too large for the new dtype and became infinite or NaN"
        if objects:
            yield f"{objects} objects of the checkpoint that are no tensors were left out"
        yield from self._source.notes


def _isfinite(tensor: torch.Tensor) -> torch.Tensor:
    # torch has no isfinite for all 8 bit formats; every one of them fits into float32.
    return (tensor.to(torch.float32) if tensor.element_size() == 1 else tensor).isfinite()


# -- safetensors -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Shard:
    items: tuple[Item, ...]
    header: Header


def _shards(items: Sequence[Item], shard_bytes: int) -> list[_Shard]:
    """In the checkpoint's order, each shard filled until the next tensor does not fit; one tensor is never cut."""
    groups: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        if groups[-1] and filled + item.size_bytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.size_bytes
    try:
        return [
            _Shard(tuple(g), make_header([Described(i.name, i.dtype, i.shape) for i in g], {"format": "pt"}))
            for g in groups
        ]
    except ValueError as e:
        raise ConfigError(f"{e}; convert it (--dtype) or write another format (--format torch)") from None


def _write_shards(folder: Path, shards: Sequence[_Shard], conversion: _Conversion) -> list[tuple[str, int]]:
    many = len(shards) > 1
    names = [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" if many else "model.safetensors"
        for i in range(1, len(shards) + 1)
    ]
    files = []
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard, conversion)
        files.append((name, shard.header.file_bytes))
    if many:
        index = {
            "metadata": {"total_size": sum(item.size_bytes for shard in shards for item in shard.items)},
            "weight_map": {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard.items},
        }
        data = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
        name = "model.safetensors.index.json"
        with (folder / name).open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        files.append((name, len(data)))
    sync_folder(folder)
    return files


def _write_shard(path: Path, shard: _Shard, conversion: _Conversion) -> None:
    by_name = {item.name: item for item in shard.items}
    with path.open("wb") as f:
        _reserve(f.fileno(), shard.header.file_bytes)
        f.write(shard.header.data)
        for name, tensor in conversion.read([by_name[name] for name in shard.header.places]):
            at, size_bytes = shard.header.places[name]
            assert f.tell() == at
            if not size_bytes:
                continue
            assert tensor.nbytes == size_bytes
            # not Tensor.numpy(): torch works without NumPy, which knows neither bfloat16 nor the 8 bit formats anyway
            raw = memoryview((ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())).cast("B")
            for start in range(0, size_bytes, _WRITE_BYTES):
                f.write(raw[start : start + _WRITE_BYTES])
        f.flush()
        os.fsync(f.fileno())


def _reserve(fd: int, size_bytes: int) -> None:
    """A full disk shows here, before hours of work; where space cannot be reserved, it shows later."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise


# -- a new file or folder, whole or not at all -----------------------------------------------------------------------
@contextmanager
def _new(out: Path, needed_bytes: int) -> Iterator[Path]:
    """A temporary name beside *out*, which it is renamed to at the end; removed when anything goes wrong."""
    temporary = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        free_bytes = shutil.disk_usage(out.parent).free
        if needed_bytes * _KEEP_FREE_RATIO > free_bytes:
            raise ExportError(
                f"cannot export to {out}: {needed_bytes:,} bytes are needed and {free_bytes:,} are free there; "
                "make room, choose another disk, or a smaller --dtype"
            )
        yield temporary
        os.rename(temporary, out)
        sync_folder(out.parent)
    except OSError as e:
        raise ExportError(f"cannot export to {out}: {e.strerror or e}; nothing was left there") from e
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
