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
FAMILIES = {
    "llama": (transformers.LlamaConfig(**COMMON, attention_bias=True), gguf_package.MODEL_ARCH.LLAMA),
    "qwen2": (
        transformers.Qwen2Config(**(COMMON | {"head_dim": 8}), tie_word_embeddings=True),
        gguf_package.MODEL_ARCH.QWEN2,
    ),
    "qwen3": (transformers.Qwen3Config(**COMMON), gguf_package.MODEL_ARCH.QWEN3),
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
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf_package.get_tensor_name_map(arch, config.num_hidden_layers)
    for hf_name, weight in model.state_dict().items():
        values = weight.numpy()
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.startswith("gemma") and hf_name.endswith("norm.weight"):
            values = values + 1
        if arch == gguf_package.MODEL_ARCH.LLAMA and "q_proj" in hf_name:
            values = permuted(values, config.num_attention_heads)
        if arch == gguf_package.MODEL_ARCH.LLAMA and "k_proj" in hf_name:
            values = permuted(values, config.num_key_value_heads)
        kind = gguf_package.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf_package.GGMLQuantizationType.F32
        new_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(new_name, gguf_package.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(weight: torch.Tensor) -> torch.Tensor:
    if weight.ndim == 1:
        return weight
    kind = gguf_package.GGMLQuantizationType.Q8_0
    return torch.from_numpy(gguf_package.quants.dequantize(gguf_package.quants.quantize(weight.numpy(), kind), kind))


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
        parameter.data = rounded(parameter.data)
    write_gguf(path, model, arch)
    return model
