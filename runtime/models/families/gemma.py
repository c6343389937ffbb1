"""Gemma 1, 2 and 3: scaled embeddings, norms that multiply by (1 + weight), and GELU with tanh approximation.

Gemma 2 has norms before and after each block, a window in every other layer, and soft caps on scores and logits. Gemma 3 has
norms of q and k instead of soft caps, and another rotary embedding in layers with a window."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import FULL, SLIDING, HfConfig, every, layer_types, local_rope, rope, window
from runtime.models.spec.attention import Attention, QKNorm
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.model import UnsupportedModel
from runtime.weights.rules import UnitOffsetNorm, transform

_BEFORE = ("input_layernorm", "pre_feedforward_layernorm")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_RULES = (
    *LLAMA_RULES,
    *(transform(f"{norm}.weight", UnitOffsetNorm()) for norm in ("model.norm", *_BEFORE, *_AFTER, "q_norm", "k_norm")),
)


def gemma(config: HfConfig) -> DecoderSpec:
    return _gemma(config.with_defaults(num_key_value_heads=16, max_position_embeddings=8192), "GemmaForCausalLM")


def gemma2(config: HfConfig) -> DecoderSpec:
    config = config.with_unsaid(final_logit_softcapping=30.0, attn_logit_softcapping=50.0, sliding_window=4096)
    config = config.with_defaults(num_key_value_heads=4, max_position_embeddings=8192)
    return _four_norms(config, "Gemma2ForCausalLM", layer_types(config, every(2)))


def gemma3(config: HfConfig) -> DecoderSpec:
    config = config.with_unsaid(sliding_window=4096)
    config = config.with_defaults(num_key_value_heads=4, max_position_embeddings=131072, rope_theta=1e6)
    types = layer_types(config, every(config.count("sliding_window_pattern", 6)))
    spec = _four_norms(config, "Gemma3ForCausalLM", types)
    head_size = spec.attention.head_size
    ropes = {
        FULL: rope(config, head_size, FULL),
        SLIDING: local_rope(config, head_size, config.number("rope_local_base_freq", 10000.0)),
    }

    def change(index: int, attention: Attention) -> Attention:
        return replace(attention, rope=ropes[types[index]], qk_norm=QKNorm(spec.norm))

    return spec.with_mixers(change)


def _four_norms(config: HfConfig, architecture: str, types: list[str]) -> DecoderSpec:
    config = config.with_defaults(hidden_act=config.get("hidden_activation"))
    spec = _gemma(config, architecture)
    scale = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    softcap = config.number_or_none("attn_logit_softcapping")

    def change(index: int, attention: Attention) -> Attention:
        return replace(attention, score_scale=scale, softcap=softcap, window=window(config, types[index]))

    spec = spec.with_mixers(change).with_layers(lambda _, layer: replace(layer, before=_BEFORE, after=_AFTER))
    return replace(spec, logit_softcap=config.number_or_none("final_logit_softcapping"))


def _gemma(config: HfConfig, architecture: str) -> DecoderSpec:
    if config.flag("use_bidirectional_attention", False):
        raise UnsupportedModel("config: use_bidirectional_attention is not supported for causal language models")
    config = config.with_defaults(head_dim=256, hidden_act="gelu_pytorch_tanh")
    spec = llama(config, architecture, tied=True)
    return replace(spec, embedding_multiplier=spec.hidden_size**0.5, rules=_RULES)


ARCHITECTURES = {
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
}
