"""Random adapters as PEFT writes them, and what they make of transformers' own model: base weights with the products added."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from runtime.lora.targets import Targets, find, find_embedding, find_stacks

Deltas = Mapping[str, torch.Tensor]  # what is added to each module's weight, [out, in]


def linear_modules(model, targets: Targets) -> dict[str, torch.nn.Module]:
    """Those of transformers' model that are targets of ours, by name; not a head that is the embedding, too."""
    kinds, tied = (torch.nn.Linear, Conv1D), model.get_output_embeddings() if is_tied(model) else None
    return {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, kinds) and each is not tied and find(targets, name)
    }


def embeddings(model, targets: Targets) -> dict[str, torch.nn.Module]:
    """The embedding of transformers' model, by name."""
    return {name: each for name, each in model.named_modules() if find_embedding(targets, name)}


def is_tied(model) -> bool:
    """Whether its head and its embedding are one parameter."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def expert_parameters(model, targets: Targets) -> dict[str, list[str]]:
    """Modules of transformers' model that hold the matrices of experts, with the names of the parameters that do."""
    found = {}
    for name, module in model.named_modules():
        names = {stack.parameter for stack in find_stacks(targets, name)}
        if own := [each for each, _ in module.named_parameters(recurse=False) if each in names]:
            found[name] = own
    return found


def write_adapter(
    folder: Path, modules: Mapping[str, torch.nn.Module], seed: int, *, rank: int = 4, spread: float = 0.15,
    dtype: torch.dtype = torch.float32, experts: Mapping[str, Mapping[str, torch.Tensor]] = MappingProxyType({}),
    **config: object,
) -> Deltas:  # fmt: skip
    """An adapter of all `modules`, each with other numbers, in `folder`; what it adds to their weights. `experts`: parameters
    [experts, out, in] by name, of modules that PEFT wraps once for each of them."""
    random, tensors, deltas = torch.Generator().manual_seed(seed), {}, {}
    alpha = 2.0 * rank

    def halves(name: str, out: int, into: int, count: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        a = (torch.randn(rank * count, into, generator=random) * spread).to(dtype)
        b = (torch.randn(out, rank * count, generator=random) * spread).to(dtype)
        tensors.update({f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b})
        return a.float(), b.float()

    for name, module in modules.items():
        out, into = module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape
        if isinstance(module, torch.nn.Embedding):
            a, b = halves(name, into, out)
            for half in "AB":
                stored = tensors.pop(f"base_model.model.{name}.lora_{half}.weight")
                tensors[f"base_model.model.{name}.lora_embedding_{half}"] = stored
            deltas[name] = alpha / rank * (b @ a).T
            continue
        a, b = halves(name, out, into)
        deltas[name] = alpha / rank * b @ a
    for name, parameters in experts.items():
        wrapped = name + ".base_layer" * (len(parameters) - 1)
        for parameter, values in parameters.items():
            count, out, into = values.shape
            a, b = halves(wrapped, out, into, count)
            # PEFT: ParamWrapper.get_delta_weight
            product = torch.einsum("o r e, e r i -> e o i", b.reshape(out, rank, count), a.reshape(count, rank, into))
            deltas[f"{name}.{parameter}"] = alpha / rank * product
            wrapped = wrapped.removesuffix(".base_layer")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted(modules), "bias": "none"}
    given["target_parameters"] = [f"{name}.{parameter}" for name, own in experts.items() for parameter in own]
    (folder / "adapter_config.json").write_text(json.dumps(given | config))
    return deltas


def write_apart(folder: Path, model, targets: Targets, seed: int, rank: int = 3) -> Deltas:
    """An adapter of all matrices of all experts, each a module by itself, as checkpoints of transformers 4 have them."""
    random, tensors, deltas = torch.Generator().manual_seed(seed), {}, {}
    places = {
        (target.linear.name, target.start): (f"{module}.{stack.parameter}", number)
        for module, stacks in targets.stacks.items()
        for stack in stacks
        for number, target in enumerate(stack.targets)
        if module in expert_parameters(model, targets)
    }
    shapes = {name: values.shape for name, values in model.named_parameters()}
    for name, target in targets.modules.items():
        if not target.linear.stack or ".experts." not in name:
            continue
        a, b = (
            torch.randn(size, generator=random) * 0.2
            for size in ((rank, target.linear.in_features), (target.rows, rank))
        )
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        parameter, number = next(
            place for (linear, start), place in places.items() if linear == target.linear.name and start <= target.start
        )
        rows = deltas.setdefault(parameter, torch.zeros(shapes[parameter]))[number]
        rows[target.start : target.start + target.rows] = 2.0 * b @ a
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))
    return deltas


@contextmanager
def merged(model, deltas: Deltas) -> Iterator[None]:
    """Transformers' model with an adapter in its weights, inside the block."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    kept = []
    for name, delta in deltas.items():
        module = modules.get(name)
        weight = parameters[name] if module is None else module.weight
        kept.append((weight, weight.data.clone()))
        weight.data += delta if weight.shape == delta.shape and not isinstance(module, Conv1D) else delta.mT
    try:
        yield
    finally:
        for weight, values in kept:
            weight.data.copy_(values)
