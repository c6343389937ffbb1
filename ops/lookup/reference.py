"""Prompt lookup in plain torch, one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def look_up(history: Tensor, rows: Tensor, lengths: Tensor, num: int, *, shortest: int, longest: int) -> Tensor:
    found = torch.empty((len(rows), num), dtype=torch.int64, device=history.device)
    for index, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        text = history[row, :length].long()
        place = _place(text, shortest, longest)
        found[index] = text[place + torch.arange(num, device=text.device) % (length - place)]
    return found


def _place(text: Tensor, shortest: int, longest: int) -> int:
    """Return the position after the n-gram that was found, or the last token's position if none was."""
    length = len(text)
    going = torch.ones(length, dtype=torch.bool, device=text.device)  # by end of the occurrence
    matched = torch.zeros(length, dtype=torch.int64, device=text.device)
    for back in range(1, min(longest, length - 1) + 1):
        going[:back] = False
        going[back:] &= text[: length - back] == text[length - back]
        matched += going
    best = int(matched.max())
    if best < shortest:
        return length - 1
    return int((matched == best).nonzero()[-1])
