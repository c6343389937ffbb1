"""Catalogue of models: short names (`qwen3-0.6b`, `qwen3-0.6b:fp8`), and where the files are. The data is in catalogue.toml.

Uses the standard library only. Sizes are estimates for choosing a model; the loader measures the files."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from runtime.weights.builtin import WheelModel

Task = Literal["generate", "embed", "rerank", "transcribe"]
TASKS: tuple[str, ...] = get_args(Task)

# Bytes per parameter, including scales and layers in 16 bits. GGUF: from llama.cpp's table of bits per weight.
BYTES_PER_PARAMETER: Mapping[str, float] = {
    "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.05, "q8_0": 1.0625, "q4_k_m": 0.61, "q4_1": 0.625, "awq": 0.7, "mxfp4": 0.56,
}  # fmt: skip
_KV_ELEMENT_BYTES = 2
_NEAREST, _NEARNESS = 3, 0.5


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """Model with a short name. `hub`: hub id of its files in `format`; None if a package has them, described by `wheel`.
    `quantizations`: hub ids of quantised files, by tag. `kv`: (layers, KV heads, head size); empty for models without a KV
    cache."""

    name: str
    license: str
    parameters: int
    task: Task = "generate"
    hub: str | None = None
    wheel: WheelModel | None = None
    format: str = "bf16"
    bytes: int | None = None
    active_parameters: int | None = None
    kv: tuple[int, ...] = ()
    quantizations: Mapping[str, str] = field(default_factory=dict)

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the model's available formats, the default one first."""
        return (self.format, *self.quantizations)

    def weights_bytes(self, kind: str) -> int:
        """Return the approximate size of the weights in format `kind`, in bytes."""
        if kind == self.format and self.wheel is not None:
            return self.wheel.file_bytes
        if kind == self.format and self.bytes is not None:
            return self.bytes
        return int(self.parameters * BYTES_PER_PARAMETER[kind])

    def token_bytes(self, kind: str) -> int:
        """Return the bytes of weights, in format `kind`, that are read to decode one token of one sequence."""
        active = self.parameters if self.active_parameters is None else self.active_parameters
        return self.weights_bytes(kind) * active // self.parameters

    @property
    def kv_token_bytes(self) -> int:
        """Size of one token's keys and values in 16 bits, in bytes; 0 without a KV cache."""
        if not self.kv:
            return 0
        layers, heads, size = self.kv
        return 2 * layers * heads * size * _KV_ELEMENT_BYTES


@cache
def catalogue() -> Mapping[str, CatalogueModel]:
    """Return the models by name, in the order of the file."""
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: _model(name, entry) for name, entry in entries.items()}


def _model(name: str, entry: Mapping[str, Any]) -> CatalogueModel:
    fields = {**entry, "kv": tuple(entry.get("kv", ()))}
    if "wheel" in entry:
        fields["wheel"] = WheelModel(**{**entry["wheel"], "beside": tuple(entry["wheel"].get("beside", ()))})
    return CatalogueModel(name=name, **fields)


def find(name: str) -> tuple[CatalogueModel, str] | None:
    """Return (model, format) for a name such as qwen3-0.6b or qwen3-0.6b:fp8; None if it is not in the catalogue. The tag `:latest`
    means the model's default format, as in Ollama."""
    word, _, tag = name.lower().partition(":")
    model = catalogue().get(word)
    if model is None:
        return None
    kind = model.format if tag in ("", "latest") else tag
    return (model, kind) if kind in model.formats else None


def wheel_of(name: str) -> WheelModel | None:
    """Return the package of the model called `name`, or None."""
    found = find(name)
    return None if found is None else found[0].wheel


def hub_id(name: str) -> str:
    """Return the hub id of the catalogue model `name`. Other names are returned unchanged."""
    found = find(name)
    if found is None:
        return name
    model, kind = found
    return model.quantizations.get(kind) or model.hub or name


def nearest(name: str) -> str:
    """Return the end of an error message with the catalogue names closest to `name`, or "". For an unknown tag of a known model, it
    lists the available tags."""
    word = name.lower().rpartition("/")[2].partition(":")[0]
    if (model := catalogue().get(word)) is not None and "/" not in name:
        return f"; {word} comes as {', '.join(model.formats)}"
    close = difflib.get_close_matches(word, catalogue(), n=_NEAREST, cutoff=_NEARNESS)
    if word:  # a truncated name matches names that start with it
        close = [*dict.fromkeys([*(each for each in catalogue() if each.startswith(word)), *close])][:_NEAREST]
    return f"; did you mean {' or '.join(close)}?" if close else ""
