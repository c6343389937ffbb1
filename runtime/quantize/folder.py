"""Writer of a model folder in Hugging Face's format, tensor by tensor: shards of a few gigabytes, their index, and a config.

The folder is written under a temporary name and renamed when it is complete, so it never exists incomplete under its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import save_file
from torch import Tensor

from runtime.weights.rules import WeightsError
from runtime.weights.safetensors_file import INDEX

SHARD_BYTES = 4 << 30


class ModelFolder:
    """Context manager that writes a model folder. If its block raises, the unfinished folder is removed. Raises WeightsError
    if the path already exists and is not an empty folder."""

    def __init__(self, path: Path, shard_bytes: int = SHARD_BYTES) -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise WeightsError(f"{path} already exists: name a new folder")
        self._path, self._shard_bytes = path, shard_bytes
        self._growing = path.with_name(f".{path.name}.unfinished")
        self._waiting: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self.nbytes = 0

    def __enter__(self) -> Self:
        try:
            shutil.rmtree(self._growing, ignore_errors=True)
            self._growing.mkdir(parents=True)
        except OSError as error:
            raise WeightsError(f"{self._path} cannot be written: {error.strerror or error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._growing, ignore_errors=True)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        waiting = sum(each.nbytes for each in self._waiting.values())
        new = sum(each.nbytes for each in tensors.values())
        if self._waiting and waiting + new > self._shard_bytes:
            self._write_shard()
        self._waiting |= {name: each.contiguous() for name, each in tensors.items()}
        self.nbytes += new

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        (self._growing / name).write_text(json.dumps(value, indent=2) + "\n")

    def copy(self, files: Iterable[Path]) -> None:
        for file in files:
            shutil.copyfile(file, self._growing / file.name)

    def _write_shard(self) -> None:
        path = self._growing / f"{len(self._shards)}.safetensors"
        save_file(self._waiting, path, metadata={"format": "pt"})
        self._shards.append(list(self._waiting))
        self._waiting = {}

    def _finish(self) -> None:
        self._write_shard()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            called = "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
            (self._growing / f"{number}.safetensors").rename(self._growing / called)
            weight_map |= dict.fromkeys(names, called)
        if count > 1:
            self.write_json(INDEX, {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map})
        if self._path.exists():
            self._path.rmdir()  # it is empty
        self._growing.rename(self._path)
