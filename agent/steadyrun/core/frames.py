"""What a Python stack says about its thread: where in the user's code it is, and what it waits for.

Tables and pure functions over stacks (most recent call first). File names are compared as text and never opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from steadyrun.core.records import Frame, ThreadStack

__all__ = [
    "Activity",
    "Doing",
    "activity_of",
    "callsite",
    "is_user_frame",
    "main_stack",
    "same_place",
    "user_frame",
]


class Doing(str, Enum):
    """What the innermost frames of a thread do."""

    COLLECTIVE = "collective"  # waits for other ranks
    BACKWARD = "backward"  # in autograd: computes, or waits for the other ranks' gradients
    JOINING = "joining"  # rendezvous, process group set-up, store
    COMPILING = "compiling"
    INPUT = "input"  # waits for or reads training data
    STORAGE = "storage"  # writes or reads a checkpoint
    DEVICE = "device"  # waits for the accelerator
    TEARDOWN = "teardown"  # interpreter's or process group's end
    OWN_WORK = "own_work"  # anything else
    UNKNOWN = "unknown"  # no stack


@dataclass(frozen=True, slots=True)
class Activity:
    """What a thread does, the operation's name (``all_reduce``) and the frame that says so (None: no table row did)."""

    doing: Doing
    op: str = ""
    frame: Frame | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    doing: Doing
    file: re.Pattern[str]
    function: re.Pattern[str]


def _row(doing: Doing, file: str, function: str = r".*") -> _Row:
    return _Row(doing, re.compile(r"(^|/)(" + file + r")"), re.compile(r"(.*\.)?(" + function + r")\Z"))


_COLLECTIVES: Final = (
    r"all_reduce\w*|barrier|monitored_barrier|broadcast\w*|all_gather\w*|_all_gather_base|reduce|reduce_scatter\w*"
    r"|_reduce_scatter_base|gather\w*|scatter\w*|all_to_all\w*|send\w*|recv\w*|isend|irecv|batch_isend_irecv"
    r"|_object_to_tensor|_coalescing_manager"
)

# First match wins, frame by frame from the innermost to the first user frame.
_ROWS: Final[tuple[_Row, ...]] = (
    _row(Doing.TEARDOWN, r"torch/distributed/distributed_c10d\.py", r"destroy_process_group|_shutdown_backend"),
    _row(Doing.JOINING, r"torch/distributed/rendezvous\.py"),
    _row(
        Doing.JOINING,
        r"torch/distributed/distributed_c10d\.py",
        r"init_process_group|_new_process_group_helper|new_group\w*|_new_group_with_tag|_store_based_barrier|split_group",
    ),
    _row(Doing.JOINING, r"torch/distributed/elastic/utils/store\.py"),
    _row(Doing.JOINING, r"torch/distributed/device_mesh\.py", r"init_device_mesh|_init_process_groups|__init__"),
    _row(Doing.COLLECTIVE, r"torch/distributed/distributed_c10d\.py", _COLLECTIVES),
    _row(Doing.COLLECTIVE, r"torch/distributed/_functional_collectives\.py"),
    _row(Doing.COLLECTIVE, r"torch/distributed/(nn/functional|_symmetric_memory/\w+|utils)\.py"),
    _row(Doing.COLLECTIVE, r"torch/distributed/fsdp/"),
    _row(Doing.COLLECTIVE, r"torch/distributed/algorithms/"),
    _row(Doing.COLLECTIVE, r"torch/nn/parallel/distributed\.py", r"(?!forward$|_run_ddp_forward$|__\w+__$).*"),
    _row(Doing.COLLECTIVE, r"torch/distributed/(_tensor|tensor)/", r"redistribute\w*|full_tensor|wait|distribute_\w+"),
    _row(Doing.STORAGE, r"torch/distributed/checkpoint/"),
    _row(
        Doing.STORAGE, r"torch/serialization\.py", r"save|load|_save|_legacy_save|_load|_legacy_load|__exit__|__enter__"
    ),
    _row(Doing.INPUT, r"torch/utils/data/"),
    _row(Doing.DEVICE, r"torch/(cuda|xpu|npu|accelerator)/\w+\.py", r"synchronize|wait|wait_event|wait_stream|query"),
    _row(Doing.BACKWARD, r"torch/autograd/(graph|__init__)\.py", r"_engine_run_backward|backward|grad"),
    _row(Doing.BACKWARD, r"torch/_tensor\.py", r"backward"),
    _row(Doing.TEARDOWN, r"threading\.py", r"_shutdown|_wait_for_tstate_lock_at_exit"),
    _row(Doing.TEARDOWN, r"concurrent/futures/(thread|process)\.py", r"_python_exit"),
    _row(Doing.TEARDOWN, r"multiprocessing/util\.py", r"_exit_function|_run_finalizers"),
)

# Runs of a compiled model pass through eval_frame.py, output_code.py and the runtime wrappers on every step: not these.
_COMPILING: Final = re.compile(
    r"(^|/)("
    r"torch/_dynamo/(convert_frame|symbolic_convert|output_graph|bytecode_transformation|variables/|repro/|backends/)"
    r"|torch/_inductor/(compile_fx|graph|scheduler|lowering|codegen/|async_compile|compile_worker|autotune_process"
    r"|select_algorithm|fx_passes/|cpp_builder|codecache|subgraph_lowering|ir)"
    r"|torch/_functorch/(aot_autograd\.py|_aot_autograd/(graph_compile|jit_compile_runtime_wrappers|graph_capture))"
    r"|torch/export/|torch/fx/experimental/proxy_tensor\.py"
    r"|triton/(compiler|backends)/)"
)
_COMPILING_FUNCTION: Final = re.compile(
    r"(.*\.)?(autotune_to_one_config|benchmark_all_configs|_?precompile\w*|_compile|_do_bench|make_launcher)\Z"
)

