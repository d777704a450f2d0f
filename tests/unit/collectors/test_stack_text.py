"""Dumps of faulthandler and py-spy, as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from steadyrun.collectors.stacks import last_dump, parse_dumps, parse_py_spy
from steadyrun.core.records import Frame

PLAIN = """\
Thread 0x00007f423ed1c6c0 (most recent call first):
  File "/proj/train.py", line 6 in worker
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f423f867b80 (most recent call first):
  File "/proj/train.py", line 12 in main
  File "/proj/train.py", line 13 in <module>
"""
FATAL = """\
Fatal Python error: Segmentation fault

Current thread 0x00007ff153471b80 (most recent call first):
  File "/proj/train.py", line 11 in main
  File "/proj/train.py", line 13 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""
NAMED_WITH_NATIVE = """\
Fatal Python error: Aborted

Thread 0x00007f1 [saver (1)] (most recent call first):
  File "/proj/a b.py", line 3 in <lambda>
  File "/usr/lib/python3.14/threading.py", line 1002 in _bootstrap

Current thread 0x00007f2 [python3] (most recent call first):
  Garbage-collecting
  File "/proj/train.py", line 5 in f
  File "/proj/train.py", line 9 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3.14", at _Py_DumpStack+0x3d [0x1]
  Binary file "/lib/libc.so.6", at abort+0x1 [0x2]

Extension modules: x (total: 1)
"""


def test_requested_dump_has_all_threads_and_the_main_one_last() -> None:
    (dump,) = parse_dumps(PLAIN)
    assert [s.is_main for s in dump.stacks] == [False, True]
    assert dump.stacks[1].frames == (Frame("/proj/train.py", 12, "main"), Frame("/proj/train.py", 13, "<module>"))
    assert dump.stacks[1].thread == "0x00007f423f867b80 (current)"
    assert dump.whole
    assert dump.fatal == ""


def test_fatal_dump_keeps_its_cause_and_not_the_modules() -> None:
    (dump,) = parse_dumps(FATAL)
    assert dump.fatal == "Segmentation fault"
    assert len(dump.stacks[0].frames) == 2
    assert dump.whole


def test_newer_python_names_threads_and_adds_the_c_stack() -> None:
    (dump,) = parse_dumps(NAMED_WITH_NATIVE)
    assert [s.thread for s in dump.stacks] == ["saver (1) 0x00007f1", "python3 0x00007f2 (current)"]
    assert dump.stacks[0].frames[0] == Frame("/proj/a b.py", 3, "<lambda>")
    assert dump.stacks[1].frames[0].function == "f"
    assert len(dump.native) == 2
    assert "abort" in dump.native[1]


def test_dumps_one_after_another_are_told_apart() -> None:
    other = PLAIN.replace("line 12", "line 14")
    dumps = parse_dumps(PLAIN + other + FATAL)
    assert [d.fatal for d in dumps] == ["", "", "Segmentation fault"]
    assert [d.stacks[-1].frames[0].line for d in dumps] == [12, 14, 11]


def test_dump_of_the_dead_man_begins_anew() -> None:
    dumps = parse_dumps(PLAIN + "Timeout (0:00:05)!\n" + PLAIN.replace("0x00007f42", "0x00007f43"))
    assert len(dumps) == 2


@pytest.mark.parametrize("cut", range(1, len(PLAIN), 7))
def test_cut_text_gives_what_is_there(cut: int) -> None:
    dumps = parse_dumps(PLAIN[:cut])
    whole = parse_dumps(PLAIN)[0].stacks
    for dump in dumps:
        for stack, full in zip(dump.stacks, whole, strict=False):
            assert full.frames[: len(stack.frames)] == stack.frames
    assert not any(d.whole and len(d.stacks) == 2 and len(d.stacks[1].frames) < 2 for d in dumps)


def test_more_threads_than_faulthandler_writes_leaves_no_main_thread() -> None:
    (dump,) = parse_dumps(PLAIN + "...\n")
    assert not any(s.is_main for s in dump.stacks)


def test_deep_stack_ends_in_a_mark() -> None:
    (dump,) = parse_dumps(PLAIN.replace('  File "/proj/train.py", line 13 in <module>', "  ..."))
    assert dump.stacks[-1].frames[-1].file == "<cut>"
    assert dump.whole


def test_thread_without_python_frames_is_kept_empty() -> None:
    (dump,) = parse_dumps("Thread 0x1 (most recent call first):\n  <no Python frame>\n\n" + PLAIN)
    assert dump.stacks[0].frames == ()


def test_foreign_lines_are_passed_over() -> None:
    assert parse_dumps("hello\nFile x\n\x00\xff\n") == []
    assert len(parse_dumps("noise\n" + PLAIN + "more noise\n")) == 1


def test_last_whole_dump_after_the_offset_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "stacks.txt"
    path.write_text(PLAIN + PLAIN.replace("line 12", "line 14") + PLAIN.replace("line 12", "line 99")[:-60])
    dump = last_dump(path)
    assert dump is not None
    assert dump.stacks[-1].frames[0].line == 14
    after = last_dump(path, offset=2 * len(PLAIN))
    assert after is not None
    assert not after.whole
    assert last_dump(path, offset=path.stat().st_size) is None
    assert last_dump(tmp_path / "absent.txt") is None


def test_py_spy_names_threads_and_the_lock_holder() -> None:
    def thread(tid: int, name: str | None, owns: bool) -> dict[str, object]:
        frame = {"name": "f", "filename": "/p/x.py", "line": 3}
        return {"pid": 7, "os_thread_id": tid, "thread_name": name, "owns_gil": owns, "frames": [frame]}

    stacks = parse_py_spy([thread(8, "loader", False), thread(7, "MainThread", True), thread(9, None, False)])
    assert [(s.thread, s.is_main) for s in stacks] == [
        ("loader", False),
        ("MainThread (holds the interpreter lock)", True),
        ("9", False),
    ]
    assert stacks[1].frames == (Frame("/p/x.py", 3, "f"),)
    with pytest.raises(KeyError):
        parse_py_spy([{"frames": []}])


def test_an_interpreter_that_ends_has_no_frames_and_its_dump_is_whole() -> None:
    text = "Current thread 0x00007f590e835b80 (most recent call first):\n  Garbage-collecting\n  <no Python frame>\n"
    (dump,) = parse_dumps(text)
    assert dump.whole
    assert [(s.thread, s.frames) for s in dump.stacks] == [("0x00007f590e835b80 (current)", ())]
    (cut,) = parse_dumps(text.replace("  <no Python frame>\n", ""))
    assert not cut.whole
    (more,) = parse_dumps(text + "Thread 0x00007f590e835b81 (most recent call first):\n")
    assert not more.whole
