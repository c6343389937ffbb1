"""LFM2: short convolutions between gates in most layers, Qwen3's attention in the others."""

from __future__ import annotations

from runtime.models.hf_config import FULL, HfConfig, decoder, heads, num_layers, rope
from runtime.models.hybrid import block_types, indices, taps
from runtime.models.spec.attention import Attention, QKNorm
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import GatedMLP
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.recurrent import ShortConv
from runtime.weights.rules import merge, rename

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
_CONV = "conv"


def lfm2(config: HfConfig) -> DecoderSpec:
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=128000, rope_theta=1e6,
        tie_word_embeddings=config.flag("tie_embedding", True),
    )  # fmt: skip
    norm, num_heads = RMSNorm(config.number("norm_eps", 1e-5)), heads(config)
    attention = Attention(*num_heads, rope(config, num_heads[2]), qk_norm=QKNorm(norm))
    conv = ShortConv(taps(config, "conv_L_cache", 3), config.count("hidden_size"), config.flag("conv_bias", False))
    mlp = GatedMLP(_intermediate_size(config))
    layers = [Layer(conv if kind == _CONV else attention, mlp, norm, _NORMS) for kind in _types(config)]
    return decoder(config, "Lfm2ForCausalLM", layers, norm, rules=_RULES)


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
