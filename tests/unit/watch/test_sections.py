"""What a reader of the board sees of sections, in every way they can be entered and left."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from steadyrun.core import layout
from steadyrun.watch.marks import name_bytes

LONG_S = layout.SHORTEST_NS / 1e9


def spin(seconds: float = LONG_S) -> None:
    """Long enough for the ring of durations."""
    end = time.monotonic() + seconds
    while time.monotonic() <= end:
        pass


def test_setup_is_open_from_the_start_and_the_slot_has_an_owner(slot: Any) -> None:
    view = slot.view()
    assert [(s.name, s.first, s.lane) for s in view.sections] == [("setup", True, 0)]
    assert (view.rank, view.attempt) == (7, 3)
    assert view.attached_s is not None
    assert abs(view.sections[0].since_s - time.monotonic()) < 60
    assert slot.board.view(0) is None


def test_sections_nest_and_close_in_order(slot: Any) -> None:
    section = slot.marks.section
    with section("outer"):
        with section("inner"):
            assert slot.names() == ["setup", "outer", "inner"]
        assert slot.names() == ["setup", "outer"]
    assert slot.names() == ["setup"]


def test_the_same_name_is_the_same_object_and_can_be_entered_within_itself(slot: Any) -> None:
    section = slot.marks.section
    again = section("deep")
    assert section("deep") is again
    with again, again:
        assert slot.names() == ["setup", "deep", "deep"]
    assert slot.names() == ["setup"]


def test_entry_times_are_those_of_the_entry(slot: Any) -> None:
    before = time.monotonic()
    with slot.marks.section("x"):
        after = time.monotonic()
        since_s = slot.view().sections[1].since_s
    assert before - 2e-6 <= since_s <= after + 2e-6  # doubles with a tag are good for a microsecond


@pytest.mark.parametrize("name", ["plain", "checkpointing", "step"])
def test_an_exit_stack_enters_and_leaves_a_section(slot: Any, name: str) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(slot.marks.section("outer"))
        stack.enter_context(slot.marks.section(name))
        assert slot.names()[-2:] == ["outer", name]
    assert "outer" not in slot.names()
    assert slot.view().checkpoints_done == (name == "checkpointing")


def test_an_exception_closes_what_it_leaves(slot: Any) -> None:
    section = slot.marks.section
    with pytest.raises(KeyError), section("a"), section("b"):
        raise KeyError
    assert slot.names() == ["setup"]


def test_first_is_true_until_it_was_completed_once(slot: Any) -> None:
    section = slot.marks.section
    with section("x"):
        assert slot.view().sections[-1].first
    with section("x"):
        assert not slot.view().sections[-1].first


def test_a_closed_section_is_a_sign_of_progress(slot: Any) -> None:
    assert slot.view().last_change_s is None
    with slot.marks.section("x"):
        pass
    changed = slot.view().last_change_s
    assert changed is not None
    assert abs(changed - time.monotonic()) < 60


def test_durations_are_recorded_and_short_ones_are_not(slot: Any) -> None:
    for name in ("short", "long", "short"):
        with slot.marks.section(name):
            if name == "long":
                spin()
    durations, count, lost = slot.board.durations(1, 0)
    assert [d.name for d in durations if d.duration_s >= LONG_S] == [d.name for d in durations]
    assert "long" in [d.name for d in durations]
    assert count == len(durations)
    assert lost == 0


def test_the_ring_keeps_the_newest_and_says_how_many_were_lost(slot: Any) -> None:
    section = slot.marks.section
    for i in range(layout.RING + 20):
        with section(f"n{i % 3}"):
            spin()
    durations, count, lost = slot.board.durations(1, 0)
    assert count == layout.RING + 20
    assert lost == 20
    assert [d.name for d in durations] == [f"n{i % 3}" for i in range(20, layout.RING + 20)]


def test_checkpoints_done_are_counted(slot: Any) -> None:
    for _ in range(3):
        with slot.marks.section("checkpointing"):
            pass
    assert slot.view().checkpoints_done == 3


# -- out of order ------------------------------------------------------------------------------------------------------
def test_a_suspended_generator_closes_its_own_section_later(slot: Any) -> None:
    section = slot.marks.section

    def batches() -> Iterator[int]:
        for i in range(3):
            with section("data"):
                yield i

    source = batches()
    next(source)
    assert slot.names() == ["setup", "data"]
    with section("work"):
        assert slot.names() == ["setup", "data", "work"]
        next(source)  # closes the data below, opens one above
        assert slot.names() == ["setup", "work", "data"]
    assert slot.names() == ["setup", "data"]
    source.close()
    assert slot.names() == ["setup"]


def test_an_exit_without_an_entry_does_nothing(slot: Any) -> None:
    slot.marks.section("x").__exit__(None, None, None)
    assert slot.names() == ["setup"]
    with slot.marks.section("y"):
        slot.marks.section("x").__exit__(None, None, None)
        assert slot.names() == ["setup", "y"]


def test_deeper_than_the_board_shows_is_counted_and_still_recorded(slot: Any) -> None:
    section = slot.marks.section
    with contextlib.ExitStack() as stack:
        for i in range(layout.LANE_DEPTH + 4):
            stack.enter_context(section(f"d{i}"))
        shown = slot.names()
        assert shown == ["setup", *(f"d{i}" for i in range(layout.LANE_DEPTH - 1))]
        assert slot.view().dropped == 5
        spin()
    assert slot.names() == ["setup"]
    assert f"d{layout.LANE_DEPTH + 3}" in slot.durations()
    with section("d0"):
        assert slot.names() == ["setup", "d0"]


def test_recursion_beyond_the_depth_unwinds_to_where_it_began(slot: Any) -> None:
    section = slot.marks.section

    @section("f")
    def f(n: int) -> int:
        return 0 if n == 0 else 1 + f(n - 1)

    assert f(100) == 100
    assert slot.names() == ["setup"]


def test_an_exit_below_the_deep_ones_moves_the_outermost_of_them_up(slot: Any) -> None:
    section = slot.marks.section
    names = [f"d{i}" for i in range(layout.LANE_DEPTH + 2)]
    for name in names:
        section(name).__enter__()
    section("d0").__exit__(None, None, None)
    assert slot.names() == ["setup", *names[1 : layout.LANE_DEPTH]]
    for name in reversed(names[1:]):
        section(name).__exit__(None, None, None)
    assert slot.names() == ["setup"]


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_entries_and_exits_agrees_with_a_plain_list(slot: Any, seed: int) -> None:
    draw = random.Random(seed)
    print(f"seed {seed}")
    names = ["a", "b", "c", "d"]
    expected = ["setup"]
    for _ in range(400):
        name = draw.choice(names)
        if draw.random() < 0.52:
            slot.marks.section(name).__enter__()
            expected.append(name)
        else:
            slot.marks.section(name).__exit__(None, None, None)
            if name in expected:
                del expected[len(expected) - 1 - expected[::-1].index(name)]
        assert slot.names() == expected[: layout.LANE_DEPTH]


# -- names -------------------------------------------------------------------------------------------------------------
def test_more_names_than_the_table_share_one_entry(slot: Any) -> None:
    section = slot.marks.section
    for i in range(layout.NAMES + 10):
        with section(f"name {i}"):
            pass
    with section("name 0"), section(f"name {layout.NAMES + 5}"), section(f"name {layout.NAMES + 6}"):
        assert slot.names() == ["setup", "name 0", layout.OTHER, layout.OTHER]
    assert slot.names() == ["setup"]


@pytest.mark.parametrize("name", ["é" * 40, "x" * 200, "日本語" * 10, "", "a\udc80b", "emoji 🚀 " * 9])
def test_names_are_cut_between_characters(slot: Any, name: str) -> None:
    with slot.marks.section(name):
        shown = slot.names()[-1]
    raw = name_bytes(name)
    assert len(raw) == layout.NAME_BYTES
    assert shown == (raw.rstrip(b"\0").decode() or layout.OTHER)
    assert "�" not in shown


def test_names_without_end_do_not_grow_the_process_without_end(slot: Any) -> None:
    section = slot.marks.section
    last = [section(f"batch {i}") for i in range(5000)][-1]
    assert last is section("batch 99999")


@pytest.mark.parametrize("name", [3, None, ["unhashable"], b"bytes"])
def test_a_name_that_is_no_text_is_taken_as_its_text(slot: Any, name: object) -> None:
    with slot.marks.section(name):
        assert slot.names()[-1] == str(name)


# -- the implicit section ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["setup", "step"])
def test_the_implicit_setup_ends_when_the_script_opens_its_own(slot: Any, name: str) -> None:
    made = slot.marks.section(name)
    assert slot.names() == ["setup"]  # made, as by a decorator, but not entered yet
    with made:
        assert slot.names() == [name]
    assert slot.names() == []


def test_the_implicit_setup_ends_at_the_first_step_also_below_an_open_section(slot: Any) -> None:
    with slot.marks.section("train"):
        slot.marks.step(0)
        assert slot.names() == ["train"]
    assert slot.names() == []


# -- decorators --------------------------------------------------------------------------------------------------------
def test_a_decorated_function_runs_inside_and_keeps_its_face(slot: Any) -> None:
    @slot.marks.section("f")
    def add(a: int, b: int = 2) -> int:
        """Adds."""
        assert slot.names() == ["setup", "f"]
        return a + b

    assert add(1, b=4) == 5
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert slot.names() == ["setup"]


def test_a_decorated_coroutine_is_inside_while_it_runs(slot: Any) -> None:
    @slot.marks.section("c")
    async def work() -> list[str]:
        await asyncio.sleep(0)
        return list(slot.names())

    assert asyncio.run(work()) == ["setup", "c"]
    assert slot.names() == ["setup"]


def test_a_decorated_generator_is_inside_from_first_to_last_item(slot: Any) -> None:
    @slot.marks.section("g")
    def items() -> Iterator[int]:
        received = yield 1
        yield received

    source = items()
    assert slot.names() == ["setup"]
    assert next(source) == 1
    assert slot.names() == ["setup", "g"]
    assert source.send(5) == 5
    assert list(source) == []
    assert slot.names() == ["setup"]


def test_a_decorated_async_generator_is_inside_from_first_to_last_item(slot: Any) -> None:
    @slot.marks.section("ag")
    async def items() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def collect() -> list[tuple[int, list[str]]]:
        return [(i, slot.names()) async for i in items()]

    assert asyncio.run(collect()) == [(1, ["setup", "ag"]), (2, ["setup", "ag"])]
    assert slot.names() == ["setup"]


# -- threads -----------------------------------------------------------------------------------------------------------
def test_threads_have_lanes_of_their_own(slot: Any, in_thread: Callable[[Callable[[], None]], None]) -> None:
    section = slot.marks.section
    seen: list[list[str]] = []

    def work() -> None:
        with section("prefetch"), section("decode"):
            seen.append(slot.names(1))
        seen.append(slot.names(1))

    with section("main"):
        in_thread(work)
        assert slot.names(0) == ["setup", "main"]
    assert seen == [["prefetch", "decode"], []]
    assert slot.names() == ["setup"]


def test_more_threads_than_lanes_are_counted_and_lanes_come_back(slot: Any) -> None:
    section = slot.marks.section
    count = layout.LANES + 1
    entered, leave = threading.Barrier(count + 1), threading.Event()

    def work() -> None:
        with section("busy"):
            entered.wait(30)
            leave.wait(30)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    entered.wait(30)
    assert [slot.names(lane) for lane in range(1, layout.LANES)] == [["busy"]] * (layout.LANES - 1)
    assert slot.view().dropped == 2
    leave.set()
    for thread in threads:
        thread.join(30)
    assert [slot.names(lane) for lane in range(1, layout.LANES)] == [[]] * (layout.LANES - 1)


def test_a_thread_that_ends_takes_its_open_sections_with_it(
    slot: Any, in_thread: Callable[[Callable[[], None]], None]
) -> None:
    section = slot.marks.section
    for _ in range(layout.LANES * 2):
        in_thread(lambda: section("left open").__enter__())
    assert slot.names(1) == []
    assert slot.view().dropped == 0


def test_a_section_left_in_another_thread_is_closed_at_the_next_step(
    slot: Any, in_thread: Callable[[Callable[[], None]], None]
) -> None:
    section = slot.marks.section
    slot.marks.step(0)

    def leave() -> None:
        with section("moved"):
            pass
        section("moved").__exit__(None, None, None)

    section("moved").__enter__()
    in_thread(leave)
    assert slot.names() == ["moved"]
    slot.marks.step(1)
    assert slot.names() == []


def test_main_and_threads_can_have_the_same_section_open(
    slot: Any, in_thread: Callable[[Callable[[], None]], None]
) -> None:
    load = slot.marks.section("load")
    with load:

        def work() -> None:
            with load:
                assert slot.names(1) == ["load"]

        in_thread(work)
        assert slot.names() == ["setup", "load"]
    assert slot.names() == ["setup"]


# -- other -------------------------------------------------------------------------------------------------------------
def test_after_a_fork_nothing_is_written(slot: Any) -> None:
    section = slot.marks.section
    with section("open at the fork"):
        slot.marks.forked()
        before = bytes(slot.board.words)
        with section("x"), section("new"), section("step"):
            slot.marks.step(3)
            slot.marks.beat()
            slot.marks.step_seen(None)
            assert slot.marks.should_stop() is False
            slot.marks.set_flag(1)
            slot.marks.finish()
    assert not slot.marks.is_active()
    assert bytes(slot.board.words) == before


def test_open_sections_for_the_socket_agree_with_the_board(slot: Any) -> None:
    with slot.marks.section("a"), slot.marks.section("b"):
        assert [(lane, name) for lane, name, _ in slot.marks.open_sections()] == [(0, "setup"), (0, "a"), (0, "b")]
        assert all(0 <= age_s < 60 for _, _, age_s in slot.marks.open_sections())


def test_a_pickled_section_is_the_one_of_the_process_that_loads_it(slot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import steadyrun.watch

    made = slot.marks.section("x")
    monkeypatch.setattr(steadyrun.watch, "section", slot.marks.section)
    data = pickle.dumps(made)
    assert pickle.loads(data) is made
    monkeypatch.undo()
    assert pickle.loads(data) is steadyrun.watch.section("x")
