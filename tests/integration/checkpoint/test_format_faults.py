"""Storage that fails while a rank's files are written: the reason is said, nothing half left, the next try works."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plainranks import MIB, PlainRank

from steadyrun.checkpoint import shardfile
from steadyrun.checkpoint.shardfile import RateLimit, WriteError, WriteOptions, WriteReason

SMALL = WriteOptions(piece_bytes=256 << 10)

SCRIPT = """
import json, os, resource, subprocess, sys
from pathlib import Path
from plainranks import MIB, PlainRank
from steadyrun.checkpoint.shardfile import WriteError, WriteOptions

folder, told = Path(sys.argv[1]), []
SMALL = WriteOptions(piece_bytes=256 << 10)

def attempt(rank, options=SMALL, progress=None):
    try:
        written = rank.write(folder, options, progress)
        told.append(["written", rank.is_in(folder, written), len(os.listdir(folder))])
    except WriteError as e:
        left = len(os.listdir(folder)) if folder.exists() else 0
        told.append([e.reason.value, str(e), left])

def free_bytes():
    there = os.statvfs(folder)
    return there.f_bavail * there.f_frsize

def run(*argv):
    subprocess.run(argv, check=True)

%s
print(json.dumps(told))
"""


def told(code: str, folder: Path, *before: str) -> list[list[Any]]:
    """What *code* noted, in a process of its own; *before* is the command that starts it."""
    argv = [*before, sys.executable, "-c", SCRIPT % code, str(folder)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    result: list[list[Any]] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="session")
def own_mounts() -> tuple[str, ...]:
    """The command behind which a process may mount file systems that nobody else sees."""
    argv = ("unshare", "--user", "--map-root-user", "--mount")
    if shutil.which("unshare") is None:
        pytest.skip("the command unshare is not installed: no file system can be mounted for this test alone")
    probe = (*argv, "mount", "-t", "tmpfs", "none", "/mnt")
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"this machine lets no one mount a file system for itself: {done.stderr.strip()}")
    return argv


# -- real effects ------------------------------------------------------------------------------------------------------
def test_a_limit_on_file_size_is_met_before_anything_is_written(tmp_path: Path) -> None:
    first, second, third = told(
        """
rank = PlainRank([MIB, 3 * MIB])
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
attempt(rank)
attempt(rank, WriteOptions(piece_bytes=256 << 10, reserve=False))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
attempt(rank)
""",
        tmp_path,
    )
    for reason, text, left in (first, second):
        assert (reason, left) == ("quota", 0)
        assert f"cannot write the files of rank 0 in {tmp_path}: File too large" in text
        assert "ulimit -f" in text
    assert third == ["written", True, 3]


def test_a_full_disk_costs_nothing_that_was_there(tmp_path: Path, own_mounts: tuple[str, ...]) -> None:
    reserved, unreserved, small, free = told(
        """
