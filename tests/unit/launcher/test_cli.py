"""The command line: our options beside torchrun's, files of options, messages, and what a failure looks like."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steadyrun import launcher
from steadyrun.core.classes import Mode
from steadyrun.core.errors import ConfigError
from steadyrun.core.options import OPTIONS, REPLACED, Resolved
from steadyrun.launcher import cli
from steadyrun.launcher import main as main_module
from steadyrun.launcher.cli import format_config, get_args_parser, resolve_args


def resolved(*argv: str, environ: dict[str, str] | None = None) -> Resolved:
    return resolve_args(get_args_parser().parse_args([*argv, "train.py"]), environ or {})


def usage_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as e:
        get_args_parser().parse_args(argv)
    assert e.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("steadyrun: error: ")
    assert "Traceback" not in text
    return text


def test_both_spellings_of_a_flag_are_taken() -> None:
    assert resolved("--ft-step-timeout=3").settings.step_timeout == 3.0
    assert resolved("--ft-step_timeout", "4").settings.step_timeout == 4.0


def test_the_origin_is_the_flag_as_written() -> None:
    assert resolved("--ft-run_dir", "x").origins["run_dir"] == "--ft-run_dir"


def test_options_behind_the_script_belong_to_the_script() -> None:
    args = get_args_parser().parse_args(["train.py", "--ft-mode", "observe", "--ft-nonsense"])
    assert args.training_script_args == ["--ft-mode", "observe", "--ft-nonsense"]
    assert resolve_args(args, {}).settings.mode is Mode.ACT


def test_a_namespace_of_torchs_own_parser_is_taken() -> None:
    from torch.distributed.run import get_args_parser as torchs

    args = torchs().parse_args(["train.py"])
    assert resolve_args(args, {"PET_FT_MODE": "observe"}).settings.mode is Mode.OBSERVE


def test_an_unknown_flag_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--ft-mod is not an option of steadyrun; did you mean --ft-mode?" in usage_error(
        capsys, "--ft-mod=x", "t.py"
    )
    assert "--ft-step-timeot" in usage_error(capsys, "--ft-step-timeot", "3", "t.py")


def test_our_options_cannot_be_abbreviated_and_torchs_can(capsys: pytest.CaptureFixture[str]) -> None:
    usage_error(capsys, "--ft-stand", "off", "t.py")
    assert get_args_parser().parse_args(["--max-r", "2", "t.py"]).max_restarts == 2
    assert "ambiguous" in usage_error(capsys, "--nproc", "2", "t.py")


def test_a_missing_script_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the training script is missing" in usage_error(capsys, "--standalone")


def test_print_config_needs_no_script_and_takes_no_value() -> None:
    args = get_args_parser().parse_args(["--ft-print-config", "--ft-mode=observe"])
    text = format_config(resolve_args(args, {"PET_FT_RUN_DIR": "/r"}))
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert set(rows) == {o.flag for o in OPTIONS}
    assert rows["--ft-mode"] == ["observe", "--ft-mode"]
    assert rows["--ft-run-dir"] == ["/r", "PET_FT_RUN_DIR"]
    assert rows["--ft-standby"] == ["on", "default"]
    args = get_args_parser().parse_args(["--ft-print-config", "train.py", "x"])
    assert (args.training_script, args.training_script_args) == ("train.py", ["x"])


def test_print_config_as_json() -> None:
    args = get_args_parser().parse_args(["--ft-print-config=json"])
    data = json.loads(format_config(resolve_args(args, {})))
    assert data["schema"] == "steadyrun.config/1"
    assert data["options"]["--ft-step-timeout"] == {"value": "300", "origin": "default"}


def test_options_come_from_a_toml_file(tmp_path: Path) -> None:
    file = tmp_path / "ft.toml"
    file.write_text('mode = "observe"\npreload = ["numpy"]\n[section-timeouts]\nstep = 5\n')
    r = resolved(f"--ft-config={file}")
    assert (r.settings.mode, r.settings.preload, dict(r.settings.section_timeouts)) == (
        Mode.OBSERVE,
        ("numpy",),
        {"step": 5.0},
    )
    assert r.origins["mode"] == f"{file}: mode"
    assert resolved(environ={"PET_FT_CONFIG": str(file)}).settings.mode is Mode.OBSERVE
    assert resolved(f"--ft-config={file}", "--ft-mode=act").settings.mode is Mode.ACT


def test_a_config_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        resolved("--ft-config=/nonexistent/ft.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("mode = ")
    with pytest.raises(ConfigError, match="is not TOML"):
        resolved(f"--ft-config={broken}")


# -- the command line of the NVIDIA resiliency extension ---------------------------------------------------------------
def test_old_and_new_spellings_act() -> None:
    for prefix in ("--ft-param-", "--ft-"):
        r = resolved(
            f"{prefix}rank_section_timeouts=setup:600,step:180,checkpointing:420",
            f"{prefix}rank_out_of_section_timeout=300",
            f"{prefix}initial-rank-heartbeat-timeout",
            "None",
            f"{prefix}log_level=DEBUG",
        )
        s = r.settings
        assert dict(s.section_timeouts) == {"setup": 600.0, "step": 180.0, "checkpointing": 420.0}
        assert (s.out_of_section_timeout, s.log_level, s.setup_timeout) == (300.0, "debug", float("inf"))
        assert r.notes == ()


@pytest.mark.parametrize("name", REPLACED)
def test_options_without_counterpart_are_taken_with_their_value(name: str) -> None:
    r = resolved(f"--ft-{name.replace('_', '-')}", "value", f"--ft-param-{name}=value")
    assert len(r.notes) == 1  # the same option twice


@pytest.mark.parametrize("flag", ["--fault-tol-cfg-path", "--ft-cfg-path", "--ft-cfg_path"])
def test_their_yaml_file_is_read_and_the_command_line_wins(tmp_path: Path, flag: str) -> None:
    file = tmp_path / "ft.yaml"
    file.write_text(
        "a:\n  fault_tolerance:\n    rank_section_timeouts: {step: 9}\n    rank_out_of_section_timeout: null\n"
    )
    r = resolved(flag, str(file))
    assert dict(r.settings.section_timeouts) == {"step": 9.0}
    assert r.settings.out_of_section_timeout == float("inf")
    assert resolved(flag, str(file), "--ft-rank-out-of-section-timeout=4").settings.out_of_section_timeout == 4.0


def test_a_missing_yaml_file_is_an_error_unless_allowed() -> None:
    with pytest.raises(ConfigError, match="--ft-cfg-path: cannot read /nonexistent"):
        resolved("--ft-cfg-path=/nonexistent")
    for flag in ("--ignore-missing-fault-tol-cfg", "--ft-ignore-missing-cfg"):
        assert resolved("--ft-cfg-path=/nonexistent", flag).notes == ()


def test_without_pyyaml_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ft.yaml"
    file.write_text("fault_tolerance: {}")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="pip install pyyaml"):
        resolved(f"--ft-cfg-path={file}")


# -- the package is used as torch's module -----------------------------------------------------------------------------
def test_the_package_has_torchs_names() -> None:
    import torch.distributed.run as torchs

    assert launcher.get_args_parser is cli.get_args_parser
    assert launcher.run is main_module.run
    assert callable(launcher.main)
    assert launcher.parse_min_max_nnodes is torchs.parse_min_max_nnodes
    assert pickle.loads(pickle.dumps(launcher.main)) is launcher.main
    with pytest.raises(AttributeError):
        _ = launcher.no_such_name


# -- what a failure looks like -----------------------------------------------------------------------------------------
def failure(rank: int, exitcode: int, error_file: str = "<N/A>", message: Any = "") -> Any:
    return SimpleNamespace(
        local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file=error_file, message=message, timestamp=0
    )


def failed(failures: dict[int, Any], root: int, **fields: Any) -> Any:
    return SimpleNamespace(
        name="train.py",
        failures=failures,
        get_first_failure=lambda: (root, failures[root]),
        **{"outcome": None, "run_folder": None, **fields},
    )


def test_a_failure_is_told_in_a_few_lines(tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    error_file.write_text("{}")
    error = failed(
        {0: failure(0, -15), 1: failure(1, 3, str(error_file)), 2: failure(2, -9)},
        root=1,
        outcome=SimpleNamespace(
            reason="dead",
            failures={r: SimpleNamespace(by_us=by_us) for r, by_us in {0: True, 1: False, 2: False}.items()},
        ),
        run_folder=Path("/runs/r"),
    )
    lines = main_module.failure_lines(error)
    assert lines[0] == "steadyrun: train.py failed: dead"
    assert lines[1] == "  first: rank 1 (local rank 1, pid 101) ended with exit code 3"
    assert lines[3:] == [
        f"  error file: {error_file}",
        "  after it: rank 0 was ended by steadyrun with SIGTERM; rank 2 was ended by SIGKILL",
        "  more: steadyctl incidents /runs/r",
    ]


def test_a_failed_function_shows_the_traceback_that_its_rank_recorded() -> None:
    message = {"message": "boom", "extraInfo": {"py_callstack": "Traceback\n  f()\nValueError: boom\n"}}
    lines = main_module.failure_lines(failed({0: failure(0, 1, message=message)}, root=0))
    assert lines[-4:] == ["  traceback of the rank:", "    Traceback", "      f()", "    ValueError: boom"]


def test_many_failures_are_cut() -> None:
    lines = main_module.failure_lines(failed({r: failure(r, 1) for r in range(20)}, root=0))
    assert lines[-1].endswith("rank 8 ended with exit code 1; and 11 more")


def test_a_package_of_our_name_beside_the_script_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "steadyrun"
    package.mkdir()
    main_module._refuse_shadowing(str(tmp_path / "train.py"), is_module=False)  # a plain folder joins the namespace
    (package / "__init__.py").touch()
    with pytest.raises(ConfigError, match="hides the installed steadyrun"):
        main_module._refuse_shadowing(str(tmp_path / "train.py"), is_module=False)


def test_other_systems_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="Linux only"):
        main_module._require_linux()
