"""StarCoder2: layer norms and biases everywhere, an MLP of two matrices, and a window in the larger models."""

from __future__ import annotations

from runtime.models.read.hf_config import HfConfig, activation, decoder, heads, num_layers, rope, window
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import PlainMLP
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import rename

_RULES = (LLAMA_RULES[0], rename("mlp.c_fc", into="mlp.up_proj"), rename("mlp.c_proj", into="mlp.down_proj"))


def starcoder2(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(num_key_value_heads=2, max_position_embeddings=4096)
    num_heads, num_kv_heads, head_size = heads(config)
    bias = config.flag("use_bias", True)
    attention = Attention(
        num_heads,
        num_kv_heads,
        head_size,
        rope(config, head_size),
        qkv_bias=bias,
        output_bias=bias,
        window=window(config),
    )
    mlp = PlainMLP(config.count("intermediate_size"), bias, activation(config, default="gelu_pytorch_tanh"))
    norm = LayerNorm(config.number("norm_epsilon", 1e-5))
    layers = [Layer(attention, mlp, norm)] * num_layers(config)
    return decoder(config, "Starcoder2ForCausalLM", layers, norm, tied=True, rules=_RULES)


ARCHITECTURES = {"Starcoder2ForCausalLM": starcoder2}
