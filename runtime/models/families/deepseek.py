"""DeepSeek-V2 and V3: latent attention; an MLP in the first layers, then many small experts with shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from runtime.models.read.hf_config import HfConfig, activation, decoder, mscale, num_layers, rope, rope_parameters
from runtime.models.read.mixture import SHARED_EXPERTS, checked_moe, num_experts, sigmoid_router, with_expert_rules
from runtime.models.read.mtp import beyond_the_last
from runtime.models.spec.attention import LatentAttention
from runtime.models.spec.decoder import DecoderSpec, layer_name
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import GatedMLP, MoE, Router
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import RMSNorm


def deepseek_v2(config: HfConfig) -> DecoderSpec:
    if config.flag("norm_topk_prob", False):
        raise UnsupportedModel("config: norm_topk_prob is not supported for DeepSeek-V2")
    method = config.with_defaults(topk_method="greedy").get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"config: topk_method {method!r} is not supported, only greedy and group_limited_greedy")
    router = Router(
        config.count("num_experts_per_tok"), scale=config.number("routed_scaling_factor", 1.0), float32=True
    )
    if method == "group_limited_greedy":
        router = replace(router, num_groups=config.count("n_group"), top_groups=config.count("topk_group"))
    bias = config.flag("mlp_bias", False)
    shared = _shared(config, config.count("n_shared_experts", 2) * config.count("moe_intermediate_size", 1407), bias)
    moe = MoE(num_experts(config, 64), config.count("moe_intermediate_size", 1407), router, shared)
    return _deepseek(
        config, "DeepseekV2ForCausalLM", checked_moe(moe), config.count_or_zero("first_k_dense_replace", 0), bias
    )


def deepseek_v3(config: HfConfig) -> DecoderSpec:
    if not config.flag("rope_interleave", True):
        raise UnsupportedModel("config: rope_interleave false is not supported")
    router = sigmoid_router(
        config.with_defaults(num_experts_per_tok=8, routed_scaling_factor=2.5, n_group=8, topk_group=4)
    )
    size = config.count("moe_intermediate_size", 2048)
    moe = MoE(
        num_experts(config, 256), size, router, _shared(config, config.count("n_shared_experts", 1) * size, False)
    )
    dense = config.count_or_zero("first_k_dense_replace", 3)
    return _deepseek(config.with_unsaid(max_position_embeddings=4096), "DeepseekV3ForCausalLM", checked_moe(moe), dense)


def _shared(config: HfConfig, size: int, bias: bool) -> GatedMLP:
    return GatedMLP(size, bias, activation(config), name="mlp.shared_expert")


def _deepseek(config: HfConfig, architecture: str, moe: MoE, num_dense: int, mlp_bias: bool = False) -> DecoderSpec:
    attention, norm = _attention(config), RMSNorm(config.number("rms_norm_eps", 1e-6))

    def layers() -> Iterator[Layer]:
        for index in range(num_layers(config)):
            dense = GatedMLP(config.count("intermediate_size"), mlp_bias, activation(config))
            yield Layer(attention, dense if index < num_dense else moe, norm)

    spec = decoder(config, architecture, layers(), norm)
    # Layers after the last one are MTP modules and not part of the model.
    spec = replace(spec, ignored_below=(f"{layer_name(len(spec.layers))}.",))
    return with_expert_rules(spec, SHARED_EXPERTS)


def _attention(config: HfConfig) -> LatentAttention:
    rank, rotary_dim = config.count("kv_lora_rank", 512), config.count("qk_rope_head_dim", 64)
    key_size = config.count("qk_nope_head_dim", 128)
    scale = float(key_size + rotary_dim) ** -0.5
    parameters = rope_parameters(config)
    if parameters.get("mscale_all_dim"):
        scale *= mscale(parameters.number("factor"), parameters.number("mscale_all_dim")) ** 2
    # Here null has a meaning: queries are computed from the hidden state directly.
    query_rank = config.with_unsaid(q_lora_rank=1536).get("q_lora_rank")
    return LatentAttention(
        num_heads=config.count("num_attention_heads"),
        num_kv_heads=1,
        head_size=rank + rotary_dim,
        rope=rope(config, rotary_dim),
        score_scale=scale,
        rank=rank,
        key_size=key_size,
        value_size=config.count("v_head_dim", 128),
        norm=RMSNorm(1e-6),
        query_rank=None if query_rank is None else config.count("q_lora_rank", 1536),
        bias=config.flag("attention_bias", False),
    )


MTP = {"DeepseekV3ForCausalLM": beyond_the_last}
ARCHITECTURES = {"DeepseekV2ForCausalLM": deepseek_v2, "DeepseekV3ForCausalLM": deepseek_v3}
