"""Checkpoints full of random numbers, norms and biases too, of whatever a config describes: no model of transformers is built."""

from __future__ import annotations

import torch
import transformers
from safetensors.torch import save_file

from runtime.models.registry import spec_from_config
from runtime.weights.fetch import ModelFiles, resolve
from runtime.weights.rules import stored_as


def checkpoint(folder, config: transformers.PretrainedConfig, seed: int, spread: float = 0.2) -> ModelFiles:
    """Its files, written into the folder."""
    folder.mkdir(exist_ok=True)
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    files = resolve(str(folder), None, lambda progress: None)
    spec = spec_from_config(files.config)
    shapes = {shard.name: shard.shape for each in spec.parameters() for shard in stored_as(each, spec.rules).shards}
    random = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=random) * spread for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return files
