"""Finds checkpoints, tells by whom they were written, and reads their lists of contents."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from steadyrun.checkpoint import dcp, safetensors
from steadyrun.checkpoint.commit import open_manifest
from steadyrun.checkpoint.contents import (
    Contents,
    Encoding,
    FileInfo,
    Kind,
    Piece,
    Place,
    Problem,
    ProblemKind,
    Tensor,
    UnusableCheckpointError,
)
from steadyrun.checkpoint.fragments import Fragments, is_meant_for_us
from steadyrun.checkpoint.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    FolderName,
    Manifest,
    ManifestError,
)

__all__ = ["Found", "Listing", "find_checkpoints", "read_contents", "step_of"]

NO_CHECKSUM_SAFETENSORS: Final = "safetensors stores no checksum"
NO_CHECKSUM_LEGACY: Final = "the old torch.save format (before torch 1.6) stores no checksum"
NO_CHECKSUM_OTHER: Final = "no checksum stored"
_LEGACY_MAGIC: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_ZIP_MAGIC: Final = b"PK\x03\x04"
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")
_MUST_BE_TORCH: Final = re.compile(r".*\.(pt|pth)|pytorch_model.*\.bin")
_DEEPSPEED: Final = re.compile(
    r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|.*_optim_states\.pt|layer_\d+-model.*\.pt"
)
_MEGATRON_RANK: Final = re.compile(r"mp_rank_\d+(_\d+)*")
_INDEX: Final = re.compile(r".*\.(safetensors|bin)\.index(\..+)?\.json")
_RANK_METADATA: Final = re.compile(r"__\d+\.metadata")
_STEP: Final = re.compile(r"(\d+)(?!.*\d)")
# Who writes a file with the name of the newest checkpoint, and how the name becomes that of a folder.
_POINTERS: Final = ("latest", "latest_checkpointed_iteration.txt")
_HAVE_NO_MORE_BELOW: Final = (Kind.DCP, Kind.MEGATRON_DCP, Kind.MEGATRON, Kind.DEEPSPEED)
_DEPTH: Final = 3
_FRAGMENT: Final = re.compile(r"__\d+\.shards\.json")
_MOST_INDEX_BYTES: Final = 256 << 20
# A data file may be closed a little after the metadata's time stamp was taken on another machine.
_LATER_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint.

    Attributes:
        is_latest: a pointer file beside it names it, or it is the newest of those that steadyrun has committed.
        manifest: steadyrun's, also over the files of another program; None without one.
        manifest_problem: why its manifest cannot be used.
    """

    path: Path
    kind: Kind
    files: tuple[FileInfo, ...]
    is_latest: bool = False
    manifest: Manifest | None = None
    manifest_problem: str | None = None

    @property
    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files)

    @property
    def step(self) -> int | None:
        """By its manifest, else by its name."""
        return step_of(self.path) if self.manifest is None else self.manifest.step

    @property
    def written_unix_s(self) -> float | None:
        if self.manifest is not None and not self.manifest.is_foreign:
            return self.manifest.created_unix_s  # the file itself is written anew when all of it was verified
        return max((f.written_unix_s for f in self.files), default=None)

    @property
    def is_complete(self) -> bool:
        """Whether the file that is written last is there, where the kind has one."""
        if self.is_partial or self.manifest_problem is not None:
            return False
        if self.manifest is not None:
            return self.manifest.complete
        if self.kind not in (Kind.DCP, Kind.MEGATRON_DCP):
            return True
        return any(f.name == ".metadata" or _RANK_METADATA.fullmatch(f.name) for f in self.files)

    @property
    def is_partial(self) -> bool:
        """Whether steadyrun is writing it, or was when it was cut off."""
        name = FolderName.parse(self.path.name)
        return name is not None and name.is_partial

    @property
    def is_ours(self) -> bool:
        """Whether steadyrun has written it, files and all."""
        return self.manifest is not None and not self.manifest.is_foreign


@dataclass(frozen=True, slots=True)
class Listing:
    """The checkpoints at or below a path, by step; *pointer_problem*: the pointer names none of them."""

    checkpoints: tuple[Found, ...]
    pointer_problem: Problem | None = None


