"""Inside the training process: ``from steadyrun import watch``.

    with watch.section("load"): ...     # a named stretch of work; also as a decorator; nest as you like
    watch.step(i)                       # step i is done (only where the optimizer hook cannot see it)
    watch.beat()                        # still alive, in a long stretch without steps
    watch.work(tokens.numel())          # how much work this step does, where steps differ in it
    watch.role(dp=3, tp=0, pp=1)        # the rank's place, where torch's device meshes do not say it
    watch.loss(loss.item())             # the loss of this step: one that spikes has the ranks' bytes checked
    watch.replicas({"ema.*": range(8)}) # who holds equal bytes, where the model's wrappers do not say it
    watch.should_stop()                 # True on all ranks at the same call, once the job is asked to stop
    watch.checkpointer("checkpoints", model=model, optimizer=optimizer)   # saves often, resumes exactly
    watch.commit("out/step-100")        # makes a checkpoint that a framework has written durable and checkable

Nothing but the last two raises or waits, whatever the watchdog does, and outside steadyrun the others do nothing. A
section costs about a microsecond. Safe in any thread; in a forked child (a data-loader worker, say) nothing is
recorded.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from steadyrun.checkpoint.checkpointer import Checkpointer
    from steadyrun.watch.integrity import Integrity
    from steadyrun.watch.marks import Marks, SectionLike
    from steadyrun.watch.setup import RankSetup
    from steadyrun.watch.timing import Timing

__all__ = [
    "beat",
    "checkpointer",
    "commit",
    "is_active",
    "loss",
    "replicas",
    "role",
    "section",
    "should_stop",
    "step",
    "work",
]

_MARKING = ("beat", "is_active", "section", "should_stop", "step")


class _NoSection:
    """The section of a process that is not watched."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        return None

    def __call__(self, function: Any) -> Any:
        return function

    def __reduce__(self) -> str:
        return "_NO_SECTION"


_NO_SECTION = _NoSection()


def section(name: str) -> SectionLike:
    """A named stretch of the rank's work: a context manager that can be entered again, and a decorator.

    As a decorator it covers each call, each run of a coroutine, or a generator from its first to its last item.

    Args:
        name: any text; 48 bytes are kept. ``setup`` or ``step`` ends the implicit ``setup``; in ``checkpointing`` the
            rank is given time to save when it is to stop. From the 64th name on sections share one entry, so use a
            few fixed names, not numbers.
    """
    return _NO_SECTION


def step(i: int) -> None:
    """Step *i* (0 is the first in the life of the model) is done.

    From the first call on the optimizer hook no longer marks steps. What is not a whole number of 0 or more counts as a
    ``beat``.
    """


def beat() -> None:
    """This rank makes progress."""


def should_stop() -> bool:
    """Whether to save and leave now. Call it once per step, equally often on all ranks.

    The answer becomes True at the same call on every rank of the job, without a collective; the job is asked to stop by
    a signal to the launcher (SIGTERM, or a scheduler's warning).
    """
    return False


def is_active() -> bool:
    """Whether this process is a rank under steadyrun's eyes; False in its forked children."""
    return False


def work(n: float) -> None:
    """The present step does *n* of work: tokens, say, or a sum of squared lengths. Several calls add up.

    Where steps differ between ranks by what they are given, this tells such steps from slow ranks. A number: a tensor
    is not read, since that could wait for the device.
    """


def role(**coordinates: int) -> None:
    """This rank's place in the job: ``role(dp=3, tp=0, pp=1)``. Only ranks that do the same work are compared.

    Names that begin with ``dp``, ``data``, ``fsdp``, ``replicate``, ``shard`` or ``batch`` are data parallelism: ranks
    that differ only in these are comparable. Not needed where the model's device meshes say the same.
    """


def loss(value: Any) -> None:
    """The loss of the present step: a number, or a tensor with one element, which may be on a device: nothing waits.

    One that is not finite, or far above the newest ones, makes all ranks check their bytes after the next steps, and
    with ``--ft-loss-spike rollback`` the job goes back about 100 steps and leaves the batches out. Call it on any
    ranks, with the rank's own loss or the mean, but always with the same.
    """


def replicas(ranks: Mapping[str, Iterable[int]] | None = None, buffers: Sequence[str] = ()) -> None:
    """Which ranks hold the same bytes: ``replicas({"head.*": range(8)}, buffers=["*.running_mean"])``.

    For checks against silent data corruption. Not needed for what DDP, FSDP, HSDP or tensor parallelism of torch
    replicate. Call it before the first step, equally on all ranks.

    Args:
        ranks: global ranks by names of tensors, with ``*`` and ``?``; overrules what is found. One rank: not compared.
        buffers: names of buffers that must be equal; others may differ by design.
    """


def checkpointer(root: Any, **options: Any) -> Checkpointer:
    """The sharded asynchronous checkpointer for a folder; see ``steadyrun.checkpoint.checkpointer.Checkpointer``.

        ckpt = watch.checkpointer("checkpoints", model=model, optimizer=optimizer, every="auto")
        for step in range(ckpt.resume(), steps):
            ...
            ckpt.step(step)
        ckpt.close()

    Outside steadyrun it writes synchronously, in the same format.
    """
    return _load("steadyrun.checkpoint.checkpointer").Checkpointer(root, setup=_setup, **options)  # type: ignore[no-any-return]


def commit(folder: Any, **options: Any) -> Any:
    """Make a checkpoint folder that a framework has just written durable, checkable and part of the retention.

    See ``steadyrun.checkpoint.foreign.commit`` for the options and what is returned.
    """
    return _load("steadyrun.checkpoint.foreign").commit(folder, **options)


_setup: RankSetup | None = None


def _resume_at(step: int) -> None:
    """From the checkpointer: *step* is the first one to do, so that steps have the same numbers in every attempt."""


def _load(module: str) -> Any:
    """The checkpointer needs torch, which a script that only marks sections need not have: imported when asked for."""
    from importlib import import_module

    return import_module(module)


def _activate_timing(timing: Timing) -> None:
    """The same for what a rank tells of its work."""
    for name in ("role", "work"):
        active = getattr(timing, name)
        doc = globals()[name].__doc__

        def told(*args: Any, _active: Any = active, **kwargs: Any) -> None:
            _active(*args, **kwargs)

        told.__name__, told.__qualname__, told.__doc__ = name, name, doc
        globals()[name] = told


def _activate_integrity(integrity: Integrity) -> None:
    def replicas(ranks: Mapping[str, Iterable[int]] | None = None, buffers: Sequence[str] = ()) -> None:
        integrity.declare(ranks, buffers)

    def loss(value: Any) -> None:
        integrity.loss(value)

    replicas.__doc__ = globals()["replicas"].__doc__
    loss.__doc__ = globals()["loss"].__doc__
    globals().update(replicas=replicas, loss=loss)


def _activate(marks: Marks, setup: RankSetup | None = None) -> None:
    """Put the functions that mark in place of those that do nothing. By the bootstrap, before the script begins."""
    global _setup
    _setup = setup
    globals()["_resume_at"] = marks.resume_at
    for name in _MARKING:
        active = getattr(marks, name)
        active.__doc__ = globals()[name].__doc__
        globals()[name] = active
