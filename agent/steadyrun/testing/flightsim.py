"""Flight-recorder dumps of jobs that never ran, with the truth beside them.

A training program (tensor, context, expert, data and pipeline parallel) is simulated operation by operation: every rank
has a host thread that runs ahead of its device by a window, a compute stream, one communication stream per group, and
gloo groups on the host, one of them in a thread of its own. Faults are injected, everything goes on as far as it can,
and what each rank's recorders would then hold is written in torch's layout. The same seed gives the same set.

    found = simulate(Scenario(Layout(tp=4, dp=4), faults=(FaultKind.HOST_STALL,), seed=3))
    found.write(folder)            # dumps, and truth.json
    found.truth.faults[0].rank

Completion follows NCCL: the k-th collective of a group meets the others' k-th, whatever was meant; it ends when all
members have come with the same operation, sizes and type, and never otherwise.
"""

from __future__ import annotations

import json
import pickle
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

__all__ = [
    "Fault",
    "FaultKind",
    "FlightSet",
    "Layout",
    "Named",
    "NotManifestError",
    "RankRecord",
    "Records",
    "Scenario",
    "Score",
    "Truth",
    "drawn_set",
    "is_one_unseen",
    "layout_of",
    "score",
    "simulate",
]

PERIOD: Final = 4  # iterations after which the program repeats: a checkpoint is written in every fourth
FAULT_ITERATION: Final = 1  # of the simulated ones
SIMULATED: Final = 4
EPOCH_NS: Final = 1_795_966_537_000_000_000
CALL_NS: Final = 20_000
KERNEL_NS: Final = 300_000
HIGH: Final = 0.7  # a finding of this confidence must be right


class FaultKind(str, Enum):
    """What goes wrong; ``RUNNING`` is nothing, seen in the middle of a step, ``NONE`` nothing, seen at the end."""

    NONE = "none"
    RUNNING = "running"
    HOST_STALL = "host_stall"
    GLOO_STALL = "gloo_stall"  # a host stall ahead of an operation of the gloo group
    DEVICE_STALL = "device_stall"  # a kernel ahead of the collective never ends
    DEVICE_LOST = "device_lost"  # the collective ends on the others, never on this rank
    DEAD = "dead"
    STOPPED = "stopped"
    OP_MISMATCH = "op_mismatch"
    SIZE_MISMATCH = "size_mismatch"
    DTYPE_MISMATCH = "dtype_mismatch"
    SKIP = "skip"
    EXTRA = "extra"
    ORDER_SWAP = "order_swap"
    P2P_SKIP = "p2p_skip"
    HANG_IN_FLIGHT = "hang_in_flight"


_WITHOUT_DUMP: Final = frozenset({FaultKind.DEAD, FaultKind.STOPPED})
_MISMATCHES: Final = frozenset({FaultKind.OP_MISMATCH, FaultKind.SIZE_MISMATCH, FaultKind.DTYPE_MISMATCH})
_EVEN: Final = _MISMATCHES | {FaultKind.SKIP, FaultKind.EXTRA}
_NOTHING: Final = frozenset({FaultKind.NONE, FaultKind.RUNNING})
_CLASSES: Final[Mapping[FaultKind, tuple[str, ...]]] = {
    FaultKind.HOST_STALL: ("host_stall",),
    FaultKind.GLOO_STALL: ("host_stall",),
    FaultKind.DEVICE_STALL: ("device_stall",),
    FaultKind.DEVICE_LOST: ("device_stall",),
    FaultKind.DEAD: ("dead_process",),
    FaultKind.STOPPED: ("stopped_process",),
    FaultKind.OP_MISMATCH: ("op_mismatch",),
    FaultKind.SIZE_MISMATCH: ("size_mismatch",),
    FaultKind.DTYPE_MISMATCH: ("dtype_mismatch",),
    FaultKind.SKIP: ("skipped_collective",),
    FaultKind.EXTRA: ("extra_collective",),
    FaultKind.ORDER_SWAP: ("deadlock_cycle",),
    FaultKind.P2P_SKIP: ("p2p_unmatched",),
    FaultKind.HANG_IN_FLIGHT: ("in_flight_network",),
}


class NotManifestError(Exception):
    """The fault cannot happen in this layout, or was never reached; another seed or layout may do."""


# -- what is asked for -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Layout:
    """The parallel forms; expert groups lie within the data parallel ones, so that *ep* has to divide *dp*."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    layers: int = 2
    microbatches: int = 2
    ranks_per_node: int = 8
    has_gloo: bool = True

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.cp, self.ep, self.layers, self.microbatches, self.ranks_per_node) < 1:
            raise ValueError(f"every number of a layout has to be at least 1: {self}")
        if self.dp % self.ep:
            raise ValueError(f"ep {self.ep} does not divide dp {self.dp}")

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp


def layout_of(world: int, rng: random.Random) -> Layout:
    """A layout that such a job might have; *world* is a power of two, at least 4."""
    if world < 4 or world & (world - 1):
        raise ValueError(f"world has to be a power of two and at least 4, not {world}")
    room = world
    tp = rng.choice([n for n in (2, 4, 8) if n * 2 <= room])
    room //= tp
    pp = rng.choice([n for n in (1, 2, 4) if n <= max(1, room // 4)])
    room //= pp
    cp = rng.choice([n for n in (1, 1, 2) if n <= max(1, room // 4)])
    room //= cp
    ep = rng.choice([n for n in (1, 1, 2, 4, 8) if n <= room])
    return Layout(tp=tp, pp=pp, dp=room, cp=cp, ep=ep)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One set of dumps.

    Attributes:
        faults: at most two, in different ranks.
        entries: the ring of the NCCL recorder; older iterations fill it. 0: the job began with the simulated ones.
        gloo_entries: the ring of gloo's.
        window: operations that the host may be ahead of the device.
        with_timing: device starts are recorded (TORCH_NCCL_ENABLE_TIMING).
        active_only: what is done is left out of the dumps.
        version: ``2.4``, ``2.9`` or ``2.10``.
        prefix: of profiling names: ``nccl``, or ``nccl2`` for torch 2.15.
        backend: ``gloo`` for a job on CPUs: every call holds the thread, and there is one recorder, which says less.
        skew_s: clocks of nodes differ by up to so much in both directions.
        dropped, truncated: shares of the innocents' dumps that are missing, or cut.
        states_known: the agent says who is dead or stopped.
    """

    layout: Layout
    faults: tuple[FaultKind, ...] = ()
    seed: int = 0
    entries: int = 200
    gloo_entries: int = 200
    window: int = 24
    with_timing: bool = False
    with_frames: bool = True
    active_only: bool = False
    version: str = "2.10"
    prefix: str = "nccl"
    backend: str = "nccl"
    skew_s: float = 0.0
    dropped: float = 0.0
    truncated: float = 0.0
    states_known: bool = True
    victims: tuple[int, ...] = ()


Named = tuple[str, Sequence[int], float]  # a finding's class, ranks and confidence


