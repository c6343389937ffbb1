"""GGUF architectures: what Hugging Face calls each, and what llama.cpp's converter did to its tensors' names and rows. Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_WHOLE_NAMES = {"attn_sinks.weight": "self_attn.sinks", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT_OSS = {"post_attention_norm": "post_attention_layernorm"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What Hugging Face calls it, and how llama.cpp writes it: `layer_names` beside or instead of Llama's; q and k `reordered`;
    norm weights with the one added that the model adds, `plus_one`. `config`: what its metadata leave unsaid."""

    name: str
    model_type: str
    layer_names: Mapping[str, str] = field(default_factory=dict)
    reordered: bool = False
    plus_one: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


DENSE = {
    "llama": Architecture("LlamaForCausalLM", "llama", reordered=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma": Architecture("GemmaForCausalLM", "gemma", plus_one=True),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _FOUR_NORMS, plus_one=True),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _FOUR_NORMS, plus_one=True),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _FUSED),
}
MIXTURES = {
    "llama": Architecture("MixtralForCausalLM", "mixtral", reordered=True),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", config={"norm_topk_prob": False}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", config={"norm_topk_prob": True}),
    "gpt-oss": Architecture("GptOssForCausalLM", "gpt_oss", _GPT_OSS),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", "deepseek_v2"),
}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture | None:
    """None for one that is not known, or not as a mixture of experts."""
    name = metadata.get("general.architecture", "")
    return (MIXTURES if metadata.get(f"{name}.expert_count") else DENSE).get(name)


def hf_name(name: str, architecture: Architecture | None) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; unknown names stay as they are."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name
    _, layer, rest = stem.split(".", 2) if stem.count(".") >= 2 else ("", "", "")
    layer_names = {} if architecture is None else architecture.layer_names
    known = layer_names.get(rest) or _LAYER_NAMES.get(rest)
    whole = _WHOLE_NAMES.get(f"{rest}.{kind}") or (known and f"{known}.{kind}")
    return f"model.layers.{layer}.{whole}" if whole else name
