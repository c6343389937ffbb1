"""KVCache: who stores where."""

import random

import torch

from runtime.kv.kv_cache import KVCache
from runtime.kv.layout import KVLayout, LayerShape, StateShape

CPU = torch.device("cpu")
NUM_BLOCKS = 12


def cache(*layers, dtype=torch.bfloat16) -> tuple[KVLayout, KVCache]:
    layout = KVLayout.of(layers, dtype.itemsize, 4)
    return layout, KVCache(layout, NUM_BLOCKS, dtype, CPU)


def test_layers_of_all_kinds_share_blocks_and_none_writes_where_another_does():
    small, large = StateShape(((3,), (2, 5))), StateShape(((7, 9), (4, 2)))
    layers = (
        LayerShape(2, 8), small, LayerShape(1, 8, window=4), small, LayerShape(1, 8, window=4), large,
        LayerShape(1, 16, latent=True), large,
    )  # fmt: skip
    layout, memories = cache(*layers)
    blocks_of = random.Random(2).sample(range(NUM_BLOCKS), layout.num_tables)
    written = []
    for number, (layer, memory, place) in enumerate(zip(layers, memories.layers, layout.places, strict=True), start=1):
        block = blocks_of[place.table]
        for turn, tensor in enumerate(dict.fromkeys(memory.tensors)):
            if isinstance(layer, StateShape):
                part = tensor[block]
                assert (part.shape, part.dtype) == (layer.shapes[turn], torch.float32)
                assert part.is_contiguous()
                assert part.data_ptr() % 16 == memory.tensors[0].untyped_storage().data_ptr() % 16
            else:
                size = layout.block_size // layout.kernel_block_size
                part = tensor[block * size * place.parts : (block + 1) * size * place.parts : place.parts]
                assert part.shape == (size, layer.num_kv_heads, 4, layer.head_size)
            part.fill_(10 * number + turn)
            written.append((part, 10 * number + turn))
    assert len(written) == 2 * 7 + 1
    for part, value in written:
        assert (part == value).all()


def test_lines_with_scales_are_as_wide_as_both_and_lie_apart():
    layers = (LayerShape(2, 8), StateShape(((3,), (2, 5))), LayerShape(1, 8, window=4), LayerShape(2, 8))
    layout = KVLayout.of(layers, 1, 4, scale_bytes=4)
    memories = KVCache(layout, NUM_BLOCKS, torch.int8, CPU)
    assert layout.column_bytes == 2 * (8 + 4) * layout.block_size
    written = []
    for number, (memory, place) in enumerate(zip(memories.layers, layout.places, strict=True), start=1):
        for turn, tensor in enumerate(memory.tensors):
            part = tensor[(1 + place.table) * place.parts]
            if number != 2:
                assert tensor.shape[1:] == (2 if number != 3 else 1, 4, 12)
            part.fill_(10 * number + turn)
            written.append((part, 10 * number + turn))
    for part, value in written:
        assert (part == value).all()


def test_a_model_of_states_alone_has_blocks_of_their_size():
    state = StateShape(((4, 3), (2, 8)))
    layout, memories = cache(*[state] * 5)
    assert (layout.block_bytes, layout.num_tables) == (5 * 4 * (12 + 16), 1)
    assert [tensor.shape for tensor in memories.layers[4].tensors] == [(NUM_BLOCKS, 4, 3), (NUM_BLOCKS, 2, 8)]
