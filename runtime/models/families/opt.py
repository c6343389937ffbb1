"""OPT: learned positions, layer norms, biases, and an MLP of two matrices with a ReLU. The 350M model has norms after each
residual sum instead of before each block, no final norm, and projections next to its embedding."""

from __future__ import annotations

from runtime.models.read.hf_config import HfConfig, activation, decoder, heads, num_layers
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec, LearnedPositions
from runtime.models.spec.layer import Layer, PostNormLayer
from runtime.models.spec.mlp import PlainMLP
from runtime.models.spec.norm import LayerNorm, NoNorm
from runtime.weights.rules import rename

_RULES = (
    rename("model.decoder.final_layer_norm", into="model.norm"),
    rename("model.decoder.layers", into="model.layers"),
    rename("model.decoder.embed_tokens", into="model.embed_tokens"),
    rename("model.decoder.embed_positions", into="model.embed_positions"),
    rename("model.decoder.project_in", into="model.project_in"),
    rename("model.decoder.project_out", into="model.project_out"),
    rename("self_attn.out_proj", into="self_attn.o_proj"),
    rename("fc1", into="mlp.up_proj"),
    rename("fc2", into="mlp.down_proj"),
    LLAMA_RULES[0],
)
_NORMS = ("self_attn_layer_norm", "final_layer_norm")


def opt(config: HfConfig) -> DecoderSpec:
    hidden_size = config.count("hidden_size")
    before = config.flag("do_layer_norm_before", True)
    ends_in_norm = before and not config.flag("_remove_final_layer_norm", False)
    embedding_size = config.count("word_embed_proj_dim", hidden_size)
    num_heads, num_kv_heads, head_size = heads(config)
    bias, affine = config.flag("enable_bias", True), config.flag("layer_norm_elementwise_affine", True)
    norm = LayerNorm(1e-5, weight=affine, bias=affine)
    attention = Attention(num_heads, num_kv_heads, head_size, None, qkv_bias=bias, output_bias=bias)
    mlp = PlainMLP(config.count("ffn_dim"), bias, activation(config, "activation_function", "relu"))
    positions = config.count("max_position_embeddings", 2048)
    layer = Layer(attention, mlp, norm, before=_NORMS) if before else PostNormLayer(attention, mlp, norm, _NORMS)
    return decoder(
        config, "OPTForCausalLM", [layer] * num_layers(config), norm if ends_in_norm else NoNorm(), tied=True,
        positions=LearnedPositions(positions + 2, offset=2), rules=_RULES,
        embedding_size=None if embedding_size == hidden_size else embedding_size,
    )  # fmt: skip


ARCHITECTURES = {"OPTForCausalLM": opt}
