"""Command line, environment and log files of a rank, as torchrun has them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from steadyrun.launcher.env import (
    Destination,
    JobFacts,
    LogRules,
    RankCommand,
    RecorderRules,
    RoleRank,
    TorchRankLauncher,
    can_make_pipes,
    interpreter_flags,
    recorder_variables,
    without_in_rank_side,
)
from steadyrun.node.ports import Membership


# -- interpreter flags -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("orig_argv", "flags"),
    [
        (["python", "-m", "steadyrun.launcher", "-O"], ()),
        (["python", "-O", "-m", "steadyrun.launcher"], ("-O",)),
        (["python", "-OO", "/bin/steadyrun", "-X"], ("-O", "-O")),
        (
            ["python", "-X", "importtime", "-Xdev", "-W", "error", "/bin/steadyrun"],
            ("-Ximporttime", "-Xdev", "-Werror"),
        ),
        (["python", "-uOm", "steadyrun.launcher"], ("-O",)),
        (["python", "-I", "-E", "-s", "-S", "-P", "-B", "x.py"], ("-B",)),
        (["python", "--check-hash-based-pycs", "always", "x.py"], ("--check-hash-based-pycs", "always")),
        (["python", "-c", "pass", "-O"], ()),
        (["python"], ()),
    ],
)
def test_flags_of_the_launchers_interpreter_are_handed_on(orig_argv: list[str], flags: tuple[str, ...]) -> None:
    assert interpreter_flags(orig_argv) == flags


# -- command -----------------------------------------------------------------------------------------------------------
def command(*args: str, entrypoint: str = sys.executable, environ: Mapping[str, str] | None = None) -> RankCommand:
    return RankCommand.of(entrypoint, args, ["python", "-O", "/bin/steadyrun"], environ or {})


def test_a_script_is_started_as_torchrun_starts_it() -> None:
    c = command("-u", "train.py", "--x")
    assert c.argv(0) == (sys.executable, "-O", "-u", "train.py", "--x")
    assert (c.script, c.is_python, c.can_stand_by) == ("train.py", True, True)


def test_a_module_is_named_by_its_name() -> None:
    assert command("-u", "-m", "my.train", "-v").script == "my.train"


def test_local_rank_is_put_in() -> None:
    assert command("-u", "t.py", "--local-rank=${local_rank}", "$HOME").argv(3)[-2:] == ("--local-rank=3", "$HOME")


def test_a_program_that_is_no_python_is_not_observed() -> None:
    c = command("a", entrypoint="./run.sh")
    assert (c.script, c.is_python, c.can_stand_by, c.argv(0)) == ("./run.sh", False, False, ("./run.sh", "a"))


def test_python_exec_is_observed_without_standbys() -> None:
    c = command("-u", "t.py", entrypoint="/opt/py", environ={"PYTHON_EXEC": "/opt/py"})
    assert (c.is_python, c.can_stand_by, c.flags, c.script) == (True, False, (), "t.py")


def test_code_on_the_command_line_has_no_standby() -> None:
    assert not command("-u", "-c", "pass").can_stand_by


# -- environment -------------------------------------------------------------------------------------------------------
@dataclass
class Dest:
    stdouts: dict[int, str] = field(default_factory=lambda: {0: "", 1: ""})
    stderrs: dict[int, str] = field(default_factory=lambda: {0: "", 1: ""})
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=lambda: {0: "/l/0/error.json", 1: "/l/1/error.json"})
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class Logs:
    def __init__(self, dest: Dest) -> None:
        self.dest = dest
        self.asked: list[str] = []

    def reify(self, envs: dict[int, dict[str, str]]) -> Dest:
        self.asked.append(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        for local_rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = self.dest.error_files[local_rank]
        return self.dest


MEMBERSHIP = Membership("e", 1, 2, 4, (2, 3), 0, None, lambda attempt: ("", 0))  # type: ignore[arg-type]


class World:
    def __init__(self, **changes: Any) -> None:
        self.dest = changes.pop("dest", Dest())
        self.logs = Logs(self.dest)
        self.told: list[Mapping[int, tuple[Destination, Destination]]] = []
        rules = changes.pop("rules", LogRules(True, True))
        cmd = changes.pop("command", command("-u", "train.py"))
        facts = {
            "run_id": "job",
            "node": "n1",
            "role": "default",
            "local_world_size": 2,
            "max_restarts": 0,
            "use_agent_store": True,
            "virtual_local_rank": False,
            "environ": {"HOME": "/root"},
            "site_dir": Path("/site"),
            **changes,
        }
        self.launcher = TorchRankLauncher(
            JobFacts(**facts), cmd, self.logs, rules, lambda argv, lr: argv, lambda d, _: self.told.append(d)
        )
        self.launcher.set_roles({0: RoleRank(2, 4), 1: RoleRank(3, 4)})

    def spec(self, local_rank: int = 0, attempt: int = 0) -> Any:
        setup = {"rank_dir": f"/run/attempts/{attempt}/rank_{local_rank + 2}", "slot": local_rank}
        return self.launcher.spec_for(local_rank + 2, local_rank, attempt, MEMBERSHIP, "host", 4711, setup)


def test_a_rank_has_torchruns_variables_and_inherits_the_rest() -> None:
    env = World().spec(attempt=3).env
    expected = {
        "HOME": "/root",
        "RANK": "2",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "1",
        "ROLE_RANK": "2",
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCHELASTIC_ERROR_FILE": "/l/0/error.json",
    }
    assert {k: v for k, v in env.items() if not k.startswith(("STEADYRUN", "PYTHONPATH"))} == expected
    assert env["STEADYRUN_RUN"] == "job:n1"


@pytest.mark.parametrize("before", [None, "", "/a:/b"])
def test_the_way_in_leaves_pythonpath_as_it_was(before: str | None) -> None:
    environ = {} if before is None else {"PYTHONPATH": before}
    world = World(environ=environ)
    spec = world.spec()
    assert spec.env["PYTHONPATH"] == ("/site:/a:/b" if before else "/site")
    assert spec.env.get("STEADYRUN_PYTHONPATH") == before
    assert json.loads(spec.env["STEADYRUN_SETUP"])["slot"] == 0
    orders = world.launcher.orders_for(spec, {"slot": 0})
    assert orders["env"].get("PYTHONPATH") == before
    assert not {"STEADYRUN_SETUP", "STEADYRUN_PYTHONPATH", "STEADYRUN_STANDBY"} & set(orders["env"])
    assert orders["env"]["RANK"] == "2"
    assert (orders["setup"], orders["cwd"]) == ({"slot": 0}, os.getcwd())
    assert orders["stdout"] == "/run/attempts/0/rank_2/stdout.log"


def test_variables_of_an_outer_run_are_not_handed_down() -> None:
    outer = {"STEADYRUN_SETUP": "{}", "STEADYRUN_STANDBY": "{}", "STEADYRUN_RUN": "outer:n", "STEADYRUN_FAULTS": "x"}
    env = World(environ=outer, command=command(entrypoint="./prog")).spec().env
    assert "STEADYRUN_SETUP" not in env
    assert "STEADYRUN_STANDBY" not in env
    assert (env["STEADYRUN_RUN"], env["STEADYRUN_FAULTS"]) == ("job:n1", "x")


def test_a_program_that_is_no_python_keeps_its_pythonpath() -> None:
    spec = World(environ={"PYTHONPATH": "/a"}, command=command(entrypoint="./prog")).spec()
    assert spec.env["PYTHONPATH"] == "/a"
    assert without_in_rank_side(spec.env)["PYTHONPATH"] == "/a"


def test_a_standby_has_the_same_command_line_and_no_rank() -> None:
    world = World()
    standby = world.launcher.standby_spec(1, {"preload": ["torch"]})
    assert standby.argv == world.spec(1).argv
    assert json.loads(standby.env["STEADYRUN_STANDBY"]) == {"preload": ["torch"]}
    assert "RANK" not in standby.env
    assert standby.env["LOCAL_RANK"] == "1"


def test_virtual_local_rank_sees_one_device() -> None:
    env = World(virtual_local_rank=True, environ={"CUDA_VISIBLE_DEVICES": "4, 7"}).spec(1).env
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", "7")
    env = World(virtual_local_rank=True).spec(1).env
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    with pytest.raises(ValueError, match="local rank 1 has no device"):
        World(virtual_local_rank=True, environ={"CUDA_VISIBLE_DEVICES": "4"}).spec(1)


# -- logs --------------------------------------------------------------------------------------------------------------
def test_each_attempts_folders_are_made_once_and_by_its_own_number() -> None:
    world = World()
    for local_rank, attempt in ((0, 0), (1, 0), (0, 5), (1, 5)):
        world.spec(local_rank, attempt)
    assert world.logs.asked == ["0", "5"]
    assert len(world.told) == 2
    assert world.launcher.error_file(0, 1) == "/l/1/error.json"
    assert world.launcher.error_file(9, 1) == ""


def test_without_log_options_output_goes_to_the_run_folder_and_the_console() -> None:
    world = World()
    spec = world.spec(1)
    assert (spec.stdout, spec.stderr) == (
        Path("/run/attempts/0/rank_3/stdout.log"),
        Path("/run/attempts/0/rank_3/stderr.log"),
    )
    assert world.told[0][1] == (Destination(spec.stdout, True), Destination(spec.stderr, True))


def test_without_capture_a_rank_writes_to_the_console_itself() -> None:
    spec = World(rules=LogRules(False, True)).spec()
    assert spec.stdout is None
    assert spec.stderr is not None


def test_redirect_and_tee_are_honoured() -> None:
    dest = Dest(stdouts={0: "/l/0/stdout.log", 1: "/l/1/stdout.log"}, tee_stdouts={1: "/l/1/stdout.log"})
    world = World(dest=dest, rules=LogRules(False, False))
    world.spec()
    out = {local_rank: pair[0] for local_rank, pair in world.told[0].items()}
    assert out[0] == Destination(Path("/l/0/stdout.log"), follow=False)
    assert out[1] == Destination(Path("/l/1/stdout.log"), follow=True, prefix="[default1]:")
    followed = {r: tuple(d.path if d.follow else None for d in pair) for r, pair in world.told[0].items()}
    assert followed == {0: (None, None), 1: (Path("/l/1/stdout.log"), None)}


def test_the_prefix_of_tee_can_be_given() -> None:
    dest = Dest(stdouts={0: "/o", 1: "/p"}, tee_stdouts={0: "/o", 1: "/p"})
    world = World(dest=dest, rules=LogRules(False, False, "[${role_name} ${rank}/${local_rank}] "))
    world.spec()
    assert world.told[0][1][0].prefix == "[default 3/1] "


def test_a_rank_that_is_filtered_out_is_kept_but_not_shown() -> None:
    dest = Dest(stdouts={0: "", 1: os.devnull})
    world = World(dest=dest)
    world.spec()
    assert world.told[0][1][0] == Destination(Path("/run/attempts/0/rank_3/stdout.log"), follow=False)
    silent = World(dest=dest, rules=LogRules(False, False))
    assert silent.spec(1).stdout == Path(os.devnull)


# -- flight recorders --------------------------------------------------------------------------------------------------
PIPE = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/a/rank_2/flight.request_"}


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (
            (2, 7),
            {
                "TORCH_NCCL_TRACE_BUFFER_SIZE": "700",
                "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/a/rank_2/watchdog_trace_rank_",
                "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            },
        ),
        (
            (2, 8),
            {
                "TORCH_FR_BUFFER_SIZE": "700",
                "TORCH_FR_DUMP_TEMP_FILE": "/a/rank_2/watchdog_trace_rank_",
                "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            },
        ),
        (
            (2, 15),
            {
                "TORCH_FR_BUFFER_SIZE": "700",
                "TORCH_FR_DUMP_TEMP_FILE": "/a/rank_2/watchdog_trace_rank_",
                "TORCH_FR_DUMP_ON_TIMEOUT": "1",
            },
        ),
    ],
)
def test_recorders_are_told_by_the_names_that_this_torch_knows(
    version: tuple[int, int], expected: dict[str, str]
) -> None:
    rules = RecorderRules(entries=700, torch_version=version)
    assert recorder_variables(rules, {"HOME": "/root"}, Path("/a/rank_2"), True) == {**expected, **PIPE}
    assert recorder_variables(rules, {}, Path("/a/rank_2"), False) == expected


def test_what_the_user_has_set_by_either_name_stays() -> None:
    user = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_FR_DUMP_TEMP_FILE": "/mine",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "",
    }
    rules = RecorderRules(has_timing=True, torch_version=(2, 15))
    assert recorder_variables(rules, user, Path("/a"), True) == {"TORCH_NCCL_ENABLE_TIMING": "1"}
    assert recorder_variables(rules, {**user, "TORCH_NCCL_ENABLE_TIMING": "0"}, Path("/a"), True) == {}


def test_each_attempt_has_a_prefix_of_its_own_and_the_rank_knows_what_is_ours(tmp_path: Path) -> None:
    world = World(recorder=RecorderRules(torch_version=(2, 13)), environ={"TORCH_FR_BUFFER_SIZE": "5"})
    for attempt in (0, 1):
        rank_dir = tmp_path / str(attempt) / "rank_3"
        rank_dir.mkdir(parents=True)
        setup = {"rank_dir": str(rank_dir), "slot": 1, "rank": 3}
        spec = world.launcher.spec_for(3, 1, attempt, MEMBERSHIP, "host", 4711, setup)
        ours = {
            "TORCH_FR_DUMP_TEMP_FILE": f"{rank_dir}/watchdog_trace_rank_",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{rank_dir}/flight.request_",
        }
        assert {k: v for k, v in spec.env.items() if k.startswith("TORCH_") and "ASYNC" not in k} == {
            **ours,
            "TORCH_FR_BUFFER_SIZE": "5",
        }
        assert json.loads(spec.env["STEADYRUN_SETUP"])["flight"] == ours
        orders = world.launcher.orders_for(spec, setup)
        assert orders["setup"]["flight"] == ours
        assert orders["env"]["TORCH_FR_DUMP_TEMP_FILE"] == ours["TORCH_FR_DUMP_TEMP_FILE"]


def test_switched_off_the_recorders_are_the_scripts_own() -> None:
    spec = World(recorder=None).spec()
    assert [k for k in spec.env if k.startswith(("TORCH_FR", "TORCH_NCCL"))] == ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    assert "flight" not in json.loads(spec.env["STEADYRUN_SETUP"])


def test_a_folder_is_asked_whether_it_can_have_pipes(tmp_path: Path) -> None:
    assert can_make_pipes(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not can_make_pipes(tmp_path / "gone")
