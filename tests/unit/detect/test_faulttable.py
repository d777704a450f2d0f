"""Every row of the fault table: what makes a fault of that kind, and what is done about its first and its next one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest

from steadyrun.core.board import OpenSection
from steadyrun.core.classes import Action, FaultClass, Mode
from steadyrun.core.records import Evidence, Finding, RankEvidence, Suspicion
from steadyrun.detect.faulttable import (
    ACTION_OF_MEASURE,
    ADVICE,
    ESCALATION,
    KIND_OF_CLASS,
    KIND_OF_RECOVERY,
    KIND_OF_XID,
    ROWS,
    TABLE,
    FaultKind,
    Measure,
    Recovery,
    Signs,
    kind_of,
    signs_of,
)
from steadyrun.detect.nodescore import Mark, Why
from steadyrun.detect.policy import AttemptOutcome, History, Policy, PolicyLimits, Ruling, Situation

C, K = FaultClass, FaultKind
NOW_UNIX_S = 1_800_000_000.0
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0
RESTART, WITHOUT, REPORT, STOP = Action.RESTART, Action.RESTART_WITHOUT_NODE, Action.REPORT, Action.STOP


def rule(
    kind: FaultKind,
    ages_s: Iterable[float] = (0.0,),
    *,
    cls: FaultClass,
    spares: int = 1,
    gpus: Iterable[str] = ("gpu-7",),
    ranks: Iterable[tuple[int, ...]] | None = None,
    same: bool = False,
    offenders: frozenset[str] = frozenset(),
    has_older: bool = False,
) -> Ruling:
    """On the last of faults that are so old, all on one node (and on *gpus*, one for each); each made progress."""
    ages_s = list(ages_s)
    gpus = list(gpus) * len(ages_s) if len(list(gpus)) == 1 else list(gpus)
    named = list(ranks) if ranks is not None else [(5,)] * len(ages_s)
    trace = (("t", 7),) if same else ()
    attempts = [
        AttemptOutcome(i, 7 if same else 10 * (i + 1), True, 0, trace, cls, kind, ranks=named[i], nodes=("bad",))
        for i in range(len(ages_s))
    ]
    marks = [
        Mark("run", i, "bad", "bad", Why.BLAMED, kind, NOW_UNIX_S - age_s, 1.0, gpus[i])
        for i, age_s in enumerate(ages_s)
    ]
    finding = Finding(cls, named[-1], "made", 0.9, nodes=("bad",), gpus=(gpus[-1],))
    return Policy(PolicyLimits(), random.Random(1)).decide(
        [finding],
        History(tuple(attempts)),
        Mode.ACT,
        "exit",
        kind=kind,
        has_older=has_older,
        situation=Situation(NOW_UNIX_S, {"bad": marks}, offenders, spares),
    )


# -- one fault of each kind, and its next one --------------------------------------------------------------------------
@dataclass(frozen=True)
class Expected:
    """A row's test.

    Attributes:
        first: what is done about the first fault, and what people are told to do.
        then: ages of further faults, newest (0.0) last, and what is done about the newest one.
    """

    kind: FaultKind
    cls: FaultClass
    first: Action
    advice: tuple[Measure, ...] = ()
    then: tuple[tuple[tuple[float, ...], Action], ...] = field(default=())

    def __str__(self) -> str:
        return self.kind.value


EXPECTED = [
    Expected(K.PROGRAM_ERROR, C.PROGRAM_ERROR, RESTART, then=(((60.0, 0.0), RESTART),)),
    Expected(K.CRASH, C.DEAD_PROCESS, RESTART, then=(((60.0, 0.0), RESTART),)),
    Expected(K.OUT_OF_MEMORY, C.OUT_OF_MEMORY, RESTART),
    Expected(
        K.DEVICE_ERROR,
        C.PROGRAM_ERROR,
        RESTART,
        then=(((23 * HOUR_S, 0.0), WITHOUT), ((25 * HOUR_S, 0.0), RESTART)),
    ),
    Expected(K.MEMORY_ERROR_CONTAINED, C.DEVICE_STALL, RESTART, (Measure.RESET_DEVICE,), (((60.0, 0.0), RESTART),)),
    Expected(K.DEVICE_RESET, C.DEVICE_STALL, WITHOUT, (Measure.RESET_DEVICE,)),
    Expected(K.ROW_REMAP_FAILED, C.DEVICE_STALL, WITHOUT, (Measure.REPLACE_DEVICE,)),
    Expected(K.DEVICE_LOST, C.DEAD_PROCESS, WITHOUT, (Measure.REBOOT_NODE,)),
    Expected(K.DEVICE_LINK, C.DEVICE_STALL, RESTART, (Measure.RESET_DEVICE,), (((20 * DAY_S, 0.0), WITHOUT),)),
    Expected(K.NETWORK, C.IN_FLIGHT_NETWORK, RESTART, then=(((290.0, 0.0), WITHOUT), ((310.0, 0.0), RESTART))),
    Expected(K.LINK_FLAP, C.IN_FLIGHT_NETWORK, REPORT),
    Expected(K.HANG, C.HOST_STALL, RESTART, then=(((60.0, 0.0), RESTART),)),
    Expected(K.INPUT_PIPELINE, C.INPUT_PIPELINE, RESTART),
    Expected(K.TEARDOWN, C.TEARDOWN_HANG, RESTART),
    Expected(K.MISMATCH, C.SIZE_MISMATCH, RESTART),
    Expected(K.SLOW, C.STRAGGLER, REPORT),
    Expected(K.NOT_FINITE, C.PROGRAM_ERROR, RESTART),
    Expected(K.CORRUPTION, C.SILENT_CORRUPTION, WITHOUT),
    Expected(K.STORAGE, C.STORAGE_STALL, RESTART),
    Expected(K.ASYNC_SAVE_STALL, C.STORAGE_STALL, REPORT),
    Expected(K.AGENT_LOST, C.DEAD_NODE, RESTART),
    Expected(K.REPEAT_OFFENDER, C.DEAD_PROCESS, WITHOUT, (Measure.PREFLIGHT,)),
    Expected(K.START_UP, C.START_UP, RESTART),
    Expected(K.PREEMPTED, C.PREEMPTED, STOP),
    Expected(K.DONE, C.HEALTHY, STOP),
    Expected(K.UNKNOWN, C.INSUFFICIENT_DATA, RESTART),
]


def test_every_row_is_tested_and_has_an_action() -> None:
    assert [e.kind for e in EXPECTED] == sorted(set(ROWS), key=[e.kind for e in EXPECTED].index)
    assert set(ROWS) == set(FaultKind)
    assert all(isinstance(row.action, Action) for row in ROWS.values())
    assert all(row.signal for row in ROWS.values())


@pytest.mark.parametrize("row", EXPECTED, ids=str)
def test_first_fault_of_a_kind(row: Expected) -> None:
    ruling = rule(row.kind, cls=row.cls)
    assert ruling.action is row.first
    assert ruling.advice == tuple(ADVICE[m] for m in row.advice)
    assert ruling.without == (("bad",) if row.first is WITHOUT else ())


@pytest.mark.parametrize(
    ("row", "ages_s", "action"), [(e, ages, action) for e in EXPECTED for ages, action in e.then], ids=str
)
def test_next_fault_of_a_kind(row: Expected, ages_s: tuple[float, ...], action: Action) -> None:
    ruling = rule(row.kind, ages_s, cls=row.cls)
    assert ruling.action is action
    assert ruling.without == (("bad",) if action is WITHOUT else ())


@pytest.mark.parametrize("row", [e for e in EXPECTED if e.first is WITHOUT], ids=str)
def test_without_a_spare_the_node_stays_and_that_is_said(row: Expected) -> None:
    ruling = rule(row.kind, cls=row.cls, spares=0)
    assert (ruling.action, ruling.without) == (RESTART, ())
    assert "bad should be left out" in ruling.reason
    assert "no spare" in ruling.reason
    assert ruling.advice == tuple(ADVICE[m] for m in row.advice)


# -- what single rows add ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [K.PROGRAM_ERROR, K.NOT_FINITE, K.DEVICE_ERROR, K.OUT_OF_MEMORY])
def test_the_same_stack_at_the_same_step_twice_is_the_program(kind: FaultKind) -> None:
    ruling = rule(kind, (60.0, 0.0), cls=C.PROGRAM_ERROR, gpus=("gpu-1", "gpu-2"), same=True)
    assert ruling.action is STOP
    assert "same traceback after step 7 twice" in ruling.reason


@pytest.mark.parametrize(("kind", "cls"), [(K.OUT_OF_MEMORY, C.OUT_OF_MEMORY), (K.MISMATCH, C.OP_MISMATCH)])
def test_what_a_restart_cannot_help_gets_one(kind: FaultKind, cls: FaultClass) -> None:
    stuck = [AttemptOutcome(i, 9, True, 0, (), cls, kind) for i in range(2)]
    for attempts, action in ((stuck[:1], RESTART), (stuck, STOP)):
        ruling = Policy().decide([Finding(cls, (1,), "made", 0.9)], History(tuple(attempts)), Mode.ACT, kind=kind)
        assert ruling.action is action


def test_errors_of_two_devices_are_not_one_device_twice() -> None:
    assert rule(K.DEVICE_ERROR, (60.0, 0.0), cls=C.PROGRAM_ERROR, gpus=("gpu-1", "gpu-2")).action is RESTART


def test_hangs_of_different_ranks_ask_for_a_test_of_all_nodes() -> None:
    preflight = (ADVICE[Measure.PREFLIGHT],)
    assert rule(K.HANG, (60.0, 0.0), cls=C.HOST_STALL, ranks=[(1,), (5,)]).advice == preflight
    assert rule(K.HANG, (60.0, 0.0), cls=C.HOST_STALL, ranks=[(), ()]).advice == preflight
    assert rule(K.HANG, (60.0, 0.0), cls=C.HOST_STALL, ranks=[(5,), (5,)]).advice == ()


def test_corruption_goes_back_to_an_older_checkpoint_where_there_is_one() -> None:
    assert rule(K.CORRUPTION, cls=C.SILENT_CORRUPTION, has_older=True).falls_back
    assert not rule(K.CORRUPTION, cls=C.SILENT_CORRUPTION).falls_back


def test_a_repeat_offender_is_left_out_whatever_it_fails_of() -> None:
    for spares, action in ((1, WITHOUT), (0, RESTART)):
        ruling = rule(K.CRASH, cls=C.DEAD_PROCESS, offenders=frozenset({"bad"}), spares=spares)
        assert ruling.action is action
        assert "a repeat offender" in ruling.reason
    assert rule(K.CRASH, cls=C.DEAD_PROCESS, offenders=frozenset({"other"})).action is RESTART


def test_a_second_flap_within_five_minutes_asks_for_the_node_to_leave() -> None:
    rungs = {r.measure: r for r in ROWS[K.LINK_FLAP].rungs}
    assert (rungs[Measure.WAIT].nth, ROWS[K.LINK_FLAP].action) == (1, REPORT)
    assert (rungs[Measure.EXCLUDE_NODE].nth, rungs[Measure.EXCLUDE_NODE].within_s) == (2, 300.0)
    assert rule(K.LINK_FLAP, (310.0, 0.0), cls=C.IN_FLIGHT_NETWORK).action is REPORT
    assert rule(K.LINK_FLAP, (290.0, 0.0), cls=C.IN_FLIGHT_NETWORK).action is WITHOUT
    assert rule(K.LINK_FLAP, (290.0, 0.0), cls=C.IN_FLIGHT_NETWORK, spares=0).action is REPORT


def test_faults_of_programs_and_data_say_nothing_about_nodes() -> None:
    innocent = {k for k, row in ROWS.items() if row.blames_node == 0}
    assert {K.PROGRAM_ERROR, K.OUT_OF_MEMORY, K.MISMATCH, K.INPUT_PIPELINE, K.START_UP, K.PREEMPTED} <= innocent
    assert {k for k, row in ROWS.items() if row.is_hardware}.isdisjoint(innocent)


def test_escalation_ends_with_the_end_of_the_job() -> None:
    assert ESCALATION == (Measure.RESTART, Measure.EXCLUDE_NODE, Measure.PREFLIGHT, Measure.STOP)


def test_what_no_person_is_asked_for_has_an_action_or_happens_anyway() -> None:
    used = {r.measure for row in ROWS.values() for r in row.rungs}
    assert used - set(ADVICE) - set(ACTION_OF_MEASURE) == {Measure.DUMP, Measure.FAIL_SAFE}


# -- which kind --------------------------------------------------------------------------------------------------------
def test_every_class_has_a_kind_and_the_table_follows() -> None:
    assert set(KIND_OF_CLASS) == set(FaultClass) == set(TABLE)
    assert all(TABLE[cls] is ROWS[kind] for cls, kind in KIND_OF_CLASS.items())


@pytest.mark.parametrize(
    ("cls", "signs", "kind"),
    [
        (C.DEAD_PROCESS, Signs(), K.CRASH),
        (C.PROGRAM_ERROR, Signs(causes=frozenset({"device_error"})), K.DEVICE_ERROR),
        (C.PROGRAM_ERROR, Signs(causes=frozenset({"device_assert"})), K.PROGRAM_ERROR),
        (C.PROGRAM_ERROR, Signs(causes=frozenset({"not_finite"})), K.NOT_FINITE),
        (C.DEAD_PROCESS, Signs(causes=frozenset({"not_finite"})), K.CRASH),  # only logged, and survived
        (C.DEVICE_STALL, Signs(causes=frozenset({"device_ecc"})), K.DEVICE_RESET),
        (C.DEVICE_STALL, Signs(), K.HANG),
        (C.DEAD_PROCESS, Signs(xids=frozenset({13})), K.CRASH),
        (C.DEAD_PROCESS, Signs(xids=frozenset({31})), K.DEVICE_ERROR),
        (C.DEAD_PROCESS, Signs(xids=frozenset({45, 94})), K.MEMORY_ERROR_CONTAINED),
        (C.DEAD_PROCESS, Signs(xids=frozenset({94, 95})), K.DEVICE_RESET),
        (C.DEVICE_STALL, Signs(xids=frozenset({48})), K.DEVICE_RESET),
        (C.DEVICE_STALL, Signs(xids=frozenset({63})), K.HANG),  # the remapping has succeeded
        (C.DEVICE_STALL, Signs(xids=frozenset({64, 95})), K.ROW_REMAP_FAILED),
        (C.DEVICE_STALL, Signs(xids=frozenset({79, 94})), K.DEVICE_LOST),
        (C.DEAD_PROCESS, Signs(is_lost=True), K.DEVICE_LOST),
        (C.DEVICE_STALL, Signs(xids=frozenset({74})), K.DEVICE_LINK),
        (C.HOST_STALL, Signs(xids=frozenset({149})), K.DEVICE_LINK),
        (C.IN_FLIGHT_NETWORK, Signs(), K.NETWORK),
        (C.IN_FLIGHT_NETWORK, Signs(has_link_flap=True), K.LINK_FLAP),
        (C.STORAGE_STALL, Signs(), K.STORAGE),
        (C.STORAGE_STALL, Signs(is_async_save=True), K.ASYNC_SAVE_STALL),
        (C.OUT_OF_MEMORY, Signs(xids=frozenset({79})), K.OUT_OF_MEMORY),
        (C.DEVICE_STALL, Signs(xids=frozenset({94}), recovery=Recovery.REBOOT), K.DEVICE_LOST),
        (C.DEVICE_STALL, Signs(xids=frozenset({94}), recovery=Recovery.NONE), K.MEMORY_ERROR_CONTAINED),
    ],
    ids=str,
)
def test_signs_make_the_kind(cls: FaultClass, signs: Signs, kind: FaultKind) -> None:
    assert kind_of(cls, signs) is kind


@pytest.mark.parametrize("recovery", list(Recovery))
def test_what_the_driver_asks_for_is_known(recovery: Recovery) -> None:
    assert (recovery in KIND_OF_RECOVERY) is (recovery is not Recovery.NONE)


def test_no_event_has_two_kinds_and_harmless_ones_have_none() -> None:
    assert not {13, 37, 38, 43, 44, 45, 54, 63, 66, 67, 78, 92, 93, 121, 137, 141, 157, 160, 161} & set(KIND_OF_XID)
    counts = {kind: list(KIND_OF_XID.values()).count(kind) for kind in set(KIND_OF_XID.values())}
    assert counts == {
        K.DEVICE_LOST: 1,
        K.ROW_REMAP_FAILED: 1,
        K.DEVICE_RESET: 14,
        K.DEVICE_LINK: 8,
        K.MEMORY_ERROR_CONTAINED: 1,
        K.DEVICE_ERROR: 45,
    }


# -- signs in evidence -------------------------------------------------------------------------------------------------
def signs_in(
    lines: Iterable[str], make_rank: Callable[..., RankEvidence], make_evidence: Callable[..., Evidence]
) -> Signs:
    rank = replace(make_rank(1, code=1), log_tail=tuple(lines))
    other = replace(make_rank(0), log_tail=("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",))
    return signs_of(make_evidence(other, rank, trigger="exit"), Finding(C.DEAD_PROCESS, (1,), "made", 0.9))


@pytest.mark.parametrize(
    ("line", "signs"),
    [
        ("", Signs()),
        ("NVRM: Xid (PCI:0000:3b:00): 94, pid=4711, Contained: SM", Signs(xids=frozenset({94}))),
        (
            "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot)",
            Signs(xids=frozenset({154}), recovery=Recovery.REBOOT),
        ),
        ("GPU recovery action changed from 0x0 (None) to 0x3f (?)", Signs()),
        ("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20009, Non-fatal, Link 4", Signs()),
        ("CUDA error: unspecified launch failure", Signs(causes=frozenset({"device_error"}))),
        ("the loss is nan", Signs(causes=frozenset({"not_finite"}))),
    ],
)
def test_signs_are_read_from_the_last_words_of_the_blamed(
    line: str, signs: Signs, make_rank: Callable[..., RankEvidence], make_evidence: Callable[..., Evidence]
) -> None:
    found = signs_in([line], make_rank, make_evidence)
    assert replace(found, causes=found.causes - {"device_ecc"}) == signs


def test_a_lost_device_is_seen(make_rank: Callable[..., RankEvidence], make_evidence: Callable[..., Evidence]) -> None:
    found = signs_in(["RuntimeError: NVML_ERROR_GPU_IS_LOST"], make_rank, make_evidence)
    assert kind_of(C.DEAD_PROCESS, found) is K.DEVICE_LOST


@pytest.mark.parametrize(
    ("lanes", "section", "expected"),
    [
        ((1,), "checkpointing", True),
        ((0, 1), "checkpointing", False),
        ((0,), "checkpointing", False),
        ((1,), "a", False),
    ],
)
def test_a_save_beside_the_main_thread_is_told_from_one_that_blocks_it(
    lanes: tuple[int, ...],
    section: str,
    expected: bool,
    make_rank: Callable[..., RankEvidence],
    make_evidence: Callable[..., Evidence],
) -> None:
    rank = replace(
        make_rank(1),
        sections=tuple(OpenSection(section, 5.0, False, lane) for lane in lanes),
        suspicion=Suspicion(1, "section", section, 5.0, 60.0, True),
    )
    signs = signs_of(make_evidence(make_rank(0), rank, trigger="hang"), Finding(C.STORAGE_STALL, (1,), "made", 0.9))
    assert signs.is_async_save is expected
