"""``python -m steadyrun.checkpoint.saver``: started by the agent, not by people."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from steadyrun.checkpoint.saver.coordinator import Limits
from steadyrun.checkpoint.saver.machine import NodeLimits
from steadyrun.checkpoint.saver.server import Server

__all__ = ["main"]

_CRASHED: Final = 70


def main(argv: Sequence[str]) -> int:
    """Run the saver until it is told to leave, or its agent is gone; gives its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m steadyrun.checkpoint.saver",
        description="Owns the snapshot memory of a node's ranks and writes checkpoints from it. Started by steadyrun.",
    )
    parser.add_argument("--socket-fd", type=int, required=True, help="the listening socket for ranks")
    parser.add_argument("--agent-fd", type=int, required=True, help="this end of the agent's socketpair")
    parser.add_argument("--run-folder", type=Path, required=True, help="where figures are written to")
    parser.add_argument("--node", required=True, help="the name of this node")
    parser.add_argument("--limits", type=json.loads, default={}, help=argparse.SUPPRESS)  # JSON, for tests: seconds
    args = parser.parse_args(argv)
    limits = NodeLimits(**args.limits.get("node", {})), Limits(**args.limits.get("job", {}))
    # A stop of the job concerns the ranks. This process ends when the agent says so, or is gone.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file size limit is an error of the write, not an end
    listening = socket.socket(fileno=args.socket_fd)
    agent = socket.socket(fileno=args.agent_fd)
    for sock in (listening, agent):
        sock.set_inheritable(False)
    server = Server(listening, agent, args.run_folder, args.node, limits)
    try:
        server.run()
    except Exception:
        # The agent starts another one, which goes on from the snapshot memory.
        traceback.print_exc()
        print(server.story, file=sys.stderr, flush=True)
        return _CRASHED
    return 0


def end(code: int) -> None:
    """Leave without waiting for workers: a thread in a write to a dead mount would never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
