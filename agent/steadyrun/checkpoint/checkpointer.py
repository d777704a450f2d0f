"""What a script uses: save often, never lose or trust a bad checkpoint, resume exactly.

    ckpt = watch.checkpointer("checkpoints", model=model, optimizer=optimizer, loader=loader, every="auto")
    for step in range(ckpt.resume(), steps):
        ...
        ckpt.step(step)                    # saves when it is due
    ckpt.close()                           # waits until the newest one is durable

Under steadyrun a save copies the state into memory of the node's saver process and training goes on; the saver writes,
checks and commits. Without it (plain python, torchrun, too little memory) the ranks write the same files themselves,
and ``save`` returns when they are durable.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from steadyrun import watch
from steadyrun.checkpoint import rollback
from steadyrun.checkpoint.arena import Arena, ArenaError, BlobsTooLargeError, SlotBusyError, SlotState, choose_slot
from steadyrun.checkpoint.client import Granted, SaveRecord, SaverGoneError, SaverLink
from steadyrun.checkpoint.copying import Copier
from steadyrun.checkpoint.direct import DirectWriter, Gather, gather_alone, gather_over, local_world_size
from steadyrun.checkpoint.layout import Layout
from steadyrun.checkpoint.reading import Reader, load_from
from steadyrun.checkpoint.saves import CheckpointOptions, SaveState, TierName, parse_every
from steadyrun.checkpoint.schedule import tiers_at
from steadyrun.checkpoint.state import Captured, Saved, State
from steadyrun.core.errors import SteadyrunError
from steadyrun.core.versions import installed_version

__all__ = ["Checkpointer", "NoUsableCheckpointError", "SaveHandle"]

T = TypeVar("T")

CLOSE_LIMIT_S: Final = 1800.0
RESTORE_LIMIT_S: Final = 900.0
_MOST_LOAD_THREADS: Final = 8
_ARENA_LIMIT_S: Final = 30.0
_GENERATION_BITS: Final = 16  # saves after one and the same step
_BLOB_ROOM_BYTES: Final = 64 << 10
_HEAR_EVERY: Final = 16  # steps between looks at the socket while a save is on its way
_DIRECT_ASK_EVERY: Final = 20  # steps between the agreements that "auto" needs without a saver
_NEAREST: Final = {tier: i for i, tier in enumerate(TierName)}


class NoUsableCheckpointError(SteadyrunError):
    """There are checkpoints, and none of them can be loaded. Starting at step 0 would throw the run away silently."""


class SaveHandle:
    """One save. What it says is what this rank has heard so far; ``wait`` waits for more."""

    __slots__ = ("_hear", "_record", "_wait")

    def __init__(
        self, record: SaveRecord, hear: Callable[[], None], wait: Callable[[SaveRecord, float, bool], bool]
    ) -> None:
        self._record = record
        self._hear = hear
        self._wait = wait

    @property
    def step(self) -> int:
        return self._record.step

    @property
    def state(self) -> SaveState:
        if not self._record.is_final:
            self._hear()
        return self._record.state

    @property
    def accepted(self) -> bool:
        """It was taken: it is on its way or has arrived."""
        return self.state not in (SaveState.SKIPPED, SaveState.FAILED)

    @property
    def in_memory(self) -> bool:
        """All ranks' parts are in memory that outlives the ranks."""
        self._hear()
        return self._record.was_in_memory

    @property
    def durable(self) -> bool:
        """It is committed: whole, synced and checkable."""
        return self.state is SaveState.DURABLE

    @property
    def skipped(self) -> bool:
        """It was not taken; ``why`` tells the reason."""
        return self.state is SaveState.SKIPPED

    @property
    def failed(self) -> bool:
        """It could not be written; ``why`` tells the reason. Earlier checkpoints are as they were."""
        return self.state is SaveState.FAILED

    @property
    def why(self) -> str:
        return self._record.why

    def wait(self, limit_s: float = CLOSE_LIMIT_S, until: SaveState = SaveState.DURABLE) -> SaveState:
        """Wait until it is durable, skipped or failed (with ``IN_MEMORY``: in memory), *limit_s* seconds at most."""
        self._wait(self._record, limit_s, until is SaveState.IN_MEMORY)
        return self._record.state

    def __repr__(self) -> str:
        why = f": {self._record.why}" if self._record.why else ""
        return f"<save of step {self._record.step}, {self._record.state.value}{why}>"


