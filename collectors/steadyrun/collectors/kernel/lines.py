"""One message of the kernel log out of whatever form it was written down in.

Forms: records of /dev/kmsg, dmesg with any of its time stamps and with ``-x``, ``-r`` and ``--json``, journalctl's text
and JSON, syslog files (RFC 3164 and 5424), and bare messages. What another program wrote into the same log is told
from the kernel's own words by facility or tag: anybody may write ``NVRM: Xid`` into a log.
"""

from __future__ import annotations

import calendar
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["KERNEL", "USER", "KernelLine", "is_continuation", "read_kmsg", "read_line"]

KERNEL: Final = 0  # facility
USER: Final = 1
MAX_CHARS: Final = 8192  # of one message: the kernel's own limit of a record (CONSOLE_EXT_LOG_MAX)

_RECORD = re.compile(r"(\d{1,5}),(\d{1,20}),(\d{1,20}),([^;]{0,200});(.*)", re.DOTALL)
_HEX = re.compile(r"\\x([0-9a-fA-F]{2})")
_OCTAL = re.compile(r"#(01[0-3]|015|033)")  # how rsyslog writes control characters
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PRIORITY = re.compile(r"<(\d{1,4})>")
_RFC5424 = re.compile(r"1 (\S{1,40}) (\S+) (\S+) (\S+) (\S+) (?:-|\[.*?\]) ?(.*)", re.DOTALL)
_DECODED = re.compile(r"(\w{2,8}) *:(emerg|alert|crit|err|warn|notice|info|debug) *: ?")
_LEVELS: Final = ("emerg", "alert", "crit", "err", "warn", "notice", "info", "debug")
# A bracket that holds a time, the difference to the line before, or (with CONFIG_PRINTK_CALLER) who printed.
_BRACKET = re.compile(r"\[(?=[^\]]*(?:\d|\.\.\.))([\s+<>.,:\w-]{0,60})\] ?")
_SECONDS = re.compile(r" *(\d{1,12}\.\d{1,9})(?: +<.*)?$")
_SYSLOG_TIME = re.compile(
    r"((?:\w{3} )?(?:[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d(?:\.\d{1,9})?(?: \d{4})?"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|[A-Z]{3,4}|[+-]\d\d:?\d\d))?)"
    r"|\d{9,11}\.\d{6})\s+"
)
_KERNEL_TAG = re.compile(r"(?:[^\s:\[\]]{1,255} +)?kernel(?:\[\d+\])?: ?")
_OTHER_TAG = re.compile(r"[^\s:\[\]]{1,255} +[^\s:]{1,64}(?:\[\d+\])?: ?")
_FACILITIES: Final = ("kern", "user", "mail", "daemon", "auth", "syslog", "lpr", "news")


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One message, unescaped; it may hold newlines.

    Attributes:
        level: 0 emergency to 7 debug, or None where the form does not tell.
        facility: 0 is the kernel's own; None where the form does not tell.
        at_s: on the kernel's clock, seconds since its start.
        stamp: the time as it was written, for :meth:`at_unix_s`.
        sequence: number of the record in /dev/kmsg.
        is_fragment: /dev/kmsg says that it goes on with the line before.
        device: what the kernel says the message is about (``+pci:0000:cb:00.0``).
        number: of the line in the text, from 1; 0 where there is no text.
    """

    text: str
    level: int | None = None
    facility: int | None = None
    at_s: float | None = None
    stamp: str = ""
    sequence: int | None = None
    is_fragment: bool = False
    device: str = ""
    number: int = 0

    @property
    def is_from_kernel(self) -> bool:
        return self.facility in (None, KERNEL)

    def at_unix_s(self) -> float | None:
        """Wall time by the written stamp; local time where it has no zone, the latest year where it has none."""
        return _unix_s(self.stamp) if self.stamp else None


def read_kmsg(record: bytes, number: int = 0) -> KernelLine:
    """The message of one read of /dev/kmsg; also of text that somebody wrote into a FIFO in its place."""
    return read_line(record.decode("utf-8", errors="replace"), number)


def is_continuation(line: str) -> bool:
    """The line goes on with the message before: dmesg, journalctl and /dev/kmsg indent those."""
    return line[:1] in (" ", "\t") and not line.isspace()


def read_line(line: str, number: int = 0) -> KernelLine:
    """The message of one line of text, with what stood before it; never raises."""
    text = line[:MAX_CHARS].rstrip("\r\n\0")
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    text = text.lstrip("\x1e")  # what begins each object of journalctl -o json-seq
    if m := _RECORD.match(text):
        return _record(m, number)
    if text[:1] == "{":
        read = _json(text, number)
        if read is not None:
            return read
    return _plain(text, number)


def _record(m: re.Match[str], number: int) -> KernelLine:
    priority, flags = int(m[1]), m[4].split(",")[0]
    text, _, rest = m[5].partition("\n ")
    return KernelLine(
        text=_unescape(text.rstrip("\n")),
        level=priority & 7,
        facility=priority >> 3,
        at_s=int(m[3]) / 1e6,
        sequence=int(m[2]),
        is_fragment=flags in ("c", "+"),
        device=device_of(rest),
        number=number,
    )


def device_of(properties: str) -> str:
    """The DEVICE of the ``KEY=value`` lines that follow a record."""
    for line in properties.splitlines():
        name, _, value = line.strip().partition("=")
        if name == "DEVICE":
            return _unescape(value)[:200]
    return ""


def _json(text: str, number: int) -> KernelLine | None:
    """journalctl -o json, or an entry of dmesg --json; None when it is neither."""
    try:
        entry = json.loads(text.rstrip(", "))
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    message = entry.get("MESSAGE", entry.get("msg"))
    if isinstance(message, list):  # not UTF-8, or with control characters: journalctl writes the bytes as numbers
        message = bytes(b for b in message if isinstance(b, int) and 0 <= b < 256).decode("utf-8", errors="replace")
    if not isinstance(message, str):
        return None
    if "msg" in entry and "MESSAGE" not in entry:
        priority = _number(entry, "pri")
        facility = priority >> 3 if priority is not None else None
        level = priority & 7 if priority is not None else None
        return KernelLine(_unescape(message[:MAX_CHARS]), level, facility, _seconds(entry.get("time")), number=number)
    monotonic_us = _number(entry, "_SOURCE_MONOTONIC_TIMESTAMP") or _number(entry, "__MONOTONIC_TIMESTAMP")
    realtime_us = _number(entry, "_SOURCE_REALTIME_TIMESTAMP") or _number(entry, "__REALTIME_TIMESTAMP")
    return KernelLine(
        text=_unescape(message[:MAX_CHARS]),
        level=_number(entry, "PRIORITY"),
        facility=_journal_facility(entry),
        at_s=monotonic_us / 1e6 if monotonic_us is not None else None,
        stamp=f"{realtime_us / 1e6:.6f}" if realtime_us is not None else "",
        device=str(entry.get("_KERNEL_DEVICE", ""))[:200],
        number=number,
    )


def _journal_facility(entry: Mapping[str, Any]) -> int | None:
    """journald takes what users write into /dev/kmsg for the kernel's transport too; only the facility tells."""
    facility = _number(entry, "SYSLOG_FACILITY")
    if facility is not None:
        return facility
    transport = entry.get("_TRANSPORT", entry.get("SYSLOG_IDENTIFIER"))
    return None if transport is None else (KERNEL if transport == "kernel" else USER)


