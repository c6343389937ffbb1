"""CudaRank: one of the ranks of a model, on a CUDA device of its own; what they exchange goes from device to device."""

from __future__ import annotations

import torch
from torch import Tensor

import ops
from ops.collective.peer_memory import PeerMemory
from runtime.parallel.group import HostRank


class CudaRank:
    """See `Peers`. Made on the rank's thread, by all ranks at once."""

    def __init__(self, rank: HostRank) -> None:
        self.number, self.size, self._host = rank.number, rank.size, rank
        device = torch.device("cuda", torch.cuda.current_device())
        self._memory = PeerMemory(rank.number, rank.size, device)
        own = [device.index, *self._memory.addresses]
        every = rank.concat(torch.tensor([own])).view(rank.size, len(own)).tolist()
        self._memory.meet([addresses for _, *addresses in every], [index for index, *_ in every])

    def sum(self, x: Tensor) -> Tensor:
        return self._host.sum(x) if self._host.is_alone else self._memory.sum(x)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._memory.can_norm(x, weight):
            if self._host.is_alone:
                return residual.clone()
            return self._memory.add_rms_norm(x, residual, weight, eps)
        return ops.add_rms_norm(self.sum(x), residual, weight, eps)

    def concat(self, x: Tensor) -> Tensor:
        return self._host.concat(x) if self._host.is_alone else self._memory.concat(x)
