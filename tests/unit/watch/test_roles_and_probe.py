"""With whom a rank can be compared, and the fixed piece of work that makes all comparable."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.core.timing import Role
from steadyrun.node.straggling import read_role
from steadyrun.watch.probe import EVERY, FixedWork, Rhythm
from steadyrun.watch.roles import coordinates_of, key_of, write_role


# -- roles -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["dp", "DP", "dp_shard", "ddp", "data_parallel", "fsdp", "hsdp", "replicate", "dim_0"])
def test_ranks_that_differ_in_data_parallelism_only_are_comparable(name: str) -> None:
    assert key_of({name: 1, "pp": 2}) == key_of({name: 7, "pp": 2}) == [["pp", 2]]


@pytest.mark.parametrize("name", ["pp", "tp", "cp", "ep", "stage"])
def test_ranks_that_differ_otherwise_are_not(name: str) -> None:
    assert key_of({name: 1, "dp": 0}) != key_of({name: 2, "dp": 0})


def test_the_order_of_the_dimensions_does_not_matter() -> None:
    assert key_of({"tp": 1, "pp": 2}) == key_of({"pp": 2, "tp": 1}) == [["pp", 2], ["tp", 1]]


class Mesh:
    """A DeviceMesh as far as it is asked; *root* is found under torch's private name."""

    def __init__(self, at: Any, names: Any = None, root: Any = None) -> None:
        self.at, self.mesh_dim_names = at, names
        if root is not None:
            self._get_root_mesh = (lambda: root) if not isinstance(root, Exception) else self._fail
        self.asked = 0

    def get_coordinate(self) -> Any:
        self.asked += 1
        if isinstance(self.at, Exception):
            raise self.at
        return self.at

    def _fail(self) -> Any:
        raise RuntimeError("no root")


def of(mesh: Any) -> SimpleNamespace:
    return SimpleNamespace(device_mesh=mesh)


def test_a_slice_of_a_mesh_leads_to_the_whole() -> None:
    root = Mesh([1, 0, 3], ("pp", "tp", "dp"))
    part = Mesh([3], ("dp",), root)
    assert coordinates_of([of(part), SimpleNamespace(), of(part)]) == {"dp": 3, "pp": 1, "tp": 0}
    assert part.asked == 1, "each mesh is asked once"


def test_a_mesh_without_names_gives_numbers() -> None:
    assert coordinates_of([of(Mesh([2, 5]))]) == {"dim_0": 2, "dim_1": 5}


def test_meshes_that_say_nothing_are_left_out() -> None:
    without = [Mesh(None), Mesh(RuntimeError("gone")), Mesh([1], ("pp",), RuntimeError("no root")), object(), None]
    assert coordinates_of(map(of, without)) == {"pp": 1}
    assert coordinates_of([]) == {}


def test_what_a_rank_writes_its_agent_reads(tmp_path: Path) -> None:
    write_role(str(tmp_path), {"dp": 3, "pp": 1})
    path = tmp_path / "role.json"
    assert json.loads(path.read_text()) == {
        "schema": "steadyrun.role/1",
        "mesh": {"dp": 3, "pp": 1},
        "key": [["pp", 1]],
    }
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["role.json"]
    mine = read_role(path)
    write_role(str(tmp_path), {"dp": 0, "pp": 1})
    assert mine is not None
    assert mine == read_role(path)
    assert mine.name == "pp=1"


def test_of_data_parallel_ranks_all_have_one_role(tmp_path: Path) -> None:
    write_role(str(tmp_path), {"dp": 3})
    assert read_role(tmp_path / "role.json") == Role("all", ())


def test_a_folder_that_is_gone_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        write_role(str(tmp_path / "gone"), {"dp": 0})


# -- the rhythm of probes ----------------------------------------------------------------------------------------------
def probed(rhythm: Rhythm, steps: int, step_s: float, cost_s: float) -> list[int]:
    found = []
    for step in range(steps):
        if rhythm.is_due(step, step_s):
            found.append(step)
            rhythm.took(cost_s)
    return found


def test_long_steps_are_probed_every_hundred() -> None:
    assert probed(Rhythm(), 501, 1.0, 0.005) == [100, 200, 300, 400, 500]


@settings(max_examples=25)
@given(st.floats(0.0005, 2.0), st.floats(0.001, 0.2))
def test_probes_take_less_than_a_thousandth_of_the_time(step_s: float, cost_s: float) -> None:
    steps = 20_000
    first, *later = probed(Rhythm(), steps, step_s, cost_s) or [steps]
    assert first >= EVERY
    assert all(step % EVERY == 0 for step in later)
    if len(later) > 8:  # what it costs is known by then
        at = later[7]
        assert (len(later) - 8) * cost_s <= 0.0015 * (steps - at) * step_s + cost_s


def test_the_same_steps_are_probed_on_all_ranks_though_their_costs_differ_a_little() -> None:
    assert probed(Rhythm(), 2000, 0.020, 0.0050) == probed(Rhythm(), 2000, 0.021, 0.0055)


def test_a_probe_that_could_not_be_made_is_hardly_tried_again() -> None:
    rhythm = Rhythm()
    rhythm.cost_s = math.inf
    assert probed(rhythm, 100_000, 1.0, 0.005) == []


def test_probes_become_frequent_again_when_steps_become_long() -> None:
    rhythm = Rhythm()
    assert probed(rhythm, 5000, 0.001, 0.005) == []
    assert rhythm.every > 1000
    assert len(probed(rhythm, 5000, 1.0, 0.005)) >= 40


# -- the work ----------------------------------------------------------------------------------------------------------
class FakeTorch:
    """Notes what is asked of it."""

    float32 = "float32"

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.products = 0
        self.depth = 0
        self.copies = 0

    def no_grad(self) -> FakeTorch:
        return self

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *args: object) -> None:
        self.depth -= 1

    def full(self, shape: Any, value: float, **kind: Any) -> FakeTorch:
        assert self.depth == 1, "needs no gradients"
        self.made.append((shape, kind))
        return self

    def empty(self, shape: Any, **kind: Any) -> FakeTorch:
        return self.full(shape, 0.0, **kind)

    def mm(self, a: Any, b: Any, out: Any) -> None:
        assert self.depth == 1
        self.products += 1

    def copy_(self, source: Any) -> None:
        self.copies += 1


@pytest.mark.parametrize(("kind", "side", "products"), [("cpu", 256, 6), ("cuda", 2048, 100), ("xpu", 256, 6)])
def test_the_work_is_the_same_in_every_step(
    monkeypatch: pytest.MonkeyPatch, kind: str, side: int, products: int
) -> None:
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    device = SimpleNamespace(type=kind)
    work = FixedWork(device)
    assert torch.made[0] == ((side, side), {"device": device, "dtype": "float32"})
    made = len(torch.made)
    for times in (1, 2):
        work.run()
        assert (torch.products, torch.copies) == (times * products, times)
    assert len(torch.made) == made, "nothing is allocated in a step"
