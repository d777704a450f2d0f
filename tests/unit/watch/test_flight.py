"""The rank's side of the flight recorders, on a torch made of plain objects."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from steadyrun.core.sockets import reachable
from steadyrun.watch.flight import GROUPS_MODULE, FlightWatch
from steadyrun.watch.setup import RankSetup
from steadyrun.watch.torchhooks import around_first_group


class Group:
    def __init__(self, desc: str) -> None:
        self.group_desc = desc


class Torch:
    """What is asked of torch: bindings with recorders, and the groups of this rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = ModuleType("torch")
        self.module.__version__ = "2.13.0+cpu"  # type: ignore[attr-defined]
        self.bindings = ModuleType("torch._C._distributed_c10d")
        self.world = SimpleNamespace(pg_names={}, pg_group_ranks={}, pg_map={}, pg_backend_config={})
        c10d = ModuleType(GROUPS_MODULE)
        c10d._world = self.world  # type: ignore[attr-defined]
        for module in (self.module, self.bindings, c10d):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def add_group(self, name: str, desc: str, ranks: list[int], backend: str) -> Group:
        group = Group(desc)
        self.world.pg_names[group] = name
        self.world.pg_group_ranks[group] = {r: i for i, r in enumerate(ranks)}
        self.world.pg_map[group] = ("undefined", None)
        self.world.pg_backend_config[group] = backend
        return group

    def has(self, name: str, dump: Callable[..., bytes]) -> None:
        setattr(self.bindings, name, dump)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    for name in [n for n in os.environ if n.startswith(("TORCH_", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    return Torch(monkeypatch)


def watch_in(folder: Path, flight: dict[str, str] | None) -> FlightWatch:
    data = {"board": "b", "slot": 1, "rank": 5, "attempt": 2, "rank_dir": str(folder), "flight": flight}
    return FlightWatch(RankSetup(data))


def live(folder: Path) -> Any:
    return json.loads((folder / "flight.json").read_text())


def test_nothing_is_written_without_a_group_and_never_when_it_is_off(tmp_path: Path, torch: Torch) -> None:
    watch_in(tmp_path, {}).look()
    assert list(tmp_path.iterdir()) == []
    torch.add_group("0", "default_pg", [0, 1], "gloo")
    off = watch_in(tmp_path, None)
    off.after_group()
    off.look()
    off.dump_at_exception()
    assert list(tmp_path.iterdir()) == []


def test_the_live_file_follows_the_groups_and_the_variables(
    tmp_path: Path, torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "500")
    torch.add_group("0", "default_pg", [3, 1, 2], "cpu:gloo,cuda:nccl")
    torch.add_group("1", "mesh_tp", [1, 3], "cpu:gloo,cuda:gloo")
    torch.world.pg_names[-100] = "of others"
    flight = watch_in(tmp_path, {})
    flight.look()
    told = live(tmp_path)
    assert (told["schema"], told["rank"], told["local_rank"], told["attempt"], told["world_size"]) == (
        "steadyrun.flight-live/1", 5, 1, 2, 8,
    )  # fmt: skip
    assert told["groups"] == [
        {"name": "0", "desc": "default_pg", "ranks": [1, 2, 3], "backend": "cpu:gloo,cuda:nccl"},
        {"name": "1", "desc": "mesh_tp", "ranks": [1, 3], "backend": "gloo"},
    ]
    assert (told["buffer_size"], told["recorders"], told["stacks_ready"]) == (500, [], False)
    assert told["server"] is None
    assert "_WorkerServer" in told["server_missing"]
    assert told["environ"] == {"TORCH_FR_BUFFER_SIZE": "500"}
    assert (tmp_path / "flight.json").stat().st_mode & 0o777 == 0o600
    inode = (tmp_path / "flight.json").stat().st_ino
    flight.look()
    assert (tmp_path / "flight.json").stat().st_ino == inode

    torch.add_group("2", "", [1, 2], "nccl")
    flight.look()
    assert [g["name"] for g in live(tmp_path)["groups"]] == ["0", "1", "2"]
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/elsewhere/rank_")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "9")
    flight.look()
    assert live(tmp_path)["dump_prefix"] == "/elsewhere/rank_"
    assert live(tmp_path)["buffer_size"] == 500  # torch has read it
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", f"{tmp_path}/request_")
    flight.look()
    assert live(tmp_path)["pipe"] is None
    os.mkfifo(tmp_path / "request_5.pipe")  # as NCCL's heartbeat thread does, some time later
    flight.look()
    assert live(tmp_path)["pipe"] == f"{tmp_path}/request_5.pipe"


@pytest.mark.parametrize(
    ("version", "variables", "size"),
    [
        ("2.13.0+cpu", {}, 2000),
        ("2.10.1", {}, 0),
        ("2.7.0", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "30"}, 30),
        ("2.15.0", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "30", "TORCH_FR_BUFFER_SIZE": "40"}, 40),
        ("2.15.0", {"TORCH_FR_BUFFER_SIZE": "many"}, None),
        ("strange", {}, None),
    ],
)
def test_the_buffers_size_is_what_this_torch_makes_of_the_variables(
    tmp_path: Path, torch: Torch, monkeypatch: pytest.MonkeyPatch, version: str, variables: dict[str, str], size: int
) -> None:
    torch.module.__version__ = version  # type: ignore[attr-defined]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert watch_in(tmp_path, {}).live()["buffer_size"] == size


def test_every_recorder_is_dumped_and_one_that_fails_is_named(tmp_path: Path, torch: Torch) -> None:
    asked: list[tuple[str, bool]] = []

    def legacy(**asked_for: bool) -> bytes:
        """_dump_nccl_trace(...) -> bytes"""
        asked.append(("nccl", asked_for["includeStackTraces"]))
        return b"of nccl"

    def common(backend: str = "gloo", **asked_for: bool) -> bytes:
        """_dump_fr_trace(includeCollectives: bool, includeStackTraces: bool, backend: str = 'gloo') -> bytes"""
        asked.append((backend, asked_for["includeStackTraces"]))
        if backend == "mine":
            raise RuntimeError("no recorder")
        return b"of " + backend.encode()

    torch.has("_dump_nccl_trace", legacy)
    torch.has("_dump_fr_trace", common)
    torch.add_group("0", "", [5], "cpu:gloo,cuda:nccl")
    torch.add_group("1", "", [5], "mine")
    answer = watch_in(tmp_path, {}).dump(stacks=False)
    assert asked == [("nccl", False), ("gloo", False), ("mine", False), ("nccl2", False)]
    assert answer["files"] == ["flight.nccl.pickle", "flight.gloo.pickle", "flight.nccl2.pickle"]
    assert answer["missing"] == ["flight recorder mine: RuntimeError: no recorder"]
    assert (tmp_path / "flight.nccl2.pickle").read_bytes() == b"of nccl2"
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o600}
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*answer["files"], "flight.json"])


