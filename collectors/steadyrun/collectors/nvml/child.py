"""The process that talks to NVML: one JSON line per request on its input, one per answer or event on its output.

It ends when its input ends, and with its parent. Before each call it writes the call's name into shared memory: when
it hangs, the parent reads there in what.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import threading
from typing import Any, Final

from steadyrun.collectors.nvml.asking import Asker, EventWaiter

__all__ = ["NAME_BYTES", "main"]

NAME_BYTES: Final = 128  # of the shared memory: the name of the call, padded with zeros
EVENT_WAIT_MS: Final = 5000
PR_SET_PDEATHSIG: Final = 1


class _Output:
    """Lines from two threads; each goes out whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def put(self, value: dict[str, Any]) -> None:
        data = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


def main(parent_pid: int, name_fd: int, with_events: bool) -> None:
    """Serve until the input ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's
    board = mmap.mmap(name_fd, NAME_BYTES)
    output = _Output()

    def tell(name: str) -> None:
        board[:] = name.encode()[: NAME_BYTES - 1].ljust(NAME_BYTES, b"\0")

    try:
        import pynvml as nvml
    except ImportError as e:
        output.put({"fatal": "no_bindings", "text": str(e)})
        return
    asker = Asker(nvml, tell)
    try:
        begun = asker.begin()
    except nvml.NVMLError as e:
        output.put({"fatal": "init", "code": int(e.value), "text": str(e)})
        return
    tell("")
    output.put({"begun": begun})
    if with_events:
        threading.Thread(target=_watch, args=(nvml, begun["count"], output), daemon=True).start()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        devices = asker.read(frozenset(request["groups"]))
        tell("")
        output.put({"id": request["id"], "devices": devices})


def _watch(nvml: Any, count: int, output: _Output) -> None:
    try:
        waiter = EventWaiter(nvml, count)
    except nvml.NVMLError:
        return
    while waiter.registered:
        event = waiter.wait(EVENT_WAIT_MS)
        if event is not None:
            output.put({"event": event})
            if "error" in event:  # a lost GPU ends each further wait at once
                return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "events")
