"""What samples of a late rank say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steadyrun.collectors.probe import ProbeRunner, RankSample, read_samples
from steadyrun.collectors.process import ProcessSample
from steadyrun.core.records import Frame, ThreadStack

TORCH = "/env/lib/python3.11/site-packages/torch"
WAIT = (Frame(f"{TORCH}/distributed/distributed_c10d.py", 9, "all_reduce"), Frame("/p/t.py", 88, "main"))
BACKWARD = (Frame(f"{TORCH}/autograd/graph.py", 9, "_engine_run_backward"), Frame("/p/t.py", 80, "main"))
OWN = (Frame("/p/t.py", 70, "main"),)
COMPILE = (Frame(f"{TORCH}/_dynamo/convert_frame.py", 9, "_compile"), Frame("/p/t.py", 79, "main"))


def samples(
    stack: tuple[Frame, ...] | None, cpu_share: float = 0.0, state: str = "S", io_step: int = 0, n: int = 4
) -> list[RankSample]:
    """One a second; a dump takes 0.1 s and burns 0.1 s of CPU and writes 500 bytes, which must not count."""
    out = []
    cpu_s, io = 5.0, 1000
    for i in range(n):
        before = ProcessSample(state, cpu_s, io)
        cpu_s, io = cpu_s + 0.1, io + 500
        after = ProcessSample(state, cpu_s, io)
        stacks = (ThreadStack("0x1", stack, True),) if stack is not None else ()
        out.append(RankSample(i * 1.1, before, i * 1.1 + 0.1, after, stacks))
        cpu_s, io = cpu_s + cpu_share, io + io_step
    return out


def test_idle_rank_in_a_collective() -> None:
    reading = read_samples(3, samples(WAIT))
    assert (reading.rank, reading.state, reading.cpu_share) == (3, "S", 0.0)
    assert reading.stack_unchanged is True
    assert reading.in_collective
    assert not reading.io_moved
    assert not reading.compiling
    assert reading.window_s == pytest.approx(3.4)


@pytest.mark.parametrize(("cpu_share", "waits"), [(0.02, True), (0.9, False)])
def test_backward_waits_only_while_it_is_idle(cpu_share: float, waits: bool) -> None:
    reading = read_samples(0, samples(BACKWARD, cpu_share))
    assert reading.cpu_share == pytest.approx(cpu_share, abs=0.01)
    assert reading.in_collective is waits


def test_compiling_rank() -> None:
    assert read_samples(0, samples(COMPILE, 1.0)).compiling


def test_moved_bytes_are_seen_apart_from_the_dumps() -> None:
    assert read_samples(0, samples(OWN, io_step=1)).io_moved


def test_work_of_child_processes_is_counted_apart() -> None:
    looks = [replace(look, children_cpu_s={7: 3.0 + i, 100 + i: 9.0}) for i, look in enumerate(samples(OWN))]
    reading = read_samples(0, looks)
    assert reading.children_cpu_share == pytest.approx(1.0)  # those that come and go cannot be compared
    assert reading.cpu_share == 0.0


def test_innermost_line_may_move() -> None:
    looks = samples(OWN)
    moved = (Frame("/p/t.py", 71, "main"),)
    looks[2] = RankSample(
        looks[2].before_at_s, looks[2].before, looks[2].after_at_s, looks[2].after, (ThreadStack("0x1", moved, True),)
    )
    assert read_samples(0, looks).stack_unchanged is True


def test_one_sample_without_a_stack_leaves_it_unknown() -> None:
    looks = samples(OWN)
    looks[1] = RankSample(looks[1].before_at_s, looks[1].before, looks[1].after_at_s, looks[1].after)
    assert read_samples(0, looks).stack_unchanged is None


def test_rank_without_stacks_or_process() -> None:
    assert read_samples(0, samples(None, state="T")).stack_unchanged is None
    gone = [RankSample(0.0, None, 0.1, None), RankSample(1.0, None, 1.1, None)]
    assert read_samples(0, gone).state == "X"
    assert read_samples(0, []).state == "X"


def test_one_sample_is_too_few() -> None:
    with pytest.raises(ValueError, match="samples must be at least 2"):
        ProbeRunner({}, {}, 60, 1.0, samples=1)
