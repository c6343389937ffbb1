"""One stage of a pipeline on a CUDA device of its own.

A captured graph reads what comes in, and leaves what goes out, at addresses that stay. Links (`cuda_links.py`) copy from there and
to there, in the order of the stage's stream, so no host waits between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.parallel.links import Ways
from runtime.parallel.stages import Stage
from runtime.platform.cuda_links import device_ways


class CudaStage(Stage):
    """Made on the stage's thread, whose device is current."""

    def __init__(self, ways: Ways, num_tensors: int, width: int, dtype: torch.dtype, max_num_tokens: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(device_ways(ways, device), num_tensors, width, dtype)

        def room() -> Tensor:
            return torch.zeros((num_tensors, max_num_tokens, width), dtype=dtype, device=device)

        self._in = None if ways.before is None else room()
        self._out = None if ways.behind is None else room()

    def incoming(self, num_tokens: int) -> Sequence[Tensor]:
        """Return a copy, which the layers may write to. Padding rows would grow from step to step otherwise."""
        assert self._in is not None, "nothing comes to the first stage"
        return tuple(self._in[:, :num_tokens].clone())

    def outgoing(self, tensors: Sequence[Tensor]) -> None:
        assert self._out is not None, "the last stage hands nothing on"
        for room, tensor in zip(self._out, tensors, strict=True):
            room[: len(tensor)].copy_(tensor)

    def _place(self, num_tokens: int) -> Sequence[Tensor]:
        assert self._in is not None, "nothing comes to the first stage"
        return tuple(self._in[:, :num_tokens])

    def _handed_on(self, num_tokens: int) -> Sequence[Tensor]:
        assert self._out is not None, "the last stage hands nothing on"
        return tuple(self._out[:, :num_tokens])
