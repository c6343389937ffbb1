"""Shapes at random through every native kernel, of every instruction set: the values are right, whatever the remainders."""

from __future__ import annotations

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ops
from ops import native
from ops.kv.eight_bits import from_int8_entries, to_int8_entries
from ops.stored import BLOCKS
from tests.ops.test_op_block_linear import random_rows, rounded

FUZZ = settings(max_examples=settings.default.max_examples // 2)

TYPES = sorted(kind.name for kind, block in BLOCKS.items() if block.on_cpu)


@FUZZ
@given(
    st.sampled_from(TYPES), st.integers(1, 70), st.integers(1, 4), st.integers(1, 40), st.integers(0, 99)
)  # fmt: skip
def test_quantised_linears(isa: str, kind: str, n: int, blocks: int, tokens: int, seed: int) -> None:
    k = blocks * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    rows, values = random_rows(kind, n, k, seed)
    x = torch.randn(tokens, k)
    expected = rounded(x) @ values.T
    got = ops.linear(x, ops.prepare_linear(rows)).numpy()
    assert (abs(got - expected) <= 1e-5 * (abs(rounded(x)) @ abs(values).T + 1)).all()


@FUZZ
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(1, 70), st.integers(1, 130),
    st.integers(1, 40), st.booleans(),
)  # fmt: skip
def test_linears_of_floats_and_of_int8(isa: str, dtype: torch.dtype, n: int, k: int, tokens: int, int8: bool) -> None:
    weight, bias, x = torch.randn(n, k).to(dtype), torch.randn(n), torch.randn(tokens, k)
    make = ops.StoredWeight.int8 if int8 else ops.StoredWeight.dense
    got = ops.linear(x, ops.prepare_linear(make(weight, bias), torch.float32))
    exact = x.double() @ weight.double().T + bias.double()
    room = (x.double().abs() @ weight.double().abs().T + 1) * (0.02 if int8 else 1e-5)
    assert ((got - exact).abs() <= room).all()


@FUZZ
@given(st.data())
def test_attention(isa: str, data: st.DataObject) -> None:
    draw = data.draw
    kv_heads, group, head_size = draw(st.integers(1, 3)), draw(st.integers(1, 4)), 8 * draw(st.integers(1, 9))
    block_size = draw(st.sampled_from([1, 8, 16, 24]))
    spans = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 700)), min_size=1, max_size=4))
    spans = [(queries, queries + before) for queries, before in spans if queries]
    if not spans:
        return
    num_blocks = max(-(-context // block_size) for _, context in spans) + 1
    tables = torch.stack([torch.randperm(num_blocks) for _ in spans]).int()
    starts = torch.tensor([0, *(queries for queries, _ in spans)]).cumsum(0).int()
    lens = torch.tensor([context for _, context in spans]).int()
    meta = ops.AttentionMeta(starts, lens, tables, int(starts.diff().max()), int(lens.max()))
    dtype = draw(st.sampled_from(sorted(native.CACHE_TYPES, key=str)))
    shape = (num_blocks, kv_heads, block_size, head_size)
    k, v = (
        to_int8_entries(x) if dtype == torch.int8 else x.to(dtype) for x in (torch.randn(shape), torch.randn(shape))
    )
    wide_k, wide_v = (from_int8_entries(x) if dtype == torch.int8 else x.float() for x in (k, v))
    q = torch.randn(int(starts[-1]), kv_heads * group, head_size)
    window = draw(st.none() | st.integers(1, 400))
    got = ops.paged_attention(q, k, v, meta, 0.1, window)
    ops.force("reference")
    try:
        expected = ops.paged_attention(q, wide_k, wide_v, meta, 0.1, window)
    finally:
        ops.force(None)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@FUZZ
@given(st.integers(1, 300), st.integers(1, 9), st.sampled_from(["silu", "gelu", "gelu_tanh", "relu", "relu2"]))
def test_rows(isa: str, width: int, tokens: int, activation: str) -> None:
    x, weight = torch.randn(tokens, width), torch.randn(width)
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (width,), weight, 1e-5), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        ops.layer_norm(x, weight, None, 1e-5), torch.nn.functional.layer_norm(x, (width,), weight, None, 1e-5),
        rtol=1e-3, atol=1e-4,
    )  # fmt: skip
    gate_up = torch.randn(tokens, 2 * width)
    alone = ops.activate(gate_up[:, :width].contiguous(), activation)
    torch.testing.assert_close(ops.gated(gate_up, activation), alone * gate_up[:, width:], rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def _native() -> None:
    pytest.importorskip("oneloop_native")
