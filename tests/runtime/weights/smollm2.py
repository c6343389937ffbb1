"""SmolLM2 as transformers loads it from the same GGUF file: slow, so once a session, whoever asks."""

from __future__ import annotations

from functools import cache

import torch
import transformers

from runtime.weights.fetch import DEFAULT_MODEL, ModelFiles, resolve


@cache
def files() -> ModelFiles:
    return resolve(DEFAULT_MODEL, None, lambda progress: None)


@cache
def theirs() -> transformers.PreTrainedModel:
    path = files().path
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
