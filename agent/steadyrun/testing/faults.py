"""Faults on order: ``STEADYRUN_FAULTS="kill rank=1 step=20; hang rank=0 step=40 where=collective"``, in any script.

A plan is a list of faults, separated by ``;`` or newlines. Each is a kind and ``key=value`` pairs; quote values that
hold spaces (``message="bad batch"``). Keys of every kind:

======== ======================================= ====================================================================
key      values                                  meaning
======== ======================================= ====================================================================
rank     N, ``any`` (default), ``random:SEED``   ``any``: every rank; ``random``: draws one, the same on all ranks
step     N, ``start``, ``load``                  after step N is done; before the script begins; before the first
                                                 update (``flip`` only); default: the first step that is reported
attempt  N (default 0), ``any``                  a restarted job passes the same steps again, so a fault strikes in
                                                 one attempt only, unless told otherwise
every    K                                       again every K steps from ``step`` on
======== ======================================= ====================================================================

The kinds, their own keys and what the watchdog must conclude are in ``KINDS``. A fault is announced on stderr and noted
in ``faults.jsonl`` of the rank's folder before it strikes; what it leaves on purpose is named there, and ``clean_up``
removes it. A fault that cannot be injected here (no right to make a cgroup, no process group) says so and does nothing.

Everything is standard library; torch is used only where the script has already loaded it.
"""

from __future__ import annotations

import atexit
import builtins
import collections
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import math
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

from steadyrun.core.classes import FaultClass
from steadyrun.core.errors import ConfigError, nearest_name
from steadyrun.testing.flipping import TARGETS, CannotFlipError, Flipped, flip, flip_gradient
from steadyrun.testing.slowness import PHASES as SLOW_PHASES
from steadyrun.testing.slowness import CannotSlowError, Neighbour, Pace, SlowPhase, Throttle

__all__ = ["EXPECTED", "KINDS", "MARKER", "Fault", "FaultPlan", "When", "clean_up", "expected_class", "parse_faults"]

MARKER: Final = "faults.jsonl"  # in the rank's folder: one line for each fault that struck
CGROUP_PREFIX: Final = "steadyrun-fault-"
_NOW_DELAY_S: Final = 0.2  # so that the answer to an injection leaves before the fault strikes


