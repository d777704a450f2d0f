"""Loads checkpoint folders, ours and those that ``torch.distributed.checkpoint`` wrote, and verifies what it reads.

``dcp.load`` copies each shard twice and compares nothing with what was saved. Here the bytes of a shard go from the
file into the tensor, checksummed on the way: with the xxh3-128 of our manifest where there is one, else with the CRC32
that torch stores and never looks at. Several threads read; copies and checksums release the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeGuard, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from steadyrun.checkpoint import dcp
from steadyrun.checkpoint.checksums import xxh3
from steadyrun.checkpoint.contents import Place, Shard, Tensor
from steadyrun.checkpoint.damage import (
    DamagedFolderError,
    DamagedShardError,
    MissingKeysError,
    UnloadableError,
    UntrustedObjectError,
)
from steadyrun.checkpoint.filling import Filler, Job, StoppedError, Want, bad_record
from steadyrun.checkpoint.fragments import Fragments, open_fragments
from steadyrun.checkpoint.manifest import METADATA_NAME, Manifest, ManifestError, ObjectRecord
from steadyrun.checkpoint.pickles import PickleError, check_lengths
from steadyrun.checkpoint.torchzip import DamagedArchiveError

__all__ = [
    "DamagedFolderError",
    "DamagedShardError",
    "Loaded",
    "MissingKeysError",
    "Reader",
    "UnloadableError",
    "UntrustedObjectError",
    "iter_tensors",
    "load_folder",
    "load_from",
    "load_objects",
    "read_tensor",
]

NOT_VERIFIED: Final = "nothing was compared with a checksum, as asked"
NO_MANIFEST: Final = (
    "without a manifest of steadyrun only the CRC32 of each tensor could be compared: "
    "a file of another step with the same layout would pass"
)
_NAMED: Final = re.compile(r"(?:GLOBAL|class) ([\w.]+)")
_TASK_BYTES: Final = 64 << 20
_MOST_THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load did.

    Attributes:
        size_bytes: of tensors and objects that came into the state.
        checked_bytes: compared with a checksum; more than *size_bytes* where only part of a shard was wanted.
        manifest: ours, or None for a folder that somebody else wrote.
        missing: keys that kept the value they had (``strict=False``).
        notes: what was not verified, for a person.
    """

    size_bytes: int
    checked_bytes: int
    elapsed_s: float
    manifest: Manifest | None
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# -- for those who load ----------------------------------------------------------------------------------------------
def load_folder(
    folder: Path | str,
    state_dict: dict[str, Any],
    *,
    verify: bool = True,
    trust: bool = False,
    strict: bool = True,
    threads: int | None = None,
) -> Loaded:
    """Load *folder* into *state_dict*, in place, as ``dcp.load`` does, but without any collective.

    Every rank calls it for itself, with its own shards of whatever layout; what each needs is worked out from the
    metadata. Tensors are overwritten, anything else is replaced; what has ``state_dict`` and ``load_state_dict`` is
    asked for the first and given the second.

    Args:
        verify: compare whole shards with their checksums, also where only part of one is needed.
        trust: unpickle objects of a folder without manifest although that may run what they name.
        strict: refuse a checkpoint that lacks a key.
        threads: that read; None: as many as there are CPUs, 4 at most.

    Raises:
        UnloadableError: one of those below; with ``has_written`` the tensors of *state_dict* are a mixture now.
        DamagedShardError: tensor, shard, file and bytes are named.
        DamagedFolderError, MissingKeysError: nothing has been changed.
        UntrustedObjectError: an object needs *trust*.
        ValueError: a tensor has another shape in the checkpoint.
    """
    return load_from(Reader(folder, verify=verify, trust=trust, threads=threads), state_dict, strict=strict)


def load_from(reader: Reader, state_dict: dict[str, Any], *, strict: bool = True) -> Loaded:
    """``load_folder`` with a reader that has looked into the folder already; it raises the same."""
    started_s = time.monotonic()
    states = {k: v.state_dict() if _is_stateful(v) else v for k, v in state_dict.items()}
    missing = _load(reader, _Planner(reader, strict), states)
    for key, value in state_dict.items():
        if _is_stateful(value):
            value.load_state_dict(states[key])
        else:
            state_dict[key] = states[key]
    elapsed_s = time.monotonic() - started_s
    return Loaded(reader.loaded_bytes, reader.checked_bytes, elapsed_s, reader.manifest, missing, reader.notes)


