"""What every test gets: a leak check, a deadline, a way to wait without sleeping, and the folder of shared cases.

The leak check compares, around each test: processes that descend from this session (also escaped ones, found by a
marker in their environment), Python threads, open file descriptors (and with them listening ports), and files in
/dev/shm. A test that has to leave something says so: ``@pytest.mark.leaves("threads", reason="...")``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

TESTS = Path(__file__).resolve().parent
CHECKOUT = TESTS.parent
SHM = Path("/dev/shm")
MARKER = "STEADYRUN_TEST_SESSION"
SETTLE_S = 10.0  # how long something that is on its way out may take before it counts as left behind
POLL_S = 0.02

# Default deadline of a test by its folder, seconds; ``@pytest.mark.deadline(s)`` where one needs more.
DEADLINES_S = {"unit": 60.0, "contract": 180.0, "integration": 240.0, "fault": 300.0, "replay": 300.0, "gpu": 600.0}

# Processes that Python itself starts once and keeps for the life of the session.
KEPT_BY_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")

# Callers in the standard library that pause by time.sleep while a child ends; a unit test may start an interpreter.
MAY_SLEEP = ("subprocess", "multiprocessing.popen_fork")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run tests marked slow (the complete fault matrix)")
    parser.addoption("--update-docs", action="store_true", help="write the generated parts of the documents anew")


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets what it starts with `&` ignore SIGINT and SIGQUIT, nohup SIGHUP; children would inherit that, and
    # tests that interrupt them would wait in vain.
    usually = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    for number, usual in usually.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[MARKER] = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    # Options of a surrounding job must not reach the launchers that tests start.
    for name in [n for n in os.environ if n.startswith(("PET_", "STEADYRUN_")) and n != MARKER]:
        if name not in ("STEADYRUN_SHARED", "STEADYRUN_EXPECT_INSTALLED"):
            del os.environ[name]


def pytest_report_header(config: pytest.Config) -> list[str]:
    import steadyrun.core

    portions = sorted({str(Path(p)) for p in sys.modules["steadyrun"].__path__})
    return [f"steadyrun: imported from {Path(steadyrun.core.__file__).parent}", f"steadyrun: portions {portions}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        skip = pytest.mark.skip(reason="slow: runs with --full")
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(skip)


def area_of(path: Path) -> str:
    """The folder of tests/ that *path* is in: unit, contract, integration, fault, replay or gpu."""
    parts = path.resolve().relative_to(TESTS).parts
    return parts[0] if len(parts) > 1 else ""


# -- waiting -----------------------------------------------------------------------------------------------------------
def pause(seconds: float) -> None:
    """A pause that does not go through time.sleep (which raises in unit tests)."""
    select.select([], [], [], seconds)


def _wait_until(predicate: Callable[[], T], deadline_s: float, story: str | Callable[[], str] = "") -> T:
    limit_s = time.monotonic() + deadline_s
    while not (value := predicate()):
        if time.monotonic() >= limit_s:
            text = story() if callable(story) else story
            pytest.fail(f"waited {deadline_s:g} s in vain: {text or predicate!r}", pytrace=True)
        pause(POLL_S)
    return value


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., object]:
    """``wait_until(predicate, deadline_s, story)``: the first true value of *predicate*.

    When the deadline passes, the test fails with *story*: a text, or a function that makes one from what is known then.
    """
    return _wait_until


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the source tree that these tests are in."""
    return CHECKOUT


@pytest.fixture(scope="session")
def shared_cases() -> Path:
    """Recorded cases with known answers: ``$STEADYRUN_SHARED/cases``, or ``shared/cases`` beside the checkout."""
    root = Path(os.environ.get("STEADYRUN_SHARED") or CHECKOUT.parent / "shared")
    cases = root / "cases"
    if not cases.is_dir():
        pytest.skip(f"recorded cases are not here: {cases} (set STEADYRUN_SHARED to the folder that holds cases/)")
    return cases


@pytest.fixture(scope="session")
def session_marker() -> str:
    """What every process started by this session has in its environment, as ``NAME=value``."""
    return f"{MARKER}={os.environ[MARKER]}"


# -- deadlines and sleeps ----------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def _deadline(request: pytest.FixtureRequest) -> Iterator[None]:
    mark = request.node.get_closest_marker("deadline")
    seconds = float(mark.args[0]) if mark else DEADLINES_S.get(area_of(request.path), 120.0)

    def too_late(signum: int, frame: object) -> None:
        pytest.fail(f"the test was still running after its {seconds:g} s", pytrace=True)

    before = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _no_sleep_in_unit_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if area_of(request.path) != "unit":
        return
    real = time.sleep

    def sleep(seconds: float) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller not in MAY_SLEEP:
            raise AssertionError(f"{caller} called time.sleep({seconds}) in a unit test; wait for a condition instead")
        real(seconds)

    monkeypatch.setattr(time, "sleep", sleep)


