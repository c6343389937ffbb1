"""Inspection of an adapter's folder, for `oneloop lora inspect`: lists its contents and checks whether it fits a model."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from runtime.lora.peft_config import PeftConfig
from runtime.lora.peft_folder import WEIGHTS, Fingerprint, module_of, read_adapter
from runtime.lora.targets import targets_of
from runtime.models.implementation import describe
from runtime.models.spec.decoder import DecoderSpec
from runtime.weights.fetch import resolve
from runtime.weights.rules import WeightsError
from runtime.weights.safetensors_file import SafetensorsCheckpoint


def inspect(path: str, model: str | None, max_rank: int) -> dict[str, Any]:
    """Return facts about the adapter in folder `path` as JSON data. `refusal` in the result: reason why `model` cannot serve the
    adapter, or None. If `model` is None: reason why no model can.

    Raises WeightsError if there is no adapter to read, or the model cannot be found."""
    folder = Path(path)
    Fingerprint.of(folder)
    files = SafetensorsCheckpoint(folder, (), single=WEIGHTS)
    try:
        shapes, types = dict(files.shapes), dict(files.types)
    finally:
        files.close()
    found: dict[str, Any] = {
        "path": str(folder),
        "num_parameters": sum(map(prod, shapes.values())),
        "dtypes": sorted(set(types.values())),
        "refusal": None,
    }
    try:
        config = PeftConfig.read(folder)
        found |= {
            "base": config.base, "rank": config.rank, "alpha": config.alpha, "rslora": config.rslora,
            "rank_pattern": dict(config.rank_pattern), "alpha_pattern": dict(config.alpha_pattern),
            "targets": _targets(folder, shapes),
        }  # fmt: skip
        if model is not None:
            found |= _fit(folder, model, max_rank)
    except WeightsError as error:
        found["refusal"] = str(error)
    return found


def _targets(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return how many modules the adapter changes, by the last component of their names."""
    modules = {module_of(folder, name) for name in shapes}
    kinds = [module.rpartition(".")[2] for module in sorted(modules)]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def _fit(folder: Path, model: str, max_rank: int) -> dict[str, Any]:
    """Return facts about the adapter for `model`. Raises WeightsError if it does not fit the model."""
    spec = describe(resolve(model, None, lambda progress: None, load_format="dummy").config, "auto")
    if not isinstance(spec, DecoderSpec):
        raise WeightsError(f"{spec.architecture} runs through transformers, which does not support adapters")
    weights = read_adapter(folder, targets_of(spec), max_rank)
    return {"fits": model, "max_rank": weights.max_rank, "num_layers_adapted": len(weights.parts)}