# -- the truth ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault.

    Attributes:
        group, desc, seq, op, site: of the operation at which it strikes; *site* as ``FlightOp.site`` is written.
        members: ranks of that group.
        peer: the other side of a point-to-point operation.
    """

    kind: FaultKind
    rank: int
    group: str = ""
    desc: str = ""
    seq: int = 0
    op: str = ""
    site: str = ""
    members: tuple[int, ...] = ()
    peer: int | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """Values of a verdict's ``class`` that are right."""
        return _CLASSES[self.kind]

    def is_named_by(self, finding: Named, culprits: frozenset[int] = frozenset()) -> bool:
        """Whether a finding names the culprit exactly; it may name other *culprits* with it.

        Two members that differ are even: naming both is exact while it does not pretend to know. A hang in the network
        is nobody's: its group is named. An operation that is missing between two is both's.
        """
        _, ranks, confidence = finding
        found = set(ranks)
        if self.kind is FaultKind.HANG_IN_FLIGHT:
            return found == set(self.members)
        if self.rank in found and found <= {self.rank} | culprits:
            return True
        if self.kind in (FaultKind.P2P_SKIP, FaultKind.ORDER_SWAP) and len(found) == 2:
            return found == {self.rank, self.peer} or (self.kind is FaultKind.ORDER_SWAP and self.rank in found)
        if len(self.members) == 2 and self.kind in _EVEN:
            return found == set(self.members) and confidence < HIGH
        return False

    def involves(self, finding: Named) -> bool:
        """Whether what a finding says of its ranks is true, so that no innocent is blamed.

        A ring of waits and a hang in the network blame nobody, as long as the culprit is among the ranks.
        """
        cls, ranks, _ = finding
        if self.kind is FaultKind.HANG_IN_FLIGHT:
            return set(ranks) <= set(self.members)
        if cls in ("deadlock_cycle", "in_flight_network"):
            return self.rank in ranks
        return set(ranks) <= ({self.rank} if self.peer is None else {self.rank, self.peer})


@dataclass(frozen=True, slots=True)
class Truth:
    """What happened. *blocked*: ranks that stand in an operation at the end; *states*: rank to process state."""

    world: int
    faults: tuple[Fault, ...]
    blocked: tuple[int, ...]
    dropped: tuple[int, ...]
    truncated: tuple[int, ...]
    states: Mapping[int, str]

    def to_json(self) -> dict[str, Any]:
        faults = [{n: getattr(f, n) for n in Fault.__slots__} | {"kind": f.kind.value} for f in self.faults]
        return {
            "world": self.world,
            "faults": [f | {"members": list(f["members"])} for f in faults],
            "blocked": list(self.blocked),
            "dropped": list(self.dropped),
            "truncated": list(self.truncated),
            "states": {str(r): s for r, s in self.states.items()},
        }


@dataclass(frozen=True, slots=True)
class Score:
    """How right a verdict is.

    Attributes:
        is_exact: the leading findings, as many as there are faults, name the culprits and nobody else.
        is_class_right: and say what each did.
        is_named: every culprit is in some finding.
        blames_innocent: a finding of high confidence names somebody else.
    """

    is_exact: bool
    is_class_right: bool
    is_named: bool
    blames_innocent: bool


def score(truth: Truth, findings: Sequence[Named]) -> Score:
    """*findings*: (class, ranks, confidence), the most important first; those that name no rank are left out."""
    named = [f for f in findings if f[1] and f[0] not in ("healthy", "insufficient_data")]
    culprits = frozenset(f.rank for f in truth.faults)
    innocent = any(
        f[2] >= HIGH and not set(f[1]) <= culprits and not any(fault.involves(f) for fault in truth.faults)
        for f in named
    )
    if not truth.faults:
        return Score(not innocent, not innocent, not innocent, innocent)
    head = named[: len(truth.faults)]
    exact = [[f for f in head if fault.is_named_by(f, culprits)] for fault in truth.faults]
    return Score(
        is_exact=all(exact),
        is_class_right=all(
            any(f[0] in fault.classes for f in found) for found, fault in zip(exact, truth.faults, strict=True)
        ),
        is_named=all(any(fault.rank in f[1] for f in named) for fault in truth.faults),
        blames_innocent=innocent,
    )


# -- the program -------------------------------------------------------------------------------------------------------
class _Mode(Enum):
    SYNC = "sync"  # the compute stream waits for it
    ASYNC = "async"  # it waits at a later ``_Join``
    HOST = "host"  # gloo: the calling thread waits
    SEND = "send"
    RECV = "recv"


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str
    index: Mapping[int, int] = field(repr=False, hash=False, compare=False, default_factory=dict)


Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Call:
    group: int
    name: str
    mode: _Mode
    ins: Sizes
    outs: Sizes
    site: int
    dtype: str = "BFloat16"
    thread: str = "python"
    src: int | None = None  # group ranks
    dst: int | None = None
    is_uneven: bool = False
    joins: bool = False  # every asynchronous operation so far is waited for ahead of it
    drains: bool = False  # the host waits for the device after it

    @property
    def is_p2p(self) -> bool:
        return self.mode in (_Mode.SEND, _Mode.RECV)

    @property
    def signature(self) -> tuple[object, ...]:
        return (self.name, self.dtype) if self.is_uneven else (self.name, self.ins, self.outs, self.dtype)


def _on_host(call: _Call) -> _Call:
    """The same call of gloo's: its thread waits in it, and a scattered reduction is recorded as a whole one."""
    if call.name == "_reduce_scatter_base":
        call = replace(call, name="all_reduce", outs=call.ins)
    return replace(call, mode=_Mode.HOST, joins=False, drains=False)


# (function, file, line) of who calls torch.distributed.
_SITES: Final = (
    ("attention_forward", "/workspace/megatron/core/attention.py", 141),
    ("mlp_forward", "/workspace/megatron/core/mlp.py", 177),
    ("mlp_backward", "/workspace/megatron/core/mlp.py", 201),
    ("attention_backward", "/workspace/megatron/core/attention.py", 230),
    ("recv_forward", "/workspace/megatron/core/pipeline.py", 118),
    ("send_forward", "/workspace/megatron/core/pipeline.py", 131),
    ("recv_backward", "/workspace/megatron/core/pipeline.py", 160),
    ("send_backward", "/workspace/megatron/core/pipeline.py", 171),
    ("dispatch_tokens", "/workspace/megatron/core/experts.py", 88),
    ("combine_tokens", "/workspace/megatron/core/experts.py", 119),
    ("gather_context", "/workspace/megatron/core/context.py", 64),
    ("start_gradient_sync", "/workspace/megatron/core/buffers.py", 301),
    ("gather_parameters", "/workspace/megatron/core/buffers.py", 322),
    ("clip_gradients", "/workspace/megatron/core/optimizer.py", 350),
    ("average_metrics", "/workspace/megatron/training.py", 702),
    ("agree_on_plan", "/workspace/megatron/checkpoint.py", 512),
    ("finish_save", "/workspace/megatron/checkpoint.py", 540),
    ("debug_norm", "/workspace/megatron/training.py", 731),
)
_SITE: Final = {name: i for i, (name, _, _) in enumerate(_SITES)}
_STACK: Final = (
    ("train_step", "/workspace/megatron/training.py", 612),
    ("train", "/workspace/megatron/training.py", 1410),
    ("<module>", "/workspace/pretrain.py", 290),
)
_SIDE: Final = ("cpu_side", "checkpoint")
_SAVE_THREAD: Final = "Thread-7 (save)"


