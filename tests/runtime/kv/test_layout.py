"""KVLayout: which layers share a block table, and the memory that a sequence takes."""

import random
import sys
from itertools import count, islice

import pytest

from runtime.kv.block_table import BlockTable
from runtime.kv.kinds import Full, KVDtype, MemoryKind, Nothing, State
from runtime.kv.layout import KVLayout, LayerGroup
from tests.kinds import BFLOAT16, INT8, chunk, full, state, window

MIB = 1 << 20
BUDGET = 512


def layout(*kinds: MemoryKind) -> KVLayout:
    return KVLayout.of(kinds)


def sequence_mib(layout: KVLayout, num_tokens: int) -> float:
    return layout.max_blocks(num_tokens, BUDGET) * layout.block_bytes / MIB


MISTRAL = layout(*[window(8, 128, 4096, BFLOAT16)] * 32)  # 7B, the first
GEMMA = layout(
    *[full(1, 256, BFLOAT16) if index % 6 == 5 else window(1, 256, 512, BFLOAT16) for index in range(18)]
)  # 3 270M
GPT_OSS = layout(*[full(8, 64, BFLOAT16) if index % 2 else window(8, 64, 128, BFLOAT16) for index in range(24)])  # 20B
LLAMA = layout(*[full(8, 128, BFLOAT16)] * 32)  # 3.1 8B
GRANITE = layout(  # 4.0 H tiny
    *[full(4, 128, BFLOAT16) if index % 10 == 5 else state((3328, 3), (48, 64, 128)) for index in range(40)]
)
DEEPSEEK = layout(*[full(1, 576, BFLOAT16, latent=True)] * 27)  # V2 Lite


@pytest.mark.parametrize(
    ("model", "widths", "mib"),
    [
        (LLAMA, [1], 4096.0),
        (
            MISTRAL,
            [1],
            578.0,
        ),  # 4,095 seen and 512 new, wherever they begin in a block; 4,096 MiB were all kept
        (GEMMA, [1, 5], 111.234375),  # 576
        (GPT_OSS, [1, 1], 783.375),  # 1,536
        (DEEPSEEK, [1], 972.0),
    ],
    ids=["llama", "mistral", "gemma", "gpt-oss", "deepseek"],
)
def test_a_sequence_of_32768_tokens_takes_the_memory_that_its_layers_see(model, widths, mib):
    assert [group.width for group in model.groups] == widths
    assert sequence_mib(model, 32768) == mib


def test_a_window_everywhere_bounds_the_memory_of_a_sequence_however_long():
    assert sequence_mib(MISTRAL, 1 << 20) == sequence_mib(MISTRAL, 1 << 14) < 600
    assert MISTRAL.longest(num_blocks=300, max_step_tokens=BUDGET, limit=1 << 20) == 1 << 20
    assert LLAMA.longest(num_blocks=300, max_step_tokens=BUDGET, limit=1 << 20) == 300 * 16


def test_latent_layers_store_no_values():
    assert DEEPSEEK.block_bytes == 16 * 27 * 576 * 2


def test_layers_of_other_sizes_share_a_column():
    model = layout(full(4, 128, BFLOAT16), *[window(2, 128, 64, BFLOAT16)] * 4, full(4, 128, BFLOAT16))
    assert (model.num_kv_tensors, model.num_sub_slots) == (4, (1, 2))


@pytest.mark.parametrize("seed", range(20))
def test_no_two_layers_share_a_sub_slot(seed):
    rng = random.Random(seed)
    heads, windows = [1, 2, 3, 4], [None, 20, 64]
    kinds = [
        full(rng.choice(heads), 64, BFLOAT16) if size is None else window(rng.choice(heads), 64, size, BFLOAT16)
        for size in rng.choices(windows, k=3)
    ]
    model = layout(*(rng.choice(kinds) for _ in range(rng.randrange(1, 30))))
    places = [
        (placement.table, tensor, placement.sub_slot)
        for placement in model.placements
        for tensor in placement.kv_tensors
    ]
    assert len(set(places)) == 2 * len(model.kinds)
    for placement, layer in zip(model.placements, model.kinds, strict=True):
        assert len(placement.kv_tensors) == 2
        assert max(placement.kv_tensors) < model.num_kv_tensors
        assert placement.sub_slot < placement.num_sub_slots == model.num_sub_slots[placement.table]
        assert placement.num_sub_slots * layer.kv.num_kv_heads * 64 * 16 * 2 == model.page_bytes


