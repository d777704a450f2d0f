"""A rank as its agent sees it: the board, stacks, exceptions, the socket, the end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core.records import exception_from_json
from steadyrun.core.runfolder import RunFolder

STACK_SIGNAL = signal.SIGRTMAX - 3


def ask(rank_dir: Path, request: object) -> Any:
    """One request to the rank's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(60)
        folder = os.open(rank_dir, os.O_PATH)
        try:
            client.connect(f"/proc/self/fd/{folder}/evidence.sock")
        finally:
            os.close(folder)
        client.sendall((request if isinstance(request, str) else json.dumps(request)).encode() + b"\n")
        with client.makefile() as file:
            return json.loads(file.readline())


def has_socket(rank: Any) -> Any:
    def answers() -> bool:
        try:
            return "step" in ask(rank.rank_dir, {"cmd": "sections"})
        except (FileNotFoundError, ConnectionRefusedError):
            return False

    return answers


# -- the board ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["cold", "warm"])
def test_a_script_without_a_call_is_in_setup_and_then_in_teardown(start: Any, how: str) -> None:
    rank = getattr(start, how)(start.script("import sys; sys.stdin.read()"))
    assert rank.finish().code == 0
    view = rank.view()
    assert (view.pid, view.rank, view.attempt) == (rank.process.pid, 3, 2)
    assert [s.name for s in view.sections] == ["teardown"]
    assert view.attached_s < view.finished_s
    assert "setup" in [d.name for d in rank.board.durations(0, 0)[0]]


def test_sections_and_steps_of_a_script_reach_the_board(start: Any) -> None:
    rank = start.cold(
        start.script("""
from steadyrun.watch import section, step, beat
import os, signal
with section("epoch"):
    for i in range(5):
        with section("work"):
            pass
        step(i)
        beat()
    os.kill(os.getpid(), signal.SIGSTOP)
""")
    )
    rank.wait_until(lambda: (v := rank.view()) and v.beats == 5 and v, "five beats")
    view = rank.view()
    assert [s.name for s in view.sections] == ["epoch"]
    assert (view.step, view.steps_done, view.step_is_global) == (4, 5, True)
    os.kill(rank.process.pid, signal.SIGCONT)
    assert rank.finish().code == 0


def test_only_the_first_interpreter_of_a_rank_claims_its_slot(start: Any) -> None:
    """As when a rank is a shell script and the environment leads its children to us as well."""
    program = start.script("""
import os, subprocess, sys
from steadyrun import watch
if len(sys.argv) == 1:
    env = {**os.environ, **eval(os.environ["AGAIN"])}
    again = [sys.executable, sys.argv[0], "x"]
    print(watch.is_active(), subprocess.run(again, env=env, capture_output=True, text=True))
else:
    print(watch.is_active())
""")
    env = start.environment()
    rank_dir = start.new_rank_dir()
    from steadyrun.core.board import Board

    board = Board.create_anonymous(1)
    told = {"STEADYRUN_SETUP": json.dumps(start.setup(board, rank_dir)), **start.with_site({})}
    env["AGAIN"] = repr(told)
    outcome = start.plain(program, {**start.with_site(env), **told})
    board.close()
    assert outcome.stdout.startswith("True "), outcome
    assert "stdout='False\\n'" in outcome.stdout
    assert "has this rank's slot; the script runs unwatched" in outcome.stdout


def test_the_script_goes_on_when_the_agent_and_its_board_are_gone(start: Any) -> None:
    rank = start.cold(
        start.script(
            """
import sys
from steadyrun import watch
print("up"); sys.stdout.flush()
while not (watch.section("wait") and __import__("os").path.exists(sys.argv[1])):
    with watch.section("wait"):
        pass
for i in range(100000):
    with watch.section(str(i % 100)):
        watch.step(i); watch.beat(); watch.should_stop()
print("done")
""",
            arguments=[str(start.tmp_path / "go")],
        )
    )
    rank.wait_until(lambda: (v := rank.view()) and v.last_change_s, "a section")
    rank.board.close()
    (start.tmp_path / "go").write_text("")
    assert rank.finish().stdout == "up\ndone\n"
    from steadyrun.core.board import Board

    rank.board = Board.create_anonymous(1)


