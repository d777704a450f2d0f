"""Real flight recorders of real ranks: the socket, the live file, dumps on request and at an exception."""

from __future__ import annotations

import http.client
import json
import os
import pickle
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

LAUNCHERS = {"TORCH_FR_BUFFER_SIZE": "300", "TORCH_FR_DUMP_TEMP_FILE": "/nowhere/ours_"}


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def handler(rank_dir: Path, name: str, timeout_s: float = 30.0) -> bytes:
    """What a handler of torch's server answers."""
    folder = os.open(rank_dir, os.O_PATH)
    connection = _Unix(f"/proc/self/fd/{folder}/flight.sock", timeout_s)
    try:
        connection.request("POST", f"/handler/{name}")
        answer = connection.getresponse()
        assert answer.status == 200, answer.status
        return answer.read()
    finally:
        connection.close()
        os.close(folder)


def ask(rank_dir: Path, request: object) -> Any:
    """One request to the rank's own thread."""
    folder = os.open(rank_dir, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        try:
            client.connect(f"/proc/self/fd/{folder}/evidence.sock")
        finally:
            os.close(folder)
        client.sendall(json.dumps(request).encode() + b"\n")
        with client.makefile() as file:
            return json.loads(file.readline())


def live(rank: Any) -> Any:
    path = rank.rank_dir / "flight.json"
    return json.loads(path.read_text()) if path.exists() else {}


def sites(dump: Path) -> set[tuple[str, str]]:
    """(operation, innermost function of the script) of a dump's entries."""
    entries = pickle.loads(dump.read_bytes())["entries"]
    found = set()
    for entry in entries:
        own = [f["name"] for f in entry["frames"] if f["filename"].endswith("script.py")]
        found.add((entry["profiling_name"], own[0]))
    return found


PRELUDE = """
import os, sys, time, atexit
import torch, torch.distributed as dist
folder = sys.argv[1]
def gate(name):
    open(folder + "/at_" + name, "w").close()
    with open(folder + "/" + name) as fifo:  # until the test opens it for writing
        fifo.read()
def tasks():
    return len(os.listdir("/proc/self/task"))
def reduce():
    dist.all_reduce(torch.ones(3))
"""
ABORTED = "terminate called without an active exception\n"
HELD = """
print("threads before a group:", tasks())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
reduce()
gate("one")
pair = dist.new_group([0], group_desc="pair")
dist.barrier(group=pair)
os.environ["TORCH_FR_DUMP_TEMP_FILE"] = "/nowhere/theirs_"
gate("two")
import ctypes
fd = os.open(folder + "/held", os.O_RDWR)
open(folder + "/at_held", "w").close()
ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1)  # holds the interpreter's lock
atexit.register(lambda: print("imported:", "torch._inductor" in sys.modules))
raise ValueError("enough")
"""


def gates(folder: Path, *names: str) -> None:
    for name in names:
        os.mkfifo(folder / name)


def open_gate(folder: Path, name: str) -> None:
    (folder / name).open("w").close()


@pytest.mark.deadline(300)
def test_a_ranks_recorders_are_within_reach_until_it_dies(start: Any, tmp_path: Path) -> None:
    gates(tmp_path, "one", "two", "held")
    argv = [*start.script(PRELUDE + HELD), str(tmp_path)]
    rank = start.cold(argv, start.environment(LAUNCHERS), flight=LAUNCHERS)
    rank.wait_until((tmp_path / "at_one").exists, "a group")
    told = rank.wait_until(lambda: live(rank).get("groups") and live(rank), "live file")
    assert (told["pid"], told["rank"], told["buffer_size"]) == (rank.process.pid, 3, 300)
    assert told["groups"] == [{"name": "0", "desc": "default_pg", "ranks": [0], "backend": "gloo"}]
    assert told["dump_prefix"] == "/nowhere/ours_"
    assert "gloo" in told["recorders"]
    assert told["server"] == "flight.sock"
    assert (rank.rank_dir / "flight.sock").stat().st_mode & 0o777 == 0o600
    assert json.loads(handler(rank.rank_dir, "fr_trace_json"))["entries"][0]["profiling_name"] == "gloo:all_reduce"

    open_gate(tmp_path, "one")
    rank.wait_until((tmp_path / "at_two").exists, "a second group")
    told = rank.wait_until(lambda: len(live(rank)["groups"]) == 2 and live(rank), "the second group in the live file")
    assert told["groups"][1]["desc"] == "pair"
    rank.wait_until(lambda: live(rank)["dump_prefix"] == "/nowhere/theirs_", "the new prefix in the live file")
    assert ask(rank.rank_dir, {"cmd": "groups"})["groups"] == told["groups"]
    answer = ask(rank.rank_dir, {"cmd": "flight", "stacks": True})
    assert answer["missing"] == []
    assert "flight.gloo.pickle" in answer["files"]
    assert sites(rank.rank_dir / "flight.gloo.pickle") == {("gloo:all_reduce", "reduce"), ("gloo:barrier", "<module>")}
    assert (rank.rank_dir / "flight.gloo.pickle").stat().st_mode & 0o777 == 0o600
    assert "frames" not in _first_without_stacks(rank)

    open_gate(tmp_path, "two")
    rank.wait_until((tmp_path / "at_held").exists, "a held lock")
    assert len(json.loads(handler(rank.rank_dir, "fr_trace_json"))["entries"]) == 2
    with (tmp_path / "held").open("w") as fifo:
        fifo.write("x")
    outcome = rank.finish()
    assert outcome.code == 1
    assert outcome.stdout == "threads before a group: 1\nimported: False\n"
    assert "WorkerServer" not in outcome.stderr, outcome.stderr
    at_death = rank.rank_dir / "flight.gloo.exception.pickle"
    assert sites(at_death) == {("gloo:all_reduce", "reduce"), ("gloo:barrier", "<module>")}


def _first_without_stacks(rank: Any) -> Any:
    ask(rank.rank_dir, {"cmd": "flight", "stacks": False})
    return pickle.loads((rank.rank_dir / "flight.gloo.pickle").read_bytes())["entries"][0]


FORKING = """
os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = "/nowhere/theirs_"  # as a framework does, by the old name
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
reduce()
print(os.environ.get("TORCH_FR_DUMP_TEMP_FILE"), os.environ["TORCH_FR_BUFFER_SIZE"])
def bound():
    import socket
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as s:
                found.append(str(s.getsockname()).endswith("flight.sock"))
        except OSError:
            pass
    return any(found)
pid = os.fork()
if pid == 0:
    os._exit(3 if bound() else 0)  # as multiprocessing ends its children; torch's gloo survives no other end
print("child", os.waitpid(pid, 0)[1], "parent", bound(), flush=True)
gate("one")
"""


@pytest.mark.deadline(300)
def test_a_warm_rank_in_a_deep_folder_forks_and_gives_way_to_a_framework(start: Any, tmp_path: Path) -> None:
    gates(tmp_path, "one")
    argv = [*start.script(PRELUDE + FORKING), str(tmp_path)]
    rank = start.standby(argv, start.environment(), preload=["torch", "torch.distributed"])
    rank.wait_ready()
    rank.rank_dir = rank.rank_dir / ("d" * 100)
    rank.rank_dir.mkdir(mode=0o700)
    rank.order(start.orders(rank, start.environment(LAUNCHERS), flight=LAUNCHERS))
    rank.wait_until((tmp_path / "at_one").exists, "a group")
    told = rank.wait_until(lambda: live(rank), "live file")
    assert told["dump_prefix"] == "/nowhere/theirs_"
    assert told["server"] == "flight.sock"
    assert handler(rank.rank_dir, "ping")
    assert ask(rank.rank_dir, {"cmd": "flight", "stacks": True})["missing"] == []
    open_gate(tmp_path, "one")
    outcome = rank.finish()
    assert (outcome.code, outcome.stdout) == (0, "None 300\nchild 0 parent True\n"), outcome


@pytest.mark.deadline(300)
@pytest.mark.parametrize("is_on", [True, False])
def test_without_a_group_or_switched_off_a_rank_is_left_alone(start: Any, tmp_path: Path, is_on: bool) -> None:
    group = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)\nreduce()\n'
    script = PRELUDE + ("" if is_on else group) + 'print("threads", tasks() - BASE)\nraise ValueError\n'
    # With a group gloo has a thread of its own.
    script = script.replace("BASE", "1" if is_on else str(_threads_of_gloo(start, group)))
    rank = start.cold([*start.script(script), str(tmp_path)], flight={} if is_on else None)
    assert rank.finish().stdout == "threads 0\n"
    assert not [p for p in rank.rank_dir.iterdir() if p.name.startswith("flight")]


def _threads_of_gloo(start: Any, group: str) -> int:
    script = start.script(PRELUDE + group + "print(tasks())\n", name="plain.py")
    return int(start.plain([*script, "/"], start.environment()).stdout)


@pytest.mark.deadline(300)
def test_ctrl_c_writes_no_dump_and_a_hook_of_the_scripts_own_does(start: Any, tmp_path: Path) -> None:
    body = PRELUDE + 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)\nreduce()\n'
    interrupted = start.cold([*start.script(body + "raise KeyboardInterrupt\n"), str(tmp_path)], flight={})
    interrupted.finish()
    assert (interrupted.rank_dir / "exception.json").exists()
    assert not list(interrupted.rank_dir.glob("flight.*.exception.pickle"))
    hooked = body + "sys.excepthook = lambda *a: None\nraise ValueError\n"
    rank = start.cold([*start.script(hooked, name="hooked.py"), str(tmp_path)], flight={})
    outcome = rank.finish()
    # Plain torch, too, aborts in some of a hundred exits with an open group, when its threads outlive what they use.
    assert outcome.code == 1 or (outcome.code, outcome.stderr) == (-signal.SIGABRT, ABORTED), outcome
    assert (rank.rank_dir / "flight.gloo.exception.pickle").exists()
