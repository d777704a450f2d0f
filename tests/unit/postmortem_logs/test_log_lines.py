"""Lines as torch, NCCL and torchrun write them, version by version."""

import calendar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.postmortem.loglines import (
    DesyncState,
    Fingerprint,
    GroupRef,
    LogClock,
    LogReading,
    NoteKind,
    merged,
    read_log,
)

DEFAULT = GroupRef("0", "default_pg", 3)
CAUGHT = (
    "[rank3]:[E810 03:04:11.061727749 ProcessGroupNCCL.cpp:683] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=72, OpType=BROADCAST, NumelIn=64, NumelOut=64, Timeout(ms)=30000) ran for 30097 milliseconds "
    "before timing out."
)
FAILED = (
    "[rank3]:[E810 03:04:11.063313477 ProcessGroupNCCL.cpp:2241] [PG ID 0 PG GUID 0(default_pg) Rank 3]  failure "
    "detected by watchdog at work sequence id: 72 PG status: last enqueued work: 75, last completed work: 71"
)


def only(reading: LogReading):
    (log,) = reading.ranks.values()
    return log


@pytest.mark.parametrize(
    ("line", "rank", "expected"),
    [
        pytest.param(
            "[E ProcessGroupNCCL.cpp:828] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, "
            "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800503 milliseconds before timing out.",
            1,
            (1, 5, "ALLREDUCE", None, None, 1800.0, 1800.503),
            id="2.0, no prefix and no sizes",
        ),
        pytest.param(
            "[E ProcessGroupNCCL.cpp:474] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, "
            "OpType=_ALLGATHER_BASE, TensorShape=[4, 8], Timeout(ms)=600000) ran for 600100 milliseconds before timing "
            "out.",
            2,
            (2, 9, "_ALLGATHER_BASE", 32, None, 600.0, 600.1),
            id="2.1, a shape",
        ),
        pytest.param(
            "[rank7]:[E ProcessGroupNCCL.cpp:563] [Rank 3] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=4, OpType=REDUCE_SCATTER, NumelIn=8, NumelOut=2, Timeout(ms)=1000) ran for 1001 "
            "milliseconds before timing out.",
            7,
            (3, 4, "REDUCE_SCATTER", 8, 2, 1.0, 1.001),
            id="2.3, prefix with the global rank",
        ),
        pytest.param(CAUGHT, 3, (3, 72, "BROADCAST", 64, 64, 30.0, 30.097), id="2.6, with a stamp"),
    ],
)
def test_timeout_lines_of_all_versions(line: str, rank: int, expected: tuple[object, ...]) -> None:
    log = only(read_log([line]))
    (t,) = log.timeouts
    assert log.rank == rank
    assert (t.group_rank, t.seq, t.op, t.numel_in, t.numel_out, t.timeout_s, t.ran_for_s) == expected


