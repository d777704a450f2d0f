"""The job of restart.py: a small DDP model, about 20 steps a second, that writes down what it does and when.

Reads from the environment: BENCH_EVENTS, BENCH_CONTROL (a folder: a file ``hang`` there holds the pid of the rank that
must hang, a file ``finish`` ends the job), BENCH_PG_TIMEOUT_S (a process-group timeout from the first step on: how one
detects hangs without a watchdog) and BENCH_CLIENT (``nvrx``: report sections to NVRx's monitor, or it sees no hang).
"""

import datetime
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

RANK = int(os.environ["RANK"])
EVENTS = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def tell(kind: str, **more: object) -> None:
    record = {"kind": kind, "at_s": time.monotonic(), "rank": RANK, "pid": os.getpid(), **more}
    os.write(EVENTS, (json.dumps(record) + "\n").encode())


tell("start")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

tell("imported")


def nvrx_client() -> Any:
    """The client of NVRx's monitor where it is asked for, else None."""
    if os.environ.get("BENCH_CLIENT") != "nvrx":
        return None
    client = importlib.import_module("nvidia_resiliency_ext.fault_tolerance").RankMonitorClient()
    client.init_workload_monitoring()
    return client


def main() -> None:
    control = Path(os.environ["BENCH_CONTROL"])
    timeout_s = float(os.environ.get("BENCH_PG_TIMEOUT_S", "0"))
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if os.environ.get("BENCH_DEVICE") == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    client = nvrx_client()
    tell("joined")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 0
    finish = False
    while not finish:
        if client is not None:
            client.start_section("step")
        if (control / "hang").exists() and (control / "hang").read_text() == str(os.getpid()):
            tell("fault", step=step)
            while True:
                time.sleep(3600)
        asked = torch.tensor([float((control / "finish").exists())], device=device)
        dist.all_reduce(asked)  # so that all ranks leave after the same step
        finish = bool(asked)
        model(torch.randn(8, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        time.sleep(0.05)
        if client is not None:
            client.end_section("step")
        if step < 3 or step % 10 == 0:
            tell("step", step=step)
        if step == 0 and timeout_s:
            # Not from the start: ranks reach the first step seconds apart, since the first optimizer imports much.
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), dist.group.WORLD)
        step += 1
    tell("done", step=step)
    if client is not None:
        client.shutdown_workload_monitoring()
    dist.destroy_process_group()


main()
