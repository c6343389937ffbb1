"""A model cut into stages: they have all of its parameters between them, read those alone, and agree on blocks."""

from __future__ import annotations

from collections import Counter

import pytest
import transformers

from runtime.config import CACHE_TYPES
from runtime.kv.layout import KVLayout
from runtime.models.registry import spec_from_config
from runtime.models.spec.decoder import EMBEDDING, HEAD
from runtime.models.spec.sharding import sharded
from runtime.models.spec.stages import even_layers, stages

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MODELS = {
    "llama": (transformers.LlamaConfig(**SIZES), "LlamaForCausalLM"),
    "tied": (transformers.LlamaConfig(**SIZES, tie_word_embeddings=True), "LlamaForCausalLM"),
    "learned positions": (
        transformers.OPTConfig(
            vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=16
        ),
        "OPTForCausalLM",
    ),
    "windows": (
        transformers.Gemma3TextConfig(
            **SIZES, head_dim=8, sliding_window=9, layer_types=["sliding_attention"] * 4 + ["full_attention"]
        ),
        "Gemma3ForCausalLM",
    ),
}  # fmt: skip


@pytest.fixture(params=MODELS)
def spec(request):
    config, architecture = MODELS[request.param]
    return spec_from_config({**config.to_dict(), "architectures": [architecture]})


@pytest.mark.parametrize("size", [2, 3])
def test_stages_have_every_parameter_once_but_for_an_embedding_that_is_the_head(spec, size):
    names = Counter(each.name for part in stages(spec, size) for each in part.parameters())
    whole = [each.name for each in spec.parameters()]
    assert set(names) == set(whole)
    twice = [name for name, num in names.items() if num > 1]
    assert twice == ([f"{EMBEDDING}.weight"] if spec.tied_embedding else [])


def test_only_the_first_embeds_and_only_the_last_has_a_head(spec):
    first, middle, last = stages(spec, 3)
    ends = {f"{EMBEDDING}.weight", f"{HEAD}.weight"}
    assert [part.embeds for part in (first, middle, last)] == [True, False, False]
    assert [part.generates for part in (first, middle, last)] == [False, False, True]
    assert ends.isdisjoint(each.name for each in middle.parameters())
    assert [part.hands_on for part in (first, middle, last)] == [True, True, False]
    assert last.whole is spec


def test_stages_of_a_shard_are_shards():
    config, architecture = MODELS["llama"]
    spec = sharded(spec_from_config({**config.to_dict(), "architectures": [architecture]}), 1, 2)
    for part in stages(spec, 2):
        assert part.shard_of == spec.shard_of
        assert part.all_layers is spec
        assert part.vocab_rows == 48


def test_all_stages_have_the_same_block_tables(spec):
    layouts = []
    for part in stages(spec, 2):
        kinds = tuple(kind.with_dtype(CACHE_TYPES["float32"]) for kind in part.memory_kinds())
        own = [mixer.memory_kind for layer in part.layers for mixer in layer.mixers]
        assert [*part.memory_kinds()[: len(own)]] == own
        layouts.append(KVLayout.of(kinds))
    assert (
        len({(layout.groups, layout.block_bytes, layout.block_size, layout.num_sub_slots) for layout in layouts}) == 1
    )


def test_layers_are_shared_out_by_what_a_step_reads():
    config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 8, "vocab_size": 960})
    spec = spec_from_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    head, layer = (
        960 * 32,
        sum(part.shape[0] * (part.shape[1:] or (1,))[0] for part in spec.layers[0].parameters("", 32)),
    )
    assert 3 < head / layer < 5  # so the last stage has about four layers fewer
    counts = even_layers(spec, 2)
    assert sum(counts) == 8
    assert counts in ([6, 2], [5, 3])
    largest = max(counts[0] * layer, counts[1] * layer + head)
    assert all(largest <= max(n * layer, (8 - n) * layer + head) for n in range(1, 8))
