"""GPT-J: attention and MLP in parallel after one layer norm; a rotary embedding of the first dims of each head, in adjacent
pairs."""

from __future__ import annotations

from runtime.models.read.hf_config import HfConfig, activation, decoder, heads, num_layers, rope
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import LLAMA_RULES, TIED_HEAD_BIAS, DecoderSpec
from runtime.models.spec.layer import ParallelLayer
from runtime.models.spec.mlp import PlainMLP
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import InterleavedRope, rename, transform

_RULES = (
    TIED_HEAD_BIAS,
    rename("transformer.h", into="model.layers"),
    rename("transformer.wte", into="model.embed_tokens"),
    rename("transformer.ln_f", into="model.norm"),
    rename("attn.out_proj", into="self_attn.o_proj"),
    rename("attn", into="self_attn"),
    rename("mlp.fc_in", into="mlp.up_proj"),
    rename("mlp.fc_out", into="mlp.down_proj"),
    LLAMA_RULES[0],
)
_IGNORED = (".attn.bias", ".attn.masked_bias", ".attn.embed_positions")


def gptj(config: HfConfig) -> DecoderSpec:
    hidden_size = config.count("n_embd", 4096)
    config = config.with_unsaid(rotary_dim=64).with_defaults(
        vocab_size=50400,
        hidden_size=hidden_size,
        num_attention_heads=config.count("n_head", 16),
        num_hidden_layers=config.count("n_layer", 28),
        max_position_embeddings=config.count("n_positions", 2048),
    )
    num_heads, _, head_size = heads(config)
    rotary_dim = config.count("rotary_dim")
    if rotary_dim > head_size:
        raise UnsupportedModel(f"config: rotary_dim {rotary_dim} is more than a head's {head_size} dims")
    rotary = rope(config.changed(partial_rotary_factor=rotary_dim / head_size), head_size)
    mlp = PlainMLP(
        config.count("n_inner", 4 * hidden_size), True, activation(config, "activation_function", "gelu_new")
    )
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5))
    layer = ParallelLayer(Attention(num_heads, num_heads, head_size, rotary), mlp, norm, ("ln_1",))
    rules = (*_RULES, transform("qkv_proj", InterleavedRope(2 * num_heads, head_size, rotary_dim)))
    layers = [layer] * num_layers(config)
    return decoder(config, "GPTJForCausalLM", layers, norm, head_bias=True, rules=rules, ignored=_IGNORED)


ARCHITECTURES = {"GPTJForCausalLM": gptj}
