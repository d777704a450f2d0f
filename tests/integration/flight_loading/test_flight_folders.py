"""Folders of dumps: whose each is, which of several is read, and what became of every file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from flight_dumps import dump, entry, pending, torch_pickle

from steadyrun.collectors.flight import bundle, readers
from steadyrun.collectors.flight.bundle import Bundle, BundleReading
from steadyrun.collectors.flight.folder import LoadedFlights, find_dumps, load_folder, rank_from_name
from steadyrun.collectors.flight.readers import read_bundles
from steadyrun.collectors.flight.sidecar import DumpFile, LiveGroup, Sidecar


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_7", 7), ("comm_lib_trace_rank_12", 12), ("nccl_trace_rank_node00_0", 0),
        ("nccl_trace_rank_container-node02_5", 5), ("fr_rank_0.pkl", 0), ("_dump_12", 12), ("fr_rank_3.json", 3),
        ("rank_3.flight.nccl.pickle", 3), ("rank_41.flight.nccl2.active.json", 41), ("trace-rank9-gloo.bin", 9),
        ("rank_2.flight.json", 2), ("host7.bin.copy", 7), ("trace.pkl", None), ("flight.nccl2.pickle", None),
        ("r/4/flight.nccl2.pickle", 4), ("ranks/rank_11/flight.gloo.exception.pickle", 11),
    ],
)  # fmt: skip
def test_the_rank_in_a_name(name: str, rank: int | None) -> None:
    assert rank_from_name(Path(name)) == rank


def statuses(loaded: LoadedFlights) -> dict[str, str]:
    return {i.path.name: i.status for i in loaded.inputs}


def test_every_recorded_folder_gives_all_its_ranks(shared_cases: Path) -> None:
    for folder in sorted((shared_cases / "flight_recorder").glob("nccl_*")):
        loaded = load_folder([folder])
        assert sorted(loaded.flights) == list(range(16)), folder
        assert all(f.is_active_only and f.recorders == ("nccl",) for f in loaded.flights.values())
    for folder in sorted((shared_cases / "flight_recorder").glob("gloo_*")):
        dumped = {int(name.rpartition("_")[2]) for name in json.loads((folder / "meta.json").read_text())["dumped"]}
        for form in ("raw", "fixed", "json"):
            if dumped:
                assert set(load_folder([folder / form]).flights) == dumped, (folder, form)
        assert set(load_folder([folder]).flights) == dumped


def test_three_forms_of_one_dump_do_not_mix(shared_cases: Path) -> None:
    folder = shared_cases / "flight_recorder" / "gloo_chain"
    together, fixed = load_folder([folder]), load_folder([folder / "fixed"])
    assert together.flights == fixed.flights
    assert sum(i.status == "used" for i in together.inputs) == 4
    assert sum("holds more" in i.detail for i in together.inputs) == 8
    assert together.flights[1].groups[1].ranks == (1, 2)
    assert together.flights[1].ops[0].site == "scen.py:90 in chain"


@pytest.mark.parametrize(
    ("case", "status", "ranks"),
    [
        ("truncated", "cut", {0, 1, 2}),
        ("empty_file", "empty", {0, 1}),
        ("no_entries", "cut", {0, 1, 2}),
        ("malicious", "refused", {0, 1}),
    ],
)
def test_one_bad_file_does_not_hide_the_others(shared_cases: Path, case: str, status: str, ranks: set[int]) -> None:
    loaded = load_folder([shared_cases / "flight_recorder" / f"degraded_{case}"])
    assert set(loaded.flights) == ranks
    assert {i.path.name: (i.rank, i.status) for i in loaded.inputs} == {
        "fr_rank_0": (0, "used"), "fr_rank_1": (1, "used"), "fr_rank_2": (2, status),
    }  # fmt: skip


def test_names_with_hosts_suffixes_and_strangers(shared_cases: Path) -> None:
    for case in ("hostnames", "suffix_pkl", "extra_file"):
        loaded = load_folder([shared_cases / "flight_recorder" / f"degraded_{case}"])
        assert set(loaded.flights) == {0, 1, 2}, case
    assert statuses(loaded)["stderr.log"] == "ignored"


CONFIG = {
    "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
    "1": {"name": "1", "desc": "mesh_tp", "ranks": "[2, 3]"},
    "2": {"name": "2", "desc": "mesh_dp", "ranks": "[1, 3]"},
}


def test_the_groups_tell_whose_a_dump_is_where_the_name_is_wrong_or_silent(tmp_path: Path) -> None:
    (tmp_path / "trace.pkl").write_bytes(torch_pickle(dump([entry(1)], pg_config=CONFIG)))
    (tmp_path / "copied_0.pkl").write_bytes(torch_pickle(dump([entry(1), entry(2)], pg_config=CONFIG)))
    loaded = load_folder([tmp_path])
    assert set(loaded.flights) == {3}
    assert loaded.flights[3].entries == 2
    by_name = {i.path.name: i for i in loaded.inputs}
    assert by_name["copied_0.pkl"].detail == "its name says rank 0, its groups rank 3"
    lost = tmp_path / "lost"
    lost.mkdir()
    (lost / "trace.pkl").write_bytes(torch_pickle(dump([entry(1)])))
    (unknown,) = load_folder([lost]).inputs
    assert (unknown.status, unknown.rank) == ("ignored", None)
    assert "cannot tell whose it is" in unknown.detail


def write_sidecar(folder: Path, sidecar: Sidecar) -> None:
    (folder / f"rank_{sidecar.rank}.flight.json").write_text(json.dumps(sidecar.to_json()))


def gloo(seq: int, **changes: Any) -> dict[str, Any]:
    still = {"state": "scheduled", "time_discovered_completed_ns": None}
    return entry(seq, None, "gloo:all_reduce", **{**still, **changes})


def test_a_sidecar_names_rank_recorder_kind_and_members(tmp_path: Path) -> None:
    (tmp_path / "oddly.named").write_bytes(torch_pickle(dump([entry(1), pending(2)])))
    (tmp_path / "other").write_bytes(torch_pickle(dump([gloo(1)], pg_config={"": {"ranks": "[]"}})))
    files = (DumpFile("oddly.named", "nccl", "active", 11.5), DumpFile("other", "gloo", "full", 12.5))
    groups = (LiveGroup("0", "default_pg", (0, 5), "cpu:gloo,cuda:nccl"),)
    write_sidecar(tmp_path, Sidecar(rank=5, dumps=files, groups=groups, clock_offset_s=0.25))
    loaded = load_folder([tmp_path])
    flight = loaded.flights[5]
    assert set(flight.recorders) == {"nccl", "gloo"}
    assert (flight.is_active_only, flight.taken_at_unix_s, flight.node_minus_here_s) == (True, 12.5, 0.25)
    assert {g.ranks for g in flight.groups if g.backend == "gloo"} == {(0, 5)}
    assert loaded.sidecars[5].groups == groups


def test_of_one_recorders_dumps_the_newest_whole_one_is_read(tmp_path: Path) -> None:
    full = torch_pickle(dump([entry(1), entry(2), pending(3)]))
    (tmp_path / "rank_0.flight.nccl.pickle").write_bytes(full)
    (tmp_path / "rank_0.flight.nccl.watchdog.pickle").write_bytes(torch_pickle(dump([entry(1), pending(2)])))
    (tmp_path / "rank_0.flight.nccl.active.pickle").write_bytes(torch_pickle(dump([pending(3)])))
    (tmp_path / "rank_0.flight.nccl.exception.pickle").write_bytes(full[:-30])
    loaded = load_folder([tmp_path])
    assert loaded.flights[0].entries == 3
    assert [i.path.name for i in loaded.inputs if i.status == "used"] == ["rank_0.flight.nccl.pickle"]
    assert not loaded.flights[0].is_active_only


def test_links_fifos_and_folders_in_the_way(tmp_path: Path) -> None:
    data = torch_pickle(dump([entry(1)]))
    (tmp_path / "fr_rank_0").write_bytes(data)
    (tmp_path / "fr_rank_1").mkdir()
    os.mkfifo(tmp_path / "fr_rank_2")
    (tmp_path / "fr_rank_3").symlink_to(tmp_path / "fr_rank_0")
    (tmp_path / "fr_rank_4").symlink_to("/nowhere")
    (tmp_path / "again").symlink_to(tmp_path)
    loaded = load_folder([tmp_path, tmp_path / "fr_rank_0", tmp_path / "absent"])
    assert set(loaded.flights) == {0}
    assert statuses(loaded)["fr_rank_2"] == "ignored"
    assert statuses(loaded)["fr_rank_4"] == "unreadable"
    assert statuses(loaded)["absent"] == "unreadable"


def test_a_named_file_is_read_whatever_its_name_and_a_large_one_refused(tmp_path: Path) -> None:
    odd = tmp_path / "rank_4.log"
    odd.write_bytes(torch_pickle(dump([entry(1)])))
    assert set(load_folder([odd]).flights) == {4}
    (refused,) = load_folder([odd], max_bytes=100).inputs
    assert refused.status == "refused"
    assert find_dumps([odd]).dumps == (odd,)


def test_details_come_from_the_files_that_were_used(tmp_path: Path) -> None:
    (tmp_path / "fr_rank_0").write_bytes(torch_pickle(dump([entry(seq) for seq in range(1, 50)])))
    loaded = load_folder([tmp_path])
    assert [op.seq for op in loaded.details.ops(0, "0", 20, 22)] == [20, 21, 22]
    assert loaded.details.files(0) == (tmp_path / "fr_rank_0",)
    assert loaded.details.ops(9, "0", 20, 22) == []
    other = load_folder([tmp_path])
    (tmp_path / "fr_rank_0").unlink()
    assert other.details.ops(0, "0", 20, 22) == []


# -- processes ---------------------------------------------------------------------------------------------------------
def test_processes_read_the_same_as_one(tmp_path: Path) -> None:
    for rank in range(40):
        value = dump([entry(seq) for seq in range(1, 30)] + [pending(30 + rank)], ranks=range(40))
        (tmp_path / f"fr_rank_{rank}").write_bytes(torch_pickle(value))
    (tmp_path / "fr_rank_40").write_bytes(b"\x80\x02cos\nsystem\n.")
    told: list[tuple[int, int]] = []
    alone = load_folder([tmp_path], workers=1)
    together = load_folder([tmp_path], workers=2, progress=lambda done, of: told.append((done, of)))
    assert together.flights == alone.flights
    assert together.inputs == alone.inputs
    assert told[-1] == (41, 41)
    first = together.flights[0].groups[0].ranks
    assert all(f.groups[0].ranks is first for f in together.flights.values())


READER = """
import os, signal, time
from steadyrun.collectors.flight import bundle, readers
honest = readers.read_bundle
def read_bundle(bundle, cache):
    name = bundle.files[0][0].name
    if name.endswith("_3"):
        os.kill(os.getpid(), signal.SIGSEGV)
    while name.endswith("_13"):
        time.sleep(0.1)
    return honest(bundle, cache)
