"""Which files are dumps, which are logs, and whose."""

import json
import os
from pathlib import Path

import pytest

from steadyrun.postmortem.case import InputStatus
from steadyrun.postmortem.material import find_material, rank_from_path

PICKLE = b"\x80\x02}q\x00."


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("fr_rank_0", PICKLE, "dump"),
        ("nccl_trace_rank_node00_0", PICKLE, "dump"),
        ("anything", PICKLE, "dump"),
        ("anything.log", PICKLE, "dump"),
        ("fr_rank_0", b"", "dump"),
        ("fr_rank_0.json", b'{"version": "2.10"}', "dump"),
        ("rank_0.flight.json", b'{"schema": "steadyrun.flight/1"}', "dump"),
        ("fr_rank_0", b"csome\nglobal\n.", "dump"),
        ("stderr.log", b"hello\n", "log"),
        ("slurm-12.out", b"hello\n", "log"),
        ("stdout", b"hello\n", "log"),
        ("train.log.1", b'{"loss": 3}\n', "log"),
        ("output_of_tuesday", b"hello\n", "log"),
        ("stderr.log", b"", "empty"),
        ("core.log", b"\x7fELF\0\0", "ignored"),
        ("evidence.jsonl", b"{}", "ignored"),
        ("page.html", b"<html>", "ignored"),
        ("rank_0.proc.json", b"{}", "ignored"),
    ],
)
def test_files_are_told_by_content_and_else_by_name(tmp_path: Path, name: str, content: bytes, kind: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    found = find_material([tmp_path])
    kinds = ["dump"] * len(found.dumps) + ["log"] * len(found.logs) + [i.status.value for i in found.inputs]
    assert kinds == [kind]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("logs/rank_3.log", (3, False)),
        ("logs/job-rank12.err", (12, False)),
        ("attempts/0/rank_7/stderr.log", (7, False)),
        ("none_x/attempt_0/5/stderr.log", (5, True)),
        ("logs/local_rank_2.log", (2, True)),
        ("logs/slurm-81723.out", (None, False)),
        ("2026/train.py.log", (None, False)),
        ("franking5/x.log", (None, False)),
    ],
)
def test_whose_log_a_path_is(path: str, expected: tuple[int | None, bool]) -> None:
    assert rank_from_path(Path(path)) == expected


def test_file_given_twice_or_linked_counts_once(tmp_path: Path) -> None:
    (tmp_path / "fr_rank_0").write_bytes(PICKLE)
    os.link(tmp_path / "fr_rank_0", tmp_path / "fr_rank_0_again")
    (tmp_path / "fr_link").symlink_to("fr_rank_0")
    assert len(find_material([tmp_path, tmp_path / "fr_rank_0"]).dumps) == 1


def test_link_that_leads_round_in_circles_ends(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to(tmp_path)
    (tmp_path / "fr_rank_0").write_bytes(PICKLE)
    assert len(find_material([tmp_path]).dumps) == 1


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    found = find_material([tmp_path / "nothing", tmp_path / "pipe", tmp_path])
    assert [(i.status, i.detail) for i in found.inputs] == [
        (InputStatus.UNREADABLE, "no such file"),
        (InputStatus.UNREADABLE, "neither a file nor a folder"),
    ]


def test_folder_of_runs_means_its_latest(tmp_path: Path) -> None:
    incident = tmp_path / "20270115T080000Z-abc" / "incidents" / "0001"
    incident.mkdir(parents=True)
    (incident / "evidence.json").write_text(json.dumps({"world_size": 1, "now_s": 1.0, "ranks": []}))
    (incident / "rank_0.flight.nccl.pickle").write_bytes(PICKLE)
    (incident / "rank_0.stacks.txt").write_text("main thread")
    (tmp_path / "latest").symlink_to("20270115T080000Z-abc")
    found = find_material([tmp_path])
    assert len(found.incidents) == 1
    assert [p.name for p in found.dumps] == ["rank_0.flight.nccl.pickle"]
    assert found.logs == []
    assert find_material([incident / "evidence.json"]).dumps == [incident / "rank_0.flight.nccl.pickle"]
