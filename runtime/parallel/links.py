"""Links: the ways by which stages of a model hand tensors to each other, each in one direction.

Tensors are taken in the order in which they are given. A stage that failed in a step gives a failure instead, and the stage that
takes it fails in that step alone. A link that has ended means that its other stage has gone.

Between threads of a process a link is a queue (`ThreadLink`), between processes a connection (`HostLink`). On the connection one
byte a step says whether tensors follow. CUDA devices send the tensors by other ways (`runtime/platform/cuda_peers.py`)."""

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
_HELLO = struct.Struct("<HHH")  # from which stage, of which kind, of which line
SECRET_BYTES = 32
CONNECT_LIMIT_S = 60.0  # to a port that is open
HELLO_LIMIT_S = 5.0  # for who has connected to say the secret
_FIRST_BYTES = SECRET_BYTES + _HELLO.size
_FAR_LEFT = "another stage has failed in this step"


class Kind(IntEnum):
    """Purposes of a link. HIDDEN: hidden states, to the next stage. DRAWS: draws of the last stage, to each stage before it. UP and
    DOWN: numbers that all agree on at the start, to the first stage and from it."""

    HIDDEN = 0
    DRAWS = 1
    UP = 2
    DOWN = 3


class Link(Protocol):
    """One end of a link. The giving end calls `give` or `leave` as often as the other end calls `take`."""

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Give tensors, after all that this thread has computed or enqueued. The caller may change them then. Raises Gone."""
        ...

    def leave(self) -> None:
        """Give nothing this time, because this stage has failed. Raises Gone."""
        ...

    def take(self, into: Sequence[Tensor]) -> None:
        """Wait for tensors and write them to `into`, before all that this thread does or enqueues next. Raises Apart, or Gone."""
        ...


class ThreadLink:
    """A `Link` between two threads, both of its ends. `arrivals`: a place for the taking device's stream (`PeerLink`)."""

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
        """Fail all current and later receives."""
        self._gone = self._gone or gone
        self.put(None)

    def put(self, given: Any) -> None:
        self._given.put(given)

    def get(self) -> Any:
        """Wait for what is put next. Raises Apart, or Gone."""
        given = self._given.get()
        if self._gone is not None:
            self.put(None)
            raise self._gone
        if isinstance(given, Apart):
            raise given
        return given


class HostLink:
    """A `Link` of contiguous tensors of the host over a connection. `where`: the name of its other end."""

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

    # --- for links that send tensors by another way ----------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> None:
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise Gone(self.where) from error

    def send_given(self) -> None:
        self.send(_GIVEN)

    def receive(self, room: memoryview) -> None:
        """Wait until `room` is full."""
        try:
            while room:
                num = self.connection.recv_into(room)
                if not num:
                    raise Gone(self.where)
                room = room[num:]
        except OSError as error:
            raise Gone(self.where) from error

    def await_word(self) -> None:
        """Wait until something is given. Raises Apart if the other stage has failed in this step."""
        word = bytearray(1)
        self.receive(memoryview(word))
        if word == _LEFT:
            raise Apart(_FAR_LEFT)


_SMALL_BYTES = 64 << 10  # up to which one write is cheaper than two


def _are_small(tensors: Sequence[Tensor]) -> bool:
    return sum(tensor.nbytes for tensor in tensors) <= _SMALL_BYTES


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(cast("Any", tensor.detach().contiguous().flatten().view(torch.uint8).numpy()))


class Ways(NamedTuple):
    """The links of stage `number` of `size`, of one line. A line has the stages' ranks of one number.

    `before`: from the stage before. `behind`: to the next stage. `drawn`: from the last stage, its draws. `takers`: of the last
    stage, the links to all others, by stage. `end`: ends the line, with the name of the stage that has gone."""

    number: int
    size: int
    before: Link | None = None
    behind: Link | None = None
    drawn: Link | None = None
    takers: Mapping[int, Link] = {}
    end: Callable[[str], None] = lambda where: None


