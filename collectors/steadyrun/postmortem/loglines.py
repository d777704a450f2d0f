"""What the lines of a training log say of its collectives: torch's NCCL watchdog and heartbeat monitor (2.0 to 2.14),
its desync report and DETAIL fingerprints, NCCL's RAS, monitored barriers, tracebacks, torchrun's list of failures.

Two numbers are easily confused: ``[rank6]:`` in front of a line is the global rank, ``[Rank 6]`` inside it the rank
within the process group. And the first one to notice a timeout is only the first one to notice.
"""

from __future__ import annotations

import calendar
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from steadyrun.core.records import Frame

__all__ = [
    "Counters",
    "DesyncState",
    "Fingerprint",
    "FingerprintMismatch",
    "GroupRef",
    "LateAtBarrier",
    "LauncherExit",
    "LogClock",
    "LogException",
    "LogNote",
    "LogReading",
    "NoteKind",
    "RankLog",
    "RasCommunicator",
    "TimedOut",
    "read_log",
]

MAX_RANK: Final = 1 << 20
MAX_SEQ: Final = 1 << 31  # beyond it, counters that were never set: torch 2.4 printed them unsigned
MAX_PER_RANK: Final = 256
MAX_LINE: Final = 16_000
MAX_FRAMES: Final = 64
LAST_WORDS_LINES: Final = 40
TAIL_LINES: Final = 50
TAIL_CHARS: Final = 2000


# -- what is told ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LogClock:
    """How to read the stamps in a log, which tell neither year nor zone.

    Attributes:
        written_at_unix_s: when the file was last written: no stamp is later.
        utc_offset_s: of the zone the stamps are in.
    """

    written_at_unix_s: float
    utc_offset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A process group as a line names it.

    Attributes:
        name: torch's unique name; before torch 2.5 the number that the group has on this rank.
        desc: ``default_pg`` and the like; empty where the line has none.
        rank: the speaker's rank within the group.
    """

    name: str
    desc: str
    rank: int

    @property
    def is_default(self) -> bool:
        return self.desc == "default_pg" or (self.name == "0" and not self.desc)


@dataclass(frozen=True, slots=True)
class TimedOut:
    """``Watchdog caught collective operation timeout``; numbers of elements are None before torch 2.2."""

    group_rank: int | None
    seq: int
    op: str
    numel_in: int | None
    numel_out: int | None
    timeout_s: float
    ran_for_s: float
    at_unix_s: float | None = None
    group: GroupRef | None = None
    frames: tuple[Frame, ...] = ()

    @property
    def was_suspended(self) -> bool:
        """It ran far beyond its limit: the process or its machine stood still, else the watchdog had fired before."""
        return self.ran_for_s > 3 * self.timeout_s + 120


@dataclass(frozen=True, slots=True)
class Counters:
    """What a group's watchdog had counted: last enqueued and completed operation; None where never set.

    Attributes:
        failed_seq: the operation that timed out or failed; None where the line tells of another rank's signal.
        told_by: the rank whose signal made this one speak; None where it speaks of its own accord.
    """

    group: GroupRef
    enqueued: int | None
    completed: int | None
    failed_seq: int | None = None
    told_by: int | None = None
    at_unix_s: float | None = None


class NoteKind(str, Enum):
    SAW_SIGNAL = "saw_signal"  # another rank had asked for dumps
    GAVE_SIGNAL = "gave_signal"  # the first group of this rank to ask for dumps
    WATCHDOG_STUCK = "watchdog_stuck"  # a call into NCCL or CUDA does not return
    GIL_HELD = "gil_held"
    DUMP_TIMED_OUT = "dump_timed_out"
    RECORDER_OFF = "recorder_off"
    REMOTE_ERROR = "remote_error"
    COMM_ERROR = "comm_error"  # the watchdog ended with an error that is no timeout
    TAKEN_DOWN = "taken_down"
    DESTROYING = "destroying"


@dataclass(frozen=True, slots=True)
class LogNote:
    """A line that says something about its rank. *number*: seconds or a rank, where the line has one."""

    kind: NoteKind
    text: str
    number: int | None = None
    at_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class LogException:
    """A Python traceback; *is_last_words*: torch marked it as uncaught, or next to nothing follows it."""

    type: str
    message: str
    frames: tuple[Frame, ...]  # newest call first
    is_last_words: bool = False
    at_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class RankLog:
    """All that one rank said. *lines* counts those that could be given to it, *tail* holds the last of them."""

    rank: int
    lines: int = 0
    timeouts: tuple[TimedOut, ...] = ()
    counters: tuple[Counters, ...] = ()
    notes: tuple[LogNote, ...] = ()
    exceptions: tuple[LogException, ...] = ()
    pid: int | None = None
    host: str = ""
    tail: tuple[str, ...] = ()

    def has(self, kind: NoteKind) -> bool:
        return any(n.kind is kind for n in self.notes)

    @property
    def is_silent(self) -> bool:
        """Neither watchdog nor interpreter said anything."""
        return not (self.timeouts or self.counters or self.notes or self.exceptions)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a rank was about to call, as TORCH_DISTRIBUTED_DEBUG=DETAIL compares it."""

    rank: int
    seq: int | None
    op: str
    shape: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FingerprintMismatch:
    """*own* speaks and *other* is the first rank that differs: all below it agree with the speaker."""

    own: Fingerprint
    other: Fingerprint


