"""Folders of dumps: finding them, telling whose they are, and reading all of them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steadyrun.collectors.flight.bundle import Bundle, BundleReading, LoadedFile
from steadyrun.collectors.flight.readers import read_bundles
from steadyrun.collectors.flight.sidecar import DumpFile, Sidecar, sidecar_from_json
from steadyrun.collectors.flight.summarise import read_course, read_ops
from steadyrun.collectors.flight.unpickle import MAX_DUMP_BYTES, Dump, DumpError, load_dump
from steadyrun.core.flight import FlightOp, RankFlight

__all__ = ["DumpFolder", "FoundDumps", "LoadedFile", "LoadedFlights", "find_dumps", "load_folder", "rank_from_name"]

MAX_FILES: Final = 200_000
MAX_DEPTH: Final = 8
MAX_SIDECAR_BYTES: Final = 8 * 1024 * 1024
_FEW_BYTES: Final = 4 * 1024 * 1024  # less is read faster than processes start
_CACHED_OPS: Final = 40_000  # some 20 MB

Progress = Callable[[int, int], None]


# -- names -------------------------------------------------------------------------------------------------------------
_OURS: Final = re.compile(r"rank_(\d{1,7})\.flight\b")  # what the agent collects
_IN_RANK_FOLDER: Final = re.compile(r"flight\.\w+(\.\w+)?\.(pickle|json)")  # what a rank writes into its own folder
_SUFFIX: Final = re.compile(r"(\.(pkl|pickle|json|bin|pt|fr|dump|trace|dat|tmp|copy|bak))+$", re.IGNORECASE)
_TRAILING: Final = re.compile(r"(\d{1,7})$")
_ANYWHERE: Final = re.compile(r"(?:^|[^a-zA-Z])rank[_\-.]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NO_DUMP: Final = re.compile(
    r"\.(log|txt|err|out|html|md|py|toml|yaml|yml|csv|svg|png|gz|zip|tar|pid|lock|jsonl)$", re.IGNORECASE
)
_LIKE_A_DUMP: Final = re.compile(r"trace|dump|flight|(^|_)fr_|rank|\.(pkl|pickle)$", re.IGNORECASE)
_KEYS: Final = re.compile(rb'"(pg_config|pg_status|comm_lib_version|nccl_version|entries)"\s*:')
_SIDECAR_KEY: Final = re.compile(rb'"schema"\s*:\s*"steadyrun\.flight(-live)?/')


def rank_from_name(path: Path) -> int | None:
    """``nccl_trace_rank_node00_5`` and ``fr_rank_5.pkl`` are rank 5's: the number at the end, or after ``rank``."""
    if match := _OURS.match(path.name):
        return int(match[1])
    if _IN_RANK_FOLDER.fullmatch(path.name):
        match = _TRAILING.search(path.parent.name)
        return int(match[1]) if match else None
    stem = _SUFFIX.sub("", path.name)
    match = _TRAILING.search(stem) or _ANYWHERE.search(stem)
    return int(match[1]) if match else None


# -- finding -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class FoundDumps:
    """Files that may be dumps, sidecars, and everything else with the reason why it is left out."""

    dumps: tuple[Path, ...] = ()
    sidecars: tuple[Path, ...] = ()
    others: tuple[LoadedFile, ...] = ()


def find_dumps(paths: Sequence[Path]) -> FoundDumps:
    """Look through files and folders, at most MAX_DEPTH deep. A file named by the caller counts whatever its name."""
    dumps: list[Path] = []
    sidecars: list[Path] = []
    others: list[LoadedFile] = []
    seen: set[tuple[int, int]] = set()
    for path in paths:
        if not path.exists():
            others.append(LoadedFile(path, None, "unreadable", f"cannot read {path}: no such file or folder"))
        for file in _files(path):
            try:
                status = file.stat()
            except OSError as e:
                others.append(LoadedFile(file, None, "unreadable", f"cannot read {file}: {e.strerror or e}"))
                continue
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            kind, why = _kind_of(file, status.st_size, is_named=file == path)
            if kind == "dump":
                dumps.append(file)
            elif kind == "sidecar":
                sidecars.append(file)
            else:
                others.append(LoadedFile(file, None, kind, f"{file}: {why}"))
    return FoundDumps(tuple(dumps), tuple(sidecars), tuple(others))


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        if path.exists():
            yield path
        return
    count = 0
    for root, folders, names in os.walk(path):
        here = Path(root)
        if len(here.relative_to(path).parts) >= MAX_DEPTH:
            folders.clear()
        folders.sort()
        for name in sorted(names):
            count += 1
            if count > MAX_FILES:
                return
            yield here / name


