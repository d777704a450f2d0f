"""What remains of a rank's dumps: bounds, what is open, flows and hashes; of all formats and recorders."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flight_dumps import EPOCH_NS, TORCH, dump, entry, frames, pending
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.collectors.flight.normal import integer, parse_op_name, ranks_in_order
from steadyrun.collectors.flight.sidecar import DumpFile, LiveGroup, Sidecar
from steadyrun.collectors.flight.summarise import read_ops, summarise
from steadyrun.collectors.flight.unpickle import Dump
from steadyrun.core.flight import (
    MAX_OPS,
    FlightGroup,
    FlowCount,
    GroupStatus,
    OpState,
    RankFlight,
    flight_from_json,
    flight_to_json,
    window_hash,
)

SITE = "train.py:88 in step"


def gloo(seq: int, record_id: int | None = None, **changes: Any) -> dict[str, Any]:
    """gloo's states never change: retired tells the end."""
    still = {"state": "scheduled", "time_discovered_completed_ns": None}
    return entry(seq, record_id, "gloo:all_reduce", **{**still, **changes})


def summary(*dumps: Any, rank: int = 0, sidecar: Sidecar | None = None) -> RankFlight:
    return summarise([d if isinstance(d, tuple) else (d, None) for d in dumps], rank, sidecar)


def group(flight: RankFlight, name: str = "0", backend: str | None = None) -> FlightGroup:
    return next(g for g in flight.groups if g.name == name and backend in (None, g.backend))


def test_a_rank_that_stands_in_its_third_all_reduce() -> None:
    flight = summary(dump([entry(1), entry(2), pending(3)]))
    assert flight.groups == (
        FlightGroup(
            name="0", desc="default_pg", ranks=(0, 1), backend="nccl", first_seq=1, issued_seq=3, done_seq=2,
            last_issued_ns=EPOCH_NS + 2_000_000, last_done_ns=EPOCH_NS + 1_500_000,
        ),
    )  # fmt: skip
    (op,) = flight.ops
    assert (op.group, op.seq, op.name, op.state) == (0, 3, "all_reduce", OpState.ISSUED)
    assert (op.in_sizes, op.out_dtypes, op.timeout_s) == (((8, 4),), ("Float",), 600.0)
    assert op.site == SITE
    assert op.frames == (SITE, "train.py:120 in <module>")
    assert flight.status == (GroupStatus(0, 3, -1, 3),)
    assert flight.pg_ids == ((0, 0),)
    assert flight.recorders == ("nccl",)
    assert (flight.entries, flight.version) == (3, "2.10")
    assert flight.has_frames
    assert not flight.is_active_only
    assert not flight.is_off


def test_a_summary_survives_json_and_stays_small() -> None:
    flight = summary(dump([entry(seq) for seq in range(1, 1970)] + [pending(seq) for seq in range(1970, 2001)]))
    text = json.dumps(flight_to_json(flight))
    assert flight_from_json(json.loads(text)) == flight
    assert len(text) < 16_000


def test_states_of_nccl_with_timing() -> None:
    flight = summary(dump([entry(1), pending(2, state="started", time_discovered_started_ns=EPOCH_NS), pending(3)]))
    assert [op.state for op in flight.ops] == [OpState.STARTED, OpState.ISSUED]
    assert flight.ops[0].started_ns == EPOCH_NS
    assert flight.has_timing


def test_nccl_work_that_is_retired_but_not_completed_has_failed() -> None:
    flight = summary(dump([entry(1), pending(2, retired=True)]))
    assert flight.ops[0].state is OpState.FAILED
    assert group(flight).has_failed
    assert group(flight).done_seq == 1


def test_gloo_work_is_done_when_it_is_retired() -> None:
    flight = summary(dump([gloo(1), gloo(2), gloo(3, retired=False)]))
    assert (group(flight).done_seq, [op.seq for op in flight.ops]) == (2, [3])
    assert not flight.is_active_only


def test_a_backend_unknown_to_us_is_judged_by_whether_its_states_change() -> None:
    changing = dump([entry(1, name="nccl2:all_reduce"), pending(2, name="nccl2:all_reduce", retired=True)])
    assert group(summary(changing)).has_failed
    constant = dump([gloo(seq, profiling_name="ucc:all_reduce") for seq in (1, 2)])
    assert group(summary(constant)).done_seq == 2


def test_what_gloo_did_last_before_its_error_has_failed() -> None:
    sidecar = Sidecar(rank=0, exception="RuntimeError: [third_party/gloo/pair.cc:537] Connection reset by peer")
    flight = summary(dump([gloo(1), gloo(2)]), sidecar=sidecar)
    assert [(op.seq, op.state) for op in flight.ops] == [(2, OpState.FAILED)]
    assert group(flight).done_seq == 1
    assert group(flight).has_failed
    assert "reset by peer" in flight.exception
    other = summary(dump([gloo(1), gloo(2)]), sidecar=Sidecar(rank=0, exception="KeyError: 'x'"))
    assert (other.ops, other.exception) == ((), "")


