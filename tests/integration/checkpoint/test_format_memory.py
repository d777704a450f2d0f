"""A rank's files in a file system that lies in memory: who hashes them copies them, no page is asked for in advance."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plainranks import MIB, PlainRank

from steadyrun.checkpoint import shardfile
from steadyrun.checkpoint.shardfile import WriteError, WriteOptions, WriteReason

SMALL = WriteOptions(piece_bytes=256 << 10, in_flight=4)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in a tmpfs."""
    types = {place: kind for _, place, kind, *_ in map(str.split, Path("/proc/mounts").read_text().splitlines())}
    if types.get("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is not in memory here")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_what_lies_in_memory_is_told_from_what_does_not(in_memory: Path) -> None:
    found = []
    for place in (in_memory, Path("/proc/self"), Path("/sys")):
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        found.append(shardfile._is_in_memory(fd))
        os.close(fd)
    assert found == [True, False, False]


def test_who_hashes_a_piece_copies_it_from_its_cache_and_no_page_is_reserved(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    writers: dict[str, set[int]] = {}
    sizes: list[int] = []

    def noting(fd: int, parts: list[memoryview], at_bytes: int) -> int:
        writers.setdefault(os.readlink(f"/proc/self/fd/{fd}"), set()).add(threading.get_ident())
        sizes.append(sum(map(len, parts)))
        return real(fd, parts, at_bytes)

    monkeypatch.setattr(os, "pwritev", noting)
    monkeypatch.setattr(shardfile, "_reserve", lambda *_: pytest.fail("pages were asked for"))
    rank = PlainRank([3 * MIB, 5, MIB + 3])
    assert rank.is_in(in_memory, rank.write(in_memory))
    assert list(writers.values()) == [{threading.get_ident()}] * 3
    assert max(sizes) < 2 * MIB


def test_too_little_memory_is_noticed_before_anything_is_written(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nearly:
        f_blocks, f_bavail, f_frsize = 1000, 3 * MIB // 4096, 4096

    def no_write(*_: Any) -> int:
        pytest.fail("something was written")

    monkeypatch.setattr(os, "fstatvfs", lambda fd: Nearly)
    monkeypatch.setattr(os, "pwritev", no_write)
    with pytest.raises(WriteError) as caught:
        PlainRank([2 * MIB, 2 * MIB]).write(in_memory, SMALL)
    assert caught.value.reason is WriteReason.FULL
    assert os.listdir(in_memory) == []
