"""Registry of model families: maps an architecture name in config.json to the family that describes it.

A family is a file of `runtime.models.families`, whose dict ARCHITECTURES maps names to functions that read a config. The files are
discovered, not listed. Other packages add families through entry points of the group `oneloop.models`. Each entry point is a module
like those files, or its ARCHITECTURES. Entry points are loaded only if an option names them."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType
from typing import Any

from runtime.config import PlanError
from runtime.models import families
from runtime.models.read.causal_heads import both_ways, causal_with_other_head
from runtime.models.read.encoder import with_dimensions
from runtime.models.read.hf_config import HfConfig
from runtime.models.read.mtp import MTP
from runtime.models.spec.decoder import DecoderSpec
from runtime.models.spec.draft_head import DraftHeadSpec
from runtime.models.spec.model import UnsupportedModel
from runtime.torch_import import import_all_of_torch
from runtime.weights.formats import refusal

Family = Callable[[HfConfig], DecoderSpec]
PLUGINS = "oneloop.models"


_families: dict[str, Family] = {}
_mtp: dict[str, MTP] = {}  # architectures with MTP layers
FAMILIES: Mapping[str, Family] = MappingProxyType(_families)


def register(architectures: Mapping[str, Family], origin: str) -> None:
    """Register families of another package. `origin`: name of the package, for error messages.

    If another family already describes one of `architectures`, raises ValueError and registers none."""
    for name, family in architectures.items():
        if _families.get(name, family) is not family:
            raise ValueError(f"{origin} serves {name}, which {_families[name].__module__} already does")
    _families.update(architectures)


def add_plugins(names: Iterable[str]) -> None:
    """Register the model families of the installed packages with entry points `names`. Raises PlanError, with the option's name in
    its message, if there is no such entry point."""
    from importlib.metadata import entry_points  # its import takes as long as that of all families

    for name in names:
        found = entry_points(group=PLUGINS, name=name)
        if not found:
            there = ", ".join(sorted(entry_points(group=PLUGINS).names)) or "none"
            raise PlanError(f"model-plugin {name!r} is not an installed package; installed: {there}")
        import_all_of_torch()  # its use of torch is unknown
        for point in found:
            _add(name, point.load())


def _add(name: str, brought: Any) -> None:
    architectures = getattr(brought, "ARCHITECTURES", brought)
    if not isinstance(architectures, Mapping) or not all(
        isinstance(key, str) and callable(family) for key, family in architectures.items()
    ):
        raise PlanError(f"model-plugin {name!r} has no ARCHITECTURES, a mapping of names to functions of a config")
    try:
        register(architectures, f"model-plugin {name!r}")
    except ValueError as error:
        raise PlanError(str(error)) from error


def _discover() -> None:
    found = sorted(module.name for module in pkgutil.iter_modules(families.__path__, f"{families.__name__}."))
    for name in found:
        module = import_module(name)
        register(getattr(module, "ARCHITECTURES", {}), name)
        _mtp.update(getattr(module, "MTP", {}))


_discover()


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the first architecture that `config` names. Raises UnsupportedModel if it names none."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise UnsupportedModel("config: architectures names no model class")
    return architectures[0]


def is_described(architecture: str) -> bool:
    """Return whether a family describes the architecture, directly or with another head (`causal_with_other_head`)."""
    return architecture in FAMILIES or causal_with_other_head(architecture, FAMILIES) is not None


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Return the spec of a Hugging Face config. Raises UnsupportedModel if no family describes it, or if it uses unsupported
    options."""
    name = architecture_of(config)
    family = FAMILIES.get(name) or causal_with_other_head(name, FAMILIES)
    if family is None:
        near = difflib.get_close_matches(name, FAMILIES, n=1, cutoff=0.0)[0]
        raise UnsupportedModel(
            f"architecture {name} is not supported natively; the nearest that is: {near} (python -m server models lists all)"
        )
    if (why := refusal(config)) is not None:
        raise UnsupportedModel(f"{why}; use a GGUF file or the original")
    hf_config = HfConfig(config)
    spec = family(hf_config)
    return both_ways(replace(spec, pooler=with_dimensions(spec.pooler, hf_config)), hf_config)


def mtp_from_config(config: Mapping[str, Any], spec: DecoderSpec) -> DraftHeadSpec:
    """Return the spec of the MTP module in a model's own checkpoint. `spec`: result of `spec_from_config`. Raises UnsupportedModel
    if the model has none."""
    name = architecture_of(config)
    if name not in _mtp:
        raise UnsupportedModel(f"method mtp does not support {name}; it supports {', '.join(sorted(_mtp))}")
    return _mtp[name](HfConfig(config), spec)
