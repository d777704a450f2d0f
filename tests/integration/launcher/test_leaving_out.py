"""What the launcher knows of the rendezvous when a node is to be left out: room, who serves it, and how to leave."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from steadyrun.launcher.elastic import ElasticRendezvous, SteadyAgent, _listens_on


def rendezvous(handler: object, said: list[str] | None = None) -> ElasticRendezvous:
    group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler))
    agent = cast(SteadyAgent, SimpleNamespace(get_worker_group=lambda: group))
    return ElasticRendezvous(agent, "127.0.0.1:29400", lambda roles: None, (said if said is not None else []).append)


def handler_with(participants: int, waiting: int, spare: int, least: int) -> SimpleNamespace:
    state = SimpleNamespace(
        participants=dict.fromkeys(range(participants)),
        wait_list=set(range(waiting)),
        redundancy_list=set(range(spare)),
    )
    return SimpleNamespace(_state_holder=SimpleNamespace(state=state), _settings=SimpleNamespace(min_nodes=least))


@pytest.mark.parametrize(
    ("handler", "spares"),
    [
        (handler_with(4, 0, 0, 4), 0),
        (handler_with(4, 0, 1, 4), 1),
        (handler_with(4, 1, 1, 4), 2),
        (handler_with(4, 0, 0, 2), 2),
        (handler_with(2, 0, 0, 4), 0),
        (SimpleNamespace(), 0),
    ],
)
def test_spares_are_those_that_wait_and_those_beyond_the_minimum(handler: object, spares: int) -> None:
    assert rendezvous(handler).spares() == spares


def test_who_steps_out_does_what_torch_does_before_a_new_round() -> None:
    done: list[Any] = []
    executor = SimpleNamespace(run=lambda op, deadline: done.append(type(op).__name__))
    handler = SimpleNamespace(_op_executor=executor, _stop_heartbeats=lambda: done.append("heartbeats"))
    rendezvous(handler).step_out()
    assert done == ["heartbeats", "_RendezvousExitOp"]


def test_a_store_that_is_gone_does_not_keep_a_node_from_leaving() -> None:
    def fail(op: object, deadline: float) -> None:
        raise ConnectionError("the store is gone")

    said: list[str] = []
    rendezvous(SimpleNamespace(_op_executor=SimpleNamespace(run=fail), _stop_heartbeats=lambda: None), said).step_out()
    assert ["the store is gone" in text for text in said] == [True]
    rendezvous(SimpleNamespace(), said).step_out()
    assert len(said) == 1, "a static rendezvous has no place to give up"


@pytest.mark.parametrize("known", [None, "from the round before"])
def test_every_round_tells_anew_where_the_ranks_store_is(monkeypatch: pytest.MonkeyPatch, known: str | None) -> None:
    """torch does so only where it is not known yet, so that who comes later would wait for it."""
    seen: list[Any] = []
    torchs = SteadyAgent.__mro__[1]
    monkeypatch.setattr(torchs, "_rendezvous", lambda self, group: seen.append(vars(group.spec.rdzv_handler)))
    agent = SteadyAgent.__new__(SteadyAgent)
    agent._store, agent._rounds = None, 0
    for handler in (SimpleNamespace(_bootstrap_store_info=known), SimpleNamespace()):
        agent._rounds = 0
        agent._rendezvous(SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler), group_world_size=2))
    assert seen == [{"_bootstrap_store_info": None}, {}]


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_process_that_listens_serves_the_rendezvous(family: int, host: str) -> None:
    with socket.socket(family) as s:
        try:
            s.bind((host, 0))
        except OSError as e:
            pytest.skip(f"cannot bind {host}: {e}")
        port = s.getsockname()[1]
        assert not _listens_on(f"somewhere:{port}"), "bound is not listening"
        s.listen()
        assert _listens_on(f"somewhere:{port}")
    assert not _listens_on(f"somewhere:{port}")


@pytest.mark.parametrize("endpoint", ["", "static", "localhost:0", "/a/file", "http://x:1/y", "host:99999"])
def test_an_endpoint_without_a_port_of_ours_is_served_by_others(endpoint: str) -> None:
    assert not _listens_on(endpoint)
