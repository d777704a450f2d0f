"""From a rank's dumps to its ``RankFlight``: one pass over the entries, of which only what is not done is kept."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from steadyrun.collectors.flight.normal import (
    ConfiguredGroup,
    OpName,
    configured_groups,
    dtypes_of,
    integer,
    normal_entry,
    parse_op_name,
    ranks_of_only_group,
    sizes_of,
    status_of,
    text,
)
from steadyrun.collectors.flight.sidecar import DumpFile, LiveGroup, Sidecar
from steadyrun.core.flight import (
    MAX_FRAMES,
    MAX_OPS,
    WINDOW,
    FlightGroup,
    FlightOp,
    FlowCount,
    GroupStatus,
    OpState,
    RankFlight,
    window_hash,
)
from steadyrun.core.frames import is_user_frame
from steadyrun.core.records import Frame

__all__ = ["SummaryCache", "backends_of", "newest_ns", "read_course", "read_ops", "summarise"]

_MAX_STACK: Final = 128  # frames of one entry that are looked at
_MAX_FLOWS: Final = 4096
_MAX_KEPT: Final = 8192  # incomplete operations held while a dump is read
_WRONG: Final = (KeyError, TypeError, IndexError, AttributeError, ValueError)

_TORCH: Final = re.compile(r"(^|/)torch/")
_C10D: Final = re.compile(r"(^|/)torch/distributed/(distributed_c10d|c10d_logger|_functional_collectives)\.py\Z")
_COLLECTIVE_ERROR: Final = re.compile(
    r"gloo|nccl|ProcessGroup|DistBackendError|DistNetworkError|Connection (reset|closed|refused)|collective",
    re.IGNORECASE,
)
_GLOO_ERROR: Final = re.compile(r"gloo", re.IGNORECASE)


@dataclass(slots=True)
class SummaryCache:
    """What many ranks' dumps have in common, so that it is worked out and held once; for one thread."""

    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    names: dict[str, OpName] = field(default_factory=dict)
    places: dict[tuple[str, int, str], _Place] = field(default_factory=dict)
    stacks: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def trim(self) -> None:
        """Forget when it grew beyond what honest dumps need."""
        for kept in (self.names, self.places, self.stacks, self.texts):
            if len(kept) > 20_000:
                kept.clear()

    def text(self, value: str) -> str:
        """An equal text, the same object for all."""
        return self.texts.setdefault(value, value)


@dataclass(frozen=True, slots=True)
class _Place:
    """A frame as shown, and how well it names what the user called: 3 their code, 2 a package, 1 torch, 0 c10d."""

    shown: str
    worth: int


# -- one group of one recorder -----------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Kept:
    """An entry that is not done, as it stands in the dump."""

    entry: Mapping[str, Any]
    name: OpName
    seq: int
    created_ns: int
    sort_ns: int
    order: int
    state: OpState
    flow: tuple[int, int] | None = None
    flow_seq: int = 0
    more: list[Mapping[str, Any]] = field(default_factory=list)  # further members of a coalesced collective


@dataclass(slots=True)
class _Group:
    name: str
    backend: str
    desc: str
    index: int
    ranks: tuple[int, ...]
    seqs: list[int] = field(default_factory=list)
    last_seq: int = -1
    last_created_ns: int = 0
    done: list[tuple[int, int]] = field(default_factory=list)  # (seq, completed_ns or 0)
    kept: list[_Kept] = field(default_factory=list)
    flows: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (src, dst) -> [issued, open]
    coalesced: dict[tuple[bool, int], OpState] = field(default_factory=dict)
    window: int = -1
    window_ops: list[tuple[str, str]] = field(default_factory=list)
    windows: list[tuple[int, int]] = field(default_factory=list)
    has_all: bool = True  # its first operation is still in the ring
    has_frames: bool = False
    has_failed: bool = False
    # The newest that ended in a way that may have been an error: the arguments of its _Kept.
    retired: tuple[Mapping[str, Any], OpName, int, int, int, int] | None = None

    def close_window(self) -> None:
        if self.window_ops and len(self.windows) < 4096:
            self.windows.append((self.window, window_hash(self.window_ops)))
        self.window_ops = []

    def complete_windows(self) -> tuple[tuple[int, int], ...]:
        """Those of which the ring holds the first and the last number."""
        if not self.seqs:
            return ()
        first, last = min(self.seqs), self.last_seq
        return tuple(
            (w, h) for w, h in self.windows if (self.has_all or first <= w * WINDOW) and w * WINDOW + WINDOW - 1 <= last
        )