run("mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder))
before = free_bytes()
attempt(PlainRank([3 * MIB, 3 * MIB]))
attempt(PlainRank([3 * MIB, 3 * MIB]), WriteOptions(piece_bytes=256 << 10, reserve=False))
told_free = [free_bytes() == before]
attempt(PlainRank([MIB, MIB]))
told.append(told_free)
""",
        tmp_path,
        *own_mounts,
    )
    for reason, text, left in (reserved, unreserved):
        assert (reason, left) == ("full", 0)
        assert "No space left on device" in text
        assert "keep fewer checkpoints" in text
    assert small == ["written", True, 3]
    assert free == [True]


def test_a_disk_that_is_read_only_for_a_while(tmp_path: Path, own_mounts: tuple[str, ...]) -> None:
    first, second = told(
        """
run("mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder))
run("mount", "-o", "remount,ro", str(folder))
attempt(PlainRank([MIB]))
run("mount", "-o", "remount,rw", str(folder))
attempt(PlainRank([MIB]))
""",
        tmp_path,
        *own_mounts,
    )
    assert (first[0], first[2]) == ("read_only", 0)
    assert "Read-only file system" in first[1]
    assert second == ["written", True, 3]


def test_a_mount_that_vanishes_while_it_is_written_to(tmp_path: Path, own_mounts: tuple[str, ...]) -> None:
    """The writer's files stay open and take every byte; they are just not there any more for anybody."""
    first, second = told(
        """
run("mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder))
gone = []
def progress(done, total):
    if done > total // 2 and not gone:
        gone.append(True)
        run("umount", "--lazy", str(folder))
attempt(PlainRank([4 * MIB, 4 * MIB]), SMALL, progress)
attempt(PlainRank([MIB]))
""",
        tmp_path,
        *own_mounts,
    )
    assert (first[0], first[2]) == ("gone", 0)
    assert "look whether it is still mounted" in first[1]
    assert second == ["written", True, 3]


def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    first, second = told(
        """
folder.chmod(0o555)
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)  # the right to ignore permissions goes with it
attempt(PlainRank([MIB]))
if os.getuid() == 0:
    os.seteuid(0)
folder.chmod(0o755)
attempt(PlainRank([MIB]))
""",
        _open_to_all(tmp_path),
    )
    assert (first[0], first[2]) == ("permission", 0)
    assert "Permission denied; give the user of the job write access" in first[1]
    assert second == ["written", True, 3]


def _open_to_all(tmp_path: Path) -> Path:
    """A folder that another user can reach: pytest's own is closed to all but its owner."""
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("size_bytes", [3 * MIB, 100])
def test_a_folder_that_is_removed_while_it_is_written(tmp_path: Path, size_bytes: int) -> None:
    folder = tmp_path / "partial"
    folder.mkdir()

    def progress(done: int, total: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    with pytest.raises(WriteError, match="No such file or directory") as caught:
        PlainRank([size_bytes, size_bytes]).write(folder, SMALL, progress)
    assert caught.value.reason is WriteReason.GONE


def test_a_writer_whose_folder_was_replaced_does_not_touch_the_new_one(tmp_path: Path) -> None:
    folder, aside = tmp_path / "partial", tmp_path / "aside"
    folder.mkdir()

    def progress(done: int, total: int) -> None:
        if not aside.exists():
            folder.rename(aside)
            folder.mkdir()
            (folder / "__0_0.distcp").write_text("of a newer attempt")

    with pytest.raises(WriteError, match="was replaced while it was written") as caught:
        PlainRank([MIB, MIB]).write(folder, SMALL, progress)
    assert caught.value.reason is WriteReason.GONE
    assert [(p.name, p.read_text()) for p in folder.iterdir()] == [("__0_0.distcp", "of a newer attempt")]
    assert list(aside.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="No such file or directory") as caught:
        PlainRank([10]).write(tmp_path / "nowhere")
    assert caught.value.reason is WriteReason.GONE
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="Not a directory") as caught:
        PlainRank([10]).write(tmp_path / "file")
    assert caught.value.reason is WriteReason.GONE


def test_a_folder_of_another_node_may_come_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "partial"
    looked = []

    def look_anew(path: Path) -> list[str]:
        looked.append(path)
        if len(looked) == 2:
            folder.mkdir()
        return []

    monkeypatch.setattr(shardfile.os, "listdir", look_anew)
    written = PlainRank([10]).write(folder, WriteOptions(appear_within_s=60.0))
    assert len(written.files) == 3
    assert looked == [tmp_path, tmp_path]


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    folder = tmp_path / "partial"
    folder.mkdir()
    (folder / "__0_0.distcp").symlink_to(outside)
    with pytest.raises(WriteError, match="symbolic link"):
        PlainRank([10]).write(folder)
    assert outside.read_text() == "precious"


def test_files_of_an_earlier_try_are_replaced(tmp_path: Path) -> None:
    PlainRank([3 * MIB], b"long" * 1000).write(tmp_path)
    rank = PlainRank([5])
    assert rank.is_in(tmp_path, rank.write(tmp_path))


# -- a write that is given up ------------------------------------------------------------------------------------------
def test_an_interrupt_ends_the_write_and_leaves_no_file_and_no_thread(tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PlainRank([4 * MIB, 4 * MIB]).write(tmp_path, SMALL, progress)
    assert list(tmp_path.iterdir()) == []


def test_payload_of_another_length_is_refused(tmp_path: Path) -> None:
    rank = PlainRank([100, 200])
    whole = rank.bytes_of
    rank.bytes_of = lambda entry: whole(entry)[:-1]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="99 bytes are given for 't0', which has 100"):
        rank.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- effects that no file system here has ------------------------------------------------------------------------------
class Failing:
    """``os.pwritev`` that fails in a given way, at the n-th call of each file."""

    def __init__(self, code: int, at: int = 2, only_direct: bool = False) -> None:
        self.real: Callable[..., int] = os.pwritev
        self.code = code
        self.at = at
        self.only_direct = only_direct
        self.calls = 0

    def __call__(self, fd: int, parts: Any, at_bytes: int) -> int:
        import fcntl

        self.calls += 1
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if self.calls >= self.at and (is_direct or not self.only_direct):
            raise OSError(self.code, os.strerror(self.code))
        return self.real(fd, parts, at_bytes)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.EDQUOT, WriteReason.QUOTA),
        (errno.EIO, WriteReason.IO),
        (errno.ESTALE, WriteReason.GONE),
        (errno.ENOTCONN, WriteReason.GONE),
        (errno.ENOMEM, WriteReason.OTHER),
        (errno.EINVAL, WriteReason.OTHER),
    ],
)
def test_errors_of_the_device_have_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: WriteReason
) -> None:
    rank = PlainRank([MIB, MIB])
    with monkeypatch.context() as patched:
        patched.setattr(shardfile.os, "pwritev", Failing(code))
        with pytest.raises(WriteError) as caught:
            rank.write(tmp_path, SMALL)
    assert caught.value.reason is reason
    assert os.strerror(code) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert rank.is_in(tmp_path, rank.write(tmp_path, SMALL))


