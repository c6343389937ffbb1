"""MPT: ALiBi instead of positions, layer norms without bias, and linear layers without bias.

transformers supports only a few of MPT's config options and always uses ALiBi. Configs with other options are rejected."""

from __future__ import annotations

from runtime.models.read.alibi import geometric
from runtime.models.read.hf_config import HfConfig, decoder, heads, num_layers
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.layer import Layer
from runtime.models.spec.mlp import Activation, PlainMLP
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import LayerNorm
from runtime.weights.rules import rename

_RULES = (
    rename("transformer.blocks", into="model.layers"),
    rename("transformer.wte", into="model.embed_tokens"),
    rename("transformer.norm_f", into="model.norm"),
    rename("attn.Wqkv", into="self_attn.qkv_proj"),
    rename("attn.out_proj", into="self_attn.o_proj"),
    rename("ffn.up_proj", into="mlp.up_proj"),
    rename("ffn.down_proj", into="mlp.down_proj"),
)


def mpt(config: HfConfig) -> DecoderSpec:
    options = config.section("attn_config")
    _refuse_other_kinds(config, options)
    hidden_size = config.count("d_model", 2048)
    config = config.with_defaults(
        vocab_size=50368,
        hidden_size=hidden_size,
        num_attention_heads=config.count("n_heads", 16),
        num_hidden_layers=config.count("n_layers", 24),
        max_position_embeddings=config.count("max_seq_len", 2048),
    )
    num_heads, _, head_size = heads(config)
    attention = Attention(
        num_heads, num_heads, head_size, None, score_scale=options.number_or_none("softmax_scale"),
        clip=options.number_or_none("clip_qkv"), alibi=_slopes(num_heads),
    )  # fmt: skip
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5), bias=False)
    layer = Layer(attention, PlainMLP(4 * hidden_size, False, Activation.GELU), norm, before=("norm_1", "norm_2"))
    return decoder(config, "MptForCausalLM", [layer] * num_layers(config), norm, tied=True, rules=_RULES)


def _slopes(num_heads: int) -> tuple[float, ...]:
    """Return the ALiBi slopes. If `num_heads` is not a power of two, take the slopes of the next power of two: first every other
    slope from the second on, then the rest."""
    whole = 1 << (num_heads - 1).bit_length()
    found = geometric(whole, 8)
    return found if whole == num_heads else (*found[1::2], *found[::2])[:num_heads]


def _refuse_other_kinds(config: HfConfig, options: HfConfig) -> None:
    expected = {
        "alibi": True,
        "qk_ln": False,
        "prefix_lm": False,
        "alibi_bias_max": 8,
        "attn_type": "multihead_attention",
    }
    found = [(f"attn_config.{key}", options.get(key), value) for key, value in expected.items()]
    found += [(key, config.get(key), value) for key, value in {"no_bias": True, "expansion_ratio": 4}.items()]
    for key, value, usual in found:
        if value is not None and value != usual:
            raise UnsupportedModel(f"config: {key} {value!r} is not supported, only {usual!r}")
    if config.get("logit_scale") is not None:
        raise UnsupportedModel(f"config: logit_scale {config.get('logit_scale')!r} is not supported")


ARCHITECTURES = {"MptForCausalLM": mpt}
