"""LoRA adapters of few tokens on CUDA by few_tokens.cu: A and B are streamed and multiplied in registers."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ops.cuda.program import CompiledKernel, Program, missing
from ops.lora.share import LoraShape
from ops.lora.slot_memory import Slots

MAX_TOKENS = 512
MAX_BESIDE = 8  # tokens up to which it shrinks in parallel with the weight's product by gemm/few_rows.cu
RANKS = (16, 32, 64)  # ranks with compiled kernels
_THREADS = 128


class Sorted(NamedTuple):
    """Tokens sorted by adapter, as in `ops.lora.share.TokenAdapters`: order [T], tiles [3, M] of 16 tokens, used [2]."""

    order: Tensor
    tiles: Tensor
    used: Tensor


class Shrunk(NamedTuple):
    """Partial sums h [pieces, T as sorted, parts, rank] float32 of x A^T. `done`: event after their computation on another stream,
    or None."""

    h: Tensor
    done: torch.cuda.Event | None = None


COLUMNS = (128, 256)  # numbers of B's columns per program
_INNER = 1024  # columns of K per shrinking program
_FEWEST_TOKENS = 64  # number of tokens from which an expanding program has twice as many columns, to read h less often
_SHRINK = "lora_shrink"


class _Expand(NamedTuple):
    """Instance of few_tokens.cu. `blocks`: blocks of 32 columns per warp; `kind`: EXPAND or EXPAND_GATED."""

    kind: str
    rank: int
    blocks: int

    @property
    def name(self) -> str:
        return f"lora_{self.kind.lower()}_{self.rank}_{self.blocks}"

    @property
    def columns(self) -> int:
        return _THREADS * self.blocks


_EXPANDS = [_Expand(kind, rank, blocks) for kind in ("EXPAND", "EXPAND_GATED") for rank in RANKS for blocks in (1, 2)]
_PROGRAM = Program(
    [Path(__file__).with_suffix(".cu")],
    {_SHRINK: f"SHRINK({_SHRINK}, 8)"}
    | {each.name: f"{each.kind}({each.name}, {each.rank}, {each.blocks})" for each in _EXPANDS},
    listed=False,
)


def fits(shape: LoraShape, rank: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether these kernels support the layer. `rank`: the rank for which slots have memory."""
    return (
        device.type == "cuda"
        and missing() is None
        and dtype in (torch.bfloat16, torch.float16)
        and rank in RANKS
        and shape.in_features % 8 == 0
        and all(part % 8 == 0 for part in shape.parts)
    )


@functools.cache
def compile_ahead(rank: int, dtype: torch.dtype, device: torch.device) -> None:
    """Start compiling the instances for layers of this rank."""
    names = [each.name for each in _EXPANDS if each.rank == rank and each.blocks <= _most_blocks(rank)]
    _PROGRAM.compile_ahead([_SHRINK, *names], dtype, device)


def columns(rank: int, num_tokens: int) -> int:
    """Return the number of B's columns that one program computes."""
    return _expand("EXPAND", rank, num_tokens).columns


def begin(x: Tensor, slots: Slots, tokens: Sorted) -> Shrunk | None:
    """Compute x A^T on another stream, in parallel with the weight's product. Return None if that is slower than computing it
    afterwards. The caller must call `expand` or `expand_gated`, and keep x alive until then."""
    if len(x) > MAX_BESIDE:
        return None
    ready, done, beside = torch.cuda.Event(), torch.cuda.Event(), _beside(x.device)
    ready.record()
    beside.wait_event(ready)
    found = shrunk(x, slots, tokens, beside)
    done.record(beside)
    return Shrunk(found.h, done)


def shrunk(x: Tensor, slots: Slots, tokens: Sorted, beside: torch.cuda.Stream | None = None) -> Shrunk:
    """Shrink x [T, K], whose rows are a multiple of 16 bytes apart. `beside`: stream to launch on instead of the current
    one, which owns the memory."""
    num_tokens, (_, num_parts, rank, size) = len(x), slots.a.shape
    pieces = -(-size // _INNER)
    h = torch.empty(pieces, num_tokens, num_parts, rank, dtype=torch.float32, device=x.device)
    groups, num_tiles = num_parts * rank // 16, tokens.tiles.shape[1]
    kernel = _kernel(_SHRINK, x.dtype, x.device)
    with nullcontext() if beside is None else torch.cuda.stream(beside):
        kernel.launch(
            (groups * pieces, num_tiles, 1), _THREADS, 0,
            x, x.stride(0), slots.a, slots.stride, tokens.order, tokens.tiles, tokens.used, h, num_tokens, num_tiles, groups,
            size, early=beside is None,
        )  # fmt: skip
    return Shrunk(h)


def _waited_for(shrunk: Shrunk) -> Tensor:
    if shrunk.done is not None:
        shrunk.done.wait()
    return shrunk.h


def expand(shrunk: Shrunk, slots: Slots, tokens: Sorted, blocks: Tensor, out: Tensor) -> None:
    """Add scale * h B^T to out [T, N] contiguous. blocks [3, M] int32: the part, first column and end of every `columns`."""
    h = _waited_for(shrunk)
    pieces, num_tokens, num_parts, rank = h.shape
    num_tiles = tokens.tiles.shape[1]
    _kernel(_expand("EXPAND", rank, num_tokens).name, out.dtype, out.device).launch(
        (blocks.shape[1], num_tiles, 1), _THREADS, 0,
        h, slots.b, slots.stride, slots.scale, slots.scale.stride(0), blocks, tokens.order, tokens.tiles, tokens.used,
        out, out.stride(0), num_tokens, num_tiles, num_parts * rank // 16, pieces,
    )  # fmt: skip


def expand_gated(shrunk: Shrunk, slots: Slots, tokens: Sorted, gate_up: Tensor, out: Tensor) -> None:
    """Write silu(gate) * up of gate_up [T, N] + scale * h B^T to out [T, N / 2]; both are contiguous."""
    h = _waited_for(shrunk)
    pieces, num_tokens, _, rank = h.shape
    width, num_tiles = out.shape[1], tokens.tiles.shape[1]
    which = _expand("EXPAND_GATED", rank, num_tokens)
    _kernel(which.name, out.dtype, out.device).launch(
        (-(-width // which.columns), num_tiles, 1), _THREADS, 0,
        h, slots.b, slots.stride, slots.scale, slots.scale.stride(0), tokens.order, tokens.tiles, tokens.used, gate_up, out,
        width, num_tokens, num_tiles, pieces,
    )  # fmt: skip


def _most_blocks(rank: int) -> int:
    return 2 if rank == 16 else 1


def _expand(kind: str, rank: int, num_tokens: int) -> _Expand:
    return _Expand(kind, rank, _most_blocks(rank) if num_tokens >= _FEWEST_TOKENS else 1)


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _kernel(name: str, dtype: torch.dtype, device: torch.device) -> CompiledKernel:
    return _PROGRAM.kernel(name, dtype, device)