def test_two_recorders_are_merged_by_time_and_keep_their_groups_apart() -> None:
    nccl = dump([entry(1, 0), pending(2, 3)])
    side = dump([gloo(1, 1), gloo(2, 2, retired=False)], comm_lib_version="", pg_config={"": {"ranks": "[]"}})
    flight = summary(nccl, side, sidecar=Sidecar(rank=0, groups=(LiveGroup("0", "default_pg", (0, 1), "cpu:gloo"),)))
    assert [flight.groups[op.group].backend for op in flight.ops] == ["gloo", "nccl"]
    assert flight.recorders == ("nccl", "gloo")
    assert group(flight, backend="gloo").ranks == (0, 1)
    assert flight.entries == 4


def test_a_clock_that_was_set_back_does_not_change_the_order() -> None:
    flight = summary(dump([pending(1, 0), pending(2, 1, time_created_ns=EPOCH_NS - 10**12), pending(3, 2)]))
    assert [op.seq for op in flight.ops] == [1, 2, 3]


def test_members_of_a_group_come_from_the_sidecar_by_name_else_by_description() -> None:
    bare = dump([gloo(1, process_group=("7", "mesh_tp")), gloo(1, 1, process_group=("8", "mesh_dp"))], pg_config={})
    groups = (LiveGroup("7", "renamed", (2, 3), "gloo"), LiveGroup("x", "mesh_dp", (0, 2), "gloo"))
    flight = summary(bare, rank=2, sidecar=Sidecar(rank=2, groups=groups))
    assert group(flight, "7").ranks == (2, 3)
    assert group(flight, "8").ranks == (0, 2)
    assert group(flight, "x").ranks == (0, 2)
    assert group(summary(bare), "7").ranks == ()


def test_groups_without_operations_are_there_too() -> None:
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"},
        "3": {"name": "3", "desc": "mesh_pp", "ranks": ["1", 0]},
    }
    flight = summary(dump([entry(1)], pg_config=config))
    assert group(flight, "3") == FlightGroup(name="3", desc="mesh_pp", ranks=(0, 1), backend="nccl")


def send(number: int, direction: str = "send 0->1", done: bool = True, **changes: Any) -> dict[str, Any]:
    make = entry if done else pending
    fields = {"is_p2p": True, "p2p_seq_id": number, "collective_seq_id": 0, "process_group": ("5", "mesh_pp")}
    record_id = changes.pop("record_id", number - 1)
    return make(1, record_id, f"nccl:{direction}", **{**fields, **changes})


def test_sends_and_receives_are_counted_per_direction_in_global_ranks() -> None:
    config = {"5": {"name": "5", "desc": "mesh_pp", "ranks": "[4, 12]"}}
    flight = summary(
        dump([send(1), send(2, "recv 0<-1"), send(3), send(4, done=False), send(5, "recv 0<-1", done=False)],
             pg_config=config),
        rank=4,
    )  # fmt: skip
    assert set(group(flight, "5").flows) == {FlowCount(4, 12, 3, 2), FlowCount(12, 4, 2, 1)}
    assert [(op.name, op.src, op.dst, op.seq) for op in flight.ops] == [("send", 4, 12, 2), ("recv", 12, 4, 1)]
    assert group(flight, "5").issued_seq is None


def test_counts_of_a_ring_that_wrapped_are_not_exact() -> None:
    config = {"5": {"name": "5", "desc": "mesh_pp", "ranks": "[4, 12]"}}
    flight = summary(dump([send(8), send(9)], pg_config=config), rank=4)
    assert group(flight, "5").flows == (FlowCount(4, 12, 2, 2, is_exact=False),)


def test_a_coalesced_call_gives_its_end_to_its_members() -> None:
    config = {"5": {"name": "5", "desc": "mesh_pp", "ranks": "[4, 12]"}}
    batch = [
        send(1, done=False, record_id=0),
        send(1, "recv 0<-1", done=False, record_id=1),
        send(1, "coalesced", record_id=2),
        send(2, done=False, record_id=3),
        send(2, "coalesced", done=False, record_id=4, state="started"),
    ]
    flight = summary(dump(batch, pg_config=config), rank=4)
    assert [(op.name, op.seq, op.state) for op in flight.ops] == [("send", 1, OpState.STARTED)]
    assert set(group(flight, "5").flows) == {FlowCount(4, 12, 2, 1), FlowCount(12, 4, 1, 1)}


