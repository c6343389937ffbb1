"""ERNIE 4.5: Llama whose rotary embedding rotates adjacent dims. Some models have experts and shared experts in a range of
layers."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.mixture import SEPARATE, SHARED_EXPERTS, STACKED, checked_moe, num_experts, with_mlps
from runtime.models.read.mtp import mtp
from runtime.models.spec.decoder import LLAMA_RULES, TIED_HEAD_BIAS, DecoderSpec
from runtime.models.spec.draft_head import DraftHeadSpec, JoinedEntry
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import GatedMLP, MoE, Router
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import NoNorm
from runtime.weights.rules import InterleavedRope, OneRow, rename, transform


def ernie45(config: HfConfig) -> DecoderSpec:
    bias = config.flag("use_bias", False)
    config = config.with_defaults(
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        attention_bias=bias,
        mlp_bias=bias,
    )
    spec = llama(config, "Ernie4_5ForCausalLM", tied=True)
    heads = spec.attention
    pairs = InterleavedRope(heads.num_heads + heads.num_kv_heads, heads.head_size, heads.head_size)
    return replace(spec, rules=(*LLAMA_RULES, transform("qkv_proj", pairs)))


_BIAS = "e_score_correction_bias"


def ernie45_moe(config: HfConfig) -> DecoderSpec:
    bias = config.flag("use_bias", False)
    spec = ernie45(config.with_defaults(num_key_value_heads=4, head_dim=_head_dim(config)))
    router = Router(
        config.count("moe_k", 6), renormalize=True, min_sum=config.number("moe_norm_min", 1e-12), e_score_correction_bias=True,
        float32=True,
    )  # fmt: skip
    size, num_shared = config.count("moe_intermediate_size", 1536), config.count_or_zero("moe_num_shared_experts", 2)
    shared = GatedMLP(num_shared * size, bias, name="mlp.shared_expert") if num_shared else None
    first, step = config.count_or_zero("moe_layer_start_index", 1), config.count("moe_layer_interval", 1)
    last = config.with_defaults(moe_layer_end_index=-1).get("moe_layer_end_index")
    if type(last) is not int or last < -1:
        raise UnsupportedModel(f"config: moe_layer_end_index is {last!r}, not a layer")
    last = len(spec.layers) - 1 if last == -1 else last
    moe = checked_moe(MoE(num_experts(config, 64), size, router, shared))
    either = (*spec.rules[len(LLAMA_RULES) :], SHARED_EXPERTS, transform(_BIAS, OneRow()), TIED_HEAD_BIAS)
    return replace(
        with_mlps(spec, moe, lambda index: first <= index <= last and (index + 1) % step == 0),
        architecture="Ernie4_5_MoeForCausalLM",
        head_bias=bias,
        rules=(*SEPARATE, *either, rename(f"moe_statics.{_BIAS}", into=f"gate.{_BIAS}")),
        other_rules=((*STACKED, *either, rename(f"gate.moe_statics.{_BIAS}", into=f"gate.{_BIAS}")),),
        ignored_below=("model.mtp",),
    )


def _head_dim(config: HfConfig) -> int:
    return config.count("hidden_size") // config.count("num_attention_heads")


def ernie45_moe_mtp(config: HfConfig, spec: DecoderSpec) -> DraftHeadSpec:
    """Return the MTP head: one layer without experts and without a final norm."""
    bias = config.flag("use_bias", False)
    rules = (
        rename("model.mtp_emb_norm.0", into="model.entry.embedding_norm"),
        rename("model.mtp_hidden_norm.0", into="model.entry.hidden_norm"),
        rename("model.mtp_linear_proj.0", into="model.entry.projection"),
        rename("model.mtp_block.0", into="model.layers.0"),
    )
    entry, mlp = JoinedEntry(spec.norm, bias=bias), GatedMLP(config.count("intermediate_size"), bias)
    layers = tuple(replace(layer, mlp=mlp) for layer in spec.layers[-1:] if isinstance(layer, Layer))
    return mtp(
        config, spec, "num_nextn_predict_layers", entry, rules, ("model.mtp_",), layers=layers, norm=NoNorm()
    )  # fmt: skip


MTP = {
    "Ernie4_5_MoeForCausalLM": ernie45_moe_mtp,
}
ARCHITECTURES = {
    "Ernie4_5ForCausalLM": ernie45,
    "Ernie4_5_MoeForCausalLM": ernie45_moe,
}
