"""GPT-NeoX and Pythia: attention and MLP in parallel, each after its layer norm; partial rotary embedding."""

from __future__ import annotations

from runtime.models.read.hf_config import HfConfig, activation, decoder, heads, num_layers, rope
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import Layer, ParallelLayer
from runtime.models.spec.mlp import PlainMLP
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import GroupedRows, rename, transform

_NORMS = ("input_layernorm", "post_attention_layernorm")
_RULES = (
    rename("gpt_neox.layers", into="model.layers"),
    rename("gpt_neox.embed_in", into="model.embed_tokens"),
    rename("gpt_neox.final_layer_norm", into="model.norm"),
    rename("attention.query_key_value", into="self_attn.qkv_proj"),
    rename("attention.dense", into="self_attn.o_proj"),
    rename("mlp.dense_h_to_4h", into="mlp.up_proj"),
    rename("mlp.dense_4h_to_h", into="mlp.down_proj"),
    rename("embed_out", into="lm_head"),
)
_IGNORED = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


def gpt_neox(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(
        partial_rotary_factor=config.number("rotary_pct", 0.25), rope_theta=config.number("rotary_emb_base", 10000.0)
    )
    num_heads, _, head_size = heads(config)
    bias = config.flag("attention_bias", True)
    attention = Attention(num_heads, num_heads, head_size, rope(config, head_size), qkv_bias=bias, output_bias=bias)
    mlp = PlainMLP(config.count("intermediate_size"), True, activation(config, default="gelu"))
    norm = LayerNorm(config.number("layer_norm_eps", 1e-5))
    parallel = config.flag("use_parallel_residual", True)
    layer = ParallelLayer(attention, mlp, norm, _NORMS) if parallel else Layer(attention, mlp, norm, _NORMS)
    rules = (*_RULES, transform("qkv_proj", GroupedRows(num_heads, (head_size,) * 3)))
    return decoder(config, "GPTNeoXForCausalLM", [layer] * num_layers(config), norm, rules=rules, ignored=_IGNORED)


ARCHITECTURES = {"GPTNeoXForCausalLM": gpt_neox}
