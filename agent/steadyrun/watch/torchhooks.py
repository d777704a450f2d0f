"""What is learned from an unmodified script's use of torch: its optimizer steps, its checkpoints, its first group.

Steps come from torch's own global hook. For checkpoints ``save`` and ``async_save`` are wrapped where they are defined,
before the package hands them out, so that ``from torch.distributed.checkpoint import save`` gets the wrapper too. Torch
logs both as events (``_dcp_method_logger``), which would need no wrapper; but a script that calls ``logging.disable``
on all ranks but one, as many do, would hide its checkpoints on these.
"""

from __future__ import annotations

import sys

from steadyrun.core.layout import F_STEP_IS_GLOBAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from steadyrun.watch.marks import Marks, SectionLike
    from steadyrun.watch.timing import Timing

__all__ = ["OptimizerSteps", "around_first_group", "uncompiled", "wrap_checkpointing", "wrap_clipping"]

OPTIMIZER_MODULE = "torch.optim.optimizer"
CLIP_MODULE = "torch.nn.utils.clip_grad"
CHECKPOINT_MODULE = "torch.distributed.checkpoint.state_dict_saver"
_PATIENCE = 1000  # steps of others after which the optimizer that marks is taken for no longer used


def uncompiled(function: Any) -> Any:
    """For a hook of an optimizer: a compiled ``optimizer.step`` calls it and does not trace it.

    Traced, it would be compiled anew at nearly each step, since what it notes changes with each. The mark is that of
    ``torch.compiler.disable``, which imports the whole compiler.
    """
    function._torchdynamo_disable = True
    return function


class OptimizerSteps:
    """Marks a step for each step of one optimizer: the first that is seen.

    Further optimizers (a GAN's second, one per parameter, the one inside a ZeroRedundancyOptimizer) only beat. When the
    first is gone, or has not stepped for a thousand steps of others, the next one seen marks.

    Attributes:
        after_first_update: called once.
    """

    def __init__(self, marks: Marks, timing: Callable[[Any], Timing | None] = lambda module: None) -> None:
        """*timing* gets the module ``torch.optim.optimizer`` and makes what times the steps, if anything does."""
        self._marks = marks
        self._make_timing = timing
        self._timing: Timing | None = None
        self._marker: Callable[[], Any] = lambda: None  # a weak reference
        self._others = 0
        self._is_first = True
        self.after_first_update: Callable[[], None] = lambda: None

    def install(self, module: Any) -> None:
        """Register with ``torch.optim.optimizer``."""
        module.register_optimizer_step_post_hook(self.on_step)
        self._timing = self._make_timing(module)

    @uncompiled
    def on_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """torch's hook, after each ``step`` of any optimizer."""
        timing = self._timing
        if timing is not None:
            timing.optimizer_ends(optimizer)
        if is_initialisation(optimizer, sys._getframe(1)):
            self._marks.beat()
            return
        if self._marker() is not optimizer and not self._take(optimizer):
            self._marks.beat()
            return
        self._others = 0
        number = None
        if self._is_first:
            self._is_first = False
            self.after_first_update()
            done = steps_in_state(optimizer)
            if done is not None and done > 0:
                number = done - 1
                self._marks.set_flag(F_STEP_IS_GLOBAL)
        self._marks.step_seen(number)

    def _take(self, optimizer: Any) -> bool:
        self._others += 1
        if self._marker() is not None and self._others <= _PATIENCE:
            return False
        from _weakref import ref

        self._marker = ref(optimizer)
        return True


def is_initialisation(optimizer: Any, frame: Any) -> bool:
    """The step whose caller's frame is given is no training: torch makes an optimizer's state by it.

    ``torch.distributed.checkpoint.state_dict`` calls ``step`` with zero gradients and a rate of zero before it loads
    into a new optimizer, and at each save of a stateless one such as SGD without momentum.
    """
    try:
        rate = optimizer.param_groups[0]["lr"]
    except Exception:  # an optimizer of the user's own may have no rate
        rate = None
    if isinstance(rate, float) and rate != 0.0:
        return False  # the usual case; the look at the callers takes two microseconds
    for _ in range(6):  # wrappers of the profiler, of autograd and of a scheduler lie between
        if frame is None:
            return False
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame = frame.f_back
    return False


def steps_in_state(optimizer: Any) -> int | None:
    """How many steps the optimizer's state says were made in the life of the model; None where it does not say.

    A tensor on a device is left alone: reading it would wait for the device.
    """
    try:
        for state in optimizer.state.values():
            step = state.get("step")
            if step is None:
                continue
            device = getattr(step, "device", None)
            if device is not None and device.type != "cpu":
                return None
            return int(step)
    except Exception:  # state is what the optimizer's author makes of it
        return None
    return None


def wrap_checkpointing(section: Callable[[str], SectionLike]) -> Callable[[Any], None]:
    """For ``state_dict_saver``, once it is imported: its saves are inside the section ``checkpointing``.

    Of ``async_save`` that is what the caller waits for; the thread that uploads calls ``save`` and is seen by that.
    """
    checkpointing = section("checkpointing")

    def wrap(module: Any) -> None:
        package = sys.modules.get(module.__name__.rpartition(".")[0])
        for name in ("save", "async_save"):
            original = getattr(module, name, None)
            if original is None:
                continue
            wrapped = checkpointing(original)
            setattr(module, name, wrapped)
            if getattr(package, name, None) is original:  # the package was imported before us
                setattr(package, name, wrapped)

    return wrap


def wrap_clipping(tell: Callable[[Any], None]) -> Callable[[Any], None]:
    """For ``torch.nn.utils.clip_grad``, once it is imported: *tell* gets the norm that ``clip_grad_norm_`` returns."""

    def wrap(module: Any) -> None:
        original = getattr(module, "clip_grad_norm_", None)
        if original is None:
            return
        torch = sys.modules["torch"]

        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            total = original(*args, **kwargs)
            if not torch.compiler.is_compiling():  # a step that is compiled as a whole holds no call of ours
                tell(total)
            return total

        for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
            setattr(clip_grad_norm_, name, getattr(original, name, None))
        clip_grad_norm_.__wrapped__ = original  # type: ignore[attr-defined]
        package = sys.modules.get(module.__name__.rpartition(".")[0])
        for place in (module, package):
            if getattr(place, "clip_grad_norm_", None) is original:  # in a standby the package is imported before us
                place.clip_grad_norm_ = clip_grad_norm_  # type: ignore[union-attr]

    return wrap


def around_first_group(before: Callable[[], None], after: Callable[[], None]) -> Callable[[Any], None]:
    """For ``distributed_c10d``, once it is imported: calls around the making of the first process group.

    Not at the import: every program that imports torch imports this too, and one without groups should not have threads
    of ours when it forks. The function wrapped is private (of 2.0 to 2.15); it is put back at its first call. Where it
    is missing the first step tells, or the thread that looks once a second.
    """

    def wrap(module: Any) -> None:
        original = getattr(module, "_new_process_group_helper", None)
        if original is None:
            return

        def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
            if module._new_process_group_helper is new_process_group_helper:
                module._new_process_group_helper = original
            before()
            made = original(*args, **kwargs)
            after()
            return made

        module._new_process_group_helper = new_process_group_helper

    return wrap