@dataclass(frozen=True, slots=True)
class RasCommunicator:
    """One communicator in a report of NCCL's RAS.

    Attributes:
        counts: (number of collectives launched, how many ranks, those named).
    """

    name: str
    counts: tuple[tuple[int, int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class DesyncState:
    """A line of a desync report: *ranks* of the group have started or finished collective *seq*; None: never any."""

    group: GroupRef | None
    ranks: tuple[int, ...]
    seq: int | None
    op: str = ""
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class LateAtBarrier:
    """``ranks`` did not come to a monitored barrier; rank 0 tells."""

    ranks: tuple[int, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class LauncherExit:
    """One entry of torchrun's list of failures; *is_first*: what it calls the root cause."""

    rank: int
    local_rank: int
    code: int | None
    signal: int | None
    pid: int | None = None
    host: str = ""
    at_unix_s: float | None = None
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class LogReading:
    """One log, or several together."""

    ranks: Mapping[int, RankLog] = field(default_factory=dict)
    fingerprints: tuple[FingerprintMismatch, ...] = ()
    communicators: tuple[RasCommunicator, ...] = ()
    desync: tuple[DesyncState, ...] = ()
    barriers: tuple[LateAtBarrier, ...] = ()
    exits: tuple[LauncherExit, ...] = ()
    lines: int = 0

    @property
    def says_something(self) -> bool:
        return bool(
            self.fingerprints
            or self.communicators
            or self.desync
            or self.barriers
            or self.exits
            or any(not r.is_silent for r in self.ranks.values())
        )

    def highest_rank(self) -> int:
        """The highest global rank that is mentioned, or -1."""
        told = [c.told_by for r in self.ranks.values() for c in r.counters if c.told_by is not None]
        late = [r for b in self.barriers for r in b.ranks]
        prints = [r for f in self.fingerprints for r in (f.own.rank, f.other.rank)]
        return max([*self.ranks, *told, *late, *prints, *(e.rank for e in self.exits)], default=-1)


def merged(readings: Iterable[LogReading]) -> LogReading:
    """Several logs of one job as one."""
    ranks: dict[int, RankLog] = {}
    rest: list[LogReading] = []
    for reading in readings:
        rest.append(reading)
        for rank, log in reading.ranks.items():
            ranks[rank] = _joined(ranks[rank], log) if rank in ranks else log
    return LogReading(
        ranks=dict(sorted(ranks.items())),
        fingerprints=tuple(f for r in rest for f in r.fingerprints),
        communicators=tuple(c for r in rest for c in r.communicators),
        desync=tuple(d for r in rest for d in r.desync),
        barriers=tuple(b for r in rest for b in r.barriers),
        exits=tuple(e for r in rest for e in r.exits),
        lines=sum(r.lines for r in rest),
    )


def _joined(a: RankLog, b: RankLog) -> RankLog:
    return RankLog(
        a.rank,
        a.lines + b.lines,
        a.timeouts + tuple(t for t in b.timeouts if t not in a.timeouts),
        a.counters + tuple(c for c in b.counters if c not in a.counters),
        a.notes + tuple(n for n in b.notes if n not in a.notes),
        a.exceptions + tuple(e for e in b.exceptions if e not in a.exceptions),
        a.pid if a.pid is not None else b.pid,
        a.host or b.host,
        (a.tail + b.tail)[-TAIL_LINES:],
    )


# -- patterns ----------------------------------------------------------------------------------------------------------
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SPEAKER: Final = re.compile(r"(?=\[rank\d{1,7}\]:)")  # one line may hold the words of several processes
_GLOBAL: Final = re.compile(r"\[rank(\d{1,7})\]:\s?")
_RAY: Final = re.compile(r"\(\w[\w.<>]*(?:\[rank=(\d{1,7})\])? pid=(\d+)(?:, ip=([0-9a-fA-F.:]+))?\)\s?")
_TEE: Final = re.compile(r"\[[A-Za-z_]\w{0,40}?(\d{1,4})\]:\s?")  # torchrun --tee: role name and local rank
_PREFIX: Final = re.compile(rf"\s*(?:{_RAY.pattern}|{_TEE.pattern})?")
_STAMP: Final = re.compile(r"\[[IWEF](\d{2}|\d)(\d{2}) (\d{2}):(\d{2}):(\d{2})(?:\.(\d{1,9}))? ")
_GROUP: Final = re.compile(
    r"\[PG (?:ID \d+ PG GUID (?P<guid>[^\s(\]]+)(?:\((?P<desc>[^)]*)\))?|(?P<old>\d+)(?: \((?P<odesc>[^)]*)\))?)"
    r" Rank (?P<rank>\d{1,7})\]"
)
_TIMED_OUT: Final = re.compile(
    r"(?:\[Rank (?P<rank>\d{1,7})\] )?Watchdog caught collective operation timeout: Work\w+\("
    r"(?:SeqNum=(?P<seq>\d{1,18}), )?OpType=(?P<op>\w+)"
    r"(?:, (?:TensorShape=\[(?P<shape>[\d, ]*)\]|NumelIn=(?P<in>\d{1,18}), NumelOut=(?P<out>\d{1,18})))?"
    r", Timeout\(ms\)=(?P<limit>\d{1,12})\)"
    r" ran for (?P<ran>\d{1,15}) milliseconds"
)
_FAILED: Final = re.compile(
    r"failure detected by watchdog at work sequence id: (?P<work>-?\d+)"
    r" PG status: last enqueued work: (?P<enq>-?\d+), last completed work: (?P<cmp>-?\d+)"
)
_FAILED_OLD: Final = re.compile(
    r"(?:Exception \(either an error or timeout\) detected by watchdog at work: |Timeout at NCCL work: )(?P<work>-?\d+)"
    r", last enqueued NCCL work: (?P<enq>-?\d+), last completed NCCL work: (?P<cmp>-?\d+)"
)
_SIGNAL: Final = re.compile(
    r"Received a (?:dump signal due to a collective timeout|timeout signal|global timeout)\b.*?from\s+"
    r"(?:(?P<own>this local rank)|(?:other )?rank\s*(?P<by>-?\d+)?)"
    r".*?Last enqueued NCCL work: (?P<enq>-?\d+), last completed NCCL work: (?P<cmp>-?\d+)",
    re.IGNORECASE,
)
_NOTES: Final = (
    (NoteKind.SAW_SIGNAL, re.compile(r"Observed flight recorder dump signal from another rank()")),
    (NoteKind.GAVE_SIGNAL, re.compile(r"First PG on this rank to signal dumping()")),
    (NoteKind.WATCHDOG_STUCK, re.compile(r"watchdog got stuck for (\d{1,9})\s?seconds")),
    (NoteKind.WATCHDOG_STUCK, re.compile(r"Heartbeat monitor timed out()")),
    (NoteKind.GIL_HELD, re.compile(r"Could not acquire GIL within (\d{1,9}) ms")),
    (NoteKind.DUMP_TIMED_OUT, re.compile(r"timed out after waiting for (\d{1,9})\s?ms")),
    (
        NoteKind.RECORDER_OFF,
        re.compile(r"Stack trace of the failed collective not found, potentially because FlightRecorder is disabled()"),
    ),
    (NoteKind.REMOTE_ERROR, re.compile(r"remote error detected from rank: (\d{1,7})")),
    (NoteKind.TAKEN_DOWN, re.compile(r"taking the entire process down()")),
    (NoteKind.DESTROYING, re.compile(r"Starting to destroy process group()")),
)
_COMM_ERROR: Final = re.compile(r"watchdog thread terminated with exception: (?!.*Watchdog caught)(.{1,400})")
_COLLECTIVE_FRAME: Final = re.compile(r"^\s*#\d{1,3} (\S+) from (\S+):(\d{1,8})")
_FINGERPRINTS: Final = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank (\d{1,7}) is running collective: CollectiveFingerPrint\("
    r"(.{1,4000}?)\), but Rank (\d{1,7}) is running collective: CollectiveFingerPrint\((.{1,4000})"
)
_PRINT_SEQ: Final = re.compile(r"SequenceNumber=(\d{1,18})")
_PRINT_OP: Final = re.compile(r"OpType=(\w+)")
_PRINT_SHAPE: Final = re.compile(r"TensorShape=\[([\d, ]*)\]")
_PRINT_TYPES: Final = re.compile(r"TensorDtypes=\[?([A-Za-z]\w*(?:,? [A-Za-z]\w*)*)\]?(?:, Tensor|\))")
_RAS_HEAD: Final = re.compile(r"^\s*#(\d+-\d+) \(([0-9a-f]+)\) (\w+)")
_RAS_MANY: Final = re.compile(r"(\d{1,7}) ranks have launched up to operation (\d{1,18})")
_RAS_ONE: Final = re.compile(r"Rank (\d{1,7}) has launched up to operation (\d{1,18})")
_RAS_MEMBER: Final = re.compile(r"^\s*Rank (\d{1,7}) -- ")
_DESYNC_FINISHED: Final = re.compile(r"\[([\d, ]+)\] finished collective #(\d{1,18}), but didn't join collective #")
_DESYNC_JOINED: Final = re.compile(r"\[([\d, ]+)\] joined but didn't finish collective #(\d{1,18})")
_DESYNC_NEVER: Final = re.compile(r"ranks \[([\d, ]+)\] are the lagging ranks.{0,80}?never joined", re.IGNORECASE)
_DESYNC_AT: Final = re.compile(r"\[(\d{1,7})\] Timeout at collective: (\w+), #(\d{1,18})")
_SNAPSHOT: Final = re.compile(r"^\s*#(\d{1,18}) (started|finished) ranks:")
_SNAPSHOT_ROW: Final = re.compile(r"^\s*\[([\d, ]+)\] (?:started|finished) (\w+)\s*$")
_BARRIER: Final = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier in (\d{1,12}) ?ms")
_TRACEBACK: Final = "Traceback (most recent call last):"
_FILE: Final = re.compile(r'^\s+File "([^"]{1,1000})", line (\d{1,8}), in (.{1,300})')
_RAISED: Final = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::\s?(.*))?$")
_FAILURE_ROW: Final = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*: (.*)$")
_FAILURE_RANK: Final = re.compile(r"(\d{1,7}) \(local_rank: (\d{1,5})\)")
_FAILURE_CODE: Final = re.compile(r"(-?\d{1,6}) \(pid: (\d+)\)")

# Cheap first look: nothing else is matched against a line without one of these.
_WORDS: Final = re.compile(
    r"atchdog|NCCL|PG |light ?[Rr]ecorder| from |collective|GIL|launched up to|ranks|Rank |failed to pass|MISMATCH"
)


def read_log(lines: Iterable[str], rank: int | None = None, clock: LogClock | None = None) -> LogReading:
    """What a log says.

    Args:
        lines: in order, with or without line ends.
        rank: the global rank whose own log it is, for lines that do not say whose they are; None for a mixed log.
        clock: how to read its stamps; None: no times.
    """
    return _Reader(rank, clock).read(lines)


# -- reading -----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Trace:
    """A Python traceback that is being read."""

    frames: deque[Frame] = field(default_factory=lambda: deque(maxlen=MAX_FRAMES))
    is_marked: bool = False


@dataclass(slots=True)
class _Draft:
    """One speaker's words so far; *rank* None: nobody's."""

    rank: int | None
    lines: int = 0
    timeouts: list[TimedOut] = field(default_factory=list)
    counters: list[Counters] = field(default_factory=list)
    notes: list[LogNote] = field(default_factory=list)
    exceptions: list[tuple[int, LogException]] = field(default_factory=list)  # with the line's number in ``lines``
    pid: int | None = None
    host: str = ""
    trace: _Trace | None = None
    takes_frames: bool = False
    last_group: GroupRef | None = None
    last_s: float | None = None
    last_watchdog: int = 0  # number of the newest line that only a living process's watchdog writes
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))

    def done(self) -> RankLog:
        assert self.rank is not None
        exceptions = tuple(
            replace(e, is_last_words=e.is_last_words or self._ends_with(at)) for at, e in self.exceptions
        )
        timeouts = tuple(_with_group(t, self.counters) for t in self.timeouts)
        return RankLog(
            self.rank,
            self.lines,
            timeouts,
            tuple(self.counters),
            tuple(self.notes),
            exceptions,
            self.pid,
            self.host,
            tuple(self.tail),
        )

    def _ends_with(self, at: int) -> bool:
        """Next to nothing follows line *at*, and no watchdog that shows that the process lived on."""
        return self.lines - at <= LAST_WORDS_LINES and self.last_watchdog < at