def _kind_of(file: Path, size_bytes: int, *, is_named: bool) -> tuple[str, str]:
    """(``dump``, ``sidecar`` or a status, why)."""
    if not file.is_file():
        return "ignored", "not a regular file"
    like_a_dump = bool(_LIKE_A_DUMP.search(file.name)) and not _NO_DUMP.search(file.name)
    if size_bytes == 0:
        return ("dump", "") if is_named or like_a_dump else ("ignored", "empty, and not named like a dump")
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as f:
            head = f.read(4096) or b""
    except OSError as e:
        return "unreadable", f"cannot read it: {e.strerror or e}"
    if head[:1] == b"\x80":
        return "dump", ""
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
        if _SIDECAR_KEY.search(head):
            return "sidecar", ""
        if is_named or _KEYS.search(head) or (like_a_dump and rank_from_name(file) is not None):
            return "dump", ""
        return "ignored", "JSON, but not a flight recorder's dump"
    if is_named or (like_a_dump and rank_from_name(file) is not None):
        return "dump", ""
    return "ignored", "neither a dump nor named like one"


def _read_sidecar(path: Path) -> Sidecar:
    """Raises ValueError or OSError."""
    with open(path, "rb") as f:
        data = json.loads(f.read(MAX_SIDECAR_BYTES))
    if not isinstance(data, dict):
        raise ValueError("cannot read a sidecar: no JSON object")
    if str(data.get("schema")).startswith("steadyrun.flight-live/"):
        data = {**data, "schema": "steadyrun.flight/1", "dumps": (), "missing": ()}
    return sidecar_from_json(data)


# -- reading -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LoadedFlights:
    """What a set of dumps says.

    Attributes:
        inputs: (path, rank, status, detail) of every file, see ``LoadedFile``.
    """

    flights: dict[int, RankFlight]
    sidecars: dict[int, Sidecar]
    inputs: tuple[LoadedFile, ...]
    details: DumpFolder


def load_folder(
    paths: Sequence[Path],
    workers: int | None = None,
    progress: Progress | None = None,
    max_bytes: int = MAX_DUMP_BYTES,
    exceptions: Mapping[int, str] | None = None,
) -> LoadedFlights:
    """All ranks' flight records out of files and folders; one that cannot be read is said in ``inputs``.

    Args:
        workers: processes; None: one per processor if there is enough to read.
        progress: called with (files read, files in all).
        max_bytes: larger files are refused.
        exceptions: what ranks without a sidecar are known to have ended with (``Type: message``).
    """
    found = find_dumps(paths)
    sidecars: dict[int, Sidecar] = {}
    noted: dict[Path, tuple[Sidecar, DumpFile]] = {}
    inputs: list[LoadedFile] = list(found.others)
    for path in found.sidecars:
        try:
            sidecar = _read_sidecar(path)
        except (ValueError, OSError, RecursionError) as e:
            inputs.append(LoadedFile(path, rank_from_name(path), "unreadable", f"{path}: {e}"))
            continue
        inputs.append(LoadedFile(path, sidecar.rank, "used", "sidecar"))
        known = sidecars.get(sidecar.rank)
        if known is None or _newness(known) <= _newness(sidecar):
            sidecars[sidecar.rank] = sidecar
        noted.update({path.parent / file.file: (sidecar, file) for file in sidecar.dumps})
    known_by_word = {r: Sidecar(r, exception=text) for r, text in (exceptions or {}).items()}
    bundles = _bundles(found.dumps, {**known_by_word, **sidecars}, noted, max_bytes)
    merge = _Merge(sum(len(b.files) for b in bundles), progress)
    read_bundles(bundles, _workers(bundles, workers), merge.take)
    inputs += merge.inputs
    inputs.sort(key=lambda i: str(i.path))
    flights = dict(sorted(merge.flights.items()))
    return LoadedFlights(flights, sidecars, tuple(inputs), DumpFolder(merge.chosen, sidecars, flights, max_bytes))


def _newness(sidecar: Sidecar) -> tuple[int, float]:
    taken = max((file.taken_at_unix_s for file in sidecar.dumps), default=0.0)
    return (-1 if sidecar.attempt is None else sidecar.attempt, taken)


def _bundles(
    dumps: Sequence[Path],
    sidecars: Mapping[int, Sidecar],
    noted: Mapping[Path, tuple[Sidecar, DumpFile]],
    max_bytes: int,
) -> list[Bundle]:
    by_rank: dict[int, list[tuple[Path, DumpFile | None]]] = {}
    nameless: list[Bundle] = []
    for path in dumps:
        note = noted.get(path)
        rank = note[0].rank if note else rank_from_name(path)
        file = note[1] if note else _file_by_name(path)
        if rank is None:
            nameless.append(Bundle(None, ((path, file),), None, max_bytes))
        else:
            by_rank.setdefault(rank, []).append((path, file))
    named = [Bundle(rank, tuple(files), sidecars.get(rank), max_bytes) for rank, files in sorted(by_rank.items())]
    return named + nameless