def step_of(path: Path) -> int | None:
    """The last number in the name, which is the step by all conventions: step-100, checkpoint-500, iter_0000100.

    In the names that steadyrun gives (step-000000012.a3.partial), the first.
    """
    own = FolderName.parse(path.name)
    if own is not None:
        return own.step
    match = _STEP.search(path.stem if path.suffix in (*_TORCH_SUFFIXES, ".safetensors") else path.name)
    return int(match[1]) if match else None


def find_checkpoints(path: Path) -> Listing:
    """All checkpoints at *path* and up to 3 folders below it.

    Raises:
        UnusableCheckpointError: the path does not exist or cannot be read, or nothing there is a checkpoint.
    """
    try:
        if not path.is_dir():
            info = _file_info(path, path.name)
            return Listing((Found(path, _file_kind(path), (info,)),))
        target, problem = _pointer(path)
        found = list(_walk(path, _DEPTH))
    except OSError as e:
        raise UnusableCheckpointError(
            f"cannot look at {path}: {e.strerror or e}; give a checkpoint's folder or file"
        ) from e
    if not found and problem is None:
        raise UnusableCheckpointError(
            f"cannot find a checkpoint in {path}: no file or folder in it is of a known kind "
            "(torch.distributed.checkpoint, torch.save, safetensors, DeepSpeed, Megatron)"
        )
    found.sort(key=lambda f: (str(f.path.parent), f.step or 0, _saved_unix_s(f), f.path.name))
    if target is None:
        target = next((f.path for f in reversed(found) if f.path.parent == path and f.is_ours and f.is_complete), None)
    marked = [replace(f, is_latest=target is not None and target in (f.path, *f.path.parents)) for f in found]
    return Listing(tuple(marked), problem)


def _saved_unix_s(found: Found) -> float:
    return 0.0 if found.manifest is None else found.manifest.created_unix_s


def _walk(folder: Path, depth: int) -> Iterator[Found]:
    kind = _folder_kind(folder)
    if kind is not None:
        found = _found(folder, kind)
        yield found
        if found.manifest is not None:
            return  # what is below belongs to it
    if kind in _HAVE_NO_MORE_BELOW or depth == 0:
        return
    with os.scandir(folder) as entries:
        below = sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
    for name in below:
        yield from _walk(folder / name, depth - 1)


def _found(folder: Path, kind: Kind) -> Found:
    files = {f.name: f for f in _files(folder, kind)}
    if MANIFEST_NAME not in files:
        return Found(folder, kind, tuple(files.values()))
    data = (folder / MANIFEST_NAME).read_bytes()
    try:
        manifest = open_manifest(data)
    except ManifestError as e:
        is_ours = is_meant_for_us(data) or any(_FRAGMENT.fullmatch(name) for name in files)
        return Found(folder, kind, tuple(files.values()), manifest_problem=str(e) if is_ours else None)
    for record in manifest.files:  # also those in folders below, which belong to it as well
        if record.name not in files and not dcp.is_outside(record.name):
            with contextlib.suppress(FileNotFoundError):
                files[record.name] = _file_info(folder / record.name, record.name)
    return Found(folder, kind, tuple(files.values()), manifest=manifest)


def _pointer(folder: Path) -> tuple[Path | None, Problem | None]:
    for name in _POINTERS:
        file = folder / name
        if not file.is_file():
            continue
        with file.open("rb") as f:
            text = f.read(4096).decode(errors="replace").strip()
        target = f"iter_{int(text):07d}" if name.endswith(".txt") and text.isdecimal() else text
        if not target or dcp.is_outside(target) or not (folder / target).is_dir():
            said = f"names {target!r}, which is not there" if target else "is empty"
            return None, Problem(ProblemKind.MISSING, f"it {said}", name)
        return folder / target, None
    return None, None


