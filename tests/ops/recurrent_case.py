"""Steps of mixed requests over states full of NaN, and what recurrent ops mean, token by token in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

import ops

NUM_STATES = 9


@dataclass(frozen=True)
class Step:
    """`requests`: of each its tokens and how many came before them."""

    requests: tuple[tuple[int, int], ...]
    padding: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(num for num, _ in self.requests)

    @property
    def total_tokens(self) -> int:
        """With some that belong to no request."""
        return self.num_tokens + self.padding

    def state_indices(self, device) -> torch.Tensor:
        order = torch.randperm(NUM_STATES, generator=torch.Generator().manual_seed(3))[: len(self.requests)]
        return torch.cat([order, torch.full((self.padding,), -1)]).to(device)

    def meta(self, device) -> ops.AttentionMeta:
        lengths = torch.tensor([0, *(num for num, _ in self.requests), *[0] * self.padding])
        contexts = [num + before for num, before in self.requests] + [0] * self.padding
        uniform = not self.padding and all(num == 1 and before for num, before in self.requests)
        return ops.AttentionMeta(
            lengths.cumsum(0).int().to(device), torch.tensor(contexts, dtype=torch.int32, device=device),
            torch.zeros((1, 1), dtype=torch.int32, device=device), 1 if uniform else max(2, *(n for n, _ in self.requests)),
            1000, uniform=uniform,
        )  # fmt: skip

    def states(self, shape, device, stride: int = 0) -> torch.Tensor:
        """Of what came before; NaN where nothing did. Slots lie further apart than they are large."""
        random = torch.Generator().manual_seed(7)
        size = int(torch.Size(shape).numel())
        states = torch.full((NUM_STATES, size + 4), torch.nan)[:, :size].unflatten(1, shape)
        for state_index, (_, before) in zip(self.state_indices("cpu").tolist(), self.requests, strict=False):
            if before:
                states[state_index] = torch.randn(shape, generator=random)
        room = torch.full((NUM_STATES, size + 4), torch.nan, device=device)
        room[:, :size] = states.flatten(1).to(device)
        return room[:, :size].unflatten(1, shape)

    def spans(self):
        """Of each request: where it begins and ends, and whether its sequence begins there."""
        start = 0
        for num, before in self.requests:
            yield start, start + num, before == 0
            start += num


STEPS = {
    "one token each": Step(((1, 5), (1, 9), (1, 70))),
    "a sequence of one token, and padding": Step(((1, 0), (1, 3)), padding=2),
    "prompts and decodes": Step(((1, 4), (19, 0), (1, 0), (3, 20), (66, 6)), padding=3),
    "whole chunks": Step(((64, 0), (2, 1))),
}


def by_definition(step: Step, states: torch.Tensor, advance) -> tuple[torch.Tensor, torch.Tensor]:
    """`advance(token, state)` -> its output and the next state. Outputs of all tokens, and all states behind the step."""
    after, outputs = states.clone().cpu(), []
    for state_index, (start, end, begins) in zip(step.state_indices("cpu").tolist(), step.spans(), strict=False):
        state = torch.zeros(after.shape[1:]).double() if begins else after[state_index].double()
        for token in range(start, end):
            output, state = advance(token, state)
            outputs.append(output)
        after[state_index] = state.float()
    return torch.stack(outputs), after


def convolved(x, weight, bias, silu):
    def advance(token, state):
        seen = torch.cat([state, x[token, None].double()])
        out = (seen * weight.double()).sum(0) + (0 if bias is None else bias.double())
        return functional.silu(out) if silu else out, seen[1:]

    return advance


def scanned(xbc, dt, heads: ops.ScanHeads):
    width = heads.num_groups * heads.state_size
    x, b, c = xbc.double().split([heads.inner_size, width, width], 1)
    x = x.unflatten(1, (heads.num_heads, heads.head_size))
    b, c = (
        each.unflatten(1, (heads.num_groups, heads.state_size)).repeat_interleave(
            heads.num_heads // heads.num_groups, 1
        )
        for each in (b, c)
    )
    dt = functional.softplus(dt.double() + heads.dt_bias.double())

    def advance(token, state):
        fade = (dt[token] * heads.a.double()).exp()[:, None, None]
        state = state * fade + (dt[token, :, None] * x[token])[:, :, None] * b[token][:, None, :]
        out = (state * c[token][:, None, :]).sum(-1) + heads.d.double()[:, None] * x[token]
        return out.flatten(), state

    return advance


def selected(x, dt, b, c, a, d, gate):
    dt = functional.softplus(dt.double())
    x, b, c, gate = (each.double() for each in (x, b, c, gate))

    def advance(token, state):
        state = state * (dt[token, :, None] * a.double()).exp() + (dt[token] * x[token])[:, None] * b[token]
        out = (state * c[token]).sum(-1) + d.double() * x[token]
        return out * functional.silu(gate[token]), state

    return advance


def corrected(qkv, ba, heads: ops.DeltaHeads):
    q, k, v = qkv.double().split(list(heads.sizes), 1)
    repeats = heads.num_value_heads // heads.num_key_heads
    q, k = (
        (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeats, 1)
        for each in (part.unflatten(1, (heads.num_key_heads, heads.key_size)) for part in (q, k))
    )
    v = v.unflatten(1, (heads.num_value_heads, heads.value_size))
    beta, rate = ba.double().chunk(2, 1)
    fade = (heads.a.double() * functional.softplus(rate + heads.dt_bias.double())).exp()

    def advance(token, state):
        state = state * fade[token][:, None, None]
        error = v[token] - torch.einsum("hkv,hk->hv", state, k[token])
        state = state + torch.einsum("hk,hv->hkv", k[token], error * beta[token].sigmoid()[:, None])
        return torch.einsum("hkv,hk->hv", state, q[token]).flatten() * heads.key_size**-0.5, state

    return advance
