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
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "head_dim", None):
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
    add_experts(writer, config)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf_package.get_tensor_name_map(arch, config.num_hidden_layers)
    for hf_name, weight in as_converted(model).items():
        values = weight.numpy()
        if name.startswith("gemma") and hf_name.endswith("norm.weight"):
            values = values + 1
        if arch == gguf_package.MODEL_ARCH.LLAMA and "q_proj" in hf_name:
            values = permuted(values, config.num_attention_heads)
        if arch == gguf_package.MODEL_ARCH.LLAMA and "k_proj" in hf_name:
            values = permuted(values, config.num_key_value_heads)
        kind = kind_of(hf_name, weight, config)
        new_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
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
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if count is None:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if (size := getattr(config, "moe_intermediate_size", None)) is not None:
        writer.add_expert_feed_forward_length(size)
    if (size := getattr(config, "shared_expert_intermediate_size", None)) is not None:
        writer.add_expert_shared_feed_forward_length(size)


def as_converted(model) -> dict[str, torch.Tensor]:
    """Its tensors by Hugging Face names as the converter sorts them: experts' gates and ups apart, in [experts, out, in]."""
    found = {}
    for name, weight in model.state_dict().items():
        stem, _, last = name.rpartition(".")
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if not stem.endswith("mlp.experts"):
            found[name.replace("mlp.router", "mlp.gate")] = weight
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


def round_weights(model) -> None:
    """In place: to what a file can hold."""
    for name, weight in model.state_dict().items():
        in_turn = model.config.model_type == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj"))
        rows = weight.transpose(1, 2).contiguous() if in_turn else weight
        kind = kind_of(name.replace("mlp.router", "mlp.gate"), rows, model.config)
        values = gguf_package.quants.dequantize(gguf_package.quants.quantize(rows.numpy(), kind), kind)
        values = torch.from_numpy(values).reshape(rows.shape)
        weight.copy_(values.transpose(1, 2) if in_turn else values)


def make(family: str, path) -> transformers.PreTrainedModel:
    """The model, with the weights that the file holds."""
    config, arch = FAMILIES[family]
    torch.manual_seed(3)
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
