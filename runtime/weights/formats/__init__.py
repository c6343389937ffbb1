"""Quantised formats of Hugging Face checkpoints, one scheme per file. The `quant_method` in config.json selects the scheme.

Only this folder reads `quantization_config`. A file's dict SCHEMES maps each `quant_method` to a callable, mostly a class. It
creates a `Scheme` from that config section, which contains parameters such as block size and bits, or raises `UnreadScheme`. Files
are discovered, not listed. GGUF blocks are single tensors and need no scheme (dequantize.py)."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from runtime.weights.formats.fp8 import Fp8
from runtime.weights.formats.mxfp4 import Mxfp4
from runtime.weights.formats.scheme import Scheme, UnreadScheme

MakeScheme = Callable[[Mapping[str, Any]], Scheme]


def _schemes() -> Iterator[tuple[str, MakeScheme]]:
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__, f"{__name__}.")):
        yield from getattr(import_module(name), "SCHEMES", {}).items()


SCHEMES: Mapping[str, MakeScheme] = dict(_schemes())  # by `quant_method`
UNCONFIGURED: tuple[Scheme, ...] = (Mxfp4({}), Fp8({}))  # recognised by their tensors, for any config


def quant_method(config: Mapping[str, Any]) -> str | None:
    """Return the quantisation method of a Hugging Face config, or None."""
    section = config.get("quantization_config")
    return None if section is None else str(section.get("quant_method") if isinstance(section, Mapping) else section)


def schemes(config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Return the schemes for a checkpoint with this config. Later schemes take precedence. If the config's method is unsupported,
    only the schemes without a config are returned."""
    section, method = config.get("quantization_config"), quant_method(config)
    if not isinstance(section, Mapping) or refusal(config) is not None:
        return UNCONFIGURED
    return (*UNCONFIGURED, SCHEMES[str(method)](section))


def refusal(config: Mapping[str, Any]) -> str | None:
    """Return the reason why the config's quantised weights cannot be read; None if they can, or if the weights are not
    quantised."""
    section, method = config.get("quantization_config"), quant_method(config)
    if method is None:
        return None
    why = f"weights quantised with {method!r} are not supported"
    if method not in SCHEMES:
        return why
    try:
        SCHEMES[method](section if isinstance(section, Mapping) else {})
    except UnreadScheme as error:
        return f"{why} {error}"
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        return f"{why}: its section of the config is not understood ({error})"
    return None
