"""Qwen3-Next: gated delta nets in three layers of four, attention with a gate in the fourth, experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.hf_config import FULL, HfConfig, num_layers
from runtime.models.hybrid import RECURRENT, check_silu, hybrid_types, taps
from runtime.models.llama import llama
from runtime.models.qwen_moe import shared_expert_moe, sparse
from runtime.models.spec import (
    AnyLayer,
    AttentionLayer,
    DecoderSpec,
    GatedDeltaNet,
    QKNorm,
    RecurrentLayer,
    RMSNorm,
    UnsupportedModel,
)
from runtime.weights.rules import GroupsTogether, LessOne, recode

_NORMS = ("model.norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")


def qwen3_next(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=2, head_dim=256, num_experts=512, num_experts_per_tok=10, norm_topk_prob=True,
        partial_rotary_factor=0.25,
    )  # fmt: skip
    period = config.count("full_attention_interval", 4)
    types = hybrid_types(config, [RECURRENT if (i + 1) % period else FULL for i in range(num_layers(config))])
    spec, net = llama(config), _net(config)
    attention = replace(spec.attention, qk_norm=QKNorm(spec.norm), output_gate=True)
    spec = sparse(replace(spec, architecture="Qwen3NextForCausalLM"), shared_expert_moe(config, 512, 512), config)

    def change(index: int, layer: AttentionLayer) -> AnyLayer:
        if types[index] == RECURRENT:
            return RecurrentLayer(net, layer.mlp, layer.norm)
        return replace(layer, attention=attention)

    ratio = net.num_value_heads // net.num_key_heads
    values = ratio * net.value_size
    forms = (
        *(recode(f"{norm}.weight", LessOne()) for norm in _NORMS),
        recode("qkv_proj", GroupsTogether(attention.num_heads, (attention.head_size,) * 2)),
        recode("in_proj_qkvz", GroupsTogether(net.num_key_heads, (net.key_size, net.key_size, values, values))),
        recode("in_proj_ba", GroupsTogether(net.num_key_heads, (ratio, ratio))),
    )
    return replace(
        spec.with_layers(change),
        rules=(*spec.rules, *forms),
        other_rules=tuple((*rules, *forms) for rules in spec.other_rules),
        ignored_below=("mtp.",),
    )


def _net(config: HfConfig) -> GatedDeltaNet:
    check_silu(config)
    net = GatedDeltaNet(
        config.count("linear_num_key_heads", 16),
        config.count("linear_num_value_heads", 32),
        config.count("linear_key_head_dim", 128),
        config.count("linear_value_head_dim", 128),
        taps(config, "linear_conv_kernel_dim"),
        RMSNorm(config.number("rms_norm_eps", 1e-6)),
    )
    if net.num_value_heads % net.num_key_heads:
        raise UnsupportedModel(
            f"config: {net.num_value_heads} value heads do not share {net.num_key_heads} key heads evenly"
        )
    return net
