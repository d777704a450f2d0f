"""The state that is saved: a sharded module whose every element follows from the save's number."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

TENSORS = 32
PERIOD = 8191  # elements count up to it and begin again; with what is added, exact in float32


class Sharded(nn.Module):
    """*gib* of float32 over all ranks: parameters split along their first dimension, as FSDP2 leaves them."""

    def __init__(self, gib: float) -> None:
        super().__init__()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (world_size,))
        rows = max(1, int(gib * 2**30) // 4 // TENSORS // world_size // 1024)
        self.first = rank * rows * 1024  # global index of this rank's first element in each tensor
        self.locals: list[Tensor] = []
        for i in range(TENSORS):
            local = torch.empty(rows, 1024)
            parameter = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False), requires_grad=False)
            self.register_parameter(f"weight{i}", parameter)
            self.locals.append(parameter.data.to_local())
        self._pattern = (torch.arange(self.first, self.first + rows * 1024) % PERIOD).float().view(rows, 1024)

    @property
    def local_bytes(self) -> int:
        return sum(t.nbytes for t in self.locals)

    def set_to(self, number: int) -> None:
        """The state that save *number* must hold."""
        for i, local in enumerate(self.locals):
            torch.add(self._pattern, float(100 * i + 3000 * number), out=local)

    def overwrite(self) -> None:
        """What an optimizer does right after a save."""
        for local in self.locals:
            local.add_(0.25)

    def clear(self) -> None:
        for local in self.locals:
            local.zero_()

    def wrong_elements(self, number: int) -> int:
        """How many elements are not those of save *number*."""
        wrong = 0
        for i, local in enumerate(self.locals):
            wanted = self._pattern + float(100 * i + 3000 * number)
            if not torch.equal(local, wanted):
                wrong += int((local != wanted).sum())
        return wrong
