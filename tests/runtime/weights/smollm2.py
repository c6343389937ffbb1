"""SmolLM2 in transformers: as it reads the GGUF file itself, which takes 17 s, and of the weights that our reader finds there, 2 s.
test_gguf_checkpoint.py shows that both are the same."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import transformers

from runtime.weights.fetch import DEFAULT_MODEL, ModelFiles, resolve
from runtime.weights.gguf_checkpoint import GgufCheckpoint


@cache
def files() -> ModelFiles:
    return resolve(DEFAULT_MODEL, None, lambda progress: None)


@cache
def read_by_transformers() -> transformers.PreTrainedModel:
    path = files().path
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@cache
def theirs() -> transformers.PreTrainedModel:
    checkpoint = GgufCheckpoint(files().gguf)
    weights = {}
    for name, shape in checkpoint.shapes.items():
        out = np.empty(shape, np.float32)
        checkpoint.read_rows(name, 0, out)
        weights[name] = torch.from_numpy(out)
    config = transformers.LlamaConfig(**files().config)
    return transformers.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32
    ).eval()
