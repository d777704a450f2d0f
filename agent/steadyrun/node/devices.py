"""What lies below the program on this node: collectors in the background, their events, and what they know of ranks.

The loop never waits for any of it. Collectors are made and polled in threads of their own; the kernel log's descriptor
is in the loop's selector, so that an Xid is known within the millisecond; all else is looked at when the board is.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from steadyrun.collectors.gpumap import RankDevice, RankProcess, devices_of_ranks
from steadyrun.collectors.host.memory import MemoryCollector
from steadyrun.collectors.host.pressure import PressureCollector
from steadyrun.collectors.host.processes import ProcessCollector
from steadyrun.collectors.host.space import Folder, SpaceCollector
from steadyrun.collectors.kernel.collector import KernelCollector
from steadyrun.collectors.kernel.events import KernelEvent
from steadyrun.collectors.kernel.live import KernelWatch, read_position
from steadyrun.collectors.metrics.spec import KERNEL_EVENTS, XID_CLASSES
from steadyrun.collectors.metrics.values import Values
from steadyrun.collectors.nic.collector import NicCollector
from steadyrun.collectors.nvml.collector import NvmlCollector
from steadyrun.collectors.nvml.reading import GpuReading
from steadyrun.collectors.protocol import Collector, Health
from steadyrun.collectors.registry import CollectorState, Registry
from steadyrun.core.clock import Clock
from steadyrun.core.records import DeviceEvent, to_json
from steadyrun.node.devicevalues import fill_collectors, fill_gpus, fill_host, fill_ports

__all__ = ["Devices", "DevicesPlan"]

log = structlog.get_logger()

POLL_S: Final = 0.5
PUMP_MESSAGES: Final = 100  # at a time in the loop: a flood of the kernel's takes it a few milliseconds
FIRST_LOOK_S: Final = 15.0  # collectors that have not answered by then are told as they are
MOST_EVENTS: Final = 2000  # kept for incidents
RECORDS_PER_MINUTE: Final = 200
XID_EVENT: Final = 8  # nvmlEventTypeXidCriticalError
_TOLD_OF_GPU: Final = (
    "index", "name", "uuid", "pci", "error", "temperature_c", "power_mw", "power_limit_mw", "sm_clock_mhz",
    "utilization_percent", "memory_used_bytes", "memory_total_bytes", "mig",
)  # fmt: skip


class Watcher(Protocol):
    """The loop's selector."""

    def watch(self, fd: int, then: Callable[[], None]) -> None: ...
    def unwatch(self, fd: int) -> None: ...


@dataclass(frozen=True, slots=True)
class DevicesPlan:
    """What is watched.

    Attributes:
        kernel_log: None for none; any_writer: believe what programs wrote into it, too (for tests).
        position: where it is kept how far the log was read, for the next agent on this machine; None for nowhere.
        folders: that the job writes to.
        root: of the machine's files, but for the kernel log and what NVML reads.
    """

    kernel_log: Path | None = Path("/dev/kmsg")
    any_writer: bool = False
    position: Path | None = None
    folders: tuple[Folder, ...] = ()
    root: Path = Path("/")


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the maker's thread made."""

    kernel: KernelCollector | None
    nvml: NvmlCollector | None
    nic: NicCollector
    space: SpaceCollector
    registry: Registry
    early: tuple[KernelEvent, ...]  # in the log before the job began


@dataclass(slots=True)
class _Budget:
    """So many records a minute; the rest is counted."""

    since_s: float = float("-inf")
    used: int = 0
    left_out: int = 0

    def has_room(self, now_s: float) -> bool:
        if now_s - self.since_s >= 60.0:
            self.since_s, self.used = now_s, 0
        self.used += 1
        if self.used > RECORDS_PER_MINUTE:
            self.left_out += 1
            return False
        return True


