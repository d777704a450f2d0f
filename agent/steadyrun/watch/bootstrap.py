"""From the start of the interpreter to the script: attach to the board, or stand by first and attach on orders.

Called by our ``sitecustomize``, so before the script and while Python's ``site`` is being imported. What must hold: the
script finds everything as it would without us, and nothing that goes wrong here keeps it from running.
"""

from __future__ import annotations

import atexit
import os
import sys
from _thread import start_new_thread

from steadyrun import watch
from steadyrun.watch import standby
from steadyrun.watch.dumps import Deadman, open_stacks, register_dumps
from steadyrun.watch.evidence import EvidenceServer, with_signals_blocked
from steadyrun.watch.flight import GROUPS_MODULE, FlightWatch
from steadyrun.watch.importhooks import ImportHooks
from steadyrun.watch.loaded import LoadedReport
from steadyrun.watch.marks import Marks, make_marks
from steadyrun.watch.setup import RankSetup
from steadyrun.watch.shadows import drop_shadowed
from steadyrun.watch.slot import Slot, SlotError, timing_writer
from steadyrun.watch.torchhooks import (
    CHECKPOINT_MODULE,
    CLIP_MODULE,
    OPTIMIZER_MODULE,
    OptimizerSteps,
    around_first_group,
    wrap_checkpointing,
    wrap_clipping,
)
from steadyrun.watch.uncaught import ExceptionRecorder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from steadyrun.watch.integrity import Integrity
    from steadyrun.watch.replay import Replay
    from steadyrun.watch.timing import Timing

__all__ = ["attach", "begin"]


def begin(
    setup_text: str | None, standby_text: str | None, raw_env: Mapping[str, str], modules: frozenset[str]
) -> None:
    """Become a rank, at once or after standing by. Returns when the script may begin; raises nothing.

    Args:
        setup_text, standby_text: STEADYRUN_SETUP or STEADYRUN_STANDBY.
        raw_env: the environment the process was started with.
        modules: names of the modules that were there before any of ours.
    """
    preset: Mapping[str, str | None] = {}
    try:
        if standby_text is not None:
            drop_shadowed(modules)  # so that the preload asks for them again, and is seen to
            told, orders = standby.stand_by(standby_text, raw_env)
            preset, setup = told.preset_env, orders.setup
        elif setup_text is not None:
            setup = RankSetup.parse(setup_text)
        else:
            return
        attach(setup, preset)
    except Exception as e:
        reason = str(e) if isinstance(e, (SlotError, OSError)) else f"{type(e).__name__}: {e}"
        _say(f"cannot watch this rank: {reason}; the script runs unwatched")
    finally:
        drop_shadowed(modules)


def attach(setup: RankSetup, preset: Mapping[str, str | None]) -> Marks:
    """Claim the slot and put everything in place that watches this process.

    Args:
        preset: a warm rank's changes of the environment during its preload.

    Raises:
        OSError, SlotError: there is no board, or the slot has an owner.
    """
    slot = Slot(setup.board, setup.slot)
    slot.check_free()
    marks = make_marks(slot.words, slot.base, slot.base_ns, os.getpid(), setup.rank, setup.attempt)
    watch._activate(marks, setup)
    deadman = _start_dumps(setup, marks)
    flight = FlightWatch(setup)
    recorder = ExceptionRecorder(setup.rank_dir, marks, flight.dump_at_exception)
    recorder.install()
    observers = _Observers(setup, slot, marks)
    faults = _Faults(setup, marks, observers)
    evidence = EvidenceServer(setup.rank_dir, marks, faults.inject, faults.answered, flight, observers.answer)
    report = None if setup.loaded_report is None else LoadedReport(setup.loaded_report, os.environ, preset)

    def finish() -> None:
        if marks.is_active():
            observers.finish()
            marks.finish()
            recorder.record_last()
            if deadman is not None:
                deadman.end()

    def on_fork() -> None:
        marks.forked()
        evidence.forked()
        flight.forked()

    def before_group() -> None:
        if marks.is_active():
            flight.before_group()

    def after_group() -> None:
        if marks.is_active():
            with_signals_blocked(flight.after_group)
            evidence.start()

    def on_first_step() -> None:
        _before_threads_are_joined(finish)  # once more: now before the callbacks of what was imported since
        evidence.start()

    marks.observe(first_step=on_first_step)
    if report is not None:
        write = report.write
        marks.observe(third_step=lambda: _in_thread(write))
    os.register_at_fork(after_in_child=on_fork)
    atexit.register(finish)
    hooks = _hook_imports(marks, recorder, report, finish, observers)
    if setup.flight is not None:
        hooks.after(GROUPS_MODULE, around_first_group(before_group, after_group))
    hooks.install()
    faults.start()
    return marks


