"""Architecture name to family: the list of what can be served."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from runtime.models.families.bamba import bamba
from runtime.models.families.cohere import cohere, cohere2
from runtime.models.families.deepseek import deepseek_v2, deepseek_v3
from runtime.models.families.ernie45 import ernie45
from runtime.models.families.ernie45_moe import ernie45_moe
from runtime.models.families.exaone4 import exaone4
from runtime.models.families.falcon import falcon
from runtime.models.families.falcon_h1 import falcon_h1
from runtime.models.families.gemma import gemma, gemma2, gemma3
from runtime.models.families.glm import glm, glm4
from runtime.models.families.glm4_moe import glm4_moe
from runtime.models.families.gpt2 import gpt2
from runtime.models.families.gpt_neox import gpt_neox
from runtime.models.families.gpt_oss import gpt_oss
from runtime.models.families.granite import granite
from runtime.models.families.granitemoe import granitemoe, granitemoeshared
from runtime.models.families.granitemoehybrid import granitemoehybrid
from runtime.models.families.jamba import jamba
from runtime.models.families.lfm2 import lfm2, lfm2_moe
from runtime.models.families.llama import llama
from runtime.models.families.mamba import falcon_mamba, mamba
from runtime.models.families.mamba2 import mamba2
from runtime.models.families.mistral import ministral, ministral3, mistral
from runtime.models.families.mixtral import mixtral
from runtime.models.families.nemotron import nemotron
from runtime.models.families.nemotron_h import nemotron_h
from runtime.models.families.olmo import olmo, olmo2, olmo3
from runtime.models.families.olmoe import olmoe
from runtime.models.families.opt import opt
from runtime.models.families.phi import phi
from runtime.models.families.phi3 import phi3
from runtime.models.families.phimoe import phimoe
from runtime.models.families.qwen2 import qwen2
from runtime.models.families.qwen3 import qwen3
from runtime.models.families.qwen3_next import qwen3_5, qwen3_5_moe, qwen3_next
from runtime.models.families.qwen_moe import qwen2_moe, qwen3_moe
from runtime.models.families.seed_oss import seed_oss
from runtime.models.families.smollm3 import smollm3
from runtime.models.families.stablelm import stablelm
from runtime.models.families.starcoder2 import starcoder2
from runtime.models.families.text_part import gemma3_text, mistral3_text, qwen3_5_moe_text, qwen3_5_text
from runtime.models.families.zamba2 import zamba2
from runtime.models.read.hf_config import HfConfig
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.model import UnsupportedModel

FAMILIES: dict[str, Callable[[HfConfig], DecoderSpec]] = {
    "BambaForCausalLM": bamba,
    "Cohere2ForCausalLM": cohere2,
    "CohereForCausalLM": cohere,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "Ernie4_5_MoeForCausalLM": ernie45_moe,
    "Ernie4_5ForCausalLM": ernie45,
    "Exaone4ForCausalLM": exaone4,
    "FalconForCausalLM": falcon,
    "FalconH1ForCausalLM": falcon_h1,
    "FalconMambaForCausalLM": falcon_mamba,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3_text,
    "GemmaForCausalLM": gemma,
    "Glm4ForCausalLM": glm4,
    "Glm4MoeForCausalLM": glm4_moe,
    "GlmForCausalLM": glm,
    "GPT2LMHeadModel": gpt2,
    "GPTNeoXForCausalLM": gpt_neox,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "GraniteMoeForCausalLM": granitemoe,
    "GraniteMoeHybridForCausalLM": granitemoehybrid,
    "GraniteMoeSharedForCausalLM": granitemoeshared,
    "JambaForCausalLM": jamba,
    "Lfm2ForCausalLM": lfm2,
    "Lfm2MoeForCausalLM": lfm2_moe,
    "LlamaForCausalLM": llama,
    "Mamba2ForCausalLM": mamba2,
    "MambaForCausalLM": mamba,
    "Ministral3ForCausalLM": ministral3,
    "MinistralForCausalLM": ministral,
    "Mistral3ForConditionalGeneration": mistral3_text,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "NemotronForCausalLM": nemotron,
    "NemotronHForCausalLM": nemotron_h,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "OlmoeForCausalLM": olmoe,
    "OlmoForCausalLM": olmo,
    "OPTForCausalLM": opt,
    "Phi3ForCausalLM": phi3,
    "PhiForCausalLM": phi,
    "PhimoeForCausalLM": phimoe,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5_text,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe_text,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "SeedOssForCausalLM": seed_oss,
    "SmolLM3ForCausalLM": smollm3,
    "StableLmForCausalLM": stablelm,
    "Starcoder2ForCausalLM": starcoder2,
    "Zamba2ForCausalLM": zamba2,
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """Raises UnsupportedModel."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise UnsupportedModel("config: architectures names no model class")
    return architectures[0]


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Describe the model of a Hugging Face config.

    Raises UnsupportedModel."""
    name = architecture_of(config)
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES, n=1, cutoff=0.0)[0]
        raise UnsupportedModel(
            f"architecture {name} is not supported natively; the nearest that is: {near} (python -m server models lists all)"
        )
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        if method != "mxfp4":  # a tensor in MXFP4 says so itself
            raise UnsupportedModel(
                f"weights quantised with {method!r} are not supported; use a GGUF file or the original"
            )
    return FAMILIES[name](HfConfig(config))
