"""OLMoE: Llama with norms over all of q and all of k, bounded projections, and many small experts."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.hf_config import HfConfig
from runtime.models.llama import llama
from runtime.models.mixture import SEPARATE, STACKED, mixture, num_experts, with_mlps
from runtime.models.spec import DecoderSpec, MoE, Over, QKNorm, Router


def olmoe(config: HfConfig) -> DecoderSpec:
    spec = llama(config.with_defaults(rms_norm_eps=1e-5, max_position_embeddings=4096))
    clip = None if config.get("clip_qkv") is None else config.number("clip_qkv")
    attention = replace(spec.layers[0].attention, qk_norm=QKNorm(spec.norm, Over.ALL_HEADS), clip=clip)
    layers = tuple(replace(layer, attention=attention) for layer in spec.layers)
    router = Router(config.count("num_experts_per_tok", 8), renormalize=config.flag("norm_topk_prob", False))
    moe = mixture(MoE(num_experts(config, 64), config.count("intermediate_size"), router))
    spec = replace(spec, architecture="OlmoeForCausalLM", layers=layers, rules=SEPARATE, other_rules=(STACKED,))
    return with_mlps(spec, moe)
