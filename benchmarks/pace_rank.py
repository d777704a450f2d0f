"""A simulated rank: no torch, a section and a step 20 times a second. Ends when ``$BENCH_CONTROL/finish`` is there."""

import json
import os
import time

from steadyrun import watch

PERIOD_S = 1.0 / float(os.environ["BENCH_STEPS_PER_S"])
FINISH = os.path.join(os.environ["BENCH_CONTROL"], "finish")

fd = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
os.write(fd, (json.dumps({"kind": "start", "at_s": time.monotonic(), "pid": os.getpid()}) + "\n").encode())
step = 0
next_s = time.monotonic()
while step % 20 or not os.path.exists(FINISH):
    with watch.section("work"):
        pass
    watch.step(step)
    step += 1
    next_s += PERIOD_S
    time.sleep(max(next_s - time.monotonic(), 0.0))
