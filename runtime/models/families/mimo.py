"""MiMo (Xiaomi, 2025): Qwen2 with an MTP layer."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.qwen import qwen2
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.mtp import mtp
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.draft_head import DraftHeadSpec, JoinedEntry
from runtime.weights.rules import rename

_BELOW = "model.mtp_layers."


def mimo(config: HfConfig) -> DecoderSpec:
    return replace(qwen2(config), architecture="MiMoForCausalLM", ignored_below=(_BELOW,))


def mimo_mtp(config: HfConfig, spec: DecoderSpec) -> DraftHeadSpec:
    layer = f"{_BELOW}0"
    rules = (
        rename(f"{layer}.token_layernorm", into="model.entry.embedding_norm"),
        rename(f"{layer}.hidden_layernorm", into="model.entry.hidden_norm"),
        rename(f"{layer}.input_proj", into="model.entry.projection"),
        rename(f"{layer}.final_layernorm", into="model.norm"),
        rename(layer, into="model.layers.0"),
    )
    entry = JoinedEntry(spec.norm, hidden_first=True)
    return mtp(config, spec, "num_nextn_predict_layers", entry, rules, (f"{layer}.",), hands_on_normed=True)


MTP = {"MiMoForCausalLM": mimo_mtp}
ARCHITECTURES = {"MiMoForCausalLM": mimo}
