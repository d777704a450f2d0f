"""Root causes from flight records that are made by hand: one line per rank and operation."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from steadyrun.core.classes import FaultClass
from steadyrun.core.flight import FlightGroup, FlightOp, FlowCount, GroupStatus, OpState, RankFlight, window_hash
from steadyrun.detect.waits import judge_flights
from steadyrun.detect.waits.records import FlightJudgement, RankState, WaitReason

T0 = 1_795_966_537_000_000_000
SURE = 0.7


class Job:
    """Ranks that call things; *groups*: name to (desc, ranks, backend)."""

    def __init__(self, world: int, groups: Mapping[str, tuple[str, Sequence[int], str]] | None = None) -> None:
        self.world = world
        self.groups = {"0": ("default_pg", tuple(range(world)), "nccl")}
        self.groups.update({n: (d, tuple(r), b) for n, (d, r, b) in (groups or {}).items()})
        self.done = dict.fromkeys(range(world), 3)
        self.names = {r: [n for n, (_, ranks, _) in self.groups.items() if r in ranks] for r in range(world)}
        self.ops: dict[int, list[FlightOp]] = {r: [] for r in range(world)}
        self.flows: dict[tuple[int, str], list[FlowCount]] = {}
        self.windows: dict[tuple[int, str], tuple[tuple[int, int], ...]] = {}
        self.done_at: dict[tuple[int, str], int] = {}
        self.changes: dict[int, dict[str, object]] = {}
        self.without_members: set[str] = set()

    def call(
        self, ranks: Sequence[int], group: str = "0", seq: int = 4, name: str = "all_reduce",
        size: int = 8, dtype: str = "Float", state: OpState = OpState.ISSUED, site: str | None = "train.py:88 in step",
        src: int | None = None, dst: int | None = None, thread: str = "",
    ) -> Job:  # fmt: skip
        for rank in ranks:
            at_ns = T0 + 1000 * len(self.ops[rank])
            self.ops[rank].append(
                FlightOp(self.names[rank].index(group), seq, name, state, src is not None, ((size,),), ((size,),),
                         (dtype,), (dtype,), src, dst, at_ns, site=site, thread=thread)
            )  # fmt: skip
        return self

    def flights(self) -> dict[int, RankFlight]:
        out = {}
        for rank in range(self.world):
            groups = []
            for i, name in enumerate(self.names[rank]):
                desc, members, backend = self.groups[name]
                done = self.done_at.get((rank, name), 3)
                called = [op.seq for op in self.ops[rank] if op.group == i and not op.is_p2p]
                groups.append(
                    FlightGroup(name, desc, () if name in self.without_members else members, backend, 1,
                                max([done, *called]), done, windows=self.windows.get((rank, name), ()),
                                flows=tuple(self.flows.get((rank, name), ())))
                )  # fmt: skip
            flight = RankFlight(rank, tuple(groups), tuple(self.ops[rank]), recorders=("nccl",), entries=20)
            out[rank] = replace(flight, **self.changes.get(rank, {}))  # type: ignore[arg-type]
        return out

    def judge(self, gone: Sequence[int] = (), **options: object) -> FlightJudgement:
        flights = {r: f for r, f in self.flights().items() if r not in gone}
        return judge_flights(flights, self.world, **options)  # type: ignore[arg-type]


def told(judgement: FlightJudgement) -> list[tuple[str, tuple[int, ...]]]:
    return [(f.finding.cls.value, f.finding.ranks) for f in judgement.findings]


def mesh() -> dict[str, tuple[str, Sequence[int], str]]:
    """Two by four: tensor parallel groups of four, data parallel ones of two."""
    groups: dict[str, tuple[str, Sequence[int], str]] = {
        "1": ("mesh_tp", range(4), "nccl"),
        "2": ("mesh_tp", range(4, 8), "nccl"),
    }
    groups.update({str(3 + t): ("mesh_dp", (t, 4 + t), "nccl") for t in range(4)})
    return groups


# -- who is missing ----------------------------------------------------------------------------------------------------
def test_a_rank_outside_of_everything_that_others_wait_for_is_a_host_stall() -> None:
    judgement = Job(4).call((0, 1, 3)).judge()
    finding = judgement.findings[0].finding
    assert told(judgement) == [("host_stall", (2,))]
    assert finding.confidence >= SURE
    assert (finding.group, finding.seq, finding.op, finding.callsite) == (
        "default_pg", 4, "all_reduce", "train.py:88 in step",
    )  # fmt: skip
    assert "rank 2 has not called all_reduce number 4 of default_pg (ranks 0-3)" in finding.summary
    assert "3 ranks wait since" in finding.summary
    assert judgement.victims == (0, 1, 3)
    assert judgement.idle == (2,)
    assert judgement.findings[0].waiters == 3


def test_the_end_of_a_chain_of_waits_is_to_blame_alone() -> None:
    groups = {"1": ("a", (0, 1), "nccl"), "2": ("b", (1, 2), "nccl"), "3": ("c", (2, 3), "nccl")}
    judgement = Job(4, groups).call((2,), "3").call((1,), "2").call((0,), "1").judge()
    assert told(judgement) == [("host_stall", (3,))]
    assert judgement.findings[0].waiters == 3
    assert judgement.waits[0].on == (3,)
    assert judgement.waits[0].reason is WaitReason.NOT_ISSUED
    assert {judgement.waits[i].waiters for i in judgement.heads.values()} == {(0,), (1,), (2,)}


def test_two_stalls_in_different_groups_are_told_apart() -> None:
    judgement = Job(8, mesh()).call((0, 1, 2), "1").call((4, 5, 6), "2").judge()
    assert sorted(told(judgement)) == [("host_stall", (3,)), ("host_stall", (7,))]


def test_a_dead_rank_without_a_dump_is_named_for_certain_only_where_the_agent_saw_it() -> None:
    job = Job(3).call((0, 2))
    guessed, known = job.judge(gone=(1,)), job.judge(gone=(1,), states={1: RankState.DEAD})
    stopped = job.judge(gone=(1,), states={1: RankState.STOPPED})
    assert told(guessed) == told(known) == [("dead_process", (1,))]
    assert told(stopped) == [("stopped_process", (1,))]
    assert guessed.findings[0].finding.confidence < SURE <= known.findings[0].finding.confidence
    assert not guessed.findings[0].is_hard
    assert guessed.unknown == (1,)
    assert guessed.coverage == pytest.approx(2 / 3)


def test_a_lost_dump_is_not_blamed_where_a_stall_explains_the_wait() -> None:
    judgement = Job(4).call((0, 3)).judge(gone=(2,))
    assert told(judgement) == [("host_stall", (1,))]
    assert any("rank 2" in m for m in judgement.missing)


def test_a_cut_dump_does_not_prove_that_nothing_was_called() -> None:
    job = Job(3).call((0,))
    job.changes[2] = {"is_cut": True}
    judgement = job.judge()
    assert told(judgement)[0] == ("host_stall", (1,))
    assert all(2 not in f.finding.ranks or f.finding.confidence < SURE for f in judgement.findings)
    assert any("cut" in m for m in judgement.missing)


def test_a_rank_that_ended_well_made_fewer_calls() -> None:
    judgement = Job(3).call((0, 2)).judge(states={1: RankState.FINISHED})
    assert told(judgement) == [("skipped_collective", (1,))]


def test_few_that_wait_for_many_idle_ones_called_one_too_many() -> None:
    judgement = Job(5).call((0,)).judge()
    assert told(judgement)[0] == ("extra_collective", (0,))
    assert all(f.finding.confidence < SURE for f in judgement.findings)


def test_ranks_that_have_only_just_come_are_not_sure_to_hang() -> None:
    job = Job(3).call((0, 2))
    job.changes.update({r: {"taken_at_unix_s": T0 / 1e9 + 0.01} for r in range(3)})
    assert all(f.finding.confidence < SURE for f in job.judge().findings)
    job.changes.update({r: {"taken_at_unix_s": T0 / 1e9 + 60} for r in range(3)})
    assert job.judge().findings[0].finding.confidence >= SURE


def test_a_side_thread_in_an_operation_does_not_hide_that_the_main_one_stands() -> None:
    groups = {"1": ("save", (0, 1, 2), "gloo")}
    job = Job(3, groups).call((0, 1, 2), "1", name="barrier", thread="writer").call((0, 2), thread="python")
    assert ("host_stall", (1,)) in told(job.judge())


# -- devices and networks ----------------------------------------------------------------------------------------------
def test_what_is_done_on_the_others_stalls_on_this_device() -> None:
    job = Job(4).call((1,)).call((0, 2, 3), seq=5)
    job.done_at.update({(r, "0"): 4 for r in (0, 2, 3)})
    judgement = job.judge()
    assert told(judgement) == [("device_stall", (1,))]
    assert "is done on ranks 0, 2 and 3 and not on rank 1" in judgement.findings[0].finding.summary


def test_the_end_of_a_broadcast_on_its_source_proves_nothing_about_who_still_waits() -> None:
    job = Job(3).call((1, 2), name="broadcast")
    job.done_at[(0, "0")] = 4
    assert all(f.finding.cls is not FaultClass.DEVICE_STALL for f in job.judge().findings)


def test_where_starts_are_recorded_the_device_that_has_not_started_is_named() -> None:
    job = Job(4).call((0, 1, 3), state=OpState.STARTED).call((2,))
    assert told(job.judge()) == [("device_stall", (2,))]


def test_what_all_have_called_and_does_not_end_is_in_flight() -> None:
    judgement = Job(8, mesh()).call(range(4), "1").call(range(4, 8)).judge()
    assert told(judgement)[0] == ("in_flight_network", (0, 1, 2, 3))
    assert judgement.findings[0].finding.group == "mesh_tp (1)"
    assert all(f.finding.confidence < SURE for f in judgement.findings)


def test_a_groups_first_operation_that_never_ends_is_a_start_up() -> None:
    job = Job(2).call((0, 1), seq=1)
    job.done_at.update({(0, "0"): 0, (1, "0"): 0})
    assert told(job.judge()) == [("start_up", (0, 1))]


# -- calls that differ -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "cls"),
    [
        ({"name": "broadcast"}, "op_mismatch"),
        ({"size": 16}, "size_mismatch"),
        ({"dtype": "Double"}, "dtype_mismatch"),
    ],
)
def test_a_minority_that_calls_something_else_is_named(change: dict[str, object], cls: str) -> None:
    judgement = Job(3).call((0, 2)).call((1,), **change).judge()  # type: ignore[arg-type]
    assert told(judgement) == [(cls, (1,))]
    assert judgement.findings[0].finding.confidence >= SURE
    assert judgement.findings[0].differences[0][0] == (0, 2)
    assert any(w.reason is WaitReason.DIFFERS and w.on == (1,) for w in judgement.waits)


def test_two_that_differ_are_both_named_and_not_for_certain() -> None:
    judgement = Job(2).call((0,)).call((1,), size=16).judge()
    assert told(judgement) == [("size_mismatch", (0, 1))]
    assert judgement.findings[0].finding.confidence < SURE


def test_of_two_that_differ_the_one_unlike_groups_of_its_kind_is_named() -> None:
    job = Job(4, {"1": ("tp", (0, 1), "nccl"), "2": ("tp", (2, 3), "nccl")})
    job.call((0,), "1").call((1,), "1", size=16).call((2,), "2")
    assert ("size_mismatch", (1,)) in told(job.judge())


def test_two_ways_of_differing_at_once_are_two_findings() -> None:
    judgement = Job(5).call((0, 1, 2)).call((3,), name="broadcast").call((4,), size=16).judge()
    assert sorted(told(judgement)) == [("op_mismatch", (3,)), ("size_mismatch", (4,))]


@pytest.mark.parametrize("name", ["all_to_all", "all_gather", "gather_into", "barrier", "reduce_scatter"])
def test_sizes_that_may_differ_are_no_mismatch(name: str) -> None:
    job = Job(3)
    for rank in range(3):
        job.call((rank,), name=name, size=8 + rank)
    if name == "all_gather":
        job.ops = {r: [replace(op, out_sizes=((27,),)) for op in ops] for r, ops in job.ops.items()}
    assert not any("mismatch" in cls for cls, _ in told(job.judge()))


# -- rings -------------------------------------------------------------------------------------------------------------
def test_two_groups_called_the_other_way_round_are_a_deadlock_of_both() -> None:
    job = Job(2, {"1": ("A", (0, 1), "nccl"), "2": ("B", (0, 1), "nccl")}).call((0,), "1").call((1,), "2")
    judgement = job.judge()
    assert told(judgement) == [("deadlock_cycle", (0, 1))]
    assert judgement.findings[0].finding.confidence < SURE
    assert "rank 0 waits in all_reduce number 4 of A" in judgement.findings[0].finding.summary


def test_backends_are_one_graph() -> None:
    job = Job(2, {"1": ("A", (0, 1), "nccl"), "2": ("side", (0, 1), "gloo")})
    assert told(job.call((0,), "1").call((1,), "2").judge()) == [("deadlock_cycle", (0, 1))]


def test_the_one_out_of_order_is_named_where_the_others_agree() -> None:
    job = Job(4, {"1": ("A", range(4), "nccl"), "2": ("B", range(4), "nccl")})
    job.call((0, 1, 3), "1").call((0, 1, 3), "2").call((2,), "2").call((2,), "1")
    judgement = job.judge()
    assert told(judgement)[0] == ("deadlock_cycle", (2,))
    assert judgement.findings[0].finding.confidence >= SURE


def test_a_send_that_nobody_receives_is_unmatched() -> None:
    groups = {"1": ("mesh_pp", (0, 1), "nccl")}
    job = Job(2, groups).call((0,), "1", name="send", seq=5, src=0, dst=1).call((1,))
    job.flows = {(0, "1"): [FlowCount(0, 1, 6, 5)], (1, "1"): [FlowCount(0, 1, 5, 5)]}
    judgement = job.judge()
    assert judgement.findings[0].finding.cls is FaultClass.P2P_UNMATCHED
    assert judgement.findings[0].finding.ranks == (0, 1)


def test_a_receive_whose_sender_does_nothing_is_the_senders_stall() -> None:
    job = Job(2, {"1": ("mesh_pp", (0, 1), "nccl")}).call((1,), "1", name="recv", seq=5, src=0, dst=1)
    assert told(job.judge()) == [("host_stall", (0,))]


# -- shifted calls -----------------------------------------------------------------------------------------------------
class Entries:
    """Details: what each rank called in group 1, as call sites by number from 1 on."""

    def __init__(self, sites: Mapping[int, Sequence[str]]) -> None:
        self.sites = sites

    def ops(self, rank: int, group: str, first_seq: int, last_seq: int) -> Sequence[FlightOp]:
        if group != "1" or rank not in self.sites:
            return []
        return [
            FlightOp(0, i, "all_reduce", OpState.DONE, in_sizes=((8,),), in_dtypes=("Float",), site=site)
            for i, site in enumerate(self.sites[rank], 1)
            if first_seq <= i <= last_seq
        ]

    def course(self, rank: int, last: int) -> Sequence[FlightOp]:
        return ()


def shifted(skips: bool) -> tuple[Job, Entries]:
    """Rank 2 of four skips the third collective of group 1, or calls one more; all meet in the world's next."""
    course = [f"train.py:{line} in step" for line in (10, 20, 30, 40, 50, 60)]
    own = course[:2] + course[3:] if skips else [*course[:2], "train.py:99 in debug", *course[2:]]
    job = Job(4, {"1": ("mesh_tp", range(4), "nccl")})
    others = (0, 1, 3)
    if skips:
        job.done_at = {(r, "1"): 5 for r in range(4)}
        job.call(others, "1", seq=6, site=course[-1]).call((2,), "0")
    else:
        job.done_at = {(r, "1"): 6 for r in range(4)}
        job.call(others, "0").call((2,), "1", seq=7, site=own[-1])
    return job, Entries({r: own if r == 2 else course for r in range(4)})


