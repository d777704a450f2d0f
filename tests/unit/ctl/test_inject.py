"""``steadyctl inject``: what reaches the rank's socket, and what is said when nothing can."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadyrun.ctl import inject


@pytest.fixture
def live(fake_run: Any) -> Any:
    fake_run.go_live([os.getpid(), os.getpid()])
    return fake_run


def test_the_text_goes_to_the_rank_as_it_is(
    ctl: Callable[..., Any], live: Any, rank_socket: Callable[..., Any]
) -> None:
    heard = rank_socket(1, b'{"answers": ["rank 1: hang where=collective strikes after step 400 (now at step 17)"]}')
    result = ctl("inject", "hang where=collective", "step=400", "--rank", 1, "--run", live.root)
    assert result.code == 0, result.err
    assert heard == [{"cmd": "inject", "fault": "hang where=collective step=400"}]
    assert result.lines[0] == "rank 1: hang where=collective strikes after step 400 (now at step 17)"


def test_json(ctl: Callable[..., Any], live: Any, rank_socket: Callable[..., Any]) -> None:
    rank_socket(0, b'{"answers": ["soon"]}')
    told = ctl("inject", "kill", "--rank", 0, "--run", live.root, "--json").json
    assert (told["schema"], told["rank"], told["attempt"], told["answers"]) == ("steadyrun.inject/1", 0, 1, ["soon"])


def test_a_refusal_of_the_rank_is_exit_2(ctl: Callable[..., Any], live: Any, rank_socket: Callable[..., Any]) -> None:
    rank_socket(0, b'{"error": "cannot use the fault: step 3 has passed"}')
    result = ctl("inject", "kill step=3", "--rank", 0, "--run", live.root)
    assert result.code == 2
    assert "step 3 has passed" in result.err


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("kil", "did you mean kill?"),
        ("kill rank=0", "leave rank= out"),
        ("kill rank=random:3", "leave rank= out"),
        ("raise step=now", "main thread"),
        (" ", "no fault given"),
    ],
)
def test_a_typo_is_answered_without_the_rank(ctl: Callable[..., Any], tmp_path: Path, fault: str, says: str) -> None:
    result = ctl("inject", fault, "--rank", 1, "--run", tmp_path / "nowhere")
    assert result.code == 2
    assert says in result.err


def test_a_rank_that_is_not_here(ctl: Callable[..., Any], live: Any) -> None:
    result = ctl("inject", "kill", "--rank", 9, "--run", live.root)
    assert result.code == 1
    assert "rank 9 does not run on this machine (ranks here: 0, 1)" in result.err


def test_a_run_that_is_over(ctl: Callable[..., Any], ended_run: Any) -> None:
    result = ctl("inject", "kill", "--rank", 0, "--run", ended_run.root)
    assert result.code == 1
    assert "is the run over?" in result.err


def test_before_the_first_step_there_is_no_socket(ctl: Callable[..., Any], live: Any) -> None:
    live.folder.rank_dir(1, 0).mkdir(parents=True)
    result = ctl("inject", "kill", "--rank", 0, "--run", live.root)
    assert result.code == 1
    assert "opens it at its first step" in result.err


def test_a_dead_rank(ctl: Callable[..., Any], live: Any) -> None:
    import socket

    folder = live.folder.rank_dir(1, 0)
    folder.mkdir(parents=True)
    fd = os.open(folder, os.O_PATH)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.bind(f"/proc/self/fd/{fd}/evidence.sock")
    os.close(fd)
    result = ctl("inject", "kill", "--rank", 0, "--run", live.root)
    assert result.code == 1
    assert "has ended" in result.err


def test_a_rank_that_does_not_answer(ctl: Callable[..., Any], live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(inject, "ANSWER_S", 0.1)
    folder = live.folder.rank_dir(1, 0)
    folder.mkdir(parents=True)
    fd = os.open(folder, os.O_PATH)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(f"/proc/self/fd/{fd}/evidence.sock")
        os.close(fd)
        server.listen(1)  # the kernel accepts, nobody reads: as with a stopped rank
        result = ctl("inject", "kill", "--rank", 0, "--run", live.root)
    assert result.code == 1
    assert "stopped or holds the GIL" in result.err


@pytest.mark.parametrize("reply", [b"what?", b"[1]"])
def test_nonsense_from_the_rank(
    ctl: Callable[..., Any], live: Any, rank_socket: Callable[..., Any], reply: bytes
) -> None:
    rank_socket(0, reply)
    result = ctl("inject", "kill", "--rank", 0, "--run", live.root)
    assert result.code == 1
    assert "something else than JSON" in result.err


def test_a_path_beyond_the_limit_of_unix_sockets(tmp_path: Path, rank_socket: Callable[..., Any]) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    heard = rank_socket(0, b'{"answers": ["x"]}', folder)
    assert inject.ask_rank(folder / "evidence.sock", {"cmd": "sections"}, 0) == {"answers": ["x"]}
    assert heard == [{"cmd": "sections"}]