# -- leaks -------------------------------------------------------------------------------------------------------------
def session_processes(marker: str) -> dict[int, str]:
    """Live processes other than this one that carry *marker* in their environment: pid -> command line."""
    found: dict[int, str] = {}
    needle = marker.encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            base = Path(entry.path)
            if needle not in (base / "environ").read_bytes().split(b"\0"):
                continue
            state = (base / "stat").read_text().rpartition(")")[2].split()[0]
            command = (base / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if state not in "ZX" and not any(kept in command for kept in KEPT_BY_PYTHON):
                found[int(entry.name)] = command
    return found


def zombie_children() -> dict[int, str]:
    """Children of this process that ended and that nobody has waited for."""
    found: dict[int, str] = {}
    for task in os.scandir("/proc/self/task"):
        with contextlib.suppress(OSError):
            for child in (Path(task.path) / "children").read_text().split():
                stat = Path(f"/proc/{child}/stat").read_text()
                if stat.rpartition(")")[2].split()[0] == "Z":
                    found[int(child)] = f"zombie {stat.partition('(')[2].rpartition(')')[0]}"
    return found


def python_threads() -> dict[int, str]:
    """Threads that run Python code, by whatever call they were started: ident -> name."""
    names = {t.ident: t.name for t in threading.enumerate()}
    me = threading.get_ident()
    return {i: names.get(i) or "started by _thread" for i in sys._current_frames() if i != me}


def open_fds() -> dict[int, str]:
    """Open file descriptors of this process: number -> what it leads to."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {n: t for n, t in found.items() if not t.startswith("/proc/")}  # the listing's own descriptor


def shm_files() -> dict[int, str]:
    """Files in /dev/shm by inode."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHM):
            with contextlib.suppress(OSError):
                found[entry.inode()] = entry.name
    return found


def used_by_strangers(inode: int, marker: str) -> bool:
    """A live process that is not of this session maps that file of /dev/shm (the machine may be shared).

    By inode: a named semaphore is made under another name and linked, and the map keeps showing the first one.
    """
    ours = {os.getpid(), *session_processes(marker)}
    needle = f" {inode} "
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) not in ours:
            with contextlib.suppress(OSError):
                lines = (Path(entry.path) / "maps").read_text().splitlines()
                if any(needle in line and f" {SHM}/" in line for line in lines):
                    return True
    return False


class _Snapshot:
    """What exists before a test, and what is there beyond it afterwards."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._before = self._take()

    def _take(self) -> dict[str, dict[int, str]]:
        return {
            "processes": {**session_processes(self._marker), **zombie_children()},
            "threads": python_threads(),
            "fds": open_fds(),
            "shm": shm_files(),
        }

    def left(self, kinds: set[str]) -> dict[str, dict[int, str]]:
        now = self._take()
        extra = {
            kind: {k: v for k, v in items.items() if self._before[kind].get(k) != v}
            for kind, items in now.items()
            if kind in kinds
        }
        if extra.get("shm"):
            extra["shm"] = {k: v for k, v in extra["shm"].items() if not used_by_strangers(k, self._marker)}
        return {kind: items for kind, items in extra.items() if items}


@pytest.fixture(autouse=True)
def _leaks(request: pytest.FixtureRequest, session_marker: str) -> Iterator[None]:
    kinds = {"processes", "threads", "fds", "shm"}
    for mark in request.node.iter_markers("leaves"):
        assert mark.kwargs.get("reason"), "leaves(...) needs reason="
        kinds -= set(mark.args)
    snapshot = _Snapshot(session_marker)
    yield
    left = snapshot.left(kinds)
    if not left:
        return
    gc.collect()  # what only a reference cycle keeps open is not a leak of the code under test
    limit_s = time.monotonic() + SETTLE_S
    while (left := snapshot.left(kinds)) and time.monotonic() < limit_s:
        pause(POLL_S)
    for pid, command in left.get("processes", {}).items():
        if not command.startswith("zombie"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # the next test must not suffer for it
    if left:
        lines = [f"  {kind}: {number} {what}" for kind, items in left.items() for number, what in items.items()]
        pytest.fail(f"left behind {SETTLE_S:g} s after the test:\n" + "\n".join(lines), pytrace=False)