@pytest.mark.parametrize("size", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("step", [1, 7, 64])
def test_max_blocks_are_those_that_some_step_needs(size, step):
    group = LayerGroup(window(1, 8, size))
    needed = [
        (end - 1) // 16 - group.first_in_window(end - step) // 16 + 1  # when tokens [end - step, end) are computed
        for end in range(step, 400)
    ]
    assert group.max_blocks(400, step, 16) == max(needed)


@pytest.mark.parametrize("step", [1, 7, 64])
def test_a_sequence_has_no_more_blocks_than_its_chunk_and_a_step_take(step):
    group = LayerGroup(chunk(1, 8, 32))
    most = 0
    for end in range(step, 400):
        first = group.first_in_window(end - step)
        assert first % 32 == 0
        assert first <= end - step < first + 32
        most = max(most, (end - 1) // 16 - first // 16 + 1)
    assert most <= group.max_blocks(400, step, 16) <= most + 1
    assert layout(full(1, 8), chunk(1, 8, 32)).chunks(33) == (None, 32)
    assert layout(full(1, 8), chunk(1, 8, 32)).chunks(32) == (None, None)  # then none is longer than a chunk


def test_blocks_are_large_enough_for_a_state_and_a_whole_number_of_small_ones():
    assert [(type(group.kind), group.width) for group in GRANITE.groups] == [(Full, 1), (State, 4)]
    assert GRANITE.page_bytes == GRANITE.block_size * 4 * 128 * 2 >= 4 * (3328 * 3 + 48 * 64 * 128)
    assert GRANITE.block_size % 16 == 0
    assert GRANITE.block_size * 4 * 128 * 2 - 16 * 4 * 128 * 2 < 4 * (3328 * 3 + 48 * 64 * 128)
    assert GRANITE.max_blocks(1, BUDGET) == 4 + 1
    assert GRANITE.max_blocks(10 * GRANITE.block_size, BUDGET) == 4 + 10


def test_a_model_of_states_alone_has_no_longest_context():
    mamba = layout(*[state((48, 64, 128))] * 24)
    assert mamba.longest(num_blocks=1, max_step_tokens=BUDGET, limit=1 << 20) == 1 << 20
    assert mamba.longest(num_blocks=0, max_step_tokens=BUDGET, limit=1 << 20) == 0


def test_no_layers_or_layers_without_memory_need_no_block():
    for model in (layout(), layout(Nothing(), Nothing())):
        assert (model.block_bytes, model.max_blocks(1 << 20, BUDGET)) == (0, 0)
        assert model.longest(num_blocks=0, max_step_tokens=BUDGET, limit=4096) == 4096
    assert layout().num_tables == 0
    assert layout(Nothing(), Nothing()).num_tables == 1  # where a step's metadata is


def test_layers_without_memory_cost_those_beside_them_nothing():
    alone, beside = layout(full(2, 8), state((4,))), layout(Nothing(), full(2, 8), Nothing(), state((4,)))
    assert (beside.block_bytes, beside.block_size) == (alone.block_bytes, alone.block_size)
    assert beside.max_blocks(100, BUDGET) == alone.max_blocks(100, BUDGET)
    assert [placement.table for placement in beside.placements] == [1, 0, 1, 2]


def test_layers_may_differ_in_dtype_and_those_of_fewer_bytes_share_a_column():
    model = layout(*[full(2, 64, BFLOAT16)] * 2, *[full(2, 64, KVDtype("float8_e4m3fn", 1))] * 4)
    assert (model.num_tables, model.num_sub_slots) == (2, (1, 2))
    assert model.page_bytes == 16 * 2 * 64 * 2


def test_an_open_dtype_is_no_layout():
    with pytest.raises(ValueError, match="has no dtype yet"):
        layout(full(2, 64, None))
    assert full(2, 64, None).with_dtype(BFLOAT16) == full(2, 64, BFLOAT16)
    assert window(2, 64, 9, INT8).with_dtype(BFLOAT16) == window(2, 64, 9, INT8)  # it has one of its own


@pytest.mark.parametrize(
    ("kind", "missing", "slots"),
    [
        (full(1, 8), {1: 2, 16: 2, 17: 4}, [0, 16, 32]),
        (window(1, 8, 4), {1: 2, 16: 2, 17: 4}, [0, 16, 32]),
        (state((4,)), {1: 2, 1000: 2}, [0, sys.maxsize]),
        (Nothing(), {1: 0, 1000: 0}, [sys.maxsize]),
    ],
    ids=["full", "window", "state", "nothing"],
)
def test_a_block_table_grows_as_its_kind_of_memory_does(kind, missing, slots):
    table, block_ids = BlockTable(16, LayerGroup(kind, 2)), count()
    assert {num_tokens: table.num_missing(num_tokens) for num_tokens in missing} == missing
    for num, expected in enumerate(slots):
        assert (len(table.ids), table.num_slots) == (2 * num, expected)
        table.append(islice(block_ids, 2))
