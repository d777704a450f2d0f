"""Dumps from torch's own server in a rank: C++ threads that answer while the main thread is blocked in a collective and
while C code holds the interpreter's lock.

``_WorkerServer`` speaks HTTP/1.1 on a unix socket (``flight.sock``). Which handlers exist depends on torch: the CPU
build has ``fr_trace_json``, a CUDA build ``dump_nccl_trace_pickle`` and ``dump_nccl_trace_json`` as well, 2.15 also
``fr_dump_file`` and the parameter ``backend``.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steadyrun.collectors.evidence import connect_unix
from steadyrun.core.errors import SteadyrunError

__all__ = ["DEFAULT_RECORDER", "DumpRequest", "HandlerError", "WorkerServer", "dump_requests", "file_requests"]

DEFAULT_RECORDER: Final = "gloo"  # the instance that ProcessGroupGloo records into, and what no name means
LEGACY_NCCL: Final = "nccl"  # ProcessGroupNCCL keeps a ring of its own
MAX_BODY_BYTES: Final = 64 << 20
_MAX_HEAD_BYTES: Final = 64 << 10
_PART_BYTES: Final = 256 << 10


class HandlerError(SteadyrunError):
    """The server did not give what was asked for; *is_silent* when it took the request and did not answer in time."""

    def __init__(self, text: str, is_silent: bool = False) -> None:
        super().__init__(text)
        self.is_silent = is_silent


@dataclass(frozen=True, slots=True)
class DumpRequest:
    """One dump to ask for.

    Attributes:
        kind: as ``DumpFile.kind`` has it.
        suffix: of the file that the answer makes: ``pickle`` or ``json``.
    """

    recorder: str
    handler: str
    kind: str
    suffix: str
    query: str = ""


def dump_requests(handlers: Collection[str], recorders: Collection[str]) -> list[DumpRequest]:
    """What to ask a server that has *handlers*, so that each recorder is fetched once and none symbolizes stacks.

    Args:
        recorders: those the rank knows to have; the default and the legacy NCCL one are asked in any case.
    """
    requests: list[DumpRequest] = []
    # dump_traceback and pickles with frames need the interpreter's lock; these do not.
    if "dump_nccl_trace_pickle" in handlers:
        query = "includestacktraces=false"
        requests.append(DumpRequest(LEGACY_NCCL, "dump_nccl_trace_pickle", "full", "pickle", query))
    elif "dump_nccl_trace_json" in handlers:
        requests.append(DumpRequest(LEGACY_NCCL, "dump_nccl_trace_json", "full", "json"))
    if "fr_trace_json" in handlers:
        requests.append(DumpRequest(DEFAULT_RECORDER, "fr_trace_json", "active", "json"))
        # Before 2.15 the parameter is ignored, and the answer would be the default recorder's under another name.
        if "fr_dump_file" in handlers:
            requests += [
                DumpRequest(name, "fr_trace_json", "active", "json", f"backend={name}")
                for name in _per_backend(recorders)
            ]
    return requests


def file_requests(handlers: Collection[str], recorders: Collection[str]) -> list[DumpRequest]:
    """Handlers that make torch itself write a full dump of a per-backend recorder to its dump file (2.15)."""
    if "fr_dump_file" not in handlers:
        return []
    return [DumpRequest(name, "fr_dump_file", "full", "pickle", f"backend={name}") for name in _per_backend(recorders)]


def _per_backend(recorders: Collection[str]) -> list[str]:
    own = {DEFAULT_RECORDER, LEGACY_NCCL}
    return sorted(r for r in recorders if r not in own and r.replace("_", "").replace("-", "").isalnum())


class WorkerServer:
    """The server of one rank. A connection per request; safe to use from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def handlers(self, deadline_s: float) -> frozenset[str]:
        """Names of what can be asked for.

        Raises:
            HandlerError: there is no server, or it does not answer by *deadline_s* (CLOCK_MONOTONIC).
        """
        try:
            names = json.loads(self._request("GET", "/handler/", deadline_s))
        except ValueError as e:
            raise HandlerError(f"the list of handlers is not JSON: {e}") from e
        return frozenset(map(str, names)) if isinstance(names, list) else frozenset()

    def fetch(self, request: DumpRequest, deadline_s: float) -> bytes:
        """The answer's body.

        Raises:
            HandlerError: no answer by *deadline_s*, a refusal, or more than 64 MiB.
        """
        query = f"?{request.query}" if request.query else ""
        return self._request("POST", f"/handler/{request.handler}{query}", deadline_s)

    def _request(self, method: str, path: str, deadline_s: float) -> bytes:
        began_s = time.monotonic()
        # Without a length the server waits 5 s for the rest of a POST (measured, torch 2.13).
        head = f"{method} {path} HTTP/1.1\r\nHost: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as s:
                stream = _Stream(s, deadline_s)
                s.settimeout(stream.left_s())
                connect_unix(s, self._path)
                s.sendall(head.encode())
                return stream.read_answer(path)
        except TimeoutError as e:
            took_s = time.monotonic() - began_s
            raise HandlerError(f"{path}: no answer in {took_s:.1f} s", is_silent=True) from e
        except OSError as e:
            raise HandlerError(f"{path}: {e.strerror or e}") from e


class _Stream:
    """An HTTP answer read from a socket, with one deadline for all of it."""

    def __init__(self, s: socket.socket, deadline_s: float) -> None:
        self._socket = s
        self._deadline_s = deadline_s

    def left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _more(self) -> bytes:
        self._socket.settimeout(self.left_s())
        return self._socket.recv(_PART_BYTES)

    def read_answer(self, path: str) -> bytes:
        received = b""
        while b"\r\n\r\n" not in received:
            part = self._more()
            if not part or len(received) > _MAX_HEAD_BYTES:
                raise HandlerError(f"{path}: the answer is no HTTP: {received[:60]!r}")
            received += part
        head, _, rest = received.partition(b"\r\n\r\n")
        status, length = _parse_head(head, path)
        if length is not None and length > MAX_BODY_BYTES:
            raise HandlerError(f"{path}: the answer has {length} bytes; {MAX_BODY_BYTES} are allowed")
        body = bytearray(rest)
        while length is None or len(body) < length:
            part = self._more()
            if not part:
                break
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise HandlerError(f"{path}: the answer is longer than {MAX_BODY_BYTES} bytes")
        if length is not None and len(body) < length:
            raise HandlerError(f"{path}: the answer ends after {len(body)} of {length} bytes")
        if status != 200:
            raise HandlerError(f"{path}: refused with {status}: {bytes(body[:200]).decode('utf-8', 'replace')}")
        return bytes(body if length is None else body[:length])


def _parse_head(head: bytes, path: str) -> tuple[int, int | None]:
    """(status, length of the body where told)."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise HandlerError(f"{path}: the answer is no HTTP: {first[:60]!r}")
    length: int | None = None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "transfer-encoding":
            raise HandlerError(f"{path}: the answer comes in a form that is not read: {line[:60]!r}")
        if name.strip().lower() == "content-length" and value.strip().isdigit():
            length = int(value)
    return int(words[1]), length