class Checkpointer:
    """Saves and resumes one job's state. All ranks make one, with equal options, and call it at equal steps.

    Attributes:
        resumed_from: a sentence about where ``resume`` found its state.
        skipped: ranges of batches that a rollback leaves out, ``(first, end)``; see ``data_step`` and ``batches``.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        scaler: Any = None,
        every: object = "auto",
        every_memory: int | None = None,
        local: str | os.PathLike[str] | None = None,
        every_local: int | None = None,
        remote: str | None = None,
        every_remote: int | None = None,
        keep: int = 3,
        keep_every: int | None = None,
        memory: bool | int = True,
        peer: bool | int = False,
        most_bytes_per_s: float | None = None,
        read_back: bool = False,
        refuse_unequal_replicas: bool = True,
        process_group: Any = None,
        setup: Any = None,
        say: Callable[[str], None] | None = None,
        **others: Any,
    ) -> None:
        """Nothing is written and no other rank is waited for here.

        Args:
            root: the folder for checkpoints, the same for all ranks (shared storage where there are several nodes).
            model, optimizer: a module or an optimizer, or a mapping or list of them.
            scheduler, scaler: what has ``state_dict`` and ``load_state_dict``; equal on all ranks.
            loader: the data position (torchdata's StatefulDataLoader, or anything with these two methods), per rank.
            others: anything more with these two methods, under the name given here.
            every: "auto", a number of steps, or a time such as "15m".
            local: a folder on the node's own disk, for copies each *every_local* steps.
            remote: an fsspec URL, for copies each *every_remote* steps.
            keep: newest complete checkpoints to keep, at least 2.
            keep_every: steps whose multiples are kept for ever.
            memory: False: no snapshots in memory, ranks write themselves; a number: snapshots per rank (1 or 2).
            peer: keep a copy of each snapshot in another node's memory; a number: how many nodes further.
            process_group: of the ranks that read different data (data parallelism), where neither the loader's sampler
                nor the model's wrapper tells.
            setup: how this rank was started, from ``watch``.
            say: gets lines for the user (rank 0); by default they go to stderr.

        Raises:
            ValueError: an option that cannot be; the text says what is allowed.
        """
        self._options = _options(
            root,
            every=parse_every(every),
            local=None if local is None else os.path.abspath(local),
            remote=remote,
            every_memory=_steps("every_memory", every_memory),
            every_local=_steps("every_local", every_local),
            every_remote=_steps("every_remote", every_remote),
            keep=keep,
            keep_every=_steps("keep_every", keep_every),
            slots=2 if memory is True else int(memory),
            peer=bool(peer),
            peer_jump=max(int(peer), 1),
            most_bytes_per_s=most_bytes_per_s,
            read_back=read_back,
            refuse_unequal_replicas=refuse_unequal_replicas,
        )
        options = self._options
        periods = (
            *(options.every.steps, options.keep_every),
            *(options.every_memory, options.every_local, options.every_remote),
        )
        self._periods = tuple({p for p in periods if p is not None})
        self._all_tiers = (
            TierName.MEMORY,
            *((TierName.PEER,) if options.peer else ()),
            *((TierName.LOCAL,) if options.local is not None and options.every_local is None else ()),
            TierName.SHARED,
            *((TierName.REMOTE,) if options.remote is not None and options.every_remote is None else ()),
        )
        self._is_timed = options.every.steps is None  # the saver orders saves: a word in the snapshot memory
        self._setup = setup
        self._rank, self._world_size = _place(setup)
        self._attempt = (
            int(setup.attempt) if setup is not None else int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        )
        self._run_id = str(setup.run_id) if setup is not None else os.environ.get("TORCHELASTIC_RUN_ID", "none")
        self._say_to_user = say
        self._said: dict[str, str] = {}
        self._state = State(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            loader=loader,
            scaler=scaler,
            extra=others,
            rank=self._rank,
            world_size=self._world_size,
            process_group=process_group,
        )
        self._link: SaverLink | None = None
        self._arena: Arena | None = None
        self._copier: Copier | None = None
        self._layout: Layout | None = None  # the one that memory was asked for, and the captured one it was made of
        self._captured_layout: Layout | None = None
        self._blob_room_bytes = 0
        self._is_asked = False
        self._direct: DirectWriter | None = None
        self._slot = 0
        self._is_resuming = False
        self._prefaulting: threading.Thread | None = None
        self._refused = ""
        self._generation = 0
        self._order_seen = 0
        self._newest: SaveRecord | None = None
        self._last_step: int | None = None
        self._steps_seen = 0
        self._is_closed = False
        self._direct_saved_s = time.monotonic()
        self._checkpointing = watch.section("checkpointing")
        self.resumed_from = ""
        self.skipped: tuple[tuple[int, int], ...] = ()
        self._open_link()

    # -- the saver -----------------------------------------------------------------------------------------------------
    def _open_link(self) -> None:
        setup = self._setup
        path = getattr(setup, "saver", None)
        if not path or self._options.slots == 0:
            return
        link = SaverLink(
            path,
            {
                "rank": self._rank,
                "local_rank": int(setup.slot),
                "world_size": self._world_size,
                "attempt": self._attempt,
                "run_id": self._run_id,
                "pid": os.getpid(),
                "options": self._options.to_json(),
                "torch": str(torch.__version__),
            },
        )
        try:
            link.connect()
        except SaverGoneError as e:
            self._say(f"{e}; the ranks write checkpoints themselves, and each save waits until it is durable")
            link.close()
            return
        self._link = link

    def _ask_for_memory(self, captured: Captured, blobs_bytes: int) -> None:
        """Once the structure is known: the saver makes the memory ready while training goes on."""
        assert self._link is not None
        self._layout = self._with_details(captured.layout)
        self._captured_layout = captured.layout
        self._blob_room_bytes = max(_BLOB_ROOM_BYTES, 2 * blobs_bytes)
        self._is_asked = True
        self._link.send_layout(self._layout, self._blob_room_bytes)

    def _with_details(self, layout: Layout) -> Layout:
        details = {
            **layout.details,
            "covered": list(self._state.covered),
            "not_covered": list(self._state.not_covered),
            "torch": str(torch.__version__),
            "steadyrun": installed_version("steadyrun"),
            "skipped": [list(s) for s in self.skipped],
            "state_bytes": layout.state_bytes,
        }
        return Layout(layout.rank, layout.world_size, layout.entries, layout.objects, details)

    def _take_memory(self, wait_s: float) -> None:
        """Map what the saver has granted, if it has by now."""
        assert self._link is not None
        granted = self._link.granted(wait_s)
        if granted is None:
            return
        if granted.note:
            self._say_once("memory", granted.note)
        self._is_asked = False
        self._refused = "" if granted.fd >= 0 else granted.note or "no snapshot memory"
        if granted.fd >= 0:
            self._map(granted)
            return
        self._drop_memory()
        if granted.direct:
            self._link.close()
            self._link = None

    def _map(self, granted: Granted) -> None:
        if self._arena is not None and os.fstat(self._arena.fd).st_ino == os.fstat(granted.fd).st_ino:
            os.close(granted.fd)  # a saver that was started again hands out the same memory
            return
        self._drop_memory()
        try:
            self._arena = Arena.attach(granted.fd)
        except ArenaError as e:
            os.close(granted.fd)
            self._refused = str(e)
            return
        if self._state.device_type == "cpu":
            self._copier = Copier(self._arena)
        if not self._is_resuming:  # what is read first is mapped by the reading
            self._prefault()

    def _prefault(self) -> None:
        """Map the memory while training goes on, and pin it for a device, so that the first save waits for neither."""
        arena = self._arena
        if arena is None or self._prefaulting is not None:
            return

        def work() -> None:
            with contextlib.suppress(ArenaError):  # too little memory shows at the save, which then says so
                if arena.prefault(lambda: self._arena is not arena) and self._copier is None:
                    self._copier = Copier(arena, self._state.device_type)

        self._prefaulting = threading.Thread(target=work, name="steadyrun-prefault", daemon=True)
        self._prefaulting.start()

    def _drop_memory(self) -> None:
        arena, self._arena = self._arena, None
        if self._prefaulting is not None:
            self._prefaulting.join()  # it looks every few milliseconds whether the memory is still wanted
            self._prefaulting = None
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        if arena is not None:
            arena.close()

    # -- steps and saves -----------------------------------------------------------------------------------------------
    def step(self, step: int) -> SaveHandle | None:
        """Step *step* is done: save if that is due. Costs microseconds where it is not.

        Returns:
            The save, or None where none was due.
        """
        self._last_step = step
        self._steps_seen += 1
        link = self._link
        if link is None:
            return self.save(step) if self._is_due_directly(step) else None
        arena = self._arena
        if arena is None or self._is_asked:
            if self._layout is None:
                self._prepare()
            elif self._is_asked:
                self._take_memory(0.0)
            arena = self._arena
        elif self._newest is not None and not self._newest.is_final and self._steps_seen % _HEAR_EVERY == 0:
            self._hear()
        if arena is not None:
            arena.control.rank_step = step
        done = step + 1
        for period in self._periods:
            if done % period == 0:
                break
        else:
            # Saves by steps are ordered only before a restart that is planned.
            if not self._is_timed and (arena is None or not self._is_ordered(arena, step)):
                return None
        tiers = self._due_tiers(step)
        return self.save(step, tiers=tiers) if tiers else None

    def _prepare(self) -> None:
        captured = self._state.capture()
        blobs = captured.blobs()
        self._ask_for_memory(captured, sum(map(len, blobs)))

    def _due_tiers(self, step: int) -> tuple[TierName, ...]:
        arena = self._arena
        tiers = set(tiers_at(self._options, step))
        wanted = arena.control.wanted() if arena is not None else None
        if wanted is not None and wanted.serial != self._order_seen and wanted.step <= step:
            self._order_seen = wanted.serial
            if wanted.step == step:
                tiers |= wanted.tiers
            else:
                self._miss(wanted.step)
        return tuple(sorted(tiers, key=_NEAREST.__getitem__))

    def _is_ordered(self, arena: Arena, step: int) -> bool:
        wanted = arena.control.wanted()
        return wanted is not None and wanted.serial != self._order_seen and wanted.step <= step

    def _miss(self, step: int) -> None:
        """The order came after its step: the other ranks need not wait for this one's part."""
        assert self._link is not None
        record = SaveRecord(step, (step + 1) << _GENERATION_BITS)
        record.move(SaveState.SKIPPED, "the order to save came too late")
        self._link.send_skipped(record)

    def _is_due_directly(self, step: int) -> bool:
        """Without a saver: steps are counted; for times rank 0's clock decides, agreed every few steps."""
        every = self._options.every
        if tiers_at(self._options, step) & {TierName.SHARED, TierName.LOCAL, TierName.REMOTE}:
            return True
        if every.steps is not None:
            return False
        if (step + 1) % _DIRECT_ASK_EVERY != 0:
            return False
        wanted_s = every.seconds if every.seconds is not None else self._writer().auto_interval_s
        is_due = time.monotonic() - self._direct_saved_s >= wanted_s
        return bool(self._gather(is_due)[0])

    def save(self, step: int, *, tiers: Sequence[TierName] | None = None) -> SaveHandle:
        """Save the state after step *step* now, on all ranks. What is written is exactly the state at this call.

        Returns:
            The handle; a save that could not be taken is ``skipped`` or ``failed`` there, and never raises.
        """
        if self._is_closed:
            raise SteadyrunError("cannot save: this checkpointer is closed")
        with self._checkpointing:
            self._last_step = step
            generation = self._next_generation(step)
            if self._link is not None and self._link.is_given_up:
                self._say("the saver is gone for good; the ranks write checkpoints themselves from now on")
                self._drop_memory()
                self._link.close()
                self._link = None
            if self._link is None:
                return self._save_directly(step, generation)
            wanted = self._all_tiers if tiers is None else tuple(tiers)
            return self._save_in_memory(step, generation, wanted)

    def _next_generation(self, step: int) -> int:
        """Equal on all ranks for the same save, whichever of them has missed an order before; grows with every save."""
        first = (step + 1) << _GENERATION_BITS
        self._generation = self._generation + 1 if self._generation >= first else first
        return self._generation

    def _save_in_memory(self, step: int, generation: int, tiers: Sequence[TierName]) -> SaveHandle:
        link = self._link
        assert link is not None
        started_s = time.perf_counter()
        captured = self._state.capture()
        blobs = captured.blobs()
        blobs_bytes = sum(map(len, blobs))
        if not self._has_layout(captured.layout):
            if self._layout is not None:
                self._say_once("layout", "the structure of the state has changed: new snapshot memory is set up")
            self._ask_for_memory(captured, blobs_bytes)
        elif blobs_bytes > self._blob_room_bytes:
            self._ask_for_memory(captured, blobs_bytes)
        if self._is_asked:
            self._take_memory(_ARENA_LIMIT_S)
            if self._link is None:
                return self._save_directly(step, generation)
        link.poll()
        record = link.new_record(step, generation)
        self._newest = record
        why_not = self._fill(captured, blobs, record)
        if why_not:
            record.move(SaveState.SKIPPED, why_not)
            link.send_skipped(record)
            self._say_once("skipped", f"step {step} is not saved: {why_not}")
        else:
            self._said.pop("skipped", None)
            stall_s = time.perf_counter() - started_s
            link.send_staged(record, self._slot, [t.value for t in tiers], stall_s)
        return SaveHandle(record, self._hear, self._wait)

    def _has_layout(self, layout: Layout) -> bool:
        """Memory for this structure was asked for. The state gives the same object as long as nothing has changed."""
        if layout is self._captured_layout:
            return True
        if self._layout is None or self._layout.digest() != layout.digest():
            return False
        self._captured_layout = layout
        return True

    def _fill(self, captured: Captured, blobs: Sequence[bytes], record: SaveRecord) -> str:
        """Copy the state into a slot; why not, where that is not possible."""
        if self._copier is None and self._prefaulting is not None:
            self._prefaulting.join()  # a save right at the start
        arena, copier = self._arena, self._copier
        if arena is None or copier is None:
            return self._refused or "the saver has not given snapshot memory yet"
        number = choose_slot([slot.view() for slot in arena.slots], arena.control.busy())
        if number is None:
            return "the snapshots before it are still being written"
        slot = arena.slots[number]
        try:
            slot.begin(record.step, self._attempt, record.generation)
        except SlotBusyError:
            return "the snapshots before it are still being written"
        try:
            copier.copy_in(slot, captured.tensors)
            slot.write_blobs(blobs)
        except BlobsTooLargeError as e:
            slot.release()
            return str(e)
        slot.seal()
        self._slot = number
        return ""

    def _save_directly(self, step: int, generation: int) -> SaveHandle:
        record = SaveRecord(step, generation)
        captured = self._state.capture()
        layout = self._with_details(captured.layout)
        done = self._writer().save(step, layout, captured.tensors, captured.blobs())
        record.move(done.state, done.why, done.seconds)
        self._direct_saved_s = time.monotonic()
        if done.why:
            self._say_once("failed", f"step {step} is not saved: {done.why}")
        elif self._said.pop("failed", None) is not None:
            self._say(f"saving works again: step {step} is durable")
        self._newest = record
        return SaveHandle(record, lambda: None, lambda *_: True)

    def _writer(self) -> DirectWriter:
        if self._direct is None:
            self._direct = DirectWriter(
                self._options, self._rank, self._world_size, self._attempt, self._run_id, self._gather, self._say
            )
        return self._direct

    def _hear(self) -> None:
        """What fails is said by the saver, once for all ranks."""
        if self._link is not None:
            self._link.poll()

    def _wait(self, record: SaveRecord, limit_s: float, until_in_memory: bool) -> bool:
        return self._link is None or self._link.wait_for(record, limit_s, until_in_memory)

    # -- resuming ------------------------------------------------------------------------------------------------------
    def resume(self) -> int:
        """Load the newest state that is whole on all ranks, from the nearest place that has it.

        Returns:
            The first step to do; 0 when there is no checkpoint.

        Raises:
            NoUsableCheckpointError: there are checkpoints, and none of them can be loaded.
        """
        with self._checkpointing:
            self._is_resuming = True
            try:
                start = self._resume()
            finally:
                self._is_resuming = False
                self._prefault()
            watch._resume_at(start)
            return start

    def _resume(self) -> int:
        rejected: list[list[Any]] = []
        while True:
            choice = self._choose(rejected)
            self.skipped = tuple((int(a), int(b)) for a, b in choice.get("skip_batches") or ())
            source = str(choice["source"])
            if source == "none":
                return self._start_afresh(choice, rejected)
            started_s = time.perf_counter()
            problem, notes = self._try(choice)
            problems = self._agree(f"loaded.{len(rejected)}", problem)
            bad = {rank: why for rank, why in enumerate(problems) if why}
            step = int(choice["step"])
            if not bad:
                self._settle(choice, step, time.perf_counter() - started_s, notes)
                return step + 1
            rank, why = next(iter(bad.items()))
            place = str(choice.get("path") or source)
            self._say(f"step {step} from {place} cannot be used: rank {rank}: {why}; trying the next older one")
            rejected.append([place, step, f"rank {rank}: {why}"])
            self._state.cancel_load()

    def _start_afresh(self, choice: Mapping[str, Any], rejected: Sequence[Sequence[Any]]) -> int:
        # What was in memory, of some ranks only say, was never a checkpoint.
        refused = [r for r in choice.get("rejected") or rejected if r[0] not in ("memory", "peer")]
        tried = [why if step < 0 else f"step {step} ({source}): {why}" for source, step, why in refused]
        if tried:
            listed = "\n  ".join(tried)
            raise NoUsableCheckpointError(
                f"cannot resume: no checkpoint in {self._options.root} can be used:\n  {listed}\n"
                "look with `steadyctl ckpt verify`; to begin anew, give another folder or move these away"
            )
        self.resumed_from = "no checkpoint: starting at step 0"
        self._say_coverage()
        if self._link is not None:
            self._link.tell("started", step=0)
        return 0

    def _settle(self, choice: Mapping[str, Any], step: int, seconds: float, notes: Sequence[str]) -> None:
        where = {"memory": "memory", "peer": "the memory of another node"}.get(
            str(choice["source"]), choice.get("path")
        )
        self.resumed_from = f"step {step} from {where} in {seconds:.2f} s"
        for refused in choice.get("rejected") or ():
            self._say(f"not used: step {refused[1]} ({refused[0]}): {refused[2]}")
        self._say(f"resumed after {self.resumed_from}")
        for note in notes:
            self._say(note)
        self._say_coverage()
        if self._link is not None:
            self._link.tell("started", step=step + 1, seconds=round(seconds, 6))

    def _say_coverage(self) -> None:
        if self._state.not_covered:
            self._say("not in the checkpoints: " + "; ".join(self._state.not_covered))

    def _choose(self, rejected: Sequence[Sequence[Any]]) -> Mapping[str, Any]:
        if self._link is not None:
            try:
                return self._link.ask(
                    "choice",
                    RESTORE_LIMIT_S,
                    "restore",
                    digest=None,
                    rejected=[list(r) for r in rejected],
                    local=True,
                    round=len(rejected),
                )
            except SaverGoneError as e:
                self._say(f"{e}; looking into the folder without it")
                self._link.close()
                self._link = None
        return self._writer().choose(rejected)

    def _agree(self, key: str, value: T) -> list[T]:
        if self._link is not None:
            answer = self._link.ask("agreed", RESTORE_LIMIT_S, "agree", key=f"{self._attempt}.{key}", value=value)
            return list(answer["values"])
        return self._gather(value)

    def _try(self, choice: Mapping[str, Any]) -> tuple[str | None, list[str]]:
        """Load what was chosen: (why it cannot be used or None, sentences for the user)."""
        try:
            if choice["source"] in ("memory", "peer"):
                return None, self._load_from_memory(choice)
            return None, self._load_from_folder(Path(str(choice["path"])), int(choice["step"]))
        except (SteadyrunError, OSError, RuntimeError, ValueError, KeyError, TypeError) as e:
            return (str(e) or type(e).__name__).splitlines()[0], []

    def _load_from_memory(self, choice: Mapping[str, Any]) -> list[str]:
        link = self._link
        assert link is not None
        notes = self._state.prepare_to_load()
        captured = self._state.capture()
        text = choice.get("layout")
        held = None if text is None else Layout.from_json(text)
        if held is not None and held.digest() != captured.layout.digest():
            # An optimizer whose state cannot be foreseen; what the snapshot holds says what it had. Not the other way
            # round: of a parameter without elements on this rank the snapshot holds nothing.
            self._state.cancel_load()
            notes = self._state.prepare_to_load(Saved.from_layout(held))
            captured = self._state.capture()
        if self._layout is None:
            self._ask_for_memory(captured, 0)
        self._take_memory(_ARENA_LIMIT_S)
        arena = self._arena
        if arena is None:
            raise SteadyrunError("the saver has not handed out the snapshot memory")
        if arena.layout.digest() != captured.layout.digest():
            raise SteadyrunError("the state is laid out differently now (another model, or another optimizer)")
        if not 0 <= int(choice["slot"]) < len(arena.slots):
            raise SteadyrunError("the snapshot is not in memory any more")
        slot = arena.slots[int(choice["slot"])]
        view = slot.view()
        if view.state is not SlotState.SEALED or view.step != int(choice["step"]):
            raise SteadyrunError(f"the snapshot is of step {view.step} by now")
        blobs = [bytes(blob) for blob in slot.blobs()]
        with Copier(arena, threads=threads_of_a_load()) as copier:  # memory is pinned later, in the background
            copier.copy_out(slot, self._state.targets())
        for other in arena.slots:
            seen = other.view()
            if (seen.attempt, seen.generation) > (view.attempt, view.generation) and not arena.control.is_busy(
                other.number
            ):
                other.release()  # given up by a rollback, or damaged: it must not count as the newest
        objects = {o.key: _unpickle(blob) for o, blob in zip(arena.layout.objects, blobs, strict=True)}
        return [*notes, *self._state.apply(objects, arena.layout.world_size, view.step)]

    def _load_from_folder(self, folder: Path, step: int) -> list[str]:
        reader = Reader(folder)
        world_size = reader.manifest.world_size if reader.manifest is not None else self._world_size
        reader.check_objects(range(self._rank, world_size, self._world_size))
        notes = self._state.prepare_to_load(Saved.from_metadata(reader.metadata, world_size))
        wanted = self._state.load_plan_state_dict()
        loaded = load_from(reader, wanted)
        return [*notes, *loaded.notes, *self._state.apply_loaded(wanted, world_size, step)]

    def _gather(self, value: T) -> list[T]:
        return self._gatherer()(value)

    def _gatherer(self) -> Gather:
        if self._world_size == 1:
            return gather_alone
        if not dist.is_available() or not dist.is_initialized():
            raise SteadyrunError(
                "cannot agree with the other ranks: torch.distributed is not initialised; call "
                "torch.distributed.init_process_group() before resume() and the first save, or launch with steadyrun"
            )
        return gather_over(None)

    # -- data after a rollback -----------------------------------------------------------------------------------------
    def data_step(self, step: int) -> int:
        """Which batch belongs to training step *step*: the same number, unless a rollback leaves batches out."""
        return rollback.data_step(step, self.skipped)

    def batches(self, loader: Iterable[T], start: int = 0) -> Iterator[T]:
        """The loader's batches without those that a rollback leaves out.

        Args:
            loader: yields batch number *start* first.
        """
        for number, batch in enumerate(loader, start):
            if not any(first <= number < end for first, end in self.skipped):
                yield batch

    # -- the end -------------------------------------------------------------------------------------------------------
    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Wait until the newest state that was saved is durable, then let go of everything. Call it on all ranks."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._checkpointing:
            link = self._link
            try:
                if link is not None and self._newest is not None:
                    link.wait_for(self._newest, limit_s, True)
                    if not self._newest.is_final:
                        link.tell("flush", timeout_s=limit_s)
                        link.wait_for(self._newest, limit_s)
                    self._hear()
                    if not self._newest.is_final:
                        self._say(f"step {self._newest.step} is still not durable after {limit_s:.0f} s")
            finally:
                self._drop_memory()
                if link is not None:
                    if self._last_step is not None:
                        link.tell("stepped", step=self._last_step)
                    link.close()
                    self._link = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    # -- words ---------------------------------------------------------------------------------------------------------
    def _say(self, text: str) -> None:
        if self._rank != 0:
            return
        if self._say_to_user is not None:
            self._say_to_user(text)
            return
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"steadyrun: checkpoint: {text}\n")

    def _say_once(self, topic: str, text: str) -> None:
        """Not again until the reason changes; another step is no other reason."""
        reason = re.sub(r"\d+", "", text.partition(": ")[2] or text)
        if self._said.get(topic) != reason:
            self._said[topic] = reason
            self._say(text)