class When(Enum):
    """At which moment a fault strikes."""

    START = "start"  # before the script begins
    STEP = "step"  # after a given step
    LOAD = "load"  # after what there is was loaded, just before the first update
    NEXT = "next"  # after the next step that is reported
    NOW = "now"  # at once, from another thread; only for faults that need no main thread


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault.

    Attributes:
        help: what the rank does.
        keys: its own keys with their defaults, as text.
        expected: the class a verdict must give, or None where nothing is wrong with the rank (yet).
        wheres: allowed values of ``where`` and the class of each.
        at_start, at_once, at_load: it can strike before the script, from another thread, or before the first update.
    """

    help: str
    expected: FaultClass | None
    keys: Mapping[str, str] = field(default_factory=dict)
    wheres: Mapping[str, FaultClass | None] = field(default_factory=dict)
    at_start: bool = True
    at_once: bool = False
    at_load: bool = False


KINDS: Final[Mapping[str, Kind]] = {
    "kill": Kind("sends itself SIGKILL, or signal=NAME", FaultClass.DEAD_PROCESS, {"signal": "KILL"}, at_once=True),
    "exit": Kind("leaves with os._exit(code)", FaultClass.PROGRAM_ERROR, {"code": "1"}, at_once=True),
    "sysexit": Kind("leaves with sys.exit(code)", FaultClass.PROGRAM_ERROR, {"code": "1"}, at_start=False),
    "raise": Kind(
        "raises exception(message), a builtin or dotted name",
        FaultClass.PROGRAM_ERROR,
        {"exception": "RuntimeError", "message": "injected by STEADYRUN_FAULTS"},
        at_start=False,
    ),
    "segfault": Kind("reads address 0", FaultClass.DEAD_PROCESS, at_once=True),
    "abort": Kind("calls abort()", FaultClass.DEAD_PROCESS, at_once=True),
    "sleep": Kind("pauses for seconds=, then goes on", None, {"seconds": "10"}),
    "busy": Kind("loops in Python", FaultClass.HOST_STALL, {"seconds": "inf"}),
    "busy_c": Kind("loops in C and holds the GIL", FaultClass.HOST_STALL, {"seconds": "inf"}, at_once=True),
    "stop": Kind("stops itself (SIGSTOP)", FaultClass.STOPPED_PROCESS, {"seconds": "inf"}, at_once=True),
    "hang": Kind(
        "waits for ever: where=sleep outside any collective, where=collective in a barrier that no other rank calls "
        "while the others go on to their next collective, where=dataloader and where=teardown as those kinds",
        FaultClass.HOST_STALL,
        {"where": "sleep", "seconds": "inf"},
        {
            "sleep": FaultClass.HOST_STALL,
            "collective": FaultClass.OP_MISMATCH,  # without flight records: skipped_collective, by places alone
            "dataloader": FaultClass.INPUT_PIPELINE,
            "teardown": FaultClass.TEARDOWN_HANG,
        },
    ),
    "dataloader": Kind(
        "gets no next batch: its DataLoader workers are stopped (SIGSTOP); without workers it waits in a dataset",
        FaultClass.INPUT_PIPELINE,
        {"seconds": "inf"},
        at_start=False,
    ),
    "oom": Kind(
        "allocates until the kernel kills it, in a memory cgroup of its own with bytes= to use",
        FaultClass.OUT_OF_MEMORY,
        {"bytes": "256M"},
        at_once=True,
    ),
    "teardown": Kind(
        "cannot end after the script is done: where=atexit (a handler) or where=thread (a non-daemon thread)",
        FaultClass.TEARDOWN_HANG,
        {"where": "atexit", "seconds": "inf"},
        {"atexit": FaultClass.TEARDOWN_HANG, "thread": FaultClass.TEARDOWN_HANG},
    ),
    "ignore_term": Kind("ignores SIGTERM from now on", None),
    "grandchildren": Kind(
        "starts three processes that outlive it for seconds=: one in its group, one in a session of its own, one "
        "orphaned with an empty environment",
        None,
        {"seconds": "600"},
        at_once=True,
    ),
    "shm": Kind("leaves a file of bytes= in /dev/shm", None, {"bytes": "1M"}, at_once=True),
    "slow": Kind(
        "takes percent= more CPU time for its steps until the step until=: the extra is in where=, and is how=work or, "
        "as in a slow source of data, how=sleep",
        FaultClass.STRAGGLER,
        {"where": "forward", "percent": "30", "until": "end", "how": "work"},
        dict.fromkeys(SLOW_PHASES, FaultClass.STRAGGLER),
        at_start=False,
    ),
    "throttle": Kind(
        "gets a CPU quota, in a cgroup of its own, with which its steps take percent= longer, until the step until=",
        FaultClass.STRAGGLER,
        {"percent": "100", "until": "end"},
        at_start=False,
    ),
    "neighbour": Kind(
        "shares one core with so many busy tasks= until the step until=",
        FaultClass.STRAGGLER,
        {"tasks": "1", "until": "end"},
        at_start=False,
    ),
    "flip": Kind(
        "flips bit= of element= of tensor= (each drawn unless given) of target=param, optim or grad: at=rest once the "
        "step's update is over, at=update within it; grad: in the next gradient, before it is reduced over ranks",
        FaultClass.SILENT_CORRUPTION,
        {"target": "param", "tensor": "drawn", "element": "drawn", "bit": "drawn", "at": "rest"},
        at_start=False,
        at_load=True,
    ),
}

EXPECTED: Final[Mapping[str, FaultClass | None]] = {
    **{kind: spec.expected for kind, spec in KINDS.items()},
    **{f"{kind} where={where}": cls for kind, spec in KINDS.items() for where, cls in spec.wheres.items()},
}
"""By kind, and by ``kind where=place``: the class verdict.json must give; None: no incident may come of it alone."""

_COMMON: Final = ("rank", "step", "attempt", "every")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a plan.

    Attributes:
        rank: the rank it strikes; None: every rank. ``random_seed`` draws one instead.
        attempt: None: in every attempt.
        options: the kind's own keys, defaults filled in, as text.
        text: as it was written.
    """

    kind: str
    when: When
    step: int | None
    rank: int | None
    random_seed: int | None
    attempt: int | None
    every: int | None
    options: Mapping[str, str]
    text: str

    @property
    def name(self) -> str:
        """The key into ``EXPECTED``."""
        return f"{self.kind} where={self.options['where']}" if "where" in self.options else self.kind

    @property
    def until(self) -> int | None:
        """The last step that it lasts for; None: it does not end."""
        text = self.options.get("until", "end")
        return None if text == "end" else int(text)

    @property
    def seconds(self) -> float:
        return float(self.options.get("seconds", "inf"))

    def drawn_rank(self, index: int, attempt: int, step: int | None, world_size: int) -> int | None:
        """The rank this occurrence strikes, None for every rank; equal on all ranks of the job."""
        if self.random_seed is None:
            return self.rank
        return random.Random(f"{self.random_seed}/{index}/{attempt}/{step}").randrange(max(world_size, 1))


def expected_class(fault: Fault) -> FaultClass | None:
    """What the verdict must say of this very fault: as ``EXPECTED``, with its options taken into account."""
    if fault.kind in ("exit", "sysexit") and int(fault.options["code"]) == 0:
        return None
    if fault.kind == "raise" and fault.options["exception"].endswith(("OutOfMemoryError", "MemoryError")):
        return FaultClass.OUT_OF_MEMORY
    if "seconds" in fault.options and math.isfinite(fault.seconds):
        return None
    return EXPECTED[fault.name]


