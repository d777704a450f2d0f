"""Options: one declaration gives flag, environment name, TOML key and docs row; precedence; messages."""

from __future__ import annotations

import dataclasses
import inspect
import math
import signal
from typing import Any

import pytest

from steadyrun.core.classes import Mode
from steadyrun.core.errors import ConfigError
from steadyrun.core.options import (
    ALIASES,
    OPTIONS,
    REPLACED,
    Settings,
    command_line_source,
    environment_source,
    markdown_table,
    nvrx_source,
    resolve,
    toml_source,
)
from steadyrun.launcher.limits import _TIMEOUTS, TIMEOUTS_SCHEMA, limits_of
from steadyrun.node.loop import NodeSpec
from steadyrun.node.machine.events import Limits


def given(**values: Any) -> Any:
    return command_line_source({k: (f"--ft-{k.replace('_', '-')}", v) for k, v in values.items()})


def test_every_option_has_one_declaration_and_all_names_follow_from_it() -> None:
    assert [o.field for o in OPTIONS] == [f.name for f in dataclasses.fields(Settings)]
    for option in OPTIONS:
        assert option.flag == "--ft-" + option.field.replace("_", "-")
        assert option.environment == "PET_FT_" + option.field.upper()
        assert option.help
        assert option.help[-1] in ".)", option


def test_defaults_are_values_that_their_own_kind_accepts() -> None:
    settings = Settings()
    for option in OPTIONS:
        value = getattr(settings, option.field)
        assert value == option.default
        if value is not None:
            assert option.kind.parse(option.kind.show(value)) == value, option.flag


def test_defaults_of_limits_are_those_of_the_watchdog() -> None:
    """The table shows numbers that live in the machine; this keeps them equal."""
    limits = limits_of(resolve([]), Limits().final_grace_s)
    assert limits == Limits()
    assert limits.accepted == frozenset()
    assert {f for f, _ in _TIMEOUTS.values()} < {f.name for f in dataclasses.fields(Limits)}
    node = inspect.signature(NodeSpec).parameters
    assert (Settings().restart_budget, Settings().deadman) == (
        node["restart_budget"].default,
        node["deadman_s"].default,
    )


def test_fixed_names_of_the_design_exist() -> None:
    flags = {o.flag for o in OPTIONS}
    assert {
        "--ft-config",
        "--ft-print-config",
        "--ft-mode",
        "--ft-run-dir",
        "--ft-standby",
        "--ft-preload",
        "--ft-timeouts",
        "--ft-metrics-addr",
    } <= flags


def test_command_line_beats_environment_beats_file_beats_default() -> None:
    file = toml_source({"mode": "observe", "run-dir": "from-file", "restart_budget": 9, "step-timeout": 7}, "ft.toml")
    environment = environment_source({"PET_FT_RUN_DIR": "from-env", "PET_FT_RESTART_BUDGET": "8", "HOME": "/root"})
    result = resolve([given(restart_budget="7"), environment, file])
    s = result.settings
    assert (s.restart_budget, s.run_dir, s.mode, s.step_timeout, s.gather_limit) == (
        7,
        "from-env",
        Mode.OBSERVE,
        7.0,
        15.0,
    )
    assert result.origins["restart_budget"] == "--ft-restart-budget"
    assert result.origins["run_dir"] == "PET_FT_RUN_DIR"
    assert result.origins["mode"] == "ft.toml: mode"
    assert result.origins["gather_limit"] == "default"
    assert result.is_given("mode")
    assert not result.is_given("gather_limit")


def test_an_empty_environment_variable_is_not_set() -> None:
    assert resolve([environment_source({"PET_FT_MODE": "", "PET_FT_STEP_TIMEOUT": ""})]).settings == Settings()


@pytest.mark.parametrize("form", ["mode", "ft-mode", "ft_mode"])
def test_toml_keys_may_carry_the_prefix(form: str) -> None:
    assert resolve([toml_source({form: "observe"}, "f")]).settings.mode is Mode.OBSERVE


def test_toml_takes_natural_types() -> None:
    source = toml_source(
        {
            "standby": False,
            "preload": ["numpy", "my.module"],
            "section-timeouts": {"setup": 600, "step": 1.5},
            "step-timeout": 12.5,
            "quiet": True,
        },
        "f",
    )
    s = resolve([source]).settings
    assert (s.standby, s.preload, s.step_timeout, s.quiet) == (False, ("numpy", "my.module"), 12.5, True)
    assert dict(s.section_timeouts) == {"setup": 600.0, "step": 1.5}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30.0), ("0.5", 0.5), ("500ms", 0.5), ("5m", 300.0), ("2h", 7200.0), ("1 min", 60.0), (".25", 0.25)],
)
def test_seconds_may_have_a_unit(text: str, seconds: float) -> None:
    assert resolve([given(step_timeout=text)]).settings.step_timeout == seconds