@pytest.mark.parametrize("at", [1, 3])
def test_direct_io_that_is_refused_at_a_write_goes_on_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    failing = Failing(errno.EINVAL, at, only_direct=True)
    monkeypatch.setattr(shardfile.os, "pwritev", failing)
    rank = PlainRank([3 * MIB, 5, MIB + 17])
    written = rank.write(tmp_path, SMALL)
    assert failing.calls > 3
    assert rank.is_in(tmp_path, written)


def test_direct_io_that_is_refused_at_open_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open
    refused = []

    def without(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(shardfile.os, "open", without)
    rank = PlainRank([3 * MIB, 5])
    written = rank.write(tmp_path, WriteOptions(piece_bytes=256 << 10, read_back=True))
    assert "__0_0.distcp" in refused
    assert rank.is_in(tmp_path, written)


def test_writes_that_take_less_than_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def stingy(fd: int, parts: list[memoryview], at_bytes: int) -> int:
        return real(fd, [parts[0][:1000]] if at_bytes % 3 else [parts[0][:8192]], at_bytes)

    monkeypatch.setattr(shardfile.os, "pwritev", stingy)
    rank = PlainRank([MIB, 70_001])
    assert rank.is_in(tmp_path, rank.write(tmp_path, SMALL))


def test_space_is_looked_at_where_it_cannot_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardfile, "libc_function", lambda *_: None)
    rank = PlainRank([MIB])
    assert rank.is_in(tmp_path, rank.write(tmp_path, WriteOptions(direct=False)))

    class Full:
        f_blocks, f_bavail, f_frsize = 1000, 10, 4096

    monkeypatch.setattr(shardfile.os, "fstatvfs", lambda fd: Full)
    with pytest.raises(WriteError) as caught:
        rank.write(tmp_path)
    assert caught.value.reason is WriteReason.FULL


@pytest.mark.parametrize(
    ("name", "at", "words"),
    [
        ("__0_0.distcp", 5 * 4096 + 3, "'t1' at [0] read back from __0_0.distcp"),
        ("__0_0.distcp", 100, "'t0' at [0] read back from __0_0.distcp"),
        ("__0_1.distcp", 2, "'o' read back from __0_1.distcp at byte 0"),
    ],
)
def test_a_device_that_returns_something_else_is_found_by_reading_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int, words: str
) -> None:
    finish = shardfile._File.finish

    def spoiled(self: Any) -> None:
        finish(self)
        if self._name == name:
            with open(tmp_path / name, "r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes((byte ^ 16,)))

    monkeypatch.setattr(shardfile._File, "finish", spoiled)
    rank = PlainRank([9000, 30_000])
    with pytest.raises(WriteError) as caught:
        rank.write(tmp_path, WriteOptions(read_back=True))
    assert words in str(caught.value)
    assert caught.value.reason is WriteReason.IO
    assert list(tmp_path.iterdir()) == []


# -- the limit on bytes per second -------------------------------------------------------------------------------------
def test_every_byte_that_is_written_counts_for_the_limit(tmp_path: Path) -> None:
    now_s, waits_s = [0.0], []

    def pause(seconds: float) -> None:
        waits_s.append(seconds)
        now_s[0] += seconds

    rate = RateLimit(1e6, lambda: now_s[0], pause)
    written = PlainRank([2 * MIB, MIB]).write(tmp_path, WriteOptions(piece_bytes=256 << 10, rate=rate))
    total = sum(file.size_bytes for file in written.files)
    assert total / 1e6 - 0.3 <= sum(waits_s) <= total / 1e6 + 0.02
