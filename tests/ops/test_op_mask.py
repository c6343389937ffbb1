"""Attention masks against a plain float64 softmax; who computes only causal attention says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ops
from ops import native
from ops.attention import _attend, _paged_attention, packed_torch
from ops.attention.heads import MASKS
from ops.registry import USUAL_ATTENTION
from tests.ops.test_op_attention import int32

HEADS, KV_HEADS, D, BLOCK = 4, 2, 16, 4
ROWS = [(5, 0), (300, 7), (1, 1), (9, 9)]  # tokens of a row, of which that many are a prefix


def shows(mask: str, query: int, key: int, prefix: int) -> bool:
    return mask == "full" or key <= query or (mask == "prefix_full" and query < prefix and key < prefix)


def expected(qkv: Tensor, mask: str, scale: float) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) * D] float64, of ROWS side by side -> [T, Hq * D]."""
    out, start = torch.empty(len(qkv), HEADS, D, dtype=torch.float64), 0
    for length, prefix in ROWS:
        heads = qkv[start : start + length].view(length, -1, D)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        seen = torch.tensor([[shows(mask, i, j, prefix) for j in range(length)] for i in range(length)])
        scores = (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(~seen, -torch.inf)
        out[start : start + length] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
        start += length
    return out.flatten(1)


def heads(mask: str) -> ops.AttentionHeads:
    return ops.AttentionHeads(HEADS, KV_HEADS, D, 0.3, torch.empty(64, 0), mask=mask)


def step() -> tuple[Tensor, Tensor, ops.AttentionMeta, Tensor]:
    """qkv, positions, meta and slot_mapping; tables of blocks in order."""
    lengths = [length for length, _ in ROWS]
    qkv = torch.randn(sum(lengths), (HEADS + 2 * KV_HEADS) * D, generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])
    most = -(-max(lengths) // BLOCK)
    tables = torch.arange(len(ROWS) * most, dtype=torch.int32).view(len(ROWS), most)
    row_of = torch.repeat_interleave(torch.arange(len(ROWS)), torch.tensor(lengths))
    slot_mapping = tables[row_of, positions // BLOCK].long() * BLOCK + positions % BLOCK
    meta = ops.AttentionMeta(
        int32([0, *torch.tensor(lengths).cumsum(0).tolist()]), int32(lengths), tables, max(lengths), max(lengths),
        prefix_lens=int32([prefix for _, prefix in ROWS]),
    )  # fmt: skip
    return qkv, positions, meta, slot_mapping


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cached", [True, False])
def test_a_query_sees_what_its_mask_shows(mask, cached):
    qkv, positions, meta, slot_mapping = step()
    wanted = expected(qkv.double(), mask, 0.3)
    if cached:
        k_cache, v_cache = (torch.full((meta.block_tables.numel(), KV_HEADS, BLOCK, D), torch.nan) for _ in "kv")
        got = ops.attend(qkv, heads(mask), positions, k_cache, v_cache, slot_mapping, meta)
    else:
        got = ops.attend_packed(qkv, heads(mask), positions, meta)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernels", [None, "reference"])
@pytest.mark.parametrize("window", [1, 7, 256, 400])
def test_a_window_of_a_full_mask_reaches_both_ways_and_relative_biases_go_by_distance(window, kernels, request):
    ops.force(kernels, "attend_packed")
    request.addfinalizer(lambda: ops.force(None, "attend_packed"))
    qkv, positions, meta, _ = step()
    biases = torch.randn(HEADS, 2 * 300 - 1, generator=torch.Generator().manual_seed(2))
    ours = replace(heads("full"), window=window, relative_bias=biases)
    wanted, start = torch.empty(len(qkv), HEADS, D, dtype=torch.float64), 0
    for length, _ in ROWS:
        q, k, v = qkv[start : start + length].double().view(length, -1, D).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        behind = torch.arange(length) - torch.arange(length)[:, None]
        scores = torch.einsum("ihd,jhd->hij", q, k) * 0.3 + biases.double()[:, 299 + behind]
        scores = scores.masked_fill(behind.abs() >= window, -torch.inf)
        wanted[start : start + length] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
        start += length
    got = ops.attend_packed(qkv, ours, positions, meta)
    torch.testing.assert_close(got.double(), wanted.flatten(1), rtol=0, atol=1e-5)


def test_a_prefix_may_lie_in_an_earlier_step_but_not_across_two():
    qkv, positions, meta, slot_mapping = step()
    wanted = expected(qkv.double(), "prefix_full", 0.3)[-9:]
    cache = [torch.full((meta.block_tables.numel(), KV_HEADS, BLOCK, D), torch.nan) for _ in "kv"]

    def run(first: int, last: int, prefix: int) -> Tensor:
        """Of the last row, tokens [first, last)."""
        tokens = slice(len(qkv) - 9 + first, len(qkv) - 9 + last)
        part = replace(
            meta, query_start_loc=int32([0, last - first]), seq_lens=int32([last]), block_tables=meta.block_tables[3:],
            prefix_lens=int32([prefix]),
        )  # fmt: skip
        return ops.attend(
            qkv[tokens].clone(), heads("prefix_full"), positions[tokens], *cache, slot_mapping[tokens], part
        )

    for first, last in ((0, 5), (5, 9)):
        with pytest.raises(ValueError, match="must be computed in one step"):
            run(first, last, 9)
    run(0, 9, 9)
    assert torch.equal(run(5, 9, 5), run(5, 9, 0))  # behind the prefix it is causal
    torch.testing.assert_close(run(0, 9, 9).double(), wanted, rtol=0, atol=1e-5)


def test_a_prefix_mask_needs_the_lengths_of_prefixes():
    qkv, positions, meta, _ = step()
    with pytest.raises(ValueError, match="prefix_lens"):
        ops.attend_packed(qkv, heads("prefix_full"), positions, replace(meta, prefix_lens=None))


@pytest.mark.parametrize("op", [_attend, _paged_attention], ids=lambda op: op.name)
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_only_the_reference_computes_other_masks(op, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    case = USUAL_ATTENTION._replace(device=device, dtype=dtype, kv_dtype=dtype, mask="full")
    kernels = [*op.kernels, *([op._traced] if op._traced else [])]
    assert [kernel.name for kernel in kernels if kernel.supports(case) is None] == ["reference"]


def test_tracing_refuses_other_masks():
    if not ops.can_trace(torch.device("cpu"), torch.float32):
        pytest.skip("nothing is traced here")
    weight = ops.prepare_linear(ops.StoredWeight.dense(torch.randn((HEADS + 2 * KV_HEADS) * D, 32)))
    cache = [torch.zeros(8, KV_HEADS, BLOCK, D) for _ in "kv"]
    tracer = ops.Tracer(32, 1, after=False)

    def cached(x, symbols):
        qkv = ops.linear(symbols.residual, weight)
        return ops.attend(
            qkv, heads("full"), symbols.positions, *cache, symbols.slot_mapping[0], symbols.attn_metadata[0]
        )

    def packed(x, symbols):
        qkv = ops.linear(symbols.residual, weight)
        return ops.attend_packed(qkv, heads("full"), symbols.positions, symbols.attn_metadata[0])

    with pytest.raises(ops.NotTraceable):
        tracer.add(cached)
    if native.missing is not None:
        with pytest.raises(ops.NotTraceable):
            tracer.add(packed)


@pytest.mark.parametrize("lengths", [(5, 5, 5, 1, 1, 9), (3,), (2, 2), (7, 1, 7)])
def test_rows_of_one_length_beside_each_other_are_as_each_alone(lengths):
    qkv = torch.randn(sum(lengths), (HEADS + 2 * KV_HEADS) * D, generator=torch.Generator().manual_seed(4))
    ends = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    meta = ops.AttentionMeta(
        int32(ends), int32(lengths), torch.empty(len(lengths), 0).int(), max(lengths), max(lengths)
    )
    positions = torch.cat([torch.arange(length) for length in lengths])
    got = ops.attend_packed(qkv.clone(), heads("full"), positions, meta)
    for start, length in zip(ends, lengths, strict=False):
        alone = ops.AttentionMeta(int32([0, length]), int32([length]), torch.empty(1, 0).int(), length, length)
        tokens = slice(start, start + length)
        wanted = ops.attend_packed(qkv[tokens].clone(), heads("full"), positions[tokens], alone)
        torch.testing.assert_close(got[tokens], wanted, rtol=0, atol=1e-6)


@pytest.fixture
def by_torch() -> Iterator[None]:
    ops.force("torch", "attend_packed")
    yield
    ops.force(None, "attend_packed")


def test_what_torch_s_kernel_lacks_is_the_references(by_torch):
    qkv, positions, meta, _ = step()
    capped = replace(heads("full"), softcap=2.0)
    got = ops.attend_packed(qkv.clone(), capped, positions, meta)
    uncapped = ops.attend_packed(qkv.clone(), heads("full"), positions, meta)
    ops.force("reference", "attend_packed")
    assert torch.equal(got, ops.attend_packed(qkv.clone(), capped, positions, meta))
    assert not torch.allclose(got, uncapped)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_threads_that_share_heads_change_nothing(threads, biased, monkeypatch, by_torch):
    monkeypatch.setattr(packed_torch, "_WORTH_SHARING", 1)
    qkv, positions, meta, _ = step()
    biases = torch.randn(HEADS, 2 * 300 - 1, generator=torch.Generator().manual_seed(2)) if biased else None
    ours = replace(heads("full"), relative_bias=biases)
    monkeypatch.setattr(packed_torch, "num_threads", lambda x: 1)
    wanted = ops.attend_packed(qkv.clone(), ours, positions, meta)
    monkeypatch.setattr(packed_torch, "num_threads", lambda x: threads)
    with torch.inference_mode():
        got = ops.attend_packed(qkv.clone(), ours, positions, meta)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_torch_s_own_threads_are_left_alone():
    if native.module is None:
        pytest.skip("no native kernels")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert packed_torch.num_threads(torch.empty(1)) == 1
        torch.set_num_threads(1)
        assert packed_torch.num_threads(torch.empty(1)) == native.module.num_threads()
    finally:
        torch.set_num_threads(before)
