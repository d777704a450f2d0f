"""Logs as torch writes them, line by line."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from steadyrun.postmortem.case import Report
from steadyrun.postmortem.judging import judge_case
from steadyrun.postmortem.opening import open_case


class TorchLog:
    """Lines of a job's ranks in the form that torch 2.6 and later give them; each method adds one."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, rank: int, text: str) -> "TorchLog":
        self.lines.append(f"[rank{rank}]:[E810 03:04:11.061727749 ProcessGroupNCCL.cpp:683] {text}")
        return self

    def plain(self, text: str) -> "TorchLog":
        self.lines += text.splitlines()
        return self

    def caught(
        self,
        rank: int,
        seq: int,
        op: str,
        numel: int,
        place: int = -1,
        limit: int = 600,
        ran: int = 0,
    ) -> "TorchLog":
        """A timeout; *place* is the rank in the group (-1: the rank), *limit* and *ran* (0: the limit) are seconds."""
        inner, took = rank if place < 0 else place, ran or limit
        return self.say(
            rank,
            f"[Rank {inner}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, "
            f"NumelIn={numel}, NumelOut={numel}, Timeout(ms)={limit * 1000}) ran for {took * 1000 + 57} milliseconds "
            "before timing out.",
        )

    def failed(
        self,
        rank: int,
        work: int,
        enqueued: int,
        completed: int,
        group: str = "0(default_pg)",
        place: int = -1,
    ) -> "TorchLog":
        return self.say(
            rank,
            f"[PG ID 0 PG GUID {group} Rank {rank if place < 0 else place}]  failure detected by watchdog at work "
            f"sequence id: {work} PG status: last enqueued work: {enqueued}, last completed work: {completed}",
        )

    def signalled(self, rank: int, by: int, enqueued: int, completed: int) -> "TorchLog":
        return self.say(
            rank,
            f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump signal due to a collective timeout from  "
            f"rank {by} and we will try our best to dump the debug info. Last enqueued NCCL work: {enqueued}, last "
            f"completed NCCL work: {completed}.This is most likely caused by incorrect usages of collectives",
        )


@pytest.fixture
def torch_log() -> TorchLog:
    return TorchLog()


@pytest.fixture
def judged(tmp_path: Path) -> Callable[..., Report]:
    """What is found in a log with these lines."""

    def judge(log: TorchLog | Sequence[str], name: str = "job.log", world_size: int | None = None) -> Report:
        lines = log.lines if isinstance(log, TorchLog) else log
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return judge_case(open_case([path], world_size))

    return judge
