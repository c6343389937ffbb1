"""Tiny models of transformers' own, written as llama.cpp's converter would write them."""

from __future__ import annotations

import gguf as gguf_package
import numpy as np
import torch
import transformers

COMMON = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 77, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16,
    "rope_theta": 5000.0,
}  # fmt: skip
GEMMA3 = {key: value for key, value in COMMON.items() if key != "rope_theta"} | {"num_hidden_layers": 6}
PHI3 = COMMON | {"head_dim": 8, "pad_token_id": 0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 5000.0, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0], "attention_factor": 1.25,
}  # fmt: skip
GPT_OSS_YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 16,
}  # fmt: skip
DEEPSEEK_YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LATENT = {key: value for key, value in COMMON.items() if key not in ("head_dim", "num_key_value_heads", "rope_theta")} | {
    "num_key_value_heads": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 3, "n_routed_experts": 8,
    "first_k_dense_replace": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_shared_experts": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": (transformers.LlamaConfig(**COMMON, attention_bias=True), gguf_package.MODEL_ARCH.LLAMA),
    "mistral": (transformers.MistralConfig(**COMMON, sliding_window=9), gguf_package.MODEL_ARCH.LLAMA),
    "mixtral": (
        transformers.MixtralConfig(**COMMON, num_local_experts=5, num_experts_per_tok=2),
        gguf_package.MODEL_ARCH.LLAMA,
    ),
    "qwen2": (
        transformers.Qwen2Config(**(COMMON | {"head_dim": 8}), tie_word_embeddings=True),
        gguf_package.MODEL_ARCH.QWEN2,
    ),
    "qwen3": (transformers.Qwen3Config(**COMMON), gguf_package.MODEL_ARCH.QWEN3),
    "qwen2moe": (
        transformers.Qwen2MoeConfig(**(COMMON | {"head_dim": 8}), **EXPERTS, shared_expert_intermediate_size=96),
        gguf_package.MODEL_ARCH.QWEN2MOE,
    ),
    "qwen3moe": (
        transformers.Qwen3MoeConfig(**COMMON, **EXPERTS, norm_topk_prob=True),
        gguf_package.MODEL_ARCH.QWEN3MOE,
    ),
    "gpt-oss": (
        transformers.GptOssConfig(
            **COMMON, num_local_experts=5, num_experts_per_tok=2, sliding_window=9, rope_parameters=GPT_OSS_YARN
        ),
        gguf_package.MODEL_ARCH.GPT_OSS,
    ),
    "deepseek v2": (
        transformers.DeepseekV2Config(
            **LATENT,
            q_lora_rank=None,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=3.0,
            rope_parameters=DEEPSEEK_YARN,
        ),
        gguf_package.MODEL_ARCH.DEEPSEEK2,
    ),
    "deepseek v3": (
        transformers.DeepseekV3Config(**LATENT, q_lora_rank=32, n_group=4, topk_group=2),
        gguf_package.MODEL_ARCH.DEEPSEEK2,
    ),
    "gemma": (transformers.GemmaConfig(**COMMON), gguf_package.MODEL_ARCH.GEMMA),
    "gemma2": (
        transformers.Gemma2Config(**COMMON, sliding_window=9, query_pre_attn_scalar=16),
        gguf_package.MODEL_ARCH.GEMMA2,
    ),
    "gemma3": (
        transformers.Gemma3TextConfig(**GEMMA3, sliding_window=9, query_pre_attn_scalar=16),
        gguf_package.MODEL_ARCH.GEMMA3,
    ),
    "phi3": (transformers.Phi3Config(**PHI3), gguf_package.MODEL_ARCH.PHI3),
    "phi3, longrope": (
        transformers.Phi3Config(**PHI3 | {"original_max_position_embeddings": 32}, rope_parameters=LONGROPE),
        gguf_package.MODEL_ARCH.PHI3,
    ),
}


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama architecture: the halves of each head interleaved."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, arch: gguf_package.MODEL_ARCH) -> None:
    """A model in GGUF as llama.cpp's converter writes it, names by the gguf package: matrices Q8_0, vectors float32."""
    config, name = model.config, gguf_package.MODEL_ARCH_NAMES[arch]
    writer = gguf_package.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if arch == gguf_package.MODEL_ARCH.DEEPSEEK2 else config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch == gguf_package.MODEL_ARCH.DEEPSEEK2:
        add_latent_heads(writer, config)
    elif getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if rope["rope_type"] == "longrope":
        writer.add_rope_dimension_count(2 * len(rope["short_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf_package.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    add_experts(writer, config)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf_package.get_tensor_name_map(arch, config.num_hidden_layers)
    for hf_name, weight in taken_apart(as_converted(model), config).items():
        values = weight.numpy()
        if name.startswith("gemma") and hf_name.endswith("norm.weight"):
            values = values + 1
        if arch == gguf_package.MODEL_ARCH.LLAMA and "q_proj" in hf_name:
            values = permuted(values, config.num_attention_heads)
        if arch == gguf_package.MODEL_ARCH.LLAMA and "k_proj" in hf_name:
            values = permuted(values, config.num_key_value_heads)
        kind = kind_of(hf_name, weight, config)
        known_name = hf_name.replace("shared_expert.", "shared_experts.") if "deepseek" in name else hf_name
        known_name = known_name.replace("correction_bias", "correction.bias")
        new_name = names.get_name(known_name, try_suffixes=(".weight", ".bias"))
        if hf_name.endswith("sinks"):
            new_name += ".weight"
        if hf_name.endswith("shared_expert_gate.weight"):
            values = values.reshape(-1)
        writer.add_tensor(new_name, gguf_package.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_experts(writer: gguf_package.GGUFWriter, config) -> None:
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((getattr(config, key) for key in keys if hasattr(config, key)), None)
    if count is None:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if (size := getattr(config, "moe_intermediate_size", None)) is not None:
        writer.add_expert_feed_forward_length(size)
    if (size := getattr(config, "shared_expert_intermediate_size", None)) is not None:
        writer.add_expert_shared_feed_forward_length(size)


def add_latent_heads(writer: gguf_package.GGUFWriter, config) -> None:
    turned, rank, is_v3 = config.qk_rope_head_dim, config.kv_lora_rank, config.model_type == "deepseek_v3"
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + turned)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(turned)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(bool(config.norm_topk_prob) and is_v3)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    gating = gguf_package.ExpertGatingFuncType
    writer.add_expert_gating_func(gating.SIGMOID if is_v3 else gating.SOFTMAX)


def keys_and_values(weight: torch.Tensor, config) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_b_proj -> [heads, rank, key size] and [heads, value size, rank]."""
    heads = weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return keys.transpose(1, 2).contiguous(), values.contiguous()


def taken_apart(tensors: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    found = {}
    for name, weight in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            found |= zip(
                (name.replace("kv_b", kind) for kind in ("k_b", "v_b")), keys_and_values(weight, config), strict=True
            )
        else:
            found[name] = weight
    return found


def as_converted(model) -> dict[str, torch.Tensor]:
    """Its tensors by Hugging Face names as the converter sorts them: experts' gates and ups apart, in [experts, out, in]."""
    found = {}
    for name, weight in model.state_dict().items():
        stem, _, last = name.rpartition(".")
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if not stem.endswith("mlp.experts"):
            found[name.replace("mlp.router", "mlp.gate").replace("shared_experts", "shared_expert")] = weight
            continue
        kind, in_turn = ("bias" if last.endswith("bias") else "weight"), model.config.model_type == "gpt_oss"
        rows = weight.transpose(1, 2).contiguous() if in_turn and kind == "weight" else weight
        if last.startswith("down"):
            found[f"{stem}.down_proj.{kind}"] = rows
        else:
            gates, ups = (rows[:, ::2], rows[:, 1::2]) if in_turn else rows.chunk(2, dim=1)
            found |= {f"{stem}.gate_proj.{kind}": gates.contiguous(), f"{stem}.up_proj.{kind}": ups.contiguous()}
    return found


def kind_of(hf_name: str, weight: torch.Tensor, config) -> gguf_package.GGMLQuantizationType:
    """Of a tensor as converted: routers and vectors keep their precision, GPT-OSS's experts are in MXFP4."""
    kinds = gguf_package.GGMLQuantizationType
    exact = weight.ndim == 1 or weight.shape[0] == 1 or "mlp.gate." in hf_name or hf_name.endswith("bias")
    if exact:
        return kinds.F32
    return kinds.MXFP4 if weight.ndim == 3 and config.model_type == "gpt_oss" else kinds.Q8_0


def q8_0(weight: torch.Tensor) -> torch.Tensor:
    kind = gguf_package.GGMLQuantizationType.Q8_0
    return torch.from_numpy(gguf_package.quants.dequantize(gguf_package.quants.quantize(weight.numpy(), kind), kind))


def round_weights(model) -> None:
    """In place: to what a file can hold."""
    for name, weight in model.state_dict().items():
        if name.endswith("kv_b_proj.weight"):
            keys, values = (q8_0(part) for part in keys_and_values(weight, model.config))
            weight.copy_(torch.cat([keys.transpose(1, 2), values], dim=1).view(weight.shape))
            continue
        in_turn = model.config.model_type == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj"))
        rows = weight.transpose(1, 2).contiguous() if in_turn else weight
        kind = kind_of(name.replace("mlp.router", "mlp.gate"), rows, model.config)
        values = gguf_package.quants.dequantize(gguf_package.quants.quantize(rows.numpy(), kind), kind)
        values = torch.from_numpy(values).reshape(rows.shape)
        weight.copy_(values.transpose(1, 2) if in_turn else values)


def make(family: str, path, seed: int = 3) -> transformers.PreTrainedModel:
    """The model, with the weights that the file holds."""
    config, arch = FAMILIES[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # biases and norms begin as zeros and ones, which hides mistakes
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.25)
    round_weights(model)
    write_gguf(path, model, arch)
    return model
