"""What dead runs left: files in /dev/shm, cgroups of injected faults, processes without their agent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from steadyrun.ctl.checks.check import Check, Host, ok, run_all, warn
from steadyrun.ctl.console import size
from steadyrun.node.sweep import (
    MARKER_NAME,
    ProcessEntry,
    ShmFile,
    is_tagged,
    list_shm,
    remove_shared_memory,
    scan_processes,
    stale_shm,
)
from steadyrun.testing.faults import CGROUP_PREFIX

__all__ = ["checks", "fix"]


def checks(host: Host) -> list[Check]:
    """The group's lines."""
    return run_all(host, (_shm_files, _processes, _cgroups))


def fix(host: Host) -> list[str]:
    """Remove files and empty cgroups whose makers are dead, and say which; processes are left to their owner."""
    nameless, _ = _stale_files(host)
    keep = {(f.name, f.inode) for f in nameless}
    removed = [f"{host.shm}/{n}" for n in remove_shared_memory(before=keep, shm=host.shm, proc=host.proc)]
    for group in _dead_groups(host):
        with contextlib.suppress(OSError):
            group.rmdir()
            removed.append(str(group))
    return removed


def _stale_files(host: Host) -> tuple[list[ShmFile], list[ShmFile]]:
    """Files of this user whose name does not tell their maker, and those whose maker is dead."""
    live = {entry.pid for entry in scan_processes(host.proc).values() if not entry.is_dead}
    files = list_shm(host.shm)
    nameless = stale_shm(files, (), os.getuid(), live, ())  # () : files named by a pid are nobody's we know
    both = stale_shm(files, (), os.getuid(), live, None)
    return nameless, [f for f in both if f not in nameless]


def _shm_files(host: Host) -> Check:
    _, stale = _stale_files(host)
    if not stale:
        return ok("shared memory", f"no file of a dead process in {host.shm}")
    total = 0
    for file in stale:
        with contextlib.suppress(OSError):
            total += (host.shm / file.name).stat().st_size
    some = ", ".join(f.name for f in stale[:3])
    text = f"{len(stale)} file(s) of dead processes in {host.shm}, {size(total)}: {some}"
    return warn("shared memory", text, "steadyctl doctor --fix removes those that nobody has open")


def _processes(host: Host) -> Check:
    """Processes of runs (by their marker) that no agent is above of any more."""
    processes = scan_processes(host.proc)
    orphans = [(e, marker) for e, marker in _marked(host, processes) if not _has_agent(e, processes, host)]
    if not orphans:
        return ok("processes", "no process of a run without its agent")
    some = "; ".join(f"{e.pid} {e.command} of {marker}" for e, marker in orphans[:3])
    pids = " ".join(str(e.pid) for e, _ in orphans[:20])
    return warn("processes", f"{len(orphans)} without their agent: {some}", f"look at them, then: kill -9 {pids}")


def _marked(host: Host, processes: Mapping[int, ProcessEntry]) -> Iterator[tuple[ProcessEntry, str]]:
    """Processes that descend from a rank, and the run they belong to where their environment still says it."""
    is_here = host.proc == Path("/proc")
    for entry in processes.values():
        if entry.is_dead:
            continue
        marker = _marker_of(entry, host)
        if marker or (is_here and is_tagged(entry.pid)):
            yield entry, marker or "a run"


def _marker_of(entry: ProcessEntry, host: Host) -> str:
    if entry.state == "D":  # reading its environment may hang
        return ""
    try:
        environ = (host.proc / str(entry.pid) / "environ").read_bytes()
    except OSError:
        return ""
    key = f"{MARKER_NAME}=".encode()
    found = (item[len(key) :] for item in environ.split(b"\0") if item.startswith(key))
    return next(found, b"").decode(errors="replace")


def _has_agent(entry: ProcessEntry, processes: Mapping[int, ProcessEntry], host: Host) -> bool:
    """Somebody above it is a steadyrun launcher; escaped processes are handed to it as the subreaper."""
    above = processes.get(entry.ppid)
    for _ in range(64):
        if above is None or above.pid == 1:
            return False
        words = (host.read(host.proc / str(above.pid) / "cmdline") or "").split("\0")
        if any(Path(w).name == "steadyrun" or w.startswith("steadyrun.") for w in words):
            return True
        above = processes.get(above.ppid)
    return False


def _dead_groups(host: Host) -> list[Path]:
    root = host.sys / "fs" / "cgroup"
    own = [line.split(":", 2)[-1] for line in (host.read(host.proc / "self" / "cgroup") or "").splitlines()]
    places = {root / controller / path.lstrip("/") for controller in ("memory", "") for path in own}
    places |= {place.parent for place in places if place != root}
    found = {g for place in places if place.is_dir() for g in place.glob(f"{CGROUP_PREFIX}*")}
    return sorted(g for g in found if not (host.proc / g.name.removeprefix(CGROUP_PREFIX)).exists())


def _cgroups(host: Host) -> Check:
    dead = _dead_groups(host)
    if not dead:
        return ok("cgroups", "none of an injected fault")
    return warn("cgroups", f"{len(dead)} of injected faults, e.g. {dead[0]}", "steadyctl doctor --fix removes them")
