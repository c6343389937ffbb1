"""Latent attention equals attention over the keys and values that the latents stand for, however it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import ops
from ops.attention import triton_latent
from ops.attention.heads import LatentHeads
from ops.attention.meta import AttentionMeta
from tests.ops.places import DEVICES, interpreted_in_16_bits, interpreted_once, places

PLACES = places(1e-5, 3e-3, 2e-2)
BLOCK = 16
MIXES = {
    "decode": [(1, 1), (1, 70), (1, 600), (1, 16)],
    "spans": [(33, 33), (5, 80), (18, 40)],
    "mixed": [(1, 130), (17, 17), (1, 5), (9, 50)],
}


@dataclass
class Case:
    """Tokens of a step; the whole contexts of its lines, latents turned, unpaged in float64, and a cache of all but the step."""

    q: Tensor
    latent: Tensor
    heads: LatentHeads
    positions: Tensor
    cache: Tensor
    slot_mapping: Tensor
    meta: AttentionMeta
    contexts: list[Tensor]

    def to(self, device: str, dtype: torch.dtype) -> tuple:
        heads = LatentHeads(
            self.heads.num_heads, self.heads.rank, self.heads.scale, self.heads.cos_sin.float().to(device)
        )
        starts, lens, tables = (
            tensor.to(device) for tensor in (self.meta.query_start_loc, self.meta.seq_lens, self.meta.block_tables)
        )
        meta = AttentionMeta(starts, lens, tables, self.meta.max_query_len, self.meta.max_seq_len)
        q, latent, cache = (tensor.to(device, dtype) for tensor in (self.q, self.latent, self.cache))
        return q, latent, heads, self.positions.to(device), cache, self.slot_mapping.to(device), meta

    def expected(self) -> Tensor:
        rank = self.heads.rank
        turned = turn(self.q[..., rank:], self.positions, self.heads.cos_sin)
        q, out, token = torch.cat([self.q[..., :rank], turned], -1), [], 0
        for (start, end), context in zip(self.lines(), self.contexts, strict=True):
            for i in range(end - start):
                seen = context[: len(context) - (end - start) + i + 1]
                out.append((q[token] @ seen.T * self.heads.scale).softmax(-1) @ seen[:, :rank])
                token += 1
        return torch.stack(out)

    def lines(self) -> list[tuple[int, int]]:
        starts = self.meta.query_start_loc.tolist()
        return list(pairwise(starts))


def turn(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Neighbours as complex numbers."""
    half = cos_sin.shape[1] // 2
    turns = torch.complex(cos_sin[positions, :half], cos_sin[positions, half:])
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * (turns if x.ndim == 2 else turns[:, None])).flatten(-2)


def case(spans, num_heads=3, rank=40, turned=8, seed=0) -> Case:
    random = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(size, generator=random, dtype=torch.float64)

    longest = max(context for _, context in spans)
    angles = torch.rand(longest, turned // 2, generator=random, dtype=torch.float64) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    width = -(-longest // BLOCK)
    tables = torch.randperm(len(spans) * width, generator=random).view(len(spans), width)
    cache = torch.full((len(spans) * width, 1, BLOCK, rank + turned), torch.nan, dtype=torch.float64)
    latents, positions, slots, contexts = [], [], [], []
    for line, (queries, context) in enumerate(spans):
        raw, at = draw(context, rank + turned), torch.arange(context)
        whole = torch.cat([raw[:, :rank], turn(raw[:, rank:], at, cos_sin)], 1)
        contexts.append(whole)
        slot = tables[line, at // BLOCK] * BLOCK + at % BLOCK
        old = slot[: context - queries]
        cache.view(-1, rank + turned)[old] = whole[: context - queries]
        latents.append(raw[context - queries :])
        positions.append(at[context - queries :])
        slots.append(slot[context - queries :])
    starts = torch.tensor([0, *(queries for queries, _ in spans)]).cumsum(0)
    meta = AttentionMeta(
        starts.int(), torch.tensor([c for _, c in spans], dtype=torch.int32), tables.int(),
        max(queries for queries, _ in spans), longest,
    )  # fmt: skip
    heads = LatentHeads(num_heads, rank, 0.2, cos_sin)
    num_tokens = int(starts[-1])
    q = draw(num_tokens, num_heads, rank + turned)
    return Case(q, torch.cat(latents), heads, torch.cat(positions), cache, torch.cat(slots), meta, contexts)


@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES)
def test_heads_mix_latents(kernel, spans):
    made = case(spans)
    out = ops.attend_latent(*made.to("cpu", torch.float32))
    torch.testing.assert_close(out.double(), made.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_once(PLACES))
@pytest.mark.parametrize("heads", [(1, 16, 4), (3, 40, 8), (18, 32, 8)], ids=str)
@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES)
def test_triton_mixes_latents(spans, heads, dtype, tolerance, device):
    check_triton(spans, heads, dtype, tolerance, device)


@pytest.mark.parametrize(("device", "dtype", "tolerance"), interpreted_in_16_bits(PLACES))
@pytest.mark.parametrize("spans", MIXES.values(), ids=MIXES)
def test_triton_mixes_latents_in_16_bits(spans, dtype, tolerance, device):
    check_triton(spans, (3, 40, 8), dtype, tolerance, device)


def check_triton(spans, heads, dtype, tolerance, device):
    made = case(spans, *heads)
    out = triton_latent.attend_latent(*made.to(device, dtype)).cpu().double()
    assert (out - made.expected()).norm() / made.expected().norm() < tolerance


@pytest.mark.parametrize("device", DEVICES)
def test_triton_stores_the_turned_latents_and_nothing_else(device):
    made = case(MIXES["mixed"])
    q, latent, heads, positions, cache, slots, meta = made.to(device, torch.float32)
    slots[3] = -1
    before = cache.clone()
    triton_latent.attend_latent(q, latent, heads, positions, cache, slots, meta)
    new = torch.cat(
        [
            context[len(context) - (end - start) :]
            for (start, end), context in zip(made.lines(), made.contexts, strict=True)
        ]
    )
    written = torch.arange(len(slots)) != 3
    flat = cache.view(-1, heads.head_size)
    torch.testing.assert_close(flat[slots[written]].cpu().double(), new[written], rtol=1e-5, atol=1e-5)
    flat[slots[written]] = before.view(-1, heads.head_size)[slots[written]]
    assert torch.equal(cache.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(("heads", "n", "k"), [(3, 20, 16), (5, 1, 7)])
def test_each_head_is_multiplied_by_its_own_matrix(kernel, heads, n, k):
    weight, x = torch.randn(heads, n, k), torch.randn(6, heads, k + 4)[..., 2 : k + 2]
    out = ops.linear_by_head(x, ops.prepare_heads(weight))
    torch.testing.assert_close(out, torch.einsum("thk,hnk->thn", x, weight), rtol=1e-4, atol=1e-5)
