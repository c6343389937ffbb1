"""Truncation: from which item on a conversation is kept, so that prompt and answer fit the context.

Whole turns go, the earliest first, each from what the user says to the next time; leading system messages and instructions
stay, and so does the last turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from server.api.responses.input_items import InputMessage, Item


def shortenings(items: Sequence[Item]) -> list[list[Item]]:
    """`items` and ever shorter ends of it, the whole first."""
    lead = 0
    while lead < len(items) and _is_from(items[lead], "system", "developer"):
        lead += 1
    starts = [number for number in range(lead + 1, len(items)) if _is_from(items[number], "user")]
    return [list(items), *([*items[:lead], *items[start:]] for start in starts)]


async def longest(items: Sequence[Item], fits: Callable[[Sequence[Item]], Awaitable[bool]]) -> list[Item]:
    """The longest of the shortenings that fits; the shortest of all if none does."""
    found = shortenings(items)
    if await fits(found[0]):
        return found[0]
    low, high = 1, len(found) - 1  # the place is between them, both included
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(found[middle]) else (middle + 1, high)
    return found[min(low, len(found) - 1)]


def _is_from(item: Item, *roles: str) -> bool:
    return isinstance(item, InputMessage) and item.role in roles
