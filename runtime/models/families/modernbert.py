"""ModernBERT (Warner et al. 2024): norms before each block, rotary positions, gated MLPs, and a window in two of three layers."""

from __future__ import annotations

from runtime.models.read.encoder import Kind, architectures, encoder, with_classes
from runtime.models.read.hf_config import FULL, SLIDING, HfConfig, activation, heads, layer_types, num_layers, rope
from runtime.models.spec.attention import Attention, Mask
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import Layer
from runtime.models.spec.linear import Linear
from runtime.models.spec.mlp import GatedMLP
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import LayerNorm, NoNorm
from runtime.models.spec.pooler import Dense, PoolerActivation
from runtime.weights.rules import rename

_RULES = (
    rename("embeddings.tok_embeddings", into="model.embed_tokens"),
    rename("embeddings.norm", into="model.embed_norm"),
    rename("final_norm", into="model.norm"),
    rename("layers", into="model.layers"),
    rename("attn.Wqkv", into="self_attn.qkv_proj"),
    rename("attn.Wo", into="self_attn.o_proj"),
    rename("mlp.Wi", into="mlp.gate_up_proj"),
    rename("mlp.Wo", into="mlp.down_proj"),
)
_HEAD_ACTIVATIONS: dict[str, PoolerActivation] = {"gelu": "gelu", "silu": "silu", "relu": "relu"}


def modernbert(config: HfConfig, architecture: str, kind: Kind) -> DecoderSpec:
    num_heads, num_kv_heads, head_size = heads(config)
    period = config.count("global_attn_every_n_layers", 3)
    types = layer_types(config, lambda index: SLIDING if index % period else FULL)
    thetas = {FULL: config.number("global_rope_theta", 160000.0), SLIDING: config.number("local_rope_theta", 10000.0)}
    windows = {FULL: None, SLIDING: config.count("local_attention", 128) // 2 + 1}
    biased = config.flag("attention_bias", False)
    norm = LayerNorm(config.number("norm_eps", 1e-5), bias=config.flag("norm_bias", False))
    mlp = GatedMLP(
        config.count("intermediate_size"),
        config.flag("mlp_bias", False),
        activation(config, "hidden_activation", "gelu"),
    )

    def layer(index: int) -> Layer:
        own = config.with_defaults(rope_theta=thetas[types[index]])
        attention = Attention(
            num_heads, num_kv_heads, head_size, rope(own, head_size, types[index]), qkv_bias=biased, output_bias=biased,
            window=windows[types[index]], mask=Mask.FULL,
        )  # fmt: skip
        # The first layer has no norm of its own: it reads the embedding's norm.
        return Layer(attention, mlp, norm, ("attn_norm", "mlp_norm"), mixer_norm=None if index else NoNorm())

    spec = encoder(
        config.with_defaults(max_position_embeddings=8192), architecture, map(layer, range(num_layers(config))), "model",
        _RULES, embedding_norm=norm, norm=norm,
    )  # fmt: skip
    if kind == "model":
        return spec
    name = config.with_defaults(classifier_activation="gelu").get("classifier_activation")
    if name not in _HEAD_ACTIVATIONS:
        raise UnsupportedModel(f"config: classifier_activation {name!r} is not supported")
    size = config.count("hidden_size")
    pooling = config.with_defaults(classifier_pooling="cls").get("classifier_pooling")
    if pooling not in ("cls", "mean"):
        raise UnsupportedModel(f"config: classifier_pooling {pooling!r} is not supported")
    before = Dense(
        Linear("head.dense", size, size, config.flag("classifier_bias", False)),
        _HEAD_ACTIVATIONS[name],
        norm,
        "head.norm",
    )
    return with_classes(spec, config, (before,), by_token=kind == "token", pooling=pooling)


ARCHITECTURES = architectures("ModernBert", modernbert)
