"""Reading many bundles of dumps at once, in processes that may fail.

Each reader process announces the bundle it turns to, so that one that dies or never ends costs that bundle alone. They
are started as programs of their own, not forked and not by multiprocessing's spawn: that would import the caller's main
module, and with it torch, in each.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Final

from steadyrun.collectors.flight.bundle import Bundle, BundleReading, LoadedFile, read_bundle
from steadyrun.collectors.flight.summarise import SummaryCache

__all__ = ["JOB_LIMIT_S", "read_bundles", "serve"]

JOB_LIMIT_S: Final = 120.0  # the largest allowed file takes about 10 s
CHUNK: Final = 8
_MEMORY_BYTES: Final = 4 << 30  # of address space: a guard against what the checks before loading overlook
_HEAD: Final = struct.Struct("<cI")
_STARTED: Final = b"s"
_RESULTS: Final = b"r"
_PROGRAM: Final = "from steadyrun.collectors.flight.readers import serve; serve()"

Done = Callable[[int, BundleReading], None]


def read_bundles(bundles: Sequence[Bundle], workers: int, on_done: Done, job_limit_s: float = JOB_LIMIT_S) -> None:
    """Read all; *on_done* gets each bundle's index and reading, in any order.

    Args:
        workers: processes; with 1 all happens in this one.
        job_limit_s: a bundle that takes longer is given up, with its process.
    """
    if workers <= 1:
        cache = SummaryCache()
        for index, bundle in enumerate(bundles):
            on_done(index, read_bundle(bundle, cache))
        return
    left = _Readers(bundles, workers, on_done, job_limit_s).run()
    cache = SummaryCache()
    for index in left:
        on_done(index, read_bundle(bundles[index], cache))


# -- the side that asks ------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    input: IO[bytes]
    output: int
    chunk: deque[int] = field(default_factory=deque)
    current: int | None = None
    since_s: float = 0.0
    received: bytearray = field(default_factory=bytearray)


class _Readers:
    """Children, what each reads, and what is left to read."""

    def __init__(self, bundles: Sequence[Bundle], workers: int, on_done: Done, job_limit_s: float) -> None:
        self._bundles = bundles
        self._on_done = on_done
        self._job_limit_s = job_limit_s
        self._left: deque[int] = deque(range(len(bundles)))
        self._wanted = min(workers, -(-len(bundles) // CHUNK))
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[int]:
        """All readings; what is left when no process can be had is for the caller."""
        try:
            while self._wanted and (self._left or any(child.chunk for child in self._children)):
                while self._left and len(self._children) < self._wanted:
                    self._start()
                events = self._selector.select(timeout=1.0)
                for key, _ in events:
                    self._receive(key.data)
                now_s = time.monotonic()
                for child in list(self._children):
                    if child.chunk and now_s - child.since_s > self._job_limit_s:
                        self._give_up(child, f"reading it took longer than {self._job_limit_s:.0f} s")
        finally:
            for child in list(self._children):
                self._end(child)
            self._selector.close()
        return list(self._left)

    def _start(self) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, bufsize=0
        )
        assert process.stdin is not None
        assert process.stdout is not None
        child = _Child(process, process.stdin, process.stdout.fileno())
        self._children.append(child)
        self._selector.register(child.output, selectors.EVENT_READ, child)
        self._feed(child)

    def _feed(self, child: _Child) -> None:
        """Give the child its next chunk; without any, let it end."""
        child.current = None
        child.since_s = time.monotonic()
        child.chunk = deque(self._left.popleft() for _ in range(min(CHUNK, len(self._left))))
        if not child.chunk:
            self._end(child)
            return
        data = pickle.dumps([(index, self._bundles[index]) for index in child.chunk])
        try:
            # The child reads a chunk as a whole before it writes anything: neither side waits for the other here.
            _write_all(child.input.fileno(), _HEAD.pack(_STARTED, len(data)) + data)
        except OSError:
            self._give_up(child, "reading it ended the reading process")

    def _receive(self, child: _Child) -> None:
        data = os.read(child.output, 1 << 18)
        if not data:
            self._give_up(child, "reading it ended the reading process")
            return
        child.received += data
        while len(child.received) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(child.received)
            if len(child.received) < _HEAD.size + size:
                return
            body = bytes(child.received[_HEAD.size : _HEAD.size + size])
            del child.received[: _HEAD.size + size]
            child.since_s = time.monotonic()
            if kind == _STARTED:
                child.current = int.from_bytes(body, "little")
                continue
            for index, reading in pickle.loads(body):
                self._on_done(index, reading)
            self._feed(child)

    def _give_up(self, child: _Child, why: str) -> None:
        """End the child. The bundle it was at is lost; the rest of its chunk is for another."""
        culprit, chunk = child.current, list(child.chunk)
        child.chunk.clear()
        self._end(child)
        if culprit is None:  # it did not get as far as reading anything
            self._wanted -= 1
        self._left.extendleft(index for index in reversed(chunk) if index != culprit)
        if culprit is not None:
            bundle = self._bundles[culprit]
            files = tuple(
                LoadedFile(path, bundle.rank, "unreadable", f"{path}: {why}; it may be made to do so")
                for path, _ in bundle.files
            )
            self._on_done(culprit, BundleReading(files=files))

    def _end(self, child: _Child) -> None:
        if child not in self._children:
            return
        self._children.remove(child)
        self._selector.unregister(child.output)
        if child.chunk or child.process.poll() is None:
            child.process.send_signal(signal.SIGKILL)
        child.process.wait()
        child.input.close()
        if child.process.stdout is not None:
            child.process.stdout.close()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# -- the side that reads -----------------------------------------------------------------------------------------------
def serve() -> None:
    """A reader process: chunks of bundles on stdin, readings on stdout, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    output = os.dup(1)
    os.dup2(2, 1)  # nothing else may write into the answers
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    gc.disable()  # dumps are large and hold no cycles
    cache = SummaryCache()
    while True:
        head = _read_exactly(_HEAD.size)
        if head is None:
            return
        body = _read_exactly(_HEAD.unpack(head)[1])
        if body is None:
            return
        results: list[tuple[int, Any]] = []
        for index, bundle in pickle.loads(body):
            _write_all(output, _HEAD.pack(_STARTED, 8) + int(index).to_bytes(8, "little"))
            results.append((index, read_bundle(bundle, cache)))
        data = pickle.dumps(results, protocol=pickle.HIGHEST_PROTOCOL)
        del results
        _write_all(output, _HEAD.pack(_RESULTS, len(data)) + data)
        gc.collect()


def _read_exactly(size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        data = os.read(0, size - len(parts))
        if not data:
            return None
        parts += data
    return bytes(parts)
