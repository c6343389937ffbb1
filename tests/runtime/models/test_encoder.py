"""A model whose tokens see each other all and that keeps nothing: BERT's encoder as a spec, beside transformers' own."""

from __future__ import annotations

import pytest
import torch
import transformers

import ops
from runtime.kv.kinds import FLOAT32, Nothing, PromptFull, PromptWindow
from runtime.kv.kv_cache import KVCache
from runtime.kv.layout import KVLayout
from runtime.models.forward_step import ForwardStep
from runtime.models.load import load_model
from runtime.models.spec.attention import Attention, Mask, RelativeBias
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import PostNormLayer
from runtime.models.spec.mlp import Activation, PlainMLP
from runtime.models.spec.norm import LayerNorm, NoNorm
from runtime.weights.fetch import resolve
from runtime.weights.rules import merge, rename

LENGTHS = (9, 1, 300, 33)
RULES = (
    rename("encoder.layer", into="model.layers"),
    rename("embeddings.word_embeddings", into="model.embed_tokens"),
    rename("attention.output.dense", into="self_attn.o_proj"),
    rename("attention.self", into="self_attn"),
    rename("attention.output.LayerNorm", into="attention_norm"),
    rename("intermediate.dense", into="mlp.up_proj"),
    rename("output.dense", into="mlp.down_proj"),
    rename("output.LayerNorm", into="mlp_norm"),
    merge("query key value", into="qkv_proj"),
)


def spec() -> DecoderSpec:
    norm = LayerNorm(1e-12)
    layer = PostNormLayer(
        Attention(4, 4, 8, None, qkv_bias=True, output_bias=True, mask=Mask.FULL),
        PlainMLP(48, True, Activation("gelu")), norm, ("attention_norm", "mlp_norm"),
    )  # fmt: skip
    return DecoderSpec(
        "BertModel", 97, 32, (layer,) * 3, NoNorm(), tied_embedding=True, max_model_len=512, rules=RULES,
        ignored_below=(
            "embeddings.position_embeddings", "embeddings.token_type_embeddings", "embeddings.LayerNorm", "pooler",
        ),
    )  # fmt: skip


@pytest.fixture
def theirs(tmp_path):
    torch.manual_seed(6)
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        initializer_range=0.3,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases and norms begin as zeros and ones, which hides mistakes
            torch.nn.init.normal_(parameter, float(parameter.data[0]), 0.3)
    model.save_pretrained(tmp_path)
    return model


@torch.inference_mode()
@pytest.mark.parametrize("traced", [False, True])
def test_rows_side_by_side_are_encoded_as_each_alone(theirs, tmp_path, traced):
    """Its embeddings are transformers' here: theirs have types and a norm."""
    files = resolve(str(tmp_path), None, lambda progress: None)
    encoder = load_model(
        files, dtype="float32", load_format="auto", seed=0, progress=lambda progress: None, spec=spec()
    )
    layout = KVLayout.of(encoder.spec.memory_kinds())
    assert set(layout.kinds) == {Nothing()}
    assert layout.block_bytes == 0
    assert encoder.graph_unsupported_reason is None
    cache = KVCache(layout, 0, torch.device("cpu"))
    texts = [torch.randint(97, (1, length)) for length in LENGTHS]
    embeds = torch.cat([theirs.embeddings(text)[0] for text in texts])
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    meta = ops.AttentionMeta(
        starts, torch.tensor(LENGTHS, dtype=torch.int32), torch.empty(len(LENGTHS), 0, dtype=torch.int32),
        max(LENGTHS), max(LENGTHS),
    )  # fmt: skip
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    step = ForwardStep(torch.cat(texts, dim=1)[0], positions, (positions,), (meta,), cache.layers, embeds)
    model = encoder.traced(cache.layers) if traced else encoder
    got = model.final_hidden(model.forward(step), torch.arange(len(embeds)))
    expected = torch.cat([theirs(text).last_hidden_state[0] for text in texts])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_a_mask_says_what_is_kept():
    for window, kind in ((None, PromptFull), (16, PromptWindow)):
        memory = Attention(4, 4, 8, None, window=window, mask=Mask.PREFIX_FULL).memory_kind
        assert type(memory.with_dtype(FLOAT32)) is kind
        assert memory.in_one_step
    assert type(Attention(4, 4, 8, None, mask=Mask.FULL, window=16).memory_kind) is Nothing
    with pytest.raises(ValueError, match="relative biases are for attention without a cache"):
        Attention(4, 4, 8, None, relative_bias=RelativeBias(32, 128, "bias"))
