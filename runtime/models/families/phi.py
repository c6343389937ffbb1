"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one layer norm, biases everywhere, partial RoPE."""

from __future__ import annotations

from runtime.models.read.hf_config import HfConfig, activation, decoder, heads, num_layers, rope
from runtime.models.spec.attention import Attention, QKNorm
from runtime.models.spec.decoder import LLAMA_RULES, TIED_HEAD_BIAS, DecoderSpec
from runtime.models.spec.layer import ParallelLayer
from runtime.models.spec.mlp import PlainMLP
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import rename

_RULES = (
    rename("q_layernorm", into="q_norm"),
    rename("k_layernorm", into="k_norm"),
    rename("self_attn.dense", into="self_attn.o_proj"),
    rename("mlp.fc1", into="mlp.up_proj"),
    rename("mlp.fc2", into="mlp.down_proj"),
    rename("model.final_layernorm", into="model.norm"),
    TIED_HEAD_BIAS,
    *LLAMA_RULES[:1],
)


def phi(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(partial_rotary_factor=0.5)
    num_heads, num_kv_heads, head_size = heads(config)
    norm = LayerNorm(config.number("layer_norm_eps", 1e-5))
    attention = Attention(
        num_heads,
        num_kv_heads,
        head_size,
        rope(config, head_size),
        qkv_bias=True,
        output_bias=True,
        qk_norm=QKNorm(norm) if config.flag("qk_layernorm", False) else None,
    )
    mlp = PlainMLP(config.count("intermediate_size"), bias=True, activation=activation(config, default="gelu_new"))
    layers = [ParallelLayer(attention, mlp, norm)] * num_layers(config)
    return decoder(config, "PhiForCausalLM", layers, norm, head_bias=True, rules=_RULES)


ARCHITECTURES = {"PhiForCausalLM": phi}
