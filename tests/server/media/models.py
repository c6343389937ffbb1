"""Tiny models that see, with the processors of `processors.py`: random weights, written by transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from tests.server.media.processors import Tiny, written

_TEXT = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip


class Seeing(NamedTuple):
    tiny: Tiny
    model: Any

    @torch.inference_mode()
    def answer(self, text: str, images: list[Any], max_tokens: int) -> list[int]:
        """Greedy, by transformers alone."""
        inputs = self.tiny.processor(text=[text], images=images or None, return_tensors="pt")
        found = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        return found[0, inputs["input_ids"].shape[1] :].tolist()


def _llava(text: dict[str, Any], tiny: Tiny) -> transformers.PretrainedConfig:
    return transformers.LlavaConfig(
        text_config={"model_type": "llama", **text},
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
            "num_attention_heads": 4, "image_size": 16, "patch_size": 8, "projection_dim": 16,
        },
        **tiny.config,
    )  # fmt: skip


def _idefics3(text: dict[str, Any], tiny: Tiny) -> transformers.PretrainedConfig:
    return transformers.Idefics3Config(
        text_config={"model_type": "llama", **text},
        vision_config={
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
            "patch_size": 8,
        },
        scale_factor=2,
        **tiny.config,
    )  # fmt: skip


def _qwen2_vl(text: dict[str, Any], tiny: Tiny) -> transformers.PretrainedConfig:
    return transformers.Qwen2VLConfig(
        text_config={**text, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        vision_config={
            "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
            "spatial_merge_size": 2,
        },
        vision_start_token_id=tiny.processor.tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tiny.processor.tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        **tiny.config,
    )  # fmt: skip


CONFIGS = {"llava": _llava, "idefics3": _idefics3, "qwen2_vl": _qwen2_vl}


def drawn(kind: str, folder: Path) -> Seeing:
    """Always the same one: its numbers are random, but not by chance."""
    tiny = written(kind, folder)
    tokenizer = tiny.processor.tokenizer
    text = _TEXT | {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }
    config = CONFIGS[kind](
        text, Tiny(tiny.folder, {k: v for k, v in tiny.config.items() if k != "model_type"}, tiny.processor)
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.3 if parameter.ndim == 1 else 0.2)
    model.save_pretrained(folder)
    return Seeing(tiny, model)
