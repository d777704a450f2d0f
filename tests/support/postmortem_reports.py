"""Reports made by hand, for tests of what people are shown: a ring, a stall, a mismatch, an error, hostile texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steadyrun.core.board import OpenSection
from steadyrun.core.classes import FaultClass
from steadyrun.core.flight import FlightGroup, FlightOp, OpState, RankFlight
from steadyrun.core.records import (
    Evidence,
    ExceptionRecord,
    ExitRecord,
    Finding,
    Frame,
    ProcessFacts,
    RankEvidence,
    ThreadStack,
)
from steadyrun.detect.waits.records import FlightFinding, FlightJudgement, Wait, WaitReason
from steadyrun.postmortem.case import Case, Input, InputStatus, Moment, Report

START_S = 1_764_000_000.0  # 2025-11-24 16:00:00 UTC, when the first rank began to wait
NOW_MONO_S = 5_000.0
C10D = "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
SCRIPT = "/proj/job/train.py"


def ns(offset_s: float) -> int:
    """Wall time in ns, so many seconds after ``START_S``."""
    return int((START_S + offset_s) * 1e9)


def stack(*frames: tuple[str, int, str]) -> tuple[ThreadStack, ...]:
    """A main thread's, most recent call first."""
    return (ThreadStack("1", tuple(Frame(*f) for f in frames), is_main=True),)


@dataclass
class CallsOfFlights:
    """``FlightDetails`` with a call every 140 ms before ``START_S``."""

    asked: int = 0

    def ops(self, rank: int, group: str, first_seq: int, last_seq: int) -> Sequence[FlightOp]:
        self.asked += 1
        return [
            FlightOp(
                0, seq, "all_reduce", OpState.DONE, created_ns=ns(-2 + 0.14 * i + 0.004 * rank), site="train.py:88"
            )
            for i, seq in enumerate(range(first_seq, last_seq))
        ]

    def course(self, rank: int, last: int) -> Sequence[FlightOp]:
        return ()