def _is_stateful(value: Any) -> TypeGuard[Stateful]:
    # The protocol's own check costs 40 us for each tensor.
    return not isinstance(value, (torch.Tensor, dict, list)) and isinstance(value, Stateful)


def load_objects(
    folder: Path | str, keys: Iterable[str] | None = None, *, verify: bool = True, trust: bool = False
) -> dict[str, Any]:
    """What is no tensor, by flattened key: *keys*, or all of it. Raises as ``load_folder``."""
    reader = Reader(folder, verify=verify, trust=trust)
    return _load_flat(reader, reader.object_keys if keys is None else tuple(keys))


def read_tensor(folder: Path | str, key: str, *, verify: bool = True) -> torch.Tensor:
    """One whole tensor, put together from its shards. Raises as ``load_folder``."""
    ((_, tensor),) = iter_tensors(folder, [key], verify=verify)
    return tensor


def iter_tensors(
    folder: Path | str, keys: Iterable[str] | None = None, *, verify: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors by flattened key, one after the other: *keys*, or all. Raises as ``load_folder``."""
    reader = Reader(folder, verify=verify)
    wanted = reader.tensor_keys if keys is None else tuple(keys)
    unknown = sorted(set(wanted) - set(reader.tensor_keys))
    if unknown:
        raise MissingKeysError(reader.folder, unknown)
    for key in wanted:
        yield key, _load_flat(reader, [key])[key]


def _load_flat(reader: Reader, keys: Sequence[str]) -> dict[str, Any]:
    entries = reader.metadata.state_dict_metadata
    unknown = [key for key in keys if key not in entries]
    if unknown:
        raise MissingKeysError(reader.folder, unknown)
    state: dict[str, Any] = {}
    for key in keys:
        entry = entries[key]
        state[key] = None
        if isinstance(entry, TensorStorageMetadata):
            state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    _load(reader, _Planner(reader, True, is_flat=True), state)
    return state


def _load(reader: Reader, planner: _Planner, state: dict[str, Any]) -> tuple[str, ...]:
    """What ``dcp.load`` does, for this rank alone. Returns the keys that the folder does not hold."""
    with _no_collection():
        metadata = reader.metadata
        planner.set_up_planner(state, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        plan = planner.create_local_plan()
    missing = tuple(k for k in planner.state_dict if k not in metadata.state_dict_metadata)
    if missing and planner.is_strict:
        raise MissingKeysError(reader.folder, missing)
    reader.read_data(planner.finish_plan(reader.prepare_local_plan(plan)), planner).wait()
    return missing


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection for a moment: ten thousand new objects start one, and each looks at all that torch made."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Planner(DefaultLoadPlanner):
    """torch's planner, with objects unpickled only as far as they are trusted."""

    def __init__(self, reader: Reader, is_strict: bool, is_flat: bool = False) -> None:
        super().__init__(not is_flat, not is_flat, allow_partial_load=True)
        self._reader = reader
        self.is_strict = is_strict

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        loaded = self._reader.unpickle(key, value)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], loaded)
        else:
            self.state_dict[key] = loaded


