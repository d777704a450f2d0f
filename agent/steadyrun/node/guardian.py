"""The guardian: a small process that outlives a killed agent just long enough to leave nothing behind.

Ranks die with the agent by PR_SET_PDEATHSIG, but what they started (data loaders, helpers in sessions of their own,
files in /dev/shm) does not. The guardian waits on a pipe whose other end only the agent holds. A ``bye`` means a normal
end; end-of-file without it means that the agent is gone, and the guardian ends every process that has the agent's tag,
or carries the run's marker and has no agent's tag.

Run as ``python -m steadyrun.node.guardian FD TAG MARKER RUN_FOLDER NODE``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from steadyrun.node.sweep import MARKER_NAME, Tag, has_marker, is_tagged, remove_shared_memory, scan_processes

__all__ = ["Guardian", "end_left"]

LIMIT_S: Final = 10.0


class Guardian:
    """The agent's handle on its guardian."""

    def __init__(self, marker: str, run_folder: Path, node: str) -> None:
        """Start it.

        Raises:
            OSError: no process could be started; the agent then goes without and says so.
        """
        read_fd, self._fd = os.pipe()
        env = {k: v for k, v in os.environ.items() if k != MARKER_NAME}
        tag = str(Tag.of_agent(os.getpid()).base)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-E", "-s", "-m", __name__, str(read_fd), tag, marker, str(run_folder), node],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(read_fd,),
                start_new_session=True,
            )
        finally:
            os.close(read_fd)
        self.pid = self._process.pid

    def dismiss(self) -> None:
        """The agent leaves by itself: the guardian has nothing to do."""
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guardian; nothing depends on it now
            os.write(self._fd, b"bye")
        os.close(self._fd)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def left_pids(tag: Tag, marker: str, proc: Path = Path("/proc")) -> list[int]:
    """What ranks of the agent with this tag have left. The marker decides only where there is no tag at all: another
    job of this user may have the same run id."""
    found: list[int] = []
    for entry in scan_processes(proc).values():
        if entry.is_dead or entry.pid == os.getpid():
            continue
        is_ours = tag.attempt_of(entry.pid) is not None
        if is_ours or (not is_tagged(entry.pid) and has_marker(entry, marker, proc)):
            found.append(entry.pid)
    return found


def end_left(tag: Tag, marker: str, limit_s: float = LIMIT_S) -> tuple[list[int], list[int]]:
    """SIGKILL all of them until nothing is left: (ended, still there after *limit_s*)."""
    deadline_s = time.monotonic() + limit_s
    ended: set[int] = set()
    while True:
        alive = left_pids(tag, marker)
        if not alive or time.monotonic() > deadline_s:
            return sorted(ended.difference(alive)), alive
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # which ends stopped processes too
                ended.add(pid)
        time.sleep(0.05)


def main(argv: list[str]) -> int:
    fd, tag, marker, run_folder, node = int(argv[0]), Tag(int(argv[1])), argv[2], Path(argv[3]), argv[4]
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # it ends when the agent ends, not before
    started_unix_s = time.time()
    said = b""
    while chunk := os.read(fd, 64):
        said += chunk
    if said.startswith(b"bye"):
        return 0
    ended, left = end_left(tag, marker)
    from steadyrun.core.journal import Journal

    removed = remove_shared_memory(since_unix_s=started_unix_s)
    journal = Journal(run_folder / "journal" / f"{node}.jsonl", node)
    journal.write(
        "agent_gone", time.time(), time.monotonic(), -1, ended=ended, stuck=left, removed=list(removed), by="guardian"
    )
    journal.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