def rank_evidence(flight: RankFlight, node: str, **fields: object) -> RankEvidence:
    base = RankEvidence(
        rank=flight.rank,
        local_rank=flight.rank % 8,
        node=node,
        pid=1000 + flight.rank,
        attempt=0,
        step=117,
        step_at_s=NOW_MONO_S - 32,
        process=ProcessFacts("S", "futex_wait_queue", 24, 812.0, 8 << 30),
        cpu_share=0.02,
        gpu=str(flight.rank % 8),
        flight=flight,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def evidence_of(ranks: Sequence[RankEvidence], world_size: int) -> Evidence:
    return Evidence("r1", 0, world_size, "hang", NOW_MONO_S, tuple(ranks), SCRIPT)


def ring_of_three() -> Report:
    """Ranks 0, 1 and 2 wait for each other over three groups; a live incident."""
    pairs = (("A", "pair_01", (0, 1)), ("B", "pair_12", (1, 2)), ("C", "pair_20", (0, 2)))
    ranks, waits = [], []
    for rank in range(3):
        name, desc, _ = pairs[rank]
        at = 0.021 * rank
        site = f"train.py:{40 + rank} in exchange"
        groups = tuple(
            FlightGroup(n, d, members, "gloo", 0, 13 if n == name else 12, 12, ns(at if n == name else -0.9), ns(-0.5))
            for n, d, members in pairs
            if rank in members
        )
        index = [g.name for g in groups].index(name)
        op = FlightOp(index, 13, "all_reduce", created_ns=ns(at), site=site, frames=(site, "train.py:77 in main"))
        flight = RankFlight(
            rank, groups, (op,), recorders=("gloo",), entries=140, version="2.10", has_frames=True,
            taken_at_unix_s=START_S + 31.2,
        )  # fmt: skip
        ranks.append(
            rank_evidence(
                flight,
                "node00",
                sections=(OpenSection("step", NOW_MONO_S - 31.5 + at),),
                stacks=stack((C10D, 3002, "all_reduce"), (SCRIPT, 40 + rank, "exchange"), (SCRIPT, 77, "main")),
                log_tail=(f"[rank{rank}] step 116 loss 2.31", f"[rank{rank}] step 117 begins"),
            )
        )
        waits.append(
            Wait((rank,), ((rank + 1) % 3,), WaitReason.QUEUED_BEHIND, name, desc, 13, "all_reduce", site, START_S + at)
        )
    summary = "ranks 0, 1 and 2 wait for each other in a ring over pair_01, pair_12 and pair_20"
    finding = Finding(
        FaultClass.DEADLOCK_CYCLE, (0, 1, 2), summary, 0.95, nodes=("node00",), group="pair_01", seq=13,
        op="all_reduce", callsite="train.py:40 in exchange", since_unix_s=START_S,
    )  # fmt: skip
    flight_judgement = FlightJudgement(
        (FlightFinding(finding, 3),), tuple(waits), blocked=(0, 1, 2), coverage=1.0, heads={0: 0, 1: 1, 2: 2}
    )
    steps = [
        Moment(START_S - 3 + 0.5 * i, "step", f"step {112 + i}", rank, "node00") for i in range(6) for rank in range(3)
    ]
    suspicion = Moment(START_S + 20, "agent", "rank 1 makes no progress: section step for 20 s, limit 20 s")
    case = Case(
        evidence_of(ranks, 3),
        tuple(Input(Path(f"rank_{r}.flight.gloo.pickle"), r, InputStatus.USED, "", 61_234) for r in range(3)),
        CallsOfFlights(),
        (*steps, suspicion),
        {"node00": START_S + 31.2 - NOW_MONO_S},
        "incident 1 of run r1",
    )
    return Report(
        case, (finding,), (), ("no native stacks: py-spy is not installed",), flight_judgement,
        head=(("attempt", "0"),), decision="restarting as attempt 1",
    )  # fmt: skip


def stall_of(tp: int = 4, dp: int = 2, culprit: int = 2, has_stacks: bool = True) -> Report:
    """One rank reads data and does not come to its all_reduce; its group waits, and other groups wait for those."""
    world = tp * dp
    ranks, waits = [], []
    home = culprit // tp
    for rank in range(world):
        row, column = divmod(rank, tp)
        is_peer = row == home
        groups = (
            FlightGroup(f"tp{row}", "mesh_tp", tuple(range(row * tp, row * tp + tp)), "nccl", 0,
                        87 if rank == culprit else 88, 87, ns(-0.1), ns(-0.08)),
            FlightGroup(f"dp{column}", "mesh_dp", tuple(range(column, world, tp)), "nccl", 0,
                        11 if is_peer else 12, 11, ns(-0.4), ns(-0.4)),
        )  # fmt: skip
        ops: tuple[FlightOp, ...] = ()
        if is_peer and rank != culprit:
            site = "model/layers.py:212 in forward"
            ops = (FlightOp(0, 88, "all_reduce", created_ns=ns(0.01 * column), site=site, frames=(site,)),)
        elif not is_peer:
            site = "train.py:131 in sync_grads"
            ops = (
                FlightOp(
                    1, 12, "reduce_scatter_tensor", created_ns=ns(0.05 + 0.0001 * rank), site=site, frames=(site,)
                ),
                FlightOp(0, 89, "all_gather_into_tensor", created_ns=ns(0.2 + 0.0001 * rank), site="model/layers.py:9"),
            )
        flight = RankFlight(
            rank, groups, ops, recorders=("nccl",), entries=2000, version="2.10", has_frames=True,
            taken_at_unix_s=START_S + 612,
        )  # fmt: skip
        where = ((C10D, 3002, "all_reduce"), (SCRIPT, 88, "step"))
        if rank == culprit:
            where = (("/usr/lib/python3.11/socket.py", 706, "readinto"), ("/proj/job/data.py", 31, "next_batch"))
        sections = (OpenSection("step", NOW_MONO_S - 612.5),)
        if rank == culprit:
            sections += (OpenSection("data", NOW_MONO_S - 612.1),)
        ranks.append(
            rank_evidence(flight, f"node{rank // 8:03d}", sections=sections, stacks=stack(*where) if has_stacks else ())
        )
    peers = tuple(r for r in range(home * tp, home * tp + tp) if r != culprit)
    waits.append(
        Wait(peers, (culprit,), WaitReason.NOT_ISSUED, f"tp{home}", "mesh_tp", 88, "all_reduce",
             "model/layers.py:212 in forward", START_S)
    )  # fmt: skip
    heads = dict.fromkeys(peers, 0)
    for column in range(tp):
        on = home * tp + column
        waiters = tuple(r for r in range(column, world, tp) if r != on)
        reason = WaitReason.NOT_ISSUED if on == culprit else WaitReason.QUEUED_BEHIND
        heads |= dict.fromkeys(waiters, len(waits))
        waits.append(
            Wait(waiters, (on,), reason, f"dp{column}", "mesh_dp", 12, "reduce_scatter_tensor",
                 "train.py:131 in sync_grads", START_S + 0.05)
        )  # fmt: skip
    victims = tuple(r for r in range(world) if r != culprit)
    summary = f"rank {culprit} has not called all_reduce number 88 of mesh_tp, in which {len(peers)} ranks wait"
    finding = Finding(
        FaultClass.HOST_STALL, (culprit,), summary, 0.93, nodes=("node000",), group=f"mesh_tp (tp{home})", seq=88,
        op="all_reduce", callsite="data.py:31 in next_batch", since_unix_s=START_S, section="data",
    )  # fmt: skip
    judgement = FlightJudgement(
        (FlightFinding(finding, len(victims)),), tuple(waits), blocked=victims, idle=(culprit,), victims=victims,
        coverage=1.0, heads=heads,
    )  # fmt: skip
    nodes = {f"node{n:03d}": START_S + 612 - NOW_MONO_S for n in range((world + 7) // 8)}
    inputs = tuple(Input(Path(f"dumps/nccl_trace_rank_{r}"), r, InputStatus.USED, "", 248_123) for r in range(world))
    case = Case(evidence_of(ranks, world), inputs, CallsOfFlights(), (), nodes, "dumps")
    return Report(case, (finding,), victims, (), judgement)


def mismatch() -> Report:
    """Rank 1 calls broadcast where others call all_reduce; rank 5 is dead, of rank 4 nothing is known."""
    ranks = []
    for rank in range(4):
        name, site = ("broadcast", "train.py:23 in main") if rank == 1 else ("all_reduce", "train.py:20 in main")
        group = FlightGroup("0", "default_pg", (0, 1, 2, 3), "gloo", 0, 4, 3, ns(0.01 * rank), ns(-0.4))
        op = FlightOp(0, 4, name, in_sizes=((1024,),), created_ns=ns(0.01 * rank), site=site)
        flight = RankFlight(rank, (group,), (op,), recorders=("gloo",), entries=5, taken_at_unix_s=START_S + 3)
        ranks.append(RankEvidence(rank, rank, "", 0, 0, flight=flight))
    one = Finding(
        FaultClass.OP_MISMATCH, (1,), "rank 1 called broadcast where ranks 0, 2 and 3 called all_reduce number 4", 0.6,
        group="default_pg", seq=4, op="all_reduce", callsite="train.py:23 in main", since_unix_s=START_S,
    )  # fmt: skip
    two = Finding(FaultClass.DEAD_PROCESS, (5,), "rank 5 died: SIGKILL", 0.8, nodes=("node09",))
    wait = Wait((0, 2, 3), (1,), WaitReason.DIFFERS, "0", "default_pg", 4, "all_reduce", "train.py:20 in main", START_S)
    sides = (((0, 2, 3), "all_reduce [1024] Float"), ((1,), "broadcast [1024] Float"))
    judgement = FlightJudgement(
        (FlightFinding(one, 3, sides),), (wait,), blocked=(0, 1, 2, 3), unknown=(4, 5), victims=(0, 2, 3),
        coverage=4 / 6, heads={0: 0, 2: 0, 3: 0},
    )  # fmt: skip
    case = Case(Evidence("", 0, 6, "hang", 0.0, tuple(ranks)), (), title="gloo_op_mismatch/raw")
    return Report(case, (one, two), (0, 2, 3), ("no dump of rank 5", "nothing of rank 4"), judgement)


def program_error() -> Report:
    """An incident without any flight record: rank 1 raised, rank 0 was left waiting."""
    raised = ExceptionRecord(
        "ValueError", "loss is nan", "abc", (Frame(SCRIPT, 61, "step"), Frame(SCRIPT, 77, "main")), 12, START_S
    )
    ranks = (
        RankEvidence(
            0, 0, "node00", 100, 0, step=11, stacks=stack((C10D, 3002, "all_reduce"), (SCRIPT, 88, "step")),
            process=ProcessFacts("S", "futex", 4, 1.0, 1 << 20),
        ),
        RankEvidence(
            1, 1, "node00", 101, 0, step=12, exception=raised, exit=ExitRecord(1, None, NOW_MONO_S),
            log_tail=("Traceback (most recent call last):", "ValueError: loss is nan"),
            missing=("no stack: the process had ended",),
        ),
    )  # fmt: skip
    finding = Finding(
        FaultClass.PROGRAM_ERROR, (1,), "rank 1 raised ValueError: loss is nan at train.py:61 in step", 0.99,
        nodes=("node00",), callsite="train.py:61 in step",
    )  # fmt: skip
    case = Case(
        Evidence("r1", 2, 2, "exit", NOW_MONO_S, ranks, SCRIPT), (), unix_minus_mono_s={"node00": START_S - NOW_MONO_S}
    )
    return Report(case, (finding,), (0,), (), head=(("attempt", "2"),), decision="the job stops")


def healthy() -> Report:
    finding = Finding(FaultClass.HEALTHY, (), "nothing is in flight on any of 2 ranks", 0.9)
    judgement = FlightJudgement((FlightFinding(finding),), coverage=1.0, is_healthy=True)
    return Report(Case(Evidence("", 0, 2, "hang", 0.0, ()), ()), (finding,), (), (), judgement)


def hostile(text: str) -> Report:
    """Every text that comes from ranks or files is *text*; times and ranks are absurd."""
    site = text
    group = FlightGroup(text, text, (0, 1), text, 0, 5, 4, -1, 1 << 70)
    ops = (
        FlightOp(0, 5, text, created_ns=1 << 80, site=site, frames=(text, text)),
        FlightOp(7, 1 << 60, text, created_ns=-5, site=site),
    )
    flight = RankFlight(
        0, (group,), ops, recorders=(text,), version=text, exception=text, taken_at_unix_s=1e300, problems=(text,)
    )
    odd = RankEvidence(
        0, 0, text, 1, 0, sections=(OpenSection(text, -1e12),), flight=flight, gpu=text,
        stacks=(ThreadStack(text, (Frame(text, 1, text),)),), log_tail=(text,), missing=(text,),
        exception=ExceptionRecord(text, text, text, (Frame(text, -1, text),), None, 1e200),
        exit=ExitRecord(None, 999, 1e300), process=ProcessFacts(text, text, 1, 1.0, 1),
    )  # fmt: skip
    finding = Finding(
        FaultClass.HOST_STALL, (0,), text, 7.5, nodes=(text,), gpus=(text,), section=text, group=text, seq=5, op=text,
        callsite=text, since_unix_s=1e300,
    )  # fmt: skip
    wait = Wait((1, 2), (0, 1), WaitReason.QUEUED_BEHIND, text, text, 5, text, text, -1e300)
    judgement = FlightJudgement(
        (FlightFinding(finding, 3, (((0,), text), ((1,), text))),), (wait, wait), coverage=9.0, heads={0: 99, 1: -4},
        unknown=(3,), missing=(text,),
    )  # fmt: skip
    moments = (
        Moment(START_S, "log", text, 0, text),
        Moment(1e300, text, text),
        Moment(START_S, text, text, None, text),
    )
    inputs = tuple(Input(Path(f"x{text}"), 0, status, text, -5) for status in InputStatus)
    case = Case(Evidence(text, 0, 4, "hang", -1e300, (odd,), text, (text,)), inputs, None, moments, {text: 1e300}, text)
    return Report(case, (finding, finding), (1, 2), (text,), judgement, text, ((text, text),), text)
