"""Reader of PEFT's adapter_config.json: rank and scale of each adapted module. Unsupported features are rejected by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from runtime.weights.rules import WeightsError

N = TypeVar("N", int, float)

CONFIG = "adapter_config.json"
_MAX_BYTES = 1 << 20
# Initialisations that change the base weights, so an adapter trained with them does not fit the original base weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Fields of adapter_config.json. `rank_pattern`, `alpha_pattern`: values for modules by a pattern of their full name or of
    its last components. `base`: name of the base model."""

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    base: str = ""

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """Read the config in a PEFT folder. Raises WeightsError if it is unreadable or invalid, or if it uses an unsupported
        feature."""
        path = folder / CONFIG
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise WeightsError(f"{path}: more than {_MAX_BYTES} bytes are too many for a config")
            given = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise WeightsError(f"{path}: no adapter config can be read: {error}") from error
        if not isinstance(given, dict):
            raise WeightsError(f"{path}: not a JSON object")
        try:
            return cls._of(given)
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from error

    @classmethod
    def _of(cls, given: Mapping[str, Any]) -> PeftConfig:
        kind = given.get("peft_type", "LORA")
        if kind != "LORA":
            raise WeightsError(f"peft_type {kind!r} is not served, only LORA")
        for name, why in {
            "use_dora": "DoRA is not served: its magnitudes depend on the base weight; merge it into the model",
            "use_qalora": "QALoRA is not served",
            "use_bdlora": "block-diagonal LoRA is not served",
            "arrow_config": "Arrow routes between adapters, which is not served",
            "alora_invocation_tokens": "an activated LoRA begins at a token of the prompt, which is not served",
            "layer_replication": "layers that are used several times are not served",
            "trainable_token_indices": "trained token embeddings are not served",
            "modules_to_save": "whole modules beside the adapter are not served",
        }.items():
            if given.get(name):
                raise WeightsError(f"{name} = {json.dumps(given[name])}: {why}")
        if given.get("bias", "none") != "none" or given.get("lora_bias"):
            raise WeightsError("bias: adapters with biases are not served")
        start = given.get("init_lora_weights", True)
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            raise WeightsError(
                f"init_lora_weights = {start!r}: it changes the base weights; convert it to a plain adapter "
                "(path_initial_model_for_weight_conversion of PEFT's save_pretrained)"
            )
        return cls(
            _count(given, "r", 8),
            _number("lora_alpha", given.get("lora_alpha", 8)),
            bool(given.get("use_rslora", False)),
            {key: _count(pattern, key, 0) for pattern in [_pattern(given, "rank_pattern")] for key in pattern},
            {key: _number(key, value) for key, value in _pattern(given, "alpha_pattern").items()},
            str(given.get("base_model_name_or_path") or ""),
        )

    def rank_of(self, module: str) -> int:
        return _matching(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor by which the product of the module's A and B matrices is multiplied."""
        rank = self.rank_of(module)
        alpha = _matching(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _matching(pattern: Mapping[str, N], module: str, default: N) -> N:
    """Return the value of the first pattern (a regular expression) that matches the last components of `module`, as in PEFT."""
    for key, value in pattern.items():
        if re.match(rf"(?:.*\.)?(?:{key})$", module):
            return value
    return default


def _pattern(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    pattern = given.get(name) or {}
    if not isinstance(pattern, dict):
        raise WeightsError(f"{name} is not an object")
    for key in pattern:
        try:
            re.compile(key)
        except re.error as error:
            raise WeightsError(f"{name}: {key!r} is not a regular expression: {error}") from error
    return pattern


def _count(given: Mapping[str, Any], name: str, default: int) -> int:
    value = given.get(name, default)
    if type(value) is not int or value < 1:
        raise WeightsError(f"{name} = {value!r} is not a rank: 1 or more")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WeightsError(f"{name} = {value!r} is not a number")
    return float(value)