# -- the reader ------------------------------------------------------------------------------------------------------
class Reader(StorageReader):
    """A storage reader for any DCP folder: ``dcp.load(state, storage_reader=Reader(folder))`` works as well.

    Args:
        verify: see ``load_folder``; whole shards are compared.
        trust: pickles of this folder may run code.
        threads: that read; None: as many as there are CPUs, 4 at most.
        extensions: torch's ``ExtensionRegistry``, for entries that were stored through extensions that torch does not
            bring itself.

    Raises:
        DamagedFolderError: there is a manifest, and it cannot be read.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        verify: bool = True,
        trust: bool = False,
        threads: int | None = None,
        extensions: Any = None,
    ) -> None:
        super().__init__()
        self.verify = verify
        self.trust = trust
        self.threads = threads or min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        self._extensions = extensions
        self.reset(folder)

    # -- what torch calls ----------------------------------------------------------------------------------------------
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget what was read; go on with another folder if one is given."""
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)
        self.loaded_bytes = 0
        self.checked_bytes = 0
        self._unchecked: set[str] = set()
        self._metadata: Metadata | None = None
        self._chunks: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
        self._load_id = str(uuid.uuid4())
        try:
            self._fragments: Fragments | None = open_fragments(self.folder)
        except ManifestError as e:
            raise DamagedFolderError(self.folder, str(e)) from e

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """``.metadata``, or with ``rank=`` that of one rank that saved alone. Names that do not belong are refused."""
        rank = kwargs.get("rank")
        name = METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"
        try:
            data = (self.folder / name).read_bytes()
        except FileNotFoundError as e:
            why = f"it has no {name}, which is written last: the save did not finish, or this is no checkpoint"
            raise DamagedFolderError(self.folder, why) from e
        except OSError as e:
            raise DamagedFolderError(self.folder, f"{name} cannot be read: {e.strerror or e}") from e
        if self._fragments is not None and self.verify and self._fragments.file(name) is not None:
            try:
                self._fragments.check_small_file(name, data)
            except ManifestError as e:
                raise DamagedFolderError(self.folder, str(e)) from e
        metadata = self._unpickle_metadata(name, data)
        storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage_meta.load_id = self._load_id
        metadata.storage_meta = storage_meta
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata
        self._chunks = {}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises as ``load_folder``; all is done when it returns."""
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        # All that is wanted: a shard whose place in the tensor is damaged may be in no item of the plan at all.
        wanted = getattr(planner, "state_dict", None)
        keys = [*(i.storage_index.fqn for i in tensors), *(wanted if isinstance(wanted, dict) else ())]
        with _no_collection():
            self._check_coverage(keys)
            targets = [planner.resolve_tensor(item).detach() for item in tensors]
            jobs = self._jobs(tensors, targets)
        objects = [(item, self._place(item)) for item in plan.items if item.type is LoadItemType.BYTE_IO]
        self._check_files(
            [*((j.key, j.offsets, j.place) for j in jobs), *((i.dest_index.fqn, (), p) for i, p in objects)]
        )
        # Objects first: one that is refused shall cost nothing.
        contents = [(item, self._object(item, place)) for item, place in objects]
        self._run(jobs)
        if targets:
            torch.autograd.graph.increment_version(targets)  # what was read straight into memory, autograd has not seen
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item, content in contents:
            if not isinstance(planner, _Planner) and not self._is_trusted:
                self.unpickle(item.dest_index.fqn, io.BytesIO(content))  # torch's own planner trusts whatever comes
            planner.load_bytes(item, io.BytesIO(content))
        self.loaded_bytes += sum(t.numel() * t.element_size() for t in targets) + sum(len(c) for _, c in contents)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def checkpoint_id(self) -> str:
        return str(self.folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a folder that could be read."""
        return Path(checkpoint_id).is_dir()

    # -- what is there -------------------------------------------------------------------------------------------------
    @property
    def manifest(self) -> Manifest | None:
        return None if self._fragments is None else self._fragments.manifest

    @property
    def metadata(self) -> Metadata:
        """Of all ranks; or of this one, where each rank saved alone. Raises DamagedFolderError."""
        if self._metadata is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            is_alone = (
                not (self.folder / METADATA_NAME).exists() and (self.folder / f"__{rank}{METADATA_NAME}").exists()
            )
            self._metadata = self.read_metadata(rank=rank) if is_alone else self.read_metadata()
        return self._metadata

    @property
    def tensor_keys(self) -> tuple[str, ...]:
        entries = self.metadata.state_dict_metadata.items()
        return tuple(key for key, entry in entries if isinstance(entry, TensorStorageMetadata))

    @property
    def object_keys(self) -> tuple[str, ...]:
        entries = self.metadata.state_dict_metadata.items()
        return tuple(key for key, entry in entries if not isinstance(entry, TensorStorageMetadata))

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not verified, for a person."""
        if not self.verify:
            return (NOT_VERIFIED,)
        notes = [] if self._fragments is not None else [NO_MANIFEST]
        if self._unchecked:
            some = sorted(self._unchecked)
            more = f" and {len(some) - 4} more" if len(some) > 4 else ""
            notes.append(f"no checksum is stored for {', '.join(some[:4])}{more}")
        return tuple(notes)

    def unpickle(self, key: str, value: IO[bytes]) -> Any:
        """The object in *value*.

        Raises:
            UntrustedObjectError: that would run what it names, and the folder is not trusted.
        """
        where = None if torch.cuda.is_available() else "cpu"
        try:
            return torch.load(value, map_location=where, weights_only=True)
        except pickle.UnpicklingError as e:
            if not self._is_trusted:
                why = "has no manifest of steadyrun" if self.manifest is None else "was not verified"
                found = _NAMED.search(str(e))
                names = f"names {found[1]}, which may run code" if found else "may run code"
                raise UntrustedObjectError(
                    f"cannot load {key} from {self.folder}: its pickle {names}, and the folder {why}; "
                    "pass trust=True if you know who wrote it"
                ) from e
        value.seek(0)
        return torch.load(value, map_location=where, weights_only=False)

    @property
    def _is_trusted(self) -> bool:
        return self.trust or (self.verify and self._fragments is not None)

    # -- metadata ------------------------------------------------------------------------------------------------------
    def _unpickle_metadata(self, name: str, data: bytes) -> Metadata:
        if len(data) > dcp.MOST_METADATA_BYTES:
            raise DamagedFolderError(self.folder, f"{name} has {len(data):,} bytes, which are not read")
        try:
            check_lengths(data)
            metadata = pickle.loads(data) if self.trust else _MetadataUnpickler(io.BytesIO(data)).load()
        except _RefusedError as e:
            why = f"{name} is refused: it {e}; torch would run what it names (trust=True lets it)"
            raise DamagedFolderError(self.folder, why) from e
        except PickleError as e:
            raise DamagedFolderError(self.folder, f"{name} is damaged: {e}") from e
        except Exception as e:  # a damaged pickle can raise anything
            raise DamagedFolderError(self.folder, f"{name} is damaged: {type(e).__name__}: {e}") from e
        try:
            _check_structure(metadata)
        except (AttributeError, TypeError, ValueError) as e:
            raise DamagedFolderError(self.folder, f"{name} does not have the structure that torch writes: {e}") from e
        return cast(Metadata, metadata)

    def _check_coverage(self, keys: Iterable[str]) -> None:
        """Every element of each wanted tensor is stored, once: ``dcp.load`` leaves what is not as it was."""
        if self._fragments is not None and self.verify:
            return  # as planned and written by us, and not a byte of it has changed
        for key in dict.fromkeys(keys):
            entry = self.metadata.state_dict_metadata.get(key)
            if not isinstance(entry, TensorStorageMetadata):
                continue
            shards = [Shard(tuple(c.offsets), tuple(c.sizes), _ANYWHERE) for c in entry.chunks]
            problems = dcp.coverage_problems(Tensor(key, str(entry.properties.dtype), tuple(entry.size), tuple(shards)))
            if problems:
                why = f"by its metadata the tensor {key} is not whole: {problems[0].text}"
                raise DamagedFolderError(self.folder, why)

    # -- jobs ----------------------------------------------------------------------------------------------------------
    def _place(self, item: ReadItem) -> Place:
        try:
            info = self.metadata.storage_data[item.storage_index]
        except KeyError as e:
            why = f"by its metadata no bytes are stored for {item.storage_index.fqn}"
            raise DamagedFolderError(self.folder, why) from e
        return Place(info.relative_path, info.offset, info.length)

    def _jobs(self, items: Sequence[ReadItem], targets: Sequence[torch.Tensor]) -> list[Job]:
        """One for each stored shard, by place."""
        wants: dict[MetadataIndex, list[Want]] = {}
        first: dict[MetadataIndex, ReadItem] = {}
        for item, target in zip(items, targets, strict=True):
            if tuple(target.shape) != tuple(item.lengths):
                key = item.storage_index.fqn
                raise ValueError(f"cannot load {key}: {list(item.lengths)} does not fit into {list(target.shape)}")
            wants.setdefault(item.storage_index, []).append(
                Want(tuple(item.storage_offsets), tuple(item.lengths), target)
            )
            first.setdefault(item.storage_index, item)
        jobs = [self._job(index, first[index], tuple(of)) for index, of in wants.items()]
        return sorted(jobs, key=lambda job: (job.place.file, job.place.offset_bytes))

    def _job(self, index: MetadataIndex, item: ReadItem, wants: tuple[Want, ...]) -> Job:
        place = self._place(item)
        key, offsets = index.fqn, tuple(index.offset or ())
        record = None
        if self._fragments is not None and self._fragments.covers(place.file):
            try:
                record = self._fragments.shard(place.file, key, offsets)
            except ManifestError as e:
                raise DamagedFolderError(self.folder, str(e)) from e
            if record is None:
                raise DamagedFolderError(self.folder, f"the checksums of {place.file} lack {key} at {list(offsets)}")
        return Job(key, offsets, self._sizes(key, offsets), place, wants, self._transform(item), record)

    def _entry(self, key: str) -> TensorStorageMetadata:
        return cast(TensorStorageMetadata, self.metadata.state_dict_metadata[key])

    def _sizes(self, key: str, offsets: tuple[int, ...]) -> tuple[int, ...]:
        if key not in self._chunks:
            self._chunks[key] = {tuple(c.offsets): tuple(c.sizes) for c in self._entry(key).chunks}
        return self._chunks[key][offsets]

    def _transform(self, item: ReadItem) -> Callable[[bytes], bytes] | None:
        descriptors = getattr(self.metadata.storage_data[item.storage_index], "transform_descriptors", None)
        if not descriptors:
            return None
        more = {} if self._extensions is None else {"_extension_registry": self._extensions}
        transforms = FileSystemReader(self.folder, **more).transforms

        def transform(stored: bytes) -> bytes:
            return transforms.transform_load_stream(item, descriptors, io.BytesIO(stored)).read(-1)

        return transform

    def _check_files(self, entries: Sequence[tuple[str, tuple[int, ...], Place]]) -> None:
        """All files are there and long enough, before anything is changed."""
        sizes: dict[str, int] = {}
        for key, offsets, place in entries:
            if place.file not in sizes:
                try:
                    sizes[place.file] = os.stat(self.folder / place.file).st_size
                except OSError as e:
                    why = "the file is not there" if isinstance(e, FileNotFoundError) else f"{e.strerror or e}"
                    raise self._damage(key, offsets, place, why) from e
            if place.end_bytes > sizes[place.file]:
                raise self._damage(key, offsets, place, f"the file ends at byte {sizes[place.file]:,}")

    def _damage(self, key: str, offsets: tuple[int, ...], place: Place, why: str) -> DamagedShardError:
        return DamagedShardError(self.folder, place.file, key, offsets, place.offset_bytes, place.length_bytes, why)

    # -- work ----------------------------------------------------------------------------------------------------------
    def _run(self, jobs: Sequence[Job]) -> None:
        tasks = iter(_tasks(jobs))
        lock, stop = threading.Lock(), threading.Event()

        def work() -> Filler:
            filler = Filler(self.folder, self.verify, stop)
            while True:
                with lock:
                    task = next(tasks, None)
                if task is None:
                    return filler
                try:
                    filler.run(*task)
                except BaseException:
                    stop.set()
                    raise

        with ThreadPoolExecutor(self.threads, thread_name_prefix="steadyrun-read") as pool:
            futures = [pool.submit(work) for _ in range(self.threads - 1)]
            try:
                results = [work(), *(f.result() for f in futures)]
            except UnloadableError as e:
                e.has_written = True
                raise
            except StoppedError:  # damage was found by another thread
                for future in futures:
                    error = future.exception()
                    if error is not None and not isinstance(error, StoppedError):
                        if isinstance(error, UnloadableError):
                            error.has_written = True
                        raise error from None
                raise
            finally:
                stop.set()
        self.checked_bytes += sum(filler.checked_bytes for filler in results)
        self._unchecked.update(key for filler in results for key in filler.unchecked)

    def _object(self, item: ReadItem, place: Place) -> bytes:
        key = item.dest_index.fqn
        try:
            with open(self.folder / place.file, "rb", buffering=0) as file:
                content = _read_all(file, place)
        except OSError as e:
            raise self._damage(key, (), place, f"the file cannot be read: {e.strerror or e}") from e
        record = self._object_record(item.storage_index.fqn, place)
        if record is not None and self.verify and (found := xxh3(content)) != record.xxh3:
            why = f"its bytes have the xxh3 {found}, stored for them is {record.xxh3}"
            raise self._damage(key, (), place, why)
        transform = self._transform(item)
        if transform is not None:
            content = transform(content)
        if record is None and self.verify:
            try:
                bad = bad_record(content)
            except DamagedArchiveError as e:
                raise self._damage(key, (), place, f"it is not the archive that torch.save wrote: {e}") from e
            if bad is not None:
                raise self._damage(key, (), place, bad[0])
        if self.verify:
            self.checked_bytes += len(content)
        return content

    def check_objects(self, ranks: Iterable[int]) -> int:
        """Compare every object that these ranks wrote with its checksum, wanted by this rank or not.

        Objects are small, and most are wanted by one rank only: so that damage in any of them is found at a load, the
        ranks share this. Does nothing for a folder without our manifest.

        Returns:
            Bytes that were compared.

        Raises:
            DamagedShardError, DamagedFolderError: what is damaged, by name.
        """
        if self._fragments is None:
            return 0
        checked_bytes = 0
        for rank in ranks:
            try:
                name, records = self._fragments.objects(rank)
            except ManifestError as e:
                raise DamagedFolderError(self.folder, str(e)) from e
            for record in records:
                place = Place(name, record.at_bytes, record.length_bytes)
                try:
                    with open(self.folder / name, "rb", buffering=0) as file:
                        found = xxh3(_read_all(file, place))
                except OSError as e:
                    raise self._damage(record.key, (), place, f"the file cannot be read: {e.strerror or e}") from e
                if found != record.xxh3:
                    why = f"its bytes have the xxh3 {found}, stored for them is {record.xxh3}"
                    raise self._damage(record.key, (), place, why)
                checked_bytes += record.length_bytes
        return checked_bytes

    def _object_record(self, key: str, place: Place) -> ObjectRecord | None:
        fragments = self._fragments
        if fragments is None or not fragments.covers(place.file):
            return None
        try:
            record = fragments.object(place.file, key)
        except ManifestError as e:
            raise DamagedFolderError(self.folder, str(e)) from e
        if record is None or (record.at_bytes, record.length_bytes) != (place.offset_bytes, place.length_bytes):
            raise self._damage(key, (), place, "the metadata and the list of checksums do not say the same of it")
        return record


_ANYWHERE: Final = Place("", 0, 0)


def _tasks(jobs: Sequence[Job]) -> Iterator[tuple[str, list[Job]]]:
    """Neighbours in one file together, so that each thread reads forward."""
    task: list[Job] = []
    size_bytes = 0
    for job in jobs:
        if task and (task[0].place.file != job.place.file or size_bytes >= _TASK_BYTES):
            yield task[0].place.file, task
            task, size_bytes = [], 0
        task.append(job)
        size_bytes += job.place.length_bytes
    if task:
        yield task[0].place.file, task


def _read_all(file: io.FileIO, place: Place) -> bytes:
    parts, at = [], place.offset_bytes
    while at < place.end_bytes:
        data = os.pread(file.fileno(), place.end_bytes - at, at)
        if not data:
            raise OSError(0, f"the file ends at byte {at:,}")
        parts.append(data)
        at += len(data)
    return b"".join(parts)


def _check_structure(metadata: Any) -> None:
    """Damage that leaves a pickle readable must not surface somewhere in torch's planner.

    Raises:
        AttributeError, TypeError, ValueError: it is not what a planner can work with.
    """
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it holds a {type(metadata).__name__}")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(key, str):
            raise TypeError(f"a key is a {type(key).__name__}")
        if isinstance(entry, BytesStorageMetadata):
            continue
        if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.properties.dtype, torch.dtype):
            raise TypeError(f"no description of {key}")
        boxes = [(c.offsets, c.sizes) for c in entry.chunks]
        for sizes in (entry.size, *(s for box in boxes for s in box)):
            if not isinstance(sizes, torch.Size) or len(sizes) != len(entry.size) or (sizes and min(sizes) < 0):
                raise ValueError(f"impossible sizes of {key}")
    if not isinstance(metadata.storage_data, dict):
        raise TypeError("no list of where everything is")
    for index, info in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or dcp.is_outside(info.relative_path):
            raise ValueError("an entry is not one of the folder")
        if not (isinstance(info.offset, int) and isinstance(info.length, int)) or min(info.offset, info.length) < 0:
            raise ValueError(f"no valid place in {info.relative_path!r}")


class _RefusedError(Exception):
    pass


class _MetadataUnpickler(pickle.Unpickler):
    """Makes only what belongs into ``.metadata``."""

    def find_class(self, module: str, name: str) -> Any:
        dotted = f"{module}.{name}"
        found = super().find_class(module, name) if dcp.is_allowed(dotted) else None
        if found is None or (dotted.startswith(dcp.ALLOWED_PREFIX) and not isinstance(found, type)):
            raise _RefusedError(f"names {dotted!r}, which does not belong there")
        return found
