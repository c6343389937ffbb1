"""LFM2: gated short convolutions in most layers, Qwen3's attention in the others. Some models have experts after the first
layers."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.read.hf_config import FULL, HfConfig, decoder, heads, num_layers, rope
from runtime.models.read.hybrid import block_types, conv_kernel, indices
from runtime.models.read.mixture import checked_moe, num_experts, with_mlps
from runtime.models.spec.attention import Attention, QKNorm
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import GatedMLP, MoE, Router
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.recurrent import ShortConv
from runtime.weights.rules import merge, rename, stack

_NORMS = ("operator_norm", "ffn_norm")
_RULES = (
    LLAMA_RULES[0],
    rename("self_attn.out_proj", into="self_attn.o_proj"),
    rename("self_attn.q_layernorm", into="self_attn.q_norm"),
    rename("self_attn.k_layernorm", into="self_attn.k_norm"),
    merge("feed_forward.w1 feed_forward.w3", into="mlp.gate_up_proj"),
    rename("feed_forward.w2", into="mlp.down_proj"),
    rename("model.embedding_norm", into="model.norm"),
)
_CORRECTION = rename("feed_forward.expert_bias", into="mlp.gate.e_score_correction_bias")
_MLP = rename("feed_forward", into="mlp")
_SEPARATE = (*_RULES, merge("w1 w3", into="gate_up"), rename("w2", into="down"), _CORRECTION, _MLP)
_STACKED = (
    *_RULES,
    stack("experts"),
    rename("gate_up_proj", into="gate_up.weight"),
    rename("down_proj", into="down.weight"),
    _CORRECTION,
    _MLP,
)
_CONV = "conv"


def lfm2(config: HfConfig) -> DecoderSpec:
    return _lfm2(config, "Lfm2ForCausalLM", _intermediate_size(config))


def lfm2_moe(config: HfConfig) -> DecoderSpec:
    router = Router(
        config.count("num_experts_per_tok", 4),
        "sigmoid",
        renormalize=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        e_score_correction_bias=config.flag("use_expert_bias", True),
    )
    moe = checked_moe(MoE(num_experts(config, 32), config.count("moe_intermediate_size", 1792), router))
    dense = config.count_or_zero("num_dense_layers", 2)
    spec = _lfm2(config, "Lfm2MoeForCausalLM", config.count("intermediate_size", 7168))
    return replace(with_mlps(spec, moe, lambda index: index >= dense), rules=_SEPARATE, other_rules=(_STACKED,))


def _lfm2(config: HfConfig, architecture: str, intermediate_size: int) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=128000, rope_theta=1e6,
        tie_word_embeddings=config.flag("tie_embedding", True),
    )  # fmt: skip
    norm, num_heads = RMSNorm(config.number("norm_eps", 1e-5)), heads(config)
    attention = Attention(*num_heads, rope(config, num_heads[2]), qk_norm=QKNorm(norm))
    conv = ShortConv(
        conv_kernel(config, "conv_L_cache", 3), config.count("hidden_size"), config.flag("conv_bias", False)
    )
    mlp = GatedMLP(intermediate_size)
    layers = [Layer(conv if kind == _CONV else attention, mlp, norm, _NORMS) for kind in _types(config)]
    return decoder(config, architecture, layers, norm, rules=_RULES)


def _types(config: HfConfig) -> list[str]:
    count = num_layers(config)
    attend = range(count) if config.get("full_attn_idxs") is None else indices(config, "full_attn_idxs")
    default = [FULL if index in attend else _CONV for index in range(count)]
    types = block_types(config, "layer_types", default, frozenset({_CONV, FULL}))
    if len(types) != count:
        raise UnsupportedModel(f"config: layer_types has {len(types)} entries for {count} layers")
    return types


def _intermediate_size(config: HfConfig) -> int:
    size = config.count("block_ff_dim", config.count("intermediate_size", 12288))
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size, multiple = int(2 * size / 3), config.count("block_multiple_of", 256)
    size = int(config.number("block_ffn_dim_multiplier", 1.0) * size)
    return multiple * -(-size // multiple)


ARCHITECTURES = {"Lfm2ForCausalLM": lfm2, "Lfm2MoeForCausalLM": lfm2_moe}
