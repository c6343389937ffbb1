"""GPT-OSS: attention with sinks, a window in every other layer, and experts with biases and clamped gates.

Its checkpoints interleave gate and up projections: as columns, or as rows if the experts are in MXFP4. Loading separates them."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import SLIDING, HfConfig, every, layer_types, window
from runtime.models.read.mixture import STACKED_BY_KIND, checked_moe, num_experts
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import ClampedSwiglu, MoE, Router
from runtime.weights.rules import InterleavedHalves, Transposed, rename, stack, transform

_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_EITHER = (
    *LLAMA_RULES,
    stack("experts"),
    rename("mlp.router", into="mlp.gate"),
    rename("gate_up_proj_bias", into="gate_up.bias"),
    rename("down_proj_bias", into="down.bias"),
    transform("gate_up.bias", InterleavedHalves()),
)
_RULES = (
    *_EITHER,
    rename("gate_up_proj", into="gate_up.weight"),
    rename("down_proj", into="down.weight"),
    transform("gate_up.weight", InterleavedHalves(as_columns=True)),
    transform("down.weight", Transposed()),
)
_MXFP4 = (
    *_EITHER,
    rename("gate_up_proj_blocks", into="gate_up.weight"),
    rename("down_proj_blocks", into="down.weight"),
    transform("gate_up.weight", InterleavedHalves()),
)


def gpt_oss(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        attention_bias=True,
        rope_parameters=config.get("rope_scaling") or _YARN,
        rope_theta=150000.0,
    )
    spec = llama(config, "GptOssForCausalLM")
    types = layer_types(config, every(2))
    attention = replace(spec.attention, sinks=True)
    windowed = replace(attention, window=window(config.with_unsaid(sliding_window=128)))
    router = Router(config.count("num_experts_per_tok", 4), renormalize=True, bias=True)
    activation = ClampedSwiglu(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0))
    size = config.count("intermediate_size", 2880)
    moe = checked_moe(MoE(num_experts(config, 128), size, router, bias=True, activation=activation))
    spec = spec.with_layers(
        lambda index, layer: Layer(windowed if types[index] == SLIDING else attention, moe, layer.norm)
    )
    return replace(spec, rules=_RULES, other_rules=(_MXFP4, STACKED_BY_KIND))


ARCHITECTURES = {"GptOssForCausalLM": gpt_oss}