# -- reading a plan --------------------------------------------------------------------------------------------------
def parse_faults(text: str, injected: bool = False) -> tuple[Fault, ...]:
    """The faults in *text*, in order.

    Args:
        injected: the text came over the evidence socket: the default is the next step in any attempt, and ``step=now``
            is allowed.

    Raises:
        ConfigError: what cannot be used, what is allowed, and the nearest name.
    """
    entries = [entry.strip() for line in text.splitlines() for entry in _split(line)]
    return tuple(_parse_one(entry, injected) for entry in entries if entry)


def _split(line: str) -> list[str]:
    """At semicolons outside quotes."""
    parts, quote = [""], ""
    for char in line:
        if char == ";" and not quote:
            parts.append("")
            continue
        if char in "'\"" and quote in ("", char):
            quote = "" if quote else char
        parts[-1] += char
    return parts


def _parse_one(text: str, injected: bool) -> Fault:
    try:
        kind, *pairs = shlex.split(text)
    except ValueError as e:
        raise _refused(text, f"{e} (quote values with spaces)") from None
    spec = KINDS.get(kind)
    if spec is None:
        raise _refused(text, f"there is no fault {kind!r}{nearest_name(kind, KINDS)} (known: {', '.join(KINDS)})")
    known = (*_COMMON, *spec.keys)
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise _refused(text, f"{pair!r} is not key=value")
        if key not in known:
            hint = nearest_name(key, known)
            raise _refused(text, f"{kind} has no key {key!r}{hint} (known: {', '.join(known)})")
        if key in given:
            raise _refused(text, f"{key} is given twice")
        given[key] = value
    options = {**spec.keys, **{k: v for k, v in given.items() if k in spec.keys}}
    _check_options(text, kind, spec, options, given)
    when, step = _when(text, given.get("step"), kind, spec, injected)
    every = _integer(text, "every", given["every"], least=1) if "every" in given else None
    if every is not None and when in (When.START, When.LOAD, When.NOW):
        raise _refused(text, f"every= needs step=N, not step={when.value}")
    if every is not None and step is None:
        when, step = When.STEP, 0
    rank, seed = _rank(text, given.get("rank", "any"))
    attempt_text = given.get("attempt", "any" if injected else "0")
    attempt = None if attempt_text == "any" else _integer(text, "attempt", attempt_text)
    return Fault(kind, when, step, rank, seed, attempt, every, options, text)


def _check_options(text: str, kind: str, spec: Kind, options: Mapping[str, str], given: Mapping[str, str]) -> None:
    where = options.get("where")
    if where is not None and where not in spec.wheres:
        known = ", ".join(spec.wheres)
        raise _refused(
            text, f"where={where} is not known for {kind}{nearest_name(where, spec.wheres)} (known: {known})"
        )
    if where == "collective" and "seconds" in given:
        raise _refused(text, "seconds= has no meaning with where=collective: nobody ends the collective")
    if "seconds" in options:
        try:
            seconds = float(options["seconds"])
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:
            raise _refused(text, f"seconds={options['seconds']} is not a number of seconds, 0 or more, or inf")
    if "code" in options and _integer(text, "code", options["code"]) > 255:
        raise _refused(text, f"code={options['code']} is not an exit status: 0 to 255")
    if "bytes" in options:
        _bytes(text, options["bytes"])
    for key in ("percent", "tasks"):
        if key in options:
            _integer(text, key, options[key], least=1)
    if options.get("until", "end") != "end":
        _integer(text, "until", options["until"])
    if options.get("how", "work") not in ("work", "sleep"):
        raise _refused(text, f"how={options['how']} is not known for {kind} (known: work, sleep)")
    if "signal" in options:
        _signal(text, options["signal"])
    if kind == "flip":
        for key, allowed in (("target", TARGETS), ("at", ("rest", "update"))):
            if options[key] not in allowed:
                hint = nearest_name(options[key], allowed)
                raise _refused(text, f"{key}={options[key]} is not known for flip{hint} (known: {', '.join(allowed)})")
        for key in ("element", "bit"):
            if options[key] != "drawn":
                _integer(text, key, options[key])


def _when(text: str, value: str | None, kind: str, spec: Kind, injected: bool) -> tuple[When, int | None]:
    if value is None or (injected and value == "next"):
        return When.NEXT, None
    if value == "start":
        if injected:
            raise _refused(text, "step=start has passed in a running rank (allowed: N, next, now)")
        if not spec.at_start or kind == "hang":
            raise _refused(text, f"{kind} cannot strike before the script begins; give a step number")
        return When.START, None
    if value == "load" and spec.at_load:
        if injected:
            raise _refused(text, "step=load has passed in a running rank (allowed: N, next)")
        return When.LOAD, None
    if value == "now" and injected:
        if not spec.at_once:
            able = ", ".join(k for k, s in KINDS.items() if s.at_once)
            raise _refused(
                text, f"{kind} needs the rank's main thread, so step=now does not work (it does for: {able})"
            )
        return When.NOW, None
    if not value.isdecimal():
        allowed = "N, next, now" if injected else "N, start, load" if spec.at_load else "N, start"
        raise _refused(text, f"step={value} cannot be used (allowed: {allowed})")
    return When.STEP, int(value)