# -- one recorder's dump -----------------------------------------------------------------------------------------------
class _Reader:
    """One pass over one dump."""

    def __init__(self, dump: Mapping[str, Any], file: DumpFile | None, cache: SummaryCache, live: _Live) -> None:
        self.dump = dump
        self.file = file
        self.cache = cache
        self.groups: dict[tuple[str, str], _Group] = {}
        self.pg_ids: dict[int, tuple[str, str]] = {}
        self.configured = {g.name: g for g in configured_groups(dump, cache.ranks)}
        self.entries = 0
        self.damaged = 0
        self.has_frames = False
        self.has_timing = False
        self.any_done = False
        self.first_id: int | None = None
        self.problems: list[str] = []
        self._live = live
        self._frames: dict[int, _Place] = {}
        self._threads: dict[str, dict[str, str]] = {}
        self._sort_ns = 0
        # Backends whose states change, so that what is retired but not completed has failed. gloo's never do.
        self._changing = {"nccl"}
        self._judged: set[str] = set()
        self._index = 0
        self._sites: dict[int, str] = {}  # by the identity of an entry's list of frames, which the dump keeps alive

    def read(self) -> None:
        entries = self.dump.get("entries")
        if not isinstance(entries, list | tuple):
            entries = ()
        self.entries = len(entries)
        entries = _in_order(entries)
        self.first_id = integer(entries[0].get("record_id")) if entries and isinstance(entries[0], Mapping) else None
        self._read_from(entries)
        for group in self.groups.values():
            group.close_window()
            _settle_coalesced(group)
        if self.damaged:
            self.problems.append(f"{self.damaged} of {self.entries} entries could not be read")

    def _read_from(self, entries: Sequence[Any]) -> None:
        """Read all; an entry that is not as in format 2.10 is brought into that form first."""
        start, mended = 0, -1
        mending: list[Any] | None = None
        while True:
            try:
                self._take_all(entries if mending is None else mending, start)
                return
            except _WRONG:
                start = self._index
            entry = normal_entry(entries[start], start) if start != mended else None
            if entry is None:
                self.damaged += 1
                start += 1
                continue
            mending = list(entries) if mending is None else mending
            mending[start] = entry
            mended = start

    def _take_all(self, entries: Sequence[Any], start: int) -> None:
        """The pass over entries, 3 us for each: in one function, for every call costs a tenth of that.

        Of each entry all that can fail comes before the first change; ``_index`` tells the one that did.
        """
        names, groups, sites = self.cache.names, self.groups, self._sites
        index = start
        try:
            for index in range(start, len(entries)):
                entry = entries[index]
                label = entry["profiling_name"]
                name = names.get(label) or self._new_name(label)
                key = entry["process_group"]
                is_p2p = entry["is_p2p"]
                seq = entry["p2p_seq_id"] if is_p2p else entry["collective_seq_id"]
                state = entry["state"]
                created_ns = entry["time_created_ns"]
                if seq.__class__ is not int or created_ns.__class__ is not int or not 0 <= seq < 1 << 53:
                    raise TypeError
                group = groups.get((key[0], name.backend)) or self._new_group(key, name.backend, entry)
                completed_ns = entry.get("time_discovered_completed_ns")
                frames = entry.get("frames")
                site = ""
                if frames:
                    site = sites.get(id(frames)) or self._site(frames)

                if created_ns > self._sort_ns:
                    self._sort_ns = created_ns  # a clock that was set back must not change the recorder's order
                if state == "completed" or (completed_ns.__class__ is int and completed_ns):
                    done = True
                elif entry.get("retired") is True:
                    done = name.backend not in self._changing
                    if done:
                        group.retired = (entry, name, seq, created_ns, self._sort_ns, index)
                else:
                    done = False
                if done:
                    self.any_done = True
                    if entry.get("time_discovered_started_ns"):
                        self.has_timing = True
                elif state == "started":
                    self.has_timing = True
                if name.name == "coalesced":
                    group.coalesced[(bool(is_p2p), seq)] = OpState.DONE if done else _open_state(entry, state)
                if is_p2p:
                    self._take_p2p(group, entry, name, seq, created_ns, index, state, done)
                    continue
                group.seqs.append(seq)
                if seq >= group.last_seq:
                    group.last_seq = seq
                    group.last_created_ns = created_ns
                if seq // WINDOW != group.window:
                    group.close_window()
                    group.window = seq // WINDOW
                group.window_ops.append((name.name, site))
                if done:
                    group.done.append((seq, completed_ns if completed_ns.__class__ is int else 0))
                elif len(group.kept) < _MAX_KEPT:
                    kept_state = _open_state(entry, state)
                    group.kept.append(_Kept(entry, name, seq, created_ns, self._sort_ns, index, kept_state))
        finally:
            self._index = index

    def _new_name(self, label: Any) -> OpName:
        if label.__class__ is not str or len(label) > 256:
            raise TypeError
        name = self.cache.names[label] = parse_op_name(label)
        return name

    def _take_p2p(
        self, group: _Group, entry: Mapping[str, Any], name: OpName, seq: int, created_ns: int, index: int,
        state: str, done: bool,
    ) -> None:  # fmt: skip
        src, dst = _global_rank(group, name.src), _global_rank(group, name.dst)
        flow = (src, dst) if src is not None and dst is not None else None
        flow_seq = 0
        if flow is not None and len(group.flows) < _MAX_FLOWS:
            counts = group.flows.setdefault(flow, [0, 0])
            flow_seq = counts[0]
            counts[0] += 1
            if not done:
                counts[1] += 1
        if not done and len(group.kept) < _MAX_KEPT:
            kept = _Kept(entry, name, seq, created_ns, self._sort_ns, index, _open_state(entry, state), flow, flow_seq)
            group.kept.append(kept)

    def _new_group(self, key: Any, backend: str, entry: Mapping[str, Any]) -> _Group:
        name, desc = text(key[0]), text(key[1]) if len(key) > 1 else ""
        if len(self.groups) >= 8192 or not isinstance(key[0], str):
            raise TypeError
        if backend not in ("nccl", "gloo") and backend not in self._judged:
            self._judged.add(backend)
            entries = self.dump.get("entries") or ()
            if any(_is_completed(e, backend) for e in entries):
                self._changing.add(backend)
        known = self.configured.get(name)
        ranks = (known.ranks if known else ()) or self._live.ranks_of(name, desc)
        if not ranks and desc == "default_pg":
            ranks = ranks_of_only_group(self.dump)
        group = _Group(name, backend, desc or (known.desc if known else ""), len(self.groups), ranks)
        self.groups[(key[0], backend)] = group
        pg_id = integer(entry["pg_id"])
        if pg_id is not None:
            self.pg_ids.setdefault(pg_id, (key[0], backend))
        return group

    # -- call sites ----------------------------------------------------------------------------------------------------
    def _site(self, frames: Sequence[Any]) -> str:
        best, worth = "", -1
        for frame in frames[:_MAX_STACK]:
            place = self._frames.get(id(frame)) or self._place(frame)
            if place.worth > worth:
                best, worth = place.shown, place.worth
                if worth == 3:
                    break
        if best:
            self.has_frames = True
        if len(self._sites) < 4096:
            self._sites[id(frames)] = best
        return best

    def _place(self, frame: Any) -> _Place:
        place = _place_of(frame, self.cache)
        if len(self._frames) < 65536:
            self._frames[id(frame)] = place  # by identity: the dump keeps the frame alive, and entries share it
        return place

    def stack_of(self, entry: Mapping[str, Any]) -> tuple[str, ...]:
        """The frames to show: torch's own left out, unless there is nothing else."""
        frames = entry.get("frames")
        if not isinstance(frames, list | tuple):
            return ()
        places = [self._place(frame) for frame in frames[:_MAX_STACK]]
        shown = tuple([p.shown for p in places if p.worth >= 2 and p.shown][:MAX_FRAMES])
        return self.cache.stacks.setdefault(shown, shown)

    def op_of(self, group: _Group, kept: _Kept, *, with_stack: bool) -> FlightOp:
        """The operation as others read it."""
        entry, name, share = kept.entry, kept.name, self.cache.text
        frames = entry.get("frames")
        members = [entry, *kept.more]
        timeout_ms = integer(entry.get("timeout_ms"))
        started_ns = integer(entry.get("time_discovered_started_ns"))
        site = self._site(frames) if isinstance(frames, list | tuple) else ""
        return FlightOp(
            group=group.index,
            seq=kept.flow_seq if kept.flow is not None else kept.seq,
            name=share(name.name),
            state=kept.state,
            is_p2p=bool(entry["is_p2p"]),
            in_sizes=sum((sizes_of(e.get("input_sizes")) for e in members), ()),
            out_sizes=sum((sizes_of(e.get("output_sizes")) for e in members), ()),
            in_dtypes=sum((dtypes_of(e.get("input_dtypes")) for e in members), ()),
            out_dtypes=sum((dtypes_of(e.get("output_dtypes")) for e in members), ()),
            src=_global_rank(group, name.src),
            dst=_global_rank(group, name.dst),
            created_ns=kept.created_ns or None,
            started_ns=started_ns or None,
            thread=share(self._thread(entry)),
            site=share(site) if site else None,
            frames=self.stack_of(entry) if with_stack else (),
            timeout_s=timeout_ms / 1000 if timeout_ms is not None and timeout_ms > 0 else None,
        )

    def _thread(self, entry: Mapping[str, Any]) -> str:
        """The thread's name; a second thread of that name gets a number, ids being different on each rank."""
        name, ident = text(entry.get("thread_name"), 64), text(entry.get("thread_id"), 64)
        known = self._threads.setdefault(name, {})
        if ident not in known:
            known[ident] = name if not known else f"{name}#{len(known) + 1}"
        return known[ident]


