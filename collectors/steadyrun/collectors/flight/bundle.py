"""One rank's dump files: reading them, choosing among several of one recorder, and summing up what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from steadyrun.collectors.flight.normal import configured_groups, integer, status_of
from steadyrun.collectors.flight.sidecar import DumpFile, Sidecar
from steadyrun.collectors.flight.summarise import SummaryCache, backends_of, newest_ns, summarise
from steadyrun.collectors.flight.unpickle import MAX_DUMP_BYTES, Dump, DumpError, load_dump
from steadyrun.core.flight import RankFlight

__all__ = ["Bundle", "BundleReading", "LoadedFile", "choose_dumps", "rank_in", "read_bundle"]


class LoadedFile(NamedTuple):
    """What became of a file.

    Attributes:
        status: ``used``, ``cut``, ``recorder_off``, ``empty``, ``unreadable``, ``refused`` or ``ignored``.
        detail: what is wrong or special; empty for a plain dump.
    """

    path: Path
    rank: int | None
    status: str
    detail: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files that belong to one rank by their names; *rank* None where names tell nothing."""

    rank: int | None
    files: tuple[tuple[Path, DumpFile | None], ...]
    sidecar: Sidecar | None = None
    max_bytes: int = MAX_DUMP_BYTES


@dataclass(frozen=True, slots=True)
class BundleReading:
    """Flight records (usually one; more where contents contradict the names), their files, and all files' fates."""

    flights: tuple[RankFlight, ...] = ()
    chosen: tuple[tuple[int, tuple[tuple[Path, DumpFile | None], ...]], ...] = ()
    files: tuple[LoadedFile, ...] = ()


@dataclass(slots=True)
class _Candidate:
    path: Path
    file: DumpFile | None
    dump: Dump
    rank: int
    recorders: frozenset[str]
    fullness: tuple[int, ...]


def rank_in(dump: Mapping[str, object], cache: SummaryCache, named: int | None) -> int | None:
    """The global rank by the dump's content: said outright, or the only one that is in all of its groups.

    Args:
        named: by the file's name; stands unless the content contradicts it.
    """
    for key in ("rank", "global_rank"):
        told = integer(dump.get(key))
        if told is not None and 0 <= told < 1 << 20:
            return told
    groups = sorted((g.ranks for g in configured_groups(dump, cache.ranks) if g.ranks), key=len)
    if not groups or (named is not None and all(named in ranks for ranks in groups)):
        return named
    left = set(groups[0][:4096])
    for ranks in groups[1:]:
        if len(left) <= 1:
            break
        left.intersection_update(ranks)
    return left.pop() if len(left) == 1 else named


def read_bundle(bundle: Bundle, cache: SummaryCache) -> BundleReading:
    """Read the files one after the other; of one recorder's several only the fullest is kept in memory."""
    fates: dict[Path, LoadedFile] = {}
    kept: dict[int, list[_Candidate]] = {}
    for path, file in bundle.files:
        try:
            dump = load_dump(path, bundle.max_bytes)
            rank = rank_in(dump, cache, bundle.rank)
        except DumpError as e:
            fates[path] = LoadedFile(path, bundle.rank, e.status, str(e))
            continue
        except MemoryError:
            fates[path] = LoadedFile(path, bundle.rank, "refused", f"{path}: needs more memory than a dump may")
            continue
        if rank is None:
            text = f"{path}: cannot tell whose it is: neither its name nor its groups say; name it like fr_rank_3"
            fates[path] = LoadedFile(path, None, "ignored", text)
            continue
        recorders = frozenset([file.recorder]) if file and file.recorder else backends_of(dump)
        new = _Candidate(path, file, dump, rank, recorders, _fullness(dump, file))
        kept[rank], dropped = choose_dumps([*kept.get(rank, []), new])
        for loser, winner in dropped:
            text = f"{winner.path.name} holds more of the same recorder" if winner else "holds nothing"
            fates[loser.path] = LoadedFile(loser.path, rank, "ignored", text)
    flights, chosen = [], []
    for rank, candidates in kept.items():
        sidecar = bundle.sidecar if bundle.sidecar and bundle.sidecar.rank == rank else None
        try:
            flight = summarise([(c.dump, c.file) for c in candidates], rank, sidecar, cache)
        except Exception as e:  # a fault of ours, met by one rank's dumps: the others' count all the same
            fates.update({c.path: LoadedFile(c.path, rank, "unreadable", f"{c.path}: {e!r}"[:500]) for c in candidates})
            continue
        flights.append(flight)
        chosen.append((rank, tuple((c.path, c.file) for c in candidates)))
        for c in candidates:
            fates[c.path] = _fate(c, flight, bundle.rank)
    return BundleReading(tuple(flights), tuple(chosen), tuple(fates[path] for path, _ in bundle.files if path in fates))


def choose_dumps(
    candidates: Sequence[_Candidate],
) -> tuple[list[_Candidate], list[tuple[_Candidate, _Candidate | None]]]:
    """One dump per recorder, and the others each with the one preferred to it."""
    kept: list[_Candidate] = []
    dropped: list[tuple[_Candidate, _Candidate | None]] = []
    for new in sorted(candidates, key=lambda c: c.fullness, reverse=True):
        better = next((k for k in kept if _same_recorder(k, new)), None)
        if better is None:
            kept.append(new)
        else:
            dropped.append((new, better))
    return kept, dropped


def _same_recorder(fuller: _Candidate, other: _Candidate) -> bool:
    """A dump that does not say whose it is holds no entries: beside a fuller one it adds nothing."""
    return not other.recorders or not fuller.recorders.isdisjoint(other.recorders)


def _fullness(dump: Dump, file: DumpFile | None) -> tuple[int, ...]:
    """Sorts dumps of one recorder: whole before cut, newest, all before active only, with members, with call sites."""
    entries = dump.get("entries")
    entries = entries if isinstance(entries, list | tuple) else ()
    last = entries[-1] if entries and isinstance(entries[-1], Mapping) else {}
    config = dump.get("pg_config")
    has_ranks = isinstance(config, Mapping) and any(
        isinstance(g, Mapping) and g.get("ranks") not in (None, "", "[]", []) for g in list(config.values())[:64]
    )
    return (
        int(bool(entries)),
        int(not dump.is_cut),
        newest_ns(dump),
        int(file is None or file.kind != "active"),
        int(has_ranks),
        int(bool(last.get("frames"))),
        len(entries),
        int(any(status_of(dump))),
    )


def _fate(candidate: _Candidate, flight: RankFlight, named: int | None) -> LoadedFile:
    notes = []
    if named is not None and named != candidate.rank:
        notes.append(f"its name says rank {named}, its groups rank {candidate.rank}")
    if candidate.dump.is_cut:
        notes.append(f"read up to where it is {candidate.dump.stop}")
        return LoadedFile(candidate.path, candidate.rank, "cut", "; ".join(notes))
    if flight.is_off and not candidate.dump.get("entries"):
        notes.append("the recorder was switched off (set TORCH_FR_BUFFER_SIZE above 0)")
        return LoadedFile(candidate.path, candidate.rank, "recorder_off", "; ".join(notes))
    notes += [p for p in flight.problems if p not in notes]
    return LoadedFile(candidate.path, candidate.rank, "cut" if flight.is_cut else "used", "; ".join(notes))