@pytest.mark.parametrize("word", ["None", "null", "", "off", "inf", None])
def test_off_words_mean_no_timeout(word: object) -> None:
    assert resolve([given(step_timeout=word)]).settings.step_timeout == math.inf


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("stack_signal", "SIGUSR2", int(signal.SIGUSR2)),
        ("stack_signal", "rtmax-3", int(signal.SIGRTMAX) - 3),
        ("stack_signal", "61", 61),
        ("metrics_addr", "0.0.0.0:9400", "0.0.0.0:9400"),
        ("metrics_addr", "[::1]:9400", "[::1]:9400"),
        ("metrics_addr", "off", ""),
        ("metrics_addr", "127.0.0.1:9400-9415", "127.0.0.1:9400-9415"),
        ("standby", "0", False),
        ("preload", "numpy, transformers.models", ("numpy", "transformers.models")),
    ],
)
def test_values_are_read(field: str, value: str, expected: object) -> None:
    assert getattr(resolve([given(**{field: value})]).settings, field) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "zap"),
        ("standby", "maybe"),
        ("step_timeout", "-3"),
        ("step_timeout", "soon"),
        ("step_timeout", "nan"),
        ("step_timeout", "0"),
        ("step_timeout", "3 parsecs"),
        ("confirm_window", "off"),
        ("confirm_window", "0"),
        ("restart_budget", "-1"),
        ("restart_budget", "2.5"),
        ("section_timeouts", "step"),
        ("section_timeouts", "step:1,step:2"),
        ("section_timeouts", ":5"),
        ("section_timeouts", "step:soon"),
        ("metrics_addr", "9400"),
        ("metrics_addr", "host:99999"),
        ("metrics_addr", "host:9415-9400"),
        ("stack_signal", "SIGKILL"),
        ("stack_signal", "SIGNOPE"),
        ("stack_signal", "900"),
        ("preload", "not-a-module"),
        ("run_dir", " "),
        ("exit_codes", "bash"),
    ],
)
def test_a_value_that_is_not_allowed_names_option_value_and_what_is_allowed(field: str, value: str) -> None:
    with pytest.raises(ConfigError) as e:
        resolve([given(**{field: value})])
    option = next(o for o in OPTIONS if o.field == field)
    assert option.flag in str(e.value)
    assert repr(value) in str(e.value)
    assert option.kind.allowed in str(e.value)


def test_a_wrong_word_comes_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean observe"):
        resolve([given(mode="obseve")])


def test_a_bad_value_in_the_environment_names_the_variable_and_the_option() -> None:
    with pytest.raises(ConfigError, match=r"PET_FT_STEP_TIMEOUT \(--ft-step-timeout\): 'x' is not allowed"):
        resolve([environment_source({"PET_FT_STEP_TIMEOUT": "x"})])


def test_unknown_environment_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"PET_FT_STEP_TIMEOUTS='3'.*did you mean PET_FT_STEP_TIMEOUT"):
        environment_source({"PET_FT_STEP_TIMEOUTS": "3"})
    assert environment_source({"PET_NNODES": "2"}).values == {}


def test_unknown_toml_keys_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"ft\.toml: key 'modus'.*did you mean mode"):
        toml_source({"modus": "observe"}, "ft.toml")
    with pytest.raises(ConfigError, match="'config'"):
        toml_source({"config": "other.toml"}, "ft.toml")


# -- the spellings of the NVIDIA resiliency extension ----------------------------------------------------------------
def test_aliases_act() -> None:
    result = resolve(
        [
            command_line_source(
                {
                    "rank_section_timeouts": (
                        "--ft-param-rank_section_timeouts",
                        "setup:600,step:180,checkpointing:420",
                    ),
                    "rank_out_of_section_timeout": ("--ft-param-rank_out_of_section_timeout", "300"),
                    "initial_rank_heartbeat_timeout": ("--ft-initial-rank-heartbeat-timeout", "None"),
                    "rank_heartbeat_timeout": ("--ft-rank-heartbeat-timeout", "45"),
                }
            )
        ]
    )
    s = result.settings
    assert dict(s.section_timeouts) == {"setup": 600.0, "step": 180.0, "checkpointing": 420.0}
    assert (s.out_of_section_timeout, s.setup_timeout, s.step_timeout) == (300.0, math.inf, 45.0)
    assert result.origins["section_timeouts"] == "--ft-param-rank_section_timeouts"
    assert result.notes == ()