def _open_state(entry: Mapping[str, Any], state: str) -> OpState:
    if entry.get("retired") is True:
        return OpState.FAILED
    return OpState.STARTED if state == "started" or entry.get("time_discovered_started_ns") else OpState.ISSUED


def _global_rank(group: _Group, rank: int | None) -> int | None:
    if rank is None:
        return None
    if group.ranks:
        return group.ranks[rank] if rank < len(group.ranks) else None
    return rank if group.desc == "default_pg" else None


def _place_of(frame: Any, cache: SummaryCache) -> _Place:
    if not isinstance(frame, Mapping):
        return _Place("", -1)
    file, line, function = text(frame.get("filename")), integer(frame.get("line")) or 0, text(frame.get("name"), 128)
    key = (file, line, function)
    place = cache.places.get(key)
    if place is None:
        # The file's own name only: nodes may keep the same code in different folders. A package's needs its folder.
        parts = file.rsplit("/", 2)
        short = "/".join(parts[-2:]) if parts[-1] == "__init__.py" else parts[-1]
        shown = f"{short}:{line} in {function}" if function else f"{short}:{line}"
        if not file:
            worth = -1
        elif is_user_frame(Frame(file, line, function)):
            worth = 3
        elif not _TORCH.search(file):
            worth = 2
        else:
            worth = 0 if _C10D.search(file) else 1
        place = cache.places[key] = _Place(shown if worth >= 0 else "", worth)
    return place


