"""Paged attention: right to rounding against a plain float64 softmax, and the same bits however a context was cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import ops
from ops import native
from ops.kv.eight_bits import SCALE_BYTES, from_int8_entries, to_int8_entries

CACHES = [torch.float32, torch.bfloat16, torch.int8]


def junk(dtype: torch.dtype) -> float:
    """What a cache holds where nobody wrote: NaN, or bytes of which four are one."""
    return -1 if dtype == torch.int8 else torch.nan


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In float64 what a cache makes of it."""
    return (from_int8_entries(to_int8_entries(x)) if dtype == torch.int8 else x.to(dtype)).double()


@dataclass
class Case:
    """A step over rows of (context length, queries); keys and values also unpaged, per row, in float64."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: ops.AttentionMeta
    keys: list[Tensor]
    values: list[Tensor]
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None

    def run(self) -> Tensor:
        scale = self.q.shape[2] ** -0.5
        return ops.paged_attention(
            self.q, self.k_cache, self.v_cache, self.meta, scale, self.window, self.softcap, self.sinks, self.alibi
        )

    def expected(self) -> Tensor:
        out, starts = torch.empty(self.q.shape, dtype=torch.float64), self.meta.query_start_loc.tolist()
        group = self.q.shape[1] // self.k_cache.shape[1]
        for row, context in enumerate(self.meta.seq_lens.tolist()):
            q = self.q[starts[row] : starts[row + 1]].double()
            k, v = (x[row].repeat_interleave(group, 1).double() for x in (self.keys, self.values))
            apart = torch.arange(context - len(q), context)[:, None] - torch.arange(context)  # [queries, keys]
            scores = torch.einsum("nhd,shd->hns", q, k) * q.shape[2] ** -0.5
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            if self.alibi is not None:
                scores -= self.alibi.double()[:, None, None] * apart
            scores.masked_fill_((apart < 0) | (apart >= (self.window or context + 1)), -torch.inf)
            if self.sinks is not None:  # as a key without a value
                sinks = self.sinks.double()[:, None, None].expand(-1, len(q), 1)
                scores, v = torch.cat([scores, sinks], 2), torch.cat([v, torch.zeros_like(v[:1])])
            out[starts[row] : starts[row + 1]] = torch.einsum("hns,shd->nhd", scores.softmax(-1), v)
        return out


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make(
    rows: list[tuple[int, int]],
    head_size: int = 64,
    kv_heads: int = 2,
    group: int = 3,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    if dtype not in native.CACHE_TYPES:
        pytest.skip(f"oneloop_native is not built, or older than caches of {dtype}")
    needed = [-(-context // block_size) for context, _ in rows]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks).tolist()
    line = head_size + (SCALE_BYTES if dtype == torch.int8 else 0)
    caches = [torch.full((num_blocks, kv_heads, block_size, line), junk(dtype), dtype=dtype) for _ in range(2)]
    tables = torch.zeros(len(rows), max([*needed, 1]) + 1, dtype=torch.int32)
    plain: list[list[Tensor]] = [[], []]
    for row, (context, _) in enumerate(rows):
        blocks = [order.pop() for _ in range(needed[row])]
        tables[row, : len(blocks)] = int32(blocks)
        slots = torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in range(context)])
        k, v = (torch.randn(context, kv_heads, head_size) for _ in range(2))
        if context:
            ops.store_kv(k, v, *caches, slots)
        plain[0].append(as_stored(k, dtype))
        plain[1].append(as_stored(v, dtype))
    starts = [0]
    for _, queries in rows:
        starts.append(starts[-1] + queries)
    meta = ops.AttentionMeta(
        int32(starts), int32([context for context, _ in rows]), tables,
        max((queries for _, queries in rows), default=0), max((context for context, _ in rows), default=0),
    )  # fmt: skip
    return Case(torch.randn(starts[-1], kv_heads * group, head_size), *caches, meta, *plain)


@pytest.mark.parametrize("head_size", [8, 24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_attention_matches_float64(kernel: str, head_size: int, group: int, dtype: torch.dtype) -> None:
    case = make([(1, 1), (17, 2), (20, 20), (70, 3), (130, 33)], head_size, 2, group, dtype=dtype)
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_size", [16, 64, 128])
def test_an_int8_cache_costs_no_more_than_its_rounding(kernel: str, head_size: int) -> None:
    cases = []
    for dtype in (torch.int8, torch.float32):
        torch.manual_seed(1)
        cases.append(make([(1, 1), (70, 3), (700, 33)], head_size, 2, 3, dtype=dtype))
    apart = (cases[0].run() - cases[1].expected()).abs()
    assert apart.max() < 0.03  # the largest of some hundred normal numbers, over 127
    assert 1e-4 < apart.mean() < 2e-3


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_any_block_size_and_every_cache_type(kernel: str, dtype: torch.dtype, block_size: int) -> None:
    case = make([(64, 1), (65, 5), (1, 1), (100, 64)], 40, 2, 2, block_size, dtype)
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 2, 3, 17, 64, 257])
def test_long_contexts_cross_segments(kernel: str, queries: int) -> None:
    case = make([(1100, queries), (513, 1), (512, 1)], 16, 1, 3)
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-4, atol=1e-5)


def forget(case: Case) -> None:
    """Make NaN what no query of a row sees any more, as if its blocks had become somebody else's."""
    block_size, starts = case.k_cache.shape[2], case.meta.query_start_loc.tolist()
    for row, context in enumerate(case.meta.seq_lens.tolist()):
        unseen = torch.arange(max(0, context - (starts[row + 1] - starts[row]) + 1 - case.window))
        blocks = case.meta.block_tables[row, unseen // block_size].long()
        for cache in (case.k_cache, case.v_cache):
            cache[blocks, :, unseen % block_size] = junk(cache.dtype)


@pytest.mark.parametrize("window", [1, 5, 64, 100, 600, 5000])
@pytest.mark.parametrize("dtype", CACHES)
def test_a_window_hides_what_stands_before_it(kernel: str, window: int, dtype: torch.dtype) -> None:
    case = make([(1, 1), (70, 3), (130, 33), (1100, 1), (700, 257), (600, 600)], 16, 2, 3, dtype=dtype)
    case.window = window
    forget(case)
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("softcap", [1.0, 20.0])
def test_scores_are_capped_softly(kernel: str, softcap: float, window: int | None) -> None:
    case = make([(1, 1), (70, 3), (600, 1), (130, 33)], 24, 2, 3)
    case.window, case.softcap = window, softcap
    case.q *= 4
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_sinks_take_their_share_and_add_nothing(kernel: str, scale: float, window: int | None) -> None:
    case = make([(1, 1), (70, 3), (600, 1), (1100, 2), (130, 33)], 24, 2, 3)
    case.window, case.sinks = window, torch.randn(6) * scale
    out = case.run()
    torch.testing.assert_close(out.double(), case.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", CACHES)
def test_linear_biases_grow_with_the_distance(kernel: str, dtype: torch.dtype, window: int | None) -> None:
    case = make([(1, 1), (70, 3), (600, 1), (130, 33)], 32, 2, 3, dtype=dtype)
    case.window, case.alibi = window, torch.tensor([0.5, 0.25, 0.0, 0.004, 0.03, 0.7])
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-4, atol=1e-5)


def test_scores_of_any_size_give_finite_weights(kernel: str) -> None:
    case = make([(150, 40)])
    for factor in (1e-30, 1e2, 1e4):
        case.q *= factor / case.q.abs().max()
        torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("context", [70, 600, 1300])
@pytest.mark.parametrize("window", [None, 100, 700])
def test_a_chunked_prompt_gives_the_same_bits_as_a_whole_one(
    isa: str, context: int, dtype: torch.dtype, window: int | None
) -> None:
    case = make([(context, context)], 32, 1, 3, dtype=dtype)
    case.window = window
    whole = case.run()
    for chunk in (1, 16, 100, 512):
        for begin in {0, chunk, context // chunk * chunk // 2 // chunk * chunk, (context - 1) // chunk * chunk}:
            end = min(begin + chunk, context)
            if begin >= context:
                continue
            part = Case(
                case.q[begin:end], case.k_cache, case.v_cache,
                ops.AttentionMeta(int32([0, end - begin]), int32([end]), case.meta.block_tables, end - begin, end),
                case.keys, case.values, window,
            )  # fmt: skip
            assert torch.equal(part.run(), whole[begin:end])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_neither_other_rows_nor_threads_change_a_bit(isa: str, threads: int) -> None:
    import oneloop_native

    case = make([(700, 1), (20, 20), (33, 2), (1200, 100), (90, 1)], 64, 2, 3)
    together = case.run()
    oneloop_native.set_num_threads(threads)
    assert torch.equal(case.run(), together)
    starts = case.meta.query_start_loc.tolist()
    for row, context in enumerate(case.meta.seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        meta = ops.AttentionMeta(
            int32([0, end - begin]), int32([context]), case.meta.block_tables[row : row + 1], end - begin, context
        )
        alone = Case(case.q[begin:end], case.k_cache, case.v_cache, meta, case.keys, case.values)
        assert torch.equal(alone.run(), together[begin:end])


def test_caches_and_queries_may_be_views(kernel: str) -> None:
    case = make([(40, 3), (5, 5)], 16, 2, 2)
    both = torch.stack([case.k_cache, case.v_cache], 1)
    qkv = torch.randn(8, 8, 16)
    qkv[:, :4] = case.q
    case.q, case.k_cache, case.v_cache = qkv[:, :4], both[:, 0], both[:, 1]
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-4, atol=1e-5)


def test_no_rows_and_rows_without_queries(kernel: str) -> None:
    assert make([]).run().shape == (0, 6, 64)
    case = make([(5, 0), (9, 2), (0, 0), (30, 1)])
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-4, atol=1e-5)


def test_inconsistent_rows_raise(isa: str) -> None:
    def run(starts: list[int], lens: list[int], tables: list[list[int]], heads: int = 4, head_size: int = 8) -> None:
        cache = torch.zeros(3, 2, 4, 8)
        meta = ops.AttentionMeta(int32(starts), int32(lens), torch.tensor(tables, dtype=torch.int32), 1, 1)
        ops.paged_attention(torch.zeros(2, heads, head_size), cache, cache, meta, 1.0)

    run([0, 2], [8], [[2, 0]])
    for starts in ([0, 1], [1, 2], [0, 3]):
        with pytest.raises(ValueError, match="query_starts does not run from 0 to the 2 tokens"):
            run(starts, [8], [[2, 0]])
    with pytest.raises(ValueError, match="query_starts at row 1 falls"):
        run([0, 3, 2], [8, 8], [[2, 0], [0, 1]])
    with pytest.raises(ValueError, match="query_starts has shape"):
        run([0, 2], [8, 8], [[2, 0], [0, 1]])
    with pytest.raises(ValueError, match="context_lens at row 0 is shorter"):
        run([0, 2], [1], [[2, 0]])
    with pytest.raises(ValueError, match="context_lens at row 0 needs 3 blocks"):
        run([0, 2], [9], [[2, 0]])
    for block in (-1, 3):
        with pytest.raises(ValueError, match="block_tables at row 0 names block"):
            run([0, 2], [8], [[2, block]])
    with pytest.raises(ValueError, match="block_tables has shape"):
        run([0, 2], [8], [[2, 0], [2, 0]])
    with pytest.raises(ValueError, match="3 heads for 2 kv heads"):
        run([0, 2], [8], [[2, 0]], heads=3)
    with pytest.raises(ValueError, match="k_cache has shape"):
        run([0, 2], [8], [[2, 0]], head_size=16)
