"""The parts of the in-rank side that decide something, without a process."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.core.records import exception_from_json
from steadyrun.watch import jsontext
from steadyrun.watch.importhooks import ImportHooks
from steadyrun.watch.loaded import LoadedReport, preloadable
from steadyrun.watch.setup import Orders, RankSetup, StandbySetup
from steadyrun.watch.shadows import names_in, script_folder
from steadyrun.watch.standby import DUTY, _ImportGuard
from steadyrun.watch.torchhooks import OptimizerSteps, steps_in_state, wrap_checkpointing
from steadyrun.watch.uncaught import exception_record, traceback_hash

# -- JSON --------------------------------------------------------------------------------------------------------------
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES)
def test_json_is_what_the_library_makes_of_it(value: Any) -> None:
    assert jsontext.parse(json.dumps(value)) == value
    assert json.loads(jsontext.render(value)) == value


def test_what_json_does_not_know_is_its_text() -> None:
    assert json.loads(jsontext.render({"p": Path("/x"), "n": math.nan, "i": math.inf, 3: (1, 2)})) == {
        "p": "/x", "n": None, "i": None, "3": [1, 2],
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", " ", "{", "[1", "1 2", '{"a" 1}', "nul", "'x'"])
def test_text_that_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read JSON|Expecting"):
        jsontext.parse(text)


# -- what the agent says -----------------------------------------------------------------------------------------------
SETUP = {"board": "/b", "slot": 1, "rank": 2, "attempt": 3, "rank_dir": "/r"}


def test_a_setup_has_defaults_for_what_may_be_missing() -> None:
    setup = RankSetup.parse(json.dumps(SETUP))
    assert (setup.board, setup.slot, setup.rank, setup.attempt, setup.rank_dir) == ("/b", 1, 2, 3, "/r")
    assert (setup.deadman_s, setup.faults, setup.loaded_report, setup.stack_signal) == (0.0, "", None, 0)


@pytest.mark.parametrize("missing", SETUP)
def test_a_setup_without_a_field_is_refused(missing: str) -> None:
    with pytest.raises(KeyError, match=missing):
        RankSetup.parse(json.dumps({k: v for k, v in SETUP.items() if k != missing}))


def test_a_standby_may_be_told_to_remove_variables() -> None:
    told = StandbySetup.parse(json.dumps({"fd": 5, "preset_env": {"A": "1", "B": None}}))
    assert (told.fd, told.ready_fd, told.preload, told.preset_env) == (5, -1, [], {"A": "1", "B": None})


def test_orders_keep_bytes_that_are_no_text() -> None:
    name = os.fsdecode(b"caf\xc3\xa9\xff")
    orders = Orders.parse(json.dumps({"env": {"X": name}, "setup": SETUP}))
    assert orders.env == {b"X": b"caf\xc3\xa9\xff"}
    assert (orders.stdout, orders.stderr, orders.cwd) == (None, None, None)


# -- shadowed modules --------------------------------------------------------------------------------------------------
def test_names_in_a_folder_are_modules_and_regular_packages(tmp_path: Path) -> None:
    for name in ("a.py", "b.pyc", "c.txt", "d.tar.py", f"e{importlib.machinery.EXTENSION_SUFFIXES[0]}", "f.so"):
        (tmp_path / name).write_text("")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "data").mkdir()
    assert names_in(str(tmp_path)) >= {"a", "b", "e", "pack"}
    assert names_in(str(tmp_path)).isdisjoint({"c", "d", "data"})
    assert names_in(str(tmp_path / "nowhere")) == names_in(None) == frozenset()


def test_the_scripts_folder_is_where_python_will_look_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.mkdir()
    (real / "train.py").write_text("")
    (link / "train.py").symlink_to(real / "train.py")
    monkeypatch.chdir(link)
    assert script_folder("train.py", False) == str(real)
    assert script_folder(str(real / "train.py"), False) == str(real)
    assert script_folder(str(real), False) == str(real)
    assert script_folder("-m", False) == script_folder("-c", False) == str(link)
    assert script_folder("train.py", True) is None


# -- import hooks ------------------------------------------------------------------------------------------------------
@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, and the interpreter's import state restored afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before, modules = sys.meta_path[:], set(sys.modules)
    yield tmp_path
    sys.meta_path[:] = before
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_hook_is_called_before_and_after_and_takes_itself_out(library: Path) -> None:
    (library / "hooked_a.py").write_text("value = 1\nassert 'exec_module' in vars(__spec__.loader)")
    seen: list[Any] = []
    hooks = ImportHooks()
    hooks.before("hooked_a", lambda: seen.append("before"))
    hooks.after("hooked_a", lambda module: seen.append(module.value))
    hooks.install()
    assert importlib.util.find_spec("hooked_a") is not None  # looking is not importing
    assert seen == []
    module = importlib.import_module("hooked_a")
    assert seen == ["before", 1]
    assert hooks not in sys.meta_path
    assert "exec_module" not in vars(module.__loader__)
    assert type(module.__loader__).__name__ == "SourceFileLoader"


def test_a_hook_stays_when_the_import_fails(library: Path) -> None:
    (library / "hooked_b.py").write_text("raise OSError('not yet')")
    seen: list[Any] = []
    hooks = ImportHooks()
    hooks.after("hooked_b", seen.append)
    hooks.install()
    with pytest.raises(OSError, match="not yet"):
        importlib.import_module("hooked_b")
    (library / "hooked_b.py").write_text("x = 1  # now it works")
    importlib.invalidate_caches()
    assert seen == [importlib.import_module("hooked_b")]


def test_a_hook_that_fails_does_not_fail_the_import(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (library / "hooked_c.py").write_text("")
    hooks = ImportHooks()
    hooks.after("hooked_c", lambda module: module.absent)
    hooks.install()
    importlib.import_module("hooked_c")
    assert "cannot watch hooked_c: AttributeError" in capsys.readouterr().err


def test_a_module_that_is_there_is_handled_at_once_and_nothing_is_installed() -> None:
    seen: list[Any] = []
    hooks = ImportHooks()
    hooks.after("json", seen.append)
    hooks.before("json", lambda: seen.append("before"))
    hooks.install()
    assert seen == [json]
    assert hooks not in sys.meta_path


# -- preload -----------------------------------------------------------------------------------------------------------
def burn(cpu_s: float) -> None:
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


def test_a_preload_at_full_priority_rests_in_proportion_until_orders_come() -> None:
    read, write = os.pipe()
    try:
        guard = _ImportGuard(frozenset(), lambda name: pytest.fail(name), read)
        burn(0.015)
        begin = time.monotonic()
        guard.find_spec("x")
        assert time.monotonic() - begin >= 0.015 * (1 / DUTY - 1) * 0.9
        os.write(write, b"orders")
        for _ in range(2):
            burn(0.2)
            begin = time.monotonic()
            guard.find_spec("x")
            assert time.monotonic() - begin < 0.2 * (1 / DUTY - 1) * 0.9
    finally:
        os.close(read)
        os.close(write)


def test_a_preload_sees_only_top_level_names_that_are_shadowed() -> None:
    hits: list[str] = []
    guard = _ImportGuard(frozenset({"queue"}), hits.append, None)  # type: ignore[arg-type]
    guard.find_spec("other")
    guard.find_spec("pack.queue", ["/somewhere"])
    assert hits == []
    guard.find_spec("queue")
    assert hits == ["queue"]


# -- optimizer steps ---------------------------------------------------------------------------------------------------
class Optimizer:
    """What is asked of an optimizer."""

    def __init__(self, state: Mapping[Any, Any] | None = None) -> None:
        self.state = dict(state or {})


class Tensor:
    def __init__(self, value: float, device: str) -> None:
        self.value = value
        self.device = types.SimpleNamespace(type=device)

    def __int__(self) -> int:
        assert self.device.type == "cpu", "a device was waited for"
        return int(self.value)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, None),
        ({"p": {"momentum": 1}}, None),
        ({"p": {"step": 7}}, 7),
        ({"p": {"step": 7.0}}, 7),
        ({"p": {"step": Tensor(9, "cpu")}}, 9),
        ({"p": {"step": Tensor(9, "cuda")}}, None),
        ({"p": {}, "q": {"step": 3}}, 3),
        ({"p": 5}, None),
        ({"p": {"step": "x"}}, None),
    ],
)
def test_steps_are_read_from_the_optimizers_state_where_that_costs_nothing(state: Any, expected: int | None) -> None:
    assert steps_in_state(Optimizer(state)) == expected


def test_the_first_step_after_a_restart_goes_on_from_the_state(slot: Any) -> None:
    steps = OptimizerSteps(slot.marks)
    optimizer = Optimizer({"p": {"step": 42}})
    steps.on_step(optimizer, (), {})
    steps.on_step(optimizer, (), {})
    view = slot.view()
    assert (view.step, view.steps_done, view.step_is_global) == (42, 2, True)


def test_the_first_optimizer_marks_and_others_beat(slot: Any) -> None:
    steps = OptimizerSteps(slot.marks)
    first, second = Optimizer(), Optimizer()
    for _ in range(3):
        steps.on_step(first, (), {})
        steps.on_step(second, (), {})
        steps.on_step(second, (), {})
    view = slot.view()
    assert (view.step, view.beats, view.step_is_global) == (2, 6, False)


def test_the_next_optimizer_marks_when_the_first_is_gone_or_idle(slot: Any) -> None:
    steps = OptimizerSteps(slot.marks)
    first, second = Optimizer(), Optimizer()
    steps.on_step(first, (), {})
    del first
    steps.on_step(second, (), {})
    assert slot.view().step == 1
    third = Optimizer()
    for _ in range(1000):
        steps.on_step(third, (), {})
    assert slot.view().step == 1
    steps.on_step(third, (), {})
    steps.on_step(third, (), {})
    assert slot.view().step == 3


# -- checkpoints -------------------------------------------------------------------------------------------------------
def test_saves_are_wrapped_where_they_are_and_in_the_package(slot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(state: int) -> int:
        """Saves."""
        assert slot.names() == ["setup", "checkpointing"]
        return state

    package, saver = types.ModuleType("pack"), types.ModuleType("pack.saver")
    package.save = saver.save = save  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pack", package)
    wrap_checkpointing(slot.marks.section)(saver)
    assert package.save is saver.save is not save  # type: ignore[attr-defined]
    assert saver.save(5) == 5
    assert (saver.save.__name__, saver.save.__doc__, saver.save.__wrapped__) == ("save", "Saves.", save)
    assert slot.view().checkpoints_done == 1


# -- exceptions --------------------------------------------------------------------------------------------------------
def test_the_record_can_be_read_back_and_cuts_what_is_endless() -> None:
    def recurse() -> None:
        recurse()

    try:
        recurse()
    except RecursionError as e:
        data = exception_record(type(e), e, e.__traceback__, 5, 12.5)
    record = exception_from_json(json.loads(jsontext.render(data)))
    assert (record.type, record.step, record.at_unix_s, len(record.frames)) == ("RecursionError", 5, 12.5, 200)
    assert record.frames[0].function == "recurse"
    assert record.frames[-1].function == test_the_record_can_be_read_back_and_cuts_what_is_endless.__name__


def test_the_hash_knows_file_names_functions_lines_and_type_but_not_folders() -> None:
    frames = [("/a/train.py", 3, "f"), ("/a/lib.py", 9, "g")]
    same = traceback_hash("E", frames)
    assert traceback_hash("E", [("/elsewhere/train.py", 3, "f"), ("/b/lib.py", 9, "g")]) == same
    others = [
        traceback_hash("F", frames),
        traceback_hash("E", frames[::-1]),
        traceback_hash("E", [("/a/train.py", 4, "f"), frames[1]]),
        traceback_hash("E", [("/a/train.py", 3, "h"), frames[1]]),
    ]
    assert len({same, *others}) == 5


# -- the report for standbys -------------------------------------------------------------------------------------------
def test_the_report_names_what_changed_before_torch(tmp_path: Path) -> None:
    report = LoadedReport(str(tmp_path / "loaded.json"), {"A": "1", "B": "1", "C": "1"}, {})
    report.note_env({"A": "1", "B": "2", "D": "new"})
    report.write()
    data = json.loads((tmp_path / "loaded.json").read_text())
    assert data["env_before_torch"] == {"B": "2", "C": None, "D": "new"}
    assert [p.name for p in tmp_path.iterdir()] == ["loaded.json"]


def test_a_warm_ranks_report_repeats_what_its_preload_had(tmp_path: Path) -> None:
    LoadedReport(str(tmp_path / "r"), {}, {"A": "1"}).write()
    assert json.loads((tmp_path / "r").read_text())["env_before_torch"] == {"A": "1"}


def test_a_report_that_cannot_be_written_is_let_be(tmp_path: Path) -> None:
    LoadedReport(str(tmp_path / "no" / "r"), {}, {}).write()


def test_only_modules_that_can_be_imported_again_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = types.ModuleType("torch.real")
    real.__spec__ = importlib.machinery.ModuleSpec("torch.real", None, origin="/x.py")
    real.__spec__.has_location = True
    alias = types.ModuleType("torch.alias")
    alias.__spec__ = real.__spec__
    for name, module in {
        "torch.real": real,
        "torch.alias": alias,
        "torch.none": types.ModuleType("torch.none"),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    found = preloadable()
    assert "torch.real" in found
    assert not {"torch.alias", "torch.none", "json"} & set(found)