def _in_order(entries: Sequence[Any]) -> Sequence[Any]:
    """By ``record_id``, as torch writes them; others may not."""
    try:
        ids = [entry["record_id"] for entry in entries]
        if all(map(operator.le, ids, ids[1:])):
            return entries
    except _WRONG:
        pass
    keys = [(integer(e.get("record_id")) if isinstance(e, Mapping) else None, i) for i, e in enumerate(entries)]
    keys.sort(key=lambda k: (k[1] if k[0] is None else k[0], k[1]))
    return [entries[i] for _, i in keys]


def _is_completed(entry: Any, backend: str) -> bool:
    if not isinstance(entry, Mapping) or entry.get("state") != "completed":
        return False
    label = entry.get("profiling_name")
    return isinstance(label, str) and label.startswith(backend + ":")


def _settle_coalesced(group: _Group) -> None:
    """Give the members of a coalesced call the state of the call: torch tracks the end of the whole only."""
    if not group.coalesced:
        return
    left: list[_Kept] = []
    members: set[tuple[bool, int]] = set()
    for kept in group.kept:
        key = (bool(kept.entry["is_p2p"]), kept.seq)
        state = group.coalesced.get(key)
        if state is None:
            left.append(kept)
            continue
        if state is OpState.DONE:
            if kept.flow is not None:
                group.flows[kept.flow][1] -= 1
            continue
        if kept.name.name == "coalesced" and key in members:
            continue
        members.add(key)
        kept.state = state
        left.append(kept)
    group.kept = left


