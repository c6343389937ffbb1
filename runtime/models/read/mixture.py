"""Mixtures of experts: config fields that several families share, and names of expert weights in checkpoints.

transformers 4 stores each matrix of each expert separately; transformers 5 may store all experts of a layer as one tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import LLAMA_RULES, DecoderSpec
from runtime.models.spec.layer import MLP
from runtime.models.spec.mlp import MoE, Router
from runtime.models.spec.model import UnsupportedModel
from runtime.weights.rules import Rule, merge, rename, stack

MAX_EXPERTS = 4096

STACKED: tuple[Rule, ...] = (
    *LLAMA_RULES,
    stack("experts"),
    rename("gate_up_proj", into="gate_up.weight"),
    rename("down_proj", into="down.weight"),
)
STACKED_BY_KIND: tuple[Rule, ...] = (  # names in GGUF files
    *LLAMA_RULES,
    stack("experts"),
    merge("gate_proj up_proj", into="gate_up"),
    rename("down_proj", into="down"),
)
SEPARATE: tuple[Rule, ...] = (
    *LLAMA_RULES,
    merge("gate_proj up_proj", into="gate_up"),
    rename("down_proj", into="down"),
)
MIXTRAL: tuple[Rule, ...] = (
    *LLAMA_RULES,
    merge("w1 w3", into="gate_up"),
    rename("w2", into="down"),
    rename("block_sparse_moe", into="mlp"),
)


SHARED_EXPERTS = rename("shared_experts", into="shared_expert")


def num_experts(config: HfConfig, default: int) -> int:
    """Return the number of experts, which has different config keys in different families."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    key = next((key for key in keys if key in config), keys[0])
    return config.count(key, default, max_value=MAX_EXPERTS)


def sigmoid_router(config: HfConfig) -> Router:
    """Return the router of DeepSeek-V3 and later families: sigmoid scores, and selection by groups of experts with a score bias."""
    return Router(
        config.count("num_experts_per_tok"),
        "sigmoid",
        renormalize=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=config.count("n_group", 1),
        top_groups=config.count("topk_group", 1),
        group_score="top-2 sum",
        e_score_correction_bias=True,
        float32=True,
    )


def checked_moe(moe: MoE) -> MoE:
    """Return `moe` unchanged. Raises UnsupportedModel if its numbers of experts and groups are inconsistent."""
    router, experts = moe.router, moe.num_experts
    if router.top_k > experts:
        raise UnsupportedModel(f"config: {router.top_k} experts per token of {experts}")
    if experts % router.num_groups or router.top_groups > router.num_groups:
        raise UnsupportedModel(
            f"config: {router.top_groups} of {router.num_groups} groups of {experts} experts are invalid"
        )
    if router.top_k > experts // router.num_groups * router.top_groups:
        raise UnsupportedModel(f"config: {router.top_groups} groups have fewer than {router.top_k} experts")
    if router.group_score == "top-2 sum" and experts // router.num_groups < 2:
        raise UnsupportedModel(f"config: {router.num_groups} groups of {experts} experts have no two experts each")
    return moe


def with_mlps(spec: DecoderSpec, moe: MLP, is_sparse: Callable[[int], bool] = lambda index: True) -> DecoderSpec:
    """Return `spec` with `moe` as MLP of the layers for which `is_sparse(layer index)` is true. Other layers keep their MLP."""
    return spec.with_layers(lambda index, layer: replace(layer, mlp=moe) if is_sparse(index) else layer)


def with_expert_rules(spec: DecoderSpec, *more: Rule) -> DecoderSpec:
    """Return `spec` with checkpoint rules for separate and for stacked experts. `more`: rules added to both. GGUF's rules lack
    them."""
    return replace(spec, rules=(*SEPARATE, *more), other_rules=((*STACKED, *more), STACKED_BY_KIND))
