"""The installed torch has what the launcher stands on; when it has not, the message says what moved."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import threading
import types
from typing import Any

import pytest

from steadyrun.core.options import resolve
from steadyrun.launcher import elastic
from steadyrun.launcher.cli import NotGiven, get_args_parser
from steadyrun.launcher.seams import SEAMS, problems_of


@pytest.fixture(scope="module")
def modules() -> dict[str, Any]:
    return {seam.module: importlib.import_module(seam.module) for seam in SEAMS}


def test_nothing_has_moved_in_the_installed_torch() -> None:
    assert elastic.check_seams() == []


@pytest.mark.parametrize("seam", SEAMS, ids=lambda s: s.name)
def test_a_name_that_is_gone_is_named(modules: dict[str, Any], seam: Any) -> None:
    without = {**modules, seam.module: types.SimpleNamespace()}
    assert f"{seam.module}.{seam.name} is gone" in problems_of(without)


def test_a_moved_parameter_is_named(modules: dict[str, Any]) -> None:
    def run(arguments: object) -> None: ...

    changed = types.SimpleNamespace(**{**vars(modules["torch.distributed.run"]), "run": run})
    problems = problems_of({**modules, "torch.distributed.run": changed})
    assert "torch.distributed.run.run takes (arguments), expected (args, ...)" in problems
    assert any("does not call elastic_launch" in p for p in problems)


def test_a_field_that_is_gone_is_named(modules: dict[str, Any]) -> None:
    @dataclasses.dataclass
    class RunResult:
        state: str

    name = "torch.distributed.elastic.agent.server.api"
    changed = types.SimpleNamespace(**{**vars(modules[name]), "RunResult": RunResult})
    assert problems_of({**modules, name: changed}) == [f"{name}.RunResult has no field return_values, failures"]


def test_an_option_of_torch_in_our_namespace_is_named(modules: dict[str, Any]) -> None:
    run = modules["torch.distributed.run"]

    def parser() -> Any:
        out = run.get_args_parser()
        out.add_argument("--ft-new")
        return out

    changed = types.SimpleNamespace(**{**vars(run), "get_args_parser": parser})
    problems = problems_of({**modules, "torch.distributed.run": changed})
    assert problems == ["torchrun's option --ft-new is in the namespace of ours"]


def test_the_agent_can_be_made_where_torch_makes_its_own() -> None:
    theirs = inspect.signature(elastic.LocalElasticAgent.__init__).parameters
    ours = inspect.signature(elastic.SteadyAgent.__init__).parameters
    assert [p for p in theirs if p not in ours] == []
    assert list(ours)[: len(theirs)] == list(theirs)


def test_the_launch_can_be_made_where_torch_makes_its_own(modules: dict[str, Any]) -> None:
    theirs = inspect.signature(modules["torch.distributed.run"].elastic_launch.__init__).parameters
    ours = inspect.signature(elastic.SteadyLaunch.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)


# -- the command line is torchrun's ------------------------------------------------------------------------------------
ARGUMENTS = (
    ["train.py"],
    ["--standalone", "--nproc-per", "2", "train.py", "--nproc-per-node", "9", "--ft-mode", "x"],
    ["--nnodes=1:4", "--nproc_per_node=gpu", "--rdzv_backend", "c10d", "--rdzv-end=h:1", "--rdzv_id", "7", "-m", "a.b"],
    ["--max-restarts", "3", "--role=w", "-r", "3", "-t", "0:1,1:2", "--log-dir", "/x", "s.py", "--", "-x"],
    ["--no-python", "./prog", "--standalone"],
    [
        "--node_rank=1",
        "--master_addr",
        "a",
        "--master-port",
        "1234",
        "--local-addr=b",
        "--monitor-interval",
        "2",
        "s.py",
    ],
)


@pytest.mark.parametrize("argv", ARGUMENTS, ids=lambda a: " ".join(a)[:40])
def test_torchruns_arguments_mean_what_they_mean_there(modules: dict[str, Any], argv: list[str]) -> None:
    theirs = vars(modules["torch.distributed.run"].get_args_parser().parse_args(argv))
    ours = vars(get_args_parser().parse_args(argv))
    assert {k: ours[k] for k in theirs} == theirs


def test_every_option_of_torch_is_ours(modules: dict[str, Any]) -> None:
    def flags(parser: Any) -> set[str]:
        return {option for action in parser._actions for option in action.option_strings}

    assert flags(modules["torch.distributed.run"].get_args_parser()) <= flags(get_args_parser())


def test_pet_variables_count(modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "3")
    monkeypatch.setenv("PET_MAX_RESTARTS", "5")
    args = get_args_parser().parse_args(["s.py"])
    assert (args.nnodes, args.max_restarts) == ("3", 5)
    assert not isinstance(args.max_restarts, NotGiven)


def test_whether_max_restarts_was_given_is_known() -> None:
    assert isinstance(get_args_parser().parse_args(["s.py"]).max_restarts, NotGiven)
    given = get_args_parser().parse_args(["--max-restarts=0", "s.py"]).max_restarts
    assert given == 0
    assert not isinstance(given, NotGiven)


def test_torchs_launch_is_put_back(modules: dict[str, Any]) -> None:
    run = modules["torch.distributed.run"]
    before = run.elastic_launch
    with elastic.launched_by_us(resolve([])):
        assert run.elastic_launch is not before
    assert run.elastic_launch is before


def test_while_one_job_runs_another_thread_may_launch(modules: dict[str, Any]) -> None:
    run = modules["torch.distributed.run"]
    before = run.elastic_launch
    launched = threading.Event()
    with elastic.launched_by_us(resolve([]), launched):
        assert isinstance(run.elastic_launch(config=None, entrypoint=""), elastic.SteadyLaunch)
        assert launched.is_set()
        assert run.elastic_launch is before
        with elastic.launched_by_us(resolve([])):
            assert run.elastic_launch is not before
    assert run.elastic_launch is before