class Line:
    """The links of one line whose stages are all threads of this process."""

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
        """Fail all stages that wait for another. `where`: the stage that has gone, if it is known."""
        for link in (*self._hidden, *self._drawn):
            link.end(Gone(where))


class LinkPort:
    """A port at which other processes connect to the stage of this one. They have to send the model's secret first."""

    def __init__(self, host: str, secret: bytes) -> None:
        """Listen. `host`: an address of this machine that the other processes can connect to. Raises OSError."""
        self._socket = socket.create_server((host, 0), backlog=1024)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._secret = secret
        self._came: dict[tuple[int, int, int], socket.socket] = {}
        self._made: list[socket.socket] = []

    def connected(
        self, stage: int, num_stages: int, num_lines: int, addresses: Sequence[tuple[str, int]]
    ) -> StageLinks:
        """Connect stage number `stage` of a model, whose stages listen at `addresses`. Waits for the other stages.

        Raises Gone, or OSError if a stage cannot be reached."""
        last = num_stages - 1

        def where(other: int) -> str:
            return f"stage {other} of {num_stages}"

        def to(other: int, kind: Kind, line: int = 0) -> HostLink:
            made = socket.create_connection(addresses[other], CONNECT_LIMIT_S)
            self._made.append(made)
            made.sendall(self._secret + _HELLO.pack(stage, kind, line))
            return HostLink(made, where(other))

        def of(other: int, kind: Kind, line: int = 0) -> HostLink:
            return HostLink(self._awaited((other, kind, line)), where(other))

        lines = range(num_lines)
        behind = [to(stage + 1, Kind.HIDDEN, line) if stage < last else None for line in lines]
        takers = [
            {taker: to(taker, Kind.DRAWS, line) for taker in range(last)} if stage == last else {} for line in lines
        ]
        others = range(1, num_stages) if not stage else (0,)
        outgoing = [to(other, Kind.UP if stage else Kind.DOWN) for other in others]
        before = [of(stage - 1, Kind.HIDDEN, line) if stage else None for line in lines]
        drawn = [of(last, Kind.DRAWS, line) if stage < last else None for line in lines]
        incoming = [of(other, Kind.DOWN if stage else Kind.UP) for other in others]
        self._socket.close()
        ways = tuple(Ways(stage, num_stages, *each) for each in zip(before, behind, drawn, takers, strict=True))
        return StageLinks(ways, Agreement(not stage, outgoing, incoming))

    def _awaited(self, hello: tuple[int, int, int]) -> socket.socket:
        """Wait for the connection that begins with `hello`, or until this port is closed. Fetching files may precede it."""
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
        """Fail all waits at this port and its links."""
        for each in (self._socket, *self._came.values(), *self._made):
            with suppress(OSError):  # a thread that waits notices a shutdown, but not a close
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Agreement:
    """Numbers that the processes of a model agree on at the start. `outgoing`, `incoming`: links of the first stage to and from all
    others, or of another stage to and from the first."""

    def __init__(self, is_first: bool, outgoing: Sequence[HostLink], incoming: Sequence[HostLink]) -> None:
        self._is_first, self._outgoing, self._incoming = is_first, outgoing, incoming

    def least(self, number: int) -> int:
        """Return the smallest number that a process gives. Waits for all of them. Raises Gone."""
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
    """The links of the stage of one process to all others. `ways`: by line."""

    ways: tuple[Ways, ...]
    agreement: Agreement


class AgreeingRank(HostRank):
    """A rank of the one stage that this process computes. Its numbers are agreed on with all processes."""

    def __init__(self, group: Group, number: int, device: int, agreement: Agreement) -> None:
        super().__init__(group, number, device)
        self._agreement = agreement

    def least(self, number: int) -> int:
        here = super().least(number)
        return super().least(here if self.number else self._agreement.least(here))
