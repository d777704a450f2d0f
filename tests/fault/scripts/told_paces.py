"""Ranks without torch that tell given step timings through the board, as the in-rank side does for a training script.

Arguments: steps, seconds per step. What is told is that of steps of 0.2 s, however long they take here. A rank saves
its step every 20 steps and goes on from there in the next attempt; with ``$CHECKPOINTS``, a folder, steadyrun's
checkpointer does that, whose period is far longer than the test. Who is slow stands in ``$EVENTS/slow.json``, which a
test may replace at any time: ``{"rank": {"3": 0.8}, "agent": {"4711": 0.8}}``, shares by which the forward of a rank,
or of all ranks of an agent (by its pid), takes longer.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

from steadyrun import watch
from steadyrun.core.layout import TIMING_FIELDS
from steadyrun.core.timing import TAG_FORWARD_SEEN
from steadyrun.watch.slot import Slot, timing_writer

RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
EVENTS = Path(os.environ["EVENTS"])
STATE = EVENTS / f"state_{RANK}"
STEP_S, FORWARD_S, BACKWARD_S, OPTIMIZER_S, DATA_S = 0.2, 0.05, 0.05, 0.01, 0.001
SAVE_EVERY = 20
NAN = float("nan")


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": ATTEMPT, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    fd = os.open(EVENTS / f"rank_{RANK}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (json.dumps(record) + "\n").encode())
    os.close(fd)


def slowness():
    try:
        told = json.loads((EVENTS / "slow.json").read_text())
    except FileNotFoundError:
        return 0.0
    return told.get("rank", {}).get(str(RANK), 0.0) + told.get("agent", {}).get(str(os.getppid()), 0.0)


def saved_step():
    try:
        return int(STATE.read_text())
    except FileNotFoundError:
        return -1


def save(step):
    with watch.section("checkpointing"):
        new = STATE.with_suffix(f".{os.getpid()}")
        new.write_text(str(step))
        new.replace(STATE)


def checkpointer():
    import torch

    torch.manual_seed(RANK)
    return watch.checkpointer(os.environ["CHECKPOINTS"], model=torch.nn.Linear(4, 4), every=1_000_000)


def main():
    steps, pace_s = int(sys.argv[1]), float(sys.argv[2])
    setup = watch._setup
    slot = Slot(setup.board, setup.slot)
    put_timing = timing_writer(slot.words, slot.base)
    noise = random.Random(RANK)
    ckpt = checkpointer() if "CHECKPOINTS" in os.environ else None
    first, slow = saved_step() + 1 if ckpt is None else ckpt.resume(), 0.0
    tell("start", first=first)
    for step in range(first, steps):
        began_s = time.monotonic()
        before, slow = slow, slowness()
        if slow != before:
            tell("pace", step=step, slow=slow)
        watch.step(step)
        shares = (FORWARD_S * (1 + slow), BACKWARD_S, OPTIMIZER_S, DATA_S)
        names = ("forward_s", "backward_s", "optimizer_s", "data_s")
        told = {name: share * noise.gauss(1, 0.01) for name, share in zip(names, shares, strict=True)}
        busy_s = sum(told.values())
        told |= {"step": step, "at_s": time.monotonic(), "wall_s": STEP_S, "busy_s": busy_s, "cpu_s": busy_s}
        told |= {"checkpoint_s": 0.0, "wait_s": STEP_S - busy_s, "flags": TAG_FORWARD_SEEN, "starved_s": 0.0}
        put_timing(*(told.get(name, NAN) for name in TIMING_FIELDS))
        if ckpt is not None and ckpt.step(step) is not None:
            tell("saved", step=step)
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            if ckpt is None:
                save(step)
            tell("step", step=step)
        time.sleep(max(pace_s - (time.monotonic() - began_s), 0.0))
    tell("done")


if __name__ == "__main__":
    main()
