"""Store of responses in memory. Clients can retrieve and continue them. The number and total size of responses are limited.

An entry contains a response's own input items, its output, and a reference to the entry that it continues. A conversation is
therefore stored once, no matter how many responses it has. Beyond either limit, the oldest finished entry is evicted. If other
entries continue an evicted entry, it stays in memory, and counts, until they are evicted too. The reason for an eviction is kept
for a while, to be reported with the 404. An entry belongs to an API key. Other keys, except the administrator's, receive the
same response as for an unknown id. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from server.http.errors import PreviousResponseNotFound, ResponseNotFound

MAX_NOTES = 10_000  # of entries that are gone
ENTRY_BYTES = 1024  # what an entry costs beside its contents
ITEM_BYTES = 128


@dataclass(frozen=True, slots=True)
class Caller:
    """Client that owns responses. `key`: identifies the API key, None if the server has no keys."""

    key: bytes | None = None
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Item of a conversation, encoded as JSON."""

    id: str
    json: bytes


class Ongoing(Protocol):
    """Response in progress, with the events generated so far."""

    @property
    def is_over(self) -> bool: ...
    @property
    def status(self) -> str: ...
    @property
    def body(self) -> bytes: ...
    async def news(self) -> None:
        """Wait until there are more events or the response ends."""
        ...

    async def cancel(self) -> None:
        """Cancel the response, and wait until it has ended."""
        ...


class Entry:
    """Stored response. `events`: its encoded events if it can be streamed again, otherwise None. `ongoing`: the run that
    generates it, None after the end."""

    __slots__ = (
        "_num_holders", "body", "events", "final_status", "id", "input", "is_background", "num_bytes", "ongoing", "output",
        "owner", "previous",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        owner: bytes | None,
        input: tuple[StoredItem, ...],
        previous: Entry | None = None,
        *,
        is_background: bool = False,
    ) -> None:
        self.id = id
        self.owner = owner
        self.input = input
        self.previous = previous
        self.is_background = is_background
        self.ongoing: Ongoing | None = None
        self.output: tuple[StoredItem, ...] = ()
        self.final_status = ""
        self.body = b""
        self.events: list[bytes] | None = None
        self.num_bytes = 0  # as the store counts it
        self._num_holders = 0  # the index, and those who continue it

    @property
    def status(self) -> str:
        return self.final_status if self.ongoing is None else self.ongoing.status

    @property
    def body_now(self) -> bytes:
        return self.body if self.ongoing is None else self.ongoing.body

    def conversation(self) -> list[StoredItem]:
        """Return the items of the conversation before this response's output, oldest first."""
        line: list[Entry] = [self]
        while line[-1].previous is not None:
            line.append(line[-1].previous)
        found: list[StoredItem] = []
        for entry in reversed(line):
            found += entry.input
            if entry is not self:
                found += entry.output
        return found

    def hold(self) -> bool:
        """Increment the reference count. Return True if this is the first reference."""
        self._num_holders += 1
        return self._num_holders == 1

    def release(self) -> bool:
        """Decrement the reference count. Return True if this was the last reference."""
        self._num_holders -= 1
        return not self._num_holders

    def counted(self) -> int:
        items = (*self.input, *self.output)
        events = self.events or ()
        contents = sum(len(item.json) + ITEM_BYTES for item in items) + sum(map(len, events)) + len(self.body)
        return ENTRY_BYTES + contents


class ResponseStore:
    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: dict[str, Entry] = {}  # the oldest first
        self._notes: dict[str, tuple[bytes | None, str]] = {}  # of what is gone: whose it was, and why

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def keeps(self) -> bool:
        """True if the store is enabled."""
        return self.max_responses > 0

    def add(self, entry: Entry) -> None:
        """Add the entry of a response, in progress or finished."""
        self._notes.pop(entry.id, None)
        self._entries[entry.id] = entry
        link: Entry | None = entry
        while link is not None and link.hold():  # what it continues may have gone while it was made
            self._count(link)
            link = link.previous
        self._evict()

    def finish(self, entry: Entry) -> None:
        """Mark `entry` as finished, and count its final size."""
        entry.ongoing = None
        if entry.num_bytes:
            self._count(entry)
            self._evict()

    def get(self, id: str, caller: Caller) -> Entry:
        """Return the entry with the response id `id`. Raises ResponseNotFound."""
        entry = self._entries.get(id)
        if entry is None or not _may_see(caller, entry.owner):
            raise ResponseNotFound(id, self._why(id, caller))
        return entry

    def get_previous(self, id: str, caller: Caller) -> Entry:
        """Return the entry that a request continues, by its response id. Raises PreviousResponseNotFound."""
        try:
            return self.get(id, caller)
        except ResponseNotFound:
            raise PreviousResponseNotFound(id, self._why(id, caller)) from None

    def items(self, ids: Collection[str], caller: Caller) -> dict[str, StoredItem]:
        """Return the stored items whose id is in `ids`, as a dict by id. They may belong to any response that `caller` may read."""
        found: dict[str, StoredItem] = {}
        for entry in self._entries.values():
            if _may_see(caller, entry.owner):
                found |= {item.id: item for item in (*entry.input, *entry.output) if item.id in ids}
        return found

    def delete(self, entry: Entry) -> None:
        self._forget(entry, "it was deleted")

    def note(self, id: str, caller: Caller, why: str) -> None:
        """Record the reason why response `id` is not stored, for the 404 message."""
        self._notes[id] = caller.key, why
        while len(self._notes) > MAX_NOTES:
            del self._notes[next(iter(self._notes))]

    # --- inside ---------------------------------------------------------------------------------------------------

    def _why(self, id: str, caller: Caller) -> str:
        owner, why = self._notes.get(id, (None, ""))
        if why and _may_see(caller, owner):
            return why
        if not self.keeps:
            return "this server stores no responses (--max-stored-responses 0)"
        return "no response has this id. Responses are stored in memory only, and not at all with store false"

    def _count(self, entry: Entry) -> None:
        num_bytes = entry.counted()
        self.num_bytes += num_bytes - entry.num_bytes
        entry.num_bytes = num_bytes

    def _evict(self) -> None:
        bounds = f"at most {self.max_responses} responses and {self.max_bytes} bytes of them"
        while len(self._entries) > self.max_responses or self.num_bytes > self.max_bytes:
            oldest = next((entry for entry in self._entries.values() if entry.ongoing is None), None)
            if oldest is None:
                return  # those at work are bounded by the engine's queue
            self._forget(oldest, f"it was evicted to make room for newer ones; this server keeps {bounds}")

    def _forget(self, entry: Entry, why: str) -> None:
        del self._entries[entry.id]
        self.note(entry.id, Caller(entry.owner), why)
        link: Entry | None = entry
        while link is not None and link.release():
            self.num_bytes -= link.num_bytes
            link.num_bytes = 0
            link = link.previous


def _may_see(caller: Caller, owner: bytes | None) -> bool:
    return caller.is_admin or caller.key == owner