class _Program:
    """Groups and calls of a layout; one iteration's calls are shared by all ranks that do the same."""

    def __init__(self, layout: Layout, backend: str) -> None:
        self.layout, self.backend = layout, backend
        self.groups: list[_Group] = []
        world = range(layout.world)
        self._default = self._add("default_pg", world)
        at = {r: self._place(r) for r in world}  # (p, d, c, t)
        self._tp = self._mesh("mesh_tp", at, lambda p, d, c, t: (p, d, c))
        self._cp = self._mesh("mesh_cp", at, lambda p, d, c, t: (p, d, t))
        self._dp = self._mesh("mesh_dp", at, lambda p, d, c, t: (p, c, t))
        self._ep = self._mesh("mesh_ep", at, lambda p, d, c, t: (p, d // layout.ep, c, t)) if layout.ep > 1 else {}
        self._pp = self._mesh("mesh_pp", at, lambda p, d, c, t: (d, c, t))
        self._metrics = self._add(_SIDE[0], world, "gloo") if layout.has_gloo else None
        self._save = self._add(_SIDE[1], world, "gloo") if layout.has_gloo else None
        self.groups_of: list[list[int]] = [[] for _ in world]
        for g, group in enumerate(self.groups):
            for r in group.ranks:
                self.groups_of[r].append(g)
        self._cache: dict[tuple[object, ...], tuple[_Call, ...]] = {}

    def _place(self, rank: int) -> tuple[int, int, int, int]:
        rest, t = divmod(rank, self.layout.tp)
        rest, c = divmod(rest, self.layout.cp)
        p, d = divmod(rest, self.layout.dp)
        return p, d, c, t

    def _add(self, desc: str, ranks: Sequence[int], backend: str = "") -> int:
        members = tuple(ranks)
        index = {r: i for i, r in enumerate(members)}
        self.groups.append(_Group(str(len(self.groups)), desc, members, backend or self.backend, index))
        return len(self.groups) - 1

    def _mesh(self, desc: str, at: Mapping[int, tuple[int, int, int, int]], key: Any) -> dict[int, int]:
        """The groups of one dimension: rank to group; empty where they would have one member."""
        sets: dict[object, list[int]] = {}
        for rank, place in at.items():
            sets.setdefault(key(*place), []).append(rank)
        found: dict[int, int] = {}
        for members in sets.values():
            if len(members) > 1:
                g = self._add(desc, members)
                found.update(dict.fromkeys(members, g))
        return found

    def calls(self, rank: int, iteration: int) -> tuple[_Call, ...]:
        """The main thread's, in order."""
        groups = tuple(m.get(rank) for m in (self._tp, self._cp, self._dp, self._ep, self._pp))
        stage, _, _, _ = self._place(rank)
        position = self.groups[groups[3]].index[rank] if groups[3] is not None else 0
        key = (groups, stage, position, iteration % PERIOD)
        found = self._cache.get(key)
        if found is None:
            built = self._build(groups, stage, position, iteration % PERIOD)
            found = self._cache[key] = tuple(built if self.backend == "nccl" else map(_on_host, built))
        return found

    def saves(self, iteration: int) -> tuple[_Call, ...]:
        """The save thread's, which begin in this iteration."""
        if self._save is None or iteration % PERIOD != FAULT_ITERATION - 1:
            return ()
        world, thread, save = self.layout.world, _SAVE_THREAD, self._save
        plan = _Call(save, "all_gather", _Mode.HOST, ((64,),), ((64 * world,),), _SITE["agree_on_plan"], "Byte", thread)
        end = _Call(save, "barrier", _Mode.HOST, ((1,),), ((1,),), _SITE["finish_save"], "Float", thread)
        return (plan, end)

    def _build(self, groups: tuple[int | None, ...], stage: int, position: int, phase: int) -> Iterator[_Call]:
        tp, cp, dp, ep, pp = groups
        lay = self.layout
        hidden: Sizes = ((2048 // lay.cp, 1, 4096),)
        last = lay.pp - 1

        def reduce(site: str) -> Iterator[_Call]:
            if tp is not None:
                yield _Call(tp, "all_reduce", _Mode.SYNC, hidden, hidden, _SITE[site])

        def experts(site: str) -> Iterator[_Call]:
            if ep is not None:
                sent: Sizes = ((1024 + 16 * ((position + phase) % 3), 4096),)
                after = (position + 1) % lay.ep  # what the next one sends, so that both sums are equal
                got: Sizes = ((1024 + 16 * ((after + phase) % 3), 4096),)
                yield _Call(ep, "all_to_all", _Mode.SYNC, sent, got, _SITE[site], is_uneven=True)

        def context() -> Iterator[_Call]:
            if cp is not None:
                whole: Sizes = ((2048, 1, 4096),)
                yield _Call(cp, "_all_gather_base", _Mode.SYNC, hidden, whole, _SITE["gather_context"])

        def pipe(mode: _Mode, src: int, dst: int, site: str) -> Iterator[_Call]:
            if pp is not None and 0 <= src <= last and 0 <= dst <= last:
                yield _Call(pp, mode.value, mode, hidden, hidden, _SITE[site], src=src, dst=dst)

        for _ in range(lay.microbatches):
            yield from pipe(_Mode.RECV, stage - 1, stage, "recv_forward")
            for _ in range(lay.layers):
                yield from context()
                yield from reduce("attention_forward")
                yield from experts("dispatch_tokens")
                yield from experts("combine_tokens")
                yield from reduce("mlp_forward")
            yield from pipe(_Mode.SEND, stage, stage + 1, "send_forward")
        for micro in range(lay.microbatches):
            yield from pipe(_Mode.RECV, stage + 1, stage, "recv_backward")
            for layer in range(lay.layers):
                yield from reduce("mlp_backward")
                yield from reduce("attention_backward")
                if dp is not None and micro == lay.microbatches - 1:
                    n = 4096 * (layer + 1)
                    scattered: Sizes = ((n,),)
                    yield _Call(dp, "_reduce_scatter_base", _Mode.ASYNC, ((n * lay.dp,),), scattered,
                                _SITE["start_gradient_sync"], "Float", "pt_autograd_0")  # fmt: skip
            yield from pipe(_Mode.SEND, stage, stage - 1, "send_backward")
        yield _Call(self._default, "all_reduce", _Mode.SYNC, ((1,),), ((1,),), _SITE["clip_gradients"], "Float",
                    joins=True, drains=True)  # fmt: skip
        if dp is not None:
            yield _Call(dp, "_all_gather_base", _Mode.SYNC, ((8192,),), ((8192 * lay.dp,),), _SITE["gather_parameters"])
        if self._metrics is not None:
            yield _Call(self._metrics, "all_reduce", _Mode.HOST, ((4,),), ((4,),), _SITE["average_metrics"], "Float")


# -- the simulation ----------------------------------------------------------------------------------------------------
class _Op:
    """A call that was issued. Times are ns on the true clock; None: not yet, which at the end means never."""

    __slots__ = (
        "call", "done_ns", "gate", "has_arrived", "issued_ns", "number", "p2p_number", "place", "rank", "start_ns"
    )  # fmt: skip

    def __init__(
        self, call: _Call, rank: int, number: int, p2p_number: int, issued_ns: int, gate: int, place: int
    ) -> None:
        self.call, self.rank, self.number, self.p2p_number = call, rank, number, p2p_number
        self.issued_ns, self.gate = issued_ns, gate
        self.place = place  # index in the main thread's calls; -1 in another thread
        self.start_ns: int | None = None
        self.done_ns: int | None = None
        self.has_arrived = False


class _Thread:
    """A host thread: what it will call, and where it is."""

    __slots__ = ("at", "calls", "draining", "now_ns", "waits_for")

    def __init__(self, calls: list[tuple[int, _Call]], now_ns: int) -> None:
        self.calls = calls  # (iteration, call)
        self.at = 0
        self.now_ns = now_ns
        self.waits_for: _Op | None = None
        self.draining = False


class _Rank:
    """One rank: threads, a compute stream of waits, and a communication stream per group."""

    __slots__ = (
        "compute", "compute_at", "compute_ns", "compute_times", "counts", "device_stop", "host_stop", "is_gone", "ops",
        "p2p_counts", "pending", "streams", "threads",
    )  # fmt: skip

    def __init__(self, main: list[tuple[int, _Call]], save: list[tuple[int, _Call]], counts: Counter[int],
                 p2p_counts: Counter[int]) -> None:  # fmt: skip
        self.threads = [_Thread(main, EPOCH_NS), *([_Thread(save, EPOCH_NS + 5_000_000)] if save else [])]
        self.compute: list[_Op] = []
        self.compute_at = 0
        self.compute_ns = EPOCH_NS
        self.compute_times: list[int] = []
        self.streams: dict[tuple[int, ...], deque[_Op]] = {}
        self.pending: list[_Op] = []  # asynchronous ones not yet joined
        self.ops: list[_Op] = []
        self.counts, self.p2p_counts = counts, p2p_counts
        self.host_stop: int | None = None  # index in the main thread's calls
        self.device_stop: int | None = None  # kernels from this position of the compute stream on never end
        self.is_gone = False  # the process, or all its threads


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What a rank's recorders hold apart from times.

    Attributes:
        calls: per thread, in order: group, call, numbers, and whether it started and is done.
        stands: in an operation.
    """

    calls: tuple[tuple[object, ...], ...]
    stands: bool


Records = tuple[RankRecord | None, ...]  # per rank; None: it left no dump


class _Simulation:
    def __init__(self, scenario: Scenario, rng: random.Random) -> None:
        self.scenario, self.rng = scenario, rng
        self.program = _Program(scenario.layout, scenario.backend)
        longest = max(len(self.program.calls(r, 0)) for r in self._some_ranks())
        rounds = -(-scenario.entries // (longest * PERIOD)) + 1 if scenario.entries else 0
        self.history = rounds * PERIOD  # iterations before the simulated ones, all of them done
        self.ranks = [self._rank(r) for r in range(scenario.layout.world)]
        self.arrived: dict[tuple[int, int], list[_Op]] = {}
        self.channels: dict[tuple[int, int | None, int | None], deque[_Op]] = {}
        self.hangs: set[tuple[int, int]] = set()
        self.lost: set[tuple[int, int, int]] = set()  # (group, number, rank) that never see the end
        self.gone_with_queue: set[int] = set()
        self.places: dict[int, int] = {}  # where in its calls each victim goes wrong
        self.todo: deque[int] = deque()
        self.is_queued = [False] * len(self.ranks)

    def _some_ranks(self) -> Sequence[int]:
        """One of each pipeline stage: the others do as many calls."""
        layout = self.scenario.layout
        return range(0, layout.world, layout.world // layout.pp)

    def _rank(self, rank: int) -> _Rank:
        main = [(i, c) for i in range(SIMULATED) for c in self.program.calls(rank, i)]
        save = [(i, c) for i in range(SIMULATED) for c in self.program.saves(i)]
        counts, p2p_counts = self.counts_before(rank, self.history)
        return _Rank(main, save, counts, p2p_counts)

    def counts_before(self, rank: int, iteration: int) -> tuple[Counter[int], Counter[int]]:
        """Collectives and point-to-point operations per group that this many iterations hold; a multiple of PERIOD."""
        counts: Counter[int] = Counter()
        p2p_counts: Counter[int] = Counter()
        for i in range(PERIOD):
            for call in (*self.program.calls(rank, i), *self.program.saves(i)):
                (p2p_counts if call.is_p2p else counts)[call.group] += iteration // PERIOD
        return counts, p2p_counts

    # -- run
    def run(self) -> None:
        """Until nothing can go on."""
        for rank in range(len(self.ranks)):
            self._wake(rank)
        while self.todo:
            rank = self.todo.popleft()
            self.is_queued[rank] = False
            state = self.ranks[rank]
            while self._advance_device(state) | self._advance_host(rank, state):
                pass

    def _wake(self, rank: int) -> None:
        if not self.is_queued[rank]:
            self.is_queued[rank] = True
            self.todo.append(rank)

    def _advance_device(self, state: _Rank) -> bool:
        moved = False
        stop = state.device_stop
        while state.compute_at < len(state.compute) and state.compute_at != stop:
            op = state.compute[state.compute_at]
            if op.done_ns is None:
                break
            state.compute_ns = max(state.compute_ns, op.done_ns) + KERNEL_NS
            state.compute_at += 1
            state.compute_times.append(state.compute_ns)
            moved = True
        for stream in state.streams.values():
            while stream:
                op = stream[0]
                if op.has_arrived:
                    if op.done_ns is None:
                        break
                    stream.popleft()
                    moved = True
                    continue
                if op.gate > state.compute_at or (stop is not None and op.gate >= stop):
                    break
                op.has_arrived = True
                op.start_ns = max(op.issued_ns, state.compute_ns)
                self._arrive(op)
                moved = True
        return moved

    def _advance_host(self, rank: int, state: _Rank) -> bool:
        moved = False
        for thread in state.threads:
            while not state.is_gone and thread.at < len(thread.calls):
                if thread.waits_for is not None:
                    if thread.waits_for.done_ns is None:
                        break
                    thread.now_ns = max(thread.now_ns, thread.waits_for.done_ns)
                    thread.waits_for = None
                if thread.draining:
                    if state.compute_at < len(state.compute):
                        break
                    thread.now_ns, thread.draining = max(thread.now_ns, state.compute_ns), False
                iteration, call = thread.calls[thread.at]
                if thread is state.threads[0]:
                    if thread.at == state.host_stop:
                        break
                elif state.threads[0].at < len(state.threads[0].calls) and (
                    state.threads[0].calls[state.threads[0].at][0] <= iteration
                ):
                    break  # the save of an iteration begins after it
                ahead = len(state.compute) - self.scenario.window
                if ahead >= 0 and call.mode is not _Mode.HOST:
                    if state.compute_at <= ahead:
                        break
                    thread.now_ns = max(thread.now_ns, state.compute_times[ahead])
                thread.now_ns += CALL_NS + (rank * 7919 + thread.at * 104729) % 2000
                self._issue(rank, state, thread, call)
                thread.at += 1
                moved = True
            is_at_stop = state.host_stop is not None and state.threads[0].at == state.host_stop
            if is_at_stop and rank in self.gone_with_queue and not state.is_gone:
                state.is_gone = moved = True
                state.device_stop = state.compute_at
        return moved

    def _issue(self, rank: int, state: _Rank, thread: _Thread, call: _Call) -> None:
        counts = state.p2p_counts if call.is_p2p else state.counts
        counts[call.group] += 1
        if call.joins:
            state.compute += state.pending
            state.pending.clear()
        gate = 0 if call.mode is _Mode.HOST else len(state.compute)
        place = thread.at if thread is state.threads[0] else -1
        op = _Op(call, rank, state.counts[call.group], state.p2p_counts[call.group], thread.now_ns, gate, place)
        state.ops.append(op)
        key: tuple[int, ...] = (call.group,)
        if call.src is not None and call.dst is not None:
            key = (call.group, min(call.src, call.dst), max(call.src, call.dst))
        state.streams.setdefault(key, deque()).append(op)
        if call.mode is _Mode.HOST:
            thread.waits_for = op
        elif call.mode is _Mode.ASYNC:
            state.pending.append(op)
        else:
            state.compute.append(op)
        thread.draining = call.drains

    def _arrive(self, op: _Op) -> None:
        call = op.call
        if call.is_p2p:
            channel = self.channels.setdefault((call.group, call.src, call.dst), deque())
            if channel and channel[0].call.mode is not call.mode:
                self._complete([channel.popleft(), op])
            else:
                channel.append(op)
            return
        key = (call.group, op.number)
        here = self.arrived.setdefault(key, [])
        here.append(op)
        if len(here) < len(self.program.groups[call.group].ranks) or key in self.hangs:
            return
        if all(other.call is call or other.call.signature == call.signature for other in here):
            self._complete([x for x in here if (*key, x.rank) not in self.lost])
            del self.arrived[key]

    def _complete(self, ops: Sequence[_Op]) -> None:
        at_ns = max(op.start_ns or 0 for op in ops) + KERNEL_NS
        for op in ops:
            op.done_ns = at_ns
            self._wake(op.rank)

    # -- faults
    def inject(self, kind: FaultKind, rank: int) -> Fault:
        """Changes *rank*'s program or its luck in the fault iteration.

        Raises:
            NotManifestError: it has no operation where this can happen.
        """
        state, main = self.ranks[rank], self.ranks[rank].threads[0].calls
        places = [k for k, (i, c) in enumerate(main) if i == FAULT_ITERATION and self._suits(kind, c, rank)]
        if kind is FaultKind.ORDER_SWAP:
            places = [k for k in places if self._swap_partner(main, k) is not None]
        if not places:
            raise NotManifestError(f"{kind.value} cannot happen on rank {rank} of {self.scenario.layout}")
        k = self.rng.choice(places)
        iteration, call = main[k]
        fault = self._describe(kind, rank, main, k)
        self.places[rank] = k
        key = (call.group, fault.seq)
        match kind:
            case FaultKind.HOST_STALL | FaultKind.GLOO_STALL | FaultKind.DEAD | FaultKind.STOPPED:
                state.host_stop = k
                if kind is FaultKind.DEAD and self.rng.random() < 0.5:
                    self.gone_with_queue.add(rank)
            case FaultKind.DEVICE_STALL:
                state.device_stop = self._gate_of(main, k)
            case FaultKind.DEVICE_LOST:
                self.lost.add((*key, rank))
            case FaultKind.HANG_IN_FLIGHT:
                self.hangs.add(key)
            case FaultKind.OP_MISMATCH:
                other = "broadcast" if call.name != "broadcast" else "all_reduce"
                main[k] = (iteration, replace(call, name=other))
            case FaultKind.SIZE_MISMATCH:
                halved = tuple((max(1, s[0] // 2) if s[0] > 1 else 2, *s[1:]) for s in call.ins)
                outs = tuple((max(1, s[0] // 2) if s[0] > 1 else 2, *s[1:]) for s in call.outs)
                main[k] = (iteration, replace(call, ins=halved, outs=outs))
            case FaultKind.DTYPE_MISMATCH:
                main[k] = (iteration, replace(call, dtype="Half" if call.dtype != "Half" else "Float"))
            case FaultKind.SKIP | FaultKind.P2P_SKIP:
                del main[k]
            case FaultKind.EXTRA:
                again = call if self.rng.random() < 0.5 else replace(call, site=_SITE["debug_norm"], joins=False)
                main.insert(k, (iteration, replace(again, drains=False)))
            case FaultKind.ORDER_SWAP:
                partner = self._swap_partner(main, k)
                assert partner is not None
                main[k], main[partner] = main[partner], main[k]
            case FaultKind.NONE | FaultKind.RUNNING:
                raise ValueError(f"{kind.value} is no fault to inject")
        return fault

    def _suits(self, kind: FaultKind, call: _Call, rank: int) -> bool:
        is_main = self.program.groups[call.group].desc not in _SIDE  # what the training itself does
        match kind:
            case FaultKind.GLOO_STALL:
                return not is_main
            case FaultKind.P2P_SKIP:
                return call.is_p2p
            case FaultKind.HOST_STALL | FaultKind.DEAD | FaultKind.STOPPED:
                return is_main
            case FaultKind.SIZE_MISMATCH:
                return is_main and not call.is_p2p and not call.is_uneven
            case FaultKind.ORDER_SWAP:
                return call.mode is _Mode.SYNC or (is_main and call.mode is _Mode.HOST)
            case FaultKind.DEVICE_STALL:
                return call.mode is _Mode.SYNC or call.is_p2p
            case FaultKind.DEVICE_LOST:
                return is_main and call.mode in (_Mode.SYNC, _Mode.ASYNC)
            case _:
                return is_main and not call.is_p2p

    def _swap_partner(self, main: Sequence[tuple[int, _Call]], k: int) -> int | None:
        """The next synchronous collective of another group; another member common to both makes it a deadlock."""
        ranks = set(self.program.groups[main[k][1].group].ranks)
        for j in range(k + 1, len(main)):
            call = main[j][1]
            if self._suits(FaultKind.ORDER_SWAP, call, 0) and call.group != main[k][1].group:
                return j if len(ranks.intersection(self.program.groups[call.group].ranks)) > 1 else None
        return None

    def _gate_of(self, main: Sequence[tuple[int, _Call]], k: int) -> int:
        """Position in the compute stream at which call *k* is issued."""
        position = pending = 0
        for _, call in main[:k]:
            position += pending if call.joins else 0
            pending = 0 if call.joins else pending
            pending += call.mode is _Mode.ASYNC
            position += call.mode not in (_Mode.ASYNC, _Mode.HOST)
        return position + (pending if main[k][1].joins else 0)

    def _describe(self, kind: FaultKind, rank: int, main: Sequence[tuple[int, _Call]], k: int) -> Fault:
        call = main[k][1]
        group = self.program.groups[call.group]
        before = sum(c.group == call.group and c.is_p2p == call.is_p2p for _, c in main[: k + 1])
        counts = self.ranks[rank].p2p_counts if call.is_p2p else self.ranks[rank].counts
        function, file, line = _SITES[call.site]
        other = (call.dst if call.mode is _Mode.SEND else call.src) if call.is_p2p else None
        return Fault(
            kind=kind,
            rank=rank,
            group=group.name,
            desc=group.desc,
            seq=counts[call.group] + before,
            op=call.name,
            site=f"{file.rpartition('/')[2]}:{line} in {function}",
            members=group.ranks,
            peer=group.ranks[other] if other is not None else None,
        )

    def is_manifest(self, fault: Fault) -> bool:
        """Whether somebody stands where this fault makes him stand, so that it can be seen at all."""
        group = next(g for g, x in enumerate(self.program.groups) if x.name == fault.group)
        mine = self.ranks[fault.rank]
        match fault.kind:
            case FaultKind.HOST_STALL | FaultKind.GLOO_STALL | FaultKind.STOPPED | FaultKind.DEAD:
                is_free = fault.kind in _WITHOUT_DUMP or self.head(fault.rank) is None
                return is_free and mine.host_stop == mine.threads[0].at and self._is_awaited(fault.rank)
            case FaultKind.DEVICE_STALL:
                is_free = self.head(fault.rank) is None
                return is_free and mine.compute_at == mine.device_stop and self._is_awaited(fault.rank)
            case FaultKind.HANG_IN_FLIGHT:
                return len(self.arrived.get((group, fault.seq), ())) == len(fault.members)
            case FaultKind.DEVICE_LOST:
                key = (group, fault.seq)
                others = (op for r in fault.members if r != fault.rank for op in self.ranks[r].ops)
                return any(op.done_ns for op in others if (op.call.group, op.number) == key and not op.call.is_p2p)
            case FaultKind.OP_MISMATCH | FaultKind.SIZE_MISMATCH | FaultKind.DTYPE_MISMATCH:
                here = self.arrived.get((group, fault.seq), ())
                return any(op.rank == fault.rank for op in here) and len(here) > min(2, len(fault.members) - 1)
            case _:
                return self._has_left_course(fault, group)

    def _has_left_course(self, fault: Fault, group: int) -> bool:
        """Of calls too few, too many or in a wrong order: the device has passed the place, and it shows."""
        mine, place = self.ranks[fault.rank], self.places[fault.rank]
        if mine.threads[0].at <= place:
            return False
        is_past = all(op.done_ns is not None for op in mine.ops if 0 <= op.place < place)
        head = self.head(fault.rank)
        heads = {r: self.head(r) for r in fault.members if r != fault.rank}
        awaiting = [op for r, op in heads.items() if op and op.call.group == group and self._waits_for(r, fault.rank)]
        match fault.kind:
            case FaultKind.P2P_SKIP:
                return is_past and any(op.call.is_p2p for op in awaiting)
            case FaultKind.ORDER_SWAP:
                return is_past and bool(awaiting) and head is not None and head.place == place
            case FaultKind.EXTRA:
                stands = head is not None and head.call.group == group and head.place >= place
                return (is_past and stands) or self._differs(fault, group)
            case _:
                return (is_past and bool(awaiting)) or self._differs(fault, group)

    def _differs(self, fault: Fault, group: int) -> bool:
        """Whether two calls of the group or more were made elsewhere in the program than the other members'."""
        at: dict[int, dict[int, int]] = {}
        for rank in fault.members:
            for op in self.ranks[rank].ops:
                if op.call.group == group and not op.call.is_p2p:
                    at.setdefault(op.number, {})[rank] = op.call.site
        different = 0
        for sites in at.values():
            mine = sites.pop(fault.rank, None)
            enough = len(sites) >= min(2, len(fault.members) - 1)
            different += mine is not None and enough and mine not in sites.values()
        return different >= 2

    def records(self, faults: Sequence[Fault]) -> Records:
        """What the recorders hold at the end, times apart."""
        gone = {f.rank for f in faults if f.kind in _WITHOUT_DUMP}
        return tuple(None if r in gone else self._record(r) for r in range(len(self.ranks)))

    def _record(self, rank: int) -> RankRecord:
        is_timed = self.scenario.with_timing
        calls = [
            (op.call.thread == _SAVE_THREAD, op.call, op.number, op.p2p_number, is_timed and op.start_ns is not None,
             op.done_ns is not None)
            for op in self.ranks[rank].ops
        ]  # fmt: skip
        calls.sort(key=lambda c: c[0])  # threads may meet differently
        return RankRecord(tuple(calls), self.head(rank) is not None)

    def _is_awaited(self, rank: int) -> bool:
        return any(self._waits_for(r, rank) for r in range(len(self.ranks)))

    def head(self, rank: int) -> _Op | None:
        """The oldest operation of a rank that arrived and never ended."""
        return next((op for op in self.ranks[rank].ops if op.has_arrived and op.done_ns is None), None)

    def _waits_for(self, rank: int, other: int) -> bool:
        """Whether *rank* stands in an operation that *other* has not come to."""
        op = self.head(rank) if rank != other else None
        if op is None:
            return False
        group = self.program.groups[op.call.group]
        if op.call.is_p2p:
            peer = op.call.dst if op.call.mode is _Mode.SEND else op.call.src
            return peer is not None and group.ranks[peer] == other
        here = self.arrived.get((op.call.group, op.number), ())
        return other in group.index and not any(x.rank == other for x in here)


def simulate(scenario: Scenario) -> FlightSet:
    """Runs it.

    Raises:
        NotManifestError: no draw of victims and places let every fault show; take another seed or layout.
    """
    kinds = [k for k in scenario.faults if k not in _NOTHING]
    if len(kinds) > 2:
        raise ValueError(f"at most two faults at once, not {len(kinds)}")
    if FaultKind.P2P_SKIP in kinds and scenario.layout.pp == 1:
        raise NotManifestError(f"nothing is sent in {scenario.layout}: take pp of at least 2")
    rng = random.Random(scenario.seed)
    for _ in range(60):
        simulation = _Simulation(scenario, rng)
        victims = list(scenario.victims) or rng.sample(range(scenario.layout.world), len(kinds))
        faults, draws = [], []
        try:
            for kind, victim in zip(kinds, victims, strict=True):
                draws.append((kind, victim, rng.getstate()))
                faults.append(simulation.inject(kind, victim))
        except NotManifestError:
            continue
        simulation.run()
        if not all(simulation.is_manifest(f) for f in faults):
            continue
        if len(faults) == 2 and is_one_unseen(simulation.records(faults), [_alone(scenario, d) for d in draws]):
            continue
        return FlightSet(scenario, simulation, tuple(faults), rng)
    names = " and ".join(k.value for k in kinds)
    raise NotManifestError(f"{names} did not show in 60 draws of seed {scenario.seed} in {scenario.layout}")


def _alone(scenario: Scenario, draw: tuple[FaultKind, int, Any]) -> Records:
    """What the recorders would hold with this one fault at the same place."""
    kind, victim, state = draw
    rng = random.Random()
    rng.setstate(state)
    simulation = _Simulation(scenario, rng)
    fault = simulation.inject(kind, victim)
    simulation.run()
    return simulation.records([fault])


def is_one_unseen(both: Records, alone: Sequence[Records]) -> bool:
    """Whether nobody could find both of two faults, so that the set holds one to be found at most.

    Either one changes nothing in what any recorder holds when the other is there: it lies in the other's shadow. Or
    they undo each other, and nobody stands.

    Args:
        both, alone: what the recorders hold with both, and with each alone.
    """
    return both in alone or all(not rank.stands for rank in both if rank is not None)


def drawn_set(world: int, kinds: Sequence[FaultKind], faults: int, seed: object, **options: Any) -> FlightSet:
    """A random job of this size with as many *faults*, each one of *kinds*; everything else is drawn too.

    Args:
        kinds: what may go wrong; with no faults, NONE or RUNNING.
        seed: anything with a text; the same one gives the same set.
        options: fields of ``Scenario`` that shall not be drawn.
    """
    rng = random.Random(str(seed))
    while True:
        chosen = tuple(rng.choice(kinds) for _ in range(max(1, faults)))
        layout = layout_of(world, rng)
        if options.get("backend") == "gloo":  # its recorder does not see sends and receives
            layout = replace(layout, pp=1, dp=layout.dp * layout.pp)
        if FaultKind.P2P_SKIP in chosen and layout.pp == 1:
            layout = replace(layout, pp=2, dp=layout.dp // 2, ep=1)
        fields: dict[str, Any] = {
            "entries": rng.choice((0, 60, 150, 400)) if world <= 256 else 60,
            "window": rng.choice((4, 24, 64)),
            "with_timing": rng.random() < 0.33,
            "version": rng.choice(("2.4", "2.9", "2.10")),
            "skew_s": rng.choice((0.0, 0.05, 2.0)),
        }
        try:
            return simulate(Scenario(layout, chosen, rng.randrange(1 << 30), **{**fields, **options}))
        except NotManifestError:
            continue


# -- what the recorders hold -------------------------------------------------------------------------------------------
class FlightSet:
    """The dumps of every rank. Made rank by rank on request, so that a large set never lies in memory."""

    def __init__(self, scenario: Scenario, simulation: _Simulation, faults: tuple[Fault, ...], rng: random.Random):
        self.scenario, self._sim = scenario, simulation
        world = scenario.layout.world
        nodes = -(-world // scenario.layout.ranks_per_node)
        self._skew_ns = [int(rng.uniform(-scenario.skew_s, scenario.skew_s) * 1e9) for _ in range(nodes)]
        self._end_ns = max((max(op.issued_ns, op.done_ns or 0) for r in simulation.ranks for op in r.ops), default=0)
        self._cut_ns: int | None = None
        if FaultKind.RUNNING in scenario.faults:
            self._cut_ns = EPOCH_NS + int((self._end_ns - EPOCH_NS) * rng.uniform(0.3, 0.9))
        guilty = {f.rank for f in faults}
        innocents = [r for r in range(world) if r not in guilty]
        rng.shuffle(innocents)
        dropped, truncated = round(scenario.dropped * world), round(scenario.truncated * world)
        gone = {f.rank: ("dead" if f.kind is FaultKind.DEAD else "stopped") for f in faults if f.kind in _WITHOUT_DUMP}
        self._gone = frozenset(gone)
        self._step_ns = 2 * KERNEL_NS * max(len(simulation.program.calls(r, 0)) for r in simulation._some_ranks())
        self._frames: dict[tuple[int, str], list[dict[str, Any]]] = {}
        self.truth = Truth(
            world=world,
            faults=faults,
            blocked=tuple(r for r in range(world) if simulation.head(r) is not None),
            dropped=tuple(sorted(innocents[:dropped])),
            truncated=tuple(sorted(innocents[dropped : dropped + truncated])),
            states=gone if scenario.states_known else {},
        )

    @property
    def taken_at_unix_s(self) -> float:
        """When the dumps were made: a limit after everything stood still, or in the middle of the run."""
        return (self._cut_ns if self._cut_ns is not None else self._end_ns + 600_000_000_000) / 1e9

    def groups(self, rank: int) -> list[dict[str, Any]]:
        """The rank's live groups, as a sidecar has them."""
        found = (self._sim.program.groups[g] for g in self._sim.program.groups_of[rank])
        return [{"name": g.name, "desc": g.desc, "ranks": list(g.ranks), "backend": g.backend} for g in found]

    def dumps(self, rank: int) -> dict[str, dict[str, Any]]:
        """Recorder to dump; empty where the rank left none. Cut files are only cut by ``write``."""
        return {recorder: self._dump(rank, recorder) for recorder in self.dumps_of(rank)}

    def write(self, folder: Path, with_sidecars: bool = True) -> int:
        """``nccl_trace_rank_R``, ``gloo_trace_rank_R``, ``rank_R.flight.json`` and ``truth.json``; bytes written."""
        folder.mkdir(parents=True, exist_ok=True)
        rng = random.Random(self.scenario.seed + 1)
        written = 0
        for rank in range(self.truth.world):
            found = self.dumps(rank)
            for recorder, dump in found.items():
                data = pickle.dumps(dump, protocol=2)
                if rank in self.truth.truncated:
                    data = data[: int(len(data) * rng.uniform(0.3, 0.95))]
                written += (folder / f"{recorder}_trace_rank_{rank}").write_bytes(data)
            if with_sidecars and found:
                (folder / f"rank_{rank}.flight.json").write_text(json.dumps(self.sidecar(rank)))
        (folder / "truth.json").write_text(json.dumps(self.truth.to_json()))
        return written

    def sidecar(self, rank: int) -> dict[str, Any]:
        """What the agent would write beside the dumps; torch's gloo dumps do not say who is in a group."""
        node = rank // self.scenario.layout.ranks_per_node
        return {
            "schema": "steadyrun.flight/1",
            "rank": rank,
            "local_rank": rank % self.scenario.layout.ranks_per_node,
            "world_size": self.truth.world,
            "host": f"node-{node:04d}",
            "groups": self.groups(rank),
            "recorder_state": "on",
            "dumps": [
                {"file": f"{r}_trace_rank_{rank}", "recorder": r, "taken_at_unix_s": self.taken_at_unix_s,
                 "kind": "active" if self.scenario.active_only else "full"}
                for r in self.dumps_of(rank)
            ],
        }  # fmt: skip

    def dumps_of(self, rank: int) -> tuple[str, ...]:
        """Recorders of which the rank left a dump."""
        if rank in self._gone or rank in self.truth.dropped:
            return ()
        if self.scenario.backend == "gloo":
            return ("gloo",)
        return ("nccl", "gloo") if self.scenario.layout.has_gloo else ("nccl",)

    # -- one dump
    def _dump(self, rank: int, recorder: str) -> dict[str, Any]:
        scenario = self.scenario
        program = self._sim.program
        ids: dict[int, int] = {}  # numbered per process in the order of creation
        for g in program.groups_of[rank]:
            if program.groups[g].backend == recorder:
                ids[g] = len(ids)
        entries = self._entries(rank, recorder, ids)
        status = self._status(rank, recorder, ids)
        if scenario.active_only:
            entries = [e for e in entries if e["state"] != "completed"]
        config: dict[str, Any]
        if recorder == "gloo":
            config = {"": {"name": "", "desc": "undefined", "ranks": "[]"}}
        else:
            groups = (program.groups[g] for g in ids)
            config = {g.name: {"name": g.name, "desc": g.desc, "ranks": str(list(g.ranks))} for g in groups}
        dump: dict[str, Any] = {"version": scenario.version, "pg_config": config, "pg_status": status}
        if scenario.version == "2.9":
            dump["nccl_version"] = "2.27.3" if recorder == "nccl" else ""
        elif scenario.version == "2.10":
            dump["comm_lib_version"] = "2.27.3" if recorder == "nccl" else ""
        if entries:
            dump["entries"] = entries
        return dump

    def _past(self, rank: int, recorder: str, room: int) -> Iterator[tuple[_Call, int, int, int]]:
        """(call, collective number, p2p number, issued ns) of whole iterations before the simulated ones: at least
        *room* of them where there are so many."""
        program, history = self._sim.program, self._sim.history
        groups = program.groups
        rounds = [[c for c in (*program.calls(rank, i), *program.saves(i)) if groups[c.group].backend == recorder]
                  for i in range(PERIOD)]  # fmt: skip
        per_period = sum(map(len, rounds))
        first = history - min(history, -(-room // per_period) * PERIOD) if room > 0 and per_period else history
        counts, p2p_counts = self._sim.counts_before(rank, first)
        for i in range(first, history):
            at_ns = EPOCH_NS - (history - i) * self._step_ns
            apart_ns = self._step_ns // (len(rounds[i % PERIOD]) + 1)
            for call in rounds[i % PERIOD]:
                (p2p_counts if call.is_p2p else counts)[call.group] += 1
                at_ns += apart_ns
                yield call, counts[call.group], p2p_counts[call.group], at_ns

    def _entries(self, rank: int, recorder: str, ids: Mapping[int, int]) -> list[dict[str, Any]]:
        program, cut_ns = self._sim.program, self._cut_ns
        ops = [
            op for op in self._sim.ranks[rank].ops
            if program.groups[op.call.group].backend == recorder and (cut_ns is None or op.issued_ns <= cut_ns)
        ]  # fmt: skip
        ops.sort(key=lambda op: op.issued_ns)
        ring = self.scenario.entries if recorder == self.scenario.backend else self.scenario.gloo_entries
        room = max(0, ring - len(ops)) if self.scenario.entries else 0
        past = list(self._past(rank, recorder, room))
        per_period = sum(
            program.groups[c.group].backend == recorder
            for i in range(PERIOD)
            for c in (*program.calls(rank, i), *program.saves(i))
        )
        number = self._sim.history // PERIOD * per_period - len(past)
        entries = []
        skew_ns = self._skew_ns[rank // self.scenario.layout.ranks_per_node]
        make = self._entry_maker(rank, recorder, ids, skew_ns)
        skipped = max(0, len(past) - room)
        for k, (call, seq, p2p, at_ns) in enumerate(past):
            if k >= skipped:
                entries.append(make(number + k, call, seq, p2p, at_ns, at_ns + 100_000, at_ns + 2 * KERNEL_NS))
        number += len(past)
        for k, op in enumerate(ops):
            done_ns = op.done_ns if cut_ns is None or (op.done_ns or 0) <= cut_ns else None
            entries.append(make(number + k, op.call, op.number, op.p2p_number, op.issued_ns, op.start_ns, done_ns))
        return entries[-ring:] if self.scenario.entries else entries

    def _entry_maker(self, rank: int, recorder: str, ids: Mapping[int, int], skew_ns: int) -> Any:
        scenario, groups = self.scenario, self._sim.program.groups
        prefix = scenario.prefix if recorder == "nccl" else "gloo"
        has_threads = scenario.version != "2.4"
        thread_ids = {"python": "140313828580224", "pt_autograd_0": "140309113562880", _SAVE_THREAD: "140308005062400"}

        def make(
            number: int, call: _Call, seq: int, p2p: int, issued_ns: int, start_ns: int | None, done_ns: int | None
        ) -> dict[str, Any]:
            group = groups[call.group]
            name = call.name
            if call.is_p2p:
                name = f"send {call.src}->{call.dst}" if call.mode is _Mode.SEND else f"recv {call.dst}<-{call.src}"
            entry: dict[str, Any] = {"frames": self._frames_of(call)} if scenario.with_frames else {}
            entry["record_id"] = number
            entry["pg_id"] = ids[call.group]
            entry["process_group"] = (group.name, group.desc)
            if has_threads:
                entry["thread_name"] = call.thread
                entry["thread_id"] = thread_ids[call.thread]
            entry["collective_seq_id"] = seq
            entry["p2p_seq_id"] = p2p
            entry["op_id"] = seq + p2p
            entry["profiling_name"] = f"{prefix}:{name}"
            entry["time_created_ns"] = issued_ns + skew_ns
            entry["input_sizes"] = [list(size) for size in call.ins]
            entry["input_dtypes"] = [call.dtype]
            entry["output_sizes"] = [list(size) for size in call.outs]
            entry["output_dtypes"] = [call.dtype]
            is_timed = scenario.with_timing and recorder == "nccl"
            if recorder == "gloo":
                entry["state"] = "scheduled"
            else:
                entry["state"] = (
                    "completed" if done_ns is not None else "started" if start_ns and is_timed else "scheduled"
                )
            entry["time_discovered_started_ns"] = start_ns + skew_ns if start_ns and is_timed else None
            is_seen = done_ns is not None and recorder == "nccl"
            entry["time_discovered_completed_ns"] = (done_ns or 0) + skew_ns if is_seen else None
            entry["retired"] = done_ns is not None
            entry["timeout_ms"] = 600_000
            entry["is_p2p"] = call.is_p2p
            return entry

        return make

    def _frames_of(self, call: _Call) -> list[dict[str, Any]]:
        key = (call.site, call.name)
        found = self._frames.get(key)
        if found is None:
            inner = (
                (call.name, "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3245),
                ("wrapper", "/opt/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", 83),
            )
            stack = (*inner, _SITES[call.site], *_STACK)
            found = self._frames[key] = [{"name": n, "filename": f, "line": line} for n, f, line in stack]
        return found

    def _status(self, rank: int, recorder: str, ids: Mapping[int, int]) -> dict[str, dict[str, int]]:
        """torch's counters; of groups with sends and receives they count those."""
        counts, p2p_counts = self._sim.counts_before(rank, self._sim.history)
        enqueued = {g: p2p_counts[g] or counts[g] for g in ids}
        completed, started = dict(enqueued), dict.fromkeys(ids, -1)
        for op in self._sim.ranks[rank].ops:
            g = op.call.group
            if g not in ids or (self._cut_ns is not None and op.issued_ns > self._cut_ns):
                continue
            number = op.p2p_number if op.call.is_p2p else op.number
            enqueued[g] = max(enqueued[g], number)
            if op.done_ns is not None and (self._cut_ns is None or op.done_ns <= self._cut_ns):
                completed[g] = max(completed[g], number)
            if op.start_ns is not None and self.scenario.with_timing:
                started[g] = max(started[g], number)
        return {
            str(i): {
                "last_enqueued_collective": enqueued[g],
                "last_started_collective": started[g],
                "last_completed_collective": completed[g] or -1,
            }
            for g, i in ids.items()
            if enqueued[g]
        }
