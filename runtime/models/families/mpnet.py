"""MPNet (Song et al. 2020): BERT with learned positions, and a relative position bias with the same weights in all layers."""

from __future__ import annotations

from runtime.models.read.encoder import Kind, architectures, dense, encoder, post_norm_layers, with_head
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.attention import RelativeBias
from runtime.models.spec.decoder import DecoderSpec, LearnedPositions
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import merge, rename

_PADDING, _MAX_DISTANCE = 1, 128  # not in the config
_BIAS = "model.relative_attention_bias"
_RULES = (
    rename("embeddings.word_embeddings", into="model.embed_tokens"),
    rename("embeddings.position_embeddings", into="model.embed_positions"),
    rename("embeddings.LayerNorm", into="model.embed_norm"),
    rename("encoder.layer", into="model.layers"),
    rename("encoder.relative_attention_bias", into=_BIAS),
    merge("attention.attn.q attention.attn.k attention.attn.v", into="self_attn.qkv_proj"),
    rename("attention.attn.o", into="self_attn.o_proj"),
    rename("attention.LayerNorm", into="attention_norm"),
    rename("intermediate.dense", into="mlp.up_proj"),
    rename("output.dense", into="mlp.down_proj"),
    rename("output.LayerNorm", into="output_norm"),
)


def mpnet(config: HfConfig, architecture: str, kind: Kind) -> DecoderSpec:
    norm = LayerNorm(config.number("layer_norm_eps", 1e-12))
    bias = RelativeBias(config.count("relative_attention_num_buckets", 32), _MAX_DISTANCE, _BIAS)
    spec = encoder(
        config, architecture, post_norm_layers(config, norm, bias), "mpnet", _RULES, embedding_norm=norm,
        positions=LearnedPositions(config.count("max_position_embeddings", 512), _PADDING + 1),
    )  # fmt: skip
    return with_head(spec, config, kind, dense(config, "classifier.dense", "tanh"), "classifier.out_proj")


ARCHITECTURES = architectures("MPNet", mpnet)
