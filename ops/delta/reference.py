"""Gated delta rule in plain torch, in chunks: Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024).

The state of a head is a matrix from keys to values. A token decays it, corrects its value for the token's key, and reads it
with its query. The corrections of a chunk depend on each other: a triangular system, solved at once. Any float dtype, any
device; math in float32 at least. Reads the step on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ops.attention.meta import AttentionMeta
from ops.scan.reference import decays, walk


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of a gated delta rule. Value head h uses query and key head h // (num_value_heads // num_key_heads).

    a (below 0) and dt_bias [num_value_heads] float32: a head's decay rate, and the bias of its dt."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    a: Tensor
    dt_bias: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the sizes of a token's q, k and v over all heads."""
        keys = self.num_key_heads * self.key_size
        return keys, keys, self.num_value_heads * self.value_size


CHUNK = 64  # tokens per triangular system
NORM_EPS = 1e-6


def gated_delta_rule(
    qkv: Tensor, ba: Tensor, heads: DeltaHeads, states: Tensor, state_indices: Tensor, meta: AttentionMeta
) -> Tensor:
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = qkv.to(wide).split_with_sizes(heads.sizes, dim=1)
    # [T, key heads, value heads of a key head, ...]: q and k of a key head are used by all of its value heads.
    grouped = (heads.num_key_heads, heads.num_value_heads // heads.num_key_heads)
    q, k = (_unit(each.unflatten(1, (heads.num_key_heads, 1, heads.key_size))) for each in (q, k))
    q = q * heads.key_size**-0.5
    v = v.unflatten(1, (*grouped, heads.value_size))
    b, a = ba.to(wide).chunk(2, dim=1)
    beta = b.sigmoid().unflatten(1, grouped)
    decay = (heads.a * functional.softplus(a + heads.dt_bias)).unflatten(1, grouped)
    out = torch.zeros_like(v)

    def single(tokens: Tensor, before: Tensor) -> Tensor:
        key = k[tokens].unsqueeze(-1)
        state = before.to(wide).unflatten(1, grouped) * decay[tokens].exp()[..., None, None]
        error = v[tokens] - (state * key).sum(-2)
        state = state + key * (error * beta[tokens].unsqueeze(-1)).unsqueeze(-2)
        out[tokens] = (state * q[tokens].unsqueeze(-1)).sum(-2)
        return state.flatten(1, 2).to(before.dtype)

    def span(tokens: slice, before: Tensor) -> Tensor:
        state = before.to(wide).unflatten(0, grouped)
        for start in range(tokens.start, tokens.stop, CHUNK):
            part = slice(start, min(start + CHUNK, tokens.stop))
            q_here, k_here, v_here = (each[part].movedim(0, -2) for each in (q, k, v))
            beta_here, decay_here = (each[part].movedim(0, -1) for each in (beta, decay))
            mixed, state = _chunk(q_here, k_here, v_here, beta_here, decay_here, state)
            out[part] = mixed.movedim(-2, 0)
        return state.flatten(0, 1).to(before.dtype)

    walk(states, state_indices, meta, single, span)
    return out.flatten(1).to(qkv.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _chunk(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Process one chunk and return its results [K, R, n, Dv] and the next state. q, k [K, 1, n, Dk]; v [K, R, n, Dv]; beta
    and decay (logarithms) [K, R, n]; state [K, R, Dk, Dv]."""
    between, until, left = decays(decay)
    faded = until.unsqueeze(-1)
    system = (k @ k.transpose(-1, -2)) * between * beta.unsqueeze(-1)
    errors = (v - (k @ state) * faded) * beta.unsqueeze(-1)
    corrections = torch.linalg.solve_triangular(system, errors, upper=False, unitriangular=True)
    mixed = (q @ state) * faded + ((q @ k.transpose(-1, -2)) * between) @ corrections
    return mixed, state * until[..., -1, None, None] + (k * left.unsqueeze(-1)).transpose(-1, -2) @ corrections
