"""The control store between two real processes."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import pytest

dist = pytest.importorskip("torch.distributed")

DEADLINE_S = 60.0

PEER = """
import os, select, sys
import torch.distributed as dist
from steadyrun.node.store import TorchAsyncStore
tcp = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
store = TorchAsyncStore(dist.PrefixStore("epoch", tcp))
store.watch("stop/0")
store.add("arrive/0", 1, 2, "arrived/0")
select.select([store], [], [], 60)
(event,) = store.drain()
store.set("answer", event.value + b" heard by %d" % os.getpid())
store.close()
"""


@pytest.fixture(scope="session", autouse=True)
def _torch_has_its_own_descriptors() -> None:
    """What torch opens once per process must not count as a leak of the first test that uses a store."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_two_agents_hear_each_other() -> None:
    from steadyrun.node.store import TorchAsyncStore

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TorchAsyncStore(dist.PrefixStore("epoch", server))
    peer = subprocess.Popen([sys.executable, "-c", PEER, str(server.port)], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        store.watch("arrived/0")
        store.add("arrive/0", 1, 2, "arrived/0")
        assert select.select([store], [], [], DEADLINE_S)[0], "the peer did not arrive"
        assert [e.key for e in store.drain()] == ["arrived/0"]
        store.watch("answer")
        store.set_first("stop/0", b"hang")
        assert select.select([store], [], [], DEADLINE_S)[0], "the peer did not answer"
        (event,) = store.drain()
        assert event.value == b"hang heard by %d" % peer.pid
        assert peer.wait(DEADLINE_S) == 0
    finally:
        peer.kill()
        peer.wait(DEADLINE_S)
        begun_s = time.monotonic()
        store.close()
    assert time.monotonic() - begun_s < 1.0
