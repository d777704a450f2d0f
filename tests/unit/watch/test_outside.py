"""``steadyrun.watch`` in a process that is no rank, and what importing it costs."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import tracemalloc

import pytest

from steadyrun import watch


def test_every_call_does_nothing() -> None:
    assert not watch.is_active()
    with watch.section("x"), watch.section("x"):
        watch.step(3)
        watch.beat()
        assert watch.should_stop() is False
    with pytest.raises(KeyError), watch.section("y"):
        raise KeyError


def test_a_decorated_function_is_the_function_itself() -> None:
    def plain() -> int:
        return 3

    async def awaited() -> int:
        return 4

    assert watch.section("x")(plain) is plain
    assert asyncio.run(watch.section("x")(awaited)()) == 4


def test_the_section_that_does_nothing_can_be_pickled() -> None:
    section = watch.section("x")
    assert pickle.loads(pickle.dumps(section)) is section is watch.section("other")


def test_calls_keep_no_memory() -> None:
    for _ in range(3):
        with watch.section("x"):
            watch.step(1)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(1000):
        with watch.section("x"):
            watch.step(1)
            watch.beat()
            watch.should_stop()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 1000


def modules_after(statement: str) -> set[str]:
    program = f"import sys; old = set(sys.modules); {statement}; print('\\n'.join(set(sys.modules) - old))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_loads_one_module() -> None:
    assert modules_after("from steadyrun import watch") <= {"steadyrun", "steadyrun.watch", "__future__"}


def test_attaching_loads_no_module_written_in_python_but_ours() -> None:
    """So that a rank starts in milliseconds: dataclasses, json, typing and pathlib would cost 50 ms."""
    new = {m for m in modules_after("import steadyrun.watch.bootstrap") if not m.startswith("steadyrun")}
    small = {"__future__", "_json", "_socket", "_weakref", "atexit", "faulthandler", "fcntl", "mmap", "select"}
    assert new <= small, new


@pytest.mark.parametrize("name", watch.__all__)
def test_the_public_names_are_documented(name: str) -> None:
    assert getattr(watch, name).__doc__