def _file_by_name(path: Path) -> DumpFile | None:
    """``rank_3.flight.gloo.active.json`` says its recorder and kind also without its sidecar."""
    parts = path.name.split(".")
    if parts[0].startswith("rank_") and _OURS.match(path.name):
        parts = parts[1:]
    if parts[0] != "flight" or len(parts) < 3:
        return None
    kind = parts[2] if parts[2] in ("active", "exception", "watchdog") else "full"
    try:
        return DumpFile(path.name, parts[1], kind, path.stat().st_mtime)
    except OSError:
        return None


def _workers(bundles: Sequence[Bundle], wanted: int | None) -> int:
    if wanted is not None:
        return max(1, min(wanted, len(bundles)))
    if sum(_size_of(path) for bundle in bundles for path, _ in bundle.files) < _FEW_BYTES:
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), 16, len(bundles)))


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class _Merge:
    """Readings as they come, with what ranks have in common held once."""

    def __init__(self, files: int, progress: Progress | None) -> None:
        self.flights: dict[int, RankFlight] = {}
        self.chosen: dict[int, tuple[tuple[Path, DumpFile | None], ...]] = {}
        self.inputs: list[LoadedFile] = []
        self._files = files
        self._done = 0
        self._progress = progress
        self._ranks: dict[tuple[int, ...], tuple[int, ...]] = {}

    def take(self, index: int, reading: BundleReading) -> None:
        for flight, (rank, files) in zip(reading.flights, reading.chosen, strict=True):
            known = self.flights.get(rank)
            if known is None or known.entries < flight.entries:
                self.flights[rank] = self._shared(flight)
                self.chosen[rank] = files
        self.inputs += reading.files
        self._done += len(reading.files)
        if self._progress is not None:
            self._progress(min(self._done, self._files), self._files)

    def _shared(self, flight: RankFlight) -> RankFlight:
        groups = tuple(
            group if group.ranks is (one := self._ranks.setdefault(group.ranks, group.ranks))
            else dataclasses.replace(group, ranks=one)
            for group in flight.groups
        )  # fmt: skip
        return dataclasses.replace(flight, groups=groups)


class DumpFolder:
    """``FlightDetails`` over the files: reads a rank's dumps again when asked; not for several threads."""

    def __init__(
        self,
        files: Mapping[int, tuple[tuple[Path, DumpFile | None], ...]],
        sidecars: Mapping[int, Sidecar],
        flights: Mapping[int, RankFlight],
        max_bytes: int = MAX_DUMP_BYTES,
    ) -> None:
        self._files = files
        self._sidecars = sidecars
        self._flights = flights
        self._max_bytes = max_bytes
        self._read: OrderedDict[tuple[int, str], tuple[FlightOp, ...]] = OrderedDict()

    def files(self, rank: int) -> tuple[Path, ...]:
        """The dumps that the rank's flight record was made from."""
        return tuple(path for path, _ in self._files.get(rank, ()))

    def ops(self, rank: int, group: str, first_seq: int, last_seq: int) -> Sequence[FlightOp]:
        """See ``FlightDetails``; empty also when a file has changed or gone meanwhile."""
        key = (rank, group)
        ops = self._read.get(key)
        if ops is None:
            ops = self._read[key] = self._load(rank, group)
            while len(self._read) > 1 and sum(map(len, self._read.values())) > _CACHED_OPS:
                self._read.popitem(last=False)
        return [op for op in ops if first_seq <= op.seq <= last_seq]

    def course(self, rank: int, last: int) -> Sequence[FlightOp]:
        """See ``FlightDetails``; empty also when a file has changed or gone meanwhile."""
        return read_course(self._dumps(rank), rank, self._sidecars.get(rank), last)

    def _load(self, rank: int, group: str) -> tuple[FlightOp, ...]:
        return read_ops(self._dumps(rank), rank, self._sidecars.get(rank), group, 0, 1 << 53)

    def _dumps(self, rank: int) -> list[tuple[Dump, DumpFile | None]]:
        found = ((self._dump(path), file) for path, file in self._files.get(rank, ()))
        return [(dump, file) for dump, file in found if dump is not None]

    def _dump(self, path: Path) -> Dump | None:
        try:
            return load_dump(path, self._max_bytes)
        except (DumpError, MemoryError):
            return None