def test_coalesced_collectives_are_one_operation() -> None:
    flight = summary(
        dump(
            [entry(1), pending(2, 1), pending(2, 2, input_sizes=[[3]]), pending(2, 3, "nccl:coalesced", input_sizes=[])]
        )
    )
    (op,) = flight.ops
    assert (op.name, op.in_sizes) == ("all_reduce", ((8, 4), (3,)))


def test_windows_are_hashed_when_the_ring_holds_all_of_them() -> None:
    def sites(count: int) -> list[tuple[str, str]]:
        return [("all_reduce", SITE)] * count

    first = summary(dump([entry(seq) for seq in range(1, 36)]))
    assert group(first).windows == ((0, window_hash(sites(15))), (1, window_hash(sites(16))))
    wrapped = summary(dump([entry(seq) for seq in range(10, 50)]))
    assert [w for w, _ in group(wrapped).windows] == [1, 2]
    changed = summary(dump([entry(seq) for seq in range(1, 20)] + [entry(20, name="nccl:broadcast")]
                           + [entry(seq) for seq in range(21, 40)]))  # fmt: skip
    assert group(changed).windows[0] == group(first).windows[0]
    assert group(changed).windows[1] != group(first).windows[1]


def test_the_oldest_of_each_group_are_kept() -> None:
    many = [pending(seq, seq) for seq in range(1, 201)]
    other = [pending(seq, 200 + seq, process_group=("9", "late"), pg_id=1) for seq in (1, 2)]
    flight = summary(dump(many + other))
    assert len(flight.ops) == MAX_OPS
    assert flight.more_ops == 202 - MAX_OPS
    assert [op.seq for op in flight.ops if flight.groups[op.group].name == "9"] == [1, 2]
    assert [op.seq for op in flight.ops][:3] == [1, 2, 3]


@pytest.mark.parametrize(
    ("stack", "site"),
    [
        ([("/home/u/train.py", 5, "step")], "train.py:5 in step"),
        ([("/x/site-packages/megatron/layers.py", 7, "f"), ("/home/u/train.py", 5, "step")], "train.py:5 in step"),
        ([("/x/site-packages/megatron/layers.py", 7, "f")], "layers.py:7 in f"),
        ([("/x/site-packages/torch/nn/parallel/distributed.py", 9, "g")], "distributed.py:9 in g"),
        ([("/x/site-packages/nemo/__init__.py", 7, "f")], "nemo/__init__.py:7 in f"),
        ([], "distributed_c10d.py:3245 in all_reduce"),
    ],
)
def test_the_call_site_is_the_innermost_that_tells_most(stack: list[tuple[str, int, str]], site: str) -> None:
    assert summary(dump([pending(1, frames=frames(*stack))])).ops[0].site == site


def test_threads_of_one_name_are_told_apart() -> None:
    flight = summary(dump([pending(1), pending(2, thread_id="7"), pending(3, thread_name="pt_autograd_0")]))
    assert [op.thread for op in flight.ops] == ["python", "python#2", "pt_autograd_0"]


def test_a_dump_of_active_entries_only() -> None:
    active = dump([pending(88, 5000), pending(89, 5001)])
    flight = summary(active)
    assert flight.is_active_only
    assert group(flight).done_seq == 87
    nothing = summary(Dump({"version": "2.10", "pg_status": active["pg_status"], "pg_config": {}}, is_json=True))
    assert nothing.is_active_only
    assert not nothing.is_off
    said = DumpFile("f", "nccl", "active", 17.5)
    assert summary((dump([pending(1, 0)]), said)).is_active_only
    assert summary((dump([pending(1, 0)]), said)).taken_at_unix_s == 17.5


def test_a_recorder_that_was_off() -> None:
    off = {"version": "2.10", "pg_config": {}, "pg_status": {}, "comm_lib_version": "", "entries": []}
    flight = summary(Dump(off))
    assert flight.is_off
    assert "TORCH_FR_BUFFER_SIZE" in flight.problems[0]
    assert not summary(Dump({**off, "pg_config": {"0": {"name": "0", "ranks": "[0]"}}})).is_off


def test_a_pickle_without_entries_does_not_tell_what_was_issued() -> None:
    flight = summary(Dump({"version": "2.10", "pg_config": {}, "pg_status": {"0": {"last_enqueued_collective": 4}}}))
    assert flight.is_cut
    assert flight.status == (GroupStatus(0, 4, -1, -1),)


def test_a_cut_dump_says_so() -> None:
    flight = summary(Dump(dump([entry(1)]), stop="cut at byte 900"))
    assert flight.is_cut
    assert flight.problems == ("read up to where it is cut at byte 900",)


def as_text(e: dict[str, Any]) -> dict[str, Any]:
    """Every number as text, tuples as lists, times 0 for none."""
    out = {k: str(v) if type(v) is int else 0 if v is None else v for k, v in e.items()}
    return {**out, "process_group": list(e["process_group"]), "input_sizes": [["8", "4"]], "retired": str(e["retired"])}


