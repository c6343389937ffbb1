"""Whisper (Radford et al. 2022): an encoder of 30 s of audio, and a decoder with cross-attention to the encoder's outputs. It
has learned positions, layer norms, and keys without bias. Distil-Whisper and turbo have fewer decoder layers. Like transformers,
this implementation ignores the config option `scale_embedding`."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.api import SpeechInfo
from runtime.models.read.hf_config import HfConfig, activation
from runtime.models.spec.attention import Attention, CrossAttention, Mask
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec, LearnedPositions
from runtime.models.spec.layer import Layer, OnlyBlock, SingleLayer
from runtime.models.spec.mlp import PlainMLP
from runtime.models.spec.model import EncoderSpec, UnsupportedModel
from runtime.models.spec.norm import LayerNorm
from runtime.models.spec.sound import CONVOLUTIONS, KERNEL, SoundEncoderSpec
from runtime.weights.rules import ConvolutionKernel, Rule, merge, rename, transform, zeros

_MAX_LAYERS = 4096
_NORM = LayerNorm(1e-5)
_IN_LAYERS = (
    rename("fc1", into="mlp.up_proj"),
    rename("fc2", into="mlp.down_proj"),
    LLAMA_RULES[0],
    rename("self_attn.out_proj", into="self_attn.o_proj"),
    zeros("k_proj.bias"),
)
_DECODER_RULES = (
    rename("model.decoder.layer_norm", into="model.norm"),
    rename("model.decoder.embed_tokens", into="model.embed_tokens"),
    rename("model.decoder.embed_positions", into="model.embed_positions"),
    rename("proj_out", into="lm_head"),
    rename("encoder_attn.out_proj", into="cross_attn.o_proj"),
    merge("encoder_attn.k_proj encoder_attn.v_proj", into="cross_attn.kv_proj"),
    rename("encoder_attn", into="cross_attn"),
    *_IN_LAYERS,
)
_ENCODER_RULES = (
    rename("model.encoder.layer_norm", into="model.norm"),
    rename("model.encoder.layers", into="model.layers"),
    rename("model.encoder.embed_positions", into="model.embed_positions"),
    *(rename(name.replace("model", "model.encoder"), into=name) for name in CONVOLUTIONS),
    *(transform(f"{name}.weight", ConvolutionKernel(KERNEL)) for name in CONVOLUTIONS),
    *_IN_LAYERS,
)
_DECODER_NORMS = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
_ENCODER_NORMS = ("self_attn_layer_norm", "final_layer_norm")


def whisper(config: HfConfig) -> DecoderSpec:
    hidden_size = config.count("d_model")
    positions = config.count("max_source_positions", 1500)
    mlp = PlainMLP(config.count("decoder_ffn_dim"), True, activation(config, "activation_function", "gelu"))
    attention = _attention(config, "decoder")
    cross = CrossAttention(attention.num_heads, attention.head_size, positions, hidden_size)
    blocks: tuple[OnlyBlock, ...] = (attention, cross, mlp)
    layers = [SingleLayer(block, _NORM, before) for block, before in zip(blocks, _DECODER_NORMS, strict=True)]
    num_layers = config.count("decoder_layers", max_value=_MAX_LAYERS)
    return DecoderSpec(
        architecture="WhisperForConditionalGeneration",
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(layers) * num_layers,
        norm=_NORM,
        tied_embedding=config.flag("tie_word_embeddings", True),
        max_model_len=config.count("max_target_positions", 448),
        positions=LearnedPositions(config.count("max_target_positions", 448)),
        rules=(*_numbered(num_layers, len(layers)), *_DECODER_RULES),
        ignored=("proj_out.weight",),
        ignored_below=("model.encoder.", "encoder."),
        encoder=EncoderSpec(
            "WhisperForConditionalGeneration",
            frozenset({"audio"}),
            (),
            {},
            num_outputs=positions,
            own=_encoder(config, positions),
            speech=SpeechInfo(config.count("num_mel_bins", 80), 2 * positions),
        ),
    )


def _numbered(num_layers: int, num_blocks: int) -> Iterator[Rule]:
    for index in range(num_layers):
        for block in range(num_blocks):
            yield rename(f"model.decoder.layers.{index}", into=f"model.layers.{num_blocks * index + block}")


def _encoder(config: HfConfig, positions: int) -> SoundEncoderSpec:
    kind = activation(config, "activation_function", "gelu")
    mlp = PlainMLP(config.count("encoder_ffn_dim"), True, kind)
    layer = Layer(_attention(config, "encoder", Mask.FULL), mlp, _NORM, before=_ENCODER_NORMS)
    return SoundEncoderSpec(
        architecture="WhisperEncoder",
        vocab_size=1,
        hidden_size=config.count("d_model"),
        layers=(layer,) * config.count("encoder_layers", max_value=_MAX_LAYERS),
        norm=_NORM,
        tied_embedding=False,
        max_model_len=positions,
        positions=LearnedPositions(positions),
        rules=_ENCODER_RULES,
        ignored=("proj_out.weight",),
        ignored_below=("model.decoder.", "decoder."),
        generates=False,
        num_mel_bins=config.count("num_mel_bins", 80),
        activation=kind,
    )


def _attention(config: HfConfig, part: str, mask: Mask = Mask.CAUSAL) -> Attention:
    hidden_size, num_heads = config.count("d_model"), config.count(f"{part}_attention_heads")
    if hidden_size % num_heads:
        raise UnsupportedModel(f"config: d_model {hidden_size} is not a multiple of {num_heads} {part}_attention_heads")
    return Attention(num_heads, num_heads, hidden_size // num_heads, None, qkv_bias=True, output_bias=True, mask=mask)


ARCHITECTURES = {"WhisperForConditionalGeneration": whisper}