@pytest.mark.parametrize(("skips", "cls"), [(True, "skipped_collective"), (False, "extra_collective")])
def test_call_sites_tell_where_the_calls_began_to_be_shifted(skips: bool, cls: str) -> None:
    job, entries = shifted(skips)
    judgement = job.judge(details=entries)
    finding = judgement.findings[0].finding
    assert told(judgement) == [(cls, (2,))]
    assert (finding.seq, finding.group) == (3, "mesh_tp")
    assert finding.callsite == (
        "train.py:30 in step" if skips else "train.py:99 in debug"
    )  # what was skipped, or added


def test_without_single_entries_the_window_is_said() -> None:
    job, _ = shifted(True)
    same, other = window_hash([("a", "x")]), window_hash([("b", "y")])
    for rank in range(4):
        job.windows[(rank, "1")] = ((0, same), (1, other if rank == 2 else same))
    finding = job.judge().findings[0].finding
    assert (finding.cls, finding.ranks) == (FaultClass.SKIPPED_COLLECTIVE, (2,))
    assert finding.confidence < SURE
    assert "between number 16 and 31" in finding.summary


def test_ranks_whose_windows_always_differ_have_not_left_a_course() -> None:
    job = Job(3).call((0, 2))
    for rank in range(3):
        job.windows[(rank, "0")] = tuple((w, rank) for w in range(2, 6))
    assert told(job.judge()) == [("host_stall", (1,))]