def _with_group(timeout: TimedOut, counters: Iterable[Counters]) -> TimedOut:
    """The line itself does not name the group; the group's own line about the same number does."""
    if timeout.group is not None:
        return timeout
    for c in counters:
        if c.failed_seq == timeout.seq and timeout.group_rank in (None, c.group.rank):
            return replace(timeout, group=c.group)
    return timeout


class _Reader:
    def __init__(self, rank: int | None, clock: LogClock | None) -> None:
        self._rank, self._clock = rank, clock
        self._drafts: dict[int | None, _Draft] = {}
        self._guessed: dict[int, _Draft] = {}  # by rank in the group, where no line says more
        self._named = False
        self._fingerprints: list[FingerprintMismatch] = []
        self._communicators: list[RasCommunicator] = []
        self._desync: list[DesyncState] = []
        self._snapshot: tuple[int, bool] | None = None
        self._barriers: list[LateAtBarrier] = []
        self._exits: list[LauncherExit] = []
        self._failure: dict[str, str] | None = None
        self._failure_is_first = False

    def read(self, lines: Iterable[str]) -> LogReading:
        count = 0
        for line in lines:
            count += 1
            self._line(line)
        self._end_failure()
        return LogReading(
            ranks=self._ranks(),
            fingerprints=tuple(self._fingerprints),
            communicators=tuple(c for c in self._communicators if c.counts),
            desync=tuple(self._desync),
            barriers=tuple(self._barriers),
            exits=_exits(self._exits),
            lines=count,
        )

    def _ranks(self) -> dict[int, RankLog]:
        """Lines without a global rank count as the group rank's only where no line has one: torch 2.0 and 2.1."""
        logs = {r: d.done() for r, d in self._drafts.items() if r is not None}
        if not self._named:
            for rank, draft in self._guessed.items():
                log = draft.done()
                logs[rank] = _joined(logs[rank], log) if rank in logs else log
        return dict(sorted(logs.items()))

    def _line(self, line: str) -> None:
        text = line.rstrip("\r\n")[:MAX_LINE]
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        if "]:" not in text:
            self._say(text, self._draft(self._rank), False)
            return
        if text.startswith("[rank") and text.find("[rank", 5) < 0:
            self._part(text, "")
            return
        prefix = ""
        for part in _SPEAKER.split(text):
            if not part.startswith("[rank") and _PREFIX.fullmatch(part):
                prefix = part  # whose rank stands behind it: [default3]: is local rank 3 only
            elif part:
                self._part(part, prefix)
                prefix = ""

    def _part(self, text: str, prefix: str) -> None:
        rank, marked, pid, host = self._rank, False, None, ""
        ray = _RAY.search(prefix + text[:200]) if " pid=" in prefix or " pid=" in text[:200] else None
        if ray is not None:
            text = text if prefix else text[: ray.start()] + text[ray.end() :]
            pid, host = int(ray[2]), ray[3] or ""
            rank = int(ray[1]) if ray[1] else rank
        found = _GLOBAL.match(text)
        if found is not None:
            rank, marked, text = int(found[1]), True, text[found.end() :]
        elif rank is None:
            tee = _TEE.match(text)
            if tee is not None:
                rank, text = int(tee[1]), text[tee.end() :]
        if rank is not None and rank >= MAX_RANK:
            return
        self._named = self._named or marked
        draft = self._draft(rank)
        if pid is not None:
            draft.pid, draft.host = pid, host or draft.host
        self._say(text, draft, marked)

    def _draft(self, rank: int | None) -> _Draft:
        draft = self._drafts.get(rank)
        if draft is None:
            draft = self._drafts[rank] = _Draft(rank)
        return draft

    def _say(self, text: str, draft: _Draft, marked: bool) -> None:
        """One speaker's line, without what stands in front of it."""
        draft.lines += 1
        if draft.rank is not None and text and not text.isspace():
            draft.tail.append(text[:TAIL_CHARS])
        if text[:1] == "[" and (stamp := _STAMP.match(text)) is not None:
            draft.last_s = self._unix_s(stamp)
        if draft.trace is not None or _TRACEBACK in text:
            self._traceback(text, draft, marked)
        if self._failure is not None:
            self._failure_line(text)
        elif "Root Cause (first observed failure)" in text or text.strip() == "Failures:":
            self._failure, self._failure_is_first = {}, "Root Cause" in text
        if _WORDS.search(text) is None:
            if text and not text[0].isspace():
                draft.takes_frames = False
            self._snapshot_line(text, draft)
            return
        self._watchdog(text, draft)
        self._others(text, draft)

    def _unix_s(self, stamp: re.Match[str]) -> float | None:
        clock = self._clock
        if clock is None:
            return None
        month, day, hour, minute, second = (int(stamp[i]) for i in range(1, 6))
        nanos = int((stamp[6] or "0").ljust(9, "0"))
        local = time.gmtime(clock.written_at_unix_s + clock.utc_offset_s)
        for year in (local.tm_year, local.tm_year - 1):
            try:
                at = calendar.timegm((year, month, day, hour, minute, second)) - clock.utc_offset_s + nanos / 1e9
            except (ValueError, OverflowError):
                return None
            if at <= clock.written_at_unix_s + 86_400:  # a day: clocks and zones of other machines
                return at
        return None

    # -- the watchdog --------------------------------------------------------------------------------------------------
    def _watchdog(self, text: str, draft: _Draft) -> None:
        group = _group_of(text)
        if group is not None:
            draft.last_group = group
        frame = _COLLECTIVE_FRAME.match(text) if draft.takes_frames else None
        if frame is not None:
            self._frame(Frame(frame[2], int(frame[3]), frame[1]), draft)
            return
        draft.takes_frames = False
        if "Watchdog caught" in text and (m := _TIMED_OUT.search(text)) is not None:
            self._timed_out(m, group, draft)
        if group is not None and (m := _FAILED.search(text) or _FAILED_OLD.search(text)) is not None:
            work = _sane(m["work"])
            draft = self._owner(draft, group)
            self._add_counters(draft, Counters(group, _sane(m["enq"]), _sane(m["cmp"]), work, None, draft.last_s))
        if group is not None and "Last enqueued NCCL work" in text and (m := _SIGNAL.search(_signal_part(text))):
            draft = self._owner(draft, group)
            by = int(m["by"]) if m["by"] is not None and 0 <= int(m["by"]) < MAX_RANK else None
            counters = Counters(group, _sane(m["enq"]), _sane(m["cmp"]), None, by, draft.last_s)
            self._add_counters(draft, counters)
        if "Stack trace of the failed collective:" in text:
            draft.takes_frames = True
        self._notes(text, group, draft)

    def _owner(self, draft: _Draft, group: GroupRef | None) -> _Draft:
        """Whose line it is where nothing in front of it says so: in the default group the group rank is the rank."""
        if draft.rank is not None or group is None:
            return draft
        if self._named and not group.is_default:
            return draft  # nobody's: [Rank 6] of a sub-group can be any rank
        target = self._draft(group.rank) if group.is_default else self._guess(group.rank)
        target.last_s = draft.last_s
        return target

    def _guess(self, group_rank: int) -> _Draft:
        return self._guessed.setdefault(group_rank, _Draft(group_rank))

    def _timed_out(self, m: re.Match[str], group: GroupRef | None, draft: _Draft) -> None:
        group_rank = int(m["rank"]) if m["rank"] else group.rank if group is not None else None
        owner = self._owner(draft, group)
        if owner.rank is None:
            if group_rank is None:
                return
            owner = self._guess(group_rank)
        seq = _sane(m["seq"] or "0")
        if seq is None:
            return
        numel_in, numel_out = (None if m[k] is None else int(m[k]) for k in ("in", "out"))
        if m["shape"]:
            numel_in = _product(_ints(m["shape"]))
        told = TimedOut(
            group_rank,
            seq,
            m["op"],
            numel_in,
            numel_out,
            int(m["limit"]) / 1000,
            int(m["ran"]) / 1000,
            draft.last_s,
            group,
        )
        for i, known in enumerate(owner.timeouts):  # torch says it up to three times; the later ones name the group
            if (known.seq, known.op, known.ran_for_s) == (told.seq, told.op, told.ran_for_s):
                owner.timeouts[i] = replace(known, group=known.group or group)
                return
        owner.last_watchdog = owner.lines
        if len(owner.timeouts) < MAX_PER_RANK:
            owner.timeouts.append(told)

    @staticmethod
    def _frame(frame: Frame, draft: _Draft) -> None:
        if not draft.timeouts:
            return
        last = draft.timeouts[-1]
        if len(last.frames) < MAX_FRAMES:
            draft.timeouts[-1] = replace(last, frames=(*last.frames, frame))

    @staticmethod
    def _add_counters(draft: _Draft, counters: Counters) -> None:
        if len(draft.counters) < MAX_PER_RANK:
            draft.counters.append(counters)

    def _notes(self, text: str, group: GroupRef | None, draft: _Draft) -> None:
        for kind, pattern in _NOTES:
            m = pattern.search(text)
            if m is not None:
                number = int(m[1]) if m[1] else None
                self._note(LogNote(kind, text[-400:].strip(), number, draft.last_s), group, draft)
        m = _COMM_ERROR.search(text)
        if m is not None:
            self._note(LogNote(NoteKind.COMM_ERROR, m[1].strip(), None, draft.last_s), group, draft)

    def _note(self, note: LogNote, group: GroupRef | None, draft: _Draft) -> None:
        owner = self._owner(draft, group)
        if owner.rank is not None and len(owner.notes) < MAX_PER_RANK:
            owner.notes.append(note)

    # -- other reports -------------------------------------------------------------------------------------------------
    def _others(self, text: str, draft: _Draft) -> None:
        if "CollectiveFingerPrint" in text and (m := _FINGERPRINTS.search(text)) is not None:
            mismatch = FingerprintMismatch(_fingerprint(int(m[1]), m[2]), _fingerprint(int(m[3]), m[4]))
            if mismatch not in self._fingerprints and len(self._fingerprints) < MAX_PER_RANK:
                self._fingerprints.append(mismatch)
        if "monitoredBarrier" in text and (m := _BARRIER.search(text)) is not None:
            late = LateAtBarrier(_ints(m[1]), int(m[2]) / 1000)
            if late.ranks and late not in self._barriers and len(self._barriers) < MAX_PER_RANK:
                self._barriers.append(late)
        self._ras(text)
        self._desync_line(text, draft)

    def _ras(self, text: str) -> None:
        if (m := _RAS_HEAD.match(text)) is not None:
            if len(self._communicators) < MAX_PER_RANK:
                self._communicators.append(RasCommunicator(f"{m[1]} ({m[2]})"))
            return
        if not self._communicators:
            return
        last = self._communicators[-1]
        counts = last.counts
        if (m := _RAS_MANY.search(text)) is not None:
            counts = (*counts, (int(m[2]), int(m[1]), ()))
        elif (m := _RAS_ONE.search(text)) is not None:
            counts = (*counts, (int(m[2]), 1, (int(m[1]),)))
        elif counts and (m := _RAS_MEMBER.match(text)) is not None:
            launched, many, members = counts[-1]
            counts = (*counts[:-1], (launched, many, (*members, int(m[1]))))
        if counts is not last.counts and len(counts) < MAX_PER_RANK:
            self._communicators[-1] = replace(last, counts=counts)

    def _desync_line(self, text: str, draft: _Draft) -> None:
        group = draft.last_group
        if (m := _DESYNC_FINISHED.search(text)) is not None:
            self._state(DesyncState(group, _ints(m[1]), int(m[2]), is_finished=True))
        elif (m := _DESYNC_JOINED.search(text)) is not None:
            self._state(DesyncState(group, _ints(m[1]), int(m[2])))
        elif (m := _DESYNC_NEVER.search(text)) is not None:
            self._state(DesyncState(group, _ints(m[1]), None))
        elif (m := _DESYNC_AT.search(text)) is not None:
            self._state(DesyncState(group, (int(m[1]),), int(m[3]), m[2]))
        else:
            self._snapshot_line(text, draft)

    def _snapshot_line(self, text: str, draft: _Draft) -> None:
        if (m := _SNAPSHOT.match(text)) is not None:
            self._snapshot = (int(m[1]), m[2] == "finished")
        elif self._snapshot is not None:
            row = _SNAPSHOT_ROW.match(text)
            if row is None:
                self._snapshot = None
            else:
                seq, finished = self._snapshot
                self._state(DesyncState(draft.last_group, _ints(row[1]), seq, row[2], finished))

    def _state(self, state: DesyncState) -> None:
        if state not in self._desync and len(self._desync) < 4 * MAX_PER_RANK:
            self._desync.append(state)

    # -- Python --------------------------------------------------------------------------------------------------------
    def _traceback(self, text: str, draft: _Draft, marked: bool) -> None:
        if _TRACEBACK in text:
            draft.trace = _Trace(is_marked=marked)
            return
        trace = draft.trace
        assert trace is not None
        if (m := _FILE.match(text)) is not None:
            trace.frames.append(Frame(m[1], int(m[2]), m[3].strip()))
            return
        if not text or text[0].isspace():
            return
        draft.trace = None
        m = _RAISED.match(text)
        if m is None or not trace.frames:
            return
        told = LogException(
            m[1], (m[2] or "")[:4000], tuple(reversed(trace.frames)), trace.is_marked and marked, draft.last_s
        )
        if len(draft.exceptions) < MAX_PER_RANK:
            draft.exceptions.append((draft.lines, told))

    # -- torchrun ------------------------------------------------------------------------------------------------------
    def _failure_line(self, text: str) -> None:
        fields = self._failure
        assert fields is not None
        row = _FAILURE_ROW.match(text)
        if row is not None:
            if row[1] == "time" and fields:
                self._end_failure()
                self._failure = fields = {}
            fields[row[1]] = row[2].strip()
        elif "Root Cause (first observed failure)" in text:
            self._end_failure()
            self._failure, self._failure_is_first = {}, True
        elif text.startswith("====="):
            self._end_failure()

    def _end_failure(self) -> None:
        fields, self._failure = self._failure, None
        if not fields:
            return
        who, how = _FAILURE_RANK.match(fields.get("rank", "")), _FAILURE_CODE.match(fields.get("exitcode", ""))
        if who is None or how is None or len(self._exits) >= 16 * MAX_PER_RANK:
            return
        code = int(how[1])
        self._exits.append(
            LauncherExit(
                int(who[1]),
                int(who[2]),
                None if code < 0 else code,
                -code if code < 0 else None,
                int(how[2]),
                fields.get("host", "")[:200],
                self._launcher_time(fields.get("time", "")),
                self._failure_is_first,
            )
        )

    def _launcher_time(self, text: str) -> float | None:
        if self._clock is None:
            return None
        try:
            return calendar.timegm(time.strptime(text, "%Y-%m-%d_%H:%M:%S")) - self._clock.utc_offset_s
        except (ValueError, OverflowError):
            return None


