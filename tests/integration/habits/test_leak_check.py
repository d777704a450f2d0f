"""The leak check itself: tests in a pytest of their own, each with one thing left behind, must fail and say what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = {
    "processes": "subprocess.Popen(['sleep', '300'], start_new_session=True)",
    "escaped": "subprocess.run(['sh', '-c', 'setsid sleep 300 >/dev/null 2>&1 &'])",
    "threads": (
        "began = _thread.allocate_lock(); began.acquire(); "
        "_thread.start_new_thread(lambda: (began.release(), select.select([], [], [], 300)), ()); began.acquire()"
    ),
    "fds": "keep.append(socket.create_server(('127.0.0.1', 0)))",
    "shm": "open(f'/dev/shm/steadyrun-test-{os.getpid()}', 'w').close()",
    "nothing": "time.sleep(0.001)",
}
HEAD = "import _thread, os, select, socket, subprocess, time\nkeep = []\n"


def run_pytest(tmp_path: Path, checkout: Path, folder: str, bodies: dict[str, str]) -> str:
    """The output of a pytest of its own over one function per body, under this conftest with a short patience."""
    tests = tmp_path / "tests"
    (tests / folder).mkdir(parents=True)
    conftest = (checkout / "tests" / "conftest.py").read_text()
    assert "SETTLE_S = 10.0" in conftest
    (tests / "conftest.py").write_text(conftest.replace("SETTLE_S = 10.0", "SETTLE_S = 0.3"))
    functions = "".join(f"def test_{name}():\n    {body}\n" for name, body in bodies.items())
    (tests / folder / "test_it.py").write_text(HEAD + functions)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    deadline(s): x\n    leaves(w): x\n    slow: x\n")
    command = [sys.executable, "-m", "pytest", "-v", "--import-mode=importlib", "-p", "no:cacheprovider", str(tests)]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> str:
    """What that pytest said; files it left in /dev/shm on purpose are gone again."""
    out = run_pytest(tmp_path_factory.mktemp("leaks"), checkout, "integration", LEAKS)
    for file in Path("/dev/shm").glob("steadyrun-test-*"):
        if not Path(f"/proc/{file.name.rpartition('-')[2]}").exists():
            os.unlink(file)
    return out


@pytest.mark.parametrize("kind", [k for k in LEAKS if k != "nothing"])
def test_what_a_test_leaves_behind_fails_it(kind: str, output: str) -> None:
    own = output.partition(f"_ ERROR at teardown of test_{kind} _")[2].partition("_ ERROR at")[0]
    assert f"  {'processes' if kind == 'escaped' else kind}: " in own, output


def test_a_clean_test_passes_and_may_sleep_outside_of_unit(output: str) -> None:
    assert "::test_nothing PASSED" in output
    assert "ERROR at teardown of test_nothing" not in output
    assert "6 passed, 5 errors" in output


def test_sleeping_in_a_unit_test_fails_it(tmp_path: Path, checkout: Path) -> None:
    out = run_pytest(tmp_path, checkout, "unit", {"sleeps": "time.sleep(0.001)"})
    assert "called time.sleep(0.001) in a unit test" in out
    assert "1 failed" in out
