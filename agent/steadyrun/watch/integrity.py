"""The bytes that a rank holds, told at checks: an unmodified script's parameters, optimizer state and buffers.

What is said and when is in ``core.integrity``; how it is hashed, in ``integrity.fingerprint``. Where it happens:

- before the first update of an optimizer the model is looked for (``calls.find_roots``), a plan is made of it
  (``integrity.groups``) and what was loaded is hashed;
- after an update, or when the script marks a step itself, a check is made if one is due. An optimizer inside another
  (ZeroRedundancyOptimizer) has not finished the update: only the outermost one counts;
- before the next update all that was hashed must be as it was left;
- a save begins with a check, if there was none since the update;
- a loss or a norm of gradients that is out of line (``watch.guards``) makes a check after the next update, here at
  once and on the other ranks at a step that their agents tell all of them.

On a device nothing waits: kernels are put into the stream, the roots come back into pinned memory, and are told at a
later call once they are there. No collective, no copy of a tensor.

What checks cost is measured, by the clock of the thread or of the device's stream. Automatic intervals are doubled
until that is below the share. So are those between saves that are checked.

Nothing here raises into the script. The thread that makes the first update is the only one that is watched.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock, get_ident
from time import monotonic_ns

from steadyrun.core.layout import (
    H_CHECK_AT,
    S_HASH_CHECKS,
    S_HASH_COST,
    S_HASH_GENERATION,
    S_HASH_INTERVAL,
    S_HASH_RING,
    S_HASH_RINGS,
    S_HASH_STATE,
    S_HASH_STEP,
)
from steadyrun.watch.calls import find_roots
from steadyrun.watch.files import write_whole
from steadyrun.watch.guards import Guards
from steadyrun.watch.slot import move_high
from steadyrun.watch.stopwatch import Stopwatch
from steadyrun.watch.torchhooks import is_initialisation, uncompiled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from steadyrun.core.integrity import RingWriter
    from steadyrun.integrity.batch import Batch
    from steadyrun.integrity.fingerprint import Hasher
    from steadyrun.integrity.groups import Comparison
    from steadyrun.watch.marks import Marks

__all__ = ["Integrity", "doubled"]

SHARE = 0.0005  # of the time, for checks at intervals; as much again for those of saves
_ON, _OFF, _FAILED = 1, 2, 3  # places in core.integrity.STATES
_LOADED, _BEFORE, _AFTER, _CHECKPOINT = range(4)
_OPTIMIZERS = 16
_PLANS = 32  # a script whose optimizer state changes its form with each step is left alone
_SEARCHES = 5
_ROOM = 6  # tensors that the ring holds for each of the first plan: Adam keeps three, and they come after it
_CAPTURE_BYTES = 16 << 20
_DOUBLINGS = 20


def doubled(cost_s: float, every_s: float, base: int, share: float, now: int = 0) -> int:
    """The smallest of *base*, 2 *base*, 4 *base*, ... with which *cost_s* is at most *share* of the time.

    Args:
        every_s: how long one of what is counted takes.
        now: the present interval: it is only lowered where half of the share would do, so that it does not go to and
            fro.
    """
    interval = base
    for _ in range(_DOUBLINGS):
        allowed_s = share * interval * every_s
        if cost_s <= (allowed_s if interval >= now else allowed_s / 2):
            break
        interval *= 2
    return interval


class Integrity:
    """Checks the bytes of one rank.

    Args:
        words, base: the board, and where the slot begins.
        every: steps between checks; None: what their cost allows.
    """

    # Slots: with more than 30 attributes in a dictionary each one is a look-up, in a rank with cold caches.
    __slots__ = (
        "_after_check",
        "_aside_ns",
        "_attempt",
        "_base",
        "_batches",
        "_before_check",
        "_captures",
        "_check_s",
        "_checked_step",
        "_checks",
        "_cost_ns",
        "_every",
        "_fingers",
        "_generation",
        "_guards",
        "_hashers",
        "_interval",
        "_is_compiling",
        "_is_off",
        "_kept",
        "_known_optimizers",
        "_last_step",
        "_loaded",
        "_lock",
        "_marks",
        "_models",
        "_open",
        "_optimizers",
        "_orders",
        "_plan",
        "_rank",
        "_rank_dir",
        "_requested",
        "_ring",
        "_rings",
        "_save_interval",
        "_save_ns",
        "_save_s",
        "_saves",
        "_say",
        "_searches",
        "_sources",
        "_step_ns",
        "_step_s",
        "_steps",
        "_task",
        "_thread",
        "_waiting",
        "_words",
        "buffers",
        "replicas",
    )

    def __init__(
        self,
        words: memoryview,
        base: int,
        marks: Marks,
        rank: int,
        attempt: int,
        rank_dir: str,
        every: int | None,
        say: Callable[[str], None],
    ) -> None:
        self._words = words
        self._base = base
        self._marks = marks
        self._rank = rank
        self._attempt = attempt
        self._rank_dir = rank_dir
        self._every = every
        self._say = say
        self._is_off = False
        self._thread = 0
        self._open: list[int] = []  # ids of the optimizers that are inside their step
        self._optimizers: list[Any] = []  # weak references
        self._is_compiling: Callable[[], bool] = lambda: False
        self._task: Callable[[], int] = lambda: -1
        self._sources: tuple[Comparison, ...] = ()
        self._batches: list[_DeviceBatch] = []
        self._hashers: dict[str, Hasher] = {}
        self._generation = 0
        self._searches = 0
        self._fingers: tuple[int, ...] = ()
        self._known_optimizers: tuple[int, ...] = ()
        self._plan: Any = None
        self._models: dict[str, Any] = {}  # weak references by prefix
        self._ring: RingWriter | None = None
        self._rings = 0
        self._checks = 0
        self._kept: list[_Kept] = []
        self._waiting: list[_Kept] = []  # asked of a device and not there yet
        self._loaded: _Kept | None = None  # the number of its step is known after the first update
        self._last_step: int | None = None
        self._checked_step: int | None = None  # nothing has been updated since the check after this one
        self._steps = 0
        self._step_s = 0.0
        self._step_ns = 0
        self._save_s = 0.0
        self._save_ns = 0
        self._saves = 0
        self._check_s = 0.0
        self._cost_ns = 0
        self._aside_ns = 0  # what was done around checks since the last one was told: the next one tells it
        self._interval = every or 50
        self._save_interval = 1
        self._before_check: list[Callable[[], None]] = []
        self._after_check: list[Callable[[], None]] = []
        self._guards = Guards(words, base, say, lambda _: self.request(self._next_step()))
        self._requested: int | None = None
        self._captures: list[dict[str, Any]] = []
        self._orders: list[tuple[str, tuple[int, ...], int]] = []
        self._lock = allocate_lock()  # of captures and orders: held for an instant
        self.buffers: tuple[str, ...] = ()
        self.replicas: dict[str, tuple[int, ...]] = {}

    # -- from the bootstrap --------------------------------------------------------------------------------------------
    def install(self, module: Any) -> None:
        """Register with ``torch.optim.optimizer``, after what marks steps."""
        module.register_optimizer_step_pre_hook(self.update_begins)
        module.register_optimizer_step_post_hook(self.update_ends)

    def forked(self) -> None:
        self._is_off = True

    def declare(self, replicas: Any, buffers: Sequence[str]) -> None:
        """From ``watch.replicas``: taken into the next plan."""
        try:
            self.replicas.update({str(k): tuple(int(r) for r in v) for k, v in dict(replicas or {}).items()})
            self.buffers += tuple(map(str, buffers))
        except (TypeError, ValueError) as e:
            self._say(f"cannot use what watch.replicas was given: {e}")
        self._fingers = ()

    def loss(self, value: Any) -> None:
        """From ``watch.loss``."""
        if self._is_mine():
            try:
                self._guards.loss(self._next_step() - 1, value)
            except Exception as e:
                self._fail(e)

    def clipped(self, norm: Any) -> None:
        """The script has the norm of its gradients, in order to clip them."""
        if self._is_mine():
            try:
                self._guards.clipped(norm)
            except Exception as e:
                self._fail(e)

    def _is_mine(self) -> bool:
        return not self._is_off and self._thread in (0, get_ident()) and not self._is_compiling()

    def request(self, step: int) -> None:
        """Check after *step* out of turn, too, which is to come; later than one asked for before changes nothing."""
        if self._requested is None or not self._next_step() <= self._requested <= step:
            self._requested = step

    def _next_step(self) -> int:
        return 0 if self._last_step is None else self._last_step + 1

    @property
    def is_on(self) -> bool:
        return not self._is_off and self._generation > 0

    @property
    def thread(self) -> int:
        """The one that is watched; 0: not known yet."""
        return self._thread

    @property
    def step_s(self) -> float:
        """An average step; 0: not known yet."""
        return self._step_s

    def models(self) -> list[Any]:
        """The outermost modules that the optimizers update, as far as they were looked for."""
        return [m for m in (known() for known in self._models.values()) if m is not None]

    def hasher(self, device: Any) -> Hasher:
        """For tensors on *device*; for the thread that is watched, or while that waits."""
        from steadyrun.integrity.fingerprint import Hasher

        known = {str(b.hasher.device): b.hasher for b in self._batches} | self._hashers
        return self._hashers.setdefault(str(device), known.get(str(device)) or Hasher(device))

    def is_outermost(self, optimizer: Any) -> bool:
        """Whether an update of *optimizer* has just begun, and inside of no other."""
        return not self._is_off and self._open == [id(optimizer)]

    @property
    def watched(self) -> tuple[Comparison, ...]:
        """What is hashed."""
        return self._sources

    def call_before_check(self, call: Callable[[], None]) -> None:
        """Call before the newest step, or the next one if that is over, is looked at: for a fault in an update."""
        self._before_check.append(call)

    def call_after_check(self, call: Callable[[], None]) -> None:
        """Call once the newest step has been looked at: for a fault at rest."""
        if self._last_step == self._marks.last_step():
            call()
        else:
            self._after_check.append(call)

    # -- edges ---------------------------------------------------------------------------------------------------------
    @uncompiled
    def update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch's hook, before each ``step`` of any optimizer."""
        if self._is_off or self._is_compiling():
            return
        if not self._thread:
            self._thread = get_ident()
        if get_ident() != self._thread:
            self._checked_step = None  # what it updates rests no more
            return
        if id(optimizer) in self._open:  # its last step has raised
            del self._open[self._open.index(id(optimizer)) :]
        self._open.append(id(optimizer))
        if len(self._open) > 1 or self._is_calm(optimizer):
            return
        try:
            if is_initialisation(optimizer, sys._getframe(1)):
                return
            if not self.is_between():
                self._checked_step = None
                return
            if not self._generation:
                self._begin(optimizer)
            else:
                self._rest_ends()
                self._look_at_gradients(optimizer)
            self._note(optimizer)
        except Exception as e:
            self._fail(e)

    def _is_calm(self, optimizer: Any) -> bool:
        """Before most updates there is nothing to do; that is found out in a tenth of the time of looking closer."""
        if not self._generation or self._checked_step is not None or self._waiting or self._last_step is None:
            return False
        step, guards = self._last_step + 1, self._guards
        if guards.has_news or step <= guards.alert_until or self._is_in_turn_or_asked_for(step):
            return False
        return len(self._optimizers) == 1 and self._optimizers[0]() is optimizer

    @uncompiled
    def update_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch's hook, after each ``step`` of any optimizer; the step has been marked by then."""
        if self._is_off or self._is_compiling() or get_ident() != self._thread:
            return
        if id(optimizer) in self._open:
            del self._open[self._open.index(id(optimizer)) :]
        if self._open or self._marks.has_explicit_steps():
            return
        step = self._marks.last_step()
        if step is not None and self._is_uneventful(step):
            if step != self._last_step and self._task() == -1:
                self._last_step = step
                self._note_step()
            return
        if not self.is_between():
            self._words[self._base + S_HASH_STATE] = _ON if self._generation else _OFF
            return
        if step is not None and step != self._last_step:
            self._step_ends(step)

    def _is_uneventful(self, step: int) -> bool:
        """After most updates there is only the step to be noted, which is found out in a part of the time."""
        if not self._generation or not self._steps or self._is_in_turn_or_asked_for(step):
            return False
        if self._waiting or self._orders or self._loaded is not None or self._guards.has_news:
            return False
        return not (self._before_check or self._after_check)

    def step_marked(self, step: int) -> None:
        """A step was marked, perhaps by the hook of an optimizer: then its update is not over."""
        if self._is_off or get_ident() != (self._thread or get_ident()):
            return
        if self._marks.has_explicit_steps() and not self._open:
            self._step_ends(step)

    def aside_begins(self, name: str) -> None:
        """A section begins that is no step's work: a save, perhaps."""
        if name != "checkpointing" or self._is_off or not self._generation or get_ident() != self._thread:
            return
        step = self._last_step
        if step is None or self._open or self._checked_step == step:
            return
        try:
            self._saves += 1
            if (self._saves - 1) % self._save_interval == 0:
                self._note_save()
                self._check(_CHECKPOINT, step)
        except Exception as e:
            self._fail(e)

    def is_between(self) -> bool:
        """Nothing that is going on would take a check for its own, or make it one of half an update."""
        if self._task() != -1:  # in a backward, with an optimizer per parameter, others have updated or have not
            return False
        cuda = getattr(sys.modules["torch"], "cuda", None)
        return cuda is None or not cuda.is_initialized() or not cuda.is_current_stream_capturing()

    def _rest_ends(self) -> None:
        """All that was there after the last check must be as it was."""
        step, self._checked_step = self._checked_step, None
        if step is not None:
            self._check(_BEFORE, step + 1)
        self._tell_waiting()

    def _step_ends(self, step: int) -> None:
        if self._before_check:
            _call_all(self._before_check)
        try:
            self._last_step = step
            self._note_step()
            if self._generation or self._begin_late():
                loaded, self._loaded = self._loaded, None
                if loaded is not None:
                    loaded.step = step - 1
                    self._tell(loaded)
                if self._guards.has_news:
                    self._guards.settle()
                if self._is_due(step):
                    watch = Stopwatch()
                    self._renew()
                    self._aside_ns += watch.ns()
                    self._check(_AFTER, step)
                if self._orders:
                    self._capture(step)
                if self._waiting:
                    self._tell_waiting()
        except Exception as e:
            self._fail(e)
        if self._after_check:
            _call_all(self._after_check)

    def _is_due(self, step: int) -> bool:
        return self._steps == 1 or self._is_in_turn_or_asked_for(step)

    def _is_in_turn_or_asked_for(self, step: int) -> bool:
        is_asked_for = step == self._requested or self._words[H_CHECK_AT] == step + 1
        return (step + 1) % self._interval == 0 or is_asked_for

    def _are_gradients_due(self, step: int) -> bool:
        return step <= self._guards.alert_until or self._is_in_turn_or_asked_for(step)

    def _look_at_gradients(self, optimizer: Any) -> None:
        """Measured are those of the first optimizer, before updates after which there is a check."""
        step, first = self._next_step(), self._optimizers[0]() if self._optimizers else None
        is_due = first is optimizer and self._are_gradients_due(step)
        self._guards.update_begins(step - 1, optimizer, is_due, self._names)

    # -- the plan ------------------------------------------------------------------------------------------------------
    def _note(self, optimizer: Any) -> None:
        if all(known() is not optimizer for known in self._optimizers) and len(self._optimizers) < _OPTIMIZERS:
            from _weakref import ref

            self._optimizers.append(ref(optimizer))

    def _begin(self, optimizer: Any) -> None:
        """Before the first update: the state as it was loaded."""
        torch = sys.modules["torch"]
        self._is_compiling = torch.compiler.is_compiling
        self._task = getattr(torch._C, "_current_graph_task_id", self._task)
        if not self.is_between():
            return
        self._note(optimizer)
        self._renew()
        if self._generation:
            self._loaded = self._hash(_LOADED, -1)

    def _begin_late(self) -> bool:
        """In a script whose optimizer is none of torch's: after its first steps."""
        if self._searches >= _SEARCHES:
            return False
        self._thread = self._thread or get_ident()
        self._renew()
        return self._generation > 0

    def _renew(self) -> None:
        """A new plan, if what it would be made of has changed."""
        optimizers = [o for o in (known() for known in self._optimizers) if o is not None]
        fingers = (
            *(id(o) for o in optimizers),
            *(len(o.state) for o in optimizers),
            *(sum(len(s) for s in o.state.values() if hasattr(s, "__len__")) for o in optimizers),
            *(len(getattr(o, "optim", o).state) for o in optimizers),
        )
        if fingers == self._fingers or self._generation >= _PLANS:
            return
        self._fingers = fingers
        models = {prefix: m for prefix, m in ((p, r()) for p, r in self._models.items()) if m is not None}
        if not models or len(optimizers) > len(self._known_optimizers):
            if self._searches >= _SEARCHES and not models:
                return
            self._searches += 1
            models = named(find_roots(optimizers), optimizers)
            from _weakref import ref

            self._models = {prefix: ref(m) for prefix, m in models.items()}
        self._known_optimizers = tuple(map(id, optimizers))
        if models:
            self._make_plan(models, optimizers)

    def _names(self) -> dict[int, str]:
        """Of parameters, by id."""
        held = [(prefix, known()) for prefix, known in self._models.items()]
        return {
            id(p): f"{prefix}.{name}" if prefix else name
            for prefix, model in held
            if model is not None
            for name, p in model.named_parameters()
        }

    def _make_plan(self, models: dict[str, Any], optimizers: list[Any]) -> None:
        from pathlib import Path

        from steadyrun.core.integrity import GroupPlan, RankPlan, TensorPlan, plan_path
        from steadyrun.integrity.groups import World, plan

        distributed = sys.modules.get("torch.distributed")
        is_alone = distributed is None or not distributed.is_available() or not distributed.is_initialized()
        world = World(self._rank, 1) if is_alone else None
        found = plan(models, optimizers, world, buffers=self.buffers, replicas=self.replicas)
        held = [(c, t) for c, t in ((c, c.read()) for c in found) if t is not None]
        held.sort(key=lambda pair: (len(pair[0].ranks) < 2, pair[0].ranks, pair[0].name))
        tensors: list[TensorPlan] = []
        groups: list[tuple[tuple[int, ...], int]] = []  # ranks, and where their tensors begin
        for c, tensor in held:
            local = getattr(tensor, "_local_tensor", tensor)
            if not groups or groups[-1][0] != c.ranks:
                groups.append((c.ranks, len(tensors)))
            tensors.append(
                TensorPlan(
                    c.name,
                    c.kind.value,
                    str(local.dtype).removeprefix("torch."),
                    local.numel(),
                    local.element_size(),
                    str(local.device),
                    c.owner,
                    c.at_rest,
                )
            )
        if not tensors:
            return
        batches = _batches([t for _, t in held], self._batches)
        uuid = next((_uuid(b.hasher.device) for b in batches if b.hasher.device.type == "cuda"), None)
        self._generation += 1
        told = RankPlan(
            self._generation,
            self._rank,
            self._attempt,
            tuple(
                GroupPlan(ranks, first, end - first)
                for (ranks, first), end in zip(groups, [*(at for _, at in groups[1:]), len(tensors)], strict=True)
            ),
            tuple(tensors),
            uuid,
        )
        self._sources = tuple(c for c, _ in held)
        self._batches = batches
        self._plan = told
        write_whole(str(plan_path(Path(self._rank_dir), self._generation)), told.to_json().encode())
        if self._ring is None or self._ring.capacity < len(tensors):
            self._make_ring(len(tensors))
        words, base = self._words, self._base
        words[base + S_HASH_GENERATION] = self._generation
        words[base + S_HASH_INTERVAL] = self._interval
        words[base + S_HASH_STATE] = _ON

    def _make_ring(self, tensors: int) -> None:
        from steadyrun.core.integrity import RingWriter

        self._tell_waiting(is_last=True)
        old = self._ring
        ring = RingWriter(os.getpid(), _ROOM * tensors + 64)
        ring.fd = move_high(ring.fd)
        self._ring = ring
        self._rings += 1
        words, base = self._words, self._base
        words[base + S_HASH_RINGS] = self._rings
        words[base + S_HASH_RING] = ring.fd + 1
        if old is not None:
            old.close()

    # -- checks --------------------------------------------------------------------------------------------------------
    def _check(self, moment: int, step: int) -> None:
        kept = self._hash(moment, step)
        if kept is None:  # something has gone or has another size: as if new
            self._fingers = ()
            self._renew()
            kept = self._hash(moment, step) if moment != _BEFORE else None
            if kept is None:
                return
        if moment != _BEFORE:
            self._checked_step = step
        self._tell(kept)

    def _hash(self, moment: int, step: int) -> _Kept | None:
        watch = Stopwatch()
        parts = []
        for batch in self._batches:
            part = batch.ask([self._sources[i].read() for i in batch.numbers])
            if part is None:
                return None
            parts.append(part)
        return _Kept(self._plan, self._batches, moment, step, watch.began_ns, watch.ns(), parts)

    def _tell(self, kept: _Kept) -> None:
        self._waiting.append(kept)
        self._tell_waiting()

    def _tell_waiting(self, is_last: bool = False) -> None:
        """In the order in which they were asked for, as far as they are there."""
        while self._waiting:
            kept = self._waiting[0]
            if not kept.is_there() and not is_last:
                return
            del self._waiting[0]
            self._put(kept)

    def _put(self, kept: _Kept) -> None:
        from steadyrun.core.integrity import KEPT_CHECKS

        assert self._ring is not None
        cost_ns = kept.cost_ns() + self._aside_ns
        watch = Stopwatch()
        roots = kept.roots()
        self._ring.put(kept.plan.generation, kept.step, kept.moment, kept.at_ns, cost_ns, roots)
        self._kept = [*self._kept[1 - KEPT_CHECKS :], kept]
        self._checks += 1
        self._cost_ns += cost_ns
        self._adapt(cost_ns / 1e9)
        words, base = self._words, self._base
        words[base + S_HASH_COST] = self._cost_ns + self._guards.cost_ns
        words[base + S_HASH_STEP] = int(self._step_s * 1e9)
        words[base + S_HASH_INTERVAL] = self._interval
        words[base + S_HASH_CHECKS] = self._checks
        self._aside_ns = watch.ns()

    def _adapt(self, cost_s: float) -> None:
        # The first check makes what later ones use: it counts for nothing once there is another.
        self._check_s = cost_s if self._checks <= 2 else self._check_s + (cost_s - self._check_s) * 0.25
        if self._every is not None or self._step_s <= 0:
            return
        guards = self._guards
        # One after an update, one before the next, and perhaps a norm of gradients.
        twice_s = 2 * self._check_s + (guards.cost_ns / 1e9 / guards.norms if guards.norms else 0.0)
        self._interval = doubled(twice_s, self._step_s, 50, SHARE, self._interval)
        if self._save_s > 0:
            self._save_interval = doubled(twice_s, self._save_s, 1, SHARE, self._save_interval)

    def _note_step(self) -> None:
        now_ns = monotonic_ns()
        if self._steps >= 2:  # the first one has begun with the script, the second one warms up
            duration_s = (now_ns - self._step_ns) / 1e9
            self._step_s = duration_s if not self._step_s else self._step_s + (duration_s - self._step_s) * 0.1
        self._step_ns = now_ns
        self._steps += 1

    def _note_save(self) -> None:
        now_ns = monotonic_ns()
        if self._save_ns:
            between_s = (now_ns - self._save_ns) / 1e9 / self._save_interval
            self._save_s = between_s if not self._save_s else self._save_s + (between_s - self._save_s) * 0.5
        self._save_ns = now_ns

    def _fail(self, error: Exception) -> None:
        self._is_off = True
        self._words[self._base + S_HASH_INTERVAL] = 0
        self._words[self._base + S_HASH_STATE] = _FAILED
        self._say(f"the bytes of this rank are no longer checked: {type(error).__name__}: {error}")

    # -- questions of the agent, in another thread ---------------------------------------------------------------------
    def answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """To the commands of ``core.integrity``; None for others. Raises ValueError with a text for the asker."""
        command = request.get("cmd")
        if command == "leaves":
            return self._leaves(str(request.get("tensor")), request.get("step"), request.get("moment"))
        if command == "capture":
            return self._order(request)
        if command == "captured":
            with self._lock:
                return {"captures": list(self._captures)}
        return None

    def _leaves(self, name: str, step: Any, moment: Any) -> dict[str, Any]:
        from steadyrun.core.integrity import MOMENTS

        for kept in reversed(list(self._kept)):
            if kept.step == step and MOMENTS[kept.moment] == moment:
                found = kept.leaves(name)
                if found is None:
                    raise ValueError(f"cannot tell the leaves of {name!r}: no such tensor at that check")
                tensor, leaves = found
                return {
                    "leaves": [f"{leaf & 0xFFFFFFFFFFFFFFFF:016x}" for leaf in leaves],
                    "size_bytes": tensor.size_bytes,
                    "element_bytes": tensor.element_bytes,
                    "dtype": tensor.dtype,
                }
        raise ValueError(f"cannot tell leaves of step {step!r}, {moment!r}: only the newest checks are kept")

    def _order(self, request: dict[str, Any]) -> dict[str, Any]:
        step, leaves = int(request["step"]), tuple(int(leaf) for leaf in request["leaves"])
        newest = self._last_step
        if newest is None or step <= newest:
            raise ValueError(f"cannot capture after step {step}: step {newest} is done")
        name = str(request["tensor"])
        if all(c.name != name for c in self._sources):
            raise ValueError(f"cannot capture {name!r}: no such tensor")
        with self._lock:
            self._orders.append((name, leaves, step))
        return {"newest_step": newest}

    def _capture(self, step: int) -> None:
        from binascii import b2a_base64

        with self._lock:
            due = [o for o in self._orders if o[2] <= step]
            self._orders = [o for o in self._orders if o[2] > step]
        for name, leaves, wanted in due:
            place = next((i for i, c in enumerate(self._sources) if c.name == name), None)
            tensor = None if place is None else self._sources[place].read()
            if tensor is None or wanted != step:
                continue
            hasher = next(b.hasher for b in self._batches if place in b.numbers)
            for leaf in leaves:
                try:
                    data = hasher.leaf_bytes(tensor, leaf)
                except IndexError:
                    continue
                with self._lock:
                    if sum(len(c["bytes"]) for c in self._captures) < _CAPTURE_BYTES:
                        text = b2a_base64(data, newline=False).decode()
                        self._captures.append({"tensor": name, "step": step, "leaf": leaf, "bytes": text})


