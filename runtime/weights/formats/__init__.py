"""Quantised formats of Hugging Face checkpoints, one scheme a file, found by what a config calls its `quant_method`.

The one place that reads `quantization_config`. A file here that has a SCHEME is found; nothing else lists it. GGUF's blocks are
single tensors and need no scheme (dequantize.py)."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from runtime.weights.formats.scheme import Scheme


def _schemes() -> Iterator[Scheme]:
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__, f"{__name__}.")):
        scheme: Scheme | None = getattr(import_module(name), "SCHEME", None)
        if scheme is not None:
            yield scheme


SCHEMES: tuple[Scheme, ...] = tuple(_schemes())  # each finds its own tensors, whatever the config says


def quant_method(config: Mapping[str, Any]) -> str | None:
    """What a Hugging Face config says its weights are quantised with, None where they are not."""
    section = config.get("quantization_config")
    return None if section is None else str(section.get("quant_method") if isinstance(section, Mapping) else section)


def unread_method(config: Mapping[str, Any]) -> str | None:
    """The same, if no scheme here reads it."""
    method = quant_method(config)
    return None if method in {scheme.quant_method for scheme in SCHEMES} else method
