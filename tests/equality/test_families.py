"""Every family, as a tiny random model written by transformers' own config class: greedy decoding token for token equal to
transformers, and logits within 1e-4, over prompts longer than every window and chunk, however the engine cuts the work."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import EngineConfig, WeightPolicy
from runtime.models import implementation
from runtime.weights.fetch import resolve
from tests.equality.greedy import Reference, compare, references, run
from tests.equality.oracle import Oracle
from tests.runtime.models.paged import Paged
from tests.tiers import on_push

VOCAB, MAX_TOKENS, WINDOW = 128, 12, 20
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 24}
EXPERTS = GROUPED | {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
MOE_BY_OTHER_NAMES = GROUPED | {"moe_intermediate_size": 24, "moe_num_experts": 8, "moe_k": 3}
LATENT = SMALL | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24, "num_experts_per_tok": 3, "n_routed_experts": 8, "first_k_dense_replace": 1,
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "n_shared_experts": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MPT = {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "max_seq_len": 256, "bos_token_id": 1, "eos_token_id": 2}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.6],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Row:
    """A family and what of it is asked for. `lengths`: of its prompts; `max_model_len` and `model_impl`: as options. `spread`:
    of random matrices. `attention`: transformers' own, to compare with."""

    config: Callable[[], transformers.PretrainedConfig]
    lengths: tuple[int, ...] = (1, 2, 15, 17, 33, 90)
    max_model_len: int | None = None
    model_impl: str = "native"
    spread: float = 0.25
    attention: str = "eager"


def row(config_class: str, common: dict, **rest) -> Row:
    """Written when it is needed: a row does not fail with its neighbour."""
    return Row(lambda: getattr(transformers, config_class)(**common | rest))


def through_transformers(config_class: str, common: dict, **rest) -> Row:
    return replace(row(config_class, common, **rest), model_impl="transformers")


def zamba2(**rest) -> Row:
    """Its scores are over twice the hidden size: of wider weights, float32 itself makes errors of 1e-4."""
    layers = rest["layers_block_type"]
    return replace(row("Zamba2Config", ZAMBA2, num_hidden_layers=len(layers), **rest), spread=0.15)