# -- records that say little -------------------------------------------------------------------------------------------
def test_nothing_in_flight_on_any_rank_is_healthy() -> None:
    judgement = Job(3).judge()
    assert judgement.is_healthy
    assert told(judgement) == [("healthy", ())]
    assert not Job(3).judge(gone=(1,)).is_healthy


def test_a_recorder_that_was_off_is_said() -> None:
    job = Job(2)
    job.changes.update({r: {"is_off": True} for r in range(2)})
    judgement = job.judge()
    assert told(judgement) == [("insufficient_data", ())]
    assert "TORCH_FR_BUFFER_SIZE" in judgement.findings[0].finding.summary


def test_no_flights_at_all_is_insufficient() -> None:
    assert told(judge_flights({}, 0)) == [("insufficient_data", ())]
    assert told(judge_flights({}, 4)) == [("insufficient_data", ())]


def test_active_dumps_are_completed_by_torchs_counters() -> None:
    """Two ranks of a real job had no active entry at all; counters and the order of groups tell that they lag."""
    job = Job(4, {"33": ("mesh_tp", range(4), "nccl")}).call((0, 1, 3), "33", seq=88)
    for rank in range(4):
        groups = tuple(replace(g, issued_seq=None, done_seq=None, first_seq=None) for g in job.flights()[rank].groups)
        enqueued = 87 if rank == 2 else 88
        status = (GroupStatus(0, 3, -1, 3), GroupStatus(5, enqueued, -1, 87))
        job.changes[rank] = {"is_active_only": True, "groups": groups, "status": status}
    judgement = job.judge()
    assert told(judgement) == [("host_stall", (2,))]
    job.changes[2]["status"] = (GroupStatus(0, 3, -1, 3), GroupStatus(5, 88, -1, 88))
    job.changes[2]["ops"] = ()
    assert all(2 not in f.finding.ranks for f in job.judge().findings)  # it has called it, and it is done there


