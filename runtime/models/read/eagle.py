"""Reader of EAGLE draft heads.

EAGLE (Li et al. 2024) has one Llama layer without a norm before its attention. EAGLE-3 (2025) has a layer that reads the
embedding and the hidden states of three layers of the model. Two layouts of checkpoints are supported: that of the authors, and
that of vLLM's speculators, whose config has the layer's options in a section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from runtime.models.families.llama import llama
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.draft_head import DraftHeadSpec, FusedEntry, JoinedEntry
from runtime.models.spec.layer import FusedLayer, Layer
from runtime.models.spec.model import UnsupportedModel
from runtime.models.spec.norm import NoNorm
from runtime.weights.rules import Rule, rename

_NAMES = {
    "eagle": ("LlamaForCausalLM", "EagleLlamaForCausalLM", "EAGLEModel"),
    "eagle3": ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
}  # fmt: skip
_COPIES = (".rotary_emb.inv_freq", "embed_tokens.weight")  # copies of the model's tensors, which are not trained


def head_from_config(method: str, config: Mapping[str, Any], model: DecoderSpec) -> DraftHeadSpec:
    """Return the spec of the draft head for `model` that `config` describes. `method`: "eagle" or "eagle3". Raises UnsupportedModel
    if the head does not fit the model or the method."""
    names = config.get("architectures") or [None]
    if names[0] not in _NAMES[method]:
        raise UnsupportedModel(
            f"the draft's architecture {names[0]} is not supported by method {method}; supported: {', '.join(_NAMES[method])}"
        )
    return _READERS[method](HfConfig(config), model)


def _eagle(config: HfConfig, model: DecoderSpec) -> DraftHeadSpec:
    if config.get("draft_vocab_size") is not None:
        raise UnsupportedModel("the draft is an EAGLE-3 head (draft_vocab_size): use method eagle3")
    spec = _checked(config, model)
    if spec.hidden_size != model.hidden_size:
        raise UnsupportedModel(f"the draft's hidden_size is {spec.hidden_size} and the model's {model.hidden_size}")
    rules = (*LLAMA_RULES, rename("fc", into="model.entry.projection"))
    return DraftHeadSpec.of(
        model,
        architecture=f"the EAGLE head of {model.architecture}",
        layers=tuple(
            replace(layer, mixer_norm=None if index else NoNorm())
            for index, layer in enumerate(spec.layers)
            if isinstance(layer, Layer)
        ),
        norm=NoNorm(),
        entry=JoinedEntry(NoNorm(), bias=config.flag("bias", True)),
        embedding_multiplier=1.0,
        rules=(*rules, rename("layers", into="model.layers")),
        other_rules=((*LLAMA_RULES, rename("model.fc", into="model.entry.projection")),),
        ignored=(*_COPIES, "lm_head.weight"),
    )


def _eagle3(config: HfConfig, model: DecoderSpec) -> DraftHeadSpec:
    eagle = config.section("eagle_config")
    if not eagle.flag("use_aux_hidden_state", True):
        raise UnsupportedModel(
            "the draft does not use hidden states of inner layers (use_aux_hidden_state), which is not supported"
        )
    if config.flag("norm_before_fc", False):
        raise UnsupportedModel("the draft has norms before fc (norm_before_fc), which are not supported")
    layer_config = config.section("transformer_layer_config") if "transformer_layer_config" in config else config
    spec = _checked(layer_config, model)
    size = config.count("target_hidden_size", model.hidden_size)
    if size != model.hidden_size:
        raise UnsupportedModel(
            f"the draft is for hidden states of {size} dims, and the model's have {model.hidden_size}"
        )
    listed = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    reads = _layers_read(listed, len(model.layers))
    attention = replace(spec.attention, input_size=2 * spec.hidden_size)
    first, *rest = (layer for layer in spec.layers if isinstance(layer, Layer))
    fused = FusedLayer(attention, first.mlp, first.norm, normed_residual=config.flag("norm_before_residual", False))
    rules: tuple[Rule, ...] = LLAMA_RULES
    rules += (rename("fc", into="model.entry.projection"), rename("norm", into="model.norm"))
    own_embedding = spec.hidden_size != model.hidden_size
    if own_embedding:
        rules += (rename("embed_tokens", into="model.embed_tokens"),)
    num_ids = config.count("draft_vocab_size", model.vocab_size)
    if num_ids > model.vocab_size:
        raise UnsupportedModel(
            f"the draft guesses {num_ids} tokens (draft_vocab_size) of the model's {model.vocab_size}"
        )
    return DraftHeadSpec.of(
        model,
        architecture=f"the EAGLE-3 head of {model.architecture}",
        hidden_size=spec.hidden_size,
        layers=(fused, *rest),
        norm=spec.norm,
        entry=FusedEntry(len(reads) * model.hidden_size),
        reads_layers=reads,
        embedding_multiplier=1.0,
        logit_scale=config.number("logit_scale", 1.0),
        logit_softcap=None,
        head_bias=False,
        own_embedding=own_embedding,
        own_head=True,
        draft_vocab_size=None if num_ids == model.vocab_size else num_ids,
        rules=(*rules, rename("midlayer", into="model.layers.0"), rename("layers", into="model.layers")),
        other_rules=((*rules, rename("layers", into="model.layers")),),
        ignored=(".rotary_emb.inv_freq", "t2d", *(() if own_embedding else _COPIES[1:])),
    )


def _checked(config: HfConfig, model: DecoderSpec) -> DecoderSpec:
    kind = config.with_defaults(model_type="llama").get("model_type")
    if kind != "llama":
        raise UnsupportedModel(f"the draft's layers are of model_type {kind!r}; supported: llama")
    bias = config.flag("attention_bias", False)
    spec = llama(config)
    spec = spec.with_mixers(lambda _, attention: replace(attention, qkv_bias=config.flag("qkv_bias", bias)))
    if spec.vocab_size != model.vocab_size:
        raise UnsupportedModel(
            f"the draft's vocabulary has {spec.vocab_size} tokens and the model's {model.vocab_size}: they have to be the same"
        )
    return spec


def _layers_read(listed: Any, num_layers: int) -> tuple[int, ...]:
    """Return the indices of the model's layers whose inputs the head reads. `listed`: value in the config; by default an early,
    a middle and a late layer."""
    found = [2, num_layers // 2, num_layers - 3] if listed is None else listed
    if not isinstance(found, list) or not all(type(each) is int and 0 <= each <= num_layers for each in found):
        raise UnsupportedModel(
            f"the draft reads the inputs of layers {found} (eagle_aux_hidden_state_layer_ids), and the model has {num_layers}"
        )
    if not found or sorted(set(found)) != found:
        raise UnsupportedModel(f"the draft reads the inputs of layers {found}, which are not in ascending order")
    return tuple(found)


_READERS: Mapping[str, Callable[[HfConfig, DecoderSpec], DraftHeadSpec]] = {"eagle": _eagle, "eagle3": _eagle3}
