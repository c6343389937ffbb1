"""Attention within a step by the compiled kernel: every instruction set beside the reference in float64, and the same bits whatever
stands beside a row; at the border, and as a part of a compiled stack."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ops
from ops import native
from ops.attention import _attend_packed_in_parts

LENGTHS = {
    "texts": [5, 1, 70, 17], "tiles": [64, 128, 96], "segments": [513, 1030, 3], "empty rows between": [0, 3, 0, 40],
}  # fmt: skip
HEADS = [(3, 3, 64), (4, 2, 32), (2, 1, 72), (1, 1, 128)]


@pytest.fixture(autouse=True)
def _native() -> None:
    if refusal := native.missing:
        pytest.skip(refusal)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def meta_of(lengths: list[int]) -> ops.AttentionMeta:
    starts = int32([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return ops.AttentionMeta(starts, int32(lengths), torch.empty(len(lengths), 0).int(), max(lengths), max(lengths))


def case(lengths: list[int], heads: int, kv_heads: int, size: int, *, turned: int = 0, **more):
    """qkv, heads, positions and meta."""
    random = torch.Generator().manual_seed(len(lengths) + size)
    qkv = torch.randn(sum(lengths), (heads + 2 * kv_heads) * size, generator=random)
    angles = torch.arange(max(lengths))[:, None] * 100 ** -(torch.arange(0, turned, 2) / max(1, turned))
    ours = ops.AttentionHeads(
        heads, kv_heads, size, size**-0.5, torch.cat([angles.cos(), angles.sin()], 1), mask="full"
    )
    positions = torch.cat([torch.arange(length) for length in lengths])
    return qkv, replace(ours, **more), positions, meta_of(lengths)


def wide(heads: ops.AttentionHeads) -> ops.AttentionHeads:
    norms = None if heads.norms is None else (heads.norms[0].double(), heads.norms[1].double())
    sinks = None if heads.sinks is None else heads.sinks.double()
    return replace(heads, cos_sin=heads.cos_sin.double(), norms=norms, sinks=sinks)


def check(qkv: Tensor, heads: ops.AttentionHeads, positions: Tensor, meta: ops.AttentionMeta) -> None:
    wanted = _attend_packed_in_parts(qkv.double(), wide(heads), positions, meta)
    got = ops.attend_packed(qkv.clone(), heads, positions, meta)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_query_sees_its_row_and_no_other(isa, lengths, heads):
    check(*case(lengths, *heads))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 300, 2000])
def test_a_window_reaches_both_ways(isa, window):
    check(*case([300, 7, 900], 4, 2, 32, window=window))


def test_norms_rotation_caps_and_sinks(isa):
    random = torch.Generator().manual_seed(3)
    norms = torch.rand(64, generator=random) + 0.5, torch.rand(64, generator=random) + 0.5
    check(*case([90, 5], 4, 2, 64, turned=32, norms=norms, norm_eps=1e-6))
    check(*case([90, 5], 4, 2, 64, softcap=2.0, sinks=torch.randn(4, generator=random), window=20))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_neither_other_rows_nor_threads_change_a_bit(isa, threads, request):
    request.addfinalizer(lambda: ops.set_num_threads(1))
    lengths = [700, 20, 33, 1200, 1]
    qkv, heads, positions, meta = case(lengths, 3, 3, 32)
    together = ops.attend_packed(qkv.clone(), heads, positions, meta)
    ops.set_num_threads(threads)
    assert torch.equal(ops.attend_packed(qkv.clone(), heads, positions, meta), together)
    start = 0
    for length in lengths:
        tokens = slice(start, start + length)
        alone = ops.attend_packed(qkv[tokens].clone(), heads, positions[tokens], meta_of([length]))
        assert torch.equal(alone, together[tokens])
        start += length


def test_a_nan_stays_in_its_row(isa):
    qkv, heads, positions, meta = case([70, 3, 90], 2, 2, 16)
    wanted = ops.attend_packed(qkv.clone(), heads, positions, meta)
    qkv[71] = torch.nan
    got = ops.attend_packed(qkv, heads, positions, meta)
    assert torch.equal(got[:70], wanted[:70])
    assert torch.equal(got[73:], wanted[73:])
    assert got[70:73].isnan().any()


def test_bad_arguments_raise():
    def run(
        starts: list[int], *, heads: int = 4, kv_heads: int = 2, size: int = 8, window: int = 0, tokens: int = 2
    ) -> None:
        q, kv = torch.zeros(2, heads, size), torch.zeros(tokens, kv_heads, size)
        native.module.packed_attention(q, kv, kv, int32(starts), 1.0, torch.empty_like(q), window)

    run([0, 2])
    run([0, 0, 2, 2])
    for starts in ([0, 1], [1, 2], [0, 3], []):
        with pytest.raises(ValueError, match="query_starts"):
            run(starts)
    with pytest.raises(ValueError, match="query_starts at row 1 falls"):
        run([0, 3, 2])
    with pytest.raises(ValueError, match="3 heads for 2 kv heads"):
        run([0, 2], heads=3)
    with pytest.raises(ValueError, match="not a multiple of 8: 12"):
        run([0, 2], size=12)
    with pytest.raises(ValueError, match="window is negative"):
        run([0, 2], window=-1)
    with pytest.raises(ValueError, match="k has shape"):
        run([0, 2], tokens=3)


def test_a_compiled_stack_computes_what_its_ops_do(isa):
    lengths, width, heads = [40, 1, 130], 96, 3
    random = torch.Generator().manual_seed(9)
    qkv_weight, out_weight = (
        ops.prepare_linear(ops.StoredWeight.dense(torch.randn(n, width, generator=random) / 10))
        for n in (3 * width, width)
    )
    ours = ops.AttentionHeads(heads, heads, 32, 0.2, torch.empty(256, 0), mask="full", window=50)

    def layer(x, step):
        stream = step.residual.clone()
        step.residual.zero_()
        mixed = ops.attend_packed(ops.linear(stream, qkv_weight), ours, step.positions, step.attn_metadata[0])
        return ops.linear(mixed, out_weight).add_(stream)

    tracer = ops.Tracer(width, 1, after=False)
    tracer.add(layer)
    stack = tracer.finish()
    x, meta = torch.randn(sum(lengths), width, generator=random), meta_of(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    residual = x.clone()
    got = stack.run(None, residual, positions, (torch.full((len(x),), -1),), (meta,))
    mixed = ops.attend_packed(ops.linear(x, qkv_weight), ours, positions, meta)
    assert torch.equal(got, ops.linear(mixed, out_weight) + x)
    assert not residual.any()


def test_a_compiled_stack_checks_the_rows_it_is_given():
    weight = ops.prepare_linear(ops.StoredWeight.dense(torch.zeros(96, 32)))
    ours = ops.AttentionHeads(4, 4, 8, 0.2, torch.empty(256, 0), mask="full")
    tracer = ops.Tracer(32, 1, after=False)
    tracer.add(
        lambda x, step: ops.attend_packed(
            ops.linear(step.residual, weight), ours, step.positions, step.attn_metadata[0]
        )
    )
    stack = tracer.finish()
    slots = (torch.full((4,), -1),)
    for lengths in ([3], [5], [2, 3]):
        with pytest.raises(ValueError, match="query_starts does not run from 0 to the 4 tokens"):
            stack.run(None, torch.zeros(4, 32), torch.arange(4), slots, (meta_of(lengths),))
    with pytest.raises(ValueError, match="no table"):
        stack.run(None, torch.zeros(4, 32), torch.arange(4), (), ())
