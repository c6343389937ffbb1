"""Attention of rows with many queries on Hopper by prefill.cu: one launch for any lengths and contexts.

Keys and values, including the step's own, are read from the paged cache. The device reads the lengths, so a captured graph can
contain the launch. An fp8 cache is read directly, and computed with in float16."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ops import tuning
from ops.attention.heads import AttentionHeads
from ops.attention.meta import AttentionMeta
from ops.attention.triton_widened import Widened
from ops.cuda.program import CompiledKernel, Program, TensorMap, tensor_map
from ops.kv import read_scales
from ops.kv.eight_bits import FP8

ROWS = 128  # queries per block
PAGE = 16  # keys per cache block
MAX_REQUESTS = 2048
LOG2E = 1.4426950408889634
_HERE = Path(__file__).parent
_CONSUMERS = 256  # threads
_STAGES = 2
_ALIGNMENT = 1024
_NO_WINDOW = 2**30


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Instance of prefill.cu for heads of up to `lanes` dims. An iteration reads `keys` keys."""

    lanes: int
    keys: int
    tiles_of_queries: int  # query tiles in shared memory, including the prefetched next one
    slots: int = 0  # buffers of fp8 codes, each half a tile of keys or values; 0: 16-bit cache
    wideners: int = 3  # warps that convert codes, 3 or 7, next to the copying one; idle with 16-bit caches

    @property
    def name(self) -> str:
        return f"prefill_{'_'.join(map(str, self._numbers))}"

    @property
    def source(self) -> str:
        return f"PREFILL{'_CODED' if self.slots else ''}({', '.join(map(str, (self.name, *self._numbers)))})"

    @property
    def _numbers(self) -> tuple[int, ...]:
        return self.lanes, self.keys, self.tiles_of_queries, self.slots, self.wideners

    @property
    def num_threads(self) -> int:
        return _CONSUMERS + 32 * (self.wideners + 1)

    @property
    def shared_bytes(self) -> int:
        tiles = (ROWS * self.tiles_of_queries + 2 * _STAGES * self.keys) * self.lanes * 2
        return tiles + self.slots * self.keys // 2 * self.lanes + _ALIGNMENT


TILES = (PrefillTile(64, 128, 2), PrefillTile(128, 128, 2), PrefillTile(256, 64, 1))
# With seven converting warps: 477 TFLOP/s instead of 423 with 128 dims, but 301 instead of 322 with 64 (one H200). With 256 dims
# they need more registers at the kernel's start than are available.
CODED_TILES = (PrefillTile(64, 128, 2, 8), PrefillTile(128, 128, 2, 3, 7), PrefillTile(256, 64, 1, 3))


def _instructions(tile: PrefillTile) -> tuple[str, str]:
    """Return the source text of a tile's two matrix instructions. C++ templates cannot vary the number of their operands."""
    kind = ".f32.f16.f16" if tile.slots else '.f32." HALF "." HALF "'
    scores, mixed = tile.keys // 2, tile.lanes // 2
    return (
        f"""
template <> __device__ __forceinline__ void Scores<{tile.keys}>::add(float (&scores)[{scores}], u64 q, u64 k, int begun) {{
  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{scores + 2}, 0; wgmma.mma_async.sync.aligned.m64n{tile.keys}k16{kind}"
    " {{{_operands(scores)}}}, %{scores}, %{scores + 1}, p, 1, 1, 0, 0;}}" : {_bound("scores", scores)}
    : "l"(q), "l"(k), "r"(begun));
}}""",
        f"""
template <> __device__ __forceinline__ void Mixed<{tile.lanes}>::add(float (&mixed)[{mixed}], u32 p0, u32 p1, u32 p2, u32 p3,
                                                                    u64 v) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{tile.lanes}k16{kind}"
    " {{{_operands(mixed)}}}, {{%{mixed}, %{mixed + 1}, %{mixed + 2}, %{mixed + 3}}}, %{mixed + 4}, 1, 1, 1, 1;"
    : {_bound("mixed", mixed)} : "r"(p0), "r"(p1), "r"(p2), "r"(p3), "l"(v));
}}""",
    )


def _operands(count: int) -> str:
    return ", ".join(f"%{i}" for i in range(count))


def _bound(array: str, count: int) -> str:
    return ", ".join(f'"+f"({array}[{i}])' for i in range(count))


def _program(tiles: tuple[PrefillTile, ...], *, listed: bool) -> Program:
    return Program(
        [_HERE.parent / "cuda" / "hopper.cuh", _HERE / "prefill.cu"],
        {tile.name: tile.source for tile in tiles},
        prelude="\n".join(dict.fromkeys(text for tile in tiles for text in _instructions(tile))),
        architecture="sm_90a", listed=listed,
    )  # fmt: skip