# -- groups as the rank knew them --------------------------------------------------------------------------------------
class _Live:
    """Membership from the sidecar: by name, else by a description that only one group has."""

    def __init__(self, sidecar: Sidecar | None) -> None:
        self.groups: tuple[LiveGroup, ...] = sidecar.groups if sidecar else ()
        self._by_name = {g.name: g for g in self.groups}
        by_desc: dict[str, list[LiveGroup]] = {}
        for g in self.groups:
            by_desc.setdefault(g.desc, []).append(g)
        self._by_desc = {d: found[0] for d, found in by_desc.items() if len(found) == 1 and d}

    def ranks_of(self, name: str, desc: str) -> tuple[int, ...]:
        group = self._by_name.get(name) or self._by_desc.get(desc)
        return group.ranks if group else ()


# -- the rank ----------------------------------------------------------------------------------------------------------
def summarise(
    dumps: Sequence[tuple[Mapping[str, Any], DumpFile | None]],
    rank: int,
    sidecar: Sidecar | None,
    cache: SummaryCache | None = None,
) -> RankFlight:
    """One rank's recorders, merged.

    Args:
        dumps: one per recorder; of a recorder's several the caller chooses, see ``folder``.
        rank: global.
        sidecar: what the agent noted, for membership, errors and clocks.
        cache: shared between ranks by whoever reads many.
    """
    cache = SummaryCache() if cache is None else cache
    cache.trim()
    live = _Live(sidecar)
    readers = [_Reader(dump, file, cache, live) for dump, file in dumps]
    for reader in readers:
        reader.read()
    exception = sidecar.exception if sidecar and _COLLECTIVE_ERROR.search(sidecar.exception) else ""
    if _GLOO_ERROR.search(exception):
        _fail_last_of_gloo(readers)
    groups = _number_groups(readers, live)
    has_frames = any(reader.has_frames for reader in readers)
    ops, more = _choose_ops(readers)
    pg_ids = {pg_id: reader.groups[key].index for reader in readers for pg_id, key in _known_ids(reader)}
    kinds = [_kind_of(reader) for reader in readers]
    problems = [problem for reader in readers for problem in reader.problems]
    problems += [kind.problem for kind in kinds if kind.problem]
    is_off = bool(readers) and all(kind.is_off for kind in kinds)
    if sidecar and sidecar.recorder_state == "off" and not any(reader.entries for reader in readers):
        is_off = True
    taken = [file.taken_at_unix_s for _, file in dumps if file]
    return RankFlight(
        rank=rank,
        groups=tuple(_flight_group(g, reader, has_frames) for g, reader in groups),
        ops=tuple(ops),
        more_ops=more,
        status=tuple(GroupStatus(*numbers) for reader in readers for numbers in status_of(reader.dump)),
        pg_ids=tuple(sorted(pg_ids.items())),
        recorders=tuple(dict.fromkeys(name for reader in readers for name in _recorders_of(reader))),
        entries=sum(reader.entries for reader in readers),
        version=next((v for v in (text(reader.dump.get("version"), 32) for reader in readers) if v), ""),
        is_active_only=any(kind.is_active_only for kind in kinds),
        is_off=is_off,
        is_cut=any(kind.is_cut for kind in kinds),
        has_frames=has_frames,
        has_timing=any(reader.has_timing for reader in readers),
        exception=exception[:2000],
        taken_at_unix_s=max(taken) if taken else None,
        node_minus_here_s=(sidecar.clock_offset_s or 0.0) if sidecar else 0.0,
        problems=tuple(problems[:16]),
    )