def test_a_forked_child_does_not_touch_its_parents_slot(start: Any) -> None:
    rank = start.cold(
        start.script("""
import os, sys
from steadyrun import watch
watch.step(0)
with watch.section("outer"):
    pid = os.fork()
    if pid == 0:
        with watch.section("child"):
            watch.step(7); watch.beat()
            assert not watch.is_active() and not watch.should_stop()
        sys.exit(3)  # the whole way through the interpreter's end, with the dead-man's timer of the parent
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 3, status
pid = os.fork()
if pid == 0:
    raise ValueError("in the child")
os.waitpid(pid, 0)
watch.step(1)
""")
    )
    outcome = rank.finish()
    assert outcome.code == 0, outcome
    view = rank.view()
    assert (view.step, view.steps_done, view.beats) == (1, 2, 0)
    assert "child" not in [d.name for d in rank.board.durations(0, 0)[0]]
    assert not (rank.rank_dir / "exception.json").exists()
    assert not view.has_exception


# -- exceptions --------------------------------------------------------------------------------------------------------
FAILING = """
import sys
def inner(x):
    raise {error}
def outer():
    inner(1)
{before}
outer()
"""


@pytest.mark.parametrize(
    "before",
    [
        "",
        "sys.excepthook = lambda *a: sys.stderr.write('own hook\\n')",
        "import threading",
        "sys.excepthook = lambda *a: sys.stderr.write('own hook\\n'); import threading",
    ],
)
def test_an_uncaught_exception_is_recorded_and_printed_as_ever(start: Any, before: str) -> None:
    argv = start.script(FAILING.format(error="ValueError('bad é ' + 'x' * 5000)", before=before))
    plain = start.plain(argv, start.environment())
    rank = start.cold(argv)
    outcome = rank.finish()
    assert (outcome.code, outcome.stdout, outcome.stderr) == (plain.code, plain.stdout, plain.stderr)
    assert outcome.code == 1
    record = exception_from_json(json.loads((rank.rank_dir / "exception.json").read_text()))
    assert record.type == "ValueError"
    assert record.message == "bad é " + "x" * 3994
    assert [f.function for f in record.frames] == ["inner", "outer", "<module>"]
    assert [f.line for f in record.frames] == [4, 6, 8]
    assert record.frames[0].file == argv[-1]
    assert record.step is None
    assert abs(record.at_unix_s - time.time()) < 600
    assert rank.view().has_exception


def test_equal_errors_have_equal_hashes_and_others_have_not(start: Any) -> None:
    hashes = {}
    for name, error in {"a": "ValueError('1')", "b": "ValueError('2')", "c": "KeyError('1')"}.items():
        rank = start.cold(start.script(FAILING.format(error=error, before="")))
        rank.finish()
        hashes[name] = json.loads((rank.rank_dir / "exception.json").read_text())["traceback_hash"]
    assert hashes["a"] == hashes["b"] != hashes["c"]
    rank = start.cold(start.script(FAILING.format(error="ValueError('1')", before="\n\n")))
    rank.finish()
    assert json.loads((rank.rank_dir / "exception.json").read_text())["traceback_hash"] != hashes["a"]


@pytest.mark.parametrize(
    ("ending", "code", "type_name"),
    [
        ("sys.exit(0)", 0, None),
        ("sys.exit(3)", 3, None),
        ("sys.exit('said why')", 1, None),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
        ("class Own(Exception): pass\nraise Own", 1, "Own"),
        ("import json\njson.loads('{')", 1, "json.decoder.JSONDecodeError"),
        ("def f(): f()\nf()", 1, "RecursionError"),
        ("class Bad(Exception):\n  def __str__(self): return 1/0\nraise Bad", 1, "Bad"),
    ],
)
def test_what_counts_as_an_uncaught_exception(start: Any, ending: str, code: int, type_name: str | None) -> None:
    rank = start.cold(start.script(f"import sys\n{ending}\n"))
    assert rank.finish().code == code
    path = rank.rank_dir / "exception.json"
    assert path.exists() == (type_name is not None)
    if type_name is not None:
        assert json.loads(path.read_text())["type"] == type_name