class _Kept:
    """One check: on the device for as long as nobody needs it elsewhere."""

    __slots__ = ("_batches", "_host_ns", "_parts", "at_ns", "moment", "plan", "step")

    def __init__(
        self, plan: Any, batches: list[_DeviceBatch], moment: int, step: int, at_ns: int, host_ns: int, parts: list[Any]
    ) -> None:
        self.plan = plan
        self._batches = batches
        self.moment = moment
        self.step = step
        self.at_ns = at_ns
        self._host_ns = host_ns
        self._parts = parts

    def is_there(self) -> bool:
        return all(part.is_there() for part in self._parts)

    def cost_ns(self) -> int:
        """Of the thread or of the streams, whatever is more."""
        return max([self._host_ns, *(int(part.stream_ns()) for part in self._parts)])

    def roots(self) -> list[int]:
        roots = [0] * len(self.plan.tensors)
        for batch, part in zip(self._batches, self._parts):  # noqa: B905 - of equal length
            for number, root in zip(batch.numbers, part.host.tolist()):  # noqa: B905
                roots[number] = root
        return roots

    def leaves(self, name: str) -> tuple[Any, list[int]] | None:
        for batch, part in zip(self._batches, self._parts):  # noqa: B905
            for at, number in enumerate(batch.numbers):
                tensor = self.plan.tensors[number]
                if tensor.name == name:
                    begin, end = batch.batch.offsets[at : at + 2]
                    return tensor, part.leaves[begin:end].tolist()
        return None


