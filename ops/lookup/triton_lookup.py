"""Prompt lookup in Triton: one program per row scans the row's text once, up to its actual length."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LANES = 1024  # positions at a time


@triton.jit(do_not_specialize=["width"])
def _look_up(
    history_ptr, width, rows_ptr, lengths_ptr, found_ptr, NUM: tl.constexpr, NUM_PAD: tl.constexpr,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    text_ptr = history_ptr + tl.load(rows_ptr + index) * width
    length = tl.load(lengths_ptr + index).to(tl.int32)
    lanes = tl.arange(0, LANES)
    best = tl.zeros([LANES], dtype=tl.int64)  # matching tokens, then the position
    for start in range(0, length, LANES):
        place = start + lanes
        going = place < length
        matched = tl.zeros([LANES], dtype=tl.int64)
        for back in tl.static_range(1, LONGEST + 1):
            going = going & (place >= back)  # the text must be longer than that
            wanted = tl.load(text_ptr + tl.maximum(length - back, 0))
            there = tl.load(text_ptr + place - back, mask=going, other=-2)
            going = going & (there == wanted)
            matched += going.to(tl.int64)
        best = tl.maximum(best, tl.where(matched >= SHORTEST, (matched << 32) | place, 0))
    chosen = tl.max(best, axis=0)
    place = tl.where(chosen > 0, (chosen & 0xFFFFFFFF).to(tl.int32), length - 1)
    nth = tl.arange(0, NUM_PAD)
    ids = tl.load(text_ptr + place + nth % (length - place), mask=nth < NUM, other=0)
    tl.store(found_ptr + index * NUM + nth, ids.to(tl.int64), mask=nth < NUM)


def look_up(history: Tensor, rows: Tensor, lengths: Tensor, num: int, *, shortest: int, longest: int) -> Tensor:
    found = torch.empty((len(rows), num), dtype=torch.int64, device=history.device)
    _look_up[(len(rows),)](
        history, history.stride(0), rows, lengths, found, NUM=num, NUM_PAD=triton.next_power_of_2(num),
        SHORTEST=shortest, LONGEST=longest, LANES=_LANES, num_warps=8,
    )  # fmt: skip
    return found
