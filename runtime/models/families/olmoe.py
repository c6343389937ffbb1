"""OLMoE: Llama with norms over all of q and all of k, bounded projections, and many small experts."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.mixture import checked_moe, num_experts, with_expert_rules
from runtime.models.spec.attention import NormScope, QKNorm
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import MoE, Router


def olmoe(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=4096)
    spec = llama(config, "OlmoeForCausalLM")
    clip, qk_norm = config.number_or_none("clip_qkv"), QKNorm(spec.norm, NormScope.ALL_HEADS)
    attention = replace(spec.attention, qk_norm=qk_norm, clip=clip)
    router = Router(config.count("num_experts_per_tok", 8), renormalize=config.flag("norm_topk_prob", False))
    moe = checked_moe(MoE(num_experts(config, 64), config.count("intermediate_size"), router))
    return with_expert_rules(spec.with_layers(lambda _, layer: Layer(attention, moe, layer.norm)))


ARCHITECTURES = {"OlmoeForCausalLM": olmoe}
