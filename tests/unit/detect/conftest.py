"""Hand-made evidence: one rank in a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from steadyrun.core.board import OpenSection
from steadyrun.core.records import (
    Evidence,
    ExceptionRecord,
    ExitRecord,
    Frame,
    OomRecord,
    ProcessFacts,
    RankEvidence,
    Suspicion,
    ThreadStack,
)
from steadyrun.detect.verdict import Judgement, judge

TORCH = "/env/lib/python3.11/site-packages/torch"
SCRIPT = "/proj/train.py"
STACKS: dict[str, list[tuple[str, int, str]]] = {
    "all_reduce": [
        (f"{TORCH}/distributed/distributed_c10d.py", 3031, "all_reduce"),
        (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
        (SCRIPT, 88, "main"),
        (SCRIPT, 120, "<module>"),
    ],
    "barrier": [
        (f"{TORCH}/distributed/distributed_c10d.py", 4800, "barrier"),
        (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
        (SCRIPT, 95, "main"),
        (SCRIPT, 120, "<module>"),
    ],
    "early_barrier": [
        (f"{TORCH}/distributed/distributed_c10d.py", 4800, "barrier"),
        (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
        (SCRIPT, 85, "main"),
        (SCRIPT, 120, "<module>"),
    ],
    "backward": [
        (f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward"),
        (f"{TORCH}/autograd/__init__.py", 395, "backward"),
        (f"{TORCH}/_tensor.py", 623, "backward"),
        (SCRIPT, 80, "main"),
        (SCRIPT, 120, "<module>"),
    ],
    "own": [("/proj/model.py", 31, "forward"), (SCRIPT, 77, "main"), (SCRIPT, 120, "<module>")],
    "sleep": [("/proj/data.py", 31, "augment"), (SCRIPT, 70, "main"), (SCRIPT, 120, "<module>")],
    "loader": [
        ("/env/lib/python3.11/selectors.py", 415, "select"),
        ("/env/lib/python3.11/multiprocessing/queues.py", 113, "get"),
        (f"{TORCH}/utils/data/dataloader.py", 1284, "_try_get_data"),
        (f"{TORCH}/utils/data/dataloader.py", 1448, "_next_data"),
        (SCRIPT, 70, "main"),
        (SCRIPT, 120, "<module>"),
    ],
    "dataset": [
        ("/proj/data.py", 31, "__getitem__"),
        (f"{TORCH}/utils/data/_utils/fetch.py", 54, "<listcomp>"),
        (f"{TORCH}/utils/data/dataloader.py", 800, "_next_data"),
        (SCRIPT, 70, "main"),
    ],
    "save": [
        (f"{TORCH}/distributed/checkpoint/filesystem.py", 300, "_write_files_from_queue"),
        (f"{TORCH}/distributed/checkpoint/state_dict_saver.py", 170, "save"),
        (SCRIPT, 101, "main"),
    ],
    "rendezvous": [
        (f"{TORCH}/distributed/rendezvous.py", 190, "_create_c10d_store"),
        (f"{TORCH}/distributed/distributed_c10d.py", 1700, "init_process_group"),
        (SCRIPT, 12, "main"),
    ],
    "cuda_sync": [(f"{TORCH}/cuda/__init__.py", 1040, "synchronize"), (SCRIPT, 84, "main")],
    "compile": [
        (f"{TORCH}/_inductor/scheduler.py", 2000, "fuse_nodes"),
        (f"{TORCH}/_dynamo/convert_frame.py", 1200, "_compile"),
        (f"{TORCH}/_dynamo/eval_frame.py", 700, "compile_wrapper"),
        (SCRIPT, 79, "main"),
    ],
    "shutdown": [("/env/lib/python3.11/threading.py", 1541, "_shutdown")],
    "atexit": [("/proj/data.py", 12, "close_all")],
}


def stack(name: str) -> tuple[ThreadStack, ...]:
    return (ThreadStack("0x1", tuple(Frame(*f) for f in STACKS[name]), is_main=True),)


@pytest.fixture
def make_rank() -> Callable[..., RankEvidence]:
    """``make_rank(1, at="all_reduce", state="T", step=4, raised=("ValueError", "bad"), signal=9, ...)``."""

    def make(
        rank: int,
        at: str | None = None,
        *,
        step: int | None = 10,
        state: str = "S",
        wchan: str = "",
        dead_main: bool = False,
        children: tuple[tuple[int, str, str], ...] = (),
        section: str | None = None,
        raised: tuple[str, str] | None = None,
        raised_at: str | None = None,
        traceback_hash: str = "h1",
        at_s: float = 100.0,
        code: int | None = None,
        signal: int | None = None,
        by_us: bool = False,
        oom: bool | str | None = "unknown",
        suspicion: str | None = None,
        accepted: bool = False,
        log: tuple[str, ...] = (),
        **more: Any,
    ) -> RankEvidence:
        ended = code is not None or signal is not None
        fields: dict[str, Any] = {
            "rank": rank,
            "local_rank": rank,
            "node": "a",
            "pid": 1000 + rank,
            "attempt": 0,
            "step": step,
            "step_at_s": 90.0 if step is not None else None,
            "attached": True,
            "sections": (OpenSection(section, 91.0),) if section else (),
            "stacks": stack(at) if at else (),
            "exit": ExitRecord(code, signal, at_s, by_us) if ended else None,
            "process": None if ended else ProcessFacts(state, wchan, 4, 1.0, 1 << 20, dead_main, children),
            "log_tail": log,
            "files": (f"incidents/0001/rank_{rank}.stacks.txt",),
        }
        if raised is not None:
            frames = tuple(Frame(*f) for f in STACKS[raised_at or "own"])
            fields["exception"] = ExceptionRecord(*raised, traceback_hash, frames, step, 5000.0 + at_s)
        if oom != "unknown":
            fields["oom"] = OomRecord(oom, "cgroup memory.events", "as made")  # type: ignore[arg-type]
        if suspicion is not None:
            fields["suspicion"] = Suspicion(rank, suspicion, section, 90.0, 5.0, accepted)
        return RankEvidence(**{**fields, **more})

    return make


@pytest.fixture
def make_evidence() -> Callable[..., Evidence]:
    def make(*ranks: RankEvidence, trigger: str = "hang", world_size: int | None = None, **more: Any) -> Evidence:
        size = world_size if world_size is not None else len(ranks)
        return Evidence("run", 0, size, trigger, 110.0, tuple(ranks), SCRIPT, **more)

    return make


@pytest.fixture
def judged(make_evidence: Callable[..., Evidence]) -> Callable[..., Judgement]:
    """The judgement over some ranks; wall time is CLOCK_MONOTONIC + 5000."""

    def do(*ranks: RankEvidence, **more: Any) -> Judgement:
        return judge(make_evidence(*ranks, **more), wall_minus_mono_s=5000.0)

    return do