@pytest.mark.parametrize(
    ("line", "group", "numbers"),
    [
        pytest.param(
            "[rank5]:[E ProcessGroupNCCL.cpp:1537] [PG 2 Rank 1] Timeout at NCCL work: 8, last enqueued NCCL work: 9, "
            "last completed NCCL work: 7.",
            GroupRef("2", "", 1),
            (9, 7, 8),
            id="2.3",
        ),
        pytest.param(
            "[rank5]:[E816 01:45:40.184 ProcessGroupNCCL.cpp:1664] [PG 0 (default_pg) Rank 5] Exception (either an "
            "error or timeout) detected by watchdog at work: 8, last enqueued NCCL work: 9, last completed NCCL work: "
            "7.",
            GroupRef("0", "default_pg", 5),
            (9, 7, 8),
            id="2.4",
        ),
        pytest.param(
            "[rank5]:[E816 01:45:40.184 ProcessGroupNCCL.cpp:1785] [PG ID 1 PG GUID 11(mesh_tp) Rank 1] Exception "
            "(either an error or timeout) detected by watchdog at work: 8, last enqueued NCCL work: 9, last completed "
            "NCCL work: 7.",
            GroupRef("11", "mesh_tp", 1),
            (9, 7, 8),
            id="2.5",
        ),
        pytest.param(
            "[rank5]:[E816 01:45:40.184 ProcessGroupNCCL.cpp:2241] [PG ID 1 PG GUID 1 Rank 1]  failure detected by "
            "watchdog at work sequence id: 1 PG status: last enqueued work: 547, last completed work: -1",
            GroupRef("1", "", 1),
            (547, None, 1),
            id="2.6, nothing completed",
        ),
        pytest.param(
            "[rank5]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 5] Timeout at NCCL work: 1, last enqueued NCCL work: 1, "
            "last completed NCCL work: 3452013982.",
            GroupRef("0", "", 5),
            (1, None, 1),
            id="2.3, a counter that was never set",
        ),
    ],
)
def test_status_lines_of_all_versions(line: str, group: GroupRef, numbers: tuple[int | None, ...]) -> None:
    log = only(read_log([line]))
    (c,) = log.counters
    assert log.rank == 5
    assert c.group == group
    assert (c.enqueued, c.completed, c.failed_seq) == numbers


def test_signal_of_another_rank_is_told_with_its_counters() -> None:
    line = (
        "(Worker[rank=31] pid=77, ip=10.0.0.1) [rank31]:[E810 03:04:11.56 ProcessGroupNCCL.cpp:1858] [PG ID 0 PG GUID "
        "0(default_pg) Rank 31] Received a dump signal due to a collective timeout from  rank 107 and we will try our "
        "best to dump the debug info. Last enqueued NCCL work: 51, last completed NCCL work: 51.This is most likely"
    )
    log = only(read_log([line]))
    (c,) = log.counters
    assert (log.rank, log.pid, log.host) == (31, 77, "10.0.0.1")
    assert (c.enqueued, c.completed, c.failed_seq, c.told_by) == (51, 51, None, 107)


def test_own_signal_names_nobody() -> None:
    line = (
        "[rank0]:[E709 17:05:38.48 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank 0] Received a dump "
        "signal due to a collective timeout from this local rank and we will try our best to dump the debug info. Last "
        "enqueued NCCL work: 20589, last completed NCCL work: 20584.This"
    )
    (c,) = only(read_log([line])).counters
    assert (c.told_by, c.enqueued, c.completed) == (None, 20589, 20584)


def test_timeout_gets_the_group_of_the_line_about_the_same_number() -> None:
    (timeout,) = only(read_log([CAUGHT, FAILED])).timeouts
    assert timeout.group == DEFAULT


def test_timeout_repeated_by_the_dying_watchdog_counts_once_and_gives_its_group() -> None:
    again = (
        "[rank3]:[E810 03:05:11.06 ProcessGroupNCCL.cpp:1895] [PG ID 4 PG GUID 19(mesh_dp) Rank 3] Process group "
        "watchdog thread terminated with exception: " + CAUGHT.partition("] [Rank")[2].join(["[Rank", ""])
    )
    log = only(read_log([CAUGHT, again]))
    (timeout,) = log.timeouts
    assert timeout.group == GroupRef("19", "mesh_dp", 3)
    assert not log.has(NoteKind.COMM_ERROR)


def test_words_of_two_processes_in_one_line_are_kept_apart() -> None:
    line = (
        f"Epoch 10/10: 240it [05:55,  1.47s/it, loss=4]{CAUGHT}{CAUGHT.replace('ank3', 'ank4').replace('k 3', 'k 4')}"
    )
    reading = read_log([line])
    assert sorted(reading.ranks) == [3, 4]
    assert all(len(log.timeouts) == 1 for log in reading.ranks.values())


def test_tee_prefix_is_a_local_rank_only_where_nothing_better_is_told() -> None:
    reading = read_log([f"[default3]:{CAUGHT.replace('[rank3]', '[rank11]')}"])
    assert list(reading.ranks) == [11]
    assert list(read_log(["[default3]:ValueError: x", "[default3]:y"]).ranks) == [3]