def _exits(told: Iterable[LauncherExit]) -> tuple[LauncherExit, ...]:
    """Each rank once: what is called the root cause stands in the list of failures as well in some versions."""
    by_rank: dict[int, LauncherExit] = {}
    for e in told:
        known = by_rank.get(e.rank)
        if known is None or e.is_first:
            by_rank[e.rank] = e
    return tuple(sorted(by_rank.values(), key=lambda e: (not e.is_first, e.rank)))


def _group_of(text: str) -> GroupRef | None:
    m = _GROUP.search(text) if "[PG " in text else None
    if m is None:
        return None
    name = m["guid"] if m["guid"] is not None else m["old"]
    desc = m["desc"] if m["guid"] is not None else m["odesc"]
    return GroupRef(name[:200], "" if desc in (None, "undefined") else desc[:200], int(m["rank"]))


def _signal_part(text: str) -> str:
    """Short enough for a pattern that tries much."""
    start = max(text.find("Received a"), 0)
    return text[start : start + 800]


def _fingerprint(rank: int, text: str) -> Fingerprint:
    seq, op, shape, types = (p.search(text) for p in (_PRINT_SEQ, _PRINT_OP, _PRINT_SHAPE, _PRINT_TYPES))
    return Fingerprint(
        rank,
        int(seq[1]) if seq is not None else None,
        op[1] if op is not None else "",
        _ints(shape[1]) if shape is not None else None,
        tuple(re.split(r"[, ]+", types[1])) if types is not None else (),
    )


def _sane(text: str) -> int | None:
    number = int(text) if len(text) < 20 else -1
    return number if 0 <= number < MAX_SEQ else None


def _ints(text: str) -> tuple[int, ...]:
    return tuple(_each_int(text))


def _each_int(text: str) -> Iterator[int]:
    for part in text.split(","):
        part = part.strip()
        if part.isdigit() and len(part) < 19:
            yield int(part)


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