def threads_of_a_load() -> int:
    """No rank trains meanwhile: the ranks of the node share its processors, whatever torch computes with."""
    return max(1, min(len(os.sched_getaffinity(0)) // local_world_size(), _MOST_LOAD_THREADS))


def _unpickle(blob: bytes) -> Any:
    # The bytes are this job's own and have just been checked against their digest.
    return torch.load(io.BytesIO(blob), weights_only=False)


def _place(setup: Any) -> tuple[int, int]:
    """(rank, world size) as the launcher, torch.distributed or the environment say."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank = int(setup.rank) if setup is not None else int(os.environ.get("RANK", 0))
    return rank, int(os.environ.get("WORLD_SIZE", 1))


def _steps(name: str, value: int | None) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: give a number of steps of at least 1, or None")
    return value


def _options(root: str | os.PathLike[str], **fields: Any) -> CheckpointOptions:
    text = os.fspath(root)
    if "://" in text:
        raise ValueError(
            f"root={text!r} is a URL: give a folder that all ranks see, and the URL as remote= (copies go there)"
        )
    if fields["keep"] < 2:
        raise ValueError(f"keep={fields['keep']!r}: at least 2, so that there is one to go back to")
    if fields["slots"] not in (0, 1, 2):
        raise ValueError(f"memory={fields['slots']!r}: True, False, 1 or 2 snapshots per rank")
    if fields["every_local"] is not None and fields["local"] is None:
        raise ValueError("every_local is given without local=, the folder on the node's own disk")
    if fields["every_remote"] is not None and fields["remote"] is None:
        raise ValueError("every_remote is given without remote=, the URL for copies")
    return CheckpointOptions(root=os.path.abspath(text), **fields)
