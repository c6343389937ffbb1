"""Adapters beside a linear layer: every token takes its own slot's, and what computes it changes nothing."""

from __future__ import annotations

import pytest
import torch

import ops
import ops.native
from ops.lora.native import NativeLoraSlots
from ops.lora.reference import ReferenceLoraSlots
from ops.native import supports as native_supports
from ops.registry import USUAL

CPU = torch.device("cpu")
IN, PARTS = 96, (80, 24, 24)
KINDS = [
    pytest.param(ReferenceLoraSlots, id="reference"),
    pytest.param(
        NativeLoraSlots,
        id="native",
        marks=pytest.mark.skipif(native_supports(USUAL) is not None, reason=str(native_supports(USUAL))),
    ),
]


def share(seed: int, ranks: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[ops.LoraPart]:
    """A part for each rank that is not 0."""
    random, start, parts = torch.Generator().manual_seed(seed), 0, []
    for size, rank in zip(PARTS, ranks, strict=True):
        if rank:
            a = torch.randn(rank, IN, generator=random).to(dtype)
            parts.append(ops.LoraPart(start, a, torch.randn(size, rank, generator=random).to(dtype), 0.5 + seed))
        start += size
    return parts


SHARES = {0: share(0, (8, 8, 8)), 2: share(1, (16, 0, 3)), 3: share(2, (0, 40, 0))}


def made(kind, shares=SHARES, bits: int = 32) -> ops.LoraSlots:
    slots = kind(ops.LoraShape(sum(PARTS), IN, PARTS, 4, 64, bits), torch.float32, CPU)
    for slot, parts in shares.items():
        slots.put(slot, slots.prepared(parts))
    return slots


def expected(x: torch.Tensor, slots: list[int], out: torch.Tensor) -> torch.Tensor:
    """In float64, token by token."""
    want = out.double().clone()
    for token, slot in enumerate(slots):
        for part in SHARES.get(slot, []):
            added = part.scale * (x[token].double() @ part.a.double().T) @ part.b.double().T
            want[token, part.start : part.start + len(part.b)] += added
    return want


def added(kind, x: torch.Tensor, slots: list[int], out: torch.Tensor, bits: int = 32) -> torch.Tensor:
    out = out.clone()
    made(kind, bits=bits).add(x, ops.TokenAdapters(torch.tensor(slots, dtype=torch.int32)), out)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [[], [-1], [2], [-1, 0, 2, 3, 1], [0] * 40 + [3] * 3 + [-1] + [0] * 2 + [2] * 15])
def test_every_token_takes_its_own_slot_s_adapter(kind, slots):
    x, out = torch.randn(len(slots), IN), torch.randn(len(slots), sum(PARTS))
    got = added(kind, x, slots, out)
    assert got.shape == out.shape
    torch.testing.assert_close(got.double(), expected(x, slots, out), rtol=1e-5, atol=1e-3)
    untouched = [token for token, slot in enumerate(slots) if slot not in SHARES]
    assert torch.equal(got[untouched], out[untouched])


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bits", [32, 16, 8])
def test_what_a_token_gets_is_bitwise_its_own(kind, bits, threads):
    """Alone, in a crowd of its adapter, or beside others."""
    slots = [0] * 37 + [2] * 5 + [-1] + [3] * 20 + [0, 3, 2] * 4
    x, out = torch.randn(len(slots), IN), torch.randn(len(slots), sum(PARTS))
    before = ops.native.module.num_threads()
    try:
        ops.set_num_threads(threads)
        together = added(kind, x, slots, out, bits)
    finally:
        ops.set_num_threads(before)
    for token, slot in enumerate(slots):
        assert torch.equal(
            added(kind, x[token : token + 1], [slot], out[token : token + 1], bits), together[token : token + 1]
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_takes_another_adapter_and_none(kind):
    slots = made(kind)
    x, index = torch.randn(2, IN), ops.TokenAdapters(torch.tensor([0, 0], dtype=torch.int32))
    first, second, third = (torch.zeros(2, sum(PARTS)) for _ in range(3))
    slots.add(x, index, first)
    slots.put(0, slots.prepared(SHARES[2]))
    slots.add(x, index, second)
    slots.put(0, None)
    slots.add(x, index, third)
    torch.testing.assert_close(second.double(), expected(x, [2, 2], torch.zeros_like(second)), rtol=1e-5, atol=1e-3)
    assert not torch.allclose(first, second)
    assert not third.any()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_half_precision_is_computed_as_its_values_are_in_float32(kind):
    halves = share(7, (8, 4, 12), torch.bfloat16)
    wide = [ops.LoraPart(part.start, part.a.float(), part.b.float(), part.scale) for part in halves]
    x, index, outs = torch.randn(3, IN), ops.TokenAdapters(torch.zeros(3, dtype=torch.int32)), []
    for parts in (halves, wide):
        out = torch.zeros(3, sum(PARTS))
        made(kind, {0: parts}).add(x, index, out)
        outs.append(out)
    assert torch.equal(*outs)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_eight_bits_are_what_each_rank_is_rounded_to(kind):
    """A's rows and B's columns, each to 127 steps of its largest number; a rank of zeros stays one."""

    def rounded(values: torch.Tensor, dim: int) -> torch.Tensor:
        step = values.abs().amax(dim, keepdim=True) / 127
        return torch.where(step > 0, (values / step).round() * step, values)

    parts = share(7, (8, 4, 12))
    parts[1].a[2] = 0
    near = [ops.LoraPart(part.start, rounded(part.a, 1), rounded(part.b, 0), part.scale) for part in parts]
    x, index, outs = torch.randn(5, IN), ops.TokenAdapters(torch.zeros(5, dtype=torch.int32)), []
    for some, bits in ((parts, 8), (near, 32), (parts, 32)):
        out = torch.zeros(5, sum(PARTS))
        made(kind, {0: some}, bits).add(x, index, out)
        outs.append(out)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-3)
    assert 0 < (outs[0] - outs[2]).norm() < 0.02 * outs[2].norm()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_what_does_not_fit_is_refused(kind):
    slots = made(kind)
    with pytest.raises(ValueError, match="outside"):
        slots.add(torch.zeros(1, IN), ops.TokenAdapters(torch.tensor([4], dtype=torch.int32)), torch.zeros(1, 128))
    with pytest.raises(ValueError, match="not within the outputs"):
        slots.prepared([ops.LoraPart(120, torch.zeros(4, IN), torch.zeros(24, 4), 1.0)])
    with pytest.raises(ValueError, match="another layer"):
        slots.put(0, slots.prepared([ops.LoraPart(0, torch.zeros(4, IN + 1), torch.zeros(24, 4), 1.0)]))
    with pytest.raises(ValueError, match="no such slot"):
        slots.put(4, slots.prepared(SHARES[0]))
