"""How long a rank worked in each step and how long it waited for others, of an unmodified script.

In synchronous training all ranks' steps take equally long, and the backward of a slow rank looks shorter than that of
its peers, who wait in it. What tells is each rank's own work. Its edges:

- forward begins when the script calls its model (``calls``). DDP waits for buffers before it calls the module inside,
  so with DDP forward begins there.
- backward begins when autograd comes to the model's output (a hook of it), and its own work ends with the
  last gradient: a callback queued in the engine at the beginning of a backward runs when all gradients are there,
  before those that DDP queues to wait for its reduction. One queued in that callback runs when backward ends.
- the optimizer has torch's own global hooks. Between backward and it the gradients are clipped: counted with it.
- data is what is left between the optimizer and the next forward.
- waits in collectives called from Python, FSDP2's and those of the script among them, are seen in ``Work.wait``.
- sections ``checkpointing`` and ``evaluation`` are left out.

Own work on a CPU is the thread's CPU time, and where the thread gave its core away of its own accord the wall clock
less run delay, less known waits (``ledger`` has the rule). What it was kept from its core is told apart as starved.
Why, measured with 4 ranks on 2 loaded cores: by the wall clock alone own work of equal ranks differs by 13 %, less run
delay by 3 %; a quota or a busy neighbour shows in the starved time, more work in own work; and CPU time alone would not
see a rank that waits for its disk.

A step of which not everything was seen (a failed forward, a backward that did not end, a model called in a way that
nobody sees) is told without own work rather than with a wrong one. So are steps of models on a device: the host only
queues their work, and its clocks say nothing of it.

What a step took is worked out for the steps of a quarter of a second at once: in a rank that trains the code is in no
cache, so the first of them takes 20 us and each of the others a third of that.

Nothing here raises into the script or waits. One thread is timed: the one that made the first step.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from time import monotonic, thread_time

from steadyrun.watch.calls import (
    WatchedCall,
    call_at_backward,
    find_roots,
    grad_tensors,
    parameters_of,
    unwatch,
    watch_calls,
)
from steadyrun.watch.ledger import (
    AFTER,
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    NO_GRAD,
    OPTIMIZER,
    PROBE,
    PROLOGUE,
    TAIL,
    Ledger,
    split,
    wall_s,
)
from steadyrun.watch.probe import FixedWork, Rhythm
from steadyrun.watch.roles import coordinates_among, coordinates_of, write_role
from steadyrun.watch.slot import move_high
from steadyrun.watch.torchhooks import uncompiled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["Timing"]

NAN = float("nan")
# Those of core.timing, which is not imported into ranks: dataclasses cost a starting rank 30 ms.
TAG_FIRST, TAG_CHECKPOINT, TAG_EVALUATION, TAG_COMPILE, TAG_FORWARD_SEEN, TAG_DEVICE = 1, 2, 4, 8, 16, 32
_FIRST = 5  # steps after the first that are told as such
_LEARN = 3  # steps in which it is learned which modules the script calls
_BLIND_STEPS = 10  # steps without a forward after which the model is looked for again
_SEARCHES = 5
_OPTIMIZERS = 16  # whose parameters tell which modules are trained
_LEAST_COMPILE_S = 0.005  # a frame is never compiled in less
_TOLD_S = 0.25  # steps that end within so much time are told at once,
_MOST_UNTOLD = 16  # but no more than these
_FRESH_S = 0.0001  # the optimizer has just ended: its last instant is the step's
_C10D = "torch.distributed.distributed_c10d"


class Timing:
    """Times the steps of one rank.

    Args:
        put: writes a timing to the board (``slot.timing_writer``).
        rank_dir: where role.json goes.
    """

    # Slots: with more than 30 attributes in a dictionary each one is a look-up, in a rank with cold caches.
    __slots__ = (
        "_asides",
        "_before_aside",
        "_before_call",
        "_before_pause",
        "_began_s",
        "_begun",
        "_calls",
        "_compiled",
        "_depth",
        "_device",
        "_ended",
        "_ended_s",
        "_engine",
        "_flags",
        "_forwards",
        "_has_tail",
        "_is_broken",
        "_is_compiling",
        "_is_grad_enabled",
        "_is_learning",
        "_is_off",
        "_ledger",
        "_left",
        "_newest_optimizer",
        "_no_grad",
        "_no_grad_before",
        "_optimizer_depth",
        "_optimizers",
        "_probe",
        "_probe_s",
        "_put",
        "_rank_dir",
        "_rhythm",
        "_searches",
        "_step_s",
        "_steps",
        "_tell_at_s",
        "_thread",
        "_told_role",
        "_unseen",
        "_untold",
        "_work",
    )

    def __init__(self, put: Callable[..., None], rank_dir: str) -> None:
        self._put = put
        self._rank_dir = rank_dir
        self._ledger: Ledger | None = None
        self._thread = 0  # none yet
        self._is_off = False
        self._optimizers: list[Any] = []  # weak references
        self._newest_optimizer: Callable[[], Any] = lambda: None
        self._calls: list[WatchedCall] = []
        self._is_learning = False
        self._searches = 0
        self._steps = 0
        self._unseen = 0  # steps in a row without own work
        self._began_s = 0.0
        self._step_s = 0.0
        self._depth = 0
        self._optimizer_depth = 0
        self._asides = 0
        self._before_aside = DATA
        self._before_call = DATA
        self._before_pause = DATA
        self._forwards = self._begun = self._ended = self._left = 0
        self._has_tail = True
        self._no_grad = 0
        self._no_grad_before = (0, 0)
        self._is_broken = False
        self._flags = 0
        self._work = NAN
        self._probe: FixedWork | None = None
        self._probe_s = NAN
        self._rhythm = Rhythm()
        self._untold: list[tuple[Any, ...]] = []  # what ``_write`` takes, of steps that were not told yet
        self._tell_at_s = 0.0
        self._ended_s = 0.0  # the newest step
        self._device: Any = None
        self._compiled = 0
        self._told_role: dict[str, int] | None = None
        self._engine: Any = None
        self._is_compiling: Callable[[], bool] = lambda: False
        self._is_grad_enabled: Callable[[], bool] = lambda: True

    # -- from the bootstrap --------------------------------------------------------------------------------------------
    def install(self, module: Any) -> None:
        """Register with ``torch.optim.optimizer``, while torch is being imported."""
        module.register_optimizer_step_pre_hook(self.optimizer_begins)

    def forked(self) -> None:
        """In the child of a fork nothing is timed."""
        self._is_off = True

    def finish(self) -> None:
        """At the end of the script: tell of its last steps."""
        if not self._is_off and get_ident() == self._thread:
            self._tell()

    # -- what the script says ------------------------------------------------------------------------------------------
    def work(self, n: float) -> None:
        """The present step does *n* more of work."""
        if isinstance(n, (int, float)) and 0 <= n < 1e300:
            self._work = n if self._work != self._work else self._work + n

    def role(self, **coordinates: int) -> None:
        """The rank's place, by the script's own word."""
        try:
            told = {str(k): int(v) for k, v in coordinates.items()}
        except (TypeError, ValueError):
            return
        self._tell_role(told)

    def _tell_role(self, coordinates: dict[str, int]) -> None:
        if self._is_off or coordinates == self._told_role:
            return
        self._told_role = coordinates
        try:
            write_role(self._rank_dir, coordinates)
        except OSError:  # then ranks are compared as if they had one role
            return

    # -- edges ---------------------------------------------------------------------------------------------------------
    @uncompiled
    def optimizer_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch's hook, before each ``step`` of any optimizer."""
        if self._ledger is None or self._is_compiling() or self._is_off:
            return
        if get_ident() != self._thread or self._asides:
            return
        if not self._optimizer_depth:
            ledger = self._ledger
            if ledger.account == AFTER:
                ledger.account = OPTIMIZER  # that is what it was: no clock has to be read
            else:
                ledger.turn_to(OPTIMIZER)
        self._optimizer_depth += 1

    def optimizer_ends(self, optimizer: Any) -> None:
        """After each ``step`` of any optimizer, before that is marked."""
        if self._is_off:
            return
        if self._newest_optimizer() is not optimizer:
            self._note(optimizer)
        if get_ident() != self._thread or self._asides or not self._optimizer_depth:
            return
        self._optimizer_depth -= 1
        if not self._optimizer_depth:
            ledger = self._ledger
            assert ledger is not None
            ledger.turn_to(DATA)

    def _note(self, optimizer: Any) -> None:
        for known in self._optimizers:
            if known() is optimizer:
                self._newest_optimizer = known
                return
        if len(self._optimizers) < _OPTIMIZERS:
            from _weakref import ref

            self._newest_optimizer = ref(optimizer)
            self._optimizers.append(self._newest_optimizer)

    def call_begins(self, call: WatchedCall) -> bool:
        if self._is_off or get_ident() != self._thread or self._asides:
            return False
        ledger = self._ledger
        assert ledger is not None
        if self._depth:
            if ledger.account == PROLOGUE:
                ledger.turn_to(FORWARD)
            return False
        if ledger.account == BACKWARD:  # a checkpointed model is called again in its backward
            return False
        self._depth = 1
        if self._is_grad_enabled():
            call.outer_calls += 1
            module = call.module()
            if module is not None and not module.training:
                self._no_grad += 1
            self._before_call = FORWARD
            ledger.turn_to(PROLOGUE if call.has_prologue else FORWARD)
        else:
            self._no_grad += 1
            self._before_call = ledger.account
            ledger.turn_to(NO_GRAD)
        return True

    def call_ends(self, call: WatchedCall, output: Any) -> None:
        ledger = self._ledger
        if ledger is None or self._is_off or not self._depth:
            return
        self._depth = 0
        if ledger.account == NO_GRAD:
            ledger.turn_to(self._before_call)
            return
        if ledger.account == PROLOGUE:  # the module inside was not called the usual way
            ledger.turn_to(FORWARD)
            self._is_broken = True
        self._forwards += 1
        try:
            for tensor in grad_tensors(output):
                call_at_backward(tensor, self._backward_begins)
        except Exception:
            self._is_broken = True

    def call_failed(self) -> None:
        self._depth = 0
        self._is_broken = True
        if self._ledger is not None and self._ledger.account in (FORWARD, NO_GRAD, PROLOGUE):
            self._ledger.turn_to(DATA)

    def _backward_begins(self, gradients: Any) -> None:
        if self._is_compiling() or self._is_off or self._asides:
            return
        ledger = self._ledger
        if ledger is None or get_ident() != self._thread:
            self._is_broken = True
            return
        if ledger.account == BACKWARD and self._begun > self._ended:  # another output of the same backward
            return
        ledger.turn_to(BACKWARD)
        self._begun += 1
        try:
            self._engine.queue_callback(self._gradients_done)
        except Exception:
            self._is_broken = True

    _backward_begins.__torch_unserializable__ = True  # type: ignore[attr-defined]  # a saved output is not warned of it

    def _gradients_done(self) -> None:
        ledger = self._ledger
        if ledger is None or self._is_off or get_ident() != self._thread:
            self._is_broken = True
            return
        if ledger.account != BACKWARD:
            self._is_broken = True
            return
        self._ended += 1
        if not self._has_tail:
            self._left += 1
            ledger.turn_to(AFTER)
            return
        ledger.turn_to(TAIL)
        try:
            self._engine.queue_callback(self._backward_done)
        except Exception:
            self._is_broken = True

    def _backward_done(self) -> None:
        ledger = self._ledger
        if ledger is None or self._is_off or get_ident() != self._thread:
            return
        if ledger.account == TAIL:
            self._left += 1
            ledger.turn_to(AFTER)

    def aside_begins(self, name: str) -> None:
        """The script enters a section whose time is no step's own work."""
        if self._is_off or get_ident() != self._thread:
            return
        ledger = self._ledger
        assert ledger is not None
        if not self._asides:
            self._tell()  # the next step may be long in coming
            self._before_aside = ledger.account
            is_saving = name == "checkpointing"
            self._flags |= TAG_CHECKPOINT if is_saving else TAG_EVALUATION
            ledger.turn_to(CHECKPOINT if is_saving else EVALUATION)
        self._asides += 1

    def aside_ends(self) -> None:
        if self._is_off or get_ident() != self._thread or not self._asides:
            return
        self._asides -= 1
        if not self._asides:
            ledger = self._ledger
            assert ledger is not None
            ledger.turn_to(self._before_aside)

    def pause(self) -> None:
        """What follows is no step's own work, until ``go_on``; by the thread that is timed, for work of ours."""
        ledger = self._ledger
        if ledger is not None and not self._is_off and get_ident() == self._thread:
            self._before_pause = ledger.account
            ledger.turn_to(PROBE)

    def go_on(self) -> None:
        ledger = self._ledger
        if ledger is not None and not self._is_off and get_ident() == self._thread and ledger.account == PROBE:
            ledger.turn_to(self._before_pause)

    # -- steps ---------------------------------------------------------------------------------------------------------
    def step_ends(self, step: int) -> None:
        """A step was marked, by the optimizer or by the script."""
        if self._is_off:
            return
        if self._ledger is None:
            self._start()
            return
        if get_ident() != self._thread:
            return
        ledger = self._ledger
        self._asides = 0  # a script that trains inside such a section means something else by its name
        if ledger.account != DATA or ledger.waited_s or ledger.at_s < monotonic() - _FRESH_S:
            ledger.turn_to(DATA)
        self._optimizer_depth = self._depth = 0
        self._steps += 1
        now_s = ledger.at_s
        if now_s - self._ended_s > self._step_s + _LEAST_COMPILE_S:
            self._look_for_compiled()
        self._ended_s = now_s
        is_seen = self._forwards > 0 and self._begun == self._ended == self._left > 0 and not self._is_broken
        self._untold.append(
            (step, now_s, ledger.take(), is_seen, self._no_grad, self._flags, self._probe_s, self._work)
        )
        self._forwards = self._begun = self._ended = self._left = self._no_grad = 0
        self._is_broken = False
        self._flags = 0
        self._work = self._probe_s = NAN
        if now_s >= self._tell_at_s or self._steps <= _FIRST or self._unseen or len(self._untold) >= _MOST_UNTOLD:
            self._tell()
            self._tell_at_s = now_s + _TOLD_S
        if self._is_learning or self._unseen >= _BLIND_STEPS:
            self._learn()
        if self._rhythm.is_due(step, self._step_s):
            self._run_probe(ledger)

    def _look_for_compiled(self) -> None:
        compiled = frames_compiled()
        if compiled != self._compiled:
            self._compiled = compiled
            self._flags |= TAG_COMPILE

    def _tell(self) -> None:
        for step in self._untold:
            self._write(*step)
        self._untold.clear()

    def _start(self) -> None:
        torch = sys.modules["torch"]
        self._is_compiling = torch.compiler.is_compiling
        self._is_grad_enabled = torch.is_grad_enabled
        self._engine = torch.autograd.Variable._execution_engine
        self._thread = get_ident()
        self._ledger = Ledger(monotonic, thread_time, run_delay_clock(), rest_counter())
        self._began_s = self._ledger.at_s
        self._work = NAN  # of a step that was not timed
        self._watch_waits()
        self._search()
        self._ledger.turn_to(DATA)
        self._ledger.clear()  # what the search took is no step's
        self._began_s = self._ledger.at_s

    def _write(
        self,
        step: int,
        now_s: float,
        totals: list[float],
        is_seen: bool,
        no_grad: int,
        flags: int,
        probe_s: float,
        work: float,
    ) -> None:
        """Tell of a step that ended at *now_s*.

        Args:
            is_seen: all of its forwards and backwards were.
            no_grad: how many forwards without gradients it had.
        """
        assert self._ledger is not None
        blind = self._ledger.blind
        forward_s, waited_s, starved_s, cpu_s = split(totals, FORWARD, FORWARD in blind)
        backward_s, waited, starved, cpu = split(totals, BACKWARD, BACKWARD in blind)
        waited_s, starved_s, cpu_s = waited_s + waited, starved_s + starved, cpu_s + cpu
        optimizer_s, waited, starved, cpu = split(totals, OPTIMIZER, OPTIMIZER in blind)
        waited_s, starved_s, cpu_s = waited_s + waited, starved_s + starved, cpu_s + cpu
        data_s, waited, starved, cpu = split(totals, DATA, DATA in blind)
        waited_s, starved_s, cpu_s = waited_s + waited, starved_s + starved, cpu_s + cpu
        no_grad_s, group_wait_s = 0.0, NAN
        if self._has_tail or no_grad:
            no_grad_s, waited, starved, cpu = split(totals, NO_GRAD, NO_GRAD in blind)
            waited_s, starved_s, cpu_s = waited_s + waited, starved_s + starved, cpu_s + cpu
            before_s, group_wait_s, _, cpu = split(totals, PROLOGUE, is_blind=True)
            forward_s, cpu_s = forward_s + before_s, cpu_s + cpu
            _, waited, _, cpu = split(totals, TAIL, is_blind=True)
            group_wait_s, cpu_s = group_wait_s + waited, cpu_s + cpu
            waited_s += group_wait_s
        step_s = now_s - self._began_s
        self._began_s = now_s
        self._step_s += (step_s - self._step_s) * (0.1 if self._step_s else 1.0)
        if self._steps <= _FIRST:
            flags |= TAG_FIRST
        earlier, last = self._no_grad_before
        if no_grad > earlier and no_grad > last and self._steps > 1:
            flags |= TAG_EVALUATION
        self._no_grad_before = (last, no_grad)
        if not flags & TAG_EVALUATION:
            forward_s += no_grad_s
        is_whole = is_seen and self._device is None
        busy_s = 0.0
        if is_whole:
            flags |= TAG_FORWARD_SEEN
            busy_s = forward_s + backward_s + optimizer_s + data_s
            self._unseen = 0
        else:
            forward_s = backward_s = optimizer_s = data_s = 0.0
            self._unseen += 1
        if not is_whole or not self._has_tail:
            group_wait_s = NAN
        self._put(
            step,
            now_s,
            step_s,
            busy_s,
            forward_s,
            backward_s,
            optimizer_s,
            data_s,
            wall_s(totals, CHECKPOINT),
            waited_s,
            cpu_s,
            probe_s,
            work,
            flags,
            starved_s,
            group_wait_s,
        )

    # -- the model -----------------------------------------------------------------------------------------------------
    def _search(self) -> None:
        """Find the modules that the script calls; all that might be are watched until that is known."""
        if self._searches >= _SEARCHES:
            return
        self._searches += 1
        self._unseen = 0
        self._steps = 0
        unwatch(self._calls)
        self._calls = []
        try:
            optimizers = [o for o in (r() for r in self._optimizers) if o is not None]
            roots = find_roots(optimizers)
            self._calls = watch_calls(roots, self)
            parameters = [p for root in roots for p in parameters_of(root)]
            self._look_at(roots, parameters)
        except Exception:  # objects of all kinds were looked at
            unwatch(self._calls)
            self._calls = []
            return
        self._is_learning = True

    def _look_at(self, roots: list[Any], parameters: list[Any]) -> None:
        """What the model is made of decides how it is timed."""
        ledger = self._ledger
        assert ledger is not None
        device = next((p.device for p in parameters), None)
        self._device = None if device is None or device.type == "cpu" else device
        meshes = {id(p.device_mesh): p.device_mesh for p in parameters if hasattr(p, "device_mesh")}
        blind = {PROLOGUE, TAIL}
        if meshes:
            blind.add(OPTIMIZER)  # the norm of distributed gradients waits where Python does not see it
            is_sharded_only = any(is_fully_sharded(m) for r in roots for m in (r, *r.__dict__["_modules"].values()))
            if not is_sharded_only or any(mesh.ndim > 1 for mesh in meshes.values()):
                blind |= {FORWARD, BACKWARD, NO_GRAD}  # so do the operations of tensor parallelism
        ledger.blind = frozenset(blind)
        distributed = sys.modules.get("torch.distributed")
        is_alone = distributed is None or not distributed.is_available() or not distributed.is_initialized()
        self._has_tail = not is_alone and not meshes  # DDP's, or whatever else reduces gradients
        found = coordinates_of(parameters) or coordinates_among(roots)
        if found and self._told_role is None:
            self._tell_role(found)

    def _learn(self) -> None:
        if self._unseen >= _BLIND_STEPS:
            ledger = self._ledger
            assert ledger is not None
            ledger.turn_to(PROBE)
            self._search()
            ledger.turn_to(DATA)
            return
        if self._steps < _LEARN:
            return
        self._is_learning = False
        called = {id(c.module()) for c in self._calls if c.outer_calls}
        inside = {
            id(child)
            for c in self._calls
            if c.outer_calls and c.has_prologue
            for child in c.module().__dict__["_modules"].values()
        }
        keep = called | inside
        unwatch(c for c in self._calls if id(c.module()) not in keep)
        self._calls = [c for c in self._calls if id(c.module()) in keep]

    def _watch_waits(self) -> None:
        """See the waits of collectives called from Python: ``Work.wait`` is where all of them are."""
        work = getattr(sys.modules.get(_C10D), "Work", None)
        original = getattr(work, "wait", None)
        if work is None or original is None or getattr(original, "is_timed", False):
            return

        def wait(*args: Any, **kwargs: Any) -> Any:
            if self._is_off or get_ident() != self._thread:
                return original(*args, **kwargs)
            began_s = monotonic()
            try:
                return original(*args, **kwargs)
            finally:
                assert self._ledger is not None
                self._ledger.waited_s += monotonic() - began_s

        wait.__doc__ = original.__doc__
        wait.is_timed = True  # type: ignore[attr-defined]
        try:
            work.wait = wait
        except (AttributeError, TypeError):
            return

    # -- the probe -----------------------------------------------------------------------------------------------------
    def _run_probe(self, ledger: Ledger) -> None:
        try:
            if self._probe is None:
                torch = sys.modules["torch"]
                self._probe = FixedWork(self._device or torch.device("cpu"))
                self._probe.run()  # once for what is only done once
            ledger.turn_to(PROBE)
            before_s = ledger.at_s
            self._probe.run()
            ledger.turn_to(DATA)
        except Exception:  # no memory, say
            ledger.turn_to(DATA)
            self._rhythm.cost_s = float("inf")
            return
        self._rhythm.took(ledger.at_s - before_s)
        if self._device is None:
            self._probe_s = ledger.split(PROBE)[0]


