"""This node's part of the peer tier: keeps snapshots of another node's ranks, and brings its own ones to a third."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Callable, Iterable
from typing import Any, Final

from steadyrun.checkpoint.arena import ArenaError
from steadyrun.checkpoint.budget import SHARE, available_bytes
from steadyrun.checkpoint.choose import Snapshot
from steadyrun.checkpoint.peer import ForeignStore, PeerError, PeerServer, push
from steadyrun.checkpoint.saver import messages as m
from steadyrun.checkpoint.saver.events import Binding, PeerServing, PushPiece, Report
from steadyrun.checkpoint.saver.memory import Box
from steadyrun.checkpoint.shardfile import RateLimit

__all__ = ["Peers", "push_piece"]

_TOKEN_BYTES: Final = 16
_SLOTS: Final = 2


class Peers:
    """For the loop's thread, apart from ``push``.

    Args:
        keep: gives a copy of the descriptor to the agent, under that name; may be called from any thread.
        drop: of that name.
        deliver: gets what has to be told on, from any thread.
    """

    def __init__(
        self,
        keep: Callable[[str, int], None],
        drop: Callable[[str], None],
        deliver: Callable[[PeerServing | Report], None],
    ) -> None:
        self._deliver = deliver
        most_bytes = int(available_bytes()[0] * SHARE)
        self._store = ForeignStore(most_bytes, _SLOTS, keep, drop, self._arrived)
        self._server: PeerServer | None = None
        self._address: m.Address | None = None

    @property
    def size_bytes(self) -> int:
        return self._store.size_bytes

    def adopt(self, name: str, fd: int) -> None:
        """Memory that the agent has kept. Raises ArenaError; *fd* is closed."""
        self._store.adopt(name, fd)

    def serve(self, binding: Binding) -> None:
        """Listen where other nodes reach this one, and tell of it; without that, only say why."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            listen, told = _host(binding)
            self._server = PeerServer(self._store, token, listen)
        except (PeerError, OSError) as e:
            text = f"snapshots are not copied to this node's memory: {e}"
            self._deliver(Report("peer_not_served", {"why": str(e)}, text))
            return
        self._address = m.Address(told, self._server.port, token.hex())
        self._tell()

    def _arrived(self, rank: int, snapshot: Snapshot) -> None:
        self._tell()

    def _tell(self) -> None:
        address = self._address
        if address is None:
            return
        held = []
        for rank, snapshot in self._store.snapshots():
            memory = self._store.memory_of(rank, snapshot.digest)
            if memory is not None:
                held.append(m.Away(rank, snapshot, *memory))
        self._deliver(PeerServing(address, tuple(held)))

    def forget(self, ranks: Iterable[int]) -> None:
        """Of nodes that bring their copies elsewhere by now."""
        for rank in ranks:
            self._store.forget(rank)
        self._tell()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._store.close()


def push_piece(order: PushPiece, box: Box, rate: RateLimit | None) -> Report | None:
    """Bring a copy to the partner node; gives the record of it."""
    if not box.enter():
        return None
    fields: dict[str, Any] = {"rank": box.info.rank, "step": order.key.step, "attempt": order.key.attempt}
    try:
        pushed = push(
            order.address.host,
            order.address.port,
            bytes.fromhex(order.address.token),
            box.arena,
            box.arena.slots[order.slot],
            order.key.generation,
            rate=rate,
        )
    except (PeerError, ArenaError, OSError) as e:
        return Report("snapshot_not_copied", {**fields, "why": str(e)})
    finally:
        box.leave()
    return Report("snapshot_copied", {**fields, "bytes": pushed.size_bytes, "seconds": round(pushed.elapsed_s, 3)})


def _host(binding: Binding) -> tuple[str, str]:
    """Where to listen, and what to tell others: the address by which this node talks to the attempt's store.

    The first node has the store itself: the others know it by the name that they were given.
    """
    if binding.group_rank == 0:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(binding.host)
            return binding.host, binding.host
        return "0.0.0.0", binding.host
    family, kind, _, _, target = socket.getaddrinfo(binding.host, binding.port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        host = str(probe.getsockname()[0])
    return host, host
