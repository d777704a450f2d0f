"""What lies at the paths that were given: which files are dumps, which are logs, which folders steadyrun wrote."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from steadyrun.core.records import Evidence
from steadyrun.postmortem.case import Input, InputStatus
from steadyrun.postmortem.runfolder import (
    Incident,
    is_incident_folder,
    is_run_folder,
    newest_incident,
    read_incident,
    read_last_attempt,
)

__all__ = ["Found", "LogFile", "find_material", "rank_from_path"]

MAX_FILES: Final = 200_000
MAX_DEPTH: Final = 8
HEAD_BYTES: Final = 512
MAX_RANK: Final = 1 << 20

# What the agent writes beside the evidence, and what is in evidence.json already.
_OWN_FILES: Final = re.compile(
    r"(rank_\d+\.)?(sections|proc|exception|loaded)\.json|(rank_\d+\.)?(stacks|log_tail)\.txt|report\.html"
    r"|(evidence|verdict|timeouts|truth)\.json|thread_exceptions\.jsonl|faults\.jsonl"
)
_LOG_NAME: Final = re.compile(
    r"\.(log|out|err|txt)(\.\d{1,3})?$|^(std)?(out|err)(put|or)?$|^log(s|file)?$", re.IGNORECASE
)
_DUMP_NAME: Final = re.compile(
    r"nccl_trace|comm_lib_trace|flight|(^|_)fr_|_dump_|trace_rank|\.(pkl|pickle|fr|json)(\.|$)", re.IGNORECASE
)
_RANK_NAME: Final = re.compile(r"(?:^|[^a-z])(?:rank|worker|proc)[_\-.]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NUMBER_NAME: Final = re.compile(r"\d{1,7}")


@dataclass(frozen=True, slots=True)
class LogFile:
    """A log, and whose it seems to be.

    Attributes:
        is_local_rank: the number is torchrun's local rank, so that what the lines say goes first.
    """

    path: Path
    rank: int | None = None
    is_local_rank: bool = False


@dataclass(slots=True)
class Found:
    """Everything at some paths, sorted; each file once."""

    incidents: list[Incident] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    attempts: list[Evidence] = field(default_factory=list)
    dumps: list[Path] = field(default_factory=list)
    notes: list[Path] = field(default_factory=list)
    logs: list[LogFile] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    seen: set[tuple[int, int]] = field(default_factory=set)

    def is_new(self, path: Path) -> bool:
        """Links and paths given twice count once."""
        try:
            status = path.stat()
        except OSError:
            return True
        key = (status.st_dev, status.st_ino)
        if key in self.seen:
            return False
        self.seen.add(key)
        return True


def find_material(paths: Sequence[Path]) -> Found:
    """Sort what lies at *paths*; what is no input of ours is said in ``inputs``."""
    found = Found()
    for path in paths:
        _look(path, found)
    return found


def _look(path: Path, found: Found) -> None:
    if path.is_dir():
        _look_in(path, found)
    elif path.is_file():
        if path.name in ("evidence.json", "verdict.json"):
            _take_incident(path.parent, found)
        else:
            _sort_file(path, found)
    else:
        text = "no such file" if not path.exists() else "neither a file nor a folder"
        found.inputs.append(Input(path, None, InputStatus.UNREADABLE, text))


def _look_in(folder: Path, found: Found) -> None:
    if is_incident_folder(folder):
        _take_incident(folder, found)
        return
    if is_run_folder(folder):
        _take_run(folder, found)
        return
    latest = folder / "latest"
    if is_run_folder(latest):
        _take_run(latest.resolve(), found)
        return
    for file in _walk(folder, found):
        _sort_file(file, found)


def _walk(folder: Path, found: Found) -> Iterator[Path]:
    """Files below *folder*; incidents in between are taken whole. Links to folders are not followed."""
    count = 0
    base = len(folder.parts)
    for root, folders, names in os.walk(folder):
        here = Path(root)
        if here != folder and is_incident_folder(here):
            folders.clear()
            _take_incident(here, found)
            continue
        if len(here.parts) - base >= MAX_DEPTH:
            folders.clear()
        folders.sort()
        for name in sorted(names):
            count += 1
            if count > MAX_FILES:
                text = f"more than {MAX_FILES} files: the rest was left out"
                found.inputs.append(Input(folder, None, InputStatus.IGNORED, text))
                return
            yield here / name


def _take_incident(folder: Path, found: Found) -> None:
    if not found.is_new(folder):
        return
    incident = read_incident(folder)
    found.incidents.append(incident)
    found.inputs += incident.inputs
    for path in sorted(folder.iterdir()):
        if path.is_file() and not _OWN_FILES.fullmatch(path.name):
            _sort_file(path, found)


def _take_run(run: Path, found: Found) -> None:
    if not found.is_new(run):
        return
    newest = newest_incident(run)
    if newest is not None:
        _take_incident(newest, found)
        return
    found.runs.append(run)
    evidence, folders, inputs = read_last_attempt(run)
    found.inputs += inputs
    if evidence is not None:
        found.attempts.append(evidence)
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.is_file() and not _OWN_FILES.fullmatch(path.name):
                _sort_file(path, found)


def _sort_file(path: Path, found: Found) -> None:
    """By content where it can be told, by name else."""
    if not (path.is_file() and found.is_new(path)):
        return
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            head = f.read(HEAD_BYTES)
    except OSError as e:
        found.inputs.append(Input(path, None, InputStatus.UNREADABLE, e.strerror or str(e)))
        return
    if path.name == "meta.json":
        found.notes.append(path)
        return
    if _OWN_FILES.fullmatch(path.name) or path.suffix in (".html", ".jsonl", ".py", ".md", ".gz", ".zip", ".tar"):
        found.inputs.append(Input(path, None, InputStatus.IGNORED, "", size))
        return
    has_log_name = _LOG_NAME.search(path.name) is not None
    is_pickle = head.startswith(b"\x80")
    is_text = not is_pickle and b"\0" not in head
    looks_like_dump = not is_text or head.lstrip()[:1] in (b"", b"{") or _DUMP_NAME.search(path.name) is not None
    if is_pickle or (looks_like_dump and not has_log_name):
        found.dumps.append(path)
    elif not head:
        found.inputs.append(Input(path, rank_from_path(path)[0], InputStatus.EMPTY))
    elif not is_text:
        found.inputs.append(Input(path, None, InputStatus.IGNORED, "neither a dump nor text", size))
    else:
        rank, is_local = rank_from_path(path)
        found.logs.append(LogFile(path, rank, is_local))


def rank_from_path(path: Path) -> tuple[int | None, bool]:
    """(the rank that a log's name or folder tells, whether it may be a local rank only).

    ``rank_3.log``, ``rank_3/stderr.log``; torchrun's ``attempt_0/3/stderr.log`` has local ranks.
    """
    for name in (path.name, path.parent.name):
        m = _RANK_NAME.search(name)
        if m is not None and int(m[1]) < MAX_RANK:
            return int(m[1]), "local" in name.lower()
    if _NUMBER_NAME.fullmatch(path.parent.name) and path.name in ("stdout.log", "stderr.log"):
        return int(path.parent.name), True
    return None, False