def _number(entry: Mapping[str, Any], name: str) -> int | None:
    value = entry.get(name)
    try:
        number = int(value) if isinstance(value, (str, int)) and len(str(value)) <= 20 else None
    except ValueError:
        return None
    return number if number is not None and number >= 0 else None


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e12 else None


def _plain(text: str, number: int) -> KernelLine:
    """Strip priority, facility, times and tag from the front, in the order in which the programs write them."""
    level = facility = None
    stamp, at_s = "", None
    if m := _PRIORITY.match(text):
        level, facility = int(m[1]) & 7, int(m[1]) >> 3
        text = text[m.end() :]
        if m := _RFC5424.match(text):
            stamp, text = m[1], m[6]
            facility = facility if m[3] in ("kernel", "-") else USER
    elif (m := _DECODED.match(text)) and (m[1] in _FACILITIES or m[1].startswith("local")):
        level = _LEVELS.index(m[2])
        facility = _FACILITIES.index(m[1]) if m[1] in _FACILITIES else USER
        text = text[m.end() :]
    if m := _SYSLOG_TIME.match(text):
        stamp, text = m[1], text[m.end() :]
        if tag := _KERNEL_TAG.match(text):
            text = text[tag.end() :]
        elif "," not in stamp and (tag := _OTHER_TAG.match(text)):  # dmesg's ISO times have a comma, and no tag
            facility, text = USER, text[tag.end() :]
    text = text.lstrip(" ") if text.startswith((" [", " <")) else text
    for _ in range(3):
        m = _BRACKET.match(text)
        if m is None:
            break
        if at_s is None and (seconds := _SECONDS.match(m[1])):
            at_s = float(seconds[1])
        elif not stamp and ":" in m[1]:
            stamp = m[1]
        text = text[m.end() :].lstrip(" ")
    if tag := _KERNEL_TAG.match(text):  # bare, or after the seconds of journalctl -o short-monotonic
        text = text[tag.end() :]
        if m := _BRACKET.match(text):
            seconds = _SECONDS.match(m[1])
            at_s = float(seconds[1]) if seconds else at_s
            text = text[m.end() :]
    return KernelLine(_unescape(text), level, facility, at_s, stamp, number=number)


