"""/proc from a folder of fixtures."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from steadyrun.collectors.process import ProcessReader

TICKS = os.sysconf("SC_CLK_TCK")


class FakeProc:
    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self, pid: int, comm: str = "python", state: str = "S", ppid: int = 1, ticks: tuple[int, int] = (50, 25)
    ) -> Path:
        folder = self.root / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True)
        rest = [state, ppid, *[0] * 9, *ticks, 0, 0, 20, 0, 3, 0, 777, 1 << 30, 100, *[0] * 20]
        line = f"{pid} ({comm}) " + " ".join(map(str, rest)) + "\n"
        (folder / "stat").write_text(line)
        (folder / "task" / str(pid) / "stat").write_text(line)
        (folder / "wchan").write_text("futex_wait_queue")
        (folder / "cmdline").write_bytes(b"python\0-u\0train.py\0")
        (folder / "status").write_text("Name:\tx\nSigCgt:\t8000000000000402\n")
        (folder / "io").write_text("rchar: 10\nwchar: 5\nsyscr: 99\n")
        return folder

    def add_thread(self, pid: int, tid: int, state: str) -> None:
        folder = self.root / str(pid) / "task" / str(tid)
        folder.mkdir()
        line = (self.root / str(pid) / "stat").read_text()
        head, _, tail = line.rpartition(")")
        (folder / "stat").write_text(f"{head}) {state}{tail[2:]}")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


def test_facts_of_a_process(proc: FakeProc) -> None:
    proc.add(42)
    facts = ProcessReader(proc.root).facts(42)
    assert facts is not None
    assert (facts.state, facts.wchan, facts.threads) == ("S", "futex_wait_queue", 3)
    assert facts.cpu_s == pytest.approx(75 / TICKS)
    assert facts.rss_bytes == 100 * os.sysconf("SC_PAGE_SIZE")
    assert facts.children == ()
    assert not facts.dead_main


@pytest.mark.parametrize("comm", ["a) S (b", "((", "x) 1 2 3", "sp ace", ")"])
def test_odd_command_names_do_not_shift_the_fields(proc: FakeProc, comm: str) -> None:
    proc.add(42, comm=comm, state="D")
    reader = ProcessReader(proc.root)
    assert reader.state(42) == "D"
    assert reader.start_ticks(42) == 777


def test_process_that_is_gone_gives_none(proc: FakeProc) -> None:
    reader = ProcessReader(proc.root)
    assert reader.facts(42) is None
    assert reader.sample(42) is None
    assert reader.state(42) is None
    assert reader.catches(42, 10) is None
    assert reader.descendants(42) == []


def test_process_that_goes_while_it_is_read_gives_what_was_read(proc: FakeProc) -> None:
    folder = proc.add(42)
    shutil.rmtree(folder / "task")
    for name in ("wchan", "cmdline", "io"):
        (folder / name).unlink()
    reader = ProcessReader(proc.root)
    facts = reader.facts(42)
    assert facts is not None
    assert facts.wchan == ""
    sample = reader.sample(42)
    assert sample is not None
    assert sample.io_bytes is None


@pytest.mark.parametrize(
    "text", ["", "42", "42 (x", "42 (x) S 1", "42 (x) S a b c d e f g h i j k l m n o p q r s t u"]
)
def test_cut_or_foreign_stat_is_no_process(proc: FakeProc, text: str) -> None:
    (proc.add(42) / "stat").write_text(text)
    assert ProcessReader(proc.root).facts(42) is None


def test_kernel_without_wait_channel(proc: FakeProc) -> None:
    (proc.add(42) / "wchan").write_text("0")
    assert ProcessReader(proc.root).wchan(42) == ""


def test_signal_handlers_from_the_mask(proc: FakeProc) -> None:
    proc.add(42)
    reader = ProcessReader(proc.root)
    assert {n for n in range(1, 65) if reader.catches(42, n)} == {2, 11, 64}


@pytest.mark.parametrize(("others", "dead"), [(["S"], True), (["Z"], False), ([], False)])
def test_dead_main_thread_needs_a_living_one(proc: FakeProc, others: list[str], dead: bool) -> None:
    proc.add(42, state="Z")
    for i, state in enumerate(others):
        proc.add_thread(42, 43 + i, state)
    facts = ProcessReader(proc.root).facts(42)
    assert facts is not None
    assert facts.dead_main is dead


@pytest.mark.parametrize("with_files", [True, False])
def test_descendants_by_children_files_or_by_scan(proc: FakeProc, with_files: bool) -> None:
    for pid, ppid in ((42, 1), (50, 42), (60, 50), (70, 1)):
        folder = proc.add(pid, ppid=ppid)
        if with_files:
            children = {42: "50 ", 50: "60 "}.get(pid, "")
            (folder / "task" / str(pid) / "children").write_text(children)
    (proc.root / "60" / "cmdline").write_bytes(b"")
    reader = ProcessReader(proc.root)
    assert reader.descendants(42) == [(50, "S", "python -u train.py"), (60, "S", "[python]")]


def test_cyclic_children_end(proc: FakeProc) -> None:
    for pid, child in ((42, "43"), (43, "42 43")):
        (proc.add(pid) / "task" / str(pid) / "children").write_text(child)
    assert [pid for pid, _, _ in ProcessReader(proc.root).descendants(42)] == [43]


def test_time_in_the_queue_counts_as_wanted(proc: FakeProc) -> None:
    folder = proc.add(42)
    reader = ProcessReader(proc.root)
    without = reader.sample(42)
    assert without is not None
    assert without.cpu_s == pytest.approx(75 / TICKS)
    proc.add_thread(42, 43, "S")
    (folder / "task/42/schedstat").write_text("1000000000 3000000000 7\n")
    (folder / "task/43/schedstat").write_text("500000000 0 1\n")
    sample = reader.sample(42)
    assert sample is not None
    assert sample.cpu_s == pytest.approx(4.5)
    assert sample.io_bytes == 15


def test_own_process_is_read_from_the_real_proc() -> None:
    facts = ProcessReader().facts(os.getpid())
    assert facts is not None
    assert facts.state in "RS"
    assert facts.rss_bytes > 1 << 20
    assert facts.cpu_s > 0
