"""OPT: learned positions, layer norms, biases, an MLP of two matrices with a ReLU. The 350M model, which norms behind each sum
and projects its embeddings, is of another kind."""

from __future__ import annotations

from runtime.models.read.hf_config import HfConfig, activation, decoder, heads, num_layers
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec, LearnedPositions
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import PlainMLP
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import rename

_RULES = (
    rename("model.decoder.final_layer_norm", into="model.norm"),
    rename("model.decoder.layers", into="model.layers"),
    rename("model.decoder.embed_tokens", into="model.embed_tokens"),
    rename("model.decoder.embed_positions", into="model.embed_positions"),
    rename("self_attn.out_proj", into="self_attn.o_proj"),
    rename("fc1", into="mlp.up_proj"),
    rename("fc2", into="mlp.down_proj"),
    LLAMA_RULES[0],
)
_NORMS = ("self_attn_layer_norm", "final_layer_norm")


def opt(config: HfConfig) -> DecoderSpec:
    hidden_size = config.count("hidden_size")
    if not config.flag("do_layer_norm_before", True) or config.flag("_remove_final_layer_norm", False):
        raise UnsupportedModel("config: do_layer_norm_before false and models without a final norm are not supported")
    if config.count("word_embed_proj_dim", hidden_size) != hidden_size:
        raise UnsupportedModel("config: word_embed_proj_dim other than hidden_size is not supported")
    num_heads, num_kv_heads, head_size = heads(config)
    bias, affine = config.flag("enable_bias", True), config.flag("layer_norm_elementwise_affine", True)
    norm = LayerNorm(1e-5, weight=affine, bias=affine)
    attention = Attention(num_heads, num_kv_heads, head_size, None, qkv_bias=bias, output_bias=bias)
    mlp = PlainMLP(config.count("ffn_dim"), bias, activation(config, "activation_function", "relu"))
    positions = config.count("max_position_embeddings", 2048)
    layers = [Layer(attention, mlp, norm, before=_NORMS)] * num_layers(config)
    table = LearnedPositions(positions + 2, offset=2)
    return decoder(config, "OPTForCausalLM", layers, norm, tied=True, positions=table, rules=_RULES)


ARCHITECTURES = {"OPTForCausalLM": opt}
