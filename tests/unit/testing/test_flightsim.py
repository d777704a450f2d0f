"""Simulated dumps are what torch would have written, and the truth beside them is true."""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from steadyrun.testing.flightsim import (
    Fault,
    FaultKind,
    FlightSet,
    Layout,
    NotManifestError,
    RankRecord,
    Records,
    Scenario,
    Truth,
    is_one_unseen,
    layout_of,
    score,
    simulate,
)

LAYOUT = Layout(tp=2, pp=2, dp=2, layers=1)
Entry = Mapping[str, Any]


def entries_of(found: FlightSet, rank: int, recorder: str = "nccl") -> Sequence[Entry]:
    dump = found.dumps(rank).get(recorder, {})
    entries: Sequence[Entry] = dump.get("entries", ())
    return entries


def at_fault(found: FlightSet, fault: Fault) -> dict[int, Entry]:
    """The members' entries of the operation at which the fault strikes."""
    return {
        rank: entry
        for rank in fault.members
        for entry in entries_of(found, rank)
        if entry["process_group"][0] == fault.group and not entry["is_p2p"] and entry["collective_seq_id"] == fault.seq
    }


def one(kind: FaultKind, **options: Any) -> tuple[FlightSet, Fault]:
    found = simulate(Scenario(LAYOUT, (kind,), **{"seed": 5, "entries": 40, **options}))
    return found, found.truth.faults[0]


def test_same_seed_gives_the_same_dumps() -> None:
    scenario = Scenario(LAYOUT, (FaultKind.EXTRA,), seed=11, entries=40, skew_s=1.0)
    assert simulate(scenario).dumps(3) == simulate(scenario).dumps(3)


def test_a_job_without_fault_ends_with_everything_done() -> None:
    found = simulate(Scenario(LAYOUT, (FaultKind.NONE,), entries=40))
    assert found.truth.blocked == ()
    for rank in range(LAYOUT.world):
        assert {e["state"] for e in entries_of(found, rank)} == {"completed"}
        assert all(e["retired"] for e in entries_of(found, rank, "gloo"))


def test_a_running_job_is_seen_in_the_middle_of_a_step() -> None:
    found = simulate(Scenario(LAYOUT, (FaultKind.RUNNING,), entries=0, seed=2))
    states = Counter(e["state"] for rank in range(LAYOUT.world) for e in entries_of(found, rank))
    assert states["completed"]
    assert states["scheduled"]
    newest_ns = max(e["time_created_ns"] for r in range(LAYOUT.world) for e in entries_of(found, r))
    assert newest_ns <= found.taken_at_unix_s * 1e9 + 1000


@pytest.mark.parametrize("seed", range(3))
def test_a_stalled_host_never_calls_what_the_others_wait_in(seed: int) -> None:
    found, fault = one(FaultKind.HOST_STALL, seed=seed)
    assert fault.rank not in at_fault(found, fault)
    assert set(found.truth.blocked) == set(range(LAYOUT.world)) - {fault.rank}


def test_a_host_stalled_ahead_of_gloo_leaves_the_others_waiting_there() -> None:
    found, fault = one(FaultKind.GLOO_STALL)
    assert fault.desc == "cpu_side"
    waiting = [e for e in entries_of(found, (fault.rank + 1) % LAYOUT.world, "gloo") if not e["retired"]]
    assert [(e["process_group"][0], e["collective_seq_id"]) for e in waiting] == [(fault.group, fault.seq)]


def test_a_stalled_device_never_starts_what_the_others_did() -> None:
    found, fault = one(FaultKind.DEVICE_STALL, with_timing=True)
    oldest = next(e for e in entries_of(found, fault.rank) if e["state"] != "completed")
    assert oldest["state"] == "scheduled"
    others = [e for r in range(LAYOUT.world) if r != fault.rank for e in entries_of(found, r)]
    assert any(e["state"] == "started" for e in others)