def test_the_step_is_in_the_record(start: Any) -> None:
    rank = start.warm(start.script("from steadyrun import watch\nwatch.step(12)\n1/0"))
    rank.finish()
    assert json.loads((rank.rank_dir / "exception.json").read_text())["step"] == 12


def test_an_exception_in_a_thread_is_noted_apart(start: Any) -> None:
    argv = start.script("""
import threading
t = threading.Thread(target=lambda: 1/0, name="loader"); t.start(); t.join()
""")
    plain = start.plain(argv, start.environment())
    rank = start.cold(argv)
    outcome = rank.finish()

    def without_idents(text: str) -> str:
        return re.sub(r"0x[0-9a-f]+", "", text)

    assert without_idents(outcome.stderr) == without_idents(plain.stderr)
    assert outcome.code == 0
    assert not (rank.rank_dir / "exception.json").exists()
    (line,) = (rank.rank_dir / "thread_exceptions.jsonl").read_text().splitlines()
    assert (json.loads(line)["type"], json.loads(line)["thread"]) == ("ZeroDivisionError", "loader")


# -- the end -----------------------------------------------------------------------------------------------------------
def test_the_end_is_marked_before_threads_are_joined(start: Any) -> None:
    rank = start.cold(
        start.script("""
import threading, sys
from concurrent.futures import ThreadPoolExecutor
from steadyrun import watch
watch.step(0)
go = threading.Event()
ThreadPoolExecutor(1).submit(go.wait)  # joined by a callback of the interpreter's end
threading.Thread(target=lambda: (sys.stdin.read(), go.wait(2))).start()
""")
    )
    rank.wait_until(lambda: (v := rank.view()) and v.finished_s, "the mark")
    assert rank.process.poll() is None
    rank.process.kill()
    assert [s.name for s in rank.view().sections] == ["teardown"]


# -- stacks ------------------------------------------------------------------------------------------------------------
BUSY = """
import sys, threading
from steadyrun import watch
watch.step(0)
def spin():
    while True:
        pass
def side():
    threading.Event().wait()
threading.Thread(target=side, daemon=True).start()
spin()
"""


@pytest.mark.parametrize("how", ["cold", "warm"])
def test_the_stack_signal_writes_all_stacks_and_the_script_goes_on(start: Any, how: str) -> None:
    rank = getattr(start, how)(start.script(BUSY))
    rank.wait_until(lambda: (v := rank.view()) and v.step == 0, "a step")
    path = rank.rank_dir / "stacks.txt"
    rank.wait_until(
        lambda: (os.kill(rank.process.pid, STACK_SIGNAL), "in spin" in path.read_text())[1], "the stack of spin"
    )
    text = path.read_text()
    assert "in side" in text or "Thread 0x" in text
    assert rank.process.poll() is None
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_segmentation_fault_leaves_its_stack(start: Any) -> None:
    rank = start.cold(start.script("import ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()"))
    outcome = rank.finish()
    assert outcome.code == -signal.SIGSEGV
    text = (rank.rank_dir / "stacks.txt").read_text()
    assert "Fatal Python error: Segmentation fault" in text
    assert "in crash" in text
    assert outcome.stderr == ""


def test_the_dead_man_writes_stacks_while_c_code_holds_the_lock(start: Any) -> None:
    rank = start.cold(
        start.script("""
import ctypes
from steadyrun import watch
watch.step(0)
def stuck():
    ctypes.PyDLL(None).sleep(120)  # PyDLL keeps the interpreter's lock
stuck()
"""),
        deadman_s=0.3,
    )
    path = rank.rank_dir / "stacks.txt"
    rank.wait_until(lambda: path.exists() and "in stuck" in path.read_text(), "the dead-man's stacks")
    assert "Timeout (0:00:00.3" in path.read_text()


def test_beats_keep_the_dead_man_quiet_and_the_end_stops_him(start: Any) -> None:
    rank = start.cold(
        start.script("""
import time
from steadyrun import watch
end = time.monotonic() + 1.5
watch.step(0)
while time.monotonic() < end:
    watch.beat()
"""),
        deadman_s=1.0,
    )
    assert rank.finish().code == 0
    assert (rank.rank_dir / "stacks.txt").read_text() == ""


