"""KVLayout: which layers share a block table, and the memory that a sequence takes."""

import random

import pytest

from runtime.kv.layout import KVLayout, LayerGroup, LayerShape, StateShape

MIB = 1 << 20
BUDGET = 512


def layout(*layers: LayerShape) -> KVLayout:
    return KVLayout.of(layers, 2)


def sequence_mib(layout: KVLayout, num_tokens: int) -> float:
    return layout.most_blocks(num_tokens, BUDGET) * layout.block_bytes / MIB


MISTRAL = layout(*[LayerShape(8, 128, window=4096)] * 32)  # 7B, the first
GEMMA = layout(*[LayerShape(1, 256, window=None if index % 6 == 5 else 512) for index in range(18)])  # 3 270M
GPT_OSS = layout(*[LayerShape(8, 64, window=None if index % 2 else 128) for index in range(24)])  # 20B
LLAMA = layout(*[LayerShape(8, 128)] * 32)  # 3.1 8B
GRANITE = layout(  # 4.0 H tiny
    *[LayerShape(4, 128) if index % 10 == 5 else StateShape(((3328, 3), (48, 64, 128))) for index in range(40)]
)
DEEPSEEK = layout(*[LayerShape(1, 576, latent=True)] * 27)  # V2 Lite


@pytest.mark.parametrize(
    ("model", "groups", "mib"),
    [
        (LLAMA, [LayerGroup()], 4096.0),
        (
            MISTRAL,
            [LayerGroup(4096)],
            578.0,
        ),  # 4,095 seen and 512 new, wherever they begin in a block; 4,096 MiB were all kept
        (GEMMA, [LayerGroup(), LayerGroup(512, 5)], 111.234375),  # 576
        (GPT_OSS, [LayerGroup(), LayerGroup(128)], 783.375),  # 1,536
        (DEEPSEEK, [LayerGroup()], 972.0),
    ],
    ids=["llama", "mistral", "gemma", "gpt-oss", "deepseek"],
)
def test_a_sequence_of_32768_tokens_takes_the_memory_that_its_layers_see(model, groups, mib):
    assert list(model.groups) == groups
    assert sequence_mib(model, 32768) == mib


def test_a_window_everywhere_bounds_the_memory_of_a_sequence_however_long():
    assert sequence_mib(MISTRAL, 1 << 20) == sequence_mib(MISTRAL, 1 << 14) < 600
    assert MISTRAL.longest(num_blocks=300, max_step_tokens=BUDGET, limit=1 << 20) == 1 << 20
    assert LLAMA.longest(num_blocks=300, max_step_tokens=BUDGET, limit=1 << 20) == 300 * 16


def test_latent_layers_store_no_values():
    assert DEEPSEEK.block_bytes == 16 * 27 * 576 * 2


def test_layers_of_other_sizes_share_a_column():
    model = layout(LayerShape(4, 128), *[LayerShape(2, 128, window=64)] * 4, LayerShape(4, 128))
    assert (model.num_columns, model.parts) == (4, (1, 2))


@pytest.mark.parametrize("seed", range(20))
def test_no_two_layers_share_a_place(seed):
    rng = random.Random(seed)
    kinds = [LayerShape(rng.choice([1, 2, 3, 4]), 64, window=rng.choice([None, 20, 64])) for _ in range(3)]
    model = layout(*(rng.choice(kinds) for _ in range(rng.randrange(1, 30))))
    places = [(place.table, column, place.part) for place in model.places for column in place.columns]
    assert len(set(places)) == 2 * len(model.layers)
    for place, layer in zip(model.places, model.layers, strict=True):
        assert len(place.columns) == 2
        assert max(place.columns) < model.num_columns
        assert place.part < place.parts == model.parts[place.table]
        assert place.parts * layer.num_kv_heads * 64 * 16 * 2 == model.column_bytes


@pytest.mark.parametrize("window", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("step", [1, 7, 64])
def test_most_blocks_are_those_that_some_step_needs(window, step):
    group = LayerGroup(window)
    needed = [
        (end - 1) // 16 - group.first_seen(end - step) // 16 + 1  # when tokens [end - step, end) are computed
        for end in range(step, 400)
    ]
    assert group.most_blocks(400, step, 16) == max(needed)


def test_blocks_are_large_enough_for_a_state_and_a_whole_number_of_small_ones():
    assert GRANITE.groups == (LayerGroup(), LayerGroup(width=4, state=True))
    assert GRANITE.column_bytes == GRANITE.block_size * 4 * 128 * 2 >= 4 * (3328 * 3 + 48 * 64 * 128)
    assert GRANITE.block_size % 16 == 0
    assert GRANITE.block_size * 4 * 128 * 2 - 16 * 4 * 128 * 2 < 4 * (3328 * 3 + 48 * 64 * 128)
    assert GRANITE.most_blocks(1, BUDGET) == 4 + 1
    assert GRANITE.most_blocks(10 * GRANITE.block_size, BUDGET) == 4 + 10


def test_a_model_of_states_alone_has_no_longest_context():
    mamba = layout(*[StateShape(((48, 64, 128),))] * 24)
    assert mamba.longest(num_blocks=1, max_step_tokens=BUDGET, limit=1 << 20) == 1 << 20
    assert mamba.longest(num_blocks=0, max_step_tokens=BUDGET, limit=1 << 20) == 0