def _start_dumps(setup: RankSetup, marks: Marks) -> Deadman | None:
    try:
        fd = open_stacks(setup.rank_dir)
        register_dumps(fd, setup.stack_signal)
    except (OSError, ValueError, RuntimeError) as e:
        _say(f"cannot write stacks to {setup.rank_dir}: {e}")
        return None
    if setup.deadman_s <= 0:
        return None
    deadman = Deadman(fd, setup.deadman_s)
    deadman.install()
    marks.observe(late=deadman.rearm, late_from_ns=0)
    return deadman


class _Observers:
    """What looks at the steps of an optimizer; made once there are optimizers: until then not even imported."""

    def __init__(self, setup: RankSetup, slot: Slot, marks: Marks) -> None:
        self._setup = setup
        self._slot = slot
        self._marks = marks
        self._timing: Timing | None = None
        self.integrity: Integrity | None = None
        self.replay: Replay | None = None
        self.before_first_update: Callable[[], None] | None = None

    def install(self, module: Any) -> None:
        """For ``torch.optim.optimizer``. What marks steps comes first, and what checks bytes last."""
        marks = self._marks
        steps = OptimizerSteps(marks, self._make_timing)
        steps.install(module)
        if self.before_first_update is not None:
            steps.after_first_update = _before_first_update(module, self.before_first_update)
        if marks.is_active() and self._setup.sdc != 0:
            self._make_integrity(module)
        timing, integrity = self._timing, self.integrity
        if integrity is None:
            return
        self._make_replay(module, integrity)
        replay, is_explicit = self.replay, marks.has_explicit_steps

        def checked(step: int) -> None:
            if is_explicit():  # else the optimizer's hook checks
                integrity.step_marked(step)
            if replay is not None and not replay.is_over:
                replay.step_marked(step)

        if timing is None:
            marks.observe(timed=checked, aside=integrity.aside_begins)
            return
        timed, aside, saving = timing.step_ends, timing.aside_begins, integrity.aside_begins

        def both(step: int) -> None:
            timed(step)
            checked(step)

        def both_aside(name: str) -> None:
            aside(name)
            saving(name)

        marks.observe(timed=both, aside=both_aside)

    def _make_timing(self, module: Any) -> Timing | None:
        setup, marks = self._setup, self._marks
        if not setup.timing or not marks.is_active():
            return None
        try:
            from steadyrun.watch.timing import Timing

            timing = Timing(timing_writer(self._slot.words, self._slot.base), setup.rank_dir)
            timing.install(module)
        except Exception as e:  # a torch unlike all that we know
            _say(f"cannot time steps: {type(e).__name__}: {e}")
            return None
        marks.observe(timed=timing.step_ends, aside=timing.aside_begins, aside_end=timing.aside_ends)
        os.register_at_fork(after_in_child=timing.forked)
        watch._activate_timing(timing)
        self._timing = timing
        return timing

    def _make_integrity(self, module: Any) -> None:
        setup = self._setup
        try:
            from steadyrun.watch.integrity import Integrity

            words, base = self._slot.words, self._slot.base
            integrity = Integrity(words, base, self._marks, setup.rank, setup.attempt, setup.rank_dir, setup.sdc, _say)
            integrity.install(module)
        except Exception as e:
            _say(f"cannot check the bytes of this rank: {type(e).__name__}: {e}")
            return
        os.register_at_fork(after_in_child=integrity.forked)
        watch._activate_integrity(integrity)
        self.integrity = integrity

    @property
    def wants_checks(self) -> bool:
        return self._setup.sdc != 0

    def clipped(self, norm: Any) -> None:
        if self.integrity is not None:
            self.integrity.clipped(norm)

    def _make_replay(self, module: Any, integrity: Integrity) -> None:
        setup = self._setup
        if setup.sdc_replay == 0:
            return
        try:
            from steadyrun.watch.replay import Replay

            words, base = self._slot.words, self._slot.base
            replay = Replay(
                words,
                base,
                integrity,
                setup.rank,
                setup.attempt,
                setup.rank_dir,
                setup.sdc_replay,
                self._timing,
            )
            replay.install(module)
        except Exception as e:
            _say(f"cannot replay microbatches of this rank: {type(e).__name__}: {e}")
            return
        os.register_at_fork(after_in_child=replay.forked)
        self.replay = replay

    def finish(self) -> None:
        if self._timing is not None:
            self._timing.finish()

    def watched(self) -> Sequence[Any]:
        return () if self.integrity is None else self.integrity.watched

    def call_before_check(self, call: Callable[[], None]) -> None:
        if self.integrity is None or not self.integrity.is_on:
            call()
        else:
            self.integrity.call_before_check(call)

    def call_after_check(self, call: Callable[[], None]) -> None:
        if self.integrity is None or not self.integrity.is_on:
            call()
        else:
            self.integrity.call_after_check(call)

    def answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        return None if self.integrity is None else self.integrity.answer(request)


