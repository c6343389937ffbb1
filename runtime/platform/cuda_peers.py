"""Exchange of tensors between ranks and stages on CUDA devices.

Between threads of a process, tensors are copied from device to device. Between processes, NCCL sends them on separate streams.
A message over the host's link precedes each copy, so no device waits for a stage that has failed. NCCL does not support two
ranks on one device. Processes that share a device, as in tests, therefore send tensors through host memory."""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

import ops
from ops.collective.peer_memory import PeerMemory
from runtime.parallel.group import Gone, HostRank
from runtime.parallel.links import HostLink, Link, ThreadLink, Ways
from runtime.parallel.stages import PipelineStage


class CudaRank:
    """Collective operations (`Peers`) of a rank on a CUDA device. Create it on the rank's thread, on all ranks at the same time."""

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


class CudaStage(PipelineStage):
    """Pipeline stage on a CUDA device. Create it on the stage's thread, with its device as the current one."""

    def __init__(self, ways: Ways, num_tensors: int, width: int, dtype: torch.dtype, max_num_tokens: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(device_ways(ways, device), num_tensors, width, dtype)

        def room() -> Tensor:
            return torch.zeros((num_tensors, max_num_tokens, width), dtype=dtype, device=device)

        self._in = None if ways.before is None else room()
        self._out = None if ways.behind is None else room()

    def incoming(self, num_tokens: int) -> Sequence[Tensor]:
        """Return copies of the received tensors, which layers may modify. Without copies, padding rows would grow in every step."""
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


_LENGTH = struct.Struct("<I")
_JOIN_LIMIT = timedelta(seconds=120)


def device_ways(ways: Ways, device: torch.device) -> Ways:
    """Return links like `ways`, but for tensors of `device`. All stages must call this function at the same time."""

    def giving(link: Link | None) -> Link | None:
        return None if link is None else _joined(link, device, gives=True)

    def taking(link: Link | None) -> Link | None:
        return None if link is None else _joined(link, device, gives=False)

    # Both ends must join a link together, so all stages join links in the same order: hidden states from the first stage on, then
    # samples by receiving stage.
    before, behind = taking(ways.before), giving(ways.behind)
    drawn = taking(ways.drawn)
    takers = {taker: _joined(link, device, gives=True) for taker, link in sorted(ways.takers.items())}
    return ways._replace(before=before, behind=behind, drawn=drawn, takers=takers)


def _joined(link: Link, device: torch.device, *, gives: bool) -> Link:
    if isinstance(link, ThreadLink):
        return PeerLink(link, device, gives=gives)
    assert isinstance(link, HostLink)
    mine = str(torch.cuda.get_device_properties(device).uuid)
    _say(link, mine)
    if _hear(link) == mine:
        return HostCopies(link, device, gives=gives)
    return NcclLink(link, device, gives=gives)


def _say(link: HostLink, what: object) -> None:
    data = json.dumps(what).encode()
    link.send(_LENGTH.pack(len(data)) + data)


def _hear(link: HostLink) -> Any:
    length = bytearray(_LENGTH.size)
    link.receive(memoryview(length))
    data = bytearray(*_LENGTH.unpack(length))
    link.receive(memoryview(data))
    return json.loads(data)


class PeerLink:
    """Implementation of `Link` between two threads with a device each. Copies run on a stream of the receiving device.

    An event is recorded after each copy, before the receiving thread gets the tensors, so it cannot read them too early."""

    def __init__(self, words: ThreadLink, device: torch.device, *, gives: bool) -> None:
        self._words = words
        if not gives:
            words.arrivals = torch.cuda.Stream(device)

    def give(self, tensors: Sequence[Tensor]) -> None:
        arrivals: torch.cuda.Stream = self._words.arrivals
        with torch.cuda.stream(arrivals):  # torch synchronises both current streams
            copies = [torch.empty_like(tensor, device=arrivals.device) for tensor in tensors]
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(arrivals)
        self._words.put((copies, event))

    def leave(self) -> None:
        self._words.leave()

    def take(self, into: Sequence[Tensor]) -> None:
        copies, event = self._words.get()
        computing = torch.cuda.current_stream()
        computing.wait_event(event)
        for room, copy in zip(into, copies, strict=True):
            room.copy_(copy)
            copy.record_stream(computing)  # it was created on another stream


class NcclLink:
    """Implementation of `Link` over NCCL. Each link has its own communicator, so that links do not block each other."""

    def __init__(self, words: HostLink, device: torch.device, *, gives: bool) -> None:
        """Connect to the other process. `words`: link between the hosts, which announces each copy."""
        dist: Any = import_module("torch.distributed")  # the import takes a second
        self._words, self._other = words, 1 if gives else 0
        self._stream = torch.cuda.Stream(device)
        self._sent: deque[tuple[Any, list[Tensor]]] = deque()
        if gives:
            host = words.connection.getsockname()[0]
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_JOIN_LIMIT)
            _say(words, [host, store.port])
        else:
            host, port = _hear(words)
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_JOIN_LIMIT)
        options = dist.ProcessGroupNCCL.Options()
        self._store = store
        self._group = dist.ProcessGroupNCCL(store, 0 if gives else 1, 2, options)
        # The first use creates the communicator: now instead of within a step.
        probe = [torch.full((1,), 7.0, device=device)] if gives else [torch.zeros(1, device=device)]
        if gives:
            self.give(probe)
        else:
            self.take(probe)
        torch.cuda.synchronize(device)
        if float(probe[0]) != 7.0:
            raise RuntimeError(f"NCCL does not reach {words.where}")

    def give(self, tensors: Sequence[Tensor]) -> None:
        computing = torch.cuda.current_stream()
        copies = [tensor.clone() for tensor in tensors]  # the next step overwrites them
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            for copy in copies:
                copy.record_stream(self._stream)
                self._sent.append((self._group.send([copy], self._other, 0), [copy]))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        self._words.send_given()

    def leave(self) -> None:
        self._words.leave()

    def take(self, into: Sequence[Tensor]) -> None:
        self._words.await_word()
        computing = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):  # in parallel with the previous step, which still reads `into`
            arrived = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in into]
            for tensor in arrived:
                self._group.recv([tensor], self._other, 0).wait()  # blocks this stream, not the host
        computing.wait_stream(self._stream)
        for room, tensor in zip(into, arrived, strict=True):
            room.copy_(tensor)
            tensor.record_stream(computing)


class HostCopies:
    """Implementation of `Link` through host memory, for stages that share a device. A thread sends, so `give` does not block."""

    def __init__(self, link: HostLink, device: torch.device, *, gives: bool) -> None:
        self._link, self._device = link, device
        self._unsent: SimpleQueue[Callable[[], None]] = SimpleQueue()
        if gives:
            Thread(target=self._send, name="oneloop-link", daemon=True).start()

    def _send(self) -> None:
        try:
            while True:
                self._unsent.get()()
        except Gone:
            pass  # the receiver has ended, which this process detects elsewhere

    def give(self, tensors: Sequence[Tensor]) -> None:
        copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        computed = torch.cuda.Event(blocking=True)
        computed.record()

        def send() -> None:
            computed.synchronize()
            self._link.give(copies)

        self._unsent.put(send)

    def leave(self) -> None:
        self._unsent.put(self._link.leave)

    def take(self, into: Sequence[Tensor]) -> None:
        taken = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in into]
        self._link.take(taken)
        for room, tensor in zip(into, taken, strict=True):
            room.copy_(tensor, non_blocking=True)
