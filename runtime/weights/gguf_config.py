"""Conversion of a GGUF file's metadata and tensor names to config.json, generation_config.json and Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.weights.gguf import GgufFile
from runtime.weights.rules import WeightsError

# GGUF architectures: the Hugging Face name of each, and how llama.cpp's converter changes tensor names and rows.
# Data.
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
    """Architecture of GGUF files. `name`: Hugging Face's name.

    `layer_names`: tensor names in addition to Llama's, or overriding them. `reordered`: llama.cpp has permuted rows of q and k.
    `plus_one`: llama.cpp has added 1 to norm weights. `config`: config values that are missing in the metadata."""

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
    """Return the file's architecture; None if it is unknown. An architecture may be known without experts only."""
    name = metadata.get("general.architecture", "")
    return (MIXTURES if metadata.get(f"{name}.expert_count") else DENSE).get(name)


def hf_name(name: str, architecture: Architecture | None) -> str:
    """Convert a tensor name such as "blk.3.attn_q.weight" to "model.layers.3.self_attn.q_proj.weight". Unknown names are
    unchanged."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name
    _, layer, rest = stem.split(".", 2) if stem.count(".") >= 2 else ("", "", "")
    layer_names = {} if architecture is None else architecture.layer_names
    known = layer_names.get(rest) or _LAYER_NAMES.get(rest)
    whole = _WHOLE_NAMES.get(f"{rest}.{kind}") or (known and f"{known}.{kind}")
    return f"model.layers.{layer}.{whole}" if whole else name


ROPE_FACTORS = "rope_freqs.weight"  # divisors of rotary frequencies, llama.cpp's form of Llama 3.1's scaling
_SIGMOID = 2  # value of llama.cpp's gating functions
LONGROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Return the model's config.json, from the metadata and the tensors' shapes. `file` must be open. Raises WeightsError if the
    metadata is incomplete or unsupported."""
    metadata = GGUFMetadata(f"{file.path}: ", file.metadata)
    architecture = metadata.architecture()
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsError(f"{file.path}: no token_embd.weight: not a language model")
    config = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.count("embedding_length"),
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, metadata),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "hidden_act": "gelu_pytorch_tanh" if architecture.plus_one else "silu",
        **(_deepseek(metadata) if architecture.model_type == "deepseek_v2" else metadata.heads()),
        **_gemma(file, metadata),
        **architecture.config,
        **_experts(metadata),
        **generation_config_from_gguf(file),
    }
    if (window := metadata.optional("attention.sliding_window")) is not None:
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
        if architecture.model_type == "llama":
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return config


def generation_config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Return the token ids of generation_config.json. `eos_token_id` is a list if a chat turn ends with another token than a
    text."""
    ids = {kind: file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot", "eom")}
    ends = [i for i in dict.fromkeys((ids["eos"], ids["eot"], ids["eom"])) if i is not None]
    found: dict[str, Any] = {}
    if ids["bos"] is not None:
        found["bos_token_id"] = ids["bos"]
    if ends:
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found


def _rope_scaling(file: GgufFile, metadata: GGUFMetadata) -> dict[str, Any] | None:
    if ROPE_FACTORS in file.tensors:
        return {"rope_type": "factors", "factors": file.read(ROPE_FACTORS).reshape(-1).tolist()}
    if LONGROPE["long_factor"] in file.tensors:
        factors = {key: file.read(name).reshape(-1).tolist() for key, name in LONGROPE.items()}
        return {"rope_type": "longrope", **factors, **_scaling_numbers(metadata)}
    kind = metadata.optional("rope.scaling.type")
    if kind in (None, "none"):
        return None
    return {"rope_type": kind, **_scaling_numbers(metadata)}


def _scaling_numbers(metadata: GGUFMetadata) -> dict[str, Any]:
    scaling = {
        "factor": metadata.optional("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.optional("rope.scaling.original_context_length"),
        "attention_factor": metadata.optional("rope.scaling.attn_factor"),
        "beta_fast": metadata.optional("rope.scaling.yarn_beta_fast"),
        "beta_slow": metadata.optional("rope.scaling.yarn_beta_slow"),
        **_mscale(metadata),
        "truncate": False if metadata.architecture().model_type == "gpt_oss" else None,
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _mscale(metadata: GGUFMetadata) -> dict[str, float]:
    """Return DeepSeek's two YaRN scales, which are equal. The metadata contains a tenth of their value."""
    tenth = metadata.optional("rope.scaling.yarn_log_multiplier")
    return {} if tenth is None else {"mscale": 10 * tenth, "mscale_all_dim": 10 * tenth}


