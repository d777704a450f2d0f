"""Which dumps an incident keeps and sums up, and what its sidecars say, from files of ranks that have ended."""

from __future__ import annotations

import json
import os
import pickle
import stat
import time
from pathlib import Path
from typing import Any

from steadyrun.collectors.evidence import Contribution, Target
from steadyrun.collectors.flight.details import IncidentDetails, used_dumps
from steadyrun.collectors.flight.sidecar import DumpFile, Sidecar, sidecar_from_json
from steadyrun.collectors.flight.source import FlightSource
from steadyrun.core.board import OpenSection, SlotView
from steadyrun.core.records import ExitRecord

LIVE: dict[str, Any] = {
    "schema": "steadyrun.flight-live/1",
    "rank": 2,
    "host": "far",
    "boot_id": "b",
    "torch": "2.13.0",
    "groups": [{"name": "0", "desc": "default_pg", "ranks": [0, 1, 2, 3], "backend": "gloo"}],
    "recorders": ["gloo"],
    "buffer_size": 2000,
    "server": "flight.sock",
}
SITE = [{"name": "step", "filename": "/home/u/train.py", "line": 88}]


def entry(seq: int, done: bool, backend: str = "gloo") -> dict[str, Any]:
    return {
        "record_id": seq, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": seq, "p2p_seq_id": 0,
        "op_id": seq, "profiling_name": f"{backend}:all_reduce", "input_sizes": [[4]], "input_dtypes": ["Float"],
        "output_sizes": [[4]], "output_dtypes": ["Float"], "state": "scheduled", "time_created_ns": 10**18 + seq,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None, "retired": done, "timeout_ms": 1000,
        "is_p2p": False, "frames": SITE,
    }  # fmt: skip


def dump(*entries: dict[str, Any]) -> bytes:
    return pickle.dumps({"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": list(entries)}, protocol=2)


def collect(tmp_path: Path, exit_: ExitRecord | None = None, view: SlotView | None = None) -> Contribution:
    incident = tmp_path / "incidents/0001"
    incident.mkdir(parents=True, exist_ok=True)
    target = Target(2, 0, 4_000_000, 1, view, exit_ or ExitRecord(1, None, 5.0), rank_dir(tmp_path))
    return FlightSource("the run").collect(target, incident, time.monotonic() + 10)


def rank_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "attempts/1/rank_2"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def sidecar(tmp_path: Path) -> Sidecar:
    return sidecar_from_json(json.loads((tmp_path / "incidents/0001/rank_2.flight.json").read_text()))


def test_a_rank_without_torch_adds_nothing(tmp_path: Path) -> None:
    assert collect(tmp_path) == Contribution()
    assert list((tmp_path / "incidents/0001").iterdir()) == []


def test_a_rank_without_groups_and_entries_adds_nothing(tmp_path: Path) -> None:
    (rank_dir(tmp_path) / "flight.json").write_text(json.dumps({**LIVE, "groups": []}))
    (rank_dir(tmp_path) / "flight.gloo.exception.pickle").write_bytes(dump())
    assert collect(tmp_path) == Contribution()
    assert list((tmp_path / "incidents/0001").iterdir()) == []


def test_last_word_of_a_dead_rank(tmp_path: Path) -> None:
    folder = rank_dir(tmp_path)
    (folder / "flight.json").write_text(json.dumps(LIVE))
    (folder / "flight.gloo.exception.pickle").write_bytes(dump(entry(1, True), entry(2, False)))
    (folder / "exception.json").write_text(
        json.dumps(
            {"type": "KeyError", "message": "'x'", "traceback_hash": "h", "frames": [], "step": 4, "at_unix_s": 1.0}
        )
    )
    view = SlotView(
        1, 1, 2, 1.0, None, 4, 1.0, 5, True, 1.0, 0, None, None, 0, False, 0, True, 0,
        (OpenSection("outer", 10.0), OpenSection("step", 11.0), OpenSection("loader", 12.0, lane=1)),
    )  # fmt: skip
    added = collect(tmp_path, view=view)
    assert added.missing == ()
    assert added.files == ("rank_2.flight.gloo.exception.pickle", "rank_2.flight.json")
    for name in added.files:
        assert stat.S_IMODE((tmp_path / "incidents/0001" / name).stat().st_mode) == 0o600
    assert added.flight is not None
    (op,) = added.flight.ops
    assert (op.seq, op.site) == (2, "train.py:88 in step")
    assert added.flight.groups[0].ranks == (0, 1, 2, 3)
    told = sidecar(tmp_path)
    assert (told.host, told.run_id, told.attempt, told.exit_code, told.exception) == (
        "far", "the run", 1, 1, "KeyError: 'x'",
    )  # fmt: skip
    assert (told.step, told.section, told.world_size, told.recorder_state) == (4, "step", 4, "on")
    assert [(d.file, d.recorder, d.kind) for d in told.dumps] == [
        ("rank_2.flight.gloo.exception.pickle", "gloo", "exception")
    ]


