"""What a log says, as flight records."""

from pathlib import Path

import pytest

from steadyrun.core.flight import OpState, flight_from_json, flight_to_json
from steadyrun.postmortem.watchlog import LogClock, flights_from_log, read_log

CASES = Path(__file__).resolve().parents[4] / "shared" / "cases" / "watchdog_logs"


def caught(rank: int, seq: int, op: str = "ALLREDUCE", numel: int = 8, group_rank: int | None = None, ran: int = 600):
    inner = rank if group_rank is None else group_rank
    return (
        f"[rank{rank}]:[E810 03:04:11.0 P.cpp:6] [Rank {inner}] Watchdog caught collective operation timeout: WorkNCCL("
        f"SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for {ran * 1000} "
        "milliseconds before timing out."
    )


def failed(rank: int, work: int, enqueued: int, completed: int, group: str = "0(default_pg)", place: int | None = None):
    inner = rank if place is None else place
    return (
        f"[rank{rank}]:[E810 03:04:11.1 P.cpp:7] [PG ID 0 PG GUID {group} Rank {inner}]  failure detected by watchdog "
        f"at work sequence id: {work} PG status: last enqueued work: {enqueued}, last completed work: {completed}"
    )


def signalled(rank: int, by: int, enqueued: int, completed: int):
    return (
        f"[rank{rank}]:[E810 03:04:11.2 P.cpp:8] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump signal "
        f"due to a collective timeout from  rank {by} and we will try our best to dump the debug info. Last enqueued "
        f"NCCL work: {enqueued}, last completed NCCL work: {completed}.This"
    )


def case(name: str):
    path = CASES / name
    if not path.is_file():
        pytest.skip("the shared cases are not beside this checkout")
    return flights_from_log(read_log(path.read_text().splitlines()))


def test_operation_that_timed_out_is_the_one_in_flight() -> None:
    flight = flights_from_log(read_log([caught(1, 72), failed(1, 72, 75, 71)], clock=LogClock(1.8e9)))[1]
    (group,), (op,) = flight.groups, flight.ops
    assert (group.name, group.desc, group.issued_seq, group.done_seq) == ("0", "default_pg", 75, 71)
    assert (op.seq, op.name, op.in_sizes, op.timeout_s, op.state) == (72, "all_reduce", ((8,),), 600.0, OpState.ISSUED)
    assert flight.recorders == ("log",)
    assert flight.taken_at_unix_s - op.created_ns / 1e9 == pytest.approx(600, abs=0.2)


def test_equal_counters_mean_that_the_rank_never_entered() -> None:
    flights = flights_from_log(read_log([failed(1, 52, 52, 51), signalled(0, 1, 51, 51)]), world_size=2)
    (group,) = flights[0].groups
    assert (group.issued_seq, group.done_seq, flights[0].ops) == (51, 51, ())
    assert flights[1].ops[0].seq == 52


def test_rank_of_which_only_counters_are_known_waits_in_what_its_peers_name() -> None:
    flights = flights_from_log(read_log([caught(1, 13, "BARRIER"), signalled(2, 1, 14, 12)]))
    (op,) = flights[2].ops
    assert (op.seq, op.name, op.in_sizes) == (13, "barrier", ())


def test_nothing_is_made_up_where_peers_call_different_things() -> None:
    lines = [caught(0, 13, "BARRIER"), caught(1, 13, "ALLREDUCE"), signalled(2, 1, 14, 12)]
    flight = flights_from_log(read_log(lines))[2]
    assert flight.ops == ()
    assert (flight.groups[0].issued_seq, flight.groups[0].done_seq) == (14, 12)


def test_default_group_has_all_ranks_up_to_the_highest_mentioned() -> None:
    flights = flights_from_log(read_log([signalled(1, 7, 5, 5)]))
    assert flights[1].groups[0].ranks == tuple(range(8))
    assert flights_from_log(read_log([signalled(1, 7, 5, 5)]), world_size=16)[1].groups[0].ranks == tuple(range(16))


def test_rank_in_the_group_is_not_taken_for_the_rank() -> None:
    flights = flights_from_log(read_log([caught(97, 1, "COALESCED", 0, group_rank=6)]))
    assert list(flights) == [97]
    (group,) = flights[97].groups
    assert (group.desc, group.ranks) == ("unnamed sub-group", ())
    assert flights[97].ops[0].in_sizes == ()


def test_own_rank_in_the_group_does_not_mean_the_default_group_where_that_is_further() -> None:
    lines = [signalled(2, 0, 90, 90), caught(2, 5)]
    names = [g.name for g in flights_from_log(read_log(lines))[2].groups]
    assert names[0] == "0"
    assert names[1] != "0"


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        pytest.param([(8, 0), (9, 1), (11, 3)], {8: (8, 9, 10, 11)}, id="neighbours"),
        pytest.param([(1, 0), (5, 1), (13, 3)], {1: (1, 5, 9, 13)}, id="strided"),
        pytest.param([(0, 0), (1, 1), (2, 0), (3, 1)], {0: (0, 1), 2: (2, 3)}, id="two groups of one name"),
        pytest.param([(0, 0), (4, 1), (1, 0), (5, 1)], {0: (0, 4), 1: (1, 5)}, id="two strided groups of one name"),
        pytest.param([(9, 1), (10, 2)], {9: (8, 9, 10)}, id="its first rank is silent"),
        pytest.param([(9, 1)], {9: ()}, id="one speaker tells no layout"),
    ],
)
def test_members_of_a_sub_group(places: list[tuple[int, int]], expected: dict[int, tuple[int, ...]]) -> None:
    lines = [failed(rank, 4, 4, 3, "7(mesh_tp)", place) for rank, place in places]
    flights = flights_from_log(read_log(lines))
    for rank, members in expected.items():
        assert flights[rank].groups[0].ranks == members


