"""``steadyctl read-kernel-log``: what a kernel log says that concerns a training job."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from steadyrun.collectors.kernel.events import EVENT_SCHEMA, Assembler, Folding, KernelEvent, read_text
from steadyrun.collectors.kernel.live import KMSG, KernelWatch
from steadyrun.collectors.protocol import Health
from steadyrun.core.errors import ConfigError
from steadyrun.ctl.console import Console, clock_time, plain, size

__all__ = ["register"]

MAX_LINE_BYTES: Final = 1 << 16
_GZIP: Final = b"\x1f\x8b"
_DMESG_JSON: Final = b'{\n   "dmesg"'
_MAX_DOCUMENT_BYTES: Final = 256 << 20
_COLOURS: Final = {Health.UNHEALTHY: "red", Health.DEGRADED: "yellow", Health.HEALTHY: "dim", Health.UNKNOWN: "dim"}

EPILOG: Final = """\
FILE is the output of dmesg or journalctl in any of their formats, a syslog
file, or a copy of /dev/kmsg; also compressed with gzip. "-" is the standard
input. Without FILE: what is piped in, else this machine's own log.

Only the kernel's own messages count: anybody may write "NVRM: Xid" into a log.
Codes that the catalogue does not have are shown, and taken seriously.

exit codes:
  0  the log was read, whatever is in it
  1  this machine's log cannot be read
  2  the command line cannot be used

examples:
  steadyctl read-kernel-log
  dmesg -T | steadyctl read-kernel-log
  journalctl -k -o json --since yesterday | steadyctl read-kernel-log - --json
  steadyctl read-kernel-log /var/log/kern.log.2.gz --only xid,sxid
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "read-kernel-log",
        help="find GPU, memory, network and disk faults in a kernel log",
        description="Shows what a kernel log says that concerns a training job: Xids, OOM kills, stuck tasks, links, "
        "disks and file servers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help='dmesg or journal text, or "-" for standard input')
    parser.add_argument("--json", action="store_true", help=f"print one object per event ({EVENT_SCHEMA}), one a line")
    parser.add_argument("--fold", action="store_true", help="leave out repeats of an event within a second")
    parser.add_argument("--only", metavar="EVENT,...", help="kinds to show, as the column EVENT names them")
    parser.add_argument("--any-writer", action="store_true", help="believe what other programs wrote into the log too")
    parser.set_defaults(run=run_read)


def run_read(args: argparse.Namespace, console: Console) -> int:
    """The exit code is 0 whenever the log could be read."""
    assembler = Assembler(any_facility=args.any_writer)
    only = frozenset(w.strip() for w in args.only.split(",")) if args.only else None
    with _events(args.file, assembler) as events:
        chosen = _chosen(events, only, args.fold)
        return _print_json(chosen, console) if args.json else _print_text(chosen, assembler, console)


def _chosen(events: Iterator[KernelEvent], only: frozenset[str] | None, fold: bool) -> Iterator[KernelEvent]:
    folding = Folding()
    for event in events:
        if only is not None and event.event not in only:
            continue
        at_s = event.at_s if event.at_s is not None else event.at_unix_s
        if fold and folding.take(event, at_s if at_s is not None else 0.0) is None:
            continue
        yield event


@contextmanager
def _events(file: str | None, assembler: Assembler) -> Iterator[Iterator[KernelEvent]]:
    if file is None and sys.stdin.isatty():
        file = str(KMSG)
    if file is not None and Path(file) == KMSG:
        yield _own_log(assembler)
    elif file is None or file == "-":
        yield read_text(_lines(sys.stdin.buffer), assembler)
    else:
        with _opened(file) as f:
            yield read_text(_lines(f), assembler)


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    try:
        stream = open(file, "rb")  # noqa: SIM115  (errors of the opening only)
        stream.peek(1)  # a folder, or no right to read
    except OSError as e:
        reason = (e.strerror or str(e)).lower()
        raise ConfigError(f"cannot read {file}: {reason}; give a file of kernel messages, or - for stdin") from None
    with stream:
        yield stream


def _own_log(assembler: Assembler) -> Iterator[KernelEvent]:
    watch = KernelWatch(from_boot=True, journalctl=None)
    try:
        if watch.source == "none":
            raise ConfigError(f"{watch.problem}; or pipe it in: journalctl -k | steadyctl read-kernel-log")
        yield from watch.drain_all(assembler)
    finally:
        watch.close()


