"""Llama 2 and 3, SmolLM2, and whatever else calls itself LlamaForCausalLM."""

from __future__ import annotations

from runtime.models.hf_config import HfConfig, context_length, heads, num_layers, require_silu, rope
from runtime.models.spec import Attention, DecoderSpec, GatedMLP, Layer, RMSNorm


def llama(config: HfConfig) -> DecoderSpec:
    require_silu(config)
    num_heads, num_kv_heads, head_size = heads(config)
    bias = config.flag("attention_bias", False)
    attention = Attention(num_heads, num_kv_heads, head_size, rope(config, head_size), qkv_bias=bias, output_bias=bias)
    norm = RMSNorm(config.number("rms_norm_eps", 1e-6))
    mlp = GatedMLP(config.count("intermediate_size"), config.flag("mlp_bias", False))
    return DecoderSpec(
        architecture="LlamaForCausalLM",
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        layers=(Layer(attention, mlp, norm),) * num_layers(config),
        norm=norm,
        tied_embedding=config.flag("tie_word_embeddings", False),
        max_model_len=context_length(config, 2048),
    )
