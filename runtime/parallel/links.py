"""Links: one-way channels through which the stages of a model send tensors to each other.

Tensors are received in the order in which they are sent. A stage that failed in a step sends a failure instead, and the receiving
stage fails in that step only. If the stage at the other end has ended, sending and receiving raise `Gone`.

Between threads of a process a link is a queue (`ThreadLink`), between processes a connection (`HostLink`). A connection sends
one byte per step, which marks whether tensors follow. For links of CUDA devices see `runtime/platform/cuda_peers.py`."""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from runtime.parallel.group import Apart, Gone, Group, HostRank

_GIVEN, _LEFT = b"\1", b"\0"
_HELLO = struct.Struct("<HHH")  # sending stage, kind and line
SECRET_BYTES = 32
CONNECT_LIMIT_S = 60.0  # for connecting to an open port
HELLO_LIMIT_S = 5.0  # for a new connection to send the secret
_FIRST_BYTES = SECRET_BYTES + _HELLO.size
_FAR_LEFT = "another stage has failed in this step"


class LinkKind(IntEnum):
    """Purpose of a link. HIDDEN: hidden states, to the next stage. DRAWS: sampled ids of the last stage, to each earlier stage.
    UP and DOWN: numbers on which all stages agree at start-up, to the first stage and back."""

    HIDDEN = 0
    DRAWS = 1
    UP = 2
    DOWN = 3


class Link(Protocol):
    """One end of a one-way link. For each `take` of the receiver, the sender calls `give` or `leave` once."""

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors, after all device work that this thread has enqueued. They may be modified afterwards. Raises Gone."""
        ...

    def leave(self) -> None:
        """Send a failure instead of tensors, because this stage has failed in its step. Raises Gone."""
        ...

    def take(self, into: Sequence[Tensor]) -> None:
        """Wait for tensors and copy them to `into`, before later work of this thread. Raises Apart (failure of the step) or
        Gone."""
        ...


class ThreadLink:
    """Both ends of a `Link` between two threads. `arrivals`: CUDA stream of the receiving device, used by `PeerLink`."""

    def __init__(self) -> None:
        self._given: SimpleQueue[Any] = SimpleQueue()
        self._gone: Gone | None = None
        self.arrivals: Any = None

    def give(self, tensors: Sequence[Tensor]) -> None:
        self.put([tensor.clone() for tensor in tensors])

    def leave(self) -> None:
        self.put(Apart(_FAR_LEFT))

    def take(self, into: Sequence[Tensor]) -> None:
        for room, tensor in zip(into, self.get(), strict=True):
            room.copy_(tensor)

    def end(self, gone: Gone) -> None:
        """Fail all current and later receives with `gone`."""
        self._gone = self._gone or gone
        self.put(None)

    def put(self, given: Any) -> None:
        self._given.put(given)

    def get(self) -> Any:
        """Wait for the next item and return it. Raises Apart if it is a failure, or Gone."""
        given = self._given.get()
        if self._gone is not None:
            self.put(None)
            raise self._gone
        if isinstance(given, Apart):
            raise given
        return given


class HostLink:
    """Implementation of `Link` over a socket, for contiguous host tensors. `where`: name of the stage at the other end."""

    def __init__(self, connection: socket.socket, where: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self.connection, self.where = connection, where

    def give(self, tensors: Sequence[Tensor]) -> None:
        self.send(_GIVEN + b"".join(map(_bytes, tensors)) if _are_small(tensors) else _GIVEN)
        if not _are_small(tensors):
            for tensor in tensors:
                self.send(_bytes(tensor))

    def leave(self) -> None:
        self.send(_LEFT)

    def take(self, into: Sequence[Tensor]) -> None:
        self.await_word()
        for tensor in into:
            self.receive(_bytes(tensor))

    # --- for links that send tensors by other channels ------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> None:
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise Gone(self.where) from error

    def send_given(self) -> None:
        self.send(_GIVEN)

    def receive(self, room: memoryview) -> None:
        """Receive bytes until the buffer `room` is full."""
        try:
            while room:
                num = self.connection.recv_into(room)
                if not num:
                    raise Gone(self.where)
                room = room[num:]
        except OSError as error:
            raise Gone(self.where) from error

    def await_word(self) -> None:
        """Wait until the sender sends tensors. Raises Apart if it sends a failure instead."""
        word = bytearray(1)
        self.receive(memoryview(word))
        if word == _LEFT:
            raise Apart(_FAR_LEFT)


_SMALL_BYTES = 64 << 10  # for fewer bytes, one write is cheaper than two


def _are_small(tensors: Sequence[Tensor]) -> bool:
    return sum(tensor.nbytes for tensor in tensors) <= _SMALL_BYTES


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(cast("Any", tensor.detach().contiguous().flatten().view(torch.uint8).numpy()))


class Ways(NamedTuple):
    """Links of stage `number` of `size` in one line. A line connects ranks of the same number, one in each stage.

    `before`: from the previous stage. `behind`: to the next stage. `drawn`: sampled ids from the last stage. `takers`: links
    from the last stage to all others, by stage. `end`: ends all links of the line; its argument names the stage that ended."""

    number: int
    size: int
    before: Link | None = None
    behind: Link | None = None
    drawn: Link | None = None
    takers: Mapping[int, Link] = {}
    end: Callable[[str], None] = lambda where: None


class ThreadLine:
    """Links of one line (see `Ways`) whose stages are threads of this process."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._hidden = [ThreadLink() for _ in range(size - 1)]
        self._drawn = [ThreadLink() for _ in range(size - 1)]

    def ways(self, number: int) -> Ways:
        is_last = number == self._size - 1
        return Ways(
            number,
            self._size,
            self._hidden[number - 1] if number else None,
            None if is_last else self._hidden[number],
            None if is_last else self._drawn[number],
            dict(enumerate(self._drawn)) if is_last else {},
            self.end,
        )

    def end(self, where: str = "") -> None:
        """Fail all waits of the stages for each other. `where`: name of the stage that has ended, if known."""
        for link in (*self._hidden, *self._drawn):
            link.end(Gone(where))