def test_states_never_say_started_without_timing() -> None:
    found, _ = one(FaultKind.DEVICE_STALL)
    states = {e["state"] for rank in range(LAYOUT.world) for e in entries_of(found, rank)}
    assert states == {"completed", "scheduled"}


def test_a_lost_device_alone_never_ends_what_the_others_ended() -> None:
    found, fault = one(FaultKind.DEVICE_LOST)
    ended = {rank: entry["state"] == "completed" for rank, entry in at_fault(found, fault).items()}
    assert ended == {rank: rank != fault.rank for rank in fault.members}


@pytest.mark.parametrize("kind", [FaultKind.DEAD, FaultKind.STOPPED])
def test_who_is_gone_leaves_no_dump(kind: FaultKind) -> None:
    found, fault = one(kind)
    assert found.dumps(fault.rank) == {}
    assert found.truth.states == {fault.rank: kind.value}
    assert one(kind, states_known=False)[0].truth.states == {}


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (FaultKind.OP_MISMATCH, "profiling_name"),
        (FaultKind.SIZE_MISMATCH, "input_sizes"),
        (FaultKind.DTYPE_MISMATCH, "input_dtypes"),
    ],
)
def test_a_mismatch_differs_in_one_field_and_never_ends(kind: FaultKind, field: str) -> None:
    found, fault = one(kind)
    entries = at_fault(found, fault)
    assert all(e["state"] == "scheduled" for e in entries.values())
    theirs = {str(e[field]) for rank, e in entries.items() if rank != fault.rank}
    assert len(theirs) == 1
    assert str(entries[fault.rank][field]) not in theirs


def counts(found: FlightSet, fault: Fault) -> dict[int, int]:
    """Newest collective of the fault's group, per member."""
    return {
        r: max(e["collective_seq_id"] for e in entries_of(found, r) if e["process_group"][0] == fault.group)
        for r in fault.members
    }


def test_a_skipped_collective_is_missing_at_its_call_site() -> None:
    found, fault = one(FaultKind.SKIP)
    sites = {r: e["frames"][2]["line"] for r, e in at_fault(found, fault).items()}
    line = int(fault.site.split(":")[1].split()[0])
    assert all(site == line for r, site in sites.items() if r != fault.rank)
    assert sites.get(fault.rank) != line or counts(found, fault)[fault.rank] < max(counts(found, fault).values())


def test_an_extra_collective_makes_the_victim_one_ahead() -> None:
    found, fault = one(FaultKind.EXTRA)
    newest = counts(found, fault)
    assert newest[fault.rank] >= max(newest.values())


def test_swapped_collectives_leave_two_groups_waiting_for_each_other() -> None:
    found, fault = one(FaultKind.ORDER_SWAP)
    oldest = {r: next(e for e in entries_of(found, r) if e["state"] != "completed") for r in fault.members}
    mine = oldest[fault.rank]["process_group"][0]
    assert all(e["process_group"][0] != mine for r, e in oldest.items() if r != fault.rank)


def test_a_skipped_send_or_receive_leaves_the_peer_with_one_more() -> None:
    found, fault = one(FaultKind.P2P_SKIP, entries=0)
    assert fault.peer is not None
    flow = Counter[int]()
    for rank in (fault.rank, fault.peer):
        for entry in entries_of(found, rank):
            if entry["is_p2p"] and entry["process_group"][0] == fault.group:
                flow[rank] += 1
    assert flow[fault.rank] != flow[fault.peer]
    assert fault.rank in found.truth.blocked


def test_a_hang_in_flight_has_all_members_in_it() -> None:
    found, fault = one(FaultKind.HANG_IN_FLIGHT)
    entries = at_fault(found, fault)
    assert sorted(entries) == list(fault.members)
    assert {e["state"] for e in entries.values()} == {"scheduled"}


def test_two_faults_both_show() -> None:
    kinds = (FaultKind.HOST_STALL, FaultKind.OP_MISMATCH)
    found = simulate(Scenario(LAYOUT, kinds, seed=4, entries=40))
    stall, mismatch = found.truth.faults
    assert stall.rank != mismatch.rank
    assert len({e["profiling_name"] for e in at_fault(found, mismatch).values()}) == 2
    assert stall.rank not in found.truth.blocked


