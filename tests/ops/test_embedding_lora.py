"""Adapters of an embedding: what each token's adapter adds to its row, on the host and in a device's memory."""

from __future__ import annotations

import pytest
import torch

import ops
from ops.lora import triton_lora
from ops.lora.layers import LoraLayers
from ops.lora.triton_index import index
from tests.ops.places import DEVICES

VOCAB, SIZE, SLOTS, MAX_RANK = 50, 24, 4, 12
SHAPE = ops.LoraShape(SIZE, VOCAB, (SIZE,), SLOTS, MAX_RANK)
PLACES = [
    pytest.param("cpu", False, id="host"),
    *(pytest.param(*each.values, True, marks=each.marks) for each in DEVICES),
]


def part(seed: int, rank: int) -> ops.LoraPart:
    random = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(size, generator=random) for size in ((rank, VOCAB), (SIZE, rank)))
    return ops.LoraPart(0, a, b, 0.5 + seed)


PARTS = {0: part(0, 12), 2: part(1, 3)}


@pytest.mark.parametrize(("device", "on_device"), PLACES)
def test_every_token_has_its_own_adapter_s_row(device, on_device, monkeypatch):
    """Slots that nothing was written into, that one without an adapter of the embedding has, and none."""
    if on_device:
        monkeypatch.setattr(ops.lora, "prepare_lora", triton_lora.prepare)
    place = torch.device(device)
    layers = LoraLayers({"embedding": (slots := ops.prepare_embedding_lora(SHAPE, torch.float32, place))}, SLOTS, place)
    assert bool(slots.slot_bytes) == on_device
    for slot, own in {**PARTS, 3: PARTS[0]}.items():
        layers.put(slot, layers.prepared({"embedding": [own]}))
    layers.put(3, layers.prepared({}))
    random = torch.Generator().manual_seed(5)
    ids, by_token = torch.randint(VOCAB, (37,), generator=random), [(-1, 0, 2, 3, 1)[at % 5] for at in range(37)]
    rows = torch.randn(37, SIZE, generator=random)
    want = rows.double()
    for token, slot in enumerate(by_token):
        if slot in PARTS:
            own = PARTS[slot]
            want[token] += own.scale * own.b.double() @ own.a[:, ids[token]].double()
    got, given = rows.to(place), torch.tensor(by_token, dtype=torch.int32, device=place)
    slots.add(ids.to(place), index(given, SLOTS) if on_device else ops.TokenAdapters(given), got)
    torch.testing.assert_close(got.cpu(), want.float(), rtol=1e-5, atol=1e-5)