def _gemma(file: GgufFile, metadata: GGUFMetadata) -> dict[str, Any]:
    """Return config values of Gemma 2 and 3. In the largest models, recognised by their number of layers, scores are not scaled by
    the head size."""
    largest = {"gemma2": 46, "gemma3": 62}.get(file.metadata["general.architecture"])
    if largest is None:
        return {}
    heads = metadata.heads()
    is_largest = metadata.count("block_count") == largest
    width = metadata.count("embedding_length") // heads["num_attention_heads"] if is_largest else heads["head_dim"]
    return {
        "query_pre_attn_scalar": width,
        "attn_logit_softcapping": metadata.optional("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.optional("final_logit_softcapping"),
        "rope_local_base_freq": metadata.optional("rope.freq_base_swa"),
        "sliding_window_pattern": metadata.optional("attention.sliding_window_pattern"),
    }


def _deepseek(metadata: GGUFMetadata) -> dict[str, Any]:
    """Return config values of DeepSeek V2 or V3. In the metadata they differ by the scoring function. Head sizes are those of the
    expanded heads, which have separate keys in newer files."""
    rotary_dim, scale = metadata.count("rope.dimension_count"), metadata.optional("expert_weights_scale")
    own = "_mla" if metadata.optional("attention.key_length_mla") is not None else ""
    groups = metadata.optional("expert_group_count") or 1
    is_v3 = metadata.optional("expert_gating_func") == _SIGMOID
    names = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"} if is_v3 else {}
    return {
        **names,
        "num_attention_heads": metadata.count("attention.head_count"),
        "num_key_value_heads": metadata.count("attention.head_count"),
        "kv_lora_rank": metadata.count("attention.kv_lora_rank"),
        "q_lora_rank": metadata.optional("attention.q_lora_rank"),
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": metadata.count(f"attention.key_length{own}") - rotary_dim,
        "v_head_dim": metadata.count(f"attention.value_length{own}"),
        "first_k_dense_replace": metadata.optional("leading_dense_block_count") or 0,
        "n_shared_experts": metadata.count("expert_shared_count"),
        "routed_scaling_factor": 1.0 if scale is None else scale,
        "norm_topk_prob": False,
        "topk_method": "noaux_tc" if is_v3 else "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": metadata.optional("expert_group_used_count") or 1,
    }


def _experts(metadata: GGUFMetadata) -> dict[str, Any]:
    if not metadata.optional("expert_count"):
        return {}
    found = {
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "num_experts": metadata.count("expert_count"),
        "moe_intermediate_size": metadata.optional("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.optional("expert_shared_feed_forward_length"),
        "norm_topk_prob": metadata.optional("expert_weights_norm"),
    }
    return {key: value for key, value in found.items() if value is not None}


class GGUFMetadata:
    """Metadata of one architecture. Errors name the file and the key."""

    def __init__(self, origin: str, values: Mapping[str, Any]) -> None:
        self._origin = origin
        self._values = values

    def architecture(self) -> Architecture:
        name = self._values.get("general.architecture")
        if self._values.get("split.count", 0) not in (0, 1):
            raise WeightsError(
                f"{self._origin}one part of a model split over {self._values['split.count']} files; "
                "join them with llama-gguf-split --merge"
            )
        architecture = architecture_of(self._values)
        if architecture is None and (name in DENSE or name in MIXTURES):
            what = "a mixture of experts" if name in DENSE else "a model without experts"
            raise WeightsError(f"{self._origin}{what} is not supported in GGUF architecture {name!r}")
        if architecture is None:
            supported = ", ".join(dict.fromkeys([*DENSE, *MIXTURES]))
            raise WeightsError(f"{self._origin}GGUF architecture {name!r} is not supported; supported: {supported}")
        return architecture

    def optional(self, key: str) -> Any:
        return self._values.get(f"{self._values.get('general.architecture')}.{key}")

    def count(self, key: str) -> int:
        value = self.optional(key)
        if type(value) is not int or value < 1:
            raise WeightsError(f"{self._origin}metadata {key} is {value!r}, not a positive count")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise WeightsError(f"{self._origin}metadata {key} is {value!r}, not a number")
        return float(value)

    def heads(self) -> dict[str, Any]:
        heads = self.count("attention.head_count")
        kv_heads = heads if self.optional("attention.head_count_kv") is None else self.count("attention.head_count_kv")
        keyed = self.optional("attention.key_length") is not None
        head_dim = self.count("attention.key_length") if keyed else self.count("embedding_length") // heads
        if self.optional("attention.value_length") not in (None, head_dim):
            raise WeightsError(
                f"{self._origin}attention heads whose values differ in size from their keys are not supported"
            )
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            **self._part(head_dim),
        }

    def _part(self, head_dim: int) -> dict[str, float]:
        rotary_dim = self.optional("rope.dimension_count")
        if rotary_dim in (None, head_dim):
            return {}
        if self.architecture().reordered:
            raise WeightsError(f"{self._origin}a rotary embedding of part of the head is not supported")
        return {"partial_rotary_factor": self.count("rope.dimension_count") / head_dim}
