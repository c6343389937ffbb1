"""GPT-2: learned positions, layer norms, biases, and an MLP of two matrices. Its checkpoints store all matrices transposed."""

from __future__ import annotations

from runtime.models.read.hf_config import HfConfig, activation, decoder, heads, num_layers
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import DecoderSpec, LearnedPositions
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import PlainMLP
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import Transposed, rename, transform

_RULES = (
    rename("transformer.h", into="model.layers"),
    rename("transformer.wte", into="model.embed_tokens"),
    rename("transformer.wpe", into="model.embed_positions"),
    rename("transformer.ln_f", into="model.norm"),
    rename("attn.c_attn", into="self_attn.qkv_proj"),
    rename("attn.c_proj", into="self_attn.o_proj"),
    rename("mlp.c_fc", into="mlp.up_proj"),
    rename("mlp.c_proj", into="mlp.down_proj"),
    *(transform(f"{name}.weight", Transposed()) for name in ("qkv_proj", "o_proj", "up_proj", "down_proj")),
)


def gpt2(config: HfConfig) -> DecoderSpec:
    hidden_size = config.count("n_embd", 768)
    config = config.with_defaults(
        hidden_size=hidden_size,
        num_attention_heads=config.count("n_head", 12),
        num_hidden_layers=config.count("n_layer", 12),
        max_position_embeddings=config.count("n_positions", 1024),
        vocab_size=50257,
    )
    num_heads, num_kv_heads, head_size = heads(config)
    scale = head_size**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_depth = config.flag("scale_attn_by_inverse_layer_idx", False)
    mlp = PlainMLP(
        config.count("n_inner", 4 * hidden_size), True, activation(config, "activation_function", "gelu_new")
    )
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5))

    def layer(index: int) -> Layer:
        score_scale = scale / (index + 1) if by_depth else scale
        attention = Attention(
            num_heads, num_kv_heads, head_size, None, qkv_bias=True, output_bias=True, score_scale=score_scale
        )
        return Layer(attention, mlp, norm, before=("ln_1", "ln_2"))

    return decoder(
        config,
        "GPT2LMHeadModel",
        map(layer, range(num_layers(config))),
        norm,
        tied=True,
        positions=LearnedPositions(config.count("max_position_embeddings")),
        rules=_RULES,
        ignored=(".attn.bias", ".attn.masked_bias"),
    )


ARCHITECTURES = {"GPT2LMHeadModel": gpt2}