_PROGRAM = _program(TILES, listed=True)


@functools.cache
def coded_program() -> Program:
    """Return the program for fp8 caches, which no start compiles ahead."""
    return _program(CODED_TILES, listed=False)


def refusal(heads: AttentionHeads, k_cache: Tensor, dtype: torch.dtype, meta: AttentionMeta) -> str | None:
    """Return why prefill.cu cannot compute such a step in `dtype`, or None if it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in 16 bits, not in {dtype}"
    if k_cache.dtype not in (dtype, FP8):
        return f"it does not support a cache of {k_cache.dtype}"
    if heads.head_size > TILES[-1].lanes or heads.head_size % 8:
        return f"head size {heads.head_size} is not a multiple of 8 up to {TILES[-1].lanes}"
    if heads.alibi is not None:
        return "it knows no linear biases"
    if k_cache.shape[2] != PAGE:
        return f"blocks of {k_cache.shape[2]} keys are not blocks of {PAGE}"
    if meta.seq_lens.shape[0] > MAX_REQUESTS:
        return f"it supports up to {MAX_REQUESTS} rows"
    return None


def prefill(
    qkv: Tensor,
    heads: AttentionHeads,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    out: Tensor,
    min_queries: int,
    widened: Widened | None = None,
) -> None:
    """Compute rows with at least `min_queries` queries into out [T, Hq, D]; other tokens are not written. At most MAX_REQUESTS
    rows.

    qkv [T, (Hq + 2 Hkv) * D] and the caches [num_blocks, Hkv, 16, D] are bfloat16 or float16; caches may also be fp8. Norms and
    rotary embedding must have been applied to q, and k and v must have been stored. `widened`: pages of an fp8 cache that were
    converted to 16 bits."""
    scales = read_scales(k_cache, heads.kv_scales)
    first_pages = None
    if widened is not None:
        keys, values, first_pages = widened
        _launch(qkv, heads, keys, values, scales, meta, out, min_queries, first_pages)
    _launch(qkv, heads, k_cache, v_cache, scales, meta, out, min_queries, first_pages)


def _launch(
    qkv: Tensor, heads: AttentionHeads, keys: Tensor, values: Tensor, scales: tuple[float, float], meta: AttentionMeta,
    out: Tensor, min_queries: int, first_pages: Tensor | None,
) -> None:  # fmt: skip
    num_pages, num_kv_heads, _, size = keys.shape
    num_tokens, num_requests = qkv.shape[0], meta.seq_lens.shape[0]
    coded = keys.dtype == FP8
    tile = next(tile for tile in (CODED_TILES if coded else TILES) if size <= tile.lanes)
    q_map = tensor_map(qkv, (size, heads.num_heads, num_tokens), (1, size, qkv.stride(0)), (64, 1, 64))
    num_keys = num_pages * num_kv_heads * PAGE
    k_scale, v_scale = scales
    caches = (keys, values) if coded else (_cache_map(keys, num_keys), _cache_map(values, num_keys))
    _kernel(tile, qkv.dtype, qkv.device).launch(
        (tuning.of(qkv.device).multiprocessors, 1, 1), tile.num_threads, tile.shared_bytes,
        q_map, *caches, meta.block_tables, meta.block_tables.stride(0), first_pages, meta.rows, meta.query_start_loc,
        meta.seq_lens, heads.sinks, out, _counters(qkv.device), num_requests, heads.num_heads,
        heads.num_heads // num_kv_heads, size, *(() if coded else (num_keys,)), min_queries, heads.window or _NO_WINDOW,
        heads.scale * k_scale * LOG2E, heads.softcap or 0.0, v_scale,
    )  # fmt: skip


def _cache_map(cache: Tensor, num_keys: int) -> TensorMap:
    size = cache.shape[-1]
    return tensor_map(cache, (size, num_keys), (1, size), (64, PAGE))


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Return the device's counters of assigned tiles and finished blocks. Every launch resets them, so launches must share a
    stream."""
    return torch.zeros(2, dtype=torch.int32, device=device)


@functools.cache
def _kernel(tile: PrefillTile, dtype: torch.dtype, device: torch.device) -> CompiledKernel:
    kernel = (coded_program() if tile.slots else _PROGRAM).kernel(tile.name, dtype, device)
    kernel.allow_shared_bytes(tile.shared_bytes)
    return kernel
