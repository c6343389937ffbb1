"""KVCache: who stores where."""

import random

import torch

from runtime.kv.kinds import KVDtype, MemoryKind, Nothing, State
from runtime.kv.kv_cache import KVCache
from runtime.kv.layout import KVLayout
from tests.kinds import BFLOAT16, INT8, full, state, window

CPU = torch.device("cpu")
NUM_BLOCKS = 12


FLOAT8 = KVDtype("float8_e4m3fn", 1)


def cache(*kinds: MemoryKind) -> tuple[KVLayout, KVCache]:
    layout = KVLayout.of(kinds, 4)
    return layout, KVCache(layout, NUM_BLOCKS, CPU)


def test_layers_of_all_kinds_share_blocks_and_none_writes_where_another_does():
    small, large = state((3,), (2, 5)), state((7, 9), (4, 2))
    layers = (
        full(2, 8, BFLOAT16), small, window(1, 8, 4, FLOAT8), small, window(1, 8, 4, BFLOAT16), large, Nothing(),
        full(1, 16, BFLOAT16, latent=True), large, window(1, 8, 4, BFLOAT16),
    )  # fmt: skip
    layout, memories = cache(*layers)
    blocks_of = random.Random(2).sample(range(NUM_BLOCKS), layout.num_tables)
    written = []
    for number, (layer, memory, placement) in enumerate(
        zip(layers, memories.layers, layout.placements, strict=True), start=1
    ):
        block = blocks_of[placement.table]
        for turn, tensor in enumerate(dict.fromkeys(memory.tensors)):
            if isinstance(layer, State):
                part = tensor[block]
                assert (part.shape, part.dtype) == (layer.state.shapes[turn], torch.float32)
                assert part.is_contiguous()
                assert part.data_ptr() % 16 == memory.tensors[0].untyped_storage().data_ptr() % 16
            else:
                size = layout.block_size // layout.kernel_block_size
                part = tensor[
                    block * size * placement.num_sub_slots : (block + 1)
                    * size
                    * placement.num_sub_slots : placement.num_sub_slots
                ]
                assert part.shape == (size, layer.kv.num_kv_heads, 4, layer.kv.head_size)
                assert str(part.dtype) == f"torch.{layer.kv.known_dtype.name}"
            value = torch.tensor(float(2 * number + turn)).to(part.dtype)  # which float8 has too
            part.copy_(value.expand(part.shape))
            written.append((part, value))
    assert len(written) == 2 * 8 + 1
    for part, value in written:
        assert torch.equal(part.float(), value.float().expand(part.shape))


def test_lines_with_scales_are_as_wide_as_both_and_lie_apart():
    layout, memories = cache(full(2, 8, INT8), state((3,), (2, 5)), window(1, 8, 4, INT8), full(2, 8, INT8))
    assert layout.page_bytes == 2 * (8 + 4) * layout.block_size
    written = []
    for number, (memory, placement) in enumerate(zip(memories.layers, layout.placements, strict=True), start=1):
        for turn, tensor in enumerate(memory.tensors):
            part = tensor[(1 + placement.table) * placement.num_sub_slots]
            if number != 2:
                assert tensor.shape[1:] == (2 if number != 3 else 1, 4, 12)
            part.fill_(10 * number + turn)
            written.append((part, 10 * number + turn))
    for part, value in written:
        assert (part == value).all()


def test_a_model_of_states_alone_has_blocks_of_their_size():
    layout, memories = cache(*[state((4, 3), (2, 8))] * 5)
    assert (layout.block_bytes, layout.num_tables) == (5 * 4 * (12 + 16), 1)
    assert [tensor.shape for tensor in memories.layers[4].tensors] == [(NUM_BLOCKS, 4, 3), (NUM_BLOCKS, 2, 8)]


def test_layers_without_memory_have_no_tensors_and_a_table():
    layout, memories = cache(full(1, 8), Nothing(), Nothing())
    assert [kv.tensors for kv in memories.layers[1:]] == [(), ()]
    assert [kv.table for kv in memories.layers] == [0, 1, 1]
    layout, memories = cache(Nothing())
    assert (layout.block_bytes, memories.layers[0].table) == (0, 0)
    assert cache()[1].layers == []


def test_copies_read_all_before_they_write_any():
    """Of all that a block holds, be it states: a chain of copies moves each on by one."""
    layout, memories = cache(full(2, 8, BFLOAT16), state((3,), (2, 5)), window(1, 8, 4, INT8), full(2, 8, BFLOAT16))
    held = {**{block: block for block in range(NUM_BLOCKS)}, 5: 3, 7: 5, 0: 7}
    size = layout.block_size // layout.kernel_block_size
    for kind, kv, placement in zip(layout.kinds, memories.layers, layout.placements, strict=True):
        each = 1 if isinstance(kind, State) else size * placement.num_sub_slots  # of the layer's, to one of the pool's
        for tensor in kv.tensors:  # one after the other: layers of other tables have the same bytes
            for block in range(NUM_BLOCKS):
                tensor[block * each : (block + 1) * each].fill_(block)
            memories.copy_blocks(torch.tensor([3, 5, 7]), torch.tensor([5, 7, 0]))
            for block, content in held.items():
                assert (tensor[block * each] == content).all()
