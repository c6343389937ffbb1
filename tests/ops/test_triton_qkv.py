"""The pass between qkv projection and attention against its parts in float64: norm, rope, cache writes, one after the other."""

from __future__ import annotations

import pytest
import torch

from ops.kv import reference as kv_reference
from ops.norm import reference as norm_reference
from ops.rope import reference as rope_reference
from ops.rope.triton_qkv import norm_rope_store
from tests.ops.places import DEVICES, places

BLOCK, MAX_POSITION = 16, 300


def inputs(tokens, heads, kv_heads, head_size, turned, dtype, device, normed=True):
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_size, generator=random)
    norms = tuple(torch.rand(head_size, generator=random).to(device, dtype) + 0.5 for _ in "qk") if normed else None
    positions = torch.randint(MAX_POSITION, (tokens,), generator=random)
    angles = torch.arange(MAX_POSITION)[:, None] * 100 ** -(torch.arange(0, turned, 2) / max(1, turned))
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(device)
    num_blocks = tokens // BLOCK + 3
    slots = torch.randperm(num_blocks * BLOCK, generator=random)[:tokens]
    slots[1::4] = -1
    caches = [torch.full((num_blocks, kv_heads, BLOCK, head_size), 9.0, dtype=dtype, device=device) for _ in "kv"]
    return qkv.to(device, dtype), norms, positions.to(device), cos_sin, caches, slots.to(device)


def by_parts(qkv, heads, kv_heads, head_size, norms, positions, cos_sin, caches, slots):
    """The same in float64, but for one rounding: a normed head has the model's dtype before it turns."""
    wide = qkv.double().unflatten(1, (-1, head_size))
    q, k, v = wide.clone().split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = (
            norm_reference.rms_norm(part, weight.double(), 1e-6).to(qkv.dtype).double()
            for part, weight in zip((q, k), norms, strict=True)
        )
    rope_reference.rope(q, k, positions, cos_sin.double(), False)
    caches = [cache.double() for cache in caches]
    kv_reference.store_kv(k, v, *caches, slots)
    return torch.cat([q, wide[:, heads:]], dim=1).flatten(1), *caches


@pytest.mark.parametrize(("device", "dtype", "tolerance"), places(1e-6, 1e-3, 8e-3))
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_size", "turned", "normed"),
    [
        (1, 16, 8, 128, 128, True),
        (7, 4, 2, 64, 64, False),
        (9, 9, 3, 64, 64, True),
        (5, 8, 1, 256, 64, True),
        (3, 6, 2, 96, 96, True),
        (6, 4, 4, 96, 32, False),
        (37, 40, 20, 64, 32, True),
        (0, 4, 2, 64, 64, True),
        (5, 4, 2, 96, 0, True),
        (5, 6, 1, 64, 0, False),
    ],
)
def test_matches_its_parts(device, dtype, tolerance, tokens, heads, kv_heads, head_size, turned, normed):
    qkv, norms, positions, cos_sin, caches, slots = inputs(
        tokens, heads, kv_heads, head_size, turned, dtype, device, normed
    )
    wanted = by_parts(qkv, heads, kv_heads, head_size, norms, positions, cos_sin, caches, slots)
    norm_rope_store(qkv, heads, kv_heads, head_size, norms, 1e-6, positions, cos_sin, *caches, slots)
    for got, want in zip((qkv, *caches), wanted, strict=True):
        if want.numel():
            assert (got.double() - want).norm() / want.norm() < tolerance


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_of_another_dtype_gets_what_qkv_holds(device):
    qkv, norms, positions, cos_sin, caches, slots = inputs(8, 4, 2, 64, 64, torch.float32, device)
    caches = [cache.half() for cache in caches]
    alone = qkv.clone()
    norm_rope_store(qkv, 4, 2, 64, norms, 1e-6, positions, cos_sin, *caches, slots)
    norm_rope_store(alone, 4, 2, 64, norms, 1e-6, positions, cos_sin)
    _, k, v = alone.unflatten(1, (-1, 64)).split([4, 2, 2], dim=1)
    wanted = [torch.full_like(cache, 9.0) for cache in caches]
    kv_reference.store_kv(k, v, *wanted, slots)
    torch.testing.assert_close(caches, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_values_pass_unchanged_and_padding_stores_nothing(device):
    qkv, norms, positions, cos_sin, caches, _ = inputs(8, 4, 2, 64, 64, torch.float32, device)
    before, nowhere = qkv.clone(), torch.full((8,), -1, dtype=torch.int64, device=device)
    norm_rope_store(qkv, 4, 2, 64, norms, 1e-6, positions, cos_sin, *caches, nowhere)
    assert torch.equal(qkv[:, 6 * 64 :], before[:, 6 * 64 :])
    assert all((cache == 9.0).all() for cache in caches)
