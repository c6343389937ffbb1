"""Granite 3 MoE: Granite with experts in every layer, and in some models an MLP beside them that every token takes."""

from __future__ import annotations

from dataclasses import replace

from runtime.models.families.granite import granite
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.mixture import checked_moe, num_experts, with_mlps
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.mlp import GatedMLP, MoE, Router
from runtime.weights.rules import rename, stack

_SHARED = (
    rename("shared_mlp.input_linear", into="shared_mlp.gate_up_proj"),
    rename("shared_mlp.output_linear", into="shared_mlp.down_proj"),
    *LLAMA_RULES,
    stack("experts"),
)
RULES = (
    *_SHARED,
    rename("block_sparse_moe.input_linear", into="mlp.experts.gate_up"),
    rename("block_sparse_moe.output_linear", into="mlp.experts.down"),
    rename("block_sparse_moe.router.layer", into="mlp.gate"),
)
STACKED = (
    *_SHARED,
    rename("block_sparse_moe.experts.gate_up_proj", into="mlp.experts.gate_up.weight"),
    rename("block_sparse_moe.experts.down_proj", into="mlp.experts.down.weight"),
    rename("block_sparse_moe.router", into="mlp.gate"),
)


def granitemoe(config: HfConfig) -> DecoderSpec:
    return _granitemoe(config, None, "GraniteMoeForCausalLM")


def granitemoeshared(config: HfConfig) -> DecoderSpec:
    size = config.count_or_zero("shared_intermediate_size", 0)
    shared = GatedMLP(size, name="shared_mlp") if size else None
    return _granitemoe(config, shared, "GraniteMoeSharedForCausalLM")


def _granitemoe(config: HfConfig, shared: GatedMLP | None, architecture: str) -> DecoderSpec:
    router = Router(config.count("num_experts_per_tok", 2), renormalize=True)
    moe = checked_moe(MoE(num_experts(config, 8), config.count("intermediate_size"), router, shared))
    return replace(with_mlps(granite(config), moe), architecture=architecture, rules=RULES, other_rules=(STACKED,))


ARCHITECTURES = {
    "GraniteMoeForCausalLM": granitemoe,
    "GraniteMoeSharedForCausalLM": granitemoeshared,
}
