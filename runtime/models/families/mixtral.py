"""Mixtral: Mistral with eight experts in place of each MLP, two of them for each token."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.mistral import mistral
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.mixture import MIXTRAL, STACKED, STACKED_BY_KIND, checked_moe, num_experts, with_mlps
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.mlp import MoE, Router


def mixtral(config: HfConfig) -> DecoderSpec:
    # Unlike Mistral, it has no window unless its config gives one.
    config = config.with_defaults(rope_theta=1e6, rms_norm_eps=1e-5).with_unsaid(sliding_window=None)
    router = Router(config.count("num_experts_per_tok", 2), renormalize=True)
    moe = MoE(num_experts(config, 8), config.count("intermediate_size"), router)
    spec = with_mlps(mistral(config), checked_moe(moe))
    return replace(spec, architecture="MixtralForCausalLM", rules=MIXTRAL, other_rules=(STACKED, STACKED_BY_KIND))


ARCHITECTURES = {"MixtralForCausalLM": mixtral}
