"""A GGUF file seen as a Hugging Face checkpoint: its config, its tensor names, its row order.

llama.cpp renames tensors when it converts a model; for the llama architecture it reorders the rows of q and k so that rotary
pairs become neighbours, and to Gemma's norm weights it adds one. All of that is undone here. The container itself is `gguf.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.weights.dequantize import FORMATS, Bytes, dequantize
from runtime.weights.dtypes import Array, store
from runtime.weights.gguf import GgufFile, GgufTensor
from runtime.weights.rules import Shape, WeightsError

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies: how llama.cpp writes Llama 3.1's scaling
_LONGROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What Hugging Face calls it, and how llama.cpp writes it: `layer_names` beside or instead of Llama's; q and k `reordered`;
    norm weights with the one added that the model adds, `plus_one`."""

    name: str
    model_type: str
    layer_names: Mapping[str, str] = field(default_factory=dict)
    reordered: bool = False
    plus_one: bool = False


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", "llama", reordered=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma": _Architecture("GemmaForCausalLM", "gemma", plus_one=True),
    "gemma2": _Architecture("Gemma2ForCausalLM", "gemma2", _FOUR_NORMS, plus_one=True),
    "gemma3": _Architecture("Gemma3ForCausalLM", "gemma3_text", _FOUR_NORMS, plus_one=True),
    "phi3": _Architecture("Phi3ForCausalLM", "phi3", _FUSED),
}
_UNKNOWN = _Architecture("", "")


def hf_name(name: str, layer_names: Mapping[str, str]) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; unknown names stay as they are."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, rest = stem.split(".", 2) if stem.count(".") >= 2 else ("", "", "")
        known = layer_names.get(rest) or _LAYER_NAMES.get(rest)
        return name if known is None else f"model.layers.{layer}.{known}.{kind}"
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


