"""Qwen3-Next and the text decoder of Qwen3.5: gated delta nets in three of four layers and gated attention in the fourth. Most
models have experts with a shared expert."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.families.qwen import shared_expert_moe, sparse
from runtime.models.read.hf_config import FULL, HfConfig, num_layers
from runtime.models.read.hybrid import RECURRENT, check_silu, conv_kernel, hybrid_types
from runtime.models.read.mtp import mtp
from runtime.models.spec.attention import Attention, QKNorm
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.draft_head import DraftHeadSpec, JoinedEntry
from runtime.models.spec.layer import Layer, Mixer
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.recurrent import GatedDeltaNet
from runtime.weights.rules import GroupedRows, Rule, UnitOffsetNorm, merge, rename, transform

_APART = (merge("in_proj_qkv in_proj_z", into="in_proj_qkvz"), merge("in_proj_b in_proj_a", into="in_proj_ba"))
_NORMS = ("model.norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")


def qwen3_next(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(num_key_value_heads=2, num_experts=512, num_experts_per_tok=10)
    net = _net(config)
    ratio = net.num_value_heads // net.num_key_heads
    values = ratio * net.value_size
    by_key_head = (
        transform("in_proj_qkvz", GroupedRows(net.num_key_heads, (net.key_size, net.key_size, values, values))),
        transform("in_proj_ba", GroupedRows(net.num_key_heads, (ratio, ratio))),
    )
    return _with_experts(config, "Qwen3NextForCausalLM", net, by_key_head)


def qwen3_5(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(num_key_value_heads=4)
    return _hybrid(config, _llama(config, "Qwen3_5ForCausalLM"), _net(config), _APART)


def qwen3_5_moe(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(num_key_value_heads=2, num_experts=256, num_experts_per_tok=8)
    config = config.with_defaults(intermediate_size=config.count("moe_intermediate_size", 512))  # unused
    return _with_experts(config, "Qwen3_5MoeForCausalLM", _net(config), _APART)


def _llama(config: HfConfig, architecture: str) -> DecoderSpec:
    config = config.with_defaults(head_dim=256, partial_rotary_factor=0.25, max_position_embeddings=32768)
    return llama(config, architecture)


def _with_experts(config: HfConfig, architecture: str, net: GatedDeltaNet, rules: tuple[Rule, ...]) -> DecoderSpec:
    moe = shared_expert_moe(config.with_defaults(norm_topk_prob=True), 512, 512)
    return _hybrid(config, sparse(_llama(config, architecture), moe, config), net, rules)


def _hybrid(config: HfConfig, spec: DecoderSpec, net: GatedDeltaNet, rules: tuple[Rule, ...]) -> DecoderSpec:
    """Return `spec` with `net` in most layers, and gated attention in the others. `rules`: checkpoint rules of the delta nets."""
    period = config.count("full_attention_interval", 4)
    types = hybrid_types(config, [RECURRENT if (i + 1) % period else FULL for i in range(num_layers(config))])
    attention = replace(spec.attention, qk_norm=QKNorm(spec.norm), output_gate=True)

    def mix(index: int, _: Attention) -> Mixer:
        return net if types[index] == RECURRENT else attention

    more = (
        *rules,
        *(transform(f"{norm}.weight", UnitOffsetNorm()) for norm in _NORMS),
        transform("qkv_proj", GroupedRows(attention.num_heads, (attention.head_size,) * 2)),
    )
    return replace(
        spec.with_mixers(mix),
        rules=(*spec.rules, *more),
        other_rules=tuple((*each, *more) for each in spec.other_rules),
        ignored_below=("mtp.",),
    )


def _net(config: HfConfig) -> GatedDeltaNet:
    check_silu(config)
    net = GatedDeltaNet(
        config.count("linear_num_key_heads", 16),
        config.count("linear_num_value_heads", 32),
        config.count("linear_key_head_dim", 128),
        config.count("linear_value_head_dim", 128),
        conv_kernel(config, "linear_conv_kernel_dim"),
        RMSNorm(config.number("rms_norm_eps", 1e-6)),
    )
    if net.num_value_heads % net.num_key_heads:
        raise UnsupportedModel(
            f"config: {net.num_value_heads} value heads are not a multiple of the {net.num_key_heads} key heads"
        )
    return net


def qwen3_next_mtp(config: HfConfig, spec: DecoderSpec) -> DraftHeadSpec:
    """Return the spec of the MTP module, one layer with attention. Configs have the number of MTP layers under two keys, or omit
    it."""
    config = config.with_defaults(num_nextn_predict_layers=config.get("mtp_num_hidden_layers") or 1)
    rules = (
        rename("mtp.pre_fc_norm_embedding", into="model.entry.embedding_norm"),
        rename("mtp.pre_fc_norm_hidden", into="model.entry.hidden_norm"),
        rename("mtp.fc", into="model.entry.projection"),
        rename("mtp", into="model"),
        *(transform(f"entry.{norm}.weight", UnitOffsetNorm()) for norm in ("embedding_norm", "hidden_norm")),
    )
    attending = [each for each in spec.layers if isinstance(each, Layer) and isinstance(each.mixer, Attention)]
    return mtp(
        config, spec, "num_nextn_predict_layers", JoinedEntry(spec.norm), rules, ("mtp.",), layers=tuple(attending[-1:]),
        hands_on_normed=True,
    )  # fmt: skip


MTP = dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), qwen3_next_mtp)
ARCHITECTURES = {
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
}
