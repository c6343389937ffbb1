"""BLOOM: ALiBi instead of positions, a norm after the embedding, and q, k and v in one stored matrix, interleaved by head."""

from __future__ import annotations

from runtime.models.read.alibi import slopes
from runtime.models.read.hf_config import HfConfig, decoder, heads, num_layers
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import Activation, PlainMLP
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import GroupedRows, rename, transform

_OUTER = {
    "h": "model.layers",
    "word_embeddings": "model.embed_tokens",
    "word_embeddings_layernorm": "model.embed_norm",
    "ln_f": "model.norm",
}
_RULES = (
    rename("self_attention.query_key_value", into="self_attn.qkv_proj"),
    rename("self_attention.dense", into="self_attn.o_proj"),
    rename("mlp.dense_h_to_4h", into="mlp.up_proj"),
    rename("mlp.dense_4h_to_h", into="mlp.down_proj"),
)
# Names as saved by transformers, and the authors' names, without the base model's prefix.
_WITH_BASE = tuple(rename(f"transformer.{theirs}", into=ours) for theirs, ours in _OUTER.items())
_WITHOUT_BASE = tuple(rename(theirs, into=ours) for theirs, ours in _OUTER.items())


def bloom(config: HfConfig) -> DecoderSpec:
    if config.flag("apply_residual_connection_post_layernorm", False):
        raise UnsupportedModel("config: apply_residual_connection_post_layernorm true is not supported")
    hidden_size = config.count("n_embed", config.count("hidden_size", 64))
    config = config.with_defaults(
        vocab_size=250880,
        num_attention_heads=config.count("n_head", 8),
        num_hidden_layers=config.count("n_layer", 2),
        max_position_embeddings=config.count("seq_length", 2048),
    ).changed(hidden_size=hidden_size)
    num_heads, _, head_size = heads(config)
    attention = Attention(
        num_heads, num_heads, head_size, None, qkv_bias=True, output_bias=True, alibi=slopes(num_heads)
    )
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5))
    layer = Layer(attention, PlainMLP(4 * hidden_size, True, Activation.GELU_TANH), norm)
    by_head = transform("qkv_proj", GroupedRows(num_heads, (head_size,) * 3))
    return decoder(
        config, "BloomForCausalLM", [layer] * num_layers(config), norm, tied=True, embedding_norm=norm,
        rules=(*_WITH_BASE, *_RULES, by_head), other_rules=((*_WITHOUT_BASE, *_RULES, by_head),),
    )  # fmt: skip


ARCHITECTURES = {"BloomForCausalLM": bloom}