FULL, SLIDING = "full_attention", "sliding_attention"
BY_TYPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 5000.0},
    FULL: {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0},
}
LINEAR = "linear_attention"
LINEAR_AND_FULL = [LINEAR, FULL, LINEAR]
JAMBA = GROUPED | {
    "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "mamba_d_state": 6, "mamba_dt_rank": 5,
}  # fmt: skip
BAMBA = GROUPED | {
    "num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24,
    "mamba_chunk_size": 16,
}  # fmt: skip
NEMOTRON_H = HEADS | {
    "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, "chunk_size": 16,
    "time_step_min": 1e-30,  # a bound that transformers holds in prompts alone
}  # fmt: skip
ZAMBA2 = SMALL | {
    "hidden_size": 32, "mamba_d_state": 24, "n_mamba_heads": 4, "chunk_size": 16, "adapter_rank": 6, "time_step_min": 1e-30,
}  # fmt: skip
QWEN3_NEXT = HEADS | {
    "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 36,
    "linear_key_head_dim": 32, "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
FAMILIES = {
    "llama": row("LlamaConfig", GROUPED),
    "llama, biases, tied": row(
        "LlamaConfig", SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu"
    ),
    "mistral": row("MistralConfig", GROUPED, sliding_window=WINDOW),
    "ministral": row("MinistralConfig", HEADS, sliding_window=WINDOW, layer_types=[SLIDING, FULL]),
    "ministral 3": row(
        "Ministral3Config",
        HEADS,
        rope_parameters=YARN | {"llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "qwen2": row("Qwen2Config", GROUPED),
    "qwen2, windows above": row(
        "Qwen2Config",
        GROUPED,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
        tie_word_embeddings=True,
    ),
    "qwen3": row("Qwen3Config", HEADS),
    "qwen3, windows": row(
        "Qwen3Config", HEADS, use_sliding_window=True, sliding_window=WINDOW, layer_types=[SLIDING, FULL]
    ),
    "gemma": row("GemmaConfig", HEADS),
    "gemma 2": row(
        "Gemma2Config",
        HEADS,
        sliding_window=WINDOW,
        query_pre_attn_scalar=40,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
    ),
    "gemma 2, no caps": row(
        "Gemma2Config", HEADS, sliding_window=WINDOW, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma 3": row(
        "Gemma3TextConfig", HEADS, sliding_window=WINDOW, layer_types=[SLIDING, FULL], rope_parameters=BY_TYPE
    ),
    "phi-3": row("Phi3Config", GROUPED, sliding_window=WINDOW),
    "phi-4 mini": row(
        "Phi3Config",
        GROUPED,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.75},
        tie_word_embeddings=True,
    ),
    "phi-3, longrope in short contexts": Row(
        lambda: transformers.Phi3Config(
            **GROUPED | {"original_max_position_embeddings": 64}, rope_parameters=LONG | {"partial_rotary_factor": 0.75}
        ),
        (1, 14, 15, 16, 33, 45),
        64,
    ),
    "phi-3, longrope in long contexts": Row(
        lambda: transformers.Phi3Config(
            **GROUPED | {"original_max_position_embeddings": 16}, rope_parameters=LONG | {"partial_rotary_factor": 0.75}
        ),
        (17, 30, 31, 30, 49, 90),
    ),
    "phi": row("PhiConfig", SMALL),
    "phi, tied": row("PhiConfig", SMALL, tie_word_embeddings=True),
    "phi, norms of q and k": row("PhiConfig", GROUPED, qk_layernorm=True),
    "granite": row(
        "GraniteConfig",
        GROUPED,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        logits_scaling=2.0,
        attention_multiplier=0.2,
    ),
    "olmo": row("OlmoConfig", GROUPED, clip_qkv=0.8),
    "olmo 2": row("Olmo2Config", GROUPED),
    "olmo 3": row("Olmo3Config", GROUPED, sliding_window=WINDOW, layer_types=[SLIDING, FULL], rope_parameters=BY_TYPE),
    "smollm3": row("SmolLM3Config", GROUPED, no_rope_layers=[1, 0]),
    "smollm3, windows": row(
        "SmolLM3Config", GROUPED, no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=WINDOW
    ),
    "cohere": row("CohereConfig", GROUPED, logit_scale=0.3),
    "cohere, norms of q and k": row("CohereConfig", GROUPED, use_qk_norm=True, attention_bias=True),
    "cohere 2": row("Cohere2Config", GROUPED, sliding_window=WINDOW, layer_types=[SLIDING, FULL]),
    "stablelm": row("StableLmConfig", GROUPED, use_qkv_bias=True, partial_rotary_factor=0.5),
    "stablelm, parallel": row(
        "StableLmConfig", GROUPED, use_parallel_residual=True, qk_layernorm=True, partial_rotary_factor=0.5
    ),
    "starcoder2": row("Starcoder2Config", GROUPED, sliding_window=WINDOW),
    "gpt-2": row("GPT2Config", GPT2),
    "gpt-2, scaled by depth": row("GPT2Config", GPT2, scale_attn_by_inverse_layer_idx=True, n_inner=40),
    "opt": row("OPTConfig", SMALL, ffn_dim=48, word_embed_proj_dim=64),
    "opt, 350m": row("OPTConfig", SMALL, ffn_dim=48, word_embed_proj_dim=24, do_layer_norm_before=False),
    "opt, projected, an embedding and a head": row(
        "OPTConfig", SMALL, ffn_dim=48, word_embed_proj_dim=24, tie_word_embeddings=False, _remove_final_layer_norm=True
    ),
    "gpt-j": row("GPTJConfig", GPT2, rotary_dim=8, n_inner=40),
    "gpt-j, tied": row("GPTJConfig", GPT2, rotary_dim=16, tie_word_embeddings=True),
    "helium": row("HeliumConfig", GROUPED, head_dim=16, attention_bias=True, mlp_bias=True),
    "pythia": row("GPTNeoXConfig", SMALL, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}),
    "gpt-neox, one after the other": row("GPTNeoXConfig", SMALL, use_parallel_residual=False, tie_word_embeddings=True),
    "falcon, one kv head": row("FalconConfig", SMALL),
    "falcon, new": row("FalconConfig", SMALL, new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon 2": row("FalconConfig", SMALL, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon, rw": row("FalconConfig", SMALL, multi_query=False, parallel_attn=False, bias=True),
    "falcon, rw with linear biases": replace(  # eagerly, transformers adds them twice
        row("FalconConfig", SMALL, alibi=True, multi_query=False, parallel_attn=False, bias=True), attention="sdpa"
    ),
    "bloom": row("BloomConfig", SMALL, n_head=4),
    "bloom, six heads": row("BloomConfig", SMALL | {"hidden_size": 48}, n_head=6),
    "mpt": row("MptConfig", MPT, n_heads=4),
    "mpt, six heads, clipped": row(
        "MptConfig", MPT | {"d_model": 48}, n_heads=6, attn_config={"clip_qkv": 0.8, "softmax_scale": 0.2}
    ),
    "exaone 4": row("Exaone4Config", GROUPED, sliding_window=WINDOW, layer_types=[SLIDING, FULL]),
    "exaone 4, no windows": row("Exaone4Config", GROUPED, sliding_window=None, layer_types=[FULL, FULL]),
    "glm": row("GlmConfig", HEADS),
    "glm-4": row("Glm4Config", HEADS),
    "ernie 4.5": row("Ernie4_5Config", HEADS, use_bias=True),
    "seed-oss": row("SeedOssConfig", HEADS),
    "nemotron": row("NemotronConfig", HEADS),
    "mixtral": row("MixtralConfig", GROUPED, num_local_experts=5, sliding_window=WINDOW),
    "qwen 2 moe": row("Qwen2MoeConfig", EXPERTS, num_experts=9, shared_expert_intermediate_size=36),
    "qwen 2 moe, some layers dense": row(
        "Qwen2MoeConfig",
        EXPERTS,
        num_experts=9,
        shared_expert_intermediate_size=36,
        decoder_sparse_step=2,
        qkv_bias=False,
        norm_topk_prob=True,
    ),
    "qwen 2 moe, windows": row(
        "Qwen2MoeConfig", EXPERTS | {"num_hidden_layers": 4}, num_experts=9, shared_expert_intermediate_size=36,
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2,
    ),
    "qwen 2 moe, windows where they are listed": row(
        "Qwen2MoeConfig", EXPERTS, num_experts=9, shared_expert_intermediate_size=36, use_sliding_window=True,
        sliding_window=WINDOW, layer_types=[FULL, SLIDING],
    ),
    "qwen 3 moe, windows": row(
        "Qwen3MoeConfig", EXPERTS, num_experts=9, head_dim=24, use_sliding_window=True, sliding_window=WINDOW,
        max_window_layers=1,
    ),
    "qwen3, windows above": row(
        "Qwen3Config", HEADS, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen 3 moe": row("Qwen3MoeConfig", EXPERTS, num_experts=9, head_dim=24, norm_topk_prob=True),
    "olmoe": row("OlmoeConfig", EXPERTS, num_experts=8, clip_qkv=1.5),
    "phi-3.5 moe": row("PhimoeConfig", GROUPED, num_local_experts=6, attention_bias=True, lm_head_bias=True),
    "phi-3.5 moe, tied": row("PhimoeConfig", GROUPED, num_local_experts=6, lm_head_bias=True, tie_word_embeddings=True),
    "phi-3.5 moe, longrope": Row(
        lambda: transformers.PhimoeConfig(
            **GROUPED,
            num_local_experts=6,
            rope_parameters={
                "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [2.0] * 8,
                "short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 64,
            },
        ),
        (1, 14, 15, 16, 33, 45),
        64,
    ),
    "granite moe": row(
        "GraniteMoeConfig", EXPERTS, num_local_experts=6, attention_multiplier=0.2, residual_multiplier=0.6,
        embedding_multiplier=3.0, logits_scaling=2.0, tie_word_embeddings=True,
    ),
    "granite moe, shared": row(
        "GraniteMoeSharedConfig", EXPERTS, num_local_experts=6, shared_intermediate_size=28, residual_multiplier=0.6
    ),
    "gpt-oss": row("GptOssConfig", HEADS, num_local_experts=6, sliding_window=WINDOW, swiglu_limit=2.0),
    "llama 4": row(
        "Llama4TextConfig", HEADS, intermediate_size_mlp=40, num_local_experts=6, num_hidden_layers=4, floor_scale=16,
        interleave_moe_layer_step=2,
    ),
    "llama 4, chunks": row(
        "Llama4TextConfig", HEADS, intermediate_size_mlp=40, num_local_experts=4, num_hidden_layers=4, floor_scale=16,
        attention_chunk_size=32, no_rope_layers=[1, 1, 0, 1],
    ),
    "llama 4, no norms": row(
        "Llama4TextConfig", HEADS, num_local_experts=4, no_rope_layers=[0, 1], attention_bias=True, use_qk_norm=False,
        attn_temperature_tuning=False, moe_layers=[0], rope_parameters=LLAMA3,
    ),
    "deepseek v2": row("DeepseekV2Config", LATENT, topk_method="greedy", q_lora_rank=None),
    "deepseek v2, groups": row(
        "DeepseekV2Config", LATENT, topk_method="group_limited_greedy", n_group=4, topk_group=2, mlp_bias=True,
        attention_bias=True, routed_scaling_factor=3.0,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.8},
    ),
    "deepseek v3": row("DeepseekV3Config", LATENT, n_group=4, topk_group=2),
    "deepseek v3, no groups": row(
        "DeepseekV3Config", LATENT, n_group=1, topk_group=1, norm_topk_prob=False, attention_bias=True,
        q_lora_rank=None, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm-4.5": row("Glm4MoeConfig", HEADS | EXPERTS, n_routed_experts=8, use_qk_norm=True, attention_bias=True),
    "glm-4.5, groups": row("Glm4MoeConfig", EXPERTS, n_routed_experts=8, n_group=4, topk_group=2),
    "ernie 4.5 moe": row("Ernie4_5_MoeConfig", MOE_BY_OTHER_NAMES, use_bias=True),
    "ernie 4.5 moe, none shared": row("Ernie4_5_MoeConfig", MOE_BY_OTHER_NAMES, moe_num_shared_experts=0),
    "llama through transformers, tied": through_transformers("LlamaConfig", GROUPED, tie_word_embeddings=True),
    "arcee through transformers": through_transformers("ArceeConfig", GROUPED, rope_parameters=YARN),
    "apertus through transformers": through_transformers("ApertusConfig", GROUPED),
    "biogpt through transformers": through_transformers("BioGptConfig", SMALL),
    "afmoe through transformers": through_transformers(
        "AfmoeConfig", HEADS, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, num_dense_layers=1,
        sliding_window=WINDOW, layer_types=[SLIDING, FULL],
    ),
    "minicpm 3 through transformers, values narrower than keys": through_transformers(
        "MiniCPM3Config", SMALL, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=12,
        qk_rope_head_dim=8, v_head_dim=16,
    ),
    "aria text through transformers": through_transformers("AriaTextConfig", GROUPED, moe_num_experts=8, moe_topk=3),
    "mamba 2": row(
        "Mamba2Config", SMALL, num_heads=8, head_dim=16, n_groups=2, state_size=24, chunk_size=16, use_bias=True
    ),
    "mamba": row("MambaConfig", SMALL, state_size=6, time_step_rank=5, use_bias=True),
    "falcon mamba": row("FalconMambaConfig", SMALL, state_size=6, time_step_rank=5, mixer_rms_eps=0.1),
    "jamba": row("JambaConfig", JAMBA, num_experts=5, num_experts_per_tok=2),
    "jamba, dense, biases": row("JambaConfig", JAMBA, num_experts=1, mamba_proj_bias=True, mamba_conv_bias=False),
    "granite 4, dense": row(
        "GraniteMoeHybridConfig", BAMBA, layer_types=LINEAR_AND_FULL, num_local_experts=0, shared_intermediate_size=40,
        attention_multiplier=0.2, residual_multiplier=0.6, embedding_multiplier=3.0, logits_scaling=2.0,
        position_embedding_type="rope", mamba_proj_bias=True,
    ),
    "granite 4, moe": row(
        "GraniteMoeHybridConfig", BAMBA, layer_types=LINEAR_AND_FULL, num_local_experts=6, num_experts_per_tok=3,
        shared_intermediate_size=28, attention_multiplier=0.2, tie_word_embeddings=True,
    ),
    "bamba": row("BambaConfig", BAMBA, attn_layer_indices=[1]),
    "falcon-h1": row(
        "FalconH1Config", BAMBA, mamba_d_ssm=128, attention_in_multiplier=0.8, attention_out_multiplier=0.9, key_multiplier=0.7,
        ssm_in_multiplier=1.25, ssm_out_multiplier=0.6, ssm_multipliers=[0.9, 0.8, 0.7, 0.6, 0.5], mlp_multipliers=[0.8, 0.7],
        embedding_multiplier=3.0, lm_head_multiplier=0.5,
    ),
    "falcon-h1, norms, biases": row(
        "FalconH1Config", BAMBA, mamba_d_ssm=128, mamba_rms_norm=True, projectors_bias=True, mamba_proj_bias=True,
        attention_bias=True, mlp_bias=True, ssm_multipliers=[0.9, 0.8, 0.7, 0.6, 0.5], tie_word_embeddings=True,
    ),
    "nemotron-h": row("NemotronHConfig", NEMOTRON_H, layers_block_type=["mamba", "mlp", "attention", "mamba", "mlp"]),
    "nemotron-h, experts": row(
        "NemotronHConfig", NEMOTRON_H, layers_block_type=["mamba", "moe", "attention", "moe"], n_routed_experts=8,
        moe_intermediate_size=28, moe_shared_expert_intermediate_size=36, num_experts_per_tok=3, routed_scaling_factor=2.5,
        n_group=4, topk_group=2,
    ),
    "nemotron-h, experts in a narrower space": row(
        "NemotronHConfig", NEMOTRON_H, layers_block_type=["moe", "mamba", "attention"], n_routed_experts=6, moe_latent_size=40,
        moe_intermediate_size=28, moe_shared_expert_intermediate_size=36, num_experts_per_tok=2, mlp_bias=True,
    ),
    "zamba 2": zamba2(
        layers_block_type=["hybrid", "mamba", "hybrid", "hybrid"], num_mem_blocks=2, use_mem_rope=True,
        use_shared_attention_adapter=True,
    ),
    "zamba 2, one shared block, no adapters of attention": zamba2(
        layers_block_type=["mamba", "hybrid", "hybrid"], mamba_ngroups=2, add_bias_linear=True
    ),
    "qwen 3 next": row("Qwen3NextConfig", QWEN3_NEXT, layer_types=[LINEAR,FULL]),
    "qwen 3 next, some layers dense": row(
        "Qwen3NextConfig", QWEN3_NEXT, layer_types=[FULL, LINEAR], mlp_only_layers=[0],
        attention_bias=True, linear_num_key_heads=4,
    ),
    "qwen 3.5": row("Qwen3_5TextConfig", QWEN3_NEXT, layer_types=[LINEAR, FULL]),
    "qwen 3.5 moe": row("Qwen3_5MoeTextConfig", QWEN3_NEXT, layer_types=[FULL, LINEAR], tie_word_embeddings=True),
    "lfm2": row("Lfm2Config", GROUPED, layer_types=["conv", FULL, "conv"], num_hidden_layers=3, block_multiple_of=16),
    "lfm2, biases": row(
        "Lfm2Config", GROUPED, full_attn_idxs=[0], block_auto_adjust_ff_dim=False, conv_bias=True,
        tie_word_embeddings=False,
    ),
    "lfm2 moe": row(
        "Lfm2MoeConfig", EXPERTS, layer_types=["conv", FULL, "conv"], num_hidden_layers=3, num_experts=7, num_dense_layers=1,
        routed_scaling_factor=1.5,
    ),
    "lfm2 moe, no corrections": row(
        "Lfm2MoeConfig", EXPERTS, layer_types=[FULL, "conv"], num_experts=5, num_dense_layers=0, use_expert_bias=False,
        norm_topk_prob=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    folder: Path
    theirs: transformers.PreTrainedModel
    ours: object
    prompts: list[list[int]]
    family: Row

    @property
    def longest(self) -> int:
        return self.family.max_model_len or max(map(len, self.prompts)) + MAX_TOKENS

    def references(self, drafts: list[list[int]]) -> list[Reference]:
        return references(self.theirs, self.prompts, MAX_TOKENS, drafts)


def drawn(family: Row) -> transformers.PreTrainedModel:
    """A model of the family, always the same: numbers are random, but not by chance."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(
        family.config(), dtype=torch.float32, attn_implementation=family.attention
    ).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases and norms begin as zeros and ones, which hides mistakes
            torch.nn.init.normal_(parameter, float(parameter.data[0]), 0.3)
        else:
            torch.nn.init.normal_(parameter, 0.0, family.spread)
    for correction in corrections(model):
        torch.nn.init.normal_(correction, 0.0, 0.3)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp("model")
    theirs = drawn(family)
    theirs.save_pretrained(folder)
    ours = load(folder, family)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in family.lengths]
    prompts += [prompts[-1][: family.lengths[-1] // 2], prompts[-1][:-1]]  # that share a prefix
    return Case(folder, theirs, ours, prompts, family)


def corrections(model) -> list[torch.Tensor]:
    """Of routers, which transformers keeps as buffers."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith(("correction_bias", "expert_bias"))]


def load(folder, family: Row, dtype: str = "float32", load_format: str = "auto", device: str = "cpu"):
    files = resolve(str(folder), None, lambda progress: None)
    spec = implementation.describe(files.config, family.model_impl)
    return implementation.load(
        spec, files, dtype=dtype, load_format=load_format, seed=0, progress=lambda progress: None,
        max_model_len=family.max_model_len or spec.max_model_len, device=device, weights=WeightPolicy(dtype),
    )  # fmt: skip


@torch.inference_mode()
def test_logits_equal_transformers(case):
    paged = Paged(case.ours, 2, len(case.prompts[-3]))
    ids = case.prompts[-3]
    expected = case.theirs(torch.tensor([ids])).logits[0]
    whole = paged.step({0: ids})[0]
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    chunks = [paged.step({1: ids[start : start + 13]})[1] for start in range(0, len(ids), 13)]
    torch.testing.assert_close(torch.cat(chunks), expected, rtol=1e-4, atol=1e-4)
    stored = (*case.theirs.parameters(), *corrections(case.theirs))
    assert case.ours.num_parameters == sum(tensor.numel() for tensor in stored)


def test_half_precision_stays_close_and_made_up_weights_need_only_a_config(case):
    ids = case.prompts[-3]
    exact = Paged(case.ours, 1, len(ids)).step({0: ids})[0]
    half = Paged(load(case.folder, case.family, "bfloat16"), 1, len(ids)).step({0: ids})[0]
    assert half.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(half.float(), exact).mean() > 0.97
    dummy = Paged(load(case.folder, case.family, "bfloat16", "dummy"), 1, len(ids)).step({0: ids})[0]
    assert dummy.isfinite().all()


@pytest.mark.parametrize("case", on_push(FAMILIES, *[*FAMILIES][::6]), indirect=True)
def test_greedy_tokens_equal_transformers(case):
    expected: list[Reference] = []
    ways = {
        "alone, in steps that sample nothing and one that does": ({"max_num_batched_tokens": 32}, {"together": False}),
        "together": ({}, {"together": True}),
        "in chunks, twice": ({"max_num_batched_tokens": 16}, {"together": True, "rounds": 2}),
        "with preemption": ({"max_num_batched_tokens": 80}, {"together": True, "preempting": True}),
    }
    answers: list[list[int]] = []
    drafting = {
        "with drafts": ({}, {"together": True}),
        "with drafts, in chunks, twice, with preemption": (
            {"max_num_batched_tokens": 40},
            {"together": True, "rounds": 2, "preempting": True},
        ),
    }
    for way, (options, how) in (ways | drafting).items():
        config = EngineConfig(num_kv_blocks=64, max_model_len=case.longest, **options)
        proposer = Oracle(case.prompts, answers, VOCAB) if way in drafting else None
        outcome = run(case.ours, config, case.prompts, MAX_TOKENS, **how, proposer=proposer)
        answers = answers or outcome.token_ids
        expected = expected or case.references(outcome.token_ids)
        ties = compare(outcome, expected)
        print(f"{way}: {ties} of {len(expected)} left at a tie; {outcome.num_cached_tokens} tokens cached")
        assert (outcome.num_preemptions > 0) == ("preempting" in how)
        assert "rounds" not in how or outcome.num_cached_tokens > 0
        assert (0 < outcome.num_accepted_tokens < outcome.num_draft_tokens) == (way in drafting)
        assert way in drafting or not outcome.num_draft_tokens


@pytest.mark.parametrize("case", ["mistral", "gpt-oss", "deepseek v3", "gemma 3"], indirect=True)
@settings(max_examples=8)
@given(
    share=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    longest=st.integers(1, 9),
    budget=st.integers(17, 60),
    steps=st.integers(1, 2),
    preempting=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_drafts_leave_greedy_tokens_as_they_are(case, share, longest, budget, steps, preempting, seed):
    """Windows, sinks, latent attention and experts."""
    options = {"num_kv_blocks": 64, "max_model_len": case.longest, "max_num_batched_tokens": budget}
    plain = run(case.ours, EngineConfig(**options), case.prompts, MAX_TOKENS, together=True)
    guessed = run(
        case.ours, EngineConfig(**options, steps_in_flight=steps), case.prompts, MAX_TOKENS, together=True,
        preempting=preempting, proposer=Oracle(
            case.prompts, plain.token_ids, VOCAB, share=share, longest=longest, seed=seed
        ),
    )  # fmt: skip
    assert guessed.num_draft_tokens > 0
    compare(guessed, case.references(plain.token_ids))


@pytest.mark.gpu
def test_greedy_tokens_equal_transformers_on_cuda(case):
    expected: list[Reference] = []
    answers: list[list[int]] = []
    ours = load(case.folder, case.family, device="cuda")
    for options, how in (
        ({}, {"together": True}),
        ({"max_num_batched_tokens": 17}, {"together": True, "rounds": 2}),
        ({"enforce_eager": True, "max_num_batched_tokens": 80}, {"together": True, "preempting": True}),
        ({"speculative_method": "ngram_cpu"}, {"together": True, "proposer": answers}),  # captures steps with drafts
    ):
        config = EngineConfig(
            device="cuda", dtype="float32", num_kv_blocks=64, max_model_len=case.longest, max_num_seqs=16, **options
        )
        if "proposer" in how:
            how = how | {"proposer": Oracle(case.prompts, answers, VOCAB)}
        outcome = run(ours, config, case.prompts, MAX_TOKENS, **how)
        answers = answers or outcome.token_ids
        expected = expected or case.references(outcome.token_ids)
        compare(outcome, expected)


@pytest.mark.parametrize("case", ["mistral"], indirect=True)
def test_where_all_layers_have_windows_a_context_may_be_longer_than_the_cache(case):
    prompt = case.prompts[-3]
    config = EngineConfig(num_kv_blocks=4, max_num_batched_tokens=16, max_model_len=len(prompt) + MAX_TOKENS)
    assert len(prompt) > 4 * 16
    outcome = run(case.ours, config, [prompt], MAX_TOKENS, together=False)
    compare(outcome, references(case.theirs, [prompt], MAX_TOKENS, outcome.token_ids))