def test_sub_group_line_without_a_global_rank_is_nobodys() -> None:
    named = "[rank9]:[E ProcessGroupNCCL.cpp:1] [PG 0 Rank 9] First PG on this rank to signal dumping."
    nameless = (
        "[PG ID 3 PG GUID 7(mesh_tp) Rank 1]  failure detected by watchdog at work sequence id: 2 PG status: last "
        "enqueued work: 2, last completed work: 1"
    )
    assert sorted(read_log([named, nameless]).ranks) == [9]


def test_call_stack_of_the_collective_is_read_newest_call_first() -> None:
    lines = [
        CAUGHT,
        "[rank3]:[E810 03:04:11.07 ProcessGroupNCCL.cpp:801] Stack trace of the failed collective: ",
        "#0 all_reduce from /env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:3174",
        "#1 step from /home/me/train.py:88",
        "something else",
        "#2 late from /home/me/train.py:99",
    ]
    (timeout,) = only(read_log(lines, rank=3)).timeouts
    assert [(f.function, f.line) for f in timeout.frames] == [("all_reduce", 3174), ("step", 88)]


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        ("Observed flight recorder dump signal from another rank via TCPStore.", NoteKind.SAW_SIGNAL, None),
        ("First PG on this rank to signal dumping.", NoteKind.GAVE_SIGNAL, None),
        ("ProcessGroupNCCL's watchdog got stuck for 480 seconds without making", NoteKind.WATCHDOG_STUCK, 480),
        ("ProcessGroupNCCL's watchdog got stuck for 600seconds without making", NoteKind.WATCHDOG_STUCK, 600),
        ("Heartbeat monitor timed out! Process will be terminated after", NoteKind.WATCHDOG_STUCK, None),
        ("Could not acquire GIL within 300 ms on exit, possible GIL induced hang", NoteKind.GIL_HELD, 300),
        ("Future timed out after waiting for 15000ms flight recorder dumps", NoteKind.DUMP_TIMED_OUT, 15000),
        (" remote error detected from rank: 12", NoteKind.REMOTE_ERROR, 12),
        ("Starting to destroy process group, flushing operations.", NoteKind.DESTROYING, None),
        (
            "Process group watchdog thread terminated with exception: CUDA error: an illegal memory access",
            NoteKind.COMM_ERROR,
            None,
        ),
    ],
)
def test_notes(text: str, kind: NoteKind, number: int | None) -> None:
    line = f"[rank2]:[E812 10:00:00.5 ProcessGroupNCCL.cpp:7] [PG ID 0 PG GUID 0(default_pg) Rank 2] {text}"
    (note,) = only(read_log([line])).notes
    assert (note.kind, note.number) == (kind, number)


def test_recorder_that_was_off_is_told() -> None:
    line = (
        "[rank1]:[E1118 20:32:23.957467207 ProcessGroupNCCL.cpp:667] Stack trace of the failed collective not found, "
        "potentially because FlightRecorder is disabled. You can enable it by setting TORCH_NCCL_TRACE_BUFFER_SIZE to"
    )
    assert only(read_log([line])).has(NoteKind.RECORDER_OFF)


@pytest.mark.parametrize(
    ("written", "year"), [((2026, 8, 10, 4, 0, 0), 2026), ((2026, 8, 9, 12, 0, 0), 2026), ((2026, 3, 1, 0, 0, 0), 2025)]
)
def test_stamp_takes_the_newest_year_that_is_not_after_the_file(written: tuple[int, ...], year: int) -> None:
    clock = LogClock(calendar.timegm((*written, 0, 0, 0)))
    (timeout,) = only(read_log([CAUGHT], clock=clock)).timeouts
    assert timeout.at_unix_s == pytest.approx(calendar.timegm((year, 8, 10, 3, 4, 11)) + 0.061727749)


