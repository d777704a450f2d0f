"""Events of the kernel log: messages put together from their lines, read, and given a meaning; repeats folded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from steadyrun.collectors.kernel.kinds import Subject, kind_of
from steadyrun.collectors.kernel.lines import KernelLine, device_of, is_continuation, read_line
from steadyrun.collectors.kernel.reading import NEEDLES, Value, read_message
from steadyrun.collectors.kernel.xids import (
    CLASS_ADVICE,
    RECOVERY_ACTION,
    RECOVERY_CLASSES,
    XidClass,
    sxid_entry,
    xid_entry,
)
from steadyrun.collectors.protocol import Health

__all__ = ["EVENT_SCHEMA", "Assembler", "Folding", "KernelEvent", "read_text"]

EVENT_SCHEMA: Final = "steadyrun.kernel-event/1"
FOLD_S: Final = 1.0  # Xid 13, 31, 45 and 94 come in bursts of tens of lines within milliseconds
_TEXT_CHARS: Final = 1000
_MAX_PARTS: Final = 16  # lines of one message
_MAX_KEYS: Final = 4096

_CLASS_HEALTH: Final[Mapping[XidClass, Health]] = {
    XidClass.APP: Health.HEALTHY,
    XidClass.INFO: Health.HEALTHY,
    XidClass.FOLLOW: Health.HEALTHY,
    XidClass.SOFTWARE: Health.DEGRADED,
    XidClass.RESET: Health.UNHEALTHY,
    XidClass.FABRIC: Health.UNHEALTHY,
    XidClass.REBOOT: Health.UNHEALTHY,
    XidClass.HARDWARE: Health.UNHEALTHY,
    XidClass.UNKNOWN: Health.UNHEALTHY,
}
# Fields that tell one thing from another; what differs in none of these is a repeat.
_IDENTITY: Final = ("xid", "sxid", "pci", "switch", "dev", "ifname", "server", "target", "fs", "pid", "cpu", "mc", "ib")


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One thing that happened, as the kernel tells it.

    Attributes:
        event: its kind: ``xid``, ``sxid`` or a row of :data:`~steadyrun.collectors.kernel.kinds.KINDS`.
        fields: what the message says, by name: ``xid``, ``pci``, ``pid``, ``comm``, …; only what is there.
        text: the message, its first thousand characters.
        at_s: CLOCK_MONOTONIC seconds (the kernel's clock since its start), where known.
        at_unix_s: wall time, where known.
        sequence: of the record in /dev/kmsg.
        line_number: of its first line in a text, from 1; 0 where it came from no text.
        count: how many messages it stands for.
    """

    event: str
    fields: Mapping[str, Value]
    text: str
    at_s: float | None = None
    at_unix_s: float | None = None
    sequence: int | None = None
    line_number: int = 0
    level: int | None = None
    count: int = 1

    def number(self, name: str) -> int | None:
        """A field that is a number."""
        value = self.fields.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def word(self, name: str) -> str:
        """A field as text, empty where it is not there."""
        value = self.fields.get(name)
        return "" if value is None else str(value)

    @property
    def cls(self) -> XidClass | None:
        """The catalogue's class; None for what is neither Xid nor SXid."""
        if self.event == "xid":
            return xid_entry(self.number("xid") or 0).cls
        if self.event == "sxid":
            return XidClass.INFO if sxid_entry(self.number("sxid") or 0).is_harmless else XidClass.FABRIC
        return None

    @property
    def effective_class(self) -> XidClass | None:
        """What it asks of the job and the node, with what the message itself says of that."""
        cls, action = self.cls, self.number("action")
        if self.number("xid") == RECOVERY_ACTION and action is not None:
            return RECOVERY_CLASSES.get(action, XidClass.UNKNOWN)
        return XidClass.INFO if cls is XidClass.FABRIC and not self._is_fatal else cls

    @property
    def _is_fatal(self) -> bool:
        """NVLink 5's Xids and all SXids say whether they are; what does not say counts as fatal."""
        always = self.event == "sxid" and sxid_entry(self.number("sxid") or 0).is_always_fatal
        return always or self.fields.get("fatal") is not False

    @property
    def name(self) -> str:
        """The driver's name of an Xid, empty for all else and for unknown codes."""
        return xid_entry(self.number("xid") or 0).name if self.event == "xid" else ""

    @property
    def subject(self) -> Subject:
        if self.event == "xid":
            return Subject.GPU
        return Subject.FABRIC if self.event == "sxid" else kind_of(self.event).subject

    @property
    def health(self) -> Health:
        """Of what it is about, after it."""
        if (cls := self.effective_class) is not None:
            return Health.DEGRADED if self.cls is XidClass.FABRIC and not self._is_fatal else _CLASS_HEALTH[cls]
        if self.event == "pcie_aer" and self.word("sev").startswith("Correct"):
            return Health.HEALTHY
        if self.event == "nic_ib_port" and self.word("state") not in ("ACTIVE", "INIT", "ARMED"):
            return Health.DEGRADED
        return kind_of(self.event).health

    @property
    def meaning(self) -> str:
        """In a sentence without its full stop."""
        if self.event == "xid":
            action = self.word("action_name")
            code = self.number("xid") or 0
            return f"the driver now says of the GPU: {action}" if action else xid_entry(code).meaning
        if self.event == "sxid":
            return sxid_entry(self.number("sxid") or 0).meaning
        return kind_of(self.event).meaning

    @property
    def actions(self) -> tuple[str, ...]:
        """Suggestions, most useful first."""
        if self.event == "sxid":
            return (
                ("look at the switch and the link", "on a repeat leave out the node")
                if self.health is not Health.HEALTHY
                else ()
            )
        if (cls := self.effective_class) is not None:
            return CLASS_ADVICE[cls]
        return kind_of(self.event).advice if self.health is not Health.HEALTHY else ()

    @property
    def title(self) -> str:
        """A few words: ``Xid 79 0000:cb:00``, ``nfs_timeout 10.0.0.1``."""
        code = self.word("xid") or self.word("sxid")
        what = {"xid": "Xid", "sxid": "SXid"}.get(self.event, self.event)
        names = ("switch", "pci", "ifname", "dev", "server", "target", "fs", "comm")
        where = next((self.word(n) for n in names if self.word(n)), "")
        return " ".join(w for w in (what, code, where) if w)

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for repeats of one thing. An Xid counts once per GPU; both lines of an OOM kill are one."""
        if self.event in ("oom_kill", "oom_killed"):
            return ("oom", self.word("pid"))
        if self.event == "xid":
            return ("xid", self.word("xid"), self.word("pci"), self.word("gi"), self.word("ci"))
        return (self.event, *(self.word(n) for n in _IDENTITY))

    def timed(self, at_s: float, at_unix_s: float) -> KernelEvent:
        """The same with these times."""
        return replace(self, at_s=at_s, at_unix_s=at_unix_s)

    def counted(self, count: int) -> KernelEvent:
        """The same, standing for that many messages."""
        return replace(self, count=count)

    def to_json(self) -> dict[str, Any]:
        """One flat object; what is not known is left out."""
        cls, effective = self.cls, self.effective_class
        known = {
            "class": cls.value if cls is not None else None,
            "effective_class": effective.value if effective is not None else None,
            "name": self.name or None,
            "at_s": self.at_s,
            "at_unix_s": self.at_unix_s,
            "sequence": self.sequence,
            "level": self.level,
        }
        return {
            "schema": EVENT_SCHEMA,
            "line_number": self.line_number,
            "event": self.event,
            **self.fields,
            **{name: value for name, value in known.items() if value is not None},
            "subject": self.subject.value,
            "health": self.health.value,
            "meaning": self.meaning,
            "actions": list(self.actions),
            "count": self.count,
            "text": self.text,
        }


def _event(event: str, fields: Mapping[str, Value], line: KernelLine, text: str) -> KernelEvent:
    return KernelEvent(
        event, fields, text[:_TEXT_CHARS], line.at_s, line.at_unix_s(), line.sequence, line.number, line.level
    )


@dataclass(slots=True)
class Assembler:
    """Messages in, in their order, events out. What one line does not say may be complete with the next.

    Attributes:
        any_facility: believe other programs' lines as well; for tests that write their own.
        foreign: events that were left out because another program had written them.
    """

    any_facility: bool = False
    foreign: int = 0
    _open: KernelLine | None = None  # the newest message, when it said nothing yet and may go on
    _parts: int = 0

    def feed(self, line: KernelLine) -> list[KernelEvent]:
        """Events that *line* completes, mostly none or one."""
        if not (self.any_facility or line.is_from_kernel):
            self.foreign += read_message(line.text) is not None
            return []
        before, self._open = self._open, None
        found = read_message(line.text)
        if found is not None:
            return [_event(*found, line, line.text)]
        joined = self._joined(before, line)
        if joined is None:
            self._open, self._parts = line, 1
            return []
        found = read_message(joined.text)
        if found is not None:
            return [_event(*found, joined, joined.text)]
        self._open, self._parts = joined, self._parts + 1
        return []

    def feed_more(self, text: str, number: int) -> list[KernelEvent]:
        """A line of a text that is indented, and so goes on with the message before."""
        stripped = text.strip()
        before = self._open
        if before is not None and before.sequence is not None and (device := device_of(stripped)):
            self._open = replace(before, device=device)
            return []
        own = read_line(stripped, number)
        if read_message(own.text) is not None or own.stamp or own.at_s is not None:  # a pasted, indented log
            return self.feed(own)
        if before is None or self._parts >= _MAX_PARTS:
            return []
        self._open, self._parts = replace(before, text=f"{before.text}\n{stripped}"), self._parts + 1
        found = read_message(self._open.text)
        if found is None:
            return []
        line, self._open = self._open, None
        return [_event(*found, line, line.text)]

    def _joined(self, before: KernelLine | None, line: KernelLine) -> KernelLine | None:
        """The message before with this one, where this one goes on with it."""
        if before is None or self._parts >= _MAX_PARTS:
            return None
        if line.is_fragment:
            return replace(before, text=before.text + line.text)
        # Kernels, consoles and syslog may give each line of one message a prefix of its own.
        if before.text.startswith("NVRM: The NVIDIA GPU") and line.text.startswith("NVRM: "):
            return replace(before, text=f"{before.text}\n{line.text}")
        return None


def read_text(lines: Iterable[str], assembler: Assembler | None = None, first_number: int = 1) -> Iterator[KernelEvent]:
    """Events in a text in any of the forms, each as soon as its lines are complete."""
    assembler = assembler if assembler is not None else Assembler()
    for number, line in enumerate(lines, start=first_number):
        if is_continuation(line):
            yield from assembler.feed_more(line, number)
        elif _is_worth_reading(line):
            yield from assembler.feed(read_line(line, number))
        else:
            assembler.feed(KernelLine(""))  # ends what might have gone on


def _is_worth_reading(line: str) -> bool:
    """Whether any row could fit; JSON may write any letter as a number, fragments may be parts of words."""
    return line[:1] in "{\x1e" or ",c;" in line or ",+;" in line or any(n in line for n in NEEDLES)


@dataclass(slots=True)
class Folding:
    """Tells first messages from repeats of the same within a second of the one before.

    ``take`` gives an event when it is new; ``repeats`` counts the others since, by key.
    """

    within_s: float = FOLD_S
    repeats: dict[tuple[str, ...], int] = field(default_factory=dict)
    _last_s: dict[tuple[str, ...], float] = field(default_factory=dict)

    def take(self, event: KernelEvent, now_s: float) -> KernelEvent | None:
        """The event, or None for a repeat; *now_s* stands in for an event without a time of its own."""
        at_s = event.at_s if event.at_s is not None else now_s
        last_s = self._last_s.get(event.key)
        self._last_s[event.key] = at_s
        if len(self._last_s) > _MAX_KEYS:
            self._forget(at_s)
        if last_s is not None and 0 <= at_s - last_s <= self.within_s:
            self.repeats[event.key] = self.repeats.get(event.key, 0) + 1
            return None
        self.repeats.pop(event.key, None)
        return event

    def _forget(self, at_s: float) -> None:
        kept = {k: t for k, t in self._last_s.items() if at_s - t <= self.within_s}
        if len(kept) > _MAX_KEYS:  # thousands of different things within a second: the newest count
            kept = dict(sorted(kept.items(), key=lambda item: item[1])[-_MAX_KEYS // 2 :])
        self._last_s = kept
        self.repeats = {k: n for k, n in self.repeats.items() if k in kept}
