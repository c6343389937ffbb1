"""Llama 2 and 3, SmolLM2, and other models whose architecture is LlamaForCausalLM."""

from __future__ import annotations

from runtime.models.read.hf_config import HfConfig, activation, decoder, heads, num_layers, rope
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import GatedMLP
from runtime.models.spec.norm import RMSNorm


def llama(config: HfConfig, architecture: str = "LlamaForCausalLM", *, tied: bool = False) -> DecoderSpec:
    """Return the spec of a Llama model. Other families modify it."""
    num_heads, num_kv_heads, head_size = heads(config)
    bias = config.flag("attention_bias", False)
    attention = Attention(num_heads, num_kv_heads, head_size, rope(config, head_size), qkv_bias=bias, output_bias=bias)
    mlp = GatedMLP(config.count("intermediate_size"), config.flag("mlp_bias", False), activation(config))
    norm = RMSNorm(config.number("rms_norm_eps", 1e-6))
    return decoder(config, architecture, [Layer(attention, mlp, norm)] * num_layers(config), norm, tied=tied)


ARCHITECTURES = {"LlamaForCausalLM": llama}
