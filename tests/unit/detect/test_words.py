"""Exit statuses, groups, known texts, stacks and the report, in words."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

import pytest

from steadyrun.core.causes import CAUSES, decode_cause, decode_causes, is_collateral
from steadyrun.core.classes import Action, Mode
from steadyrun.core.frames import Doing, activity_of, callsite, is_user_frame, same_place, user_frame
from steadyrun.core.records import Evidence, ExitRecord, Frame, OomRecord, RankEvidence
from steadyrun.detect.exits import describe_exit, signal_name
from steadyrun.detect.grouping import group_ranks, name_ranks, places_sentence
from steadyrun.detect.report import render_incident
from steadyrun.detect.verdict import Judgement

MakeRank = Callable[..., RankEvidence]
SITE = "/env/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("exit_", "words"),
    [
        (ExitRecord(0, None, 0.0), "ended with exit code 0"),
        (ExitRecord(3, None, 0.0), "ended with exit code 3"),
        (ExitRecord(127, None, 0.0), "ended with exit code 127 (the command was not found)"),
        (ExitRecord(137, None, 0.0), "ended with exit code 137 (a shell's word for SIGKILL)"),
        (ExitRecord(None, signal.SIGSEGV, 0.0), "died of a segmentation fault (SIGSEGV)"),
        (ExitRecord(None, signal.SIGABRT, 0.0), "died of an abort (SIGABRT)"),
        (ExitRecord(None, signal.SIGTERM, 0.0), "was ended by SIGTERM, not by steadyrun"),
        (ExitRecord(None, signal.SIGKILL, 0.0, True), "was ended by steadyrun with SIGKILL"),
    ],
)
def test_exit_in_words(exit_: ExitRecord, words: str) -> None:
    assert describe_exit(exit_) == words


@pytest.mark.parametrize(
    ("killed", "words"), [(True, "out-of-memory killer"), (False, "counter unchanged"), (None, "unknown (no right)")]
)
def test_sigkill_in_words(killed: bool | None, words: str) -> None:
    assert words in describe_exit(ExitRecord(None, 9, 0.0), OomRecord(killed, "kernel log", "no right"))


def test_real_time_and_unknown_signals_have_names() -> None:
    assert signal_name(signal.SIGRTMIN + 3) == "SIGRTMIN+3"
    assert signal_name(200) == "signal 200"


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ([1], "rank 1"),
        ([3, 0], "ranks 0 and 3"),
        ([0, 1, 2, 5], "ranks 0-2 and 5"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 2, 4, 6, 8, 10, 12, 14], "ranks 0, 2, 4, 6, 8, 10 and 2 more ranges"),
    ],
)
def test_ranks_in_words(ranks: list[int], name: str) -> None:
    assert name_ranks(ranks) == name


def test_groups_come_largest_first_and_differ_by_section(make_rank: MakeRank) -> None:
    ranks = [make_rank(r, "own", section="step") for r in (1, 2)] + [make_rank(0, "own", section="eval")]
    groups = group_ranks(ranks, "/proj/train.py")
    assert [(g.ranks, g.place.section) for g in groups] == [((1, 2), "step"), ((0,), "eval")]


def test_sentence_of_places(make_rank: MakeRank) -> None:
    ranks = [make_rank(r, "all_reduce") for r in (0, 2, 3)] + [make_rank(1, "loader", section="data")]
    text = places_sentence(group_ranks(ranks, "/proj/train.py"), 4)
    assert text == (
        "3 of 4 ranks wait in all_reduce called at train.py:88; "
        "rank 1 is in the data loader (_try_get_data) at train.py:70 (section data)"
    )


# -- stacks ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("file", "is_user"),
    [
        ("/proj/train.py", True),
        ("/proj/lib/model.py", True),
        ("/other/place/tools.py", True),
        ("/proj/.venv/lib/python3.12/site-packages/numpy/x.py", False),
        ("/usr/lib/python3.10/threading.py", False),
        ("/usr/lib/python3/dist-packages/x.py", False),
        ("/src/pytorch/torch/nn/modules/module.py", False),
        ("/src/agent/steadyrun/testing/faults.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("<string>", False),
        ("/home/u/lib/python3.11/proj/train.py", False),
    ],
)
def test_whose_frame_it_is(file: str, is_user: bool) -> None:
    assert is_user_frame(Frame(file, 1, "f"), "/proj/train.py") is is_user


def test_scripts_own_folder_is_the_users_even_below_a_library_path() -> None:
    assert is_user_frame(Frame("/home/u/lib/python3.11/proj/m.py", 1, "f"), "/home/u/lib/python3.11/proj/train.py")


def test_without_a_user_frame_the_innermost_counts() -> None:
    frames = (Frame("/usr/lib/python3.10/threading.py", 5, "wait"),)
    assert user_frame(frames) == frames[0]
    importing = (Frame("<frozen importlib._bootstrap>", 690, "_load_unlocked"), *frames)
    assert user_frame(importing) == frames[0]
    assert user_frame(importing[:1]) == importing[0]
    assert user_frame(()) is None
    assert callsite(None) is None


def frames(*rows: str) -> tuple[Frame, ...]:
    """``file function``; torch/ and std/ stand for their folders."""
    out = []
    for i, row in enumerate(rows):
        file, function = row.split()
        file = file.replace("torch/", f"{SITE}/torch/", 1) if file.startswith("torch/") else file
        file = file.replace("std/", "/usr/lib/python3.11/", 1) if file.startswith("std/") else file
        out.append(Frame(file, i + 1, function))
    return tuple(out)


@pytest.mark.parametrize(
    ("rows", "doing", "op"),
    [
        (("torch/distributed/distributed_c10d.py barrier", "/p/t.py main"), Doing.COLLECTIVE, "barrier"),
        (
            ("torch/distributed/distributed_c10d.py all_gather_object", "/p/t.py main"),
            Doing.COLLECTIVE,
            "all_gather_object",
        ),
        (("torch/distributed/utils.py _sync_module_states", "/p/t.py main"), Doing.COLLECTIVE, "_sync_module_states"),
        (
            ("torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py foreach_all_gather", "/p/t.py main"),
            Doing.COLLECTIVE,
            "foreach_all_gather",
        ),
        (
            (
                "torch/distributed/distributed_c10d.py gather_object",
                "torch/distributed/checkpoint/utils.py reduce_scatter",
                "torch/distributed/checkpoint/state_dict_saver.py save",
                "/p/t.py main",
            ),
            Doing.COLLECTIVE,
            "gather_object",
        ),
        (("torch/distributed/checkpoint/filesystem.py write_data", "/p/t.py main"), Doing.STORAGE, "write_data"),
        (("torch/serialization.py save", "/p/t.py main"), Doing.STORAGE, "save"),
        (
            (
                "torch/distributed/distributed_c10d.py barrier",
                "torch/distributed/distributed_c10d.py init_process_group",
            ),
            Doing.JOINING,
            "init_process_group",
        ),
        (("torch/distributed/rendezvous.py _env_rendezvous_handler",), Doing.JOINING, "_env_rendezvous_handler"),
        (("torch/distributed/distributed_c10d.py destroy_process_group",), Doing.TEARDOWN, "destroy_process_group"),
        (("std/threading.py _shutdown",), Doing.TEARDOWN, "_shutdown"),
        (("torch/autograd/graph.py _engine_run_backward", "torch/_tensor.py backward"), Doing.BACKWARD, "backward"),
        (("torch/cuda/streams.py synchronize", "/p/t.py main"), Doing.DEVICE, "synchronize"),
        (("std/queue.py get", "torch/utils/data/dataloader.py _try_get_data"), Doing.INPUT, "_try_get_data"),
        (("/p/data.py __getitem__", "torch/utils/data/_utils/fetch.py fetch", "/p/t.py main"), Doing.INPUT, "fetch"),
        (("/p/t.py main",), Doing.OWN_WORK, ""),
        (("torch/nn/modules/linear.py forward", "torch/nn/parallel/distributed.py forward"), Doing.OWN_WORK, ""),
        (
            ("torch/_inductor/scheduler.py fuse", "torch/_dynamo/convert_frame.py _compile", "/p/t.py main"),
            Doing.COMPILING,
            "compile",
        ),
        (
            ("torch/_inductor/output_code.py __call__", "torch/_dynamo/eval_frame.py compile_wrapper", "/p/t.py main"),
            Doing.OWN_WORK,
            "",
        ),
        (
            (
                "torch/_dynamo/variables/tensor.py <module>",
                "<frozen-importlib._bootstrap> _find_and_load",
                "torch/_dynamo/convert_frame.py <module>",
                "<frozen-importlib._bootstrap> _find_and_load",
                "torch/optim/optimizer.py step",
                "/p/t.py main",
            ),
            Doing.OWN_WORK,
            "",
        ),
        ((), Doing.UNKNOWN, ""),
    ],
)
def test_what_a_stack_is_doing(rows: tuple[str, ...], doing: Doing, op: str) -> None:
    stack = tuple(replace(f, file=f.file.replace("<frozen-", "<frozen ")) for f in frames(*rows))
    activity = activity_of(stack, "/p/t.py")
    assert (activity.doing, activity.op) == (doing, op)


def test_same_place_ignores_the_innermost_line_only() -> None:
    a = (Frame("a.py", 1, "f"), Frame("b.py", 9, "g"))
    assert same_place([a, (Frame("a.py", 2, "f"), Frame("b.py", 9, "g"))]) is True
    assert same_place([a, (Frame("a.py", 1, "f"), Frame("b.py", 8, "g"))]) is False
    assert same_place([a, (Frame("a.py", 1, "h"), Frame("b.py", 9, "g"))]) is False
    assert same_place([a]) is None
    assert same_place([a, ()]) is None


# -- known texts -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB", "device_oom"),
        ("RuntimeError: CUDA error: out of memory", "device_oom"),
        ("MemoryError", "host_oom"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory", "host_oom"),
        ("RuntimeError: DataLoader worker (pid 91) is killed by signal: Bus error. It is possible", "shm_full"),
        ("RuntimeError: DataLoader worker (pid(s) 91, 92) exited unexpectedly", "loader_worker_died"),
        ("OSError: [Errno 28] No space left on device: '/ckpt/x'", "disk_full"),
        ("RuntimeError: unable to write to file </torch_1> No space left on device /dev/shm/torch_1", "shm_full"),
        ("OSError: [Errno 116] Stale file handle", "storage_error"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "device_ecc"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "device_ecc"),
        ("RuntimeError: CUDA error: device-side assert triggered", "device_assert"),
        ("The server socket has failed to bind. EADDRINUSE", "address_in_use"),
        ("bind: address already in use", "address_in_use"),
        ("OSError: [Errno 98] Address already in use", "address_in_use"),
        ("ModuleNotFoundError: No module named 'apex'", "module_missing"),
        ("ImportError: libcudnn.so.9: cannot open shared object file: No such file", "library_missing"),
        ("python: can't open file '/x/train.py': [Errno 2] No such file or directory", "script_missing"),
        ("op.preamble.length <= op.nbytes. 8 vs 4", "gloo_size_mismatch"),
        ("Detected mismatch between collectives on ranks. Rank 2 is running", "fingerprint_mismatch"),
        ("RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.1]:3", "peer_gone"),
        ("socketProgress: Connection closed by remote peer node7<3456>", "peer_gone"),
        ("torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed", "nccl_remote"),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", "collective_timeout"),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation to complete", "collective_timeout"),
        ("torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 1/2", "store_gone"),
        ("ncclSystemError: System call (e.g. socket, malloc) failed", "nccl_error"),
    ],
)
def test_known_text(text: str, name: str) -> None:
    cause = decode_cause(text)
    assert cause is not None
    assert cause.name == name


@pytest.mark.parametrize("text", ["", "ValueError: bad batch", "step 100 loss 2.3", "KeyError: 'store'"])
def test_ordinary_text_is_no_known_cause(text: str) -> None:
    assert decode_cause(text) is None


def test_collateral_gives_way_to_a_heavier_cause_in_one_text() -> None:
    assert is_collateral("Connection reset by peer")
    assert not is_collateral("CUDA out of memory; later: Connection reset by peer")
    found = decode_causes(
        ["Connection reset by peer", "torch.OutOfMemoryError: CUDA out of memory", "Connection refused"]
    )
    assert [(c.name, line) for c, line in found] == [
        ("device_oom", "torch.OutOfMemoryError: CUDA out of memory"),
        ("peer_gone", "Connection reset by peer"),
    ]


def test_names_of_causes_are_unique_and_collateral_ones_claim_no_fault() -> None:
    assert len({c.name for c in CAUSES}) == len(CAUSES)
    assert all(c.cls is None or c.name == "keyboard" for c in CAUSES if c.collateral)


# -- the report --------------------------------------------------------------------------------------------------------
def verdict_over(
    judged: Callable[..., Judgement],
    make_evidence: Callable[..., Evidence],
    *ranks: RankEvidence,
    action: Action = Action.RESTART,
    trigger: str = "exit",
) -> str:
    evidence = make_evidence(*ranks, trigger=trigger)
    verdict = judged(*ranks, trigger=trigger).verdict(
        evidence,
        incident=1,
        mode=Mode.ACT,
        action=action,
        reason="restart 1 of 3",
        detected_at_unix_s=1_700_000_000.0,
        detection_delay_s=0.25,
    )
    return render_incident(verdict, evidence, "run/incidents/0001")


def test_block_says_who_why_last_words_and_what_follows(
    judged: Callable[..., Judgement], make_evidence: Callable[..., Evidence], make_rank: MakeRank
) -> None:
    log = (*(f"line {i}" for i in range(50)), "torch.OutOfMemoryError: CUDA out of memory.")
    raised = ("torch.OutOfMemoryError", "CUDA out of memory.")
    text = verdict_over(judged, make_evidence, make_rank(0, "backward"), make_rank(1, raised=raised, code=1, log=log))
    lines = text.splitlines()
    assert len(lines) <= 20
    assert all(line.startswith("steadyrun: ") for line in lines)
    assert "incident 1, attempt 0: rank 1 on a, noticed after 0.2 s" in lines[0]
    assert "out_of_memory: rank 1 raised torch.OutOfMemoryError" in lines[1]
    assert "not to blame: rank 0" in text
    assert "| torch.OutOfMemoryError: CUDA out of memory." in text
    assert "that means: the device is out of memory; try:" in text
    assert lines[-1].endswith("restarting as attempt 1 (restart 1 of 3); details: run/incidents/0001")


def test_block_of_a_hang_shows_no_log(
    judged: Callable[..., Judgement], make_evidence: Callable[..., Evidence], make_rank: MakeRank
) -> None:
    text = verdict_over(
        judged,
        make_evidence,
        make_rank(0, "all_reduce"),
        make_rank(1, "sleep", log=("step 3",)),
        action=Action.REPORT,
        trigger="hang",
    )
    assert "rank 1 is stuck at data.py:31" in text
    assert "step 3" not in text
    assert "nothing is done" in text