def _known_ids(reader: _Reader) -> Iterator[tuple[int, tuple[str, str]]]:
    return ((pg_id, key) for pg_id, key in reader.pg_ids.items() if key in reader.groups)


def _recorders_of(reader: _Reader) -> list[str]:
    if reader.file and reader.file.recorder:
        return [reader.file.recorder]
    return sorted(name for name in backends_of(reader.dump) if name)


def backends_of(dump: Mapping[str, Any]) -> frozenset[str]:
    """The backends that a dump's entries name; of a dump without entries, what its head tells, else none."""
    entries = dump.get("entries")
    labels: set[Any] = set()
    if isinstance(entries, list | tuple):
        try:
            labels = {entry["profiling_name"] for entry in entries}
        except _WRONG:
            labels = {text(entry.get("profiling_name")) for entry in entries if isinstance(entry, Mapping)}
    found = {x[:64].partition(":")[0] for x in labels if isinstance(x, str) and ":" in x[:64]}
    if not found and (text(dump.get("nccl_version")) or text(dump.get("comm_lib_version"))):
        found.add("nccl")
    return frozenset(sorted(found)[:8])


def newest_ns(dump: Mapping[str, Any]) -> int:
    """When the newest entry was made; 0 without any."""
    entries = dump.get("entries")
    if not isinstance(entries, list | tuple):
        return 0
    times = (integer(entry.get("time_created_ns")) for entry in entries[-64:] if isinstance(entry, Mapping))
    return max((t for t in times if t), default=0)


@dataclass(frozen=True, slots=True)
class _Kind:
    is_off: bool = False
    is_active_only: bool = False
    is_cut: bool = False
    problem: str = ""


def _kind_of(reader: _Reader) -> _Kind:
    """What the dump leaves out, from its content and from what the agent noted of it."""
    dump = reader.dump
    stop = getattr(dump, "stop", "")
    if stop:
        return _Kind(is_cut=True, problem=f"read up to where it is {stop}")
    active = reader.file is not None and reader.file.kind == "active"
    counters = list(status_of(dump))
    if "entries" not in dump and not getattr(dump, "is_json", False):
        return _Kind(is_cut=True, problem="the dump holds no entries (it was made without collectives)")
    if not reader.entries:
        if counters:  # counted, so it was on: nothing was in flight
            return _Kind(is_active_only=True)
        if reader.configured or active:
            return _Kind(is_active_only=active)
        if dump.get("pg_config"):
            return _Kind()
        return _Kind(is_off=True, problem="the recorder was off: set TORCH_FR_BUFFER_SIZE (TORCH_NCCL_TRACE_BUFFER_SIZE"
                     " before torch 2.8) above 0")  # fmt: skip
    if active or (not reader.any_done and (reader.first_id or 0) > 0):
        # Of a full ring the oldest is long done. Only gloo keeps everything when asked for active ones alone.
        return _Kind(is_active_only=not _is_gloo_alone(reader))
    return _Kind()


def _is_gloo_alone(reader: _Reader) -> bool:
    return all(backend == "gloo" for _, backend in reader.groups)


def _fail_last_of_gloo(readers: Sequence[_Reader]) -> None:
    """The rank met an error of gloo: what it did last there ended with it, though the recorder only says retired.

    A dump made at the exception may be older than that: then the first operation that is open since is the one.
    """
    candidates = [
        (group.retired[4:], group)
        for reader in readers
        for group in reader.groups.values()
        if group.backend == "gloo" and group.retired is not None
    ]
    newest = max((c[0] for c in candidates), default=None)
    since = [
        (kept, group)
        for reader in readers
        for group in reader.groups.values()
        for kept in group.kept
        if group.backend == "gloo" and kept.state is OpState.ISSUED
        if newest is None or (kept.sort_ns, kept.order) > newest
    ]
    if since:
        first, group = min(since, key=lambda k: (k[0].sort_ns, k[0].order))
        first.state = OpState.FAILED
        group.has_failed = True
        return
    if newest is None:
        return
    group = max(candidates, key=lambda c: c[0])[1]
    assert group.retired is not None
    failed = _Kept(*group.retired, OpState.FAILED)
    group.has_failed = True
    if not failed.entry["is_p2p"]:
        group.done = [(seq, at) for seq, at in group.done if seq != failed.seq]
    group.kept.append(failed)