def test_the_script_may_have_the_timer_for_itself(start: Any) -> None:
    rank = start.cold(
        start.script(
            """
import faulthandler, sys, time
from steadyrun import watch
watch.step(0)
faulthandler.cancel_dump_traceback_later()
own = open(sys.argv[1], "w+")
faulthandler.dump_traceback_later(0.2, file=own)
end = time.monotonic() + 60
while not own.read():
    assert time.monotonic() < end
    own.seek(0)
    watch.beat()
faulthandler.cancel_dump_traceback_later()
assert type(faulthandler.dump_traceback_later).__name__ == "builtin_function_or_method"
""",
            arguments=[str(start.tmp_path / "own")],
        ),
        deadman_s=0.15,
    )
    outcome = rank.finish()
    assert outcome.code == 0, outcome


def test_a_script_that_enables_faulthandler_has_its_way(start: Any) -> None:
    argv = start.script("import faulthandler, ctypes\nfaulthandler.enable()\nctypes.string_at(0)")
    outcome = start.cold(argv).finish()
    assert "Segmentation fault" in outcome.stderr
    argv = start.script("import ctypes\nctypes.string_at(0)")
    assert "Segmentation fault" in start.cold(argv, start.environment({"PYTHONFAULTHANDLER": "1"})).finish().stderr


# -- the socket --------------------------------------------------------------------------------------------------------
HELD = """
import os, sys, threading
from steadyrun import watch
watch.step(4)
def held():
    with watch.section("hold"):
        os.read(0, 1) or threading.Event().wait()
held()
"""


