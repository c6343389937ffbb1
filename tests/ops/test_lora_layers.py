"""The slots of all layers of a model: an adapter takes them by one copy where they lie in one memory, layer by layer elsewhere."""

from __future__ import annotations

import pytest
import torch

import ops
from ops.lora.layers import LoraLayers
from ops.lora.reference import ReferenceLoraSlots
from ops.lora.triton_index import index
from ops.lora.triton_lora import TritonLoraSlots
from tests.ops.places import DEVICES

SHAPES = {"first": ops.LoraShape(40, 24, (16, 24), 2, 4), "second": ops.LoraShape(24, 40, (24,), 2, 4)}
ON_DEVICES = [
    pytest.param(TritonLoraSlots, *each.values, marks=each.marks, id=f"triton-{each.values[0]}") for each in DEVICES
]
KINDS = [pytest.param(ReferenceLoraSlots, "cpu", id="reference"), *ON_DEVICES]


def parts(seed: int, *names: str) -> dict[str, list[ops.LoraPart]]:
    """For each layer its last part."""
    random, found = torch.Generator().manual_seed(seed), {}
    for name in names:
        shape = SHAPES[name]
        a, b = (torch.randn(size, generator=random) for size in ((3, shape.in_features), (shape.parts[-1], 3)))
        found[name] = [ops.LoraPart(shape.out_features - shape.parts[-1], a, b, 2.0)]
    return found


class Model:
    def __init__(self, kind, device: str) -> None:
        self.device = torch.device(device)
        self.slots = {name: kind(shape, torch.float32, self.device) for name, shape in SHAPES.items()}
        self.layers = LoraLayers(self.slots, 2, self.device, num_ready=1)

    def added(self, slot: int) -> dict[str, torch.Tensor]:
        """What each layer adds to zeros for a token of ones."""
        adapters, found = index(torch.tensor([slot], dtype=torch.int32, device=self.device), 2), {}
        for name, shape in SHAPES.items():
            out = torch.zeros(1, shape.out_features, device=self.device)
            self.slots[name].add(torch.ones(1, shape.in_features, device=self.device), adapters, out)
            found[name] = out.cpu()
        return found


def expected(some: dict[str, list[ops.LoraPart]]) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros(1, shape.out_features) for name, shape in SHAPES.items()}
    for name, (part,) in some.items():
        found[name][0, part.start :] = 2 * part.b @ part.a.sum(1)
    return found


@pytest.mark.parametrize(("kind", "device"), KINDS)
def test_a_slot_has_its_last_adapter_in_every_layer(kind, device):
    """One that changes a layer less leaves nothing of the one before there, and other slots keep theirs."""
    model, both, one = Model(kind, device), parts(0, *SHAPES), parts(1, "second")
    first, second = model.layers.prepared(both), model.layers.prepared(one)
    model.layers.put(0, first)
    model.layers.put(1, first)
    model.layers.put(0, second)
    for slot, some in ((0, one), (1, both)):
        torch.testing.assert_close(model.added(slot), expected(some), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "device"), KINDS)
def test_memory_that_was_given_back_holds_the_next_adapter_alone(kind, device):
    """As many come and go as one likes; what is in a slot does not change by it."""
    model, both, one = Model(kind, device), parts(2, *SHAPES), parts(3, "first")
    first = model.layers.prepared(both)
    model.layers.put(0, first)
    model.layers.release(first)
    second = model.layers.prepared(one)
    if first.stretch is not None:
        assert second.stretch is first.stretch
    model.layers.put(1, second)
    for slot, some in ((0, both), (1, one)):
        torch.testing.assert_close(model.added(slot), expected(some), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "device"), ON_DEVICES)
def test_an_adapter_comes_by_one_copy(kind, device, monkeypatch):
    model = Model(kind, device)
    adapter, copies = model.layers.prepared(parts(4, *SHAPES)), []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, *args, **more: copies.append(self) or copy(self, *args, **more)
    )
    model.layers.put(1, adapter)
    assert [each.dim() for each in copies] == [1]
