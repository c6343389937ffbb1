"""Connections: limits on their number, on the duration of each phase, and on memory of incomplete heads and bodies.

Above the maximum number, new connections are refused. Above the memory limit, the connection with most incomplete bytes is
refused, so small requests succeed while large ones are sent slowly. `protocol` applies the limits."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from itertools import islice, takewhile
from typing import Protocol

from runtime import api
from server.config.server_config import ServerConfig
from server.http.errors import ApiError, TooManyRequests, Unavailable

RESERVED_FILES = 256  # open files for everything else: the model, libraries, the device, the log
MAX_TURNED_AWAY = 256  # refused connections that may still be reading why
RETRY_AFTER_S = 5
MAX_AT_ONCE = 50  # overdue connections per turn of the loop, since ending thousands takes longer than a stream may wait
DEFAULT_HELD_BYTES = 256 * 1024**2


class Timed(Protocol):
    """Object with a deadline, such as a connection. Only this module writes `deadline_queue`."""

    deadline_queue: dict[Timed, float] | None

    def overdue(self) -> None:
        """Handle the passed deadline. The deadline is cleared before this call."""
        ...


class ConnectionDeadlines:
    """Deadlines of connections. All share one timer, which runs only while there are deadlines.

    The time limit of a phase is a constant, so connections are due in the order of entry: one queue per limit."""

    def __init__(self) -> None:
        self._queues: dict[float, dict[Timed, float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def set(self, who: Timed, span_s: float) -> None:
        """Set the deadline of `who` to `span_s` seconds from now, replacing an earlier deadline. 0 clears the deadline."""
        self.clear(who)
        if span_s <= 0:
            return
        loop = asyncio.get_running_loop()
        queue = self._queues.setdefault(span_s, {})
        due_s = queue[who] = loop.time() + span_s
        who.deadline_queue = queue
        if self._timer is None or due_s < self._timer.when():
            self._ring_at(loop, due_s)

    def clear(self, who: Timed) -> None:
        if who.deadline_queue is not None:
            del who.deadline_queue[who]
            who.deadline_queue = None

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def expire(self, now_s: float) -> None:
        """Call `overdue` on connections whose deadline has passed, at most MAX_AT_ONCE per limit. `now_s`: the loop's time."""
        due: list[tuple[Timed, dict[Timed, float]]] = []
        for queue in self._queues.values():
            passed = takewhile(lambda entry: entry[1] <= now_s, queue.items())
            due += ((who, queue) for who, _ in islice(passed, MAX_AT_ONCE))
        for who, queue in due:
            if who.deadline_queue is queue:  # the one before may have ended it
                self.clear(who)
                who.overdue()

    def _ring(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        self.expire(loop.time())
        following = [next(iter(queue.values())) for queue in self._queues.values() if queue]
        if following:
            self._ring_at(loop, min(following))

    def _ring_at(self, loop: asyncio.AbstractEventLoop, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(when_s, self._ring)


class ClientConnection(Timed, Protocol):
    """Connection of a client, with the members that `Clients` needs. Only this module writes `is_admitted` and `held_bytes`."""

    is_admitted: bool
    held_bytes: int

    @property
    def address(self) -> str | None:
        """Address of the client; None for a Unix socket."""
        ...

    @property
    def unfinished_bytes(self) -> int:
        """Number of bytes of incomplete messages."""
        ...

    def refuse(self, error: ApiError) -> None:
        """End the connection with `error` and release its memory."""
        ...


def raise_file_limit(max_connections: int) -> int:
    """Raise the limit of open files for `max_connections`. Return the number of connections that the new limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    return max(soft - RESERVED_FILES, soft // 2)


class Clients:
    """All connections of the server. `max_connections`: from the option, or less if the limit of open files is lower."""

    def __init__(self, config: ServerConfig, max_connections: int | None = None) -> None:
        self.config = config
        self.deadlines = ConnectionDeadlines()
        self.max_connections = max_connections or config.max_connections
        self.max_per_address = config.max_connections_per_address or max(1, self.max_connections // 2)
        self.max_held_bytes = max(DEFAULT_HELD_BYTES, 4 * config.max_body_size)
        self.num_connected = 0
        self.held_bytes = 0
        self.refused: Counter[str] = Counter()
        self._num_turned_away = 0
        self._by_address: Counter[str] = Counter()
        self._holders: set[ClientConnection] = set()

    # --- connections ----------------------------------------------------------------------------------------------

    def admit(self, client: ClientConnection) -> ApiError | None:
        """Admit a new connection and return None, or return the error for a connection above a limit."""
        address = client.address
        if self.num_connected >= self.max_connections:
            self._num_turned_away += 1
            return Unavailable(
                f"This server has {self.max_connections} connections, which is its maximum", retry_after_s=RETRY_AFTER_S
            )
        if address is not None and self._by_address[address] >= self.max_per_address:
            self._num_turned_away += 1
            return TooManyRequests(
                f"There are {self.max_per_address} connections from your address, which is the maximum",
                retry_after_s=RETRY_AFTER_S,
            )
        client.is_admitted = True
        self.num_connected += 1
        if address is not None:
            self._by_address[address] += 1
        return None

    def replace(self, client: ClientConnection, successor: ClientConnection) -> None:
        """Count `successor` instead of `client`. Called when `successor` takes over the connection of `client`."""
        self.deadlines.clear(client)
        self.hold(client, 0)
        successor.is_admitted, client.is_admitted = client.is_admitted, False

    @property
    def may_be_told(self) -> bool:
        """True if the server can send an error response to one more refused connection."""
        return self._num_turned_away <= MAX_TURNED_AWAY

    def leave(self, client: ClientConnection) -> None:
        """Remove a closed connection."""
        self.deadlines.clear(client)
        self.hold(client, 0)
        if not client.is_admitted:
            self._num_turned_away -= 1
            return
        client.is_admitted = False
        self.num_connected -= 1
        address = client.address
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    # --- memory ---------------------------------------------------------------------------------------------------

    def hold(self, client: ClientConnection, num_bytes: int) -> None:
        """Set the number of bytes that `client` holds. If all clients hold too many, refuse that with most unfinished bytes."""
        if num_bytes == client.held_bytes:
            return
        more = num_bytes - client.held_bytes
        client.held_bytes = num_bytes
        self.held_bytes += more
        (self._holders.add if num_bytes else self._holders.discard)(client)
        while more > 0 and self.held_bytes > self.max_held_bytes:
            largest = max(self._holders, key=lambda each: each.unfinished_bytes)
            if not largest.unfinished_bytes:
                return  # all of it is whole, and will be taken over
            largest.refuse(
                Unavailable(
                    f"The server is busy: it is receiving request bodies of more than {self.max_held_bytes} bytes",
                    retry_after_s=RETRY_AFTER_S,
                )
            )

    def metrics(self) -> list[api.Metric]:
        refused: dict[tuple[tuple[str, str], ...], float | api.HistogramData] = {
            (("reason", reason),): float(num) for reason, num in self.refused.items()
        }
        return [
            api.Metric("http_connections", "Open connections.", "gauge", {(): float(self.num_connected)}),
            api.Metric(
                "http_unread_bytes", "Bytes of heads and bodies not yet decoded.", "gauge", {(): float(self.held_bytes)}
            ),
            api.Metric(
                "http_connections_refused",
                "Connections ended by the server, by the code of their error.",
                "counter",
                refused or {(("reason", "rate_limit_exceeded"),): 0.0},
            ),
        ]