class GgufCheckpoint:
    """The tensors of a GGUF file by Hugging Face name, in Hugging Face row order. Close it.

    Raises WeightsError where a tensor's type is not supported."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file.reopened()
        self._architecture = _ARCHITECTURES.get(self._file.metadata.get("general.architecture", ""), _UNKNOWN)
        self._tensors = {
            hf_name(name, self._architecture.layer_names): tensor
            for name, tensor in self._file.tensors.items()
            if name not in (_ROPE_FACTORS, *_LONGROPE.values())
        }
        self.shapes: Mapping[str, Shape] = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.types: Mapping[str, str] = {name: tensor.type for name, tensor in self._tensors.items()}
        self._head_sizes = _reordered_heads(self._file.metadata, self._tensors)
        if unknown := [tensor for tensor in self._tensors.values() if tensor.type not in FORMATS]:
            self.close()
            raise WeightsError(
                f"{file.path}: tensor {unknown[0].name} is {unknown[0].type}, which is not supported, as are "
                f"{len(unknown) - 1} more tensors; supported types: {', '.join(FORMATS)}"
            )

    def close(self) -> None:
        self._file.close()

    def stored_bytes(self, name: str) -> int:
        return self._tensors[name].nbytes

    def read_rows(self, name: str, start: int, out: Array) -> None:
        """Rows from `start` on into the contiguous `out`, as many as it has, dequantised, in its type; uint8 [rows, bytes of a
        row] takes them as they are stored."""
        tensor, raw = self._tensors[name], self._raw_rows(name, start, start + len(out))
        if out.dtype == np.uint8:
            out[...] = raw
            return
        values = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
        dequantize(raw, FORMATS[tensor.type], values)
        if self._architecture.plus_one and name.endswith("norm.weight"):
            values -= 1
        if values is not out:
            store(values, out)

    def _raw_rows(self, name: str, start: int, stop: int) -> Bytes:
        tensor, head_size = self._tensors[name], self._head_sizes.get(name)
        if head_size is None:
            return self._file.raw_rows(tensor, start, stop)
        return self._heads(tensor, start, stop, head_size)

    def _heads(self, tensor: GgufTensor, start: int, stop: int, head_size: int) -> Bytes:
        """Rows of q or k with rotary pairs half a head apart again. Blocks never span rows, so packed rows can be moved."""
        first, last = start // head_size * head_size, -(-stop // head_size) * head_size
        pairs = self._file.raw_rows(tensor, first, last).reshape(-1, head_size // 2, 2, tensor.row_bytes)
        rows = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(last - first, tensor.row_bytes)
        return rows[start - first : stop - first]


def _reordered_heads(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, int]:
    """Head size of each tensor whose rows llama.cpp has reordered."""
    if not _ARCHITECTURES.get(metadata.get("general.architecture", ""), _UNKNOWN).reordered:
        return {}
    config = _Metadata("", metadata)
    found = {}
    for name, tensor in tensors.items():
        for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".self_attn.{projection}." in name:
                count = config.heads()[heads]
                if tensor.shape[0] % (2 * count):
                    raise WeightsError(
                        f"tensor {tensor.name} has {tensor.shape[0]} rows: not {count} heads of even size"
                    )
                found[name] = tensor.shape[0] // count
    return found


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """What the model's config.json would say, from the metadata and from which tensors there are. `file` is open.

    Raises WeightsError where it is incomplete or asks for what is not supported."""
    metadata = _Metadata(f"{file.path}: ", file.metadata)
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
        **metadata.heads(),
        **_gemma(file, metadata),
        **generation_config_from_gguf(file),
    }
    if (window := metadata.optional("attention.sliding_window")) is not None:
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
        if architecture.model_type == "llama":
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return config


def generation_config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Token ids as generation_config.json has them: `eos_token_id` is a list if a turn ends with a token of its own."""
    ids = {kind: file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot", "eom")}
    ends = [i for i in dict.fromkeys((ids["eos"], ids["eot"], ids["eom"])) if i is not None]
    found: dict[str, Any] = {}
    if ids["bos"] is not None:
        found["bos_token_id"] = ids["bos"]
    if ends:
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found


def _rope_scaling(file: GgufFile, metadata: _Metadata) -> dict[str, Any] | None:
    if _ROPE_FACTORS in file.tensors:
        return {"rope_type": "factors", "factors": file.read(_ROPE_FACTORS).reshape(-1).tolist()}
    if _LONGROPE["long_factor"] in file.tensors:
        factors = {key: file.read(name).reshape(-1).tolist() for key, name in _LONGROPE.items()}
        return {"rope_type": "longrope", **factors, **_scaling_numbers(metadata)}
    kind = metadata.optional("rope.scaling.type")
    if kind in (None, "none"):
        return None
    return {"rope_type": kind, **_scaling_numbers(metadata)}


def _scaling_numbers(metadata: _Metadata) -> dict[str, Any]:
    scaling = {
        "factor": metadata.optional("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.optional("rope.scaling.original_context_length"),
        "attention_factor": metadata.optional("rope.scaling.attn_factor"),
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _gemma(file: GgufFile, metadata: _Metadata) -> dict[str, Any]:
    """What only Gemma 2 and 3 have. Their largest models scale scores by another width than a head's, which llama.cpp tells by
    the number of layers."""
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


class _Metadata:
    """Metadata of one architecture, with complaints that name the file and the key."""

    def __init__(self, origin: str, values: Mapping[str, Any]) -> None:
        self._origin = origin
        self._values = values

    def architecture(self) -> _Architecture:
        name = self._values.get("general.architecture")
        if self._values.get("split.count", 0) not in (0, 1):
            raise WeightsError(
                f"{self._origin}one part of a model split over {self._values['split.count']} files; "
                "join them with llama-gguf-split --merge"
            )
        if name not in _ARCHITECTURES:
            raise WeightsError(
                f"{self._origin}GGUF architecture {name!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
            )
        if self.optional("expert_count"):
            raise WeightsError(f"{self._origin}a mixture of experts is not supported in GGUF architecture {name!r}")
        return _ARCHITECTURES[name]

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
            raise WeightsError(f"{self._origin}values of another size than keys are not supported")
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            **self._part(head_dim),
        }

    def _part(self, head_dim: int) -> dict[str, float]:
        """How much of a head turns, where it is not all of it."""
        turned = self.optional("rope.dimension_count")
        if turned in (None, head_dim):
            return {}
        if self.architecture().reordered:
            raise WeightsError(f"{self._origin}a rotary embedding of part of the head is not supported")
        return {"partial_rotary_factor": self.count("rope.dimension_count") / head_dim}
