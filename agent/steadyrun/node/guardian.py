"""The guardian: a small process that outlives a killed agent just long enough to leave nothing behind.

Ranks die with the agent by PR_SET_PDEATHSIG, but what they started (data loaders, helpers in sessions of their own,
files in /dev/shm) does not. The guardian waits on a pipe whose other end only the agent holds. A ``bye`` means a normal end;
end-of-file without it means that the agent is gone, and the guardian ends every process that carries the run's marker.

Run as ``python -m steadyrun.node.guardian FD MARKER RUN_FOLDER NODE``.
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

__all__ = ["Guardian", "end_marked"]

MARKER_NAME: Final = "STEADYRUN_RUN"
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
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-E", "-s", "-m", __name__, str(read_fd), marker, str(run_folder), node],
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


def marked_pids(marker: str, proc: Path = Path("/proc")) -> list[int]:
    """Processes of this user whose environment at exec held the marker, ourselves left out."""
    wanted = f"{MARKER_NAME}={marker}".encode()
    found: list[int] = []
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue
        if wanted in environ.split(b"\0"):
            found.append(int(entry.name))
    return found


def end_marked(marker: str, limit_s: float = LIMIT_S) -> tuple[list[int], list[int]]:
    """SIGKILL everything with the marker until nothing is left: (ended, still there after *limit_s*)."""
    deadline_s = time.monotonic() + limit_s
    ended: set[int] = set()
    while True:
        alive = [pid for pid in marked_pids(marker) if not _is_dead(pid)]
        if not alive or time.monotonic() > deadline_s:
            return sorted(ended), alive
        for pid in alive:
            for signum in (signal.SIGCONT, signal.SIGKILL):
                try:
                    os.kill(pid, signum)
                    ended.add(pid)
                except ProcessLookupError:
                    break
                except PermissionError:
                    break
        time.sleep(0.05)


def _is_dead(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat[stat.rfind(")") + 2] in "ZX"


def main(argv: list[str]) -> int:
    fd, marker, run_folder, node = int(argv[0]), argv[1], Path(argv[2]), argv[3]
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # it ends when the agent ends, not before
    started_unix_s = time.time()
    said = b""
    while chunk := os.read(fd, 64):
        said += chunk
    if said.startswith(b"bye"):
        return 0
    ended, left = end_marked(marker)
    from steadyrun.core.journal import Journal
    from steadyrun.node.sweep import remove_shared_memory

    removed = remove_shared_memory(since_unix_s=started_unix_s)
    journal = Journal(run_folder / "journal" / f"{node}.jsonl", node)
    journal.write(
        "agent_gone", time.time(), time.monotonic(), -1, ended=ended, stuck=left, removed=list(removed), by="guardian"
    )
    journal.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