def _rank(text: str, value: str) -> tuple[int | None, int | None]:
    if value == "any":
        return None, None
    if value.startswith("random:") and value[7:].isdecimal():
        return None, int(value[7:])
    if not value.isdecimal():
        raise _refused(text, f"rank={value} cannot be used (allowed: N, any, random:SEED)")
    return int(value), None


def _integer(text: str, key: str, value: str, least: int = 0) -> int:
    if not value.isdecimal() or int(value) < least:
        raise _refused(text, f"{key}={value} is not a whole number from {least} on")
    return int(value)


def _bytes(text: str, value: str) -> int:
    digits, unit = (value[:-1], value[-1].upper()) if value[-1:].isalpha() else (value, "")
    if unit not in ("", "K", "M", "G") or not digits.isdecimal() or int(digits) == 0:
        raise _refused(text, f"bytes={value} is not a size (examples: 65536, 64M, 2G)")
    return int(digits) << {"": 0, "K": 10, "M": 20, "G": 30}[unit]


def _signal(text: str, value: str) -> int:
    if value.isdecimal() and 0 < int(value) <= signal.SIGRTMAX:
        return int(value)
    names = {s.name[3:]: int(s) for s in signal.Signals}
    short = value.upper().removeprefix("SIG")
    if short not in names:
        raise _refused(text, f"signal={value} is not a signal{nearest_name(short, names)}")
    return names[short]


def _refused(text: str, why: str) -> ConfigError:
    return ConfigError(f"cannot use the fault {text!r}: {why}")


# -- carrying it out -------------------------------------------------------------------------------------------------
class FaultPlan:
    """The faults of one rank in one attempt.

    ``on_start`` and ``on_step`` are called in the main thread and may not return, or raise what a fault raises; ``add``
    may be called from any thread.
    """

    def __init__(
        self,
        faults: tuple[Fault, ...],
        rank: int,
        attempt: int,
        world_size: int,
        rank_dir: Path | None = None,
        checks: Checks | None = None,
    ) -> None:
        """*checks* is asked at each strike that depends on it; None: nothing checks what the rank holds."""
        self._checks = checks
        self.rank = rank
        self.attempt = attempt
        self.rank_dir = rank_dir
        self._world_size = world_size
        self._lock = threading.Lock()
        self._first_step: int | None = None
        self._last_step: int | None = None
        self._pace: Pace | None = None  # only while a fault may need it: it costs two system calls a step
        self._lasting: list[_Lasting] = []
        self._added = len(faults)
        mine = [(i, f) for i, f in enumerate(faults) if f.attempt in (None, attempt)]
        self._pending = tuple((i, f) for i, f in mine if f.rank in (None, rank))

    @classmethod
    def parse(
        cls,
        text: str,
        rank: int,
        attempt: int,
        world_size: int | None = None,
        rank_dir: Path | None = None,
        checks: Checks | None = None,
    ) -> FaultPlan:
        """What *text* means for this rank; ``world_size`` is WORLD_SIZE of the environment unless given.

        Raises:
            ConfigError: the text cannot be used.
        """
        size = world_size if world_size is not None else int(os.environ.get("WORLD_SIZE", "1"))
        return cls(parse_faults(text), rank, attempt, size, rank_dir, checks)

    @property
    def pending(self) -> tuple[Fault, ...]:
        """Those that have not struck yet (``rank=random`` ones may turn out to be for another rank)."""
        return tuple(fault for _, fault in self._pending)

    def on_start(self) -> None:
        """Before the script begins."""
        if self._pending:
            self._strike(self._take(lambda fault: fault.when is When.START), None)

    def on_load(self) -> None:
        """Before the first update, when what there is was loaded."""
        if self._pending:
            self._strike(self._take(lambda fault: fault.when is When.LOAD), None)

    def on_step(self, step: int) -> None:
        """After step *step* was reported."""
        last, self._last_step = self._last_step, step
        if self._first_step is None:
            self._first_step = step
        if self._pace is not None:
            self._pace.on_step()
        if self._lasting:
            self._end_lasting(step)
        if self._pending:
            if self._pace is None and any(fault.kind in _LASTING for _, fault in self._pending):
                self._pace = Pace()
                self._pace.objects()
                self._pace.on_step()
            self._strike(self._take(lambda fault: self._is_due(fault, step, last)), step)

    def _end_lasting(self, step: int) -> None:
        for one in [o for o in self._lasting if o.until is not None and step >= o.until]:
            self._lasting.remove(one)
            one.stop()
            replace(one.strike, step=step).say(f"injected fault ends: {one.strike.fault.text}")

    def add(self, text: str, step: int | None = None) -> tuple[str, ...]:
        """Faults for this running rank; the answer says, for a person, when each will strike.

        Args:
            step: the newest step, where this plan was made after it.

        Raises:
            ConfigError: the text cannot be used, or none of it is for this rank and attempt.
        """
        faults = parse_faults(text, injected=True)
        if not faults:
            raise ConfigError("cannot inject: no fault given (example: kill step=20)")
        last = self._last_step if self._last_step is not None else step
        answers = []
        for fault in faults:
            index, self._added = self._added, self._added + 1
            if fault.attempt not in (None, self.attempt):
                raise _refused(fault.text, f"this is attempt {self.attempt}")
            if fault.drawn_rank(index, self.attempt, fault.step, self._world_size) not in (None, self.rank):
                raise _refused(fault.text, f"this is rank {self.rank}")
            if fault.step is not None and last is not None and fault.step <= last and fault.every is None:
                raise _refused(fault.text, f"step {fault.step} has passed: rank {self.rank} has done step {last}")
            if fault.when is When.NOW:
                threading.Thread(target=self._strike_soon, args=(index, fault), daemon=True, name="fault").start()
            else:
                with self._lock:
                    self._pending += ((index, fault),)
            answers.append(f"rank {self.rank}: {fault.name} {_moment(fault, last)}")
        return tuple(answers)

    def _is_due(self, fault: Fault, step: int, last: int | None) -> bool:
        if fault.when is When.NEXT:
            return True
        if fault.when is not When.STEP or fault.step is None or step < fault.step:
            return False
        if fault.every is not None:
            done = -1 if last is None or last < fault.step else (last - fault.step) // fault.every
            if last is None and (step - fault.step) % fault.every:
                return False  # an attempt that begins between two occurrences waits for the next
            return (step - fault.step) // fault.every > done
        # "in every attempt" means every attempt that passes the step: one that resumes after it goes free
        return fault.attempt is not None or self._first_step is None or self._first_step <= fault.step

    def _take(self, is_due: Callable[[Fault], bool]) -> list[tuple[int, Fault]]:
        with self._lock:
            due = [(i, f) for i, f in self._pending if is_due(f)]
            self._pending = tuple((i, f) for i, f in self._pending if f.every is not None or (i, f) not in due)
        return due

    def _strike_soon(self, index: int, fault: Fault) -> None:
        time.sleep(_NOW_DELAY_S)
        self._strike([(index, fault)], self._last_step)

    def _strike(self, due: list[tuple[int, Fault]], step: int | None) -> None:
        for index, fault in due:
            if fault.drawn_rank(index, self.attempt, fault.step if fault.every is None else step, self._world_size) in (
                None,
                self.rank,
            ):
                strike = _Strike(fault, self.rank, self.attempt, step, self.rank_dir, self._checks)
                strike.announce()
                try:
                    if fault.kind in _LASTING:
                        self._pace = self._pace or Pace()
                        stop = _LASTING[fault.kind](strike, self._pace)
                        self._lasting.append(_Lasting(strike, fault.until, stop))
                    else:
                        _ACTIONS[fault.kind](strike)
                except CannotInjectError as e:
                    strike.say(f"NOT injected: {e}")
                    strike.note(refused=str(e))


