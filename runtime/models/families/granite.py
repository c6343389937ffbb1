"""Granite 3 and 4: Llama with multipliers on embedding, scores, residuals and logits.

Granite 3 MoE has experts in every layer. Some of its models have an MLP in parallel. Granite 4 has Mamba-2 mixers in most layers
and a shared MLP; some of its models have experts. Its attention has no positions unless the config sets them."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig, activation, num_layers
from runtime.models.read.hybrid import RECURRENT, bamba_mixer, hybrid_types
from runtime.models.read.mixture import checked_moe, num_experts, with_mlps
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.layer import MLP, Mixer
from runtime.models.spec.mlp import GatedMLP, MoE, Router
from runtime.models.spec.model import UnsupportedModel
from runtime.weights.rules import rename, stack


def granite(config: HfConfig) -> DecoderSpec:
    spec = llama(config, "GraniteForCausalLM")
    attention = replace(spec.attention, score_scale=config.number("attention_multiplier", 1.0))
    multiplier = config.number("residual_multiplier", 1.0)
    return replace(
        spec.with_layers(lambda _, layer: replace(layer, mixer=attention, multiplier=multiplier)),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )


_SHARED = (
    rename("shared_mlp.input_linear", into="shared_mlp.gate_up_proj"),
    rename("shared_mlp.output_linear", into="shared_mlp.down_proj"),
    *LLAMA_RULES,
    stack("experts"),
)
RULES = (
    *_SHARED,
    rename("block_sparse_moe.input_linear", into="mlp.experts.gate_up"),
    rename("block_sparse_moe.output_linear", into="mlp.experts.down"),
    rename("block_sparse_moe.router.layer", into="mlp.gate"),
)
STACKED = (
    *_SHARED,
    rename("block_sparse_moe.experts.gate_up_proj", into="mlp.experts.gate_up.weight"),
    rename("block_sparse_moe.experts.down_proj", into="mlp.experts.down.weight"),
    rename("block_sparse_moe.router", into="mlp.gate"),
)


def granitemoe(config: HfConfig) -> DecoderSpec:
    return _granitemoe(config, None, "GraniteMoeForCausalLM")


def granitemoeshared(config: HfConfig) -> DecoderSpec:
    size = config.count_or_zero("shared_intermediate_size", 0)
    shared = GatedMLP(size, name="shared_mlp") if size else None
    return _granitemoe(config, shared, "GraniteMoeSharedForCausalLM")


def _granitemoe(config: HfConfig, shared: GatedMLP | None, architecture: str) -> DecoderSpec:
    router = Router(config.count("num_experts_per_tok", 2), renormalize=True)
    moe = checked_moe(MoE(num_experts(config, 8), config.count("intermediate_size"), router, shared))
    return replace(with_mlps(granite(config), moe), architecture=architecture, rules=RULES, other_rules=(STACKED,))


def granitemoehybrid(config: HfConfig) -> DecoderSpec:
    spec = granite(config)
    position = config.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        raise UnsupportedModel(f"config: position_embedding_type {position!r} is neither 'rope' nor null")
    types = hybrid_types(config, [RECURRENT] * num_layers(config))
    mixer = bamba_mixer(config) if RECURRENT in types else None

    def mix(index: int, attention: Attention) -> Mixer:
        if mixer is not None and types[index] == RECURRENT:
            return mixer
        return attention if position == "rope" else replace(attention, rope=None)

    spec = with_mlps(spec.with_mixers(mix), _mlp(config))
    return replace(spec, architecture="GraniteMoeHybridForCausalLM", rules=RULES, other_rules=(STACKED,))


def _mlp(config: HfConfig) -> MLP:
    shared = GatedMLP(config.count("shared_intermediate_size", 1024), activation=activation(config), name="shared_mlp")
    if config.with_defaults(num_local_experts=8).get("num_local_experts") == 0:
        return shared
    router = Router(config.count("num_experts_per_tok", 2), renormalize=True)
    return checked_moe(MoE(num_experts(config, 8), config.count("intermediate_size"), router, shared))


ARCHITECTURES = {
    "GraniteForCausalLM": granite,
    "GraniteMoeForCausalLM": granitemoe,
    "GraniteMoeSharedForCausalLM": granitemoeshared,
    "GraniteMoeHybridForCausalLM": granitemoehybrid,
}
