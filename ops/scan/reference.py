"""State space scans in plain torch: Mamba-2's in chunks by matrix products, and Mamba's token by token.

Mamba-2: state space duality (Dao and Gu 2024). Mamba: selective scan (Gu and Dao 2023); every state dim has its own decay, so
matrix products are impossible. Any float dtype and device; math in float32 at least. The host reads the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ops.attention.meta import AttentionMeta


@dataclass(frozen=True, slots=True)
class ScanHeads:
    """Heads of a selective scan: `num_heads` heads of `head_size` dims share `num_groups` pairs of input and output vectors B,
    C of `state_size` dims; head h uses group h // (num_heads // num_groups).

    a (below 0), d and dt_bias [num_heads] float32: decay, skip connection, and offset of dt."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    a: Tensor
    d: Tensor
    dt_bias: Tensor

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_size


def decays(decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return products of decay factors, in the dtype of decay [..., n], which contains their logarithms: between [..., n, n],
    of tokens j + 1 to i, 0 above the diagonal; until [..., n], of tokens up to i; left [..., n], of tokens after i.

    Sums are float64: a difference of two sums is small where both are large, and their rounding would be the error of its
    exponential (sums of 100 in float32: 4e-6 of each factor)."""
    sums = decay.double().cumsum(-1)
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(decay.dtype).tril().exp().tril()
    left = (sums[..., -1:] - sums).to(decay.dtype).exp()
    return between, sums.to(decay.dtype).exp(), left


# Loop of reference implementations over the requests of a step: requests of one token together, longer ones one by
# one. A request that starts its sequence starts from zeros instead of its entry of the states.
def walk(
    states: Tensor, state_indices: Tensor, meta: AttentionMeta,
    single: Callable[[Tensor, Tensor], Tensor], span: Callable[[slice, Tensor], Tensor],
) -> None:  # fmt: skip
    """Advance states [num_states, ...] in place by the step's requests. state_indices [R] int64: each request's state, -1 for none.

    `single(tokens [n] int64, states)` returns the next states of n requests with one token each. `span(tokens, state)` returns the
    next state of one longer request. The host reads the step."""
    starts, seq_lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    ones: list[tuple[int, int, bool]] = []
    for request, state_index in enumerate(state_indices.tolist()):
        start, end = starts[request], starts[request + 1]
        if state_index < 0 or start == end:
            continue
        begins = seq_lens[request] == end - start
        if end - start == 1:
            ones.append((start, state_index, begins))
            continue
        before = torch.zeros_like(states[state_index]) if begins else states[state_index]
        states[state_index] = span(slice(start, end), before)
    if ones:
        tokens, at, begins_here = (torch.tensor(column, device=states.device) for column in zip(*ones, strict=True))
        before = states[at]
        before[begins_here] = 0
        states[at] = single(tokens, before)


CHUNK = 64  # tokens multiplied at once
SELECTIVE_CHUNK = 16  # tokens whose states [I, N] are in memory at once


def state_space_scan(
    xbc: Tensor, dt: Tensor, heads: ScanHeads, states: Tensor, state_indices: Tensor, meta: AttentionMeta
) -> Tensor:
    wide = torch.promote_types(xbc.dtype, torch.float32)
    groups, in_group = heads.num_groups, heads.num_heads // heads.num_groups
    width = groups * heads.state_size
    x, b, c = xbc.to(wide).split_with_sizes([heads.inner_size, width, width], dim=1)
    # One more dim than heads: [T, groups, heads of a group, ...], so that B and C of a group apply to all of its heads.
    x = x.unflatten(1, (groups, in_group, heads.head_size))
    b, c = (each.unflatten(1, (groups, 1, heads.state_size)) for each in (b, c))
    dt = functional.softplus(dt.to(wide) + heads.dt_bias)
    decay = (dt * heads.a).unflatten(1, (groups, in_group))
    dx = x * dt.unflatten(1, (groups, in_group)).unsqueeze(-1)
    out = torch.zeros_like(x)

    def single(tokens: Tensor, before: Tensor) -> Tensor:
        state = before.to(wide).unflatten(1, (groups, in_group)) * decay[tokens].exp()[..., None, None]
        state += dx[tokens].unsqueeze(-1) * b[tokens].unsqueeze(-2)
        out[tokens] = (state @ c[tokens].unsqueeze(-1)).squeeze(-1)
        return state.flatten(1, 2).to(before.dtype)

    def span(tokens: slice, before: Tensor) -> Tensor:
        state = before.to(wide).unflatten(0, (groups, in_group))
        for start in range(tokens.start, tokens.stop, CHUNK):
            part = slice(start, min(start + CHUNK, tokens.stop))
            dx_here, b_here, c_here = (each[part].movedim(0, -2) for each in (dx, b, c))
            mixed, state = _chunk(dx_here, b_here, c_here, decay[part].movedim(0, -1), state)
            out[part] = mixed.movedim(-2, 0)
        return state.flatten(0, 1).to(before.dtype)

    walk(states, state_indices, meta, single, span)
    out += x * heads.d.view(groups, in_group, 1)
    return out.flatten(1).to(xbc.dtype)


def _chunk(dx: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Process one chunk; return its results [G, R, n, P] and the next state. dx [G, R, n, P]; b, c [G, 1, n, N]; decay [G,
    R, n], logarithms; state [G, R, P, N]."""
    between, until, left = decays(decay)
    inside = (c @ b.transpose(-1, -2) * between) @ dx
    inherited = c @ state.transpose(-1, -2) * until.unsqueeze(-1)
    grown = (dx * left.unsqueeze(-1)).transpose(-1, -2) @ b
    return inside + inherited, state * until[..., -1, None, None] + grown


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, gate: Tensor, states: Tensor, state_indices: Tensor,
    meta: AttentionMeta,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide, b, c = (each.to(wide) for each in (x, b, c))
    dt = functional.softplus(dt.to(wide))
    out = torch.zeros_like(x_wide)

    def single(tokens: Tensor, before: Tensor) -> Tensor:
        dt_here = dt[tokens].unsqueeze(-1)
        grown = dt_here * x_wide[tokens].unsqueeze(-1) * b[tokens].unsqueeze(1)
        state = before.to(wide) * (dt_here * a).exp() + grown
        out[tokens] = (state @ c[tokens].unsqueeze(-1)).squeeze(-1)
        return state.to(before.dtype)

    def span(tokens: slice, before: Tensor) -> Tensor:
        state = before.to(wide)
        for start in range(tokens.start, tokens.stop, SELECTIVE_CHUNK):
            part = slice(start, min(start + SELECTIVE_CHUNK, tokens.stop))
            factors = (dt[part].unsqueeze(-1) * a).exp()
            behind = (dt[part] * x_wide[part]).unsqueeze(-1) * b[part].unsqueeze(1)
            for factor, sum_here in zip(factors, behind, strict=True):
                state = sum_here.addcmul_(factor, state)
            out[part] = (behind @ c[part].unsqueeze(-1)).squeeze(-1)
        return state.to(before.dtype)

    walk(states, state_indices, meta, single, span)
    return ((out + x_wide * d) * functional.silu(gate.to(wide))).to(x.dtype)