def test_our_spelling_wins_over_an_alias() -> None:
    both = command_line_source(
        {"rank_heartbeat_timeout": ("--ft-rank-heartbeat-timeout", "1"), "step_timeout": ("--ft-step-timeout", "2")}
    )
    assert resolve([both]).settings.step_timeout == 2.0


@pytest.mark.parametrize(("cycles", "budget"), [("3", 2), ("1", 0), ("0", 1000), ("-1", 1000)])
def test_cycles_without_progress_count_the_first_start(cycles: str, budget: int) -> None:
    assert resolve([given(max_no_progress_cycles=cycles)]).settings.restart_budget == budget


def test_options_without_counterpart_are_accepted_with_one_line_each() -> None:
    result = resolve([given(**dict.fromkeys(REPLACED, "1"))])
    assert result.settings == Settings()
    assert len(result.notes) == len(REPLACED)
    for name, note in zip(REPLACED, result.notes, strict=True):
        assert note.startswith(f"--ft-{name.replace('_', '-')} has no effect here: ")


def test_foreign_names_do_not_collide_with_ours() -> None:
    ours = {o.field for o in OPTIONS}
    assert not ours & (set(ALIASES) | set(REPLACED))
    assert set(ALIASES.values()) <= ours


def test_the_yaml_section_is_found_anywhere() -> None:
    data = {
        "trainer": [{"x": 1}, {"fault_tolerance": {"rank_section_timeouts": {"step": 9}, "safety-factor": 5, "zz": 0}}]
    }
    result = resolve([nvrx_source(data, "ft.yaml")])
    assert dict(result.settings.section_timeouts) == {"step": 9.0}
    assert result.origins["section_timeouts"] == "ft.yaml: rank_section_timeouts"
    assert [n.partition(" ")[2].split(" ")[0] for n in result.notes] == ["safety_factor", "zz"]
    with pytest.raises(ConfigError, match="fault_tolerance"):
        nvrx_source({"a": [1, 2]}, "ft.yaml")


# -- limits ----------------------------------------------------------------------------------------------------------
def test_given_limits_are_accepted_and_defaults_are_not() -> None:
    limits = limits_of(resolve([given(step_timeout="20", section_timeouts="setup:600,load:5")]), 30.0)
    assert (limits.step_s, limits.setup_s, limits.sections["load"]) == (20.0, 600.0, 5.0)
    assert limits.accepted == {"step", "setup", "load"}


def test_final_grace_falls_back_to_torchs_option() -> None:
    assert limits_of(resolve([]), 7.0).final_grace_s == 7.0
    assert limits_of(resolve([given(final_grace="3")]), 7.0).final_grace_s == 3.0


def test_timeouts_off_switches_every_limit_off() -> None:
    limits = limits_of(resolve([given(timeouts="off", step_timeout="5")]), 30.0)
    assert {limits.start_s, limits.setup_s, limits.step_s, limits.first_step_s, limits.teardown_s} == {math.inf}
    assert limits.accepted == frozenset()


def test_a_file_of_limits_is_read_and_the_users_own_win(tmp_path: Any) -> None:
    file = tmp_path / "timeouts.json"
    file.write_text(f'{{"schema": "{TIMEOUTS_SCHEMA}", "step": 12, "setup": 100, "sections": {{"load": 3}}}}')
    limits = limits_of(resolve([given(timeouts=str(file), setup_timeout="50")]), 30.0)
    assert (limits.setup_s, dict(limits.sections)) == (50.0, {"load": 3.0, "step": 12.0})
    assert limits.step_s == Limits().step_s  # for the first steps after a start
    assert limits.accepted == {"step", "setup", "load"}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"schema": "other"}', '{"schema": "steadyrun.timeouts/1", "sectoins": {}}']
)
def test_a_file_that_is_not_one_of_limits_is_refused(tmp_path: Any, text: str) -> None:
    file = tmp_path / "timeouts.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--ft-timeouts"):
        limits_of(resolve([given(timeouts=str(file))]), 30.0)


def test_the_docs_table_has_one_row_per_option() -> None:
    rows = markdown_table().splitlines()
    assert len(rows) == len(OPTIONS) + 2
    for option, row in zip(OPTIONS, rows[2:], strict=True):
        assert row.startswith(f"| `{option.flag}` | `{option.environment}` |")
