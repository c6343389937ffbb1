"""Nemotron 4 and Minitron: layer norms that multiply by (1 + weight), and an MLP of two matrices with a squared ReLU."""

from __future__ import annotations

from runtime.models.read.hf_config import HfConfig, activation, decoder, heads, num_layers, rope
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import PlainMLP
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import UnitOffsetNorm, transform

_NORMS = ("model.norm", "input_layernorm", "post_attention_layernorm")
_RULES = (LLAMA_RULES[0], *(transform(f"{norm}.weight", UnitOffsetNorm()) for norm in _NORMS))


def nemotron(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(max_position_embeddings=4096, partial_rotary_factor=0.5)
    num_heads, num_kv_heads, head_size = heads(config)
    bias = config.flag("attention_bias", False)
    attention = Attention(num_heads, num_kv_heads, head_size, rope(config, head_size), qkv_bias=bias, output_bias=bias)
    mlp = PlainMLP(
        config.count("intermediate_size"), config.flag("mlp_bias", False), activation(config, default="relu2")
    )
    norm = LayerNorm(config.number("norm_eps", 1e-5))
    layers = [Layer(attention, mlp, norm)] * num_layers(config)
    return decoder(config, "NemotronForCausalLM", layers, norm, rules=_RULES)


ARCHITECTURES = {"NemotronForCausalLM": nemotron}
