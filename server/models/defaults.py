"""SamplingDefaults: how a loaded model's tokens are chosen where a request does not say."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from server.http.errors import clip

logger = logging.getLogger("oneloop.load")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that says nothing gets."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Self:
        """The model's own defaults; one that makes no sense is left out and logged, since no request is to blame."""
        limits = {
            "temperature": (0, 2),
            "top_p": (sys.float_info.min, 1),  # above 0
            "top_k": (-1, 2**31),
            "min_p": (0, 1),
            "repetition_penalty": (0.01, 100),
        }
        chosen: dict[str, Any] = {}
        for spec in dataclasses.fields(cls):
            value = config.get(spec.name)
            if value is None:
                continue
            low, high = limits[spec.name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                logger.warning("generation_config: %s=%s is out of range and ignored", spec.name, clip(value))
                continue
            chosen[spec.name] = int(value) if spec.name == "top_k" else float(value)
        return cls(**chosen)
