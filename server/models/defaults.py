"""Sampling defaults of a loaded model: the SamplingParams of a request that sets no sampling fields."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.api import SamplingParams
from server.http.errors import clip
from server.http.wire_fields import AdvisedFields

logger = logging.getLogger("oneloop.load")


def sampling_defaults(generation_config: Mapping[str, Any] | None = None) -> SamplingParams:
    """Return the engine's defaults, overridden by values in `generation_config`, the model's generation_config.json.

    An invalid value is logged and left out, so that no request fails because of it."""
    chosen: dict[str, Any] = {}
    for name in AdvisedFields.__struct_fields__:
        value = (generation_config or {}).get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # transformers writes counts as floats, too
        try:
            read = getattr(msgspec.convert({name: value}, AdvisedFields), name)
        except msgspec.ValidationError:
            logger.warning("generation_config: %s=%s is out of range and ignored", name, clip(value))
            continue
        if read is not None:
            chosen[name] = read
    return SamplingParams(max_tokens=0, **chosen)
