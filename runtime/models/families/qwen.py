"""Qwen2 and Qwen3, dense and with experts.

Qwen2 is Llama with biases of q, k and v, and optional windows in its upper layers. Qwen3 has a norm of each head's q and k, and
an explicit head size. Qwen2-MoE also has a shared expert. As in transformers, its windows are in every other layer below
`max_window_layers`, if the config has any. Qwen3-MoE has them in all layers."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import FULL, SLIDING, HfConfig, layer_types, num_layers, window
from runtime.models.read.mixture import checked_moe, num_experts, with_expert_rules, with_mlps
from runtime.models.spec.attention import Attention, QKNorm
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.mlp import GatedMLP, MoE, Router
from runtime.models.spec.model import UnsupportedModel


def qwen2(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(max_position_embeddings=32768)
    spec = llama(config, "Qwen2ForCausalLM")
    return with_attention(spec, replace(spec.attention, qkv_bias=True, output_bias=False), config)


def with_attention(spec: DecoderSpec, attention: Attention, config: HfConfig) -> DecoderSpec:
    """Return `spec` with `attention` in all layers. Layers that the config selects also get a sliding window."""
    first = (
        config.count_or_zero("max_window_layers", 28) if config.flag("use_sliding_window", False) else len(spec.layers)
    )
    types = layer_types(config, lambda index: SLIDING if index >= first else FULL)
    by_type = {each: replace(attention, window=window(config, each)) for each in types}
    return spec.with_mixers(lambda index, _: by_type[types[index]])


def qwen3(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(max_position_embeddings=32768, head_dim=128)
    spec = llama(config, "Qwen3ForCausalLM")
    return with_attention(spec, replace(spec.attention, qk_norm=QKNorm(spec.norm)), config)


def qwen2_moe(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(num_experts=60, num_experts_per_tok=4)
    first_without = config.count_or_zero("max_window_layers", 28) if _windowed(config) else 0
    types = [SLIDING if index < first_without and index % 2 == 0 else FULL for index in range(num_layers(config))]
    config = config.with_defaults(layer_types=types)
    moe = shared_expert_moe(config, 1408, 5632)
    spec = qwen2(config.with_defaults(num_key_value_heads=16))
    bias = config.flag("qkv_bias", True)
    spec = spec.with_attention(qkv_bias=bias)
    return sparse(replace(spec, architecture="Qwen2MoeForCausalLM"), moe, config)


def qwen3_moe(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(num_experts_per_tok=8, num_key_value_heads=4)
    types = [SLIDING if _windowed(config) else FULL] * num_layers(config)
    spec = qwen3(config.changed(layer_types=types))
    return sparse(replace(spec, architecture="Qwen3MoeForCausalLM"), _moe(config, 768), config)


def _windowed(config: HfConfig) -> bool:
    return config.flag("use_sliding_window", False)


def shared_expert_moe(config: HfConfig, intermediate_size: int, shared_size: int) -> MoE:
    """Return a mixture of experts with a gated shared expert. `intermediate_size`, `shared_size`: default inner sizes of an
    expert and of the shared expert."""
    shared = GatedMLP(config.count("shared_expert_intermediate_size", shared_size), name="mlp.shared_expert")
    return replace(_moe(config, intermediate_size), shared=shared, shared_gate=True)


def _moe(config: HfConfig, intermediate_size: int) -> MoE:
    router = Router(config.count("num_experts_per_tok"), renormalize=config.flag("norm_topk_prob", False))
    return checked_moe(MoE(num_experts(config, 128), config.count("moe_intermediate_size", intermediate_size), router))


def sparse(spec: DecoderSpec, moe: MoE, config: HfConfig) -> DecoderSpec:
    """Return `spec` with `moe` in the layers that the config selects, and with checkpoint rules of experts."""
    step, dense = config.count("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise UnsupportedModel(f"config: mlp_only_layers is {dense!r}, not a list of layers")
    spec = with_mlps(spec, moe, lambda index: index not in dense and (index + 1) % step == 0)
    return with_expert_rules(spec)


ARCHITECTURES = {
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3MoeForCausalLM": qwen3_moe,
}