def test_stamp_is_in_the_zone_of_the_clock() -> None:
    (timeout,) = only(read_log([CAUGHT], clock=LogClock(calendar.timegm((2026, 8, 11, 0, 0, 0)), 7200.0))).timeouts
    assert timeout.at_unix_s == pytest.approx(calendar.timegm((2026, 8, 10, 1, 4, 11)) + 0.061727749)


# -- other reports -----------------------------------------------------------------------------------------------------
def test_fingerprint_mismatch() -> None:
    line = (
        "[rank0]: RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=18, OpType=ALLGATHER, TensorShape=[4, 2], TensorDtypes=Float, "
        "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, layout=Strided (default))), but Rank 2 is "
        "running collective: CollectiveFingerPrint(SequenceNumber=19OpType=BARRIER).Collectives differ in the following"
    )
    (mismatch,) = read_log([line]).fingerprints
    assert mismatch.own == Fingerprint(0, 18, "ALLGATHER", (4, 2), ("Float",))
    assert mismatch.other == Fingerprint(2, 19, "BARRIER")


def test_report_of_ras_names_the_ranks_of_the_smaller_side() -> None:
    lines = """
  Warnings
  ========

  #0-0 (27a079b828ff1a75) MISMATCH
    Communicator ranks have different collective operation counts
    26 ranks have launched up to operation 6650
    2 ranks have launched up to operation 6649
    Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
    Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210
    Rank 7 has launched up to operation 6640 -- GPU 7 managed by process 12 on node 172.16.64.210
""".splitlines()
    (communicator,) = read_log(lines).communicators
    assert communicator.counts == ((6650, 26, ()), (6649, 2, (0, 2)), (6640, 1, (7,)))


def test_desync_report() -> None:
    lines = [
        "[rank1]:[E810 03:04:11.0 ProcessGroupNCCL.cpp:568] [PG ID 0 PG GUID 0(default_pg) Rank 1] ",
        "\t - [1] Timeout at collective: ALLREDUCE, #39",
        "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:",
        "\t   - [0] joined but didn't finish collective #39 (count from 1)",
        "\t     [2, 3] finished collective #38, but didn't join collective #39 (count from 1)",
        "\t - Snapshot of ranks' latest states:",
        "\t   #38 finished ranks:",
        "\t     [2, 3] finished BROADCAST",
        "\t   #39 started ranks:",
        "\t     [0, 1] started ALLREDUCE",
        "unrelated [5] started ALLREDUCE",
    ]
    group = GroupRef("0", "default_pg", 1)
    assert read_log(lines, rank=1).desync == (
        DesyncState(group, (1,), 39, "ALLREDUCE"),
        DesyncState(group, (0,), 39),
        DesyncState(group, (2, 3), 38, is_finished=True),
        DesyncState(group, (2, 3), 38, "BROADCAST", True),
        DesyncState(group, (0, 1), 39, "ALLREDUCE"),
    )


def test_ranks_that_never_joined_anything() -> None:
    text = (
        "\t - To our best knowledge, ranks [4, 5] are the lagging ranks that caused this timeout. They never joined any"
    )
    assert read_log([text], rank=0).desync == (DesyncState(None, (4, 5), None),)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 5000 ms", (1,)),
        ("[Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 5000 ms", (2, 3)),
    ],
)
def test_monitored_barrier(text: str, ranks: tuple[int, ...]) -> None:
    (late,) = read_log([text]).barriers
    assert (late.ranks, late.limit_s) == (ranks, 5.0)


# -- Python and torchrun -----------------------------------------------------------------------------------------------
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/home/me/train.py", line 90, in <module>',
    "    main()",
    '  File "/home/me/train.py", line 12, in main',
    "    raise ValueError('bad batch')",
    "ValueError: bad batch",
]