def test_members_that_nobody_names_are_looked_for_among_the_idle() -> None:
    job = Job(3, {"1": ("G", (0, 1), "gloo")})
    job.without_members = {"1"}
    job.call((0,), "1")
    job.names[1] = ["0"]
    judgement = job.judge()
    assert all(f.finding.confidence < SURE for f in judgement.findings)
    assert any("no dump says which ranks are in G" in m for m in judgement.missing)


def test_groups_of_one_name_and_other_members_are_apart() -> None:
    job = Job(4, {"1": ("split", (0, 1), "nccl")})
    flights = job.call((0,), "1").flights()
    flights[2] = replace(flights[2], groups=(*flights[2].groups, FlightGroup("1", "split", (2, 3), "nccl", 1, 9, 9)))
    flights[3] = replace(flights[3], groups=(*flights[3].groups, FlightGroup("1", "split", (2, 3), "nccl", 1, 9, 9)))
    assert told(judge_flights(flights, 4)) == [("host_stall", (1,))]


def test_silence_in_logs_is_not_death() -> None:
    job = Job(4).call((1, 2, 3))
    job.changes.update({r: {"recorders": ("log",)} for r in range(4)})
    judgement = job.judge(gone=(0,))
    assert told(judgement) == [("host_stall", (0,))]
    assert judgement.findings[0].finding.confidence < SURE