def _number_groups(readers: Sequence[_Reader], live: _Live) -> list[tuple[_Group, _Reader | None]]:
    """All groups of the rank, numbered: those with operations, those only configured, those only the rank knew."""
    out: list[tuple[_Group, _Reader | None]] = []
    names: set[str] = set()
    for reader in readers:
        for group in reader.groups.values():
            group.index = len(out)
            group.has_all = reader.first_id == 0
            group.has_frames = reader.has_frames
            names.add(group.name)
            out.append((group, reader))
    for reader in readers:
        backends = {backend for _, backend in reader.groups} or set(_recorders_of(reader))
        backend = backends.pop() if len(backends) == 1 else ""
        for known in reader.configured.values():
            if known.name not in names:
                names.add(known.name)
                out.append((_bare(known, backend, len(out)), None))
    for g in live.groups:
        if g.name not in names and len(out) < 8192:
            names.add(g.name)
            out.append((_Group(g.name, g.backend, g.desc, len(out), g.ranks), None))
    return out


def _bare(known: ConfiguredGroup, backend: str, index: int) -> _Group:
    return _Group(known.name, backend, known.desc, index, known.ranks)


def _choose_ops(readers: Sequence[_Reader]) -> tuple[list[FlightOp], int]:
    """At most MAX_OPS, each group's oldest before another's second."""
    ranked: list[tuple[int, int, int, int, _Reader, _Group, _Kept]] = []
    for number, reader in enumerate(readers):
        for group in reader.groups.values():
            kept = _merge_coalesced(group)
            ranked.extend((place, k.sort_ns, number, k.order, reader, group, k) for place, k in enumerate(kept))
    ranked.sort(key=lambda r: r[:4])
    chosen = ranked[:MAX_OPS]
    chosen.sort(key=lambda r: r[1:4])
    # Whole stacks for the oldest of each group: with them for all, a rank's summary grows to several times its size.
    ops = [reader.op_of(group, kept, with_stack=not place) for place, _, _, _, reader, group, kept in chosen]
    return ops, len(ranked) - len(chosen)


def _merge_coalesced(group: _Group) -> list[_Kept]:
    """Collectives that were coalesced have one number: one operation with all their tensors."""
    if not group.coalesced:
        return group.kept
    out: list[_Kept] = []
    first: dict[int, _Kept] = {}
    for kept in group.kept:
        if kept.entry["is_p2p"] or (False, kept.seq) not in group.coalesced:
            out.append(kept)
        elif kept.seq not in first:
            first[kept.seq] = kept
            out.append(kept)
        elif len(first[kept.seq].more) < 64:
            first[kept.seq].more.append(kept.entry)
    return out


def _flight_group(group: _Group, reader: _Reader | None, has_frames: bool) -> FlightGroup:
    open_seqs = [k.seq for k in group.kept if not k.entry["is_p2p"]]
    first_open = min(open_seqs, default=None)
    done = [d for d in group.done if first_open is None or d[0] < first_open]
    newest = max(done, default=None)
    done_seq = newest[0] if newest else None
    if newest is None and first_open is not None and reader is not None and _kind_of(reader).is_active_only:
        done_seq = first_open - 1 if first_open > 0 else None
    windows = group.complete_windows() if group.has_frames == has_frames else ()
    return FlightGroup(
        name=group.name,
        desc=group.desc,
        ranks=_sorted(group.ranks),
        backend=group.backend,
        first_seq=min(group.seqs, default=None),
        issued_seq=group.last_seq if group.seqs else None,
        done_seq=done_seq,
        last_issued_ns=group.last_created_ns or None,
        last_done_ns=(newest[1] or None) if newest else None,
        windows=windows,
        flows=tuple(
            FlowCount(src, dst, issued, issued - still, group.has_all)
            for (src, dst), (issued, still) in group.flows.items()
        ),
        has_failed=group.has_failed or any(k.state is OpState.FAILED for k in group.kept),
    )