def _lines(stream: BinaryIO) -> Iterator[str]:
    """Lines of text, each as soon as it is there; whatever is in them."""
    buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream)  # type: ignore[type-var]
    head = buffered.peek(16)[:16]
    if head.startswith(_GZIP):
        yield from _decoded(gzip.GzipFile(fileobj=buffered))
    elif head.startswith(_DMESG_JSON):
        yield from _entries(buffered.read(_MAX_DOCUMENT_BYTES))
    else:
        yield from _decoded(buffered)


def _decoded(stream: Any) -> Iterator[str]:
    try:
        while raw := stream.readline(MAX_LINE_BYTES):
            yield raw.decode("utf-8", errors="replace")
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise ConfigError(f"the compressed log is damaged: {e}; what came before the damage was read") from None


def _entries(document: bytes) -> Iterator[str]:
    """The entries of ``dmesg --json``, which is one document."""
    try:
        entries = json.loads(document)["dmesg"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    for entry in entries if isinstance(entries, list) else ():
        yield json.dumps(entry)


def _print_json(events: Iterator[KernelEvent], console: Console) -> int:
    for event in events:
        console.print(json.dumps(event.to_json(), ensure_ascii=False))
        console.out.flush()  # somebody may be following a log
    return 0


def _print_text(events: Iterator[KernelEvent], assembler: Assembler, console: Console) -> int:
    folded = _folded(events)
    if not folded:
        console.print("no event that concerns a training job")
    else:
        width = max(len(str(e.line_number)) for e in folded)
        for event in folded:
            for line in _lines_of(event, width, console):
                console.print(line)
        advice = dict.fromkeys(a for e in sorted(folded, key=lambda e: -e.health.weight) for a in e.actions)
        for i, text in enumerate(advice):
            for line in console.wrapped(text, 9, "to do:   " if i == 0 else None):
                console.print(line)
    if assembler.foreign:
        other = "message was" if assembler.foreign == 1 else "messages were"
        text = f"{assembler.foreign} {other} left out: a program wrote it, not the kernel (--any-writer shows it)"
        for line in console.wrapped(text, 0, None, "dim"):
            console.print(line)
    return 0


def _folded(events: Iterator[KernelEvent]) -> list[KernelEvent]:
    """Repeats of the same thing right after each other as one row."""
    out: list[KernelEvent] = []
    for event in events:
        if out and out[-1].key == event.key:
            out[-1] = out[-1].counted(out[-1].count + 1)
        else:
            out.append(event)
    return out


def _lines_of(event: KernelEvent, width: int, console: Console) -> list[str]:
    """Number, time and title; below it what it means. A table would leave the meaning a few columns only."""
    number = f"{event.line_number or '':>{width}}"
    at = clock_time(event.at_unix_s, with_date=True) if event.at_unix_s is not None else _seconds(event.at_s)
    cls = event.effective_class
    kind = f" [{cls.value}]" if cls is not None else ""
    times = f" ({event.count} times)" if event.count > 1 else ""
    title = console.styled(plain(event.title), "bold", _COLOURS[event.health])
    head = f"{number}  {at:<19}  {title}{kind}{plain(_who(event))}{times}"
    return [console.cut(head), *console.wrapped(plain(f"{event.meaning}{_details(event)}"), width + 2)]


def _details(event: KernelEvent) -> str:
    """What else the message says that a person acts on."""
    fatal = event.fields.get("fatal")
    parts = (
        f"link {event.word('link')}" if (event.number("link") or -1) >= 0 else "",
        "" if fatal is None else ("fatal" if fatal else "not fatal"),
        f"caused by Xid {event.word('cause_xid')}" if event.word("cause_xid") else "",
        f"for {event.word('seconds')} s" if event.word("seconds") else "",
        f"in {event.word('library')}" if event.word("library") else "",
        f"{size((event.number('anon_kb') or 0) * 1024)} resident" if event.word("anon_kb") else "",
    )
    return "".join(f"; {p}" for p in parts if p)


def _seconds(at_s: float | None) -> str:
    """Without a wall time there is only the kernel's clock."""
    return "" if at_s is None else f"[{at_s:.3f}]"


def _who(event: KernelEvent) -> str:
    comm, pid = event.word("comm"), event.number("pid")
    if pid is None:
        return ""
    return f", pid {pid} ({comm})" if comm and comm not in event.title else f", pid {pid}"
