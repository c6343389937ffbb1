"""Jamba: Mamba layers, with attention without positions in some layers, and experts in some."""

from __future__ import annotations

from runtime.models.read.hf_config import HfConfig, activation, decoder, heads, num_layers
from runtime.models.read.hybrid import check_silu, conv_kernel
from runtime.models.read.mixture import checked_moe, num_experts, with_expert_rules
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import MLP, Layer
from runtime.models.spec.mlp import GatedMLP, MoE, Router
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.recurrent import Mamba
from runtime.weights.rules import rename

_NORMS = ("input_layernorm", "pre_ff_layernorm")
_RULES = (
    rename("feed_forward.router", into="mlp.gate"),
    rename("feed_forward", into="mlp"),
    rename("model.final_layernorm", into="model.norm"),
)


def jamba(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(num_key_value_heads=8, max_position_embeddings=262144)
    norm, mamba = RMSNorm(config.number("rms_norm_eps", 1e-6)), _mamba(config)
    attention = Attention(*heads(config), rope=None)
    dense, moe = GatedMLP(config.count("intermediate_size", 14336), activation=activation(config)), _moe(config)

    def layer(index: int) -> Layer:
        mlp: MLP = moe if moe is not None and _is_one_of(config, "expert_layer", index, (2, 1)) else dense
        return Layer(attention if _is_one_of(config, "attn_layer", index, (8, 4)) else mamba, mlp, norm, _NORMS)

    layers = [layer(index) for index in range(num_layers(config))]
    return with_expert_rules(decoder(config, "JambaForCausalLM", layers, norm), *_RULES)


def _is_one_of(config: HfConfig, kind: str, index: int, defaults: tuple[int, int]) -> bool:
    period, offset = config.count(f"{kind}_period", defaults[0]), config.count_or_zero(f"{kind}_offset", defaults[1])
    return index % period == offset


def _mamba(config: HfConfig) -> Mamba:
    check_silu(config)
    hidden_size = config.count("hidden_size")
    by_width = -(-hidden_size // 16)
    return Mamba(
        inner_size=config.count("mamba_expand", 2) * hidden_size,
        state_size=config.count("mamba_d_state", 16),
        rank=by_width if config.get("mamba_dt_rank") == "auto" else config.count("mamba_dt_rank", by_width),
        conv_kernel=conv_kernel(config, "mamba_d_conv"),
        norm=RMSNorm(config.number("rms_norm_eps", 1e-6)),
        bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
    )


def _moe(config: HfConfig) -> MoE | None:
    experts = num_experts(config, 16)
    if experts == 1:
        return None
    check_silu(config)
    return checked_moe(
        MoE(experts, config.count("intermediate_size", 14336), Router(config.count("num_experts_per_tok", 2)))
    )


ARCHITECTURES = {"JambaForCausalLM": jamba}
