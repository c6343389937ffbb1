"""Falcon: attention and MLP in parallel, after a common layer norm or one each; q, k and v in one stored matrix, by KV head. The
Falcon RW models have ALiBi instead of a rotary embedding."""

from __future__ import annotations

from runtime.models.read.alibi import rounded_to_bfloat16, slopes
from runtime.models.read.hf_config import HfConfig, activation, decoder, heads, num_layers, rope
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import Layer, ParallelLayer
from runtime.models.spec.mlp import PlainMLP
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import GroupedRows, rename, transform

_RULES = (
    rename("transformer.h", into="model.layers"),
    rename("transformer.word_embeddings", into="model.embed_tokens"),
    rename("transformer.ln_f", into="model.norm"),
    rename("self_attention.query_key_value", into="self_attn.qkv_proj"),
    rename("self_attention.dense", into="self_attn.o_proj"),
    rename("mlp.dense_h_to_4h", into="mlp.up_proj"),
    rename("mlp.dense_4h_to_h", into="mlp.down_proj"),
)


def falcon(config: HfConfig) -> DecoderSpec:
    new = config.flag("new_decoder_architecture", False)
    num_heads = config.count("num_attention_heads")
    if new:
        num_kv_heads = config.count("num_kv_heads", num_heads)
    else:
        num_kv_heads = 1 if config.flag("multi_query", True) else num_heads
    num_heads, num_kv_heads, head_size = heads(config.with_defaults(num_key_value_heads=num_kv_heads))
    bias = config.flag("bias", False)
    alibi = _slopes(num_heads, head_size) if config.flag("alibi", False) else None
    rotary = rope(config, head_size) if alibi is None else None
    attention = Attention(
        num_heads, num_kv_heads, head_size, rotary, qkv_bias=bias, output_bias=bias, alibi=alibi
    )  # fmt: skip
    inner = config.count("ffn_hidden_size", 4 * config.count("hidden_size"))
    mlp = PlainMLP(inner, bias, activation(config, "activation", "gelu"))
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5))
    layers = [_layer(config, attention, mlp, norm, new=new)] * num_layers(config)
    of_kv_head = (num_heads // num_kv_heads * head_size, head_size, head_size)
    rules = (*_RULES, transform("qkv_proj", GroupedRows(num_kv_heads, of_kv_head)))
    return decoder(config, "FalconForCausalLM", layers, norm, tied=True, rules=rules)


def _slopes(num_heads: int, head_size: int) -> tuple[float, ...]:
    """Return the ALiBi slopes, rounded to bfloat16 and multiplied by the score scale, because Falcon scales scores after adding
    ALiBi."""
    return tuple(rounded_to_bfloat16(slope) * head_size**-0.5 for slope in slopes(num_heads))


def _layer(
    config: HfConfig, attention: Attention, mlp: PlainMLP, norm: LayerNorm, *, new: bool
) -> Layer | ParallelLayer:
    if not config.flag("parallel_attn", True):
        return Layer(attention, mlp, norm)
    if config.count("num_ln_in_parallel_attn", 2 if new else 1) == 2:
        return ParallelLayer(attention, mlp, norm, ("ln_attn", "ln_mlp"))
    return ParallelLayer(attention, mlp, norm)


ARCHITECTURES = {"FalconForCausalLM": falcon}
