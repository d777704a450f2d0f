"""A warm standby: import what the script will need, wait for orders, and become a rank.

It is the rank's own interpreter with the rank's own command line, held up between ``site`` and the script. So there is
nothing to imitate afterwards: Python itself goes on to run the script.
"""

from __future__ import annotations

import os
import select
import sys
from time import thread_time

from steadyrun.watch.setup import Orders, StandbySetup
from steadyrun.watch.shadows import own_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import NoReturn

__all__ = ["replace_environment", "stand_by"]

WAITING_NAME = "steadyrun-stdby"  # what ps and top show while waiting; 15 bytes is all there is
DUTY = 0.25  # share of a core that a preload may take where its priority could not be lowered
SETUP_VARIABLE = "STEADYRUN_STANDBY"


def stand_by(text: str, raw_env: Mapping[str, str]) -> tuple[StandbySetup, Orders]:
    """Preload, wait, and take the place that the orders give; on return the process is as one just started for it.

    Does not return when the agent closes the pipe: the process ends, silently.

    Args:
        text: STEADYRUN_STANDBY.
        raw_env: the environment the process was started with, for starting over.
    """
    try:
        told = StandbySetup.parse(text)
        name = _read("/proc/self/comm").strip()
        _write("/proc/self/comm", WAITING_NAME)
        own_env = dict(os.environ)
        preset = {**own_env, **{k: v for k, v in told.preset_env.items() if v is not None}}
        for variable, value in told.preset_env.items():
            if value is None:
                preset.pop(variable, None)
        _update_environment(preset)
        preload(told, raw_env)
        _update_environment(own_env)
        if told.ready_fd >= 0:
            _tell_ready(told.ready_fd)
        orders = Orders.parse(_wait_for_orders(told.fd))
        take_place(orders)
        _write("/proc/self/comm", name)
    except KeyboardInterrupt:
        os._exit(0)
    except Exception as e:  # without orders there is no rank to be
        sys.stderr.write(f"steadyrun: a standby ends: {type(e).__name__}: {e}\n")
        os._exit(1)
    return told, orders


# -- preload -----------------------------------------------------------------------------------------------------------
def preload(told: StandbySetup, raw_env: Mapping[str, str]) -> None:
    """Import the modules in order. One that cannot be imported is left for the script to fail on, or not."""
    entry = ""

    def start_over(shadowing: str) -> NoReturn:
        """What is half imported cannot be undone: begin again without this entry and those after it."""
        _say(f"does not preload {entry} and what follows: the script's folder has its own {shadowing}")
        kept = told.preload[: told.preload.index(entry)]
        _exec_again(told, kept, raw_env)

    guard = _ImportGuard(own_names(), start_over, None if _priority_is_low() else told.fd)
    sys.meta_path.insert(0, guard)
    try:
        for entry in told.preload:
            if entry in sys.modules:
                continue
            try:
                __import__(entry)
            except Exception as e:
                _say(f"cannot preload {entry}: {type(e).__name__}: {e}")
    finally:
        sys.meta_path.remove(guard)


class _ImportGuard:
    """A finder that finds nothing: it sees every import before it happens.

    Args:
        shadowing: names in the script's folder.
        on_shadowed: called with a name of *shadowing* that is about to be imported; does not return.
        orders_fd: where the priority could not be lowered: sleep after each import for the share of DUTY, until orders
            are there. None: never sleep.
    """

    def __init__(
        self, shadowing: frozenset[str], on_shadowed: Callable[[str], NoReturn], orders_fd: int | None
    ) -> None:
        self._shadowing = shadowing
        self._on_shadowed = on_shadowed
        self._orders_fd = orders_fd
        self._cpu_s = thread_time()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        if path is None and name in self._shadowing:
            self._on_shadowed(name)
        if self._orders_fd is not None:
            self._rest()

    def _rest(self) -> None:
        used_s = thread_time() - self._cpu_s
        if used_s < 0.01:  # too short to be worth two system calls
            return
        poller = select.poll()
        poller.register(self._orders_fd or 0, select.POLLIN)
        if poller.poll(used_s * (1 / DUTY - 1) * 1000):
            self._orders_fd = None
        self._cpu_s = thread_time()


def _priority_is_low() -> bool:
    """The spawner has lowered our priority below its own: it is sure it can raise it again when we become a rank."""
    try:
        return os.getpriority(os.PRIO_PROCESS, 0) > os.getpriority(os.PRIO_PROCESS, os.getppid())
    except OSError:
        return False


def _exec_again(told: StandbySetup, modules: Sequence[str], raw_env: Mapping[str, str]) -> NoReturn:
    """The same command line in the same process (its pid, its pipes and PDEATHSIG stay), with a shorter list."""
    from steadyrun.watch.jsontext import render

    data = {"fd": told.fd, "ready_fd": told.ready_fd, "preload": list(modules), "preset_env": told.preset_env}
    for fd in (told.fd, told.ready_fd):
        if fd >= 0:
            os.set_inheritable(fd, True)
    os.execve(sys.executable, sys.orig_argv, {**raw_env, SETUP_VARIABLE: render(data)})


# -- waiting -----------------------------------------------------------------------------------------------------------
def _tell_ready(fd: int) -> None:
    try:
        os.write(fd, b"\1")
    except OSError:
        return  # the agent is gone or does not care: end-of-file on the orders says which
    finally:
        os.close(fd)


def _wait_for_orders(fd: int) -> str:
    received = bytearray()
    while not received.endswith(b"\n"):
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            os._exit(0)
        received += chunk
    os.close(fd)
    return received.decode()


# -- taking the place --------------------------------------------------------------------------------------------------
def take_place(orders: Orders) -> None:
    """Output, working folder and environment as ordered. Raises OSError."""
    for fd, path in ((1, orders.stdout), (2, orders.stderr)):
        if path is not None:
            opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.dup2(opened, fd)
            if opened != fd:
                os.close(opened)
    if orders.cwd is not None:
        os.chdir(orders.cwd)
    replace_environment(orders.env)


def replace_environment(env: Mapping[bytes, bytes]) -> None:
    """Exactly *env*, in its order, for Python and for C."""
    os.environb.clear()
    os.environb.update(env)


def _update_environment(env: Mapping[str, str]) -> None:
    """Change only what differs."""
    for name in [name for name in os.environ if name not in env]:
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _say(text: str) -> None:
    sys.stderr.write(f"steadyrun: a standby {text}\n")


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError:
        return  # only a name in ps