class Devices:
    """For the loop's thread, but for ``fill``, which is for any.

    Args:
        post: runs something in the loop, from any thread.
        record: writes a journal record: type, then fields.
        count: changes metric values, under their lock.
        nvml: what reads the GPUs, shared with others; None where there are none. Called in a thread.
    """

    def __init__(
        self,
        plan: DevicesPlan,
        node: str,
        clock: Clock,
        watcher: Watcher,
        post: Callable[[Callable[[], None]], None],
        record: Callable[..., None],
        say: Callable[[str], None],
        count: Callable[[Callable[[Values], None]], None],
        nvml: Callable[[], NvmlCollector | None] = lambda: None,
    ) -> None:
        self._plan, self._node, self._clock, self._watcher = plan, node, clock, watcher
        self._post, self._record, self._say, self._count = post, record, say, count
        self._get_nvml = nvml
        self._begun_s = clock.now_s()
        self._parts: _Parts | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._maker: threading.Thread | None = None
        self._fd: int | None = None
        self._next_poll_s = 0.0
        self._has_told = False
        self._events: deque[DeviceEvent] = deque(maxlen=MOST_EVENTS)
        self._budget = _Budget()
        self._processes: dict[int, RankProcess] = {}
        self._of_ranks: dict[int, RankDevice] = {}
        self._states: Mapping[str, CollectorState] = {}
        self._health: dict[str, Health] = {}

    # -- life ----------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Make and poll the collectors; returns at once."""
        self._maker = threading.Thread(target=self._make, name="steadyrun-devices", daemon=True)
        self._maker.start()

    def close(self) -> None:
        """End what can be ended; a thread that hangs in a driver is left behind."""
        if self._fd is not None:
            self._watcher.unwatch(self._fd)
            self._fd = None
        with self._lock:
            self._is_closed = True
            parts = self._parts
        if parts is not None:
            parts.registry.close()
        if self._maker is not None:
            self._maker.join(2.0)

    def _make(self) -> None:
        """In a thread: opening the journal instead of the kernel log may take seconds."""
        plan = self._plan
        kernel: KernelCollector | None = None
        early: tuple[KernelEvent, ...] = ()
        if plan.kernel_log is not None:
            kernel, early = self._open_kernel_log(plan.kernel_log)
        nvml = self._get_nvml()
        nic = NicCollector(plan.root)
        space = SpaceCollector(plan.folders, plan.root / "dev/shm")
        collectors: list[Collector] = [
            *([kernel] if kernel is not None else []),
            *([nvml] if nvml is not None else []),
            nic,
            MemoryCollector(plan.root),
            PressureCollector(plan.root),
            space,
            ProcessCollector(os.getpid(), proc=plan.root / "proc"),
        ]
        parts = _Parts(kernel, nvml, nic, space, Registry(collectors), early)
        with self._lock:  # so that ``close`` comes before all threads or after
            if self._is_closed:
                parts.registry.close()
                return
            self._parts = parts
            parts.registry.start()
        with contextlib.suppress(OSError):  # the loop may be over
            self._post(lambda: self._made(parts))

    def _open_kernel_log(self, path: Path) -> tuple[KernelCollector, tuple[KernelEvent, ...]]:
        """The log with all that the kernel still has of it; what is older than the job is set apart.

        What another agent of this machine had not read any more counts as new: it may be what ended that one.
        """
        known = read_position(self._plan.position) if self._plan.position is not None else None
        watch = KernelWatch(path, from_boot=True, any_facility=self._plan.any_writer)
        last = known.sequence if known is not None and known.boot_id == watch.boot_id != "" else None
        kernel = KernelCollector(watch, self._plan.position)
        if kernel.fileno() is not None:
            kernel.is_pumped = True
        kernel.drain_all()
        events = kernel.take_events()
        is_new = [
            (e.sequence is not None and last is not None and e.sequence > last) or (e.at_s or 0.0) >= self._begun_s
            for e in events
        ]
        kernel.give_back([e for e, new in zip(events, is_new, strict=True) if new])
        return kernel, tuple(e for e, new in zip(events, is_new, strict=True) if not new)

    def _made(self, parts: _Parts) -> None:
        if self._is_closed:
            return
        self._events.extend(self._of_kernel(e) for e in parts.early)
        if parts.kernel is not None:
            fd = parts.kernel.fileno()
            if fd is not None:
                self._watcher.watch(fd, self._pump)
                self._fd = fd
        self._next_poll_s = 0.0

    # -- events --------------------------------------------------------------------------------------------------------
    def _pump(self) -> None:
        """The kernel log is readable."""
        parts = self._parts
        assert parts is not None
        assert parts.kernel is not None
        parts.kernel.pump(PUMP_MESSAGES)
        if parts.kernel.fileno() is None and self._fd is not None:
            self._watcher.unwatch(self._fd)  # it cannot be read any more; its state says why
            self._fd = None
        self._take_kernel_events(parts.kernel)

    def _take_kernel_events(self, kernel: KernelCollector) -> None:
        for event in kernel.take_events():
            self._happened(self._of_kernel(event))

    def _take_nvml_events(self, parts: _Parts, now_s: float) -> None:
        """NVML tells of Xids, too: they count where the kernel log cannot be read."""
        if parts.nvml is None:
            return
        events = parts.nvml.take_events()
        if parts.kernel is not None and parts.kernel.watch.source != "none":
            return
        gpus = {g.index: g for g in self.gpus()}
        for told in events:
            if told.get("type") != XID_EVENT:
                continue
            index, code = told.get("index"), told.get("data", 0)
            gpu = gpus.get(index) if index is not None else None
            fields: dict[str, str | int | bool] = {"xid": code, "pci": gpu.pci if gpu is not None else ""}
            text = f"NVML event: Xid {code} of GPU {index if index is not None else '?'}"
            event = KernelEvent("xid", fields, text, now_s, self._clock.unix_s())
            self._happened(replace(self._of_kernel(event), source="nvml", gpu=index))

    def _happened(self, event: DeviceEvent) -> None:
        self._events.append(event)
        self._count(lambda values: _count_event(values, event))
        if not self._budget.has_room(self._clock.now_s()):
            return
        data = {k: v for k, v in to_json(event).items() if k not in ("node", "at_s", "at_unix_s")}
        left_out, self._budget.left_out = self._budget.left_out, 0
        self._record("device_event", **data, event_at_s=event.at_s, event_at_unix_s=event.at_unix_s, left_out=left_out)
        if event.health == Health.UNHEALTHY.value:
            self._say(f"steadyrun: {_line_of(event)}")

    def _of_kernel(self, event: KernelEvent) -> DeviceEvent:
        cls = event.effective_class
        pci, pid = event.word("pci"), event.number("pid")
        gpu = next((g.index for g in self.gpus() if g.pci == pci), None) if pci else None
        now_s = self._clock.now_s()
        return DeviceEvent(
            node=self._node,
            source="kernel_log",
            event=event.event,
            title=event.title,
            meaning=event.meaning,
            health=event.health.value,
            at_s=event.at_s if event.at_s is not None else now_s,
            at_unix_s=event.at_unix_s if event.at_unix_s is not None else self._clock.unix_s(),
            cls=cls.value if cls is not None else "",
            xid=event.number("xid"),
            pci=pci,
            gpu=gpu,
            rank=self._rank_of(pid, gpu),
            pid=pid,
            text=event.text,
            count=event.count,
        )

    def _rank_of(self, pid: int | None, gpu: int | None) -> int | None:
        """By its process, else by its GPU where only one rank uses that."""
        for rank, process in self._processes.items():
            if pid is not None and process.pid == pid:
                return rank
        users = [rank for rank, device in self._of_ranks.items() if gpu is not None and device.index == gpu]
        return users[0] if len(users) == 1 else None

    def watch_folder(self, label: str, path: Path) -> None:
        """The job writes there, too."""
        if self._parts is not None:
            self._parts.space.watch(Folder(label, path))

    # -- the loop's turns ----------------------------------------------------------------------------------------------
    def take_ranks(self, processes: Mapping[int, RankProcess]) -> None:
        """The ranks of this node now."""
        self._processes = dict(processes)
        self._of_ranks.clear()
        self._next_poll_s = 0.0

    def poll(self, now_s: float) -> None:
        """Called with the board; looks at what collectors have found since."""
        parts = self._parts
        if parts is None or now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + POLL_S
        self._states = parts.registry.results(now_s)
        if parts.kernel is not None:
            self._take_kernel_events(parts.kernel)
        self._take_nvml_events(parts, now_s)
        self._map_ranks()
        self._tell_changes()
        if not self._has_told:
            answered = all(s.checked_at_s is not None or s.is_stuck for s in self._states.values())
            if answered or now_s - self._begun_s > FIRST_LOOK_S:
                self._has_told = True
                self._tell_missing(parts)

    def _map_ranks(self) -> None:
        if len(self._of_ranks) == len(self._processes) and all(d.is_seen for d in self._of_ranks.values()):
            return
        gpus = self.gpus()
        if gpus:
            self._of_ranks = devices_of_ranks(self._processes, gpus, self._plan.root)

    def _tell_changes(self) -> None:
        """A part of the machine that becomes worse or well again: a record, and a line when it is unhealthy."""
        for name, state in self._states.items():
            health, before = state.result.health, self._health.get(name, Health.HEALTHY)
            if health is before or (state.checked_at_s is None and not state.is_stuck):
                continue
            self._health[name] = health
            if health is Health.UNKNOWN and not self._has_told:
                continue  # said with the missing sources
            result = state.result
            self._record(
                "device_health", collector=name, health=health, reason=result.reason, actions=list(result.actions)
            )
            # what the kernel tells while the job runs is said as an event; here, what stood before it
            if health is Health.UNHEALTHY and (name != "kernel_log" or not self._has_told):
                self._say(f"steadyrun: {self._node}: {result.reason}" + _to_do(result.actions))

    def _tell_missing(self, parts: _Parts) -> None:
        missing = self._missing(parts)
        source = parts.kernel.watch.source if parts.kernel is not None else "off"
        told = {name: {"health": s.result.health, "reason": s.result.reason} for name, s in self._states.items()}
        self._record("device_sources", kernel_log=source, collectors=told, missing=missing)
        if missing:
            self._say(f"steadyrun: not watched on {self._node}: {'; '.join(missing)}")

    def _missing(self, parts: _Parts) -> list[str]:
        """What cannot be watched here, and what would enable it."""
        out = []
        if parts.kernel is not None and parts.kernel.watch.source == "none":
            out.append(f"kernel log: {parts.kernel.watch.problem}")
        if parts.nvml is None:
            out.append("GPUs: no NVIDIA driver is loaded (load it, or give the container its GPUs: --gpus all)")
        for name, state in self._states.items():
            if state.result.health is Health.UNKNOWN and name != "kernel_log":
                hint = f" ({state.result.actions[0]})" if state.result.actions else ""
                out.append(f"{name}: {state.result.reason}{hint}")
        if not any(p.port > 0 for p in parts.nic.readings()) and "nic" not in self._unknown():
            out.append("RDMA ports: none in /sys/class/infiniband (load the card's driver, such as mlx5_ib)")
        return out

    def _unknown(self) -> frozenset[str]:
        return frozenset(n for n, s in self._states.items() if s.result.health is Health.UNKNOWN)

    # -- for others ----------------------------------------------------------------------------------------------------
    def gpus(self) -> tuple[GpuReading, ...]:
        """As they were read last; any thread."""
        parts = self._parts
        return parts.nvml.readings()[0] if parts is not None and parts.nvml is not None else ()

    def gpu_of(self, rank: int) -> str | None:
        """``GPU 3 (0000:cb:00)``, or None where it is not known."""
        device = self._of_ranks.get(rank)
        return device.label or None if device is not None else None

    def told(self) -> dict[str, Any]:
        """For the node's state file: what each collector says, what GPUs read now, which rank has which."""
        now_s = self._clock.now_s()
        return {
            "collectors": {
                name: {
                    **to_json(state.result),
                    "age_s": None if state.checked_at_s is None else round(now_s - state.checked_at_s, 1),
                }
                for name, state in self._states.items()
            },
            "gpus": [
                {**{name: getattr(g, name) for name in _TOLD_OF_GPU}, "throttled_by": list(g.throttled_by)}
                for g in self.gpus()
            ],
            "ranks": {str(rank): to_json(device) for rank, device in self._of_ranks.items()},
        }

    def gpu_indices(self) -> dict[int, str]:
        """Index of each rank's GPU, by rank; for metrics."""
        return {r: str(d.index) for r, d in self._of_ranks.items() if d.index is not None}

    def look_again(self) -> None:
        """Fresh facts for an incident."""
        if self._parts is not None:
            if self._parts.nvml is not None:
                self._parts.nvml.look_wholly()  # the node check before the next attempt need not do it then
            for name in self._parts.registry.names:
                if name in ("nvml", "memory", "nic", "space"):
                    self._parts.registry.check_soon(name)

    def evidence(self, since_s: float) -> tuple[DeviceEvent, ...]:
        """Events since then, and every trouble that stands now."""
        parts = self._parts
        if parts is None:
            return ()
        if parts.kernel is not None:
            parts.kernel.pump(PUMP_MESSAGES)
            self._take_kernel_events(parts.kernel)
        now_s = self._clock.now_s()
        self._states = parts.registry.results(now_s)
        happened = [
            replace(e, rank=e.rank if e.rank is not None else self._rank_of(e.pid, self._index_of(e)))
            for e in self._events
            if e.at_s >= since_s
        ]
        return (*happened, *self._standing(now_s))

    def _index_of(self, event: DeviceEvent) -> int | None:
        if event.gpu is not None or not event.pci:
            return event.gpu
        return next((g.index for g in self.gpus() if g.pci == event.pci), None)

    def _standing(self, now_s: float) -> Iterable[DeviceEvent]:
        unix_s = self._clock.unix_s()
        for name, state in self._states.items():
            if name == "kernel_log":
                continue  # its troubles are the events
            for trouble in state.result.troubles:
                if trouble.health not in (Health.UNHEALTHY, Health.DEGRADED):
                    continue
                pci = trouble.subject.removeprefix("gpu ") if trouble.subject.startswith("gpu ") else ""
                gpu = next((g.index for g in self.gpus() if pci and g.pci == pci), None)
                yield DeviceEvent(
                    self._node,
                    name,
                    "state",
                    trouble.subject or name,
                    trouble.reason,
                    trouble.health.value,
                    state.checked_at_s if state.checked_at_s is not None else now_s,
                    unix_s,
                    pci=pci if gpu is not None else "",
                    gpu=gpu,
                    rank=self._rank_of(None, gpu),
                )

    def fill(self, values: Values) -> None:
        """Metrics of the collectors; any thread, never blocks."""
        parts = self._parts
        if parts is None:
            return
        now_s, unix_less_mono_s = self._clock.now_s(), self._clock.unix_s() - self._clock.now_s()
        states = parts.registry.results(now_s)
        fill_collectors(values, states, unix_less_mono_s)
        fill_host(values, states)
        fill_ports(values, parts.nic.readings())
        fill_gpus(values, self.gpus())
        if parts.kernel is not None:
            values.raise_to("host_kernel_messages_lost_total", parts.kernel.watch.lost)


def _line_of(event: DeviceEvent) -> str:
    """One line: who, what and when it is not now."""
    who = f"rank {event.rank}, " if event.rank is not None else ""
    gpu = f"GPU {event.gpu} " if event.gpu is not None else ""
    return f"{event.node}: {who}{gpu}{event.title}: {event.meaning}"


def _to_do(actions: Sequence[str]) -> str:
    return f" (to do: {'; '.join(actions[:2])})" if actions else ""


def _count_event(values: Values, event: DeviceEvent) -> None:
    if event.event in KERNEL_EVENTS:
        values.add("host_kernel_events_total", event.count, event.event)
    if event.event == "xid":
        gpu = str(event.gpu) if event.gpu is not None else event.pci or "unknown"
        values.prepare("gpu_xid_errors_total", gpu=gpu)
        values.add("gpu_xid_errors_total", event.count, gpu, event.cls if event.cls in XID_CLASSES else "other")
        values.set("gpu_xid_last_timestamp_seconds", event.at_unix_s, gpu, str(event.xid))