def test_numbers_as_text_and_zero_times_read_the_same() -> None:
    entries = [entry(1), entry(2), pending(3)]
    assert summary(dump([as_text(e) for e in entries])) == summary(dump(entries))


def test_the_first_formats() -> None:
    old = {"pg_id": 0, "profiling_name": "nccl:all_reduce", "state": "completed", "input_sizes": [[2]]}
    flight = summary(
        {
            "version": "2.1",
            "pg_config": {"0": {"ranks": [0, 1]}},
            "entries": [
                {**old, "seq_id": 1, "record_id": 0},
                {**old, "seq_id": 2, "record_id": 1, "state": "started"},
                {**old, "seq_id": 3, "profiling_name": "nccl:send 0->1", "state": "scheduled"},
            ],
        }
    )
    assert (group(flight).issued_seq, group(flight).done_seq) == (2, 1)
    told = [(op.name, op.state, op.dst) for op in flight.ops]
    assert told == [("all_reduce", OpState.STARTED, None), ("send", OpState.ISSUED, 1)]
    assert flight.version == "2.1"


def test_entries_that_cannot_be_read_are_counted() -> None:
    bad: list[Any] = [None, 7, {}, {"profiling_name": "nccl:all_reduce"}, entry(9, collective_seq_id=-3)]
    flight = summary(dump([entry(1), pending(2)]) | {"entries": [entry(1), *bad, pending(2, 9)]})
    assert flight.problems == ("5 of 7 entries could not be read",)
    assert (group(flight).issued_seq, group(flight).done_seq) == (2, 1)


def test_entries_out_of_order_are_sorted() -> None:
    flight = summary(dump([pending(3), entry(1), entry(2)]))
    assert group(flight).done_seq == 2
    assert group(flight).windows == group(summary(dump([entry(1), entry(2), pending(3)]))).windows


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_content_makes_it_fail(data: st.DataObject) -> None:
    entries: list[Any] = [entry(1), send(2, done=False), gloo(2, 2), pending(3)]
    for _ in range(data.draw(st.integers(0, 5))):
        target = data.draw(st.sampled_from(entries))
        target[data.draw(st.sampled_from(sorted(target)))] = data.draw(junk)
    value = dump([])
    value["entries"] = entries + data.draw(st.lists(junk, max_size=2))
    for _ in range(data.draw(st.integers(0, 2))):
        value[data.draw(st.sampled_from(sorted(value)))] = data.draw(junk)
    flight = summary(value)
    assert flight_from_json(json.loads(json.dumps(flight_to_json(flight)))) == flight


def test_single_entries_can_be_read_again() -> None:
    dumps = [(dump([entry(seq, input_sizes=[[seq]]) for seq in range(1, 40)] + [pending(40)]), None)]
    ops = read_ops(dumps, 0, None, "0", 38, 99)
    assert [(op.seq, op.state, op.in_sizes) for op in ops] == [
        (38, OpState.DONE, ((38,),)), (39, OpState.DONE, ((39,),)), (40, OpState.ISSUED, ((8, 4),)),
    ]  # fmt: skip
    assert all(op.site == SITE for op in ops)
    assert read_ops(dumps, 0, None, "1", 0, 99) == ()


@pytest.mark.parametrize(
    ("value", "number"),
    [(5, 5), ("5", 5), (" -7 ", -7), (5.0, 5), (5.5, None), (True, None), ("x", None), (None, None), (2**64, None),
     ("9" * 30, None), (float("inf"), None), ([5], None)],
)  # fmt: skip
def test_numbers(value: Any, number: int | None) -> None:
    assert integer(value) == number


def test_names_of_operations() -> None:
    assert parse_op_name("nccl:recv 1<-0").src == 0
    assert parse_op_name("nccl:recv 1<-?").src is None
    assert parse_op_name("all_reduce").backend == ""
    assert parse_op_name("").name == "unknown"
    assert ranks_in_order("[3, 1]") == (3, 1)
    assert ranks_in_order("[3, x]") == ()
    assert ranks_in_order("[1, 1]") == ()
    assert TORCH.endswith("torch/distributed")


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ({"": {"name": "", "desc": "", "ranks": "[0, 1, 2]"}}, (0, 1, 2)),
        ({"": {"name": "", "desc": "", "ranks": "[]"}}, ()),  # groups were made after the first one
        ({"": {"name": "", "desc": "", "ranks": "[1, 2]"}}, ()),
        ({"": "nonsense"}, ()),
    ],
)
def test_gloo_names_all_ranks_where_there_is_one_group(config: dict[str, Any], ranks: tuple[int, ...]) -> None:
    flight = summary({**dump([gloo(1)]), "pg_config": config})
    assert group(flight).ranks == ranks
