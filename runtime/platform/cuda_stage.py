"""CudaStage: one of the stages of a model, on a CUDA device of its own; what they hand on goes from device to device.

A graph reads what comes in, and leaves what goes out, at addresses that stay. From there a stage copies it, behind its step, into a
slot on the next device, and that one copies it to where its own graph reads, before its step: so neither waits for the other's
step to end, but as far as there are slots. Copies arrive on a stream of their own. Who waits for an event waits on the host first
until it has been recorded, so no order of threads can make a stage read too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ops.transfer import index_on
from runtime.parallel.stages import Draws, HostStage, Line, Passage, RowTables

_SLOTS = 2


class _Slot(NamedTuple):
    """Room on a device for what a stage is handed, [n, T, H]. `free`: when it has been read last."""

    tensors: Tensor
    free: torch.cuda.Event | None


class _Arrived(NamedTuple):
    slot: _Slot
    event: torch.cuda.Event


class _Tables(NamedTuple):
    """Copies of the last stage's tables, and when they are there."""

    tables: RowTables
    event: torch.cuda.Event


class CudaStage(HostStage):
    """Made on the stage's thread, whose device is current. `slots`: places for what is handed to it."""

    slots = _SLOTS

    def __init__(
        self, line: Line, number: int, num_tensors: int, width: int, dtype: torch.dtype, max_num_tokens: int
    ) -> None:
        super().__init__(line, number, num_tensors, width, dtype)
        self.device = torch.device("cuda", torch.cuda.current_device())

        def room() -> Tensor:
            return torch.zeros((num_tensors, max_num_tokens, width), dtype=dtype, device=self.device)

        self._in = room() if number else None
        self._out = None if self.is_last else room()
        self._arrivals, self._draws = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        line.stages[number] = self
        if number:
            for _ in range(self.slots):
                line.slots[number].put(_Slot(room(), None))

    def incoming(self, num_tokens: int) -> Sequence[Tensor]:
        """A copy, which the layers may write to: what is padding in a step would grow from one to the next."""
        assert self._in is not None, "nothing comes to the first stage"
        return tuple(self._in[:, :num_tokens].clone())

    def outgoing(self, tensors: Sequence[Tensor]) -> None:
        assert self._out is not None, "the last stage hands nothing on"
        for room, tensor in zip(self._out, tensors, strict=True):
            room[: len(tensor)].copy_(tensor)

    def _receive(self, passage: Passage) -> None:
        slot, event = passage.take(self.number)
        assert self._in is not None
        torch.cuda.current_stream().wait_event(event)
        for room, tensor in zip(self._in, slot.tensors, strict=True):
            room[: passage.num_tokens].copy_(tensor[: passage.num_tokens])
        free = torch.cuda.Event()
        free.record()
        self.line.slots[self.number].put(_Slot(slot.tensors, free))

    def _pass_on(self, passage: Passage) -> None:
        """Behind what this thread has enqueued. Waits for a slot, which a step before this one gives back."""
        target, slot = self._next(self.number + 1), self.line.slot(self.number + 1)
        assert self._out is not None
        with torch.cuda.stream(
            target._arrivals
        ):  # torch copies behind both devices' current streams, and has both wait
            if slot.free is not None:
                target._arrivals.wait_event(slot.free)
            for room, tensor in zip(slot.tensors, self._out, strict=True):
                room[: passage.num_tokens].copy_(tensor[: passage.num_tokens], non_blocking=True)
            event = torch.cuda.Event()
            event.record(target._arrivals)
        passage.give(self.number + 1, _Arrived(slot, event))

    def _tell(self, draws: Draws) -> None:
        assert self.tables is not None
        for number in draws.takers:
            target = self._next(number)
            with torch.cuda.stream(target._draws):
                copies = RowTables(*(torch.empty_like(table, device=target.device) for table in self.tables))
                for copy, table in zip(copies, self.tables, strict=True):
                    copy.copy_(table, non_blocking=True)
                event = torch.cuda.Event()
                event.record(target._draws)
            draws.give(number, _Tables(copies, event))

    def _learn(self, draws: Draws) -> None:
        given, event = draws.take(self.number)
        stream = torch.cuda.current_stream()
        stream.wait_event(event)
        assert self.tables is not None
        self.tables.last_ids.copy_(given.last_ids)
        self.tables.draft_ids.copy_(given.draft_ids)
        if draws.rows:
            index = index_on(self.device, draws.rows)
            self.tables.num_computed[index] = given.num_computed[index]
        for copy in given:
            copy.record_stream(stream)  # it was made on another one

    def _next(self, number: int) -> CudaStage:
        stage = self.line.stages[number]
        assert isinstance(stage, CudaStage)
        return stage