readers.read_bundle = read_bundle
readers.serve()
"""


def test_a_file_that_kills_or_holds_its_reader_costs_that_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(20):
        (tmp_path / f"fr_rank_{rank}").write_bytes(torch_pickle(dump([entry(1)])))
    monkeypatch.setattr(readers, "_PROGRAM", READER)
    bundles = [Bundle(rank, ((tmp_path / f"fr_rank_{rank}", None),)) for rank in range(20)]
    found: dict[int, BundleReading] = {}
    read_bundles(bundles, 2, found.__setitem__, job_limit_s=4.0)
    assert sorted(found) == list(range(20))
    lost = {rank: reading.files[0] for rank, reading in found.items() if not reading.flights}
    assert set(lost) == {3, 13}
    assert "ended the reading process" in lost[3].detail
    assert "longer than 4 s" in lost[13].detail
    assert {file.status for file in lost.values()} == {"unreadable"}


def test_without_reader_processes_all_is_read_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(20):
        (tmp_path / f"fr_rank_{rank}").write_bytes(torch_pickle(dump([entry(1)])))
    monkeypatch.setattr(readers, "_PROGRAM", "raise SystemExit(3)")
    assert set(load_folder([tmp_path], workers=2).flights) == set(range(20))


def test_a_fault_of_ours_costs_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = bundle.summarise

    def failing(dumps: Any, rank: int, *others: Any) -> Any:
        if rank == 1:
            raise ZeroDivisionError("ours")
        return honest(dumps, rank, *others)

    monkeypatch.setattr(bundle, "summarise", failing)
    for rank in range(3):
        (tmp_path / f"fr_rank_{rank}").write_bytes(torch_pickle(dump([entry(1)])))
    loaded = load_folder([tmp_path], workers=1)
    assert set(loaded.flights) == {0, 2}
    assert statuses(loaded)["fr_rank_1"] == "unreadable"


def test_an_empty_dump_of_another_recorder_stays(tmp_path: Path) -> None:
    nothing = dump([], pg_status={"0": {"last_enqueued_collective": 7, "last_completed_collective": 7}})
    (tmp_path / "rank_0.flight.nccl.active.pickle").write_bytes(torch_pickle(nothing))
    (tmp_path / "rank_0.flight.gloo.pickle").write_bytes(torch_pickle(dump([gloo(1)], comm_lib_version="")))
    (tmp_path / "rank_0.flight.unknown").write_bytes(torch_pickle(dump([], comm_lib_version="")))
    flight = load_folder([tmp_path]).flights[0]
    assert flight.recorders == ("gloo", "nccl")
    assert [s.enqueued for s in flight.status if s.enqueued == 7] == [7]


def test_reading_works_from_another_folder_and_without_processes_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_cases: Path
) -> None:
    source = shared_cases / "flight_recorder" / "nccl_gpu_error_2nd"
    shutil.copytree(source, tmp_path / "set")
    monkeypatch.chdir("/")
    assert set(load_folder([tmp_path / "set"], workers=3).flights) == set(range(16))
