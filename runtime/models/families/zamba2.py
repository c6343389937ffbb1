"""Zamba 2: Mamba-2 layers. Before some of them, a shared transformer reads the residual stream and the embedding. A model has few
shared transformers.

As in `nemotron_h`, dt of the Mamba layers is not clamped; transformers clamps it in prompts only."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.models.read.hf_config import HfConfig, activation, decoder, rope
from runtime.models.read.hybrid import RECURRENT, block_types, checked_mamba2, conv_kernel
from runtime.models.spec.attention import Attention
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec, layer_name
from runtime.models.spec.layer import AnyLayer, HybridLayer, SharedTransformer, SingleLayer
from runtime.models.spec.mlp import GatedMLP
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import RMSNorm
from runtime.models.spec.recurrent import Mamba2
from runtime.weights.rules import Rule, rename

_HYBRID = "hybrid"
_NORM = "input_layernorm"


def zamba2(config: HfConfig) -> DecoderSpec:
    longest = 16384 if config.flag("use_long_context", False) else 4096
    config = config.with_defaults(max_position_embeddings=longest, num_attention_heads=32)
    norm, mixer, types = RMSNorm(config.number("rms_norm_eps", 1e-5)), _mixer(config), _types(config)
    attention, num_shared = _attention(config), config.count("num_mem_blocks", 1)
    mlp = GatedMLP(
        config.count("intermediate_size", 4 * config.count("hidden_size")), config.flag("add_bias_linear", False),
        activation(config, default="gelu"), name="feed_forward",
    )  # fmt: skip
    hybrids = [index for index, kind in enumerate(types) if kind == _HYBRID]

    def layer(index: int) -> AnyLayer:
        if index not in hybrids:
            return SingleLayer(mixer, norm, _NORM)
        user = hybrids.index(index)
        shared = SharedTransformer(
            f"{layer_name(hybrids[user % num_shared])}.shared_transformer", attention, mlp, norm,
            config.count("adapter_rank", 128), user, config.flag("use_shared_attention_adapter", False),
        )  # fmt: skip
        return HybridLayer(shared, mixer, norm, _NORM)

    return decoder(
        config, "Zamba2ForCausalLM", map(layer, range(len(types))), norm, tied=True, rules=tuple(_rules(hybrids)),
        ignored_below=tuple(f"{layer_name(index)}.shared_transformer." for index in hybrids[num_shared:]),
    )  # fmt: skip


def _types(config: HfConfig) -> list[str]:
    types = block_types(config, "layers_block_type", (), frozenset({RECURRENT, _HYBRID}))
    if not types:
        raise UnsupportedModel("config: layers_block_type is missing")
    return types


def _attention(config: HfConfig) -> Attention:
    num_heads, width = config.count("num_attention_heads"), 2 * config.count("hidden_size")
    if width % num_heads:
        raise UnsupportedModel(
            f"config: twice the hidden_size, {width}, is not a multiple of {num_heads} attention heads"
        )
    if config.count("num_key_value_heads", num_heads) != num_heads:
        raise UnsupportedModel("config: num_key_value_heads other than num_attention_heads is not supported")
    size = width // num_heads
    rotary = rope(config, size) if config.flag("use_mem_rope", False) else None
    return Attention(num_heads, num_heads, size, rotary, score_scale=(size / 2) ** -0.5)


def _mixer(config: HfConfig) -> Mamba2:
    inner, num_heads = config.count("mamba_expand", 2) * config.count("hidden_size"), config.count("n_mamba_heads", 8)
    if inner % num_heads:
        raise UnsupportedModel(f"config: mamba_expand times hidden_size, {inner}, is no multiple of {num_heads} heads")
    bias = config.flag("add_bias_linear", False)
    mixer = Mamba2(
        num_heads,
        inner // num_heads,
        config.count("mamba_ngroups", 1),
        config.count("mamba_d_state", 64),
        conv_kernel(config, "mamba_d_conv"),
        RMSNorm(1e-5),
        bias=bias,
        output_bias=bias,
    )
    return checked_mamba2(config.changed(hidden_act="silu"), mixer)  # hidden_act is the shared MLP's


def _rules(hybrids: list[int]) -> Iterator[Rule]:
    yield LLAMA_RULES[0]
    yield rename("model.final_layernorm", into="model.norm")
    for index in hybrids:
        for part in ("mamba", _NORM):
            yield rename(f"layers.{index}.mamba_decoder.{part}", into=f"layers.{index}.{part}")


ARCHITECTURES = {"Zamba2ForCausalLM": zamba2}