def test_suspended_process_is_told_and_its_start_is_not_made_up() -> None:
    flight = flights_from_log(read_log([caught(7, 64, ran=25_600)], clock=LogClock(1.8e9)))[7]
    assert flight.ops[0].created_ns is None
    assert "stood still" in flight.problems[0]


def test_error_that_is_no_timeout_fails_the_operation() -> None:
    lines = [
        failed(1, 9, 9, 8),
        "[rank1]:[E P.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with "
        "exception: CUDA error: an illegal memory access was encountered",
    ]
    flight = flights_from_log(read_log(lines))[1]
    assert flight.ops[0].state is OpState.FAILED
    assert "illegal memory access" in flight.exception
    assert flight.groups[0].has_failed


def test_send_does_not_count_as_a_collective() -> None:
    (group,) = flights_from_log(read_log([caught(3, 4, "RECV")]))[3].groups
    assert (group.issued_seq, group.done_seq) == (None, None)


def test_silent_rank_has_no_record() -> None:
    assert 0 not in flights_from_log(read_log([caught(1, 19), caught(2, 19)]))


# -- told by others ----------------------------------------------------------------------------------------------------
def test_desync_report_tells_of_ranks_that_are_silent() -> None:
    lines = [
        failed(1, 39, 39, 38),
        "\t     [2] finished collective #38, but didn't join collective #39 (count from 1)",
        "\t   #39 started ranks:",
        "\t     [0, 1] started ALLREDUCE",
    ]
    flights = flights_from_log(read_log(lines, rank=1))
    assert (flights[2].groups[0].issued_seq, flights[2].groups[0].done_seq, flights[2].ops) == (38, 38, ())
    assert flights[0].ops[0].name == "all_reduce"
    assert flights[1].groups[0].ranks == (0, 1, 2)


FINGERPRINTS = (
    "RuntimeError: Detected mismatch between collectives on ranks. Rank {} is running collective: "
    "CollectiveFingerPrint(SequenceNumber={}, OpType={}, TensorShape=[{}], TensorDtypes=Float, TensorDeviceTypes=T()), "
    "but Rank {} is running collective: CollectiveFingerPrint(SequenceNumber={}, OpType={}, TensorShape=[{}], "
    "TensorDtypes=Float, TensorDeviceTypes=T())."
)


def test_fingerprints_give_both_sides_and_those_that_agree() -> None:
    text = FINGERPRINTS.format(1, 18, "ALLREDUCE", 4, 3, 18, "BROADCAST", 4)
    flights = flights_from_log(read_log([text]))
    assert {r: f.ops[0].name for r, f in flights.items()} == {
        0: "all_reduce",
        1: "all_reduce",
        2: "all_reduce",
        3: "broadcast",
    }


def test_fingerprints_of_different_calls_are_at_the_same_place_whatever_their_counts() -> None:
    text = FINGERPRINTS.format(0, 1649, "BARRIER", 1, 1, 3, "GATHER", 1)
    flights = flights_from_log(read_log([text]))
    assert flights[0].ops[0].seq == flights[1].ops[0].seq == 1649


def test_fingerprints_of_one_call_with_two_counts_show_who_is_behind() -> None:
    text = FINGERPRINTS.format(0, 22, "ALLREDUCE", 4, 1, 18, "ALLREDUCE", 4)
    flights = flights_from_log(read_log([text]))
    assert (flights[0].ops[0].seq, flights[1].ops[0].seq) == (22, 18)


def test_ras_gives_the_unnamed_ranks_to_the_largest_side() -> None:
    lines = """#0-0 (27a0) MISMATCH
  Communicator ranks have different collective operation counts
  3 ranks have launched up to operation 66
  Rank 1 has launched up to operation 65 -- GPU 1 managed by process 7 on node n""".splitlines()
    flights = flights_from_log(read_log(lines))
    assert {r: (f.groups[0].issued_seq, len(f.ops)) for r, f in flights.items()} == {
        0: (66, 1),
        1: (65, 0),
        2: (66, 1),
        3: (66, 1),
    }


def test_monitored_barrier_names_who_did_not_come() -> None:
    flights = flights_from_log(read_log(["[Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 5000 ms"]))
    assert flights[0].ops[0].name == "monitored_barrier"
    assert flights[2].ops == flights[3].ops == ()


# -- the shared cases --------------------------------------------------------------------------------------------------
def test_two_sizes_of_one_broadcast() -> None:
    flights = case("msswift_10183.log")
    assert {r: f.ops[0].in_sizes for r, f in flights.items()} == {2: ((24084544,),), 3: ((64,),)}
    assert {f.ops[0].seq for f in flights.values()} == {7219}


def test_two_operations_under_one_number() -> None:
    flights = case("nccl_1409.log")
    assert {r: (f.groups[0].name, f.ops[0].name) for r, f in flights.items()} == {
        3: ("0", "all_reduce"),
        7: ("0", "broadcast"),
    }


def test_silent_rank_is_a_member_that_has_not_come() -> None:
    flights = case("pytorch_141069.log")
    assert sorted(flights) == [1, 2, 3]
    assert all(f.groups[0].ranks == (0, 1, 2, 3) for f in flights.values())


@pytest.mark.parametrize(
    "name", ["funasr_2317.log", "msswift_10183.log", "nccl_1409.log", "nemo_rl_2140.log", "pytorch_141069.log"]
)
def test_records_survive_the_way_through_json(name: str) -> None:
    for flight in case(name).values():
        assert flight_from_json(flight_to_json(flight)) == flight
