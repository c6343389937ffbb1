"""Links: the ways from the stage of one process to those of others, where stages of a model are on several hosts.

A way goes in one direction and has one connection. What is given at one end is taken at the other in the same order, one byte that
says whether anything comes before each: a stage that failed in a step says so, and the next one fails in that step alone. A
connection that ends says that its stage has gone. On a CPU the tensors themselves follow; a device may send them by another way,
of which the byte then says that they have been enqueued (`runtime/platform/cuda_links.py`)."""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
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
    """What a way is for. HIDDEN: hidden states, to the next stage; DRAWS: what the last one has drawn, to each before it; UP and
    DOWN: numbers that all agree on at the start, to the first and from it."""

    HIDDEN = 0
    DRAWS = 1
    UP = 2
    DOWN = 3


class Link(Protocol):
    """One end of a way. The giving end calls `give` or `leave` as often as the other one calls `take`."""

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Behind what the calling thread has computed, or enqueued. The caller may change them afterwards. Raises Gone."""
        ...

    def leave(self) -> None:
        """Nothing is given this time: this stage has failed. Raises Gone."""
        ...

    def take(self, into: Sequence[Tensor]) -> None:
        """Waits for what is given and writes it there, before all that this thread does or enqueues next. Raises Apart, or Gone."""
        ...


class HostLink:
    """A `Link` of tensors of the host, contiguous ones. `where`: who is at its other end."""

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

    # --- for those that send tensors by another way ----------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> None:
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise Gone(self.where) from error

    def send_given(self) -> None:
        self.send(_GIVEN)

    def receive(self, room: memoryview) -> None:
        """Fill `room`. Waits."""
        try:
            while room:
                num = self.connection.recv_into(room)
                if not num:
                    raise Gone(self.where)
                room = room[num:]
        except OSError as error:
            raise Gone(self.where) from error

    def await_word(self) -> None:
        """Waits until something is given. Raises Apart where nothing is, this time."""
        word = bytearray(1)
        self.receive(memoryview(word))
        if word == _LEFT:
            raise Apart(_FAR_LEFT)


_SMALL_BYTES = 64 << 10  # of which one write is cheaper than two


def _are_small(tensors: Sequence[Tensor]) -> bool:
    return sum(tensor.nbytes for tensor in tensors) <= _SMALL_BYTES


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(cast("Any", tensor.detach().contiguous().flatten().view(torch.uint8).numpy()))


class Ways(NamedTuple):
    """Those of one stage and line. `before`: what comes from the stage before it; `behind`: to the one behind it; `drawn`: what the
    last stage has drawn; `takers`: to whom this one, the last, tells that, by stage."""

    before: Link | None = None
    behind: Link | None = None
    drawn: Link | None = None
    takers: Mapping[int, Link] = {}


class LinkPort:
    """Where the stages of other processes connect to the stage of this one: a port, behind a secret that all of a model know."""

    def __init__(self, host: str, secret: bytes) -> None:
        """`host`: an address of this machine that the others reach. Raises OSError."""
        self._socket = socket.create_server((host, 0), backlog=1024)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._secret = secret
        self._came: dict[tuple[int, int, int], socket.socket] = {}
        self._made: list[socket.socket] = []

    def connected(
        self, stage: int, num_stages: int, num_lines: int, addresses: Sequence[tuple[str, int]]
    ) -> StageLinks:
        """All ways of stage number `stage` of a model, whose stages listen at `addresses`. Waits for the others.

        Raises Gone, or OSError where one cannot be reached."""
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
        ways = tuple(Ways(*each) for each in zip(before, behind, drawn, takers, strict=True))
        return StageLinks(ways, Agreement(not stage, outgoing, incoming))

    def _awaited(self, hello: tuple[int, int, int]) -> socket.socket:
        """Waits until that has been said, or this port is closed: another process may have to fetch its files first."""
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
        """Whoever waits here, or at either end of a way, fails."""
        for each in (self._socket, *self._came.values(), *self._made):
            with suppress(OSError):  # it has ended; and who waits in another thread only learns of this, not of a close
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Agreement:
    """What the processes of a model agree on at the start. `outgoing`, `incoming`: ways of the first stage to and from all others,
    or of another one to and from the first."""

    def __init__(self, is_first: bool, outgoing: Sequence[HostLink], incoming: Sequence[HostLink]) -> None:
        self._is_first, self._outgoing, self._incoming = is_first, outgoing, incoming

    def least(self, number: int) -> int:
        """The smallest of what all processes give. Waits for them. Raises Gone."""
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
    """What connects the stage of one process to all others. `ways`: by line."""

    ways: tuple[Ways, ...]
    agreement: Agreement


class AgreeingRank(HostRank):
    """A rank of the one stage that this process computes. What all agree on, the processes of all other stages agree on, too."""

    def __init__(self, group: Group, number: int, device: int, agreement: Agreement) -> None:
        super().__init__(group, number, device)
        self._agreement = agreement

    def least(self, number: int) -> int:
        here = super().least(number)
        return super().least(here if self.number else self._agreement.least(here))