def test_before_2_15_there_is_one_recorder_beside_nccls(tmp_path: Path, torch: Torch) -> None:
    def common(**asked_for: bool) -> bytes:
        """_dump_fr_trace(includeCollectives: bool | None = None, includeStackTraces: bool | None = None) -> bytes"""
        return b"x"

    torch.has("_dump_fr_trace", common)
    torch.add_group("0", "", [5], "cpu:gloo,cuda:nccl")
    assert watch_in(tmp_path, {}).live()["recorders"] == ["gloo"]


def test_a_dump_that_cannot_be_had_says_why(tmp_path: Path, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    flight = watch_in(tmp_path / "gone", {"TORCH_FR_BUFFER_SIZE": "0"})
    assert "this torch has none" in flight.dump(stacks=True)["missing"][0]
    torch.has("_dump_fr_trace", lambda **asked_for: b"x")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    flight.after_group()
    off, unwritable = flight.dump(stacks=False)["missing"]
    assert "it is off" in off
    assert unwritable.startswith("flight recorder gloo: FileNotFoundError")
    monkeypatch.delitem(sys.modules, "torch._C._distributed_c10d")
    assert "not imported" in flight.dump(stacks=True)["missing"][0]


def test_call_sites_are_had_without_importing_what_torch_would(
    tmp_path: Path, torch: Torch, monkeypatch: pytest.MonkeyPatch, in_thread: Callable[[Callable[[], None]], None]
) -> None:
    """torch asks hasattr(torch, "_inductor") and imports it by that; others who ask meanwhile get the real one."""
    real = ModuleType("torch._inductor")
    real.codecache = "real"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._inductor", real)
    monkeypatch.setattr(torch.module, "__path__", [], raising=False)
    seen: list[object] = []

    def look_elsewhere() -> None:
        seen.append(vars(torch.module)["_inductor"].codecache)

    def common(**asked_for: bool) -> bytes:
        inductor = vars(torch.module)["_inductor"]
        seen.append(hasattr(inductor, "codecache"))
        in_thread(look_elsewhere)
        return b"x"

    torch.has("_dump_fr_trace", common)
    flight = watch_in(tmp_path, {})
    flight.dump(stacks=True)
    assert seen == [False, "real"]
    assert "_inductor" not in vars(torch.module)

    def imported_meanwhile(**asked_for: bool) -> bytes:
        vars(torch.module)["_inductor"] = real
        return b"x"

    torch.has("_dump_fr_trace", imported_meanwhile)
    flight.dump(stacks=True)
    assert vars(torch.module)["_inductor"] is real
    torch.has("_dump_fr_trace", common)
    flight.dump(stacks=True)
    assert seen[2:] == [True, "real"]  # what is there already is left alone


@pytest.mark.parametrize(("entries", "is_dumped"), [("10000", True), ("10001", False)])
def test_a_dying_rank_is_not_held_up_by_a_huge_recorder(
    tmp_path: Path, torch: Torch, monkeypatch: pytest.MonkeyPatch, entries: str, is_dumped: bool
) -> None:
    torch.has("_dump_fr_trace", lambda **asked_for: b"x")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", entries)
    flight = watch_in(tmp_path, {})
    flight.dump_at_exception()  # no group yet: nothing was recorded
    assert list(tmp_path.iterdir()) == []
    flight.after_group()
    flight.dump_at_exception()
    assert (tmp_path / "flight.gloo.exception.pickle").exists() == is_dumped


def test_what_the_launcher_set_gives_way_to_a_frameworks_old_name(
    tmp_path: Path, torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/ours/rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "20000")  # by the framework, in the rank
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/theirs/rank_")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/theirs_too/rank_")
    flight = watch_in(tmp_path, ours)
    flight.before_group()
    told = flight.live()
    assert (told["buffer_size"], told["dump_prefix"]) == (20000, "/theirs_too/rank_")
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_the_first_group_is_seen_and_torch_is_as_it_was_afterwards() -> None:
    story: list[object] = []
    module = ModuleType("distributed_c10d")

    def original(*args: object, backend: str) -> str:
        story.append((args, backend))
        return "made"

    module._new_process_group_helper = original  # type: ignore[attr-defined]
    around_first_group(lambda: story.append("before"), lambda: story.append("after"))(module)
    made = module._new_process_group_helper
    assert made(1, 2, backend="gloo") == "made"
    assert story == ["before", ((1, 2), "gloo"), "after"]
    assert module._new_process_group_helper is original
    around_first_group(lambda: None, lambda: None)(ModuleType("a torch without it"))


def test_a_socket_is_reachable_in_a_folder_with_a_long_path(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    path, fd = reachable(str(deep), "x.sock")
    try:
        assert len(path) < 107
        (deep / "x.sock").touch()
        assert os.path.exists(path)
    finally:
        os.close(fd)
    assert reachable("/short", "x.sock") == ("/short/x.sock", -1)
