"""StableLM: Llama with layer norms and partial RoPE. In some models attention and MLP are in parallel."""

from __future__ import annotations

from runtime.models.read.hf_config import HfConfig, activation, decoder, heads, num_layers, rope
from runtime.models.spec.attention import Attention, NormScope, QKNorm
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.layer import Layer, ParallelLayer
from runtime.models.spec.mlp import GatedMLP
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import Rule, merge


def stablelm(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(max_position_embeddings=4096, partial_rotary_factor=0.25)
    num_heads, num_kv_heads, head_size = heads(config)
    eps = config.number("layer_norm_eps", 1e-5)
    qk_norm = QKNorm(LayerNorm(eps, bias=False), NormScope.EACH_HEAD) if config.flag("qk_layernorm", False) else None
    bias = config.flag("use_qkv_bias", False)
    attention = Attention(num_heads, num_kv_heads, head_size, rope(config, head_size), qkv_bias=bias, qk_norm=qk_norm)
    kind = ParallelLayer if config.flag("use_parallel_residual", False) else Layer
    norm = LayerNorm(eps)
    layer = kind(attention, GatedMLP(config.count("intermediate_size"), activation=activation(config)), norm)
    rules = (*LLAMA_RULES, _by_head("q", num_heads), _by_head("k", num_kv_heads))
    return decoder(config, "StableLmForCausalLM", [layer] * num_layers(config), norm, rules=rules)


def _by_head(kind: str, count: int) -> Rule:
    """Return the rule for a norm of q or k: the checkpoint has one tensor per head, the model one parameter."""
    return merge(" ".join(f"{kind}_layernorm.norms.{head}" for head in range(count)), into=f"{kind}_norm")


ARCHITECTURES = {"StableLmForCausalLM": stablelm}
