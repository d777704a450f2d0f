"""The agent's side of the saver, with real saver processes."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steadyrun.checkpoint.client import SaverLink
from steadyrun.checkpoint.layout import Entry, Layout
from steadyrun.checkpoint.saves import CheckpointOptions, Every
from steadyrun.node.saver import SaverKeeper

LIMIT_S = 30.0
LAYOUT = Layout(0, 1, (Entry("model.w", ("model", "w"), "float32", (4,), (0,), (4,), 0, 16),), ())


class Loop:
    """A loop with nothing but the keeper in it."""

    def __init__(self, folder: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.said: list[str] = []
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.folder = folder
        self.keeper = SaverKeeper(folder, "node-0", self, self.said.append, self._record, self.said.append)
        self.keeper.begin_attempt(
            {
                "attempt": 0,
                "world_size": 1,
                "group_rank": 0,
                "group_world_size": 1,
                "ranks": [0],
                "host": "127.0.0.1",
                "port": 1,
                "node": "node-0",
                "rollback": None,
            }
        )

    def watch(self, fd: int, then: Callable[[], None]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, then)

    def unwatch(self, fd: int) -> None:
        self.selector.unregister(fd)

    def _record(self, type_: str, **fields: Any) -> None:
        self.records.append((type_, fields))

    def turn_until(self, is_done: Callable[[], Any], what: str) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not is_done():
            assert time.monotonic() < deadline_s, f"not in time: {what}; said {self.said}, records {self.records}"
            for key, _ in self.selector.select(0.05):
                key.data()

    def link(self) -> SaverLink:
        """A rank that has been welcomed."""
        path = self.keeper.socket_path
        assert path is not None
        options = CheckpointOptions(root=str(self.folder / "checkpoints"), every=Every(steps=10))
        fields = {"rank": 0, "local_rank": 0, "world_size": 1, "attempt": 0, "run_id": "r", "pid": os.getpid()}
        link = SaverLink(path, {**fields, "options": options.to_json(), "torch": "x"})
        link._dial()
        welcomed: list[dict[str, Any]] = []

        def is_welcome() -> bool:
            link.poll()
            welcomed.extend(link._answers.pop("welcome", []))
            return bool(welcomed)

        self.turn_until(is_welcome, "the saver's welcome")
        return link

    def memory(self, link: SaverLink) -> int:
        """The inode of the memory that the saver hands out."""
        link.send_layout(LAYOUT, 4096)
        found: list[int] = []

        def is_granted() -> bool:
            granted = link.granted()
            if granted is not None:
                assert granted.fd >= 0, granted
                found.append(os.fstat(granted.fd).st_ino)
                os.close(granted.fd)
            return bool(found)

        self.turn_until(is_granted, "snapshot memory")
        return found[0]


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    yield made
    made.keeper.close(5.0)
    made.selector.close()


def test_there_is_no_saver_until_a_rank_asks_for_it(loop: Loop) -> None:
    assert not loop.keeper.is_running
    link = loop.link()
    assert loop.keeper.is_running
    assert [t for t, _ in loop.records] == ["saver_started"]
    link.close()


def test_the_saver_does_not_load_torch(loop: Loop) -> None:
    link = loop.link()
    maps = Path(f"/proc/{loop.keeper.pid()}/maps").read_text()
    assert "libtorch" not in maps
    assert "numpy" not in maps
    link.close()


def test_snapshot_memory_outlives_the_saver(loop: Loop) -> None:
    link = loop.link()
    before = loop.memory(link)
    loop.turn_until(lambda: loop.keeper._kept, "a descriptor to keep")
    first = loop.keeper.pid()
    assert first is not None
    os.kill(first, signal.SIGKILL)
    loop.turn_until(lambda: loop.keeper.pid() not in (None, first), "another saver")
    assert "starting it again" in " ".join(loop.said)
    link.close()
    again = loop.link()
    assert loop.memory(again) == before
    again.close()


def test_a_saver_that_dies_again_and_again_is_not_started_for_ever(loop: Loop) -> None:
    loop.link().close()
    for _ in range(4):
        pid = loop.keeper.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        loop.turn_until(lambda dead=pid: loop.keeper.pid() != dead, "its end")  # type: ignore[misc]
    assert not loop.keeper.is_running
    assert "not started again" in loop.said[-1]
    assert loop.keeper.socket_path is not None
    assert not os.path.exists(loop.keeper.socket_path), "ranks see that nobody listens, and write by themselves"


def test_closing_ends_the_saver_and_leaves_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    link = loop.link()
    loop.memory(link)
    pid = loop.keeper.pid()
    link.close()
    loop.keeper.close(10.0)
    loop.selector.close()
    assert not Path(f"/proc/{pid}").exists()
    assert not list(tmp_path.glob("*.sock"))


def test_a_path_too_long_for_a_socket_is_replaced_by_a_short_one(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    loop = Loop(folder)
    link = loop.link()
    link.close()
    path = loop.keeper.socket_path
    loop.keeper.close(5.0)
    loop.selector.close()
    assert path is not None
    assert not Path(path).parent.exists()
