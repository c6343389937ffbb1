"""Which way a layer with adapters goes: by a product that adds them where it ends, where both have one; else behind the product."""

from __future__ import annotations

import pytest
import torch

import ops
from ops.gemm.low_rank import LowRank
from runtime.models.blocks.lora import LoraLinear

NOTHING = torch.zeros(0)
LOW = LowRank(*[NOTHING] * 8)


class Weight(ops.LinearWeight):
    """Adds at the end up to `most` rows, so that whoever reads its outputs knows which way they came."""

    out_features, in_features, nbytes = 2, 2, 0

    def __init__(self, most: int) -> None:
        self.most = most

    def matmul(self, x):
        return x

    def takes_low_rank(self, num_rows, *, gated):
        return num_rows <= self.most

    def matmul_plus(self, x, low, *, gated):
        assert low is LOW
        return torch.full_like(x[:, :1] if gated else x, 7)

    def rows(self, ids):
        raise NotImplementedError

    def refill(self, stored):
        raise NotImplementedError


class Slots(ops.LoraSlots):
    def __init__(self, has_ends: bool) -> None:
        super().__init__(ops.LoraShape(2, 2, (1, 1), 1, 16))
        self.has_ends, self.asked = has_ends, 0

    def prepared(self, parts):
        raise NotImplementedError

    def put(self, slot, share):
        raise NotImplementedError

    def low_rank(self, x, adapters, *, gated):
        self.asked += 1
        return LOW if self.has_ends else None

    def add(self, x, adapters, out, begun=None):
        out += 1


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("most", "has_ends"), [(4, True), (4, False), (3, True)])
def test_a_product_adds_adapters_where_it_ends_if_it_can(most, has_ends, gated):
    slots, x = Slots(has_ends), torch.zeros(4, 2)
    plain = LoraLinear(Weight(most), slots)
    layer = plain.of(ops.TokenAdapters(torch.zeros(4, dtype=torch.int32)))
    out = layer.gated_matmul(x) if gated else layer.matmul(x)
    if most == 4 and has_ends:
        expected = torch.full((4, 1 if gated else 2), 7.0)
    else:
        expected = torch.nn.functional.silu(torch.ones(4, 1)) if gated else torch.ones(4, 2)
    torch.testing.assert_close(out, expected)
    assert slots.asked == (most == 4)  # what is enqueued for it is enqueued only where the weight has a kernel
    assert plain.of(None).matmul(x) is x