# -- kinds -----------------------------------------------------------------------------------------------------------
def _file_kind(path: Path) -> Kind:
    if not path.is_file():
        raise UnusableCheckpointError(f"cannot use {path}: neither a file nor a folder")
    if path.suffix == ".safetensors":
        return Kind.SAFETENSORS
    if _magic(path).startswith(_ZIP_MAGIC) or _magic(path) == _LEGACY_MAGIC or _MUST_BE_TORCH.fullmatch(path.name):
        return Kind.TORCH_SAVE
    if path.name == ".metadata" or path.suffix == ".distcp" or _INDEX.fullmatch(path.name):
        raise UnusableCheckpointError(
            f"cannot use {path} by itself: it is part of a checkpoint; give the folder it is in"
        )
    raise UnusableCheckpointError(f"cannot use {path}: not a file that torch.save or safetensors wrote")


def _folder_kind(folder: Path) -> Kind | None:
    with os.scandir(folder) as entries:
        names = {e.name: e.is_dir() for e in entries}
    files = [n for n, is_folder in names.items() if not is_folder]
    if any(n == ".metadata" or n.endswith(".distcp") or _RANK_METADATA.fullmatch(n) for n in files):
        return Kind.MEGATRON_DCP if "metadata.json" in files and "common.pt" in files else Kind.DCP
    if any(is_folder and _MEGATRON_RANK.fullmatch(n) for n, is_folder in names.items()):
        return Kind.MEGATRON
    if any(_DEEPSPEED.fullmatch(n) for n in files):
        return Kind.DEEPSPEED
    if any(_INDEX.fullmatch(n) for n in files):
        return Kind.HF_SHARDED
    if any(n.endswith(".safetensors") or _is_torch(folder / n) for n in files):
        return Kind.FILES
    return None


def _is_torch(path: Path) -> bool:
    if path.suffix not in _TORCH_SUFFIXES or not path.is_file():
        return False
    magic = _magic(path)
    return magic.startswith(_ZIP_MAGIC) or magic == _LEGACY_MAGIC or bool(_MUST_BE_TORCH.fullmatch(path.name))


def _magic(path: Path) -> bytes:
    with path.open("rb") as f:
        return f.read(len(_LEGACY_MAGIC))


def _file_info(path: Path, name: str) -> FileInfo:
    stat = path.stat()
    return FileInfo(name, stat.st_size, stat.st_mtime)


def _files(folder: Path, kind: Kind) -> Iterator[FileInfo]:
    below = [p for p in sorted(folder.iterdir()) if p.is_dir() and _MEGATRON_RANK.fullmatch(p.name)]
    for base in (folder, *(below if kind is Kind.MEGATRON else ())):
        for path in sorted(base.iterdir()):
            if path.is_file():
                yield _file_info(path, str(path.relative_to(folder)))


# -- contents --------------------------------------------------------------------------------------------------------
def read_contents(found: Found) -> Contents:
    """What is in the checkpoint, from its lists of contents.

    Raises:
        OSError: a file cannot be read.
    """
    files = found.files
    if not found.path.is_dir():
        parts = _Parts(found.path.parent)
        parts.add_files(files)
        return parts.contents(found.path, found.kind, files)
    parts = _Parts(found.path)
    others: Iterable[FileInfo] = files
    if found.kind in (Kind.DCP, Kind.MEGATRON_DCP):
        _read_dcp(parts, files)
        others = [f for f in files if not f.name.endswith((".distcp", ".metadata"))]
        listed = {piece.place.file for piece in parts.pieces}
        others = [f for f in others if f.name not in listed]
    elif found.kind is Kind.HF_SHARDED:
        for file in files:
            if _INDEX.fullmatch(file.name):
                _read_index(parts, file, files)
    parts.add_files(others)
    if found.kind is Kind.HF_SHARDED:
        _compare_index(parts)
    if found.manifest_problem is not None:
        parts.problems.append(Problem(ProblemKind.METADATA, found.manifest_problem, MANIFEST_NAME))
    if found.manifest is not None:
        _compare_manifest(parts, found.manifest, files)
        if found.is_ours:
            parts.pieces = list(_with_checksums(parts, Fragments(found.path, found.manifest)))
    return parts.contents(found.path, found.kind, files)