class _Part:
    """The leaves and roots of the tensors of one device at one check."""

    __slots__ = ("_began", "_ended", "host", "leaves")

    def __init__(self, leaves: Any, host: Any, began: Any = None, ended: Any = None) -> None:
        self.leaves = leaves
        self.host = host
        self._began = began
        self._ended = ended

    def is_there(self) -> bool:
        return self._ended is None or bool(self._ended.query())

    def stream_ns(self) -> int:
        if self._ended is None:
            return 0
        self._ended.synchronize()
        took_ms: float = self._began.elapsed_time(self._ended)
        return int(took_ms * 1e6)


class _DeviceBatch:
    """The tensors of one device.

    Attributes:
        numbers: their places in the plan.
    """

    __slots__ = ("batch", "hasher", "numbers")

    def __init__(self, numbers: tuple[int, ...], hasher: Hasher, batch: Batch) -> None:
        self.numbers = numbers
        self.hasher = hasher
        self.batch = batch

    def ask(self, tensors: list[Any]) -> _Part | None:
        device = self.hasher.device
        if device.type != "cuda":
            leaves = self.batch.leaves(tensors)
            return None if leaves is None else _Part(leaves, self.batch.roots(leaves).cpu())
        torch = sys.modules["torch"]
        with torch.cuda.device(device):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            leaves = self.batch.leaves(tensors)
            if leaves is None:
                return None
            host = torch.empty(len(self.numbers), dtype=torch.int64, pin_memory=True)
            host.copy_(self.batch.roots(leaves), non_blocking=True)
            ended.record()
        return _Part(leaves, host, began, ended)