def test_an_operation_that_failed_points_at_who_is_gone() -> None:
    job = Job(3, {"1": ("side", range(3), "gloo")}).call((0, 2), "1", state=OpState.FAILED)
    assert told(job.judge(gone=(1,))) == [("dead_process", (1,))]
    differing = Job(3, {"1": ("side", range(3), "gloo")})
    differing.call((0,), "1", state=OpState.FAILED).call((2,), "1", state=OpState.FAILED, dtype="Double")
    assert told(differing.judge(gone=(1,))) == [("dtype_mismatch", (0, 2)), ("dead_process", (1,))]


# -- anything goes in --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(60))
def test_records_that_make_no_sense_are_judged_without_an_error(seed: int) -> None:
    rng = random.Random(seed)
    world = rng.randint(1, 9)
    flights = {r: _nonsense(rng, r, world) for r in range(world) if rng.random() < 0.85}
    states = {r: rng.choice(list(RankState)) for r in range(world) if rng.random() < 0.3}
    judgement = judge_flights(flights, rng.choice([0, world, world + 2]), states)
    assert judgement.findings
    assert all(0 <= f.finding.confidence <= 1 and f.finding.summary for f in judgement.findings)
    assert all(0 <= i < len(judgement.waits) for i in judgement.heads.values())
    assert judge_flights(flights, world, states) == judge_flights(dict(reversed(flights.items())), world, states)


