"""Recognising what an attempt left: parsing /proc, parentage, markers, names in /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.node.sweep import (
    ProcessEntry,
    ShmFile,
    descendants_of,
    has_marker,
    list_shm,
    parse_stat,
    read_process,
    remove_shared_memory,
    scan_processes,
    stale_shm,
)

UID = 1000


def stat_line(
    pid: int, ppid: int = 1, command: str = "python", state: str = "S", pgrp: int = 0, ticks: int = 77
) -> str:
    return (
        f"{pid} ({command}) {state} {ppid} {pgrp or pid} {pgrp or pid} 0 -1 4194304 100 0 0 0 5 3 0 0 20 0 1 0 "
        f"{ticks} 1000000 500 18446744073709551615 0 0 0 0 0 0 0 4096 0 0 0 0 17 1 0 0 0 0 0\n"
    )


def proc_tree(root: Path, *entries: tuple[int, int], environ: dict[int, bytes] | None = None) -> Path:
    for pid, ppid in entries:
        folder = root / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "stat").write_text(stat_line(pid, ppid))
        (folder / "environ").write_bytes((environ or {}).get(pid, b"PATH=/bin\0"))
        (folder / "maps").write_text("")
    (root / "self").mkdir(parents=True)
    (root / "uptime").write_text("1 1")
    return root


# -- parsing -----------------------------------------------------------------------------------------------------------
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\n"), max_size=15))
def test_command_name_may_hold_anything(name: str) -> None:
    entry = parse_stat(stat_line(42, 7, name, "R", 40, 123).encode())
    assert entry == ProcessEntry(42, 7, 40, 40, "R", 123, name)


@pytest.mark.parametrize("text", ["", "12", "12 (x", "12 (x) S 1", "x (y) S 1 2 3"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"stat|invalid"):
        parse_stat(text.encode())


def test_our_own_entry_can_be_read() -> None:
    entry = read_process(os.getpid())
    assert entry is not None
    assert (entry.pid, entry.ppid, entry.session) == (os.getpid(), os.getppid(), os.getsid(0))


def test_scan_takes_processes_only_and_survives_those_that_end(tmp_path: Path) -> None:
    root = proc_tree(tmp_path, (10, 1), (11, 10))
    (root / "12").mkdir()  # ended between the listing and the reading
    assert sorted(scan_processes(root)) == [10, 11]


# -- parentage ---------------------------------------------------------------------------------------------------------
def test_descendants_are_found_at_any_depth(tmp_path: Path) -> None:
    processes = scan_processes(proc_tree(tmp_path, (10, 1), (11, 10), (12, 11), (13, 12), (20, 1), (21, 20)))
    assert descendants_of([10], processes) == {11, 12, 13}
    assert descendants_of([11, 20], processes) == {12, 13, 21}
    assert descendants_of([13], processes) == set()


def test_descendants_end_on_a_circle(tmp_path: Path) -> None:
    processes = scan_processes(proc_tree(tmp_path, (10, 11), (11, 10)))
    assert descendants_of([10], processes) == {11}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (b"A=1\0STEADYRUN_RUN=job:node\0", True),
        (b"STEADYRUN_RUN=job:node2\0", False),
        (b"X=STEADYRUN_RUN=job:node\0", False),
        (b"", False),
    ],
)
def test_marker_counts_only_as_a_whole(tmp_path: Path, environ: bytes, expected: bool) -> None:
    root = proc_tree(tmp_path, (10, 1), environ={10: environ})
    assert has_marker(scan_processes(root)[10], "job:node", root) is expected


def test_memory_of_a_process_in_state_d_is_not_read(tmp_path: Path) -> None:
    root = proc_tree(tmp_path, (10, 1), environ={10: b"STEADYRUN_RUN=job:node\0"})
    (root / "10" / "stat").write_text(stat_line(10, state="D"))
    assert not has_marker(scan_processes(root)[10], "job:node", root)


# -- /dev/shm ----------------------------------------------------------------------------------------------------------
def shm(name: str, uid: int = UID, inode: int = 5, changed_unix_s: float = 100.0) -> ShmFile:
    return ShmFile(name, inode, uid, changed_unix_s)


@pytest.mark.parametrize(
    "name",
    [
        "torch_41_2938475_0",
        "pym-41-abc_def1",
        "__KMP_REGISTERED_LIB_41_1000",
        "cuda.shm.3e8.29.1",
        "psm_0123abcd",
        "sem.mp-a1b2c3d4",
        "sem.loky-41-xyz",
        "nccl-Ab12Cd",
    ],
)
def test_known_names_of_dead_ranks_are_stale(name: str) -> None:
    assert stale_shm([shm(name)], (), UID, live_pids={1}, own_pids={41}) == [shm(name)]


@pytest.mark.parametrize("name", ["steadyrun-board-41", "my_data", "torch_x", "psm_", "nccl", "torch_41_2_0.bak"])
def test_other_names_are_left_alone(name: str) -> None:
    assert stale_shm([shm(name)], (), UID, live_pids=(), own_pids={41}) == []


def test_file_of_a_live_process_is_left_alone() -> None:
    assert stale_shm([shm("torch_41_1_0")], (), UID, live_pids={41}, own_pids={41}) == []


def test_file_of_another_jobs_process_is_left_alone() -> None:
    assert stale_shm([shm("torch_99_1_0")], (), UID, live_pids=(), own_pids={41}) == []
    assert stale_shm([shm("torch_99_1_0")], (), UID, live_pids=(), own_pids=None) == [shm("torch_99_1_0")]


def test_file_of_another_user_is_left_alone() -> None:
    assert stale_shm([shm("psm_12", uid=7)], (), UID, live_pids=(), own_pids=None) == []


def test_file_from_before_the_attempt_is_left_alone() -> None:
    assert stale_shm([shm("psm_12")], {("psm_12", 5)}, UID, live_pids=(), own_pids=None) == []
    assert stale_shm([shm("psm_12")], {("psm_12", 6)}, UID, live_pids=(), own_pids=None) == [shm("psm_12")]
    assert stale_shm([shm("psm_12")], (), UID, live_pids=(), own_pids=None, since_unix_s=101.0) == []


def test_removal_spares_what_somebody_maps_or_has_open(tmp_path: Path) -> None:
    folder = tmp_path / "shm"
    folder.mkdir()
    for name in ("psm_aa", "psm_bb", "psm_cc", "notes.txt"):
        (folder / name).write_bytes(b"x")
    root = proc_tree(tmp_path / "proc", (10, 1))
    mapped = (folder / "psm_aa").stat().st_ino
    (root / "10" / "maps").write_text(
        f"7f00-7f10 rw-s 00000000 00:19 {mapped}    /dev/shm/psm_aa\n7f20-7f30 r-xp 0 0:0 0\n"
    )
    (root / "10" / "fd" / "5").symlink_to(folder / "psm_bb")
    assert remove_shared_memory(shm=folder, proc=root) == ("psm_cc",)
    assert sorted(p.name for p in folder.iterdir()) == ["notes.txt", "psm_aa", "psm_bb"]


def test_file_of_a_zombie_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "shm"
    folder.mkdir()
    for name in ("torch_10_1_0", "torch_11_1_0"):
        (folder / name).write_bytes(b"x")
    root = proc_tree(tmp_path / "proc", (10, 1), (11, 1))
    (root / "10" / "stat").write_text(stat_line(10, state="Z"))
    assert remove_shared_memory(shm=folder, proc=root) == ("torch_10_1_0",)


def test_missing_folder_holds_nothing(tmp_path: Path) -> None:
    assert list_shm(tmp_path / "none") == []
    assert remove_shared_memory(shm=tmp_path / "none", proc=proc_tree(tmp_path / "proc", (10, 1))) == ()


def test_links_and_folders_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / "psm_ab").symlink_to("/etc/passwd")
    (tmp_path / "pymp-dir").mkdir()
    (tmp_path / "psm_cd").write_bytes(b"")
    assert [f.name for f in list_shm(tmp_path)] == ["psm_cd"]
