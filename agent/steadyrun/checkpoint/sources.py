"""A checkpoint as a table from names to tensors, whoever wrote it; one tensor is read at a time.

What ``steadyctl ckpt diff``, ``average`` and ``export`` read from: DCP folders (also Megatron's), folders and files of
safetensors, and files of ``torch.save``, whose tensors are mapped rather than read.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from steadyrun.checkpoint.commit import open_manifest
from steadyrun.checkpoint.contents import Contents, Kind, Place, Tensor, UnusableCheckpointError
from steadyrun.checkpoint.dcp import DamagedMetadataError, DcpMetadata, read_metadata
from steadyrun.checkpoint.kinds import Found, find_checkpoints, read_contents, step_of
from steadyrun.checkpoint.layout import PathItem
from steadyrun.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, Manifest
from steadyrun.checkpoint.reading import iter_tensors
from steadyrun.core.errors import SteadyrunError

__all__ = ["Source", "UnreadableTensorError", "name_below", "open_source", "torch_dtype"]


class UnreadableTensorError(SteadyrunError):
    """A tensor cannot be read; the text says which, and why."""


class Source(Protocol):
    """An opened checkpoint.

    Attributes:
        tensors: by name, in the order in which the checkpoint lists them.
        objects: names of what is no tensor.
        step: that it was saved at, as far as known.
        notes: what is worth knowing about the way it is read.
    """

    path: Path
    kind: Kind
    tensors: Mapping[str, Tensor]
    objects: tuple[str, ...]
    step: int | None
    notes: tuple[str, ...]

    def path_of(self, key: str) -> tuple[PathItem, ...]:
        """The way to *key* in the nested state dict; ``(key,)`` where nobody has noted it."""
        ...

    def read(self, keys: Sequence[str]) -> Iterator[torch.Tensor]:
        """Whole tensors, on the CPU, contiguous, one after the other; only one is held here.

        Raises:
            SteadyrunError: one is damaged or cannot be read.
        """
        ...

    def object_bytes(self, key: str) -> bytes:
        """The object as ``torch.save`` wrote it, or writes it."""
        ...


def open_source(path: Path) -> Source:
    """The one checkpoint at *path*.

    Raises:
        UnusableCheckpointError: none, several, or one of a kind whose tensors are not read here; the text says so.
        SteadyrunError: its list of contents is damaged.
    """
    found = _the_one(path)
    match found.kind:
        case Kind.DCP | Kind.MEGATRON_DCP:
            return DcpSource(found)
        case Kind.HF_SHARDED | Kind.SAFETENSORS | Kind.FILES:
            return SafetensorsSource(found)
        case Kind.TORCH_SAVE:
            return TorchFileSource(found)
        case Kind.DEEPSPEED | Kind.MEGATRON:
            raise UnusableCheckpointError(
                f"cannot read the tensors of {path}: {found.kind.value} keeps them in pieces whose meaning only it "
                "knows; convert it first (DeepSpeed: its zero_to_fp32.py, Megatron: --ckpt-format torch_dist)"
            )


def _the_one(path: Path) -> Found:
    found = find_checkpoints(path).checkpoints
    if len(found) != 1:
        # A folder of files is one checkpoint, also where other checkpoints lie below it.
        at_path = [f for f in found if f.path == path]
        if len(at_path) == 1:
            return at_path[0]
        names = ", ".join(f.path.name for f in found[-3:])
        raise UnusableCheckpointError(
            f"cannot tell which checkpoint is meant: {path} holds {len(found)} (the last of them: {names}); give one"
        )
    return found[0]


class DcpSource:
    """A folder of torch.distributed.checkpoint; bytes are verified while they are read."""

    def __init__(self, found: Found) -> None:
        self.path = found.path
        self.kind = found.kind
        self.manifest: Manifest | None = None
        if any(f.name == MANIFEST_NAME for f in found.files):
            self.manifest = open_manifest((found.path / MANIFEST_NAME).read_bytes(), str(found.path / MANIFEST_NAME))
        if not any(f.name == METADATA_NAME for f in found.files):
            raise UnusableCheckpointError(
                f"cannot read {found.path}: it has no {METADATA_NAME}, which a save writes last; "
                "take another checkpoint (steadyctl ckpt ls shows which are complete)"
            )
        self.metadata: DcpMetadata = read_metadata(found.path / METADATA_NAME)
        self.tensors: Mapping[str, Tensor] = {t.key: t for t in self.metadata.tensors}
        self.objects = self.metadata.objects
        self.step = self.manifest.step if self.manifest is not None else step_of(found.path)
        self.notes: tuple[str, ...] = ()

    def path_of(self, key: str) -> tuple[PathItem, ...]:
        return self.metadata.paths.get(key, (key,))

    def read(self, keys: Sequence[str]) -> Iterator[torch.Tensor]:
        for _, tensor in iter_tensors(self.path, keys):
            yield tensor.detach().contiguous()

    def object_bytes(self, key: str) -> bytes:
        stored = self.metadata.stored.get((key, None))
        if stored is None:  # torch gives an object an index of its own now and then
            stored = next((s for (k, _), s in self.metadata.stored.items() if k == key), None)
        if stored is None or stored.transforms:
            why = "stored through a transform" if stored is not None else "no bytes are stored for it"
            raise DamagedMetadataError(f"cannot read object {key!r} of {self.path}: {why}")
        return bytes(_read(self.path / stored.place.file, stored.place, key))


class SafetensorsSource:
    """One safetensors file, or a folder of them with or without an index."""

    def __init__(self, found: Found) -> None:
        contents = read_contents(found)
        self.path = found.path
        self.kind = found.kind
        self.tensors = _safetensors_of(contents)
        self.objects: tuple[str, ...] = ()
        self.step = step_of(found.path)
        self.notes: tuple[str, ...] = ("safetensors files store no checksums: what is read cannot be verified",)
        self._base = found.path if found.path.is_dir() else found.path.parent

    def path_of(self, key: str) -> tuple[PathItem, ...]:
        return (key,)

    def read(self, keys: Sequence[str]) -> Iterator[torch.Tensor]:
        return map(self._read, keys)

    def _read(self, key: str) -> torch.Tensor:
        tensor = self.tensors[key]
        dtype = torch_dtype(tensor.dtype, f"{key} of {self.path}")
        place = tensor.shards[0].place
        assert place is not None  # a header gives each tensor one
        if place.length_bytes == 0:
            return torch.empty(tensor.shape, dtype=dtype)
        data = _read(self._base / place.file, place, key)
        return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)

    def object_bytes(self, key: str) -> bytes:
        raise KeyError(key)


def _safetensors_of(contents: Contents) -> Mapping[str, Tensor]:
    if contents.problems:
        first = contents.problems[0]
        raise UnusableCheckpointError(f"cannot read {contents.path}: {first.file}: {first.text}")
    if not contents.tensors:
        raise UnusableCheckpointError(
            f"cannot read the tensors of {contents.path}: no safetensors file is in it; "
            "give one file of torch.save at a time"
        )
    tensors: dict[str, Tensor] = {}
    for tensor in contents.tensors:
        if tensor.key in tensors:
            raise UnusableCheckpointError(
                f"cannot read {contents.path}: {tensor.key!r} is in more than one of its files; give one of the files"
            )
        tensors[tensor.key] = tensor
    return tensors


class TorchFileSource:
    """One file of torch.save: nested dicts and lists of tensors, with the way to each as its name."""

    def __init__(self, found: Found) -> None:
        self.path = found.path
        self.kind = found.kind
        try:
            value = torch.load(found.path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as e:  # torch raises what it likes: RuntimeError, UnpicklingError, EOFError
            first = str(e).split("\n", 1)[0]
            raise UnusableCheckpointError(
                f"cannot read {found.path} as data only (torch.load with weights_only=True, mmap=True): "
                f"{type(e).__name__}: {first}"
            ) from e
        self._values: dict[str, torch.Tensor] = {}
        self._paths: dict[str, tuple[PathItem, ...]] = {}
        self._objects: dict[str, Any] = {}
        self._walk(value, ())
        self.objects = tuple(self._objects)
        self.tensors: Mapping[str, Tensor] = {
            k: Tensor(k, str(t.dtype).removeprefix("torch."), tuple(t.shape), ()) for k, t in self._values.items()
        }
        self.step = step_of(found.path)
        self.notes: tuple[str, ...] = ("a mapped file of torch.save is not verified while it is read",)

    def _walk(self, value: Any, path: tuple[PathItem, ...]) -> None:
        key = ".".join(map(str, path)) or "value"
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
            values = value.detach().resolve_conj().resolve_neg()
            self._values[key], self._paths[key] = values, path or (key,)
        elif isinstance(value, Mapping) and value:
            for k, below in value.items():
                self._walk(below, (*path, k if isinstance(k, int) else str(k)))
        elif isinstance(value, (list, tuple)) and any(isinstance(v, (torch.Tensor, Mapping)) for v in value):
            for i, below in enumerate(value):
                self._walk(below, (*path, i))
        else:
            self._objects[key], self._paths[key] = value, path or (key,)

    def path_of(self, key: str) -> tuple[PathItem, ...]:
        return self._paths.get(key, (key,))

    def read(self, keys: Sequence[str]) -> Iterator[torch.Tensor]:
        return (self._values[key].contiguous() for key in keys)

    def object_bytes(self, key: str) -> bytes:
        out = io.BytesIO()
        torch.save(self._objects[key], out)
        return out.getvalue()


def name_below(source: Source, key: str, top: str) -> str | None:
    """What is left of a name below *top* (``model``, ``model.layers``; empty: all of it); None when it is elsewhere."""
    wanted = [part for part in top.split(".") if part]
    if not wanted:
        return key
    # The path's own items may have dots in them (model, layers.0.weight): compare by what is between all dots.
    parts = ".".join(map(str, source.path_of(key))).split(".")
    if parts[: len(wanted)] != wanted:
        return None
    return ".".join(parts[len(wanted) :]) or wanted[-1]


def torch_dtype(name: str, what: str) -> torch.dtype:
    """torch's dtype of that name.

    Raises:
        UnreadableTensorError: this torch has none; *what* it is of.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnreadableTensorError(f"cannot read {what}: torch {torch.__version__} has no dtype {name!r}")
    return dtype


def _read(file: Path, place: Place, key: str) -> bytearray:
    data = bytearray(place.length_bytes)
    try:
        with file.open("rb") as f:
            f.seek(place.offset_bytes)
            count = f.readinto(data)
    except OSError as e:
        raise UnreadableTensorError(f"cannot read {key!r} from {file}: {e.strerror or e}") from e
    if count < place.length_bytes:
        raise UnreadableTensorError(
            f"cannot read {key!r} from {file}: the file ends {place.length_bytes - count:,} bytes too early "
            f"(it has {os.stat(file).st_size:,}); steadyctl ckpt verify shows what else is lost"
        )
    return data
