"""Norms, rope, activations and store_kv: right to rounding at odd sizes and through views."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ops
from ops import native
from ops.kv.eight_bits import SCALE_BYTES, from_int8_entries, to_int8_entries

TOKENS = [0, 1, 2, 3, 17, 64, 257]
EPS = 1e-5


def norm64(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("hidden", [1, 7, 64, 576, 1000])
def test_rms_norm_matches_float64(kernel: str, hidden: int) -> None:
    weight = torch.randn(hidden)
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden) * 3
        torch.testing.assert_close(ops.rms_norm(x, weight, EPS).double(), norm64(x, weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(9,), (4, 9), (4, 3, 9), (2, 4, 3, 9)])
def test_rms_norm_keeps_the_shape_and_reads_views(kernel: str, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]], torch.randn(shape[-1])
    out = ops.rms_norm(x, weight, EPS)
    assert out.shape == shape
    torch.testing.assert_close(out.double(), norm64(x, weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden", [7, 576])
def test_add_rms_norm_adds_in_place_and_norms_the_sum(kernel: str, hidden: int) -> None:
    weight = torch.randn(hidden)
    for tokens in TOKENS:
        x, residual = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
        total = x + residual
        out = ops.add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(residual, total)
        torch.testing.assert_close(out.double(), norm64(total, weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden", [1, 7, 64, 576])
@pytest.mark.parametrize("parts", ["weight and bias", "weight", "neither"])
def test_layer_norms_match_float64(kernel: str, hidden: int, parts: str) -> None:
    weight = None if parts == "neither" else torch.randn(hidden)
    bias = torch.randn(hidden) if parts == "weight and bias" else None
    wide = [None if part is None else part.double() for part in (weight, bias)]
    for tokens in TOKENS:
        x, residual = torch.randn(tokens, hidden) + 5, torch.randn(tokens, hidden)
        total = x + residual
        expected = functional.layer_norm(x.double(), (hidden,), *wide, EPS)
        torch.testing.assert_close(ops.layer_norm(x, weight, bias, EPS).double(), expected, rtol=1e-5, atol=1e-5)
        out = ops.add_layer_norm(x, residual, weight, bias, EPS)
        assert torch.equal(residual, total)
        expected = functional.layer_norm(total.double(), (hidden,), *wide, EPS)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        out = ops.layer_norm_of_sum(x, total - x, weight, bias, EPS)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(9,), (4, 9), (4, 3, 9), (2, 4, 3, 9)])
def test_layer_norm_keeps_the_shape_and_reads_views(kernel: str, shape: tuple[int, ...]) -> None:
    x, bias = torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]], torch.randn(shape[-1])
    out = ops.layer_norm(x, None, bias, EPS)
    torch.testing.assert_close(out, functional.layer_norm(x, shape[-1:], None, bias, EPS), rtol=1e-5, atol=1e-5)


EXACT = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("activation", EXACT)
def test_activations_match_float64(kernel: str, activation: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 1001), torch.tensor([-200.0, -1e-30, 0.0, 1e-30, 200.0])])
    for width in (1, 7, 16, 1006):
        both = torch.stack([x[:width], torch.randn(width)]).repeat(3, 1)  # a row of them, then one of random numbers
        got = ops.activate(both, activation)
        torch.testing.assert_close(got.double(), EXACT[activation](both.double()), rtol=1e-6, atol=1e-6)
        gate_up = both.view(3, 2 * width)
        expected = EXACT[activation](gate_up[:, :width].double()) * gate_up[:, width:].double()
        torch.testing.assert_close(ops.gated(gate_up, activation).double(), expected, rtol=1e-6, atol=1e-6)
    assert ops.activate(torch.tensor([[torch.nan]]), activation).isnan().all()


def turned(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """The rotation as a complex product, in float64."""
    half = cos_sin.shape[1] // 2
    angle = torch.complex(cos_sin[positions, :half].double(), cos_sin[positions, half:].double())[:, None]
    part = x[..., : 2 * half].double()
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    product = torch.complex(a, b) * angle
    out = x.double().clone()
    if interleaved:
        out[..., : 2 * half : 2], out[..., 1 : 2 * half : 2] = product.real, product.imag
    else:
        out[..., :half], out[..., half : 2 * half] = product.real, product.imag
    return out


@pytest.mark.parametrize(("head_size", "rotated"), [(64, 64), (64, 32), (8, 8), (96, 24), (10, 6), (16, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_views_into_one_qkv_tensor(kernel: str, head_size: int, rotated: int, interleaved: bool) -> None:
    cos_sin = torch.randn(500, rotated)
    for tokens in TOKENS:
        qkv = torch.randn(tokens, 9, head_size)
        q, k, v = qkv.split([5, 2, 2], dim=1)
        positions = torch.randint(0, 500, (tokens,))
        expected_q, expected_k = (turned(x, positions, cos_sin, interleaved) for x in (q, k))
        untouched = v.clone()
        ops.rope(q, k, positions, cos_sin, interleaved)
        torch.testing.assert_close(q.double(), expected_q, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(k.double(), expected_k, rtol=1e-5, atol=1e-5)
        assert torch.equal(v, untouched)


@pytest.mark.parametrize("width", [1, 7, 64, 1536])
def test_silu_mul_matches_float64(kernel: str, width: int) -> None:
    for tokens in TOKENS:
        x = torch.randn(tokens, 2 * width) * 5
        expected = functional.silu(x[:, :width].double()) * x[:, width:].double()
        torch.testing.assert_close(ops.silu_mul(x).double(), expected, rtol=2e-6, atol=1e-7)


def test_silu_mul_is_right_at_the_ends_of_float32(kernel: str) -> None:
    gate = torch.tensor([[0.0, -0.0, 1e-30, 20.0, 88.7, 1e30, -20.0, -87.0, -95.0, -103.0, -1e4, float("inf")]])
    out = ops.silu_mul(torch.cat([gate, torch.ones_like(gate)], 1))
    torch.testing.assert_close(out, functional.silu(gate.double()).float(), rtol=1e-5, atol=1e-36)
    assert ops.silu_mul(torch.tensor([[float("nan"), 1.0]])).isnan().all()


def test_silu_mul_does_not_depend_on_the_place_in_the_row(isa: str) -> None:
    x = torch.randn(1, 37)
    whole = ops.silu_mul(torch.cat([x, x], 1))
    for begin in range(37):
        assert torch.equal(ops.silu_mul(torch.cat([x[:, begin:], x[:, begin:]], 1)), whole[:, begin:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (8, 4), (20, 3)])
def test_store_kv_writes_its_slots_and_nothing_else(
    kernel: str, dtype: torch.dtype, head_size: int, block_size: int
) -> None:
    for tokens in (0, 1, 2, 17, 64):
        qkv = torch.randn(tokens, 7, head_size)
        k, v = qkv[:, 2:4], qkv[:, 5:7]
        caches = [torch.randn(40, 2, block_size, head_size).to(dtype) for _ in range(2)]
        slots = torch.randperm(40 * block_size)[:tokens]
        slots[::5] = -1
        expected = [cache.clone() for cache in caches]
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[0][slot // block_size, :, slot % block_size] = k[token].to(dtype)
                expected[1][slot // block_size, :, slot % block_size] = v[token].to(dtype)
        ops.store_kv(k, v, *caches, slots)
        assert torch.equal(caches[0], expected[0])
        assert torch.equal(caches[1], expected[1])


def test_bfloat16_rounds_as_torch_does(kernel: str) -> None:
    halfway = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x00000001, 0x7F7FFFFF, 0x7F800000], dtype=torch.int32)
    k = torch.cat([halfway.view(torch.float32), torch.tensor([-0.0, float("nan")])]).view(1, 1, 8)
    caches = [torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16) for _ in range(2)]
    ops.store_kv(k, k, *caches, torch.tensor([0]))
    assert torch.equal(caches[0].flatten()[:7].view(torch.int16), k.bfloat16().flatten()[:7].view(torch.int16))
    assert caches[0].flatten()[7].isnan()


def int8_lines(x: Tensor) -> Tensor:
    """x [tokens, heads, D] through `store_kv`, [heads, tokens, D + SCALE_BYTES]."""
    if torch.int8 not in native.CACHE_TYPES:
        pytest.skip("oneloop_native is not built, or older than int8 caches")
    tokens, heads, head_size = x.shape
    caches = [torch.zeros(1, heads, tokens, head_size + SCALE_BYTES, dtype=torch.int8) for _ in range(2)]
    ops.store_kv(x, -x, *caches, torch.arange(tokens))
    torch.testing.assert_close(
        from_int8_entries(caches[1]), -from_int8_entries(caches[0]), rtol=0, atol=0, equal_nan=True
    )
    return caches[0][0]


@pytest.mark.parametrize("head_size", [1, 8, 20, 64, 100])
def test_int8_lines_are_half_a_step_off_and_the_same_bits_from_every_kernel(kernel: str, head_size: int) -> None:
    for size in (1e-30, 1.0, 1e30):
        x = torch.randn(9, 3, head_size) * size
        lines = int8_lines(x)
        assert torch.equal(lines, to_int8_entries(x.transpose(0, 1)))
        step = x.transpose(0, 1).abs().amax(-1, keepdim=True).double() / 127
        assert ((from_int8_entries(lines) - x.transpose(0, 1).double()).abs() <= step * 0.500001).all()


@pytest.mark.parametrize("head_size", [5, 6, 7, 8])
def test_a_single_int8_entry_is_read_back_wherever_its_scale_begins(kernel: str, head_size: int) -> None:
    x = torch.randn(1, 1, head_size)
    torch.testing.assert_close(from_int8_entries(int8_lines(x)), x, rtol=0, atol=float(x.abs().max()) / 250)


def test_int8_lines_of_what_has_no_scale(kernel: str) -> None:
    x = torch.randn(6, 1, 16)
    x[0], x[1, 0, 3], x[2, 0, 15], x[3, 0, 8], x[4] = 0, torch.nan, torch.inf, -torch.inf, 1e-45
    read_back = from_int8_entries(int8_lines(x))[0]
    assert (read_back[0] == 0).all()
    assert read_back[1:4].isnan().all()
    assert (read_back[4].abs() <= 1e-45).all()
    assert read_back[5].isfinite().all()


def test_an_int8_cache_without_room_for_scales_is_refused(isa: str) -> None:
    if torch.int8 not in native.CACHE_TYPES:
        pytest.skip("oneloop_native is older than int8 caches")
    k, cache = torch.randn(2, 3, 8), torch.zeros(4, 3, 4, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"k_cache has shape \[4, 3, 4, 8\], expected \[any, 3, any, 12\]"):
        ops.store_kv(k, k, cache, cache, torch.tensor([0, 1]))


def test_wrong_arguments_raise_and_write_nothing(isa: str) -> None:
    x, weight = torch.randn(4, 64), torch.ones(64)
    with pytest.raises(ValueError, match="weight has shape"):
        ops.rms_norm(x, weight[:63], EPS)
    with pytest.raises(ValueError, match="residual has shape"):
        ops.add_rms_norm(x, torch.randn(3, 64), weight, EPS)
    with pytest.raises(ValueError, match="gaps inside its rows"):
        ops.rms_norm(torch.randn(64, 4).t(), weight, EPS)
    with pytest.raises(ValueError, match="odd number of columns"):
        ops.silu_mul(torch.randn(2, 7))
    with pytest.raises(ValueError, match="no activation is called swash"):
        ops.activate(x, "swash")
    with pytest.raises(ValueError, match="bias has shape"):
        ops.layer_norm(x, weight, weight[:63], EPS)
    q, k, cos_sin = torch.randn(2, 4, 8), torch.randn(2, 2, 8), torch.randn(10, 8)
    for positions in ([0, 10], [-1, 0]):
        with pytest.raises(ValueError, match="positions holds"):
            ops.rope(q, k, torch.tensor(positions), cos_sin)
    with pytest.raises(ValueError, match="cos_sin turns 10 dims"):
        ops.rope(q, k, torch.tensor([0, 1]), torch.randn(10, 10))
    with pytest.raises(ValueError, match="k has shape"):
        ops.rope(q, k[:1], torch.tensor([0, 1]), cos_sin)
    caches = [torch.zeros(3, 2, 4, 8) for _ in range(2)]
    for slot in (-2, 12):
        with pytest.raises(ValueError, match="slots holds"):
            ops.store_kv(k, k, *caches, torch.tensor([0, slot]))
    with pytest.raises(ValueError, match="v_cache has shape"):
        ops.store_kv(k, k, caches[0], torch.zeros(3, 2, 5, 8), torch.tensor([0, 1]))
    with pytest.raises(TypeError, match="slots is int32"):
        ops.store_kv(k, k, *caches, torch.tensor([0, 1], dtype=torch.int32))
    assert not caches[0].any()
