"""NomicBERT (Nussbaum et al. 2024): BERT with a rotary embedding instead of learned positions, a gated MLP, and few biases."""

from __future__ import annotations

from runtime.models.read.encoder import Kind, architectures, dense, encoder, with_head
from runtime.models.read.hf_config import HfConfig, activation, heads, num_layers, rope
from runtime.models.spec.attention import Attention, Mask
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import PostNormLayer
from runtime.models.spec.mlp import GatedMLP
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import merge, rename

_ENDS = (
    rename("embeddings.word_embeddings", into="model.embed_tokens"),
    rename("embeddings.token_type_embeddings", into="model.embed_token_types"),
    rename("pooler", into="model.pooler"),
)
_RULES = (
    *_ENDS,
    rename("embeddings.LayerNorm", into="model.embed_norm"),
    rename("layers", into="model.layers"),
    merge("q_proj k_proj v_proj", into="qkv_proj"),
    merge("gate_proj up_proj", into="gate_up_proj"),
)
# Names in the authors' own code.
_FIRST_RULES = (
    *_ENDS,
    rename("emb_ln", into="model.embed_norm"),
    rename("encoder.layers", into="model.layers"),
    rename("attn.Wqkv", into="self_attn.qkv_proj"),
    rename("attn.out_proj", into="self_attn.o_proj"),
    merge("mlp.fc12 mlp.fc11", into="mlp.gate_up_proj"),
    rename("mlp.fc2", into="mlp.down_proj"),
    rename("norm1", into="post_attention_layernorm"),
    rename("norm2", into="post_mlp_layernorm"),
)


def nomic_bert(config: HfConfig, architecture: str, kind: Kind) -> DecoderSpec:
    config = config.with_defaults(
        hidden_size=config.count("n_embd", 768),
        intermediate_size=config.count("n_inner", 3072),
        num_attention_heads=config.count("n_head", 12),
        num_hidden_layers=config.count("n_layer", 12),
        max_position_embeddings=config.count("n_positions", 2048),
        rope_theta=config.number("rotary_emb_base", 1000.0),
        layer_norm_eps=config.number("layer_norm_epsilon", 1e-12),
    )
    num_heads, num_kv_heads, head_size = heads(config)
    norm = LayerNorm(config.number("layer_norm_eps"))
    attention = Attention(num_heads, num_kv_heads, head_size, rope(config, head_size), mask=Mask.FULL)
    mlp = GatedMLP(config.count("intermediate_size"), False, activation(config))
    layer = PostNormLayer(attention, mlp, norm, ("post_attention_layernorm", "post_mlp_layernorm"))
    spec = encoder(
        config, architecture, [layer] * num_layers(config), "nomic_bert", _RULES, embedding_norm=norm,
        num_token_types=config.count("type_vocab_size", 2), more_rules=(_FIRST_RULES,),
    )  # fmt: skip
    return with_head(spec, config, kind, dense(config, "model.pooler.dense", "tanh"))


ARCHITECTURES = architectures("NomicBert", nomic_bert)
