"""What is known about a fault and what was concluded: evidence in, verdict out. Plain data, JSON both ways."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from steadyrun.core.board import OpenSection
from steadyrun.core.classes import Action, FaultClass, Mode
from steadyrun.core.flight import RankFlight, flight_from_json

__all__ = [
    "DeviceEvent",
    "Evidence",
    "ExceptionRecord",
    "ExitRecord",
    "Finding",
    "Frame",
    "OomRecord",
    "ProcessFacts",
    "RankEvidence",
    "Suspicion",
    "ThreadStack",
    "Verdict",
    "to_json",
]

VERDICT_SCHEMA = "steadyrun.verdict/1"


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack: ``file:line in function``."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread's Python stack, most recent call first; ``is_main`` marks the main thread."""

    thread: str
    frames: tuple[Frame, ...]
    is_main: bool = False


@dataclass(frozen=True, slots=True)
class ExitRecord:
    """How a process ended.

    Attributes:
        code: the exit status, or None when a signal ended it.
        signal: its number, or None.
        at_s: CLOCK_MONOTONIC seconds when the agent saw it (pidfd).
        by_us: the agent itself had signalled it before.
    """

    code: int | None
    signal: int | None
    at_s: float
    by_us: bool = False


@dataclass(frozen=True, slots=True)
class ExceptionRecord:
    """An uncaught exception, written by the rank itself before it dies.

    Attributes:
        type: qualified name, e.g. ``ValueError`` or ``torch.OutOfMemoryError``.
        message: first 4,000 characters.
        traceback_hash: hash over type and (file name, function, line) of each frame; equal for the same program error.
        frames: most recent call first.
        step: newest step when it was raised, or None.
        at_unix_s: wall time.
    """

    type: str
    message: str
    traceback_hash: str
    frames: tuple[Frame, ...]
    step: int | None
    at_unix_s: float


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What /proc says. ``state`` is one of R S D T t Z X; ``cpu_s`` user+system seconds so far; ``rss_bytes`` resident.

    ``dead_main`` : the main thread is a zombie while others live. ``children``: (pid, state, command) of descendants.
    """

    state: str
    wchan: str
    threads: int
    cpu_s: float
    rss_bytes: int
    dead_main: bool = False
    children: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class OomRecord:
    """Proof (or not) that a SIGKILL came from the kernel's out-of-memory killer.

    Attributes:
        killed: True: it was; False: counters unchanged and the kernel log is silent; None: neither could be read.
        source: ``cgroup memory.events``, ``cgroup v1 memory.oom_control``, ``kernel log`` or ``exception``.
        detail: one line for a person.
    """

    killed: bool | None
    source: str
    detail: str


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Why the watchdog doubts a rank.

    Attributes:
        kind: ``section`` ``no_progress`` ``never_reported`` ``teardown`` ``stopped`` ``raised``.
        section: name of the overdue section, or None outside all.
        since_s: CLOCK_MONOTONIC seconds of the last sign of progress.
        limit_s: the limit that was passed.
        accepted: the limit was given or calibrated; it alone allows to act.
        is_soft: the limit only asks for a look; evidence of a hang is needed to act.
    """

    rank: int
    kind: str
    section: str | None
    since_s: float
    limit_s: float
    accepted: bool = False
    is_soft: bool = False


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """All that was collected about one rank; None or empty where a source gave nothing (then ``missing`` says why)."""

    rank: int
    local_rank: int
    node: str
    pid: int
    attempt: int
    step: int | None = None
    step_at_s: float | None = None
    attached: bool = False
    finished: bool = False
    sections: tuple[OpenSection, ...] = ()
    exit: ExitRecord | None = None
    exception: ExceptionRecord | None = None
    process: ProcessFacts | None = None
    stacks: tuple[ThreadStack, ...] = ()
    stack_unchanged: bool | None = None
    cpu_share: float | None = None
    oom: OomRecord | None = None
    suspicion: Suspicion | None = None
    log_tail: tuple[str, ...] = ()
    gpu: str | None = None
    flight: RankFlight | None = None
    files: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Something that a device, the kernel or a collector told of a node.

    Attributes:
        source: ``kernel_log``, ``nvml``, or the collector whose present state it is.
        event: its kind: ``xid``, ``sxid``, ``oom_kill``, …; ``state`` for what stands now rather than has happened.
        title: a few words: ``Xid 79 0000:cb:00``.
        meaning: a sentence without its full stop.
        health: of what it is about, a value of ``collectors.protocol.Health``.
        at_s: CLOCK_MONOTONIC of its node; of a state when it was seen last.
        cls: of an Xid or SXid what it asks for, a value of ``XidClass``; else empty.
        pci: of the GPU, ``dddd:bb:dd``; gpu: its index.
        rank: whose GPU or process it is, where that is known.
        text: the kernel's own words.
    """

    node: str
    source: str
    event: str
    title: str
    meaning: str
    health: str
    at_s: float
    at_unix_s: float
    cls: str = ""
    xid: int | None = None
    pci: str = ""
    gpu: int | None = None
    rank: int | None = None
    pid: int | None = None
    text: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Evidence:
    """One incident's evidence over all ranks that could be asked.

    Attributes:
        world_size: ranks in the job; ranks without an entry in ``ranks`` could not be asked.
        trigger: what started the incident: ``exit`` ``hang`` ``stopped`` ``node_lost`` ``preempted`` ``start_up``
            ``corruption`` ``straggler``.
        now_s: CLOCK_MONOTONIC seconds at collection on the deciding node (ages of its own ranks are relative to it).
        script: the user's entry point; frames in or below its folder are user frames.
        devices: what devices, kernels and collectors of all nodes told in the minutes before.
    """

    run_id: str
    attempt: int
    world_size: int
    trigger: str
    now_s: float
    ranks: tuple[RankEvidence, ...]
    script: str = ""
    missing: tuple[str, ...] = ()
    devices: tuple[DeviceEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """One root cause; the fields are those of verdict.json."""

    cls: FaultClass
    ranks: tuple[int, ...]
    summary: str
    confidence: float
    nodes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    section: str | None = None
    group: str | None = None
    seq: int | None = None
    op: str | None = None
    callsite: str | None = None
    since_unix_s: float | None = None
    evidence: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The finding as verdict.json holds it (``cls`` becomes ``class``)."""
        out = {f.name: to_json(getattr(self, f.name)) for f in dataclasses.fields(self)}
        out["class"] = out.pop("cls")
        return out


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one incident; written as incidents/NNNN/verdict.json."""

    run_id: str
    incident: int
    attempt: int
    detected_at_unix_s: float
    detection_delay_s: float
    mode: Mode
    action: Action
    findings: tuple[Finding, ...]
    victims: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The whole verdict.json."""
        return {
            "schema": VERDICT_SCHEMA,
            "run_id": self.run_id,
            "incident": self.incident,
            "attempt": self.attempt,
            "detected_at_unix_s": self.detected_at_unix_s,
            "detection_delay_s": self.detection_delay_s,
            "mode": self.mode.value,
            "action": self.action.value,
            "reason": self.reason,
            "findings": [f.to_json() for f in self.findings],
            "victims": list(self.victims),
            "missing": list(self.missing),
            "details": to_json(self.details),
        }


