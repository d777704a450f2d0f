"""The live kernel log: the real /dev/kmsg where it may be written, FIFOs and growing files everywhere."""

from __future__ import annotations

import json
import os
import random
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steadyrun.collectors.kernel import live
from steadyrun.collectors.kernel.collector import KernelCollector
from steadyrun.collectors.kernel.live import KernelWatch, Position, read_position, write_position
from steadyrun.collectors.protocol import Health
from steadyrun.collectors.registry import Registry
from steadyrun.core.boot import boot_id as this_boot

KMSG = Path("/dev/kmsg")
LATE_S = 5.0


def a_gpu() -> str:
    """An address of its own for each test: others may write into the same log."""
    return f"{random.SystemRandom().randrange(1 << 16):04x}:{random.SystemRandom().randrange(256):02x}:1f"


def xid(pci: str, code: int = 79) -> bytes:
    return f"NVRM: Xid (PCI:{pci}): {code}, pid=7, name=pt_main_thread, GPU has fallen off the bus.\n".encode()


@pytest.fixture
def kmsg() -> Iterator[Callable[[bytes], None]]:
    """Writes into the real log; the kernel takes at most ten lines in five seconds from one opening."""
    try:
        fd = os.open(KMSG, os.O_WRONLY | os.O_CLOEXEC)
        os.close(os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as e:
        pytest.skip(f"{KMSG} cannot be written and read here: {e.strerror}")
    if KMSG.stat().st_rdev != os.makedev(1, 11):
        os.close(fd)
        pytest.skip(f"{KMSG} is not the kernel's log here")
    yield lambda text: os.write(fd, b"<3>" + text) and None
    os.close(fd)


@pytest.fixture
def opened() -> Iterator[Callable[..., KernelWatch]]:
    watches: list[KernelWatch] = []

    def open_watch(**options: object) -> KernelWatch:
        watches.append(KernelWatch(**{"journalctl": None, "any_facility": True, **options}))  # type: ignore[arg-type]
        return watches[-1]

    yield open_watch
    for watch in watches:
        watch.close()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    return path


def write(path: Path, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def wait_readable(watch: KernelWatch, limit_s: float = LATE_S) -> bool:
    fd = watch.fileno()
    assert fd is not None
    return bool(select.select([fd], [], [], limit_s)[0])


# -- the real one ------------------------------------------------------------------------------------------------------
def test_a_line_in_the_real_log_wakes_the_selector_and_is_read(
    kmsg: Callable[[bytes], None], opened: Callable[..., KernelWatch], wait_until: Callable[..., object]
) -> None:
    watch, pci = opened(), a_gpu()
    assert watch.source == "kmsg"
    watch.drain(100_000)
    written_s = time.monotonic()
    kmsg(xid(pci))
    assert wait_readable(watch)
    events = wait_until(lambda: [e for e in watch.drain() if e.word("pci") == pci], LATE_S, "the Xid is not read")
    (event,) = events  # type: ignore[misc]
    assert dict(event.fields) == {"xid": 79, "pci": pci, "pid": 7, "comm": "pt_main_thread"}
    assert event.sequence is not None
    # The kernel's clock may be off from CLOCK_MONOTONIC by the time that the machine was suspended, and a little.
    assert event.at_s == pytest.approx(written_s, abs=2.0)
    assert event.at_unix_s == pytest.approx(time.time(), abs=LATE_S + 2.0)


def test_what_a_program_writes_is_left_out_unless_asked_for(
    kmsg: Callable[[bytes], None], opened: Callable[..., KernelWatch], wait_until: Callable[..., object]
) -> None:
    strict, pci = opened(any_facility=False), a_gpu()
    kmsg(xid(pci))
    seen: list[str] = []

    def is_counted() -> bool:
        seen.extend(e.word("pci") for e in strict.drain())
        return strict.foreign > 0

    wait_until(is_counted, LATE_S, "the line of a program was not seen")
    assert pci not in seen


def test_three_lines_written_at_once_are_one_lost_gpu(
    kmsg: Callable[[bytes], None], opened: Callable[..., KernelWatch], wait_until: Callable[..., object]
) -> None:
    watch, pci = opened(), a_gpu()
    kmsg(
        f"NVRM: The NVIDIA GPU {pci}.0\n               NVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        "               NVRM: fallen off the bus and is not responding to commands.\n".encode()
    )
    events = wait_until(lambda: [e for e in watch.drain() if e.word("pci") == pci], LATE_S, "not read")
    assert [dict(e.fields) for e in events] == [{"xid": 79, "pci": pci, "inferred": True}]  # type: ignore[attr-defined]


def test_the_backlog_is_passed_over_unless_asked_for(
    kmsg: Callable[[bytes], None], opened: Callable[..., KernelWatch]
) -> None:
    pci = a_gpu()
    kmsg(xid(pci))
    assert pci not in [e.word("pci") for e in opened().drain(100_000)]
    assert pci in [e.word("pci") for e in opened(from_boot=True).drain(100_000)]


def test_a_restarted_agent_reads_what_came_in_between(
    kmsg: Callable[[bytes], None], opened: Callable[..., KernelWatch], tmp_path: Path
) -> None:
    file, before, between = tmp_path / "kernel_log.json", a_gpu(), a_gpu()
    first = KernelCollector(opened(), keep_at=file)
    kmsg(xid(before))
    assert before in [e.word("pci") for e in first.events_since(0.0)]
    first.check()
    first.close()
    kmsg(xid(between))
    position = read_position(file)
    assert position is not None
    assert position.boot_id == this_boot()
    seen = [e.word("pci") for e in opened(position=position).drain(100_000)]
    assert between in seen
    assert before not in seen


def test_the_position_of_another_boot_counts_for_nothing(
    kmsg: Callable[[bytes], None], opened: Callable[..., KernelWatch]
) -> None:
    pci = a_gpu()
    kmsg(xid(pci))
    watch = opened(position=Position("another-boot", 0))
    assert pci not in [e.word("pci") for e in watch.drain(100_000)]


def test_overwritten_records_are_counted_as_lost(
    kmsg: Callable[[bytes], None], opened: Callable[..., KernelWatch]
) -> None:
    """An agent that was away for long: the oldest record in the buffer is not the one after its position."""
    oldest = opened(from_boot=True)
    assert oldest.lost == 0
    fd = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK)
    try:
        first = int(os.read(fd, 16384).split(b",")[1])
    finally:
        os.close(fd)
    if first < 2:
        pytest.skip("nothing was overwritten since this machine started")
    watch = opened(position=Position(this_boot(), first - 2))
    watch.drain(10)
    assert watch.lost == 1


def test_an_overrun_in_the_middle_goes_on_after_the_gap(
    kmsg: Callable[[bytes], None], opened: Callable[..., KernelWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel answers EPIPE once and goes on with the oldest record that it still has."""
    watch, pci = opened(), a_gpu()
    watch.drain(100_000)
    position = watch.position()
    assert position is not None
    assert position.sequence is not None
    answers = iter(
        [
            BrokenPipeError(),
            f"3,{position.sequence + 101},1,-;".encode() + xid(pci),
            BlockingIOError(),
        ]
    )
    real, fd = os.read, watch.fileno()

    def read(number: int, size: int) -> bytes:
        if number != fd:
            return real(number, size)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(live.os, "read", read)
    assert [e.word("pci") for e in watch.drain()] == [pci]
    assert watch.lost == 100
    monkeypatch.undo()


# -- stand-ins ---------------------------------------------------------------------------------------------------------
def test_a_fifo_serves_in_place_of_the_log(fifo: Path, opened: Callable[..., KernelWatch]) -> None:
    watch = opened(path=fifo)
    assert watch.source == "kmsg"
    assert not wait_readable(watch, 0.0)
    write(fifo, b"3,5,12000000,-;" + xid("0000:cb:00") + b" SUBSYSTEM=pci\n DEVICE=+pci:0000:cb:00.0\n")
    assert wait_readable(watch)
    (event,) = watch.drain()
    assert (event.event, event.at_s, event.sequence) == ("xid", 12.0, 5)
    write(fifo, b"<3>" + xid("0000:18:00")[:40])
    assert watch.drain() == []  # half a line: not yet
    write(fifo, xid("0000:18:00")[40:])
    assert [e.word("pci") for e in watch.drain()] == ["0000:18:00"]
    assert not wait_readable(watch, 0.0)  # no writer any more, and yet no end of file


def test_a_fifo_takes_messages_of_several_lines(fifo: Path, opened: Callable[..., KernelWatch]) -> None:
    watch = opened(path=fifo)
    write(
        fifo,
        b"NVRM: The NVIDIA GPU 0000:b3:00.0\n               NVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        b"               NVRM: fallen off the bus and is not responding to commands.\n",
    )
    assert [dict(e.fields) for e in watch.drain()] == [{"xid": 79, "pci": "0000:b3:00", "inferred": True}]


def test_a_burst_is_one_event(fifo: Path, opened: Callable[..., KernelWatch]) -> None:
    watch = opened(path=fifo)
    write(fifo, b"".join(f"4,{i},{i}000,-;".encode() + xid("0000:cb:00", 31) for i in range(30)))
    assert len(watch.drain()) == 1


def test_a_growing_file_is_followed_from_its_end(tmp_path: Path, opened: Callable[..., KernelWatch]) -> None:
    file = tmp_path / "kern.log"
    file.write_bytes(xid("0000:18:00"))
    watch = opened(path=file)
    assert watch.drain() == []
    write(file, xid("0000:cb:00"))
    assert [e.word("pci") for e in watch.drain()] == ["0000:cb:00"]
    assert watch.fileno() is None  # a file cannot be waited for


def test_a_flood_takes_the_loop_a_few_messages_at_a_time(fifo: Path, opened: Callable[..., KernelWatch]) -> None:
    watch = opened(path=fifo)
    write(fifo, b"".join(f"6,{i},{i},-;usb 1-1: new device\n".encode() for i in range(1000)))
    write(fifo, xid("0000:cb:00"))
    assert watch.drain(limit=500) == []
    assert wait_readable(watch)
    events = [e for _ in range(4) for e in watch.drain(limit=500)]
    assert [e.word("pci") for e in events] == ["0000:cb:00"]


@pytest.mark.parametrize("make", ["missing", "console", "folder"])
def test_what_is_no_kernel_log_is_said_with_what_would_enable_it(
    make: str, tmp_path: Path, opened: Callable[..., KernelWatch]
) -> None:
    path = tmp_path / "kmsg"
    if make == "console":
        path.symlink_to("/dev/null")
    elif make == "folder":
        path.mkdir()
    watch = opened(path=path, journalctl=str(tmp_path / "journalctl"))
    collector = KernelCollector(watch)
    result = collector.check()
    assert result.health is Health.UNKNOWN
    assert "CAP_SYSLOG" in result.reason
    assert watch.drain() == []
    collector.close()


# -- the journal -------------------------------------------------------------------------------------------------------
JOURNALCTL = """\
#!{python}
import json, sys, time
sys.stderr.write("Hint: you see little\\n")
if "--follow" not in sys.argv:
    {probe}
    raise SystemExit
def say(n, text, facility="0"):
    entry = {{"MESSAGE": text, "SYSLOG_FACILITY": facility, "PRIORITY": "3", "__CURSOR": f"c{{n}}",
             "__MONOTONIC_TIMESTAMP": str(n * 1000000), "__REALTIME_TIMESTAMP": str(1700000000000000 + n)}}
    print(json.dumps(entry), flush=True)
after = sys.argv[sys.argv.index("--after-cursor") + 1] if "--after-cursor" in sys.argv else "c0"
for n in (1, 2):
    if n > int(after[1:]):
        say(n, f"NVRM: Xid (PCI:0000:0{{n}}:00): 79, x")
say(3, "NVRM: Xid (PCI:0000:03:00): 79, x", facility="1")
{end}
"""


@pytest.fixture
def journalctl(tmp_path: Path) -> Callable[..., str]:
    def make(probe: str = 'print("{}")', end: str = "sys.stdin.read(); time.sleep(600)") -> str:
        program = tmp_path / "journalctl"
        program.write_text(JOURNALCTL.format(python=sys.executable, probe=probe, end=end))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return str(program)

    return make


def drained(watch: KernelWatch, count: int, wait_until: Callable[..., object]) -> list[str]:
    seen: list[str] = []

    def enough() -> bool:
        seen.extend(e.word("pci") for e in watch.drain())
        return len(seen) >= count

    wait_until(enough, 20.0, lambda: f"only {seen}; {watch.problem}")
    return seen


def test_the_journal_stands_in_where_the_log_cannot_be_read(
    tmp_path: Path,
    journalctl: Callable[..., str],
    opened: Callable[..., KernelWatch],
    wait_until: Callable[..., object],
) -> None:
    program = journalctl()
    watch = opened(path=tmp_path / "none", journalctl=program, any_facility=False)
    assert watch.source == "journal"
    assert drained(watch, 2, wait_until) == ["0000:01:00", "0000:02:00"]
    wait_until(lambda: watch.drain() == [] and watch.foreign == 1, 20.0, "the third line is not there")
    assert watch.position() == Position(this_boot(), None, "c3")
    later = opened(path=tmp_path / "none", journalctl=program, position=Position(this_boot(), None, "c1"))
    assert drained(later, 1, wait_until)[0] == "0000:02:00"


def test_a_journal_that_shows_nothing_to_this_user_is_no_source(
    tmp_path: Path, journalctl: Callable[..., str], opened: Callable[..., KernelWatch]
) -> None:
    watch = opened(path=tmp_path / "none", journalctl=journalctl(probe="pass"))
    assert watch.source == "none"
    assert "shows no kernel messages" in watch.problem


def test_a_journal_that_ends_is_told(
    tmp_path: Path,
    journalctl: Callable[..., str],
    opened: Callable[..., KernelWatch],
    wait_until: Callable[..., object],
) -> None:
    watch = opened(path=tmp_path / "none", journalctl=journalctl(end="raise SystemExit(3)"))
    wait_until(lambda: (watch.drain(), watch.source)[1] == "none", 20.0, "the end was not noticed")
    assert "exit status 3" in watch.problem


# -- as a collector ----------------------------------------------------------------------------------------------------
def test_events_reach_the_agent_through_the_registry(
    fifo: Path, opened: Callable[..., KernelWatch], wait_until: Callable[..., object]
) -> None:
    collector = KernelCollector(opened(path=fifo))
    registry = Registry([collector])
    registry.start()
    try:
        wait_until(lambda: registry.results()["kernel_log"].result.health is Health.HEALTHY, LATE_S, "never checked")
        write(fifo, xid("0000:cb:00"))
        registry.check_soon("kernel_log")
        wait_until(lambda: registry.results()["kernel_log"].result.health is Health.UNHEALTHY, LATE_S, "not told")
        result = registry.results()["kernel_log"].result
        assert "Xid 79 0000:cb:00" in result.reason
        assert result.facts["events_total.xid"] == 1
        assert [e.event for e in collector.take_events()] == ["xid"]
        assert collector.take_events() == []
    finally:
        registry.close()


def test_pump_and_check_from_two_threads_give_each_event_once(
    fifo: Path, opened: Callable[..., KernelWatch], wait_until: Callable[..., object]
) -> None:
    collector = KernelCollector(opened(path=fifo))
    stop = threading.Event()

    def check() -> None:
        while not stop.wait(0.001):  # locks are not fair: without a pause the other thread hardly ever gets its turn
            collector.check()

    thread = threading.Thread(target=check)
    thread.start()
    try:
        seen: list[str] = []
        for i in range(100):
            write(fifo, xid(f"0000:{i:02x}:00"))
            collector.pump()
            seen.extend(e.word("pci") for e in collector.take_events())

        def all_seen() -> bool:
            collector.pump()
            seen.extend(e.word("pci") for e in collector.take_events())
            return len(seen) >= 100

        wait_until(all_seen, LATE_S, lambda: f"{len(seen)} of 100")
        assert sorted(seen) == sorted(set(seen))
        assert len(seen) == 100
    finally:
        stop.set()
        thread.join()
        collector.close()


def test_a_position_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    file = tmp_path / "position.json"
    assert read_position(file) is None
    for text in ("", "{", "[]", '{"schema": "other/1"}', '{"schema": "steadyrun.kernel-log/1", "boot_id": "a"}'):
        file.write_text(text)
        assert read_position(file) is None
    write_position(file, Position("a", 5))
    assert read_position(file) == Position("a", 5)
    assert json.loads(file.read_text())["schema"] == "steadyrun.kernel-log/1"
    assert os.listdir(tmp_path) == ["position.json"]