class LinkPort:
    """Listening socket of this process's stage. Other processes that connect to it must send the model's secret first."""

    def __init__(self, host: str, secret: bytes) -> None:
        """Start listening at `host`, an address of this machine that the other processes can reach. Raises OSError."""
        self._socket = socket.create_server((host, 0), backlog=1024)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._secret = secret
        self._came: dict[tuple[int, int, int], socket.socket] = {}
        self._made: list[socket.socket] = []

    def connected(
        self, stage: int, num_stages: int, num_lines: int, addresses: Sequence[tuple[str, int]]
    ) -> StageLinks:
        """Connect stage number `stage` to all other stages, which listen at `addresses`. Block until they are connected.

        Raises Gone, or OSError if a stage cannot be reached."""
        last = num_stages - 1

        def where(other: int) -> str:
            return f"stage {other} of {num_stages}"

        def to(other: int, kind: LinkKind, line: int = 0) -> HostLink:
            made = socket.create_connection(addresses[other], CONNECT_LIMIT_S)
            self._made.append(made)
            made.sendall(self._secret + _HELLO.pack(stage, kind, line))
            return HostLink(made, where(other))

        def of(other: int, kind: LinkKind, line: int = 0) -> HostLink:
            return HostLink(self._awaited((other, kind, line)), where(other))

        lines = range(num_lines)
        behind = [to(stage + 1, LinkKind.HIDDEN, line) if stage < last else None for line in lines]
        takers = [
            {taker: to(taker, LinkKind.DRAWS, line) for taker in range(last)} if stage == last else {} for line in lines
        ]
        others = range(1, num_stages) if not stage else (0,)
        outgoing = [to(other, LinkKind.UP if stage else LinkKind.DOWN) for other in others]
        before = [of(stage - 1, LinkKind.HIDDEN, line) if stage else None for line in lines]
        drawn = [of(last, LinkKind.DRAWS, line) if stage < last else None for line in lines]
        incoming = [of(other, LinkKind.DOWN if stage else LinkKind.UP) for other in others]
        self._socket.close()
        ways = tuple(Ways(stage, num_stages, *each) for each in zip(before, behind, drawn, takers, strict=True))
        return StageLinks(ways, Agreement(not stage, outgoing, incoming))

    def _awaited(self, hello: tuple[int, int, int]) -> socket.socket:
        """Wait for the connection that starts with `hello`, or until this port is closed. May take as long as a download."""
        while hello not in self._came:
            connection, _ = self._socket.accept()
            connection.settimeout(HELLO_LIMIT_S)
            said = b""
            with suppress(OSError):
                while len(said) < _FIRST_BYTES and (piece := connection.recv(_FIRST_BYTES - len(said))):
                    said += piece
            if len(said) < _FIRST_BYTES or not hmac.compare_digest(said[:SECRET_BYTES], self._secret):
                connection.close()
                continue
            self._came[_HELLO.unpack(said[SECRET_BYTES:])] = connection
        return self._came[hello]

    def close(self) -> None:
        """Close this port and its links. All waits on them fail."""
        for each in (self._socket, *self._came.values(), *self._made):
            with suppress(OSError):  # shutdown wakes a blocked thread; close does not
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Agreement:
    """Agreement on numbers between the processes of a model at start-up. `outgoing`, `incoming`: the first stage's links to and
    from all others, or another stage's links to and from the first."""

    def __init__(self, is_first: bool, outgoing: Sequence[HostLink], incoming: Sequence[HostLink]) -> None:
        self._is_first, self._outgoing, self._incoming = is_first, outgoing, incoming

    def least(self, number: int) -> int:
        """Return the minimum of `number` over all processes. Block until all have called this method. Raises Gone."""
        numbers = [torch.tensor([number])]
        if not self._is_first:
            self._give(numbers[0])
        for each in self._incoming:
            numbers.append(torch.empty_like(numbers[0]))
            each.take(numbers[-1:])
        if not self._is_first:
            return int(numbers[-1])
        least = torch.cat(numbers).min().reshape(1)
        self._give(least)
        return int(least)

    def _give(self, number: Tensor) -> None:
        for each in self._outgoing:
            each.give([number])


class StageLinks(NamedTuple):
    """Links from one process's stage to all others. `ways`: links of each line (see `Ways`)."""

    ways: tuple[Ways, ...]
    agreement: Agreement


class AgreeingRank(HostRank):
    """Rank of a process that computes one stage. `least` returns the minimum over all processes."""

    def __init__(self, group: Group, number: int, device: int, agreement: Agreement) -> None:
        super().__init__(group, number, device)
        self._agreement = agreement

    def least(self, number: int) -> int:
        here = super().least(number)
        return super().least(here if self.number else self._agreement.least(here))