def _moment(fault: Fault, last: int | None) -> str:
    match fault.when:
        case When.NOW:
            return "strikes now"
        case When.NEXT:
            return f"strikes after step {last + 1}, the next one" if last is not None else "strikes after the next step"
        case When.STEP:
            again = f", then every {fault.every} steps" if fault.every is not None else ""
            now = f" (now at step {last})" if last is not None else ""
            return f"strikes after step {fault.step}{now}{again}"
        case When.START:
            return "strikes before the script"
        case When.LOAD:
            return "strikes before the first update"


class Checks(Protocol):
    """What checks the bytes that the rank holds: a fault lies before or after its look at the step."""

    def watched(self) -> Sequence[Any]: ...
    def call_before_check(self, call: Callable[[], None]) -> None: ...
    def call_after_check(self, call: Callable[[], None]) -> None: ...


class CannotInjectError(Exception):
    """This fault is not possible here; training goes on."""


@dataclass(frozen=True, slots=True)
class _Strike:
    """One occurrence of a fault, with the means to leave a trace."""

    fault: Fault
    rank: int
    attempt: int
    step: int | None
    rank_dir: Path | None
    checks: Checks | None = None

    def announce(self) -> None:
        self.say(f"injected fault: {self.fault.text}")
        self.note()

    def say(self, text: str) -> None:
        where = "before the script" if self.step is None else f"after step {self.step}"
        line = f"steadyrun: rank {self.rank}, attempt {self.attempt}, {where}: {text}\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())

    def note(self, **more: Any) -> None:
        """A line in the rank's folder; read by tests and by ``clean_up``."""
        if self.rank_dir is None:
            return
        record = {"schema": "steadyrun.fault/1", "kind": self.fault.kind, "name": self.fault.name, "rank": self.rank}
        record |= {"text": self.fault.text, "pid": os.getpid(), "attempt": self.attempt, "step": self.step}
        record |= {"at_unix_s": time.time(), "at_s": time.monotonic(), **more}
        with contextlib.suppress(OSError):
            fd = os.open(self.rank_dir / MARKER, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, (json.dumps(record) + "\n").encode())
            finally:
                os.close(fd)


