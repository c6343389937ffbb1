"""Quantised formats of Hugging Face checkpoints, one scheme a file, found by what a config calls its `quant_method`.

The one place that reads `quantization_config`. A file here that has a SCHEME is found; nothing else lists it: a callable, mostly
the class, that makes a `Scheme` of that section, where a format's parameters stand (block sizes, bits). GGUF's blocks are
single tensors and need no scheme (dequantize.py)."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from runtime.weights.formats.scheme import Scheme

MakeScheme = Callable[[Mapping[str, Any]], Scheme]


def _schemes() -> Iterator[tuple[str, MakeScheme]]:
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__, f"{__name__}.")):
        make: MakeScheme | None = getattr(import_module(name), "SCHEME", None)
        if make is not None:
            yield make({}).quant_method, make


SCHEMES: Mapping[str, MakeScheme] = dict(_schemes())  # by `quant_method`


def quant_method(config: Mapping[str, Any]) -> str | None:
    """What a Hugging Face config says its weights are quantised with, None where they are not."""
    section = config.get("quantization_config")
    return None if section is None else str(section.get("quant_method") if isinstance(section, Mapping) else section)


def schemes(config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """All schemes, with the parameters of a Hugging Face config where they are meant; each finds its own tensors, whatever the
    config says."""
    section, method = config.get("quantization_config"), quant_method(config)
    return tuple(make(section if name == method and section else {}) for name, make in SCHEMES.items())


UNCONFIGURED = schemes({})


def unread_method(config: Mapping[str, Any]) -> str | None:
    """The same, if no scheme here reads it."""
    method = quant_method(config)
    return None if method in SCHEMES else method