def _unescape(text: str) -> str:
    """Control characters as the kernel and rsyslog write them, and the bytes beyond ASCII of UTF-8."""
    if "\\x" in text:
        out = _HEX.sub(lambda m: chr(int(m[1], 16)), text)
        try:
            text = out.encode("latin-1").decode("utf-8", errors="replace")
        except UnicodeEncodeError:  # other characters beside: then these were not a kernel's escapes of bytes
            text = out
    if "#01" in text or "#033" in text:
        text = _OCTAL.sub(lambda m: chr(int(m[1], 8)), text)
    return text


# -- times -------------------------------------------------------------------------------------------------------------
_EPOCH = re.compile(r"\d{9,11}(?:\.\d+)?")
_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?(?: ?(Z|UTC|[+-]\d\d:?\d\d))?")
_WORDS = re.compile(r"(?:[A-Z][a-z]{2} )?([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?: (\d{4}))?")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def _unix_s(stamp: str) -> float | None:
    stamp = stamp.strip()
    try:
        if _EPOCH.fullmatch(stamp):
            return float(stamp)
        if m := _ISO.search(stamp):
            parts, fraction = [int(m[i]) for i in range(1, 7)], float(f"0.{m[7] or 0}")
            if m[8] is None:
                return _local_s(parts) + fraction
            return _utc_s(parts) - _zone_s(m[8]) + fraction
        if m := _WORDS.search(stamp):
            month = _MONTHS.index(m[1]) + 1
            day = [int(m[i]) for i in (2, 3, 4, 5)]
            fraction = float(f"0.{m[6] or 0}")
            if m[7]:
                return _local_s([int(m[7]), month, *day]) + fraction
            return _latest_s(month, day) + fraction
    except (ValueError, OverflowError, OSError):
        return None
    return None


def _utc_s(parts: list[int]) -> float:
    return float(calendar.timegm((*parts, 0, 0, 0)))


def _local_s(parts: list[int]) -> float:
    year, month, day, hour, minute, second = parts
    return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))


def _zone_s(zone: str) -> float:
    if zone in ("Z", "UTC"):
        return 0.0
    sign = -1 if zone[0] == "-" else 1
    return sign * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)


def _latest_s(month: int, day: list[int]) -> float:
    """Syslog writes no year: the newest one that does not lie ahead."""
    now_s = time.time()
    year = time.localtime(now_s).tm_year
    at_s = _local_s([year, month, *day])
    return at_s if at_s <= now_s + 86400 else _local_s([year - 1, month, *day])
