"""The tailer against pipes and files as console."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.node.tailer import PARTIAL_AFTER_S, QUEUE_BYTES, READ_BYTES, STDERR, STDOUT, LogTailer, split_whole_lines


class Console:
    """Two pipes in the place of stdout and stderr."""

    def __init__(self) -> None:
        self.out_read, self.out_write = os.pipe()
        self.err_read, self.err_write = os.pipe()
        self.open = [self.out_read, self.out_write, self.err_read, self.err_write]

    def read(self, fd: int, size: int, deadline_s: float = 10.0) -> bytes:
        """Exactly *size* bytes."""
        got = b""
        while len(got) < size:
            assert select.select([fd], [], [], deadline_s)[0], f"only {got!r} came, {size} bytes expected"
            got += os.read(fd, size - len(got))
        return got

    def is_silent(self, fd: int, for_s: float = 0.1) -> bool:
        return not select.select([fd], [], [], for_s)[0]

    def close(self, fd: int) -> None:
        os.close(fd)
        self.open.remove(fd)


@pytest.fixture
def console() -> Iterator[Console]:
    console = Console()
    yield console
    for fd in console.open:
        os.close(fd)


@given(st.binary(max_size=200))
def test_split_loses_nothing_and_cuts_after_a_line_end(data: bytes) -> None:
    whole, rest = split_whole_lines(data)
    assert whole + rest == data
    assert not whole or whole[-1:] in (b"\n", b"\r")
    assert b"\n" not in rest
    assert b"\r" not in rest


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as f:
        f.write(data)


def test_lines_go_to_their_stream_byte_for_byte(tmp_path: Path, console: Console) -> None:
    tailer = LogTailer(console.out_write, console.err_write)
    out, err = tmp_path / "out", tmp_path / "err"
    tailer.follow(out, STDOUT)
    tailer.follow(err, STDERR)
    tailer.pump(0.0)  # before the files exist
    append(out, b"one\n\xff\x00two\n")
    append(err, b"three\n")
    tailer.pump(0.1)
    assert console.read(console.out_read, 10) == b"one\n\xff\x00two\n"
    assert console.read(console.err_read, 6) == b"three\n"
    tailer.close()


def test_unfinished_line_waits_a_moment_for_its_end(tmp_path: Path, console: Console) -> None:
    tailer = LogTailer(console.out_write, console.err_write)
    log = tmp_path / "log"
    tailer.follow(log, STDOUT)
    append(log, b"done\nepoch 1:")
    tailer.pump(0.0)
    assert console.read(console.out_read, 5) == b"done\n"
    tailer.pump(PARTIAL_AFTER_S / 2)
    assert console.is_silent(console.out_read)
    tailer.pump(PARTIAL_AFTER_S)
    assert console.read(console.out_read, 8) == b"epoch 1:"
    append(log, b" ok\n")
    tailer.pump(PARTIAL_AFTER_S)
    assert console.read(console.out_read, 4) == b" ok\n"
    tailer.close()


def test_prefix_stands_once_before_each_line(tmp_path: Path, console: Console) -> None:
    tailer = LogTailer(console.out_write, console.err_write)
    log = tmp_path / "log"
    tailer.follow(log, STDOUT, "[trainer0]:")
    append(log, b"a\n\nb")
    tailer.pump(0.0)
    tailer.pump(1.0)
    append(log, b"c\nd\n")
    tailer.pump(2.0)
    expected = b"[trainer0]:a\n[trainer0]:\n[trainer0]:bc\n[trainer0]:d\n"
    assert console.read(console.out_read, len(expected)) == expected
    tailer.close()


def test_close_copies_the_rest_and_an_unfinished_line(tmp_path: Path, console: Console) -> None:
    tailer = LogTailer(console.out_write, console.err_write)
    log = tmp_path / "log"
    tailer.follow(log, STDOUT)
    append(log, b"last line\nand no end")
    tailer.close()
    assert console.read(console.out_read, 20) == b"last line\nand no end"


def test_retired_file_is_copied_to_its_end_and_forgotten(tmp_path: Path, console: Console) -> None:
    tailer = LogTailer(console.out_write, console.err_write)
    log = tmp_path / "log"
    tailer.follow(log, STDOUT)
    append(log, b"bye")
    tailer.retire(log)
    for now_s in (0.0, 0.01, 0.02):
        tailer.pump(now_s)
    assert console.read(console.out_read, 3) == b"bye"
    append(log, b"too late\n")
    tailer.pump(1.0)
    assert console.is_silent(console.out_read)
    tailer.close()


def test_full_console_blocks_nobody_and_nothing_is_lost(tmp_path: Path, console: Console) -> None:
    tailer = LogTailer(console.out_write, console.err_write)
    log = tmp_path / "log"
    data = b"".join(b"%09d\n" % n for n in range(3 * QUEUE_BYTES // 10))
    append(log, data)
    tailer.follow(log, STDOUT)
    for n in range(40):  # nobody reads: the pumps must return all the same, and stop reading ahead
        tailer.pump(float(n))
    got = bytearray()
    reader = threading.Thread(target=lambda: got.extend(console.read(console.out_read, len(data))))
    reader.start()
    tailer.close(timeout_s=20.0)
    reader.join(20.0)
    assert bytes(got) == data


def test_console_that_is_never_read_is_given_up_with_a_count(tmp_path: Path, console: Console) -> None:
    notes: list[str] = []
    tailer = LogTailer(console.out_write, console.err_write, notes.append)
    log = tmp_path / "log"
    append(log, b"x" * (QUEUE_BYTES + 5 * READ_BYTES) + b"\n")
    tailer.follow(log, STDOUT)
    tailer.close(timeout_s=0.2)
    (note,) = notes
    assert "did not take the last" in note


def test_closed_console_is_told_once_and_ends_nothing(
    tmp_path: Path, console: Console, wait_until: Callable[..., object]
) -> None:
    notes: list[str] = []
    tailer = LogTailer(console.out_write, console.err_write, notes.append)
    log = tmp_path / "log"
    tailer.follow(log, STDOUT)
    console.close(console.out_read)

    def write_more() -> bool:
        append(log, b"line\n")
        tailer.pump(0.0)
        return bool(notes)

    wait_until(write_more, 10.0, "the closed console was not noticed")
    for _ in range(5):
        write_more()
    tailer.close()
    assert len(notes) == 1
    assert "closed" in notes[0]


def test_one_console_for_both_streams_keeps_lines_whole(tmp_path: Path, console: Console) -> None:
    tailer = LogTailer(console.out_write, console.out_write)
    out, err = tmp_path / "out", tmp_path / "err"
    tailer.follow(out, STDOUT)
    tailer.follow(err, STDERR)
    append(out, (b"o" * 5000 + b"\n") * 6)
    append(err, (b"e" * 5000 + b"\n") * 6)
    tailer.pump(0.0)
    lines = console.read(console.out_read, 12 * 5001).splitlines()
    assert all(set(line) in ({ord("o")}, {ord("e")}) for line in lines)
    tailer.close()


def is_woken(tailer: LogTailer) -> bool:
    fd = tailer.fileno()
    assert fd is not None
    return bool(select.select([fd], [], [], 0)[0])


def test_quiet_files_are_watched_instead_of_read(tmp_path: Path, console: Console) -> None:
    tailer = LogTailer(console.out_write, console.err_write)
    log = tmp_path / "log"
    append(log, b"one\n")
    tailer.follow(log, STDOUT)
    now_s, pumps = 100.0, 0
    while now_s < 110.0:
        assert tailer.due_s <= now_s
        tailer.pump(now_s)
        now_s, pumps = max(tailer.due_s, now_s), pumps + 1
    assert pumps < 20  # ten times a second for a second, then hardly ever
    assert not is_woken(tailer)

    append(log, b"two\n")
    assert is_woken(tailer)
    tailer.wake()
    assert not is_woken(tailer)
    assert tailer.due_s <= now_s
    tailer.pump(now_s)
    assert console.read(console.out_read, 8) == b"one\ntwo\n"
    assert tailer.due_s <= now_s + 0.1  # more may come
    append(log, b"three\n")
    assert not is_woken(tailer)  # a file that grows all the time wakes nobody
    tailer.close()


def test_what_came_just_before_the_watch_is_copied(tmp_path: Path, console: Console) -> None:
    tailer = LogTailer(console.out_write, console.err_write)
    log = tmp_path / "log"
    append(log, b"one\n")
    tailer.follow(log, STDOUT)
    tailer.pump(100.0)
    now_s = 102.0
    tailer.pump(now_s)  # from now on it is watched
    assert tailer.due_s == now_s  # but once more
    append(log, b"two\n")
    tailer.pump(now_s)
    assert console.read(console.out_read, 8) == b"one\ntwo\n"
    tailer.close()


def test_a_new_file_is_read_at_once(tmp_path: Path, console: Console) -> None:
    tailer = LogTailer(console.out_write, console.err_write)
    for now_s in (100.0, 102.0, 102.0):
        tailer.pump(now_s)
    assert tailer.due_s > 103.0
    tailer.follow(tmp_path / "log", STDOUT)
    assert tailer.due_s < 102.0
    tailer.close()
