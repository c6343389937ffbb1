"""Ops of recurrent layers against what they mean: prompts in any pieces beside decodes, states in states that hold leftovers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import ops
from ops.conv import reference as conv_reference
from ops.conv import triton_conv
from ops.delta import reference as delta_reference
from ops.delta import triton_delta
from ops.norm import reference as norm_reference
from ops.norm import triton_gated
from ops.scan import reference as scan_reference
from ops.scan import triton_scan, triton_selective
from ops.scan.reference import decays
from tests.ops import recurrent_case as case
from tests.ops.places import DEVICES, places
from tests.ops.recurrent_case import STEPS

TRITON = [
    pytest.param("triton", *each.values, marks=each.marks, id=f"triton-{each.id}") for each in places(2e-5, 3e-3, 2e-2)
]
WAYS = [
    pytest.param("reference", "cpu", torch.float32, 2e-5, id="reference-float32"),
    pytest.param("reference", "cpu", torch.bfloat16, 2e-2, id="reference-bfloat16"),
    *TRITON,
]
ways = pytest.mark.parametrize(("kernel", "device", "dtype", "tolerance"), WAYS)


def cases(*shapes):
    """Every step with the first shape, the most mixed one with the others."""
    found = [pytest.param(step, *shapes[0], id=name) for name, step in STEPS.items()]
    found += [pytest.param(STEPS["prompts and decodes"], *shape, id=str(shape)) for shape in shapes[1:]]
    return found


def numbers(device, dtype):
    random = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=random).to(device, dtype)


def check(step, out, states, wanted, tolerance):
    """Outputs and states, those too that no request has."""
    outputs, after = wanted
    num = step.num_tokens
    assert (out[:num].double().cpu() - outputs).norm() / outputs.norm() < tolerance
    indices = step.state_indices("cpu")[: len(step.requests)]
    untouched = [state_index for state_index in range(case.NUM_STATES) if state_index not in indices.tolist()]
    assert states[untouched].isnan().all()
    got = states[indices].double().cpu()
    assert (got - after[indices]).norm() / after[indices].norm() < tolerance


@ways
@pytest.mark.parametrize(
    ("step", "channels", "conv_kernel", "bias", "silu"),
    cases((70, 4, True, True), (32, 3, False, False), (9, 2, True, False)),
)
def test_a_convolution_sees_the_last_tokens_of_its_sequence(
    kernel, device, dtype, tolerance, step, channels, conv_kernel, bias, silu
):
    make = numbers(device, dtype)
    x = make(step.total_tokens, channels + 5)[:, 3 : 3 + channels]  # rows of a wider matrix
    weight, bias = make(conv_kernel, channels), make(channels) if bias else None
    states = step.states((conv_kernel - 1, channels), device).to(dtype).float()
    wanted = case.by_definition(
        step, states, case.convolved(*(t if t is None else t.cpu() for t in (x, weight, bias)), silu)
    )
    run = {"reference": conv_reference, "triton": triton_conv}[kernel].causal_conv
    out = run(x, weight, bias, silu, states, step.state_indices(device), step.meta(device))
    assert out.dtype == dtype
    assert out.is_contiguous()
    check(step, out, states, wanted, tolerance)


@ways
@pytest.mark.parametrize(
    ("step", "heads", "head_size", "groups", "state_size"), cases((4, 16, 2, 32), (6, 12, 1, 24), (2, 64, 2, 128))
)
def test_a_state_space_scan(kernel, device, dtype, tolerance, step, heads, head_size, groups, state_size):
    make, wide = numbers(device, dtype), numbers(device, torch.float32)
    xbc = make(step.total_tokens, heads * head_size + 2 * groups * state_size)
    dt = make(step.total_tokens, heads + 3)[:, 2 : 2 + heads]
    shared = ops.ScanHeads(heads, head_size, groups, state_size, -wide(heads).exp(), wide(heads), wide(heads))
    states = step.states((heads, head_size, state_size), device)
    on_host = ops.ScanHeads(
        heads, head_size, groups, state_size, *(each.cpu() for each in (shared.a, shared.d, shared.dt_bias))
    )
    wanted = case.by_definition(step, states, case.scanned(xbc.cpu(), dt.cpu(), on_host))
    run = {"reference": scan_reference, "triton": triton_scan}[kernel].state_space_scan
    out = run(xbc, dt, shared, states, step.state_indices(device), step.meta(device))
    assert out.dtype == dtype
    check(step, out, states, wanted, tolerance)


@ways
@pytest.mark.parametrize(("step", "channels", "state_size"), cases((48, 16), (70, 6)))
def test_a_selective_scan(kernel, device, dtype, tolerance, step, channels, state_size):
    make, wide = numbers(device, dtype), numbers(device, torch.float32)
    total = step.total_tokens
    x, dt, gate = make(total, channels), make(total, channels), make(total, 2 * channels)[:, channels:]
    _, b, c = make(total, 5 + 2 * state_size).split([5, state_size, state_size], 1)
    a, d = -wide(channels, state_size).exp(), wide(channels)
    states = step.states((channels, state_size), device)
    inputs = (x, dt, b, c, a, d, gate)
    wanted = case.by_definition(step, states, case.selected(*(each.cpu() for each in inputs)))
    run = {"reference": scan_reference, "triton": triton_selective}[kernel].selective_scan
    out = run(*inputs, states, step.state_indices(device), step.meta(device))
    assert out.dtype == dtype
    check(step, out, states, wanted, tolerance)


@ways
@pytest.mark.parametrize(
    ("step", "key_heads", "value_heads", "key_size", "value_size"),
    cases((2, 4, 16, 32), (3, 3, 24, 20), (1, 2, 128, 40)),
)
def test_a_gated_delta_rule(kernel, device, dtype, tolerance, step, key_heads, value_heads, key_size, value_size):
    make, wide = numbers(device, dtype), numbers(device, torch.float32)
    qkv = make(step.total_tokens, 2 * key_heads * key_size + value_heads * value_size)
    ba = make(step.total_tokens, 2 * value_heads)
    sizes = key_heads, value_heads, key_size, value_size
    heads = ops.DeltaHeads(*sizes, -wide(value_heads).exp() / 4, wide(value_heads) - 2)
    states = step.states((value_heads, key_size, value_size), device)
    on_host = ops.DeltaHeads(*sizes, heads.a.cpu(), heads.dt_bias.cpu())
    wanted = case.by_definition(step, states, case.corrected(qkv.cpu(), ba.cpu(), on_host))
    run = {"reference": delta_reference, "triton": triton_delta}[kernel].gated_delta_rule
    out = run(qkv, ba, heads, states, step.state_indices(device), step.meta(device))
    assert out.dtype == dtype
    check(step, out, states, wanted, tolerance)


@ways
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize(("size", "group_size"), [(96, 24), (64, 64), (40, 20)])
def test_a_gated_norm(kernel, device, dtype, tolerance, gate_first, size, group_size):
    make = numbers(device, dtype)
    x, gate, weight = make(7, size), make(7, size + 9)[:, 4 : 4 + size], make(size)
    wide, factors = x.double().cpu(), functional.silu(gate.double().cpu())
    if gate_first:
        wide = wide * factors
    groups = wide.unflatten(1, (-1, group_size))
    wanted = (groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * weight.double().cpu()
    if not gate_first:
        wanted = wanted * factors
    run = {"reference": norm_reference, "triton": triton_gated}[kernel].gated_rms_norm
    out = run(x, gate, weight, 1e-5, group_size, gate_first)
    assert out.dtype == dtype
    assert (out.double().cpu() - wanted).norm() / wanted.norm() < tolerance


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_are_no_trouble(device):
    make = numbers(device, torch.float32)
    assert norm_reference.gated_rms_norm(make(0, 8), make(0, 8), make(8), 1e-5, 4, True).shape == (0, 8)
    assert triton_gated.gated_rms_norm(make(0, 8), make(0, 8), make(8), 1e-5, 4, True).shape == (0, 8)


def test_decays_between_neighbours_are_as_exact_as_their_logarithms_however_long_the_chunk() -> None:
    """An exponential is off by its argument's rounding, 2^-24 of it, and by its own: sums in float32, here up to 190, would be off
    by that of the sums, even between neighbours."""
    logs = -torch.rand(3, 64, generator=torch.Generator().manual_seed(1)) * 6
    for got, exact in zip(decays(logs), decays(logs.double()), strict=True):
        bound = exact * (-exact.log() / 2 + 2) * 2**-23
        near = exact > 1e-30  # what float32 has all digits of
        assert near.any()
        assert ((got - exact).abs() <= bound)[near].all()