class _Parts:
    """Gathers what becomes a Contents."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.tensors: list[Tensor] = []
        self.objects: list[str] = []
        self.pieces: list[Piece] = []
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.details: dict[str, str] = {}
        self.promised: dict[str, list[str]] = {}  # file -> tensors that an index says are in it

    def contents(self, path: Path, kind: Kind, files: tuple[FileInfo, ...]) -> Contents:
        return Contents(
            path,
            kind,
            files,
            tuple(self.tensors),
            tuple(self.objects),
            tuple(self.pieces),
            tuple(self.problems),
            tuple(self.notes),
            self.details,
        )

    def add_files(self, files: Iterable[FileInfo]) -> None:
        """Files that stand for themselves, each by what it is."""
        for file in files:
            path = self.base / file.name
            whole = Place(file.name, 0, file.size_bytes)
            if path.suffix == ".safetensors":
                try:
                    self.tensors += safetensors.read_header(path, file.name)
                except safetensors.DamagedHeaderError as e:
                    self.problems.append(Problem(ProblemKind.STRUCTURE, str(e), file.name))
                self.pieces.append(Piece(whole, Encoding.SAFETENSORS, no_checksum=NO_CHECKSUM_SAFETENSORS))
                continue
            magic = _magic(path)
            if magic.startswith(_ZIP_MAGIC) and path.suffix in _TORCH_SUFFIXES:
                self.pieces.append(Piece(whole, Encoding.TORCH_ZIP))
            elif magic == _LEGACY_MAGIC:
                self.pieces.append(Piece(whole, Encoding.OPAQUE, no_checksum=NO_CHECKSUM_LEGACY))
            elif _MUST_BE_TORCH.fullmatch(path.name) and not magic.startswith(b"\x80"):
                text = "it does not begin as torch.save begins a file" if file.size_bytes else "the file is empty"
                kind = ProblemKind.STRUCTURE if file.size_bytes else ProblemKind.TRUNCATED
                self.problems.append(Problem(kind, text, file.name))
            else:
                self.pieces.append(Piece(whole, Encoding.OPAQUE, no_checksum=NO_CHECKSUM_OTHER))


def _read_dcp(parts: _Parts, files: Sequence[FileInfo]) -> None:
    by_name = {f.name: f for f in files}
    names = [".metadata"] if ".metadata" in by_name else [n for n in by_name if _RANK_METADATA.fullmatch(n)]
    if not names:
        text = "the folder has no .metadata, which is written last: the save did not finish, nothing can be loaded"
        parts.problems.append(Problem(ProblemKind.METADATA, text, ".metadata"))
        return
    referenced = set()
    for name in names:
        try:
            metadata = dcp.read_metadata(parts.base / name)
        except dcp.DamagedMetadataError as e:
            parts.problems.append(Problem(ProblemKind.METADATA, str(e), name))
            return
        parts.tensors += metadata.tensors
        parts.objects += metadata.objects
        parts.details.update(metadata.details)
        parts.problems += dcp.problems_of(metadata, files, is_whole=name == ".metadata")
        for piece in dcp.pieces_of(metadata):
            file = by_name.get(piece.place.file)
            referenced.add(piece.place.file)
            if file is not None and piece.place.end_bytes <= file.size_bytes:
                parts.pieces.append(piece)
    if names != [".metadata"]:
        parts.notes.append("each rank has metadata of its own; whether the shards of all ranks fit is not checked")
    _dcp_notes(parts, files, by_name[names[0]], referenced)


def _compare_manifest(parts: _Parts, manifest: Manifest, files: Sequence[FileInfo]) -> None:
    """Missing and short files, and the digests of whole files, in place of "no checksum" where there was none."""
    sizes_bytes = {f.name: f.size_bytes for f in files}
    digests = {}
    for record in manifest.files:
        if dcp.is_outside(record.name):
            parts.problems.append(Problem(ProblemKind.METADATA, "lies outside of the folder; not read", record.name))
            continue
        have = sizes_bytes.get(record.name)
        if have != record.size_bytes:
            kind = ProblemKind.MISSING if have is None else ProblemKind.TRUNCATED
            text = f"by {MANIFEST_NAME} it has {record.size_bytes:,} bytes, and "
            text += "it is not there" if have is None else f"here it has {have:,}"
            if not any(p.file == record.name and p.kind is kind for p in parts.problems):
                parts.problems.append(Problem(kind, text, record.name))
        elif record.xxh3:
            digests[record.name] = record
    known = {MANIFEST_NAME, *digests}  # the manifest itself has a checksum at its end, which is right: it was read
    parts.pieces = [p for p in parts.pieces if p.place.file not in known or p.encoding is Encoding.TORCH_ZIP]
    for name, record in digests.items():
        place = Place(name, 0, record.size_bytes)
        parts.pieces.append(Piece(place, Encoding.OPAQUE, xxh3=record.xxh3))
    more = [f.name for f in files if f.name not in {r.name for r in manifest.files} and f.name != MANIFEST_NAME]
    if more:
        parts.notes.append(f"not in {MANIFEST_NAME}, so added after the commit: {_some(more)}")


def _with_checksums(parts: _Parts, fragments: Fragments) -> Iterator[Piece]:
    """The pieces, each with what the manifest says of it."""
    for piece in parts.pieces:
        file, key = piece.place.file, piece.key
        if key is None or not fragments.covers(file):
            yield piece
            continue
        try:
            shard = None if piece.shard_offsets is None else fragments.shard(file, key, piece.shard_offsets)
            stored = fragments.object(file, key) if piece.shard_offsets is None else None
        except ManifestError:
            yield piece  # the fragment itself is damaged or missing, which is told; there is still the CRC32 of torch
            continue
        record = shard or stored
        if record is None or Place(file, record.at_bytes, record.length_bytes) != piece.place:
            text = f"{METADATA_NAME} and {MANIFEST_NAME} do not say the same of it"
            parts.problems.append(Problem(ProblemKind.MISMATCH, text, file, (key,), piece.shard_offsets))
            yield piece
        else:
            yield replace(piece, record=shard, xxh3=None if stored is None else stored.xxh3)


def _dcp_notes(parts: _Parts, files: Sequence[FileInfo], metadata: FileInfo, referenced: set[str]) -> None:
    data = [f for f in files if f.name.endswith(".distcp")]
    unused = [f.name for f in data if f.name not in referenced]
    if unused:
        parts.notes.append(f"not part of the checkpoint: {_some(unused)} (left by another save into this folder?)")
    later = [f.name for f in data if f.name in referenced and f.written_unix_s > metadata.written_unix_s + _LATER_S]
    if later:
        parts.notes.append(
            f"written after {metadata.name}, which a save writes last: {_some(later)}; a later save may have been "
            "cut off while it overwrote this folder, or the files were copied"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _read_index(parts: _Parts, index: FileInfo, files: Sequence[FileInfo]) -> None:
    weight_map = _weight_map(parts.base / index.name, index.size_bytes)
    if weight_map is None:
        text = "it is no JSON with a weight_map from names to files"
        parts.problems.append(Problem(ProblemKind.METADATA, text, index.name))
        return
    there = {f.name for f in files}
    for key, file in weight_map.items():
        parts.promised.setdefault(file, []).append(key)
    for file in sorted(set(weight_map.values()) - there):
        text = f"{index.name} names it, and it is not there"
        parts.problems.append(Problem(ProblemKind.MISSING, text, file, tuple(parts.promised[file])))


def _weight_map(path: Path, size_bytes: int) -> dict[str, str] | None:
    if size_bytes > _MOST_INDEX_BYTES:
        return None
    try:
        value: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        return None
    return weight_map


def _compare_index(parts: _Parts) -> None:
    """Each tensor of a safetensors file that the index promises is in that file's header."""
    there: dict[str, set[str]] = {}
    for tensor in parts.tensors:
        for shard in tensor.shards:
            if shard.place is not None:
                there.setdefault(shard.place.file, set()).add(tensor.key)
    for file, keys in parts.promised.items():
        lost = tuple(k for k in keys if k not in there[file]) if file in there else ()
        if lost:
            parts.problems.append(Problem(ProblemKind.MISMATCH, "the index promises what is not in it", file, lost))