def test_a_ring_keeps_the_newest_entries_and_their_numbers() -> None:
    found = simulate(Scenario(LAYOUT, (FaultKind.NONE,), entries=100))
    entries = entries_of(found, 2)
    first = entries[0]["record_id"]
    assert first > 0
    assert [e["record_id"] for e in entries] == list(range(first, first + 100))
    for group in {e["process_group"] for e in entries}:
        seqs = [e["collective_seq_id"] for e in entries if e["process_group"] == group and not e["is_p2p"]]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs))) if seqs else True
    assert [e["time_created_ns"] for e in entries] == sorted(e["time_created_ns"] for e in entries)


def test_a_job_from_its_start_counts_from_one() -> None:
    found = simulate(Scenario(LAYOUT, (FaultKind.NONE,), entries=0))
    entries = entries_of(found, 0)
    assert entries[0]["record_id"] == 0
    assert min(e["collective_seq_id"] for e in entries if e["process_group"][1] == "mesh_tp") == 1


def test_clocks_differ_between_nodes_only() -> None:
    layout = Layout(tp=2, dp=4, layers=1, ranks_per_node=4)
    with_skew = simulate(Scenario(layout, (FaultKind.NONE,), entries=40, skew_s=5.0, seed=3))
    without = simulate(Scenario(layout, (FaultKind.NONE,), entries=40, seed=3))
    shifts = [
        entries_of(with_skew, r)[0]["time_created_ns"] - entries_of(without, r)[0]["time_created_ns"] for r in range(8)
    ]
    assert len(set(shifts[:4])) == 1
    assert len(set(shifts[4:])) == 1
    assert shifts[0] != shifts[4]


@pytest.mark.parametrize(
    ("version", "has_threads", "library"),
    [("2.4", False, None), ("2.9", True, "nccl_version"), ("2.10", True, "comm_lib_version")],
)
def test_formats_have_their_own_fields(version: str, has_threads: bool, library: str | None) -> None:
    found = simulate(Scenario(LAYOUT, (FaultKind.NONE,), entries=40, version=version))
    dump = found.dumps(0)["nccl"]
    assert dump["version"] == version
    assert {k for k in dump if k.endswith("lib_version") or k == "nccl_version"} == ({library} if library else set())
    assert ("thread_id" in dump["entries"][0]) is has_threads


def test_active_only_leaves_out_what_is_done() -> None:
    found, _ = one(FaultKind.HOST_STALL, active_only=True)
    for rank in range(LAYOUT.world):
        assert all(e["state"] != "completed" for e in entries_of(found, rank))


def test_written_files_hold_the_dumps_and_the_truth(tmp_path: Path) -> None:
    found, fault = one(FaultKind.HOST_STALL, dropped=0.1, truncated=0.1)
    found.write(tmp_path)
    truth = json.loads((tmp_path / "truth.json").read_text())
    assert truth["faults"][0]["rank"] == fault.rank
    assert len(found.truth.dropped) == len(found.truth.truncated) == 1
    assert fault.rank not in found.truth.dropped + found.truth.truncated
    for rank in range(LAYOUT.world):
        file = tmp_path / f"nccl_trace_rank_{rank}"
        assert file.exists() is (rank not in found.truth.dropped)
        if rank in found.truth.truncated:
            with pytest.raises((pickle.UnpicklingError, EOFError)):
                pickle.loads(file.read_bytes())
        elif file.exists():
            assert pickle.loads(file.read_bytes()) == found.dumps(rank)["nccl"]


def test_what_cannot_happen_is_said() -> None:
    with pytest.raises(NotManifestError, match="take pp of at least 2"):
        simulate(Scenario(Layout(tp=2, dp=2), (FaultKind.P2P_SKIP,)))
    with pytest.raises(ValueError, match="at most two"):
        simulate(Scenario(LAYOUT, (FaultKind.SKIP,) * 3))
    with pytest.raises(ValueError, match="does not divide"):
        Layout(dp=4, ep=3)