def _batches(tensors: list[Any], before: list[_DeviceBatch]) -> list[_DeviceBatch]:
    from steadyrun.integrity.batch import Batch
    from steadyrun.integrity.fingerprint import Hasher

    hashers = {str(b.hasher.device): b.hasher for b in before}
    by_device: dict[str, list[int]] = {}
    sizes: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        local = getattr(tensor, "_local_tensor", tensor)
        by_device.setdefault(str(local.device), []).append(number)
        sizes[number] = local.numel() * local.element_size()
    made = []
    for device, numbers in by_device.items():
        hasher = hashers.get(device) or Hasher(device)
        made.append(_DeviceBatch(tuple(numbers), hasher, Batch(hasher, [sizes[n] for n in numbers])))
    return made


def _call_all(calls: list[Callable[[], None]]) -> None:
    while calls:
        calls.pop(0)()


def named(roots: list[Any], optimizers: list[Any]) -> dict[str, Any]:
    """Models by what their tensors' names begin with, equal on all ranks: the order is that of the parameters."""
    from steadyrun.watch.calls import parameters_of

    places = {
        id(p): (o, at) for o, opt in enumerate(optimizers) for at, p in enumerate(_parameters_in(opt.param_groups))
    }
    last = (len(optimizers), 0)
    ordered = sorted(roots, key=lambda m: min((places.get(id(p), last) for p in parameters_of(m)), default=last))
    if len(ordered) == 1:
        return {"": ordered[0]}
    return {f"model{number}": model for number, model in enumerate(ordered)}


def _parameters_in(groups: Any) -> list[Any]:
    return [p for group in groups for p in group["params"]]


def _uuid(device: Any) -> str | None:
    try:
        return f"GPU-{sys.modules['torch'].cuda.get_device_properties(device).uuid}"
    except Exception:  # an older torch does not tell
        return None
