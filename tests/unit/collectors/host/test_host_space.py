"""Room for files, from made-up answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steadyrun.collectors.host.space import Folder, Room, SpaceCollector, read_room
from steadyrun.collectors.protocol import CheckResult, Health

GIB = 1 << 30
WELL = Room(1000 * GIB, 500 * GIB, 1_000_000, 900_000, False, True)


def room(**changes: object) -> Room:
    import dataclasses

    return dataclasses.replace(WELL, **changes)  # type: ignore[arg-type]


def check(answer: Room | OSError, needed: int = 0, is_shm: bool = False) -> CheckResult:
    def read(path: Path) -> Room:
        if isinstance(answer, OSError):
            raise answer
        return answer

    folder = Folder("checkpoints", Path("/ckpt"), needed, is_shm)
    return SpaceCollector([folder], shm=None, read=read).check()


@pytest.mark.parametrize(
    ("answer", "needed", "health", "words"),
    [
        (WELL, 0, Health.HEALTHY, "checkpoints 500.0 GiB"),
        (room(free_bytes=40 * GIB), 0, Health.DEGRADED, "40.0 GiB left (4.0%)"),
        (room(free_bytes=5 * GIB), 0, Health.UNHEALTHY, "5.0 GiB left (0.5%)"),
        (room(total_bytes=100_000 * GIB, free_bytes=500 * GIB), 0, Health.HEALTHY, "500.0 GiB"),
        (WELL, 600 * GIB, Health.UNHEALTHY, "the next save needs 600.0 GiB"),
        (WELL, 300 * GIB, Health.DEGRADED, "500.0 GiB left"),
        (WELL, 200 * GIB, Health.HEALTHY, "500.0 GiB"),
        (room(free_inodes=30_000), 0, Health.DEGRADED, "30000 of 1000000 inodes"),
        (room(free_inodes=5), 0, Health.UNHEALTHY, "5 of 1000000 inodes"),
        (room(free_inodes=0, total_inodes=0), 0, Health.HEALTHY, "500.0 GiB"),
        (room(is_readonly=True), 0, Health.UNHEALTHY, "can only be read"),
        (room(is_writable=False), 0, Health.UNHEALTHY, "may not write"),
        (OSError(5, "Input/output error"), 0, Health.UNHEALTHY, "/ckpt (checkpoints): input/output error"),
    ],
)
def test_room_is_judged(answer: Room | OSError, needed: int, health: Health, words: str) -> None:
    result = check(answer, needed)
    assert result.health is health
    assert words in result.reason
    assert bool(result.actions) == (health is not Health.HEALTHY)


@pytest.mark.parametrize(
    ("answer", "health"),
    [
        (room(total_bytes=64 << 20, free_bytes=64 << 20), Health.DEGRADED),
        (room(total_bytes=8 * GIB, free_bytes=4 * GIB), Health.HEALTHY),
        (room(total_bytes=8 * GIB, free_bytes=GIB // 2), Health.DEGRADED),
        (room(total_bytes=8 * GIB, free_bytes=GIB // 64), Health.UNHEALTHY),
    ],
)
def test_shared_memory_has_limits_of_its_own(answer: Room, health: Health) -> None:
    assert check(answer, is_shm=True).health is health


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    there = read_room(tmp_path)
    assert read_room(tmp_path / "not" / "yet").total_bytes == there.total_bytes
    assert there.is_writable
    assert not there.is_readonly
    assert 0 <= there.free_bytes <= there.total_bytes
    assert there.total_bytes == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


def test_the_real_machine_can_be_looked_at(tmp_path: Path) -> None:
    result = SpaceCollector([Folder("logs", tmp_path)]).check()
    assert result.facts["logs_answers"] is True
    assert result.facts["shm_answers"] is True
