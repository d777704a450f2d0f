"""The rank of detection_delay.py: each attempt trains a little, then one rank hangs, each time in another way.

``sleep``, ``busy`` (a Python loop) and ``stop`` (SIGSTOP) hang inside the section ``work``; ``gap`` sleeps outside
every section after a step. What the limit counts from is written down first.
"""

import json
import os
import random
import signal
import time

from steadyrun import watch

RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
KINDS, HANGS = os.environ["BENCH_KINDS"].split(","), int(os.environ["BENCH_HANGS"])
KIND = KINDS[ATTEMPT % len(KINDS)] if ATTEMPT < HANGS else ""
DRAW = random.Random(f"{os.environ['BENCH_SEED']}/{ATTEMPT}")  # the same on all ranks
VICTIM = DRAW.randrange(int(os.environ["WORLD_SIZE"]))
STEPS = DRAW.randrange(10, 30)
FD = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def tell_hang() -> None:
    record = {
        "kind": "hang",
        "at_s": time.monotonic(),
        "rank": RANK,
        "attempt": ATTEMPT,
        "how": KIND,
        "pid": os.getpid(),
    }
    os.write(FD, (json.dumps(record) + "\n").encode())


def hang() -> None:
    if KIND == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while KIND == "busy":
        pass
    while True:
        time.sleep(3600)


def main() -> None:
    step = 0
    while KIND or step < STEPS:
        time.sleep(DRAW.uniform(0.02, 0.06))  # so that a hang meets the agent in any phase of its rhythm
        watch.step(step)
        is_due = KIND and RANK == VICTIM and step == STEPS
        if is_due and KIND == "gap":
            tell_hang()
            hang()
        if is_due:
            tell_hang()
        with watch.section("work"):
            if is_due:
                hang()
            time.sleep(0.001)
        step += 1


main()
