"""Quantised formats of Hugging Face checkpoints, one scheme a file, found by what a config calls its `quant_method`.

The one place that reads `quantization_config`. GGUF's blocks are single tensors and need no scheme (dequantize.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.weights.formats.mxfp4 import Mxfp4
from runtime.weights.formats.scheme import Scheme

SCHEMES: tuple[Scheme, ...] = (Mxfp4(),)  # each finds its own tensors, whatever the config says


def quant_method(config: Mapping[str, Any]) -> str | None:
    """What a Hugging Face config says its weights are quantised with, None where they are not."""
    section = config.get("quantization_config")
    return None if section is None else str(section.get("quant_method") if isinstance(section, Mapping) else section)


def unread_method(config: Mapping[str, Any]) -> str | None:
    """The same, if no scheme here reads it."""
    method = quant_method(config)
    return None if method in {scheme.quant_method for scheme in SCHEMES} else method