def test_a_watchdogs_file_is_named_after_what_it_holds(tmp_path: Path) -> None:
    folder = rank_dir(tmp_path)
    (folder / "flight.json").write_text(json.dumps({**LIVE, "dump_prefix": f"{folder}/fr_"}))
    (folder / "fr_2").write_bytes(dump(entry(1, False, "nccl2")))
    os.utime(folder / "fr_2", (time.time() - 60, time.time() - 60))  # quiet for long
    added = collect(tmp_path)
    assert added.files[0] == "rank_2.flight.nccl2.watchdog.pickle"
    assert added.flight is not None
    assert [op.seq for op in added.flight.ops] == [1]


def test_what_cannot_be_read_is_kept_and_said(tmp_path: Path) -> None:
    folder = rank_dir(tmp_path)
    (folder / "flight.json").write_text(json.dumps(LIVE))
    (folder / "flight.gloo.exception.pickle").write_bytes(b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
    added = collect(tmp_path)
    assert added.flight is None  # a silent rank must not look like one that has done nothing
    assert added.files[0] == "rank_2.flight.gloo.exception.pickle"
    (text,) = added.missing
    assert text.startswith("flight recorder: the dump (exception) of recorder gloo cannot be read: ")


def test_a_cut_dump_is_said_and_used(tmp_path: Path) -> None:
    folder = rank_dir(tmp_path)
    (folder / "flight.json").write_text(json.dumps(LIVE))
    whole = dump(*[entry(i, i < 20) for i in range(1, 21)])
    (folder / "flight.gloo.exception.pickle").write_bytes(whole[: len(whole) * 2 // 3])
    added = collect(tmp_path)
    assert added.flight is not None
    assert added.flight.is_cut
    assert any("ends early" in text for text in added.missing)


def test_a_recorder_that_is_off_is_said(tmp_path: Path) -> None:
    folder = rank_dir(tmp_path)
    (folder / "flight.json").write_text(json.dumps({**LIVE, "buffer_size": 0}))
    added = collect(tmp_path)
    assert added.files == ("rank_2.flight.json",)
    assert any("TORCH_FR_BUFFER_SIZE=0" in text for text in added.missing)
    assert sidecar(tmp_path).recorder_state == "off"


def test_a_wrong_live_file_does_not_hide_the_dumps(tmp_path: Path) -> None:
    folder = rank_dir(tmp_path)
    (folder / "flight.json").write_text("{")
    (folder / "flight.gloo.exception.pickle").write_bytes(dump(entry(1, False)))
    added = collect(tmp_path)
    assert added.flight is not None
    assert any("cannot read flight.json" in text for text in added.missing)


def test_a_folder_that_cannot_be_written_still_gives_a_summary(tmp_path: Path) -> None:
    folder = rank_dir(tmp_path)
    (folder / "flight.json").write_text(json.dumps(LIVE))
    (folder / "flight.gloo.exception.pickle").write_bytes(dump(entry(1, False)))
    target = Target(2, 0, 4_000_000, 1, None, ExitRecord(1, None, 5.0), folder)
    added = FlightSource().collect(target, tmp_path / "absent", time.monotonic() + 10)
    assert added.flight is not None
    assert added.files == ()
    assert len(added.missing) == 2


def test_single_operations_come_from_the_dump_that_was_summed_up(tmp_path: Path) -> None:
    folder = rank_dir(tmp_path)
    (folder / "flight.json").write_text(json.dumps(LIVE))
    (folder / "flight.gloo.exception.pickle").write_bytes(dump(entry(1, True), entry(2, False)))
    collect(tmp_path)
    ops = IncidentDetails(tmp_path / "incidents/0001").ops(2, "0", 1, 1)
    assert [(op.seq, op.name, op.site) for op in ops] == [(1, "all_reduce", "train.py:88 in step")]
    kinds = ("watchdog", "active", "full", "exception")
    many = Sidecar(2, dumps=(*(DumpFile(k, "gloo", k, 1.0) for k in kinds), DumpFile("n", "nccl", "full", 1.0)))
    assert [d.file for d in used_dumps(many)] == ["exception", "n"]
