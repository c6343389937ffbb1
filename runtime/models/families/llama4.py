"""Llama 4: routed experts with a shared expert in every layer or every other layer. Some layers have no rotary embedding.

Layers with a rotary embedding attend within chunks of 8,192 tokens."""

from __future__ import annotations

from dataclasses import replace

from runtime.kv.layout import BLOCK_SIZE
from runtime.models.families.llama import llama
from runtime.models.read.hf_config import CHUNKED, FULL, HfConfig, layer_types, num_layers
from runtime.models.read.mixture import checked_moe, num_experts
from runtime.models.read.text_part import seeing, text_part
from runtime.models.spec.attention import Attention, AttentionTemperature, QKNorm
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.layer import AnyLayer, Layer
from runtime.models.spec.mlp import GatedMLP, MoE, Router
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import RMSNorm
from runtime.weights.rules import InterleavedRope, Rule, Transposed, rename, stack, transform

_UNSAID = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 500000.0,
}  # fmt: skip


def llama4_text(config: HfConfig) -> DecoderSpec:
    config = config.with_unsaid(attention_chunk_size=8192).with_defaults(**_UNSAID)
    spec = llama(config, "Llama4ForCausalLM")
    if (top_k := config.count("num_experts_per_tok", 1)) != 1:
        raise UnsupportedModel(
            f"config: num_experts_per_tok is {top_k}; only 1 is supported, because the input of experts is scaled"
        )
    heads, temperature = spec.attention, None
    if config.flag("attn_temperature_tuning", True):
        temperature = AttentionTemperature(
            config.number("attn_scale", 0.1), config.count("floor_scale", 8192), offset=1
        )
    norm = QKNorm(RMSNorm(config.number("rms_norm_eps"), weight=False)) if config.flag("use_qk_norm", True) else None
    rotated, plain = replace(heads, qk_norm=norm), replace(heads, rope=None, growth=temperature)
    chunk = _chunk(config, spec.max_model_len)
    size = config.count("intermediate_size")
    router = Router(1, renormalize=True)  # with one expert, its weight is 1
    shared = GatedMLP(size, name="mlp.shared_expert")
    moe = checked_moe(MoE(num_experts(config, 16), size, router, shared, weighs_input=True))
    dense = GatedMLP(config.count("intermediate_size_mlp"))
    has_rope, is_sparse = _rotated(config), _sparse(config)
    types = layer_types(config, lambda index: CHUNKED if has_rope[index] else FULL, CHUNKED)

    def change(index: int, layer: Layer) -> AnyLayer:
        mixer = rotated if has_rope[index] else plain
        mixer = replace(mixer, chunk=chunk if types[index] == CHUNKED else None)
        return replace(layer, mixer=mixer, mlp=moe if index in is_sparse else dense)

    return replace(spec.with_layers(change), rules=(*LLAMA_RULES, *_rules(heads)))


def _chunk(config: HfConfig, max_model_len: int) -> int | None:
    """Return the size of an attention chunk in tokens; None if the longest context fits in one chunk."""
    if config.get("attention_chunk_size") is None or (size := config.count("attention_chunk_size")) >= max_model_len:
        return None
    if size % BLOCK_SIZE:
        raise UnsupportedModel(f"config: attention_chunk_size is {size}, not whole blocks of {BLOCK_SIZE} tokens")
    return size


def _rules(heads: Attention) -> tuple[Rule, ...]:
    pairs = InterleavedRope(heads.num_heads + heads.num_kv_heads, heads.head_size, heads.head_size)
    return (
        transform("qkv_proj", pairs),  # without rotation the order of dims does not matter
        stack("experts"),
        rename("gate_up_proj", into="gate_up.weight"),
        rename("down_proj", into="down.weight"),
        transform("gate_up.weight", Transposed()),
        transform("down.weight", Transposed()),
        rename("mlp.router", into="mlp.gate"),
        rename("feed_forward", into="mlp"),
    )


def _rotated(config: HfConfig) -> list[bool]:
    count, listed = (
        num_layers(config),
        config.get("no_rope_layers"),
    )  # despite its name, it lists layers that rotate
    if not listed:
        interval = config.count("no_rope_layer_interval", 4)
        return [bool((index + 1) % interval) for index in range(count)]
    if not isinstance(listed, list) or len(listed) < count or not set(listed) <= {0, 1}:
        raise UnsupportedModel(f"config: no_rope_layers is {listed!r}, not 0 or 1 for each of {count} layers")
    return [bool(each) for each in listed]


def _sparse(config: HfConfig) -> frozenset[int]:
    listed, step = config.get("moe_layers"), config.count("interleave_moe_layer_step", 1)
    if listed is None:
        return frozenset(range(step - 1, num_layers(config), step))
    if not isinstance(listed, list) or not all(type(index) is int for index in listed):
        raise UnsupportedModel(f"config: moe_layers is {listed!r}, not a list of layers")
    return frozenset(listed)


def llama4(config: HfConfig) -> DecoderSpec:
    return seeing(text_part(config, llama4_text, "Llama4ForConditionalGeneration"), config)


ARCHITECTURES = {"Llama4ForCausalLM": llama4_text, "Llama4ForConditionalGeneration": llama4}
