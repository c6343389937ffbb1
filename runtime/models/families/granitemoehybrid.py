"""Granite 4: Granite with Mamba-2's mixer in most layers, an MLP that every token takes, and in some models experts beside it.
Attention knows no positions unless the config says so."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.granite import granite
from runtime.models.families.granitemoe import RULES, STACKED
from runtime.models.read.hf_config import HfConfig, activation, num_layers
from runtime.models.read.hybrid import RECURRENT, bamba_mixer, hybrid_types
from runtime.models.read.mixture import checked_moe, num_experts, with_mlps
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import MLP, Mixer
from runtime.models.spec.mlp import GatedMLP, MoE, Router
from runtime.models.spec.model import UnsupportedModel


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


ARCHITECTURES = {"GraniteMoeHybridForCausalLM": granitemoehybrid}