def test_traceback_that_torch_marked_is_the_last_word() -> None:
    lines = [f"[rank2]: {line}" for line in TRACEBACK] + ["chatter"] * 100
    (e,) = read_log(lines).ranks[2].exceptions
    assert (e.type, e.message, e.is_last_words) == ("ValueError", "bad batch", True)
    assert [f.line for f in e.frames] == [12, 90]


def test_traceback_at_the_end_of_a_log_is_the_last_word() -> None:
    (e,) = only(read_log([*TRACEBACK, "done"], rank=4)).exceptions
    assert e.is_last_words


@pytest.mark.parametrize("after", [["still training"] * 60, [CAUGHT]], ids=["went on", "its watchdog spoke later"])
def test_traceback_that_was_survived_is_not(after: list[str]) -> None:
    (e,) = read_log([*TRACEBACK, *after], rank=3).ranks[3].exceptions
    assert not e.is_last_words


def test_list_of_failures_of_torchrun() -> None:
    lines = """
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-08-10_03:04:20
  host      : n1
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 102930)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-08-10_03:04:18
  host      : n2
  rank      : 7 (local_rank: 3)
  exitcode  : -6 (pid: 102932)
  error_file: <N/A>
  traceback : Signal 6 (SIGABRT) received by PID 102932
============================================================
""".splitlines()
    reading = read_log(lines, clock=LogClock(calendar.timegm((2026, 8, 11, 0, 0, 0))))
    first, other = reading.exits
    assert (first.rank, first.local_rank, first.signal, first.code, first.is_first) == (7, 3, 6, None, True)
    assert first.at_unix_s == calendar.timegm((2026, 8, 10, 3, 4, 18))
    assert (other.rank, other.code, other.host, other.pid, other.is_first) == (0, 1, "n1", 102930, False)


# -- robustness --------------------------------------------------------------------------------------------------------
def test_ordinary_output_says_nothing() -> None:
    reading = read_log(["epoch 3 loss 0.4", "ranks are fine", "Rank one", "NCCL version 2.27", ""])
    assert not reading.says_something
    assert reading.lines == 5


def test_rank_beyond_all_bounds_is_left_out() -> None:
    assert not read_log([CAUGHT.replace("[rank3]", "[rank9999999]")]).ranks


def test_logs_of_ranks_are_put_together() -> None:
    reading = merged([read_log([CAUGHT]), read_log([FAILED]), read_log([CAUGHT.replace("[rank3]", "[rank4]")])])
    assert sorted(reading.ranks) == [3, 4]
    assert len(reading.ranks[3].timeouts) == len(reading.ranks[3].counters) == 1


PIECES = [
    "[rank3]:", "[rank", "]:", "[E810 03:04:11.06 X.cpp:1] ", "[PG ID 0 PG GUID 0(default_pg) Rank 3]", "[PG 0 Rank 1]",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=", "99999999999999999999", ", OpType=ALLREDUCE",
    ", Timeout(ms)=1) ran for 2 milliseconds", "Received a dump signal due to a collective timeout from rank ", "from ",
    " Last enqueued NCCL work: 1, last completed NCCL work: ", "-1", "Rank 1 has launched up to operation 5",
    "#0-0 (ab) MISMATCH", "[1, 2] started X", "#5 started ranks:", "Traceback (most recent call last):", "Failures:",
    '  File "a.py", line 1, in f', "ValueError: x", "  rank      : 1 (local_rank: 0)", "  exitcode  : -9 (pid: 4)",
    "  time      : never", "Root Cause (first observed failure)",
    "Rank 0 is running collective: CollectiveFingerPrint(",
    "Detected mismatch between collectives on ranks. ", "\n", "\x1b[31m", "\0", "é", " pid=1)", "(W[rank=2] pid=5) ",
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=40))
def test_any_text_can_be_read(pieces: list[str]) -> None:
    reading = read_log("".join(pieces).split("\n"), clock=LogClock(1.8e9))
    assert all(0 <= rank < 1 << 20 for rank in reading.ranks)
