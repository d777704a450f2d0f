"""A warm standby: what it preloads, how it waits, and how it becomes a rank."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core.board import SlotView

SEEN = """
import json, os, sys
print(json.dumps({"modules": [m for m in ("decimal", "wave", "numbers") if m in sys.modules], "env": dict(os.environ),
                  "file": getattr(sys.modules.get("wave"), "__file__", None)}))
"""


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_a_standby_waits_under_its_own_name_and_leaves_silently_when_the_agent_goes(start: Any) -> None:
    rank = start.standby(start.script("print('never')"), preload=["decimal"])
    rank.wait_ready()
    assert comm(rank.process.pid) == "steadyrun-stdby"
    assert rank.view() is None
    os.close(rank.orders_fd)
    rank.orders_fd = -1
    outcome = rank.finish()
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "", "")


def test_the_modules_are_there_before_the_script_begins(start: Any) -> None:
    outcome = start.warm(start.script(SEEN), preload=["decimal", "wave"]).finish()
    assert json.loads(outcome.stdout)["modules"] == ["decimal", "wave", "numbers"]
    assert outcome.stderr == ""


def test_a_module_that_cannot_be_imported_is_reported_and_the_rest_is(start: Any) -> None:
    outcome = start.warm(start.script(SEEN), preload=["no_such_module", "wave"]).finish()
    assert json.loads(outcome.stdout)["modules"] == ["wave"]
    assert outcome.stderr.count("\n") == 1
    assert "cannot preload no_such_module: ModuleNotFoundError" in outcome.stderr


def test_what_the_scripts_folder_shadows_is_not_preloaded(start: Any) -> None:
    """``sched`` imports ``heapq``, and the script's folder has its own."""
    folder = start.tmp_path / "scripts"
    argv = start.script(SEEN + "import sched; print(sched.heapq.own)")
    (folder / "heapq.py").write_text("own = 'mine'\nprint('own heapq')")
    cold = start.cold(argv).finish()
    rank = start.warm(argv, preload=["wave", "sched", "decimal"])
    outcome = rank.finish()
    assert json.loads(outcome.stdout.splitlines()[0])["modules"] == ["wave"]
    assert outcome.stdout.splitlines()[1:] == cold.stdout.splitlines()[1:]
    assert "does not preload sched and what follows: the script's folder has its own heapq" in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert rank.view().pid == rank.process.pid


def test_a_module_of_ours_that_the_folder_shadows_is_not_in_the_scripts_way(start: Any) -> None:
    argv = start.script("import mmap, fcntl\nprint(mmap.own, fcntl.own)\nfrom steadyrun import watch; watch.step(1)")
    for name in ("mmap", "fcntl"):
        (start.tmp_path / "scripts" / f"{name}.py").write_text("own = 'mine'")
    for rank in (start.cold(argv), start.warm(argv, preload=["decimal"])):
        outcome = rank.finish()
        assert (outcome.stdout, outcome.stderr) == ("mine mine\n", "")
        assert rank.view().step == 1


def test_the_preset_environment_is_there_during_the_preload_only(start: Any, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "noted.py").write_text(
        "import os\nseen = [os.environ.get('A'), os.environ.get('B'), os.environ.get('RANK')]"
    )
    argv = start.script("import noted, os; print(noted.seen, os.environ.get('A'), os.environ.get('B'))")
    env = start.environment({"PYTHONPATH": str(library), "B": "kept"})
    rank = start.warm(argv, env, preload=["noted"], preset_env={"A": "1", "B": None})
    assert rank.finish().stdout == "['1', None, None] None kept\n"


def test_output_and_folder_are_as_ordered(start: Any, tmp_path: Path) -> None:
    argv = start.script("import os, sys; print(os.getcwd()); print('e', file=sys.stderr); os.system('echo child')")
    rank = start.standby(argv)
    rank.wait_ready()
    (tmp_path / "elsewhere").mkdir()
    out, err = tmp_path / "out.log", tmp_path / "err.log"
    out.write_text("kept\n")
    orders = start.orders(rank, start.environment(), tmp_path / "elsewhere")
    rank.order({**orders, "stdout": str(out), "stderr": str(err)})
    outcome = rank.finish()
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "", "")
    assert out.read_text() == f"kept\n{tmp_path / 'elsewhere'}\nchild\n"
    assert err.read_text() == "e\n"
    assert err.stat().st_mode & 0o777 == 0o600


def test_orders_may_come_before_everything_is_imported(start: Any) -> None:
    rank = start.standby(start.script(SEEN), preload=["decimal", "wave"])
    rank.order(start.orders(rank, start.environment()))
    outcome = rank.finish()
    assert json.loads(outcome.stdout)["modules"] == ["decimal", "wave", "numbers"]


@pytest.mark.parametrize("orders", ["{}", "no json", '{"env": {}, "setup": {}}'])
def test_orders_that_cannot_be_read_end_the_standby(start: Any, orders: str) -> None:
    rank = start.standby(start.script("print('never')"))
    rank.wait_ready()
    os.write(rank.orders_fd, orders.encode() + b"\n")
    outcome = rank.finish()
    assert (outcome.code, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith("steadyrun: a standby ends: ")


def test_an_interrupt_ends_a_waiting_standby_silently(start: Any) -> None:
    rank = start.standby(start.script("print('never')"))
    rank.wait_ready()
    os.kill(rank.process.pid, signal.SIGINT)
    outcome = rank.finish()
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "", "")


def test_a_standby_attaches_like_a_cold_rank(start: Any) -> None:
    argv = start.script("from steadyrun import watch\nwatch.step(5)\nprint(open('/proc/self/comm').read().strip())")
    views: list[SlotView] = []
    names = []
    for rank in (start.cold(argv), start.warm(argv)):
        names.append(rank.finish().stdout)
        views.append(rank.view())
    assert names[0] == names[1]
    assert [(v.rank, v.attempt, v.step, [s.name for s in v.sections]) for v in views] == [(3, 2, 5, ["teardown"])] * 2
