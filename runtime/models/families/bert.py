"""BERT (Devlin et al. 2018), RoBERTa (Liu et al. 2019) and similar models: norms after each block, learned positions, token
types. RoBERTa's first position is the one after the padding position."""

from __future__ import annotations

from functools import partial

from runtime.models.read.encoder import Kind, architectures, dense, encoder, post_norm_layers, with_head
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import DecoderSpec, LearnedPositions
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import merge, rename

_RULES = (
    rename("embeddings.word_embeddings", into="model.embed_tokens"),
    rename("embeddings.position_embeddings", into="model.embed_positions"),
    rename("embeddings.token_type_embeddings", into="model.embed_token_types"),
    rename("embeddings.LayerNorm", into="model.embed_norm"),
    rename("encoder.layer", into="model.layers"),
    rename("pooler", into="model.pooler"),
    merge("attention.self.query attention.self.key attention.self.value", into="self_attn.qkv_proj"),
    rename("attention.output.dense", into="self_attn.o_proj"),
    rename("attention.output.LayerNorm", into="attention_norm"),
    rename("intermediate.dense", into="mlp.up_proj"),
    rename("output.dense", into="mlp.down_proj"),
    rename("output.LayerNorm", into="output_norm"),
)


def _encoder(config: HfConfig, architecture: str, prefix: str, offset: int, max_positions: int) -> DecoderSpec:
    if config.get("position_embedding_type") not in (None, "absolute"):
        raise UnsupportedModel(
            f"config: position_embedding_type {config.get('position_embedding_type')!r} is not supported"
        )
    if config.flag("is_decoder", False):
        raise UnsupportedModel("config: is_decoder: only encoders are described")
    norm = LayerNorm(config.number("layer_norm_eps", 1e-12))
    return encoder(
        config, architecture, post_norm_layers(config, norm), prefix, _RULES, embedding_norm=norm,
        positions=LearnedPositions(config.count("max_position_embeddings", max_positions), offset),
        num_token_types=config.count("type_vocab_size", 2),
    )  # fmt: skip


def bert(config: HfConfig, architecture: str, kind: Kind) -> DecoderSpec:
    spec = _encoder(config, architecture, "bert", 0, 512)
    return with_head(spec, config, kind, dense(config, "model.pooler.dense", "tanh"))


def roberta(config: HfConfig, architecture: str, kind: Kind) -> DecoderSpec:
    spec = _encoder(config, architecture, "roberta", config.count_or_zero("pad_token_id", 1) + 1, 514)
    return with_head(spec, config, kind, dense(config, "classifier.dense", "tanh"), "classifier.out_proj")


ARCHITECTURES = (
    architectures("Bert", bert)
    | {"BertForPreTraining": partial(bert, architecture="BertForPreTraining", kind="model")}
    | architectures("Roberta", roberta)
    | architectures("XLMRoberta", roberta)
    | architectures("Camembert", roberta)
)