@dataclass(frozen=True, slots=True)
class _Lasting:
    """A fault that goes on while the script does, and what ends it."""

    strike: _Strike
    until: int | None
    stop: Callable[[], None]


def _kill(strike: _Strike) -> None:
    os.kill(os.getpid(), _signal(strike.fault.text, strike.fault.options["signal"]))


def _exit(strike: _Strike) -> NoReturn:
    os._exit(int(strike.fault.options["code"]))


def _sysexit(strike: _Strike) -> NoReturn:
    sys.exit(int(strike.fault.options["code"]))


def _raise(strike: _Strike) -> NoReturn:
    name = strike.fault.options["exception"]
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name) if module_name else builtins
        cls = getattr(module, attribute)
    except (ImportError, AttributeError) as e:
        raise CannotInjectError(f"no exception {name}: {e}") from None
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        raise CannotInjectError(f"{name} is not an exception class")
    raise cls(strike.fault.options["message"])


def _segfault(strike: _Strike) -> None:
    ctypes.string_at(0)


def _abort(strike: _Strike) -> NoReturn:
    os.abort()


def _sleep(strike: _Strike) -> None:
    _wait(strike.fault.seconds)


def _wait(seconds: float) -> None:
    """Waits *seconds*, for ever when inf, in the main thread's own frame."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(left_s, 3600.0))


def _busy(strike: _Strike) -> None:
    until_s = time.monotonic() + strike.fault.seconds
    while time.monotonic() < until_s:
        pass


def _busy_c(strike: _Strike) -> None:
    if math.isinf(strike.fault.seconds):
        collections.deque(itertools.repeat(None), maxlen=0)  # no bytecode runs, so the GIL is never handed over
    until_s = time.monotonic() + strike.fault.seconds
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(strike.fault.seconds + 1.0)
    try:
        while time.monotonic() < until_s:
            collections.deque(itertools.repeat(None, 1_000_000), maxlen=0)
    finally:
        sys.setswitchinterval(interval_s)


def _stop(strike: _Strike) -> None:
    _stop_processes([os.getpid()], strike.fault.seconds)


def _stop_processes(pids: list[int], seconds: float) -> None:
    """SIGSTOP; a helper wakes them after *seconds*, unless that is inf."""
    if math.isfinite(seconds):
        code = "import os, sys, time; time.sleep(float(sys.argv[1])); [os.kill(int(p), 18) for p in sys.argv[2:]]"
        _start_helper(code, str(seconds), *map(str, pids), start_new_session=True)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # a worker that ended meanwhile
            os.kill(pid, signal.SIGSTOP)


def _start_helper(code: str, *args: str, env: Mapping[str, str] | None = None, start_new_session: bool = False) -> int:
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=None if env is None else dict(env),
        start_new_session=start_new_session,
    )
    helper.returncode = 0  # nobody waits for it: keeps Popen's destructor from warning
    return helper.pid


def _hang(strike: _Strike) -> None:
    match strike.fault.options["where"]:
        case "collective":
            _wait_in_collective()
        case "dataloader":
            _dataloader(strike)
        case "teardown":
            atexit.register(_never_ends, strike.fault.seconds)
        case _:
            _wait(strike.fault.seconds)


def _wait_in_collective() -> None:
    """Into a collective that no other rank calls, so that this rank is missing in the others' next one."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise CannotInjectError("torch.distributed is not initialised, so there is no collective to wait in")
    if dist.get_world_size() < 2:
        raise CannotInjectError("a collective of one rank does not wait")
    backend = str(dist.get_backend())
    if "nccl" in backend and "gloo" not in backend:
        # NCCL's barrier is an all_reduce of one element: it would pair with the peers' next all_reduce and corrupt it.
        # Receiving what nobody sends waits without touching them.
        torch = sys.modules["torch"]
        peer = (dist.get_rank() + 1) % dist.get_world_size()
        dist.recv(torch.empty(1, device="cuda"), src=peer)
        torch.cuda.synchronize()
    while True:
        dist.barrier()


def _dataloader(strike: _Strike) -> None:
    workers = _loader_workers()
    if workers:
        strike.note(stopped=workers)
        _stop_processes(workers, strike.fault.seconds)
    else:
        _wait_for_batch(strike.fault.seconds)


def _loader_workers() -> list[int]:
    """Pids of the live DataLoader workers of this process."""
    module = sys.modules.get("torch.utils.data.dataloader")
    iterator_type = getattr(module, "_MultiProcessingDataLoaderIter", None)
    if iterator_type is None:
        return []
    # type(), not isinstance: the latter would run __class__ of lazy module proxies that the collector knows too
    iterators = [o for o in gc.get_objects() if issubclass(type(o), iterator_type)]
    return sorted({w.pid for it in iterators for w in getattr(it, "_workers", ()) if w.is_alive()})


