"""Architecture name to family: the list of what can be served."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from runtime.models.granitemoe import granitemoe, granitemoeshared
from runtime.models.hf_config import HfConfig
from runtime.models.llama import llama
from runtime.models.mistral import mistral
from runtime.models.mixtral import mixtral
from runtime.models.olmoe import olmoe
from runtime.models.qwen2 import qwen2
from runtime.models.qwen3 import qwen3
from runtime.models.qwen_moe import qwen2_moe, qwen3_moe
from runtime.models.spec import DecoderSpec, UnsupportedModel

FAMILIES: dict[str, Callable[[HfConfig], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "GraniteMoeForCausalLM": granitemoe,
    "GraniteMoeSharedForCausalLM": granitemoeshared,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "OlmoeForCausalLM": olmoe,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Describe the model of a Hugging Face config.

    Raises UnsupportedModel."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise UnsupportedModel("config: architectures names no model class")
    name = architectures[0]
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES, n=1, cutoff=0.0)[0]
        raise UnsupportedModel(
            f"architecture {name} is not supported; the nearest that is: {near} (all: {', '.join(FAMILIES)})"
        )
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModel(f"weights quantised with {method!r} are not supported; use a GGUF file or the original")
    return FAMILIES[name](HfConfig(config))