_LIBRARY: Final = re.compile(r"(^|/)(site-packages|dist-packages)/")
_STANDARD: Final = re.compile(r"(^|/)lib(64)?/python3(\.\d+)?t?/|/python3\d+\.zip/")
_OURS: Final = re.compile(
    r"(^|/)steadyrun/(core|watch|node|detect|testing|collectors|postmortem|launcher|ctl|checkpoint)/"
)
_TORCH: Final = re.compile(
    r"(^|/)torch/(_\w+|autograd|cuda|distributed|fx|nn|optim|utils|functional|serialization)[./]"
)
_SYNTHETIC: Final = re.compile(r"\A<.*>\Z")


def main_stack(stacks: Sequence[ThreadStack]) -> ThreadStack | None:
    """The main thread's stack, or None when it was not captured."""
    return next((s for s in stacks if s.is_main), None)


def is_user_frame(frame: Frame, script: str = "") -> bool:
    """The frame is in the user's own code.

    Not in an installed package, torch, the standard library, steadyrun or generated code. *script* is the entry point:
    what lies in or below its folder is the user's, an installed package there (a virtual environment) excepted.
    """
    file = frame.file
    if _SYNTHETIC.match(file) or _LIBRARY.search(file) or _OURS.search(file):
        return False
    folder = script.rpartition("/")[0]
    if folder and file.startswith(folder + "/"):
        return True
    return not (_STANDARD.search(file) or _TORCH.search(file))


def user_frame(frames: Sequence[Frame], script: str = "") -> Frame | None:
    """The innermost frame of the user's code; else the innermost one in a file; None for an empty stack."""
    in_file = next((f for f in frames if not _SYNTHETIC.match(f.file)), frames[0] if frames else None)
    return next((f for f in frames if is_user_frame(f, script)), in_file)


def callsite(frame: Frame | None, script: str = "") -> str | None:
    """``train.py:88``: the frame's place, relative to the script's folder where it is below it."""
    if frame is None:
        return None
    folder = script.rpartition("/")[0]
    file = frame.file
    if folder and file.startswith(folder + "/"):
        file = file[len(folder) + 1 :]
    return f"{file}:{frame.line}"


def activity_of(frames: Sequence[Frame], script: str = "") -> Activity:
    """What the thread does, from its stack alone. Compilation counts wherever in the stack it is."""
    if not frames:
        return Activity(Doing.UNKNOWN)
    compiling = _compiling_frame(frames, script)
    if compiling is not None:
        return Activity(Doing.COMPILING, "compile", compiling)
    best: Activity | None = None
    for frame in frames:
        if is_user_frame(frame, script):
            break
        doing = _doing(frame)
        # Outwards the name becomes the one the user called (of a data loader the innermost says more); waiting inside a
        # checkpoint save stays waiting, while a barrier inside init_process_group is part of joining.
        renamed = best is not None and doing is best.doing and doing is not Doing.INPUT
        if doing is not None and (best is None or renamed or (best.doing, doing) in _OUTER_WINS):
            best = Activity(doing, _op(frame), frame)
    if best is not None:
        return best
    for frame in frames:  # user code called by the data loader, by a checkpoint save or by a collective (a backend)
        doing = _doing(frame)
        if doing in (Doing.INPUT, Doing.STORAGE, Doing.COLLECTIVE):
            return Activity(doing, _op(frame), frame)
    return Activity(Doing.OWN_WORK)


_OUTER_WINS: Final = frozenset(
    {
        (Doing.COLLECTIVE, Doing.JOINING),
        (Doing.COLLECTIVE, Doing.TEARDOWN),
        (Doing.DEVICE, Doing.COLLECTIVE),
    }
)


def _doing(frame: Frame) -> Doing | None:
    return next((r.doing for r in _ROWS if r.file.search(frame.file) and r.function.match(frame.function)), None)


def _op(frame: Frame) -> str:
    name = frame.function.rpartition(".")[2]
    return {"_engine_run_backward": "backward"}.get(name, name)


def _compiling_frame(frames: Sequence[Frame], script: str) -> Frame | None:
    """A frame of the compiler at work. Its modules being imported (an optimizer's first step does that) is not work."""
    found: Frame | None = None
    for frame in frames:
        if frame.file.startswith("<frozen importlib"):
            found = None
        elif is_user_frame(frame, script) and found is not None:
            break
        elif found is None and _is_compiling(frame):
            found = frame
    return found


def _is_compiling(frame: Frame) -> bool:
    if _COMPILING.search(frame.file):
        return True
    in_triton = "/triton/" in frame.file or "torch/_inductor/runtime/" in frame.file
    return in_triton and _COMPILING_FUNCTION.match(frame.function) is not None


def same_place(samples: Iterable[Sequence[Frame]]) -> bool | None:
    """All samples show one stack, but for the line number of the innermost frame; None with fewer than two samples."""
    keys = [_place(frames) for frames in samples]
    if len(keys) < 2 or any(not k for k in keys):
        return None
    return all(k == keys[0] for k in keys)


def _place(frames: Sequence[Frame]) -> tuple[tuple[str, int, str], ...]:
    return tuple((f.file, 0 if i == 0 else f.line, f.function) for i, f in enumerate(frames))