def _wait_for_batch(seconds: float) -> None:
    """In the very frames of a DataLoader without workers whose dataset does not answer."""
    torch = sys.modules.get("torch")
    if torch is None:
        _NeverReady(seconds)[0]
        return
    data = importlib.import_module("torch.utils.data")
    next(iter(data.DataLoader(_NeverReady(seconds), batch_size=1, generator=torch.Generator())))


class _NeverReady:
    """A dataset whose items take *seconds* to come."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        _wait(self._seconds)
        return index


def _teardown(strike: _Strike) -> None:
    if strike.fault.options["where"] == "thread":
        threading.Thread(target=_never_ends, args=(strike.fault.seconds,), name="fault-teardown", daemon=False).start()
    else:
        atexit.register(_never_ends, strike.fault.seconds)


def _never_ends(seconds: float) -> None:
    _wait(seconds)


def _ignore_term(strike: _Strike) -> None:
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except ValueError as e:
        raise CannotInjectError(f"steps are reported from another thread than the main one: {e}") from None


def _grandchildren(strike: _Strike) -> None:
    seconds = strike.fault.options["seconds"]
    sleep = "import sys, time; time.sleep(float(sys.argv[1]))"
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    # the child in between ends at once, so that its own child is handed to the nearest subreaper or to init
    orphan = (
        "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid(); os.write(int(sys.argv[2]), b'%d' % os.getpid())"
    )
    orphan += "; os.close(int(sys.argv[2])); time.sleep(float(sys.argv[1]))"
    try:
        between = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", orphan, seconds, str(write_end)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            pass_fds=(write_end,),
        )
        os.close(write_end)
        between.wait()
        orphan_pid = int(os.read(read_end, 32) or b"0")
    finally:
        os.close(read_end)
    pids = [_start_helper(sleep, seconds), _start_helper(sleep, seconds, start_new_session=True), orphan_pid]
    strike.note(pids=pids)


def _shm(strike: _Strike) -> None:
    size = _bytes(strike.fault.text, strike.fault.options["bytes"])
    # the name torch gives to a tensor shared by file: what a killed rank really leaves
    path = Path("/dev/shm") / f"torch_{os.getpid()}_{random.SystemRandom().getrandbits(32)}_0"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)
    except OSError as e:
        raise CannotInjectError(f"cannot leave a file in /dev/shm: {e.strerror}") from None
    strike.note(files=[str(path)])


# -- running out of memory ---------------------------------------------------------------------------------------------
def _oom(strike: _Strike) -> None:
    size = _bytes(strike.fault.text, strike.fault.options["bytes"])
    group = _enter_cgroup(size, Path("/proc/self"))
    strike.note(cgroup=str(group))
    blocks: list[bytes] = []
    block_bytes = min(size, 16 << 20)
    while len(blocks) * block_bytes < 4 * size:
        blocks.append(b"\1" * block_bytes)  # written to, so that every page is real and charged
    blocks.clear()
    raise CannotInjectError(f"the limit of {size} bytes in {group} did not take effect")


def _enter_cgroup(limit_bytes: int, proc: Path) -> Path:
    """Makes a memory cgroup with that limit and moves this process in; pages it has already stay where they are."""
    version, parent = _cgroup_parent("memory", proc)
    group = parent / f"{CGROUP_PREFIX}{os.getpid()}"
    limits = ["memory.limit_in_bytes"] if version == 1 else ["memory.max"]
    swap = ("memory.swappiness", "0") if version == 1 else ("memory.swap.max", "0")
    try:
        group.mkdir()
    except OSError as e:
        raise CannotInjectError(f"no right to make a memory cgroup ({group}: {e.strerror}); run as root") from None
    try:
        for name in limits:
            (group / name).write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # no swap accounting in this kernel
            (group / swap[0]).write_text(swap[1])
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as e:
        with contextlib.suppress(OSError):
            group.rmdir()
        hint = "; the parent cgroup does not hand the memory controller down" if version == 2 else ""
        raise CannotInjectError(f"cannot use a memory cgroup ({e.filename or group}: {e.strerror}{hint})") from None
    return group


def _cgroup_parent(controller: str, proc: Path) -> tuple[int, Path]:
    """Version and folder below which this process may get a cgroup of its own with that controller.

    In version 2 a cgroup with processes cannot have children with controllers, so the new one is a sibling there.
    """
    own = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    v1 = next((p for c, p in own.items() if controller in c.split(",")), None)
    wanted = "cgroup2" if v1 is None else "cgroup"
    path = own.get("", "") if v1 is None else v1
    if not path:
        raise CannotInjectError(f"this process is in no cgroup with a {controller} controller")
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fs_type, _, super_options = after.split(" ", 2)
        if fs_type != wanted or (wanted == "cgroup" and controller not in super_options.split(",")):
            continue
        root, mount = before.split(" ")[3:5]
        inside = path.removeprefix(root) if root != "/" else path
        folder = Path(mount) / inside.lstrip("/")
        folder = folder if folder.is_dir() else Path(mount)  # in a container the path may be the host's
        if wanted == "cgroup":
            return 1, folder
        return 2, folder.parent if folder != Path(mount) else folder
    raise CannotInjectError(f"no {controller} cgroup is mounted")


# -- becoming slow -----------------------------------------------------------------------------------------------------
def _slow(strike: _Strike, pace: Pace) -> Callable[[], None]:
    options = strike.fault.options
    share = int(options["percent"]) / 100
    try:
        return SlowPhase(pace, options["where"], share, asleep=options["how"] == "sleep").stop
    except CannotSlowError as e:
        raise CannotInjectError(str(e)) from None


def _throttle(strike: _Strike, pace: Pace) -> Callable[[], None]:
    version, parent = _cgroup_parent("cpu", Path("/proc/self"))
    group = parent / f"{CGROUP_PREFIX}{os.getpid()}"
    try:
        throttle = Throttle(pace, int(strike.fault.options["percent"]) / 100, group, version)
    except CannotSlowError as e:
        raise CannotInjectError(str(e)) from None
    except OSError as e:
        raise CannotInjectError(f"no right to use a CPU cgroup ({e.filename}: {e.strerror}); run as root") from None
    strike.note(cgroup=str(group), quota_us=throttle.quota_us)
    return throttle.stop


def _neighbour(strike: _Strike, pace: Pace) -> Callable[[], None]:
    neighbour = Neighbour(int(strike.fault.options["tasks"]))
    strike.note(pids=neighbour.pids)
    return neighbour.stop


# -- wrong numbers -----------------------------------------------------------------------------------------------------
def _wrong_bit(strike: _Strike) -> None:
    options = strike.fault.options
    tensor = None if options["tensor"] == "drawn" else options["tensor"]
    element, bit = (None if options[key] == "drawn" else int(options[key]) for key in ("element", "bit"))
    seed = f"{strike.fault.text}/{strike.rank}/{strike.attempt}/{strike.step}"

    def tell(done: Flipped) -> None:
        before, after = hex(done.before), hex(done.after)
        strike.say(f"flipped bit {done.bit} of element {done.element} of {done.tensor}: {before} is now {after}")
        strike.note(tensor=done.tensor, element=done.element, bit=done.bit, before=before, after=after)

    def strike_now() -> None:
        watched = () if strike.checks is None else strike.checks.watched()
        try:
            if options["target"] == "grad":
                flip_gradient(tensor, element, bit, seed, tell, watched)
            else:
                tell(flip(options["target"], tensor, element, bit, seed, watched))
        except CannotFlipError as e:
            strike.say(f"NOT injected: {e}")
            strike.note(refused=str(e))

    if strike.checks is None or strike.step is None or options["target"] == "grad":
        strike_now()
    elif options["at"] == "update":
        strike.checks.call_before_check(strike_now)
    else:
        strike.checks.call_after_check(strike_now)


_LASTING: Final[Mapping[str, Callable[[_Strike, Pace], Callable[[], None]]]] = {
    "slow": _slow,
    "throttle": _throttle,
    "neighbour": _neighbour,
}


_ACTIONS: Final[Mapping[str, Callable[[_Strike], None]]] = {
    "kill": _kill,
    "exit": _exit,
    "sysexit": _sysexit,
    "raise": _raise,
    "segfault": _segfault,
    "abort": _abort,
    "sleep": _sleep,
    "busy": _busy,
    "busy_c": _busy_c,
    "stop": _stop,
    "hang": _hang,
    "dataloader": _dataloader,
    "oom": _oom,
    "teardown": _teardown,
    "ignore_term": _ignore_term,
    "grandchildren": _grandchildren,
    "shm": _shm,
    "flip": _wrong_bit,
}


# -- afterwards --------------------------------------------------------------------------------------------------------
def clean_up(run_root: Path) -> list[str]:
    """Remove what the faults of a finished run left on purpose: empty memory cgroups and /dev/shm files.

    Paths come from a file, so only names that a fault could have made are touched. Processes are left to the run's own
    sweep: their numbers may belong to others by now.

    Returns:
        What was removed.
    """
    removed: list[str] = []
    for marker in sorted(run_root.glob(f"**/{MARKER}")):
        for line in marker.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            group = Path(str(record.get("cgroup", "")))
            if group.name == f"{CGROUP_PREFIX}{record.get('pid')}" and ".." not in group.parts:
                with contextlib.suppress(OSError):
                    group.rmdir()
                    removed.append(str(group))
            for file in map(Path, record.get("files", ())):
                if str(file.parent) == "/dev/shm" and file.name.startswith(f"torch_{record.get('pid')}_"):
                    with contextlib.suppress(OSError):
                        file.unlink()
                        removed.append(str(file))
    return removed
