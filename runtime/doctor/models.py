"""List of models that can be served by name, built in or in the hub's cache, and of supported architectures.

Nothing is downloaded, and no weights are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runtime.models.implementation import supported
from runtime.models.registry import architecture_of
from runtime.models.spec.model import UnsupportedModel
from runtime.weights.builtin import BUILTIN_MODELS, cache_folder


def models() -> dict[str, Any]:
    """Plain data, ready for JSON. `bytes`: of the weights, as they are stored; `here`: whether they need not be fetched.
    `architectures`: by what computes each, "native" or "transformers"."""
    by_architecture = dict(supported())
    return {
        "built_in": [
            {"name": name, "bytes": model.file_bytes, "here": (cache_folder() / "models" / name / model.file_name).exists()}
            for name, model in BUILTIN_MODELS.items()
        ],
        "hub_folder": str(hub_folder()),
        "hub": [*_of_the_hub(hub_folder(), by_architecture)],
        "architectures": by_architecture,
    }  # fmt: skip


def hub_folder() -> Path:
    """Return huggingface_hub's cache folder, by its own variables. The package is not imported: that takes a third of a
    second."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _of_the_hub(folder: Path, by_architecture: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the models whose config.json and safetensors are in the cache, in the snapshot that a name without revision
    means."""
    for repository in sorted(folder.glob("models--*")):
        name = repository.name.removeprefix("models--").replace("--", "/")
        try:
            snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
            architecture = architecture_of(json.loads((snapshot / "config.json").read_bytes()))
            num_bytes = sum(file.stat().st_size for file in snapshot.glob("*.safetensors"))
        except (OSError, ValueError, UnsupportedModel):
            continue  # of another kind, or fetched in part
        if num_bytes:
            computed_by = by_architecture.get(architecture)
            yield {"name": name, "bytes": num_bytes, "architecture": architecture, "computed_by": computed_by}