def test_the_socket_answers_with_sections_and_stacks(start: Any) -> None:
    rank = start.cold(start.script(HELD))
    rank.wait_until(has_socket(rank), "the socket")
    rank.wait_until(lambda: ask(rank.rank_dir, {"cmd": "sections"})["sections"], "the section")
    answer = ask(rank.rank_dir, {"cmd": "sections"})
    assert answer["step"] == 4
    assert [(s["lane"], s["name"]) for s in answer["sections"]] == [(0, "hold")]
    assert 0 <= answer["sections"][0]["age_s"] < 100
    stacks = ask(rank.rank_dir, {"cmd": "stacks"})["stacks"]
    assert [s["is_main"] for s in stacks] == [True]
    assert "held" in [f["function"] for f in stacks[0]["frames"]]
    assert not [f for s in stacks for f in s["frames"] if "steadyrun/watch/evidence" in f["file"]]
    assert (rank.rank_dir / "evidence.sock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("request_", ["", "{", "[]", "null", '{"cmd": "unknown"}', "x" * 100_000, '{"cmd": "inject"}'])
def test_the_socket_survives_any_request(start: Any, request_: str) -> None:
    rank = start.cold(start.script(HELD))
    rank.wait_until(has_socket(rank), "the socket")
    try:
        assert "error" in ask(rank.rank_dir, request_)
    except (BrokenPipeError, ConnectionResetError):
        assert len(request_) > 65536
    assert ask(rank.rank_dir, {"cmd": "sections"})["step"] == 4


def test_a_rank_folder_too_long_for_a_socket_address_is_no_obstacle(start: Any) -> None:
    start.tmp_path = start.tmp_path / ("long" * 30)
    start.tmp_path.mkdir()
    rank = start.cold(start.script(HELD))
    assert len(str(rank.rank_dir)) > 108
    rank.wait_until(has_socket(rank), "the socket")


def test_the_scripts_threads_and_signals_are_its_own(start: Any) -> None:
    rank = start.cold(
        start.script("""
import signal, sys, threading, os
from steadyrun import watch
mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
watch.step(0)
assert [t.name for t in threading.enumerate()] == ["MainThread"]
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
got = []
signal.signal(signal.SIGUSR1, lambda *a: got.append(threading.current_thread().name))
for _ in range(50):
    os.kill(os.getpid(), signal.SIGUSR1)
while len(got) < 1:
    pass
assert set(got) == {"MainThread"}
def blocked(thread):
    with open(f"/proc/self/task/{thread}/status") as file:
        return [int(line.split()[1], 16) for line in file if line.startswith("SigBlk")][0]
others = [t for t in os.listdir("/proc/self/task") if int(t) != os.getpid()]
assert others and all(blocked(t) & 1 << signal.SIGTERM - 1 for t in others)
pid = os.fork()
if pid == 0:
    names = [f"/proc/self/fd/{f}" for f in os.listdir("/proc/self/fd")]
    os._exit(sum(os.readlink(name).startswith("socket:") for name in names if os.path.lexists(name)))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("fine")
""")
    )
    outcome = rank.finish()
    assert outcome.stdout == "fine\n", outcome


# -- faults ------------------------------------------------------------------------------------------------------------
STEPS = """
from steadyrun import watch
import itertools
for i in itertools.count():
    watch.step(i)
"""


def test_a_fault_of_the_setup_strikes_at_its_step(start: Any) -> None:
    rank = start.cold(start.script(STEPS), faults="exit code=7 step=5 rank=3 attempt=2")
    assert rank.finish().code == 7
    assert rank.view().step == 5


@pytest.mark.parametrize(
    ("faults", "code", "says"),
    [
        ("exit code=7 step=start attempt=2", 7, ""),
        ("kill step=start attempt=any", -9, ""),
        ("no such fault", 0, "steadyrun: no faults: "),
        ("kill rank=0 step=start attempt=2", 0, ""),
    ],
)
def test_a_fault_at_the_start_ends_the_rank_as_the_script_would(start: Any, faults: str, code: int, says: str) -> None:
    rank = start.cold(start.script("print('ran')"), faults=faults)
    outcome = rank.finish()
    assert outcome.code == code, outcome
    assert outcome.stdout == ("ran\n" if code == 0 else "")
    assert says in outcome.stderr


def test_a_fault_is_injected_over_the_socket(start: Any) -> None:
    rank = start.cold(start.script(STEPS))
    rank.wait_until(has_socket(rank), "the socket")
    answer = ask(rank.rank_dir, {"cmd": "inject", "fault": "exit code=9"})
    assert len(answer["answers"]) == 1
    assert rank.finish().code == 9


def test_a_fault_that_is_none_is_answered_with_the_reason(start: Any) -> None:
    rank = start.cold(start.script(STEPS))
    rank.wait_until(has_socket(rank), "the socket")
    assert "kil" in ask(rank.rank_dir, {"cmd": "inject", "fault": "kil step=3"})["error"]
    assert rank.process.poll() is None


def test_paths_are_where_the_run_folder_says(start: Any) -> None:
    folder = RunFolder(start.tmp_path)
    assert folder.socket(2, 3).name == "evidence.sock"
    assert folder.stacks(2, 3).name == "stacks.txt"
    assert folder.exception(2, 3).name == "exception.json"


# -- cost --------------------------------------------------------------------------------------------------------------
FILTERED = """
import ctypes, gc, os, struct
from steadyrun import watch

def work():
    for i in range(2000):
        with watch.section("outer"), watch.section("inner"):
            watch.beat()
        watch.step(i)
        watch.should_stop()
        {call}

work()
gc.disable()
# futex: the interpreter's own hand-over of its lock, when another thread of this process wants it at that moment.
write, leave, futex = {{"x86_64": (1, 231, 202), "aarch64": (64, 94, 98)}}[os.uname().machine]
program = b"".join(
    struct.pack("HBBI", *line)
    for line in (
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 3, 0, write),
        (0x15, 2, 0, leave),
        (0x15, 1, 0, futex),
        (0x06, 0, 0, 0x80000000),  # end the process
        (0x06, 0, 0, 0x7FFF0000),  # allow
    )
)
buffer = ctypes.create_string_buffer(program)
header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)))
libc = ctypes.PyDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, header, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
work()
os._exit(7)
"""


@pytest.mark.parametrize(("call", "code"), [("", 7), ("os.getppid()", -signal.SIGSYS)])
def test_sections_steps_and_beats_make_no_system_call(start: Any, call: str, code: int) -> None:
    """The kernel ends the process at any call but write, exit and futex, as the second case shows."""
    rank = start.cold(start.script(FILTERED.format(call=call)))
    assert rank.finish().code == code
    assert rank.view().steps_done in (4000, 2001)
