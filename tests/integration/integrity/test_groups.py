"""Who is compared with whom, on real gloo ranks; and what is compared is equal there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steadyrun.integrity.groups import Kind, World, plan

JOB = Path(__file__).with_name("groups_job.py")
WORLD = 4
LIMIT_S = 220.0

Rows = dict[str, dict[str, Any]]


def run(kinds: str, folder: Path) -> dict[str, list[Rows]]:
    """By kind, what each rank plans; one job for all kinds, as most of its time goes into starting."""
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(JOB), kinds, str(folder / "store"), str(rank), str(WORLD)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    limit_s = time.monotonic() + LIMIT_S
    try:
        told = [p.communicate(timeout=max(limit_s - time.monotonic(), 0.1)) for p in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [p.returncode for p in started] == [0] * WORLD, "\n".join(e[-2000:] for _, e in told)
    plans = [json.loads(out.splitlines()[-1]) for out, _ in told]
    return {kind: [{row["name"]: row for row in one[kind]} for one in plans] for kind in kinds.split(",")}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Rows]]:
    return run("ddp,hsdp,fsdp2,zero", tmp_path_factory.mktemp("groups"))


def assert_equal_where_compared(ranks: list[Rows]) -> None:
    for rank, rows in enumerate(ranks):
        for name, row in rows.items():
            assert rank in row["ranks"]
            for other in row["ranks"]:
                assert ranks[other][name]["ranks"] == row["ranks"]
                assert ranks[other][name]["root"] == row["root"], f"{name} on ranks {rank} and {other}"


def assert_all_with_all(ranks: list[Rows]) -> None:
    assert_equal_where_compared(ranks)
    assert all(row["ranks"] == list(range(WORLD)) for row in ranks[0].values())
    assert {"0.weight", "2.bias", "table", "optimizer.0.weight.exp_avg", "optimizer.2.bias.step"} <= set(ranks[0])
    assert not any("running" in name or "num_batches" in name for name in ranks[0])


def test_ddp_compares_everything_with_its_group(planned: dict[str, list[Rows]]) -> None:
    assert_all_with_all(planned["ddp"])


def test_hsdp_compares_shards_over_the_replicas(planned: dict[str, list[Rows]]) -> None:
    ranks = planned["hsdp"]
    assert_equal_where_compared(ranks)
    for rank, expected in enumerate(([0, 2], [1, 3], [0, 2], [1, 3])):
        assert ranks[rank]["0.weight"]["ranks"] == expected
        assert ranks[rank]["optimizer.0.weight.exp_avg_sq"]["ranks"] == expected


def test_full_sharding_is_checked_at_rest_only(planned: dict[str, list[Rows]]) -> None:
    for rank, rows in enumerate(planned["fsdp2"]):
        assert "optimizer.2.weight.exp_avg" in rows
        assert all(row["ranks"] == [rank] for row in rows.values())


def test_zero_names_owners_and_keeps_state_to_them(planned: dict[str, list[Rows]]) -> None:
    ranks = planned["zero"]
    assert_equal_where_compared(ranks)
    owners = {n: row["owner"] for n, row in ranks[0].items() if row["kind"] == "parameter"}
    assert len(set(owners.values())) > 1
    for rank, rows in enumerate(ranks):
        own = {n for n, row in rows.items() if row["kind"] == "optimizer"}
        assert own == {
            f"optimizer.{p}.{s}" for p, o in owners.items() if o == rank for s in ("exp_avg", "exp_avg_sq", "step")
        }
        assert all(rows[n]["ranks"] == [rank] for n in own)


@pytest.mark.slow
def test_replicate_and_fsdp1_without_sharding_have_replicas(tmp_path: Path) -> None:
    plans = run("replicate,fsdp1", tmp_path)
    assert_all_with_all(plans["replicate"])
    assert_equal_where_compared(plans["fsdp1"])
    assert plans["fsdp1"][0]["_flat_param"]["ranks"] == list(range(WORLD))


# -- without other ranks -----------------------------------------------------------------------------------------------
def test_master_weights_are_checked_at_rest_and_replicas_can_be_given() -> None:
    model = nn.Linear(4, 4)
    master = nn.Parameter(model.weight.detach().clone())
    optimizer = torch.optim.SGD([master, model.bias], lr=0.1, momentum=0.9)
    master.grad, model.bias.grad = torch.ones(4, 4), torch.ones(4)
    optimizer.step()
    found = {c.name: c for c in plan(model, optimizer, World(1, 4), replicas={"optimizer.group0.*": [3, 1]})}
    assert found["optimizer.group0.0"].kind is Kind.MASTER
    assert found["optimizer.group0.0"].ranks == (1, 3)
    assert found["optimizer.group0.0.momentum_buffer"].ranks == (1, 3)
    assert found["weight"].ranks == (1,)
    assert found["optimizer.bias.momentum_buffer"].at_rest


def test_tensors_are_read_anew_each_time() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    found = {c.name: c for c in plan(model, optimizer, World(0, 1))}
    state = optimizer.state[model.weight]
    state["momentum_buffer"] = replaced = torch.zeros(4, 4)
    assert found["optimizer.weight.momentum_buffer"].read() is replaced
    del state["momentum_buffer"]
    assert found["optimizer.weight.momentum_buffer"].read() is None
    model.weight = nn.Parameter(torch.ones(4, 4))
    assert found["weight"].read() is model.weight


def test_shared_and_empty_and_lazy_tensors_are_no_trouble() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "lazy": nn.LazyLinear(3), "none": nn.Linear(0, 4, bias=False)})
    model["b"] = nn.Linear(4, 4)
    model["b"].weight = model["a"].weight
    assert [c.name for c in plan(model, (), World(0, 1))] == ["a.bias", "a.weight", "b.bias"]


def test_buffers_are_compared_only_when_named_or_synchronised() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3))
    model.register_buffer("mask", torch.ones(2))
    names = {c.name for c in plan(model, (), World(0, 1)) if c.kind is Kind.BUFFER}
    assert names == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    named = {c.name for c in plan(model, (), World(0, 1), buffers=["ma*"]) if c.kind is Kind.BUFFER}
    assert named == names | {"mask"}
