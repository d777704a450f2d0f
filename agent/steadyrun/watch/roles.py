"""Which ranks this one can be compared with, and the file that says so to its agent."""

from __future__ import annotations

import os
import sys

from steadyrun.watch.files import write_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

__all__ = ["SCHEMA", "coordinates_among", "coordinates_of", "key_of", "write_role"]

SCHEMA = "steadyrun.role/1"
_DATA_PARALLEL = ("dp", "ddp", "data", "fsdp", "hsdp", "replicate", "shard", "batch")


def is_data_parallel(name: str) -> bool:
    """Ranks that differ in this dimension only do the same work; ``dim_0`` and the like say nothing, so they count."""
    return name.lower().startswith((*_DATA_PARALLEL, "dim"))


def key_of(coordinates: Mapping[str, int]) -> list[list[Any]]:
    """What two ranks must have in common to be comparable: all coordinates but the data-parallel ones."""
    return [[name, at] for name, at in sorted(coordinates.items()) if not is_data_parallel(name)]


def coordinates_of(parameters: Iterable[Any]) -> dict[str, int]:
    """This rank's place in the meshes of the model's distributed tensors; empty where there are none."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or id(mesh) in seen:
            continue
        seen.add(id(mesh))
        for one in (mesh, _root_of(mesh)):
            try:
                at = one.get_coordinate()
                names = one.mesh_dim_names or [f"dim_{i}" for i in range(len(at))]
            except Exception:  # a mesh that this rank is not in, or of a version that tells it otherwise
                continue
            if at is not None:
                found.update(zip(map(str, names), map(int, at), strict=False))
    return found


def coordinates_among(modules: Iterable[Any]) -> dict[str, int]:
    """This rank's place by the process groups of DDP; empty where all ranks hold one model, or none says.

    Ranks of one such group hold the same part of the model, which is named by the first of them. Their order in it is
    that of the data-parallel replicas.
    """
    for module in modules:
        group = module.__dict__.get("process_group")
        if group is None or type(module).__name__ != "DistributedDataParallel":
            continue
        try:
            distributed = sys.modules["torch.distributed"]
            ranks = distributed.get_process_group_ranks(group)
            if 1 < len(ranks) < distributed.get_world_size():
                return {"dp": ranks.index(distributed.get_rank()), "part": int(ranks[0])}
        except Exception:  # a group of a kind of its own
            continue
    return {}


def _root_of(mesh: Any) -> Any:
    """The mesh that *mesh* is a slice of: it knows the pipeline stage as well. Private in torch, under two names."""
    root = getattr(mesh, "_get_root_mesh", None)
    try:
        return mesh if root is None else root()
    except Exception:
        return mesh


def write_role(rank_dir: str, coordinates: Mapping[str, int]) -> None:
    """Write role.json, whole or not at all. Raises OSError."""
    import json

    told = {"schema": SCHEMA, "mesh": dict(coordinates), "key": key_of(coordinates)}
    write_whole(os.path.join(rank_dir, "role.json"), json.dumps(told).encode())
