"""GTE (Zhang et al. 2024, mGTE) and Snowflake's Arctic-embed 2.0: BERT with rotary positions and a gated MLP whose down
projection has a bias. The authors' own code calls the classes "New…"."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.read.encoder import Kind, architectures, dense, encoder, with_head
from runtime.models.read.hf_config import HfConfig, activation, heads, num_layers, rope
from runtime.models.spec.attention import Attention, Mask
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import PostNormLayer
from runtime.models.spec.mlp import GatedMLP
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import LayerNorm
from runtime.models.spec.rope import LinearScaling, Rope
from runtime.weights.rules import SwappedHalves, merge, rename, transform

_ENDS = (
    rename("embeddings.word_embeddings", into="model.embed_tokens"),
    rename("embeddings.token_type_embeddings", into="model.embed_token_types"),
    rename("embeddings.LayerNorm", into="model.embed_norm"),
    rename("pooler", into="model.pooler"),
)
_RULES = (
    *_ENDS,
    rename("layers", into="model.layers"),
    merge("q_proj k_proj v_proj", into="qkv_proj"),
    merge("gate_proj up_proj", into="gate_up_proj"),
)
# Names in the authors' own code.
_FIRST_RULES = (
    *_ENDS,
    rename("encoder.layer", into="model.layers"),
    rename("attention.qkv_proj", into="self_attn.qkv_proj"),
    rename("attention.o_proj", into="self_attn.o_proj"),
    rename("mlp.up_gate_proj", into="mlp.gate_up_proj"),
    transform("gate_up_proj.weight", SwappedHalves()),
    rename("attn_ln", into="post_attention_layernorm"),
    rename("mlp_ln", into="post_mlp_layernorm"),
)


def gte(config: HfConfig, architecture: str, kind: Kind) -> DecoderSpec:
    return _gte(config.with_defaults(rope_theta=160000.0), architecture, kind, "gte")


def new(config: HfConfig, architecture: str, kind: Kind) -> DecoderSpec:
    return _gte(config, architecture, kind, "new")


def _gte(config: HfConfig, architecture: str, kind: Kind, prefix: str) -> DecoderSpec:
    for key, value in (("position_embedding_type", "rope"), ("layer_norm_type", "layer_norm")):
        if config.get(key) not in (None, value):
            raise UnsupportedModel(f"config: {key} {config.get(key)!r} is not supported")
    if config.flag("logn_attention_scale", False):
        raise UnsupportedModel("config: logn_attention_scale is not supported")
    config = config.with_defaults(max_position_embeddings=8192)
    num_heads, num_kv_heads, head_size = heads(config)
    norm = LayerNorm(config.number("layer_norm_eps", 1e-12))
    attention = Attention(
        num_heads, num_kv_heads, head_size, _rope(config, head_size), qkv_bias=True, output_bias=True, mask=Mask.FULL
    )
    mlp = GatedMLP(config.count("intermediate_size"), False, activation(config, default="gelu"), down_bias=True)
    layer = PostNormLayer(attention, mlp, norm, ("post_attention_layernorm", "post_mlp_layernorm"))
    spec = encoder(
        config, architecture, [layer] * num_layers(config), prefix, _RULES, embedding_norm=norm,
        num_token_types=config.count_or_zero("type_vocab_size", 1), more_rules=(_FIRST_RULES,),
    )  # fmt: skip
    return with_head(spec, config, kind, dense(config, "model.pooler.dense", "tanh"))


def _rope(config: HfConfig, head_size: int) -> Rope:
    """Return the rotary embedding. NTK scaling is converted to a larger base and a factor that divides all frequencies."""
    scaling = config.section("rope_scaling")
    if scaling.get("type") != "ntk":
        return rope(config, head_size)
    if scaling.get("mixed_b") is not None:
        raise UnsupportedModel("config: rope_scaling of type ntk with mixed_b is not supported")
    factor = scaling.number("factor")
    plain = Rope(head_size, config.number("rope_theta", 10000.0) * factor)
    return replace(plain, scaling=LinearScaling(factor ** (2 / head_size)))


ARCHITECTURES = architectures("Gte", gte) | architectures("New", new)