def run_delay_clock() -> Callable[[], float]:
    """Seconds for which the calling thread could have run and did not; always 0 where the kernel does not tell.

    The file belongs to the thread that opens it. Reading it takes 2 us.
    """
    try:
        fd = move_high(os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC))
        read = os.pread
        int(read(fd, 64, 0).split()[1])
    except (OSError, ValueError, IndexError):
        return lambda: 0.0

    def delay() -> float:
        try:
            return int(read(fd, 64, 0).split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):  # the script has closed files that are not its own
            return 0.0

    return delay


def rest_counter() -> Callable[[], int] | None:
    """How often the calling thread has given its core away of its own accord; None where nobody can tell.

    The CPU time that the same call tells is that of the last timer tick.
    """
    try:
        from resource import RUSAGE_THREAD, getrusage
    except ImportError:
        return None

    def rests() -> int:
        return getrusage(RUSAGE_THREAD).ru_nvcsw

    return rests


def frames_compiled() -> int:
    """How many frames torch's compiler has taken up so far."""
    module = sys.modules.get("torch._dynamo.utils")
    try:
        return 0 if module is None else int(module.counters["frames"].get("total", 0))
    except Exception:
        return 0


def is_fully_sharded(module: Any) -> bool:
    return any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(module).__mro__)