def _sorted(ranks: tuple[int, ...]) -> tuple[int, ...]:
    ordered = tuple(sorted(ranks))
    return ranks if ordered == ranks else ordered


# -- single entries ----------------------------------------------------------------------------------------------------
def read_ops(
    dumps: Sequence[tuple[Mapping[str, Any], DumpFile | None]],
    rank: int,
    sidecar: Sidecar | None,
    group: str,
    first_seq: int,
    last_seq: int,
) -> tuple[FlightOp, ...]:
    """The rank's collectives of the group *name* with these numbers, done or not, in order.

    ``FlightOp.group`` is the index that ``summarise`` gives for the same dumps.
    """
    cache = SummaryCache()
    live = _Live(sidecar)
    readers = [_Reader(dump, file, cache, live) for dump, file in dumps]
    for reader in readers:
        reader.read()
    _number_groups(readers, live)
    found: list[tuple[int, int, FlightOp]] = []
    for reader in readers:
        for wanted in reader.groups.values():
            if wanted.name != group:
                continue
            for op in _ops_between(reader, wanted, lambda seq: first_seq <= seq <= last_seq):
                found.append((op.seq, len(found), op))
    return tuple(op for _, _, op in sorted(found, key=lambda f: f[:2]))


def _ops_between(reader: _Reader, group: _Group, wants: Callable[[int], bool]) -> Iterator[FlightOp]:
    still = {(k.seq, id(k.entry)): k.state for k in group.kept}
    open_seqs = {k.seq: k.state for k in group.kept if not k.entry["is_p2p"]}
    entries = reader.dump.get("entries")
    for index, raw in enumerate(_in_order(entries) if isinstance(entries, list | tuple) else ()):
        entry = normal_entry(raw, index)
        if entry is None or entry["is_p2p"] or entry["process_group"][0] != group.name:
            continue
        name = parse_op_name(entry["profiling_name"])
        if name.backend != group.backend or not wants(entry["collective_seq_id"]):
            continue
        seq = entry["collective_seq_id"]
        state = still.get((seq, id(raw)), open_seqs.get(seq, OpState.DONE))
        kept = _Kept(entry, name, seq, entry["time_created_ns"], 0, index, state)
        yield dataclasses.replace(reader.op_of(group, kept, with_stack=True), state=state)


def read_course(
    dumps: Sequence[tuple[Mapping[str, Any], DumpFile | None]], rank: int, sidecar: Sidecar | None, last: int
) -> tuple[FlightOp, ...]:
    """The rank's *last* calls in all groups, done or not, in the order in which it made them.

    Empty where a dump has left out what was done. ``FlightOp.seq`` of sends and receives is torch's own number.
    """
    cache = SummaryCache()
    live = _Live(sidecar)
    readers = [_Reader(dump, file, cache, live) for dump, file in dumps]
    for reader in readers:
        reader.read()
    _number_groups(readers, live)
    if any(kind.is_active_only or kind.is_cut for kind in map(_kind_of, readers)):
        return ()
    found: list[tuple[int, int, int, FlightOp]] = []
    oldest_ns = 0  # before it one of the rings holds nothing any more
    for number, reader in enumerate(readers):
        newest_ns = 0  # a clock that was set back must not change the recorder's order
        entries = reader.dump.get("entries")
        ordered = _in_order(entries) if isinstance(entries, list | tuple) else ()
        first = max(0, len(ordered) - last)
        is_all = not first and reader.first_id in (0, None)
        for index, raw in enumerate(ordered[first:], first):
            entry = normal_entry(raw, index)
            if entry is None:
                continue
            name = parse_op_name(entry["profiling_name"])
            group = reader.groups.get((entry["process_group"][0], name.backend))
            if group is None:
                continue
            newest_ns = max(newest_ns, entry["time_created_ns"])
            if not is_all:
                oldest_ns, is_all = max(oldest_ns, newest_ns), True
            seq = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
            kept = _Kept(entry, name, seq, entry["time_created_ns"], newest_ns, index, OpState.DONE)
            found.append((newest_ns, number, index, reader.op_of(group, kept, with_stack=False)))
    found.sort(key=lambda f: f[:3])
    return tuple(op for at_ns, _, _, op in found[-last:] if at_ns >= oldest_ns)