def _nonsense(rng: random.Random, rank: int, world: int) -> RankFlight:
    def maybe(low: int, high: int) -> int | None:
        return rng.randint(low, high) if rng.random() < 0.7 else None

    groups = tuple(
        FlightGroup(
            rng.choice(["", "0", "1", "x"]),
            rng.choice(["", "undefined", "default_pg", "tp"]),
            tuple(sorted(rng.sample(range(world + 1), rng.randint(0, world)))),
            rng.choice(["", "nccl", "gloo"]),
            maybe(0, 9),
            maybe(-1, 9),
            maybe(-1, 9),
            windows=tuple((w, rng.randint(0, 1)) for w in range(rng.randint(0, 3))),
            flows=tuple(FlowCount(rng.randint(0, 3), rng.randint(0, 3), 3, 2, rng.random() < 0.5) for _ in range(2)),
            has_failed=rng.random() < 0.1,
        )
        for _ in range(rng.randint(1, 4))
    )
    ops = tuple(
        FlightOp(
            rng.randrange(len(groups)),
            rng.randint(-1, 9),
            rng.choice(["all_reduce", "send", "recv", "broadcast", "coalesced", ""]),
            rng.choice(list(OpState)),
            rng.random() < 0.3,
            ((rng.randint(0, 2),),) * rng.randint(0, 2),
            src=maybe(-1, world),
            dst=maybe(-1, world),
            created_ns=maybe(0, 1 << 62),
            thread=rng.choice(["", "python", "writer"]),
            site=rng.choice([None, "a:1 in f", "b:2 in g"]),
        )
        for _ in range(rng.randint(0, 6))
    )
    status = tuple(GroupStatus(i, rng.randint(-1, 9), -1, -1) for i in range(rng.randint(0, 4)))
    return RankFlight(
        rank,
        groups,
        ops,
        more_ops=rng.choice([0, 0, 5]),
        status=status,
        is_active_only=rng.random() < 0.4,
        is_off=rng.random() < 0.1,
        is_cut=rng.random() < 0.1,
        has_timing=rng.random() < 0.5,
        taken_at_unix_s=rng.choice([None, T0 / 1e9]),
    )
