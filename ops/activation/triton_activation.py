"""Activations in Triton, plain and gated: one pass over the data, 16 bytes per thread."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.launch import overlap, wait_for_previous


@triton.jit
def _erf(x):
    # Error 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26), which disappears when rounding to 16 bits. The library's function takes
    # twice as long as the memory accesses.
    t = 1.0 / (1.0 + 0.3275911 * tl.abs(x))
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = series * tl.exp2(-1.4426950408889634 * x * x)
    return tl.where(x < 0.0, tail - 1.0, 1.0 - tail)


@triton.jit
def activated(x, KIND: tl.constexpr, EXACT: tl.constexpr = True):
    # float32 in and out. (1 + tanh(z)) / 2 is the logistic function of 2 z. EXACT: in float32 precision.
    if KIND == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        if EXACT:
            result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
        else:
            result = 0.5 * x * (1.0 + _erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        result = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(KIND == "relu" or KIND == "relu2")
        result = tl.where(x < 0.0, 0.0, x)  # keeps NaN
        if KIND == "relu2":
            result *= result
    return result


@triton.jit
def _activate(
    x_ptr, out_ptr, WIDTH: tl.constexpr, LANES: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # out [tokens, WIDTH]; x the same, or if GATED [tokens, 2 * WIDTH]: gate, then up.
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < WIDTH
    wait_for_previous(PDL)
    row = x_ptr + token * (2 * WIDTH if GATED else WIDTH)
    result = activated(tl.load(row + lane, mask=inside, other=0.0).to(tl.float32), KIND, EXACT)
    if GATED:
        result *= tl.load(row + WIDTH + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + lane, result.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    return gated(gate_up, "silu")


def gated(gate_up: Tensor, activation: str) -> Tensor:
    return _launch(gate_up, gate_up.shape[1] // 2, activation, gated=True)


def activate(x: Tensor, activation: str) -> Tensor:
    return _launch(x, x.shape[1], activation, gated=False)


def _launch(x: Tensor, width: int, activation: str, *, gated: bool) -> Tensor:
    num_tokens = x.shape[0]
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if num_tokens:
        lanes = min(1024, triton.next_power_of_2(width))
        _activate[(num_tokens, triton.cdiv(width, lanes))](
            x.contiguous(), out, WIDTH=width, LANES=lanes, KIND=activation, GATED=gated,
            EXACT=x.dtype == torch.float32, num_warps=4, **overlap(out.device),
        )  # fmt: skip
    return out