def _before_first_update(module: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Returns what takes the hook out again: not while torch is walking over the hooks before an update."""
    calls = [call]

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if calls:
            calls.pop()()

    handle = module.register_optimizer_step_pre_hook(hook)

    def remove() -> None:
        if not calls:
            handle.remove()

    return remove


def _hook_imports(
    marks: Marks,
    recorder: ExceptionRecorder,
    report: LoadedReport | None,
    finish: Callable[[], None],
    observers: _Observers,
) -> ImportHooks:
    def on_threading(module: Any) -> None:
        _before_threads_are_joined(finish)
        recorder.install_for_threads(module)

    hooks = ImportHooks()
    if report is not None:
        note_env = report.note_env
        hooks.before("torch", lambda: note_env(os.environ))
    hooks.after("threading", on_threading)
    hooks.after(OPTIMIZER_MODULE, observers.install)
    hooks.after(CHECKPOINT_MODULE, wrap_checkpointing(marks.section))
    if marks.is_active() and observers.wants_checks:
        hooks.after(CLIP_MODULE, wrap_clipping(observers.clipped))
    return hooks


def _before_threads_are_joined(call: Callable[[], None]) -> None:
    """Have *call* made at the very beginning of the interpreter's end; ``atexit`` comes after the joining of threads.

    The callback registered last is called first. Without ``threading`` there are no threads to be joined.
    """
    register = getattr(sys.modules.get("threading"), "_register_atexit", None)
    try:
        if register is not None:
            register(call)
    except RuntimeError:  # it has begun already
        call()


def _in_thread(call: Callable[[], None]) -> None:
    """For what may wait for a slow file system."""
    try:
        start_new_thread(call, ())
    except RuntimeError:
        return


class _Faults:
    """The rank's fault plan: from its setup, or begun by the first injection."""

    def __init__(self, setup: RankSetup, marks: Marks, observers: _Observers) -> None:
        self._setup = setup
        self._marks = marks
        self._observers = observers
        self._plan: Any = None
        self._is_answering = False

    def start(self) -> None:
        """Begin the plan of the setup, if there is one; faults ``step=start`` strike here, none of them raises."""
        if not self._setup.faults:
            return
        try:
            self._begin(self._setup.faults)
        except Exception as e:
            _say(f"no faults: {e}")
            return
        self._observers.before_first_update = self._plan.on_load
        self._plan.on_start()

    def inject(self, text: str) -> tuple[str, ...]:
        """Add to the plan. Raises what the plan raises on a text that cannot be used."""
        self._is_answering = True
        if self._plan is None:
            self._begin("")
        answers: tuple[str, ...] = self._plan.add(text, step=self._marks.last_step())
        return answers

    def answered(self) -> None:
        """Whoever injected knows: the fault may strike."""
        self._is_answering = False

    def _on_step(self, step: int) -> None:
        if not self._is_answering:
            self._plan.on_step(step)

    def _begin(self, text: str) -> None:
        from pathlib import Path

        from steadyrun.testing.faults import FaultPlan

        setup = self._setup
        self._plan = FaultPlan.parse(
            text, setup.rank, setup.attempt, rank_dir=Path(setup.rank_dir), checks=self._observers
        )
        self._marks.observe(each_step=self._on_step)


def _say(text: str) -> None:
    sys.stderr.write(f"steadyrun: {text}\n")
