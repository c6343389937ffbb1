"""Shares of keys in what the server keeps: no key can fill a limit for all others."""

from __future__ import annotations

from collections import Counter


class Shares:
    """Half of a limit is kept free for keys that have less than their share of that half, an equal part for each of `num_keys`. The
    other half, and the share of a key that uses more, is for whoever comes first. A single key may have all."""

    def __init__(self, num_keys: int = 1) -> None:
        self._num_keys = max(1, num_keys)
        self.hint = ", with a share for each key" if num_keys > 1 else ""  # behind a limit in messages

    def has_room(self, limit: int, used: Counter[str | None], owner: str | None, num: int) -> bool:
        """Return whether `owner` may have `num` more. `used`: how much of `limit` each key has."""
        total, share = used.total() + num, max(1, limit // (2 * self._num_keys))
        of_others = sum(min(amount, share) for key, amount in used.items() if key != owner)
        reserved = min(limit // 2, max(0, share * (self._num_keys - 1) - of_others))
        return total <= limit and (used[owner] + num <= share or total <= limit - reserved)
