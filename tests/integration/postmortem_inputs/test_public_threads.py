"""Hangs that people have reported in public, retold as logs in torch's format: who and what must be named.

Row numbers are those of the table of public threads in the shared cases.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from steadyrun.core.classes import FaultClass
from steadyrun.postmortem.case import Report
from steadyrun.postmortem.judging import Outcome, judge_case, outcome_of_report
from steadyrun.postmortem.opening import open_case

CASES = Path(__file__).resolve().parents[4] / "shared" / "cases" / "watchdog_logs"
Judged = Callable[..., Report]

FINGERPRINTS = (
    "[rank{0}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {0} is running collective: "
    "CollectiveFingerPrint(SequenceNumber=18, OpType=ALLREDUCE, TensorShape=[4], TensorDtypes=Float, "
    "TensorDeviceTypes=T()), but Rank {1} is running collective: CollectiveFingerPrint(SequenceNumber=18, "
    "OpType=BROADCAST, TensorShape=[4], TensorDtypes=Float, TensorDeviceTypes=T())."
)


def found(report: Report, cls: FaultClass):
    return next((f for f in report.findings if f.cls is cls), None)


def main_finding(report: Report) -> tuple[FaultClass, tuple[int, ...]]:
    return report.findings[0].cls, report.findings[0].ranks


# -- the logs of the shared cases --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "cls", "ranks", "seq"),
    [
        ("msswift_10183.log", FaultClass.SIZE_MISMATCH, {2}, 7219),
        ("nccl_1409.log", FaultClass.OP_MISMATCH, {3, 7}, 80078),
        ("funasr_2317.log", FaultClass.SIZE_MISMATCH, {0, 1}, 3437),
        ("pytorch_141069.log", FaultClass.HOST_STALL, {0}, 19),
        ("nemo_rl_2140.log", FaultClass.START_UP, {97}, 1),
    ],
)
def test_logs_of_the_shared_cases(name: str, cls: FaultClass, ranks: set[int], seq: int) -> None:
    path = CASES / name
    if not path.is_file():
        pytest.skip("the shared cases are not beside this checkout")
    finding = found(judge_case(open_case([path])), cls)
    assert finding is not None
    assert ranks <= set(finding.ranks)
    assert finding.seq == seq
    assert 6 not in finding.ranks  # [Rank 6] of a sub-group is no global rank


# -- who called something else -----------------------------------------------------------------------------------------
def test_2_one_rank_broadcasts_another_size(torch_log, judged: Judged) -> None:
    for rank in (0, 1, 3):
        torch_log.caught(rank, 7219, "BROADCAST", 64).failed(rank, 7219, 7221, 7218)
    torch_log.caught(2, 7219, "BROADCAST", 24_084_544).failed(2, 7219, 7219, 7218)
    assert main_finding(judged(torch_log)) == (FaultClass.SIZE_MISMATCH, (2,))


def test_13_batches_diverge_on_one_rank(torch_log, judged: Judged) -> None:
    for rank in range(4):
        torch_log.caught(rank, 40, "ALLREDUCE", 960 if rank == 2 else 1024).failed(rank, 40, 40, 39)
    assert main_finding(judged(torch_log)) == (FaultClass.SIZE_MISMATCH, (2,))


def test_14_one_rank_makes_a_call_too_many(torch_log, judged: Judged) -> None:
    torch_log.caught(0, 3, "ALLREDUCE", 1).failed(0, 3, 3, 2)
    for rank in range(1, 8):
        torch_log.signalled(rank, 0, 2, 2)
    assert main_finding(judged(torch_log)) == (FaultClass.EXTRA_COLLECTIVE, (0,))


def test_26_fingerprints_name_the_odd_rank(torch_log, judged: Judged) -> None:
    for rank in (0, 1, 3):
        torch_log.plain(FINGERPRINTS.format(rank, 2))
    assert main_finding(judged(torch_log)) == (FaultClass.OP_MISMATCH, (2,))


# -- who did not come --------------------------------------------------------------------------------------------------
def test_10_counts_of_ras_show_who_is_behind(torch_log, judged: Judged) -> None:
    torch_log.plain(
        "#0-0 (27a0) MISMATCH\n"
        "  Communicator ranks have different collective operation counts\n"
        "  Rank 1 has launched up to operation 288686 -- GPU 1 managed by process 7 on node n\n"
        "  Rank 0 has launched up to operation 288685 -- GPU 0 managed by process 6 on node n"
    )
    report = judged(torch_log)
    assert main_finding(report) == (FaultClass.HOST_STALL, (0,))
    assert report.findings[0].seq == 288_686


def test_19_far_behind_what_was_enqueued_one_rank_lacks_the_thirteenth(torch_log, judged: Judged) -> None:
    for rank in (1, 2, 3):
        torch_log.caught(rank, 13, "BROADCAST", 8).failed(rank, 13, 855, 12)
    torch_log.signalled(0, 1, 12, 12)
    report = judged(torch_log)
    assert main_finding(report) == (FaultClass.HOST_STALL, (0,))
    assert report.findings[0].seq == 13


def test_20_seven_wait_in_a_barrier_while_the_eighth_saves(torch_log, judged: Judged) -> None:
    for rank in range(1, 8):
        torch_log.caught(rank, 77, "ALLREDUCE", 1).failed(rank, 77, 77, 76)
    torch_log.signalled(0, 1, 76, 76)
    assert main_finding(judged(torch_log)) == (FaultClass.HOST_STALL, (0,))


def test_27_begins_with_the_sub_group_and_not_with_the_default_group_behind_it(torch_log, judged: Judged) -> None:
    for rank in (8, 9, 10, 11, 12, 13, 15):
        torch_log.caught(rank, 31, "ALLTOALL_BASE", 4096, rank - 8).failed(rank, 31, 31, 30, "9(EP)", rank - 8)
    torch_log.signalled(0, 13, 1261, 1259)
    finding = judged(torch_log, world_size=16).findings[0]
    assert (finding.cls, finding.ranks, finding.op) == (FaultClass.HOST_STALL, (14,), "all_to_all")


def test_28_one_member_of_a_mesh_dimension_is_idle(torch_log, judged: Judged) -> None:
    for rank in (0, 1, 3):
        torch_log.caught(rank, 472_025, "ALLTOALL_BASE", 64).failed(rank, 472_025, 472_025, 472_024, "3(mesh_ulysses)")
    torch_log.signalled(2, 0, 5, 5)
    assert main_finding(judged(torch_log, world_size=4)) == (FaultClass.HOST_STALL, (2,))


def test_31_equal_counters_of_the_default_group_accuse_nobody(torch_log, judged: Judged) -> None:
    for rank in (4, 5, 7):
        torch_log.caught(rank, 88, "ALLGATHER", 32, rank - 4).failed(rank, 88, 88, 87, "5(tp)", rank - 4)
    for rank in range(8):
        torch_log.signalled(rank, 4, 20, 20)
    report = judged(torch_log)
    assert [f.ranks for f in report.findings] == [(6,)]


def test_ranks_named_by_a_monitored_barrier(judged: Judged) -> None:
    report = judged(["RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 5000 ms"])
    assert main_finding(report) == (FaultClass.HOST_STALL, (2, 3))


def test_ranks_named_by_a_desync_report(torch_log, judged: Judged) -> None:
    torch_log.say(0, "[PG ID 0 PG GUID 0(default_pg) Rank 0] ").plain(
        "\t     [2, 3] finished collective #38, but didn't join collective #39 (count from 1)\n"
        "\t   #39 started ranks:\n"
        "\t     [0, 1] started ALLREDUCE"
    )
    assert main_finding(judged(torch_log)) == (FaultClass.HOST_STALL, (2, 3))


def test_victim_that_torchrun_calls_the_root_cause_is_not_blamed(torch_log, judged: Judged) -> None:
    for rank in (1, 2, 3, 5, 6, 7):
        torch_log.caught(rank, 78, "BROADCAST", 80).failed(rank, 78, 79, 77)
    for rank in (0, 4):
        torch_log.signalled(rank, 1, 77, 77)
    torch_log.plain(
        "Root Cause (first observed failure):\n[0]:\n"
        "  time      : 2026-08-10_03:05:18\n  host      : n2\n  rank      : 7 (local_rank: 7)\n"
        "  exitcode  : -6 (pid: 102932)\n  error_file: <N/A>\n  traceback : Signal 6 (SIGABRT) received by PID 102932\n"
        "============================================================"
    )
    report = judged(torch_log)
    assert main_finding(report) == (FaultClass.HOST_STALL, (0, 4))
    assert all(7 not in f.ranks for f in report.findings)
    assert 7 in report.victims


# -- nobody lacks ------------------------------------------------------------------------------------------------------
def test_6_sub_group_stands_in_its_first_operation(torch_log, judged: Judged) -> None:
    torch_log.signalled(3, 9, 51, 51)
    for rank in range(8, 16):
        torch_log.caught(rank, 1, "COALESCED", 0, rank - 8, ran=651)
    assert main_finding(judged(torch_log, world_size=16)) == (FaultClass.START_UP, tuple(range(8, 16)))


def test_15_receives_of_both_sides_wait_for_each_other(torch_log, judged: Judged) -> None:
    for rank in (2, 3):
        torch_log.caught(rank, 4, "RECV", 4096, rank - 2).failed(rank, 4, 4, 3, "17(PIPELINE)", rank - 2)
    assert main_finding(judged(torch_log, world_size=8)) == (FaultClass.P2P_UNMATCHED, (2, 3))


def test_23_all_have_come_and_nothing_moves(torch_log, judged: Judged) -> None:
    for rank in range(8):
        torch_log.caught(rank, 500, "ALLREDUCE", 1 << 20).failed(rank, 500, 502, 499)
    assert main_finding(judged(torch_log)) == (FaultClass.IN_FLIGHT_NETWORK, tuple(range(8)))


# -- what is no collective's fault -------------------------------------------------------------------------------------
def test_9_suspended_machine_is_told_and_numbers_of_two_groups_are_not_compared(torch_log, judged: Judged) -> None:
    torch_log.caught(0, 96_117, "ALLREDUCE", 8, limit=1800).failed(0, 96_117, 96_125, 96_116)
    torch_log.caught(7, 64_088, "ALLREDUCE", 8, 1, limit=1800, ran=25_600)
    report = judged(torch_log, world_size=8)
    (rank,) = [r for r in report.case.evidence.ranks if r.rank == 7]
    assert rank.flight is not None
    assert "stood still" in rank.flight.problems[0]
    assert not [f for f in report.findings if f.confidence >= 0.7]


def test_16_exception_of_a_rank_that_waits_to_destroy_its_group_is_the_root(torch_log, judged: Judged) -> None:
    torch_log.caught(0, 9, "ALLREDUCE", 8).failed(0, 9, 9, 8)
    torch_log.plain(
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/home/me/train.py", line 33, in main\n'
        '[rank1]:     raise ValueError("bad sample 17")\n'
        "[rank1]: ValueError: bad sample 17"
    )
    report = judged(torch_log)
    assert main_finding(report) == (FaultClass.PROGRAM_ERROR, (1,))
    assert report.findings[0].callsite == "/home/me/train.py:33"


def test_24_stuck_watchdogs_are_a_hint_and_no_more(torch_log, judged: Judged) -> None:
    for rank in (2, 5):
        torch_log.say(
            rank,
            f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] ProcessGroupNCCL's watchdog got stuck for 480 seconds "
            "without making progress in monitoring enqueued collectives.",
        )
    report = judged(torch_log, world_size=8)
    assert main_finding(report) == (FaultClass.HOST_STALL, (2, 5))
    assert report.findings[0].confidence < 0.7


def test_log_without_any_such_line_is_not_a_verdict(judged: Judged) -> None:
    lines = [f"[rank{r}]:[I810 03:04:11.0 main.py:1] step 3" for r in range(2)]
    report = judged([*lines, "[rank0]:[E810 03:04:11.0 P.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 0] First PG on this"
                     " rank to signal dumping."])  # fmt: skip
    assert outcome_of_report(report) is Outcome.UNDECIDED
