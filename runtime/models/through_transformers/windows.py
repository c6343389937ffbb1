"""Reading a mask function: whether what it lets a query see is its past, or the last part of it, or something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runtime.models.spec.model import UnsupportedModel

_FAR = 1 << 24  # beyond every window there is

MaskFunction = Callable[..., Any]  # batch, head, query and key index, each a tensor, to whether the query sees the key


def window_of(sees: MaskFunction) -> int | None:
    """Return the number of keys that a query sees, itself the last; None for all.

    Raises UnsupportedModel if it sees other keys, or a varying number."""

    def seen(query: int, key: int) -> bool:
        return bool(sees(*(torch.tensor(index) for index in (0, 0, query, key))))

    try:
        window = None if seen(_FAR, 0) else _FAR - _first_seen(seen, _FAR) + 1
        width = window or 1
        # What is seen from here and there: the ends of the past, and one key beyond each.
        for query in (0, 1, 2, 5, width - 1, width, width + 1, _FAR + 1):
            first = 0 if window is None else max(0, query + 1 - width)
            for key in {first - 1, first, (first + query) // 2, query, query + 1, query + width}:
                if key >= 0 and seen(query, key) != (first <= key <= query):
                    raise UnsupportedModel("a query of it sees other keys than those before it, or a window of them")
    except (RuntimeError, IndexError) as error:  # it looks at the tokens themselves
        raise UnsupportedModel("what a query of it sees depends on more than positions") from error
    return window


def _first_seen(seen: Callable[[int, int], bool], query: int) -> int:
    """The first key that a query sees, found by halving: key 0 is hidden, and the query sees itself if it sees anything."""
    hidden, shown = 0, query
    while shown - hidden > 1:
        middle = (hidden + shown) // 2
        hidden, shown = (hidden, middle) if seen(query, middle) else (middle, shown)
    return shown
