"""Random adapters as PEFT writes them, and what they make of transformers' own model: base weights with the products added."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from runtime.lora.targets import Target, find

Deltas = Mapping[str, torch.Tensor]  # what is added to each module's weight, [out, in]


def linear_modules(model, targets: Mapping[str, Target]) -> dict[str, torch.nn.Module]:
    """Those of transformers' model that are targets of ours, by name."""
    kinds = (torch.nn.Linear, Conv1D)
    return {name: each for name, each in model.named_modules() if isinstance(each, kinds) and find(targets, name)}


def write_adapter(
    folder: Path, modules: Mapping[str, torch.nn.Module], seed: int, *, rank: int = 4, spread: float = 0.15,
    dtype: torch.dtype = torch.float32, **config: object,
) -> Deltas:  # fmt: skip
    """An adapter of all `modules`, each with other numbers, in `folder`; what it adds to their weights."""
    random, tensors, deltas = torch.Generator().manual_seed(seed), {}, {}
    alpha = 2.0 * rank
    for name, module in modules.items():
        out, into = module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape
        a = (torch.randn(rank, into, generator=random) * spread).to(dtype)
        b = (torch.randn(out, rank, generator=random) * spread).to(dtype)
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        deltas[name] = alpha / rank * b.float() @ a.float()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(given | config))
    return deltas


@contextmanager
def merged(model, deltas: Deltas) -> Iterator[None]:
    """Transformers' model with an adapter in its weights, inside the block."""
    modules = dict(model.named_modules())

    kept = {name: modules[name].weight.data.clone() for name in deltas}
    for name, delta in deltas.items():
        modules[name].weight.data += delta.T if isinstance(modules[name], Conv1D) else delta
    try:
        yield
    finally:
        for name, weight in kept.items():
            modules[name].weight.data.copy_(weight)
