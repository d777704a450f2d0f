"""The flight recorders of a node's ranks in the moment of an incident: dumps in the incident's folder, and a summary.

A rank is asked in the order of what answers most surely: torch's own server (works with the main thread blocked and the
interpreter's lock held), then the rank's evidence thread for dumps with call sites, then files of torch's watchdog, and
what the rank left when it died. Nothing here sets torch's store key ``exception_dump``, which would end the job.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from steadyrun.collectors.evidence import Contribution, Target, read_exception
from steadyrun.collectors.flight.asking import FlightLimits, RankAsker, RawDump
from steadyrun.collectors.flight.handlers import LEGACY_NCCL
from steadyrun.collectors.flight.live import read_live
from steadyrun.collectors.flight.sidecar import DumpFile, Sidecar
from steadyrun.collectors.flight.summarise import summarise
from steadyrun.collectors.flight.unpickle import Dump, DumpError, load_dump
from steadyrun.collectors.process import ProcessReader
from steadyrun.core.boot import boot_id
from steadyrun.core.flight import RankFlight

__all__ = ["FlightSource"]

_BACKEND: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")
_EXCEPTION_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class FlightSource:
    """An ``EvidenceSource``. A rank without torch.distributed costs it a few look-ups of files."""

    run_id: str = ""
    limits: FlightLimits = field(default_factory=FlightLimits)
    process: ProcessReader = field(default_factory=ProcessReader)
    limit_s: float = 5.0

    def collect(self, target: Target, folder: Path, deadline_s: float) -> Contribution:
        """See ``EvidenceSource``; reading what came takes some 10 ms more, also past *deadline_s*."""
        live, why = read_live(target.rank_dir / "flight.json")
        asker = RankAsker(target, live, self.limits, deadline_s, self.process.state)
        if why:
            asker.missing.append(why)
        if not asker.has_traces():
            return _contribution(None, (), asker.missing)
        asker.ask()
        shelf = _Shelf(folder, target.rank, asker.missing)
        for _, raws in sorted(asker.found.items()):
            shelf.put_fullest(raws)
        for raw in asker.left:
            shelf.put_left(raw)
        has_groups = asker.live is not None and bool(asker.live.groups)
        if not has_groups and not any(k.entries for k in shelf.kept):
            shelf.clear()
            return _contribution(None, (), [why] if why else [])
        if asker.live is not None and asker.live.buffer_size == 0:
            asker.missing.append("it is switched off (TORCH_FR_BUFFER_SIZE=0), so that no collective is known")
        sidecar = self._sidecar(asker, target, shelf.files())
        flight = shelf.summary(sidecar)
        shelf.write_sidecar(sidecar)
        return _contribution(flight, shelf.names, asker.missing)

    def _sidecar(self, asker: RankAsker, target: Target, dumps: tuple[DumpFile, ...]) -> Sidecar:
        view, live, exit_ = target.view, asker.live, target.exit
        now_s, now_unix_s = time.monotonic(), time.time()
        open_here = [s for s in view.sections if s.lane == 0] if view is not None else []
        section = max(open_here, key=lambda s: s.since_s, default=None)
        record, _ = read_exception(target.rank_dir / "exception.json")
        size = live.buffer_size if live is not None else None
        return Sidecar(
            rank=target.rank,
            local_rank=target.local_rank,
            world_size=live.world_size if live is not None else None,
            host=(live.host if live is not None else "") or socket.gethostname(),
            boot_id=(live.boot_id if live is not None else "") or boot_id(),
            pid=target.pid,
            attempt=target.attempt,
            run_id=self.run_id,
            step=view.step if view is not None else None,
            section=section.name if section is not None else None,
            section_age_s=round(now_s - section.since_s, 3) if section is not None else None,
            groups=live.groups if live is not None else (),
            recorder_state="unknown" if size is None else "on" if size > 0 else "off",
            buffer_size=size,
            torch=live.torch if live is not None else "",
            gpu=target.gpu,
            unix_minus_mono_s=now_unix_s - now_s,
            process_state=asker.state,
            exit_code=exit_.code if exit_ is not None else None,
            exit_signal=exit_.signal if exit_ is not None else None,
            exception=f"{record.type}: {record.message}"[:_EXCEPTION_CHARS] if record is not None else "",
            dumps=dumps,
            missing=tuple(asker.missing),
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """A dump that was read, or not (then *dump* is None); ``file.file`` is empty when it could not be written."""

    file: DumpFile
    dump: Dump | None

    @property
    def entries(self) -> int:
        found = self.dump.get("entries") if self.dump is not None else None
        return len(found) if isinstance(found, Sequence) else 0


class _Shelf:
    """One rank's files in the incident's folder, and which of them its summary is made of."""

    def __init__(self, folder: Path, rank: int, missing: list[str]) -> None:
        self._folder, self._rank, self._missing = folder, rank, missing
        self.kept: list[_Kept] = []
        self.names: list[str] = []
        self._used: dict[str, _Kept] = {}

    def put_fullest(self, raws: Sequence[RawDump]) -> None:
        """Of one recorder's dumps the first that has entries; those before it stay as evidence of what was wrong."""
        for raw in raws:
            kept = self._put(raw)
            if kept.dump is not None and (kept.entries or raw.recorder not in self._used):
                self._used[raw.recorder] = kept
            if kept.entries:
                return

    def put_left(self, raw: RawDump) -> None:
        """A dump from before: kept in any case.

        The one that a failing rank made is its last word: what the recorder holds later comes from its teardown. A
        watchdog's may be old: it is used where its recorder has given nothing now.
        """
        kept = self._put(raw)
        used = self._used.get(kept.file.recorder)
        is_last_word = raw.kind == "exception" and kept.entries > 0
        if kept.dump is not None and (used is None or is_last_word or (kept.entries and not used.entries)):
            self._used[kept.file.recorder] = kept

    def _put(self, raw: RawDump) -> _Kept:
        dump = self._load(raw)
        recorder = raw.recorder or _recorder_of(dump)
        kind = "full" if raw.kind == "active" and dump is not None and _holds_finished(dump) else raw.kind
        name = f"rank_{self._rank}.flight.{recorder}{'' if kind == 'full' else '.' + kind}.{raw.suffix}"
        is_written = self._write(name, raw.content)
        kept = _Kept(DumpFile(name if is_written else "", recorder, kind, raw.taken_at_unix_s), dump)
        self.kept.append(kept)
        return kept

    def _load(self, raw: RawDump) -> Dump | None:
        what = f"the dump ({raw.kind}) of recorder {raw.recorder or '?'}"
        try:
            dump = load_dump(raw.content)
        except DumpError as e:
            self._missing.append(f"{what} cannot be read: {e}")
            return None
        if dump.is_cut:
            self._missing.append(f"{what} ends early: {dump.stop}")
        return dump

    def _write(self, name: str, content: bytes) -> bool:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(self._folder / name, flags, 0o600), "wb") as f:
                f.write(content)
        except OSError as e:
            self._missing.append(f"{name} could not be written into the incident's folder: {e.strerror}")
            return False
        if name not in self.names:
            self.names.append(name)
        return True

    def clear(self) -> None:
        """Nothing was recorded: leave no files."""
        for name in self.names:
            (self._folder / name).unlink(missing_ok=True)
        self.names.clear()

    def files(self) -> tuple[DumpFile, ...]:
        return tuple(k.file for k in self.kept if k.file.file)

    def summary(self, sidecar: Sidecar) -> RankFlight | None:
        """None where nothing could be read: a rank that is silent must not look like one that has done nothing."""
        used = list(self._used.values())
        used = [k for k in used if k.entries] or used  # a build with NCCL has its recorder even where all use gloo
        return summarise([(k.dump, k.file) for k in used if k.dump is not None], self._rank, sidecar) if used else None

    def write_sidecar(self, sidecar: Sidecar) -> None:
        self._write(f"rank_{self._rank}.flight.json", json.dumps(sidecar.to_json(), indent=1).encode())


def _contribution(flight: RankFlight | None, names: Sequence[str], missing: Sequence[str]) -> Contribution:
    return Contribution(flight, tuple(names), tuple(f"flight recorder: {text}" for text in missing))


def _holds_finished(dump: Dump) -> bool:
    """It names operations that are done, so that it is no choice of the active ones."""
    entries = dump.get("entries")
    if not isinstance(entries, Sequence):
        return False
    return any(isinstance(e, Mapping) and (e.get("retired") is True or e.get("state") == "completed") for e in entries)


def _recorder_of(dump: Dump | None) -> str:
    """After the backend in front of an operation's name; a watchdog that tells nothing is NCCL's."""
    entries = dump.get("entries") if dump is not None else None
    for entry in entries if isinstance(entries, Sequence) else ():
        if isinstance(entry, Mapping):
            backend, colon, _ = str(entry.get("profiling_name", "")).partition(":")
            if colon and _BACKEND.fullmatch(backend):
                return backend
    return LEGACY_NCCL