_AS_IT_IS: Final = frozenset({float, int, str, bool, type(None)})


def to_json(value: Any) -> Any:
    """Records, enums, tuples and paths as JSON values; anything else unknown becomes its text."""
    if type(value) in _AS_IT_IS:
        return value
    if type(value) is list and all(type(v) is float for v in value):  # the durations in the journal
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = getattr(value, "to_json", None)
        if own is not None:
            return own()
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, str) or value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [to_json(v) for v in value]
    return str(value)


def rank_evidence_from_json(data: Mapping[str, Any]) -> RankEvidence:
    """The inverse of ``to_json`` for evidence that came from another node.

    Raises:
        ValueError: a field has a wrong type; the text names it.
    """
    try:
        return RankEvidence(
            rank=int(data["rank"]),
            local_rank=int(data["local_rank"]),
            node=str(data["node"]),
            pid=int(data["pid"]),
            attempt=int(data["attempt"]),
            step=_maybe(int, data.get("step")),
            step_at_s=_maybe(float, data.get("step_at_s")),
            attached=bool(data.get("attached")),
            finished=bool(data.get("finished")),
            sections=tuple(OpenSection(**s) for s in data.get("sections", ())),
            exit=_maybe(lambda d: ExitRecord(**d), data.get("exit")),
            exception=_maybe(exception_from_json, data.get("exception")),
            process=_maybe(
                lambda d: ProcessFacts(**{**d, "children": tuple(tuple(c) for c in d.get("children", ()))}),
                data.get("process"),
            ),
            stacks=tuple(
                ThreadStack(str(s["thread"]), tuple(Frame(**f) for f in s["frames"]), bool(s.get("is_main")))
                for s in data.get("stacks", ())
            ),
            stack_unchanged=data.get("stack_unchanged"),
            cpu_share=_maybe(float, data.get("cpu_share")),
            oom=_maybe(lambda d: OomRecord(**d), data.get("oom")),
            suspicion=_maybe(lambda d: Suspicion(**d), data.get("suspicion")),
            log_tail=tuple(map(str, data.get("log_tail", ()))),
            gpu=_maybe(str, data.get("gpu")),
            flight=_maybe(flight_from_json, data.get("flight")),
            files=tuple(map(str, data.get("files", ()))),
            missing=tuple(map(str, data.get("missing", ()))),
        )
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"cannot read a rank's evidence: {e!r}") from e


def device_event_from_json(data: Mapping[str, Any]) -> DeviceEvent:
    """The inverse of ``to_json``; ValueError where a field is missing or of a wrong type."""
    try:
        return DeviceEvent(
            node=str(data["node"]),
            source=str(data["source"]),
            event=str(data["event"]),
            title=str(data["title"]),
            meaning=str(data["meaning"]),
            health=str(data["health"]),
            at_s=float(data["at_s"]),
            at_unix_s=float(data["at_unix_s"]),
            cls=str(data.get("cls") or ""),
            xid=_maybe(int, data.get("xid")),
            pci=str(data.get("pci") or ""),
            gpu=_maybe(int, data.get("gpu")),
            rank=_maybe(int, data.get("rank")),
            pid=_maybe(int, data.get("pid")),
            text=str(data.get("text") or ""),
            count=int(data.get("count", 1)),
        )
    except (KeyError, TypeError) as e:
        raise ValueError(f"cannot read a device event: {e!r}") from e


def exception_from_json(data: Mapping[str, Any]) -> ExceptionRecord:
    """An ExceptionRecord from exception.json."""
    return ExceptionRecord(
        type=str(data["type"]),
        message=str(data["message"]),
        traceback_hash=str(data["traceback_hash"]),
        frames=tuple(Frame(str(f["file"]), int(f["line"]), str(f["function"])) for f in data["frames"]),
        step=_maybe(int, data.get("step")),
        at_unix_s=float(data["at_unix_s"]),
    )


def _maybe(convert: Any, value: Any) -> Any:
    return None if value is None else convert(value)


def dumps(value: Any) -> str:
    """One line of JSON of any record."""
    return json.dumps(to_json(value), separators=(",", ":"))