def test_layouts_have_the_size_that_was_asked_for() -> None:
    for world in (4, 16, 128, 4096):
        for seed in range(20):
            assert layout_of(world, random.Random(seed)).world == world


def truth_of(*faults: Fault) -> Truth:
    return Truth(world=8, faults=faults, blocked=(), dropped=(), truncated=(), states={})


def test_only_the_culprit_alone_is_exact() -> None:
    truth = truth_of(Fault(FaultKind.HOST_STALL, 3, members=(2, 3, 4, 5)))
    good = score(truth, [("host_stall", (3,), 0.9)])
    assert (good.is_exact, good.is_class_right, good.blames_innocent) == (True, True, False)
    both = score(truth, [("host_stall", (3, 4), 0.9)])
    assert (both.is_exact, both.is_named, both.blames_innocent) == (False, True, True)
    late = score(truth, [("host_stall", (4,), 0.4), ("host_stall", (3,), 0.9)])
    assert (late.is_exact, late.is_named, late.blames_innocent) == (False, True, False)
    wrong_class = score(truth, [("device_stall", (3,), 0.9)])
    assert (wrong_class.is_exact, wrong_class.is_class_right) == (True, False)


def test_two_faults_are_exact_together_or_apart() -> None:
    truth = truth_of(Fault(FaultKind.HOST_STALL, 3), Fault(FaultKind.DEVICE_LOST, 5))
    apart = [("device_stall", (5,), 0.8), ("host_stall", (3,), 0.9)]
    assert score(truth, apart).is_class_right
    together = score(truth, [("host_stall", (3, 5), 0.9)])
    assert (together.is_exact, together.is_class_right, together.blames_innocent) == (True, False, False)
    assert not score(truth, [("host_stall", (3,), 0.9), ("host_stall", (6,), 0.3), *apart]).is_exact


def test_an_even_pair_may_be_named_without_confidence_alone() -> None:
    truth = truth_of(Fault(FaultKind.SIZE_MISMATCH, 3, members=(2, 3)))
    assert score(truth, [("size_mismatch", (2, 3), 0.5)]).is_exact
    assert not score(truth, [("size_mismatch", (2, 3), 0.9)]).is_exact


def test_without_a_fault_silence_is_right() -> None:
    assert score(truth_of(), [("healthy", (), 0.9)]).is_exact
    assert score(truth_of(), [("host_stall", (1,), 0.4)]).is_exact
    assert score(truth_of(), [("host_stall", (1,), 0.8)]).blames_innocent


def test_two_faults_of_which_one_changes_no_record_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 10 calls one more of what it calls there anyway, and stands in it as others do in theirs, behind rank 15.
    layout = Layout(tp=4, dp=4, layers=1, has_gloo=False)
    kinds = (FaultKind.EXTRA, FaultKind.HOST_STALL)
    asked: list[tuple[bool, bool]] = []

    def asking(both: Records, alone: Sequence[Records]) -> bool:
        asked.append((is_one_unseen(both, alone), both == alone[1]))
        return asked[-1][0]

    monkeypatch.setattr("steadyrun.testing.flightsim.is_one_unseen", asking)
    simulate(Scenario(layout, kinds, seed=17, entries=0, backend="gloo", victims=(10, 15)))
    assert asked == [(True, True), (False, False)]


def test_one_of_two_is_unseen_where_no_record_differs_or_nobody_stands() -> None:
    done, stands = RankRecord((("call", 1),), False), RankRecord((("call", 2),), True)
    assert is_one_unseen((stands, done), [(stands, done), (done, stands)])
    assert is_one_unseen((done, done, None), [(stands, done, None), (done, stands, None)])
    assert not is_one_unseen((stands, stands), [(stands, done), (done, stands)])
