"""DistilBERT (Sanh et al. 2019): BERT with half the layers, without token types."""

from __future__ import annotations

from runtime.models.read.encoder import Kind, architectures, dense, encoder, post_norm_layers, with_head
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import DecoderSpec, LearnedPositions
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import merge, rename

_RULES = (
    rename("embeddings.word_embeddings", into="model.embed_tokens"),
    rename("embeddings.position_embeddings", into="model.embed_positions"),
    rename("embeddings.LayerNorm", into="model.embed_norm"),
    rename("transformer.layer", into="model.layers"),
    merge("attention.q_lin attention.k_lin attention.v_lin", into="self_attn.qkv_proj"),
    rename("attention.out_lin", into="self_attn.o_proj"),
    rename("sa_layer_norm", into="attention_norm"),
    rename("ffn.lin1", into="mlp.up_proj"),
    rename("ffn.lin2", into="mlp.down_proj"),
    rename("output_layer_norm", into="output_norm"),
)


def distilbert(config: HfConfig, architecture: str, kind: Kind) -> DecoderSpec:
    config = config.with_defaults(
        vocab_size=30522,
        hidden_size=config.count("dim", 768),
        intermediate_size=config.count("hidden_dim", 3072),
        num_attention_heads=config.count("n_heads", 12),
        num_hidden_layers=config.count("n_layers", 6),
        hidden_act=config.get("activation") or "gelu",
    )
    norm = LayerNorm(1e-12)  # not in the config
    spec = encoder(
        config, architecture, post_norm_layers(config, norm), "distilbert", _RULES, embedding_norm=norm,
        positions=LearnedPositions(config.count("max_position_embeddings", 512)),
    )  # fmt: skip
    return with_head(spec, config, kind, dense(config, "pre_classifier", "relu"))


ARCHITECTURES = architectures("DistilBert", distilbert)
