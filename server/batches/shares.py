"""Shares of keys in what the server keeps: no key can fill a limit for all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection


class Shares:
    """Divide half of a limit equally between `owners`, the keys that the server takes. What an owner does not use of its part is
    kept free for it. The other half goes to the first that asks, so one key of two may hold 75 % of a limit, and a single key
    all of it. What keys left behind that the server no longer takes counts against the limit and against nobody's part."""

    def __init__(self, owners: Collection[str] = ()) -> None:
        self._owners = frozenset(owners)
        self.hint = ", with a share for each key" if len(self._owners) > 1 else ""  # behind a limit in messages

    def has_room(self, limit: int, used: Counter[str | None], owner: str | None, num: int) -> bool:
        """Return whether `owner` may have `num` more. `used`: how much of `limit` each key has."""
        total, share = used.total() + num, max(1, limit // (2 * max(1, len(self._owners))))
        unused_by_others = sum(max(0, share - used[key]) for key in self._owners if key != owner)
        within_share = owner in self._owners and used[owner] + num <= share
        return total <= limit and (within_share or total <= limit - min(limit // 2, unused_by_others))
