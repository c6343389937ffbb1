"""SideStream: what is computed beside steps on a CUDA device: enqueued by a thread of its own, on a stream of its own.

Neither the event loop nor a step's kernels wait for it; the device runs both as it has room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ops.transfer import is_remote
from runtime.platform.cuda_event import EventWaiter
from runtime.runner.worker import Worker


class SideStream:
    """Create and call it on the event loop."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._worker, self._waiter = Worker("oneloop-encoder"), EventWaiter()
        self._stream = torch.cuda.Stream(device) if is_remote(device) else None

    def run(self, work: Callable[[], Sequence[Tensor]]) -> asyncio.Future[Any]:
        """See `Lane.beside`."""
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._worker.enqueue(partial(self._enqueue, work, ended))
        return ended

    def _enqueue(self, work: Callable[[], Sequence[Tensor]], ended: asyncio.Future[Any]) -> None:
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                for tensor in work():
                    if self._stream is not None:  # steps read it: its memory is free when these have, too
                        tensor.record_stream(torch.cuda.default_stream(self._device))
                event = torch.cuda.Event(blocking=True)
                event.record()
        except BaseException as error:
            self._waiter.give_up(ended, error)
        else:
            self._waiter.watch(event, ended)

    async def close(self) -> bool:
        """False where something is still computed."""
        has_ended = await self._worker.close()
        self._waiter.close()
        return has_ended and self._waiter.has_ended
